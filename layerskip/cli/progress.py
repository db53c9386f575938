"""A progress bar on standard error for a file of prompts, and one line at its end."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from layerskip.cli.terminal import make_console
from layerskip.stats import DecodeStats

__all__ = ["Progress"]


class Progress:
    """Counts prompts and pools their statistics."""

    def __init__(self, total: int, done: int, visible: bool) -> None:
        """Of `total` prompts `done` are there already; the bar is shown on a terminal only, and if `visible`."""
        console = make_console(stderr=True)
        self._bar = Bar(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not (visible and console.is_terminal),
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", total=total, completed=done)
        self._prompts = 0
        self._stats = DecodeStats()

    def __enter__(self) -> Progress:
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar off and say what was done, also when something went wrong."""
        self._bar.stop()
        if self._prompts:
            counts = f"{self._prompts} prompts, {self._stats.new_tokens} tokens"
            print(f"{counts}, {', '.join(self._summary())}", file=sys.stderr)

    def advance(self, stats: DecodeStats) -> None:
        """Count one prompt."""
        self._prompts += 1
        self._stats = DecodeStats.pooled([self._stats, stats])
        self._bar.update(self._task, advance=1, description=self._summary()[0])

    def _summary(self) -> list[str]:
        parts = [f"{self._stats.tokens_per_s:.1f} tokens/s"]
        if self._stats.proposed:
            parts.append(f"{self._stats.tokens_per_round:.2f} tokens per round")
            parts.append(f"{self._stats.acceptance_rate:.0%} of the drafts accepted")
        return parts
