"""Heads that draft several tokens from one state (Medusa): exact, likeliest trees, trained as other paths are."""

import dataclasses
import itertools
import math
import random

import pytest
import torch

import layerskip
from layerskip import DraftPlan
from layerskip.draft import Node
from layerskip.drafters import HeadsDrafter
from layerskip.drafters.heads import crossed
from layerskip.errors import PlanMismatchError, SettingError, UnsupportedModelError
from layerskip.models.adapter import AdapterSpec
from layerskip.models.adapter_file import count_parameters, load_adapter, make_adapter, read_spec, save_adapter
from layerskip.search.trained import load_trained
from layerskip.training import ExitSettings, train_exit
from layerskip.training.rollout import rollout
from tests.contracts import DrawingDrafterContract
from tests.drafting import always
from tests.small_training import SMALL, some_texts, wrapped
from tests.special_models import adapter_of, agreeing_model
from tests.tiny_models import NUM_LAYERS, VOCAB_SIZE, prompt, tiny_model, transformers_greedy

SPEC = AdapterSpec(0, 0, num_heads=4)
ROWS = [prompt(length, seed=length)[0].tolist() for length in (12, 1, 9)]
TRAINED = dataclasses.replace(
    SMALL, num_blocks=0, num_heads=3, tokens=16 * 4 * 8, learning_rate=1e-2, first_offset_share=0.0
)


class HeadsContract(DrawingDrafterContract):
    vocabulary = None

    @property
    def adapter(self):
        return adapter_of(self.target, SPEC)

    def make_drafter(self, decoder, context):
        return HeadsDrafter(decoder, self.adapter, context, self.vocabulary)


class TestHeads(HeadsContract):
    pass


class TestHeadsWithVocabulary(HeadsContract):
    vocabulary = range(0, VOCAB_SIZE, 2)


del HeadsContract, DrawingDrafterContract  # not to be collected themselves


def chain_of(candidates):
    """The first of each offset's candidates, and beside them the others, as `draft_chain` gives them."""
    nodes = [Node(token, offset, sure) for offset, of in enumerate(candidates) for token, sure in of[:1]]
    return nodes + [Node(token, offset, sure) for offset, of in enumerate(candidates) for token, sure in of[1:]]


class TestCrossed:
    @pytest.mark.parametrize("seed", range(12))
    def test_the_likeliest_paths_by_the_product_of_their_chances(self, seed):
        """Against all paths there are; the chain, which need not be likely, is in the tree whatever it is."""
        rng = random.Random(seed)
        candidates = [[(10 * offset + each, rng.random()) for each in range(rng.randint(1, 4))] for offset in range(3)]
        for most in (0, 3, 5, 9, 200):
            tree = crossed(chain_of(candidates), 3, most)
            paths = [()]
            for index, node in enumerate(tree):
                assert node.parent <= index
                paths.append((*paths[node.parent], node.token_id))
            chances = {}
            for length in (1, 2, 3):
                for path in itertools.product(*candidates[:length]):
                    chances[tuple(token for token, _ in path)] = math.prod(sure for _, sure in path)
            chain = [tuple(of[0][0] for of in candidates[:length]) for length in (1, 2, 3)]
            others = sorted(chances.keys() - set(chain), key=chances.get, reverse=True)
            assert paths[1:4] == chain
            assert paths[4:] == others[: max(0, most - 3)]

    def test_nothing_follows_an_end(self):
        tree = crossed(chain_of([[(1, 0.5), (2, 0.4)], [(3, 0.9)]]), 2, 9, ends={2})
        assert tree == [Node(1, 0, 0.5), Node(3, 1, 0.9), Node(2, 0, 0.4)]
        assert crossed([], 0, 9) == []


