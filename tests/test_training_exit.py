"""Training a draft path on tiny models: it learns, it resumes exactly, it writes a plan that works, it refuses."""

import copy
import dataclasses
import json
import os
import signal

import numpy as np
import pytest
import torch

import layerskip
from layerskip import DraftPlan
from layerskip.errors import CheckpointError, LayerSkipError, SettingError, UnsupportedModelError
from layerskip.models.adapter import Adapter, AdapterSpec
from layerskip.models.adapter_file import load_adapter
from layerskip.training import EAGLE, ExitSettings, TrainingTexts, train_exit
from layerskip.training.distilling import _state_loss
from layerskip.training.exit import _run
from layerskip.training.folder import CHECKPOINT
from layerskip.training.loop import Schedule
from layerskip.training.teacher import Teacher
from tests.small_training import WrappedLinear, interrupted, some_texts
from tests.tiny_models import NUM_LAYERS, tiny_model

SMALL = ExitSettings(
    vocabulary_size=40,
    tokens=32 * 4 * 24,
    batch_tokens=128,
    micro_rows=2,
    held_out_rows=3,
    evaluate_every=12,
    precision="float32",
)


@pytest.fixture(scope="module")
def model():
    return layerskip.wrap(tiny_model("llama", dtype=torch.float32))


@pytest.fixture(scope="module")
def texts(model):
    rows = [[5 + each] for each in range(20)]
    written = model.generate(rows, max_new_tokens=31, do_sample=True, seed=1, eos_token_id=None).new_token_ids
    tokens = np.array([row + own for row, own in zip(rows, written, strict=True)], dtype=np.int32)
    own = np.ones_like(tokens, dtype=bool)
    own[:, :5] = False
    return TrainingTexts(tokens, own)


def make_run(*arguments):
    return _run(*arguments)[0]


def weights_of(folder, model):
    return load_adapter(folder / "adapter.safetensors", model.hf_model, torch.float32).modules.state_dict()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"further_states": (1, 2)},
        {"exit_layer": 2, "further_states": (3,)},
        {"exit_layer": 3, "reads_state": False, "num_blocks": 2},
    ],
)
def test_it_learns_and_writes_a_plan(model, texts, tmp_path, changes):
    points = []
    plan = train_exit(
        model,
        texts,
        tmp_path / "out",
        dataclasses.replace(SMALL, **changes),
        progress=lambda step, steps, point: points.append(point),
    )
    curve = [point for point in points if point]
    assert [each["step"] for each in curve] == [12, 24] and curve[1]["loss"] < curve[0]["loss"]
    loaded = DraftPlan.load(tmp_path / "out" / "plan.json")
    assert loaded == plan
    assert loaded.target == model.identity and len(loaded.draft_vocabulary) == 40
    assert loaded.acceptance_by_offset == tuple(curve[1]["agreement"])
    assert loaded.provenance["texts"]["digest"] == texts.digest()
    own = model.generate([[7, 8, 9]], max_new_tokens=30).new_token_ids
    drafted = model.generate([[7, 8, 9]], max_new_tokens=30, plan=loaded, governor="off")
    assert drafted.new_token_ids == own


def test_blocks_that_were_trained_are_trained_further(model, texts, tmp_path):
    """They begin as they are, whatever the settings say of blocks; a resumed run must begin with the same."""
    first = train_exit(model, texts, tmp_path / "first", dataclasses.replace(SMALL, exit_layer=2, num_blocks=2))
    before = weights_of(tmp_path / "first", model)
    still = dataclasses.replace(SMALL, learning_rate=1e-9)
    further = train_exit(model, texts, tmp_path / "still", still, begin_with=first)
    assert further.exit_layer == 2 and further.provenance["settings"]["num_blocks"] == 2
    assert further.provenance["begun_with"]["texts"] == first.provenance["texts"]
    assert "curve" not in further.provenance["begun_with"]
    assert further.acceptance_by_offset == first.acceptance_by_offset
    for name, weight in weights_of(tmp_path / "still", model).items():
        torch.testing.assert_close(weight, before[name], rtol=1e-2, atol=1e-4)
    trained = train_exit(model, texts, tmp_path / "further", SMALL, begin_with=first)
    assert trained.provenance["curve"][-1]["loss"] < first.provenance["curve"][-1]["loss"]
    with pytest.raises(SettingError, match="begun_with"):
        train_exit(model, texts, tmp_path / "still", still, begin_with=trained, resume=True)
    with pytest.raises(SettingError, match="without trained blocks"):
        train_exit(model, texts, tmp_path / "none", SMALL, begin_with=layerskip.DraftPlan.exit(2))


