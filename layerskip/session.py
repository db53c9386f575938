"""A conversation: each call goes on from the text of the calls before it, and reads only what is new.

What a call returns is what `Model.generate` returns for the whole text; only the time is saved. That holds whatever
happens to the text, because the cache is known by the tokens that it holds: of the next prompt, the leading tokens that
are the same are not read again. So a chat template may write earlier turns differently (drop their reasoning, strip
spaces, put in the date), a text may be taken back, and a call may fail.

The cache grows as the text does, each time to twice its size, up to the model's positions.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from layerskip.chosen import Commit
from layerskip.decoding import check_stream, check_streamer, decode, make_result
from layerskip.engine import Engine
from layerskip.errors import DecodingError, InputError, LayerSkipError, SettingError
from layerskip.memory import Memory
from layerskip.reading import common_length
from layerskip.request import CallOptions, Request
from layerskip.result import GenerationResult
from layerskip.stream import Stream
from layerskip.text import encode, is_chat, is_ids

if TYPE_CHECKING:
    from layerskip.api import Model

__all__ = ["Session"]

Message = Mapping[str, Any]


@dataclass(frozen=True)
class _Turn:
    """A conversation as it stands.

    Attributes:
        token_ids: the whole text.
        messages: what it was rendered from, and the answer to it; none if it was given as token ids.
    """

    token_ids: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()

    def answered(self, new: Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> _Turn:
        """The same with the answer `new`."""
        messages = self.messages
        if messages and tokenizer is not None:
            said = str(tokenizer.decode(list(new), skip_special_tokens=True))
            messages = (*messages, {"role": "assistant", "content": said})
        return _Turn((*self.token_ids, *new), messages)


class Session:
    """A text that goes on from call to call, over a cache that is kept. One call at a time uses it.

    A session is of chat messages or of token ids, as its first call says. Of messages, all of them go through the chat
    template at every call, and each answer becomes a message of the assistant. Token ids are put behind the text as
    they are.

    `generate` and `read` are all or nothing: one that fails, or is interrupted, leaves the conversation as it was
    before. A stream that ends early, for whatever reason, leaves what it has committed until then.

    Calls may differ in plan and settings. Trained blocks follow the text from its beginning, so that the first call
    with a plan that has some (or others than the call before) reads it once more.
    """

    def __init__(
        self, model: Model, options: CallOptions, turns: Sequence[_Turn] = (_Turn(),), memory: Memory | None = None
    ) -> None:
        """Made by `Model.session` and `fork`."""
        self._model, self._options = model, options.copy()
        self._turns = list(turns)  # as it stood before the first question, behind the first answer, …
        self._memory = memory or Memory()
        self._busy: dict[str, object] = {}  # the call that it is in the middle of; changed at once, as dictionaries are

    @property
    def turns(self) -> int:
        """Number of answers."""
        return len(self._turns) - 1

    @property
    def token_ids(self) -> list[int]:
        """The whole text, answers included, as the model saw and said it."""
        return list(self._turns[-1].token_ids)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages, answers included; none in a session of token ids."""
        return [dict(deepcopy(each)) for each in self._turns[-1].messages]

    def generate(self, inputs: Any = None, *, streamer: Any = None, **options: Unpack[CallOptions]) -> GenerationResult:
        """Answer the next turn: `Model.generate` on the whole text.

        Args:
            inputs: what the user says (a string), chat messages, or token ids (list or tensor); None: nothing, the text
                goes on as it stands.
            streamer: see `Model.generate`.
            options: instead of the session's own.

        Raises:
            LayerSkipError: as in `Model.generate`; also where the text has outgrown the model, or the session is in the
                middle of another call.
        """
        check_streamer(streamer)
        with self._alone():
            turn = self._asked(inputs)
            request = self._request(turn, options)
            with self._engine(request) as engine:
                result = decode(request, engine, self._model.tokenizer, streamer)
            self._turns.append(turn.answered(result.new_token_ids[0], self._model.tokenizer))
        return result

    def stream(self, inputs: Any = None, **options: Unpack[CallOptions]) -> Stream:
        """Answer the next turn piece by piece; arguments and errors as in `generate`.

        The call begins when the stream is first read, and ends with it: until then no other may begin.
        """
        tokenizer = check_stream(options, self._model.tokenizer)
        with self._alone():
            turn = self._asked(inputs)
            request, before, engines = self._request(turn, options), self._turns[-1], list[Engine]()

        def commits() -> Generator[Commit, None, None]:
            with self._alone():
                if self._turns[-1] is not before:
                    raise InputError(
                        "got a stream of a session that has gone on since the stream was made; expected to read it "
                        "before the next call. Ask again: session.stream(…)."
                    )
                with self._engine(request) as engine:
                    engines.append(engine)
                    said: list[int] = []
                    try:
                        with closing(iter(engine)) as source:
                            for commit in source:
                                said.append(commit.token_id)
                                yield commit
                    finally:
                        if said:
                            self._turns.append(turn.answered(said, tokenizer))

        def result(committed: list[Commit]) -> GenerationResult:
            if not engines:
                raise InputError("got no result: the stream was closed before it was read.")
            return make_result(request, engines[0], tokenizer, committed)

        return Stream(commits(), tokenizer, result)

    def read(self, inputs: Any, **options: Unpack[CallOptions]) -> None:
        """Put `inputs` behind the text without an answer, and read it now; arguments and errors as in `generate`.

        Many conversations that begin alike can be forks of one that has read the beginning.
        """
        nothing: CallOptions = {
            "max_new_tokens": 1, "max_length": None, "min_new_tokens": None, "min_length": None, "seed": 0,
            "cuda_graphs": False, "compile": False,
        }  # fmt: skip
        with self._alone():
            turn = self._asked(inputs, is_question=False)
            if turn.token_ids:  # what a template says first may depend on what is still to come
                with self._engine(self._request(turn, {**options, **nothing})) as engine:
                    engine.read_only()
            self._turns[-1] = turn

    def fork(self) -> Session:
        """Another session that stands where this one does, and has read what this one has; they share nothing.

        It costs a copy of the cache as far as it is used, which takes a small part of the time of reading.

        Raises:
            DecodingError: there is no memory for the copy.
            InputError: the session is in the middle of a call.
        """
        with self._alone():
            return Session(self._model, self._options, self._turns, self._memory.copied())

    def rewind(self, to: int) -> None:
        """Go back to the text as it stood behind the first `to` answers; 0: as it was before the first question.

        What was read stays in the cache as far as the next call says the same.

        Raises:
            InputError: there are not so many answers, or the session is in the middle of a call.
        """
        with self._alone():
            if type(to) is not int or not 0 <= to <= self.turns:
                raise InputError(
                    f"got rewind({to!r}) in a session of {self.turns} answers; expected 0 to {self.turns}."
                )
            self._turns = self._turns[: to + 1]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        call = object()
        try:
            # At once, and it says whose it is: an interrupt just behind must not leave it taken for ever.
            if self._busy.setdefault("call", call) is not call:
                raise InputError(
                    "got a call on a session that is in the middle of another; expected one at a time. Wait for the "
                    "other thread, read the stream to its end or close it, or fork() the session before."
                )
            yield
        finally:
            if self._busy.get("call") is call:
                del self._busy["call"]

    @contextmanager
    def _engine(self, request: Request) -> Iterator[Engine]:
        """An engine over the session's memory, which is the engine's meanwhile."""
        memory, self._memory = self._memory, Memory()  # where even the way back fails, all is read again
        try:
            engine = self._model.engine(request, memory)
        except LayerSkipError as error:
            if not isinstance(error, DecodingError):  # out of memory, perhaps in the middle of growing
                self._memory = memory.settled(is_whole=True)
            raise
        is_whole = False
        try:
            yield engine
            is_whole = True
        finally:
            self._memory = engine.memory.settled(is_whole)

    def _asked(self, inputs: Any, is_question: bool = True) -> _Turn:
        """The text that is to be answered, or only to be read."""
        last = self._turns[-1]
        inputs = [{"role": "user", "content": inputs}] if isinstance(inputs, str) else inputs
        is_of_messages = bool(last.messages) if inputs is None else is_chat(inputs)
        if last != _Turn() and is_of_messages != bool(last.messages):
            got, begun = ("messages", "token ids") if is_of_messages else ("token ids", "messages")
            raise InputError(f"got {got} in a session of {begun}; expected {begun}, or another session.")
        if is_of_messages:
            messages = (*last.messages, *deepcopy(list(inputs or ())))
            if is_question and messages[-1]["role"] == "assistant":
                raise InputError("got nothing new to answer; expected a message that is not the assistant's.")
            return _Turn(tuple(self._rendered(messages, is_question)), messages)
        if inputs is not None and not (isinstance(inputs, Tensor) or is_ids(inputs)):
            raise InputError(
                f"got {type(inputs).__name__} in a session; expected a string (what the user says), chat messages "
                "([{'role': …, 'content': …}]), or token ids (list of ints, or a tensor of one row)."
            )
        rows = [[]] if inputs is None else encode(inputs, None)
        if len(rows) != 1:
            raise InputError(f"got {len(rows)} rows in a session; expected one. Use a session for each: fork().")
        return _Turn((*last.token_ids, *rows[0]))

    def _rendered(self, messages: Sequence[Message], is_question: bool) -> list[int]:
        """Token ids of `messages`; if they are only to be read, as far as no next message of the user changes them."""
        tokenizer = self._model.tokenizer
        if tokenizer is not None and not getattr(tokenizer, "chat_template", None):
            raise InputError(
                "got text in a session of a model whose tokenizer has no chat template; expected token ids, "
                "such as tokenizer(text)['input_ids']. Or set tokenizer.chat_template."
            )
        if is_question or messages[-1]["role"] == "user":
            try:
                return encode(messages, tokenizer)[0]
            except InputError as error:
                raise InputError(
                    f"{error} In a session: have what was read answered by generate(None) before the next question, or "
                    "read it as a message of another role, such as [{'role': 'system', 'content': …}]."
                ) from error
        first, second = (encode([*messages, {"role": "user", "content": each}], tokenizer)[0] for each in "ab")
        return first[: common_length(first, second)]

    def _request(self, turn: _Turn, options: CallOptions) -> Request:
        given: Any = {**self._options, **options}
        for name in ("input_ids", "attention_mask"):
            if given.get(name) is not None:
                raise InputError(f"got {name} in a session, which has a text of its own; pass what is new, without it.")
        positions, length = self._model.decoder.max_positions, len(turn.token_ids)
        if length >= positions:
            raise InputError(
                f"got a session of {length:,} tokens with this turn, on a model of {positions:,} positions, which "
                "leaves no room for an answer; rewind() it, or begin another that leaves something out."
            )
        request = self._model.check(list(turn.token_ids), **given)
        if len(request.prompts) > 1:
            raise SettingError(
                f"got num_return_sequences={len(request.prompts)} in a session; expected 1. "
                "Use a session for each answer: fork()."
            )
        return request
