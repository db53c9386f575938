"""How long a pass takes on given hardware, by the roofline: each part needs its arithmetic or its bytes, the longer.

Parts are the matrix products of attention, MLP (or experts) and head, and attention over the cache; what each kernel
takes besides is added (Williams, Waterman, Patterson 2009, with launches). Norms, rotations and other work in
proportion to the tokens are not modelled, nor are several devices. It knows shapes, not weights, and nothing of drafts
but which blocks they run.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from layerskip.errors import SettingError, did_you_mean
from layerskip.models.decoder import Step
from layerskip.models.inspection import Inspection

__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "Hardware",
    "PassTime",
    "distinct_experts",
    "held_bytes",
    "pass_time",
    "read_hardware",
]

# Kernels of a sub-block or the head. Attention: norm, product, rotation, cache, attention, product with the residual.
# MLP: norm, product, activation, product. Experts: the choice and their sorting too. Head: norm, product, choice.
ATTENTION_KERNELS, MLP_KERNELS, EXPERT_KERNELS, HEAD_KERNELS = 6, 4, 10, 3


@dataclass(frozen=True)
class Hardware:
    """What one device achieves, in one dtype.

    Attributes:
        flops_per_s: of matrix products with many rows.
        bytes_per_s: at which weights are read.
        kernel_s: what each kernel takes beside its arithmetic and its bytes.
        pass_s: what each pass takes besides, on the host.
        half_rate_rows: rows at which a product reaches half of `flops_per_s`; 0: it always has all of it.
        attention_flops_per_s, cache_bytes_per_s: the two rates of attention over the cache; None: as of products.
        memory_bytes: None: not known.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    kernel_s: float = 0.0
    pass_s: float = 0.0
    half_rate_rows: float = 0.0
    attention_flops_per_s: float | None = None
    cache_bytes_per_s: float | None = None
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        """Check.

        Raises:
            SettingError: a rate that is no number above 0, or seconds that are none from 0.
        """
        optional = ("attention_flops_per_s", "cache_bytes_per_s", "memory_bytes")
        for name in ("flops_per_s", "bytes_per_s", *optional, "kernel_s", "pass_s", "half_rate_rows"):
            value, is_rate = getattr(self, name), name in ("flops_per_s", "bytes_per_s", *optional)
            if value is None and name in optional:
                continue
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < 0 or (is_rate and value == 0):
                raise SettingError(
                    f"got {name}={value!r} for the hardware {self.name!r}; expected a number "
                    f"{'above' if is_rate else 'from'} 0."
                )


@dataclass(frozen=True)
class Accelerator:
    """What a data sheet says of a device, products without sparsity; and what can be had of it.

    Attributes:
        flops_per_s: by dtype; 16-bit ones accumulate in float32.
        kernel_s, pass_s: see `Hardware`; as CUDA graphs start kernels, and read one small tensor a pass.
    """

    name: str
    flops_per_s: dict[str, float]
    bytes_per_s: float
    memory_bytes: float
    kernel_s: float = 2e-6
    pass_s: float = 5e-5

    def hardware(self, dtype: str, flops_share: float, bytes_share: float) -> Hardware:
        """In `dtype`, at these shares of its peaks.

        Raises:
            SettingError: a share out of range, or a dtype of which the data sheet says nothing.
        """
        for name, share in (("flops-share", flops_share), ("bytes-share", bytes_share)):
            if not 0 < share <= 1:
                raise SettingError(f"got --{name} {share}; expected a share of the peak, above 0 and at most 1.")
        if dtype not in self.flops_per_s:
            known = ", ".join(self.flops_per_s)
            raise SettingError(f"got the dtype {dtype} for {self.name}; expected one of {known}. Pass --dtype.")
        rates = self.flops_per_s[dtype] * flops_share, self.bytes_per_s * bytes_share
        return Hardware(self.name, *rates, self.kernel_s, self.pass_s, memory_bytes=self.memory_bytes)


def _accelerator(name: str, tflops_16: float, tflops_32: float, gb_per_s: float, gb: float) -> Accelerator:
    rates = {"bfloat16": 1e12 * tflops_16, "float16": 1e12 * tflops_16, "float32": 1e12 * tflops_32}
    return Accelerator(name, rates, 1e9 * gb_per_s, 1e9 * gb)


ACCELERATORS = {
    each.name: each
    for each in (
        _accelerator("A100-80", 312, 19.5, 2039, 80),  # SXM
        _accelerator("H100", 989, 67, 3350, 80),  # SXM
        _accelerator("H200", 989, 67, 4800, 141),  # SXM
        _accelerator("L4", 121, 30.3, 300, 24),
        _accelerator("RTX-4090", 165, 82.6, 1008, 24),
    )
}
"""By name; the numbers are those of NVIDIA's data sheets."""


def read_hardware(name: str, dtype: str, flops_share: float, bytes_share: float) -> Hardware:
    """A preset by its name, or a JSON file with the fields of `Hardware`, to which no shares apply.

    Raises:
        SettingError: neither, or a value out of range.
    """
    if name in ACCELERATORS:
        return ACCELERATORS[name].hardware(dtype, flops_share, bytes_share)
    if not name.endswith(".json"):
        raise SettingError(
            f"got the hardware {name!r}; expected this-machine, a file (….json), or one of {', '.join(ACCELERATORS)}."
            + did_you_mean(name, [*ACCELERATORS, "this-machine"])
        )
    names = ", ".join(each.name for each in fields(Hardware))
    try:
        return Hardware(**json.loads(Path(name).read_text(encoding="utf-8")))
    except OSError as error:
        raise SettingError(f"cannot read the hardware {name}: {error.strerror}. Check the path.") from error
    except (ValueError, TypeError) as error:
        if isinstance(error, SettingError):
            raise
        raise SettingError(f"got the hardware {name}, which is not it; expected a JSON object of {names}.") from error


