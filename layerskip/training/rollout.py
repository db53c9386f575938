"""What a draft path would draft from every position of a text at once, with gradients.

Drafting from anchor `a`, the draft at offset `j` (from 1) reads position ``p = a + j - 1``. All anchors are run in
parallel, one pass over the whole text for each offset: at offset 1 every position reads the model's own state of the
position before, at offset `j` what the pass before put out there. Its keys are, as in real drafting, those of offset 1
up to the anchor, then one of each further offset: the pass of offset `j` at position `p` sees the keys of offset 1 up
to ``p - j + 1``, and of each offset ``i > 1`` that at position ``p - j + i``. (Training-time test: EAGLE-3, Li et al.
2025; HASS, Zhang et al. 2025.)

Heads (`models/heads.py`) draft from the state one position before the anchor, whatever they drafted since: at offset
`j` position `p` has what head `j` makes of the state at ``p - j``.

Nothing here knows what the outputs are used for: training takes their loss, a search asks which drafts stand. Tokens
are taken as the text has them, so offset `j` is what would be drafted if the drafts before it had been the text's own
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from layerskip.models.adapter import Adapter, TrainedPart
from layerskip.models.cache import KVCache
from layerskip.models.decoder import Decoder
from layerskip.models.heads import Heads
from layerskip.models.span import Span

__all__ = ["rollout"]


def rollout(
    decoder: Decoder, adapter: TrainedPart, states: Mapping[int, Tensor], offsets: int, first: int = 0
) -> list[Tensor]:
    """Outputs of `adapter` at each offset, before norm and head.

    Args:
        states: the model's own, (batch, tokens, hidden_size), by the number of blocks behind them: those that the
            adapter reads, and where it begins (0: the embedding).
        offsets: how many drafts to look ahead; of heads no more than there are.
        first: the first position that is an anchor. Those before it are read once, whatever `offsets` is: of a long
            prompt neither time nor memory grow by each.

    Returns:
        One tensor (batch, tokens - first, hidden_size) an offset. At offset `j` its first ``j - 1`` positions are void:
        no anchor lies so far back.
    """
    if isinstance(adapter, Heads):
        return _guesses(decoder, adapter, states[decoder.num_blocks], offsets, first)
    assert isinstance(adapter, Adapter)
    spec, entry = adapter.spec, states[adapter.spec.exit_layer]
    batch, tokens = entry.shape[:2]
    cache, outputs = _PassCache(), list[Tensor]()
    before = _shifted(states[decoder.num_blocks]) if spec.reads_state else None
    further = [_shifted(states[each]) for each in spec.further_states]
    for offset in range(1, offsets + 1):
        begin = 0 if offset == 1 else first
        visible = tokens + (offset - 1) * (tokens - first)
        span = Span(
            [begin] * batch,
            tokens - begin,
            visible=visible,
            group=decoder.group,
            tables=decoder.rotary_tables,
            dtype=_computed_in(entry),
            device=entry.device,
            slot=visible - (tokens - begin),
            hidden_slots=None if offset == 1 else partial(_unseen, tokens, first, offset),
        )
        output = adapter.run(entry[:, begin:], before, cache, span, further)
        outputs.append(output[:, first - begin :])
        before, further = _shifted(outputs[-1]) if spec.reads_state else None, []
    return outputs


def _guesses(decoder: Decoder, heads: Heads, state: Tensor, offsets: int, first: int) -> list[Tensor]:
    """`rollout` of heads: one pass serves all offsets."""
    with torch.no_grad():  # the model's own norm, in the dtype in which it will be read
        normed = decoder.final_norm(state.to(decoder.dtype)).to(state.dtype)
    guesses = heads.run(normed).unbind(dim=2)[:offsets]
    tokens = state.shape[1]
    return [torch.nn.functional.pad(each, (0, 0, j, 0))[:, first:tokens] for j, each in enumerate(guesses, 1)]


class _PassCache(KVCache):
    """Keys and values of all passes so far, one behind the other; nothing is written in place, so gradients flow."""

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}

    def write(self, block: int, new: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """See `KVCache.write`; what it returns grows by each pass."""
        entries = new.transpose(1, 2)
        if block in self._held:
            entries = torch.cat((self._held[block], entries), dim=2)
        self._held[block] = entries
        keys, values = entries.chunk(2, dim=1)
        return keys, values


def _shifted(states: Tensor) -> Tensor:
    """The state of the position before; before the first there is none: zeros."""
    return torch.nn.functional.pad(states[:, :-1], (0, 0, 1, 0))


def _unseen(tokens: int, first: int, offset: int, window: int | None) -> Tensor:
    """Which keys the queries of an offset above 1 must not see. No `window` is asked.

    Returns:
        (1, 1, tokens - first, tokens + (offset - 1) * (tokens - first)), bool. Every query sees its own key, also where
        no anchor lies so far back: a softmax over nothing is no number.
    """
    key, later = torch.arange(tokens), torch.arange(first, tokens)
    query = later[:, None]
    seen = [key <= query - offset + 1]
    seen += [later == query - offset + each for each in range(2, offset + 1)]
    return ~torch.cat(seen, dim=1)[None, None]


def _computed_in(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