def test_the_model_is_not_changed(texts, tmp_path):
    hf_model = tiny_model("llama-biased-tied", dtype=torch.float32)
    before = {name: each.clone() for name, each in hf_model.state_dict().items()}
    train_exit(layerskip.wrap(hf_model), texts, tmp_path, dataclasses.replace(SMALL, tokens=512))
    assert all(torch.equal(each, before[name]) for name, each in hf_model.state_dict().items())
    assert not any(each.requires_grad for each in hf_model.parameters())


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere", "gpt-oss", "opt", "falcon-new"])
def test_other_families_learn_too(texts, tmp_path, family):
    """Trained blocks are layers of the family's own, scored by its scales and caps; all weights get a gradient."""
    model = layerskip.wrap(tiny_model(family, dtype=torch.float32))
    began = Adapter(model.hf_model, AdapterSpec(0)).modules.state_dict()
    plan = train_exit(model, texts, tmp_path, dataclasses.replace(SMALL, tokens=32 * 4 * 4))
    ended = weights_of(tmp_path, model)
    # Vectors begin near 1 and are written in bfloat16, which may undo few steps; no token may have come to an expert.
    matrices = [name for name, each in began.items() if each.dim() == 2 and "experts" not in name]
    assert matrices and not any(torch.equal(began[name], ended[name]) for name in matrices)
    own = model.generate([[7, 8, 9]], max_new_tokens=20, eos_token_id=None).new_token_ids
    drafted = model.generate([[7, 8, 9]], max_new_tokens=20, eos_token_id=None, plan=plan, governor="off")
    assert drafted.new_token_ids == own


def test_labels_are_what_the_model_says(texts, tmp_path):
    """Granite divides its logits; without that the labels would be far too sharp."""
    model = layerskip.wrap(tiny_model("granite", dtype=torch.float32))
    run = make_run(model, texts, dataclasses.replace(SMALL, vocabulary_size=None), tmp_path)
    tokens = torch.from_numpy(texts.tokens[:1].astype(np.int64))
    states = model.hf_model(tokens, output_hidden_states=True)
    behind = run.decoder.new_cache(1, tokens.shape[1], kept_states=[4])
    span = run.decoder.span([0], tokens.shape[1])
    hidden = run.decoder.run(run.decoder.embed(tokens, span), run.decoder.full_path, behind, span)
    torch.testing.assert_close(run._labels(hidden[0]), states.logits[0].softmax(-1), rtol=1e-3, atol=1e-5)


def test_layers_without_plain_linears_are_refused(texts, tmp_path):
    """GPT-2's are transposed; they run, but training has not been made for them."""
    with pytest.raises(UnsupportedModelError, match=r"of a kind of their own \(GPT-2's\)"):
        train_exit(layerskip.wrap(tiny_model("gpt2", dtype=torch.float32)), texts, tmp_path, SMALL)


EAGLE_RUN = dataclasses.replace(SMALL, **EAGLE)


def test_eagle_is_a_jump_of_other_settings(model, texts, tmp_path):
    """One block, one state, one offset; yet judged further out, where its acceptance falls."""
    plan = train_exit(model, texts, tmp_path, EAGLE_RUN)
    first, last = plan.provenance["curve"]
    assert last["loss"] < first["loss"]
    assert (plan.exit_layer, plan.provenance["settings"]["state_weight"]) == (0, 10.0)
    assert load_adapter(tmp_path / "adapter.safetensors", model.hf_model, torch.float32).spec == AdapterSpec(0)
    assert len(plan.acceptance_by_offset) > 1
    own = model.generate([[7, 8, 9]], max_new_tokens=30).new_token_ids
    assert model.generate([[7, 8, 9]], max_new_tokens=30, plan=plan, governor="off").new_token_ids == own


def test_the_loss_on_states_is_added_by_its_weight(model, texts, tmp_path):
    losses = {}
    for weight in (0.0, 1.0, 3.0):
        run = make_run(model, texts, dataclasses.replace(EAGLE_RUN, state_weight=weight), tmp_path)
        losses[weight] = sum(float(each.detach()) for each in run.losses(0))
    of_states = losses[1.0] - losses[0.0]
    assert of_states > 0.01 and losses[3.0] == pytest.approx(losses[0.0] + 3 * of_states)