@dataclass(frozen=True)
class PassTime:
    """Seconds of one pass, by what takes them."""

    blocks_s: float
    cache_s: float
    head_s: float
    kernels_s: float

    @property
    def total_s(self) -> float:
        """Of all of it."""
        return self.blocks_s + self.cache_s + self.head_s + self.kernels_s


def distinct_experts(num_experts: int, experts_per_token: int, tokens: int) -> float:
    """Experts of a layer that at least one of `tokens` tokens comes to, on average.

    If each token chooses with equal chances and apart from all others: n (1 - (1 - k / n)**tokens). Real tokens are
    less even, above all neighbours of one text, and so touch fewer.
    """
    return num_experts * (1 - (1 - experts_per_token / num_experts) ** tokens)


def pass_time(
    shape: Inspection,
    hardware: Hardware,
    batch: int,
    tokens: int,
    context: int,
    path: Sequence[Step] | None = None,
    scored_ids: int | None = None,
    further_parameters: int = 0,
) -> PassTime:
    """Time of a pass over `tokens` tokens in each of `batch` rows, behind `context` tokens that are in the cache.

    Args:
        path: the sub-blocks that run; None: all.
        scored_ids: of the head; None: all.
        further_parameters: of trained blocks behind the path, taken for blocks like the model's last.
    """
    rows, itemsize = batch * tokens, _itemsize(shape)
    path = [Step(layer) for layer in range(shape.num_layers)] if path is None else path
    kinds = Counter((attends, transforms, *_sizes(shape, layer)) for layer, attends, transforms in path)
    blocks_s = cache_s = kernels = 0.0
    for (attends, transforms, attention, mlp, experts, window), count in kinds.items():
        if attends:
            blocks_s += count * _product_s(hardware, attention, rows, itemsize)
            cache_s += count * _attention_s(shape, hardware, batch, tokens, context, window)
            kernels += count * ATTENTION_KERNELS
        if transforms:
            blocks_s += count * (_product_s(hardware, mlp, rows, itemsize) + _experts_s(shape, hardware, experts, rows))
            kernels += count * (EXPERT_KERNELS if experts else MLP_KERNELS)
    if further_parameters:
        attention, mlp, experts, window = _sizes(shape, shape.num_layers - 1)
        further_blocks = max(1, round(further_parameters / (attention + mlp + experts)))
        blocks_s += _product_s(hardware, further_parameters, rows, itemsize)
        cache_s += further_blocks * _attention_s(shape, hardware, batch, tokens, context, window)
        kernels += further_blocks * (ATTENTION_KERNELS + MLP_KERNELS)
    ids = shape.vocab_size if scored_ids is None else scored_ids
    head_s = _product_s(hardware, shape.head_parameters * ids / shape.vocab_size, rows, itemsize)
    head_s += 2 * rows * ids * itemsize / hardware.bytes_per_s  # logits are written, and read to choose
    return PassTime(blocks_s, cache_s, head_s, hardware.pass_s + (kernels + HEAD_KERNELS) * hardware.kernel_s)


def held_bytes(shape: Inspection, batch: int, positions: int) -> float:
    """Of the weights, and of a cache of so many positions a row."""
    return shape.parameters * _itemsize(shape) + batch * positions * shape.kv_bytes_per_token


def _itemsize(shape: Inspection) -> int:
    dtype: torch.dtype = getattr(torch, shape.dtype)
    return dtype.itemsize


def _sizes(shape: Inspection, layer: int) -> tuple[int, int, int, int | None]:
    """Parameters of a layer's attention, of its MLP without experts, and of its experts; and its window."""
    mlp, unchosen = shape.mlp_parameters[layer], shape.mlp_parameters[layer] - shape.mlp_step_parameters[layer]
    # Where a token comes to all experts, all are read anyway: they are as good as one MLP.
    experts = unchosen * shape.num_experts // (shape.num_experts - shape.experts_per_token) if unchosen else 0
    return shape.attention_parameters[layer], mlp - experts, experts, shape.windows[layer]


def _product_s(hardware: Hardware, parameters: float, rows: float, itemsize: int) -> float:
    """A product of `rows` rows with matrices of so many numbers."""
    flops, nbytes = 2 * parameters * (rows + hardware.half_rate_rows), parameters * itemsize
    return max(flops / hardware.flops_per_s, nbytes / hardware.bytes_per_s)


def _experts_s(shape: Inspection, hardware: Hardware, parameters: int, rows: int) -> float:
    """Those experts that are touched, each by its part of the rows."""
    if not parameters:
        return 0.0
    touched = distinct_experts(shape.num_experts, shape.experts_per_token, rows)
    rows_each = rows * shape.experts_per_token / touched
    return _product_s(hardware, parameters * touched / shape.num_experts, rows_each, _itemsize(shape))


def _attention_s(
    shape: Inspection, hardware: Hardware, batch: int, tokens: int, context: int, window: int | None
) -> float:
    """Queries with keys, shares with values; each row's cache is read once for all its tokens and heads."""
    visible = context + tokens if window is None else min(context, window - 1) + tokens
    flops = 4 * batch * tokens * shape.heads * shape.head_dim * visible
    nbytes = 2 * batch * visible * shape.kv_heads * shape.head_dim * _itemsize(shape)
    flops_per_s = hardware.attention_flops_per_s or hardware.flops_per_s
    return max(flops / flops_per_s, nbytes / (hardware.cache_bytes_per_s or hardware.bytes_per_s))
