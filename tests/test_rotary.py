"""Rotary tables and their application, against transformers' own module and function."""

import copy

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from layerskip.errors import UnsupportedModelError
from layerskip.models.rotary import Rotary, rotate_
from tests.tiny_models import TINY_CONFIGS, tiny_model

CPU = torch.device("cpu")
ROPES = [name for name in TINY_CONFIGS if name.endswith("-rope")]
LONGEST = TINY_CONFIGS["llama"].max_position_embeddings


def module_of(name: str) -> LlamaRotaryEmbedding:
    return copy.deepcopy(tiny_model(name).model.rotary_emb)


def transformers_tables(module: LlamaRotaryEmbedding, dtype: torch.dtype, length: int = LONGEST):
    """Cosines and sines, each (length, head_dim): transformers repeats the half table."""
    cos, sin = module(torch.zeros(1, 1, dtype=dtype), torch.arange(length)[None])
    return cos[0], sin[0]


def signed(sin: torch.Tensor) -> torch.Tensor:
    """The sines as `rotate_` takes them: those of the first half negated."""
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["llama", *ROPES])
def test_tables_are_transformers_to_the_last_bit(name, dtype):
    """Every supported scaling, at all of the model's positions."""
    module = module_of(name)
    cos, sin = Rotary(module, dtype).tables(LONGEST, CPU)
    expected_cos, expected_sin = transformers_tables(module, dtype)
    assert torch.equal(cos[:LONGEST], expected_cos)
    assert torch.equal(sin[:LONGEST], signed(expected_sin))


def test_the_scalings_differ():
    """Guards the test above: if the configs were not read, every row would be plain Llama. Dynamic is, up to here."""
    tables = {name: transformers_tables(module_of(name), torch.float64)[0] for name in ["llama", *ROPES]}
    same = {name for name in ROPES if torch.equal(tables[name], tables["llama"])}
    assert same == {"llama-dynamic-rope"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_rotation_is_transformers_up_to_one_rounding(dtype):
    """The sum of both products is rounded once where transformers rounds each product, so low precision may differ."""
    states = torch.randn(2, 5, 4, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    cos, sin = transformers_tables(module_of("llama"), dtype, length=5)
    expected, _ = apply_rotary_pos_emb(states, states, cos[None], sin[None], unsqueeze_dim=2)
    rotate_(states, cos[None, :, None], signed(sin)[None, :, None])
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(states, expected, rtol=tolerance, atol=tolerance)


def test_rotation_is_in_place_and_only_of_the_heads_it_is_given():
    """Queries, keys and values are one tensor; values, and what lies before, stay as they are."""
    states = torch.randn(2, 5, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before, (cos, sin) = states.clone(), transformers_tables(module_of("llama"), torch.float64, length=5)
    expected, _ = apply_rotary_pos_emb(before, before, cos[None], sin[None], unsqueeze_dim=2)
    rotate_(states[:, :, 1:4], cos[None, :, None], signed(sin)[None, :, None])
    torch.testing.assert_close(states[:, :, 1:4], expected[:, :, 1:4])
    assert torch.equal(states[:, :, 4:], before[:, :, 4:]) and torch.equal(states[:, :, :1], before[:, :, :1])


def test_each_row_is_rotated_by_its_own_positions():
    """Rows of a batch stand at different lengths; catches tables that are taken for all rows from the first."""
    cos, sin = (table[:, None] for table in Rotary(module_of("llama"), torch.float64).tables(9, CPU))
    positions = torch.tensor([[0, 1], [6, 7]])
    states = torch.randn(2, 2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    alone = states.clone()
    rotate_(states, cos[positions], sin[positions])
    for row, start in zip(alone, (0, 6), strict=True):
        rotate_(row[None], cos[None, start : start + 2], sin[None, start : start + 2])
    assert torch.equal(states, alone)


def test_longer_tables_begin_with_the_shorter_ones():
    """A conversation that grows may not change the keys that are already in its cache."""
    rotary = Rotary(module_of("llama-yarn-rope"), torch.float64)
    short, long = rotary.tables(5, CPU), rotary.tables(LONGEST * 5, CPU)
    for before, after in zip(short, long, strict=True):
        assert len(after) >= LONGEST * 5
        assert torch.equal(before, after[: len(before)])


def test_tables_are_made_once():
    """Asked for at every pass: a new table each time would cost more than the rotation."""
    rotary = Rotary(module_of("llama"), torch.float32)
    first = rotary.tables(10, CPU)
    assert rotary.tables(3, CPU) is first and rotary.tables(11, CPU) is first


def test_a_longer_call_of_the_model_before_does_not_stretch_the_tables():
    """transformers' dynamic scaling leaves its module stretched after a text beyond the model's positions.

    The model itself shrinks it again at the next short text, so plain decoding never sees the stretched one.
    """
    module = module_of("llama-dynamic-rope")
    fresh = Rotary(module, torch.float64).tables(LONGEST, CPU)
    transformers_tables(module, torch.float64, length=2 * LONGEST)
    used = Rotary(module, torch.float64).tables(LONGEST, CPU)
    assert torch.equal(fresh[0], used[0])


def test_longrope_is_refused():
    """Its factors change when the text passes a length, so keys that are in the cache would become wrong."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 40, **factors}
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=160, rope_parameters=rope)
    with pytest.raises(UnsupportedModelError, match="'longrope'.*default, linear, dynamic, yarn, llama3"):
        Rotary(LlamaRotaryEmbedding(config), torch.float32)
