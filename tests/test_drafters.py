"""The drafters keep the contract, and what is special to each."""

import copy
import functools
import itertools

import pytest
import torch

import layerskip
from layerskip.drafters import LookaheadDrafter, LookupDrafter, ModelDrafter, SelfDrafter
from layerskip.drafters.lookahead import Sizes
from layerskip.drafters.self_draft import count_exact_blocks
from layerskip.governor import Always, Source
from layerskip.models.adapter import AdapterSpec
from layerskip.models.decoder import Decoder, Step
from layerskip.plan import DraftPlan
from tests.contracts import PROMPTS, DrafterContract, DrawingDrafterContract, PrefixBound
from tests.engines import LogitsDrafter, drafter_of, make_engine, run_checked
from tests.special_models import adapter_of, agreeing_model, llama_with, with_config
from tests.tiny_models import NUM_LAYERS, VOCAB_SIZE, prompt, tiny_model, transformers_greedy


def self_drafter(plan: DraftPlan):
    return lambda decoder, context: SelfDrafter(decoder, plan.path(decoder.num_blocks), context)


class TestExit(DrawingDrafterContract):
    make_drafter = staticmethod(self_drafter(DraftPlan.exit(2)))


class TestSkippedAttention(DrawingDrafterContract):
    make_drafter = staticmethod(self_drafter(DraftPlan.skip(attention=[1, 2])))


class TestSkippedFirstLayer(DrawingDrafterContract):
    """Nothing of the draft is exact."""

    make_drafter = staticmethod(self_drafter(DraftPlan.skip([0], [0])))


class TestNothingSkipped(DrawingDrafterContract):
    """Everything of the draft is exact."""

    make_drafter = staticmethod(self_drafter(DraftPlan.skip()))


class TestSlidingWindow(DrawingDrafterContract):
    family = "mistral-window"
    make_drafter = staticmethod(self_drafter(DraftPlan.exit(3)))


class TestOtherModel(DrawingDrafterContract):
    make_drafter = staticmethod(lambda _, context: ModelDrafter(Decoder(tiny_model("llama")), context))


class TestTheModelItself(DrawingDrafterContract):
    make_drafter = staticmethod(lambda decoder, context: ModelDrafter(decoder, context))


class TestDraftVocabulary(DrawingDrafterContract):
    """Half of the ids are never drafted; those between them must not move up."""

    @staticmethod
    def make_drafter(decoder, context):
        path = DraftPlan.exit(2).path(decoder.num_blocks)
        return SelfDrafter(decoder, path, context, vocabulary=range(0, VOCAB_SIZE, 2))


class TestLookup(DrafterContract):
    """Prompts in which the model's first token stands already, so that there is something to look up."""

    make_drafter = staticmethod(lambda _, context: LookupDrafter(context))

    @functools.cached_property
    def prompts(self):
        texts = (prompt(length, seed=seed) for seed in range(99) for length in (39, 34, 43))
        return [text[0].tolist() for text in itertools.islice(filter(self.repeats, texts), 3)]

    def repeats(self, text):
        return int(transformers_greedy(self.target, text, max_new_tokens=1)[0, -1]) in text[0, :-1].tolist()


class TestLookahead(DrafterContract):
    """A window four tokens deep, so that it is in drafts of that limit; branches of two."""

    sizes = Sizes(window=4, ngram=3, guesses=2)
    width = sizes.width

    def make_drafter(self, _, context):
        return LookaheadDrafter(context, self.sizes)

    def test_an_eos_ends_a_draft(self):
        """No branch goes on behind one; what a window guesses behind one may still become an n-gram elsewhere."""
        engine = self.engine(eos_token_id=(6,))
        drafter_of(engine).begin(engine.state)
        for text in engine.state.texts:
            text += [9, 6, 7, 9, 5, 6, 9]
        drafter_of(engine).observe(engine.state)
        draft = drafter_of(engine).propose(engine.state, [2, 2, 2])  # too short for the window
        assert draft.tokens[:, :2].tolist() == [[5, 6]] * 3
        assert all(2 not in parents for parents in draft.tree.parents)

    def test_processors_see_the_drafts_before_a_draft(self):
        """They would have to be asked about every path: nothing is drafted."""
        engine = self.engine(processors=[PrefixBound()])
        assert not engine.drafters and "no lookahead, which drafts trees: a logits pro" in engine.stats.execution


