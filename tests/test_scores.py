"""Scores and logits of each new token are those that transformers' `generate` returns, drafts or not. In float64."""

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

import layerskip
from layerskip import DraftPlan
from layerskip.chosen import Commit
from tests.drafting import always
from tests.special_models import agreeing_model
from tests.test_batch import PROMPTS, own_token, padded
from tests.tiny_models import VOCAB_SIZE, prompt, tiny_model
from tests.toy_tokenizer import character_tokenizer

ASKED = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
PLANS = {
    "plain": None,
    "exit": DraftPlan.exit(2, num_draft_tokens=4),
    "always accepted": DraftPlan.skip(num_draft_tokens=4),
    "skip and lookup": DraftPlan.skip([1, 2], lookup_tokens=3),
    "model": DraftPlan.model(tiny_model("llama")),
}


def assert_as_transformers(ours, theirs, rows):
    """Where a row had ended, transformers returns what its model makes of padding: that is not compared."""
    for name in ("scores", "logits"):
        own, other = getattr(ours, name), getattr(theirs, name)
        assert isinstance(own, tuple) and len(own) == len(other)
        for step, (mine, its) in enumerate(zip(own, other, strict=True)):
            assert mine.shape == its.shape == (rows, VOCAB_SIZE)
            going_on = [row for row in range(rows) if step < len(ours.new_token_ids[row])]
            torch.testing.assert_close(mine.float()[going_on], its[going_on], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2-window", "qwen3"])
def test_greedy_rows_of_different_lengths(family, plan):
    """Catches scores of a draft, or of another position of the pass, inside accepted blocks."""
    model, (ids, mask) = agreeing_model(family), padded(PROMPTS)
    eos = own_token(model, PROMPTS[1], 4)
    options = {"max_new_tokens": 12, "eos_token_id": eos, "pad_token_id": 0, "repetition_penalty": 1.3, **ASKED}
    theirs = model.generate(ids, attention_mask=mask, do_sample=False, **options)
    ours = layerskip.wrap(model).generate(ids, attention_mask=mask, **always(PLANS[plan]), **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert_as_transformers(ours, theirs, 4)
    if plan == "always accepted":
        assert sum(map(sum, ours.drafted)) > 8


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("settings", [{}, {"min_new_tokens": 6, "bad_words_ids": [[5, 6], [7]]}], ids=["bare", "some"])
def test_greedy_scores_with_and_without_processors(plan, settings):
    model = agreeing_model("llama")
    options = {"max_new_tokens": 14, "eos_token_id": 34, "pad_token_id": 0, **settings, **ASKED}
    theirs = model.generate(prompt(), attention_mask=torch.ones(1, 9), do_sample=False, **options)
    ours = layerskip.wrap(model).generate(prompt(), **always(PLANS[plan]), **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert_as_transformers(ours, theirs, 1)


@pytest.mark.parametrize("rule", ["maximal", "invariant"])
@pytest.mark.parametrize("plan", PLANS)
def test_sampled_scores_are_those_of_the_text(plan, rule):
    """The noise is not transformers', so the text is not: its scores are computed for the text that was drawn."""
    model = agreeing_model("llama")
    options = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": True, "temperature": 0.7, "top_k": 9}
    ours = layerskip.wrap(model).generate(
        prompt(batch=2), seed=5, acceptance_rule=rule, **always(PLANS[plan]), **options, **ASKED
    )
    logits = model(ours.sequences).logits[:, 8:-1]
    scores = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(9)])(None, logits.flatten(0, 1))
    torch.testing.assert_close(torch.stack(ours.logits, 1), logits, rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.stack(ours.scores, 1).flatten(0, 1), scores, rtol=0, atol=1e-10)
    if plan == "always accepted":
        assert sum(map(sum, ours.drafted)) > 8


def test_rows_that_ended_are_certain_of_padding():
    """So that sums of log-probabilities, by transformers' own function, need no mask."""
    model = agreeing_model("llama")
    eos = own_token(model, PROMPTS[1], 2)
    result = layerskip.wrap(model).generate(
        PROMPTS, max_new_tokens=10, eos_token_id=eos, pad_token_id=0, output_scores=True, **always(PLANS["exit"])
    )
    chances = model.compute_transition_scores(result.sequences, result.scores, normalize_logits=True)
    assert chances.shape == (4, 10) and not chances.isnan().any()
    for row, tokens in enumerate(result.new_token_ids):
        assert (chances[row, : len(tokens)] < 0).all() and (chances[row, len(tokens) :] == 0).all()
    assert len({len(tokens) for tokens in result.new_token_ids}) > 1


def test_nothing_is_kept_unless_asked_for():
    model = layerskip.wrap(agreeing_model("llama"))
    engine = model.engine(model.check(prompt(), max_new_tokens=6, **always(PLANS["exit"])))
    assert all(commit.said == Commit(0, 0, False, None).said for commit in engine)
    assert (model.generate(prompt()).scores, model.generate(prompt()).logits) == (None, None)
    assert (some := model.generate(prompt(), output_logits=True)).scores is None and some.logits is not None


def test_what_is_kept_is_a_token_and_not_a_pass():
    """Catches views, which would keep every pass's logits for all positions."""
    model = layerskip.wrap(agreeing_model("llama"))
    for commit in model.engine(model.check(prompt(), max_new_tokens=9, **always(PLANS["exit"]), output_logits=True)):
        assert commit.said.logits.untyped_storage().nbytes() == VOCAB_SIZE * 8


def test_low_precision_is_widened():
    model = layerskip.wrap(tiny_model("llama", dtype=torch.bfloat16))
    result = model.generate(prompt(), max_new_tokens=3, **ASKED)
    assert {each.dtype for each in (*result.scores, *result.logits)} == {torch.float32}


def test_streams_and_sessions_have_them_too():
    model = layerskip.wrap(agreeing_model("llama"), character_tokenizer())
    options = {"max_new_tokens": 6, "eos_token_id": None, "output_scores": True, **always(PLANS["exit"])}
    whole, stream = model.generate(prompt(), **options), model.stream(prompt(), **options)
    session = model.session(**options)
    session.read(prompt()[0, :5])
    for other in (stream.result, session.generate(prompt()[0, 5:])):
        torch.testing.assert_close(other.scores, whole.scores, rtol=0, atol=1e-10)


def test_recorded_rounds_do_not_hand_them_out():
    model = layerskip.wrap(agreeing_model("llama"))
    result = model.generate(prompt(), max_new_tokens=3, cuda_graphs=True, output_scores=True)
    assert result.stats.execution == "eager: scores are asked for, which rounds of fixed shapes do not hand out"
    assert len(result.scores) == 3
