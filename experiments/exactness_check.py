"""Is decoding still exact on this device? Tiny models of every family against transformers and against plain decoding.

A part of the test-suite that needs no pytest, for machines that are borrowed for minutes. In float64 every output must
be equal; in bfloat16 equal ones are only counted.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

import layerskip
from tests.special_models import agreeing_model
from tests.tiny_models import FAMILY_NAMES, VOCAB_SIZE, prompt, tiny_model, transformers_greedy

__all__ = ["Outcome", "check_family", "moved", "reuse"]

NEW_TOKENS = 24
EXIT = layerskip.DraftPlan.exit(2, num_draft_tokens=3)
PLANS = {
    "exit": EXIT,
    "skip": layerskip.DraftPlan.skip(attention=[1], mlp=[2], num_draft_tokens=4),
    "lookup": layerskip.DraftPlan.lookup(),
    "combined": replace(EXIT, lookup_tokens=4),
    "draft vocabulary": replace(EXIT, draft_vocabulary=tuple(range(0, VOCAB_SIZE, 2))),
}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 20, "acceptance_rule": "invariant"}


@dataclass
class Outcome:
    """What came of a family's cases.

    Attributes:
        cases: how many were compared.
        failures: those that were not as they must be, in words.
        low_precision: bfloat16 cases, and how many of them equal plain decoding.
        executions: how rounds were run where graphs were asked for, and how often.
    """

    cases: int = 0
    failures: list[str] = field(default_factory=list)
    low_precision: dict[str, int] = field(default_factory=lambda: {"cases": 0, "equal": 0})
    executions: dict[str, int] = field(default_factory=dict)

    def compare(self, case: str, call: Callable[[], object], expected: object) -> None:
        """Count a case; what it raises is a failure like a wrong answer."""
        self.cases += 1
        try:
            got = call()
        except Exception as error:
            self.failures.append(f"{case}: {type(error).__name__}: {error}")
            return
        if got != expected:
            self.failures.append(f"{case}: got {got}, expected {expected}")


def check_family(family: str, device: torch.device) -> Outcome:
    """All cases of one row of `TINY_CONFIGS`."""
    assert family in FAMILY_NAMES
    outcome = Outcome()
    hf_model = moved(agreeing_model(family), device)
    model = layerskip.wrap(hf_model)
    oracle = transformers_greedy(hf_model, prompt().to(device), max_new_tokens=NEW_TOKENS)[:, prompt().shape[1] :]
    for graphs in (True, False):
        how = f"{family}, {'graphs' if graphs else 'eager'}"
        for case, options in _greedy_cases():
            outcome.compare(f"{how}, {case}", _call(model, outcome, prompt(), graphs, **options), oracle.tolist())
        plain = _tokens(model, prompt(), cuda_graphs=False, seed=5, **SAMPLED)
        for case, plan in (("plain", None), *PLANS.items()):
            options = {**SAMPLED, "seed": 5, **_drafting(plan, "off")}
            outcome.compare(f"{how}, sampled, {case}", _call(model, outcome, prompt(), graphs, **options), plain)
        rows = [prompt(length, seed=length)[0].tolist() for length in (5, 12, 8)]
        alone = [_tokens(model, row, cuda_graphs=False)[0] for row in rows]
        for case, plan in (("plain", None), ("exit", EXIT), ("combined", PLANS["combined"])):
            call = _call(model, outcome, rows, graphs, **_drafting(plan, "off"))
            outcome.compare(f"{how}, 3 rows, {case}", call, alone)
    _count_low_precision(family, device, outcome)
    if device.type == "cuda":
        outcome.failures += [
            f"{family}: {count} calls ran as {name!r}"
            for name, count in outcome.executions.items()
            if name != "static: CUDA graphs"
        ]
    return outcome


def _greedy_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "plain", {}
    for name, plan in PLANS.items():
        yield name, _drafting(plan, "off")
    yield "combined, governed", _drafting(PLANS["combined"], "measured")


def _drafting(plan: layerskip.DraftPlan | None, governor: str) -> dict[str, Any]:
    return {} if plan is None else {"plan": plan, "governor": governor}


def _call(
    model: layerskip.Model, outcome: Outcome, inputs: object, graphs: bool, **options: Any
) -> Callable[[], list[list[int]]]:
    """A call whose execution is counted if graphs were asked for."""

    def call() -> list[list[int]]:
        result = model.generate(inputs, cuda_graphs=graphs, max_new_tokens=NEW_TOKENS, eos_token_id=None, **options)
        if graphs:
            execution = result.stats.execution
            outcome.executions[execution] = outcome.executions.get(execution, 0) + 1
        return result.new_token_ids

    return call


def _tokens(model: layerskip.Model, inputs: object, **options: Any) -> list[list[int]]:
    return model.generate(inputs, max_new_tokens=NEW_TOKENS, eos_token_id=None, **options).new_token_ids


def _count_low_precision(family: str, device: torch.device, outcome: Outcome) -> None:
    model = layerskip.wrap(moved(tiny_model(family, dtype=torch.bfloat16), device))
    plain = _tokens(model, prompt(), cuda_graphs=True)  # passes of other shapes would round differently
    for case, plan in PLANS.items():
        outcome.low_precision["cases"] += 1
        try:
            tokens = _call(model, outcome, prompt(), True, **_drafting(plan, "off"))()
        except Exception as error:
            outcome.failures.append(f"{family}, bfloat16, {case}: {type(error).__name__}: {error}")
            continue
        outcome.low_precision["equal"] += tokens == plain


def moved(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """A copy on `device`; the models of the tests are shared."""
    copied: Any = copy.deepcopy(model)
    moved: PreTrainedModel = copied.to(device)
    return moved


def reuse(device: torch.device) -> dict[str, float]:
    """Seconds of a first call, which records its rounds, and of a second one that is like it."""
    model = layerskip.wrap(moved(agreeing_model("llama"), device))
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        _tokens(model, prompt(), cuda_graphs=True, **_drafting(EXIT, "off"))
        seconds.append(time.perf_counter() - began)
    return {"first_s": seconds[0], "second_s": seconds[1]}
