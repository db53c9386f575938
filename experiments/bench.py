"""How fast does each way to draft decode, against plain decoding and against transformers, and what explains it?

    python -m experiments.bench --model "$(layerskip reference)" --exit 6           # the prompts of this folder
    python -m experiments.bench --model llama-1b --exit 4 --agreement 0.9           # random weights, random ids

Arms, interleaved prompt by prompt in one process: plain decoding; self (a plan: --exit, --skip-attention, --plan);
lookup; combined (both); and transformers' own greedy decoding, early exit and prompt lookup, on the same weights loaded
as an ordinary model, with transformers' defaults. Ratios are taken prompt by prompt, from the first new token on.
Beside them: what a verification pass costs by its width, what a draft step costs, and how near plain decoding comes to
the rate at which this machine reads memory, which is what bounds it.

Prints Markdown tables, and as its last line one JSON document, which is also appended to the results file.
"""

from __future__ import annotations

import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

import layerskip
from experiments.arms import GREEDY, WARM_UP_TOKENS, Arm, our_arm, run_in_turn, transformers_arm, warm_up
from experiments.conditions import conditions
from experiments.measuring import draft_costs, machine_bandwidth, pass_costs
from experiments.program import exit_code
from experiments.report import append, arm_table, category_table, summarise
from experiments.subjects import Prompt, Subject, device_of, random_prompts, read_prompts
from layerskip.cli.parser import Parser, layer_numbers, positive
from layerskip.errors import SettingError
from layerskip.models.loading import parse_dtype
from layerskip.models.synthetic import GEOMETRIES

__all__ = ["PROMPTS", "benchmark", "explanation", "main", "weight_rate"]

OURS = ("plain", "self", "lookup", "combined")
THEIRS = ("hf-greedy", "hf-early-exit", "hf-lookup")
PROMPTS = Path(__file__).parent / "prompts.jsonl"
CONTEXT = 256  # ids of a random prompt
HF_LOOKUP_TOKENS = 10  # the number in transformers' documentation
RECORDED = (
    "batch",
    "context",
    "new_tokens",
    "prompts_per_category",
    "repeats",
    "agreement",
    "ungoverned",
    "temperature",
)


def plan_of(options: Namespace) -> layerskip.DraftPlan | None:
    """The plan that the options describe; None: none."""
    parts = {"exit_layer": options.exit, "skip_attention": options.skip_attention, "skip_mlp": options.skip_mlp}
    given = {name: value for name, value in parts.items() if value is not None}
    if options.plan is not None and given:
        raise SettingError("got --plan beside --exit or --skip-…; expected one way to describe the draft.")
    plan = layerskip.DraftPlan.load(options.plan) if options.plan is not None else None
    if given:
        plan = layerskip.DraftPlan.of(given)
    if options.num_draft_tokens is not None:
        if plan is None:
            raise SettingError("got --num-draft-tokens without a draft; pass --exit, --skip-attention or --plan too.")
        plan = replace(plan, num_draft_tokens=options.num_draft_tokens)
    return plan


def obstacles(plan: layerskip.DraftPlan | None, batch: int) -> dict[str, str]:
    """Which arms cannot be run, and why."""
    found: dict[str, str] = {}
    if plan is None:
        found |= dict.fromkeys(("self", "combined"), "no plan: pass --exit, --skip-attention or --plan")
    if plan is None or plan.exit_layer is None or plan.skip_attention or plan.skip_mlp or plan.adapter is not None:
        found["hf-early-exit"] = "the plan is no exit"
    if batch > 1:
        found |= dict.fromkeys(("hf-early-exit", "hf-lookup"), "transformers drafts for one row only")
    return found


def make_arms(model: layerskip.Model, subject: Subject, plan: layerskip.DraftPlan | None, names: Sequence[str],
              ungoverned: bool, temperature: float | None) -> list[Arm]:  # fmt: skip
    """The arms called `names`; transformers' model is loaded only if one of them is transformers'."""
    decoding: dict[str, Any] = GREEDY if temperature is None else {"do_sample": True, "temperature": temperature}
    lookup = layerskip.DraftPlan.lookup()
    plans: dict[str, layerskip.DraftPlan | None] = {"plain": None, "self": plan, "lookup": lookup}
    if plan is not None:
        plans["combined"] = replace(plan, lookup_tokens=plan.lookup_tokens or lookup.lookup_tokens)
    arms = []
    for name in (name for name in OURS if name in names):
        own = plans[name]
        arms.append(our_arm(name, model, own, None if own is None else "measured", decoding=decoding))
        if ungoverned and own is not None:
            arms.append(our_arm(f"{name}, ungoverned", model, own, "off", decoding=decoding))
    if set(names) & set(THEIRS):
        settings: dict[str, dict[str, Any]] = {
            "hf-greedy": {},
            "hf-early-exit": {"assistant_early_exit": plan.exit_layer if plan is not None else None},
            "hf-lookup": {"prompt_lookup_num_tokens": HF_LOOKUP_TOKENS},
        }
        theirs = subject.load_for_transformers()
        arms += [transformers_arm(name, theirs, **decoding, **settings[name]) for name in THEIRS if name in names]
    return arms


