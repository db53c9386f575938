"""Which drafted tokens stand, and which token follows them: pure functions on distributions.

Greedy decoding is the case in which every distribution is one-hot; there is no other path for it. The functions know
nothing of models, caches or stop conditions.

Shapes: `batch` rows, `drafts` drafted tokens a row (some may be padding, see `num_drafted`), `vocab` token ids.
Distributions are *after* the same processors and warpers on both sides, and at the true prefix of each position.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["accept_by_match", "accept_by_ratio", "accept_in_tree", "race"]


def race(probs: Tensor, exponentials: Tensor) -> Tensor:
    """Draw from `probs` (…, vocab) by the first arrival of independent exponential clocks with these rates.

    The winner ``argmax(probs / exponentials)`` has probability ``probs / probs.sum()``; an id of probability 0 never
    wins while another has more. Equal to the Gumbel-max rule.

    Returns:
        (…), int64.
    """
    return (probs / exponentials).argmax(dim=-1)


def accept_by_ratio(
    draft_tokens: Tensor, draft_probs: Tensor | None, target_probs: Tensor, num_drafted: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Rejection sampling: accepts as often as any lossless rule can (Leviathan et al. 2023, alg. 1; Chen et al. 2023).

    1. Draft `x` at offset `i` stands if ``u <= target_probs[x] / draft_probs[x]`` and all before it stand.
    2. After the first rejection the next token is drawn from ``normalise(max(target_probs - draft_probs, 0))``.
    3. If all stand, it is drawn from the target's distribution behind the last draft.

    The output is distributed as the target alone, whatever `draft_probs`, provided that `draft_tokens` were drawn
    from them. A draft that was not drawn but chosen has a one-hot distribution.

    Args:
        draft_tokens: (batch, drafts), int64.
        draft_probs: (batch, drafts, vocab), the distribution each draft was drawn from; None: all one-hot.
        target_probs: (batch, drafts + 1, vocab).
        num_drafted: (batch,), how many of a row's drafts are real; the rest is padding.
        uniforms: (batch, drafts), float64 in (0, 1), independent of everything else.

    Returns:
        The number of drafts that stand, (batch,), and what the token behind them is to be drawn from, up to a factor:
        (batch, vocab).
    """
    drafts = draft_tokens.shape[1]
    rows = torch.arange(len(draft_tokens), device=draft_tokens.device)
    if drafts == 0:
        return num_drafted, target_probs[:, 0]
    target_of_draft = _at(target_probs[:, :drafts], draft_tokens)
    draft_of_draft = torch.ones_like(target_of_draft) if draft_probs is None else _at(draft_probs, draft_tokens)
    # In float64, where the product of the two smallest float32 numbers is not yet 0.
    accepted = _leading(uniforms * draft_of_draft.double() <= target_of_draft.double(), num_drafted)

    target, fallen = target_probs[rows, accepted], accepted.clamp(max=drafts - 1)
    if draft_probs is None:
        draft = torch.zeros_like(target).scatter_(1, draft_tokens[rows, fallen].unsqueeze(1), 1.0)
    else:
        draft = draft_probs[rows, fallen]
    residual = (target - draft * (accepted < num_drafted).unsqueeze(1)).clamp_(min=0)
    # Rounding can leave nothing of two nearly equal distributions; the target itself is then as good.
    return accepted, torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)


def accept_by_match(draft_tokens: Tensor, target_tokens: Tensor, num_drafted: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the drafts that equal what the target itself drew at their positions (Daliri, Musco, Suresh 2024).

    The target's draws use noise that belongs to the position, so the output is what the target alone would have
    drawn with that noise: it does not depend on the drafts at all. When the drafts were drawn with the same noise,
    a draft stands with probability at least (1 - d) / (1 + d) for distributions at total variation distance d.

    Args:
        draft_tokens: (batch, drafts), int64.
        target_tokens: (batch, drafts + 1), int64.
        num_drafted: (batch,), how many of a row's drafts are real.

    Returns:
        The number of drafts that stand, and the token behind them: (batch,) each.
    """
    if draft_tokens.shape[1] == 0:
        return num_drafted, target_tokens[:, 0]
    stands = draft_tokens == target_tokens[:, : draft_tokens.shape[1]]
    accepted = _leading(stands, num_drafted)
    return accepted, target_tokens.gather(1, accepted.unsqueeze(1)).squeeze(1)


def accept_in_tree(
    draft_tokens: Tensor, target_tokens: Tensor, num_drafted: Tensor, before: Tensor, sees: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`accept_by_match` in a tree: the drafts stand that lie on the path which the target's own choices take.

    What the target draws behind a token does not depend on what is proposed there, so the output is what it alone would
    have said, whatever the tree (SpecInfer's "naive sampling", Miao et al. 2024; for tokens that were chosen, not
    drawn, no rule accepts more).

    Args:
        draft_tokens: (batch, drafts), int64; children of one token differ.
        target_tokens: (batch, drafts + 1), int64, behind the newest token and each draft.
        num_drafted: (batch,), how many of a row's drafts are real.
        before, sees: see `Tree`.

    Returns:
        The number of drafts that stand, (batch,), the token behind them, (batch,), and where the target said these
        tokens, (batch, drafts + 1): 0 behind the newest one, ``i + 1`` behind draft `i`; from there on void.
    """
    tokens = torch.arange(target_tokens.shape[1], device=draft_tokens.device)
    stands = (draft_tokens == target_tokens.gather(1, before)) & (tokens[:-1] < num_drafted.unsqueeze(1))
    falls = torch.nn.functional.pad(~stands, (1, 0))
    is_reached = ~(sees & falls.unsqueeze(1)).any(dim=2)
    accepted = is_reached.sum(dim=1) - 1
    places = torch.where(is_reached, tokens, len(tokens)).sort(dim=1).values.clamp(max=len(tokens) - 1)
    return accepted, target_tokens.gather(1, places.gather(1, accepted.unsqueeze(1))).squeeze(1), places


def _at(probs: Tensor, tokens: Tensor) -> Tensor:
    return probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _leading(stands: Tensor, num_drafted: Tensor) -> Tensor:
    """Count the drafts before the first that falls: (batch,)."""
    real = torch.arange(stands.shape[1], device=stands.device) < num_drafted.unsqueeze(1)
    return (stands & real).long().cumprod(dim=1).sum(dim=1)
