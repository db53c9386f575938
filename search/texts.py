"""What the search looks at: prompts, and what the model itself answers to them.

A draft is accepted when it says what the model says, so acceptance is measured on the model's own answers only. Some
texts are searched on, others reported on, and others again say which ids are frequent: a draft vocabulary covers the
texts that it was counted on better than any other.
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
    """Texts for three uses.

    Attributes:
        search: to compare candidates on.
        held_out: to report on.
        frequency: to count ids in, for draft vocabularies.
        settings: how they were written: source, sampling, seed.
    """

    search: tuple[Text, ...]
    held_out: tuple[Text, ...]
    frequency: tuple[Text, ...]
    settings: dict[str, Any]

    @property
    def digest(self) -> str:
        """Of all token ids, by which two calibrations are told apart."""
        content = self.to_dict()
        texts = [content[name] for name in ("search", "held_out", "frequency")]
        return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "search": [[list(text.prompt), list(text.continuation)] for text in self.search],
            "held_out": [[list(text.prompt), list(text.continuation)] for text in self.held_out],
            "frequency": [[list(text.prompt), list(text.continuation)] for text in self.frequency],
            "settings": self.settings,
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Calibration:
        """Read what `to_dict` wrote."""
        search, held_out, frequency = (_texts(content[name]) for name in ("search", "held_out", "frequency"))
        return cls(search, held_out, frequency, content["settings"])


def _texts(rows: Iterable[Sequence[Sequence[int]]]) -> tuple[Text, ...]:
    return tuple(Text(tuple(prompt), tuple(continuation)) for prompt, continuation in rows)
