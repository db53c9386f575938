"""A plain linear is read directly; whatever else stands in its place is called as it is.

Fused and packed, several linears are one product, and changes to what was copied are noticed.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from transformers.activations import ACT2FN

from layerskip.models.linears import Linears, packing_obstacle

INPUTS = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CPU = torch.device("cpu")


class Doubling(nn.Linear):
    """A subclass with a forward of its own, as quantised linears are."""

    def forward(self, inputs):
        return 2 * super().forward(inputs)


def linears(*outputs: int, inputs: int = 5, biases=(True, False, True), dtype=torch.float64) -> list[nn.Linear]:
    """Weights so that outputs are of size one, and biases as large, so that none can be lost in the rounding."""
    torch.manual_seed(0)
    modules = [nn.Linear(inputs, size, bias=bias, dtype=dtype) for size, bias in zip(outputs, biases, strict=False)]
    for module in modules:
        nn.init.normal_(module.weight, std=inputs**-0.5)
        if module.bias is not None:
            nn.init.normal_(module.bias)
    return [module.requires_grad_(False) for module in modules]


@pytest.fixture
def module():
    return linears(4)[0]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_plain_linear_is_applied_without_its_module(bias, monkeypatch):
    """At one token a pass the call of the module costs as much as a small product."""
    (module,) = linears(4, biases=[bias])
    expected, direct = module(INPUTS), Linears(module)
    monkeypatch.setattr(nn.Linear, "forward", None)
    assert torch.equal(direct(INPUTS), expected)


def test_weight_is_shared(module):
    direct = Linears(module)
    module.weight.mul_(3)
    module.bias.add_(1)
    assert torch.equal(direct(INPUTS), module(INPUTS))
    assert not direct.is_stale()


@pytest.mark.parametrize("module", [Doubling(5, 4).double(), nn.Sequential(nn.Linear(5, 4).double())], ids=type)
def test_other_modules_are_called_as_they_are(module):
    direct = Linears(module.requires_grad_(False))
    assert torch.equal(direct(INPUTS), module(INPUTS)) and not direct.is_plain


def test_parametrised_linear_is_called_as_it_is(module):
    """Its weight is computed at each call; catches a weight that is frozen as it was when the model was wrapped."""
    parametrizations.weight_norm(module)
    direct = Linears(module)
    module.parametrizations.weight.original0.data.mul_(2)
    assert torch.equal(direct(INPUTS), module(INPUTS)) and not direct.is_plain


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_are_called(module, register):
    calls = []
    getattr(module, register)(lambda *arguments: calls.append(arguments))
    direct = Linears(*linears(3), module)
    direct(INPUTS)
    direct.gated(INPUTS[..., :5], lambda gate: gate.sum())
    assert len(calls) == 2 and not direct.is_plain


def test_forward_replaced_on_the_instance_is_called(module):
    """As accelerate does to move weights or activations between devices."""
    module.forward = lambda inputs: inputs.sum()
    assert Linears(module)(INPUTS) == INPUTS.sum() and not Linears(module).is_plain


FORMS = {
    "as they are": lambda group: None,
    "fused copy": lambda group: group.fuse(in_place=False),
    "fused in place": lambda group: group.fuse(in_place=True),
}


@pytest.mark.parametrize("bring", FORMS.values(), ids=FORMS)
class TestForms:
    """What is computed is the modules' own, whatever the form; float64, so up to the last bits."""

    @pytest.mark.parametrize("biases", [(True, False, True), (False, True, False), (False,) * 3], ids=str)
    def test_outputs_are_side_by_side(self, bring, biases):
        """Catches another order, and a bias that is lost or given to a linear that has none."""
        modules = linears(4, 2, 3, biases=biases)
        expected, group = torch.cat([each(INPUTS) for each in modules], dim=-1), Linears(*modules)
        bring(group)
        torch.testing.assert_close(group(INPUTS), expected)

    def test_gated(self, bring):
        """Catches gate and up-projection exchanged."""
        gate, up = modules = linears(4, 4)
        expected, group = F.gelu(gate(INPUTS)) * up(INPUTS), Linears(*modules)
        bring(group)
        torch.testing.assert_close(group.gated(INPUTS, F.gelu), expected)

    def test_add_leaves_the_residual_as_it_was(self, bring):
        (module,) = linears(5)
        residual, group = INPUTS.flip(0).clone(), Linears(module)
        bring(group)
        torch.testing.assert_close(group.add(INPUTS, residual), residual + module(INPUTS))
        assert torch.equal(residual, INPUTS.flip(0))

    def test_modules_keep_their_values(self, bring):
        modules = linears(4, 2, 3)
        before = copy.deepcopy([each.state_dict() for each in modules])
        bring(Linears(*modules))
        for module, state in zip(modules, before, strict=True):
            assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


