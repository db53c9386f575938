"""A file of prompts to a file of results, one JSON value a line each.

All lines are read before the model is loaded, and all prompts are tokenised before the first is decoded, so that a
broken line costs no time. A result is written as one line in one write when it is complete: whatever ends the run
leaves whole lines, and `--resume` goes on behind them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerskip.cli.options import CONFIG_OPTIONS, decoding_settings, draft_plan, given, load_model
from layerskip.cli.progress import Progress
from layerskip.cli.records import PromptLine, as_inputs, read_prompts, result_record
from layerskip.cli.terminal import note
from layerskip.errors import InputError, LayerSkipError, SettingError

if TYPE_CHECKING:
    from layerskip.api import Model
    from layerskip.plan import DraftPlan

__all__ = ["add_options", "refuse_without_input", "run"]

Write = Callable[[str], None]

_BEGIN = b'{"line": '  # of every result
_ADVICE = "Name another --output, or resume the run that it belongs to."


def add_options(parser: Any) -> None:
    """Where prompts come from and results go."""
    parser.add_argument(
        "--input",
        type=Path,
        metavar="FILE",
        help='prompts, one a line: a JSON string, or an object with "prompt", "messages" or "turns" (of which the '
        'first is used), and an "id" if you like',
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="results, one JSON object a line (default: stdout)")
    parser.add_argument("--resume", action="store_true", help="go on behind the results that the output file holds")


def refuse_without_input(options: argparse.Namespace) -> None:
    """Refuse the options that mean something for a file of prompts only."""
    idle = [name for name in ("output", "resume") if getattr(options, name)]
    if idle:
        raise SettingError(f"got --{idle[0]} without --input, where it has no effect; pass a file of prompts too.")


def run(options: argparse.Namespace) -> int:
    """Decode all prompts of ``--input``."""
    if options.prompt is not None:
        raise SettingError("got both a prompt and --input; expected one of them.")
    if options.json:
        raise SettingError("got --json with --input, whose results are JSON lines anyway; leave out --json.")
    if options.resume and options.output is None:
        raise SettingError("got --resume without --output; name the file of results to go on with.")
    plan, prompts = draft_plan(options), read_prompts(options.input)
    _check(prompts, options)
    recorded = _recorded(options, plan)
    with _results(options, prompts, recorded) as (num_done, write):
        if num_done == len(prompts):
            note(f"all {num_done} results are there already")
            return 0
        model = load_model(options)
        inputs = _tokenised(prompts, model, plan, options)
        call = {"plan": plan, **decoding_settings(options)}
        with Progress(len(prompts), num_done, visible=options.output is not None) as progress:
            for index in range(num_done, len(prompts)):
                seed = None if options.seed is None else options.seed + index
                with _naming(prompts[index], options.input):
                    result = model.generate(inputs[index], seed=seed, **call)
                record = {**prompts[index].to_dict(), **result_record(result), "options": recorded}
                write(json.dumps(record) + "\n")
                progress.advance(result.stats)
    return 0


def _check(prompts: list[PromptLine], options: argparse.Namespace) -> None:
    if any(prompt.has_turns for prompt in prompts):
        note('of lines with "turns" only the first turn is answered')
    with_messages = next((prompt for prompt in prompts if not isinstance(prompt.content, str)), None)
    if options.system is not None and with_messages is not None:
        raise SettingError(
            f"got --system, but line {with_messages.number} of {options.input} has messages, which bring their own "
            "system message if they want one. Leave out --system."
        )


def _tokenised(
    prompts: list[PromptLine], model: Model, plan: DraftPlan | None, options: argparse.Namespace
) -> list[list[int]]:
    """Token ids of every prompt, each of which the model can decode."""
    rows = []
    for prompt in prompts:
        inputs = as_inputs(prompt.content, options.chat, options.system)
        with _naming(prompt, options.input):
            rows += model.check(inputs, plan=plan, **decoding_settings(options)).prompts
    return rows


@contextmanager
def _naming(prompt: PromptLine, file: Path) -> Iterator[None]:
    """Let errors say which line they are about."""
    try:
        yield
    except LayerSkipError as error:
        raise type(error)(f"line {prompt.number} of {file}: {error}") from error


@contextmanager
def _results(
    options: argparse.Namespace, prompts: list[PromptLine], recorded: dict[str, Any]
) -> Iterator[tuple[int, Write]]:
    """How many results are there already, and how to write one more."""
    if options.output is None:
        yield 0, _print
        return
    file: Path = options.output
    if file.is_file() and file.stat().st_size and not options.resume:
        raise SettingError(
            f"got --output {file}, which exists. Remove it, name another file, or pass --resume to go on behind the "
            "results it holds."
        )
    with file.open("ab", buffering=0) as output:
        num_done = _num_done(file, prompts, recorded) if options.resume else 0
        yield num_done, lambda line: _write(line, output)


def _write(line: str, output: Any) -> None:
    """In one call of the operating system, which a signal does not divide."""
    content = line.encode()
    if output.write(content) != len(content):
        raise OSError(f"cannot write to {output.name}: the disk is full. Free some space and pass --resume.")


def _print(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


def _recorded(options: argparse.Namespace, plan: DraftPlan | None) -> dict[str, Any]:
    """What every result says about the call that made it, and what a call that resumes must have in common with it."""
    calling = given(options, ("model", *CONFIG_OPTIONS, "chat", "system", "seed"))
    recorded = {**calling, **decoding_settings(options), "plan": plan.to_dict() if plan is not None else None}
    return dict(json.loads(json.dumps(recorded)))  # as it reads when it comes back: lists for tuples


def _num_done(file: Path, prompts: list[PromptLine], recorded: dict[str, Any]) -> int:
    """Count the results in `file`, after making sure that they are the first of this run, and cut off half a line."""
    content = file.read_bytes()
    whole, end, half = content.rpartition(b"\n")
    records = whole.split(b"\n") if whole else []
    if not half.startswith(_BEGIN[: len(half)]):
        raise InputError(f"the last line of {file} is not a result of this command. {_ADVICE}")
    if len(records) > len(prompts):
        raise InputError(f"got {len(records)} results in {file} for {len(prompts)} prompts. Are they of another run?")
    for number, (record, prompt) in enumerate(zip(records, prompts, strict=False), start=1):
        _check_same_run(f"line {number} of {file}", record, prompt, recorded)
    if half:
        with file.open("r+b") as output:
            output.truncate(len(whole) + len(end))
    return len(records)


def _check_same_run(where: str, line: bytes, prompt: PromptLine, recorded: dict[str, Any]) -> None:
    try:
        record = json.loads(line)
        options = record["options"]
        same_prompt = {name: record.get(name) for name in prompt.to_dict()} == prompt.to_dict()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{where} is not a result of this command. {_ADVICE}") from error
    if not same_prompt:
        raise InputError(f"{where} is the result of another prompt than line {prompt.number} of the input. {_ADVICE}")
    for name in sorted(options.keys() | recorded.keys()):
        if options.get(name) != recorded.get(name):
            raise SettingError(
                f"{where} was made with {name}={options.get(name)!r}, this run has {recorded.get(name)!r}. {_ADVICE}"
            )
