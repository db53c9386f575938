"""Weights as people store them: quantised, packed, in GGUF files, tied, on several devices, in every dtype.

A quantiser's modules are called as they are, so the output is that of transformers' `generate` on the same model.
"""

import copy
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

import layerskip
from layerskip import CheckpointError, DraftPlan, SettingError, UnsupportedModelError
from layerskip.models.loading import quiet
from tests.checkpoints import save_tiny
from tests.drafting import always
from tests.special_models import agreeing_model
from tests.test_loading import write_gguf
from tests.tiny_models import TINY_CONFIGS, prompt, tiny_model, transformers_greedy

PLANS = {
    "plain": None,
    "exit": DraftPlan.exit(2),
    "vocabulary": DraftPlan.exit(3, draft_vocabulary=range(3, 50)),
    "skip": DraftPlan.skip([1], [2]),
    "lookup": DraftPlan.lookup(),
}
NEW = {"max_new_tokens": 24, "eos_token_id": None}


class Packed4Bit(nn.Linear):
    """As bitsandbytes: a linear by type, whose weight is a flat parameter of two values a byte."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        scale = linear.weight.abs().max() / 7
        codes = (linear.weight / scale).round().to(torch.int8).add(8).to(torch.uint8).reshape(-1, 2)
        self.weight = nn.Parameter(codes[:, :1] * 16 + codes[:, 1:], requires_grad=False)
        self.scale = scale

    def forward(self, inputs):
        codes = torch.cat((self.weight // 16, self.weight % 16), dim=1).to(inputs.dtype)
        return F.linear(inputs, ((codes - 8) * self.scale).view(self.out_features, self.in_features))


class BuffersOnly(nn.Module):
    """As GPTQ and AWQ: no linear and no parameter, but integer buffers, some of them empty."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, None
        scales = linear.weight.abs().amax(dim=1, keepdim=True) / 7
        self.register_buffer("qweight", (linear.weight / scales).round().to(torch.int32))
        self.register_buffer("scales", scales)
        self.register_buffer("g_idx", torch.empty(0, dtype=torch.int32))

    def forward(self, inputs):
        return F.linear(inputs, self.qweight.to(inputs.dtype) * self.scales)


def quantised(kind, family="llama", head=True):
    """A model of the test's own with all its linears replaced."""
    model = copy.deepcopy(agreeing_model(family))
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    for name in linears:
        if head or name != "lm_head":
            model.set_submodule(name, kind(model.get_submodule(name)))
    return model


kinds = pytest.mark.parametrize("kind", [Packed4Bit, BuffersOnly])


class TestModules:
    @kinds
    @pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
    def test_greedy_output_is_transformers(self, kind, plan):
        model = quantised(kind)
        own = transformers_greedy(model, prompt(), max_new_tokens=24)
        assert not torch.equal(own, transformers_greedy(agreeing_model("llama"), prompt(), max_new_tokens=24))
        wrapped = layerskip.wrap(model)
        for prepares in (False, True):
            if prepares:
                assert wrapped.prepare().as_they_were == 17
            assert torch.equal(wrapped.generate(prompt(), **always(plan), **NEW).sequences, own)
        inside = model.generate(
            prompt(), attention_mask=torch.ones_like(prompt()), custom_generate=layerskip.custom_generate,
            **always(plan), **NEW,
        )  # fmt: skip
        assert torch.equal(inside, own)

    @kinds
    def test_with_biases_and_a_plain_head(self, kind):
        model = quantised(kind, "qwen2", head=False)
        own = transformers_greedy(model, prompt(), max_new_tokens=24)
        wrapped = layerskip.wrap(model)
        assert wrapped.prepare().fused == 0
        assert torch.equal(wrapped.generate(prompt(), **always(DraftPlan.exit(2)), **NEW).sequences, own)

    @kinds
    def test_sizes_and_costs_are_those_of_the_matrices(self, kind):
        """However few bits they take: the cost of an exit is what it was."""
        plain, other = (layerskip.wrap(each) for each in (agreeing_model("llama"), quantised(kind)))
        assert other.inspection == plain.inspection
        assert other.draft_cost(DraftPlan.exit(2)) == plain.draft_cost(DraftPlan.exit(2))

    @kinds
    def test_plans_know_the_weights(self, kind):
        model = quantised(kind)
        identity = layerskip.wrap(model).identity
        assert layerskip.wrap(quantised(kind)).identity == identity
        module = model.model.layers[1].mlp.up_proj
        (module.weight if kind is Packed4Bit else module.qweight).data.fill_(3)
        assert layerskip.wrap(model).identity != identity

    def test_a_module_that_holds_nothing_is_refused(self):
        model = copy.deepcopy(tiny_model("llama"))
        model.model.layers[1].self_attn.q_proj = nn.Identity()
        with pytest.raises(UnsupportedModelError, match="got a Identity without parameters and buffers"):
            layerskip.wrap(model)


ASIDE = Path(sys.prefix) / "aside"  # where `make` puts torchao: transformers imports it wherever it finds it, loudly


@pytest.mark.skipif(not (ASIDE / "torchao").exists(), reason="torchao is not installed aside")
def test_torchao_in_a_process_that_finds_it():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "TestTorchao", __file__]
    ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ASIDE)}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 passed" in ended.stdout


