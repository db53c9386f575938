"""`layerskip train`: make a draft path that pays, on text that the model writes itself."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerskip.cli.options import add_loading_options, given, load_model
from layerskip.cli.parser import layer_numbers, positive
from layerskip.cli.records import as_inputs, read_prompts
from layerskip.cli.staged_progress import TrainProgress
from layerskip.errors import SettingError

if TYPE_CHECKING:
    from layerskip.api import Model
    from layerskip.plan import DraftPlan
    from layerskip.training import DraftModelSettings, ExitSettings, RecipeSettings, TrainingTexts

    _Settings = ExitSettings | DraftModelSettings | RecipeSettings

__all__ = ["add_parser"]

EXAMPLES = """\
examples:
  layerskip train ./checkpoint --recipe jump --out ./draft              # the model writes the texts, too
  layerskip train ./checkpoint --recipe adapter --exit-layer 6 --prompts prompts.jsonl --out ./draft
  layerskip train ./checkpoint --recipe draft-model --layers 4 --out ./small   # a second model, and its plan
  layerskip generate --model ./checkpoint --plan ./draft/plan.json --chat "Why is the sky blue?"
Interrupted, the same command with --resume goes on.
"""

_COUNTS = {
    "tokens": "to train on, repetitions counted (default: 4 million; layerskip: 20 million)",
    "text_tokens": "of different text (default: a quarter of --tokens)",
    "batch_tokens": "of one step of the optimiser (default: 2048; layerskip: 8192)",
    "micro_rows": "rows whose gradients are computed at once: less takes less memory (default: 4)",
    "held_out_rows": "of the texts, never trained on (default: 16, at most an eighth of all)",
    "evaluate_every": "steps between two looks at held-out text (default: 100)",
}
_OF_PATHS = {
    "num_blocks": "trained blocks (default: 1)",
    "offsets": "drafts of a round that are trained for (default: 3; eagle: 1; medusa, one head each: 4)",
}
_SHARED = (*(name for name in _COUNTS if name != "text_tokens"), "learning_rate", "precision", "seed")
# Options that belong to some recipes only.
_OF_RECIPE = {
    "jump": (*_OF_PATHS, "vocabulary_size", "state_weight", "further_states"),
    "adapter": (*_OF_PATHS, "vocabulary_size", "state_weight", "further_states", "exit_layer", "no_state"),
    "eagle": ("num_blocks", "vocabulary_size", "state_weight"),  # what it lacks makes it what it is
    "medusa": ("offsets", "vocabulary_size"),
    "draft-model": ("layers",),
    "layerskip": ("lora_rank", "max_dropout", "curriculum"),
}
_OF_CHECKPOINTS = ("draft-model", "layerskip")  # recipes that write one
_OF_BEGINNING = ("exit_layer", "no_state", "num_blocks", "further_states")  # what --begin-with decides
_HEADS = 4  # of medusa; the paper trains five, and says that no more are of use
_EXIT_SHARE = 5  # an adapter stands behind a fifth of the layers unless told otherwise


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "train",
        help="train a draft path that pays",
        description="Train a draft path on the model's own text, and write its plan. The model is not changed, and its "
        "output stays\nits own (but for --recipe layerskip, which trains a copy of the model itself).",
        epilog=EXAMPLES,
    )
    parser.add_argument("model", metavar="MODEL", help="a path or hub id")
    parser.add_argument(
        "--recipe",
        choices=tuple(_OF_RECIPE),
        default="jump",
        help="jump (default): trained blocks that read the last token and the model's state before it, nothing else; "
        "adapter: the model's first layers run before them; eagle: a jump trained as EAGLE's drafter is, by regression "
        "of states, one draft deep; medusa: no blocks but heads on the model's last state, one for each of the next "
        "tokens; draft-model: a small second model, of a few of the model's layers; layerskip: the model itself, by "
        "layer dropout and early-exit losses, as a checkpoint of its own",
    )
    parser.add_argument("--out", type=_folder, required=True, metavar="FOLDER", help="where all of it goes")
    parser.add_argument("--resume", action="store_true", help="go on with what was begun there")
    parser.add_argument(
        "--begin-with",
        type=Path,
        metavar="PLAN",
        help="train the blocks of this plan further, say on --prompts of yours",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines, which the model only answers")
    source.add_argument("--texts", type=Path, metavar="FILE", help="an .npz file of token rows instead of writing any")
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="prompts that are plain strings are a user's messages (default: if the model has a chat template)",
    )
    group = parser.add_argument_group("what is trained")
    for name, text in _COUNTS.items():
        group.add_argument("--" + name.replace("_", "-"), type=positive, metavar="N", help=text)
    group.add_argument("--learning-rate", type=float, metavar="R", help="(default: 0.001; layerskip: 0.00005)")
    group.add_argument("--precision", choices=("bfloat16", "float32"), help="of the products (default: bfloat16)")
    group.add_argument("--seed", type=int, metavar="N", help="of texts and their order (default: 0)")
    group = parser.add_argument_group("of jump, adapter, eagle and medusa")
    for name, text in _OF_PATHS.items():
        group.add_argument("--" + name.replace("_", "-"), type=positive, metavar="N", help=text)
    group.add_argument("--vocabulary-size", type=int, metavar="N", help="ids it may say, 0 for all (default: 8192)")
    group.add_argument(
        "--state-weight",
        type=float,
        metavar="W",
        help="of a loss on states beside that on tokens (default: 0; eagle: 10)",
    )
    group.add_argument(
        "--further-states",
        type=_states,
        metavar="N,…",
        help="numbers of blocks behind which the model's states are read, beside the last one's, or none (default: "
        "a third and two thirds of all)",
    )
    group.add_argument("--exit-layer", type=positive, metavar="E", help="of an adapter (default: a fifth of all)")
    group.add_argument(
        "--no-state", action="store_const", const=True, help="an adapter that does not read the model's last state"
    )
    group = parser.add_argument_group("of draft-model")
    group.add_argument("--layers", type=positive, metavar="N", help="that it keeps (default: an eighth of all)")
    group = parser.add_argument_group("of layerskip")
    group.add_argument("--lora-rank", type=positive, metavar="R", help="train additions of this rank (default: all)")
    group.add_argument("--max-dropout", type=float, metavar="P", help="of the last layer (default: 0.1)")
    group.add_argument("--curriculum", choices=("rotational", "gradual"), help="of the losses (default: rotational)")
    add_loading_options(parser.add_argument_group("loading"))
    parser.set_defaults(run=_run)


def _states(text: str) -> tuple[int, ...]:
    return () if text == "none" else layer_numbers(text)


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("got an empty path; expected that of a folder, or of one to be made")
    return Path(text)


def _run(options: argparse.Namespace) -> int:
    from layerskip.plan import DraftPlan
    from layerskip.training import ExitSettings, TrainingTexts, WritingSettings
    from layerskip.training.folder import held_folder

    settings = _settings(options)
    begin_with = None if options.begin_with is None else DraftPlan.load(options.begin_with)
    model = load_model(options)
    if isinstance(settings, ExitSettings) and options.recipe == "adapter" and begin_with is None:
        exit_layer = options.exit_layer or max(1, model.decoder.num_blocks // _EXIT_SHARE)
        settings = replace(settings, exit_layer=exit_layer, reads_state=not options.no_state)
    texts = None if options.texts is None else TrainingTexts.load(options.texts, model.decoder.vocab_size)
    row_tokens = min(WritingSettings.row_tokens, model.decoder.max_positions)
    _check(options, model, settings, begin_with, row_tokens if texts is None else texts.tokens.shape[1])
    with held_folder(options.out), contextlib.ExitStack() as stack:
        texts = texts or _written(options, settings.tokens, settings.seed, row_tokens, model)
        progress = stack.enter_context(TrainProgress())
        if options.held_out_rows is None:
            settings = replace(settings, held_out_rows=min(settings.held_out_rows, max(1, len(texts.tokens) // 8)))
        lines = _train(options, model, texts, settings, begin_with, progress)
    print("\n".join([*lines, f"plan: {options.out / 'plan.json'}"]))
    return 0


def _check(
    options: argparse.Namespace, model: Model, settings: _Settings, begin_with: DraftPlan | None, row_tokens: int
) -> None:
    """What can be known with the model, and refused, before there is a text."""
    from layerskip.training import DraftModelSettings, ExitSettings
    from layerskip.training.beginning import check_draft_model, check_exit, check_layerskip

    if isinstance(settings, ExitSettings):
        check_exit(model, options.out, settings, begin_with, options.resume, row_tokens)
    elif isinstance(settings, DraftModelSettings):
        check_draft_model(model, options.out, settings, options.resume)
    else:
        check_layerskip(model.hf_model, options.out, settings, options.resume)


def _train(
    options: argparse.Namespace,
    model: Model,
    texts: TrainingTexts,
    settings: _Settings,
    begin_with: DraftPlan | None,
    progress: TrainProgress,
) -> list[str]:
    """Train by the recipe that the settings are of; what is to be said of it."""
    from layerskip.training import (
        DraftModelSettings,
        ExitSettings,
        train_draft_model,
        train_exit,
        train_layerskip,
    )

    told: Any = {"resume": options.resume, "progress": progress.trained}
    if isinstance(settings, ExitSettings):
        return _of_draft(model, train_exit(model, texts, options.out, settings, begin_with=begin_with, **told), "path")
    if isinstance(settings, DraftModelSettings):
        plan = train_draft_model(model, texts, options.out, settings, **told)
        return [*_of_draft(model, plan, "draft model"), f"checkpoint: {options.out}"]
    train_layerskip(model.hf_model, model.tokenizer, texts, options.out, settings, **told)
    return [f"checkpoint: {options.out}", f"what it gained and lost: {options.out / 'README.md'}"]


def _of_draft(model: Model, plan: DraftPlan, what: str) -> list[str]:
    agreement = ", ".join(f"{each:.1%}" for each in plan.provenance["acceptance_by_offset"])
    return [
        f"on text not trained on, the {what} says what the model says: {agreement} (1st, 2nd, … draft of a round, if "
        "those before were right)",
        f"a draft step reads {model.draft_cost(plan):.1%} of what a plain step reads",
    ]


def _settings(options: argparse.Namespace) -> _Settings:
    """What can be known, and refused, before the model is loaded."""
    from layerskip.training import EAGLE, DraftModelSettings, ExitSettings, RecipeSettings
    from layerskip.training.beginning import ADAPTER, PLAN, RESULTS
    from layerskip.training.folder import STATE, refuse_folder

    makes_checkpoint = options.recipe in _OF_CHECKPOINTS
    if options.begin_with is not None:
        names = (f"recipe {options.recipe}",) if makes_checkpoint else tuple(given(options, _OF_BEGINNING))
        for name in names:
            raise SettingError(
                f"got --begin-with beside --{name.replace('_', '-')}, which asks for other blocks than that plan's. "
                "Leave one of them out."
            )
    own = _OF_RECIPE[options.recipe]
    for recipe, names in _OF_RECIPE.items():
        for name in given(options, tuple(name for name in names if name not in own)):
            raise SettingError(
                f"got --{name.replace('_', '-')} for the recipe {options.recipe}, which has no such thing; "
                f"it belongs to --recipe {recipe}."
            )
    if options.chat is not None and options.prompts is None:
        raise SettingError("got --chat or --no-chat without --prompts, where it has no effect.")
    if options.texts is not None and options.text_tokens is not None:
        raise SettingError("got --text-tokens for texts that are there; leave it out.")
    # Again with the model, and with the lock; here because a large model takes minutes to load.
    state, results = (STATE, RESULTS) if makes_checkpoint else ("", (PLAN, ADAPTER))
    refuse_folder(options.out, state, results, options.resume)
    shared = given(options, _SHARED)
    if options.recipe == "layerskip":
        return RecipeSettings(**shared, **given(options, own))
    if options.recipe == "draft-model":
        return DraftModelSettings(**shared, num_layers=options.layers)
    named = given(options, tuple(name for name in own if name not in ("exit_layer", "no_state")))
    if (size := named.get("vocabulary_size")) is not None:
        if size < 0:
            raise SettingError(f"got --vocabulary-size {size}; expected a number of ids, or 0 for all.")
        named["vocabulary_size"] = size or None
    preset: Mapping[str, Any] = EAGLE if options.recipe == "eagle" else {}
    if options.recipe == "medusa":  # its heads learn apart, so none is to learn before the others
        preset = {"offsets": _HEADS, "num_blocks": 0, "first_offset_share": 0.0}
        named["num_heads"] = named.get("offsets", _HEADS)
    return ExitSettings(**{**shared, **preset, **named})


def _written(options: argparse.Namespace, tokens: int, seed: int, row_tokens: int, model: Model) -> TrainingTexts:
    from layerskip.training import WritingSettings, write_texts

    wanted = options.text_tokens or max(2 * row_tokens, tokens // 4)
    rows, least = -(-wanted // row_tokens), (options.held_out_rows or 1) + 1
    if rows < least:
        raise SettingError(
            f"got {wanted:,} tokens of text, {rows} rows of {row_tokens}; expected {least} rows or more, some to train "
            "on and some held out. Ask for more by --text-tokens."
        )
    prompts = None
    if options.prompts is not None:
        lines = read_prompts(options.prompts)
        chat = options.chat if options.chat is not None else bool(getattr(model.tokenizer, "chat_template", None))
        prompts = [as_inputs(line.content, chat) for line in lines]
    writing = WritingSettings(tokens=wanted, row_tokens=row_tokens, seed=seed)
    with TrainProgress() as progress:
        return write_texts(model, writing, options.out, prompts, progress=progress.written)
