"""The options that commands share, and what they become: a loaded model, a draft plan, decoding settings.

They carry transformers' names, with dashes. What is not given is not passed on, so that defaults exist once.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from layerskip.cli.parser import layer_numbers, positive

if TYPE_CHECKING:
    from layerskip.api import Model
    from layerskip.plan import DraftPlan

__all__ = [
    "CONFIG_OPTIONS",
    "LOADING_OPTIONS",
    "SETTINGS",
    "add_config_options",
    "add_decoding_options",
    "add_loading_options",
    "add_plan_options",
    "decoding_settings",
    "draft_plan",
    "given",
    "load_model",
]

CONFIG_OPTIONS = ("dtype", "gguf_file", "revision", "trust_remote_code")
LOADING_OPTIONS = (*CONFIG_OPTIONS, "device", "allow_pickled_weights")
SETTINGS = (
    "max_new_tokens",
    "min_new_tokens",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "eos_token_id",
    "stop_strings",
    "max_time",
)


LOOKAHEAD = {
    "window": "draft by lookahead decoding: guess on in N places at once (default: 5)",
    "ngram": "…, remembering what comes out as n-grams of N tokens (default: 4)",
    "guesses": "…, and verifying up to N of them at once (default: 5)",
}


def given(options: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """Those of the options `names` that were given (or have a default)."""
    return {name: value for name in names if (value := getattr(options, name, None)) is not None}


def add_config_options(parser: Any) -> None:
    """Which checkpoint, as far as it takes to read its config."""
    parser.add_argument("--dtype", help="bfloat16, float16, float32 or float64 (default: as the checkpoint is stored)")
    parser.add_argument("--gguf-file", metavar="NAME", help="a GGUF file in the model's folder or repository")
    parser.add_argument("--revision", metavar="R", help="branch, tag or commit of a hub repository")
    parser.add_argument(
        "--trust-remote-code", action="store_const", const=True, help="run Python code that comes with the checkpoint"
    )


def add_loading_options(parser: Any) -> None:
    """How to load a checkpoint."""
    add_config_options(parser)
    parser.add_argument("--device", help="cpu, cuda, cuda:1, … (default: cpu)")
    parser.add_argument(
        "--allow-pickled-weights",
        action="store_const",
        const=True,
        help="read pytorch_model.bin where there are no safetensors; such a file can run any code",
    )
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: torch's choice)")


def load_model(options: argparse.Namespace) -> Model:
    """Load the model that the options describe."""
    import torch

    import layerskip

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return layerskip.load(options.model, **given(options, LOADING_OPTIONS))


def add_plan_options(parser: Any, plan_file: bool = True) -> None:
    """How to draft; nothing given: not at all."""
    if plan_file:
        parser.add_argument("--plan", metavar="FILE", help="a draft plan")
    parser.add_argument(
        "--assistant-early-exit", type=positive, metavar="E", help="draft with the model's first E layers"
    )
    for sub_block in ("attention", "mlp"):
        parser.add_argument(
            f"--skip-{sub_block}",
            type=layer_numbers,
            metavar="LAYERS",
            help=f"draft without the {sub_block} of these layers, such as 3,5,7-9",
        )
    parser.add_argument("--assistant-model", metavar="MODEL", help="draft with another checkpoint: a path or hub id")
    parser.add_argument(
        "--prompt-lookup-num-tokens",
        type=positive,
        metavar="N",
        help="draft up to N tokens a round from what followed the same words before; alone, or beside another way",
    )
    for name, meaning in LOOKAHEAD.items():
        parser.add_argument(f"--lookahead-{name}", type=positive, metavar="N", help=meaning)
    parser.add_argument("--num-assistant-tokens", type=positive, metavar="K", help="most tokens to draft a round")
    parser.add_argument(
        "--num-siblings",
        type=int,
        metavar="N",
        help="up to N further tokens beside each of these, verified in the same pass (default: the plan's, or 0)",
    )
    parser.add_argument(
        "--assistant-confidence-threshold",
        type=float,
        metavar="P",
        help="end a draft behind a token to which it gives a probability below P (default: 0, never)",
    )


def draft_plan(options: argparse.Namespace) -> DraftPlan | None:
    """The plan that the options describe, None if they describe none.

    Raises:
        PlanError: a value out of range, or a file that is no plan.
        SettingError: options that contradict each other or would have no effect.
    """
    from layerskip.errors import SettingError
    from layerskip.plan import DraftPlan

    file = getattr(options, "plan", None)
    own = given(options, ("assistant_early_exit", "skip_attention", "skip_mlp"))
    lookup_tokens = options.prompt_lookup_num_tokens
    ahead = given(options, tuple(f"lookahead_{name}" for name in LOOKAHEAD))
    ways = {"--plan": file, "--assistant-model": options.assistant_model}
    ways |= {", ".join(map(_as_option, each)): each for each in (own, ahead)}
    named = [option for option, value in ways.items() if value]
    if len(named) > 1:
        raise SettingError(f"got {' and '.join(named)}, which each say how to draft; expected one of them.")
    names = {
        "num_assistant_tokens": "num_draft_tokens",
        "num_siblings": "num_siblings",
        "assistant_confidence_threshold": "confidence_threshold",
    }
    limits = {names[name]: value for name, value in given(options, tuple(names)).items()}
    if lookup_tokens is not None:
        limits["lookup_tokens"] = lookup_tokens
    if limits.keys() - {"lookup_tokens"} and not named:
        idle = ", ".join(map(_as_option, given(options, tuple(names))))
        raise SettingError(f"got {idle} without anything that drafts; say how, for example --assistant-early-exit 6.")
    if file:
        return replace(DraftPlan.load(file), **limits)
    if options.assistant_model:
        return DraftPlan.model(options.assistant_model, **limits)
    if ahead:
        return DraftPlan.lookahead(**{name.removeprefix("lookahead_"): each for name, each in ahead.items()}, **limits)
    if not own:
        return None if lookup_tokens is None else DraftPlan.lookup(lookup_tokens)
    return DraftPlan.skip(
        own.get("skip_attention", ()), own.get("skip_mlp", ()), exit_layer=own.get("assistant_early_exit"), **limits
    )


def add_decoding_options(parser: Any) -> None:
    """transformers' decoding settings, and ours beside them."""
    add = parser.add_argument
    add("--max-new-tokens", type=int, default=256, metavar="N", help="(default: %(default)s)")
    add("--min-new-tokens", type=int, metavar="N", help="no end before so many tokens")
    sampling = argparse.BooleanOptionalAction
    add("--do-sample", action=sampling, help="draw tokens, or take the likeliest (default: the checkpoint's own)")
    add("--temperature", type=float, metavar="T", help="above 1 flattens the distribution, below 1 sharpens it")
    add("--top-k", type=int, metavar="K", help="draw among the K likeliest tokens (transformers' default: 50)")
    add("--top-p", type=float, metavar="P", help="draw among the likeliest tokens that make up P")
    add("--min-p", type=float, metavar="P", help="draw among tokens at least P times as likely as the likeliest")
    add("--repetition-penalty", type=float, metavar="X", help="above 1: less likely to say a token again")
    add("--no-repeat-ngram-size", type=int, metavar="N", help="say no N tokens in a row twice")
    add("--eos-token-id", type=int, action="append", metavar="ID", help="a token that ends the output; may be repeated")
    add("--stop-strings", action="append", metavar="TEXT", help="a string that ends the output; may be repeated")
    add("--max-time", type=float, metavar="SECONDS", help="end the output after so long")
    add("--seed", type=int, metavar="N", help="for sampling; line i of a file of prompts, from 0, uses N + i")
    add(
        "--acceptance-rule",
        choices=("maximal", "invariant"),
        help="maximal (default) accepts most; invariant gives for a seed the same text whatever the plan",
    )
    add(
        "--governor",
        choices=("measured", "fixed", "off"),
        help="draft only what is expected to gain time by what is measured (default), or by --draft-cost and "
        "--verify-slope; off: always draft",
    )
    add("--draft-cost", type=float, metavar="C", help="of a draft step in plain steps, for --governor fixed")
    add("--verify-slope", type=float, metavar="S", help="plain steps that each further token adds to a pass, likewise")
    add(
        "--pass-width",
        type=positive,
        metavar="N",
        help="run every pass over N tokens (at least K + 1), so that in bfloat16 too no bit depends on the draft",
    )
    add(
        "--compile",
        action="store_const",
        const=True,
        help="have torch.compile's inductor make programs of the passes: faster steps after a minute or two of "
        "compiling for each of a few programs; for long files of prompts",
    )


def decoding_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `Model.generate` and `Model.stream`, the plan and the seed aside."""
    from layerskip.errors import SettingError
    from layerskip.governor.costs import CostRatios

    named = {"draft": options.draft_cost, "verify_slope": options.verify_slope}
    ratios = {name: value for name, value in named.items() if value is not None}
    if ratios and options.governor != "fixed":
        raise SettingError("got --draft-cost or --verify-slope, which only --governor fixed uses; pass that too.")
    own = given(options, (*SETTINGS, "acceptance_rule", "governor", "pass_width", "compile"))
    return own | ({"cost_ratios": CostRatios(**ratios)} if ratios else {})


def _as_option(name: str) -> str:
    return "--" + name.replace("_", "-")
