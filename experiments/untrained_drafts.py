"""What do untrained drafts do? Plain decoding against exits and skip sets on one checkpoint, in one process.

    python -m experiments.untrained_drafts --model "$(layerskip reference)" --data prompts.jsonl

Every prompt is decoded by every arm in turn (plain first), so that a slow minute of the machine falls on all of them;
ratios are taken prompt by prompt. Three modes: greedy; T = 0.7 under the rule that accepts most; T = 0.7 under the
invariant rule, whose text for a seed should equal plain decoding's. Where a low-precision greedy output parts from
plain decoding's, it is looked up whether the target's two choices were closer there than the dtype can tell.

Prints a Markdown table for each mode, and as its last line one JSON document with all plans and settings, which is also
appended to the results file.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

import layerskip
from experiments.conditions import conditions
from experiments.report import append, quartiles
from layerskip.cli.parser import positive
from layerskip.exactness import Difference, first_difference

__all__ = ["main"]

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "maximal": {"do_sample": True, "temperature": 0.7, "acceptance_rule": "maximal"},
    "invariant": {"do_sample": True, "temperature": 0.7, "acceptance_rule": "invariant"},
}


@dataclass
class Arm:
    """One way to draft, and what it did on each prompt."""

    name: str
    plan: layerskip.DraftPlan | None
    results: list[layerskip.GenerationResult] = field(default_factory=list)


def arms(num_draft_tokens: int) -> list[Arm]:
    """Plain decoding, three exits, three skip sets.

    The skip sets: the best single sub-block and the best four by greedy removal (agreement on the model's own
    answers, SmolLM2-135M-Instruct), and every second layer whole, where SWIFT's search begins (Xia et al. 2025).
    """
    every_second = range(1, 29, 2)
    drafts = {
        "exit 6": layerskip.DraftPlan.exit(6),
        "exit 15": layerskip.DraftPlan.exit(15),
        "exit 25": layerskip.DraftPlan.exit(25),
        "skip 1 sub-block": layerskip.DraftPlan.skip(attention=[6]),
        "skip 4 sub-blocks": layerskip.DraftPlan.skip(attention=[3, 6, 7, 25]),
        "skip every 2nd layer": layerskip.DraftPlan.skip(every_second, every_second),
    }
    sized = [Arm(name, replace(plan, num_draft_tokens=num_draft_tokens)) for name, plan in drafts.items()]
    return [Arm("plain", None), *sized]


def read_prompts(file: Path, count: int) -> list[str]:
    """The first turns of `count` questions, spread evenly over the file (Spec-Bench format)."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    chosen = [lines[index * len(lines) // count] for index in range(count)]
    return [each["turns"][0] for each in chosen]


def run_mode(model: layerskip.Model, prompts: Sequence[str], settings: dict[str, Any], drafts: list[Arm]) -> None:
    """Decode every prompt by every arm in turn."""
    model.generate("warm-up", max_new_tokens=4)
    for index, prompt in enumerate(track(prompts, console=Console(stderr=True))):
        for arm in drafts:
            messages = [{"role": "user", "content": prompt}]
            governor = None if arm.plan is None else "off"
            arm.results.append(model.generate(messages, plan=arm.plan, governor=governor, seed=index, **settings))


def summary(model: layerskip.Model, arm: Arm, plain: Arm, greedy: bool) -> dict[str, Any]:
    """One row of the table: pooled counts, medians and quartiles over prompts; how the arm drafted and decoded.

    "settings" are those in effect on the first prompt; on the others only the seed, the prompt's index, differs.
    """
    pairs = list(zip(arm.results, plain.results, strict=True))
    pooled = layerskip.DecodeStats.pooled(ours.stats for ours, _ in pairs)
    ratios = [ours.stats.tokens_per_s / theirs.stats.tokens_per_s for ours, theirs in pairs if theirs.stats.rounds]
    parted = [(ours, theirs) for ours, theirs in pairs if ours.new_token_ids != theirs.new_token_ids]
    differences = [_difference(model, *pair) for pair in parted] if greedy else []
    first = arm.results[0]
    return {
        "arm": arm.name,
        "plan": first.plan.to_dict() if first.plan is not None else None,
        "settings": first.settings,
        "tokens_per_round": pooled.tokens_per_round,
        "acceptance_by_offset": pooled.acceptance_by_offset,
        "tokens_per_s_median": statistics.median(ours.stats.tokens_per_s for ours, _ in pairs),
        "ratio_to_plain_quartiles": quartiles(ratios),
        "equal": len(pairs) - len(parted),
        "near_ties": sum(each.is_near_tie for each in differences) if greedy else None,
        "gaps": [each.gap for each in differences],
        "logit_errors": [each.logit_error for each in differences],
        "stats": pooled.to_dict(),
    }


def _difference(model: layerskip.Model, a: layerskip.GenerationResult, b: layerskip.GenerationResult) -> Difference:
    """Where the outputs `a` and `b`, which differ, part."""
    prompt = a.sequences[0, : a.stats.prompt_tokens].tolist()
    difference = first_difference(model.hf_model, prompt, a.new_token_ids[0], b.new_token_ids[0])
    assert difference is not None
    return difference


def table(rows: list[dict[str, Any]], prompts: int) -> str:
    """Rows as Markdown."""
    lines = [
        "| draft | tokens/round | acceptance by offset | tokens/s | ÷ plain (quartiles) | equal | if not: near-ties |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        ratios = row["ratio_to_plain_quartiles"]
        ratio = "–" if ratios is None else "{1:.2f} ({0:.2f}–{2:.2f})".format(*ratios)
        offsets = " ".join(f"{rate:.2f}" for rate in row["acceptance_by_offset"]) or "–"
        parted = prompts - row["equal"]
        near_ties = f"{row['near_ties']} of {parted}" if parted and row["near_ties"] is not None else "–"
        lines.append(
            f"| {row['arm']} | {row['tokens_per_round']:.2f} | {offsets} | {row['tokens_per_s_median']:.1f} "
            f"| {ratio} | {row['equal']}/{prompts} | {near_ties} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the modes, print the tables, append the results."""
    options = _options()
    torch.set_num_threads(options.threads)
    model = layerskip.load(options.model, dtype=options.dtype)
    prompts = read_prompts(options.data, options.prompts)
    document: dict[str, Any] = {
        "experiment": "untrained_drafts",
        "conditions": conditions(model, prompts),
        "options": {name: getattr(options, name) for name in ("num_draft_tokens", "new_tokens", "modes")},
    }
    for mode in options.modes:
        drafts = arms(options.num_draft_tokens)
        run_mode(model, prompts, {**MODES[mode], "max_new_tokens": options.new_tokens}, drafts)
        rows = document[mode] = [summary(model, arm, drafts[0], greedy=mode == "greedy") for arm in drafts]
        print(f"\n{mode}, {len(prompts)} prompts, {options.new_tokens} tokens\n\n{table(rows, len(prompts))}")
    append(options.results, document)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint folder or hub id")
    parser.add_argument("--data", type=Path, required=True, help="questions in Spec-Bench format, JSON lines")
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), default=list(MODES), help="(default: all)")
    parser.add_argument("--prompts", type=positive, default=20)
    parser.add_argument("--new-tokens", type=positive, default=64)
    parser.add_argument("--num-draft-tokens", type=positive, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--results", type=Path, default=Path("experiments/results/untrained_drafts.jsonl"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
