"""Acceptance on hand-made distributions: each branch forced, the worked example exactly, the law of the output."""

import pytest
import torch
import torch.nn.functional as F

from layerskip.verify import accept_by_match, accept_by_ratio, race
from tests.chi_square import chi_square_p_value

VOCAB = 6
DRAWS = 40_000

# (draft, target) distributions of one position.
PAIRS = {
    "worked example": ((0.6, 0.3, 0.1), (0.5, 0.3, 0.2)),
    "equal": ((0.2, 0.3, 0.5), (0.2, 0.3, 0.5)),
    "disjoint": ((0.5, 0.5, 0.0, 0.0), (0.0, 0.0, 0.3, 0.7)),
    "draft never proposes a token of the target": ((0.9, 0.1, 0.0), (0.2, 0.3, 0.5)),
    "draft proposes a banned token": ((0.1, 0.4, 0.5), (0.8, 0.2, 0.0)),
    "deterministic draft": ((0.0, 1.0, 0.0), (0.5, 0.3, 0.2)),
    "deterministic target": ((0.3, 0.4, 0.3), (0.0, 0.0, 1.0)),
    "nearly deterministic": ((0.998, 0.001, 0.001), (0.01, 0.495, 0.495)),
}
every_pair = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())


def one_hot(tokens: list[list[int]]) -> torch.Tensor:
    return F.one_hot(torch.tensor(tokens, dtype=torch.int64), VOCAB).float()


