"""Compiled passes decide what passes that are run as they are decide, and what cannot be compiled is run all the same.

Where nothing needs a compiler, one that fails or only pretends takes its place. The others compile tiny models without
`max_autotune`, which changes how products are computed and takes minutes.
"""

import copy
import shutil

import pytest
import torch
from transformers import LogitsProcessorList

import layerskip
from layerskip import DraftPlan, SettingError
from layerskip.compiled import OPTIONS, CompiledForward
from layerskip.models.graph import trace
from layerskip.models.linears import packing_obstacle
from tests.special_models import agreeing_model
from tests.test_static_rounds import GREEDY, PLANS, SAMPLED, Shift, every_plan, off
from tests.tiny_models import prompt, tiny_model, transformers_greedy

QUICK = {**OPTIONS["cpu"], "max_autotune": False}
has_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="needs a C++ compiler, with which inductor compiles"
)


@pytest.fixture
def as_it_is(monkeypatch) -> list[object]:
    """A compiler that gives back the graph; the inputs that it was given."""
    seen: list[object] = []

    def compile_nothing(graph, inputs, options):
        seen.append((options, [tuple(each.shape) for each in inputs]))
        return graph

    monkeypatch.setattr("torch._inductor.compile", compile_nothing)
    monkeypatch.setattr("layerskip.compiled.MOST_TOKENS", {})  # as where nothing is known against wide passes
    return seen


@has_compiler
def test_what_inductor_compiles():
    """In float32, where weights are packed; greedy, and sampled with the noise of the same seed."""
    model = layerskip.wrap(copy.deepcopy(agreeing_model("llama")).float())
    model.prepare()
    model.compiled = CompiledForward(model.decoder, QUICK, most_tokens=100)
    plan = off(DraftPlan.exit(2, num_draft_tokens=3))
    for call in (GREEDY, {**SAMPLED, "acceptance_rule": "invariant"}):
        compiled, eager = (model.generate(prompt(), **plan, **call, compile=each) for each in (True, False))
        assert torch.equal(compiled.sequences, eager.sequences)
        assert compiled.stats.execution == "static: compiled"
        assert (compiled.stats.recording_s > 0) == (call is GREEDY)
    # A step of the draft, and verification, also of the last round's shorter draft.
    assert model.compiled.count == 2 and model.compiled.seconds > 0


class TestTheGraph:
    """What is compiled, before a compiler has seen it."""

    @pytest.mark.parametrize("name", ["llama-biased-tied", "llama-yarn-rope", "mistral-window", "qwen3"])
    def test_greedy_output_is_the_models_own(self, name, as_it_is):
        model = layerskip.wrap(tiny_model(name))
        result = model.generate(prompt(), **off(PLANS["exit"]), **GREEDY, compile=True)
        assert torch.equal(result.sequences, transformers_greedy(tiny_model(name), prompt(), max_new_tokens=30))
        assert result.stats.execution == "static: compiled" and as_it_is

    @every_plan
    def test_plans_in_a_batch(self, plan, as_it_is):
        model = layerskip.wrap(agreeing_model("llama"))
        call = {**SAMPLED, **off(plan), "num_return_sequences": 3}
        compiled, eager = (model.generate(prompt(), **call, compile=each) for each in (True, False))
        assert torch.equal(compiled.sequences, eager.sequences)
        assert compiled.stats.accepted_histogram == eager.stats.accepted_histogram

    @pytest.mark.parametrize("name", ["gemma2", "cohere", "gpt2", "smollm3", "falcon-new"])
    def test_other_families_as_graphs(self, name):
        """Attention by its scores, rotated pairs, learned positions, layers without any, heads in another order."""
        decoder, starts = layerskip.wrap(tiny_model(name)).decoder, torch.tensor([3])
        cache = decoder.new_cache(1, 32)
        graph, inputs = trace(decoder, prompt(2), starts, 16, cache)
        assert torch.equal(graph(*inputs)[0], decoder.forward(prompt(2), starts, 16, cache))

    def test_experts_are_run_as_they_are(self, as_it_is):
        """Which were chosen is asked of the device in mid-pass, which no graph can."""
        model = layerskip.wrap(tiny_model("mixtral"))
        result = model.generate(prompt(), **GREEDY, compile=True)
        assert torch.equal(result.sequences, transformers_greedy(tiny_model("mixtral"), prompt(), max_new_tokens=30))
        assert "compiling failed" in result.stats.execution

    @pytest.mark.skipif(
        packing_obstacle(torch.float32, torch.device("cpu")) is not None, reason="this torch packs nothing"
    )
    def test_weights_are_ordinary_and_of_the_graph(self):
        """Compilers know neither packed weights nor the operators that multiply by them."""
        model = layerskip.wrap(copy.deepcopy(tiny_model("llama-biased-tied", dtype=torch.float32)))
        model.prepare(pack=True)
        decoder, starts = model.decoder, torch.tensor([3])
        cache = decoder.new_cache(1, 32)
        graph, inputs = trace(decoder, prompt(2), starts, 16, cache)
        assert not any("mkldnn" in str(node.target) for node in graph.graph.nodes)
        assert not any(each.is_mkldnn for each in graph.buffers())
        assert len(inputs) == 2 + decoder.num_blocks
        expected = decoder.forward(prompt(2), starts, 16, cache)
        assert torch.allclose(graph(*inputs)[0], expected, atol=1e-4)


