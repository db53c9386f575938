"""Tiny models whose drafts are accepted often: their later layers change little.

A random model rejects nearly every draft of its own; here rounds of every outcome occur. The layers still matter:
leaving them out changes some tokens.
"""

import copy
import functools

import torch
from transformers import PreTrainedModel

from tests.tiny_models import tiny_model


@functools.cache
def agreeing_model(family: str, scale: float = 0.2) -> PreTrainedModel:
    """`tiny_model(family)` with what each layer but the first adds scaled by `scale`; treat it as read-only."""
    model = copy.deepcopy(tiny_model(family))
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            for output in (layer.self_attn.o_proj, layer.mlp.down_proj):
                for parameter in output.parameters():
                    parameter.mul_(scale)
    return model
