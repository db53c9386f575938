"""Draft plans: what they say about a model, and how a file that is not one is refused."""

import copy
import dataclasses
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch

from layerskip import DraftPlan, PlanError, PlanMismatchError, wrap
from layerskip.identity import identify
from layerskip.models.decoder import Step
from tests.tiny_models import prompt, tiny_model

HEADER = {"format": "layerskip-plan", "version": 1}
IDENTITY = identify(tiny_model("llama"))
PLANS = [
    DraftPlan.exit(6),
    DraftPlan.skip([3, 1], [2], num_draft_tokens=7, confidence_threshold=0.25),
    DraftPlan.skip([1], exit_layer=5, provenance={"study": "x", "acceptance": [0.5, None], "nested": {"seed": 1}}),
    DraftPlan.model("owner/name", target=IDENTITY),
    DraftPlan.skip(),
]


def write(folder: Path, content) -> Path:
    file = folder / "plan.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return file


class TestPath:
    """Which sub-blocks a plan leaves of a model."""

    def test_an_exit_keeps_the_leading_layers(self):
        assert DraftPlan.exit(2).path(4) == (Step(0), Step(1))

    def test_a_skip_set_leaves_out_what_it_names(self):
        path = DraftPlan.skip(attention=[1], mlp=[1, 2]).path(4)
        assert path == (Step(0), Step(2, mlp=False), Step(3))

    def test_an_exit_and_a_skip_set_combine(self):
        assert DraftPlan.skip(attention=[0], exit_layer=2).path(4) == (Step(0, attention=False), Step(1))

    def test_nothing_skipped_is_the_whole_model(self):
        assert DraftPlan.skip().path(2) == (Step(0), Step(1))

    @pytest.mark.parametrize("layer", [4, 5])
    def test_an_exit_that_the_model_does_not_have(self, layer):
        with pytest.raises(PlanMismatchError, match=rf"got an exit at layer {layer} on a model of 4.*expected 1 to 3"):
            DraftPlan.exit(layer).path(4)

    @pytest.mark.parametrize("kind", ["attention", "mlp"])
    def test_a_layer_that_the_model_does_not_have(self, kind):
        """The bug of published skip lists: made for one depth, used on another."""
        with pytest.raises(PlanMismatchError, match=rf"skips the {kind} of layer 4 on a model of 4.*from 0 to 3"):
            DraftPlan.skip(**{kind: [1, 4]}).path(4)

    @pytest.mark.parametrize(
        "plan", [DraftPlan.skip(range(4), range(4)), DraftPlan.skip([0, 1], [0, 1], exit_layer=2)], ids=["all", "exit"]
    )
    def test_nothing_left_to_run(self, plan):
        with pytest.raises(PlanMismatchError, match="skips everything on a model of 4 layers; keep at least one"):
            plan.path(4)


