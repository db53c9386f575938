"""What a search may choose: whether each layer's attention and MLP run, an exit, how many ids are scored; or a path
whose last blocks were trained, of which only the ids are left to be chosen.

The one border between Optuna's parameters and candidates. How many tokens to draft is no parameter: the best number
follows from acceptance and cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from layerskip.errors import SettingError
from layerskip.search.candidate import Candidate
from layerskip.search.trained import TrainedPath

__all__ = ["TRAINED", "Space", "default_vocabulary_sizes"]

TRAINED = "trained"
"""The parameter that names a trained path; None: none."""

_EXIT, _IDS = "exit", "ids"


@dataclass(frozen=True)
class Space:
    """The candidates of a search.

    Attributes:
        num_blocks: of the model.
        protect_first, protect_last: so many layers at either end are never skipped (an exit leaves the last ones out
            all the same).
        skips: sub-blocks may be left out.
        exits: drafts may end early.
        vocabulary_sizes: numbers of ids that a draft may score, ascending; None, all of them, is the last.
        trained: paths that are candidates beside what the model's own blocks can do.
    """

    num_blocks: int
    protect_first: int = 1
    protect_last: int = 1
    skips: bool = True
    exits: bool = True
    vocabulary_sizes: tuple[int | None, ...] = (None,)
    trained: tuple[TrainedPath, ...] = ()

    def __post_init__(self) -> None:
        """Check.

        Raises:
            SettingError: numbers out of range, or nothing to choose.
        """
        for name in ("protect_first", "protect_last"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= self.num_blocks:
                raise SettingError(
                    f"got {name}={value!r}; expected an integer from 0 to the model's {self.num_blocks}."
                )
        if not (self.skips and self.layers or self.exits and self.num_blocks > 1 or self.trained):
            raise SettingError(
                f"got a search with nothing to choose: skips={self.skips}, exits={self.exits}, {self.num_blocks} "
                f"layers of which {self.protect_first} + {self.protect_last} are protected. Allow more."
            )

    @property
    def layers(self) -> range:
        """Those whose sub-blocks may be left out."""
        return range(self.protect_first, self.num_blocks - self.protect_last)

    def distributions(self) -> dict[str, BaseDistribution]:
        """Optuna's parameters; True leaves a sub-block out."""
        found: dict[str, BaseDistribution] = {}
        if self.skips:
            for kind in ("attention", "mlp"):
                found |= {_name(kind, layer): CategoricalDistribution((False, True)) for layer in self.layers}
        if self.exits and self.num_blocks > 1:
            found[_EXIT] = IntDistribution(1, self.num_blocks)
        if len(self.vocabulary_sizes) > 1:
            found[_IDS] = CategoricalDistribution([size or 0 for size in self.vocabulary_sizes])  # 0: all
        if self.trained:
            found[TRAINED] = CategoricalDistribution([None, *(each.name for each in self.trained)])
        return found

    def suggest(self, trial: optuna.trial.BaseTrial) -> Candidate:
        """Let Optuna choose a candidate."""
        params: dict[str, Any] = {}
        for name, distribution in self.distributions().items():
            if isinstance(distribution, IntDistribution):
                params[name] = trial.suggest_int(name, distribution.low, distribution.high)
            elif isinstance(distribution, CategoricalDistribution):
                params[name] = trial.suggest_categorical(name, distribution.choices)
        return self.candidate(params)

    def candidate(self, params: dict[str, Any]) -> Candidate:
        """The candidate that parameters stand for; what is missing is as in the whole model."""
        ids = params.get(_IDS, self.vocabulary_sizes[-1] if len(self.vocabulary_sizes) == 1 else 0) or None
        for path in self.trained:
            if path.name == params.get(TRAINED):
                return Candidate(exit_layer=path.exit_layer, vocabulary_size=ids, trained=path.name)
        attention, mlp = (
            [layer for layer in self.layers if params.get(_name(kind, layer), False)] for kind in ("attention", "mlp")
        )
        return Candidate.of(self.num_blocks, attention, mlp, params.get(_EXIT), ids)

    def params(self, candidate: Candidate) -> dict[str, Any]:
        """Parameters that stand for `candidate`, or for what of it lies in this space."""
        found: dict[str, Any] = {}
        known = candidate.trained in {each.name for each in self.trained}
        attention, mlp = set(candidate.skip_attention), set(candidate.skip_mlp)
        if not self.exits and candidate.trained is None:
            attention, mlp = (set(each) for each in candidate.skipped(self.num_blocks))
        for name in self.distributions():
            kind, _, layer = name.partition(" ")
            if name == _EXIT:
                found[name] = candidate.exit_layer if candidate.exit_layer and not known else self.num_blocks
            elif name == TRAINED:
                found[name] = candidate.trained if known else None
            elif name == _IDS:
                size = candidate.vocabulary_size
                found[name] = (size or 0) if size in self.vocabulary_sizes else (self.vocabulary_sizes[-1] or 0)
            else:
                found[name] = int(layer) in (attention if kind == "attention" else mlp)
        return found

    def nearest(self, candidate: Candidate) -> Candidate:
        """What of `candidate` lies in this space."""
        return self.candidate(self.params(candidate))

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        trained = [each.to_dict() for each in self.trained]
        return asdict(self) | {"vocabulary_sizes": list(self.vocabulary_sizes), "trained": trained}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Space:
        """Read what `to_dict` wrote."""
        trained = tuple(TrainedPath(**each) for each in content.get("trained", ()))
        return cls(**{**content, "vocabulary_sizes": tuple(content["vocabulary_sizes"]), "trained": trained})


def _name(kind: str, layer: int) -> str:
    return f"{kind} {layer}"


def default_vocabulary_sizes(vocab_size: int, sizes: Sequence[int] = (2048, 8192, 32_768)) -> tuple[int | None, ...]:
    """Draft vocabularies worth trying: those of `sizes` that are less than half of the model's, and all ids."""
    return (*(size for size in sizes if 2 * size <= vocab_size), None)
