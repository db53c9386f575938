"""The search as a whole, on tiny models: it finds what is planted, resumes, refuses another study, ends when told."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import layerskip
from layerskip.errors import InputError, SearchError, SettingError
from layerskip.models.synthetic import synthetic_model
from layerskip.search import Budget, SearchSettings, find_plan, load_result
from layerskip.search.candidate import Candidate
from layerskip.search.cost import CostModel, uniform_costs
from layerskip.search.held_out import evaluate, expected_rounds
from layerskip.search.judge import Judge
from layerskip.search.replay import Replay
from layerskip.search.result import Interval, SearchResult, TrialRecord
from layerskip.search.samplers import SAMPLERS
from layerskip.search.texts import Text
from tests.tiny_models import NUM_LAYERS, REPRESENTATIVES, prompt, tiny_model

SMALL = SearchSettings(
    positions=96,
    held_out_positions=64,
    frequency_positions=64,
    new_tokens=16,
    draft_length=3,
    context=16,
    vocabulary_sizes=(),
    protect_first=0,
)
PROMPTS = [prompt(length, seed=length)[0].tolist() for length in range(4, 16)]


class Told:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.trials: list[TrialRecord] = []
        self.messages: list[str] = []

    def stage(self, what: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        self.stages.append(what)

    def trial(self, record: TrialRecord, best: TrialRecord | None, finished: int) -> None:
        self.trials.append(record)

    def message(self, text: str) -> None:
        self.messages.append(text)


def costs_of(model: layerskip.Model) -> CostModel:
    """Costs of equal blocks: what is found does not depend on a clock."""
    return uniform_costs(model.decoder.num_blocks, vocabulary=model.decoder.vocab_size)


def search(model: layerskip.Model, trials: int = 12, settings: SearchSettings = SMALL, **more: object) -> SearchResult:
    more = {"costs": costs_of(model), "measure": False, **more}
    return find_plan(model, PROMPTS, budget=Budget(trials), settings=settings, **more)


def planted() -> layerskip.Model:
    """Of four blocks the last two add nothing."""
    return layerskip.wrap(synthetic_model("tiny", torch.float64, agreement=1.0, from_block=2))


@pytest.mark.parametrize("sampler", ["elite", "tpe"])
def test_the_planted_set_is_found(sampler: str) -> None:
    result = search(planted(), 25, replace(SMALL, sampler=sampler, protect_last=0))
    skipped = result.best.candidate.skipped(4)
    assert skipped[0] >= {2, 3} and skipped[1] >= {2, 3}
    assert result.best.acceptance_rate == 1.0
    assert result.held_out.acceptance_rate.value == 1.0
    assert result.held_out.tokens_per_round.value > 3
    assert result.plan.target is not None
    json.dumps(result.to_dict())


def test_a_planted_set_of_sub_blocks_is_found() -> None:
    """Of 24 sub-blocks seven add nothing: the search must leave out these, and no other."""
    redundant = {"attention": [2, 5, 6, 9], "mlp": [3, 6, 10]}
    model = layerskip.wrap(synthetic_model("tiny-deep", torch.float64, agreement=1.0, redundant=redundant))
    result = search(model, 60, replace(SMALL, positions=192))
    assert result.best.candidate == Candidate.of(12, redundant["attention"], redundant["mlp"])
    assert result.held_out.acceptance_rate.value == 1.0
    assert result.single_retention["mlp"][3] == 1.0 > result.single_retention["mlp"][4]


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_rounds_are_those_of_real_decoding(family: str) -> None:
    model = layerskip.wrap(tiny_model(family))
    for candidate in (Candidate.of(NUM_LAYERS, [2]), Candidate.of(NUM_LAYERS, exit_layer=3)):
        plan = layerskip.DraftPlan(
            skip_attention=candidate.skip_attention, exit_layer=candidate.exit_layer, num_draft_tokens=3
        )
        texts, rounds = [], 0
        for ids in PROMPTS[:3]:
            real = model.generate(ids, plan=plan, governor="off", do_sample=False, eos_token_id=[], max_new_tokens=20)
            texts.append(Text(tuple(ids), tuple(real.new_token_ids[0])))
            rounds += real.stats.rounds
        judge = Judge(Replay(model.decoder, texts, draft_length=3), uniform_costs(NUM_LAYERS))
        found = evaluate(judge, candidate, 3)
        assert found.tokens_per_round.value == pytest.approx(sum(each.num_positions for each in texts) / rounds)
        assert found.tokens_per_round.low <= found.tokens_per_round.value <= found.tokens_per_round.high


def test_expected_rounds_of_a_chain() -> None:
    assert expected_rounds([[1.0, 1.0]] * 9, 2) == 3  # three tokens a round
    assert expected_rounds([[0.0, 0.0]] * 9, 2) == 9
    assert expected_rounds([[1.0, 1.0]] * 4, 2) == 2  # of the last round, no draft fits
    # Half of the drafts stand: one round, with a second one in half of the cases.
    assert expected_rounds([[0.5]] * 2, 1) == 1.5


def test_a_study_is_resumed_and_another_one_refused(tmp_path: Path) -> None:
    storage, model, told = tmp_path / "trials.db", planted(), Told()
    first = search(model, 5, storage=storage, progress=told)
    assert len(first.trials) == 5 and len(told.trials) == 5
    again = Told()
    second = search(model, 8, storage=storage, progress=again)
    assert [each.number for each in second.trials] == list(range(8))
    assert second.trials[:5] == first.trials
    assert len(again.trials) == 3 and "writing calibration texts" not in again.stages
    third = search(model, 8, storage=storage)  # nothing is left to be tried
    assert third.plan == second.plan and third.trials == second.trials
    other = layerskip.wrap(synthetic_model("tiny", torch.float64, seed=5))
    with pytest.raises(SearchError, match="another model.*weights"):
        search(other, storage=storage)
    with pytest.raises(SearchError, match="another setting: positions 96, now 97"):
        search(model, storage=storage, settings=replace(SMALL, positions=97))
    with pytest.raises(SearchError, match="another set of prompts"):
        find_plan(model, PROMPTS[:5], storage=storage, settings=SMALL)
    with pytest.raises(SearchError, match="another dtype"):
        narrow = synthetic_model("tiny", torch.float64, agreement=1.0, from_block=2).to(torch.float32)
        search(layerskip.wrap(narrow), storage=storage)
    with pytest.raises(SearchError, match="other costs"):
        search(model, storage=storage, costs=uniform_costs(4, head=2.0, vocabulary=512))
    with pytest.raises(SettingError, match="costs of 5 blocks"):
        search(model, costs=uniform_costs(5))
    assert search(model, 9, storage=storage, study="another").study == "another"


def test_an_interrupt_ends_the_search_with_what_it_has(tmp_path: Path) -> None:
    told = Told()

    def interrupt(study: object, trial: object) -> None:
        if len(told.trials) == 3:
            raise KeyboardInterrupt

    result = search(planted(), 50, storage=tmp_path / "trials.db", progress=told, callbacks=[interrupt])
    assert len(result.trials) == 4
    assert any("interrupted" in each for each in told.messages)


def test_the_model_writes_its_own_texts() -> None:
    model = planted()
    by_itself = find_plan(model, budget="3 trials", settings=SMALL, measure=True)
    assert by_itself.settings["calibration"]["source"] == "written by the model"
    assert by_itself.held_out.measured_speedup is not None


def test_a_small_space_is_searched_to_its_end() -> None:
    told = Told()
    result = search(planted(), 500, replace(SMALL, skips=False), progress=told)  # exits at 1, 2, 3, or none
    assert {each.candidate.exit_layer for each in result.trials} == {1, 2, 3, None}
    assert len(result.trials) < 60 and any("nothing new to propose" in each for each in told.messages)


def test_two_objectives_give_a_front() -> None:
    result = search(planted(), 20, replace(SMALL, objective="front"))
    costs = [each.draft_ratio for each in result.front]
    rates = [each.acceptance_rate for each in result.front]
    assert len(result.front) > 1 and costs == sorted(costs) and rates == sorted(rates)


def test_sampled_texts_are_searched_as_sampled() -> None:
    result = search(planted(), 6, replace(SMALL, sampling={"temperature": 2.0, "top_k": 0}))
    assert 0 < result.best.acceptance_rate <= 1
    with pytest.raises(SettingError, match="repetition_penalty in sampling"):
        search(planted(), 6, replace(SMALL, sampling={"repetition_penalty": 1.3}))


def test_a_checkpoints_own_penalties_are_left_out_and_told() -> None:
    """They act on greedy decoding too, and replay cannot apply them: texts and figures are without."""
    told, penalised = Told(), copy.deepcopy(planted().hf_model)
    penalised.generation_config.repetition_penalty = 1.7
    result = search(layerskip.wrap(penalised), 5, progress=told)
    assert result.settings["calibration"]["left_out"] == {"repetition_penalty": 1.7}
    assert any("repetition_penalty=1.7 is left out" in each for each in told.messages)
    assert replace(result.best, seconds=None) == replace(search(planted(), 5).best, seconds=None)


def test_prompts_are_the_same_by_their_ids(tmp_path: Path) -> None:
    """Whether they come as lists or tensors; and not by what a long tensor looks like when it is printed."""
    storage, model = tmp_path / "trials.db", planted()
    search(model, 2, storage=storage)
    as_tensors = [torch.tensor(each) for each in PROMPTS]
    find_plan(model, as_tensors, budget="3", storage=storage, settings=SMALL, measure=False)
    long = [torch.arange(400) % 500 + 3 + seed for seed in range(3)]
    changed = [each.clone() for each in long]
    changed[0][200] = 7
    find_plan(model, long, budget="1", storage=storage, study="long", settings=SMALL, measure=False)
    with pytest.raises(SearchError, match="another set of prompts"):
        find_plan(model, changed, budget="2", storage=storage, study="long", settings=SMALL, measure=False)


def test_a_callback_may_end_the_search() -> None:
    result = search(planted(), 50, callbacks=[lambda study, trial: study.stop() if trial.number == 3 else None])
    assert len(result.trials) == 4


def test_a_plan_is_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    result = search(planted(), 4)
    result.plan.save(tmp_path / "plan.json")
    assert layerskip.DraftPlan.load(tmp_path / "plan.json") == result.plan
    again = search(planted(), 4, costs=result.costs)  # as a result has them
    assert again.costs == result.costs


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"model": "a path"}, "type str; expected a layerskip.Model"),
        ({"settings": {"seed": 1}}, "type dict; expected a SearchSettings"),
        ({"costs": 3}, "type int; expected a CostModel"),
        ({"callbacks": print}, "expected a list of functions"),
        ({"heartbeat_s": 0}, "heartbeat_s=0"),
    ],
)
def test_arguments_of_another_type(arguments: dict[str, object], told: str) -> None:
    with pytest.raises(SettingError, match=told):
        find_plan(**{"model": planted(), "prompts": PROMPTS, "settings": SMALL, **arguments})


def test_a_measurement_can_contradict() -> None:
    found = search(planted(), 4).held_out
    faster, slower = Interval(1.2, 1.1, 1.3), Interval(0.9, 0.8, 0.99)
    assert replace(found, predicted_speedup=faster).pays
    assert replace(found, predicted_speedup=faster, measured_speedup=Interval(0.99, 0.9, 1.01)).pays
    assert not replace(found, predicted_speedup=faster, measured_speedup=slower).pays
    assert not replace(found, predicted_speedup=slower).pays


def test_draft_vocabularies_are_part_of_the_space() -> None:
    result = search(planted(), 20, replace(SMALL, vocabulary_sizes=(64, 256)))
    sizes = {each.candidate.vocabulary_size for each in result.trials}
    assert len(sizes) > 1
    if result.best.candidate.vocabulary_size is not None:
        assert len(result.plan.draft_vocabulary) == result.best.candidate.vocabulary_size


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_same_seed_same_trials(sampler: str) -> None:
    settings = replace(SMALL, sampler=sampler, positions=32, held_out_positions=16)
    runs = [search(planted(), 40, settings) for _ in range(2)]
    first, second = ([replace(each, seconds=None) for each in run.trials] for run in runs)
    assert first == second and len(first) == 40
    assert runs[0].plan.path(4) == runs[1].plan.path(4)


@pytest.mark.parametrize("budget", ["", "0", "-3", "10x", "1.5 trials", "m", "nan", "1e9 trials", "99999999999"])
def test_bad_budgets(budget: str) -> None:
    with pytest.raises(SettingError, match="budget"):
        Budget.parse(budget)


@pytest.mark.parametrize("limits", [(None, None), (0, None), (-1, None), (None, 0.0), (True, None), ("9", None)])
def test_a_budget_has_a_limit(limits: tuple[object, object]) -> None:
    with pytest.raises(SettingError, match="budget"):
        Budget(*limits)


def test_a_budget_is_spent_by_trials_or_by_time() -> None:
    assert not Budget(5, 60).is_spent(4, 59)
    assert Budget(5, 60).is_spent(5, 0) and Budget(5, 60).is_spent(0, 60) and Budget(None, 60).is_spent(0, 61)


@pytest.mark.parametrize(
    ("text", "budget"),
    [("200 trials", Budget(200)), ("7", Budget(7)), ("10m", Budget(None, 600)), ("1.5H", Budget(None, 5400))],
)
def test_budgets(text: str, budget: Budget) -> None:
    assert Budget.parse(text) == budget


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"objective": "fast"}, "objective"),
        ({"sampler": "elit"}, "Did you mean 'elite'"),
        ({"positions": 0}, "positions=0"),
        ({"seed": -1}, "seed=-1"),
        ({"sampling": 0.7}, "sampling=0.7"),
        ({"sampling": {"do_sample": True}}, "do_sample in sampling"),
        ({"sampling": {"max_new_tokens": 5}}, "max_new_tokens in sampling"),
        ({"sampling": {"temprature": 5}}, "Did you mean 'temperature'"),
        ({"draft_length": 65}, "draft_length=65"),
        ({"vocabulary_sizes": 64}, "vocabulary_sizes=64"),
        ({"skips": 1}, "skips=1"),
        ({"vocabulary_sizes": (0,)}, "vocabulary_sizes"),
        ({"vocabulary_sizes": (10**6,)}, "1,000,000 ids"),
        ({"protect_first": 9}, "protect_first=9"),
        ({"skips": False, "exits": False}, "nothing to choose"),
        ({"new_tokens": 1}, "new_tokens"),
        ({"context": 10**6}, "context"),
    ],
)
def test_bad_settings(changes: dict[str, object], told: str) -> None:
    with pytest.raises(SettingError, match=told):
        search(planted(), 2, replace(SMALL, **changes), costs=None)


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        ([], "0 different prompt"),
        ([[5, 6]], "1 different prompt"),
        ("text", "type str"),
        ([[5, 10**6], [4]], "1000000"),
        (["a", "b"], "tokenizer"),
    ],
)
def test_bad_prompts(prompts: object, told: str) -> None:
    with pytest.raises(InputError, match=told):
        find_plan(planted(), prompts, budget="2", settings=SMALL)


def test_nothing_finished_is_said() -> None:
    with pytest.raises(SettingError, match="name of 1 to 512"):
        search(planted(), 2, study=" ")

    def interrupt(study: object, trial: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(SearchError, match="no finished trial"):
        find_plan(planted(), PROMPTS, budget=Budget(None, 1e-9), settings=SMALL, callbacks=[interrupt])


def test_numbers_that_are_not_finite() -> None:
    model = synthetic_model("tiny", torch.float64)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(layerskip.LayerSkipError, match="NaN"):
        search(layerskip.wrap(model))


def test_a_result_is_read_from_its_storage(tmp_path: Path) -> None:
    storage = tmp_path / "trials.db"
    result = search(planted(), 5, storage=storage)
    again = load_result(storage, "layerskip")
    assert replace(again, seconds=0.0) == replace(result, seconds=0.0)
    with pytest.raises(SearchError, match="Did you mean 'layerskip'"):
        load_result(storage, "layerskp")
