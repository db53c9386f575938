"""ADMG: leave out the attentions that hardly change the direction of their input (Metel et al., EMNLP Findings 2024).

"Draft on the Fly". No search: one look at cosine similarities. What differs: the published method looks at the prompt
of each request and so drafts differently for each; here one look at the replayed answers gives one set. Its two
further, deterministic rules are left out: this is the cosine rule alone. The threshold is ours; which one is right
depends on the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from layerskip.search.candidate import Candidate
from layerskip.search.selectors.base import Branches, Workbench, refuse_fields, sub_blocks

__all__ = ["Admg"]


@dataclass(frozen=True)
class Admg:
    """Skips every attention whose output is nearly parallel to its input; if none is, the one that comes nearest.

    Attributes:
        threshold: of the mean cosine, above which an attention is skipped.
    """

    threshold: float = 0.98

    def __post_init__(self) -> None:
        """Check the field."""
        refuse_fields(self, threshold=-1 <= self.threshold <= 1)

    def select(self, bench: Workbench) -> list[Candidate]:
        """See `Selector`."""
        found = self.similarities(bench)
        skipped = [layer for layer, cosine in enumerate(found) if cosine > self.threshold]
        return [Candidate.of(bench.num_blocks, skipped or [max(range(len(found)), key=found.__getitem__)])]

    def similarities(self, bench: Workbench) -> list[float]:
        """Of each layer, the mean cosine of the residual stream before and behind its attention."""
        branches, steps = Branches(bench.judge.replay), sub_blocks(bench.num_blocks)
        return [
            branches.similarity(before, behind)
            for step, (before, behind) in zip(steps, branches.full(steps), strict=True)
            if step.attention
        ]
