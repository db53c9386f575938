"""One preallocated key/value cache for all blocks: in-place writes, rollback by length.

It knows positions and rows, nothing of drafting or acceptance. Slot `p` of a row holds position `p` of that row, so
rows of different lengths need no padding on the left, a draft is written over by its verification, and rollback is
one number per row. Sliding-window layers keep all positions too (the mask hides the old ones): a ring buffer that has
wrapped cannot be rolled back.

The caller states the capacity; nothing grows by itself. A text that outgrows it is given more by a copy (`resize`).

Beside keys and values it can keep hidden states, by position as well: those behind some blocks of the model, for who
drafts from them. And it can hold entries of further blocks, that are no part of the model: their books are their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor

from layerskip.errors import DecodingError
from layerskip.models.span import Span

__all__ = ["KVCache"]


class KVCache:
    """Keys and values of every block.

    Attributes:
        keys, values: one tensor a block, (batch, kv_heads, capacity, head_dim): the two halves of what is one tensor,
            so that a pass writes both at once.
        lengths: committed positions of each row; slots from there on are free to be overwritten.
        states: hidden states by position, (batch, capacity, hidden_size), by the number of blocks they have behind
            them; those that were asked for.
    """

    @torch.inference_mode(False)  # whoever writes to it later may not be in inference mode
    def __init__(
        self,
        *,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        devices: Sequence[torch.device],
        further_blocks: int = 0,
        kept_states: Mapping[int, tuple[int, torch.device]] | None = None,
    ) -> None:
        """Allocate for ``len(devices)`` blocks, block ``i`` on ``devices[i]``.

        Args:
            further_blocks: how many of these, the last ones, are no part of the model.
            kept_states: the size and device of the `states` to keep.
        """
        shape = (batch, 2 * kv_heads, capacity, head_dim)
        # Zeros, not empty: a masked slot is multiplied by a weight of 0, and 0 * NaN would be NaN.
        try:
            self._entries = [torch.zeros(shape, dtype=dtype, device=device) for device in devices]
            self.states = {
                behind: torch.zeros((batch, capacity, size), dtype=dtype, device=device)
                for behind, (size, device) in (kept_states or {}).items()
            }
        except RuntimeError as error:  # torch's out of memory, on CPU and CUDA
            numbers = 2 * len(devices) * kv_heads * head_dim + sum(size for size, _ in (kept_states or {}).values())
            raise _no_memory(batch, capacity, numbers * dtype.itemsize) from error
        self._halve(kv_heads)
        self.capacity = capacity
        self.lengths = [0] * batch
        # How far each block's entries are those of the full model: (blocks, batch). See check().
        self._exact = np.zeros((len(devices) - further_blocks, batch), dtype=np.int64)

    def reset(self) -> None:
        """Forget everything; values that are not finite would be multiplied by a masked weight of 0 and stay."""
        for held in (*self._entries, *self.states.values()):
            held.zero_()
        self.lengths = [0] * len(self.lengths)
        self._exact[:] = 0

    def wipe(self) -> None:
        """Zero the slots behind the committed ones, after a pass that failed may have left what is not finite there."""
        for row, length in enumerate(self.lengths):
            for entries in self._entries:
                entries[row, :, length:] = 0
            for states in self.states.values():
                states[row, length:] = 0

    @torch.inference_mode(False)
    @torch.no_grad()
    def resize(self, capacity: int) -> None:
        """Move all that is committed to new memory for `capacity` positions, block by block; the rest is zeros.

        If it fails, the cache is void.

        Raises:
            DecodingError: there is no memory for it.
        """
        longest = max(self.lengths)
        assert longest <= capacity, f"{longest} committed positions for a capacity of {capacity}"
        a_position = self.nbytes // (len(self.lengths) * self.capacity)
        try:
            for index, entries in enumerate(self._entries):
                self._entries[index] = entries.new_zeros((*entries.shape[:2], capacity, entries.shape[3]))
                self._entries[index][:, :, :longest] = entries[:, :, :longest]
            for behind, states in self.states.items():
                self.states[behind] = states.new_zeros((len(states), capacity, states.shape[2]))
                self.states[behind][:, :longest] = states[:, :longest]
        except RuntimeError as error:
            raise _no_memory(len(self.lengths), capacity, a_position) from error
        self._halve(self.keys[0].shape[1])
        self.capacity = capacity

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Hold only `rows` from now on, in this order. Those that have another place than before are copied there.

        Memory is not given back: another of its size would be needed meanwhile.

        Args:
            rows: each at the place of one that is not kept, or at its own, as `remaining_rows` puts them.
        """
        for place, row in enumerate(rows):
            if place != row:
                for held in (*self._entries, *self.states.values()):
                    held[place] = held[row]
        count = len(rows)
        self._entries = [entries[:count] for entries in self._entries]
        self.states = {behind: states[:count] for behind, states in self.states.items()}
        self._halve(self.keys[0].shape[1])
        self.lengths = [self.lengths[row] for row in rows]
        self._exact = self._exact[:, list(rows)]

    def _halve(self, kv_heads: int) -> None:
        self.keys = [entries[:, :kv_heads] for entries in self._entries]
        self.values = [entries[:, kv_heads:] for entries in self._entries]

    def copied(self, capacity: int) -> KVCache:
        """All that is committed in a cache of its own, for `capacity` positions; errors as in `resize`."""
        other = copy(self)
        other._entries, other.states = list(self._entries), dict(self.states)
        other.lengths, other._exact = list(self.lengths), self._exact.copy()
        other.resize(capacity)
        return other

    def take(self, other: KVCache, begin: int = 0) -> None:
        """Hold what `other` has committed, which is known to be the same before the position `begin`.

        `other` may have further blocks and states, or lack some.
        """
        end = max(other.lengths)
        for own, its in zip(self._entries, other._entries, strict=False):
            own[:, :, begin:end] = its[:, :, begin:end]
        for behind in self.states.keys() & other.states.keys():
            self.states[behind][:, begin:end] = other.states[behind][:, begin:end]
        self._exact[:] = other.lengths
        self.lengths = list(other.lengths)

    @property
    def entries(self) -> Sequence[Tensor]:
        """Keys and values of each block, (batch, 2 * kv_heads, capacity, head_dim): all keys, then all values."""
        return self._entries

    def over(self, entries: Sequence[Tensor]) -> KVCache:
        """The same cache through other tensors that stand for its `entries`, as those of a pass that is traced."""
        other = copy(self)
        other._entries = list(entries)
        halves = [each.chunk(2, dim=1) for each in entries]
        other.keys, other.values = [keys for keys, _ in halves], [values for _, values in halves]
        return other

    @property
    def nbytes(self) -> int:
        """Bytes held by keys, values and states."""
        return sum(held.nbytes for held in (*self._entries, *self.states.values()))

    def write(self, block: int, new: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Store a pass's keys and values and return all that the pass may see.

        Args:
            block: index of the block.
            new: (batch, tokens, 2 * kv_heads, head_dim) for the positions of `span`: all keys, then all values.

        Returns:
            Views of keys and values, (batch, kv_heads, span.visible, head_dim).
        """
        entries = self._entries[block]
        if span.slot is not None:
            entries.narrow(2, span.slot, span.tokens).copy_(new.transpose(1, 2))
        else:
            entries[span.rows, :, span.slots] = new
        return self.keys[block].narrow(2, 0, span.visible), self.values[block].narrow(2, 0, span.visible)

    def keep(self, behind: int, hidden: Tensor, span: Span) -> None:
        """Store the hidden states (batch, tokens, hidden_size) behind so many blocks, if they are to be kept."""
        states = self.states.get(behind)
        if states is None:
            return
        if span.slot is not None:
            states.narrow(1, span.slot, span.tokens).copy_(hidden)
        else:
            states[span.rows, span.slots] = hidden

    def note(self, blocks: Sequence[int], span: Span, exact_blocks: int) -> None:
        """Record that `blocks` were written by a pass whose first `exact_blocks` blocks saw the full model's states.

        Raises:
            AssertionError: the pass left a gap behind what an exact block holds, or went beyond the capacity (where
                torch drops the write of one token without a word).
        """
        # Known to the device only (whoever records such passes notes them by numbers), or beside the text itself.
        if not span.starts or span.slot != span.start:
            return
        starts = np.asarray(span.starts)
        assert span.end <= self.capacity, f"wrote up to {span.end} of {self.capacity} slots"
        written = np.asarray(blocks, dtype=np.int64)
        exact, inexact = written[written < exact_blocks], written[written >= exact_blocks]
        assert (starts <= self._exact[exact]).all(), f"gap: wrote from {starts}, held {self._exact[exact]}"
        self._exact[exact] = starts + span.tokens
        self._exact[inexact] = np.minimum(self._exact[inexact], starts)

    def move(self, row: int, source: int, to: int) -> None:
        """Bring the model's own entries of `row`, and its states, from the slot `source` to the slot `to`.

        What was accepted of a tree of drafts stands between what was not.
        """
        for entries in self._entries[: len(self._exact)]:
            entries[row, :, to] = entries[row, :, source]
        for states in self.states.values():
            states[row, to] = states[row, source]

    def commit(self, lengths: Sequence[int]) -> None:
        """Set the committed length of each row; all beyond it (rejected drafts) is void from now on.

        Raises:
            AssertionError: some block does not hold the full model's entries up to there.
        """
        wanted = np.asarray(lengths, dtype=np.int64)
        assert (wanted <= self.capacity).all(), f"committed {lengths} of {self.capacity} slots"
        assert (self._exact >= wanted).all(), f"committed {lengths}, exact only to {self._exact.min(0)}"
        self._exact[:] = wanted
        self.lengths = list(lengths)

    def check(self) -> None:
        """Assert the invariant between rounds: every block holds exactly the committed positions, all finite.

        For tests and debugging; it reads the whole cache.
        """
        assert (self._exact == np.asarray(self.lengths)).all(), (
            f"lengths {self.lengths}, blocks hold {self._exact.tolist()}"
        )
        for tensor in self._entries:
            for row, length in enumerate(self.lengths):
                assert tensor[row, :, :length].isfinite().all(), f"row {row} holds values that are not finite"


def _no_memory(batch: int, capacity: int, bytes_a_position: int) -> DecodingError:
    return DecodingError(
        f"got no memory for a cache of {batch} row(s) of {capacity:,} positions, "
        f"{batch * capacity * bytes_a_position / 1e9:.1f} GB. "
        "Lower max_new_tokens, shorten the prompt, or decode fewer rows at once."
    )
