"""Arms of others, in the same process on the same weights: transformers, and the packages economize and flashspec.

They are called as their documentation says, by their public names only. Of the packages no call says when its first
token came, so it is taken from a call for one token, made just before the timed one.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from experiments.arm_rows import ArmRow, Preparation, Settings, Workshop, name_of
from experiments.arms import Arm, Run, ends_of, transformers_arm, until_end
from layerskip.errors import SettingError

__all__ = ["OUTSIDE"]

STATIC = {"cache_implementation": "static"}
HF_LOOKUP_TOKENS = 10  # the number in transformers' documentation
# Settings that transformers reads of the model that drafts.
DRAFTING = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")

Decoded = tuple[list[int], int]  # new tokens, and passes of the model (0: not known)


def _transformers(what: str, fixed: Callable[[Workshop], dict[str, Any]], grid: tuple[dict[str, Any], ...],
                  needs: tuple[str, ...] = ()) -> ArmRow:  # fmt: skip
    """A row for `generate`; the grid's last settings are the static cache, which it refuses for most ways to draft."""

    def make(shop: Workshop, name: str, settings: Settings) -> Arm:
        drafting = {key: value for key, value in settings.items() if key in DRAFTING}
        other = {key: value for key, value in settings.items() if key not in DRAFTING}
        return transformers_arm(name, shop.hf_model, drafting, **{**shop.decoding, **fixed(shop), **other})

    return ArmRow(
        what, make, ({}, *grid, STATIC), needs, preparation=_draft_weights if "draft-model" in needs else _none
    )


def _none(shop: Workshop) -> Preparation:
    return Preparation()


def _draft_weights(shop: Workshop) -> Preparation:
    return Preparation(shop.hf_draft_bytes, shop.hf_draft_cache_bytes)


def imported(package: str, module: str) -> Any:
    """A module of an optional package.

    Raises:
        SettingError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SettingError(
            f"got an arm of the package {package}, which cannot be imported ({error}); expected it to be installed: "
            'pip install "layerskip[compare]"'
        ) from error


def _timed(name: str, described: Mapping[str, Any], ends: set[int], decode: Callable[[list[int], int], Decoded]) -> Arm:
    """An arm of a function that decodes one prompt up to a number of new tokens, and tells nothing of its times."""

    def call(rows: list[list[int]], new_tokens: int) -> Run:
        (row,) = rows
        began = time.perf_counter()
        decode(row, 1)
        first_s = time.perf_counter() - began
        began = time.perf_counter()
        tokens, passes = decode(row, new_tokens)
        call_s = time.perf_counter() - began
        # What comes behind the end of the text was decoded in that time, too.
        return Run([until_end(tokens, ends)], first_s, max(0.0, call_s - first_s), len(tokens) - 1, passes, call_s)

    return Arm(name, call, dict(described))


def _economize(
    technique: str, what: str, options: Callable[[Workshop], dict[str, Any]], needs: tuple[str, ...] = ()
) -> ArmRow:
    """A row for `economize.apply` with the configuration of `technique`, and `decode`."""

    def make(shop: Workshop, name: str, settings: Settings) -> Arm:
        package, decoding = imported("economize", "economize"), {"cycle_length": 4}
        for key in ("cycle_length", "min_confidence"):
            if key in settings:
                decoding[key] = settings[key]
        given = {**options(shop), **{key: value for key, value in settings.items() if key not in decoding}}
        model = package.apply(shop.hf_model, _economize_config(technique, given))
        how, ends = package.DecodeConfig(**decoding), ends_of(shop.hf_model)

        def has_ended(tokens: torch.Tensor) -> bool:
            return int(tokens.reshape(-1)[-1]) in ends

        def decode(row: list[int], new_tokens: int) -> Decoded:
            ids = torch.tensor(row, device=shop.hf_model.device)
            result = model.decode(ids, new_tokens, decoding=how, stop=has_ended)
            return result.tokens.reshape(-1).tolist(), int(result.cost_summary()["exact_calls"]) - 1

        shown = {key: value if isinstance(value, int | float | tuple) else str(value) for key, value in given.items()}
        if "model" in given:
            shown["model"] = name_of(given["model"])
        return _timed(name, {"economize": {"technique": technique, **shown, **decoding}}, ends, decode)

    grid: tuple[dict[str, Any], ...] = ({}, *({"cycle_length": length} for length in (3, 6, 10)))
    weights = _draft_weights if "draft-model" in needs else _none
    return ArmRow(what, make, grid, needs, needs_greedy=True, is_extra=True, preparation=weights)


def _economize_config(technique: str, given: Mapping[str, Any]) -> Any:
    """By the manner of the package's names: `PruneConfig` of `economize.techniques.prune`."""
    module = imported("economize", f"economize.techniques.{technique}")
    return getattr(module, f"{technique.title().replace('_', '')}Config")(**given)


