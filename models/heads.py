"""Heads that draft: each guesses one of the next tokens from the model's final state, all in one matrix product.

Medusa (Cai et al., ICML 2024): head `j` turns the final state `s`, after the model's norm, into ``s + SiLU(W_j s)``,
which the model's head scores as it scores `s`. Where the paper gives each a head matrix of its own, all share the
model's (or its rows of a draft vocabulary), so that such drafts differ from others by the method only. Nothing here
knows the drafts before an offset: what the others guessed plays no part in a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.models.adapter import AdapterSpec, load_weights, prepare_trained
from layerskip.models.families import family_of, geometry_of
from layerskip.models.linears import Linears

__all__ = ["Heads"]


class Heads:
    """Heads beside a model; attributes are those of `TrainedPart`."""

    def __init__(self, model: PreTrainedModel, spec: AdapterSpec, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Build them for `model`.

        Args:
            tensors: their weights by name; None: as training begins, where each says what the model's own head says.

        Raises:
            UnsupportedModelError: a spec that the model has no room for.
            CheckpointError: tensors that do not fit.
        """
        family, geometry = family_of(type(model).__name__, model.config), geometry_of(model.config)
        spec.check(geometry.num_layers)
        self.spec, self._behind = spec, geometry.num_layers
        size, count = geometry.hidden_size, spec.num_heads
        with torch.device("meta"):
            self.modules = nn.ModuleDict({"heads": nn.Linear(size, count * size, bias=False)})
        like = next(model.get_submodule(family.final_norm).parameters())
        load_weights(self.modules, {"heads.weight": like.new_zeros(count * size, size)} if tensors is None else tensors)
        self.read()

    def read(self) -> None:
        """See `TrainedPart.read`."""
        parts: Any = self.modules
        self._linears = Linears(parts["heads"])

    @property
    def num_parameters(self) -> int:
        """See `TrainedPart`."""
        return sum(each.numel() for each in self.modules.parameters())

    @property
    def kept_states(self) -> tuple[int, ...]:
        """See `TrainedPart`: the final one."""
        return (self._behind,)

    @property
    def final_norm(self) -> Callable[[Tensor], Tensor]:
        """See `TrainedPart`: none, for what they read is normed."""
        return _unchanged

    def prepare(self, *, pack: bool | None) -> None:
        """See `TrainedPart.prepare`."""
        prepare_trained([self._linears], pack=pack)

    def run(self, normed: Tensor) -> Tensor:
        """What goes to the model's head, for each of the next tokens but the very next.

        Args:
            normed: (batch, tokens, hidden_size), the model's final states after its norm.

        Returns:
            (batch, tokens, num_heads, hidden_size).
        """
        turned: Tensor = F.silu(self._linears(normed)).unflatten(-1, (self.spec.num_heads, -1))
        return normed.unsqueeze(-2) + turned


def _unchanged(hidden: Tensor) -> Tensor:
    return hidden
