"""What other implementations of self-speculative decoding are reported to get wrong, checked at the front door.

Only what no test of a part covers: settings that are dropped, exits beyond the model, stops that are overshot.
"""

import functools
import threading

import pytest
import torch

from layerskip import DraftPlan, PlanError, wrap
from layerskip.models.adapter_file import save_adapter
from tests.drafting import always
from tests.special_models import agreeing_model, llama_with
from tests.test_adapter import SPECS, adapter_of
from tests.test_lookup import Says
from tests.tiny_models import NUM_LAYERS, prompt, transformers_greedy
from tests.toy_tokenizer import character_tokenizer

LONG = prompt(40, seed=3).repeat(1, 2)  # a passage that comes twice: there is something to look up
GREEDY = {"max_new_tokens": 40, "eos_token_id": None}


@pytest.fixture
def model():
    return wrap(agreeing_model("llama"), character_tokenizer())


class TestDraftSettings:
    """Those of the call act, in a plan and without one, and the effective ones stand in the result."""

    @pytest.mark.parametrize("tokens", [1, 3, 7])
    @pytest.mark.parametrize("way", [{"assistant_early_exit": 3}, {"plan": DraftPlan.exit(3, num_draft_tokens=5)}])
    def test_the_draft_length(self, model, way, tokens):
        result = model.generate(prompt(), **way, num_assistant_tokens=tokens, governor="off", **GREEDY)
        assert result.plan == DraftPlan.exit(3, num_draft_tokens=tokens)
        # Every round drafts as much as there is room for: the last ones less.
        assert result.stats.proposed / result.stats.rounds > 0.7 * tokens
        assert len(result.stats.accepted_histogram) == tokens + 1

    @pytest.mark.parametrize("tokens", [1, 4])
    def test_the_length_of_a_lookup(self, model, tokens):
        result = model.generate(LONG, prompt_lookup_num_tokens=tokens, governor="off", **GREEDY)
        assert result.plan == DraftPlan.lookup(tokens)
        assert 0 < result.stats.proposed <= tokens * result.stats.rounds
        assert len(result.stats.accepted_histogram) == tokens + 1

    def test_the_confidence(self, model):
        """The higher, the sooner a draft ends."""
        proposed = []
        for threshold in (0.0, 0.4, 0.99):
            options = {"assistant_early_exit": 2, "assistant_confidence_threshold": threshold}
            result = model.generate(prompt(), **options, num_assistant_tokens=6, governor="off", **GREEDY)
            assert result.plan.confidence_threshold == threshold
            proposed.append(result.stats.proposed / result.stats.rounds)
        assert proposed[0] > proposed[1] > proposed[2]

    def test_the_exit(self, model):
        """A deeper one is right more often."""
        rates = []
        for layer in range(1, NUM_LAYERS):
            result = model.generate(prompt(), assistant_early_exit=layer, governor="off", **GREEDY)
            assert result.plan.exit_layer == layer
            rates.append(result.stats.acceptance_rate)
        assert rates == sorted(rates) and rates[0] < rates[-1]

    @pytest.mark.parametrize("layer", [0, NUM_LAYERS, NUM_LAYERS + 1, 100])
    @pytest.mark.parametrize("way", ["plan", "switch"])
    def test_an_exit_that_is_none(self, model, way, layer):
        with pytest.raises(PlanError, match=r"exit.*expected (1 to 3|a layer count from 1 to one less)"):
            options = {"plan": DraftPlan.exit(layer)} if way == "plan" else {"assistant_early_exit": layer}
            model.generate(prompt(), **options)


class TestStops:
    @pytest.mark.parametrize("length", [1, 2, 3])
    @pytest.mark.parametrize("plan", [DraftPlan.lookup(5), DraftPlan.exit(3, lookup_tokens=5)], ids=["lookup", "both"])
    def test_stop_strings_inside_what_was_looked_up(self, model, plan, length):
        """The model repeats the prompt, whatever is copied is accepted, and a stop string ends at every place of it."""
        passage, inside = torch.randperm(58, generator=torch.Generator().manual_seed(0))[:20].add(3).tolist(), 0
        before, text = [*passage, passage[0]], passage[1:]
        for begin in range(len(text) - length):
            result = model.generate(
                before, **always(plan), logits_processor=[Says(len(before), text)], max_new_tokens=len(text),
                stop_strings=model.tokenizer.decode(text[begin : begin + length]), eos_token_id=None,
            )  # fmt: skip
            assert result.new_token_ids == [text[: begin + length]]
            assert result.finish_reasons == ["stop_string"]
            inside += result.drafted[0][-1]
        assert inside > 10

    @pytest.mark.parametrize("plan", [None, DraftPlan.exit(2), DraftPlan.lookup()], ids=["plain", "exit", "lookup"])
    def test_a_pad_id_that_is_an_end_of_text(self, plan):
        """Padding of the prompts is no end, and padding behind an end is not counted."""
        hf_model, rows = agreeing_model("llama"), [prompt(9)[0].tolist(), prompt(4, seed=4)[0].tolist()]
        eos = int(transformers_greedy(hf_model, torch.tensor([rows[0]]), max_new_tokens=5)[0, -1])
        ids = torch.tensor([rows[0], [eos] * 5 + rows[1]])
        mask = torch.tensor([[1] * 9, [0] * 5 + [1] * 4])
        options = {"attention_mask": mask, "eos_token_id": eos, "max_new_tokens": 14}
        result = wrap(hf_model).generate(ids, **always(plan), **options, pad_token_id=eos)
        assert torch.equal(result.sequences, hf_model.generate(ids, **options, pad_token_id=eos, do_sample=False))
        assert result.stats.new_tokens == sum(map(len, result.new_token_ids)) < result.sequences[:, 9:].numel()


