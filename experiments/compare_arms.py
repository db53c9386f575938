"""Our arms: every way to draft on the one engine, with the same target, verification, acceptance and sampler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import layerskip
from experiments.arm_rows import ArmRow, Preparation, Settings, Workshop
from experiments.arms import Arm, our_arm
from experiments.outside_arms import OUTSIDE
from layerskip.memory import new_cache
from layerskip.plan import DEFAULT_LOOKUP_TOKENS

__all__ = ["ARMS", "PLAIN", "PLAN_FILES", "THEIR_PLAIN", "plan_preparation"]

PLAIN = "plain"
THEIR_PLAIN = "hf-greedy"
PLAN_FILES = {
    "plan": "a plan file, as a search or a training writes it",
    "trained": "a plan file of trained blocks, as a training writes it",
    "eagle": "such a file of blocks trained by EAGLE's recipe",
    "medusa": "such a file of trained heads",
}
COMBINED_OF = ("plan", "trained", "exit")  # what lookup is combined with: the first of these that is given

_POSITIONS = 256  # of a cache that is measured

Planner = Callable[[Workshop], layerskip.DraftPlan | None]


def _ours(what: str, plan_of: Planner, grid: tuple[dict[str, Any], ...] = (), needs: tuple[str, ...] = ()) -> ArmRow:
    """A row for the engine; `grid` goes over fields of the plan, behind those that the plan has itself."""

    def make(shop: Workshop, name: str, settings: Settings) -> Arm:
        plan = plan_of(shop)
        if settings:
            fields = {} if plan is None else {key: getattr(plan, key) for key in plan.__dataclass_fields__}
            plan = layerskip.DraftPlan.of({**fields, **settings})
        if plan is not None:
            shop.model.check_plan(plan)
        return our_arm(name, shop.model, plan, None if plan is None else shop.governor, decoding=shop.decoding)

    def preparation(shop: Workshop) -> Preparation:
        plan = plan_of(shop)
        return Preparation() if plan is None else plan_preparation(shop.model, plan)

    return ArmRow(what, make, ({}, *grid), needs, preparation=preparation)


def plan_preparation(model: layerskip.Model, plan: layerskip.DraftPlan) -> Preparation:
    """The weights that `plan` needs beside the model's, and what its provenance says that it cost."""
    provenance, size = plan.provenance, model.decoder.dtype.itemsize
    weights_bytes, cache_bytes = 0, 0
    if plan.adapter is not None:
        adapter = model.adapter(plan)
        weights_bytes = adapter.num_parameters * size
        with_it, without = (new_cache(model.decoder, 1, _POSITIONS, each).nbytes for each in (adapter, None))
        cache_bytes = (with_it - without) // _POSITIONS
    elif plan.draft_model is not None:
        inspection = model.draft_model(plan).inspection
        weights_bytes, cache_bytes = inspection.parameters * size, inspection.kv_bytes_per_token
    training = (provenance.get("trained") or {}).get("training", provenance)  # a search may have taken a trained path
    settings = training.get("settings")
    found = {
        "made_by": provenance.get("made_by"),
        "seconds": training.get("seconds"),
        "trained_tokens": settings.get("tokens") if isinstance(settings, Mapping) else None,
        "search_trials": provenance.get("trials"),
    }
    held_out = (provenance.get("held_out") or {}).get("predicted_speedup") or {}
    return Preparation(
        weights_bytes,
        cache_bytes,
        {name: value for name, value in found.items() if value is not None},
        held_out.get("value", provenance.get("predicted_speedup")),
    )


def _two_model(shop: Workshop) -> layerskip.DraftPlan:
    """The plan that a training wrote into the draft model's folder, if it is of this target; else any draft model's."""
    plain = layerskip.DraftPlan.model(shop.draft_model)
    file = Path(str(shop.draft_model)) / "plan.json"
    if not file.is_file():
        return plain
    plan = layerskip.DraftPlan.load(file)
    is_its_own = plan.draft_model is not None and Path(plan.draft_model).resolve() == file.parent.resolve()
    return plan if is_its_own and plan.target == shop.model.identity else plain


def _combined(shop: Workshop) -> layerskip.DraftPlan:
    plan = next(shop.plans[name] for name in COMBINED_OF if name in shop.plans)
    return replace(plan, lookup_tokens=plan.lookup_tokens or DEFAULT_LOOKUP_TOKENS)


_LENGTHS: tuple[dict[str, Any], ...] = (
    *({"num_draft_tokens": drafts} for drafts in (2, 3, 6)),
    {"num_draft_tokens": 6, "confidence_threshold": 0.4},
)
_LOOKAHEAD_SIZES: tuple[dict[str, Any], ...] = (
    {"lookahead_text": False},
    *({"lookahead_window": window, "lookahead_ngram": ngram, "lookahead_guesses": guesses}
      for window, ngram, guesses in ((3, 3, 3), (5, 3, 7), (7, 5, 7), (10, 5, 10))),
)  # fmt: skip
_HEADS: tuple[dict[str, Any], ...] = (
    {"num_draft_tokens": 2}, {"num_siblings": 0}, {"num_siblings": 2}, {"num_siblings": 9},
)  # fmt: skip
_LOOKUP_LENGTHS: tuple[dict[str, Any], ...] = tuple({"lookup_tokens": tokens} for tokens in (3, 10, 16))

ARMS: Mapping[str, ArmRow] = {
    PLAIN: ArmRow("plain decoding by this engine", lambda shop, name, settings: our_arm(
        name, shop.model, None, decoding=shop.decoding)),
    "self": _ours("the draft of --plan", lambda shop: shop.plans["plan"], _LENGTHS, ("plan",)),
    "exit": _ours("the first --exit blocks, norm and head", lambda shop: shop.plans["exit"], _LENGTHS, ("exit",)),
    "trained": _ours("the trained draft of --trained", lambda shop: shop.plans["trained"], _LENGTHS, ("trained",)),
    "eagle": _ours("the trained draft of --eagle, by EAGLE's recipe", lambda shop: shop.plans["eagle"], _LENGTHS,
                   ("eagle",)),
    "medusa": _ours("the trained heads of --medusa", lambda shop: shop.plans["medusa"], _HEADS, ("medusa",)),
    "lookup": _ours("prompt lookup", lambda shop: layerskip.DraftPlan.lookup(), _LOOKUP_LENGTHS),
    "lookahead": _ours("lookahead decoding", lambda shop: layerskip.DraftPlan.lookahead(), _LOOKAHEAD_SIZES),
    "combined": _ours("lookup beside --plan, --trained or --exit, the first that is given", _combined,
                      (*_LOOKUP_LENGTHS, {"lookup_tokens": 10, "num_draft_tokens": 2}), COMBINED_OF),
    "two-model": _ours("the checkpoint --draft-model drafts", _two_model, _LENGTHS, ("draft-model",)),
    **OUTSIDE,
}  # fmt: skip
