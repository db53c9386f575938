"""Greedy output is the model's own, whatever drafts: compared with transformers' `generate`, in float64.

Every comparison is exact. The models are random with large weights, so that a wrong mask, position or cache entry
changes some token within a few steps.
"""

import copy
import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

from layerskip import DraftPlan, wrap
from layerskip.drafters import ModelDrafter, SelfDrafter
from layerskip.models.block import Block
from layerskip.models.decoder import Decoder
from tests.drafting import always
from tests.engines import ScriptedDrafter, drafter_of, make_engine, run_checked
from tests.special_models import agreeing_model, llama_with, with_config
from tests.tiny_models import (
    FAMILY_NAMES,
    NUM_LAYERS,
    VOCAB_SIZE,
    prompt,
    tiny_model,
    transformers_greedy,
)
from tests.toy_tokenizer import character_tokenizer

NEW_TOKENS = 10  # so that the longest draft, 8, fits behind the first token and before the last
ALL = range(NUM_LAYERS)
PLANS = {
    "nothing": DraftPlan.skip(),
    "attention": DraftPlan.skip(attention=[1, 2]),
    "mlp": DraftPlan.skip(mlp=[1, 3]),
    "both": DraftPlan.skip([2, 3], [1, 2]),
    "first layer": DraftPlan.skip([0], [0]),
    "last layer": DraftPlan.skip([3], [3]),
    "all but one attention": DraftPlan.skip([0, 1, 3], ALL),
    "all but one mlp": DraftPlan.skip(ALL, [0, 1, 3]),
    "exit 1": DraftPlan.exit(1),
    "exit 2": DraftPlan.exit(2),
    "exit 3": DraftPlan.exit(3),
    "exit and skip set": DraftPlan.skip([1], [0], exit_layer=3),
}


def with_drafts(plan: DraftPlan, num_draft_tokens: int, **changes) -> DraftPlan:
    fields = {**vars(plan), "num_draft_tokens": num_draft_tokens, **changes}
    return DraftPlan(**fields)


@functools.cache
def own_text(model, new_tokens: int = NEW_TOKENS) -> list[int]:
    """What the model says by itself, prompt left out."""
    return transformers_greedy(model, prompt(), max_new_tokens=new_tokens)[0, 9:].tolist()


def assert_own_text(model, plan: DraftPlan | None, new_tokens: int = NEW_TOKENS, **options):
    result = wrap(model).generate(prompt(), max_new_tokens=new_tokens, eos_token_id=None, **always(plan), **options)
    assert result.new_token_ids == [own_text(model, new_tokens)]
    return result


EVERYWHERE = ("nothing", "attention", "mlp", "first layer", "all but one attention", "exit 1", "exit 2", "exit 3")


@pytest.mark.parametrize("plan", EVERYWHERE)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_plan_and_draft_length(family, plan):
    """The product's promise. Catches any wrong position, mask, cache entry or reused state in draft or verification."""
    model = agreeing_model(family)
    for num_draft_tokens in range(1, 9):
        assert assert_own_text(model, with_drafts(PLANS[plan], num_draft_tokens)).stats.proposed > 0


@pytest.mark.parametrize("sub_block", range(2 * NUM_LAYERS))
def test_every_single_sub_block_skipped_and_kept(llama, sub_block):
    """Catches an exact-prefix count that is off by a sub-block at one end of the model."""
    layer, kind = divmod(sub_block, 2)
    skipped: list[set[int]] = [set(), set()]
    skipped[kind] = {layer}
    kept = [set(ALL), set(ALL)]
    kept[kind] = set(ALL) - {layer}
    for attention, mlp in (skipped, kept):
        assert_own_text(llama, DraftPlan.skip(attention, mlp))


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan != "nothing"])
def test_long_texts_with_rounds_of_every_outcome(plan, num_draft_tokens):
    """Catches an error that needs many rounds to build up, or a certain order of accepted and rejected drafts."""
    result = assert_own_text(agreeing_model("llama"), with_drafts(PLANS[plan], num_draft_tokens), new_tokens=40)
    outcomes = result.stats.accepted_histogram
    assert outcomes[0]
    assert plan in ("first layer", "all but one attention", "all but one mlp") or sum(outcomes[1:])


