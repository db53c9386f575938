"""A pass of a decoder as one graph of ordinary operators over ordinary weights, which is what a compiler works on.

It is made by running the pass once and writing down what torch was asked to compute: none of our objects is in it. It
knows nothing of compilers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from layerskip.models.cache import KVCache
from layerskip.models.decoder import Decoder, Head, Step

__all__ = ["trace"]


@torch.inference_mode(False)
@torch.no_grad()
def trace(
    decoder: Decoder,
    token_ids: Tensor,
    starts: Tensor,
    visible: int,
    cache: KVCache,
    path: Sequence[Step] | None = None,
    head: Head | None = None,
) -> tuple[GraphModule, list[Tensor]]:
    """Run `Decoder.forward` and write it down.

    Args:
        token_ids, starts: tensors that were not made in inference mode.

    Returns:
        The graph, a function of its inputs that returns a tuple of the logits alone and writes into the cache's
        entries; and these inputs: token ids, starts, entries. Weights are constants of the graph, those that were
        packed laid out as ordinary matrices of its own.
    """

    def program(token_ids: Tensor, starts: Tensor, *entries: Tensor) -> tuple[Tensor]:
        with _Unpacked():  # type: ignore[no-untyped-call]
            return (decoder.forward(token_ids, starts, visible, cache.over(entries), path, head),)

    inputs = [token_ids, starts, *cache.entries]
    make: Callable[..., Any] = make_fx(program)
    return make(*inputs), inputs


class _Unpacked(TorchDispatchMode):
    """Computes products with packed weights, which compilers do not know, by the matrices that were packed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "mkldnn::_linear_pointwise":
            inputs, packed, bias, activation, *_ = args
            outputs = F.linear(inputs, _matrix(packed), bias)
            return F.silu(outputs) if activation == "swish" else outputs
        if func.name() == "mkldnn::_linear_pointwise.binary":
            inputs, other, packed, bias, operation = args
            outputs = F.linear(inputs, _matrix(packed), bias)
            return outputs + other if operation == "add" else outputs * other
        return func(*args, **(kwargs or {}))


def _matrix(packed: Tensor) -> Tensor:
    with disable_proxy_modes_tracing():
        return packed.to_dense()
