"""Programs that are recorded on the device once and then started as one: CUDA graphs, or, elsewhere, plain calls.

A program is a function without arguments that reads and writes tensors that stay where they are and that it holds, and
returns a tuple of tensors. It may be run any number of times for the same inputs, and never asks the device for a
value. Programs of one recorder share memory: what one returned may be overwritten when another one runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

import torch

__all__ = ["CudaGraphs", "Direct", "Recorder", "make_recorder"]

Outputs = TypeVar("Outputs", bound=tuple[Any, ...])


class Recorder(Protocol):
    """Runs programs by name."""

    obstacle: str | None
    count: int

    def __call__(self, key: Hashable, program: Callable[[], Outputs]) -> Outputs:
        """Run the program called `key`; its outputs are overwritten when it is run again."""
        ...


class Direct:
    """Runs programs as they are.

    Attributes:
        obstacle: why nothing is recorded.
        count: 0.
    """

    count = 0

    def __init__(self, obstacle: str | None = None) -> None:
        """See the class."""
        self.obstacle = obstacle

    def __call__(self, key: Hashable, program: Callable[[], Outputs]) -> Outputs:
        """See `Recorder`."""
        return program()


class CudaGraphs:
    """Records each program as a CUDA graph when it is first asked for.

    Attributes:
        obstacle: why some program could not be recorded, after which programs are run as they are.
        count: programs recorded.
    """

    def __init__(self, device: torch.device) -> None:
        """`device`: where all programs run."""
        self.obstacle: str | None = None
        self.count = 0
        self._device = device
        self._pool: Any = None  # of memory, shared, because two programs never run at the same time
        # With the programs, which hold what they read: a graph knows addresses only.
        self._recorded: dict[Hashable, tuple[Any, Any, Callable[[], Any]]] = {}

    def __call__(self, key: Hashable, program: Callable[[], Outputs]) -> Outputs:
        """See `Recorder`."""
        with torch.cuda.device(self._device):
            if key not in self._recorded:
                if self.obstacle is None:
                    self._record(key, program)
                if self.obstacle is not None:
                    return program()
            graph, outputs, _ = self._recorded[key]
            graph.replay()
            return outputs  # type: ignore[no-any-return]

    def _record(self, key: Hashable, program: Callable[[], Outputs]) -> None:
        current = torch.cuda.current_stream()
        # Once outside of a recording, where kernels may still be chosen, tables built and workspaces allocated.
        side = torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            program()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            # "thread_local": what other threads allocate meanwhile is none of our business.
            with _RECORDING, torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = program()
        except RuntimeError as error:
            torch.cuda.set_stream(current)  # a recording that fails leaves its own stream behind
            self.obstacle = f"recording failed: {str(error).splitlines()[0]}"
            return
        self._pool = self._pool or graph.pool()
        self._recorded[key] = graph, outputs, program
        self.count += 1


_RECORDING = threading.Lock()  # torch records one graph at a time


def make_recorder(device: torch.device) -> CudaGraphs | Direct:
    """What records on `device`."""
    if device.type == "cuda":
        return CudaGraphs(device)
    return Direct(f"no graphs on {device.type}: every program is run as it is")
