"""Where two greedy outputs part, and whether a near-tie explains it.

In bfloat16 a pass over several tokens rounds differently from a pass over one, so drafting may change a greedy output
where the target's first two choices are closer to each other than its logits are exact. Anything else is an error.
(With ``pass_width`` every pass has the same shape, and the outputs are equal to the last bit.)

How exact the logits are is measured, not derived: each is rounded once to its own dtype, but what it is made of has
been rounded in every block before. On SmolLM2 they are off by up to four times their own rounding step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from layerskip.models.decoder import Decoder

__all__ = ["Difference", "first_difference", "rounding_step"]

_LIKELIEST = 100  # tokens whose logits are compared between the two dtypes


@dataclass(frozen=True)
class Difference:
    """The first position at which two outputs of one prompt differ.

    Attributes:
        index: of the position among the new tokens.
        token_a, token_b: what stands there; None: that output has ended.
        gap: how far the less likely of the two lies below the target's best logit, computed in `reference_dtype`. If
            the two are the target's first and second choice, this is the gap between them.
        logit_error: the largest difference that `dtype` makes to any of the 100 likeliest tokens' logits.
        rounding_step: between neighbouring numbers of `dtype` at the magnitude of the best logit.
        dtype, reference_dtype: the model's, and the wider one in which the logits were computed again.
    """

    index: int
    token_a: int | None
    token_b: int | None
    gap: float
    logit_error: float
    rounding_step: float
    dtype: torch.dtype
    reference_dtype: torch.dtype

    @property
    def is_near_tie(self) -> bool:
        """Whether the two tokens change places if each logit is off by what `dtype` makes it off here.

        An output that only ends earlier than the other has lost tokens: no rounding does that.
        """
        if self.token_a is None or self.token_b is None:
            return False
        return self.gap <= max(2 * self.logit_error, self.rounding_step)


def first_difference(
    model: PreTrainedModel, prompt_ids: Sequence[int], a: Sequence[int], b: Sequence[int]
) -> Difference | None:
    """Compare two greedy outputs of `model` (``layerskip.Model.hf_model``); None: they are equal.

    If they differ, the model runs over the tokens before the difference twice more, in its own dtype and in float32 (a
    float32 model: in float64). For that long a copy of its weights in the wider dtype is in memory.

    Args:
        prompt_ids: the prompt's token ids.
        a, b: the new token ids of the two outputs, decoded without processors that change the order of logits.
    """
    shared = min(len(a), len(b))
    index = next((place for place in range(shared) if a[place] != b[place]), shared)
    if index == len(a) == len(b):
        return None
    tokens = [output[index] if index < len(output) else None for output in (a, b)]
    reference_dtype = torch.float32 if model.dtype.itemsize < 4 else torch.float64
    prefix = [*prompt_ids, *a[:index]]
    logits = _next_logits(Decoder(_copy(model, reference_dtype)), prefix)
    likeliest = logits.topk(min(_LIKELIEST, len(logits))).indices
    errors = (_next_logits(Decoder(model), prefix).to(reference_dtype) - logits)[likeliest].abs()
    best = logits.max().item()
    return Difference(
        index=index,
        token_a=tokens[0],
        token_b=tokens[1],
        gap=max(best - logits[token].item() for token in tokens if token is not None),
        logit_error=errors.max().item(),
        rounding_step=rounding_step(best, model.dtype),
        dtype=model.dtype,
        reference_dtype=reference_dtype,
    )


def rounding_step(value: float, dtype: torch.dtype) -> float:
    """Distance between neighbouring numbers of `dtype` at the magnitude of `value`."""
    if value == 0:
        return torch.finfo(dtype).smallest_normal
    return float(torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(abs(value))))


def _copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    wide: Any = copy.deepcopy(model)
    return cast(PreTrainedModel, wide.to(dtype))


@torch.no_grad()
def _next_logits(decoder: Decoder, token_ids: Sequence[int]) -> Tensor:
    """Logits (vocab,) behind `token_ids`."""
    cache = decoder.new_cache(1, len(token_ids))
    span = decoder.span([0], len(token_ids))
    hidden = decoder.embed(torch.tensor([token_ids], device=decoder.device), span)
    hidden = decoder.run(hidden, decoder.full_path, cache, span)
    return decoder.logits(hidden[:, -1:])[0, 0]
