"""Every error a user can meet, each saying what was got, what was expected and what to do.

A leaf: it imports nothing of the project, so that all packages can raise from it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "DecodingError",
    "InputError",
    "LayerSkipError",
    "PlanError",
    "PlanMismatchError",
    "SearchError",
    "SettingError",
    "UnknownSettingError",
    "UnsupportedModelError",
    "did_you_mean",
]


class LayerSkipError(Exception):
    """Base of all errors that the runtime raises on purpose."""


class UnsupportedModelError(LayerSkipError, ValueError):
    """The checkpoint's architecture (or a feature of its config) is not in the table of families."""


class CheckpointError(LayerSkipError, OSError):
    """A checkpoint is missing, incomplete, corrupt, or stored in a form that is refused."""


class PlanError(LayerSkipError, ValueError):
    """A draft plan, or the file that should hold one, is not valid."""


class PlanMismatchError(PlanError):
    """A valid draft plan that does not fit this model."""


class InputError(LayerSkipError, ValueError):
    """A prompt cannot be decoded: empty, too long, ids outside the vocabulary, wrong type."""


class SettingError(LayerSkipError, ValueError):
    """A decoding setting has a value that cannot take effect, or two settings contradict each other."""


class UnknownSettingError(LayerSkipError, TypeError):
    """An argument name that does not exist."""


class SearchError(LayerSkipError, RuntimeError):
    """A search cannot begin or go on: its storage, its study, its texts or the model's numbers do not allow it."""


class DecodingError(LayerSkipError, RuntimeError):
    """Decoding cannot go on: the model or a processor left no token to choose."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``' Did you mean …?'`` for a near miss among `known`, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
