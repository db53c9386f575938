"""The search with trained paths among its candidates: found, told, joined by other workers, and refused."""

import itertools
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import optuna
import pytest
import torch

import layerskip
from layerskip import DraftPlan
from layerskip.cli import main
from layerskip.errors import CheckpointError, LayerSkipError, PlanMismatchError, SearchError, SettingError
from layerskip.models.adapter import AdapterSpec
from layerskip.models.adapter_file import save_adapter
from layerskip.search import Budget, SearchResult, SearchSettings, find_plan, load_result
from layerskip.search.candidate import Candidate
from layerskip.search.cost import CostModel, uniform_costs
from layerskip.search.measuring import measure_costs
from layerskip.search.report import write_report
from layerskip.search.samplers import SAMPLERS, make_sampler
from layerskip.search.space import Space
from layerskip.search.storage import close_storage, open_storage
from layerskip.search.trained import TrainedPath, load_trained
from tests.checkpoints import save_tiny
from tests.special_models import agreeing_model, likely_adapter
from tests.tiny_models import NUM_LAYERS, VOCAB_SIZE, prompt, tiny_model

SMALL = SearchSettings(
    positions=96,
    held_out_positions=64,
    frequency_positions=64,
    new_tokens=16,
    draft_length=3,
    context=16,
    vocabulary_sizes=(20,),
)
PATHS = (TrainedPath("aa", 0, vocabulary_size=31, vocabulary="1"), TrainedPath("bb", 2, 2, False))
SCALE = 0.05  # of what layers but the first add: all drafts are often right, and the cheapest is best
PROMPTS = [prompt(length, seed=length)[0].tolist() for length in range(4, 16)]
TRAINING = {
    "made_by": "layerskip train",
    "made_at": "2026-01-02T03:04:05Z",
    "settings": {"tokens": 4000, "exit_layer": 0},
    "texts": {"rows": 9, "tokens": 999, "digest": "abcdef"},
    "seconds": 12.0,
    "curve": [{"step": 1}],
}


