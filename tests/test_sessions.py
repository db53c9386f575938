"""Conversations: each call says what a fresh call on the whole text says, and reads only what is new. In float64."""

import copy
import dataclasses
import itertools
import threading

import pytest
import torch

import layerskip
from layerskip import CheckpointError, DraftPlan, InputError, SettingError
from layerskip.models.adapter import AdapterSpec
from layerskip.models.adapter_file import save_adapter
from layerskip.models.cache import KVCache
from tests.drafting import always
from tests.special_models import agreeing_model, llama_with
from tests.test_adapter import adapter_of
from tests.tiny_models import FAMILY_NAMES, prompt, tiny_model, transformers_greedy
from tests.toy_tokenizer import character_tokenizer

FAMILIES = ("llama", "mistral-window", "qwen2-window", "qwen3")
TURNS = [prompt(length, seed=length)[0].tolist() for length in (9, 1, 4)]
OPTIONS = {"max_new_tokens": 8, "eos_token_id": None}
PLANS = {
    "plain": None,
    "exit": DraftPlan.exit(2, num_draft_tokens=3),
    "skip": DraftPlan.skip([1, 2], [2]),
    "unsure": DraftPlan.skip([1, 2], confidence_threshold=0.5, num_draft_tokens=6),
    "lookup": DraftPlan.lookup(4),
    "exit and lookup": DraftPlan.exit(2, lookup_tokens=4),
    "model": DraftPlan.model(tiny_model("llama")),
    "itself": DraftPlan.model(agreeing_model("llama"), num_draft_tokens=2),
    "model and lookup": DraftPlan.model(tiny_model("llama"), lookup_tokens=3),
    "jump": AdapterSpec(0),
    "two blocks": AdapterSpec(0, 2),
    "exit and state": AdapterSpec(2),
    "exit alone": AdapterSpec(1, 1, reads_state=False),
    "jump from three states": AdapterSpec(0, further_states=(1, 2)),
}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 0, "repetition_penalty": 1.2}


@pytest.fixture(scope="module")
def plan_of(tmp_path_factory):
    """The plan of a name, for a family's agreeing model."""
    folder = tmp_path_factory.mktemp("adapters")

    def plan_of(family, name):
        plan = PLANS[name]
        if isinstance(plan, AdapterSpec):
            file = folder / f"{family} {name}.safetensors"
            if not file.exists():
                save_adapter(adapter_of(agreeing_model(family), plan), file, torch.float64)
            plan = DraftPlan(exit_layer=plan.exit_layer, adapter=str(file), num_draft_tokens=3)
        return plan

    return plan_of


@pytest.fixture
def model():
    return layerskip.wrap(agreeing_model("llama"), character_tokenizer())


def assert_same(ours, fresh):
    """Two results, of a session and of a fresh call."""
    assert torch.equal(ours.sequences, fresh.sequences)
    assert ours.finish_reasons == fresh.finish_reasons
    assert ours.drafted == fresh.drafted


CASES = [
    *(("llama", name, None) for name in PLANS),
    *((family, name, None) for family in FAMILIES[1:] for name in ("exit and lookup", "model", "exit and state")),
    *((family, "exit", None) for family in FAMILY_NAMES if family not in FAMILIES),
    *(("llama", name, "maximal") for name in ("plain", "skip", "model", "two blocks")),
    *(("llama", name, "invariant") for name in ("exit", "exit and state")),
]


@pytest.mark.parametrize(("family", "name", "sampled"), CASES)
def test_every_turn_is_that_of_a_fresh_call(plan_of, family, name, sampled):
    """Catches entries, states or positions that belong to rejected drafts, or to another place in the text.

    Drafts are compared too: where those of a draft model or of trained blocks were worse, the output would be the same.
    """
    model, plan = layerskip.wrap(agreeing_model(family)), plan_of(family, name)
    options = {**OPTIONS, **always(plan), **({**SAMPLED, "acceptance_rule": sampled} if sampled else {})}
    session, text = model.session(**options), []
    for seed, turn in enumerate(TURNS):
        said = session.generate(turn, seed=seed)
        text += turn
        assert_same(said, model.generate(text, seed=seed, **options))
        assert said.stats.reused_tokens == (0 if seed == 0 else len(text) - len(turn) - 1)
        text += said.new_token_ids[0]
        assert session.token_ids == text and session.turns == seed + 1


