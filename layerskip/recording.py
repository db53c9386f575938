"""Programs that are recorded on the device once and then started as one: CUDA graphs, or, elsewhere, plain calls.

A program is a function without arguments that reads and writes tensors that stay where they are, and returns a tuple of
tensors. It may be run any number of times for the same inputs, and never asks the device for a value.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

import torch

__all__ = ["CudaGraphs", "Direct", "Recorder", "make_recorder"]

Outputs = TypeVar("Outputs", bound=tuple[Any, ...])


class Recorder(Protocol):
    """Runs programs by name."""

    obstacle: str | None

    def __call__(self, key: Hashable, program: Callable[[], Outputs]) -> Outputs:
        """Run the program called `key`; its outputs are overwritten when it is run again."""
        ...


class Direct:
    """Runs programs as they are.

    Attributes:
        obstacle: why nothing is recorded.
    """

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
    """

    def __init__(self, device: torch.device) -> None:
        """`device`: where all programs run."""
        self.obstacle: str | None = None
        self._device = device
        self._pool: Any = None  # of memory, shared, because two programs never run at the same time
        self._recorded: dict[Hashable, tuple[Any, Any]] = {}

    def __call__(self, key: Hashable, program: Callable[[], Outputs]) -> Outputs:
        """See `Recorder`."""
        if key not in self._recorded:
            if self.obstacle is None:
                self._record(key, program)
            if self.obstacle is not None:
                return program()
        graph, outputs = self._recorded[key]
        graph.replay()
        return outputs  # type: ignore[no-any-return]

    def _record(self, key: Hashable, program: Callable[[], Outputs]) -> None:
        # Once outside of a recording, where kernels may still be chosen, tables built and workspaces allocated.
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            program()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                outputs = program()
        except RuntimeError as error:
            self.obstacle = f"recording failed: {str(error).splitlines()[0]}"
            return
        self._pool = self._pool or graph.pool()
        self._recorded[key] = graph, outputs


def make_recorder(device: torch.device) -> CudaGraphs | Direct:
    """What records on `device`."""
    if device.type == "cuda":
        return CudaGraphs(device)
    return Direct(f"no graphs on {device.type}: every program is run as it is")