def _alternate_blocks(shop: Workshop) -> dict[str, Any]:
    """As many as in economize's own example, 10 of 24, each second one of the inner blocks."""
    blocks = shop.model.decoder.num_blocks
    return {"skip_layers": tuple(range(1, blocks - 1, 2))[: max(1, round(blocks * 10 / 24))]}


def _hybrid(shop: Workshop) -> dict[str, Any]:
    return {"fallback": _economize_config("early_exit", {"exit_layer": shop.exit_layer})}


def _flashspec(what: str, drafters: Callable[[Any, Workshop], list[Any]], default: dict[str, Any],
               grid: tuple[dict[str, Any], ...], needs: tuple[str, ...] = ()) -> ArmRow:  # fmt: skip
    """A row for `flashspec.SpeculativeEngine`."""

    def make(shop: Workshop, name: str, settings: Settings) -> Arm:
        package, parts = imported("flashspec", "flashspec"), imported("flashspec", "flashspec.engine")
        given, ends = {**default, **settings}, ends_of(shop.hf_model)
        sampling = package.SamplingConfig(temperature=0.0, **({"gamma": given["gamma"]} if "gamma" in given else {}))
        bandit = {"bandit": package.BanditConfig(n_arms=1)} if given["drafter_strategy"] == "bandit" else {}
        device, dtype = shop.subject.device, shop.subject.dtype
        config = package.FlashSpecConfig(
            device=str(device), drafter_strategy=given["drafter_strategy"], sampling=sampling, **bandit
        )
        target = parts.TargetModel(shop.subject.name, device, dtype, model=shop.hf_model)
        engine = package.SpeculativeEngine(config, drafters(parts, shop), target)

        def decode(row: list[int], new_tokens: int) -> Decoded:
            ids = torch.tensor([row], device=device)
            result = engine.generate(ids, max_new_tokens=new_tokens, eos_token_ids=sorted(ends))
            return result.output_ids[0, : int(result.n_tokens_generated)].tolist(), len(result.arm_steps)

        return _timed(name, {"flashspec": given}, ends, decode)

    weights = _draft_weights if "draft-model" in needs else _none
    return ArmRow(what, make, ({}, *grid), needs, needs_greedy=True, is_extra=True, preparation=weights)


def _flashspec_model(parts: Any, shop: Workshop) -> list[Any]:
    name, device, dtype = str(shop.draft_model), shop.subject.device, shop.subject.dtype
    return [parts.HuggingFaceDrafter(name, device, dtype, model=shop.hf_draft_model)]


def _fixed(lengths: tuple[int, ...]) -> tuple[dict[str, Any], ...]:
    schedule = {"num_assistant_tokens_schedule": "constant"}
    return tuple({"num_assistant_tokens": length, **schedule} for length in lengths)


OUTSIDE: Mapping[str, ArmRow] = {
    "hf-greedy": _transformers("transformers, plain", lambda shop: {}, ()),
    "hf-assistant": _transformers(
        "transformers, assistant_model=--draft-model", lambda shop: {"assistant_model": shop.hf_draft_model},
        (*_fixed((2, 4, 8)), {"assistant_confidence_threshold": 0.0}), ("draft-model",),
    ),
    "hf-early-exit": _transformers(
        "transformers, assistant_early_exit=--exit", lambda shop: {"assistant_early_exit": shop.exit_layer},
        _fixed((2, 4, 8)), ("exit",),
    ),
    "hf-lookup": _transformers(
        "transformers, prompt_lookup_num_tokens", lambda shop: {"prompt_lookup_num_tokens": HF_LOOKUP_TOKENS},
        (*({"prompt_lookup_num_tokens": tokens} for tokens in (3, 6)),
         {"prompt_lookup_num_tokens": 6, "max_matching_ngram_size": 3}),
    ),
    "economize-lookup": _economize("lookup", "economize, prompt lookup", lambda shop: {}),
    "economize-layer-skip": _economize("layer_skip", "economize, whole layers left out", _alternate_blocks),
    "economize-early-exit": _economize(
        "early_exit", "economize, exit at --exit", lambda shop: {"exit_layer": shop.exit_layer}, ("exit",)
    ),
    "economize-draft-model": _economize(
        "draft_model", "economize, --draft-model", lambda shop: {"model": shop.draft_model}, ("draft-model",)
    ),
    "economize-hybrid": _economize("hybrid", "economize, lookup with exit at --exit as fallback", _hybrid, ("exit",)),
    "flashspec-draft-model": _flashspec(
        "flashspec, --draft-model", _flashspec_model, {"drafter_strategy": "auto"},
        ({"drafter_strategy": "composite-g4"},
         *({"drafter_strategy": "bandit", "gamma": gamma} for gamma in (2, 4, 6))), ("draft-model",),
    ),
    "flashspec-lookup": _flashspec(
        "flashspec, prompt lookup", lambda parts, shop: [parts.NgramDrafter()],
        {"drafter_strategy": "bandit"}, tuple({"gamma": gamma} for gamma in (2, 6, 10)),
    ),
}  # fmt: skip
