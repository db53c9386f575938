"""The lines of a comparison, one JSON object each, from which alone its report is made.

A line holds every condition it was measured under. Its "kind" is "begin" (what is compared), "tuned" (the settings that
an arm was given, and the time it took to find them), "arm" (how it was made, or why it could not be), "run" (one call
on one turn of one question), "left_out" (a turn too long for the model), "parting" (where an answer leaves plain's) or
"end". A line is written whole, so that an interrupted comparison goes on behind its last one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.arms import Run
from layerskip import DecodeStats
from layerskip.errors import InputError

__all__ = ["LINES", "RUN_KEY", "RunLog", "read_lines", "run_of", "run_to_dict", "write_beside"]

LINES = "runs.jsonl"
RUN_KEY = ("arm", "split", "question", "turn", "repeat")
_UNLIKE = ("command",)  # conditions that may differ between the parts of a comparison


class RunLog:
    """The file of lines of one comparison, in the order of writing."""

    def __init__(
        self, folder: Path, conditions: Mapping[str, Any], resume: bool, run_key: Sequence[str] = RUN_KEY
    ) -> None:
        """Open the file of `folder`, which is made.

        Args:
            conditions: that every line gets.
            resume: go on with the lines that are there; else there must be none.
            run_key: what tells the lines of runs apart.

        Raises:
            InputError: there are lines and they are not to be gone on with, or were made under other conditions.
        """
        self.file, self._conditions, self._run_key = folder / LINES, dict(conditions), tuple(run_key)
        self._runs: dict[tuple[Any, ...], dict[str, Any]] = {}
        if self.file.exists() and not resume:
            raise InputError(
                f"got --out {folder}, where a comparison has begun already; expected a new folder. Pass --resume to go "
                "on with it, or name another."
            )
        self.lines = read_lines(folder) if self.file.exists() else []
        if self.lines:
            _refuse_other(self.lines[-1]["conditions"], self._conditions)
        for line in self.lines:
            self._note(line)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._cut_off_half_a_line()
        except OSError as error:
            raise InputError(
                f"got --out {folder}, which cannot be written: {error.strerror or error}. Name a folder that can."
            ) from error

    def _cut_off_half_a_line(self) -> None:
        """What was being written when the one before was killed; all before it is left as it is."""
        with self.file.open("ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)

    def begin(self, options: Mapping[str, Any], **content: Any) -> None:
        """Write the first line, unless there is one; then make sure that it says the same.

        Args:
            options: all that says what is compared.

        Raises:
            InputError: what was begun was of other options.
        """
        for line in self.of("begin"):
            for name, value in json.loads(json.dumps(options)).items():
                if line["options"].get(name) != value:
                    raise InputError(
                        f"got --resume with {name} {value!r} of a comparison with {line['options'].get(name)!r}; "
                        "expected the same. Give it again as it was, or begin anew in another folder."
                    )
            return
        self.write("begin", options=dict(options), **content)

    def write(self, kind: str, **content: Any) -> dict[str, Any]:
        """Append a line; it is on the disk when this returns."""
        line = {"kind": kind, **content, "conditions": self._conditions}
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        line = dict(json.loads(json.dumps(line)))  # as whoever reads it back would have it
        self.lines.append(line)
        self._note(line)
        return line

    def run(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """The line of a run, by the names of `run_key`; None: there is none."""
        return self._runs.get(tuple(key[name] for name in self._run_key))

    def _note(self, line: dict[str, Any]) -> None:
        if line["kind"] == "run":
            self._runs[tuple(line[name] for name in self._run_key)] = line

    def of(self, kind: str, **content: Any) -> Iterator[dict[str, Any]]:
        """Lines of a kind that say all of `content`."""
        for line in self.lines:
            if line["kind"] == kind and all(line.get(name) == value for name, value in content.items()):
                yield line


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines in `folder`; a last one that was cut off in the middle of writing is none.

    Raises:
        InputError: they cannot be read, or are not such lines.
    """
    file = folder / LINES
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"got {folder}, whose {LINES} cannot be read: {reason}. Expected a comparison's --out folder."
        ) from error
    whole, _, _ = text.rpartition("\n")
    lines = []
    for number, line in enumerate(whole.split("\n") if whole else [], start=1):
        try:
            content = json.loads(line)
            kind, _ = content["kind"], content["conditions"]["torch"]
        except (ValueError, LookupError, TypeError) as error:
            raise InputError(
                f"got line {number} of {file}, which is none of a comparison's; expected a JSON object with its kind "
                "and conditions. Restore the file, or compare anew."
            ) from error
        lines.append(content)
        if number == 1 and kind != "begin":
            raise InputError(f"got {file}, which begins with a line of kind {kind!r}; expected 'begin'. Restore it.")
    return lines


def _refuse_other(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name in now:
        if name not in _UNLIKE and before.get(name) != now[name]:
            raise InputError(
                f"got --resume with {name} {now[name]!r} of a comparison made with {before.get(name)!r}; expected the "
                "same: times of different conditions cannot be compared. Begin anew in another folder."
            )


def run_to_dict(run: Run) -> dict[str, Any]:
    """`run` as JSON values."""
    content = {name: value for name, value in vars(run).items() if name not in ("stats", "tokens")}
    (tokens,) = run.tokens
    return {**content, "tokens": tokens, "stats": None if run.stats is None else asdict(run.stats)}


def run_of(line: Mapping[str, Any]) -> Run:
    """The run that a line of kind "run" tells of."""
    content = {name: line[name] for name in ("first_s", "decode_s", "decoded", "passes", "call_s")}
    stats = None if line["stats"] is None else DecodeStats(**line["stats"])
    return Run(tokens=[line["tokens"]], stats=stats, **content)


def write_beside(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write what is made of the lines in `folder` beside them, by name.

    Raises:
        InputError: it cannot be written.
    """
    try:
        for name, content in files.items():
            file = folder / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
    except OSError as error:
        raise InputError(
            f"got the folder {folder}, into which no report can be written: {error.strerror or error}. Copy its "
            f"{LINES} to one that can be written to."
        ) from error
