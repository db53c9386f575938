"""Random sets of a fixed size: the other half of SWIFT (Xia et al., ICLR 2025), whose proposals are mostly random.

A set is scored as there, by how often one parallel draft pass over the model's own answers agrees with them. What
differs: as many sets are drawn as are asked for, instead of until nothing has improved for 300 of them, and every 25th
is not proposed by a Gaussian process; so this is also the baseline that any cleverer rule must beat at equal effort.
"""

from __future__ import annotations

from dataclasses import dataclass

from layerskip.search.candidate import Candidate
from layerskip.search.selectors.base import Workbench, candidate_without, inner_layers, refuse_fields, sub_blocks

__all__ = ["RandomSets"]


@dataclass(frozen=True)
class RandomSets:
    """The sets that agree best among some of one size.

    Attributes:
        skip_ratio: share of the inner layers' sub-blocks that is left out; at least one is.
        draws: sets that are tried.
    """

    skip_ratio: float = 0.45
    draws: int = 25

    def __post_init__(self) -> None:
        """Check the fields."""
        refuse_fields(self, skip_ratio=0 < self.skip_ratio <= 1, draws=self.draws >= 1)

    def select(self, bench: Workbench) -> list[Candidate]:
        """See `Selector`."""
        layers = inner_layers(bench.num_blocks)
        inner = [step for step in sub_blocks(bench.num_blocks) if step.block in layers]
        size = max(1, int(len(inner) * self.skip_ratio))
        drawn = dict.fromkeys(
            candidate_without(bench.num_blocks, bench.rng.sample(inner, size)) for _ in range(self.draws)
        )
        return sorted(drawn, key=lambda each: -bench.judge.judge(each, batches=1).acceptance.rate)
