"""The borders of a round and of a call: void positions, second devices, padded input, streams that end early."""

import pytest
import torch
from transformers import LogitsProcessor

import layerskip
from layerskip.errors import InputError, PlanMismatchError
from layerskip.exactness import Difference
from tests.drafting import always
from tests.engines import ScriptedDrafter, make_engine, run_checked
from tests.tiny_models import prompt, tiny_model, transformers_greedy
from tests.toy_tokenizer import character_tokenizer


class Recorder(LogitsProcessor):
    """Notes every prefix it is asked about; may refuse one that holds a token."""

    def __init__(self, refused: int | None = None) -> None:
        self.prefixes: list[list[int]] = []
        self.refused = refused

    def __call__(self, input_ids, scores):
        self.prefixes += input_ids.tolist()
        assert all(self.refused not in prefix for prefix in input_ids.tolist()), "a grammar that has ended"
        return scores


def greedy_text(length: int = 12) -> list[int]:
    return transformers_greedy(tiny_model("llama"), prompt(), max_new_tokens=length)[0].tolist()


def test_processors_are_not_asked_behind_a_drafted_eos():
    """A grammar may refuse to go on behind an end of text; plain decoding never asks it to."""
    text = greedy_text()
    eos = text[12]
    first = text.index(eos, 9)
    recorder = Recorder(refused=eos)
    assert eos not in text[:9]
    engine = make_engine(
        tiny_model("llama"),
        [text[:9]],
        lambda decoder, context: ScriptedDrafter(context, lambda row, index: text[min(index, len(text) - 1)]),
        max_drafts=8,
        processors=[recorder],
        eos_token_id=(eos,),
    )
    assert run_checked(engine) == [text[9 : first + 1]]


def test_processors_are_not_asked_about_padding_or_finished_rows():
    """In a batch a row that drafts less than the others, or has ended, is padded: those prefixes are of nobody."""
    model, recorder = layerskip.wrap(tiny_model("llama")), Recorder()
    prompts = [prompt()[0].tolist(), prompt(5, seed=1)[0].tolist()]
    plan = layerskip.DraftPlan.exit(2, num_draft_tokens=5, confidence_threshold=0.3)
    result = model.generate(
        prompts, **always(plan), logits_processor=[recorder], max_new_tokens=10, eos_token_id=[7, 11]
    )
    longest = [len(row) + len(new) for row, new in zip(prompts, result.new_token_ids, strict=True)]
    for row, given in enumerate(prompts):
        asked = [prefix for prefix in recorder.prefixes if prefix[: len(given)] == given]
        assert asked
        # Drafts that fall are asked about too, but none beyond the last round's drafts and nothing behind an EOS.
        assert max(map(len, asked)) < longest[row] + plan.num_draft_tokens
        assert not any({7, 11} & set(prefix[len(given) :]) for prefix in asked)


@pytest.mark.parametrize("first_on_second_device", [1, 2, 3])
@pytest.mark.parametrize("exit_layer", [1, 2, 3])
def test_a_draft_that_ends_on_another_device_than_it_began(first_on_second_device, exit_layer, monkeypatch):
    """Each pass runs in two parts; both must use the masks and tables of the device that their blocks are on."""
    model = layerskip.wrap(tiny_model("mistral-window"))
    second, seen = torch.device("cpu", 1), []
    monkeypatch.setattr(model.decoder, "is_spread", True)
    for block in model.decoder.blocks[first_on_second_device:]:
        monkeypatch.setattr(block, "device", second)
    for block in model.decoder.blocks:
        attend = block.attend
        monkeypatch.setattr(
            block,
            "attend",
            lambda hidden, cache, span, attend=attend, block=block: (
                seen.append((block.device, span._device)) or attend(hidden, cache, span)
            ),
        )
    plan = layerskip.DraftPlan.exit(exit_layer)
    result = model.generate(prompt(), **always(plan), max_new_tokens=9, eos_token_id=None)
    assert torch.equal(result.sequences, transformers_greedy(model.hf_model, prompt(), max_new_tokens=9))
    assert all(of_block == of_span for of_block, of_span in seen)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts_come_back_as_they_came(side):
    """`output[:, input_ids.shape[1]:]` is how everyone cuts the new tokens off."""
    model, text, pad = layerskip.wrap(tiny_model("llama")), prompt(), torch.zeros(1, 4, dtype=torch.int64)
    parts = [(pad, torch.zeros_like(pad)), (text, torch.ones_like(text))]
    ids, mask = (torch.cat(each, 1) for each in zip(*(parts if side == "left" else parts[::-1]), strict=True))
    result = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, num_return_sequences=2)
    assert torch.equal(result.sequences[:, : ids.shape[1]], ids.expand(2, -1))
    assert result.sequences[0, ids.shape[1] :].tolist() == result.new_token_ids[0]
    assert result.new_token_ids[0] == model.generate(text, max_new_tokens=6).new_token_ids[0]


