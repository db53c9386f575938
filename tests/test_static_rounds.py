"""Rounds of fixed shapes decide what rounds made pass by pass decide: all of the CUDA path but the recording itself.

In float64 on the CPU, where every program is run as it is. `tests/test_cuda.py` runs the same on a GPU.
"""

import threading
import weakref

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper

import layerskip
from layerskip import CostRatios, DraftPlan, SettingError, static_rounds
from layerskip.governor import WorthIt
from layerskip.recording import Direct
from layerskip.static_pool import StaticPool
from layerskip.static_rounds import TIERS, StaticRounds, tier_of
from tests.special_models import agreeing_model
from tests.tiny_models import REPRESENTATIVES, prompt, tiny_model, transformers_greedy

PLANS = {
    "plain": None,
    "exit": DraftPlan.exit(2),
    "skip": DraftPlan.skip([1, 2], [2], num_draft_tokens=5),
    "draft vocabulary": DraftPlan.exit(2, draft_vocabulary=range(0, 61, 2)),
    "lookup": DraftPlan.lookup(),
    "combined": DraftPlan.exit(3, lookup_tokens=4),
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
GREEDY = {"max_new_tokens": 30, "eos_token_id": None}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.95, "seed": 3}


def off(plan: DraftPlan | None) -> dict[str, object]:
    """A call whose drafts do not depend on clocks."""
    return {"plan": plan, "governor": None if plan is None else "off"}


@every_plan
@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_greedy_output_is_the_models_own(name, plan):
    model = layerskip.wrap(tiny_model(name))
    result = model.generate(prompt(), **off(plan), **GREEDY, cuda_graphs=True)
    assert torch.equal(result.sequences, transformers_greedy(tiny_model(name), prompt(), max_new_tokens=30))
    assert result.stats.execution.startswith("static: ")


@every_plan
@pytest.mark.parametrize("rule", ["maximal", "invariant"])
def test_samples_are_those_of_rounds_made_pass_by_pass(rule, plan):
    """Token by token, in a batch: the same noise, the same acceptance, however far the shapes are padded."""
    model = layerskip.wrap(agreeing_model("llama"))
    call = {**SAMPLED, **off(plan), "acceptance_rule": rule, "num_return_sequences": 3}
    static, eager = (model.generate(prompt(), **call, cuda_graphs=each) for each in (True, False))
    assert torch.equal(static.sequences, eager.sequences)
    assert static.stats.accepted_histogram == eager.stats.accepted_histogram
    assert static.drafted == eager.drafted


@pytest.mark.parametrize("tokens", [1, 2, 5, 7, 11])
def test_every_number_of_drafts(tokens):
    """Those between two tiers are padded, and the last rounds of an answer draft less."""
    model = layerskip.wrap(agreeing_model("llama"))
    plan = DraftPlan.exit(2, num_draft_tokens=tokens)
    static, eager = (model.generate(prompt(), **off(plan), **GREEDY, cuda_graphs=each) for each in (True, False))
    assert torch.equal(static.sequences, eager.sequences)
    assert static.stats.accepted_histogram == eager.stats.accepted_histogram


def test_the_least_tier_that_holds_a_number():
    assert [tier_of(count) for count in (0, 1, 5, 9, 17, 40)] == [0, 1, 6, 12, 24, 48]
    assert all(tier_of(tier) == tier for tier in TIERS)


@pytest.mark.parametrize("threshold", [0.3, 0.7])
def test_a_draft_is_cut_behind_an_unsure_token(threshold):
    """Inside a recorded draft nothing can stop; what lies behind the first unsure token is not looked at."""
    model = layerskip.wrap(agreeing_model("llama"))
    plan = DraftPlan.exit(2, confidence_threshold=threshold)
    call = {**SAMPLED, **off(plan)}
    static, eager = (model.generate(prompt(), **call, cuda_graphs=each) for each in (True, False))
    assert torch.equal(static.sequences, eager.sequences)
    assert static.stats.drafted_histogram == eager.stats.drafted_histogram


