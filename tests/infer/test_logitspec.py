"""LogitSpec's trees as the paper has them: by hand, against the paper's list of branches, and at the edges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from speclight.infer.drafter import Observation
from speclight.infer.logitspec import LogitSpecDrafter
from speclight.infer.request import GenerationParams, Sequence
from speclight.modules.acceptance import Verdict
from speclight.modules.token_tree import TokenTree

VOCAB = 100


def paper(**arguments) -> LogitSpecDrafter:
    return LogitSpecDrafter(**arguments, tree="paper")


def sequence_of(token_ids: list[int], draft_tokens: int = 64, max_depth: int = 100, sequence_id: int = 0) -> Sequence:
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


def logits_of(ranked: list[int], vocab: int = VOCAB) -> torch.Tensor:
    """[vocab] logits whose best ids are `ranked`, in that order."""
    row = torch.full((vocab,), -10.0) - torch.arange(vocab) / vocab
    row[ranked] = torch.arange(len(ranked), 0, -1).float()
    return row


def observe(drafter: LogitSpecDrafter, sequence: Sequence, ranked: list[int], vocab: int = VOCAB) -> None:
    """The pass that gave `sequence` its last token, without a draft."""
    tree = TokenTree.root(sequence.token_ids[-1])
    drafter.observe([Observation(sequence, tree, Verdict([0], 0, False), logits_of(ranked, vocab)[None])])


def tree_of(drafter: LogitSpecDrafter, sequence: Sequence, ranked: list[int] | None = None) -> TokenTree:
    if ranked is not None:
        observe(drafter, sequence, ranked)
    (tree,) = drafter.propose([sequence])
    assert tree.token_ids[0] == sequence.token_ids[-1] and tree.probs is None
    return tree


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    """Token paths below the root, one per node, in the order of the nodes."""
    return [tuple(tree.token_ids[n] for n in tree.path_to(node)[1:]) for node in range(1, len(tree))]


def labelled(tree: TokenTree) -> dict[tuple[int, ...], str]:
    return dict(zip(paths(tree), tree.sources[1:], strict=True))


def paper_branches(
    token_ids: list[int], ranked: list[int], drafter: LogitSpecDrafter, capacity: int
) -> list[list[int]]:
    """Steps 2 to 4 of the authors' algorithm: branches side by side, unmerged, until the capacity is used up."""
    pool: dict[tuple[int, ...], list[int]] = {}
    known = token_ids[:-1]  # all but the root
    for start in range(len(known)):
        for end in range(start + 1, min(start + drafter.max_ngram, len(known) - 1) + 1):
            value = known[end : end + drafter.retrieved]
            if len(value) >= len(pool.get(tuple(known[start:end]), [])):
                pool[tuple(known[start:end])] = value

    def retrieve(context: list[int]) -> list[int]:
        tails = (tuple(context[-length:]) for length in range(min(drafter.max_ngram, len(context)), 0, -1))
        return next((pool[tail] for tail in tails if tail in pool), [])

    branches = [retrieve(token_ids)]
    for rank, token_id in enumerate(ranked[: drafter.k]):
        if token_id != token_ids[-1]:
            branch = [token_id, *retrieve([*token_ids, token_id])]
            branches.append(branch[: 4 if rank <= 8 else 3 if rank <= 32 else 1])
    room, kept = capacity - 1, []
    for branch in branches:
        kept.append(branch[: max(room, 0)])
        room -= len(branch)
    return kept


def prefixes(branches: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(branch[:length]) for branch in branches for length in range(1, len(branch) + 1)}


def test_the_tree_of_a_small_text_is_the_papers_with_equal_beginnings_merged():
    """Branch 0 is retrieved whole, each guess keeps three retrieved tokens, guess 3 shares branch 0's first node."""
    text = [1, 2, 3, 4, 5, 6, 7, 8, 4, 9, 1, 2]
    trie = labelled(tree_of(paper(k=4, retrieved=6), sequence_of(text), ranked=[2, 3, 4, 50]))
    retrieved = [(3,), (3, 4), (3, 4, 5), (3, 4, 5, 6), (3, 4, 5, 6, 7), (3, 4, 5, 6, 7, 8)]
    assert list(trie) == [*retrieved, (4,), (4, 5), (4, 5, 6), (4, 5, 6, 7), (50,)]
    assert [path for path, label in trie.items() if label == "last-logit"] == [(4,), (50,)]  # 3 was found, too


token_ids = st.integers(0, 5)


@settings(max_examples=200)
@given(
    st.lists(token_ids, min_size=1, max_size=60),
    st.permutations(range(12)),
    st.integers(0, 12),
    st.integers(1, 64),
    st.integers(1, 4),
)
def test_merging_never_costs_a_draft_of_the_papers_and_adds_only_its_later_ones(text, ranked, k, capacity, max_ngram):
    """Every path of the unmerged list at the same capacity is in the trie, and with room for all the two are equal."""
    drafter = paper(k=k, max_ngram=max_ngram)
    tree = tree_of(drafter, sequence_of(text, capacity), ranked)
    everything = prefixes(paper_branches(text, ranked, drafter, 10_000))
    assert prefixes(paper_branches(text, ranked, drafter, capacity)) <= set(paths(tree)) <= everything
    assert len(tree) == min(capacity, 1 + len(everything))


