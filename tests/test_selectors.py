"""Every selector keeps the contract, and each follows its own published rule on cases small enough to work out."""

import functools
import importlib
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import layerskip
from layerskip.errors import SearchError, SettingError
from layerskip.models.decoder import Step
from layerskip.models.synthetic import synthetic_model
from layerskip.search.candidate import Candidate
from layerskip.search.cost import uniform_costs
from layerskip.search.judge import Judge
from layerskip.search.replay import Replay
from layerskip.search.selectors import (
    SELECTORS,
    Admg,
    Clasp,
    ConfLayers,
    DelExit,
    DraftAndVerify,
    KnapSpec,
    RandomSets,
    Uniform,
    Workbench,
    clasp_paths,
)
from layerskip.search.selectors.base import Branches, candidate_without, sub_blocks
from layerskip.search.selectors.conflayers import confidence, neighbourhoods, skipped_layers
from layerskip.search.selectors.del_exit import ExitStatistics, tokens_per_layer
from layerskip.search.selectors.knapspec import best_tokens_per_s, weights
from layerskip.search.texts import Text
from tests.special_models import agreeing_model
from tests.tiny_models import NUM_LAYERS, TINY_CONFIGS, prompt

ROOT = Path(__file__).resolve().parents[1]
LENGTH = 3
FAMILIES = ("llama", "qwen3", "mistral-window", "qwen2-window")
KEEPS_THE_ENDS = {"uniform", "random_sets", "knapspec", "conflayers"}


@functools.cache
def texts_of(model: layerskip.Model, new_tokens: int = 12) -> tuple[Text, ...]:
    """The model's own answers to three random prompts."""
    rows = [prompt(length, seed=length)[0].tolist() for length in (9, 4, 13)]
    answers = model.generate(rows, max_new_tokens=new_tokens, eos_token_id=[], do_sample=False).new_token_ids
    return tuple(Text(tuple(row), tuple(answer)) for row, answer in zip(rows, answers, strict=True))


def judge_of(model: layerskip.Model, **costs: float) -> Judge:
    replay = Replay(model.decoder, texts_of(model), draft_length=LENGTH)
    return Judge(replay, uniform_costs(model.decoder.num_blocks, **costs))


@functools.cache
def wrapped(family: str) -> layerskip.Model:
    return layerskip.wrap(agreeing_model(family))


@functools.cache
def planted() -> layerskip.Model:
    """Four blocks, of which the last two do nothing."""
    return layerskip.wrap(synthetic_model("tiny", torch.float64, agreement=1.0, from_block=2))


def bench_of(model: layerskip.Model, seed: int = 0, **costs: float) -> Workbench:
    """With a clock that always says the same: the judge's prediction for the plan."""
    judge = judge_of(model, **costs)

    def tokens_per_s(plan: layerskip.DraftPlan) -> float:
        candidate = Candidate.of(judge.num_blocks, plan.skip_attention, plan.skip_mlp, plan.exit_layer)
        return judge.judge(candidate).speedup.ratio

    return Workbench.seeded(judge, seed, tokens_per_s)


def made(name: str):
    """As registered, but for a search that would take long."""
    return DraftAndVerify(iterations=10) if name == "draft_and_verify" else SELECTORS[name]()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SELECTORS)
class TestContract:
    def test_candidates_can_draft(self, name, family):
        """They are plans with a path, none is the model itself, none comes twice."""
        found = made(name).select(bench_of(wrapped(family)))
        assert found
        assert len(set(found)) == len(found)
        for each in found:
            plan = layerskip.DraftPlan(each.skip_attention, each.skip_mlp, each.exit_layer)
            path = plan.path(NUM_LAYERS)
            assert path == each.path(NUM_LAYERS)
            assert path not in ((), wrapped(family).decoder.full_path)
            assert each == Candidate.of(NUM_LAYERS, each.skip_attention, each.skip_mlp, each.exit_layer)

    def test_the_ends_stay_where_the_method_keeps_them(self, name, family):
        if name in KEEPS_THE_ENDS:
            for each in made(name).select(bench_of(wrapped(family))):
                attention, mlp = each.skipped(NUM_LAYERS)
                assert not (attention | mlp) & {0, NUM_LAYERS - 1}

    def test_a_seed_has_one_answer(self, name, family):
        first, second = (made(name).select(bench_of(wrapped(family), seed=7)) for _ in range(2))
        assert first == second

    def test_model_and_replay_are_left_as_they_were(self, name, family):
        model, bench = wrapped(family), bench_of(wrapped(family))
        candidate = Candidate.of(NUM_LAYERS, [1], [2])
        weights = {key: value.clone() for key, value in model.hf_model.state_dict().items()}
        states = [bench.judge.replay.states(0, block).clone() for block in range(NUM_LAYERS + 1)]
        before = bench.judge.judge(candidate)
        bench.judge.judged.clear()
        made(name).select(bench)
        bench.judge.judged.clear()
        assert bench.judge.judge(candidate) == before
        assert all(torch.equal(each, bench.judge.replay.states(0, block)) for block, each in enumerate(states))
        assert all(torch.equal(value, weights[key]) for key, value in model.hf_model.state_dict().items())


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Uniform(every=1), "every=1 for Uniform"),
        (lambda: RandomSets(skip_ratio=0), "skip_ratio=0"),
        (lambda: Admg(threshold=2), "threshold=2"),
        (lambda: Clasp(skip_ratio=1), "skip_ratio=1"),
        (lambda: KnapSpec(budget=1.0), "budget=1.0"),
        (lambda: ConfLayers(window=0), "window=0"),
        (lambda: DelExit(decay=0), "decay=0"),
        (lambda: DraftAndVerify(iterations=0), "iterations=0"),
    ],
)
def test_constants_out_of_range_are_refused(make, told):
    with pytest.raises(SettingError, match=told):
        make()


