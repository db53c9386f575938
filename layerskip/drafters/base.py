"""What a drafter is, and the loop that every drafter with a next-token distribution shares.

A drafter proposes tokens and the distributions it drew them from, and is told what was committed. Verification,
acceptance, stopping and statistics exist once, in the engine, and know nothing of how a draft was made. A new method
is one file in this folder and one line in `drafters/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from layerskip.rules import AcceptanceRule
from layerskip.sampling import Sampler
from layerskip.state import DecodeState

__all__ = ["Draft", "DraftContext", "Drafter", "draft_chain", "empty_draft"]


@dataclass(frozen=True)
class Draft:
    """A chain of proposed tokens for each row.

    Attributes:
        tokens: (batch, drafts), int64; they also stand in ``state.token_ids`` behind the committed tokens.
        probs: (batch, drafts, vocab), the distribution each was drawn from.
        num_drafted: (batch,), int64: how many of a row's tokens are real, the rest is padding.
        exact_states: (batch, drafts, hidden_size) or None: hidden states behind the leading `exact_blocks` blocks of
            the full model, for the newest token and all drafts but the last, which verification need not compute again.
        exact_blocks: number of those blocks.
    """

    tokens: Tensor
    probs: Tensor
    num_drafted: Tensor
    exact_states: Tensor | None = None
    exact_blocks: int = 0


@dataclass(frozen=True)
class DraftContext:
    """What drafting shares with verification, for the whole call.

    Attributes:
        sampler: logits to distribution, the same as the target's.
        rule: draws tokens from distributions.
        eos_ids: (n,), int64: a row stops drafting behind one of them.
        confidence_threshold: a row stops drafting *behind* a token whose raw probability is below this. (To drop the
            token itself unverified would bias the output.)
        vocab_size: of the target.
    """

    sampler: Sampler
    rule: AcceptanceRule
    eos_ids: Tensor
    confidence_threshold: float
    vocab_size: int


class Drafter(Protocol):
    """Proposes the next tokens."""

    def begin(self, state: DecodeState) -> None:
        """Take note of the prompts in `state`, before the target has read them."""
        ...

    def propose(self, state: DecodeState, limits: Sequence[int]) -> Draft:
        """Draft up to ``limits[row]`` tokens behind each row's newest; at least one limit is positive."""
        ...

    def observe(self, state: DecodeState) -> None:
        """Learn that a round has ended; `state` holds what was committed."""
        ...


def empty_draft(context: DraftContext, state: DecodeState) -> Draft:
    """A proposal of no tokens: the round is then a plain step."""
    device = state.token_ids.device
    return Draft(
        tokens=torch.zeros((state.batch, 0), dtype=torch.int64, device=device),
        probs=torch.zeros((state.batch, 0, context.vocab_size), device=device),
        num_drafted=torch.zeros(state.batch, dtype=torch.int64, device=device),
    )


def draft_chain(
    next_logits: Callable[[int], Tensor], context: DraftContext, state: DecodeState, limits: Sequence[int]
) -> Draft:
    """Draft token by token.

    Args:
        next_logits: gives for offset `i` the logits (batch, 1, vocab) of the `i`-th draft, after the drafts before it
            have been written into ``state.token_ids``.
        limits: most tokens to draft in each row.

    Returns:
        A draft of as many steps as the longest row took.
    """
    limit = torch.tensor(limits, device=state.token_ids.device)
    num_drafted = torch.zeros_like(limit)
    live = limit > 0
    tokens: list[Tensor] = []
    probs: list[Tensor] = []
    while len(tokens) < max(limits) and bool(live.any()):
        offset = len(tokens)
        logits = next_logits(offset)
        prefix_lengths = [length + offset for length in state.lengths]
        counts = None if context.sampler.prefix_free else live.long().tolist()
        step_probs, _ = context.sampler.distribution(logits, state.token_ids, prefix_lengths, counts)
        where = state.indices(offset)
        token = context.rule.draw(step_probs, where.unsqueeze(1), state.round_index).squeeze(1)
        state.token_ids[state.rows, where] = token
        tokens.append(token)
        probs.append(step_probs.squeeze(1))
        num_drafted += live
        live = live & (num_drafted < limit) & ~torch.isin(token, context.eos_ids)
        if context.confidence_threshold > 0:
            live = live & (_confidence(logits.squeeze(1), token) >= context.confidence_threshold)
    return Draft(torch.stack(tokens, 1), torch.stack(probs, 1), num_drafted)


def _confidence(logits: Tensor, token: Tensor) -> Tensor:
    """Raw probability (before processors) of `token` (batch,) under `logits` (batch, vocab): (batch,)."""
    return logits.float().softmax(-1).gather(-1, token.unsqueeze(-1)).squeeze(-1)
