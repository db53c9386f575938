"""The logits processors and warpers that the settings ask for: transformers' classes in transformers' order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from layerskip.settings import DecodingSettings

__all__ = ["make_processors"]


def make_processors(
    settings: DecodingSettings,
    own: LogitsProcessorList,
    prompt_lengths: Sequence[int],
    device: str,
    row_view: Callable[[Any, int], Any] | None = None,
) -> list[LogitsProcessorList]:
    """Build each row's list; rows share one where they can.

    Args:
        own: the caller's processors, run after ours and before the warpers, as in transformers.
        device: where the scores will be.
        row_view: what a row calls in place of one of `own`; None: itself.
    """
    if row_view is not None and own:
        rows = [LogitsProcessorList([row_view(each, row) for each in own]) for row in range(len(prompt_lengths))]
        return [
            _row_processors(settings, of_row, length, device)
            for of_row, length in zip(rows, prompt_lengths, strict=True)
        ]
    # Only a least number of new tokens depends on where the prompt ended.
    lengths = prompt_lengths if settings.min_new_tokens else [0] * len(prompt_lengths)
    by_length = {length: _row_processors(settings, own, length, device) for length in set(lengths)}
    return [by_length[length] for length in lengths]


def _row_processors(
    settings: DecodingSettings, own: LogitsProcessorList, prompt_length: int, device: str
) -> LogitsProcessorList:
    row, eos = LogitsProcessorList(), list(settings.eos_token_id)
    if settings.repetition_penalty not in (None, 1.0):
        row.append(RepetitionPenaltyLogitsProcessor(float(settings.repetition_penalty)))
    if settings.no_repeat_ngram_size:
        row.append(NoRepeatNGramLogitsProcessor(settings.no_repeat_ngram_size))
    if settings.bad_words_ids:
        row.append(NoBadWordsLogitsProcessor(settings.bad_words_ids, eos or None))
    if settings.min_length and eos:
        row.append(MinLengthLogitsProcessor(settings.min_length, eos, device=device))
    if settings.min_new_tokens and eos:
        row.append(MinNewTokensLengthLogitsProcessor(prompt_length, settings.min_new_tokens, eos, device=device))
    if settings.suppress_tokens:
        row.append(SuppressTokensLogitsProcessor(settings.suppress_tokens, device=device))
    row.extend(own)
    if settings.do_sample:
        row.extend(_warpers(settings, device))
    return row


def _warpers(settings: DecodingSettings, device: str) -> LogitsProcessorList:
    warpers = LogitsProcessorList()
    if settings.temperature not in (None, 1.0):
        warpers.append(TemperatureLogitsWarper(float(settings.temperature)))
    if settings.top_k:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p is not None and settings.top_p < 1.0:
        warpers.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        warpers.append(MinPLogitsWarper(settings.min_p))
    if settings.typical_p is not None and settings.typical_p < 1.0:
        warpers.append(TypicalLogitsWarper(settings.typical_p))
    if settings.epsilon_cutoff:
        warpers.append(EpsilonLogitsWarper(settings.epsilon_cutoff))
    if settings.eta_cutoff:
        warpers.append(EtaLogitsWarper(settings.eta_cutoff, device=device))
    return warpers
