"""Finding the plan that pays: prepare or join a study, run trials until the budget is spent, report on other texts.

A search that is interrupted ends with what it has; what has been tried stays in its storage, and the same call goes on.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial

from layerskip.api import Model
from layerskip.errors import SearchError, SettingError, did_you_mean
from layerskip.interrupts import Interrupts, held_interrupts
from layerskip.plan import DraftPlan
from layerskip.search.cost import CostModel
from layerskip.search.front import pareto_front
from layerskip.search.held_out import evaluate
from layerskip.search.judge import Judge, vocabulary_of
from layerskip.search.measuring import conditions_of
from layerskip.search.progress import Progress, Silent
from layerskip.search.result import HeldOut, SearchResult, TrialRecord
from layerskip.search.settings import Budget, SearchSettings
from layerskip.search.storage import close_storage, open_storage, redacted, run_trial
from layerskip.search.storage_faults import Notify
from layerskip.search.study import Prepared, open_study
from layerskip.search.trained import Trained, load_trained
from layerskip.search.trials import FINISHED, block_passes_of, objective, record_of, records_of, space_of
from layerskip.search.trying import measure_speedup

__all__ = ["find_plan", "load_result"]

_REPEATS = 20  # candidates in a row that had all been tried, after which a space counts as searched

Callback = Callable[[optuna.Study, FrozenTrial], None]
"""Optuna's kind of callback, called when a trial has ended."""


def find_plan(
    model: Model,
    prompts: Sequence[Any] | None = None,
    *,
    budget: Budget | str = "200 trials",
    storage: str | Path | None = None,
    study: str = "layerskip",
    settings: SearchSettings | None = None,
    costs: CostModel | dict[str, Any] | None = None,
    trained: Sequence[DraftPlan | str | os.PathLike[str]] = (),
    measure: bool = True,
    heartbeat_s: int = 60,
    progress: Progress | None = None,
    callbacks: Sequence[Callback] = (),
) -> SearchResult:
    """Search for the draft plan with the best predicted speed-up, and say how it does on texts not searched on.

    Args:
        model: as `layerskip.load` or `layerskip.wrap` gives it.
        prompts: what the model will be asked: strings, chat messages or token ids; None: it writes its own.
        budget: ``"200 trials"`` (of the study, by all its workers) or a time, ``"10m"``.
        storage: a file or database URL that keeps the trials (`open_storage`); None: memory.
        study: its name in the storage. If it is there, the search goes on where it ended; several processes may share
            it.
        settings: see `SearchSettings`.
        costs: what steps and passes cost, for a plan that is to run elsewhere: the `costs` of a result from there;
            None: measured here, when the study begins.
        trained: plans that `layerskip train` wrote for this model, or their paths: candidates beside what the model's
            own blocks can do. Workers of one study are given the same ones, wherever these lie.
        measure: decode some of the held-out texts in earnest too, for a measured speed-up; about a minute on a CPU.
        heartbeat_s: seconds between two signs of life of a running trial, and of a study's preparation; after three
            without one, other workers take it for dead and do it again.
        progress: is told how it goes.
        callbacks: Optuna's, after each trial; ``study.stop()`` ends the search with what it has.

    Returns:
        The best plan also where it loses (`SearchResult.pays`), and the evidence.

    Raises:
        SettingError: a setting or budget out of range.
        InputError: prompts that cannot be used.
        PlanError, CheckpointError: a trained path that cannot be read, or is another model's.
        SearchError: the storage fails, the study is another model's, no trial could be finished, numbers that are not
            finite.
    """
    _check_types(model, settings, costs, callbacks)
    costs = CostModel.from_dict(costs) if isinstance(costs, dict) else costs
    budget, settings, progress = Budget.parse(budget), settings or SearchSettings(), progress or Silent()
    if not isinstance(study, str) or not study.strip() or len(study) > 512:
        raise SettingError(f"got study={study!r}; expected a name of 1 to 512 characters.")
    if type(heartbeat_s) is not int or not 1 <= heartbeat_s <= 3600:
        raise SettingError(f"got heartbeat_s={heartbeat_s!r}; expected an integer of 1 to 3600 seconds.")
    paths = load_trained(model, trained)
    began = time.perf_counter()
    opened: BaseStorage = optuna.storages.InMemoryStorage()
    if storage is not None:
        opened = open_storage(storage, notify=progress.message, heartbeat_interval=heartbeat_s)
    try:
        prepared, judge = open_study(model, opened, study, settings, prompts, costs, progress, heartbeat_s, paths)
        run_trials(prepared, judge, budget, progress, callbacks)
        conclude(model, prepared, measure, progress)
        where = "memory" if storage is None else redacted(str(storage))
        return _result(prepared.study, where, time.perf_counter() - began, paths)
    finally:
        close_storage(opened)


