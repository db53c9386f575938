"""Which of Optuna's samplers suggests candidates, by name, and one of our own for spaces of many small choices.

`EliteSampler` changes a few choices of one of the best candidates so far. Skip sets reward that: a good one differs
from a better one by few sub-blocks, while a statistical model of sixty yes-or-no choices has little to learn from two
hundred trials.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, PartialFixedSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from layerskip.errors import SettingError, did_you_mean
from layerskip.search.space import TRAINED, Space

__all__ = ["SAMPLERS", "EliteSampler", "make_pruner", "make_sampler"]

_TRIES = 64  # at a candidate that was not tried yet
_ELITE = 6  # parents


class EliteSampler(BaseSampler):
    """Evolution with a small elite: a child of one or two of the best candidates, with a few choices changed.

    Several workers may share a study: all that it knows is in the trials.
    """

    def __init__(self, space: Space, seed: int | None = None) -> None:
        """`seed`: None draws one."""
        self._space = space
        self._rng = random.Random(seed)
        self._fallback = optuna.samplers.RandomSampler(seed=seed)

    def reseed_rng(self) -> None:
        """See `BaseSampler`."""
        self._rng.seed()
        self._fallback.reseed_rng()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """See `BaseSampler`; always the whole space."""
        return self._space.distributions()

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """See `BaseSampler`; before any trial has ended, nothing."""
        trials = study.get_trials(deepcopy=False)
        elite = _best(study, [each for each in trials if each.state == TrialState.COMPLETE])
        if not elite or not search_space:
            return {}
        tried = {self._space.candidate(each.params) for each in trials if each.params}
        child: dict[str, Any] = {}
        for _ in range(_TRIES):
            child = self._child([_complete(each.params, search_space) for each in elite], search_space)
            if self._space.candidate(child) not in tried:
                break
        return child

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """See `BaseSampler`; at random."""
        return self._fallback.sample_independent(study, trial, param_name, param_distribution)

    def _child(self, elite: Sequence[dict[str, Any]], space: Mapping[str, BaseDistribution]) -> dict[str, Any]:
        # The best of all is the parent half of the time, the next half of the rest, and so on.
        rank = min(int(-math.log2(1 - self._rng.random())), len(elite) - 1)
        child = dict(elite[rank])
        if len(elite) > 1 and self._rng.random() < 0.3:
            other = self._rng.choice(elite)
            child = {name: self._rng.choice((child[name], other[name])) for name in child}
        changes = 1 + min(int(-math.log2(1 - self._rng.random())), 5)
        names = self._names(child, space)
        for name in self._rng.sample(names, min(changes, len(names))):
            child[name] = self._changed(child[name], space[name])
        return child

    def _names(self, child: Mapping[str, Any], space: Mapping[str, BaseDistribution]) -> list[str]:
        """Choices whose change would change the candidate: no sub-block behind the exit."""
        exit_layer = child.get("exit", self._space.num_blocks)
        layers = {name: name.partition(" ")[2] for name in space}
        return [name for name, layer in layers.items() if not layer or int(layer) < exit_layer]

    def _changed(self, value: Any, distribution: BaseDistribution) -> Any:
        if isinstance(distribution, IntDistribution):
            step = self._rng.choice((-4, -2, -1, 1, 2, 4))
            return min(max(value + step, distribution.low), distribution.high)
        assert isinstance(distribution, CategoricalDistribution)
        choices = list(distribution.choices)
        if len(choices) == 2:
            return choices[1 - choices.index(value)]
        index = choices.index(value) + self._rng.choice((-1, 1))
        return choices[min(max(index, 0), len(choices) - 1)]


class _Untrained(PartialFixedSampler):
    """Lets `base` propose what the model's own blocks can do, knowing of such trials alone.

    Every trained path stands in the queue with every vocabulary, so there is nothing of it to propose; and what its
    trials hold of other choices, which mean nothing there, would mislead a sampler.
    """

    def __init__(self, base: BaseSampler) -> None:
        super().__init__({TRAINED: None}, base)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return super().infer_relative_search_space(_without_trained(study), trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return super().sample_relative(_without_trained(study), trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return super().sample_independent(_without_trained(study), trial, param_name, param_distribution)


def _without_trained(study: Study) -> Study:
    """The same study as one in which no trained path was tried."""
    seen = copy(study)

    def trials(deepcopy: bool = True, *args: Any, **kwargs: Any) -> list[FrozenTrial]:
        return [each for each in study._get_trials(deepcopy, *args, **kwargs) if each.params.get(TRAINED) is None]

    seen._get_trials = trials  # type: ignore[method-assign]
    return seen


def _best(study: Study, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The elite, best first; with two objectives, those that no other trial beats in both, in any order."""
    if len(study.directions) > 1:
        front = study.best_trials if trials else []
        return sorted(front, key=lambda each: -each.values[0])
    return sorted(trials, key=lambda each: each.value or 0.0, reverse=True)[:_ELITE]


def _complete(params: Mapping[str, Any], space: Mapping[str, BaseDistribution]) -> dict[str, Any]:
    """All choices, those that a trial lacks at their first value."""
    first = {
        name: each.choices[0] if isinstance(each, CategoricalDistribution) else getattr(each, "high", None)
        for name, each in space.items()
    }
    return {name: params.get(name, value) for name, value in first.items()}


def _tpe(space: Space, seed: int | None) -> BaseSampler:
    # Multivariate: whether a sub-block can go depends on which others are gone. Constant liar: workers in parallel.
    return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)


def _gp(space: Space, seed: int | None) -> BaseSampler:
    return optuna.samplers.GPSampler(seed=seed, deterministic_objective=True)


SAMPLERS: Mapping[str, Callable[[Space, int | None], BaseSampler]] = {
    "elite": EliteSampler,
    "tpe": _tpe,
    "gp": _gp,
    "nsga2": lambda space, seed: optuna.samplers.NSGAIISampler(seed=seed, population_size=20),
    "random": lambda space, seed: optuna.samplers.RandomSampler(seed=seed),
}
"""By name."""


def make_pruner() -> optuna.pruners.BasePruner:
    """Gives up on a trial that is worse, part by part of the texts, than the best one (Wilcoxon's signed-rank test)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.pruners.WilcoxonPruner(p_threshold=0.1, n_startup_steps=3)


def make_sampler(name: str, space: Space, seed: int | None = None) -> BaseSampler:
    """The sampler `name`.

    Raises:
        SettingError: there is none of that name.
    """
    if name not in SAMPLERS:
        known = ", ".join(SAMPLERS)
        raise SettingError(f"got sampler={name!r}; expected one of {known}.{did_you_mean(name, SAMPLERS)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = SAMPLERS[name](space, seed)
        return _Untrained(sampler) if space.trained else sampler
