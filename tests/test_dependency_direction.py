"""Dependencies point one way, `models <- layerskip <- search <- layerskip.cli, experiments`; nothing grows too long."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ["models", "layerskip", "search", "layerskip/cli", "experiments"]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80


def source_files(folder: str) -> list[Path]:
    """All Python files of a layer's folder. What inside layerskip/ is a layer of its own is left out."""
    others = [ROOT / "layerskip" / name for name in ("models", "search", "cli") if folder == "layerskip"]
    return sorted(
        path for path in (ROOT / folder).rglob("*.py") if not any(path.is_relative_to(other) for other in others)
    )


def imported_names(source: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported, wherever it stands in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, "." * node.level + f"{node.module or ''}.{alias.name}"


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def is_forbidden(layer: str, name: str) -> bool:
    """Whether a file of ``layer`` must not import ``name``."""
    if name.startswith(".") or within(name, "models", "search"):
        return True  # relative, or the same files under a second name
    if layer == "models":
        return within(name, "layerskip", "experiments") and not within(name, "layerskip.errors", "layerskip.models")
    if layer == "layerskip/cli":  # the command line stands on all that can be installed
        return within(name, "experiments")
    if layer == "layerskip":
        return within(name, "layerskip.search", "experiments")
    if layer == "search":
        return within(name, "experiments")
    return False


def too_long_functions(source: str) -> Iterator[tuple[int, str, int]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield node.lineno, node.name, lines


@pytest.mark.parametrize("layer", [*LAYERS, "tests"])
def test_imports_point_one_way(layer: str) -> None:
    files = source_files(layer)
    offences = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files
        for line, name in imported_names(path.read_text(encoding="utf-8"))
        if is_forbidden(layer, name)
    ]
    assert files or layer == "experiments"
    assert offences == []


@pytest.mark.parametrize("layer", LAYERS)
def test_files_and_functions_stay_short(layer: str) -> None:
    offences = []
    for path in source_files(layer):
        source = path.read_text(encoding="utf-8")
        name = path.relative_to(ROOT)
        lines = len(source.splitlines())
        if lines > MAX_FILE_LINES:
            offences.append(f"{name} has {lines} lines, at most {MAX_FILE_LINES}")
        for line, function, length in too_long_functions(source):
            offences.append(f"{name}:{line} {function} has {length} lines, at most {MAX_FUNCTION_LINES}")
    assert offences == []


@pytest.mark.parametrize(
    ("layer", "source", "forbidden"),
    [
        ("models", "from layerskip.errors import InputError", False),
        ("models", "from layerskip.models.families import Family", False),
        ("models", "from layerskip import models", False),
        ("models", "import layerskip", True),
        ("models", "from layerskip.verify import verify", True),
        ("models", "def f():\n    from layerskip import search", True),
        ("layerskip", "from layerskip.models import Decoder", False),
        ("layerskip", "import layerskip.search.study as study", True),
        ("layerskip", "if TYPE_CHECKING:\n    from layerskip.search import Study", True),
        ("layerskip", "import layerskip.search_terms", False),
        ("layerskip/cli", "from layerskip.search import find_plan", False),
        ("layerskip/cli", "from experiments import bench", True),
        ("search", "from layerskip.plan import DraftPlan", False),
        ("search", "from experiments import bench", True),
        ("search", "from search.space import Space", True),
        ("search", "from .space import Space", True),
        ("experiments", "from layerskip.search.study import run", False),
        ("experiments", "import models.families", True),
        ("tests", "import models", True),
    ],
)
def test_the_guard_itself(layer: str, source: str, forbidden: bool) -> None:
    assert any(is_forbidden(layer, name) for _, name in imported_names(source)) is forbidden


def test_the_length_guard_itself() -> None:
    body = "    pass\n" * (MAX_FUNCTION_LINES - 1)
    assert list(too_long_functions("def f():\n" + body)) == []
    assert list(too_long_functions("class A:\n  def f(self):\n" + body + "    pass\n")) == [
        (2, "f", MAX_FUNCTION_LINES + 1)
    ]
