"""Ways to decode the same prompts, ours and transformers', timed alike and run in turn.

It knows how one call of each is timed, not what is made of the times. Ours are the engine's own marks; transformers'
are taken when its streamer is given tokens. Both count decoding from the first new token on.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

import layerskip
from experiments.measuring import PeakMemory, watched_memory
from experiments.subjects import Prompt
from layerskip.models.loading import quiet

__all__ = [
    "GREEDY",
    "WARM_UP_TOKENS",
    "Arm",
    "Run",
    "ends_of",
    "in_turn",
    "our_arm",
    "run_in_turn",
    "transformers_arm",
    "until_end",
    "warm_up",
    "warm_up_tokens",
]


T = TypeVar("T")

WARM_UP_TOKENS = 8
_MOST_CALLS = 3  # until one records nothing
GREEDY: Mapping[str, Any] = {"do_sample": False}


@dataclass(frozen=True)
class Run:
    """What one call did.

    Attributes:
        tokens: each row's new ones.
        first_s: from the call until the first new token.
        decode_s, decoded: the seconds from there on, and the tokens that they gave.
        passes: of the full model behind the prompt's; 0: not known.
        call_s: of the whole call.
        stats: ours only.
    """

    tokens: list[list[int]]
    first_s: float
    decode_s: float
    decoded: int
    passes: int
    call_s: float
    stats: layerskip.DecodeStats | None = None

    @property
    def tokens_per_s(self) -> float:
        """Of decoding, over all rows."""
        return self.decoded / self.decode_s if self.decode_s else 0.0


@dataclass
class Arm:
    """One way to decode.

    Attributes:
        call: decodes prompts up to a number of new tokens.
        settings: all that distinguishes it, for the report.
        runs: one for each prompt (and repeat), in the same order for all arms.
    """

    name: str
    call: Callable[[list[list[int]], int], Run]
    settings: dict[str, Any]
    runs: list[Run] = field(default_factory=list)


def our_arm(
    name: str,
    model: layerskip.Model,
    plan: layerskip.DraftPlan | None,
    governor: str | None = None,
    cuda_graphs: bool | None = None,
    compile: bool = False,
    decoding: Mapping[str, Any] = GREEDY,
) -> Arm:
    """Decoding by `layerskip`; without a plan plainly."""

    def once(rows: list[list[int]], new_tokens: int) -> Run:
        began = time.perf_counter()
        result = model.generate(
            rows,
            plan=plan,
            governor=governor,
            cuda_graphs=cuda_graphs,
            compile=compile,
            seed=len(rows[0]) if decoding["do_sample"] else None,
            max_new_tokens=new_tokens,
            **decoding,
        )
        call_s, stats = time.perf_counter() - began, result.stats
        # A pass serves all rows, and the statistics count it once a row: a plain row takes one for each token.
        passes = max(map(len, result.new_token_ids)) - 1 if plan is None else -(-stats.rounds // len(rows))
        first_s = call_s - stats.decode_s
        return Run(result.new_token_ids, first_s, stats.decode_s, stats.round_tokens, passes, call_s, stats)

    def call(rows: list[list[int]], new_tokens: int) -> Run:
        """Once more where programs had to be recorded or compiled first, which serve all later calls."""
        for _ in range(_MOST_CALLS):
            run = once(rows, new_tokens)
            if run.stats is None or not run.stats.recording_s:
                break
        return run

    described = plan.to_dict() if plan is not None else None
    if described is not None:
        described |= {name: _named(described[name]) for name in ("adapter", "draft_model")}
    if described is not None and plan is not None and plan.draft_vocabulary is not None:
        described["draft_vocabulary"] = f"{len(plan.draft_vocabulary)} ids"  # listed, they would drown the rest
    return Arm(name, call, {"plan": described, "governor": governor, "cuda_graphs": cuda_graphs, "compile": compile})


class _Clock:
    """A streamer that only notes when how many tokens came."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(tokens.numel())

    def end(self) -> None:
        """Nothing: the last token has been put."""


@contextmanager
def _set_in(config: Any, values: dict[str, Any]) -> Iterator[None]:
    """Have `config` say `values`; afterwards it says what it did before, and `values` what had become of them."""
    before = {name: getattr(config, name) for name in values}
    for name, value in values.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            values[name] = getattr(config, name)
            setattr(config, name, value)


