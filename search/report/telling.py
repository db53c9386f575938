"""What a search found, in words: does it pay, what does the draft do, what to do next. Text only, no markup."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from layerskip.plan import DraftPlan
from layerskip.search.candidate import Candidate
from layerskip.search.result import Interval, SearchResult, TrialRecord
from layerskip.search.trained import training_of

__all__ = [
    "Headline",
    "chosen",
    "counted",
    "describe",
    "describe_draft",
    "describe_training",
    "headline",
    "in_python",
    "in_shell",
    "is_known",
    "is_start",
    "layer_ranges",
    "num_layers",
    "percent",
    "ranked",
    "times",
]

_SAMPLERS = ("elite", "tpe", "nsga", "random", "gp", "cma", "qmc", "grid", "sampler", "bruteforce", "brute-force")
_MODEL_KEYS = ("model", "checkpoint", "path")
_PROMPT = "Why is the sky blue?"


@dataclass(frozen=True)
class Headline:
    """The answer to "does it pay?".

    Attributes:
        tone: "good", "open", "bad", or "none": there is no answer.
        title: one sentence.
        text: how sure that is, and what it rests on.
    """

    tone: str
    title: str
    text: str


def is_known(interval: Interval | None) -> bool:
    """Whether an estimate is there at all."""
    return interval is not None and math.isfinite(interval.value)


def percent(value: float | None) -> str:
    """A share for people; a dash if it is unknown."""
    return f"{100 * value:.1f}\N{NO-BREAK SPACE}%" if value is not None and math.isfinite(value) else "–"


def times(value: float | None) -> str:
    """A factor for people; a dash if it is unknown."""
    return f"{value:.2f}" if value is not None and math.isfinite(value) else "–"


def counted(count: int, name: str) -> str:
    """A number of things: "1 layer", "2 layers"."""
    return f"{count:,} {name}" + ("" if count == 1 else "s")


def chosen(result: SearchResult) -> Candidate:
    """What the plan runs; the plan, not the trial, is what the reader uses."""
    plan = result.plan
    size = len(plan.draft_vocabulary) if plan.draft_vocabulary is not None else None
    trained = None if plan.adapter is None else result.best.candidate.trained
    return Candidate(plan.skip_attention, plan.skip_mlp, plan.exit_layer, size, trained)


def num_layers(result: SearchResult) -> int:
    """Of the model: as it was recorded, or else as many as are spoken of."""
    if result.plan.target is not None:
        return result.plan.target.num_layers
    lists = [result.costs.get("attention_s"), *result.single_retention.values()]
    known = max((len(each) for each in lists if isinstance(each, list | tuple)), default=0)
    if known:
        return known
    candidates = [chosen(result), *(trial.candidate for trial in result.trials)]
    layers = [layer for each in candidates for layer in (*each.skip_attention, *each.skip_mlp)]
    exits = [each.exit_layer for each in candidates if each.exit_layer is not None]
    return max(layer + 1 for layer in (*layers, *exits, 0))


def ranked(trials: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Those tried to the end, fastest first."""
    complete = [
        trial
        for trial in trials
        if trial.state == "complete" and trial.speedup is not None and math.isfinite(trial.speedup)
    ]
    return sorted(complete, key=lambda trial: (-(trial.speedup or 0.0), trial.number))


def is_start(trial: TrialRecord, sampler: object) -> bool:
    """Whether a candidate was given to the search, and not proposed by it."""
    origin = trial.origin.casefold()
    own = str(sampler).casefold() if sampler else ""
    return bool(origin) and not origin.startswith(_SAMPLERS) and not (own and own in origin)


def layer_ranges(layers: Iterable[int]) -> str:
    """Ascending layers, neighbours joined: "3–5, 9"."""
    runs: list[tuple[int, int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], layer)
        else:
            runs.append((layer, layer))
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)


