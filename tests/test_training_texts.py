"""Texts to train on: what the model writes, how it is packed and counted, and that an interrupted run loses nothing."""

import copy
import json
import shutil
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import layerskip
from layerskip.errors import CheckpointError, InputError, SettingError
from layerskip.models.synthetic import synthetic_model
from layerskip.training import writing
from layerskip.training.texts import TrainingTexts
from layerskip.training.writing import WritingSettings, write_texts
from tests.tiny_models import VOCAB_SIZE, prompt, tiny_model, transformers_greedy
from tests.toy_tokenizer import character_tokenizer

EOS = 2
SMALL = WritingSettings(tokens=5 * 48, row_tokens=48, batch_rows=4)
LONG = replace(SMALL, tokens=10 * 48)  # of three batches


def instruct(**config: object) -> layerskip.Model:
    """Tiny, random, with the template "user: …\\nassistant: "; some of its answers end early."""
    model = copy.deepcopy(tiny_model("llama"))
    model.generation_config.update(**config)
    return layerskip.wrap(model, character_tokenizer())


def base(name: str = "llama", **config: object) -> layerskip.Model:
    model = copy.deepcopy(tiny_model(name))
    model.config.update(config)
    model.generation_config.update(**config)
    return layerskip.wrap(model)


def ids(text: str) -> list[int]:
    return character_tokenizer()(text)["input_ids"]


def lines_of(folder) -> list[dict]:
    """The cached texts, without the line above them."""
    return [json.loads(line) for line in (folder / "texts.jsonl").read_text().splitlines()[1:]]


def packed(lines: list[dict], row_tokens: int) -> tuple[list[list[int]], list[list[bool]]]:
    """Another way to pack: token by token."""
    tokens, own = [[]], [[]]
    for line in lines:
        for index, token in enumerate(line["tokens"]):
            tokens[-1].append(token)
            own[-1].append(index >= line["answer_from"])
            if len(tokens[-1]) == row_tokens:
                tokens.append([])
                own.append([])
                break
    return tokens[:-1], own[:-1]


def stop_at(call: int):
    """A progress that is interrupted when it is told something for that time, from 1."""
    told = []

    def progress(done: int, total: int) -> None:
        told.append(done)
        if len(told) == call:
            raise KeyboardInterrupt

    return progress


