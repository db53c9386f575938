"""Several proposals for one place: a tree is verified in one pass, and the output stays the model's own."""

import dataclasses
import itertools
import random

import pytest
import torch

import layerskip
from layerskip import CostRatios, DraftPlan, PlanError
from layerskip.chosen import Chosen
from layerskip.draft import Draft, Node, merged, pruned, tree_draft
from layerskip.drafters import ModelDrafter, SelfDrafter
from layerskip.governor import FixedCosts, Source, WorthIt
from layerskip.governor.governor import Decision
from layerskip.models.adapter import AdapterSpec
from layerskip.models.adapter_file import save_adapter
from layerskip.models.decoder import Decoder
from layerskip.models.tree import Tree
from layerskip.rules import Greedy, Invariant
from layerskip.verify import accept_by_match, accept_in_tree
from tests.drafting import always
from tests.engines import make_engine, run_checked
from tests.special_models import agreeing_model, likely_adapter
from tests.tiny_models import FAMILY_NAMES, NUM_LAYERS, VOCAB_SIZE, prompt, tiny_model, transformers_greedy

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
SHAPES = ([0, 1, 2, 0, 0, 1], [0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 2, 3])
ROWS = [prompt(length, seed=length)[0].tolist() for length in (12, 3, 9)]


def path_to(parents, token):
    """Of tokens of a pass, from behind the root to `token`."""
    path = []
    while token:
        path, token = [token, *path], parents[token - 1]
    return path


def random_parents(rng, size):
    return [rng.randint(0, index) for index in range(size)]


class TestTree:
    @pytest.mark.parametrize("seed", range(5))
    def test_what_a_token_sees_is_its_path(self, seed):
        rng = random.Random(seed)
        rows = [random_parents(rng, 9) for _ in range(3)]
        tree = Tree(rows)
        for row, parents in enumerate(rows):
            for token in range(10):
                path = path_to(parents, token)
                assert tree.sees[row, token].nonzero().flatten().tolist() == [0, *path]
                assert tree.depths[row, token] == len(path)

    @pytest.mark.parametrize("parents", [[0, 3, 1], [1], [0, -1]])
    def test_a_child_before_its_parent_is_none(self, parents):
        with pytest.raises(AssertionError, match="not a tree"):
            Tree([parents])


@pytest.mark.parametrize("shapes", [(SHAPES[0],), (SHAPES[3], SHAPES[0], SHAPES[1])], ids=["one row", "ragged rows"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_pass_over_a_tree_is_one_over_each_path(family, shapes):
    """Also across the edge of a window (12 and 9 tokens of prompt), and where positions are learned or rotated."""
    model, decoder = tiny_model(family), layerskip.wrap(tiny_model(family)).decoder
    rows, generator = ROWS[: len(shapes)], torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB_SIZE, (len(rows), 7), generator=generator)
    cache = decoder.new_cache(len(rows), 40)
    longest = max(map(len, rows))
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    with torch.no_grad():
        span = decoder.span([0] * len(rows), longest)
        decoder.run(decoder.embed(padded, span), decoder.full_path, cache, span)
        cache.commit([len(row) for row in rows])
        span = decoder.span([len(row) for row in rows], 7, tree=Tree(shapes))
        logits = decoder.logits(decoder.run(decoder.embed(tokens, span), decoder.full_path, cache, span))
        for index, (row, parents) in enumerate(zip(rows, shapes, strict=True)):
            for token in range(7):
                path = tokens[index, [0, *path_to(parents, token)]].tolist()
                expected = model(torch.tensor([row + path])).logits[0, -1]
                torch.testing.assert_close(logits[index, token], expected, **CLOSE)


class TestAcceptInTree:
    @pytest.mark.parametrize("seed", range(20))
    def test_it_walks_as_the_target_chooses(self, seed):
        """Against a walk in plain Python; some tokens are padding."""
        rng = random.Random(seed)
        rows, drafts, choices, counts = [], [], [], []
        for _ in range(6):
            parents = random_parents(rng, 8)
            tokens: list[int] = []
            for index, parent in enumerate(parents):
                taken = {tokens[other] for other in range(index) if parents[other] == parent}
                tokens.append(rng.choice([each for each in range(12) if each not in taken][:4]))
            rows.append(parents)
            drafts.append(tokens)
            choices.append([rng.randint(0, 3) for _ in range(9)])
            counts.append(rng.randint(0, 8))
        tree = Tree(rows)
        accepted, following, places = accept_in_tree(
            torch.tensor(drafts), torch.tensor(choices), torch.tensor(counts), tree.before, tree.sees
        )
        for row in range(6):
            path = [0]
            while True:
                wanted = choices[row][path[-1]]
                step = [index + 1 for index in range(counts[row])
                        if rows[row][index] == path[-1] and drafts[row][index] == wanted]  # fmt: skip
                if not step:
                    break
                path += step
            assert places[row, : len(path)].tolist() == path
            assert (accepted[row], following[row]) == (len(path) - 1, choices[row][path[-1]])

    def test_a_chain_is_the_simplest_tree(self):
        drafts, choices = torch.randint(0, 2, (50, 4)), torch.randint(0, 2, (50, 5))
        counts, tree = torch.randint(0, 5, (50,)), Tree([[0, 1, 2, 3]] * 50)
        expected = accept_by_match(drafts, choices, counts)
        for one, other in zip(expected, accept_in_tree(drafts, choices, counts, tree.before, tree.sees), strict=False):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("places", "accepted", "length", "stood"),
    [
        (range(5), 2, 4, 2),
        (range(5), 4, 4, 4),
        (range(5), 0, 4, 0),
        ([0, 1, 4, 5], 2, 3, 1),
        ([0, 3, 4, 4], 1, 2, 0),
        ([0, 1, 2, 3], 2, 2, 2),
    ],
)
def test_what_the_governor_is_told_of_a_round(places, accepted, length, stood):
    """How much of the chain stood, whatever stands behind it in the list."""
    assert Chosen([0] * (accepted + 1), accepted, accepted + 1, places).stood(length) == stood


