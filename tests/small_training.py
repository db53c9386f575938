"""Small trainings for tests: settings, texts at random, and a model that may be spoilt."""

import copy
import signal
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import layerskip
from layerskip.training import (
    DraftModelSettings,
    ExitSettings,
    RecipeSettings,
    TrainingTexts,
    WritingSettings,
    train_exit,
)
from tests.tiny_models import VOCAB_SIZE, tiny_model
from tests.toy_tokenizer import character_tokenizer

SMALL = ExitSettings(
    vocabulary_size=40, tokens=16 * 4 * 2, batch_tokens=64, held_out_rows=2, evaluate_every=2, precision="float32"
)
DRAFT = DraftModelSettings(tokens=128, batch_tokens=64, held_out_rows=2, precision="float32")
RECIPE = RecipeSettings(tokens=128, batch_tokens=64, held_out_rows=2, precision="float32")
WRITING = WritingSettings(tokens=100, row_tokens=48, batch_rows=2)


def some_texts(rows=12, row_tokens=16):
    tokens = np.random.default_rng(0).integers(3, VOCAB_SIZE, (rows, row_tokens))
    return TrainingTexts(tokens, np.ones(tokens.shape, dtype=bool))


def wrapped(dtype=torch.float32, **config):
    model = copy.deepcopy(tiny_model("llama", dtype=dtype))
    model.generation_config.update(**config)
    return layerskip.wrap(model, character_tokenizer())


def trained_once(model, tmp_path_factory):
    """A plan for `model`, and its folder."""
    folder = tmp_path_factory.mktemp("trained")
    return train_exit(model, some_texts(), folder, SMALL), folder


class WrappedLinear(torch.nn.Module):
    """As an adapter of PEFT stands in a linear's place."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.weight = inner, inner.weight

    def forward(self, inputs):
        return 2 * self.inner(inputs)


@contextmanager
def interrupted(at):
    """A `progress` that does behind step `at` what Ctrl-C does; the training in the block is to end by it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield lambda step, *_: signal.raise_signal(signal.SIGINT) if step == at else None
    finally:
        signal.signal(signal.SIGINT, before)
