"""Loading: every form of checkpoint gives the same plain model, and everything else an error that says what to do."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    modeling_gguf_pytorch_utils,
)
from transformers.utils import logging as transformers_logging

from layerskip.errors import CheckpointError, SettingError, UnsupportedModelError
from layerskip.models import checkpoint_files, loading
from layerskip.models.loading import load_checkpoint, quiet

VOCABULARY = [chr(ord("!") + i) for i in range(63)] + ["!#"]
PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def folder(original: LlamaForCausalLM, tmp_path: Path) -> Path:
    """The model in one safetensors file, without a tokenizer."""
    with quiet():
        original.save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture
def sharded(original: LlamaForCausalLM, tmp_path: Path) -> Path:
    with quiet():
        original.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    return tmp_path / "sharded"


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(VOCABULARY)}, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def cut(file: Path, keep: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])


def same_logits(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    with torch.no_grad():
        return torch.equal(model(PROMPT).logits, other(PROMPT).logits)


class TestFolder:
    def test_gives_the_saved_model_ready_to_run(self, original: LlamaForCausalLM, folder: Path) -> None:
        model, tokenizer = load_checkpoint(folder)
        assert same_logits(model, original)
        assert tokenizer is None
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert model.name_or_path == str(folder)

    def test_shards_give_the_same_model(self, original: LlamaForCausalLM, sharded: Path) -> None:
        assert same_logits(load_checkpoint(sharded)[0], original)

    def test_a_home_relative_path_is_expanded(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(folder.parent))
        monkeypatch.setenv("USERPROFILE", str(folder.parent))
        assert load_checkpoint("~/checkpoint")[0].name_or_path == "~/checkpoint"

    def test_tied_head_is_not_missed(self, tmp_path: Path) -> None:
        """A tied head has no tensor of its own in the file: that is no missing weight."""
        tied = LlamaForCausalLM(LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            tie_word_embeddings=True,
        )).eval()  # fmt: skip
        with quiet():
            tied.save_pretrained(tmp_path)
        assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
        assert same_logits(load_checkpoint(tmp_path)[0], tied)

    def test_says_nothing_and_gives_the_callers_settings_back(
        self, folder: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        before = (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled())
        load_checkpoint(folder)
        assert capfd.readouterr() == ("", "")
        assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before
        assert transformers_logging.set_tqdm_hook(None) is None

    def test_settings_come_back_after_an_error(self) -> None:
        before = transformers_logging.get_verbosity()
        with pytest.raises(ZeroDivisionError), quiet():
            raise ZeroDivisionError
        assert transformers_logging.get_verbosity() == before
        assert transformers_logging.set_tqdm_hook(None) is None

    def test_settings_come_back_when_threads_load_at_once(self) -> None:
        before = transformers_logging.get_verbosity()
        inside, levels = threading.Event(), []

        def second() -> None:
            inside.wait()
            with quiet():
                levels.append(transformers_logging.get_verbosity())

        thread = threading.Thread(target=second)
        with quiet():
            thread.start()
            inside.set()
            thread.join(timeout=0.1)  # without a lock it would save the silence as the setting to restore, and end now
            assert thread.is_alive()
        thread.join()
        assert levels == [transformers_logging.ERROR]
        assert transformers_logging.get_verbosity() == before
        assert transformers_logging.set_tqdm_hook(None) is None

    def test_threads_that_load_in_different_dtypes(self, folder: Path) -> None:
        """transformers sets torch's default dtype while it loads: out of turn, it would stay set."""
        names = ["float64", "bfloat16", "float16", "float32"] * 2
        with ThreadPoolExecutor(len(names)) as pool:
            loaded = list(pool.map(lambda name: load_checkpoint(folder, dtype=name)[0].dtype, names))
        assert loaded == [getattr(torch, name) for name in names]
        assert torch.get_default_dtype() == torch.float32

    def test_unused_tensors_are_told(self, folder: Path) -> None:
        edit_config(folder, num_hidden_layers=1)
        with pytest.warns(UserWarning, match=r"no place for: model\.layers\.1\..* and 4 more") as caught:
            load_checkpoint(folder)
        assert caught[0].filename == __file__


