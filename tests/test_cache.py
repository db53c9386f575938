"""The cache: what is written where, and the book-keeping that fails loudly when a round leaves it wrong."""

from collections.abc import Sequence

import pytest
import torch

from layerskip.errors import DecodingError
from layerskip.models.cache import KVCache
from layerskip.models.span import Span

BLOCKS, KV_HEADS, CAPACITY, HEAD_DIM = 3, 2, 12, 4
CPU = torch.device("cpu")


def new_cache(batch: int = 1, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(
        batch=batch, capacity=CAPACITY, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype, devices=[CPU] * BLOCKS
    )


def span_of(starts: Sequence[int], tokens: int, visible: int | None = None) -> Span:
    return Span(
        starts,
        tokens,
        visible=visible,
        group=1,
        tables=lambda length, device: pytest.fail("no rotary here"),
        dtype=torch.float32,
        device=CPU,
    )


def states(batch: int, tokens: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((batch, tokens, 2 * KV_HEADS, HEAD_DIM), value)


def run_pass(
    cache: KVCache,
    starts: Sequence[int],
    tokens: int,
    blocks: Sequence[int] = range(BLOCKS),
    exact_blocks: int = BLOCKS,
) -> None:
    """What `Decoder.run` does to the cache."""
    span = span_of(starts, tokens)
    for block in blocks:
        cache.write(block, states(len(starts), tokens), span)
    cache.note(blocks, span, exact_blocks)


@pytest.fixture
def cache():
    """One row that holds five positions."""
    cache = new_cache()
    run_pass(cache, [0], 5)
    cache.commit([5])
    return cache


def test_rounds_of_draft_and_verification_pass_the_check(cache):
    """A skipping draft, its verification, a partly accepted commit; twice, and a plain step."""
    for start, accepted in ((5, 2), (8, 0)):
        for offset in range(3):
            run_pass(cache, [start + offset], 1, blocks=[0, 2], exact_blocks=1)
        run_pass(cache, [start], 4)
        cache.commit([start + 1 + accepted])
        cache.check()
    run_pass(cache, [9], 1)
    cache.commit([10])
    cache.check()
    assert cache.lengths == [10]


def test_exact_leading_blocks_of_a_draft_need_not_run_again(cache):
    """Exact-prefix reuse: they run for the last draft only, the rest of the model for all."""
    run_pass(cache, [5], 1, exact_blocks=1)
    run_pass(cache, [6], 1, exact_blocks=1)
    run_pass(cache, [7], 1, blocks=[0])
    run_pass(cache, [5], 3, blocks=[1, 2])
    cache.commit([8])
    cache.check()


def test_rows_are_kept_separately():
    cache = new_cache(batch=2)
    run_pass(cache, [0, 0], 6)
    cache.commit([2, 6])
    run_pass(cache, [2, 6], 3)
    cache.commit([4, 9])
    cache.check()
    with pytest.raises(AssertionError, match="exact only to"):
        cache.commit([5, 9])


def test_drafted_positions_cannot_be_committed_unverified(cache):
    """Catches a round that takes the draft's own keys and values for the full model's."""
    run_pass(cache, [5], 2, exact_blocks=1)
    with pytest.raises(AssertionError, match="exact only to"):
        cache.commit([6])


def test_a_draft_over_committed_positions_makes_them_inexact(cache):
    """Catches a drafter that starts one position too early."""
    run_pass(cache, [4], 2, exact_blocks=1)
    with pytest.raises(AssertionError, match="exact only to"):
        cache.commit([5])


def test_a_block_left_out_cannot_be_committed(cache):
    """Catches a verification that skips a block."""
    run_pass(cache, [5], 2, blocks=[0, 2])
    with pytest.raises(AssertionError, match="exact only to"):
        cache.commit([7])


def test_rolled_back_positions_cannot_be_committed_again(cache):
    """After a rejection the same length means other tokens."""
    run_pass(cache, [5], 3)
    cache.commit([6])
    with pytest.raises(AssertionError, match="exact only to"):
        cache.commit([8])


def test_what_a_shorter_pass_leaves_behind_it_cannot_be_committed(cache):
    """It wrote other tokens before; catches a length that only ever grows."""
    run_pass(cache, [5], 4)
    run_pass(cache, [5], 2)
    with pytest.raises(AssertionError, match="exact only to"):
        cache.commit([8])


@pytest.mark.parametrize("starts", [[6], [7]], ids=str)
def test_a_gap_is_found(cache, starts):
    """Catches positions that are counted one too far: the slot between was never written."""
    with pytest.raises(AssertionError, match="gap"):
        run_pass(cache, starts, 1)


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_pass_beyond_the_capacity_is_found(cache, tokens):
    """One token there is assigned to an empty slice, which torch takes for a broadcast and drops."""
    run_pass(cache, [5], 7)
    cache.commit([12])
    with pytest.raises((AssertionError, RuntimeError)):
        run_pass(cache, [12], tokens)


def test_a_length_beyond_the_capacity_is_found(cache):
    with pytest.raises(AssertionError, match="13.*of 12 slots"):
        cache.commit([13])


def test_check_fails_between_a_pass_and_its_commit(cache):
    """Blocks then hold other lengths than the tokens."""
    run_pass(cache, [5], 1)
    with pytest.raises(AssertionError, match="blocks hold"):
        cache.check()


@pytest.mark.parametrize("kind", ["keys", "values"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_check_finds_what_is_not_finite(cache, kind, value):
    """In any block; but not in the slots behind the committed ones, which will be overwritten."""
    getattr(cache, kind)[2][0, 1, 5, 3] = value
    cache.check()
    getattr(cache, kind)[2][0, 1, 4, 3] = value
    with pytest.raises(AssertionError, match="row 0.*not finite"):
        cache.check()


def test_all_slots_are_finite_from_the_start():
    """A masked slot is multiplied by 0, and 0 * NaN is NaN."""
    cache = new_cache(batch=2)
    assert all(tensor.isfinite().all() for tensor in (*cache.keys, *cache.values))


@pytest.mark.parametrize("starts", [[3, 3], [3, 7], [7, 3]], ids=str)
@pytest.mark.parametrize("tokens", [1, 4])
def test_exactly_the_slots_of_the_pass_are_written(starts, tokens):
    """In the given block only; token, head and dimension each in its place."""
    cache = new_cache(batch=2)
    keys = torch.randn(2, tokens, KV_HEADS, HEAD_DIM)
    cache.write(1, torch.cat((keys, -keys), dim=2), span_of(starts, tokens))
    expected = torch.zeros(2, KV_HEADS, CAPACITY, HEAD_DIM)
    for row, start in enumerate(starts):
        for token in range(tokens):
            expected[row, :, start + token] = keys[row, token]
    assert torch.equal(cache.keys[1], expected) and torch.equal(cache.values[1], -expected)
    for other in (0, 2):
        assert not cache.keys[other].any() and not cache.values[other].any()


@pytest.mark.parametrize(("starts", "visible", "seen"), [([3, 3], None, 5), ([3, 7], None, 9), ([3, 7], 12, 12)])
def test_a_pass_sees_the_slots_up_to_its_longest_row(starts, visible, seen):
    """As views of the cache itself: a copy of all keys at every step would cost more than the attention."""
    cache = new_cache(batch=2)
    keys, values = cache.write(0, states(2, 2), span_of(starts, 2, visible))
    assert keys.shape == values.shape == (2, KV_HEADS, seen, HEAD_DIM)
    assert keys.data_ptr() == cache.keys[0].data_ptr() and values.data_ptr() == cache.values[0].data_ptr()


def test_keys_and_values_are_halves_of_one_tensor():
    """So that a pass writes both at once; catches halves that overlap or leave heads out."""
    cache = new_cache(batch=2)
    for keys, values in zip(cache.keys, cache.values, strict=True):
        assert keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
        assert keys.untyped_storage().nbytes() == keys.nbytes + values.nbytes
        keys.fill_(1)
        assert not values.any()


def test_nothing_moves_while_decoding():
    """Captured graphs replay from fixed addresses, and growing by copying costs time and twice the memory."""
    cache = new_cache(batch=2)
    addresses = [tensor.data_ptr() for tensor in (*cache.keys, *cache.values)]
    run_pass(cache, [0, 0], 6)
    cache.commit([4, 6])
    run_pass(cache, [4, 6], 3)
    cache.commit([7, 9])
    assert [tensor.data_ptr() for tensor in (*cache.keys, *cache.values)] == addresses


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 2), (torch.float32, 4), (torch.float64, 8)], ids=str)
def test_size_in_bytes(dtype, width):
    """Keys and values of all blocks, at full capacity: what is told to the user."""
    cache = new_cache(batch=2, dtype=dtype)
    assert cache.nbytes == 2 * BLOCKS * 2 * KV_HEADS * CAPACITY * HEAD_DIM * width
    assert {tensor.dtype for tensor in (*cache.keys, *cache.values)} == {dtype}


class TestCopies:
    """More room, a cache of one's own, and what another has read."""

    @staticmethod
    def filled(capacity: int = CAPACITY) -> KVCache:
        """Two rows that hold five positions and three, with a state; what is not committed is not finite."""
        cache = KVCache(
            batch=2, capacity=capacity, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32,
            devices=[CPU] * (BLOCKS + 1), further_blocks=1, kept_states={2: (HEAD_DIM, CPU)},
        )  # fmt: skip
        for held in (*cache.entries, *cache.states.values()):
            held.uniform_()
        run_pass(cache, [0, 0], 5)
        cache.commit([5, 3])
        return cache

    @pytest.mark.parametrize("capacity", [5, 12, 40])
    def test_resized(self, capacity):
        cache = self.filled()
        before = [each.clone() for each in (*cache.keys, *cache.values, *cache.states.values())]
        cache.resize(capacity)
        for own, old in zip((*cache.keys, *cache.values, *cache.states.values()), before, strict=True):
            assert own.shape[-2] == capacity
            assert torch.equal(own[..., :5, :], old[..., :5, :]) and not own[..., 5:, :].any()
        assert (cache.capacity, cache.lengths) == (capacity, [5, 3])
        cache.check()
        if capacity > 5:
            run_pass(cache, [5, 3], 1)
            assert cache.keys[0][0, :, 5].eq(1).all() and cache.values[0][1, :, 3].eq(1).all()

    def test_what_is_committed_must_fit(self):
        with pytest.raises(AssertionError, match="5 committed positions for a capacity of 4"):
            self.filled().resize(4)

    def test_a_copy_shares_nothing(self):
        cache = self.filled()
        other = cache.copied(7)
        assert (cache.capacity, other.capacity) == (CAPACITY, 7)
        run_pass(other, [5, 3], 2)
        other.commit([6, 5])
        assert cache.lengths == [5, 3]
        cache.check()
        own = {each.untyped_storage().data_ptr() for each in (*cache.entries, *cache.states.values())}
        assert not own & {each.untyped_storage().data_ptr() for each in (*other.entries, *other.states.values())}

    def test_wiping_leaves_what_is_committed(self):
        cache = self.filled()
        before = [each.clone() for each in (*cache.entries, *cache.states.values())]
        for each in (*cache.entries, *cache.states.values()):
            each[0, ..., 5:, :] = each[1, ..., 3:, :] = float("nan")
        cache.wipe()
        for own, old in zip((*cache.entries, *cache.states.values()), before, strict=True):
            for row, length in enumerate((5, 3)):
                assert torch.equal(own[row, ..., :length, :], old[row, ..., :length, :])
                assert not own[row, ..., length:, :].any()

    def test_taking_what_another_holds(self):
        cache, other = new_cache(2), self.filled(40)
        cache.take(other)
        cache.check()
        assert cache.lengths == [5, 3]
        for own, its in zip(cache.entries, other.entries, strict=False):
            assert torch.equal(own[:, :, :5], its[:, :, :5])
        with torch.no_grad():
            other.entries[0].fill_(7)
        cache.take(other, begin=4)
        assert not cache.entries[0][:, :, :4].eq(7).any() and cache.entries[0][:, :, 4].eq(7).all()

    def test_no_memory(self):
        with pytest.raises(
            DecodingError, match=r"got no memory for a cache of 2 row\(s\) of 10,000,000,000,000 positions"
        ):
            self.filled().resize(10**13)
