"""What a method that chooses a draft's sub-blocks is, what it is given to work with, and what several of them share.

Published methods choose while they decode, from the states of the last tokens. Here all of them look at the same
replayed positions, so that they differ in their rule alone. Whether the choice pays is not theirs to say: the judge
says it of all of them alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.errors import SearchError, SettingError
from layerskip.models.decoder import Step
from layerskip.plan import DraftPlan
from layerskip.search.candidate import Candidate
from layerskip.search.judge import Judge
from layerskip.search.replay import Replay

__all__ = ["Branches", "Selector", "Workbench", "candidate_without", "inner_layers", "refuse_fields", "sub_blocks"]

_HEAD_POSITIONS = 512  # scored at once, as in a replay


@dataclass(frozen=True)
class Workbench:
    """What a selector works with.

    Attributes:
        judge: the texts that it may look at, and the costs.
        rng: everything that is drawn comes from here.
        tokens_per_s: of real decoding by a plan, for methods that search by the clock; None: nothing decodes here.
    """

    judge: Judge
    rng: random.Random
    tokens_per_s: Callable[[DraftPlan], float] | None = None

    @classmethod
    def seeded(cls, judge: Judge, seed: int = 0, tokens_per_s: Callable[[DraftPlan], float] | None = None) -> Workbench:
        """With a generator of its own."""
        return cls(judge, random.Random(seed), tokens_per_s)

    @property
    def num_blocks(self) -> int:
        """Of the model."""
        return self.judge.num_blocks


class Selector(Protocol):
    """A method to choose what a draft leaves out: a frozen dataclass of its published constants."""

    def select(self, bench: Workbench) -> list[Candidate]:
        """What the method would draft with, best first: at least one, none of them empty or the whole model.

        Where a method's own rule says that nothing should be left out, it returns what comes nearest to being left out.

        Raises:
            SearchError: the model is too small for the method, or the workbench lacks what it needs.
        """


def refuse_fields(selector: object, **fits: bool) -> None:
    """Refuse the fields whose values do not fit.

    Raises:
        SettingError: one of them does not.
    """
    for name, is_right in fits.items():
        if not is_right:
            raise SettingError(
                f"got {name}={getattr(selector, name)!r} for {type(selector).__name__}; expected a value in its range "
                "(see the class)."
            )


def inner_layers(num_blocks: int) -> range:
    """All but the first and the last, which several methods never skip.

    Raises:
        SearchError: there are none.
    """
    if num_blocks < 3:
        raise SearchError(
            f"got a model of {num_blocks} blocks for a method that keeps the first and the last; expected at least 3. "
            "Choose another selector."
        )
    return range(1, num_blocks - 1)


def sub_blocks(num_blocks: int) -> list[Step]:
    """All attention and MLP sub-blocks, one a step, in the order in which they run."""
    return [Step(block, attention, not attention) for block in range(num_blocks) for attention in (True, False)]


def candidate_without(num_blocks: int, skipped: Iterable[Step]) -> Candidate:
    """The candidate that leaves out the sub-blocks of `skipped`."""
    listed = list(skipped)
    return Candidate.of(
        num_blocks,
        [step.block for step in listed if step.attention],
        [step.block for step in listed if step.mlp],
    )


class Branches:
    """One part of a replay, through which a method sends states of its own making, step by step.

    Hidden states are (batch, positions, hidden_size), padded. Several branches through one step are run one after
    another: each is already a batch of all positions.

    Attributes:
        draft_length: see `Replay.run_sub_block`; None: the replay's own, where a position sees its own branch's
            entries back to where its draft began; 1: it sees the full model's entries and itself.
    """

    def __init__(self, replay: Replay, batch: int = 0, draft_length: int | None = None) -> None:
        """See the class."""
        self.replay, self.batch, self.draft_length = replay, batch, draft_length
        first = replay.padded_states(batch, 0)
        counts = torch.tensor([text.num_positions for text in replay.texts_of(batch)], device=first.device)
        self.valid = torch.arange(first.shape[1], device=first.device) < counts[:, None]

    def run(self, step: Step, hidden: Tensor) -> Tensor:
        """`hidden` behind `step`."""
        return self.replay.run_sub_block(self.batch, step, hidden, draft_length=self.draft_length)

    def full(self, steps: Sequence[Step]) -> Iterator[tuple[Tensor, Tensor]]:
        """The full model's states before and behind each of `steps`, which are all there are, in order."""
        hidden = self.replay.padded_states(self.batch, 0)
        for step in steps:
            behind = self.run(step, hidden)
            yield hidden, behind
            hidden = behind

    def similarity(self, hidden: Tensor, other: Tensor) -> float:
        """Mean cosine over the positions."""
        with torch.inference_mode():
            cosines = F.cosine_similarity(hidden[self.valid].double(), other[self.valid].double(), dim=-1)
            return float(cosines.mean())

    def scored(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest next token at each position behind the last block, and its probability: (positions,) each."""
        with torch.inference_mode():
            tokens, confidences = [], []
            for some in hidden[self.valid].split(_HEAD_POSITIONS):
                best = self.replay.decoder.logits(some[None])[0].double().softmax(-1).max(-1)
                tokens.append(best.indices)
                confidences.append(best.values)
            return torch.cat(tokens), torch.cat(confidences)