def warm_up_all(arms: Sequence[Arm], prompts: Sequence[Prompt], device: torch.device) -> dict[str, Any]:
    """Warm each arm up on the longest prompt, and note the memory that its calls take."""
    longest = max(prompts, key=lambda prompt: max(map(len, prompt.rows)))
    peaks = {arm.name: warm_up(arm, longest.rows, device) for arm in arms}
    return {
        "prompt_tokens": max(map(len, longest.rows)),
        "how": next(iter(peaks.values())).how,
        "peak_bytes_above_before": {name: peak.bytes for name, peak in peaks.items()},
    }


def weight_rate(model: layerskip.Model, plain: Arm) -> dict[str, Any]:
    """Bytes of weights a second that plain decoding reads, against the rate at which memory can be read."""
    inspection, decoder = model.inspection, model.decoder
    steps = [run.decode_s / run.passes for run in plain.runs if run.passes > 0]
    step_bytes = inspection.step_parameters * decoder.dtype.itemsize
    bandwidth = machine_bandwidth(decoder.device)
    rate = step_bytes / median(steps) if steps else None
    return {
        "step_bytes": step_bytes,
        "plain_bytes_per_s": rate,
        "share_of_bandwidth": None if rate is None else rate / bandwidth["bytes_per_s"],
        "bandwidth": bandwidth,
    }


def benchmark(
    model: layerskip.Model,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    new_tokens: int,
    plan: layerskip.DraftPlan | None = None,
    goes_on: Callable[[], bool] = lambda: True,
) -> dict[str, Any]:
    """Run the arms (plain first among them) and gather everything that explains their times.

    Args:
        plan: a self-draft's, whose step is to be timed.
        goes_on: asked before each prompt but the first.
    """
    decoder, device, batch = model.decoder, model.decoder.device, len(prompts[0].rows)
    is_cuda = device.type == "cuda"
    memory = warm_up_all(arms, prompts, device)
    if is_cuda:  # what is recorded in a first call would count as decoding
        run_in_turn(arms, prompts, new_tokens, goes_on)
        for arm in arms:
            arm.runs.clear()
    shown = track(prompts, console=Console(stderr=True), description="prompts")
    prompts = prompts[: run_in_turn(arms, shown, new_tokens, goes_on)]
    plain = arms[0]
    rows = [summarise(arm, plain, prompts) for arm in arms]
    greedy = next((row["all"]["ratio_to_plain"] for row in rows if row["arm"] == "hf-greedy"), None)
    tokens = memory["prompt_tokens"] + WARM_UP_TOKENS
    document = {
        "conditions": conditions(model, list(dict.fromkeys(repr(prompt.rows) for prompt in prompts))),
        "preparation": asdict(model.preparation),
        "memory": {**memory, "kv_bytes": model.inspection.kv_bytes_per_token * tokens * batch},
        "weights": weight_rate(model, plain),
        "pass_costs": pass_costs(decoder, batch, recorded=is_cuda),
        "draft_costs": None,
        "plain_by_hf_greedy": None if greedy is None else [1 / ratio for ratio in reversed(greedy)],
        "arms": rows,
    }
    if plan is not None and plan.is_self_draft:
        path = plan.path(decoder.num_blocks)
        document["draft_costs"] = {
            **draft_costs(
                decoder,
                path,
                batch,
                adapter=None if plan.adapter is None else model.adapter(plan),
                recorded=is_cuda and plan.adapter is None,
            ),
            "by_parameters": model.draft_cost(replace(plan, draft_vocabulary=None)),
        }
    return document