@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("plan", ["attention", "exit 3"])
def test_stopping_a_draft_on_low_confidence(plan, threshold):
    """Catches a draft that is cut to another length than its states, tokens and probabilities."""
    plan = with_drafts(PLANS[plan], 6, confidence_threshold=threshold)
    stats = assert_own_text(agreeing_model("llama"), plan, new_tokens=30).stats
    if threshold == 1.0:
        assert stats.proposed <= stats.rounds, "a draft ends behind the first token that is not certain"


@pytest.mark.parametrize("plan", ["mlp", "exit 2", "exit 3"])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen3"])
def test_float32(family, plan):
    assert_own_text(tiny_model(family, dtype=torch.float32), PLANS[plan])


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen3"])
def test_one_pass_width_makes_bfloat16_independent_of_the_draft(family):
    """In bfloat16 passes of different widths round differently. Catches one that is not padded to the width given."""
    model = wrap(tiny_model(family, dtype=torch.bfloat16))
    options = {"max_new_tokens": 20, "eos_token_id": None, "pass_width": 9}
    plain = model.generate(prompt(), **options)
    for plan in ("attention", "last layer", "exit 3"):
        for num_draft_tokens in (1, 8):
            drafted = model.generate(prompt(), **always(with_drafts(PLANS[plan], num_draft_tokens)), **options)
            assert drafted.stats.proposed > 0
            assert drafted.new_token_ids == plain.new_token_ids, (plan, num_draft_tokens)


@pytest.mark.parametrize("plan", [None, DraftPlan.exit(2)], ids=["plain", "exit"])
def test_one_pass_width_holds_for_the_head_too(llama, monkeypatch, plan):
    """It rounds by the number of rows as all other products do, in large models."""
    rows, logits = set(), Decoder.logits
    monkeypatch.setattr(
        Decoder, "logits", lambda self, hidden, *rest: rows.add(hidden.shape[1]) or logits(self, hidden, *rest)
    )
    model = wrap(llama)
    engine = model.engine(model.check(prompt(), **always(plan), pass_width=5, max_new_tokens=12, eos_token_id=None))
    engine.read_prompts()
    rows.clear()
    while any(engine.state.active):
        engine.decode_round()
    assert rows == ({5} if plan is None else {5, 1})


@pytest.mark.parametrize("plan", [None, DraftPlan.exit(2)], ids=["plain", "exit"])
def test_one_pass_width_reads_the_same_number_of_slots(llama, monkeypatch, plan):
    """Attention over another number of slots rounds differently too, which on tiny models rarely shows."""
    shapes, attend = set(), Block.attend

    def recorded(block, hidden, cache, span):
        if block.index == NUM_LAYERS - 1 and span.starts[0] >= 9:  # past the prompt, where no draft goes
            shapes.add((span.tokens, span.visible))
        return attend(block, hidden, cache, span)

    monkeypatch.setattr(Block, "attend", recorded)
    wrap(llama).generate(prompt(), **always(plan), pass_width=6, max_new_tokens=12, eos_token_id=None)
    assert shapes == {(6, 9 + 12 + 6)}


