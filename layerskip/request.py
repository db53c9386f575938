"""From the arguments of a call to everything that one decoding run needs: checked, complete, and effective.

Whatever can be wrong with a call is found here, before the model runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from layerskip.errors import InputError, SettingError
from layerskip.noise import wrap_seed
from layerskip.plan import DraftPlan
from layerskip.settings import DecodingSettings

__all__ = ["Request", "check_prompts", "effective_plan", "row_seeds"]

# transformers' own switches for assisted decoding, understood as short forms of a plan.
_LIMITS = {"num_assistant_tokens": "num_draft_tokens", "assistant_confidence_threshold": "confidence_threshold"}
PLAN_SWITCHES = ("assistant_early_exit", "assistant_model", *_LIMITS)


@dataclass(frozen=True)
class Request:
    """One checked call.

    Attributes:
        prompts: token ids, one list a row.
        seeds: one a row.
        own_processors, own_criteria: the caller's.
        pass_width: see `Engine`.
    """

    prompts: list[list[int]]
    settings: DecodingSettings
    plan: DraftPlan | None
    acceptance_rule: str
    seeds: list[int]
    own_processors: LogitsProcessorList
    own_criteria: StoppingCriteriaList
    pass_width: int | None

    def effective_settings(self) -> dict[str, Any]:
        """For the result: every control as it acted."""
        return {
            **self.settings.to_dict(),
            "acceptance_rule": self.acceptance_rule,
            "seed": self.seeds,
            "pass_width": self.pass_width,
        }


def effective_plan(plan: Any, given: Mapping[str, Any], config: GenerationConfig | None) -> DraftPlan | None:
    """Combine `plan` with transformers' switches in the call (`given`) or in a generation config.

    Raises:
        SettingError: they contradict each other, or a switch would have no effect.
    """
    switches = {name: getattr(config, name, None) for name in PLAN_SWITCHES} | dict(given)
    ways = {"plan": plan, **{name: switches.get(name) for name in ("assistant_early_exit", "assistant_model")}}
    named = [name for name, value in ways.items() if value is not None]
    if len(named) > 1:
        raise SettingError(f"got {' and '.join(named)}, which each say how to draft; expected one of them.")
    if ways["assistant_early_exit"] is not None:
        plan = DraftPlan.exit(ways["assistant_early_exit"])
    elif ways["assistant_model"] is not None:
        plan = DraftPlan.model(ways["assistant_model"])
    elif isinstance(plan, (str, os.PathLike)):
        plan = DraftPlan.load(plan)
    if plan is not None and not isinstance(plan, DraftPlan):
        raise SettingError(f"got a plan of type {type(plan).__name__}; expected a DraftPlan, the path of one, or None.")
    limits: dict[str, Any] = {
        field: switches[name] for name, field in _LIMITS.items() if switches.get(name) is not None
    }
    if plan is not None:
        return replace(plan, **limits)
    # A config may hold such limits for those who draft; in the call they would silently do nothing.
    idle = [name for name in _LIMITS if given.get(name) is not None]
    if idle:
        raise SettingError(
            f"got {', '.join(idle)} without anything that drafts; pass plan= or assistant_early_exit= too."
        )
    return None


def check_prompts(
    prompts: Sequence[Sequence[int]], settings: DecodingSettings, vocab_size: int, max_positions: int
) -> None:
    """Make sure that every prompt can be decoded.

    Raises:
        InputError: a token id outside the vocabulary, or a prompt that leaves no room for a token.
    """
    for row, prompt in enumerate(prompts):
        wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise InputError(f"got token id {wrong} in row {row}; expected ids from 0 to {vocab_size - 1}.")
        if len(prompt) >= max_positions:
            raise InputError(
                f"got a prompt of {len(prompt):,} tokens in row {row} on a model of {max_positions:,} positions, which "
                "leaves no room for a new token; shorten the prompt."
            )
        if settings.longest(len(prompt)) <= len(prompt):
            raise InputError(
                f"got a prompt of {len(prompt)} tokens in row {row} with max_length={settings.max_length}, which "
                "counts the prompt; pass a larger max_length, or max_new_tokens."
            )


def row_seeds(seed: int | Sequence[int] | None, rows: int) -> list[int]:
    """One seed a row: ``seed + row``, or as listed. Without a seed they come from torch's global generator.

    So a row decodes the same alone as in a batch, given its seed, and `torch.manual_seed` is respected.

    Raises:
        SettingError: not an int, or a list of another length than `rows`.
    """
    if seed is None:
        seed = int(torch.randint(2**62, ()).item())
    if isinstance(seed, int) and not isinstance(seed, bool):
        return [wrap_seed(seed + row) for row in range(rows)]
    if isinstance(seed, Sequence) and len(seed) == rows and all(type(each) is int for each in seed):
        return [wrap_seed(each) for each in seed]
    raise SettingError(f"got seed={seed!r} for {rows} row(s); expected an integer, or a list of one integer a row.")
