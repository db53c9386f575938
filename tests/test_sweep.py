"""Sweeps: every quantity end to end on a tiny model, interruptions, faults, and theory beside what was measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from layerskip import DraftPlan
from layerskip.errors import InputError
from layerskip.speedup import speedup, speedup_of_rounds
from tests.checkpoints import save_tiny

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = [
    {"question_id": number, "category": "ab"[number % 2], "turns": ["Say it again " * (number % 3 + 1), "And again"]}
    for number in range(5)
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a checkpoint and questions."""
    folder = tmp_path_factory.mktemp("place")
    save_tiny(folder / "tiny")
    (folder / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    return folder


@pytest.fixture
def sweep(module_of, place, tmp_path):
    """Sweep here, in a new folder; the exit code and the folder."""

    def call(kind: str, *more: str, out: Path | None = None) -> tuple[int, Path]:
        out = out or tmp_path / "out"
        paths = ["--model", str(place / "tiny"), "--data", str(place / "data.jsonl"), "--out", str(out)]
        few = ["--dtype", "float64", "--threads", "1", "--new-tokens", "12", "--prompts", "2", "--repeats", "1"]
        try:
            return module_of("sweep").main([kind, *paths, *few, *more]), out
        except SystemExit as exit:
            return exit.code, out

    return call


def lines_of(folder: Path, kind: str | None = None) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
    return [line for line in lines if kind in (None, line["kind"])]


def figures(module_of, folder: Path) -> dict:
    return module_of("sweep_figures").figures_of(lines_of(folder))


class TestKinds:
    def check(self, module_of, out: Path, values: list[float], arms: list[str]) -> dict:
        """What is the same in all sweeps; its figures."""
        lines = lines_of(out)
        assert lines[0]["kind"] == "begin" and lines[-1]["kind"] == "end"
        for line in lines:
            assert {"commit", "torch", "dtype", "threads", "weights", "processor"} <= line["conditions"].keys()
        assert str(ROOT) not in json.dumps(lines) and "/tmp" not in json.dumps(lines)
        document = figures(module_of, out)
        assert document["values"] == values and document["arms"] == arms
        for point in document["points"]:
            assert point["error"] is None and point["turns"] == 2
            low, middle, high = point["speedup"]
            assert 0 < low <= middle <= high
            if point["arm"] == "plain":
                assert (low, middle, high) == (1.0, 1.0, 1.0)
        text = (out / "sweep.md").read_text()
        for name in arms:
            assert f"{name} ÷ plain" in text
        for name in ("sweep.png", "sweep.svg", "theory.png"):
            assert (out / name).stat().st_size > 5000, name
        assert [line["error"] for line in lines if line["kind"] == "costs"] == [None] * 2 * len(values)
        return document

    def test_batch(self, sweep, module_of, capsys):
        """In float64, so that a row says the same in every batch and under every arm."""
        code, out = sweep("batch", "--values", "3,1,8", "--exit", "2", "--arms", "exit,lookup,hf-greedy")
        assert code == 0
        assert "| batch | prompt, tokens | cache, MB |" in capsys.readouterr().out
        document = self.check(module_of, out, [1, 3, 8], ["exit", "lookup", "hf-greedy"])
        for point in document["points"]:
            assert point["rows"] == 2 * point["value"] == point["identical"]
        assert [each["repeats_text"] for each in document["done"]] == [False, False, True]  # of five questions
        assert document["done"][2]["cache_bytes"] == 8 * document["done"][0]["cache_bytes"]
        assert "stands twice in the prompts, at 8." in (out / "sweep.md").read_text()

    def test_context(self, sweep, module_of):
        code, out = sweep("context", "--values", "16,100", "--exit", "2", "--arms", "exit")
        assert code == 0
        document = self.check(module_of, out, [16, 100], ["exit"])
        assert {line["value"]: line["prompt_tokens"] for line in lines_of(out, "run")} == {16: 16, 100: 100}
        cells = [line["cells"] for line in lines_of(out, "costs") if line["what"] == "passes"]
        assert [each[0]["context"] for each in cells] == [22, 106]
        assert document["cache_takes_over"] > 0
        assert "as many bytes of the cache as of weights at a context of" in (out / "sweep.md").read_text()

    def test_temperature(self, sweep, module_of):
        code, out = sweep("temperature", "--values", "0,0.7", "--exit", "2", "--arms", "exit,lookup")
        assert code == 0
        document = self.check(module_of, out, [0, 0.7], ["exit", "lookup"])
        points = {(point["arm"], point["value"]): point for point in document["points"]}
        assert points["lookup", 0]["overlap"] is None
        assert 0 <= points["exit", 0]["overlap"] <= 1 and 0 < points["exit", 0.7]["overlap"] < 1

    def test_drafts(self, sweep, module_of):
        """Without the governor each round drafts as many as it may, but for what is left of the answer."""
        code, out = sweep("drafts", "--values", "1,3", "--exit", "2", "--arms", "exit,combined")
        assert code == 0
        document = self.check(module_of, out, [1, 3], ["exit", "combined"])
        for point in document["points"]:
            if point["arm"] == "exit":
                assert len(point["acceptance_by_offset"]) <= point["value"]
                assert 1 <= point["tau"] <= 1 + point["value"]
                assert point["tau"] == pytest.approx(point["tokens_per_round"], rel=0.3)
        settings = {line["value"]: line["settings"] for line in lines_of(out, "arm") if line["arm"] == "combined"}
        assert settings[3] == {"num_draft_tokens": 3, "lookup_tokens": 3}

    @pytest.mark.parametrize("geometry", ["tiny", "tiny-moe"])
    def test_random_weights_are_given_random_ids(self, geometry, module_of, tmp_path):
        """What is planted is found: everything is accepted."""
        command = ["drafts", "--model", geometry, "--exit", "2", "--agreement", "1", "--arms", "exit", "--values", "4"]
        few = ["--context", "12", "--new-tokens", "11", "--prompts", "1", "--repeats", "1", "--threads", "1"]
        assert module_of("sweep").main([*command, *few, "--dtype", "float64", "--out", str(tmp_path / "out")]) == 0
        begin = lines_of(tmp_path / "out", "begin")[0]
        assert begin["options"]["data"] == "random ids" and begin["options"]["agreement"] == 1
        (point,) = (each for each in figures(module_of, tmp_path / "out")["points"] if each["arm"] == "exit")
        assert point["tokens_per_round"] == 5 and point["overlap"] == 1.0
        assert point["identical"] == 1

    def test_as_a_person_would_run_it(self, place, tmp_path):
        command = [sys.executable, "-m", "experiments.sweep", "batch", "--model", str(place / "tiny"), "--data",
                   str(place / "data.jsonl"), "--out", str(tmp_path / "out"), "--values", "1,2", "--prompts", "1",
                   "--repeats", "1", "--threads", "1", "--new-tokens", "10"]  # fmt: skip
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        assert done.returncode == 0, done.stderr
        assert "lookup ÷ plain" in done.stdout and done.stdout.endswith("sweep.png\n")


class TestFaults:
    def test_an_arm_that_fails_is_a_row_that_says_so(self, sweep, extra_arm, module_of):
        """At one value; at the others it runs."""

        def before(prompts, new_tokens):
            if len(prompts) == 2 and new_tokens == 12:
                raise RuntimeError("out of luck\nand more")

        extra_arm(before)
        code, out = sweep("batch", "--values", "1,2,3", "--arms", "extra,hf-lookup")
        assert code == 0
        points = {(point["arm"], point["value"]): point for point in figures(module_of, out)["points"]}
        assert [points["extra", value]["error"] for value in (1, 2, 3)] == [None, "RuntimeError: out of luck", None]
        assert points["hf-lookup", 1]["error"] is None and points["hf-lookup", 2]["error"].startswith("ValueError: ")
        assert "failed: RuntimeError: out of luck |" in (out / "sweep.md").read_text()

    def test_where_plain_decoding_fails_the_value_is_left_out(self, sweep, module_of, monkeypatch):
        rows, arms = module_of("compare_arms"), module_of("arms")
        right = rows.ARMS["plain"].make

        def make(shop, name, settings):
            arm = right(shop, name, settings)

            def call(prompts, new_tokens):
                if len(prompts) == 2:
                    raise RuntimeError("broken")
                return arm.call(prompts, new_tokens)

            return arms.Arm(name, call, arm.settings)

        monkeypatch.setitem(rows.ARMS, "plain", module_of("arm_rows").ArmRow("plain", make))
        code, out = sweep("batch", "--values", "1,2", "--arms", "lookup")
        assert code == 0
        assert figures(module_of, out)["left_out"] == {2: "plain decoding failed: RuntimeError: broken"}
        assert "| 2 | plain decoding failed: RuntimeError: broken |" in (out / "sweep.md").read_text()

    def test_interrupted_and_resumed(self, sweep, extra_arm, module_of, capsys):
        calls = []

        def before(prompts, new_tokens):
            calls.append(len(prompts))
            if calls.count(2) == 4 and len(calls) < 9:  # twice to warm up, once, and then no more
                raise KeyboardInterrupt

        extra_arm(before)
        words = ("batch", "--values", "1,2", "--arms", "lookup,extra")
        code, out = sweep(*words)
        assert code == 130
        assert "interrupted: the lines are kept, and --resume goes on behind them" in capsys.readouterr().err
        file, before_it = out / "runs.jsonl", lines_of(out)
        file.write_text(file.read_text() + '{"kind": "run", "arm": "ext')
        assert sweep(*words)[0] == 2
        assert "has begun already; expected a new folder. Pass --resume" in capsys.readouterr().err
        assert sweep(*words, "--resume")[0] == 0
        lines = lines_of(out)
        assert lines[: len(before_it)] == before_it and lines[-1]["kind"] == "end"
        keys = [tuple(line[name] for name in ("value", "arm", "prompt", "repeat"))
                for line in lines if line["kind"] == "run"]  # fmt: skip
        assert len(keys) == len(set(keys)) == 2 * 3 * 2
        assert sweep(*words, "--resume")[0] == 0  # there is nothing left to do
        assert lines_of(out) == lines
        assert sweep(*words, "--resume", "--new-tokens", "11")[0] == 2
        assert "got --resume with new_tokens 11 of a comparison with 12; expected the same" in capsys.readouterr().err

    def test_a_report_is_made_from_lines_only(self, sweep, module_of, tmp_path):
        out = sweep("batch", "--values", "1,2", "--arms", "lookup")[1]
        moved = tmp_path / "moved"
        moved.mkdir()
        (moved / "runs.jsonl").write_bytes((out / "runs.jsonl").read_bytes())
        assert module_of("sweep").main(["batch", "--report-from", str(moved)]) == 0
        for name in ("sweep.md", "sweep.png", "theory.svg"):
            assert (moved / name).read_bytes() == (out / name).read_bytes(), name

    def test_a_value_that_takes_too_long_is_left_out_or_cut(self, sweep, extra_arm, module_of):
        """A turn of a row that takes half a second: the second value would need one."""
        time = module_of("sweeping").time

        def before(prompts, new_tokens):
            if new_tokens == 12:
                time.sleep(0.5)

        extra_arm(before)
        code, out = sweep("batch", "--values", "1,40", "--arms", "extra", "--budget", "0.7", "--repeats", "4")
        assert code == 0
        document = figures(module_of, out)
        (done,) = document["done"]
        assert done["turns"] == 1 < done["of"] == 8
        assert "a turn of all arms would take about" in document["left_out"][40]
        assert "Fewer turns than asked for, by --budget, at 1 (1 of 8)." in (out / "sweep.md").read_text()

    def test_usual_values_that_do_not_fit_are_left_out(self, sweep, module_of, monkeypatch):
        """The tiny model has 160 positions."""
        code, out = sweep("context", "--arms", "lookup")
        assert code == 0
        document = figures(module_of, out)
        assert document["values"] == [128] and list(document["left_out"]) == [256, 512, 1024, 2048, 4096, 8192]
        assert document["left_out"][256] == "256 tokens and 12 new ones are more than the model's 160 positions"

    def test_memory_is_looked_at_before(self, sweep, module_of, monkeypatch, capsys):
        monkeypatch.setattr(module_of("sweeping"), "available_bytes", lambda device: 200_000)
        assert sweep("batch", "--values", "1,2,64", "--arms", "lookup")[0] == 2
        assert "got a sweep of batch with the value 64, but its cache takes 0.0 GB" in capsys.readouterr().err
        code, out = sweep("batch", "--arms", "lookup")
        assert code == 0
        assert 128 in figures(module_of, out)["left_out"]

    @pytest.mark.parametrize(
        ("kind", "more", "message"),
        [
            ("batches", [], "batches"),
            ("batch", ["--values", "0"], "got --values with '0' for a sweep of batch; expected integers from 1"),
            ("batch", ["--values", "1,x"], "got --values with 'x'"),
            ("batch", ["--values", "2.5"], "got --values with '2.5'"),
            ("drafts", ["--values", "33"], "expected integers from 1 to 32"),
            ("temperature", ["--values", "-0.1"], "expected numbers from 0 to 10"),
            ("temperature", ["--values", "nan"], "got --values with 'nan'"),
            ("context", ["--values", "155"], "155 tokens and 12 new ones are more than the model's 160 positions"),
            ("batch", ["--context", "150"], "150 tokens and 12 new ones are more than"),
            ("batch", ["--batch", "4"], "got --batch for a sweep of batch; expected --values"),
            ("batch", ["--arms", "lookpu"], "got 'lookpu'; expected some of plain, self"),
            ("batch", ["--arms", "self"], "got the arm self without --plan; expected one."),
            ("drafts", ["--arms", "hf-greedy"], "got the arm hf-greedy for a sweep of drafts, which has no number"),
            ("drafts", ["--governor", "measured"], "got --governor measured for a sweep of drafts"),
            ("batch", ["--budget", "-3"], "got '-3'; expected a number from 0"),
            ("batch", ["--set", "lookpu.a=3"], "got --set for the arm 'lookpu'"),
            ("batch", ["--model", "tiny"], "got --data for the random weights tiny, which have no tokenizer"),
            ("batch", ["--agreement", "0.5"], "got an agreement to plant into the checkpoint"),
            ("batch", ["--exit", "9", "--arms", "exit"], "got an exit at layer 9"),
            ("batch", ["--new-tokens", "155"], "got 5 questions of more than 5 tokens"),
            ("batch", ["--device", "nowhere"], "got --device nowhere"),
            ("batch", ["--data", "no.jsonl"], "got the prompts 'no.jsonl', which cannot be read"),
            ("batch", ["--report-from", "nowhere"], "got nowhere, whose runs.jsonl cannot be read"),
            ("batch", ["--valeus", "2"], "got the unknown option --valeus. Did you mean '--values'?"),
        ],
    )
    def test_what_is_refused(self, kind, more, message, sweep, capsys):
        code, out = sweep(kind, *more)
        printed = capsys.readouterr()
        assert code == 2 and message in printed.err and printed.err.startswith("error: ")
        assert not (out / "runs.jsonl").exists()

    def test_what_must_be_given(self, module_of, place, tmp_path, capsys):
        with pytest.raises(SystemExit):
            module_of("sweep").main(["batch", "--model", "x"])
        assert "got no --out; expected --model and --out" in capsys.readouterr().err
        assert module_of("sweep").main(["batch", "--model", str(place / "tiny"), "--out", str(tmp_path / "o")]) == 2
        assert "got no --data for the checkpoint tiny; expected questions in words." in capsys.readouterr().err

    def test_lines_that_are_no_sweeps(self, module_of):
        with pytest.raises(InputError, match="got lines that are no sweep's"):
            module_of("sweep_figures").figures_of([{"kind": "begin", "options": {}}])


class TestFigures:
    def test_rounds_of_one_length_are_the_formula(self):
        rates = [0.7, 0.5, 0.4]
        assert speedup_of_rounds(rates, {3: 5}, 0.1, 1.2) == pytest.approx(speedup(rates, 3, 0.1, 1.2))

    def test_rounds_of_several_lengths_by_hand(self):
        """Two plain steps and one round of one draft: (1 + 1 + 1.5) tokens in 1 + 1 + (0.2 + 1.1)."""
        found = speedup_of_rounds(0.5, {0: 2, 1: 1}, 0.2, lambda drafts: 1 + 0.1 * drafts)
        assert found == pytest.approx(3.5 / 3.3)

    def test_crossings(self, module_of):
        crossings = module_of("sweep_figures").crossings
        assert crossings([1, 2, 4], [1.5, 1.2, 1.1], True) == []
        assert crossings([], [], True) == []
        (found,) = crossings([1, 4], [1.5, 0.5], True)
        assert found == {"value": pytest.approx(2.0), "falls": True}
        falls, rises = crossings([0, 1, 2], [1.25, 0.75, 1.25], False)
        assert (falls["value"], falls["falls"], rises["value"], rises["falls"]) == (0.5, True, 1.5, False)

    def test_verify_cost_between_and_beyond_what_was_timed(self, module_of):
        cells = [{"width": width, "pass_s": seconds} for width, seconds in ((4, 4.0), (1, 2.0), (2, 2.4))]
        cost = module_of("sweep_figures").verify_cost_of(cells)
        assert [cost(drafts) for drafts in (0, 1, 2, 3, 4)] == pytest.approx([1.0, 1.2, 1.6, 2.0, 2.4])

    def test_expected_turns(self, module_of):
        kinds = module_of("sweep_kinds")
        expected = kinds.expected_turn_s
        batch, drafts = kinds.KINDS["batch"], kinds.KINDS["drafts"]
        assert expected(batch, [], 1) is None
        assert expected(batch, [(2, 3.0)], 4) == 6.0
        assert expected(batch, [(1, 3.0), (2, 4.0)], 8) == 10.0
        assert expected(batch, [(1, 3.0), (2, 2.0)], 8) == 2.0
        assert expected(drafts, [(1, 3.0), (2, 2.0)], 8) == 2.0

    def test_share_within_the_band(self, module_of):
        share_within = module_of("theory_picture").share_within
        assert share_within([]) is None
        assert share_within([(1.0, 1.14), (1.0, 0.86), (1.0, 1.2), (2.0, 1.6)]) == 0.5


class TestPrompts:
    def test_batches_are_of_different_prompts_as_long_as_there_are_some(self, module_of, place):
        texts, setup = self.texts(module_of, place), module_of("sweep_kinds").Setup
        first, second = texts.calls(setup(batch=2), 2)
        assert len({tuple(row) for row in first.rows + second.rows}) == 3  # two of the questions ask the same
        assert not first.repeats_text
        (many,) = texts.calls(setup(batch=12), 1)
        assert many.rows[:5] == many.rows[5:10] and many.repeats_text

    def test_a_prompt_ends_as_it_is_and_is_led_by_others(self, module_of, place):
        texts, setup = self.texts(module_of, place), module_of("sweep_kinds").Setup
        (short,) = texts.calls(setup(), 1)
        (call,) = texts.calls(setup(context=60), 1)
        assert len(call.rows[0]) == 60 and call.rows[0][-len(short.rows[0]) :] == short.rows[0]
        assert not call.repeats_text
        (call,) = texts.calls(setup(context=1000), 1)
        assert len(call.rows[0]) == 1000 and call.repeats_text
        (call,) = texts.calls(setup(context=3), 1)
        assert call.rows[0] == short.rows[0][-3:]

    def texts(self, module_of, place):
        from transformers import AutoTokenizer

        questions = module_of("questions").read_questions(place / "data.jsonl")
        return module_of("sweep_prompts").Texts(questions, AutoTokenizer.from_pretrained(place / "tiny"), 100)


def test_the_simulator_takes_the_passes_of_a_sweep(sweep, module_of, place, tmp_path, capsys):
    code, out = sweep("batch", "--values", "1,2", "--arms", "lookup")
    assert code == 0
    common = ["--check", "--check-lines", str(out), "--fitted-batches", "1", "--results", str(tmp_path / "results")]
    check = [str(place / "tiny"), *common, "--threads", "1"]
    capsys.readouterr()
    assert module_of("simulate").main([*check, "--dtype", "float64"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {cell["batch"] for cell in document["cells"]} == {1, 2}
    assert document["conditions"] == lines_of(out)[0]["conditions"]
    assert module_of("simulate").main([*check, "--dtype", "float32"]) == 2
    assert "timed passes of tiny in float64; expected those of tiny in float32" in capsys.readouterr().err


def test_a_tree_is_predicted_too(sweep, module_of, tmp_path):
    """Siblings widen a pass; passes as wide are timed."""
    DraftPlan.exit(2, num_siblings=2, num_draft_tokens=3).save(tmp_path / "plan.json")
    code, out = sweep("drafts", "--values", "3", "--arms", "self", "--plan", str(tmp_path / "plan.json"))
    assert code == 0
    (point,) = (each for each in figures(module_of, out)["points"] if each["arm"] == "self")
    assert point["error"] is None and point["predicted"] > 0
    (passes,) = (line for line in lines_of(out, "costs") if line["what"] == "passes")
    assert max(cell["width"] for cell in passes["cells"]) >= 6
