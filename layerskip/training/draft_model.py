"""A small second model for a checkpoint that has none: a few of its layers, taught on its own text what it says.

It drafts as any draft model does (Leviathan et al. 2023), from the tokens alone. Embedding, head and learned positions
are the model's and stay as they are: what is trained is what the other recipes train, layers and the norm behind them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.api import Model
from layerskip.errors import SettingError
from layerskip.models.families import family_of
from layerskip.models.inspection import inspect_model
from layerskip.models.loading import quiet
from layerskip.plan import DraftPlan
from layerskip.speedup import best_draft_length
from layerskip.training.beginning import PLAN, RESULTS, check_draft_model, check_types
from layerskip.training.card import conditions_card, write_surroundings
from layerskip.training.cutting import spread_layers, with_layers
from layerskip.training.distilling import NUM_SIBLINGS, Distillation, DistillSettings, Progress, Student
from layerskip.training.folder import STATE, held_folder, refuse_folder, writing
from layerskip.training.texts import TrainingTexts

__all__ = ["DraftModelSettings", "train_draft_model"]

_SHARE = 8  # of the layers is kept unless told otherwise: as with released pairs, whose sizes are 8 to 20 times apart


@dataclass(frozen=True)
class DraftModelSettings(DistillSettings):
    """On how much is trained, and how.

    Attributes:
        tokens … seed: see `DistillSettings`; scores of the whole vocabulary take memory by `micro_rows`.
        num_layers: of the small model, evenly from the model's (`spread_layers`); None: an eighth, two at least.
    """

    num_layers: int | None = None

    def __post_init__(self) -> None:
        """Check (SettingError)."""
        super().__post_init__()
        if self.num_layers is not None and (type(self.num_layers) is not int or self.num_layers < 1):
            raise SettingError(f"got num_layers={self.num_layers!r}; expected an integer from 1, or None.")

    def resolved(self, num_layers: int) -> DraftModelSettings:
        """The same with what a model of so many layers decides."""
        if self.num_layers is not None:
            return self
        return replace(self, num_layers=min(num_layers - 1, max(2, round(num_layers / _SHARE))))


@torch.inference_mode(False)
@torch.enable_grad()
def train_draft_model(
    model: Model,
    texts: TrainingTexts,
    out: str | Path,
    settings: DraftModelSettings | None = None,
    *,
    resume: bool = False,
    progress: Progress = lambda step, steps, point: None,
) -> DraftPlan:
    """Train a small model that drafts for `model`, and write it as a checkpoint into the folder `out`.

    Beside its weights, in bfloat16, lie the tokenizer, a card (``README.md``) and the plan that is returned
    (``plan.json``). What resuming needs is in the folder ``training``, which may be removed.

    Args:
        texts: rows that the model wrote (`texts.write_texts`).
        resume: go on with the run that was begun in `out`.
        progress: as in `train_exit`.

    Raises:
        SettingError: settings out of range; a folder with another run, with a model, or in which somebody is at work;
            texts that are too few.
        InputError: texts with ids or positions that the model does not have.
        UnsupportedModelError: a model on several devices, with weights or linears that are no plain ones, or of whose
            layers no config can describe a few.
        CheckpointError: a file is damaged, or cannot be written.
    """
    settings = check_types(texts, settings, DraftModelSettings)
    settings = check_draft_model(model, out, settings, resume)
    with held_folder(out) as folder:
        refuse_folder(folder, STATE, RESULTS, resume)  # again: now nobody else can come
        run, small = _run(model, texts, settings, folder / STATE)
        write_surroundings(folder, small.generation_config, model.tokenizer)
        found = run.train(resume, progress)
        for weight in small.parameters():
            weight.data = weight.data.to(torch.bfloat16)
        with writing(folder / "model.safetensors"), quiet():
            small.save_pretrained(folder)
        cost = inspect_model(small).step_parameters / model.inspection.step_parameters
        length, predicted = best_draft_length(found["acceptance_by_offset"], cost)
        made = {
            **found,
            "trained_from": asdict(model.identity),
            "layers": list(_layers(model, settings)),
            "steps": run.schedule.steps,
            "predicted_speedup": predicted,
        }
        # The governor drafts less where that is better, never more.
        plan = DraftPlan.model(
            str(folder),
            num_draft_tokens=max(1, length),
            num_siblings=NUM_SIBLINGS,
            target=model.identity,
            provenance=made,
        )
        with writing(folder / "README.md"):
            (folder / "README.md").write_text(_card(made, cost), encoding="utf-8")
        plan.save(folder / PLAN)
    return plan


def _run(
    model: Model, texts: TrainingTexts, settings: DraftModelSettings, folder: Path
) -> tuple[Distillation, PreTrainedModel]:
    """The run, and the model that is trained by it."""
    small, layers = with_layers(model.hf_model, _layers(model, settings)), _layers(model, settings)
    family = family_of(type(small).__name__, small.config)
    small.requires_grad_(False)
    for name in (family.layers, family.final_norm):
        small.get_submodule(name).requires_grad_(True)

    def outputs(tokens: Tensor, states: Mapping[int, Tensor], offsets: int) -> list[Tensor]:
        """From the tokens alone: whatever the anchor, a draft behind the same tokens is the same."""
        return [small.base_model(input_ids=tokens, use_cache=False).last_hidden_state] * offsets

    student = Student(small, outputs, nn.Identity())  # the norm is in `outputs`
    return Distillation(model, texts, settings, folder, student, made_for={"layers": list(layers)}), small


def _layers(model: Model, settings: DraftModelSettings) -> tuple[int, ...]:
    assert settings.num_layers is not None
    return spread_layers(model.decoder.num_blocks, settings.num_layers)


def _card(made: Mapping[str, Any], cost: float) -> str:
    """What it is, for what, and how good, for people."""
    agreement = ", ".join(f"{each:.1%}" for each in made["acceptance_by_offset"])
    return f"""# A draft model

Layers {", ".join(map(str, made["layers"]))} of a {made["trained_from"]["architecture"]}, with its embedding and head, \
trained to draft for it.
transformers reads it as any other checkpoint (`assistant_model`); layerskip drafts with it by `plan.json`. One of its
steps reads {cost:.1%} of what a step of that model reads. On held-out rows it says what that model says in {agreement}
of the cases (1st, 2nd, … draft of a round, if those before were right).

{conditions_card(made)}"""
