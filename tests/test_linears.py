"""A plain linear is read directly; whatever else stands in its place is called as it is."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from layerskip.models.linears import linear

INPUTS = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))


class Doubling(nn.Linear):
    """A subclass with a forward of its own, as quantised linears are."""

    def forward(self, inputs):
        return 2 * super().forward(inputs)


@pytest.fixture
def module():
    torch.manual_seed(0)
    return nn.Linear(5, 4).requires_grad_(False)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_plain_linear_is_applied_without_its_module(bias, monkeypatch):
    """At one token a pass the call of the module costs as much as a small product."""
    module = nn.Linear(5, 4, bias=bias).requires_grad_(False)
    expected, direct = module(INPUTS), linear(module)
    monkeypatch.setattr(nn.Linear, "forward", None)
    assert torch.equal(direct(INPUTS), expected)


def test_weight_is_shared(module):
    direct = linear(module)
    module.weight.mul_(3)
    module.bias.add_(1)
    assert torch.equal(direct(INPUTS), module(INPUTS))


def test_subclass_is_called_as_it_is():
    module = Doubling(5, 4).requires_grad_(False)
    assert linear(module) is module


def test_other_modules_are_called_as_they_are():
    module = nn.Sequential(nn.Linear(5, 4))
    assert linear(module) is module


def test_parametrised_linear_is_called_as_it_is(module):
    """Its weight is computed at each call; catches a weight that is frozen as it was when the model was wrapped."""
    parametrizations.weight_norm(module)
    direct = linear(module)
    module.parametrizations.weight.original0.data.mul_(2)
    assert torch.equal(direct(INPUTS), module(INPUTS))


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_are_called(module, register):
    calls = []
    getattr(module, register)(lambda *arguments: calls.append(arguments))
    linear(module)(INPUTS)
    assert len(calls) == 1


def test_forward_replaced_on_the_instance_is_called(module):
    """As accelerate does to move weights or activations between devices."""
    module.forward = lambda inputs: inputs.sum()
    assert linear(module)(INPUTS) == INPUTS.sum()
