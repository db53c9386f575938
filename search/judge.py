"""What a candidate is worth: its acceptance by replay, its cost by the cost model, and the speed-up they predict.

Everything that compares candidates, trials and published selection methods alike, asks here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from layerskip.errors import SearchError
from layerskip.search.acceptance import Acceptance, SpeedUp, best_speedup
from layerskip.search.candidate import Candidate
from layerskip.search.cost import CostModel
from layerskip.search.outcome import TextOutcome
from layerskip.search.replay import Replay
from layerskip.search.trained import Trained

__all__ = ["Judge", "Verdict", "vocabulary_of"]


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
        trained: trained paths by name.
        judged: candidates judged so far, by what they are; a second judgement is read from here.
    """

    def __init__(
        self,
        replay: Replay,
        costs: CostModel,
        vocabularies: Mapping[int, tuple[int, ...]] = {},
        trained: Mapping[str, Trained] = {},
    ) -> None:
        """See the class."""
        self.replay, self.costs, self.vocabularies, self.trained = replay, costs, vocabularies, trained
        self.num_blocks = replay.decoder.num_blocks
        self.judged: dict[Candidate, Verdict] = {}

    def vocabulary(self, candidate: Candidate) -> tuple[int, ...] | None:
        """The ids that its drafts are scored for; None: all."""
        return vocabulary_of(candidate, self.vocabularies, self.trained)

    def outcomes(
        self, candidate: Candidate, batch: int, shift: int = 0, draft_length: int | None = None
    ) -> list[TextOutcome]:
        """What becomes of its drafts in each text of one part of the replay (`Replay.outcomes`)."""
        ids = self.vocabulary(candidate)
        head = None if ids is None else self.replay.decoder.partial_head(ids)
        adapter = None if candidate.trained is None else self.trained[candidate.trained].adapter
        return self.replay.outcomes(candidate.path(self.num_blocks), batch, head, shift, draft_length, adapter)

    def accept(self, candidate: Candidate, batch: int) -> list[Acceptance]:
        """Of each text of one part of the replay."""
        return [each.acceptance(self.replay.draft_length) for each in self.outcomes(candidate, batch)]

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


def vocabulary_of(
    candidate: Candidate, vocabularies: Mapping[int, tuple[int, ...]], trained: Mapping[str, Trained]
) -> tuple[int, ...] | None:
    """The ids that `candidate` scores, None: all; of a trained path its own, where so many are asked for.

    Raises:
        SearchError: there is no vocabulary of that size.
    """
    size = candidate.vocabulary_size
    if size is None:
        return None
    own = None if candidate.trained is None else trained[candidate.trained].plan.draft_vocabulary
    if own is not None and len(own) == size:
        return own
    if size not in vocabularies:
        raise SearchError(f"got a draft vocabulary of {size} ids; expected one of {sorted(vocabularies)}.")
    return vocabularies[size]
