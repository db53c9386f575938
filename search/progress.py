"""What a search tells while it runs. The command line draws it; a program may pass its own, or nothing."""

from __future__ import annotations

from typing import Protocol

from layerskip.search.result import TrialRecord

__all__ = ["Progress", "Silent"]


class Progress(Protocol):
    """Is told how a search goes."""

    def stage(self, what: str, done: int, total: int) -> None:
        """One of the steps before and after the trials has come so far."""
        ...

    def trial(self, record: TrialRecord, best: TrialRecord | None, finished: int) -> None:
        """A trial has ended; `finished` of the study have, `best` is the best of them."""
        ...

    def message(self, text: str) -> None:
        """Something that a person should know."""
        ...


class Silent:
    """Tells nobody."""

    def stage(self, what: str, done: int, total: int) -> None:
        """See `Progress`."""

    def trial(self, record: TrialRecord, best: TrialRecord | None, finished: int) -> None:
        """See `Progress`."""

    def message(self, text: str) -> None:
        """See `Progress`."""
