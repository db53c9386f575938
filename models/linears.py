"""How linear projections are called: straight from their weights, packed for the processor, or through their modules.

Projections that read the same input are one object, so that they can be one matrix product. A module call costs Python
time that counts at one token a pass, hence only a plain `nn.Linear` is read directly; whatever else stands in its place
(a quantised linear, a LoRA wrapper, a module with hooks) is called as it is. Packing and fusing are asked for by
`preparation.py`; until then every weight is the model's own, shared.

Shapes: inputs (…, in_features), outputs (…, out_features).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

__all__ = ["Activation", "Linears", "is_intercepted", "packing_obstacle", "versions"]

Activation = Callable[[Tensor], Tensor]

# Weights are laid out for passes of this many rows: on AVX512-BF16 that layout is as fast at 1 row as the one made for
# 1, faster at 2 to 6, and at a prompt's hundreds no slower than the unpacked weight.
_PACKED_ROWS = 4

# Subclasses of `nn.Linear` that compute what it does. By name, because importing them takes longer than all else here.
_PLAIN_TOO = {("transformers.models.falcon.modeling_falcon", "FalconLinear")}


def is_intercepted(module: nn.Module) -> bool:
    """Whether someone expects to see the call: registered hooks, or a forward replaced on the instance (accelerate)."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


