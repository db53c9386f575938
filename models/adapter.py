"""A few trained blocks by which a draft path ends: behind an exit, or behind the embedding alone.

One description for three ways to draft (`AdapterSpec`): an exit whose last blocks are trained (Kangaroo, Liu et al.
2024), an exit that also reads the model's final state one position before, and a path that reads that state and the
token's embedding only (EAGLE, Li et al. 2024; cross-layer jump drafting). What enters the blocks at position `p` is

    entry_p + fuse([norm(entry_p), norm(state_{p-1})]) + recall([norm(further_{p-1}), …])

where `entry` is the hidden state behind the exit (behind no block at all: the embedding) and `state` the model's own
state behind its last block, or, where the model has not been yet, what the adapter put in its place: its own output one
position before. Where the model has been, its states behind `further` blocks may be read too: the last one knows the
token that comes next, those before it more of what comes later (EAGLE-3, Li et al. 2025). Then come the blocks, a norm,
and the model's head. The model itself is not changed.

The blocks are layers of the model's own class, with keys and values of their own in the cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.errors import CheckpointError, UnsupportedModelError
from layerskip.models.block import Block
from layerskip.models.cache import KVCache
from layerskip.models.families import family_of, geometry_of, layers_of
from layerskip.models.linears import Linears
from layerskip.models.norms import norm, refresh
from layerskip.models.preparation import prepare_linears
from layerskip.models.span import Span

__all__ = ["Adapter", "AdapterSpec", "TrainedPart", "load_weights", "prepare_trained"]

_EPS = 1e-5  # of the norms before `fuse`


@dataclass(frozen=True)
class AdapterSpec:
    """Where an adapter begins, what it reads, and how large it is.

    Attributes:
        exit_layer: blocks of the model that run before it; 0: none, it begins at the embedding.
        num_blocks: of its own.
        reads_state: whether it reads the model's final state one position before.
        further_states: the states that it reads beside that one, by the number of blocks behind them, ascending.
        num_heads: instead of blocks: heads on that final state alone, each of which drafts one token (`heads.py`).
    """

    exit_layer: int
    num_blocks: int = 1
    reads_state: bool = True
    further_states: tuple[int, ...] = ()
    num_heads: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    def check(self, num_layers: int) -> None:
        """Make sure that a model of so many layers has room for it (UnsupportedModelError)."""
        if self.num_heads:
            if self.num_heads < 0 or self != AdapterSpec(0, 0, num_heads=self.num_heads):
                raise UnsupportedModelError(
                    f"got {self.num_heads} heads as {self}; expected 1 or more that read the final state and nothing "
                    "else: exit_layer=0, num_blocks=0, reads_state=True, no further_states."
                )
            return
        if not 0 <= self.exit_layer < num_layers or not 1 <= self.num_blocks <= num_layers:
            raise UnsupportedModelError(
                f"got an adapter behind {self.exit_layer} blocks with {self.num_blocks} of its own for a model of "
                f"{num_layers}; expected 0 to {num_layers - 1}, and 1 to {num_layers}."
            )
        further = self.further_states
        if list(further) != sorted(set(further)) or not all(0 < each < num_layers for each in further):
            raise UnsupportedModelError(
                f"got an adapter that reads the states behind {', '.join(map(str, further))} blocks of a model of "
                f"{num_layers}; expected numbers from 1 to {num_layers - 1}, ascending."
            )
        if further and not self.reads_state:
            raise UnsupportedModelError(
                "got an adapter that reads further states without the final one; expected it to read that first."
            )


class TrainedPart(Protocol):
    """The trained part of a draft path, beside a model: blocks (`Adapter`), or heads (`heads.py`).

    Attributes:
        spec: see `AdapterSpec`.
        modules: all that is trained.
    """

    spec: AdapterSpec
    modules: nn.ModuleDict

    def read(self) -> None:
        """Take up the modules, after others were put in their place or their dtype was changed."""
        ...

    @property
    def num_parameters(self) -> int:
        """Trained numbers, all of which a draft step reads."""
        ...

    @property
    def kept_states(self) -> tuple[int, ...]:
        """Hidden states of the model that it reads, by the number of blocks behind them (`KVCache.states`)."""
        ...

    @property
    def final_norm(self) -> Callable[[Tensor], Tensor]:
        """What comes between its outputs and the model's head."""
        ...

    def prepare(self, *, pack: bool | None) -> None:
        """Make its linears as fast as the model's; its weights are held once, in that form."""
        ...


