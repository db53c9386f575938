"""Prompt lookup: what followed the last time that the text ended like this (Saxena 2023; n-grams there, a suffix here).

The longest suffix of prompt and output that occurred before is found by a suffix automaton, in constant time a token;
what followed it is proposed. No model runs, so a draft costs nothing but its place in the verification pass. The tokens
are chosen, not drawn: their distribution is one-hot, and acceptance stays exact under sampling too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerskip.draft import Draft
from layerskip.drafters.base import DraftContext, GoesOn
from layerskip.state import DecodeState
from layerskip.suffix_automaton import SuffixAutomaton

__all__ = ["LOOKUP_PRIORS", "LookupDrafter"]

LOOKUP_PRIORS = (0.9, 0.3, 0.5, 0.55, 0.65, 0.7, 0.75, 0.8, 0.9)
"""How often a copied token is right behind a match of so many tokens (the first entry: none, never used).

On 300 texts of 512 tokens that SmolLM2 wrote itself; a single token was right 0.2 times there, more often where there
is a passage to copy from.
"""


class LookupDrafter:
    """Drafts what the row's own text said before."""

    def __init__(self, context: DraftContext) -> None:
        """See the class."""
        self.context = context

    def begin(self, state: DecodeState) -> None:
        """Read the prompts."""
        self._texts = [SuffixAutomaton() for _ in state.numbers]  # of all the call's rows
        self._read(state)

    def outlook(self, state: DecodeState) -> Sequence[int | None]:
        """The length of the match, which says much about the draft."""
        return [min(text.match.length, len(LOOKUP_PRIORS) - 1) or None for text in self._running(state)]

    def catch_up(self, state: DecodeState) -> None:
        """Nothing: it reads as the text is written."""

    def propose(self, state: DecodeState, limits: Sequence[int], goes_on: GoesOn | None = None) -> Draft:
        """See `Drafter.propose`; the tokens are all there at once, so `goes_on` is not asked."""
        drafts = [self._draft(text, limit) for text, limit in zip(self._running(state), limits, strict=True)]
        counts = [len(draft) for draft in drafts]
        tokens = torch.tensor([draft + [0] * (max(counts) - len(draft)) for draft in drafts], dtype=torch.int64)
        tokens = tokens.view(state.batch, -1).to(state.token_ids.device)
        places = [(row, offset) for row, count in enumerate(counts) for offset in range(count)]
        rows, offsets = torch.tensor(places, dtype=torch.int64).view(-1, 2).to(tokens.device).unbind(dim=1)
        state.token_ids[rows, state.lengths_tensor[rows] + offsets] = tokens[rows, offsets]
        return Draft(tokens, counts)

    def observe(self, state: DecodeState) -> None:
        """Read what was committed."""
        self._read(state)

    def _read(self, state: DecodeState) -> None:
        for own, text in zip(self._running(state), state.texts, strict=True):
            own.extend(text[len(own) :])

    def _running(self, state: DecodeState) -> list[SuffixAutomaton]:
        return [self._texts[number] for number in state.numbers]

    def _draft(self, text: SuffixAutomaton, limit: int) -> list[int]:
        """At most `limit` tokens, none behind an end of text."""
        draft = text.continuation(limit) if limit else []
        ends = (index + 1 for index, token in enumerate(draft) if token in self.context.eos_ids)
        return draft[: next(ends, len(draft))]
