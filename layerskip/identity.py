"""Which model this is: enough to tell whether a draft plan was made for it."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from layerskip.errors import PlanError
from layerskip.models.families import geometry_of
from layerskip.models.stored import plain_parts, stored_tensors

__all__ = ["ModelIdentity", "identify"]

_SAMPLES = 64  # values hashed of each parameter


@dataclass(frozen=True)
class ModelIdentity:
    """Architecture and weights of a model.

    Attributes:
        weights: a fingerprint of the weights, the same for a checkpoint loaded as bfloat16, float32 or float64.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    weights: str

    def differences(self, other: ModelIdentity) -> dict[str, tuple[Any, Any]]:
        """Fields in which the two differ, with both values."""
        own, others = asdict(self), asdict(other)
        return {name: (own[name], others[name]) for name in own if own[name] != others[name]}

    @classmethod
    def from_dict(cls, content: Any) -> ModelIdentity:
        """Read ``dataclasses.asdict`` of an identity.

        Raises:
            PlanError: `content` is something else.
        """
        names = tuple(cls.__dataclass_fields__)
        if not isinstance(content, dict) or set(content) != set(names):
            raise PlanError(f"got a plan whose target is {content!r}; expected an object with {', '.join(names)}.")
        return cls(**content)


def identify(model: PreTrainedModel) -> ModelIdentity:
    """Describe `model`; reads a few values of each tensor that its weights are stored in."""
    digest = hashlib.sha256()
    parts = ((name, part.detach()) for name, tensor in stored_tensors(model) for part in plain_parts(tensor))
    for name, parameter in sorted(parts, key=lambda each: each[0]):
        flat = parameter.reshape(-1)
        if not len(flat):
            continue
        picks = torch.linspace(0, flat.numel() - 1, _SAMPLES, dtype=torch.float64).long().to(flat.device)
        # As bfloat16, so that the precision a checkpoint is loaded in does not change its fingerprint.
        values = flat[picks].to("cpu", torch.bfloat16).view(torch.int16)
        digest.update(f"{name} {tuple(parameter.shape)}".encode() + values.numpy().tobytes())
    geometry = geometry_of(model.config)
    return ModelIdentity(
        architecture=type(model).__name__,
        num_layers=geometry.num_layers,
        hidden_size=geometry.hidden_size,
        vocab_size=geometry.vocab_size,
        weights=digest.hexdigest()[:32],
    )