class TestStreamsThatEndEarly:
    @pytest.fixture
    def model(self):
        return layerskip.wrap(tiny_model("llama"), character_tokenizer())

    def test_result_raises_what_the_stream_raised(self, model):
        """Half an output must not pass for a whole one."""

        def fail(input_ids, scores):
            if input_ids.shape[1] > 12:
                raise RuntimeError("the caller's own fault")
            return scores

        stream = model.stream(prompt(), logits_processor=[fail], max_new_tokens=10, eos_token_id=None)
        with pytest.raises(RuntimeError, match="own fault"):
            list(stream)
        with pytest.raises(RuntimeError, match="own fault"):
            _ = stream.result

    def test_a_closed_stream_has_what_was_committed(self, model):
        stream = model.stream(prompt(), max_new_tokens=30, eos_token_id=None)
        next(stream)
        stream.close()
        result = stream.result
        assert result.finish_reasons == ["closed"]
        assert 1 <= len(result.new_token_ids[0]) < 30
        assert list(stream) == []

    def test_a_streamer_is_refused(self, model):
        with pytest.raises(InputError, match="got a streamer for stream"):
            model.stream(prompt(), streamer=object())


def test_a_draft_model_on_another_device_is_refused(monkeypatch):
    model, draft = layerskip.wrap(tiny_model("llama")), layerskip.wrap(tiny_model("llama", seed=1))
    monkeypatch.setattr(draft.decoder, "device", torch.device("cpu", 1))
    with pytest.raises(PlanMismatchError, match=r"draft model on cpu:1 for a model on cpu; .*Move one"):
        model.generate(prompt(), plan=layerskip.DraftPlan.model(draft))


def test_a_lost_tail_is_no_near_tie():
    lost = Difference(3, None, 5, 0.0, 1.0, 1.0, torch.bfloat16, torch.float32)
    assert not lost.is_near_tie


def test_loading_a_draft_model_is_not_on_the_clock_of_max_time(monkeypatch):
    """`max_time` is for decoding; a first call that loads a draft model must not end after one token."""
    import layerskip.api

    clock = [0.0]
    monkeypatch.setattr("transformers.generation.stopping_criteria.time.time", lambda: clock[0])

    def slow_load(*arguments, **options):
        clock[0] += 100.0
        return tiny_model("llama", seed=1), None

    monkeypatch.setattr(layerskip.api, "load_checkpoint", slow_load)
    model = layerskip.wrap(tiny_model("llama"))
    result = model.generate(prompt(), assistant_model="some/where", max_time=50.0, max_new_tokens=6, eos_token_id=None)
    assert result.finish_reasons == ["length"]


class TestOddInputs:
    """Each of these once escaped as a raw Python error."""

    @pytest.fixture
    def model(self):
        return layerskip.wrap(tiny_model("llama"), character_tokenizer())

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            ({"stop_strings": "\N{GRINNING FACE}"}, "which this tokenizer cannot write"),
            ({"eos_token_id": 2**63}, "expected one token id"),
            ({"pad_token_id": 10**30}, "expected a token id"),
            ({"pass_width": 10**30}, "expected an integer from 1"),
            ({"acceptance_rule": False}, "got acceptance_rule=False"),
            ({"acceptance_rule": 1}, "got acceptance_rule=1"),
            ({"acceptance_rule": ["maximal"]}, "got acceptance_rule="),
            ({"attention_mask": 1}, "got attention_mask=1"),
            ({"attention_mask": {"a": 1}}, "got attention_mask="),
            ({"streamer": True}, "got streamer=True"),
            ({"assistant_model": ["x"]}, "got a draft model of type list"),
            ({"logits_processor": [lambda ids, scores: None]}, "got None from the logits processors"),
            ({"logits_processor": [lambda ids, scores: scores[:, :5]]}, "expected scores of shape"),
        ],
    )
    def test_is_refused(self, model, call, message):
        with pytest.raises(layerskip.LayerSkipError, match=message):
            model.generate(prompt(), **call)

    @pytest.mark.parametrize("text", ["\ud800", [{"role": "user", "content": "a\udcff"}]])
    def test_broken_text_is_refused(self, model, text):
        with pytest.raises(InputError, match="expected valid Unicode"):
            model.generate(text)

    @pytest.mark.parametrize("drafts", [10**6, 10**30])
    def test_a_draft_length_beyond_all_room_costs_nothing(self, model, drafts):
        plan = layerskip.DraftPlan.exit(2, num_draft_tokens=drafts)
        result = model.generate(prompt(), **always(plan), max_new_tokens=8, eos_token_id=None)
        assert torch.equal(result.sequences, transformers_greedy(model.hf_model, prompt(), max_new_tokens=8))
        assert len(result.stats.accepted_histogram) <= 9

    def test_a_numpy_mask_is_a_mask(self, model):
        mask = torch.ones(1, 9).numpy()
        assert model.generate(prompt(), attention_mask=mask).new_token_ids == model.generate(prompt()).new_token_ids


def test_plans_hash_and_refuse_what_is_no_path():
    assert len({layerskip.DraftPlan.exit(2), layerskip.DraftPlan.exit(2)}) == 1
    for no_path in (None, 3):
        with pytest.raises(layerskip.PlanError, match="expected a string or a path"):
            layerskip.DraftPlan.load(no_path)
    with pytest.raises(layerskip.PlanError, match="a probability from 0 to 1"):
        layerskip.DraftPlan.exit(2, confidence_threshold=10**400)


def test_a_broken_generation_config_is_refused(tmp_path):
    """Transformers passes over it, and the checkpoint's own end-of-text ids with it."""
    tiny_model("llama").save_pretrained(tmp_path)
    layerskip.load(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, ')
    with pytest.raises(layerskip.CheckpointError, match="generation_config"):
        layerskip.load(tmp_path)
