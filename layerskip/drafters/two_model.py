"""The classical way: a smaller checkpoint of the same vocabulary drafts (Leviathan et al. 2023; Chen et al. 2023).

It has a cache of its own, which may lag behind: a fully accepted draft's last token was never fed to it, and rounds
that did not draft fed it nothing. It catches up in one pass at the start of the next draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import sub

import torch
from torch import Tensor

from layerskip.draft import Draft, empty_draft
from layerskip.drafters.base import DraftContext, GoesOn, draft_chain
from layerskip.models.cache import KVCache
from layerskip.models.decoder import Decoder
from layerskip.reading import Reading, common_length, read
from layerskip.state import DecodeState

__all__ = ["ModelDrafter"]

_MOST_LAG = 8  # tokens that it is fed at the beginning of a draft; a pass over as many costs hardly more


class ModelDrafter:
    """Drafts with all blocks of another decoder."""

    def __init__(self, decoder: Decoder, context: DraftContext) -> None:
        """`decoder` is the smaller model's."""
        self.decoder = decoder
        self.context = context
        self._fed: list[list[int]] = []  # of each row, the drafts that it was fed, where others may be accepted

    def begin(self, state: DecodeState) -> None:
        """Make room for the texts; they are read before the first draft."""
        # Out of the readings while it is given more room: if that fails, nobody is to find it again.
        self._reading = state.readings.pop(self.decoder, Reading([0] * state.batch))
        if self._reading.cache is None:
            self._reading.cache = self.decoder.new_cache(state.batch, state.cache.capacity)
        self.cache.commit(self._reading.held)
        if self.cache.capacity < state.cache.capacity:
            self.cache.resize(state.cache.capacity)
        state.readings[self.decoder] = self._reading

    @property
    def cache(self) -> KVCache:
        """Keys and values of the smaller model."""
        assert self._reading.cache is not None
        return self._reading.cache

    def outlook(self, state: DecodeState) -> Sequence[int | None]:
        """Nothing is known before; a row can draft while this model has positions left."""
        return [0 if length < self.decoder.max_positions else None for length in state.lengths]

    def catch_up(self, state: DecodeState) -> None:
        """See `Drafter.catch_up`."""
        ends = self._ends(state, -1)
        if max(map(sub, ends, self._reading.held)) >= _MOST_LAG:
            self._feed(state, self._reading.held, ends)
            self._reading.held = ends
            self.cache.commit(ends)

    def propose(self, state: DecodeState, limits: Sequence[int], goes_on: GoesOn | None = None) -> Draft:
        """See `Drafter.propose`; near the end of this model's own positions a row drafts less, then nothing."""
        rooms = [self.decoder.max_positions - length for length in state.lengths]
        limits = [max(0, min(limit, room)) for limit, room in zip(limits, rooms, strict=True)]
        if not any(limits):
            return empty_draft(state)

        def next_logits(offset: int) -> Tensor:
            ends, held = self._ends(state, offset), self._reading.held
            starts = map(min, held, (end - 1 for end in ends)) if offset == 0 else (end - 1 for end in ends)
            return self._feed(state, list(starts), ends)

        draft = draft_chain(next_logits, self.context, state, limits, goes_on)
        # Behind the newest token all of a row's chain was fed, but for the last token of the longest. Nothing else is
        # known to have been: another drafter's tokens may stand where nothing was to be drafted.
        fed = [min(count, draft.depth - 1) for count in draft.lengths]
        ends = self._ends(state, 0)
        self._reading.held = [end + count for end, count in zip(ends, fed, strict=True)]
        if draft.nodes is not None:
            self._fed = [[node.token_id for node in row[:count]] for row, count in zip(draft.nodes, fed, strict=True)]
        return draft

    def observe(self, state: DecodeState) -> None:
        """Keep what was fed and stands; of a tree of drafts it may be another token that does."""
        for row, fed in enumerate(self._fed):
            before = self._reading.held[row] - len(fed)
            self._reading.held[row] = before + common_length(fed, state.texts[row][before:])
        self._fed = []
        self._reading.held = [
            min(held, length - 1) for held, length in zip(self._reading.held, state.lengths, strict=True)
        ]
        self.cache.commit(self._reading.held)

    def _ends(self, state: DecodeState, offset: int) -> list[int]:
        """One past the token at `offset` behind the newest one's place, or past the last that has a position here.

        A row that is longer has nothing to draft, and keeps no other from it.
        """
        return [min(length + offset, self.decoder.max_positions) for length in state.lengths]

    def _feed(self, state: DecodeState, starts: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Run tokens ``starts[row] … ends[row] - 1`` and return the logits behind each row's last: (batch, 1, vocab).

        Rows that lag less than others are fed tokens beyond their end: void, and overwritten before they are read.
        """
        width = max(end - start for start, end in zip(starts, ends, strict=True))
        # A row near the last place begins earlier, with tokens that it holds already, if others lag far behind.
        last = min(self.cache.capacity, self.decoder.max_positions)
        starts = [max(0, min(start, last - width)) for start in starts]

        def run(starts: Sequence[int], tokens: int) -> Tensor:
            span = self.decoder.span(starts, tokens)
            positions = span.positions.clamp(max=state.token_ids.shape[1] - 1)
            # An id that this model lacks (padding of a larger vocabulary) may still be the target's choice.
            token_ids = state.token_ids.gather(1, positions).clamp(max=self.decoder.vocab_size - 1)
            hidden = self.decoder.embed(token_ids.to(self.decoder.device), span)
            return self.decoder.run(hidden, self.decoder.full_path, self.cache, span)

        logits = self.decoder.logits(read(run, starts, ends, self.context.chunk))
        return self._fit(logits)

    def _fit(self, logits: Tensor) -> Tensor:
        """Vocabularies of one family are padded differently: cut, or fill with ids that are never drafted."""
        surplus = self.context.vocab_size - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, surplus), value=float("-inf")) if surplus else logits