class TestRank:
    SCORES = torch.randn(3, 1, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    WHERE = (torch.tensor([[3], [4], [5]]), torch.tensor(7))

    def test_the_likeliest_first(self):
        assert torch.equal(Greedy().rank(self.SCORES, *self.WHERE, 4), self.SCORES.topk(4).indices)

    @pytest.mark.parametrize("ids", [None, torch.arange(20) * 3])
    def test_under_the_invariant_rule_what_would_be_drawn_is_first(self, ids):
        """And no token is there twice."""
        for seed, count in itertools.product(range(30), (1, 2, 5)):
            rule = Invariant(torch.arange(3) + 10 * seed)
            ranked = rule.rank(self.SCORES, *self.WHERE, count, ids)
            drawn, _ = rule.draw(self.SCORES, *self.WHERE, ids)
            assert torch.equal(ranked[..., 0], drawn)
            assert all(len(set(row)) == count for row in ranked[:, 0].tolist())

    def test_the_targets_own_draw_is_nearly_always_among_few(self):
        """A draft that is off: five of 200 ids hold the target's draw, by likelihood alone they do not."""
        generator = torch.Generator().manual_seed(3)
        target = torch.randn(600, 1, 200, generator=generator, dtype=torch.float64)
        scores = target + torch.randn(target.shape, generator=generator, dtype=torch.float64)
        rule, where = Invariant(torch.arange(600)), (torch.full((600, 1), 9), torch.tensor(4))
        ranked = rule.rank(scores, *where, 5)[:, 0]
        draft = Draft(ranked, [5] * 600, tree=Tree([[0] * 5] * 600))
        positions = where[0] + torch.tensor([[0, 1, 1, 1, 1, 1]])
        stands = rule.accept(draft, target.repeat(1, 6, 1), positions, where[1]).accepted > 0
        likeliest = Draft(scores.topk(5).indices[:, 0], [5] * 600, tree=draft.tree)
        fewer = rule.accept(likeliest, target.repeat(1, 6, 1), positions, where[1]).accepted > 0
        assert stands.double().mean() > 0.85 > 0.5 > fewer.double().mean()


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("adapters"), {}
    specs = {"jump": AdapterSpec(0, further_states=(1, 3)), "exit and state": AdapterSpec(2, 2)}
    for name, spec in specs.items():
        save_adapter(likely_adapter(agreeing_model("llama"), spec), folder / f"{name}.safetensors", torch.float64)
        made[name] = DraftPlan(
            exit_layer=spec.exit_layer, adapter=str(folder / f"{name}.safetensors"), num_draft_tokens=3, num_siblings=2
        )
    return made | {
        "exit": DraftPlan.exit(2, num_siblings=3),
        "one step": DraftPlan.exit(1, num_draft_tokens=1, num_siblings=6),
        "skip, unsure": DraftPlan.skip([1, 2], [2], confidence_threshold=0.3, num_siblings=2),
        "few ids": DraftPlan.exit(2, draft_vocabulary=range(0, VOCAB_SIZE, 2), num_siblings=3),
        "with lookup": DraftPlan.exit(2, lookup_tokens=5, num_siblings=2),
        "model": DraftPlan.model(tiny_model("llama"), num_siblings=3, num_draft_tokens=3),
        "more than there are": DraftPlan.exit(2, num_draft_tokens=2, num_siblings=VOCAB_SIZE + 9),
    }


PLANS = ("jump", "exit and state", "exit", "one step", "skip, unsure", "few ids", "with lookup", "model",
         "more than there are")  # fmt: skip


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_greedy_output_is_the_models_own(family):
    model = agreeing_model(family)
    plan = DraftPlan.exit(2, num_draft_tokens=3, num_siblings=3)
    rows = [ROWS[0], ROWS[1], ROWS[2] * 2]
    own = [transformers_greedy(model, torch.tensor([row]), max_new_tokens=24)[0, len(row) :].tolist() for row in rows]
    result = layerskip.wrap(model).generate(rows, **always(plan), max_new_tokens=24, eos_token_id=None)
    assert result.new_token_ids == own


@pytest.mark.parametrize("governor", ["off", "fixed", "measured"])
@pytest.mark.parametrize("plan", PLANS)
def test_greedy_output_of_every_plan(plans, plan, governor):
    model = agreeing_model("llama")
    rows, ends = [prompt(4 + 3 * row, seed=row)[0].tolist() for row in range(7)], [7, 19]
    options = {"max_new_tokens": 30, "eos_token_id": ends}
    own = [transformers_greedy(model, torch.tensor([row]), **options)[0, len(row) :].tolist() for row in rows]
    ratios = {"cost_ratios": CostRatios(draft=0.02, verify_slope=0.01)} if governor == "fixed" else {}
    result = layerskip.wrap(model).generate(rows, plan=plans[plan], governor=governor, **options, **ratios)
    assert result.new_token_ids == own


DECODING = {
    "greedy": {},
    "drawn": {"do_sample": True, "temperature": 0.7, "top_k": 0, "seed": 1},
    "by the invariant rule": {"do_sample": True, "temperature": 1.0, "seed": 1, "acceptance_rule": "invariant"},
}


@pytest.mark.parametrize("decoding", DECODING.values(), ids=DECODING)
@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan != "with lookup"])  # which lives by what was said
def test_more_stands_than_of_a_chain(plans, plan, decoding):
    """Guards the tests above: siblings are accepted in them, and drafts go on from there. By the same rule for both."""
    model = layerskip.wrap(agreeing_model("llama"))
    chain = dataclasses.replace(plans[plan], num_siblings=0)
    options = {"governor": "off", "max_new_tokens": 60, "eos_token_id": None, **decoding}
    tree_stats = model.generate(ROWS, plan=plans[plan], **options).stats
    chain_stats = model.generate(ROWS, plan=chain, **{**options, "acceptance_rule": "invariant"}).stats
    assert tree_stats.tokens_per_round > chain_stats.tokens_per_round


