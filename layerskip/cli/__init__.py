"""The command line: `layerskip COMMAND …`, or `python -m layerskip.cli COMMAND …`.

    layerskip demo                          see it work
    layerskip generate --model M "prompt"   decode one prompt, or a file of them
    layerskip inspect M                     sizes, and what every exit would cost
    layerskip plan check PLAN M             whether a plan fits a model, and what it does
    layerskip reference                     the folder of the reference checkpoint

One file per command. What a person asked for goes to standard output, everything else to standard error. Exit codes: 0,
2 for whatever is wrong with the call or its files, 130 after Ctrl-C. torch and transformers take seconds to import:
the modules of this package do so only where a command runs.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

from layerskip.errors import LayerSkipError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; `arguments` are ``sys.argv[1:]`` if not given."""
    from layerskip.cli.commands import make_parser

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a model may write what the terminal's encoding lacks
            stream.reconfigure(errors="replace")
    try:
        options = make_parser().parse_args(arguments)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code: int = options.run(options)
            sys.stdout.flush()
        return code
    except SystemExit as stop:  # of the parser: --help, --version and errors
        return stop.code if isinstance(stop.code, int) else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return _end_quietly()
    except (LayerSkipError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _end_quietly() -> int:
    """Nobody reads standard output any more: leave it nowhere to complain when Python flushes it at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError:  # it is not a file
        pass
    return 128 + 13  # as a shell reports a program that a closed pipe has ended
