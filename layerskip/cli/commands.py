"""The table of commands. A new one is a file with `add_parser` and a line here."""

from __future__ import annotations

import importlib.metadata
import platform

from layerskip.cli.demo_command import add_parser as add_demo
from layerskip.cli.generate_command import add_parser as add_generate
from layerskip.cli.inspect_command import add_parser as add_inspect
from layerskip.cli.parser import Parser
from layerskip.cli.plan_command import add_parser as add_plan
from layerskip.cli.reference_command import add_parser as add_reference
from layerskip.cli.search_command import add_parser as add_search
from layerskip.cli.search_command import add_report_parser as add_search_report
from layerskip.cli.train_command import add_parser as add_train

__all__ = ["make_parser"]

COMMANDS = (add_generate, add_inspect, add_search, add_search_report, add_train, add_plan, add_reference, add_demo)


def make_parser() -> Parser:
    """The parser of the whole command line; what it returns has the chosen command's function as `run`."""
    parser = Parser(
        prog="layerskip",
        description="Self-speculative decoding: a checkpoint drafts for itself with fewer of its layers and checks "
        "the drafts\nwith all of them. The output is the model's own.",
    )
    parser.add_argument("--version", action="version", version=_versions(), help="print versions and exit")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for add_command in COMMANDS:
        add_command(subparsers)
    return parser


def _versions() -> str:
    versions = ", ".join(f"{package} {_version(package)}" for package in ("torch", "transformers"))
    return f"layerskip {_version('layerskip')} ({versions}, Python {platform.python_version()})"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
