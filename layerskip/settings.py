"""Decoding settings: names and meanings are transformers', every one takes effect or is refused.

The values come, in rising order of precedence, from transformers' defaults, the checkpoint's own generation config,
a `GenerationConfig` given to the call, and the call's keyword arguments. None among the latter switches a control off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from transformers import GenerationConfig

from layerskip.errors import SettingError, UnknownSettingError, did_you_mean

__all__ = ["DecodingSettings", "resolve_settings"]

DEFAULT_NEW_TOKENS = 20  # as in transformers, whose max_length of 20 counts new tokens when nobody set it


@dataclass(frozen=True)
class DecodingSettings:
    """The effective controls of one call. None or the neutral value (1.0, 0) means: off."""

    max_new_tokens: int | None = DEFAULT_NEW_TOKENS
    max_length: int | None = None  # prompt included; only when max_new_tokens is not given
    min_new_tokens: int | None = None
    min_length: int | None = None
    do_sample: bool = False
    temperature: float | None = 1.0
    top_k: int | None = 50
    top_p: float | None = 1.0
    min_p: float | None = None
    typical_p: float | None = 1.0
    epsilon_cutoff: float | None = 0.0
    eta_cutoff: float | None = 0.0
    repetition_penalty: float | None = 1.0
    no_repeat_ngram_size: int | None = 0
    bad_words_ids: list[list[int]] | None = None
    suppress_tokens: list[int] | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    stop_strings: tuple[str, ...] = ()
    max_time: float | None = None  # seconds
    num_return_sequences: int = 1
    prefill_chunk_size: int | None = 1024  # most tokens of a prompt that are read in one pass
    output_scores: bool = False
    output_logits: bool = False

    def longest(self, prompt_length: int) -> int:
        """Most tokens that a row may hold, prompt included."""
        if self.max_new_tokens is not None:
            return prompt_length + self.max_new_tokens
        assert self.max_length is not None, "resolve_settings sets one of the two"
        return self.max_length

    def to_dict(self) -> dict[str, Any]:
        """All fields, for JSON and for the result."""
        return asdict(self)


NAMES = tuple(field.name for field in fields(DecodingSettings))
_SWITCHES = ("do_sample", "output_scores", "output_logits")

# Fields of GenerationConfig that change speed, bookkeeping or other decoding methods, but no token of ours.
_WITHOUT_EFFECT_ON_TOKENS = {
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind", "bos_token_id", "cache_config",
    "cache_implementation", "compile_config", "continuous_batching_config", "disable_compile", "early_stopping",
    "is_assistant", "length_penalty", "max_cache_len", "max_matching_ngram_size", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "prompt_lookup_num_tokens", "target_lookbehind", "transformers_version",
    "use_cache",
}  # fmt: skip
# Further fields, with the values at which they are off.
_OFF: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "guidance_scale": (1, 1.0),
    "return_dict_in_generate": (True, False),  # what we return holds both forms
}

# Two ways to say one thing, the second counting the prompt.
_LENGTHS = (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length"))
# Settings that act on sampling only, with the values at which they are off.
_WARPERS_OFF: dict[str, tuple[Any, ...]] = {
    "temperature": (1.0,),
    "top_k": (0, 50),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
}


def resolve_settings(
    checkpoint_config: GenerationConfig | None,
    given_config: GenerationConfig | None,
    given: Mapping[str, Any],
    further_names: Iterable[str] = (),
) -> DecodingSettings:
    """Merge the checkpoint's own config, a given config and keyword arguments, and check the result.

    Args:
        further_names: arguments of the call that are no settings, to suggest them for a name that does not exist.

    Raises:
        UnknownSettingError: a name in `given` that neither we nor transformers know.
        SettingError: a value out of range, settings that contradict each other, or one of transformers' settings
            that would change the output and is not supported.
    """
    _refuse_unknown(given, (*NAMES, *further_names))
    _refuse_conflicts(given)
    if given_config is not None and not isinstance(given_config, GenerationConfig):
        raise SettingError(f"got generation_config of type {type(given_config).__name__}; expected a GenerationConfig")
    merged: dict[str, Any] = {}
    for config in (checkpoint_config, given_config):
        if config is not None:
            _override(merged, {name: value for name, value in config.to_dict().items() if value is not None})
    _override(merged, given)
    _refuse_unsupported(merged)
    settings = _checked({name: merged[name] for name in NAMES if name in merged})
    _refuse_warpers_without_sampling(given, settings.do_sample)
    return settings


def _override(values: dict[str, Any], stronger: Mapping[str, Any]) -> None:
    """Update `values`; a length in `stronger` replaces the other kind of length of a weaker source too."""
    for pair in _LENGTHS:
        for length, other in (pair, pair[::-1]):
            if stronger.get(length) is not None:
                values.pop(other, None)
    values.update(stronger)


def _refuse_unknown(given: Mapping[str, Any], names: Iterable[str]) -> None:
    known_to_transformers = set(GenerationConfig().to_dict()) | set(_OFF) | _WITHOUT_EFFECT_ON_TOKENS
    for name in given:
        if name not in NAMES and name not in known_to_transformers:
            raise UnknownSettingError(
                f"got an unknown argument {name!r}; expected a decoding setting by transformers' name: "
                f"{', '.join(NAMES)}.{did_you_mean(name, names)}"
            )


def _refuse_unsupported(merged: Mapping[str, Any]) -> None:
    """Refuse what would change the output and is not ours, wherever it was set, unless a stronger source unset it."""
    for name, value in merged.items():
        if name in NAMES or name in _WITHOUT_EFFECT_ON_TOKENS or name.startswith("_"):
            continue
        if value is None or value is False or value in _OFF.get(name, ()):
            continue
        raise SettingError(
            f"got {name}={value!r} in the call, its generation_config or the checkpoint's own, which this runtime does "
            f"not support, and ignoring it could change the output. Pass {name}=None to do without; supported are "
            f"{', '.join(NAMES)}."
        )


def _refuse_conflicts(given: Mapping[str, Any]) -> None:
    set_ = {name for name, value in given.items() if value is not None}
    for first, second in _LENGTHS:
        if {first, second} <= set_:
            raise SettingError(
                f"got {first}={given[first]!r} and {second}={given[second]!r}, which contradict each other "
                f"({second} counts the prompt). Pass one of them."
            )


def _refuse_warpers_without_sampling(given: Mapping[str, Any], do_sample: bool) -> None:
    """Only for the call's own arguments: a checkpoint's config may name a temperature for those who sample."""
    asked = [name for name, off in _WARPERS_OFF.items() if given.get(name) not in (None, *off)]
    if asked and not do_sample:
        raise SettingError(
            f"got {', '.join(asked)} with do_sample=False, where they have no effect. "
            "Pass do_sample=True, or leave them out."
        )


def _checked(values: dict[str, Any]) -> DecodingSettings:
    values["eos_token_id"] = _as_ids("eos_token_id", values.get("eos_token_id"))
    values["stop_strings"] = _as_strings("stop_strings", values.get("stop_strings"))
    for name in (*_SWITCHES, "num_return_sequences"):  # off is no None here
        if values.get(name) is None:
            values.pop(name, None)
    for name, (kind, holds, expected) in _RANGES.items():
        value = values.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kind) or not holds(value):
            hint = " For greedy decoding pass do_sample=False." if name == "temperature" and value == 0 else ""
            raise SettingError(f"got {name}={value!r}; expected {expected}.{hint}")
    for name in _SWITCHES:
        if not isinstance(values.get(name, False), bool):
            raise SettingError(f"got {name}={values[name]!r}; expected True or False.")
    _check_ids(values)
    if values.get("max_new_tokens") is None:
        values["max_new_tokens"] = DEFAULT_NEW_TOKENS if values.get("max_length") is None else None
    for least, most in (("min_new_tokens", "max_new_tokens"), ("min_length", "max_length")):
        minimum, maximum = values.get(least), values.get(most)
        if minimum is not None and maximum is not None and minimum > maximum:
            raise SettingError(f"got {least}={minimum} and {most}={maximum}; expected minimum <= maximum.")
    return DecodingSettings(**values)


def _check_ids(values: dict[str, Any]) -> None:
    bad_words = values.get("bad_words_ids")
    if bad_words is not None and not (
        isinstance(bad_words, list) and bad_words and all(isinstance(word, list) and word for word in bad_words)
    ):
        raise SettingError(f"got bad_words_ids={bad_words!r}; expected a list of non-empty lists of token ids.")
    for word in bad_words or []:
        _as_ids("bad_words_ids", word)
    if values.get("suppress_tokens") is not None:
        values["suppress_tokens"] = list(_as_ids("suppress_tokens", values["suppress_tokens"]))


def _as_strings(name: str, value: Any) -> tuple[str, ...]:
    """One string, several, or None, as a tuple of non-empty strings."""
    strings = [] if value is None else [value] if isinstance(value, str) else value
    if not (isinstance(strings, (list, tuple)) and all(isinstance(each, str) and each for each in strings)):
        raise SettingError(f"got {name}={value!r}; expected one non-empty string or a list of them.")
    return tuple(strings)


def _as_ids(name: str, value: Any) -> tuple[int, ...]:
    """One id, several (list, tuple, 1-D tensor), or None, as a tuple of non-negative ints."""
    if value is None:
        return ()
    ids = value.tolist() if hasattr(value, "tolist") else value
    ids = [ids] if isinstance(ids, int) else ids
    if not (isinstance(ids, (list, tuple)) and all(type(each) is int and 0 <= each < 2**31 for each in ids)):
        raise SettingError(f"got {name}={value!r}; expected one token id or a list of them.")
    return tuple(ids)


def _number(holds: Callable[[float], bool], expected: str) -> tuple[Any, Callable[[Any], bool], str]:
    return (int, float), lambda value: math.isfinite(value) and holds(value), expected


def _integer(least: int) -> tuple[Any, Callable[[Any], bool], str]:
    return int, lambda value: value >= least, f"an integer of at least {least}"


_RANGES: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "max_new_tokens": _integer(1),
    "max_length": _integer(1),
    "min_new_tokens": _integer(0),
    "min_length": _integer(0),
    "temperature": _number(lambda value: value > 0, "a number above 0"),
    "top_k": _integer(0),
    "top_p": _number(lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    "min_p": _number(lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "typical_p": _number(lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    "epsilon_cutoff": _number(lambda value: 0 <= value < 1, "a number from 0 to below 1"),
    "eta_cutoff": _number(lambda value: 0 <= value < 1, "a number from 0 to below 1"),
    "repetition_penalty": _number(lambda value: value > 0, "a number above 0"),
    "no_repeat_ngram_size": _integer(0),
    "max_time": _number(lambda value: value > 0, "seconds, a number above 0"),
    "num_return_sequences": _integer(1),
    "prefill_chunk_size": _integer(1),
    "pad_token_id": (int, lambda value: 0 <= value < 2**31, "a token id"),
}
