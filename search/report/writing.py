"""Write a report, and read one back: a folder that holds the whole new report, or still the whole old one."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerskip.errors import PlanError, SearchError
from layerskip.search.report.gallery import PICTURES, hang
from layerskip.search.report.page import fill_page
from layerskip.search.report.tables import without_password
from layerskip.search.result import SearchResult
from layerskip.search.trained import with_adapter_beside

__all__ = ["read_report", "write_report"]

PAGE, DATA, PLAN, ADAPTER = "report.html", "report.json", "plan.json", "adapter.safetensors"
# The page comes last: whoever finds the new page finds the rest.
FILES = (*(f"{name}.{kind}" for name in PICTURES for kind in ("svg", "png")), ADAPTER, PLAN, DATA, PAGE)


def write_report(result: SearchResult, folder: Path) -> Path:
    """Write `report.html`, `report.json`, `plan.json` and the pictures (SVG and PNG) into `folder`, which is made.

    The trained blocks of a plan that has some are copied beside it. Other files of the folder stay. The same result
    gives the same bytes. JSON has no endless numbers: they are null.

    Returns:
        The page, which needs none of the other files.

    Raises:
        SearchError: matplotlib is missing, the plan's trained blocks are not where they were, or the files cannot be
            written; what was there before is still whole.
    """
    folder = Path(folder)
    result = replace(result, storage=without_password(result.storage))
    pictures = hang(result)
    page = fill_page(result, pictures)
    data = json.dumps(_as_json(result.to_dict()), indent=1, allow_nan=False) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Inside the folder, for renaming works only within one file system.
        with tempfile.TemporaryDirectory(prefix=".report-", dir=folder) as made:
            new, old = Path(made) / "new", Path(made) / "old"
            new.mkdir()
            old.mkdir()
            for picture in pictures.values():
                if picture.drawing is not None:
                    (new / f"{picture.name}.svg").write_bytes(picture.drawing.svg)
                    (new / f"{picture.name}.png").write_bytes(picture.drawing.png)
            with_adapter_beside(result.plan, new / PLAN, ADAPTER).save(new / PLAN)
            (new / DATA).write_text(data, encoding="utf-8", newline="\n")
            (new / PAGE).write_text(page, encoding="utf-8", errors="backslashreplace", newline="\n")
            _exchange(folder, new, old)
    except (OSError, PlanError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise SearchError(
            f"cannot write the search's report into {folder}: {reason}. Expected a folder that can be written to, with "
            "some megabytes free; name another one. A report that was there before is unchanged."
        ) from error
    return folder / PAGE


def read_report(folder: Path) -> dict[str, Any]:
    """What `SearchResult.to_dict` gave for the report in `folder`, as JSON values.

    Raises:
        SearchError: there is no report, or its data cannot be read.
    """
    file = Path(folder) / DATA
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise SearchError(
            f"cannot read the search's report {file}: {reason}. Expected what a search has written; name its folder."
        ) from error
    missing = sorted(SearchResult.__dataclass_fields__.keys() - content) if isinstance(content, dict) else ["an object"]
    if missing:
        raise SearchError(
            f"got {file}, which lacks {', '.join(missing)}; expected the report.json that a search of this version "
            "has written. Write the report anew."
        )
    return dict(content)


def _exchange(folder: Path, new: Path, old: Path) -> None:
    """Put the new files in the place of the old ones: all, or, when anything fails or is interrupted, none."""
    before = [name for name in FILES if (folder / name).exists()]
    for name in before:
        shutil.copy2(folder / name, old / name)
    try:
        for name in FILES:
            if (new / name).exists():
                os.replace(new / name, folder / name)
            else:
                (folder / name).unlink(missing_ok=True)
    except BaseException:
        _restore(folder, old, before)
        raise


def _restore(folder: Path, old: Path, before: Iterable[str]) -> None:
    kept = set(before)
    for name in FILES:
        if name in kept:
            os.replace(old / name, folder / name)
        else:
            (folder / name).unlink(missing_ok=True)


def _as_json(value: Any) -> Any:
    """Values that any JSON reader takes: no endless numbers, and text for what JSON does not know."""
    if isinstance(value, dict):
        return {str(name): _as_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
