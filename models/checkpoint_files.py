"""Find the files of a checkpoint, fetch them from the hub, and refuse what is missing, damaged or unsafe to read.

Nothing here builds a model: a damaged 100 GB checkpoint is refused by its headers, in milliseconds. It does not know
which architectures or dtypes are supported (`loading.py`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from layerskip.errors import CheckpointError, LayerSkipError, SettingError, UnsupportedModelError

__all__ = [
    "COPY_AGAIN",
    "HUB_ID",
    "Source",
    "check_gguf",
    "check_gguf_extra",
    "explained",
    "locate",
    "one_line",
    "read_json_config",
    "some",
    "weight_files",
]

SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"  # where sharded, an index named so + ".index.json"
PLAIN_DTYPES = {"BF16", "F16", "F32", "F64"}  # as safetensors names them
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)  # "name" or "owner/name"; no path upwards, no "~"
SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]  # of a repository: all but weights and code
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
COPY_AGAIN = "If the file is cut off or damaged (or a git-lfs pointer), download or copy it again."


@dataclass(frozen=True)
class Source:
    """Where a checkpoint's files are; for a hub repository, `folder` is the local snapshot of one commit."""

    name: str  # as the user gave it
    folder: Path
    gguf: Path | None = None
    on_hub: bool = False

    def has_tokenizer(self) -> bool:
        """Whether the folder has any of a tokenizer's files, be they whole or not; not for GGUF (`check_gguf`)."""
        return any((self.folder / name).is_file() for name in TOKENIZER_FILES)


def locate(
    checkpoint: str | os.PathLike[str], gguf_file: str | None, revision: str | None, with_code: bool = False
) -> Source:
    """Return where the files are; of a hub repository, fetch all but the weights (or the GGUF file, if one is named).

    Raises:
        CheckpointError: there is no such folder, file or repository.
        SettingError: a revision of something that is not on the hub.
    """
    name = os.fspath(checkpoint)
    folder = Path(name).expanduser()
    if gguf_file is None and folder.suffix == ".gguf" and not folder.is_dir():
        folder, gguf_file = folder.parent, folder.name
    if name and folder.is_dir():
        if revision is not None:
            raise SettingError(f"got revision={revision!r} and the local folder {name!r}; a revision needs a hub id.")
        return Source(name, folder, _gguf_in(folder, gguf_file))
    if folder.is_file():
        raise CheckpointError(f"got the file {name!r}; expected the folder that holds it, or a .gguf file.")
    if not isinstance(checkpoint, str) or not HUB_ID.fullmatch(name):
        raise CheckpointError(
            f"got {name!r}: there is no such folder, and it is not in the form of a hub id ('owner/name'). "
            "Check the path."
        )
    folder = _fetch(name, revision, [gguf_file] if gguf_file else SMALL_FILES + ["*.py"] * with_code)
    return Source(name, folder, _gguf_in(folder, gguf_file), on_hub=True)


def read_json_config(source: Source) -> dict[str, Any]:
    """Return config.json as it is written."""
    file = source.folder / "config.json"
    if (source.folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{source.name!r} holds an adapter (adapter_config.json); expected whole weights. Merge it with peft's "
            "merge_and_unload() and save the result."
        )
    if not file.is_file():
        raise CheckpointError(
            f"no config.json in {source.name!r}; it holds {_listing(source.folder)}. Expected a folder as "
            "save_pretrained writes it; for a GGUF file, pass its name as gguf_file."
        )
    # transformers passes over a broken generation_config.json, and with it over the checkpoint's own end-of-text ids.
    generation_config = source.folder / "generation_config.json"
    if generation_config.is_file():
        _read_json_object(generation_config)
    return _read_json_object(file)


def _read_json_object(file: Path) -> dict[str, Any]:
    content = _read_json(file)
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a JSON {type(content).__name__}; expected an object. {COPY_AGAIN}")
    return content


def weight_files(source: Source, *, allow_pickled: bool, quantised: bool) -> list[Path]:
    """Return the weight files, fetched and whole: all safetensors, or (if allowed and there are none) all pickled.

    Raises:
        CheckpointError: a file is missing or damaged, or there are only pickled ones and they are not allowed.
        UnsupportedModelError: weights stored as integers or the like, in a checkpoint that is not `quantised`.
    """
    files = _listed(source, SAFETENSORS)
    for file in files:
        _check_safetensors(file, quantised)
    if not files and allow_pickled:
        files = _listed(source, PICKLED)
    if not files:
        raise CheckpointError(
            f"no {SAFETENSORS} (nor its index) in {source.name!r}; it holds {_listing(source.folder)}. Pickled weights "
            f"({PICKLED}) can run any code when they are read: pass allow_pickled_weights=True if you trust their "
            "origin. For a GGUF file, pass its name as gguf_file."
        )
    return files


