"""When a row is finished, and why: asked once for every committed token.

Ends of text and lengths are compared on the host, where both are known; all else is transformers' own criteria.

Because each token of an accepted draft is asked about in its turn, nothing is emitted, cached or streamed past a stop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    MaxTimeCriteria,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from layerskip.errors import SettingError
from layerskip.settings import DecodingSettings

__all__ = ["FinishReason", "RowStopping", "make_stopping", "stop_string_criterion"]

FinishReason = str
"""One of "eos", "stop_string", "length", "max_positions", "max_time", or "criteria" for a caller's own."""


class Named(NamedTuple):
    """A criterion and the reason that is reported when it fires."""

    reason: FinishReason
    criterion: StoppingCriteria


@dataclass(frozen=True)
class RowStopping:
    """When one row ends, the most informative reason first.

    Attributes:
        criteria: asked in this order, after an end of text and before the length.
        longest: tokens, prompt included.
        reason_at_longest: "length", or "max_positions" where the model has no more.
    """

    eos_ids: frozenset[int]
    criteria: Sequence[Named]
    longest: int
    reason_at_longest: FinishReason

    def reason_to_stop(self, token_ids: Tensor, newest: int) -> FinishReason | None:
        """Ask about `newest`, the last of `token_ids`, (1, length) committed tokens, prompt included."""
        if newest in self.eos_ids:
            return "eos"
        for reason, criterion in self.criteria:
            answer: Any = criterion(token_ids, None)  # a tensor of one a row; transformers takes a plain bool as well
            if bool(torch.as_tensor(answer).all()):
                return reason
        return self.reason_at_longest if token_ids.shape[1] >= self.longest else None


def make_stopping(
    settings: DecodingSettings,
    own: StoppingCriteriaList,
    tokenizer: PreTrainedTokenizerBase | None,
    prompt_lengths: Sequence[int],
    max_positions: int,
    row_view: Callable[[Any, int], Any] | None = None,
) -> list[RowStopping]:
    """Build the criteria of each row.

    Args:
        own: the caller's further criteria.
        max_positions: of the model; a row ends there with reason "max_positions" even if its settings ask for more.
        row_view: what a row asks in place of one of `own`; None: itself.

    Raises:
        SettingError: stop strings without a tokenizer.
    """
    first, last = [], []
    if settings.stop_strings:
        first.append(Named("stop_string", stop_string_criterion(settings.stop_strings, tokenizer)))
    if settings.max_time is not None:
        last.append(Named("max_time", MaxTimeCriteria(settings.max_time)))
    rows = []
    for row, length in enumerate(prompt_lengths):
        of_row = own if row_view is None else [row_view(each, row) for each in own]
        criteria = [*first, *(Named("criteria", each) for each in of_row), *last]
        rows.append(_row(settings, criteria, settings.longest(length), max_positions))
    return rows


def stop_string_criterion(strings: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> StopStringCriteria:
    """Transformers' criterion for `strings`.

    Raises:
        SettingError: there is no tokenizer, or it cannot write them.
    """
    if tokenizer is None:
        raise SettingError(
            f"got stop_strings={list(strings)!r} on a model without tokenizer; stop strings are "
            "matched on text. Pass one to wrap(model, tokenizer), or stop on token ids with eos_token_id."
        )
    try:
        return StopStringCriteria(tokenizer, list(strings))
    except ValueError as error:
        raise SettingError(
            f"got stop_strings={list(strings)!r}, which this tokenizer cannot write; expected text "
            "that its tokens can make up. Check for characters that it does not know."
        ) from error


def _row(settings: DecodingSettings, criteria: Sequence[Named], longest: int, max_positions: int) -> RowStopping:
    reason = "length" if longest <= max_positions else "max_positions"
    return RowStopping(frozenset(settings.eos_token_id), criteria, min(longest, max_positions), reason)
