"""Prompts and results as JSON values: what a line of a file of prompts may say, and what is written about a result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerskip.errors import InputError

if TYPE_CHECKING:
    from layerskip.result import GenerationResult

__all__ = ["PromptLine", "as_inputs", "read_prompts", "read_texts", "result_record"]

_EXPECTED = (
    'expected a JSON string, or an object with one of "prompt" (a string), "messages" ([{"role": …, "content": …}, …]) '
    'and "turns" (a list of strings, of which the first is used)'
)


@dataclass(frozen=True)
class PromptLine:
    """One line of a file of prompts.

    Attributes:
        number: of the line, from 1.
        content: a string, or a list of chat messages.
        id: carried over to the result; None: the line has none.
        has_turns: the line had several turns to choose from.
    """

    number: int
    content: Any
    id: Any = None
    has_turns: bool = False

    def to_dict(self) -> dict[str, Any]:
        """How a result names the prompt that it belongs to."""
        kind = "prompt" if isinstance(self.content, str) else "messages"
        return {"line": self.number} | ({"id": self.id} if self.id is not None else {}) | {kind: self.content}


def read_prompts(file: Path) -> list[PromptLine]:
    """Read a file of prompts; blank lines are passed over.

    Raises:
        InputError: it cannot be read, is empty, or some line (its number is named) holds no prompt.
    """
    try:
        lines = file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise InputError(f"cannot read the prompts {file}: {error.strerror or error}. Check the path.") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                prompts.append(_prompt_line(number, json.loads(line.decode("utf-8"))))
            except (ValueError, RecursionError) as error:  # InputError and JSON's and Unicode's errors are ValueErrors
                reason = error if isinstance(error, InputError) else f"it is not JSON ({error}); {_EXPECTED}."
                raise InputError(f"line {number} of {file}: {reason}") from error
    if not prompts:
        raise InputError(f"got no prompt in {file}; expected one a line: {_EXPECTED}.")
    return prompts


def read_texts(file: Path) -> list[str]:
    """All that a file of prompts, or of plain text, says.

    Raises:
        InputError: it cannot be read, or is empty.
    """
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the texts {file}: {getattr(error, 'strerror', None) or error}.") from error
    if not content.strip():
        raise InputError(f"got {file}, which is empty; expected text, or one prompt a line as JSON.")
    try:
        lines = [json.loads(line) for line in content.splitlines() if line.strip()]
    except ValueError:
        return [content]
    return [text for line in lines for text in _strings(line)]


def _strings(value: Any) -> list[str]:
    """Every string in a JSON value, its keys left out."""
    if isinstance(value, Mapping):
        return [text for each in value.values() for text in _strings(each)]
    if isinstance(value, list):
        return [text for each in value for text in _strings(each)]
    return [value] if isinstance(value, str) else []


def _prompt_line(number: int, value: Any) -> PromptLine:
    if isinstance(value, str):
        return PromptLine(number, value)
    kinds = [kind for kind in ("prompt", "messages", "turns") if isinstance(value, Mapping) and kind in value]
    if len(kinds) != 1:
        found = f"the keys {sorted(value)[:8]}" if isinstance(value, Mapping) else f"a {type(value).__name__}"
        raise InputError(f"got {found}; {_EXPECTED}.")
    content, (kind,) = value[kinds[0]], kinds
    is_list = isinstance(content, list) and len(content) > 0
    is_valid = {
        "prompt": isinstance(content, str),
        "messages": is_list and all(_is_message(each) for each in content),
        "turns": is_list and all(isinstance(each, str) for each in content),
    }
    if not is_valid[kind]:
        raise InputError(f"got {kind} {json.dumps(content)[:80]}; {_EXPECTED}.")
    is_turns = kind == "turns"
    return PromptLine(number, content[0] if is_turns else content, value.get("id"), has_turns=is_turns)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and "content" in value


def as_inputs(content: Any, chat: bool | None, system: str | None = None) -> Any:
    """A prompt in the form in which `Model.generate` takes it; only a string is put into messages by `chat`."""
    if not chat or not isinstance(content, str):
        return content
    messages = [{"role": "system", "content": system}] if system is not None else []
    return [*messages, {"role": "user", "content": content}]


def result_record(result: GenerationResult) -> dict[str, Any]:
    """The result of a call with one row."""
    return {
        "text": result.text,
        "token_ids": result.new_token_ids[0],
        "drafted": result.drafted[0],
        "finish_reason": result.finish_reasons[0],
        "stats": result.stats.to_dict(),
        "settings": result.settings,
        "plan": result.plan.to_dict() if result.plan is not None else None,
    }
