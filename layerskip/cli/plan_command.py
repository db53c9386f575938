"""`layerskip plan`: write a draft plan, or check that one fits a model and say what it does."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerskip.cli.options import (
    CONFIG_OPTIONS,
    LOADING_OPTIONS,
    add_loading_options,
    add_plan_options,
    draft_plan,
    given,
    load_model,
)
from layerskip.cli.parser import positive
from layerskip.cli.records import read_texts
from layerskip.cli.terminal import note
from layerskip.errors import InputError, PlanMismatchError, SettingError

if TYPE_CHECKING:
    from layerskip.api import Model
    from layerskip.models.inspection import Inspection
    from layerskip.plan import DraftPlan

__all__ = ["add_parser", "describe_path"]


def add_parser(subparsers: Any) -> None:
    """Add the command and its two commands."""
    parser = subparsers.add_parser("plan", help="check or write a draft plan", description="Check or write a plan.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="plan_command", required=True)
    check = commands.add_parser(
        "check",
        help="whether a plan fits a model, and what it does",
        description="Check a plan file against a model, and print what the plan does. Exit code 2 if it does not "
        "fit.\nThe weights are read only if the plan was made for certain weights, or drafts with another model.",
    )
    check.add_argument("plan", metavar="PLAN", help="a plan file")
    check.add_argument("model", metavar="MODEL", help="a path or hub id")
    check.add_argument("--json", action="store_true", help="one JSON object")
    add_loading_options(check.add_argument_group("loading"))
    check.set_defaults(run=_check)

    make = commands.add_parser(
        "make",
        help="write a plan",
        description="Write a plan file. With --model the plan is checked and bound to that model's weights.",
    )
    make.add_argument("--out", type=Path, metavar="FILE", help="where to (default: standard output)")
    add_plan_options(make, plan_file=False)
    make.add_argument(
        "--draft-vocabulary", type=positive, metavar="N", help="score only the N token ids most frequent in the texts"
    )
    make.add_argument(
        "--calibration", type=Path, metavar="FILE", help="the texts: a file of prompts (JSON lines), or plain text"
    )
    make.add_argument("--model", metavar="PATH_OR_HUB_ID", help="the model that the plan is for")
    add_loading_options(make.add_argument_group("loading"))
    make.set_defaults(run=_make)


def _check(options: argparse.Namespace) -> int:
    from layerskip.models.inspection import inspect_checkpoint
    from layerskip.plan import DraftPlan

    plan = DraftPlan.load(options.plan)
    inspection = inspect_checkpoint(options.model, **given(options, CONFIG_OPTIONS))
    try:
        _check_config(plan, inspection)
        if plan.target is not None or plan.draft_model is not None or plan.adapter is not None:
            _check_weights(plan, options)
    except PlanMismatchError as error:
        if options.json:
            print(json.dumps({"fits": False, "reason": str(error), "plan": plan.to_dict()}))
        raise
    cost = _cost(plan, inspection)
    if options.json:
        print(json.dumps({"fits": True, "cost": cost, "plan": plan.to_dict()}))
    else:
        print(f"{options.plan} fits {options.model}.")
        print("\n".join(_describe(plan, inspection.num_layers, cost)))
    return 0


def _check_config(plan: DraftPlan, inspection: Inspection) -> None:
    """What can be known without the weights, in the words of the check with them."""
    from layerskip.identity import ModelIdentity

    weights = plan.target.weights if plan.target is not None else ""
    plan.check(
        ModelIdentity(
            architecture=inspection.architecture,
            num_layers=inspection.num_layers,
            hidden_size=inspection.hidden_size,
            vocab_size=inspection.vocab_size,
            weights=weights,
        )
    )


def _check_weights(plan: DraftPlan, options: argparse.Namespace) -> None:
    model = load_model(options)
    model.check_plan(plan)


def _cost(plan: DraftPlan, inspection: Inspection) -> float:
    from layerskip.models.adapter_file import count_parameters
    from layerskip.models.inspection import inspect_checkpoint

    if plan.is_self_draft:
        ids = None if plan.draft_vocabulary is None else len(plan.draft_vocabulary)
        trained = 0 if plan.adapter is None else count_parameters(plan.adapter) / inspection.step_parameters
        return inspection.draft_cost(plan.path(inspection.num_layers), ids) + trained
    if plan.draft_model is None:
        return 0.0
    return inspect_checkpoint(plan.draft_model).step_parameters / inspection.step_parameters


def describe_path(plan: DraftPlan, num_layers: int) -> str:
    """What drafts, on a model of `num_layers` layers, in some words."""
    from layerskip.models.adapter_file import read_spec

    if plan.draft_model is not None:
        return f"the model {plan.draft_model}"
    if plan.lookahead_window:
        return (
            f"what it guesses ahead in {plan.lookahead_window} places at once" + " and the text" * plan.lookahead_text
        )
    if not plan.is_self_draft:
        return "what followed the same words before"
    path = plan.path(num_layers)
    attention, mlp = sum(step.attention for step in path), sum(step.mlp for step in path)
    end = "" if plan.exit_layer is None else f", up to layer {plan.exit_layer}"
    own = f"{attention} of {num_layers} attentions and {mlp} of {num_layers} MLPs{end}"
    if plan.adapter is None:
        return own
    if path:
        return f"{own}, and trained blocks"
    heads = read_spec(plan.adapter).num_heads
    return f"{heads} trained heads on the last state" if heads else "trained blocks alone, behind the embedding"


def _describe(plan: DraftPlan, num_layers: int, cost: float) -> list[str]:
    """What a plan does, in a few lines."""
    from layerskip.drafters.lookahead import Sizes

    lines = [f"drafts with {describe_path(plan, num_layers)}"]
    for name, skipped in (("attention", plan.skip_attention), ("MLP", plan.skip_mlp)):
        if skipped:
            lines.append(f"leaves out {name} {', '.join(map(str, skipped))}")
    stop = f", ending behind a token of probability below {plan.confidence_threshold:g}"
    if plan.draft_vocabulary is not None:
        lines.append(f"scores {len(plan.draft_vocabulary):,} of the token ids")
    if plan.num_draft_tokens:
        lines.append(f"up to {plan.num_draft_tokens} tokens a round" + stop * (plan.confidence_threshold > 0))
        if plan.num_siblings:
            lines.append(f"up to {plan.num_siblings} tokens beside each, verified in the same pass")
        lines.append(f"predicted cost of a draft step: {cost:.3f} plain steps; " + _gain(plan, cost))
    if plan.lookup_tokens:
        beside = "or, where that does better, " if plan.num_draft_tokens else ""
        lines.append(f"{beside}up to {plan.lookup_tokens} tokens a round copied from the text, at no cost")
    if plan.lookahead_window:
        lines.append(
            f"up to {plan.lookahead_guesses} n-grams of {plan.lookahead_ngram} tokens a round, in passes over up to "
            f"{Sizes.of(plan).width + 1} tokens"
        )
    return lines


def _gain(plan: DraftPlan, cost: float) -> str:
    from layerskip.models.adapter_file import read_spec

    if plan.adapter is not None and read_spec(plan.adapter).num_heads:
        return f"one a round, which gains only if more than {cost:.2f} of its drafts are accepted"
    return f"it gains only if more than {min(cost, 1):.0%} of the drafts are accepted"


def _make(options: argparse.Namespace) -> int:
    plan = draft_plan(options)
    if plan is None:
        raise SettingError("got nothing to draft with; say how, for example --assistant-early-exit 6.")
    if options.out is not None and options.out.exists():
        raise SettingError(f"got --out {options.out}, which exists. Remove it, or name another file.")
    if options.out is None and options.assistant_model and Path(options.assistant_model).exists():
        raise SettingError("got a draft model on this machine, which a plan names by its place beside it; pass --out.")
    loading = given(options, (*LOADING_OPTIONS, "threads"))
    if options.model is None and loading:
        raise SettingError(f"got {', '.join(loading)} without --model, where they have no effect; pass --model too.")
    _refuse_half_a_vocabulary(options)
    if options.model is not None:
        model = load_model(options)
        if options.draft_vocabulary is not None:
            plan = replace(plan, draft_vocabulary=_draft_vocabulary(model, options))
        model.check_plan(plan)
        plan = replace(plan, target=model.identity)
    if options.out is None:
        print(json.dumps(plan.to_dict(), indent=2))
    else:
        plan.save(options.out)
    return 0


def _refuse_half_a_vocabulary(options: argparse.Namespace) -> None:
    asked = options.draft_vocabulary is not None
    if asked and (options.calibration is None or options.model is None):
        raise SettingError("got --draft-vocabulary without --calibration and --model, which say what is frequent.")
    if options.calibration is not None and not asked:
        raise SettingError("got --calibration without --draft-vocabulary, where it has no effect; pass both.")


def _draft_vocabulary(model: Model, options: argparse.Namespace) -> tuple[int, ...]:
    from layerskip.draft_vocabulary import vocabulary_of_texts

    if model.tokenizer is None:
        raise InputError("got a model without tokenizer, which cannot count the tokens of a text.")
    texts = read_texts(options.calibration)
    chosen = vocabulary_of_texts(texts, model.tokenizer, options.draft_vocabulary, model.decoder.vocab_size)
    used = {token for text in texts for token in model.tokenizer(text, add_special_tokens=False)["input_ids"]}
    if len(used) < len(chosen):
        note(
            f"the texts use {len(used):,} token ids; the lowest ids, which a byte-pair tokenizer gives to what is "
            f"frequent, fill up to {len(chosen):,}. More text would choose better."
        )
    return chosen
