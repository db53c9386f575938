"""The table of model families: where each architecture keeps its modules and how its block differs from Llama's.

This is the one border where the names of transformers' modules and of a config's sizes and windows are known; the rest
of the project asks here. It knows nothing of how a block is run (`block.py`) or loaded (`loading.py`).

To add a family: one row here, one row in `tests/tiny_models.py`; the parity and losslessness tests then run on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from layerskip.errors import UnsupportedModelError

__all__ = ["FAMILIES", "Family", "Geometry", "family_of", "geometry_of", "sliding_windows"]


@dataclass(frozen=True)
class Family:
    """Dotted paths, from the ``…ForCausalLM`` module (first group) and from one of its layers (second group)."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    rotary: str = "model.rotary_emb"

    attention_norm: str = "input_layernorm"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    query_norm: str | None = None  # on each head, before the rotary embedding
    key_norm: str | None = None
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    activation: str = "mlp.act_fn"


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


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(),
    "Qwen3ForCausalLM": Family(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"),
}
"""Architecture name, as in ``config.architectures``, to its row."""


def family_of(architecture: str) -> Family:
    """Return the row of `architecture`, a class name such as ``"LlamaForCausalLM"``.

    Raises:
        UnsupportedModelError: the architecture has no row.
    """
    if architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"got a checkpoint of architecture {architecture!r}; supported are {', '.join(sorted(FAMILIES))}. "
            "To add one, put a row into models/families.py and a tiny config into tests/tiny_models.py "
            "(CONTRIBUTING.md, 'Add a model family')."
        )
    return FAMILIES[architecture]


def geometry_of(config: Any) -> Geometry:
    """Read the sizes in `config`, that of a model whose architecture has a row."""
    return Geometry(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
    )


def sliding_windows(config: Any) -> list[int | None]:
    """Return for each layer how many newest positions its attention sees, None for all of them.

    Qwen2 and Qwen3 say so layer by layer (``layer_types``), Mistral once for all layers, Llama never.
    """
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return [window] * geometry_of(config).num_layers
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(
            f"got layers of type {', '.join(sorted(unknown))}; supported are full_attention and sliding_attention: "
            "the state of other layers cannot be rolled back by shortening it. Use a checkpoint with attention only."
        )
    return [window if kind == "sliding_attention" else None for kind in layer_types]
