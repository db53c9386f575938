"""How tokens are chosen and drafts accepted: greedily, or by one of the two lossless rules for sampling.

`maximal` accepts the most; what it emits for a seed depends on the draft. `invariant` ties the noise to (seed, row,
position), so that a seed gives the same text whatever is drafted, drafts off included. Where their randomness comes
from is here, the tests that they apply are in `verify.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from layerskip.draft import Draft
from layerskip.errors import SettingError, did_you_mean
from layerskip.noise import Purpose, exponential_at, uniform
from layerskip.sampling import distribution
from layerskip.verify import accept_by_match, accept_by_ratio, accept_in_tree, race

__all__ = [
    "RULES",
    "Acceptance",
    "AcceptanceRule",
    "Greedy",
    "Invariant",
    "Maximal",
    "TreeRule",
    "draw_token",
    "make_rule",
]


class Acceptance(NamedTuple):
    """What one verification decided.

    Attributes:
        accepted: (batch,), drafts that stand: the first rejected one and all after it fall.
        next_token: (batch,), the token after them.
        num_valid: (batch,), how many of a row's positions have a distribution at all; what is chosen from there on is
            void.
        places: of a tree, where the accepted drafts and the token behind them were said (`accept_in_tree`).
        choices: of a tree, what the target said behind the newest token and each draft, (batch, drafts + 1).
    """

    accepted: Tensor
    next_token: Tensor
    num_valid: Tensor
    places: Tensor | None = None
    choices: Tensor | None = None


class AcceptanceRule(Protocol):
    """Chooses tokens and decides about drafts.

    Scores are (batch, tokens, vocab), as `Sampler.scores` gives them; positions (batch, tokens): where the chosen token
    will stand.
    """

    def reseed(self, other: AcceptanceRule) -> None:
        """Use the seeds of `other`, of the same kind, in the memory of the old ones, where recorded programs look."""
        ...

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Forget all but `rows`, which are in this order from now on."""
        ...

    def draw(
        self, scores: Tensor, positions: Tensor, round_index: Tensor, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """A draft token for each position, (batch, tokens), and the scores' distribution, if acceptance asks for it.

        Args:
            ids: (scores.shape[-1],), int64, the token ids that scores belong to; None: all, in order. The token is the
                one that would be drawn if all others had a score of -inf.
        """
        ...

    def accept(self, draft: Draft, target_scores: Tensor, positions: Tensor, round_index: Tensor) -> Acceptance:
        """Decide about `draft` by the target's scores at its positions and one more."""
        ...

    def for_trees(self) -> TreeRule:
        """The rule of a call in which drafts may be trees, with the same seeds: of all its rounds, chains included."""
        ...


class TreeRule(AcceptanceRule, Protocol):
    """A rule by which a tree can be decided about: what the target says at a position depends on nothing drafted."""

    def rank(
        self, scores: Tensor, positions: Tensor, round_index: Tensor, count: int, ids: Tensor | None = None
    ) -> Tensor:
        """The `count` different tokens that are likeliest to be accepted at each position, the best first.

        Chosen, not drawn: (batch, tokens, count); other arguments as in `draw`.
        """
        ...


@dataclass(frozen=True)
class Greedy:
    """The likeliest token: no noise, and a draft stands if it is the target's own choice."""

    def reseed(self, other: AcceptanceRule) -> None:
        """Nothing."""

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Nothing."""

    def draw(
        self, scores: Tensor, positions: Tensor, round_index: Tensor, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `AcceptanceRule.draw`."""
        best = scores.max(dim=-1).indices  # on the CPU four times as fast as argmax in bfloat16
        return best if ids is None else ids[best], None

    def rank(
        self, scores: Tensor, positions: Tensor, round_index: Tensor, count: int, ids: Tensor | None = None
    ) -> Tensor:
        """See `TreeRule.rank`."""
        return _best(scores, count, ids)

    def accept(self, draft: Draft, target_scores: Tensor, positions: Tensor, round_index: Tensor) -> Acceptance:
        """See `AcceptanceRule.accept`."""
        best, choices = target_scores.max(dim=-1)
        valid = best > float("-inf")  # not of NaN
        return _matched(draft, choices * valid, valid)

    def for_trees(self) -> Greedy:
        """See `AcceptanceRule.for_trees`."""
        return self


@dataclass
class Maximal:
    """Rejection sampling. Noise is never used twice: it is keyed by the round as well as the position.

    (A position that is drafted again after a rejection must get fresh noise: whether it is drafted at all may depend
    on what was seen of its first draft.)
    """

    seeds: Tensor  # (batch,), int64

    def reseed(self, other: AcceptanceRule) -> None:
        """See `AcceptanceRule.reseed`."""
        assert isinstance(other, type(self))
        self.seeds.copy_(other.seeds)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """See `AcceptanceRule.keep_rows`."""
        self.seeds = self.seeds[list(rows)]

    def draw(
        self, scores: Tensor, positions: Tensor, round_index: Tensor, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `AcceptanceRule.draw`."""
        probs, _ = distribution(scores)
        return draw_token(probs, self.seeds, _counters(positions, round_index), Purpose.TOKEN, ids), probs

    def accept(self, draft: Draft, target_scores: Tensor, positions: Tensor, round_index: Tensor) -> Acceptance:
        """See `AcceptanceRule.accept`."""
        assert draft.tree is None, "a tree is for the rule of `for_trees`"
        target_probs, valid = distribution(target_scores)
        counters = _counters(positions, round_index)
        uniforms = uniform(self.seeds, counters[:, :-1], Purpose.ACCEPT, 1).squeeze(2)
        accepted, residual = accept_by_ratio(draft.tokens, draft.probs, target_probs, _counts(draft), uniforms)
        next_token = draw_token(residual.unsqueeze(1), self.seeds, counters[:, :1], Purpose.CORRECTION).squeeze(1)
        return Acceptance(accepted, next_token, _leading_valid(valid))

    def for_trees(self) -> Invariant:
        """See `AcceptanceRule.for_trees`: draft-invariant sampling.

        Rejection sampling takes one draft a place. Matching tokens that were ranked by the noise with which the target
        draws is exact only if that noise belongs to the position: which tokens a tree leaves out depends on those
        behind them, hence on the noise of later positions, and these would be drawn anew just where it left some out.
        """
        return Invariant(self.seeds)


@dataclass
class Invariant:
    """Drafts and target draw with the same noise, keyed by seed and position only."""

    seeds: Tensor  # (batch,), int64

    def reseed(self, other: AcceptanceRule) -> None:
        """See `AcceptanceRule.reseed`."""
        assert isinstance(other, type(self))
        self.seeds.copy_(other.seeds)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """See `AcceptanceRule.keep_rows`."""
        self.seeds = self.seeds[list(rows)]

    def draw(
        self, scores: Tensor, positions: Tensor, round_index: Tensor, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `AcceptanceRule.draw`; `round_index` plays no part."""
        probs, _ = distribution(scores)
        return draw_token(probs, self.seeds, positions, Purpose.TOKEN, ids), None  # acceptance does not ask for it

    def rank(
        self, scores: Tensor, positions: Tensor, round_index: Tensor, count: int, ids: Tensor | None = None
    ) -> Tensor:
        """See `TreeRule.rank`: who arrives first by the noise with which the target draws too."""
        probs, _ = distribution(scores)
        return _first(probs, self.seeds, positions, Purpose.TOKEN, count, ids)

    def accept(self, draft: Draft, target_scores: Tensor, positions: Tensor, round_index: Tensor) -> Acceptance:
        """See `AcceptanceRule.accept`; the draft's distributions and `round_index` play no part."""
        target_probs, valid = distribution(target_scores)
        target_tokens = draw_token(target_probs, self.seeds, positions, Purpose.TOKEN)
        return _matched(draft, target_tokens, valid)

    def for_trees(self) -> Invariant:
        """See `AcceptanceRule.for_trees`."""
        return self


RULES: dict[str, type[Maximal] | type[Invariant]] = {"maximal": Maximal, "invariant": Invariant}


def make_rule(name: str, seeds: Tensor, sampled: bool) -> AcceptanceRule:
    """Return the rule called `name`; without sampling both are `Greedy`.

    Raises:
        SettingError: there is no such rule.
    """
    if not isinstance(name, str) or name not in RULES:
        raise SettingError(
            f"got acceptance_rule={name!r}; expected one of {', '.join(map(repr, RULES))}."
            f"{did_you_mean(str(name), RULES)}"
        )
    return RULES[name](seeds) if sampled else Greedy()


def draw_token(probs: Tensor, seeds: Tensor, counters: Tensor, purpose: Purpose, ids: Tensor | None = None) -> Tensor:
    """Draw from `probs` (batch, tokens, vocab) with the noise of (seed, counter, purpose): (batch, tokens), int64.

    On the CPU noise is computed only for ids that can be drawn at all, a fiftieth of the time behind a top-k. On other
    devices it is computed for all: finding those ids would make the host wait. The tokens are the same.

    Args:
        ids: (probs.shape[-1],), int64, the token ids that probs belong to, each with its own noise; None: all.
    """
    if probs.device.type != "cpu":
        everyone = torch.arange(probs.shape[-1], device=probs.device) if ids is None else ids
        best = race(probs, exponential_at(seeds[:, None, None], counters.unsqueeze(2), purpose, everyone))
    else:
        best = _raced(probs, seeds, counters, purpose, ids).max(dim=-1).indices
    return best if ids is None else ids[best]


def _raced(probs: Tensor, seeds: Tensor, counters: Tensor, purpose: Purpose, ids: Tensor | None) -> Tensor:
    """How soon each id arrives (`race`), the largest first, 0 for those that never do; computed for the others only."""
    rows, tokens, columns = probs.nonzero(as_tuple=True)
    drawn = columns if ids is None else ids[columns]
    arrivals = probs[rows, tokens, columns] / exponential_at(seeds[rows], counters[rows, tokens], purpose, drawn)
    raced = torch.zeros(probs.shape, dtype=arrivals.dtype, device=probs.device)
    return raced.index_put_((rows, tokens, columns), arrivals)


def _first(probs: Tensor, seeds: Tensor, counters: Tensor, purpose: Purpose, count: int, ids: Tensor | None) -> Tensor:
    """The `count` ids that arrive first, in this order: (batch, tokens, count)."""
    return _best(_raced(probs, seeds, counters, purpose, ids), count, ids)


def _matched(draft: Draft, target_tokens: Tensor, valid: Tensor) -> Acceptance:
    """By what the target itself chose behind the newest token and each draft, (batch, drafts + 1) each."""
    if draft.tree is None:
        return Acceptance(*accept_by_match(draft.tokens, target_tokens, _counts(draft)), _leading_valid(valid))
    tree = draft.tree
    accepted, following, places = accept_in_tree(draft.tokens, target_tokens, _counts(draft), tree.before, tree.sees)
    return Acceptance(accepted, following, _leading_valid(valid.gather(1, places)), places, target_tokens)


def _best(scores: Tensor, count: int, ids: Tensor | None) -> Tensor:
    best = scores.topk(count, dim=-1).indices
    return best if ids is None else ids[best]


def _counts(draft: Draft) -> Tensor:
    return torch.tensor(draft.num_drafted, device=draft.tokens.device) if draft.counts is None else draft.counts


def _leading_valid(valid: Tensor) -> Tensor:
    """Count a row's positions before the first that is not valid: (batch,)."""
    if valid.shape[1] == 1:
        return valid[:, 0].long()
    return valid.long().cumprod(dim=1).sum(dim=1)


def _counters(positions: Tensor, round_index: Tensor) -> Tensor:
    return positions + (round_index << 32)
