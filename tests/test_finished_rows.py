"""Rows that have ended are let go of: they cost nothing more, and those that go on do not notice."""

import copy
import itertools

import pytest
import torch
from transformers import (
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

import layerskip
from layerskip import DraftPlan
from layerskip.drafters import LookupDrafter
from layerskip.governor import MeasuredCosts
from layerskip.models.adapter import AdapterSpec
from layerskip.models.adapter_file import save_adapter
from layerskip.models.decoder import Decoder
from layerskip.state import remaining_rows
from tests.drafting import always
from tests.engines import make_engine, run_checked
from tests.special_models import agreeing_model, likely_adapter
from tests.tiny_models import prompt, tiny_model, transformers_greedy

MANY = [prompt(3 + 5 * row % 23, seed=row)[0].tolist() for row in range(64)]
ENDS = [7, 19, 31, 42]  # ids that end a row: some soon, some late, some never
LONGEST = 24


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Every kind of drafter."""
    folder, made = tmp_path_factory.mktemp("adapters"), {}
    for name, spec in (("jump", AdapterSpec(0)), ("exit and state", AdapterSpec(2, 2))):
        save_adapter(likely_adapter(agreeing_model("llama"), spec), folder / f"{name}.safetensors", torch.float64)
        made[name] = DraftPlan(exit_layer=spec.exit_layer, adapter=str(folder / f"{name}.safetensors"))
    return made | {
        "plain": None,
        "exit": DraftPlan.exit(2),
        "lookup": DraftPlan.lookup(4),
        "lookahead": DraftPlan.lookahead(3, 3, 3),
        "exit and lookup": DraftPlan.exit(3, lookup_tokens=3, num_draft_tokens=5),
        "skip": DraftPlan.skip([1, 2], [2], confidence_threshold=0.3),
        "model": DraftPlan.model(tiny_model("llama")),
    }


PLANS = ("plain", "exit", "lookup", "lookahead", "exit and lookup", "skip", "model", "jump", "exit and state")


@pytest.fixture(scope="module")
def own_answers():
    """What transformers says to each of `MANY`, one at a time."""
    model = agreeing_model("llama")
    options = {"max_new_tokens": LONGEST, "eos_token_id": ENDS}
    return [transformers_greedy(model, torch.tensor([row]), **options)[0, len(row) :].tolist() for row in MANY]


@pytest.fixture
def rows_run(monkeypatch):
    """How many rows each pass of the full model was over."""
    seen, run = [], Decoder.run

    def counted(self, hidden, path, cache, span, *rest, **named):
        if len(path) == self.num_blocks:
            seen.append(span.batch)
        return run(self, hidden, path, cache, span, *rest, **named)

    monkeypatch.setattr(Decoder, "run", counted)
    return seen


@pytest.mark.parametrize("active", [each for size in range(1, 6) for each in itertools.product([0, 1], repeat=size)])
def test_remaining_rows(active):
    """All that go on and no others, without a gap; a row moves only into the place of one that has ended."""
    rows = remaining_rows([bool(each) for each in active])
    assert sorted(rows) == [row for row, is_active in enumerate(active) if is_active]
    assert all(place == row or not active[place] for place, row in enumerate(rows))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("governor", ["off", "fixed"])
def test_sixty_four_rows_as_each_alone(plans, own_answers, plan, governor):
    """Ragged prompts, ends at every time: catches whatever still stands at a row's old place."""
    model = layerskip.wrap(agreeing_model("llama"))
    options = {} if plans[plan] is None else {"plan": plans[plan], "governor": governor}
    result = model.generate(MANY, **options, max_new_tokens=LONGEST, eos_token_id=ENDS)
    assert result.new_token_ids == own_answers
    lengths = set(map(len, own_answers))
    assert len(lengths) > 8 and LONGEST in lengths, "rows were to end at many times"
    assert result.stats.round_tokens == sum(map(len, own_answers)) - len(MANY)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("rule", ["maximal", "invariant"])
def test_drawn_rows_as_each_alone(plans, rule, plan):
    """Seeds, processors made for a prompt's length, and the scores that are handed out go with their rows."""
    model, rows = layerskip.wrap(agreeing_model("llama")), MANY[:12]
    options = {
        **always(plans[plan]), "max_new_tokens": 16, "eos_token_id": [*range(12)], "acceptance_rule": rule,
        "do_sample": True, "temperature": 0.9, "repetition_penalty": 1.2, "min_new_tokens": 2, "output_scores": True,
    }  # fmt: skip
    together = model.generate(rows, seed=[7 * row for row in range(12)], **options)
    assert len(set(map(len, together.new_token_ids))) > 4
    for row, prompt_ids in enumerate(rows):
        alone = model.generate(prompt_ids, seed=7 * row, **options)
        assert together.new_token_ids[row] == alone.new_token_ids[0]
        assert together.finish_reasons[row] == alone.finish_reasons[0]
        for step, scores in enumerate(alone.scores):
            assert torch.allclose(together.scores[step][row], scores[0])


@pytest.mark.parametrize("plan", ["plain", "lookup", "jump", "model"])
def test_no_pass_is_over_rows_that_have_ended(plans, own_answers, rows_run, plan):
    """The claim itself, counted."""
    own = own_answers
    layerskip.wrap(agreeing_model("llama")).generate(
        MANY, **always(plans[plan]), max_new_tokens=LONGEST, eos_token_id=ENDS
    )
    rounds = rows_run[2 if plan == "model" else 1 :]  # the first are over the prompts
    assert rows_run[0] == 64
    if plan == "plain":
        assert rounds == [sum(len(row) > said for row in own) for said in range(1, max(map(len, own)))]
    assert rounds == sorted(rounds, reverse=True) and rounds[-1] < 64


@pytest.mark.parametrize("options", [{"pass_width": 6}, {"cuda_graphs": True}], ids=["pass_width", "fixed shapes"])
def test_rows_are_kept_where_shapes_are_promised(plans, own_answers, rows_run, options):
    model = layerskip.wrap(agreeing_model("llama"))
    result = model.generate(MANY, **always(plans["exit"]), **options, max_new_tokens=LONGEST, eos_token_id=ENDS)
    assert result.new_token_ids == own_answers
    assert set(rows_run) == {64}


@pytest.mark.parametrize("plan", PLANS)
def test_a_hook_finds_each_row_in_its_place(plans, plan):
    """As PEFT's `adapter_names` need it, a LoRA for each row: rows that are hooked stay where they are."""
    model, rows = copy.deepcopy(agreeing_model("llama")), MANY[:9]
    factors = torch.linspace(0.6, 1.4, len(rows), dtype=torch.float64)

    def own_answer(factor, prompt_ids):
        hook = model.model.layers[2].mlp.down_proj.register_forward_hook(lambda module, args, output: output * factor)
        answer = transformers_greedy(model, torch.tensor([prompt_ids]), max_new_tokens=LONGEST, eos_token_id=ENDS)
        hook.remove()
        return answer[0, len(prompt_ids) :].tolist()

    own = list(map(own_answer, factors, rows))
    model.model.layers[2].mlp.down_proj.register_forward_hook(
        lambda module, args, output: output * factors.view(-1, *[1] * (output.dim() - 1))
    )
    result = layerskip.wrap(model).generate(
        rows, **always(plans[plan]), max_new_tokens=LONGEST, eos_token_id=ENDS
    )  # fmt: skip
    assert result.new_token_ids == own and len(set(map(len, own))) > 2


def test_a_processor_of_the_callers_sees_each_rows_own_text():
    """It is asked about rows one by one, and none that has ended."""
    model, seen = agreeing_model("llama"), []

    class Watches(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.extend(map(tuple, input_ids.tolist()))
            return scores

    result = layerskip.wrap(model).generate(
        MANY[:9], **always(DraftPlan.lookup(3)), max_new_tokens=12, eos_token_id=ENDS, logits_processor=[Watches()]
    )
    texts = [tuple(row + new) for row, new in zip(MANY[:9], result.new_token_ids, strict=True)]
    committed = {text[:length] for text, row in zip(texts, MANY, strict=False) for length in range(len(row), len(text))}
    assert committed <= set(seen)
    assert not {texts[row] for row, why in enumerate(result.finish_reasons) if why == "eos"} & set(seen)


@pytest.mark.parametrize("rows", [MANY[:6], [row[:3] for row in MANY[:6]]], ids=["ragged", "equal"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: PrefixConstrainedLogitsProcessor(lambda number, text: [3 + number, 30 + 5 * number, 7 + number], 1),
        lambda: PrefixConstrainedLogitsProcessor(lambda number, text: [3 + number, 30 + 5 * number, 7 + number], 2),
        lambda: EncoderRepetitionPenaltyLogitsProcessor(0.3, torch.stack([prompt(4, seed=row)[0] for row in range(6)])),
        lambda: RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=torch.arange(6)),
    ],
    ids=["a function of the row", "of the prompt", "encoder", "ignored lengths"],
)
def test_transformers_processors_that_hold_something_for_each_row(plans, rows, make):
    """They look rows up by their place: that of the batch as it was given, whoever has left it."""
    model, own = agreeing_model("llama"), []
    options = {"max_new_tokens": 9, "eos_token_id": ENDS}
    for row, prompt_ids in enumerate(rows):  # in its place among its like, so that nothing is padded
        ids = torch.tensor([prompt_ids] * len(rows))
        answers = transformers_greedy(model, ids, logits_processor=[make()], **options)
        own.append(answers[row, len(prompt_ids) :].tolist())
    for plan in ("plain", "exit", "lookup"):
        result = layerskip.wrap(model).generate(rows, **always(plans[plan]), **options, logits_processor=[make()])
        assert [
            row + [0] * (len(whole) - len(row)) for row, whole in zip(result.new_token_ids, own, strict=True)
        ] == own


def test_the_cache_holds_what_is_left_after_every_round():
    """Also its own check, that all blocks hold all that is committed, in the rows as they are then."""
    engine = make_engine(
        agreeing_model("llama"), MANY[:16], lambda decoder, context: LookupDrafter(context),
        eos_token_id=ENDS, max_new_tokens=LONGEST,
    )  # fmt: skip
    rows = run_checked(engine)
    assert engine.state.batch < 16 and sorted(map(len, rows))[-1] == LONGEST
    for number, text in zip(engine.state.numbers, engine.state.texts, strict=True):
        assert text == MANY[number] + rows[number]


def test_several_sequences_of_a_prompt_end_one_by_one():
    model = layerskip.wrap(agreeing_model("llama"))
    options = {"max_new_tokens": 16, "eos_token_id": [*range(9)], "do_sample": True}
    together = model.generate(MANY[0], num_return_sequences=8, seed=3, **options)
    assert len(set(map(len, together.new_token_ids))) > 2
    for row in range(8):
        assert together.new_token_ids[row] == model.generate(MANY[0], seed=3 + row, **options).new_token_ids[0]


class TestCostsOfFewerRows:
    """What was measured over many rows says nothing of few."""

    def test_forgotten_at_half(self):
        costs = MeasuredCosts({"self": 0.1}, 8)
        for width, seconds in ((1, 1.0), (3, 3.0)):
            costs.note_verify(width, seconds)
        assert costs.verify(3) > 1.5
        costs.note_rows(5)
        assert costs.verify(3) > 1.5
        costs.note_rows(4)
        assert costs.verify(3) < 1.1 and costs.lacks_plain()

    def test_measured_anew(self):
        costs = MeasuredCosts({"self": 0.1}, 8)
        costs.note_verify(1, 8.0)
        costs.note_rows(1)
        costs.note_verify(1, 2.0)
        costs.note_draft("self", 2, 1.0)
        assert (costs.verify(1), costs.draft("self")) == (2.0, 0.5)
