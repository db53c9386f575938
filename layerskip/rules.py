"""The two lossless acceptance rules: where their randomness comes from and which test of `verify.py` they apply.

`maximal` accepts the most; what it emits for a seed depends on the draft. `invariant` ties the noise to (seed, row,
position), so that a seed gives the same text whatever is drafted, drafts off included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from layerskip.errors import SettingError, did_you_mean
from layerskip.noise import Purpose, exponential, uniform
from layerskip.verify import Acceptance, accept_by_match, accept_by_ratio, race

__all__ = ["RULES", "AcceptanceRule", "Invariant", "Maximal", "make_rule"]


class AcceptanceRule(Protocol):
    """Draws tokens and decides about drafts. Positions are (batch, tokens): where the drawn token will stand."""

    def draw(self, probs: Tensor, positions: Tensor, round_index: int) -> Tensor:
        """Draw a draft token for each of `positions` from `probs` (batch, tokens, vocab): (batch, tokens)."""
        ...

    def accept(
        self,
        draft_tokens: Tensor,
        draft_probs: Tensor,
        target_probs: Tensor,
        num_drafted: Tensor,
        positions: Tensor,
        round_index: int,
    ) -> Acceptance:
        """Decide about drafts; shapes as in `verify.accept_by_ratio`, `positions` (batch, drafts + 1)."""
        ...


@dataclass(frozen=True)
class Maximal:
    """Rejection sampling. Noise is never used twice: it is keyed by the round as well as the position.

    (A position that is drafted again after a rejection must get fresh noise: whether it is drafted at all may depend
    on what was seen of its first draft.)
    """

    seeds: Tensor  # (batch,), int64
    sampled: bool  # False: distributions are one-hot and no noise is needed

    def draw(self, probs: Tensor, positions: Tensor, round_index: int) -> Tensor:
        """See `AcceptanceRule.draw`."""
        if not self.sampled:
            return probs.argmax(dim=-1)
        counters = _counters(positions, round_index)
        return race(probs, exponential(self.seeds, counters, Purpose.TOKEN, probs.shape[-1]))

    def accept(
        self,
        draft_tokens: Tensor,
        draft_probs: Tensor,
        target_probs: Tensor,
        num_drafted: Tensor,
        positions: Tensor,
        round_index: int,
    ) -> Acceptance:
        """See `AcceptanceRule.accept`."""
        drafts, vocab = draft_tokens.shape[1], target_probs.shape[-1]
        if not self.sampled:
            uniforms = exponentials = torch.ones((), dtype=torch.float64, device=target_probs.device)
        else:
            counters = _counters(positions, round_index)
            uniforms = uniform(self.seeds, counters[:, :drafts], Purpose.ACCEPT, 1).squeeze(2)
            exponentials = exponential(self.seeds, counters[:, :1], Purpose.CORRECTION, vocab).squeeze(1)
        return accept_by_ratio(draft_tokens, draft_probs, target_probs, num_drafted, uniforms, exponentials)


@dataclass(frozen=True)
class Invariant:
    """Coupled sampling: draft and target draw with the same noise, keyed by seed and position only."""

    seeds: Tensor  # (batch,), int64
    sampled: bool

    def draw(self, probs: Tensor, positions: Tensor, round_index: int) -> Tensor:
        """See `AcceptanceRule.draw`; `round_index` plays no part."""
        if not self.sampled:
            return probs.argmax(dim=-1)
        return race(probs, exponential(self.seeds, positions, Purpose.TOKEN, probs.shape[-1]))

    def accept(
        self,
        draft_tokens: Tensor,
        draft_probs: Tensor,
        target_probs: Tensor,
        num_drafted: Tensor,
        positions: Tensor,
        round_index: int,
    ) -> Acceptance:
        """See `AcceptanceRule.accept`; `draft_probs` and `round_index` play no part."""
        return accept_by_match(draft_tokens, self.draw(target_probs, positions, round_index), num_drafted)


RULES: dict[str, type[Maximal] | type[Invariant]] = {"maximal": Maximal, "invariant": Invariant}


def make_rule(name: str, seeds: Tensor, sampled: bool) -> AcceptanceRule:
    """Return the rule called `name`.

    Raises:
        SettingError: there is no such rule.
    """
    if not isinstance(name, str) or name not in RULES:
        raise SettingError(
            f"got acceptance_rule={name!r}; expected one of {', '.join(map(repr, RULES))}."
            f"{did_you_mean(str(name), RULES)}"
        )
    return RULES[name](seeds, sampled)


def _counters(positions: Tensor, round_index: int) -> Tensor:
    return positions + (round_index << 32)
