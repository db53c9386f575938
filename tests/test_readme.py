"""The README's commands do what it says: its blocks are run as a reader would run them."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
# Beside other work on the machine, torch's threads wait for each other: two are many times slower than one.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def commands(program: str) -> list[str]:
    lines = [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines()]
    return [line for line in lines if line.startswith(program + " ")]


def test_blocks_are_found():
    """A typo in a fence would silence all other tests here."""
    assert len(blocks("python")) == 1
    assert len(commands("make")) == 4
    assert len(commands("layerskip")) == 7


def test_no_figure_is_left_open():
    """Placeholders that a measurement was to fill in."""
    assert not re.findall(r"@[A-Z_]+@", README)


@pytest.mark.parametrize("command", commands("make"))
def test_make_targets_exist(command):
    done = subprocess.run(
        ["make", "--dry-run", *shlex.split(command, comments=True)[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_linked_files_exist(name):
    assert (ROOT / name).exists()


@pytest.mark.smollm2
def test_python_block(reference_checkpoint):
    code = blocks("python")[0].replace("path-or-hub-id", str(reference_checkpoint))
    done = subprocess.run([sys.executable, "-c", code], env=ONE_THREAD, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([1, " in done.stdout
    assert done.stderr == ""


@pytest.mark.smollm2
def test_shell_commands(reference_checkpoint, tmp_path):
    """In order and in one folder: later ones use what earlier ones wrote."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in commands("layerskip"):
        if " search " in command:  # the same, in less time
            assert "--budget 10m" in command
            small = "--positions 64 --held-out-positions 32 --frequency-positions 32 --new-tokens 16 --no-measure"
            command = command.replace("--budget 10m", f"--budget '2 trials' {small} --draft-length 2")
        if " train " in command:
            np.savez(tmp_path / "texts.npz", tokens=np.arange(8 * 128).reshape(8, 128))
            command += " --texts texts.npz --tokens 1024 --batch-tokens 256"
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env={**ONE_THREAD, "PATH": path}, capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert done.stdout or "--out" in command or command.startswith("export")
