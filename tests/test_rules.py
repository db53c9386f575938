"""The acceptance rules as decoding uses them: several rounds on a toy language whose law is known exactly.

The toy target and draft are tables: the next token's distribution given the last token.
"""

import pytest
import torch
from torch import Tensor

from layerskip import rules
from layerskip.errors import SettingError
from layerskip.rules import RULES, AcceptanceRule, make_rule
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
    row, lengths, round_index = torch.arange(rows), torch.ones(rows, dtype=torch.int64), 0
    resting = torch.zeros(rows, dtype=torch.bool)
    while (lengths < 1 + length).any():
        round_index += 1
        live, num_drafted, probs = ~resting, torch.zeros_like(lengths), []
        for offset in range(max_drafts):
            where = (lengths + offset).clamp(max=tokens.shape[1] - 1)  # finished rows draft into the last place
            probs.append(draft[tokens[row, where - 1]])
            tokens[row, where] = rule.draw(probs[-1][:, None], where[:, None], round_index)[:, 0]
            num_drafted += live
            resting = live & (tokens[row, where] == pause_after)
            live = live & (tokens[row, where] != stop_behind)
        places = (lengths[:, None] + torch.arange(max_drafts + 1)).clamp(max=tokens.shape[1] - 1)
        drafted = tokens.gather(1, places[:, :max_drafts])
        acceptance = rule.accept(
            drafted,
            torch.stack(probs, 1) if probs else torch.zeros(rows, 0, VOCAB),
            target[tokens.gather(1, places - 1)],
            num_drafted,
            places,
            round_index,
        )
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
    """Whatever is drafted; and greedy decoding computes no noise, which costs more than the argmax."""
    monkeypatch.setattr(rules, "exponential", None)
    monkeypatch.setattr(rules, "uniform", None)
    chain = [START]
    for _ in range(6):
        chain.append(int(TARGET[chain[-1]].argmax()))
    target, draft = (torch.eye(VOCAB)[table.argmax(-1)] for table in (TARGET, draft))
    for max_drafts in (0, 1, 4):
        texts = decode(make_rule(name, seeds(2), sampled=False), 2, draft, target, max_drafts=max_drafts, length=6)
        assert texts.tolist() == [chain[1:]] * 2


@pytest.mark.parametrize(("name", "fresh"), [("maximal", True), ("invariant", False)])
def test_noise_of_a_position_in_a_later_round(name, fresh):
    """Maximal draws anew when a position is drafted again, invariant must draw the same.

    False-alarm probability: that 20 draws from 4096 equally likely tokens all repeat, 1e-72.
    """
    rule, probs = make_rule(name, seeds(20), sampled=True), torch.full((20, 1, 4096), 1 / 4096)
    positions = torch.full((20, 1), 9)
    first = rule.draw(probs, positions, 1)
    assert torch.equal(rule.draw(probs, positions, 1), first)
    for later in (2, 2**20):
        assert torch.equal(rule.draw(probs, positions, later), first) is not fresh


@every_rule
def test_positions_draw_independently(name):
    """Consecutive positions of one seed, as pairs. False-alarm probability 1e-6."""
    rule = make_rule(name, torch.tensor([3]), sampled=True)
    probs = torch.tensor([0.5, 0.3, 0.2])
    drawn = rule.draw(probs.expand(1, ROWS, 3), torch.arange(ROWS)[None], 1)[0]
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
        draft_probs = probs["draft"].expand(ROWS, 1, VOCAB)
        drafted = rule.draw(draft_probs, positions[:, :1], 1)
        acceptance = rule.accept(
            drafted, draft_probs, probs["target"].expand(ROWS, 2, VOCAB), torch.ones(ROWS).long(), positions, 1
        )
        rates[name] = acceptance.accepted.double().mean().item()
    slack = 5 * 0.5 / ROWS**0.5
    assert rates["maximal"] == pytest.approx(1 - distance, abs=slack)
    assert (1 - distance) / (1 + distance) - slack <= rates["invariant"] <= 1 - distance + slack


def test_unknown_rule_is_named_with_what_is_there():
    with pytest.raises(SettingError, match=r"'maximum'.*'maximal', 'invariant'.*Did you mean 'maximal'"):
        make_rule("maximum", seeds(1), sampled=True)
