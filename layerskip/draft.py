"""What a drafter hands to verification: proposed tokens, and how they were chosen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.models.tree import Tree
from layerskip.state import DecodeState

__all__ = ["Draft", "Node", "empty_draft", "merged", "pruned", "tree_draft", "trie"]


class Node(NamedTuple):
    """A token of a draft.

    Attributes:
        parent: the token before it by its index in the verification pass: 0 is the newest committed token, 1 the
            draft's first.
        confidence: the probability that the drafter gave it.
    """

    token_id: int
    parent: int
    confidence: float


@dataclass(frozen=True)
class Draft:
    """Proposed tokens for each row: a chain, or a tree.

    Attributes:
        tokens: (batch, drafts), int64; those of a chain also stand in ``state.token_ids`` behind the committed tokens.
        num_drafted: of each row, how many of its tokens are real; the rest is padding.
        probs: (batch, drafts, vocab), the distribution each was drawn from; None: they were not drawn but chosen
            (greedily, or copied from the text), which is a distribution of all probability on the token, or the rule
            does not ask.
        exact_states: (batch, drafts, hidden_size) or None: hidden states behind the leading `exact_blocks` blocks of
            the full model, for the newest token and all drafts but the last, which verification need not compute again.
        exact_blocks: number of those blocks.
        counts: `num_drafted` on the device, (batch,), int64, if it is there already.
        confidences: for each row and draft the probability that the drafter gave the token, where it gives one.
        tree: which token follows which, if some place has several, which then differ; None: each the one before it.
        num_in_chain: of a tree, how many of each row's tokens, its first ones, are a chain; the others stand beside it.
        is_whole: a tree of which no token can be spared, and none goes before the others: its drafter hears what the
            target said behind each (`Learner`), and it counts how far the target went on whichever path. `num_in_chain`
            is then its depth.
        steps: that the drafter took for it, where it took more than the longest chain has tokens (a recorded program).
        nodes: the same tokens as numbers, where they were ranked and are not yet joined with others'.
    """

    tokens: Tensor
    num_drafted: Sequence[int]
    probs: Tensor | None = None
    exact_states: Tensor | None = None
    exact_blocks: int = 0
    counts: Tensor | None = None
    confidences: Sequence[Sequence[float]] = field(default_factory=list)
    tree: Tree | None = None
    num_in_chain: Sequence[int] | None = None
    is_whole: bool = False
    steps: int | None = None
    nodes: Sequence[Sequence[Node]] | None = None

    @property
    def lengths(self) -> Sequence[int]:
        """Of each row's chain."""
        return self.num_drafted if self.num_in_chain is None else self.num_in_chain

    @property
    def depth(self) -> int:
        """Number of tokens that the longest chain has, padding included."""
        return self.tokens.shape[1] if self.num_in_chain is None else max(self.num_in_chain)


def tree_draft(rows: Sequence[Sequence[Node]], lengths: Sequence[int], device: torch.device) -> Draft:
    """A draft of tokens that were ranked.

    Args:
        rows: of each row first those of its chain, then those beside it.
        lengths: of the chains.
    """
    width = max(map(len, rows))
    tokens = [[node.token_id for node in row] + [0] * (width - len(row)) for row in rows]
    draft = Draft(
        torch.tensor(tokens, dtype=torch.int64, device=device).view(len(rows), width),
        [len(row) for row in rows],
        confidences=[[node.confidence for node in row] for row in rows],
        nodes=rows,
    )
    if all(len(row) == length for row, length in zip(rows, lengths, strict=True)):
        return draft
    parents = [[node.parent for node in row] + [0] * (width - len(row)) for row in rows]
    return replace(draft, tree=Tree(parents, device), num_in_chain=list(lengths))


def trie(paths: Iterable[Sequence[int]]) -> tuple[list[int], list[int], list[int]]:
    """The tree of `paths`, sequences of tokens behind one root: what two of them begin with is there once.

    Returns:
        its tokens in the order in which they first occur, so that the first path is a chain; the parent of each, and
        where each path ends, as indices in the verification pass (`Node`).
    """
    tokens: list[int] = []
    parents: list[int] = []
    ends: list[int] = []
    children: dict[tuple[int, int], int] = {}
    for path in paths:
        place = 0
        for token in path:
            if (place, token) not in children:
                tokens.append(token)
                parents.append(place)
                children[place, token] = len(tokens)
            place = children[place, token]
        ends.append(place)
    return tokens, parents, ends


def pruned(nodes: Sequence[Node], kept: Sequence[int]) -> list[Node]:
    """The nodes at the indices `kept` of a tree, in this order, with their parents' new indices.

    Args:
        kept: with each node also its parent, before it.
    """
    places = {0: 0} | {index + 1: place for place, index in enumerate(kept, 1)}  # in the verification pass
    return [nodes[index]._replace(parent=places[nodes[index].parent]) for index in kept]


def empty_draft(state: DecodeState, padding: int = 0) -> Draft:
    """A proposal of no tokens: the round is then a plain step, of a pass that is wider by `padding` columns."""
    return Draft(state.token_ids.new_zeros((state.batch, padding)), [0] * state.batch)


def merged(drafts: Sequence[Draft], vocab_size: int) -> Draft:
    """One draft of several, of which each row takes the one that drafted for it; at most one did."""
    if len(drafts) == 1:
        return drafts[0]
    width = max(draft.tokens.shape[1] for draft in drafts)
    tokens = torch.zeros_like(F.pad(drafts[0].tokens, (0, width - drafts[0].tokens.shape[1])))
    drawn = next((draft.probs for draft in drafts if draft.probs is not None), None)
    probs = None if drawn is None else drawn.new_zeros((*tokens.shape, vocab_size))
    num_drafted, num_in_chain = [0] * len(tokens), [0] * len(tokens)
    confidences: list[Sequence[float]] = [()] * len(tokens)
    parents = [list(range(width)) for _ in tokens]
    for draft in drafts:
        for row in [row for row, count in enumerate(draft.num_drafted) if count]:
            of_row = draft.tokens[row]
            tokens[row, : len(of_row)], num_drafted[row] = of_row, draft.num_drafted[row]
            num_in_chain[row] = draft.lengths[row]
            if draft.tree is not None:
                parents[row] = draft.tree.parents[row] + [0] * (width - len(of_row))
            if probs is not None and draft.probs is not None:
                probs[row, : len(of_row)] = draft.probs[row]
            elif probs is not None:
                probs[row, : len(of_row)].scatter_(1, of_row.unsqueeze(1), 1.0)
            if draft.confidences:
                confidences[row] = draft.confidences[row]
    joined = Draft(
        tokens,
        num_drafted,
        probs,
        confidences=confidences,
        is_whole=any(each.is_whole for each in drafts),
    )
    if all(draft.tree is None for draft in drafts):
        return joined
    return replace(joined, tree=Tree(parents, tokens.device), num_in_chain=num_in_chain)
