"""A search's progress bar: stages, then trials with the best predicted speed-up so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerskip.cli.staged_progress import StagedProgress

if TYPE_CHECKING:
    from layerskip.search import Budget
    from layerskip.search.result import TrialRecord

__all__ = ["SearchProgress"]


class SearchProgress(StagedProgress):
    """What `layerskip.search.progress.Progress` asks for."""

    def __init__(self, budget: Budget) -> None:
        """`budget`: how much there is to do."""
        super().__init__()
        self._budget = budget

    def trial(self, record: TrialRecord, best: TrialRecord | None, finished: int) -> None:
        """See `layerskip.search.progress.Progress`."""
        so_far = "no trial finished yet"
        if best is not None and best.speedup is not None:
            so_far = f"best {best.speedup:.3f}: {best.candidate.describe()}"
        self.show(so_far, finished, self._budget.trials, f"trial {finished}, {so_far}")
