"""The tensors that a model's weights are stored in, whatever a quantiser has made of them.

A quantised weight may be a parameter that wraps several tensors (torchao), a packed parameter (bitsandbytes), or
several buffers of a module of its own (GPTQ, AWQ). It knows nothing of how they are multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from layerskip.errors import UnsupportedModelError

__all__ = ["count_values", "device_of", "plain_parts", "stored_tensors"]


def device_of(module: nn.Module) -> torch.device:
    """Where `module` keeps its weights.

    Raises:
        UnsupportedModelError: it has none.
    """
    tensor = next(chain(module.parameters(), module.buffers()), None)
    if tensor is None:
        raise UnsupportedModelError(
            f"got a {type(module).__name__} without parameters and buffers in the place of a weight; expected a module "
            "that tells where its weights are. Register them."
        )
    return tensor.device


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the buffers that are saved with them, each once, by name."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """`tensor`, or what it wraps: tensors that have a storage of their own."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in plain_parts(getattr(tensor, name))]


def count_values(module: nn.Module) -> int:
    """Weights and biases of `module`: as many as its matrices have elements, however few bits each takes."""
    return sum(_own_values(each) for each in module.modules())


def _own_values(module: nn.Module) -> int:
    stored = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    sizes = getattr(module, "in_features", 0), getattr(module, "out_features", 0)
    if type(module) is nn.Linear or next(module.children(), None) is not None or not all(sizes):
        return stored
    bias = getattr(module, "bias", None)
    return int(sizes[0] * sizes[1]) + (bias.numel() if isinstance(bias, Tensor) else 0)
