"""Candidates to begin with: what simple rules find on a part of the texts, before the sampler has learnt anything.

None of them is a trial yet; each that is queued becomes one, judged like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from layerskip.models.decoder import Step
from layerskip.search.candidate import Candidate
from layerskip.search.cost import mean_costs
from layerskip.search.judge import Judge
from layerskip.search.selectors.base import Workbench
from layerskip.search.selectors.clasp import clasp_paths
from layerskip.search.selectors.knapspec import KnapSpec
from layerskip.search.space import Space

__all__ = ["Start", "single_retention", "starts"]

Kind = Literal["attention", "mlp"]

_KNAPSACKS = 8
_GREEDY_WIDTH = 6  # sub-blocks that greedy removal tries at each step, those first that alone do least harm


@dataclass(frozen=True)
class Start:
    """A candidate and the rule that it comes from."""

    name: str
    candidate: Candidate


def single_retention(judge: Judge, space: Space, batches: int = 1) -> dict[str, list[float]]:
    """For "attention" and "mlp", by layer: how often a draft says the text's next token with that sub-block left out.

    Every position is an anchor here: one number a sub-block, with the least noise. Layers that the space protects are
    not tried, and have 0.
    """
    found = {"attention": [0.0] * space.num_blocks, "mlp": [0.0] * space.num_blocks}
    for kind, rates in found.items():
        for layer in space.layers if space.skips else ():
            rates[layer] = _agreement(
                judge, _without(space.num_blocks, [(kind, layer)]).path(space.num_blocks), batches
            )
    return found


def _agreement(judge: Judge, path: Sequence[Step], batches: int) -> float:
    right = total = 0.0
    for batch in range(min(batches, judge.replay.num_batches)):
        for outcome in judge.replay.outcomes(path, batch, draft_length=1):
            right += float(outcome.overlap.sum())
            total += len(outcome.overlap)
    return right / total


def starts(judge: Judge, space: Space, retention: dict[str, list[float]], batches: int = 1) -> list[Start]:
    """What to queue, each within `space` and once.

    Args:
        retention: from `single_retention`.
        batches: parts of the texts that greedy removal and the dynamic programme look at.
    """
    num = space.num_blocks
    found: list[Start] = []
    if space.skips and space.layers:
        # First what is best at many costs: a search that ends early has something for each.
        found += _knapsack(judge)
        found += [
            Start(f"dynamic programme {skips}", candidate)
            for skips, candidate in sorted(clasp_paths(judge, num, by_sub_block=True).items())
            if skips <= num // 2 or skips % 3 == 0  # up to half of all sub-blocks, of the larger numbers some
        ]
        found += [
            Start(f"dynamic programme, {skips} whole layers", candidate)
            for skips, candidate in sorted(clasp_paths(judge, num // 2).items())
        ]
        found += _by_rank(judge, space, retention)
        found += _greedy(judge, space, retention, batches)
    if space.exits:
        found += [Start(f"exit {layer}", Candidate.of(num, exit_layer=layer)) for layer in _exits(num)]
    shares = {size: _coverage(judge, size) for size in space.vocabulary_sizes}
    # First what was trained: each path with each vocabulary, so that nothing of it is left for a sampler to propose.
    inside = {each.candidate: each for each in _trained(space)}
    for start in found:
        size = _size_for(judge, shares, start.candidate)
        candidate = space.nearest(replace(start.candidate, vocabulary_size=size))
        if candidate.drafts(num):
            inside.setdefault(candidate, Start(start.name, candidate))
    return list(inside.values())


def _trained(space: Space) -> Iterator[Start]:
    """Every trained path, first scoring as many ids as it was trained to, then as the space has them."""
    for path in space.trained:
        for size in dict.fromkeys((path.vocabulary_size, *space.vocabulary_sizes)):
            params = space.params(Candidate(exit_layer=path.exit_layer, vocabulary_size=size, trained=path.name))
            yield Start(f"trained {path.name}", space.candidate(params))


def _by_rank(judge: Judge, space: Space, retention: dict[str, list[float]]) -> Iterator[Start]:
    """The 1, 2, 3, 5, … sub-blocks that alone do least harm for what they cost, and the same of attentions only."""
    order = _ranked(judge, space, retention)
    attentions = [each for each in order if each[0] == "attention"]
    for name, ranked in (("leave-one-out", order), ("attention first", attentions)):
        for count in (1, 2, 3, 5, 8, 13, 21, 34):
            if count <= len(ranked):
                yield Start(f"{name} {count}", _without(space.num_blocks, ranked[:count]))


def _greedy(judge: Judge, space: Space, retention: dict[str, list[float]], batches: int) -> Iterator[Start]:
    """One sub-block after another, at each step of those next in rank the one that leaves the best speed-up."""
    left, gone = _ranked(judge, space, retention), list[tuple[Kind, int]]()
    best, misses = 0.0, 0
    # It goes on for a while when things get worse: two sub-blocks may do together what one cannot.
    while left and misses < 3 and len(gone) < space.num_blocks:
        tried = {
            each: judge.judge(_without(space.num_blocks, [*gone, each]), batches).speedup.ratio
            for each in left[:_GREEDY_WIDTH]
        }
        chosen = max(tried, key=lambda each: tried[each])
        gone.append(chosen)
        left.remove(chosen)
        misses = 0 if tried[chosen] > best else misses + 1
        best = max(best, tried[chosen])
        yield Start(f"greedy removal {len(gone)}", _without(space.num_blocks, gone))


def _knapsack(judge: Judge) -> Iterator[Start]:
    """The sets that promise most for their weight, by a dynamic programme over weights (`KnapSpec`)."""
    if judge.num_blocks < 3:  # it keeps the first layer and the last
        return
    for rank, candidate in enumerate(KnapSpec().select(Workbench.seeded(judge))[:_KNAPSACKS], 1):
        yield Start(f"knapsack {rank}", candidate)


def _ranked(judge: Judge, space: Space, retention: dict[str, list[float]]) -> list[tuple[Kind, int]]:
    """Sub-blocks that may be left out, those first whose loss is least for the time that they take."""
    attention_s, mlp_s = mean_costs(judge.costs)
    kinds: tuple[tuple[Kind, float], ...] = (("attention", attention_s), ("mlp", mlp_s))
    loss = {(kind, layer): (1 - retention[kind][layer]) / each_s for kind, each_s in kinds for layer in space.layers}
    return sorted(loss, key=lambda each: loss[each])


def _without(num_blocks: int, left_out: Sequence[tuple[str, int]]) -> Candidate:
    attention, mlp = ([layer for kind, layer in left_out if kind == wanted] for wanted in ("attention", "mlp"))
    return Candidate.of(num_blocks, attention, mlp)


def _exits(num_blocks: int) -> list[int]:
    return sorted({max(1, min(num_blocks - 1, round(num_blocks * part / 8))) for part in range(1, 8)})


def _size_for(judge: Judge, shares: dict[int | None, float], candidate: Candidate) -> int | None:
    """The draft vocabulary that should serve `candidate`, if it drafts alike whatever is scored.

    A draft can only stand where the text's own next token is scored, so acceptance shrinks by the share of such tokens.

    Args:
        shares: of the texts' tokens, by the size of the vocabulary that scores them.
    """

    def prospect(size: int | None) -> float:
        chance = 0.8 * shares[size]
        return (1 + chance + chance**2) / judge.costs.round_ratio(replace(candidate, vocabulary_size=size), 2)

    return max(shares, key=prospect)


def _coverage(judge: Judge, size: int | None) -> float:
    if size is None:
        return 1.0
    scored = set(judge.vocabularies[size])
    tokens = [token for text in judge.replay.texts for token in text.continuation[1:]]
    return sum(token in scored for token in tokens) / len(tokens)
