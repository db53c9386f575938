"""Which drafted tokens stand, and which token follows them: pure functions on distributions.

Greedy decoding is the case in which every distribution is one-hot; there is no other path for it. The functions know
nothing of models, caches or stop conditions.

Shapes: `batch` rows, `drafts` drafted tokens a row (some may be padding, see `num_drafted`), `vocab` token ids.
Distributions are *after* the same processors and warpers on both sides, and at the true prefix of each position.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Acceptance", "accept_by_match", "accept_by_ratio", "race"]


class Acceptance(NamedTuple):
    """What one verification decided.

    Attributes:
        accepted: (batch,), drafts that stand: the first rejected one and all after it fall.
        next_token: (batch,), the token after them.
    """

    accepted: Tensor
    next_token: Tensor


def race(probs: Tensor, exponentials: Tensor) -> Tensor:
    """Draw from `probs` (…, vocab) by the first arrival of independent exponential clocks with these rates.

    The winner ``argmax(probs / exponentials)`` has probability ``probs / probs.sum()``; an id of probability 0 never
    wins while another has more. Equal to the Gumbel-max rule.

    Returns:
        (…), int64.
    """
    return (probs / exponentials).argmax(dim=-1)


def accept_by_ratio(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    num_drafted: Tensor,
    uniforms: Tensor,
    exponentials: Tensor,
) -> Acceptance:
    """Rejection sampling: accepts as often as any lossless rule can (Leviathan et al. 2023, alg. 1; Chen et al. 2023).

    1. Draft `x` at offset `i` stands if ``u <= target_probs[x] / draft_probs[x]`` and all before it stand.
    2. After the first rejection the next token is drawn from ``normalise(max(target_probs - draft_probs, 0))``.
    3. If all stand, it is drawn from the target's distribution behind the last draft.

    The output is distributed as the target alone, whatever `draft_probs`, provided that `draft_tokens` were drawn
    from them. A draft that was not drawn but chosen has a one-hot distribution.

    Args:
        draft_tokens: (batch, drafts), int64.
        draft_probs: (batch, drafts, vocab), the distribution each draft was drawn from.
        target_probs: (batch, drafts + 1, vocab).
        num_drafted: (batch,), how many of a row's drafts are real; the rest is padding.
        uniforms: (batch, drafts), float64 in (0, 1), independent of everything else.
        exponentials: (batch, vocab) or a shape that broadcasts to it, standard exponential, likewise.
    """
    drafts = draft_tokens.shape[1]
    target_of_draft = _at(target_probs[:, :drafts], draft_tokens)
    draft_of_draft = _at(draft_probs, draft_tokens)
    # In float64, where the product of the two smallest float32 numbers is not yet 0.
    stands = uniforms * draft_of_draft.double() <= target_of_draft.double()
    accepted = _leading(stands, num_drafted)

    rows = torch.arange(len(accepted), device=accepted.device)
    rejected = (accepted < num_drafted).unsqueeze(1)
    target = target_probs[rows, accepted]
    draft = F.pad(draft_probs, (0, 0, 0, 1))[rows, accepted]
    residual = (target - draft * rejected).clamp_(min=0)
    # Rounding can leave nothing of two nearly equal distributions; the target itself is then as good.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)
    return Acceptance(accepted, race(residual, exponentials))


def accept_by_match(draft_tokens: Tensor, target_tokens: Tensor, num_drafted: Tensor) -> Acceptance:
    """Accept the drafts that equal what the target itself drew at their positions (Daliri, Musco, Suresh 2024).

    The target's draws use noise that belongs to the position, so the output is what the target alone would have
    drawn with that noise: it does not depend on the drafts at all. When the drafts were drawn with the same noise,
    a draft stands with probability at least (1 - d) / (1 + d) for distributions at total variation distance d.

    Args:
        draft_tokens: (batch, drafts), int64.
        target_tokens: (batch, drafts + 1), int64.
        num_drafted: (batch,), how many of a row's drafts are real.
    """
    stands = draft_tokens == target_tokens[:, : draft_tokens.shape[1]]
    accepted = _leading(stands, num_drafted)
    return Acceptance(accepted, target_tokens.gather(1, accepted.unsqueeze(1)).squeeze(1))


def _at(probs: Tensor, tokens: Tensor) -> Tensor:
    return probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _leading(stands: Tensor, num_drafted: Tensor) -> Tensor:
    """Count the drafts before the first that falls: (batch,)."""
    real = torch.arange(stands.shape[1], device=stands.device) < num_drafted.unsqueeze(1)
    return (stands & real).long().cumprod(dim=1).sum(dim=1)
