"""Where does the time of one plain step go, and what did each form of the weights change?

    python -m experiments.step_profile --model "$(layerskip reference)"

The same step (one token behind `CONTEXT` others) by transformers' own forward, and by ours with the weights as they
are, fused, packed, and packed in huge pages; medians of interleaved steps, then for each the operators that take most
of it, by torch's profiler (which slows everything down: read its shares, not its sums).

Prints Markdown tables, and as its last line one JSON document, which is also appended to the results file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

import layerskip
from experiments.conditions import conditions
from experiments.measuring import interleaved
from experiments.report import append
from layerskip.cli.parser import positive

__all__ = ["main", "our_step", "prepared", "step_options"]

CONTEXT = 200
PROFILED_STEPS = 20
SHOWN = 8  # operators a table

Step = Callable[[], object]


def our_step(model: layerskip.Model) -> Step:
    """One token through all blocks and the head, and the choice; the cache is as before then."""
    decoder, ids = model.decoder, torch.full((1, CONTEXT), 5)
    cache = decoder.new_cache(1, CONTEXT + 1)
    decoder.run(decoder.embed(ids), decoder.full_path, cache, decoder.span([0], CONTEXT))
    cache.commit([CONTEXT])

    def step() -> None:
        span = decoder.span([CONTEXT], 1)
        hidden = decoder.run(decoder.embed(ids[:, :1]), decoder.full_path, cache, span)
        decoder.logits(hidden).max(dim=-1).indices.tolist()
        cache.commit([CONTEXT])

    return step


def transformers_step(hf_model: Any) -> Step:
    """The same by the model's own forward, over its own dynamic cache."""
    ids, cache = torch.full((1, CONTEXT), 5), DynamicCache(config=hf_model.config)
    hf_model(ids, past_key_values=cache, use_cache=True)

    def step() -> None:
        logits = hf_model(ids[:, :1], past_key_values=cache, use_cache=True).logits
        logits[:, -1].argmax(dim=-1).tolist()
        cache.crop(-1)

    return step


def prepared(checkpoint: str, dtype: str, **how: bool) -> layerskip.Model:
    """A model of its own, with its weights in the form that `how` names."""
    model = layerskip.load(checkpoint, dtype=dtype, prepare=False)
    if how:
        model.decoder.prepare(in_place=True, **how)
    return model


def operators(step: Step) -> list[dict[str, Any]]:
    """The operators that take most of `step` by themselves: calls and share of the time."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(PROFILED_STEPS):
            step()
    events = sorted(profiled.key_averages(), key=lambda event: event.self_cpu_time_total, reverse=True)
    total = sum(event.self_cpu_time_total for event in events)
    return [
        {"operator": event.key, "calls": event.count // PROFILED_STEPS, "share": event.self_cpu_time_total / total}
        for event in events[:SHOWN]
    ]


@torch.inference_mode()
def main() -> None:
    """Time the steps in turn, profile each, print and append."""
    options = step_options(__doc__, "step_profile")
    torch.set_num_threads(options.threads)
    plain = prepared(options.model, options.dtype)
    ours = {
        "weights as they are": plain,
        "fused": prepared(options.model, options.dtype, pack=False, huge_pages=False),
        "packed": prepared(options.model, options.dtype, huge_pages=False),
        "packed, huge pages": prepared(options.model, options.dtype, huge_pages=True),
    }
    steps = {"transformers": transformers_step(plain.hf_model)} | {name: our_step(each) for name, each in ours.items()}
    seconds = interleaved(plain.decoder.device, steps, options.repeats)
    tables = {name: operators(step) for name, step in steps.items()}

    print("| one step | ms | transformers ÷ it |\n| --- | --- | --- |")
    for name, lap in seconds.items():
        print(f"| {name} | {1e3 * lap:.1f} | {seconds['transformers'] / lap:.2f} |")
    for name, rows in tables.items():
        print(f"\n{name}\n\n| operator | calls | share |\n| --- | --- | --- |")
        for row in rows:
            print(f"| {row['operator']} | {row['calls']} | {row['share']:.2f} |")
    document = {
        "experiment": "step_profile",
        "conditions": conditions(plain, []),
        "context": CONTEXT,
        "step_s": seconds,
        "operators": tables,
    }
    append(options.results, document)


def step_options(docstring: str | None, experiment: str) -> argparse.Namespace:
    """The command line of a program that times single steps of one checkpoint."""
    parser = argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint folder or hub id")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--repeats", type=positive, default=40)
    parser.add_argument("--results", type=Path, default=Path(f"experiments/results/{experiment}.jsonl"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