class Linears:
    """One or several linears of the same input, called as one.

    Attributes:
        modules: the model's own, in the order of their outputs.
        is_plain: all are ordinary linears of one device and dtype that nobody watches, so they may be fused or packed.
        copied_bytes: of weights that are held beside the model's own.
    """

    def __init__(self, *modules: nn.Module) -> None:
        """What stands in the modules now is what is called: hooks or adapters put there later are not seen."""
        self.modules = modules
        kinds = {(each.weight.dtype, each.weight.device) if _is_direct(each) else None for each in modules}
        self.is_plain = None not in kinds and len(kinds) == 1
        self.copied_bytes = 0
        self._released = False
        self._form: _Form = _as_they_are(modules)
        self._remember()

    def __call__(self, inputs: Tensor) -> Tensor:
        """Outputs side by side: (…, sum of out_features)."""
        return self._form(inputs)

    def add(self, inputs: Tensor, residual: Tensor) -> Tensor:
        """``residual + self(inputs)``."""
        return self._form.add(inputs, residual)

    def gated(self, inputs: Tensor, activation: Activation) -> Tensor:
        """``activation(first) * second`` of two linears of one size, or of the halves of one's outputs."""
        return self._form.gated(inputs, activation)

    @property
    def is_packed(self) -> bool:
        """Whether `pack` was called."""
        return isinstance(self._form, _Packed)

    def fuse(self, *, in_place: bool) -> None:
        """Make one matrix of all weights.

        Args:
            in_place: the modules' weights become views of it, so that they are held once; else it is a copy.
        """
        if len(self.modules) == 1:
            return
        linears: Sequence[Any] = self.modules
        weight, bias = torch.cat([each.weight for each in linears]), _joined_bias(linears)
        if in_place:
            for each, part in zip(linears, weight.split([each.out_features for each in linears]), strict=True):
                each.weight = nn.Parameter(part, requires_grad=False)
        self._form = _Dense(weight, bias)
        self._remember(*([] if in_place else [weight]))

    def pack(self, *, release: bool) -> None:
        """Lay the weights out as oneDNN reads them fastest; for what `packing_obstacle` lets through.

        Args:
            release: the model's own weights give up their memory (`restore` brings them back).
        """
        linears: Sequence[Any] = self.modules
        # A gate and its up-projection stay apart, because oneDNN can then apply activation and product as it goes.
        parts = [linears] if len(linears) != 2 else [[each] for each in linears]
        weights = [torch.cat([each.weight for each in part]) if len(part) > 1 else part[0].weight for part in parts]
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_ROWS) for weight in weights]
        self._form = _Packed(packed, [_joined_bias(part) for part in parts])
        if release:
            for each in linears:
                each.weight = nn.Parameter(torch.empty_like(each.weight, device="meta"), requires_grad=False)
            self._released = True
        self._remember(*([] if release else weights))

    def rows(self, indices: Tensor) -> Linears:
        """A copy that computes only these outputs, packed if this is; for one plain linear.

        Args:
            indices: (outputs,), int64.
        """
        weight, bias = self.dense_rows(indices)
        few = nn.Linear(weight.shape[1], len(indices), bias=bias is not None, device="meta")
        few.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            few.bias = nn.Parameter(bias, requires_grad=False)
        copy = Linears(few)
        if self.is_packed:
            copy.pack(release=True)
        return copy

    def dense_rows(self, indices: Tensor) -> tuple[Tensor, Tensor | None]:
        """Copies of the weight (outputs, in_features) and bias of these outputs; for one plain linear.

        Args:
            indices: (outputs,), int64.
        """
        (module,) = self.modules
        linear: Any = module
        packed = self._form.packed if isinstance(self._form, _Packed) else []
        weight = packed[0].to_dense() if linear.weight.is_meta else linear.weight
        return weight.detach()[indices], None if linear.bias is None else linear.bias.detach()[indices]

    def restore(self) -> None:
        """Give the modules back the weights that `pack` released; they are then held twice."""
        if self._released and isinstance(self._form, _Packed):
            linears: Sequence[Any] = self.modules
            weight = torch.cat([packed.to_dense() for packed in self._form.packed])
            for each, part in zip(linears, weight.split([each.out_features for each in linears]), strict=True):
                each.weight = nn.Parameter(part.clone(), requires_grad=False)
            self._released = False
            self._remember(weight)

    def regions(self) -> list[tuple[int, int]]:
        """Where what is read at every token lies in the CPU's memory: (address, bytes) of each piece."""
        if isinstance(self._form, _Packed):
            op = torch.ops.mkldnn
            return [(op.data_ptr(packed), op._nbytes(packed)) for packed in self._form.packed]
        weights = [each for each in self._read if each is not None and each.device.type == "cpu"]
        return [(each.data_ptr(), each.numel() * each.element_size()) for each in weights]

    def is_stale(self) -> bool:
        """Whether other weights or biases were put into the modules, or those that were copied were written to."""
        now = self._parameters()
        replaced = any(ours is not theirs for ours, theirs in zip(self._read, now, strict=True))
        return replaced or self._versions != versions(self._copied)

    def state(self) -> list[tuple[int, int]]:
        """Of the parameters that are read directly: where each lies, and how often it was written to."""
        return versions([each for each in self._read if each is not None])

    def _remember(self, *copies: Tensor) -> None:
        """Keep what the parameters were when they were read, or copied: weights into `copies`, biases if joined."""
        self.copied_bytes = sum(weight.numel() * weight.element_size() for weight in copies)
        self._read = self._parameters()
        is_joined = not isinstance(self._form, _Apart)
        self._copied = [each for each in self._read if each is not None and (copies or (is_joined and each.dim() == 1))]
        self._versions = versions(self._copied)

    def _parameters(self) -> list[Tensor | None]:
        """Weights and biases of the modules that are read directly."""
        return [parameter for each in self.modules if _is_direct(each) for parameter in (each.weight, each.bias)]


class _Form(ABC):
    """How the product is computed."""

    @abstractmethod
    def __call__(self, inputs: Tensor) -> Tensor: ...

    def add(self, inputs: Tensor, residual: Tensor) -> Tensor:
        return residual + self(inputs)

    def gated(self, inputs: Tensor, activation: Activation) -> Tensor:
        gate, up = self(inputs).chunk(2, dim=-1)
        return activation(gate) * up


