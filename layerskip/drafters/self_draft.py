"""The model drafts for itself: fewer of its own sub-blocks, the same cache, the same norm and head.

A skip set, an exit, and a skip set with an exit are one thing here: a path of sub-blocks. Trained blocks may follow
(`models/adapter.py`), of an exit or of no block at all: an empty path, whose drafts begin at the embedding. The draft's
keys and values go into the full model's cache behind the committed positions, where verification overwrites them; those
of trained blocks have a place of their own there. Blocks before the first skipped sub-block see exactly what the full
model sees: their entries and the hidden state behind them are kept (LayerSkip, Elhoushi et al. 2024, reuses them for
exits; the same holds for any skip set).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import sub

import torch
from torch import Tensor

from layerskip.draft import Draft
from layerskip.drafters.base import DraftContext, GoesOn, draft_chain, draft_steps
from layerskip.models.adapter import Adapter
from layerskip.models.decoder import Decoder, Forward, Step
from layerskip.models.span import Span
from layerskip.reading import Reading, read
from layerskip.state import DecodeState

__all__ = ["SelfDrafter", "count_exact_blocks"]

_MOST_LAG = 8  # positions that an adapter reads at the beginning of a draft; a pass over as many costs hardly more


def count_exact_blocks(path: Sequence[Step]) -> int:
    """How many leading blocks of the model `path` runs whole, that is, on the full model's own states."""
    count = 0
    while count < len(path) and path[count] == Step(count):
        count += 1
    return count


class SelfDrafter:
    """Drafts along `path`, a subsequence of the decoder's sub-blocks."""

    def __init__(
        self,
        decoder: Decoder,
        path: Sequence[Step],
        context: DraftContext,
        vocabulary: Sequence[int] | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """See the class.

        Args:
            vocabulary: ids that are scored, ascending; None: all. The others have draft probability 0.
            adapter: blocks that run behind `path`.
        """
        self.decoder = decoder
        self.context = context
        self.exact_blocks = count_exact_blocks(path)
        self._exact, self._inexact = tuple(path[: self.exact_blocks]), tuple(path[self.exact_blocks :])
        self._head = decoder.full_head if vocabulary is None else decoder.partial_head(tuple(vocabulary))
        self._adapter = adapter

    def begin(self, state: DecodeState) -> None:
        """The prompt runs through the full model into the cache that is shared; the adapter reads it when it drafts."""
        # Positions of each row that the adapter has read as the model left them.
        self._reading = state.readings.setdefault(self._adapter, Reading([0] * state.batch))

    def outlook(self, state: DecodeState) -> Sequence[int | None]:
        """Nothing is known before; a row can always draft."""
        return [0] * state.batch

    def catch_up(self, state: DecodeState) -> None:
        """See `Drafter.catch_up`: the adapter reads a prompt, or what was written while nothing was drafted."""
        ends = [length - 1 for length in state.lengths]  # the newest token's own states are not known yet
        if self._adapter is not None and max(map(sub, ends, self._reading.held)) >= _MOST_LAG:
            self._read_up_to(state, self._adapter, ends)
            self._reading.held = ends

    def propose(self, state: DecodeState, limits: Sequence[int], goes_on: GoesOn | None = None) -> Draft:
        """See `Drafter.propose`."""
        exact_states: list[Tensor] = []

        def next_logits(offset: int) -> Tensor:
            span = self.decoder.span([length - 1 + offset for length in state.lengths], 1)
            exact, hidden = self._step(state, span)
            exact_states.append(exact)
            if self._adapter is None:
                return self.decoder.logits(hidden, self._head)
            hidden = (
                self._read_up_to(state, self._adapter, state.lengths)
                if offset == 0
                else self._adapter.run(hidden, outputs[-1], state.cache, span)
            )
            outputs.append(hidden)
            return self.decoder.logits(hidden, self._head, self._adapter.final_norm)

        outputs: list[Tensor] = []
        draft = draft_chain(next_logits, self.context, state, limits, goes_on, self._head.vocabulary)
        self._reading.held = list(state.lengths)
        if not self.exact_blocks:
            return draft
        return replace(draft, exact_states=torch.cat(exact_states, dim=1), exact_blocks=self.exact_blocks)

    def steps(
        self, state: DecodeState, count: int, visible: int, forward: Forward
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """See `Recordable.steps`."""
        path, outputs = self._exact + self._inexact, list[Tensor]()

        def next_logits(offset: int) -> Tensor:
            newest = state.indices(offset - 1)
            token_ids = state.token_ids.gather(1, newest.unsqueeze(1))
            if self._adapter is None:
                return forward(token_ids, newest, visible, state.cache, path, self._head)
            span = self.decoder.span(newest, 1, visible)
            hidden = self.decoder.run(self.decoder.embed(token_ids, span), path, state.cache, span)
            if offset == 0:  # read again up to the newest token, as many as there can be that were not read before
                starts = (newest + 1 - _MOST_LAG).clamp(min=0)
                hidden = self._read(state, self._adapter, self.decoder.span(starts, _MOST_LAG, visible))
                hidden = hidden[state.rows, newest - starts].unsqueeze(1)
            else:
                hidden = self._adapter.run(hidden, outputs[-1], state.cache, span)
            outputs.append(hidden)
            return self.decoder.logits(hidden, self._head, self._adapter.final_norm)

        return draft_steps(next_logits, self.context, state, count, self._head.vocabulary)

    def note_steps(self, state: DecodeState) -> None:
        """See `Recordable.note_steps`."""
        self._reading.held = list(state.lengths)

    def _step(self, state: DecodeState, span: Span) -> tuple[Tensor, Tensor]:
        """Run the token at `span`: the hidden states behind the exact blocks, and behind the path."""
        hidden = self.decoder.embed(state.token_ids.gather(1, span.positions), span)
        exact = self.decoder.run(hidden, self._exact, state.cache, span, self.exact_blocks)
        hidden = self.decoder.run(exact, self._inexact, state.cache, span, self.exact_blocks)
        return exact, hidden

    def observe(self, state: DecodeState) -> None:
        """Nothing: rollback is the shared cache's length."""

    def _read_up_to(self, state: DecodeState, adapter: Adapter, ends: Sequence[int]) -> Tensor:
        """Let the adapter read each row's positions from where it was up to `ends`; its output behind the last of each.

        Rows that lag less than others read beyond their end: void, and written over before it is read.
        """
        width = max(map(sub, ends, self._reading.held))
        starts = [max(0, min(held, state.cache.capacity - width)) for held in self._reading.held]

        def run(starts: Sequence[int], tokens: int) -> Tensor:
            return self._read(state, adapter, self.decoder.span(starts, tokens))

        return read(run, starts, ends, self.context.chunk)

    def _read(self, state: DecodeState, adapter: Adapter, span: Span) -> Tensor:
        """Let the adapter read the positions of `span` as the model left them: its outputs, (batch, tokens, hidden)."""
        cache, exit_layer = state.cache, adapter.spec.exit_layer
        if exit_layer:
            entry = cache.states[exit_layer][span.rows, span.positions]
        else:
            entry = self.decoder.embed(state.token_ids.gather(1, span.positions), span)
        if not adapter.spec.reads_state:
            return adapter.run(entry, None, cache, span)
        positions, is_first = (span.positions - 1).clamp(min=0), (span.positions == 0).unsqueeze(-1)
        before, *further = (
            cache.states[each][span.rows, positions].masked_fill(is_first, 0.0)
            for each in (self.decoder.num_blocks, *adapter.spec.further_states)
        )
        return adapter.run(entry, before, cache, span, further)
