"""What one row asks in place of a processor or criterion that was made for a whole batch.

Here every row is decoded at its own positions, without padding, asks by itself, and may have another place in the
batch than at first. Such an object was made for something else: that of transformers' generate counts padding, and some
hold something for each row. The views show it what it expects.

Shapes: token ids (1, length), scores (1, vocab).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

__all__ = ["RowViews"]

# They hold something for each row of the batch (the first where the batch is padded).
_OF_A_BATCH = (
    RepetitionPenaltyLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
)


class RowViews:
    """Makes the views of one call."""

    def __init__(self, prompts: Sequence[Tensor], lengths: Sequence[int]) -> None:
        """See `Request.row_view`.

        Args:
            prompts: (1, length) each, int64, as such an object is to see them, padding included.
            lengths: of the same without padding.
        """
        self._prompts, self._lengths = prompts, lengths

    def are_needed(self, guests: Iterable[Any]) -> bool:
        """Whether a row that asks one of `guests` directly would get another answer."""
        is_padded = any(length < prompt.shape[1] for length, prompt in zip(self._lengths, self._prompts, strict=True))
        return any(
            is_padded or (len(self._lengths) > 1 and isinstance(each, (PrefixConstrainedLogitsProcessor, *_OF_A_BATCH)))
            for each in guests
        )

    def __call__(self, guest: Any, row: int) -> Any:
        """What `row` asks in place of `guest`, which is called with (token ids, scores)."""
        if isinstance(guest, PrefixConstrainedLogitsProcessor):
            allowed: Any = guest._prefix_allowed_tokens_fn
            number = row // guest._num_beams  # rows that are made of one prompt
            guest = PrefixConstrainedLogitsProcessor(lambda _, token_ids: allowed(number, token_ids), 1)
        rows = len(self._lengths) if isinstance(guest, _OF_A_BATCH) else 1
        return _View(guest, self._prompts[row], self._lengths[row], row, rows)


class _View(LogitsProcessor):
    """Asks `guest` about one row as if its prompt were padded and, where `rows` are more, in its place of a batch."""

    def __init__(self, guest: Any, prompt: Tensor, length: int, row: int, rows: int) -> None:
        self._guest, self._prompt, self._length = guest, prompt, length
        self._row, self._rows = row, rows

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        prompt = self._prompt.to(input_ids.device)
        padded = torch.cat((prompt, input_ids[:, self._length :]), dim=1)
        if self._rows == 1:
            return self._guest(padded, scores)
        # The same row in every place: only the answer in its own counts.
        answers = self._guest(padded.expand(self._rows, -1), scores.expand(self._rows, -1).clone())
        return answers[self._row : self._row + 1]
