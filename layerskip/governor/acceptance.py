"""How likely the next drafts are to be accepted: decayed counts of what happened to the last ones.

Each figure is shrunk towards a more general one while it rests on little: (grade, offset) towards its grade, that
towards a prior. The prior is optimistic, so that an untried source is tried; evidence fades with every new observation,
so that it follows the text, and slowly while a source rests, so that it is tried again now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["AcceptanceRecord"]

_WEIGHT = 2.0  # of the more general figure, in observations
_FADE = 0.9  # of old evidence with each new observation: a memory of ten
_IDLE_FADE = 2 ** (-1 / 64)  # with each round in which the source rests: half of it in 64 rounds
_LAST_OFFSET = 3  # offsets from here on are one
_CONFIDENCE_EDGES = (0.2, 0.4, 0.6, 0.75, 0.85, 0.93, 0.98)


class AcceptanceRecord:
    """What became of one source's drafts in one row."""

    def __init__(self, prior: float) -> None:
        """`prior`: acceptance that is assumed before anything is known."""
        self._prior = prior
        self._counts: dict[Any, tuple[float, float]] = {}  # (accepted, tried), faded
        self.rounds = 0

    def expected(self, grade: int, offset: int) -> float:
        """P(a draft at `offset` is accepted | all before it in its round were)."""
        of_grade = self._shrunk(grade, self._prior)
        return self._shrunk((grade, min(offset, _LAST_OFFSET)), of_grade)

    def expected_of(self, grade: int, offset: int, confidence: float) -> float:
        """The same of a draft that has been made, to which the drafter gave the probability `confidence`."""
        general = (self.expected(grade, offset) + confidence) / 2
        return self._shrunk(("confidence", _bucket(confidence)), general)

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
            stood = offset < accepted
            self._note(grade, stood)
            self._note((grade, min(offset, _LAST_OFFSET)), stood)
            if confidences:
                self._note(("confidence", _bucket(confidences[offset])), stood)

    def rest(self) -> None:
        """Note a round in which the source was not used."""
        for key, (accepted, tried) in self._counts.items():
            self._counts[key] = accepted * _IDLE_FADE, tried * _IDLE_FADE

    def _shrunk(self, key: Any, general: float) -> float:
        accepted, tried = self._counts.get(key, (0.0, 0.0))
        return (accepted + _WEIGHT * general) / (tried + _WEIGHT)

    def _note(self, key: Any, stood: bool) -> None:
        accepted, tried = self._counts.get(key, (0.0, 0.0))
        self._counts[key] = accepted * _FADE + stood, tried * _FADE + 1


def _bucket(confidence: float) -> int:
    return sum(confidence >= edge for edge in _CONFIDENCE_EDGES)
