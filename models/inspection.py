"""What a checkpoint is made of, and what a draft on it would cost: facts from its config, without its weights.

It knows the shapes and counts of a model, not how drafts are run nor how often they are accepted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from layerskip.models.checkpoint_files import explained, locate
from layerskip.models.decoder import Step
from layerskip.models.families import family_of, geometry_of, layers_of
from layerskip.models.family import Family
from layerskip.models.loading import parse_dtype, quiet, read_config
from layerskip.models.stored import count_values

__all__ = ["Inspection", "inspect_checkpoint", "inspect_model"]


@dataclass(frozen=True)
class Inspection:
    """Architecture and sizes of a model. Parameters are counted once each, wherever they are used.

    Attributes:
        architecture, family: as transformers names the class and the model type.
        dtype: of the weights, and so of the KV cache.
        rope: its kind and numbers, for each type of layers where they differ; empty: positions are not rotated.
        windows: for each layer how many newest positions its attention sees; None: all.
        rotated: for each layer whether its queries and keys are rotated by their positions.
        attention_parameters, mlp_parameters: of each layer's two sub-blocks, norms included; a norm that both read is
            counted with attention.
        mlp_step_parameters: of these, those that one token's step reads: of experts, the chosen.
        num_experts, experts_per_token: of a layer that has experts, and how many of them a token comes to; 0: no layer
            has any.
        embedding_parameters: of the token embedding.
        position_parameters: of learned positions.
        head_parameters: of the final norm and the head, which every step runs, drafts too.
        tied: the head's matrix is the embedding's.
    """

    architecture: str
    family: str
    num_layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    dtype: str
    rope: dict[str, Any]
    windows: tuple[int | None, ...]
    rotated: tuple[bool, ...]
    attention_parameters: tuple[int, ...]
    mlp_parameters: tuple[int, ...]
    mlp_step_parameters: tuple[int, ...]
    num_experts: int
    experts_per_token: int
    embedding_parameters: int
    position_parameters: int
    head_parameters: int
    tied: bool

    @property
    def parameters(self) -> int:
        """Of the whole model; a tied head's matrix is not counted a second time."""
        blocks = sum(self.attention_parameters) + sum(self.mlp_parameters)
        shared = self.embedding_parameters if self.tied else 0
        return blocks + self.embedding_parameters + self.position_parameters + self.head_parameters - shared

    @property
    def step_parameters(self) -> int:
        """Read by one plain step: all blocks and the head. (Of the embedding a step reads one line.)"""
        return sum(self.attention_parameters) + sum(self.mlp_step_parameters) + self.head_parameters

    @property
    def head_blocks(self) -> float:
        """The head in blocks of mean size: `r` of `draft_cost`."""
        return self.head_parameters * self.num_layers / (self.step_parameters - self.head_parameters)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the cache for one position of one row, over all layers."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return 2 * self.num_layers * self.kv_heads * self.head_dim * dtype.itemsize

    def draft_cost(self, path: Sequence[Step], scored_ids: int | None = None) -> float:
        """Cost of a draft step along `path` in plain steps, by the parameters that each reads.

        This is `c` of Leviathan et al. 2023, thm. 3.8: with blocks of equal size (kept + r) / (all + r), where `r` is
        the head in blocks (`head_blocks`). It is what a step costs where reading weights is what takes the time (small
        batches, short contexts); with a large vocabulary the head keeps it far above kept / all.

        Args:
            scored_ids: of a draft vocabulary; None: all.
        """
        head = self.head_parameters * (1.0 if scored_ids is None else scored_ids / self.vocab_size)
        kept = sum(
            self.attention_parameters[layer] * attention + self.mlp_step_parameters[layer] * mlp
            for layer, attention, mlp in path
        )
        return (kept + head) / self.step_parameters


def inspect_model(model: PreTrainedModel) -> Inspection:
    """Describe a transformers model (``layerskip.Model.hf_model``); its weights may be on the meta device.

    Raises:
        UnsupportedModelError: its architecture is not in the table of families, or its config asks for what that
            refuses.
    """
    architecture, config = type(model).__name__, model.config
    family, geometry = family_of(architecture, config), geometry_of(config)
    described, rotary = layers_of(config, family), getattr(config, "rope_parameters", None)
    layers = list(model.get_submodule(family.layers).children())
    embedding, head = model.get_submodule(family.embedding), model.get_submodule(family.head)
    num_experts = max(_count_experts(layer, family) for layer in layers)
    return Inspection(
        architecture=architecture,
        family=config.model_type,
        num_layers=len(layers),
        hidden_size=geometry.hidden_size,
        heads=geometry.num_heads,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        vocab_size=geometry.vocab_size,
        max_positions=geometry.max_positions,
        dtype=str(next(embedding.parameters()).dtype).removeprefix("torch."),
        rope=dict(rotary) if rotary and family.rotary else {},
        windows=tuple(each.window for each in described),
        rotated=tuple(each.rotary is not None for each in described),
        attention_parameters=tuple(count_values(layer) - _count_mlp(layer, family) for layer in layers),
        mlp_parameters=tuple(_count_mlp(layer, family) for layer in layers),
        mlp_step_parameters=tuple(
            _count_mlp(layer, family) - _count_unchosen(layer, family, config) for layer in layers
        ),
        num_experts=num_experts,
        experts_per_token=config.num_experts_per_tok if num_experts else 0,
        embedding_parameters=count_values(embedding),
        position_parameters=model.get_parameter(family.positions).numel() if family.positions else 0,
        head_parameters=count_values(head) + count_values(model.get_submodule(family.final_norm)),
        tied=getattr(head, "weight", head) is embedding.weight,
    )


def inspect_checkpoint(
    checkpoint: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "auto",
    gguf_file: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Inspection:
    """Describe a checkpoint by its config alone: weights are neither read nor downloaded (but a GGUF file is whole).

    Arguments and errors as in `layerskip.load`.
    """
    wanted = parse_dtype(dtype)
    source = locate(checkpoint, gguf_file, revision, with_code=trust_remote_code)
    config = read_config(source, trust_remote_code)
    if wanted == "auto":
        wanted = config.dtype or torch.float32
    with quiet(), explained(f"build a model from the config of {source.name!r}", "Is a number in it wrong?"):
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=wanted, trust_remote_code=trust_remote_code)
    return inspect_model(model)


def _count_mlp(layer: nn.Module, family: Family) -> int:
    """Parameters of the second sub-block: the MLP and its norms, but for one that attention has too."""
    parts = {family.mlp_norm, family.mlp_out_norm, *(name.split(".")[0] for name in (*family.gate_up, family.down))}
    parts -= {None, family.attention_norm}
    return sum(count_values(layer.get_submodule(name)) for name in parts if name is not None)


def _experts(layer: nn.Module, family: Family) -> list[nn.Parameter]:
    """The matrices of all experts, each stacked (experts, …); none where there are no experts."""
    experts = dict(layer.named_modules()).get(family.experts or "")
    return list(experts.parameters()) if family.experts and experts is not None else []


def _count_experts(layer: nn.Module, family: Family) -> int:
    return next((len(each) for each in _experts(layer, family)), 0)


def _count_unchosen(layer: nn.Module, family: Family, config: Any) -> int:
    """Parameters of the experts that one token does not come to; 0 where there are none."""
    return sum(each.numel() * (len(each) - config.num_experts_per_tok) // len(each) for each in _experts(layer, family))