def check_gguf_extra() -> None:
    """Refuse to go on without the packages that reading a GGUF file takes."""
    missing = [package for package in ("gguf", "accelerate") if not find_spec(package)]
    if missing:
        raise CheckpointError(f'reading a GGUF file needs {" and ".join(missing)}: pip install "layerskip[gguf]"')


def check_gguf(file: Path) -> bool:
    """Return whether a GGUF file holds a tokenizer; refuse one that transformers would read in part only."""
    from gguf import GGUFReader

    with explained(f"read the GGUF file {file}", COPY_AGAIN):
        reader = GGUFReader(file)
    unread = [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_freqs")]
    unread += [key for key in reader.fields if key.endswith("rope.scaling.type")]
    if unread:
        raise UnsupportedModelError(
            f"{file} scales its rotary embedding ({some(unread)}), which transformers does not read from GGUF: the "
            "model would not be the one that was stored. Use the checkpoint in safetensors."
        )
    return "tokenizer.ggml.tokens" in reader.fields


@contextmanager
def explained(action: str, advice: str) -> Iterator[None]:
    """Turn any failure in the block into a CheckpointError that says what could not be done and what to do.

    Damaged files and the network raise almost any type, so all are taken but two: our own errors, which say it
    already, and lack of memory, which is not the checkpoint's fault.
    """
    try:
        yield
    except (LayerSkipError, MemoryError, torch.OutOfMemoryError):
        raise
    except BaseException as error:
        # The libraries written in Rust (tokenizers, safetensors) panic with a type of their own that is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"cannot {action}: {type(error).__name__}: {one_line(error)} {advice}") from error


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return a library's message as one sentence of at most about `limit` characters."""
    text = " ".join((str(error) or repr(error)).split())
    return f"{text[:limit]}…" if len(text) > limit else text.rstrip(".") + "."


def some(names: list[str], limit: int = 5) -> str:
    """Return the first names of a list that may be long."""
    return ", ".join(names[:limit]) + f" and {len(names) - limit} more" * (len(names) > limit)


def _gguf_in(folder: Path, gguf_file: str | None) -> Path | None:
    if gguf_file is None:
        return None
    if not (folder / gguf_file).is_file():
        raise CheckpointError(f"no GGUF file {gguf_file!r} in {folder}; it holds {_listing(folder)}. Check the name.")
    check_gguf_extra()
    return (folder / gguf_file).absolute()


def _fetch(repository: str, revision: str | None, patterns: list[str]) -> Path:
    """Return a snapshot's folder, after downloading what of it is not yet in the hub's cache."""
    with explained(
        f"get {repository!r} from the hub",
        "Expected a folder on this machine or a repository that can be reached and read. Check the spelling, the "
        "revision and the network; for a gated repository, log in with `hf auth login`.",
    ):
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))


def _listed(source: Source, name: str) -> list[Path]:
    """The file `name`, or the shards that its index lists, all of them present; empty where there is neither."""
    index = source.folder / f"{name}.index.json"
    names = _shard_names(index) if index.is_file() else [name]
    if source.on_hub:
        _fetch(source.name, source.folder.name, names)  # the folder of a snapshot is named after its commit
    missing = [each for each in names if not (source.folder / each).is_file()]
    if missing and index.is_file():
        raise CheckpointError(
            f"{len(missing)} of the {len(names)} weight files that {index} lists are missing: {some(missing)}. "
            "Download or copy them again."
        )
    return [] if missing else [source.folder / each for each in names]


def _shard_names(index: Path) -> list[str]:
    listed = _read_json(index)
    with explained(f"find the weight files listed in {index}", COPY_AGAIN):
        return sorted(set(listed["weight_map"].values()))


def _read_json(file: Path) -> Any:
    with explained(f"read {file}", COPY_AGAIN):
        return json.loads(file.read_text(encoding="utf-8"))


def _check_safetensors(file: Path, quantised: bool) -> None:
    """Read the header alone: it says how long the file has to be, and each tensor's dtype."""
    try:
        with safe_open(file, framework="pt") as tensors:
            weights = [key for key in tensors.keys() if key.endswith(".weight")]
            stored = {tensors.get_slice(key).get_dtype() for key in weights}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read {file} as safetensors: {one_line(error)} {COPY_AGAIN}") from error
    if not quantised and not stored <= PLAIN_DTYPES:
        raise UnsupportedModelError(
            f"{file} stores weights as {some(sorted(stored - PLAIN_DTYPES))}, and no quantization_config tells "
            f"how to read them; expected {some(sorted(PLAIN_DTYPES))}. Use the checkpoint it was made from."
        )


def _listing(folder: Path) -> str:
    return some(sorted(path.name for path in folder.iterdir())) or "nothing"
