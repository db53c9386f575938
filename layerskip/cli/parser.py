"""argparse with our manner of reporting errors: what was got, what was expected, and a near miss if there is one."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from layerskip.errors import did_you_mean

__all__ = ["Parser", "layer_numbers", "positive"]


class Parser(argparse.ArgumentParser):
    """A parser that takes options by their whole name only, and suggests names for those it does not know."""

    def __init__(self, **options: Any) -> None:
        """See `argparse.ArgumentParser`."""
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what is unknown here, where the names that are known are at hand."""
        arguments = sys.argv[1:] if args is None else list(args)
        self._refuse_unknown_options(arguments)
        parsed, unknown = super().parse_known_args(arguments, namespace)
        if unknown:
            self.error(f"got {' '.join(unknown)!r} beyond what {self.prog!r} takes. Put a prompt into quotes.")
        return parsed, unknown

    def _refuse_unknown_options(self, arguments: list[str]) -> None:
        """Before anything else: what a misspelt option was to say will be missing, and that is the lesser news."""
        for argument in arguments:
            if argument == "--" or (self._subparsers is not None and not argument.startswith("-")):
                return  # behind it come a prompt, or the arguments of a command
            option = argument.split("=")[0]
            if option.startswith("--") and option not in self._option_string_actions:
                self.error(f"got the unknown option {option}.{did_you_mean(option, self._option_string_actions)}")

    def error(self, message: str) -> NoReturn:
        """Print one line and where to read on; exit with 2."""
        self.exit(2, f"error: {message}\nSee `{self.prog} --help`.\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse, with a suggestion."""
        choices: Iterable[Any] | None = action.choices
        if choices is not None and value not in choices:
            named = [str(choice) for choice in choices]
            raise argparse.ArgumentError(
                action, f"got {value!r}; expected one of {', '.join(named)}.{did_you_mean(str(value), named)}"
            )


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        width = min(100, shutil.get_terminal_size().columns - 2)
        super().__init__(prog, max_help_position=30, width=width)

    def add_argument(self, action: argparse.Action) -> None:
        """As argparse, but commands are indented by two more than it makes room for."""
        super().add_argument(action)
        if action.nargs == argparse.PARSER:
            self._action_max_length += 2


def layer_numbers(text: str) -> tuple[int, ...]:
    """Read layers as a person lists them: ``3,5,7-9``."""
    layers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last) if dash else (first, first)
        are_numbers = all(end.isascii() and end.isdigit() and len(end) <= 4 for end in ends)
        if not are_numbers or int(ends[0]) > int(ends[1]):
            raise argparse.ArgumentTypeError(f"got {text!r}; expected layer numbers such as 3,5,7-9")
        layers += range(int(ends[0]), int(ends[1]) + 1)
    return tuple(layers)


def positive(text: str) -> int:
    """Read an integer from 1 to what fits into 32 bits."""
    if not (text.isascii() and text.isdigit() and len(text) < 12 and 1 <= int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected an integer of at least 1")
    return int(text)
