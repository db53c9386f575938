"""The decision before each round: from which source each row drafts, and how many tokens.

A round of `k` drafts commits 1 + sum of P(first j accepted) tokens and costs ``k * draft + verify(k + 1)``. What
maximises tokens per time is taken, nothing drafted being one of the choices (Leviathan et al. 2023, thm. 3.8, with
acceptance by offset and measured costs in place of one constant each). While a draft is being made, the next token is
drafted only if the chance that it stands is worth its time at that rate, which is the optimal stopping rule of a
renewal process. Decisions depend on the past, on clocks and on drafts that are verified whatever is decided: the output
stays exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from layerskip.draft import Draft
from layerskip.drafters.base import GoesOn
from layerskip.governor.acceptance import AcceptanceRecord
from layerskip.governor.costs import Costs

__all__ = ["Always", "Decision", "Governor", "Source", "WorthIt"]

Grades = Mapping[str, Sequence[int | None]]
"""By source, `Drafter.outlook` of each row."""

_FIRST_DRAFTS = 2  # most drafts of a row's first rounds with a source, whose prior is mere hope
_LEAST_GAIN = 0.02  # expected tokens below which a row drafts nothing, even where others' drafts make it free


@dataclass(frozen=True)
class Source:
    """A drafter, as the governor knows it.

    Attributes:
        most: drafts a round.
        cost_ratio: of one step in plain steps, a guess until measured; 0: free, and all its drafts come at once.
        priors: acceptance to assume at first, by grade and offset added up (`AcceptanceRecord`).
    """

    most: int
    cost_ratio: float
    priors: Sequence[float] = (0.9, 0.9, 0.9, 0.9)


@dataclass(frozen=True)
class Decision:
    """What to draft in one round.

    Attributes:
        limits: by source, most drafts of each row; a row drafts from one source at most.
        grades: what it was decided on.
        rate: tokens per unit of time, over all rows, that is expected of the round.
    """

    limits: dict[str, list[int]]
    grades: Grades = field(default_factory=dict)
    rate: float = 0.0


class Governor(Protocol):
    """Decides before each round, and learns after it."""

    def decide(self, rooms: Sequence[int], grades: Grades) -> Decision:
        """`rooms`: most drafts that each row has room for, 0 for a finished one."""
        ...

    def goes_on(self, source: str, decision: Decision) -> GoesOn | None:
        """What a draft asks behind each token; None: nothing."""
        ...

    def learn(self, decision: Decision, drafts: Mapping[str, Draft], accepted: Sequence[int | None]) -> None:
        """`accepted`: of each row's drafts, None for a row that was finished."""
        ...

    def note_times(self, draft_s: Mapping[str, tuple[int, float]], width: int, verify_s: float) -> None:
        """Steps and seconds of each drafter, and the seconds of all that followed, over `width` tokens."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """What it knows, for statistics."""
        ...


@dataclass
class Always:
    """No governing: as many drafts as there may be, free ones first."""

    sources: Mapping[str, Source]

    def decide(self, rooms: Sequence[int], grades: Grades) -> Decision:
        """See `Governor.decide`."""
        limits = {name: [0] * len(rooms) for name in self.sources}
        by_cost = sorted(self.sources, key=lambda name: self.sources[name].cost_ratio)
        for row, room in enumerate(rooms):
            name = next((name for name in by_cost if grades[name][row] is not None), None)
            if name is not None:
                limits[name][row] = max(0, min(room, self.sources[name].most))
        return Decision(limits, grades)

    def goes_on(self, source: str, decision: Decision) -> GoesOn | None:
        """See `Governor.goes_on`."""
        return None

    def learn(self, decision: Decision, drafts: Mapping[str, Draft], accepted: Sequence[int | None]) -> None:
        """Nothing."""

    def note_times(self, draft_s: Mapping[str, tuple[int, float]], width: int, verify_s: float) -> None:
        """Nothing."""

    def to_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}


class WorthIt:
    """Drafts what is expected to gain time."""

    def __init__(self, sources: Mapping[str, Source], costs: Costs, batch: int) -> None:
        """`costs`: measured, or given."""
        self.sources = sources
        self.costs = costs
        self._records = {name: [AcceptanceRecord(each.priors) for _ in range(batch)] for name, each in sources.items()}

    def decide(self, rooms: Sequence[int], grades: Grades) -> Decision:
        """See `Governor.decide`."""
        limits = {name: [0] * len(rooms) for name in self.sources}
        running = sum(room >= 0 for room in rooms)
        if not any(room > 0 for room in rooms) or self.costs.lacks_plain():
            return Decision(limits, grades, running / self.costs.verify(1))
        names = sorted(self.sources, key=lambda name: self.sources[name].cost_ratio, reverse=True)
        gains = [self._gains(name, rooms, grades[name]) for name in names]
        lengths, rate = self._best_lengths(names, gains, running)
        for row in range(len(rooms)):
            best = max(range(len(names)), key=lambda each: gains[each][row, lengths[each]])
            gain, room = gains[best][row, lengths[best]], min(lengths[best], rooms[row])
            limits[names[best]][row] = max(room, 0) if gain >= _LEAST_GAIN else 0
        return Decision(limits, grades, rate)

    def goes_on(self, source: str, decision: Decision) -> GoesOn | None:
        """See `Governor.goes_on`."""
        limits, grades, records = decision.limits[source], decision.grades[source], self._records[source]
        reach = [float(limit > 0) for limit in limits]

        def goes_on(offset: int, confidences: Sequence[float]) -> list[bool]:
            chances = []
            for row, confidence in enumerate(confidences):
                if limits[row] <= offset + 1:
                    reach[row] = 0.0
                grade = grades[row] or 0
                reach[row] *= records[row].expected_of(grade, offset, confidence)
                chances.append(reach[row] * records[row].expected(grade, offset + 1))
            # Another step costs the same for one row as for all.
            price = self.costs.draft(source) + self.costs.verify(offset + 3) - self.costs.verify(offset + 2)
            is_worth_it = sum(chances) > price * decision.rate
            return [is_worth_it and chance >= _LEAST_GAIN for chance in chances]

        return goes_on

    def learn(self, decision: Decision, drafts: Mapping[str, Draft], accepted: Sequence[int | None]) -> None:
        """See `Governor.learn`."""
        for name, records in self._records.items():
            draft = drafts.get(name)
            for row, record in enumerate(records):
                stood, count = accepted[row], 0 if draft is None else draft.num_drafted[row]
                if count and stood is not None and draft is not None:
                    confidences = draft.confidences[row] if draft.confidences else ()
                    record.record(decision.grades[name][row] or 0, confidences, count, stood)
                else:
                    record.rest()

    def note_times(self, draft_s: Mapping[str, tuple[int, float]], width: int, verify_s: float) -> None:
        """See `Governor.note_times`."""
        self.costs.note_verify(width, verify_s)
        for name, (steps, seconds) in draft_s.items():
            if steps:
                self.costs.note_draft(name, steps, seconds)

    def to_dict(self) -> dict[str, Any]:
        """See `Governor.to_dict`."""
        return self.costs.to_dict()

    def _gains(self, name: str, rooms: Sequence[int], grades: Sequence[int | None]) -> NDArray[np.float64]:
        """Tokens that each row is expected to gain by its first k drafts: (batch, most + 1)."""
        most = self.sources[name].most
        gains = np.zeros((len(rooms), most + 1))
        for row, (room, grade) in enumerate(zip(rooms, grades, strict=True)):
            record = self._records[name][row]
            is_known = record.rounds >= _FIRST_DRAFTS or self.sources[name].cost_ratio == 0
            longest = min(room, most if is_known else min(most, _FIRST_DRAFTS))
            if grade is not None and longest > 0:
                chances = np.cumsum(record.reach(grade, longest))
                gains[row, 1 : longest + 1] = chances
                gains[row, longest + 1 :] = chances[-1]
        return gains

    def _best_lengths(
        self, names: Sequence[str], gains: Sequence[NDArray[np.float64]], running: int
    ) -> tuple[list[int], float]:
        """The length of each source's drafts that gives most tokens per time, and that rate."""
        grid = np.meshgrid(*(np.arange(each.shape[1]) for each in gains), indexing="ij")
        per_row = [np.moveaxis(each, 0, -1) for each in gains]  # (most + 1, batch)
        best_of_row = per_row[0][grid[0]]
        for lengths, each in zip(grid[1:], per_row[1:], strict=True):
            best_of_row = np.maximum(best_of_row, each[lengths])
        tokens = running + best_of_row.sum(axis=-1)
        widest = max(each.shape[1] for each in gains)
        verify = np.array([self.costs.verify(width + 1) for width in range(widest)])
        drafting = sum(lengths * self.costs.draft(name) for name, lengths in zip(names, grid, strict=True))
        rates = tokens / (drafting + verify[np.maximum.reduce(grid)])
        best = np.unravel_index(int(rates.argmax()), rates.shape)
        return [int(each) for each in best], float(rates[best])
