"""The roofline simulation: cases computed by hand, what must rise or fall, experts, the fit, and the program itself."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import layerskip
from layerskip.models.inspection import inspect_model
from layerskip.speedup import batch_verify_cost
from tests.tiny_models import tiny_model

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def roofline(module_of):
    return module_of("roofline")


@pytest.fixture
def llama_1b(module_of):
    return module_of("simulate").describe("llama-1b", "bfloat16")


@pytest.fixture
def moe():
    return inspect_model(tiny_model("mixtral"))


class TestPassTime:
    def test_by_hand(self, roofline):
        """One number a second, one FLOP a second's hundredth: everything can be counted."""
        shape = replace(inspect_model(tiny_model("llama")), dtype="bfloat16")
        hardware = roofline.Hardware("slow", flops_per_s=100.0, bytes_per_s=2.0, kernel_s=3.0, pass_s=5.0)
        blocks = sum(shape.attention_parameters) + sum(shape.mlp_parameters)
        found = roofline.pass_time(shape, hardware, batch=2, tokens=3, context=7)
        assert found.blocks_s == pytest.approx(blocks)  # 12 FLOP a number: bytes take longer
        layers, heads, kv_heads, head_dim, visible = 4, 4, 2, 8, 10
        assert found.cache_s == pytest.approx(layers * 2 * 2 * visible * kv_heads * head_dim)  # 2 bytes at 2 a second
        assert found.head_s == pytest.approx(shape.head_parameters + 2 * 6 * shape.vocab_size)
        assert found.kernels_s == pytest.approx(5 + 3 * (layers * 10 + 3))
        assert found.total_s == found.blocks_s + found.cache_s + found.head_s + found.kernels_s

        many = roofline.pass_time(shape, hardware, batch=100, tokens=3, context=7)
        assert many.blocks_s == pytest.approx(2 * blocks * 300 / 100)  # now arithmetic does
        slow = replace(hardware, half_rate_rows=30, attention_flops_per_s=1.0)
        assert roofline.pass_time(shape, slow, 100, 3, 7).blocks_s == pytest.approx(2 * blocks * 330 / 100)
        flops = 4 * layers * 300 * heads * head_dim * visible
        assert roofline.pass_time(shape, slow, 100, 3, 7).cache_s == pytest.approx(flops)

    def test_paths_and_heads_cost_what_they_run(self, roofline, llama_1b):
        hardware = roofline.Hardware("plain", 1e15, 1e12)
        whole = roofline.pass_time(llama_1b, hardware, 1, 1, 1)
        half = roofline.pass_time(llama_1b, hardware, 1, 1, 1, layerskip.DraftPlan.exit(8).path(16), 64_128)
        assert half.blocks_s == pytest.approx(whole.blocks_s / 2)
        assert half.head_s == pytest.approx(whole.head_s / 2)
        path = layerskip.DraftPlan.skip(attention=[3]).path(16)
        spared = whole.blocks_s - roofline.pass_time(llama_1b, hardware, 1, 1, 1, path).blocks_s
        assert spared == pytest.approx(2 * llama_1b.attention_parameters[3] / 1e12)
        # By bytes alone a draft costs what the inspection says.
        path = layerskip.DraftPlan.exit(4).path(16)
        ratio = roofline.pass_time(llama_1b, hardware, 1, 1, 1, path).total_s / whole.total_s
        assert ratio == pytest.approx(llama_1b.draft_cost(path), rel=1e-3)

    def test_trained_blocks_are_read_too(self, roofline, llama_1b):
        hardware = roofline.Hardware("plain", 1e15, 1e12)
        times = [roofline.pass_time(llama_1b, hardware, 1, 1, 1, (), None, each).blocks_s for each in (0, 50_000_000)]
        assert times == pytest.approx([0, 1e-4])

    def test_windows_bound_what_is_read(self, roofline):
        hardware = roofline.Hardware("plain", 1e15, 1e12)
        shape = inspect_model(tiny_model("mistral-window"))
        assert set(shape.windows) == {6}
        caches = [roofline.pass_time(shape, hardware, 1, 2, context).cache_s for context in (3, 5, 50)]
        assert caches[0] < caches[1] == caches[2]

    def test_it_grows_with_everything(self, roofline, llama_1b):
        hardware = roofline.ACCELERATORS["L4"].hardware("bfloat16", 0.7, 0.8)
        for vary in ("batch", "tokens", "context"):
            cells = [{"batch": 4, "tokens": 2, "context": 64} | {vary: value} for value in (1, 8, 64, 512)]
            seconds = [roofline.pass_time(llama_1b, hardware, **cell).total_s for cell in cells]
            assert seconds == sorted(seconds) and seconds[0] < seconds[-1]

    def test_the_batch_term_is_its_special_case(self, roofline, llama_1b):
        """Without caches, kernels and logits, v is the closed form of theory."""
        hardware = roofline.Hardware("plain", 1e14, 1e12)
        for batch, drafts in ((1, 7), (16, 3), (50, 3), (300, 7)):
            plain, verify = (
                roofline.pass_time(llama_1b, hardware, batch, each, 0).blocks_s for each in (1, drafts + 1)
            )
            assert verify / plain == pytest.approx(batch_verify_cost(batch, drafts, ridge_rows=100))

    def test_known_speed(self, roofline, module_of):
        """Llama-3-8B on an A100-80 at batch 1: gpt-fast publishes 94 tokens a second."""
        shape = module_of("simulate").describe("llama-8b", "bfloat16")
        hardware = roofline.ACCELERATORS["A100-80"].hardware("bfloat16", 0.7, 0.8)
        assert 1 / roofline.pass_time(shape, hardware, 1, 1, 100).total_s == pytest.approx(94, rel=0.15)


