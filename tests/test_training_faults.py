"""What goes wrong around a training: two at once, folders of others, models that cannot be, wrong types."""

import copy
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from layerskip import DraftPlan
from layerskip.cli import main
from layerskip.errors import CheckpointError, InputError, LayerSkipError, SettingError, UnsupportedModelError
from layerskip.training import (
    ExitSettings,
    TrainingTexts,
    train_draft_model,
    train_exit,
    train_layerskip,
    write_texts,
)
from layerskip.training.beginning import check_exit, check_layerskip
from layerskip.training.folder import held_folder
from layerskip.training.loop import thinned
from layerskip.training.writing import ends_of
from tests.checkpoints import save_tiny
from tests.small_training import DRAFT, RECIPE, SMALL, WRITING, WrappedLinear, some_texts, trained_once, wrapped
from tests.tiny_models import VOCAB_SIZE, tiny_model


@pytest.fixture(scope="module")
def model():
    return wrapped()


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    return trained_once(model, tmp_path_factory)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def command(checkpoint, capsys, monkeypatch, tmp_path):
    """`layerskip train`, refused in one line before a text is written: the line."""
    monkeypatch.chdir(tmp_path)

    def run(*words, model=checkpoint):
        code = main(["train", str(model), "--tokens", "1280", "--dtype", "float32", *map(str, words)])
        out, err = capsys.readouterr()
        assert (code, out) == (2, "") and err.splitlines()[0].startswith("error: "), err
        assert not list(tmp_path.glob("**/texts.jsonl"))
        return err

    return run


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_models_of_any_dtype(dtype, precision, tmp_path):
    plan = train_exit(wrapped(dtype), some_texts(), tmp_path / "exit", replace(SMALL, precision=precision))
    assert np.isfinite(plan.provenance["curve"][-1]["loss"])


class TestTwoAtOnce:
    def test_a_second_thread_is_refused(self, model, tmp_path):
        refusals = []

        def second():
            for work in (
                lambda: train_exit(model, some_texts(), tmp_path, SMALL),
                lambda: train_layerskip(model.hf_model, None, some_texts(), tmp_path, RECIPE),
                lambda: train_draft_model(model, some_texts(), tmp_path, DRAFT),
                lambda: write_texts(model, WRITING, tmp_path),
            ):
                try:
                    work()
                except SettingError as error:
                    refusals.append(str(error))

        with held_folder(tmp_path), held_folder(tmp_path / "."):  # within itself, nothing changes
            thread = threading.Thread(target=second)
            thread.start()
            thread.join()
        assert len(refusals) == 4 and all("another process or thread is training" in each for each in refusals)
        assert [each.name for each in tmp_path.iterdir()] == [".training.lock"]
        train_exit(model, some_texts(), tmp_path, SMALL)  # and now it may

    def test_the_command_keeps_others_out_while_it_writes(self, checkpoint, monkeypatch, tmp_path, capsys):
        seen = []

        def write(*_, **__):
            def other():
                with pytest.raises(SettingError), held_folder(tmp_path / "out"):
                    pass
                seen.append("refused")

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            raise InputError("enough")

        monkeypatch.setattr("layerskip.training.write_texts", write)
        assert main(["train", str(checkpoint), "--out", str(tmp_path / "out")]) == 2
        assert seen == ["refused"] and "enough" in capsys.readouterr().err