def test_the_loss_on_states_by_hand():
    """Whatever their size; smooth L1 is d² / 2 up to a distance of 1, then d - 1 / 2."""
    state = torch.tensor([[3.0, -3.0], [0.5, 0.5]])
    output = torch.tensor([[3.0, -1.5], [1.5, 0.5]])  # away by 0, 0.5 and by 2, 0, in units of 3 and of 0.5
    for scale in (1.0, 1e4):
        assert _state_loss(scale * state, scale * output).item() == pytest.approx((0.125 + 1.5) / 2)
    assert _state_loss(state, state) == 0
    assert _state_loss(torch.zeros(1, 2), torch.zeros(1, 2)) == 0


def test_regression_brings_what_a_path_puts_out_closer_to_the_models_states(model, texts, tmp_path):
    distances = []
    for weight in (0.0, 10.0):
        settings = dataclasses.replace(EAGLE_RUN, state_weight=weight)
        run = make_run(model, texts, settings, tmp_path / str(weight))
        (tmp_path / str(weight)).mkdir()
        run.train(False, lambda step, steps, point: None)
        with torch.no_grad():
            states = run.teacher.states([0, 1])
            (output,) = run._outputs(run._train[0][:2], states, 1)
        distances.append(_state_loss(states[NUM_LAYERS].flatten(0, 1), output.flatten(0, 1)))
    assert distances[1] < distances[0]


@pytest.mark.parametrize("kept", [0, 10**9], ids=["states computed anew", "states kept"])
@pytest.mark.parametrize("at", [1, 7, 13])
def test_interrupted_and_resumed_equals_uninterrupted(model, texts, tmp_path, at, kept):
    settings = dataclasses.replace(SMALL, kept_state_bytes=kept, exit_layer=1, state_weight=1.0)
    with interrupted(at) as progress:
        train_exit(model, texts, tmp_path / "two", settings, progress=progress)
    assert not (tmp_path / "two" / "adapter.safetensors").exists()
    assert torch.load(tmp_path / "two" / CHECKPOINT, weights_only=True)["step"] == at
    first = train_exit(model, texts, tmp_path / "two", settings, resume=True)
    whole = train_exit(model, texts, tmp_path / "one", settings)
    one, two = (weights_of(tmp_path / name, model) for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    drop_times = [[{**each, "seconds": 0} for each in plan.provenance["curve"]] for plan in (first, whole)]
    assert drop_times[0] == drop_times[1]


def test_killed_between_two_checkpoints(model, texts, tmp_path):
    """What came after the last checkpoint is done again, and comes out the same."""

    class Killed(Exception):
        pass

    def kill(step, steps, point):
        if step == 17:
            raise Killed

    settings = dataclasses.replace(SMALL, checkpoint_every=8)
    with pytest.raises(Killed):
        train_exit(model, texts, tmp_path / "two", settings, progress=kill)
    train_exit(model, texts, tmp_path / "two", settings, resume=True)
    train_exit(model, texts, tmp_path / "one", settings)
    one, two = (weights_of(tmp_path / name, model) for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_resuming_what_is_done_changes_nothing(model, texts, tmp_path):
    train_exit(model, texts, tmp_path, SMALL)
    before = weights_of(tmp_path, model)
    train_exit(model, texts, tmp_path, SMALL, resume=True)
    assert all(torch.equal(each, before[name]) for name, each in weights_of(tmp_path, model).items())


def test_a_resumed_run_may_use_less_memory(model, texts, tmp_path):
    train_exit(model, texts, tmp_path, SMALL)
    train_exit(model, texts, tmp_path, dataclasses.replace(SMALL, micro_rows=1, kept_state_bytes=0), resume=True)


def test_folders_that_are_refused(model, texts, tmp_path):
    train_exit(model, texts, tmp_path, SMALL)
    with pytest.raises(SettingError, match="--resume"):
        train_exit(model, texts, tmp_path, SMALL)
    with pytest.raises(SettingError, match="seed=1"):
        train_exit(model, texts, tmp_path, dataclasses.replace(SMALL, seed=1), resume=True)
    with pytest.raises(SettingError, match="texts"):
        train_exit(model, dataclasses.replace(texts, tokens=texts.tokens[::-1].copy()), tmp_path, SMALL, resume=True)
    (tmp_path / CHECKPOINT).write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="begin anew"):
        train_exit(model, texts, tmp_path, SMALL, resume=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"exit_layer": -1},
        {"exit_layer": 0, "reads_state": False},
        {"further_states": [1]},
        {"further_states": ("1",)},
        {"num_blocks": 0},
        {"tokens": 0},
        {"offsets": 0},
        {"offset_decay": 1.5},
        {"state_weight": -1.0},
        {"state_weight": float("nan")},
        {"state_weight": float("inf")},
        {"state_weight": True},
        {"state_weight": "1"},
        {"first_offset_share": -0.1},
        {"precision": "float16"},
        {"vocabulary_size": 0},
        {"learning_rate": 0},
        {"learning_rate": float("nan")},
        {"held_out_rows": True},
    ],
)
def test_settings_that_are_refused(fields):
    with pytest.raises(SettingError, match="expected|reads_state"):
        ExitSettings(**fields)


