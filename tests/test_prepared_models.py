"""A prepared model is the same model: its output, its identity, its weights when they are asked for."""

import copy

import pytest
import torch
from torch import nn

from layerskip import DraftPlan, SettingError, UnsupportedModelError, load, wrap
from layerskip.exactness import first_difference
from layerskip.models.linears import packing_obstacle
from tests.checkpoints import save_tiny
from tests.tiny_models import FAMILY_NAMES, prompt, tiny_model, transformers_greedy

OPTIONS = {"max_new_tokens": 12, "eos_token_id": None}
DTYPES = ["bfloat16", "float32", "float64"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: save_tiny(tmp_path_factory.mktemp(name), name) for name in ("llama", "llama-biased-tied")}


@pytest.fixture(params=["llama", "llama-biased-tied"])
def folder(request, folders):
    return folders[request.param]


def fresh(name: str = "llama", dtype: torch.dtype = torch.float32):
    return copy.deepcopy(tiny_model(name, dtype=dtype))


def generate(model, plan=None) -> list[int]:
    return model.generate(prompt(), plan=plan, **OPTIONS).new_token_ids[0]


def assert_same_weights(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight) and ours[name].dtype == weight.dtype, name


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_greedy_output_is_transformers(name, tmp_path):
    """Of every family, loaded and prepared as users do; plain and drafting, one row and several."""
    model, own = load(save_tiny(tmp_path, name), dtype="float64"), tiny_model(name)
    groups = [group for block in model.decoder.blocks for group in block.linears]
    assert model.preparation.fused == sum(each.is_plain and len(each.modules) > 1 for each in groups)
    for plan in (None, DraftPlan.exit(2), DraftPlan.skip([1], [2])):
        for inputs in (prompt(), prompt(batch=3)):
            expected = transformers_greedy(own, inputs, max_new_tokens=16)
            ours = model.generate(inputs, plan=plan, max_new_tokens=16, eos_token_id=None).sequences
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_drafting_gives_the_plain_output_or_parts_by_a_near_tie(folder, dtype):
    """Judged on the loaded model itself, whose weights must be brought back for it."""
    model, ids = load(folder, dtype=dtype), prompt()[0].tolist()
    plain, drafting = generate(model), generate(model, DraftPlan.exit(2))
    difference = first_difference(model.hf_model, ids, plain, drafting)
    assert difference is None or difference.is_near_tie
    assert first_difference(model.hf_model, ids, plain, list(plain)) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_models_own_weights_come_back_to_the_last_bit(folder, dtype):
    """And decoding goes on with the form it had; the copies are counted from then on."""
    model, plain = load(folder, dtype=dtype), load(folder, dtype=dtype, prepare=False)
    before = generate(model)
    assert_same_weights(model.hf_model.state_dict(), plain.hf_model.state_dict())
    linears = [each for each in model.hf_model.modules() if isinstance(each, nn.Linear)]
    packed = model.preparation.packed > 0
    assert model.preparation.extra_bytes == (sum(each.weight.nbytes for each in linears) if packed else 0)
    assert generate(model) == before


def test_the_models_own_forward_works_again(folder):
    model = load(folder, dtype="float32")
    expected = load(folder, dtype="float32", prepare=False).hf_model(prompt()).logits
    assert torch.equal(model.hf_model(prompt()).logits, expected)


