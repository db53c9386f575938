"""A candidate: one way for a model to draft for itself, as the search thinks of it, before it has become a plan.

It differs from a `DraftPlan` in what it leaves open: how many tokens to draft follows from acceptance and cost, and a
draft vocabulary is a size only, whose ids follow from the calibration texts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from layerskip.errors import SearchError
from layerskip.models.decoder import Step
from layerskip.plan import DraftPlan

__all__ = ["Candidate"]


@dataclass(frozen=True)
class Candidate:
    """What a draft runs. Two candidates are equal if and only if they run the same; make one with `of`.

    Attributes:
        skip_attention, skip_mlp: layers whose sub-block is left out, ascending; all below the exit.
        exit_layer: number of leading layers that may run; None: all.
        vocabulary_size: number of token ids that are scored; None: all.
        trained: name of the trained path that it is (`TrainedPath.name`), whose blocks run behind the exit, which may
            then be 0, and before which nothing is skipped; None: it runs blocks of the model only.
    """

    skip_attention: tuple[int, ...] = ()
    skip_mlp: tuple[int, ...] = ()
    exit_layer: int | None = None
    vocabulary_size: int | None = None
    trained: str | None = None

    @classmethod
    def of(
        cls,
        num_blocks: int,
        skip_attention: Iterable[int] = (),
        skip_mlp: Iterable[int] = (),
        exit_layer: int | None = None,
        vocabulary_size: int | None = None,
    ) -> Candidate:
        """The candidate in its one form: layers skipped whole at the end are an exit, and an exit behind all is none.

        Args:
            num_blocks: of the model.
        """
        attention, mlp = set(skip_attention), set(skip_mlp)
        end = num_blocks if exit_layer is None else exit_layer
        while end > 0 and end - 1 in attention and end - 1 in mlp:
            end -= 1
        return cls(
            tuple(sorted(layer for layer in attention if layer < end)),
            tuple(sorted(layer for layer in mlp if layer < end)),
            end if end < num_blocks else None,
            vocabulary_size,
        )

    def path(self, num_blocks: int) -> tuple[Step, ...]:
        """The sub-blocks that run, as `DraftPlan.path`; empty if none does."""
        attention, mlp = set(self.skip_attention), set(self.skip_mlp)
        end = num_blocks if self.exit_layer is None else self.exit_layer
        steps = (Step(layer, layer not in attention, layer not in mlp) for layer in range(end))
        return tuple(step for step in steps if step.attention or step.mlp)

    def drafts(self, num_blocks: int) -> bool:
        """Whether it is a draft at all: not the model itself, which is plain decoding, and not nothing."""
        if self.trained is not None:
            return True
        leaves_out = self.skip_attention or self.skip_mlp or self.exit_layer or self.vocabulary_size
        return bool(leaves_out) and bool(self.path(num_blocks))

    def skipped(self, num_blocks: int) -> tuple[frozenset[int], frozenset[int]]:
        """All layers whose attention, and all whose MLP, does not run; those behind the exit are among them."""
        behind = range(num_blocks if self.exit_layer is None else self.exit_layer, num_blocks)
        return frozenset((*self.skip_attention, *behind)), frozenset((*self.skip_mlp, *behind))

    def without(self, num_blocks: int, attention: Iterable[int] = (), mlp: Iterable[int] = ()) -> Candidate:
        """This candidate, if it is no trained path, with further sub-blocks left out."""
        skipped_attention, skipped_mlp = self.skipped(num_blocks)
        return Candidate.of(
            num_blocks, {*skipped_attention, *attention}, {*skipped_mlp, *mlp}, None, self.vocabulary_size
        )

    def plan(self, num_draft_tokens: int, draft_vocabulary: tuple[int, ...] | None = None, **fields: Any) -> DraftPlan:
        """A plan that drafts along it.

        Args:
            draft_vocabulary: the ids, where it scores but some.
            fields: further ones of the plan; of a trained path its `adapter`.

        Raises:
            SearchError: a trained path without an adapter, or the other way round, which would be another draft.
        """
        if (self.trained is None) != (fields.get("adapter") is None):
            raise SearchError(
                f"got adapter={fields.get('adapter')!r} for {self.describe()}; expected one for a trained path, and "
                "for nothing else."
            )
        return DraftPlan(
            skip_attention=self.skip_attention,
            skip_mlp=self.skip_mlp,
            exit_layer=self.exit_layer,
            num_draft_tokens=num_draft_tokens,
            draft_vocabulary=draft_vocabulary,
            **fields,
        )

    def describe(self) -> str:
        """In some words, for tables and progress bars."""
        parts = []
        if self.trained is not None:
            kind = f"exit {self.exit_layer}" if self.exit_layer else "jump"
            parts.append(f"trained {kind} {self.trained}")
        elif self.exit_layer is not None:
            parts.append(f"exit {self.exit_layer}")
        if self.skip_attention or self.skip_mlp:
            parts.append(f"without {len(self.skip_attention)} attentions and {len(self.skip_mlp)} MLPs")
        if self.vocabulary_size is not None:
            parts.append(f"{self.vocabulary_size:,} ids")
        return ", ".join(parts) or "the whole model"
