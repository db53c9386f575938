"""Prompt lookup: what is proposed, that it changes no output, and that it shares a call with another way to draft."""

import pytest
import torch
from transformers import LogitsProcessor

from layerskip import DraftPlan, wrap
from layerskip.drafters import LookupDrafter
from tests.drafting import always
from tests.engines import drafter_of, make_engine, run_checked
from tests.special_models import agreeing_model
from tests.tiny_models import prompt, tiny_model, transformers_greedy

FAMILIES = ("llama", "mistral-window", "qwen3")
LONG = prompt(40)  # long enough that the model repeats some of it


class Says(LogitsProcessor):
    """Makes the model say `text` behind a prompt of `begin` tokens."""

    def __init__(self, begin: int, text: list[int]) -> None:
        self.begin, self.text = begin, text

    def __call__(self, input_ids, scores):
        token = self.text[min(input_ids.shape[1] - self.begin, len(self.text) - 1)]
        return torch.full_like(scores, float("-inf")).index_fill(1, torch.tensor([token]), 0.0)


def engine_on(prompts, **options):
    return make_engine(agreeing_model("llama"), prompts, lambda _, context: LookupDrafter(context), **options)


def says(before: list[int], text: list[int], plan=None, **options):
    """A call in which the model says `text` behind `before`."""
    options = {"max_new_tokens": len(text), "eos_token_id": None, **options}
    plan = plan or DraftPlan.lookup(4)
    return wrap(tiny_model("llama")).generate(
        before, **always(plan), logits_processor=[Says(len(before), text)], **options
    )


class TestProposals:
    def first_draft(self, before, limits, text, **options):
        """What is drafted behind the prompts and a first token that is the first of `text`."""
        processors = [Says(len(before[0]), text)]
        engine = engine_on(before, processors=processors, max_new_tokens=16, max_drafts=8, **options)
        engine.read_prompts()
        with torch.inference_mode():
            return drafter_of(engine).propose(engine.state, limits), engine

    def test_is_what_followed_the_longest_end_of_the_text(self):
        """7 8 9 stands twice; the place at which 5 comes before it too is the one that counts."""
        draft, _ = self.first_draft([[5, 7, 8, 9, 20, 21, 22, 6, 7, 8, 9, 30, 31, 32, 5, 7, 8]], [3], [9])
        assert draft.tokens.tolist() == [[20, 21, 22]]

    def test_is_what_followed_last_of_equal_ends(self):
        draft, _ = self.first_draft([[7, 8, 20, 21, 6, 7, 8, 30, 31, 5, 7]], [2], [8])
        assert draft.tokens.tolist() == [[30, 31]]

    def test_reads_on_in_itself_where_the_text_is_too_short(self):
        draft, _ = self.first_draft([[5, 6, 5]], [5], [6])
        assert draft.tokens.tolist() == [[5, 6, 5, 6, 5]]

    def test_ends_behind_an_end_of_text(self):
        draft, _ = self.first_draft([[7, 8, 20, 2, 22, 7]], [4], [8], eos_token_id=(2,))
        assert (draft.tokens.tolist(), draft.num_drafted) == ([[20, 2]], [2])

    def test_rows_look_up_in_their_own_text(self):
        """Catches one row that finds what another said; a row that finds nothing is padded."""
        rows = [[7, 8, 20, 21, 22, 7], [30, 31, 32, 33, 34, 35], [8, 40, 41, 42, 43, 44]]
        draft, engine = self.first_draft(rows, [3, 3, 1], [8])
        assert draft.num_drafted == [3, 0, 1]
        assert draft.tokens[0].tolist() == [20, 21, 22] and draft.tokens[2, 0] == 40
        assert [grade is not None for grade in drafter_of(engine).outlook(engine.state)] == [True, False, True]

    def test_a_longer_match_has_another_outlook(self):
        """By which the governor tells a chance likeness of one token from a passage that is being copied."""
        outlooks = []
        for before in ([7, 8, 20, 21, 7], [6, 8, 20, 21, 7], [4, 5, 6, 7, 8, 20, 21, 4, 5, 6, 7]):
            _, engine = self.first_draft([before], [1], [8])
            outlooks.append(drafter_of(engine).outlook(engine.state)[0])
        two, one, five = outlooks
        assert one < two < five

    def test_asked_where_there_is_nothing_it_proposes_nothing(self):
        draft, _ = self.first_draft([[5, 6, 7], [8, 9, 10]], [2, 2], [11])
        assert (draft.num_drafted, draft.tokens.shape) == ([0, 0], (2, 0))

    def test_rejected_drafts_are_no_part_of_the_text(self):
        """Catches a drafter that reads what it wrote itself: at the end it must know what a new one knows."""
        engine = engine_on(LONG.tolist(), max_new_tokens=40)
        run_checked(engine)
        assert 0 < engine.stats.accepted < engine.stats.proposed
        fresh = LookupDrafter(engine.context)
        fresh.begin(engine.state)
        assert fresh.outlook(engine.state) == drafter_of(engine).outlook(engine.state)
        drafts = [each.propose(engine.state, [6]).tokens for each in (fresh, drafter_of(engine))]
        assert torch.equal(*drafts)


