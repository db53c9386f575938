"""Trained draft paths: the output stays the model's own, and files and plans that do not fit are refused."""

import dataclasses
import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import layerskip
from layerskip import DraftPlan
from layerskip.drafters import SelfDrafter
from layerskip.errors import CheckpointError, PlanError, PlanMismatchError, UnsupportedModelError
from layerskip.models.adapter import Adapter, AdapterSpec
from layerskip.models.adapter_file import count_parameters, load_adapter, save_adapter
from tests.contracts import DrawingDrafterContract
from tests.special_models import adapter_of, agreeing_model
from tests.tiny_models import FAMILY_NAMES, NUM_LAYERS, VOCAB_SIZE, prompt, tiny_model, transformers_greedy

SPECS = {
    "jump": AdapterSpec(0),
    "two blocks": AdapterSpec(0, 2),
    "exit and state": AdapterSpec(2),
    "exit alone": AdapterSpec(1, 1, reads_state=False),
    "jump from three states": AdapterSpec(0, further_states=(1, 2)),
}


class AdapterContract(DrawingDrafterContract):
    spec = SPECS["jump"]
    vocabulary = None

    @property
    def adapter(self):
        return adapter_of(self.target, self.spec)

    def make_drafter(self, decoder, context):
        path = decoder.full_path[: self.spec.exit_layer]
        return SelfDrafter(decoder, path, context, self.vocabulary, self.adapter)


class TestJump(AdapterContract):
    pass


class TestTwoBlocks(AdapterContract):
    spec = SPECS["two blocks"]


class TestExitAndState(AdapterContract):
    spec = SPECS["exit and state"]


class TestExitAlone(AdapterContract):
    spec = SPECS["exit alone"]


class TestJumpWithVocabulary(AdapterContract):
    vocabulary = range(0, VOCAB_SIZE, 2)


class TestJumpWithWindows(AdapterContract):
    family = "mistral-window"


del AdapterContract, DrawingDrafterContract  # not to be collected themselves


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """By family and spec, a plan with an adapter for that family's agreeing model."""
    folder, made = tmp_path_factory.mktemp("adapters"), {}

    def plan_of(family, name, **options):
        if (family, name) not in made:
            file = folder / f"{family} {name}.safetensors"
            save_adapter(adapter_of(agreeing_model(family), SPECS[name]), file, torch.float64)
            made[family, name] = DraftPlan(exit_layer=SPECS[name].exit_layer, adapter=str(file))
        return dataclasses.replace(made[family, name], **options)

    return plan_of


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_and_path(plans, family, name):
    """The product's promise, at every draft length."""
    model = agreeing_model(family)
    wrapped, own = layerskip.wrap(model), transformers_greedy(model, prompt(), max_new_tokens=14)[0, 9:].tolist()
    for drafts in range(1, 6):
        plan = plans(family, name, num_draft_tokens=drafts)
        result = wrapped.generate(prompt(), plan=plan, governor="off", max_new_tokens=14, eos_token_id=None)
        assert result.new_token_ids == [own]
        assert result.stats.proposed > 0


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("options", [{"lookup_tokens": 4}, {}], ids=["with lookup", "alone"])
def test_rows_that_move_at_different_speeds(plans, name, options):
    """Each row lags by its own number of tokens; governed, some rounds draft nothing and all rows fall behind."""
    wrapped = layerskip.wrap(agreeing_model("llama"))
    rows = [prompt(12)[0].tolist(), prompt(3, 1)[0].tolist(), prompt(7, 2)[0].tolist(), [5, 6] * 8]
    own = wrapped.generate(rows, max_new_tokens=40, eos_token_id=[3, 4])
    for governor in ("off", "fixed", "measured"):
        drafted = wrapped.generate(
            rows, plan=plans("llama", name, **options), governor=governor, max_new_tokens=40, eos_token_id=[3, 4]
        )
        assert drafted.new_token_ids == own.new_token_ids


