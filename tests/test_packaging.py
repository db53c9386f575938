"""What is installed: every package once, under its one name, with its types and its command."""

from __future__ import annotations

import ast
import importlib.metadata
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = PYPROJECT["tool"]["setuptools"]["packages"]


def run_python(code: str, cwd: Path) -> str:
    # Without PYTHONPATH: what is imported has to be what is installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def module_files() -> list[str]:
    """All modules, at the place that their import name says, which may be behind a link."""
    return [
        (Path(folder) / file).relative_to(ROOT).as_posix()
        for folder, _, files in os.walk(ROOT / "layerskip", followlinks=True)
        for file in sorted(files)
        if file.endswith(".py")
    ]


def declared_dependencies() -> set[str]:
    """Names of all direct dependencies, those of the extras too. All of them are imported by that same name."""
    project = PYPROJECT["project"]
    requirements = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    return {re.split(r"[\[<>=~! ]", requirement)[0].lower() for requirement in requirements} - {"layerskip"}


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names of all files in a wheel that is built from a copy, so that no build folder is left in the checkout."""
    copy = tmp_path_factory.mktemp("copy")
    for name in ["pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"]:
        shutil.copy(ROOT / name, copy)
    for name in ["layerskip", "models", "search"]:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    run_python(f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})", cwd=copy)
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_declared_packages_are_those_on_disk() -> None:
    folders = {Path(file).parent for file in module_files()}
    missing = [str(folder) for folder in folders if not (ROOT / folder / "__init__.py").is_file()]
    assert missing == [], "folders with Python files and no __init__.py"
    assert sorted(".".join(folder.parts) for folder in folders) == sorted(PACKAGES)


@pytest.mark.parametrize("name", ["models", "search"])
def test_links_are_relative_and_lead_to_the_mapped_folder(name: str) -> None:
    link = ROOT / "layerskip" / name
    assert link.is_symlink(), f"{link} must be a link; on Windows, clone with core.symlinks=true"
    assert Path(os.readlink(link)) == Path("..", name)
    assert PYPROJECT["tool"]["setuptools"]["package-dir"][f"layerskip.{name}"] == name


def test_packages_import_from_anywhere_under_one_name(tmp_path: Path) -> None:
    code = """
import importlib.util, sys
import layerskip.models, layerskip.search
print([name for name in ("models", "search") if name in sys.modules or importlib.util.find_spec(name)])
print(layerskip.__file__)
"""
    second_names, location = run_python(code, cwd=tmp_path).splitlines()
    assert second_names == "[]"
    assert Path(location).resolve() == ROOT / "layerskip" / "__init__.py", "another layerskip is installed"


def test_version_is_readable() -> None:
    assert importlib.metadata.version("layerskip") == PYPROJECT["project"]["version"]


def test_console_script_exists() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="layerskip")
    assert script.value == "layerskip.cli:main"
    assert callable(script.load())


def test_every_third_party_import_is_declared() -> None:
    imported = {
        name.split(".")[0]
        for path in module_files()
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    third_party = imported - set(sys.stdlib_module_names) - {"layerskip"}
    assert sorted(third_party - declared_dependencies()) == []


def test_constraints_pin_every_direct_dependency() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0].lower() for line in lines if "==" in line and not line.startswith("#")}
    assert sorted(declared_dependencies() - pinned) == []


def test_wheel_holds_every_module_once_and_nothing_else(wheel_files: list[str]) -> None:
    modules = [name for name in wheel_files if name.endswith(".py")]
    assert sorted(modules) == sorted(module_files())
    others = {name for name in wheel_files if not name.startswith(("layerskip/", "layerskip-"))}
    assert others == set()


def test_wheel_ships_the_types_marker_and_the_license(wheel_files: list[str]) -> None:
    assert "layerskip/py.typed" in wheel_files
    assert any(name.endswith("licenses/LICENSE") for name in wheel_files)
