"""What does the call option `compile` give, and what does it cost?

    python -m experiments.compiled_step --model "$(layerskip reference)"

The same prompt decoded plainly with and without it, in turn in one process with packed weights, after a warm-up that
compiles; then single passes over one token and over several, compiled and as they are. Beside the times: how long
compiling took, and the memory that stays with it.

The last line is one JSON document, which is also appended to the results file.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import layerskip
from experiments.arms import Arm, our_arm
from experiments.conditions import conditions
from experiments.measuring import interleaved, resident_bytes
from experiments.report import append
from experiments.step_profile import CONTEXT, step_options
from layerskip.errors import DecodingError

__all__ = ["main"]

NEW_TOKENS = 128
PROMPT = "Explain in a few paragraphs how the tides work, and why there are two of them a day."
SLOTS = 512  # cache slots of the passes
WIDTHS = (1, 4)


def decoding(model: layerskip.Model, repeats: int) -> dict[str, list[float]]:
    """Tokens a second of each call, plain and compiled in turn."""
    messages = [{"role": "user", "content": PROMPT}]
    rows = [model.check(messages).prompts[0]]
    arms = [our_arm("as it is", model, None), our_arm("compiled", model, None, compile=True)]
    for arm in arms:
        arm.call(rows, NEW_TOKENS)
    for repeat in range(repeats):
        for arm in arms[:: 1 if repeat % 2 else -1]:
            arm.runs.append(arm.call(rows, NEW_TOKENS))
    _check(arms[1])
    return {arm.name: [run.tokens_per_s for run in arm.runs] for arm in arms}


def _check(arm: Arm) -> None:
    stats = arm.runs[-1].stats
    if stats is None or stats.execution != "static: compiled":
        raise DecodingError(f"got passes that are not compiled ({stats and stats.execution}); nothing is measured.")


@torch.inference_mode()
def passes(model: layerskip.Model, repeats: int) -> dict[str, float]:
    """Seconds of a pass behind `CONTEXT` tokens, by width, as it is and compiled."""
    decoder = model.decoder
    with torch.inference_mode(False):
        cache = decoder.new_cache(1, SLOTS)
    starts = torch.tensor([CONTEXT])

    def as_it_is(ids: torch.Tensor) -> None:
        span = decoder.span([CONTEXT], ids.shape[1])
        decoder.logits(decoder.run(decoder.embed(ids), decoder.full_path, cache, span)).max(dim=-1).indices.tolist()
        cache.commit([CONTEXT])

    def compiled(ids: torch.Tensor) -> None:
        model.compiled(ids, starts, SLOTS, cache).max(dim=-1).indices.tolist()

    decoder.run(decoder.embed(torch.full((1, CONTEXT), 5)), decoder.full_path, cache, decoder.span([0], CONTEXT))
    cache.commit([CONTEXT])
    programs: dict[str, Callable[[], object]] = {}
    for width in WIDTHS:
        ids = torch.full((1, width), 5)
        programs[f"{width}, as it is"] = lambda ids=ids: as_it_is(ids)
        programs[f"{width}, compiled"] = lambda ids=ids: compiled(ids)
    return interleaved(decoder.device, programs, repeats)


def main() -> None:
    """Compile, time in turn, print and append."""
    options = step_options(__doc__, "compiled_step")
    torch.set_num_threads(options.threads)
    model = layerskip.load(options.model, dtype=options.dtype)
    before = resident_bytes()
    tokens_per_s = decoding(model, max(1, options.repeats // 4))
    programs: dict[str, Any] = {"one token": {"seconds": model.compiled.seconds, "bytes": _grown(before)}}
    before, seconds = resident_bytes(), model.compiled.seconds
    pass_s = passes(model, options.repeats)
    programs["all others"] = {"seconds": model.compiled.seconds - seconds, "bytes": _grown(before)}
    for name, rates in tokens_per_s.items():
        print(f"{name}: {median(rates):.1f} tokens/s")
    ratio = median(theirs / ours for ours, theirs in zip(*tokens_per_s.values(), strict=True))
    print(f"compiled ÷ as it is: {ratio:.2f}; {model.compiled.count} programs")
    for name, lap in pass_s.items():
        print(f"a pass over {name}: {1e3 * lap:.1f} ms")
    for name, cost in programs.items():
        print(f"compiling {name}: {cost['seconds']:.0f} s, {(cost['bytes'] or 0) / 1e6:.0f} MB")
    document = {
        "experiment": "compiled_step",
        "conditions": conditions(model, [PROMPT]),
        "context": CONTEXT,
        "slots": SLOTS,
        "tokens_per_s": tokens_per_s,
        "ratio": ratio,
        "pass_s": pass_s,
        "programs": programs,
    }
    append(options.results, document)


def _grown(before: int | None) -> int | None:
    """Resident memory above `before`."""
    now = resident_bytes()
    return None if before is None or now is None else now - before


if __name__ == "__main__":
    main()
