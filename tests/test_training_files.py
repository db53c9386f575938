"""Files of a training that are damaged, or cannot be written: one line each, which names the file."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import layerskip
from layerskip.errors import CheckpointError, InputError, SettingError
from layerskip.models.adapter import Adapter, AdapterSpec
from layerskip.models.adapter_file import load_adapter, save_adapter
from layerskip.training import (
    TrainingTexts,
    train_exit,
    train_layerskip,
    write_texts,
)
from layerskip.training import exit as exit_module
from layerskip.training.folder import CHECKPOINT
from layerskip.training.loop import _save
from tests.small_training import RECIPE, SMALL, WRITING, some_texts, trained_once, wrapped
from tests.tiny_models import VOCAB_SIZE, tiny_model
from tests.toy_tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def model():
    return wrapped()


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    return trained_once(model, tmp_path_factory)


class TestTexts:
    def test_of_a_tokenizer_that_is_another_models(self, tmp_path):
        with pytest.raises(InputError, match="got a tokenizer that writes token id .* model's 60"):
            write_texts(layerskip.wrap(tiny_model("llama"), byte_tokenizer()), WRITING, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_own_tokens_in_the_first_column_only(self, model, tmp_path):
        """No token stands before them that could learn to say them."""
        texts = some_texts()
        texts.is_own[:, 1:] = False
        with pytest.raises(SettingError, match="none of the model's own"):
            train_exit(model, texts, tmp_path, SMALL)

    def test_one_row_is_too_few(self):
        with pytest.raises(SettingError, match="1 row; expected two or more.* Add more"):
            some_texts(rows=1).split(1, seed=0)

    def test_more_offsets_than_a_row_has(self, model, tmp_path):
        train_exit(model, some_texts(), tmp_path / "most", replace(SMALL, offsets=15, first_offset_share=0.0))
        with pytest.raises(SettingError, match="got offsets=16 for rows of 16"):
            train_exit(model, some_texts(), tmp_path / "more", replace(SMALL, offsets=16))

    def test_an_archive_that_no_reader_understands(self, tmp_path, monkeypatch):
        some_texts().save(tmp_path / "texts.npz")
        for error in (RuntimeError("encrypted"), NotImplementedError(), OverflowError("int"), MemoryError()):

            def load(*_, error=error, **__):
                raise error

            monkeypatch.setattr(np, "load", load)
            with pytest.raises(CheckpointError, match="cannot read texts from .*texts.npz: .+Expected an .npz"):
                TrainingTexts.load(tmp_path / "texts.npz", VOCAB_SIZE)

    def test_saved_where_a_folder_is(self, tmp_path):
        (tmp_path / "folder").mkdir()
        with pytest.raises(OSError):
            some_texts().save(tmp_path / "folder")
        assert [each.name for each in tmp_path.iterdir()] == ["folder"]

    @pytest.mark.parametrize(
        "line",
        ['{}', '{"tokens": "abc", "answer_from": 1}', '{"tokens": [1, 99999999999], "answer_from": 1}',
         '{"tokens": [1, 5000], "answer_from": 1}', '{"tokens": [1, 5.5], "answer_from": 1}',
         '{"tokens": [1], "answer_from": 2}', '{"tokens": [1], "answer_from": null}'],
    )  # fmt: skip
    def test_a_line_that_is_no_text(self, model, tmp_path, line):
        write_texts(model, WRITING, tmp_path)
        lines = (tmp_path / "texts.jsonl").read_text().splitlines()
        (tmp_path / "texts.jsonl").write_text("\n".join([lines[0], line, *lines[2:]]) + "\n")
        with pytest.raises(CheckpointError, match="as a text in .*texts.jsonl.* Remove the file"):
            write_texts(model, WRITING, tmp_path)

    @pytest.mark.parametrize("around", [5, [], [["a"], []], [[1], [5000]], {"1": 2}])
    def test_a_first_line_that_is_damaged(self, model, tmp_path, around):
        write_texts(model, WRITING, tmp_path)
        first, rest = (tmp_path / "texts.jsonl").read_text().split("\n", 1)
        (tmp_path / "texts.jsonl").write_text(json.dumps(json.loads(first) | {"around": around}) + "\n" + rest)
        with pytest.raises(SettingError, match="holds other things than texts"):
            write_texts(model, WRITING, tmp_path)
        (tmp_path / "texts.jsonl").write_text("[" * 100_000 + "\n")
        with pytest.raises(SettingError, match="holds other things than texts"):
            write_texts(model, WRITING, tmp_path)


def damage_shape(saved):
    name = next(iter(saved["parameters"]))
    saved["parameters"][name] = saved["parameters"][name][..., :1]


@pytest.mark.parametrize(
    "damage",
    [
        damage_shape,
        lambda saved: saved["parameters"].popitem(),
        lambda saved: saved["optimizer"]["state"].popitem(),
        lambda saved: saved["optimizer"]["state"][0].update(exp_avg=torch.zeros(1)),
        lambda saved: saved.update(optimizer={}),
        lambda saved: saved.update(step=99),
        lambda saved: saved.update(step="a"),
        lambda saved: saved.update(curve=[]),
        lambda saved: saved.update(seconds=None),
        lambda saved: saved.update(made_for=[1]),
        lambda saved: saved.pop("format"),
    ],
)
def test_a_checkpoint_that_is_not_whole(model, trained, tmp_path, damage):
    saved = torch.load(trained[1] / CHECKPOINT, weights_only=True)
    damage(saved)
    torch.save(saved, tmp_path / CHECKPOINT)
    with pytest.raises(CheckpointError, match="cannot read the checkpoint .*damaged.* begin anew"):
        train_exit(model, some_texts(), tmp_path, SMALL, resume=True)


class TestAdapterFiles:
    def test_a_description_that_is_damaged(self, model, trained, tmp_path):
        plan, folder = trained
        content = (folder / "adapter.safetensors").read_bytes()
        size = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:size])
        for described in ('{"exit_layer": Infinity, "num_blocks": 1, "reads_state": true}', "[" * 100_000, "[]",
                          '{"exit_layer": 0, "num_blocks": "1", "reads_state": true}',
                          '{"exit_layer": 0, "num_blocks": 1, "reads_state": "no"}'):  # fmt: skip
            header["__metadata__"]["adapter"] = described
            written = json.dumps(header).encode()
            (tmp_path / "a").write_bytes(len(written).to_bytes(8, "little") + written + content[size:])
            with pytest.raises(CheckpointError, match="its description is damaged"):
                load_adapter(tmp_path / "a", model.hf_model, torch.float32)

    def test_the_same_adapter_is_the_same_file(self, model, tmp_path):
        adapter = Adapter(model.hf_model, AdapterSpec(1))
        for index in range(8):
            save_adapter(adapter, tmp_path / str(index), torch.float32)
        assert len({each.read_bytes() for each in tmp_path.iterdir()}) == 1


class TestFullDisks:
    """Every file that is written is named, with what to do."""

    @staticmethod
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    def test_the_adapter(self, model, tmp_path, monkeypatch):
        monkeypatch.setattr(exit_module, "save_adapter", self.full)
        with pytest.raises(CheckpointError, match=r"cannot write .*adapter.safetensors: No space left.*--resume"):
            train_exit(model, some_texts(), tmp_path, SMALL)
        monkeypatch.undo()
        train_exit(model, some_texts(), tmp_path, SMALL, resume=True)

    def test_the_first_checkpoint_and_a_later_one(self, model, trained, tmp_path, monkeypatch):
        monkeypatch.setattr(torch, "save", self.full)
        for begun in (False, True):
            with pytest.raises(CheckpointError, match="checkpoint.pt: No space left on device. Make room") as caught:
                _save(tmp_path / CHECKPOINT, {})
            assert ("the one from before is as it was" in str(caught.value)) == begun
            (tmp_path / CHECKPOINT).write_text("")

    def test_the_tokenizer_and_the_model(self, model, tmp_path):
        def full(*_, **__):
            raise Exception("No space left on device (os error 28)")  # tokenizers' own

        with pytest.raises(CheckpointError, match="cannot write .*No space left"):
            train_layerskip(
                model.hf_model, SimpleNamespace(save_pretrained=full), some_texts(), tmp_path / "out", RECIPE
            )
        hf_model = copy.deepcopy(model.hf_model)
        hf_model.save_pretrained = full
        with pytest.raises(CheckpointError, match="cannot write .*No space left"):
            train_layerskip(hf_model, None, some_texts(), tmp_path / "two", RECIPE)

    def test_the_texts(self, model, tmp_path, monkeypatch):
        generate, opened = model.generate, Path.open
        monkeypatch.setattr(model, "generate", lambda *given, **options: fill() or generate(*given, **options))

        def fill():
            monkeypatch.setattr(Path, "open", lambda *given, **_: self.full() if "a" in given else opened(*given))

        with pytest.raises(CheckpointError, match=r"cannot write .*texts.jsonl: No space left.*--resume"):
            write_texts(model, WRITING, tmp_path)
