"""Measuring a cost model: rounds of the real engine along a few paths, in turn, and what these have in common."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers

from layerskip.api import Model
from layerskip.engine import Engine
from layerskip.errors import SettingError
from layerskip.plan import DraftPlan
from layerskip.search.candidate import Candidate
from layerskip.search.cost import CostModel
from layerskip.search.settings import SearchSettings
from layerskip.search.trained import Trained

__all__ = ["conditions_of", "context_for", "longest_context", "measure_costs", "measure_rounds"]

_ROUNDS = 12
_PLANS_PER_PLAIN = 4
_LEAST_ROUNDS, _ENOUGH_S = 3, 90.0  # rounds of large models take seconds, and vary the less
_WARM_UP = 2  # rounds that are not counted: kernels are chosen, programs recorded, caches filled


def measure_costs(
    model: Model,
    vocabularies: Sequence[tuple[int, ...]] = (),
    *,
    draft_length: int = 6,
    context: int = 256,
    rounds: int = _ROUNDS,
    trained: Iterable[Trained] = (),
    notify: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> CostModel:
    """Measure what steps and passes cost behind `context` tokens, at batch 1, on this device.

    About 30 plans run `rounds` rounds each, in turn, so that a machine that is slower for a while is so for all; when
    a minute and a half have passed, three rounds of each are enough.

    Args:
        vocabularies: draft vocabularies whose heads are to be measured, ids ascending.
        draft_length: verification is measured over 1 to `draft_length` + 1 tokens.
        trained: paths whose blocks are to be measured too.

    Raises:
        SettingError: a number below 1, or a context that the model has no room for.
    """
    for name, value, most in (("rounds", rounds, 10**4), ("draft_length", draft_length, 64)):
        if type(value) is not int or not 1 <= value <= most:
            raise SettingError(f"got {name}={value!r}; expected an integer from 1 to {most}.")
    longest = longest_context(model, draft_length, rounds)
    if type(context) is not int or not 1 <= context <= longest:
        raise SettingError(f"got context={context!r}; expected an integer from 1 to {longest}.")
    blocks = model.decoder.num_blocks
    # Each number of drafts is measured along several paths, and each path by several numbers of drafts.
    skipping, others = _skipping(blocks), _others(blocks)
    measured = [(candidate, length) for length in range(1, draft_length + 1) for candidate in skipping]
    measured += [(candidate, min(2, draft_length)) for candidate in others]
    heads = [(candidate, ids) for ids in vocabularies for candidate in (skipping[-1], others[-1])]
    plans = [candidate.plan(length) for candidate, length in measured]
    plans += [candidate.plan(min(2, draft_length), ids) for candidate, ids in heads]
    vocab_size = model.decoder.vocab_size
    drafted = [replace(candidate, vocabulary_size=vocab_size) for candidate, _ in measured]
    drafted += [replace(candidate, vocabulary_size=len(ids)) for candidate, ids in heads]
    for candidate, plan in _of_trained(trained, vocabularies, draft_length, vocab_size):
        drafted.append(candidate)
        plans.append(plan)
    plain, times = measure_rounds(model, plans, context, rounds, notify)
    probe = _engine(model, plans[0], 1, 1)
    probe.release()
    attention_s, mlp_s, head_s, trained_s = _fit(drafted, blocks, [each.draft_s for each in times])
    by_width = {1: plain.verifications}
    for (candidate, length), each in zip(measured, times, strict=False):
        if candidate in skipping:
            by_width[length + 1] = by_width.get(length + 1, []) + each.verifications
    costs = CostModel(
        plain_s=plain.verify_s,
        attention_s=_shared(attention_s, model.inspection.attention_parameters),
        mlp_s=_shared(mlp_s, model.inspection.mlp_step_parameters),
        head_sizes=tuple(sorted(head_s)),
        head_s=tuple(head_s[size] for size in sorted(head_s)),
        verify_s=tuple(median(by_width[width]) for width in sorted(by_width)),
        conditions={**conditions_of(model), "context": context, "rounds": len(times[0].verifications), "batch": 1},
        reuses_exact_states=probe.static is None,
        trained_s=trained_s,
    )
    return replace(costs, trained_round_s=_beyond(costs, drafted, plans, times))


def longest_context(model: Model, draft_length: int, rounds: int = _ROUNDS) -> int:
    """The most tokens behind which the model has room for the rounds that are measured.

    Raises:
        SettingError: it has no room for these at all.
    """
    longest = model.decoder.max_positions - (rounds + _WARM_UP) * (draft_length + 1) - 2
    if longest < 1:
        raise SettingError(
            f"got draft_length={draft_length} on a model of {model.decoder.max_positions} positions, which leaves no "
            f"room to measure {rounds} rounds in; expected shorter drafts."
        )
    return longest


def context_for(model: Model, settings: SearchSettings) -> int:
    """Where costs are measured: what is set, but the default gives way to a model of few positions.

    Raises:
        SettingError: there is no room for that; said before an hour is spent on the texts.
    """
    longest = longest_context(model, settings.draft_length)
    if settings.context > longest and settings.context != SearchSettings.context:
        raise SettingError(
            f"got context={settings.context}; expected an integer from 1 to {longest}, for which this model has room."
        )
    return min(settings.context, longest)


class RoundTimes:
    """Of one plan: seconds of each round, by phase.

    Attributes:
        drafts: of a draft step.
        verifications: of all else of the round.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self.drafts: list[float] = []
        self.verifications: list[float] = []

    def note(self, draft_s: float | None, verify_s: float) -> None:
        """Count a round."""
        if draft_s is not None:
            self.drafts.append(draft_s)
        self.verifications.append(verify_s)

    @property
    def draft_s(self) -> float:
        """Median of a draft step."""
        return median(self.drafts)

    @property
    def verify_s(self) -> float:
        """Median of a round without its drafting."""
        return median(self.verifications)


