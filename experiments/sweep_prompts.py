"""The prompts of a sweep: as many rows as a batch has, as long as a context is, of real texts or random ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from statistics import median
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from experiments.questions import Question, token_ids
from experiments.subjects import random_prompts
from experiments.sweep_kinds import Setup
from layerskip.errors import InputError, SettingError

__all__ = ["Call", "Prompts", "RandomIds", "Texts"]

RANDOM_CONTEXT = 256  # ids of a prompt, where nobody says


@dataclass(frozen=True)
class Call:
    """The prompts of one call, as token ids.

    Attributes:
        repeats_text: some text of the data had to stand in it twice.
    """

    rows: list[list[int]]
    repeats_text: bool = False


class Prompts(Protocol):
    """Where prompts come from."""

    def calls(self, setup: Setup, number: int) -> list[Call]:
        """`number` calls of the setup's batch and context, as different as can be."""
        ...

    @property
    def usual_context(self) -> int:
        """Tokens of a prompt, where the setup does not say: their median."""
        ...


class RandomIds:
    """Random token ids: for weights that are random, too."""

    usual_context = RANDOM_CONTEXT

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def calls(self, setup: Setup, number: int) -> list[Call]:
        """See `Prompts`."""
        context = setup.context or RANDOM_CONTEXT
        return [Call(prompt.rows) for prompt in random_prompts(self._vocab_size, context, number, setup.batch)]


class Texts:
    """The first turns of questions, of each category in turn.

    Attributes:
        too_long: questions that were left out, because they do not fit into the model.
    """

    def __init__(
        self, questions: Sequence[Question], tokenizer: PreTrainedTokenizerBase | None, most: int, raw: bool = False
    ) -> None:
        """Turn them into tokens.

        Args:
            most: tokens that a prompt may have.
            raw: see `token_ids`.

        Raises:
            SettingError: there is no tokenizer.
            InputError: no question is short enough.
        """
        if tokenizer is None:
            raise SettingError("got a checkpoint without a tokenizer; expected one, for questions are in words.")
        encode: Any = tokenizer
        by_category: dict[str, list[Question]] = {}
        for question in questions:
            by_category.setdefault(question.category, []).append(question)
        mixed = [each for each in chain.from_iterable(zip_longest(*by_category.values())) if each is not None]
        rows = [token_ids(question, (), tokenizer, raw) for question in mixed]
        self._rows = [row for row in rows if len(row) <= most]
        self.too_long = len(rows) - len(self._rows)
        if not self._rows:
            raise InputError(
                f"got {len(rows)} questions of more than {most:,} tokens, which is all that the model has positions "
                "for behind --new-tokens; expected shorter ones."
            )
        self._texts = [
            encode("\n\n".join(question.turns) + "\n\n", add_special_tokens=False)["input_ids"] for question in mixed
        ]

    @property
    def usual_context(self) -> int:
        """See `Prompts`."""
        return int(median(map(len, self._rows)))

    def calls(self, setup: Setup, number: int) -> list[Call]:
        """See `Prompts`; a prompt of another length than its own has other texts of the data before it, or is cut."""
        calls = []
        for first in range(0, number * setup.batch, setup.batch):
            filled = [self._row(index, setup.context) for index in range(first, first + setup.batch)]
            repeats = any(each for _, each in filled) or setup.batch > len(self._rows)
            calls.append(Call([row for row, _ in filled], repeats))
        return calls

    def _row(self, index: int, context: int | None) -> tuple[list[int], bool]:
        """The prompt behind as many of the other texts as make up the length, and whether one of these came twice."""
        row = self._rows[index % len(self._rows)]
        if context is None:
            return list(row), False
        parts, length, used = [row], len(row), 0
        while length < context:
            used += 1
            text = self._texts[(index + used) % len(self._texts)]
            parts.append(text)
            length += len(text)
        return list(chain.from_iterable(reversed(parts)))[-context:], used >= len(self._texts)