def describe(candidate: Candidate) -> str:
    """A candidate in some words."""
    skipped = {"attention": len(candidate.skip_attention), "MLP": len(candidate.skip_mlp)}
    without = " and ".join(counted(count, name) for name, count in skipped.items() if count)
    parts = [f"without {without}"] if without else []
    if candidate.trained is not None:
        parts.append(f"trained {'blocks' if candidate.exit_layer else 'jump'} {candidate.trained}")
    if candidate.exit_layer:
        parts.append(f"exit after {counted(candidate.exit_layer, 'layer')}")
    if candidate.vocabulary_size is not None:
        parts.append(f"{candidate.vocabulary_size:,} tokens scored")
    return ", ".join(parts) or "the whole model"


def headline(result: SearchResult) -> Headline:
    """The answer, as careful as the evidence is."""
    held_out = result.held_out.predicted_speedup if result.held_out is not None else None
    fresh = is_known(held_out) and result.held_out.texts > 0
    speedup = held_out if fresh and held_out is not None else None
    value = speedup.value if speedup is not None else result.best.speedup
    if value is None or not math.isfinite(value) or value <= 0:
        return Headline(
            "none",
            "The search found nothing that it could judge.",
            "No candidate was tried to the end. The tables below say how far each came; give the search more time "
            "or more texts.",
        )
    if fresh:
        on = "on texts that the search never saw"
        basis = "The figure is what real drafts on those texts and measured or assumed costs predict."
    else:
        on = "on the texts of the search"
        basis = "It was not checked on other texts, so expect less: the best of many candidates is partly luck."
    measured = result.held_out.measured_speedup if fresh else None
    if measured is not None and is_known(measured):
        basis = f"Measured by decoding for real: {times(measured.value)} times as fast{_spread(measured)}."
        if measured.value < 1 <= value:
            basis += " So the prediction is not borne out on this machine."
    aside = "" if result.plan.adapter is None else ", a trained path,"
    spread = _spread(speedup)
    faster = f"{times(value)} times as fast as plain decoding{spread} {on}"
    if result.pays and measured is not None and measured.value < 1:
        return Headline("open", f"The best draft{aside} is predicted {faster}, but measured it is slower.", basis)
    if result.pays and speedup is not None and speedup.low < 1:
        doubt = f"The interval reaches below 1: there may be no gain. {basis}"
        return Headline("open", f"The best draft{aside} is predicted {faster}, which may be chance.", doubt)
    if result.pays:
        return Headline("good" if fresh else "open", f"The best draft{aside} is predicted {faster}.", basis)
    if value >= 1:
        title = f"No gain to count on: the best candidate{aside} is predicted {faster}."
        return Headline("open", title, f"The search itself does not call that worthwhile. {basis}")
    slower = f"{times(1 / value)} times as long{_spread(speedup, inverse=True)} {on}"
    return Headline("bad", f"Nothing beats plain decoding: the best candidate{aside} would take {slower}.", basis)


def describe_draft(result: SearchResult) -> list[tuple[str, str]]:
    """What the chosen plan does, a name and a sentence each."""
    plan, layers = result.plan, num_layers(result)
    end = layers if plan.exit_layer is None else plan.exit_layer
    runs = 2 * end - len(plan.skip_attention) - len(plan.skip_mlp)
    ids = plan.draft_vocabulary
    vocabulary = plan.target.vocab_size if plan.target is not None else None
    lines = [
        ("Runs", f"{runs} of the model's {2 * layers} sub-blocks ({percent(runs / (2 * layers))})"),
        ("Attention left out", _where(plan.skip_attention)),
        ("MLP left out", _where(plan.skip_mlp)),
        (
            "Exit",
            "none: it goes through to the last layer"
            if plan.exit_layer is None
            else f"after the first {end} of {layers} layers; the rest is not reached"
            if end
            else "before the first layer: it begins at the token's embedding",
        ),
        (
            "Tokens it can draft",
            f"the whole vocabulary{f' ({vocabulary:,})' if vocabulary else ''}"
            if ids is None
            else f"{len(ids):,}{f' of {vocabulary:,}' if vocabulary else ''}; the others come from the check",
        ),
        ("Drafts a round", f"up to {counted(plan.num_draft_tokens, 'token')} before the whole model checks them"),
    ]
    if plan.adapter is not None:
        lines.insert(1, ("Trained path", describe_training(plan)))
    if plan.lookup_tokens:
        lines.append(
            (
                "Looked up",
                f"up to {counted(plan.lookup_tokens, 'token')} copied from where the same words stood before",
            )
        )
    if plan.confidence_threshold:
        lines.append(("Stops early", f"behind a token that it gives less than {percent(plan.confidence_threshold)}"))
    return lines


