"""What drafting gains on given hardware, by the roofline and the arithmetic of speculation. It reads no clock."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from experiments.roofline import Hardware, held_bytes, pass_time
from layerskip.models.decoder import Step
from layerskip.models.inspection import Inspection
from layerskip.speedup import best_draft_length, least_acceptance, speedup

__all__ = ["MOST_ROWS", "Draft", "paying_batches", "simulate"]

MOST_ROWS = 128  # up to which every batch is asked whether drafting pays


@dataclass(frozen=True)
class Draft:
    """How is drafted, as far as it costs, and how often drafts are accepted.

    Attributes:
        path, scored_ids, further_parameters: see `pass_time`.
        acceptance: by offset, if those before were accepted; the last goes on.
        longest: drafts a round.
        cost: of drafting one token, in plain steps; None: by the path. 0: drafts are looked up.
    """

    path: tuple[Step, ...]
    acceptance: tuple[float, ...]
    scored_ids: int | None = None
    further_parameters: int = 0
    longest: int = 8
    cost: float | None = None

    def cost_ratio(self, shape: Inspection, hardware: Hardware, batch: int, context: int) -> float:
        """Of one step in plain steps: c."""
        if self.cost is not None:
            return self.cost
        step = pass_time(shape, hardware, batch, 1, context, self.path, self.scored_ids, self.further_parameters)
        return step.total_s / pass_time(shape, hardware, batch, 1, context).total_s


def simulate(shape: Inspection, hardware: Hardware, draft: Draft, batch: int, context: int) -> dict[str, Any]:
    """What decoding `batch` rows behind `context` tokens takes, and what drafting gains, by name.

    Rows accept different numbers of drafts, and each goes on from its own: tokens a round are those of one row, times
    the batch.
    """
    plain = pass_time(shape, hardware, batch, 1, context)
    verify = [
        pass_time(shape, hardware, batch, drafts + 1, context).total_s / plain.total_s
        for drafts in range(draft.longest + 1)
    ]
    cost = draft.cost_ratio(shape, hardware, batch, context)
    drafts, gain = best_draft_length(draft.acceptance, cost, verify.__getitem__, draft.longest)
    least = least_acceptance(cost, verify.__getitem__, draft.longest)
    held = held_bytes(shape, batch, context + draft.longest + 1)
    return {
        "hardware": hardware.name,
        "batch": batch,
        "context": context,
        "plain_step_s": plain.total_s,
        "plain_step_parts_s": asdict(plain),
        "tokens_per_s": batch / plain.total_s,
        "draft_ratio": cost,
        "verify_ratios": verify,
        "speedups": [speedup(draft.acceptance, each, cost, verify[each]) for each in range(draft.longest + 1)],
        "best_draft_length": drafts,
        "speedup": gain,
        "least_acceptance": least,
        "held_bytes": held,
        "fits": None if hardware.memory_bytes is None else held <= hardware.memory_bytes,
    }


def paying_batches(
    shape: Inspection, hardware: Hardware, draft: Draft, context: int
) -> tuple[int, list[tuple[int, int]]]:
    """The largest batch up to `MOST_ROWS` that fits into memory (0: none does), and those at which drafting gains.

    These as ranges (first, last), since gains need not fall with the batch: behind long contexts reading the cache is
    what takes the time, and verifying is cheap again (MagicDec, Chen et al. 2024).
    """
    ranges: list[tuple[int, int]] = []
    for batch in range(1, MOST_ROWS + 1):
        found = simulate(shape, hardware, draft, batch, context)
        if found["fits"] is False:
            return batch - 1, ranges
        if found["best_draft_length"]:
            begun = ranges.pop()[0] if ranges and ranges[-1][1] == batch - 1 else batch
            ranges.append((begun, batch))
    return MOST_ROWS, ranges
