"""The acceptance rules as decoding uses them: several rounds on a toy language whose law is known exactly.

The toy target and draft are tables: the next token's distribution given the last token. Rules are given its logarithm.
"""

import pytest
import torch
from torch import Tensor

from layerskip import rules
from layerskip.draft import Draft
from layerskip.errors import SettingError
from layerskip.noise import Purpose, exponential
from layerskip.rules import RULES, AcceptanceRule, draw_token, make_rule
from layerskip.verify import race
from tests.chi_square import chi_square_p_value

START, VOCAB, LENGTH = 0, 3, 3
ROWS = 30_000

TARGET = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.3, 0.0, 0.7]])
DRAFTS = {
    "near": torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.25, 0.05, 0.7]]),
    "far": torch.tensor([[0.1, 0.1, 0.8], [0.8, 0.2, 0.0], [0.4, 0.5, 0.1]]),
    "deterministic": torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]),
    "the target itself": TARGET,
}
POLICIES = [{"stop_behind": 1}, {"pause_after": 1}, {"stop_behind": 0, "pause_after": 2}]

every_rule = pytest.mark.parametrize("name", RULES)
every_draft = pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS.keys())


def decode(
    rule: AcceptanceRule,
    rows: int,
    draft: Tensor = TARGET,
    target: Tensor = TARGET,
    max_drafts: int = 2,
    stop_behind: int | None = None,
    pause_after: int | None = None,
    length: int = LENGTH,
) -> Tensor:
    """Decode `length` tokens in each row by rounds of drafting and accepting: (rows, length).

    Rows are at different positions after the first round, as in a real batch.

    Args:
        stop_behind: a row drafts no further in a round once it has drafted this token.
        pause_after: a row drafts nothing in a round if the last draft of its round before was this token, accepted
            or not.
    """
    tokens = torch.full((rows, 1 + length + max_drafts + 1), START)
    row, lengths, round_tensor = torch.arange(rows), torch.ones(rows, dtype=torch.int64), torch.tensor(0)
    resting = torch.zeros(rows, dtype=torch.bool)
    while (lengths < 1 + length).any():
        round_tensor += 1
        live, num_drafted, probs = ~resting, torch.zeros_like(lengths), []
        for offset in range(max_drafts):
            where = (lengths + offset).clamp(max=tokens.shape[1] - 1)  # finished rows draft into the last place
            scores = draft[tokens[row, where - 1]].log()
            drawn, step_probs = rule.draw(scores[:, None], where[:, None], round_tensor)
            tokens[row, where] = drawn[:, 0]
            probs += [] if step_probs is None else [step_probs]
            num_drafted += live
            resting = live & (tokens[row, where] == pause_after)
            live = live & (tokens[row, where] != stop_behind)
        places = (lengths[:, None] + torch.arange(max_drafts + 1)).clamp(max=tokens.shape[1] - 1)
        drafted = tokens.gather(1, places[:, :max_drafts])
        proposed = Draft(drafted, num_drafted.tolist(), torch.cat(probs, 1) if probs else None)
        acceptance = rule.accept(proposed, target[tokens.gather(1, places - 1)].log(), places, round_tensor)
        going = lengths < 1 + length
        next_place = (lengths + acceptance.accepted)[going]
        tokens[row[going], next_place] = acceptance.next_token[going]
        lengths[going] = next_place + 1
    return tokens[:, 1 : 1 + length]


def joint(table: Tensor, length: int = LENGTH) -> Tensor:
    """The exact probability of every continuation of START, (vocab ** length,)."""
    probs, last = torch.ones(1, dtype=torch.float64), torch.tensor([START])
    for _ in range(length):
        probs = (probs[:, None] * table.double()[last]).flatten()
        last = torch.arange(VOCAB).repeat(len(last))
    return probs


