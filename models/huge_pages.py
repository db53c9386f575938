"""Weights in pages of 2 MiB: on Linux, memory that is read once a token, from end to end, is read faster that way.

With pages of 4 KiB each matrix of a small model spans hundreds, and every token walks through all of them. The kernel
moves memory into huge pages on request; nothing but the physical placement changes. Where it does not (other systems,
old kernels, no free huge pages) nothing happens.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

__all__ = ["HUGE_PAGE", "use_huge_pages"]

HUGE_PAGE = 2 * 2**20  # bytes, on x86-64 and most of ARM64
_ADVISE_HUGE, _COLLAPSE = 14, 25  # MADV_HUGEPAGE; MADV_COLLAPSE, Linux 6.1: now, instead of when the kernel finds time


def use_huge_pages(regions: Iterable[tuple[int, int]]) -> int:
    """Ask the kernel to put memory into huge pages.

    Args:
        regions: (address, bytes) of each piece; rounded outwards to whole pages, which does their neighbours no harm.

    Returns:
        The bytes for which it did at once.
    """
    if not sys.platform.startswith("linux"):
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    for begin, end in _merged(regions):
        libc.madvise(begin, end - begin, _ADVISE_HUGE)
        for page in range(begin, end, HUGE_PAGE):  # one by one: a page that cannot be moved stops the rest of a call
            moved += HUGE_PAGE * (libc.madvise(page, HUGE_PAGE, _COLLAPSE) == 0)
    return moved


def _merged(regions: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(begin, end) of whole pages, without overlaps, ascending."""
    merged: list[tuple[int, int]] = []
    for address, size in sorted(regions):
        begin, end = address // HUGE_PAGE * HUGE_PAGE, -(-(address + size) // HUGE_PAGE) * HUGE_PAGE
        if size == 0:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged
