"""The draft plan as a file: its format, what is read of somebody else's, and where a draft model it names may lie.

A plan file can be moved, together with what lies beside it, and is read without trust: nothing but a small regular file
is, and the draft model it names is a hub id or inside its folder. It does not know what a plan means (`plan.py`).
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerskip.errors import PlanError
from layerskip.identity import ModelIdentity
from layerskip.models.checkpoint_files import HUB_ID

if TYPE_CHECKING:
    from layerskip.plan import DraftPlan

__all__ = ["from_dict", "load", "save", "to_dict"]

_FORMAT, _VERSION = "layerskip-plan", 1
_LARGEST_FILE = 4 * 2**20  # bytes; a plan with a long provenance takes some ten thousand


def to_dict(plan: DraftPlan) -> dict[str, Any]:
    """`DraftPlan.to_dict`."""
    if not isinstance(plan.draft_model, (str, type(None))):
        raise PlanError(
            f"got a plan whose draft model is a loaded {type(plan.draft_model).__name__}; expected its path or hub "
            "id: make the plan with DraftPlan.model('path')."
        )
    return {"format": _FORMAT, "version": _VERSION, **asdict(plan)}


def from_dict(plan_class: type[DraftPlan], content: Any) -> DraftPlan:
    """`DraftPlan.from_dict`."""
    if not isinstance(content, dict):
        raise PlanError(f"got a {type(content).__name__}; expected a JSON object that holds a draft plan.")
    if "format" not in content and {"attention", "mlp"} & content.keys() and content.keys() <= {"attention", "mlp"}:
        return plan_class.skip(**content)
    if content.get("format") != _FORMAT:
        raise PlanError(
            f"got an object with format {content.get('format')!r} and the keys {sorted(content)[:8]}; expected "
            f"format {_FORMAT!r}, or bare lists under 'attention' and 'mlp'."
        )
    if content.get("version") != _VERSION:
        raise PlanError(
            f"got a plan of version {content.get('version')!r}; this layerskip reads version {_VERSION}. "
            "Install the version that wrote it, or write the plan anew."
        )
    values = {name: value for name, value in content.items() if name not in ("format", "version")}
    if values.get("target") is not None:
        values["target"] = ModelIdentity.from_dict(values["target"])
    return plan_class.of(values)


def save(plan: DraftPlan, path: str | os.PathLike[str]) -> None:
    """`DraftPlan.save`: the file appears whole or not at all, and a failure leaves nothing else behind."""
    file = _as_path(path)
    adapter = None if plan.adapter is None else _inside(plan.adapter, "an adapter", file.parent, follow=False)
    content = to_dict(replace(plan, draft_model=_portable(plan.draft_model, file.parent), adapter=adapter))
    try:
        text = json.dumps(content, indent=2) + "\n"
    except (TypeError, ValueError) as error:
        raise PlanError(f"got a plan whose provenance cannot be written as JSON: {error}.") from error
    try:
        # A folder, because a file made by tempfile could be read by nobody else.
        with tempfile.TemporaryDirectory(prefix=".layerskip-", dir=file.parent) as folder:
            scratch = Path(folder) / file.name
            scratch.write_text(text, encoding="utf-8")
            os.replace(scratch, file)
    except (OSError, ValueError) as error:
        raise PlanError(f"cannot write the plan {file}: {_reason(error)}. Check the path.") from error


def load(plan_class: type[DraftPlan], path: str | os.PathLike[str]) -> DraftPlan:
    """`DraftPlan.load`."""
    file = _as_path(path)
    data = _read(file)
    try:
        plan = from_dict(plan_class, json.loads(data.decode("utf-8")))
        adapter = None if plan.adapter is None else _beside(plan.adapter, file.parent)
        return replace(plan, draft_model=_resolved(plan.draft_model, file.parent), adapter=adapter)
    except PlanError as error:
        raise type(error)(f"{file}: {error}") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, nested too deep, an endless number
        raise PlanError(f"got {file}, which is not JSON ({error}); expected a draft plan.") from error


def _as_path(path: Any) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise PlanError(f"got {path!r} as the path of a plan; expected a string or a path.")
    return Path(path)


def _read(file: Path) -> bytes:
    try:
        status = file.stat()
        if stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST_FILE:
            return file.read_bytes()
    except (OSError, ValueError) as error:
        raise PlanError(f"cannot read the plan {file}: {_reason(error)}. Check the path.") from error
    if not stat.S_ISREG(status.st_mode):  # reading a device might never end
        raise PlanError(f"cannot read the plan {file}: it is not a regular file. Check the path.")
    raise PlanError(
        f"got {file}, {status.st_size:,} bytes; a plan has at most {_LARGEST_FILE:,}. Is it another kind of file?"
    )


def _reason(error: OSError | ValueError) -> object:
    """In words, without the path; a ValueError is of a name that no file can have."""
    return getattr(error, "strerror", None) or error


def _portable(draft_model: Any, folder: Path) -> Any:
    """The form in which a plan file in `folder` names the draft model."""
    if not isinstance(draft_model, str):
        return draft_model
    place = Path(draft_model).expanduser()
    if HUB_ID.fullmatch(draft_model) and not place.exists():
        return draft_model
    return _inside(draft_model, "a draft model", folder)


def _inside(path: str, what: str, folder: Path, follow: bool = True) -> str:
    """The form in which a plan file in `folder` names what lies beside it; links are followed, or taken as they are."""
    inside, folder = (each.resolve() if follow else _plain(each) for each in (Path(path).expanduser(), folder))
    if not inside.is_relative_to(folder):
        raise PlanError(
            f"got {what} at {path}, outside the plan's folder {folder}; a plan file can be moved only with what it "
            f"needs beside it. Save the plan into the parent folder of {what}"
            + (", or name a hub id." if what == "a draft model" else ".")
        )
    return "./" + inside.relative_to(folder).as_posix()


def _resolved(draft_model: Any, folder: Path) -> Any:
    """What a plan file means by its draft model: a hub id (``owner/name``), or a path inside its own folder."""
    if draft_model is None:
        return None
    if not isinstance(draft_model, str) or not draft_model.strip():
        raise PlanError(f"got a plan with draft_model={draft_model!r}; expected a path or hub id.")
    if HUB_ID.fullmatch(draft_model):
        return draft_model
    inside = (folder / draft_model).resolve()
    if Path(draft_model).is_absolute() or not inside.is_relative_to(folder.resolve()):
        raise PlanError(
            f"got a draft model at {draft_model!r}, outside the plan's folder; a plan file may only name a hub "
            "id or a folder beside it ('./name'). Pass DraftPlan.model(path) from code if you trust that path."
        )
    return str(inside)


def _beside(name: str, folder: Path) -> str:
    """The path of the file that a plan file in `folder` names.

    By its name: in the hub's cache such files are links that lead out of the folder.
    """
    inside, folder = _plain(folder / name), _plain(folder)
    if Path(name).is_absolute() or inside == folder or not inside.is_relative_to(folder):
        raise PlanError(
            f"got an adapter at {name!r}, outside the plan's folder; a plan file may only name a file beside it "
            "('./name')."
        )
    return str(inside)


def _plain(path: Path) -> Path:
    """Absolute and without detours, with links as they are."""
    return Path(os.path.normpath(path.absolute()))