def run_trials(
    prepared: Prepared, judge: Judge, budget: Budget, progress: Progress, callbacks: Sequence[Callback] = ()
) -> None:
    """Try candidates until the budget is spent, or the keyboard interrupts, which ends the search only.

    Raises:
        KeyboardInterrupt: a second interrupt came.
    """
    study, interrupted = prepared.study, False
    study._stop_flag, study._thread_local.in_optimize_loop = False, True  # so that callbacks may call study.stop()
    try:
        with held_interrupts() as interrupts:
            try:
                _run_trials(prepared, judge, budget, progress, callbacks, interrupts)
                interrupted = interrupts.count > 0
            except KeyboardInterrupt:
                if interrupts.count > 1:
                    raise
                interrupted = True
            interrupts.count = 0
    finally:
        study._thread_local.in_optimize_loop = False
    if interrupted:
        progress.message("interrupted: the search ends with the trials that it has; interrupt again to leave at once")


def _run_trials(
    prepared: Prepared,
    judge: Judge,
    budget: Budget,
    progress: Progress,
    callbacks: Sequence[Callback],
    interrupts: Interrupts,
) -> None:
    study, run = prepared.study, objective(prepared, judge, interrupts)
    began, repeats = time.perf_counter(), 0
    while repeats < _REPEATS and not study._stop_flag and not interrupts.count:
        finished = [each for each in study.get_trials(deepcopy=False) if each.state in FINISHED]
        if budget.is_spent(len(finished), time.perf_counter() - began):
            break
        tried = {prepared.space.candidate(each.params) for each in finished}
        trial = run_trial(study, run)
        if trial is None:
            continue
        repeats = repeats + 1 if prepared.space.candidate(trial.params) in tried else 0
        for callback in callbacks:
            callback(study, trial)
        best = _best([record_of(each, prepared.space) for each in [*finished, trial]])
        progress.trial(record_of(trial, prepared.space), best, len(finished) + 1)
    if repeats >= _REPEATS:
        progress.message(
            f"the last {repeats} candidates had all been tried before: the sampler has nothing new to propose"
        )


def _check_types(model: Any, settings: Any, costs: Any, callbacks: Any) -> None:
    if not isinstance(model, Model):
        raise SettingError(
            f"got a model of type {type(model).__name__}; expected a layerskip.Model: layerskip.load(path), or "
            "layerskip.wrap(model, tokenizer)."
        )
    if not isinstance(settings, SearchSettings | None):
        raise SettingError(f"got settings of type {type(settings).__name__}; expected a SearchSettings.")
    if not isinstance(costs, CostModel | dict | None):
        raise SettingError(f"got costs of type {type(costs).__name__}; expected a CostModel, or a result's costs.")
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise SettingError(f"got callbacks={callbacks!r}; expected a list of functions.")


def conclude(model: Model, prepared: Prepared, measure: bool, progress: Progress) -> None:
    """Take the best trial, look at it on the held-out texts, and write that into the study.

    Raises:
        SearchError: no trial was finished.
    """
    judge, best = prepared.judge(model, prepared.calibration.held_out), _best_of(prepared)
    while True:
        if best.candidate.trained is not None:
            prepared.trained[best.candidate.trained].refuse_changes()
        held_out = evaluate(judge, best.candidate, best.num_draft_tokens or 1, progress.stage)
        plan = _plan(model, prepared, best)
        if measure:
            measured = measure_speedup(model, plan, prepared.calibration.held_out, prepared.settings, progress.stage)
            held_out = replace(held_out, measured_speedup=measured)
        seen, best = best, _best_of(prepared)
        if best.number == seen.number:  # else another worker has found a better one meanwhile
            break
    plan = replace(plan, provenance=_provenance(prepared, best, held_out))
    prepared.study.set_user_attr(
        "conclusion",
        {
            "plan": plan.to_dict(),
            "held_out": asdict(held_out),
            "trial": best.number,
            "model": model.name,
            # Whoever concludes need not be who measured the costs.
            "measured_under": conditions_of(model) if measure else None,
        },
    )