class TestForcedDrafts:
    """Drafters that know the right continuation, or know what is wrong, and so force each branch of the round."""

    PROMPT = prompt()[0].tolist()

    def decode(self, family, script, max_drafts, **settings):
        engine = make_engine(
            tiny_model(family),
            [self.PROMPT],
            lambda decoder, context: ScriptedDrafter(context, script),
            max_drafts=max_drafts,
            **{"max_new_tokens": NEW_TOKENS, **settings},
        )
        return run_checked(engine)[0], engine.stats

    @pytest.fixture(params=["llama", "mistral-window", "qwen3"])
    def family(self, request):
        return request.param

    @pytest.fixture
    def right(self, family):
        """The model's own text, prompt included, and something for the places behind its end."""
        return [*self.PROMPT, *own_text(tiny_model(family)), *[5] * 8]

    @pytest.mark.parametrize("max_drafts", range(1, 9))
    def test_never_accepted(self, family, right, max_drafts):
        """Catches leftovers of rejected drafts in tokens or cache: every round must be a plain step."""
        tokens, stats = self.decode(family, lambda row, index: (right[index] + 1) % VOCAB_SIZE, max_drafts)
        assert tokens == right[9 : 9 + NEW_TOKENS]
        assert stats.accepted == 0
        assert stats.rounds == NEW_TOKENS - 1
        assert stats.tokens_per_round == 1

    @pytest.mark.parametrize("max_drafts", range(1, 9))
    def test_always_accepted(self, family, right, max_drafts):
        """Catches a bonus token that is missing, doubled, or taken from the wrong position."""
        tokens, stats = self.decode(family, lambda row, index: right[index], max_drafts)
        assert tokens == right[9 : 9 + NEW_TOKENS]
        assert stats.acceptance_rate == 1
        assert stats.rounds == -(-(NEW_TOKENS - 1) // (max_drafts + 1))
        assert stats.proposed == NEW_TOKENS - 1 - stats.rounds, "the last drafts leave room for the token behind them"

    @pytest.mark.parametrize("right_ones", range(1, 5))
    def test_partly_accepted(self, family, right, right_ones):
        """Catches a rejection that is noticed one position too early or too late."""
        begin = 10  # the first token comes out of the prompt; then every round commits `right_ones` drafts and one more

        def script(row, index):
            wrong = (index - begin) % (right_ones + 1) == right_ones
            return (right[index] + wrong) % VOCAB_SIZE

        tokens, stats = self.decode(family, script, max_drafts=6)
        assert tokens == right[9 : 9 + NEW_TOKENS]
        assert stats.accepted_histogram[right_ones] >= (NEW_TOKENS - 1) // (right_ones + 1)
        assert stats.acceptance_by_offset[:right_ones] == [1.0] * right_ones

    def test_drafts_behind_an_eos_are_not_emitted(self, family, right):
        """Catches accepted drafts behind a stop in tokens, cache or statistics, wherever in the draft it stands."""
        for stop in range(NEW_TOKENS):
            eos = right[9 + stop]
            expected = right[9 : right.index(eos, 9) + 1]
            tokens, stats = self.decode(family, lambda row, index: right[index], max_drafts=4, eos_token_id=(eos,))
            assert tokens == expected
            assert stats.new_tokens == len(expected)


class TestStops:
    """Where a text ends inside a draft, in a model that accepts every draft of its own: stops fall at every offset."""

    ALWAYS = DraftPlan.skip(num_draft_tokens=4)

    @pytest.mark.parametrize("plan", ["nothing", "exit 2", "exit 3", "attention"])
    def test_eos_at_every_place(self, plan):
        model = agreeing_model("llama")
        for eos in own_text(model)[:NEW_TOKENS]:
            self.compare(model, PLANS[plan], "eos", eos_token_id=eos, pad_token_id=0, max_new_tokens=20)

    def test_several_eos_ids(self):
        model, text = agreeing_model("llama"), own_text(agreeing_model("llama"))
        for ids in ([text[7], text[5]], [text[9], 60, text[8]], torch.tensor([text[6], text[4]])):
            self.compare(model, self.ALWAYS, "eos", eos_token_id=ids, pad_token_id=0, max_new_tokens=20)

    @pytest.mark.parametrize("plan", ["nothing", "exit 2"])
    @pytest.mark.parametrize("length", [1, 2, 3])
    def test_stop_strings_at_every_place(self, plan, length):
        """A stop string may begin in one round and end in the middle of another's draft."""
        model, tokenizer = agreeing_model("llama"), character_tokenizer()
        text = tokenizer.decode(own_text(model))
        for begin in range(NEW_TOKENS - length):
            self.compare(
                model, PLANS[plan], "stop_string", stop_strings=[text[begin : begin + length]], max_new_tokens=20,
                tokenizer=tokenizer,
            )  # fmt: skip

    def test_several_stop_strings(self):
        model, tokenizer = agreeing_model("llama"), character_tokenizer()
        text = tokenizer.decode(own_text(model))
        strings = ["never said", text[6:9], text[4:8]]
        self.compare(model, self.ALWAYS, "stop_string", stop_strings=strings, max_new_tokens=20, tokenizer=tokenizer)

    @pytest.mark.parametrize("max_new_tokens", range(1, 13))
    @pytest.mark.parametrize("plan", ["nothing", "exit 2"])
    def test_the_length_at_every_place(self, plan, max_new_tokens):
        self.compare(agreeing_model("llama"), PLANS[plan], "length", max_new_tokens=max_new_tokens)

    @pytest.mark.parametrize("max_length", [10, 11, 17])
    def test_max_length_counts_the_prompt(self, max_length):
        self.compare(agreeing_model("llama"), self.ALWAYS, "length", max_length=max_length)

    def test_the_first_token_can_be_the_last(self):
        model = agreeing_model("llama")
        result = self.compare(
            model, self.ALWAYS, "eos", eos_token_id=own_text(model)[0], pad_token_id=0, max_new_tokens=20
        )
        assert (result.stats.new_tokens, result.stats.rounds) == (1, 0)

    @staticmethod
    def compare(model, plan, reason, tokenizer=None, **settings):
        with_tokenizer = {"tokenizer": tokenizer} if tokenizer else {}
        own = transformers_greedy(model, prompt(), **settings, **with_tokenizer)
        result = wrap(model, tokenizer).generate(prompt(), **always(plan), **{"eos_token_id": None, **settings})
        assert torch.equal(result.sequences, own)
        assert result.finish_reasons == [reason]
        assert result.stats.new_tokens == len(result.new_token_ids[0]) == own.shape[1] - 9
        assert len(result.drafted[0]) == result.stats.new_tokens
        return result


@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
@pytest.mark.parametrize("plan", ["nothing", "exit 2"])
def test_the_last_position_in_mid_draft(plan, num_draft_tokens):
    """A text ends where the model's positions end, even if more was asked for. Catches reads or writes beyond them."""
    model = llama_with(max_positions=24)
    result = wrap(model).generate(
        prompt(), **always(with_drafts(PLANS[plan], num_draft_tokens)), max_new_tokens=100, eos_token_id=None
    )
    assert torch.equal(result.sequences, transformers_greedy(model, prompt(), max_new_tokens=24 - 9))
    assert result.finish_reasons == ["max_positions"]


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 8])
@pytest.mark.parametrize("pass_width", [None, 9])
@pytest.mark.parametrize(
    ("family", "positions"),
    [("gpt2", "n_positions"), ("opt", "max_position_embeddings"), ("gemma3", "max_position_embeddings")],
)
def test_the_last_position_of_families_with_other_positions(family, positions, pass_width, num_draft_tokens):
    """Learned positions have no row beyond the last, also for padding; a window's edge lies before the end."""
    model = with_config(family, **{positions: 24})
    plan = with_drafts(PLANS["exit 2"], num_draft_tokens)
    result = wrap(model).generate(
        prompt(), **always(plan), max_new_tokens=100, eos_token_id=None, pass_width=pass_width
    )
    assert torch.equal(result.sequences, transformers_greedy(model, prompt(), max_new_tokens=24 - 9))
    assert result.finish_reasons == ["max_positions"]


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "cohere2"])
def test_windows_that_texts_grow_out_of(family):
    """From a prompt longer than the window, and from one within it: drafts are rejected on both sides of its edge."""
    model = agreeing_model(family)
    for length in (3, 20):
        own = transformers_greedy(model, prompt(length), max_new_tokens=16)
        for num_draft_tokens in (2, 7):
            plan = with_drafts(PLANS["both"], num_draft_tokens)
            result = wrap(model).generate(prompt(length), **always(plan), max_new_tokens=16, eos_token_id=None)
            assert torch.equal(result.sequences, own)