class Adapter:
    """Trained blocks; attributes are those of `TrainedPart`."""

    def __init__(self, model: PreTrainedModel, spec: AdapterSpec, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Build it for `model`.

        Args:
            tensors: its weights by name; None: as training begins, in the model's dtype, with blocks like the model's
                last ones (whose weights must be there to be read).

        Raises:
            UnsupportedModelError: a spec that the model has no room for.
            CheckpointError: tensors that do not fit.
        """
        family, geometry = family_of(type(model).__name__, model.config), geometry_of(model.config)
        spec.check(geometry.num_layers)
        self.spec = spec
        self._first_block, self._family, self._geometry = geometry.num_layers, family, geometry
        self._numbers, like = family.numbers(model.config), layers_of(model.config, family)[-spec.num_blocks :]
        # Behind the model's own in the cache, and seeing all of it, whatever the windows.
        self._layers = [replace(each, index=each.index + spec.num_blocks, window=None) for each in like]
        layers = list(model.get_submodule(family.layers).children())[geometry.num_layers - spec.num_blocks :]
        self.modules = _modules(
            layers, model.get_submodule(family.final_norm), geometry.hidden_size, model.config, spec
        )
        if tensors is None:
            tensors = _beginning(layers, model.get_submodule(family.final_norm), geometry.hidden_size, spec)
        load_weights(self.modules, tensors)
        self.read()

    def read(self) -> None:
        """See `TrainedPart.read`."""
        parts: Any = self.modules
        self.blocks = [
            Block(partial(_inside, own), layer, self._family, self._geometry, self._numbers)
            for own, layer in zip(parts["blocks"], self._layers, strict=True)
        ]
        self._norm, self._device = norm(parts["norm"]), parts["norm"].weight.device
        self._entry_norm: Callable[[Tensor], Tensor] | None = None
        if self.spec.reads_state:
            self._entry_norm, self._state_norm = norm(parts["entry_norm"]), norm(parts["state_norm"])
            self._fuse = Linears(parts["fuse"])
        self.linears = [*(group for block in self.blocks for group in block.linears)]
        if self.spec.reads_state:
            self.linears.append(self._fuse)
        if self.spec.further_states:
            self._further_norms = [norm(each) for each in parts["further_norms"]]
            self._recall = Linears(parts["recall"])
            self.linears.append(self._recall)

    @property
    def num_parameters(self) -> int:
        """See `TrainedPart`."""
        return sum(each.numel() for each in self.modules.parameters())

    @property
    def kept_states(self) -> tuple[int, ...]:
        """See `TrainedPart`."""
        behind = {self.spec.exit_layer, *self.spec.further_states, self._first_block if self.spec.reads_state else 0}
        return tuple(sorted(behind - {0}))

    @property
    def final_norm(self) -> Callable[[Tensor], Tensor]:
        """See `TrainedPart`."""
        return self._norm

    def prepare(self, *, pack: bool | None) -> None:
        """See `TrainedPart.prepare`."""
        prepare_trained(self.linears, pack=pack)
        for each in (self._norm, *(each for block in self.blocks for each in block.norms)):
            refresh(each)

    def run(
        self, entry: Tensor, state: Tensor | None, cache: KVCache, span: Span, further: Sequence[Tensor] = ()
    ) -> Tensor:
        """Run the positions of `span`, writing their keys and values.

        Args:
            entry: (batch, tokens, hidden_size), behind the exit.
            state: (batch, tokens, hidden_size), of the position before each; None where it reads none.
            further: the same behind each of `further_states`; none where the model has not been.

        Returns:
            (batch, tokens, hidden_size): what goes to norm and head, and stands for the model's own final state.
        """
        hidden, span = entry.to(self._device), span.to(self._device)
        if self._entry_norm is not None:
            assert state is not None
            entry, state = hidden, state.to(self._device)
            fused = self._fuse(torch.cat((self._entry_norm(entry), self._state_norm(state)), dim=-1))
            hidden = entry + fused
        if further:
            normed = [
                norm_of(each.to(self._device)) for norm_of, each in zip(self._further_norms, further, strict=True)
            ]
            hidden = hidden + self._recall(torch.cat(normed, dim=-1))
        for block in self.blocks:
            hidden = block.run(hidden, cache, span)
        return hidden


def load_weights(modules: nn.ModuleDict, tensors: Mapping[str, Tensor]) -> None:
    """Put `tensors` into the modules of a trained part, by name; nothing of it then asks for gradients.

    Raises:
        CheckpointError: tensors that do not fit.
    """
    try:
        modules.load_state_dict(dict(tensors), assign=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"got weights that are not those of this adapter: {str(error).splitlines()[-1].strip()} Is the file "
            "another model's?"
        ) from error
    modules.requires_grad_(False)


@torch.inference_mode(False)
@torch.no_grad()
def prepare_trained(linears: Sequence[Linears], *, pack: bool | None) -> None:
    """`TrainedPart.prepare`, of its linears."""
    prepare_linears(list(linears), [], pack=pack, in_place=True, huge_pages=True)


def _inside(module: nn.Module, name: str) -> Any:
    return attrgetter(name)(module)


def _modules(layers: Sequence[nn.Module], final_norm: Any, size: int, config: Any, spec: AdapterSpec) -> nn.ModuleDict:
    """The modules without weights: on the meta device, which takes neither memory nor random numbers."""
    with torch.device("meta"):
        first = config.num_hidden_layers - len(layers)  # of the layers that they are like
        blocks = [type(each)(config, first + index) for index, each in enumerate(layers)]
        parts: dict[str, nn.Module] = {"blocks": nn.ModuleList(blocks), "norm": copy.deepcopy(final_norm).to("meta")}
        if spec.reads_state:
            parts |= {"entry_norm": nn.RMSNorm(size, eps=_EPS), "state_norm": nn.RMSNorm(size, eps=_EPS)}
            parts["fuse"] = nn.Linear(2 * size, size, bias=False)
        if count := len(spec.further_states):
            parts["further_norms"] = nn.ModuleList(nn.RMSNorm(size, eps=_EPS) for _ in range(count))
            parts["recall"] = nn.Linear(count * size, size, bias=False)
    return nn.ModuleDict(parts).eval()


@torch.no_grad()
def _beginning(layers: Sequence[nn.Module], final_norm: Any, size: int, spec: AdapterSpec) -> dict[str, Tensor]:
    """The weights with which training begins: the model's own, and the state as it is beside the entry."""
    tensors = {f"norm.{name}": each.clone() for name, each in final_norm.state_dict().items()}
    for index, layer in enumerate(layers):
        tensors |= {f"blocks.{index}.{name}": each.clone() for name, each in layer.state_dict().items()}
    if spec.reads_state:
        like = final_norm.weight
        tensors |= {f"{name}_norm.weight": torch.ones_like(like) for name in ("entry", "state")}
        identity = torch.eye(size, dtype=like.dtype, device=like.device)
        tensors["fuse.weight"] = torch.cat((torch.zeros_like(identity), identity), dim=1)
        count = len(spec.further_states)
        tensors |= {f"further_norms.{index}.weight": torch.ones_like(like) for index in range(count)}
        if count:
            tensors["recall.weight"] = torch.zeros_like(identity).repeat(1, count)
    return tensors
