"""One decoding call: read the prompts, then draft, verify, accept, commit, until every row has stopped.

1. Draft: the drafter proposes tokens behind each row's newest one (`drafters/`).
2. Verify: one pass of the full model over the newest token and the drafts.
3. Accept: which drafts stand, and the token after them (`rules.py`, `verify.py`).
4. Commit: token by token, asking the stop conditions about each; what is not committed is forgotten by not being
   counted, in the tokens and in the cache alike.

Plain decoding is a round in which nothing is drafted. The engine knows nothing of how drafts are made, of text, or of
where a model came from; it changes nothing but its own `DecodeState`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from layerskip.drafters.base import Draft, DraftContext, Drafter, empty_draft
from layerskip.errors import DecodingError
from layerskip.models.decoder import Decoder
from layerskip.models.span import Span
from layerskip.state import DecodeState
from layerskip.stats import DecodeStats
from layerskip.stopping import FinishReason, RowStopping
from layerskip.timing import Stopwatch

__all__ = ["Commit", "Engine"]


class Commit(NamedTuple):
    """One token that has become part of a row's output.

    Attributes:
        drafted: it was an accepted draft (False: the target's own choice after the drafts).
        finish_reason: why the row ends with this token; None: it goes on.
    """

    row: int
    token_id: int
    drafted: bool
    finish_reason: FinishReason | None


class Chosen(NamedTuple):
    """What a row's verification decided.

    Attributes:
        tokens: the accepted drafts and the token after them.
        accepted: number of those drafts.
        num_valid: how many of these positions have a distribution at all; what is chosen from there on is void.
    """

    tokens: list[int]
    accepted: int
    num_valid: int


@dataclass
class Engine:
    """Decodes the rows of `state`.

    Attributes:
        drafter: None decodes plainly.
        max_drafts: most tokens to draft a round.
        pass_width: if given, every verification pass covers exactly this many tokens and reads the whole cache
            (padded and masked), so that in low precision too no bit depends on how many tokens were drafted.
    """

    decoder: Decoder
    state: DecodeState
    context: DraftContext
    stopping: list[RowStopping]
    drafter: Drafter | None
    max_drafts: int
    pass_width: int | None = None
    stats: DecodeStats = field(default_factory=DecodeStats)

    def __iter__(self) -> Iterator[Commit]:
        """Decode to the end, handing out every token as it is committed."""
        yield from self.read_prompts()
        while any(self.state.active):
            yield from self.decode_round()

    @torch.no_grad()
    def read_prompts(self) -> list[Commit]:
        """Run the prompts through the full model; each row's first token comes out of it.

        The prompt is never read by the draft path alone: drafting on a cache that was itself made by skipping is
        accepted about one time in a hundred.
        """
        state, watch = self.state, Stopwatch(self.decoder.device)
        if self.drafter is not None:
            self.drafter.begin(state)
        lengths = list(state.lengths)
        span = self.decoder.span([0] * state.batch, max(lengths))
        hidden = self.decoder.run(self._embed(span), self.decoder.full_path, state.cache, span)
        last = torch.tensor(lengths, device=hidden.device) - 1
        logits = self.decoder.logits(hidden[state.rows.to(hidden.device), last].unsqueeze(1))
        first = self._accept(empty_draft(self.context, state), logits)
        self.stats.prompt_tokens += sum(lengths)
        commits = [commit for row in range(state.batch) for commit in self._commit_row(row, first[row])]
        self.stats.new_tokens += len(commits)
        self._end_round()
        self.stats.prefill_s += watch.lap()
        return commits

    @torch.no_grad()
    def decode_round(self) -> list[Commit]:
        """One round for all rows that are still decoding."""
        state, watch = self.state, Stopwatch(self.decoder.device)
        state.round_index += 1
        # A draft of all the room that is left would leave no place for the token that follows it.
        limits = [min(self.max_drafts, max(0, state.room(row) - 1)) for row in range(state.batch)]
        if self.drafter is not None and any(limits):
            draft = self.drafter.propose(state, limits)
        else:
            draft = empty_draft(self.context, state)
        self.stats.draft_s += watch.lap()
        logits = self._verify(draft)
        self.stats.verify_s += watch.lap()
        chosen = self._accept(draft, logits)
        proposed = draft.num_drafted.tolist()
        commits: list[Commit] = []
        for row in range(state.batch):
            if state.active[row]:
                kept = self._commit_row(row, chosen[row])
                self.stats.record_round(proposed[row], chosen[row].accepted, len(kept))
                commits += kept
        self._end_round()
        self.stats.host_s += watch.lap()
        return commits

    def _verify(self, draft: Draft) -> Tensor:
        """Target logits (batch, drafts + 1, vocab) behind the newest token and each draft.

        Where the draft ran leading blocks on exact states, those ran for all of these tokens but the last draft:
        they run for that one alone, and the rest of the model for all.
        """
        drafts, cache, path = draft.tokens.shape[1], self.state.cache, self.decoder.full_path
        newest = [length - 1 for length in self.state.lengths]
        if self.pass_width is not None:
            span = self.decoder.span(newest, self.pass_width, visible=cache.capacity)
        else:
            span = self.decoder.span(newest, drafts + 1)
        if self.pass_width is not None or draft.exact_states is None:
            hidden = self._embed(span)
        else:
            last = self.decoder.span([position + drafts for position in newest], 1)
            of_last = self.decoder.run(self._embed(last), path[: draft.exact_blocks], cache, last)
            hidden, path = torch.cat((draft.exact_states, of_last), dim=1), path[draft.exact_blocks :]
        hidden = self.decoder.run(hidden, path, cache, span)
        return self.decoder.logits(hidden[:, : drafts + 1])

    def _embed(self, span: Span) -> Tensor:
        return self.decoder.embed(self.state.token_ids.gather(1, span.positions))

    def _accept(self, draft: Draft, logits: Tensor) -> list[Chosen]:
        """Each row's accepted drafts and the token after them."""
        state, context = self.state, self.context
        counts = None if context.sampler.prefix_free else self._positions_that_matter(draft)
        target_probs, valid = context.sampler.distribution(logits, state.token_ids, state.lengths, counts)
        positions = state.indices(0).unsqueeze(1) + torch.arange(logits.shape[1], device=state.token_ids.device)
        acceptance = context.rule.accept(
            draft.tokens, draft.probs, target_probs, draft.num_drafted, positions, state.round_index
        )
        num_valid = valid.long().cumprod(dim=1).sum(dim=1)
        columns = (acceptance.accepted, acceptance.next_token, num_valid)
        read_back = torch.cat((torch.stack(columns, dim=1), draft.tokens), dim=1)
        return [
            Chosen([*drafts[:accepted], next_token], accepted, num_valid)
            for accepted, next_token, num_valid, *drafts in read_back.tolist()
        ]

    def _positions_that_matter(self, draft: Draft) -> list[int]:
        """How many positions of each row may be committed: behind a drafted EOS, or a row's last draft, none."""
        counts = []
        for row, (tokens, drafted) in enumerate(zip(draft.tokens.tolist(), draft.num_drafted.tolist(), strict=True)):
            until_eos = (index for index in range(drafted) if tokens[index] in self.context.eos_ids)
            counts.append(1 + next(until_eos, drafted) if self.state.active[row] else 0)
        return counts

    def _commit_row(self, row: int, chosen: Chosen) -> list[Commit]:
        """Append the chosen tokens until one of them ends the row."""
        state, commits = self.state, []
        begin, tokens = state.lengths[row], chosen.tokens
        state.token_ids[row, begin : begin + len(tokens)] = torch.tensor(tokens, device=state.token_ids.device)
        for index, token_id in enumerate(tokens):
            # Only now: behind a stop there may well be no token, and plain decoding would never have asked for one.
            if index >= chosen.num_valid:
                raise DecodingError(
                    f"got no next token in row {row} after {state.lengths[row]} tokens: the model's logits are NaN or "
                    "infinite, or the processors banned every token. Load the model in float32 or bfloat16 (float16 "
                    "overflows in some models), or loosen bad_words_ids, suppress_tokens or your own processors."
                )
            state.lengths[row] += 1
            reason = self.stopping[row].reason_to_stop(state.token_ids[row : row + 1, : state.lengths[row]])
            commits.append(Commit(row, token_id, index < chosen.accepted, reason))
            if reason is not None:
                state.active[row] = False
                break
        return commits

    def _end_round(self) -> None:
        """Every row's cache now holds all its committed tokens but the newest."""
        self.state.cache.commit([length - 1 for length in self.state.lengths])
        if self.drafter is not None:
            self.drafter.observe(self.state)