def test_fused_in_place_is_held_once_and_follows_the_weights():
    """Catches modules that keep a second copy, and weights of theirs that no longer act."""
    modules = linears(4, 2, 3)
    group = Linears(*modules)
    group.fuse(in_place=True)
    assert len({each.weight.untyped_storage().data_ptr() for each in modules}) == 1
    assert modules[0].weight.untyped_storage().nbytes() == sum(each.weight.nbytes for each in modules)
    modules[1].weight.add_(1)
    torch.testing.assert_close(group(INPUTS), torch.cat([each(INPUTS) for each in modules], dim=-1))
    assert group.copied_bytes == 0 and not group.is_stale()


def replace_weight(module: nn.Linear) -> None:
    module.weight = nn.Parameter(module.weight.clone(), requires_grad=False)


WEIGHT_CHANGES = {
    "written to": lambda module: module.weight.add_(1),
    "replaced": replace_weight,
    "data replaced": lambda module: setattr(module.weight, "data", module.weight.clone()),
}


@pytest.mark.parametrize("change", WEIGHT_CHANGES.values(), ids=WEIGHT_CHANGES)
@pytest.mark.parametrize("which", range(3))
def test_a_changed_weight_makes_the_fused_copy_stale(change, which):
    """Of any of the linears: the copy would go on computing with the old one."""
    modules = linears(4, 2, 3)
    group = Linears(*modules)
    group.fuse(in_place=False)
    assert group.copied_bytes == sum(each.weight.nbytes for each in modules) and not group.is_stale()
    change(modules[which])
    assert group.is_stale()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
class TestPacked:
    """oneDNN's form, compared with the plain one in the same dtype: only rounding may differ."""

    @pytest.fixture(autouse=True)
    def skipped_where_it_cannot_be_packed(self, dtype):
        if obstacle := packing_obstacle(dtype, CPU):
            pytest.skip(obstacle)

    def both(self, dtype, *outputs, biases=(True, False, True), release=False):
        plain, packed = (Linears(*linears(*outputs, inputs=64, biases=biases, dtype=dtype)) for _ in range(2))
        packed.pack(release=release)
        return plain, packed

    def check(self, dtype, ours, theirs):
        tolerance = 8 * torch.finfo(dtype).eps
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize("rows", [1, 5, 33])
    @pytest.mark.parametrize("biases", [(True, False, True), (False, True, False), (False,) * 3], ids=str)
    def test_three_side_by_side(self, dtype, biases, rows):
        inputs = torch.randn(2, rows, 64, generator=torch.Generator().manual_seed(rows)).to(dtype)
        plain, packed = self.both(dtype, 64, 32, 16, biases=biases)
        self.check(dtype, packed(inputs), plain(inputs))

    @pytest.mark.parametrize("bias", [True, False])
    def test_add_leaves_the_residual_as_it_was(self, dtype, bias):
        """The operator adds as it goes; catches one that does so in place: hidden states are used again."""
        plain, packed = self.both(dtype, 64, biases=[bias])
        inputs, residual = torch.randn(2, 1, 3, 64).to(dtype)
        before = residual.clone()
        self.check(dtype, packed.add(inputs, residual), plain.add(inputs, residual))
        assert torch.equal(residual, before)

    @pytest.mark.parametrize("biases", [(True, True), (True, False), (False, True), (False, False)], ids=str)
    @pytest.mark.parametrize("activation", [nn.SiLU(), ACT2FN["silu"], F.silu, ACT2FN["gelu_pytorch_tanh"], nn.ReLU()])
    def test_gated(self, dtype, activation, biases):
        """SiLU is part of the product, others are called; catches one that is taken for another."""
        plain, packed = self.both(dtype, 64, 64, biases=biases)
        inputs = torch.randn(1, 3, 64).to(dtype)
        self.check(dtype, packed.gated(inputs, activation), plain.gated(inputs, activation))

    def test_a_hook_on_the_activation_is_called(self, dtype):
        """The product that has SiLU in it would pass it by."""
        activation, calls = nn.SiLU(), []
        activation.register_forward_hook(lambda *arguments: calls.append(arguments))
        _, packed = self.both(dtype, 64, 64)
        packed.gated(torch.randn(1, 3, 64).to(dtype), activation)
        assert len(calls) == 1

    @pytest.mark.parametrize("outputs", [(64,), (64, 64), (40, 24, 7)], ids=str)
    def test_released_weights_come_back_to_the_last_bit(self, dtype, outputs):
        """Odd sizes too, which oneDNN pads."""
        plain, packed = self.both(dtype, *outputs, release=True)
        assert all(each.weight.is_meta for each in packed.modules) and packed.copied_bytes == 0
        for _ in range(2):  # a second time there is nothing to do
            packed.restore()
        for ours, theirs in zip(packed.modules, plain.modules, strict=True):
            assert torch.equal(ours.weight, theirs.weight)
        assert packed.copied_bytes == sum(each.weight.nbytes for each in plain.modules)

    @pytest.mark.parametrize("release", [False, True], ids=["beside the weights", "restored"])
    @pytest.mark.parametrize("change", WEIGHT_CHANGES.values(), ids=WEIGHT_CHANGES)
    def test_a_changed_weight_makes_it_stale(self, dtype, change, release):
        _, packed = self.both(dtype, 64, 64, release=release)
        packed.restore()
        assert not packed.is_stale()
        change(packed.modules[1])
        assert packed.is_stale()
