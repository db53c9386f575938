"""`layerskip inspect`: what a checkpoint is made of, and what a draft on it would have to achieve."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from layerskip.cli.options import CONFIG_OPTIONS, add_config_options, given
from layerskip.cli.terminal import make_console

if TYPE_CHECKING:
    from layerskip.models.inspection import Inspection

__all__ = ["add_parser"]

ACCEPTANCES = (0.6, 0.8, 0.9)  # for which the best possible speed-up is shown

EXPLANATION = """\
cost of an exit: what a draft step costs, in plain steps, by the parameters it reads: its blocks and the head.
It is also the acceptance per token that a draft has to exceed: below it no draft length gains anything (Leviathan et
al. 2023, thm. 3.8, when checking a draft costs one plain step). x1.40 (2): at that acceptance, the most to be gained,
and the draft length that gains it. Costs in time differ; measure them with `layerskip generate --json`."""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "inspect",
        help="sizes of a checkpoint, and what every exit would cost",
        description="Print a checkpoint's architecture, sizes, and the predicted cost of every exit. Reads its config "
        "alone, no weights.",
    )
    parser.add_argument("model", metavar="MODEL", help="a path or hub id")
    add_config_options(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from layerskip.models.inspection import inspect_checkpoint

    inspection = inspect_checkpoint(options.model, **given(options, CONFIG_OPTIONS))
    if options.json:
        print(json.dumps(_as_json(options.model, inspection)))
        return 0
    console = make_console()
    for name, value in _facts(options.model, inspection).items():
        console.print(f"{name:<14}{value}", soft_wrap=True)
    console.print()
    console.print(_exits(inspection))
    console.print(EXPLANATION, soft_wrap=True)
    return 0


def exit_costs(inspection: Inspection) -> list[tuple[int, float]]:
    """Every exit with its predicted cost in plain steps."""
    from layerskip.plan import DraftPlan

    layers = inspection.num_layers
    return [(exit_, inspection.draft_cost(DraftPlan.exit(exit_).path(layers))) for exit_ in range(1, layers)]


def _as_json(model: str, inspection: Inspection) -> dict[str, Any]:
    from layerskip.speedup import best_draft_length

    exits = []
    for exit_layer, cost in exit_costs(inspection):
        best = {str(acceptance): best_draft_length(acceptance, cost) for acceptance in ACCEPTANCES}
        exits.append(
            {
                "exit_layer": exit_layer,
                "cost": cost,
                "least_acceptance": cost,
                "best": {key: {"num_draft_tokens": k, "speedup": gain} for key, (k, gain) in best.items()},
            }
        )
    totals = {"parameters": inspection.parameters, "kv_bytes_per_token": inspection.kv_bytes_per_token}
    return {"model": model, **asdict(inspection), **totals, "exits": exits}


def _facts(model: str, inspection: Inspection) -> dict[str, str]:
    tied = ", tied: the same matrix" * inspection.tied
    return {
        "model": model,
        "architecture": f"{inspection.architecture} ({inspection.family})",
        "parameters": f"{inspection.parameters:,}, {inspection.dtype}",
        "blocks": f"{inspection.num_layers}, hidden size {inspection.hidden_size:,}",
        "  attention": f"{_each(inspection.attention_parameters)} parameters a block; {inspection.heads} heads, "
        f"{inspection.kv_heads} key/value heads of size {inspection.head_dim}; sees {_windows(inspection)}",
        "  MLP": f"{_each(inspection.mlp_parameters)} parameters a block{_chosen(inspection)}",
        "head": f"{inspection.head_parameters:,} parameters, {inspection.head_blocks:.2f} blocks; "
        f"vocabulary {inspection.vocab_size:,}",
        "embedding": f"{inspection.embedding_parameters:,} parameters{tied}",
        "positions": f"{inspection.max_positions:,}; {_positions(inspection)}",
        "KV cache": f"{inspection.kv_bytes_per_token:,} bytes a token",
    }


def _exits(inspection: Inspection) -> Table:
    from layerskip.speedup import best_draft_length

    table = Table(title="early exits", title_justify="left")
    for heading in ("exit", "cost", *(f"gain at {acceptance:.0%}" for acceptance in ACCEPTANCES)):
        table.add_column(heading, justify="right")
    for exit_layer, cost in exit_costs(inspection):
        gains = []
        for acceptance in ACCEPTANCES:
            drafts, gain = best_draft_length(acceptance, cost)
            gains.append(f"x{gain:.2f} ({drafts})" if drafts else "none")
        table.add_row(str(exit_layer), f"{cost:.3f}", *gains)
    return table


def _each(counts: tuple[int, ...]) -> str:
    """A number for all blocks, or the range over them."""
    return f"{min(counts):,}" if len(set(counts)) == 1 else f"{min(counts):,} to {max(counts):,}"


def _windows(inspection: Inspection) -> str:
    kinds = Counter(inspection.windows)
    named = {window: "everything before" if window is None else f"the newest {window:,}" for window in kinds}
    if len(kinds) == 1:
        return named[inspection.windows[0]]
    return ", ".join(f"{named[window]} in {count} blocks" for window, count in kinds.items())


def _chosen(inspection: Inspection) -> str:
    """Where experts are chosen, what a step reads."""
    if inspection.mlp_step_parameters == inspection.mlp_parameters:
        return ""
    return f", of which a step over one token reads {_each(inspection.mlp_step_parameters)}"


def _positions(inspection: Inspection) -> str:
    count, num_layers = sum(inspection.rotated), inspection.num_layers
    if not count:
        return f"learned: {inspection.position_parameters:,} parameters"
    kinds = {name: each for name, each in inspection.rope.items() if isinstance(each, dict)}
    shown = "; ".join(f"{name} {_rope(each)}" for name, each in kinds.items()) or _rope(inspection.rope)
    return f"rotary: {shown}" + (f", in {count} of {num_layers} blocks" if count < num_layers else "")


def _rope(rope: dict[str, Any]) -> str:
    numbers = {name: value for name, value in rope.items() if name != "rope_type"}
    shown = ", ".join(f"{name.removeprefix('rope_')} {value:g}" for name, value in numbers.items() if _is_number(value))
    return f"{rope.get('rope_type', 'default')} ({shown})"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