def test_more_cache_slots_are_read_as_the_text_grows(monkeypatch):
    """Catches a bucket that does not show the newest positions."""
    monkeypatch.setattr(static_rounds, "SLOTS", 16)
    model = layerskip.wrap(tiny_model("mistral-window"))
    call = {**GREEDY, "max_new_tokens": 100}
    result = model.generate(prompt(), **off(DraftPlan.exit(2)), **call, cuda_graphs=True)
    own = transformers_greedy(tiny_model("mistral-window"), prompt(), max_new_tokens=100)
    assert torch.equal(result.sequences, own)


def test_rows_that_end_early_and_rows_of_other_lengths():
    model = layerskip.wrap(agreeing_model("llama"))
    rows = [prompt(length, seed=length)[0].tolist() for length in (9, 4, 13)]
    eos = model.generate(rows, **GREEDY).new_token_ids[1][4]
    call = {**off(DraftPlan.exit(2, lookup_tokens=3)), "max_new_tokens": 30, "eos_token_id": eos}
    static, eager = (model.generate(rows, **call, cuda_graphs=each) for each in (True, False))
    assert static.new_token_ids == eager.new_token_ids
    assert static.finish_reasons == eager.finish_reasons


class Counting(Direct):
    """Counts the programs it meets for the first time."""

    def __init__(self) -> None:
        super().__init__("counting")
        self.keys: set[object] = set()

    def __call__(self, key, program):
        self.keys.add(key)
        return super().__call__(key, program)


class TestAgain:
    """What was recorded is used by later calls, in the same memory."""

    @pytest.fixture
    def recorders(self, monkeypatch) -> list[Counting]:
        made: list[Counting] = []

        def make(device):
            made.append(Counting())
            return made[-1]

        monkeypatch.setattr("layerskip.static_pool.make_recorder", make)
        return made

    def test_a_call_like_an_earlier_one_uses_its_recordings(self, recorders):
        model = layerskip.wrap(agreeing_model("llama"))
        call = {**SAMPLED, **off(DraftPlan.exit(2))}
        model.generate(prompt(), **call, cuda_graphs=True)
        for length, seed in ((9, 4), (5, 5), (20, 6)):
            own = {**call, "seed": seed}
            static, eager = (model.generate(prompt(length), **own, cuda_graphs=each) for each in (True, False))
            assert torch.equal(static.sequences, eager.sequences)
        assert len(recorders) == 1
        assert {key[0] for key in recorders[0].keys} == {"draft", "verify"}

    @pytest.mark.parametrize("other", [{"temperature": 0.5}, {"acceptance_rule": "invariant"}, {"plan": None}])
    def test_a_call_that_differs_does_not_use_it(self, recorders, other):
        """What is recorded has the temperature in it."""
        model = layerskip.wrap(agreeing_model("llama"))
        call = {**SAMPLED, "plan": DraftPlan.exit(2), "cuda_graphs": True}
        model.generate(prompt(), **call)
        model.generate(prompt(), **{**call, **other})
        assert len(recorders) == 2

    def test_values_of_an_earlier_call_leave_no_trace(self, recorders):
        """A masked slot is multiplied by 0, which does not make a NaN go away."""
        model = layerskip.wrap(tiny_model("llama"))
        expected = model.generate(prompt(), **GREEDY).sequences
        model.generate(prompt(), **GREEDY, cuda_graphs=True)
        _, kept = model.static_pool._kept[0]
        for entries in kept.state.cache._entries:
            entries.fill_(float("nan"))
        assert torch.equal(model.generate(prompt(), **GREEDY, cuda_graphs=True).sequences, expected)
        assert len(recorders) == 1

    def test_two_streams_at_once_do_not_share_memory(self, recorders):
        from tests.toy_tokenizer import character_tokenizer

        model = layerskip.wrap(agreeing_model("llama"), character_tokenizer())
        inputs = [prompt(9, seed=seed)[0].tolist() for seed in (1, 2)]
        expected = [model.generate(each, **GREEDY).new_token_ids for each in inputs]
        streams = [model.stream(each, **GREEDY, cuda_graphs=True) for each in inputs]
        for pieces in zip(*streams, strict=False):
            assert len(pieces) == 2
        assert [stream.result.new_token_ids for stream in streams] == expected
        assert len(recorders) == 2

    def test_threads_do_not_share_memory(self, recorders):
        model = layerskip.wrap(agreeing_model("llama"))
        expected = {seed: model.generate(prompt(seed=seed), **GREEDY).new_token_ids for seed in range(4)}
        got: dict[int, list[list[int]]] = {}

        def run(seed: int) -> None:
            got[seed] = model.generate(prompt(seed=seed), **GREEDY, cuda_graphs=True).new_token_ids

        threads = [threading.Thread(target=run, args=(seed,)) for seed in expected]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == expected

    def test_a_recorded_draft_is_padded_for_itself_alone(self, recorders, monkeypatch):
        """Verification is as wide as what was asked for, and a step of the draft costs its share of all that ran."""
        noted, asked = [], []
        note, draft = WorthIt.note_times, StaticRounds.draft

        def note_times(self, made, width, seconds):
            noted.append((made["self"][0] if "self" in made else 0, width))
            note(self, made, width, seconds)

        def drafted(self, name, drafter, limits):
            asked.append(max(limits))
            return draft(self, name, drafter, limits)

        monkeypatch.setattr(WorthIt, "note_times", note_times)
        monkeypatch.setattr(StaticRounds, "draft", drafted)
        plan = DraftPlan.exit(3, num_draft_tokens=5)
        costs = {"governor": "fixed", "cost_ratios": CostRatios(draft=0.05, verify_slope=0.01)}
        model = layerskip.wrap(agreeing_model("llama"))
        model.generate(prompt(), plan=plan, **costs, **GREEDY, cuda_graphs=True)
        made = [(steps, width) for steps, width in noted if steps]
        assert 5 in asked and made
        assert all(steps in TIERS for steps, _ in made)
        assert {width for _, width in made} <= {1 + tier for tier in TIERS}

    @pytest.mark.parametrize("pieces", [0, 1])
    def test_a_stream_that_is_left_gives_back_what_it_used(self, recorders, pieces):
        """Also one that was never begun."""
        from tests.toy_tokenizer import character_tokenizer

        model = layerskip.wrap(agreeing_model("llama"), character_tokenizer())
        stream = model.stream(prompt()[0].tolist(), **GREEDY, cuda_graphs=True)
        for _ in range(pieces):
            next(stream)
        stream.close()
        expected = model.generate(prompt(), **GREEDY).sequences
        assert torch.equal(model.generate(prompt(), **GREEDY, cuda_graphs=True).sequences, expected)
        assert len(recorders) == 1


