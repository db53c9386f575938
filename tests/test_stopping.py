"""Where a text ends: asked for every committed token, so that nothing is emitted, cached or counted past a stop."""

import functools

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

from layerskip import DraftPlan, SettingError, wrap
from layerskip.errors import DecodingError
from layerskip.settings import DecodingSettings
from layerskip.stopping import make_stopping
from tests.drafting import always
from tests.engines import ScriptedDrafter, make_engine, run_checked
from tests.special_models import agreeing_model
from tests.tiny_models import prompt, transformers_greedy
from tests.toy_tokenizer import character_tokenizer

PLANS = {"plain": None, "always accepted": DraftPlan.skip(num_draft_tokens=5), "exit": DraftPlan.exit(2)}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


class StopAt(StoppingCriteria):
    """Stops at a length, and keeps what it was asked about."""

    def __init__(self, length: int, answer=lambda stops, rows: torch.full((rows,), stops)) -> None:
        self.length = length
        self.answer = answer
        self.seen: list[list[int]] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen += input_ids.tolist()
        return self.answer(input_ids.shape[1] >= self.length, len(input_ids))


@functools.cache
def own_text() -> list[int]:
    """What the model says by itself, prompt included."""
    return transformers_greedy(agreeing_model("llama"), prompt(), max_new_tokens=20)[0].tolist()


def generate(plan, **options):
    options = {"max_new_tokens": 20, "eos_token_id": None, **options}
    return wrap(agreeing_model("llama"), character_tokenizer()).generate(prompt(), **always(plan), **options)


class TestOwnCriteria:
    @every_plan
    @pytest.mark.parametrize("length", range(10, 18))
    def test_they_are_asked_about_every_committed_token_and_no_other(self, plan, length):
        """Catches a criterion that is asked once a round, or about drafts. It sees what it sees in plain decoding."""
        criterion = StopAt(length)
        result = generate(plan, stopping_criteria=StoppingCriteriaList([criterion]))
        assert criterion.seen == [own_text()[:end] for end in range(10, length + 1)]
        assert result.sequences[0].tolist() == own_text()[:length]
        assert result.finish_reasons == ["criteria"]

    @pytest.mark.parametrize(
        "answer",
        [
            lambda stops, rows: stops,
            lambda stops, rows: torch.tensor(stops),
            lambda stops, rows: torch.full((rows, 1), stops),
        ],
        ids=["bool", "scalar", "column"],
    )
    def test_they_may_answer_as_transformers_allows(self, answer):
        """transformers' list takes a plain bool as well; some of its own criteria return one."""
        result = generate(PLANS["exit"], stopping_criteria=[StopAt(14, answer)])
        assert result.stats.new_tokens == 5

    def test_transformers_own_will_do(self):
        result = generate(PLANS["exit"], stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(13)]))
        assert (result.stats.new_tokens, result.finish_reasons) == (4, ["criteria"])

    def test_each_row_is_asked_on_its_own(self):
        """A row of another length or text must not be stopped by its neighbour."""
        rows = [prompt(9)[0].tolist(), prompt(5)[0].tolist()]
        result = wrap(agreeing_model("llama")).generate(
            rows, stopping_criteria=[StopAt(12)], max_new_tokens=20, eos_token_id=None, **always(PLANS["exit"])
        )
        assert list(map(len, result.new_token_ids)) == [3, 7]


class TestReasons:
    """When several conditions hold at one token, the reason is the one that says most about the text."""

    def test_an_end_of_text_before_the_length(self):
        text = own_text()
        result = generate(PLANS["exit"], eos_token_id=text[11], max_new_tokens=3)
        assert result.finish_reasons == ["eos"]

    def test_a_stop_string_before_the_length(self):
        text = character_tokenizer().decode(own_text()[9:12])
        assert generate(None, stop_strings=text, max_new_tokens=3).finish_reasons == ["stop_string"]

    def test_a_criterion_before_the_length(self):
        assert generate(None, stopping_criteria=[StopAt(12)], max_new_tokens=3).finish_reasons == ["criteria"]

    def test_max_time_counts_from_the_call(self):
        """Not from the first time it was asked, nor from when the model was wrapped."""
        assert generate(None, max_time=1e-6).finish_reasons == ["max_time"]
        assert generate(None, max_time=60.0).finish_reasons == ["length"]


