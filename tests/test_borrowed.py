"""What somebody hangs onto a borrowed model either acts or is refused; it is never passed by without a word."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import layerskip
from layerskip.errors import UnsupportedModelError
from tests.tiny_models import prompt, tiny_model, transformers_greedy


@pytest.fixture
def model() -> LlamaForCausalLM:
    """A tiny Llama of the test's own."""
    return copy.deepcopy(tiny_model("llama"))


def zero_output(module, args, output):
    return torch.zeros_like(output[0] if isinstance(output, tuple) else output)


@pytest.mark.parametrize("name", ["", "model", "model.layers.1", "model.layers.1.mlp", "model.layers.1.self_attn"])
def test_a_hook_on_what_is_passed_by_is_refused(model, name):
    model.get_submodule(name).register_forward_hook(zero_output)
    with pytest.raises(UnsupportedModelError, match=r"got a model with a hook .*Remove it before wrapping"):
        layerskip.wrap(model)


def test_a_replaced_forward_is_refused(model):
    model.model.layers[1].forward = lambda hidden, *args, **kwargs: hidden
    with pytest.raises(UnsupportedModelError, match="replaced forward"):
        layerskip.wrap(model)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj", "model.layers.1.input_layernorm", "model.norm"])
def test_a_hook_on_what_is_called_acts(model, name):
    expected = transformers_greedy(model, prompt(), max_new_tokens=8)
    model.get_submodule(name).register_forward_hook(lambda module, args, output: output.flip(-1))
    hooked = transformers_greedy(model, prompt(), max_new_tokens=8)
    assert not torch.equal(hooked, expected)
    assert torch.equal(layerskip.wrap(model).generate(prompt(), max_new_tokens=8, eos_token_id=None).sequences, hooked)


@pytest.mark.parametrize("name", ["mlp", "mlp.gate", "mlp.experts"])
def test_hooks_in_and_on_experts_act(name):
    """Their module is called as it is."""
    model = copy.deepcopy(tiny_model("mixtral"))
    expected = transformers_greedy(model, prompt(), max_new_tokens=8)
    module = model.model.layers[1].get_submodule(name)
    if name == "mlp.gate":  # logits, weights and the chosen
        module.register_forward_hook(lambda module, args, output: (output[0], output[1].flip(-1), output[2]))
    else:
        module.register_forward_hook(lambda module, args, output: output.flip(-1))
    hooked = transformers_greedy(model, prompt(), max_new_tokens=8)
    assert not torch.equal(hooked, expected)
    assert torch.equal(layerskip.wrap(model).generate(prompt(), max_new_tokens=8, eos_token_id=None).sequences, hooked)


@pytest.mark.parametrize(
    ("family", "module", "weight"),
    [("gpt2", "transformer.wpe", "weight"), ("gpt-oss", "model.layers.1.self_attn", "sinks")],
)
def test_weights_that_are_read_without_their_module(family, module, weight):
    """Written to, they act; replaced, or with a hook on the module that is not called, the model is refused."""
    model = copy.deepcopy(tiny_model(family))
    wrapped, owner = layerskip.wrap(model), model.get_submodule(module)
    getattr(owner, weight).mul_(-5)
    expected = transformers_greedy(model, prompt(), max_new_tokens=8)
    assert not torch.equal(expected, transformers_greedy(tiny_model(family), prompt(), max_new_tokens=8))
    assert torch.equal(wrapped.generate(prompt(), max_new_tokens=8, eos_token_id=None).sequences, expected)
    setattr(owner, weight, nn.Parameter(getattr(owner, weight).clone(), requires_grad=False))
    with pytest.raises(UnsupportedModelError, match="replaced after it was wrapped"):
        wrapped.generate(prompt())
    owner.register_forward_hook(lambda module, args, output: output)
    with pytest.raises(UnsupportedModelError, match="got a model with a hook"):
        layerskip.wrap(model)


def test_transformers_own_recording_hooks_are_harmless(model):
    """They stay on the layers after one call that asked for hidden states."""
    with torch.no_grad():
        model(prompt(), output_hidden_states=True, output_attentions=False)
    layerskip.wrap(model)


@pytest.mark.parametrize("change", ["replace", "hook", "cast"])
def test_changes_after_wrapping_are_refused(model, change):
    """They would not act: the decoder runs what it has read."""
    wrapped = layerskip.wrap(model)
    projection = model.model.layers[2].self_attn.q_proj
    if change == "replace":
        model.model.layers[2].self_attn.q_proj = nn.Linear(32, 32, bias=False, dtype=torch.float64)
    elif change == "hook":
        projection.register_forward_hook(zero_output)
    else:
        model.to(torch.float32)
    with pytest.raises(UnsupportedModelError, match="Wrap it again"):
        wrapped.generate(prompt())
    assert layerskip.wrap(model).generate(prompt()).finish_reasons