def by_ratio(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    num_drafted: torch.Tensor,
    uniforms: torch.Tensor,
    exponentials: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many drafts stand, and the token behind them, drawn as the rule draws it."""
    accepted, residual = accept_by_ratio(draft_tokens, draft_probs, target_probs, num_drafted, uniforms)
    return accepted, race(residual, exponentials)


def greedy_by_ratio(drafts, target, num_drafted):
    """The ratio test between certain draft and target: the case that greedy decoding is."""
    ones = torch.ones((), dtype=torch.float64)
    tokens = torch.tensor(drafts, dtype=torch.int64)
    return by_ratio(tokens, one_hot(drafts), one_hot(target), torch.tensor(num_drafted), ones, ones)


def chosen_by_ratio(drafts, target, num_drafted):
    """The same of drafts that were chosen, not drawn, and come without distributions."""
    ones = torch.ones((), dtype=torch.float64)
    tokens = torch.tensor(drafts, dtype=torch.int64)
    return by_ratio(tokens, None, one_hot(target), torch.tensor(num_drafted), ones, ones)


def greedy_by_match(drafts, target, num_drafted):
    return accept_by_match(torch.tensor(drafts, dtype=torch.int64), torch.tensor(target), torch.tensor(num_drafted))


both_ways = pytest.mark.parametrize(
    "accept", [greedy_by_ratio, chosen_by_ratio, greedy_by_match], ids=["ratio", "chosen", "match"]
)


@both_ways
def test_drafts_stand_up_to_the_first_that_differs(accept):
    """Never, always, two of three, and a match behind a mismatch, which must not count; all in one batch."""
    drafts = [[0, 0, 0], [1, 2, 3], [1, 2, 0], [0, 2, 3], [1, 0, 3]]
    accepted, next_token = accept(drafts, [[1, 2, 3, 4]] * 5, [3] * 5)
    assert accepted.tolist() == [0, 3, 2, 0, 1]
    assert next_token.tolist() == [1, 4, 3, 1, 2]


@both_ways
def test_padding_is_not_accepted(accept):
    """Right tokens in the padding of a row that drafted fewer are no drafts."""
    accepted, next_token = accept([[1, 2, 3]] * 4, [[1, 2, 3, 4]] * 4, [0, 1, 2, 3])
    assert accepted.tolist() == [0, 1, 2, 3]
    assert next_token.tolist() == [1, 2, 3, 4]


@both_ways
def test_wrong_padding_is_not_a_rejection(accept):
    """The token after a short draft comes from the target's whole distribution; catches a residual against padding."""
    accepted, next_token = accept([[1, 0, 0], [1, 2, 0]], [[1, 2, 3, 4]] * 2, [1, 2])
    assert accepted.tolist() == [1, 2]
    assert next_token.tolist() == [2, 3]


def test_nothing_is_subtracted_for_padding():
    """As before, with soft distributions: padding equal to the target would leave a residual of rounding errors."""
    target = torch.tensor([[[0.5, 0.5, 0.0], [0.9, 0.05, 0.05]]])
    accepted, next_token = by_ratio(
        torch.tensor([[0]]), target[:, :1], target, torch.tensor([0]), torch.tensor([[0.5]]), torch.ones(1, 3)
    )
    assert accepted.item() == 0 and next_token.item() == 0


@both_ways
def test_without_drafts_the_target_decides_alone(accept):
    """A plain step is a round of no drafts."""
    accepted, next_token = accept([[], []], [[3], [5]], [0, 0])
    assert accepted.tolist() == [0, 0]
    assert next_token.tolist() == [3, 5]


def test_worked_example_to_the_last_digit():
    """Draft (.6, .3, .1), target (.5, .3, .2), integrated over a grid of the acceptance number instead of sampled.

    Token 0 stands in 5 of 6 cases, the others always; the residual is all on token 2. (To drop token 2 unverified
    because it is improbable would give (.55, .33, .12).)
    """
    draft, target = (torch.tensor(each, dtype=torch.float64) for each in PAIRS["worked example"])
    rates, output = integrate(draft, target, steps=6_000)
    assert rates.tolist() == pytest.approx([5 / 6, 1, 1], abs=1e-12)
    assert output.tolist() == pytest.approx([0.5, 0.3, 0.2], abs=1e-12)


@every_pair
def test_expected_acceptance_is_the_sum_of_the_minima(pair):
    """Integrated over a grid, not sampled. No lossless rule accepts more."""
    draft, target = (torch.tensor(each, dtype=torch.float64) for each in pair)
    rates, _ = integrate(draft, target, steps=10_000)
    assert (draft * rates).sum().item() == pytest.approx(torch.minimum(draft, target).sum().item(), abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_pair
def test_output_is_distributed_as_the_target(pair, dtype):
    """Two drafts and the token after them, each with distributions of its own; those that a round reaches.

    False-alarm probability 1e-6 for each of the three comparisons.
    """
    draft, target = (torch.tensor(each, dtype=dtype) for each in pair)
    drafts = torch.stack((draft, draft.flip(0)))
    targets = torch.stack((target, target.flip(0), target.roll(1)))
    accepted, emitted = simulate_rounds(drafts, targets)
    assert fit(emitted[:, 0], targets[0]) > 1e-6
    for position in (1, 2):
        reached = accepted >= position
        if reached.sum() * targets[position][targets[position] > 0].min() >= 5:
            assert fit(emitted[reached, position], targets[position]) > 1e-6


@every_pair
def test_banned_token_is_never_emitted(pair):
    """Certain, not statistical: an accepted draft and the token after it have a positive target probability."""
    draft, target = (torch.tensor(each) for each in pair)
    drafts, targets = torch.stack((draft, draft)), torch.stack((target, target, target))
    accepted, emitted = simulate_rounds(drafts, targets)
    for position in range(3):
        assert (target[emitted[accepted >= position, position]] > 0).all()


def test_a_chosen_draft_is_one_of_certainty():
    """Without distributions the answer is the same as with one-hot ones, to the last bit.

    Padding and rejections at every place occur. Catches a rejected token that stays in the residual.
    """
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCAB, (400, 3), generator=generator)
    target = (3 * torch.randn(400, 4, VOCAB, generator=generator)).softmax(-1)
    arguments = target, torch.randint(4, (400,), generator=generator), torch.rand(400, 3, generator=generator).double()
    chosen = accept_by_ratio(tokens, None, *arguments)
    certain = accept_by_ratio(tokens, F.one_hot(tokens, VOCAB).float(), *arguments)
    assert set(chosen[0].tolist()) == {0, 1, 2, 3}
    for of_chosen, of_certain in zip(chosen, certain, strict=True):
        assert torch.equal(of_chosen, of_certain)


def test_rows_are_decided_separately():
    """Catches a count or an index that is shared by the batch: each row alone gives what it gave among others."""
    generator = torch.Generator().manual_seed(0)
    draft = torch.rand(5, 3, VOCAB, generator=generator).softmax(-1)
    target = torch.rand(5, 4, VOCAB, generator=generator).softmax(-1)
    tokens = torch.randint(VOCAB, (5, 3), generator=generator)
    uniforms = torch.rand(5, 3, generator=generator, dtype=torch.float64)
    clocks = torch.rand(5, VOCAB, generator=generator, dtype=torch.float64)
    arguments = (tokens, draft, target, torch.tensor([3, 2, 3, 0, 1]), uniforms, clocks)
    together = by_ratio(*arguments)
    assert len(set(together[0].tolist())) > 1
    for row in range(5):
        alone = by_ratio(*(each[row : row + 1] for each in arguments))
        assert [each.item() for each in alone] == [each[row].item() for each in together]


def test_arguments_are_left_unchanged():
    draft, target = torch.rand(2, 1, VOCAB), torch.rand(2, 2, VOCAB)
    before = draft.clone(), target.clone()
    accept_by_ratio(torch.tensor([[1], [2]]), draft, target, torch.ones(2).long(), torch.rand(2, 1))
    assert torch.equal(draft, before[0]) and torch.equal(target, before[1])


def test_residual_of_rounding_errors_falls_back_to_the_target():
    """Distributions that differ by rounding can reject and leave nothing; argmax of nothing would be token 0."""
    target = torch.tensor([[[0.0, 0.25, 0.75], [1.0, 0.0, 0.0]]])
    draft = target[:, :1] * (1 + 1e-6)
    accepted, next_token = by_ratio(
        torch.tensor([[1]]),
        draft,
        target,
        torch.tensor([1]),
        torch.tensor([[1 - 1e-9]], dtype=torch.float64),
        torch.ones(1, 3, dtype=torch.float64),
    )
    assert accepted.item() == 0
    assert next_token.item() == 2


def test_tiny_numbers_do_not_let_a_banned_draft_stand():
    """1e-17 * 1e-30 is 0 in float32, and 0 <= 0 would accept a token that the target bans."""
    accepted, next_token = by_ratio(
        torch.tensor([[0]]),
        torch.tensor([[[1e-30, 1.0]]]),
        torch.tensor([[[0.0, 1.0], [0.0, 1.0]]]),
        torch.tensor([1]),
        torch.tensor([[1e-17]], dtype=torch.float64),
        torch.ones(1, 2, dtype=torch.float64),
    )
    assert accepted.item() == 0
    assert next_token.item() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_race_draws_from_the_distribution(dtype):
    """False-alarm probability 1e-6. The rates need not sum to 1: a residual does not."""
    rates = torch.tensor([0.05, 0.0, 0.3, 0.1, 0.02], dtype=dtype)
    clocks = torch.empty(DRAWS, 5, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(1))
    assert fit(race(rates, clocks), rates) > 1e-6


def test_race_is_never_won_at_rate_zero():
    """Also not by the fastest clock against the slowest at the smallest rate."""
    rates = torch.tensor([0.0, 1e-45, 0.0])
    clocks = torch.tensor([1e-16, 37.0, 1e-16], dtype=torch.float64)
    assert race(rates, clocks).item() == 1


@every_pair
def test_drafts_with_the_targets_noise_match_often_enough(pair):
    """At least (1 - d) / (1 + d) and at most 1 - d, for total variation distance d; the limits of the coupling.

    False-alarm probability below 6e-7 (5 standard errors) for each limit.
    """
    draft, target = (torch.tensor(each, dtype=torch.float64) for each in pair)
    clocks = torch.empty(DRAWS, len(draft), dtype=torch.float64)
    clocks.exponential_(generator=torch.Generator().manual_seed(2))
    drafted, drawn = race(draft, clocks), race(target, clocks)
    accepted, _ = accept_by_match(drafted[:, None], drawn[:, None].expand(-1, 2), torch.ones(DRAWS, dtype=torch.int64))
    rate = accepted.double().mean().item()
    distance = (draft - target).abs().sum().item() / 2
    slack = 5 * (rate * (1 - rate) / DRAWS) ** 0.5 + 1e-12
    assert (1 - distance) / (1 + distance) - slack <= rate <= 1 - distance + slack


def test_match_emits_the_targets_own_draws():
    """Whatever is drafted, accepted drafts and the next token read as the target's draws."""
    generator = torch.Generator().manual_seed(3)
    drafts = torch.randint(2, (200, 4), generator=generator)
    drawn = torch.randint(2, (200, 5), generator=generator)
    acceptance = accept_by_match(drafts, drawn, torch.randint(5, (200,), generator=generator))
    for row, (accepted, next_token) in enumerate(zip(*(each.tolist() for each in acceptance), strict=True)):
        emitted = [*drafts[row, :accepted].tolist(), next_token]
        assert emitted == drawn[row, : accepted + 1].tolist()


def integrate(draft: torch.Tensor, target: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One draft against the target, for each drafted token over a grid of acceptance numbers.

    Returns:
        How often each drafted token stands, and how the first token that is emitted is distributed, both (vocab,).
        The latter is exact where the residual is all on one token: ties of the race always fall on the same one.
    """
    grid = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    vocab = len(draft)
    rates, output = torch.zeros_like(draft), torch.zeros_like(draft)
    for token in draft.nonzero().flatten().tolist():
        accepted, next_token = by_ratio(
            torch.full((steps, 1), token),
            draft.expand(steps, 1, vocab),
            target.expand(steps, 2, vocab),
            torch.ones(steps, dtype=torch.int64),
            grid.unsqueeze(1),
            torch.ones(1, vocab, dtype=torch.float64),
        )
        stands = accepted == 1
        rates[token] = stands.double().mean()
        output += draft[token] * torch.bincount(next_token.where(~stands, token), minlength=vocab) / steps
    return rates, output


def simulate_rounds(drafts: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Many rounds with drafts drawn from `drafts` (k, vocab) against `targets` (k + 1, vocab).

    Returns:
        accepted (DRAWS,) and the round's tokens (DRAWS, k + 1), valid up to and including index `accepted`.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.stack([row.multinomial(DRAWS, replacement=True, generator=generator) for row in drafts], dim=1)
    accepted, next_token = by_ratio(
        tokens,
        drafts.expand(DRAWS, -1, -1),
        targets.expand(DRAWS, -1, -1),
        torch.full((DRAWS,), len(drafts)),
        torch.rand(tokens.shape, generator=generator, dtype=torch.float64),
        torch.empty(DRAWS, targets.shape[1], dtype=torch.float64).exponential_(generator=generator),
    )
    emitted = F.pad(tokens, (0, 1)).scatter(1, accepted[:, None], next_token[:, None])
    return accepted, emitted


def fit(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    return chi_square_p_value(torch.bincount(tokens, minlength=len(probs)), probs)
