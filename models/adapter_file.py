"""What was trained beside a model, blocks or heads, as a safetensors file: weights, and what it is in the metadata."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from layerskip.errors import CheckpointError, PlanMismatchError, UnsupportedModelError
from layerskip.models.adapter import Adapter, AdapterSpec, TrainedPart
from layerskip.models.families import family_of
from layerskip.models.heads import Heads

__all__ = ["count_parameters", "load_adapter", "make_adapter", "read_spec", "save_adapter"]

_FORMAT, _VERSION = "layerskip-adapter", "1"


def make_adapter(model: PreTrainedModel, spec: AdapterSpec, tensors: Mapping[str, Tensor] | None = None) -> TrainedPart:
    """What `spec` describes, for `model`; arguments and errors as in `Adapter` and `Heads`."""
    return Heads(model, spec, tensors) if spec.num_heads else Adapter(model, spec, tensors)


def save_adapter(adapter: TrainedPart, path: str | os.PathLike[str], dtype: torch.dtype) -> None:
    """Write `adapter` with its weights as `dtype`; the file appears whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    file = Path(path)
    tensors = {name: each.detach().to("cpu", dtype).contiguous() for name, each in adapter.modules.state_dict().items()}
    described = {"format": _FORMAT, "version": _VERSION, "adapter": json.dumps(adapter.spec.to_dict())}
    scratch = file.with_name(file.name + ".new")
    try:
        scratch.write_bytes(_sorted(save(tensors, metadata=described)))
        os.replace(scratch, file)
    finally:
        scratch.unlink(missing_ok=True)


def load_adapter(path: str | os.PathLike[str], model: PreTrainedModel, dtype: torch.dtype) -> TrainedPart:
    """Read the adapter in `path` for `model`, its weights as `dtype` on the device of the model's final norm.

    Raises:
        CheckpointError: the file is missing, damaged, no adapter, or of another version.
        PlanMismatchError: it was made for a model of another shape.
    """
    file = Path(path)
    if not file.is_file():
        raise CheckpointError(
            f"got an adapter at {file}, where there is no file. A plan that names one is moved together with it."
        )
    family = family_of(type(model).__name__, model.config)
    device = next(model.get_submodule(family.final_norm).parameters()).device
    try:
        with safe_open(file, framework="pt") as opened:
            described = opened.metadata() or {}
            spec = _spec(described, file)
            tensors = {name: opened.get_tensor(name).to(device, dtype) for name in opened.keys()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read the adapter {file}: {error}. Copy it again, or train it anew.") from error
    try:
        return make_adapter(model, spec, tensors)
    except (CheckpointError, UnsupportedModelError) as error:
        raise PlanMismatchError(f"{file}: {error}") from error


def count_parameters(path: str | os.PathLike[str]) -> int:
    """Numbers in the adapter at `path`; none of them is read.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        with safe_open(Path(path), framework="pt") as opened:
            return sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read the adapter {path}: {error}. Copy it again, or train it anew.") from error


def read_spec(path: str | os.PathLike[str]) -> AdapterSpec:
    """What the adapter at `path` is; none of its weights is read.

    Raises:
        CheckpointError: the file is missing, damaged, no adapter, or of another version.
    """
    try:
        with safe_open(Path(path), framework="pt") as opened:
            return _spec(opened.metadata() or {}, Path(path))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read the adapter {path}: {error}. Copy it again, or train it anew.") from error


def _spec(described: dict[str, str], file: Path) -> AdapterSpec:
    if described.get("format") != _FORMAT or described.get("version") != _VERSION:
        raise CheckpointError(
            f"got {file}, whose format is {described.get('format')!r}, version {described.get('version')!r}; expected "
            f"{_FORMAT!r}, version {_VERSION!r}. `layerskip train` writes such files."
        )
    try:
        fields: dict[str, Any] = json.loads(described["adapter"])
        further, heads = tuple(fields.get("further_states", ())), fields.get("num_heads", 0)  # older files lack them
        spec = AdapterSpec(fields["exit_layer"], fields["num_blocks"], fields["reads_state"], further, heads)
        kinds = [type(each) for each in (spec.exit_layer, spec.num_blocks, heads, spec.reads_state, *further)]
        if kinds != [int, int, int, bool, *[int] * len(further)]:
            raise ValueError(f"got {spec}")
        return spec
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read the adapter {file}: its description is damaged ({error}).") from error


def _sorted(content: bytes) -> bytes:
    """A safetensors file with its metadata in order: safetensors writes them in another one each time."""
    size = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    written = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size - 8)
    return content[:8] + written + content[size:]
