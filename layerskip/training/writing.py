"""A model writes the texts that it is to be trained on, packed into rows of one length.

An instruct model writes both sides of a chat: what a user would ask, then its answer. A base model goes on from its
first token. Nothing here knows what is trained on them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from transformers import GenerationConfig

from layerskip.api import Model
from layerskip.errors import CheckpointError, InputError, SettingError
from layerskip.settings import NAMES, resolve_settings
from layerskip.text import encode
from layerskip.training.folder import folder_path, held_folder, writing
from layerskip.training.texts import TrainingTexts

__all__ = ["WritingSettings", "ends_of", "write_texts"]

_Ids = list[int]
_Around = tuple[_Ids, _Ids]

_CACHE = "texts.jsonl"
_LONGEST_QUESTION = 96
_LONGEST_START = 32  # of a base model's text: drawn, so that no two greedy texts are the same
_KEY_TOKENS = 32  # texts that begin with the same are the same text
_SCHEDULE = 2  # of given prompts, by which texts of an older one are not gone on with
_FRUITLESS = 4  # batches without a new text, after which there will be none
_MESSAGES = ("A", "z")  # alike neither at their beginning nor at their end
_DRAWN: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 64}


@dataclass(frozen=True)
class WritingSettings:
    """What is written.

    Attributes:
        tokens: in all rows together, at least.
        row_tokens: of a row; no text is longer.
        batch_rows: texts that are written at once.
        temperatures: of the answers, one batch after another.
        greedy_share: of the batches, whose answers are greedy; what users say is always drawn, and of given prompts
            each is answered greedily once.
        seed: of everything that is drawn.
    """

    tokens: int
    row_tokens: int = 512
    batch_rows: int = 32
    temperatures: tuple[float, ...] = (0.7, 1.0)
    greedy_share: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        """Check (SettingError)."""
        for name, least in {"tokens": 1, "row_tokens": 4, "batch_rows": 1, "seed": 0}.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise SettingError(f"got {name}={value!r}; expected an integer from {least}.")
        hot = self.temperatures if isinstance(self.temperatures, tuple) else ()
        if not hot or not all(type(each) in (int, float) and 0 < each < math.inf for each in hot):
            raise SettingError(f"got temperatures={self.temperatures!r}; expected a tuple of numbers above 0.")
        if type(self.greedy_share) not in (int, float) or not 0 <= self.greedy_share <= 1:
            raise SettingError(f"got greedy_share={self.greedy_share!r}; expected a number from 0 to 1.")


def write_texts(
    model: Model,
    settings: WritingSettings,
    folder: str | os.PathLike[str],
    prompts: Sequence[Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TrainingTexts:
    """Let `model` write texts until there are as many as asked for.

    They are kept in `folder` batch by batch, so that a run that was interrupted, or is asked for more, goes on where it
    ended and gives the rows that it would have given without.

    Args:
        prompts: strings (tokenised as they are), chats or token ids; the model only answers them, in turns until there
            is enough. None: it writes both sides, and no text twice.
        progress: is told after each batch how many tokens are there, and how many there will be.

    Raises:
        SettingError: the folder holds texts of another model or other settings, or rows are too short or too long.
        InputError: no prompts, or one that cannot be answered within a row; the model writes nothing new.
        CheckpointError: no file can be made in the folder.
    """
    if not isinstance(model, Model):
        raise InputError(f"got a model of type {type(model).__name__}; expected what layerskip.load or wrap returned.")
    if not isinstance(settings, WritingSettings):
        raise SettingError(f"got settings of type {type(settings).__name__}; expected WritingSettings.")
    place = folder_path(folder)
    if settings.row_tokens > (most := model.decoder.max_positions):
        raise SettingError(f"got row_tokens={settings.row_tokens}; expected at most the model's {most:,} positions.")
    given = None if prompts is None else _given_ids(model, prompts, settings.row_tokens)
    made_for = {
        **{name: value for name, value in asdict(settings).items() if name != "tokens"},
        "model": asdict(model.identity),
        "chat_template": _digest(getattr(model.tokenizer, "chat_template", None)),
        "prompts": None if given is None else _digest([_SCHEDULE, given]),
    }
    author = _Author(model, settings, given)
    with held_folder(place) as held:
        cache = _Cache(held / _CACHE, made_for, author.around, model.decoder.vocab_size)
        author.around = cache.around
        return _packed(cache, author, settings, progress)


def _packed(
    cache: _Cache, author: _Author, settings: WritingSettings, progress: Callable[[int, int], None] | None
) -> TrainingTexts:
    """The texts of `cache`, and as many more of `author` as it takes, in rows."""
    total = -(-settings.tokens // settings.row_tokens) * settings.row_tokens
    tokens, is_own, fruitless = array("i"), bytearray(), 0
    known: set[tuple[int, ...] | None] = {()}
    for texts in _batches(cache, author, settings.batch_rows):
        before = len(tokens)
        for text in texts:
            key = author.key(text)
            if key not in known:
                known |= {key} - {None}
                fits = text.tokens[: settings.row_tokens - len(tokens) % settings.row_tokens]
                tokens.extend(fits)
                is_own.extend(index >= text.answer_from for index in range(len(fits)))
        fruitless = 0 if len(tokens) > before else fruitless + 1
        if progress is not None:
            progress(min(len(tokens), total), total)
        if len(tokens) >= total:
            break
        if fruitless == _FRUITLESS:
            raise InputError(f"got nothing new from the model in {fruitless} batches. Give prompts, or ask for less.")
    rows, own = np.array(tokens[:total], dtype=np.int32), np.array(is_own[:total], dtype=np.bool_)
    return TrainingTexts(rows.reshape(-1, settings.row_tokens), own.reshape(-1, settings.row_tokens))


@dataclass
class _Text:
    """Token ids, the first of them that is the model's own, and whether it is to be gone on with."""

    tokens: list[int]
    answer_from: int
    is_open: bool = False


