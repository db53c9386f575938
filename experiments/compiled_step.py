"""What would `torch.compile` make of a plain step? The answer bounds what an option for it could give.

    python -m experiments.compiled_step --model "$(layerskip reference)"

One step of a Llama in one graph, written for the purpose (no objects of ours, a mask over all slots, frozen weights),
compiled with `max_autotune`, in turn with ours with packed weights behind the same context; and the seconds that
compiling took, for one width of a pass. It knows Llama only and is no way to decode.

The last line is one JSON document, which is also appended to the results file.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch._inductor.config as inductor
import torch.nn.functional as F
from torch import Tensor

import layerskip
from experiments.conditions import conditions
from experiments.measuring import interleaved
from experiments.report import append
from experiments.step_profile import CONTEXT, our_step, prepared, step_options

__all__ = ["main"]

SLOTS = 512  # cache slots of the compiled step


class WholeStep:
    """A step as pure tensor code over the modules of `model`."""

    def __init__(self, model: layerskip.Model) -> None:
        """`model`: not prepared, so that its weights are ordinary ones."""
        decoder, self._hf = model.decoder, model._hf_model
        self._eps = self._hf.config.rms_norm_eps
        self._heads, self._kv_heads, self._size = decoder.group * decoder.kv_heads, decoder.kv_heads, decoder.head_dim
        shape = (1, 2 * self._kv_heads, SLOTS, self._size)
        self._cache = [torch.zeros(shape, dtype=decoder.dtype) for _ in decoder.blocks]

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        """Logits (1, 1, vocab) of the token at `position`."""
        body: Any = self._hf.model
        for layer, cache in zip(body.layers, self._cache, strict=True):
            attention, normed = layer.self_attn, self._norm(hidden, layer.input_layernorm.weight)
            heads = [
                F.linear(normed, each.weight).view(1, 1, -1, self._size)
                for each in (attention.q_proj, attention.k_proj, attention.v_proj)
            ]
            queries, keys = (each * cos + each.roll(self._size // 2, -1) * sin for each in heads[:2])
            cache[:, : self._kv_heads].index_copy_(2, position, keys.transpose(1, 2))
            cache[:, self._kv_heads :].index_copy_(2, position, heads[2].transpose(1, 2))
            folded = queries.reshape(1, self._kv_heads, -1, self._size)
            seen = cache[:, : self._kv_heads], cache[:, self._kv_heads :]
            mixed = F.scaled_dot_product_attention(folded, *seen, attn_mask=mask).reshape(1, 1, -1)
            hidden = hidden + F.linear(mixed, attention.o_proj.weight)
            normed, mlp = self._norm(hidden, layer.post_attention_layernorm.weight), layer.mlp
            gated = F.silu(F.linear(normed, mlp.gate_proj.weight)) * F.linear(normed, mlp.up_proj.weight)
            hidden = hidden + F.linear(gated, mlp.down_proj.weight)
        head: Any = self._hf.lm_head
        return F.linear(self._norm(hidden, body.norm.weight), head.weight)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        wide = hidden.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)).to(hidden.dtype)


@torch.no_grad()
def main() -> None:
    """Compile, time in turn, print and append."""
    options = step_options(__doc__, "compiled_step")
    torch.set_num_threads(options.threads)
    plain, packed = prepared(options.model, options.dtype), prepared(options.model, options.dtype, huge_pages=True)
    decoder = plain.decoder
    cos, sin = (table[None, CONTEXT : CONTEXT + 1, None] for table in decoder._rotary.tables(SLOTS, decoder.device))
    mask = torch.zeros(SLOTS, dtype=decoder.dtype).masked_fill_(torch.arange(SLOTS) > CONTEXT, float("-inf"))
    inputs = (
        decoder.embed(torch.tensor([[5]])), cos, sin, torch.tensor([CONTEXT]), mask.expand(1, 1, decoder.group, SLOTS)
    )  # fmt: skip
    step, began = WholeStep(plain), time.perf_counter()
    with inductor.patch(freezing=True, max_autotune=True):
        compiled = torch.compile(step, fullgraph=True, dynamic=False)
        compiled(*inputs)
    compiling_s = time.perf_counter() - began
    ours = our_step(packed)

    def our_program() -> None:
        with torch.inference_mode():
            ours()

    programs = {"ours, packed": our_program, "compiled": lambda: compiled(*inputs).max(dim=-1).indices.tolist()}
    seconds = interleaved(decoder.device, programs, options.repeats)
    for name, lap in seconds.items():
        print(f"{name}: {1e3 * lap:.1f} ms")
    print(f"ours ÷ compiled: {seconds['ours, packed'] / seconds['compiled']:.2f}; compiling took {compiling_s:.0f} s")
    document = {
        "experiment": "compiled_step",
        "conditions": conditions(plain, []),
        "context": CONTEXT,
        "slots": SLOTS,
        "step_s": seconds,
        "compiling_s": compiling_s,
    }
    append(options.results, document)


if __name__ == "__main__":
    main()