@pytest.mark.parametrize("name", ["exit", "model", "exit and state"])
@pytest.mark.parametrize("length", [1, 2, 4, 5])
def test_a_stop_in_the_middle_of_a_draft(plan_of, name, length):
    """By the number of tokens, an end of text, or a stop string: what was drafted behind it is not in the next turn."""
    model = layerskip.wrap(agreeing_model("llama"), character_tokenizer())
    own = transformers_greedy(model.hf_model, torch.tensor([TURNS[0]]), max_new_tokens=length)[0, 9:].tolist()
    for stop in (
        {"max_new_tokens": length},
        {"eos_token_id": own[-1]},
        {"stop_strings": [model.tokenizer.decode(own)]},
    ):
        options = {**OPTIONS, **always(plan_of("llama", name)), "max_new_tokens": 10}
        session = model.session(**options)
        first = session.generate(TURNS[0], **stop)
        assert len(first.new_token_ids[0]) <= length
        text = [*session.token_ids, *TURNS[2]]
        assert_same(session.generate(TURNS[2]), model.generate(text, **options))


@pytest.mark.parametrize("every", [1, 2, 3])
def test_plans_and_settings_may_change_from_call_to_call(plan_of, every):
    """Also between two adapters, whose entries take the same place in the cache, and to recorded rounds and back."""
    model = layerskip.wrap(agreeing_model("llama"))
    session = model.session(**OPTIONS)
    for index, name in enumerate([*PLANS, "jump", "two blocks", "model", "jump", "plain", "jump"]):
        options = {**always(plan_of("llama", name)), "max_new_tokens": 2 + index % 3, "cuda_graphs": index % every == 0}
        if index % 4 == 3:
            options |= {**SAMPLED, "seed": index}
        text = [*session.token_ids, *TURNS[index % 2]]
        assert_same(session.generate(TURNS[index % 2], **options), model.generate(text, **{**OPTIONS, **options}))


def test_without_anything_new_the_text_goes_on(model):
    session = model.session(**always(DraftPlan.exit(2)), **OPTIONS)
    whole = model.generate(TURNS[0], max_new_tokens=16, eos_token_id=None)
    session.generate(TURNS[0])
    session.generate()
    assert session.token_ids == whole.sequences[0].tolist()


class TestMessages:
    def test_each_answer_is_that_to_all_messages(self, model):
        session = model.session(system="Be brief.", **always(DraftPlan.exit(2)), **OPTIONS)
        messages = [{"role": "system", "content": "Be brief."}]
        for question in ("Why?", "And how?", [{"role": "user", "content": "Well"}]):
            messages += [{"role": "user", "content": question}] if isinstance(question, str) else question
            said = session.generate(question)
            assert_same(said, model.generate(messages, **always(DraftPlan.exit(2)), **OPTIONS))
            assert said.stats.reused_tokens >= len("system: Be brief.\nuser: ")
            messages.append({"role": "assistant", "content": said.text})
            assert session.messages == messages
        assert session.turns == 3

    def test_a_template_that_writes_earlier_turns_differently(self, model, monkeypatch):
        """It drops what came before the last question, and counts: only the common beginning is kept."""
        template = (
            "{% for message in messages %}{% if loop.last or message['role'] != 'user' %}"
            "{{ message['role'] }}: {{ message['content'] | trim }}\n{% endif %}{% endfor %}assistant: "
        )
        monkeypatch.setattr(model.tokenizer, "chat_template", template)
        session, messages = model.session(**always(DraftPlan.exit(2)), **OPTIONS), []
        for question in ("Why?", "  And how?", "When"):
            messages.append({"role": "user", "content": question})
            said = session.generate(question)
            assert_same(said, model.generate(messages, **always(DraftPlan.exit(2)), **OPTIONS))
            messages.append({"role": "assistant", "content": said.text})

    def test_messages_and_token_ids_do_not_mix(self, model):
        session = model.session(**OPTIONS)
        session.generate("Why?")
        with pytest.raises(InputError, match="got token ids in a session of messages; expected messages"):
            session.generate([3, 4])
        other = model.session(**OPTIONS)
        other.generate([3, 4])
        with pytest.raises(InputError, match="got messages in a session of token ids"):
            other.generate("Why?")
        assert (session.turns, other.turns) == (1, 1)

    def test_a_template_that_begins_with_the_question(self, model, monkeypatch):
        """There is nothing to read of a system prompt alone."""
        monkeypatch.setattr(
            model.tokenizer, "chat_template", "{{ messages[-1]['content'] }}{{ messages[0]['content'] }}"
        )
        session = model.session(system="Be", **OPTIONS)
        messages = [{"role": "system", "content": "Be"}, {"role": "user", "content": "Why"}]
        assert (session.token_ids, session.messages) == ([], messages[:1])
        assert_same(session.generate("Why"), model.generate(messages, **OPTIONS))

    def test_nothing_new_to_answer(self, model):
        session = model.session(**OPTIONS)
        session.generate("Why?")
        with pytest.raises(InputError, match="got nothing new to answer"):
            session.generate()

    def test_a_tokenizer_without_a_template(self, model, monkeypatch):
        monkeypatch.setattr(model.tokenizer, "chat_template", None)
        with pytest.raises(InputError, match="no chat template; expected token ids"):
            model.session().generate("Why?")

    def test_what_was_handed_in_or_out_is_not_the_sessions_own(self, model):
        session, asked = model.session(**OPTIONS), [{"role": "user", "content": "Why?"}]
        session.generate(asked)
        asked[0]["content"] = session.messages[0]["content"] = "Other"
        session.token_ids.append(3)
        assert session.messages[0]["content"] == "Why?" and session.generate("So").stats.reused_tokens > 0


