"""Seconds between points of a round, measured when the device has finished what was asked of it."""

from __future__ import annotations

import time

import torch

__all__ = ["Stopwatch"]


class Stopwatch:
    """Lap times on `device`."""

    def __init__(self, device: torch.device) -> None:
        """Start."""
        self._device = device
        self._since = self._now()

    def lap(self) -> float:
        """Seconds since the start or the last lap."""
        before, self._since = self._since, self._now()
        return self._since - before

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