@pytest.mark.parametrize("plan", PLANS)
def test_under_the_invariant_rule_trees_change_nothing(plans, plan):
    model = layerskip.wrap(agreeing_model("llama"))
    options = {"max_new_tokens": 30, "eos_token_id": None, "do_sample": True, "temperature": 0.8, "seed": 5,
               "acceptance_rule": "invariant"}  # fmt: skip
    assert (
        model.generate(ROWS, **options, **always(plans[plan])).new_token_ids
        == model.generate(ROWS, **options).new_token_ids
    )


@pytest.mark.parametrize("governor", ["off", "fixed", "measured"])
@pytest.mark.parametrize("plan", PLANS)
def test_under_the_other_rule_trees_are_decided_by_the_invariant_one(plans, plan, governor):
    """What a tree leaves out depends on later noise, by its price, its columns, or its size; catches positions that are
    drawn anew just where something was left out, by which the output is no longer distributed as the model's.
    """
    model = layerskip.wrap(agreeing_model("llama"))
    options = {"max_new_tokens": 30, "eos_token_id": None, "do_sample": True, "temperature": 0.8, "seed": 5}
    ratios = {"cost_ratios": CostRatios(draft=0.02, verify_slope=0.01)} if governor == "fixed" else {}
    drafted = model.generate(ROWS, plan=plans[plan], governor=governor, **ratios, **options)
    own = model.generate(ROWS, acceptance_rule="invariant", **options)
    assert drafted.new_token_ids == own.new_token_ids
    assert drafted.settings["acceptance_rule"] == "invariant"
    chains = model.generate(ROWS, plan=dataclasses.replace(plans[plan], num_siblings=0), **options)
    assert chains.settings["acceptance_rule"] == "maximal"


