"""How one linear projection is called: straight from its weight, or through the module that holds it.

A module call costs Python time that counts at one token a pass. Only a plain `nn.Linear` is read directly; whatever
else stands in its place (a quantised linear, a LoRA wrapper, a module with hooks) is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Linear", "is_intercepted", "linear"]

Linear = Callable[[Tensor], Tensor]


def linear(module: nn.Module) -> Linear:
    """Return a callable that maps (…, in_features) to (…, out_features) and shares `module`'s weight.

    What stands in the module now is what is called: hooks, adapters or another weight put there later are not seen.
    """
    if type(module) is not nn.Linear or is_intercepted(module):
        return module
    return partial(F.linear, weight=module.weight, bias=module.bias)


def is_intercepted(module: nn.Module) -> bool:
    """Whether someone expects to see the call: registered hooks, or a forward replaced on the instance (accelerate)."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
