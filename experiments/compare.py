"""Which way to decode is fastest on this model and these texts, by how much, and why?

    python -m experiments.compare --model "$(layerskip reference)" --data questions.jsonl --out compared \\
        --trained layerskip/cli/demo_plan/plan.json --exit 6 --arms plain,trained,lookup,combined,hf-greedy,hf-lookup
    python -m experiments.compare --report-from compared            # the report again, from its lines only
    python -m experiments.compare --answers a.jsonl b.jsonl         # do two files of answers say the same?

Every other question of each category is for tuning: each arm that has settings is tried with a few of them there, and
then runs twice on the others, with its default and with its tuned settings. All arms take turns on each question, in
one process, on the same weights. DIR/runs.jsonl gets a line a run, with every condition; an interrupted comparison goes
on with --resume. From these lines alone DIR/report.html, report.md, the pictures and answers/ are made. An arm that
fails is a row that says why.

A plan of --trained or --plan is a file; the arms of the packages economize and flashspec need `layerskip[compare]`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from argparse import ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import layerskip
from experiments.arm_rows import ArmRow, Workshop, name_of
from experiments.compare_arms import ARMS, PLAIN, PLAN_FILES
from experiments.compare_report import MARKDOWN, PAGE, compare_answers, write_report
from experiments.comparing import Comparison, longest_prompt
from experiments.conditions import conditions
from experiments.program import exit_code
from experiments.questions import HUMAN_EVAL, Question, read_questions, split, spread
from experiments.run_lines import RunLog
from experiments.subjects import Subject, device_of
from layerskip.cli.parser import Parser, positive
from layerskip.errors import InputError, SettingError, did_you_mean
from layerskip.models.loading import parse_dtype
from layerskip.models.synthetic import GEOMETRIES

__all__ = ["add_arm_options", "draft_model_digest", "given_settings", "main", "plan_digest", "plans_of", "setting"]

RECORDED = ("new_tokens", "repeats", "per_category", "tuning_questions", "temperature", "governor", "raw", "exit")


_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")  # of a checkpoint


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and report; an error that the project words itself is one line and exit code 2."""
    options = _options(arguments)
    kept = "the lines are kept, and --resume goes on behind them"
    return exit_code(lambda: _run(options), "--per-category, --repeats and --arms", kept)


def _run(options: Namespace) -> None:
    if options.answers is not None:
        print(compare_answers(*options.answers))
        return
    folder = options.report_from
    if folder is None:
        folder = options.out
        _compare(options)
    write_report(folder)
    print((folder / MARKDOWN).read_text(encoding="utf-8"))
    print(f"{folder / PAGE}")


def _compare(options: Namespace) -> None:
    torch.set_num_threads(options.threads)
    dtype = parse_dtype(options.dtype)
    if not isinstance(dtype, torch.dtype):
        raise SettingError(f"got --dtype {options.dtype}; expected a dtype, the same for us and for the others.")
    if options.model in GEOMETRIES:
        raise SettingError(
            f"got the random weights {options.model}; expected a checkpoint, for questions are in words."
        )
    if options.temperature is not None and not 0 < options.temperature < 100:
        raise SettingError(
            f"got --temperature {options.temperature}; expected a number above 0. Leave it out for greedy."
        )
    subject = Subject(options.model, dtype, device_of(options.device))
    questions = read_questions(options.data)
    report, tuning = split(questions)
    report, tuning = spread(report, options.per_category), _to_tune_on(tuning, options.tuning_questions)
    rows = _rows(options)
    shop = Workshop(
        subject,
        model=subject.load(),
        plans=plans_of(options),
        draft_model=options.draft_model,
        governor=options.governor,
        decoding={"do_sample": False} if options.temperature is None
        else {"do_sample": True, "temperature": options.temperature},
    )  # fmt: skip
    for name, row in rows.items():
        row.check(name, shop)
    given = given_settings(options, rows)
    longest_prompt(shop.model, report, options.new_tokens, options.raw)  # before anything is written
    described = _described(options, rows, given, shop, questions)
    log = RunLog(options.out, conditions(shop.model, [repr(each) for each in report]), options.resume)
    console = Console(stderr=True)
    with console.status("") as status:
        comparison = Comparison(
            shop, log, rows, given, tuning, report, options.new_tokens, options.repeats, options.raw, options.gaps,
            status.update,
        )  # fmt: skip
        comparison.run(described)


