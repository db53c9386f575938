"""Static rounds for a call: whether they can serve it, and those of an earlier call where that was alike.

Recording takes longer than many an answer, so what was recorded is kept, with the memory that it reads and writes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial

from transformers import EtaLogitsWarper

from layerskip.compiled import CompiledForward
from layerskip.drafters.base import DraftContext
from layerskip.errors import DecodingError, SettingError
from layerskip.memory import new_cache
from layerskip.models.adapter import TrainedPart
from layerskip.models.cache import KVCache
from layerskip.models.decoder import Decoder
from layerskip.recording import Direct, make_recorder
from layerskip.request import Request
from layerskip.state import DecodeState
from layerskip.static_rounds import TIERS, StaticRounds

__all__ = ["Rounds", "StaticPool", "take_rounds"]

_CAPACITIES = 512  # cache capacities are multiples of it, so that calls of other lengths are alike
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


class StaticPool:
    """Static rounds that are kept while nobody uses them; one call at a time uses each."""

    def __init__(self, most: int = 2) -> None:
        """`most`: how many are kept.

        Raises:
            SettingError: a number that is no integer from 0.
        """
        if type(most) is not int or most < 0:
            raise SettingError(f"got a pool for most={most!r} static rounds; expected an integer from 0.")
        self._most = most
        self._kept: list[tuple[Hashable, StaticRounds]] = []
        self._lock = threading.Lock()

    def take(self, key: Hashable, capacity: int) -> StaticRounds | None:
        """The smallest that were given back under `key` and hold `capacity` cache slots, if there are any."""
        with self._lock:
            alike = [each for each in self._kept if each[0] == key and each[1].state.cache.capacity >= capacity]
            if not alike:
                return None
            found = min(alike, key=lambda each: each[1].state.cache.capacity)
            self._kept = [each for each in self._kept if each is not found]
            return found[1]

    def give_back(self, key: Hashable, rounds: StaticRounds) -> None:
        """Keep `rounds` for a later call; the oldest that are kept make room."""
        with self._lock:
            kept = [*self._kept, (key, rounds)]
            self._kept = kept[max(0, len(kept) - self._most) :]

    def clear(self) -> None:
        """Let go of all that are kept."""
        with self._lock:
            self._kept = []


@dataclass(frozen=True)
class Rounds:
    """How a call's rounds are run.

    Attributes:
        static: None: pass by pass.
        execution: for the statistics.
        release: to be called when the call has ended.
    """

    static: StaticRounds | None
    execution: str
    release: Callable[[], None] = lambda: None


def take_rounds(
    decoder: Decoder,
    request: Request,
    context: DraftContext,
    capacity: int,
    pool: StaticPool,
    compiled: CompiledForward,
    adapter: TrainedPart | None = None,
) -> Rounds:
    """Static rounds where the call wants them and they can serve it.

    Args:
        adapter: trained blocks of the plan.

    Raises:
        DecodingError: there is no memory for the cache.
    """
    records = decoder.device.type == "cuda" if request.cuda_graphs is None else request.cuda_graphs
    compiles, uncompiled = request.compile, None
    if compiles:
        if compiled.refresh():
            pool.clear()
        uncompiled = _compiling_obstacle(decoder, compiled, len(request.prompts), adapter) or compiled.obstacle
        compiles = uncompiled is None
    obstacle = _obstacle(decoder, request, context) if records or compiles else uncompiled
    if obstacle is not None or not (records or compiles):
        return Rounds(None, "eager" if obstacle is None else f"eager: {obstacle}")
    most = request.plan.most_drafts if request.plan is not None else 0
    capacity = _doubled(capacity + most) if compiles else -(-capacity // _CAPACITIES) * _CAPACITIES
    sampling = tuple(getattr(request.settings, name) for name in _SAMPLING)
    own = tuple(request.caller_processors)  # by identity: what is recorded is what they computed
    plan = None if request.plan is None else replace(request.plan, provenance={}, target=None)
    # The adapter by identity, too: the file that the plan names may have been trained further.
    told = decoder.switches()
    key = (len(request.prompts), sampling, own, request.acceptance_rule, plan, adapter, told, compiles, records)
    static = pool.take(key, capacity)
    if static is None:
        cache = _new_cache(decoder, len(request.prompts), capacity, adapter, pool)
        state = DecodeState(request.prompts, [0] * len(request.prompts), cache, decoder.device)
        recorder = make_recorder(decoder.device) if records else Direct()
        static = StaticRounds(
            decoder,
            state,
            context,
            recorder,
            compiled=compiled if compiles else None,
            verified=tuple(sorted({0, most})) if compiles and compiled.most_tokens is None else TIERS,
        )
    else:
        # The noise of what was recorded is read from the seeds that it was recorded with.
        static.context.rule.reseed(context.rule)
        static.context = replace(context, rule=static.context.rule)
    execution = "static: " + ", ".join(["compiled"] * compiles + ["CUDA graphs"] * records)
    execution += "" if uncompiled is None else f", not compiled: {uncompiled}"
    return Rounds(static, execution, partial(pool.give_back, key, static))


def _doubled(capacity: int) -> int:
    """The least power of two times `_CAPACITIES` that holds `capacity`: few, because programs differ by it."""
    return _CAPACITIES << ((capacity - 1) // _CAPACITIES).bit_length()


def _new_cache(decoder: Decoder, batch: int, capacity: int, adapter: TrainedPart | None, pool: StaticPool) -> KVCache:
    """A cache, for which idle ones make room if need be."""
    try:
        return new_cache(decoder, batch, capacity, adapter)
    except DecodingError:
        pool.clear()
        return new_cache(decoder, batch, capacity, adapter)


def _obstacle(decoder: Decoder, request: Request, context: DraftContext) -> str | None:
    """Why rounds of fixed shapes cannot serve a call; None: they can."""
    if not context.sampler.prefix_free:
        return "a logits processor looks at the tokens before each position, and only the host can call it"
    if any(isinstance(each, EtaLogitsWarper) for row in context.sampler.processors for each in row):
        return "eta_cutoff asks the device for a value"
    if request.settings.output_scores or request.settings.output_logits:
        return "scores are asked for, which rounds of fixed shapes do not hand out"
    if request.plan is not None and request.plan.lookahead_window:
        return "lookahead verifies trees, which have no fixed shape"
    if request.pass_width is not None:
        return "pass_width has shapes of its own"
    if decoder.is_watched:
        return "modules of the model have hooks, which recorded rounds would not call"
    if decoder.is_spread:
        return "the model is spread over several devices"
    return None


def _compiling_obstacle(
    decoder: Decoder, compiled: CompiledForward, rows: int, adapter: TrainedPart | None
) -> str | None:
    """Why passes of `decoder` are not to be compiled; None: they may."""
    if adapter is not None:
        return "trained blocks and heads read states that compiled passes do not keep"
    if compiled.most_tokens is not None and rows > compiled.most_tokens:
        return f"on {decoder.device.type} a pass over {rows} rows is slower compiled"
    if decoder.is_watched:
        return "modules of the model have hooks, which compiled passes would not call"
    return None
