"""Random models of real shapes: their sizes, their dtype, and the agreement that is planted in them."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from layerskip import DraftPlan, wrap
from layerskip.errors import SettingError
from layerskip.models.inspection import inspect_model
from layerskip.models.synthetic import GEOMETRIES, geometry_config, synthetic_model
from tests.tiny_models import transformers_greedy

PARAMETERS = {"smollm2-135m": 134_515_008, "llama-1b": 1_235_814_400, "llama-8b": 8_030_261_248}
MOE_PARAMETERS = (944_161_792, 217_498_624)  # of moe-1b, and those that a step reads
PROMPT = torch.arange(3, 20).unsqueeze(0)


def accepted(agreement: float | None, **options) -> float:
    plan = DraftPlan.exit(options.get("from_block", 2))
    model = synthetic_model(options.pop("name", "tiny"), torch.float64, agreement=agreement, **options)
    stats = wrap(model).generate(PROMPT, plan=plan, governor="off", max_new_tokens=60).stats
    assert stats.new_tokens == 60
    return stats.acceptance_rate


@pytest.mark.parametrize("name", PARAMETERS)
def test_geometries_have_the_published_parameter_counts(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**GEOMETRIES[name]), dtype=torch.bfloat16)
    assert inspect_model(model).parameters == PARAMETERS[name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_it_is_an_ordinary_model(dtype):
    model = synthetic_model("tiny", dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model(PROMPT).logits.isfinite().all()
    oracle = transformers_greedy(model, PROMPT, max_new_tokens=20)
    result = wrap(model).generate(PROMPT, max_new_tokens=20)
    assert result.sequences.shape == oracle.shape
    if dtype is torch.float64:
        assert torch.equal(result.sequences, oracle)


def test_a_seed_makes_the_same_weights_again():
    first, again, other = (synthetic_model("tiny", torch.bfloat16, seed=seed) for seed in (1, 1, 2))
    weights = [list(model.parameters()) for model in (first, again, other)]
    assert all(map(torch.equal, weights[0], weights[1]))
    assert not torch.equal(weights[0][0], weights[2][0])


def test_a_tied_head_stays_tied(monkeypatch):
    tied = {**GEOMETRIES["tiny"], "tie_word_embeddings": True}
    monkeypatch.setattr("layerskip.models.synthetic.GEOMETRIES", {"tied": tied})
    model = synthetic_model("tied", torch.bfloat16)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_acceptance_rises_with_the_planted_agreement():
    assert accepted(None) == accepted(0) < accepted(0.8) <= accepted(1) == 1.0


def test_experts_are_planted_too():
    assert accepted(None, name="tiny-moe") < accepted(1, name="tiny-moe") == 1.0
    model = synthetic_model("tiny-moe", torch.bfloat16)
    assert wrap(model).generate(PROMPT, max_new_tokens=4).stats.new_tokens == 4


def test_a_step_reads_few_of_the_experts():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(geometry_config("moe-1b"), dtype=torch.bfloat16)
    shape = inspect_model(model)
    assert (shape.parameters, shape.step_parameters) == MOE_PARAMETERS


def test_agreement_is_planted_where_it_is_asked_for():
    assert accepted(1, from_block=1) == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "llama-1"},
            "expected one of tiny, tiny-deep, tiny-moe, smollm2-135m, llama-1b, llama-8b, moe-1b. Did you mean",
        ),
        ({"agreement": 1.5}, "got agreement=1.5; expected a number from 0"),
        ({"agreement": float("nan")}, "got agreement=nan"),
        ({"agreement": "high"}, "got agreement='high'"),
        ({"redundant": {"attention": [4]}}, "layers below 4"),
        ({"redundant": {"norm": [1]}}, "for 'attention' and 'mlp'"),
        ({"redundant": {"mlp": [1]}, "from_block": 2}, "got both from_block and redundant"),
        ({"from_block": 4}, "got from_block=4 for a geometry of 4 blocks; expected 1 to 3"),
    ],
)
def test_what_cannot_be_made(arguments, message):
    with pytest.raises(SettingError) as error:
        synthetic_model(**{"name": "tiny", "dtype": torch.bfloat16, **arguments})
    assert message in str(error.value)
