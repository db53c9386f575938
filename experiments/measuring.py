"""What passes, drafts and memory cost on this machine: timers that know nothing of prompts, arms or reports.

All times are medians of interleaved repetitions, taken by marks in the device's stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from resource import getpagesize
from statistics import median
from typing import Any

import torch

from layerskip.models.adapter import Adapter, TrainedPart
from layerskip.models.decoder import Decoder, Head, Step
from layerskip.models.heads import Heads
from layerskip.recording import CudaGraphs, Recorder
from layerskip.static_rounds import SLOTS
from layerskip.timing import Stopwatch

__all__ = [
    "PeakMemory",
    "available_bytes",
    "draft_costs",
    "interleaved",
    "machine_bandwidth",
    "pass_costs",
    "pass_grid",
    "resident_bytes",
    "watched_memory",
]

WIDTHS = (1, 2, 3, 4, 6, 8)
CONTEXT = 200  # committed tokens behind which passes are timed
REPEATS = 40
DRAFT_IDS = 8192  # of the draft vocabulary whose step is timed

_WARM_UP = 3


def interleaved(device: torch.device, programs: Mapping[Any, Callable[[], object]], repeats: int) -> dict[Any, float]:
    """Median seconds of each program, run in turn; a slow moment of the machine falls on all of them."""
    seconds: dict[Any, list[float]] = {name: [] for name in programs}
    for repeat in range(_WARM_UP + repeats):
        for name, program in programs.items():
            watch = Stopwatch(device)
            program()
            (lap,) = watch.laps()
            if repeat >= _WARM_UP:
                seconds[name].append(lap)
    return {name: median(laps) for name, laps in seconds.items()}


class _Passes:
    """Passes at one place of a cache: `context` committed tokens of random ids in every row."""

    def __init__(
        self,
        decoder: Decoder,
        batch: int,
        recorded: bool,
        adapter: TrainedPart | None = None,
        context: int = CONTEXT,
        widest: int = max(WIDTHS),
    ) -> None:
        self.decoder, self.batch, self.adapter = decoder, batch, adapter
        self.context = min(context, decoder.max_positions - widest)
        self.slots = SLOTS
        while self.slots < self.context + widest:
            self.slots *= 2
        needs = (0, ()) if adapter is None else (adapter.spec.num_blocks, adapter.kept_states)
        self.cache = decoder.new_cache(batch, self.slots, *needs)
        self.recorder: Recorder | None = CudaGraphs(decoder.device) if recorded else None
        self.starts = torch.full((batch,), self.context, device=decoder.device)
        span = decoder.span([0] * batch, self.context)
        decoder.run(decoder.embed(self._ids(self.context)), decoder.full_path, self.cache, span)
        self._commit()

    def program(
        self, key: Hashable, width: int, path: Sequence[Step] | None = None, head: Head | None = None
    ) -> Callable[[], object]:
        """One pass over `width` tokens, its logits and choices; then the cache is as it was.

        Args:
            path, head: of a draft; None: the full model's.
        """
        ids, decoder, recorder = self._ids(width), self.decoder, self.recorder

        def run(starts: Sequence[int] | torch.Tensor, visible: int | None) -> tuple[torch.Tensor]:
            span = decoder.span(starts, width, visible)
            exact = decoder.num_blocks if path is None else 0
            taken = decoder.full_path if path is None else path
            hidden, norm = decoder.run(decoder.embed(ids), taken, self.cache, span, exact), None
            if path is not None and isinstance(self.adapter, Heads):
                hidden, norm = self.adapter.run(decoder.final_norm(hidden)).flatten(1, 2), self.adapter.final_norm
            elif path is not None and isinstance(self.adapter, Adapter):
                hidden, norm = self.adapter.run(hidden, hidden, self.cache, span), self.adapter.final_norm
            return (decoder.logits(hidden, head, norm).max(dim=-1).indices,)  # as the greedy rule chooses

        def timed() -> None:
            if recorder is not None:  # with positions that only the device knows the cache keeps no books
                (chosen,) = recorder(key, lambda: run(self.starts, self.slots))
                chosen.tolist()
            else:
                run([self.context] * self.batch, None)[0].tolist()
                self._commit()

        return timed

    def _ids(self, count: int) -> torch.Tensor:
        ids = torch.randint(
            self.decoder.vocab_size, (self.batch, count), generator=torch.Generator().manual_seed(count)
        )
        return ids.to(self.decoder.device)

    def _commit(self) -> None:
        self.cache.commit([self.context] * self.batch)


@torch.inference_mode()
def pass_costs(decoder: Decoder, batch: int = 1, *, recorded: bool = False, repeats: int = REPEATS) -> dict[str, Any]:
    """Seconds of a pass of the full model by its width, and in passes over one token.

    Args:
        recorded: start CUDA graphs, as static rounds do; else pass by pass.
    """
    passes = _Passes(decoder, batch, recorded)
    programs = {width: passes.program(("verify", width), width) for width in WIDTHS}
    seconds = interleaved(decoder.device, programs, repeats)
    return {
        "context": passes.context,
        "batch": batch,
        "execution": _execution(passes),
        "pass_s": seconds,
        "in_plain_steps": {width: lap / seconds[1] for width, lap in seconds.items()},
    }


@torch.inference_mode()
def pass_grid(
    decoder: Decoder,
    batches: Sequence[int],
    widths: Sequence[int],
    contexts: Sequence[int],
    *,
    recorded: bool = False,
    repeats: int = REPEATS,
) -> dict[tuple[int, int, int], float]:
    """Seconds of a pass of the full model by (batch, width, context), all in turn.

    So that what the machine does meanwhile falls on all of them; hence the caches of all are held at once.
    """
    programs = {}
    for context in contexts:
        for batch in batches:
            passes = _Passes(decoder, batch, recorded, context=context, widest=max(widths))
            for width in widths:
                programs[batch, width, context] = passes.program((batch, width, context), width)
    return interleaved(decoder.device, programs, repeats)


@torch.inference_mode()
def draft_costs(
    decoder: Decoder,
    path: Sequence[Step],
    batch: int = 1,
    *,
    adapter: TrainedPart | None = None,
    recorded: bool = False,
    repeats: int = REPEATS,
) -> dict[str, Any]:
    """A draft step along `path` in plain steps, with the whole head and with one over the lowest `DRAFT_IDS` ids.

    Args:
        adapter: trained blocks that run behind the path, or heads, of which one step drafts for all.
    """
    passes, ids = _Passes(decoder, batch, recorded, adapter), min(DRAFT_IDS, decoder.vocab_size)
    programs = {
        "plain": passes.program("plain", 1),
        "draft": passes.program("draft", 1, path),
        "draft_vocabulary": passes.program("few", 1, path, decoder.partial_head(tuple(range(ids)))),
    }
    seconds = interleaved(decoder.device, programs, repeats)
    return {
        "sub_blocks": sum(step.attention + step.mlp for step in path),
        "draft_ids": ids,
        "execution": _execution(passes),
        "step_s": seconds,
        "in_plain_steps": {name: lap / seconds["plain"] for name, lap in seconds.items()},
    }


def _execution(passes: _Passes) -> str:
    if passes.recorder is None:
        return "eager"
    return passes.recorder.obstacle or "CUDA graphs"


def machine_bandwidth(device: torch.device) -> dict[str, Any]:
    """Bytes per second at which this machine reads memory: the fastest of several sums over one large tensor."""
    megabytes = 1024 if device.type == "cuda" else 256  # beyond every cache
    values = torch.ones(megabytes * 2**20 // 8, dtype=torch.int64, device=device)
    best: tuple[float, str] = (0.0, "")
    reads: dict[str, Callable[[], object]] = {"amax": lambda: values.amax(), "sum": lambda: values.sum()}
    for name, read in reads.items():
        for _ in range(6):
            watch = Stopwatch(device)
            read()
            (lap,) = watch.laps()
            best = max(best, (values.nbytes / lap, name))
    return {
        "bytes_per_s": best[0],
        "how": f"best of 6 times {best[1]}() of {megabytes} MiB of int64, {torch.get_num_threads()} threads",
    }


class PeakMemory:
    """The highest memory in use while something ran, in bytes above what was in use before; None: not known."""

    bytes: int | None = None
    how: str = "resident memory is not known on this system"


@contextmanager
def watched_memory(device: torch.device) -> Iterator[PeakMemory]:
    """Watch the block's memory: torch's own count on CUDA, else the process's resident pages, sampled.

    The samples also see what the block only touched for the first time, and miss what was freed and used again, so on
    a CPU the figure is an estimate, to be taken on a second call.
    """
    peak = PeakMemory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.bytes, peak.how = torch.cuda.max_memory_allocated(device) - before, "torch.cuda.max_memory_allocated"
        return
    start = resident_bytes()
    if start is None:
        yield peak
        return
    ended, seen = threading.Event(), [start]

    def sample() -> None:
        while not ended.wait(0.002):
            seen.append(resident_bytes() or 0)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield peak
    finally:
        ended.set()
        sampler.join()
    peak.bytes, peak.how = max(seen) - start, "resident memory, sampled every 2 ms"


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can still be taken on `device`; None: not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def resident_bytes() -> int | None:
    """Bytes of this process that are in memory."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * getpagesize()
    except (OSError, ValueError, IndexError):
        return None
