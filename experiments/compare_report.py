"""The report of a comparison, from its lines only: a page with pictures, tables as Markdown, each arm's answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from experiments.compare_arms import PLAIN, THEIR_PLAIN
from experiments.compare_figures import figures_of
from experiments.compare_pictures import Picture, files_of, hang
from experiments.compare_tables import Table, as_markdown, facts, interval, selected, tables_of
from experiments.comparing import TUNED
from experiments.run_lines import LINES, read_lines, write_beside
from layerskip.errors import InputError
from layerskip.search.report.page import page_style

__all__ = ["MARKDOWN", "PAGE", "compare_answers", "write_report"]

PAGE, MARKDOWN, ANSWERS = "report.html", "report.md", "answers"
_TEMPLATE = Path(__file__).parent / "compare.html.jinja"


def write_report(folder: Path) -> dict[str, Any]:
    """Write the report of the lines in `folder` beside them.

    Returns:
        The figures.

    Raises:
        InputError: the lines cannot be read or tell of no turn that all have answered, or the report cannot be written.
        SearchError: matplotlib is not installed.
    """
    lines = read_lines(folder)
    if not lines:
        raise InputError(f"got {folder}, whose {LINES} has no line; expected those of a comparison. Begin it again.")
    document = figures_of(lines)
    pictures, tables = hang(document), tables_of(document)
    texts = {MARKDOWN: _markdown(document, tables), PAGE: _page(document, pictures, tables)}
    write_beside(folder, {**files_of(pictures), **_answers(lines), **texts})
    return document


def _page(document: Mapping[str, Any], pictures: Sequence[Picture], tables: Sequence[Table]) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    best = _best(document)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        style=page_style(),
        title=_title(document),
        lead=_lead(document),
        tone="good" if best is not None and (best["speedup"]["low"] or 0) > 1 else "open",
        protocol=_protocol(document),
        pictures=pictures,
        tables=tables,
        conditions=[*facts(document["options"]), *facts(document["conditions"])],
    )


def _markdown(document: Mapping[str, Any], tables: Sequence[Table]) -> str:
    """The same without pictures."""
    conditions = [f"- {name}: {value}" for name, value in [*facts(document["options"]), *facts(document["conditions"])]]
    parts = [f"# {_title(document)}", _lead(document), *_protocol(document), *map(as_markdown, tables)]
    return "\n\n".join([*parts, "## Conditions\n\n" + "\n".join(conditions)]) + "\n"


def _title(document: Mapping[str, Any]) -> str:
    options = document["options"]
    return f"{options['model']} on {options['data']}: {len(document['arms'])} ways to decode"


def _best(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    rows = (row for row in selected(document) if row["error"] is None and row["speedup"] and row["arm"] != PLAIN)
    return next(rows, None)


def _lead(document: Mapping[str, Any]) -> str:
    best = _best(document)
    failed = [row["arm"] for row in document["arms"] if row["error"] is not None]
    said = "No arm beside plain decoding has answers long enough to be timed."
    if best is not None:
        said = f"The fastest is {best['arm']}: {interval(best['speedup'])} times as fast as plain decoding here."
        theirs = (row for row in selected(document) if row["arm"].removesuffix(TUNED) == THEIR_PLAIN)
        greedy = next((row for row in theirs if row["speedup"]), None)
        if greedy is not None and greedy["error"] is None:
            said += f" Plain decoding is {1 / greedy['speedup']['value']:.2f} times as fast as transformers' own."
    return said + (f" Failed: {', '.join(failed)}." if failed else "")


def _protocol(document: Mapping[str, Any]) -> list[str]:
    options, questions = document["options"], document["questions"]
    sampled = options["temperature"]
    left_out = [
        f"{each['question']} (turn {each['turn'] + 1})"
        for each in document["left_out"]
        if each["split"] == "report" and each["repeat"] == 0
    ]
    tuning = (
        f"Settings were chosen on {questions['tuning']} other questions, first turns, each once."
        if questions["tuning"]
        else "No settings were tuned."
    )
    repeats = "once, " if options["repeats"] == 1 else f"{options['repeats']} times, "
    repeats = repeats if document["is_whole"] else ""
    return [
        *(
            []
            if document["is_whole"]
            else [
                f"Interrupted: {questions['answered']} of {questions['report']} questions were begun, and those turns "
                "count that all arms have answered. --resume goes on."
            ]
        ),
        f"All arms decoded the same {questions['answered']} questions, "
        f"{repeats}one after another in "
        f"one process, on the same weights, up to {options['new_tokens']} new tokens, batch 1, "
        f"{'greedily' if sampled is None else f'sampled at temperature {sampled}'}, in another order at every turn. "
        "Of a conversation, each turn is a call on the whole text, and what was answered before is plain "
        "decoding's own first answer for every arm, so that all see the same text. " + tuning,
        *([f"Left out, because they do not fit into the model: {', '.join(left_out)}."] if left_out else []),
    ]


def _answers(lines: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """A file for each arm: the first repeat's answers, a line a question."""
    answers: dict[str, dict[str, dict[str, Any]]] = {line["arm"]: {} for line in lines if line["kind"] == "arm"}
    for line in lines:
        if line["kind"] == "run" and line["split"] == "report" and line["repeat"] == 0 and line["error"] is None:
            empty = {"question_id": line["question"], "category": line["category"], "turns": []}
            answers[line["arm"]].setdefault(line["question"], empty)["turns"].append(line["text"])
    return {
        f"{ANSWERS}/{name.replace(', ', '-')}.jsonl": "".join(
            json.dumps(each, ensure_ascii=False) + "\n" for each in own.values()
        )
        for name, own in answers.items()
    }


def compare_answers(first: Path, second: Path) -> str:
    """How many questions two files of answers answer alike, in words.

    Raises:
        InputError: they cannot be read, or are not answers to the same questions: a shorter file is no equal one.
    """
    ours, theirs = (_read_answers(file) for file in (first, second))
    if len(ours) != len(theirs):
        raise InputError(
            f"got {len(ours)} answers in {first} and {len(theirs)} in {second}; expected as many. One of them was "
            "interrupted: finish it first."
        )
    if ours.keys() != theirs.keys():
        other = sorted(ours.keys() ^ theirs.keys())
        raise InputError(
            f"got answers to other questions in {first} than in {second}, such as {other[0]!r}; expected the same."
        )
    for question, turns in ours.items():
        if len(turns) != len(theirs[question]):
            raise InputError(
                f"got {len(turns)} turns of question {question!r} in {first} and {len(theirs[question])} in {second}; "
                "expected as many. One of them was interrupted: finish it first."
            )
    same = sum(turns == theirs[question] for question, turns in ours.items())
    return f"{same} of {len(ours)} questions are answered alike."


def _read_answers(file: Path) -> dict[str, list[str]]:
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
        answers = {str(line["question_id"]): list(line["turns"]) for line in lines}
    except OSError as error:
        raise InputError(f"got the answers {file}, which cannot be read: {error.strerror or error}.") from error
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(
            f'got {file}, which holds no answers; expected lines {{"question_id": …, "turns": ["…"]}}.'
        ) from error
    if len(answers) != len(lines):
        raise InputError(
            f"got {file} with {len(lines)} lines for {len(answers)} questions; expected one line a question. Leave out "
            "those that are there twice."
        )
    return answers
