"""layerskip: one checkpoint drafts for itself, and the output is exactly its own.

Letters in shape comments, everywhere: batch (rows), tokens (positions of a pass), drafts (drafted tokens of a round),
vocab (token ids), heads, kv_heads, head_dim, hidden_size.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerskip.api import Model, load, wrap
    from layerskip.errors import (
        CheckpointError,
        DecodingError,
        InputError,
        LayerSkipError,
        PlanError,
        PlanMismatchError,
        SearchError,
        SettingError,
        UnknownSettingError,
        UnsupportedModelError,
    )
    from layerskip.governor.costs import CostRatios
    from layerskip.in_transformers import custom_generate
    from layerskip.plan import DraftPlan
    from layerskip.result import GenerationResult
    from layerskip.session import Session
    from layerskip.stats import DecodeStats
    from layerskip.stream import Stream, StreamPiece

__all__ = [
    "CheckpointError",
    "CostRatios",
    "DecodeStats",
    "DecodingError",
    "DraftPlan",
    "GenerationResult",
    "InputError",
    "LayerSkipError",
    "Model",
    "PlanError",
    "PlanMismatchError",
    "SearchError",
    "Session",
    "SettingError",
    "Stream",
    "StreamPiece",
    "UnknownSettingError",
    "UnsupportedModelError",
    "custom_generate",
    "load",
    "wrap",
]

# Imported on first use (PEP 562): torch and transformers take seconds, which `layerskip --help` or a mistyped option
# should not.
_MODULES = {
    "api": ("Model", "load", "wrap"),
    "governor.costs": ("CostRatios",),
    "in_transformers": ("custom_generate",),
    "plan": ("DraftPlan",),
    "result": ("GenerationResult",),
    "session": ("Session",),
    "stats": ("DecodeStats",),
    "stream": ("Stream", "StreamPiece"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
