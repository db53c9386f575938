"""Rotary position embedding: tables from transformers' own module, and their application.

The frequencies and their scaling (linear, llama3, yarn, …) are read from the model's rotary module; they are not
computed here. Scalings whose frequencies change with the length of the sequence would make a token's key depend on
when it was computed: "dynamic" only does so beyond the model's positions, which the runtime never reaches, "longrope"
does within them and is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerskip.errors import UnsupportedModelError

__all__ = ["Rotary", "rotate_", "rotate_widely_"]

_SUPPORTED = ("default", "linear", "dynamic", "yarn", "llama3")


def rotate_(states: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate each head's halves by their position's angles, in place (RoFormer, Su et al. 2021, Llama's half layout).

    Args:
        states: (batch, tokens, heads, head_dim).
        cos, sin: (batch or 1, tokens, 1, rotated), as `Rotary.tables` has them; of each head only the first `rotated`
            values are.
    """
    rotated = cos.size(-1)
    if rotated != states.size(-1):
        states = states.narrow(-1, 0, rotated)
    swapped = states.roll(rotated // 2, dims=-1)
    states.mul_(cos).addcmul_(swapped, sin)


def rotate_widely_(states: Tensor, cos: Tensor, sin: Tensor, *, pairs: bool, from_float32: bool) -> None:
    """As `rotate_`, rounded once, in the end: for families whose own rotation is so exact, or has another layout.

    Args:
        pairs: neighbours are rotated instead of halves.
        from_float32: `states` are rounded to float32 before, whatever their dtype.
    """
    if cos.shape[-1] != states.shape[-1]:
        states = states.narrow(-1, 0, cos.shape[-1])
    wide = states.float() if from_float32 else states
    if pairs:
        swapped = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        swapped = wide.roll(wide.shape[-1] // 2, dims=-1)
    states.copy_(wide * cos + swapped * sin)


class Rotary:
    """Tables of cosines and sines for all positions up to the longest asked for, in the model's dtype."""

    def __init__(self, module: Any, dtype: torch.dtype, kind: str = "", *, pairs: bool = False) -> None:
        """Read `module`, a transformers rotary embedding with ``inv_freq`` and ``attention_scaling``.

        Args:
            dtype: of the tables.
            kind: the type of layers that they are for, where the module has tables for several; "": it has not.
            pairs: see `rotate_widely_`.

        Raises:
            UnsupportedModelError: the module scales in a way that is not exact under rollback.
        """
        scaling, prefix = getattr(module, "rope_type", "default"), ""
        if kind:
            scaling, prefix = module.rope_type[kind], f"{kind}_"
        if scaling not in _SUPPORTED:
            raise UnsupportedModelError(
                f"got rotary scaling {scaling!r}; supported are {', '.join(_SUPPORTED)}. "
                "Its tables depend on the sequence's length, so a shortened cache would not be the model's own."
            )
        # A text beyond the model's positions leaves "dynamic" stretched until transformers' next shorter call.
        frequencies: Tensor = getattr(module, f"{prefix}{'original_' if scaling == 'dynamic' else ''}inv_freq")
        self._inverse_frequencies = frequencies.detach().to("cpu", torch.float32)  # (rotated / 2,)
        self._scaling = float(getattr(module, f"{prefix}attention_scaling"))
        self._dtype, self._pairs = dtype, pairs
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
        # Recorded programs read the tables that they were recorded with. All together, doubling, take no more than the
        # largest takes twice.
        self._outgrown: list[tuple[Tensor, Tensor]] = []

    def tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines on `device` for at least the positions ``0 … length - 1``: each (length, rotated).

        The sines of the first half (of the first of each pair) are negated, so that ``states * cos + swapped * sin`` is
        the rotation.
        """
        tables = self._tables.get(device)
        if tables is None or len(tables[0]) < length:
            # Doubling: a growing conversation recomputes its tables a logarithmic number of times. Rebinding one
            # tuple is atomic, so threads that decode on the same model at the same time see old or new, never half.
            if tables is not None:
                self._outgrown.append(tables)
            tables = self._tables[device] = self._compute(max(length, 2 * (len(tables[0]) if tables else 128)), device)
        return tables

    @torch.inference_mode(False)  # who trains reads the tables that decoding made
    def _compute(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        angles = torch.arange(length, dtype=torch.float32)[:, None] * self._inverse_frequencies
        # Computed in float32 whatever the dtype, as transformers does, so that float64 agrees with it to the last bit.
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        both = [torch.stack(each, -1 if self._pairs else -2).flatten(-2) for each in ((cos, cos), (-sin, sin))]
        return both[0].to(device, self._dtype), both[1].to(device, self._dtype)
