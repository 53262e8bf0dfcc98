"""Guesses come from the longest repetition, and fewer of them where they were wrong."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from asyncllm.core.prompt_lookup import MAX_MATCH, MAX_PAUSE, PromptLookup


def eager(max_drafts: int = 8) -> PromptLookup:
    """Return a lookup that proposes as much as it may."""
    lookup = PromptLookup(max_drafts)
    for _ in range(5):
        lookup.learn(1, 1, 0)
    return lookup


def test_what_followed_the_last_tokens_is_proposed():
    assert eager(3).propose([1, 2, 3, 4, 5, 9, 1, 2], 8) == [3, 4, 5]
    assert eager().propose([1, 2, 3, 4, 5, 9, 1, 2], 2) == [3, 4]


def test_one_equal_token_or_none_is_too_little():
    assert eager().propose([1, 2, 3, 9, 2], 8) == []
    assert eager().propose([1, 2, 3, 4], 8) == []
    assert eager().propose([1], 8) == []


def test_the_longest_match_wins_and_of_equals_the_latest():
    assert eager(1).propose([1, 2, 3, 7, 0, 2, 3, 8, 1, 2, 3], 8) == [7]
    assert eager(1).propose([2, 3, 7, 0, 2, 3, 8, 1, 2, 3], 8) == [8]


def test_a_pattern_goes_on_beyond_the_end():
    assert eager().propose([5, 1, 2, 3, 1, 2, 3], 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert eager().propose([7, 7, 7], 4) == [7, 7, 7, 7]


def test_tokens_are_entered_as_they_come():
    lookup, tokens = eager(1), [1, 2, 3, 4]
    assert lookup.propose(tokens, 8) == []
    tokens += [1, 2]
    assert lookup.propose(tokens, 8) == [3]
    assert lookup.propose(tokens, 8) == [3]  # a step without room may ask again
    tokens += [3, 4]
    assert lookup.propose(tokens, 8) == [1]


def test_it_agrees_with_a_search_of_everything():
    chance = random.Random(3)
    for _ in range(300):
        tokens = [chance.randrange(3) for _ in range(chance.randrange(2, 30))]
        lookup = eager(1)
        for length in range(1, len(tokens)):
            lookup.propose(tokens[:length], 1)
        assert lookup.propose(tokens, 1) == searched(tokens)


def searched(tokens: list[int]) -> list[int]:
    last, found = len(tokens) - 1, (1, -1)
    for place in range(1, last):
        length = 0
        while length < min(MAX_MATCH, place + 1) and tokens[place - length] == tokens[last - length]:
            length += 1
        found = max(found, (length, place))
    # of more than 16 places with the last pair only the latest are looked at: there is no such case here
    return [tokens[found[1] + 1]] if found[0] >= 2 else []


def test_the_length_doubles_while_all_is_right_and_shrinks_to_what_was():
    lookup, tokens, lengths = PromptLookup(6), [1, 2, 3, 4, 5, 6, 7, 8, 9] * 2, list[int]()
    for _ in range(5):
        drafts = lookup.propose(tokens, 99)
        lengths.append(len(drafts))
        lookup.learn(len(drafts), len(drafts), len(tokens))
    assert lengths == [1, 2, 4, 6, 6]
    lookup.learn(6, 2, len(tokens))
    assert len(lookup.propose(tokens, 99)) == 2


def test_wrong_guesses_make_pauses_that_grow():
    lookup, tokens, asked_at = PromptLookup(8), [1, 2, 3, 4, 5, 6, 7, 8, 9] * 2, list[int]()
    while len(tokens) < 600:
        if drafts := lookup.propose(tokens, 99):
            assert len(drafts) == 1
            asked_at.append(len(tokens))
            lookup.learn(1, 0, len(tokens) + 1)
        tokens.append(tokens[-9])
    gaps = [after - before for before, after in itertools.pairwise(asked_at)]
    assert gaps[:6] == [2, 4, 8, 16, 32, 64]
    assert set(gaps[5:]) == {MAX_PAUSE + 1}


def test_after_wrong_guesses_matches_have_to_be_longer():
    lookup, tokens = PromptLookup(8), [1, 2, 3, 4, 9, 2, 3]
    lookup.learn(1, 0, 0)
    assert lookup.propose([*tokens], 8) == [4]
    lookup.learn(1, 0, 0)
    assert lookup.propose([*tokens], 8) == []


def test_waiting_for_nothing_counts_as_a_wrong_guess():
    lookup, tokens = PromptLookup(8), [1, 2, 3, 4, 9, 1, 2]
    assert lookup.is_worth_waiting(tokens)
    tokens.append(7)
    assert lookup.propose(tokens, 8) == []
    assert not lookup.is_worth_waiting([*tokens[:-1], 7])


@pytest.mark.parametrize("tokens", [[1, 2] * 20_000, [1] * 40_000, list(range(40_000))])
def test_the_price_of_a_token_does_not_grow(tokens: list[int]):
    lookup = eager()
    begun = time.process_time()
    for length in range(2, len(tokens) - 2000, 1000):
        lookup.propose(tokens[:length], 8)
    early = time.process_time() - begun
    for length in range(len(tokens) - 2000, len(tokens), 10):
        lookup.propose(tokens[:length], 8)
    assert time.process_time() - begun < early + 5.0