class TestExperts:
    @pytest.mark.parametrize(("experts", "chosen", "tokens"), [(8, 2, 1), (8, 2, 5), (64, 8, 16), (4, 4, 3)])
    def test_how_many_are_touched(self, roofline, experts, chosen, tokens):
        """Against 4,000 drawings: a spread of at most half of the experts, over the root of that, is 0.5 % of them."""
        scores = torch.rand(4000, tokens, experts, generator=torch.Generator().manual_seed(0))
        touched = torch.zeros(4000, experts).scatter_(1, scores.topk(chosen, -1).indices.flatten(1), 1.0)
        expected = roofline.distinct_experts(experts, chosen, tokens)
        assert touched.sum(1).mean().item() == pytest.approx(expected, rel=0.02)

    def test_one_token_reads_what_a_step_reads(self, roofline, moe):
        assert (moe.num_experts, moe.experts_per_token) == (4, 2)
        hardware = roofline.Hardware("plain", 1e15, 8.0)
        one, many = (roofline.pass_time(moe, hardware, 1, tokens, 1).blocks_s for tokens in (1, 60))
        assert one == pytest.approx(sum(moe.attention_parameters) + sum(moe.mlp_step_parameters))
        assert many == pytest.approx(sum(moe.attention_parameters) + sum(moe.mlp_parameters))

    def test_verifying_is_dearer_than_in_a_dense_model(self, roofline, moe):
        hardware = roofline.Hardware("plain", 1e15, 1.0)
        dense = inspect_model(tiny_model("llama"))
        assert (dense.num_experts, dense.experts_per_token) == (0, 0)
        ratios = [
            roofline.pass_time(shape, hardware, 1, 4, 1).blocks_s
            / roofline.pass_time(shape, hardware, 1, 1, 1).blocks_s
            for shape in (dense, moe)
        ]
        assert ratios[0] == pytest.approx(1) and ratios[1] > 1.2

    def test_arithmetic_is_that_of_the_chosen(self, roofline, moe):
        hardware = roofline.Hardware("plain", 2.0, 1e15)
        rows = 50
        expected = rows * (sum(moe.attention_parameters) + sum(moe.mlp_step_parameters))
        assert roofline.pass_time(moe, hardware, 1, rows, 1).blocks_s == pytest.approx(expected)


class TestSimulate:
    def test_what_follows_from_it(self, roofline, module_of, llama_1b):
        drafting = module_of("roofline_draft")
        hardware = roofline.ACCELERATORS["H100"].hardware("bfloat16", 0.7, 0.8)
        draft = drafting.Draft(layerskip.DraftPlan.exit(4).path(16), (0.9, 0.8), longest=5)
        row = drafting.simulate(llama_1b, hardware, draft, batch=8, context=500)
        assert row["tokens_per_s"] == pytest.approx(8 / row["plain_step_s"])
        assert row["verify_ratios"][0] == 1 and row["speedups"][0] == 1
        assert row["speedup"] == row["speedups"][row["best_draft_length"]] == max(row["speedups"])
        tau = 1 + 0.9 + 0.9 * 0.8
        assert row["speedups"][2] == pytest.approx(tau / (2 * row["draft_ratio"] + row["verify_ratios"][2]))
        free = replace(draft, cost=0.0)
        assert drafting.simulate(llama_1b, hardware, free, 8, 500)["draft_ratio"] == 0

    def test_where_it_stops_paying(self, roofline, module_of, llama_1b):
        """Where arithmetic takes over it stops; long contexts move that away; memory ends both."""
        drafting = module_of("roofline_draft")
        weak = roofline.Hardware("weak", 1e13, 1e12, memory_bytes=15e9)
        draft = drafting.Draft(layerskip.DraftPlan.exit(4).path(16), (0.6,))
        largest, ((first, last),) = drafting.paying_batches(llama_1b, weak, draft, 64)
        assert largest == 128 and first == 1 and 1 < last < 32
        largest, ((_, last_behind_long),) = drafting.paying_batches(llama_1b, weak, draft, 4096)
        assert last < last_behind_long <= largest < 128
        assert drafting.paying_batches(llama_1b, replace(weak, memory_bytes=1.0), draft, 64) == (0, [])


