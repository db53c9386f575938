"""A search's progress bar on standard error: stages, then trials with the best predicted speed-up so far."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from layerskip.cli.terminal import make_console, note

if TYPE_CHECKING:
    from layerskip.search import Budget
    from layerskip.search.result import TrialRecord

__all__ = ["SearchProgress"]

_LINE_S = 30.0  # where there is no bar, a line now and then


class SearchProgress:
    """Shows how a search goes: a bar on a terminal, elsewhere a line every half a minute."""

    def __init__(self, budget: Budget) -> None:
        """`budget`: how much there is to do."""
        self._budget = budget
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

    def __enter__(self) -> SearchProgress:
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar off."""
        self._bar.stop()

    def stage(self, what: str, done: int, total: int) -> None:
        """See `layerskip.search.progress.Progress`."""
        self._bar.update(self._task, description=what, completed=done, total=total)
        self._line(f"{what}: {done:,} of {total:,}")

    def trial(self, record: TrialRecord, best: TrialRecord | None, finished: int) -> None:
        """See `layerskip.search.progress.Progress`."""
        so_far = "no trial finished yet"
        if best is not None and best.speedup is not None:
            so_far = f"best {best.speedup:.3f}: {best.candidate.describe()}"
        self._bar.update(self._task, description=so_far, completed=finished, total=self._budget.trials)
        self._line(f"trial {finished}, {so_far}")

    def message(self, text: str) -> None:
        """See `layerskip.search.progress.Progress`."""
        note(text)

    def _line(self, text: str) -> None:
        if not self._has_bar and time.monotonic() - self._told > _LINE_S:
            self._told = time.monotonic()
            note(text)
