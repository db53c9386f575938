"""What a decoding call returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from layerskip.errors import InputError
from layerskip.plan import DraftPlan
from layerskip.stats import DecodeStats

__all__ = ["GenerationResult"]


@dataclass(frozen=True)
class GenerationResult:
    """The output of one call, with what made it.

    Attributes:
        sequences: (batch, length), int64: prompt and new tokens, as transformers returns them; shorter prompts are
            padded on the left, rows that ended early on the right.
        new_token_ids: each row's new tokens, the one that ended it included.
        drafted: for each new token whether it was an accepted draft.
        finish_reasons: for each row "eos", "stop_string", "length", "max_positions", "max_time", "criteria" (a
            criterion of the caller's), or "closed" (a stream that was left early).
        stats: counts and times.
        settings: the effective decoding settings, seeds included.
        plan: the effective draft plan; None: plain decoding.
        scores: with `output_scores`, what each new token was chosen by: for each step (batch, vocab), behind all
            processors, as transformers returns them. An accepted draft has the model's own, not the draft's. Rows that
            ended early are certain of the padding token.
        logits: with `output_logits` the same before the processors.
    """

    sequences: Tensor
    new_token_ids: list[list[int]]
    drafted: list[list[bool]]
    finish_reasons: list[str]
    stats: DecodeStats
    settings: dict[str, Any]
    plan: DraftPlan | None
    tokenizer: PreTrainedTokenizerBase | None = field(repr=False)
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None

    @property
    def texts(self) -> list[str]:
        """Each row's new text, special tokens left out.

        Raises:
            InputError: the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise InputError(
                "got no tokenizer to make text with; pass one to wrap(model, tokenizer), or read .sequences."
            )
        return [str(self.tokenizer.decode(row, skip_special_tokens=True)) for row in self.new_token_ids]

    @property
    def text(self) -> str:
        """The new text of a call with one row.

        Raises:
            InputError: there are several rows, or no tokenizer.
        """
        if len(self.new_token_ids) != 1:
            raise InputError(f"got {len(self.new_token_ids)} rows; expected one for .text. Read .texts.")
        return self.texts[0]
