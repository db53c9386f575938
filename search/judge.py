"""What a candidate is worth: its acceptance by replay, its cost by the cost model, and the speed-up they predict.

Everything that compares candidates, trials and published selection methods alike, asks here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from layerskip.errors import SearchError
from layerskip.models.decoder import Head
from layerskip.search.acceptance import Acceptance, SpeedUp, best_speedup
from layerskip.search.candidate import Candidate
from layerskip.search.cost import CostModel
from layerskip.search.replay import Replay

__all__ = ["Judge", "Verdict"]


@dataclass(frozen=True)
class Verdict:
    """What was found out about a candidate.

    Attributes:
        draft_ratio: cost of a draft step in plain steps.
        speedup: the best prediction, over plain decoding.
    """

    candidate: Candidate
    acceptance: Acceptance
    draft_ratio: float
    speedup: SpeedUp


class Judge:
    """Judges candidates on one set of texts.

    Attributes:
        replay: the texts.
        vocabularies: draft vocabularies by their size, ids ascending.
        judged: candidates judged so far, by what they are; a second judgement is read from here.
    """

    def __init__(self, replay: Replay, costs: CostModel, vocabularies: Mapping[int, tuple[int, ...]] = {}) -> None:
        """See the class."""
        self.replay, self.costs, self.vocabularies = replay, costs, vocabularies
        self.num_blocks = replay.decoder.num_blocks
        self.judged: dict[Candidate, Verdict] = {}

    def head(self, candidate: Candidate) -> Head | None:
        """What scores its drafts; None: the model's own head."""
        size = candidate.vocabulary_size
        if size is None:
            return None
        if size not in self.vocabularies:
            raise SearchError(f"got a draft vocabulary of {size} ids; expected one of {sorted(self.vocabularies)}.")
        return self.replay.decoder.partial_head(self.vocabularies[size])

    def accept(self, candidate: Candidate, batch: int) -> list[Acceptance]:
        """Of each text of one part of the replay."""
        return self.replay.acceptance(candidate.path(self.num_blocks), batch, self.head(candidate))

    def verdict(self, candidate: Candidate, acceptance: Acceptance) -> Verdict:
        """What follows from an acceptance that was found."""
        speedup = best_speedup(acceptance.survival, lambda length: self.costs.round_ratio(candidate, length))
        return Verdict(candidate, acceptance, self.costs.draft_ratio(candidate), speedup)

    def judge(self, candidate: Candidate, batches: int | None = None) -> Verdict:
        """Replay `candidate`, on all texts or on the first `batches` parts only (which is not remembered)."""
        if batches is None and candidate in self.judged:
            return self.judged[candidate]
        parts = range(self.replay.num_batches if batches is None else min(batches, self.replay.num_batches))
        acceptance = Acceptance.pooled(each for batch in parts for each in self.accept(candidate, batch))
        verdict = self.verdict(candidate, acceptance)
        if batches is None:
            self.judged[candidate] = verdict
        return verdict
