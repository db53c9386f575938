"""The model's own hidden states for rows of text, computed once where they fit on the disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from layerskip.identity import ModelIdentity
from layerskip.models.decoder import Decoder

__all__ = ["Teacher"]

_NOTED = "states.json"


class Teacher:
    """States behind some of the model's blocks, for the rows of `tokens`.

    With enough bytes they are kept as they are computed, in a file of `folder` or (None) in memory: reading them again
    costs a hundredth of a pass of the model. The file is opened when the first states are asked for.
    """

    def __init__(
        self,
        decoder: Decoder,
        identity: ModelIdentity,
        tokens: Tensor,
        behind: Sequence[int],
        folder: Path | None = None,
        most_bytes: int = 0,
    ) -> None:
        """See the class.

        Args:
            tokens: (rows, row_tokens), int64.
            behind: numbers of blocks, ascending; the states behind 0 are the embeddings, which are not kept.
            most_bytes: that they may take; 0: nothing is kept.
        """
        self._decoder, self._tokens, self._asked = decoder, tokens, tuple(behind)
        self._behind = [each for each in behind if each]
        self._shape = (len(tokens), len(self._behind), tokens.shape[1], decoder.hidden_size)
        self._numbers = len(tokens) * len(self._behind) * tokens.shape[1] * decoder.hidden_size
        size = self._numbers * decoder.dtype.itemsize
        self._folder, self._keeps = folder, size <= most_bytes
        if most_bytes and not self._keeps:
            warnings.warn(
                f"the model's states of all texts take {size / 1e9:.1f} GB, and at most {most_bytes / 1e9:.1f} may be "
                "kept. They are computed anew each time, which takes longer. Raise kept_state_bytes, or train on fewer "
                "texts.",
                stacklevel=2,
            )
        digest = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16]
        self._made_for = {
            "model": asdict(identity),
            "tokens": digest,
            "behind": self._behind,
            "dtype": str(decoder.dtype),
        }
        self._kept: Tensor | None = None
        self._done: set[int] = set()

    @torch.no_grad()
    def states(self, rows: Sequence[int]) -> dict[int, Tensor]:
        """Of rows by their numbers, by the number of blocks behind them: each (rows, row_tokens, hidden_size).

        Where they cannot be kept on the disk, a warning says why, and they are computed each time.
        """
        decoder = self._decoder
        token_ids = self._tokens[list(rows)].to(decoder.device)
        if self._keeps and self._kept is None:
            self._kept = torch.empty(self._shape, dtype=decoder.dtype) if self._folder is None else self._opened()
            self._keeps = self._kept is not None
        span = decoder.span([0] * len(rows), token_ids.shape[1])
        if self._kept is not None and self._done.issuperset(rows):
            found = self._kept[list(rows)].to(decoder.device)
        else:
            batch, tokens = token_ids.shape
            cache = decoder.new_cache(batch, tokens, kept_states=self._behind)
            decoder.run(decoder.embed(token_ids, span), decoder.full_path, cache, span)
            found = torch.stack([cache.states[each] for each in self._behind], dim=1)
            if self._kept is not None:
                self._kept[list(rows)] = found.cpu()
                self._done.update(rows)
        states = dict(zip(self._behind, found.unbind(dim=1), strict=True))
        return {each: states[each] if each else decoder.embed(token_ids, span) for each in self._asked}

    def flush(self) -> None:
        """Note which rows are in the file, for a later run; where that fails, it computes them once more."""
        if self._kept is not None and self._folder is not None:
            scratch = self._folder / "states.new"
            with contextlib.suppress(OSError):
                noted = json.dumps({"made_for": self._made_for, "rows": sorted(self._done)})
                scratch.write_text(noted, encoding="utf-8")
                os.replace(scratch, self._folder / _NOTED)

    def _opened(self) -> Tensor | None:
        """Map the file; its rows are taken over if it is whole, and was made for the same. None: it cannot be made."""
        assert self._folder is not None
        size, file = self._numbers * self._decoder.dtype.itemsize, self._folder / "states.bin"
        self._done = self._rows_noted(file, size)
        try:
            if not self._done:  # before a row is written: what is noted is of other rows
                (self._folder / _NOTED).unlink(missing_ok=True)
            with file.open("ab") as opened:
                opened.truncate(size)
                # All of it now: a page for which there is no room later would end the process.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(opened.fileno(), 0, size)
            return torch.from_file(str(file), True, self._numbers, dtype=self._decoder.dtype).view(self._shape)
        except (OSError, RuntimeError) as error:
            self._done = set()
            with contextlib.suppress(OSError):
                file.unlink()
            warnings.warn(
                f"cannot keep {size / 1e9:.1f} GB of states in {self._folder}: "
                f"{getattr(error, 'strerror', None) or error}. They are computed anew each time, which takes longer.",
                stacklevel=2,
            )
            return None

    def _rows_noted(self, file: Path, size: int) -> set[int]:
        """Rows that an earlier run has put into `file`, of `size` bytes; none if it cannot be used."""
        assert self._folder is not None
        try:
            noted = json.loads((self._folder / _NOTED).read_text(encoding="utf-8"))
            rows = set(noted["rows"])
            is_ours = noted["made_for"] == self._made_for and file.stat().st_size == size
            return rows if is_ours and rows.issubset(range(len(self._tokens))) else set()
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # nothing is there, or it is damaged
            return set()
