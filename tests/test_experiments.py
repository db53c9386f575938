"""Experiments run to their end on a tiny checkpoint, and their last line is a result that says how it came about."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from layerskip import DraftPlan
from layerskip.models.loading import quiet
from tests.tiny_models import TINY_CONFIGS
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
