"""Which of the samplers finds more in the same number of trials?

    python -m experiments.samplers --model "$(layerskip reference)" --positions 1024 --trials 200
    python -m experiments.samplers --model smollm2-135m --agreement 1 --redundant 2,5,6 3,9 --no-starts    # planted

All begin with the same starts, or with none (--no-starts), on the same texts and costs. What is known of a candidate is
shared, so that each candidate is replayed once, and nothing is pruned: only what the samplers choose differs.

Prints a table, and as its last line one JSON document, which is also appended to the results file.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import torch

from experiments.conditions import conditions
from experiments.report import append
from experiments.subjects import Subject
from layerskip.cli.parser import layer_numbers, positive
from layerskip.models.loading import parse_dtype
from layerskip.search.calibration import write_calibration
from layerskip.search.judge import Judge
from layerskip.search.measuring import measure_costs
from layerskip.search.replay import Replay
from layerskip.search.samplers import SAMPLERS, make_sampler
from layerskip.search.space import Space
from layerskip.search.starts import single_retention, starts

__all__ = ["main"]

MARKS = (25, 50, 100, 200)


def search(
    judge: Judge, space: Space, queue: list[dict[str, Any]], sampler: str, seed: int, trials: int
) -> list[float]:
    """The best predicted speed-up after each trial."""
    study = optuna.create_study(direction="maximize", sampler=make_sampler(sampler, space, seed))
    for params in queue:
        study.enqueue_trial(params)
    best: list[float] = []
    while len(best) < trials:
        trial = study.ask()
        candidate = space.suggest(trial)
        value = judge.judge(candidate).speedup.ratio if candidate.drafts(space.num_blocks) else 0.0
        study.tell(trial, value)
        best.append(max(value, best[-1]) if best else value)
    return best


def _rises(best: list[float]) -> list[tuple[int, float]]:
    """The trials, from 1 on, that were better than all before them, with their value."""
    return [(number, value) for number, value in enumerate(best, 1) if number == 1 or value > best[number - 2]]


def _at(rises: list[tuple[int, float]], trial: int) -> float:
    return max(value for number, value in rises if number <= trial)


def main() -> None:
    """Search by each, print and append."""
    options = _options()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(options.threads)
    dtype = parse_dtype(options.dtype)
    assert isinstance(dtype, torch.dtype)
    redundant = None
    if options.redundant is not None:
        redundant = dict(zip(("attention", "mlp"), options.redundant, strict=True))
    subject = Subject(options.model, dtype, torch.device("cpu"), options.agreement, redundant=redundant)
    model = subject.load()
    calibration = write_calibration(model, None, positions=options.positions, held_out_positions=2)
    judge = Judge(Replay(model.decoder, calibration.search), measure_costs(model))
    space = Space(model.decoder.num_blocks)
    queue = [space.params(each.candidate) for each in starts(judge, space, single_retention(judge, space))]
    queue = queue if options.starts else []
    rows: dict[str, Any] = {}
    for name in options.samplers:
        runs, seconds = [], []
        for seed in range(options.seeds):
            began = time.perf_counter()
            runs.append(search(judge, space, queue, name, seed, options.trials))
            seconds.append(time.perf_counter() - began)
            print(f"{name}, seed {seed}: {runs[-1][-1]:.4f} in {seconds[-1]:.0f} s", file=sys.stderr, flush=True)
        rows[name] = {"best": [_rises(run) for run in runs], "seconds": seconds}
    marks = [mark for mark in MARKS if mark <= options.trials]
    print("| sampler | " + " | ".join(f"best of {mark}" for mark in marks) + " |\n" + "| --- " * (len(marks) + 1) + "|")
    for name, row in rows.items():
        means = [sum(_at(run, mark) for run in row["best"]) / len(row["best"]) for mark in marks]
        print(f"| {name} | " + " | ".join(f"{mean:.4f}" for mean in means) + " |")
    document = {"experiment": "samplers", "conditions": conditions(model, []), "starts": len(queue), "rows": rows}
    document["positions"] = judge.replay.num_positions
    append(options.results, document)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint folder, hub id, or a geometry with random weights")
    parser.add_argument("--agreement", type=float)
    parser.add_argument(
        "--redundant", nargs=2, type=layer_numbers, metavar=("ATTENTIONS", "MLPS"), help="where to plant it"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--samplers", nargs="+", choices=tuple(SAMPLERS), default=list(SAMPLERS), help="(default: all)")
    parser.add_argument("--positions", type=positive, default=1024)
    parser.add_argument("--trials", type=positive, default=200)
    parser.add_argument("--seeds", type=positive, default=1)
    parser.add_argument("--no-starts", dest="starts", action="store_false")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--results", type=Path, default=Path("experiments/results/samplers.jsonl"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
