"""Names of test cases that are the same in every process: without addresses, which tests that run side by side need."""

import re


def told(value: object) -> str:
    """`repr` without the address of an object."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