class TestForksAndRewinding:
    @pytest.mark.parametrize("name", ["plain", "model", "exit and state"])
    def test_forks_share_nothing(self, plan_of, name):
        model, options = layerskip.wrap(agreeing_model("llama")), {**OPTIONS, **always(plan_of("llama", name))}
        session = model.session(**options)
        session.generate(TURNS[0])
        forks = [session, session.fork(), session.fork().fork()]
        texts = [session.token_ids for _ in forks]
        for step in range(2):
            for index, fork in enumerate(forks):
                turn = prompt(3, seed=10 * step + index)[0].tolist()
                said = fork.generate(turn)
                assert_same(said, model.generate([*texts[index], *turn], **options))
                assert said.stats.reused_tokens == len(texts[index]) - 1
                texts[index] = fork.token_ids
        held = [entries.data_ptr() for fork in forks for entries in fork._memory.cache.entries]
        assert len(set(held)) == len(held)

    def test_a_system_prompt_is_read_once(self, model, monkeypatch):
        rows, run = [], model.decoder.run

        def counted(hidden, path, cache, span, exact_blocks=None):
            rows.append(hidden.shape[1])
            return run(hidden, path, cache, span, exact_blocks)

        monkeypatch.setattr(model.decoder, "run", counted)
        system = "You are a patient teacher of all things."
        begun = model.session(system=system, max_new_tokens=2, eos_token_id=None)
        assert begun.turns == 0 and max(rows) > len(system)
        rows.clear()
        for question in ("Why?", "How?"):
            begun.fork().generate(question)
        assert max(rows) < 20

    def test_what_was_read_needs_no_answer(self, model):
        """A document, say, and then questions."""
        session = model.session(**OPTIONS)
        session.read(prompt(40)[0].tolist())
        for turn in TURNS:
            said = session.fork().generate(turn)
            assert said.stats.reused_tokens == 40
            assert_same(said, model.generate([*prompt(40)[0].tolist(), *turn], **OPTIONS))
        session.read(TURNS[0])
        assert session.generate().stats.reused_tokens == 48
        assert session.turns == 1

    def test_answers_are_taken_back(self, plan_of):
        for name in ("exit", "model", "jump"):
            model, options = layerskip.wrap(agreeing_model("llama")), {**OPTIONS, **always(plan_of("llama", name))}
            session, texts = model.session(**options), [[]]
            for turn in TURNS:
                session.generate(turn)
                texts.append(session.token_ids)
            for to in (2, 0):
                session.rewind(to)
                assert (session.turns, session.token_ids) == (to, texts[to])
                other = prompt(5, seed=50 + to)[0].tolist()
                said = session.fork().generate(other)
                assert_same(said, model.generate([*texts[to], *other], **options))
                assert said.stats.reused_tokens == len(texts[to])

    @pytest.mark.parametrize("to", [2, -1, True, None, 1.0])
    def test_rewinding_too_far(self, model, to):
        session = model.session(**OPTIONS)
        session.generate(TURNS[0])
        with pytest.raises(InputError, match=r"got rewind\(.*\) in a session of 1 answers; expected 0 to 1"):
            session.rewind(to)


