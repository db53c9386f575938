"""Suffix automaton: the longest suffix that occurred before, against a search of the text, and what followed it."""

from __future__ import annotations

import random
import time

import pytest

from layerskip.suffix_automaton import Match, SuffixAutomaton

LINKS = 16  # an occurrence is noted for the suffixes at most this many links below the text that ends there


def automaton(*token_ids: int) -> SuffixAutomaton:
    built = SuffixAutomaton()
    built.extend(token_ids)
    return built


def ends_of(part: list[int], text: list[int]) -> list[int]:
    """The indices just behind all occurrences of `part`."""
    return [end for end in range(len(part), len(text) + 1) if text[end - len(part) : end] == part]


def longest_repeat(text: list[int]) -> tuple[int, list[int]]:
    """Length of the longest suffix that also ends earlier, and where it ends earlier."""
    for length in range(len(text) - 1, 0, -1):
        if earlier := ends_of(text[-length:], text)[:-1]:
            return length, earlier
    return 0, []


def depth(length: int, text: list[int]) -> int:
    """Links from the whole text to its suffix of this length: fewer occurrences and more are different states."""
    return len({len(ends_of(text[-each:], text)) for each in range(length, len(text) + 1)}) - 1


def random_text(seed: int) -> list[int]:
    """Up to 40 tokens of 2 to 4 kinds; every third text is a few random tokens again and again."""
    draw = random.Random(seed)
    kinds, size = draw.randint(2, 4), draw.randint(1, 40)
    if seed % 3:
        return [draw.randrange(kinds) for _ in range(size)]
    period = [draw.randrange(kinds) for _ in range(draw.randint(1, 6))]
    return [draw.randrange(kinds) if draw.random() < 0.05 else period[at % len(period)] for at in range(size)]


def check_after_every_append(text: list[int]) -> int:
    """Compare with the search; how often the occurrence named was not the latest."""
    built, older = SuffixAutomaton(), 0
    for size, token in enumerate(text, 1):
        built.extend([token])
        so_far, (length, end) = text[:size], built.match
        expected, earlier = longest_repeat(so_far)
        assert (len(built), length) == (size, expected), so_far
        if not length:
            assert end == 0
            continue
        assert end in earlier, so_far
        if depth(length, text[: earlier[-1]]) <= LINKS:
            assert end == earlier[-1], so_far
        older += end != earlier[-1]
    return older


def test_match_equals_a_search_of_the_text():
    """Length always; the occurrence is always one, and the latest when it was noted."""
    for seed in range(400):
        check_after_every_append(random_text(seed))


@pytest.mark.parametrize("ending", [[1] + [0] * 12 + [2, 0, 1], [1, 0, 1], [1] + [0] * 50])
def test_deep_short_suffixes_name_an_older_occurrence_that_is_valid(ending):
    """A long repetition puts its short substrings more than 16 links deep: the case in which `end` may be stale."""
    check_after_every_append([0] * 40 + ending)


def test_the_limit_on_links_is_reached():
    """The last 0 was seen last just before the 2, where it lay 39 links deep: an older one is named."""
    assert check_after_every_append([0] * 40 + [2, 0]) == 1


def test_names_the_latest_of_many_occurrences():
    assert automaton(5, 6, 1, 5, 6, 2, 5, 6, 3, 5, 6).match == Match(length=2, end=8)


def test_occurrences_may_overlap():
    assert automaton(1, 1, 1, 1).match == Match(length=3, end=3)


@pytest.mark.parametrize("text", [[], [7], [7, 8], [7, 8, 7, 9]])
def test_no_match_proposes_nothing(text):
    built = automaton(*text)
    assert (len(built), built.match, built.continuation(5)) == (len(text), Match(0, 0), [])


def test_continuation_is_what_followed():
    built = automaton(1, 2, 3, 4, 5, 6, 2, 3)
    assert built.match == Match(length=2, end=3)
    assert [built.continuation(count) for count in (0, 1, 3, 5)] == [[], [4], [4, 5, 6], [4, 5, 6, 2, 3]]


def test_continuation_behind_the_end_of_the_text_reads_itself():
    assert automaton(1, 2, 3, 2).continuation(7) == [3, 2, 3, 2, 3, 2, 3]
    assert automaton(1, 2, 1, 2).continuation(5) == [1, 2, 1, 2, 1]
    assert automaton(4, 4).continuation(3) == [4, 4, 4]


def test_continuation_equals_copying_token_by_token():
    for seed in range(200):
        text = random_text(seed)
        built = automaton(*text)
        if not built.match.length:
            continue
        grown = list(text)
        for index in range(60):
            grown.append(grown[built.match.end + index])
        for count in (1, 7, 60):
            assert built.continuation(count) == grown[len(text) : len(text) + count]


def test_negative_count_is_refused():
    with pytest.raises(ValueError, match="count is -1, expected 0 or more"):
        automaton(1, 1).continuation(-1)


def test_in_one_go_equals_one_by_one_and_in_pieces():
    for seed in range(200):
        text = random_text(seed)
        whole, pieces, single = automaton(*text), SuffixAutomaton(), SuffixAutomaton()
        pieces.extend(iter(text[: seed % 7]))
        pieces.extend(iter(text[seed % 7 :]))
        for token in text:
            single.extend([token])
        assert vars(whole) == vars(pieces) == vars(single)


def test_extending_by_nothing_changes_nothing():
    built = automaton(1, 2, 1)
    before = built.match
    built.extend([])
    assert (len(built), built.match) == (3, before)


def test_tokens_that_fail_to_arrive_change_nothing():
    """A generator that raises half way must not leave a text without its states."""
    built = automaton(1, 2, 1)
    with pytest.raises(ZeroDivisionError):
        built.extend(1 // number for number in (1, 0))
    built.extend([2])
    assert vars(built) == vars(automaton(1, 2, 1, 2))


def test_any_integers_are_tokens():
    assert automaton(-1, 2**70, 0, -1, 2**70).match == Match(length=2, end=2)


def test_equal_tokens_take_linear_time():
    """The chain of links is as long as the text: following all of it for each token would be quadratic."""
    start = time.perf_counter()
    built = automaton(*[3] * 20_000)
    assert time.perf_counter() - start < 5
    assert built.match == Match(length=19_999, end=19_999)


def test_at_most_two_states_and_three_transitions_a_token():
    for seed in range(300):
        text = random_text(seed)
        built = automaton(*text)
        assert len(built._lengths) == len(built._links) == len(built._ends) == len(built._edges) <= 2 * len(text)
        assert sum(map(len, built._edges)) <= 3 * len(text)
