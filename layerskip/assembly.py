"""From a checked request to an engine that is ready to decode it: everything one run needs, made anew.

A run shares nothing with another that runs at the same time but the weights, so that calls may overlap and an
interrupted one leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from layerskip.compiled import CompiledForward
from layerskip.drafters import DraftContext, Drafter
from layerskip.engine import Engine
from layerskip.governor import Always, FixedCosts, Governor, MeasuredCosts, Source, WorthIt
from layerskip.memory import Memory, new_cache
from layerskip.models.adapter import TrainedPart
from layerskip.models.cache import KVCache
from layerskip.models.decoder import Decoder
from layerskip.processing import make_processors
from layerskip.request import Request
from layerskip.rules import make_rule
from layerskip.sampling import Sampler
from layerskip.state import DecodeState
from layerskip.static_pool import Rounds, StaticPool, take_rounds
from layerskip.static_rounds import tier_of
from layerskip.stats import DecodeStats
from layerskip.stopping import make_stopping

__all__ = ["MakeDrafter", "PlannedDrafter", "build_engine"]


class MakeDrafter(Protocol):
    """Makes a drafter for one call."""

    def __call__(self, context: DraftContext, /) -> Drafter:
        """See the class."""
        ...


@dataclass(frozen=True)
class PlannedDrafter:
    """One of the drafters that a plan asks for.

    Attributes:
        cost_ratio: of one step in plain steps, by the parameters that it reads.
        most: drafts a round.
        priors, prior_weight: see `Source`.
        adapter: what it runs that was trained: it needs room in the cache, and states that are kept there.
        num_siblings: tokens that it may propose beside each draft.
        width: most tokens of a draft that is a whole tree; 0: it drafts chains, with or without siblings.
        is_one_step, reads_texts: see `Source`.
    """

    make: MakeDrafter
    cost_ratio: float
    most: int
    priors: Sequence[float] = Source.priors
    prior_weight: float = Source.prior_weight
    adapter: TrainedPart | None = None
    num_siblings: int = 0
    width: int = 0
    is_one_step: bool = False
    reads_texts: bool = False


@torch.inference_mode(False)  # what is made here may outlive a caller's inference mode
@torch.no_grad()
def build_engine(
    decoder: Decoder,
    request: Request,
    planned: Mapping[str, PlannedDrafter],
    tokenizer: PreTrainedTokenizerBase | None = None,
    pool: StaticPool | None = None,
    compiled: CompiledForward | None = None,
    memory: Memory | None = None,
) -> Engine:
    """Put together what `request` asks for.

    Args:
        planned: the drafters of the request's plan, by name; none: plain decoding.
        tokenizer: for stop strings.
        pool: of static rounds, kept from call to call.
        compiled: the decoder's compiled passes, likewise.
        memory: what was read of the text of the request's one row before; the engine's own takes its place. None:
            nothing is known, nor to be kept.

    Raises:
        SettingError: an acceptance rule that does not exist, or stop strings without tokenizer.
        DecodingError: there is no memory for the cache.
    """
    settings, device = request.settings, decoder.device
    lengths = [len(prompt) for prompt in request.prompts]
    limits = [min(settings.longest(length), decoder.max_positions) for length in lengths]
    # No draft can be longer than what a row may still emit, whatever the plan allows.
    room = max(limit - length for limit, length in zip(limits, lengths, strict=True))
    most = min(room, max((each.most for each in planned.values()), default=0))
    adapter = next((each.adapter for each in planned.values() if each.adapter is not None), None)
    context = _context(decoder, request, lengths)
    # Room for the longest row and one pass beyond it: the last pass may draft past the end.
    capacity = max(limits) + (request.pass_width or tier_of(most) + 1)
    pool, compiled = pool or StaticPool(), compiled or CompiledForward(decoder)
    rounds = take_rounds(decoder, request, context, capacity, pool, compiled, adapter)
    known, release = Memory(), rounds.release
    planned, note = _possible(request, context, rounds, planned, decoder.vocab_size)
    if any(each.num_siblings or each.width for each in planned.values()):
        context = replace(context, rule=context.rule.for_trees())
    widest = max((each.width or min(each.most, most) * (1 + each.num_siblings) for each in planned.values()), default=0)
    capacity = max(capacity, max(limits) + widest + 1)
    try:
        if memory is not None:
            known = memory.resume(decoder, request.prompts[0], capacity, adapter)
        elif rounds.static is None:
            known = Memory(cache=new_cache(decoder, len(lengths), capacity, adapter))
        if rounds.static is not None:
            state, context = rounds.static.state, rounds.static.context
            state.reset(request.prompts, limits, known.cache, known.readings)
            if known.cache is not None:  # recorded rounds have a cache of their own, which is another call's afterwards
                release = partial(_hand_back, known.cache, state.cache, known.shared_by(adapter), release)
                known = replace(known, adapter=adapter)  # another's entries and states were not kept up to date
        else:
            assert known.cache is not None
            context = replace(context, num_siblings=max((each.num_siblings for each in planned.values()), default=0))
            state = DecodeState(request.prompts, limits, known.cache, device, known.readings)
        return Engine(
            decoder=decoder,
            state=state,
            context=context,
            drafters={name: each.make(context) for name, each in planned.items()},
            governor=_governor(request, planned, most),
            pass_width=request.pass_width,
            static=rounds.static,
            memory=replace(known, token_ids=state.texts[0], readings=state.readings),
            output_logits=settings.output_logits,
            output_scores=settings.output_scores,
            release=release,
            mode=torch.no_grad if _has_guests(decoder, request) else torch.inference_mode,
            stats=DecodeStats(accepted_histogram=[0] * (most + 1), execution=rounds.execution + note),
            # Last: with it the clock of max_time begins to run.
            stopping=make_stopping(
                settings, request.caller_criteria, tokenizer, lengths, decoder.max_positions, request.row_view
            ),
        )
    except BaseException:
        rounds.release()
        raise


def _context(decoder: Decoder, request: Request, lengths: Sequence[int]) -> DraftContext:
    """What drafts and their verification share, for prompts of these lengths."""
    settings, device = request.settings, decoder.device
    processors = make_processors(settings, request.caller_processors, lengths, str(device), request.row_view)
    return DraftContext(
        sampler=Sampler(processors, settings.do_sample),
        rule=make_rule(request.acceptance_rule, torch.tensor(request.seeds, device=device), settings.do_sample),
        eos_ids=frozenset(settings.eos_token_id),
        confidence_threshold=request.plan.confidence_threshold if request.plan is not None else 0.0,
        vocab_size=decoder.vocab_size,
        chunk=settings.prefill_chunk_size,
    )


def _possible(
    request: Request, context: DraftContext, rounds: Rounds, planned: Mapping[str, PlannedDrafter], vocab_size: int
) -> tuple[dict[str, PlannedDrafter], str]:
    """What is left of `planned` where trees cannot be verified, and, for the statistics, what that is and why."""
    if rounds.static is not None:
        obstacle = "rounds have fixed shapes"
    elif request.pass_width is not None:
        obstacle = "passes have the width that was asked for"
    elif not context.sampler.prefix_free:
        obstacle = "a logits processor looks at the tokens before each position, and would be asked about each path"
    else:
        ids = request.plan.draft_vocabulary if request.plan is not None else None
        most = (vocab_size if ids is None else len(ids)) - 1
        few = {name: replace(each, num_siblings=min(each.num_siblings, most)) for name, each in planned.items()}
        return few, ""
    chains = {name: replace(each, num_siblings=0) for name, each in planned.items() if not each.width}
    if len(chains) < len(planned):
        return chains, f"; no lookahead, which drafts trees: {obstacle}"
    is_asked = any(each.num_siblings for each in planned.values())
    return chains, f"; chains, no trees: {obstacle}" if is_asked else ""


def _hand_back(cache: KVCache, used: KVCache, begin: int, release: Callable[[], None]) -> None:
    """Bring what a call has read in another cache into a session's own, where it is the same before `begin`."""
    try:
        cache.take(used, begin)
    finally:
        release()


def _has_guests(decoder: Decoder, request: Request) -> bool:
    """Whether code of the caller's takes part: processors, criteria, hooks."""
    return bool(request.caller_processors or request.caller_criteria or decoder.is_watched)


def _governor(request: Request, planned: Mapping[str, PlannedDrafter], most: int) -> Governor:
    sources = {
        name: Source(
            min(each.most, most),
            each.cost_ratio,
            each.priors,
            each.prior_weight,
            each.num_siblings,
            each.width,
            each.is_one_step,
            each.reads_texts,
        )
        for name, each in planned.items()
    }
    if request.governor == "off" or not sources:
        return Always(sources)
    ratios = {name: each.cost_ratio for name, each in planned.items()}
    costs = (
        FixedCosts(request.cost_ratios, ratios)
        if request.governor == "fixed"
        else MeasuredCosts(ratios, len(request.prompts))
    )
    return WorthIt(sources, costs, len(request.prompts))