class _Dense(_Form):
    """One matrix, ours or the model's."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._product = partial(F.linear, weight=weight, bias=bias)

    def __call__(self, inputs: Tensor) -> Tensor:
        return self._product(inputs)


class _Apart(_Form):
    """One call for each linear."""

    def __init__(self, calls: Sequence[Callable[[Tensor], Tensor]]) -> None:
        self._calls = calls

    def __call__(self, inputs: Tensor) -> Tensor:
        if len(self._calls) == 1:
            return self._calls[0](inputs)
        return torch.cat([call(inputs) for call in self._calls], dim=-1)

    def gated(self, inputs: Tensor, activation: Activation) -> Tensor:
        if len(self._calls) == 1:
            return super().gated(inputs, activation)
        gate, up = self._calls
        return activation(gate(inputs)) * up(inputs)


class _Packed(_Form):
    """Weights in oneDNN's own layout, by a private operator of torch (`packing_obstacle` tries it out)."""

    def __init__(self, packed: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self.packed = packed
        self._biases = biases
        self._unary: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
        self._binary: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, inputs: Tensor) -> Tensor:
        outputs = [
            self._unary(inputs, packed, bias, "none", [], "")
            for packed, bias in zip(self.packed, self._biases, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def add(self, inputs: Tensor, residual: Tensor) -> Tensor:
        return self._binary(inputs, residual, self.packed[0], self._biases[0], "add")

    def gated(self, inputs: Tensor, activation: Activation) -> Tensor:
        if len(self.packed) == 1:
            return super().gated(inputs, activation)
        fused = "swish" if _is_silu(activation) else "none"
        gate = self._unary(inputs, self.packed[0], self._biases[0], fused, [], "")
        gate = gate if fused != "none" else activation(gate)
        return self._binary(inputs, gate, self.packed[1], self._biases[1], "mul")


def _as_they_are(modules: Sequence[nn.Module]) -> _Form:
    """Plain linears without their modules, everything else through them."""
    return _Apart(
        [partial(F.linear, weight=each.weight, bias=each.bias) if _is_direct(each) else each for each in modules]
    )


def _is_direct(module: nn.Module) -> TypeGuard[nn.Linear]:
    kind = type(module)
    is_linear = kind is nn.Linear or (kind.__module__, kind.__name__) in _PLAIN_TOO
    # A quantiser may leave the module and put a tensor of its own kind into it (torchao).
    return is_linear and type(module.weight) is nn.Parameter and not is_intercepted(module)


def versions(parameters: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Where each lies and how often it was written to; torch counts no writes to `.data`, nor to inference tensors."""
    return [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in parameters]


def _joined_bias(linears: Sequence[Any]) -> Tensor | None:
    """The biases in a row, zeros where a linear has none; None: none has one."""
    if all(each.bias is None for each in linears):
        return None
    return torch.cat(
        [each.weight.new_zeros(each.out_features) if each.bias is None else each.bias.detach() for each in linears]
    )


def _is_silu(activation: Any) -> bool:
    """By name, because transformers has a class of its own for it."""
    return type(activation).__name__ in ("SiLU", "SiLUActivation") and not is_intercepted(activation)


@cache
def packing_obstacle(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why linears of `dtype` on `device` cannot be packed; None: they can.

    The operators are private to torch, so they are not looked up but tried: on small matrices, against the plain
    product.
    """
    if device.type != "cpu":
        return f"packing is for the CPU; the weights are on {device.type}"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"oneDNN packs bfloat16 and float32; the weights are {str(dtype).removeprefix('torch.')}"
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device(device):
        values = torch.linspace(-1, 1, 64 * 65, dtype=dtype)
        # Without initialisation, which would draw from torch's global generator.
        linears = [skip_init(nn.Linear, 64, 64, dtype=dtype, bias=bias) for bias in (True, False)]
        for parameter in (parameter for each in linears for parameter in each.parameters()):
            parameter.copy_(values[: parameter.numel()].view_as(parameter).sin())
        inputs = values[-3 * 64 :].view(1, 3, 64).cos()
        plain, packed = Linears(*linears), Linears(*linears)
        try:
            packed.pack(release=False)
            pairs = [
                (plain(inputs), packed(inputs)),
                (plain.gated(inputs, F.silu), packed.gated(inputs, F.silu)),
                (plain.gated(inputs, nn.SiLU()), packed.gated(inputs, nn.SiLU())),
            ]
            single, packed_single = Linears(linears[0]), Linears(linears[0])
            packed_single.pack(release=False)
            pairs.append((single.add(inputs, inputs), packed_single.add(inputs, inputs)))
        except (AttributeError, RuntimeError, NotImplementedError) as error:
            return f"this build of torch has no packed linears ({str(error).splitlines()[0]})"
        tolerance = 8 * torch.finfo(dtype).eps
        if not all(torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance) for ours, theirs in pairs):
            return "this build of torch computes packed linears differently"
    return None
