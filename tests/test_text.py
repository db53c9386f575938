"""Text that appears piece by piece: whole characters only, and together exactly the text of the whole."""

import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

from layerskip import DraftPlan, InputError, StreamPiece, wrap
from layerskip.text import Detokenizer
from tests.drafting import always
from tests.special_models import agreeing_model
from tests.tiny_models import prompt
from tests.toy_tokenizer import byte_tokenizer, character_tokenizer, word_tokenizer

TEXTS = ["plain", "naïve café", "日本語のテキスト", "🙂👩‍👩‍👧", "a🙂b\n\nc", " spaces  ", "é" * 20, ""]


def pieces_of(tokenizer, token_ids, **options) -> list[str]:
    """The piece after each token, and the one at the end."""
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.push(token) for token in token_ids), detokenizer.flush()]


class TestDetokenizer:
    @pytest.mark.parametrize("text", TEXTS)
    def test_pieces_make_up_the_text(self, text):
        assert "".join(pieces_of(byte_tokenizer(), byte_tokenizer()(text)["input_ids"])) == text

    @pytest.mark.parametrize("text", TEXTS)
    def test_no_piece_holds_a_broken_character(self, text):
        """A character of several tokens appears with its last one. Catches the replacement character in a stream."""
        for piece in pieces_of(byte_tokenizer(), byte_tokenizer()(text)["input_ids"]):
            assert "\ufffd" not in piece

    def test_a_character_appears_with_its_last_token(self):
        tokens = byte_tokenizer()("a🙂b")["input_ids"]
        assert pieces_of(byte_tokenizer(), tokens) == ["a", "", "", "", "🙂", "b", ""]

    def test_a_word_keeps_the_space_before_it(self):
        """A tokenizer strips the space of a text's first token: catches pieces decoded each on its own."""
        tokens = word_tokenizer()("ba de fal go")["input_ids"]
        assert pieces_of(word_tokenizer(), tokens) == ["ba", " de", " fal", " go", ""]

    def test_special_tokens_have_no_text(self):
        tokens = [*character_tokenizer()("ab")["input_ids"], 2, *character_tokenizer()("c")["input_ids"], 2]
        assert pieces_of(character_tokenizer(), tokens) == ["a", "b", "", "c", "", ""]

    def test_special_tokens_are_shown_on_request(self):
        tokens = [*character_tokenizer()("ab")["input_ids"], 2]
        assert pieces_of(character_tokenizer(), tokens, skip_special_tokens=False) == ["a", "b", "</s>", ""]

    def test_what_never_becomes_a_character_comes_at_the_end(self):
        """The text of the whole has it as a replacement character, so the stream must too."""
        tokens = byte_tokenizer()("a🙂")["input_ids"][:-2]
        pieces = pieces_of(byte_tokenizer(), tokens)
        assert pieces[:-1] == ["a", "", ""]
        assert "".join(pieces) == byte_tokenizer().decode(tokens)

    @pytest.mark.parametrize("make_tokenizer", [byte_tokenizer, character_tokenizer, word_tokenizer])
    def test_any_tokens_at_all(self, make_tokenizer):
        """A model may say anything, also bytes that are no text; 200 random sequences each."""
        tokenizer, dice = make_tokenizer(), random.Random(0)
        for _ in range(200):
            tokens = [dice.randrange(len(tokenizer)) for _ in range(dice.randrange(12))]
            assert "".join(pieces_of(tokenizer, tokens)) == tokenizer.decode(tokens, skip_special_tokens=True)

    def test_flushing_twice_repeats_nothing(self):
        detokenizer = Detokenizer(byte_tokenizer())
        detokenizer.push(byte_tokenizer()("🙂")["input_ids"][0])
        assert detokenizer.flush()
        assert detokenizer.flush() == ""

    def test_long_texts_take_time_in_proportion(self):
        """Only a window is decoded again. Catches decoding of the whole text at every token."""
        decoded = 0

        class Counting:
            def decode(self, token_ids, **options):
                nonlocal decoded
                decoded += len(token_ids)
                return byte_tokenizer().decode(token_ids, **options)

        tokens = byte_tokenizer()("ordinary text 🙂 " * 100)["input_ids"]
        pieces_of(Counting(), tokens)
        assert decoded < 20 * len(tokens)


class Dictate(LogitsProcessor):
    """Makes the model say a text."""

    def __init__(self, prompt_length: int, token_ids: list[int]) -> None:
        self.prompt_length, self.token_ids = prompt_length, token_ids

    def __call__(self, input_ids, scores):
        token = self.token_ids[min(input_ids.shape[1] - self.prompt_length, len(self.token_ids) - 1)]
        return torch.full_like(scores, float("-inf")).index_fill(1, torch.tensor([token]), 0.0)


def byte_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(byte_tokenizer()), hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    return wrap(LlamaForCausalLM(config).eval().requires_grad_(False), byte_tokenizer())


PLANS = {
    "plain": None,
    "exit": DraftPlan.exit(1, num_draft_tokens=3),
    "whole model": DraftPlan.skip(num_draft_tokens=5),
}


def engine_of(stream):
    """What decodes as the stream is read."""
    return stream._make_result.args[1]


