"""What a plan says of lookup and of a draft vocabulary: which values and combinations there are, and in a file."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from layerskip import DraftPlan, PlanError, PlanMismatchError, wrap
from layerskip.identity import identify
from tests.naming import told
from tests.tiny_models import VOCAB_SIZE, prompt

PLANS = [
    DraftPlan.lookup(),
    DraftPlan.lookup(3, provenance={"study": "x"}),
    DraftPlan.exit(2, lookup_tokens=5),
    DraftPlan.exit(2, draft_vocabulary=[7, 3, 40]),
    DraftPlan.skip([1], [2], draft_vocabulary=range(50), lookup_tokens=2, confidence_threshold=0.4),
    DraftPlan.model("owner/name", lookup_tokens=4),
]


class TestLookup:
    def test_alone_no_model_drafts(self):
        plan = DraftPlan.lookup(3)
        assert (plan.lookup_tokens, plan.num_draft_tokens, plan.is_self_draft, plan.most_drafts) == (3, 0, False, 3)

    def test_beside_a_path_the_model_drafts_too(self):
        plan = DraftPlan.exit(2, num_draft_tokens=3, lookup_tokens=5)
        assert (plan.is_self_draft, plan.most_drafts) == (True, 5)
        assert DraftPlan.exit(2, num_draft_tokens=7, lookup_tokens=5).most_drafts == 7

    def test_beside_a_draft_model(self):
        plan = DraftPlan.model("owner/name", lookup_tokens=5)
        assert (plan.is_self_draft, plan.draft_model, plan.lookup_tokens) == (False, "owner/name", 5)

    def test_other_plans_look_up_nothing(self):
        assert [make.lookup_tokens for make in (DraftPlan.exit(2), DraftPlan.skip([1]), DraftPlan.model("x"))] == [
            0
        ] * 3

    @pytest.mark.parametrize("make", [
        lambda: DraftPlan(num_draft_tokens=0), lambda: DraftPlan.lookup(0),
        lambda: DraftPlan.exit(2, num_draft_tokens=0), lambda: DraftPlan.model("x", num_draft_tokens=0),
        lambda: dataclasses.replace(DraftPlan.lookup(3), lookup_tokens=0),
    ])  # fmt: skip
    def test_a_plan_that_drafts_nothing(self, make):
        with pytest.raises(PlanError, match="num_draft_tokens=0 and lookup_tokens=0, which drafts nothing.*plan=None"):
            make()

    @pytest.mark.parametrize("options", [
        {"exit_layer": 2}, {"skip_attention": [1]}, {"skip_mlp": [0]}, {"draft_model": "x"}, {"draft_vocabulary": [3]},
    ])  # fmt: skip
    def test_alone_with_another_way_to_draft(self, options):
        """It would say how a path drafts that drafts nothing."""
        with pytest.raises(PlanError, match="num_draft_tokens=0, which only looks tokens up"):
            DraftPlan.lookup(3, **options)

    @pytest.mark.parametrize("field", ["num_draft_tokens", "lookup_tokens"])
    def test_a_field_that_the_constructor_sets(self, field):
        with pytest.raises((PlanError, TypeError), match=field):
            DraftPlan.lookup(3, **{field: 4})

    @pytest.mark.parametrize("value", [-1, 1.5, "3", True, None, [3]])
    def test_a_bad_number(self, value):
        with pytest.raises(PlanError, match=r"got a plan with lookup_tokens=.*expected an integer from 0"):
            DraftPlan.lookup(value)

    def test_has_no_path_to_check(self, llama):
        """An exit at all layers is no plan, but this one has no exit."""
        DraftPlan.lookup().check(identify(llama))
        assert wrap(llama).generate(prompt(), plan=DraftPlan.lookup(), max_new_tokens=2).plan == DraftPlan.lookup()


class TestVocabulary:
    @pytest.mark.parametrize("ids", [
        [7, 3, 3, 40], (40, 7, 3), {3, 7, 40}, np.array([40, 3, 7]), torch.tensor([3, 40, 7]), iter([3, 7, 40]),
        [np.int64(7), np.uint8(3), 40],
    ], ids=told)  # fmt: skip
    def test_is_sorted_and_counted_once(self, ids):
        plan = DraftPlan.exit(2, draft_vocabulary=ids)
        assert plan.draft_vocabulary == (3, 7, 40)
        assert {type(each) for each in plan.draft_vocabulary} == {int}
        hash(plan)

    @pytest.mark.parametrize("value", [
        [], (), torch.tensor([]), [-1], [3, -1], ["3"], "37", [1.5], [True], [None], 7, torch.tensor(7), [[3]],
        torch.tensor([True, False]), torch.tensor([[3, 4]]),
    ], ids=told)  # fmt: skip
    def test_a_bad_one(self, value):
        """A mask of the ids is not a list of them: it would pass for the ids 0 and 1."""
        with pytest.raises(
            PlanError, match=r"got a plan with draft_vocabulary=(.|\n)*expected token ids from 0, at least"
        ):
            DraftPlan.exit(2, draft_vocabulary=value)

    def test_with_a_draft_model(self):
        with pytest.raises(PlanError, match="both a draft model and a draft_vocabulary"):
            DraftPlan.model("owner/name", draft_vocabulary=[3])

    @pytest.mark.parametrize("beyond", [VOCAB_SIZE, 10**9])
    def test_an_id_beyond_the_model(self, llama, beyond):
        plan = DraftPlan.exit(2, draft_vocabulary=[3, beyond])
        for check in (lambda: plan.check(identify(llama)), lambda: wrap(llama).generate(prompt(), plan=plan)):
            with pytest.raises(
                PlanMismatchError, match=rf"token id {beyond} in its draft_vocabulary on a model of 61 ids"
            ):
                check()

    def test_the_last_id_of_the_model(self, llama):
        DraftPlan.exit(2, draft_vocabulary=[VOCAB_SIZE - 1]).check(identify(llama))


class TestFile:
    @pytest.mark.parametrize("plan", PLANS, ids=str)
    def test_what_was_saved_is_loaded(self, plan, tmp_path):
        plan.save(tmp_path / "plan.json")
        assert DraftPlan.load(tmp_path / "plan.json") == plan
        assert DraftPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan

    def test_a_file_from_before_them(self, tmp_path):
        """Plans that were saved without these fields stay plans, and mean what they meant."""
        plan = DraftPlan.skip([1], [2], num_draft_tokens=7)
        content = {
            name: value for name, value in plan.to_dict().items() if name not in ("lookup_tokens", "draft_vocabulary")
        }
        (tmp_path / "plan.json").write_text(json.dumps(content))
        assert DraftPlan.load(tmp_path / "plan.json") == plan

    def test_the_largest_vocabulary_can_be_read_again(self, tmp_path):
        """A quarter of a million ids; a larger file than a plan may have would be refused only when it is read."""
        plan = DraftPlan.exit(2, draft_vocabulary=range(256_000))
        plan.save(tmp_path / "plan.json")
        assert DraftPlan.load(tmp_path / "plan.json") == plan

    @pytest.mark.parametrize("change", [{"draft_vocabulary": [-1]}, {"lookup_tokens": 1.5}, {"num_draft_tokens": 0}])
    def test_a_bad_one_is_refused_with_its_name(self, change, tmp_path):
        (tmp_path / "plan.json").write_text(json.dumps(DraftPlan.exit(2).to_dict() | change))
        with pytest.raises(PlanError, match=rf"plan\.json: got a plan with {next(iter(change))}"):
            DraftPlan.load(tmp_path / "plan.json")
