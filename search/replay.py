"""What real drafting would accept, from one parallel pass over texts that the model has already written.

The model's own continuations are computed once, with the keys and values of every block. A candidate is then run over
all their positions at once. Each continuation is cut at anchors; a position sees the *full model's* entries before its
anchor and the *candidate's own* from the anchor on: what it would see as a draft that began at the anchor, had all
drafts before it been accepted. So the pass says, for every offset, which drafts stand, exactly as drafting one after
another would. Nothing is decoded, no clock is read. A path that trained blocks end is drafted from the same anchors by
the pass that trained it (`training/rollout.py`), so that its figures stand beside the others' text by text.

Under sampling, texts are drawn from the target. With x the text's own next token, min(1, draft_probs[x] /
target_probs[x]) has the mean sum(min(target_probs, draft_probs)), so the product of these over offsets, the last one
replaced by the sum itself, estimates without bias how often all drafts so far are accepted under the maximal rule
(`verify.py`; Leviathan et al. 2023, thm. 3.5).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerskip.drafters.self_draft import count_exact_blocks
from layerskip.errors import SearchError, SettingError
from layerskip.models.adapter import TrainedPart
from layerskip.models.cache import KVCache
from layerskip.models.decoder import Decoder, Head, Step
from layerskip.models.span import Span
from layerskip.sampling import Sampler, distribution
from layerskip.search.outcome import TextOutcome, anchors_of
from layerskip.search.texts import Text
from layerskip.speedup import overlap
from layerskip.training.rollout import rollout

__all__ = ["Replay"]

_STATE_BYTES = 1 << 30  # for the full model's hidden states, kept so that candidates start where they first differ
Norm = Callable[[Tensor], Tensor]

_HEAD_POSITIONS = 512  # scored at once: logits over a vocabulary of 256k ids take half a megabyte each


@dataclass(frozen=True)
class _Batch:
    """Some texts as rows, padded on the right.

    Attributes:
        cache: the full model's entries in the slots before `text_slots`, room for a candidate's own behind them.
        states: by block (the number of blocks: behind the last), the full model's hidden states at the positions that
            drafts start from, (batch, positions, hidden_size). Block 0 is among them.
        whole: the same as `states`, of whole texts, prompts included, (batch, slots, hidden_size): what trained blocks
            read.
        next_tokens: (batch, positions), the token of the text behind each position.
        counts: positions of each row that are not padding.
        first: index of the first text.
    """

    texts: Sequence[Text]
    first: int
    cache: KVCache
    text_slots: int
    states: dict[int, Tensor]
    whole: dict[int, Tensor]
    next_tokens: Tensor
    counts: list[int]

    @property
    def starts(self) -> list[int]:
        """Position of each row's first continuation token, from which the first draft starts."""
        return [len(text.prompt) for text in self.texts]


