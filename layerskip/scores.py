"""What the model said of each committed token: its raw logits, and the scores that the processors made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Said", "by_step"]


class Said(NamedTuple):
    """The target's logits and scores, None if nobody asked: (batch, tokens, vocab) of a pass, (vocab,) of a token."""

    logits: Tensor | None = None
    scores: Tensor | None = None

    def at(self, row: int, index: int) -> Said:
        """A copy for one token, so that the pass need not be kept; in float32, or float64 of a float64 model."""
        return Said(*(None if each is None else _widened(each[row, index]) for each in self))


def by_step(rows: Sequence[Sequence[Tensor | None]], pad_token_id: int) -> tuple[Tensor, ...] | None:
    """What was said of each row's tokens, (vocab,) each, as transformers returns it: (batch, vocab) for each step.

    Rows that ended early say padding, for certain: its score is 0, all others are -inf, so that it adds nothing to a
    sum of log-probabilities. (transformers goes on computing such rows and returns what comes of it.)

    Returns:
        None: nobody asked.
    """
    some = next((each for row in rows for each in row if each is not None), None)
    if some is None:
        return None
    padding = torch.full_like(some, float("-inf"))
    padding[pad_token_id : pad_token_id + 1] = 0.0  # which may be no id of the model
    steps = []
    for step in range(max(map(len, rows))):
        of_rows = [row[step] if step < len(row) else padding for row in rows]
        steps.append(torch.stack([each for each in of_rows if each is not None]))
    return tuple(steps)


def _widened(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32), copy=True)
