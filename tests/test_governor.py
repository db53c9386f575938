"""The governor: what it expects, what it costs, what it decides. Clocks are replaced by numbers."""

import pytest

import layerskip
from layerskip import CostRatios, DraftPlan, SettingError
from layerskip.draft import Draft
from layerskip.drafters import LOOKUP_PRIORS
from layerskip.governor import Always, Decision, FixedCosts, MeasuredCosts, Source, WorthIt
from layerskip.governor.acceptance import HOPE_WEIGHT, MEASURED_WEIGHT, AcceptanceRecord
from tests.special_models import agreeing_model
from tests.tiny_models import prompt, tiny_model

PRIORS = (0.9, 0.9)
ROOM = 100


def draft_of(counts: list[int], confidences=()) -> Draft:
    """A draft as `learn` looks at it."""
    return Draft(None, counts, confidences=confidences)


class TestAcceptanceRecord:
    def test_begins_with_its_priors(self):
        record = AcceptanceRecord((0.9, 0.5, 0.25))
        assert record.reach(0, 4) == pytest.approx([0.9, 0.45, 0.1125, 0.028125])

    def test_a_copy_that_was_right_stands_behind_a_longer_match(self):
        """Catches a grade that is not carried over to the next offset."""
        record = AcceptanceRecord(LOOKUP_PRIORS)
        assert [record.expected(2, offset) for offset in range(3)] == list(LOOKUP_PRIORS[2:5])

    def test_rejections_lower_it_and_acceptances_raise_it_again(self):
        record = AcceptanceRecord(PRIORS)
        for _ in range(3):
            record.record(0, (), proposed=1, accepted=0)
        low = record.expected(0, 0)
        assert low < 0.25
        for _ in range(10):
            record.record(0, (), proposed=1, accepted=1)
        assert record.expected(0, 0) > 0.75

    def test_what_one_cell_shows_is_expected_of_the_others_too(self):
        record = AcceptanceRecord(LOOKUP_PRIORS)
        for _ in range(6):
            record.record(1, (), proposed=1, accepted=0)
        assert record.expected(5, 0) < 0.7 * LOOKUP_PRIORS[5]

    def test_drafts_behind_a_fallen_one_say_nothing(self):
        one, many = AcceptanceRecord(PRIORS), AcceptanceRecord(PRIORS)
        one.record(0, (), proposed=1, accepted=0)
        many.record(0, (), proposed=6, accepted=0)
        assert one.reach(0, 3) == many.reach(0, 3)

    def test_confidence_tells_drafts_apart(self):
        record = AcceptanceRecord(PRIORS)
        for _ in range(20):
            record.record(0, [0.99], proposed=1, accepted=1)
            record.record(0, [0.3], proposed=1, accepted=0)
        assert record.expected_of(0, 0, 0.99) > 0.85
        assert record.expected_of(0, 0, 0.3) < 0.15

    def test_evidence_fades_while_it_rests(self):
        """Reversible: what was given up is tried again, a long time later."""
        record = AcceptanceRecord(PRIORS)
        for _ in range(4):
            record.record(0, (), proposed=1, accepted=0)
        expectations = []
        for _ in range(400):
            record.rest()
            expectations.append(record.expected(0, 0))
        assert expectations == sorted(expectations)
        assert expectations[10] < 0.3 and expectations[-1] > 0.7


