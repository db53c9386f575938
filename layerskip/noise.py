"""Random numbers that are a pure function of (seed, counter, purpose, index).

Decoding needs randomness that can be rolled back, repeated, and looked up per row and position in any order, on any
device. A stateful generator offers none of that; a hash does. The hash is SplitMix64 (Steele, Lea, Flood 2014,
"Fast splittable pseudorandom number generators"): its finaliser applied to a keyed counter.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

__all__ = ["Purpose", "exponential", "exponential_at", "uniform", "wrap_seed"]

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Purpose(IntEnum):
    """What a number is drawn for; numbers of different purposes are independent."""

    TOKEN = 1  # choosing a token from a distribution
    ACCEPT = 2  # the acceptance test of a drafted token
    CORRECTION = 3  # choosing the token after the accepted drafts


def wrap_seed(seed: int) -> int:
    """Map any Python integer onto a signed 64-bit one, as torch stores it."""
    return (seed + 2**63) % 2**64 - 2**63


def uniform(seeds: Tensor, counters: Tensor, purpose: Purpose, size: int) -> Tensor:
    """Uniform numbers in the open interval (0, 1), with 52 random bits each.

    Args:
        seeds: (batch,), int64.
        counters: (batch, tokens), int64.
        size: numbers per (row, token).

    Returns:
        (batch, tokens, size), float64.
    """
    indices = torch.arange(size, device=counters.device)
    return _uniform_at(seeds[:, None, None], counters.unsqueeze(2), purpose, indices)


def exponential(seeds: Tensor, counters: Tensor, purpose: Purpose, size: int) -> Tensor:
    """Standard exponential numbers, shaped as in `uniform`.

    ``argmax(probs / exponential)`` draws from ``probs``: it is the Gumbel-max rule, argmax(log probs + Gumbel noise),
    without its two logarithms.
    """
    return uniform(seeds, counters, purpose, size).log_().neg_()


def exponential_at(seeds: Tensor, counters: Tensor, purpose: Purpose, indices: Tensor) -> Tensor:
    """Some of the numbers of `exponential`: the one at each of `indices`; the arguments' shapes broadcast."""
    return _uniform_at(seeds, counters, purpose, indices).log_().neg_()


def _uniform_at(seeds: Tensor, counters: Tensor, purpose: Purpose, indices: Tensor) -> Tensor:
    stream = _mix(_mix(seeds + wrap_seed(_GOLDEN * purpose)) + _GOLDEN * counters)
    bits = _mix(stream + (indices + 1) * _GOLDEN)
    # 52 bits, not 53: with one more, adding a half rounds the largest number up to 1, whose logarithm is 0, and the
    # 0 / 0 of a banned token would win the race.
    return (_shift_right(bits, 12).to(torch.float64) + 0.5) * 2.0**-52


def _mix(bits: Tensor) -> Tensor:
    for shift, factor in _MIX:
        bits = (bits ^ _shift_right(bits, shift)) * factor
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift of int64, for which torch only has the arithmetic one."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