@pytest.mark.parametrize("changes", [{"exit_layer": 4}, {"held_out_rows": 20}, {"num_blocks": 5}])
def test_settings_that_do_not_fit(model, texts, tmp_path, changes):
    with pytest.raises(LayerSkipError, match="expected"):
        train_exit(model, texts, tmp_path / "out", dataclasses.replace(SMALL, **changes))
    assert not (tmp_path / "out" / CHECKPOINT).exists()


def test_a_step_does_not_depend_on_how_many_rows_are_held_at_once(model, texts, tmp_path):
    def gradients(micro_rows):
        run = make_run(
            model, texts, dataclasses.replace(SMALL, micro_rows=micro_rows, first_offset_share=0.0), tmp_path
        )
        for loss in run.losses(0):
            loss.backward()
        return [each.grad for each in run.student.modules.parameters()]

    for one, four in zip(gradients(1), gradients(4), strict=True):
        torch.testing.assert_close(one, four, rtol=1e-3, atol=1e-5)


def test_a_handler_that_raises_nothing_does_not_end_the_training_as_if_done(model, texts, tmp_path):
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with pytest.raises(KeyboardInterrupt):
            train_exit(
                model, texts, tmp_path, SMALL,
                progress=lambda step, *_: signal.raise_signal(signal.SIGINT) if step == 2 else None,
            )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)
    assert not (tmp_path / "adapter.safetensors").exists()


def test_a_loss_that_is_no_number_ends_it(texts, tmp_path):
    hf_model = copy.deepcopy(tiny_model("llama", dtype=torch.float32))
    hf_model.model.layers[3].mlp.down_proj.weight[0, 0] = float("inf")
    with pytest.raises(SettingError, match="loss of nan"):
        train_exit(layerskip.wrap(hf_model), texts, tmp_path, SMALL)
    assert not (tmp_path / CHECKPOINT).exists()


@pytest.mark.parametrize("name", ["lm_head", "model.layers.3.mlp.up_proj"])
def test_models_that_are_refused(texts, tmp_path, name):
    hf_model = copy.deepcopy(tiny_model("llama", dtype=torch.float32))
    parent, _, own = name.rpartition(".")
    setattr(hf_model.get_submodule(parent), own, WrappedLinear(hf_model.get_submodule(name)))
    with pytest.raises(UnsupportedModelError, match="plain"):
        train_exit(layerskip.wrap(hf_model), texts, tmp_path, SMALL)


def test_a_checkpoint_that_cannot_be_written(model, texts, tmp_path, monkeypatch):
    def save(*_):
        raise RuntimeError("no space left on device")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(CheckpointError, match="no space left"):
        train_exit(model, texts, tmp_path, SMALL)
    assert not list(tmp_path.glob("*.new"))


def test_offsets_that_nothing_was_asked_of_have_no_rate(model, texts, tmp_path):
    """A rate of 0 would tell the governor never to draft so far."""
    run = make_run(model, texts, SMALL, tmp_path)
    run._held_out = (run._held_out[0], torch.zeros_like(run._held_out[1]))
    run._held_out[1][0, 9] = True
    assert len(run.evaluate()["agreement"]) == 1


def test_only_the_models_own_tokens_count(model, texts, tmp_path):
    """A token behind which the model's own do not follow has no part in the loss, only as context."""
    own = texts.is_own.copy()
    own[:, 20:] = False
    run = make_run(model, dataclasses.replace(texts, is_own=own), SMALL, tmp_path)
    other = texts.tokens.copy()
    other[:, 20:] = 7
    run_other = make_run(model, TrainingTexts(other, own), dataclasses.replace(SMALL), tmp_path)
    run_other.vocabulary, run_other._head = run.vocabulary, run._head
    losses = [sum(float(loss.detach()) for loss in each.losses(0)) for each in (run, run_other)]
    assert losses[0] == pytest.approx(losses[1])
    with pytest.raises(SettingError, match="none of the model's own"):
        make_run(model, dataclasses.replace(texts, is_own=np.zeros_like(own)), SMALL, tmp_path)


