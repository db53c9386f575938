"""The model drafts by trained heads (`models/heads.py`), several tokens from one state (Medusa, Cai et al. 2024).

The state is the model's final one behind the token before the newest, which verification left in the cache; its own
head chose the newest token from it, and head `j` guesses the `j`-th behind that. There are no blocks to run, no keys
and values, nothing to catch up with. What a head guesses does not depend on what the heads before it guessed: any
candidate of one offset may follow any of the offset before, and the likeliest of these paths are a tree (`crossed`).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from itertools import count

from torch import Tensor

from layerskip.draft import Draft, Node, tree_draft
from layerskip.drafters.base import DraftContext, GoesOn, draft_chain, draft_steps
from layerskip.models.decoder import Decoder, Forward
from layerskip.models.heads import Heads
from layerskip.state import DecodeState

__all__ = ["HeadsDrafter", "crossed"]


class HeadsDrafter:
    """Drafts with `heads`; with siblings a tree of as many nodes as there would be beside a chain."""

    def __init__(
        self, decoder: Decoder, heads: Heads, context: DraftContext, vocabulary: Sequence[int] | None = None
    ) -> None:
        """See the class.

        Args:
            vocabulary: ids that are scored, ascending; None: all. The others have draft probability 0.
        """
        self.decoder, self.context, self._heads = decoder, context, heads
        self._head = decoder.full_head if vocabulary is None else decoder.partial_head(tuple(vocabulary))

    def begin(self, state: DecodeState) -> None:
        """Nothing: what is read stands in the cache."""

    def outlook(self, state: DecodeState) -> Sequence[int | None]:
        """Nothing is known before; a row can always draft."""
        return [0] * state.batch

    def catch_up(self, state: DecodeState) -> None:
        """Nothing: heads read one state, which verification leaves in the cache."""

    def propose(self, state: DecodeState, limits: Sequence[int], goes_on: GoesOn | None = None) -> Draft:
        """See `Drafter.propose`; at most one token a head, one behind the other."""
        logits, context = self._logits(state), self.context
        draft = draft_chain(
            lambda offset: logits[:, offset : offset + 1],
            context,
            state,
            [min(limit, self._heads.spec.num_heads) for limit in limits],
            goes_on,
            self._head.vocabulary,
        )
        if draft.nodes is None:
            return draft
        trees = [
            crossed(nodes, length, length * (1 + context.num_siblings), context.eos_ids)
            for nodes, length in zip(draft.nodes, draft.lengths, strict=True)
        ]
        return tree_draft(trees, draft.lengths, draft.tokens.device)

    def steps(
        self, state: DecodeState, count: int, visible: int, forward: Forward
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """See `Recordable.steps`; what is padded beyond the heads is the last one's guess again."""
        logits, last = self._logits(state), self._heads.spec.num_heads - 1

        def next_logits(offset: int) -> Tensor:
            return logits[:, min(offset, last), None]

        return draft_steps(next_logits, self.context, state, count, self._head.vocabulary)

    def note_steps(self, state: DecodeState) -> None:
        """See `Recordable.note_steps`."""

    def observe(self, state: DecodeState) -> None:
        """Nothing: rollback is the shared cache's length."""

    def _logits(self, state: DecodeState) -> Tensor:
        """Of all heads: (batch, num_heads, ids)."""
        before = state.cache.states[self.decoder.num_blocks][state.rows, state.indices(-2)].unsqueeze(1)
        hidden = self._heads.run(self.decoder.final_norm(before)).flatten(1, 2)
        return self.decoder.logits(hidden, self._head, self._heads.final_norm)


def crossed(nodes: Sequence[Node], length: int, most: int, ends: Collection[int] = ()) -> list[Node]:
    """The likeliest tree of what was proposed for each offset alone.

    A node's chance is the product of the confidences on its path; the likeliest nodes are taken one by one, as the
    sparse tree of Medusa is by the heads' accuracies (Cai et al. 2024, section 2.3.3).

    Args:
        nodes: a chain, and beside it, with the same parents, what else was proposed.
        length: of the chain.
        most: nodes of the tree; the chain is in it in any case.
        ends: token ids that nothing follows.

    Returns:
        The chain, then further nodes, each behind its parent.
    """
    candidates: list[list[Node]] = [[] for _ in range(length)]  # by offset, that of the chain first
    for node in nodes:
        candidates[node.parent].append(node)
    tree, arrivals = list(nodes[:length]), count()
    waiting: list[tuple[float, int, int, Node]] = []  # minus the chance, the order of arrival, the offset

    def offer(chance: float, parent: int, offset: int, others: Sequence[Node]) -> None:
        for node in others:
            entry = (-chance * node.confidence, next(arrivals), offset, node._replace(parent=parent))
            heapq.heappush(waiting, entry)

    chance = 1.0
    for offset, node in enumerate(nodes[:length]):
        offer(chance, offset, offset, candidates[offset][1:])
        chance *= node.confidence
    while waiting and len(tree) < most:
        negative, _, offset, node = heapq.heappop(waiting)
        tree.append(node)
        if offset + 1 < length and node.token_id not in ends:
            offer(-negative, len(tree), offset + 1, candidates[offset + 1])
    return tree
