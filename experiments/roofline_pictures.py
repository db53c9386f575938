"""Pictures of what was simulated, and of predictions beside measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.roofline_fit import Cell, verify_ratios

__all__ = ["draw_check", "draw_simulation"]

_STYLES = ("-", "--", ":", "-.")


def draw_simulation(rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Speed-up at the best draft length, and the cost of verifying, over the batch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = list(dict.fromkeys(row["hardware"] for row in rows))
    contexts = sorted({row["context"] for row in rows})
    drafts = min(3, len(rows[0]["verify_ratios"]) - 1)
    for name in names:
        for context in contexts:
            own = [row for row in rows if (row["hardware"], row["context"]) == (name, context)]
            batches = [row["batch"] for row in own]
            look = {
                "color": f"C{names.index(name)}",
                "linestyle": _STYLES[contexts.index(context) % len(_STYLES)],
                "marker": ".",
                "label": f"{name}, context {context:,}",
            }
            left.plot(batches, [row["speedup"] for row in own], **look)
            right.plot(batches, [row["verify_ratios"][drafts] for row in own], **look)
    left.axhline(1.0, color="grey", linewidth=0.8)
    titles = "speed-up over plain decoding, best K", f"a pass that verifies {drafts} drafts, in plain steps"
    for axes, title in zip((left, right), titles, strict=True):
        axes.set_xscale("log", base=2)
        axes.set(title=title, xlabel="batch")
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.legend(fontsize="small")
    figure.savefig(out, dpi=120)


def draw_check(pass_s: Mapping[Cell, float], predicted: Mapping[Cell, float], fitted: Sequence[int], out: Path) -> None:
    """The cost of a pass over the batch's rows, measured (points) and predicted (lines), by context."""
    from matplotlib.figure import Figure

    measured = verify_ratios(pass_s)
    contexts, batches = (sorted({cell[place] for cell in measured}) for place in (2, 0))
    figure = Figure(figsize=(5.5 * len(contexts), 4.5), layout="constrained")
    for axes, context in zip(figure.subplots(1, len(contexts), squeeze=False)[0], contexts, strict=True):
        for index, batch in enumerate(batches):
            widths = [1, *sorted(width for of, width, behind in measured if (of, behind) == (batch, context))]
            points, lines = (
                [1.0, *(values[batch, width, context] for width in widths[1:])] for values in (measured, predicted)
            )
            kind = "fitted" if batch in fitted else "held out"
            axes.plot(widths, points, "o", color=f"C{index}", label=f"batch {batch}, {kind}")
            axes.plot(widths, lines, "-" if batch not in fitted else ":", color=f"C{index}")
        axes.set(title=f"context {context:,}", xlabel="tokens a row", ylabel="pass, in plain steps")
        axes.legend(fontsize="small")
    figure.savefig(out, dpi=120)
