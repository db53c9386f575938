"""Sampled output is distributed as the model's own: against the distribution enumerated with transformers' parts.

The vocabulary has 8 ids, so all texts of a few tokens can be counted. Every test draws with fixed seeds and demands a
p-value above 1e-6: had the seeds been others, a test here would fail by chance once in a million.
"""

import functools

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from layerskip import CostRatios, DraftPlan, SettingError, wrap
from layerskip.models.adapter import AdapterSpec
from layerskip.models.adapter_file import save_adapter
from tests.chi_square import chi_square_p_value
from tests.drafting import always
from tests.engines import LogitsDrafter, make_engine
from tests.special_models import adapter_of, agreeing_model
from tests.tiny_models import prompt, tiny_model

VOCAB = 8
PROMPT = [1, 5, 3, 5]
ROWS = 3000
RULES = ("maximal", "invariant")
FALSE_ALARM = 1e-6


@functools.cache
def tiny_vocabulary_model(seed: int = 0) -> LlamaForCausalLM:
    """A Llama of three layers and 8 ids, whose distributions have an entropy of one to two bits."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.float64).eval()
    return model.requires_grad_(False)


DRAFTS = {
    "plain": None,
    "exit": DraftPlan.exit(1, num_draft_tokens=2),
    "skip": DraftPlan.skip(attention=[1, 2], num_draft_tokens=2),
    "unsure exit": DraftPlan.exit(2, num_draft_tokens=3, confidence_threshold=0.4),
    "model": DraftPlan.model(tiny_vocabulary_model(1), num_draft_tokens=2),
    "lookup": DraftPlan.lookup(2),
    "lookup and exit": DraftPlan.exit(1, num_draft_tokens=2, lookup_tokens=1),
    "lookup and model": DraftPlan.model(tiny_vocabulary_model(1), num_draft_tokens=1, lookup_tokens=2),
    "few ids": DraftPlan.exit(1, num_draft_tokens=2, draft_vocabulary=[1, 3, 5]),
    "tree": DraftPlan.exit(1, num_draft_tokens=2, num_siblings=2),
    "tree of few ids": DraftPlan.exit(1, num_draft_tokens=2, num_siblings=1, draft_vocabulary=[1, 3, 5]),
    "tree and lookup": DraftPlan.exit(1, num_draft_tokens=2, num_siblings=2, lookup_tokens=1),
    "lookahead": DraftPlan.lookahead(2, 3, 3),
}
UNDER_ALL = [draft for draft in DRAFTS if draft != "lookahead"]  # which lets be what looks at the text, as "all" does
LEAST = {"lookup": 0.03, "few ids": 0.1, "tree of few ids": 0.1}  # acceptance: the repetition penalty makes copies rare

# What the call asks for, and the same by transformers' processors.
CONTROLS = {
    "nothing": ({"top_k": None}, []),
    "temperature": ({"temperature": 0.6, "top_k": 0}, [TemperatureLogitsWarper(0.6)]),
    "top_k": ({"top_k": 4}, [TopKLogitsWarper(4)]),
    "top_p": ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "min_p": ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
    "repetition_penalty": ({"repetition_penalty": 1.6}, [RepetitionPenaltyLogitsProcessor(1.6)]),
    "warpers": (
        {"temperature": 1.2, "top_p": 0.95, "top_k": 0},
        [TemperatureLogitsWarper(1.2), TopPLogitsWarper(0.95)],
    ),
    "all": (
        {"repetition_penalty": 1.6, "temperature": 1.4, "top_k": 6, "top_p": 0.95},
        [
            RepetitionPenaltyLogitsProcessor(1.6),
            TemperatureLogitsWarper(1.4),
            TopKLogitsWarper(6),
            TopPLogitsWarper(0.95),
        ],
    ),
}


@functools.cache
def sample(draft: str, controls: str, rule: str, rows: int = ROWS, **governor):
    options = {"do_sample": True, "max_new_tokens": 4, "eos_token_id": None, **CONTROLS[controls][0], **governor}
    return wrap(tiny_vocabulary_model()).generate(
        PROMPT, **(always(DRAFTS[draft]) | options), num_return_sequences=rows, seed=1, acceptance_rule=rule
    )


@functools.cache
def enumerated(controls: str, tokens: int = 4) -> torch.Tensor:
    """Probability of every text of `tokens` new tokens: one axis of 8 for each of them."""
    processors = LogitsProcessorList(CONTROLS[controls][1])
    prefixes, probs = torch.tensor([PROMPT]), torch.ones(1, dtype=torch.float64)
    for _ in range(tokens):
        logits = tiny_vocabulary_model()(prefixes).logits[:, -1]
        following = processors(prefixes, logits).softmax(-1)
        probs = (probs[:, None] * following).flatten()
        ids = torch.arange(VOCAB).repeat(len(prefixes))[:, None]
        prefixes = torch.cat((prefixes.repeat_interleave(VOCAB, 0), ids), dim=1)
    return probs.view([VOCAB] * tokens)


def p_value(new_token_ids, probs: torch.Tensor, axes: tuple[int, ...]) -> float:
    """Fit of the tokens at `axes` to `probs`, with the texts that are too rare to count thrown together."""
    drawn = torch.tensor(new_token_ids)[:, list(axes)]
    others = [axis for axis in range(probs.dim()) if axis not in axes]
    probs = (probs.sum(others) if others else probs).flatten()
    places = VOCAB ** torch.arange(len(axes) - 1, -1, -1)
    counts = torch.bincount((drawn * places).sum(1), minlength=len(probs))
    assert not counts[probs == 0].any(), "a text of probability 0"
    common = probs * len(drawn) >= 10
    counts, probs = (torch.cat((each[common], each[~common].sum()[None])) for each in (counts, probs))
    if probs[-1] * len(drawn) < 10:  # too little even together: count it with the rarest of the others
        counts, probs = counts.sort()[0], probs[counts.argsort()]
        counts, probs = (torch.cat((each[:2].sum()[None], each[2:])) for each in (counts, probs))
    return chi_square_p_value(counts, probs)


@pytest.mark.parametrize(("draft", "rule"), [*((draft, "maximal") for draft in UNDER_ALL), ("plain", "invariant")])
def test_all_controls_together(draft, rule):
    """Chi-square of 3,000 texts: tokens 1-3, 2-4, and 3 and 4 alone; false alarm below 4e-6 for other seeds.

    Catches a draft that is accepted too often or too seldom, a wrong residual, a bonus token drawn from something
    else than the processed distribution, noise that is used twice, and a processor with the wrong prefix.
    """
    result = sample(draft, "all", rule)
    for axes in ((0, 1, 2), (1, 2, 3), (2,), (3,)):
        assert p_value(result.new_token_ids, enumerated("all"), axes) > FALSE_ALARM
    if draft != "plain":
        assert LEAST.get(draft, 0.2) < result.stats.acceptance_rate < 0.95, "the test needs drafts of both outcomes"


@pytest.mark.parametrize("draft", [draft for draft in UNDER_ALL if draft != "plain"])
def test_under_the_invariant_rule_drafts_change_nothing(draft):
    """So that the chi-square of plain sampling under this rule is that of all drafts."""
    result = sample(draft, "all", "invariant", rows=400)
    assert result.new_token_ids == sample("plain", "all", "invariant").new_token_ids[:400]
    assert LEAST.get(draft, 0.2) < result.stats.acceptance_rate < 0.95


@pytest.mark.parametrize("draft", ["lookup and exit", "lookup and model"])
def test_rows_of_one_batch_draft_from_both_sources(draft):
    """Guards the tests above: copied and drawn tokens stand side by side in them."""
    stats = sample(draft, "all", "maximal").stats
    for source in ("lookup", draft.split()[-1].replace("exit", "self")):
        assert stats.proposed_by_source[source] > stats.accepted_by_source[source] > 0


def test_ids_that_are_never_drafted_are_drawn_all_the_same():
    """Guards the tests above: most of the vocabulary is among them."""
    result = sample("few ids", "all", "maximal")
    pairs = [(token, drafted) for row in zip(result.new_token_ids, result.drafted, strict=True)
             for token, drafted in zip(*row, strict=True)]  # fmt: skip
    assert {token for token, drafted in pairs if drafted} <= {1, 3, 5}
    assert {token for token, _ in pairs} > {0, 2, 4, 6, 7}


@pytest.mark.parametrize("draft", ["exit", "lookup and exit", "few ids"])
def test_a_governed_text_is_distributed_as_the_models(draft):
    """What is drafted depends on what was accepted, and on how sure the draft is; false alarm 2e-6 for other seeds.

    Catches noise that is used again for a place that was drafted before, which a policy that looks at drafts reveals.
    """
    costs = CostRatios(draft=0.1, verify_slope=0.05)
    result = sample(draft, "all", "maximal", governor="fixed", cost_ratios=costs)
    assert len([count for count in result.stats.drafted_histogram if count]) > 1, "drafts of several lengths"
    for axes in ((0, 1, 2), (1, 2, 3)):
        assert p_value(result.new_token_ids, enumerated("all"), axes) > FALSE_ALARM


TREES = ["tree", "tree of few ids", "tree and lookup", "lookahead"]


@pytest.mark.parametrize("governor", ["off", "fixed"])
@pytest.mark.parametrize("controls", ["nothing", "warpers", "top_k"])
@pytest.mark.parametrize("draft", TREES)
def test_a_text_drafted_as_trees_is_distributed_as_the_models(draft, controls, governor):
    """They are ranked by the noise of the target's own draws; false alarm 2e-6 for other seeds.

    Catches that noise in a rule that it must not reach: of trees without siblings, too, the target's draw decides.
    """
    costs = {"cost_ratios": CostRatios(draft=0.05, verify_slope=0.05)} if governor == "fixed" else {}
    result = sample(draft, controls, "maximal", governor=governor, **costs)
    assert result.stats.proposed_beside
    for axes in ((0, 1, 2), (1, 2, 3)):
        assert p_value(result.new_token_ids, enumerated(controls), axes) > FALSE_ALARM


@pytest.mark.parametrize(
    ("controls", "siblings"), [("all", 0), ("warpers", 0), ("nothing", 2), ("warpers", 2), ("top_k", 5)]
)
def test_a_text_drafted_by_heads_is_distributed_as_the_models(tmp_path, controls, siblings):
    """Chains that were drawn by heads, which do not know the drafts before them, and ranked trees of any shape.

    False alarm 2e-6 for other seeds.
    """
    model, file = tiny_vocabulary_model(), tmp_path / "heads.safetensors"
    save_adapter(adapter_of(model, AdapterSpec(0, 0, num_heads=3)), file, torch.float64)
    plan = DraftPlan(exit_layer=0, adapter=file, num_draft_tokens=3, num_siblings=siblings)
    options = {"do_sample": True, "max_new_tokens": 4, "eos_token_id": None, **CONTROLS[controls][0]}
    result = wrap(model).generate(PROMPT, **always(plan), **options, num_return_sequences=ROWS, seed=1)
    for axes in ((0, 1, 2), (1, 2, 3)):
        assert p_value(result.new_token_ids, enumerated(controls), axes) > FALSE_ALARM
    assert 0.1 < result.stats.acceptance_rate < 0.95 and (result.stats.proposed_beside > 0) == (siblings > 0)


@pytest.mark.parametrize("draft", TREES)
def test_trees_change_nothing_under_the_invariant_rule(draft):
    result = sample(draft, "warpers", "invariant", rows=400)
    assert result.new_token_ids == sample("plain", "warpers", "invariant", rows=400).new_token_ids
    assert result.stats.proposed_beside


@pytest.mark.parametrize("draft", ["exit", "model", "lookup"])
@pytest.mark.parametrize("controls", [name for name in CONTROLS if name != "all"])
def test_each_control_alone(controls, draft):
    """Chi-square of 1,500 texts, their first three tokens jointly; false alarm 1e-6 for other seeds."""
    result = sample(draft, controls, "maximal", rows=1500)
    assert p_value(result.new_token_ids, enumerated(controls), (0, 1, 2)) > FALSE_ALARM


def test_the_statistic_would_notice():
    """Chi-square has the power to tell apart what a missing or misplaced control gives (here it must fail)."""
    drawn = sample("plain", "all", "maximal").new_token_ids
    for wrong in ("nothing", "repetition_penalty", "temperature"):
        probs = enumerated(wrong) + 1e-9  # nothing is impossible, so that the statistic decides
        assert p_value(drawn, probs, (0, 1, 2)) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_that_knows_nothing(rule):
    """The draft's distribution is unrelated to the model's; false alarm 2e-6 for other seeds."""
    logits = torch.tensor([0.0, 2.0, -1.0, 0.5, 1.0, 0.0, 3.0, -2.0], dtype=torch.float64)
    engine = make_engine(
        tiny_vocabulary_model(),
        [PROMPT] * ROWS,
        lambda _, context: LogitsDrafter(context, logits),
        max_drafts=2,
        acceptance_rule=rule,
        do_sample=True,
        max_new_tokens=4,
        top_k=0,
    )
    rows = [[] for _ in range(ROWS)]
    for commit in engine:
        rows[commit.row].append(commit.token_id)
    for axes in ((0, 1, 2), (1, 2, 3)):
        assert p_value(rows, enumerated("nothing"), axes) > FALSE_ALARM


@pytest.mark.parametrize("draft", ["exit", "model"])
def test_one_row_alone_gives_what_it_gives_in_the_batch(draft):
    """A call of one row takes other paths (no gathering by row); so the distribution above is that of single calls."""
    batch = sample(draft, "all", "maximal").new_token_ids
    options = {"do_sample": True, "max_new_tokens": 4, "eos_token_id": None, **CONTROLS["all"][0]}
    model = wrap(tiny_vocabulary_model())
    for row in range(60):
        alone = model.generate(PROMPT, **always(DRAFTS[draft]), seed=1 + row, **options)
        assert alone.new_token_ids == [batch[row]]


def test_acceptance_is_one_minus_the_total_variation_distance():
    """Leviathan et al. 2023, thm. 3.5, for the first draft of a round: the rule accepts as often as any can.

    Four standard deviations of 3,000 draws: a false alarm of 6e-5 for other seeds.
    """
    result = sample("model", "nothing", "maximal", rows=ROWS)
    expected, first = 0.0, torch.tensor([PROMPT])
    target, draft = tiny_vocabulary_model(), tiny_vocabulary_model(1)
    for token, prob in enumerate(target(first).logits[0, -1].softmax(-1)):
        prefix = torch.cat((first, torch.tensor([[token]])), 1)
        target_probs, draft_probs = (model(prefix).logits[0, -1].softmax(-1) for model in (target, draft))
        expected += float(prob * torch.minimum(target_probs, draft_probs).sum())
    # The drafts of the first round: later ones stand at other prefixes.
    accepted = sum(row[1] for row in result.drafted) / ROWS
    assert abs(accepted - expected) < 4 * (expected * (1 - expected) / ROWS) ** 0.5


class TestInvariantRule:
    """For a seed the text is that of plain sampling, token by token, whatever is drafted (Daliri et al. 2024)."""

    PLANS = {
        "nothing skipped": DraftPlan.skip(),
        "attention": DraftPlan.skip([1, 2]),
        "first layer": DraftPlan.skip([0], [0]),
        "all but one": DraftPlan.skip([0, 1, 2, 3], [0, 2, 3]),
        "exit 1": DraftPlan.exit(1),
        "exit 3": DraftPlan.exit(3),
        "model": DraftPlan.model(tiny_model("llama", seed=1)),
        "the model itself": DraftPlan.model(agreeing_model("llama")),
        "few ids": DraftPlan.exit(3, draft_vocabulary=range(0, 61, 2)),
        "lookup beside": DraftPlan.exit(3, lookup_tokens=2),
    }
    OPTIONS = {
        "do_sample": True,
        "temperature": 0.9,
        "top_p": 0.95,
        "repetition_penalty": 1.2,
        "eos_token_id": None,
        "acceptance_rule": "invariant",
        "max_new_tokens": 24,
    }

    def text(self, plan=None, inputs=None, seed=3, **changes):
        inputs = prompt() if inputs is None else inputs
        return wrap(agreeing_model("llama")).generate(inputs, seed=seed, **{**always(plan), **self.OPTIONS, **changes})

    @pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
    def test_every_plan_and_draft_length(self, plan):
        plain = self.text().new_token_ids
        for num_draft_tokens in (1, 3, 8):
            drafted = self.text(plan, num_assistant_tokens=num_draft_tokens)
            assert drafted.new_token_ids == plain
            assert drafted.stats.proposed > 0

    @pytest.mark.parametrize("lookup_tokens", [1, 3, 8])
    def test_lookup(self, lookup_tokens):
        loose = {"inputs": prompt(40), "repetition_penalty": None, "temperature": 0.5}
        drafted = self.text(DraftPlan.lookup(lookup_tokens), **loose)
        assert drafted.new_token_ids == self.text(**loose).new_token_ids
        assert drafted.stats.accepted > 0

    @pytest.mark.parametrize("plan", ["exit 3", "model", "few ids", "lookup beside"])
    @pytest.mark.parametrize("governor", ["off", "fixed", "measured"])
    def test_every_governor(self, plan, governor):
        """Whatever it decides, by clocks too. Rows of a batch, because it decides for all of them together."""
        inputs = [prompt(length, seed=length)[0].tolist() for length in (3, 40, 6)]
        ratios = {"cost_ratios": CostRatios(draft=0.05)} if governor == "fixed" else {}
        drafted = self.text(self.PLANS[plan], inputs, governor=governor, **ratios)
        assert drafted.new_token_ids == self.text(inputs=inputs).new_token_ids
        assert drafted.settings["governor"] == governor
        assert governor == "measured" or drafted.stats.accepted > 0

    @pytest.mark.parametrize("threshold", [0.1, 0.5, 0.9])
    def test_every_threshold(self, threshold):
        drafted = self.text(DraftPlan.exit(2), num_assistant_tokens=6, assistant_confidence_threshold=threshold)
        assert drafted.new_token_ids == self.text().new_token_ids

    @pytest.mark.parametrize("plan", ["attention", "exit 3", "model"])
    def test_rows_of_a_batch(self, plan):
        """Catches noise that depends on the row's place, or on how far the other rows are."""
        inputs = [prompt(length, seed=length)[0].tolist() for length in (3, 9, 6)]
        plain = self.text(inputs=inputs, seed=[5, 2**70, -1]).new_token_ids
        assert self.text(self.PLANS[plan], inputs, seed=[5, 2**70, -1]).new_token_ids == plain
        for tokens, row, seed in zip(plain, inputs, (5, 2**70, -1), strict=True):
            assert self.text(self.PLANS[plan], row, seed=seed).new_token_ids == [tokens]

    def test_stops_at_the_same_eos(self):
        for eos in self.text().new_token_ids[0][:12]:
            plain = self.text(eos_token_id=eos)
            drafted = self.text(self.PLANS["attention"], eos_token_id=eos)
            assert (drafted.new_token_ids, drafted.finish_reasons) == (plain.new_token_ids, ["eos"])

    def test_the_same_model_as_draft_is_always_accepted(self):
        """Draft and target share the noise: equal distributions draw equal tokens."""
        assert self.text(self.PLANS["the model itself"]).stats.acceptance_rate == 1

    def test_the_text_is_not_that_of_greedy_decoding(self):
        """Guards the tests above against comparing a text that had no chance to differ."""
        greedy = self.text(do_sample=False, temperature=None, top_p=None).new_token_ids
        assert self.text().new_token_ids != greedy
        assert len({tuple(self.text(seed=seed).new_token_ids[0]) for seed in range(5)}) == 5


