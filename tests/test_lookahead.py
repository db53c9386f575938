"""Lookahead decoding: window and n-grams as one tree, what is learnt from a pass, and output that stays the model's."""

import json
import random

import pytest
import torch

import layerskip
from layerskip import CostRatios, DraftPlan, PlanError
from layerskip.draft import trie
from layerskip.drafters.lookahead import NgramPool, Sizes, Window
from layerskip.governor import FixedCosts, Source, WorthIt
from layerskip.models.tree import Tree
from tests.drafting import always
from tests.engines import run_checked
from tests.special_models import agreeing_model
from tests.test_sampled import DRAFTS, FALSE_ALARM, enumerated, p_value, sample
from tests.tiny_models import FAMILY_NAMES, prompt, transformers_greedy

ROWS = [prompt(length, seed=length)[0].tolist() for length in (12, 3, 9)]
SIZES = [(5, 4, 5), (1, 2, 1), (1, 4, 2), (4, 2, 3), (7, 5, 7)]


def own(model, rows, **options):
    return [transformers_greedy(model, torch.tensor([row]), **options)[0, len(row) :].tolist() for row in rows]


class TestTrie:
    def test_what_is_alike_is_there_once(self):
        tokens, parents, ends = trie([[5, 6, 7], [5, 8], [], [5, 6], [9]])
        assert (tokens, parents, ends) == ([5, 6, 7, 8, 9], [0, 1, 2, 1, 0], [3, 4, 0, 2, 5])

    def test_nothing(self):
        assert trie([]) == ([], [], []) and trie([[], []]) == ([], [], [0, 0])

    @pytest.mark.parametrize("seed", range(10))
    def test_every_path_is_in_it(self, seed):
        rng = random.Random(seed)
        paths = [[rng.randint(0, 3) for _ in range(rng.randint(0, 6))] for _ in range(9)]
        tokens, parents, ends = trie(paths)
        for path, end in zip(paths, ends, strict=True):
            found = []
            while end:
                found, end = [tokens[end - 1], *found], parents[end - 1]
            assert found == path
        assert len(set(zip(parents, tokens, strict=True))) == len(tokens), "children of one token differ"
        assert parents[: len(paths[0])] == list(range(len(paths[0]))), "the first path is a chain"


class TestPool:
    def test_the_newest_first_and_no_more_than_wanted(self):
        pool = NgramPool(2)
        for ngram in ([1, 2, 3], [1, 4, 5], [2, 2, 2], [1, 2, 3], [1, 6, 7]):
            pool.add(ngram)
        assert pool.after(1) == [(6, 7), (2, 3)]
        assert pool.after(2) == [(2, 2)] and pool.after(3) == []

    def test_nothing_goes_on_behind_an_end(self):
        pool = NgramPool(5, frozenset({0}))
        for ngram in ([0, 1, 2], [1, 0, 2], [1, 2, 0]):
            pool.add(ngram)
        assert pool.after(1) == [(2, 0)] and pool.after(0) == []


class TestWindow:
    def window(self):
        """Three columns of 4-grams behind a text of five tokens; token and place are the same number."""
        return Window([[4, 5, 6], [5, 6, 7], [6, 7, 8]], 4)

    def test_each_column_goes_on_from_level_0(self):
        assert self.window().paths() == [[5, 6], [5, 6, 7], [5, 6, 7, 8]]
        assert Window([[4, 5, 6], [10, 20, 30], [11, 21, 31]], 4).paths() == [[10, 11], [5, 20, 21], [5, 6, 30, 31]]
        assert self.window().depth == max(map(len, self.window().paths()))

    def test_a_round_closes_an_ngram_in_each_column(self):
        window = self.window()
        assert window.advance([7, 8, 9]) == [(4, 5, 6, 7), (5, 6, 7, 8), (6, 7, 8, 9)]
        assert (window.levels, window.place) == ([[5, 6, 7], [6, 7, 8], [7, 8, 9]], 5)

    @pytest.mark.parametrize("committed", [1, 2, 3])
    def test_it_moves_with_the_text(self, committed):
        """What stands in a column is a guess at the place where it stands, but in those that were left behind."""
        window = self.window()
        window.advance([7, 8, 9])
        window.follow(list(range(5 + committed)))
        assert window.place == window.levels[0][0] == 4 + committed
        for index, level in enumerate(window.levels):
            for column in range(1 if index == 0 else 0, 4 - committed):
                assert level[column] == window.place + index + column

    def test_rounds_in_which_it_rests(self):
        window = self.window()
        window.follow(list(range(105)))
        assert window.place == 104 and sorted(window.levels[1]) == [5, 6, 7]


