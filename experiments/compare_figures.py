"""What the lines of a comparison amount to: one document of figures, made from the lines and nothing else.

Speeds are compared turn by turn and repeat by repeat with plain decoding of the same text; a question's figure is the
median of its ratios, a task's the geometric mean over its questions, and the whole's the geometric mean over tasks.
Of an interrupted comparison those turns count that all arms have answered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import layerskip
from experiments.arms import Run
from experiments.compare_arms import PLAIN
from experiments.protocol import geometric_mean_of, paired_ratios, tasks_of
from experiments.report import is_long_enough
from experiments.run_lines import run_of
from layerskip.errors import InputError

__all__ = ["figures_of"]

Line = Mapping[str, Any]
Key = tuple[str, int, int]  # question, turn, repeat
Runs = Mapping[Key, tuple[Line, Run]]


def figures_of(lines: Sequence[Line]) -> dict[str, Any]:
    """The figures of a comparison, as JSON values.

    Raises:
        InputError: plain decoding was not run, or an arm that did not fail has not answered all that plain has, or
            nothing of it yet.
    """
    made = {line["arm"]: line for line in lines if line["kind"] == "arm"}
    runs: dict[str, dict[Key, tuple[Line, Run]]] = {name: {} for name in made}
    failed = {name: line["error"] for name, line in made.items() if line["error"] is not None}
    for line in lines:
        if line["kind"] == "run" and line["split"] == "report":
            if line["error"] is not None:
                failed[line["arm"]] = f"{line['error']} (question {line['question']})"
            else:
                runs[line["arm"]][(line["question"], line["turn"], line["repeat"])] = (line, run_of(line))
    is_whole = any(line["kind"] == "end" for line in lines)
    if not is_whole:
        runs = _answered_by_all(runs, failed)
    plain = runs.get(PLAIN)
    if not plain:
        raise InputError(
            "got lines without a turn that plain decoding, by which all arms are measured, and all others have "
            "answered; expected one. Go on with --resume."
        )
    for name, own in runs.items():
        if name not in failed and own.keys() != plain.keys():
            raise InputError(
                f"got {len(own)} answers of {name} and {len(plain)} of {PLAIN}; expected one for each of the same "
                "prompts. Lines are lost: compare anew."
            )
    begin, partings = lines[0], [line for line in lines if line["kind"] == "parting"]
    categories = {key[0]: str(line["category"]) for key, (line, _) in plain.items()}
    rows = []
    for name, line in made.items():
        gaps = [_without_conditions(each) for each in partings if each["arm"] == name]
        described = {key: line.get(key) for key in ("described", "made_s", "peak_bytes", "peak_how", "preparation")}
        row = {"arm": name, "what": line["what"], "settings": line["settings"], "error": failed.get(name), **described}
        rows.append(row | _figures(runs[name], plain, categories) | {"partings": gaps})
    return {
        "conditions": begin["conditions"],
        "options": begin["options"],
        "model": begin["model"],
        "questions": {split: len(ids) for split, ids in begin["split"].items()} | {"answered": len(categories)},
        "is_whole": is_whole,
        "tasks": list(dict.fromkeys(tasks_of(categories.values()).values())),
        "categories": list(dict.fromkeys(categories.values())),
        "arms": rows,
        "tuned": [_without_conditions(line) for line in lines if line["kind"] == "tuned"],
        "left_out": [_without_conditions(line) for line in lines if line["kind"] == "left_out"],
        "peak_tokens": made[PLAIN].get("peak_tokens"),
    }


def _answered_by_all(runs: Mapping[str, Runs], failed: Mapping[str, str]) -> dict[str, dict[Key, tuple[Line, Run]]]:
    """The runs of those turns that every arm has answered which has not failed."""
    answered = set(runs.get(PLAIN, ())).intersection(*(own for name, own in runs.items() if name not in failed))
    return {name: {key: run for key, run in own.items() if key in answered} for name, own in runs.items()}


def _without_conditions(line: Line) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in ("conditions", "kind")}


def _figures(own: Runs, plain: Runs, categories: Mapping[str, str]) -> dict[str, Any]:
    """All figures of an arm's runs; those of times and tokens None where it has none."""
    timed = {key: run for key, (_, run) in own.items() if is_long_enough(run) and is_long_enough(plain[key][1])}
    stats = [run.stats for _, run in own.values() if run.stats is not None]
    pooled = layerskip.DecodeStats.pooled(stats) if stats else None
    passes = sum(run.passes for _, run in own.values())
    per_round = pooled.tokens_per_round if pooled is not None else None
    if passes and pooled is None:
        per_round = sum(run.decoded for _, run in own.values()) / passes
    predicted = _predicted(timed, plain)
    return {
        "runs": len(own),
        "too_short": len(own) - len(timed),
        **_speedups(timed, plain, categories, lambda run: run.tokens_per_s, "speedup"),
        **_speedups(timed, plain, categories, lambda run: len(run.tokens[0]) / run.call_s, "whole_call"),
        "tokens_per_s": _median([run.tokens_per_s for run in timed.values()]),
        "tokens_per_round": per_round,
        "acceptance_by_offset": pooled.acceptance_by_offset if pooled is not None and pooled.proposed else None,
        "rounds_by_source": pooled.rounds_by_source if pooled is not None else None,
        "time_split": _time_split(pooled),
        "execution": pooled.execution if pooled is not None else None,
        "first_s": _median([run.first_s for _, run in own.values()]),
        "call_s": _median([run.call_s for _, run in own.values()]),
        "new_tokens": sum(len(run.tokens[0]) for _, run in own.values()),
        "identical": sum(run.tokens == plain[key][1].tokens for key, (_, run) in own.items()),
        "predicted_speedup": _median([value for value, _ in predicted]),
        "measured_by_predicted": _median([measured / value for value, measured in predicted]),
        "questions": _questions(timed, plain, categories),
    }