def fit(texts: Tensor, table: Tensor) -> float:
    """P-value of `texts` (rows, LENGTH) as draws of the language in `table`."""
    index = (texts * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
    return chi_square_p_value(torch.bincount(index, minlength=VOCAB**LENGTH), joint(table))


def seeds(rows: int = ROWS) -> Tensor:
    """Consecutive seeds, as the rows of one call get them."""
    return torch.arange(rows)


@every_rule
@every_draft
@pytest.mark.parametrize("max_drafts", [1, 2, 4])
def test_texts_are_distributed_as_the_targets(name, draft, max_drafts):
    """All 27 texts of three tokens, jointly: catches noise that is used twice. False-alarm probability 1e-6."""
    texts = decode(make_rule(name, seeds(), sampled=True), ROWS, draft, max_drafts=max_drafts)
    assert fit(texts, TARGET) > 1e-6


@every_rule
@every_draft
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_texts_stay_exact_when_drafting_depends_on_what_was_drafted(name, draft, policy):
    """A policy may look at drafts, rejected ones included, to decide about the next; it must not bias the text.

    It would if a position that is drafted again drew with the noise it had drawn with before: that it is drafted
    again already tells something about that noise. False-alarm probability 1e-6.
    """
    texts = decode(make_rule(name, seeds(), sampled=True), ROWS, draft, max_drafts=2, **policy)
    assert fit(texts, TARGET) > 1e-6


@every_rule
def test_plain_decoding_is_distributed_as_the_target(name):
    """Rounds without drafts. False-alarm probability 1e-6."""
    assert fit(decode(make_rule(name, seeds(), sampled=True), ROWS, max_drafts=0), TARGET) > 1e-6


@every_rule
def test_tokens_of_a_row_alone_are_those_in_a_batch(name):
    together = decode(make_rule(name, seeds(6), sampled=True), 6, DRAFTS["near"], length=20)
    for row in range(6):
        alone = decode(make_rule(name, seeds(6)[row : row + 1], sampled=True), 1, DRAFTS["near"], length=20)
        assert torch.equal(alone[0], together[row])


@every_rule
def test_equal_seeds_repeat_and_others_do_not(name):
    """A false alarm needs two of the texts of 40 tokens to be equal by chance: below 1e-6."""
    texts = decode(make_rule(name, torch.tensor([7, 7, 8]), sampled=True), 3, DRAFTS["near"], length=40)
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


@every_draft
@pytest.mark.parametrize("max_drafts", [1, 3])
@pytest.mark.parametrize("policy", [{}, *POLICIES], ids=str)
def test_invariant_texts_do_not_depend_on_the_draft(draft, max_drafts, policy):
    """Token by token what plain decoding gives for the same seeds."""
    rule = make_rule("invariant", seeds(500), sampled=True)
    plain = decode(rule, 500, max_drafts=0, length=12)
    assert torch.equal(decode(rule, 500, draft, max_drafts=max_drafts, length=12, **policy), plain)


def test_maximal_texts_depend_on_the_draft():
    """The price of the higher acceptance, said in the documentation; equal texts would mean the rules are the same."""
    rule = make_rule("maximal", seeds(500), sampled=True)
    assert not torch.equal(decode(rule, 500, DRAFTS["near"]), decode(rule, 500, max_drafts=0))


@every_rule
@every_draft
def test_greedy_texts_are_the_argmax_chain(name, draft, monkeypatch):
    """Whatever is drafted; and without noise or distributions, which cost more than the argmax."""
    for name_of_cost in ("exponential_at", "uniform", "distribution"):
        monkeypatch.setattr(rules, name_of_cost, None)
    chain = [START]
    for _ in range(6):
        chain.append(int(TARGET[chain[-1]].argmax()))
    for max_drafts in (0, 1, 4):
        texts = decode(make_rule(name, seeds(2), sampled=False), 2, draft, max_drafts=max_drafts, length=6)
        assert texts.tolist() == [chain[1:]] * 2


@pytest.mark.parametrize(("name", "fresh"), [("maximal", True), ("invariant", False)])
def test_noise_of_a_position_in_a_later_round(name, fresh):
    """Maximal draws anew when a position is drafted again, invariant must draw the same.

    False-alarm probability: that 20 draws from 4096 equally likely tokens all repeat, 1e-72.
    """
    rule, positions = make_rule(name, seeds(20), sampled=True), torch.full((20, 1), 9)

    def drawn_in(round_number: int) -> Tensor:
        return rule.draw(torch.zeros(20, 1, 4096), positions, torch.tensor(round_number))[0]

    first = drawn_in(1)
    assert torch.equal(drawn_in(1), first)
    for later in (2, 2**20):
        assert torch.equal(drawn_in(later), first) is not fresh


@every_rule
def test_positions_draw_independently(name):
    """Consecutive positions of one seed, as pairs. False-alarm probability 1e-6."""
    rule = make_rule(name, torch.tensor([3]), sampled=True)
    probs = torch.tensor([0.5, 0.3, 0.2])
    drawn = rule.draw(probs.log().expand(1, ROWS, 3), torch.arange(ROWS)[None], torch.tensor(1))[0][0]
    pairs = torch.bincount(drawn[:-1:2] * 3 + drawn[1::2], minlength=9)
    assert chi_square_p_value(pairs, torch.outer(probs, probs).flatten()) > 1e-6


@every_draft
def test_rates_of_acceptance(draft):
    """Maximal accepts a draft with 1 - d, invariant with at least (1 - d) / (1 + d), d the total variation distance.

    False-alarm probability below 6e-7 (5 standard errors) for each.
    """
    probs = {"draft": draft[START], "target": TARGET[START]}
    distance = (probs["draft"] - probs["target"]).abs().sum().item() / 2
    positions = torch.tensor([[1, 2]]).expand(ROWS, 2)
    rates = {}
    for name in RULES:
        rule = make_rule(name, seeds(), sampled=True)
        first_round = torch.tensor(1)
        drafted, draft_probs = rule.draw(probs["draft"].log().expand(ROWS, 1, VOCAB), positions[:, :1], first_round)
        target_scores = probs["target"].log().expand(ROWS, 2, VOCAB)
        acceptance = rule.accept(Draft(drafted, [1] * ROWS, draft_probs), target_scores, positions, first_round)
        rates[name] = acceptance.accepted.double().mean().item()
    slack = 5 * 0.5 / ROWS**0.5
    assert rates["maximal"] == pytest.approx(1 - distance, abs=slack)
    assert (1 - distance) / (1 + distance) - slack <= rates["invariant"] <= 1 - distance + slack


@pytest.mark.parametrize("name", RULES)
def test_a_drawn_draft_names_its_distribution_where_acceptance_asks_for_it(name):
    """Catches drafts that carry a whole vocabulary along for nothing, and drawn ones that pass for certain."""
    scores, positions, first_round = TARGET.log()[None], torch.tensor([[1, 2, 3]]), torch.tensor(1)
    _, probs = make_rule(name, seeds(1), sampled=True).draw(scores, positions, first_round)
    if name == "maximal":
        torch.testing.assert_close(probs[0], TARGET)
    else:  # what was drawn alike is compared, not weighed
        assert probs is None
    tokens, none = make_rule(name, seeds(1), sampled=False).draw(scores, positions, first_round)
    assert (tokens.tolist(), none) == ([TARGET.argmax(-1).tolist()], None)


def test_greedy_takes_the_first_of_equals():
    """As argmax in plain decoding: a draft and its verification must break ties alike."""
    rule, scores = make_rule("maximal", seeds(1), sampled=False), torch.zeros(1, 1, 60)
    scores[0, 0, [7, 30]] = 1.0
    tokens, _ = rule.draw(scores, torch.tensor([[4]]), torch.tensor(1))
    acceptance = rule.accept(Draft(tokens, [1]), scores.expand(1, 2, -1), torch.tensor([[4, 5]]), torch.tensor(1))
    assert (tokens.item(), acceptance.accepted.item(), acceptance.next_token.item()) == (7, 1, 7)


class TestPositionsWithoutDistribution:
    """NaN anywhere, or every token banned: flagged from there on, and no other position or row is touched."""

    @staticmethod
    def num_valid(name: str, sampled: bool, scores: Tensor) -> list[int]:
        rule, (rows, places, _) = make_rule(name, seeds(len(scores)), sampled=sampled), scores.shape
        draft = Draft(torch.zeros(rows, places - 1, dtype=torch.int64), [places - 1] * rows)
        return rule.accept(draft, scores, torch.arange(places).expand(rows, -1), torch.tensor(1)).num_valid.tolist()

    @every_rule
    @pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
    @pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_is_counted_up_to_the_first(self, name, sampled, bad, place):
        scores = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(0))
        scores[1, place] = bad
        assert self.num_valid(name, sampled, scores) == [4, place]

    @every_rule
    @pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
    def test_one_nan_voids_the_position_and_one_ban_does_not(self, name, sampled):
        scores = torch.randn(2, 2, 9, generator=torch.Generator().manual_seed(0))
        scores[0, 1, 5], scores[1, 1, 5] = float("nan"), float("-inf")
        assert self.num_valid(name, sampled, scores) == [1, 2]

    @every_rule
    def test_an_infinite_score_cannot_be_sampled_from(self, name):
        """A model that overflows in float16 gives +inf, of which softmax makes NaN: a token would be random."""
        scores = torch.zeros(1, 2, 9)
        scores[0, 1, 4] = float("inf")
        assert self.num_valid(name, True, scores) == [1]

    @every_rule
    @pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
    def test_what_is_chosen_there_is_an_id(self, name, sampled):
        """It is written into the tokens before anybody looks; beyond the vocabulary the embedding would fail."""
        rule = make_rule(name, seeds(1), sampled=sampled)
        scores = torch.full((1, 2, 9), float("nan"))
        draft = Draft(torch.zeros(1, 1, dtype=torch.int64), [1])
        chosen = rule.accept(draft, scores, torch.tensor([[3, 4]]), torch.tensor(1)).next_token
        assert 0 <= chosen.item() < 9