class TestFit:
    CELLS = [
        (batch, width, context) for batch in (1, 2, 4, 8, 16, 32) for width in (1, 3, 8) for context in (240, 1000)
    ]

    def test_it_finds_what_made_the_times(self, roofline, module_of, llama_1b):
        fitting = module_of("roofline_fit")
        truth = roofline.Hardware("t", 4e11, 1.5e10, 2e-5, half_rate_rows=6, attention_flops_per_s=8e10,
                                  cache_bytes_per_s=7e9)  # fmt: skip
        pass_s = {cell: roofline.pass_time(llama_1b, truth, *cell).total_s for cell in self.CELLS}
        found = fitting.fit(llama_1b, {cell: each for cell, each in pass_s.items() if cell[0] in (1, 4, 16)})
        ratios, seconds, predicted = fitting.compare(llama_1b, found, pass_s)
        assert ratios.to_dict()["largest"] < 0.02 and seconds.to_dict()["largest"] < 0.02
        assert found.flops_per_s == pytest.approx(truth.flops_per_s, rel=0.05)
        assert found.bytes_per_s == pytest.approx(truth.bytes_per_s, rel=0.05)
        assert set(predicted) == {cell for cell in self.CELLS if cell[1] > 1}

    def test_one_hiccup_does_not_move_it(self, roofline, module_of, llama_1b):
        fitting = module_of("roofline_fit")
        truth = roofline.Hardware("t", 4e11, 1.5e10, 2e-5, half_rate_rows=6, cache_bytes_per_s=7e9)
        pass_s = {cell: roofline.pass_time(llama_1b, truth, *cell).total_s for cell in self.CELLS}
        disturbed = pass_s | {(4, 3, 240): 3 * pass_s[4, 3, 240]}
        errors, _, _ = fitting.compare(llama_1b, fitting.fit(llama_1b, disturbed), pass_s)
        assert errors.to_dict()["median"] < 0.05

    def test_the_summary_counts(self, module_of):
        errors = module_of("roofline_fit").Errors({(1, 2, 3): -0.2, (1, 3, 3): 0.1, (1, 4, 3): 0.0})
        assert errors.to_dict() == {"cells": 3, "median": 0.1, "largest": 0.2, "within_15_percent": 2 / 3}


