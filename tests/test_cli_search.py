"""`layerskip search` and `search-report` on tiny checkpoints: what is written, resumed, interrupted and refused."""

import contextlib
import copy
import errno
import json
import os
import signal
import subprocess
import sys
import time

import optuna
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import layerskip
from layerskip.cli import main
from layerskip.cli.search_progress import SearchProgress
from layerskip.plan import DraftPlan
from layerskip.search import study as study_module
from layerskip.search.claim import Claim, Overtaken
from layerskip.search.report import writing
from layerskip.search.storage import close_storage, open_storage
from layerskip.search.trials import FINISHED
from tests.checkpoints import save_tiny
from tests.tiny_models import TINY_CONFIGS, tiny_model
from tests.toy_tokenizer import character_tokenizer

COUNTS = {
    "positions": 96,
    "held-out-positions": 64,
    "frequency-positions": 64,
    "new-tokens": 16,
    "draft-length": 3,
    "context": 16,
    "budget": 4,
}
SMALL = [word for name, value in COUNTS.items() for word in ("--" + name, str(value))]
PROMPTS = ["the sky", "a quick brown fox", "what is it", "hello", "good day to you", "tell me more"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("search") / "tiny")


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Run a command line in an empty folder: (exit code, standard output, standard error)."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        capsys.readouterr()
        code = main([str(each) for each in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def search(run, checkpoint, monkeypatch):
    """A small search for plan.json, its report a page without pictures; what is given comes last and wins."""

    def write_page(result, folder):
        folder.mkdir(exist_ok=True)
        (folder / "report.json").write_text(json.dumps(result.to_dict()))
        return folder / "report.html"

    def search(*arguments, model=checkpoint, pictures=False):
        if not pictures:
            monkeypatch.setattr("layerskip.search.report.write_report", write_page)
        return run("search", model, *SMALL, "--no-measure", "--out", "plan.json", *arguments)

    return search


@pytest.fixture
def trials(tmp_path):
    """The states of a study's trials in the default storage: "FINISHED" if complete or pruned."""

    def trials(study="tiny", storage="plan-search.db"):
        opened = open_storage(tmp_path / storage)
        try:
            states = [trial.state for trial in optuna.load_study(study_name=study, storage=opened).trials]
            return ["FINISHED" if state in FINISHED else state.name for state in states]
        finally:
            close_storage(opened)

    return trials


def prompts_file(folder, lines, name="prompts.jsonl"):
    file = folder / name
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


# What it writes


def test_a_search_writes_plan_and_report(run, checkpoint, tmp_path):
    code, out, err = run("search", checkpoint, *SMALL, "--out", "plan.json")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("best of 4 trials: ")
    assert lines[2].startswith("predicted speed-up over plain decoding: ")
    assert any(line.startswith("measured, on some of these texts: ") for line in lines)
    assert lines[-2:] == ["plan: plan.json", "report: plan-report/report.html"]
    assert {"report.html", "report.json", "plan.json"} <= {each.name for each in (tmp_path / "plan-report").iterdir()}
    report = json.loads((tmp_path / "plan-report" / "report.json").read_text())
    assert (report["study"], len(report["trials"])) == ("tiny", 4)
    plan, model = DraftPlan.load(tmp_path / "plan.json"), layerskip.load(str(checkpoint))
    drafted = model.generate("the sky", plan=plan, governor="off", max_new_tokens=20)
    assert drafted.text == model.generate("the sky", max_new_tokens=20).text
    assert drafted.stats.accepted > 0


def test_the_same_command_goes_on(search, trials):
    assert search()[0] == 0
    code, out, err = search("--budget", 7)
    assert (code, trials()) == (0, ["FINISHED"] * 7 + ["WAITING"] * (len(trials()) - 7))
    assert out.startswith("best of 7 trials")
    assert err == "note: plan.json is from an earlier run of this search and will be replaced\n"


def test_the_report_is_written_again(run, search, tmp_path):
    code, out, _ = search(pictures=True)
    again = run("search-report", "tiny", "--storage", "plan-search.db", "--report", "again")
    assert again == (0, out.replace("plan: plan.json\n", "").replace("plan-report", "again"), "")
    assert DraftPlan.load(tmp_path / "again" / "plan.json") == DraftPlan.load(tmp_path / "plan.json")


def test_given_prompts(search, tmp_path):
    file = prompts_file(tmp_path, PROMPTS)
    assert search("--prompts", file)[0] == 0
    report = json.loads((tmp_path / "plan-report" / "report.json").read_text())
    assert report["settings"]["calibration"]["source"] == "given prompts"
    assert search("--budget", 5)[0] == 0  # need not be given again
    code, _, err = search("--prompts", prompts_file(tmp_path, PROMPTS[1:], "others.jsonl"))
    assert (code, "another set of prompts" in err) == (2, True)


def test_nothing_is_pruned_if_so_said(search, tmp_path):
    """Optuna's own default prunes."""
    assert search("--positions", 1500, "--budget", 16, "--no-prune")[0] == 0
    for trial in json.loads((tmp_path / "plan-report" / "report.json").read_text())["trials"]:
        assert trial["state"] != "pruned" or trial["speedup"] is None  # what drafts nothing is not judged at all


def test_workers_do_not_share_a_seed(search, monkeypatch):
    """They would all draw the same candidates."""
    make_sampler, seeds = study_module.make_sampler, []
    monkeypatch.setattr(study_module, "make_sampler", lambda *of: (seeds.append(of[2]), make_sampler(*of))[1])
    assert search("--seed", 5)[0] == 0
    assert set(seeds) == {5}
    seeds.clear()
    assert search("--seed", 5, "--budget", 5)[0] == 0
    assert set(seeds) == {None}


def test_a_better_trial_that_comes_late(search, monkeypatch, tmp_path):
    """Another worker finishes it while this one looks at the best so far on other texts."""
    late = []

    def finish_one(self, what, done, total):
        if what == "judging on held-out texts" and not late:
            storage = open_storage(tmp_path / "plan-search.db")
            study = optuna.load_study(study_name="tiny", storage=storage)
            old = study.best_trial
            told = {"verdict": old.user_attrs["verdict"] | {"speedup": 99.0}}
            late.append(len(study.trials))
            study.add_trial(
                optuna.trial.create_trial(
                    params=old.params, distributions=old.distributions, value=99.0, user_attrs=told
                )
            )
            close_storage(storage)

    monkeypatch.setattr(SearchProgress, "stage", finish_one)
    assert search()[0] == 0
    assert DraftPlan.load(tmp_path / "plan.json").provenance["trial"] == late[0]


# Interrupted


@pytest.fixture(autouse=True)
def interruptible():
    """A shell's background job, in which tests may run, ignores interrupts, and hands that on to its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_at(monkeypatch, method, when):
    """Ctrl-C when the progress is told that."""
    original = getattr(SearchProgress, method)

    def told(self, *arguments):
        original(self, *arguments)
        if when(*arguments):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(SearchProgress, method, told)


def test_an_interrupt_ends_the_search_with_what_it_has(search, trials, monkeypatch, tmp_path):
    interrupt_at(monkeypatch, "trial", lambda record, best, finished: finished == 3)
    code, out, err = search("--budget", "10 trials")
    assert (code, out.splitlines()[0].partition(":")[0]) == (0, "best of 3 trials")
    assert "interrupted: the search ends with the trials that it has" in err
    assert len(json.loads((tmp_path / "plan-report" / "report.json").read_text())["trials"]) == 3
    assert DraftPlan.load(tmp_path / "plan.json").provenance["trials"] == 3


def test_a_second_interrupt_leaves_at_once(search, trials, monkeypatch, tmp_path):
    with monkeypatch.context() as patched:
        interrupt_at(patched, "trial", lambda record, best, finished: finished == 3)
        interrupt_at(patched, "stage", lambda what, done, total: what == "judging on held-out texts")
        code, out, err = search("--budget", "10 trials")
    assert (code, out, err.count("\n")) == (130, "", 1)
    assert not (tmp_path / "plan.json").exists()
    assert trials().count("FINISHED") == 3
    assert search("--budget", 3)[0] == 0  # nothing is tried again
    assert trials().count("FINISHED") == 3


def test_an_interrupted_preparation_is_begun_again(search, monkeypatch):
    with monkeypatch.context() as patched:
        interrupt_at(patched, "stage", lambda what, done, total: what == "measuring costs")
        assert search() == (130, "", "")
    code, _, err = search("--heartbeat", 3600)
    assert (code, err) == (0, "")


# One that was killed


@pytest.fixture
def victim(checkpoint, tmp_path):
    """The command as a process of its own, with many trials."""
    command = [sys.executable, "-m", "layerskip.cli", "search", checkpoint, *SMALL, "--out", tmp_path / "plan.json"]
    command += ["--positions", "3000", "--no-prune", "--budget", "100000 trials"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    with (
        open(tmp_path / "said", "wb") as said,
        subprocess.Popen([str(each) for each in command], stdout=said, stderr=said, env=environment) as process,
    ):
        yield process
        process.kill()


def until(condition, limit_s=120.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def attributes(storage, study="tiny"):
    opened = open_storage(storage)
    try:
        with contextlib.suppress(KeyError):
            return optuna.load_study(study_name=study, storage=opened).user_attrs
        return {}
    finally:
        close_storage(opened)


def test_an_interrupt_in_mid_trial(victim, trials, tmp_path):
    storage = tmp_path / "plan-search.db"
    until(lambda: storage.exists() and attributes(storage).get("prepared") and trials().count("FINISHED") >= 3)
    victim.send_signal(signal.SIGINT)
    assert victim.wait(120) == 0, (tmp_path / "said").read_text()
    said = (tmp_path / "said").read_text()
    assert "note: interrupted" in said and "Traceback" not in said
    plan = DraftPlan.load(tmp_path / "plan.json")
    assert plan.provenance["trials"] == trials().count("FINISHED") >= 3
    assert (tmp_path / "plan-report" / "report.html").exists()


def test_a_killed_preparation_is_taken_over_at_once(victim, search, tmp_path):
    """By the process number in its mark: nobody waits for three heartbeats of an hour."""
    storage = tmp_path / "plan-search.db"
    until(lambda: storage.exists() and attributes(storage).get("preparing"))
    victim.kill()
    victim.wait()
    assert attributes(storage)["preparing"]["pid"] == victim.pid
    assert "prepared" not in attributes(storage)
    code, _, err = search("--heartbeat", 3600)
    assert (code, err) == (0, "")
    assert attributes(storage)["preparing"] is None


@pytest.fixture
def a_study(tmp_path):
    """Made, and not prepared yet."""
    storage = open_storage(tmp_path / "plan-search.db")
    yield optuna.create_study(storage=storage, study_name="tiny", direction="maximize")
    close_storage(storage)


def test_a_worker_of_another_machine_is_given_three_heartbeats(a_study, search):
    mark = {"by": "another", "pid": 1, "machine": "there", "beat": 3, "at": time.time() + 60, "interval_s": 0.5}
    a_study.set_user_attr("preparing", mark)  # its clock is a minute ahead
    began = time.monotonic()
    code, _, err = search()
    assert (code, err) == (0, "note: another worker is preparing the study 'tiny'; waiting for it\n")
    assert time.monotonic() - began >= 1.5


def test_a_mark_that_is_old_by_any_clock(a_study):
    mark = {"by": "another", "pid": 1, "machine": "there", "beat": 3, "at": time.time() - 10_000, "interval_s": 60}
    a_study.set_user_attr("preparing", mark)
    assert Claim(a_study, 60).take()


def test_claims(a_study):
    first, second = Claim(a_study, 0.1), Claim(a_study, 0.1)
    assert first.take()
    with first:
        began = time.monotonic()
        while time.monotonic() - began < 1.0:
            assert not second.take()  # the first one shows that it lives
    assert second.take()
    with second:
        third = Claim(a_study, 0.1)
        third._write()  # as if the second had been held up for long
        with pytest.raises(Overtaken):
            second.confirm()
    third.confirm()  # what is another's is not given back


def test_who_was_overtaken_joins(search, a_study, monkeypatch):
    """A worker that was asleep finds the study prepared by another."""
    write, written = study_module.write_calibration, []

    def asleep(*arguments, **options):
        texts = write(*arguments, **options)
        if not written:
            written.append(a_study.user_attrs["preparing"])
            a_study.set_user_attr("preparing", written[0] | {"by": "another", "machine": "there", "interval_s": 0.1})
        return texts

    monkeypatch.setattr(study_module, "write_calibration", asleep)
    code, _, err = search()
    assert (code, err) == (0, "note: another worker is preparing the study 'tiny'; waiting for it\n")


# What a person can get wrong


WRONG = {
    "budget": (["--budget", "soon"], ["'soon'", "10m"]),
    "sampler": (["--sampler", "elit"], ["'elit'", "Did you mean 'elite'?"]),
    "objective": (["--objective", "sped"], ["'sped'", "speedup"]),
    "seed": (["--seed", "-1"], ["seed=-1"]),
    "vocabularies": (["--draft-vocabularies", "abc"], ["'abc'", "2048,8192"]),
    "heartbeat": (["--heartbeat", "0"], ["'0'", "at least 1"]),
    "long heartbeat": (["--heartbeat", "9999"], ["9999", "3600"]),
    "study": (["--study", " "], ["study=' '"]),
    "prompts": (["--prompts", "nowhere.jsonl"], ["cannot read the prompts nowhere.jsonl"]),
    "empty prompts": (["--prompts", "empty"], ["no prompt in empty"]),
    "prompts line": (["--prompts", "lines"], ["line 2 of lines", "not JSON"]),
    "report": (["--report", "empty"], ["--report empty, which is a file"]),
    "out folder": (["--out", "no/plan.json"], ["no/plan.json, whose folder does not exist"]),
    "out is a folder": (["--out", "."], ["is no plan of the study"]),
    "out of another kind": (["--out", "lines"], ["lines, which exists and is no plan of the study 'tiny'"]),
    "unknown storage": (["--storage", "postgrsql://u:s3cret@h/d"], ["Did you mean 'postgresql'?"]),
    "wrong port": (["--storage", "postgresql://u:s3cret@h:port/d"], ["no valid URL"]),
    "storage folder": (["--storage", "."], ["expected a file ending in .db"]),
    "storage text": (["--storage", "text.db"], ["no SQLite database"]),
    "storage journal": (["--storage", "text.log"], ["no journal"]),
    "storage nowhere": (["--storage", "no/trials.db"], ["mkdir -p"]),
    "storage unwritable": (["--storage", "/proc/trials.db"], ["/proc/trials.db"]),
    "model": (["--dtype", "float17"], ["Did you mean 'float16'?"]),
    "temperature": (["--temperature", "0"], ["--temperature 0.0", "leave it out"]),
    "top-p": (["--top-p", "2"], ["top_p=2.0", "at most 1"]),
    "top-k": (["--top-k", "-1"], ["top_k=-1"]),
    "protect": (["--protect-first", "-1"], ["protect_first=-1", "from 0 to the model's 4"]),
    "protect all": (["--protect-last", "5"], ["protect_last=5"]),
    "nothing": (["--no-skips", "--no-exits"], ["nothing to choose"]),
    "vocabulary": (["--draft-vocabularies", "61"], ["61 ids", "less than 61"]),
    "new tokens": (["--new-tokens", "1"], ["new_tokens=1"]),
    "context": (["--context", "150"], ["context=150", "from 1 to"]),
    "draft length": (["--draft-length", "40"], ["draft_length=40", "160 positions"]),
    "few prompts": (["--prompts", "one"], ["1 different prompt(s)", "expected 2"]),
    "long prompts": (["--prompts", "long"], ["0 different prompt(s)", "shorter prompts"]),
    "equal prompts": (["--prompts", "equal"], ["1 different prompt(s)", "expected 2"]),
}


@pytest.fixture
def files(tmp_path):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "lines").write_text('"good"\nbad\n')
    for name in ("text.db", "text.log"):
        (tmp_path / name).write_text("some text, at length")
    prompts_file(tmp_path, ["hello"], "one")
    prompts_file(tmp_path, ["hello"] * 9, "equal")
    prompts_file(tmp_path, ["a" * 200, "b" * 300, "c" * 400], "long")
    return {each: each.read_bytes() for each in tmp_path.iterdir()}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_person_can_get_wrong(search, files, tmp_path, case):
    arguments, expected = WRONG[case]
    code, out, err = search(*arguments)
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert lines[0].startswith("error: ")
    assert lines[1:] in ([], ["See `layerskip search --help`."])
    for part in expected:
        assert part in err
    assert "s3cret" not in err
    assert {file: file.read_bytes() for file in files} == files
    left = {each.name for each in tmp_path.iterdir()} - {file.name for file in files}
    assert left <= {"plan-search.db"}


def test_a_refused_setting_does_not_bind_the_study(search, files):
    for case in ("protect", "vocabulary", "temperature", "context", "few prompts", "equal prompts"):
        assert search(*WRONG[case][0])[0] == 2
    assert search()[0] == 0
    code, _, err = search("--protect-first", 0)
    assert (code, "another setting: protect_first 1, now 0" in err) == (2, True)


def test_a_study_that_is_no_search(search, a_study):
    assert "no search of layerskip" in search("--objective", "front")[2]  # it has one objective
    a_study.enqueue_trial({"x": 1})
    code, _, err = search()
    assert (code, "no search of layerskip" in err, a_study.user_attrs["preparing"]) == (2, True, None)
    assert search("--study", "front", "--objective", "front")[0] == 0


def test_a_folder_that_cannot_be_written_to(search, monkeypatch):
    """Said before anything is searched."""
    monkeypatch.setattr("layerskip.cli.search_command.os.access", lambda *_: False)
    code, _, err = search("--storage", "no/trials.db")
    assert (code, "--out plan.json, whose folder cannot be written to" in err) == (2, True)


def test_no_model(search, tmp_path):
    code, _, err = search(model="./nowhere")
    assert (code, "'./nowhere'" in err, list(tmp_path.iterdir())) == (2, True, [])


def test_the_study_of_another_model(search, tmp_path, trials):
    assert search()[0] == 0
    other = save_tiny(tmp_path / "other", seed=1)
    code, _, err = search("--study", "tiny", model=other)
    assert (code, len(err.splitlines())) == (2, 1 + 1)  # the note on plan.json
    assert "another model: weights" in err
    assert trials().count("FINISHED") == 4
    assert "no plan of the study 'other'" in search(model=other)[2]


@pytest.mark.parametrize("place", ["plan", "report"])
def test_a_full_disk_loses_nothing(search, trials, monkeypatch, tmp_path, place):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        if place == "plan":
            patched.setattr("layerskip.plan_file.os.replace", full)
        else:
            patched.setattr(writing, "_exchange", full)
        code, out, err = search(pictures=True)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "No space left on device" in err
    assert trials().count("FINISHED") == 4
    assert not [each for each in tmp_path.iterdir() if each.name.startswith((".", "tmp"))]
    code, out, err = search()
    assert code == 0
    assert trials().count("FINISHED") == 4


def test_wrong_reports(run, search, files, tmp_path, monkeypatch):
    assert search()[0] == 0

    def report(study="tiny", storage="plan-search.db", folder="again"):
        code, out, err = run("search-report", study, "--storage", storage, "--report", folder)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        return err

    assert "Did you mean 'tiny'?" in report("tinny")
    assert "nowhere.db, which does not exist" in report(storage="nowhere.db")
    assert not (tmp_path / "nowhere.db").exists()
    assert "no SQLite database" in report(storage="text.db")
    assert "which is a file" in report(folder="lines")
    with monkeypatch.context() as patched:
        interrupt_at(patched, "stage", lambda what, done, total: what == "judging on held-out texts")
        assert search("--study", "unfinished", "--out", "other.json", "--storage", "plan-search.db")[0] == 130
    assert "no conclusion yet" in report("unfinished")


# Models of other kinds


def saved(folder, **changes):
    config = LlamaConfig(**(TINY_CONFIGS["llama"].to_dict() | changes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def test_a_model_of_one_block(search, tmp_path):
    one = saved(tmp_path / "one", num_hidden_layers=1)
    assert "nothing to choose" in search(model=one)[2]
    assert search("--protect-first", 0, "--protect-last", 0, model=one)[0] == 0


def test_a_model_of_two_blocks(search, tmp_path):
    assert search(model=saved(tmp_path / "two", num_hidden_layers=2))[0] == 0


def test_a_model_of_few_positions(run, checkpoint, tmp_path):
    """The default context gives way; texts are as long as there is room for."""
    counts = ["--positions", 96, "--held-out-positions", 64, "--frequency-positions", 64, "--budget", 2]
    code, _, err = run("search", checkpoint, *counts, "--no-measure", "--out", "plan.json")
    assert (code, err) == (0, "")
    assert json.loads((tmp_path / "plan-report" / "report.json").read_text())["costs"]["conditions"]["context"] < 100


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sliding_windows_and_narrow_types(search, tmp_path, dtype):
    model = save_tiny(tmp_path / "window", "mistral-window")
    assert search("--dtype", dtype, model=model)[0] == 0


def test_a_checkpoint_without_a_tokenizer(search, tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path / "bare")
    assert search("--temperature", 0.8, "--draft-vocabularies", "16,32", model=tmp_path / "bare")[0] == 0
    code, _, err = search("--study", "p", "--out", "p.json", "--prompts", prompts_file(tmp_path, PROMPTS), model="bare")
    assert (code, "tokenizer" in err) == (2, True)


def test_answers_that_end_at_once(search, tmp_path):
    model = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        model.lm_head.weight.zero_()  # all tokens alike: the first, 0, is said
    model.generation_config.eos_token_id = 0
    model.save_pretrained(tmp_path / "mute")
    character_tokenizer().save_pretrained(tmp_path / "mute")
    for more in ([], ["--prompts", prompts_file(tmp_path, PROMPTS)]):
        code, _, err = search(*more, model=tmp_path / "mute")
        assert (code, len(err.splitlines())) == (2, 1)
        assert "Give prompts that ask for text" in err


@pytest.mark.filterwarnings("default:.*are left out")
def test_long_and_repeated_prompts_are_left_out(search, tmp_path):
    file = prompts_file(tmp_path, [*PROMPTS, "a" * 200, *PROMPTS, "b" * 100])
    code, _, err = search("--prompts", file)
    assert (code, err.splitlines()) == (
        0,
        ["warning: 2 of 8 prompts are left out: they have more than 80 tokens, half of what the model has room for"],
    )
