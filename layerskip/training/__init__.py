"""Training what an untrained checkpoint lacks: draft paths that pay, on text that the model writes itself.

`write_texts` has the model write. `train_exit` trains a path on that and writes a plan; the checkpoint is not changed.
`train_draft_model` trains a small second model of a few of its layers, by the same code.
`train_layerskip` trains a copy of the checkpoint itself, so that its own early exits become drafts.
"""

from __future__ import annotations

from layerskip.training.draft_model import DraftModelSettings, train_draft_model
from layerskip.training.exit import EAGLE, ExitSettings, train_exit
from layerskip.training.loop import Point
from layerskip.training.recipe import RecipeSettings, train_layerskip
from layerskip.training.texts import TrainingTexts
from layerskip.training.writing import WritingSettings, write_texts

__all__ = [
    "EAGLE",
    "DraftModelSettings",
    "ExitSettings",
    "Point",
    "RecipeSettings",
    "TrainingTexts",
    "WritingSettings",
    "train_draft_model",
    "train_exit",
    "train_layerskip",
    "write_texts",
]
