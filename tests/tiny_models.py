"""Tiny random models of every family: transformers' own classes, float64, no download.

`initializer_range` is 0.3, so that logits differ by whole units and a wrong forward cannot pass by luck. To add a
family: one row in TINY_CONFIGS.
"""

import copy
import functools

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

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


# Families without grouped queries, which read neither of these.
_UNGROUPED = {key: value for key, value in _SHAPE.items() if key not in ("num_key_value_heads", "intermediate_size")}
# A tied head on embeddings that are scaled up says the same token for ever.
_UNTIED = {**_SHAPE, "tie_word_embeddings": False}


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
    "gemma2": Gemma2Config(
        **_UNTIED, head_dim=16, query_pre_attn_scalar=20, sliding_window=6, attn_logit_softcapping=2.0,
        final_logit_softcapping=8.0,
    ),
    "gemma3": Gemma3TextConfig(
        **_UNTIED, head_dim=16, query_pre_attn_scalar=20, sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "full_attention": _rope("linear", factor=4.0),
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "phi3": Phi3Config(
        **_SHAPE, sliding_window=6, rope_parameters=_rope("default", partial_rotary_factor=0.5),
    ),
    "olmo2": Olmo2Config(**_SHAPE),
    "granite": GraniteConfig(
        **_SHAPE, embedding_multiplier=0.4, residual_multiplier=0.6, attention_multiplier=0.2, logits_scaling=2.5
    ),
    "smollm3": SmolLM3Config(**_SHAPE, no_rope_layers=[1, 0, 1, 0]),
    "mixtral": MixtralConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": Qwen3MoeConfig(
        **_SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[1]
    ),
    "gpt-oss": GptOssConfig(
        **_SHAPE, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=6,
        rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=40),
    ),
    "cohere": CohereConfig(**_SHAPE, use_qk_norm=True, logit_scale=0.3, tie_word_embeddings=True),
    "cohere2": Cohere2Config(
        **_SHAPE, logit_scale=0.3, sliding_window=6, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "gpt-neox": GPTNeoXConfig(
        **_UNGROUPED, intermediate_size=48, rope_parameters=_rope("default", partial_rotary_factor=0.5)
    ),
    "gpt-neox-sequential": GPTNeoXConfig(**_UNGROUPED, intermediate_size=48, use_parallel_residual=False),
    "gpt2": GPT2Config(**_UNGROUPED, n_inner=48),
    "opt": OPTConfig(**_UNGROUPED, ffn_dim=48, word_embed_proj_dim=32, init_std=0.3),
    "falcon": FalconConfig(**_UNGROUPED, ffn_hidden_size=48, tie_word_embeddings=False),
    "falcon-new": FalconConfig(**_UNGROUPED, ffn_hidden_size=48, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-sequential": FalconConfig(
        **_UNGROUPED, ffn_hidden_size=48, multi_query=False, parallel_attn=False, bias=True
    ),
}  # fmt: skip
FAMILY_NAMES = tuple(TINY_CONFIGS)

# One of each kind of block, positions and cache: for slow tests of what is built upon a forward pass that the others
# have shown to be right for every family.
REPRESENTATIVES = (
    "llama", "mistral-window", "qwen2-window", "qwen3", "gemma2", "gemma3", "smollm3", "mixtral", "gpt-oss", "gpt2",
    "falcon-new",
)  # fmt: skip


def _attention_in_its_dtype(module, query, key, value, attention_mask, scaling, softcap=None, **_):
    """Gemma 2's own attention, but for its softmax, which there is in float32 even where all else is in float64."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if attention_mask is not None:
        scores = scores + attention_mask
    shares = scores.softmax(-1, torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return (shares @ value).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("in_its_dtype", _attention_in_its_dtype)
ALL_MASK_ATTENTION_FUNCTIONS.register("in_its_dtype", eager_mask)

# How transformers is to compute what its first choice cannot, or not exactly, in float64.
_ORACLES = {"gemma2": {"attn_implementation": "in_its_dtype"}} | {
    name: {"experts_implementation": "eager"} for name in ("mixtral", "qwen3-moe", "gpt-oss")
}


@functools.cache
def tiny_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The model of row `name`; the same object for the same arguments, so do not change it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = copy.deepcopy(TINY_CONFIGS[name])  # transformers writes the dtype into it
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **_ORACLES.get(name, {})).eval()
    return model.requires_grad_(False)


def prompt(length: int = 9, seed: int = 0, batch: int = 1) -> torch.Tensor:
    """Random token ids (batch, length), none of them special."""
    return torch.randint(3, VOCAB_SIZE, (batch, length), generator=torch.Generator().manual_seed(seed))


def transformers_greedy(model: PreTrainedModel, input_ids: torch.Tensor, **settings) -> torch.Tensor:
    """The oracle: transformers' own greedy `generate`, (batch, length)."""
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **settings}
    return model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **settings)