def _batches(cache: _Cache, author: _Author, batch_rows: int) -> Iterator[list[_Text]]:
    held = 0
    for held, texts in enumerate(cache.read(batch_rows), start=1):  # noqa: B007 - it counts on below
        yield texts
    for batch in count(held):
        texts = author.write(batch)
        cache.append(texts)
        yield texts


class _Author:
    """Writes the batches of texts; each depends on the settings and its number only.

    Attributes:
        around: see `_around_user`.
    """

    def __init__(self, model: Model, settings: WritingSettings, prompts: list[_Ids] | None) -> None:
        self._model, self._settings, self._prompts, self._ends = model, settings, prompts, ends_of(model)
        self.around: _Around = ([], []) if prompts is not None else _around_user(model)
        most, vocab_size = max(map(max, filter(None, self.around)), default=0), model.decoder.vocab_size
        if most >= vocab_size:
            raise InputError(
                f"got a tokenizer that writes token id {most}; expected at most the model's {vocab_size - 1}. Load the "
                "tokenizer that belongs to the model."
            )
        room = settings.row_tokens - sum(map(len, self.around))
        if room < 3:
            raise SettingError(f"got row_tokens={settings.row_tokens}; expected {3 - room} more, for the template.")
        self._longest = min((room - 1) // 2, _LONGEST_QUESTION if self.around[1] else _LONGEST_START)

    def write(self, batch: int) -> list[_Text]:
        """As many as a batch has; without tokens where the user said nothing, or no prompt is left."""
        seeds = np.random.SeedSequence((self._settings.seed, batch)).generate_state(2).tolist()
        texts = self._begun(batch, seeds[0])
        if asked := [text for text in texts if text.is_open]:
            longest = self._settings.row_tokens - min(len(text.tokens) for text in asked)
            answers = self._generate(asked, longest, seeds[1], self._decoding(batch))
            for text, answer in zip(asked, answers, strict=True):
                text.tokens = (text.tokens + answer)[: self._settings.row_tokens]
        return texts

    def key(self, text: _Text) -> tuple[int, ...] | None:
        """By which a text is known; () if it has no tokens, None if any may come twice."""
        if self._prompts is not None:
            return None
        start, end = self.around
        said = text.tokens[len(start) : text.answer_from - len(end)] if end else text.tokens[text.answer_from :]
        return tuple(said[:_KEY_TOKENS])

    def _begun(self, batch: int, seed: int) -> list[_Text]:
        """What stands before the answers: a given prompt, a chat up to the answer, or a base text's first tokens."""
        rows = self._settings.batch_rows
        if self._prompts is not None:
            return self._asked(batch)
        start, end = self.around
        drawn = torch.Generator().manual_seed(seed)
        firsts = torch.randint(self._model.decoder.vocab_size, (rows,), generator=drawn).tolist()
        texts = [_Text(start or [first], len(start) or 1) for first in firsts]
        ends = {*self._ends, *end[:1]}  # a template's user may end by a token that no answer ends by
        options = {**_DRAWN, "eos_token_id": sorted(ends)}
        for text, said in zip(texts, self._generate(texts, self._longest, seed, options), strict=True):
            has_ended = said[-1] in ends
            if end:
                said = said[:-1] if has_ended else said
                text.tokens = [*start, *said, *end] if said else []
                text.answer_from, text.is_open = len(text.tokens), bool(said)
            else:
                text.tokens, text.is_open = text.tokens + said, not has_ended
        return texts

    def _asked(self, batch: int) -> list[_Text]:
        """The prompts of a batch: greedy ones answer each once, the others go through them again and again."""
        assert self._prompts is not None
        rows, number = self._settings.batch_rows, self._number_of_greedy(batch)
        first = rows * (self._drawn_before(batch) if number is None else number)
        prompts = [self._prompts[each % len(self._prompts)] for each in range(first, first + rows)]
        if number is not None:  # an answer that was given already would be the same, token by token
            prompts[len(self._prompts) - first :] = []
        texts = [_Text(prompt, len(prompt), is_open=True) for prompt in prompts]
        return texts + [_Text([], 0) for _ in range(rows - len(texts))]

    def _greedy_before(self, batch: int) -> int:
        """How many batches before it are greedy: spread evenly; of given prompts as many as answer each once."""
        asked = int(batch * self._settings.greedy_share + 0.5)
        return asked if self._prompts is None else min(asked, -(-len(self._prompts) // self._settings.batch_rows))

    def _drawn_before(self, batch: int) -> int:
        return batch - self._greedy_before(batch)

    def _number_of_greedy(self, batch: int) -> int | None:
        """Which of the greedy batches it is; None: it is none."""
        number = self._greedy_before(batch)
        return number if number < self._greedy_before(batch + 1) else None

    def _generate(self, texts: list[_Text], longest: int, seed: int, options: dict[str, Any]) -> list[_Ids]:
        given = {**_left_out(), **options, "max_new_tokens": longest, "seed": seed}
        return self._model.generate([text.tokens for text in texts], **given).new_token_ids

    def _decoding(self, batch: int) -> dict[str, Any]:
        """How this batch is answered: greedily, or drawn, at the temperatures in turn."""
        if self._number_of_greedy(batch) is not None:
            return {"do_sample": False}
        temperatures, turn = self._settings.temperatures, self._drawn_before(batch)
        if self._prompts is not None:  # each time that they are gone through, each prompt has another
            turn += turn * self._settings.batch_rows // len(self._prompts)
        return {**_DRAWN, "temperature": temperatures[turn % len(temperatures)]}


def _digest(content: Any) -> str | None:
    return None if content is None else hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def ends_of(model: Model) -> tuple[int, ...]:
    """The ids that end what `model` says, by its own generation config, of which nothing else is read."""
    config: Any = model.hf_model.generation_config
    given = {"eos_token_id": getattr(config, "eos_token_id", None), "max_new_tokens": 1}
    return resolve_settings(None, None, given).eos_token_id


def _left_out() -> dict[str, Any]:
    """Every setting of a checkpoint's own config but what ends a text, as None; and a plan.

    Draft paths are trained towards what the model says without penalties and other ways to search; with a clock, or a
    plan, whose governor looks at clocks, no text would be written twice the same.
    """
    names = {name for name in (*GenerationConfig().to_dict(), *NAMES, "plan") if not name.startswith("_")}
    return dict.fromkeys(names - {"eos_token_id", "prefill_chunk_size"})


def _given_ids(model: Model, prompts: Sequence[Any], row_tokens: int) -> list[_Ids]:
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Sequence) or not prompts:
        raise InputError(f"got {prompts!r:.60} as prompts; expected a list of strings, chats or lists of token ids.")
    rows = [row for prompt in prompts for row in encode(prompt, model.tokenizer)]
    options: Any = _left_out() | {"max_new_tokens": 1, "seed": 0}
    model.check(rows, **options)
    if (longest := max(map(len, rows))) >= row_tokens:
        raise InputError(f"got a prompt of {longest} tokens for rows of {row_tokens}; expected room for an answer.")
    return rows


def _around_user(model: Model) -> _Around:
    """What stands before and behind what a user says; of a base model: a text's first token if known, and nothing."""
    tokenizer: Any = model.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        first = model.hf_config.bos_token_id if tokenizer is None else tokenizer.bos_token_id
        return list(ends_of(model)[:1] if first is None else [int(first)]), []
    one, other = (encode([{"role": "user", "content": said}], tokenizer)[0] for said in _MESSAGES)
    start = list(os.path.commonprefix([one, other]))
    end = list(os.path.commonprefix([one[len(start) :][::-1], other[len(start) :][::-1]]))[::-1]
    if not start or not end:
        raise InputError("got a chat template that does not show where a user's turn begins and ends. Give prompts.")
    return start, end


class _Cache:
    """A file of texts, one a line, below a line that says what they were made for.

    Attributes:
        around: see `_around_user`; as it was when the first text was written, because a template may hold the date.
    """

    def __init__(self, file: Path, made_for: Mapping[str, Any], around: _Around, vocab_size: int) -> None:
        self._file, self._vocab_size = file, vocab_size
        first = json.dumps({**made_for, "around": around}).encode() + b"\n"
        with writing(file), file.open("a+b") as stream:
            stream.seek(0)
            held = stream.readline()
            if first.startswith(held):  # the same, a beginning of it that was torn, or nothing
                stream.write(first[len(held) :])
                held = first
        now, before = json.loads(first), _parsed(held)
        if not isinstance(before, dict) or before.keys() != now.keys() or not self._are_two(before["around"]):
            raise SettingError(f"got {file}, which holds other things than texts; expected none. Name another folder.")
        for name in made_for:
            if before[name] != now[name]:
                what = f"got {name}={now[name]!r} for texts that were begun with {before[name]!r}"
                raise SettingError(f"{what} ({file}). Go on as they were begun, or name another folder.")
        self.around: _Around = before["around"]

    def read(self, batch_rows: int) -> Iterator[list[_Text]]:
        """The whole batches; what stands behind them, of a run that was killed, is cut off."""
        with writing(self._file), self._file.open("rb") as lines:
            lines.readline()
            whole, batch = lines.tell(), list[_Text]()
            while isinstance(content := _parsed(lines.readline()), dict):
                tokens, answer_from = content.get("tokens"), content.get("answer_from")
                if not self._are_ids(tokens) or type(answer_from) is not int or not 0 <= answer_from <= len(tokens):
                    raise CheckpointError(
                        f"got {content!r:.60} as a text in {self._file}; expected token ids of this model's, and where "
                        "its answer begins. Remove the file, or name another folder: texts are then written anew."
                    )
                batch.append(_Text(tokens, answer_from))
                if len(batch) == batch_rows:
                    yield batch
                    whole, batch = lines.tell(), []
        with writing(self._file):
            os.truncate(self._file, whole)

    def append(self, texts: Sequence[_Text]) -> None:
        """One batch."""
        lines = [json.dumps({"tokens": text.tokens, "answer_from": text.answer_from}) + "\n" for text in texts]
        with writing(self._file), self._file.open("a", encoding="ascii") as stream:
            stream.write("".join(lines))

    def _are_two(self, around: Any) -> bool:
        return isinstance(around, list) and len(around) == 2 and all(map(self._are_ids, around))

    def _are_ids(self, ids: Any) -> TypeGuard[_Ids]:
        return isinstance(ids, list) and all(type(each) is int and 0 <= each < self._vocab_size for each in ids)


def _parsed(line: bytes) -> Any:
    """None: the file has ended, or the line was not written to its end."""
    try:
        return json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