def test_uniform_takes_every_second_layer_but_the_ends():
    judge = judge_of(wrapped("llama"))
    for blocks, layers in ((8, (1, 3, 5)), (9, (1, 3, 5, 7)), (3, (1,))):
        judge.num_blocks = blocks
        assert Uniform().select(Workbench.seeded(judge)) == [Candidate(layers, layers)]
    judge.num_blocks = 2
    with pytest.raises(SearchError, match="got a model of 2 blocks"):
        Uniform().select(Workbench.seeded(judge))


def test_random_sets_have_one_size_and_the_best_agreement_comes_first():
    bench = bench_of(wrapped("llama"), seed=3)
    found = RandomSets(skip_ratio=0.5, draws=100).select(bench)
    assert {len(each.skip_attention) + len(each.skip_mlp) for each in found} == {2}
    assert len(found) == math.comb(4, 2)  # of 10^7 seeds one misses one of the six
    rates = [bench.judge.judge(each, batches=1).acceptance.rate for each in found]
    assert rates == sorted(rates, reverse=True)


class TestAdmg:
    def test_it_skips_the_attentions_above_the_threshold(self):
        bench = bench_of(wrapped("llama"))
        cosines = direct_cosines(bench.judge.replay)
        assert Admg().similarities(bench) == pytest.approx(cosines)
        ordered = sorted(cosines)
        for low, high in itertools.pairwise(ordered):
            expected = [layer for layer, cosine in enumerate(cosines) if cosine >= high]
            assert Admg(threshold=(low + high) / 2).select(bench) == [Candidate.of(NUM_LAYERS, expected)]
        nearest = [cosines.index(ordered[-1])]
        assert Admg(threshold=1.0).select(bench) == [Candidate.of(NUM_LAYERS, nearest)]

    def test_it_finds_attentions_that_do_nothing(self):
        assert Admg(threshold=0.9999).select(bench_of(planted())) == [Candidate.of(4, [2, 3])]


def direct_cosines(replay: Replay) -> list[float]:
    """By the model's own attentions on whole texts, without a replay."""
    found = [[] for _ in range(NUM_LAYERS)]
    decoder = replay.decoder
    for text in replay.texts:
        ids = torch.tensor([text.token_ids])
        cache, span = decoder.new_cache(1, ids.shape[1]), decoder.span([0], ids.shape[1])
        rows = slice(len(text.prompt), len(text.token_ids) - 1)
        with torch.inference_mode():
            hidden = decoder.embed(ids)
            for layer in range(NUM_LAYERS):
                behind = decoder.run(hidden, [Step(layer, True, False)], cache, span)
                found[layer].append(torch.cosine_similarity(hidden[0, rows], behind[0, rows], dim=-1))
                hidden = decoder.run(behind, [Step(layer, False, True)], cache, span)
    return [float(torch.cat(each).mean()) for each in found]


