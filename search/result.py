"""What a search found, with the evidence: the plan, how it did on texts that the search never saw, and every trial.

Plain data, to and from JSON; the report draws it, and knows nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from layerskip.plan import DraftPlan
from layerskip.search.candidate import Candidate

__all__ = ["HeldOut", "Interval", "SearchResult", "TrialRecord"]


@dataclass(frozen=True)
class Interval:
    """An estimate, and where it lies with 95 % confidence (bootstrap over texts)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class TrialRecord:
    """One candidate that was tried, on the texts of the search.

    Attributes:
        state: "complete", "pruned" (given up on a part of the texts), "running" or "failed".
        origin: where it came from: a start's name ("leave-one-out 5"), or the sampler's.
        acceptance_by_offset: chance of each draft to be accepted, given that all before it were.
        acceptance_rate, standard_error: see `Acceptance`.
        draft_ratio: cost of a draft step in plain steps.
        speedup: predicted, over plain decoding, at `num_draft_tokens`.
        seconds: that the trial took.
    """

    number: int
    state: str
    origin: str
    candidate: Candidate
    acceptance_by_offset: tuple[float, ...] = ()
    acceptance_rate: float | None = None
    standard_error: float | None = None
    draft_ratio: float | None = None
    speedup: float | None = None
    num_draft_tokens: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class HeldOut:
    """How the chosen plan does on texts that the search never saw.

    Attributes:
        texts, positions: how many.
        acceptance_rate: see `Acceptance.rate`.
        acceptance_by_offset: see `Acceptance.by_offset`.
        tokens_per_round: of real decoding on these texts, which replay reproduces round by round.
        predicted_speedup: from these and the cost model.
        measured_speedup: of real decoding, ungoverned, against plain decoding in turn; None: not measured.
    """

    texts: int
    positions: int
    acceptance_rate: Interval
    acceptance_by_offset: tuple[Interval, ...]
    tokens_per_round: Interval
    predicted_speedup: Interval
    measured_speedup: Interval | None = None

    @property
    def pays(self) -> bool:
        """Whether drafting is predicted to be faster than plain decoding, and measuring does not plainly contradict."""
        contradicted = self.measured_speedup is not None and self.measured_speedup.high < 1
        return self.predicted_speedup.value > 1 and not contradicted

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> HeldOut:
        """Read ``dataclasses.asdict`` of one."""
        fields: dict[str, Any] = dict(content)
        for name, value in content.items():
            if isinstance(value, Mapping):
                fields[name] = Interval(**value)
            elif isinstance(value, list | tuple):
                fields[name] = tuple(Interval(**each) for each in value)
        return cls(**fields)


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search.

    Attributes:
        plan: the best plan found, with its provenance; also where it loses.
        pays: whether the plan is worth using, by the held-out texts (`HeldOut.pays`).
        best: its trial.
        held_out: its figures on other texts.
        front: trials that no other one beats in both acceptance and cost, from cheap to dear.
        trials: all of them.
        single_retention: for "attention" and "mlp", by layer: how often the first draft stands with that sub-block
            alone left out, by a part of the texts; empty if it was not measured.
        costs: see `CostModel.to_dict`.
        settings: of the search: space, sampler, seed, budget, calibration.
        conditions: model, device, dtype, threads, versions, dates.
        study, storage: where the trials are kept.
        block_passes: sub-blocks run over all calibration positions, by all trials and starts.
        seconds: of this worker's search.
    """

    plan: DraftPlan
    pays: bool
    best: TrialRecord
    held_out: HeldOut
    front: tuple[TrialRecord, ...]
    trials: tuple[TrialRecord, ...]
    single_retention: dict[str, list[float]] = field(default_factory=dict)
    costs: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    conditions: dict[str, Any] = field(default_factory=dict)
    study: str = ""
    storage: str = ""
    block_passes: float = 0.0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        shallow = {name: getattr(self, name) for name in self.__dataclass_fields__}
        records = {
            "plan": self.plan.to_dict(),
            "best": asdict(self.best),
            "held_out": asdict(self.held_out),
            "front": [asdict(each) for each in self.front],
            "trials": [asdict(each) for each in self.trials],
        }
        return shallow | records
