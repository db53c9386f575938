"""What is measured: checkpoints and random geometries, for us and for transformers, and the prompts they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

import layerskip
from experiments.questions import read_questions, token_ids
from layerskip.errors import InputError, SettingError
from layerskip.models.loading import quiet
from layerskip.models.synthetic import GEOMETRIES, synthetic_model
from layerskip.static_pool import StaticPool

__all__ = ["Prompt", "Subject", "device_of", "random_prompts", "read_prompts"]

KEPT_ROUNDS = 24
RANDOM = "random ids"  # the category of prompts without text


@dataclass(frozen=True)
class Subject:
    """A model by name, to be loaded once for us and once, as an ordinary model, for transformers.

    Attributes:
        name: of one of `GEOMETRIES`, or a checkpoint folder or hub id.
        agreement, from_block, redundant: see `synthetic_model`.
    """

    name: str
    dtype: torch.dtype
    device: torch.device
    agreement: float | None = None
    from_block: int | None = None
    redundant: Mapping[str, Sequence[int]] | None = None

    @property
    def is_geometry(self) -> bool:
        """Whether it has random weights, and so no tokenizer."""
        return self.name in GEOMETRIES

    def load(self) -> layerskip.Model:
        """For us, its weights in the form that decodes fastest.

        Raises:
            LayerSkipError: it cannot be loaded.
        """
        if self.is_geometry:
            model = layerskip.wrap(self._synthetic())
            model.identity  # noqa: B018 - reads the weights, while they can be read
            model.decoder.prepare(in_place=True)  # nobody else has seen them
        elif self.agreement is not None:
            raise SettingError(
                f"got an agreement to plant into the checkpoint {self.name!r}; expected a geometry "
                f"({', '.join(GEOMETRIES)})."
            )
        else:
            model = layerskip.load(self.name, dtype=self.dtype, device=self.device)
        # Arms take turns: with room for the rounds of fewer plans each call would record its own again.
        model.static_pool = StaticPool(most=KEPT_ROUNDS)
        return model

    def load_for_transformers(self) -> PreTrainedModel:
        """For transformers, as anyone would load it."""
        if self.is_geometry:
            return self._synthetic()
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(self.name, dtype=self.dtype)
        model: PreTrainedModel = loaded.to(self.device).eval()
        return model

    def _synthetic(self) -> PreTrainedModel:
        return synthetic_model(
            self.name,
            self.dtype,
            self.device,
            agreement=self.agreement,
            from_block=self.from_block,
            redundant=self.redundant,
        )


@dataclass(frozen=True)
class Prompt:
    """The rows of one call, as token ids, all of one category."""

    category: str
    rows: list[list[int]]


def read_prompts(file: Path, tokenizer: PreTrainedTokenizerBase | None, a_category: int, batch: int) -> list[Prompt]:
    """The first turns of `a_category` calls of each category, spread evenly over the file.

    Where a category has fewer questions than the rows that are wanted, they are used again.

    Raises:
        InputError: the file cannot be read (`read_questions`), or there is no tokenizer.
    """
    if tokenizer is None:
        raise InputError(f"got prompts in words ({file.name}) for a model without a tokenizer; expected random ids.")
    questions = read_questions(file)
    prompts = []
    for category in dict.fromkeys(question.category for question in questions):
        own = [question for question in questions if question.category == category]
        wanted = a_category * batch if batch > 1 else min(a_category, len(own))
        spread = min(wanted, len(own))
        chosen = [own[index % spread * len(own) // spread] for index in range(wanted)]
        rows = [token_ids(question, (), tokenizer) for question in chosen]
        prompts += [Prompt(category, rows[start : start + batch]) for start in range(0, wanted, batch)]
    return prompts


def random_prompts(vocab_size: int, context: int, count: int, batch: int) -> list[Prompt]:
    """`count` calls of `batch` rows of random ids, all different."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocab_size, (count, batch, context), generator=generator)
    return [Prompt(RANDOM, rows) for rows in ids.tolist()]


def device_of(name: str) -> torch.device:
    """The device called `name`.

    Raises:
        SettingError: this machine has none of that name.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SettingError(
            f"got --device {name}; expected a device of this machine: {str(error).splitlines()[0]}"
        ) from error
    return device
