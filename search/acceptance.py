"""From counts of accepted drafts to tokens per round, their standard error, and the speed-up at the best length.

Pure arithmetic; it does not know how the counts were made (`replay.py`) nor how costs were measured (`cost.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Acceptance", "SpeedUp", "best_speedup"]


@dataclass(frozen=True)
class Acceptance:
    """How often drafts stood, counted over anchors: positions from which a draft was made.

    Attributes:
        survived: for each offset, from how many anchors (under sampling: the expected number) the drafts up to and
            including it were all accepted.
        observed: for each offset, from how many anchors a draft reached so far.
    """

    survived: tuple[float, ...]
    observed: tuple[int, ...]

    @classmethod
    def pooled(cls, parts: Iterable[Acceptance]) -> Acceptance:
        """All anchors of `parts`."""
        listed = list(parts)
        lengths = {len(each.observed) for each in listed}
        if len(lengths) != 1:
            raise ValueError(f"got acceptances of {sorted(lengths)} offsets to pool; expected some of one length.")
        return cls(
            tuple(map(sum, zip(*(each.survived for each in listed), strict=True))),
            tuple(map(sum, zip(*(each.observed for each in listed), strict=True))),
        )

    @property
    def survival(self) -> list[float]:
        """For each offset the probability that the drafts up to and including it are all accepted; never rising."""
        rates, least = [], 1.0
        for survived, observed in zip(self.survived, self.observed, strict=True):
            # Later offsets have a few anchors less (at a text's end), so the plain ratio could rise by chance.
            least = min(survived / observed, least) if observed else 0.0
            rates.append(least)
        return rates

    @property
    def by_offset(self) -> list[float]:
        """For each offset the probability that its draft is accepted, given that all before it were."""
        rates, before = [], 1.0
        for rate in self.survival:
            rates.append(rate / before if before else 0.0)
            before = rate
        return rates

    @property
    def rate(self) -> float:
        """Accepted among drafts whose predecessors were accepted, over all offsets: a draft's chance to stand."""
        survival = self.survival
        tried = [1.0, *survival[:-1]]
        return sum(survival) / sum(tried) if survival and sum(tried) else 0.0

    @property
    def standard_error(self) -> float:
        """Of `rate`, as if anchors were independent; texts that repeat themselves make it larger."""
        tried = sum(
            observed * before for observed, before in zip(self.observed, [1.0, *self.survival[:-1]], strict=True)
        )
        return math.sqrt(self.rate * (1 - self.rate) / tried) if tried else math.inf

    def tokens_per_round(self, num_draft_tokens: int) -> float:
        """Committed tokens a round, the one behind the accepted drafts included: tau of Leviathan et al. 2023."""
        return 1 + sum(self.survival[:num_draft_tokens])


@dataclass(frozen=True)
class SpeedUp:
    """A predicted speed-up over plain decoding.

    Attributes:
        num_draft_tokens: the length of a draft for which it holds.
    """

    ratio: float
    num_draft_tokens: int


def best_speedup(survival: Sequence[float], round_ratio: Callable[[int], float]) -> SpeedUp:
    """tau(K) / (K c + v(K + 1)) at the K from 1 on for which it is largest (Leviathan et al. 2023, thm. 3.8, with v).

    Not drafting at all has 1.0; whether that is more is for the caller to see.

    Args:
        survival: see `Acceptance.survival`; at least one offset.
        round_ratio: cost in plain steps of a round of so many drafts, K c + v(K + 1).
    """
    tokens, best = 1.0, SpeedUp(-math.inf, 0)
    for length, rate in enumerate(survival, start=1):
        tokens += rate
        ratio = tokens / round_ratio(length)
        if ratio > best.ratio:
            best = SpeedUp(ratio, length)
    return best