class TestSeeds:
    OPTIONS = {"do_sample": True, "max_new_tokens": 16, "eos_token_id": None, **always(DraftPlan.exit(3))}

    @pytest.mark.parametrize("rule", RULES)
    def test_same_seed_same_text(self, rule):
        """Two texts of 16 tokens that only happen to be equal: below 1e-6 even at half a bit a token."""
        model = wrap(agreeing_model("llama"))
        first, second, other = (
            model.generate(prompt(), seed=seed, acceptance_rule=rule, **self.OPTIONS) for seed in (7, 7, 8)
        )
        assert first.new_token_ids == second.new_token_ids
        assert first.drafted == second.drafted
        assert first.new_token_ids != other.new_token_ids

    def test_a_row_uses_the_seed_plus_its_number(self):
        model = wrap(agreeing_model("llama"))
        batch = model.generate(prompt(), seed=7, num_return_sequences=3, **self.OPTIONS)
        alone = [model.generate(prompt(), seed=7 + row, **self.OPTIONS).new_token_ids[0] for row in range(3)]
        assert batch.new_token_ids == alone
        assert len(set(map(tuple, alone))) == 3

    def test_without_a_seed_torchs_generator_decides(self):
        model = wrap(agreeing_model("llama"))
        with torch.random.fork_rng():
            texts = []
            for seed in (11, 11, 12):
                torch.manual_seed(seed)
                texts.append(model.generate(prompt(), **self.OPTIONS).new_token_ids)
            texts.append(model.generate(prompt(), **self.OPTIONS).new_token_ids)
        assert texts[0] == texts[1]
        assert texts[2] not in (texts[0], texts[3])

    def test_a_seed_leaves_torchs_generator_alone(self):
        before = torch.get_rng_state()
        wrap(agreeing_model("llama")).generate(prompt(), seed=7, **self.OPTIONS)
        assert torch.equal(torch.get_rng_state(), before)

    def test_the_drawn_seed_stands_in_the_result(self):
        """A text that was drawn without a seed can be drawn again."""
        model = wrap(agreeing_model("llama"))
        with torch.random.fork_rng():
            result = model.generate(prompt(), num_return_sequences=2, **self.OPTIONS)
        again = model.generate(prompt(), num_return_sequences=2, seed=result.settings["seed"], **self.OPTIONS)
        assert again.new_token_ids == result.new_token_ids

    def test_greedy_is_the_same_for_all_seeds_and_rules(self):
        model, options = wrap(agreeing_model("llama")), {**self.OPTIONS, "do_sample": False}
        texts = [
            model.generate(prompt(), seed=seed, acceptance_rule=rule, **options).new_token_ids
            for seed in (1, 2)
            for rule in RULES
        ]
        assert texts == texts[:1] * 4

    @pytest.mark.parametrize("seed", [1.5, "7", True, [1], [1, 2.0]])
    def test_what_is_no_seed_is_refused(self, llama, seed):
        with pytest.raises(SettingError, match=r"got seed=.* 2 row.*expected an integer, or a list"):
            wrap(llama).generate(prompt(batch=2), seed=seed, do_sample=True)


def test_an_unknown_rule_is_refused_with_a_suggestion(llama):
    with pytest.raises(SettingError, match=r"acceptance_rule='invarant'.*'maximal', 'invariant'.*Did you mean 'invar"):
        wrap(llama).generate(prompt(), acceptance_rule="invarant")
