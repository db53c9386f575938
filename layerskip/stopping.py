"""When a row is finished, and why: transformers' own criteria, asked once for every committed token.

Because each token of an accepted draft is asked about in its turn, nothing is emitted, cached or streamed past a stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from layerskip.errors import SettingError
from layerskip.settings import DecodingSettings

__all__ = ["FinishReason", "RowStopping", "make_stopping"]

FinishReason = str
"""One of "eos", "stop_string", "length", "max_positions", "max_time", or "criteria" for a caller's own."""


class Named(NamedTuple):
    """A criterion and the reason that is reported when it fires."""

    reason: FinishReason
    criterion: StoppingCriteria


@dataclass(frozen=True)
class RowStopping:
    """The criteria of one row, the most informative reason first."""

    criteria: Sequence[Named]

    def reason_to_stop(self, token_ids: Tensor) -> FinishReason | None:
        """Ask about the newest of `token_ids`, (1, length) committed tokens, prompt included."""
        for reason, criterion in self.criteria:
            answer: Any = criterion(token_ids, None)  # a tensor of one a row; transformers takes a plain bool as well
            if bool(torch.as_tensor(answer).all()):
                return reason
        return None


def make_stopping(
    settings: DecodingSettings,
    own: StoppingCriteriaList,
    tokenizer: PreTrainedTokenizerBase | None,
    prompt_lengths: Sequence[int],
    max_positions: int,
) -> list[RowStopping]:
    """Build the criteria of each row.

    Args:
        own: the caller's further criteria.
        max_positions: of the model; a row ends there with reason "max_positions" even if its settings ask for more.

    Raises:
        SettingError: stop strings without a tokenizer.
    """
    shared = []
    if settings.eos_token_id:
        shared.append(Named("eos", EosTokenCriteria(list(settings.eos_token_id))))
    if settings.stop_strings:
        if tokenizer is None:
            raise SettingError(
                f"got stop_strings={list(settings.stop_strings)!r} on a model without tokenizer; stop strings are "
                "matched on text. Pass one to wrap(model, tokenizer), or stop on token ids with eos_token_id."
            )
        try:
            criterion = StopStringCriteria(tokenizer, list(settings.stop_strings))
        except ValueError as error:
            raise SettingError(
                f"got stop_strings={list(settings.stop_strings)!r}, which this tokenizer cannot write; expected text "
                "that its tokens can make up. Check for characters that it does not know."
            ) from error
        shared.append(Named("stop_string", criterion))
    shared += [Named("criteria", criterion) for criterion in own]
    if settings.max_time is not None:
        shared.append(Named("max_time", MaxTimeCriteria(settings.max_time)))
    return [RowStopping([*shared, _length(settings.longest(length), max_positions)]) for length in prompt_lengths]


def _length(longest: int, max_positions: int) -> Named:
    if longest <= max_positions:
        return Named("length", MaxLengthCriteria(longest))
    return Named("max_positions", MaxLengthCriteria(max_positions))
