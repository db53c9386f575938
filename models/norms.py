"""RMS norm in few kernels, where that computes what the model's own module computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerskip.models.linears import is_intercepted

__all__ = ["norm", "refresh"]


def norm(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return what normalises as `module` does in fewer kernels where the two agree, else the module.

    Agreement is tried, not looked up: families write RMS norm in several ways (Gemma's factor is one more than its
    weight). Only in bfloat16 and float16: the mean of (x, -x) is 0 up to float32's rounding only, which beside values
    of 1e4 (residual streams have such) is 100 rounding steps of float32, but less than one of bfloat16.
    """
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return module
    if is_intercepted(module) or weight.dtype.itemsize > 2 or weight.is_meta:
        return module
    candidates = [_RMSNorm(module, eps)]
    if weight.device.type == "cpu":
        candidates.append(_RMSNorm(module, eps, offset=1))
    return next((fast for fast in candidates if _agree(module, fast, weight)), module)


def refresh(normalise: Callable[[Tensor], Tensor]) -> None:
    """Take up what was put into the weight of what `norm` returned; modules read theirs at every call."""
    if isinstance(normalise, _RMSNorm):
        normalise.refresh()


class _RMSNorm:
    """RMS norm; on the CPU as the layer norm of (x, -x), whose mean is 0 and whose variance is the mean square of x.

    torch's own `rms_norm`, one kernel on a GPU, runs nine on the CPU, this two: at one token a pass each costs more to
    call than to compute (together 7 % of a plain step of SmolLM2).
    """

    def __init__(self, module: Any, eps: float, offset: int = 0) -> None:
        """`offset` is what the factor is more than the module's weight; if anything, the input is to be on the CPU."""
        self._module, self._eps, self._offset, self._shape = module, eps, offset, tuple(module.weight.shape)
        self._signs = module.weight.new_tensor([[1.0], [-1.0]]) if module.weight.device.type == "cpu" else None
        self.refresh()

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self) -> None:
        """Read the module's weight again."""
        weight = self._module.weight.detach()
        if self._offset:
            weight = weight.float() + self._offset  # the kernel takes it in float32 too, where the sum is exact
        self._weight = weight if self._signs is None else torch.stack((weight, weight))

    def __call__(self, hidden: Tensor) -> Tensor:
        if self._signs is None:
            return F.rms_norm(hidden, self._shape, self._weight, self._eps)
        mirrored = hidden.unsqueeze(-2) * self._signs
        return torch.layer_norm(mirrored, (2, *self._shape), self._weight, None, self._eps, False).select(-2, 0)


@torch.no_grad()
def _agree(module: Any, fast: Callable[[Tensor], Tensor], weight: Tensor) -> bool:
    """Whether both give the same up to rounding, on inputs of very different sizes."""
    steps = torch.linspace(-2, 2, 2 * len(weight), device=weight.device).view(2, -1)
    inputs = (steps * torch.tensor([[1e-3], [30.0]], device=weight.device)).to(weight.dtype)
    expected, got = module(inputs).float(), fast(inputs).float()
    return torch.allclose(expected, got, rtol=4 * torch.finfo(weight.dtype).eps, atol=1e-6)
