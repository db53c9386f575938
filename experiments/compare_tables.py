"""The tables of a comparison in words, the same for the page and for Markdown: rows of text, and nothing measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from experiments.compare_arms import THEIR_PLAIN
from experiments.comparing import TUNED
from experiments.report import number

__all__ = ["Table", "as_markdown", "facts", "interval", "selected", "tables_of"]

_INTERVAL = "95 % bootstrap interval over questions"

Document = Mapping[str, Any]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """A table and what it shows; the first cell of a row names it."""

    title: str
    note: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables_of(document: Document) -> list[Table]:
    """All tables of the report; those without rows are left out."""
    made = (
        _overview,
        _speeds,
        _drafts,
        partial(_groups, "task"),
        partial(_groups, "category"),
        _costs,
        _answers,
        _partings,
        _tuning,
    )
    tables = [make(document) for make in made]
    return [table for table in tables if table.rows]


def as_markdown(table: Table) -> str:
    """With its title as a heading."""
    rows = [table.head, ("---",) * len(table.head), *table.rows]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([f"## {table.title}", "", table.note, "", *lines, ""])


def interval(mean: Mapping[str, float] | None) -> str:
    """A mean and its interval, if that is known."""
    if mean is None:
        return "–"
    return f"{mean['value']:.2f}" + ("" if mean["low"] is None else f" ({mean['low']:.2f}–{mean['high']:.2f})")


def selected(document: Document) -> list[Row]:
    """Of each arm the row that its tuning chose, the fastest first; that of its default, where no other one won.

    Which of both does better on the questions of the report is not asked: it would be tuned on them.
    """
    works = [row for row in document["arms"] if row["error"] is None or not row["arm"].endswith(TUNED)]
    rows = {row["arm"].removesuffix(TUNED): row for row in works}  # tuned ones stand behind the default
    return sorted(rows.values(), key=_value, reverse=True)


def _overview(document: Document) -> Table:
    greedy = next((_value(row) for row in selected(document) if row["arm"].removesuffix(TUNED) == THEIR_PLAIN), 0.0)
    rows = [
        (
            row["arm"],
            row["what"],
            interval(row["speedup"]) if row["error"] is None else "failed",
            number(_value(row) / greedy) if greedy and _value(row) else "–",
            number(row["tokens_per_round"]),
            "–" if row["preparation"] is None else _megabytes(row["preparation"]["weights_bytes"]),
            f"{row['identical'] / row['runs']:.0%}" if row["runs"] else "–",
        )
        for row in selected(document)
    ]
    return Table(
        "Overview",
        "Each arm with the settings that did best on the tuning half, if it was tuned, the fastest first: speed over "
        f"plain decoding ({_INTERVAL}), over transformers' greedy decoding, tokens a round, weights beside the "
        "model's, answers that are plain's token by token.",
        ("arm", "what", "÷ plain", "÷ transformers", "tokens/round", "further weights, MB", "identical"),
        tuple(rows),
    )


def _value(row: Row) -> float:
    """Its speed over plain decoding; 0 if it has none."""
    return float(row["speedup"]["value"]) if row["speedup"] and row["error"] is None else 0.0


def _speeds(document: Document) -> Table:
    rows = []
    for row in document["arms"]:
        if row["error"] is not None:
            rows.append((row["arm"], f"failed after {row['runs']} runs: {row['error']}", *[""] * 6))
            continue
        rows.append((
            row["arm"],
            row["what"],
            interval(row["speedup"]),
            interval(row["whole_call"]),
            number(row["tokens_per_s"], 1),
            number(row["tokens_per_round"]),
            _milliseconds(row["first_s"]),
            number(row["measured_by_predicted"]),
        ))  # fmt: skip
    return Table(
        "Speed",
        f"Speed over plain decoding of the same text, geometric mean over tasks ({_INTERVAL}): from the first new "
        "token on, and of whole calls. Tokens per second and time from the call to the first token are medians. (What "
        "a draft model or trained blocks read of a prompt before their first draft counts with ours as decoding, with "
        "transformers' before the first token; of the packages both are taken from a call for one token.)",
        ("arm", "what", "÷ plain", "whole call ÷ plain", "tokens/s", "tokens/round", "first token, ms",
         "measured ÷ predicted"),
        tuple(rows),
    )  # fmt: skip


def _drafts(document: Document) -> Table:
    rows = []
    for row in document["arms"]:
        if row["time_split"] is None:
            continue
        rates, split, sources = row["acceptance_by_offset"] or [], row["time_split"], row["rounds_by_source"] or {}
        total = max(1, sum(sources.values()))
        rows.append((
            row["arm"],
            " ".join(f"{rate:.2f}" for rate in rates) or "–",
            ", ".join(f"{name} {count / total:.0%}" for name, count in sorted(sources.items())),
            f"{split['draft']:.0%}",
            f"{split['verify']:.0%}",
            f"{split['host'] + split['recording']:.0%}",
            row["execution"],
        ))  # fmt: skip
    return Table(
        "Drafts and time",
        "Chance of each token of a draft to be accepted, given that all before it were; where rounds got their "
        "drafts; and shares of the time of all rounds. Arms of others do not say.",
        ("arm", "acceptance by offset", "rounds by source", "draft", "verify", "host", "execution"),
        tuple(rows),
    )


def _groups(kind: str, document: Document) -> Table:
    names = document["tasks" if kind == "task" else "categories"]
    shown = [row for row in document["arms"] if row["speedup"] is not None]
    if kind == "category" and names == document["tasks"]:
        shown = []
    return Table(
        f"By {kind}",
        f"Speed over plain decoding, geometric mean over the questions of each {kind} ({_INTERVAL}).",
        ("arm", *names),
        tuple((row["arm"], *(interval(row[f"speedup_by_{kind}"].get(name)) for name in names)) for row in shown),
    )


def _costs(document: Document) -> Table:
    rows = []
    for row in document["arms"]:
        if row["preparation"] is None:
            continue
        cost = dict(row["preparation"]["cost"])
        seconds = cost.pop("seconds", None)
        prepared = ", ".join(f"{name.replace('_', ' ')} {value:,}" if isinstance(value, int) else str(value)
                             for name, value in cost.items())  # fmt: skip
        promised, added = row["preparation"]["predicted_speedup"], row["preparation"].get("cache_bytes_per_token")
        name = row["arm"].removesuffix(TUNED)
        tuned = next((each["seconds"] for each in document["tuned"] if each["arm"] == name), None)
        rows.append((
            row["arm"],
            _megabytes(row["preparation"]["weights_bytes"]),
            "–" if added is None else f"{added / 1e3:,.1f}",
            _megabytes(row["peak_bytes"]) if "cuda" in str(row["peak_how"]) else "–",
            f"{row['made_s']:.1f}",
            prepared or "none",
            "–" if seconds is None else f"{seconds:,.0f}",
            "–" if tuned is None else f"{tuned:,.0f}",
            number(promised),
        ))  # fmt: skip
    cache = document["model"]["cache_bytes_per_token"] * (document["peak_tokens"] or 0)
    return Table(
        "Memory and preparation",
        f"Beside the model's weights ({_megabytes(document['model']['weights_bytes'])} MB) and cache "
        f"({document['model']['cache_bytes_per_token'] / 1e3:,.1f} kB a token): what the arm holds of either. On a "
        f"GPU also what a call takes beyond what was held before, at {document['peak_tokens']:,} tokens, whose cache "
        f"is {_megabytes(cache)} MB (on a CPU freed memory is used again, and nothing can be told). Making an arm "
        "includes loading what only it needs. What a search or training took is as its plan says.",
        ("arm", "weights, MB", "cache, kB a token", "a call, MB", "made in, s", "prepared by", "preparation, s",
         "tuned in, s", "predicted then"),
        tuple(rows),
    )  # fmt: skip


def _answers(document: Document) -> Table:
    rows = []
    for row in document["arms"]:
        if row["runs"] and row["arm"] != "plain":
            looked_into = [each for each in row["partings"] if each.get("error") is None]
            ties, looked = sum(each["is_near_tie"] for each in looked_into), len(looked_into)
            differ = row["runs"] - row["identical"]
            said = f"{ties} of {looked}" if looked else "–"
            rows.append((row["arm"], f"{row['identical'] / row['runs']:.1%}", f"{differ} of {row['runs']}", said))
    return Table(
        "Answers",
        "Share of answers that are plain decoding's, token by token; of those that are not and were looked into, how "
        "many part at a near-tie, that is, where the dtype cannot tell the two tokens apart. (Samples are not alike.)",
        ("arm", "identical", "others", "near-ties of those looked into"),
        tuple(rows),
    )


def _partings(document: Document) -> Table:
    rows = [
        (row["arm"], f"{each['question']}, turn {each['turn'] + 1}", str(each["index"]), f"{each['gap']:.4g}",
         f"{each['logit_error']:.4g}", "near-tie" if each["is_near_tie"] else "not explained by rounding")
        if each.get("error") is None
        else (row["arm"], f"{each['question']}, turn {each['turn'] + 1}", "–", "–", "–", each["error"])
        for row in document["arms"]
        for each in row["partings"]
    ]  # fmt: skip
    return Table(
        "Where answers part",
        "The gap between the two tokens in the model's logits, in a wider dtype, beside what the model's dtype makes "
        "logits off at that place.",
        ("arm", "question", "new token", "gap", "logit error", "verdict"),
        tuple(rows),
    )


def _tuning(document: Document) -> Table:
    rows = [
        (each["arm"], settings_in_words(one["settings"]), number(one["ratio"]),
         one["error"] or ("chosen" if one["settings"] == each["chosen"] else ""))
        for each in document["tuned"]
        for one in each["candidates"]
    ]  # fmt: skip
    return Table(
        "Tuning",
        f"Settings tried on the tuning half ({document['questions']['tuning']} questions, first turns), and their "
        "speed over plain decoding there.",
        ("arm", "settings", "÷ plain", ""),
        tuple(rows),
    )


def settings_in_words(settings: Mapping[str, Any]) -> str:
    """As a person would write them."""
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "default"


def facts(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Options or conditions for people: those that say something."""
    shown: Sequence[tuple[str, Any]] = [(name, value) for name, value in values.items() if value not in (None, {}, [])]
    return [(name.replace("_", " "), _shown(value)) for name, value in shown]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return settings_in_words(value) if isinstance(value, Mapping) else str(value)


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.0f}"


def _megabytes(size: float | None) -> str:
    return "–" if size is None else f"{size / 1e6:,.1f}"
