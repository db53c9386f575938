"""The modules that a decoder reads from a transformers model: which they are, and whether the model still has them.

A decoder calls some modules of the model and passes others by (whole layers, attention, MLP). Whatever somebody has
hung onto a module that is passed by, or puts into the model later, would be left out of the output without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from layerskip.errors import CheckpointError, UnsupportedModelError
from layerskip.models.linears import is_intercepted

__all__ = ["BorrowedModules"]


class BorrowedModules:
    """Hands out the modules of `model` by name and remembers what they were."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Nothing of the model is changed.

        Raises:
            CheckpointError: some of its weights are not loaded.
        """
        unloaded = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if unloaded:
            raise CheckpointError(
                f"got a model whose parameter {unloaded[0]!r} (and {len(unloaded) - 1} more) is on the meta device; "
                "expected loaded weights. Load it with enough memory for all of them, without disk offload."
            )
        self._model = model
        self._taken: dict[str, tuple[nn.Module, bool]] = {}
        self._read: dict[str, nn.Parameter] = {}
        self._weights = self._placement()

    def take(self, name: str) -> Any:
        """Return the module called `name`, for calls of the whole of it; or the weight, to be read without its module.

        Raises:
            AttributeError: there is none.
        """
        found = attrgetter(name)(self._model)
        if isinstance(found, nn.Parameter):
            self._read[name] = found
        else:
            self._taken[name] = (found, _has_intercepted(found))
        return found

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of all that was taken."""
        of_modules = (each for module, _ in self._taken.values() for each in module.parameters())
        return [*of_modules, *self._read.values()]

    def switches(self) -> Hashable:
        """What modules of several parts (LoRA around a linear) are told beside their tensors: on or off, merged, scale.

        Equal as long as they compute the same function of their tensors.
        """
        wrappers = (module for module, _ in self._taken.values() if next(module.children(), None) is not None)
        return tuple(repr(_told(part)) for module in wrappers for part in module.modules())

    @property
    def is_watched(self) -> bool:
        """Whether somebody expects to see a call of what was taken (`is_intercepted`)."""
        return any(intercepted for _, intercepted in self._taken.values())

    def within(self, name: str) -> Callable[[str], Any]:
        """Return what takes from inside the module called `name`."""
        return lambda inner: self.take(f"{name}.{inner}")

    def refuse_bypassed(self) -> None:
        """Call it when all modules have been taken.

        Raises:
            UnsupportedModelError: a module that was not taken has hooks or a forward of its own.
        """
        called = {id(each) for module, _ in self._taken.values() for each in module.modules()}
        for name, module in self._model.named_modules():
            if id(module) not in called and is_intercepted(module) and not _is_harmless(module):
                raise UnsupportedModelError(
                    f"got a model with a hook (or a replaced forward) on {name or 'the model itself'!r}, which is not "
                    "called as a whole here, so the hook would not act. Remove it before wrapping the model, or put it "
                    "on a linear, a norm, the embedding or the head."
                )

    def refuse_changes(self) -> None:
        """Make sure that the model still consists of what was taken.

        Raises:
            UnsupportedModelError: a module was replaced, hooked, moved or cast.
        """
        for name, (module, intercepted) in self._taken.items():
            now = attrgetter(name)(self._model)
            if now is not module or _has_intercepted(now) != intercepted:
                raise UnsupportedModelError(
                    f"got a model whose {name!r} was replaced or hooked after it was wrapped, which would not act. "
                    "Wrap it again: layerskip.wrap(model, tokenizer)."
                )
        for name, weight in self._read.items():
            if attrgetter(name)(self._model) is not weight:
                raise UnsupportedModelError(
                    f"got a model whose weight {name!r} was replaced after it was wrapped, which would not act. "
                    "Wrap it again: layerskip.wrap(model, tokenizer)."
                )
        if self._placement() != self._weights:
            raise UnsupportedModelError(
                f"got a model that was moved or cast after it was wrapped: {self._weights} then, {self._placement()} "
                "now. Wrap it again: layerskip.wrap(model, tokenizer)."
            )

    def leave_file(self) -> None:
        """Copy what is no linear out of the weight file that it may be mapped from, so that the file can be let go.

        A file stays mapped as long as one tensor lies in it, and linears give their weights up (`Linears.pack`).
        """
        for module, _ in self._taken.values():
            if not isinstance(module, nn.Linear):
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.clone()

    def _placement(self) -> tuple[torch.device, torch.dtype]:
        parameter = next(self._model.parameters())
        return parameter.device, parameter.dtype


def _has_intercepted(module: nn.Module) -> bool:
    """Itself, or a module inside it."""
    return any(map(is_intercepted, module.modules()))


def _is_harmless(module: nn.Module) -> bool:
    """Hooks that only move tensors (accelerate) or record outputs (transformers) change no output."""
    if hasattr(module, "_hf_hook"):
        return True
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return "forward" not in vars(module) and all(hook.__module__.startswith("transformers.") for hook in hooks)


def _told(module: nn.Module) -> dict[str, Any]:
    """Its attributes that are plain values, or collections of them."""
    return {name: value for name, value in sorted(vars(module).items()) if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
