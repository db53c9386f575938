"""Passes that are compiled: `torch.compile`'s inductor makes one program of each shape of pass.

Compiling takes a minute or two where a pass takes milliseconds, and each program holds a copy of the weights that it
reads, laid out for it. So a model's programs serve all its calls, whatever their prompts, plans and settings. What is
compiled is tried against the pass that it came from, and whatever goes wrong is no error: the pass is run as it is.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerskip.models.cache import KVCache
from layerskip.models.decoder import Decoder, Head, Step
from layerskip.models.graph import trace

__all__ = ["OPTIONS", "CompiledForward"]

OPTIONS: dict[str, Mapping[str, Any]] = {
    # Only with products made to measure is a CPU faster than with packed weights; for them weights must be constants.
    "cpu": {
        "freezing": True,
        "freezing_discard_parameters": True,  # of the graph's own, once they are laid out anew
        "max_autotune": True,
        "autotune_num_choices_displayed": 0,
    },
    "cuda": {"max_autotune": True, "autotune_num_choices_displayed": 0},
}
"""Inductor's settings by the kind of device."""

MOST_TOKENS = {"cpu": 1}
"""Tokens, over all rows, of the passes that are worth compiling, where there is a limit. On a CPU a compiled pass over
one token takes 0.6 of the time with packed weights, and one over four tokens six times as long."""


class _Program(NamedTuple):
    run: Callable[..., Any]
    head: Head | None  # held, because programs are found by its identity


class CompiledForward:
    """`Decoder.forward`, compiled for every shape, path and head that it is asked for, at the first time.

    Attributes:
        obstacle: why something could not be compiled, after which nothing else is; None: everything could.
        count: programs compiled.
        seconds: that this took.
        most: programs that are kept; beyond, the oldest go.
        most_tokens: passes over more tokens, all rows together, are run as they are; None: none are.
    """

    def __init__(
        self, decoder: Decoder, options: Mapping[str, Any] | None = None, most_tokens: int | None = None
    ) -> None:
        """For passes of `decoder`.

        Args:
            options: of inductor; None: those of `OPTIONS` for the decoder's device.
            most_tokens: see the class; None: as in `MOST_TOKENS`.
        """
        self.obstacle: str | None = None
        self.most = 8
        self.most_tokens = MOST_TOKENS.get(decoder.device.type) if most_tokens is None else most_tokens
        self.count = 0
        self.seconds = 0.0
        self._decoder = decoder
        self._options = dict(OPTIONS.get(decoder.device.type, {}) if options is None else options)
        self._programs: dict[Hashable, _Program] = {}
        self._weights: Hashable = None
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Let go of all programs and their memory, and of the obstacle."""
        with self._lock:
            self._programs, self.obstacle = {}, None

    def refresh(self) -> bool:
        """Let go of programs whose weights were written to since; for the start of a call.

        Returns:
            Whether there were any: what was recorded with them is void too.
        """
        weights, had_any = self._decoder.weights_state(), bool(self._programs)
        if weights == self._weights:
            return False
        self.clear()
        self._weights = weights
        return had_any

    def __call__(
        self,
        token_ids: Tensor,
        starts: Tensor,
        visible: int,
        cache: KVCache,
        path: Sequence[Step] | None = None,
        head: Head | None = None,
    ) -> Tensor:
        """See `Decoder.forward`."""
        path = self._decoder.full_path if path is None else tuple(path)
        if self.most_tokens is not None and token_ids.numel() > self.most_tokens:
            return self._decoder.forward(token_ids, starts, visible, cache, path, head)
        of_head = None if head is None else (id(head.linears), id(head.vocabulary))
        key = (path, of_head, tuple(token_ids.shape), visible, cache.capacity)
        program = self._programs.get(key)
        if program is None and self.obstacle is None:
            with self._lock:
                program = self._programs.get(key)
                if program is None:
                    program = self._compile(key, token_ids, starts, visible, cache, path, head)
        if program is None:
            return self._decoder.forward(token_ids, starts, visible, cache, path, head)
        (logits,) = program.run(token_ids, starts, *cache.entries)
        return logits  # type: ignore[no-any-return]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _compile(
        self,
        key: Hashable,
        token_ids: Tensor,
        starts: Tensor,
        visible: int,
        cache: KVCache,
        path: Sequence[Step],
        head: Head | None,
    ) -> _Program | None:
        """Compile and keep; None: it failed, see `obstacle`. The pass is run for it, and leaves in the cache what it is
        to leave there.
        """
        began = time.perf_counter()
        token_ids, starts = token_ids.clone(), starts.clone()  # ordinary tensors, outside of inference mode
        try:
            from torch._inductor import compile  # here, because few calls ask for it

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, about itself
                graph, inputs = trace(self._decoder, token_ids, starts, visible, cache, path, head)
                run = compile(graph, [*inputs], options=self._options)
                (got,) = run(*inputs)
        except Exception as error:  # whatever a compiler raises, decoding goes on
            self.obstacle = f"compiling failed: {_first_line(error)}"
            return None
        finally:
            self.seconds += time.perf_counter() - began
        if not _agree(self._decoder.forward(token_ids, starts, visible, cache, path, head), got):
            self.obstacle = "compiling failed: what was compiled computes something else"
            return None
        self.count += 1
        while len(self._programs) >= self.most:  # each holds a copy of the weights that it reads
            del self._programs[next(iter(self._programs))]
        self._programs[key] = _Program(run, head)
        return self._programs[key]


def _agree(expected: Tensor, got: Tensor) -> bool:
    """Whether logits differ by no more than half of their digits: sums are taken in another order.

    Half of float32's at most, in which some modules of float64 models compute too.
    """
    tolerance = max(torch.finfo(expected.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5 * expected.abs().max()
    return bool((expected.double() - got.double()).abs().max() <= tolerance)  # not of NaN


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