def test_a_tied_head_stays_tied(folders):
    """After loading, and after the weights came back."""
    model = load(folders["llama-biased-tied"], dtype="float32")
    for own in (model._hf_model, model.hf_model):
        assert own.lm_head.weight is own.model.embed_tokens.weight


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_saved_as_it_was_loaded(folder, dtype, tmp_path):
    """Catches meta weights in the file, and parts of one storage that are taken for tied weights."""
    load(folder, dtype=dtype).hf_model.save_pretrained(tmp_path)
    ours, theirs = (load(each, dtype=dtype, prepare=False).hf_model for each in (tmp_path, folder))
    assert_same_weights(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("dtype", DTYPES)
def test_identity_is_the_same_with_and_without(folder, dtype):
    """Or plans would have to be made again."""
    prepared, plain = (load(folder, dtype=dtype, prepare=each) for each in (True, False))
    assert prepared.identity == plain.identity
    plain.prepare()
    assert wrap(prepared.hf_model).identity == wrap(plain.hf_model).identity == prepared.identity


def test_inspection_and_name_are_the_same(folder):
    prepared, plain = (load(folder, dtype="float32", prepare=each) for each in (True, False))
    assert prepared.inspection == plain.inspection
    assert prepared.name == plain.name == str(folder)


def test_its_transformers_model_can_be_wrapped(folder):
    model = load(folder, dtype="float32")
    torch.testing.assert_close(generate(wrap(model.hf_model)), generate(load(folder, dtype="float32", prepare=False)))


def replace_weight(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(torch.randn_like(linear.weight), requires_grad=False)


CHANGES = {"written to": lambda linear: linear.weight.add_(1), "replaced": replace_weight}
REFUSED = {"match": r"changes to weights that prepare\(\) had copied.*Wrap it again"}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
class TestChangedWeights:
    """They would not act; refused before the model has run."""

    @pytest.mark.parametrize("linear", ["self_attn.v_proj", "mlp.gate_proj"])
    def test_refused_after_prepare(self, change, dtype, linear):
        own = fresh(dtype=dtype)
        model = wrap(own)
        model.prepare()
        generate(model)
        change(own.model.layers[2].get_submodule(linear))
        for call in (lambda: generate(model), lambda: model.check(prompt()), model.prepare):
            with pytest.raises(UnsupportedModelError, **REFUSED):
                call()

    def test_refused_in_a_draft_model(self, change, dtype):
        draft = wrap(fresh("qwen3", dtype))
        draft.prepare()
        change(draft.hf_model.model.layers[0].self_attn.q_proj)
        with pytest.raises(UnsupportedModelError, **REFUSED):
            generate(wrap(fresh(dtype=dtype)), DraftPlan.model(draft))

    def test_they_act_when_wrapped_again(self, change, dtype):
        own = fresh(dtype=dtype)
        wrap(own).prepare()
        change(own.model.layers[0].self_attn.q_proj)
        model = wrap(own)
        model.prepare()
        assert generate(model) == generate(wrap(own))


def test_written_weights_act_where_the_modules_hold_the_fused_form(folders):
    model = load(folders["llama"], dtype="float64")
    with torch.no_grad():
        model.hf_model.model.layers[0].self_attn.q_proj.weight.add_(1)
    assert generate(model) == generate(wrap(model.hf_model)) != generate(wrap(tiny_model("llama")))


def test_weights_that_came_back_and_were_changed_are_refused(folders):
    model = load(folders["llama"], dtype="float32")
    if not model.preparation.packed:
        pytest.skip(model.preparation.packing_obstacle)
    with torch.no_grad():
        model.hf_model.model.layers[0].self_attn.q_proj.weight.add_(1)
    with pytest.raises(UnsupportedModelError, **REFUSED):
        generate(model)


def refused_or_acts(model, own) -> bool:
    """Whether a change was not ignored: the call is refused, or gives what the changed model gives."""
    try:
        return generate(model) == generate(wrap(own))
    except UnsupportedModelError:
        return True


class TestChangesAndRepetitions:
    """What is done to a model before, after and twice either acts or is refused."""

    def test_preparing_a_loaded_model_again_is_harmless(self, folders):
        model, plain = (load(folders["llama"], dtype="float32", prepare=each) for each in (True, False))
        model.prepare()
        assert generate(model) == generate(plain)

    def test_preparing_a_fused_model_again_copies_nothing(self, folders):
        model = load(folders["llama"], dtype="float64")
        assert model.prepare().extra_bytes == 0

    def test_what_is_packed_stays_packed(self):
        model = wrap(fresh())
        first = model.prepare()
        assert first.packed > 0 and model.prepare() == first
        with pytest.raises(SettingError, match="prepared before with packing"):
            model.prepare(pack=False)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_a_changed_bias_is_not_ignored(self, dtype):
        own = fresh("llama-biased-tied", dtype)
        model = wrap(own)
        model.prepare()
        for layer in own.model.layers:
            layer.self_attn.v_proj.bias.add_(3)
        assert refused_or_acts(model, own)

    @pytest.mark.parametrize("linear", ["self_attn.v_proj", "self_attn.o_proj"])
    def test_a_weight_replaced_in_a_loaded_float64_model_is_not_ignored(self, folders, linear):
        model = load(folders["llama"], dtype="float64")
        for layer in model.hf_model.model.layers:
            replace_weight(layer.get_submodule(linear))
        assert refused_or_acts(model, model.hf_model)

    def test_a_changed_norm_is_not_ignored(self):
        """Of a model that was only wrapped, whose weights are shared."""
        own = fresh()
        model = wrap(own)
        for layer in own.model.layers:
            layer.input_layernorm.weight.copy_(torch.linspace(-1, 1, 32))
        assert refused_or_acts(model, own)

    def test_weights_come_back_in_inference_mode(self, folders):
        model = load(folders["llama"], dtype="float32")
        with torch.inference_mode():
            _ = model.hf_model

    def test_packing_is_tried_in_inference_mode(self):
        packing_obstacle.cache_clear()
        with torch.inference_mode():
            obstacle = packing_obstacle(torch.float32, torch.device("cpu"))
        packing_obstacle.cache_clear()
        assert obstacle == packing_obstacle(torch.float32, torch.device("cpu"))

    def test_a_head_without_a_weight_can_be_wrapped(self):
        own = fresh()
        own.lm_head = nn.Sequential(own.lm_head)
        assert generate(wrap(own)) == generate(wrap(fresh()))


@pytest.mark.parametrize("lengths, tokens, capacity", [([9], 2, 12), ([9], 2, 11), ([9, 9], 1, 12), ([9, 5], 1, 12)])
def test_a_pass_over_two_rows_is_widened_where_there_is_room(monkeypatch, lengths, tokens, capacity):
    """Packed linears take longer for two rows than for three: outputs and the cache's books are those of two."""
    if packing_obstacle(torch.float32, torch.device("cpu")):
        pytest.skip("this machine packs nothing")
    packed, plain = wrap(fresh()), wrap(fresh())
    packed.prepare(pack=True)
    rows, outputs = [], []
    block = packed.decoder.blocks[0]
    transform = type(block).transform
    monkeypatch.setattr(
        type(block),
        "transform",
        lambda self, hidden, entered: rows.append(len(hidden.flatten(0, 1))) or transform(self, hidden, entered),
    )
    ids = prompt(max(lengths) + tokens, batch=len(lengths))
    for decoder in (packed.decoder, plain.decoder):
        cache = decoder.new_cache(len(lengths), capacity, kept_states=[2])
        start = decoder.span([0] * len(lengths), max(lengths))
        decoder.run(decoder.embed(ids[:, : max(lengths)]), decoder.full_path, cache, start)
        cache.commit(lengths)
        rows.clear()
        hidden = decoder.run(decoder.embed(ids[:, -tokens:]), decoder.full_path, cache, decoder.span(lengths, tokens))
        outputs.append(decoder.logits(hidden))
        widened = decoder is packed.decoder and max(lengths) + tokens < capacity
        assert set(rows) == {2 + (len(lengths) if widened else 0)}
        cache.commit([length + tokens for length in lengths])
        cache.check()
        assert cache.states[2][0, lengths[0] + tokens - 1].any()
    assert outputs[0].shape == outputs[1].shape == (len(lengths), tokens, packed.decoder.vocab_size)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)