def test_kept_states_are_those_computed(model, texts, tmp_path):
    tokens = torch.from_numpy(texts.tokens.astype(np.int64))

    def teacher(*where, tokens=tokens):
        return Teacher(model.decoder, model.identity, tokens, (2, NUM_LAYERS), *where)

    fresh, kept = teacher(), teacher(tmp_path, 10**9)
    for rows in ([0, 3], [3, 0], [5]):
        torch.testing.assert_close(fresh.states(rows), kept.states(rows))
    kept.flush()
    again = teacher(tmp_path, 10**9)
    assert json.loads((tmp_path / "states.json").read_text())["rows"] == [0, 3, 5]
    torch.testing.assert_close(again.states([5, 0]), kept.states([5, 0]), rtol=0, atol=0)
    # What is there of something else, or not whole, is not taken for these states.
    others = teacher(tmp_path, 10**9, tokens=tokens.flip(0)).states([0])
    torch.testing.assert_close(others, teacher(tokens=tokens.flip(0)).states([0]))
    kept.flush()
    for damage in (lambda: (tmp_path / "states.bin").unlink(), lambda: (tmp_path / "states.json").write_text("{")):
        damage()
        torch.testing.assert_close(teacher(tmp_path, 10**9).states([0]), fresh.states([0]))


@pytest.mark.parametrize("reason", ["No space left on device", "File too large"])
def test_no_room_for_the_states(model, texts, tmp_path, monkeypatch, reason):
    """They are computed each time, and the result is the same."""

    def full(*_):
        raise OSError(28, reason)

    settings = dataclasses.replace(SMALL, tokens=32 * 4 * 3)
    train_exit(model, texts, tmp_path / "kept", settings)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.warns(UserWarning, match=f"cannot keep .* GB of states in .*: {reason}"):
        train_exit(model, texts, tmp_path / "anew", settings)
    assert not list((tmp_path / "anew").glob("states*"))
    one, two = (weights_of(tmp_path / name, model) for name in ("kept", "anew"))
    for name, each in one.items():
        torch.testing.assert_close(each, two[name])


def test_states_of_another_run_that_ended_before_its_first_note(model, texts, tmp_path):
    """Its rows lie in the file that an older note describes."""
    tokens = torch.from_numpy(texts.tokens.astype(np.int64))
    ours = Teacher(model.decoder, model.identity, tokens, (2, NUM_LAYERS), tmp_path, 10**9)
    expected = ours.states([0])
    ours.flush()
    Teacher(model.decoder, model.identity, tokens.flip(0), (2, NUM_LAYERS), tmp_path, 10**9).states(
        [0]
    )  # and is killed
    again = Teacher(model.decoder, model.identity, tokens, (2, NUM_LAYERS), tmp_path, 10**9).states([0])
    torch.testing.assert_close(again, expected)


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "{}", '{"rows": [[1]]}', '{"rows": [-1, 10000]}'])
def test_notes_of_states_that_are_damaged(model, texts, tmp_path, content):
    tokens = torch.from_numpy(texts.tokens.astype(np.int64))
    kept = Teacher(model.decoder, model.identity, tokens, (2, NUM_LAYERS), tmp_path, 10**9)
    expected = kept.states([0])
    kept.flush()
    if content.startswith('{"rows"'):
        content = json.dumps(json.loads((tmp_path / "states.json").read_text()) | json.loads(content))
    (tmp_path / "states.json").write_text(content)
    torch.testing.assert_close(
        Teacher(model.decoder, model.identity, tokens, (2, NUM_LAYERS), tmp_path, 10**9).states([0]), expected
    )


def test_the_schedule():
    schedule = Schedule(100, 1.0, warmup_share=0.1)
    rates = [schedule.learning_rate_at(step) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == pytest.approx(1.0) and rates[99] == pytest.approx(0.05, abs=1e-3)
    assert sorted(rates[10:], reverse=True) == rates[10:]


def test_where_heads_have_nothing_to_read_does_not_count(model, tmp_path):
    """The n-th head puts out zeros at a text's first n positions; catches these counted as guesses."""
    settings = dataclasses.replace(SMALL, exit_layer=0, num_blocks=0, num_heads=3, offsets=3)
    run = make_run(model, some_texts(), settings, tmp_path)
    before = sum(float(loss.detach()) for loss in run.losses(0)), run.evaluate()
    outputs = run.student.outputs

    def spoilt(*given):
        found = [each.clone() for each in outputs(*given)]
        for positions, each in enumerate(found, 1):
            each[:, :positions] = torch.randn_like(each[:, :positions])
        return found

    run.student = dataclasses.replace(run.student, outputs=spoilt)
    assert (sum(float(loss.detach()) for loss in run.losses(0)), run.evaluate()) == before