@pytest.mark.parametrize(("name", "sampled"), [("maximal", True), ("invariant", True), ("maximal", False)])
def test_few_ids_are_drawn_as_if_all_others_were_impossible(name, sampled):
    """The same tokens: the noise of an id does not depend on which others are scored."""
    ids, generator = torch.tensor([2, 3, 7, 11, 40]), torch.Generator().manual_seed(0)
    few = torch.randn(200, 1, 5, generator=generator)
    everywhere = torch.full((200, 1, 50), float("-inf")).index_copy_(2, ids, few)
    rule, positions = make_rule(name, seeds(200), sampled=sampled), torch.full((200, 1), 4)
    tokens, probs = rule.draw(few, positions, torch.tensor(1), ids)
    expected, all_probs = rule.draw(everywhere, positions, torch.tensor(1))
    assert torch.equal(tokens, expected) and len(tokens.unique()) == 5
    if probs is not None:
        torch.testing.assert_close(probs, all_probs[:, :, ids])


class TestDrawToken:
    """Only the noise that can matter is computed; what is drawn must be what all of it gives."""

    @staticmethod
    def both(probs: Tensor) -> tuple[Tensor, Tensor]:
        rows, tokens, ids = probs.shape
        seeds, counters = torch.arange(rows) - 3, torch.arange(tokens).expand(rows, -1) + (5 << 32)
        noise = exponential(seeds, counters, Purpose.TOKEN, ids)
        return draw_token(probs, seeds, counters, Purpose.TOKEN), race(probs, noise)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("kept", [1, 2, 17, 500])
    def test_draws_what_the_whole_race_draws(self, kept, dtype):
        """Catches noise of another id, row or position, and a product rounded in another dtype."""
        scores = torch.randn(6, 40, 500, generator=torch.Generator().manual_seed(kept), dtype=dtype)
        least = scores.topk(kept, dim=-1).values[..., -1:]
        drawn, raced = self.both(scores.masked_fill(scores < least, float("-inf")).softmax(-1))
        assert torch.equal(drawn, raced)
        assert len(drawn.unique()) > 50

    def test_of_a_residual(self):
        """Which does not sum to 1, and may leave ids next to nothing."""
        scores = torch.randn(6, 40, 50, generator=torch.Generator().manual_seed(1))
        drawn, raced = self.both((scores.softmax(-1) - scores.flip(0).softmax(-1)).clamp(min=0) * 1e-30)
        assert torch.equal(drawn, raced)

    def test_of_the_smallest_numbers(self):
        """A quotient of the smallest float32 number is still more than the nothing of a banned id."""
        probs = torch.zeros(4, 10, 9)
        probs[..., 6] = 1e-45
        drawn, raced = self.both(probs)
        assert (drawn == 6).all() and (raced == 6).all()


def test_unknown_rule_is_named_with_what_is_there():
    with pytest.raises(SettingError, match=r"'maximum'.*'maximal', 'invariant'.*Did you mean 'maximal'"):
        make_rule("maximum", seeds(1), sampled=True)