class TestClasp:
    @pytest.mark.parametrize("family", ["llama", "mistral-window"])
    @pytest.mark.parametrize("by_sub_block", [False, True])
    def test_the_programme_is_its_recursion(self, family, by_sub_block):
        """Written down once more from the other end: recursion with the paths' states run anew from the start."""
        judge = judge_of(wrapped(family))
        steps = sub_blocks(NUM_LAYERS)
        units = [(each,) for each in steps] if by_sub_block else list(zip(steps[::2], steps[1::2], strict=True))
        branches = Branches(judge.replay, draft_length=1)

        def state(count, skipped):
            hidden = judge.replay.padded_states(0, 0)
            for index, unit in enumerate(units[:count]):
                for step in () if index in skipped else unit:
                    hidden = branches.run(step, hidden)
            return hidden

        @functools.cache
        def best(count, skips):
            if skips in (0, count):
                return tuple(range(skips))
            left_out, ran = (*best(count - 1, skips - 1), count - 1), best(count - 1, skips)
            truth = state(count, ())
            return max(left_out, ran, key=lambda each: branches.similarity(state(count, each), truth))

        found = clasp_paths(judge, by_sub_block=by_sub_block)
        assert list(found) == list(range(1, len(units)))
        for skips, candidate in found.items():
            skipped = [step for index in best(len(units), skips) for step in units[index]]
            assert candidate == candidate_without(NUM_LAYERS, skipped)

    def test_it_finds_blocks_that_do_nothing(self):
        judge = judge_of(planted())
        assert clasp_paths(judge)[2] == Candidate.of(4, exit_layer=2)
        assert clasp_paths(judge, by_sub_block=True)[4] == Candidate.of(4, exit_layer=2)
        assert Clasp().select(Workbench.seeded(judge)) == [Candidate.of(4, exit_layer=2)]

    def test_a_position_sees_the_full_models_entries_and_itself(self):
        """The state of a branch at a position is that of a draft of one token from there."""
        replay = judge_of(wrapped("llama")).replay
        candidate = Candidate.of(NUM_LAYERS, [1], [2])
        branches = Branches(replay, draft_length=1)
        hidden = replay.padded_states(0, 0)
        for step in candidate.path(NUM_LAYERS):
            hidden = branches.run(step, hidden)
        stands = torch.cat([each.stands for each in replay.outcomes(candidate.path(NUM_LAYERS), 0, draft_length=1)])
        following = torch.tensor([token for text in replay.texts_of(0) for token in text.continuation[1:]])
        assert torch.equal((branches.scored(hidden)[0] == following).double(), stands)
        assert 0 < stands.mean() < 1


class TestKnapSpec:
    def test_weights_and_speeds(self):
        assert weights(1.0, 2.6, 5) == (1, 3)
        assert weights(1.0, 0.1, 5) == (5, 1)
        assert weights(1.0, 1.0, 5) == (1, 1)
        # alpha 0.8, half of the blocks, plain step 1: (1 - 0.8^3) / 0.2 / (2 * 0.5 + 1)
        assert best_tokens_per_s(0.8, 0.5, 1.0, 17) == pytest.approx(2.44 / 2)
        assert best_tokens_per_s(1.0, 0.5, 1.0, 17) == pytest.approx(18 / 9.5)

    @pytest.mark.parametrize("family", ["llama", "qwen2-window"])
    @pytest.mark.parametrize(("attention", "mlp"), [(0.3, 0.7), (1.0, 1.0)])
    def test_the_table_is_its_recursion(self, family, attention, mlp):
        """Brute force under its own assumption, that the best way to a weight goes over best ways to lesser ones."""
        bench = bench_of(wrapped(family), attention=attention, mlp=mlp)
        selector = KnapSpec(least_cosine=-1.0)
        branches, steps = Branches(bench.judge.replay), sub_blocks(NUM_LAYERS)
        costs = dict(zip((True, False), weights(attention, mlp, 5), strict=True))
        most = sum(costs.values()) * NUM_LAYERS // 2

        def state(count, skipped):
            hidden = bench.judge.replay.padded_states(0, 0)
            for step in steps[:count]:
                hidden = hidden if step in skipped else branches.run(step, hidden)
            return hidden

        @functools.cache
        def best(count, weight):
            if count == 0:
                return () if weight == 0 else None
            step = steps[count - 1]
            choices = [best(count - 1, weight)]
            if 0 < step.block < NUM_LAYERS - 1 and weight >= costs[step.attention]:
                shorter = best(count - 1, weight - costs[step.attention])
                choices.append(None if shorter is None else (*shorter, step))
            truth = state(count, ())
            found = [each for each in choices if each is not None]
            return max(found, key=lambda each: branches.similarity(state(count, each), truth), default=None)

        expected = {weight: best(len(steps), weight) for weight in range(most + 1)}
        cells, _ = selector.table(bench, branches)
        assert {weight: skipped for weight, (_, _, skipped) in cells.items()} == {
            weight: skipped for weight, skipped in expected.items() if skipped is not None
        }

    def test_the_order_is_that_of_promised_speed(self):
        """The drafts of a branch are the replay's own for its set, so its rate can be asked for there."""
        bench = bench_of(wrapped("llama"))
        replay, speeds = bench.judge.replay, []
        for candidate in KnapSpec(least_cosine=-1.0).select(bench):
            outcomes = replay.outcomes(candidate.path(NUM_LAYERS), 0)
            alpha = float(torch.cat([each.stands for each in outcomes]).mean())
            skipped = [Step(layer, True, False) for layer in candidate.skip_attention]
            skipped += [Step(layer, False, True) for layer in candidate.skip_mlp]
            speeds.append(KnapSpec().tokens_per_s(bench, tuple(skipped), alpha))
        assert len(speeds) > 2
        assert speeds == sorted(speeds, reverse=True)

    def test_if_all_are_given_up_the_likest_skip_is_left(self):
        bench = bench_of(wrapped("llama"))
        (candidate,) = KnapSpec(least_cosine=1.0).select(bench)
        branches, steps = Branches(bench.judge.replay), sub_blocks(NUM_LAYERS)
        likeness = {
            step: branches.similarity(before, behind)
            for step, (before, behind) in zip(steps, branches.full(steps), strict=True)
            if 0 < step.block < NUM_LAYERS - 1
        }
        assert candidate == candidate_without(NUM_LAYERS, [max(likeness, key=likeness.get)])

    def test_it_finds_blocks_that_do_nothing(self):
        """Block 3, the last, may not be skipped, so of the two idle ones block 2 is what is left to find."""
        first, *_ = KnapSpec().select(bench_of(planted()))
        assert first == Candidate.of(4, [2], [2])


