"""`layerskip generate`: decode one prompt, streaming, or as one JSON object; or a file of prompts (`batch.py`)."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from layerskip.cli import batch
from layerskip.cli.options import (
    add_decoding_options,
    add_loading_options,
    add_plan_options,
    decoding_settings,
    draft_plan,
    load_model,
)
from layerskip.cli.records import as_inputs, result_record
from layerskip.cli.terminal import has_colours, make_console, note, show_stream, summary
from layerskip.errors import InputError, SettingError

__all__ = ["add_parser"]

EXAMPLES = """\
examples:
  layerskip generate --model HuggingFaceTB/SmolLM2-135M-Instruct --chat --assistant-early-exit 20 "Why is the sky blue?"
  echo "Once upon a time" | layerskip generate --model ./checkpoint --do-sample --temperature 0.8 --seed 1
  layerskip generate --model ./checkpoint --plan plan.json --chat --input prompts.jsonl --output results.jsonl
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "generate",
        usage="layerskip generate --model PATH_OR_HUB_ID [OPTIONS] [PROMPT]",
        help="decode a prompt, or a file of them",
        description="Decode a prompt, drafting as the plan says (without one: plainly). The text goes to standard "
        "output as it\nappears, with accepted drafts in colour on a terminal; a line of statistics goes to standard "
        "error.",
        epilog=EXAMPLES,
    )
    parser.add_argument("prompt", nargs="?", help="taken as it is; if left out, read from standard input")
    parser.add_argument("--model", required=True, metavar="PATH_OR_HUB_ID", help="the checkpoint")
    add_loading_options(parser.add_argument_group("loading"))
    group = parser.add_argument_group("input and output")
    group.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="put the prompt as a user's message into the checkpoint's chat template (default: no)",
    )
    group.add_argument("--system", metavar="TEXT", help="with --chat: the system's message")
    group.add_argument(
        "--json", action="store_true", help="one JSON object instead of streamed text (not with --input)"
    )
    batch.add_options(group)
    add_plan_options(parser.add_argument_group("drafting"))
    add_decoding_options(parser.add_argument_group("decoding"))
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.system is not None and not options.chat:
        raise SettingError("got --system without --chat, where it has no effect; pass --chat too.")
    if options.input is not None:
        return batch.run(options)
    batch.refuse_without_input(options)
    plan = draft_plan(options)
    prompt = options.prompt if options.prompt is not None else _read_prompt()
    model = load_model(options)
    if options.chat is None and getattr(model.tokenizer, "chat_template", None):
        note("the prompt is continued as it is; --chat has the model answer it (--no-chat silences this line)")
    call = {"plan": plan, "seed": options.seed, **decoding_settings(options)}
    inputs = as_inputs(prompt, options.chat, options.system)
    if options.json:
        result = model.generate(inputs, **call)
        print(json.dumps({"model": options.model, **result_record(result)}))
    else:
        stream = model.stream(inputs, **call)
        show_stream(stream)
        result = stream.result
        legend = " (underlined)" if has_colours(make_console()) and result.stats.accepted else ""
        print(summary(result.stats, result.finish_reasons[0]) + legend, file=sys.stderr)
    return 0


def _read_prompt() -> str:
    """Standard input without the line's end that `echo` and editors put behind it."""
    if sys.stdin.isatty():
        note("reading the prompt from standard input; end it with Ctrl-D")
    try:
        prompt = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InputError(f"got standard input that is not {error.encoding}: {error}. Pass text.") from error
    return prompt.removesuffix("\n").removesuffix("\r")