@pytest.mark.parametrize("plan", ["exit", "jump"])
def test_scores_are_those_of_plain_decoding(plans, plan):
    """Each token's, wherever in the tree it was said."""
    model = layerskip.wrap(agreeing_model("llama"))
    options = {"max_new_tokens": 30, "eos_token_id": None, "output_scores": True, "output_logits": True}
    own, drafted = model.generate(ROWS, **options), model.generate(ROWS, **options, **always(plans[plan]))
    assert drafted.new_token_ids == own.new_token_ids
    for name in ("scores", "logits"):
        for one, other in zip(getattr(own, name), getattr(drafted, name), strict=True):
            torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize("plan", ["exit", "jump", "model", "with lookup"])
def test_a_session_goes_on_behind_a_tree(plans, plan):
    model = layerskip.wrap(agreeing_model("llama"))
    session, text = model.session(), []
    for turn in range(3):
        new = prompt(5, seed=turn)[0].tolist()
        answer = session.generate(new, **always(plans[plan]), max_new_tokens=9 + turn, eos_token_id=None)
        text += new
        own = transformers_greedy(model.hf_model, torch.tensor([text]), max_new_tokens=9 + turn)[0, len(text) :]
        assert answer.new_token_ids == [own.tolist()]
        text += own.tolist()


def entries_of(decoder, text):
    cache, span = decoder.new_cache(1, text.shape[1], kept_states=[1, NUM_LAYERS]), decoder.span([0], text.shape[1])
    decoder.run(decoder.embed(text, span), decoder.full_path, cache, span)
    return cache


def test_the_cache_holds_the_accepted_path():
    """Keys, values and kept states, as a fresh pass over the text computes them."""
    model = agreeing_model("llama")
    engine = make_engine(
        model, ROWS, lambda decoder, context: SelfDrafter(decoder, DraftPlan.exit(2).path(NUM_LAYERS), context),
        num_siblings=3, pass_width=None, max_new_tokens=20,
    )  # fmt: skip
    engine.state.cache = Decoder(model).new_cache(3, engine.state.cache.capacity, kept_states=[1, NUM_LAYERS])
    engine._let_go = lambda: None
    rows = run_checked(engine)
    assert sum(engine.stats.accepted_by_offset) > 10
    for row, (before, new) in enumerate(zip(ROWS, rows, strict=True)):
        text = torch.tensor([before + new[:-1]])
        fresh = entries_of(Decoder(model), text)
        for held, right in zip(engine.state.cache.entries, fresh.entries, strict=True):
            torch.testing.assert_close(held[row, :, : text.shape[1]], right[0], rtol=0, atol=1e-10)
        for behind, states in fresh.states.items():
            held = engine.state.cache.states[behind][row, : text.shape[1]]
            torch.testing.assert_close(held, states[0], rtol=0, atol=1e-10)


