"""A decoder-only model as a sequence of blocks that can be run over any range or subset.

It borrows the modules of a loaded transformers model: no weight is copied, nothing of the model is changed, and its
`forward` is never called. It knows nothing of tokens' meaning, drafting or sampling.

Shapes: token ids (batch, tokens); hidden states (batch, tokens, hidden_size); logits (batch, tokens, vocab_size).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from layerskip.errors import SettingError, UnsupportedModelError
from layerskip.models.block import Block
from layerskip.models.borrowed import BorrowedModules
from layerskip.models.cache import KVCache
from layerskip.models.families import family_of, geometry_of, layers_of
from layerskip.models.family import Family
from layerskip.models.linears import Linears, versions
from layerskip.models.norms import norm, refresh
from layerskip.models.preparation import Preparation, prepare_linears
from layerskip.models.rotary import Rotary
from layerskip.models.span import HiddenSlots, Span
from layerskip.models.stored import device_of, plain_parts
from layerskip.models.tree import Tree

__all__ = ["Decoder", "Forward", "Head", "Step"]


_KEPT_HEADS = 4  # partial heads; each is a copy of some rows of the matrix


class Step(NamedTuple):
    """One block of a path, and which of its two sub-blocks run."""

    block: int
    attention: bool = True
    mlp: bool = True


class Head(NamedTuple):
    """What turns a final hidden state into logits.

    Attributes:
        linears: the projection.
        vocabulary: (ids,), int64, ascending: the token ids that its outputs belong to; None: all, in order.
        is_cut: the projection gives the logits of all ids, of which those of `vocabulary` are to be taken.
    """

    linears: Linears
    vocabulary: Tensor | None = None
    is_cut: bool = False


class Forward(Protocol):
    """Runs passes of fixed shapes: `Decoder.forward`, or what stands for it."""

    def __call__(
        self,
        token_ids: Tensor,
        starts: Tensor,
        visible: int,
        cache: KVCache,
        path: Sequence[Step] | None = None,
        head: Head | None = None,
    ) -> Tensor:
        """See `Decoder.forward`."""
        ...


class Decoder:
    """Runs the blocks of `model` over a `KVCache`.

    Attributes:
        full_path: all blocks, whole.
        full_head: the model's own.
        numbers: factors and bounds of the model.
        is_watched: some of its modules have hooks.
        is_spread: its blocks lie on several devices.
        preparation: what `prepare` has done so far.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Read `model`, a transformers ``…ForCausalLM``.

        Raises:
            UnsupportedModelError: its architecture, rotary scaling or layer types are not supported, or hooks on
                whole layers would not act.
            CheckpointError: some of its weights are not loaded.
        """
        self.architecture = type(model).__name__
        family, geometry = family_of(self.architecture, model.config), geometry_of(model.config)
        self.numbers = family.numbers(model.config)
        self._modules = BorrowedModules(model)
        take: Callable[[str], Any] = self._modules.take
        self.embedding, final_norm, head = take(family.embedding), take(family.final_norm), take(family.head)
        self.final_norm, self.full_head = norm(final_norm), Head(Linears(head))
        self._norm_device, self._head_device = (device_of(each) for each in (final_norm, head))
        self.vocab_size, self.max_positions = geometry.vocab_size, geometry.max_positions
        self.group, self.kv_heads, self.head_dim = geometry.group, geometry.kv_heads, geometry.head_dim
        self.hidden_size = geometry.hidden_size
        self.dtype: torch.dtype = next(self.embedding.parameters()).dtype
        layers = layers_of(model.config, family)
        self.blocks = [
            Block(self._modules.within(f"{family.layers}.{each.index}"), each, family, geometry, self.numbers)
            for each in layers
        ]
        self.device = self.blocks[0].device
        self.is_spread = len({block.device for block in self.blocks}) > 1
        self.full_path = tuple(Step(index) for index in range(len(self.blocks)))
        self._positions: Tensor | None = take(family.positions) if family.positions else None
        self._position_offset = family.position_offset
        self._rotary = self._read_rotary(family, {each.rotary for each in layers})
        self._is_tied = getattr(head, "weight", head) is self.embedding.weight
        self._linears = [self.full_head.linears, *(group for block in self.blocks for group in block.linears)]
        self._partial_heads: dict[Hashable, Head] = {}
        self.preparation = Preparation()
        self._modules.refuse_bypassed()
        self.is_watched = self._modules.is_watched

    def _read_rotary(self, family: Family, kinds: Iterable[str | None]) -> dict[str, Rotary]:
        """The tables that layers use, by their kind."""
        dtype = torch.promote_types(self.dtype, torch.float32) if family.rotary_tables_float32 else self.dtype
        return {
            kind: Rotary(self._modules.take(family.rotary), dtype, kind, pairs=family.rotary_pairs)
            for kind in kinds
            if kind is not None and family.rotary is not None
        }

    def refuse_changes(self) -> None:
        """Make sure that the model still consists of the modules that were read; cheap, for the start of a call.

        Raises:
            UnsupportedModelError: a module was replaced or hooked, or the model was moved or cast.
        """
        self._modules.refuse_changes()
        if any(group.is_stale() for group in self._linears):
            raise UnsupportedModelError(
                "got a model with other weights than those it was wrapped with, or with changes to weights that "
                "prepare() had copied; they would not act. Wrap it again, and prepare it after the last change."
            )
        for each in (self.final_norm, *(each for block in self.blocks for each in block.norms)):
            refresh(each)

    @torch.inference_mode(False)
    @torch.no_grad()
    def prepare(self, *, pack: bool | None = None, in_place: bool = False, huge_pages: bool = True) -> Preparation:
        """Make the linears faster; arguments and errors as in `prepare_linears`. Not while something is decoding."""
        self.refuse_changes()
        if self.preparation != Preparation():
            return self._prepared_before(pack)
        if in_place and self.device.type == "cpu":
            self._modules.leave_file()
        shared = [self.full_head.linears] if self._is_tied else []
        self._partial_heads.clear()
        self.preparation = prepare_linears(self._linears, shared, pack=pack, in_place=in_place, huge_pages=huge_pages)
        return self.preparation

    def _prepared_before(self, pack: bool | None) -> Preparation:
        is_packed = self.preparation.packed > 0
        if pack is not None and pack != is_packed:
            raise SettingError(
                f"got pack={pack} for weights that were prepared before {'with' if is_packed else 'without'} packing; "
                "what is prepared stays as it is. Wrap the model anew, or load it with prepare=False."
            )
        return self.preparation

    @torch.inference_mode(False)
    @torch.no_grad()
    def restore_weights(self) -> None:
        """Give the model's modules back the weights that `prepare` released, for those who use the model itself."""
        for group in self._linears:
            group.restore()
        copied = sum(group.copied_bytes for group in self._linears)
        self.preparation = replace(self.preparation, extra_bytes=copied)

    def rotary_tables(self, kind: str, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """See `Rotary.tables`; those of that kind of layers (see `Layer`)."""
        return self._rotary[kind].tables(length, device)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the full model."""
        return len(self.blocks)

    def new_cache(self, batch: int, capacity: int, further_blocks: int = 0, kept_states: Sequence[int] = ()) -> KVCache:
        """An empty cache for `batch` rows of up to `capacity` positions.

        Args:
            further_blocks: blocks beside the model's own, on its last block's device.
            kept_states: hidden states to keep, by the number of blocks behind them (from 1).
        """
        own = [block.device for block in self.blocks]
        return KVCache(
            batch=batch,
            capacity=capacity,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            devices=[*own, *([own[-1]] * further_blocks)],
            further_blocks=further_blocks,
            kept_states={behind: (self.hidden_size, own[behind - 1]) for behind in kept_states},
        )

    def span(
        self,
        starts: Sequence[int] | Tensor,
        tokens: int,
        visible: int | None = None,
        slot: int | None = None,
        hidden_slots: HiddenSlots | None = None,
        tree: Tree | None = None,
    ) -> Span:
        """The positions ``starts[b] … starts[b] + tokens - 1`` of each row `b`.

        Args:
            starts: numbers, or (batch,), int64, on the first block's device (see `Span`).
            visible: cache slots to read, if more than the pass needs: attention over another number of slots rounds
                differently in low precision, so passes that must agree to the last bit read the same number.
            slot, hidden_slots, tree: see `Span`.
        """
        return Span(
            starts,
            tokens,
            visible=visible,
            group=self.group,
            tables=self.rotary_tables,
            dtype=self.dtype,
            device=self.device,
            slot=slot,
            hidden_slots=hidden_slots,
            tree=tree,
        )

    def embed(self, token_ids: Tensor, span: Span | None = None) -> Tensor:
        """Hidden states of `token_ids` before the first block.

        Args:
            span: their positions; may be left out only where the model has none to learn.
        """
        hidden: Tensor = self.embedding(token_ids)
        if self.numbers.embedding_scale is not None:
            hidden = hidden * self.numbers.embedding_scale
        if self._positions is not None:
            assert span is not None, "got no positions for a model that embeds them"
            # Those beyond the last are of padding.
            rows = (span.positions + self._position_offset).clamp(max=len(self._positions) - 1)
            hidden = hidden + F.embedding(rows.to(hidden.device), self._positions)
        return hidden.to(self.device)

    def run(
        self, hidden: Tensor, path: Sequence[Step], cache: KVCache, span: Span, exact_blocks: int | None = None
    ) -> Tensor:
        """Run `hidden` through the sub-blocks of `path`, writing their keys and values of `span` into `cache`.

        Args:
            exact_blocks: how many leading blocks of the model see what they would see in a full pass (for the
                cache's own book-keeping); None: all.
        """
        noted, tokens = span, hidden.shape[1]
        if self._is_slow(hidden):
            span = span.widened(1, min(cache.capacity, self.max_positions))
            hidden = F.pad(hidden, (0, 0, 0, span.tokens - tokens))
        for index, attention, mlp in path:
            block = self.blocks[index]
            if self.is_spread:
                hidden, span = hidden.to(block.device), span.to(block.device)
            hidden = block.run(hidden, cache, span, attention, mlp)
            cache.keep(index + 1, hidden, span)
        written = [step.block for step in path if step.attention]
        cache.note(written, noted, self.num_blocks if exact_blocks is None else exact_blocks)
        return hidden[:, :tokens]

    def forward(
        self,
        token_ids: Tensor,
        starts: Tensor,
        visible: int,
        cache: KVCache,
        path: Sequence[Step] | None = None,
        head: Head | None = None,
    ) -> Tensor:
        """A pass of fixed shapes, which asks the device for nothing: the logits behind each of `token_ids`.

        Args:
            starts: (batch,), int64, on the first block's device: where the tokens of each row begin.
            visible: cache slots to read.
            path: None: `full_path`.
            head: None: the full one.

        Returns:
            (batch, tokens, ids). The cache keeps no books about such passes (`KVCache.note`).
        """
        span = self.span(starts, token_ids.shape[1], visible)
        hidden = self.run(self.embed(token_ids, span), self.full_path if path is None else path, cache, span)
        return self.logits(hidden, head)

    def weights_state(self) -> Hashable:
        """Equal as long as nobody has written to the weights; but for those that are packed, where that is refused."""
        packed = {id(each) for group in self._linears if group.is_packed for module in group.modules
                  for each in module.parameters()}  # fmt: skip
        tensors = [part for each in self._modules.parameters if id(each) not in packed for part in plain_parts(each)]
        return tuple(versions(tensors)), self.switches()

    def switches(self) -> Hashable:
        """See `BorrowedModules.switches`."""
        return self._modules.switches()

    @torch.inference_mode(False)
    @torch.no_grad()
    def partial_head(self, vocabulary: tuple[int, ...]) -> Head:
        """A head that scores only the ids in `vocabulary` (ascending), with a copy of their rows of the matrix.

        The newest few are kept, so that a plan that is used again costs nothing.
        """
        full = self.full_head.linears
        key = (vocabulary, *full.state())  # weights that are shared may be written to
        head = self._partial_heads.pop(key, None)
        if head is None:
            ids = torch.tensor(vocabulary, device=self._head_device)
            can_be_read = full.is_plain
            head = Head(full.rows(ids) if can_be_read else full, ids.to(self.device), is_cut=not can_be_read)
            for oldest in list(self._partial_heads)[: 1 - _KEPT_HEADS]:
                self._partial_heads.pop(oldest, None)
        self._partial_heads[key] = head  # as the newest
        return head

    def logits(
        self, hidden: Tensor, head: Head | None = None, norm: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Next-token logits of `hidden` by `norm` and `head`, on the first block's device.

        Args:
            head: None: the full one.
            norm: None: the model's final norm.

        Returns:
            (batch, tokens, ids).
        """
        head = self.full_head if head is None else head
        tokens = hidden.shape[1]
        if self._is_slow(hidden):
            hidden = F.pad(hidden, (0, 0, 0, 1))
        normed = (norm or self.final_norm)(hidden.to(self._norm_device))
        logits = self.numbers.finish(head.linears(normed.to(self._head_device)).to(self.device)[:, :tokens])
        return logits[..., head.vocabulary] if head.is_cut else logits

    def _is_slow(self, hidden: Tensor) -> bool:
        """Whether one more position would make it faster: packed linears take an eighth longer for two rows."""
        return self.preparation.packed > 0 and hidden.shape[0] * hidden.shape[1] == 2