@given(st.lists(token_ids, min_size=1, max_size=60), st.integers(0, 70), st.integers(0, 6))
def test_capacity_and_depth_are_never_exceeded(text, capacity, max_depth):
    drafter = paper()
    sequence = sequence_of(text, capacity, max_depth)
    tree = tree_of(drafter, sequence, list(range(60)))
    assert len(tree) <= max(capacity, 1) and max(tree.depths) <= max_depth
    unbounded = paths(tree_of(drafter, sequence_of(text, 10_000), list(range(60))))
    assert set(paths(tree)) == {path for path in unbounded if len(path) <= max_depth} or len(tree) == max(capacity, 1)


def test_branches_are_cut_by_rank_counted_among_the_k_with_the_root_at_zero():
    text = [t for token_id in range(60) for t in (token_id, 70, 71, 72, 73)] + [99]
    for ranked, rank_of_first in (([99, *range(59)], 1), (list(range(59)), 0)):
        tree = tree_of(paper(), sequence_of(text, 1000), ranked)
        lengths = {first: max(len(p) for p in paths(tree) if p[0] == first) for first in range(59)}
        assert {first for first in lengths if lengths[first] == 4} == {t for t in range(59) if t + rank_of_first <= 8}
        assert {first for first in lengths if lengths[first] == 1} == {t for t in range(59) if t + rank_of_first > 32}
        assert set(lengths.values()) == {4, 3, 1}


def test_a_pruning_table_of_ones_own_is_followed():
    text = [t for token_id in range(6) for t in (token_id, 70, 71, 72, 73)] + [99]
    tree = tree_of(paper(prune=[[0, 1], [2, 5]]), sequence_of(text), ranked=list(range(6)))
    assert [max(len(p) for p in paths(tree) if p[0] == first) for first in range(6)] == [1, 5, 5, 1, 1, 1]


def test_without_any_match_the_tree_is_a_star_of_guesses_in_rank_order():
    tree = tree_of(paper(k=60), sequence_of([98, 99]), ranked=[99, *range(59)])
    assert paths(tree) == [(token_id,) for token_id in range(59)]
    assert set(tree.sources[1:]) == {"last-logit"}


def test_before_any_logits_are_known_only_retrieval_drafts():
    tree = tree_of(paper(), sequence_of([1, 2, 3, 1]))
    assert tree.is_chain and paths(tree)[-1] == (2, 3) and set(tree.sources[1:]) == {"ngram"}


@pytest.mark.parametrize("k", [0, 1])
def test_a_k_that_holds_only_the_root_leaves_retrieval_alone(k):
    assert paths(tree_of(paper(k=k), sequence_of([1, 2, 3, 1]), ranked=[1, 5])) == [(2,), (2, 3)]
    assert paths(tree_of(paper(k=k), sequence_of([1]), ranked=[1, 5])) == []


def test_a_root_that_is_not_the_likeliest_token_leaves_the_likelier_ones_as_guesses():
    """At temperature > 0 the root is any token."""
    assert paths(tree_of(paper(k=3), sequence_of([98, 99]), ranked=[4, 99, 6, 7])) == [(4,), (6,)]
    assert paths(tree_of(paper(k=2), sequence_of([98, 99]), ranked=[4, 5, 99])) == [(4,), (5,)]


def test_k_is_a_knob_of_its_own():
    sequence = sequence_of([98, 99], draft_tokens=64)
    assert [len(tree_of(paper(k=k), sequence, [99, *range(80)])) for k in (1, 10, 60, 90)] == [1, 10, 60, 64]


@pytest.mark.parametrize("k", [1, 40])
@pytest.mark.parametrize("text", [[6], [6, 7], [6, 7, 8]])
def test_prompts_shorter_than_the_ngram_get_guesses_only(text, k):
    tree = tree_of(paper(k=k, max_ngram=5), sequence_of(text), ranked=[text[-1], *range(20, 70)])
    assert paths(tree) == [(token_id,) for token_id in range(20, 20 + k - 1)]


def test_a_vocabulary_smaller_than_k_is_no_error():
    sequence = sequence_of([1, 2])
    drafter = paper(k=60)
    observe(drafter, sequence, [2, 3, 0, 1], vocab=4)
    assert paths(tree_of(drafter, sequence)) == [(3,), (0,), (1,)]


@pytest.mark.parametrize(("capacity", "max_depth"), [(0, 100), (1, 100), (64, 0)])
def test_no_room_means_an_empty_draft(capacity, max_depth):
    sequence = sequence_of([1, 2, 1], capacity, max_depth)
    assert paths(tree_of(paper(), sequence, ranked=[1, 5])) == []


