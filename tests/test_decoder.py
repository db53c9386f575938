"""The decoder against transformers' own forward, for every family: whole, in pieces, ragged, skipped, rolled back.

Tolerance: float64 products in another order differ by about 1e-15 at logits of about 6, and a wrong forward by whole
units. In between, transformers' norms round to float32 inputs that are equal to about 1e-15: one value in 100 million
rounds differently, which shows as 1e-7 in the logits. Inputs are fixed, so this can only come up on a machine whose
products are summed in a new order, with a probability of about 1e-2 for this whole file.
"""

import copy
import functools

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPTJConfig, LlamaConfig, PreTrainedModel

from layerskip.errors import CheckpointError, UnsupportedModelError
from layerskip.models.cache import KVCache
from layerskip.models.decoder import Decoder, Step
from layerskip.models.families import FAMILIES, family_of, sliding_windows
from tests.special_models import last_parameters
from tests.tiny_models import FAMILY_NAMES, NUM_LAYERS, TINY_CONFIGS, prompt, tiny_model

CLOSE = {"rtol": 0.0, "atol": 1e-12}
CAPACITY = 24
LENGTH = 14  # more than twice the tiny models' sliding window of 6

# How a text of LENGTH tokens is cut into passes. The window's edge lies inside passes, between them, and in the prompt.
PASSES = {
    "at once": (14,),
    "one by one": (1,) * 14,
    "prompt within the window": (4, 4, 4, 2),
    "prompt beyond the window": (9, 1, 3, 1),
    "up to the window's edge": (6, 1, 7),
    "across the window's edge": (5, 2, 7),
}
every_family = pytest.mark.parametrize("name", FAMILY_NAMES)


