"""The LayerSkip recipe: its formulas by hand, its forward against transformers, what it writes, and how it resumes."""

import copy
import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTJConfig

import layerskip
from layerskip.errors import InputError, SettingError, UnsupportedModelError
from layerskip.plan import DraftPlan
from layerskip.training import recipe
from layerskip.training.loop import Schedule
from layerskip.training.recipe import RecipeSettings, dropout_rates, layer_outputs, loss_weights, train_layerskip
from layerskip.training.texts import TrainingTexts
from tests.tiny_models import NUM_LAYERS, prompt, tiny_model, transformers_greedy
from tests.toy_tokenizer import character_tokenizer

FAMILIES = ("llama", "llama-biased-tied", "qwen3", "mistral-window")
SMALL = RecipeSettings(
    tokens=40 * 64, batch_tokens=64, micro_rows=2, learning_rate=0.01, rotation_interval=2, held_out_rows=4,
    evaluate_every=20, precision="float32",
)  # fmt: skip
SHORT = replace(SMALL, tokens=7 * 64, evaluate_every=3)


def counting_texts(rows=32, row_tokens=16):
    """Each row counts on from a start of its own: a rule that is easy to learn."""
    tokens = 3 + (np.arange(rows)[:, None] * 7 + np.arange(row_tokens)) % 40
    return TrainingTexts(tokens, np.ones(tokens.shape, dtype=bool))


def train(folder, family="llama", settings=SHORT, dtype=torch.float32, **options):
    model = tiny_model(family, dtype=dtype)
    return train_layerskip(model, character_tokenizer(), counting_texts(), folder, settings, **options)


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("num_layers", "rates"),
    [(2, [0, 1]), (3, [0, 2**0.5 - 1, 1]), (5, [0, 2**0.25 - 1, 2**0.5 - 1, 2**0.75 - 1, 1])],
)
def test_dropout_grows_to_the_last_layer(num_layers, rates):
    """D(l) = exp(l ln 2 / (L - 1)) - 1."""
    settings = RecipeSettings(max_dropout=0.2)
    assert dropout_rates(settings, num_layers, 3, 10) == pytest.approx([0.2 * rate for rate in rates])
    assert rates[1] == pytest.approx(math.exp(math.log(2) / (num_layers - 1)) - 1)


def test_exponential_dropout_begins_at_none_and_ends_as_the_constant_one():
    settings = RecipeSettings(dropout_schedule="exponential", max_dropout=0.4)
    assert dropout_rates(settings, 3, 0, 5) == [0, 0, 0]
    assert dropout_rates(settings, 3, 2, 5)[2] == pytest.approx(0.4 * (2**0.5 - 1))
    assert dropout_rates(settings, 3, 4, 5) == pytest.approx(dropout_rates(RecipeSettings(max_dropout=0.4), 3, 4, 5))
    assert dropout_rates(settings, 3, 0, 1) == [0, 0, 0]  # one step: T - 1 is 0


@pytest.mark.parametrize(
    ("loss_scale", "scales"),
    # e(l) of 5 layers: loss_scale * (0, 1, 3, 6), and 4 + loss_scale * 6 for the last.
    [(1.0, [0, 1, 3, 6, 10]), (0.5, [0, 0.5, 1.5, 3, 7]), (0.0, [0, 0, 0, 0, 4])],
)
def test_loss_weights_grow_with_depth(loss_scale, scales):
    settings = RecipeSettings(loss_scale=loss_scale, rotation_interval=1)  # all layers, always
    assert loss_weights(settings, 5, 0, 10) == pytest.approx([each / sum(scales) for each in scales])


@pytest.mark.parametrize(
    ("step", "weights"),
    [(0, [0, 0, 3, 0, 10]), (1, [0, 1, 0, 6, 10]), (2, [0, 0, 3, 0, 10])],  # layers 0, 2 / 1, 3 / 0, 2; and the last
)
def test_the_rotating_curriculum(step, weights):
    assert loss_weights(RecipeSettings(rotation_interval=2), 5, step, 10) == pytest.approx(
        [each / sum(weights) for each in weights]
    )


def test_each_layer_has_its_turn_in_a_rotation():
    turns = [loss_weights(RecipeSettings(rotation_interval=3), 6, step, 90) for step in range(3)]
    assert [sum(turn[layer] > 0 for turn in turns) for layer in range(6)] == [0, 1, 1, 1, 1, 3]  # e(0) = 0


