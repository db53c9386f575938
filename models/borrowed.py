"""The modules that a decoder reads from a transformers model: which they are, and whether the model still has them.

A decoder calls some modules of the model and passes others by (whole layers, attention, MLP). Whatever somebody has
hung onto a module that is passed by, or puts into the model later, would be left out of the output without a word.
"""

from __future__ import annotations

from collections.abc import Callable

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
        self._weights = self._placement()

    def take(self, name: str) -> nn.Module:
        """Return the module called `name`, for use."""
        module = self._model.get_submodule(name)
        self._taken[name] = (module, is_intercepted(module))
        return module

    @property
    def taken(self) -> list[nn.Module]:
        """What was taken."""
        return [module for module, _ in self._taken.values()]

    @property
    def is_watched(self) -> bool:
        """Whether somebody expects to see a call of what was taken (`is_intercepted`)."""
        return any(intercepted for _, intercepted in self._taken.values())

    def within(self, name: str) -> Callable[[str], nn.Module]:
        """Return what takes the modules inside the one called `name`."""
        return lambda inner: self.take(f"{name}.{inner}")

    def refuse_bypassed(self) -> None:
        """Call it when all modules have been taken.

        Raises:
            UnsupportedModelError: a module that was not taken has hooks or a forward of its own.
        """
        for name, module in self._model.named_modules():
            if name not in self._taken and is_intercepted(module) and not _is_harmless(module):
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
            now = self._model.get_submodule(name)
            if now is not module or is_intercepted(now) != intercepted:
                raise UnsupportedModelError(
                    f"got a model whose {name!r} was replaced or hooked after it was wrapped, which would not act. "
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


def _is_harmless(module: nn.Module) -> bool:
    """Hooks that only move tensors (accelerate) or record outputs (transformers) change no output."""
    if hasattr(module, "_hf_hook"):
        return True
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return "forward" not in vars(module) and all(hook.__module__.startswith("transformers.") for hook in hooks)