@functools.cache
def model_of(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The tiny model with random norms and biases: transformers starts them at 1 and 0, which hides a mix-up."""
    return shaken(tiny_model(name, dtype=dtype))


def shaken(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model` with noise on all vectors."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@functools.cache
def decoder_of(name: str, dtype: torch.dtype = torch.float64) -> Decoder:
    return Decoder(model_of(name, dtype))


@torch.no_grad()
def reference(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    return model(token_ids).logits


@torch.no_grad()
def run(
    decoder: Decoder,
    cache: KVCache,
    token_ids: Tensor,
    path: tuple[Step, ...] | None = None,
    visible: int | None = None,
) -> Tensor:
    """Logits of one pass over `token_ids` behind what `cache` holds; commits nothing."""
    span = decoder.span(cache.lengths, token_ids.shape[1], visible)
    hidden = decoder.run(decoder.embed(token_ids, span), decoder.full_path if path is None else path, cache, span)
    return decoder.logits(hidden)


def run_in_passes(decoder: Decoder, token_ids: Tensor, passes: tuple[int, ...]) -> Tensor:
    cache, logits = decoder.new_cache(len(token_ids), CAPACITY), []
    for part in token_ids.split(passes, dim=1):
        logits.append(run(decoder, cache, part))
        cache.commit([length + part.shape[1] for length in cache.lengths])
        cache.check()
    return torch.cat(logits, dim=1)


def filled(decoder: Decoder, *rows: Tensor) -> KVCache:
    """A cache that holds `rows`, each (1, its length)."""
    cache, lengths = decoder.new_cache(len(rows), CAPACITY), [row.shape[1] for row in rows]
    padded = torch.zeros((len(rows), max(lengths)), dtype=torch.int64)
    for index, row in enumerate(rows):
        padded[index, : row.shape[1]] = row
    run(decoder, cache, padded)
    cache.commit(lengths)
    return cache


@every_family
@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES.keys())
def test_equals_transformers_however_the_text_is_cut(name, passes):
    """Two rows. Catches wrong modules, positions, masks, windows, scalings and a cache that is read too far."""
    token_ids = prompt(LENGTH, batch=2)
    logits = run_in_passes(decoder_of(name), token_ids, passes)
    torch.testing.assert_close(logits, reference(model_of(name), token_ids), **CLOSE)


@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES.keys())
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_equals_transformers_for_other_head_counts(kv_heads, passes):
    """One key/value head for all query heads, and one for each; the tiny families have two for four."""
    config = LlamaConfig(**{**TINY_CONFIGS["llama"].to_dict(), "num_key_value_heads": kv_heads})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval().requires_grad_(False)
    token_ids = prompt(LENGTH, batch=2)
    logits = run_in_passes(Decoder(model), token_ids, passes)
    torch.testing.assert_close(logits, reference(model, token_ids), **CLOSE)


@every_family
def test_single_precision_equals_transformers(name):
    """Rounding of float32 on logits of about 6, through four blocks: up to about 2e-5 was seen."""
    token_ids = prompt(LENGTH)
    for passes in PASSES.values():
        logits = run_in_passes(decoder_of(name, torch.float32), token_ids, passes)
        assert logits.dtype == torch.float32
        expected = reference(model_of(name, torch.float32), token_ids)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@every_family
def test_half_precision_is_as_exact_as_transformers(name):
    """Against the same weights in float64: on average no further off than transformers itself, plus a tenth.

    Where experts are chosen, one choice at a near-tie that falls otherwise moves all of a token: plus a half.
    """
    token_ids = prompt(LENGTH, batch=8)  # so that chance is small beside a tenth
    allowed = 1.5 if FAMILIES[type(model_of(name)).__name__].experts else 1.1
    model = model_of(name, torch.bfloat16)
    exact = reference(copy.deepcopy(model).double(), token_ids)
    error = (reference(model, token_ids).double() - exact).abs().mean()
    assert 0 < error < 0.2
    for passes in PASSES.values():
        logits = run_in_passes(decoder_of(name, torch.bfloat16), token_ids, passes)
        assert logits.dtype == torch.bfloat16
        assert (logits.double() - exact).abs().mean() < allowed * error


@every_family
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("lengths", [(3, 10), (10, 3), (5, 6)], ids=str)
def test_rows_of_different_lengths_in_one_pass(name, lengths, tokens):
    """Each row as alone in transformers, also where only one of them is beyond the window."""
    decoder, texts = decoder_of(name), prompt(LENGTH, batch=2)
    cache = filled(decoder, *(texts[row : row + 1, :length] for row, length in enumerate(lengths)))
    new = torch.stack([texts[row, length : length + tokens] for row, length in enumerate(lengths)])
    logits = run(decoder, cache, new)
    for row, length in enumerate(lengths):
        expected = reference(model_of(name), texts[row : row + 1, : length + tokens])[0, length:]
        torch.testing.assert_close(logits[row], expected, **CLOSE)


@every_family
@pytest.mark.parametrize("lengths", [(7,), (2, 7)], ids=str)
def test_rejected_positions_leave_no_trace(name, lengths):
    """Wrong tokens, then back, then the right ones: equal to the last bit to a cache that never saw the wrong ones."""
    decoder, texts = decoder_of(name), prompt(LENGTH, batch=len(lengths))
    new, wrong = prompt(4, seed=1, batch=len(lengths)), prompt(6, seed=2, batch=len(lengths))
    rows = [texts[row : row + 1, :length] for row, length in enumerate(lengths)]
    clean, used = filled(decoder, *rows), filled(decoder, *rows)
    run(decoder, used, wrong)
    used.commit(lengths)
    used.check()
    assert torch.equal(run(decoder, used, new), run(decoder, clean, new))


SKIPS = {
    "an attention": ({1}, set()),
    "an mlp": (set(), {2}),
    "the first block": ({0}, {0}),
    "the last block": ({3}, {3}),
    "several": ({0, 2, 3}, {1, 2}),
    "all attention": ({0, 1, 2, 3}, set()),
    "all": ({0, 1, 2, 3}, {0, 1, 2, 3}),
}


def path_without(attention: set[int], mlp: set[int]) -> tuple[Step, ...]:
    return tuple(Step(block, block not in attention, block not in mlp) for block in range(NUM_LAYERS))


@every_family
@pytest.mark.parametrize("skip", SKIPS.values(), ids=SKIPS.keys())
def test_skipping_equals_a_model_without_these_sub_blocks(name, skip):
    """The reference is transformers with the output projections of the skipped sub-blocks set to zero."""
    model, token_ids = copy.deepcopy(model_of(name)), prompt(LENGTH)
    for kind, blocks in zip(("attention", "mlp"), skip, strict=True):
        for parameter in (each for block in blocks for each in last_parameters(model, block, kind)):
            parameter.zero_()
    decoder, expected = decoder_of(name), reference(model, token_ids)
    assert not torch.allclose(expected, reference(model_of(name), token_ids), atol=0.1)
    for path in (path_without(*skip), tuple(step for step in path_without(*skip) if step.attention or step.mlp)):
        logits = run(decoder, decoder.new_cache(1, CAPACITY), token_ids, path)
        torch.testing.assert_close(logits, expected, **CLOSE)


@every_family
def test_blocks_run_in_two_parts_equal_one_run(name):
    """Verification goes on from hidden states that drafting left behind some block."""
    decoder, token_ids = decoder_of(name), prompt(LENGTH)
    cache = filled(decoder, token_ids[:, :9])
    whole = run(decoder, cache, token_ids[:, 9:])
    for border in range(NUM_LAYERS + 1):
        span = decoder.span([9], LENGTH - 9)
        hidden = decoder.run(decoder.embed(token_ids[:, 9:], span), decoder.full_path[:border], cache, span)
        hidden = decoder.run(hidden, decoder.full_path[border:], cache, span)
        assert torch.equal(decoder.logits(hidden), whole)


@every_family
@pytest.mark.parametrize("lengths", [(0,), (3,), (9,), (3, 9)], ids=str)
@pytest.mark.parametrize("tokens", [1, 4])
def test_reading_more_of_the_cache_changes_nothing(name, lengths, tokens):
    """Slots behind a pass are masked, whatever they hold; strict mode reads the whole cache in every pass."""
    decoder, texts = decoder_of(name), prompt(LENGTH, batch=len(lengths))
    rows = [texts[row : row + 1, :length] for row, length in enumerate(lengths)]
    cache = filled(decoder, *rows) if all(lengths) else decoder.new_cache(1, CAPACITY)
    run(decoder, cache, prompt(7, seed=3, batch=len(lengths)))  # leaves something behind
    new = prompt(tokens, seed=1, batch=len(lengths))
    expected = run(decoder, cache, new)
    for visible in (max(lengths) + tokens, max(lengths) + tokens + 1, CAPACITY):
        torch.testing.assert_close(run(decoder, cache, new, visible=visible), expected, **CLOSE)


def test_blocks_on_another_device_get_a_span_of_theirs(monkeypatch):
    """The "other device" is the CPU again, so only the border is tested here, not the arithmetic on two devices."""
    decoder, token_ids, spans = Decoder(model_of("mistral-window")), prompt(LENGTH, batch=2), []
    for block in decoder.blocks:
        attend = block.attend
        monkeypatch.setattr(block, "attend", lambda *given, attend=attend: spans.append(given[2]) or attend(*given))
    decoder.blocks[1].device = decoder.blocks[2].device = torch.device("cpu", 1)
    decoder.is_spread = True
    logits = run_in_passes(decoder, token_ids, (LENGTH,))
    torch.testing.assert_close(logits, reference(model_of("mistral-window"), token_ids), **CLOSE)
    assert spans[0] is not spans[1] is spans[2]


@pytest.mark.parametrize("starts", [[4, 4], [4, 9]], ids=str)
def test_a_span_on_another_device_covers_the_same(starts):
    span = decoder_of("llama").span(starts, 3, visible=CAPACITY)
    moved = span.to(torch.device("cpu", 1))
    assert (moved.starts, moved.tokens, moved.visible) == (span.starts, span.tokens, span.visible)
    for window in (None, 6):
        assert torch.equal(moved.mask(window), span.mask(window))
    assert torch.equal(moved.positions, span.positions)
    assert all(map(torch.equal, moved.rotary(""), span.rotary("")))
    assert span.to(torch.device("cpu", 1)) is moved and span.to(torch.device("cpu")) is span


@every_family
def test_the_wrapped_model_stays_as_it_was(name):
    """Weights, config, hooks and all other attributes, logits: after decoding with and without skipping."""
    model, token_ids = copy.deepcopy(model_of(name)), prompt(LENGTH)
    weights = copy.deepcopy(model.state_dict())
    config, attributes, logits = model.config.to_dict(), attributes_of(model), reference(model, token_ids)
    decoder = Decoder(model)
    run_in_passes(decoder, token_ids, (9, 5))
    run(decoder, decoder.new_cache(1, CAPACITY), token_ids, path_without({1}, {2}))

    assert model.config.to_dict() == config
    assert attributes_of(model) == attributes
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert torch.equal(reference(model, token_ids), logits)


def attributes_of(model: PreTrainedModel) -> list[dict[str, str]]:
    return [{name: str(value) for name, value in vars(module).items()} for module in model.modules()]


@every_family
def test_weights_are_shared(name):
    """A change of any weight in place, after wrapping, acts on both; catches a copy of weights anywhere."""
    model, token_ids = copy.deepcopy(model_of(name)), prompt(LENGTH)
    decoder = Decoder(model)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    logits = run_in_passes(decoder, token_ids, (9, 5))
    torch.testing.assert_close(logits, reference(model, token_ids), **CLOSE)
    assert not torch.allclose(logits, reference(model_of(name), token_ids), atol=0.1)


class LowRank(nn.Module):
    """A linear and an update of low rank, as LoRA's wrapper before merging."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.base = base
        self.down = torch.randn(base.in_features, 2, generator=generator, dtype=torch.float64)
        self.up = 0.2 * torch.randn(2, base.out_features, generator=generator, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + inputs @ self.down @ self.up


LINEARS = ("qkv.0", "qkv.1", "qkv.2", "output", "gate_up.0", "gate_up.1", "down")


@pytest.mark.parametrize("linear", LINEARS)
@pytest.mark.parametrize("change", ["hook", "replaced"])
def test_changed_linears_are_called_as_they_are(linear, change):
    """With a hook, or replaced by another module, in any place; the result is transformers' with the same change."""
    model = copy.deepcopy(model_of("qwen3"))
    field, _, index = linear.partition(".")
    where = getattr(family_of("Qwen3ForCausalLM"), field)
    where = where[int(index)] if index else where
    layer = model.model.layers[1]
    module = layer.get_submodule(where)
    if change == "hook":
        module.register_forward_hook(lambda module, inputs, output: output + 0.5)
    else:
        layer.set_submodule(where, LowRank(module))
    token_ids = prompt(LENGTH)
    logits = run_in_passes(Decoder(model), token_ids, (9, 5))
    torch.testing.assert_close(logits, reference(model, token_ids), **CLOSE)
    assert not torch.allclose(logits, reference(model_of("qwen3"), token_ids), atol=0.1)


def test_a_hook_on_the_head_is_called():
    model = copy.deepcopy(model_of("llama"))
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 2)
    token_ids = prompt(LENGTH)
    torch.testing.assert_close(
        run_in_passes(Decoder(model), token_ids, (LENGTH,)), 2 * reference(model_of("llama"), token_ids), **CLOSE
    )


def test_unknown_architecture_is_named_with_what_is_supported():
    config = GPTJConfig(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=16, rotary_dim=4)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match="'GPTJForCausalLM'.*LlamaForCausalLM.*families.py"):
        Decoder(model)