class TestWholeText:
    @pytest.mark.parametrize(
        "plan", [DraftPlan.exit(3), DraftPlan.lookup(6), DraftPlan.skip()], ids=["exit", "lookup", "all"]
    )
    def test_a_repetition_penalty_sees_prompt_output_and_drafts(self, model, plan):
        """One that saw a window, or the drafts alone, would say something again."""
        options = {"repetition_penalty": 1e6, "max_new_tokens": 45, "eos_token_id": None}
        result = model.generate(prompt(9), **always(plan), **options)
        text = result.sequences[0].tolist()
        assert len(set(text)) == len(set(prompt(9)[0].tolist())) + 45, "a token that was there came again"
        assert torch.equal(result.sequences, transformers_greedy(model.hf_model, prompt(9), **options))

    @pytest.mark.parametrize("rows", [1, 2])
    def test_top_p_cuts_each_row_by_its_own_scores(self, model, rows):
        """A nucleus of hardly any mass is the likeliest token, at every place of a draft and in every row."""
        inputs = [prompt(9)[0].tolist(), prompt(5, seed=1)[0].tolist()][:rows]
        options = {"max_new_tokens": 30, "eos_token_id": None}
        greedy = model.generate(inputs, **options)
        for rule, plan in (("maximal", DraftPlan.exit(3)), ("invariant", DraftPlan.skip(num_draft_tokens=6))):
            result = model.generate(inputs, **always(plan), do_sample=True, top_p=1e-9, acceptance_rule=rule, **options)
            assert result.new_token_ids == greedy.new_token_ids


class TestVocabularyPaddedBeyondTheTokenizer:
    """Rows of the embedding that no token has: the model may choose them all the same, and nothing may break."""

    @pytest.fixture
    def padded(self):
        return wrap(llama_with(vocab_size=96), character_tokenizer())

    @pytest.mark.parametrize("plan", [DraftPlan.exit(2), DraftPlan.lookup(), DraftPlan.skip(num_draft_tokens=4),
                                      DraftPlan.exit(3, draft_vocabulary=range(61))],
                             ids=["exit", "lookup", "all", "vocabulary"])  # fmt: skip
    def test_output_is_the_models_own(self, padded, plan):
        own = transformers_greedy(padded.hf_model, prompt(), max_new_tokens=40)
        assert (own >= 61).any(), "the model never chose such an id"
        result = padded.generate(prompt(), **always(plan), **GREEDY)
        assert torch.equal(result.sequences, own)
        text = padded.tokenizer.decode(own[0, 9:], skip_special_tokens=True)
        assert result.text == text == "".join(padded.stream(prompt(), **always(plan), **GREEDY))

    def test_stop_strings(self, padded):
        own = transformers_greedy(padded.hf_model, prompt(), max_new_tokens=40)[0, 9:].tolist()
        place = next(index for index, token in enumerate(own) if index > 5 and 3 <= token < 61)
        stop = padded.tokenizer.decode(own[place])
        for plan in (None, DraftPlan.exit(2), DraftPlan.skip(num_draft_tokens=4)):
            result = padded.generate(prompt(), **always(plan), stop_strings=stop, **GREEDY)
            assert result.new_token_ids[0] == own[: own.index(own[place]) + 1]


def test_threads_with_every_kind_of_plan(tmp_path):
    """One model, a thread for each: trained blocks, lookup, another model, sampling, batches; each as if alone."""
    hf_model = agreeing_model("llama")
    save_adapter(adapter_of(hf_model, SPECS["exit and state"]), tmp_path / "a.safetensors", torch.float64)
    model = wrap(hf_model, character_tokenizer())
    batch = [LONG[0, :30].tolist(), prompt(5, seed=2)[0].tolist()]
    sampled = {"do_sample": True, "seed": 7, "acceptance_rule": "invariant", "top_p": 0.9}
    calls = {
        "plain": ([LONG[0].tolist()], {}),
        "adapter": (batch, always(DraftPlan(exit_layer=2, adapter=tmp_path / "a.safetensors"))),
        "lookup": (batch, always(DraftPlan.lookup(5))),
        "exit and lookup": (batch, {**always(DraftPlan.exit(3, lookup_tokens=4)), **sampled}),
        "model": (batch, always(DraftPlan.model(agreeing_model("llama", 0.1)))),
        "vocabulary": (batch, {**always(DraftPlan.exit(2, draft_vocabulary=range(3, 40))), **sampled}),
        "governed": (batch, {"plan": DraftPlan.exit(1)}),
        "recorded": (batch, {**always(DraftPlan.exit(2)), "cuda_graphs": True}),
        "penalised": (batch, {**always(DraftPlan.skip([1])), "repetition_penalty": 1.5}),
    }  # fmt: skip
    decode = functools.partial(model.generate, max_new_tokens=16, eos_token_id=None)
    alone = {name: decode(inputs, **options) for name, (inputs, options) in calls.items()}
    together, barrier = {name: [] for name in calls}, threading.Barrier(len(calls))

    def run(name):
        inputs, options = calls[name]
        barrier.wait()
        for _ in range(2):
            together[name].append(decode(inputs, **options))

    threads = [threading.Thread(target=run, args=(name,)) for name in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, results in together.items():
        assert [result.new_token_ids for result in results] == [alone[name].new_token_ids] * 2, name
        assert {result.plan for result in results} == {alone[name].plan}
        if name not in ("plain", "governed"):
            assert {result.stats.accepted for result in results} == {alone[name].stats.accepted} != {0}, name
