"""One decoder block: attention and MLP, each a residual step that can be left out.

It reads the modules of a transformers layer and runs them in its own short forward. It knows nothing of why a
sub-block is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.models.cache import KVCache
from layerskip.models.families import Family, Geometry
from layerskip.models.linears import Linears
from layerskip.models.norms import norm
from layerskip.models.rotary import rotate_
from layerskip.models.span import Span
from layerskip.models.stored import device_of

__all__ = ["Block"]


class Block:
    """The two sub-blocks of layer `index`. Shapes: hidden states are (batch, tokens, hidden_size).

    Attributes:
        linears: its projections, those that read the same input together.
        norms: its norms.
    """

    def __init__(
        self, get: Callable[[str], Any], index: int, family: Family, geometry: Geometry, window: int | None
    ) -> None:
        """Read one layer: `get` returns its modules by the names in `family`; `window` as in `sliding_windows`."""
        self.index = index
        self.window = window
        self.heads, self.kv_heads, self.head_dim = geometry.num_heads, geometry.kv_heads, geometry.head_dim
        self.device: torch.device = device_of(get(family.query))
        self.attention_norm = norm(get(family.attention_norm))
        self.qkv = Linears(*(get(name) for name in (family.query, family.key, family.value)))
        self.output = Linears(get(family.output))
        self.query_norm = norm(get(family.query_norm)) if family.query_norm else None
        self.key_norm = norm(get(family.key_norm)) if family.key_norm else None
        self.mlp_norm = norm(get(family.mlp_norm))
        self.gate_up = Linears(get(family.gate), get(family.up))
        self.down = Linears(get(family.down))
        self.activation = get(family.activation)
        self.norms = [each for each in (self.attention_norm, self.query_norm, self.key_norm, self.mlp_norm) if each]
        self.linears = (self.qkv, self.output, self.gate_up, self.down)

    def attend(self, hidden: Tensor, cache: KVCache, span: Span) -> Tensor:
        """Add the attention sub-block to `hidden`; writes this block's keys and values of `span` into `cache`."""
        projected = self.qkv(self.attention_norm(hidden))
        states = projected.view(*hidden.shape[:2], -1, self.head_dim)  # query heads, key heads, value heads
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys, values = states.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
            states = torch.cat((self.query_norm(queries), self.key_norm(keys), values), dim=2)
        rotate_(states.narrow(2, 0, self.heads + self.kv_heads), *span.rotary)
        keys, values = cache.write(self.index, states.narrow(2, self.heads, 2 * self.kv_heads), span)
        mixed = _attention(states.narrow(2, 0, self.heads), keys, values, span, self.window)
        return self.output.add(mixed, hidden)

    def transform(self, hidden: Tensor) -> Tensor:
        """Add the MLP sub-block to `hidden`."""
        return self.down.add(self.gate_up.gated(self.mlp_norm(hidden), self.activation), hidden)


def _attention(queries: Tensor, keys: Tensor, values: Tensor, span: Span, window: int | None) -> Tensor:
    """Grouped-query attention of `queries` (batch, tokens, heads, head_dim) over what the cache shows.

    The heads that share a key/value head become further rows of one attention: SDPA's own `enable_gqa` copies keys
    and values per query head, which at a few tokens costs more than the attention.

    Returns:
        (batch, tokens, heads * head_dim).
    """
    batch, tokens, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    if span.is_causal_square(window):
        mixed = F.scaled_dot_product_attention(
            queries.transpose(1, 2), keys, values, is_causal=True, enable_gqa=heads != kv_heads
        )
        return mixed.transpose(1, 2).reshape(batch, tokens, heads * head_dim)
    if tokens == 1:  # folded as it stands
        mixed = F.scaled_dot_product_attention(
            queries.reshape(batch, kv_heads, -1, head_dim), keys, values, attn_mask=span.mask(window)
        )
        return mixed.reshape(batch, 1, heads * head_dim)
    folded = queries.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(
        folded.reshape(batch, kv_heads, -1, head_dim), keys, values, attn_mask=span.mask(window)
    )
    return mixed.view(batch, heads, tokens, head_dim).transpose(1, 2).reshape(batch, tokens, heads * head_dim)