class TestDtype:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("auto", torch.float32), ("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("half", torch.float16),
            ("fp16", torch.float16), ("float16", torch.float16), ("fp32", torch.float32), ("float32", torch.float32),
            ("fp64", torch.float64), ("float64", torch.float64), (torch.float16, torch.float16),
        ],
    )  # fmt: skip
    def test_names(self, folder: Path, name: str | torch.dtype, expected: torch.dtype) -> None:
        model = load_checkpoint(folder, dtype=name)[0]
        assert {parameter.dtype for parameter in model.parameters()} == {expected}
        assert model.config.dtype == expected

    def test_auto_keeps_what_was_saved(self, original: LlamaForCausalLM, tmp_path: Path) -> None:
        with quiet():
            LlamaForCausalLM(original.config).to(torch.bfloat16).save_pretrained(tmp_path)
        assert load_checkpoint(tmp_path)[0].dtype == torch.bfloat16

    @pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", torch.int8, torch.float8_e4m3fn, torch.complex64, 16])
    def test_others_are_refused_before_any_file_is_read(self, dtype: Any) -> None:
        with pytest.raises(SettingError, match="got dtype=.*expected 'auto', one of bfloat16"):
            load_checkpoint("/nowhere", dtype=dtype)

    def test_a_near_miss_is_named(self) -> None:
        with pytest.raises(SettingError, match="Did you mean 'bfloat16'"):
            load_checkpoint("/nowhere", dtype="bfloat61")

    def test_config_dtype_that_is_no_plain_float(self, folder: Path) -> None:
        edit_config(folder, dtype="float8_e4m3fn")
        with pytest.raises(UnsupportedModelError, match="float8_e4m3fn.*expected one of"):
            load_checkpoint(folder)

    def test_integer_weights_without_a_way_to_read_them(self, folder: Path) -> None:
        """transformers would cast the integers to floats and run on them."""
        edit_weights(
            folder, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].to(torch.int8)})
        )
        with pytest.raises(UnsupportedModelError, match="stores weights as I8.*expected BF16, F16, F32, F64"):
            load_checkpoint(folder)


class TestDevice:
    def test_one_device(self, folder: Path) -> None:
        assert load_checkpoint(folder, device="cpu")[0].device.type == "cpu"
        assert load_checkpoint(folder, device=torch.device("cpu"))[0].device.type == "cpu"

    def test_without_accelerate(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loading, "find_spec", lambda name: None)
        assert load_checkpoint(folder, device="cpu")[0].device.type == "cpu"
        with pytest.raises(SettingError, match="pip install accelerate"):
            load_checkpoint(folder, device_map="auto")

    @pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}])
    def test_device_map(self, original: LlamaForCausalLM, folder: Path, device_map: Any) -> None:
        assert same_logits(load_checkpoint(folder, device_map=device_map)[0].to("cpu"), original)

    @pytest.mark.parametrize("device", ["mps", "mps:0", torch.device("mps")])
    def test_mps_is_refused_by_name(self, device: Any) -> None:
        for setting in ({"device": device}, {"device_map": device}, {"device_map": {"": device}}):
            with pytest.raises(SettingError, match="got device 'mps.*no float64.*Expected one of cpu"):
                load_checkpoint("/nowhere", **setting)

    @pytest.mark.parametrize("device", ["cdua", "disk", "meta", "cuda:99"])
    def test_a_device_that_is_not_there(self, device: str) -> None:
        for setting in ({"device": device}, {"device_map": device}, {"device_map": {"": device}}):
            with pytest.raises(SettingError, match=f"got device '{device}', which cannot be used.*cpu"):
                load_checkpoint("/nowhere", **setting)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
    def test_cuda_that_is_not_there(self) -> None:
        with pytest.raises(SettingError, match="got device 'cuda'.*torch finds here: cpu"):
            load_checkpoint("/nowhere", device="cuda")

    def test_both(self) -> None:
        with pytest.raises(SettingError, match="expected one of them"):
            load_checkpoint("/nowhere", device="cpu", device_map="auto")


