"""The decision before each round: from which source each row drafts, and how many tokens.

A round of `k` drafts commits 1 + sum of P(first j accepted) tokens and costs ``k * draft + verify(k + 1)``, or
``draft + verify(k + 1)`` where one step makes them all; where tokens stand beside the chain, those are added that are
accepted where one of its drafts falls, and the pass is wider. What maximises tokens per time is taken, nothing drafted
being one of the choices (Leviathan et al. 2023, thm. 3.8, with acceptance by offset and measured costs in place of one
constant each). While a draft is being made, the next token is drafted only if the chance that it stands is worth its
time at that rate, which is the optimal stopping rule of a renewal process. Decisions depend on the past, on clocks and
on drafts that are verified whatever is decided: the output stays exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product, takewhile, zip_longest
from statistics import mean
from typing import Any, Protocol

from layerskip.draft import Draft, Node, pruned, tree_draft
from layerskip.drafters.base import GoesOn
from layerskip.governor.acceptance import HOPE_WEIGHT, AcceptanceRecord, Total
from layerskip.governor.costs import Costs

__all__ = ["Always", "Decision", "Governor", "Source", "WorthIt"]

Grades = Mapping[str, Sequence[int | None]]
"""By source, `Drafter.outlook` of each row."""

_CAREFUL_ROUNDS = 2  # of a row with a source that costs time: one draft each, since its prior is mere hope
_STRETCH = 4  # further columns of a pass over which the price of one is taken: that of the next alone is noise
_LEAST_PRICE = 0.005  # of a plain step, of a column
_WINDOW = 9  # trees whose width is remembered
_HOPED_ADVANTAGE = 1.1  # over plain decoding, of a source that several rows have to read all of their texts for
_LEAST_GAIN = 0.02  # expected tokens below which a row drafts nothing, even where others' drafts make it free


@dataclass(frozen=True)
class Source:
    """A drafter, as the governor knows it.

    Attributes:
        most: drafts a round.
        cost_ratio: of one step in plain steps, a guess until measured; 0: free, and all its drafts come at once.
        priors: acceptance to assume at first, by grade and offset added up (`AcceptanceRecord`).
        prior_weight: how firmly, in observations.
        num_siblings: tokens that it proposes beside each draft.
        width: columns of the pass that its drafts take, however many of them stand (`Draft.is_whole`); 0: as many as it
            drafts, and those beside them.
        is_one_step: all drafts of a round come of one step: the first costs it, the others nothing.
        reads_texts: it has to read all of the texts before its first draft.
    """

    most: int
    cost_ratio: float
    priors: Sequence[float] = (0.8, 0.8, 0.8, 0.8)
    prior_weight: float = HOPE_WEIGHT
    num_siblings: int = 0
    width: int = 0
    is_one_step: bool = False
    reads_texts: bool = False

    def steps(self, drafts: int) -> int:
        """In how many steps so many drafts are made."""
        return min(drafts, 1) if self.is_one_step else drafts


@dataclass(frozen=True)
class Decision:
    """What to draft in one round.

    Attributes:
        limits: by source, most drafts of each row; a row drafts from one source at most.
        grades: what it was decided on.
        rate: tokens per unit of time, over all rows, that is expected of the round.
        padding: columns of the pass that are to be computed only to know what they cost.
    """

    limits: dict[str, list[int]]
    grades: Grades = field(default_factory=dict)
    rate: float = 0.0
    padding: int = 0


class Governor(Protocol):
    """Decides before each round, and learns after it."""

    def decide(self, rooms: Sequence[int], grades: Grades) -> Decision:
        """`rooms`: most drafts that each row has room for; below 0: it is finished."""
        ...

    def goes_on(self, source: str, decision: Decision) -> GoesOn | None:
        """What a draft asks behind each token; None: nothing."""
        ...

    def trimmed(self, source: str, decision: Decision, draft: Draft) -> Draft:
        """`draft` without the tokens beside its chains that are not worth their places in the verification pass.

        What the target says does not depend on them (`TreeRule`): to leave some out biases nothing.
        """
        ...

    def learn(
        self,
        decision: Decision,
        drafts: Mapping[str, Draft],
        accepted: Sequence[int | None],
        beside: Sequence[int] = (),
    ) -> None:
        """Learn what became of a round's drafts.

        Args:
            accepted: of each row's chain, None for a row that was finished.
            beside: how many tokens beside the chain were accepted, row by row; none: nowhere any.
        """
        ...

    def note_times(self, draft_s: Mapping[str, tuple[int, float]], width: int, verify_s: float) -> None:
        """How many drafts one behind the other each drafter made, in how many seconds; and the seconds of all that
        followed, over `width` tokens.
        """
        ...

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Forget all but `rows`, which are in this order from now on."""
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

    def trimmed(self, source: str, decision: Decision, draft: Draft) -> Draft:
        """All of it."""
        return draft

    def learn(
        self,
        decision: Decision,
        drafts: Mapping[str, Draft],
        accepted: Sequence[int | None],
        beside: Sequence[int] = (),
    ) -> None:
        """Nothing."""

    def note_times(self, draft_s: Mapping[str, tuple[int, float]], width: int, verify_s: float) -> None:
        """Nothing."""

    def keep_rows(self, rows: Sequence[int]) -> None:
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
        # How many columns the last trees took beside their chains, for each draft of these (whole ones: in all).
        self._beside: dict[str, deque[float]] = {name: deque(maxlen=_WINDOW) for name in sources}
        self._totals = {name: Total(batch) for name in sources}
        self._records = {
            name: [AcceptanceRecord(each.priors, each.prior_weight, self._totals[name]) for _ in range(batch)]
            for name, each in sources.items()
        }

    def decide(self, rooms: Sequence[int], grades: Grades) -> Decision:
        """See `Governor.decide`."""
        limits = {name: [0] * len(rooms) for name in self.sources}
        running = sum(room >= 0 for room in rooms)
        gains = {name: self._gains(name, rooms, grades[name]) for name in self.sources}
        plain = Decision(limits, grades, running / self.costs.verify(1))
        if self.costs.lacks_plain() or not any(any(each[-1]) for each in gains.values()):
            return plain
        if self.costs.lacks_wider():
            return replace(plain, padding=1)
        lengths, rate = self._best_lengths(gains, running)
        if len(rooms) > 1 and self._is_hope(lengths) and rate < _HOPED_ADVANTAGE * plain.rate:
            return plain
        for row, room in enumerate(rooms):
            of_row = {name: gains[name][length][row] for name, length in lengths.items()}
            best = max(of_row, key=lambda name: of_row[name])
            is_worth_it = of_row[best] >= _LEAST_GAIN
            length = self.sources[best].most if self.sources[best].width else lengths[best]
            limits[best][row] = max(0, min(length, room)) if is_worth_it else 0
        return Decision(limits, grades, rate)

    def goes_on(self, source: str, decision: Decision) -> GoesOn | None:
        """See `Governor.goes_on`."""
        limits, grades, records = decision.limits[source], decision.grades[source], self._records[source]
        reach, columns = [float(limit > 0) for limit in limits], self._columns(source, self.sources[source].most + 2)

        def goes_on(offset: int, confidences: Sequence[float | None]) -> list[bool]:
            chances = []
            for row, confidence in enumerate(confidences):
                grade = grades[row] or 0
                is_live = confidence is not None and limits[row] > offset + 1
                reach[row] *= records[row].expected_of(grade, offset, confidence) if is_live and confidence else 0.0
                chance = records[row].expected(grade, offset + 1)
                if self._columns_beside(source) > 0:
                    chance += (1 - chance) * records[row].beside
                chances.append(reach[row] * chance)
            # Another step costs the same for one row as for all, and so do its columns, of those beside it too.
            drafting = self._drafting(source, offset + 2) - self._drafting(source, offset + 1)
            price = drafting + self.costs.verify(1 + columns[offset + 2]) - self.costs.verify(1 + columns[offset + 1])
            is_worth_it = sum(chances) > price * decision.rate
            return [is_worth_it and chance >= _LEAST_GAIN for chance in chances]

        return goes_on

    def trimmed(self, source: str, decision: Decision, draft: Draft) -> Draft:
        """See `Governor.trimmed`: another column of the pass costs the same for one row as for all."""
        if draft.is_whole:
            self._beside[source].append(draft.tokens.shape[1])
        if draft.nodes is None:
            return draft
        width, nodes = 1 + draft.depth, draft.nodes
        price = (self.costs.verify(width + _STRETCH) - self.costs.verify(width)) / _STRETCH
        price = max(price, _LEAST_PRICE * self.costs.verify(1)) * decision.rate
        ranked = [self._beside_chain(source, row, of_row, decision, draft) for row, of_row in enumerate(nodes)]
        columns = zip_longest(*([chance for chance, _ in of_row] for of_row in ranked), fillvalue=0.0)
        worth = sum(1 for _ in takewhile(lambda chances: sum(chances) >= price, columns))
        kept = [
            pruned(of_row, [*range(length), *(each for chance, each in beside[:worth] if chance >= _LEAST_GAIN)])
            for of_row, length, beside in zip(nodes, draft.lengths, ranked, strict=True)
        ]
        self._beside[source].append((max(map(len, kept)) - draft.depth) / draft.depth)
        trimmed = tree_draft(kept, draft.lengths, draft.tokens.device)
        return replace(trimmed, exact_states=draft.exact_states, exact_blocks=draft.exact_blocks)

    def _beside_chain(
        self, source: str, row: int, nodes: Sequence[Node], decision: Decision, draft: Draft
    ) -> list[tuple[float, int]]:
        """Indices of what stands beside a row's chain, with the chance that it is accepted, the likeliest first.

        No node is likelier than its parent, nor before it: any first few of them are a tree with the chain.
        """
        record, grade = self._records[source][row], decision.grades[source][row] or 0
        length, reach = draft.lengths[row], [1.0]  # by place in the verification pass
        for index, node in enumerate(nodes):
            in_chain = index < length
            stands = (
                record.expected_of(grade, index, node.confidence) if in_chain else record.chance_beside(node.confidence)
            )
            reach.append(reach[node.parent] * stands)
        chances = [(reach[index + 1], index) for index in range(length, len(nodes))]
        return sorted(chances, key=lambda each: each[0], reverse=True)  # stable

    def learn(
        self,
        decision: Decision,
        drafts: Mapping[str, Draft],
        accepted: Sequence[int | None],
        beside: Sequence[int] = (),
    ) -> None:
        """See `Governor.learn`."""
        for name, records in self._records.items():
            draft = drafts.get(name)
            self._totals[name].rows = max(1, sum(stood is not None for stood in accepted))
            for row, record in enumerate(records):
                stood, count = accepted[row], 0 if draft is None else draft.lengths[row]
                if stood is None:  # it has ended: what others know does not fade by it
                    continue
                if count and draft is not None:
                    confidences = draft.confidences[row][:count] if draft.confidences else ()
                    record.record(decision.grades[name][row] or 0, confidences, count, stood)
                    if self.sources[name].num_siblings:
                        siblings = () if draft.nodes is None else draft.nodes[row][count:]
                        hoped = sum(node.confidence for node in siblings if node.parent <= stood)
                        record.note_beside(hoped, stood < count, beside[row] if beside else 0)
                else:
                    record.rest()

    def note_times(self, draft_s: Mapping[str, tuple[int, float]], width: int, verify_s: float) -> None:
        """See `Governor.note_times`."""
        self.costs.note_verify(width, verify_s)
        for name, (depth, seconds) in draft_s.items():
            if depth:
                self.costs.note_draft(name, self.sources[name].steps(depth), seconds)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """See `Governor.keep_rows`."""
        self._records = {name: [records[row] for row in rows] for name, records in self._records.items()}
        self.costs.note_rows(len(rows))

    def to_dict(self) -> dict[str, Any]:
        """See `Governor.to_dict`."""
        return self.costs.to_dict()

    def _gains(self, name: str, rooms: Sequence[int], grades: Sequence[int | None]) -> list[list[float]]:
        """For k = 0, 1, …: the tokens that each row is expected to gain by its first k drafts.

        Ends where no row would gain more than `_LEAST_GAIN` by another one.
        """
        most, source = self.sources[name].most, self.sources[name]
        rows = []
        for room, grade, record in zip(rooms, grades, self._records[name], strict=True):
            is_known = record.rounds >= _CAREFUL_ROUNDS or source.cost_ratio == 0
            longest = min(room, most if is_known else 1)
            chances = record.reach(grade, longest) if grade is not None and longest > 0 else []
            if self._columns_beside(name) > 0:  # where a draft falls, tokens beside it are gained
                chances = [
                    chance + (before - chance) * record.beside
                    for before, chance in zip((1.0, *chances), chances, strict=False)
                ]
            rows.append(list(accumulate((chance for chance in chances if chance >= _LEAST_GAIN), initial=0.0)))
        return [[row[min(k, len(row) - 1)] for row in rows] for k in range(max(map(len, rows)))]

    def _is_hope(self, lengths: Mapping[str, int]) -> bool:
        """Whether these drafts are of sources that have to read first, and of which nothing is known yet in any row."""
        tried = [name for name, length in lengths.items() if length and self.sources[name].reads_texts]
        return bool(tried) and not any(record.rounds for name in tried for record in self._records[name])

    def _columns_beside(self, name: str) -> float:
        """How many columns of the pass stand beside each draft: as many as were worth it in the last trees."""
        return mean(self._beside[name]) if self._beside[name] and not self.sources[name].width else 0.0

    def _drafting(self, source: str, drafts: int) -> float:
        """The cost of so many drafts, one behind the other."""
        return self.sources[source].steps(drafts) * self.costs.draft(source)

    def _best_lengths(self, gains: Mapping[str, list[list[float]]], running: int) -> tuple[dict[str, int], float]:
        """The length of each source's drafts that gives most tokens per time, and that rate."""
        columns = [self._columns(name, len(of_source)) for name, of_source in gains.items()]
        best, best_rate = (0,) * len(gains), 0.0
        for lengths in product(*map(range, map(len, gains.values()))):
            of_sources = (of_source[k] for of_source, k in zip(gains.values(), lengths, strict=True))
            tokens = running + sum(map(max, zip(*of_sources, strict=True)) if len(lengths) > 1 else next(of_sources))
            width = 1 + max(of_source[k] for of_source, k in zip(columns, lengths, strict=True))
            seconds = self.costs.verify(width) + sum(map(self._drafting, gains, lengths))
            if tokens > best_rate * seconds:
                best, best_rate = lengths, tokens / seconds
        return dict(zip(gains, best, strict=True)), best_rate

    def _columns(self, name: str, count: int) -> list[int]:
        """Of the pass, for each of `count` lengths of a draft from 0: a tree is as much wider as the last ones were."""
        if width := self.sources[name].width:
            return [0] + [round(mean(self._beside[name] or [width]))] * (count - 1)
        beside = self._columns_beside(name)
        return [k + round(k * beside) for k in range(count)]
