"""The front door: load, wrap, generate, stream, and transformers' objects beside them."""

import dataclasses
import threading
from collections import Counter

import pytest
import torch
from transformers import (
    GPTJConfig,
    GPTJForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

import layerskip
from layerskip import DraftPlan, InputError, Model, UnsupportedModelError, load, wrap
from layerskip.models.loading import quiet
from tests.drafting import always
from tests.naming import told
from tests.special_models import agreeing_model
from tests.tiny_models import prompt, tiny_model, transformers_greedy
from tests.toy_tokenizer import character_tokenizer

OPTIONS = {"max_new_tokens": 20, "eos_token_id": None}


@pytest.fixture
def model():
    return wrap(agreeing_model("llama"), character_tokenizer())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with tokenizer, as `save_pretrained` writes it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    with quiet():
        agreeing_model("llama").save_pretrained(folder)
        character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    with quiet():
        tiny_model("llama").save_pretrained(folder)
    return folder


class TestLoadAndWrap:
    def test_a_loaded_model_generates_as_the_wrapped_one(self, model, folder):
        loaded = load(folder, dtype="float64")
        assert isinstance(loaded, Model)
        for inputs in ("Hello", [3, 4, 5], [{"role": "user", "content": "Hello"}]):
            ours, theirs = (
                each.generate(inputs, **always(DraftPlan.exit(2)), max_new_tokens=8) for each in (loaded, model)
            )
            assert torch.equal(ours.sequences, theirs.sequences)
            assert ours.text == theirs.text

    def test_wrapping_copies_no_weight(self, llama, monkeypatch):
        """Every weight that a linear product reads is one of the model's own."""
        own, used = {parameter.data_ptr() for parameter in llama.parameters()}, set()
        linear = torch.nn.functional.linear

        def watched(inputs, weight, bias=None):
            used.add(weight.data_ptr())
            return linear(inputs, weight, bias)

        monkeypatch.setattr(torch.nn.functional, "linear", watched)  # before wrapping, which takes hold of it
        wrap(llama).generate(prompt(), **OPTIONS)
        assert used <= own
        assert len(used) == 7 * 4 + 1

    @pytest.mark.parametrize("thing", ["a/path", None, torch.nn.Linear(1, 1), LogitsProcessor()], ids=told)
    def test_wrapping_something_else(self, thing):
        with pytest.raises(UnsupportedModelError, match=r"got a \w+; expected a transformers model.*layerskip.load"):
            wrap(thing)

    def test_wrapping_an_architecture_without_a_row(self):
        other = GPTJForCausalLM(GPTJConfig(n_layer=1, n_head=1, n_embd=8, rotary_dim=4, vocab_size=9))
        with pytest.raises(UnsupportedModelError, match=r"'GPTJForCausalLM'; supported are .*LlamaFor.*To add one"):
            wrap(other)

    def test_everything_public_is_named(self):
        assert all(hasattr(layerskip, name) for name in layerskip.__all__)


class TestResult:
    def test_sequences_are_prompt_and_new_tokens(self, model):
        result = model.generate(prompt(), **OPTIONS)
        assert torch.equal(result.sequences, transformers_greedy(model.hf_model, prompt(), max_new_tokens=20))
        assert result.sequences.dtype == torch.int64
        assert result.sequences[0, 9:].tolist() == result.new_token_ids[0]

    def test_text_is_the_new_text(self, model):
        result = model.generate("Hello", **OPTIONS)
        assert result.text == model.tokenizer.decode(result.new_token_ids[0], skip_special_tokens=True)
        assert result.texts == [result.text]

    def test_text_of_several_rows(self, model):
        result = model.generate(["Hello", "World"], **OPTIONS)
        assert result.texts == [model.generate(each, **OPTIONS).text for each in ("Hello", "World")]
        with pytest.raises(InputError, match=r"got 2 rows; expected one for .text. Read .texts"):
            _ = result.text

    def test_special_tokens_are_no_text(self, model):
        class End(LogitsProcessor):
            def __call__(self, input_ids, scores):
                return scores if input_ids.shape[1] < 8 else scores.index_fill(1, torch.tensor([2]), 1e9)

        result = model.generate("Hello", logits_processor=LogitsProcessorList([End()]), eos_token_id=2)
        assert result.new_token_ids[0][-1] == 2
        assert "</s>" not in result.text

    @pytest.mark.parametrize("read", ["text", "texts"])
    def test_text_without_a_tokenizer(self, llama, read):
        result = wrap(llama).generate(prompt(), max_new_tokens=2)
        with pytest.raises(InputError, match=r"got no tokenizer to make text with; pass one to wrap.*\.sequences"):
            getattr(result, read)

    def test_drafted_flags_agree_with_the_statistics(self, model):
        result = model.generate(prompt(), **always(DraftPlan.exit(3)), **OPTIONS)
        assert sum(result.drafted[0]) == result.stats.accepted > 0
        assert result.drafted[0][0] is False

    def test_plain_decoding_drafts_nothing(self, model):
        result = model.generate(prompt(), **OPTIONS)
        assert (result.plan, result.stats.proposed, result.stats.tokens_per_round) == (None, 0, 1)
        assert not any(result.drafted[0])

    def test_it_cannot_be_changed(self, model):
        with pytest.raises(dataclasses.FrozenInstanceError):
            model.generate(prompt(), max_new_tokens=1).sequences = None


class TestTransformersSwitches:
    """assistant_early_exit, assistant_model, num_assistant_tokens and assistant_confidence_threshold."""

    def compare(self, model, plan, **switches):
        result = model.generate(prompt(), governor="off", **switches, **OPTIONS)
        assert result.plan == plan
        assert torch.equal(result.sequences, transformers_greedy(model.hf_model, prompt(), max_new_tokens=20))
        assert result.stats.proposed > 0

    def test_early_exit(self, model):
        self.compare(model, DraftPlan.exit(2, num_draft_tokens=3), assistant_early_exit=2, num_assistant_tokens=3)

    def test_a_threshold(self, model):
        plan = DraftPlan.exit(2, confidence_threshold=0.3)
        self.compare(model, plan, assistant_early_exit=2, assistant_confidence_threshold=0.3)

    def test_a_model_by_path(self, model, draft_folder):
        self.compare(model, DraftPlan.model(str(draft_folder)), assistant_model=str(draft_folder))
        self.compare(model, DraftPlan.model(str(draft_folder)), assistant_model=draft_folder)

    def test_a_model_by_path_is_loaded_once_in_the_models_dtype(self, model, draft_folder, monkeypatch):
        """Catches a draft model read from disk at every call."""
        loads = []
        monkeypatch.setattr(
            layerskip.api, "load", lambda *args, **options: loads.append(options) or load(*args, **options)
        )
        for _ in range(2):
            model.generate(prompt(), assistant_model=str(draft_folder), max_new_tokens=4)
        assert loads == [{"dtype": torch.float64, "device": torch.device("cpu")}]

    def test_a_transformers_model(self, model):
        self.compare(model, DraftPlan.model(tiny_model("qwen3")), assistant_model=tiny_model("qwen3"))

    def test_a_wrapped_model(self, model):
        draft = wrap(tiny_model("llama"), character_tokenizer())
        self.compare(model, DraftPlan.model(draft), assistant_model=draft)

    def test_a_plan_file_beside_its_draft_model(self, model, draft_folder):
        DraftPlan.model(draft_folder, num_draft_tokens=3).save(draft_folder.parent / "plan.json")
        result = model.generate(prompt(), **always(draft_folder.parent / "plan.json"), **OPTIONS)
        assert result.plan.draft_model == str(draft_folder.resolve())
        assert torch.equal(result.sequences, transformers_greedy(model.hf_model, prompt(), max_new_tokens=20))


class TestStreamers:
    """transformers' streamers get what they get from transformers."""

    class Recorder(BaseStreamer):
        def __init__(self):
            self.calls = []

        def put(self, value):
            self.calls.append(value.clone())

        def end(self):
            self.calls.append("end")

    @pytest.mark.parametrize("plan", [None, DraftPlan.exit(2), DraftPlan.skip()], ids=["plain", "exit", "all"])
    def test_the_same_calls_as_from_transformers(self, model, plan):
        """The prompt, then the tokens one by one, then the end; drafts make no difference."""
        ours, theirs = self.Recorder(), self.Recorder()
        model.generate(prompt(), **always(plan), streamer=ours, **OPTIONS)
        transformers_greedy(model.hf_model, prompt(), max_new_tokens=20, streamer=theirs)
        assert len(ours.calls) == len(theirs.calls) == 22
        for our, their in zip(ours.calls[:-1], theirs.calls[:-1], strict=True):
            assert torch.equal(our, their)
        assert ours.calls[-1] == "end"

    def test_nothing_behind_a_stop(self, model):
        """An EOS inside an accepted draft ends the stream with it."""
        text = transformers_greedy(model.hf_model, prompt(), max_new_tokens=20)[0].tolist()
        recorder = self.Recorder()
        model.generate(
            prompt(), **always(DraftPlan.skip()), streamer=recorder, eos_token_id=text[12], max_new_tokens=20
        )
        assert [int(call) for call in recorder.calls[1:-1]] == text[9 : text.index(text[12], 9) + 1]

    def test_text_streamer(self, model, capsys):
        streamer = TextStreamer(model.tokenizer, skip_prompt=True, skip_special_tokens=True)
        result = model.generate("Hello", **always(DraftPlan.exit(2)), streamer=streamer, **OPTIONS)
        assert capsys.readouterr().out == result.text + "\n"

    def test_text_iterator_streamer_in_a_thread(self, model):
        streamer = TextIteratorStreamer(model.tokenizer, skip_prompt=True, timeout=60, skip_special_tokens=True)
        thread = threading.Thread(
            target=model.generate, args=("Hello",), kwargs={"streamer": streamer, "plan": DraftPlan.exit(2), **OPTIONS}
        )
        thread.start()
        text = "".join(streamer)
        thread.join()
        assert text == model.generate("Hello", **OPTIONS).text

    def test_a_batch_is_refused_before_anything_is_put(self, model):
        recorder = self.Recorder()
        with pytest.raises(InputError, match="got 2 rows to stream; expected one"):
            model.generate([[3], [4]], streamer=recorder)
        assert recorder.calls == []


def test_a_streamer_is_shown_each_token_when_it_is_committed(model):
    """Catches tokens that are handed over only at the end of the call."""
    seen = []

    class Watch(BaseStreamer):
        def put(self, value):
            seen.append("token")

        def end(self):
            pass

    class Note(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append("pass")
            return scores

    model.generate(prompt(), streamer=Watch(), logits_processor=[Note()], max_new_tokens=3, eos_token_id=None)
    assert seen == ["token", *["pass", "token"] * 3]


@pytest.mark.parametrize("family", ["llama", "llama-dynamic-rope", "mistral-window", "qwen3"])
def test_threads_with_different_plans_do_not_disturb_each_other(family):
    """One model, four threads, four plans: catches state that is kept in the model or in a module."""
    hf_model = agreeing_model(family)
    model, own = wrap(hf_model), transformers_greedy(hf_model, prompt(), max_new_tokens=20)
    plans = [None, DraftPlan.exit(1), DraftPlan.exit(3, num_draft_tokens=7), DraftPlan.skip([1, 2])]
    barrier, wrong = threading.Barrier(len(plans)), Counter()

    def decode(plan):
        barrier.wait()
        for _ in range(2):
            wrong[not torch.equal(model.generate(prompt(), **always(plan), **OPTIONS).sequences, own)] += 1

    threads = [threading.Thread(target=decode, args=(plan,)) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == {False: 8}


def test_two_streams_of_one_model_may_be_read_in_turns(model):
    """Each holds a cache and tokens of its own."""
    inputs = ("Hello", "World")
    streams = [model.stream(each, **always(DraftPlan.exit(2)), **OPTIONS) for each in inputs]
    for _ in range(10):
        for stream in streams:
            next(stream)
    assert [stream.result.text for stream in streams] == [model.generate(each, **OPTIONS).text for each in inputs]
