"""Where has the end of this text occurred before, and what followed it there?

A suffix automaton (Blumer, Blumer, Haussler, Ehrenfeucht, Chen, Seiferas 1985, "The smallest automaton recognizing the
subwords of a text") answers that for a text that grows, in amortised constant time a token, whatever the size of the
alphabet. It knows nothing of models, of tokenizers, or of how likely it is that the text goes on as it did before. It
only grows: a text whose end is taken back needs a new automaton.

A state stands for the substrings that end at one and the same set of places. Its link leads to the state of its longest
suffix that ends at more places, so the link of the whole text's state is the longest suffix that occurred before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Match", "SuffixAutomaton"]

_ROOT = 0  # the state of the empty string; the only one that is false
_NONE = -1  # the root's link
_REFRESHED = 16  # links a token follows to say that their substrings end here: constant, as a chain can be n long


class Match(NamedTuple):
    """The longest suffix of a text that also ends earlier in it; the two occurrences may overlap.

    Attributes:
        length: tokens in the suffix; 0 when the last token is new to the text, or there is none.
        end: index just behind an earlier occurrence, ``text[end - length : end] == text[len(text) - length :]``;
            0 when `length` is.
    """

    length: int
    end: int


class SuffixAutomaton:
    """All substrings of a growing text of token ids, in at most two states a token."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._last = _ROOT  # the state of the whole text
        self._match = Match(0, 0)
        # By state: its longest substring's length, its link, the index behind its latest occurrence, its transitions.
        self._lengths = [0]
        self._links = [_NONE]
        self._ends = [0]
        self._edges: list[dict[int, int]] = [{}]

    def __len__(self) -> int:
        """Tokens in the text."""
        return len(self._text)

    @property
    def match(self) -> Match:
        """The longest suffix that occurred before, and where.

        The occurrence is the latest one, unless at that one the suffix lay more than 16 links deep, as short suffixes
        of a long repetition do: then it is an older one.
        """
        return self._match

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append to the text, in amortised O(1) a token: transitions are never removed, and are at most three a token.

        Args:
            token_ids: any integers; all are read before the first is appended.
        """
        lengths, links, ends, edges = self._lengths, self._links, self._ends, self._edges
        last, matched, matched_end = self._last, *self._match
        tokens = list(token_ids)
        for end, token in enumerate(tokens, len(self._text) + 1):
            new = len(lengths)
            lengths.append(end)
            ends.append(end)
            edges.append({})
            state, link = last, _ROOT
            while state >= 0:
                target = edges[state].setdefault(token, new)
                if target != new:
                    link = target if lengths[target] == lengths[state] + 1 else new + 1
                    break
                state = links[state]
            links.append(link)
            if link > new:
                self._split(state, token, target)
            matched, matched_end = lengths[link], ends[link]
            refreshed = 0
            while link and refreshed < _REFRESHED:
                ends[link] = end
                link = links[link]
                refreshed += 1
            last = new
        self._text += tokens
        self._last, self._match = last, Match(matched, matched_end)

    def continuation(self, count: int) -> list[int]:
        """Say what followed the matched occurrence.

        Behind the end of the text it reads from itself, as the copies of Ziv and Lempel (1977, "A universal algorithm
        for sequential data compression") do: it then repeats what lies between the occurrence and the end of the text.

        Args:
            count: tokens to return.

        Returns:
            `count` token ids; none when there is no match.

        Raises:
            ValueError: `count` is negative.
        """
        if count < 0:
            raise ValueError(f"count is {count}, expected 0 or more: ask for the number of tokens to be returned")
        if not self._match.length:
            return []
        text, start = self._text, self._match.end
        period = len(text) - start
        if count <= period:
            return text[start : start + count]
        return [text[start + index % period] for index in range(count)]

    def _split(self, state: int, token: int, target: int) -> None:
        """Give those substrings of `target` that now also end here, `state`'s followed by `token`, their own state."""
        edges, links, clone = self._edges, self._links, len(self._lengths)
        self._lengths.append(self._lengths[state] + 1)
        self._ends.append(self._ends[target])
        edges.append(edges[target].copy())
        links.append(links[target])
        links[target] = clone
        while state >= 0 and edges[state][token] == target:
            edges[state][token] = clone
            state = links[state]
