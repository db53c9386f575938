"""An engine's commits, handed on and put together: what a call returns."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from layerskip.chosen import Commit
from layerskip.engine import Engine
from layerskip.errors import InputError
from layerskip.request import Request
from layerskip.result import GenerationResult
from layerskip.rules import RULES
from layerskip.scores import by_step

__all__ = ["check_stream", "check_streamer", "decode", "make_result"]


def check_streamer(streamer: Any) -> None:
    """Raises InputError: it is neither None nor a streamer."""
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise InputError(f"got streamer={streamer!r}; expected a transformers streamer, with put() and end().")


def check_stream(options: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """What a stream makes text with.

    Raises:
        InputError: there is nothing, or a streamer was given.
    """
    if "streamer" in options:
        raise InputError("got a streamer for stream(), which is one itself; iterate over it, or use generate().")
    if tokenizer is None:
        raise InputError("got no tokenizer to make text with; pass one to wrap(model, tokenizer), or use generate.")
    return tokenizer


def decode(
    request: Request, engine: Engine, tokenizer: PreTrainedTokenizerBase | None, streamer: Any
) -> GenerationResult:
    """Run `engine` to the end; a streamer gets the prompt, then every token as it is committed."""
    commits = []
    with closing(iter(engine)) as source:
        if streamer is not None:
            streamer.put(torch.tensor(request.prompts))
        for commit in source:
            commits.append(commit)
            if streamer is not None:
                streamer.put(torch.tensor([commit.token_id]))
    if streamer is not None:
        streamer.end()
    return make_result(request, engine, tokenizer, commits)


def make_result(
    request: Request, engine: Engine, tokenizer: PreTrainedTokenizerBase | None, commits: list[Commit]
) -> GenerationResult:
    """What the caller of `request` gets for what was committed."""
    rows: list[list[Commit]] = [[] for _ in request.prompts]
    for commit in commits:
        rows[commit.row].append(commit)
    engine.stats.costs = engine.governor.to_dict()
    if engine.static is not None and engine.static.obstacle is not None:
        _, *notes = engine.stats.execution.split("; ", 1)
        engine.stats.execution = "; ".join([f"static: {engine.static.obstacle}", *notes])
    new_token_ids = [[commit.token_id for commit in row] for row in rows]
    acted = (name for name, kind in RULES.items() if isinstance(engine.context.rule, kind))
    rule = next(acted, request.acceptance_rule)  # not the one that was asked for, where trees were verified
    settings = request.settings
    pad = settings.pad_token_id if settings.pad_token_id is not None else (*settings.eos_token_id, 0)[0]
    return GenerationResult(
        sequences=_padded(request, new_token_ids, pad).to(engine.decoder.device),
        new_token_ids=new_token_ids,
        drafted=[[commit.drafted for commit in row] for row in rows],
        finish_reasons=[(row[-1].finish_reason if row else None) or "closed" for row in rows],
        stats=engine.stats,
        settings={**request.effective_settings(), "acceptance_rule": rule},
        plan=request.plan,
        tokenizer=tokenizer,
        scores=by_step([[commit.said.scores for commit in row] for row in rows], pad),
        logits=by_step([[commit.said.logits for commit in row] for row in rows], pad),
    )


def _padded(request: Request, new_token_ids: list[list[int]], pad: int) -> Tensor:
    """Prompts padded on the left (or as they came), outputs on the right, as transformers: (batch, length), int64."""
    longest = max(len(row) for row in new_token_ids)
    outputs = torch.tensor([row + [pad] * (longest - len(row)) for row in new_token_ids], dtype=torch.int64)
    return torch.cat((request.padded_prompts(pad), outputs), dim=1)