class TestFolders:
    def test_of_another_recipe(self, model, tmp_path):
        train_exit(model, some_texts(), tmp_path / "exit", SMALL)
        train_layerskip(model.hf_model, None, some_texts(), tmp_path / "recipe", RECIPE)
        for resume in (False, True):
            with pytest.raises(SettingError, match="another recipe"):
                train_layerskip(model.hf_model, None, some_texts(), tmp_path / "exit", RECIPE, resume=resume)
            with pytest.raises(SettingError, match="another recipe"):
                train_exit(model, some_texts(), tmp_path / "recipe", SMALL, resume=resume)
            with pytest.raises(SettingError, match="another recipe"):
                train_draft_model(model, some_texts(), tmp_path / "exit", DRAFT, resume=resume)
        with pytest.raises(SettingError, match="for a run that was begun with"):
            train_draft_model(model, some_texts(), tmp_path / "recipe", DRAFT, resume=True)

    @pytest.mark.parametrize("name", ["plan.json", "adapter.safetensors"])
    @pytest.mark.parametrize("resume", [False, True])
    def test_with_somebody_elses_plan(self, model, tmp_path, name, resume):
        (tmp_path / name).write_text("precious")
        with pytest.raises(SettingError, match=f"holds {name} of something else"):
            train_exit(model, some_texts(), tmp_path, SMALL, resume=resume)
        assert (tmp_path / name).read_text() == "precious"

    def test_of_a_model_of_another_dtype(self, trained):
        with pytest.raises(SettingError, match="got dtype='torch.float64' .* begun with 'torch.float32'"):
            train_exit(wrapped(torch.float64), some_texts(), trained[1], SMALL, resume=True)

    def test_that_cannot_be(self, model, tmp_path):
        (tmp_path / "file").write_text("")
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        for name in ("file", "file/sub", "loop", "nul\0", "x" * 300):
            for work in (
                lambda out: train_exit(model, some_texts(), out, SMALL),
                lambda out: train_layerskip(model.hf_model, None, some_texts(), out, RECIPE),
                lambda out: train_draft_model(model, some_texts(), out, DRAFT),
                lambda out: write_texts(model, WRITING, out),
            ):
                with pytest.raises(LayerSkipError, match="Check|expected a folder"):
                    work(f"{tmp_path}/{name}")

    def test_the_command_says_so_in_one_line(self, command, tmp_path):
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        (tmp_path / "plan").mkdir()
        (tmp_path / "plan" / "plan.json").write_text("{}")
        for out, said in (("loop", "loop"), ("nul\0", "null byte"), ("plan", "of something else"), ("", "--out")):
            assert said in command("--out", out)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--num-blocks", "5"], "5 of its own"),
        (["--recipe", "adapter", "--exit-layer", "4"], "behind 4 blocks"),
        (["--text-tokens", "100"], "Ask for more by --text-tokens"),
        (["--text-tokens", "1000", "--held-out-rows", "7"], "expected 8 rows or more"),
        (["--offsets", "160"], "got offsets=160 for rows of 160 tokens"),
        (["--learning-rate", "0"], "above 0"),
        (["--recipe", "layerskip", "--learning-rate", "0"], "above 0"),
        (["--recipe", "layerskip", "--lora-rank", "33"], "got lora_rank=33"),
        (["--recipe", "draft-model", "--layers", "4"], "expected from 1 to 3"),
        (["--begin-with", "p.json", "--recipe", "adapter", "--no-state"], "beside --no-state"),
        (["--begin-with", "p.json", "--recipe", "layerskip"], "beside --recipe layerskip"),
    ],
)
def test_refused_before_texts_are_written(command, words, said):
    assert said in command("--out", "draft", *words)