def spied(model: layerskip.Model, monkeypatch) -> list[dict]:
    """Options of every call of `generate` from now on, and its prompts and answers."""
    calls, generate = [], model.generate

    def spy(prompts, **options):
        result = generate(prompts, **options)
        calls.append({**options, "prompts": prompts, "answers": result.new_token_ids})
        return result

    monkeypatch.setattr(model, "generate", spy)
    return calls


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Chats, and the lines of the cache that they were packed from."""
    folder = tmp_path_factory.mktemp("chats")
    return write_texts(instruct(), replace(SMALL, tokens=1500), folder), lines_of(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run without interrupts gives, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return write_texts(instruct(), LONG, folder), folder


class TestChats:
    def test_shapes(self, written):
        texts, _ = written
        assert texts.tokens.shape == texts.is_own.shape == (32, 48)  # 32 * 48 = 1536, the first from 1500
        assert (texts.tokens.dtype, texts.is_own.dtype) == (np.int32, np.bool_)
        assert texts.num_tokens == 1536 and texts.tokens.max() < VOCAB_SIZE

    def test_both_sides_are_written_in_the_template(self, written):
        _, lines = written
        start, end = ids("user: "), ids("\nassistant: ")
        said = set()
        for line in (line for line in lines if line["tokens"]):
            tokens, begin = line["tokens"], line["answer_from"]
            message, answer = tokens[6 : begin - 12], tokens[begin:]
            assert tokens[:6] == start and tokens[begin - 12 : begin] == end
            assert message and not {EOS, *ids("\n")} & set(message)
            assert answer and EOS not in answer[:-1] and len(tokens) <= 48
            said.add(tuple(message))
        assert len(said) > 20

    def test_rows_are_packed_and_exactly_the_answers_count(self, written):
        texts, lines = written
        firsts = set()
        kept = [line for line in lines if line["tokens"]]
        kept = [
            line
            for line in kept
            if (key := tuple(line["tokens"][6 : line["answer_from"] - 12])) not in firsts and not firsts.add(key)
        ]
        tokens, own = packed(kept, 48)
        assert texts.tokens.tolist() == tokens[:32] and texts.is_own.tolist() == own[:32]

    def test_the_end_of_an_answer_counts_too(self, written):
        texts, _ = written
        ends = texts.tokens == EOS
        assert ends.sum() >= 3 and texts.is_own[ends].all()

    def test_a_seed_is_a_text(self, written, tmp_path):
        texts, _ = written
        torch.manual_seed(5)
        before = torch.get_rng_state()
        same = write_texts(instruct(), SMALL, tmp_path / "same")
        other = write_texts(instruct(), replace(SMALL, seed=1), tmp_path / "other")
        assert same.tokens.tolist() == texts.tokens[:5].tolist() != other.tokens.tolist()
        assert torch.equal(torch.get_rng_state(), before)

    def test_what_a_checkpoint_asks_for_besides_changes_nothing(self, written, tmp_path):
        config = {"repetition_penalty": 1.7, "min_new_tokens": 40, "prompt_lookup_num_tokens": 3, "temperature": 0.1}
        texts = write_texts(instruct(**config, num_return_sequences=2, do_sample=True), SMALL, tmp_path)
        assert texts.tokens.tolist() == written[0].tokens[:5].tolist()

    def test_what_a_user_says_is_drawn_and_answers_are_mixed(self, tmp_path, monkeypatch):
        model = instruct()
        calls = spied(model, monkeypatch)
        write_texts(model, replace(SMALL, tokens=1500, greedy_share=0.25, temperatures=(0.5, 0.9)), tmp_path)
        said, answered = calls[::2], calls[1::2]
        assert all(call["plan"] is None for call in calls)
        assert len(answered) >= 8
        assert {(call["do_sample"], call["temperature"]) for call in said} == {(True, 1.0)}
        temperatures = [call.get("temperature") for call in answered[:8]]
        assert temperatures == [0.5, None, 0.9, 0.5, 0.9, None, 0.5, 0.9]
        greedy = answered[1]
        for row, answer in zip(greedy["prompts"], greedy["answers"], strict=True):
            expected = transformers_greedy(model.hf_model, torch.tensor([row]), max_new_tokens=len(answer))
            assert answer == expected[0, len(row) :].tolist()

    @pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
    def test_greedy_share(self, share, tmp_path, monkeypatch):
        model = instruct()
        calls = spied(model, monkeypatch)
        write_texts(model, replace(SMALL, tokens=1200, greedy_share=share), tmp_path)
        greedy = [not call["do_sample"] for call in calls[1::2]]
        assert abs(sum(greedy) - share * len(greedy)) <= 0.5

    def test_a_template_with_the_date_stays_that_of_the_first_day(self, tmp_path, monkeypatch):
        write_texts(instruct(), SMALL, tmp_path)
        shown = len(lines_of(tmp_path))
        monkeypatch.setattr(writing, "_around_user", lambda model: (ids("USER: "), ids("\nassistant: ")))
        write_texts(instruct(), replace(SMALL, tokens=600), tmp_path)
        lines = [line for line in lines_of(tmp_path) if line["tokens"]]
        assert len(lines_of(tmp_path)) > shown and all(line["tokens"][:6] == ids("user: ") for line in lines)

    @pytest.mark.parametrize("template", ["always the same", "{{ messages[0]['content'] }}"])
    def test_a_template_without_turns_is_refused(self, template, tmp_path):
        tokenizer = copy.deepcopy(character_tokenizer())
        tokenizer.chat_template = template
        with pytest.raises(InputError, match="does not show where a user's turn begins"):
            write_texts(layerskip.wrap(tiny_model("llama"), tokenizer), SMALL, tmp_path)

    def test_rows_must_have_room_for_the_template_and_no_more_than_the_model(self, tmp_path):
        with pytest.raises(SettingError, match="got row_tokens=17; expected 4 more, for the template"):
            write_texts(instruct(), WritingSettings(100, row_tokens=17), tmp_path)
        assert (
            write_texts(instruct(), WritingSettings(100, row_tokens=21, batch_rows=4), tmp_path).tokens.shape[1] == 21
        )
        with pytest.raises(SettingError, match="at most the model's 160 positions"):
            write_texts(instruct(), WritingSettings(100, row_tokens=161), tmp_path)


class TestBaseTexts:
    def test_all_but_the_first_token_counts(self, tmp_path):
        texts = write_texts(base(), SMALL, tmp_path)
        lines = lines_of(tmp_path)
        assert all(line["tokens"][0] == 1 and line["answer_from"] == 1 for line in lines)
        assert (texts.tokens.tolist(), texts.is_own.tolist()) == tuple(part[:5] for part in packed(lines, 48))
        assert texts.is_own.mean() > 0.8

    def test_greedy_texts_differ_because_their_beginnings_are_drawn(self, tmp_path):
        write_texts(base(), replace(SMALL, greedy_share=1.0), tmp_path)
        texts = [tuple(line["tokens"]) for line in lines_of(tmp_path)]
        assert len(set(texts)) == len(texts)

    def test_a_text_that_has_ended_is_not_gone_on_with(self, tmp_path):
        write_texts(base(), replace(SMALL, tokens=1500), tmp_path)
        tokens = [line["tokens"] for line in lines_of(tmp_path)]
        assert any(each[-1] == EOS and len(each) < 24 for each in tokens)
        assert all(EOS not in each[:-1] for each in tokens)

    def test_without_a_first_token_it_begins_with_the_last(self, tmp_path):
        write_texts(base(bos_token_id=None), SMALL, tmp_path)
        assert {line["tokens"][0] for line in lines_of(tmp_path)} == {EOS}

    def test_without_either_it_begins_with_any(self, tmp_path):
        model = layerskip.wrap(synthetic_model("tiny", torch.float64))
        write_texts(model, SMALL, tmp_path)
        write_texts(model, replace(SMALL, seed=1), tmp_path / "other")
        firsts = [[line["tokens"][0] for line in lines_of(each)] for each in (tmp_path, tmp_path / "other")]
        assert len(set(firsts[0])) > 3 and firsts[0] != firsts[1]
        assert all(line["answer_from"] == 1 and len(line["tokens"]) == 48 for line in lines_of(tmp_path))

    def test_a_tokenizer_says_what_a_text_begins_with(self, tmp_path):
        tokenizer = copy.deepcopy(character_tokenizer())
        tokenizer.chat_template, tokenizer.bos_token = None, "a"
        write_texts(layerskip.wrap(tiny_model("llama"), tokenizer), SMALL, tmp_path)
        assert {line["tokens"][0] for line in lines_of(tmp_path)} == set(ids("a"))


class TestDuplicates:
    def fake(self, messages, monkeypatch) -> layerskip.Model:
        """A model whose users say these, in turns; answers are all the same."""
        model, turn = instruct(), iter(range(1000))

        def generate(prompts, **options):
            if len(prompts[0]) == 6:  # the template up to the user
                said = [messages[next(turn) % len(messages)] for _ in prompts]
                return SimpleNamespace(new_token_ids=[[*message, EOS] for message in said])
            return SimpleNamespace(new_token_ids=[[9, EOS] for _ in prompts])

        monkeypatch.setattr(model, "generate", generate)
        return model

    def test_conversations_come_once(self, tmp_path, monkeypatch):
        model = self.fake([[5], [6, 5], [6, 6]], monkeypatch)
        texts = write_texts(model, replace(SMALL, tokens=48), tmp_path)
        conversations = [[*ids("user: "), *said, *ids("\nassistant: "), 9, EOS] for said in ([5], [6, 5], [6, 6])]
        assert texts.tokens[0].tolist() == sum(conversations, [])[:48]
        told = []
        with pytest.raises(InputError, match="got nothing new from the model in 4 batches"):
            write_texts(model, replace(SMALL, tokens=96), tmp_path, progress=lambda *each: told.append(each))
        assert len(lines_of(tmp_path)) == (1 + 4) * SMALL.batch_rows and told[-1] == (48, 96)

    def test_the_first_32_tokens_tell(self, tmp_path, monkeypatch):
        settings = replace(SMALL, tokens=100, row_tokens=100)
        model = self.fake([[7] * 32 + [8], [7] * 32 + [9], [7] * 31 + [9]], monkeypatch)
        texts = write_texts(model, settings, tmp_path)
        assert np.flatnonzero(texts.is_own[0]).tolist() == [51, 52]  # behind 6 + 33 + 12 of template and user
        assert texts.tokens[0, 53 + 6 : 53 + 6 + 32].tolist() == [7] * 31 + [9]

    def test_users_who_say_nothing_are_left_out(self, tmp_path, monkeypatch):
        texts = write_texts(self.fake([[], [5] * 30, []], monkeypatch), replace(SMALL, tokens=48), tmp_path)
        assert texts.tokens[0].tolist() == [*ids("user: "), *[5] * 30, *ids("\nassistant: ")]
        assert [bool(line["tokens"]) for line in lines_of(tmp_path)] == [False, True, False, False]


class TestPrompts:
    def test_only_answers_are_written_in_turns(self, tmp_path, monkeypatch):
        model = instruct()
        calls = spied(model, monkeypatch)
        prompts = ["hello", [{"role": "user", "content": "hi"}], prompt(4)[0].tolist()]
        texts = write_texts(model, replace(SMALL, tokens=480), tmp_path, prompts)
        expected = [ids("hello"), ids("user: hi\nassistant: "), prompts[2]]
        lines = [line for line in lines_of(tmp_path) if line["tokens"]]
        asked = Counter(expected.index(line["tokens"][: line["answer_from"]]) for line in lines)
        assert len(asked) == 3 and max(asked.values()) - min(asked.values()) <= 2
        assert all(call["max_new_tokens"] == 48 - min(map(len, call["prompts"])) for call in calls)
        assert (texts.tokens.tolist(), texts.is_own.tolist()) == tuple(part[:10] for part in packed(lines, 48))
        assert len({tuple(line["tokens"]) for line in lines[::3]}) > 1  # the same prompt, other answers

    @pytest.mark.parametrize("count", [1, 2, 5])
    def test_each_is_answered_greedily_once(self, count, tmp_path, monkeypatch):
        """Its greedy answer is always the same; catches copies of it in rows to train on and in rows to judge by."""
        model, prompts = base(), [[5, 6, 7 + each] for each in range(count)]
        calls = spied(model, monkeypatch)
        texts = write_texts(model, replace(SMALL, greedy_share=0.5, tokens=960), tmp_path, prompts)
        greedy = [row for call in calls if not call["do_sample"] for row in call["prompts"]]
        assert greedy == prompts and len(texts.tokens) == 20
        assert sum(call["do_sample"] for call in calls) > len(greedy)

    @pytest.mark.parametrize(
        ("prompts", "message"),
        [
            ("hello", "expected a list of strings"),
            ({"role": "user"}, "expected a list of strings"),
            ([], "expected a list of strings"),
            (7, "expected a list of strings"),
            ([[5], []], "got an empty prompt"),
            ([[5], [VOCAB_SIZE]], "61"),
            ([[5], [5] * 48], "got a prompt of 48 tokens for rows of 48"),
            (["hello", 5], "as prompt; expected"),
        ],
    )
    def test_refused(self, prompts, message, tmp_path):
        with pytest.raises(InputError, match=message):
            write_texts(instruct(), SMALL, tmp_path, prompts)
        assert not list(tmp_path.iterdir())

    def test_text_needs_a_tokenizer(self, tmp_path):
        with pytest.raises(InputError, match="without tokenizer"):
            write_texts(base(), SMALL, tmp_path, ["hello"])


class TestGoingOn:
    @pytest.mark.parametrize("call", [1, 2, 3])
    def test_after_an_interrupt(self, call, whole, tmp_path):
        with pytest.raises(KeyboardInterrupt):
            write_texts(instruct(), LONG, tmp_path, progress=stop_at(call))
        assert len(lines_of(tmp_path)) == 4 * call
        assert write_texts(instruct(), LONG, tmp_path).digest() == whole[0].digest()
        assert (tmp_path / "texts.jsonl").read_bytes() == (whole[1] / "texts.jsonl").read_bytes()

    @pytest.mark.parametrize("lost", ["newline", "half a line", "a line and a half", "all but a line", "header", "all"])
    def test_after_a_torn_line(self, lost, whole, tmp_path):
        content = (whole[1] / "texts.jsonl").read_bytes()
        lines = content.splitlines(keepends=True)
        kept = {
            "newline": len(content) - 1,
            "half a line": len(content) - len(lines[-1]) // 2,
            "a line and a half": len(content) - len(lines[-1]) - len(lines[-2]) // 2,
            "all but a line": len(lines[0]) + len(lines[1]),
            "header": len(lines[0]) // 2,
            "all": 0,
        }[lost]
        (tmp_path / "texts.jsonl").write_bytes(content[:kept])
        assert write_texts(instruct(), LONG, tmp_path).digest() == whole[0].digest()
        assert (tmp_path / "texts.jsonl").read_bytes() == content

    def test_after_a_power_cut_that_left_zeros(self, whole, tmp_path):
        content = (whole[1] / "texts.jsonl").read_bytes()
        (tmp_path / "texts.jsonl").write_bytes(content[:-30] + bytes(29) + b"\n")
        assert write_texts(instruct(), LONG, tmp_path).digest() == whole[0].digest()
        assert (tmp_path / "texts.jsonl").read_bytes() == content

    def test_more_and_fewer_tokens(self, whole, tmp_path, monkeypatch):
        model, more = instruct(), replace(LONG, tokens=960)
        shutil.copytree(whole[1], tmp_path, dirs_exist_ok=True)
        calls, told = spied(model, monkeypatch), []
        again = write_texts(model, LONG, tmp_path, progress=lambda *each: told.append(each))
        assert again.digest() == whole[0].digest() and not calls
        assert told == sorted(told) and told[-1] == (480, 480)
        grown = write_texts(model, more, tmp_path)
        assert calls and grown.digest() == write_texts(model, more, tmp_path / "at once").digest()
        assert grown.tokens[:10].tolist() == again.tokens.tolist()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"seed": 1}, r"got seed=1 for texts that were begun with 0 \(.*texts.jsonl\)"),
            ({"batch_rows": 5}, "got batch_rows=5 .* 4"),
            ({"row_tokens": 64}, "got row_tokens=64 .* 48"),
            ({"temperatures": (0.7,)}, r"got temperatures=\[0.7\] .* \[0.7, 1.0\]"),
            ({"greedy_share": 0.5}, "got greedy_share=0.5 .* 0.25"),
        ],
    )
    def test_other_settings_are_refused(self, changes, message, whole):
        with pytest.raises(SettingError, match=message):
            write_texts(instruct(), replace(LONG, **changes), whole[1])

    def test_another_model_is_refused(self, whole):
        before = (whole[1] / "texts.jsonl").read_bytes()
        other = layerskip.wrap(tiny_model("llama", seed=1), character_tokenizer())
        with pytest.raises(SettingError, match="got model=.*name another folder"):
            write_texts(other, LONG, whole[1])
        with pytest.raises(SettingError, match="got chat_template=None"):
            write_texts(base(), LONG, whole[1])
        with pytest.raises(SettingError, match="got prompts='"):
            write_texts(instruct(), LONG, whole[1], ["hello"])
        assert (whole[1] / "texts.jsonl").read_bytes() == before

    @pytest.mark.parametrize("content", [b"notes", b"notes\n", b"{}\n", b"[1]\n", b"\xff\n"])
    def test_a_file_of_something_else_is_refused(self, content, tmp_path):
        (tmp_path / "texts.jsonl").write_bytes(content)
        with pytest.raises(SettingError, match="holds other things than texts"):
            write_texts(instruct(), LONG, tmp_path)
        assert (tmp_path / "texts.jsonl").read_bytes() == content

    def test_a_folder_that_is_none(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match="cannot write .*: it is a file"):
            write_texts(instruct(), LONG, tmp_path / "file")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, "got tokens=0; expected an integer from 1"),
        ({"tokens": 1e6}, "got tokens=1000000.0"),
        ({"tokens": True}, "got tokens=True"),
        ({"row_tokens": 3}, "got row_tokens=3; expected an integer from 4"),
        ({"batch_rows": 0}, "got batch_rows=0"),
        ({"seed": -1}, "got seed=-1"),
        ({"temperatures": ()}, "got temperatures=()"),
        ({"temperatures": 0.7}, "got temperatures=0.7; expected a tuple"),
        ({"temperatures": (0.7, 0)}, "expected a tuple of numbers above 0"),
        ({"temperatures": (float("nan"),)}, "expected a tuple of numbers above 0"),
        ({"temperatures": (float("inf"),)}, "expected a tuple of numbers above 0"),
        ({"temperatures": ("hot",)}, "expected a tuple of numbers above 0"),
        ({"greedy_share": 1.1}, "got greedy_share=1.1; expected a number from 0 to 1"),
        ({"greedy_share": float("nan")}, "got greedy_share=nan"),
        ({"greedy_share": "all"}, "got greedy_share='all'"),
    ],
)
def test_settings_out_of_range(changes, message):
    with pytest.raises(SettingError) as caught:
        replace(SMALL, **changes)
    assert message in str(caught.value)


def some_texts(rows: int = 10, row_tokens: int = 6, vocab_size: int = VOCAB_SIZE) -> TrainingTexts:
    drawn = np.random.default_rng(0)
    tokens = drawn.integers(vocab_size, size=(rows, row_tokens))
    return TrainingTexts(tokens, drawn.random(tokens.shape) < 0.5)


class TestTrainingTexts:
    def test_split(self):
        texts = some_texts()
        train, held_out = texts.split(3, seed=0)
        rows = [tuple(row) for part in (train, held_out) for row in part.tokens.tolist()]
        assert (len(train.tokens), len(held_out.tokens)) == (7, 3)
        assert sorted(rows) == sorted(map(tuple, texts.tokens.tolist()))
        where = {tuple(row): own for row, own in zip(texts.tokens.tolist(), texts.is_own.tolist(), strict=True)}
        assert [where[row] for row in rows] == [*train.is_own.tolist(), *held_out.is_own.tolist()]
        assert texts.split(3, seed=0)[1].digest() == held_out.digest()
        assert len({texts.split(3, seed=seed)[1].digest() for seed in range(5)}) > 1

    @pytest.mark.parametrize("rows", [0, 10, -1, 2.0, True])
    def test_a_split_with_an_empty_side(self, rows):
        with pytest.raises(SettingError, match="got held_out_rows=.* of 10 rows; expected from 1 to 9"):
            some_texts().split(rows, seed=0)

    def test_digest(self):
        texts = some_texts()
        other = TrainingTexts(texts.tokens, ~texts.is_own)
        turned = TrainingTexts(texts.tokens.reshape(6, 10), texts.is_own.reshape(6, 10))
        assert texts.digest() == some_texts().digest() and len(texts.digest()) == 16
        assert len({texts.digest(), other.digest(), turned.digest()}) == 3

    @pytest.mark.parametrize(("vocab_size", "dtype"), [(VOCAB_SIZE, np.uint16), (100_000, np.int32)])
    def test_save_and_load(self, vocab_size, dtype, tmp_path):
        texts, file = some_texts(vocab_size=vocab_size), tmp_path / "texts of today"
        texts.save(file)
        texts.save(file)
        assert TrainingTexts.load(file, vocab_size).digest() == texts.digest()
        assert list(tmp_path.iterdir()) == [file]
        with np.load(file) as archive:
            assert archive["tokens"].dtype == dtype and archive["assistant"].dtype == np.bool_

    @pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int64, np.uint64])
    def test_any_integers_and_no_mask(self, dtype, tmp_path):
        np.savez(tmp_path / "texts.npz", tokens=np.arange(12).reshape(3, 4).astype(dtype))
        texts = TrainingTexts.load(tmp_path / "texts.npz", 12)
        assert texts.tokens.dtype == np.int32 and texts.is_own.all() and texts.is_own.shape == (3, 4)

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ({"tokens": np.arange(12)}, r"\(12,\), int64; expected integers \(rows, row_tokens\)"),
            ({"tokens": np.zeros((2, 3, 4), dtype=int)}, r"\(2, 3, 4\)"),
            ({"tokens": np.zeros((0, 4), dtype=int)}, r"\(0, 4\)"),
            ({"tokens": np.zeros((2, 4))}, "float64; expected integers"),
            ({"tokens": np.zeros((2, 4), dtype=bool)}, "bool; expected integers"),
            ({"tokens": np.full((2, 4), 61)}, "got token id 61; expected at most the model's 60"),
            ({"tokens": np.full((2, 4), -1)}, "got token ids from -1 to -1"),
            ({"tokens": np.full((2, 4), 2**40)}, "got token ids from 1099511627776"),
            ({"tokens": np.ones((2, 4), dtype=int), "assistant": np.ones((2, 3), dtype=bool)}, r"'assistant' \(2, 3\)"),
            ({"tokens": np.ones((2, 4), dtype=int), "assistant": np.ones((2, 4))}, "float64; expected a bool"),
            ({"tokens": np.ones((2, 4), dtype=int), "assistant": np.zeros((2, 4), dtype=bool)}, "nowhere true"),
        ],
    )
    def test_texts_that_are_none(self, arrays, message, tmp_path):
        file = tmp_path / "texts.npz"
        np.savez(file, **arrays)
        with pytest.raises(InputError, match=message) as caught:
            TrainingTexts.load(file, VOCAB_SIZE)
        assert str(file) in str(caught.value)

    def test_files_that_are_none(self, tmp_path):
        good, file = tmp_path / "good.npz", tmp_path / "texts.npz"
        some_texts().save(good)
        content = good.read_bytes()
        pickled = np.array([[{}]], dtype=object)
        damaged = content[:80] + bytes(40) + content[120:]
        for bad in (b"", b"text", content[: len(content) // 2], damaged):
            file.write_bytes(bad)
            with pytest.raises(CheckpointError, match="cannot read texts from .*Expected an .npz"):
                TrainingTexts.load(file, VOCAB_SIZE)
        for write in (
            lambda stream: np.save(stream, np.ones((2, 2), dtype=int)),
            lambda stream: np.savez(stream, words=np.ones((2, 2), dtype=int)),
            lambda stream: np.savez(stream, tokens=pickled),
        ):
            with file.open("wb") as stream:
                write(stream)
            with pytest.raises(CheckpointError, match="Expected an .npz"):
                TrainingTexts.load(file, VOCAB_SIZE)
        for missing in (tmp_path / "none.npz", tmp_path):
            with pytest.raises(CheckpointError, match=r"cannot read texts from .*(No such file|Is a directory)"):
                TrainingTexts.load(missing, VOCAB_SIZE)