def test_the_drafts_width_is_what_is_said():
    """Where nothing is alike it is reached: room is made for so many tokens, and no more come."""
    for window, ngram, guesses in SIZES:
        fresh = iter(range(10_000))
        levels = [[next(fresh) for _ in range(window)] for _ in range(ngram - 1)]
        branches = [[next(fresh) for _ in range(ngram - 1)] for _ in range(guesses)]
        tokens, parents, _ = trie([*branches, *Window(levels, 0).paths()])
        assert len(tokens) == Sizes(window, ngram, guesses).width
        assert Tree([parents]).depths.max() == DraftPlan.lookahead(window, ngram, guesses).most_drafts


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_greedy_output_is_the_models_own(family):
    model = agreeing_model(family)
    plan = DraftPlan.lookahead(3, 3, 3)
    result = layerskip.wrap(model).generate(ROWS, **always(plan), max_new_tokens=24, eos_token_id=None)
    assert result.new_token_ids == own(model, ROWS, max_new_tokens=24)
    assert result.stats.proposed_beside and result.stats.execution == "eager"


@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_greedy_output_of_every_size(sizes, text):
    """The cache is checked after every round; rows end at their own time, and some lie at the model's last position."""
    model, ends = agreeing_model("llama"), [7, 19]
    rows = [*ROWS, prompt(150, seed=1)[0].tolist()]
    wrapped = layerskip.wrap(model)
    request = wrapped.check(
        rows, **always(DraftPlan.lookahead(*sizes, text=text)), max_new_tokens=30, eos_token_id=ends
    )
    engine = wrapped.engine(request)
    engine._let_go = lambda: None
    for row, new in zip(rows, run_checked(engine), strict=True):
        assert new == own(model, [row], max_new_tokens=min(30, 160 - len(row)), eos_token_id=ends)[0]


@pytest.mark.parametrize("text", [True, False])
def test_text_that_repeats_takes_few_rounds(text):
    """This model soon says the same again. Without n-grams of the text, what is right comes out of the window alone."""
    model = layerskip.wrap(agreeing_model("llama"))
    stats = model.generate(
        ROWS[0], **always(DraftPlan.lookahead(text=text)), max_new_tokens=100, eos_token_id=None
    ).stats
    assert stats.tokens_per_round > 1.25 and stats.accepted > 20
    assert stats.rounds_by_source["lookahead"] >= stats.rounds - 1, "all but one for which there was no room"
    assert stats.accepted <= stats.proposed <= stats.rounds * DraftPlan.lookahead().most_drafts
    assert stats.proposed + stats.proposed_beside <= stats.rounds * Sizes(5, 4, 5).width
    assert len(stats.acceptance_by_offset) == len(stats.drafted_by_offset)


def test_a_row_takes_the_same_rounds_alone():
    model = layerskip.wrap(agreeing_model("llama"))
    options = {**always(DraftPlan.lookahead()), "max_new_tokens": 40, "eos_token_id": None}
    alone = [model.generate(row, **options).stats for row in ROWS]
    together = model.generate(ROWS, **options).stats
    assert together.rounds == sum(each.rounds for each in alone)
    histograms = [each.accepted_histogram for each in alone]
    assert together.accepted_histogram == [sum(each) for each in zip(*histograms, strict=True)]


def test_a_session_goes_on():
    model = layerskip.wrap(agreeing_model("llama"))
    session, text = model.session(), []
    for turn in range(3):
        new = prompt(5, seed=turn)[0].tolist()
        answer = session.generate(new, **always(DraftPlan.lookahead()), max_new_tokens=15 + turn, eos_token_id=None)
        text += new
        assert answer.new_token_ids == own(model.hf_model, [text], max_new_tokens=15 + turn)
        text += answer.new_token_ids[0]


def test_scores_are_those_of_plain_decoding():
    model = layerskip.wrap(agreeing_model("llama"))
    options = {"max_new_tokens": 30, "eos_token_id": None, "output_scores": True}
    plain, drafted = model.generate(ROWS, **options), model.generate(ROWS, **options, **always(DraftPlan.lookahead()))
    for one, other in zip(plain.scores, drafted.scores, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("text", [True, False])
def test_drawn_texts_are_distributed_as_the_models(text, monkeypatch):
    """Chi-square of the last three of five tokens; false alarm 1e-6 for other seeds.

    N-grams and windows come from draws of earlier rounds. Catches draws that are used again, or seen beforehand.
    """
    monkeypatch.setitem(DRAFTS, f"lookahead, {text}", DraftPlan.lookahead(2, 3, 3, text=text))
    result = sample(f"lookahead, {text}", "nothing", "maximal", max_new_tokens=5)
    assert 0.05 < result.stats.acceptance_rate < 0.95
    assert p_value(result.new_token_ids, enumerated("nothing", 5), (2, 3, 4)) > FALSE_ALARM


def test_under_the_invariant_rule_it_changes_nothing():
    model = layerskip.wrap(agreeing_model("llama"))
    options = {"max_new_tokens": 30, "eos_token_id": None, "do_sample": True, "temperature": 0.8, "seed": 5,
               "acceptance_rule": "invariant"}  # fmt: skip
    drafted = model.generate(ROWS, **options, **always(DraftPlan.lookahead()))
    assert drafted.new_token_ids == model.generate(ROWS, **options).new_token_ids
    assert drafted.stats.accepted


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"repetition_penalty": 1.3}, "eager; no lookahead, which drafts trees: a logits processor looks"),
        ({"pass_width": 9}, "eager; no lookahead, which drafts trees: passes have the width"),
    ],
)
def test_where_nothing_is_drafted(options, reason):
    model = layerskip.wrap(agreeing_model("llama"))
    options = {"max_new_tokens": 16, "eos_token_id": None, **options}
    drafted = model.generate(ROWS, **always(DraftPlan.lookahead()), **options)
    assert drafted.new_token_ids == model.generate(ROWS, **options).new_token_ids
    assert not drafted.stats.proposed and drafted.stats.execution.startswith(reason)


