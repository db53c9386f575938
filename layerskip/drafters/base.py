"""What a drafter is, and the loop that every drafter with a next-token distribution shares.

A drafter proposes tokens and the distributions it drew them from, and is told what was committed. Verification,
acceptance, stopping and statistics exist once, in the engine, and know nothing of how a draft was made; how long it may
become is the governor's business. To add one: CONTRIBUTING.md, "Add a drafter".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from layerskip.draft import Draft, Node, tree_draft
from layerskip.models.decoder import Forward
from layerskip.rules import AcceptanceRule
from layerskip.sampling import Sampler
from layerskip.state import DecodeState

__all__ = ["DraftContext", "Drafter", "GoesOn", "Learner", "Recordable", "draft_chain", "draft_steps"]

GoesOn = Callable[[int, Sequence[float | None]], Sequence[bool]]
"""Told a draft's offset and each row's confidence in it (None where the row had stopped before), says which rows are to
draft another token behind it."""


@dataclass(frozen=True)
class DraftContext:
    """What drafting shares with verification, for the whole call.

    Attributes:
        sampler: logits to scores, the same as the target's.
        rule: draws tokens from scores.
        eos_ids: a row stops drafting behind one of them.
        confidence_threshold: a row stops drafting *behind* a token whose raw probability is below this. (To drop the
            token itself unverified would bias the output.)
        vocab_size: of the target.
        chunk: most tokens of a row that are read in one pass; None: all.
        num_siblings: further tokens to propose beside each draft of a chain, which costs nothing but their places in
            the verification pass. All are then ranked, not drawn.
    """

    sampler: Sampler
    rule: AcceptanceRule
    eos_ids: frozenset[int]
    confidence_threshold: float
    vocab_size: int
    chunk: int | None = None
    num_siblings: int = 0


class Drafter(Protocol):
    """Proposes the next tokens."""

    def begin(self, state: DecodeState) -> None:
        """Take note of the prompts in `state`, before the target has read them.

        What was read of them in an earlier call stands in ``state.readings``, where a later call will look for it.
        """
        ...

    def outlook(self, state: DecodeState) -> Sequence[int | None]:
        """What is known of each row's draft before it is made: a grade, by which drafts of equal prospects are
        recognised, or None where there is nothing to propose.
        """
        ...

    def catch_up(self, state: DecodeState) -> None:
        """Read what it lacks of the texts, if that is more than a draft reads anyway: it is about to draft.

        A drafter that is not asked reads nothing, and what this takes does not count as the time of a draft.
        """
        ...

    def propose(self, state: DecodeState, limits: Sequence[int], goes_on: GoesOn | None = None) -> Draft:
        """Draft up to ``limits[row]`` tokens behind each row's newest; at least one limit is positive."""
        ...

    def observe(self, state: DecodeState) -> None:
        """Learn that a round has ended; `state` holds what was committed."""
        ...


