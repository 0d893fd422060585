"""Token trees: what is refused, and what clipping and walking preserve."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from speclight.modules.acceptance import OneHot
from speclight.modules.token_tree import TokenTree

Shape = tuple[list[int], list[int]]  # token ids and parents
relaxed = settings(deadline=None)  # a busy machine is no fault


@st.composite
def shapes(draw: st.DrawFn, max_nodes: int = 12) -> Shape:
    """Trees of any shape over a small vocabulary."""
    token_ids, parents, taken = [draw(st.integers(0, 3))], [-1], set()
    for _ in range(draw(st.integers(0, max_nodes - 1))):
        edge = (draw(st.integers(0, len(parents) - 1)), draw(st.integers(0, 3)))
        if edge not in taken:
            taken.add(edge)
            parents.append(edge[0])
            token_ids.append(edge[1])
    return token_ids, parents


def tree_of(shape: Shape) -> TokenTree:
    """With a label and a row of hidden states that name each node."""
    nodes = range(len(shape[0]))
    return TokenTree(*shape, None, [f"node {node}" for node in nodes], torch.tensor(nodes).unsqueeze(1), depth=2)


def chain_of(length: int) -> TokenTree:
    """A root and `length` drafted tokens 1, 2, ..., each with its own distribution."""
    return TokenTree.chain(range(length + 1), [OneHot(node, 20) for node in range(1, length + 1)])


def continuations(tree: TokenTree) -> set[tuple[int, ...]]:
    """The token sequences that the tree proposes, one per node."""
    return {tuple(tree.token_ids[step] for step in tree.path_to(node)) for node in range(len(tree))}


@pytest.mark.parametrize(
    ("token_ids", "parents", "message"),
    [
        ([], [], "parents must be"),
        ([1, 2], [-1], "one entry per token"),
        ([1], [0], "parents must be"),
        ([1, 2], [-1, 1], r"parents\[1\] must be in \[0, 1\), got 1"),
        ([1, 2], [-1, -1], r"parents\[1\] must be in \[0, 1\), got -1"),
        ([1, 2, 3], [-1, 2, 0], r"parents\[1\]"),
    ],
)
def test_a_malformed_tree_never_reaches_the_model(token_ids: list[int], parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree(token_ids, parents)


def test_siblings_with_the_same_token_are_refused() -> None:
    with pytest.raises(ValueError, match="token 5 is proposed twice below node 1"):
        TokenTree([0, 1, 5, 5], [-1, 0, 1, 1])


def test_a_token_may_repeat_anywhere_but_among_siblings() -> None:
    tree = TokenTree([7, 3, 4, 3], [-1, 0, 0, 1])
    assert tree.children == ({3: 1, 4: 2}, {3: 3}, {}, {})


def test_a_branching_tree_with_distributions_is_refused() -> None:
    with pytest.raises(ValueError, match="probs need a chain"):
        TokenTree([0, 1, 2], [-1, 0, 0], [OneHot(1, 4), OneHot(2, 4)])


@pytest.mark.parametrize("count", [0, 1, 4])
def test_every_drafted_token_of_a_chain_needs_its_own_distribution(count: int) -> None:
    with pytest.raises(ValueError, match="one distribution per drafted token"):
        TokenTree.chain([0, 1, 2], [OneHot(1, 4)] * count)


def test_one_distribution_more_is_of_what_would_follow_and_goes_where_the_end_goes() -> None:
    tree = TokenTree.chain([0, 1, 2], [OneHot(1, 4), OneHot(2, 4), OneHot(3, 4)], states=torch.arange(3.0)[:, None])
    assert [tree.drawn_from(node).token_id for node in range(3)] == [1, 2, 3]
    clipped = tree.clipped(1, 9)
    assert [clipped.drawn_from(node).token_id for node in range(2)] == [1, 2]
    assert clipped.states.tolist() == [[0.0], [1.0]]
    assert TokenTree.root(0).drawn_from(0) is None
    with pytest.raises(ValueError, match="states need a row"):
        TokenTree.chain([0, 1], [OneHot(1, 4)], states=torch.zeros(2, 1))


def test_labels_are_one_per_node() -> None:
    with pytest.raises(ValueError, match=r"one label per node \(2\), got 1"):
        TokenTree([0, 1], [-1, 0], sources=["ngram"])


def test_the_empty_proposal_is_a_tree_like_any_other() -> None:
    root = TokenTree.root(9)
    assert (len(root), root.num_drafted, root.is_chain, root.depths, root.path_to(0)) == (1, 0, True, [0], [0])
    assert root.clipped(0, 1) is root


@relaxed
@given(shapes())
def test_depths_and_paths_agree_with_the_parents(shape: Shape) -> None:
    tree = tree_of(shape)
    for node in range(len(tree)):
        path = tree.path_to(node)
        assert path[0] == 0
        assert path[-1] == node
        assert len(path) == tree.depths[node] + 1
        assert all(tree.parents[child] == parent for parent, child in pairwise(path))


@relaxed
@given(shapes())
def test_children_are_the_parents_read_backwards_and_every_continuation_is_proposed_once(shape: Shape) -> None:
    tree = tree_of(shape)
    edges = {(parent, child) for parent, below in enumerate(tree.children) for child in below.values()}
    assert edges == {(parent, child) for child, parent in enumerate(tree.parents) if child}
    assert all(tree.token_ids[child] == token for below in tree.children for token, child in below.items())
    assert len(continuations(tree)) == len(tree)


@relaxed
@given(shapes())
def test_a_chain_is_a_tree_whose_every_node_follows_the_last(shape: Shape) -> None:
    tree = tree_of(shape)
    assert tree.is_chain == (tree.depths == list(range(len(tree))))


@relaxed
@given(shapes(), st.integers(-1, 13), st.integers(-1, 13))
def test_clipping_keeps_a_valid_subtree_within_both_bounds(shape: Shape, max_depth: int, max_nodes: int) -> None:
    tree = tree_of(shape)
    clipped = tree.clipped(max_depth, max_nodes)  # TokenTree's own checks run on the result
    assert clipped.token_ids[0] == tree.token_ids[0]
    assert max(clipped.depths) <= max(max_depth, 0)
    assert len(clipped) <= max(max_nodes, 1)
    assert continuations(clipped) <= continuations(tree)


@relaxed
@given(shapes(), st.integers(0, 13), st.integers(1, 13))
def test_clipping_drops_nothing_that_fits(shape: Shape, max_depth: int, max_nodes: int) -> None:
    tree = tree_of(shape)
    shallow = sum(depth <= max_depth for depth in tree.depths)
    assert len(tree.clipped(max_depth, max_nodes)) == min(shallow, max_nodes)


@relaxed
@given(shapes(), st.integers(0, 13), st.integers(1, 13))
def test_clipping_keeps_labels_and_hidden_states_with_their_nodes(shape: Shape, depth: int, nodes: int) -> None:
    tree = tree_of(shape)
    clipped = tree.clipped(depth, nodes)
    assert clipped.hidden is not None
    assert clipped.sources == [f"node {node}" for node in clipped.hidden[:, 0].tolist()]
    kept = clipped.hidden[:, 0].tolist()
    assert clipped.token_ids == [tree.token_ids[node] for node in kept]
    assert clipped.depths == [tree.depths[node] for node in kept]
    assert clipped.depth == tree.depth


@relaxed
@given(st.integers(0, 8), st.integers(0, 9), st.integers(1, 9))
def test_clipping_a_chain_keeps_each_distribution_with_its_token(length: int, max_depth: int, max_nodes: int) -> None:
    clipped = chain_of(length).clipped(max_depth, max_nodes)
    assert clipped.num_drafted == min(length, max_depth, max_nodes - 1)
    assert clipped.probs is not None
    assert [q.token_id for q in clipped.probs] == list(clipped.token_ids[1:])


@relaxed
@given(shapes())
def test_a_tree_survives_pickling_and_replace(shape: Shape) -> None:
    tree = tree_of(shape)
    for copy in (pickle.loads(pickle.dumps(tree)), replace(tree)):
        assert (copy.token_ids, copy.parents, copy.children) == (tree.token_ids, tree.parents, tree.children)