def test_a_draft_models_cache_holds_what_stands():
    """Its chain was fed to it, and another token was accepted: output would stay right, drafts would get worse."""
    draft = tiny_model("llama")
    engine = make_engine(
        agreeing_model("llama"), ROWS, lambda _, context: ModelDrafter(Decoder(draft), context),
        num_siblings=4, max_new_tokens=24,
    )  # fmt: skip
    engine._let_go = lambda: None
    rows = run_checked(engine)
    (drafter,) = engine.drafters.values()
    for row, (before, new) in enumerate(zip(ROWS, rows, strict=True)):
        held = drafter.cache.lengths[row]
        assert held >= len(before) + len(new) - 4
        fresh = entries_of(Decoder(draft), torch.tensor([(before + new)[:held]]))
        for stored, right in zip(drafter.cache.entries, fresh.entries, strict=True):
            torch.testing.assert_close(stored[row, :, :held], right[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.3}, {"pass_width": 6}, {"cuda_graphs": True}, {"no_repeat_ngram_size": 2}],
    ids=["penalty", "pass_width", "fixed shapes", "n-grams"],
)
def test_where_chains_are_drafted(plans, options):
    """What looks at the text before each token, and what has shapes of its own."""
    model = layerskip.wrap(agreeing_model("llama"))
    options = {"max_new_tokens": 24, "eos_token_id": None, **options}
    drafted = model.generate(ROWS, **always(plans["exit"]), **options)
    assert drafted.new_token_ids == model.generate(ROWS, **options).new_token_ids
    assert drafted.stats.proposed and not drafted.stats.proposed_beside
    assert "chains, no trees: " in drafted.stats.execution
    chain = model.generate(ROWS, **always(DraftPlan.exit(2)), **options).stats
    assert "no trees" not in chain.execution


def test_statistics_count_what_stands_beside_drafts(plans):
    stats = (
        layerskip.wrap(agreeing_model("llama"))
        .generate(ROWS, **always(plans["exit"]), max_new_tokens=24, eos_token_id=None)
        .stats
    )
    assert stats.proposed_beside == 3 * stats.proposed and stats.execution == "eager"


def test_ids_that_cannot_be_drawn_stand_nowhere():
    """Of two that top_k leaves, one is drafted and one may stand beside it."""
    stats = (
        layerskip.wrap(agreeing_model("llama"))
        .generate(
            ROWS,
            **always(DraftPlan.exit(2, num_siblings=6)),
            max_new_tokens=24,
            eos_token_id=None,
            do_sample=True,
            top_k=2,
        )
        .stats
    )
    assert stats.proposed_beside == stats.proposed


@pytest.mark.parametrize("siblings", [VOCAB_SIZE + 9, 10**9])
def test_no_room_is_made_for_more_tokens_than_there_are(siblings):
    model = layerskip.wrap(agreeing_model("llama"))

    def capacity(**plan):
        request = model.check([1, 2, 3], plan=DraftPlan.exit(2, lookup_tokens=6, **plan), max_new_tokens=20)
        return model.engine(request).state.cache.capacity

    assert capacity(num_siblings=siblings) == capacity(num_siblings=VOCAB_SIZE - 1)
    few = {"draft_vocabulary": [1, 2, 3]}
    assert capacity(num_siblings=siblings, **few) == capacity(num_siblings=2, **few)


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_a_draft_that_is_never_right_is_given_up(kind):
    """Through the engine: what the governor is told is what was accepted."""
    plan = DraftPlan.exit(1, num_siblings=2 if kind == "tree" else 0, draft_vocabulary=[VOCAB_SIZE - 1, 1, 2])
    model = layerskip.wrap(agreeing_model("llama"))
    engine = model.engine(model.check(ROWS, plan=plan, governor="fixed", max_new_tokens=60, eos_token_id=None))
    run_checked(engine)
    assert engine.governor._records["self"][0].expected(0, 0) < 0.4
    assert engine.stats.rounds_by_source["none"] > engine.stats.rounds / 2


def test_exact_states_are_used_where_no_sibling_is_worth_it(monkeypatch):
    """Verification need not run the draft's leading blocks again."""
    lengths, run = [], Decoder.run

    def counted(self, hidden, path, *rest, **named):
        lengths.append((len(path), hidden.shape[1]))
        return run(self, hidden, path, *rest, **named)

    monkeypatch.setattr(Decoder, "run", counted)
    ratios = CostRatios(draft=0.01, verify_slope=0.35)
    model = layerskip.wrap(agreeing_model("llama"))
    model.generate(ROWS[0], plan=DraftPlan.exit(2, num_siblings=3), governor="fixed", cost_ratios=ratios,
                   max_new_tokens=30, eos_token_id=None)  # fmt: skip
    assert (NUM_LAYERS - 2, 2) in lengths


def test_rows_that_are_kept_for_their_hooks(plans):
    model = agreeing_model("llama")
    rows = [prompt(4 + 3 * row, seed=row)[0].tolist() for row in range(5)]
    options = {"max_new_tokens": 24, "eos_token_id": [7, 19]}
    own = [transformers_greedy(model, torch.tensor([row]), **options)[0, len(row) :].tolist() for row in rows]
    handle = model.model.layers[1].mlp.down_proj.register_forward_hook(lambda *_: None)
    try:
        result = layerskip.wrap(model).generate(rows, **always(plans["exit"]), **options)
    finally:
        handle.remove()
    assert result.new_token_ids == own and result.stats.proposed_beside


