"""KnapSpec: sub-blocks as a knapsack whose weights are their profiled times (ICML 2026).

Attention and MLP have integer weights by what they take; a table holds, for every weight that may have been skipped so
far, the state that is most like the full model's. A branch is given up when that likeness falls too low. For every
weight that survives to the end, the drafts of its state are compared with the full model's, and the weight and the
length of a draft are chosen that give most tokens per second.

What differs: times are the cost model's means, which hold at one context length, not a line through several; positions
are those of one part of the replay, not the accepted ones of five rounds; the first layer and the last are kept, as
there. Faults that are mended: a set counts by its best length (the published program drafts ten tokens whatever was
chosen), the empty set is no way to gain, and whether a set beats not drafting at all is asked, by the judge.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from layerskip.models.decoder import Step
from layerskip.search.candidate import Candidate
from layerskip.search.cost import mean_costs
from layerskip.search.selectors.base import (
    Branches,
    Workbench,
    candidate_without,
    inner_layers,
    refuse_fields,
    sub_blocks,
)

__all__ = ["KnapSpec", "best_tokens_per_s", "weights"]

_Cell = tuple[float, Tensor, tuple[Step, ...]]  # likeness to the full model, state, what was skipped on the way to it


@dataclass(frozen=True)
class KnapSpec:
    """The knapsack's sets, by the tokens per second that they promise; if all are given up, the likest single skip.

    Attributes:
        budget: share of the whole weight that may be skipped.
        heaviest: the dearer kind of sub-block weighs at most so many times the other.
        least_cosine: a branch whose mean cosine is below this is given up.
        most_drafts: longest draft that is considered.
    """

    budget: float = 0.5
    heaviest: int = 5
    least_cosine: float = 0.5
    most_drafts: int = 17

    def __post_init__(self) -> None:
        """Check the fields."""
        refuse_fields(
            self,
            budget=0 < self.budget < 1,
            heaviest=self.heaviest >= 1,
            least_cosine=-1 <= self.least_cosine <= 1,
            most_drafts=self.most_drafts >= 1,
        )

    def select(self, bench: Workbench) -> list[Candidate]:
        """See `Selector`."""
        inner_layers(bench.num_blocks)
        branches = Branches(bench.judge.replay)
        cells, truth = self.table(bench, branches)
        said = branches.scored(truth)[0]
        rates = {}
        for _, state, skipped in cells.values():
            if skipped:
                alpha = float((branches.scored(state)[0] == said).double().mean())
                rates[candidate_without(bench.num_blocks, skipped)] = self.tokens_per_s(bench, skipped, alpha)
        return sorted(rates, key=lambda each: -rates[each]) or [self.likest_skip(bench, branches)]

    def table(self, bench: Workbench, branches: Branches) -> tuple[dict[int, _Cell], Tensor]:
        """The table's last column, by the weight that was skipped, and the full model's last state."""
        attention, mlp = weights(*mean_costs(bench.judge.costs), self.heaviest)
        most = int((attention + mlp) * bench.num_blocks * self.budget)
        steps = sub_blocks(bench.num_blocks)
        may_skip = inner_layers(bench.num_blocks)
        cells: dict[int, _Cell] = {}
        truth = branches.replay.padded_states(branches.batch, 0)
        for step, (before, truth) in zip(steps, branches.full(steps), strict=True):
            weight = attention if step.attention else mlp
            column: dict[int, _Cell] = {0: (1.0, truth, ())}
            for skipped_weight, (_, state, skipped) in sorted((cells or {0: (1.0, before, ())}).items()):
                if skipped_weight:
                    ran = branches.run(step, state)
                    _keep(column, skipped_weight, (branches.similarity(ran, truth), ran, skipped))
                if step.block in may_skip and skipped_weight + weight <= most:
                    likeness = branches.similarity(state, truth)
                    _keep(column, skipped_weight + weight, (likeness, state, (*skipped, step)))
            cells = {each: cell for each, cell in column.items() if not each or cell[0] >= self.least_cosine}
        return cells, truth

    def likest_skip(self, bench: Workbench, branches: Branches) -> Candidate:
        """Without the one sub-block that changes its input's direction least."""
        steps, layers = sub_blocks(bench.num_blocks), inner_layers(bench.num_blocks)
        cosines = {
            step: branches.similarity(before, behind)
            for step, (before, behind) in zip(steps, branches.full(steps), strict=True)
            if step.block in layers
        }
        return candidate_without(bench.num_blocks, [max(cosines, key=lambda step: cosines[step])])

    def tokens_per_s(self, bench: Workbench, skipped: tuple[Step, ...], alpha: float) -> float:
        """At the best length of a draft, with blocks alone counted as cost, as published."""
        attention_s, mlp_s = mean_costs(bench.judge.costs)
        kept_attentions = bench.num_blocks - sum(step.attention for step in skipped)
        kept_mlps = bench.num_blocks - sum(step.mlp for step in skipped)
        draft_s = kept_attentions * attention_s + kept_mlps * mlp_s
        plain_s = bench.num_blocks * (attention_s + mlp_s)
        return best_tokens_per_s(alpha, draft_s, plain_s, self.most_drafts)


def weights(attention_s: float, mlp_s: float, heaviest: int) -> tuple[int, int]:
    """Of an attention and of an MLP: 1 for the cheaper, a small multiple for the other."""
    low, high = sorted((attention_s, mlp_s))
    multiple = min(heaviest, max(1, round(high / low))) if low > 0 else heaviest
    return (1, multiple) if attention_s <= mlp_s else (multiple, 1)


def best_tokens_per_s(alpha: float, draft_s: float, plain_s: float, most_drafts: int) -> float:
    """Tokens a second at the best length from 1 on, when a verification costs a plain step."""
    return max(
        sum(alpha**power for power in range(drafts + 1)) / (drafts * draft_s + plain_s)
        for drafts in range(1, most_drafts + 1)
    )


def _keep(column: dict[int, _Cell], weight: int, cell: _Cell) -> None:
    if weight not in column or cell[0] > column[weight][0]:
        column[weight] = cell
