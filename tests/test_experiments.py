"""Experiments run to their end on a tiny checkpoint, and their last line is a result that says how it came about."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import layerskip
from layerskip import DraftPlan
from layerskip.models.loading import quiet
from tests.checkpoints import save_tiny
from tests.tiny_models import TINY_CONFIGS, VOCAB_SIZE
from tests.toy_tokenizer import character_tokenizer

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = ["Why is the sky blue", "Who wrote it", "Say a word"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """As deep as the reference checkpoint, since the drafts are made for its depth."""
    folder = tmp_path_factory.mktemp("deep")
    with quiet():
        shape = TINY_CONFIGS["llama"].to_dict() | {"num_hidden_layers": 30, "initializer_range": 0.02}
        LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)
        character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def run(checkpoint, tmp_path):
    """Run the program with these arguments; return its tables and the document of its last line."""

    def call(*arguments: str) -> tuple[str, dict]:
        data, results = tmp_path / "data.jsonl", tmp_path / "results" / "results.jsonl"
        data.write_text("".join(json.dumps({"turns": [question]}) + "\n" for question in QUESTIONS))
        paths = ["--model", str(checkpoint), "--data", str(data), "--results", str(results)]
        options = [*paths, "--dtype", "float64", "--threads", "1", *arguments]
        command = [sys.executable, "-m", "experiments.untrained_drafts", *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        tables, _, last = done.stdout.rstrip("\n").rpartition("\n")
        assert results.read_text().splitlines() == [last]
        return tables, json.loads(last)

    return call


def test_every_mode_says_its_plans_and_settings(run):
    tables, document = run("--prompts", "2", "--new-tokens", "4", "--num-draft-tokens", "2")
    assert document["options"] == {
        "num_draft_tokens": 2, "new_tokens": 4, "modes": ["greedy", "maximal", "invariant"],
    }  # fmt: skip
    assert document["conditions"]["prompts"] == 2
    for mode in document["options"]["modes"]:
        rows = document[mode]
        assert f"{mode}, 2 prompts, 4 tokens" in tables
        assert [row["plan"] is None for row in rows] == [True] + [False] * 6
        assert all(DraftPlan.from_dict(row["plan"]).num_draft_tokens == 2 for row in rows[1:])
        assert {row["settings"]["max_new_tokens"] for row in rows} == {4}
        assert {row["settings"]["do_sample"] for row in rows} == {mode != "greedy"}
        if mode != "maximal":  # in float64 greedy and invariant outputs do not depend on the draft
            assert [row["equal"] for row in rows] == [2] * 7


def test_one_mode_on_one_prompt(run):
    """Quartiles of one ratio exist too: they are found missing only when all the work is done."""
    tables, document = run("--prompts", "1", "--new-tokens", "3", "--modes", "invariant")
    assert "greedy" not in tables
    assert "maximal" not in document
    for row in document["invariant"]:
        low, middle, high = row["ratio_to_plain_quartiles"]
        assert low == middle == high


def test_no_tokens_to_compare(run):
    """The first token comes out of the prompt's pass: there is no round, and so no ratio."""
    tables, document = run("--prompts", "1", "--new-tokens", "1", "--modes", "greedy")
    assert {row["ratio_to_plain_quartiles"] for row in document["greedy"]} == {None}
    assert "| – |" in tables


