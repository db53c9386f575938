"""Pictures of a search: all candidates by acceptance and cost, its history, and the chosen draft's figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from layerskip.search.report.drawing import BLUE, GREEN, GRID, INK, MUTED, ORANGE, SURFACE, new_figure, tidy
from layerskip.search.result import Interval, TrialRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_front", "draw_history", "draw_offsets", "draw_predictions"]

_LEVEL_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_MOST_LEVELS = 7
_MOST_RINGS = 40
_KINDS: dict[str, dict[str, Any]] = {
    "proposed by the search": {"marker": "o", "facecolor": BLUE, "edgecolor": SURFACE, "s": 30, "linewidth": 0.6},
    "given at the start": {"marker": "s", "facecolor": INK, "edgecolor": SURFACE, "s": 30, "linewidth": 0.6},
    "given up early": {"marker": "o", "facecolor": "none", "edgecolor": MUTED, "s": 22, "linewidth": 0.9},
}


def draw_front(
    trials: Sequence[tuple[TrialRecord, bool]],
    front: Sequence[TrialRecord],
    best: TrialRecord,
    verify_ratio: Callable[[int], float],
) -> Figure | None:
    """Acceptance of every candidate against its cost, the best trade-offs joined; None: no candidate has both.

    Args:
        trials: each with whether it was a start.
        verify_ratio: cost in plain steps of a verification pass over so many tokens.
    """
    shown = [(trial, start) for trial, start in trials if _place(trial)]
    if not shown:
        return None
    figure = new_figure(5.0)
    axes = figure.subplots()
    tidy(axes, x="cost of drafting one token, in plain steps (cheaper ←)", y="drafts accepted (more ↑)")
    for kind, members in _by_kind(shown).items():
        places = [place for trial in members if (place := _place(trial))]
        xs, ys = zip(*places, strict=True)
        axes.scatter(xs, ys, label=f"{kind} ({len(members):,})", zorder=3, **_KINDS[kind])
    steps = sorted(place for trial in front if (place := _place(trial)))
    if steps:
        costs, rates = zip(*steps, strict=True)
        axes.step(costs, rates, where="post", color=GREEN, linewidth=1.6, zorder=2, label="best trade-offs")
        if len(steps) <= _MOST_RINGS:
            axes.scatter(costs, rates, s=70, facecolor="none", edgecolor=GREEN, linewidth=1.4, zorder=4)
    chosen = _place(best)
    if chosen:
        axes.scatter(*chosen, marker="*", s=260, color=ORANGE, edgecolor=SURFACE, zorder=5, label="chosen")
    _limit(axes, [place for trial, _ in shown if (place := _place(trial))])
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %" if value >= 0 else "")
    longest = max(len(trial.acceptance_by_offset) for trial, _ in shown) or 8
    reached = [trial.speedup for trial, _ in shown if trial.speedup is not None and math.isfinite(trial.speedup)]
    _equal_speedups(axes, verify_ratio, longest, reached)
    figure.legend(loc="outside upper left", ncols=3)
    return figure


def draw_history(trials: Sequence[tuple[TrialRecord, bool]]) -> Figure | None:
    """The predicted speed-up of each candidate as they were tried, and the best so far; None: nothing was judged."""
    from matplotlib.ticker import MaxNLocator

    known = [(trial, start) for trial, start in trials if _finite(trial.speedup)]
    if not known:
        return None
    figure = new_figure(4.2)
    axes = figure.subplots()
    tidy(axes, x="candidate, in the order of trying", y="predicted speed-up")
    _mark_plain(axes.axhline)
    for kind, members in _by_kind(known).items():
        xs, ys = [trial.number for trial in members], [trial.speedup or 0.0 for trial in members]
        axes.scatter(xs, ys, label=f"{kind} ({len(members):,})", zorder=3, **_KINDS[kind])
    best = -math.inf
    numbers: list[int] = []
    bests: list[float] = []
    for trial, _ in sorted(known, key=lambda each: each[0].number):
        if trial.state == "complete" and trial.speedup is not None:
            best = max(best, trial.speedup)
            numbers.append(trial.number)
            bests.append(best)
    if bests:
        numbers.append(max(trial.number for trial, _ in trials) + 1)
        axes.step(numbers, [*bests, best], where="post", color=ORANGE, linewidth=1.8, zorder=2, label="best so far")
    unknown = [trial.number for trial, _ in trials if not _finite(trial.speedup)]
    if unknown:
        label = f"without a result ({len(unknown)})"
        bottom = axes.get_xaxis_transform()
        axes.plot(unknown, [0.02] * len(unknown), "x", color=MUTED, markersize=5, transform=bottom, label=label)
    axes.margins(y=0.08)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    figure.legend(loc="outside upper left", ncols=3)
    return figure


def draw_offsets(
    searched: Sequence[float], held_out: Sequence[Interval], num_draft_tokens: int | None
) -> Figure | None:
    """How often the first, second, … draft of a round is accepted; None: no offset is known.

    Args:
        num_draft_tokens: how many the chosen plan drafts, for its end to be marked.
    """
    from matplotlib.ticker import PercentFormatter

    if not searched and not held_out:
        return None
    figure = new_figure(3.9, width=7.0)
    axes = figure.subplots()
    tidy(axes, x="token of the draft", y="accepted, if all before it were")
    last = max(len(searched), len(held_out))
    if searched:
        offsets = [each - 0.06 for each in range(1, len(searched) + 1)]
        axes.plot(offsets, searched, "o--", color=BLUE, markersize=6, linewidth=1.2, label="texts of the search")
    if held_out:
        offsets = [each + 0.06 for each in range(1, len(held_out) + 1)]
        values = [each.value for each in held_out]
        axes.errorbar(
            offsets,
            values,
            yerr=_spread(held_out),
            fmt="s-",
            color=ORANGE,
            markersize=6,
            linewidth=1.2,
            capsize=4,
            label="texts the search never saw, with 95 % interval",
        )
    if num_draft_tokens is not None and 0 < num_draft_tokens < last:
        axes.axvspan(num_draft_tokens + 0.5, last + 0.5, color=GRID, alpha=0.5, linewidth=0)
        axes.text(last + 0.4, 0.03, "the plan drafts no further", color=MUTED, fontsize=9, ha="right")
    axes.set_xlim(0.5, last + 0.5)
    axes.set_ylim(0, 1.04)
    axes.set_xticks(range(1, last + 1, 1 + last // 20))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def draw_predictions(rows: Sequence[tuple[str, Interval, bool]]) -> Figure | None:
    """Predictions and measurements of one speed-up below one another; None: there is none.

    Args:
        rows: a name, the speed-up, and whether it was measured.
    """
    if not rows:
        return None
    figure = new_figure(1.2 + 0.55 * len(rows), width=7.0)
    axes = figure.subplots()
    tidy(axes, x="speed-up over plain decoding", y="")
    _mark_plain(axes.axvline)
    heights = range(len(rows) - 1, -1, -1)
    for height, (_, speedup, measured) in zip(heights, rows, strict=True):
        colour, marker = (ORANGE, "D") if measured else (BLUE, "o")
        spread = [[each[0]] for each in _spread([speedup])]
        axes.errorbar([speedup.value], [height], xerr=spread, fmt=marker, color=colour, markersize=8, capsize=5)
        text = f"{speedup.value:.2f}"
        axes.annotate(
            text,
            (speedup.value, height),
            (0, 9),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            bbox={"facecolor": SURFACE, "edgecolor": "none", "pad": 0.5},
        )
    axes.set_yticks(list(heights), [name for name, _, _ in rows], color=INK)
    axes.set_ylim(-0.6, len(rows) - 0.3)
    axes.margins(x=0.12)
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    return figure


def _equal_speedups(axes: Axes, verify_ratio: Callable[[int], float], longest: int, reached: Sequence[float]) -> None:
    """Lines of equal speed-up, if every draft of a round stood equally often; named at the edge where they end.

    Args:
        reached: by candidates; the lines lie among these and somewhat above.
    """
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    costs = np.linspace(max(left, 0.005), right, 120)
    rates = np.linspace(max(bottom, 0.0), min(top, 1.0), 120)
    speedups = predicted_speedups(costs, rates, verify_ratio, longest)
    low, high = float(speedups.min()), float(speedups.max())
    if reached:
        low, high = max(low, min(reached)), min(high, max(reached) + 0.5 * (max(reached) - min(reached)) + 0.1)
    levels = _levels(low, high)
    if not levels:
        return
    contours = axes.contour(costs, rates, speedups, levels)
    lines = dict(zip(levels, contours.allsegs, strict=True))
    contours.remove()
    taken: list[tuple[float, float]] = []
    for level in sorted(levels, key=lambda each: each != 1):  # plain decoding has a name in any case
        points = [point for line in lines[level] for point in line]
        if not points:
            continue
        x, y = max(points, key=lambda point: point[0] + point[1])  # lines rise with cost: the end at the top or right
        place = (float((x - left) / (right - left)), float((y - bottom) / (top - bottom)))
        near = any(abs(place[0] - other[0]) < 0.06 and abs(place[1] - other[1]) < 0.05 for other in taken)
        if place[1] < 0.05 or near:
            continue
        taken.append(place)
        for line in lines[level]:
            style = "solid" if level == 1 else "dashed"
            axes.plot(line[:, 0], line[:, 1], color=MUTED, linewidth=0.9, linestyle=style, zorder=1)
        at_right = place[0] > 0.985
        axes.annotate(
            f"{level:g}×" + (" = plain" if level == 1 and at_right else ""),
            (x, y),
            (4, 0) if at_right else (0, 3),
            textcoords="offset points",
            ha="left" if at_right else "center",
            va="center" if at_right else "bottom",
            fontsize=8.5,
            color=INK if level == 1 else MUTED,
            annotation_clip=False,
        )


def predicted_speedups(
    costs: np.ndarray[Any, Any], rates: np.ndarray[Any, Any], verify_ratio: Callable[[int], float], longest: int
) -> np.ndarray[Any, Any]:
    """`best_speedup` for every acceptance (rows) and cost of a draft step (columns), at up to `longest` drafts."""
    tokens = np.ones((len(rates), 1))
    best = np.zeros((len(rates), len(costs)))
    for length in range(1, longest + 1):
        tokens = tokens + rates[:, None] ** length
        best = np.maximum(best, tokens / (length * costs[None, :] + verify_ratio(length + 1)))
    return best


def _levels(low: float, high: float) -> list[float]:
    """Round numbers strictly between, a few, 1 among them if it is."""
    for step in _LEVEL_STEPS:
        first, last = math.floor(low / step) + 1, math.ceil(high / step) - 1
        if last - first < _MOST_LEVELS:
            levels = {round(count * step, 2) for count in range(first, last + 1)}
            return sorted(levels | ({1.0} if low < 1 < high else set()))
    return [1.0] if low < 1 < high else []


def _limit(axes: Axes, places: Sequence[tuple[float, float]]) -> None:
    """Room around the points, never beyond what can be, and never so little that noise fills the picture."""
    for values, limit, least, greatest in (
        ([x for x, _ in places], axes.set_xlim, 0.0, math.inf),
        ([y for _, y in places], axes.set_ylim, -0.02, 1.02),
    ):
        room = max(0.06 * (max(values) - min(values)), 0.04)
        limit(max(least, min(values) - room), min(greatest, max(values) + room))


def _mark_plain(line: Callable[..., Any]) -> None:
    line(1.0, color=INK, linewidth=1.2, zorder=1, label="plain decoding")


def _by_kind(trials: Sequence[tuple[TrialRecord, bool]]) -> dict[str, list[TrialRecord]]:
    kinds: dict[str, list[TrialRecord]] = {name: [] for name in reversed(_KINDS)}
    for trial, start in trials:
        complete = "given at the start" if start else "proposed by the search"
        kinds[complete if trial.state == "complete" else "given up early"].append(trial)
    return {name: members for name, members in kinds.items() if members}


def _place(trial: TrialRecord) -> tuple[float, float] | None:
    cost, rate = trial.draft_ratio, trial.acceptance_rate
    return (cost, rate) if cost is not None and rate is not None and math.isfinite(cost + rate) else None


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _spread(intervals: Sequence[Interval]) -> list[list[float]]:
    """Distances to both ends, as error bars want them; an end that is unknown is none."""
    low = [max(0.0, each.value - each.low) if math.isfinite(each.low) else 0.0 for each in intervals]
    high = [max(0.0, each.high - each.value) if math.isfinite(each.high) else 0.0 for each in intervals]
    return [low, high]
