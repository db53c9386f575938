"""Pictures of a sweep: speed-ups over the swept quantity with what explains them beside, and predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from experiments.compare_arms import PLAIN
from experiments.compare_pictures import Picture
from experiments.sweep_kinds import KINDS, Kind
from experiments.theory_picture import theory_figure
from layerskip.search.report.drawing import BLUE, GREEN, INK, MUTED, ORANGE, draw, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["hang", "predictions"]

Document = Mapping[str, Any]

_COLOURS = (BLUE, ORANGE, GREEN, INK)
_LINES = ("-", "--", "-.")


def hang(document: Document) -> list[Picture]:
    """Both pictures, drawn."""
    kind = KINDS[document["sweep"]]
    return [
        Picture("sweep", f"Speed over plain decoding by {kind.field}", "", draw(
            "sweep", f"Speed-up of each arm over {kind.axis}.", lambda: _curves(document, kind))),
        Picture("theory", "Predicted against measured", "", draw(
            "theory", "Scatter plot of measured over predicted speed-ups.",
            lambda: theory_figure(predictions(document)))),
    ]  # fmt: skip


def predictions(document: Document) -> dict[str, list[tuple[float, float]]]:
    """Predicted and measured speed-ups by arm, a pair for each value."""
    return {
        arm: [
            (point["predicted"], point["speedup"][1])
            for point in _points(document, arm)
            if point["predicted"] is not None and point["speedup"] is not None
        ]
        for arm in document["arms"]
    }


def _points(document: Document, arm: str) -> list[dict[str, Any]]:
    """Of an arm, but for those at which it failed."""
    return [point for point in document["points"] if point["arm"] == arm and not point["error"]]


def _curves(document: Document, kind: Kind) -> Figure:
    figure = new_figure(4.4)
    left, right = figure.subplots(1, 2)
    left.axhline(1.0, color=MUTED, linewidth=1.0)
    for place, arm in enumerate((PLAIN, *document["arms"])):
        look = {"color": MUTED if arm == PLAIN else _COLOURS[(place - 1) % len(_COLOURS)]}
        line = "-" if arm == PLAIN else _LINES[(place - 1) // len(_COLOURS) % len(_LINES)]
        points = _points(document, arm)
        if arm != PLAIN:
            timed = [point for point in points if point["speedup"] is not None]
            values = [point["value"] for point in timed]
            low, middle, high = ([point["speedup"][place] for point in timed] for place in range(3))
            left.fill_between(values, low, high, alpha=0.15, linewidth=0, **look)
            left.plot(values, middle, line, marker="o", markersize=4, label=arm, **look)
            for crossing in document["crossings"][arm]:
                left.plot([crossing["value"]], [1.0], marker="v" if crossing["falls"] else "^", markersize=8, **look)
                left.annotate(f"{crossing['value']:.3g}", (crossing["value"], 1.0), (4, 6),
                              textcoords="offset points", fontsize=8, **look)  # fmt: skip
        _plot(right, points, kind.beside.figure, line, label=arm, marker="o", markersize=4, **look)
        if kind.beside.theory is not None:
            _plot(right, points, kind.beside.theory, ":", **look)
    for axes in (left, right):
        if kind.logarithmic:
            axes.set_xscale("log", base=2)
        axes.set_xticks(document["values"], [f"{value:g}" for value in document["values"]])
    over = document["cache_takes_over"]
    if over is not None and min(document["values"]) <= over <= max(document["values"]):
        right.axvline(over, color=MUTED, linewidth=1.0, linestyle=":")
        right.annotate("cache = weights", (over, 0.02), (3, 0), xycoords=("data", "axes fraction"),
                       textcoords="offset points", fontsize=8, color=MUTED)  # fmt: skip
    if kind.beside.logarithmic:
        right.set_yscale("log", base=2)
        right.yaxis.set_major_formatter("{x:g}")
    handles, labels = right.get_legend_handles_labels()
    known = dict(zip(labels, handles, strict=True)) | dict(
        zip(*reversed(left.get_legend_handles_labels()), strict=True)
    )
    figure.legend(known.values(), known.keys(), loc="outside upper center", ncols=6)
    tidy(left, x=kind.axis, y="speed over plain decoding")
    tidy(right, x=kind.axis, y=kind.beside.title)
    return figure


def _plot(axes: Axes, points: Sequence[Mapping[str, Any]], name: str, line: str, **look: Any) -> None:
    """The figure called `name` over the values, where there is one."""
    found = [(point["value"], point[name]) for point in points if point[name] is not None]
    if found:
        axes.plot(*zip(*found, strict=True), line, **look)