@pytest.mark.filterwarnings("ignore")  # of its own and torch's at import
class TestTorchao:
    @pytest.fixture
    def config(self):
        pytest.importorskip("torchao")
        from torchao.quantization import Int8WeightOnlyConfig

        return Int8WeightOnlyConfig()

    def test_int8_weights_in_plain_linears(self, config):
        """torchao leaves the linear and replaces its weight."""
        from torchao.quantization import quantize_

        model = copy.deepcopy(agreeing_model("llama")).float()
        quantize_(model, config)
        assert type(model.lm_head) is nn.Linear
        own, wrapped = transformers_greedy(model, prompt(), max_new_tokens=24), layerskip.wrap(model)
        identity = wrapped.identity
        for plan in PLANS.values():
            assert torch.equal(wrapped.generate(prompt(), **always(plan), **NEW).sequences, own)
        assert wrapped.prepare().as_they_were == 17
        assert torch.equal(wrapped.generate(prompt(), **always(DraftPlan.exit(2)), **NEW).sequences, own)
        assert wrapped.inspection.step_parameters == layerskip.wrap(agreeing_model("llama")).inspection.step_parameters
        assert identity != layerskip.wrap(agreeing_model("llama")).identity

    def test_a_checkpoint_that_was_stored_so(self, config, tmp_path):
        from transformers import TorchAoConfig

        save_tiny(tmp_path / "plain")
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                tmp_path / "plain", quantization_config=TorchAoConfig(config), dtype=torch.float32
            )
            model.save_pretrained(tmp_path / "stored")
        loaded = layerskip.load(tmp_path / "stored", dtype="float32")
        assert loaded.preparation.as_they_were == 16
        own = transformers_greedy(model, prompt(), max_new_tokens=24)
        assert torch.equal(loaded.generate(prompt(), **always(DraftPlan.exit(2)), **NEW).sequences, own)


class TestFiles:
    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_gguf(self, tied, tmp_path):
        """Its values are unpacked; a tied one stores no head."""
        model = copy.deepcopy(tiny_model("llama", dtype=torch.float32))
        if tied:
            model.lm_head.weight, model.config.tie_word_embeddings = model.model.embed_tokens.weight, True
        write_gguf(tmp_path / "tiny.gguf", model, merge=None, tied=tied)
        loaded = layerskip.load(tmp_path / "tiny.gguf", dtype="float64")
        assert loaded.inspection.tied == tied
        own = transformers_greedy(model.double(), prompt(), max_new_tokens=24)
        for plan in (None, DraftPlan.exit(2), DraftPlan.lookup()):
            assert torch.equal(loaded.generate(prompt(), **always(plan), **NEW).sequences, own)

    @pytest.mark.parametrize("family", ["llama", "llama-biased-tied"])
    @pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
    def test_every_dtype_with_a_tied_and_an_untied_head(self, family, dtype, tmp_path):
        """With one width of all passes no bit depends on the draft, so that nothing has to be allowed for."""
        loaded = layerskip.load(save_tiny(tmp_path, family), dtype=dtype)
        assert loaded.inspection.tied == bool(TINY_CONFIGS[family].tie_word_embeddings)
        own = loaded.generate(prompt(), pass_width=7, **NEW).sequences
        for plan in (DraftPlan.exit(2), DraftPlan.lookup()):
            assert torch.equal(loaded.generate(prompt(), **always(plan), pass_width=7, **NEW).sequences, own)


class TestDevices:
    @staticmethod
    def dispatched(tmp_path, where):
        """A model as accelerate spreads it; `where` holds the second half."""
        accelerate = pytest.importorskip("accelerate")
        model = copy.deepcopy(agreeing_model("llama"))
        devices = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
        devices |= {f"model.layers.{index}": "cpu" if index < 2 else where for index in range(4)}
        return accelerate.dispatch_model(
            model, devices, main_device="cpu", offload_dir=str(tmp_path / "offload"), force_hooks=True
        )

    def test_accelerates_hooks_are_called(self, tmp_path):
        model = self.dispatched(tmp_path, "cpu")
        own = transformers_greedy(agreeing_model("llama"), prompt(), max_new_tokens=24)
        options = {**always(DraftPlan.exit(2)), **NEW}
        assert torch.equal(layerskip.wrap(model).generate(prompt(), **options).sequences, own)
        inside = model.generate(
            prompt(), attention_mask=torch.ones_like(prompt()), custom_generate=layerskip.custom_generate, **options
        )
        assert torch.equal(inside, own)
        weight = weakref.ref(model.lm_head.weight)
        del model
        gc.collect()  # accelerate's hooks hold the model in a circle, and it the wrapped one
        gc.collect()
        assert weight() is None, "a spread model is kept for having been used once"

    def test_weights_on_disk_are_refused(self, tmp_path):
        model = self.dispatched(tmp_path, "disk")
        with pytest.raises(CheckpointError, match=r"model.layers.2.*meta device.*without disk offload"):
            layerskip.wrap(model)
        with pytest.raises(CheckpointError, match="without disk offload"):
            model.generate(prompt(), attention_mask=torch.ones_like(prompt()), max_new_tokens=2,
                           custom_generate=layerskip.custom_generate)  # fmt: skip

    @pytest.mark.parametrize("where", ["meta", "disk"])
    def test_a_map_that_leaves_a_part_there(self, where, tmp_path):
        devices = {"model.layers.3": where, "": "cpu"}
        with pytest.raises(SettingError, match=f"got device '{where}'.*every pass needs all weights"):
            layerskip.load(save_tiny(tmp_path), device_map=devices)

    def test_a_map_of_one_device_by_parts(self, tmp_path):
        devices = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu",
                   "lm_head": "cpu"}  # fmt: skip
        loaded = layerskip.load(save_tiny(tmp_path), device_map=devices, dtype="float64")
        own = transformers_greedy(tiny_model("llama"), prompt(), max_new_tokens=24)
        assert torch.equal(loaded.generate(prompt(), **always(DraftPlan.exit(2)), **NEW).sequences, own)
