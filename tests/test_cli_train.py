"""`layerskip train` on tiny checkpoints: what it writes, resumes and refuses, and that the plan then drafts."""

import json
import signal

import numpy as np
import pytest
import torch

import layerskip
from layerskip.cli import main
from layerskip.cli.staged_progress import TrainProgress
from layerskip.plan import DraftPlan
from tests.checkpoints import save_tiny
from tests.tiny_models import VOCAB_SIZE, tiny_model
from tests.toy_tokenizer import character_tokenizer

SMALL = ["--tokens", "2560", "--batch-tokens", "320", "--evaluate-every", "4", "--precision", "float32"]
WHOLE = [*SMALL, "--dtype", "float32"]  # of recipes without a draft vocabulary
SMALL = [*WHOLE, "--vocabulary-size", "40"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("train") / "tiny")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "texts.npz"
    np.savez(file, tokens=np.random.default_rng(0).integers(3, VOCAB_SIZE, (40, 32)).astype(np.uint16))
    return file


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def run(*words):
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    yield run
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("recipe", "exit_layer", "words"),
    [
        ("jump", 0, []),
        ("jump", 0, ["--further-states", "1,3"]),
        ("jump", 0, ["--state-weight", "1"]),
        ("eagle", 0, []),
        ("adapter", 1, []),
        ("adapter", 2, ["--exit-layer", "2", "--no-state"]),
        ("medusa", 0, []),
        ("medusa", 0, ["--offsets", "2"]),
    ],
)
def test_from_an_empty_folder_to_a_plan_that_generate_uses(run, checkpoint, texts, recipe, exit_layer, words):
    code, out, err = run("train", checkpoint, "--recipe", recipe, "--texts", texts, "--out", "draft", *SMALL, *words)
    assert (code, err) == (0, "")
    assert "the path says what the model says: " in out and out.endswith("plan: draft/plan.json\n")
    plan = DraftPlan.load("draft/plan.json")
    assert (plan.exit_layer, len(plan.provenance["curve"])) == (exit_layer, 2)
    call = ["generate", "--model", checkpoint, "--max-new-tokens", 20, "--dtype", "float32", "the sky"]
    own, drafted = run(*call), run(*call, "--plan", "draft/plan.json", "--governor", "off")
    assert own[0] == drafted[0] == 0 and own[1] == drafted[1]
    code, out, _ = run("plan", "check", "draft/plan.json", checkpoint, "--dtype", "float32")
    trained = f"{words[-1] if words else 4} trained heads" if recipe == "medusa" else "trained blocks"
    assert code == 0 and trained in out and "scores 40 of the token ids" in out


def test_the_model_writes_the_texts(run, checkpoint):
    words = ["train", checkpoint, "--out", "draft", "--text-tokens", "3000", *SMALL]
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    assert DraftPlan.load("draft/plan.json").provenance["texts"]["tokens"] >= 3000


def test_an_interrupt_and_resume(run, checkpoint, texts, monkeypatch):
    words = ["train", checkpoint, "--texts", texts, "--out", "draft", *SMALL]
    with monkeypatch.context() as patched:
        original = TrainProgress.trained

        def trained(self, step, steps, point):
            original(self, step, steps, point)
            if step == 3:
                signal.raise_signal(signal.SIGINT)

        patched.setattr(TrainProgress, "trained", trained)
        assert run(*words) == (130, "", "")
    code, _, err = run(*words)
    assert code == 2 and "--resume" in err and err.count("\n") == 1
    assert run(*words, "--resume")[0] == 0
    resumed = DraftPlan.load("draft/plan.json").provenance["curve"]
    assert run("train", checkpoint, "--texts", texts, "--out", "whole", *SMALL)[0] == 0
    whole = DraftPlan.load("whole/plan.json").provenance["curve"]
    assert [point["loss"] for point in resumed] == [point["loss"] for point in whole]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--exit-layer", "2"], "--recipe adapter"),
        (["--no-state"], "--recipe adapter"),
        (["--chat"], "--prompts"),
        (["--recipe", "adapter", "--exit-layer", "4"], "expected"),
        (["--recipe", "adapter", "--no-state", "--further-states", "2"], "without the final one"),
        (["--further-states", "1,4"], "expected numbers from 1 to 3"),
        (["--further-states", "a"], "--further-states"),
        (["--recipe", "layerskip", "--further-states", "1"], "--recipe jump"),
        (["--begin-with", "none.json", "--further-states", "1"], "--begin-with"),
        (["--vocabulary-size", "-1"], "--vocabulary-size"),
        (["--learning-rate", "0"], "learning_rate"),
        (["--text-tokens", "100"], "--text-tokens"),
        (["--offsets", "0"], "--offsets"),
        (["--recipe", "hydra"], "hydra"),
        (["--lora-rank", "2"], "--recipe layerskip"),
        (["--layers", "2"], "--recipe draft-model"),
        (["--recipe", "draft-model"], "--vocabulary-size for the recipe draft-model"),
        (["--recipe", "eagle", "--offsets", "2"], "--offsets for the recipe eagle"),
        (["--recipe", "eagle", "--further-states", "2"], "--further-states for the recipe eagle"),
        (["--state-weight", "-1"], "state_weight"),
        (["--begin-with", "none.json", "--recipe", "draft-model"], "beside --recipe draft-model"),
        (["--recipe", "layerskip", "--num-blocks", "2"], "--recipe jump"),
        (["--begin-with", "none.json", "--recipe", "layerskip"], "--begin-with"),
        (["--begin-with", "none.json", "--num-blocks", "2"], "--begin-with"),
        (["--recipe", "medusa", "--num-blocks", "2"], "--num-blocks"),
        (["--recipe", "medusa", "--further-states", "1"], "--further-states"),
        (["--begin-with", "none.json"], "none.json"),
    ],
)
def test_what_is_refused(run, checkpoint, texts, words, said):
    code, out, err = run("train", checkpoint, "--texts", texts, "--out", "draft", *SMALL, *words)
    assert (code, out) == (2, "") and said in err