class Replay:
    """Texts, ready to be drafted by any path.

    Attributes:
        texts: all that are replayed.
        draft_length: drafts from each anchor, at most.
        block_passes: sub-blocks run so far, each over all positions of all texts: 1.0 is one sub-block over all.
    """

    def __init__(
        self,
        decoder: Decoder,
        texts: Sequence[Text],
        *,
        draft_length: int = 6,
        batch_positions: int = 1024,
        sampler: Sampler | None = None,
        state_bytes: int = _STATE_BYTES,
        adapters: Iterable[TrainedPart] = (),
    ) -> None:
        """Run the full model over `texts`, once.

        Args:
            batch_positions: continuation tokens that are run at once, which bounds the memory of a pass.
            sampler: that the texts were drawn with; None: greedily.
            state_bytes: of the full model's hidden states, to be kept at most.
            adapters: trained blocks that are to be replayed too; the states that they read are kept beside the others.

        Raises:
            SettingError: a draft length or a batch below 1, or no text with at least two continuation tokens.
            SearchError: the model's states are not finite.
            DecodingError: there is no memory for a batch.
        """
        for name, value in (("draft_length", draft_length), ("batch_positions", batch_positions)):
            if type(value) is not int or value < 1:
                raise SettingError(f"got {name}={value!r}; expected an integer of at least 1.")
        usable = sorted((each for each in texts if each.num_positions > 0), key=lambda each: len(each.token_ids))
        if not usable:
            raise SettingError("got no text with two continuation tokens or more; expected some to draft in.")
        self.decoder, self.sampler, self.draft_length = decoder, sampler, draft_length
        self.texts = tuple(usable)
        self.block_passes = 0.0
        self._positions = sum(each.num_positions for each in usable)
        kept = _kept_blocks(decoder, self._positions, state_bytes)
        read = frozenset(block for each in adapters for block in (each.spec.exit_layer, *each.kept_states))
        self._batches = [self._read(first, rows, kept, read) for first, rows in _batches(usable, batch_positions)]
        # Rows of one batch are of like length; whoever looks at the first batches only is to see all lengths.
        random.Random(0).shuffle(self._batches)

    @property
    def num_batches(self) -> int:
        """Parts in which texts are run."""
        return len(self._batches)

    @property
    def num_positions(self) -> int:
        """Drafts that one pass over all texts tries."""
        return self._positions

    def texts_of(self, batch: int) -> Sequence[Text]:
        """The texts of one part."""
        return self._batches[batch].texts

    def states(self, batch: int, block: int) -> Tensor:
        """The full model's hidden states before `block` (the number of blocks: behind the last) of one part.

        Returns:
            (positions, hidden_size): those of all texts in a row, padding left out.

        Raises:
            SearchError: they were not kept, for want of `state_bytes`.
        """
        part = self._batches[batch]
        if block not in part.states:
            raise SearchError(f"got no states before block {block}; expected room for them: raise state_bytes.")
        return part.states[block][_valid(part)]

    def outcomes(
        self,
        path: Sequence[Step],
        batch: int,
        head: Head | None = None,
        shift: int = 0,
        draft_length: int | None = None,
        adapter: TrainedPart | None = None,
    ) -> list[TextOutcome]:
        """Draft along `path` from every anchor of one part's texts.

        Args:
            head: that drafts are scored with; None: the model's own.
            shift: moves the anchors on by so many positions; over `draft_length` successive shifts every position is
                an anchor, and at every offset once (the first few positions, in drafts cut short, more often at low
                ones).
            draft_length: another than the replay's own.
            adapter: trained blocks by which the path ends, one of those that the replay was made for.

        Raises:
            SearchError: the path's logits are not finite, or the states that `adapter` reads were not kept.
        """
        length = self.draft_length if draft_length is None else draft_length
        with torch.inference_mode():
            part = self._batches[batch]
            # Texts differ in where their anchors lie, so that the start of an answer is not always at offset 0.
            anchors = [anchors_of(count, length, part.first + row + shift) for row, count in enumerate(part.counts)]
            if adapter is None:
                hidden, norm = self._run(path, part, anchors), None
            else:
                hidden, norm = self._run_trained(adapter, part, anchors, length), adapter.final_norm
            stands, shared = self._score(hidden[_valid(part)], part, head, norm)
            return [
                TextOutcome(mine, overlaps, each)
                for mine, overlaps, each in zip(
                    stands.split(part.counts), shared.split(part.counts), anchors, strict=True
                )
            ]

    def run_sub_block(
        self, batch: int, step: Step, hidden: Tensor, shift: int = 0, draft_length: int | None = None
    ) -> Tensor:
        """Run the sub-blocks of one block on `hidden` (batch, positions, hidden_size) at one part's positions.

        For methods that build a path block by block. Each block's own entries from the last such call are replaced.
        Where both sub-blocks of a block read its input (`Family.parallel`), one behind the other comes near it only.

        Args:
            draft_length: another than the replay's own; 1: every position sees the full model's entries and itself.
        """
        length = self.draft_length if draft_length is None else draft_length
        with torch.inference_mode():
            part = self._batches[batch]
            anchors = [anchors_of(count, length, part.first + row + shift) for row, count in enumerate(part.counts)]
            return self._pass([step], part, hidden, self._span(part, anchors))

    def padded_states(self, batch: int, block: int) -> Tensor:
        """As `states`, row by row with padding: (batch, positions, hidden_size), for `run_sub_block`."""
        self.states(batch, block)
        return self._batches[batch].states[block]

    def _run(self, path: Sequence[Step], part: _Batch, anchors: Sequence[Tensor]) -> Tensor:
        """Hidden states behind `path`: the leading blocks that it runs whole see what the full model saw."""
        exact = max(block for block in part.states if block <= count_exact_blocks(path))
        rest = path[exact:]
        return self._pass(rest, part, part.states[exact], self._span(part, anchors)) if rest else part.states[exact]

    def _pass(self, steps: Sequence[Step], part: _Batch, hidden: Tensor, span: Span) -> Tensor:
        share = sum(part.counts) / self._positions
        self.block_passes += share * sum(step.attention + step.mlp for step in steps)
        return self.decoder.run(hidden, steps, part.cache, span)

    def _run_trained(self, adapter: TrainedPart, part: _Batch, anchors: Sequence[Tensor], draft_length: int) -> Tensor:
        """What trained blocks put out at each position, as drafted from its anchor: (batch, positions, hidden_size)."""
        first = min(part.starts)
        if not {adapter.spec.exit_layer, *adapter.kept_states} <= part.whole.keys():
            raise SearchError("got trained blocks that this replay was not made for; expected one of its `adapters`.")
        offsets = min(draft_length, max(part.counts))
        share = sum(part.counts) / self._positions
        self.block_passes += share * 2 * adapter.spec.num_blocks * offsets
        outputs = torch.stack(
            rollout(self.decoder, adapter, part.whole, offsets, first)
        )  # (offsets, batch, slots - first, hidden_size)
        index = torch.arange(part.next_tokens.shape[1])
        offset = (index - _padded(anchors, len(index))).clamp(0, offsets - 1)
        where = (torch.tensor(part.starts)[:, None] - first + index).clamp(max=outputs.shape[2] - 1)
        return outputs[offset, torch.arange(len(anchors))[:, None], where]

    def _span(self, part: _Batch, anchors: Sequence[Tensor]) -> Span:
        """The positions to replay, their entries written behind the text's."""
        width, slots = part.next_tokens.shape[1], part.text_slots
        padded = _padded(anchors, width)
        starts = torch.tensor(part.starts)
        return self.decoder.span(
            part.starts, width, slots + width, slots, lambda window: hidden_slots(starts, padded, slots, window)
        )

    def _score(self, hidden: Tensor, part: _Batch, head: Head | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """`TextOutcome.stands` and `overlap` of `hidden` (positions, hidden_size), for all texts in a row."""
        next_tokens = part.next_tokens[_valid(part)]
        finals = part.states[self.decoder.num_blocks][_valid(part)] if self.sampler is not None else hidden
        scored = [
            self._score_some(some, finals_of_some, following, head, norm)
            for some, finals_of_some, following in zip(
                *(each.split(_HEAD_POSITIONS) for each in (hidden, finals, next_tokens)), strict=True
            )
        ]
        stands, shared = (torch.cat(each).to("cpu", torch.float64) for each in zip(*scored, strict=True))
        return stands, shared

    def _score_some(
        self, hidden: Tensor, finals: Tensor, next_tokens: Tensor, head: Head | None, norm: Norm | None
    ) -> tuple[Tensor, Tensor]:
        logits = self.decoder.logits(hidden[None], head, norm)
        best = logits.max(dim=-1)
        if not best.values.isfinite().all():
            raise SearchError(
                "got draft logits that are NaN or infinite, so no draft can be judged. Load the model in float32 or "
                "bfloat16 (float16 overflows in some models)."
            )
        vocabulary = None if head is None else head.vocabulary
        if self.sampler is None:
            drafts = best.indices[0] if vocabulary is None else vocabulary[best.indices[0]]
            stands = drafts == next_tokens
            return stands, stands
        target_logits = self.decoder.logits(finals[None])
        if vocabulary is not None:
            everywhere = logits.new_full(target_logits.shape, float("-inf"))
            logits = everywhere.index_copy_(2, vocabulary, logits)
        prefixes = next_tokens[None, :0]
        draft_probs, _ = distribution(self.sampler.scores(logits, prefixes, [0]))
        target_probs, _ = distribution(self.sampler.scores(target_logits, prefixes, [0]))
        drafted, targeted = (probs.gather(2, next_tokens[None, :, None]) for probs in (draft_probs, target_probs))
        # By rounding, top-k and the like may leave out here what they did not when the text was drawn.
        ratio = torch.where(targeted > 0, drafted / targeted, (drafted > 0).to(drafted.dtype))
        return ratio.clamp(max=1).flatten(), overlap(target_probs, draft_probs).flatten()

    def _read(self, first: int, texts: Sequence[Text], kept: frozenset[int], read: frozenset[int]) -> _Batch:
        """Run the full model over some texts, keeping what candidates need of it.

        Args:
            kept, read: blocks before which states are kept: of the positions that are replayed, and of whole texts.
        """
        decoder, batch = self.decoder, len(texts)
        slots, positions = max(len(text.token_ids) for text in texts), max(text.num_positions for text in texts)
        token_ids = torch.zeros((batch, slots), dtype=torch.int64, device=decoder.device)
        for row, text in enumerate(texts):
            token_ids[row, : len(text.token_ids)] = torch.tensor(text.token_ids)
        cache, span = decoder.new_cache(batch, slots + positions), decoder.span([0] * batch, slots)
        starts = torch.tensor([len(text.prompt) for text in texts], device=decoder.device)
        where = starts[:, None] + torch.arange(positions, device=decoder.device)
        rows = torch.arange(batch, device=decoder.device)[:, None]
        at_queries = where.clamp(max=slots - 1)
        with torch.inference_mode():
            hidden, states, whole = decoder.embed(token_ids, span), {}, {}
            for step in (*decoder.full_path, None):
                block = decoder.num_blocks if step is None else step.block
                if block in kept:
                    states[block] = hidden[rows, at_queries]
                if block in read:
                    whole[block] = hidden
                if step is not None:
                    hidden = decoder.run(hidden, [step], cache, span)
            if not states[decoder.num_blocks].isfinite().all():
                raise SearchError(
                    "got hidden states that are NaN or infinite from the full model. Load it in float32 or bfloat16 "
                    "(float16 overflows in some models)."
                )
            next_tokens = token_ids[rows, (where + 1).clamp(max=slots - 1)]
        return _Batch(texts, first, cache, slots, states, whole, next_tokens, [text.num_positions for text in texts])


def hidden_slots(starts: Tensor, anchors: Tensor, text_slots: int, window: int | None) -> Tensor:
    """What positions that are replayed must not see: of the text all from their anchor on, of the candidate's own all
    before it and all behind themselves.

    Args:
        starts: (batch,), int64, of each row's first position.
        anchors: (batch, positions), int64, index of the position where each position's draft began.
        text_slots: slots of the text itself; the candidate's own lie behind them.

    Returns:
        (batch, 1, positions, text_slots + positions), bool.
    """
    text, index = torch.arange(text_slots), torch.arange(anchors.shape[1])
    of_text = text >= (starts[:, None] + anchors)[:, :, None]
    own = (index > index[:, None]) | (index < anchors[:, :, None])
    if window is not None:
        of_text = of_text | (text <= (starts[:, None] + index)[:, :, None] - window)
        own = own | (index <= index[:, None] - window)
    return torch.cat((of_text, own), dim=-1).unsqueeze(1)


def _padded(anchors: Sequence[Tensor], width: int) -> Tensor:
    """`anchors_of` some rows as one tensor, (batch, width), int64."""
    return torch.stack([torch.cat((each, each.new_full((width - len(each),), len(each)))) for each in anchors])


def _valid(part: _Batch) -> Tensor:
    """(batch, positions), bool: what is not padding."""
    counts = torch.tensor(part.counts, device=part.next_tokens.device)
    return torch.arange(part.next_tokens.shape[1], device=counts.device) < counts[:, None]


def _batches(texts: Sequence[Text], batch_positions: int) -> Iterator[tuple[int, Sequence[Text]]]:
    """Neighbours of `texts`, together at most `batch_positions`, or one text alone."""
    first = 0
    while first < len(texts):
        last, longest = first, 0
        while last < len(texts):
            longest = max(longest, texts[last].num_positions)
            if last > first and longest * (last + 1 - first) > batch_positions:
                break
            last += 1
        yield first, texts[first:last]
        first = last


def _kept_blocks(decoder: Decoder, positions: int, state_bytes: int) -> frozenset[int]:
    """Blocks before which hidden states are kept: all, or evenly spread ones; always the first, and behind the last."""
    width = decoder.embedding.weight.shape[1] * decoder.dtype.itemsize
    room = max(2, state_bytes // max(1, positions * width))
    stride = max(1, -(-decoder.num_blocks // (room - 1)))
    return frozenset((*range(0, decoder.num_blocks, stride), decoder.num_blocks))