def trained(folder: Path, spec: AdapterSpec, ids: tuple[int, ...] | None = None, model: object = None) -> Path:
    """What a training run leaves in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    model = agreeing_model("llama", SCALE) if model is None else model
    save_adapter(likely_adapter(model, spec, 0.02), folder / "adapter.safetensors", torch.float64)
    plan = DraftPlan(
        exit_layer=spec.exit_layer,
        adapter=folder / "adapter.safetensors",
        draft_vocabulary=ids,
        target=layerskip.wrap(model).identity,
        provenance=TRAINING,
    )
    plan.save(folder / "plan.json")
    return folder / "plan.json"


@pytest.fixture(scope="module")
def model() -> layerskip.Model:
    return layerskip.wrap(agreeing_model("llama", SCALE))


@pytest.fixture(scope="module")
def jump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("jump"), AdapterSpec(0), tuple(range(3, VOCAB_SIZE)))


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("exit"), AdapterSpec(2, reads_state=False))


def name_of(model: layerskip.Model, plan: Path) -> str:
    (name,) = load_trained(model, [plan])
    return name


def search(
    model: layerskip.Model, plans: list[Path], trials: int = 8, settings: SearchSettings = SMALL, **more: object
) -> SearchResult:
    """With trained blocks that cost next to nothing, so that they win."""
    costs = uniform_costs(NUM_LAYERS, vocabulary=VOCAB_SIZE, trained=dict.fromkeys(load_trained(model, plans), 0.1))
    more = {"costs": costs, "measure": False, **more}
    return find_plan(model, PROMPTS, budget=Budget(trials), settings=settings, trained=plans, **more)


def test_a_trained_path_is_found_and_told(model: layerskip.Model, jump: Path, tmp_path: Path) -> None:
    name, storage = name_of(model, jump), tmp_path / "trials.db"
    result = search(model, [jump], 12, storage=storage, measure=True)
    # First of all candidates it is tried with the ids of its training, then with others.
    first = [each.candidate for each in result.trials[:3]]
    assert [each.vocabulary_size for each in first] == [58, 20, None]
    assert all(each == Candidate((), (), 0, each.vocabulary_size, name) for each in first)
    assert all(each.candidate.trained is None for each in result.trials[3:])
    assert result.best.candidate.trained == name
    plan = result.plan
    assert (plan.exit_layer, plan.adapter) == (0, str(jump.parent / "adapter.safetensors"))
    told = plan.provenance["trained"]
    assert (plan.provenance["made_by"], told["name"]) == ("layerskip search", name)
    assert told["training"] == {key: value for key, value in TRAINING.items() if key != "curve"}
    if result.best.candidate.vocabulary_size == 58:
        assert plan.draft_vocabulary == DraftPlan.load(jump).draft_vocabulary
    drafted = model.generate(PROMPTS[0], plan=plan, governor="off", max_new_tokens=20)
    assert drafted.new_token_ids == model.generate(PROMPTS[0], max_new_tokens=20).new_token_ids
    assert 0 < drafted.stats.accepted and result.held_out.measured_speedup is not None
    json.dumps(result.to_dict())
    again = load_result(storage, "layerskip")
    assert replace(again, seconds=0.0) == replace(result, seconds=0.0)
    # What was found may be searched on with; the training is still the training.
    (further,) = load_trained(model, [plan]).values()
    assert further.provenance["training"] == told["training"]


def test_held_out_rounds_are_those_of_real_decoding(model: layerskip.Model, behind: Path) -> None:
    found = search(model, [behind], 3)
    assert found.best.candidate.trained == name_of(model, behind)
    rounds = positions = 0
    options = {"plan": found.plan, "governor": "off", "do_sample": False}
    attributes = found.settings["calibration"]
    assert attributes["source"] == "given prompts"
    for ids in PROMPTS:
        real = model.generate(ids, max_new_tokens=attributes["new_tokens"], **options)
        rounds, positions = rounds + real.stats.rounds, positions + len(real.new_token_ids[0]) - 1
    assert found.held_out.tokens_per_round.value == pytest.approx(positions / rounds, rel=0.25)  # of other texts


def test_a_report_takes_the_blocks_along(model: layerskip.Model, jump: Path, tmp_path: Path) -> None:
    result = search(model, [jump], 3)
    page = write_report(result, tmp_path / "report").read_text(encoding="utf-8")
    for words in ("The best draft, a trained path, is", "trained by layerskip train", "on 4,000 tokens", "abcdef"):
        assert words in page
    copied = DraftPlan.load(tmp_path / "report" / "plan.json")
    assert copied.adapter == str(tmp_path / "report" / "adapter.safetensors")
    assert name_of(model, tmp_path / "report" / "plan.json") == result.best.candidate.trained
    before = (tmp_path / "report" / "adapter.safetensors").read_bytes()
    lost = replace(result, plan=replace(result.plan, adapter=str(tmp_path / "gone.safetensors")))
    with pytest.raises(SearchError, match="or none; expected the file that was searched with"):
        write_report(lost, tmp_path / "report")
    assert (tmp_path / "report" / "adapter.safetensors").read_bytes() == before


def test_other_workers_are_given_the_same(model: layerskip.Model, jump: Path, behind: Path, tmp_path: Path) -> None:
    storage, elsewhere = tmp_path / "trials.db", tmp_path / "elsewhere"
    shutil.copytree(jump.parent, elsewhere)
    search(model, [jump, behind], 3, storage=storage)
    joined = search(model, [behind, elsewhere / "plan.json"], 5, storage=storage)
    assert len(joined.trials) == 5
    name = joined.best.candidate.trained
    wanted = elsewhere if name == name_of(model, jump) else behind.parent
    assert joined.plan.adapter == str(wanted / "adapter.safetensors")
    for plans in ([], [jump]):
        with pytest.raises(SearchError, match=f"another set of trained paths: .*{name_of(model, behind)}"):
            search(model, plans, 6, storage=storage, costs=None)
    other_ids = tmp_path / "other ids"
    shutil.copytree(jump.parent, other_ids)
    changed = replace(DraftPlan.load(other_ids / "plan.json"), draft_vocabulary=tuple(range(1, VOCAB_SIZE, 2)))
    with pytest.raises(SearchError, match="another set of trained paths"):
        search(model, [behind, changed], 6, storage=storage)


def test_blocks_that_are_trained_further_meanwhile(model: layerskip.Model, jump: Path, tmp_path: Path) -> None:
    shutil.copytree(jump.parent, tmp_path / "run")

    def train(study: object, trial: object) -> None:
        trained(tmp_path / "run", AdapterSpec(0, 2))

    with pytest.raises(SearchError, match="other trained blocks"):
        search(model, [tmp_path / "run" / "plan.json"], 2, callbacks=[train])


def test_two_objectives(model: layerskip.Model, jump: Path) -> None:
    result = search(model, [jump], 12, replace(SMALL, objective="front"))
    assert name_of(model, jump) in {each.candidate.trained for each in result.front}


def test_sampled_texts(model: layerskip.Model, behind: Path) -> None:
    result = search(
        model, [behind], 4, replace(SMALL, positions=64, held_out_positions=32, sampling={"temperature": 2.0})
    )
    assert 0 < result.best.acceptance_rate < 1


def test_nothing_but_trained_paths(model: layerskip.Model, jump: Path) -> None:
    result = search(model, [jump], 50, replace(SMALL, skips=False, exits=False, vocabulary_sizes=()))
    tried = {each.candidate for each in result.trials}
    assert {each.vocabulary_size for each in tried if each.trained} == {58, None}
    assert result.best.candidate.trained is not None


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("directions", [["maximize"], ["maximize", "minimize"]], ids=len)
@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_propose_what_is_untrained(name: str, directions: list[str]) -> None:
    """What is trained stands in the queue already, and is no example of what a model can leave out."""
    space = Space(NUM_LAYERS, vocabulary_sizes=(20, None), trained=PATHS)
    study = optuna.create_study(directions=directions, sampler=make_sampler(name, space, seed=0))
    queue = [Candidate((), (), path.exit_layer, size, path.name) for path in PATHS for size in (20, None)]
    queue += [Candidate.of(NUM_LAYERS, [1]), Candidate.of(NUM_LAYERS, [1, 2])]
    for candidate in queue:
        study.enqueue_trial(space.params(candidate))

    def objective(trial: optuna.Trial) -> tuple[float, ...]:
        candidate = space.suggest(trial)
        worth = 9.0 if candidate.trained else float(len(candidate.skip_attention) + len(candidate.skip_mlp))
        return (worth, -worth)[: len(directions)]

    study.optimize(objective, n_trials=24)
    tried = [space.candidate(each.params) for each in study.trials]
    assert tried[: len(queue)] == queue
    assert all(each.trained is None for each in tried[len(queue) :])
    assert len(set(tried[len(queue) :])) > 5


@pytest.mark.parametrize(("skips", "exits"), list(itertools.product((True, False), repeat=2)))
def test_parameters_and_candidates_stand_for_each_other(skips: bool, exits: bool) -> None:
    space = Space(NUM_LAYERS, skips=skips, exits=exits, vocabulary_sizes=(20, 31, None), trained=PATHS)
    assert Space.from_dict(json.loads(json.dumps(space.to_dict()))) == space
    for path, size in itertools.product(PATHS, space.vocabulary_sizes):
        candidate = Candidate((), (), path.exit_layer, size, path.name)
        params = space.params(candidate)
        assert params.keys() == space.distributions().keys()
        for name, distribution in space.distributions().items():
            assert distribution.to_internal_repr(params[name]) is not None
        assert space.candidate(params) == candidate == space.nearest(candidate)
        # Whatever else is said means nothing for a path that was trained.
        other = space.params(Candidate.of(NUM_LAYERS, [1], [2], 3))
        assert space.candidate({**other, "trained": path.name, "ids": size or 0}) == candidate
        assert candidate.drafts(NUM_LAYERS) and len(candidate.path(NUM_LAYERS)) == path.exit_layer
        assert path.name in candidate.describe()
    untrained = Candidate.of(NUM_LAYERS, [1], [2]) if skips else Candidate.of(NUM_LAYERS)
    assert space.candidate(space.params(untrained)) == untrained
    foreign = Candidate((), (), 2, None, "cc")
    assert space.nearest(foreign) == Candidate.of(NUM_LAYERS, exit_layer=2 if exits else None)
    with pytest.raises(SearchError, match="adapter=None for trained exit 2 cc"):
        foreign.plan(2)


def test_studies_and_costs_from_before_there_were_any() -> None:
    space, costs = Space(NUM_LAYERS).to_dict(), uniform_costs(NUM_LAYERS).to_dict()
    del space["trained"], costs["trained_s"], costs["trained_round_s"]
    assert Space.from_dict(space) == Space(NUM_LAYERS)
    old = CostModel.from_dict(costs)
    assert old == uniform_costs(NUM_LAYERS)
    with pytest.raises(SearchError, match="trained path aa, and costs of none"):
        old.draft_s(Candidate((), (), 0, None, "aa"))


def test_a_study_from_before_there_were_any(model: layerskip.Model, jump: Path, tmp_path: Path) -> None:
    search(model, [], 1, storage=tmp_path / "trials.db")
    opened = open_storage(tmp_path / "trials.db")
    study = optuna.load_study(study_name="layerskip", storage=opened)
    study.set_user_attr(
        "made_for", {key: each for key, each in study.user_attrs["made_for"].items() if key != "trained"}
    )
    close_storage(opened)
    assert len(search(model, [], 2, storage=tmp_path / "trials.db").trials) == 2
    assert load_result(tmp_path / "trials.db", "layerskip").best.candidate.trained is None
    with pytest.raises(SearchError, match="another set of trained paths"):
        search(model, [jump], 3, storage=tmp_path / "trials.db", costs=None)


def test_costs_are_put_together() -> None:
    costs = uniform_costs(NUM_LAYERS, attention=0.3, mlp=0.7, head=1.0, trained={"aa": 1.5, "bb": 1.5})
    jump, behind = Candidate((), (), 0, None, "aa"), Candidate((), (), 2, None, "bb")
    assert costs.draft_s(jump) == pytest.approx(1.5 + 1.0)
    assert costs.draft_s(behind) == pytest.approx(2 + 1.5 + 1.0)
    dearer = replace(costs, trained_round_s={"aa": 0.5})
    assert dearer.verify_ratio(3, jump) == pytest.approx(costs.verify_ratio(3, jump) + 0.5 / costs.plain_s)
    assert CostModel.from_dict(json.loads(json.dumps(asdict(dearer)))) == dearer


def test_costs_are_measured(model: layerskip.Model, jump: Path, behind: Path) -> None:
    paths = load_trained(model, [jump, behind])
    costs = measure_costs(model, [tuple(range(58))], draft_length=2, context=8, rounds=3, trained=paths.values())
    assert costs.trained_s.keys() == costs.trained_round_s.keys() == paths.keys()
    assert all(each > 0 for each in costs.trained_s.values())
    assert costs.head_sizes == (58, VOCAB_SIZE)
    for path in paths.values():
        assert costs.draft_s(Candidate((), (), path.path.exit_layer, 58, path.path.name)) > 0


def damaged(folder: Path, jump: Path, behind: Path) -> DraftPlan:
    (folder / "adapter.safetensors").write_bytes(b"no such thing")
    return replace(DraftPlan.load(jump), adapter=str(folder / "adapter.safetensors"))


def missing(folder: Path, jump: Path, behind: Path) -> DraftPlan:
    return replace(DraftPlan.load(jump), adapter=str(folder / "nowhere.safetensors"))


@pytest.mark.parametrize(
    ("given", "kind", "told"),
    [
        (lambda folder, jump, behind: jump, SettingError, "expected a list of plans"),
        (lambda folder, jump, behind: DraftPlan.load(jump), SettingError, "expected a list of plans"),
        (lambda folder, jump, behind: [3], SettingError, "got 3 in trained"),
        (lambda folder, jump, behind: [DraftPlan.exit(2)], SettingError, "without trained blocks"),
        (lambda folder, jump, behind: [jump, behind, DraftPlan.load(jump)], SettingError, "twice, at .* and "),
        (lambda folder, jump, behind: [folder / "plan.json"], LayerSkipError, "cannot read the plan"),
        (lambda *places: [missing(*places)], CheckpointError, "where there is no file"),
        (lambda *places: [damaged(*places)], CheckpointError, "cannot read the adapter"),
        (
            lambda folder, jump, behind: [trained(folder, AdapterSpec(0), model=tiny_model("llama", seed=3))],
            PlanMismatchError,
            "made for weights",
        ),
        (
            lambda folder, jump, behind: [replace(DraftPlan.load(behind), exit_layer=1)],
            PlanMismatchError,
            "trained behind 2 layers",
        ),
    ],
)
def test_bad_input(
    given: object, kind: type[Exception], told: str, model: layerskip.Model, jump: Path, behind: Path, tmp_path: Path
) -> None:
    """Before anything is written, and whatever else is wrong."""
    with pytest.raises(kind, match=told):
        find_plan(model, PROMPTS, trained=given(tmp_path, jump, behind), settings=SMALL, storage=tmp_path / "a.db")
    assert not (tmp_path / "a.db").exists()


def test_costs_that_do_not_know_it(model: layerskip.Model, jump: Path) -> None:
    with pytest.raises(SettingError, match="costs that do not say what the trained path"):
        search(model, [jump], costs=uniform_costs(NUM_LAYERS))


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = save_tiny(tmp_path / "tiny")
    loaded = layerskip.load(str(checkpoint), dtype="float32")
    plan = trained(tmp_path / "run", AdapterSpec(0), model=loaded.hf_model)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    counts = ["--positions", "64", "--held-out-positions", "48", "--new-tokens", "12", "--draft-length", "2"]
    counts += ["--context", "16", "--budget", "1", "--draft-vocabularies", "0", "--no-measure", "--dtype", "float32"]
    monkeypatch.setattr("layerskip.search.report.write_report", lambda result, folder: folder)  # has tests of its own
    command = ["search", str(checkpoint), "--trained", str(plan), *counts, "--out", "best.json"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "trained jump" in out and "this is a trained path, " in out and "trained by layerskip train" in out
    found = DraftPlan.load("best.json")
    assert loaded.adapter(found).spec == AdapterSpec(0)
    assert found.adapter == str(tmp_path / "here" / "best-adapter.safetensors")
    assert main([*command, "--trained", str(plan)]) == 2
    assert "the same trained blocks twice" in capsys.readouterr().err
    without = [each for each in command if each not in ("--trained", str(plan))]
    assert main(without) == 2
    assert "another set of trained paths" in capsys.readouterr().err