def measure_rounds(
    model: Model,
    plans: Sequence[DraftPlan],
    context: int,
    rounds: int,
    notify: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> tuple[RoundTimes, list[RoundTimes]]:
    """Times of `rounds` rounds by each plan behind `context` tokens, in turn, in an order drawn anew for each round.

    When a minute and a half have passed, three rounds of each are enough.

    Returns:
        Of plain steps, which all ratios are to and which therefore take several turns a round; and of each plan.
    """
    # A plain engine for every few plans: what comes before a round, or a slow moment, says little of one of many.
    turns = [*plans, *[None] * -(-len(plans) // _PLANS_PER_PLAIN)]
    engines = [_engine(model, plan, context, rounds) for plan in turns]
    plain, times = RoundTimes(), [RoundTimes() for _ in plans]
    order, rng, began = list(range(len(turns))), random.Random(0), time.perf_counter()
    try:
        for engine in engines:
            engine.read_prompts()
        for index in range(_WARM_UP + rounds):
            rng.shuffle(order)
            for turn in order:
                seconds = _round(engines[turn], turns[turn])
                if index >= _WARM_UP:
                    (times[turn] if turn < len(plans) else plain).note(*seconds)
            notify("measuring costs", index + 1, _WARM_UP + rounds)
            if index >= _WARM_UP + _LEAST_ROUNDS - 1 and time.perf_counter() - began > _ENOUGH_S:
                break
    finally:
        for engine in engines:
            engine.release()
    return plain, times


def _round(engine: Engine, plan: DraftPlan | None) -> tuple[float | None, float]:
    """Run one round: seconds of a draft step (None: it is a plain step), and of all else."""
    before = (engine.stats.draft_s, engine.stats.verify_s + engine.stats.host_s)
    engine.decode_round()
    draft_s, verify_s = engine.stats.draft_s - before[0], engine.stats.verify_s + engine.stats.host_s - before[1]
    return None if plan is None else draft_s / plan.num_draft_tokens, verify_s


def _engine(model: Model, plan: DraftPlan | None, context: int, rounds: int) -> Engine:
    """An engine that neither stops nor leaves anything out."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.decoder.vocab_size, (context,), generator=generator).tolist()
    drafts = plan.num_draft_tokens if plan is not None else 0
    governor = {} if plan is None else {"plan": plan, "governor": "off"}
    longest = (rounds + _WARM_UP + 1) * (drafts + 1) + 1
    return model.engine(
        model.check(prompt, max_new_tokens=longest, do_sample=False, eos_token_id=[], **governor)  # type: ignore[arg-type]
    )


def _skipping(blocks: int) -> list[Candidate]:
    """Paths that leave something out from the first blocks on, so that verification can take nothing of them over."""
    second, third = range(0, blocks, 2), range(0, blocks, 3)
    paths = [
        Candidate.of(blocks, [0]),
        Candidate.of(blocks, third, second[1:]),
        Candidate.of(blocks, second, second[1:]),
    ]
    return [each for each in dict.fromkeys(paths) if each.path(blocks)]


def _others(blocks: int) -> list[Candidate]:
    """Paths of other proportions of attentions, MLPs and the rest."""
    second, early = range(1, blocks, 2), max(1, blocks // 4)
    paths = [
        Candidate.of(blocks),
        Candidate.of(blocks, second),
        Candidate.of(blocks, (), second),
        Candidate.of(blocks, exit_layer=max(1, blocks // 2)),
        Candidate.of(blocks, exit_layer=early),
        Candidate.of(blocks, range(1, early), (), exit_layer=early),
    ]
    return list(dict.fromkeys(paths))


def _of_trained(
    trained: Iterable[Trained], vocabularies: Sequence[tuple[int, ...]], draft_length: int, vocab_size: int
) -> Iterator[tuple[Candidate, DraftPlan]]:
    """What is measured of trained paths: each by several numbers of drafts, and with every head.

    Of so short a step the head is a large part, which is measured best there.
    """
    short = min(2, draft_length)
    for known in trained:
        path, own = known.path, known.plan.draft_vocabulary
        ways = [(own, length) for length in sorted({short, draft_length})]
        ways += [(ids, short) for ids in vocabularies if len(ids) != path.vocabulary_size]
        ways += [] if own is None else [(None, short)]
        for ids, length in ways:
            size = vocab_size if ids is None else len(ids)
            candidate = Candidate((), (), path.exit_layer, size, path.name)
            yield candidate, candidate.plan(length, ids, adapter=known.plan.adapter)


def _fit(
    drafted: Sequence[Candidate], blocks: int, seconds: Sequence[float]
) -> tuple[float, float, dict[int, float], dict[str, float]]:
    """Seconds of an attention, an MLP, all the rest by the number of ids scored, and each trained path's own blocks.

    Least squares of the relative error; none of them is negative.

    Args:
        drafted: of each draft step that was measured, what it ran; the number of ids is given also where it is all.
    """
    sizes = sorted({each.vocabulary_size for each in drafted if each.vocabulary_size is not None})
    names = sorted({each.trained for each in drafted if each.trained is not None})
    rows = []
    for candidate in drafted:
        path = candidate.path(blocks)
        counts = [sum(step.attention for step in path), sum(step.mlp for step in path)]
        counts += [candidate.vocabulary_size == size for size in sizes]
        rows.append([*counts, *(candidate.trained == name for name in names)])
    scaled = np.asarray(rows, dtype=float) / np.asarray(seconds)[:, None]
    solution = np.linalg.lstsq(scaled, np.ones(len(seconds)), rcond=None)[0]
    attention_s, mlp_s, *rest_s = (max(float(each), 1e-9) for each in solution)
    heads_s, trained_s = rest_s[: len(sizes)], rest_s[len(sizes) :]
    return attention_s, mlp_s, dict(zip(sizes, heads_s, strict=True)), dict(zip(names, trained_s, strict=True))


def _beyond(
    costs: CostModel, drafted: Sequence[Candidate], plans: Sequence[DraftPlan], times: Sequence[RoundTimes]
) -> dict[str, float]:
    """`CostModel.trained_round_s`: how much longer the verifications of trained paths took than `costs` knows."""
    found: dict[str, list[float]] = {}
    for candidate, plan, each in zip(drafted, plans, times, strict=True):
        if candidate.trained is not None:
            known_s = costs.plain_s * costs.verify_ratio(plan.num_draft_tokens + 1, candidate)
            found.setdefault(candidate.trained, []).append(each.verify_s - known_s)
    return {name: max(0.0, sum(extra) / len(extra)) for name, extra in found.items()}


def _shared(mean_s: float, parameters: Sequence[int]) -> tuple[float, ...]:
    """Layers of other sizes cost in proportion: reading weights is what takes the time."""
    mean = sum(parameters) / len(parameters)
    return tuple(mean_s * each / mean for each in parameters)


def conditions_of(model: Model) -> dict[str, Any]:
    """When, where and with what something is measured."""
    device = model.decoder.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"{device} ({name})",
        "dtype": str(model.decoder.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
