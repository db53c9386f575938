"""Texts to search on: the model's own answers to a person's prompts, or to prompts that it writes itself.

An instruct model is given its chat template up to the user's turn and writes what a user would ask; a base model goes
on from its first token. Both are drawn at temperature 1 from the 64 likeliest tokens and are the same for the same
seed.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from layerskip.api import Model
from layerskip.errors import InputError, SettingError
from layerskip.processing import make_processors
from layerskip.sampling import Sampler
from layerskip.search.texts import Calibration, Text
from layerskip.text import encode

__all__ = ["decoding_options", "given_ids", "make_sampler_of", "write_calibration", "write_prompts"]

Notify = Callable[[str, int, int], None]
"""Told what is going on, how much of it is done, and how much there is."""

_ROWS = 16  # answered at once: a pass over so many rows takes hardly longer than one over a few
_LONGEST_QUESTION = 96
_LONGEST_START = 32  # of a base model's text
_TRIES = 4  # prompts are drawn for at most so many times the texts that are wanted
_FREE: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 64}
_LEFT_OUT = (
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "min_new_tokens", "min_length",
)  # fmt: skip
_MARK = "\u241e"  # stands for what a user says, to find where in the template that is


def write_calibration(
    model: Model,
    prompts: Sequence[Any] | None = None,
    *,
    positions: int = 8192,
    held_out_positions: int = 4096,
    frequency_positions: int = 0,
    new_tokens: int = 128,
    seed: int = 0,
    sampling: Mapping[str, Any] | None = None,
    notify: Notify = lambda what, done, total: None,
) -> Calibration:
    """Let the model answer prompts until there are enough positions to search on, and others to report on.

    Args:
        prompts: strings, chat messages or lists of token ids; None: the model writes them. What each is for is drawn by
            `seed`.
        positions, held_out_positions, frequency_positions: tokens of answers for each use (`Calibration`).
        new_tokens: of an answer, at most; twice and more as many if there are few prompts.
        sampling: decoding settings that answers are drawn with (``{"temperature": 0.7}``); None: greedily.
        notify: see `Notify`.

    Raises:
        SettingError: a number below 1, or settings that look at the tokens before a position (penalties).
        InputError: fewer prompts that the model has room to answer than uses, or answers of one token only.
    """
    counts = {"positions": positions, "held_out_positions": held_out_positions, "new_tokens": new_tokens}
    for name, value, least in [(name, counts[name], 2 if name == "new_tokens" else 1) for name in counts]:
        if type(value) is not int or value < least:
            raise SettingError(f"got {name}={value!r}; expected an integer of at least {least}.")
    if sampling is not None:
        make_sampler_of(model, sampling)  # says what is wrong with it
    options, left_out = decoding_options(model, sampling)
    wanted = {"search": positions, "held_out": held_out_positions, "frequency": frequency_positions}
    wanted = {name: count for name, count in wanted.items() if count}
    total = sum(wanted.values())
    writes, asked = prompts is None, total // new_tokens + len(wanted)
    if prompts is None:
        notify("writing prompts", 0, asked)
        rows = write_prompts(model, asked, seed)
    else:
        rows = _given_rows(model, prompts, seed)
    if len(rows) < len(wanted):
        raise InputError(
            f"got {len(rows)} different prompt(s) that the model has room to answer; expected {len(wanted)} or more, "
            f"one for each use: {', '.join(wanted)}. Give more or shorter prompts, or none: the model then writes its "
            "own."
        )
    longest = min(512, max(new_tokens, 2 + total // len(rows)), max(2, model.decoder.max_positions // 2))
    parts = _answered(model, rows, wanted, {**options, "max_new_tokens": longest}, seed, asked if writes else 0, notify)
    found = {name: sum(text.num_positions for text in parts[name]) for name in wanted}
    if not all(parts[name] for name in wanted):
        raise InputError(
            f"got {sum(map(len, parts.values()))} answer(s) of more than one token, in which something can be drafted; "
            f"expected {len(wanted)} or more. Give prompts that ask for text."
        )
    if sum(found.values()) < 0.9 * total:
        warnings.warn(
            f"the answers have {sum(found.values()):,} tokens in which something can be drafted, of {total:,} "
            "that were asked for: the search knows less than it might. Give more prompts, or ask for fewer positions",
            stacklevel=2,
        )
    about = {
        "source": "written by the model" if writes else "given prompts",
        "seed": seed,
        "sampling": None if sampling is None else dict(sampling),
        "left_out": left_out,
        "new_tokens": longest,
        "tokens_asked": wanted,
        "tokens_found": found,
    }
    return Calibration(tuple(parts["search"]), tuple(parts["held_out"]), tuple(parts["frequency"]), about)


def _answered(
    model: Model,
    rows: list[list[int]],
    wanted: Mapping[str, int],
    options: Mapping[str, Any],
    seed: int,
    writes: int,
    notify: Notify,
) -> dict[str, list[Text]]:
    """The model's answers to `rows`, in order, until each use has the tokens that it wants.

    Args:
        writes: prompts that were written for this; where answers are shorter than they might be, up to some times as
            many are. 0: they are given, and there are no more.
    """
    parts: dict[str, list[Text]] = {name: [] for name in ("search", "held_out", "frequency")}
    found, first, total = dict.fromkeys(wanted, 0), 0, sum(wanted.values())
    while first < len(rows) and any(found[name] < wanted[name] for name in wanted):
        batch = rows[first : first + _ROWS]
        answers = model.generate(batch, seed=seed + first, **options)
        for prompt, answer in zip(batch, answers.new_token_ids, strict=True):
            name = min(wanted, key=lambda each: found[each] / wanted[each])  # all fill up alike
            if len(answer) > 1 and found[name] < wanted[name]:
                parts[name].append(Text(tuple(prompt), tuple(answer)))
                found[name] += len(answer) - 1
        first += len(batch)
        if first >= len(rows) and len(rows) < _TRIES * writes:
            known = set(map(tuple, rows))
            more = write_prompts(model, len(batch), seed + 1000 * len(rows))
            rows = [*rows, *(row for row in more if tuple(row) not in known)]
        notify("writing calibration texts", min(sum(found.values()), total), total)
    return parts


def decoding_options(model: Model, sampling: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """How a search decodes: greedily or by `sampling`, without what looks at the tokens before a position.

    A checkpoint's own config may ask for a repetition penalty and the like, also when decoding is greedy. Replay, which
    takes all positions at once, cannot apply them; so texts are written, and plans measured, without them.

    Returns:
        Options of `Model.generate`, and those of the checkpoint's settings that they leave out.
    """
    options = {**dict.fromkeys(_LEFT_OUT), "do_sample": sampling is not None, **(sampling or {})}
    own: Any = model.check([0], max_new_tokens=2).settings
    left_out = {name: getattr(own, name) for name in _LEFT_OUT if getattr(own, name) and name not in (sampling or {})}
    return options, {name: value for name, value in left_out.items() if value != 1.0}


def make_sampler_of(model: Model, sampling: Mapping[str, Any]) -> Sampler:
    """What turns logits into the distribution that answers are drawn from, under these decoding settings.

    Raises:
        SettingError: settings that look at the tokens before a position, which replay does not have in order.
        LayerSkipError: settings that do not exist, or out of range.
    """
    options, _ = decoding_options(model, sampling)
    request = model.check([0], max_new_tokens=2, **options)
    processors = make_processors(request.settings, request.caller_processors, [1], str(model.decoder.device))
    sampler = Sampler(processors, do_sample=True)
    if not sampler.prefix_free:
        raise SettingError(
            f"got sampling={dict(sampling)!r}, some of which looks at the tokens before each position (a penalty, bad "
            "words); expected temperature, top_k, top_p, min_p, typical_p, epsilon_cutoff or eta_cutoff."
        )
    return sampler


def write_prompts(model: Model, count: int, seed: int = 0) -> list[list[int]]:
    """`count` different prompts that the model writes itself, as token ids; fewer if it repeats itself."""
    start, is_chat = _start_of_user_turn(model)
    prompts: dict[tuple[int, ...], None] = {}
    for attempt in range(_TRIES * -(-count // _ROWS)):
        starts = [start or [_first_token(model, seed + attempt, row)] for row in range(_ROWS)]
        longest = _LONGEST_QUESTION if is_chat else _LONGEST_START
        written = model.generate(starts, max_new_tokens=longest, seed=seed + attempt * _ROWS, **_FREE)
        for first, said in zip(starts, written.new_token_ids, strict=True):
            prompt = _as_chat(model, said) if is_chat else [*first, *said]
            if prompt:
                prompts[tuple(prompt)] = None
        if len(prompts) >= count:
            break
    return [list(each) for each in list(prompts)[:count]]


def given_ids(model: Model, prompts: Sequence[Any]) -> list[list[int]]:
    """A person's prompts as token ids.

    Raises:
        InputError: they are no list, or one of them is no prompt.
    """
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Sequence):
        raise InputError(
            f"got prompts of type {type(prompts).__name__}; expected a list of strings, chats or token ids."
        )
    rows = [row for prompt in prompts for row in encode(prompt, model.tokenizer)]
    vocab_size = model.decoder.vocab_size
    wrong = next((token for row in rows for token in row if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InputError(f"got token id {wrong} in a prompt; expected ids from 0 to {vocab_size - 1}.")
    return rows


def _given_rows(model: Model, prompts: Sequence[Any], seed: int) -> list[list[int]]:
    """The different prompts as token ids, in an order drawn by the seed; those too long to be answered are left out."""
    rows, most = given_ids(model, prompts), model.decoder.max_positions // 2
    # Each once: a prompt that is searched on must not be reported on too.
    different = [list(row) for row in dict.fromkeys(map(tuple, rows))]
    answerable = [row for row in different if len(row) <= most]
    if 0 < len(answerable) < len(different):
        warnings.warn(
            f"{len(different) - len(answerable)} of {len(different)} prompts are left out: they have more than {most} "
            "tokens, half of what the model has room for",
            stacklevel=2,
        )
    random.Random(seed).shuffle(answerable)
    return answerable


def _start_of_user_turn(model: Model) -> tuple[list[int], bool]:
    """What a text begins with, as token ids (none: nothing is known), and whether a chat's user speaks next."""
    tokenizer: Any = model.tokenizer
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": _MARK}]
        before, mark, _ = str(tokenizer.apply_chat_template(messages, tokenize=False)).partition(_MARK)
        if mark and before:
            return list(tokenizer(before, add_special_tokens=False)["input_ids"]), True
    bos = model.hf_config.bos_token_id if tokenizer is None else tokenizer.bos_token_id
    return ([] if bos is None else [int(bos)]), False


def _as_chat(model: Model, said: Sequence[int]) -> list[int]:
    """The prompt of a chat in which a user said this; empty if that was nothing."""
    tokenizer: Any = model.tokenizer
    text = tokenizer.decode(said, skip_special_tokens=True).strip()
    return encode([{"role": "user", "content": text}], tokenizer)[0] if text else []


def _first_token(model: Model, seed: int, row: int) -> int:
    """For a model that says nothing of how a text begins: any token."""
    generator = torch.Generator().manual_seed(1000 * seed + row)
    return int(torch.randint(model.decoder.vocab_size, (), generator=generator).item())
