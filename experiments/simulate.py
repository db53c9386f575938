"""Will speculation pay on that hardware, at that batch and context? A small roofline simulation, to see before renting.

    python -m experiments.simulate llama-8b --hardware A100-80 H100 --exit 4 --acceptance 0.8
    python -m experiments.simulate "$(layerskip reference)" --hardware this-machine --plan plan.json
    python -m experiments.simulate "$(layerskip reference)" --check       # against passes timed here; minutes
    python -m experiments.simulate "$(layerskip reference)" --check --check-lines by-batch      # or in a sweep

From a model's config and a few numbers of the hardware (FLOP/s, bytes/s, seconds a kernel; `roofline.py`) follow the
time of a plain step, what verifying K drafts costs, v(K), and what drafting one does, c, both in plain steps; from
these and the acceptance the speed-up over plain decoding, the best K, and the batches at which anything is gained
(`layerskip/speedup.py`). Presets are data sheets at a share of their peaks (--flops-share, --bytes-share), one device;
this-machine is fitted to passes that are timed first. Without --acceptance that of the plan counts, else 0.8.

Prints a Markdown table, and as its last line one JSON document, which is also appended to the results file.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import layerskip
from experiments.conditions import conditions, program_conditions
from experiments.program import amount, exit_code
from experiments.report import append
from experiments.roofline import ACCELERATORS, Hardware, read_hardware
from experiments.roofline_draft import MOST_ROWS, Draft, paying_batches, simulate
from experiments.roofline_fit import (
    BATCHES,
    CONTEXTS,
    FITTED_BATCHES,
    WIDTHS,
    Cell,
    check_table,
    compare,
    fit,
    measure,
    swept_passes,
)
from experiments.roofline_pictures import draw_check, draw_simulation
from experiments.run_lines import read_lines
from experiments.subjects import Subject
from layerskip.cli.parser import Parser, layer_numbers, positive
from layerskip.errors import InputError, SettingError
from layerskip.models.adapter_file import count_parameters, read_spec
from layerskip.models.inspection import Inspection, inspect_checkpoint, inspect_model
from layerskip.models.loading import parse_dtype, quiet
from layerskip.models.synthetic import GEOMETRIES, geometry_config

__all__ = ["main"]

SHOWN_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
SHOWN_CONTEXTS = (1024, 8184)
SHOWN_DRAFTS = (1, 3, 7)  # whose v the table shows
DEFAULT_ACCEPTANCE = (0.8,)
THIS_MACHINE = "this-machine"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each hardware, context and batch, as Markdown."""
    shown = [drafts for drafts in SHOWN_DRAFTS if drafts < len(rows[0]["verify_ratios"])]
    heads = [
        "hardware", "context", "batch", "plain step, ms", "tokens/s", *(f"v({each})" for each in shown), "c",
        "acceptance needed", "best K", "speed-up",
    ]  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for row in rows:
        least = row["least_acceptance"]
        cells = [
            row["hardware"],
            f"{row['context']:,}",
            f"{row['batch']}{'' if row['fits'] is not False else ' (too large)'}",
            f"{1e3 * row['plain_step_s']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            *(f"{row['verify_ratios'][each]:.2f}" for each in shown),
            f"{row['draft_ratio']:.3f}",
            "none is enough" if least is None else f"{least:.2f}",
            f"{row['best_draft_length'] or '–'}",
            f"{row['speedup']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def describe(name: str, dtype: str) -> Inspection:
    """The shape of a geometry, or of a checkpoint by its config alone."""
    if name not in GEOMETRIES:
        return inspect_checkpoint(name, dtype=dtype)
    with quiet(), torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(geometry_config(name), dtype=parse_dtype(dtype))
    return inspect_model(model)


def draft_of(options: Namespace, shape: Inspection) -> Draft:
    """What the options say of drafting.

    Raises:
        SettingError: they contradict each other, or say nothing.
    """
    parts = {"exit_layer": options.exit, "skip_attention": options.skip_attention, "skip_mlp": options.skip_mlp}
    given = {name: value for name, value in parts.items() if value is not None}
    ways = [bool(given), options.plan is not None, options.draft_cost is not None]
    if sum(ways) != 1:
        raise SettingError(
            f"got {sum(ways)} descriptions of what a draft costs; expected one: --plan, --draft-cost, or --exit and "
            "--skip-…."
        )
    plan = layerskip.DraftPlan.load(options.plan) if options.plan is not None else None
    own = layerskip.DraftPlan.of(given) if given else plan
    ids, further, cost = options.draft_ids, 0, options.draft_cost
    if plan is not None:
        if plan.num_draft_tokens == 0:
            own, cost = None, 0.0
        elif not plan.is_self_draft:
            raise SettingError("got a plan whose drafts another model makes; expected a self-draft, or --draft-cost.")
        if plan.target is not None and plan.target.num_layers != shape.num_layers:
            raise SettingError(
                f"got a plan for a model of {plan.target.num_layers} layers and one of {shape.num_layers}; expected "
                "the same. Give the plan's model, or describe the draft by --exit and --skip-…."
            )
        if ids is None and plan.draft_vocabulary is not None:
            ids = len(plan.draft_vocabulary)
        if plan.adapter is not None:
            further = count_parameters(plan.adapter)
            if read_spec(plan.adapter).num_heads:
                raise SettingError(
                    "got a plan of heads, which draft all at one cost; expected one that drafts token after token. "
                    "Measure it with experiments.compare."
                )
    if ids is not None and ids > shape.vocab_size:
        raise SettingError(f"got --draft-ids {ids} for a vocabulary of {shape.vocab_size:,}; expected no more.")
    acceptance = options.acceptance or (plan.acceptance_by_offset if plan is not None else None) or DEFAULT_ACCEPTANCE
    path = own.path(shape.num_layers) if own is not None else ()
    return Draft(path, acceptance, ids, further, options.longest, cost)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, append; an error that the project words itself is one line and exit code 2."""
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    run = _check if options.check else _simulate
    return exit_code(lambda: run(options), "fewer --batches, --contexts or --repeats")


def _simulate(options: Namespace) -> None:
    shape = describe(options.model, options.dtype)
    draft = draft_of(options, shape)
    contexts = _contexts(shape, options.contexts, SHOWN_CONTEXTS, draft.longest + 1)
    hardware = [_hardware(name, options) for name in options.hardware]
    rows = [
        simulate(shape, each, draft, batch, context)
        for each in hardware
        for context in contexts
        for batch in options.batches or SHOWN_BATCHES
    ]
    rates = ", ".join(f"{each:.2f}" for each in draft.acceptance)
    print(f"\n{Path(options.model).name}, {shape.dtype}, acceptance {rates}\n\n{table(rows)}\n")
    paying = []
    for each in hardware:
        for context in contexts:
            largest, ranges = paying_batches(shape, each, draft, context)
            print(f"{each.name}, context {context:,}: {_sentence(largest, ranges)}")
            paying.append({"hardware": each.name, "context": context, "largest_batch": largest, "batches": ranges})
    if options.picture is not None:
        draw_simulation(rows, options.picture)
    document = {
        "experiment": "simulate",
        "model": Path(options.model).name,
        "dtype": shape.dtype,
        "conditions": program_conditions(),
        "hardware": [asdict(each) for each in hardware],
        "draft": asdict(draft),
        "rows": rows,
        "paying": paying,
    }
    append(options.results, document)


def _check(options: Namespace) -> None:
    """Fit to some batches, predict the others."""
    shape = describe(options.model, options.dtype)
    swept, made_under = _swept(options) if options.check_lines is not None else ({}, {})
    batches = options.batches or sorted({batch for batch, _, _ in swept}) or BATCHES
    fitted = [batch for batch in batches if batch in options.fitted_batches]
    held_out = [batch for batch in batches if batch not in fitted]
    if swept and not set(batches) <= {batch for batch, _, _ in swept}:
        raise SettingError(
            f"got --batches {_listed(batches)} for a sweep of the batches "
            f"{_listed(sorted({batch for batch, _, _ in swept}))}; expected some of these."
        )
    if not fitted or not held_out:
        raise SettingError(
            f"got the batches {_listed(batches)}, of which {_listed(fitted)} are to be fitted; expected some among "
            "--fitted-batches, and some not."
        )
    pass_s = {cell: each for cell, each in swept.items() if cell[0] in batches}
    if not swept:
        contexts = _contexts(shape, options.contexts, CONTEXTS, max(WIDTHS))
        model = _subject(options.model, options).load()
        _say(f"timing {len(batches) * len(contexts) * len(WIDTHS)} passes, {options.repeats} times each, in turn")
        pass_s, made_under = measure(model, batches, WIDTHS, contexts, options.repeats), conditions(model, [])
    hardware = fit(shape, {cell: each for cell, each in pass_s.items() if cell[0] in fitted})
    _, _, predicted = compare(shape, hardware, pass_s)
    print(f"\n{check_table(pass_s, predicted, fitted)}\n\n{hardware}\n")
    errors = {}
    for part, its_batches in (("fitted", fitted), ("held out", held_out)):
        ratios, seconds, _ = compare(shape, hardware, {cell: pass_s[cell] for cell in pass_s if cell[0] in its_batches})
        errors[part] = {"verify_ratio": ratios.to_dict(), "pass_s": seconds.to_dict()}
        for what, each in errors[part].items():
            print(
                f"{part}, {what}: error median {each['median']:.1%}, largest {each['largest']:.1%}, "
                f"{each['within_15_percent']:.0%} of {each['cells']} within 15 %"
            )
    if options.picture is not None:
        draw_check(pass_s, predicted, fitted, options.picture)
    if options.hardware_out is not None:
        options.hardware_out.write_text(json.dumps(asdict(hardware), indent=2) + "\n", encoding="utf-8")
    document = {
        "experiment": "simulate --check",
        "model": Path(options.model).name,
        "conditions": made_under,
        "fitted_batches": fitted,
        "hardware": asdict(hardware),
        "errors": errors,
        "cells": [{"batch": b, "width": w, "context": c, "pass_s": each} for (b, w, c), each in pass_s.items()],
    }
    append(options.results, document)


def _swept(options: Namespace) -> tuple[dict[Cell, float], dict[str, Any]]:
    """The passes that a sweep of batches timed, and its conditions.

    Raises:
        InputError: the lines cannot be read, are of another model or dtype, or hold no passes.
    """
    lines = read_lines(options.check_lines)
    pass_s, name = swept_passes(lines), Path(options.model).name
    begun = (lines[0]["options"]["model"], lines[0]["conditions"]["dtype"]) if lines else (None, None)
    if not pass_s or begun != (name, options.dtype):
        raise InputError(
            f"got --check-lines {options.check_lines}, which holds {len(pass_s)} timed passes of {begun[0]} in "
            f"{begun[1]}; expected those of {name} in {options.dtype}, by `python -m experiments.sweep batch`."
        )
    return pass_s, lines[0]["conditions"]


def _hardware(name: str, options: Namespace) -> Hardware:
    """Read, or, of this machine, fitted to passes of `--calibrate` that are timed first."""
    if name != THIS_MACHINE:
        return read_hardware(name, options.dtype, options.flops_share, options.bytes_share)
    shape = describe(options.calibrate, options.dtype)
    contexts = _contexts(shape, None, CONTEXTS, max(WIDTHS))
    model = _subject(options.calibrate, options).load()
    _say(f"timing passes of {Path(options.calibrate).name} on this machine")
    return fit(shape, measure(model, FITTED_BATCHES, WIDTHS, contexts, options.repeats), THIS_MACHINE)


def _subject(name: str, options: Namespace) -> Subject:
    dtype = parse_dtype(options.dtype)
    if not isinstance(dtype, torch.dtype):
        raise SettingError("got --dtype auto; expected the dtype in which passes are to be timed.")
    return Subject(name, dtype, torch.device(options.device))


def _contexts(shape: Inspection, given: Sequence[int] | None, usual: Sequence[int], room: int) -> list[int]:
    """Those that were given, or the usual ones for which the model has positions.

    Raises:
        SettingError: it has none for one that was given.
    """
    most = shape.max_positions - room
    beyond = [each for each in given or () if each > most]
    if beyond or most < 1:
        raise SettingError(
            f"got a context of {max(beyond, default=1):,} tokens and passes over {room} for a model of "
            f"{shape.max_positions:,} positions; expected --contexts up to {most:,}."
        )
    return list(given or dict.fromkeys(min(each, most) for each in usual))


def _sentence(largest: int, ranges: Sequence[tuple[int, int]]) -> str:
    """What `paying_batches` found, in words."""
    if not largest:
        return "not even one row fits into memory."
    shown = ", ".join(f"{first} to {last}" if first < last else f"{first}" for first, last in ranges)
    limit = "" if largest == MOST_ROWS else ", the largest that fits into memory"
    return f"drafting pays at batches {shown or '– none –'} of 1 to {largest}{limit}."


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def _say(what: str) -> None:
    print(f"{what} …", file=sys.stderr, flush=True)


def _rates(text: str) -> tuple[float, ...]:
    """Read one acceptance, or several by offset: ``0.8,0.7,0.6``."""
    try:
        rates = tuple(map(float, text.split(",")))
    except ValueError:
        rates = ()
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise ArgumentTypeError(f"got {text!r}; expected probabilities from 0 to 1 such as 0.8,0.7")
    return rates


def _options(arguments: Sequence[str] | None) -> Namespace:
    parser = Parser(prog="python -m experiments.simulate", description=__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add("model", help="checkpoint folder or hub id, read by its config alone, or a geometry: " + ", ".join(GEOMETRIES))
    known = ", ".join(ACCELERATORS)
    add("--hardware", nargs="+", default=["H100"], metavar="NAME", help=f"{known}, {THIS_MACHINE}, or a JSON file")
    add("--flops-share", type=float, default=0.7, help="of a preset's peak that large products reach (%(default)s)")
    add("--bytes-share", type=float, default=0.8, help="of a preset's bandwidth that reading reaches (%(default)s)")
    add("--exit", type=positive, metavar="E", help="draft with the first E layers")
    for sub_block in ("attention", "mlp"):
        add(f"--skip-{sub_block}", type=layer_numbers, metavar="LAYERS", help="draft without these, such as 3,5,7-9")
    add("--plan", metavar="FILE", help="draft by this plan")
    add("--draft-cost", type=amount, metavar="C", help="of drafting a token, in plain steps; 0: drafts are looked up")
    add("--draft-ids", type=positive, metavar="N", help="ids that a draft scores")
    add("--acceptance", type=_rates, metavar="A", help="of a draft, one number or by offset: 0.8,0.7")
    add("--longest", type=positive, default=8, metavar="K", help="drafts a round, at most (%(default)s)")
    add("--batches", type=positive, nargs="+", help="rows that are decoded at once")
    add("--contexts", type=positive, nargs="+", help="tokens in each row's cache")
    add("--dtype", default="bfloat16")
    add("--picture", type=Path, metavar="FILE", help="where curves are drawn")
    add("--check", action="store_true", help="time passes of the model here, fit to some, and predict the others")
    add("--check-lines", type=Path, metavar="DIR", help="of --check: take the passes that a sweep of batches timed")
    add("--fitted-batches", type=positive, nargs="+", default=list(FITTED_BATCHES), help="of --check")
    add("--hardware-out", type=Path, metavar="FILE", help="of --check: where the fitted numbers go, for --hardware")
    add("--calibrate", default="smollm2-135m", metavar="MODEL", help=f"whose passes are timed for {THIS_MACHINE}")
    add("--repeats", type=positive, default=9, help="of each pass that is timed (%(default)s)")
    add("--device", default="cpu", help="where passes are timed (%(default)s)")
    add("--threads", type=positive, default=2)
    add("--results", type=Path, default=Path("experiments/results/simulate.jsonl"))
    options = parser.parse_args(arguments)
    if options.check_lines is not None and not options.check:
        parser.error("got --check-lines without --check; expected both.")
    return options


if __name__ == "__main__":
    sys.exit(main())