def test_texts_and_folders_that_are_refused(run, checkpoint, tmp_path):
    words = ["train", checkpoint, "--out", "draft", *SMALL]
    for content in (b"nonsense", b""):
        (tmp_path / "bad.npz").write_bytes(content)
        code, _, err = run(*words, "--texts", "bad.npz")
        assert code == 2 and "bad.npz" in err and err.count("\n") == 1
    np.savez(tmp_path / "large.npz", tokens=np.full((40, 32), VOCAB_SIZE))
    code, _, err = run(*words, "--texts", "large.npz")
    assert code == 2 and str(VOCAB_SIZE) in err
    (tmp_path / "file").write_text("")
    code, _, err = run("train", checkpoint, "--out", "file", *SMALL)
    assert code == 2 and "is a file" in err


def test_prompts_of_ones_own(run, checkpoint, tmp_path):
    lines = [json.dumps(text) for text in ("the sky", "a fox", "what is it", "hello")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    words = ["--prompts", "prompts.jsonl", "--no-chat", "--text-tokens", "3000", "--out", "draft"]
    assert run("train", checkpoint, *words, *SMALL)[0] == 0


@pytest.mark.parametrize("words", [[], ["--lora-rank", "2", "--curriculum", "gradual"]], ids=["full", "lora"])
def test_a_checkpoint_that_was_changed(run, checkpoint, texts, words):
    """The recipe that trains the model itself writes one that the other commands read."""
    code, out, err = run("train", checkpoint, "--recipe", "layerskip", "--texts", texts, "--out", "new", *WHOLE, *words)
    assert (code, err) == (0, "") and "new/README.md" in out
    code, out, _ = run("generate", "--model", "new", "--plan", "new/plan.json", "--max-new-tokens", 5, "the sky")
    assert code == 0 and out
    assert run("plan", "check", "new/plan.json", checkpoint)[0] == 2  # it is another model's now


def test_a_second_model(run, checkpoint, texts):
    """A checkpoint of its own, whose plan drafts for the other, here and in transformers' words; and it resumes."""
    words = ["train", checkpoint, "--recipe", "draft-model", "--texts", texts, "--out", "small", *WHOLE]
    code, out, err = run(*words, "--layers", "1")
    assert (code, err) == (0, "")
    assert "the draft model says what the model says: " in out and out.endswith("plan: small/plan.json\n")
    call = ["generate", "--model", checkpoint, "--max-new-tokens", 20, "--dtype", "float32", "the sky"]
    own = run(*call)
    for drafting in (["--plan", "small/plan.json"], ["--assistant-model", "small"]):
        assert run(*call, *drafting, "--governor", "off")[:2] == own[:2]
    assert run("inspect", "small")[0] == 0
    assert run("plan", "check", "small/plan.json", checkpoint, "--dtype", "float32")[0] == 0
    code, _, err = run(*words, "--layers", "1")
    assert code == 2 and "--resume" in err
    code, _, err = run(*words, "--layers", "2", "--resume")
    assert code == 2 and "got layers=[0, 3] for a run that was begun with [3]" in err
    assert run(*words, "--layers", "1", "--resume")[0] == 0


def test_python(texts, tmp_path):
    """The same from Python, on a model in memory."""
    from layerskip.training import ExitSettings, TrainingTexts, train_exit

    model = layerskip.wrap(tiny_model("qwen3", dtype=torch.float32), character_tokenizer())
    settings = ExitSettings(tokens=640, batch_tokens=320, vocabulary_size=None, precision="float32")
    plan = train_exit(model, TrainingTexts.load(texts, model.decoder.vocab_size), tmp_path / "out", settings)
    assert plan.draft_vocabulary is None
    assert (
        model.generate("the sky", plan=plan, max_new_tokens=10).text
        == model.generate("the sky", max_new_tokens=10).text
    )