def test_the_request_overrides_the_capacity_in_both_directions():
    drafter = paper(capacity=64, k=90)
    assert drafter.default_draft_tokens() == 64
    ranked = [99, *range(89)]
    assert paths(tree_of(drafter, sequence_of([98, 99], 2), ranked)) == [(0,)]
    assert len(tree_of(drafter, sequence_of([98, 99], 80), ranked)) == 80


def test_guesses_come_from_the_row_after_the_last_accepted_node():
    """Fails if the root's row is taken, or the row numbered by the accepted tokens, which differ in a tree."""
    drafter, sequence = paper(k=2), sequence_of([50])
    tree = TokenTree([50, 51, 52, 53], [-1, 0, 0, 2])
    rows = torch.stack([logits_of([10 + node, 20 + node]) for node in range(4)])
    drafter.observe([Observation(sequence, tree, Verdict([0, 2, 3], 54, False), rows)])
    sequence.token_ids += [52, 53, 54]
    assert paths(tree_of(drafter, sequence)) == [(13,), (23,)]


def test_what_was_observed_is_copied():
    drafter, sequence = paper(k=2), sequence_of([50])
    rows = logits_of([10, 20])[None].clone()
    drafter.observe([Observation(sequence, TokenTree.root(50), Verdict([0], 0, False), rows)])
    rows.zero_()
    assert paths(tree_of(drafter, sequence)) == [(10,), (20,)]


def test_a_sequence_that_was_preempted_gets_the_same_draft_again():
    drafter, sequence = paper(), sequence_of([1, 2, 3, 1])
    before = tree_of(drafter, sequence, ranked=[1, 2, 7])
    after = tree_of(drafter, sequence)
    assert (paths(after), after.sources) == (paths(before), before.sources)


def test_one_sequences_text_and_logits_never_draft_for_another():
    drafter = paper(k=2)
    tree_of(drafter, sequence_of([70, 71, 72, 70], sequence_id=1), ranked=[70, 80])
    assert paths(tree_of(drafter, sequence_of([70], sequence_id=2))) == []
    other = tree_of(drafter, sequence_of([70], sequence_id=2), ranked=[70, 90])
    assert paths(other) == [(90,)]


def test_a_draft_does_not_depend_on_the_batch():
    texts = [[1, 2, 3, 1, 2], [4], [5, 5, 5, 5]]
    rankings = [[2, 3, 9], [4, 8, 7], [6, 5, 1]]
    alone = [tree_of(paper(k=3), sequence_of(t), r) for t, r in zip(texts, rankings, strict=True)]
    drafter = paper(k=3)
    sequences = [sequence_of(text, sequence_id=number) for number, text in enumerate(texts)]
    drafter.observe(
        [
            Observation(sequence, TokenTree.root(0), Verdict([0], 0, False), logits_of(ranked)[None])
            for sequence, ranked in zip(sequences, rankings, strict=True)
        ]
    )
    assert [paths(tree) for tree in drafter.propose(sequences)] == [paths(tree) for tree in alone]


@pytest.mark.parametrize("forget", [lambda drafter: drafter.release(1), lambda drafter: drafter.reset()])
def test_nothing_is_kept_of_a_forgotten_sequence(forget):
    drafter = paper()
    tree_of(drafter, sequence_of([70, 71, 70], sequence_id=1), ranked=[70, 80])
    forget(drafter)
    assert paths(tree_of(drafter, sequence_of([70], sequence_id=1))) == []
    drafter.release(99)


def test_hits_are_visible_in_the_labels():
    drafter = paper(k=2)
    assert drafter.retrieves
    at_the_root = tree_of(drafter, sequence_of([1, 2, 1], sequence_id=1), ranked=[1, 60])
    at_a_guess = tree_of(drafter, sequence_of([1, 2, 3], sequence_id=2), ranked=[3, 1])
    nowhere = tree_of(drafter, sequence_of([1, 2, 3], sequence_id=3), ranked=[3, 60])
    assert ["ngram" in tree.sources for tree in (at_the_root, at_a_guess, nowhere)] == [True, True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": -1}, "k must.*got -1"),
        ({"capacity": 0}, "capacity.*got 0"),
        ({"retrieved": 0}, "retrieved.*got 0"),
        ({"max_ngram": 0}, "max_ngram.*got 0"),
        ({"prune": ((8, 4), (8, 3))}, "prune.*rising"),
        ({"prune": ((32, 3), (8, 4))}, "prune.*rising"),
        ({"prune": ((8, 0),)}, "prune.*at least 1"),
        ({"prune": ((8, 4, 1),)}, "prune.*pairs"),
        ({"tree": "papers"}, "tree must be one of adaptive, paper, got 'papers'"),
        ({"shared": "all"}, "shared must be one of namespace, none, got 'all'"),
        ({"remembered": 0}, "remembered.*got 0"),
        ({"ttl": 0}, "ttl.*got 0"),
    ],
)
def test_a_wrong_argument_is_refused_at_construction(arguments, message):
    with pytest.raises(ValueError, match=message):
        LogitSpecDrafter(**arguments)