class Fails:
    """A criterion, processor or streamer that fails when it is asked for the n-th time."""

    def __init__(self, at, error=RuntimeError):
        self.left, self.error = at, error

    def __call__(self, *arguments):
        self.left -= 1
        if self.left == 0:
            raise self.error("on purpose")
        return arguments[1] if arguments[1] is not None else False

    def put(self, value):
        self(value, value)

    def end(self):
        pass


class TestFailures:
    @pytest.mark.parametrize("name", ["exit", "itself", "exit and state"])
    @pytest.mark.parametrize("where", ["stopping_criteria", "logits_processor", "streamer"])
    def test_a_call_that_fails_changes_nothing(self, plan_of, name, where):
        """Wherever in a round it fails. Catches drafts or half-committed rounds that count as read."""
        model, options = layerskip.wrap(agreeing_model("llama")), {**OPTIONS, **always(plan_of("llama", name))}
        session = model.session(**options)
        session.generate(TURNS[0])
        text = session.token_ids
        for at, error in zip((2, 3, 4, 5), itertools.cycle((RuntimeError, KeyboardInterrupt)), strict=False):
            fails = Fails(at, error)
            with pytest.raises(error, match="on purpose"):
                session.generate(TURNS[2], **{where: fails if where == "streamer" else [fails]})
            assert session.token_ids == text and session.turns == 1
            said, again = session.fork().generate(TURNS[2]), session.fork()
            assert_same(said, model.generate([*text, *TURNS[2]], **options))
            assert said.stats.reused_tokens >= len(text) - 1
            again.read([*TURNS[2], *said.new_token_ids[0][:4]])
            assert_same(again.generate(), model.generate(again.token_ids[: len(text) + 8], **options))
        session.generate(TURNS[1])

    @pytest.mark.parametrize("part", ["run", "logits", "embed"])
    def test_an_interrupt_in_a_pass(self, plan_of, part, monkeypatch):
        for name in ("exit", "exit and state", "model"):
            model, options = layerskip.wrap(agreeing_model("llama")), {**OPTIONS, **always(plan_of("llama", name))}
            decoder = model.decoder if name != "model" else model.draft_model(options["plan"]).decoder
            session, own = model.session(**options), getattr(decoder, part)
            session.generate(TURNS[0])
            text = session.token_ids
            for at in (1, 2, 4, 5, 7, 8):
                calls = itertools.count(1)

                def broken(*arguments, calls=calls, at=at, own=own):
                    result = own(*arguments)
                    if next(calls) == at:
                        raise KeyboardInterrupt
                    return result

                with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
                    patched.setattr(decoder, part, broken)
                    session.generate(TURNS[2])
                assert session.token_ids == text
                assert_same(session.fork().generate(TURNS[1]), model.generate([*text, *TURNS[1]], **options))

    def test_a_cache_that_cannot_grow_is_read_again(self, model, monkeypatch):
        session = model.session(**OPTIONS)
        session.generate(TURNS[0])
        text = session.token_ids

        def broken(cache, capacity):
            cache._entries[0] = cache._entries[0][:, :, :1]
            raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(KVCache, "resize", broken)
            session.generate(prompt(30)[0])
        said = session.generate(TURNS[2])
        assert said.stats.reused_tokens == 0
        assert_same(said, model.generate([*text, *TURNS[2]], **OPTIONS))

    def test_what_a_failed_pass_left_behind_is_gone(self, model):
        """A cache that is read as a whole multiplies it by a weight of 0, and NaN stays NaN."""
        session = model.session(pass_width=6, **OPTIONS)
        session.generate(TURNS[0])
        text = session.token_ids

        def spoil(input_ids, scores):
            for each in session_cache:
                each[:, :, len(text) + 5 :] = float("nan")
            raise RuntimeError("on purpose")

        session_cache = session._memory.cache.entries
        with pytest.raises(RuntimeError, match="on purpose"):
            session.generate(TURNS[2], logits_processor=[spoil], max_new_tokens=4)
        assert_same(session.generate(TURNS[2]), model.generate([*text, *TURNS[2]], pass_width=6, **OPTIONS))

    def test_changed_weights_are_read_with(self):
        model = layerskip.wrap(llama_with(seed=9))
        session = model.session(**OPTIONS)
        session.generate(TURNS[0])
        text, weight = session.token_ids, model.hf_model.model.layers[1].self_attn.v_proj.weight
        weight.mul_(-1)
        try:
            assert_same(session.generate(TURNS[2]), model.generate([*text, *TURNS[2]], **OPTIONS))
        finally:
            weight.mul_(-1)


