"""What a draft step and a verification pass cost on this device, for any candidate: measured once, then arithmetic.

Measured is the real thing, rounds of the engine, for a handful of paths in turn; a candidate's cost is put together
from what these have in common. Timing single blocks in a loop would not do: between the others every block finds the
caches emptied. Trials read no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from layerskip.drafters.self_draft import count_exact_blocks
from layerskip.errors import SearchError
from layerskip.search.candidate import Candidate

__all__ = ["CostModel", "mean_costs", "uniform_costs"]


@dataclass(frozen=True)
class CostModel:
    """Seconds, by what runs.

    Attributes:
        plain_s: of a plain step, everything included.
        attention_s, mlp_s: of each layer's sub-block in a draft step.
        head_sizes, head_s: of a draft step without any sub-block (embedding, final norm, scoring, choosing), by the
            number of ids scored, ascending; the last is the whole vocabulary. Between sizes it is linear.
        verify_s: of a verification pass over 1, 2, … tokens and of all that follows from it, when no block's states
            can be taken from the draft; beyond the last it grows as between the last two.
        conditions: where this was measured: device, dtype, threads, context length, versions.
        trained_s: what the blocks of each trained path add to a draft step, by name.
        trained_round_s: what a round of each takes beyond its drafts and `verify_s`: states are kept for it, and what
            is recorded elsewhere (on GPUs) is not for it.
        reuses_exact_states: verification takes over what the draft's leading whole blocks computed (static rounds, the
            way of GPUs, do not).
    """

    plain_s: float
    attention_s: tuple[float, ...]
    mlp_s: tuple[float, ...]
    head_sizes: tuple[int, ...]
    head_s: tuple[float, ...]
    verify_s: tuple[float, ...]
    conditions: dict[str, Any]
    reuses_exact_states: bool = True
    trained_s: dict[str, float] = field(default_factory=dict)
    trained_round_s: dict[str, float] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        """Of the model."""
        return len(self.attention_s)

    def draft_s(self, candidate: Candidate) -> float:
        """Of one draft step of `candidate`.

        Raises:
            SearchError: it is a trained path that was not measured.
        """
        path = candidate.path(self.num_blocks)
        blocks = sum(self.attention_s[block] * attention + self.mlp_s[block] * mlp for block, attention, mlp in path)
        if candidate.trained is not None:
            if candidate.trained not in self.trained_s:
                known = ", ".join(self.trained_s) or "none"
                raise SearchError(
                    f"got the trained path {candidate.trained}, and costs of {known}. Measure them with this path."
                )
            blocks += self.trained_s[candidate.trained]
        return blocks + self._head_s(candidate.vocabulary_size or self.head_sizes[-1])

    def draft_ratio(self, candidate: Candidate) -> float:
        """The same in plain steps."""
        return self.draft_s(candidate) / self.plain_s

    def verify_ratio(self, width: int, candidate: Candidate | None = None) -> float:
        """Cost in plain steps of a round's verification over `width` tokens.

        Args:
            candidate: whose draft it verifies. Blocks that the draft ran on exact states run for one token only.
        """
        known = self.verify_s
        if width <= len(known):
            seconds = known[width - 1]
        else:
            seconds = known[-1] + (width - len(known)) * max(0.0, known[-1] - known[-2] if len(known) > 1 else 0.0)
        if candidate is not None and self.reuses_exact_states:
            reused = count_exact_blocks(candidate.path(self.num_blocks)) / self.num_blocks
            seconds -= reused * self._blocks_share * (seconds - known[0])
        if candidate is not None and candidate.trained is not None:
            seconds += self.trained_round_s.get(candidate.trained, 0.0)
        return seconds / self.plain_s

    def round_ratio(self, candidate: Candidate, num_draft_tokens: int) -> float:
        """Cost of a whole round in plain steps: K c + v(K + 1) of Leviathan et al. 2023, thm. 3.8."""
        return num_draft_tokens * self.draft_ratio(candidate) + self.verify_ratio(num_draft_tokens + 1, candidate)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> CostModel:
        """Read what `to_dict` wrote."""
        fields: dict[str, Any] = {
            name: tuple(each) if isinstance(each, list) else each for name, each in content.items()
        }
        return cls(**fields)

    @property
    def _blocks_share(self) -> float:
        blocks = sum(self.attention_s) + sum(self.mlp_s)
        return blocks / (blocks + self.head_s[-1])

    def _head_s(self, ids: int) -> float:
        sizes, seconds = self.head_sizes, self.head_s
        if ids in sizes or len(sizes) == 1:
            return seconds[sizes.index(ids)] if ids in sizes else seconds[0]
        above = min(max(1, bisect_left(sizes, ids)), len(sizes) - 1)
        low, high = sizes[above - 1], sizes[above]
        return seconds[above - 1] + (seconds[above] - seconds[above - 1]) * (ids - low) / (high - low)


def uniform_costs(
    num_blocks: int,
    *,
    attention: float = 0.3,
    mlp: float = 0.7,
    head: float = 1.0,
    verify_slope: float = 0.02,
    vocabulary: int = 1,
    widths: int = 9,
    trained: Mapping[str, float] = {},
) -> CostModel:
    """Costs that nobody measured, in units of one block; a pass over n tokens costs 1 + slope (n - 1) plain steps.

    Args:
        trained: of each trained path's blocks, by name.
    """
    plain = num_blocks * (attention + mlp) + head
    return CostModel(
        plain_s=plain,
        attention_s=(attention,) * num_blocks,
        mlp_s=(mlp,) * num_blocks,
        head_sizes=(vocabulary,),
        head_s=(head,),
        verify_s=tuple(plain * (1 + verify_slope * extra) for extra in range(widths)),
        conditions={"measured": False},
        trained_s=dict(trained),
    )


def mean_costs(costs: CostModel) -> tuple[float, float]:
    """Mean seconds of an attention and of an MLP sub-block."""
    return _mean(costs.attention_s), _mean(costs.mlp_s)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