@pytest.mark.parametrize("length", [3, 120])
def test_a_long_prompt_does_not_end_drafting(tmp_path, length):
    """What an adapter reads of the prompt is no part of a draft's time: governed, it would never draft again."""
    model = agreeing_model("llama")
    save_adapter(adapter_of(model, SPECS["jump"]), tmp_path / "a.safetensors", torch.float64)
    wrapped = layerskip.wrap(model)
    plan = DraftPlan(exit_layer=0, adapter=tmp_path / "a.safetensors", num_draft_tokens=2)
    engine = wrapped.engine(wrapped.check(prompt(length), plan=plan, governor="off", max_new_tokens=30))
    (drafter,) = engine.drafters.values()
    run, propose, widths = drafter._adapter.run, drafter.propose, []

    def proposing(*arguments):
        drafter._adapter.run = lambda entry, *rest: widths.append(entry.shape[1]) or run(entry, *rest)
        try:
            return propose(*arguments)
        finally:
            drafter._adapter.run = run

    drafter.propose = proposing
    list(engine)
    assert len(widths) > 5 and max(widths) <= 9


def test_sampling_with_a_seed(plans):
    wrapped = layerskip.wrap(agreeing_model("llama"))
    call = {"do_sample": True, "seed": 3, "acceptance_rule": "invariant", "max_new_tokens": 30, "temperature": 0.8}
    plain = wrapped.generate(prompt(), **call)
    assert wrapped.generate(prompt(), plan=plans("llama", "jump"), **call).new_token_ids == plain.new_token_ids


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 3, "temperature": 0.8}], ids=["greedy", "drawn"])
def test_rounds_of_fixed_shapes_draft_alike(plans, name, sampling):
    """Rows of other lengths, shorter and longer than what is read at once; later calls take over what was recorded."""
    wrapped = layerskip.wrap(agreeing_model("llama"))
    rows = [prompt(12)[0].tolist(), prompt(3, 1)[0].tolist(), prompt(70, 2)[0].tolist()]
    for drafts, inputs in ((3, rows), (3, rows[::-1]), (5, rows[1:2])):
        call = {
            "plan": plans("llama", name, num_draft_tokens=drafts),
            "governor": "off",
            "max_new_tokens": 40,
            **sampling,
        }
        static, eager = (wrapped.generate(inputs, **call, cuda_graphs=each) for each in (True, False))
        assert static.stats.execution.startswith("static: ")
        assert static.new_token_ids == eager.new_token_ids
        assert static.stats.accepted_histogram == eager.stats.accepted_histogram
        assert static.stats.proposed > 0


@pytest.mark.parametrize("length", range(6, 12))
def test_fixed_shapes_read_every_position(plans, length):
    """However long the prompt is, compared with what rounds of their own shapes have read: entry by entry."""
    wrapped, entries = layerskip.wrap(agreeing_model("llama")), []
    for static in (True, False):
        call = {"plan": plans("llama", "jump", num_draft_tokens=3), "governor": "off", "cuda_graphs": static}
        engine = wrapped.engine(wrapped.check(prompt(length), **call, max_new_tokens=20, eos_token_id=None))
        engine.read_prompts()
        engine.decode_round()
        entries.append(engine.state.cache.entries[NUM_LAYERS][:, :, :length].clone())
        list(engine)
    assert entries[0].flatten(3).any(-1).all()
    torch.testing.assert_close(entries[0], entries[1])


def test_fixed_shapes_with_lookup_and_rounds_without_a_draft(plans):
    """The adapter falls behind, and reads what it missed."""
    wrapped = layerskip.wrap(agreeing_model("llama"))
    call = {"plan": plans("llama", "jump", lookup_tokens=4), "max_new_tokens": 60, "eos_token_id": None}
    own = wrapped.generate([[5, 6] * 8], max_new_tokens=60, eos_token_id=None).new_token_ids
    for governor in ("off", "fixed", "measured"):
        result = wrapped.generate([[5, 6] * 8], **call, governor=governor, cuda_graphs=True)
        assert result.new_token_ids == own and result.stats.execution.startswith("static: ")