def test_the_last_position_that_was_asked_for_is_no_surprise():
    model = llama_with(max_positions=24)
    result = wrap(model).generate(prompt(), **always(DraftPlan.exit(2)), max_new_tokens=15, eos_token_id=None)
    assert result.finish_reasons == ["length"]


class TestDraftModel:
    """Another checkpoint drafts, over a cache of its own that must follow every acceptance and rejection."""

    def compare(self, draft, num_draft_tokens=4, target=None, tokenizer=None, max_new_tokens=24):
        target = target or tiny_model("llama")
        plan = DraftPlan.model(draft, num_draft_tokens=num_draft_tokens)
        options = {"max_new_tokens": max_new_tokens, "eos_token_id": None}
        result = wrap(target, tokenizer).generate(prompt(), **always(plan), **options)
        assert torch.equal(result.sequences, transformers_greedy(target, prompt(), max_new_tokens=max_new_tokens))
        return result.stats

    @pytest.mark.parametrize("num_draft_tokens", range(1, 9))
    def test_the_model_itself_is_always_accepted(self, llama, num_draft_tokens):
        """Catches a draft cache that lags by a token or keeps a rejected one: the draft would then differ."""
        stats = self.compare(llama, num_draft_tokens)
        assert stats.acceptance_rate == 1
        assert stats.rounds == -(-23 // (num_draft_tokens + 1))

    @pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 5, 8])
    @pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-window"])
    def test_another_random_model(self, family, num_draft_tokens):
        assert self.compare(tiny_model(family, seed=1), num_draft_tokens).acceptance_rate < 0.5

    @pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
    def test_a_model_that_is_right_most_of_the_time(self, num_draft_tokens):
        """Its cache meets rounds of every outcome. With a wrong cache entry the drafts would stop being accepted."""
        target = agreeing_model("llama")
        draft = AutoModelForCausalLM.from_config(target.config, dtype=torch.float64).eval().requires_grad_(False)
        draft.load_state_dict(target.state_dict())
        for layer in draft.model.layers[2:]:
            layer.mlp.down_proj.weight.zero_()
        outcomes = self.compare(draft, num_draft_tokens, target).accepted_histogram
        assert 0 < outcomes[0] < sum(outcomes)

    def test_drafting_ends_with_the_draft_models_positions(self):
        """Behind them decoding goes on plainly, and up to them the draft is used."""
        target = tiny_model("llama")
        draft = copy.deepcopy(llama_with(max_positions=16))
        draft.load_state_dict(target.state_dict())
        stats = self.compare(draft, 3)
        assert stats.accepted_histogram[3] >= 1
        assert stats.accepted_histogram[0] >= 24 - (16 - 9) - 4

    def test_a_prompt_longer_than_the_draft_models_positions(self):
        stats = self.compare(llama_with(max_positions=8, seed=1))
        assert stats.proposed == 0

    @pytest.mark.parametrize("vocab_size", [57, 64, 80])
    def test_a_vocabulary_padded_to_another_size(self, vocab_size):
        """The tokenizers agree on 57 ids. Catches a draft of an id that the target lacks, or a shape that differs."""
        tokenizer = character_tokenizer(57)
        draft = wrap(llama_with(seed=1, vocab_size=vocab_size), tokenizer)
        self.compare(draft, tokenizer=tokenizer)

    def test_a_surplus_id_is_never_drafted(self):
        """The draft model loves an id beyond the target's vocabulary."""
        draft = llama_with(seed=2, vocab_size=64)
        engine = make_engine(
            tiny_model("llama"), prompt().tolist(), lambda _, context: ModelDrafter(Decoder(draft), context)
        )
        drafter_of(engine).decoder.logits = lambda hidden: torch.ones(*hidden.shape[:2], 64).index_fill(
            -1, torch.tensor([62]), 100.0
        )
        engine.read_prompts()
        with torch.inference_mode():
            assert drafter_of(engine).propose(engine.state, [4]).tokens.max() < VOCAB_SIZE

    def test_a_draft_model_of_another_dtype(self):
        draft = copy.deepcopy(tiny_model("llama")).to(torch.float32)
        assert self.compare(draft).acceptance_rate > 0.9


