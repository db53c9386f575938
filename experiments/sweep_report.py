"""The report of a sweep, from its lines only: pictures, and tables as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.compare_arms import PLAIN
from experiments.compare_pictures import files_of
from experiments.compare_tables import Table, as_markdown, facts
from experiments.report import number
from experiments.run_lines import LINES, read_lines, write_beside
from experiments.sweep_figures import figures_of
from experiments.sweep_kinds import KINDS
from experiments.sweep_pictures import hang, predictions
from experiments.theory_picture import share_within
from layerskip.errors import InputError

__all__ = ["MARKDOWN", "write_report"]

MARKDOWN = "sweep.md"

Document = Mapping[str, Any]


def write_report(folder: Path) -> dict[str, Any]:
    """Write the report of the lines in `folder` beside them.

    Returns:
        The figures.

    Raises:
        InputError: the lines cannot be read or tell of no value, or the report cannot be written.
        SearchError: matplotlib is not installed.
    """
    lines = read_lines(folder)
    if not lines:
        raise InputError(f"got {folder}, whose {LINES} has no line; expected those of a sweep. Begin it again.")
    document = figures_of(lines)
    write_beside(folder, {**files_of(hang(document)), MARKDOWN: _markdown(document)})
    return document


def _markdown(document: Document) -> str:
    options = document["options"]
    conditions = [f"- {name}: {value}" for name, value in [*facts(options), *facts(document["conditions"])]]
    tables = [table for table in (_speeds(document), _theory(document), _left_out(document)) if table.rows]
    return "\n\n".join([
        f"# {options['model']} on {options['data']}: speed over plain decoding by {document['sweep']}",
        *_sentences(document),
        *map(as_markdown, tables),
        "## Conditions\n\n" + "\n".join(conditions),
    ]) + "\n"  # fmt: skip


def _sentences(document: Document) -> list[str]:
    said = []
    for arm in document["arms"]:
        own = (point for point in document["points"] if point["arm"] == arm and not point["error"])
        timed = (point for point in own if point["speedup"] is not None)
        worst = min(timed, key=lambda point: float(point["speedup"][1]), default=None)
        if worst is None:
            said.append(f"{arm} has no answer that could be timed.")
            continue
        crossed = " and ".join(f"{'falls' if each['falls'] else 'rises'} through 1 at about {each['value']:.3g}"
                               for each in document["crossings"][arm])  # fmt: skip
        said.append(
            f"{arm} {crossed or 'does not cross 1'}; least it is {worst['speedup'][1]:.2f}, at {worst['value']:g}."
        )
    parts = ["\n".join(f"- {each}" for each in said)]
    if document["cache_takes_over"] is not None:
        parts.append(
            f"A plain step reads as many bytes of the cache as of weights at a {document['sweep']} of "
            f"{document['cache_takes_over']:,.0f}."
        )
    short = [f"{each['value']:g} ({each['turns']} of {each['of']})" for each in document["done"]
             if each["turns"] < each["of"]]  # fmt: skip
    if short:
        parts.append(f"Fewer turns than asked for, by --budget, at {', '.join(short)}.")
    repeated = [f"{each['value']:g}" for each in document["done"] if each["repeats_text"]]
    if repeated:
        parts.append(f"The data is too short, and some of it stands twice in the prompts, at {', '.join(repeated)}.")
    return parts


def _speeds(document: Document) -> Table:
    points = {(point["arm"], point["value"]): point for point in document["points"]}
    rows = []
    for done in document["done"]:
        value = done["value"]
        plain = points[PLAIN, value]
        cells = [f"{value:g}", f"{done['context']:,.0f}", f"{done['cache_bytes'] / 1e6:,.1f}",
                 number(plain["tokens_per_s"], 1), number(1e3 * plain["first_s"], 0)]  # fmt: skip
        rows.append((*cells, *(_ratio(points[arm, value]) for arm in document["arms"])))
    return Table(
        f"Speed over plain decoding by {KINDS[document['sweep']].axis}",
        "Medians (and quartiles) over turns, each against plain decoding of the same prompts in the same turn, from "
        "the first new token on. Median tokens of a prompt, MB of the cache of a call, tokens per second of all rows.",
        (document["sweep"], "prompt, tokens", "cache, MB", "plain, tokens/s", "first token, ms",
         *(f"{arm} ÷ plain" for arm in document["arms"])),
        tuple(rows),
    )  # fmt: skip


def _ratio(point: Mapping[str, Any]) -> str:
    if point["error"] is not None:
        return f"failed: {point['error']}"
    return "–" if point["speedup"] is None else "{1:.2f} ({0:.2f}–{2:.2f})".format(*point["speedup"])


def _theory(document: Document) -> Table:
    rows = []
    for point in document["points"]:
        if point["acceptance_by_offset"] is None:
            continue
        measured = None if point["speedup"] is None else point["speedup"][1]
        both = point["predicted"] is not None and measured is not None
        rows.append((
            point["arm"],
            f"{point['value']:g}",
            " ".join(f"{rate:.2f}" for rate in point["acceptance_by_offset"]),
            number(point["overlap"]),
            number(point["tokens_per_round"]),
            number(point["tau"]),
            number(point["draft_ratio"], 3),
            number(point["predicted"]),
            number(measured),
            number(measured / point["predicted"]) if both and measured is not None else "–",
            f"{point['identical']} of {point['rows']}",
        ))  # fmt: skip
    within = share_within([pair for pairs in predictions(document).values() for pair in pairs])
    said = "" if within is None else f" {within:.0%} of what was measured is within 15 % of what was predicted."
    return Table(
        "Theory beside measurement",
        "Acceptance by offset as it was counted; 1 - TVD of a first draft from the logits along plain decoding's own "
        "answers; tau of the rounds' own K from the acceptance at all values; c, seconds of drafting a token in plain "
        "seconds a token. Predicted: tau over K c + v(K), over the rounds' own K, with v of passes that were timed on "
        "their own; host time is not "
        f"in it.{said}",
        ("arm", document["sweep"], "acceptance by offset", "1 - TVD", "tokens/round", "tau", "c", "predicted",
         "measured", "measured ÷ predicted", "answers as plain's"),
        tuple(rows),
    )  # fmt: skip


def _left_out(document: Document) -> Table:
    return Table(
        "Not run",
        "Values that were left out.",
        (document["sweep"], "why"),
        tuple((f"{value:g}", why) for value, why in document["left_out"].items()),
    )