class TestFields:
    def test_layers_are_sorted_and_counted_once(self):
        assert DraftPlan.skip([3, 1, 3], (2,)) == DraftPlan.skip([1, 3], [2])
        assert DraftPlan.skip(attention=iter([2, 0])).skip_attention == (0, 2)

    def test_numpys_integers_are_integers(self):
        """A search that counts in numpy; what it saves is JSON."""
        two = np.int64(2)
        plan = DraftPlan.skip(
            np.array([1, 0]), exit_layer=two, num_draft_tokens=two, confidence_threshold=np.float32(1)
        )
        assert plan == DraftPlan.skip([0, 1], exit_layer=2, num_draft_tokens=2, confidence_threshold=1.0)
        assert {type(value) for value in (*plan.skip_attention, plan.exit_layer, plan.num_draft_tokens)} == {int}
        assert DraftPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
        assert DraftPlan.skip(torch.tensor([2, 1]), torch.tensor(2)) == DraftPlan.skip([1, 2], 2)

    @pytest.mark.parametrize(
        ("make", "field"),
        [
            (lambda: DraftPlan.exit(2, exit_layer=3), "exit_layer=3"),
            (lambda: DraftPlan.skip([1], skip_attention=[2]), r"skip_attention=\[2\]"),
            (lambda: DraftPlan.skip(mlp=[1], skip_mlp=[1]), r"skip_mlp=\[1\]"),
        ],
    )
    def test_a_field_that_is_given_twice(self, make, field):
        with pytest.raises(PlanError, match=f"got {field} for a plan that is made with .*expected one of them"):
            make()

    @pytest.mark.parametrize("field", ["skip_attention", "skip_mlp"])
    def test_a_skipped_layer_that_the_exit_leaves_out_anyway(self, field):
        with pytest.raises(PlanError, match=rf"{field} \[2, 5\] and exit_layer=2.*no effect.*Expected layers below 2"):
            DraftPlan.exit(2, **{field: [1, 2, 5]})

    def test_a_plan_keeps_its_own_provenance(self):
        provenance = {"study": "x"}
        plan = DraftPlan.exit(2, provenance=provenance)
        provenance["study"] = "y"
        assert plan.provenance == {"study": "x"}
        assert DraftPlan.exit(2, provenance=MappingProxyType(provenance)).to_dict()["provenance"] == {"study": "y"}

    def test_a_plan_cannot_be_changed(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            DraftPlan.exit(2).exit_layer = 3

    def test_replace_makes_another(self):
        assert dataclasses.replace(DraftPlan.exit(2), num_draft_tokens=9) == DraftPlan.exit(2, num_draft_tokens=9)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("skip_attention", [-1]), ("skip_attention", ["1"]), ("skip_mlp", [1.0]), ("skip_mlp", "12"),
            ("skip_mlp", [True]), ("skip_mlp", np.array([True])), ("skip_mlp", torch.tensor([True])),
            ("skip_mlp", torch.tensor(1.5)), ("target", "llama"), ("skip_attention", None), ("exit_layer", "2"),
            ("exit_layer", 2.0), ("exit_layer", True), ("exit_layer", 0), ("exit_layer", -1), ("num_draft_tokens", 0),
            ("num_draft_tokens", -1), ("num_draft_tokens", 2.0), ("num_draft_tokens", True), ("num_draft_tokens", None),
            ("confidence_threshold", -0.1), ("confidence_threshold", 1.1), ("confidence_threshold", "0.5"),
            ("confidence_threshold", True), ("confidence_threshold", float("nan")), ("confidence_threshold", None),
            ("provenance", ["x"]),
        ],
    )  # fmt: skip
    def test_a_bad_value(self, field, value):
        with pytest.raises(PlanError, match=rf"got a plan with {field}=.*; expected "):
            DraftPlan(**{field: value})

    def test_a_draft_model_that_also_skips(self):
        for other in ({"skip_mlp": [1]}, {"skip_attention": [1]}, {"exit_layer": 2}):
            with pytest.raises(PlanError, match="both a draft model and skipped layers or an exit"):
                DraftPlan(draft_model="x", **other)

    @pytest.mark.parametrize("make", [lambda **o: DraftPlan.exit(2, **o), DraftPlan.skip, DraftPlan.from_dict])
    def test_an_unknown_field_with_a_suggestion(self, make):
        unknown = {"num_draft_token": 3}
        with pytest.raises(PlanError, match=r"unknown plan field 'num_draft_token'.*Did you mean 'num_draft_tokens'"):
            make(HEADER | unknown) if make == DraftPlan.from_dict else make(**unknown)


