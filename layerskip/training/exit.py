"""Training a draft path on the model's own text: an exit's last blocks, all of a path from the embedding, or heads.

How it learns is in `distilling.py`; here is what the path is, and how it drafts (`rollout.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from layerskip.api import Model
from layerskip.errors import SettingError
from layerskip.models.adapter import AdapterSpec, TrainedPart
from layerskip.models.adapter_file import make_adapter, save_adapter
from layerskip.plan import DraftPlan
from layerskip.speedup import best_draft_length
from layerskip.training.beginning import ADAPTER, PLAN, check_exit, check_types
from layerskip.training.distilling import (
    NUM_SIBLINGS,
    Distillation,
    DistillSettings,
    Progress,
    Student,
    refuse_integers,
)
from layerskip.training.folder import held_folder, refuse_folder, writing
from layerskip.training.rollout import rollout
from layerskip.training.texts import TrainingTexts

__all__ = ["EAGLE", "ExitSettings", "train_exit"]

EAGLE: Mapping[str, Any] = {"further_states": (), "offsets": 1, "state_weight": 10.0}
"""Settings by which a path that begins at the embedding is EAGLE's drafter (Li et al., ICML 2024).

One block reads the token and the model's final state before it, and is trained one offset deep: by regression of the
model's states and, at a tenth of the weight, by the distribution. Two things differ from the paper: the noise U(-0.1,
0.1) on the states that are read in training is left out, and the draft vocabulary is that of the other paths.
"""


@dataclass(frozen=True)
class ExitSettings(DistillSettings):
    """What is trained, on how much, and how.

    Attributes:
        tokens … seed: see `DistillSettings`; with `offsets`, `micro_rows` is what bounds the memory.
        exit_layer: blocks of the model that run before the trained ones; 0: none (jump).
        num_blocks: trained blocks.
        num_heads: heads to train instead of blocks (Medusa; `models/heads.py`): with `num_blocks` 0, and as many as
            `offsets`, each of which has one. They learn apart: a `first_offset_share` is time that the others lack.
        reads_state: whether the path reads the model's final state of the position before.
        further_states: the states that it reads beside that one, by the number of blocks behind them; None: those
            behind a third and two thirds of all, if it reads the final one.
        vocabulary_size: ids that a draft may say, the most frequent of the texts; None: all.
        offsets: drafts that are looked ahead.
        offset_decay: weight of each offset in the loss relative to the one before.
        first_offset_share: of the steps, at the beginning, that look at the first draft only, at a third of the cost.
        state_weight: of a second loss beside the cross-entropy: smooth L1 between what the path puts out and the
            model's own final state there, both divided by that state's root mean square.
    """

    exit_layer: int = 0
    num_blocks: int = 1
    num_heads: int = 0
    reads_state: bool = True
    further_states: tuple[int, ...] | None = None
    vocabulary_size: int | None = 8192
    offsets: int = 3
    offset_decay: float = 0.8
    first_offset_share: float = 0.5
    state_weight: float = 0.0

    def __post_init__(self) -> None:
        """Check.

        Raises:
            SettingError: a value out of range.
        """
        super().__post_init__()
        refuse_integers(self, exit_layer=0, num_blocks=0, num_heads=0, offsets=1)
        if (self.num_blocks > 0) == (self.num_heads > 0) or self.num_heads not in (0, self.offsets):
            raise SettingError(
                f"got num_blocks={self.num_blocks} and num_heads={self.num_heads} for offsets={self.offsets}; expected "
                "blocks and no heads, or no blocks and one head for each offset."
            )
        for name, most in (("offset_decay", 1), ("first_offset_share", 1), ("state_weight", 1000)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
                raise SettingError(f"got {name}={value!r}; expected a number from 0 to {most}.")
        if type(self.reads_state) is not bool:
            raise SettingError(f"got reads_state={self.reads_state!r}; expected True or False.")
        further = self.further_states
        if further is not None and not (isinstance(further, tuple) and all(type(each) is int for each in further)):
            raise SettingError(
                f"got further_states={further!r}; expected a tuple of numbers of blocks, such as (10, 20), or None."
            )
        if self.vocabulary_size is not None and (type(self.vocabulary_size) is not int or self.vocabulary_size < 1):
            raise SettingError(f"got vocabulary_size={self.vocabulary_size!r}; expected an integer from 1, or None.")
        if not self.exit_layer and not self.reads_state:
            raise SettingError(
                "got exit_layer=0 and reads_state=False: a path from one embedding alone knows next to nothing. "
                "Let it read the state, or run some layers."
            )

    @property
    def spec(self) -> AdapterSpec:
        """What is trained."""
        further = self.further_states or ()
        return AdapterSpec(self.exit_layer, self.num_blocks, self.reads_state, further, self.num_heads)

    def resolved(self, num_layers: int) -> ExitSettings:
        """The same with what a model of so many layers decides."""
        if self.further_states is not None:
            return self
        reads_more = self.reads_state and self.num_blocks
        thirds = {num_layers // 3, 2 * num_layers // 3} - {0} if reads_more else set()
        return replace(self, further_states=tuple(sorted(thirds)))

    def weights_at(self, step: int, steps: int) -> list[float]:
        """The weight of each offset in the loss of a step of `steps`."""
        offsets = 1 if step < self.first_offset_share * steps else self.offsets
        return [self.offset_decay**each for each in range(offsets)]


@torch.inference_mode(False)
@torch.enable_grad()
def train_exit(
    model: Model,
    texts: TrainingTexts,
    out: str | Path,
    settings: ExitSettings | None = None,
    *,
    begin_with: DraftPlan | None = None,
    resume: bool = False,
    progress: Progress = lambda step, steps, point: None,
) -> DraftPlan:
    """Train a draft path for `model`, and write it: ``plan.json`` and ``adapter.safetensors`` in the folder `out`.

    Args:
        texts: rows that the model wrote (`texts.write_texts`).
        begin_with: a trained plan whose blocks are trained further, say on other texts; the `spec` of the settings is
            then that of its blocks. None: begin with the model's own last blocks.
        resume: go on with the run that was begun in `out`.
        progress: is told steps done, steps in all, and the newest point of the curve: with "agreement", how often the
            path says on held-out text what the model says, by offset, if the drafts before were the text's own tokens.

    Raises:
        SettingError: settings out of range; a folder with another run, with results of something else, or in which
            somebody is at work; texts that are too few.
        InputError: texts with ids or positions that the model does not have.
        UnsupportedModelError: a model on several devices, or with last blocks that are no plain linears.
        CheckpointError: the checkpoint is damaged, or cannot be written; there are no blocks to begin with.
        PlanMismatchError: these are of another model.
    """
    settings = check_types(texts, settings, ExitSettings)
    settings, beginning = check_exit(model, out, settings, begin_with, resume, texts.tokens.shape[1])
    with held_folder(out) as folder:
        refuse_folder(folder, "", (PLAN, ADAPTER), resume)  # again: now nobody else can come
        run, adapter = _run(model, texts, settings, folder, beginning)
        provenance = run.train(resume, progress)
        with writing(folder / ADAPTER):
            save_adapter(adapter, folder / ADAPTER, torch.bfloat16)
        provenance["settings"]["further_states"] = list(settings.spec.further_states)  # for JSON
        plan = DraftPlan(
            exit_layer=settings.exit_layer,
            adapter=str(folder / ADAPTER),
            draft_vocabulary=run.vocabulary,
            target=model.identity,
            provenance={
                **provenance,
                "begun_with": None if begin_with is None else _without_curve(begin_with.provenance),
            },
        )
        acceptance, cost, heads = provenance["acceptance_by_offset"], model.draft_cost(plan), settings.num_heads
        # Heads draft all at once: one cost for any number, up to theirs.
        length, _ = best_draft_length(acceptance, *((0.0, 1 + cost, heads) if heads else (cost,)))
        # The governor drafts less where that is better, never more.
        plan = replace(plan, num_draft_tokens=max(1, length), num_siblings=NUM_SIBLINGS)
        plan.save(folder / PLAN)
    return plan


def _run(
    model: Model, texts: TrainingTexts, settings: ExitSettings, folder: Path, beginning: TrainedPart | None = None
) -> tuple[Distillation, TrainedPart]:
    """The run, and what is trained by it."""
    adapter = beginning or make_adapter(model.hf_model, settings.spec)
    adapter.modules.float().requires_grad_(True)
    adapter.read()
    student = Student(
        adapter.modules,
        lambda tokens, states, offsets: rollout(model.decoder, adapter, states, offsets),
        adapter.final_norm,
        (settings.exit_layer, *adapter.kept_states),
        settings.offsets,
        settings.weights_at,
        settings.state_weight,
        settings.num_heads or None,
        lag=1 if settings.num_heads else 0,  # heads read the state before the token
    )
    made_for = {"begun_with": None if beginning is None else _digest(beginning)}
    run = Distillation(
        model, texts, settings, folder, student, vocabulary_size=settings.vocabulary_size, made_for=made_for
    )
    return run, adapter


def _digest(adapter: TrainedPart) -> str:
    """Of its weights."""
    digest = hashlib.sha256()
    for name, each in sorted(adapter.modules.state_dict().items()):
        digest.update(name.encode() + each.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def _without_curve(provenance: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in provenance.items() if name != "curve"}
