"""`custom_generate`: this runtime inside transformers' own `generate`, which prepares a call and has it decoded here.

What it hands over is ready-made: rows expanded and padded, processors and criteria for that padded batch, a complete
config. It knows nothing of how a call is decoded.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    EpsilonLogitsWarper,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from layerskip.errors import InputError, SettingError
from layerskip.governor.costs import CostRatios
from layerskip.request import make_request
from layerskip.result import GenerationResult
from layerskip.row_views import RowViews
from layerskip.stopping import stop_string_criterion
from layerskip.wrapped_models import wrapped_model

__all__ = ["CustomGenerateOutput", "custom_generate"]

# Transformers' warpers that say the same as a setting of ours, in the order in which they act: (setting, attribute).
_WARPERS: dict[type, tuple[str, str]] = {
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
    TypicalLogitsWarper: ("typical_p", "mass"),
    EpsilonLogitsWarper: ("epsilon_cutoff", "epsilon"),
}
_STATEFUL = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")
_MODES = ("greedy_search", "sample", "assisted_generation")
_SCORES = ("output_scores", "output_logits")
_INNER_STATES = ("output_attentions", "output_hidden_states")
_WAYS = ("assistant_early_exit", "prompt_lookup_num_tokens")
# What transformers fills in where nobody said anything, so that it cannot be taken for a wish.
_LIMITS = {"num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4}
# What `generate` prepares for the model's forward: read here, or made superfluous by a cache of our own.
_PREPARED = ("attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep",
             "cache_position")  # fmt: skip
_BIND = "bind it: custom_generate=functools.partial(layerskip.custom_generate, {0}={0})"


@dataclass
class CustomGenerateOutput(GenerateDecoderOnlyOutput):
    """What `generate(return_dict_in_generate=True)` returns.

    Attributes:
        result: statistics, finish reasons, effective settings and plan.
    """

    result: GenerationResult | None = None


def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    plan: Any = None,
    governor: str | None = None,
    cost_ratios: CostRatios | None = None,
    seed: int | Sequence[int] | None = None,
    acceptance_rule: str | None = None,
    pass_width: int | None = None,
    cuda_graphs: bool | None = None,
    compile: bool | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    streamer: Any = None,
    synced_gpus: bool | None = None,
    **model_kwargs: Any,
) -> Tensor | CustomGenerateOutput:
    """Decode for transformers: ``hf_model.generate(**inputs, custom_generate=layerskip.custom_generate, plan=…)``.

    The model is wrapped at its first call, and again when its modules or weights were replaced; the wrapped one is kept
    as long as the model lives, and ``layerskip.wrapped_models.wrapped_model(hf_model).prepare()`` makes it faster.
    `generate` does not hand its own `tokenizer` and `streamer` to a function; bind them:
    ``custom_generate=functools.partial(layerskip.custom_generate, streamer=streamer)``.

    The caller's processors and criteria are asked about one row at a time, with its padding. A row that a criterion
    ends is padded from there on (transformers lets it run on to the last row's end if there is no end-of-text id).

    Args:
        input_ids: (batch, length), left-padded; it and the arguments up to `generation_config` come from `generate`.
        plan: as in `Model.generate`, and so are the further ones. None: as the config's `assistant_early_exit` or
            `prompt_lookup_num_tokens` say, or nothing is drafted.
        stop_strings: of the call (those of a config transformers refuses here by itself); need `tokenizer`.
        synced_gpus: must not be true.
        model_kwargs: what `generate` has made for the model's forward.

    Returns:
        (batch, length), int64, as transformers pads it, on the device of `input_ids`. With `return_dict_in_generate` a
        `CustomGenerateOutput`, in which `scores` and `logits` stand where they were asked for.

    Raises:
        LayerSkipError: one of its kinds, before the model has run, for what this runtime does not do.
    """
    _refuse_dropped(synced_gpus)
    _refuse_unsupported(generation_config, logits_processor)
    _refuse_unread(model, model_kwargs)
    wrapped, mask = wrapped_model(model), _mask(input_ids, model_kwargs)
    processors, settings = _settings(generation_config, logits_processor)
    criteria = [each for each in stopping_criteria if not isinstance(each, (MaxLengthCriteria, EosTokenCriteria))]
    if stop_strings is not None:
        criteria.append(_stop_strings(stop_strings, tokenizer))
    options: dict[str, Any] = {
        "attention_mask": mask, "logits_processor": processors, "stopping_criteria": criteria,
        "governor": governor, "cost_ratios": cost_ratios, "seed": seed, "acceptance_rule": acceptance_rule,
        "pass_width": pass_width, "cuda_graphs": cuda_graphs, "compile": compile,
    }  # fmt: skip
    options |= {"plan": plan} if plan is not None else _switches(generation_config)
    options |= settings | _ends(stopping_criteria, input_ids.shape[1])
    if generation_config.return_dict_in_generate:
        options |= {name: bool(getattr(generation_config, name)) for name in _SCORES}
    decoder = wrapped.decoder
    request = make_request(input_ids, options, None, GenerationConfig(), decoder.vocab_size, decoder.max_positions)
    if request.plan is not None:
        request.plan.check(wrapped.identity)
    lengths = [len(prompt) for prompt in request.prompts]
    views = RowViews(input_ids.split(1), lengths)
    if views.are_needed([*processors, *criteria]):
        request = replace(request, row_view=views)
    result = wrapped.decode(request, streamer)
    sequences = result.sequences.to(input_ids.device)
    if generation_config.return_dict_in_generate:
        output = CustomGenerateOutput(sequences=cast(Any, sequences), result=result)  # its types are legacy ones
        output.scores, output.logits = cast(Any, result.scores), cast(Any, result.logits)
        return output
    return sequences


def _refuse_dropped(synced_gpus: bool | None) -> None:
    """Refuse what was given to `generate`, and would be left out without a word: it hands these on to nobody."""
    given = _arguments_of_generate()
    if given.get("streamer") is not None:
        raise SettingError(
            "got a streamer, which transformers' generate does not hand on to a custom_generate; "
            + _BIND.format("streamer")
            + ", or call layerskip.wrap(model, tokenizer).generate(…, streamer=…)."
        )
    if given.get("assistant_model") is not None:
        raise SettingError(
            "got an assistant_model, which transformers' generate does not hand on to a custom_generate; name it in "
            "the plan: plan=layerskip.DraftPlan.model(assistant_model)."
        )
    if synced_gpus or given.get("synced_gpus"):
        raise SettingError(
            "got synced_gpus=True, for weights that are sharded over processes; expected whole weights in each "
            "process. Decode with transformers' own generate, or gather the weights."
        )


def _arguments_of_generate() -> Mapping[str, Any]:
    """The local variables of the `generate` that called, which are the only place where some arguments are left."""
    code = getattr(inspect.unwrap(GenerationMixin.generate), "__code__", None)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def _refuse_unsupported(config: GenerationConfig, processors: LogitsProcessorList) -> None:
    """Refuse other ways to decode, and output of what is not kept."""
    mode = config.get_generation_mode()
    mode = getattr(mode, "value", mode)
    if mode not in _MODES or getattr(config, "use_mtp", False):
        raise SettingError(
            f"got the generation mode {mode} (num_beams={config.num_beams}, use_mtp="
            f"{getattr(config, 'use_mtp', False)}); expected greedy search or sampling (num_beams=1). Decode with "
            "transformers' own generate: leave out custom_generate."
        )
    stateful = [type(each).__name__ for each in processors if type(each).__name__ in _STATEFUL]
    if stateful:
        raise SettingError(
            f"got {', '.join(stateful)} (guidance_scale, or a SynthID watermark), which keeps a state from token to "
            "token and would count drafts that are rejected; expected functions of the text. Leave out "
            "custom_generate."
        )
    further = [name for name in _INNER_STATES if getattr(config, name, None)]
    if further and config.return_dict_in_generate:
        raise SettingError(
            f"got {', '.join(further)}, which this runtime does not return; expected sequences and scores to be "
            "enough. Leave them out, or leave out custom_generate."
        )


def _refuse_unread(model: PreTrainedModel, model_kwargs: Mapping[str, Any]) -> None:
    """Refuse what would have to go into the model's own forward, or be kept of it."""
    prepare = vars(model).get("prepare_inputs_for_generation")
    if getattr(prepare, "__self__", model) is not model:
        raise InputError(
            f"got a model whose inputs are prepared by a {type(getattr(prepare, '__self__', None)).__name__} (PEFT's "
            "learned prompts), which is not called here; expected the model's own inputs, as with LoRA. Leave out "
            "custom_generate."
        )
    unread = [name for name, value in model_kwargs.items()
              if value is not None and name not in (*_PREPARED, *_SCORES, *_INNER_STATES)]  # fmt: skip
    if unread:
        raise InputError(
            f"got {', '.join(unread)} for the model's forward, which is not called here; expected token ids and an "
            "attention_mask. Leave them out, or leave out custom_generate."
        )
    cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
        raise InputError(
            "got a cache of the caller's, which would be neither read nor written: this runtime has a cache of its "
            "own for each call. Leave it out and pass the whole text, or leave out custom_generate."
        )


def _mask(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> Tensor | None:
    """The attention mask (batch, length), if any; refuse positions that are not those it implies."""
    mask: Tensor | None = model_kwargs.get("attention_mask")
    positions: Tensor | None = model_kwargs.get("position_ids")
    if positions is not None:
        seen = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.dtype)
        implied = (seen.cumsum(dim=-1) - 1).to(positions.device)
        if (
            positions.shape[-1] != implied.shape[-1]
            or ((positions != implied) & (seen != 0).to(positions.device)).any()
        ):
            raise InputError(
                "got position_ids of the caller's; expected the tokens of each row to be counted from 0. Leave them "
                "out, or leave out custom_generate."
            )
    return mask


def _settings(config: GenerationConfig, processors: LogitsProcessorList) -> tuple[list[Any], dict[str, Any]]:
    """The processors that are to be called, and settings for all that the config says and they do not.

    The last ones are mostly warpers that settings can say as well: as such they are no unknown code, for which rounds
    are neither recorded nor run in inference mode.
    """
    rest = list(processors)
    settings: dict[str, Any] = {"do_sample": bool(config.do_sample), "top_k": 0}
    order = list(_WARPERS)
    while config.do_sample and rest and type(rest[-1]) in order and getattr(rest[-1], "min_tokens_to_keep", 1) == 1:
        name, attribute = _WARPERS[type(rest[-1])]
        order = order[: order.index(type(rest[-1]))]
        settings[name] = getattr(rest.pop(), attribute)
    pad = getattr(config, "_pad_token_tensor", None)
    pad = config.pad_token_id if pad is None else pad
    if (chunk := getattr(config, "prefill_chunk_size", None)) is not None:
        settings["prefill_chunk_size"] = chunk
    return rest, settings | {"pad_token_id": None if pad is None else int(pad)}


def _ends(criteria: StoppingCriteriaList, padded_length: int) -> dict[str, Any]:
    """Length and ends of text, as settings; both are compared on the host, and rows are shorter without padding."""
    longest = [each.max_length for each in criteria if isinstance(each, MaxLengthCriteria)]
    eos = [token for each in criteria if isinstance(each, EosTokenCriteria) for token in each.eos_token_id.tolist()]
    if not longest:
        raise SettingError("got no max_length from transformers' generate; expected one. Pass max_new_tokens.")
    return {"max_new_tokens": min(longest) - padded_length, "eos_token_id": eos or None}


def _stop_strings(strings: str | Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> Any:
    if tokenizer is None:
        raise SettingError(
            f"got stop_strings={strings!r} without a tokenizer, which transformers' generate does not hand on to a "
            "custom_generate; " + _BIND.format("tokenizer") + "."
        )
    return stop_string_criterion([strings] if isinstance(strings, str) else strings, tokenizer)


def _switches(config: GenerationConfig) -> dict[str, Any]:
    """Transformers' own switches for drafting, where the config has them."""
    ways = {name: getattr(config, name, None) for name in _WAYS}
    switches = {name: value for name, value in ways.items() if value is not None}
    if "assistant_early_exit" in switches:  # the limits are for drafts by a model
        limits = {name: getattr(config, name, None) for name in _LIMITS}
        switches |= {name: value for name, value in limits.items() if value not in (None, _LIMITS[name])}
    return switches