class TestProgram:
    def run(self, module_of, tmp_path, capsys, *arguments: str) -> tuple[str, dict]:
        results = tmp_path / "simulate.jsonl"
        assert module_of("simulate").main([*arguments, "--threads", "1", "--results", str(results)]) == 0
        tables, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n")
        assert results.read_text().splitlines()[-1] == last
        return tables, json.loads(last)

    def test_presets(self, module_of, tmp_path, capsys):
        picture = tmp_path / "a.png"
        tables, document = self.run(
            module_of, tmp_path, capsys, "llama-8b", "--hardware", "A100-80", "L4", "--exit", "4", "--draft-ids",
            "8192", "--acceptance", "0.8,0.7", "--batches", "1", "64", "--contexts", "1024", "--picture", str(picture),
        )  # fmt: skip
        assert [(row["hardware"], row["batch"]) for row in document["rows"]] == [
            ("A100-80", 1), ("A100-80", 64), ("L4", 1), ("L4", 64),
        ]  # fmt: skip
        assert "| L4 | 1,024 | 64 (too large) |" in tables
        assert "A100-80, context 1,024: drafting pays at batches 1 to" in tables
        assert document["draft"]["acceptance"] == [0.8, 0.7] and len(document["draft"]["path"]) == 4
        assert document["conditions"]["command"].startswith("python")
        assert picture.stat().st_size > 10_000

    def test_a_plan_says_how_often_it_is_right(self, module_of, tmp_path, capsys):
        plan = layerskip.DraftPlan.exit(2, draft_vocabulary=range(64), provenance={"acceptance_by_offset": [0.5, 0.4]})
        plan.save(tmp_path / "plan.json")
        _, document = self.run(module_of, tmp_path, capsys, "tiny", "--plan", str(tmp_path / "plan.json"))
        assert document["draft"]["acceptance"] == [0.5, 0.4] and document["draft"]["scored_ids"] == 64
        layerskip.DraftPlan.lookup().save(tmp_path / "lookup.json")
        _, document = self.run(module_of, tmp_path, capsys, "tiny", "--plan", str(tmp_path / "lookup.json"))
        assert document["draft"]["cost"] == 0

    def test_check_and_what_it_leaves(self, module_of, tmp_path, capsys):
        """The whole way on a tiny model; its times are no roofline's, so only what is said is looked at."""
        picture, hardware = tmp_path / "check.png", tmp_path / "machine.json"
        tables, document = self.run(
            module_of, tmp_path, capsys, "tiny", "--check", "--batches", "1", "2", "--fitted-batches", "1",
            "--contexts", "16", "24", "--repeats", "2", "--dtype", "float32", "--picture", str(picture),
            "--hardware-out", str(hardware),
        )  # fmt: skip
        assert len(document["cells"]) == 2 * 6 * 2
        assert min(cell["pass_s"] for cell in document["cells"]) > 0
        assert {part: each["verify_ratio"]["cells"] for part, each in document["errors"].items()} == {
            "fitted": 10, "held out": 10,
        }  # fmt: skip
        assert document["conditions"]["dtype"] == "float32"
        assert "| 16 | 2 (held out) |" in tables and "held out, verify_ratio: error median" in tables
        assert picture.stat().st_size > 10_000
        _, later = self.run(module_of, tmp_path, capsys, "tiny", "--hardware", str(hardware), "--draft-cost", "0")
        assert later["hardware"] == [document["hardware"]]

    def test_this_machine(self, module_of, tmp_path, capsys):
        _, document = self.run(module_of, tmp_path, capsys, "llama-1b", "--hardware", "this-machine", "--calibrate",
                               "tiny", "--repeats", "1", "--dtype", "float32", "--exit", "4")  # fmt: skip
        assert document["rows"][0]["hardware"] == "this-machine"

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["tiny", "--hardware", "H1000", "--exit", "2"], "got the hardware 'H1000'; expected this-machine"),
            (["tiny", "--hardware", "no.json", "--exit", "2"], "cannot read the hardware no.json"),
            (["tiny"], "got 0 descriptions of what a draft costs; expected one"),
            (["tiny", "--exit", "2", "--draft-cost", "0"], "got 2 descriptions of what a draft costs"),
            (["tiny", "--exit", "9"], "got an exit at layer 9 on a model of 4 layers"),
            (["tiny", "--exit", "2", "--contexts", "5000"], "got a context of 5,000 tokens and passes over 9"),
            (["tiny", "--exit", "2", "--draft-ids", "513"], "got --draft-ids 513 for a vocabulary of 512"),
            (["tiny", "--exit", "2", "--flops-share", "1.5"], "got --flops-share 1.5; expected a share"),
            (["tiny", "--exit", "2", "--dtype", "float64"], "got the dtype float64 for H100; expected one of bfloat16"),
            (["tiny", "--exit", "2", "--acceptance", "1.2"], "got '1.2'; expected probabilities from 0 to 1"),
            (["tiny", "--draft-cost", "-1"], "got '-1'; expected a number from 0"),
            (["tiny", "--check", "--batches", "1"], "got the batches 1, of which 1 are to be fitted"),
            (["no/such/folder", "--exit", "2"], "got 'no/such/folder': there is no such folder"),
            (["tiny", "--exits", "2"], "got the unknown option --exits. Did you mean '--exit'?"),
        ],
    )
    def test_what_is_refused(self, arguments, message, module_of, capsys):
        try:
            code = module_of("simulate").main([*arguments, "--threads", "1"])
        except SystemExit as exit:
            code = exit.code
        printed = capsys.readouterr()
        assert code == 2 and printed.out == ""
        assert message in printed.err.splitlines()[0] and printed.err.startswith("error: ")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("[1]", "which is not it; expected a JSON object of name, flops_per_s"),
            ('{"name": "a", "flops_per_s": 0, "bytes_per_s": 1}', "got flops_per_s=0 for the hardware 'a'"),
            ('{"name": "a", "flops_per_s": 1, "bytes_per_s": 1, "kernel_s": -1}', "expected a number from 0"),
            ('{"name": "a"}', "which is not it"),
        ],
    )
    def test_files_that_are_no_hardware(self, content, message, module_of, tmp_path, capsys):
        (tmp_path / "a.json").write_text(content)
        assert module_of("simulate").main(["tiny", "--hardware", str(tmp_path / "a.json"), "--exit", "2"]) == 2
        assert message in capsys.readouterr().err
