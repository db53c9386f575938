"""Small trainings for tests: settings, texts at random, and a model that may be spoilt."""

import copy

import numpy as np
import torch

import layerskip
from layerskip.training import ExitSettings, RecipeSettings, TrainingTexts, WritingSettings
from tests.tiny_models import VOCAB_SIZE, tiny_model
from tests.toy_tokenizer import character_tokenizer

SMALL = ExitSettings(
    vocabulary_size=40, tokens=16 * 4 * 2, batch_tokens=64, held_out_rows=2, evaluate_every=2, precision="float32"
)
RECIPE = RecipeSettings(tokens=128, batch_tokens=64, held_out_rows=2, precision="float32")
WRITING = WritingSettings(tokens=100, row_tokens=48, batch_rows=2)


def some_texts(rows=12, row_tokens=16):
    tokens = np.random.default_rng(0).integers(3, VOCAB_SIZE, (rows, row_tokens))
    return TrainingTexts(tokens, np.ones(tokens.shape, dtype=bool))


def wrapped(dtype=torch.float32, **config):
    model = copy.deepcopy(tiny_model("llama", dtype=dtype))
    model.generation_config.update(**config)
    return layerskip.wrap(model, character_tokenizer())
