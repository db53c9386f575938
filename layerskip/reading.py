"""Reading texts: in passes of bounded length, and only what was not read before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import sub

import torch
from torch import Tensor

from layerskip.models.cache import KVCache

__all__ = ["Reading", "common_length", "read"]


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


@dataclass
class Reading:
    """How far somebody beside the model (a draft model, trained blocks) has read the texts of a call.

    Attributes:
        held: leading positions of each row that it has read, as the text is.
        cache: its own; None: its entries are in the model's cache.
    """

    held: list[int]
    cache: KVCache | None = None

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Forget all but `rows` (see `DecodeState.keep_rows`)."""
        self.held = [self.held[row] for row in rows]
        if self.cache is not None:
            self.cache.keep_rows(rows)


def read(
    run: Callable[[Sequence[int], int], Tensor], starts: Sequence[int], ends: Sequence[int], most: int | None = None
) -> Tensor:
    """Run the tokens ``starts[row] … ends[row] - 1`` of each row, in passes over at most `most` tokens a row.

    What a pass needs beside the cache (hidden states, a mask over all slots) grows with its length, so a long text in
    one pass needs more than its cache. The passes see the same as one pass would. Rows that have less to read than
    others run on beyond their end: void, and written over before it is read.

    Args:
        run: told the first position of each row and a number of tokens, runs them: (batch, tokens, hidden_size).
        most: None: all in one pass.

    Returns:
        What `run` gave for the last token of each row, (batch, 1, hidden_size).
    """
    counts = list(map(sub, ends, starts))
    width = max(counts)
    behind: Tensor | None = None
    for offset in range(0, width, most or width):
        hidden = run([start + offset for start in starts], min(most or width, width - offset))
        last = torch.tensor(counts, device=hidden.device) - 1 - offset
        # A row whose last token comes later is corrected later.
        picked = hidden[torch.arange(len(counts)), last.clamp(0, hidden.shape[1] - 1)].unsqueeze(1)
        behind = picked if behind is None else torch.where((last >= 0)[:, None, None], picked, behind)
    assert behind is not None
    return behind
