"""What the search looks at: prompts, and what the model itself answers to them.

A draft is accepted when it says what the model says, so acceptance is measured on the model's own answers only. One
half of the texts is searched on, the other is for the report.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Calibration", "Text"]


@dataclass(frozen=True)
class Text:
    """A prompt and the model's own continuation of it, as token ids; neither is empty."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def num_positions(self) -> int:
        """Tokens of the continuation that a draft could have said: all but the first, which the prompt's pass gives."""
        return len(self.continuation) - 1

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All of it."""
        return self.prompt + self.continuation


@dataclass(frozen=True)
class Calibration:
    """Texts to search on, and others to report on.

    Attributes:
        settings: how they were written: source, sampling, seed.
    """

    search: tuple[Text, ...]
    held_out: tuple[Text, ...]
    settings: dict[str, Any]

    @property
    def digest(self) -> str:
        """Of all token ids, by which two calibrations are told apart."""
        content = self.to_dict()
        return hashlib.sha256(json.dumps([content["search"], content["held_out"]]).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "search": [[list(text.prompt), list(text.continuation)] for text in self.search],
            "held_out": [[list(text.prompt), list(text.continuation)] for text in self.held_out],
            "settings": self.settings,
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Calibration:
        """Read what `to_dict` wrote."""
        return cls(_texts(content["search"]), _texts(content["held_out"]), content["settings"])


def _texts(rows: Iterable[Sequence[Sequence[int]]]) -> tuple[Text, ...]:
    return tuple(Text(tuple(prompt), tuple(continuation)) for prompt, continuation in rows)