class TestStream:
    @pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
    @pytest.mark.parametrize("text", [text for text in TEXTS if text])
    def test_characters_stay_whole_in_drafts(self, text, plan):
        """Drafts end in the middle of characters; pieces do not."""
        tokens = byte_tokenizer()(text)["input_ids"]
        processors = LogitsProcessorList([Dictate(2, [*tokens, 2])])
        options = {"logits_processor": processors, "eos_token_id": 2, "max_new_tokens": 99}
        stream = byte_model().stream("hi", **always(plan), **options)
        pieces = list(stream)
        assert "".join(pieces) == text == stream.result.text
        assert not any("\ufffd" in piece for piece in pieces)
        assert stream.result.new_token_ids == [[*tokens, 2]]

    @pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
    @pytest.mark.parametrize("max_new_tokens", [1, 2, 11, 30])
    def test_pieces_agree_with_the_result(self, plan, max_new_tokens):
        """Every token is in one piece, in order, and a piece is drafted if all of its tokens are."""
        model = wrap(agreeing_model("llama"), character_tokenizer())
        stream = model.stream(prompt(), **always(plan), max_new_tokens=max_new_tokens, eos_token_id=None)
        pieces, result = list(stream), stream.result
        assert "".join(pieces) == result.text
        tokens = [token for piece in pieces for token in piece.token_ids]
        assert tokens == result.new_token_ids[0][: len(tokens)]
        begin = 0
        for piece in pieces:
            assert isinstance(piece, StreamPiece)
            end = begin + len(piece.token_ids)
            assert piece.drafted == all(result.drafted[0][begin:end])
            begin = end
        if plan is not None and max_new_tokens == 30:
            assert {piece.drafted for piece in pieces} == {False, True}

    def test_the_result_equals_that_of_generate(self):
        model = wrap(agreeing_model("llama"), character_tokenizer())
        options = {**always(DraftPlan.exit(2)), "max_new_tokens": 20, "do_sample": True, "seed": 3}
        stream, whole = model.stream(prompt(), **options), model.generate(prompt(), **options)
        list(stream)
        assert torch.equal(stream.result.sequences, whole.sequences)
        assert (stream.result.drafted, stream.result.settings) == (whole.drafted, whole.settings)

    def test_pieces_come_while_decoding(self):
        """Catches a stream that first decodes everything: nothing runs that was not asked for."""
        model = wrap(agreeing_model("llama"), character_tokenizer())
        stream = model.stream(prompt(), max_new_tokens=50, eos_token_id=None)
        assert engine_of(stream).stats.new_tokens == 0
        for number in range(1, 5):
            next(stream)
            assert engine_of(stream).stats.new_tokens == number

    def test_the_result_of_a_half_read_stream_is_the_whole(self):
        model = wrap(agreeing_model("llama"), character_tokenizer())
        options = {"max_new_tokens": 20, "eos_token_id": None}
        stream = model.stream(prompt(), **options)
        next(stream)
        assert stream.result.new_token_ids == model.generate(prompt(), **options).new_token_ids
        assert list(stream) == []

    @pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
    @pytest.mark.parametrize("pieces", [0, 1, 4])
    def test_a_closed_stream_decodes_no_more(self, pieces, plan):
        """Its result holds what was read, and says that somebody closed it."""
        model = wrap(agreeing_model("llama"), character_tokenizer())
        options = {"plan": plan, "max_new_tokens": 20, "eos_token_id": None}
        stream = model.stream(prompt(), **options)
        read = [next(stream) for _ in range(pieces)]
        decoded = engine_of(stream).stats.new_tokens
        stream.close()
        assert list(stream) == []
        assert stream.result.text == "".join(read)
        assert stream.result.finish_reasons == ["closed"]
        assert stream.result.new_token_ids == [model.generate(prompt(), **options).new_token_ids[0][:pieces]]
        assert engine_of(stream).stats.new_tokens == decoded

    def test_an_error_comes_again_with_the_result(self):
        """Catches a stream that passes for complete after it broke."""

        class Fault(Exception):
            pass

        class Failing(LogitsProcessor):
            def __call__(self, input_ids, scores):
                if input_ids.shape[1] == 12:
                    raise Fault
                return scores

        model = wrap(agreeing_model("llama"), character_tokenizer())
        stream = model.stream(prompt(), logits_processor=[Failing()], eos_token_id=None)
        pieces = []
        with pytest.raises(Fault):
            for piece in stream:
                pieces.append(piece)
        assert len(pieces) == 3
        assert list(stream) == []
        with pytest.raises(Fault):
            _ = stream.result

    def test_it_takes_no_streamer(self):
        model = wrap(agreeing_model("llama"), character_tokenizer())
        with pytest.raises(InputError, match="got a streamer for stream"):
            model.stream(prompt(), streamer=object())

    def test_several_prompts_are_refused(self):
        model = wrap(agreeing_model("llama"), character_tokenizer())
        for several in ({"inputs": ["ab", "c"]}, {"inputs": "ab", "num_return_sequences": 2}):
            with pytest.raises(InputError, match="got 2 rows to stream; expected one. Stream them one by one"):
                model.stream(**several)

    def test_it_needs_a_tokenizer(self, llama):
        with pytest.raises(InputError, match="got no tokenizer to make text with; pass one to wrap"):
            wrap(llama).stream(prompt())
