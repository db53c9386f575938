"""Between text and token ids: what a prompt may be, and text that appears while its tokens are still coming."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from layerskip.errors import InputError

__all__ = ["Detokenizer", "encode", "is_chat", "is_ids"]

_EXPECTED = (
    "expected a string, chat messages ([{'role': …, 'content': …}]), token ids (list of ints, or a tensor of 1 or 2 "
    "dimensions), or a list of one kind of these for a batch"
)


def encode(inputs: Any, tokenizer: PreTrainedTokenizerBase | None, attention_mask: Any = None) -> list[list[int]]:
    """Turn whatever a person may pass as a prompt into one list of token ids a row.

    A string is tokenised as it is, as transformers does; only chat messages go through the chat template.

    Raises:
        InputError: it is none of the accepted forms, empty, or text without a tokenizer.
    """
    if isinstance(inputs, Mapping) and "input_ids" in inputs:
        return encode(inputs["input_ids"], tokenizer, inputs.get("attention_mask", attention_mask))
    if isinstance(inputs, Tensor):
        rows = _from_tensor(inputs)
    elif isinstance(inputs, str) or is_chat(inputs) or is_ids(inputs):
        rows = [_row(inputs, tokenizer)]
    elif isinstance(inputs, Sequence) and len(inputs) > 0:
        rows = [_row(each, tokenizer) for each in inputs]
    else:
        raise InputError(f"got {_shown(inputs)} as prompt; {_EXPECTED}.")
    if attention_mask is not None:
        rows = _unpadded(rows, attention_mask)
    for index, row in enumerate(rows):
        if not row:
            raise InputError(f"got an empty prompt in row {index}; expected at least one token (try the BOS token).")
    return rows


def _row(prompt: Any, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    if isinstance(prompt, Tensor) and prompt.dim() == 1:
        return _from_tensor(prompt)[0]
    if is_ids(prompt):
        return [int(each) for each in prompt]
    if not isinstance(prompt, str) and not is_chat(prompt):
        raise InputError(f"got {_shown(prompt)} as prompt; {_EXPECTED}.")
    if tokenizer is None:
        raise InputError(
            "got text on a model without tokenizer; expected token ids. Pass a tokenizer to wrap(model, tokenizer)."
        )
    parts = [prompt] if isinstance(prompt, str) else [str(part) for message in prompt for part in message.values()]
    _refuse_broken_text("\n".join(parts))
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            "got chat messages, but the tokenizer has no chat template; expected a string. Set one on the tokenizer, "
            "or write the prompt as the model was trained to see it."
        )
    try:
        encoded: Any = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)
    except TemplateError as error:
        raise InputError(
            f"got chat messages that the tokenizer's chat template refuses: {error}. Write them as it expects, or pass "
            "token ids."
        ) from error
    return list(encoded["input_ids"])


def _refuse_broken_text(text: str) -> None:
    """Half a surrogate pair stands for a byte that was no UTF-8; tokenizers take neither."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"got text with a character that is none ({error.object[error.start]!r} at {error.start}); expected valid "
            "Unicode. Was the input in another encoding than UTF-8?"
        ) from error


def _from_tensor(inputs: Tensor) -> list[list[int]]:
    if inputs.is_floating_point() or inputs.dtype == torch.bool or inputs.dim() not in (1, 2):
        raise InputError(f"got a tensor of {inputs.dtype} and shape {tuple(inputs.shape)} as prompt; {_EXPECTED}.")
    rows: list[list[int]] = (inputs if inputs.dim() == 2 else inputs.unsqueeze(0)).tolist()
    if not rows:
        raise InputError("got a tensor without rows as prompt; expected at least one.")
    return rows


def _unpadded(rows: list[list[int]], attention_mask: Any) -> list[list[int]]:
    mask = attention_mask.tolist() if hasattr(attention_mask, "tolist") else attention_mask
    if isinstance(mask, Sequence) and mask and not isinstance(mask[0], Sequence):
        mask = [mask]
    if not (isinstance(mask, Sequence) and all(isinstance(row, Sequence) for row in mask)):
        raise InputError(f"got attention_mask={_shown(attention_mask)}; expected 0 and 1 in the shape of the prompts.")
    if [len(row) for row in rows] != [len(row) for row in mask]:
        raise InputError(
            f"got an attention_mask of row lengths {[len(row) for row in mask]} for prompts of "
            f"{[len(row) for row in rows]}; expected the same shape."
        )
    return [
        [token for token, seen in zip(row, seen_row, strict=True) if seen]
        for row, seen_row in zip(rows, mask, strict=True)
    ]


def is_chat(value: Any) -> bool:
    """Whether `value` is a list of chat messages."""
    return (
        isinstance(value, Sequence)
        and len(value) > 0
        and all(isinstance(each, Mapping) and "role" in each for each in value)
    )


def is_ids(value: Any) -> bool:
    """Whether `value` is a list of token ids."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, (str, bytes))
        and all(hasattr(each, "__index__") and not isinstance(each, (bool, Tensor)) for each in value)
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:60]}… ({type(value).__name__})" if len(text) > 60 else f"{text} ({type(value).__name__})"


class Detokenizer:
    """Turns a row's tokens into text piece by piece; holds back what later tokens may still change.

    A token can end in the middle of a character, and a tokenizer may treat the first token of a text differently, so
    each piece is the difference between two decoded windows that begin at the same earlier token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True) -> None:
        """Start at the first new token."""
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids: list[int] = []
        self._window, self._shown = 0, 0  # start of the window; tokens whose text is out

    def push(self, token_id: int) -> str:
        """Add one token and return the text that has become certain."""
        self._ids.append(token_id)
        before, now = self._decode(self._shown), self._decode(len(self._ids))
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        self._window, self._shown = self._shown, len(self._ids)
        return now[len(before) :]

    def flush(self) -> str:
        """Return what was held back; call it at the end."""
        before, now = self._decode(self._shown), self._decode(len(self._ids))
        self._window = self._shown = len(self._ids)
        return now[len(before) :]

    def _decode(self, end: int) -> str:
        return str(self._tokenizer.decode(self._ids[self._window : end], skip_special_tokens=self._skip))
