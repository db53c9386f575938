"""How likely the next drafts are to be accepted: decayed counts of what happened to the last ones.

Drafts of equal prospects share a cell: `Drafter.outlook`'s grade and the draft's offset, added up. (A draft that copies
behind a match of `n` tokens stands, once it has been right `j` times, behind a match of `n + j`.) A cell that rests on
little is shrunk towards the source's prior, times how much better or worse the source does than that in all cells.
Hopes are optimistic, so that an untried source is tried, and weigh little; acceptance that was measured elsewhere
weighs more, or a few unlucky drafts would silence a source whose gain is small but sure. Evidence fades with every new
observation, so that it follows the text, and slowly while a source rests, so that it is tried again now and then.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

__all__ = ["HOPE_WEIGHT", "MEASURED_WEIGHT", "AcceptanceRecord", "Total"]

# Of priors, in observations. By simulation on SmolLM2's answers: 4 gives most of what 8 does to a trained draft that is
# right in a third of the cases (1.19 and 1.20 for 1.15 with 1.5), and loses 1.6 % where it never is (8: 10 %).
HOPE_WEIGHT, MEASURED_WEIGHT = 1.5, 4.0
_FADE = 0.9  # of old evidence with each new observation: a memory of ten
_BESIDE = 0.25  # what stands beside drafts, until known; the trained draft of SmolLM2 with three siblings: 0.28
_IDLE_FADE = 2 ** (-1 / 96)  # with each round in which the source rests: half of it in 96 rounds
_CONFIDENCE_EDGES = (0.2, 0.4, 0.6, 0.75, 0.85, 0.93, 0.98)


@dataclass
class Total:
    """How much better or worse than its priors a source does, in all rows: they tell of each other.

    Attributes:
        rows: that report to it. The more, the slower it fades with each report.
        accepted, expected: drafts, by what became of them and by the priors, faded.
    """

    rows: int = 1
    accepted: float = 0.0
    expected: float = 0.0

    def note(self, stood: bool, expected: float) -> None:
        """Note a draft that was expected to stand with such a probability."""
        self._fade(_FADE)
        self.accepted += stood
        self.expected += expected

    def rest(self) -> None:
        """Note that a row was not asked in a round."""
        self._fade(_IDLE_FADE)

    def _fade(self, of_all: float) -> None:
        fade = of_all ** (1 / self.rows)
        self.accepted, self.expected = self.accepted * fade, self.expected * fade


class AcceptanceRecord:
    """What became of one source's drafts in one row."""

    def __init__(self, priors: Sequence[float], weight: float = HOPE_WEIGHT, total: Total | None = None) -> None:
        """See the class.

        Args:
            priors: acceptance that is assumed of each cell before anything is known; cells beyond are the last.
            weight: of the priors, in observations.
            total: of all rows; None: this one is the only one.
        """
        self._priors, self._weight = priors, weight
        self._counts: dict[Hashable, tuple[float, float]] = {}  # (accepted, tried), faded
        self._total = Total() if total is None else total
        # Of what stands beside drafts, faded: (accepted, drafts that fell), (accepted, expected by their confidence).
        self._beside = (0.0, 0.0)
        self._beside_total = (0.0, 0.0)
        self.rounds = 0

    def expected(self, grade: int, offset: int) -> float:
        """P(a draft at `offset` is accepted | all before it in its round were)."""
        cell = self._cell(grade, offset)
        share = (self._total.accepted + self._weight) / (self._total.expected + self._weight)
        return self._shrunk(cell, min(1.0, self._priors[cell] * share))

    def expected_of(self, grade: int, offset: int, confidence: float) -> float:
        """The same of a draft that has been made, to which the drafter gave the probability `confidence`."""
        general = (self.expected(grade, offset) + confidence) / 2
        return self._shrunk(("confidence", _bucket(confidence)), general)

    @property
    def beside(self) -> float:
        """How many tokens beside the chain are accepted where one of its drafts falls, proposed or not."""
        accepted, fell = self._beside
        return (accepted + self._weight * _BESIDE) / (fell + self._weight)

    def chance_beside(self, confidence: float) -> float:
        """P(a token beside the chain is accepted | the one before it is), to which the drafter gave `confidence`."""
        accepted, expected = self._beside_total
        return min(1.0, confidence * (accepted + 1) / (expected + 1))

    def note_beside(self, expected: float, fell: bool, stood: int) -> None:
        """Note what became of the tokens beside a round's chain.

        Args:
            expected: the confidences, added up, of those that stand directly behind what was accepted of the chain.
            fell: whether one of its drafts did.
            stood: how many of the tokens beside it were accepted, one behind the other.
        """
        accepted, hoped = self._beside_total
        self._beside_total = accepted * _FADE + (stood > 0), hoped * _FADE + expected
        if fell:
            accepted, tried = self._beside
            self._beside = accepted * _FADE + stood, tried * _FADE + 1

    def reach(self, grade: int, most: int) -> list[float]:
        """P(the first k drafts of a round are all accepted), for k from 1 to `most`."""
        chance, chances = 1.0, []
        for offset in range(most):
            chance *= self.expected(grade, offset)
            chances.append(chance)
        return chances

    def record(self, grade: int, confidences: Sequence[float], proposed: int, accepted: int) -> None:
        """Note a round of `proposed` drafts of which `accepted` stood; those behind a fallen one say nothing."""
        self.rounds += 1
        for offset in range(min(accepted + 1, proposed)):
            stood, cell = offset < accepted, self._cell(grade, offset)
            self._note(cell, stood)
            if confidences:
                self._note(("confidence", _bucket(confidences[offset])), stood)
            self._total.note(stood, self._priors[cell])

    def rest(self) -> None:
        """Note a round in which the source was not used."""
        self._total.rest()
        for name in ("_beside", "_beside_total"):
            accepted, tried = getattr(self, name)
            setattr(self, name, (accepted * _IDLE_FADE, tried * _IDLE_FADE))
        for key, (accepted, tried) in self._counts.items():
            self._counts[key] = accepted * _IDLE_FADE, tried * _IDLE_FADE

    def _cell(self, grade: int, offset: int) -> int:
        return min(grade + offset, len(self._priors) - 1)

    def _shrunk(self, key: Hashable, general: float) -> float:
        accepted, tried = self._counts.get(key, (0.0, 0.0))
        return (accepted + self._weight * general) / (tried + self._weight)

    def _note(self, key: Hashable, stood: bool) -> None:
        accepted, tried = self._counts.get(key, (0.0, 0.0))
        self._counts[key] = accepted * _FADE + stood, tried * _FADE + 1


def _bucket(confidence: float) -> int:
    return sum(confidence >= edge for edge in _CONFIDENCE_EDGES)
