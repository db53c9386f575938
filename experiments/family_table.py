"""Which model families decode, draft, batch and converse exactly as transformers' own code decodes, by the tests?

    .venv/bin/pytest tests/test_decoder.py tests/test_lossless.py tests/test_batch.py tests/test_sessions.py \
        --junitxml=tests.xml
    python -m experiments.family_table tests.xml

Each cell counts the tests of one promise that passed on the tiny random checkpoints of one architecture, in float64,
its variants (windows, rotary scalings, tied heads, …) together. Prints the Markdown table that the README holds.
"""

from __future__ import annotations

import sys
from argparse import RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from experiments.program import exit_code
from layerskip.cli.parser import Parser
from layerskip.errors import InputError

__all__ = ["main", "outcomes", "table"]

PROMISES = {
    "parity": ("test_equals_transformers_however_the_text_is_cut", ""),
    "exit": ("test_every_family_plan_and_draft_length", "exit"),
    "skip": ("test_every_family_plan_and_draft_length", ""),
    "batch": ("test_greedy_rows_equal_each_row_alone", ""),
    "session": ("test_every_turn_is_that_of_a_fresh_call", ""),
}
"""By column: the test, and what its parameters contain; the first that fits counts."""


def outcomes(file: Path, variants: Mapping[str, str]) -> Counter[tuple[str, str, bool]]:
    """Tests by architecture, promise, and whether they passed.

    Args:
        file: a JUnit report, as pytest writes it.
        variants: architecture by the name of a tiny checkpoint, which stands in a test's parameters.

    Raises:
        InputError: no such report.
    """
    try:
        cases = list(ElementTree.parse(file).iter("testcase"))
    except (OSError, ElementTree.ParseError) as error:
        raise InputError(f"got {str(file)!r}, which is no report of tests: {error}. Run pytest --junitxml.") from error
    found: Counter[tuple[str, str, bool]] = Counter()
    for case in cases:
        name, _, parameters = case.get("name", "").partition("[")
        promise = next((each for each, (test, part) in PROMISES.items() if test == name and part in parameters), None)
        named = [each for each in variants if each in parameters]
        if promise is not None and named and case.find("skipped") is None:
            passed = case.find("failure") is None and case.find("error") is None
            found[variants[max(named, key=len)], promise, passed] += 1
    return found


def table(found: Mapping[tuple[str, str, bool], int]) -> str:
    """As Markdown, architectures in alphabetical order."""
    lines = [f"| architecture | {' | '.join(PROMISES)} |", "| --- |" + " --- |" * len(PROMISES)]
    for architecture in sorted({name for name, _, _ in found}):
        cells = []
        for promise in PROMISES:
            passed, failed = (found.get((architecture, promise, each), 0) for each in (True, False))
            cells.append(f"{failed} of {passed + failed} fail" if failed else (f"✓ {passed}" if passed else "–"))
        lines.append(f"| {architecture.removesuffix('ForCausalLM')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; an error that the project words itself is one line and exit code 2."""
    parser = Parser(prog="python -m experiments.family_table", description=__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("report", type=Path, metavar="FILE", help="what pytest --junitxml wrote")
    options = parser.parse_args(arguments)

    def run() -> None:
        from tests.tiny_models import FAMILY_NAMES, tiny_model

        print(table(outcomes(options.report, {name: type(tiny_model(name)).__name__ for name in FAMILY_NAMES})))

    return exit_code(run, "fewer tests")


if __name__ == "__main__":
    sys.exit(main())
