"""Grouped-query attention of a pass over what the cache shows. It knows nothing of modules or weights.

The heads that share a key/value head become further rows of one attention: SDPA's own `enable_gqa` copies keys and
values per query head, which at a few tokens costs more than the attention.

Shapes: queries (batch, tokens, heads, head_dim); keys and values (batch, kv_heads, visible, head_dim); what comes out
(batch, tokens, heads * head_dim).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.models.span import Span

__all__ = ["attend", "attend_by_scores"]


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, span: Span, window: int | None, scale: float | None
) -> Tensor:
    """By torch's own kernel.

    Args:
        window: see `Span.mask`.
        scale: of the scores; None: one over the root of the head's size.
    """
    batch, tokens, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    if span.is_causal_square(window):
        mixed = F.scaled_dot_product_attention(
            queries.transpose(1, 2), keys, values, is_causal=True, scale=scale, enable_gqa=heads != kv_heads
        )
        return mixed.transpose(1, 2).reshape(batch, tokens, heads * head_dim)
    if tokens == 1:  # folded as it stands
        mixed = F.scaled_dot_product_attention(
            queries.reshape(batch, kv_heads, -1, head_dim), keys, values, attn_mask=span.mask(window), scale=scale
        )
        return mixed.reshape(batch, 1, heads * head_dim)
    folded = _folded(queries, kv_heads)
    mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=span.mask(window), scale=scale)
    return _unfolded(mixed, tokens)


def attend_by_scores(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    span: Span,
    window: int | None,
    scale: float | None,
    *,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Step by step, for what the kernel cannot do; scores and softmax in float32 or more.

    Args:
        window, scale: see `attend`.
        cap: scores are bounded to ``cap * tanh(score / cap)``; None: they are not.
        sinks: (heads,), a further score of each head, whose share goes nowhere; None: there is none.
    """
    tokens, head_dim = queries.shape[1], queries.shape[3]
    folded = _folded(queries, keys.shape[1])
    products = folded @ keys.transpose(2, 3)
    scores = products.to(torch.promote_types(products.dtype, torch.float32))
    scores = scores * (head_dim**-0.5 if scale is None else scale)
    if cap is not None:
        scores = (scores / cap).tanh() * cap
    mask = span.mask(window)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:  # heads are folded before tokens
        of_rows = sinks.to(scores.dtype).repeat_interleave(tokens).view(1, keys.shape[1], -1, 1)
        scores = torch.cat((scores, of_rows.expand(len(scores), -1, -1, -1)), dim=-1)
    shares = scores.softmax(-1).to(values.dtype)[..., : keys.shape[2]]
    return _unfolded(torch.matmul(shares, values), tokens)


def _folded(queries: Tensor, kv_heads: int) -> Tensor:
    """(batch, kv_heads, group * tokens, head_dim), the tokens of a head behind each other."""
    grouped: Tensor = queries.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
    return grouped.reshape(len(queries), kv_heads, -1, queries.shape[3])


def _unfolded(mixed: Tensor, tokens: int) -> Tensor:
    of_heads = mixed.reshape(len(mixed), -1, tokens, mixed.shape[3])
    return of_heads.transpose(1, 2).reshape(len(mixed), tokens, -1)
