"""CLaSp: the layers to skip by a dynamic programme over hidden states (Chen et al., ACL 2025).

A table holds, for i layers of which j are skipped, an approximate hidden state: behind layer i the programme keeps
whichever is more like the full model's state there, running layer i on the state with j skips before it, or leaving
the state with j - 1 skips as it was. So one pass over the layers gives a set for every number of skips. It takes for
granted that the best way to a state is part of the best way beyond it, which need not be so.

What differs: the published method looks at the last accepted token and runs all branches of a layer as one batch,
every 64 rounds anew; here all replayed positions of one part are run at once and vote by their mean cosine, once, for
a set that holds for all of them. A position sees the full model's entries before it and its own, as there. Beside
whole layers the programme can choose single sub-blocks, for searches that begin with its sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from layerskip.errors import SearchError
from layerskip.models.decoder import Step
from layerskip.search.candidate import Candidate
from layerskip.search.judge import Judge
from layerskip.search.selectors.base import Branches, Workbench, candidate_without, refuse_fields, sub_blocks

__all__ = ["Clasp", "clasp_paths"]

_Cell = tuple[Tensor, tuple[int, ...]]  # a state, and the units that were skipped on the way to it


@dataclass(frozen=True)
class Clasp:
    """The set of the programme for one number of skipped layers.

    Attributes:
        skip_ratio: share of all layers that is skipped; at least one is, and one is kept.
    """

    skip_ratio: float = 0.5

    def __post_init__(self) -> None:
        """Check the field."""
        refuse_fields(self, skip_ratio=0 < self.skip_ratio < 1)

    def select(self, bench: Workbench) -> list[Candidate]:
        """See `Selector`."""
        if bench.num_blocks < 2:
            raise SearchError("got a model of 1 block; expected at least 2 to skip one. Choose another selector.")
        skips = max(1, int(bench.num_blocks * self.skip_ratio))
        return [clasp_paths(bench.judge, skips)[skips]]


def clasp_paths(
    judge: Judge, most_skips: int | None = None, *, by_sub_block: bool = False, batch: int = 0
) -> dict[int, Candidate]:
    """For every number of skips the set that the programme finds, in one go: about ``units * most_skips`` passes.

    Args:
        most_skips: None: all but one.
        by_sub_block: skip attention and MLP one by one instead of whole layers; a skip is then one of them.
        batch: the part of the replay that is looked at.

    Returns:
        By the number of skips, from 1 on.
    """
    steps = sub_blocks(judge.num_blocks)
    units = [(step,) for step in steps] if by_sub_block else list(zip(steps[::2], steps[1::2], strict=True))
    most = len(units) - 1 if most_skips is None else min(most_skips, len(units) - 1)
    branches = Branches(judge.replay, batch, draft_length=1)
    cells: dict[int, _Cell] = {}
    states = iter(branches.full(steps))
    for index, unit in enumerate(units):
        passed = [next(states) for _ in unit]
        before, truth = passed[0][0], passed[-1][1]
        cells = _next_cells(branches, unit, index, cells or {0: (before, ())}, truth, most)
    return {
        skips: candidate_without(judge.num_blocks, (step for index in skipped for step in units[index]))
        for skips, (_, skipped) in cells.items()
        if skips
    }


def _next_cells(
    branches: Branches, unit: Sequence[Step], index: int, cells: dict[int, _Cell], truth: Tensor, most: int
) -> dict[int, _Cell]:
    """The table's column behind one unit."""
    column: dict[int, _Cell] = {0: (truth, ())}
    for skips in range(1, min(index + 1, most) + 1):
        state, skipped = cells[skips - 1]
        left_out = (state, (*skipped, index))
        column[skips] = left_out
        if skips not in cells:  # everything so far is skipped
            continue
        state, skipped = cells[skips]
        for step in unit:
            state = branches.run(step, state)
        if branches.similarity(state, truth) > branches.similarity(left_out[0], truth):
            column[skips] = (state, skipped)
    return column