@runtime_checkable
class Recordable(Protocol):
    """A drafter whose drafts of a fixed length can be recorded once and run again."""

    def steps(
        self, state: DecodeState, count: int, visible: int, forward: Forward
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Draft `count` tokens in every row, reading `visible` cache slots; returns what `draft_steps` does.

        Args:
            forward: runs passes of the target's decoder.
        """
        ...

    def note_steps(self, state: DecodeState) -> None:
        """Take note that a recording of `steps` has run."""
        ...


@runtime_checkable
class Learner(Protocol):
    """A drafter that learns from what the target said behind every token of its last draft (`Draft.is_whole`)."""

    def learn(self, choices: Sequence[Sequence[int]]) -> None:
        """Of each row that the draft was for: the target's tokens behind the newest one (0) and behind draft `i`
        (i + 1); none for a row that had ended.
        """
        ...


def draft_chain(
    next_logits: Callable[[int], Tensor],
    context: DraftContext,
    state: DecodeState,
    limits: Sequence[int],
    goes_on: GoesOn | None = None,
    vocabulary: Tensor | None = None,
) -> Draft:
    """Draft token by token.

    Args:
        next_logits: gives for offset `i` the logits (batch, 1, ids) of the `i`-th draft, after the drafts before it
            have been written into ``state.token_ids``.
        limits: most tokens to draft in each row.
        goes_on: is asked behind every draft.
        vocabulary: (ids,), the token ids that the logits belong to; None: all of them, in order.

    Returns:
        A draft of as many steps as the longest row took; with siblings a tree.
    """
    needs_confidence = goes_on is not None or context.confidence_threshold > 0 or context.num_siblings > 0
    chains: list[list[Node]] = [[] for _ in limits]
    beside: list[list[Node]] = [[] for _ in limits]
    tokens: list[Tensor] = []
    probs: list[Tensor] = []
    live = [limit > 0 for limit in limits]
    while len(tokens) < max(limits) and any(live):
        offset = len(tokens)
        logits = next_logits(offset)
        ranked, step_probs, chances = _draw(logits, context, state, offset, live, vocabulary)
        token = ranked[:, :1]
        tokens.append(token)
        if step_probs is not None:
            probs.append(step_probs)
        sureness = (
            _confidence(logits, token, vocabulary).flatten().tolist() if needs_confidence else [1.0] * state.batch
        )
        told = [sure if alive else None for sure, alive in zip(sureness, live, strict=True)]
        wanted = goes_on(offset, told) if goes_on is not None else live
        for row, ((token_id, *others), sure) in enumerate(zip(ranked.tolist(), sureness, strict=True)):
            if live[row]:
                node = Node(token_id, offset, sure)
                chains[row].append(node)
                of_row = zip(others, chances[row], strict=True)
                beside[row] += (Node(other, offset, chance) for other, chance in of_row if chance > 0)
                may_go_on = len(chains[row]) < limits[row] and node.token_id not in context.eos_ids
                live[row] = may_go_on and wanted[row] and node.confidence >= context.confidence_threshold
    lengths = [len(chain) for chain in chains]
    if context.num_siblings:
        rows = [[*chain, *siblings] for chain, siblings in zip(chains, beside, strict=True)]
        return tree_draft(rows, lengths, state.token_ids.device)
    return Draft(
        torch.cat(tokens, dim=1),
        lengths,
        torch.cat(probs, dim=1) if probs else None,
        confidences=[[node.confidence for node in chain] for chain in chains] if needs_confidence else [],
    )


def draft_steps(
    next_logits: Callable[[int], Tensor],
    context: DraftContext,
    state: DecodeState,
    count: int,
    vocabulary: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Draft `count` tokens in every row without a look at any: what `draft_chain` does, to be recorded and run again.

    Returns:
        tokens (batch, count), their distributions (batch, count, vocab) or None, and the drafter's own probabilities of
        them (batch, count).
    """
    tokens, probs, confidences = [], [], []
    for offset in range(count):
        logits = next_logits(offset)
        token, step_probs, _ = _draw(logits, context, state, offset, [True] * state.batch, vocabulary)
        tokens.append(token)
        confidences.append(_confidence(logits, token, vocabulary))
        if step_probs is not None:
            probs.append(step_probs)
    return torch.cat(tokens, 1), torch.cat(probs, 1) if probs else None, torch.cat(confidences, 1)


def _draw(
    logits: Tensor,
    context: DraftContext,
    state: DecodeState,
    offset: int,
    live: Sequence[bool],
    vocabulary: Tensor | None,
) -> tuple[Tensor, Tensor | None, list[list[float]]]:
    """The draft at `offset`, written behind the tokens before it, and its distribution.

    Returns:
        (batch, 1 + siblings), the draft and those beside it; (batch, 1, vocab) or None; and the probabilities of those
        beside it, as the processors leave them.
    """
    sampler, where = context.sampler, state.indices(offset)
    if vocabulary is not None and not sampler.prefix_free:  # such processors look ids up by their place
        logits, vocabulary = _everywhere(logits, vocabulary, context.vocab_size, float("-inf")), None
    counts = None if sampler.prefix_free else [int(each) for each in live]
    prefix_lengths = [length + offset for length in state.lengths]
    scores = sampler.scores(logits, state.token_ids, prefix_lengths, counts)
    if context.num_siblings:
        count = min(1 + context.num_siblings, scores.shape[-1])
        rule = context.rule.for_trees()
        assert rule is context.rule, "where drafts have siblings the whole call's rule is one for trees"
        ranked = rule.rank(scores, where.unsqueeze(1), state.round_tensor, count, vocabulary).squeeze(1)
        state.token_ids[state.rows, where] = ranked[:, 0]
        return ranked, None, _confidence(scores, ranked[:, 1:], vocabulary).tolist()
    token, probs = context.rule.draw(scores, where.unsqueeze(1), state.round_tensor, vocabulary)
    if vocabulary is not None and probs is not None:
        probs = _everywhere(probs, vocabulary, context.vocab_size, 0.0)
    state.token_ids[state.rows, where] = token.squeeze(1)
    return token, probs, [[]] * state.batch


def _everywhere(values: Tensor, vocabulary: Tensor, vocab_size: int, elsewhere: float) -> Tensor:
    """`values` (batch, tokens, ids) of the ids in `vocabulary` in their places: (batch, tokens, vocab_size)."""
    return values.new_full((*values.shape[:2], vocab_size), elsewhere).index_copy_(2, vocabulary, values)


def _confidence(logits: Tensor, token: Tensor, vocabulary: Tensor | None) -> Tensor:
    """Probability of each of `token` (batch, n) among the ids that were scored, (batch, 1, ids): (batch, n).

    0 of others, which a processor may have made the only choice.
    """
    probs = logits.float().softmax(-1).squeeze(1)
    if vocabulary is None:
        return probs.gather(-1, token)
    index = torch.searchsorted(vocabulary, token.contiguous()).clamp_(max=len(vocabulary) - 1)
    return probs.gather(-1, index) * (vocabulary[index] == token)