@pytest.fixture(scope="module")
def plan_of(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("heads"), {}

    def plan_of(family, **options):
        if family not in made:
            file = folder / f"{family}.safetensors"
            save_adapter(adapter_of(agreeing_model(family), SPEC), file, torch.float64)
            made[family] = DraftPlan(exit_layer=0, adapter=str(file))
        return dataclasses.replace(made[family], **options)

    return plan_of


@pytest.mark.parametrize("siblings", [0, 3])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "falcon", "opt", "mistral-window", "cohere"])
def test_greedy_output_is_the_models_own(plan_of, family, siblings):
    """Rows of different lengths, one of a single token, at numbers of drafts below and above that of heads."""
    model = agreeing_model(family)
    own = [transformers_greedy(model, torch.tensor([row]), max_new_tokens=14)[0, len(row) :].tolist() for row in ROWS]
    for drafts in (1, 3, 6):
        plan = plan_of(family, num_draft_tokens=drafts, num_siblings=siblings)
        result = layerskip.wrap(model).generate(ROWS, **always(plan), max_new_tokens=14, eos_token_id=None)
        assert result.new_token_ids == own
        assert result.stats.proposed > 0 and len(result.stats.accepted_histogram) == min(drafts, 4) + 1


@pytest.mark.parametrize("options", [{}, {"num_siblings": 4}, {"num_siblings": 3, "lookup_tokens": 4}], ids=str)
@pytest.mark.parametrize("governor", ["off", "fixed", "measured"])
def test_every_governor(plan_of, governor, options):
    model, ends = agreeing_model("llama"), [7, 19]
    own = [
        transformers_greedy(model, torch.tensor([row]), max_new_tokens=40, eos_token_id=ends)[0, len(row) :].tolist()
        for row in ROWS
    ]
    plan = plan_of("llama", **options)
    result = layerskip.wrap(model).generate(ROWS, plan=plan, governor=governor, max_new_tokens=40, eos_token_id=ends)
    assert result.new_token_ids == own


def test_under_the_invariant_rule_heads_change_nothing(plan_of):
    model = layerskip.wrap(agreeing_model("llama"))
    options = {"max_new_tokens": 30, "eos_token_id": None, "do_sample": True, "temperature": 0.8, "seed": 5,
               "acceptance_rule": "invariant"}  # fmt: skip
    own = model.generate(ROWS, **options).new_token_ids
    for siblings in (0, 4):
        plan = plan_of("llama", num_siblings=siblings)
        assert model.generate(ROWS, **options, **always(plan)).new_token_ids == own


@pytest.mark.parametrize("governor", ["off", "measured"])
@pytest.mark.parametrize("siblings", [1, 4])
def test_under_the_other_rule_their_trees_are_decided_by_the_invariant_one(plan_of, siblings, governor):
    """Which nodes are in a tree of so many depends on those behind them, and so on the noise of later positions."""
    model = layerskip.wrap(agreeing_model("llama"))
    options = {"max_new_tokens": 30, "eos_token_id": None, "do_sample": True, "temperature": 0.8, "seed": 5}
    drafted = model.generate(ROWS, plan=plan_of("llama", num_siblings=siblings), governor=governor, **options)
    assert drafted.new_token_ids == model.generate(ROWS, acceptance_rule="invariant", **options).new_token_ids


def test_a_tree_goes_on_beside_its_chain(plan_of):
    """Guards the tests above: tokens are accepted that stand behind others beside the chain."""
    model, found = layerskip.wrap(agreeing_model("llama")), 0
    plan = plan_of("llama", num_siblings=VOCAB_SIZE)
    request = model.check(ROWS, **always(plan), max_new_tokens=60, eos_token_id=None)
    engine = model.engine(request)
    learn = engine.governor.learn

    def hear(decision, drafts, accepted, beside=()):
        nonlocal found
        found = max(found, *beside)
        learn(decision, drafts, accepted, beside)

    engine.governor.learn = hear
    list(engine)
    assert found > 1 and engine.stats.proposed_beside > engine.stats.proposed