def _to_tune_on(questions: Sequence[Question], count: int | None) -> list[Question]:
    """So many of the questions, as evenly over the categories as can be; None: one of each.

    Raises:
        SettingError: there are fewer.
    """
    if count is not None and count > len(questions):
        raise SettingError(
            f"got --tuning-questions {count}, and every other question of each category, which are those to tune on, "
            f"are {len(questions)}; expected at most as many."
        )
    return spread(questions, 1) if count is None else spread(questions, None)[:count]


def _described(options: Namespace, rows: Mapping[str, ArmRow], given: Mapping[str, Any], shop: Workshop,
               questions: Sequence[Question]) -> dict[str, Any]:  # fmt: skip
    """All that says what is compared, without the machine's own paths."""
    content = repr(list(questions)).encode()
    plans = {name: plan_digest(plan) for name, plan in shop.plans.items()}
    return {
        "model": name_of(options.model),
        "data": name_of(options.data),
        "data_sha256": hashlib.sha256(content).hexdigest()[:16],
        "arms": list(rows),
        "settings": given,
        "plans": plans,
        "draft_model": draft_model_digest(options.draft_model),
        **{name: getattr(options, name) for name in RECORDED},
    }


def plan_digest(plan: layerskip.DraftPlan) -> str:
    """What tells plans apart, without the machine's own paths: what they say, and what was trained for them."""
    fields = {name: value for name, value in vars(plan).items() if name not in ("provenance", "target", "adapter")}
    fields["draft_model"] = draft_model_digest(plan.draft_model) if isinstance(plan.draft_model, str) else None
    trained = None if plan.adapter is None else file_digest(Path(plan.adapter))
    return hashlib.sha256(repr((sorted(fields.items()), trained)).encode()).hexdigest()[:16]


def draft_model_digest(path: str | None) -> str | None:
    """What tells draft models apart, likewise: the name and, where it is on this machine, what its weights are."""
    if path is None or not Path(path).exists():
        return path
    place = Path(path)
    files = [place] if place.is_file() else [each for kind in _WEIGHTS for each in sorted(place.glob(kind))]
    return " ".join([place.name, *map(file_digest, files)])


def file_digest(file: Path) -> str:
    """Of a file's content."""
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()[:16]
    except OSError as error:
        raise InputError(
            f"got the weights {str(file)!r}, which cannot be read: {error.strerror or error}. Restore the file."
        ) from error


def _rows(options: Namespace) -> dict[str, ArmRow]:
    """The arms that are asked for, plain first; without --arms all of ours and transformers' that the options allow."""
    options_of_arms = (*PLAN_FILES, "exit", "draft-model")
    given = {name for name in options_of_arms if getattr(options, name.replace("-", "_")) is not None}
    names = options.arms
    if names is None:
        names = [
            name for name, row in ARMS.items()
            if (not row.needs or set(row.needs) & given) and not row.is_extra
        ]  # fmt: skip
    return {name: ARMS[name] for name in dict.fromkeys((PLAIN, *names))}


def plans_of(options: Namespace) -> dict[str, layerskip.DraftPlan]:
    """The plans that the options name, by the option.

    Raises:
        PlanError: a file is no plan.
        SettingError: one that is to have trained parts has none.
    """
    files = {name: getattr(options, name) for name in PLAN_FILES}
    plans = {name: layerskip.DraftPlan.load(file) for name, file in files.items() if file is not None}
    for name in sorted(plans.keys() - {"plan"}):
        if plans[name].adapter is None:
            raise SettingError(
                f"got --{name} with a plan without trained blocks or heads; expected one that `layerskip train` wrote."
            )
    return plans | ({} if options.exit is None else {"exit": layerskip.DraftPlan.exit(options.exit)})


