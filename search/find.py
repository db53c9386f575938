"""Finding the plan that pays: prepare or join a study, run trials until the budget is spent, report on other texts.

A search that is interrupted ends with what it has; what has been tried stays in its storage, and the same call goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from layerskip.api import Model
from layerskip.errors import SearchError, SettingError
from layerskip.plan import DraftPlan
from layerskip.search.cost import CostModel
from layerskip.search.front import pareto_front
from layerskip.search.held_out import evaluate
from layerskip.search.judge import Judge
from layerskip.search.progress import Progress, Silent
from layerskip.search.result import HeldOut, SearchResult, TrialRecord
from layerskip.search.settings import Budget, SearchSettings
from layerskip.search.storage import close_storage, open_storage, redacted, run_trial
from layerskip.search.study import FINISHED, Prepared, objective, open_study, record_of, records_of
from layerskip.search.trying import measure_speedup

__all__ = ["find_plan"]

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
    costs: CostModel | None = None,
    measure: bool = True,
    progress: Progress | None = None,
    callbacks: Sequence[Callback] = (),
) -> SearchResult:
    """Search for the draft plan with the best predicted speed-up, and say how it does on texts not searched on.

    Args:
        prompts: what the model will be asked: strings, chat messages or token ids; None: it writes its own.
        budget: ``"200 trials"`` (of the study, by all its workers) or a time, ``"10m"``.
        storage: a file or database URL that keeps the trials (`open_storage`); None: memory.
        study: its name in the storage. If it is there, the search goes on where it ended; several processes may share
            it.
        settings: see `SearchSettings`.
        costs: what steps and passes cost, for a plan that is to run elsewhere; None: measured here, when the study
            begins.
        measure: decode some of the held-out texts in earnest too, for a measured speed-up; about a minute on a CPU.
        progress: is told how it goes.
        callbacks: Optuna's, after each trial.

    Raises:
        SettingError: a setting or budget out of range.
        InputError: prompts that cannot be used.
        SearchError: the storage fails, the study is another model's, no trial could be finished, numbers that are not
            finite.
    """
    budget, settings, progress = Budget.parse(budget), settings or SearchSettings(), progress or Silent()
    if not isinstance(study, str) or not study.strip() or len(study) > 512:
        raise SettingError(f"got study={study!r}; expected a name of 1 to 512 characters.")
    began = time.perf_counter()
    opened = optuna.storages.InMemoryStorage() if storage is None else open_storage(storage, notify=progress.message)
    try:
        prepared, judge = open_study(model, opened, study, settings, prompts, costs, progress)
        run_trials(prepared, judge, budget, progress, callbacks)
        result = conclude(model, prepared, measure, progress)
        passes = judge.replay.block_passes
    finally:
        close_storage(opened)
    where = "memory" if storage is None else redacted(str(storage))
    return _finished(result, study, where, passes, time.perf_counter() - began)


def run_trials(
    prepared: Prepared, judge: Judge, budget: Budget, progress: Progress, callbacks: Sequence[Callback] = ()
) -> None:
    """Try candidates until the budget is spent, or the keyboard interrupts, which ends the search only."""
    study, run, began = prepared.study, objective(prepared, judge), time.perf_counter()
    try:
        while True:
            finished = [each for each in study.get_trials(deepcopy=False) if each.state in FINISHED]
            spent = time.perf_counter() - began
            if (budget.trials or len(finished) + 1) <= len(finished) or spent >= (budget.seconds or spent + 1):
                break
            trial = run_trial(study, run)
            if trial is None:
                continue
            for callback in callbacks:
                callback(study, trial)
            best = _best([record_of(each, prepared.space) for each in [*finished, trial]])
            progress.trial(record_of(trial, prepared.space), best, len(finished) + 1)
    except KeyboardInterrupt:
        progress.message("interrupted: the search ends with the trials that it has; interrupt again to leave at once")


def conclude(model: Model, prepared: Prepared, measure: bool, progress: Progress) -> SearchResult:
    """Take the best trial, look at it on the held-out texts, and put everything together.

    Raises:
        SearchError: no trial was finished.
    """
    records = records_of(prepared.study, prepared.space)
    complete = [each for each in records if each.state == "complete"]
    best = _best(complete)
    if best is None or best.num_draft_tokens is None:
        raise SearchError(
            f"got no finished trial among {len(records)}; expected one at least. Search longer (--budget), or on fewer "
            "positions."
        )
    judge = prepared.judge(model, prepared.calibration.held_out)
    held_out = evaluate(judge, best.candidate, best.num_draft_tokens, progress.stage)
    plan = _plan(model, prepared, best)
    if measure:
        measured = measure_speedup(model, plan, prepared.calibration.held_out, prepared.settings, progress.stage)
        held_out = HeldOut(**{**_fields(held_out), "measured_speedup": measured})
    pays = held_out.predicted_speedup.value > 1
    plan = DraftPlan(**{**_fields(plan), "provenance": _provenance(model, prepared, best, held_out)})
    return SearchResult(
        plan=plan,
        pays=pays,
        best=best,
        held_out=held_out,
        front=tuple(pareto_front(complete)),
        trials=tuple(records),
        single_retention=prepared.retention,
        costs=prepared.costs.to_dict(),
        settings={**prepared.settings.to_dict(), "calibration": prepared.calibration.settings},
        conditions={**prepared.costs.conditions, "model": model.name, "architecture": model.identity.architecture},
        block_passes=prepared.study.user_attrs.get("start_block_passes", 0.0),
    )


def _best(records: Sequence[TrialRecord]) -> TrialRecord | None:
    """Of the complete ones, that of the highest predicted speed-up; of equals the first."""
    complete = [each for each in records if each.state == "complete" and each.speedup is not None]
    return max(complete, key=lambda each: each.speedup or 0.0, default=None)


def _plan(model: Model, prepared: Prepared, best: TrialRecord) -> DraftPlan:
    size = best.candidate.vocabulary_size
    vocabulary = None if size is None else prepared.vocabularies[size]
    return best.candidate.plan(best.num_draft_tokens or 1, vocabulary, target=model.identity)


def _provenance(model: Model, prepared: Prepared, best: TrialRecord, held_out: HeldOut) -> dict[str, Any]:
    """How the plan was found and measured, in JSON values."""
    import layerskip

    calibration = prepared.calibration
    return {
        "made_by": f"layerskip {getattr(layerskip, '__version__', '')} search".replace("  ", " "),
        "study": prepared.study.study_name,
        "trial": best.number,
        "origin": best.origin,
        "trials": len(prepared.study.get_trials(deepcopy=False, states=FINISHED)),
        "conditions": prepared.costs.conditions,
        "calibration": {**calibration.settings, "sha256": calibration.digest},
        "draft_ratio": best.draft_ratio,
        "verify_ratio": prepared.costs.verify_ratio((best.num_draft_tokens or 1) + 1, best.candidate),
        "searched": {
            "acceptance_rate": best.acceptance_rate,
            "acceptance_by_offset": list(best.acceptance_by_offset),
            "predicted_speedup": best.speedup,
        },
        "held_out": asdict(held_out),
    }


def _finished(result: SearchResult, study: str, storage: str, passes: float, seconds: float) -> SearchResult:
    return SearchResult(
        **{
            **_fields(result),
            "study": study,
            "storage": storage,
            "block_passes": passes,
            "seconds": seconds,
        }
    )


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
