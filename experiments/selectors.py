"""Which published way to choose what a draft leaves out chooses best, at which effort?

    python -m experiments.selectors --model "$(layerskip reference)" --positions 2048 --trials 100 --measure
    python -m experiments.selectors --model tiny --agreement 0.9 --positions 256      # random weights, random ids

All of them look at the same texts, the model's own greedy answers to one half of the prompts, through the same replay;
costs are measured once, before. Each starts without verdicts of the others. What one puts first is then judged on the
texts that it chose by and on the answers to the other half, which none has seen. With --measure the same plans then
decode those prompts in turn with plain decoding, ungoverned, at the draft length that was predicted to be best.

Prints a Markdown table, and as its last line one JSON document, which is also appended to the results file.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import optuna
import torch

import layerskip
from experiments.arms import our_arm, run_in_turn
from experiments.bench import PROMPTS
from experiments.conditions import conditions
from experiments.program import exit_code
from experiments.report import append, quartiles
from experiments.subjects import Prompt, Subject, random_prompts, read_prompts
from layerskip.cli.parser import Parser, layer_numbers, positive
from layerskip.errors import SettingError
from layerskip.models.loading import parse_dtype
from layerskip.models.synthetic import GEOMETRIES
from layerskip.search.calibration import write_calibration
from layerskip.search.candidate import Candidate
from layerskip.search.cost import CostModel
from layerskip.search.find import run_trials
from layerskip.search.judge import Judge, Verdict
from layerskip.search.measuring import measure_costs
from layerskip.search.progress import Silent
from layerskip.search.replay import Replay
from layerskip.search.samplers import make_sampler
from layerskip.search.selectors import SELECTORS, DraftAndVerify, Selector, Workbench
from layerskip.search.settings import Budget, SearchSettings
from layerskip.search.space import Space
from layerskip.search.study import Prepared, queue_starts
from layerskip.search.texts import Calibration
from layerskip.search.trials import records_of

__all__ = ["main"]

OURS, CLOCKED = "ours", "draft_and_verify"
CONTEXT = 64  # ids of a random prompt
RANDOM_PROMPTS = 16
RECORDED = (
    "positions", "held_out_positions", "new_tokens", "draft_length", "trials", "clock_prompts", "clock_tokens", "seed",
    "agreement", "from_block", "redundant", "our_trials", "measure",
)  # fmt: skip

Chooser = Callable[[Workbench], list[Candidate]]


@dataclass
class Row:
    """What one way to choose came to.

    Attributes:
        seconds: of choosing.
        full_passes: over all positions of the search texts, in passes of the whole model.
        candidate: what it puts first, of `candidates` that it returned.
        search, held_out: verdicts on the texts that it chose by, and on others.
        expected: predicted speed-up on the held-out texts at the draft length that the search texts call best.
        measured: quartiles of real speed-ups over held-out prompts; None: not measured.
    """

    name: str
    settings: dict[str, Any]
    seconds: float
    full_passes: float
    candidate: Candidate
    candidates: int
    search: Verdict
    held_out: Verdict
    expected: float
    measured: list[float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "selector": self.name,
            "settings": self.settings,
            "seconds": self.seconds,
            "full_passes": self.full_passes,
            "candidate": asdict(self.candidate),
            "candidates": self.candidates,
            "num_draft_tokens": self.search.speedup.num_draft_tokens,
            "draft_ratio": self.search.draft_ratio,
            "search": _figures(self.search),
            "held_out": _figures(self.held_out) | {"speedup_at_chosen_length": self.expected},
            "measured_speedup_quartiles": self.measured,
        }


def choosers(names: Sequence[str], options: Namespace) -> dict[str, tuple[dict[str, Any], Chooser]]:
    """By name, what is compared: its settings, and how it chooses."""
    rows: dict[str, tuple[dict[str, Any], Chooser]] = {}
    for name in names:
        if name == OURS:
            ours = OurSearch(options.our_trials, options.draft_length)
            rows[name] = (ours.settings.to_dict() | {"trials": ours.trials}, ours)
            continue
        selector: Selector = (
            DraftAndVerify(iterations=options.trials) if name == "draft_and_verify" else SELECTORS[name]()
        )
        rows[name] = (asdict(selector), selector.select)  # type: ignore[call-overload]
    return rows


class OurSearch:
    """What `find_plan` does, on texts and costs that are given.

    Attributes:
        history: after each trial the seconds and full passes spent since the beginning, and the best candidate so far.
    """

    def __init__(self, trials: int, draft_length: int) -> None:
        """`trials`: the starts among them."""
        self.settings = SearchSettings(vocabulary_sizes=(), draft_length=draft_length)
        self.trials = trials
        self.history: list[tuple[float, float, Candidate]] = []
        self.ranked: list[Candidate] = []

    def __call__(self, bench: Workbench) -> list[Candidate]:
        """Best first."""
        judge, settings, began = bench.judge, self.settings, time.perf_counter()
        self._judge = judge
        space = settings.space(bench.num_blocks, judge.replay.decoder.vocab_size)
        sampler, passes = make_sampler(settings.sampler, space, settings.seed), judge.replay.block_passes
        # Nothing is pruned: what is not best of all may be best at another method's cost.
        study = optuna.create_study(direction="maximize", sampler=sampler, pruner=optuna.pruners.NopPruner())
        queue_starts(study, judge, space)

        def note(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
            best = self._ranked(study, space)
            if best:
                spent = (judge.replay.block_passes - passes) / (2 * bench.num_blocks)
                self.history.append((time.perf_counter() - began, spent, best[0]))

        prepared = Prepared(study, settings, space, Calibration((), (), (), {}), judge.costs, {}, {})
        run_trials(prepared, judge, Budget(self.trials), Silent(), [note])
        self.ranked = self._ranked(study, space)
        return self.ranked

    @staticmethod
    def _ranked(study: optuna.Study, space: Space) -> list[Candidate]:
        complete = [each for each in records_of(study, space) if each.state == "complete"]
        return [each.candidate for each in sorted(complete, key=lambda each: -(each.speedup or 0.0))]

    def reached(self, target: Row, judge: Judge) -> dict[str, float] | None:
        """When the best so far was first predicted to be as fast as `target` by `judge`, of held-out texts, or None."""
        for seconds, passes, candidate in self.history:
            if judge.judge(candidate).speedup.ratio >= target.held_out.speedup.ratio:
                return {"seconds": seconds, "full_passes": passes}
        return None

    def at_cost_of(self, row: Row, held_out: Judge) -> dict[str, Any] | None:
        """Tokens per round on the held-out texts, of ours and of `row`, at its length; a step of ours costs no more.

        Ours is the one with most tokens per round on the search texts; None: we tried none so cheap.
        """
        length = row.search.speedup.num_draft_tokens
        searched, ratio = self._judge, held_out.costs.draft_ratio  # it remembers what it judged
        cheap = [each for each in self.ranked if ratio(each) <= row.search.draft_ratio + 1e-9]
        if not cheap:
            return None
        best = max(cheap, key=lambda each: searched.judge(each).acceptance.tokens_per_round(length))
        tokens = [held_out.judge(each).acceptance.tokens_per_round(length) for each in (best, row.candidate)]
        return {"draft": best.describe(), "ours": tokens[0], row.name: tokens[1], "ratio": tokens[0] / tokens[1]}


def clock(model: layerskip.Model, rows: list[list[int]], new_tokens: int) -> Callable[[layerskip.DraftPlan], float]:
    """Tokens per second of decoding `rows` by a plan."""

    def tokens_per_s(plan: layerskip.DraftPlan) -> float:
        results = [
            model.generate(row, plan=plan, governor="off", do_sample=False, max_new_tokens=new_tokens).stats
            for row in rows
        ]
        return sum(each.round_tokens for each in results) / max(1e-9, sum(each.decode_s for each in results))

    return tokens_per_s


def compare(
    compared: Mapping[str, tuple[dict[str, Any], Chooser]],
    replays: tuple[Replay, Replay],
    costs: CostModel,
    tokens_per_s: Callable[[layerskip.DraftPlan], float],
    seed: int,
) -> list[Row]:
    """Let each choose on the first replay, and judge its choice on both."""
    replay, held_out = replays
    rows = []
    for name, (settings, choose) in compared.items():
        print(f"{name} …", file=sys.stderr, flush=True)
        bench = Workbench.seeded(Judge(replay, costs), seed, tokens_per_s)
        passes, began = replay.block_passes, time.perf_counter()
        found = choose(bench)
        seconds, passes = time.perf_counter() - began, replay.block_passes - passes
        search, other = (Judge(each, costs).judge(found[0]) for each in replays)
        length = search.speedup.num_draft_tokens
        expected = other.acceptance.tokens_per_round(length) / costs.round_ratio(found[0], length)
        rows.append(
            Row(name, settings, seconds, passes / (2 * bench.num_blocks), found[0], len(found), search, other, expected)
        )
    return rows


def measure(model: layerskip.Model, rows: Sequence[Row], prompts: Sequence[Prompt], new_tokens: int) -> None:
    """Decode `prompts` plainly and by every row's plan, in turn; fills `Row.measured`."""
    plain = our_arm("plain", model, None)
    arms = [our_arm(row.name, model, row.candidate.plan(row.search.speedup.num_draft_tokens), "off") for row in rows]
    for arm in (plain, *arms):
        arm.call(prompts[0].rows, 8)
    run_in_turn([plain, *arms], prompts, new_tokens)
    for row, arm in zip(rows, arms, strict=True):
        pairs = zip(arm.runs, plain.runs, strict=True)
        row.measured = quartiles([own.tokens_per_s / other.tokens_per_s for own, other in pairs if other.tokens_per_s])