def test_every_supported_architecture_has_a_tiny_model():
    """A family without one would be in no test of this project."""
    assert {type(tiny_model(name)).__name__ for name in FAMILY_NAMES} == set(FAMILIES)


def test_rotary_scaling_by_text_length_is_refused():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 40}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = LlamaConfig(**{**TINY_CONFIGS["llama"].to_dict(), "rope_parameters": rope})
    with pytest.raises(UnsupportedModelError, match="'longrope'"):
        Decoder(AutoModelForCausalLM.from_config(config))


def test_layers_without_a_state_that_can_be_shortened_are_refused():
    """Recurrent layers, and windows that do not slide."""
    kinds = ["full_attention", "linear_attention", "chunked_attention", "sliding_attention"]
    config = copy.deepcopy(TINY_CONFIGS["qwen2"])
    config.layer_types = kinds
    with pytest.raises(UnsupportedModelError, match="type chunked_attention, linear_attention;"):
        sliding_windows(config)


def test_windows_are_those_of_each_layer():
    """Mistral says it once for all, Qwen2 layer by layer."""
    windows = {name: sliding_windows(config) for name, config in TINY_CONFIGS.items()}
    assert windows["mistral-window"] == [6] * 4
    assert windows["qwen2-window"] == [None, None, 6, 6]
    assert windows["qwen2"] == windows["llama"] == windows["mistral-no-window"] == [None] * 4


def test_weights_that_are_not_loaded_are_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(TINY_CONFIGS["llama"])
    with pytest.raises(CheckpointError, match="'model.embed_tokens.weight'.*meta device"):
        Decoder(model)
