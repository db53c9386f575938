"""Tiny random models of every family: transformers' own classes, float64, no download.

`initializer_range` is 0.3, so that logits differ by whole units and a wrong forward cannot pass by luck. To add a
family: one row in TINY_CONFIGS.
"""

import copy
import functools

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 61
NUM_LAYERS = 4

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _rope(rope_type: str, **settings: float) -> dict[str, object]:
    return {"rope_type": rope_type, "rope_theta": 10_000.0, **settings}


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

TINY_CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE),
    "llama-linear-rope": LlamaConfig(**_SHAPE, rope_parameters=_rope("linear", factor=4.0)),
    "llama-dynamic-rope": LlamaConfig(**_SHAPE, rope_parameters=_rope("dynamic", factor=4.0)),
    "llama-llama3-rope": LlamaConfig(**_SHAPE, rope_parameters=_rope("llama3", **_LLAMA3)),
    "llama-yarn-rope": LlamaConfig(
        **_SHAPE, rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=40)
    ),
    "llama-biased-tied": LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mistral-window": MistralConfig(**_SHAPE, sliding_window=6),
    "mistral-no-window": MistralConfig(**_SHAPE, sliding_window=None),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen2-window": Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=6, max_window_layers=2),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=16),
}
FAMILY_NAMES = tuple(TINY_CONFIGS)


@functools.cache
def tiny_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The model of row `name`; the same object for the same arguments, so do not change it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = copy.deepcopy(TINY_CONFIGS[name])  # transformers writes the dtype into it
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return model.requires_grad_(False)


def prompt(length: int = 9, seed: int = 0, batch: int = 1) -> torch.Tensor:
    """Random token ids (batch, length), none of them special."""
    return torch.randint(3, VOCAB_SIZE, (batch, length), generator=torch.Generator().manual_seed(seed))


def transformers_greedy(model: PreTrainedModel, input_ids: torch.Tensor, **settings) -> torch.Tensor:
    """The oracle: transformers' own greedy `generate`, (batch, length)."""
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **settings}
    return model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **settings)