def test_the_gradual_curriculum_reaches_the_first_layer_half_way():
    settings = RecipeSettings(curriculum="gradual")
    active = [sum(each > 0 for each in loss_weights(settings, 4, step, 16)) for step in range(16)]
    # One layer more every 16 / (2 * 4) = 2 steps, from the last; layer 0 weighs nothing.
    assert active == [1, 1, 2, 2, *[3] * 12]
    assert loss_weights(settings, 4, 2, 16) == pytest.approx([0, 0, 3 / 9, 6 / 9])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_forward_is_the_models_own(family):
    model, tokens = copy.deepcopy(tiny_model(family)), prompt(12, batch=3)  # transformers leaves hooks of its own on it
    with torch.no_grad():
        own = model(tokens, output_hidden_states=True)
        hooks = [len(layer._forward_hooks) for layer in model.model.layers]
        for kept in (None, torch.ones(3, NUM_LAYERS, dtype=torch.bool)):
            outputs = layer_outputs(model, tokens, kept)
            assert torch.equal(model.lm_head(model.model.norm(outputs[-1])), own.logits)
            for output, state in zip(outputs[:-1], own.hidden_states[1:-1], strict=True):
                assert torch.equal(output, state)
    assert [len(layer._forward_hooks) for layer in model.model.layers] == hooks


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dropped_sample_passes_its_layer_unchanged(family):
    model, tokens = tiny_model(family), prompt(12, batch=3)
    kept = torch.ones(3, NUM_LAYERS, dtype=torch.bool)
    kept[1, 2] = kept[2, 0] = False
    whole, some = layer_outputs(model, tokens), layer_outputs(model, tokens, kept)
    assert torch.equal(some[2][1], some[1][1])
    assert torch.equal(some[0][2], model.model.embed_tokens(tokens[2]))
    for layer in range(NUM_LAYERS):
        torch.testing.assert_close(some[layer][0], whole[layer][0])
    torch.testing.assert_close(some[1][1], whole[1][1])
    assert not torch.allclose(some[3][1], whole[3][1])


def test_a_layer_that_was_dropped_everywhere_gets_no_gradient():
    model = copy.deepcopy(tiny_model("llama")).requires_grad_(True)
    kept = torch.ones(2, NUM_LAYERS, dtype=torch.bool)
    kept[:, 1] = False
    layer_outputs(model, prompt(8, batch=2), kept)[-1].sum().backward()
    gradients = [layer.mlp.down_proj.weight.grad.abs().sum().item() for layer in model.model.layers]
    assert gradients[1] == 0 and min(gradients[0], gradients[2], gradients[3]) > 0


@torch.no_grad()
def by_hand(model, tokens, layers):
    """Cross-entropy with the next tokens behind each number of layers, and the likeliest tokens, by transformers."""
    states = model(tokens, output_hidden_states=True).hidden_states
    logits = [model.lm_head(model.model.norm(states[each])) for each in layers if each < NUM_LAYERS]
    logits += [model(tokens).logits] * (NUM_LAYERS in layers)
    losses = [torch.nn.functional.cross_entropy(each[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) for each in logits]
    return losses, [each[:, :-1].argmax(-1) for each in logits]


@pytest.mark.parametrize("family", ["llama", "llama-biased-tied"])
def test_the_loss_of_a_step_is_that_of_the_formula(family):
    """Without dropout. Step 5 with R = 2: layers 1 and 3, with e(1) = 1 and e(3) = 3 + 3."""
    texts, model = counting_texts(), copy.deepcopy(tiny_model(family))
    run = recipe._Run(model, texts, replace(SMALL, max_dropout=0.0, micro_rows=3))
    rows = recipe.rows_of_step(5, len(run._train[0]), run._rows_a_step, SMALL.seed)
    assert len(set(rows.tolist())) == 4
    tokens = torch.from_numpy(texts.split(4, 0)[0].tokens[rows]).long()
    losses, _ = by_hand(model, tokens, (2, 4))
    run.model.requires_grad_(True)
    torch.testing.assert_close(sum(run.losses(5)).detach(), losses[0] / 7 + losses[1] * 6 / 7, check_dtype=False)


def test_training_drops_layers_at_their_rates():
    """At a rate of 1 the last layer is always dropped, and learns nothing; the first never is."""
    run = recipe._Run(tiny_model("llama"), counting_texts(), replace(SMALL, max_dropout=1.0))
    run.model.requires_grad_(True)
    for step in range(2):
        sum(run.losses(step)).backward()
    gradients = [layer.mlp.down_proj.weight.grad.abs().sum().item() for layer in run.layers]
    assert gradients[-1] == 0 and gradients[0] > 0


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_figures_are_those_of_transformers(family):
    texts, model = counting_texts(), copy.deepcopy(tiny_model(family))
    point = recipe._Run(model, texts, SMALL).evaluate()
    losses, said = by_hand(model, torch.from_numpy(texts.split(4, 0)[1].tokens).long(), (1, 2, 3, 4))
    assert list(point["perplexity"].values()) == pytest.approx([each.exp().item() for each in losses], rel=1e-4)
    assert point["agreement"] == {
        str(layers): pytest.approx((each == said[3]).double().mean().item()) for layers, each in enumerate(said, 1)
    }


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere", "falcon", "opt", "mixtral"])
def test_other_families_are_scored_as_they_score_themselves(family):
    """Scales and caps of logits, layers that return more than their states, other names of modules."""
    texts, model = counting_texts(), copy.deepcopy(tiny_model(family))
    point = recipe._Run(model, texts, SMALL).evaluate()
    tokens = torch.from_numpy(texts.split(4, 0)[1].tokens).long()
    own = torch.nn.functional.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert point["perplexity"]["4"] == pytest.approx(own.exp().item(), rel=1e-4)


def test_low_rank_additions_to_no_linears_are_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="got lora_rank=2 for layers without ordinary linears"):
        train(tmp_path / "out", "gpt2", replace(SHORT, lora_rank=2))


