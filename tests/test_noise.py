"""Counter-based noise: a pure function of its index, uniform, and fixed for ever."""

import pytest
import torch

from layerskip.noise import Purpose, exponential, uniform, wrap_seed
from tests.chi_square import chi_square_p_value

GOLDEN, WORD = 0x9E3779B97F4A7C15, 2**64
EXTREMES = [0, 1, -1, 2**63 - 1, -(2**63), 1_234_567_890_123_456_789]


def column(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def finalise(bits: int) -> int:
    """SplitMix64's finaliser on Python integers, as published."""
    bits %= WORD
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % WORD
    return bits ^ (bits >> 31)


def unfinalise(bits: int) -> int:
    """The inverse of `finalise`."""
    bits = unshift(bits, 31) * pow(0x94D049BB133111EB, -1, WORD) % WORD
    bits = unshift(bits, 27) * pow(0xBF58476D1CE4E5B9, -1, WORD) % WORD
    return unshift(bits, 30)


def unshift(bits: int, count: int) -> int:
    """Solve ``x ^ (x >> count) == bits`` for x."""
    solution = bits
    for _ in range(64 // count):
        solution = bits ^ (solution >> count)
    return solution


def counter_giving(bits: int, seed: int, purpose: Purpose) -> int:
    """The counter whose first number has exactly these 64 `bits` behind it."""
    key = finalise(seed + GOLDEN * purpose)
    return wrap_seed((unfinalise(unfinalise(bits) - GOLDEN & WORD - 1) - key) * pow(GOLDEN, -1, WORD))


def test_reference_gives_splitmix64s_published_numbers():
    """The first outputs for the seed 1234567, as listed for implementers."""
    outputs = [finalise(1234567 + step * GOLDEN) for step in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("purpose", Purpose)
def test_equals_the_hash_on_python_integers(purpose):
    """Catches an arithmetic shift where a logical one is meant, and a product that does not wrap."""
    numbers = uniform(column(*EXTREMES), column(*EXTREMES).repeat(len(EXTREMES), 1), purpose, 3)
    for row, seed in enumerate(EXTREMES):
        for token, counter in enumerate(EXTREMES):
            stream = finalise(finalise(seed + GOLDEN * purpose) + GOLDEN * counter)
            bits = [finalise(stream + GOLDEN * index) for index in (1, 2, 3)]
            assert numbers[row, token].tolist() == [((each >> 12) + 0.5) / 2**52 for each in bits]


@pytest.mark.parametrize(
    ("seed", "counter", "purpose", "number"),
    [
        (0, 0, Purpose.TOKEN, 0.2691302712264),
        (0, 0, Purpose.ACCEPT, 0.19159173257416018),
        (0, 0, Purpose.CORRECTION, 0.5761461829303799),
        (0, 1, Purpose.TOKEN, 0.9711020828012883),
        (1, 0, Purpose.TOKEN, 0.4256321780286295),
        (-1, 77, Purpose.TOKEN, 0.13120840717458437),
    ],
)
def test_a_seed_means_the_same_for_ever(seed, counter, purpose, number):
    """These numbers may never change: users reproduce texts by their seeds."""
    assert uniform(column(seed), column(counter)[None], purpose, 2)[0, 0, 1].item() == number


def test_numbers_of_a_row_do_not_depend_on_the_rest_of_the_call():
    """Catches noise that changes with the batch, with the other positions or with the number of ids asked for."""
    seeds, counters = column(5, 6, 7), torch.arange(12).view(3, 4)
    together = uniform(seeds, counters, Purpose.TOKEN, 9)
    for row in range(3):
        for token in range(4):
            alone = uniform(seeds[row : row + 1], counters[row : row + 1, token : token + 1], Purpose.TOKEN, 5)
            assert torch.equal(alone[0, 0], together[row, token, :5])


def test_torchs_own_generator_is_left_alone():
    before = torch.get_rng_state()
    uniform(column(1), column(1)[None], Purpose.TOKEN, 4)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("along", ["index", "counter", "seed"])
def test_numbers_are_uniform(along):
    """False-alarm probability: 1e-6 for the chi-square over 256 bins, 6e-7 for each moment (5 standard errors)."""
    numbers = numbers_along(along, 2**18)
    counts = torch.histc(numbers, bins=256, min=0, max=1)
    assert chi_square_p_value(counts, torch.full((256,), 1 / 256)) > 1e-6
    for power in (1, 2, 3, 4):
        standard_error = (1 / (2 * power + 1) - 1 / (power + 1) ** 2) ** 0.5 / len(numbers) ** 0.5
        assert (numbers**power).mean().item() == pytest.approx(1 / (power + 1), abs=5 * standard_error)


@pytest.mark.parametrize("lag", [1, 2, 3, 64, 4096])
@pytest.mark.parametrize("along", ["index", "counter", "seed"])
def test_neighbours_are_not_correlated(along, lag):
    """False-alarm probability: 6e-7 (5 standard errors). Row seeds are consecutive numbers, positions too."""
    numbers = numbers_along(along, 2**17)
    assert abs(correlation(numbers[lag:], numbers[:-lag])) < 5 / len(numbers) ** 0.5


@pytest.mark.parametrize("pair", [(1, 2), (1, 3), (2, 3)], ids=str)
def test_purposes_are_not_correlated(pair):
    """False-alarm probability: 6e-7. An acceptance test with the noise that chose the draft would bias the output."""
    first, second = (numbers_along("counter", 2**17, Purpose(each)) for each in pair)
    assert abs(correlation(first, second)) < 5 / 2 ** (17 / 2)


@pytest.mark.parametrize("bits", [0, WORD - 1], ids=["lowest", "highest"])
def test_interval_is_open_at_both_ends(bits):
    """At 0 or 1 an exponential number is infinite or 0, and a banned token's 0 / 0 would win the race.

    A 64-bit word that gives the end of the interval exists by construction: the hash is inverted to find its counter.
    """
    counters = column(counter_giving(bits, 42, Purpose.TOKEN))[None]
    number = uniform(column(42), counters, Purpose.TOKEN, 1).item()
    assert 0 < number < 1 and (number < 1e-15 or number > 1 - 1e-15)
    assert 0 < exponential(column(42), counters, Purpose.TOKEN, 1).item() < 40


def test_exponential_numbers_are_minus_the_logarithm_of_the_uniform_ones():
    seeds, counters = column(3), torch.arange(100)[None]
    numbers = exponential(seeds, counters, Purpose.ACCEPT, 7)
    assert numbers.shape == (1, 100, 7) and numbers.dtype == torch.float64
    assert torch.equal(numbers, -uniform(seeds, counters, Purpose.ACCEPT, 7).log())


@pytest.mark.parametrize("seed", [0, 2**63 - 1, -(2**63), 2**63, 2**64 + 5, -(2**64) - 5, 10**50, -(10**50)])
def test_every_python_integer_is_a_seed(seed):
    """Catches an overflow error for seeds such as those made from a hash or from the time in nanoseconds."""
    wrapped = wrap_seed(seed)
    assert column(wrapped).item() == wrapped and (wrapped - seed) % WORD == 0


def test_seeds_that_fit_are_kept():
    assert [wrap_seed(seed) for seed in EXTREMES] == EXTREMES


def numbers_along(along: str, count: int, purpose: Purpose = Purpose.TOKEN) -> torch.Tensor:
    """(count,) numbers that differ in one of the hash's arguments only."""
    if along == "index":
        return uniform(column(11), column(3)[None], purpose, count).flatten()
    if along == "counter":
        return uniform(column(11), torch.arange(count)[None], purpose, 1).flatten()
    return uniform(torch.arange(count), torch.full((count, 1), 3), purpose, 1).flatten()


def correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack((first, second)))[0, 1].item()