def test_a_session_goes_on(plan_of):
    """Recorded or not, and with calls between that draft otherwise."""
    for fixed in (False, True):
        model = layerskip.wrap(agreeing_model("llama"))
        session, text = model.session(), []
        for turn, plan in enumerate((plan_of("llama"), None, plan_of("llama", num_siblings=3))):
            text += (new := prompt(5, seed=turn)[0].tolist())
            call = {**always(plan), "max_new_tokens": 9, "eos_token_id": None, "cuda_graphs": fixed}
            own = transformers_greedy(model.hf_model, torch.tensor([text]), max_new_tokens=9)[0, len(text) :].tolist()
            answer = session.generate(new, **call)
            assert answer.new_token_ids == [own]
            fresh = model.generate([text], **call).stats
            assert answer.stats.accepted_histogram == fresh.accepted_histogram  # the states are the same
            text += own


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 3, "temperature": 0.8}], ids=["greedy", "drawn"])
def test_rounds_of_fixed_shapes_draft_alike(plan_of, sampling):
    """As chains; three drafts of the four heads are recorded as such, five as six."""
    model = layerskip.wrap(agreeing_model("llama"))
    for drafts in (3, 5):
        call = {**always(plan_of("llama", num_draft_tokens=drafts, num_siblings=2)), "max_new_tokens": 30, **sampling}
        static = model.generate(ROWS, **call, cuda_graphs=True)
        call["plan"] = dataclasses.replace(call["plan"], num_siblings=0)
        eager = model.generate(ROWS, **call, cuda_graphs=False)
        assert static.new_token_ids == eager.new_token_ids
        assert static.stats.accepted_histogram == eager.stats.accepted_histogram
        assert static.stats.execution.startswith("static: ") and "no trees" in static.stats.execution


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_rollout_is_what_would_be_drafted(family):
    """And what is drafted is by the paper's formula: at the beginning the model's own head, whatever the offset."""
    hf_model, tokens = tiny_model(family), prompt(14)
    model = layerskip.wrap(hf_model)
    decoder, heads = model.decoder, adapter_of(hf_model, SPEC)
    with torch.no_grad():
        cache, span = decoder.new_cache(1, 14, kept_states=heads.kept_states), decoder.span([0], 14)
        decoder.run(decoder.embed(tokens, span), decoder.full_path, cache, span)
        normed = decoder.final_norm(cache.states[NUM_LAYERS])
        matrices = heads.modules["heads"].weight.chunk(4)
        for first in (0, 5):
            outputs = rollout(decoder, heads, cache.states, 3, first)
            assert len(outputs) == 3
            for offset, output in enumerate(outputs, 1):
                expected = normed + torch.nn.functional.silu(normed @ matrices[offset - 1].T)
                void = max(0, offset - first)
                expected = expected[:, first + void - offset : 14 - offset]
                torch.testing.assert_close(output[:, void:], expected, rtol=1e-9, atol=1e-9)
        fresh = make_adapter(hf_model, SPEC)
        torch.testing.assert_close(fresh.run(normed), normed.unsqueeze(2).expand(-1, -1, 4, -1))