def _figures(verdict: Verdict) -> dict[str, Any]:
    acceptance = verdict.acceptance
    return {
        "acceptance_rate": acceptance.rate,
        "standard_error": acceptance.standard_error,
        "acceptance_by_offset": acceptance.by_offset,
        "speedup": verdict.speedup.ratio,
        "num_draft_tokens": verdict.speedup.num_draft_tokens,
    }


def table(rows: Sequence[Row]) -> str:
    """Rows as Markdown; both predictions at the draft length that the search texts call best."""
    lines = [
        "| selector | time, s | model passes | draft | its step ÷ plain | K | acceptance on held-out (± s.e.) "
        "| speed-up, search texts | held-out | measured (quartiles) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        acceptance = row.held_out.acceptance
        measured = "–" if row.measured is None else "{1:.2f} ({0:.2f}–{2:.2f})".format(*row.measured)
        lines.append(
            f"| {row.name} | {row.seconds:.1f} | {row.full_passes:.1f} | {row.candidate.describe()} "
            f"| {row.search.draft_ratio:.2f} | {row.search.speedup.num_draft_tokens} "
            f"| {acceptance.rate:.3f} ± {acceptance.standard_error:.3f} "
            f"| {row.search.speedup.ratio:.2f} | {row.expected:.2f} | {measured} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, append; an error that the project words itself is one line and exit code 2."""
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    return exit_code(lambda: _run(options), "--positions, --trials and --selectors")


def _run(options: Namespace) -> None:
    dtype = parse_dtype(options.dtype)
    if not isinstance(dtype, torch.dtype):
        raise SettingError(f"got --dtype {options.dtype}; expected a dtype.")
    try:
        device = torch.device(options.device)
    except RuntimeError as error:
        raise SettingError(f"got --device {options.device}; expected one that torch knows, such as cuda.") from error
    redundant = None
    if options.redundant is not None:
        redundant = dict(zip(("attention", "mlp"), options.redundant, strict=True))
    subject = Subject(options.model, dtype, device, options.agreement, options.from_block, redundant)
    model = subject.load()
    prompts = _prompts(options, subject, model)
    calibration, costs = _calibrated(options, model, [prompt.rows[0] for prompt in prompts])
    replays = (
        Replay(model.decoder, calibration.search, draft_length=options.draft_length),
        Replay(model.decoder, calibration.held_out, draft_length=options.draft_length),
    )
    timed = [list(text.prompt) for text in calibration.search[: options.clock_prompts]]
    compared = choosers(options.selectors or [OURS, *SELECTORS], options)
    rows = compare(
        compared,
        replays,
        costs,
        clock(model, timed, options.clock_tokens),
        options.seed,
    )
    by_name, reached = {row.name: row for row in rows}, None
    ours = compared.get(OURS, ({}, None))[1]
    judge = Judge(replays[1], costs)
    if isinstance(ours, OurSearch) and CLOCKED in by_name:
        reached = ours.reached(by_name[CLOCKED], judge)
        print(f"ours was as good as {CLOCKED} after {reached}; that took {by_name[CLOCKED].seconds:.0f} s")
    same_cost = {}
    if isinstance(ours, OurSearch):
        same_cost = {row.name: ours.at_cost_of(row, judge) for row in rows if row.name != OURS}
        for name, found in same_cost.items():
            print(f"at the cost of {name}: {found}")
    if options.measure:
        held_out = [Prompt("held out", [list(text.prompt)]) for text in calibration.held_out[: options.measure]]
        measure(model, rows, held_out, options.new_tokens)
    document = {
        "experiment": "selectors",
        "model": Path(options.model).name,
        "data": "random ids" if subject.is_geometry else (options.data or PROMPTS).name,
        "options": {name: getattr(options, name) for name in RECORDED},
        "conditions": conditions(model, [repr(prompt.rows) for prompt in prompts]),
        "calibration": {
            **calibration.settings,
            "texts": [len(calibration.search), len(calibration.held_out)],
            "positions_found": [replay.num_positions for replay in replays],
        },
        "costs": costs.to_dict(),
        "rows": [row.to_dict() for row in rows],
        "tokens_per_round_at_same_cost": same_cost,
        "ours_as_good_as_draft_and_verify_after": reached,
    }
    kind = f"{document['model']}, {options.dtype} on {options.device}, {options.threads} threads, greedy"
    counts = f"{replays[0].num_positions:,} positions to choose by, {replays[1].num_positions:,} held out"
    print(f"\n{kind}: {counts}\n\n{table(rows)}\n")
    append(options.results, document)


def _calibrated(options: Namespace, model: layerskip.Model, rows: list[list[int]]) -> tuple[Calibration, CostModel]:
    """The texts, and the costs of this machine."""
    print("texts and costs …", file=sys.stderr, flush=True)
    calibration = write_calibration(
        model,
        rows,
        positions=options.positions,
        held_out_positions=options.held_out_positions,
        new_tokens=options.new_tokens,
        seed=options.seed,
    )
    return calibration, measure_costs(model, draft_length=options.draft_length, context=options.cost_context)


def _prompts(options: Namespace, subject: Subject, model: layerskip.Model) -> list[Prompt]:
    if subject.is_geometry:
        if options.data is not None:
            raise SettingError("got --data for random weights, which have no tokenizer; leave it out.")
        return random_prompts(model.decoder.vocab_size, CONTEXT, RANDOM_PROMPTS, 1)
    return read_prompts(options.data or PROMPTS, model.tokenizer, options.prompts_per_category, 1)


def _options(arguments: Sequence[str] | None) -> Namespace:
    parser = Parser(prog="python -m experiments.selectors", description=__doc__)
    parser.add_argument("--model", required=True, help=f"checkpoint folder, hub id, or one of {', '.join(GEOMETRIES)}")
    parser.add_argument("--data", type=Path, help=f"questions in Spec-Bench format (default: {PROMPTS.name} here)")
    parser.add_argument("--prompts-per-category", type=positive, default=2)
    parser.add_argument("--selectors", nargs="+", choices=(OURS, *SELECTORS), help="(default: all)")
    parser.add_argument("--positions", type=positive, default=2048, help="drafts that are tried to choose by")
    parser.add_argument(
        "--held-out-positions", type=positive, default=1024, help="drafts that are tried for the report"
    )
    parser.add_argument("--new-tokens", type=positive, default=128, help="of an answer")
    parser.add_argument("--draft-length", type=positive, default=6, help="most drafts a round")
    parser.add_argument("--trials", type=positive, default=100, help="of Draft & Verify (published: 1000)")
    parser.add_argument("--our-trials", type=positive, default=200, help="of our search")
    parser.add_argument("--clock-prompts", type=positive, default=2, help="that each of these trials decodes")
    parser.add_argument("--clock-tokens", type=positive, default=32, help="of each of them")
    parser.add_argument("--measure", nargs="?", type=positive, const=8, help="decode so many held-out prompts (8)")
    parser.add_argument("--cost-context", type=positive, default=256, help="tokens before the passes that are timed")
    parser.add_argument("--agreement", type=float, help="planted between an exit and the whole geometry")
    parser.add_argument("--from-block", type=positive, help="where the planted blocks begin (default: half)")
    parser.add_argument(
        "--redundant", nargs=2, type=layer_numbers, metavar=("ATTENTIONS", "MLPS"), help="planted into these instead"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--results", type=Path, default=Path("experiments/results/selectors.jsonl"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