class TestMeasuredCosts:
    def costs(self) -> MeasuredCosts:
        return MeasuredCosts({"self": 0.25, "lookup": 0.0})

    def test_before_anything_is_measured_costs_are_those_of_the_parameters(self):
        costs = self.costs()
        assert costs.draft("self") / costs.verify(1) == 0.25
        assert costs.draft("lookup") == 0
        assert 1 < costs.verify(5) / costs.verify(1) < 1.2

    def test_they_become_what_is_measured(self):
        costs = self.costs()
        for _ in range(9):
            costs.note_verify(1, 0.020)
            costs.note_draft("self", 3, 3 * 0.012)
            costs.note_verify(4, 0.030)
        assert costs.verify(1) == pytest.approx(0.020, rel=0.1)
        assert costs.draft("self") == pytest.approx(0.012, rel=0.1)
        assert costs.verify(4) / costs.verify(1) == pytest.approx(1.5, rel=0.2)

    def test_one_hiccup_changes_nothing(self):
        """On a shared machine a pass takes ten times as long now and then."""
        costs = self.costs()
        for index in range(9):
            costs.note_verify(1, 0.200 if index == 4 else 0.020)
        assert costs.verify(1) == 0.020

    def test_a_machine_that_slows_down_does_not_make_drafts_dear(self):
        """Ratios are remembered, and a plain step is judged by every round."""
        costs = self.costs()
        for _ in range(9):
            costs.note_verify(1, 0.020)
            costs.note_draft("self", 1, 0.005)
        for _ in range(9):
            costs.note_verify(1, 0.060)
        assert costs.draft("self") / costs.verify(1) == pytest.approx(0.25)

    def test_one_lucky_measurement_does_not_make_long_drafts_free(self):
        """It would never be corrected if it did not matter, and always if it did."""
        costs = self.costs()
        for _ in range(9):
            costs.note_verify(1, 0.020)
        costs.note_verify(5, 0.001)
        assert costs.verify(1) <= costs.verify(5)

    def test_a_plain_step_is_asked_for_where_there_was_none(self):
        """A loss can be noticed only against it."""
        costs = self.costs()
        for _ in range(3):
            assert not costs.lacks_plain()
            costs.note_verify(4, 0.030)
        assert costs.lacks_plain()
        costs.note_verify(1, 0.020)
        assert not costs.lacks_plain()


def governor(draft_ratio: float, slope: float = 0.02, rows: int = 1, most: int = 6, **sources: Source) -> WorthIt:
    own = sources or {"self": Source(most, draft_ratio)}
    ratios = {name: each.cost_ratio for name, each in own.items()}
    return WorthIt(own, FixedCosts(CostRatios(verify_slope=slope), ratios), rows)


def play(own: WorthIt, accepts, rounds: int, name: str = "self") -> list[int]:
    """Let row 0 go through `rounds` with a source of which `accepts(k)` drafts of k stand; drafts by round."""
    drafted = []
    for _ in range(rounds):
        decision = own.decide([ROOM], {each: [0] for each in own.sources})
        count = decision.limits[name][0]
        drafts = {name: draft_of([count])} if count else {}
        own.learn(decision, drafts, [accepts(count)])
        drafted.append(count)
    return drafted