class TestStreams:
    def test_pieces_and_the_next_turn(self, model):
        session, text = model.session(**always(DraftPlan.exit(2)), **OPTIONS), []
        for turn in TURNS[:2]:
            stream = session.stream(turn)
            said = "".join(stream)
            fresh = model.generate([*text, *turn], **always(DraftPlan.exit(2)), **OPTIONS)
            assert said == fresh.text
            assert_same(stream.result, fresh)
            text = session.token_ids
            assert text == fresh.sequences[0].tolist()

    def test_left_early_it_leaves_what_was_committed(self, model):
        session = model.session(**always(DraftPlan.exit(2)), **OPTIONS)
        stream = session.stream(TURNS[0])
        pieces = [next(stream) for _ in range(4)]
        assert session.turns == 0
        stream.close()
        said = [token for piece in pieces for token in piece.token_ids]
        assert session.token_ids == [*TURNS[0], *said] and stream.result.new_token_ids == [said]
        assert_same(session.generate(TURNS[2]), model.generate([*TURNS[0], *said, *TURNS[2]],
                                                               **always(DraftPlan.exit(2)), **OPTIONS))  # fmt: skip

    def test_forgotten_it_sets_the_session_free(self, model):
        session = model.session(**OPTIONS)
        next(session.stream(TURNS[0]))
        assert session.turns == 1 and len(session.token_ids) == 10
        session.stream(TURNS[0])
        session.generate(TURNS[1])

    def test_failing_it_leaves_what_was_committed(self, model):
        session = model.session(**OPTIONS)
        stream = session.stream(TURNS[0], stopping_criteria=[Fails(4)])
        with pytest.raises(RuntimeError, match="on purpose"):
            list(stream)
        assert len(session.token_ids) == 12
        text = session.token_ids
        assert_same(session.generate(TURNS[2]), model.generate([*text, *TURNS[2]], **OPTIONS))

    def test_made_before_the_session_went_on(self, model):
        session = model.session(**OPTIONS)
        stream = session.stream(TURNS[0])
        session.generate(TURNS[1])
        with pytest.raises(InputError, match="got a stream of a session that has gone on"):
            next(stream)
        closed = session.stream(TURNS[0])
        closed.close()
        with pytest.raises(InputError, match="got no result"):
            _ = closed.result

    def test_without_a_tokenizer(self, llama):
        with pytest.raises(InputError, match="got no tokenizer to make text with"):
            layerskip.wrap(llama).session().stream([3])


class TestOneAtATime:
    def test_in_the_middle_of_a_stream(self, model):
        session = model.session(**OPTIONS)
        stream = session.stream(TURNS[0])
        next(stream)
        for call in (session.generate, session.stream, session.read):
            with pytest.raises(InputError, match="in the middle of another; expected one at a time"):
                call(TURNS[1])
        for call in (session.fork, lambda: session.rewind(0)):
            with pytest.raises(InputError, match="in the middle of another"):
                call()
        list(stream)
        session.generate(TURNS[1])

    def test_two_threads(self, model):
        session, inside, go_on, errors = model.session(**OPTIONS), threading.Event(), threading.Event(), []

        def wait(input_ids, scores):
            inside.set()
            go_on.wait(30)
            return scores

        thread = threading.Thread(target=session.generate, args=(TURNS[0],), kwargs={"logits_processor": [wait]})
        thread.start()
        inside.wait(30)
        with pytest.raises(InputError, match="in the middle of another"):
            session.generate(TURNS[1])
        go_on.set()
        thread.join()
        assert (session.turns, errors) == (1, [])

    def test_an_interrupt_just_behind_the_beginning(self, model):
        """As a signal may come: the call has begun, and nothing else was done. The next one finds it ended."""

        class Interrupting(dict):
            def setdefault(self, *arguments):
                super().setdefault(*arguments)
                raise KeyboardInterrupt

        session = model.session(**OPTIONS)
        session._busy = Interrupting()
        with pytest.raises(KeyboardInterrupt):
            session.generate(TURNS[0])
        session._busy = dict(session._busy)
        assert session.generate(TURNS[0]).new_token_ids