class TestUniform(DrawingDrafterContract):
    """A drafter of the tests: the contract asks for nothing that only the real ones have."""

    make_drafter = staticmethod(lambda _, context: LogitsDrafter(context, torch.linspace(0, 3, VOCAB_SIZE)))


@pytest.mark.parametrize(
    ("path", "exact"),
    [
        ([], 0),
        ([Step(0), Step(1)], 2),
        ([Step(1), Step(2)], 0),
        ([Step(0), Step(2), Step(3)], 1),
        ([Step(0, attention=False), Step(1)], 0),
        ([Step(0), Step(1, mlp=False), Step(2)], 1),
        ([Step(0), Step(1), Step(2), Step(3)], 4),
    ],
)
def test_blocks_are_exact_up_to_the_first_that_is_not_whole(path, exact):
    assert count_exact_blocks(path) == exact


@pytest.mark.parametrize("plan", [DraftPlan.exit(2), DraftPlan.exit(3), DraftPlan.skip([2], [3]), DraftPlan.skip()])
def test_exact_states_are_those_of_a_full_pass(plan):
    """Verification goes on from them. Catches states of other positions, or behind another number of blocks."""
    engine = make_engine(agreeing_model("llama"), PROMPTS, self_drafter(plan), max_new_tokens=16)
    engine.read_prompts()
    with torch.inference_mode():
        draft = drafter_of(engine).propose(engine.state, [4, 4, 4])
    decoder = engine.decoder
    for row, length in enumerate(engine.state.lengths):
        text = engine.state.token_ids[row : row + 1, : length + 3]  # the last draft was not run
        cache, span = decoder.new_cache(1, text.shape[1]), decoder.span([0], text.shape[1])
        states = decoder.run(decoder.embed(text), decoder.full_path[: draft.exact_blocks], cache, span)
        torch.testing.assert_close(draft.exact_states[row], states[0, length - 1 :], rtol=0, atol=1e-10)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("threshold", [0.01, 0.02, 0.05])
def test_a_draft_ends_behind_its_first_unsure_token(do_sample, threshold):
    """Behind, not before: to drop a drafted token because its own probability was low would bias the output.

    (With target (.5, .3, .2), draft (.6, .3, .1) and tokens below .2 dropped, the output would be (.55, .33, .12).)
    """
    logits = torch.linspace(0, 3, VOCAB_SIZE)
    probs = logits.softmax(0)

    def propose(threshold):
        engine = make_engine(
            agreeing_model("llama"),
            PROMPTS * 20,
            lambda _, context: LogitsDrafter(context, logits),
            max_new_tokens=16,
            do_sample=do_sample,
            confidence_threshold=threshold,
        )
        engine.read_prompts()
        return drafter_of(engine).propose(engine.state, [6] * 60)

    whole, cut = propose(0.0), propose(threshold)
    assert whole.num_drafted == [6] * 60
    for row, tokens in enumerate(whole.tokens.tolist()):
        unsure = [offset for offset, token in enumerate(tokens) if probs[token] < threshold]
        count = 1 + min(unsure, default=5)
        assert cut.num_drafted[row] == count
        assert cut.tokens[row, :count].tolist() == tokens[:count]
    if do_sample:
        assert len(set(cut.num_drafted)) > 1


