"""One decoding call: read the prompts, then draft, verify, accept, commit, until every row has stopped.

1. Draft: the drafter proposes tokens behind each row's newest one (`drafters/`).
2. Verify: one pass of the full model over the newest token and the drafts.
3. Accept: which drafts stand, and the token after them (`rules.py`, `verify.py`).
4. Commit: token by token, asking the stop conditions about each; what is not committed is forgotten by not being
   counted, in the tokens and in the cache alike.
5. Rows that have ended are let go of, where nothing depends on how many there are.

Plain decoding is a round in which nothing is drafted. The engine knows nothing of how drafts are made, of text, or of
where a model came from; it changes nothing but its own `DecodeState`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from layerskip.chosen import Chosen, Commit, chosen_rows
from layerskip.draft import Draft, empty_draft, merged
from layerskip.drafters.base import DraftContext, Drafter, Learner, Recordable
from layerskip.errors import DecodingError
from layerskip.governor import Decision, Governor
from layerskip.memory import Memory
from layerskip.models.decoder import Decoder
from layerskip.models.span import Span
from layerskip.reading import read
from layerskip.scores import Said
from layerskip.state import DecodeState, remaining_rows
from layerskip.static_rounds import StaticRounds
from layerskip.stats import DecodeStats
from layerskip.stopping import RowStopping
from layerskip.timing import Stopwatch

__all__ = ["Engine"]


@dataclass
class Engine:
    """Decodes the rows of `state`.

    Attributes:
        drafters: by name, in the order in which they draft; none: plain decoding.
        governor: decides who drafts how much.
        pass_width: if given, every verification pass covers exactly this many tokens and reads the whole cache
            (padded and masked), so that in low precision too no bit depends on how many tokens were drafted.
        memory: what the call leaves behind for the next one, as it comes about.
        static: runs rounds as recorded programs; None: pass by pass.
        output_logits, output_scores: whether commits are to hold them.
        release: called when decoding has ended, however it did.
        mode: without gradients. Where somebody else's code takes part it is `torch.no_grad`: tensors of inference mode,
            7 % faster on a CPU, must not be kept, written to later, or used for gradients.
    """

    decoder: Decoder
    state: DecodeState
    context: DraftContext
    stopping: list[RowStopping]
    drafters: Mapping[str, Drafter]
    governor: Governor
    pass_width: int | None = None
    static: StaticRounds | None = None
    memory: Memory = Memory()
    output_logits: bool = False
    output_scores: bool = False
    release: Callable[[], None] = lambda: None
    mode: Callable[[], AbstractContextManager[Any]] = torch.inference_mode
    stats: DecodeStats = field(default_factory=DecodeStats)

    def __iter__(self) -> Generator[Commit, None, None]:
        """Decode to the end, handing out every token as it is committed.

        What was taken for the call is given back when the iterator ends, is closed, or is forgotten, read or not.
        """
        commits = self._commits()
        next(commits)
        return commits

    def _commits(self) -> Generator[Any, None, None]:
        try:
            yield None  # once: a generator that was never begun would not come to its `finally`
            yield from self.read_prompts()
            while any(self.state.active):
                yield from self.decode_round()
        finally:
            self.release()

    def read_prompts(self) -> list[Commit]:
        """Run the prompts through the full model; each row's first token comes out of it.

        The prompt is never read by the draft path alone: drafting on a cache that was itself made by skipping is
        accepted about one time in a hundred.
        """
        with self.mode():
            watch = Stopwatch(self.decoder.device)
            logits = self._read()
            return self._first(logits, watch)

    def read_only(self) -> None:
        """Run the prompts, and nothing else: for a later call that goes on from what was read."""
        with self.mode():
            self._read()
            self.state.cache.commit(self.state.lengths)
            for drafter in self.drafters.values():
                drafter.catch_up(self.state)

    def decode_round(self) -> list[Commit]:
        """One round for all rows that are still decoding."""
        with self.mode():
            return self._decode_round()

    def _read(self) -> Tensor:
        """Read of the prompts what is not in the cache; the logits behind their last tokens, (batch, 1, vocab)."""
        state, decoder = self.state, self.decoder
        for drafter in self.drafters.values():
            drafter.begin(state)

        def run(starts: Sequence[int], tokens: int) -> Tensor:
            span = decoder.span(starts, tokens)
            return decoder.run(self._embed(span), decoder.full_path, state.cache, span)

        self.stats.prompt_tokens += sum(state.lengths)
        self.stats.reused_tokens += sum(state.cache.lengths)
        return decoder.logits(read(run, state.cache.lengths, state.lengths, self.context.chunk))

    def _first(self, logits: Tensor, watch: Stopwatch) -> list[Commit]:
        """Commit each row's first token."""
        state = self.state
        decided, said = self._accept(empty_draft(state), logits)
        first = chosen_rows(empty_draft(state), decided)
        commits = [commit for row in range(state.batch) for commit in self._commit_row(row, first[row], said)]
        self.stats.new_tokens += len(commits)
        self._end_round()
        self.stats.prefill_s += sum(watch.laps())
        self._let_go()
        return commits

    def _decode_round(self) -> list[Commit]:
        state, watch = self.state, Stopwatch(self.decoder.device)
        recorded = self._recorded()
        state.round_tensor += 1
        # A draft of all the room that is left would leave no place for the token that follows it. -1: finished.
        rooms = [state.room(row) - 1 for row in range(state.batch)]
        decision = self.governor.decide(rooms, {name: each.outlook(state) for name, each in self.drafters.items()})
        watch.mark()
        drafts = self._draft(decision, watch)
        draft = (
            merged(list(drafts.values()), self.context.vocab_size) if drafts else empty_draft(state, decision.padding)
        )
        watch.mark()
        if self.static is not None:
            (decided, width), said = self.static.verify(draft), Said()
            watch.mark()
        else:
            logits, width = self._verify(draft), draft.tokens.shape[1] + 1
            watch.mark()
            decided, said = self._accept(draft, logits)
        chosen = chosen_rows(draft, decided)
        self._straighten(chosen)
        was_active = list(state.active)
        commits = [
            commit
            for row in range(state.batch)
            if was_active[row]
            for commit in self._commit_row(row, chosen[row], said)
        ]
        self._end_round()
        running = [each if active else None for each, active in zip(chosen, was_active, strict=True)]
        self._learn(decision, drafts, running)
        self._record(drafts, running, commits)
        self._record_times(drafts, width, watch.laps(), recorded)
        self._let_go()
        return commits

    def _let_go(self) -> None:
        """Compute rows that have ended no more, nor hold them.

        But for the last ones: what they leave behind is a session's. And not where rounds were recorded with so many
        rows, or where `pass_width` is to keep every bit: a pass over fewer rows may round otherwise. Nor where modules
        have hooks, which may know a row by its place (PEFT's `adapter_names`: a LoRA for each).
        """
        rows = remaining_rows(self.state.active)
        if not 0 < len(rows) < self.state.batch:
            return
        if self.static is not None or self.pass_width is not None or self.decoder.is_watched:
            return
        for each in (self.state, self.context.sampler, self.context.rule, self.governor):
            each.keep_rows(rows)
        self.stopping = [self.stopping[row] for row in rows]

    def _draft(self, decision: Decision, watch: Stopwatch) -> dict[str, Draft]:
        """The drafts of those drafters that are to draft, with a mark before and behind each."""
        drafts = {}
        for name, drafter in self.drafters.items():
            limits = decision.limits[name]
            if any(limits):
                drafter.catch_up(self.state)
                watch.mark()
                if self.static is not None and isinstance(drafter, Recordable):
                    drafts[name] = self.static.draft(name, drafter, limits)
                else:
                    proposed = drafter.propose(self.state, limits, self.governor.goes_on(name, decision))
                    drafts[name] = self.governor.trimmed(name, decision, proposed)
                watch.mark()
        return drafts

    def _recorded(self) -> int:
        """Programs recorded or compiled so far."""
        return 0 if self.static is None else self.static.count

    def _record_times(self, drafts: Mapping[str, Draft], width: int, laps: list[float], recorded: int) -> None:
        """Count the seconds of a round: deciding, each drafter, joining their drafts, verifying, all that follows.

        What a drafter took to catch up is drafting, but says nothing of what its next draft will take.
        """
        if self._recorded() > recorded:  # what that took says nothing of rounds to come
            self.stats.recording_s += sum(laps)
            return
        decide_s, *drafting_s = laps[: 1 + 2 * len(drafts)]
        merge_s, verify_s, *rest = laps[1 + 2 * len(drafts) :]
        host_s = decide_s + merge_s + sum(rest)
        steps = [each.depth if each.steps is None else each.steps for each in drafts.values()]
        made = dict(zip(drafts, zip(steps, drafting_s[1::2], strict=True), strict=True))
        self.governor.note_times(made, width, verify_s + host_s)
        self.stats.draft_s += sum(drafting_s)
        self.stats.verify_s += verify_s
        self.stats.host_s += host_s

    def _learn(self, decision: Decision, drafts: Mapping[str, Draft], chosen: Sequence[Chosen | None]) -> None:
        """Tell the governor how much of each row's chain stood, and how much beside it; and a drafter that learns from
        it what the target said.
        """
        is_whole = any(each.is_whole for each in drafts.values())
        lengths = [max((each.lengths[row] for each in drafts.values()), default=0) for row in range(len(chosen))]
        in_chain = [
            None if each is None else each.accepted if is_whole else each.stood(length)
            for each, length in zip(chosen, lengths, strict=True)
        ]
        beside = [
            0 if each is None else each.accepted - (stood or 0) for each, stood in zip(chosen, in_chain, strict=True)
        ]
        self.governor.learn(decision, drafts, in_chain, beside)
        for drafter in (self.drafters[name] for name in drafts):
            if isinstance(drafter, Learner):
                drafter.learn([() if each is None else each.choices for each in chosen])

    def _record(self, drafts: Mapping[str, Draft], chosen: Sequence[Chosen | None], commits: list[Commit]) -> None:
        """Count the round, row by row; of a tree its depth is what was proposed."""
        kept = Counter(commit.row for commit in commits)
        for row, each in enumerate(chosen):
            if each is not None:
                source = next((name for name, draft in drafts.items() if draft.num_drafted[row]), "none")
                proposed, verified = (
                    (drafts[source].lengths[row], drafts[source].num_drafted[row]) if source in drafts else (0, 0)
                )
                committed = kept[self.state.numbers[row]]
                self.stats.record_round(proposed, each.accepted, committed, source, verified - proposed)

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
        if draft.tree is not None:
            span = self.decoder.span(newest, drafts + 1, tree=draft.tree)
            newest_tokens = self.state.token_ids.gather(1, span.slots[:, :1])
            hidden = self.decoder.embed(torch.cat((newest_tokens, draft.tokens), dim=1), span)
        elif self.pass_width is not None or draft.exact_states is None:
            hidden = self._embed(span)
        else:
            last = self.decoder.span([position + drafts for position in newest], 1)
            of_last = self.decoder.run(self._embed(last), path[: draft.exact_blocks], cache, last)
            hidden, path = torch.cat((draft.exact_states, of_last), dim=1), path[draft.exact_blocks :]
        hidden = self.decoder.run(hidden, path, cache, span)
        if self.pass_width is not None:  # the head, too, rounds by the number of rows
            return self.decoder.logits(hidden)[:, : drafts + 1]
        return self.decoder.logits(hidden[:, : drafts + 1])

    def _embed(self, span: Span) -> Tensor:
        return self.decoder.embed(self.state.token_ids.gather(1, span.positions), span)

    def _accept(self, draft: Draft, logits: Tensor) -> tuple[Tensor, Said]:
        """Decide about `draft`; the token behind the accepted drafts is written there.

        Returns:
            (batch, 3): accepted drafts, the token behind them, and the number of valid positions; of a tree also the
            places where they were said, and what was said in each place (`Acceptance`). And what the target said of the
            drafts and the token behind them.
        """
        state, context = self.state, self.context
        counts = None if context.sampler.prefix_free else self._positions_that_matter(draft)
        scores = context.sampler.scores(logits, state.token_ids, state.lengths, counts)
        offsets = torch.arange(logits.shape[1], device=state.token_ids.device)
        positions = state.indices(0).unsqueeze(1) + (offsets if draft.tree is None else draft.tree.depths)
        acceptance = context.rule.accept(draft, scores, positions, state.round_tensor)
        state.token_ids[state.rows, state.indices(0) + acceptance.accepted] = acceptance.next_token
        said = Said(logits if self.output_logits else None, scores if self.output_scores else None)
        in_tree = [each for each in acceptance[3:] if each is not None]
        return torch.cat((torch.stack(acceptance[:3], dim=1), *in_tree), dim=1), said

    def _straighten(self, chosen: Sequence[Chosen]) -> None:
        """Bring accepted drafts that stand among others to where a chain's would, in the text and in the cache."""
        state = self.state
        for row, each in enumerate(chosen):
            length = state.lengths[row]
            for index, place in enumerate(each.places[1 : each.accepted + 1]):
                if place != index + 1:
                    state.token_ids[row, length + index] = each.tokens[index]
                    state.cache.move(row, length - 1 + place, length + index)

    def _positions_that_matter(self, draft: Draft) -> list[int]:
        """How many positions of each row may be committed: behind a drafted EOS, or a row's last draft, none."""
        counts = []
        for row, (tokens, drafted) in enumerate(zip(draft.tokens.tolist(), draft.num_drafted, strict=True)):
            until_eos = (index for index in range(drafted) if tokens[index] in self.context.eos_ids)
            counts.append(1 + next(until_eos, drafted) if self.state.active[row] else 0)
        return counts

    def _commit_row(self, row: int, chosen: Chosen, said: Said) -> list[Commit]:
        """Count the chosen tokens in, until one of them ends the row."""
        state, commits = self.state, []
        for index, token_id in enumerate(chosen.tokens):
            # Only now: behind a stop there may well be no token, and plain decoding would never have asked for one.
            if index >= chosen.num_valid:
                raise DecodingError(
                    f"got no next token in row {state.numbers[row]} after {state.lengths[row]} tokens: the model's "
                    "logits are NaN or infinite, or the processors banned every token. Load the model in float32 or "
                    "bfloat16 (float16 overflows in some models), or loosen bad_words_ids, suppress_tokens or your own "
                    "processors."
                )
            state.lengths[row] += 1
            state.texts[row].append(token_id)
            reason = self.stopping[row].reason_to_stop(state.token_ids[row : row + 1, : state.lengths[row]], token_id)
            commits.append(
                Commit(
                    state.numbers[row], token_id, index < chosen.accepted, reason, said.at(row, chosen.places[index])
                )
            )
            if reason is not None:
                state.active[row] = False
                break
        return commits

    def _end_round(self) -> None:
        """Every row's cache now holds all its committed tokens but the newest."""
        self.state.upload_lengths()
        self.state.cache.commit([length - 1 for length in self.state.lengths])
        for drafter in self.drafters.values():
            drafter.observe(self.state)