@pytest.mark.parametrize("family", ["llama", "llama-biased-tied", "qwen3"])
def test_training_improves_the_exits_and_leaves_the_callers_model_alone(family, tmp_path):
    model, points = tiny_model(family, dtype=torch.float32), []
    before = copy.deepcopy(model.state_dict())
    out = train(tmp_path / "out", family, SMALL, progress=lambda step, steps, point: points.append((step, steps)))
    plan = DraftPlan.load(out / "plan.json")
    was, now = plan.provenance["before"], plan.provenance["after"]
    for layers in ("2", "3", "4"):
        assert now["perplexity"][layers] < 0.2 * was["perplexity"][layers]
    assert now["agreement"]["3"] > was["agreement"]["3"] and now["agreement"]["4"] == 1
    assert points[0] == (0, 40) and points[-1] == (40, 40)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(each.requires_grad or each.grad is not None for each in model.parameters())


@pytest.mark.parametrize("family", ["llama", "llama-biased-tied"])
def test_it_writes_an_ordinary_checkpoint(family, tmp_path):
    out = train(tmp_path / "out", family, dtype=torch.float64)
    theirs, ours = AutoModelForCausalLM.from_pretrained(out, dtype="auto"), layerskip.load(out)
    assert theirs.dtype == torch.float64 and ours.tokenizer is not None
    assert AutoTokenizer.from_pretrained(out).get_vocab() == character_tokenizer().get_vocab()
    plan = DraftPlan.load(out / "plan.json")
    assert plan.target == ours.identity and plan.num_draft_tokens == 6 and plan.exit_layer in (1, 2, 3)
    tokens = torch.from_numpy(counting_texts().tokens[:1, :6]).long()
    expected = transformers_greedy(theirs, tokens, max_new_tokens=20)
    for each in (None, plan):
        result = ours.generate(tokens, max_new_tokens=20, do_sample=False, eos_token_id=None, plan=each)
        assert torch.equal(result.sequences, expected)


def test_the_card_says_what_was_done(tmp_path):
    out = train(tmp_path / "out")
    card, made = (out / "README.md").read_text(), DraftPlan.load(out / "plan.json").provenance
    for said in (counting_texts().digest(), "512 tokens", "7 steps", made["trained_from"]["weights"]):
        assert said in card
    assert f"| 4 | {made['before']['perplexity']['4']:.4g} | {made['after']['perplexity']['4']:.4g} | 100.0%" in card
    assert json.loads(card.split("```json")[1].split("```")[0])["rotation_interval"] == 2
    assert "| 1 |" in card and "| 2 |" in card and "| 3 |" in card


@pytest.mark.parametrize(
    "settings",
    [SHORT, replace(SHORT, dropout_schedule="exponential", curriculum="gradual", max_dropout=0.5, lora_rank=2)],
    ids=["full", "lora"],
)
def test_killed_and_resumed_is_as_never_killed(settings, tmp_path, monkeypatch):
    """Killed behind step 5, two steps behind its checkpoint."""
    monkeypatch.setattr(recipe, "Schedule", partial(Schedule, checkpoint_every=3))

    def kill(step, steps, point):
        if step == 5:
            raise KeyboardInterrupt

    whole = train(tmp_path / "whole", settings=settings)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "out", settings=settings, progress=kill)
    torch.rand(3)  # what others draw meanwhile changes nothing
    resumed = train(tmp_path / "out", settings=settings, resume=True)
    expected = weights(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed).items())
    curve, other = (DraftPlan.load(each / "plan.json").provenance["curve"] for each in (whole, resumed))
    assert len(curve) == 3
    assert [point | {"seconds": 0} for point in curve] == [point | {"seconds": 0} for point in other]