class TestWhere:
    def test_no_such_path(self, tmp_path: Path) -> None:
        for path in (str(tmp_path / "nothing"), tmp_path / "nothing", Path("relative"), "", "a/b/c", "../a"):
            with pytest.raises(CheckpointError, match=r"no such folder.*hub id \('owner/name'\)"):
                load_checkpoint(path)

    def test_file_instead_of_folder(self, folder: Path) -> None:
        with pytest.raises(CheckpointError, match="expected the folder that holds it, or a .gguf file"):
            load_checkpoint(folder / "model.safetensors")

    def test_empty_folder(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="no config.json.*it holds nothing.*save_pretrained"):
            load_checkpoint(tmp_path)

    def test_adapter(self, folder: Path) -> None:
        (folder / "adapter_config.json").write_text("{}")
        with pytest.raises(CheckpointError, match="merge_and_unload"):
            load_checkpoint(folder)
        (folder / "config.json").unlink()
        with pytest.raises(CheckpointError, match="merge_and_unload"):
            load_checkpoint(folder)

    def test_revision_of_a_folder(self, folder: Path) -> None:
        with pytest.raises(SettingError, match="a revision needs a hub id"):
            load_checkpoint(folder, revision="main")


class TestConfig:
    @pytest.mark.parametrize(
        ("text", "message"),
        [("not JSON", "JSONDecodeError.*download or copy it again"), ("", "JSONDecodeError"), ("[]", "JSON list")],
    )
    def test_damaged(self, folder: Path, text: str, message: str) -> None:
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(folder)

    def test_not_text(self, folder: Path) -> None:
        (folder / "config.json").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(CheckpointError, match="UnicodeDecodeError"):
            load_checkpoint(folder)

    def test_a_value_of_the_wrong_kind(self, folder: Path) -> None:
        edit_config(folder, hidden_size="wide")
        with pytest.raises(CheckpointError, match="cannot use the config of .*hidden_size.*wide.*Compare it") as caught:
            load_checkpoint(folder)
        assert caught.value.__cause__ is not None

    def test_unknown_architecture_is_refused_before_weights_are_read(self, tmp_path: Path) -> None:
        config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64)
        with quiet():
            GPT2LMHeadModel(config).save_pretrained(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel.*supported are LlamaForCausalLM"):
            load_checkpoint(tmp_path)
        edit_config(tmp_path, architectures=None)  # then it is looked up by model type
        with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel"):
            load_checkpoint(tmp_path)

    def test_contradiction(self, folder: Path) -> None:
        edit_config(folder, model_type="gpt2")
        with pytest.raises(CheckpointError, match="contradicts itself.*GPT2LMHeadModel"):
            load_checkpoint(folder)

    def test_remote_code_is_refused_unless_trusted(self, folder: Path) -> None:
        edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling.Custom"})
        with pytest.raises(CheckpointError, match="pass trust_remote_code=True"):
            load_checkpoint(folder)
        (folder / "modeling.py").write_text(
            "from transformers import LlamaForCausalLM\nclass Custom(LlamaForCausalLM): pass\n"
        )
        model, _ = load_checkpoint(folder, trust_remote_code=True)
        assert type(model).__name__ == "Custom"


class TestWeights:
    def test_none(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match="no model.safetensors.*it holds config.json"):
            load_checkpoint(folder)

    def test_missing_shards(self, sharded: Path) -> None:
        lost = sorted(sharded.glob("*.safetensors"))[1]
        lost.unlink()
        with pytest.raises(CheckpointError, match=f"1 of the .* weight files .* are missing: {lost.name}"):
            load_checkpoint(sharded)

    @pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 1}'])
    def test_damaged_index(self, sharded: Path, text: str) -> None:
        (sharded / "model.safetensors.index.json").write_text(text)
        with pytest.raises(CheckpointError, match="index.json.*download or copy"):
            load_checkpoint(sharded)

    @pytest.mark.parametrize("keep", [0.0, 0.0001, 0.05, 0.5, 0.999])
    def test_cut_off(self, folder: Path, keep: float) -> None:
        cut(folder / "model.safetensors", keep)
        with pytest.raises(CheckpointError, match="cannot read .*model.safetensors.*cut off or damaged") as caught:
            load_checkpoint(folder)
        assert caught.value.__cause__ is not None

    def test_one_shard_cut_off(self, sharded: Path) -> None:
        last = sorted(sharded.glob("*.safetensors"))[-1]
        cut(last, 0.9)
        with pytest.raises(CheckpointError, match=f"cannot read .*{last.name}"):
            load_checkpoint(sharded)

    def test_lfs_pointer(self, folder: Path) -> None:
        (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        with pytest.raises(CheckpointError, match="git-lfs pointer"):
            load_checkpoint(folder)

    @pytest.mark.parametrize("key", ["lm_head.weight", "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"])
    def test_a_tensor_that_is_missing_is_not_made_up(self, folder: Path, key: str) -> None:
        edit_weights(folder, lambda tensors: tensors.pop(key))
        with pytest.raises(CheckpointError, match=f"lack what its config expects: {key}. They would be random"):
            load_checkpoint(folder)

    def test_config_with_more_layers_than_weights(self, folder: Path) -> None:
        edit_config(folder, num_hidden_layers=3)
        with pytest.raises(CheckpointError, match=r"expects: model\.layers\.2\..* and 4 more"):
            load_checkpoint(folder)

    def test_shape(self, folder: Path) -> None:
        edit_config(folder, vocab_size=65)
        with pytest.raises(CheckpointError, match=r"has shape \(64, 32\); its config expects \(65, 32\) \(2 such"):
            load_checkpoint(folder)


class TestPickled:
    @pytest.fixture
    def pickled(self, original: LlamaForCausalLM, folder: Path) -> Path:
        (folder / "model.safetensors").unlink()
        torch.save(original.state_dict(), folder / "pytorch_model.bin")
        return folder

    def test_refused_by_default(self, pickled: Path) -> None:
        with pytest.raises(CheckpointError, match="pytorch_model.bin.*allow_pickled_weights=True"):
            load_checkpoint(pickled)

    def test_read_when_allowed(self, original: LlamaForCausalLM, pickled: Path) -> None:
        assert same_logits(load_checkpoint(pickled, allow_pickled_weights=True)[0], original)

    def test_cut_off(self, pickled: Path) -> None:
        cut(pickled / "pytorch_model.bin", 0.5)
        with pytest.raises(CheckpointError, match="cannot load the weights.*download or copy it again"):
            load_checkpoint(pickled, allow_pickled_weights=True)

    def test_safetensors_are_preferred(self, original: LlamaForCausalLM, folder: Path) -> None:
        (folder / "pytorch_model.bin").write_bytes(b"never read")
        assert same_logits(load_checkpoint(folder, allow_pickled_weights=True)[0], original)


class TestTokenizer:
    def test_comes_with_the_model(self, folder: Path) -> None:
        save_tokenizer(folder)
        tokenizer = load_checkpoint(folder)[1]
        assert tokenizer is not None
        assert tokenizer("!#%")["input_ids"] == [0, 2, 4]

    @pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
    def test_a_damaged_one_is_an_error(self, folder: Path, file: str) -> None:
        save_tokenizer(folder)
        cut(folder / file, 0.5)
        (folder / "model.safetensors").unlink()  # it is read before the weights
        with pytest.raises(CheckpointError, match="cannot read the tokenizer"):
            load_checkpoint(folder)

    def test_one_without_its_vocabulary_is_an_error(self, folder: Path) -> None:
        save_tokenizer(folder)
        (folder / "tokenizer.json").unlink()
        with pytest.raises(CheckpointError, match="cannot read the tokenizer"):
            load_checkpoint(folder)


def write_gguf(
    file: Path, model: LlamaForCausalLM, *, merge: str | None = "! #", rope_freqs: bool = False, tied: bool = False
) -> None:
    """Write the model as llama.cpp's converter would, in float32; a tied head is not written."""
    config, names = model.config, {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for i in range(config.num_hidden_layers):
        block = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
        block |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
        block |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
        names |= {f"model.layers.{i}.{ours}": f"blk.{i}.{theirs}" for ours, theirs in block.items()}
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if merge is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(VOCABULARY)
        writer.add_token_types([1] * len(VOCABULARY))
        writer.add_token_merges([merge])
    if rope_freqs:
        writer.add_tensor("rope_freqs.weight", torch.ones(4).numpy())
    for key, tensor in model.state_dict().items():
        name = key.removesuffix(".weight")
        if tied and name == "lm_head":
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-1])
        if heads:  # llama.cpp stores the two halves that a rotary pair comes from side by side
            tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"{names[name]}.weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class TestGguf:
    @pytest.fixture
    def file(self, original: LlamaForCausalLM, tmp_path: Path) -> Path:
        write_gguf(tmp_path / "tiny.gguf", original)
        return tmp_path / "tiny.gguf"

    def test_gives_the_same_plain_model(
        self, original: LlamaForCausalLM, file: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        model, tokenizer = load_checkpoint(file)
        assert capfd.readouterr() == ("", "")
        assert same_logits(model, original)
        assert model.dtype == torch.float32
        assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
        assert tokenizer is not None
        assert tokenizer("#%")["input_ids"] == [2, 4]

    def test_by_name_in_its_folder(self, original: LlamaForCausalLM, file: Path) -> None:
        assert same_logits(load_checkpoint(file.parent, gguf_file=file.name)[0], original)

    def test_from_a_relative_path(
        self, original: LlamaForCausalLM, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(file.parent)
        assert same_logits(load_checkpoint("tiny.gguf")[0], original)

    def test_dtype_and_device_map(self, file: Path) -> None:
        model, _ = load_checkpoint(file, dtype="bf16", device_map={"": "cpu"})
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}

    def test_hides_its_bar_and_nothing_else_on_stderr(
        self, file: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        unpack = loading._check_report

        def speak(*arguments: Any) -> None:
            print("another thread", file=sys.stderr)
            unpack(*arguments)

        monkeypatch.setattr(loading, "_check_report", speak)
        bar = modeling_gguf_pytorch_utils.tqdm
        load_checkpoint(file)
        assert capfd.readouterr().err == "another thread\n" * 2
        assert modeling_gguf_pytorch_utils.tqdm is bar

    def test_can_be_saved_and_loaded_again(self, original: LlamaForCausalLM, file: Path, tmp_path: Path) -> None:
        model, tokenizer = load_checkpoint(file)
        assert tokenizer is not None
        with quiet():
            model.save_pretrained(tmp_path / "again")
        tokenizer.save_pretrained(tmp_path / "again")
        again, tokenizer_again = load_checkpoint(tmp_path / "again")
        assert same_logits(again, original)
        assert tokenizer_again is not None
        assert tokenizer_again("#%")["input_ids"] == [2, 4]

    def test_without_a_tokenizer(self, original: LlamaForCausalLM, tmp_path: Path) -> None:
        write_gguf(tmp_path / "bare.gguf", original, merge=None)
        assert load_checkpoint(tmp_path / "bare.gguf")[1] is None

    def test_a_damaged_tokenizer_is_an_error(self, original: LlamaForCausalLM, tmp_path: Path) -> None:
        write_gguf(tmp_path / "damaged.gguf", original, merge="! $")
        with pytest.raises(CheckpointError, match=r"cannot read the tokenizer of .*`!\$` out of vocabulary"):
            load_checkpoint(tmp_path / "damaged.gguf")

    @pytest.mark.parametrize("keep", [0.0, 0.001, 0.02, 0.5, 0.99])
    def test_cut_off(self, file: Path, keep: float) -> None:
        cut(file, keep)
        with pytest.raises(CheckpointError, match="tiny.gguf.*download or copy it again") as caught:
            load_checkpoint(file)
        assert caught.value.__cause__ is not None

    def test_damaged(self, file: Path) -> None:
        file.write_bytes(b"GGUX" + file.read_bytes()[4:])
        with pytest.raises(CheckpointError, match="tiny.gguf"):
            load_checkpoint(file)

    def test_scaled_rotary_embedding_is_not_dropped(self, original: LlamaForCausalLM, tmp_path: Path) -> None:
        """Llama 3.1 and later keep their rotary scaling in a tensor that transformers does not read."""
        write_gguf(tmp_path / "scaled.gguf", original, rope_freqs=True)
        with pytest.raises(UnsupportedModelError, match="rope_freqs.weight"):
            load_checkpoint(tmp_path / "scaled.gguf")

    def test_not_there(self, file: Path) -> None:
        with pytest.raises(CheckpointError, match="no GGUF file 'other.gguf'.*it holds tiny.gguf"):
            load_checkpoint(file.with_name("other.gguf"))
        with pytest.raises(CheckpointError, match="no config.json.*it holds tiny.gguf.*pass its name as gguf_file"):
            load_checkpoint(file.parent)

    def test_without_the_extra(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checkpoint_files, "find_spec", lambda name: None)
        with pytest.raises(CheckpointError, match=r'needs gguf and accelerate: pip install "layerskip\[gguf\]"'):
            load_checkpoint(file)


class TestHub:
    """The hub is stood in for by a function that copies what it is asked for, as `snapshot_download` would."""

    @pytest.fixture
    def asked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None, list[str]]]:
        """Makes tmp_path/repository the hub's only repository, and returns the list of requests."""
        requests: list[tuple[str, str | None, list[str]]] = []

        def snapshot_download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
            requests.append((name, revision, allow_patterns))
            snapshot = tmp_path / "hub" / "commit"
            snapshot.mkdir(parents=True, exist_ok=True)
            for file in (tmp_path / "repository").iterdir():
                if any(file.match(pattern) for pattern in allow_patterns):
                    shutil.copy(file, snapshot)
            return str(snapshot)

        monkeypatch.setattr(checkpoint_files, "snapshot_download", snapshot_download)
        return requests

    def test_weights_of_the_same_commit_are_fetched_last(
        self, original: LlamaForCausalLM, sharded: Path, asked: list[tuple[str, str | None, list[str]]]
    ) -> None:
        repository = sharded.rename(sharded.with_name("repository"))
        (repository / "consolidated.safetensors").write_bytes(b"a second copy that is not wanted")
        save_tokenizer(repository)
        model, tokenizer = load_checkpoint("owner/name", revision="v1")
        assert same_logits(model, original)
        assert tokenizer is not None
        assert model.name_or_path == tokenizer.name_or_path == "owner/name"
        small, weights = asked
        assert small[:2] == ("owner/name", "v1")
        assert weights == ("owner/name", "commit", sorted(file.name for file in repository.glob("model-*.safetensors")))

    def test_unknown_architecture_is_refused_before_weights_are_fetched(
        self, folder: Path, asked: list[tuple[str, str | None, list[str]]]
    ) -> None:
        folder.rename(folder.with_name("repository"))
        edit_config(folder.with_name("repository"), architectures=["Other"])
        with pytest.raises(UnsupportedModelError, match="Other"):
            load_checkpoint("owner/name")
        assert len(asked) == 1
        assert "*.py" not in asked[0][2]

    def test_pickled_weights_are_fetched_only_when_allowed(
        self, original: LlamaForCausalLM, folder: Path, asked: list[tuple[str, str | None, list[str]]]
    ) -> None:
        repository = folder.rename(folder.with_name("repository"))
        (repository / "model.safetensors").unlink()
        torch.save(original.state_dict(), repository / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match="allow_pickled_weights=True"):
            load_checkpoint("owner/name")
        assert not any("pytorch_model.bin" in patterns for _, _, patterns in asked)
        assert same_logits(load_checkpoint("owner/name", allow_pickled_weights=True)[0], original)

    def test_gguf(
        self, original: LlamaForCausalLM, tmp_path: Path, asked: list[tuple[str, str | None, list[str]]]
    ) -> None:
        (tmp_path / "repository").mkdir()
        write_gguf(tmp_path / "repository" / "tiny.gguf", original)
        assert same_logits(load_checkpoint("owner/name", gguf_file="tiny.gguf")[0], original)
        assert asked == [("owner/name", None, ["tiny.gguf"])]

    def test_offline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(CheckpointError, match="cannot get 'owner/nothing-here' from the hub.*network") as caught:
            load_checkpoint("owner/nothing-here")
        assert caught.value.__cause__ is not None


def test_a_panic_of_a_rust_library_is_explained_like_any_failure() -> None:
    """Such a panic is no Exception; the tokenizers library panics on some damaged vocabularies."""
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(CheckpointError, match="cannot do it: PanicException: range end index. Do this."):
        with checkpoint_files.explained("do it", "Do this."):
            raise panic("range end\nindex")


@pytest.mark.parametrize("passing", [KeyboardInterrupt, MemoryError, UnsupportedModelError])
def test_what_is_not_the_checkpoints_fault_passes(passing: type[BaseException]) -> None:
    with pytest.raises(passing), checkpoint_files.explained("do it", "Do this."):
        raise passing


def test_lack_of_memory_is_not_blamed_on_the_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        load_checkpoint(folder)


def test_weights_left_on_disk_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk = LlamaForCausalLM.from_pretrained(folder).to("meta")
    report = {f"{kind}_keys": set() for kind in ("missing", "mismatched", "unexpected")}
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: (on_disk, report))
    with pytest.raises(SettingError, match="on disk or offloads them"):
        load_checkpoint(folder, device_map="auto")
