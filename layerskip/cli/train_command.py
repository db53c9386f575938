"""`layerskip train`: make a draft path that pays, on text that the model writes itself."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerskip.cli.options import add_loading_options, given, load_model
from layerskip.cli.parser import positive
from layerskip.cli.records import as_inputs, read_prompts
from layerskip.cli.staged_progress import TrainProgress
from layerskip.errors import SettingError

if TYPE_CHECKING:
    from layerskip.api import Model
    from layerskip.training import ExitSettings, TrainingTexts

__all__ = ["add_parser"]

EXAMPLES = """\
examples:
  layerskip train ./checkpoint --recipe jump --out ./draft              # the model writes the texts, too
  layerskip train ./checkpoint --recipe adapter --exit-layer 6 --prompts prompts.jsonl --out ./draft
  layerskip generate ./checkpoint --plan ./draft/plan.json --prompt "Why is the sky blue?"
Interrupted, the same command with --resume goes on.
"""

_COUNTS = {
    "tokens": "to train on, repetitions counted (default: 4 million)",
    "text_tokens": "of different text (default: a quarter of --tokens)",
    "batch_tokens": "of one step of the optimiser (default: 2048)",
    "micro_rows": "rows whose gradients are computed at once: less takes less memory (default: 4)",
    "num_blocks": "trained blocks (default: 1)",
    "offsets": "drafts of a round that are trained for (default: 3)",
    "evaluate_every": "steps between two looks at held-out text (default: 100)",
}
_EXIT_SHARE = 5  # an adapter stands behind a fifth of the layers unless told otherwise


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "train",
        help="train a draft path that pays",
        description="Train a draft path on the model's own text. The model is not changed, and its output stays its "
        "own.\nWrites plan.json and adapter.safetensors.",
        epilog=EXAMPLES,
    )
    parser.add_argument("model", metavar="MODEL", help="a path or hub id")
    parser.add_argument(
        "--recipe",
        choices=("jump", "adapter"),
        default="jump",
        help="jump (default): trained blocks that read the last token and the model's state before it, nothing else; "
        "adapter: the model's first layers run before them",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where all of it goes")
    parser.add_argument("--resume", action="store_true", help="go on with what was begun there")
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
    group.add_argument("--exit-layer", type=positive, metavar="E", help="of an adapter (default: a fifth of all)")
    group.add_argument("--no-state", action="store_true", help="an adapter that does not read the model's last state")
    group.add_argument("--vocabulary-size", type=int, metavar="N", help="ids it may say, 0 for all (default: 8192)")
    group.add_argument("--learning-rate", type=float, metavar="R", help="(default: 0.001)")
    group.add_argument("--precision", choices=("bfloat16", "float32"), help="of the products (default: bfloat16)")
    group.add_argument("--seed", type=int, metavar="N", help="of texts and their order (default: 0)")
    add_loading_options(parser.add_argument_group("loading"))
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from layerskip.training import train_exit

    named = given(options, ("tokens", "batch_tokens", "micro_rows", "num_blocks", "offsets", "evaluate_every",
                            "vocabulary_size", "learning_rate", "precision", "seed"))  # fmt: skip
    _check(options, named)
    model = load_model(options)
    settings = _settings(options, named, model)
    texts = _texts(options, settings, model)
    with TrainProgress() as progress:
        plan = train_exit(model, texts, options.out, settings, resume=options.resume, progress=progress.trained)
    agreement = plan.provenance["acceptance_by_offset"]
    print(
        f"on {settings.held_out_rows} rows of text not trained on, the path says what the model says: "
        + ", ".join(f"{each:.1%}" for each in agreement)
        + " (1st, 2nd, … draft of a round, if those before were right)"
    )
    print(f"a draft step reads {model.draft_cost(plan):.1%} of what a plain step reads")
    print(f"plan: {options.out / 'plan.json'}")
    return 0


def _check(options: argparse.Namespace, named: dict[str, Any]) -> None:
    """What can be refused before the model is loaded."""
    from layerskip.training import ExitSettings

    if options.recipe == "jump":
        for name, idle in (("--exit-layer", options.exit_layer), ("--no-state", options.no_state)):
            if idle:
                raise SettingError(f"got {name} for the recipe jump, which has none; pass --recipe adapter.")
    if options.chat is not None and options.prompts is None:
        raise SettingError("got --chat or --no-chat without --prompts, where it has no effect.")
    if options.texts is not None and options.text_tokens is not None:
        raise SettingError("got --text-tokens for texts that are there; leave it out.")
    if (size := named.get("vocabulary_size")) is not None:
        if size < 0:
            raise SettingError(f"got --vocabulary-size {size}; expected a number of ids, or 0 for all.")
        named["vocabulary_size"] = size or None
    if options.out.exists() and not options.out.is_dir():
        raise SettingError(f"got --out {options.out}, which is a file; expected a folder, or one to be made.")
    ExitSettings(**named)


def _settings(options: argparse.Namespace, named: dict[str, Any], model: Model) -> ExitSettings:
    from layerskip.training import ExitSettings

    settings = ExitSettings(**named)
    if options.recipe == "adapter":
        layers = model.decoder.num_blocks
        settings = replace(
            settings,
            exit_layer=options.exit_layer or max(1, layers // _EXIT_SHARE),
            reads_state=not options.no_state,
        )
    return settings


def _texts(options: argparse.Namespace, settings: ExitSettings, model: Model) -> TrainingTexts:
    from layerskip.training import TrainingTexts, WritingSettings, write_texts

    if options.texts is not None:
        return TrainingTexts.load(options.texts, model.decoder.vocab_size)
    prompts = None
    if options.prompts is not None:
        lines = read_prompts(options.prompts)
        chat = options.chat if options.chat is not None else bool(getattr(model.tokenizer, "chat_template", None))
        prompts = [as_inputs(line.content, chat) for line in lines]
    row_tokens = min(WritingSettings.row_tokens, model.decoder.max_positions)
    writing = WritingSettings(
        tokens=options.text_tokens or max(row_tokens, settings.tokens // 4), row_tokens=row_tokens, seed=settings.seed
    )
    options.out.mkdir(parents=True, exist_ok=True)
    with TrainProgress() as progress:
        return write_texts(model, writing, options.out, prompts, progress=progress.written)