class TestConfLayers:
    def test_confidence(self):
        assert confidence(torch.zeros(2, 8)).tolist() == pytest.approx([0, 0])
        peaked = torch.tensor([[100.0, 0, 0, 0]])
        assert confidence(peaked).tolist() == pytest.approx([1.0])

    def test_neighbourhoods_by_hand(self):
        """Second differences 0 2 -4 2 0 -> scaled 2/3 1 0 1 2/3, mean 2/3, moved by -1/6: 1/2 5/6 -1/6 5/6 1/2.
        Times 5 * (layer + 1) / 10 for layers 1 to 5: 0.5 1.25 <0 2.08 1.5, whole parts behind 2.
        """
        assert neighbourhoods([1.0, 2.0, 5.0, 4.0, 5.0], 10) == [2, 3, 2, 4, 3]

    def test_layers_below_their_neighbours_are_skipped(self):
        figures = [1.0, 1.0001, 0.2, 1.0, 1.0, 0.1]
        assert skipped_layers(figures, 0.0, 8)[:1] == [2]
        assert 5 in skipped_layers(figures, 0.0, 8)
        assert skipped_layers(figures, 50.0, 8) == []
        assert skipped_layers([0.5], 0.0, 3) == []

    def test_it_finds_a_block_that_does_nothing(self):
        """Its sub-blocks add nothing, so their softmax is flat; of the inner layers it is the only one."""
        first, *_ = ConfLayers().select(bench_of(planted()))
        assert first == Candidate.of(4, [2], [2])


class TestDelExit:
    def test_tokens_per_layer(self):
        assert tokens_per_layer(0.5, 2, 2, 8) == pytest.approx(1.75 / 12)
        assert tokens_per_layer(1.0, 2, 3, 8) == pytest.approx(4 / 14)
        assert tokens_per_layer(0.9, 2, 0, 8) == pytest.approx(1 / 8)

    def test_counts_decay(self):
        statistics = ExitStatistics(2, 0.5)
        assert statistics.floor(1) == 0
        statistics.add(torch.tensor([[False, False], [True, False]]), torch.tensor([[0.0, 0.0], [0.8, 0.4]]))
        statistics.add(torch.tensor([[False], [True]]), torch.tensor([[0.0], [0.9]]))
        assert statistics.rates() == pytest.approx([0, 1.5 / 2])
        assert statistics.floor(1) == pytest.approx((1.3 / 1.5 + 0.4) / 2)

    def test_rounds_by_hand(self):
        """Exit 1 is never right, exit 2 always. The first round is exit 1 with one draft, which falls; from then on
        exit 2 drafts as much as it may, until the nine positions are used up.
        """
        matches = torch.tensor([[False] * 9, [False] * 9, [True] * 9])
        votes = [0, 0, 0]
        DelExit(most_drafts=3).play(ExitStatistics(3, 0.95), matches, torch.ones(3, 9), votes)
        assert votes == [0, 0, 2]  # positions 1-4 and 5-8

    def test_the_exit_before_idle_blocks_is_found(self):
        assert DelExit().select(bench_of(planted()))[0] == Candidate.of(4, exit_layer=2)

    def test_shadows_are_what_the_exits_would_draft(self):
        replay = judge_of(wrapped("qwen3")).replay
        matches, _ = DelExit()._shadows(Workbench.seeded(Judge(replay, uniform_costs(NUM_LAYERS))))
        for layer in range(1, NUM_LAYERS):
            outcomes = replay.outcomes(Candidate.of(NUM_LAYERS, exit_layer=layer).path(NUM_LAYERS), 0)
            assert torch.equal(matches[layer].double(), torch.cat([each.stands for each in outcomes]))


