"""A progress bar on standard error for work in stages; where there is no terminal, a line now and then."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from layerskip.cli.terminal import make_console, note

if TYPE_CHECKING:
    from layerskip.training import Point

__all__ = ["StagedProgress", "TrainProgress"]

_LINE_S = 30.0


class StagedProgress:
    """Shows how far a stage is: a bar on a terminal, elsewhere a line every half a minute."""

    def __init__(self) -> None:
        """See the class."""
        console = make_console(stderr=True)
        self._has_bar = console.is_terminal
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not self._has_bar,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("starting", total=None)
        self._told = time.monotonic()

    def __enter__(self) -> Self:
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar off."""
        self._bar.stop()

    def stage(self, what: str, done: int, total: int) -> None:
        """So much of a stage is done."""
        self.show(what, done, total, f"{what}: {done:,} of {total:,}")

    def show(self, description: str, done: int, total: int | None, line: str) -> None:
        """The same, with other words where there is no bar."""
        self._bar.update(self._task, description=description, completed=done, total=total)
        if not self._has_bar and time.monotonic() - self._told > _LINE_S:
            self._told = time.monotonic()
            note(line)

    def message(self, text: str) -> None:
        """Say something beside the bar."""
        note(text)


class TrainProgress(StagedProgress):
    """How training goes, with the newest agreement on held-out text."""

    _agreement = "agreement not known yet"

    def written(self, done: int, total: int) -> None:
        """Tokens of text, written and to be written."""
        self.stage("writing texts", done, total)

    def trained(self, step: int, steps: int, point: Point | None) -> None:
        """Steps of the optimiser, done and in all, and the newest point of the curve where it is new."""
        if point is not None:
            found: Any = point["agreement"]  # by offset of a draft, or by the number of layers
            rates = found.values() if isinstance(found, dict) else found
            self._agreement = "agreement " + " ".join(f"{each:.3f}" for each in rates)
        self.show(self._agreement, step, steps, f"step {step:,} of {steps:,}, {self._agreement}")
