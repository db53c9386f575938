"""Several prompts in one call: each row decodes as it would alone, and the whole is laid out as transformers does."""

import itertools

import pytest
import torch

from layerskip import DraftPlan, InputError, wrap
from tests.drafting import always
from tests.special_models import agreeing_model, llama_with
from tests.tiny_models import FAMILY_NAMES, prompt, tiny_model, transformers_greedy

LENGTHS = (9, 3, 14, 6)
PROMPTS = [prompt(length, seed=length)[0].tolist() for length in LENGTHS]
PLANS = {
    "plain": None,
    "exit": DraftPlan.exit(2),
    "late exit, long drafts": DraftPlan.exit(3, num_draft_tokens=7),
    "skip": DraftPlan.skip([1, 2], [2]),
    "unsure": DraftPlan.skip([1, 2], confidence_threshold=0.5, num_draft_tokens=6),
    "model": DraftPlan.model(tiny_model("llama")),
}
FAMILIES = ("llama", "mistral-window", "qwen2-window", "qwen3", "gemma3", "gpt2")


def padded(prompts, pad: int = 0):
    """Left-padded ids and mask."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
    return ids, mask


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        *itertools.product(FAMILIES, PLANS),
        *((family, "exit") for family in FAMILY_NAMES if family not in FAMILIES),
    ],
)
def test_greedy_rows_equal_each_row_alone(family, plan):
    """Catches positions, masks or cache entries that are taken from the longest row instead of the row's own."""
    model = agreeing_model(family)
    result = wrap(model).generate(PROMPTS, **always(PLANS[plan]), max_new_tokens=16, eos_token_id=None)
    for row, tokens in zip(PROMPTS, result.new_token_ids, strict=True):
        own = transformers_greedy(model, torch.tensor([row]), max_new_tokens=16)
        assert tokens == own[0, len(row) :].tolist()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("rule", ["maximal", "invariant"])
def test_sampled_rows_equal_each_row_alone(rule, plan):
    """Given its seed, a row does not know that it has company: catches noise shared or shifted between rows."""
    model = wrap(agreeing_model("llama"))
    options = {
        **always(plan), "max_new_tokens": 16, "eos_token_id": None, "acceptance_rule": rule, "do_sample": True,
        "temperature": 0.8, "repetition_penalty": 1.3,
    }  # fmt: skip
    together = model.generate(PROMPTS, seed=[4, 40, 400, 4000], **options)
    for row, seed in enumerate((4, 40, 400, 4000)):
        alone = model.generate(PROMPTS[row], seed=seed, **options)
        assert together.new_token_ids[row] == alone.new_token_ids[0]
        if rule == "maximal":
            assert together.drafted[row] == alone.drafted[0]


@pytest.mark.parametrize("plan", ["plain", "exit", "model"])
@pytest.mark.parametrize("eos", [None, 5, 11, 48])
def test_sequences_are_laid_out_as_transformers_does(plan, eos):
    """Prompts padded on the left, rows that ended early on the right, as wide as the longest."""
    model = agreeing_model("llama")
    ids, mask = padded(PROMPTS)
    eos = own_token(model, PROMPTS[1], 4) if eos == 5 else eos
    own = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=eos, pad_token_id=0)
    options = {**always(PLANS[plan]), "max_new_tokens": 12, "eos_token_id": eos}
    for inputs in ({"input_ids": ids, "attention_mask": mask}, {"inputs": PROMPTS}):
        assert torch.equal(wrap(model).generate(**inputs, **options).sequences, own)


def own_token(model, row, index):
    return int(transformers_greedy(model, torch.tensor([row]), max_new_tokens=index + 1)[0, -1])


@pytest.mark.parametrize("plan", ["exit", "model"])
def test_rows_that_end_at_different_times(plan):
    """A finished row's tokens, statistics and reason stay as they are while others go on."""
    model = agreeing_model("llama")
    eos = [own_token(model, PROMPTS[0], 2), own_token(model, PROMPTS[2], 7)]
    result = wrap(model).generate(PROMPTS, **always(PLANS[plan]), max_new_tokens=20, eos_token_id=eos)
    lengths = [len(row) for row in result.new_token_ids]
    assert len(set(lengths)) > 1
    for row, tokens, reason, drafted in zip(
        PROMPTS, result.new_token_ids, result.finish_reasons, result.drafted, strict=True
    ):
        own = transformers_greedy(model, torch.tensor([row]), max_new_tokens=20, eos_token_id=eos)[0, len(row) :]
        assert tokens == own.tolist()
        assert reason == ("eos" if tokens[-1] in eos else "length")
        assert len(drafted) == len(tokens)
    assert result.stats.new_tokens == sum(lengths)
    assert result.stats.round_tokens == sum(lengths) - len(lengths)