CONTROLS = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "repetition_reward": {"repetition_penalty": 0.6},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[11], [24, 7], [31, 40, 2]]},
    "suppress_tokens": {"suppress_tokens": [11, 24, 7, 31]},
    "min_new_tokens": {"min_new_tokens": 7, "eos_token_id": [11, 24, 7]},
    "min_length": {"min_length": 13, "eos_token_id": [11, 24, 7]},
    "all": {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[4, 5], [12]],
        "suppress_tokens": [13],
        "min_new_tokens": 5,
        "eos_token_id": 11,
    },
}


@pytest.mark.parametrize("plan", [None, "nothing", "exit 3", "attention"])
@pytest.mark.parametrize("controls", CONTROLS.values(), ids=CONTROLS)
@pytest.mark.parametrize("model", ["random", "agreeing"])
def test_processors_in_greedy_decoding(model, controls, plan):
    """Catches a processor that sees a prefix other than the true one, on draft or target, or in another order."""
    model = agreeing_model("llama") if model == "agreeing" else tiny_model("llama")
    result = wrap(model).generate(
        prompt(), **always(PLANS.get(plan)), max_new_tokens=16, **{"eos_token_id": None, "pad_token_id": 0, **controls}
    )
    assert torch.equal(result.sequences, transformers_greedy(model, prompt(), max_new_tokens=16, **controls))


