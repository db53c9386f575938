"""What preparing a model does to its linears, what it says about it, and what it costs in memory."""

import copy
import gc
import re
import types

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from layerskip import DraftPlan, SettingError, load, wrap
from layerskip.models.linears import packing_obstacle
from layerskip.models.preparation import Preparation
from tests.checkpoints import save_tiny
from tests.tiny_models import NUM_LAYERS, prompt, tiny_model, transformers_greedy

OPTIONS = {"max_new_tokens": 12, "eos_token_id": None}
GROUPS = 4 * NUM_LAYERS + 1  # qkv, output, gate and up, down of each block; the head
FUSED = 2 * NUM_LAYERS  # qkv; gate and up
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: save_tiny(tmp_path_factory.mktemp(name), name) for name in ("llama", "llama-biased-tied")}


@pytest.fixture
def packing():
    if obstacle := packing_obstacle(torch.float32, CPU):
        pytest.skip(obstacle)


def fresh(name: str = "llama", dtype: torch.dtype = torch.float32):
    return copy.deepcopy(tiny_model(name, dtype=dtype))


def generate(model, plan=None) -> list[int]:
    return model.generate(prompt(), plan=plan, **OPTIONS).new_token_ids[0]


@torch.no_grad()
def logits(model) -> torch.Tensor:
    decoder, ids = model.decoder, prompt()
    cache, span = decoder.new_cache(1, ids.shape[1]), decoder.span([0], ids.shape[1])
    return decoder.logits(decoder.run(decoder.embed(ids), decoder.full_path, cache, span))


def linears_of(model) -> dict[str, nn.Linear]:
    """Of the transformers model as it is, without restoring it."""
    return {name: module for name, module in model._hf_model.named_modules() if isinstance(module, nn.Linear)}


def linear_bytes(model) -> int:
    return sum(linear.weight.nbytes for linear in linears_of(model).values())


class TestWhatIsDone:
    @pytest.mark.parametrize("pack", [None, True])
    def test_packed_where_it_can_be(self, packing, pack):
        preparation = wrap(fresh()).prepare(pack=pack)
        assert (preparation.packed, preparation.fused, preparation.as_they_were) == (GROUPS, 0, 0)
        assert preparation.packing_obstacle is None and preparation.seconds > 0

    @pytest.mark.parametrize("name", ["llama", "llama-biased-tied", "qwen2", "qwen3"])
    def test_packed_computes_the_same(self, packing, name):
        """With biases on all, on some and on no linears; float32, so up to its rounding."""
        model = fresh(name)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
        prepared = wrap(model)
        prepared.prepare()
        torch.testing.assert_close(logits(prepared), logits(wrap(model)), rtol=1e-4, atol=1e-4)

    def test_fused_only(self):
        model = wrap(fresh())
        preparation = model.prepare(pack=False)
        assert (preparation.packed, preparation.fused, preparation.as_they_were) == (0, FUSED, GROUPS - FUSED)
        assert preparation.packing_obstacle is None
        torch.testing.assert_close(logits(model), logits(wrap(fresh())), rtol=1e-4, atol=1e-4)

    def test_float64_is_fused_and_not_packed(self):
        model = wrap(fresh(dtype=torch.float64))
        preparation = model.prepare()
        assert (preparation.packed, preparation.fused) == (0, FUSED)
        assert "packs bfloat16 and float32; the weights are float64" in preparation.packing_obstacle
        torch.testing.assert_close(logits(model), logits(wrap(tiny_model("llama"))))

    def test_linears_that_are_more_than_plain_are_left(self):
        """A hook, a subclass and another module, each in a group of its own: they are called, and the rest is fused."""

        class Doubling(nn.Linear):
            def forward(self, inputs):
                return 2 * super().forward(inputs)

        own, calls = fresh(dtype=torch.float64), []
        first, second = own.model.layers[0], own.model.layers[1]
        first.self_attn.k_proj.register_forward_hook(lambda *arguments: calls.append(arguments))
        second.mlp.up_proj.__class__ = Doubling
        second.self_attn.q_proj = nn.Sequential(second.self_attn.q_proj)
        expected = transformers_greedy(own, prompt(), max_new_tokens=12)[0, 9:].tolist()
        calls.clear()
        model = wrap(own)
        preparation = model.prepare()
        assert (preparation.fused, preparation.as_they_were) == (FUSED - 3, GROUPS - FUSED + 3)
        assert generate(model) == expected != generate(wrap(tiny_model("llama")))
        assert calls

    @pytest.mark.parametrize("pack", ["yes", 1, 0], ids=repr)
    def test_what_is_no_switch_is_refused(self, pack):
        with pytest.raises(SettingError, match=r"got pack=.*; expected True, False, or None"):
            wrap(fresh()).prepare(pack=pack)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_preparing_twice_is_harmless(self, dtype):
        """Catches copies of copies, and memory that is counted twice."""
        model, plain = wrap(fresh(dtype=dtype)), wrap(fresh(dtype=dtype))
        first, second = model.prepare(), model.prepare()
        assert (first.packed, first.fused, first.extra_bytes) == (second.packed, second.fused, second.extra_bytes)
        torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-4)


def missing(monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", types.SimpleNamespace())


def refusing(monkeypatch):
    def refuse(weight, rows):
        raise RuntimeError("no kernel\nand a long trace")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)


def different(monkeypatch):
    reorder = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", lambda weight, rows: reorder(1.1 * weight, rows))


WITHOUT = {
    "missing": (missing, "this build of torch has no packed linears .*_reorder_linear_weight"),
    "refusing": (refusing, r"this build of torch has no packed linears \(no kernel\)$"),
    "different": (different, "this build of torch computes packed linears differently"),
}