def run_program(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"experiments.{name}", "--threads", "1", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture
def main_of(module_of):
    """The `main` of a program, to be called here: a process of its own takes seconds to say no."""
    return lambda name: module_of(name).main


@pytest.fixture
def run_bench(tmp_path):
    """Run the benchmark to its end; return its tables and the document of its last line."""

    def call(*arguments: str) -> tuple[str, dict]:
        results = tmp_path / "results" / "bench.jsonl"
        done = run_program("bench", "--dtype", "float64", "--results", str(results), *arguments)
        assert done.returncode == 0, done.stderr
        tables, _, last = done.stdout.rstrip("\n").rpartition("\n")
        assert results.read_text().splitlines() == [last]
        return tables, json.loads(last)

    return call


class TestBench:
    def test_every_arm_on_random_weights(self, run_bench):
        tables, document = run_bench(
            "--model", "tiny", "--exit", "2", "--agreement", "0.9", "--context", "20", "--new-tokens", "12",
            "--prompts-per-category", "2", "--ungoverned",
        )  # fmt: skip
        assert document["conditions"]["dtype"] == "float64"
        assert document["conditions"]["prompts"] == 2
        assert document["not_run"] == {}
        arms = {row["arm"]: row for row in document["arms"]}
        assert list(arms) == [
            "plain", "self", "self, ungoverned", "lookup", "lookup, ungoverned", "combined", "combined, ungoverned",
            "hf-greedy", "hf-early-exit", "hf-lookup",
        ]  # fmt: skip
        for name, row in arms.items():
            assert row["all"]["new_tokens"] == 24, name
            assert row["all"]["identical"] == row["all"]["calls"] == 2, name
            assert f"| {name} |" in tables
        assert arms["plain"]["all"]["ratio_to_plain"] == [1, 1, 1]
        assert arms["self, ungoverned"]["all"]["tokens_per_round"] > 1.5
        assert arms["hf-early-exit"]["all"]["tokens_per_round"] > 1.2
        assert document["draft_costs"]["by_parameters"] < 1
        assert set(document["pass_costs"]["in_plain_steps"]) == {"1", "2", "3", "4", "6", "8"}
        assert 0 < document["weights"]["share_of_bandwidth"] < 1
        for given in ("tmp", str(ROOT)):
            assert given not in json.dumps(document)

    def test_words_of_several_categories_in_batches(self, run_bench, checkpoint, tmp_path):
        data = tmp_path / "data.jsonl"
        categories = ["writing", "math", "writing", "rag"]
        lines = [{"category": name, "turns": [f"{QUESTIONS[0]} {index}"]} for index, name in enumerate(categories)]
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        tables, document = run_bench(
            "--model", str(checkpoint), "--data", str(data), "--batch", "2", "--new-tokens", "9",
            "--prompts-per-category", "1", "--repeats", "2", "--skip-attention", "3", "--arms", "self", "hf-greedy",
        )  # fmt: skip
        plain, drafting, theirs = document["arms"]
        assert list(plain["categories"]) == ["writing", "math", "rag"]
        assert drafting["multi_turn"]["calls"] == 4  # two of its categories, twice
        assert drafting["over_tasks"] is None  # most of the six are missing
        assert drafting["all"]["identical"] == theirs["all"]["identical"] == 6
        assert set(document["not_run"]) == {"hf-early-exit", "hf-lookup"}
        assert "Not run: hf-lookup (transformers drafts for one row only)" in tables

    def test_answers_too_short_to_be_timed_are_counted(self, run_bench):
        _, document = run_bench("--model", "tiny", "--new-tokens", "5", "--context", "9", "--arms", "lookup")
        for row in document["arms"]:
            assert row["all"]["too_short"] == row["all"]["calls"] == 3
            assert row["all"]["ratio_to_plain"] is None
            assert row["over_categories"] is None

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--model", "no/such/folder"], "error: got "),
            (["--model", "tiny", "--exit", "9"], "got an exit at layer 9 on a model of 4 layers"),
            (["--model", "tiny", "--agreement", "2"], "got agreement=2.0; expected a number from 0"),
            (["--model", "tiny", "--data", "x.jsonl"], "got --data for random weights"),
            (["--model", "tiny", "--arms", "self"], "got the arm self, which cannot be run: no plan"),
            (["--model", "tiny", "--num-draft-tokens", "2"], "got --num-draft-tokens without a draft"),
            (["--model", "tiny", "--device", "nowhere"], "got --device nowhere; expected a device of this machine"),
            (["--model", "tiny", "--plan", "x.json", "--exit", "2"], "got --plan beside --exit"),
            (["--model", "tiny", "--contxt", "2"], "got the unknown option --contxt. Did you mean '--context'?"),
        ],
    )
    def test_what_is_refused(self, arguments, message, main_of, capsys):
        try:
            code = main_of("bench")([*arguments, "--threads", "1"])
        except SystemExit as exit:
            code = exit.code
        assert code == 2
        printed = capsys.readouterr()
        assert message in printed.err.splitlines()[0]
        assert printed.err.startswith("error: ")
        assert printed.out == ""

    def test_means_over_categories_and_tasks(self, module_of):
        """Medians of ratios by category, geometric means over them; the chat categories are one task of six."""
        arms, report, subjects = map(module_of, ("arms", "report", "subjects"))
        speeds = {"writing": 1, "math": 4, "translation": 2, "summarization": 4, "qa": 2, "math_reasoning": 4, "rag": 1}
        prompts = [subjects.Prompt(name, [[1]]) for name in speeds for _ in range(3)]

        def arm(name, speed_of):
            runs = [arms.Run([[0] * 9], 0.1, 8 / speed_of(prompt.category), 8, 8, 1.0) for prompt in prompts]
            return arms.Arm(name, lambda rows, new_tokens: None, {}, runs)

        row = report.summarise(arm("fast", speeds.get), arm("plain", lambda name: 1), prompts)
        assert row["categories"]["math"]["ratio_to_plain"] == pytest.approx([4, 4, 4])
        assert row["multi_turn"]["ratio_to_plain"][1] == pytest.approx(2.5)
        assert row["over_categories"] == pytest.approx((1 * 4 * 2 * 4 * 2 * 4 * 1) ** (1 / 7))
        assert row["over_tasks"] == pytest.approx((2.5 * 2 * 4 * 2 * 4 * 1) ** (1 / 6))

    def test_prompts_that_come_with_it(self):
        """Two of each of Spec-Bench's categories, in its format."""
        lines = [json.loads(line) for line in (ROOT / "experiments/prompts.jsonl").read_text("utf-8").splitlines()]
        categories = [line["category"] for line in lines]
        assert len(set(categories)) == 13
        assert all(categories.count(name) == 2 for name in categories)

    def test_make_runs_it(self):
        command = ["make", "--dry-run", "bench", "DATA=a b.jsonl"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "-m experiments.bench" in done.stdout


class TestGpuCheck:
    def test_every_step_on_a_cpu(self, tmp_path):
        results = tmp_path / "gpu.jsonl"
        done = run_program("gpu_check", "--device", "cpu", "--families", "qwen3", "--results", str(results))
        tables, _, last = done.stdout.rstrip("\n").rpartition("\n")
        assert done.returncode == 0, tables
        assert results.read_text().splitlines() == [last]
        document = json.loads(last)
        assert document["conditions"]["device"] == "cpu"
        assert document["failures"] == []
        assert document["skipped"] == {}
        outcome = document["exactness"]["families"]["qwen3"]
        assert outcome["cases"] == 32
        assert [name.split(":")[0] for name in outcome["executions"]] == ["static"]
        assert set(document["speed"]["tiny"]) == {"batch 1", "batch 8"}

    @pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where it is missing")
    def test_without_a_gpu_it_says_so(self, main_of, capsys):
        assert main_of("gpu_check")([]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("error: got no CUDA device; expected one.")
        assert len(printed.err.splitlines()) == 1


class TestStepProfile:
    def test_every_form_of_the_weights(self, tmp_path):
        results, checkpoint = tmp_path / "profile.jsonl", save_tiny(tmp_path / "tiny")
        arguments = ("--model", str(checkpoint), "--dtype", "float32", "--threads", "1", "--repeats", "2")
        done = run_program("step_profile", *arguments, "--results", str(results))
        assert done.returncode == 0, done.stderr
        document = json.loads(results.read_text())
        assert json.loads(done.stdout.splitlines()[-1]) == document
        assert list(document["step_s"]) == [
            "transformers", "weights as they are", "fused", "packed", "packed, huge pages",
        ]  # fmt: skip
        assert min(document["step_s"].values()) > 0
        assert any("_linear_pointwise" in row["operator"] for row in document["operators"]["packed"])


class TestSearchPrograms:
    """What searches rest on, run to their end on random weights."""

    def test_predicted_costs_stand_beside_measured_ones(self, tmp_path):
        results = tmp_path / "cost_model.jsonl"
        done = run_program("cost_model", "--model", "tiny", "--plans", "3", "--rounds", "2", "--context", "20",
                           "--dtype", "float32", "--results", str(results))  # fmt: skip
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout.splitlines()[-1])
        assert len(document["rows"]) == 3
        for row in document["rows"]:
            for what in ("draft_ratio", "verify_ratio"):
                assert 0 < row[what]["predicted"] and 0 < row[what]["measured"]
        assert results.read_text().splitlines() == done.stdout.splitlines()[-1:]

    def test_samplers_are_compared_on_the_same_starts(self, tmp_path):
        done = run_program("samplers", "--model", "tiny", "--agreement", "1", "--positions", "32", "--trials", "25",
                           "--dtype", "float32", "--results", str(tmp_path / "samplers.jsonl"))  # fmt: skip
        assert done.returncode == 0, done.stderr
        rows = json.loads(done.stdout.splitlines()[-1])["rows"]
        assert set(rows) == {"elite", "tpe", "gp", "nsga2", "random"}
        for row in rows.values():
            (best,) = row["best"]
            assert 1 <= len(best) <= 25 and best == sorted(best)


@pytest.fixture
def trained(tmp_path):
    """A plan that was trained for a moment, and its checkpoint."""
    from layerskip.training import ExitSettings, TrainingTexts, train_exit

    checkpoint = save_tiny(tmp_path / "tiny")
    model = layerskip.load(str(checkpoint), dtype="float32")
    tokens = np.random.default_rng(0).integers(3, VOCAB_SIZE, (40, 32)).astype(np.int32)
    settings = ExitSettings(
        tokens=5120, batch_tokens=320, vocabulary_size=40, precision="float32", evaluate_every=4, held_out_rows=4
    )
    train_exit(model, TrainingTexts(tokens, np.ones_like(tokens, dtype=bool)), tmp_path / "jump", settings)
    return checkpoint, tmp_path / "jump" / "plan.json"


def test_training_curves(main_of, trained, tmp_path, capsys):
    checkpoint, plan = trained
    words = ["--model", str(checkpoint), "--dtype", "float32", "--threads", "1", "--results", str(tmp_path / "r.jsonl")]
    assert main_of("training_curve")([str(plan), "--out", str(tmp_path / "a.png"), *words]) == 0
    out = capsys.readouterr().out
    assert "| jump | 5,120 |" in out and (tmp_path / "a.png").stat().st_size > 1000
    (row,) = json.loads((tmp_path / "r.jsonl").read_text())["rows"]
    assert [each["tokens"] for each in row["points"]] == [1280, 2560, 3840, 5120]
    layerskip.DraftPlan.exit(2).save(tmp_path / "untrained.json")
    assert main_of("training_curve")([str(tmp_path / "untrained.json"), *words]) == 2
    assert "without a training curve" in capsys.readouterr().err


def test_what_a_curve_promises(module_of):
    curve = module_of("training_curve")
    assert curve.predicted([0.5], 0.1, 0.0)["speedup"] == pytest.approx((1 + 0.5 + 0.25) / 1.2)
    assert curve.predicted([0.5, 0.0], 0.25, 0.0) == {
        "num_draft_tokens": 1,
        "tokens_per_round": 1.5,
        "speedup": pytest.approx(1.2),
    }
    points = [{"tokens": 10**power, "speedup": 1 + power / 100} for power in range(3, 9)]
    assert curve.tokens_for(points, 1.1) == pytest.approx(1e10, rel=1e-6)
    assert curve.tokens_for([{"tokens": 10, "speedup": 1.0}] * 4, 1.1) is None
    assert curve.tokens_for([{"tokens": each, "speedup": 1.0} for each in (10, 20, 30, 40)], 1.1) is None


def test_the_benchmark_takes_a_trained_plan_and_a_temperature(run_bench, trained, tmp_path):
    checkpoint, plan = trained
    lines = [json.dumps({"category": "qa", "turns": [question]}) + "\n" for question in QUESTIONS]
    (tmp_path / "data.jsonl").write_text("".join(lines))
    words = ["--model", str(checkpoint), "--plan", str(plan), "--new-tokens", "10"]
    words += ["--data", str(tmp_path / "data.jsonl")]
    tables, document = run_bench(*words, "--dtype", "float32", "--temperature", "0.7", "--arms", "self", "combined")
    assert "sampled at temperature 0.7" in tables and document["options"]["temperature"] == 0.7
    assert document["draft_costs"]["in_plain_steps"]["draft"] > 0


def test_the_table_of_families_counts_what_passed(tmp_path):
    """By architecture; a variant's name may contain another's."""
    from experiments.family_table import outcomes, table
    from layerskip import InputError

    parity, everywhere = "test_equals_transformers_however_the_text_is_cut", "test_every_family_plan_and_draft_length"
    cases = [
        f'<testcase name="{parity}[one pass-gemma]"/>',
        f'<testcase name="{parity}[one pass-gemma-old]"><failure/></testcase>',
        f'<testcase name="{everywhere}[gemma-exit 2]"/>',
        f'<testcase name="{everywhere}[gemma-mlp]"><skipped/></testcase>',
        '<testcase name="test_other[gemma]"/>',
    ]
    file = tmp_path / "tests.xml"
    file.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    found = outcomes(file, {"gemma": "GemmaForCausalLM", "gemma-old": "OldGemmaForCausalLM"})
    assert table(found).splitlines()[2:] == [
        "| Gemma | ✓ 1 | ✓ 1 | – | – | – |",
        "| OldGemma | 1 of 1 fail | – | – | – | – |",
    ]
    file.write_text("no report")
    with pytest.raises(InputError, match="no report of tests"):
        outcomes(file, {})