class TestGrowth:
    def test_the_cache_doubles_up_to_the_models_positions(self, model):
        session, seen = model.session(max_new_tokens=2, eos_token_id=None, **always(DraftPlan.exit(2))), []
        for index in range(40):
            session.generate([3 + index])
            seen.append(session._memory.cache.capacity)
        assert len(set(seen)) <= 7 and seen[-1] <= 160
        assert seen == sorted(seen)

    def test_a_full_context(self, model):
        session = model.session(max_new_tokens=8, eos_token_id=None, **always(DraftPlan.exit(2)))
        session.generate(prompt(140)[0])
        last = session.generate(prompt(8)[0])
        assert last.finish_reasons == ["max_positions"]
        assert session.token_ids == model.generate(last.sequences[0, :156].tolist(), max_new_tokens=8,
                                                   eos_token_id=None).sequences[0].tolist()  # fmt: skip
        with pytest.raises(InputError, match="got a session of 163 tokens with this turn, on a model of 160 pos"):
            session.generate([3, 4, 5])
        session.rewind(1)
        session.generate([3, 4, 5])

    def test_a_draft_model_with_fewer_positions(self):
        model = layerskip.wrap(agreeing_model("llama"))
        options = {**always(DraftPlan.model(llama_with(max_positions=24, seed=1))), **OPTIONS}
        session = model.session(**options)
        for turn in TURNS:
            text = [*session.token_ids, *turn]
            assert_same(session.generate(turn), model.generate(text, **options))


@pytest.mark.parametrize(
    ("inputs", "options", "error", "message"),
    [
        (torch.tensor([[3, 4], [5, 6]]), {}, InputError, "got 2 rows in a session; expected one"),
        (["Why?"], {}, InputError, "got list in a session; expected a string"),
        (3.5, {}, InputError, "got float in a session"),
        ([], {}, InputError, "got an empty prompt"),
        (None, {}, InputError, "got an empty prompt"),
        ([99], {}, InputError, "got token id 99"),
        ([3], {"num_return_sequences": 2}, SettingError, "got num_return_sequences=2 in a session"),
        ([3], {"attention_mask": [1]}, InputError, "got attention_mask in a session"),
        ([3], {"acceptance_rule": "maximum"}, SettingError, "Did you mean 'maximal'"),
        (TURNS[0], {"plan": DraftPlan(exit_layer=0, adapter="nowhere.safetensors")}, CheckpointError, "no file"),
        ([3], {"streamer": 3}, InputError, "got streamer=3"),
    ],
)
def test_calls_that_are_refused(model, inputs, options, error, message):
    session = model.session(**OPTIONS)
    session.generate(TURNS[0])
    session.rewind(0)
    with pytest.raises(error, match=message):
        session.generate(inputs, **options)
    said = session.generate(TURNS[0])
    assert_same(said, model.generate(TURNS[0], **OPTIONS))
    assert said.stats.reused_tokens == len(TURNS[0]) - 1, "what was read is not lost by a mistyped setting"


@pytest.mark.parametrize("name", ["plain", "exit", "skip", "lookup", "itself", "exit and state"])
def test_rounds_of_fixed_shapes(plan_of, name):
    """They have a cache of their own, which the next call may find changed. Forks and failures among them."""
    model = layerskip.wrap(agreeing_model("llama"))
    options = {**OPTIONS, **always(plan_of("llama", name)), "cuda_graphs": True}
    session = model.session(**options)
    for index in range(3):
        for each in (session.fork(), session):
            text, turn = [*each.token_ids], prompt(4, seed=index)[0].tolist()
            with pytest.raises(RuntimeError, match="on purpose"):
                each.generate(turn, stopping_criteria=[Fails(3)])
            said = each.generate(turn)
            assert said.stats.execution.startswith("static") and said.stats.reused_tokens >= max(0, len(text) - 1)
            assert_same(said, model.generate([*text, *turn], **options))


