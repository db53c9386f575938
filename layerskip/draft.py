"""What a drafter hands to verification: proposed tokens, and how they were chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.state import DecodeState

__all__ = ["Draft", "empty_draft", "merged"]


@dataclass(frozen=True)
class Draft:
    """A chain of proposed tokens for each row.

    Attributes:
        tokens: (batch, drafts), int64; they also stand in ``state.token_ids`` behind the committed tokens.
        num_drafted: of each row, how many of its tokens are real; the rest is padding.
        probs: (batch, drafts, vocab), the distribution each was drawn from; None: they were not drawn but chosen
            (greedily, or copied from the text), which is a distribution of all probability on the token, or the rule
            does not ask.
        exact_states: (batch, drafts, hidden_size) or None: hidden states behind the leading `exact_blocks` blocks of
            the full model, for the newest token and all drafts but the last, which verification need not compute again.
        exact_blocks: number of those blocks.
        counts: `num_drafted` on the device, (batch,), int64, if it is there already.
        confidences: for each row and draft the probability that the drafter gave the token, where it gives one.
    """

    tokens: Tensor
    num_drafted: Sequence[int]
    probs: Tensor | None = None
    exact_states: Tensor | None = None
    exact_blocks: int = 0
    counts: Tensor | None = None
    confidences: Sequence[Sequence[float]] = field(default_factory=list)


def empty_draft(state: DecodeState) -> Draft:
    """A proposal of no tokens: the round is then a plain step."""
    return Draft(state.token_ids.new_zeros((state.batch, 0)), [0] * state.batch)


def merged(drafts: Sequence[Draft], vocab_size: int) -> Draft:
    """One draft of several, of which each row takes the one that drafted for it; at most one did."""
    if len(drafts) == 1:
        return drafts[0]
    width = max(draft.tokens.shape[1] for draft in drafts)
    tokens = torch.zeros_like(F.pad(drafts[0].tokens, (0, width - drafts[0].tokens.shape[1])))
    drawn = next((draft.probs for draft in drafts if draft.probs is not None), None)
    probs = None if drawn is None else drawn.new_zeros((*tokens.shape, vocab_size))
    num_drafted = [0] * len(tokens)
    confidences: list[Sequence[float]] = [()] * len(tokens)
    for draft in drafts:
        for row in [row for row, count in enumerate(draft.num_drafted) if count]:
            of_row = draft.tokens[row]
            tokens[row, : len(of_row)], num_drafted[row] = of_row, draft.num_drafted[row]
            if probs is not None and draft.probs is not None:
                probs[row, : len(of_row)] = draft.probs[row]
            elif probs is not None:
                probs[row, : len(of_row)].scatter_(1, of_row.unsqueeze(1), 1.0)
            if draft.confidences:
                confidences[row] = draft.confidences[row]
    return Draft(tokens, num_drafted, probs, confidences=confidences)
