"""What drafting can gain, by arithmetic: pure functions of acceptance, draft length and costs.

`acceptance` is the probability that a draft is accepted given that those before it were, the same at every offset.
Costs are in plain steps: `draft_cost` of drafting one token (`Inspection.draft_cost`), `verify_cost` of one
verification pass, 1 while a pass over a few tokens takes no longer than a pass over one.
"""

from __future__ import annotations

__all__ = ["best_draft_length", "speedup", "tokens_per_round"]


def tokens_per_round(acceptance: float, drafts: int) -> float:
    """Expected committed tokens of a round of `drafts` drafts (Leviathan et al. 2023, eq. 1)."""
    return sum(acceptance**offset for offset in range(drafts + 1))


def speedup(acceptance: float, drafts: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Tokens per time against plain decoding (Leviathan et al. 2023, thm. 3.8; there `verify_cost` is 1)."""
    return tokens_per_round(acceptance, drafts) / (drafts * draft_cost + verify_cost)


def best_draft_length(
    acceptance: float, draft_cost: float, verify_cost: float = 1.0, longest: int = 16
) -> tuple[int, float]:
    """The number of drafts a round, at most `longest`, that gains most, and the speed-up: (0, 1.0) if none gains.

    With a `verify_cost` of 1, one draft a round gains exactly when `acceptance` is above `draft_cost`, and when that
    does not, no length does: the k-th draft of a round is accepted with probability acceptance**k at the same cost.
    """
    lengths = ((drafts, speedup(acceptance, drafts, draft_cost, verify_cost)) for drafts in range(1, longest + 1))
    return max(((0, 1.0), *lengths), key=lambda each: each[1])
