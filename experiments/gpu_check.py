"""Does everything work on this GPU, and what is it worth there? One command, no network, a limit on its minutes.

    python -m experiments.gpu_check                                          # on any machine with CUDA
    python -m experiments.gpu_check --model "$(layerskip reference)"         # also on a checkpoint
    python -m experiments.gpu_check --device cpu                             # the same steps on a tiny geometry

Exactness first (`exactness_check.py`), then speed on random weights of real shapes: plain decoding pass by pass and as
CUDA graphs, an exit with planted agreement, passes and drafts by width, batch 1 and 8. A stage for which no time or
memory is left is named as skipped. The last line is one JSON document, which is also appended to the results file.
Exit code 1: something was not exact or failed; 2: there is no such device.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import layerskip
from experiments.arms import Arm, our_arm, transformers_arm
from experiments.bench import PROMPTS, benchmark, explanation, weight_rate
from experiments.conditions import conditions
from experiments.exactness_check import check_family, moved, reuse
from experiments.measuring import DRAFT_IDS, pass_costs
from experiments.report import append, arm_table
from experiments.subjects import Subject, random_prompts, read_prompts
from layerskip.cli.parser import Parser, positive
from layerskip.models.inspection import inspect_model
from layerskip.models.synthetic import GEOMETRIES
from tests.tiny_models import FAMILY_NAMES, tiny_model

__all__ = ["main"]

AGREEMENT = 0.9  # planted; what acceptance it gives is measured
BATCHES = (1, 8)
CONTEXT, NEW_TOKENS, CALLS = 200, 64, 2
SPEED_S = 75  # that must be left for one model at one batch size
HEADROOM = 1.5  # of the weights' size that must be free: caches, graphs, and a prompt's pass


@dataclass
class Check:
    """The run: what is left of its time, and what became of its stages."""

    device: torch.device
    ends: float
    skipped: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        """Seconds until the limit."""
        return self.ends - time.monotonic()

    def stage(self, name: str, needs_s: float, run: Callable[[], Any], obstacle: str | None = None) -> Any:
        """The outcome of `run`, or None if it was skipped or failed, which is noted and does not end the check.

        Args:
            needs_s: it is not begun with less time left.
            obstacle: why it cannot be run anyway.
        """
        if obstacle is None and self.left_s < needs_s:
            obstacle = f"{max(0.0, self.left_s):.0f} s left, {needs_s:.0f} s needed"
        if obstacle is not None:
            self.skipped[name] = obstacle
            return None
        print(f"… {name} ({self.left_s:.0f} s left)", file=sys.stderr, flush=True)
        try:
            return run()
        except Exception as error:
            traceback.print_exc()
            self.failures.append(f"{name}: {type(error).__name__}: {error}")
            return None
        finally:
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()


def check_exactness(check: Check, families: Sequence[str]) -> dict[str, Any]:
    """Every one of `families` for which there is time."""
    document: dict[str, Any] = {"families": {}}
    for family in families:
        outcome = check.stage(f"exactness, {family}", 15, partial(check_family, family, check.device))
        if outcome is not None:
            document["families"][family] = asdict(outcome)
            check.failures += outcome.failures
    document["reuse"] = check.stage("re-use of recorded rounds", 10, partial(reuse, check.device))
    return document


def measure_geometry(check: Check, name: str, dtype: torch.dtype, with_transformers: bool) -> dict[str, Any]:
    """Speed on random weights; batch 1 first, since it explains the most."""
    layers = GEOMETRIES[name]["num_hidden_layers"]
    plan = layerskip.DraftPlan.exit(layers // 4)
    subject = Subject(name, dtype, check.device, AGREEMENT, layers // 4)
    model, document = subject.load(), {}
    few = replace(plan, draft_vocabulary=tuple(range(min(DRAFT_IDS, model.decoder.vocab_size))))
    for batch in BATCHES:
        arms = [
            our_arm("plain", model, None, cuda_graphs=True),
            our_arm("plain, eager", model, None, cuda_graphs=False),
            our_arm("exit", model, plan, "off", cuda_graphs=True),
            our_arm("exit, eager", model, plan, "off", cuda_graphs=False),
            our_arm("exit, governed", model, plan, "measured", cuda_graphs=True),
            our_arm(f"exit, {DRAFT_IDS:,} draft ids", model, few, "off", cuda_graphs=True),
        ]
        if with_transformers:
            arms.append(transformers_arm("hf-greedy", subject.load_for_transformers()))
        title = f"{name}, {str(dtype).removeprefix('torch.')}, batch {batch}"
        measured = check.stage(title, SPEED_S, partial(_measure, check, model, arms, batch, plan))
        if measured is not None:
            document[f"batch {batch}"] = measured
            _show(title, measured)
    return document


def _measure(check: Check, model: layerskip.Model, arms: list[Arm], batch: int, plan: layerskip.DraftPlan) -> Any:
    prompts = random_prompts(model.decoder.vocab_size, CONTEXT, CALLS, batch)
    document = benchmark(model, arms, prompts, NEW_TOKENS, plan, goes_on=lambda: check.left_s > 30)
    return {
        **document,
        "weights_eager": weight_rate(model, arms[1]),
        "pass_costs_eager": pass_costs(model.decoder, batch),
    }


def measure_checkpoint(check: Check, name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Speed on a checkpoint and the prompts of this folder: without drafts, with lookup, and by transformers."""
    subject = Subject(name, dtype, check.device)
    model = subject.load()
    arms = [
        our_arm("plain", model, None),
        our_arm("plain, eager", model, None, cuda_graphs=False),
        our_arm("lookup", model, layerskip.DraftPlan.lookup(), "measured"),
        transformers_arm("hf-greedy", subject.load_for_transformers()),
    ]
    prompts = read_prompts(PROMPTS, model.tokenizer, 1, 1)
    document = benchmark(model, arms, prompts, NEW_TOKENS, goes_on=lambda: check.left_s > 20)
    _show(Path(name).name, document)
    return document


