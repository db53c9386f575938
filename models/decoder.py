"""A decoder-only model as a sequence of blocks that can be run over any range or subset.

It borrows the modules of a loaded transformers model: no weight is copied, nothing of the model is changed, and its
`forward` is never called. It knows nothing of tokens' meaning, drafting or sampling.

Shapes: token ids (batch, tokens); hidden states (batch, tokens, hidden_size); logits (batch, tokens, vocab_size).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from layerskip.errors import CheckpointError
from layerskip.models.block import Block
from layerskip.models.cache import KVCache
from layerskip.models.families import family_of, sliding_windows
from layerskip.models.linears import linear
from layerskip.models.rotary import Rotary
from layerskip.models.span import Span

__all__ = ["Decoder", "Step"]


class Step(NamedTuple):
    """One block of a path, and which of its two sub-blocks run."""

    block: int
    attention: bool = True
    mlp: bool = True


class Decoder:
    """Runs the blocks of `model` over a `KVCache`.

    Attributes:
        full_path: all blocks, whole.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Read `model`, a transformers ``…ForCausalLM``.

        Raises:
            UnsupportedModelError: its architecture, rotary scaling or layer types are not supported.
            CheckpointError: some of its weights are not loaded.
        """
        self.architecture = type(model).__name__
        family, config = family_of(self.architecture), model.config
        self.embedding = model.get_submodule(family.embedding)
        self.final_norm = model.get_submodule(family.final_norm)
        head = model.get_submodule(family.head)
        self.head = linear(head)
        self._norm_device, self._head_device = (next(each.parameters()).device for each in (self.final_norm, head))
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.max_positions: int = config.max_position_embeddings
        self.kv_heads: int = config.num_key_value_heads
        self.group = config.num_attention_heads // self.kv_heads
        self.head_dim: int = getattr(config, "head_dim", None) or self.hidden_size // config.num_attention_heads
        self.dtype: torch.dtype = next(model.get_submodule(family.embedding).parameters()).dtype
        _refuse_unloaded(model)
        layers = list(model.get_submodule(family.layers).children())
        windows = sliding_windows(config)
        self.blocks = [Block(layer, index, family, self.head_dim, windows[index]) for index, layer in enumerate(layers)]
        self.device = self.blocks[0].device
        self.full_path = tuple(Step(index) for index in range(len(self.blocks)))
        self._rotary = Rotary(model.get_submodule(family.rotary), self.dtype)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the full model."""
        return len(self.blocks)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for `batch` rows of up to `capacity` positions."""
        return KVCache(
            batch=batch,
            capacity=capacity,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            devices=[block.device for block in self.blocks],
        )

    def span(self, starts: Sequence[int], tokens: int, visible: int | None = None) -> Span:
        """The positions ``starts[b] … starts[b] + tokens - 1`` of each row `b`.

        Args:
            visible: cache slots to read, if more than the pass needs: attention over another number of slots rounds
                differently in low precision, so passes that must agree to the last bit read the same number.
        """
        return Span(
            starts,
            tokens,
            visible=visible,
            group=self.group,
            tables=self._rotary.tables,
            dtype=self.dtype,
            device=self.device,
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """Hidden states of `token_ids` before the first block."""
        hidden: Tensor = self.embedding(token_ids)
        return hidden

    def run(
        self, hidden: Tensor, path: Sequence[Step], cache: KVCache, span: Span, exact_blocks: int | None = None
    ) -> Tensor:
        """Run `hidden` through the sub-blocks of `path`, writing their keys and values of `span` into `cache`.

        Args:
            exact_blocks: how many leading blocks of the model see what they would see in a full pass (for the
                cache's own book-keeping); None: all.
        """
        for index, attention, mlp in path:
            block = self.blocks[index]
            if hidden.device != block.device:
                hidden, span = hidden.to(block.device), span.to(block.device)
            if attention:
                hidden = block.attend(hidden, cache, span)
            if mlp:
                hidden = block.transform(hidden)
        written = [step.block for step in path if step.attention]
        cache.note(written, span, self.num_blocks if exact_blocks is None else exact_blocks)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits of `hidden` by the final norm and the head, on the first block's device."""
        normed: Tensor = self.final_norm(hidden.to(self._norm_device))
        return self.head(normed.to(self._head_device)).to(self.device)


def _refuse_unloaded(model: PreTrainedModel) -> None:
    unloaded = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if unloaded:
        raise CheckpointError(
            f"got a model whose parameter {unloaded[0]!r} (and {len(unloaded) - 1} more) is on the meta device; "
            "expected loaded weights. Load it with enough memory for all of them, without disk offload."
        )
