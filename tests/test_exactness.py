"""Where two outputs part, and whether rounding explains it."""

import pytest
import torch

import layerskip
from layerskip.exactness import first_difference, rounding_step
from tests.tiny_models import prompt, tiny_model


@pytest.fixture(scope="module")
def half():
    return layerskip.wrap(tiny_model("llama", dtype=torch.bfloat16))


def greedy(model, length=12):
    ids = prompt()[0].tolist()
    return ids, model.generate(ids, max_new_tokens=length, eos_token_id=None).new_token_ids[0]


def test_equal_outputs(half):
    ids, output = greedy(half)
    assert first_difference(half.hf_model, ids, output, list(output)) is None


def test_another_token_is_no_near_tie(half):
    ids, output = greedy(half)
    logits = half.hf_model(torch.tensor([[*ids, *output[:5]]])).logits[0, -1].float()
    worst = int(logits.argmin())
    difference = first_difference(half.hf_model, ids, output, [*output[:5], worst, *output[6:]])
    assert (difference.index, difference.token_a, difference.token_b) == (5, output[5], worst)
    assert difference.gap == pytest.approx((logits.max() - logits.min()).item(), abs=0.1)
    assert not difference.is_near_tie
    assert (difference.dtype, difference.reference_dtype) == (torch.bfloat16, torch.float32)


def test_second_choice_is_a_near_tie_if_rounding_moves_logits_by_more_than_the_gap(half):
    """Over many positions: the verdict follows from gap and error, and both kinds occur."""
    verdicts = set()
    for seed in range(40):
        ids = prompt(seed=seed)[0].tolist()
        logits = half.hf_model(torch.tensor([ids])).logits[0, -1].float()
        first, second = logits.topk(2).indices.tolist()
        difference = first_difference(half.hf_model, ids, [first], [second])
        assert difference.is_near_tie == (difference.gap <= max(2 * difference.logit_error, difference.rounding_step))
        verdicts.add(difference.is_near_tie)
    assert verdicts == {True, False}


def test_an_output_that_goes_on(half):
    ids, output = greedy(half)
    difference = first_difference(half.hf_model, ids, output[:3], output)
    assert (difference.index, difference.token_a, difference.token_b) == (3, None, output[3])
    assert not difference.is_near_tie  # lost tokens are no rounding, however small the gap
    assert first_difference(half.hf_model, ids, output, output[:3]).token_b is None


def test_the_model_is_left_as_it_was(half):
    ids, output = greedy(half)
    before = {name: value.clone() for name, value in half.hf_model.state_dict().items()}
    first_difference(half.hf_model, ids, output, [])
    after = half.hf_model.state_dict()
    assert all(torch.equal(after[name], value) and after[name].dtype == value.dtype for name, value in before.items())


def test_float32_is_compared_with_float64():
    model = layerskip.wrap(tiny_model("llama", dtype=torch.float32))
    ids, output = greedy(model)
    difference = first_difference(model.hf_model, ids, output, [(output[0] + 1) % 61])
    assert difference.reference_dtype == torch.float64
    assert 0 < difference.logit_error < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [1.0, 1.5, 17.25, 31.9, -3.0, 0.3])
def test_rounding_step_is_the_distance_to_the_next_number(value, dtype):
    number = torch.tensor(abs(value), dtype=dtype)
    following = torch.nextafter(number, torch.tensor(float("inf"), dtype=dtype))
    assert rounding_step(value, dtype) == (following - number).item()
