"""The counters behind every published number."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from speclight.infer.stats import EngineStats, SequenceStats


def recorded(*passes: tuple[int, int, int, int]) -> SequenceStats:
    stats = SequenceStats()
    for num_drafted, max_depth, num_accepted, emitted in passes:
        stats.record_pass(num_drafted, max_depth, num_accepted, emitted)
    return stats


TRACE = recorded((4, 4, 4, 5), (4, 4, 0, 1), (2, 2, 1, 2))


def test_hand_made_trace_gives_the_published_definitions() -> None:
    assert TRACE.acceptance_rate == 0.5
    assert TRACE.mat == pytest.approx(8 / 3)
    assert TRACE.accepted_lengths == {4: 1, 0: 1, 1: 1}


def test_rates_per_position_are_conditional_on_what_came_before() -> None:
    assert TRACE.unconditional_acceptance == {1: 2 / 3, 2: 1 / 3, 3: 1 / 2, 4: 1 / 2}
    assert TRACE.conditional_acceptance == {1: 2 / 3, 2: 1 / 2, 3: 1.0, 4: 1.0}


def test_plain_decoding_has_a_mat_of_exactly_one_and_no_acceptance() -> None:
    stats = recorded(*[(0, 0, 0, 1)] * 7)
    assert (stats.mat, stats.acceptance_rate, stats.steps_without_draft) == (1.0, 0.0, 7)
    assert not stats.accepted_lengths


def test_tokens_accepted_behind_a_stop_do_not_count() -> None:
    """A chain of four, all accepted, ended by a stop token at its second: two were accepted, none was turned down."""
    stats = recorded((4, 4, 4, 2))
    assert (stats.accepted, stats.emitted_tokens, stats.accepted_lengths) == (2, 2, {2: 1})
    assert stats.conditional_acceptance == {1: 1.0, 2: 1.0}


def test_a_tree_counts_its_nodes_as_drafted_and_its_depths_as_positions() -> None:
    stats = recorded((10, 3, 2, 3))
    assert stats.acceptance_rate == 0.2
    assert stats.conditional_acceptance == {1: 1.0, 2: 1.0, 3: 0.0}


def test_retrieval_rate_counts_only_steps_that_could_look_up() -> None:
    stats = SequenceStats()
    for hit in (None, True, False, True, None):
        stats.record_pass(0, 0, 0, 1, hit)
    assert (stats.retrieval_steps, stats.retrieval_rate) == (3, 2 / 3)


one_pass = st.tuples(st.integers(0, 64), st.integers(1, 12), st.integers(0, 12), st.integers(1, 13)).map(
    lambda x: (x[0], min(x[0], x[1]), min(x[0], x[1], x[2]), min(x[3], min(x[0], x[1], x[2]) + 1))
)


@given(st.lists(one_pass, max_size=20))
def test_every_rate_stays_between_zero_and_one(passes: list[tuple[int, int, int, int]]) -> None:
    stats = recorded(*passes)
    rates = [stats.acceptance_rate, *stats.conditional_acceptance.values(), *stats.unconditional_acceptance.values()]
    assert all(0.0 <= rate <= 1.0 for rate in rates)
    assert stats.mat == 0.0 if not passes else stats.mat >= 1.0
    assert sum(depth * count for depth, count in stats.accepted_lengths.items()) == stats.accepted


@given(st.lists(one_pass, max_size=12), st.integers(0, 12))
def test_a_total_equals_counting_in_one_go(passes: list[tuple[int, int, int, int]], cut: int) -> None:
    parts = [recorded(*passes[:cut]), recorded(*passes[cut:])]
    before = [part.as_dict() for part in parts]
    assert SequenceStats.total(parts) == recorded(*passes)
    assert [part.as_dict() for part in parts] == before


def test_exported_counters_survive_json() -> None:
    exported = TRACE.as_dict()
    assert json.loads(json.dumps(exported)) == exported
    assert SequenceStats.from_dict(exported) == TRACE
    assert {
        "emitted_tokens",
        "target_passes",
        "drafted",
        "accepted",
        "mat",
        "acceptance_rate",
        "seconds",
    } <= exported.keys()


def test_engine_overhead_is_drafting_outside_the_model_over_whole_steps() -> None:
    stats = EngineStats()
    assert stats.overhead_share == 0.0
    stats.record_step(seconds=2.0, drafting=0.1, model=1.5, verifying=0.4)
    stats.record_step(seconds=2.0, drafting=0.1, model=1.5, verifying=0.4)
    assert stats.overhead_share == pytest.approx(0.05)
    assert stats.steps == 2


def test_layer_tokens_are_counted_by_stage_and_heads_apart() -> None:
    stats = EngineStats()
    stats.record_work({"prefill": 100, "full": 40})
    stats.record_work({"draft": 3, "intermediate": 5, "head": 7})
    assert (stats.decoding_layer_tokens, stats.layer_tokens, stats.head_tokens) == (48, 148, 7)
    assert EngineStats.from_dict(stats.as_dict()) == stats


def test_the_inner_stage_is_counted_like_the_outer_and_apart_from_it() -> None:
    stats = SequenceStats()
    for num_drafted, max_depth, num_accepted, emitted in ((4, 4, 4, 5), (4, 4, 0, 1), (2, 2, 1, 2), (0, 0, 0, 1)):
        stats.record_inner(num_drafted, max_depth, num_accepted, emitted)
    assert (stats.inner_passes, stats.inner_emitted, stats.inner_acceptance_rate) == (4, 9, 0.5)
    assert stats.inner_conditional_acceptance == TRACE.conditional_acceptance
    assert (stats.drafted, stats.target_passes) == (0, 0)
    assert SequenceStats.from_dict(json.loads(json.dumps(stats.as_dict()))) == stats
