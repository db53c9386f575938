"""Training what an untrained checkpoint lacks: draft paths that pay, on text that the model writes itself.

`write_texts` has the model write, `train_exit` trains a path on that and writes a plan. The checkpoint is not changed.
"""

from __future__ import annotations

from layerskip.training.exit import ExitSettings, train_exit
from layerskip.training.loop import Point
from layerskip.training.texts import TrainingTexts
from layerskip.training.writing import WritingSettings, write_texts

__all__ = ["ExitSettings", "Point", "TrainingTexts", "WritingSettings", "train_exit", "write_texts"]
