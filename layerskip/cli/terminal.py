"""Text that appears token by token, accepted drafts marked; lines and tables for people."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.style import Style

if TYPE_CHECKING:
    from layerskip.stats import DecodeStats
    from layerskip.stream import StreamPiece

__all__ = ["DRAFTED", "has_colours", "make_console", "note", "show_stream", "summary"]

DRAFTED = Style(color="green", underline=True)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the program, instead of ending it."""
        raise BrokenPipeError


def make_console(stderr: bool = False) -> Console:
    """A console that takes text as it is: no markup, no highlighting."""
    return _Console(stderr=stderr, markup=False, highlight=False)


def has_colours(console: Console) -> bool:
    """Whether to style at all: a terminal (or FORCE_COLOR), and no NO_COLOR."""
    return console.color_system is not None and not console.no_color


def show_stream(pieces: Iterable[StreamPiece], marks: tuple[str, str] = ("", "")) -> None:
    """Write pieces of text to standard output as they come, then a line's end.

    Args:
        marks: stand around accepted drafts where they cannot be coloured.
    """
    coloured = has_colours(make_console())
    inside = False  # a run of accepted drafts
    last: str = ""
    for piece in pieces:
        text, last = str(piece), piece or last
        if coloured:
            # A model may write any character; the terminal's own commands are not its to give.
            text = text.replace("\x1b", "\N{SYMBOL FOR ESCAPE}")
            text = DRAFTED.render(text) if piece.drafted else text
        elif piece.drafted != inside:
            text = marks[not piece.drafted] + text
            inside = piece.drafted
        print(text, end="", flush=True)
    closing = marks[1] if inside else ""
    print(closing, end="" if (closing or last).endswith("\n") else "\n", flush=True)


def summary(stats: DecodeStats, finish_reason: str) -> str:
    """One line about a call."""
    parts = [
        f"{stats.new_tokens} tokens ({finish_reason})",
        f"{stats.tokens_per_s:.1f} tokens/s",
        f"{stats.tokens_per_round:.2f} tokens per round",
    ]
    if stats.proposed:
        parts.append(f"{stats.accepted} of {stats.proposed} drafts accepted")
    return ", ".join(parts)


def note(message: str) -> None:
    """Tell a person something beside the output."""
    print(f"note: {message}", file=sys.stderr, flush=True)
