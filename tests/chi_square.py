"""Goodness of fit for the tests that compare draws with the distribution they should have."""

import torch
from torch import Tensor


def chi_square_p_value(counts: Tensor, probs: Tensor) -> float:
    """The probability of a fit at least as bad as that of `counts` if they are draws from `probs` (same shape).

    A test that demands ``> x`` fails by chance with probability x, and only for a new seed: all noise here is seeded.
    An outcome of probability 0 that was drawn at all gives 0.
    """
    possible = probs > 0
    if counts[~possible].any():
        return 0.0
    expected = probs[possible].double() / probs.double().sum() * counts.sum()
    assert expected.min() >= 5, f"too few draws: a cell of {expected.min():.2f} expected counts"
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = (possible.sum() - 1).double()
    if freedom == 0:
        return 1.0
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