def test_recordings_are_not_taken_over_by_blocks_that_were_trained_further(tmp_path):
    model = agreeing_model("llama")
    wrapped, file = layerskip.wrap(model), tmp_path / "a.safetensors"
    call = {"governor": "off", "max_new_tokens": 30, "eos_token_id": None}
    for scale in (0.05, 0.5):
        save_adapter(adapter_of(model, SPECS["jump"], scale), file, torch.float64)
        plan = DraftPlan(exit_layer=0, adapter=str(file), num_draft_tokens=3)
        static, eager = (wrapped.generate(prompt(), plan=plan, **call, cuda_graphs=each) for each in (True, False))
        assert static.stats.accepted_histogram == eager.stats.accepted_histogram
        os.utime(file, ns=(1, 1))


def test_compiled_rounds_fall_back(plans):
    wrapped = layerskip.wrap(agreeing_model("llama"))
    own = wrapped.generate(prompt(), max_new_tokens=10).new_token_ids
    result = wrapped.generate(prompt(), plan=plans("llama", "jump"), max_new_tokens=10, compile=True)
    assert result.new_token_ids == own
    assert "trained blocks" in result.stats.execution


def test_packed_weights_draft_alike(tmp_path):
    model = tiny_model("llama", dtype=torch.float32)
    save_adapter(adapter_of(model, SPECS["exit and state"]), tmp_path / "a.safetensors", torch.float32)
    plan, results = DraftPlan(exit_layer=2, adapter=tmp_path / "a.safetensors"), []
    for prepares in (False, True):
        wrapped = layerskip.wrap(model)
        if prepares:
            wrapped.prepare()
        result = wrapped.generate(prompt(), plan=plan, governor="off", max_new_tokens=30, eos_token_id=None)
        results.append((result.new_token_ids, result.stats.accepted_histogram))
    assert results[0] == results[1]


def test_cost_by_parameters(plans):
    wrapped, plan = layerskip.wrap(agreeing_model("llama")), plans("llama", "jump")
    own = count_parameters(plan.adapter)
    assert own == wrapped.adapter(plan).num_parameters
    head = wrapped.inspection.head_parameters
    assert wrapped.draft_cost(plan) == pytest.approx((own + head) / wrapped.inspection.step_parameters)


# Files and plans


def test_a_file_reads_back(tmp_path):
    model = tiny_model("qwen3")
    adapter = adapter_of(model, SPECS["exit and state"])
    save_adapter(adapter, tmp_path / "a.safetensors", torch.float64)
    again = load_adapter(tmp_path / "a.safetensors", model, torch.float64)
    assert again.spec == adapter.spec
    for name, tensor in adapter.modules.state_dict().items():
        assert torch.equal(again.modules.state_dict()[name], tensor)


def test_a_plan_moves_with_its_adapter(tmp_path):
    (tmp_path / "one").mkdir()
    save_adapter(Adapter(tiny_model("llama"), SPECS["jump"]), tmp_path / "one" / "a.safetensors", torch.float64)
    DraftPlan(exit_layer=0, adapter=tmp_path / "one" / "a.safetensors").save(tmp_path / "one" / "plan.json")
    (tmp_path / "one").rename(tmp_path / "two")
    plan = DraftPlan.load(tmp_path / "two" / "plan.json")
    assert plan.adapter == str(tmp_path / "two" / "a.safetensors")
    layerskip.wrap(tiny_model("llama")).check_plan(plan)


