"""The roofline's constants of the machine at hand, from passes that are timed here, and how far off it then is.

A grid of passes is timed; constants are fitted to one part of the batches, so that those of the others are predictions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

import layerskip
from experiments.measuring import pass_grid
from experiments.roofline import Hardware, pass_time
from layerskip.models.inspection import Inspection

__all__ = [
    "BATCHES",
    "CONTEXTS",
    "FITTED_BATCHES",
    "WIDTHS",
    "Cell",
    "Errors",
    "check_table",
    "compare",
    "fit",
    "measure",
    "swept_passes",
    "verify_ratios",
]

WIDTHS = (1, 2, 3, 4, 6, 8)
BATCHES, FITTED_BATCHES = (1, 2, 4, 8, 16, 32), (1, 4, 16)
CONTEXTS = (240, 1000)  # with the widest pass just below what recorded passes read, powers of two

Cell = tuple[int, int, int]
"""Batch, width, context."""

# Where the search begins, in the units of `Hardware`, and how far it may go: six decades around.
_STARTS = {
    "flops_per_s": 5e11,
    "bytes_per_s": 2e10,
    "kernel_s": 1e-5,
    "half_rate_rows": 4.0,
    "attention_flops_per_s": 1e11,
    "cache_bytes_per_s": 1e10,
}
_REACH = math.log(1e6)


def measure(
    model: layerskip.Model,
    batches: Sequence[int] = BATCHES,
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = 9,
) -> dict[Cell, float]:
    """Seconds of each pass, on a GPU as CUDA graphs."""
    recorded = model.decoder.device.type == "cuda"
    return pass_grid(model.decoder, batches, widths, contexts, recorded=recorded, repeats=repeats)


def swept_passes(lines: Sequence[Mapping[str, Any]]) -> dict[Cell, float]:
    """Seconds of the passes that the lines of a sweep tell of, of the widths that were timed at all of its values."""
    told = [line["cells"] for line in lines if line["kind"] == "costs" and line.get("cells")]
    common = set.intersection(*({cell["width"] for cell in cells} for cells in told)) if told else set()
    return {
        (cell["batch"], cell["width"], cell["context"]): cell["pass_s"]
        for cells in told
        for cell in cells
        if cell["width"] in common
    }


def fit(shape: Inspection, pass_s: Mapping[Cell, float], name: str = "this machine") -> Hardware:
    """The constants by which the roofline comes nearest to these passes, by the logarithm of the ratio.

    A few that are far off, which a machine with other work has, count less than by their square.
    """
    from scipy.optimize import least_squares

    cells, measured = list(pass_s), np.log(list(pass_s.values()))

    def hardware_of(logs: Sequence[float]) -> Hardware:
        return Hardware(name, **dict(zip(_STARTS, map(math.exp, logs), strict=True)))

    def residuals(logs: Sequence[float]) -> Any:
        hardware = hardware_of(logs)
        return np.log([pass_time(shape, hardware, *cell).total_s for cell in cells]) - measured

    starts = np.log(list(_STARTS.values()))
    found = least_squares(
        residuals, starts, bounds=(starts - _REACH, starts + _REACH), loss="soft_l1", f_scale=0.1, diff_step=1e-3
    )
    return hardware_of(found.x.tolist())


@dataclass(frozen=True)
class Errors:
    """Of predictions over measurements, less one.

    Attributes:
        of: by cell.
        median, largest: of their sizes.
        within_15_percent: share of the cells.
    """

    of: dict[Cell, float]

    @property
    def sizes(self) -> list[float]:
        """Ascending."""
        return sorted(map(abs, self.of.values()))

    def to_dict(self) -> dict[str, Any]:
        """The summary, as JSON values."""
        sizes = self.sizes
        return {
            "cells": len(sizes),
            "median": median(sizes),
            "largest": sizes[-1],
            "within_15_percent": sum(size <= 0.15 for size in sizes) / len(sizes),
        }


def verify_ratios(pass_s: Mapping[Cell, float]) -> dict[Cell, float]:
    """Passes over several tokens in plain steps of the same batch behind the same context: v."""
    return {
        (batch, width, context): seconds / pass_s[batch, 1, context]
        for (batch, width, context), seconds in pass_s.items()
        if width > 1
    }


def compare(
    shape: Inspection, hardware: Hardware, pass_s: Mapping[Cell, float]
) -> tuple[Errors, Errors, dict[Cell, float]]:
    """Errors of v and of the seconds on these passes, and v as predicted."""
    predicted_s = {cell: pass_time(shape, hardware, *cell).total_s for cell in pass_s}
    predicted, measured = verify_ratios(predicted_s), verify_ratios(pass_s)
    errors = Errors({cell: ratio / measured[cell] - 1 for cell, ratio in predicted.items()})
    return errors, Errors({cell: each / pass_s[cell] - 1 for cell, each in predicted_s.items()}), predicted


def check_table(pass_s: Mapping[Cell, float], predicted: Mapping[Cell, float], fitted: Sequence[int]) -> str:
    """Measured and predicted v, one line for each batch and context."""
    widths = sorted({width for _, width, _ in pass_s if width > 1})
    lines = [
        "| context | batch | plain step, ms | " + " | ".join(f"v({width - 1})" for width in widths) + " |",
        "| --- " * (3 + len(widths)) + "|",
    ]
    measured = verify_ratios(pass_s)
    for context, batch in sorted({(context, batch) for batch, _, context in pass_s}):
        cells = [f"{measured[batch, w, context]:.2f}, predicted {predicted[batch, w, context]:.2f}" for w in widths]
        kind = f"{batch} ({'fitted' if batch in fitted else 'held out'})"
        lines.append(f"| {context} | {kind} | {1e3 * pass_s[batch, 1, context]:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)