class TestOutput:
    @pytest.mark.parametrize("lookup_tokens", [1, 2, 3, 5, 8])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_is_the_models_own(self, family, lookup_tokens):
        """Catches a copied token that is taken for certain, in rounds of every outcome."""
        model = agreeing_model(family)
        options = {"max_new_tokens": 40, "eos_token_id": None}
        result = wrap(model).generate(LONG, **always(DraftPlan.lookup(lookup_tokens)), **options)
        assert torch.equal(result.sequences, transformers_greedy(model, LONG, max_new_tokens=40))
        assert result.stats.accepted > 0 and result.stats.accepted_histogram[0] > 0
        assert result.stats.proposed_by_source["lookup"] == result.stats.proposed

    def test_a_repeated_passage_takes_few_rounds(self):
        passage = prompt(20, seed=4)[0].tolist()
        result = says([*passage, passage[0]], passage[1:], DraftPlan.lookup(6))
        assert result.new_token_ids == [passage[1:]]
        assert result.stats.rounds == 3  # the first token comes out of the prompt, then 7 and 7 and what is left
        assert result.stats.acceptance_rate == 1

    @pytest.mark.parametrize("lookup_tokens", [1, 3, 8])
    def test_an_end_of_text_inside_a_draft(self, lookup_tokens):
        """It stood in the prompt, followed by more. Catches accepted drafts behind it."""
        before = [5, 6, 7, 8, 2, 9, 10, 11, 5, 6]
        result = says(before, [7, 8, 2, 9, 10], DraftPlan.lookup(lookup_tokens), eos_token_id=2)
        assert (result.new_token_ids, result.finish_reasons) == ([[7, 8, 2]], ["eos"])
        assert result.drafted == [[False, True, lookup_tokens > 1]]

    def test_the_drafts_that_fell_leave_nothing_behind(self):
        """The cache is checked after every round, in rows of different lengths."""
        prompts = [LONG[0].tolist(), LONG[0, :25].tolist(), prompt(33, seed=5)[0].tolist()]
        engine = engine_on(prompts, max_new_tokens=24, max_drafts=5)
        rows = run_checked(engine)
        for before, tokens in zip(prompts, rows, strict=True):
            own = transformers_greedy(agreeing_model("llama"), torch.tensor([before]), max_new_tokens=24)
            assert tokens == own[0, len(before) :].tolist()

    def test_one_pass_width_makes_bfloat16_independent_of_it(self):
        model = wrap(tiny_model("qwen3", dtype=torch.bfloat16))
        options = {"max_new_tokens": 30, "eos_token_id": None, "pass_width": 7}
        plain = model.generate(LONG, **options)
        looked_up = model.generate(LONG, **always(DraftPlan.lookup(6)), **options)
        assert looked_up.stats.proposed > 0
        assert looked_up.new_token_ids == plain.new_token_ids

    @pytest.mark.parametrize("controls", [
        {"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 9, "eos_token_id": [10, 27]},
        {"bad_words_ids": [[5, 6], [27]]},
    ])  # fmt: skip
    def test_processors_are_obeyed(self, controls):
        """Copied tokens go through no processor before verification."""
        model, options = agreeing_model("llama"), {"eos_token_id": None, "pad_token_id": 0, **controls}
        result = wrap(model).generate(LONG, **always(DraftPlan.lookup(5)), max_new_tokens=30, **options)
        assert torch.equal(result.sequences, transformers_greedy(model, LONG, max_new_tokens=30, **options))
        assert result.stats.proposed > 0

    @pytest.mark.parametrize("max_new_tokens", range(1, 10))
    def test_the_length_at_every_place_of_a_draft(self, max_new_tokens):
        passage = prompt(12, seed=6)[0].tolist()
        result = says([*passage, passage[0]], passage[1:], max_new_tokens=max_new_tokens)
        assert (result.new_token_ids, result.finish_reasons) == ([passage[1 : 1 + max_new_tokens]], ["length"])


BESIDE = {
    "self": DraftPlan.exit(3, num_draft_tokens=3, lookup_tokens=5),
    "self, longer": DraftPlan.skip([1], num_draft_tokens=6, lookup_tokens=2),
    "model": DraftPlan.model(tiny_model("llama"), num_draft_tokens=3, lookup_tokens=5),
}


class TestBesideAnotherWay:
    """Rows of one round draft from different sources."""

    PROMPTS = [LONG[0].tolist(), prompt(4, seed=4)[0].tolist(), prompt(13, seed=13)[0].tolist()]

    @pytest.mark.parametrize("plan", BESIDE.values(), ids=BESIDE)
    @pytest.mark.parametrize("family", ["llama", "mistral-window"])
    def test_rows_are_what_they_are_alone(self, family, plan):
        """Catches a draft that lands in another row, and a self-draft's states that pass for those of a copied one."""
        model = agreeing_model(family)
        result = wrap(model).generate(self.PROMPTS, **always(plan), max_new_tokens=24, eos_token_id=None)
        for before, tokens in zip(self.PROMPTS, result.new_token_ids, strict=True):
            own = transformers_greedy(model, torch.tensor([before]), max_new_tokens=24)
            assert tokens == own[0, len(before) :].tolist()
        other = "model" if plan.draft_model is not None else "self"
        for source in ("lookup", other):
            assert result.stats.accepted_by_source[source] > 0
            assert result.stats.proposed_by_source[source] > result.stats.accepted_by_source[source]

    @pytest.mark.parametrize("plan", ["self", "model"])
    def test_each_row_takes_turns_by_its_own_text(self, plan):
        """Without a governor what can be looked up is looked up, and the other drafts the rest."""
        rows = [[7, 8, 20, 21, 22, 23, 24, 7], [30, 31, 32, 33, 34, 35, 36, 37]]
        for prompts in (rows, rows[::-1]):
            engine = self.engine(BESIDE[plan], prompts, Says(8, [8, 20, 21, 22, 23, 24, 7, 8, 20]), max_new_tokens=9)
            engine.read_prompts()
            commits = engine.decode_round()
            assert engine.stats.rounds_by_source == {"lookup": 1, plan: 1}
            looked_up = [commit.token_id for commit in commits if commit.row == prompts.index(rows[0])]
            assert looked_up == [20, 21, 22, 23, 24, 7]

    @staticmethod
    def engine(plan, prompts, processor, **options):
        model = wrap(agreeing_model("llama"))
        options = {"eos_token_id": None, "logits_processor": [processor], **options}
        return model.engine(model.check(prompts, **always(plan), **options))

    def test_the_draft_models_cache_is_that_of_the_committed_text(self):
        """It drafts in every row that shares its pass, and is then overruled in those that are looked up.

        Catches entries of its overruled drafts that count as those of the copied tokens: its later drafts would be
        worse, the output not.
        """
        passage = prompt(30, seed=8)[0].tolist()
        prompts = [[*passage, passage[0]], prompt(31, seed=9)[0].tolist()]
        engine = self.engine(BESIDE["model"], prompts, SaysInRow(31, passage[1:]), max_new_tokens=18)
        commits = engine.read_prompts()
        while commits and any(engine.state.active):
            commits = engine.decode_round()
            drafter = engine.drafters["model"]
            for row, held in enumerate(drafter.cache.lengths):
                text = engine.state.token_ids[row : row + 1, :held]
                fresh, span = drafter.decoder.new_cache(1, held), drafter.decoder.span([0], held)
                with torch.inference_mode():
                    drafter.decoder.run(drafter.decoder.embed(text), drafter.decoder.full_path, fresh, span)
                for stored, right in zip(drafter.cache.keys, fresh.keys, strict=True):
                    torch.testing.assert_close(stored[row, :, :held], right[0], rtol=0, atol=1e-10)
        assert engine.stats.accepted_by_source["lookup"] > 4 and engine.stats.rounds_by_source["model"] > 2


class SaysInRow(Says):
    """Makes the model say a text in rows that begin as the text does, and leaves the others alone."""

    def __call__(self, input_ids, scores):
        said = super().__call__(input_ids, scores)
        return torch.where((input_ids[:, 1] == self.text[0]).unsqueeze(1), said, scores)
