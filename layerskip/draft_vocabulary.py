"""Which token ids a draft scores: those that calibration text uses most.

A head over 49k to 256k ids costs as much as several blocks, while a few thousand ids make up nearly all that is said.
What is left out is never drafted, only verified: the output does not change. (The idea is that of FR-Spec, Zhao et al.
2025.) It does not know how the ids are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from layerskip.errors import SettingError

__all__ = ["most_frequent", "vocabulary_of_texts"]


def most_frequent(token_ids: Iterable[int], size: int, vocab_size: int, always: Sequence[int] = ()) -> tuple[int, ...]:
    """The `size` most frequent of `token_ids`, ascending.

    Where the text uses fewer, the lowest ids fill up: a byte-pair tokenizer numbers its merges by frequency.

    Args:
        always: ids that are in it whatever their count (ends of text, which instruct models say once an answer).

    Raises:
        SettingError: a size that is not from 1 to `vocab_size`, or smaller than `always`.
    """
    wanted = dict.fromkeys(always)
    if type(size) is not int or not max(1, len(wanted)) <= size <= vocab_size:
        raise SettingError(
            f"got a draft vocabulary of size {size!r}; expected an integer from {max(1, len(wanted))} to the model's "
            f"{vocab_size:,} ids."
        )
    counts = Counter(token_ids)
    by_count = sorted(counts, key=lambda token: (-counts[token], token))
    chosen = dict.fromkeys((*wanted, *by_count, *range(vocab_size)))
    return tuple(sorted(list(chosen)[:size]))


def vocabulary_of_texts(texts: Iterable[str], tokenizer: Any, size: int, vocab_size: int) -> tuple[int, ...]:
    """The ids that `texts` use most under `tokenizer` (a transformers tokenizer), its end of text included.

    Raises:
        SettingError: as in `most_frequent`.
    """
    always = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = (token for text in texts for token in tokenizer(text, add_special_tokens=False)["input_ids"])
    return most_frequent(ids, size, vocab_size, always)
