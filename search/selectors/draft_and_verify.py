"""Draft & Verify: Bayesian search over all sub-blocks, by the clock (Zhang et al., ACL 2024).

Each trial decodes with the sub-blocks that it leaves out and is worth the tokens per second that this gave. What
differs: optuna's Parzen estimator proposes instead of a Gaussian process, whose time grows with the cube of the trials;
and it is asked for yes or no, of which the published search's numbers from 0 to 1 are a detour. As
published, nothing is kept from being skipped, every trial reads the clock (so two searches differ as two measurements
do), and a draft ends behind an unsure token; the threshold for that is the published start, which in an answer's few
rounds would hardly have moved.
"""

from __future__ import annotations

from dataclasses import dataclass

import optuna

from layerskip.errors import SearchError
from layerskip.plan import DraftPlan
from layerskip.search.candidate import Candidate
from layerskip.search.selectors.base import Workbench, candidate_without, refuse_fields, sub_blocks

__all__ = ["DraftAndVerify"]


@dataclass(frozen=True)
class DraftAndVerify:
    """The sets that were tried, the fastest first.

    Attributes:
        iterations: trials.
        most_drafts, confidence_threshold: of the plans that are timed.
    """

    iterations: int = 1000
    most_drafts: int = 12
    confidence_threshold: float = 0.6

    def __post_init__(self) -> None:
        """Check the fields."""
        refuse_fields(
            self,
            iterations=self.iterations >= 1,
            most_drafts=self.most_drafts >= 1,
            confidence_threshold=0 <= self.confidence_threshold <= 1,
        )

    def select(self, bench: Workbench) -> list[Candidate]:
        """See `Selector`."""
        if bench.tokens_per_s is None:
            raise SearchError(
                "got a workbench without tokens_per_s for Draft & Verify, which searches by the clock; expected a "
                "function that decodes by a plan. Give Workbench one, or leave this selector out."
            )
        steps, clock = sub_blocks(bench.num_blocks), bench.tokens_per_s
        found: dict[Candidate, float] = {}

        def objective(trial: optuna.Trial) -> float:
            names = {step: f"{'attention' if step.attention else 'mlp'} {step.block}" for step in steps}
            skipped = [step for step, name in names.items() if trial.suggest_categorical(name, (False, True))]
            candidate = candidate_without(bench.num_blocks, skipped)
            if not candidate.path(bench.num_blocks):
                return 0.0
            speed = clock(self.plan_of(candidate))
            if skipped:
                found[candidate] = max(speed, found.get(candidate, 0.0))
            return speed

        sampler = optuna.samplers.TPESampler(seed=bench.rng.randrange(2**31), n_startup_trials=1)
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            optuna.create_study(direction="maximize", sampler=sampler).optimize(objective, n_trials=self.iterations)
        finally:
            optuna.logging.set_verbosity(verbosity)
        if not found:
            raise SearchError(
                f"got no set that can draft in {self.iterations} trials; expected one. Give it more iterations."
            )
        return sorted(found, key=lambda each: -found[each])

    def plan_of(self, candidate: Candidate) -> DraftPlan:
        """The plan by which a candidate is timed."""
        return DraftPlan(
            skip_attention=candidate.skip_attention,
            skip_mlp=candidate.skip_mlp,
            exit_layer=candidate.exit_layer,
            num_draft_tokens=self.most_drafts,
            confidence_threshold=self.confidence_threshold,
        )
