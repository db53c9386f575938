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
from layerskip.models.families import Family
from layerskip.models.linears import linear
from layerskip.models.rotary import rotate
from layerskip.models.span import Span

__all__ = ["Block"]


class Block:
    """The two sub-blocks of layer `index`. Shapes: hidden states are (batch, tokens, hidden_size)."""

    def __init__(
        self, get: Callable[[str], Any], index: int, family: Family, head_dim: int, window: int | None
    ) -> None:
        """Read one layer: `get` returns its modules by the names in `family`; `window` as in `sliding_windows`."""
        self.index = index
        self.window = window
        self.head_dim = head_dim
        self.device: torch.device = next(get(family.query).parameters()).device
        self.attention_norm = get(family.attention_norm)
        self.query, self.key, self.value = (linear(get(name)) for name in (family.query, family.key, family.value))
        self.output = linear(get(family.output))
        self.query_norm = get(family.query_norm) if family.query_norm else None
        self.key_norm = get(family.key_norm) if family.key_norm else None
        self.mlp_norm = get(family.mlp_norm)
        self.gate, self.up, self.down = (linear(get(name)) for name in (family.gate, family.up, family.down))
        self.activation = get(family.activation)

    def attend(self, hidden: Tensor, cache: KVCache, span: Span) -> Tensor:
        """Add the attention sub-block to `hidden`; writes this block's keys and values of `span` into `cache`."""
        normed = self.attention_norm(hidden)
        heads = (*hidden.shape[:2], -1, self.head_dim)
        queries, keys, values = (project(normed).view(heads) for project in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        cos, sin = span.rotary
        queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
        seen_keys, seen_values = cache.write(self.index, keys, values, span)
        mixed = _attention(queries, seen_keys, seen_values, span, self.window)
        return hidden + self.output(mixed)

    def transform(self, hidden: Tensor) -> Tensor:
        """Add the MLP sub-block to `hidden`."""
        normed = self.mlp_norm(hidden)
        return hidden + self.down(self.activation(self.gate(normed)) * self.up(normed))


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
    folded = queries.view(batch, tokens, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(
        folded.reshape(batch, kv_heads, -1, head_dim), keys, values, attn_mask=span.mask(window)
    )
    return mixed.view(batch, heads, tokens, head_dim).transpose(1, 2).reshape(batch, tokens, heads * head_dim)