def explanation(document: dict[str, Any]) -> str:
    """The figures beside the arms, a line each."""
    weights, passes, drafts = (document[name] for name in ("weights", "pass_costs", "draft_costs"))
    widths = ", ".join(f"{width}: {ratio:.2f}" for width, ratio in passes["in_plain_steps"].items() if width > 1)
    preparation, memory = document["preparation"], document["memory"]
    lines = [
        f"A pass by its width, in passes over one token ({passes['context']} tokens of context, "
        f"{passes['execution']}): {widths}; one token takes {1e3 * passes['pass_s'][1]:.1f} ms."
    ]
    if drafts is not None:
        steps = drafts["in_plain_steps"]
        lines.append(
            f"A draft step in plain steps: {steps['draft']:.2f} (by parameters {drafts['by_parameters']:.2f}); scoring "
            f"{drafts['draft_ids']:,} ids only: {steps['draft_vocabulary']:.2f}."
        )
    if weights["share_of_bandwidth"] is not None:
        lines.append(
            f"Plain decoding reads {weights['plain_bytes_per_s'] / 1e9:.1f} GB of weights a second, "
            f"{weights['share_of_bandwidth']:.0%} of the {weights['bandwidth']['bytes_per_s'] / 1e9:.1f} GB/s measured "
            f"({weights['bandwidth']['how']})."
        )
    if document["plain_by_hf_greedy"] is not None:
        lines.append("Plain ÷ transformers' greedy: {1:.2f} ({0:.2f}–{2:.2f}).".format(*document["plain_by_hf_greedy"]))
    peaks = memory["peak_bytes_above_before"]
    lines.append(
        f"Memory of a call beyond what was held before, KV cache ({memory['kv_bytes'] / 1e6:.0f} MB) included, at "
        f"{memory['prompt_tokens']:,} tokens: "
        + ", ".join(f"{name} {'–' if peak is None else f'{peak / 1e6:.0f} MB'}" for name, peak in peaks.items())
        + f" ({memory['how']})."
    )
    lines.append(
        f"Preparation: {preparation['packed']} groups packed, {preparation['fused']} fused, "
        f"{preparation['extra_bytes'] / 1e6:.0f} MB beside the weights, {preparation['seconds']:.2f} s."
    )
    return "\n".join(f"- {line}" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, append; an error that the project words itself is one line and exit code 2."""
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    return exit_code(lambda: _run(options), "--prompts-per-category and --arms")


def _run(options: Namespace) -> None:
    dtype = parse_dtype(options.dtype)
    if not isinstance(dtype, torch.dtype):
        raise SettingError(f"got --dtype {options.dtype}; expected a dtype, the same for us and for transformers.")
    device = device_of(options.device)
    plan = plan_of(options)
    agreement_from = plan.exit_layer if plan is not None and options.agreement is not None else None
    subject = Subject(options.model, dtype, device, options.agreement, agreement_from)
    cannot = obstacles(plan, options.batch)
    for name in options.arms or ():
        if name in cannot:
            raise SettingError(f"got the arm {name}, which cannot be run: {cannot[name]}.")
    names = ["plain", *(name for name in options.arms or (*OURS, *THEIRS) if name not in cannot)]
    model = subject.load()
    prompts = _prompts(options, subject, model)
    if plan is not None:
        model.check_plan(plan)
    arms = make_arms(model, subject, plan, names, options.ungoverned, options.temperature)
    repeated = [prompt for _ in range(options.repeats) for prompt in prompts]
    document = {
        "experiment": "bench",
        "model": Path(options.model).name,
        "data": "random ids" if subject.is_geometry else (options.data or PROMPTS).name,
        "options": {name: getattr(options, name) for name in RECORDED},
        "not_run": cannot,
        **benchmark(model, arms, repeated, options.new_tokens, plan),
    }
    how = "greedy" if options.temperature is None else f"sampled at temperature {options.temperature}"
    kind = f"{document['model']}, {options.dtype} on {options.device}, {options.threads} threads, batch {options.batch}"
    print(f"\n{kind}: {len(prompts)} prompts, {options.new_tokens} tokens, {how}\n\n{arm_table(document['arms'])}")
    print(f"\n{category_table(document['arms'])}\n\n{explanation(document)}")
    for name, why in cannot.items():
        print(f"- Not run: {name} ({why}).")
    append(options.results, document)


def _prompts(options: Namespace, subject: Subject, model: layerskip.Model) -> list[Prompt]:
    a_category, batch = options.prompts_per_category, options.batch
    if subject.is_geometry:
        if options.data is not None:
            raise SettingError("got --data for random weights, which have no tokenizer; use --context instead.")
        return random_prompts(model.decoder.vocab_size, options.context or CONTEXT, a_category, batch)
    if options.context is not None:
        raise SettingError("got --context for a checkpoint, which is given prompts in words; use --data instead.")
    return read_prompts(options.data or PROMPTS, model.tokenizer, a_category, batch)


def _options(arguments: Sequence[str] | None) -> Namespace:
    parser = Parser(prog="python -m experiments.bench", description=__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--model", required=True, help=f"checkpoint folder, hub id, or one of {', '.join(GEOMETRIES)}")
    parser.add_argument("--data", type=Path, help=f"questions in Spec-Bench format (default: {PROMPTS.name} here)")
    parser.add_argument("--context", type=positive, help=f"ids of a random prompt (default: {CONTEXT})")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--batch", type=positive, default=1, help="rows of a call, of one category")
    parser.add_argument("--new-tokens", type=positive, default=128)
    parser.add_argument("--prompts-per-category", type=positive, default=3, help="calls; with random ids: in all")
    parser.add_argument("--repeats", type=positive, default=1)
    parser.add_argument("--exit", type=positive, help="the draft runs this many blocks")
    parser.add_argument("--skip-attention", type=layer_numbers, help="layers such as 3,5,7-9")
    parser.add_argument("--skip-mlp", type=layer_numbers)
    parser.add_argument("--plan", help="a plan file")
    parser.add_argument("--num-draft-tokens", type=positive, help="most drafts a round of the self-draft")
    parser.add_argument("--agreement", type=float, help="planted between the exit (or half) and the whole geometry")
    parser.add_argument("--arms", nargs="+", choices=(*OURS, *THEIRS), help="beside plain (default: all that can run)")
    parser.add_argument("--temperature", type=float, help="sample; outputs are then other samples, and not compared")
    parser.add_argument("--ungoverned", action="store_true", help="each drafting arm without the governor too")
    parser.add_argument("--results", type=Path, default=Path("experiments/results/bench.jsonl"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
