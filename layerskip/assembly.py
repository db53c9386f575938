"""From a checked request to an engine that is ready to decode it: everything one run needs, made anew.

A run shares nothing with another but the weights, so that calls may overlap and an interrupted one leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerBase

from layerskip.drafters import DraftContext, Drafter
from layerskip.engine import Engine
from layerskip.models.decoder import Decoder
from layerskip.processing import make_processors
from layerskip.request import Request
from layerskip.rules import make_rule
from layerskip.sampling import Sampler
from layerskip.state import DecodeState
from layerskip.stats import DecodeStats
from layerskip.stopping import make_stopping

__all__ = ["build_engine"]


def build_engine(
    decoder: Decoder,
    request: Request,
    make_drafter: Callable[[DraftContext], Drafter] | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Engine:
    """Put together what `request` asks for.

    Args:
        make_drafter: makes the drafter of the request's plan; None decodes plainly.
        tokenizer: for stop strings.

    Raises:
        SettingError: an acceptance rule that does not exist, or stop strings without tokenizer.
        DecodingError: there is no memory for the cache.
    """
    settings, plan, device = request.settings, request.plan, decoder.device
    lengths = [len(prompt) for prompt in request.prompts]
    limits = [min(settings.longest(length), decoder.max_positions) for length in lengths]
    # No draft can be longer than what a row may still emit, whatever the plan allows.
    room = max(limit - length for limit, length in zip(limits, lengths, strict=True))
    max_drafts = min(plan.num_draft_tokens, room) if plan is not None else 0
    processors = make_processors(settings, request.caller_processors, lengths, str(device))
    context = DraftContext(
        sampler=Sampler(processors, settings.do_sample),
        rule=make_rule(request.acceptance_rule, torch.tensor(request.seeds, device=device), settings.do_sample),
        eos_ids=torch.tensor(settings.eos_token_id, dtype=torch.int64, device=device),
        confidence_threshold=plan.confidence_threshold if plan is not None else 0.0,
        vocab_size=decoder.vocab_size,
    )
    # Room for the longest row and one pass beyond it: the last pass may draft past the end.
    cache = decoder.new_cache(len(lengths), max(limits) + (request.pass_width or max_drafts + 1))
    return Engine(
        decoder=decoder,
        state=DecodeState(request.prompts, limits, cache, device),
        context=context,
        drafter=make_drafter(context) if make_drafter is not None else None,
        max_drafts=max_drafts,
        pass_width=request.pass_width,
        stats=DecodeStats(accepted_histogram=[0] * (max_drafts + 1)),
        # Last: with it the clock of max_time begins to run.
        stopping=make_stopping(settings, request.caller_criteria, tokenizer, lengths, decoder.max_positions),
    )