def test_micro_rows_change_rounding_only(tmp_path):
    """The same layers are dropped for the same rows, however many are computed at once."""
    settings = replace(SHORT, max_dropout=0.5, tokens=3 * 64)
    one, other = (weights(train(tmp_path / str(rows), settings=replace(settings, micro_rows=rows))) for rows in (1, 4))
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "llama-biased-tied"])
def test_lora_changes_the_linears_of_the_layers_and_is_merged(family, tmp_path):
    before = tiny_model(family, dtype=torch.float32).state_dict()
    after = weights(train(tmp_path / "out", family, replace(SMALL, lora_rank=2)))
    assert after.keys() <= before.keys()
    for name, value in after.items():
        if name.endswith("_proj.weight"):
            assert torch.linalg.matrix_rank(value - before[name], rtol=1e-3) == 2
        else:
            assert torch.equal(value, before[name])
    provenance = DraftPlan.load(tmp_path / "out" / "plan.json").provenance
    assert provenance["after"]["perplexity"]["3"] < provenance["before"]["perplexity"]["3"]


def test_bfloat16_stays_bfloat16(tmp_path):
    out = train(tmp_path / "out", settings=replace(SHORT, precision="bfloat16"), dtype=torch.bfloat16)
    assert {each.dtype for each in weights(out).values()} == {torch.bfloat16}
    assert layerskip.load(out).identity == DraftPlan.load(out / "plan.json").target


def test_only_the_models_own_tokens_are_learnt(tmp_path):
    """Two sets of texts that differ in a last token that does not count (nothing reads it) give the same weights."""
    results = []
    for last in (5, 6):
        texts = counting_texts()
        tokens, is_own = texts.tokens.copy(), texts.is_own.copy()
        tokens[:, -1], is_own[:, -1] = last, False
        model = tiny_model("llama", dtype=torch.float32)
        out = train_layerskip(model, None, TrainingTexts(tokens, is_own), tmp_path / str(last), SHORT)
        results.append(weights(out))
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())
    assert not list((tmp_path / "5").glob("tokenizer*"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", 0), ("batch_tokens", 1.5), ("micro_rows", True), ("max_dropout", 1.1), ("max_dropout", "0"),
        ("learning_rate", math.nan), ("loss_scale", -0.1), ("dropout_schedule", "linear"), ("curriculum", None),
        ("rotation_interval", 0), ("lora_rank", 0), ("held_out_rows", 0), ("precision", "float16"), ("seed", -1),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(SettingError, match=f"got {name}=.*; expected"):
        RecipeSettings(**{name: value})


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    for resume in (False, True):
        with pytest.raises(SettingError, match="holds a model"):
            train(tmp_path / "model", resume=resume)
    out = train(tmp_path / "out")
    with pytest.raises(SettingError, match="--resume"):
        train(out)
    with pytest.raises(SettingError, match="got seed=1 .* begun with 0"):
        train(out, settings=replace(SHORT, seed=1), resume=True)
    assert weights(train(out, resume=True)).keys() == weights(out).keys()


def test_texts_of_another_model_are_refused(tmp_path):
    model, own = tiny_model("llama"), np.ones((3, 8), dtype=bool)
    cases = [
        (np.full((3, 8), 61), own, InputError, "ids up to 61"),
        (np.full((3, 1), 5), own[:, :1], InputError, "rows of 1 tokens"),
        (np.full((3, 161), 5), np.ones((3, 161), dtype=bool), InputError, "rows of 161 tokens"),
        (np.full((3, 8), 5), ~own, InputError, "without a token to learn"),
        (np.full((1, 8), 5), own[:1], SettingError, "texts of 1 row"),
    ]
    for tokens, is_own, error, said in cases:
        with pytest.raises(error, match=said):
            train_layerskip(
                model, None, TrainingTexts(tokens, is_own), tmp_path / "out", replace(SMALL, held_out_rows=1)
            )
    assert not (tmp_path / "out").exists()


def test_models_without_depth_or_a_row_are_refused(tmp_path):
    config = copy.deepcopy(tiny_model("llama").config)
    config.num_hidden_layers = 1
    tiny = GPTJConfig(vocab_size=61, n_embd=8, n_layer=1, n_head=1, rotary_dim=4)
    for each, said in ((config, "2 layers or more"), (tiny, "GPTJForCausalLM")):
        with pytest.raises(UnsupportedModelError, match=said):
            train_layerskip(AutoModelForCausalLM.from_config(each), None, counting_texts(), tmp_path / "out", SMALL)
