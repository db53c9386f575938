"""Does the cost model say what drafts really cost? Twenty random plans, predicted and measured.

    python -m experiments.cost_model --model "$(layerskip reference)"

The costs of a few paths are measured once, as a search does; those of random skip sets, exits and draft vocabularies
are then put together from them, and compared with rounds of real decoding along each, all in turn.

Prints a table, and as its last line one JSON document, which is also appended to the results file.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from experiments.conditions import conditions
from experiments.report import append
from experiments.subjects import Subject
from layerskip.cli.parser import positive
from layerskip.models.loading import parse_dtype
from layerskip.search.candidate import Candidate
from layerskip.search.cost import CostModel
from layerskip.search.measuring import measure_costs, measure_rounds

__all__ = ["main"]

LONGEST = 6  # drafts of a round


def random_candidates(blocks: int, sizes: list[int], count: int, seed: int) -> list[Candidate]:
    """Skip sets of any share, exits anywhere, both together, with any draft vocabulary."""
    rng = random.Random(seed)
    found: dict[Candidate, None] = {}
    while len(found) < count:
        share = rng.random() * 0.8
        skipped = [[layer for layer in range(blocks) if rng.random() < share] for _ in range(2)]
        candidate = Candidate.of(
            blocks, *skipped, rng.choice((None, rng.randint(1, blocks))), rng.choice((None, *sizes))
        )
        if len(candidate.path(blocks)) > 0:
            found[candidate] = None
    return list(found)


def compare(model: Any, costs: CostModel, vocabularies: dict[int, tuple[int, ...]], options: argparse.Namespace) -> Any:
    """One row a plan: predicted and measured cost of a draft step, and of verification, in plain steps."""
    blocks, rng = model.decoder.num_blocks, random.Random(options.seed)
    candidates = random_candidates(blocks, list(vocabularies), options.plans, options.seed)
    lengths = [rng.randint(1, LONGEST) for _ in candidates]
    plans = [
        candidate.plan(length, None if candidate.vocabulary_size is None else vocabularies[candidate.vocabulary_size])
        for candidate, length in zip(candidates, lengths, strict=True)
    ]
    plain, times = measure_rounds(model, plans, options.context, options.rounds)
    plain_s = plain.verify_s
    rows = []
    for candidate, length, seconds in zip(candidates, lengths, times, strict=True):
        verify = costs.verify_ratio(length + 1, candidate)
        rows.append(
            {
                "candidate": asdict(candidate),
                "draft": candidate.describe(),
                "num_draft_tokens": length,
                "draft_ratio": {"predicted": costs.draft_ratio(candidate), "measured": seconds.draft_s / plain_s},
                "verify_ratio": {"predicted": verify, "measured": seconds.verify_s / plain_s},
            }
        )
    return rows


def errors(rows: list[dict[str, Any]], what: str) -> list[float]:
    """Relative, predicted over measured, less one."""
    return [row[what]["predicted"] / row[what]["measured"] - 1 for row in rows]


def main() -> None:
    """Measure, compare, print and append."""
    options = _options()
    torch.set_num_threads(options.threads)
    dtype = parse_dtype(options.dtype)
    assert isinstance(dtype, torch.dtype)
    model = Subject(options.model, dtype, torch.device(options.device)).load()
    vocab = model.decoder.vocab_size
    vocabularies = {size: tuple(range(size)) for size in (2048, 8192, 32_768) if 2 * size <= vocab}
    costs = measure_costs(model, list(vocabularies.values()), draft_length=LONGEST, context=options.context)
    rows = compare(model, costs, vocabularies, options)
    print("| draft | K | step, predicted | measured | verification, predicted | measured |\n" + "| --- " * 6 + "|")
    for row in rows:
        step, verify = row["draft_ratio"], row["verify_ratio"]
        print(
            f"| {row['draft']} | {row['num_draft_tokens']} | {step['predicted']:.3f} | {step['measured']:.3f} "
            f"| {verify['predicted']:.3f} | {verify['measured']:.3f} |"
        )
    summary = {}
    for what in ("draft_ratio", "verify_ratio"):
        sizes = sorted(abs(each) for each in errors(rows, what))
        summary[what] = {
            "median": median(sizes), "largest": sizes[-1], "within_10_percent": sum(each <= 0.1 for each in sizes)
        }  # fmt: skip
        print(
            f"{what}: error median {median(sizes):.1%}, largest {sizes[-1]:.1%}; "
            f"{summary[what]['within_10_percent']} of {len(sizes)} within 10 %"
        )
    document = {"experiment": "cost_model", "conditions": conditions(model, []), "costs": costs.to_dict()}
    append(options.results, document | {"rows": rows, "errors": summary})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint folder, hub id, or a geometry with random weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--plans", type=positive, default=20)
    parser.add_argument("--rounds", type=positive, default=20, help="by each plan")
    parser.add_argument("--context", type=positive, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--results", type=Path, default=Path("experiments/results/cost_model.jsonl"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
