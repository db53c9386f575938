"""Seconds between the marks of a round, as the device spent them."""

from __future__ import annotations

import time
from typing import Any

import torch

__all__ = ["Stopwatch"]


class Stopwatch:
    """Marks in the work that `device` is given.

    On CUDA a mark is an event in the stream: the host does not wait for it, and learns the times when they are read.
    """

    def __init__(self, device: torch.device) -> None:
        """Start."""
        self._device = device
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """Mark the work that was asked for up to here."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def laps(self) -> list[float]:
        """Seconds between the marks, the last of which is now; waits for the device."""
        self.mark()
        if self._device.type == "cuda":
            self._marks[-1].synchronize()
            pairs = zip(self._marks, self._marks[1:], strict=False)
            return [float(earlier.elapsed_time(later)) / 1e3 for earlier, later in pairs]
        return [later - earlier for earlier, later in zip(self._marks, self._marks[1:], strict=False)]
