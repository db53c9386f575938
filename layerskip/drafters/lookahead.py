"""Lookahead decoding (Fu et al., ICML 2024): n-grams that the model said in parallel before, at no draft steps.

Two things share each verification pass, and both are one tree behind the newest token:

1. The window guesses on in several columns at once. Its level 0 is a chain of guessed tokens, the newest one being
   that of column 0; level `l` hangs below level ``l - 1`` in each column, one position further on. What the target says
   behind the last level is the next one (a Jacobi step), and closes an n-gram in every column. Then level 0 is dropped.
2. N-grams of earlier passes that begin with the newest token are guesses, as branches below it.

What is right on any path of the tree stands. N-grams of the text itself are guesses too, if wanted (in the paper an
option, for the prompt). Different from the paper, a window moves along with the text by as many places as were
committed, the columns that it leaves behind going on at its other end; it begins as tokens of the prompt; and what
branches begin with alike is verified once. All tokens are chosen, not drawn: under sampling those stand that the target
draws, in the window too, and the output is exact (`TreeRule`).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from layerskip.draft import Draft, empty_draft, trie
from layerskip.drafters.base import DraftContext, GoesOn
from layerskip.models.tree import Tree
from layerskip.plan import DraftPlan
from layerskip.state import DecodeState

__all__ = ["LookaheadDrafter", "NgramPool", "Sizes", "Window"]


class Sizes(NamedTuple):
    """The paper's W, N and G.

    Attributes:
        window: columns that guess on at once, from 1.
        ngram: tokens of an n-gram, from 2.
        guesses: most n-grams that are verified at once, and kept for each first token, from 1.
    """

    window: int
    ngram: int
    guesses: int

    @classmethod
    def of(cls, plan: DraftPlan) -> Sizes:
        """Those that `plan` asks for."""
        return cls(plan.lookahead_window, plan.lookahead_ngram, plan.lookahead_guesses)

    @property
    def width(self) -> int:
        """Most tokens of a draft: those of the window but for the newest one, and the branches."""
        return (self.window + self.guesses) * (self.ngram - 1) - 1


class NgramPool:
    """N-grams by their first token, the newest ones of each."""

    def __init__(self, most: int, ends: frozenset[int] = frozenset()) -> None:
        """Hold at most `most` n-grams for each first token, and none that goes on behind one of `ends`."""
        self._most, self._ends = most, ends
        self._followers: dict[int, dict[tuple[int, ...], None]] = {}  # dictionaries keep their order

    def add(self, ngram: Sequence[int]) -> None:
        """Make `ngram` the newest one, whether it is there already or not."""
        if not self._ends.isdisjoint(ngram[:-1]):
            return
        first, *rest = ngram
        known = self._followers.setdefault(first, {})
        known.pop(tuple(rest), None)
        known[tuple(rest)] = None
        if len(known) > self._most:
            del known[next(iter(known))]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What followed `token`, the newest first."""
        return [*reversed(self._followers.get(token, {}))]


class Window:
    """Guesses at the tokens behind a text's newest one.

    Attributes:
        levels: ngram - 1 lists of a token for each column; the token of column `j` in level `l` stands ``j + l`` places
            behind `place`.
        place: where in the text column 0 of level 0 stands.
    """

    def __init__(self, levels: list[list[int]], place: int) -> None:
        """See the class."""
        self.levels, self.place = levels, place

    def follow(self, text: Sequence[int]) -> None:
        """Move to the newest token of `text`; columns that are left behind go on at the other end."""
        newest = len(text) - 1
        steps = (newest - self.place) % len(self.levels[0])
        self.levels = [level[steps:] + level[:steps] for level in self.levels]
        self.place = newest
        self.levels[0][0] = text[-1]

    @property
    def depth(self) -> int:
        """Of its tree."""
        return len(self.levels[0]) + len(self.levels) - 2

    def paths(self) -> list[list[int]]:
        """Of each column, from behind the newest token to the last level."""
        first, *others = self.levels
        return [[*first[1 : column + 1], *(level[column] for level in others)] for column in range(len(first))]

    def advance(self, choices: Sequence[int]) -> list[tuple[int, ...]]:
        """Take what the target said behind the last level as the next one; returns the n-grams that this closes."""
        levels = [*self.levels, list(choices)]
        self.levels, self.place = levels[1:], self.place + 1
        return list(zip(*levels, strict=True))


