"""layerskip: one checkpoint drafts for itself, and the output is exactly its own.

Letters in shape comments, everywhere: batch (rows), tokens (positions of a pass), drafts (drafted tokens of a round),
vocab (token ids), heads, kv_heads, head_dim, hidden_size.
"""

from __future__ import annotations

from layerskip.api import Model, load, wrap
from layerskip.errors import (
    CheckpointError,
    DecodingError,
    InputError,
    LayerSkipError,
    PlanError,
    PlanMismatchError,
    SettingError,
    UnknownSettingError,
    UnsupportedModelError,
)
from layerskip.plan import DraftPlan
from layerskip.result import GenerationResult
from layerskip.stats import DecodeStats
from layerskip.stream import Stream, StreamPiece

__all__ = [
    "CheckpointError",
    "DecodeStats",
    "DecodingError",
    "DraftPlan",
    "GenerationResult",
    "InputError",
    "LayerSkipError",
    "Model",
    "PlanError",
    "PlanMismatchError",
    "SettingError",
    "Stream",
    "StreamPiece",
    "UnknownSettingError",
    "UnsupportedModelError",
    "load",
    "wrap",
]