def test_a_self_draft_without_exact_blocks_hands_over_no_states():
    engine = make_engine(agreeing_model("llama"), PROMPTS, self_drafter(DraftPlan.skip(mlp=[0])), max_new_tokens=16)
    engine.read_prompts()
    with torch.inference_mode():
        draft = drafter_of(engine).propose(engine.state, [2, 2, 2])
    assert (draft.exact_states, draft.exact_blocks) == (None, 0)


def drafting(most: int) -> Always:
    """A governor that lets the engine's only drafter draft so many tokens a round."""
    return Always({"drafter": Source(most, cost_ratio=0.1)})


class Late(Always):
    """Lets nobody draft in the first rounds."""

    def __init__(self, sources, rounds: int) -> None:
        super().__init__(sources)
        self.left = rounds

    def decide(self, rooms, grades):
        self.left -= 1
        return super().decide([min(room, 0) for room in rooms] if self.left >= 0 else rooms, grades)


ADAPTER = adapter_of(agreeing_model("llama"), AdapterSpec(0, further_states=(1,)))
READERS = {
    "trained blocks": lambda decoder, context: SelfDrafter(decoder, (), context, adapter=ADAPTER),
    "a draft model": lambda _, context: ModelDrafter(Decoder(tiny_model("llama")), context),
}


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("name", READERS)
def test_who_does_not_draft_reads_nothing(name, chunk):
    """And once it drafts it reads all of it, a long text in parts, and drafts what it would behind a prompt."""
    model, adapter = agreeing_model("llama"), ADAPTER if name == "trained blocks" else None
    options = {"max_new_tokens": 60, "adapter": adapter, "prefill_chunk_size": chunk}
    engine = make_engine(model, PROMPTS, READERS[name], **options)
    engine.governor = Late(engine.governor.sources, 20)
    engine.read_prompts()
    for _ in range(20):
        engine.decode_round()
    assert drafter_of(engine)._reading.held == [0] * len(PROMPTS)
    behind_a_prompt = make_engine(model, [text[:-1] for text in engine.state.texts], READERS[name], **options)
    behind_a_prompt.read_prompts()
    proposed = []
    for each in (engine, behind_a_prompt):
        with torch.inference_mode():
            drafter_of(each).catch_up(each.state)
            assert min(drafter_of(each)._reading.held) > 20
            proposed.append(drafter_of(each).propose(each.state, [3] * len(PROMPTS)).tokens)
    assert torch.equal(*proposed)


class Resting(Always):
    """Lets everybody rest for some rounds once row 0 has finished."""

    def __init__(self, sources, rounds: int) -> None:
        super().__init__(sources)
        self.left = rounds

    def decide(self, rooms, grades):
        if rooms[0] < 0 and self.left > 0:
            self.left -= 1
            rooms = [min(room, 0) for room in rooms]
        return super().decide(rooms, grades)


@pytest.mark.parametrize("rest", [3, 9, 14])
def test_a_draft_model_that_has_rested_reads_no_row_past_the_cache(rest):
    """It catches up in one pass as wide as its longest lag, which a row at its end has no room for."""
    target, draft = agreeing_model("llama"), tiny_model("llama", seed=1)
    prompts, ends = [prompt(30)[0].tolist(), PROMPTS[1]], {"max_new_tokens": None, "max_length": 36}
    engine = make_engine(
        target, prompts, lambda _, context: ModelDrafter(Decoder(draft), context), pass_width=5, **ends
    )
    engine.governor = Resting(engine.governor.sources, rest)
    assert run_checked(engine) == run_checked(make_engine(target, prompts, None, **ends))
    assert engine.governor.left == 0


