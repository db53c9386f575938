"""`layerskip search`: find the draft plan that pays; and `layerskip search-report`: tell of it again."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerskip.cli.options import add_loading_options, given, load_model
from layerskip.cli.parser import positive
from layerskip.cli.records import as_inputs, read_prompts
from layerskip.cli.search_progress import SearchProgress
from layerskip.cli.terminal import note
from layerskip.errors import PlanError, SettingError

if TYPE_CHECKING:
    from layerskip.search.result import SearchResult

__all__ = ["add_parser", "add_report_parser"]

EXAMPLES = """\
examples:
  layerskip search ./checkpoint --out plan.json                         # texts written by the model, 200 trials
  layerskip search ./checkpoint --prompts prompts.jsonl --budget 10m --out plan.json
  layerskip search ./checkpoint --trained jump/plan.json adapter/plan.json --out plan.json      # these among others
  layerskip search ./checkpoint --storage postgresql://user:password@host/database --study mine --out plan.json
The same command again goes on where it ended; with a database it may run on many machines at once.
"""

_COUNTS = {
    "positions": "drafts to try on the texts that are searched (default: 8192)",
    "held_out_positions": "drafts to try on the texts that are reported on (default: 4096)",
    "frequency_positions": "tokens to count ids in, for draft vocabularies (default: 4096)",
    "new_tokens": "of a calibration text, at most (default: 128)",
    "draft_length": "most drafts a round (default: 6)",
    "context": "positions behind which costs are measured (default: 256)",
}
_LAYERS = {
    "protect_first": "layers at the beginning that are never skipped (default: 1)",
    "protect_last": "layers at the end that are never skipped, exits aside (default: 1)",
}
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


def add_parser(subparsers: Any) -> None:
    """Add `search`."""
    parser = subparsers.add_parser(
        "search",
        help="find the draft plan that pays",
        description="Search for the draft plan with the best predicted speed-up on this device: which sub-blocks to "
        "leave out,\nwhere to exit, how many ids to score, how many tokens to draft. Writes the plan, and a report.",
        epilog=EXAMPLES,
    )
    parser.add_argument("model", metavar="MODEL", help="a path or hub id")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the plan goes")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="the report's (default: beside the plan)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines; without it the model writes its own")
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="prompts that are plain strings are a user's messages (default: if the model has a chat template)",
    )
    parser.add_argument(
        "--trained",
        type=Path,
        nargs="+",
        action="extend",
        metavar="PLAN",
        help="plans of `layerskip train`, as further candidates",
    )
    parser.add_argument("--budget", default="200 trials", metavar="B", help="10m, 1.5h, or '200 trials' (the default)")
    parser.add_argument("--storage", metavar="FILE|URL", help="where trials are kept (default: a file beside the plan)")
    parser.add_argument("--study", metavar="NAME", help="the search's name there (default: the model's)")
    parser.add_argument(
        "--heartbeat",
        type=positive,
        default=60,
        metavar="SECONDS",
        help="between signs of life of a trial; a worker silent for three is taken for dead (default: 60)",
    )
    parser.add_argument("--no-measure", action="store_true", help="decode nothing with the plan at the end")
    group = parser.add_argument_group("what is searched")
    group.add_argument("--objective", choices=("speedup", "front"), help="front: acceptance against cost")
    group.add_argument("--sampler", metavar="NAME", help="elite (default), tpe, gp, nsga2, random")
    group.add_argument("--seed", type=int, metavar="N", help="of the sampler and of what is drawn (default: 0)")
    for name, text in _COUNTS.items():
        group.add_argument("--" + name.replace("_", "-"), type=positive, metavar="N", help=text)
    for name, text in _LAYERS.items():
        group.add_argument("--" + name.replace("_", "-"), type=int, metavar="N", help=text)
    group.add_argument("--no-skips", action="store_true", help="leave out no single sub-blocks")
    group.add_argument("--no-exits", action="store_true", help="end no draft early")
    group.add_argument("--no-prune", action="store_true", help="replay every trial on all texts")
    group.add_argument(
        "--draft-vocabularies",
        type=_sizes,
        metavar="N,N",
        help="numbers of ids that drafts may score, 0 for all only (default: 2048, 8192, 32768 and all)",
    )
    group.add_argument("--temperature", type=float, metavar="T", help="texts are drawn, and drafts accepted, at T")
    group.add_argument("--top-k", type=int, metavar="K", help="likewise, among the K likeliest tokens")
    group.add_argument("--top-p", type=float, metavar="P", help="likewise, among the likeliest that make up P")
    group.add_argument("--min-p", type=float, metavar="P", help="likewise, among those P times as likely as the best")
    add_loading_options(parser.add_argument_group("loading"))
    parser.set_defaults(run=_run)


def add_report_parser(subparsers: Any) -> None:
    """Add `search-report`."""
    parser = subparsers.add_parser(
        "search-report",
        help="write the report of a search again",
        description="Write the report of a search that has ended, and its plan, again from where its trials are kept.",
    )
    parser.add_argument("study", metavar="STUDY", help="the search's name")
    parser.add_argument("--storage", required=True, metavar="FILE|URL", help="where its trials are kept")
    parser.add_argument("--report", type=Path, required=True, metavar="FOLDER", help="where the report goes")
    parser.set_defaults(run=_run_report)


def _sizes(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected numbers of ids such as 2048,8192, or 0 for all")
    return tuple(size for size in map(int, parts) if size)


def _run(options: argparse.Namespace) -> int:
    from layerskip.plan import DraftPlan
    from layerskip.search import Budget, SearchSettings, find_plan
    from layerskip.search.report import write_report
    from layerskip.search.trained import with_adapter_beside

    budget = Budget.parse(options.budget)
    if options.temperature is not None and options.temperature <= 0:
        raise SettingError(
            f"got --temperature {options.temperature}; expected a number above 0. For greedy texts leave it out."
        )
    sampling = given(options, _SAMPLING)
    named: dict[str, Any] = given(options, ("objective", "sampler", "seed", *_COUNTS, *_LAYERS))
    if options.draft_vocabularies is not None:
        named["vocabulary_sizes"] = options.draft_vocabularies
    settings = SearchSettings(
        **named,
        sampling=sampling or None,
        skips=not options.no_skips,
        exits=not options.no_exits,
        prune=not options.no_prune,
    )
    lines = None if options.prompts is None else read_prompts(options.prompts)
    trained = [DraftPlan.load(each) for each in options.trained or ()]
    study = options.study or Path(options.model).name or "layerskip"
    if _refuse_another_plan(options.out, study):
        note(f"{options.out} is from an earlier run of this search and will be replaced")
    folder = options.report or options.out.with_name(options.out.stem + "-report")
    _refuse_a_file(folder)
    storage = options.storage or options.out.with_name(options.out.stem + "-search.db")
    model = load_model(options)
    chat = options.chat if options.chat is not None else bool(getattr(model.tokenizer, "chat_template", None))
    prompts = None if lines is None else [as_inputs(line.content, chat) for line in lines]
    with SearchProgress(budget) as progress:
        result = find_plan(
            model,
            prompts,
            budget=budget,
            storage=storage,
            study=study,
            settings=settings,
            trained=trained,
            measure=not options.no_measure,
            heartbeat_s=options.heartbeat,
            progress=progress,
        )
    _refuse_another_plan(options.out, study)
    beside = with_adapter_beside(result.plan, options.out, options.out.stem + "-adapter.safetensors")
    beside.save(options.out)
    page = write_report(result, folder)
    print("\n".join(_summary(result)))
    print(f"plan: {options.out}\nreport: {page}")
    return 0


def _run_report(options: argparse.Namespace) -> int:
    from layerskip.search import load_result
    from layerskip.search.report import write_report

    _refuse_a_file(options.report)
    result = load_result(options.storage, options.study, notify=note)
    page = write_report(result, options.report)
    print("\n".join(_summary(result)))
    print(f"report: {page}")
    return 0


def _refuse_a_file(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise SettingError(f"got --report {folder}, which is a file; expected a folder, or one to be made.")


def _refuse_another_plan(out: Path, study: str) -> bool:
    """The plan of an earlier run of this study may be replaced, nothing else; returns whether there is one."""
    from layerskip.plan import DraftPlan

    if not out.exists():
        if not out.absolute().parent.is_dir():
            raise SettingError(f"got --out {out}, whose folder does not exist. Make it, or name another.")
        if not os.access(out.absolute().parent, os.W_OK):
            raise SettingError(f"got --out {out}, whose folder cannot be written to. Name another.")
        return False
    try:
        made_by = DraftPlan.load(out).provenance.get("study")
    except PlanError:
        made_by = None
    if made_by != study:
        raise SettingError(
            f"got --out {out}, which exists and is no plan of the study {study!r}. Remove it, or name another file."
        )
    return True


def _summary(result: SearchResult) -> list[str]:
    """What was found, in a few lines."""
    from layerskip.search.report.telling import describe_training

    best, found = result.best, result.held_out
    speedup = found.predicted_speedup
    lines = [
        f"best of {sum(each.state in ('complete', 'pruned') for each in result.trials)} trials: "
        f"{best.candidate.describe()}, {best.num_draft_tokens} drafts a round, a step at {best.draft_ratio:.2f} plain "
        "steps",
        f"on {found.positions:,} positions of texts not searched on: {found.acceptance_rate.value:.1%} of the drafts "
        f"stand, {found.tokens_per_round.value:.2f} tokens a round",
        f"predicted speed-up over plain decoding: {speedup.value:.2f} (95 %: {speedup.low:.2f} to {speedup.high:.2f})",
    ]
    if result.plan.adapter is not None:
        lines.insert(1, f"this is a trained path, {describe_training(result.plan)}")
    if found.measured_speedup is not None:
        each = found.measured_speedup
        lines.append(f"measured, on some of these texts: {each.value:.2f} ({each.low:.2f} to {each.high:.2f})")
    if result.pays and found.measured_speedup is not None and found.measured_speedup.value <= 1:
        lines.append("what was predicted was not seen: measure on your own prompts before you use this plan")
    if not result.pays:
        lines.append(
            f"nothing beats plain decoding here: the best draft makes it take {1 / speedup.value:.2f} times as long"
        )
    return lines
