"""What drafting can gain, by arithmetic: pure functions of acceptance, draft length and costs.

`acceptance` is the probability that a draft is accepted given that those before it were: one for all offsets, or one by
offset, of which the last goes on.
Costs are in plain steps: `draft_cost` of drafting one token (`Inspection.draft_cost`), `verify_cost` of one
verification pass, 1 while a pass over a few tokens takes no longer than a pass over one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

__all__ = ["best_draft_length", "speedup", "tokens_per_round"]


Acceptance = float | Sequence[float]


def tokens_per_round(acceptance: Acceptance, drafts: int) -> float:
    """Expected committed tokens of a round of `drafts` drafts (Leviathan et al. 2023, eq. 1, there of one number)."""
    by_offset = [acceptance] if isinstance(acceptance, int | float) else list(acceptance)
    rates = [by_offset[min(offset, len(by_offset) - 1)] for offset in range(drafts)]
    return sum(accumulate(rates, mul, initial=1.0))


def speedup(acceptance: Acceptance, drafts: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Tokens per time against plain decoding (Leviathan et al. 2023, thm. 3.8; there `verify_cost` is 1)."""
    return tokens_per_round(acceptance, drafts) / (drafts * draft_cost + verify_cost)


def best_draft_length(
    acceptance: Acceptance, draft_cost: float, verify_cost: float = 1.0, longest: int = 16
) -> tuple[int, float]:
    """The number of drafts a round, at most `longest`, that gains most, and the speed-up: (0, 1.0) if none gains.

    With a `verify_cost` of 1 and one acceptance, one draft a round gains exactly when `acceptance` is above
    `draft_cost`, and when that does not, no length does: the k-th draft of a round is accepted with probability
    acceptance**k at the same cost.
    """
    lengths = ((drafts, speedup(acceptance, drafts, draft_cost, verify_cost)) for drafts in range(1, longest + 1))
    return max(((0, 1.0), *lengths), key=lambda each: each[1])
