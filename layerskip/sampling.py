"""From logits to the scores, and the distribution, that a token is drawn from: the same for draft and target.

Processors and warpers are transformers' own (or the caller's) and see what they would see in plain decoding: the true
prefix of each position, one token longer for each next position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from layerskip.errors import SettingError

__all__ = ["Sampler", "distribution"]

# They never look at the prefix, so all rows and positions can go through them in one call.
_PREFIX_FREE = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)


def distribution(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The distributions that `scores` (…, vocab) stand for.

    Returns:
        probs (…, vocab), and valid (…): False where there is no distribution (NaN, all tokens banned, an infinite
        score); all probability is then on token 0.
    """
    # NaN is neither finite nor above anything, and an infinite best has an argmax but no softmax.
    valid = scores.amax(dim=-1).isfinite()
    probs = scores.softmax(dim=-1)
    probs.masked_fill_(~valid.unsqueeze(-1), 0.0)
    probs[..., 0].masked_fill_(~valid, 1.0)
    return probs, valid


class Sampler:
    """Applies each row's processors.

    Attributes:
        prefix_free: no processor looks at the prefix.
        is_bare: there are no processors at all.
    """

    def __init__(self, processors: Sequence[LogitsProcessorList], do_sample: bool) -> None:
        """`processors` has one list a row: some of transformers' processors are made for a prompt length."""
        self.do_sample = do_sample
        self._take(processors)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Forget all but `rows`, which are in this order from now on."""
        self._take([self.processors[row] for row in rows])

    def _take(self, processors: Sequence[LogitsProcessorList]) -> None:
        self.processors = tuple(processors)
        self.is_bare = not any(self.processors)
        self.prefix_free = all(type(each) in _PREFIX_FREE for row in self.processors for each in row)
        self._shared = all(row is self.processors[0] for row in self.processors)

    def scores(
        self, logits: Tensor, token_ids: Tensor, prefix_lengths: Sequence[int], counts: Sequence[int] | None = None
    ) -> Tensor:
        """What remains of logits after the processors, (batch, tokens, vocab).

        Args:
            logits: (batch, tokens, vocab); those of token `t` follow ``token_ids[b, :prefix_lengths[b] + t]``.
            token_ids: (batch, capacity), prompt, output and drafts.
            prefix_lengths: true length of each row's prefix at its first position.
            counts: how many positions of each row matter; processors are not asked about the rest, whose prefixes
                would never come up in plain decoding. None: all.

        Returns:
            float32, or float64 of a float64 model. Greedy scores without processors stay the logits, in their dtype:
            widening does not change which is the largest.
        """
        if self.is_bare and not self.do_sample:
            return logits
        return self._process(_widen(logits), token_ids, prefix_lengths, counts)

    def _process(
        self, scores: Tensor, token_ids: Tensor, prefix_lengths: Sequence[int], counts: Sequence[int] | None
    ) -> Tensor:
        if self.is_bare:
            return scores
        if self.prefix_free and self._shared:
            return self._call(0, token_ids[:1], scores.flatten(0, 1)).view_as(scores)
        positions = []
        for offset, position in enumerate(scores.unbind(dim=1)):
            lengths = [
                length + offset if counts is None or offset < counts[row] else None
                for row, length in enumerate(prefix_lengths)
            ]
            positions.append(self._process_position(position, token_ids, lengths))
        return torch.stack(positions, dim=1)

    def _process_position(self, scores: Tensor, token_ids: Tensor, prefix_lengths: list[int | None]) -> Tensor:
        """Scores (batch, vocab) of one position; rows with different prefixes are processed one by one.

        Args:
            prefix_lengths: None for a row that is left as it is.
        """
        together = prefix_lengths[0]
        if self._shared and together is not None and len(set(prefix_lengths)) == 1:
            return self._call(0, token_ids[:, :together], scores)
        rows = [
            scores[row : row + 1]
            if length is None
            else self._call(row, token_ids[row : row + 1, :length], scores[row : row + 1])
            for row, length in enumerate(prefix_lengths)
        ]
        return torch.cat(rows)

    def _call(self, row: int, prefixes: Tensor, scores: Tensor) -> Tensor:
        call: Any = self.processors[row]  # annotated with tensor types of torch's legacy constructors
        processed = call(prefixes, scores)
        if not isinstance(processed, Tensor) or processed.shape != scores.shape or not processed.is_floating_point():
            got = f"{processed.dtype} {tuple(processed.shape)}" if isinstance(processed, Tensor) else repr(processed)
            raise SettingError(
                f"got {got} from the logits processors; expected scores of shape {tuple(scores.shape)}. Check that "
                "each of yours returns the scores it was given, changed or not."
            )
        return processed


def _widen(logits: Tensor) -> Tensor:
    """A copy (processors may write into it) in float32, or float64 for a float64 model."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