def _speedups(timed: Mapping[Key, Run], plain: Runs, categories: Mapping[str, str], speed: Callable[[Run], float],
              name: str) -> dict[str, Any]:  # fmt: skip
    """Over all tasks, and by task and by category."""
    ratios = paired_ratios(
        {key: speed(run) for key, run in timed.items()}, {key: speed(plain[key][1]) for key in timed}
    )
    by_category: dict[str, list[float]] = {category: [] for category in categories.values()}
    tasks = tasks_of(by_category)
    by_task: dict[str, list[float]] = {task: [] for task in tasks.values()}
    for question, ratio in ratios.items():
        by_category[categories[question]].append(ratio)
        by_task[tasks[categories[question]]].append(ratio)

    def mean(groups: Mapping[str, Sequence[float]]) -> dict[str, float] | None:
        interval = geometric_mean_of(groups)
        return None if interval is None else asdict(interval)

    return {
        name: mean(by_task),
        f"{name}_by_task": {task: mean({task: found}) for task, found in by_task.items()},
        f"{name}_by_category": {category: mean({category: found}) for category, found in by_category.items()},
    }


def _questions(timed: Mapping[Key, Run], plain: Runs, categories: Mapping[str, str]) -> list[dict[str, Any]]:
    """By question the measured and the predicted speed-up, for the picture of both."""
    found: dict[str, list[tuple[float, float]]] = {}
    for key, pair in zip(timed, _predicted(timed, plain, keep=True), strict=True):
        if pair is not None:
            found.setdefault(key[0], []).append(pair)
    return [
        {
            "question": question,
            "category": categories[question],
            "predicted": median(predicted for predicted, _ in pairs),
            "measured": median(measured for _, measured in pairs),
        }
        for question, pairs in found.items()
    ]


def _predicted(timed: Mapping[Key, Run], plain: Runs, keep: bool = False) -> list[Any]:
    """For each run that drafted, the speed-up that its acceptance and its passes' times promise, and the measured one.

    Args:
        keep: None in the place of runs that did not draft.
    """
    pairs: list[Any] = []
    for key, run in timed.items():
        base, pair = plain[key][1], None
        if run.stats is not None and run.stats.proposed and not run.stats.recording_s:
            pair = (run.stats.predicted_speedup(base.decode_s / base.decoded), run.tokens_per_s / base.tokens_per_s)
        if keep or pair is not None:
            pairs.append(pair)
    return pairs


def _time_split(pooled: layerskip.DecodeStats | None) -> dict[str, float] | None:
    """Shares of the time of all rounds."""
    if pooled is None or not pooled.decode_s:
        return None
    names = ("draft_s", "verify_s", "host_s", "recording_s")
    return {name.removesuffix("_s"): getattr(pooled, name) / pooled.decode_s for name in names}


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
