"""The recorded path on a GPU; everything but the recording is tested on the CPU (`test_static_rounds.py`)."""

import copy

import pytest
import torch

import layerskip
from layerskip import DraftPlan
from layerskip.models.adapter_file import save_adapter
from layerskip.models.decoder import Decoder
from tests.special_models import agreeing_model
from tests.test_adapter import SPECS, adapter_of
from tests.test_static_rounds import GREEDY, PLANS, SAMPLED, off
from tests.tiny_models import FAMILY_NAMES, prompt, tiny_model, transformers_greedy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def on_gpu(model) -> layerskip.Model:
    return layerskip.wrap(copy.deepcopy(model).to("cuda"))


@every_plan
@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_greedy_output_is_the_models_own(name, plan, graphs):
    model = on_gpu(tiny_model(name))
    result = model.generate(prompt().cuda(), **off(plan), **GREEDY, cuda_graphs=graphs)
    assert torch.equal(result.sequences.cpu(), transformers_greedy(tiny_model(name), prompt(), max_new_tokens=30))
    assert result.stats.execution == ("static: CUDA graphs" if graphs else "eager")


@every_plan
@pytest.mark.parametrize("rule", ["maximal", "invariant"])
def test_samples_are_those_of_rounds_made_pass_by_pass(rule, plan):
    model = on_gpu(agreeing_model("llama"))
    call = {**SAMPLED, **off(plan), "acceptance_rule": rule, "num_return_sequences": 3}
    static, eager = (model.generate(prompt().cuda(), **call, cuda_graphs=each) for each in (True, False))
    assert torch.equal(static.sequences, eager.sequences)


def test_a_later_call_replays_with_its_own_seed_and_length():
    model = on_gpu(agreeing_model("llama"))
    plan = PLANS["exit"]
    for length, seed in ((9, 1), (5, 2), (20, 3)):
        call = {**SAMPLED, **off(plan), "seed": seed}
        static, eager = (model.generate(prompt(length).cuda(), **call, cuda_graphs=each) for each in (True, False))
        assert torch.equal(static.sequences, eager.sequences)


@pytest.mark.parametrize("name", SPECS)
def test_trained_blocks(name, tmp_path):
    model = on_gpu(agreeing_model("llama"))
    save_adapter(adapter_of(agreeing_model("llama"), SPECS[name]), tmp_path / "a.safetensors", torch.float64)
    plan = DraftPlan(exit_layer=SPECS[name].exit_layer, adapter=str(tmp_path / "a.safetensors"), num_draft_tokens=3)
    for settings in (GREEDY, SAMPLED):
        call = {**settings, **off(plan)}
        static, eager = (model.generate(prompt().cuda(), **call, cuda_graphs=each) for each in (True, False))
        assert static.stats.execution == "static: CUDA graphs" and static.stats.proposed > 0
        assert torch.equal(static.sequences, eager.sequences)


def test_the_governor_measures_on_the_device():
    model = on_gpu(agreeing_model("llama"))
    stats = model.generate(prompt().cuda(), plan=PLANS["combined"], **GREEDY).stats
    assert stats.costs["plain_step_s"] > 0 and stats.verify_s > 0


def test_linears_are_fused_and_not_packed():
    model = copy.deepcopy(tiny_model("llama")).to("cuda")
    preparation = Decoder(model).prepare()
    assert preparation.packed == 0 and preparation.fused > 0
    assert "packing is for the CPU" in (preparation.packing_obstacle or "")
