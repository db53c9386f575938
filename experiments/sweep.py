"""Where does each way to draft stop paying: at which batch, context, temperature, or number of drafts?

    python -m experiments.sweep batch --model "$(layerskip reference)" --data questions.jsonl --out by-batch \\
        --trained layerskip/cli/demo_plan/plan.json --arms trained,lookup,combined --values 1,2,4,8,16,32
    python -m experiments.sweep drafts --model moe-1b --exit 12 --agreement 0.9 --arms exit --out by-drafts
    python -m experiments.sweep batch --report-from by-batch        # the report again, from its lines only

At each value all arms (those of experiments.compare) take turns, in one process, on the same weights and prompts; each
is compared with plain decoding in the same turn. A batch has as many different prompts of the data as there are, and
then some twice; a prompt of a given context is one behind as many other texts of the data as make up its length.
Random weights are given random ids. A sweep of drafts is without the governor. DIR/runs.jsonl gets a line a run, with
every condition; an interrupted sweep goes on with --resume. From these lines alone sweep.png, theory.png (predicted
beside measured) and sweep.md are made. An arm that fails at a value, and a value that does not fit into memory or time
(--budget), is a line that says why.
"""

from __future__ import annotations

import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from experiments.arm_rows import ArmRow, Workshop, name_of
from experiments.compare import add_arm_options, draft_model_digest, given_settings, plan_digest, plans_of, setting
from experiments.compare_arms import ARMS, PLAIN
from experiments.conditions import conditions
from experiments.program import amount, exit_code
from experiments.questions import read_questions
from experiments.run_lines import RunLog
from experiments.subjects import RANDOM, Subject, device_of
from experiments.sweep_kinds import KINDS, Kind, Setup, settings_of, values_of
from experiments.sweep_prompts import Prompts, RandomIds, Texts
from experiments.sweep_report import MARKDOWN, write_report
from experiments.sweeping import RUN_KEY, Sweep, obstacle
from layerskip.cli.parser import Parser, positive
from layerskip.errors import InputError, SettingError
from layerskip.models.loading import parse_dtype
from layerskip.models.synthetic import GEOMETRIES

__all__ = ["main"]

