"""Real geometries with random weights: for costs and scaling without a checkpoint, never for quality.

What a pass costs depends on shapes and dtype, not on values. How often a draft is accepted does depend on values, so
agreement between an exit and the whole model can be planted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from layerskip.errors import SettingError, did_you_mean
from layerskip.models.loading import quiet

__all__ = ["GEOMETRIES", "geometry_config", "synthetic_model"]


def _geometry(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    """Arguments of a config, a `LlamaConfig` unless they name another kind of model.

    No id ends a text, so that every answer has the length that was asked for.
    """
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        **more,
    }


def _experts(number: int, per_token: int) -> dict[str, Any]:
    return {"model_type": "mixtral", "num_local_experts": number, "num_experts_per_tok": per_token}


GEOMETRIES: Mapping[str, Mapping[str, Any]] = {
    "tiny": _geometry(64, 128, 4, 4, 2, 512, max_position_embeddings=1024),  # for tests
    "tiny-deep": _geometry(64, 128, 12, 4, 2, 512, max_position_embeddings=1024),  # for searches in tests
    "tiny-moe": _geometry(64, 64, 4, 4, 2, 512, max_position_embeddings=1024, **_experts(4, 2)),  # for tests
    "smollm2-135m": _geometry(576, 1536, 30, 9, 3, 49_152, tie_word_embeddings=True),
    "llama-1b": _geometry(2048, 8192, 16, 32, 8, 128_256, head_dim=64, tie_word_embeddings=True),  # Llama-3.2-1B
    "llama-8b": _geometry(4096, 14_336, 32, 32, 8, 128_256),  # Llama-3-8B
    # Mixtral's blocks at a size that a laptop holds: 0.9 B parameters, of which a token's step reads 0.2 B.
    "moe-1b": _geometry(1024, 704, 24, 16, 4, 49_152, tie_word_embeddings=True, **_experts(16, 2)),
}


def geometry_config(name: str) -> PreTrainedConfig:
    """The config of one of `GEOMETRIES`."""
    config: PreTrainedConfig = AutoConfig.for_model(**{"model_type": "llama", **GEOMETRIES[name]})
    return config


def synthetic_model(
    name: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    agreement: float | None = None,
    seed: int = 0,
    from_block: int | None = None,
    redundant: Mapping[str, Sequence[int]] | None = None,
) -> PreTrainedModel:
    """A model of the geometry `name`, in evaluation mode and without gradients.

    It is allocated once, on `device` and in `dtype`. Every matrix is normal with a standard deviation of
    1 / sqrt(inputs), so that states and logits keep their size at any width.

    Args:
        name: one of `GEOMETRIES`.
        agreement: from 0 to 1: plants agreement between an exit at `from_block` and the whole model, by scaling what
            the blocks from there on add to the residual stream (output and down projections, those of all experts) by
            1 - agreement. 1: they add nothing, every draft is right; 0 or None: nothing is planted. It is no acceptance
            rate, but rises with it: measure the acceptance that it gives.
        seed: of the weights; the same on a device of the same kind.
        from_block: where the planted blocks begin; None: the second half.
        redundant: plant the agreement into single sub-blocks instead: ``{"attention": layers, "mlp": layers}``.

    Raises:
        SettingError: an unknown name, an agreement out of range, or a block that does not exist.
    """
    if name not in GEOMETRIES:
        known = ", ".join(GEOMETRIES)
        raise SettingError(f"got the geometry {name!r}; expected one of {known}.{did_you_mean(name, GEOMETRIES)}")
    layers: int = GEOMETRIES[name]["num_hidden_layers"]
    if agreement is not None and not (isinstance(agreement, int | float) and 0 <= agreement <= 1):
        raise SettingError(f"got agreement={agreement!r}; expected a number from 0 (nothing planted) to 1, or None.")
    if from_block is not None and not 1 <= from_block < layers:
        raise SettingError(
            f"got from_block={from_block!r} for a geometry of {layers} blocks; expected 1 to {layers - 1}."
        )
    if redundant is not None and from_block is not None:
        raise SettingError("got both from_block and redundant, which each say where to plant; expected one of them.")
    behind = range(layers // 2 if from_block is None else from_block, layers)
    planted = {"attention": behind, "mlp": behind} if redundant is None else redundant
    if planted.keys() - {"attention", "mlp"} or any(
        each not in range(layers) for own in planted.values() for each in own
    ):
        raise SettingError(f"got redundant={redundant!r}; expected layers below {layers} for 'attention' and 'mlp'.")
    model = _allocated(geometry_config(name), dtype, torch.device(device))
    _fill(model, seed)
    if agreement:
        with torch.no_grad():
            blocks: Any = model.get_submodule("model.layers")
            for layer in planted.get("attention", ()):
                blocks[layer].self_attn.o_proj.weight.mul_(1 - agreement)
            for layer in planted.get("mlp", ()):
                mlp = blocks[layer].mlp
                down = mlp.experts.down_proj if hasattr(mlp, "experts") else mlp.down_proj.weight
                down.mul_(1 - agreement)
    return model


def _allocated(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model with memory for its weights, which hold nothing yet."""
    # transformers' grouped products of experts refuse float64.
    experts: dict[str, Any] = {"experts_implementation": "eager"} if dtype is torch.float64 else {}
    with quiet(), torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, **experts)
    model.to_empty(device=device)
    rotary: Any = type(model.model.rotary_emb)
    model.model.rotary_emb = rotary(config).to(device)  # its tables are computed, and were lost with the meta device
    model.tie_weights()
    model.eval().requires_grad_(False)
    made: PreTrainedModel = model
    return made


def _fill(model: PreTrainedModel, seed: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():  # a tied head is listed once
            if parameter.dim() == 1:
                parameter.fill_(1)
                continue
            generator = torch.Generator(parameter.device).manual_seed(seed)
            parameter.normal_(0, 1 / math.sqrt(parameter.shape[-1]), generator=generator)
            seed += 1