def describe_training(plan: DraftPlan) -> str:
    """The trained path that a plan is: what of it runs, and which run trained it, as far as that is known."""
    about = training_of(plan) or {}
    run: Mapping[str, Any] = about.get("training") or {}
    texts = run.get("texts") if isinstance(run.get("texts"), Mapping) else {}
    settings = run.get("settings") if isinstance(run.get("settings"), Mapping) else {}
    blocks = about.get("num_blocks")
    what = counted(blocks, "block") if isinstance(blocks, int) else "blocks"
    known = [
        f"{about.get('name', 'unknown')}: {what} of its own",
        f"trained by {run['made_by']}" if run.get("made_by") else "",
        str(run.get("made_at") or ""),
        _of(settings, "tokens", "on {:,} tokens"),
        f"from the texts {texts['digest']}" if texts and texts.get("digest") else "",
        _of(run, "seconds", "in {:,.0f} s"),
    ]
    return ", ".join(filter(None, known))


def in_python(result: SearchResult) -> str:
    """Code that decodes with the plan."""
    options = "".join(f", {name}={_quoted(value)}" for name, value in _loading(result).items())
    return (
        "import layerskip\n\n"
        f"model = layerskip.load({_quoted(_model(result))}{options})\n"
        'plan = layerskip.DraftPlan.load("plan.json")\n'
        f'messages = [{{"role": "user", "content": "{_PROMPT}"}}]\n'
        "result = model.generate(messages, plan=plan, max_new_tokens=64)\n"
        "print(result.text, result.stats.tokens_per_round)"
    )


def in_shell(result: SearchResult) -> str:
    """The same as one command."""
    options = " ".join(f"--{name} {shlex.quote(value)}" for name, value in _loading(result).items())
    words = ["layerskip generate --model", shlex.quote(_model(result)), options, "--plan plan.json"]
    return " ".join(filter(None, words)) + f' \\\n    --max-new-tokens 64 --chat "{_PROMPT}"'


def _of(values: Mapping[str, Any] | None, name: str, text: str) -> str:
    value = (values or {}).get(name)
    return text.format(value) if isinstance(value, int | float) else ""


def _where(layers: tuple[int, ...]) -> str:
    return f"in layer{'s' if len(layers) > 1 else ''} {layer_ranges(layers)}" if layers else "nowhere"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # for these also Python's form, with double quotes


def _model(result: SearchResult) -> str:
    names = (result.conditions.get(key) for key in _MODEL_KEYS)
    return next((name for name in names if isinstance(name, str) and name), "path-or-hub-id")


def _loading(result: SearchResult) -> dict[str, str]:
    """Under which conditions the costs hold; of "cuda:0 (its name)" only what can be asked for."""
    known = {name: result.conditions.get(name) for name in ("dtype", "device")}
    words = {name: value.split() for name, value in known.items() if isinstance(value, str)}
    return {name: first[0].removeprefix("torch.") for name, first in words.items() if first}


def _spread(speedup: Interval | None, inverse: bool = False) -> str:
    if speedup is None or not (math.isfinite(speedup.low) and math.isfinite(speedup.high)):
        return ""
    low, high = speedup.low, speedup.high
    if inverse:
        if low <= 0:
            return ""
        low, high = 1 / high, 1 / low
    return f" (95\N{NO-BREAK SPACE}%: {times(low)}–{times(high)})"