def test_a_session_whose_calls_have_other_siblings(plans):
    model = layerskip.wrap(agreeing_model("llama"))
    session, text = model.session(max_new_tokens=11, eos_token_id=None), []
    for turn, siblings in enumerate((0, 3, 1, 6)):
        plan = dataclasses.replace(plans["jump"], num_siblings=siblings)
        text += (new := prompt(4, seed=turn)[0].tolist())
        own = transformers_greedy(model.hf_model, torch.tensor([text]), max_new_tokens=11)[0, len(text) :].tolist()
        assert session.generate(new, **always(plan)).new_token_ids == [own]
        text += own


def test_a_tree_at_the_models_last_positions(plans):
    model = agreeing_model("llama")
    row = prompt(150, seed=1)[0].tolist()
    result = layerskip.wrap(model).generate(
        [row, ROWS[0]], **always(plans["exit"]), max_new_tokens=30, eos_token_id=None
    )
    for text, new in zip([row, ROWS[0]], result.new_token_ids, strict=True):
        own = transformers_greedy(model, torch.tensor([text]), max_new_tokens=len(new))[0, len(text) :]
        assert new == own.tolist()
    assert result.finish_reasons == ["max_positions", "length"]


class TreeDrafter:
    """Proposes random trees, in which the row's own text takes a path that leaves the chain somewhere."""

    def __init__(self, rows):
        """`rows`: the texts, prompts included."""
        self.rows, self.rng = rows, random.Random(0)

    def begin(self, state):
        pass

    def outlook(self, state):
        return [0] * state.batch

    def catch_up(self, state):
        pass

    def observe(self, state):
        pass

    def propose(self, state, limits, goes_on=None):
        trees, lengths = [], []
        for row, (number, length, limit) in enumerate(zip(state.numbers, state.lengths, limits, strict=True)):
            tree, depths, chain = [], [0], self.rng.randint(min(1, limit), limit)
            own = self.rows[number][length : length + limit]
            right = {0: 0}  # places of the pass on the row's own path, and their depths
            for index in range(chain + 3 * chain):
                parent = index if index < chain else self.rng.randint(0, len(tree))
                if depths[parent] == chain:
                    continue
                taken = {each.token_id for each in tree if each.parent == parent}
                token = self.rng.choice([each for each in range(VOCAB_SIZE) if each not in taken])
                depth = depths[parent]
                if parent in right and depth < len(own) and own[depth] not in taken and self.rng.random() < 0.6:
                    token = own[depth]
                if parent in right and depth < len(own) and token == own[depth]:
                    right[len(tree) + 1] = depth + 1
                tree.append(Node(token, parent, self.rng.random()))
                depths.append(depth + 1)
            trees.append(tree)
            lengths.append(chain)
            for index, node in enumerate(tree[:chain]):  # where nothing beside it is worth it, the chain is read there
                state.token_ids[row, length + index] = node.token_id
        return tree_draft(trees, lengths, state.token_ids.device)


@pytest.mark.parametrize("governor", ["off", "fixed"])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "gpt2"])
def test_trees_of_any_shape(family, governor):
    """Behind what stands beside a chain further tokens may stand, wherever the accepted path goes; rows are ragged."""
    model = agreeing_model(family)
    own = [transformers_greedy(model, torch.tensor([row]), max_new_tokens=40)[0].tolist() for row in ROWS]
    engine = make_engine(model, ROWS, lambda *_: TreeDrafter(own), num_siblings=3, governor=governor, max_new_tokens=32)
    rows = run_checked(engine)
    assert rows == [text[len(row) : len(row) + 32] for text, row in zip(own, ROWS, strict=True)]
    assert engine.stats.accepted > 10 and engine.stats.proposed_beside > 0
    for row, (before, new) in enumerate(zip(ROWS, rows, strict=True)):
        if len(engine.state.numbers) == len(ROWS):
            text = torch.tensor([before + new[:-1]])
            held = engine.state.cache.entries[0][row, :, : text.shape[1]]
            torch.testing.assert_close(held, entries_of(Decoder(model), text).entries[0][0], rtol=0, atol=1e-10)