class TestDecisions:
    def test_begins_carefully(self):
        """Nothing is known yet: a long draft of an exit would be a bet."""
        assert play(governor(0.3), lambda count: count, 1)[0] in (1, 2)

    def test_drafts_that_are_always_accepted_become_long(self):
        assert play(governor(0.3), lambda count: count, 30)[-1] == 6

    def test_drafts_that_never_are_stop_within_a_few_rounds(self):
        """And what they cost, start and later trials included, stays below 2.5 % of 256 plain steps."""
        drafted = play(governor(0.3), lambda count: 0, 256)
        assert sum(drafted[4:20]) <= 1
        assert 0.3 * sum(drafted) + 0.02 * sum(drafted) < 0.025 * 256

    def test_they_are_tried_again(self):
        assert sum(play(governor(0.3), lambda count: 0, 400)[20:]) > 0

    def test_text_that_changes_is_followed_within_one_answer(self):
        own = governor(0.3)
        play(own, lambda count: 0, 40)
        drafted = play(own, lambda count: count, 120)
        assert 6 in drafted

    def test_what_was_measured_outlasts_bad_luck(self):
        """A cheap draft that is right in a third of the cases gains; a mere hope is given up after a few failures."""

        def rounds_with_a_draft(prior_weight: float) -> int:
            own = governor(0, self=Source(3, 0.08, (0.4, 0.4, 0.4), prior_weight))
            stood = iter([0, 0, 0, 1] * 50)
            return sum(count > 0 for count in play(own, lambda count: min(count, next(stood)), 100))

        assert rounds_with_a_draft(HOPE_WEIGHT) < 60 < 90 < rounds_with_a_draft(MEASURED_WEIGHT)

    def test_what_was_measured_elsewhere_and_never_is_right_here_costs_little(self):
        own = governor(0, slope=0.05, self=Source(3, 0.08, (0.5, 0.5, 0.5), MEASURED_WEIGHT))
        assert (0.08 + 0.05) * sum(play(own, lambda count: 0, 128)) < 0.02 * 128

    def test_a_draft_as_dear_as_a_plain_step_is_never_made(self):
        assert sum(play(governor(1.0), lambda count: count, 50)) == 0

    def test_a_steep_verification_shortens_drafts(self):
        assert max(play(governor(0.0, slope=1.0), lambda count: count, 30)) == 0

    def test_the_better_source_is_used(self):
        own = governor(0, self=Source(4, 0.3), lookup=Source(6, 0.0, LOOKUP_PRIORS))
        for stands, expected in (("lookup", "lookup"), ("self", "self"), ("lookup", "lookup")):
            for _ in range(60):
                decision = own.decide([ROOM], {"self": [0], "lookup": [4]})
                name = next((name for name, limits in decision.limits.items() if limits[0]), None)
                if name is None:
                    own.learn(decision, {}, [0])
                    continue
                count = decision.limits[name][0]
                own.learn(decision, {name: draft_of([count])}, [count if name == stands else 0])
            assert decision.limits[expected][0] > 0

    def test_nothing_is_looked_up_where_nothing_matches(self):
        own = governor(0, lookup=Source(6, 0.0, LOOKUP_PRIORS))
        assert own.decide([ROOM], {"lookup": [None]}).limits == {"lookup": [0]}

    def test_each_row_goes_its_own_way(self):
        """One row's drafts are always accepted, the other's never; the third is finished."""
        own = governor(0.1, rows=3)
        for _ in range(20):
            decision = own.decide([ROOM, ROOM, -1], {"self": [0, 0, 0]})
            limits = decision.limits["self"]
            own.learn(decision, {"self": draft_of(limits)} if any(limits) else {}, [limits[0], 0, None])
        assert limits[0] >= 4 and limits[2] == 0
        assert own._records["self"][1].expected(0, 0) < 0.15

    def test_rows_tell_of_each_other(self):
        """What eight rows found in one round, a ninth need not try for itself; and it is not forgotten as fast."""
        own, alone = governor(0.1, rows=9), governor(0.1, rows=1)
        decision = Decision({"self": [1] * 8 + [0]}, {"self": [0] * 9})
        own.learn(decision, {"self": draft_of([1] * 8 + [0])}, [0] * 9)
        alone.learn(Decision({"self": [1]}, {"self": [0]}), {"self": draft_of([1])}, [0])
        never_asked, once = own._records["self"][8].expected(0, 0), alone._records["self"][0]._total
        assert never_asked < 0.5 * PRIORS[0]
        assert own._totals["self"].expected > 4 * once.expected

    def test_rows_that_have_ended_make_nobody_forget(self):
        """Where they stay in the batch; catches what is known of a source fading once for each of them."""
        known = {}
        for ended in (0, 7):
            own = governor(0.1, rows=1 + ended)
            own.learn(Decision({"self": [1] * (1 + ended)}, {"self": [0] * (1 + ended)}),
                      {"self": draft_of([1] * (1 + ended))}, [0] + [None] * ended)  # fmt: skip
            for _ in range(40):
                own.learn(Decision({"self": [0] * (1 + ended)}, {"self": [0] * (1 + ended)}), {}, [0] + [None] * ended)
            known[ended] = own._totals["self"].expected
        assert known[0] == pytest.approx(known[7])

    @pytest.mark.parametrize("room", [0, 1, 3])
    def test_no_draft_is_longer_than_its_room(self, room):
        own = governor(0.05)
        play(own, lambda count: count, 20)
        assert own.decide([room], {"self": [0]}).limits["self"][0] <= room

    def test_an_unsure_token_ends_a_draft_and_a_sure_one_does_not(self):
        own = governor(0.4)
        for _ in range(30):
            decision = own.decide([ROOM], {"self": [0]})
            for sure, stood in ((0.99, 1), (0.1, 0)):
                own.learn(decision, {"self": draft_of([1], [[sure]])}, [stood])
        decision = own.decide([ROOM], {"self": [0]})
        decision.limits["self"][0] = 4
        assert own.goes_on("self", decision)(0, [0.99]) == [True]
        assert own.goes_on("self", decision)(0, [0.1]) == [False]

    def test_a_further_draft_costs_the_columns_of_its_siblings_too(self):
        """Catches a price of one column for a draft that takes five."""
        asked = {}
        for columns in (0.0, 4.0):
            own = governor(0, slope=0.05, self=Source(4, 0.05, (0.6, 0.6, 0.6, 0.6), 100, num_siblings=4))
            own._records["self"][0].rounds, own._records["self"][0]._beside = 9, (0.0, 99.0)
            own._beside["self"].extend([columns] * 9)
            decision = Decision({"self": [4]}, {"self": [0]}, rate=1.6)
            asked[columns] = own.goes_on("self", decision)(0, [0.6])
        assert asked == {0.0: [True], 4.0: [False]}

    def test_without_governor_everything_is_drafted(self):
        own = Always({"self": Source(4, 0.5), "lookup": Source(6, 0.0)})
        decision = own.decide([ROOM, ROOM, 2, -1], {"self": [0] * 4, "lookup": [3, None, 1, 1]})
        assert decision.limits == {"self": [0, 4, 0, 0], "lookup": [6, 0, 2, 0]}