class TestOnThisDevice:
    """A CPU gains by compiled passes over one token, and loses by wider ones."""

    def test_drafts_and_plain_steps_are_compiled_and_verification_is_not(self, as_it_is):
        model = layerskip.wrap(agreeing_model("llama"))
        model.compiled = CompiledForward(model.decoder, most_tokens=1)
        result = model.generate(prompt(), **off(PLANS["exit"]), **GREEDY, compile=True)
        assert torch.equal(result.sequences, model.generate(prompt(), **GREEDY).sequences)
        assert {shapes[0] for _, shapes in as_it_is} == {(1, 1)}
        assert result.stats.execution == "static: compiled" and result.stats.accepted > 0

    def test_a_batch_says_that_it_would_lose(self, as_it_is):
        model = layerskip.wrap(tiny_model("llama"))
        model.compiled = CompiledForward(model.decoder, most_tokens=1)
        stats = model.generate(prompt(batch=2), **GREEDY, compile=True).stats
        assert stats.execution == "eager: on cpu a pass over 2 rows is slower compiled" and not as_it_is

    def test_the_limit_of_the_cpu_is_the_default(self):
        assert CompiledForward(layerskip.wrap(tiny_model("llama")).decoder).most_tokens == 1

    def test_the_oldest_programs_make_room(self, as_it_is):
        model = layerskip.wrap(tiny_model("llama"))
        model.compiled.most = 2
        for layer in (1, 2, 3, 1):
            plan = off(DraftPlan.exit(layer, num_draft_tokens=1))
            model.generate(prompt(), **plan, **GREEDY, compile=True)
            assert len(model.compiled._programs) <= 2


class TestAgain:
    """What was compiled serves later calls."""

    def test_calls_of_other_prompts_seeds_and_settings_compile_nothing(self, as_it_is):
        model = layerskip.wrap(agreeing_model("llama"))
        plan = DraftPlan.exit(2)
        model.generate(prompt(), **off(plan), **GREEDY, compile=True)
        count = model.compiled.count
        for other in ({"temperature": 0.5}, {"seed": 8}, {"max_new_tokens": 20}, {"acceptance_rule": "invariant"}):
            call = {**SAMPLED, **off(plan), **other}
            compiled, eager = (model.generate(prompt(14), **call, compile=each) for each in (True, False))
            assert torch.equal(compiled.sequences, eager.sequences)
            assert compiled.stats.recording_s == 0
        assert model.compiled.count == count == 2

    def test_passes_are_over_one_token_or_over_all_that_the_plan_drafts(self, as_it_is):
        """Each further width would be another minute of compiling."""
        model = layerskip.wrap(agreeing_model("llama"))
        call = {**GREEDY, "max_new_tokens": 100, "acceptance_rule": "invariant"}
        model.generate(prompt(), **off(DraftPlan.lookup(7)), **call, compile=True)
        assert {shapes[0] for _, shapes in as_it_is} == {(1, 1), (1, 8)}

    def test_the_last_round_of_an_answer_compiles_nothing(self, as_it_is):
        """It has room for fewer drafts, or for none."""
        model = layerskip.wrap(agreeing_model("llama"))
        for tokens in (20, 21, 22):
            call = {**off(DraftPlan.exit(2)), **GREEDY, "max_new_tokens": tokens}
            compiled, eager = (model.generate(prompt(), **call, compile=each) for each in (True, False))
            assert torch.equal(compiled.sequences, eager.sequences)
        assert len(as_it_is) == 2

    def test_more_slots_are_another_program(self, as_it_is):
        model = layerskip.wrap(tiny_model("mistral-no-window"))
        model.generate(prompt(), **{**GREEDY, "max_new_tokens": 20}, compile=True)
        model.decoder.max_positions = 2000
        model.generate(prompt(), **{**GREEDY, "max_new_tokens": 600, "eos_token_id": 5}, compile=True)
        assert {shapes[2][2] for _, shapes in as_it_is} == {512, 1024}

    def test_calls_that_do_not_ask_for_it_use_none(self, as_it_is):
        model = layerskip.wrap(tiny_model("llama"))
        model.generate(prompt(), **GREEDY, compile=True)
        assert model.generate(prompt(), **GREEDY).stats.execution == "eager"
        static = model.generate(prompt(), **GREEDY, cuda_graphs=True)
        assert "no graphs on cpu" in static.stats.execution
        assert len(as_it_is) == model.compiled.count == 1

    def test_weights_that_were_written_to_are_compiled_again(self, as_it_is):
        """In a compiled program they are constants."""
        hf_model = copy.deepcopy(tiny_model("llama"))
        model = layerskip.wrap(hf_model)
        model.generate(prompt(), **GREEDY, compile=True)
        with torch.no_grad():
            hf_model.model.layers[1].mlp.down_proj.weight.mul_(-1)
            hf_model.model.norm.weight.mul_(2)
        changed = model.generate(prompt(), **GREEDY, compile=True)
        assert torch.equal(changed.sequences, transformers_greedy(hf_model, prompt(), max_new_tokens=30))
        assert len(as_it_is) == 2

    def test_rounds_that_compile_are_not_taken_for_costs(self, as_it_is):
        model = layerskip.wrap(agreeing_model("llama"))
        first, second = (model.generate(prompt(), plan=PLANS["exit"], **GREEDY, compile=True).stats for _ in range(2))
        assert first.recording_s > 0 and first.recording_s >= model.compiled.seconds
        assert second.recording_s == 0


