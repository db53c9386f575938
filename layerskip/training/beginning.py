"""What can be known of a training, and refused, before there is a text: writing texts takes hours."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from layerskip.api import Model
from layerskip.errors import InputError, SettingError, UnsupportedModelError
from layerskip.models.adapter import TrainedPart
from layerskip.models.adapter_file import load_adapter
from layerskip.models.decoder import Decoder
from layerskip.models.families import family_of, geometry_of
from layerskip.models.linears import Linears
from layerskip.plan import DraftPlan
from layerskip.training.cutting import cut_config, spread_layers
from layerskip.training.folder import STATE, refuse_folder
from layerskip.training.texts import TrainingTexts
from layerskip.training.writing import ends_of

if TYPE_CHECKING:
    from layerskip.training.draft_model import DraftModelSettings
    from layerskip.training.exit import ExitSettings
    from layerskip.training.recipe import RecipeSettings

__all__ = ["ADAPTER", "PLAN", "RESULTS", "check_draft_model", "check_exit", "check_layerskip", "check_types"]

ADAPTER, PLAN = "adapter.safetensors", "plan.json"
RESULTS = ("config.json", "plan.json", "README.md")  # of a recipe that writes a checkpoint

_Settings = TypeVar("_Settings")


def check_types(texts: Any, settings: Any, kind: type[_Settings]) -> _Settings:
    """Make sure that there are texts, and `settings` of this kind (InputError, SettingError); None: its defaults."""
    if not isinstance(texts, TrainingTexts):
        raise InputError(f"got texts of type {type(texts).__name__}; expected TrainingTexts.")
    settings = kind() if settings is None else settings
    if not isinstance(settings, kind):
        raise SettingError(f"got settings of type {type(settings).__name__}; expected {kind.__name__}.")
    return settings


def check_exit(
    model: Model,
    out: str | os.PathLike[str],
    settings: ExitSettings,
    begin_with: DraftPlan | None,
    resume: bool,
    row_tokens: int,
) -> tuple[ExitSettings, TrainedPart | None]:
    """Make sure that `train_exit` can train on rows of `row_tokens` tokens; arguments and errors as there.

    Returns:
        The settings with what the blocks are that it begins with, and those of `begin_with`, if given.
    """
    _refuse_other_than_model(model)
    refuse_folder(out, "", (PLAN, ADAPTER), resume)
    settings, beginning = _beginning(model, settings, begin_with)
    _refuse_model(model.decoder, settings)
    if beginning is None:
        settings = settings.resolved(model.decoder.num_blocks)
        settings.spec.check(model.decoder.num_blocks)
    if settings.offsets >= row_tokens:
        raise SettingError(
            f"got offsets={settings.offsets} for rows of {row_tokens} tokens; expected fewer offsets than that."
        )
    ends = [token for token in ends_of(model) if token < model.decoder.vocab_size]
    size = settings.vocabulary_size
    if size is not None and size < len(ends):
        raise SettingError(
            f"got vocabulary_size={size}; expected {len(ends)} or more, for the ids that end the model's texts."
        )
    return settings, beginning


def check_draft_model(
    model: Model, out: str | os.PathLike[str], settings: DraftModelSettings, resume: bool
) -> DraftModelSettings:
    """Make sure that `train_draft_model` can train; arguments and errors as there.

    Returns:
        The settings with the number of layers.
    """
    _refuse_other_than_model(model)
    refuse_folder(out, STATE, RESULTS, resume)
    _refuse_spread(model.decoder)
    _refuse_unwritable(model.hf_model)
    settings = settings.resolved(model.decoder.num_blocks)
    assert settings.num_layers is not None
    cut_config(model.hf_model, spread_layers(model.decoder.num_blocks, settings.num_layers))
    return settings


def check_layerskip(
    model: PreTrainedModel, out: str | os.PathLike[str], settings: RecipeSettings, resume: bool
) -> None:
    """What can be known, and refused, before there is a text; arguments and errors as in `train_layerskip`."""
    if not isinstance(model, PreTrainedModel):
        raise InputError(f"got a model of type {type(model).__name__}; expected one of transformers.")
    refuse_folder(out, STATE, RESULTS, resume)
    linears = _refuse_unwritable(model)
    if settings.lora_rank is not None and not linears:
        raise UnsupportedModelError(
            f"got lora_rank={settings.lora_rank} for layers without ordinary linears (GPT-2's are of a kind of their "
            "own); expected some, which the additions are to. Leave lora_rank out, which trains all weights."
        )
    hidden_size = geometry_of(model.config).hidden_size
    if settings.lora_rank is not None and settings.lora_rank > hidden_size:
        raise SettingError(
            f"got lora_rank={settings.lora_rank} for hidden states of {hidden_size} numbers; expected at most as many."
        )


def _refuse_other_than_model(model: Any) -> None:
    if not isinstance(model, Model):
        raise InputError(f"got a model of type {type(model).__name__}; expected what layerskip.load or wrap returned.")


def _refuse_unwritable(model: PreTrainedModel) -> list[nn.Linear]:
    """Make sure that weights like those of `model` can be trained and written as a checkpoint.

    Returns:
        The linears of its layers.
    """
    family, geometry = family_of(type(model).__name__, model.config), geometry_of(model.config)
    if geometry.num_layers < 2 or not all(each.is_floating_point() for each in model.parameters()):
        raise UnsupportedModelError(
            f"got a model of {geometry.num_layers} layers, dtype {model.dtype}; expected 2 layers or more, and "
            "weights that are plain floats. Quantise after the training."
        )
    linears = [each for each in model.get_submodule(family.layers).modules() if isinstance(each, nn.Linear)]
    with torch.device("meta"):
        expected = type(model)(model.config).state_dict().keys()
    if model.state_dict().keys() != expected or not all(
        each.is_plain for each in map(Linears, [*linears, model.get_submodule(family.head)])
    ):
        raise UnsupportedModelError(
            "got a model with linears that are quantised, wrapped or hooked; expected plain ones, which a checkpoint "
            "can be written of. Merge adapters, or load the original weights."
        )
    try:
        model.generation_config.validate(strict=True)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModelError(
            f"got a generation config that transformers refuses to write: {reason} Correct it first."
        ) from error
    return linears


def _beginning(model: Model, settings: ExitSettings, plan: Any) -> tuple[ExitSettings, TrainedPart | None]:
    """The blocks of `plan` as a copy of their own, and the settings with what these blocks are."""
    if plan is None:
        return settings, None
    if not isinstance(plan, DraftPlan):
        raise SettingError(
            f"got begin_with={plan!r:.80}; expected a DraftPlan. DraftPlan.load reads one from its file."
        )
    if plan.adapter is None:
        raise SettingError(
            "got a plan without trained blocks to begin with; expected one that `layerskip train` wrote."
        )
    model.check_plan(plan)
    beginning = load_adapter(plan.adapter, model.hf_model, torch.float32)
    if (beginning.spec.num_heads > 0) != (settings.num_heads > 0):
        got, expected = ("heads", "blocks") if beginning.spec.num_heads else ("blocks", "heads")
        raise SettingError(
            f"got a plan of {got} to begin with, and settings that train {expected}; expected the same. Heads are "
            "trained by --recipe medusa (num_heads), blocks by the others."
        )
    return replace(settings, **beginning.spec.to_dict()), beginning


def _refuse_spread(decoder: Decoder) -> None:
    if decoder.is_spread:
        raise UnsupportedModelError("got a model on several devices; expected one. Load it without device_map.")


def _refuse_model(decoder: Decoder, settings: ExitSettings) -> None:
    _refuse_spread(decoder)
    last = decoder.blocks[decoder.num_blocks - settings.num_blocks :]  # none where heads are trained
    groups = [group for block in last for group in block.linears]
    if not all(each.is_plain for each in (decoder.full_head.linears, *groups)):
        raise UnsupportedModelError(
            "got a model whose head, or one of whose last blocks, has linears that are quantised, wrapped, hooked, or "
            "of a kind of their own (GPT-2's); expected plain ones, which trained blocks can begin with. Merge "
            "adapters, or load the original weights."
        )