class TestDraftModelWithFewerPositions:
    """A row that is longer than the draft model has positions drafts nothing, and keeps no other from it."""

    def test_rows_sample_what_they_would_alone(self):
        model = layerskip.wrap(agreeing_model("llama"))
        rows = [prompt(n, seed=n)[0].tolist() for n in (5, 9, 30, 3, 14)]
        plan = DraftPlan.model(llama_with(max_positions=24, seed=1))
        options = {"plan": plan, "governor": "off", "do_sample": True, "temperature": 0.9, "max_new_tokens": 20,
                   "eos_token_id": [7, 19, 31]}  # fmt: skip
        together = model.generate(rows, seed=[3, 4, 5, 6, 7], **options).new_token_ids
        for index, row in enumerate(rows):
            assert model.generate(row, seed=3 + index, **options).new_token_ids == [together[index]]

    def test_a_long_row_silences_no_other(self):
        model = layerskip.wrap(tiny_model("llama"))
        plan = DraftPlan.model(with_config("llama", max_position_embeddings=60))
        rows = [prompt(5, seed=1)[0].tolist(), prompt(80, seed=2)[0].tolist()]
        result = model.generate(rows, plan=plan, governor="off", max_new_tokens=40, eos_token_id=None)
        assert result.stats.accepted_by_source["model"] >= 25
        alone = [model.generate(row, max_new_tokens=40, eos_token_id=None).new_token_ids[0] for row in rows]
        assert result.new_token_ids == alone


class TestModelDrafterCache:
    """The draft model's own cache catches up with what was committed."""

    def engine(self, prompts=PROMPTS, draft=None, **options):
        draft = draft or tiny_model("llama")
        return make_engine(
            agreeing_model("llama"),
            prompts,
            lambda _, context: ModelDrafter(Decoder(draft), context),
            **{"max_new_tokens": 24, **options},
        )

    def test_it_holds_the_committed_tokens_after_every_round(self):
        """At most two behind: the newest token, and the last of an accepted draft, were never fed to it."""
        engine = self.engine()
        engine.read_prompts()
        commits = engine.decode_round()
        while any(engine.state.active):
            drafter_of(engine).cache.check()
            behind = [length - held for length, held in zip(engine.state.lengths, drafter_of(engine).cache.lengths,
                                                            strict=True)]  # fmt: skip
            assert all(1 <= each <= 2 for each in behind)
            commits = engine.decode_round()
        assert commits

    def test_its_entries_are_those_of_a_fresh_pass(self):
        """Catches entries of rejected drafts that survive a rollback: drafts would slowly get worse, output not."""
        engine = self.engine(pass_width=5)
        rows = run_checked(engine)
        decoder, cache = drafter_of(engine).decoder, drafter_of(engine).cache
        for row, tokens in enumerate(rows):
            text, held = torch.tensor([PROMPTS[row] + tokens]), cache.lengths[row]
            fresh, span = decoder.new_cache(1, held), decoder.span([0], held)
            decoder.run(decoder.embed(text[:, :held]), decoder.full_path, fresh, span)
            for stored, right in zip(cache.keys + cache.values, fresh.keys + fresh.values, strict=True):
                torch.testing.assert_close(stored[row, :, :held], right[0], rtol=0, atol=1e-10)

    def test_it_catches_up_after_rounds_without_drafts(self):
        """Rounds in which the engine did not ask it leave it behind by as many tokens; drafts must be as if not."""
        engine, steady = self.engine(PROMPTS[:1]), self.engine(PROMPTS[:1])
        for each in (engine, steady):
            each.read_prompts()
        engine.governor = drafting(0)
        for _ in range(5):
            engine.decode_round()
        while steady.state.lengths < engine.state.lengths:
            steady.governor = drafting(1 if steady.state.lengths[0] + 2 <= engine.state.lengths[0] else 0)
            steady.decode_round()
        assert steady.stats.proposed and not engine.stats.proposed
        with torch.inference_mode():
            drafts = [drafter_of(each).propose(each.state, [4]) for each in (engine, steady)]
        assert torch.equal(drafts[0].tokens, drafts[1].tokens)

    def test_a_draft_of_the_target_itself_is_the_targets_own_text(self):
        engine = self.engine(draft=copy.deepcopy(agreeing_model("llama")), max_drafts=NUM_LAYERS)
        run_checked(engine)
        assert engine.stats.acceptance_rate == 1