class TestFile:
    @pytest.mark.parametrize("plan", PLANS)
    def test_what_was_saved_is_loaded(self, plan, tmp_path):
        plan.save(tmp_path / "plan.json")
        assert DraftPlan.load(tmp_path / "plan.json") == plan
        assert os.listdir(tmp_path) == ["plan.json"]

    def test_a_plan_takes_the_place_of_another_whole(self, tmp_path):
        """A crash while saving leaves the old file: the new one is moved into place when it is complete."""
        file = tmp_path / "plan.json"
        DraftPlan.exit(2).save(file)
        with pytest.raises(PlanError, match=r"provenance.*JSON"):
            DraftPlan.exit(3, provenance={"seen": {1, 2}}).save(file)
        assert DraftPlan.load(file) == DraftPlan.exit(2)
        assert os.listdir(tmp_path) == ["plan.json"]

    def test_a_failure_leaves_nothing_behind(self, tmp_path):
        (tmp_path / "plan.json").mkdir()
        with pytest.raises(PlanError, match=r"cannot write the plan .*directory"):
            DraftPlan.exit(2).save(tmp_path / "plan.json")
        assert os.listdir(tmp_path) == ["plan.json"]

    def test_two_that_save_at_once(self, tmp_path):
        """Neither takes away the other's half-written file: with one name for both, the second move finds nothing."""
        file, plans = tmp_path / "plan.json", [DraftPlan.exit(layer) for layer in range(1, 200)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda plan: plan.save(file), plans))
        assert DraftPlan.load(file) in plans
        assert os.listdir(tmp_path) == ["plan.json"]

    def test_a_saved_plan_is_as_readable_as_any_new_file(self, tmp_path):
        (tmp_path / "other").touch()
        DraftPlan.exit(2).save(tmp_path / "plan.json")
        assert (tmp_path / "plan.json").stat().st_mode == (tmp_path / "other").stat().st_mode

    def test_a_name_that_no_file_can_have(self, tmp_path):
        with pytest.raises(PlanError, match="cannot write the plan .*null byte"):
            DraftPlan.exit(2).save(tmp_path / "nul\0byte.json")

    def test_a_folder_that_does_not_exist(self, tmp_path):
        with pytest.raises(PlanError, match=r"cannot write the plan .*No such file"):
            DraftPlan.exit(2).save(tmp_path / "no" / "plan.json")

    @pytest.mark.parametrize(
        ("lists", "plan"),
        [
            ({"attention": [3, 1], "mlp": [2]}, DraftPlan.skip([1, 3], [2])),
            ({"attention": [3]}, DraftPlan.skip([3])),
            ({"mlp": []}, DraftPlan.skip()),
        ],
    )
    def test_the_fields_bare_lists_are_read(self, lists, plan, tmp_path):
        """As Draft&Verify and SWIFT write them."""
        assert DraftPlan.load(write(tmp_path, lists)) == plan

    def test_a_path_will_do_for_a_plan(self, llama, tmp_path):
        file = write(tmp_path, {"attention": [1], "mlp": [2]})
        for path in (file, str(file)):
            assert wrap(llama).generate(prompt(), plan=path, max_new_tokens=3).plan == DraftPlan.skip([1], [2])

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", "not JSON"),
            ("{", "not JSON"),
            ("layers = [1, 2]", "not JSON"),
            ("[" * 100_000, "not JSON"),
            ("1" * 5000, "not JSON"),
            ("[1, 2]", "got a list; expected a JSON object"),
            ("null", "got a NoneType; expected a JSON object"),
            ("{}", r"format None and the keys \[\]; expected format 'layerskip-plan', or bare lists"),
            ('{"layers": [1]}', r"format None and the keys \['layers'\]"),
            ('{"attention": [1], "mlp": [], "other": 1}', "format None and the keys"),
            ('{"attention": 3}', None),
            ('{"attention": "all"}', "got a plan with attention='all'; expected layer numbers"),
            ('{"mlp": [1.5]}', "got a plan with mlp="),
            ('{"format": "gguf", "version": 1}', "format 'gguf'"),
            ('{"format": "layerskip-plan"}', "version None; this layerskip reads version 1"),
            ('{"format": "layerskip-plan", "version": 2}', "version 2; this layerskip reads version 1. Install"),
            ('{"format": "layerskip-plan", "version": 1, "exit": 3}', "unknown plan field 'exit'; expected"),
            ('{"format": "layerskip-plan", "version": 1, "exit_layer": "3"}', "exit_layer='3'; expected a layer count"),
            ('{"format": "layerskip-plan", "version": 1, "confidence_threshold": NaN}', "confidence_threshold=nan"),
            ('{"format": "layerskip-plan", "version": 1, "target": {"name": "x"}}', "target is .*'name'.*architecture"),
            ('{"format": "layerskip-plan", "version": 1, "target": "llama"}', "target is 'llama'"),
            ('{"format": "layerskip-plan", "version": 1, "draft_model": 3}', "draft_model=3; expected a path or hub"),
        ],
    )  # fmt: skip
    def test_what_is_no_plan(self, content, message, tmp_path):
        """Each is a PlanError that names the file and what is wrong with it."""
        file = write(tmp_path, content)
        if message is None:  # one layer without brackets is understood
            assert DraftPlan.load(file) == DraftPlan.skip([3])
            return
        with pytest.raises(PlanError, match=message) as caught:
            DraftPlan.load(file)
        assert str(file) in str(caught.value)

    def test_bytes_that_are_no_text(self, tmp_path):
        file = tmp_path / "plan.json"
        file.write_bytes(b"\xff\xfe\x00model weights")
        with pytest.raises(PlanError, match="which is not JSON"):
            DraftPlan.load(file)

    def test_a_huge_file_is_not_read(self, tmp_path, monkeypatch):
        """Say, a checkpoint given by mistake."""
        file = tmp_path / "model.safetensors"
        with file.open("wb") as sparse:
            sparse.truncate(10 * 2**30)
        monkeypatch.setattr(Path, "read_text", pytest.fail)
        with pytest.raises(PlanError, match=r"10,737,418,240 bytes; a plan has at most .*another kind of file"):
            DraftPlan.load(file)

    @pytest.mark.parametrize("name", ["missing.json", ".", "nul\0byte.json"])
    def test_what_cannot_be_read(self, name, tmp_path):
        with pytest.raises(PlanError, match=r"cannot read the plan .*Check the path"):
            DraftPlan.load(os.path.join(tmp_path, name))

    @pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="needs /dev/zero")
    def test_what_is_no_file(self):
        """It would be read for ever."""
        with pytest.raises(PlanError, match="cannot read the plan"):
            DraftPlan.load("/dev/zero")


