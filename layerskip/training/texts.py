"""Which token rows a draft path is trained on, as arrays and as a file. It does not know where they come from."""

from __future__ import annotations

import hashlib
import os
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from layerskip.errors import CheckpointError, InputError, SettingError

__all__ = ["TrainingTexts"]


@dataclass(frozen=True, eq=False)
class TrainingTexts:
    """Rows of token ids.

    Attributes:
        tokens: (rows, row_tokens), int32.
        is_own: (rows, row_tokens), bool: where the token is the model's own, of an answer or of a base model's text. A
            chat's template, what a user says, and the first token of a base model's text are not.
    """

    tokens: npt.NDArray[np.int32]
    is_own: npt.NDArray[np.bool_]

    def __post_init__(self) -> None:
        """Check (InputError); integers of any kind become int32."""
        tokens, is_own = self.tokens, self.is_own
        if not isinstance(tokens, np.ndarray) or not isinstance(is_own, np.ndarray):
            raise InputError(
                f"got tokens of type {type(tokens).__name__}, is_own of type {type(is_own).__name__}; expected arrays."
            )
        if tokens.ndim != 2 or tokens.size == 0 or tokens.dtype.kind not in "iu":
            raise InputError(f"got tokens {tokens.shape}, {tokens.dtype}; expected integers (rows, row_tokens), some.")
        if is_own.shape != tokens.shape or is_own.dtype != np.bool_:
            raise InputError(
                f"got 'assistant' {is_own.shape}, {is_own.dtype}; expected a bool for each of tokens {tokens.shape}."
            )
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= 2**31:
            raise InputError(f"got token ids from {least} to {most}; expected ids of a vocabulary, from 0.")
        object.__setattr__(self, "tokens", tokens.astype(np.int32, copy=False))

    @property
    def num_tokens(self) -> int:
        """All of them."""
        return int(self.tokens.size)

    def digest(self) -> str:
        """Of tokens and mask, by which two sets of texts are told apart: 16 hexadecimal digits."""
        content = str(self.tokens.shape).encode() + self.tokens.astype("<i4").tobytes() + self.is_own.tobytes()
        return hashlib.sha256(content).hexdigest()[:16]

    def refuse_unfit(self, vocab_size: int, max_positions: int) -> None:
        """Make sure that a model of these sizes can be trained on them.

        Raises:
            InputError: ids or positions that it does not have.
        """
        most, row_tokens = int(self.tokens.max()), self.tokens.shape[1]
        if most >= vocab_size or not 2 <= row_tokens <= max_positions:
            raise InputError(
                f"got rows of {row_tokens} tokens, ids up to {most}; expected 2 to {max_positions:,} tokens, ids below "
                f"{vocab_size:,}. Use texts that were written for this model."
            )

    def split(self, held_out_rows: int, seed: int) -> tuple[TrainingTexts, TrainingTexts]:
        """Rows to train on, and `held_out_rows` others, drawn by the seed; SettingError if a side would be empty."""
        rows = len(self.tokens)
        if rows < 2:
            raise SettingError(f"got texts of {rows} row; expected two or more, to train on and to judge by. Add more.")
        if type(held_out_rows) is not int or not 1 <= held_out_rows < rows:
            raise SettingError(f"got held_out_rows={held_out_rows!r} of {rows} rows; expected from 1 to {rows - 1}.")
        is_held_out = np.zeros(rows, dtype=bool)
        is_held_out[random.Random(seed).sample(range(rows), held_out_rows)] = True
        train, held_out = (TrainingTexts(self.tokens[some], self.is_own[some]) for some in (~is_held_out, is_held_out))
        return train, held_out

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``tokens`` and ``assistant`` as .npz; the file appears whole or (OSError) not at all."""
        file, scratch = Path(path), Path(f"{os.fspath(path)}.new")
        tokens = self.tokens.astype(np.uint16) if self.tokens.max() < 2**16 else self.tokens
        try:
            with scratch.open("wb") as stream:  # given a name, numpy would put .npz behind it
                np.savez_compressed(stream, tokens=tokens, assistant=self.is_own)
            os.replace(scratch, file)
        finally:
            scratch.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str], vocab_size: int) -> TrainingTexts:
        """Read what `save` wrote; integers of any kind are accepted, and without ``assistant`` all tokens count.

        Raises:
            CheckpointError: the file is missing, damaged, or has no tokens.
            InputError: what is in it are no texts, or none of this vocabulary.
        """
        try:
            file = Path(path)
            with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
                tokens = np.asarray(archive["tokens"])
                own = np.asarray(archive["assistant"]) if "assistant" in archive else np.ones(tokens.shape, dtype=bool)
        except Exception as error:  # whatever the readers of archives and of arrays make of a damaged file
            reason = " ".join(str(error).split()) or type(error).__name__
            raise CheckpointError(
                f"cannot read texts from {path}: {reason:.300}. Expected an .npz that save() wrote."
            ) from error
        try:
            texts = cls(tokens, own)
            if (most := int(texts.tokens.max())) >= vocab_size:
                raise InputError(f"got token id {most}; expected at most the model's {vocab_size - 1}.")
            if not texts.is_own.any():
                raise InputError("got an 'assistant' that is nowhere true; expected tokens that count.")
        except InputError as error:
            raise InputError(f"{file}: {error} Use texts that this model wrote.") from error
        return texts