RECORDED = ("new_tokens", "prompts", "repeats", "budget", "raw", "exit", "agreement", "values")


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep and report; an error that the project words itself is one line and exit code 2."""
    options = _options(arguments)
    kept = "the lines are kept, and --resume goes on behind them"
    return exit_code(lambda: _run(options), "--values, --prompts, --repeats and --budget", kept)


def _run(options: Namespace) -> None:
    folder = options.report_from
    if folder is None:
        folder = options.out
        _sweep(options)
    write_report(folder)
    print((folder / MARKDOWN).read_text(encoding="utf-8"))
    print(f"{folder / 'sweep.png'}")


def _sweep(options: Namespace) -> None:
    torch.set_num_threads(options.threads)
    kind, explicit = KINDS[options.sweep], options.values is not None
    options.values = values_of(options.sweep, options.values)
    setup = _setup(options, kind)
    dtype = parse_dtype(options.dtype)
    if not isinstance(dtype, torch.dtype):
        raise SettingError(f"got --dtype {options.dtype}; expected a dtype, the same for us and for the others.")
    if kind.governor is not None and options.governor not in (None, kind.governor):
        raise SettingError(
            f"got --governor {options.governor} for a sweep of {options.sweep}, which is of how much is drafted; "
            f"expected {kind.governor}. Leave it out."
        )
    governor = kind.governor or options.governor or "measured"
    rows = {name: ARMS[name] for name in dict.fromkeys((PLAIN, *options.arms))}
    given = given_settings(options, rows)
    if kind.field == "drafts":
        _refuse_without_drafts(rows)
    planted = options.exit if options.agreement is not None else None
    subject = Subject(options.model, dtype, device_of(options.device), options.agreement, planted)
    plans = plans_of(options)
    model = subject.load()
    for plan in plans.values():
        model.check_plan(plan)
    shop = Workshop(subject, model, plans, options.draft_model, governor, setup.decoding)
    for name, row in rows.items():
        if kind.field != "temperature":  # at some temperatures an arm may do what it cannot at others
            row.check(name, shop)
    source, content = _source(options, shop)
    for value in () if options.resume else options.values if explicit else options.values[:1]:
        why = obstacle(shop, source, replace(setup, **{kind.field: value}), options.new_tokens)
        if why is not None:  # of the usual values such are left out, if any remains
            raise SettingError(
                f"got a sweep of {options.sweep} with the value {value:g}, but {why}; expected smaller --values, "
                "--batch, --context or --new-tokens."
            )
    log = RunLog(options.out, conditions(model, content), options.resume, RUN_KEY)
    console = Console(stderr=True)
    with console.status("") as status:
        sweep = Sweep(
            shop, log, kind, rows, given, setup, options.values, source, options.new_tokens, options.prompts,
            options.repeats, options.budget, status.update,
        )  # fmt: skip
        sweep.run({
            "sweep": options.sweep,
            "model": name_of(options.model),
            "data": RANDOM if subject.is_geometry else name_of(options.data),
            "arms": list(rows),
            "settings": given,
            "plans": {name: plan_digest(plan) for name, plan in plans.items()},
            "draft_model": draft_model_digest(options.draft_model),
            "governor": governor,
            "setup": vars(setup),
            "too_long": source.too_long if isinstance(source, Texts) else 0,
            **{name: getattr(options, name) for name in RECORDED},
        })  # fmt: skip


def _setup(options: Namespace, kind: Kind) -> Setup:
    """The conditions that are not swept, as the options give them."""
    given = {name: getattr(options, name) for name in ("batch", "context", "temperature")}
    given = {name: value for name, value in given.items() if value is not None}
    if kind.field in given:
        raise SettingError(f"got --{kind.field} for a sweep of {kind.field}; expected --values. Leave it out.")
    return Setup(**given)


def _refuse_without_drafts(rows: Mapping[str, ArmRow]) -> None:
    for name, row in rows.items():
        if name != PLAIN and not settings_of(row, 1):
            raise SettingError(
                f"got the arm {name} for a sweep of drafts, which has no number of them; expected arms that draft. "
                "Leave it out."
            )


def _source(options: Namespace, shop: Workshop) -> tuple[Prompts, list[str]]:
    """Where prompts come from, and what they are."""
    if shop.subject.is_geometry:
        if options.data is not None:
            raise SettingError(
                f"got --data for the random weights {options.model}, which have no tokenizer; expected none: they are "
                "given random ids, --context of them."
            )
        return RandomIds(shop.model.decoder.vocab_size), [RANDOM]
    if options.data is None:
        raise InputError(f"got no --data for the checkpoint {name_of(options.model)}; expected questions in words.")
    questions = read_questions(options.data)
    most = shop.model.decoder.max_positions - options.new_tokens
    return Texts(questions, shop.model.tokenizer, most, options.raw), [repr(each) for each in questions]


def _options(arguments: Sequence[str] | None) -> Namespace:
    parser = Parser(prog="python -m experiments.sweep", description=__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add("sweep", choices=KINDS, help="what is swept")
    add("--model", help=f"checkpoint folder or hub id, or one of {', '.join(GEOMETRIES)}")
    add("--data", help="questions as JSON lines (Spec-Bench's, HumanEval's, prompts); of random weights none")
    add("--out", type=Path, metavar="DIR", help="where lines, pictures and table go")
    add("--values", metavar="N,N", help="of what is swept (default: as many as the model and this machine take)")
    add_arm_options(parser)
    add("--batch", type=positive, help="rows decoded at once, where that is not swept (default: 1)")
    add("--context", type=positive, help="tokens of each prompt, where that is not swept (default: as they are)")
    add("--temperature", type=amount, help="where that is not swept (default: 0, greedy)")
    add("--governor", choices=("measured", "fixed", "off"), help="of our arms (default: measured)")
    add("--agreement", type=amount, help="from 0 to 1, planted into random weights behind --exit, or their half")
    add("--set", type=setting, action="append", default=[], metavar="ARM.NAME=VALUE", help="a setting of an arm")
    add("--prompts", type=positive, default=3, help="calls of different prompts at each value (%(default)s)")
    add("--repeats", type=positive, default=2, help="of each of them (%(default)s)")
    add("--new-tokens", type=positive, default=128)
    add("--budget", type=amount, metavar="SECONDS", help="of a value, all told; what takes longer is cut or left out")
    add("--raw", action="store_true", help="prompts as they are, not as a chat")
    add("--dtype", default="bfloat16")
    add("--device", default="cpu")
    add("--threads", type=positive, default=2)
    add("--resume", action="store_true", help="go on behind the lines in --out")
    add("--report-from", type=Path, metavar="DIR", help="only write the report of the lines in DIR")
    options = parser.parse_args(arguments)
    if options.report_from is None:
        missing = [name for name in ("model", "out") if getattr(options, name) is None]
        if missing:
            parser.error(f"got no --{missing[0]}; expected --model and --out (or --report-from).")
        if options.arms is None:
            options.arms = ["lookup"] + [name for name in ("trained", "exit") if getattr(options, name) is not None]
    return options


if __name__ == "__main__":
    sys.exit(main())
