"""How a plan does on texts that no search has seen: the very rounds that real decoding would take, and their spread.

With every position replayed at every offset it is known how likely drafts from any position stand; decoding is then a
walk from one round's end to the next, which replay takes without decoding. (Anchors at fixed distances, by which trials
are compared, begin drafts elsewhere than real rounds do.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from layerskip.search.acceptance import Acceptance
from layerskip.search.candidate import Candidate
from layerskip.search.judge import Judge
from layerskip.search.outcome import TextOutcome
from layerskip.search.result import HeldOut, Interval

__all__ = ["evaluate", "expected_rounds", "interval_over_texts", "stands_from"]

_RESAMPLES = 2000


def evaluate(
    judge: Judge,
    candidate: Candidate,
    num_draft_tokens: int,
    notify: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> HeldOut:
    """Replay `candidate` from every position of the judge's texts, `num_draft_tokens` a round."""
    replay = judge.replay
    acceptances: list[Acceptance] = []
    rounds: list[float] = []
    positions: list[int] = []
    for batch in range(replay.num_batches):
        shifted = [
            judge.outcomes(candidate, batch, shift, draft_length=num_draft_tokens) for shift in range(num_draft_tokens)
        ]
        for outcomes in zip(*shifted, strict=True):
            acceptances.append(Acceptance.pooled(each.acceptance(num_draft_tokens) for each in outcomes))
            rounds.append(expected_rounds(stands_from(outcomes, num_draft_tokens), num_draft_tokens))
            positions.append(len(outcomes[0].stands))
        notify("judging on held-out texts", batch + 1, replay.num_batches)
    per_round = interval_over_texts(
        lambda rows: sum(positions[row] for row in rows) / sum(rounds[row] for row in rows), len(rounds)
    )
    cost = judge.costs.round_ratio(candidate, num_draft_tokens)

    def pooled(rows: Iterable[int]) -> Acceptance:
        return Acceptance.pooled(acceptances[row] for row in rows)

    return HeldOut(
        texts=len(rounds),
        positions=sum(positions),
        acceptance_rate=interval_over_texts(lambda rows: pooled(rows).rate, len(rounds)),
        acceptance_by_offset=tuple(
            interval_over_texts(lambda rows, offset=offset: pooled(rows).by_offset[offset], len(rounds))  # type: ignore[misc]
            for offset in range(num_draft_tokens)
        ),
        tokens_per_round=per_round,
        predicted_speedup=Interval(per_round.value / cost, per_round.low / cost, per_round.high / cost),
    )


def stands_from(outcomes: Iterable[TextOutcome], num_draft_tokens: int) -> list[list[float]]:
    """For each position of a text the chances of the drafts that begin there, offset by offset.

    Args:
        outcomes: of one text, with all shifts of its anchors.
    """
    by_anchor: list[list[float]] = []
    for outcome in outcomes:
        by_anchor = by_anchor or [[] for _ in outcome.stands]
        drafts: dict[int, list[float]] = {}
        for anchor, stands in zip(outcome.anchors.tolist(), outcome.stands.tolist(), strict=True):
            drafts.setdefault(anchor, []).append(stands)
        for anchor, chances in drafts.items():  # the first one may be cut short by the next
            by_anchor[anchor] = max(by_anchor[anchor], chances, key=len)
    return [chances[:num_draft_tokens] for chances in by_anchor]


def expected_rounds(chances: Sequence[Sequence[float]], num_draft_tokens: int) -> float:
    """Rounds that decoding takes over a text; of greedy decoding, where chances are 0 or 1, the exact number.

    Given the text, each of its tokens is an accepted draft with the chance min(1, draft_probs / target_probs),
    whatever came of the others, so rounds form a Markov chain.

    Args:
        chances: for each position those of the drafts that begin there.
        num_draft_tokens: of a round; near the end no more are drafted than leave room for a last token.
    """
    last = len(chances)
    rounds = [0.0] * (last + 1)
    for position in reversed(range(last)):
        rest, alive = 0.0, 1.0
        for accepted, chance in enumerate(chances[position][: min(num_draft_tokens, last - position - 1)]):
            rest += alive * (1 - chance) * rounds[position + accepted + 1]
            alive *= chance
        drafted = min(num_draft_tokens, last - position - 1)
        rounds[position] = 1 + rest + alive * rounds[position + drafted + 1]
    return rounds[0]


def interval_over_texts(statistic: Callable[[Sequence[int]], float], texts: int) -> Interval:
    """`statistic` of all texts, told by their indices, and its 95 % bootstrap interval (Efron 1979, percentiles)."""
    picks = np.random.default_rng(0).integers(texts, size=(_RESAMPLES, texts)).tolist()
    low, high = np.quantile([statistic(rows) for rows in picks], (0.025, 0.975))
    return Interval(statistic(range(texts)), float(low), float(high))
