"""A progress bar on standard error for a file of prompts, and one line at its end."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from layerskip.cli.terminal import make_console

if TYPE_CHECKING:
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
        self._prompts = self._tokens = self._rounds = self._round_tokens = self._proposed = self._accepted = 0
        self._decode_s = 0.0

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
            print(f"{self._prompts} prompts, {self._tokens} tokens, {', '.join(self._summary())}", file=sys.stderr)

    def advance(self, stats: DecodeStats) -> None:
        """Count one prompt."""
        self._prompts += 1
        self._tokens += stats.new_tokens
        self._rounds += stats.rounds
        self._round_tokens += stats.round_tokens
        self._proposed += stats.proposed
        self._accepted += stats.accepted
        self._decode_s += stats.decode_s
        self._bar.update(self._task, advance=1, description=self._summary()[0])

    def _summary(self) -> list[str]:
        parts = [f"{self._round_tokens / self._decode_s if self._decode_s else 0:.1f} tokens/s"]
        if self._proposed:
            parts.append(f"{self._round_tokens / self._rounds:.2f} tokens per round")
            parts.append(f"{self._accepted / self._proposed:.0%} of the drafts accepted")
        return parts
