"""DEL: the exit, and the length of a draft, from what every exit would have said (Zarch et al., COLM 2025).

Behind each round the states of all layers are scored by the model's own norm and head. Each exit keeps decaying counts
of how often it agreed with the whole model, and how sure it was then and otherwise; the next round takes the exit and
the length that promise most tokens for the layers that are run.

An exit's draft runs on states that are the full model's, so these rounds can be played on a replay exactly, after one
pass. What differs: a plan has one exit, so the one that most rounds took is chosen, not a new one each
round; and the statistics begin with the first round of an answer, since a replay holds no states of the prompt's last
32 positions, which the published method reads first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from layerskip.errors import SearchError
from layerskip.search.candidate import Candidate
from layerskip.search.selectors.base import Branches, Workbench, refuse_fields

__all__ = ["DelExit", "ExitStatistics", "tokens_per_layer"]


@dataclass(frozen=True)
class DelExit:
    """Exits, by how many rounds took them.

    Attributes:
        decay: of all counts, a round.
        most_drafts: longest draft that is considered.
    """

    decay: float = 0.95
    most_drafts: int = 17

    def __post_init__(self) -> None:
        """Check the fields."""
        refuse_fields(self, decay=0 < self.decay <= 1, most_drafts=self.most_drafts >= 1)

    def select(self, bench: Workbench) -> list[Candidate]:
        """See `Selector`."""
        blocks = bench.num_blocks
        if blocks < 2:
            raise SearchError("got a model of 1 block; expected at least 2 for an exit. Choose another selector.")
        matches, confidences = self._shadows(bench)
        votes = [0] * blocks
        statistics = ExitStatistics(blocks, self.decay)
        first = 0
        for text in bench.judge.replay.texts_of(0):
            rows = slice(first, first + text.num_positions)
            statistics = ExitStatistics(blocks, self.decay)
            self.play(statistics, matches[:, rows], confidences[:, rows], votes)
            first += text.num_positions
        last = [max(tokens_per_layer(rate, layer, d, blocks) for d in range(1, self.most_drafts + 1))
                for layer, rate in enumerate(statistics.rates())]  # fmt: skip
        exits = sorted(range(1, blocks), key=lambda layer: (-votes[layer], -last[layer]))
        return [Candidate.of(blocks, exit_layer=layer) for layer in exits]

    def play(self, statistics: ExitStatistics, matches: Tensor, confidences: Tensor, votes: list[int]) -> None:
        """The rounds of one text, the first by exit 1 with one draft; `votes` counts by exit those that chose to draft.

        Args:
            matches: (layers, positions), whether each exit's token is the whole model's; row 0 is no exit.
            confidences: (layers, positions), of that token.
        """
        position, layer, length = 0, 1, 1
        while position < matches.shape[1]:
            floor = statistics.floor(layer)
            drafted = 0
            while drafted < length and position + drafted < matches.shape[1]:
                drafted += 1
                if float(confidences[layer, position + drafted - 1]) < floor:
                    break  # behind the unsure token, which is verified
            # What was verified: each draft, and the token behind them; all of it up to the first draft that fell.
            seen = matches[layer, position : position + drafted + 1].tolist()
            count = seen.index(False) + 1 if False in seen else len(seen)
            rows = slice(position, position + count)
            statistics.add(matches[:, rows], confidences[:, rows])
            position += count
            layer, length = self.next_round(statistics.rates())
            if length and position < matches.shape[1]:
                votes[layer] += 1

    def next_round(self, rates: Sequence[float]) -> tuple[int, int]:
        """The exit and the length that promise most; length 0: do not draft."""
        blocks = len(rates)
        choices = ((layer, length) for layer in range(1, blocks) for length in range(self.most_drafts + 1))
        return max(choices, key=lambda each: tokens_per_layer(rates[each[0]], each[0], each[1], blocks))

    def _shadows(self, bench: Workbench) -> tuple[Tensor, Tensor]:
        """What every exit would have said at the positions of one part: see `play`."""
        branches = Branches(bench.judge.replay)
        # Run anew: a replay of a large model has no room to keep the states before every block.
        scored = [branches.scored(behind) for _, behind in branches.full(branches.replay.decoder.full_path)]
        said = scored[-1][0]
        matches = [torch.zeros_like(said, dtype=torch.bool), *(tokens == said for tokens, _ in scored[:-1])]
        confidences = [torch.zeros_like(scored[-1][1]), *(sure for _, sure in scored[:-1])]
        return torch.stack(matches).cpu(), torch.stack(confidences).cpu()


def tokens_per_layer(rate: float, layer: int, length: int, blocks: int) -> float:
    """Tokens of a round for each layer that it runs: the published measure, in which a head costs nothing."""
    return sum(rate**power for power in range(length + 1)) / (length * layer + blocks)


@dataclass
class ExitStatistics:
    """Decaying counts of every exit.

    Attributes:
        matched, mismatched: (blocks,), positions.
        sure, unsure: (blocks,), sums of confidence at those.
    """

    blocks: int
    decay: float
    matched: Tensor = field(init=False)
    mismatched: Tensor = field(init=False)
    sure: Tensor = field(init=False)
    unsure: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Nothing was seen."""
        self.matched, self.mismatched, self.sure, self.unsure = torch.zeros(4, self.blocks, dtype=torch.float64)

    def add(self, matches: Tensor, confidences: Tensor) -> None:
        """A round's positions; see `DelExit.play`."""
        hits, confidences = matches.double(), confidences.double()
        self.matched = self.decay * self.matched + hits.sum(1)
        self.mismatched = self.decay * self.mismatched + (1 - hits).sum(1)
        self.sure = self.decay * self.sure + (hits * confidences).sum(1)
        self.unsure = self.decay * self.unsure + ((1 - hits) * confidences).sum(1)

    def rates(self) -> list[float]:
        """How often each exit agrees; 0 where nothing was seen."""
        seen = self.matched + self.mismatched
        rates: list[float] = torch.where(seen > 0, self.matched / seen.clamp(min=1e-12), 0.0).tolist()
        return rates

    def floor(self, layer: int) -> float:
        """The confidence below which an exit's draft ends: midway between its means where it was right and wrong."""
        if self.matched[layer] == 0 or self.mismatched[layer] == 0:
            return 0.0  # of one kind nothing is known
        sure, unsure = self.sure[layer] / self.matched[layer], self.unsure[layer] / self.mismatched[layer]
        return float(sure + unsure) / 2
