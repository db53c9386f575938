"""The table of model families: where each architecture keeps its modules and how its block differs from Llama's.

What a row can say is in `family.py`; it says what differs from Llama. This is the one border where the names of
transformers' modules and of a config's sizes, windows and factors are known; the rest of the project asks here. It
knows nothing of how a block is run (`block.py`) or loaded (`loading.py`).

To add a family: one row here, one row in `tests/tiny_models.py`; the parity and losslessness tests then run on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from layerskip.errors import UnsupportedModelError
from layerskip.models.family import Family, Geometry, Layer, Numbers, Variant

__all__ = ["FAMILIES", "STATEFUL", "family_of", "geometry_of", "layers_of", "sliding_windows"]

_OPT = "model.decoder."
_NORMED_HEADS: dict[str, Any] = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
_NORMS_IN_AND_OUT: dict[str, Any] = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}

_BIDIRECTIONAL = Variant(
    lambda config: getattr(config, "use_bidirectional_attention", False),
    refused="bidirectional attention (use_bidirectional_attention), so it predicts no next token",
)


def _gemma_numbers(config: Any) -> Numbers:
    return Numbers(attention_scale=config.query_pre_attn_scalar**-0.5, logit_cap=config.final_logit_softcapping)


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(),
    "Qwen3ForCausalLM": Family(**_NORMED_HEADS),
    "Gemma2ForCausalLM": Family(
        **_NORMS_IN_AND_OUT,
        numbers=lambda config: replace(_gemma_numbers(config), attention_cap=config.attn_logit_softcapping),
        variants=(_BIDIRECTIONAL,),
    ),
    "Gemma3ForCausalLM": Family(
        **_NORMS_IN_AND_OUT,
        **_NORMED_HEADS,
        rotary_kinds=lambda config: config.layer_types,
        numbers=_gemma_numbers,
        variants=(_BIDIRECTIONAL,),
    ),
    "Phi3ForCausalLM": Family(
        qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",), activation="mlp.activation_fn"
    ),
    "Olmo2ForCausalLM": Family(
        attention_norm=None,
        attention_out_norm="post_attention_layernorm",
        mlp_norm=None,
        mlp_out_norm="post_feedforward_layernorm",
        **_NORMED_HEADS,
        norms_whole=True,
        rotary_tables_float32=True,
    ),
    "GraniteForCausalLM": Family(
        numbers=lambda config: Numbers(
            embedding_scale=config.embedding_multiplier,
            residual_scale=config.residual_multiplier,
            attention_scale=config.attention_multiplier,
            logit_scale=1 / config.logits_scaling,
        )
    ),
    "SmolLM3ForCausalLM": Family(
        rotary_kinds=lambda config: ["" if rotates else None for rotates in config.no_rope_layers]
    ),
    "MixtralForCausalLM": Family(experts="mlp.experts"),
    "Qwen3MoeForCausalLM": Family(**_NORMED_HEADS, experts="mlp.experts"),
    "GptOssForCausalLM": Family(experts="mlp.experts", sinks="self_attn.sinks"),
    "CohereForCausalLM": Family(
        mlp_norm="input_layernorm",
        parallel=True,
        rotary_pairs=True,
        rotary_inputs_float32=True,
        numbers=lambda config: Numbers(logit_scale=config.logit_scale),
        variants=(Variant(lambda config: config.use_qk_norm, _NORMED_HEADS),),
    ),
    "Cohere2ForCausalLM": Family(
        mlp_norm="input_layernorm",
        parallel=True,
        rotary_pairs=True,
        rotary_inputs_float32=True,
        rotary_kinds=lambda config: ["" if kind == "sliding_attention" else None for kind in config.layer_types],
        numbers=lambda config: Numbers(logit_scale=config.logit_scale),
    ),
    "GPTNeoXForCausalLM": Family(
        embedding="gpt_neox.embed_in",
        layers="gpt_neox.layers",
        final_norm="gpt_neox.final_layer_norm",
        rotary="gpt_neox.rotary_emb",
        qkv=("attention.query_key_value",),
        qkv_by_group=True,
        output="attention.dense",
        gate_up=("mlp.dense_h_to_4h",),
        gated=False,
        down="mlp.dense_4h_to_h",
        activation="mlp.act",
        parallel=True,
        variants=(Variant(lambda config: not config.use_parallel_residual, {"parallel": False}),),
    ),
    "GPT2LMHeadModel": Family(
        embedding="transformer.wte",
        positions="transformer.wpe.weight",
        layers="transformer.h",
        final_norm="transformer.ln_f",
        rotary=None,
        attention_norm="ln_1",
        qkv=("attn.c_attn",),
        output="attn.c_proj",
        mlp_norm="ln_2",
        gate_up=("mlp.c_fc",),
        gated=False,
        down="mlp.c_proj",
        activation="mlp.act",
        numbers=lambda config: Numbers(attention_scale=None if config.scale_attn_weights else 1.0),
        variants=(
            Variant(lambda config: config.add_cross_attention, refused="cross-attention to another model's states"),
            Variant(
                lambda config: config.scale_attn_by_inverse_layer_idx,
                refused="attention scores that are scaled layer by layer (scale_attn_by_inverse_layer_idx)",
            ),
        ),
    ),
    "OPTForCausalLM": Family(
        embedding=_OPT + "embed_tokens",
        positions=_OPT + "embed_positions.weight",
        position_offset=2,
        layers=_OPT + "layers",
        final_norm=_OPT + "final_layer_norm",
        rotary=None,
        attention_norm="self_attn_layer_norm",
        output="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        gate_up=("fc1",),
        gated=False,
        down="fc2",
        activation="activation_fn",
        variants=(
            Variant(
                lambda config: not config.do_layer_norm_before or config._remove_final_layer_norm,
                refused="no norm behind its last layer (do_layer_norm_before=False), which an exit would need",
            ),
            Variant(
                lambda config: config.word_embed_proj_dim != config.hidden_size,
                refused="embeddings of another size than its hidden states (word_embed_proj_dim)",
            ),
            Variant(lambda config: not config.layer_norm_elementwise_affine, refused="norms without weights"),
        ),
    ),
    "FalconForCausalLM": Family(
        embedding="transformer.word_embeddings",
        layers="transformer.h",
        final_norm="transformer.ln_f",
        rotary="transformer.rotary_emb",
        qkv=("self_attention.query_key_value",),
        qkv_by_group=True,
        output="self_attention.dense",
        mlp_norm="input_layernorm",
        gate_up=("mlp.dense_h_to_4h",),
        gated=False,
        down="mlp.dense_4h_to_h",
        activation="mlp.act",
        parallel=True,
        variants=(
            Variant(lambda config: config.alibi, refused="positions by ALiBi, which no attention here adds"),
            Variant(
                lambda config: not config.parallel_attn and not config.new_decoder_architecture,
                {"parallel": False, "mlp_norm": "post_attention_layernorm"},
            ),
            Variant(
                lambda config: config.new_decoder_architecture and config.num_ln_in_parallel_attn in (None, 2),
                {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"},
            ),
        ),
    ),
}
"""Architecture name, as in ``config.architectures``, to its row."""

STATEFUL = frozenset(
    f"{name}ForCausalLM"
    for name in (
        "BailingHybrid Bamba FalconH1 FalconMamba GraniteMoeHybrid Inkling Inkling2 Inkling2Loop Jamba KimiLinear "
        "LaraMini Lfm2 Lfm2Moe Lfm3 Mamba Mamba2 MiniMax NemotronH OlmoHybrid Qwen3Next Qwen3_5 Qwen3_5Moe Qwen4Exp "
        "RecurrentGemma Rwkv Zamba Zamba2 Zaya xLSTM"
    ).split()
)
"""Architectures with state-space, recurrent or linear-attention layers."""


def family_of(architecture: str, config: Any = None) -> Family:
    """Return the row of `architecture`, a class name such as ``"LlamaForCausalLM"``.

    Args:
        config: of the model, for what differs within a family; None: the row as it stands in the table.

    Raises:
        UnsupportedModelError: the architecture has no row, or the config asks for what cannot be run.
    """
    if architecture in STATEFUL:
        raise UnsupportedModelError(
            f"got a checkpoint of architecture {architecture!r}, which has state-space, recurrent or linear-attention "
            "layers: their state cannot be rolled back by shortening it, so a rejected draft would leave its trace. "
            "Use a checkpoint with attention in every layer."
        )
    if architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"got a checkpoint of architecture {architecture!r}; supported are {', '.join(sorted(FAMILIES))}. "
            "To add one, put a row into models/families.py and a tiny config into tests/tiny_models.py "
            "(CONTRIBUTING.md, 'Add a model family')."
        )
    family = FAMILIES[architecture]
    for variant in family.variants if config is not None else ():
        if variant.applies(config):
            if variant.refused is not None:
                raise UnsupportedModelError(
                    f"got a checkpoint of architecture {architecture!r} with {variant.refused}; that is not supported. "
                    "Use a checkpoint without."
                )
            family = replace(family, **variant.changes)
    return family


def geometry_of(config: Any) -> Geometry:
    """Read the sizes in `config`, that of a model whose architecture has a row."""
    return Geometry(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        kv_heads=_kv_heads(config),
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
    )


def _kv_heads(config: Any) -> int:
    if getattr(config, "multi_query", False) and not config.new_decoder_architecture:  # Falcon's
        return 1
    names = ("num_key_value_heads", "num_kv_heads", "num_attention_heads")
    given: list[int | None] = [getattr(config, name, None) for name in names]
    return next(each for each in given if each)


def layers_of(config: Any, family: Family) -> list[Layer]:
    """Describe each layer of a model of `family`.

    Raises:
        UnsupportedModelError: see `sliding_windows`.
    """
    windows = sliding_windows(config)
    kinds: Sequence[str | None] = [None if family.rotary is None else ""] * len(windows)
    if family.rotary_kinds is not None:
        kinds = family.rotary_kinds(config)
    return [Layer(index, *each) for index, each in enumerate(zip(windows, kinds, strict=True))]


def sliding_windows(config: Any) -> list[int | None]:
    """Return for each layer how many newest positions its attention sees, None for all of them.

    Some families say so layer by layer (``layer_types``), some, as Mistral, once for all layers, many never.

    Raises:
        UnsupportedModelError: a layer is of another type.
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