def transformers_arm(
    name: str, hf_model: PreTrainedModel, drafting: Mapping[str, Any] | None = None, **settings: Any
) -> Arm:
    """Decoding by transformers' own `generate`; `settings` are its keyword arguments, all else its defaults.

    Greedy unless they say otherwise.

    Args:
        drafting: what transformers reads in the generation config of the model that drafts (`assistant_model`, or the
            model itself), where it also keeps a number of drafts that it adapts from call to call.
    """
    settings, drafting = {**GREEDY, **settings}, dict(drafting or {})
    model: Any = hf_model
    config = model.generation_config
    drafter_config = settings.get("assistant_model", model).generation_config
    kept = {"num_assistant_tokens": drafter_config.num_assistant_tokens, **drafting}
    eos_ids = ends_of(model)
    pad = config.pad_token_id if config.pad_token_id is not None else next(iter(eos_ids), 0)

    def call(rows: list[list[int]], new_tokens: int) -> Run:
        length = max(map(len, rows))
        ids = torch.tensor([[pad] * (length - len(row)) + row for row in rows], device=model.device)
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=model.device)
        if settings["do_sample"]:
            torch.manual_seed(length)
        clock, began = _Clock(), time.perf_counter()
        with quiet(), _set_in(drafter_config, kept):
            sequences = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=new_tokens,
                pad_token_id=pad,
                streamer=clock,
                **settings,
            )
        call_s = time.perf_counter() - began
        tokens = [until_end(row, eos_ids) for row in sequences[:, length:].tolist()]
        # The first that was put is the prompt; drafting arms put several tokens at once. Rows that have ended still
        # get padding: it is no token.
        first, decoded = (clock.counts[1], sum(map(len, tokens)) - clock.counts[1]) if len(clock.counts) > 1 else (0, 0)
        return Run(
            tokens,
            clock.times[1] - began if first else call_s,
            clock.times[-1] - clock.times[1] if first else 0.0,
            decoded,
            len(clock.counts) - 2,
            call_s,
        )

    named = {key: _named(getattr(value, "name_or_path", value)) for key, value in settings.items()}
    return Arm(name, call, {"transformers": named | ({"drafting": drafting} if drafting else {})})


def _named(value: Any) -> Any:
    """Without the machine's own paths."""
    return Path(value).name if isinstance(value, str) and "/" in value else value


def ends_of(hf_model: Any) -> set[int]:
    """The ids that end a text of this model."""
    eos = hf_model.generation_config.eos_token_id
    return set(eos if isinstance(eos, list) else [] if eos is None else [eos])


def until_end(row: Sequence[int], eos_ids: set[int]) -> list[int]:
    """The tokens up to and with the first that ends the text."""
    end = next((index + 1 for index, token in enumerate(row) if token in eos_ids), len(row))
    return list(row[:end])


def warm_up_tokens(device: torch.device, new_tokens: int) -> int:
    """How many to warm up with: on a GPU as many as will be asked for, because programs are recorded for them."""
    return new_tokens if device.type == "cuda" else WARM_UP_TOKENS


def warm_up(arm: Arm, rows: list[list[int]], device: torch.device, new_tokens: int = WARM_UP_TOKENS) -> PeakMemory:
    """Call `arm` twice; the second call's memory above what was held before it."""
    arm.call(rows, new_tokens)
    with watched_memory(device) as peak:
        arm.call(rows, new_tokens)
    return peak


def in_turn(arms: Sequence[T], *turn: object) -> list[T]:
    """`arms` in an order that depends on `turn` alone, so that in many turns each follows each other one as often."""
    order = list(arms)
    random.Random(repr(turn)).shuffle(order)
    return order


def run_in_turn(
    arms: Sequence[Arm], prompts: Iterable[Prompt], new_tokens: int, goes_on: Callable[[], bool] = lambda: True
) -> int:
    """Decode every prompt by every arm, each time in another order (`in_turn`).

    Args:
        goes_on: asked before each prompt but the first.

    Returns:
        How many prompts were decoded.
    """
    done = 0
    for prompt in prompts:
        if done and not goes_on():
            break
        for arm in in_turn(arms, done):
            arm.runs.append(arm.call(prompt.rows, new_tokens))
        done += 1
    return done