def load_result(storage: str | Path, study: str, notify: Notify | None = None) -> SearchResult:
    """The result of a search that has ended, from its storage alone.

    Args:
        notify: is told whenever a database has to be waited for; None: a warning is logged.

    Raises:
        SearchError: there is no such storage or study, or it has not come to a conclusion yet.
    """
    if "://" not in str(storage) and not Path(storage).expanduser().exists():
        raise SearchError(f"got the storage {storage}, which does not exist. Check the path.")  # and make no new one
    opened = open_storage(storage, notify=notify)
    try:
        names = optuna.get_all_study_names(opened)
        if study not in names:
            known = ", ".join(map(repr, names)) or "none at all"
            raise SearchError(
                f"got the study {study!r}; {redacted(str(storage))} has {known}.{did_you_mean(study, names)}"
            )
        return _result(optuna.load_study(study_name=study, storage=opened), redacted(str(storage)))
    finally:
        close_storage(opened)


def _result(
    study: optuna.Study, storage: str, seconds: float = 0.0, trained: Mapping[str, Trained] = {}
) -> SearchResult:
    """What the study has come to.

    Args:
        trained: where this worker has trained paths; another one may have noted the conclusion.
    """
    attributes = study.user_attrs
    found = attributes.get("conclusion")
    if found is None:
        raise SearchError(
            f"got the study {study.study_name!r}, which has come to no conclusion yet. Run the search again: it goes "
            "on where it ended."
        )
    made_for, costs = attributes["made_for"], attributes["costs"]
    records = records_of(study, space_of(study))
    complete = [each for each in records if each.state == "complete"]
    held_out = HeldOut.from_dict(found["held_out"])
    best = next(each for each in records if each.number == found["trial"])
    plan = DraftPlan.from_dict(found["plan"])
    mine = trained.get(best.candidate.trained or "")
    if mine is not None:
        plan = replace(plan, adapter=mine.plan.adapter)
    return SearchResult(
        plan=plan,
        pays=held_out.pays,
        best=best,
        held_out=held_out,
        front=tuple(pareto_front(complete)),
        trials=tuple(records),
        single_retention=attributes["retention"],
        costs=costs,
        settings={**made_for["settings"], "calibration": attributes["calibration"]["settings"]},
        conditions={
            **costs["conditions"],
            "measured_under": found["measured_under"],
            "model": found["model"],
            "architecture": made_for["model"]["architecture"],
        },
        study=study.study_name,
        storage=storage,
        block_passes=block_passes_of(study),
        seconds=seconds,
    )


def _best_of(prepared: Prepared) -> TrialRecord:
    """Of the study.

    Raises:
        SearchError: no trial was finished.
    """
    records = records_of(prepared.study, prepared.space)
    best = _best(records)
    if best is None or best.num_draft_tokens is None:
        raise SearchError(
            f"got no finished trial among {len(records)}; expected one at least. Search longer (--budget), or on fewer "
            "positions."
        )
    return best


def _best(records: Sequence[TrialRecord]) -> TrialRecord | None:
    """Of the complete ones, that of the highest predicted speed-up; of equals the first."""
    complete = [each for each in records if each.state == "complete" and each.speedup is not None]
    return max(complete, key=lambda each: each.speedup or 0.0, default=None)


def _plan(model: Model, prepared: Prepared, best: TrialRecord) -> DraftPlan:
    vocabulary = vocabulary_of(best.candidate, prepared.vocabularies, prepared.trained)
    name = best.candidate.trained
    adapter = None if name is None else prepared.trained[name].plan.adapter
    return best.candidate.plan(best.num_draft_tokens or 1, vocabulary, target=model.identity, adapter=adapter)


def _provenance(prepared: Prepared, best: TrialRecord, held_out: HeldOut) -> dict[str, Any]:
    """How the plan was found and measured, in JSON values."""
    calibration, name = prepared.calibration, best.candidate.trained
    return {
        "made_by": "layerskip search",
        **({} if name is None else {"trained": prepared.trained[name].provenance}),
        "study": prepared.study.study_name,
        "trial": best.number,
        "origin": best.origin,
        "trials": len(prepared.study.get_trials(deepcopy=False, states=FINISHED)),
        "conditions": prepared.costs.conditions,
        "calibration": {**calibration.settings, "sha256": calibration.digest},
        "draft_ratio": best.draft_ratio,
        "acceptance_by_offset": [each.value for each in held_out.acceptance_by_offset],
        "verify_ratio": prepared.costs.verify_ratio((best.num_draft_tokens or 1) + 1, best.candidate),
        "searched": {
            "acceptance_rate": best.acceptance_rate,
            "acceptance_by_offset": list(best.acceptance_by_offset),
            "predicted_speedup": best.speedup,
        },
        "held_out": json.loads(json.dumps(asdict(held_out))),
    }