def test_links_as_the_hubs_cache_has_them(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_adapter(Adapter(tiny_model("llama"), SPECS["jump"]), tmp_path / "blobs" / "abc", torch.float64)
    (tmp_path / "snapshot" / "a.safetensors").symlink_to("../blobs/abc")
    DraftPlan(exit_layer=0, adapter=tmp_path / "snapshot" / "a.safetensors").save(tmp_path / "snapshot" / "plan.json")
    plan = DraftPlan.load(tmp_path / "snapshot" / "plan.json")
    assert plan.adapter == str(tmp_path / "snapshot" / "a.safetensors")
    assert layerskip.wrap(tiny_model("llama")).adapter(plan).spec == SPECS["jump"]


def test_a_file_that_was_trained_further_is_read_again(tmp_path):
    model, file = tiny_model("llama"), tmp_path / "a.safetensors"
    wrapped, plan, seen = layerskip.wrap(model), DraftPlan(exit_layer=0, adapter=file), []
    for second in (1, 2, 3):
        save_adapter(adapter_of(model, SPECS["jump"], second / 10), file, torch.float64)
        os.utime(file, (second, second))
        assert wrapped.adapter(plan) is wrapped.adapter(plan)
        seen.append(wrapped.adapter(plan))
    assert len(set(map(id, seen))) == 3 and len(wrapped._adapters) == 1


@pytest.mark.parametrize("name", ["/etc/passwd", "../a.safetensors", "", 3])
def test_a_plan_file_names_nothing_outside_its_folder(tmp_path, name):
    content = DraftPlan(exit_layer=0, adapter="a").to_dict() | {"adapter": name}
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(PlanError):
        DraftPlan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    "fields",
    [
        {"adapter": "a"},
        {"adapter": "a", "exit_layer": 2, "skip_mlp": [1]},
        {"adapter": "", "exit_layer": 2},
        {"adapter": 3, "exit_layer": 2},
        {"adapter": "a", "exit_layer": -1},
        {"exit_layer": 0},
        {"adapter": "a", "exit_layer": 0, "num_draft_tokens": 0, "lookup_tokens": 3},
        {"adapter": "a", "exit_layer": 0, "draft_model": "b"},
    ],
)
def test_combinations_that_are_refused(fields):
    with pytest.raises(PlanError, match="expected"):
        DraftPlan(**fields)


def test_files_that_are_refused(tmp_path):
    model, file = tiny_model("llama"), tmp_path / "a.safetensors"
    with pytest.raises(CheckpointError, match="no file"):
        load_adapter(file, model, torch.float64)
    file.write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="cannot read"):
        load_adapter(file, model, torch.float64)
    with pytest.raises(CheckpointError, match="cannot read"):
        count_parameters(file)
    save_file({"x": torch.zeros(1)}, file)
    with pytest.raises(CheckpointError, match="format"):
        load_adapter(file, model, torch.float64)
    save_adapter(Adapter(model, SPECS["jump"]), file, torch.float64)
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}
        described = opened.metadata()
    save_file(tensors, file, metadata=described | {"adapter": "{}"})
    with pytest.raises(CheckpointError, match="damaged"):
        load_adapter(file, model, torch.float64)
    del tensors["fuse.weight"]
    save_file(tensors, file, metadata=described)
    with pytest.raises(PlanMismatchError, match="another model"):
        load_adapter(file, model, torch.float64)


def test_an_adapter_of_another_model_or_exit_is_refused(tmp_path):
    save_adapter(Adapter(tiny_model("llama"), SPECS["exit and state"]), tmp_path / "a.safetensors", torch.float64)
    with pytest.raises(PlanMismatchError, match="exit_layer=1"):
        layerskip.wrap(tiny_model("llama")).check_plan(DraftPlan(exit_layer=1, adapter=tmp_path / "a.safetensors"))
    with pytest.raises(PlanMismatchError):
        layerskip.wrap(tiny_model("qwen3")).check_plan(DraftPlan(exit_layer=2, adapter=tmp_path / "a.safetensors"))


@pytest.mark.parametrize(
    "spec",
    [
        *(AdapterSpec(NUM_LAYERS), AdapterSpec(-1), AdapterSpec(0, 0), AdapterSpec(0, 9)),
        *(AdapterSpec(0, further_states=each) for each in ((0,), (NUM_LAYERS,), (2, 1), (1, 1))),
        AdapterSpec(1, 1, reads_state=False, further_states=(2,)),
    ],
)
def test_specs_without_room(spec):
    with pytest.raises(UnsupportedModelError, match="expected"):
        Adapter(tiny_model("llama"), spec)


def test_making_one_draws_no_random_numbers_and_changes_nothing():
    model, before = tiny_model("llama"), torch.get_rng_state()
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    adapter = adapter_of(model, SPECS["two blocks"])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(each, weights[name]) for name, each in model.state_dict().items())
    assert not any(each.requires_grad for each in adapter.modules.parameters())
