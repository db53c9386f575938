"""What drafting can gain, by arithmetic: pure functions of distributions, acceptance, draft length and costs.

`acceptance` is the probability that a draft is accepted given that those before it were: one for all offsets, or one by
offset, of which the last goes on. From distributions it is their overlap (`overlap`), under rejection sampling.
Costs are in plain steps, a pass over one token of each row: `draft_cost` of drafting one token a row
(`Inspection.draft_cost`), `verify_cost` of one verification pass. That is 1 while a pass over a few tokens takes no
longer than a pass over one; in a batch it grows with the drafts (`batch_verify_cost`; measured: `pass_costs` of
`experiments`), and is then given as a function of their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

__all__ = [
    "batch_verify_cost",
    "best_draft_length",
    "least_acceptance",
    "overlap",
    "overlap_of_logits",
    "speedup",
    "speedup_of_rounds",
    "tokens_per_round",
]


Acceptance = float | Sequence[float]
VerifyCost = float | Callable[[int], float]

_BISECTIONS = 40


def overlap(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """What two distributions share: the chance that a draft drawn from one is accepted for the other.

    The sum of the smaller of both probabilities, which is 1 - their total variation distance: the expected acceptance
    under rejection sampling (`accept_by_ratio`; Leviathan et al. 2023, thm. 3.5 and cor. 3.6), and the most that any
    lossless rule accepts.

    Args:
        target_probs, draft_probs: (…, vocab), after the same processors and warpers.

    Returns:
        (…), from 0 to 1.
    """
    return torch.minimum(target_probs, draft_probs).sum(-1)


def overlap_of_logits(
    target_logits: Tensor, draft_logits: Tensor, temperature: float = 1.0, vocabulary: Tensor | None = None
) -> Tensor:
    """`overlap` of what both logits say at `temperature`, in float64; at 0 whether both have the same likeliest token.

    Args:
        target_logits: (…, vocab).
        draft_logits: (…, vocab); with a draft vocabulary (…, ids).
        vocabulary: (ids,), the ids that a draft vocabulary scores; None: all.

    Returns:
        (…), float64.
    """
    if vocabulary is not None:
        everywhere = draft_logits.new_full(target_logits.shape, float("-inf"))
        draft_logits = everywhere.index_copy_(-1, vocabulary, draft_logits)
    if temperature == 0:
        return (target_logits.argmax(-1) == draft_logits.argmax(-1)).double()
    target_probs, draft_probs = ((each.double() / temperature).softmax(-1) for each in (target_logits, draft_logits))
    return overlap(target_probs, draft_probs)


def tokens_per_round(acceptance: Acceptance, drafts: int) -> float:
    """Expected committed tokens of a round of `drafts` drafts, tau.

    The sum over k of P(the first k drafts are accepted). With one acceptance it is ``(1 - acceptance**(drafts + 1)) /
    (1 - acceptance)`` (Leviathan et al. 2023, eq. 1).
    """
    by_offset = [acceptance] if isinstance(acceptance, int | float) else list(acceptance)
    rates = [by_offset[min(offset, len(by_offset) - 1)] for offset in range(drafts)]
    return sum(accumulate(rates, mul, initial=1.0))


def speedup(acceptance: Acceptance, drafts: int, draft_cost: float, verify_cost: VerifyCost = 1.0) -> float:
    """Tokens per time against plain decoding, tau / (K c + v).

    That of Leviathan et al. 2023, thm. 3.8, has a `verify_cost` of 1; with one that depends on batch and context it is
    that of MagicDec (Chen et al. 2024).
    """
    return speedup_of_rounds(acceptance, {drafts: 1}, draft_cost, verify_cost)


def speedup_of_rounds(
    acceptance: Acceptance, rounds: Mapping[int, float], draft_cost: float, verify_cost: VerifyCost = 1.0
) -> float:
    """`speedup` of a call whose rounds were of several lengths, as a governor makes them.

    Args:
        rounds: how many by their number of drafts; those of 0 are plain steps.
    """
    tokens = sum(count * tokens_per_round(acceptance, drafts) for drafts, count in rounds.items())
    cost = 0.0
    for drafts, count in rounds.items():
        verify = verify_cost(drafts) if callable(verify_cost) else verify_cost
        cost += count * (drafts * draft_cost + verify)
    return tokens / cost


def best_draft_length(
    acceptance: Acceptance, draft_cost: float, verify_cost: VerifyCost = 1.0, longest: int = 16
) -> tuple[int, float]:
    """The number of drafts a round, at most `longest`, that gains most, and the speed-up: (0, 1.0) if none gains.

    With a `verify_cost` of 1 and one acceptance, one draft a round gains exactly when `acceptance` is above
    `draft_cost`, and when that does not, no length does: the k-th draft of a round is accepted with probability
    acceptance**k at the same cost.
    """
    lengths = ((drafts, speedup(acceptance, drafts, draft_cost, verify_cost)) for drafts in range(1, longest + 1))
    return max(((0, 1.0), *lengths), key=lambda each: each[1])


def least_acceptance(draft_cost: float, verify_cost: VerifyCost = 1.0, longest: int = 16) -> float | None:
    """The acceptance, one for all offsets, above which some length gains; None: even drafts that are never wrong lose.

    With a `verify_cost` of 1 it is `draft_cost`.
    """
    if best_draft_length(1.0, draft_cost, verify_cost, longest)[1] <= 1:
        return None
    low, high = 0.0, 1.0  # every length's speed-up rises with acceptance, and so does the best of them
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        gains = best_draft_length(middle, draft_cost, verify_cost, longest)[1] > 1
        low, high = (low, middle) if gains else (middle, high)
    return high


def batch_verify_cost(batch: int, drafts: int, ridge_rows: float, cache_share: float = 0.0) -> float:
    """Cost of a verification pass over `batch` rows of `drafts` + 1 tokens, in plain steps of that batch: v with its
    batch term.

    By the roofline (Williams, Waterman, Patterson 2009) weights are read once however many tokens a pass has, and take
    no longer than the arithmetic of `ridge_rows` tokens; reading the cache takes as long for one token of a row as for
    several. So v is 1 as long as batch * (drafts + 1) <= ridge_rows, and then rises towards drafts + 1, the less the
    larger the share of the cache is: long contexts are why speculation can pay at large batches (MagicDec, Chen et al.
    2024). For a machine's times see `experiments/simulate.py`.

    Args:
        ridge_rows: FLOP/s over bytes/s, times bytes of a weight, over 2.
        cache_share: seconds of a plain step that go into reading the cache, in those that go into all else.
    """
    plain, whole = (max(1.0, batch * tokens / ridge_rows) for tokens in (1, drafts + 1))
    return (whole + cache_share * plain) / (plain + cache_share * plain)
