"""What theory predicted beside what was measured: one scatter for comparisons and sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from layerskip.search.report.drawing import BLUE, GREEN, GRID, INK, MUTED, ORANGE, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["BAND", "share_within", "theory_figure"]

BAND = 0.15  # how far a prediction may be off
_COLOURS = (BLUE, ORANGE, GREEN, INK)

Pairs = Sequence[tuple[float, float]]
"""Predicted and measured speed-ups."""


def share_within(pairs: Pairs) -> float | None:
    """Of the measured those no further than `BAND` from what was predicted; None: there are none."""
    return sum(abs(measured / predicted - 1) <= BAND for predicted, measured in pairs) / len(pairs) if pairs else None


def theory_figure(points: Mapping[str, Pairs]) -> Figure | None:
    """Measured over predicted speed-ups by arm, the line on which both agree, and the band around it."""
    shown = {arm: pairs for arm, pairs in points.items() if pairs}
    if not shown:
        return None
    figure = new_figure(4.2)
    axes = figure.subplots()
    ends = [edge(value for pairs in shown.values() for pair in pairs for value in pair) for edge in (min, max)]
    axes.fill_between(
        ends, [(1 - BAND) * end for end in ends], [(1 + BAND) * end for end in ends], color=GRID, linewidth=0
    )
    axes.plot(ends, ends, color=MUTED, linewidth=1.0)
    for place, (arm, pairs) in enumerate(shown.items()):
        axes.scatter(*zip(*pairs, strict=True), s=22, marker="os^D"[place // len(_COLOURS) % 4], facecolor="none",
                     edgecolor=_COLOURS[place % len(_COLOURS)], label=arm)  # fmt: skip
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    tidy(axes, x="predicted speed-up", y="measured speed-up")
    return figure
