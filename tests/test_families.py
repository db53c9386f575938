"""The table of families: what it reads from a config is what the model has that is built from it, or is refused."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from layerskip.errors import UnsupportedModelError
from layerskip.models.decoder import Decoder
from layerskip.models.families import FAMILIES, STATEFUL, family_of, geometry_of, layers_of
from tests.tiny_models import TINY_CONFIGS, tiny_model


def test_geometry_is_that_of_the_modules(family_model):
    geometry, family = geometry_of(family_model.config), family_of(type(family_model).__name__, family_model.config)
    layers, embedding = family_model.get_submodule(family.layers), family_model.get_submodule(family.embedding)
    projections = [layers[0].get_submodule(name) for name in family.qkv]
    assert geometry.num_layers == len(layers)
    assert (geometry.vocab_size, geometry.hidden_size) == tuple(embedding.weight.shape)
    sizes = [each.weight.numel() // geometry.hidden_size for each in projections]
    of_heads = [geometry.num_heads, geometry.kv_heads, geometry.kv_heads]
    expected = [each * geometry.head_dim for each in of_heads]
    assert sizes == (expected if len(sizes) == 3 else [sum(expected)])
    assert geometry.max_positions == family_model.config.max_position_embeddings


@pytest.mark.parametrize("architecture", sorted(STATEFUL))
def test_what_cannot_be_rolled_back_is_refused_by_name(architecture):
    with pytest.raises(UnsupportedModelError, match=f"'{architecture}'.*cannot be rolled back.*attention in every"):
        family_of(architecture)


def test_names_of_architectures_are_transformers_own():
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    assert known >= STATEFUL | set(FAMILIES)
    assert not STATEFUL & set(FAMILIES)


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        ("falcon", {"alibi": True}, "ALiBi"),
        ("opt", {"do_layer_norm_before": False}, "no norm behind its last layer"),
        ("opt", {"word_embed_proj_dim": 16}, "another size"),
        ("opt", {"layer_norm_elementwise_affine": False}, "norms without weights"),
        ("gpt2", {"add_cross_attention": True}, "cross-attention"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "layer by layer"),
        ("gemma3", {"use_bidirectional_attention": True}, "bidirectional attention"),
    ],
)
def test_variants_that_would_be_wrong_are_refused(config, changes, reason):
    architecture = type(tiny_model(config)).__name__
    config = copy.deepcopy(TINY_CONFIGS[config])
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedModelError, match=f"'{architecture}' with .*{reason}.*not supported"):
        family_of(architecture, config)


def test_unscaled_attention_of_gpt2_is_followed():
    config = GPT2Config(**{**TINY_CONFIGS["gpt2"].to_dict(), "scale_attn_weights": False})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval().requires_grad_(False)
    assert Decoder(model).numbers.attention_scale == 1.0


def test_layers_without_rotary_positions():
    rotary = {
        name: [each.rotary for each in layers_of(tiny_model(name).config, family_of(type(tiny_model(name)).__name__))]
        for name in ("llama", "gpt2", "smollm3", "cohere2", "gemma3")
    }
    assert rotary == {
        "llama": [""] * 4,
        "gpt2": [None] * 4,
        "smollm3": ["", None] * 2,
        "cohere2": ["", None] * 2,
        "gemma3": ["sliding_attention", "full_attention"] * 2,
    }
