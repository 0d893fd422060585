"""The n-gram index against a pool that is built anew from the whole text."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from speclight.infer.ngram_index import NgramIndex

ALPHABET = 3
texts = st.lists(st.integers(0, ALPHABET - 1), max_size=40)


def rebuilt_pool(token_ids: list[int], max_ngram: int, span: int) -> dict[tuple[int, ...], list[int]]:
    """LogitSpec's pool as it is built after the prompt: left to right, an entry yields to one at least as long."""
    pool: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(token_ids)):
        for end in range(start + 1, min(start + max_ngram, len(token_ids) - 1) + 1):
            key, value = tuple(token_ids[start:end]), token_ids[end : end + span]
            if len(value) >= len(pool.get(key, [])):
                pool[key] = value
    return pool


def back_off(pool: dict[tuple[int, ...], list[int]], query: tuple[int, ...], max_ngram: int) -> list[int]:
    tails = (query[-length:] for length in range(min(max_ngram, len(query)), 0, -1))
    return next((pool[tail] for tail in tails if tail in pool), [])


def in_pieces(index: NgramIndex, token_ids: list[int], cuts: list[int]) -> NgramIndex:
    for cut in sorted(cuts):
        index.extend(token_ids[:cut])
    index.extend(token_ids)
    return index


@given(texts, st.lists(st.integers(0, 40), max_size=8), st.integers(1, 3), st.integers(1, 6))
def test_a_grown_index_equals_a_pool_rebuilt_from_the_whole_text(token_ids, cuts, max_ngram, span):
    """Fails if a window of recent tokens is missed, a text shorter than the n-gram wraps around, or an entry lags."""
    index = in_pieces(NgramIndex(max_ngram, span), token_ids, cuts)
    pool = rebuilt_pool(token_ids, max_ngram, span)
    assert len(index) == len(token_ids)
    queries = [query for length in range(max_ngram + 1) for query in product(range(ALPHABET), repeat=length)]
    for query in [*queries, (0, *queries[-1])]:
        assert index.lookup(query) == back_off(pool, query, max_ngram)


@given(texts, st.integers(1, 4), st.integers(1, 6))
def test_the_index_is_right_after_every_single_token(token_ids, max_ngram, span):
    index = NgramIndex(max_ngram, span)
    for count in range(1, len(token_ids) + 1):
        index.extend(token_ids[:count])
        tail = tuple(token_ids[max(count - max_ngram, 0) : count])
        assert index.lookup(tail) == back_off(rebuilt_pool(token_ids[:count], max_ngram, span), tail, max_ngram)


@pytest.mark.parametrize("max_ngram", [1, 3, 5])
@pytest.mark.parametrize("token_ids", [[], [7], [7, 8], [7, 8, 9]])
def test_a_text_without_repetition_matches_nothing_and_the_empty_query_never_does(token_ids, max_ngram):
    index = NgramIndex(max_ngram)
    index.extend(token_ids)
    assert index.lookup([]) == []
    assert index.lookup(token_ids) == []


def test_the_end_of_the_text_does_not_match_itself():
    index = NgramIndex(max_ngram=2)
    index.extend([1, 2, 3, 2])
    assert index.lookup([3, 2]) == [3, 2]  # the bigram occurs at the end only, so its last token's earlier place counts
    index.extend([1, 2, 3, 2, 5])
    assert index.lookup([3, 2]) == [5]


def test_a_later_occurrence_takes_over_when_its_continuation_has_full_length():
    index = NgramIndex(max_ngram=1, span=2)
    index.extend([9, 1, 2, 9, 3])
    assert index.lookup([9]) == [1, 2]
    index.extend([9, 1, 2, 9, 3, 4])
    assert index.lookup([9]) == [3, 4]


def test_without_a_span_the_first_occurrence_stays():
    index = NgramIndex(max_ngram=1, span=None)
    index.extend([9, 1, 9, 2, 9, 3, 3, 3])
    assert index.lookup([9]) == [1, 9, 2, 9, 3, 3, 3]
    assert index.lookup([9], 2) == [1, 9]


def test_a_limit_shortens_what_is_returned_down_to_nothing():
    index = NgramIndex(max_ngram=3, span=4)
    index.extend([1, 2, 3, 4, 5, 6, 1])
    assert [index.lookup([1], limit) for limit in (0, 1, 3)] == [[], [2], [2, 3, 4]]
    assert index.lookup([1]) == [2, 3, 4, 5]


def test_the_caller_may_change_its_list_afterwards():
    token_ids = [1, 2, 1]
    index = NgramIndex()
    index.extend(token_ids)
    token_ids[1] = 5
    assert index.lookup([1]) == [2, 1]


@pytest.mark.parametrize(
    ("arguments", "message"), [({"max_ngram": 0}, "max_ngram.*got 0"), ({"span": 0}, "span.*got 0")]
)
def test_an_impossible_size_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        NgramIndex(**arguments)
