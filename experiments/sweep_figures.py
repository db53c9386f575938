"""What the lines of a sweep amount to: speed-ups by value, where they cross 1, and what theory says of each.

Speeds are compared turn by turn with plain decoding of the same prompts. Predictions are by formula: acceptance by
offset as it was counted, seconds of drafting a token as they were taken, passes as they were timed on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from statistics import median
from typing import Any

import layerskip
from experiments.compare_arms import PLAIN
from experiments.report import SHORTEST, quartiles
from experiments.sweep_kinds import KINDS
from layerskip.errors import InputError
from layerskip.speedup import speedup_of_rounds, tokens_per_round

__all__ = ["crossings", "figures_of", "verify_cost_of"]

Line = Mapping[str, Any]
Turn = tuple[int, int]  # prompt, repeat


def figures_of(lines: Sequence[Line]) -> dict[str, Any]:
    """The figures of a sweep, as JSON values.

    Raises:
        InputError: the lines are no sweep's, or no value was run to its end.
    """
    begin = lines[0]
    kind = begin["options"].get("sweep")
    if kind not in KINDS:
        raise InputError("got lines that are no sweep's; expected those in the --out folder of experiments.sweep.")
    done = {line["value"]: line for line in lines if line["kind"] == "done"}
    left_out = {line["value"]: line["why"] for line in lines if line["kind"] == "left_out"}
    if not done:
        whys = "; ".join(f"{value:g}: {why}" for value, why in left_out.items())
        raise InputError(
            f"got lines without a value that was run to its end ({whys or 'none was begun'}); expected one. Give other "
            "--values, or go on with --resume."
        )
    arms = [name for name in begin["options"]["arms"] if name != PLAIN]
    runs = _runs_of(lines)
    costs = {(line["value"], line["what"]): line for line in lines if line["kind"] == "costs" and not line["error"]}
    errors = {(line["arm"], line["value"]): line["error"] for line in lines
              if line["kind"] in ("arm", "run") and line["error"] is not None}  # fmt: skip
    points = []
    for value in done:
        plain = runs.get((PLAIN, value), {})
        verify = verify_cost_of(costs[value, "passes"]["cells"]) if (value, "passes") in costs else None
        overlaps = costs[value, "overlap"]["overlaps"] if (value, "overlap") in costs else {}
        for arm in (PLAIN, *arms):
            error, own = errors.get((arm, value)), runs.get((arm, value), {})
            figures = _figures(own, plain, verify)
            points.append({"arm": arm, "value": value, "error": error, "overlap": overlaps.get(arm), **figures})
    _add_tau(points, arms, pooled=kind == "drafts")
    logarithmic = KINDS[kind].logarithmic
    return {
        "sweep": kind,
        "conditions": begin["conditions"],
        "options": begin["options"],
        "model": begin["model"],
        "values": list(done),
        "left_out": left_out,
        "done": [{name: line[name] for name in _SHOWN} for line in done.values()],
        "arms": arms,
        "points": points,
        "crossings": {arm: crossings(*_curve(points, arm), logarithmic) for arm in arms},
        "cache_takes_over": _cache_takes_over(kind, begin["model"], list(done.values())),
    }


_SHOWN = ("value", "turns", "of", "turn_s", "seconds", "context", "cache_bytes", "repeats_text", "setup")


def _runs_of(lines: Sequence[Line]) -> dict[tuple[str, float], dict[Turn, Line]]:
    """Runs that did not fail, by arm and value, and then by turn."""
    runs: dict[tuple[str, float], dict[Turn, Line]] = {}
    for line in lines:
        if line["kind"] == "run" and line["error"] is None:
            runs.setdefault((line["arm"], line["value"]), {})[line["prompt"], line["repeat"]] = line
    return runs


def _figures(
    own: Mapping[Turn, Line], plain: Mapping[Turn, Line], verify_cost: Callable[[int], float] | None
) -> dict[str, Any]:
    """Of one arm at one value; None where there is nothing to tell from."""
    timed = [
        (own[turn], plain[turn]) for turn in own if turn in plain and all(map(_is_timed, (own[turn], plain[turn])))
    ]
    told = [layerskip.DecodeStats(**line["stats"]) for line in own.values() if line["stats"] is not None]
    pooled = layerskip.DecodeStats.pooled(told) if told else None
    rates = pooled.acceptance_by_offset if pooled is not None and pooled.proposed else None
    found: dict[str, Any] = {
        "turns": len(own),
        "speedup": quartiles([_speed(line) / _speed(base) for line, base in timed]),
        "tokens_per_s": median([_speed(line) for line, _ in timed]) if timed else None,
        "first_s": median([line["first_s"] for line in own.values()]) if own else None,
        "identical": sum(_identical(own[turn], plain[turn]) for turn in own if turn in plain),
        "rows": sum(line["rows"] for line in own.values()),
        "tokens_per_round": pooled.tokens_per_round if pooled is not None else None,
        "acceptance_by_offset": rates,
        "acceptance": rates[0] if rates else None,
        "drafted_by_offset": pooled.drafted_by_offset if rates and pooled is not None else None,
        "accepted_by_offset": pooled.accepted_by_offset if rates and pooled is not None else None,
        "drafted_histogram": pooled.drafted_histogram if rates and pooled is not None else None,
        "draft_ratio": None,
        "predicted": None,
    }
    if pooled is not None and rates and timed:
        plain_s = sum(base["decode_s"] for _, base in timed) / sum(base["decoded"] for _, base in timed)
        found["draft_ratio"] = pooled.draft_s / pooled.proposed / plain_s
        if verify_cost is not None:
            found["predicted"] = _predicted(pooled, found["draft_ratio"], verify_cost)
    return found


def _predicted(stats: layerskip.DecodeStats, draft_ratio: float, verify_cost: Callable[[int], float]) -> float:
    """By formula: tokens by acceptance, a token's draft at its cost, a pass at that of its width.

    Tokens beside the drafts widen a pass, and are counted as accepted where they were.
    """
    beside = 1 + stats.proposed_beside / stats.proposed
    rounds = {drafts: float(count) for drafts, count in enumerate(stats.drafted_histogram) if count}
    return speedup_of_rounds(
        stats.acceptance_by_offset, rounds, draft_ratio, lambda drafts: verify_cost(round(drafts * beside))
    )


def verify_cost_of(cells: Sequence[Mapping[str, Any]]) -> Callable[[int], float]:
    """v from timed passes: a pass that verifies so many drafts, in plain steps.

    Between widths that were timed, and beyond the widest, along a straight line.

    Args:
        cells: "width" and "pass_s" of passes of one batch behind one context; one of width 1 among them.
    """
    passes = sorted((cell["width"], cell["pass_s"]) for cell in cells)
    plain_s = passes[0][1]

    def verify_cost(drafts: int) -> float:
        width = drafts + 1
        above = next((place for place, (each, _) in enumerate(passes) if each >= width), len(passes) - 1)
        (low, low_s), (high, high_s) = passes[max(above, 1) - 1], passes[max(above, 1)]
        return (low_s + (high_s - low_s) * (width - low) / (high - low)) / plain_s

    return verify_cost


def _add_tau(points: Sequence[dict[str, Any]], arms: Sequence[str], pooled: bool) -> None:
    """Tokens a round by formula, of rounds with as many drafts as were there, from the acceptance at all values.

    Args:
        pooled: acceptance by offset is the same at all values; else there is nothing to predict from.
    """
    for point in points:
        point["tau"] = None
    for arm in arms if pooled else ():
        own = [point for point in points if point["arm"] == arm and point["drafted_by_offset"]]
        accepted, drafted = (_sum(point[name] for point in own) for name in ("accepted_by_offset", "drafted_by_offset"))
        rates = [hits / max(1, tries) for hits, tries in zip_longest(accepted, drafted, fillvalue=0)]
        for point in own:
            rounds = dict(enumerate(point["drafted_histogram"]))
            tokens = sum(count * tokens_per_round(rates, drafts) for drafts, count in rounds.items())
            point["tau"] = tokens / sum(rounds.values())


def _sum(counts: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def _curve(points: Sequence[Mapping[str, Any]], arm: str) -> tuple[list[float], list[float]]:
    own = [point for point in points if point["arm"] == arm and point["speedup"] is not None and not point["error"]]
    return [point["value"] for point in own], [point["speedup"][1] for point in own]


def crossings(values: Sequence[float], speedups: Sequence[float], logarithmic: bool) -> list[dict[str, Any]]:
    """Where a curve crosses 1, on straight lines between its points, and whether it falls there.

    Args:
        values: ascending.
        logarithmic: lines are straight on such an axis of values.
    """
    found = []
    for place in range(len(values) - 1):
        (low, high), (before, after) = values[place : place + 2], speedups[place : place + 2]
        if (before >= 1) != (after >= 1):
            share = (before - 1) / (before - after)
            at = low * (high / low) ** share if logarithmic else low + (high - low) * share
            found.append({"value": at, "falls": before >= 1})
    return found


def _cache_takes_over(kind: str, model: Mapping[str, Any], done: Sequence[Line]) -> float | None:
    """The value at which a plain step reads as many bytes of the cache as of weights; None: the cache does not grow."""
    if kind == "context":
        return float(model["step_bytes"]) / (model["cache_bytes_per_token"] * int(done[0]["setup"]["batch"]))
    if kind == "batch":
        return float(model["step_bytes"]) / (model["cache_bytes_per_token"] * float(done[0]["context"]))
    return None


def _speed(line: Line) -> float:
    return float(line["decoded"]) / float(line["decode_s"])


def _is_timed(line: Line) -> bool:
    """Whether times count: some row has an answer long enough."""
    return max(line["row_tokens"]) >= SHORTEST and line["decode_s"] > 0 and line["decoded"] > 0


def _identical(own: Line, plain: Line) -> int:
    return sum(a == b for a, b in zip(own["answers"], plain["answers"], strict=True))