class TestInACall:
    @pytest.mark.parametrize("plan", [DraftPlan.exit(2), DraftPlan.lookup(), DraftPlan.exit(2, lookup_tokens=4)])
    def test_fixed_decisions_repeat(self, plan):
        """They depend on no clock."""
        model = layerskip.wrap(agreeing_model("llama"))
        call = {"plan": plan, "governor": "fixed", "cost_ratios": CostRatios(draft=0.3), "max_new_tokens": 60}
        first, second = (model.generate(prompt(), eos_token_id=None, **call).stats for _ in range(2))
        assert first.drafted_histogram == second.drafted_histogram
        assert first.rounds_by_source == second.rounds_by_source

    def test_a_random_checkpoint_costs_next_to_nothing(self):
        """Its exit hardly ever agrees."""
        model = layerskip.wrap(tiny_model("llama"))
        call = {"plan": DraftPlan.exit(1), "governor": "fixed", "max_new_tokens": 120, "eos_token_id": None}
        stats = model.generate(prompt(), **call).stats
        draft, slope = stats.costs["draft"]["self"], stats.costs["verify_slope"]
        assert stats.round_tokens / (stats.rounds + stats.proposed * (draft + slope)) > 0.97

    def test_statistics_tell_what_it_did(self):
        model = layerskip.wrap(agreeing_model("llama"))
        result = model.generate(prompt(), plan=DraftPlan.exit(2, lookup_tokens=4), max_new_tokens=40, eos_token_id=None)
        stats = result.stats
        assert result.settings["governor"] == "measured"
        assert sum(stats.rounds_by_source.values()) == sum(stats.drafted_histogram) == stats.rounds
        assert sum(stats.proposed_by_source.values()) == stats.proposed
        assert sum(stats.accepted_by_source.values()) == stats.accepted
        assert stats.costs["plain_step_s"] > 0

    @pytest.mark.parametrize("bad", [{"draft": -1}, {"verify_slope": float("nan")}, {"draft": "0.3"}, {"draft": True}])
    def test_cost_ratios_are_checked(self, bad):
        with pytest.raises(SettingError, match="expected a number from 0"):
            CostRatios(**bad)