@pytest.fixture(params=WITHOUT)
def obstacle(request, monkeypatch):
    """The private operator is gone, fails, or gives something else; the value is a pattern of the reason."""
    take_away, reason = WITHOUT[request.param]
    if request.param == "different":
        request.getfixturevalue("packing")
    packing_obstacle.cache_clear()
    take_away(monkeypatch)
    yield reason
    packing_obstacle.cache_clear()


class TestWithoutTheOperator:
    """It is private to torch and may go at any release."""

    def test_loading_falls_back_to_fusing_and_says_why(self, obstacle, folders):
        model, plain = (load(folders["llama"], dtype="float32", prepare=each) for each in (True, False))
        assert (model.preparation.packed, model.preparation.fused) == (0, FUSED)
        assert re.search(obstacle, model.preparation.packing_obstacle)
        torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-4)

    def test_asking_for_it_is_refused_and_changes_nothing(self, obstacle):
        model, before = wrap(fresh()), logits(wrap(fresh()))
        with pytest.raises(SettingError, match=r"got pack=True, but .*Leave pack out"):
            model.prepare(pack=True)
        assert model.preparation == Preparation()
        assert torch.equal(logits(model), before)


def test_packing_float64_is_refused_with_the_reason():
    with pytest.raises(SettingError, match=r"got pack=True, but oneDNN packs bfloat16 and float32; .* float64"):
        wrap(fresh(dtype=torch.float64)).prepare(pack=True)


def test_trying_the_operator_leaves_the_random_state(packing):
    """Catches sampled outputs that depend on whether it was tried in this process."""
    packing_obstacle.cache_clear()
    before = torch.get_rng_state()
    packing_obstacle(torch.float32, CPU)
    assert torch.equal(torch.get_rng_state(), before)


def live_bytes() -> int:
    """Of all tensors that Python knows of, each storage once; meta tensors have none, packed ones no storage.

    What a compiler has left of its own (FakeTensor) holds nothing.
    """
    while gc.collect():  # what one round frees may have held what the next one finds
        pass
    sizes = {}
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, torch.Tensor) and not issubclass(kind, FakeTensor) and thing.device.type == "cpu":
            if thing.layout == torch.strided:
                sizes[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
            else:
                sizes[id(thing)] = thing.numel() * thing.element_size()
    return sum(sizes.values())


class TestMemory:
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    @pytest.mark.parametrize("name", ["llama", "llama-biased-tied"])
    def test_a_loaded_model_holds_its_weights_once(self, packing, folders, name, dtype):
        """Only a tied head has two forms, because the embedding reads it too. Catches weights kept alive unseen.

        Joined biases and the doubled weights of norms are a few vectors; all that is copied beside them is counted.
        """
        sizes = []
        for prepare in (False, True):
            before = live_bytes()
            model = load(folders[name], dtype=dtype, prepare=prepare)
            sizes.append(live_bytes() - before)
        head = model._hf_model.lm_head.weight
        tied = name != "llama" and dtype == "float32"
        assert model.preparation.extra_bytes == (head.nbytes if tied else 0)
        vectors = sum(each.nbytes for each in model._hf_model.parameters() if each.dim() == 1)
        assert sizes[1] <= sizes[0] + model.preparation.extra_bytes + 2 * vectors

    def test_released_weights_are_meta_and_a_tied_head_is_not(self, packing, folders):
        for name, folder in folders.items():
            linears = linears_of(load(folder, dtype="float32"))
            there = {linear for linear, module in linears.items() if not module.weight.is_meta}
            assert there == (set() if name == "llama" else {"lm_head"})

    def test_fused_in_place_the_modules_see_parts_of_one_storage(self, folders):
        """By identity of storage: the model itself stays usable at no cost."""
        model = load(folders["llama"], dtype="float64")
        for layer in model._hf_model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for group in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
                (storage,) = {each.weight.untyped_storage().data_ptr() for each in group}
                assert group[0].weight.untyped_storage().nbytes() == sum(each.weight.nbytes for each in group)
        assert model.preparation.extra_bytes == 0

    def test_wrapping_prepares_nothing(self):
        model = wrap(fresh())
        generate(model)
        assert model.preparation == Preparation()

    @pytest.mark.parametrize("pack", [None, False])
    def test_a_wrapped_model_keeps_its_weights_and_the_copies_are_counted(self, packing, pack):
        own = fresh()
        places = {name: parameter.data_ptr() for name, parameter in own.named_parameters()}
        model = wrap(own)
        extra = model.prepare(pack=pack).extra_bytes
        assert {name: parameter.data_ptr() for name, parameter in own.named_parameters()} == places
        joined = [name for name in linears_of(model) if name.split(".")[-1] not in ("o_proj", "down_proj", "lm_head")]
        expected = sum(linears_of(model)[name].weight.nbytes for name in joined)
        assert extra == (linear_bytes(model) if pack is None else expected)

    def test_not_prepared_on_request(self, folders):
        model = load(folders["llama"], dtype="float32", prepare=False)
        assert model.preparation == Preparation()
        assert not any(linear.weight.is_meta for linear in linears_of(model).values())

    @pytest.mark.parametrize("plan", [None, DraftPlan.exit(2)], ids=["plain", "exit"])
    def test_using_the_model_does_not_bring_the_weights_back(self, packing, folders, plan):
        """What is asked for at every start may not double the memory; nor may a draft model by path."""
        model = load(folders["llama"], dtype="float32")
        model.name, model.identity, model.inspection  # noqa: B018
        generate(model, plan)
        draft = DraftPlan.model(str(folders["llama"]))
        generate(model, draft)
        for each in (model, model.draft_model(draft)):
            assert all(linear.weight.is_meta for linear in linears_of(each).values())
