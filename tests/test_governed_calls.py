"""Calls under every governor: it decides about time and never about the text, for whatever plan, in whatever batch."""

import functools

import pytest
import torch

from layerskip import CostRatios, DraftPlan, wrap
from tests.special_models import agreeing_model
from tests.tiny_models import prompt, tiny_model, transformers_greedy

GOVERNORS = {
    "off": {"governor": "off"},
    "fixed, drafts are cheap": {"governor": "fixed", "cost_ratios": CostRatios(draft=0.0, verify_slope=0.0)},
    "fixed": {"governor": "fixed", "cost_ratios": CostRatios(draft=0.2)},
    "measured": {"governor": "measured"},
}
PLANS = {
    "exit": DraftPlan.exit(3),
    "one draft": DraftPlan.exit(3, num_draft_tokens=1),
    "long drafts": DraftPlan.skip([1], num_draft_tokens=9),
    "model": DraftPlan.model(tiny_model("llama")),
    "model, one draft": DraftPlan.model(tiny_model("llama"), num_draft_tokens=1),
    "lookup": DraftPlan.lookup(5),
    "lookup of one": DraftPlan.lookup(1),
    "lookahead": DraftPlan.lookahead(),
    "lookahead of pairs": DraftPlan.lookahead(3, 2, 2),
    "both": DraftPlan.exit(3, lookup_tokens=5),
    "both, one draft": DraftPlan.exit(3, num_draft_tokens=1, lookup_tokens=1),
    "model and lookup": DraftPlan.model(tiny_model("llama"), num_draft_tokens=2, lookup_tokens=6),
    "few ids, unsure": DraftPlan.exit(3, draft_vocabulary=range(0, 61, 2), confidence_threshold=0.3),
}
PROMPTS = [prompt(length, seed=length)[0].tolist() for length in (9, 40, 3)]
every_governor = pytest.mark.parametrize("governor", GOVERNORS.values(), ids=GOVERNORS)
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


@functools.cache
def own_row(row: int, **options) -> list[int]:
    """What the model says by itself to a prompt."""
    text = transformers_greedy(agreeing_model("llama"), torch.tensor([PROMPTS[row]]), **options)
    return text[0, len(PROMPTS[row]) :].tolist()


def own_rows(**options) -> list[list[int]]:
    return [own_row(row, **options) for row in range(len(PROMPTS))]


@every_governor
@every_plan
def test_greedy_rows_are_the_models_own(plan, governor):
    """Catches limits that a plan of few drafts does not allow, and rows that are given another's."""
    result = wrap(agreeing_model("llama")).generate(
        PROMPTS, plan=plan, max_new_tokens=24, eos_token_id=None, **governor
    )
    assert result.new_token_ids == own_rows(max_new_tokens=24)
    assert sum(result.stats.rounds_by_source.values()) == result.stats.rounds
    assert len(result.stats.drafted_histogram) <= plan.most_drafts + 1


@every_governor
@every_plan
def test_rows_that_end_at_different_times(plan, governor):
    """Catches a finished row that is asked to draft, and a draft where the only row left has room for one token."""
    model = wrap(agreeing_model("llama"))
    own = own_rows(max_new_tokens=12)
    for eos in {own[0][2], own[1][4], own[2][3]}:
        result = model.generate(PROMPTS, plan=plan, max_new_tokens=12, eos_token_id=eos, **governor)
        expected = own_rows(max_new_tokens=12, eos_token_id=eos)
        assert result.new_token_ids == expected
        assert result.stats.round_tokens == sum(map(len, expected)) - 3


@every_governor
def test_a_row_at_the_models_last_position(governor):
    """It ends while the others have room, and has none for a draft just before."""
    rows = [prompt(155, seed=1)[0].tolist(), PROMPTS[0]]
    plan = DraftPlan.exit(3, lookup_tokens=3)
    result = wrap(agreeing_model("llama")).generate(rows, plan=plan, max_new_tokens=12, eos_token_id=None, **governor)
    assert list(map(len, result.new_token_ids)) == [5, 12]
    assert result.new_token_ids[1] == own_row(0, max_new_tokens=12)


class TestFixedCosts:
    OPTIONS = {"max_new_tokens": 24, "eos_token_id": None, "governor": "fixed"}

    def generate(self, plan, ratios, **options):
        return wrap(agreeing_model("llama")).generate(
            PROMPTS, plan=plan, cost_ratios=ratios, **{**self.OPTIONS, **options}
        )

    @every_plan
    def test_decide_the_same_again(self, plan):
        """That is what they are for: no clock has a say. Under the rule whose text depends on the drafts, too."""
        ratios, sampled = CostRatios(draft=0.05), {"do_sample": True, "seed": 3}
        first, second = (self.generate(plan, ratios, **sampled) for _ in range(2))
        assert (first.new_token_ids, first.drafted) == (second.new_token_ids, second.drafted)
        assert first.stats.drafted_histogram == second.stats.drafted_histogram

    def test_drafts_that_cost_more_than_they_bring_are_not_made(self):
        stats = self.generate(DraftPlan.exit(3), CostRatios(draft=5.0)).stats
        assert (stats.proposed, stats.tokens_per_round) == (0, 1)

    def test_drafts_that_cost_nothing_are_made(self):
        stats = self.generate(DraftPlan.exit(3), CostRatios(draft=0.0, verify_slope=0.0)).stats
        assert stats.proposed > 2 * stats.rounds

    def test_dearer_drafts_are_shorter(self):
        model = DraftPlan.model(agreeing_model("llama"), num_draft_tokens=8)
        cheap, dear = (self.generate(model, CostRatios(draft=each)).stats for each in (0.01, 0.6))
        assert cheap.proposed / cheap.rounds > dear.proposed / dear.rounds

    def test_begin_with_what_the_plans_search_measured(self):
        hopeless = {"acceptance_by_offset": [0.02], "draft_ratio": 0.5}
        assert self.generate(DraftPlan.exit(3), None).stats.proposed > 0
        assert self.generate(DraftPlan.exit(3, provenance=hopeless), None).stats.proposed == 0

    def test_are_in_the_statistics(self):
        costs = self.generate(DraftPlan.exit(3, lookup_tokens=4), CostRatios(draft=0.3)).stats.costs
        assert (costs["unit"], costs["draft"]) == ("plain steps", {"self": 0.3, "lookup": 0.0})


def test_measured_costs_are_in_the_statistics():
    """What a plain step takes is always among them: without it no loss could be noticed."""
    plan = DraftPlan.exit(3, lookup_tokens=4)
    stats = wrap(agreeing_model("llama")).generate(PROMPTS, plan=plan, max_new_tokens=40, eos_token_id=None).stats
    assert 0 < stats.costs["plain_step_s"] < 10
    assert stats.drafted_histogram[0] > 0


def test_drafts_that_do_not_pay_are_given_up():
    """On a tiny model none pays: what drafting costs there is all overhead. Catches a governor that never lets go."""
    options = {"max_new_tokens": 140, "eos_token_id": None}
    governed = wrap(tiny_model("llama")).generate(prompt(), plan=DraftPlan.exit(3, num_draft_tokens=8), **options).stats
    assert governed.rounds_by_source["none"] > governed.rounds / 2