class TestCostsOfSeveralRows:
    """Where wide passes cost by their tokens, which no prior knows."""

    @staticmethod
    def measured(rows, rounds):
        costs = MeasuredCosts({"self": 0.1}, rows)
        for width, seconds in rounds:
            costs.note_verify(width, seconds)
        return costs

    def test_they_decode_plainly_first(self):
        costs = self.measured(8, [])
        assert costs.lacks_plain()
        assert self.measured(8, [(1, 1.0)] * 3).lacks_plain() and not self.measured(8, [(1, 1.0)] * 4).lacks_plain()
        assert not self.measured(1, []).lacks_plain()

    def test_then_they_measure_what_a_wider_pass_costs(self):
        """Before a drafter has read anything; where that costs too much for any draft, nobody drafts."""
        costs = self.measured(8, [(1, 1.0)] * 4)
        governor = WorthIt({"self": Source(4, 0.1)}, costs, 8)
        for _ in range(2):
            decision = governor.decide([9] * 8, {"self": [0] * 8})
            assert decision.padding == 1 and not any(decision.limits["self"])
            governor.note_times({}, 2, 2.1)
        decision = governor.decide([9] * 8, {"self": [0] * 8})
        assert decision.padding == 0 and not any(decision.limits["self"])
        assert not self.measured(1, [(1, 1.0)] * 9).lacks_wider()

    def test_nothing_is_measured_for_drafts_that_there_cannot_be(self):
        governor = WorthIt({"self": Source(4, 0.1)}, self.measured(8, [(1, 1.0)] * 4), 8)
        assert governor.decide([9] * 8, {"self": [None] * 8}).padding == 0
        assert governor.decide([0] * 8, {"self": [0] * 8}).padding == 0

    def test_a_hope_must_promise_a_tenth(self):
        """Several rows have to be read for it; what has been tried needs to gain, no more."""
        for ratio, drafts in ((0.3, 1), (0.6, 0)):  # 1.8 tokens for 1.4, and for 1.7 plain steps
            costs = MeasuredCosts({"self": ratio}, 8)
            for width, seconds in (*[(1, 1.0)] * 4, (2, 1.1), (2, 1.1)):
                costs.note_verify(width, seconds)
            governor = WorthIt({"self": Source(1, ratio, reads_texts=True)}, costs, 8)
            decision = governor.decide([9] * 8, {"self": [0] * 8})
            assert decision.limits["self"] == [drafts] * 8
            governor.learn(Decision({"self": [1] * 8}, {"self": [0] * 8}), {"self": draft_of([1] * 8)}, [1] * 8)
            assert governor.decide([9] * 8, {"self": [0] * 8}).limits["self"] == [1] * 8

    def test_a_slow_first_step_makes_no_wider_pass_look_cheap(self):
        """As behind a long prompt; a draft is then not worth what it would be beside such steps."""
        costs, plain = self.measured(8, []), iter([2.0, *[1.0] * 9])
        while costs.lacks_plain():
            costs.note_verify(1, next(plain))
        while costs.lacks_wider():
            costs.note_verify(2, 1.5)
        assert costs.verify(2) > 1.3 * costs.verify(1)

    def test_fewer_rows_take_one_look(self):
        costs = self.measured(8, [*[(1, 1.0)] * 4, (2, 2.0), (2, 2.0)])
        costs.note_rows(4)
        for _ in range(2):
            assert costs.lacks_plain()
            costs.note_verify(1, 0.8)
        assert costs.lacks_wider()
        costs.note_verify(2, 1.0)
        assert not costs.lacks_wider()

    def test_it_is_measured_again_now_and_then(self):
        costs = self.measured(8, [*[(1, 1.0)] * 4, (2, 2.1), (2, 2.1), *[(1, 1.0)] * 127])
        assert not costs.lacks_wider()
        costs.note_verify(1, 1.0)
        assert costs.lacks_wider()

    def test_a_scale_that_was_guessed_is_not_believed_for_ever(self):
        """Passes over five tokens take three plain steps: catches a scale that they lift until they look cheap."""
        costs = self.measured(8, [(1, 1.0), (1, 1.0), *[(5, 3.0)] * 40])
        assert costs.verify(1) == pytest.approx(1.0) and costs.verify(5) == pytest.approx(3.0, rel=0.15)
        first_wide = self.measured(1, [*[(5, 3.0)] * 3, (1, 1.0), *[(5, 3.0)] * 40])
        assert first_wide.verify(5) == pytest.approx(3 * first_wide.verify(1), rel=0.15)

    def test_one_width_tells_of_the_others(self):
        costs = self.measured(8, [(1, 1.0), (1, 1.0), (5, 3.0), (5, 3.0)])
        assert costs.verify(9) > 2.5 and costs.verify(3) > 1.4

    def test_it_still_follows_the_machine(self):
        costs = self.measured(1, [(1, 1.0), *[(4, 1.1)] * 20, *[(4, 2.2)] * 20])
        assert costs.verify(1) == pytest.approx(2.0, rel=0.1)