class TestDrafts:
    CHAIN = [Node(5, 0, 0.5), Node(6, 1, 0.4)]
    BESIDE = [Node(7, 0, 0.2), Node(8, 1, 0.3)]

    def test_there_and_back(self):
        rows = [[*self.CHAIN, *self.BESIDE], [*self.CHAIN[:1]], []]
        draft = tree_draft(rows, [2, 1, 0], torch.device("cpu"))
        assert draft.nodes == rows
        assert draft.tokens.tolist() == [[5, 6, 7, 8], [5, 0, 0, 0], [0] * 4]
        assert draft.tree.parents == [[0, 1, 0, 1], [0, 0, 0, 0], [0] * 4]
        assert (draft.lengths, draft.depth, draft.num_drafted) == ([2, 1, 0], 2, [4, 1, 0])

    def test_what_is_kept_of_a_tree_has_its_parents_kept(self):
        """Whatever was between them."""
        nodes = [*self.CHAIN, *self.BESIDE, Node(9, 3, 0.5), Node(4, 5, 0.5), Node(3, 4, 0.1)]
        assert pruned(nodes, [0, 1, 2, 4, 5]) == [*self.CHAIN, self.BESIDE[0], Node(9, 3, 0.5), Node(4, 4, 0.5)]
        assert pruned(nodes, [0, 1, 3, 6]) == [*self.CHAIN, self.BESIDE[1], Node(3, 3, 0.1)]
        assert pruned(nodes, range(len(nodes))) == nodes

    def test_without_siblings_it_is_a_chain(self):
        draft = tree_draft([self.CHAIN, self.CHAIN[:1]], [2, 1], torch.device("cpu"))
        assert draft.tree is None and draft.lengths == [2, 1] and draft.nodes == [self.CHAIN, self.CHAIN[:1]]

    def test_rows_of_trees_and_chains_are_joined(self):
        tree = tree_draft([[*self.CHAIN, *self.BESIDE], []], [2, 0], torch.device("cpu"))
        chain = tree_draft([[], [Node(1, 0, 1.0), Node(2, 1, 1.0), Node(3, 2, 1.0)]], [0, 3], torch.device("cpu"))
        for parts in ([tree, chain], [chain, tree]):
            joined = merged(parts, 60)
            assert joined.tree.parents == [[0, 1, 0, 1], [0, 1, 2, 3]]
            assert (joined.lengths, joined.num_drafted) == ([2, 3], [4, 3])


