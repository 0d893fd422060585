"""Prompt lookup against transformers' own candidate generator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from speclight.infer.prompt_lookup import PromptLookupDrafter
from speclight.infer.request import GenerationParams, Sequence
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator


def sequence_of(token_ids: list[int], draft_tokens: int = 10, max_depth: int = 100, sequence_id: int = 0) -> Sequence:
    generator = torch.Generator()
    return Sequence(
        sequence_id,
        f"request-{sequence_id}",
        GenerationParams(),
        list(token_ids),
        len(token_ids),
        generator,
        generator,
        draft_tokens=draft_tokens,
        max_depth=max_depth,
    )


def drafted(drafter: PromptLookupDrafter, sequence: Sequence) -> list[int]:
    (tree,) = drafter.propose([sequence])
    assert tree.is_chain and tree.token_ids[0] == sequence.token_ids[-1]
    return list(tree.token_ids[1:])


def transformers_candidates(token_ids: list[int], num_tokens: int, max_ngram: int) -> list[int]:
    generator = PromptLookupCandidateGenerator(None, num_tokens, max_ngram, max_length=1000)
    candidates, _ = generator.get_candidates(torch.tensor([token_ids]))
    return candidates[0, len(token_ids) :].tolist()


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.lists(st.integers(0, 3), max_size=8),
    st.integers(1, 6),
    st.integers(1, 5),
)
def test_drafts_equal_those_of_transformers_while_the_text_grows(prompt, more, num_tokens, max_ngram):
    drafter = PromptLookupDrafter(num_tokens, max_ngram)
    sequence = sequence_of(prompt, drafter.default_draft_tokens())
    for token_id in [None, *more]:
        sequence.token_ids += [] if token_id is None else [token_id]
        assert drafted(drafter, sequence) == transformers_candidates(sequence.token_ids, num_tokens, max_ngram)


TEXT = [9, 1, 1, 1, 9, 2, 2, 2, 9, 3, 9]


def test_match_chooses_between_the_first_and_the_last_occurrence_with_a_full_continuation():
    assert drafted(PromptLookupDrafter(3), sequence_of(TEXT, 3)) == [1, 1, 1]
    assert drafted(PromptLookupDrafter(3, match="last"), sequence_of(TEXT, 3)) == [2, 2, 2]
    assert drafted(PromptLookupDrafter(2, match="last"), sequence_of(TEXT, 2)) == [3, 9]


def test_the_chain_is_no_longer_than_the_request_and_the_length_cap_allow():
    drafter = PromptLookupDrafter()
    bounds = [(10, 100), (4, 100), (10, 2), (1, 1), (0, 100), (10, 0)]
    lengths = [len(drafted(drafter, sequence_of(TEXT, *bound))) for bound in bounds]
    assert lengths == [10, 4, 2, 1, 0, 0]


@pytest.mark.parametrize("match", ["first", "last"])
@pytest.mark.parametrize("token_ids", [[6], [6, 7], [6, 7, 8]])
def test_a_prompt_shorter_than_the_ngram_drafts_nothing_where_nothing_repeats(token_ids, match):
    assert drafted(PromptLookupDrafter(3, max_ngram=5, match=match), sequence_of(token_ids)) == []


def test_retrieved_nodes_are_labelled_as_hits():
    drafter = PromptLookupDrafter(2)
    hit, miss = drafter.propose([sequence_of([5, 6, 5], sequence_id=1), sequence_of([5, 6, 7], sequence_id=2)])
    assert drafter.retrieves
    assert "ngram" in hit.sources[1:] and "ngram" not in miss.sources[1:]


def test_one_sequences_text_never_drafts_for_another():
    drafter = PromptLookupDrafter()
    drafter.propose([sequence_of([70, 71, 72, 70, 71], sequence_id=1)])
    assert drafted(drafter, sequence_of([70], sequence_id=2)) == []


@pytest.mark.parametrize("forget", [lambda drafter: drafter.release(1), lambda drafter: drafter.reset()])
def test_nothing_is_kept_of_a_forgotten_sequence(forget):
    drafter = PromptLookupDrafter()
    drafter.propose([sequence_of([70, 71, 70], sequence_id=1)])
    forget(drafter)
    assert drafted(drafter, sequence_of([5], sequence_id=1)) == []
    drafter.release(99)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_tokens": 0}, "num_tokens.*got 0"),
        ({"max_ngram": 0}, "max_ngram.*got 0"),
        ({"match": "middle"}, "match.*first, last.*middle"),
    ],
)
def test_a_wrong_argument_is_refused_at_construction(arguments, message):
    with pytest.raises(ValueError, match=message):
        PromptLookupDrafter(**arguments)
