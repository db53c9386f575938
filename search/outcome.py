"""What became of a text's positions when drafts were made along it, and where each of these drafts began."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from layerskip.search.acceptance import Acceptance

__all__ = ["TextOutcome", "anchors_of"]


@dataclass(frozen=True)
class TextOutcome:
    """What became of one text's positions.

    Attributes:
        stands: (positions,), float64: chance that the draft for the text's next token is that token and is accepted;
            0 or 1 when decoding is greedy.
        overlap: (positions,), float64: chance that the draft is accepted, whatever it is; equal to `stands` when
            decoding is greedy.
        anchors: (positions,), int64: index of the position where the draft of each position began.
    """

    stands: Tensor
    overlap: Tensor
    anchors: Tensor

    def accepted_lengths(self) -> list[int]:
        """For greedy decoding, how many drafts stand from each anchor on, in order."""
        lengths = []
        for anchor in self.anchors.unique().tolist():
            drafts = self.stands[self.anchors == anchor]
            lengths.append(int(drafts.cumprod(0).sum().item()))
        return lengths

    def acceptance(self, draft_length: int) -> Acceptance:
        """Counts over this text's anchors, for offsets below `draft_length`.

        A first draft that the next anchor cuts short is left out: over all shifts, the beginning of the text would
        otherwise count more often than the rest.
        """
        survived, observed = [0.0] * draft_length, [0] * draft_length
        stands, overlaps, anchors = self.stands.tolist(), self.overlap.tolist(), self.anchors.tolist()
        alive, second = 1.0, next((anchor for anchor in anchors if anchor > 0), 0)
        for index, anchor in enumerate(anchors):
            if index < second < draft_length:
                continue
            offset = index - anchor
            alive = 1.0 if offset == 0 else alive
            survived[offset] += alive * overlaps[index]
            observed[offset] += 1
            alive *= stands[index]
        return Acceptance(tuple(survived), tuple(observed))


def anchors_of(count: int, draft_length: int, shift: int) -> Tensor:
    """For each of `count` positions, the index of the one where its draft began: (count,), int64.

    Anchors lie `draft_length` apart; where none falls on the first position, a draft that begins there is cut short by
    the next anchor.
    """
    phase = shift % draft_length
    positions = torch.arange(count)
    return ((positions - phase).div(draft_length, rounding_mode="floor") * draft_length + phase).clamp(min=0)
