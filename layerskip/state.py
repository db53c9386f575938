"""What one decoding call knows between rounds: the tokens, how many of them are committed, and the cache behind them.

Everything is per row. Row `b` has ``lengths[b]`` committed tokens; the newest is not in the cache yet, so the cache
holds ``lengths[b] - 1`` positions. Drafts are written behind the committed tokens, as in the cache, and forgotten by
not counting them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from layerskip.models.cache import KVCache
from layerskip.reading import Reading

__all__ = ["DecodeState", "remaining_rows"]


def remaining_rows(active: Sequence[bool]) -> list[int]:
    """Rows that are active, in places without a gap, as few as can be in another than their own.

    The last ones take the places of those that have ended.
    """
    count = sum(active)
    last = (row for row in range(count, len(active)) if active[row])
    return [row if active[row] else next(last) for row in range(count)]


class DecodeState:
    """Tokens and cache of one call.

    Rows that have ended may be let go of (`keep_rows`); then `batch` is what is left of them.

    Attributes:
        token_ids: (batch, capacity), int64, on the model's device.
        lengths: committed tokens of each row, prompt included.
        texts: the committed tokens of each row as numbers.
        lengths_tensor: the same on the device at the start of a round, (batch,), int64.
        limits: the longest each row may become.
        active: rows that are still decoding.
        cache: keys and values of the full model (and of the drafts that share it); it may hold the beginning of the
            prompts already.
        readings: how far others have read the texts, by who they are.
        round_tensor: rounds begun, for noise that must not repeat: (), int64.
        numbers: which of the call's rows each is.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        cache: KVCache,
        device: torch.device,
        readings: Mapping[object, Reading] | None = None,
    ) -> None:
        """Hold `prompts` (one non-empty list of ids a row) with room for ``cache.capacity`` tokens a row."""
        self.token_ids = torch.zeros((len(prompts), cache.capacity + 1), dtype=torch.int64, device=device)
        self.lengths_tensor = torch.zeros(len(prompts), dtype=torch.int64, device=device)
        self.round_tensor = torch.zeros((), dtype=torch.int64, device=device)
        self.rows = torch.arange(len(prompts), device=device)
        self.cache = cache
        self._begin(prompts, limits, readings or {})

    def reset(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        known: KVCache | None = None,
        readings: Mapping[object, Reading] | None = None,
    ) -> None:
        """Begin another call with the same number of rows, in the same memory, with what `known` holds."""
        self.cache.reset()
        if known is not None:
            self.cache.take(known)
        self._begin(prompts, limits, readings or {})

    def _begin(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], readings: Mapping[object, Reading]
    ) -> None:
        self.token_ids.zero_()
        for row, prompt in enumerate(prompts):
            self.token_ids[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
        self.lengths = [len(prompt) for prompt in prompts]
        self.texts = [list(prompt) for prompt in prompts]
        self.limits = list(limits)
        self.active = [True] * len(prompts)
        self.readings = dict(readings)
        self.numbers = list(range(len(prompts)))
        self.round_tensor.zero_()
        self.upload_lengths()

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Hold only `rows` from now on, in this order (see `KVCache.keep_rows`)."""
        self.cache.keep_rows(rows)
        for reading in self.readings.values():
            reading.keep_rows(rows)
        chosen = torch.tensor(rows, device=self.token_ids.device)
        self.token_ids, self.lengths_tensor = self.token_ids[chosen], self.lengths_tensor[chosen]
        self.rows = self.rows[: len(rows)]
        self.lengths, self.limits = [self.lengths[row] for row in rows], [self.limits[row] for row in rows]
        self.texts, self.numbers = [self.texts[row] for row in rows], [self.numbers[row] for row in rows]
        self.active = [self.active[row] for row in rows]

    def upload_lengths(self) -> None:
        """Tell the device what was committed."""
        self.lengths_tensor.copy_(torch.tensor(self.lengths))

    @property
    def batch(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    def room(self, row: int) -> int:
        """Tokens that `row` may still emit; 0 for a finished row."""
        return self.limits[row] - self.lengths[row] if self.active[row] else 0

    def indices(self, offset: int) -> Tensor:
        """(batch,), int64: in each row the index `offset` places behind the committed tokens."""
        return self.lengths_tensor + offset
