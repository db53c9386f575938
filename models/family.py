"""What a row of the table of families says, and what is read from a config: plain descriptions, without any values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["Family", "Geometry", "Layer", "Numbers", "Variant"]


@dataclass(frozen=True)
class Numbers:
    """Factors and bounds of a model, by its config; None: there is none.

    Attributes:
        embedding_scale: of the token embedding; not where the embedding's own module applies it.
        residual_scale: of what each sub-block adds.
        attention_scale: of attention scores; None: one over the root of the head's size.
        attention_cap, logit_cap: scores and logits are bounded to ``cap * tanh(each / cap)``.
        logit_scale: of the head's outputs.
    """

    embedding_scale: float | None = None
    residual_scale: float | None = None
    attention_scale: float | None = None
    attention_cap: float | None = None
    logit_scale: float | None = None
    logit_cap: float | None = None

    def finish(self, scores: Tensor) -> Tensor:
        """Logits, of what the head puts out."""
        if self.logit_scale is not None:
            scores = scores * self.logit_scale
        return scores if self.logit_cap is None else (scores / self.logit_cap).tanh() * self.logit_cap


@dataclass(frozen=True)
class Variant:
    """What else holds for those models of a family whose config says so.

    Attributes:
        applies: asked about the config.
        changes: fields of the family's row.
        refused: why such a model cannot be run; None: it can.
    """

    applies: Callable[[Any], bool]
    changes: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None


@dataclass(frozen=True)
class Family:
    """Dotted paths, from the ``…ForCausalLM`` module (first group) and from one of its layers (others), and flags."""

    embedding: str = "model.embed_tokens"
    positions: str | None = None  # the weight of learned absolute positions, added to the embedding
    position_offset: int = 0  # the row of position 0 in it
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    rotary: str | None = "model.rotary_emb"

    attention_norm: str | None = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one: all side by side
    qkv_by_group: bool = False  # that one puts out, for each key/value head: its queries, the key, the value
    query_norm: str | None = None  # on each head, before the rotary embedding
    key_norm: str | None = None
    norms_whole: bool = False  # these two are on all heads as one vector
    sinks: str | None = None  # the weight of one more score for each head, whose share of the attention goes nowhere
    output: str = "self_attn.o_proj"
    attention_out_norm: str | None = None  # on what attention adds

    mlp_norm: str | None = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # or one: side by side, or an up-projection alone
    gated: bool = True
    down: str = "mlp.down_proj"
    activation: str = "mlp.act_fn"
    experts: str | None = None  # a layer that has this runs `mlp` as it is
    mlp: str = "mlp"
    mlp_out_norm: str | None = None  # on what the MLP adds

    parallel: bool = False  # the MLP reads what the attention read, not what it made of it
    rotary_pairs: bool = False  # neighbours are rotated, not halves
    rotary_inputs_float32: bool = False  # rounded to it before they are rotated
    rotary_tables_float32: bool = False  # at least
    rotary_kinds: Callable[[Any], Sequence[str | None]] | None = None  # see `Layer`; None: "" for all layers
    numbers: Callable[[Any], Numbers] = lambda config: Numbers()
    variants: tuple[Variant, ...] = ()


@dataclass(frozen=True)
class Geometry:
    """Sizes of a model, by its config.

    Attributes:
        num_heads, kv_heads: of queries, and of keys and values; the first is a multiple of the second.
        head_dim: of one head; not always ``hidden_size / num_heads``.
        max_positions: the longest sequence, in tokens.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int

    @property
    def group(self) -> int:
        """Query heads that share one head of keys and values."""
        return self.num_heads // self.kv_heads


@dataclass(frozen=True)
class Layer:
    """What a config says of one layer.

    Attributes:
        window: how many newest positions its attention sees; None: all.
        rotary: which of the model's rotary tables it uses ("" where there is one only); None: it rotates nothing.
    """

    index: int
    window: int | None = None
    rotary: str | None = ""
