"""What a person may set about a search, checked; and how a study remembers what it was made with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from layerskip.errors import SearchError, SettingError, did_you_mean
from layerskip.search.samplers import SAMPLERS, make_sampler
from layerskip.search.space import Space, default_vocabulary_sizes
from layerskip.search.trained import TrainedPath

__all__ = ["Budget", "SearchSettings", "refuse_differences"]

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings that texts may be drawn with."""

LONGEST_DRAFT = 64
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Budget:
    """When a search has searched enough.

    Attributes:
        trials: finished ones in the study, those of all workers; None: no matter.
        seconds: of this worker's trials; None: no matter.
    """

    trials: int | None = 200
    seconds: float | None = None

    def __post_init__(self) -> None:
        """Check.

        Raises:
            SettingError: no limit at all, or one that is not positive.
        """
        for name in ("trials", "seconds"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and not isinstance(value, bool) and value > 0):
                raise SettingError(f"got a budget of {name}={value!r}; expected a number above 0, or None.")
        if self.trials is not None and self.trials != int(self.trials):
            raise SettingError(f"got a budget of trials={self.trials!r}; expected a whole number.")
        if self.trials is None and self.seconds is None:
            raise SettingError("got a budget without any limit; expected a number of trials or of seconds.")

    def is_spent(self, finished: int, seconds: float) -> bool:
        """Whether so many finished trials in the study, or so many seconds of this worker, are enough."""
        by_trials = self.trials is not None and finished >= self.trials
        return by_trials or (self.seconds is not None and seconds >= self.seconds)

    @classmethod
    def parse(cls, text: str | Budget) -> Budget:
        """Read ``"200 trials"``, ``"200"``, ``"10m"``, ``"90s"``, ``"1.5h"``.

        Raises:
            SettingError: it is none of these.
        """
        if isinstance(text, Budget):
            return text
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|h|trials?|)\s*", str(text).lower(), re.ASCII)
        amount = float(found[1]) if found else 0.0
        if not found or amount <= 0 or len(found[1]) > 9:
            raise SettingError(f"got the budget {text!r}; expected a time such as 10m, 90s or 1.5h, or '200 trials'.")
        if found[2] in _UNITS:
            return cls(trials=None, seconds=amount * _UNITS[found[2]])
        if amount != int(amount):
            raise SettingError(f"got the budget {text!r}; expected a whole number of trials.")
        return cls(trials=int(amount))