def given_settings(options: Namespace, rows: Mapping[str, ArmRow]) -> dict[str, dict[str, Any]]:
    """Settings by arm, as --set gives them."""
    given: dict[str, dict[str, Any]] = {}
    for arm, name, value in options.set:
        if arm not in rows or arm == PLAIN:
            known = [each for each in rows if each != PLAIN]
            raise SettingError(
                f"got --set for the arm {arm!r}; expected one of those compared: {', '.join(known)}."
                f"{did_you_mean(arm, known)}"
            )
        given.setdefault(arm, {})[name] = value
    return given


def arm_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ARMS:
            raise ArgumentTypeError(f"got {name!r}; expected some of {', '.join(ARMS)}.{did_you_mean(name, ARMS)}")
    return names


def setting(text: str) -> tuple[str, str, Any]:
    """Read ``ARM.NAME=VALUE``."""
    place, equals, value = text.partition("=")
    arm, dot, name = place.partition(".")
    if not (equals and dot and arm and name):
        raise ArgumentTypeError(f"got {text!r}; expected ARM.NAME=VALUE, such as lookup.lookup_tokens=10")
    try:
        return arm, name, json.loads(value)
    except ValueError:
        return arm, name, value


def _count(text: str) -> int:
    return 0 if text == "0" else positive(text)


def add_arm_options(parser: Parser) -> None:
    """Which arms, and what they need: the options that `plans_of` and the rows of `ARMS` read."""
    parser.add_argument("--arms", type=arm_names, metavar="NAME,NAME", help=f"some of {', '.join(ARMS)}")
    for name, what in PLAN_FILES.items():
        parser.add_argument(f"--{name}", metavar="PLAN", help=what)
    parser.add_argument("--exit", type=positive, help="blocks that the draft of the exit arms runs")
    parser.add_argument("--draft-model", help="a checkpoint of the same vocabulary, for the arms that draft with one")


def _options(arguments: Sequence[str] | None) -> Namespace:
    parser = Parser(prog="python -m experiments.compare", description=__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--model", help="checkpoint folder or hub id")
    parser.add_argument(
        "--data", help=f"questions as JSON lines (Spec-Bench's, HumanEval's, prompts), or {HUMAN_EVAL!r}"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where lines and report go")
    add_arm_options(parser)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--new-tokens", type=positive, default=128)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--per-category", type=positive, help="questions to report on (default: half of each)")
    parser.add_argument("--tuning-questions", type=_count, help="to tune on (default: one of each category); 0: none")
    parser.add_argument("--temperature", type=float, help="sample; outputs are then other samples")
    parser.add_argument("--governor", choices=("measured", "fixed", "off"), default="measured", help="of our arms")
    parser.add_argument("--raw", action="store_true", help="prompts as they are, not as a chat")
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="ARM.NAME=VALUE",
                        help="a setting of an arm, which is then not tuned")  # fmt: skip
    parser.add_argument("--gaps", type=_count, default=4, help="most answers of an arm to look into where they part")
    parser.add_argument("--resume", action="store_true", help="go on behind the lines in --out")
    parser.add_argument("--report-from", type=Path, metavar="DIR", help="only write the report of the lines in DIR")
    parser.add_argument("--answers", type=Path, nargs=2, metavar="FILE", help="only compare two files of answers")
    options = parser.parse_args(arguments)
    missing = [name for name in ("model", "data", "out") if getattr(options, name) is None]
    if missing and options.report_from is None and options.answers is None:
        parser.error(f"got no --{missing[0]}; expected --model, --data and --out (or --report-from, or --answers).")
    return options


if __name__ == "__main__":
    sys.exit(main())
