"""One decoder block: attention and MLP, each a residual step that can be left out.

It reads the modules of a transformers layer and runs them in its own short forward. It knows nothing of why a
sub-block is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layerskip.models.attention import attend, attend_by_scores
from layerskip.models.cache import KVCache
from layerskip.models.family import Family, Geometry, Layer, Numbers
from layerskip.models.linears import Linears
from layerskip.models.norms import norm
from layerskip.models.rotary import rotate_, rotate_widely_
from layerskip.models.span import Span
from layerskip.models.stored import device_of

__all__ = ["Block"]


class Block:
    """The two sub-blocks of one layer. Shapes: hidden states are (batch, tokens, hidden_size).

    Attributes:
        index, window: see `Layer`.
        linears: its projections, those that read the same input together; none of experts.
        norms: its norms.
    """

    def __init__(
        self, get: Callable[[str], Any], layer: Layer, family: Family, geometry: Geometry, numbers: Numbers
    ) -> None:
        """Read one layer: `get` returns its modules, or weights, by the names in `family`."""
        self.index, self.window, self._rotary = layer.index, layer.window, layer.rotary
        self.heads, self.kv_heads, self.head_dim = geometry.num_heads, geometry.kv_heads, geometry.head_dim
        self.device: torch.device = device_of(get(family.qkv[0]))
        self._is_parallel, self._residual_scale = family.parallel, numbers.residual_scale
        self.norms: list[Callable[[Tensor], Tensor]] = []

        self._attention_norm = self._norm(get, family.attention_norm)
        self._qkv, self._output = Linears(*map(get, family.qkv)), Linears(get(family.output))
        self._order = _by_kind(geometry, self.device) if family.qkv_by_group and self.kv_heads > 1 else None
        self._head_norms = None
        if family.query_norm and family.key_norm:
            self._head_norms = self._norm(get, family.query_norm), self._norm(get, family.key_norm)
        self._are_normed_whole = family.norms_whole
        self._rotate = rotate_
        if family.rotary_pairs or family.rotary_inputs_float32 or family.rotary_tables_float32:
            self._rotate = partial(rotate_widely_, pairs=family.rotary_pairs, from_float32=family.rotary_inputs_float32)
        self._attention: Callable[..., Tensor] = attend
        if numbers.attention_cap is not None or family.sinks:
            sinks = get(family.sinks) if family.sinks else None
            self._attention = partial(attend_by_scores, cap=numbers.attention_cap, sinks=sinks)
        self._attention_scale = numbers.attention_scale
        self._add_attention = self._adding(self._output, self._norm(get, family.attention_out_norm))

        self._mlp_norm = self._norm(get, family.mlp_norm)
        self._experts = get(family.mlp) if family.experts and _has(get, family.experts) else None
        self.linears: tuple[Linears, ...] = (self._qkv, self._output)
        self._add_mlp: Callable[[Tensor, Tensor], Tensor]
        if self._experts is not None:
            self._add_mlp = self._adding(self._run_experts, self._norm(get, family.mlp_out_norm))
        else:
            self._gate_up, self._down = Linears(*map(get, family.gate_up)), Linears(get(family.down))
            self._is_gated, self._activation = family.gated, get(family.activation)
            self._add_mlp = self._adding(self._down, self._norm(get, family.mlp_out_norm))
            self.linears += (self._gate_up, self._down)

    def run(self, hidden: Tensor, cache: KVCache, span: Span, attention: bool = True, mlp: bool = True) -> Tensor:
        """Add the sub-blocks that are asked for; `attention` writes this block's keys and values into `cache`."""
        entered = hidden
        if attention:
            hidden = self.attend(hidden, cache, span)
        if mlp:
            hidden = self.transform(hidden, entered if self._is_parallel else hidden)
        return hidden

    def attend(self, hidden: Tensor, cache: KVCache, span: Span) -> Tensor:
        """Add the attention sub-block to `hidden`; writes this block's keys and values of `span` into `cache`."""
        normed = hidden if self._attention_norm is None else self._attention_norm(hidden)
        # Query heads, key heads, value heads.
        states = self._qkv(normed).view(*hidden.shape[:2], -1, self.head_dim)
        if self._order is not None:
            states = states.index_select(2, self._order)
        if self._head_norms is not None:
            states = self._with_normed_heads(states, *self._head_norms)
        if self._rotary is not None:
            self._rotate(states.narrow(2, 0, self.heads + self.kv_heads), *span.rotary(self._rotary))
        keys, values = cache.write(self.index, states.narrow(2, self.heads, 2 * self.kv_heads), span)
        queries = states.narrow(2, 0, self.heads)
        mixed = self._attention(queries, keys, values, span, self.window, self._attention_scale)
        return self._add_attention(mixed, hidden)

    def transform(self, hidden: Tensor, entered: Tensor) -> Tensor:
        """Add to `hidden` what the MLP sub-block makes of `entered`."""
        normed = entered if self._mlp_norm is None else self._mlp_norm(entered)
        if self._experts is not None:
            inner = normed
        elif self._is_gated:
            inner = self._gate_up.gated(normed, self._activation)
        else:
            inner = self._activation(self._gate_up(normed))
        return self._add_mlp(inner, hidden)

    def _norm(self, get: Callable[[str], Any], name: str | None) -> Any:
        """Of that name, None without one."""
        if name is None:
            return None
        self.norms.append(norm(get(name)))
        return self.norms[-1]

    def _with_normed_heads(self, states: Tensor, query_norm: Any, key_norm: Any) -> Tensor:
        queries: Tensor
        queries, keys, values = states.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        if self._are_normed_whole:
            normed = query_norm(queries.flatten(2)).view_as(queries), key_norm(keys.flatten(2)).view_as(keys)
        else:
            normed = query_norm(queries), key_norm(keys)
        return torch.cat((*normed, values), dim=2)

    def _adding(self, make: Any, out_norm: Any) -> Callable[[Tensor, Tensor], Tensor]:
        """What adds to a residual stream, its second argument, what `make` makes of the first."""
        if isinstance(make, Linears) and out_norm is None and self._residual_scale is None:
            return make.add

        def add(inputs: Tensor, residual: Tensor) -> Tensor:
            added: Tensor = make(inputs)
            if out_norm is not None:
                added = out_norm(added)
            return residual + (added if self._residual_scale is None else added * self._residual_scale)

        return add

    def _run_experts(self, inputs: Tensor) -> Any:
        """The experts' own module, which says more than its output in some families."""
        assert self._experts is not None
        output: Any = self._experts(inputs)
        return output[0] if isinstance(output, tuple) else output


def _by_kind(geometry: Geometry, device: torch.device) -> Tensor:
    """Where query heads, key heads and value heads are, one kind behind the other, in what is ordered by group."""
    heads = torch.arange(geometry.kv_heads * (geometry.group + 2), device=device).view(geometry.kv_heads, -1)
    return torch.cat((heads[:, :-2].flatten(), heads[:, -2], heads[:, -1]))


def _has(get: Callable[[str], Any], name: str) -> bool:
    try:
        get(name)
    except AttributeError:
        return False
    return True
