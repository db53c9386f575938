"""What a decoding call did: counts and times, with one definition each.

The names are those under which the field's papers mean different things; the definition here is in each docstring.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

__all__ = ["DecodeStats"]


@dataclass
class DecodeStats:
    """Counts and seconds of one call, pooled over its rows.

    Attributes:
        prompt_tokens, new_tokens: over all rows; the first new token of a row comes out of the prompt's pass.
        reused_tokens: prompt tokens that a session had read before; the prompt's pass ran over the others.
        rounds: verification passes, counted per row that was still decoding; plain steps are among them.
        round_tokens: tokens that the rounds committed.
        proposed: drafted tokens, those beside them not counted.
        proposed_beside: tokens that were verified beside drafts, for the same places (`DraftPlan.num_siblings`).
        drafted_by_offset: how often a draft was proposed at each offset and all before it in its round were accepted.
        accepted_by_offset: how often it was then accepted, or a token beside it.
        accepted_histogram: rounds by number of accepted drafts, from 0 to the plan's most.
        drafted_histogram: rounds by number of proposed drafts; those without any are plain steps.
        rounds_by_source, proposed_by_source, accepted_by_source: by the drafter that the round's drafts came from,
            "none" where there were none.
        prefill_s: the prompt's pass, up to the first new token.
        draft_s, verify_s: inside the drafter, what it reads of the text before its first draft included, and in the
            full model's passes.
        host_s: everything else of the rounds: distributions of the target, acceptance, stopping. (In static rounds
            acceptance is part of the recorded verification, and of `verify_s`.)
        recording_s: whole rounds in which programs were recorded or compiled; no other time holds them.
        execution: how rounds were run: "eager", or "static: …" with what recorded or compiled them.
        costs: the governor's last estimates of what a draft and a verification pass cost; empty without one.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    rounds: int = 0
    round_tokens: int = 0
    proposed: int = 0
    proposed_beside: int = 0
    drafted_by_offset: list[int] = field(default_factory=list)
    accepted_by_offset: list[int] = field(default_factory=list)
    accepted_histogram: list[int] = field(default_factory=lambda: [0])
    drafted_histogram: list[int] = field(default_factory=list)
    rounds_by_source: dict[str, int] = field(default_factory=dict)
    proposed_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    host_s: float = 0.0
    recording_s: float = 0.0
    execution: str = "eager"
    costs: dict[str, Any] = field(default_factory=dict)

    def record_round(self, proposed: int, accepted: int, committed: int, source: str = "none", beside: int = 0) -> None:
        """Count one row's round: drafts proposed by `source`, drafts accepted, tokens kept (fewer when a stop cut).

        Args:
            beside: tokens proposed beside the drafts.
        """
        self.rounds += 1
        self.proposed += proposed
        self.proposed_beside += beside
        self.round_tokens += committed
        self.new_tokens += committed
        _count(self.accepted_histogram, [accepted])
        _count(self.drafted_by_offset, range(min(accepted + 1, proposed)))
        _count(self.accepted_by_offset, range(accepted))
        _count(self.drafted_histogram, [proposed])
        for counts, number in (
            (self.rounds_by_source, 1),
            (self.proposed_by_source, proposed),
            (self.accepted_by_source, accepted),
        ):
            counts[source] = counts.get(source, 0) + number

    @classmethod
    def pooled(cls, parts: Iterable[DecodeStats]) -> DecodeStats:
        """Add up the counts and seconds of several calls; execution and costs are those of the last that had some."""
        total = cls()
        for part in parts:
            for name, value in vars(part).items():
                own = getattr(total, name)
                setattr(total, name, copy(value or own) if name in ("execution", "costs") else _sum(own, value))
        return total

    @property
    def accepted(self) -> int:
        """Accepted drafts, those behind a stop in the same round included."""
        return sum(self.accepted_by_offset)

    @property
    def tokens_per_round(self) -> float:
        """Committed tokens per verification pass, the bonus included, the prompt's pass not; plain decoding is 1."""
        return self.round_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts per proposed draft. Falls as drafts get longer: not comparable between lengths."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def acceptance_by_offset(self) -> list[float]:
        """For each offset: P(draft accepted | it was proposed and all before it were accepted)."""
        accepted = self.accepted_by_offset + [0] * (len(self.drafted_by_offset) - len(self.accepted_by_offset))
        return [hits / tries for hits, tries in zip(accepted, self.drafted_by_offset, strict=True)]

    @property
    def decode_s(self) -> float:
        """Seconds of all rounds."""
        return self.draft_s + self.verify_s + self.host_s + self.recording_s

    @property
    def total_s(self) -> float:
        """Seconds of the prompt's pass and all rounds (tokenising and what a streamer does are not in it)."""
        return self.prefill_s + self.decode_s

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of decoding, each row's first token and the prompt's pass left out."""
        return self.round_tokens / self.decode_s if self.decode_s else 0.0

    def predicted_speedup(self, plain_step_s: float) -> float:
        """Tokens per time against plain decoding at `plain_step_s` a token, from acceptance and model time alone.

        Leviathan et al. 2023, thm. 3.8, with measured costs: tokens a round over the seconds its passes take. The
        measured speed-up is lower by what `host_s` costs.
        """
        passes_s = self.draft_s + self.verify_s
        return self.round_tokens * plain_step_s / passes_s if passes_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All counts, times and derived figures, for JSON."""
        derived = (
            "accepted",
            "tokens_per_round",
            "acceptance_rate",
            "acceptance_by_offset",
            "decode_s",
            "total_s",
            "tokens_per_s",
        )
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def _sum(own: Any, other: Any) -> Any:
    if isinstance(own, list):
        return [a + b for a, b in zip_longest(own, other, fillvalue=0)]
    if isinstance(own, dict):
        return {name: own.get(name, 0) + other.get(name, 0) for name in {**own, **other}}
    return own + other


def _count(counts: list[int], indices: Sequence[int]) -> None:
    """Add one at each of `indices`, lengthening `counts` as needed."""
    counts.extend([0] * (max(indices, default=-1) + 1 - len(counts)))
    for index in indices:
        counts[index] += 1