def test_rounds_of_fixed_shapes_between_others(plan_of):
    """They keep no states for trained blocks, which are then to read the text again."""
    model, session = layerskip.wrap(agreeing_model("llama")), None
    session = model.session(**OPTIONS)
    for index, static in enumerate([False, True, False, True, True, False]):
        options = {"cuda_graphs": static, **always(plan_of("llama", "exit" if static else "exit and state"))}
        text, turn = session.token_ids, prompt(3, seed=index)[0].tolist()
        assert_same(session.generate(turn, **options), model.generate([*text, *turn], **OPTIONS, **options))


def test_a_model_that_is_prepared_meanwhile(model):
    session, fresh = model.session(**OPTIONS), layerskip.wrap(agreeing_model("llama"))
    session.generate(TURNS[0])
    text = session.token_ids
    model.prepare()
    assert_same(session.generate(TURNS[2]), fresh.generate([*text, *TURNS[2]], **OPTIONS))


def test_a_session_draws_no_random_numbers(model):
    """So that torch's seed gives the same text with and without one."""
    options = {**OPTIONS, "do_sample": True}
    torch.manual_seed(0)
    fresh = model.generate([{"role": "system", "content": "Be"}, {"role": "user", "content": "Why?"}], **options)
    torch.manual_seed(0)
    assert_same(model.session(system="Be", **options).generate("Why?"), fresh)


def test_under_a_callers_inference_mode_and_without(model):
    """What is made in one mode is written to in the other."""
    session = model.session(**always(DraftPlan.model(tiny_model("llama"))), **OPTIONS)
    criterion = {"stopping_criteria": [lambda *_: False]}
    for inside, guests in ((True, {}), (False, criterion), (True, criterion), (False, {})):
        with torch.inference_mode(inside):
            session = session.fork()
            session.generate(TURNS[2], **guests)


def test_a_plan_replaced_by_another_drafts_by_that(model):
    session = model.session(plan=DraftPlan.exit(2), governor="off", **OPTIONS)
    assert session.generate(TURNS[0], plan=None, governor=None).stats.proposed == 0
    assert session.generate(TURNS[0]).plan == DraftPlan.exit(2)
    assert (
        dataclasses.replace(DraftPlan.exit(2), lookup_tokens=3)
        == session.generate(TURNS[1], prompt_lookup_num_tokens=3).plan
    )


class Switched(torch.nn.Module):
    """A linear with an addition that can be turned off, as PEFT's `disable_adapter` does: no tensor changes."""

    def __init__(self, base):
        super().__init__()
        self.base, self.addition, self.is_on = (
            base,
            torch.nn.Linear(base.in_features, base.out_features, bias=False),
            True,
        )
        self.addition.to(base.weight.dtype).requires_grad_(False)

    def forward(self, inputs):
        return self.base(inputs) + self.addition(inputs) if self.is_on else self.base(inputs)


def switched_model():
    torch.manual_seed(0)
    hf_model = copy.deepcopy(agreeing_model("llama"))
    switched = Switched(hf_model.model.layers[1].mlp.up_proj)
    hf_model.model.layers[1].mlp.up_proj = switched
    return layerskip.wrap(hf_model), switched


def test_what_another_lora_has_read_is_read_again():
    model, switched = switched_model()
    session = model.session(**OPTIONS)
    session.generate(TURNS[0])
    switched.is_on = False
    text = [*session.token_ids, *TURNS[2]]
    said = session.generate(TURNS[2])
    assert_same(said, model.generate(text, **OPTIONS))
    assert said.stats.reused_tokens == 0


def test_rounds_that_another_lora_has_recorded_are_not_taken_over():
    model, switched = switched_model()
    call = {**OPTIONS, **always(DraftPlan.exit(2)), "cuda_graphs": True}
    model.generate(TURNS[0], **call)
    (before, _), *_ = model.static_pool._kept
    switched.is_on = False
    model.generate(TURNS[0], **call)
    assert len(model.static_pool._kept) == 2 and model.static_pool._kept[-1][0] != before


def test_a_template_that_wants_the_two_to_alternate():
    """A question behind a document that was read as a user's message is refused with the way out, which works."""
    tokenizer = copy.deepcopy(character_tokenizer())  # which all tests share
    tokenizer.chat_template = (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"
    )
    session = layerskip.wrap(agreeing_model("llama"), tokenizer).session(max_new_tokens=3)
    session.read("a document")
    with pytest.raises(InputError, match=r"alternate.*generate\(None\) before the next question"):
        session.generate("why")
    assert session.generate(None).new_token_ids and session.generate("why").new_token_ids
