"""Pictures of a model's layers, attention above MLP: what a draft runs, and what each sub-block is worth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from layerskip.search.candidate import Candidate
from layerskip.search.report.drawing import BLUE, GRID, INK, MUTED, ORANGE, SURFACE, new_figure
from layerskip.search.report.telling import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_heat", "draw_path"]

_ROWS = {"attention": 1, "mlp": 0}  # by height
_FEWEST_COLUMNS = 12  # a model of one layer is not one huge square
_MOST_NUMBERED = 40  # columns in which a number can be read
_SHADES = 20  # few enough for a colour bar of shapes instead of pixels


def draw_path(candidate: Candidate, num_layers: int) -> Figure:
    """Which sub-blocks a draft runs, which it leaves out, and which lie behind its exit."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch, Rectangle

    figure = new_figure(1.75)
    axes = _grid(figure, num_layers)
    end = num_layers if candidate.exit_layer is None else candidate.exit_layer
    size = _cross_size(num_layers)
    for name, left_out in (("attention", candidate.skip_attention), ("mlp", candidate.skip_mlp)):
        for layer in range(num_layers):
            behind, skipped = layer >= end, layer in left_out
            face = GRID if behind else SURFACE if skipped else BLUE
            edge = ORANGE if skipped else SURFACE
            x, y = layer - 0.44, _ROWS[name] - 0.42
            axes.add_patch(Rectangle((x, y), 0.88, 0.84, facecolor=face, edgecolor=edge, linewidth=0.8))
        heights = [_ROWS[name]] * len(left_out)
        axes.plot(left_out, heights, "x", color=ORANGE, markersize=size, markeredgewidth=size / 4)
    handles: list[Patch | Line2D] = [Patch(facecolor=BLUE, label="runs in the draft")] if end else []
    if candidate.skip_attention or candidate.skip_mlp:
        handles.append(
            Line2D([], [], linestyle="", marker="x", color=ORANGE, markeredgewidth=1.8, label="left out of the draft")
        )
    if end < num_layers:
        axes.axvline(end - 0.5, color=INK, linewidth=1.6)
        what = "the draft's exit" if candidate.trained is None else "trained blocks take over"
        where = f"after {counted(end, 'layer')}" if end else "before any layer"
        handles.append(Line2D([], [], color=INK, linewidth=1.6, label=f"{what}, {where}"))
        handles.append(Patch(facecolor=GRID, label="behind the exit: not reached"))
    figure.legend(handles=handles, loc="outside upper left", ncols=4)
    return figure


def draw_heat(values: Mapping[str, Sequence[float]], chosen: Candidate, label: str, decimals: int = 0) -> Figure:
    """A number for each sub-block as a colour, those that `chosen` leaves out marked.

    Args:
        values: for "attention" and "mlp", by layer; shares from 0 to 1, at least one; NaN: not tried.
        label: what the numbers are.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch, Rectangle

    num_layers = max(len(each) for each in values.values())
    figure = new_figure(2.5)
    axes = _grid(figure, num_layers)
    known = [each for row in values.values() for each in row if not math.isnan(each)]
    low, high = min(known), max(known)
    shades = colormaps["cividis"].resampled(_SHADES)
    norm = Normalize(low, high if high > low else low + 0.01)
    for name, row in values.items():
        for layer, value in enumerate(row):
            x, y = layer - 0.5, _ROWS[name] - 0.5
            tried = not math.isnan(value)
            face = shades(norm(value)) if tried else GRID
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=face, edgecolor=SURFACE, linewidth=0.6))
            if tried and num_layers <= _MOST_NUMBERED:
                tone = "#000000" if norm(value) > 0.5 else "#fefefe"
                size = 8 if num_layers <= 24 else 6.5
                text = f"{100 * value:.{decimals}f}"
                axes.text(layer, _ROWS[name] + 0.08, text, ha="center", va="center", fontsize=size, color=tone)
    left_out = dict(zip(("attention", "mlp"), chosen.skipped(num_layers), strict=True))
    for name in values:
        marked = sorted(left_out[name])
        heights = [_ROWS[name] - 0.3] * len(marked)
        size = min(4.5, _cross_size(num_layers))
        rim = 0.8 if num_layers <= _MOST_NUMBERED else 0.0
        axes.plot(
            marked,
            heights,
            linestyle="",
            marker="o",
            color=ORANGE,
            markersize=size,
            markeredgecolor="#fefefe",
            markeredgewidth=rim,
        )
    bar = figure.colorbar(ScalarMappable(norm, shades), ax=axes, orientation="horizontal", aspect=60, pad=0.06)
    bar.ax.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    bar.set_label(label)
    bar.outline.set_visible(False)
    handles: list[Patch | Line2D] = []
    if any(left_out.values()):
        dot = Line2D([], [], linestyle="", marker="o", color=ORANGE, markersize=5, label="not run by the chosen draft")
        handles.append(dot)
    if len(known) < sum(map(len, values.values())):
        handles.append(Patch(facecolor=GRID, label="not tried alone"))
    if handles:
        figure.legend(handles=handles, loc="outside upper left", ncols=2)
    return figure


def _grid(figure: Figure, num_layers: int) -> Axes:
    axes = figure.subplots()
    axes.set_xlim(-0.5, max(num_layers, _FEWEST_COLUMNS) - 0.5)
    axes.set_ylim(-0.5, 1.5)
    axes.set_yticks([1, 0], ["attention", "MLP"], color=INK)
    step = 1 if num_layers <= 32 else 2 ** math.ceil(math.log2(num_layers / 24))
    axes.set_xticks(range(0, num_layers, step))
    axes.set_xlabel("layer", color=MUTED, loc="left")
    axes.grid(False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return axes


def _cross_size(num_layers: int) -> float:
    return max(2.0, min(7.0, 200 / max(num_layers, _FEWEST_COLUMNS)))