class TestDraftModelInAFile:
    """A plan file is somebody else's: it may name a hub id or what lies beside it, and nothing else of this machine."""

    def test_a_folder_beside_the_plan_moves_with_it(self, tmp_path):
        here, there = tmp_path / "here", tmp_path / "there"
        (here / "drafts" / "small").mkdir(parents=True)
        DraftPlan.model(str(here / "drafts" / "small")).save(here / "plan.json")
        assert json.loads((here / "plan.json").read_text())["draft_model"] == "./drafts/small"
        here.rename(there)
        assert DraftPlan.load(there / "plan.json").draft_model == str((there / "drafts" / "small").resolve())

    @pytest.mark.parametrize("hub_id", ["owner/name", "gpt2", "Owner-1/some.model_v1.5"])
    def test_a_hub_id_stays_one(self, hub_id, tmp_path):
        assert DraftPlan.load(write(tmp_path, HEADER | {"draft_model": hub_id})).draft_model == hub_id

    @pytest.mark.parametrize(
        "outside",
        ["/etc", "../secret", "./../secret", "drafts/../../secret", "..", "a/../..", "../" * 20 + "etc/x"],
    )
    def test_a_place_outside_the_folder_is_refused(self, outside, tmp_path):
        with pytest.raises(PlanError, match="outside the plan's folder") as caught:
            DraftPlan.load(write(tmp_path, HEADER | {"draft_model": outside}))
        assert repr(outside) in str(caught.value)
        assert "hub id or a folder beside it" in str(caught.value)

    @pytest.mark.parametrize("odd", ["~/secret", "~", "a/..", "a/b/c", "a//b", "-rf", "a b", "$HOME/x"])
    def test_everything_else_is_a_place_inside_the_folder(self, odd, tmp_path):
        """No home folder, no variables, nothing relative to where the program happens to run."""
        draft_model = DraftPlan.load(write(tmp_path, HEADER | {"draft_model": odd})).draft_model
        assert Path(draft_model).is_absolute()
        assert Path(draft_model).is_relative_to(tmp_path.resolve())

    def test_a_link_that_leads_outside_is_refused(self, tmp_path):
        (tmp_path / "outside").mkdir()
        (tmp_path / "plans").mkdir()
        (tmp_path / "plans" / "small").symlink_to(tmp_path / "outside")
        with pytest.raises(PlanError, match="outside the plan's folder"):
            DraftPlan.load(write(tmp_path / "plans", HEADER | {"draft_model": "./small"}))

    @pytest.mark.parametrize("nothing", ["", " ", [], {}])
    def test_no_name_at_all(self, nothing, tmp_path):
        with pytest.raises(PlanError, match=r"draft_model=.*; expected a path or hub id"):
            DraftPlan.load(write(tmp_path, HEADER | {"draft_model": nothing}))

    def test_a_model_outside_is_not_saved(self, tmp_path):
        (tmp_path / "model").mkdir()
        (tmp_path / "plans").mkdir()
        with pytest.raises(PlanError, match=r"outside the plan's folder .*Save the plan into"):
            DraftPlan.model(tmp_path / "model").save(tmp_path / "plans" / "plan.json")
        assert os.listdir(tmp_path / "plans") == []

    @pytest.mark.parametrize("elsewhere", ["/no/such/model", "~/no-such-model", "../no-such-model"])
    def test_what_could_not_be_loaded_again_is_not_saved(self, elsewhere, tmp_path):
        """Whether or not it exists on this machine at this moment."""
        with pytest.raises(PlanError, match="outside the plan's folder"):
            DraftPlan.model(elsewhere).save(tmp_path / "plan.json")

    def test_a_model_in_memory_is_not_saved(self, llama, tmp_path):
        with pytest.raises(PlanError, match=r"loaded LlamaForCausalLM; expected its path or hub id.*DraftPlan.model\("):
            DraftPlan.model(llama).save(tmp_path / "plan.json")


