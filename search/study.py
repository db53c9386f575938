"""A study: the trials of one search, what all of its workers must share, and how a worker joins in.

Whoever creates a study prepares it: writes the texts, measures the costs, queues the starts. All of it is kept in the
study, so that workers on other machines, and a search that is resumed, judge candidates by the same texts and costs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.study import StudyDirection

from layerskip.api import Model
from layerskip.draft_vocabulary import most_frequent
from layerskip.errors import SearchError, SettingError
from layerskip.search.calibration import given_ids, make_sampler_of, write_calibration
from layerskip.search.claim import Claim, Overtaken
from layerskip.search.cost import CostModel
from layerskip.search.judge import Judge
from layerskip.search.measuring import context_for, measure_costs
from layerskip.search.progress import Progress
from layerskip.search.replay import Replay
from layerskip.search.samplers import make_pruner, make_sampler
from layerskip.search.settings import SearchSettings, refuse_differences
from layerskip.search.space import Space
from layerskip.search.starts import single_retention, starts
from layerskip.search.texts import Calibration, Text
from layerskip.search.trained import Trained

__all__ = ["Prepared", "load_prepared", "open_study", "queue_starts"]

_FORMAT = 1
_BATCH_POSITIONS = 512  # replayed at once, and between two questions whether a trial is worth going on with
_WAIT_S = 2.0


@dataclass(frozen=True)
class Prepared:
    """A study and what its trials are judged by.

    Attributes:
        retention: see `single_retention`.
        trained: trained paths by name, as this worker has them.
    """

    study: optuna.Study
    settings: SearchSettings
    space: Space
    calibration: Calibration
    costs: CostModel
    retention: dict[str, list[float]]
    vocabularies: dict[int, tuple[int, ...]]
    trained: Mapping[str, Trained] = field(default_factory=dict)

    def judge(self, model: Model, texts: Sequence[Text]) -> Judge:
        """For candidates on these texts."""
        sampling = self.settings.sampling
        replay = Replay(
            model.decoder,
            texts,
            draft_length=self.settings.draft_length,
            batch_positions=_BATCH_POSITIONS,
            sampler=None if sampling is None else make_sampler_of(model, sampling),
            adapters=[each.adapter for each in self.trained.values()],
        )
        return Judge(replay, self.costs, self.vocabularies, self.trained)


def open_study(
    model: Model,
    storage: BaseStorage,
    name: str,
    settings: SearchSettings,
    prompts: Sequence[Any] | None,
    costs: CostModel | None,
    progress: Progress,
    heartbeat_s: float = 60.0,
    trained: Mapping[str, Trained] = {},
) -> tuple[Prepared, Judge]:
    """Join the study `name`, or create and prepare it; and the judge of its trials.

    Args:
        heartbeat_s: between two signs of life of the worker that prepares it.
        trained: see `load_trained`.

    Raises:
        SearchError: the study was made for another model, or with other settings, trained paths, prompts or costs.
        LayerSkipError: its texts cannot be written, or its costs not be measured.
    """
    if costs is not None and costs.num_blocks != model.decoder.num_blocks:
        raise SettingError(
            f"got costs of {costs.num_blocks} blocks for a model of {model.decoder.num_blocks}; expected those of this "
            "model. Measure them on it, or leave them out."
        )
    unknown = [name for name in trained if costs is not None and name not in costs.trained_s]
    if unknown:
        raise SettingError(
            f"got costs that do not say what the trained path {unknown[0]} ({trained[unknown[0]].plan.adapter}) takes; "
            "expected those of a search with it. Measure them with it, or leave them out."
        )
    with _quiet_optuna():
        directions = _directions(settings.objective)
        study = optuna.create_study(storage=storage, study_name=name, directions=directions, load_if_exists=True)
    asked = _identity(model, settings, prompts, trained)
    judge, claim, waits = None, Claim(study, heartbeat_s), False
    while not study.user_attrs.get("prepared"):
        if claim.take():
            with suppress(Overtaken), claim:
                if not study.user_attrs.get("prepared"):  # just now, by whom we saw at it
                    _begin(study, asked, costs)
                    judge = _prepare(model, study, settings, prompts, progress, claim, trained)
            continue
        _refuse_another(name, study.user_attrs.get("made_for", asked), asked)
        if not waits:
            progress.message(f"another worker is preparing the study {name!r}; waiting for it")
        waits = True
        time.sleep(_WAIT_S)
    _refuse_another(name, study.user_attrs["made_for"], asked)
    # Workers that share a seed would all try the same: only who prepares the study takes the one that is set.
    prepared = load_prepared(model, study, settings, None if judge is None else settings.seed, trained)
    if costs is not None and costs != prepared.costs:
        raise SearchError(
            f"got the study {name!r}, which was made with other costs. Give it those, or none, or the new search a "
            "name of its own (--study)."
        )
    return prepared, judge or prepared.judge(model, prepared.calibration.search)


def load_prepared(
    model: Model,
    study: optuna.Study,
    settings: SearchSettings,
    seed: int | None,
    trained: Mapping[str, Trained] = {},
) -> Prepared:
    """What a prepared study holds, with this worker's sampler and pruner.

    Args:
        seed: of the sampler; None draws one.
    """
    attributes = study.user_attrs
    space = _space(model, settings, trained)
    calibration = Calibration.from_dict(attributes["calibration"])
    study.sampler = make_sampler(settings.sampler, space, seed)
    study.pruner = optuna.pruners.NopPruner()  # Optuna's default would prune
    if settings.prune and settings.objective == "speedup":
        study.pruner = make_pruner()
    return Prepared(
        study,
        settings,
        space,
        calibration,
        CostModel.from_dict(attributes["costs"]),
        attributes["retention"],
        _vocabularies(model, space, calibration),
        trained,
    )


def _space(model: Model, settings: SearchSettings, trained: Mapping[str, Trained]) -> Space:
    paths = [each.path for each in trained.values()]
    return settings.space(model.decoder.num_blocks, model.decoder.vocab_size, paths)


def _directions(objective: str) -> list[StudyDirection]:
    return [StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE][: 1 if objective == "speedup" else 2]


def _begin(study: optuna.Study, asked: dict[str, Any], costs: CostModel | None) -> None:
    """Note what the study is made for. What an attempt that did not come to its end has left is kept if it fits.

    Raises:
        SearchError: the study has trials already, for something else, or other objectives.
    """
    kept = study.user_attrs
    is_empty = not study.get_trials(deepcopy=False) and study.directions == _directions(asked["settings"]["objective"])
    if not is_empty and "made_for" not in kept:
        raise SearchError(
            f"got the study {study.study_name!r}, which is no search of layerskip. Give the search a name of its own "
            "(--study)."
        )
    try:
        _refuse_another(study.study_name, kept.get("made_for", asked), asked)
    except SearchError:
        if not is_empty:
            raise
        kept = {}  # a setting, say, that was refused: the corrected one begins anew
        study.set_user_attr("calibration", None)
        study.set_user_attr("costs", None)
    if kept.get("calibration") is None:
        study.set_user_attr("made_for", asked)
    if costs is not None and kept.get("costs") is None:
        study.set_user_attr("costs", costs.to_dict())


def _prepare(
    model: Model,
    study: optuna.Study,
    settings: SearchSettings,
    prompts: Sequence[Any] | None,
    progress: Progress,
    claim: Claim,
    trained: Mapping[str, Trained],
) -> Judge:
    """Write into the study all that its workers share; what an earlier attempt has finished is kept.

    Raises:
        Overtaken: by another worker.
    """

    def stage(what: str, done: int, total: int) -> None:
        claim.confirm()
        progress.stage(what, done, total)

    def keep(name: str, value: Any) -> None:
        claim.confirm()
        study.set_user_attr(name, value)

    space = _space(model, settings, trained)
    context = context_for(model, settings)
    if study.user_attrs.get("calibration") is None:
        calibration = write_calibration(
            model,
            prompts,
            positions=settings.positions,
            held_out_positions=settings.held_out_positions,
            frequency_positions=settings.frequency_positions if len(space.vocabulary_sizes) > 1 else 0,
            new_tokens=settings.new_tokens,
            seed=settings.seed,
            sampling=settings.sampling,
            notify=stage,
        )
        keep("calibration", calibration.to_dict())
        if calibration.settings["left_out"]:
            told = ", ".join(f"{name}={value!r}" for name, value in calibration.settings["left_out"].items())
            progress.message(f"the checkpoint's {told} is left out while searching: replay cannot apply it")
    calibration = Calibration.from_dict(study.user_attrs["calibration"])
    if study.user_attrs.get("costs") is None:
        costs = measure_costs(
            model,
            list(_vocabularies(model, space, calibration).values()),
            draft_length=settings.draft_length,
            context=context,
            trained=trained.values(),
            notify=stage,
        )
        keep("costs", costs.to_dict())
    keep("retention", {})
    prepared = load_prepared(model, study, settings, settings.seed, trained)
    judge = prepared.judge(model, calibration.search)
    stage("ranking sub-blocks", 0, 1)
    keep("retention", queue_starts(study, judge, space))
    keep("start_block_passes", judge.replay.block_passes)
    keep("prepared", True)
    stage("ranking sub-blocks", 1, 1)
    return judge


def queue_starts(study: optuna.Study, judge: Judge, space: Space) -> dict[str, list[float]]:
    """Queue the candidates to begin with; returns what leaving out single sub-blocks does (`single_retention`)."""
    retention = single_retention(judge, space)
    for start in starts(judge, space, retention):
        study.enqueue_trial(space.params(start.candidate), user_attrs={"origin": start.name}, skip_if_exists=True)
    return retention


def _vocabularies(model: Model, space: Space, calibration: Calibration) -> dict[int, tuple[int, ...]]:
    """The most frequent ids, for each size that may be chosen."""
    ids = [token for text in calibration.frequency for token in text.token_ids]
    settings: Any = model.check([0], max_new_tokens=1).settings
    ends = [token for token in settings.eos_token_id if token < model.decoder.vocab_size]
    sizes = [size for size in space.vocabulary_sizes if size is not None]
    return {size: most_frequent(ids, size, model.decoder.vocab_size, ends[:size]) for size in sizes}


def _identity(
    model: Model, settings: SearchSettings, prompts: Sequence[Any] | None, trained: Mapping[str, Trained]
) -> dict[str, Any]:
    """What a study is made for. Prompts by their hash; what costs were measured on by its kind; in their order by name
    the trained paths, so that all workers have the same.
    """
    digest = None
    if prompts is not None:  # by their ids: the same prompt may come as text, list or tensor
        rows = given_ids(model, prompts)
        digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
    return {
        "format": _FORMAT,
        "model": asdict(model.identity),
        "runs_as": {"dtype": str(model.decoder.dtype).removeprefix("torch."), "device": model.decoder.device.type},
        "settings": settings.to_dict(),
        "prompts": {"sha256": digest},
        "trained": {name: trained[name].path.to_dict() for name in sorted(trained)},
    }


def _refuse_another(name: str, kept: dict[str, Any], asked: dict[str, Any]) -> None:
    if kept.get("format") != asked["format"]:
        raise SearchError(
            f"got the study {name!r} in the format {kept.get('format')!r}; expected {asked['format']}. Begin a new one "
            "(--study), or use the version of layerskip that it was made with."
        )
    for what, key in (("model", "model"), ("dtype or device", "runs_as"), ("setting", "settings")):
        refuse_differences(name, kept[key], asked[key], what)
    # Studies from before there were any have none.
    refuse_differences(name, kept.get("trained", {}), asked["trained"], "set of trained paths")
    if asked["prompts"]["sha256"] is not None:  # a search that is resumed need not be given its prompts again
        refuse_differences(name, kept["prompts"], asked["prompts"], "set of prompts")


@contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Without the lines that Optuna prints about each study, and what it says of parts that it may yet change."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(level)