class Shift(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.roll(input_ids.shape[1] % 3, dims=-1)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"repetition_penalty": 1.3}, "looks at the tokens before"),
        ({"logits_processor": LogitsProcessorList([Shift()])}, "looks at the tokens before"),
        ({"pass_width": 8}, "pass_width"),
        ({"do_sample": True, "eta_cutoff": 0.001, "seed": 1}, "eta_cutoff"),
    ],
)
def test_what_cannot_be_recorded_is_run_pass_by_pass_with_the_reason(settings, reason):
    model = layerskip.wrap(agreeing_model("llama"))
    call = {**GREEDY, **off(DraftPlan.exit(2)), **settings}
    static = model.generate(prompt(), **call, cuda_graphs=True)
    assert static.stats.execution.startswith("eager: ") and reason in static.stats.execution
    assert torch.equal(static.sequences, model.generate(prompt(), **call).sequences)


def test_on_a_cpu_nothing_is_recorded_unasked():
    assert layerskip.wrap(tiny_model("llama")).generate(prompt(), **GREEDY).stats.execution == "eager"


@pytest.mark.parametrize("bad", ["yes", 1, "static"])
def test_the_switch_is_checked(bad):
    with pytest.raises(SettingError, match="expected True, False, or None"):
        layerskip.wrap(tiny_model("llama")).generate(prompt(), cuda_graphs=bad)


def test_the_last_rounds_of_an_answer_record_nothing(monkeypatch):
    """They draft ever fewer tokens; each recording would take longer than the round."""
    recorder = Counting()
    monkeypatch.setattr("layerskip.static_pool.make_recorder", lambda device: recorder)
    model = layerskip.wrap(agreeing_model("llama"))
    plan = DraftPlan.exit(3, num_draft_tokens=6)
    model.generate(prompt(), **off(plan), **{**GREEDY, "max_new_tokens": 60}, cuda_graphs=True)
    assert {key[2] for key in recorder.keys if key[0] == "draft"} == {6}


