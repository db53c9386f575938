"""The short RMS norm stands in only where it computes what the model's own module does, about as exactly."""

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from layerskip.models.norms import norm
from tests.tiny_models import tiny_model

FAMILIES = [LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm, GemmaRMSNorm]
DTYPES = [torch.bfloat16, torch.float16]
SIZE = 576


def random_norm(kind: type, dtype: torch.dtype, eps: float = 1e-6, size: int = SIZE) -> nn.Module:
    module = kind(size, eps).to(dtype).requires_grad_(False)
    module.weight.copy_(torch.randn(size, generator=torch.Generator().manual_seed(0)))
    return module


def random_hidden(dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Hidden states with an offset and, as in trained models, a few values a hundred times the others."""
    hidden = torch.randn(2, 40, SIZE, generator=torch.Generator().manual_seed(1)) + 0.5
    hidden[..., ::97] *= 100
    return (scale * hidden).to(dtype)


def exact(module: nn.Module, hidden: torch.Tensor, eps: float) -> torch.Tensor:
    """In float64 throughout, which the modules themselves are not."""
    hidden = hidden.double()
    factor = module.weight.double() + isinstance(module, GemmaRMSNorm)
    return factor * hidden / (hidden.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e2])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", FAMILIES)
def test_agrees_with_transformers_and_is_about_as_exact(kind, dtype, eps, scale):
    """Small inputs show eps, the offset a mean that is subtracted, the outliers a sum in low precision.

    It is more exact than the modules, because it rounds once; or as exact as Gemma's, which does so too.
    """
    module, hidden = random_norm(kind, dtype, eps), random_hidden(dtype, scale)
    fast = norm(module)
    ours, theirs, truth = fast(hidden), module(hidden), exact(module, hidden, eps)
    tolerance = 4 * torch.finfo(dtype).eps
    assert fast is not module and ours.dtype == theirs.dtype == dtype
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=1e-7)
    torch.testing.assert_close(ours.double(), truth, rtol=tolerance, atol=1e-7)
    error, their_error = ((each.double() - truth).abs().mean() for each in (ours, theirs))
    assert error <= 1.01 * their_error


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_of_each_head_keeps_its_shape(dtype):
    """Qwen3 normalises queries and keys by head: (batch, tokens, heads, head_dim), here a slice of more heads."""
    module = random_norm(Qwen3RMSNorm, dtype, size=16)
    states = torch.randn(2, 3, 8, 16, generator=torch.Generator().manual_seed(2)).to(dtype)[:, :, 2:6]
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(norm(module)(states), module(states), rtol=tolerance, atol=tolerance)


def test_its_inputs_are_not_changed():
    """Hidden states are the residual as well."""
    hidden = random_hidden(torch.bfloat16, 1.0)
    norm(random_norm(LlamaRMSNorm, torch.bfloat16))(hidden)
    assert torch.equal(hidden, random_hidden(torch.bfloat16, 1.0))


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_module_of_more_precision_is_kept(name, dtype):
    """The mean of (x, -x) is 0 up to float32's rounding only, which is much to a float32 model beside large values."""
    module = tiny_model(name, dtype=dtype).model.norm
    assert norm(module) is module


def test_a_weight_of_zeros_is_a_factor_of_one():
    """As Gemma's norms begin: both forms agree that the other one's output, 0, is wrong."""
    module, hidden = GemmaRMSNorm(SIZE).bfloat16(), random_hidden(torch.bfloat16, 1.0)
    assert norm(module) is not module
    torch.testing.assert_close(norm(module)(hidden), module(hidden))


def hooked() -> nn.Module:
    module = random_norm(LlamaRMSNorm, torch.bfloat16)
    module.register_forward_hook(lambda module, inputs, output: output + 1)
    return module


def replaced() -> nn.Module:
    module = random_norm(LlamaRMSNorm, torch.bfloat16)
    module.forward = lambda hidden: hidden
    return module


class Shifted(LlamaRMSNorm):
    """A subclass that computes something else."""

    def forward(self, hidden_states):
        return super().forward(hidden_states) + 0.1


class EpsOutside(LlamaRMSNorm):
    """Eps outside of the root."""

    def forward(self, hidden_states):
        return self.weight * hidden_states / (hidden_states.square().mean(-1, keepdim=True).sqrt() + 1e-3)


OTHERS = {
    "hook": hooked,
    "replaced forward": replaced,
    "LayerNorm": lambda: random_norm(nn.LayerNorm, torch.bfloat16),
    "LayerNorm as it begins": lambda: nn.LayerNorm(SIZE).bfloat16(),
    "subclass": lambda: random_norm(Shifted, torch.bfloat16),
    "other place of eps": lambda: random_norm(EpsOutside, torch.bfloat16),
    "no weight": lambda: nn.RMSNorm(SIZE, eps=1e-6, elementwise_affine=False).bfloat16(),
    "no eps": lambda: nn.RMSNorm(SIZE).bfloat16(),
    "meta": lambda: LlamaRMSNorm(SIZE).to("meta", torch.bfloat16),
    "identity": nn.Identity,
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_modules_that_compute_something_else_are_kept(make):
    module = make()
    assert norm(module) is module


def test_torchs_own_rms_norm_is_taken_for_what_it_is():
    """By what it computes, not by the name of its class."""
    module = random_norm(nn.RMSNorm, torch.bfloat16)
    hidden = random_hidden(torch.bfloat16, 1.0)
    assert norm(module) is not module
    torch.testing.assert_close(norm(module)(hidden), module(hidden))
