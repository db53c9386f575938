"""What the programs of this folder share: an argument's type, and how they end.

An error that the project words itself is one line and exit code 2.
"""

from __future__ import annotations

import math
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable

from layerskip.errors import LayerSkipError

__all__ = ["amount", "exit_code"]


def exit_code(run: Callable[[], None], shorter: str, kept: str = "nothing was written") -> int:
    """Call `run`; 0, or what a shell expects of a program that failed (2) or was interrupted (130).

    Args:
        shorter: the options that make it take less time.
        kept: what an interrupted program leaves.
    """
    try:
        run()
    except LayerSkipError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted: {kept}; {shorter} make it shorter.", file=sys.stderr)
        return 130
    return 0


def amount(text: str) -> float:
    """An argument that is a number from 0.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"got {text!r}; expected a number from 0")
    return value
