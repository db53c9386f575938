"""Rounds of fixed shapes whose lengths live on the device, so that each is recorded once and then only started.

On a GPU an eager pass is bound by the host, which launches some thousand kernels one by one. Here drafting is one
recorded program and verification with acceptance another; a round starts them and reads one small tensor back. Programs
read the committed lengths from the device; they are recorded for each number of drafts and for each number of cache
slots read, in steps, so that a short text does not pay for a long cache. Nothing in them depends on a token's value.

Whether a program is recorded or simply run is the business of `recording.py`; whether the passes in it are compiled,
that of `compiled.py`. All else is the same on a CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from layerskip.compiled import CompiledForward
from layerskip.draft import Draft
from layerskip.drafters.base import DraftContext, Recordable
from layerskip.models.decoder import Decoder, Forward
from layerskip.recording import Recorder
from layerskip.state import DecodeState

__all__ = ["StaticRounds", "tier_of"]

TIERS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # numbers of drafts that are recorded; others are padded to the next
PATIENCE = 16  # rounds that a compiled pass over more tokens serves before one over fewer is compiled
SLOTS = 256  # cache slots that are read at least; twice, four times, … as many when the text is longer


def tier_of(count: int, tiers: Sequence[int] = TIERS) -> int:
    """The least of `tiers`, recorded numbers of drafts, that holds `count`; above them every 16th."""
    return next((tier for tier in tiers if tier >= count), -(-count // 16) * 16)


class StaticRounds:
    """Drafts and verifies the rows of one state."""

    def __init__(
        self,
        decoder: Decoder,
        state: DecodeState,
        context: DraftContext,
        recorder: Recorder,
        compiled: CompiledForward | None = None,
        verified: Sequence[int] = TIERS,
    ) -> None:
        """`state` and all that the context holds must stay where they are in memory.

        Args:
            compiled: runs the passes, which then read all slots of the cache; None: the decoder.
            verified: numbers of drafts that are verified; others are padded to the next.
        """
        self.decoder, self.state, self.context, self.recorder = decoder, state, context, recorder
        self._compiled, self._verified = compiled, verified
        self._forward: Forward = decoder.forward if compiled is None else compiled
        self._inputs: dict[tuple[int, bool], Draft] = {}
        self._tiers: dict[Hashable, set[int]] = {}  # that were recorded, by what
        self._asked: Counter[Hashable] = Counter()
        self._patience = 1 if compiled is None else PATIENCE

    @property
    def count(self) -> int:
        """Programs recorded and compiled so far."""
        return self.recorder.count + (0 if self._compiled is None else self._compiled.count)

    @property
    def obstacle(self) -> str | None:
        """Why some program was not recorded or compiled."""
        return (self._compiled.obstacle if self._compiled is not None else None) or self.recorder.obstacle

    def draft(self, name: str, drafter: Recordable, limits: Sequence[int]) -> Draft:
        """Draft with `drafter`, in every row as many as the longest limit or a tier above it."""
        visible = self._visible(tier_of(max(limits)))
        count = self._tier(("draft", name), max(limits), visible)
        tokens, probs, confidences = self.recorder(
            ("draft", name, count, visible), lambda: drafter.steps(self.state, count, visible, self._forward)
        )
        drafter.note_steps(self.state)
        num_drafted = list(limits)
        if self.context.confidence_threshold > 0:
            for row, sure in enumerate(confidences.tolist()):
                unsure = (offset for offset, each in enumerate(sure) if each < self.context.confidence_threshold)
                # Behind the first unsure token, as where drafting stops there; later ones were not looked at.
                num_drafted[row] = min(num_drafted[row], 1 + next(unsure, count))
        # Without the padding: verification has tiers of its own. And copied, because programs share their memory:
        # verification may overwrite what drafting returned.
        longest = max(limits)
        probs = None if probs is None else probs[:, :longest]
        return Draft(tokens[:, :longest].clone(), num_drafted, probs, steps=count)

    def verify(self, draft: Draft) -> tuple[Tensor, int]:
        """One pass of the full model over the newest token and the drafts, and what it decides.

        Returns:
            (batch, 3): accepted drafts, the token behind them, and the number of valid positions; the token is also
            written behind the row's committed ones. And the tokens that the pass covered, padding included.
        """
        width, has_probs = draft.tokens.shape[1], draft.probs is not None
        visible = self._visible(tier_of(width))
        drafts = self._tier(("verify", has_probs), width, visible, self._verified)
        inputs = self._take(draft, drafts)
        key = ("verify", drafts, visible, has_probs)
        (decided,) = self.recorder(key, lambda: (self._verify(inputs, visible),))
        newest = [length - 1 for length in self.state.lengths]
        written = self.decoder.span(newest, drafts + 1)
        self.state.cache.note(range(self.decoder.num_blocks), written, self.decoder.num_blocks)
        return decided, drafts + 1

    def _verify(self, draft: Draft, visible: int) -> Tensor:
        state, context, newest = self.state, self.context, self.state.indices(-1)
        positions = newest.unsqueeze(1) + torch.arange(draft.tokens.shape[1] + 1, device=newest.device)
        logits = self._forward(state.token_ids.gather(1, positions), newest, visible, state.cache)
        scores = context.sampler.scores(logits, state.token_ids, state.lengths)
        acceptance = context.rule.accept(draft, scores, positions + 1, state.round_tensor)
        state.token_ids[state.rows, state.indices(0) + acceptance.accepted] = acceptance.next_token
        return torch.stack(acceptance[:3], dim=1)

    def _tier(self, program: Hashable, count: int, visible: int, tiers: Sequence[int] = TIERS) -> int:
        """How many drafts to run for `count`: its tier, or the next one recorded, until it was asked for often enough.

        Recording takes longer than some rounds, and the last rounds of an answer ask for ever fewer drafts. None is
        taken that reaches beyond the `visible` slots.
        """
        recorded, wanted = self._tiers.setdefault((program, visible), set()), tier_of(count, tiers)
        if wanted not in recorded:
            larger = [tier for tier in recorded if wanted < tier <= visible - max(self.state.lengths)]
            if larger and self._asked[program, visible, wanted] < self._patience:
                self._asked[program, visible, wanted] += 1
                return min(larger)
            recorded.add(wanted)
        return wanted

    def _take(self, draft: Draft, count: int) -> Draft:
        """`draft` in memory that a recorded program reads: padded to `count`, the same tensors every time."""
        batch, width = draft.tokens.shape
        key = (count, draft.probs is not None)
        if key not in self._inputs:
            with torch.inference_mode(False):  # a later call may not be in inference mode
                new, probs = self.state.token_ids.new_zeros, None
                if draft.probs is not None:
                    shape = (batch, count, self.context.vocab_size)
                    probs = torch.zeros(shape, dtype=draft.probs.dtype, device=draft.probs.device)
                self._inputs[key] = Draft(new((batch, count)), [], probs, counts=new(batch))
        inputs = self._inputs[key]
        inputs.tokens[:, :width].copy_(draft.tokens)
        if inputs.counts is not None:
            inputs.counts.copy_(torch.tensor(draft.num_drafted), non_blocking=True)
        if inputs.probs is not None and draft.probs is not None:
            inputs.probs[:, :width].copy_(draft.probs)
        return inputs

    def _visible(self, drafts: int) -> int:
        """Cache slots to read: enough for the longest row, in steps that double; of compiled passes all."""
        visible = SLOTS if self._compiled is None else self.state.cache.capacity
        while visible < max(self.state.lengths) + drafts:
            visible *= 2
        return min(visible, self.state.cache.capacity)
