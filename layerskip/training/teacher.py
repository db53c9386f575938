"""The model's own hidden states for rows of text, computed once where they fit on the disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from layerskip.errors import SettingError
from layerskip.models.decoder import Decoder

__all__ = ["Teacher"]


class Teacher:
    """States behind an exit and behind the last block, for the rows of `tokens`.

    With a folder and enough bytes they are kept in a file there as they are computed: reading them again costs a
    hundredth of a pass of the model.
    """

    def __init__(
        self, decoder: Decoder, tokens: Tensor, exit_layer: int, folder: Path | None = None, most_bytes: int = 0
    ) -> None:
        """See the class.

        Args:
            tokens: (rows, row_tokens), int64.
            exit_layer: 0: the states behind it are the embeddings, which are not kept.
            folder: belongs to these tokens and this model only.
            most_bytes: that the file may take.

        Raises:
            SettingError: there is no room for the file.
        """
        self._decoder, self._tokens, self._exit_layer = decoder, tokens, exit_layer
        self._behind = [each for each in (exit_layer, decoder.num_blocks) if each]
        rows, row_tokens = tokens.shape
        shape = (rows, len(self._behind), row_tokens, decoder.hidden_size)
        numbers = rows * len(self._behind) * row_tokens * decoder.hidden_size
        self._kept: Tensor | None = None
        self._done: set[int] = set()
        if folder is None or numbers * decoder.dtype.itemsize > most_bytes:
            return
        self._index = folder / "states.json"
        try:
            self._kept = torch.from_file(str(folder / "states.bin"), True, numbers, dtype=decoder.dtype).view(shape)
        except RuntimeError as error:
            raise SettingError(
                f"got no room for {numbers * decoder.dtype.itemsize / 1e9:.1f} GB of states in {folder}: {error}. "
                "Lower the bytes that may be kept, or make room."
            ) from error
        if self._index.exists():
            self._done = set(json.loads(self._index.read_text(encoding="utf-8")))

    @torch.no_grad()
    def states(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Behind the exit and behind the last block, of rows by their numbers: each (rows, row_tokens, hidden_size)."""
        decoder = self._decoder
        token_ids = self._tokens[list(rows)].to(decoder.device)
        if self._kept is None or not self._done.issuperset(rows):
            batch, tokens = token_ids.shape
            cache = decoder.new_cache(batch, tokens, kept_states=self._behind)
            decoder.run(decoder.embed(token_ids), decoder.full_path, cache, decoder.span([0] * batch, tokens))
            found = torch.stack([cache.states[each] for each in self._behind], dim=1)
            if self._kept is not None:
                self._kept[list(rows)] = found.cpu()
                self._done.update(rows)
        else:
            found = self._kept[list(rows)].to(decoder.device)
        entry = found[:, 0] if self._exit_layer else decoder.embed(token_ids)
        return entry, found[:, -1]

    def flush(self) -> None:
        """Note which rows are in the file, for a later run."""
        if self._kept is not None:
            self._index.write_text(json.dumps(sorted(self._done)), encoding="utf-8")
