"""Which trials no other one beats in both acceptance and cost."""

from __future__ import annotations

from collections.abc import Iterable

from layerskip.search.result import TrialRecord

__all__ = ["pareto_front"]


def pareto_front(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """From cheap to dear, each accepted more often than all cheaper ones."""
    front: list[TrialRecord] = []
    known = [each for each in records if each.draft_ratio is not None and each.acceptance_rate is not None]
    for record in sorted(known, key=lambda each: (each.draft_ratio, -(each.acceptance_rate or 0.0), each.number)):
        if not front or (record.acceptance_rate or 0.0) > (front[-1].acceptance_rate or 0.0):
            front.append(record)
    return front
