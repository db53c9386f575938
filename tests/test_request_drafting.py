"""The switches of a call that say what drafts and who decides how much: lookup, governor, costs."""

import pytest
from transformers import GenerationConfig

from layerskip import CostRatios, DraftPlan, PlanError, SettingError, wrap
from layerskip.request import GOVERNORS, make_request
from tests.tiny_models import VOCAB_SIZE, prompt

EXIT = DraftPlan.exit(2)


def request(checkpoint_config=None, **options):
    return make_request([3], options, None, checkpoint_config or GenerationConfig(), VOCAB_SIZE, 160)


class TestLookup:
    """`prompt_lookup_num_tokens`, transformers' name."""

    @pytest.mark.parametrize(
        ("switches", "plan"),
        [
            ({"prompt_lookup_num_tokens": 5}, DraftPlan.lookup(5)),
            ({"prompt_lookup_num_tokens": None}, None),
            ({"plan": None, "prompt_lookup_num_tokens": 5}, DraftPlan.lookup(5)),
            ({"assistant_early_exit": 2, "prompt_lookup_num_tokens": 5}, DraftPlan.exit(2, lookup_tokens=5)),
            ({"assistant_model": "o/n", "prompt_lookup_num_tokens": 5}, DraftPlan.model("o/n", lookup_tokens=5)),
            ({"plan": EXIT, "prompt_lookup_num_tokens": 5}, DraftPlan.exit(2, lookup_tokens=5)),
            ({"plan": DraftPlan.lookup(7), "prompt_lookup_num_tokens": 5}, DraftPlan.lookup(5)),
            ({"plan": DraftPlan.exit(2, lookup_tokens=7), "prompt_lookup_num_tokens": None},
             DraftPlan.exit(2, lookup_tokens=7)),
            ({"plan": DraftPlan.exit(2, lookup_tokens=7), "prompt_lookup_num_tokens": 0}, EXIT),
            ({"assistant_early_exit": 2, "prompt_lookup_num_tokens": 5, "num_assistant_tokens": 3},
             DraftPlan.exit(2, lookup_tokens=5, num_draft_tokens=3)),
        ],
    )  # fmt: skip
    def test_in_the_call(self, switches, plan):
        assert request(**switches).plan == plan

    def test_in_a_generation_config(self):
        config = GenerationConfig(prompt_lookup_num_tokens=5)
        assert request(generation_config=config).plan == request(config).plan == DraftPlan.lookup(5)

    def test_in_a_config_beside_another_way(self):
        config = GenerationConfig(prompt_lookup_num_tokens=5, assistant_early_exit=2, num_assistant_tokens=3)
        assert request(generation_config=config).plan == DraftPlan.exit(2, lookup_tokens=5, num_draft_tokens=3)

    def test_in_a_config_with_limits_that_are_not_for_it(self):
        """Configs carry such limits for those who draft by a model; a lookup is not among them."""
        config = GenerationConfig(
            prompt_lookup_num_tokens=5, num_assistant_tokens=3, assistant_confidence_threshold=0.4
        )
        assert request(generation_config=config).plan == DraftPlan.lookup(5)

    def test_the_call_goes_before_a_config(self):
        config = GenerationConfig(prompt_lookup_num_tokens=5)
        assert request(generation_config=config, prompt_lookup_num_tokens=2).plan == DraftPlan.lookup(2)
        assert request(generation_config=config, prompt_lookup_num_tokens=None).plan is None
        assert request(generation_config=config, plan=None).plan is None
        assert request(generation_config=config, plan=EXIT).plan == EXIT

    @pytest.mark.parametrize("limit", [{"num_assistant_tokens": 3}, {"assistant_confidence_threshold": 0.5}])
    @pytest.mark.parametrize("lookup", [{"prompt_lookup_num_tokens": 5}, {"plan": DraftPlan.lookup(5)}])
    def test_alone_with_a_limit_for_models(self, lookup, limit):
        """It would have no effect, and looks as if it limited the lookup."""
        with pytest.raises(
            SettingError, match=rf"got {next(iter(limit))} without.*limited by prompt_lookup_num_tokens"
        ):
            request(**lookup, **limit)

    @pytest.mark.parametrize("bad", [0, -1, 1.5, "5", True, [5]])
    def test_a_bad_number(self, bad):
        with pytest.raises(PlanError, match="got a plan with"):
            request(prompt_lookup_num_tokens=bad)

    def test_a_pass_must_be_as_wide_as_its_drafts(self):
        with pytest.raises(SettingError, match="got pass_width=6; expected an integer from 7"):
            request(plan=DraftPlan.exit(2, num_draft_tokens=3, lookup_tokens=6), pass_width=6)
        assert request(plan=DraftPlan.lookup(6), pass_width=7).pass_width == 7


