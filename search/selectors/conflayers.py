"""ConfLayers: skip layers that are less sure of themselves than their neighbours (2026).

How sure a sub-block is: one minus the normalised entropy of a softmax over the hidden units of what it adds. A layer's
figure is the sum of both, averaged over the last tokens, as a z-score among all inner layers. It is skipped if it lies
below the mean of its neighbours less `strictness` deviations of theirs; how many neighbours count follows from the
curvature of the figures and the depth. Strictness is moved until the share of skipped layers is near what is wanted;
the set whose drafts were accepted furthest is kept.

What differs: the published method tries each set on its next thirty rounds; here a set is replayed on one part of the
texts, and the window of tokens that figures are averaged over moves on from one iteration to the next, as it does
there. The rule that it has for one model family only (fewer neighbours) is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

import torch
from torch import Tensor

from layerskip.search.candidate import Candidate
from layerskip.search.selectors.base import Branches, Workbench, inner_layers, refuse_fields, sub_blocks

__all__ = ["ConfLayers", "confidence", "neighbourhoods", "skipped_layers"]


@dataclass(frozen=True)
class ConfLayers:
    """The sets that were tried, by how far their drafts were accepted.

    Attributes:
        window: tokens that a figure is averaged over.
        skip_ratio: share of layers that is wanted; up to `slack` more is let be.
        step: by which strictness is moved.
        iterations: at most; a set that is accepted further than `enough_accepted` a round at more than `enough_rate`
            ends them.
    """

    window: int = 100
    skip_ratio: float = 0.4
    slack: float = 0.25
    step: float = 0.05
    iterations: int = 100
    enough_accepted: float = 4.0
    enough_rate: float = 0.95

    def __post_init__(self) -> None:
        """Check the fields."""
        refuse_fields(
            self,
            window=self.window >= 1,
            skip_ratio=0 < self.skip_ratio < 1,
            slack=self.slack >= 0,
            step=self.step > 0,
            iterations=self.iterations >= 1,
        )

    def select(self, bench: Workbench) -> list[Candidate]:
        """See `Selector`."""
        layers = inner_layers(bench.num_blocks)
        sureness = self._sureness(bench)
        windows = sureness.split(self.window, dim=1)
        accepted: dict[Candidate, float] = {}
        strictness = 0.0
        for iteration in range(self.iterations):
            figures = windows[iteration % len(windows)].mean(1)[1:-1].tolist()
            skipped = [layers[index] for index in skipped_layers(figures, strictness, bench.num_blocks)]
            share = len(skipped) / bench.num_blocks
            if share > self.skip_ratio + self.slack:
                strictness += self.step
            elif share < self.skip_ratio:
                strictness -= self.step
            candidate = Candidate.of(bench.num_blocks, skipped, skipped)
            if not skipped or candidate in accepted:
                continue
            found = bench.judge.judge(candidate, batches=1).acceptance
            accepted[candidate] = found.tokens_per_round(len(found.observed)) - 1
            if accepted[candidate] > self.enough_accepted and found.rate > self.enough_rate:
                break
        if not accepted:
            figures = sureness.mean(1)[1:-1].tolist()
            least = [layers[figures.index(min(figures))]]
            return [Candidate.of(bench.num_blocks, least, least)]
        return sorted(accepted, key=lambda each: -accepted[each])

    def _sureness(self, bench: Workbench) -> Tensor:
        """Of each layer at each position of one part: (layers, positions)."""
        branches, steps = Branches(bench.judge.replay), sub_blocks(bench.num_blocks)
        found = torch.stack([confidence((behind - before)[branches.valid]) for before, behind in branches.full(steps)])
        return found.view(bench.num_blocks, 2, -1).sum(1)


def confidence(added: Tensor) -> Tensor:
    """One minus the normalised entropy of what a sub-block adds, (positions, hidden_size) -> (positions,)."""
    log_probs = added.double().log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return 1 - entropy / math.log(added.shape[-1])


def neighbourhoods(scores: Sequence[float], num_blocks: int) -> list[int]:
    """For each inner layer, how many layers to either side it is compared with.

    Args:
        scores: of the inner layers.
    """
    bends = [0.0] * len(scores)
    for index in range(1, len(scores) - 1):
        bends[index] = scores[index - 1] - 2 * scores[index] + scores[index + 1]
    low, high = min(bends), max(bends)
    scaled = [(bend - low) / (high - low) if high > low else 0.5 for bend in bends]
    shift = 0.5 - fmean(scaled)
    run = next((index for index, score in enumerate(scores) if score != scores[0]), len(scores))
    return [
        2 + max(0, int(5 * run * (bend + shift) * (index + 2) / num_blocks))  # the layer is index + 1
        for index, bend in enumerate(scaled)
    ]


def skipped_layers(figures: Sequence[float], strictness: float, num_blocks: int) -> list[int]:
    """Indices of those among the inner layers' `figures` that lie below their neighbours."""
    spread = pstdev(figures)
    scores = [(figure - fmean(figures)) / spread if spread else 0.0 for figure in figures]
    skipped = []
    for index, reach in enumerate(neighbourhoods(scores, num_blocks)):
        others = [*scores[max(0, index - reach) : index], *scores[index + 1 : index + 1 + reach]]
        if others and scores[index] < fmean(others) - strictness * pstdev(others):
            skipped.append(index)
    return skipped
