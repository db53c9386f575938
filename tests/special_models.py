"""Tiny models made for one purpose each; treat them as read-only."""

import copy
import functools
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from layerskip.models.adapter import Adapter, AdapterSpec
from layerskip.models.adapter_file import make_adapter
from layerskip.models.families import family_of
from tests.tiny_models import TINY_CONFIGS, VOCAB_SIZE, tiny_model


def last_parameters(model: PreTrainedModel, layer: int, kind: str) -> list[torch.nn.Parameter]:
    """What the "attention" or the "mlp" of a layer multiplies by last, and adds: where all are 0, it adds nothing."""
    family = family_of(type(model).__name__, model.config)
    own = model.get_submodule(family.layers)[layer]
    if kind == "attention":
        return list(own.get_submodule(family.output).parameters())
    if family.experts and "experts" in dict(own.get_submodule(family.mlp).named_children()):
        experts = own.get_submodule(family.experts)
        return [each for name, each in experts.named_parameters() if name.startswith("down_proj")]
    return list(own.get_submodule(family.down).parameters())


@functools.cache
def agreeing_model(family: str, scale: float = 0.2) -> PreTrainedModel:
    """`tiny_model(family)` with what each layer but the first adds scaled by `scale`.

    A random model rejects nearly every draft of its own; here rounds of every outcome occur. The later layers still
    matter: leaving them out changes some tokens.
    """
    model = copy.deepcopy(tiny_model(family))
    row = family_of(type(model).__name__, model.config)
    layers = model.get_submodule(row.layers)
    with torch.no_grad():
        for index in range(1, len(layers)):
            for kind, out_norm in (("attention", row.attention_out_norm), ("mlp", row.mlp_out_norm)):
                for parameter in last_parameters(model, index, kind):
                    parameter.mul_(scale)
                if out_norm is not None:  # which would undo that
                    weight = layers[index].get_submodule(out_norm).weight
                    off = 1 if "gemma" in family else 0  # Gemma's factor is one more than its weight
                    weight.copy_((weight + off) * scale - off)
    return model


@functools.cache
def with_config(family: str, **changes: object) -> PreTrainedModel:
    """The tiny model of that row with other values in its config."""
    config = type(TINY_CONFIGS[family])(**(TINY_CONFIGS[family].to_dict() | changes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    return model.requires_grad_(False)


@functools.cache
def llama_with(*, max_positions: int = 160, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> PreTrainedModel:
    """The tiny Llama with another number of positions or ids."""
    changes = {"max_position_embeddings": max_positions, "vocab_size": vocab_size}
    config = type(TINY_CONFIGS["llama"])(**(TINY_CONFIGS["llama"].to_dict() | changes))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    return model.requires_grad_(False)


def adapter_of(model: PreTrainedModel, spec: AdapterSpec, scale: float = 0.05) -> Any:
    """An adapter that was moved away from where training begins, so that no part of it is an identity."""
    adapter = make_adapter(model, spec)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in adapter.modules.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return adapter


@torch.no_grad()
def likely_adapter(model: PreTrainedModel, spec: AdapterSpec, hears: float = 0.1) -> Adapter:
    """An adapter of an `agreeing_model` some of whose drafts stand: it `hears` the state so much, and a jump ends by
    the layer that adds most.
    """
    adapter = adapter_of(model, spec, scale=0.01)
    parts: Any = adapter.modules
    if spec.reads_state:
        parts["fuse"].weight.mul_(hears)
    if not spec.exit_layer:
        layers: Any = model.get_submodule(family_of(type(model).__name__).layers)
        parts["blocks"][0].load_state_dict(layers[0].state_dict())
    return adapter
