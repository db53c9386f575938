"""The positions that one forward pass covers, and what every block of that pass shares: rotary tables and masks.

Row `b` of a pass covers the positions ``starts[b] … starts[b] + tokens - 1``. One class serves a prompt, one new
token, a verification of several tokens, and rows of different lengths. Of a tree of tokens several may stand at one
position; then places in the cache go on by one a token, and positions by one a generation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from layerskip.models.tree import Tree

__all__ = ["Span"]

RotaryTables = Callable[[str, int, torch.device], tuple[Tensor, Tensor]]
HiddenSlots = Callable[[int | None], Tensor]


class Span:
    """The positions of one pass on one device.

    Attributes:
        starts: first position of each row; empty where they are known to the device only.
        tokens: positions per row.
        start: the common first position, None when the rows differ, or only the device knows.
        visible: cache slots that the pass reads, at least those that its longest row may see.
        slot: the cache slot that every row's first position is written to; None: each row's own, which is its position.
        tree: which token follows which; None: each the one before it.
    """

    def __init__(
        self,
        starts: Sequence[int] | Tensor,
        tokens: int,
        *,
        visible: int | None = None,
        group: int,
        tables: RotaryTables,
        dtype: torch.dtype,
        device: torch.device,
        slot: int | None = None,
        hidden_slots: HiddenSlots | None = None,
        tree: Tree | None = None,
    ) -> None:
        """See the class.

        Args:
            starts: as numbers, or as (batch,), int64, on the device: then the pass can be recorded once and run again
                for other positions, and `visible` must be given.
            group: number of query heads per key/value head.
            tables: yields rotary tables, by their kind (see `Layer`).
            slot: None: that of the position itself.
            hidden_slots: instead of causality: told a window, says which slots each query must not see,
                (batch, 1, tokens, visible), bool.
        """
        self._first = starts if isinstance(starts, Tensor) else None
        self.starts = () if isinstance(starts, Tensor) else tuple(starts)
        self.batch = len(starts)
        self.tokens = tokens
        self.visible = max(self.starts) + tokens if visible is None else visible
        self.start = self.starts[0] if len(set(self.starts)) == 1 else None
        self.slot = self.start if slot is None else slot
        self.tree = None if tree is None else tree.to(device)
        self._group, self._tables, self._dtype, self._device = group, tables, dtype, device
        self._hidden_slots = hidden_slots or self._behind
        self._masks: dict[int | None, Tensor | None] = {}
        self._rotary: dict[str, tuple[Tensor, Tensor]] = {}
        self._moved: dict[torch.device, Span] = {device: self}

    def to(self, device: torch.device) -> Span:
        """The same span for blocks that live on another device."""
        if device not in self._moved:
            moved = self._moved[device] = Span(
                self.starts if self._first is None else self._first.to(device),
                self.tokens,
                visible=self.visible,
                group=self._group,
                tables=self._tables,
                dtype=self._dtype,
                device=device,
                slot=self.slot,
                hidden_slots=None if self._hidden_slots == self._behind else self._hidden_slots,
                tree=self.tree,
            )
            moved._moved = self._moved  # so that the way back leads to this span, masks and all
        return self._moved[device]

    def widened(self, tokens: int, capacity: int) -> Span:
        """The same span with `tokens` further positions in each row, or this one where there is no room for them.

        It stays as it is, too, where the caller has decided what is read, where it is written, or what is seen.
        """
        is_plain = self._first is None and self.slot == self.start and self._hidden_slots == self._behind
        is_plain = is_plain and self.tree is None
        if not is_plain or self.visible != self.end or self.end + tokens > capacity:
            return self
        return Span(
            self.starts,
            self.tokens + tokens,
            group=self._group,
            tables=self._tables,
            dtype=self._dtype,
            device=self._device,
        )

    @property
    def end(self) -> int:
        """One past the last slot of the longest row."""
        return max(self.starts) + self.tokens

    @cached_property
    def positions(self) -> Tensor:
        """(batch, tokens), int64."""
        return self.slots if self.tree is None else self.slots[:, :1] + self.tree.depths

    @cached_property
    def slots(self) -> Tensor:
        """Where in the cache each row's tokens stand, if there is no common `slot`: (batch, tokens), int64."""
        first = torch.tensor(self.starts, device=self._device) if self._first is None else self._first
        return first.unsqueeze(1) + torch.arange(self.tokens, device=self._device)

    @cached_property
    def rows(self) -> Tensor:
        """(batch, 1), int64: the row index that goes with `positions` in an indexed read or write."""
        return torch.arange(self.batch, device=self._device).unsqueeze(1)

    def rotary(self, kind: str) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the tables of that kind, each (batch or 1, tokens, 1, rotated)."""
        found = self._rotary.get(kind)
        if found is None:
            found = self._rotary[kind] = self._of_positions(*self._tables(kind, self.visible, self._device))
        return found

    def _of_positions(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if self.start is not None and self.tree is None:
            cos, sin = cos[None, self.start : self.end], sin[None, self.start : self.end]
        else:
            cos, sin = cos[self.positions], sin[self.positions]
        return cos.unsqueeze(2), sin.unsqueeze(2)

    def is_causal_square(self, window: int | None) -> bool:
        """Whether the pass is a whole prompt seen causally: the one case where SDPA's own mask is right.

        SDPA aligns its causal mask to the top left, which is wrong as soon as the cache holds earlier positions.
        """
        whole = self.start == 0 and self.visible == self.tokens > 1 and self.tree is None
        return whole and (window is None or self.visible <= window)

    def mask(self, window: int | None) -> Tensor | None:
        """What each query may see: (batch or 1, 1, group * tokens or 1, visible), 0 or -inf; None: everything.

        Additive and in the model's dtype, because SDPA converts a boolean mask anew in every block. Queries of the
        heads that share a key/value head are folded into the token axis (`attention.py`), hence ``group * tokens``.
        """
        if window not in self._masks:
            self._masks[window] = self._build_mask(window)
        return self._masks[window]

    def _build_mask(self, window: int | None) -> Tensor | None:
        if window is not None and self.visible <= window:
            return self.mask(None)
        if self.start is not None and self.tokens == 1 and self.visible == self.end and window is None:
            return None
        hidden = self._hidden_slots(window).to(self._device)
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, float("-inf"))
        return mask if self.tokens == 1 else mask.repeat(1, 1, self._group, 1)

    def _behind(self, window: int | None) -> Tensor:
        """Slots behind each query, and those that its window has left behind: (batch or 1, 1, tokens, visible)."""
        if self.tree is not None:
            return self._outside(self.tree, window)
        positions = self.positions if self.start is None else self.positions[:1]
        queries, slots = positions[:, None, :, None], torch.arange(self.visible, device=self._device)
        hidden = slots > queries
        if window is not None:
            hidden = hidden | (slots <= queries - window)
        return hidden

    def _outside(self, tree: Tree, window: int | None) -> Tensor:
        """The same of a tree: slots that are not committed, but for what each query sees among its pass's own tokens.

        (batch, 1, tokens, visible).
        """
        slots = torch.arange(self.visible, device=self._device)
        hidden = (slots >= self.slots[:, :1]).unsqueeze(1).repeat(1, self.tokens, 1)
        hidden.scatter_(2, self.slots.unsqueeze(1).expand(-1, self.tokens, -1), ~tree.sees)
        if window is not None:
            held = slots.expand(self.batch, -1).scatter(1, self.slots, self.positions)
            hidden |= held.unsqueeze(1) <= self.positions.unsqueeze(2) - window
        return hidden.unsqueeze(1)
