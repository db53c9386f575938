"""Static rounds for a call: whether they can serve it, and those of an earlier call where that was alike.

Recording takes longer than many an answer, so what was recorded is kept, with the memory that it reads and writes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial

from layerskip.drafters.base import DraftContext
from layerskip.models.decoder import Decoder
from layerskip.recording import make_recorder
from layerskip.request import Request
from layerskip.state import DecodeState
from layerskip.static_rounds import StaticRounds

__all__ = ["Rounds", "StaticPool", "take_rounds"]

_CAPACITIES = 512  # cache capacities are multiples of it, so that calls of other lengths are alike
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


class StaticPool:
    """Static rounds that are kept while nobody uses them; one call at a time uses each."""

    def __init__(self, most: int = 2) -> None:
        """`most`: how many are kept."""
        self._most = most
        self._kept: list[tuple[Hashable, StaticRounds]] = []
        self._lock = threading.Lock()

    def take(self, key: Hashable) -> StaticRounds | None:
        """Those that were given back under `key`, if there are any."""
        with self._lock:
            found = next((index for index, (kept, _) in enumerate(self._kept) if kept == key), None)
            return None if found is None else self._kept.pop(found)[1]

    def give_back(self, key: Hashable, rounds: StaticRounds) -> None:
        """Keep `rounds` for a later call; the oldest that are kept make room."""
        with self._lock:
            self._kept = [*self._kept, (key, rounds)][-self._most :]


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


def take_rounds(decoder: Decoder, request: Request, context: DraftContext, capacity: int, pool: StaticPool) -> Rounds:
    """Static rounds where the call wants them and they can serve it.

    Raises:
        DecodingError: there is no memory for the cache.
    """
    is_wanted = decoder.device.type == "cuda" if request.cuda_graphs is None else request.cuda_graphs
    obstacle = _obstacle(decoder, request, context) if is_wanted else None
    if not is_wanted or obstacle is not None:
        return Rounds(None, "eager" if obstacle is None else f"eager: {obstacle}")
    capacity = -(-capacity // _CAPACITIES) * _CAPACITIES
    sampling = tuple(getattr(request.settings, name) for name in _SAMPLING)
    key = (len(request.prompts), capacity, sampling, request.acceptance_rule, request.plan)
    static = pool.take(key)
    if static is None:
        cache = decoder.new_cache(len(request.prompts), capacity)
        state = DecodeState(request.prompts, [0] * len(request.prompts), cache, decoder.device)
        static = StaticRounds(decoder, state, context, make_recorder(decoder.device))
    else:
        # The noise of what was recorded is read from the seeds that it was recorded with.
        static.context.rule.reseed(context.rule)
        static.context = replace(context, rule=static.context.rule)
    return Rounds(static, "static: CUDA graphs", partial(pool.give_back, key, static))


def _obstacle(decoder: Decoder, request: Request, context: DraftContext) -> str | None:
    """Why rounds of fixed shapes cannot serve a call; None: they can."""
    if not context.sampler.prefix_free:
        return "a logits processor looks at the tokens before each position, and only the host can call it"
    if request.pass_width is not None:
        return "pass_width has shapes of its own"
    if decoder.is_spread:
        return "the model is spread over several devices"
    return None