class TestDraftAndVerify:
    def test_the_fastest_by_the_clock_comes_first(self):
        timed = {}

        def clock(plan):
            assert (plan.num_draft_tokens, plan.confidence_threshold) == (12, 0.6)
            candidate = Candidate.of(NUM_LAYERS, plan.skip_attention, plan.skip_mlp, plan.exit_layer)
            timed[candidate] = 1.0 + len(plan.skip_attention) - len(plan.skip_mlp)
            return timed[candidate]

        bench = Workbench.seeded(judge_of(wrapped("llama")), 1, clock)
        found = DraftAndVerify(iterations=40).select(bench)
        assert {each for each in timed if each != Candidate()} == set(found)
        assert timed[found[0]] == max(timed.values())
        assert bench.judge.replay.block_passes == 0

    def test_without_a_clock_it_says_so(self):
        with pytest.raises(SearchError, match="got a workbench without tokens_per_s"):
            DraftAndVerify().select(Workbench.seeded(judge_of(wrapped("llama"))))


class TestExperiment:
    def test_the_comparison_runs_to_its_end(self, tmp_path):
        results = tmp_path / "selectors.jsonl"
        command = [sys.executable, "-m", "experiments.selectors", "--threads", "1"]
        command += [
            *("--model", "tiny", "--dtype", "float32", "--agreement", "1", "--results", str(results)),
            *("--positions", "64", "--held-out-positions", "32", "--new-tokens", "12", "--cost-context", "16"),
            *("--selectors", "uniform", "clasp", "draft_and_verify", "--trials", "2", "--measure", "1"),
            *("--clock-prompts", "1", "--clock-tokens", "9", "--draft-length", "3"),
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        table, _, last = done.stdout.rstrip("\n").rpartition("\n")
        assert results.read_text().splitlines() == [last]
        document = json.loads(last)
        uniform, clasp, by_clock = document["rows"]
        assert (uniform["candidates"], uniform["full_passes"]) == (1, 0)
        assert clasp["candidate"]["exit_layer"] == 2
        assert clasp["held_out"]["acceptance_rate"] == 1
        assert by_clock["settings"]["iterations"] == 2
        for row in document["rows"]:
            assert f"| {row['selector']} |" in table
            assert len(row["measured_speedup_quartiles"]) == 3
            assert row["seconds"] > 0
        assert document["conditions"]["num_blocks"] == 4
        assert document["costs"]["plain_s"] > 0

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["--model", "tiny", "--data", "x.jsonl"], "got --data for random weights"),
            (["--model", "tiny", "--device", "nowhere"], "got --device nowhere"),
            (["--model", "tiny", "--selectors", "clsp"], "got 'clsp'"),
        ],
    )
    def test_what_is_refused(self, arguments, told, monkeypatch, capsys):
        monkeypatch.syspath_prepend(str(ROOT))
        main = importlib.import_module("experiments.selectors").main
        try:
            code = main([*arguments, "--threads", "1"])
        except SystemExit as exit:
            code = exit.code
        printed = capsys.readouterr()
        assert code == 2
        assert printed.err.startswith("error: ")
        assert told in printed.err.splitlines()[0]
        assert printed.out == ""


@pytest.mark.parametrize("name", SELECTORS)
def test_a_model_that_is_too_small_is_refused(name):
    """One block: whatever is left out, nothing or too little remains."""
    bench = bench_of(one_block())
    try:
        found = made(name).select(bench)
    except SearchError as error:
        assert "expected" in str(error)
    else:
        assert all(each.path(1) not in ((), bench.judge.replay.decoder.full_path) for each in found)


@functools.cache
def one_block() -> layerskip.Model:
    config = LlamaConfig(**(TINY_CONFIGS["llama"].to_dict() | {"num_hidden_layers": 1}))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return layerskip.wrap(AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval())