class _Row:
    """What is known of one row's text.

    Attributes:
        read: how many of its tokens the pool has seen.
        ends: where the window's columns end in the tree that was proposed; None: they were not in it.
    """

    def __init__(self, window: Window, pool: NgramPool) -> None:
        """See the class."""
        self.window, self.pool = window, pool
        self.read = 0
        self.ends: list[int] | None = None


class LookaheadDrafter:
    """Drafts a window and what earlier ones came to."""

    def __init__(self, context: DraftContext, sizes: Sizes, reads: bool = True) -> None:
        """See the class.

        Args:
            reads: n-grams of the text are guesses, too.
        """
        self.context, self.sizes, self._reads = context, sizes, reads

    def begin(self, state: DecodeState) -> None:
        """Read the prompts, and fill the windows with tokens of theirs, the same ones for the same prompt."""
        self._rows = [
            _Row(self._first_window(text), NgramPool(self.sizes.guesses, self.context.eos_ids)) for text in state.texts
        ]  # of all the call's
        self._proposed: list[_Row] = []
        self.observe(state)

    def outlook(self, state: DecodeState) -> Sequence[int | None]:
        """All rounds are alike: a window is worth computing where nothing can be guessed yet, too."""
        return [0] * state.batch

    def catch_up(self, state: DecodeState) -> None:
        """Nothing: it reads as the text is written."""

    def propose(self, state: DecodeState, limits: Sequence[int], goes_on: GoesOn | None = None) -> Draft:
        """See `Drafter.propose`; the tokens are all there at once, so `goes_on` is not asked."""
        self._proposed = self._running(state)
        trees = [
            self._tree(row, text, limit) for row, text, limit in zip(self._proposed, state.texts, limits, strict=True)
        ]
        counts, device = [len(tokens) for tokens, _, _ in trees], state.token_ids.device
        if not any(counts):
            return empty_draft(state)

        def padded(rows: Iterable[list[int]]) -> list[list[int]]:
            return [row + [0] * (max(counts) - len(row)) for row in rows]

        tokens = torch.tensor(padded(each for each, _, _ in trees), device=device)
        places = state.lengths_tensor.unsqueeze(1) + torch.arange(max(counts), device=device)
        state.token_ids.scatter_(1, places, tokens)
        tree, depths = Tree(padded(each for _, each, _ in trees), device), [depth for _, _, depth in trees]
        return Draft(tokens, counts, tree=tree, num_in_chain=depths, is_whole=True)

    def observe(self, state: DecodeState) -> None:
        """Read what was committed."""
        ngram = self.sizes.ngram
        for row, text in zip(self._running(state), state.texts, strict=True):
            for end in range(max(row.read + 1, ngram), len(text) + 1) if self._reads else ():
                row.pool.add(text[end - ngram : end])
            row.read = len(text)

    def learn(self, choices: Sequence[Sequence[int]]) -> None:
        """See `Learner.learn`."""
        for row, said in zip(self._proposed, choices, strict=True):
            if row.ends is not None and said:
                for ngram in row.window.advance([said[end] for end in row.ends]):
                    row.pool.add(ngram)

    def _running(self, state: DecodeState) -> list[_Row]:
        return [self._rows[number] for number in state.numbers]

    def _first_window(self, text: Sequence[int]) -> Window:
        window, ngram, _ = self.sizes
        guess = random.Random(0).choices(text, k=window + ngram - 2)
        return Window([guess[level : level + window] for level in range(ngram - 1)], len(text) - 1)

    def _tree(self, row: _Row, text: Sequence[int], limit: int) -> tuple[list[int], list[int], int]:
        """Tokens, parents and depth, at most `limit`.

        A window that is deeper is left out, not cut: what the target says behind a part of a column is no n-gram.
        """
        row.window.follow(text)
        guesses = [guess[:limit] for guess in row.pool.after(text[-1])]
        has_window = 0 < row.window.depth <= limit
        columns = row.window.paths() if has_window else []
        tokens, parents, ends = trie([*guesses, *columns])
        row.ends = ends[len(guesses) :] if has_window else None
        return tokens, parents, max(map(len, [*guesses, *columns]), default=0)