def _show(title: str, document: dict[str, Any]) -> None:
    print(f"\n{title}\n\n{arm_table(document['arms'])}\n\n{explanation(document)}", flush=True)


def _memory_obstacle(name: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the geometry does not fit, if it does not."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**GEOMETRIES[name]), dtype=dtype)
    needed = HEADROOM * inspect_model(model).parameters * dtype.itemsize
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return None if needed <= free else f"{free / 1e9:.1f} GB are free, {needed / 1e9:.1f} GB needed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all stages; see the module for the exit code."""
    options = _options(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("error: got no CUDA device; expected one. --device cpu runs the same steps on a CPU.", file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    check = Check(device, time.monotonic() + 60 * options.minutes)
    geometries = ("llama-1b", "llama-8b") if device.type == "cuda" else ("tiny",)
    document: dict[str, Any] = {
        "experiment": "gpu_check",
        "conditions": conditions(layerskip.wrap(moved(tiny_model("llama"), device)), []),
        "options": {"minutes": options.minutes, "agreement": AGREEMENT},
        "exactness": check_exactness(check, options.families),
        "speed": {},
    }
    _show_exactness(document["exactness"])
    for index, name in enumerate(geometries):
        obstacle = _memory_obstacle(name, torch.bfloat16, device)
        document["speed"][name] = check.stage(
            f"speed, {name}",
            SPEED_S,
            partial(measure_geometry, check, name, torch.bfloat16, with_transformers=index == 0),
            obstacle,
        )
    if options.model is not None:
        document["speed"][Path(options.model).name] = check.stage(
            "speed, checkpoint", 60, partial(measure_checkpoint, check, options.model, torch.bfloat16)
        )
    document |= {"skipped": check.skipped, "failures": check.failures, "seconds": 60 * options.minutes - check.left_s}
    print()
    for name, why in check.skipped.items():
        print(f"Skipped: {name} ({why}).")
    for failure in check.failures:
        print(f"FAILED: {failure}")
    append(options.results, document)
    return 1 if check.failures else 0


def _show_exactness(document: dict[str, Any]) -> None:
    print("| family | cases | failed | bfloat16 equal to plain | graphs ran as |\n| --- | --- | --- | --- | --- |")
    for family, outcome in document["families"].items():
        low = outcome["low_precision"]
        print(
            f"| {family} | {outcome['cases']} | {len(outcome['failures'])} | {low['equal']}/{low['cases']} "
            f"| {', '.join(outcome['executions'])} |"
        )
    if document["reuse"] is not None:
        print("\nA first call {first_s:.2f} s, a second one like it {second_s:.2f} s.".format(**document["reuse"]))


def _options(arguments: Sequence[str] | None) -> Namespace:
    parser = Parser(prog="python -m experiments.gpu_check", description=__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--model", help="a checkpoint folder to measure as well")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--families", nargs="+", choices=FAMILY_NAMES, default=FAMILY_NAMES, help="(default: all)")
    parser.add_argument("--minutes", type=positive, default=8)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--results", type=Path, default=Path("experiments/results/gpu_check.jsonl"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
