"""The statistics on a call computed by hand: each name has one definition."""

import json

import pytest

from layerskip.stats import DecodeStats


@pytest.fixture
def stats():
    """Four rounds of up to three drafts, by hand.

    ======== ======== ========= ======
    proposed accepted committed source
    ======== ======== ========= ======
    3        3        4         self
    3        1        2         lookup
    2        0        1         self
    3        2        1         self   (the first of the two accepted drafts ended the text)
    ======== ======== ========= ======
    """
    stats = DecodeStats(prompt_tokens=10, new_tokens=1, prefill_s=0.5, draft_s=1.0, verify_s=2.0, host_s=0.25)
    for proposed, accepted, committed, source in (
        (3, 3, 4, "self"), (3, 1, 2, "lookup"), (2, 0, 1, "self"), (3, 2, 1, "self")
    ):  # fmt: skip
        stats.record_round(proposed, accepted, committed, source)
    return stats


def test_counts(stats):
    assert stats.rounds == 4
    assert stats.proposed == 11
    assert stats.accepted == 6
    assert stats.round_tokens == 8
    assert stats.new_tokens == 9  # and the one out of the prompt's pass
    assert stats.accepted_histogram == [1, 1, 1, 1]
    assert stats.drafted_histogram == [0, 0, 1, 3]


def test_counts_by_source(stats):
    assert stats.rounds_by_source == {"self": 3, "lookup": 1}
    assert stats.proposed_by_source == {"self": 8, "lookup": 3}
    assert stats.accepted_by_source == {"self": 5, "lookup": 1}


def test_rates(stats):
    assert stats.tokens_per_round == 8 / 4
    assert stats.acceptance_rate == 6 / 11


def test_acceptance_by_offset_is_conditional(stats):
    """Offset 1 was reached in three rounds (not where the first draft fell), offset 2 in two of them."""
    assert stats.drafted_by_offset == [4, 3, 2]
    assert stats.accepted_by_offset == [3, 2, 1]
    assert stats.acceptance_by_offset == [3 / 4, 2 / 3, 1 / 2]


def test_a_last_draft_that_is_accepted_opens_no_further_offset():
    """Catches a fourth offset after three accepted drafts of three, which would read as never accepted."""
    stats = DecodeStats()
    stats.record_round(proposed=3, accepted=3, committed=4)
    assert stats.acceptance_by_offset == [1.0, 1.0, 1.0]
    assert stats.accepted_histogram == [0, 0, 0, 1]


def test_offsets_at_which_nothing_was_accepted_are_listed():
    stats = DecodeStats()
    stats.record_round(proposed=2, accepted=0, committed=1)
    stats.record_round(proposed=2, accepted=1, committed=2)
    assert stats.acceptance_by_offset == [1 / 2, 0.0]


def test_times(stats):
    assert stats.decode_s == 3.25
    assert stats.total_s == 3.75
    assert stats.tokens_per_s == 8 / 3.25  # the first token belongs to the prompt's pass


def test_predicted_speedup_leaves_the_host_out(stats):
    """Eight tokens at half a second each, against three seconds of model passes."""
    assert stats.predicted_speedup(plain_step_s=0.5) == 8 * 0.5 / 3.0


def test_plain_decoding_makes_one_token_a_round():
    stats = DecodeStats()
    for _ in range(5):
        stats.record_round(proposed=0, accepted=0, committed=1)
    assert stats.tokens_per_round == 1.0
    assert stats.acceptance_rate == 0.0
    assert stats.acceptance_by_offset == []
    assert stats.accepted_histogram == stats.drafted_histogram == [5]
    assert (stats.rounds_by_source, stats.proposed_by_source) == ({"none": 5}, {"none": 0})


def test_nothing_is_divided_by_zero_before_the_first_round():
    stats = DecodeStats()
    assert stats.tokens_per_round == stats.acceptance_rate == stats.tokens_per_s == 0.0
    assert stats.predicted_speedup(0.1) == 0.0
    assert stats.acceptance_by_offset == []


def test_two_calls_do_not_share_their_counts():
    """Catches a list as a default value."""
    first, second = DecodeStats(), DecodeStats()
    first.record_round(proposed=1, accepted=1, committed=2)
    assert second == DecodeStats() and second.accepted_histogram == [0] and second.rounds_by_source == {}


def test_dictionary_is_all_counts_times_and_rates_for_json(stats):
    assert json.loads(json.dumps(stats.to_dict())) == {
        "prompt_tokens": 10,
        "reused_tokens": 0,
        "new_tokens": 9,
        "rounds": 4,
        "round_tokens": 8,
        "proposed": 11,
        "proposed_beside": 0,
        "accepted": 6,
        "drafted_by_offset": [4, 3, 2],
        "accepted_by_offset": [3, 2, 1],
        "accepted_histogram": [1, 1, 1, 1],
        "drafted_histogram": [0, 0, 1, 3],
        "rounds_by_source": {"self": 3, "lookup": 1},
        "proposed_by_source": {"self": 8, "lookup": 3},
        "accepted_by_source": {"self": 5, "lookup": 1},
        "execution": "eager",
        "costs": {},
        "prefill_s": 0.5,
        "draft_s": 1.0,
        "verify_s": 2.0,
        "recording_s": 0.0,
        "host_s": 0.25,
        "tokens_per_round": 2.0,
        "acceptance_rate": 6 / 11,
        "acceptance_by_offset": [3 / 4, 2 / 3, 1 / 2],
        "decode_s": 3.25,
        "total_s": 3.75,
        "tokens_per_s": 8 / 3.25,
    }


def test_dictionary_is_a_snapshot(stats):
    """Counting on after it was taken, as a stream does, must not change it."""
    taken = stats.to_dict()
    before = json.dumps(taken)
    stats.record_round(3, 3, 4, "self")
    assert json.dumps(taken) == before


def test_pooled_calls_count_as_one(stats):
    """Rates come from the summed counts; catches a mean of rates, and lists of different lengths that are cut."""
    other = DecodeStats(prompt_tokens=3, new_tokens=1, verify_s=1.0)
    other.record_round(5, 5, 6, "lookup")
    other.record_round(0, 0, 1)
    pooled = DecodeStats.pooled([stats, other])
    assert pooled.acceptance_rate == 11 / 16
    assert pooled.tokens_per_round == 15 / 6
    assert pooled.acceptance_by_offset == [4 / 5, 3 / 4, 2 / 3, 1.0, 1.0]
    assert pooled.accepted_histogram == [2, 1, 1, 1, 0, 1]
    assert pooled.drafted_histogram == [1, 0, 1, 3, 0, 1]
    assert pooled.rounds_by_source == {"self": 3, "lookup": 2, "none": 1}
    assert pooled.accepted_by_source == {"self": 5, "lookup": 6, "none": 0}
    assert (pooled.prompt_tokens, pooled.new_tokens, pooled.decode_s) == (13, 17, 4.25)
    assert other.accepted_histogram == [1, 0, 0, 0, 0, 1]
    assert other.rounds_by_source == {"lookup": 1, "none": 1}


def test_pooled_costs_are_the_last_that_were_known():
    """Estimates of seconds cannot be added up; a call without governor knows none."""
    first, last, without = DecodeStats(costs={"unit": "seconds"}), DecodeStats(costs={"unit": "x"}), DecodeStats()
    assert DecodeStats.pooled([first, last, without]).costs == {"unit": "x"}
