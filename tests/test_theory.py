"""Theory against brute force: overlap, tokens a round, speed-up with its batch term; and what sampling accepts."""

import itertools

import pytest
import torch

from layerskip.speedup import (
    batch_verify_cost,
    best_draft_length,
    least_acceptance,
    overlap,
    overlap_of_logits,
    speedup,
    tokens_per_round,
)
from layerskip.verify import accept_by_ratio


def logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TestOverlap:
    def test_it_is_what_both_distributions_share(self):
        target, draft = logits(3, 2, 7), logits(3, 2, 7, seed=1)
        found = overlap_of_logits(target, draft, temperature=0.7)
        assert found.shape == (3, 2)
        for row, offset in itertools.product(range(3), range(2)):
            shares = [(each[row, offset] / 0.7).exp() for each in (target, draft)]
            target_probs, draft_probs = ((each / each.sum()).tolist() for each in shares)
            distance = sum(abs(a - b) for a, b in zip(target_probs, draft_probs, strict=True)) / 2
            assert found[row, offset].item() == pytest.approx(1 - distance, abs=1e-12)

    def test_its_bounds(self):
        target = logits(5, 9)
        assert torch.allclose(overlap_of_logits(target, target), torch.ones(5, dtype=torch.float64))
        apart = overlap(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]))
        assert apart.tolist() == [0.0]

    def test_cold_it_is_agreement(self):
        target, draft = logits(40, 4), logits(40, 4, seed=1)
        agrees = (target.argmax(-1) == draft.argmax(-1)).double()
        assert overlap_of_logits(target, draft, temperature=0).tolist() == agrees.tolist()
        assert torch.allclose(overlap_of_logits(target, draft, temperature=1e-3), agrees, atol=1e-2)

    def test_of_a_draft_vocabulary(self):
        """Ids that are not scored are never drafted; in the limit nothing is shared on them."""
        target, vocabulary = logits(6, 8), torch.tensor([1, 4, 6])
        draft = logits(6, 3, seed=1)
        target_probs, draft_probs = target.softmax(-1), draft.softmax(-1)
        shared = torch.minimum(target_probs[:, vocabulary], draft_probs).sum(-1)
        assert torch.allclose(overlap_of_logits(target, draft, vocabulary=vocabulary), shared)

    def test_rejection_sampling_accepts_as_often(self):
        """200,000 drafts: 5 standard errors, which honest chance exceeds once in two million runs."""
        target_probs, draft_probs = logits(1, 2, 6).softmax(-1), logits(1, 1, 6, seed=3).softmax(-1)
        count, generator = 200_000, torch.Generator().manual_seed(0)
        drafts = torch.multinomial(draft_probs[0], count, replacement=True, generator=generator).T
        uniforms = torch.rand(count, 1, generator=generator, dtype=torch.float64)
        accepted, _ = accept_by_ratio(
            drafts, draft_probs.expand(count, -1, -1), target_probs.expand(count, -1, -1),
            torch.ones(count, dtype=torch.int64), uniforms,
        )  # fmt: skip
        expected = overlap(target_probs[0, 0], draft_probs[0, 0]).item()
        assert accepted.double().mean().item() == pytest.approx(
            expected, abs=5 * (expected * (1 - expected) / count) ** 0.5
        )


class TestTokensPerRound:
    @pytest.mark.parametrize("acceptance", [0.0, 0.35, 0.8, 0.999])
    @pytest.mark.parametrize("drafts", [0, 1, 4, 12])
    def test_closed_form(self, acceptance, drafts):
        closed = (1 - acceptance ** (drafts + 1)) / (1 - acceptance)
        assert tokens_per_round(acceptance, drafts) == pytest.approx(closed)
        assert tokens_per_round([acceptance] * drafts or acceptance, drafts) == pytest.approx(closed)

    def test_by_offset_it_is_the_mean_over_all_outcomes(self):
        rates = [0.9, 0.4, 0.7]
        expected = 0.0
        for stands in itertools.product((True, False), repeat=3):
            chance = 1.0
            for rate, stood in zip(rates, stands, strict=True):
                chance *= rate if stood else 1 - rate
            leading = next((offset for offset, stood in enumerate(stands) if not stood), 3)
            expected += chance * (leading + 1)
        assert tokens_per_round(rates, 3) == pytest.approx(expected)


class TestSpeedup:
    def test_with_costs_by_length(self):
        def verify(drafts: int) -> float:
            return 1 + 0.1 * drafts

        assert speedup(0.5, 2, 0.2, verify) == pytest.approx(1.75 / (0.4 + 1.2))
        assert speedup(0.5, 2, 0.2, verify) == speedup(0.5, 2, 0.2, 1.2)
        best = max((speedup(0.8, drafts, 0.2, verify), drafts) for drafts in range(1, 17))
        assert best_draft_length(0.8, 0.2, verify) == best[::-1]

    def test_it_rises_with_acceptance_and_falls_with_costs(self):
        costs = [best_draft_length(0.8, cost)[1] for cost in (0.05, 0.2, 0.4, 0.7)]
        gains = [best_draft_length(rate, 0.2)[1] for rate in (0.3, 0.6, 0.9)]
        assert costs == sorted(costs, reverse=True) and gains == sorted(gains)

    @pytest.mark.parametrize("cost", [0.05, 0.3, 0.9])
    def test_least_acceptance_is_the_cost_where_verifying_is_free(self, cost):
        assert least_acceptance(cost) == pytest.approx(cost, abs=1e-6)

    def test_least_acceptance_divides_gains_from_losses(self):
        for slope in (0.1, 0.4):
            verify = lambda drafts, slope=slope: 1 + slope * drafts  # noqa: E731
            least = least_acceptance(0.2, verify)
            assert least is not None
            assert best_draft_length(least - 1e-6, 0.2, verify)[0] == 0
            assert best_draft_length(least + 1e-6, 0.2, verify)[0] > 0
        assert least_acceptance(0.2, lambda drafts: 1 + 0.9 * drafts) is None


class TestBatchTerm:
    def test_free_below_the_ridge_and_all_of_it_far_above(self):
        assert batch_verify_cost(4, 3, ridge_rows=16) == 1
        assert batch_verify_cost(8, 3, ridge_rows=16) == 2
        assert batch_verify_cost(64, 3, ridge_rows=16) == 4

    def test_a_cache_that_is_read_once_a_row_makes_it_cheaper(self):
        costs = [batch_verify_cost(64, 3, 16, cache_share) for cache_share in (0, 1, 10)]
        assert costs == pytest.approx([4, 2.5, (4 + 10) / 11])

    def test_speculation_stops_paying_at_some_batch(self):
        gains = [
            best_draft_length(0.8, 0.2, lambda drafts, batch=batch: batch_verify_cost(batch, drafts, 100))[1]
            for batch in (1, 16, 32, 64, 100)
        ]
        assert gains == sorted(gains, reverse=True)
        assert gains[0] > 1.8 and gains[-1] == 1