class TestBehindAStop:
    """What would stand behind a stop is nobody's business, although verification has already looked at it."""

    class NothingAfter(LogitsProcessor):
        """Like a grammar: knows no token that may follow `end` in the new text."""

        def __init__(self, end: int) -> None:
            self.end = end

        def __call__(self, input_ids, scores):
            ended = (input_ids[:, 9:] == self.end).any(1, keepdim=True)
            return scores.masked_fill(ended, float("-inf"))

    @every_plan
    @pytest.mark.parametrize("place", range(9, 16))
    def test_a_processor_may_have_no_token_behind_an_eos(self, plan, place):
        """Catches an error about tokens that plain decoding would never have asked for."""
        eos = own_text()[place]
        result = generate(plan, eos_token_id=eos, logits_processor=LogitsProcessorList([self.NothingAfter(eos)]))
        assert result.sequences[0].tolist() == own_text()[: own_text().index(eos, 9) + 1]

    @every_plan
    @pytest.mark.parametrize("place", range(9, 16))
    def test_a_processor_is_never_asked_about_a_place_behind_an_eos(self, plan, place):
        """A grammar that has come to its end may raise an error, and would be right."""
        eos = own_text()[place]

        class Grammar(LogitsProcessor):
            def __call__(self, input_ids, scores):
                assert eos not in input_ids[:, 9:]
                return scores

        result = generate(plan, eos_token_id=eos, logits_processor=LogitsProcessorList([Grammar()]))
        assert result.sequences[0].tolist() == own_text()[: own_text().index(eos, 9) + 1]

    @every_plan
    @pytest.mark.parametrize("place", range(9, 16))
    def test_a_processor_may_have_no_token_behind_a_stop_string(self, plan, place):
        """A drafter knows EOS ids, but not stop strings: it drafts on behind one."""
        token = own_text()[place]
        result = generate(
            plan,
            stop_strings=character_tokenizer().decode([token]),
            logits_processor=LogitsProcessorList([self.NothingAfter(token)]),
        )
        assert result.sequences[0].tolist() == own_text()[: own_text().index(token, 9) + 1]

    @every_plan
    @pytest.mark.parametrize("place", range(9, 14))
    def test_no_token_before_the_stop_is_an_error(self, plan, place):
        """By name of the row, and with what to do; in a draft as in plain decoding."""
        token = own_text()[place]
        with pytest.raises(DecodingError, match=r"no next token in row 0 after \d+ tokens.*banned every token.*loosen"):
            generate(plan, logits_processor=LogitsProcessorList([self.NothingAfter(token)]))

    def test_the_error_says_after_how_many_tokens(self):
        """The same number whether the tokens before it were drafted or not."""
        token = own_text()[12]
        place = own_text().index(token, 9)
        for plan in PLANS.values():
            with pytest.raises(DecodingError, match=f"after {place + 1} tokens"):
                generate(plan, logits_processor=LogitsProcessorList([self.NothingAfter(token)]))

    def test_statistics_and_cache_end_with_the_text(self):
        text, stop = own_text(), 14
        assert text.index(text[stop], 9) == stop
        engine = make_engine(
            agreeing_model("llama"),
            [text[:9]],
            lambda _, context: ScriptedDrafter(context, lambda row, index: text[index]),
            max_drafts=8,
            max_new_tokens=20,
            eos_token_id=(text[stop],),
        )
        assert run_checked(engine) == [text[9 : stop + 1]]
        assert engine.state.cache.lengths == [stop]
        assert engine.stats.new_tokens == stop + 1 - 9
        assert engine.stats.rounds == 1


class TestStopStrings:
    def test_one_string_is_a_list_of_one(self):
        text = character_tokenizer().decode(own_text()[12:14])
        one, listed = generate(None, stop_strings=text), generate(None, stop_strings=[text])
        assert one.new_token_ids == listed.new_token_ids
        assert one.text.endswith(text)

    def test_they_need_a_tokenizer(self, llama):
        """They are matched on text. The message says what there is instead."""
        with pytest.raises(SettingError, match=r"got stop_strings=\['x'\] on a model without tokenizer.*eos_token_id"):
            wrap(llama).generate(prompt(), stop_strings="x")

    def test_one_in_the_prompt_does_not_end_the_text(self):
        tokenizer = character_tokenizer()
        model = wrap(agreeing_model("llama"), tokenizer)
        result = model.generate(prompt(), stop_strings=tokenizer.decode(prompt()[0, 2:4]), max_new_tokens=5)
        own = agreeing_model("llama").generate(
            prompt(), attention_mask=torch.ones_like(prompt()), stop_strings=tokenizer.decode(prompt()[0, 2:4]),
            tokenizer=tokenizer, max_new_tokens=5, do_sample=False,
        )  # fmt: skip
        assert torch.equal(result.sequences, own)


def test_rows_of_different_prompts_have_criteria_of_their_own():
    rows = make_stopping(DecodingSettings(max_new_tokens=3), StoppingCriteriaList(), None, [4, 6], max_positions=8)
    assert [row.reason_to_stop(torch.zeros(1, 7, dtype=torch.long), 0) for row in rows] == ["length", None]
    assert [row.reason_to_stop(torch.zeros(1, 8, dtype=torch.long), 0) for row in rows] == ["length", "max_positions"]


@pytest.mark.parametrize("eos_token_id", [(), (2,), (2, 5)])
def test_no_eos_never_ends_a_row(eos_token_id):
    (row,) = make_stopping(
        DecodingSettings(max_new_tokens=9, eos_token_id=eos_token_id), StoppingCriteriaList(), None, [1], 99
    )
    ended = [token for token in range(7) if row.reason_to_stop(torch.tensor([[1, token]]), token) == "eos"]
    assert ended == list(eos_token_id)
