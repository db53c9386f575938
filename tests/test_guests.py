"""Somebody else's code that takes part in a call gets ordinary tensors, and nothing ours outlives an inference mode."""

import copy

import pytest
import torch
from transformers import LogitsProcessorList

import layerskip
from layerskip import DraftPlan
from tests.checkpoints import save_tiny
from tests.special_models import agreeing_model
from tests.tiny_models import prompt, tiny_model

GREEDY = {"max_new_tokens": 8, "eos_token_id": None}


def test_a_processor_may_take_a_gradient():
    """As guidance by a classifier does; inside inference mode it cannot."""
    gradients = []

    def guide(input_ids, scores):
        with torch.enable_grad():
            tilted = scores.detach().clone().requires_grad_(True)
            tilted.square().sum().backward()
        gradients.append(tilted.grad)
        return scores

    layerskip.wrap(tiny_model("llama")).generate(prompt(), logits_processor=LogitsProcessorList([guide]), **GREEDY)
    assert len(gradients) == 8


def test_a_processor_may_keep_its_scores():
    kept = []
    keep = LogitsProcessorList([lambda input_ids, scores: kept.append(scores) or scores])
    layerskip.wrap(tiny_model("llama")).generate(prompt(), logits_processor=keep, **GREEDY)
    before = kept[0].clone()
    assert torch.equal(kept[0].add_(1), before + 1)


def test_a_criterion_may_keep_tensors_of_its_own():
    counts = {}

    def count(input_ids, scores):
        counts.setdefault("calls", torch.zeros(1)).add_(1)
        return False

    layerskip.wrap(tiny_model("llama")).generate(prompt(), stopping_criteria=[count], **GREEDY)
    counts["calls"] += 1
    assert counts["calls"] > 8


def test_activations_of_a_hook_can_be_trained_on():
    own = copy.deepcopy(tiny_model("llama"))
    activations = []
    own.model.norm.register_forward_hook(lambda module, inputs, output: activations.append(output))
    layerskip.wrap(own).generate(prompt(), **GREEDY)
    torch.nn.Linear(32, 2, dtype=torch.float64)(activations[0]).sum().backward()


@pytest.mark.parametrize("when", ["processor", "caller"])
def test_weights_that_come_back_in_inference_mode_can_be_trained(when, tmp_path):
    model = layerskip.load(save_tiny(tmp_path), dtype="float32")
    if when == "caller":
        with torch.inference_mode():
            assert model.hf_model is not None
    else:
        look = LogitsProcessorList([lambda input_ids, scores: scores if model.hf_model else scores])
        model.generate(prompt(), logits_processor=look, **GREEDY)
    model.hf_model.requires_grad_(True)
    model.hf_model(prompt()).logits.sum().backward()


@pytest.mark.parametrize("sampled", [False, True])
def test_rounds_made_in_a_callers_inference_mode_serve_later_calls(sampled):
    model = layerskip.wrap(agreeing_model("llama"))
    call = {**GREEDY, "plan": DraftPlan.exit(2), "governor": "off", "do_sample": sampled, "seed": 1}
    with torch.inference_mode():
        inside = model.generate(prompt(), **call, cuda_graphs=True)
    outside = model.generate(prompt(), **call, cuda_graphs=True)
    watched = model.generate(prompt(), **call, cuda_graphs=True, stopping_criteria=[lambda ids, scores: False])
    assert torch.equal(inside.sequences, outside.sequences) and torch.equal(watched.sequences, outside.sequences)


def test_a_replaced_norm_weight_acts():
    own = copy.deepcopy(tiny_model("llama", dtype=torch.bfloat16))
    model = layerskip.wrap(own)
    own.model.norm.load_state_dict({"weight": torch.linspace(-3, 3, 32).bfloat16()}, assign=True)
    expected = layerskip.wrap(own).generate(prompt(), **GREEDY).sequences
    assert torch.equal(model.generate(prompt(), **GREEDY).sequences, expected)


def test_a_partial_head_follows_the_weights():
    """A draft by weights of before would be right, and hardly ever accepted."""
    own = copy.deepcopy(agreeing_model("llama"))
    model = layerskip.wrap(own)
    call = {"plan": DraftPlan.exit(3, draft_vocabulary=range(61)), "governor": "off", "max_new_tokens": 40}
    model.generate(prompt(), eos_token_id=None, **call)
    with torch.no_grad():
        own.lm_head.weight.copy_(own.lm_head.weight.roll(7, 0))
    changed, fresh = (each.generate(prompt(), eos_token_id=None, **call) for each in (model, layerskip.wrap(own)))
    assert changed.stats.accepted == fresh.stats.accepted > 0
