"""Pictures of a comparison: speed-ups with their intervals, by task, acceptance, where time goes, predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.theory_picture import theory_figure
from layerskip.search.report.drawing import BLUE, GREEN, INK, MUTED, ORANGE, Drawing, draw, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Picture", "files_of", "hang"]

Document = Mapping[str, Any]
Row = Mapping[str, Any]

_LINES = ("-", "--", ":", "-.")
_COLOURS = (BLUE, ORANGE, GREEN, INK)


@dataclass(frozen=True)
class Picture:
    """A picture of the report; `name` is that of its files, and it has no drawing where there is nothing to draw."""

    name: str
    title: str
    caption: str
    drawing: Drawing | None


def files_of(pictures: Sequence[Picture]) -> dict[str, bytes]:
    """The drawings as files, by name."""
    files = {}
    for picture in pictures:
        if picture.drawing is not None:
            files |= {f"{picture.name}.svg": picture.drawing.svg, f"{picture.name}.png": picture.drawing.png}
    return files


def hang(document: Document) -> list[Picture]:
    """All pictures, drawn."""
    rows = [row for row in document["arms"] if row["speedup"] is not None]
    said = "; ".join(f"{row['arm']} {row['speedup']['value']:.2f}" for row in rows)
    return [
        _picture("speedups", "How fast each arm decodes, over plain decoding",
                 "Points are geometric means over tasks, bars their 95 % bootstrap intervals over questions; right of "
                 "the line is faster. Blue: on this engine, orange: others.",
                 f"Speed-up by arm: {said}.", lambda: _speedups(rows)),
        _picture("by-task", "By task", "Speed over plain decoding of the same task; the darker, the faster.",
                 "Table of speed-ups by arm and task, also given below in words.",
                 lambda: _by_task(rows, document["tasks"])),
        _picture("acceptance", "How far into a draft it stays right",
                 "The chance of each drafted token to be accepted, given that all before it in its round were. Arms of "
                 "others do not say.",
                 "Acceptance by offset, also given below in numbers.", lambda: _acceptance(rows)),
        _picture("time", "Where the time of decoding goes",
                 "Shares of all rounds: drafting, the model's own passes, and everything else on the host.",
                 "Shares of time by arm, also given below in numbers.", lambda: _time(rows)),
        _picture("prediction", "Predicted against measured, question by question",
                 "Predicted from what was accepted and what the passes took. On the line both agree, in the grey band "
                 "to 15 %; below it the host has cost the rest.",
                 "Scatter plot of measured over predicted speed-ups.", lambda: theory_figure(_predictions(rows))),
    ]  # fmt: skip


def _picture(name: str, title: str, caption: str, alternative: str, make: Any) -> Picture:
    return Picture(name, title, caption, draw(name, alternative, make))


def is_ours(row: Row) -> bool:
    """Whether the arm runs on this engine, by what its settings say."""
    return "plan" in (row["described"] or {})


def _speedups(rows: Sequence[Row]) -> Figure | None:
    if not rows:
        return None
    figure = new_figure(0.8 + 0.34 * len(rows))
    axes = figure.subplots()
    for place, row in enumerate(reversed(rows)):
        mean, colour = row["speedup"], BLUE if is_ours(row) else ORANGE
        if mean["low"] is not None:
            axes.plot([mean["low"], mean["high"]], [place, place], color=colour, linewidth=2.5, solid_capstyle="butt")
        axes.plot([mean["value"]], [place], "o", color=colour, markersize=7)
        end = mean["value"] if mean["high"] is None else mean["high"]
        axes.annotate(f"{mean['value']:.2f}", (end, place), (6, 0), textcoords="offset points", va="center",
                      fontsize=9, color=INK)  # fmt: skip
    axes.axvline(1.0, color=MUTED, linewidth=1.0)
    axes.set_yticks(range(len(rows)), [row["arm"] for row in reversed(rows)])
    axes.margins(x=0.12)
    axes.grid(visible=False, axis="y")
    tidy(axes, x="speed over plain decoding", y="")
    return figure


def _by_task(rows: Sequence[Row], tasks: Sequence[str]) -> Figure | None:
    if not rows:
        return None
    import numpy as np

    means = [[row["speedup_by_task"].get(task) for task in tasks] for row in rows]
    values = np.array([[np.nan if mean is None else np.log2(mean["value"]) for mean in each] for each in means])
    figure = new_figure(1.1 + 0.34 * len(rows))
    axes = figure.subplots()
    axes.imshow(values, aspect="auto", cmap="PuOr_r", vmin=-1.5, vmax=1.5)
    for place, each in enumerate(means):
        for column, mean in enumerate(each):
            if mean is not None:
                dark = abs(values[place, column]) > 1.0
                axes.text(column, place, f"{mean['value']:.2f}", ha="center", va="center", fontsize=9,
                          color="#fefefe" if dark else "#101010")  # fmt: skip
    axes.set_xticks(range(len(tasks)), [task.replace(" ", "\n") for task in tasks])
    axes.set_yticks(range(len(rows)), [row["arm"] for row in rows])
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    tidy(axes, x="", y="")
    return figure


def _acceptance(rows: Sequence[Row]) -> Figure | None:
    shown = [row for row in rows if row["acceptance_by_offset"]]
    if not shown:
        return None
    figure = new_figure(3.6)
    axes = figure.subplots()
    for place, row in enumerate(shown):
        rates, line = row["acceptance_by_offset"], _LINES[place // len(_COLOURS) % len(_LINES)]
        axes.plot(range(1, len(rates) + 1), rates, line, marker="o", markersize=4,
                  color=_COLOURS[place % len(_COLOURS)], label=row["arm"])  # fmt: skip
    axes.set_ylim(0, 1.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    tidy(axes, x="token of the draft", y="accepted")
    return figure


def _time(rows: Sequence[Row]) -> Figure | None:
    shown = [row for row in reversed(rows) if row["time_split"]]
    if not shown:
        return None
    figure = new_figure(1.1 + 0.34 * len(shown))
    axes = figure.subplots()
    left = [0.0] * len(shown)
    for name, colour, label in (("draft", ORANGE, "draft"), ("verify", BLUE, "the model's passes"),
                                ("host", GREEN, "host"), ("recording", MUTED, "recording")):  # fmt: skip
        shares = [row["time_split"][name] for row in shown]
        if any(shares):
            axes.barh(range(len(shown)), shares, left=left, height=0.6, color=colour, label=label)
        left = [before + share for before, share in zip(left, shares, strict=True)]
    axes.set_yticks(range(len(shown)), [row["arm"] for row in shown])
    axes.set_xlim(0, 1)
    axes.grid(visible=False, axis="y")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4)
    tidy(axes, x="share of the time of all rounds", y="")
    return figure


def _predictions(rows: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    return {row["arm"]: [(each["predicted"], each["measured"]) for each in row["questions"]] for row in rows}
