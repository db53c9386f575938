"""A small second model: which layers it has, that it is the model's, learns, resumes, drafts losslessly, and loads."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import layerskip
from layerskip import DraftPlan
from layerskip.errors import InputError, SettingError, UnsupportedModelError
from layerskip.training import DraftModelSettings, TrainingTexts, train_draft_model
from layerskip.training.cutting import cut_config, spread_layers, with_layers
from layerskip.training.draft_model import _run
from layerskip.training.folder import CHECKPOINT, STATE
from tests.small_training import WrappedLinear, interrupted, some_texts
from tests.tiny_models import FAMILY_NAMES, NUM_LAYERS, prompt, tiny_model
from tests.toy_tokenizer import character_tokenizer

SMALL = DraftModelSettings(
    num_layers=2, tokens=32 * 4 * 40, batch_tokens=128, micro_rows=2, learning_rate=0.003, held_out_rows=10,
    evaluate_every=20, precision="float32",
)  # fmt: skip
SHORT = dataclasses.replace(SMALL, tokens=16 * 8 * 4, evaluate_every=2, held_out_rows=4)


def wrapped(family="llama", dtype=torch.float64):
    return layerskip.wrap(tiny_model(family, dtype=dtype), character_tokenizer())


@pytest.fixture(scope="module")
def model():
    return wrapped()


def greedy_texts(model):
    """What the model writes behind each of 50 tokens."""
    rows = [[5 + each] for each in range(50)]
    written = model.generate(rows, max_new_tokens=31, eos_token_id=None).new_token_ids
    tokens = np.array([row + own for row, own in zip(rows, written, strict=True)])
    return TrainingTexts(tokens, np.ones(tokens.shape, dtype=bool))


def same_weights(one, two):
    one, two = (load_file(folder / "model.safetensors") for folder in (one, two))
    return one.keys() == two.keys() and all(torch.equal(each, two[name]) for name, each in one.items())


@pytest.mark.parametrize(
    ("num_layers", "kept", "layers"),
    [(30, 4, (0, 10, 19, 29)), (4, 2, (0, 3)), (4, 3, (0, 2, 3)), (5, 1, (4,)), (32, 4, (0, 10, 21, 31))],
)
def test_layers_are_spread_evenly_with_the_first_and_the_last(num_layers, kept, layers):
    assert spread_layers(num_layers, kept) == layers


@pytest.mark.parametrize("num_layers", [2, 3, 30, 61])
def test_any_number_of_layers_is_ascending(num_layers):
    for kept in range(1, num_layers):
        layers = spread_layers(num_layers, kept)
        assert len(layers) == kept and list(layers) == sorted(set(layers))


@pytest.mark.parametrize(("num_layers", "kept"), [(30, 4), (32, 4), (80, 10), (4, 2), (2, 1)])
def test_an_eighth_of_the_layers_unless_told_otherwise(num_layers, kept):
    assert DraftModelSettings().resolved(num_layers).num_layers == kept
    assert DraftModelSettings(num_layers=3).resolved(num_layers).num_layers == 3


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_layers_are_the_models_own(family, tmp_path):
    """All of them but one that leaves a state as it is: the same logits, of every family; and its folder loads."""
    model, tokens = copy.deepcopy(tiny_model(family, dtype=torch.float32)), prompt(12)
    layers = (0, 2, 3)
    small = with_layers(model, layers)
    assert small.config.num_hidden_layers == 3 and not small.training
    small.save_pretrained(tmp_path)
    loaded = layerskip.load(tmp_path)
    path = [step for step in layerskip.wrap(model).decoder.full_path if step.block in layers]
    wrapped_model = layerskip.wrap(model).decoder
    span, cache = wrapped_model.span([0], 12), wrapped_model.new_cache(1, 12)
    expected = wrapped_model.logits(wrapped_model.run(wrapped_model.embed(tokens, span), path, cache, span))
    with torch.no_grad():
        torch.testing.assert_close(small(tokens).logits, expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(loaded.hf_model(tokens).logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "llama-biased-tied", "qwen3", "gemma2", "gpt2", "mixtral"])
def test_it_learns_and_drafts_losslessly(family, tmp_path):
    """Layers and norm only; in transformers, too."""
    model = wrapped(family)
    texts = greedy_texts(model)
    before = {name: each.clone() for name, each in model.hf_model.state_dict().items()}
    plan = train_draft_model(model, texts, tmp_path, SMALL)
    first, last = plan.provenance["curve"]
    assert last["loss"] < first["loss"]
    assert all(torch.equal(each, before[name]) for name, each in model.hf_model.state_dict().items())
    small = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (small.config.num_hidden_layers, small.dtype) == (2, torch.bfloat16)
    assert torch.equal(small.get_input_embeddings().weight, model.hf_model.get_input_embeddings().weight.bfloat16())
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == model.tokenizer.get_vocab()
    loaded = DraftPlan.load(tmp_path / "plan.json")
    assert loaded == plan and json.loads((tmp_path / "plan.json").read_text())["draft_model"] == "./."
    own = model.generate([[7, 8, 9]], max_new_tokens=30, eos_token_id=None).new_token_ids
    for governor in ("off", "fixed"):
        drafted = model.generate([[7, 8, 9]], max_new_tokens=30, eos_token_id=None, plan=loaded, governor=governor)
        assert drafted.new_token_ids == own
    assert "# A draft model" in (tmp_path / "README.md").read_text()
    assert 0 < model.draft_cost(plan) < 1


def test_agreement_rises_and_is_what_drafting_finds(model, tmp_path):
    """Where the text is greedy, agreement at the first offset is the share of single drafts that are accepted."""
    texts = greedy_texts(model)
    before = _run(model, texts, SMALL, tmp_path)[0].evaluate()["agreement"][0]
    plan = train_draft_model(model, texts, tmp_path, SMALL)
    curve = [point["agreement"][0] for point in plan.provenance["curve"]]
    assert curve[-1] > before + 0.05
    single, proposed, accepted = dataclasses.replace(plan, num_draft_tokens=1, num_siblings=0), 0, 0
    for row in texts.split(SMALL.held_out_rows, SMALL.seed)[1].tokens.tolist():
        for end in range(1, len(row) - 1):  # the prompt's pass gives a token; behind it one draft has room
            stats = model.generate([row[:end]], max_new_tokens=3, eos_token_id=None, governor="off", plan=single).stats
            proposed, accepted = proposed + stats.proposed, accepted + sum(stats.accepted_by_offset)
    assert proposed == 10 * 30
    assert accepted / proposed == pytest.approx(curve[-1], abs=0.05)


@pytest.mark.parametrize("at", [1, 3])
def test_interrupted_and_resumed_equals_uninterrupted(model, tmp_path, at):
    with interrupted(at) as progress:
        train_draft_model(model, some_texts(), tmp_path / "two", SHORT, progress=progress)
    assert not (tmp_path / "two" / "config.json").exists()
    assert torch.load(tmp_path / "two" / STATE / CHECKPOINT, weights_only=True)["step"] == at
    with pytest.raises(SettingError, match="--resume"):
        train_draft_model(model, some_texts(), tmp_path / "two", SHORT)
    with pytest.raises(SettingError, match=r"got layers=\[0, 2, 3\] for a run that was begun with \[0, 3\]"):
        train_draft_model(model, some_texts(), tmp_path / "two", dataclasses.replace(SHORT, num_layers=3), resume=True)
    plan = train_draft_model(model, some_texts(), tmp_path / "two", SHORT, resume=True)
    whole = train_draft_model(model, some_texts(), tmp_path / "one", SHORT)
    assert same_weights(tmp_path / "one", tmp_path / "two")
    assert [each["loss"] for each in plan.provenance["curve"]] == [each["loss"] for each in whole.provenance["curve"]]
    train_draft_model(model, some_texts(), tmp_path / "two", SHORT, resume=True)  # what is done stays as it is
    assert same_weights(tmp_path / "one", tmp_path / "two")


def test_a_step_does_not_depend_on_how_many_rows_are_held_at_once(model, tmp_path):
    def gradients(micro_rows):
        run, _ = _run(model, some_texts(), dataclasses.replace(SHORT, micro_rows=micro_rows), tmp_path)
        for loss in run.losses(0):
            loss.backward()
        return [each.grad for each in run.student.modules.parameters() if each.requires_grad]

    for one, four in zip(gradients(1), gradients(4), strict=True):
        torch.testing.assert_close(one, four, rtol=1e-3, atol=1e-5)


def test_in_bfloat16(tmp_path):
    settings = dataclasses.replace(SHORT, precision="bfloat16")
    plan = train_draft_model(wrapped("llama", torch.bfloat16), some_texts(), tmp_path, settings)
    assert np.isfinite(plan.provenance["curve"][-1]["loss"])


def test_a_layer_that_follows_from_its_place_is_refused(tmp_path):
    """Every second layer of this one has experts, by its config; the first and the last do not make such a rule."""
    config = copy.deepcopy(tiny_model("qwen3-moe").config)
    config.decoder_sparse_step, config.mlp_only_layers = 2, []
    hf_model = AutoModelForCausalLM.from_config(config)
    assert cut_config(hf_model, (0, 3)).num_hidden_layers == 2  # dense, sparse: the rule still holds
    with pytest.raises(UnsupportedModelError, match="'Qwen3MoeForCausalLM' in whose config a layer's kind follows"):
        train_draft_model(layerskip.wrap(hf_model), some_texts(), tmp_path, dataclasses.replace(SHORT, num_layers=3))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "fields",
    [{"num_layers": 0}, {"num_layers": 1.5}, {"num_layers": True}, {"tokens": 0}, {"learning_rate": 0},
     {"precision": "float16"}, {"seed": -1}, {"kept_state_bytes": -1}],
)  # fmt: skip
def test_settings_that_are_refused(fields):
    with pytest.raises(SettingError, match="expected"):
        DraftModelSettings(**fields)


def test_what_else_is_refused(model, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(SettingError, match=f"expected from 1 to {NUM_LAYERS - 1}"):
        train_draft_model(model, some_texts(), out, dataclasses.replace(SHORT, num_layers=NUM_LAYERS))
    for arguments in ((model.hf_model, some_texts(), out), (model, None, out), (model, some_texts(), out, {})):
        with pytest.raises((InputError, SettingError), match="expected"):
            train_draft_model(*arguments)
    hf_model = copy.deepcopy(model.hf_model)
    hf_model.model.layers[1].mlp.up_proj = WrappedLinear(hf_model.model.layers[1].mlp.up_proj)
    with pytest.raises(UnsupportedModelError, match="plain"):
        train_draft_model(layerskip.wrap(hf_model), some_texts(), out, SHORT)
    assert not out.exists()
    out.mkdir()
    (out / "config.json").write_text("precious")
    with pytest.raises(SettingError, match="holds a model"):
        train_draft_model(model, some_texts(), out, SHORT)


def test_the_plan_moves_with_its_folder_and_knows_its_target(model, tmp_path):
    train_draft_model(model, some_texts(), tmp_path / "here", SHORT)
    (tmp_path / "here").rename(tmp_path / "there")
    plan = DraftPlan.load(tmp_path / "there" / "plan.json")
    model.check_plan(plan)
    with pytest.raises(layerskip.errors.PlanMismatchError):
        layerskip.wrap(tiny_model("llama", seed=1, dtype=torch.float32)).check_plan(plan)
