"""What the arms' runs amount to: ratios prompt by prompt, medians by category, means over categories, and tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median, quantiles
from typing import Any

import layerskip
from experiments.arms import Arm, Run
from experiments.protocol import CHAT_CATEGORIES
from experiments.subjects import Prompt

__all__ = ["append", "arm_table", "category_table", "is_long_enough", "number", "quartiles", "summarise"]

SHORTEST = 8  # tokens of an answer whose times count


TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")


def quartiles(values: Sequence[float]) -> list[float] | None:
    """The three quartiles, within the values, however few there are; of none None."""
    if len(values) < 2:
        return [values[0]] * 3 if values else None
    return quantiles(values, n=4, method="inclusive")


def summarise(arm: Arm, plain: Arm, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """All figures of `arm`; `prompts` are those of its runs, in order.

    "multi_turn" pools Spec-Bench's eight chat categories; "over_categories" and "over_tasks" are geometric means of
    the medians, None where a category or task has none.
    """
    pairs = list(zip(prompts, arm.runs, plain.runs, strict=True))
    names = list(dict.fromkeys(prompt.category for prompt in prompts))
    categories = {name: _figures([each[1:] for each in pairs if each[0].category == name]) for name in names}
    multi_turn = _figures([each[1:] for each in pairs if each[0].category in CHAT_CATEGORIES])
    tasks = [multi_turn, *(categories.get(name) for name in TASKS)]
    return {
        "arm": arm.name,
        **arm.settings,
        "all": _figures([each[1:] for each in pairs]),
        "categories": categories,
        "multi_turn": multi_turn,
        "over_categories": _mean(categories.values()),
        "over_tasks": _mean(tasks),
    }


def _mean(figures: Iterable[Mapping[str, Any] | None]) -> float | None:
    """The geometric mean of the median ratios; None where one is missing."""
    ratios = [each["ratio_to_plain"][1] if each is not None and each["ratio_to_plain"] else None for each in figures]
    return geometric_mean(ratios) if ratios and None not in ratios else None  # type: ignore[arg-type]


def _figures(pairs: Sequence[tuple[Run, Run]]) -> dict[str, Any] | None:
    """Medians over pairs of a run and the plain run of the same prompt, short answers left out of all times."""
    if not pairs:
        return None
    timed = [pair for pair in pairs if all(map(is_long_enough, pair))]
    ratios = [run.tokens_per_s / plain.tokens_per_s for run, plain in timed]
    stats = [run.stats for run, _ in pairs if run.stats is not None]
    pooled = layerskip.DecodeStats.pooled(stats) if stats else None
    return {
        "calls": len(pairs),
        "too_short": len(pairs) - len(timed),
        "identical": sum(run.tokens == plain.tokens for run, plain in pairs),
        "tokens_per_s": _median([run.tokens_per_s for run, _ in timed]),
        "ratio_to_plain": quartiles(ratios),
        "first_token_s": _median([run.first_s for run, _ in pairs]),
        "call_s": _median([run.call_s for run, _ in pairs]),
        "new_tokens": sum(len(row) for run, _ in pairs for row in run.tokens),
        "tokens_per_round": pooled.tokens_per_round if pooled is not None else _tokens_per_pass(pairs),
        "acceptance_by_offset": pooled.acceptance_by_offset if pooled is not None else None,
        "rounds_by_source": _shares(pooled.rounds_by_source) if pooled is not None else None,
        "measured_by_predicted": _measured_by_predicted(timed),
        "execution": pooled.execution if pooled is not None else None,
        "costs": pooled.costs if pooled is not None else None,
    }


def is_long_enough(run: Run) -> bool:
    """Whether its answer has tokens enough for its times to count."""
    return min(map(len, run.tokens)) >= SHORTEST and run.decode_s > 0


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _tokens_per_pass(pairs: Sequence[tuple[Run, Run]]) -> float:
    """Of transformers' runs: a row's tokens for each time that some came."""
    rows = max(len(run.tokens) for run, _ in pairs)
    return sum(run.decoded for run, _ in pairs) / (rows * max(1, sum(run.passes for run, _ in pairs)))


def _shares(counts: Mapping[str, int]) -> dict[str, float]:
    return {name: count / max(1, sum(counts.values())) for name, count in counts.items()}


def _measured_by_predicted(timed: Sequence[tuple[Run, Run]]) -> float | None:
    """The median of the speed-up over what acceptance and the times of the passes promise; of drafting arms only."""
    values = []
    for run, plain in timed:
        if run.stats is not None and run.stats.proposed:
            predicted = run.stats.predicted_speedup(plain.decode_s / plain.decoded)
            values.append(run.tokens_per_s / plain.tokens_per_s / predicted)
    return _median(values)


def arm_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line an arm."""
    lines = [
        "| arm | tokens/s | ÷ plain (quartiles) | over categories | over 6 tasks | tokens/round | rounds by source "
        "| first token, ms | measured ÷ predicted | identical |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        each = row["all"]
        sources = each["rounds_by_source"] or {}
        cells = [
            row["arm"],
            number(each["tokens_per_s"], 1),
            _spread(each["ratio_to_plain"]),
            number(row["over_categories"]),
            number(row["over_tasks"]),
            number(each["tokens_per_round"]),
            ", ".join(f"{name} {share:.0%}" for name, share in sorted(sources.items())) or "–",
            number(1e3 * each["first_token_s"], 0),
            number(each["measured_by_predicted"]),
            f"{each['identical']}/{each['calls']}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def category_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Median ratio to plain (and tokens a round) of each arm by category; plain's column is tokens per second."""
    plain, *others = rows
    lines = [
        "| category | plain, tokens/s | " + " | ".join(f"{row['arm']} ÷ plain" for row in others) + " |",
        "| --- " * (2 + len(others)) + "|",
    ]
    for name, each in plain["categories"].items():
        cells = [name, number(each["tokens_per_s"], 1)]
        for row in others:
            own = row["categories"][name]
            cells.append(f"{_spread(own['ratio_to_plain'])}, {own['tokens_per_round']:.2f} a round")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def number(value: float | None, digits: int = 2) -> str:
    """As text; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def _spread(values: Sequence[float] | None) -> str:
    return "–" if values is None else "{1:.2f} ({0:.2f}–{2:.2f})".format(*values)


def append(file: Path, document: Mapping[str, Any]) -> None:
    """Append `document` to a results file as one line, and print that line."""
    line = json.dumps(document)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as results:
        results.write(line + "\n")
    print(line)