@pytest.mark.parametrize("controls", [
    {"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 6}, {"bad_words_ids": [[5, 6], [7]]},
])  # fmt: skip
def test_processors_in_rows_of_different_lengths(controls):
    """Padding is no part of a prefix, and a minimum counts from the end of each row's own prompt."""
    model = agreeing_model("llama")
    eos = own_token(model, PROMPTS[1], 1)
    options = {"max_new_tokens": 12, "eos_token_id": eos, "pad_token_id": 0, **controls}
    result = wrap(model).generate(PROMPTS, **always(DraftPlan.exit(3)), **options)
    for row, tokens in zip(PROMPTS, result.new_token_ids, strict=True):
        assert tokens == transformers_greedy(model, torch.tensor([row]), **options)[0, len(row) :].tolist()


def test_several_sequences_for_each_prompt():
    """Neighbouring rows belong to one prompt, as in transformers."""
    result = wrap(agreeing_model("llama")).generate(
        PROMPTS[:2], num_return_sequences=3, do_sample=True, seed=0, max_new_tokens=8, eos_token_id=None
    )
    begins = [tuple(row[9 - length : 9].tolist()) for row, length in zip(result.sequences, [9] * 3 + [3] * 3,
                                                                         strict=True)]  # fmt: skip
    assert begins == [tuple(PROMPTS[0])] * 3 + [tuple(PROMPTS[1])] * 3
    assert len(set(map(tuple, result.new_token_ids))) == 6


def test_a_row_at_the_models_last_position_does_not_stop_the_others():
    model = agreeing_model("llama")
    rows = [prompt(155, seed=1)[0].tolist(), PROMPTS[1]]
    result = wrap(model).generate(rows, **always(DraftPlan.exit(3)), max_new_tokens=12, eos_token_id=None)
    assert result.finish_reasons == ["max_positions", "length"]
    assert list(map(len, result.new_token_ids)) == [5, 12]
    for row, tokens in zip(rows, result.new_token_ids, strict=True):
        own = transformers_greedy(model, torch.tensor([row]), max_new_tokens=len(tokens))
        assert tokens == own[0, len(row) :].tolist()


def test_a_row_beyond_the_draft_models_positions_does_not_harm_the_others(llama):
    """Rows share the draft model's pass: when one has outgrown it, all decode plainly."""
    rows = [prompt(20, seed=1)[0].tolist(), PROMPTS[1]]
    result = wrap(llama).generate(
        rows, **always(DraftPlan.model(llama_with(max_positions=24))), max_new_tokens=12, eos_token_id=None
    )
    for row, tokens in zip(rows, result.new_token_ids, strict=True):
        own = transformers_greedy(llama, torch.tensor([row]), max_new_tokens=12)
        assert tokens == own[0, len(row) :].tolist()


class TestAttentionMask:
    def test_masked_places_are_no_part_of_the_prompt(self, llama):
        ids, mask = padded(PROMPTS, pad=17)
        masked = wrap(llama).generate(ids, attention_mask=mask, max_new_tokens=6)
        assert masked.new_token_ids == wrap(llama).generate(PROMPTS, max_new_tokens=6).new_token_ids

    def test_a_list_and_a_flat_mask_will_do(self, llama):
        model = wrap(llama)
        expected = model.generate([7, 8], max_new_tokens=6).new_token_ids
        for ids, mask in (([[3, 7, 8]], [[0, 1, 1]]), ([3, 7, 8], [0, 1, 1]), ([3, 7, 8], torch.tensor([0, 1, 1]))):
            assert model.generate(ids, attention_mask=mask, max_new_tokens=6).new_token_ids == expected

    @pytest.mark.parametrize("mask", [[[1, 1]], [[1, 1, 1], [1, 1, 1]], [1, 1, 1, 1]])
    def test_another_shape_is_refused(self, llama, mask):
        with pytest.raises(InputError, match=r"got an attention_mask of row lengths .* for prompts of \[3\]; expected"):
            wrap(llama).generate([[3, 7, 8]], attention_mask=mask)

    def test_a_row_without_a_token_is_refused(self, llama):
        with pytest.raises(InputError, match="got an empty prompt in row 1; expected at least one token"):
            wrap(llama).generate([[3, 7], [4, 5]], attention_mask=[[1, 1], [0, 0]])
