"""The report's tables: rows of text, from the result's figures."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerskip.search.candidate import Candidate
from layerskip.search.report.telling import counted, describe, is_known, is_start, layer_ranges, percent, ranked, times
from layerskip.search.result import Interval, SearchResult, TrialRecord

__all__ = ["best_candidates", "cost_rows", "facts", "flat", "held_out_rows", "states", "without_password"]

_MOST_VALUES = 12  # of a list that are shown; report.json has all
_LONGEST = 400  # characters of a value
_STATES = {
    "complete": "tried to the end",
    "pruned": "given up early, being clearly worse",
    "failed": "failed",
    "running": "not finished",
}


def without_password(address: str) -> str:
    """A database's address as it may be shown."""
    return re.sub(r"(://[^:/@\s]*):[^@\s]+@", r"\1:***@", address)


def facts(result: SearchResult) -> list[tuple[str, str, str]]:
    """The figures that matter most: a name, the figure, its interval or what it means."""
    held_out, best = result.held_out, result.best
    fresh = held_out is not None and held_out.texts > 0
    shown: list[tuple[str, str, str]] = []
    if fresh and is_known(held_out.predicted_speedup):
        speedup = held_out.predicted_speedup
        shown.append(("Predicted speed-up", f"{times(speedup.value)}×", _between(speedup, times)))
    elif best.speedup is not None:
        shown.append(("Predicted speed-up", f"{times(best.speedup)}×", "on the texts of the search only"))
    measured = held_out.measured_speedup if fresh else None
    if measured is not None and is_known(measured):
        shown.append(("Measured speed-up", f"{times(measured.value)}×", _between(measured, times)))
    if fresh and is_known(held_out.acceptance_rate):
        rate = held_out.acceptance_rate
        shown.append(("Drafts accepted", percent(rate.value), _between(rate, percent)))
    elif best.acceptance_rate is not None:
        shown.append(("Drafts accepted", percent(best.acceptance_rate), "on the texts of the search only"))
    if fresh and is_known(held_out.tokens_per_round):
        tokens = held_out.tokens_per_round
        shown.append(("Tokens a round", times(tokens.value), _between(tokens, times)))
    if best.draft_ratio is not None:
        shown.append(("Cost per draft", times(best.draft_ratio), "of a plain step"))
    return shown


def held_out_rows(result: SearchResult) -> list[tuple[str, str, str, str]]:
    """The chosen plan: a name, on the texts of the search, on held-out texts, the latter's interval."""
    best, held_out = result.best, result.held_out
    if held_out is None:
        return []
    error = best.standard_error
    rate = percent(best.acceptance_rate)
    if best.acceptance_rate is not None and error is not None and math.isfinite(error):
        rate += f" ± {percent(1.96 * error)}"
    rows = [
        ("Drafts accepted", rate, held_out.acceptance_rate, percent),
        ("Tokens a round", _tokens(best), held_out.tokens_per_round, times),
        ("Predicted speed-up", times(best.speedup), held_out.predicted_speedup, times),
        ("Measured speed-up", "not measured", held_out.measured_speedup, times),
    ]
    return [(name, searched, _value(fresh, show), _between(fresh, show, "")) for name, searched, fresh, show in rows]


def best_candidates(result: SearchResult, count: int = 10) -> list[dict[str, Any]]:
    """The fastest of those tried to the end."""
    sampler = result.settings.get("sampler")
    return [
        {
            "number": trial.number,
            "draft": describe(trial.candidate),
            "layers": _layers(trial.candidate),
            "accepted": percent(trial.acceptance_rate),
            "cost": times(trial.draft_ratio),
            "length": "–" if trial.num_draft_tokens is None else str(trial.num_draft_tokens),
            "speedup": f"{times(trial.speedup)}×",
            "origin": f"start: {trial.origin}" if is_start(trial, sampler) else "",
            "chosen": trial.number == result.best.number,
        }
        for trial in ranked(result.trials)[:count]
    ]


def states(trials: Sequence[TrialRecord]) -> str:
    """How many candidates came how far, in words."""
    counts = Counter(_STATES.get(trial.state, trial.state) for trial in trials)
    return "; ".join(f"{count:,} {state}" for state, count in counts.most_common()) or "none"


def cost_rows(costs: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """A name, milliseconds, and the share of a plain step."""
    plain = costs.get("plain_s")
    if not isinstance(plain, int | float) or not math.isfinite(plain) or plain <= 0:
        return []
    rows = [("A plain step: one token by the whole model", plain)]
    for name, title in (("attention_s", "One attention sub-block"), ("mlp_s", "One MLP sub-block")):
        layers = _numbers(costs.get(name))
        if layers:
            rows.append((f"{title} in a draft (mean of {len(layers)})", sum(layers) / len(layers)))
    for ids, seconds in zip(_numbers(costs.get("head_sizes")), _numbers(costs.get("head_s")), strict=False):
        rows.append((f"Embedding, norm and scoring {int(ids):,} tokens of the vocabulary in a draft", seconds))
    for name, title in (
        ("trained_s", "The blocks of the trained path {} in a draft"),
        ("trained_round_s", "A round of the trained path {}, beyond its drafts and their check"),
    ):
        measured = costs.get(name) or {}
        rows += [(title.format(path), seconds) for path, seconds in measured.items()]
    for width, seconds in enumerate(_numbers(costs.get("verify_s")), start=1):
        drafts = counted(width - 1, "drafted token") if width > 1 else "no draft"
        rows.append((f"Checking {drafts} and adding one token", seconds))
    return [(name, f"{1000 * seconds:,.3f}", f"{seconds / plain:.3f}") for name, seconds in rows]


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as one list of names and texts; long ones are cut."""
    rows = []
    for name, value in values.items():
        full = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            rows += flat(value, f"{full}.")
        else:
            rows.append((full, _text(value)))
    return rows


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        more = f", … ({len(value)} in all)" if len(value) > _MOST_VALUES else ""
        return ", ".join(map(_text, value[:_MOST_VALUES])) + more or "none"
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = f"{value:.6g}" if isinstance(value, float) else without_password(str(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _layers(candidate: Candidate) -> str:
    skipped = {"attention": candidate.skip_attention, "MLP": candidate.skip_mlp}
    return "; ".join(f"{name} {layer_ranges(layers)}" for name, layers in skipped.items() if layers)


def _value(interval: Interval | None, show: Callable[[float], str]) -> str:
    return show(interval.value) if interval is not None and is_known(interval) else "not measured"


def _between(interval: Interval | None, show: Callable[[float], str], name: str = "95\N{NO-BREAK SPACE}%: ") -> str:
    if interval is None or not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return ""
    return f"{name}{show(interval.low)}–{show(interval.high)}"


def _tokens(trial: TrialRecord) -> str:
    """1 + the chance of each draft of the plan's length to stand, from acceptance by offset."""
    if not trial.acceptance_by_offset or trial.num_draft_tokens is None:
        return "–"
    total = survival = 1.0
    for rate in trial.acceptance_by_offset[: trial.num_draft_tokens]:
        survival *= rate
        total += survival
    return times(total)


def _numbers(values: Any) -> list[float]:
    listed = values if isinstance(values, list | tuple) else []
    return [each for each in listed if isinstance(each, int | float) and math.isfinite(each)]