@dataclass(frozen=True)
class SearchSettings:
    """All that decides what a study's trials mean. Workers of one study must agree on it.

    Attributes:
        objective: "speedup", predicted; or "front": acceptance rate against cost of a draft step, two objectives.
        sampler: one of `SAMPLERS`.
        seed: of the sampler, the order of prompts, and texts that the model writes.
        positions, held_out_positions: drafts to be tried on the texts that are searched and reported on. 8,192 give
            acceptance with a standard error below 0.01, whatever it is.
        frequency_positions: tokens to count ids in, for draft vocabularies.
        new_tokens: of a calibration text, at most; more, up to 512, if there are few prompts.
        draft_length: most drafts a round, up to 64; measuring costs takes the longer, the more they are.
        context: positions behind which costs are measured.
        sampling: decoding settings that texts are drawn with and drafts accepted under; None: greedy.
        protect_first, protect_last, skips, exits: see `Space`.
        vocabulary_sizes: draft vocabularies to try; empty: drafts score all ids; None: some that suit the model.
        prune: give up on trials that are clearly worse than the best on the texts so far (Wilcoxon's test).
    """

    objective: str = "speedup"
    sampler: str = "elite"
    seed: int = 0
    positions: int = 8192
    held_out_positions: int = 4096
    frequency_positions: int = 4096
    new_tokens: int = 128
    draft_length: int = 6
    context: int = 256
    sampling: Mapping[str, Any] | None = None
    protect_first: int = 1
    protect_last: int = 1
    skips: bool = True
    exits: bool = True
    vocabulary_sizes: tuple[int, ...] | None = None
    prune: bool = True

    def __post_init__(self) -> None:
        """Check what can be checked without a model.

        Raises:
            SettingError: a value of the wrong type or out of range.
        """
        if self.objective not in ("speedup", "front"):
            raise SettingError(f"got objective={self.objective!r}; expected 'speedup' or 'front'.")
        if self.sampler not in SAMPLERS:
            make_sampler(self.sampler, Space(4))  # says what there is
        if type(self.draft_length) is int and self.draft_length > LONGEST_DRAFT:
            raise SettingError(f"got draft_length={self.draft_length}; expected an integer from 1 to {LONGEST_DRAFT}.")
        for name in ("positions", "held_out_positions", "frequency_positions", "draft_length", "context"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise SettingError(f"got {name}={value!r}; expected an integer of at least 1.")
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise SettingError(f"got seed={self.seed!r}; expected an integer from 0 to {2**32 - 1}.")
        for name in ("skips", "exits", "prune"):
            if not isinstance(getattr(self, name), bool):
                raise SettingError(f"got {name}={getattr(self, name)!r}; expected True or False.")
        if self.sampling is not None and not isinstance(self.sampling, Mapping):
            raise SettingError(
                f"got sampling={self.sampling!r}; expected decoding settings by name, or None for greedy."
            )
        for name in self.sampling or {}:
            if name not in SAMPLING:
                raise SettingError(
                    f"got {name} in sampling; expected {', '.join(SAMPLING)}: what looks at the tokens before a "
                    f"position, or at the whole call, replay cannot apply.{did_you_mean(str(name), SAMPLING)}"
                )
        sizes = self.vocabulary_sizes
        if sizes is not None and not isinstance(sizes, tuple | list):
            raise SettingError(
                f"got vocabulary_sizes={sizes!r}; expected a tuple of integers, or None for some that suit."
            )
        if sizes is not None and not all(type(each) is int and each >= 1 for each in sizes):
            raise SettingError(f"got vocabulary_sizes={sizes!r}; expected integers of at least 1.")

    def space(self, num_blocks: int, vocab_size: int, trained: Iterable[TrainedPath] = ()) -> Space:
        """What there is to choose on a model of this size.

        Args:
            trained: further candidates. How many ids each was trained to score is a size to choose, for all.

        Raises:
            SettingError: nothing, or a draft vocabulary larger than the model's.
        """
        sizes: tuple[int | None, ...]
        if self.vocabulary_sizes is None:
            sizes = default_vocabulary_sizes(vocab_size)
        else:
            wrong = [size for size in self.vocabulary_sizes if size >= vocab_size]
            if wrong:
                raise SettingError(f"got a draft vocabulary of {wrong[0]:,} ids; expected less than {vocab_size:,}.")
            sizes = self.vocabulary_sizes
        paths = tuple(trained)
        own = {each.vocabulary_size for each in paths}
        sizes = (*sorted({size for size in {*sizes, *own} if size is not None}), None)
        return Space(num_blocks, self.protect_first, self.protect_last, self.skips, self.exits, sizes, paths)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> SearchSettings:
        """Read what `to_dict` wrote."""
        sizes = content["vocabulary_sizes"]
        return cls(**{**content, "vocabulary_sizes": None if sizes is None else tuple(sizes)})

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        sizes = None if self.vocabulary_sizes is None else list(self.vocabulary_sizes)
        sampling = None if self.sampling is None else dict(self.sampling)
        return asdict(self) | {"vocabulary_sizes": sizes, "sampling": sampling}


def refuse_differences(study: str, kept: Mapping[str, Any], asked: Mapping[str, Any], what: str) -> None:
    """Make sure that a study was made with what is asked of it now.

    Raises:
        SearchError: it was not; all that differs is named.
    """
    names = sorted(kept.keys() | asked.keys())
    differing = [
        f"{name} {kept.get(name)!r}, now {asked.get(name)!r}" for name in names if kept.get(name) != asked.get(name)
    ]
    if differing:
        raise SearchError(
            f"got the study {study!r}, which was made with another {what}: {'; '.join(differing)}. Go on with what it "
            "was made with, or give the new search a name of its own (--study)."
        )
