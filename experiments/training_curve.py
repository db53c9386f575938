"""Which trained path promises most at its cost, and how much more training would bring?

    python -m experiments.training_curve jump/plan.json adapter/plan.json --model "$(layerskip reference)" --out a.png

Every plan that `layerskip train` wrote carries its curve: how often the path agreed with the model on held-out text, by
offset, after so many steps. A draft step of each is timed here against a plain step, in turn; the predicted speed-up of
each point follows, at its best draft length, as in a search. Behind the last trained offset the last rate is taken on.

Prints a Markdown table, draws the curves, and appends one JSON document to the results file.
"""

from __future__ import annotations

import math
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import torch

import layerskip
from experiments.conditions import conditions
from experiments.measuring import draft_costs, pass_costs
from experiments.program import exit_code
from experiments.report import append
from layerskip.cli.parser import Parser, positive
from layerskip.errors import PlanError
from layerskip.speedup import speedup, tokens_per_round

__all__ = ["main", "points_of", "predicted"]

LONGEST = 8  # drafts a round that are considered
TARGETS = (1.1, 1.2, 1.3)  # speed-ups whose tokens are extrapolated


def predicted(agreement: Sequence[float], draft_ratio: float, verify_slope: float) -> dict[str, float]:
    """Tokens a round and speed-up at the best draft length, which is given too.

    Args:
        agreement: by offset, if those before agreed.
        draft_ratio: a draft step in plain steps.
        verify_slope: what each further token adds to a pass, in plain steps.
    """

    def at(drafts: int) -> float:
        return speedup(agreement, drafts, draft_ratio, 1 + drafts * verify_slope)

    best = max(range(1, LONGEST + 1), key=at)
    return {"num_draft_tokens": best, "tokens_per_round": tokens_per_round(agreement, best), "speedup": at(best)}


def points_of(plan: layerskip.DraftPlan, draft_ratio: float, verify_slope: float) -> list[dict[str, Any]]:
    """The plan's curve with what each of its points promises.

    Raises:
        PlanError: the plan carries no curve.
    """
    curve, settings = plan.provenance.get("curve"), plan.provenance.get("settings")
    if not curve or not settings:
        raise PlanError("got a plan without a training curve; expected one that `layerskip train` wrote.")
    tokens_a_step = settings["tokens"] / curve[-1]["step"]
    return [
        {
            "tokens": round(each["step"] * tokens_a_step),
            "agreement": each["agreement"],
            **predicted(each["agreement"], draft_ratio, verify_slope),
        }
        for each in curve
    ]


def tokens_for(points: Sequence[dict[str, Any]], target: float) -> float | None:
    """Tokens at which a straight line through the later half of the curve, over log(tokens), reaches `target`."""
    later = points[len(points) // 2 :]
    if len({each["tokens"] for each in later}) < 2:
        return None
    logs, speedups = [math.log(each["tokens"]) for each in later], [each["speedup"] for each in later]
    slope, start = linear_regression(logs, speedups)
    exponent = (target - start) / slope if slope > 0 else math.inf
    return math.exp(exponent) if exponent < 60 else None  # no number of tokens that anybody trains on


def draw(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Agreement by offset, and predicted speed-up, over the tokens trained on."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for row in rows:
        tokens = [each["tokens"] for each in row["points"]]
        for offset in range(len(row["points"][0]["agreement"])):
            rates = [each["agreement"][offset] for each in row["points"]]
            left.plot(tokens, rates, ["-", "--", ":", "-."][offset % 4], label=f"{row['name']}, draft {offset + 1}")
        right.plot(tokens, [each["speedup"] for each in row["points"]], label=row["name"])
    right.axhline(1.0, color="grey", linewidth=0.8)
    for axes, title in ((left, "agreement on held-out text"), (right, "predicted speed-up over plain decoding")):
        axes.set(title=title, xlabel="tokens trained on", xscale="log")
        axes.legend(fontsize="small")
    figure.savefig(out, dpi=120)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a plan, as Markdown."""
    targets = " | ".join(f"tokens for {each}" for each in TARGETS)
    lines = [
        "| path | tokens trained on | agreement by offset | its step ÷ plain | K | tokens a round | speed-up "
        f"| {targets} |",
        "| --- | --- | --- | --- | --- | --- | --- |" + " --- |" * len(TARGETS),
    ]
    for row in rows:
        last = row["points"][-1]
        rates = " ".join(f"{each:.3f}" for each in last["agreement"])
        reached = " | ".join("–" if each is None else f"{each / 1e6:.1f} M" for each in row["tokens_for"].values())
        lines.append(
            f"| {row['name']} | {last['tokens']:,} | {rates} | {row['draft_ratio']:.3f} | {last['num_draft_tokens']} "
            f"| {last['tokens_per_round']:.2f} | {last['speedup']:.2f} | {reached} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, append; an error that the project words itself is one line and exit code 2."""
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    return exit_code(lambda: _run(options), "fewer plans")


def _run(options: Namespace) -> None:
    plans = {str(Path(file).parent.name or file): layerskip.DraftPlan.load(file) for file in options.plans}
    model = layerskip.load(options.model, dtype=options.dtype)
    passes = pass_costs(model.decoder)["in_plain_steps"]
    verify_slope = max(0.0, median((passes[width] - 1) / (width - 1) for width in passes if width > 1))
    rows = []
    for name, plan in plans.items():
        model.check_plan(plan)
        path = plan.path(model.decoder.num_blocks)
        adapter = None if plan.adapter is None else model.adapter(plan)
        if adapter is not None and adapter.spec.num_heads:
            raise PlanError(
                f"got the heads of {name}, which draft all at one cost; expected paths that draft token after token."
            )
        kind = "draft" if plan.draft_vocabulary is None else "draft_vocabulary"
        ratio = draft_costs(model.decoder, path, adapter=adapter)["in_plain_steps"][kind]
        points = points_of(plan, ratio, verify_slope)
        reached = {str(each): tokens_for(points, each) for each in TARGETS}
        rows.append({"name": name, "draft_ratio": ratio, "points": points, "tokens_for": reached})
    if options.out is not None:
        draw(rows, options.out)
    print(f"\nA further token adds {verify_slope:.3f} plain steps to a pass.\n\n{table(rows)}\n")
    document = {"experiment": "training_curve", "model": Path(options.model).name, "verify_slope": verify_slope}
    append(options.results, document | {"conditions": conditions(model, []), "rows": rows})


def _options(arguments: Sequence[str] | None) -> Namespace:
    parser = Parser(prog="python -m experiments.training_curve", description=__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("plans", nargs="+", metavar="PLAN", help="files that `layerskip train` wrote")
    parser.add_argument("--model", required=True, help="the checkpoint that they were trained for")
    parser.add_argument("--out", type=Path, metavar="PICTURE", help="where the curves are drawn")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--results", type=Path, default=Path("experiments/results/training_curve.jsonl"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
