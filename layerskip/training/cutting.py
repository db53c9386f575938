"""A model of the same class with a few of another's layers: its config, and its weights.

Nothing here knows what such a model is for.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from layerskip.errors import SettingError, UnsupportedModelError
from layerskip.models.families import family_of, layers_of

__all__ = ["cut_config", "spread_layers", "with_layers"]

_BY_LAYER = ("layer_types", "no_rope_layers")  # lists in configs, an entry a layer
_OF_LAYERS = ("mlp_only_layers",)  # lists of layers


def spread_layers(num_layers: int, kept: int) -> tuple[int, ...]:
    """Which `kept` of `num_layers` layers, evenly, with the first and the last; of one the last.

    The first make of embeddings what the others read, the last what the head reads: neither does the other's work.

    Raises:
        SettingError: it would be none, or all.
    """
    if type(kept) is not int or not 1 <= kept < num_layers:
        raise SettingError(f"got num_layers={kept!r} of a model of {num_layers}; expected from 1 to {num_layers - 1}.")
    if kept == 1:
        return (num_layers - 1,)
    return tuple(round(index * (num_layers - 1) / (kept - 1)) for index in range(kept))


def cut_config(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedConfig:
    """The config of a model with only these layers of `model`, ascending.

    Raises:
        UnsupportedModelError: a config cannot say so of this model, because what a layer is follows from its place.
    """
    config: Any = copy.deepcopy(model.config)
    family = family_of(type(model).__name__, config)
    for name in _BY_LAYER:
        if (each_layer := getattr(config, name, None)) is not None:
            setattr(config, name, [each_layer[layer] for layer in layers])
    for name in _OF_LAYERS:
        if (named := getattr(config, name, None)) is not None:
            setattr(config, name, [index for index, layer in enumerate(layers) if layer in named])
    config.num_hidden_layers = len(layers)
    before, now = (layers_of(each, family) for each in (model.config, config))
    is_same = now == [replace(before[layer], index=index) for index, layer in enumerate(layers)]
    if is_same:
        with torch.device("meta"):
            shapes = {name: each.shape for name, each in type(model)(config).state_dict().items()}
        is_same = shapes == {name: each.shape for name, each in _kept(model, layers).items()}
    if not is_same:
        raise UnsupportedModelError(
            f"got a model of architecture {type(model).__name__!r} in whose config a layer's kind follows from its "
            f"place, so that none can describe only the layers {', '.join(map(str, layers))}. Choose another number "
            "of layers, or train a path (--recipe jump)."
        )
    return cast(PreTrainedConfig, config)


def with_layers(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A model of the class of `model` with copies of these of its layers, and of all else; in float32, not training.

    Errors as `cut_config` has them.
    """
    config = cut_config(model, layers)
    with torch.random.fork_rng(devices=[]):  # what the class draws at first is overwritten
        made: Any = type(model)(config)
    for weight in made.parameters():  # no buffers: those of rotary embeddings keep their precision
        weight.data = weight.data.float()
    made.load_state_dict(_kept(model, layers))
    made.generation_config = copy.deepcopy(model.generation_config)
    return cast(PreTrainedModel, made.to(model.device).eval())


def _kept(model: PreTrainedModel, layers: Sequence[int]) -> dict[str, torch.Tensor]:
    """What `model` has by name, without its other layers; these are counted anew."""
    prefix = family_of(type(model).__name__).layers + "."
    kept = {}
    for name, each in model.state_dict().items():
        if name.startswith(prefix):
            layer, _, inner = name.removeprefix(prefix).partition(".")
            if int(layer) not in layers:
                continue
            name = f"{prefix}{list(layers).index(int(layer))}.{inner}"
        kept[name] = each
    return kept