class TestFailure:
    """What cannot be compiled is run as it is, and the statistics say why."""

    def test_a_compiler_that_fails(self, monkeypatch):
        def fail(graph, inputs, options):
            raise AssertionError("\nno working C++ compiler\nmore")

        monkeypatch.setattr("torch._inductor.compile", fail)
        model = layerskip.wrap(tiny_model("llama"))
        own = transformers_greedy(tiny_model("llama"), prompt(), max_new_tokens=30)
        first, second = (model.generate(prompt(), **GREEDY, compile=True) for _ in range(2))
        reason = "compiling failed: AssertionError: no working C++ compiler"
        assert [first.stats.execution, second.stats.execution] == [f"static: {reason}", f"eager: {reason}"]
        assert torch.equal(first.sequences, own) and torch.equal(second.sequences, own)
        assert model.compiled.count == 0
        model.compiled.clear()
        assert model.compiled.obstacle is None

    def test_a_compiler_that_computes_something_else(self, monkeypatch):
        def compile_wrongly(graph, inputs, options):
            return lambda *inputs: (graph(*inputs)[0].roll(1, dims=-1),)

        monkeypatch.setattr("torch._inductor.compile", compile_wrongly)
        model = layerskip.wrap(tiny_model("llama"))
        result = model.generate(prompt(), **off(DraftPlan.exit(2)), **GREEDY, compile=True)
        assert torch.equal(result.sequences, transformers_greedy(tiny_model("llama"), prompt(), max_new_tokens=30))
        assert "computes something else" in result.stats.execution

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"repetition_penalty": 1.3}, "looks at the tokens before"),
            ({"logits_processor": LogitsProcessorList([Shift()])}, "looks at the tokens before"),
            ({"pass_width": 8}, "pass_width"),
        ],
    )
    def test_calls_of_no_fixed_shape(self, settings, reason, as_it_is):
        model = layerskip.wrap(agreeing_model("llama"))
        compiled, eager = (model.generate(prompt(), **GREEDY, **settings, compile=each) for each in (True, False))
        assert compiled.stats.execution.startswith("eager: ") and reason in compiled.stats.execution
        assert torch.equal(compiled.sequences, eager.sequences) and not as_it_is

    def test_hooks_are_still_called(self, as_it_is):
        hf_model, calls = copy.deepcopy(tiny_model("llama")), []
        hf_model.model.norm.register_forward_hook(lambda *_: calls.append(1))
        stats = layerskip.wrap(hf_model).generate(prompt(), **GREEDY, compile=True).stats
        assert "hooks" in stats.execution and len(calls) == 30 and not as_it_is


@pytest.mark.parametrize("bad", ["yes", 1, {}])
def test_the_switch_is_checked(bad):
    with pytest.raises(SettingError, match="expected True or False"):
        layerskip.wrap(tiny_model("llama")).generate(prompt(), compile=bad)