class TestTarget:
    """A plan that says for which model it was made is refused by every other, with both values named."""

    def test_the_model_it_was_made_for(self, llama):
        plan = DraftPlan.exit(2, target=identify(llama))
        assert wrap(llama).generate(prompt(), plan=plan, max_new_tokens=3).plan == plan

    def test_other_weights(self, llama):
        plan = DraftPlan.exit(2, target=identify(tiny_model("llama", seed=1)))
        with pytest.raises(PlanMismatchError) as caught:
            wrap(llama).generate(prompt(), plan=plan)
        message = str(caught.value)
        assert plan.target.weights in message
        assert identify(llama).weights in message
        assert "dataclasses.replace(plan, target=None)" in message

    def test_another_architecture(self, llama):
        plan = DraftPlan.exit(2, target=identify(tiny_model("qwen3")))
        with pytest.raises(PlanMismatchError, match=r"architecture 'Qwen3ForCausalLM' .* architecture 'LlamaForCaus"):
            wrap(llama).generate(prompt(), plan=plan)

    def test_another_depth(self, llama):
        made_for = dataclasses.replace(identify(llama), num_layers=32)
        with pytest.raises(PlanMismatchError, match=r"made for num_layers 32 on a model with num_layers 4"):
            wrap(llama).generate(prompt(), plan=DraftPlan.exit(2, target=made_for))

    def test_without_the_check_it_can_be_used_where_it_fits(self, llama):
        plan = DraftPlan.exit(2, target=identify(tiny_model("qwen3")))
        wrap(llama).generate(prompt(), plan=dataclasses.replace(plan, target=None), max_new_tokens=3)

    def test_a_plan_without_a_target_must_fit(self, llama):
        with pytest.raises(PlanMismatchError, match="exit at layer 20 on a model of 4 layers"):
            wrap(llama).generate(prompt(), plan=DraftPlan.exit(20))


class TestIdentity:
    def test_the_precision_does_not_matter(self, llama):
        """A plan found in float32 is for the same checkpoint in bfloat16."""
        bf16 = tiny_model("llama", dtype=torch.bfloat16)
        assert identify(copy.deepcopy(bf16).to(torch.float32)) == identify(bf16)
        assert identify(copy.deepcopy(bf16).to(torch.float64)) == identify(bf16)

    def test_every_parameter_counts(self, llama):
        """Catches a fingerprint that misses a layer: a model fine-tuned there would pass for the original."""
        seen = {identify(llama).weights}
        model = copy.deepcopy(llama)
        for parameter in model.parameters():
            with torch.no_grad():
                parameter.mul_(1.5)
            seen.add(identify(model).weights)
        assert len(seen) == 1 + len(list(model.parameters()))

    def test_it_is_the_same_in_another_process(self):
        """It is stored in files: this number was made once and must not change."""
        model = copy.deepcopy(tiny_model("llama"))
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) * 0.01 + index)
        assert identify(model).weights == "5cdcdb2b321d5561a1eaee2e42e72671"


@pytest.mark.parametrize(
    ("provenance", "acceptance", "ratio"),
    [
        ({}, None, None),
        ({"acceptance_by_offset": [0.9, 0.5], "draft_ratio": 0.4}, (0.9, 0.5), 0.4),
        ({"acceptance_by_offset": [], "draft_ratio": 0}, None, None),
        ({"acceptance_by_offset": [0.9, 1.5], "draft_ratio": float("nan")}, None, None),
        ({"acceptance_by_offset": "0.9", "draft_ratio": "0.4"}, None, None),
        ({"acceptance_by_offset": [True], "draft_ratio": True}, None, None),
        ({"acceptance_by_offset": [None], "draft_ratio": -1}, None, None),
    ],
)
def test_what_a_search_measured_is_read_if_it_makes_sense(provenance, acceptance, ratio):
    plan = DraftPlan.exit(2, provenance=provenance)
    assert (plan.acceptance_by_offset, plan.draft_ratio) == (acceptance, ratio)
