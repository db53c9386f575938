"""Trials: what one computes, what is noted of it, and how it is read again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import optuna
from optuna.trial import FrozenTrial, TrialState

from layerskip.interrupts import Interrupts
from layerskip.search.acceptance import Acceptance
from layerskip.search.judge import Judge, Verdict
from layerskip.search.result import TrialRecord
from layerskip.search.settings import SearchSettings
from layerskip.search.space import Space
from layerskip.search.study import Prepared
from layerskip.search.trained import TrainedPath

__all__ = ["FINISHED", "block_passes_of", "objective", "record_of", "records_of", "space_of"]

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)


def objective(
    prepared: Prepared, judge: Judge, interrupts: Interrupts
) -> Callable[[optuna.Trial], float | tuple[float, float]]:
    """What a trial computes: Optuna's objective."""

    def run(trial: optuna.Trial) -> float | tuple[float, float]:
        began, passes = time.perf_counter(), judge.replay.block_passes
        candidate = prepared.space.suggest(trial)
        if not candidate.drafts(judge.num_blocks):
            raise optuna.TrialPruned  # plain decoding, whose speed-up is 1 by definition, or nothing at all
        acceptances: list[Acceptance] = []
        verdict = judge.judged.get(candidate)  # tried before by this worker: nothing new would come of it
        try:
            for batch in range(0 if verdict is not None else judge.replay.num_batches):
                with interrupts.let_through():
                    mine = judge.accept(candidate, batch)
                acceptances += mine
                verdict = judge.verdict(candidate, Acceptance.pooled(acceptances))
                if prepared.settings.objective == "speedup":
                    trial.report(_of_part(judge, verdict, mine), batch)
                    if trial.should_prune() and batch + 1 < judge.replay.num_batches:
                        raise optuna.TrialPruned
        finally:
            if verdict is not None:
                _note(trial, verdict, time.perf_counter() - began, judge.replay.block_passes - passes)
        assert verdict is not None
        judge.judged[candidate] = verdict
        if prepared.settings.objective == "speedup":
            return verdict.speedup.ratio
        return verdict.acceptance.rate, verdict.draft_ratio

    return run


def record_of(trial: FrozenTrial, space: Space) -> TrialRecord:
    """A trial in our own words."""
    found = trial.user_attrs.get("verdict", {})
    # Those that others queue again carry the name of the first.
    origin = trial.user_attrs.get("origin") or trial.system_attrs.get("fixed_params", {}) and "queued" or "sampler"
    return TrialRecord(
        number=trial.number,
        state={TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}.get(
            trial.state, "running"
        ),
        origin=origin,
        candidate=space.candidate(trial.params),
        acceptance_by_offset=tuple(found.get("acceptance_by_offset", ())),
        **{name: found.get(name) for name in _NOTED},
    )


def records_of(study: optuna.Study, space: Space) -> list[TrialRecord]:
    """All trials, in their order; those that only wait in the queue are none yet."""
    trials = study.get_trials(deepcopy=False)
    return [record_of(each, space) for each in trials if each.state != TrialState.WAITING]


def space_of(study: optuna.Study) -> Space:
    """What there was to choose in a study, by what it was made for."""
    made_for = study.user_attrs["made_for"]
    settings, model = SearchSettings.from_dict(made_for["settings"]), made_for["model"]
    trained = [TrainedPath(**each) for each in made_for.get("trained", {}).values()]
    return settings.space(model["num_layers"], model["vocab_size"], trained)


def block_passes_of(study: optuna.Study) -> float:
    """Sub-blocks run over all positions of the texts, by the starts and all trials that have ended."""
    verdicts = [each.user_attrs.get("verdict", {}) for each in study.get_trials(deepcopy=False)]
    spent = sum(float(each.get("block_passes", 0.0)) for each in verdicts)
    return spent + float(study.user_attrs.get("start_block_passes", 0.0))


_NOTED = ("acceptance_rate", "standard_error", "draft_ratio", "speedup", "num_draft_tokens", "seconds")


def _note(trial: optuna.Trial, verdict: Verdict, seconds: float, block_passes: float) -> None:
    trial.set_user_attr(
        "verdict",
        {
            "acceptance_by_offset": verdict.acceptance.by_offset,
            "acceptance_rate": verdict.acceptance.rate,
            "standard_error": verdict.acceptance.standard_error,
            "draft_ratio": verdict.draft_ratio,
            "speedup": verdict.speedup.ratio,
            "num_draft_tokens": verdict.speedup.num_draft_tokens,
            "seconds": seconds,
            "block_passes": block_passes,
        },
    )


def _of_part(judge: Judge, verdict: Verdict, acceptances: Sequence[Acceptance]) -> float:
    """The speed-up on one part of the texts, at the number of drafts that is best on all of them so far."""
    length = verdict.speedup.num_draft_tokens
    tokens = Acceptance.pooled(acceptances).tokens_per_round(length)
    return tokens / judge.costs.round_ratio(verdict.candidate, length)
