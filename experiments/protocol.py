"""The statistics of the comparison: ratios of like with like, geometric means over tasks, bootstrap intervals.

Pure functions of numbers; they know neither arms nor models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

__all__ = ["CHAT_CATEGORIES", "Mean", "geometric_mean_of", "paired_ratios", "tasks_of"]

# Spec-Bench (Xia et al. 2024) counts the eight categories of MT-bench as one task of six.
CHAT = "multi-turn conversation"
CHAT_CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_OTHER_TASKS = frozenset(("translation", "summarization", "qa", "math_reasoning", "rag"))

_RESAMPLES = 2000


@dataclass(frozen=True)
class Mean:
    """A mean and the bounds of its 95 % interval; None: they cannot be told."""

    value: float
    low: float | None
    high: float | None


def tasks_of(categories: Iterable[str]) -> dict[str, str]:
    """The task that each category of a set of questions belongs to: itself, but for the eight of Spec-Bench's.

    Theirs are one only beside another task of that benchmark: a set of one's own may well have a category "math".
    """
    names = list(dict.fromkeys(categories))
    is_spec_bench = not _OTHER_TASKS.isdisjoint(names)
    return {name: CHAT if is_spec_bench and name in CHAT_CATEGORIES else name for name in names}


def paired_ratios(
    speeds: Mapping[tuple[str, int, int], float], base: Mapping[tuple[str, int, int], float]
) -> dict[str, float]:
    """For each question the median of its ratios: each turn and repeat against the same one of `base`.

    Args:
        speeds, base: by question, turn and repeat; what either lacks is left out.
    """
    ratios: dict[str, list[float]] = {}
    for key in sorted(speeds.keys() & base.keys()):  # a set's own order changes from process to process
        if base[key] > 0:
            ratios.setdefault(key[0], []).append(speeds[key] / base[key])
    return {question: median(found) for question, found in ratios.items()}


def geometric_mean_of(groups: Mapping[str, Sequence[float]]) -> Mean | None:
    """The geometric mean over groups of the geometric means in them, and its 95 % bootstrap interval.

    Questions are drawn anew within each group (Efron 1979, percentiles; 2,000 times, always the same ones), so that the
    interval speaks of other questions of the same tasks. Others of a task that has only one are taken to differ from
    it as those of the other tasks do from their means; where all tasks have one, nothing is known of that.

    Args:
        groups: positive ratios by task; empty ones are left out.

    Returns:
        None: there is no ratio.
    """
    logs = [np.log(np.asarray(ratios, dtype=float)) for ratios in groups.values() if len(ratios)]
    if not logs:
        return None
    value = float(np.exp(np.mean([values.mean() for values in logs])))
    spread = np.concatenate([_residuals(values) for values in logs])
    if not len(spread):
        return Mean(value, None, None)
    generator = np.random.default_rng(0)
    resampled = np.zeros(_RESAMPLES)
    for values in logs:
        drawn = values.mean() + (_residuals(values) if len(values) > 1 else spread)
        count = len(values)
        resampled += drawn[generator.integers(len(drawn), size=(_RESAMPLES, count))].mean(axis=1) / len(logs)
    low, high = np.exp(np.quantile(resampled, (0.025, 0.975)))
    return Mean(value, float(low), float(high))


def _residuals(values: np.ndarray) -> np.ndarray:
    """How far from a task's mean its questions are, or others would be; of a single one nothing is known."""
    count = len(values)
    return (values - values.mean()) * np.sqrt(count / (count - 1)) if count > 1 else values[:0]