class TestExactPrefix:
    """What the draft computed exactly is not computed again (and the text is the same if it is)."""

    @pytest.fixture
    def passes(self, monkeypatch):
        """(block, first position, tokens) of every attention pass."""
        record = []
        attend = Block.attend

        def recorded(block, hidden, cache, span):
            record.append((block.index, span.starts[0], span.tokens))
            return attend(block, hidden, cache, span)

        monkeypatch.setattr(Block, "attend", recorded)
        return record

    @pytest.mark.parametrize(
        ("plan", "exact"),
        [("exit 2", 2), ("exit 3", 3), ("attention", 1), ("last layer", 3), ("first layer", 0), ("nothing", 4)],
    )
    def test_early_blocks_run_for_the_last_draft_alone(self, llama, passes, plan, exact):
        """In a round of k drafts, each exact block runs k + 1 tokens in all and each other block k + 1 in one pass."""
        wrap(llama).generate(prompt(), **always(with_drafts(PLANS[plan], 4)), max_new_tokens=6, eos_token_id=None)
        # The prompt gives the first token, at position 9; the first round drafts 4 behind it.
        del passes[:NUM_LAYERS]
        path = [step.block for step in PLANS[plan].path(NUM_LAYERS) if step.attention]
        drafting = [(block, 9 + draft, 1) for draft in range(4) for block in path]
        early = [(block, 13, 1) for block in range(exact)]
        late = [(block, 9, 5) for block in range(exact, NUM_LAYERS)]
        assert passes[: len(drafting + early + late)] == drafting + early + late

    @pytest.mark.parametrize("plan", ["exit 2", "attention", "nothing"])
    def test_output_is_the_same_without_reuse(self, llama, passes, plan):
        options = {**always(PLANS[plan]), "max_new_tokens": 20, "eos_token_id": None}
        reused = wrap(llama).generate(prompt(), **options)
        del passes[:]
        again = wrap(llama).generate(prompt(), **options, pass_width=5)
        assert {tokens for block, start, tokens in passes if start >= 9} == {1, 5}
        assert again.new_token_ids == reused.new_token_ids
        assert again.drafted == reused.drafted


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_cache_holds_the_committed_tokens_after_every_round(plan):
    """Design invariant; catches a rollback that forgets a block, or a block that was never overwritten."""
    model = agreeing_model("llama")
    engine = make_engine(
        model,
        prompt().tolist(),
        lambda decoder, context: SelfDrafter(decoder, plan.path(NUM_LAYERS), context),
        max_new_tokens=20,
    )
    tokens = run_checked(engine)[0]
    assert tokens == transformers_greedy(model, prompt(), max_new_tokens=20)[0, 9:].tolist()
    # Not only the lengths: the entries themselves are those that a fresh pass over the text computes.
    decoder, text = Decoder(model), torch.tensor([[*prompt()[0].tolist(), *tokens[:-1]]])
    fresh, span = decoder.new_cache(1, text.shape[1]), decoder.span([0], text.shape[1])
    decoder.run(decoder.embed(text), decoder.full_path, fresh, span)
    for held, right in zip(engine.state.cache.keys + engine.state.cache.values, fresh.keys + fresh.values, strict=True):
        torch.testing.assert_close(held[:, :, : text.shape[1]], right, rtol=0, atol=1e-10)