def test_they_are_trained_as_other_paths_are(tmp_path):
    """By the same loop, and further, and from where it was interrupted; what comes out drafts, and costs one step."""
    model, texts = wrapped(), some_texts(20)
    plan = train_exit(model, texts, tmp_path / "first", TRAINED)
    curve = plan.provenance["curve"]
    assert curve[-1]["loss"] < curve[0]["loss"]
    assert (plan.exit_layer, len(plan.draft_vocabulary), plan.num_siblings) == (0, 40, 4)
    assert 1 <= plan.num_draft_tokens <= 3 and len(plan.acceptance_by_offset) <= 3
    spec = read_spec(plan.adapter)
    assert spec == AdapterSpec(0, 0, num_heads=3) == model.adapter(plan).spec
    size = model.hf_model.config.hidden_size
    assert count_parameters(plan.adapter) == 3 * size**2 == model.adapter(plan).num_parameters
    own = model.generate([[7, 8, 9]], max_new_tokens=20).new_token_ids
    assert model.generate([[7, 8, 9]], max_new_tokens=20, **always(plan)).new_token_ids == own
    per_id = model.inspection.head_parameters / VOCAB_SIZE
    cost = (3 * size**2 + 40 * per_id) / model.inspection.step_parameters
    assert model.draft_cost(plan) == pytest.approx(cost)
    further = train_exit(model, texts, tmp_path / "further", TRAINED, begin_with=plan)
    assert further.provenance["curve"][-1]["loss"] < curve[-1]["loss"]
    again = train_exit(model, texts, tmp_path / "first", TRAINED, resume=True)
    assert again.acceptance_by_offset == plan.acceptance_by_offset
    with pytest.raises(SettingError, match="plan of heads to begin with"):
        train_exit(model, texts, tmp_path / "blocks", SMALL, begin_with=plan)
    with pytest.raises(SettingError, match="got the plan of 3 heads"):
        load_trained(model, [plan])
    state = load_adapter(plan.adapter, model.hf_model, torch.float32).modules.state_dict()
    assert all(head.abs().max() > 0 for head in state["heads.weight"].chunk(3))


def test_gpt2_whose_blocks_cannot_be_trained_can_have_heads(tmp_path):
    model = layerskip.wrap(tiny_model("gpt2", dtype=torch.float32))
    texts = some_texts()
    with pytest.raises(UnsupportedModelError):
        train_exit(model, texts, tmp_path / "blocks", SMALL)
    plan = train_exit(model, texts, tmp_path / "heads", TRAINED)
    own = model.generate([[7, 8, 9]], max_new_tokens=20).new_token_ids
    assert model.generate([[7, 8, 9]], max_new_tokens=20, **always(plan)).new_token_ids == own


@pytest.mark.parametrize(
    "fields", [{"num_heads": 3}, {"num_blocks": 0}, {"num_blocks": 0, "num_heads": 2}, {"num_heads": -1}]
)
def test_settings_that_are_refused(fields):
    with pytest.raises(SettingError, match=r"expected (blocks and no heads|an integer)"):
        ExitSettings(**fields)


@pytest.mark.parametrize(
    "spec",
    [
        AdapterSpec(0, 1, num_heads=2),
        AdapterSpec(1, 0, num_heads=2),
        AdapterSpec(0, 0, num_heads=-1),
        AdapterSpec(0, 0, reads_state=False, num_heads=2),
        AdapterSpec(0, 0, further_states=(1,), num_heads=2),
    ],
)
def test_specs_that_are_refused(spec):
    with pytest.raises(UnsupportedModelError, match="expected 1 or more"):
        make_adapter(tiny_model("llama"), spec)


def test_a_file_reads_back_and_another_models_is_refused(tmp_path):
    model, file = tiny_model("llama"), tmp_path / "a.safetensors"
    heads = adapter_of(model, SPEC)
    save_adapter(heads, file, torch.float64)
    again = load_adapter(file, model, torch.float64)
    assert again.spec == SPEC == read_spec(file)
    assert torch.equal(again.modules["heads"].weight, heads.modules["heads"].weight)
    other = make_adapter(model, dataclasses.replace(SPEC, num_heads=3))
    other.spec = SPEC
    save_adapter(other, file, torch.float64)
    with pytest.raises(PlanMismatchError, match="another model"):
        load_adapter(file, model, torch.float64)


def test_packed_weights_draft_alike(tmp_path):
    model, results = tiny_model("llama", dtype=torch.float32), []
    save_adapter(adapter_of(model, SPEC), tmp_path / "a.safetensors", torch.float32)
    plan = DraftPlan(exit_layer=0, adapter=tmp_path / "a.safetensors", num_siblings=2)
    for prepares in (False, True):
        model_of = layerskip.wrap(model)
        if prepares:
            model_of.prepare()
        result = model_of.generate(prompt(), **always(plan), max_new_tokens=30, eos_token_id=None)
        results.append((result.new_token_ids, result.stats.accepted_histogram))
    assert results[0] == results[1]