def test_blocks_to_begin_with_are_refused_before_texts_are_written(command, trained, tmp_path):
    """Of another model, and damaged."""
    plan, folder = trained
    for name in ("plan.json", "adapter.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert "plan" in command("--out", "draft", "--begin-with", "plan.json", model=save_tiny(tmp_path / "o", "qwen3"))
    replace(DraftPlan.load("plan.json"), target=None).save("plan.json")
    (tmp_path / "adapter.safetensors").write_bytes(b"nonsense")
    assert "cannot read the adapter" in command("--out", "draft", "--begin-with", "plan.json")


@pytest.mark.parametrize("name", ["lm_head", "model.layers.1.mlp.up_proj"])
@pytest.mark.parametrize("how", ["wrapped", "hooked"])
def test_the_recipe_refuses_linears_that_are_none(tmp_path, name, how):
    hf_model = copy.deepcopy(tiny_model("llama", dtype=torch.float32))
    parent, _, own = name.rpartition(".")
    if how == "wrapped":
        setattr(hf_model.get_submodule(parent), own, WrappedLinear(hf_model.get_submodule(name)))
    else:
        hf_model.get_submodule(name).register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(UnsupportedModelError, match="plain"):
        train_layerskip(hf_model, None, some_texts(), tmp_path / "out", RECIPE)
    assert not (tmp_path / "out").exists()


def test_a_generation_config_that_cannot_be_written_is_known_at_once(tmp_path):
    model = wrapped()
    model.hf_model.generation_config.num_return_sequences = 3
    with pytest.raises(UnsupportedModelError, match="refuses to write"):
        check_layerskip(model.hf_model, tmp_path / "out", RECIPE, False)


def test_a_vocabulary_without_room_for_the_ends(tmp_path):
    model = wrapped(eos_token_id=[2, 5, 7])
    with pytest.raises(SettingError, match="expected 3 or more"):
        check_exit(model, tmp_path, replace(SMALL, vocabulary_size=2), None, False, 16)


@pytest.mark.parametrize(
    "config",
    [{"num_beams": 4}, {"guidance_scale": 1.5}, {"temperature": 0.0}, {"top_p": 0.0},
     {"penalty_alpha": 0.6, "top_k": 4}, {"forced_eos_token_id": 2}, {"max_length": 5, "min_length": 3}],
)  # fmt: skip
def test_what_else_a_generation_config_asks_for(config, tmp_path):
    model = wrapped(eos_token_id=[2, 7], **config)
    assert ends_of(model) == (2, 7)
    texts = write_texts(model, WRITING, tmp_path / "texts")
    assert texts.digest() == write_texts(wrapped(eos_token_id=[2, 7]), WRITING, tmp_path / "plain").digest()


def test_a_long_curve_is_thinned():
    curve = [{"step": step} for step in range(1, 1000)]
    short = thinned(curve)
    assert len(short) == 200 and (short[0], short[-1]) == (curve[0], curve[-1])
    steps = [point["step"] for point in short]
    assert steps == sorted(set(steps)) and thinned(curve[:200]) == curve[:200]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_within_a_block_without_gradients(model, tmp_path, mode):
    with mode():
        plan = train_exit(model, some_texts(), tmp_path / "exit", SMALL)
        train_layerskip(model.hf_model, None, some_texts(), tmp_path / "recipe", RECIPE)
        train_draft_model(model, some_texts(), tmp_path / "draft", DRAFT)
    assert plan.provenance["curve"]


def test_arguments_of_wrong_types(model, tmp_path):
    texts = some_texts()
    for arguments, options, error in (
        ((model, texts.tokens, tmp_path), {}, InputError),
        ((model.hf_model, texts, tmp_path), {}, InputError),
        ((model, texts, 5), {}, SettingError),
        ((model, texts, ""), {}, SettingError),
        ((model, texts, tmp_path, {"tokens": 5}), {}, SettingError),
        ((model, texts, tmp_path, RECIPE), {}, SettingError),
        ((model, texts, tmp_path, SMALL), {"begin_with": "plan.json"}, SettingError),
    ):
        with pytest.raises(error, match="expected"):
            train_exit(*arguments, **options)
    for arguments in ((model, None, texts, tmp_path), (model.hf_model, None, texts, tmp_path, SMALL)):
        with pytest.raises((InputError, SettingError), match="expected"):
            train_layerskip(*arguments)
    for arguments, error in (
        ((model.hf_model, WRITING, tmp_path), InputError),
        ((model, None, tmp_path), SettingError),
        ((model, WRITING, None), SettingError),
    ):
        with pytest.raises(error, match="expected"):
            write_texts(*arguments)
    with pytest.raises(CheckpointError, match="cannot read texts from None"):
        TrainingTexts.load(None, VOCAB_SIZE)
    with pytest.raises(InputError, match="expected arrays"):
        TrainingTexts([[1, 2]], [[True, True]])
    with pytest.raises(SettingError, match="reads_state"):
        ExitSettings(reads_state=1)
    assert not list(tmp_path.iterdir())
