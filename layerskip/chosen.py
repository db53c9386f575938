"""What a verification decided, row by row as numbers, and the tokens that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from layerskip.draft import Draft
from layerskip.scores import Said
from layerskip.stopping import FinishReason

__all__ = ["Chosen", "Commit", "chosen_rows"]


class Commit(NamedTuple):
    """One token that has become part of a row's output.

    Attributes:
        drafted: it was an accepted draft (False: the target's own choice after the drafts).
        finish_reason: why the row ends with this token; None: it goes on.
        said: what the target said at its position, as far as the caller asked for it.
    """

    row: int
    token_id: int
    drafted: bool
    finish_reason: FinishReason | None
    said: Said = Said()


class Chosen(NamedTuple):
    """What a row's verification decided.

    Attributes:
        tokens: the accepted drafts and the token after them.
        accepted: number of those drafts.
        num_valid: how many of these positions have a distribution at all; what is chosen from there on is void.
        places: where in the pass each of the tokens was said: behind the newest token (0), behind draft `i` (i + 1).
        choices: of a tree, what was said in each of these places.
    """

    tokens: list[int]
    accepted: int
    num_valid: int
    places: Sequence[int]
    choices: Sequence[int] = ()

    @property
    def is_chain(self) -> bool:
        """Whether the accepted drafts are the draft's first ones."""
        return self.places[self.accepted] == self.accepted

    def stood(self, length: int) -> int:
        """How many of the draft's first `length` tokens, a chain, were accepted."""
        accepted = self.places[1 : min(length, self.accepted) + 1]
        return sum(place == index for index, place in enumerate(accepted, 1))


def chosen_rows(draft: Draft, decided: Tensor) -> list[Chosen]:
    """Each row's accepted drafts and the token behind them: the round's one look at the device.

    Args:
        decided: (batch, 3): accepted drafts, the token behind them, and the number of valid positions; of a tree also
            the places where they were said, and what was said in each place, (batch, 3 + 2 * (drafts + 1)).
    """
    chosen, drafts = [], draft.tokens.shape[1]
    for accepted, next_token, num_valid, *rest in torch.cat((decided, draft.tokens), dim=1).tolist():
        places = range(drafts + 1) if draft.tree is None else rest[: drafts + 1]
        tokens = rest[len(rest) - drafts :]
        stand = [tokens[place - 1] for place in places[1 : accepted + 1]]
        choices = () if draft.tree is None else rest[drafts + 1 : 2 * drafts + 2]
        chosen.append(Chosen([*stand, next_token], accepted, num_valid, places, choices))
    return chosen
