"""Text that appears while it is decoded."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from transformers import PreTrainedTokenizerBase

from layerskip.chosen import Commit
from layerskip.result import GenerationResult
from layerskip.text import Detokenizer

__all__ = ["Stream", "StreamPiece"]


class StreamPiece(str):
    """A piece of new text; a string with more to say.

    Attributes:
        token_ids: the tokens whose text has become certain with this piece.
        drafted: all of them were accepted drafts.
    """

    token_ids: tuple[int, ...]
    drafted: bool

    def __new__(cls, text: str, token_ids: tuple[int, ...], drafted: bool) -> StreamPiece:
        """See the class."""
        piece = super().__new__(cls, text)
        piece.token_ids, piece.drafted = token_ids, drafted
        return piece


class Stream:
    """An iterator over pieces of text that decodes as it is read. Leaving it early costs nothing and breaks nothing."""

    def __init__(
        self,
        source: Generator[Commit, None, None],
        tokenizer: PreTrainedTokenizerBase,
        make_result: Callable[[list[Commit]], GenerationResult],
    ) -> None:
        """Made by `Model.stream`."""
        self._source, self._make_result = source, make_result
        self._commits: list[Commit] = []
        self._error: BaseException | None = None
        self._pieces = _pieces(source, self._commits, Detokenizer(tokenizer))

    def __iter__(self) -> Iterator[StreamPiece]:
        """The stream itself."""
        return self

    def __next__(self) -> StreamPiece:
        """The next piece of text that is certain.

        Raises:
            Whatever went wrong while decoding; the stream then ends, and `result` raises it again.
        """
        try:
            return next(self._pieces)
        except StopIteration:
            raise
        except BaseException as error:
            self._error = error
            raise

    def close(self) -> None:
        """Stop decoding here; `result` then holds what was committed, with the finish reason "closed"."""
        self._pieces.close()
        self._source.close()

    @property
    def result(self) -> GenerationResult:
        """The whole result; decodes whatever has not been read yet."""
        for _ in self:
            pass
        if self._error is not None:
            raise self._error
        return self._make_result(self._commits)


def _pieces(
    source: Generator[Commit, None, None], commits: list[Commit], detokenizer: Detokenizer
) -> Generator[StreamPiece, None, None]:
    """Pieces of text; what has come is noted in `commits`.

    No part of the stream, so that a stream that is forgotten ends at once.
    """
    waiting: list[Commit] = []
    for commit in source:
        commits.append(commit)
        waiting.append(commit)
        text = detokenizer.push(commit.token_id)
        if commit.finish_reason is not None:
            text += detokenizer.flush()
        if text:
            yield StreamPiece(text, tuple(each.token_id for each in waiting), all(each.drafted for each in waiting))
            waiting = []
