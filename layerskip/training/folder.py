"""The folder of a training: one process at a time, one run, and nothing of anybody else's overwritten.

Nothing here knows what is trained.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from layerskip.errors import CheckpointError, LayerSkipError, SettingError

__all__ = ["CHECKPOINT", "LOCK", "STATE", "held_folder", "refuse_folder", "writing"]

CHECKPOINT = "checkpoint.pt"
STATE = "training"  # the folder of what resuming needs, where a run's folder is a model's
LOCK = ".training.lock"
_THIS_THREAD = threading.local()  # .held: folders that it has locked; a command does so before the functions it calls


@contextmanager
def held_folder(out: str | os.PathLike[str]) -> Iterator[Path]:
    """Make the folder `out` if there is none, and keep others out of it; gives its path without links.

    Within such a block of the same thread nothing changes.

    Raises:
        SettingError: another process or thread is at work there; `out` is no path.
        CheckpointError: the folder cannot be made or written to.
    """
    folder = folder_path(out)
    with writing(folder, "Check the path, and that it may be written to"):
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(20, "it is a file, and no folder")
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve()
    held: set[Path] = vars(_THIS_THREAD).setdefault("held", set())
    if folder in held:
        yield folder
        return
    lock = FileLock(folder / LOCK)
    try:
        with writing(folder / LOCK, "Check that the folder may be written to"):
            lock.acquire(timeout=0)
    except Timeout as error:
        raise SettingError(
            f"got the folder {folder}, in which another process or thread is training or writing texts. Wait for it, "
            "or name another folder."
        ) from error
    held.add(folder)
    try:
        yield folder
    finally:
        held.discard(folder)
        lock.release()


def refuse_folder(out: str | os.PathLike[str], state: str, results: Sequence[str], resume: bool) -> None:
    """Make sure that a run which keeps its checkpoint in `state` of `out` overwrites nothing there but its own.

    Args:
        state: "" or `STATE`.
        results: names of the files that it writes at its end.

    Raises:
        SettingError: there is a run that is not resumed, a run of another recipe, or a result without a run.
        CheckpointError: the folder cannot be looked at.
    """
    folder = folder_path(out)
    with writing(folder, "Check the path"):
        folder.resolve()  # raises for a loop of links, and for a name that no file can have
        own = (folder / state / CHECKPOINT).exists()
        other = (folder / ("" if state else STATE) / CHECKPOINT).exists()
        held = [name for name in results if os.path.lexists(folder / name)]
    if folder.exists() and not folder.is_dir():
        raise SettingError(f"got the folder {folder}, which is a file; expected a folder, or one to be made.")
    if other:
        raise SettingError(
            f"got the folder {folder}, which holds a run of another recipe. Resume it by that recipe, or name another "
            "folder."
        )
    if own and not resume:
        raise SettingError(
            f"got the folder {folder}, which holds a run that has begun. Resume it (--resume), or name another."
        )
    if held and not own:
        what = "a model" if "config.json" in held else f"{' and '.join(held)} of something else"
        raise SettingError(f"got the folder {folder}, which holds {what}; expected none. Name another folder.")


def folder_path(out: Any) -> Path:
    """`out` as a path; SettingError if it is none."""
    if not isinstance(out, str | os.PathLike) or not os.fspath(out):
        raise SettingError(f"got {out!r} as the folder to train in; expected the path of one.")
    return Path(out)


@contextmanager
def writing(file: Path, hint: str = "Make room, check the path, and resume (--resume)") -> Iterator[None]:
    """What fails in this block, of whatever library, is a CheckpointError that names `file` and what to do."""
    try:
        yield
    except (LayerSkipError, Timeout):
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise CheckpointError(f"cannot write {file}: {reason}. {hint}.") from error