class Frozen(Direct):
    """Runs the program that it first met under a key, as a recording would: what later calls bring is not seen."""

    def __init__(self) -> None:
        super().__init__("frozen")
        self.programs: dict[object, object] = {}

    def __call__(self, key, program):
        return self.programs.setdefault(key, program)()


class TestWhatWasRecorded:
    """A graph knows addresses, not objects: a call must not be served by recordings that read another one's."""

    @pytest.fixture(autouse=True)
    def frozen(self, monkeypatch):
        monkeypatch.setattr("layerskip.static_pool.make_recorder", lambda device: Frozen())

    def both(self, model, before, call, length=9):
        """The same call twice, static after the calls `before`, and pass by pass."""
        for each in before:
            model.generate(prompt(), **{**call, **each}, cuda_graphs=True)
        static, eager = (model.generate(prompt(length), **call, cuda_graphs=each) for each in (True, False))
        assert torch.equal(static.sequences, eager.sequences)

    @every_plan
    def test_other_seeds_and_lengths(self, plan):
        model = layerskip.wrap(agreeing_model("llama"))
        self.both(model, [{"seed": 8}, {"seed": 9}], {**SAMPLED, **off(plan)}, length=14)

    def test_processors_of_an_earlier_call(self):
        cold = LogitsProcessorList([TemperatureLogitsWarper(0.05)])
        self.both(
            layerskip.wrap(agreeing_model("llama")), [{"logits_processor": cold}], {**SAMPLED, **off(PLANS["exit"])}
        )

    def test_rotary_tables_that_have_grown(self):
        model = layerskip.wrap(tiny_model("llama"))
        model.generate(prompt(4), **GREEDY, cuda_graphs=True)
        first = model.decoder.rotary_tables("", 1, model.decoder.device)
        kept = weakref.ref(first[0])
        model.decoder.rotary_tables("", 10 * len(first[0]), model.decoder.device)
        del first
        assert kept() is not None
        self.both(model, [], {**GREEDY, **off(None)})

    def test_draft_vocabularies_in_turn(self):
        """More of them than partial heads are kept."""
        model = layerskip.wrap(agreeing_model("llama"))
        plans = [DraftPlan.exit(2, draft_vocabulary=range(first, 61, 2)) for first in range(8)]
        for plan in (plans[0], *plans, plans[0]):
            self.both(model, [], {**SAMPLED, **off(plan)})

    def test_weights_that_were_prepared_since(self):
        model = layerskip.wrap(agreeing_model("llama"))
        call = {**SAMPLED, **off(PLANS["exit"])}
        self.both(model, [{}], call)
        model.prepare()
        assert not model.static_pool._kept
        self.both(model, [{}], call)

    def test_a_longer_call_before_a_shorter_one(self):
        model = layerskip.wrap(agreeing_model("llama"))
        self.both(model, [{"max_new_tokens": 120}], {**GREEDY, **off(PLANS["combined"])})
        assert len(model.static_pool._kept) == 1


def test_a_pool_keeps_as_many_as_it_is_told():
    for most in (0, 1, 3):
        pool = StaticPool(most)
        for key in range(5):
            pool.give_back(key, None)
        assert [key for key, _ in pool._kept] == list(range(5 - most, 5))
    for bad in (-1, 1.5, True):
        with pytest.raises(SettingError, match="expected an integer from 0"):
            StaticPool(bad)


def test_rounds_that_record_are_not_taken_for_costs(monkeypatch):
    """A recording takes tens of rounds; a governor that counted it would not draft again."""

    class Recording(Direct):
        count = 0

        def __call__(self, key, program):
            Recording.count += 1
            return super().__call__(key, program)

    monkeypatch.setattr("layerskip.static_pool.make_recorder", lambda device: Recording("counting"))
    model = layerskip.wrap(agreeing_model("llama"))
    stats = model.generate(prompt(), plan=PLANS["exit"], **GREEDY, cuda_graphs=True).stats
    assert stats.recording_s > 0 and stats.draft_s == stats.verify_s == 0
    assert stats.costs["plain_step_s"] is None