def test_rounds_are_not_recorded():
    """On a GPU they would be, and nothing could be drafted."""
    model = layerskip.wrap(agreeing_model("llama"))
    stats = model.generate(ROWS, **always(DraftPlan.lookahead()), max_new_tokens=16, cuda_graphs=True).stats
    assert stats.execution == "eager: lookahead verifies trees, which have no fixed shape" and stats.proposed


class TestGovernor:
    """A window costs its columns whether or not a token of it stands: all of it, or none."""

    def governor(self, slope, priors=(0.5,)):
        source = Source(6, 0.0, priors, width=29)
        return WorthIt({"lookahead": source}, FixedCosts(CostRatios(verify_slope=slope), {"lookahead": 0.0}), 1)

    @pytest.mark.parametrize(("slope", "limit"), [(0.001, 6), (0.03, 6), (0.04, 0)])
    def test_all_or_nothing(self, slope, limit):
        """It is expected to gain one token."""
        assert self.governor(slope).decide([40], {"lookahead": [0]}).limits == {"lookahead": [limit]}

    def test_a_row_without_room_for_all(self):
        assert self.governor(0.001).decide([3], {"lookahead": [0]}).limits == {"lookahead": [3]}

    def test_trees_are_as_wide_as_the_last_ones_were(self):
        governor = self.governor(0.04)
        governor._beside["lookahead"].append(12)
        assert governor.decide([40], {"lookahead": [0]}).limits == {"lookahead": [6]}

    @pytest.mark.parametrize(("slope", "most"), [(0.2, 0.0), (0.05, 0.15)])
    def test_where_it_does_not_pay_it_rests(self, slope, most):
        model = layerskip.wrap(agreeing_model("llama"))
        ratios = {"governor": "fixed", "cost_ratios": CostRatios(verify_slope=slope)}
        stats = model.generate(
            ROWS[0], plan=DraftPlan.lookahead(text=False), **ratios, max_new_tokens=120, eos_token_id=None
        ).stats
        assert stats.rounds_by_source.get("lookahead", 0) <= most * stats.rounds


class TestPlans:
    def test_a_file_keeps_it(self, tmp_path):
        plan = DraftPlan.lookahead(7, 5, 3, text=False, provenance={"a": 1})
        plan.save(tmp_path / "plan.json")
        assert DraftPlan.load(tmp_path / "plan.json") == plan
        assert DraftPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (
                lambda: DraftPlan.lookahead(0),
                "lookahead_window=0; expected an integer from 1 for lookahead, or none",
            ),
            (lambda: DraftPlan.lookahead(5, 1), "lookahead_ngram=1; expected an integer from 2"),
            (lambda: DraftPlan.lookahead(5, 3, 0), "lookahead_guesses=0; expected an integer from 1"),
            (lambda: DraftPlan.lookahead(-1), "lookahead_window=-1; expected an integer from 0"),
            (lambda: DraftPlan.lookahead(2.5), "lookahead_window=2.5; expected an integer"),
            (lambda: DraftPlan.lookahead(text=1), "lookahead_text=1; expected True or False"),
            (lambda: DraftPlan.exit(2, lookahead_text=True), "lookahead_window=0; expected"),
            (lambda: DraftPlan.lookahead(lookup_tokens=3), "lookup_tokens=3; expected 0 beside lookahead"),
            (lambda: DraftPlan.lookahead(exit_layer=2), "exit_layer=2; expected None beside lookahead"),
            (lambda: DraftPlan.lookahead(num_siblings=2), "num_siblings=2; expected 0 beside lookahead"),
            (lambda: DraftPlan.lookahead(num_draft_tokens=2), "num_draft_tokens=2 for a plan that is made with"),
            (lambda: DraftPlan.exit(2, lookahead_window=2), "lookahead_ngram=0; expected an integer from 2"),
            (lambda: DraftPlan.lookahead(confidence_threshold=0.5), "confidence_threshold=0.5; expected 0.0 beside"),
            (lambda: DraftPlan.lookahead(draft_model="a/b"), "draft_model='a/b'; expected None beside lookahead"),
        ],
    )
    def test_values_that_are_refused(self, make, message):
        with pytest.raises(PlanError, match=message):
            make()