class TestTrimming:
    """The governor verifies what stands beside a chain only if its chance is worth a column of the pass."""

    def governor(self, slope, rows=1):
        source = Source(4, 0.1, priors=(0.5, 0.5), num_siblings=3)
        return WorthIt({"self": source}, FixedCosts(CostRatios(0.1, slope), {"self": 0.1}), rows)

    def trimmed(self, slope, rows):
        governor = self.governor(slope, len(rows))
        decision = Decision({"self": [4] * len(rows)}, {"self": [0] * len(rows)}, rate=1.0)
        chain = [Node(1, 0, 0.5), Node(2, 1, 0.5)]
        draft = tree_draft([[*chain, *beside] for beside in rows], [2] * len(rows), torch.device("cpu"))
        return governor.trimmed("self", decision, draft).nodes

    @pytest.mark.parametrize(("slope", "kept"), [(0.05, {3, 4}), (0.2, {3}), (0.5, set()), (0.0, {3, 4, 5})])
    def test_by_the_price_of_a_column(self, slope, kept):
        """Node 4 stands behind a draft that is right in half of the cases."""
        beside = [Node(3, 0, 0.3), Node(4, 1, 0.3), Node(5, 0, 0.03)]
        (row,) = self.trimmed(slope, [beside])
        assert {node.token_id for node in row[2:]} == kept

    def test_what_stands_behind_others_has_their_chance_too(self):
        """Node 6 stands behind 4, which stands behind the first draft; 7 behind 5, which is not worth its column."""
        beside = [Node(5, 0, 0.03), Node(3, 0, 0.3), Node(4, 1, 0.6), Node(6, 5, 0.7), Node(7, 3, 0.9)]
        (row,) = self.trimmed(0.05, [beside])
        assert row[2:] == [Node(3, 0, 0.3), Node(4, 1, 0.6), Node(6, 4, 0.7)]

    @pytest.mark.parametrize("seed", range(10))
    def test_any_tree_is_trimmed_to_a_tree(self, seed):
        rng = random.Random(seed)
        nodes = [Node(10 + index, rng.randint(0, 2 + index), rng.random()) for index in range(12)]
        paths = {}
        for kept in (self.trimmed(slope, [nodes])[0] for slope in (0.01, 0.03, 0.1)):
            for index, node in enumerate(kept):
                assert 0 <= node.parent <= index
                path = (*paths.get((id(kept), node.parent), ()), node.token_id)
                paths[id(kept), index + 1] = path
                assert path[-1] < 10 or path in self.paths([Node(1, 0, 0.5), Node(2, 1, 0.5), *nodes])

    def paths(self, nodes):
        found = [()]
        for node in nodes:
            found.append((*found[node.parent], node.token_id))
        return found

    def test_one_step_costs_the_same_for_all_drafts(self):
        """Where each draft costs a step of its own, fewer are made; what was measured is a step in either case."""
        limits, noted = {}, {}
        for is_one_step in (False, True):
            source = Source(4, 0.3, priors=(0.7, 0.5, 0.5, 0.5), is_one_step=is_one_step)
            costs = FixedCosts(CostRatios(0.3, 0.01), {"self": 0.3})
            costs.note_draft = lambda name, steps, seconds, key=is_one_step: noted.update({key: steps})
            governor = WorthIt({"self": source}, costs, 1)
            for _ in range(2):  # after which it is no mere hope
                governor.learn(Decision({"self": [1]}, {"self": [0]}), {"self": tree_draft([[Node(1, 0, 0.5)]], [1],
                               torch.device("cpu"))}, [1])  # fmt: skip
            decision = governor.decide([10], {"self": [0]})
            limits[is_one_step] = decision.limits["self"][0]
            assert governor.goes_on("self", decision)(0, [0.6]) == [is_one_step]
            governor.note_times({"self": (3, 0.5)}, 4, 1.0)
        assert limits[False] < limits[True] == 4
        assert noted == {False: 3, True: 1}

    def test_a_column_is_one_price_for_all_rows(self):
        rows = self.trimmed(0.2, [[Node(3, 0, 0.15)], [Node(4, 0, 0.15)]])
        assert [len(row) for row in rows] == [3, 3]
        assert [len(row) for row in self.trimmed(0.2, [[Node(3, 0, 0.15)]])] == [2]

    def test_what_stands_beside_drafts_makes_drafting_worth_more(self):
        chain = tree_draft([[Node(1, 0, 0.5), Node(2, 0, 0.3)]], [1], torch.device("cpu"))
        rates = {}
        for stood in (True, False):
            governor, decision = self.governor(0.02), Decision({"self": [1]}, {"self": [0]}, rate=1.0)
            for _ in range(12):
                governor.learn(decision, {"self": governor.trimmed("self", decision, chain)}, [0], [stood])
            rates[stood] = governor.decide([10], {"self": [0]}).rate
            assert (governor._records["self"][0].chance_beside(0.3) > 0.3) == stood
        assert rates[True] > 1.3 > rates[False]

    def test_others_do_not_pay_for_its_columns(self):
        """Copies are verified in a narrow pass, however wide the last trees were."""
        costs = FixedCosts(CostRatios(0.3, 0.05), {"self": 0.3, "lookup": 0.0})
        sources = {"self": Source(4, 0.3, num_siblings=3), "lookup": Source(3, 0.0, priors=(0.9, 0.3, 0.5, 0.55))}
        governor = WorthIt(sources, costs, 1)
        grades = {"self": [None], "lookup": [1]}
        expected = governor.decide([10], grades).limits
        governor._beside["self"].append(8.0)
        assert governor.decide([10], grades).limits == expected and expected["lookup"] == [3]


class TestPlans:
    @pytest.mark.parametrize("value", [-1, 1.5, "2", True])
    def test_values_that_are_refused(self, value):
        with pytest.raises(PlanError, match="num_siblings"):
            DraftPlan.exit(2, num_siblings=value)

    def test_a_plan_that_only_looks_up_has_none(self):
        with pytest.raises(PlanError, match="only looks tokens up"):
            DraftPlan.lookup(4, num_siblings=2)

    def test_a_file_keeps_them(self, tmp_path):
        plan = DraftPlan.exit(2, num_siblings=3)
        plan.save(tmp_path / "plan.json")
        assert DraftPlan.load(tmp_path / "plan.json") == plan