class TestGovernor:
    def test_is_measured_if_nothing_is_said(self):
        assert request(plan=EXIT).governor == request(plan=EXIT, governor=None).governor == "measured"

    @pytest.mark.parametrize("name", GOVERNORS)
    def test_stands_in_the_result(self, llama, name):
        result = wrap(llama).generate(prompt(), plan=EXIT, governor=name, max_new_tokens=2)
        assert result.settings["governor"] == name

    def test_of_plain_decoding_there_is_none(self, llama):
        result = wrap(llama).generate(prompt(), max_new_tokens=2)
        assert (result.settings["governor"], result.settings["cost_ratios"], result.stats.costs) == (None, None, {})

    @pytest.mark.parametrize("name", ["Off", "of", "", True, False, 1, ["off"], {"off": 1}, b"off"])
    def test_another_name(self, name):
        with pytest.raises(SettingError, match="got governor=.*expected one of 'measured', 'fixed', 'off'"):
            request(plan=EXIT, governor=name)

    def test_a_near_miss_is_named(self):
        with pytest.raises(SettingError, match="Did you mean 'measured'"):
            request(plan=EXIT, governor="mesured")

    @pytest.mark.parametrize("name", GOVERNORS)
    def test_without_anything_to_govern(self, name):
        for nothing in ({}, {"plan": None}, {"prompt_lookup_num_tokens": None}):
            with pytest.raises(SettingError, match=f"got governor='{name}' without anything that drafts"):
                request(governor=name, **nothing)


class TestCostRatios:
    RATIOS = CostRatios(draft=0.3, verify_slope=0.05)

    def test_stand_in_the_result(self, llama):
        options = {"plan": EXIT, "governor": "fixed", "max_new_tokens": 2}
        given, default = (wrap(llama).generate(prompt(), **options, **each) for each in
                          ({"cost_ratios": self.RATIOS}, {}))  # fmt: skip
        assert given.settings["cost_ratios"] == {"draft": 0.3, "verify_slope": 0.05}
        assert default.settings["cost_ratios"]["draft"] is None

    @pytest.mark.parametrize("governor", [None, "measured", "off"])
    def test_are_for_the_fixed_governor_only(self, governor):
        with pytest.raises(SettingError, match='only the governor "fixed" uses'):
            request(plan=EXIT, governor=governor, cost_ratios=self.RATIOS)

    @pytest.mark.parametrize("ratios", [0.3, {"draft": 0.3}, (0.3, 0.05), "fixed"])
    def test_of_another_type(self, ratios):
        with pytest.raises(SettingError, match="got cost_ratios=.*expected a layerskip.CostRatios"):
            request(plan=EXIT, governor="fixed", cost_ratios=ratios)

    @pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "0.3", True, [0.3]])
    @pytest.mark.parametrize("name", ["draft", "verify_slope"])
    def test_a_bad_number(self, name, value):
        with pytest.raises(SettingError, match=f"got {name}=.*expected a number from 0"):
            CostRatios(**{name: value})

    def test_the_slope_has_no_default_by_none(self):
        with pytest.raises(SettingError, match="got verify_slope=None"):
            CostRatios(verify_slope=None)
