"""Blocks are neither lost nor shared by mistake, and commit keeps exactly the accepted tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from speclight.modules.kv_cache import BlockAllocator, CacheTable, PagedKVCache


def make(num_blocks=8, block_size=4, **kwargs) -> PagedKVCache:
    return PagedKVCache(2, 1, 1, num_blocks, block_size, dtype=torch.float64, **kwargs)


def write(cache: PagedKVCache, table: CacheTable, values: list[float]) -> None:
    """Put one number per new token into every layer's key, as a pass would."""
    for offset, value in enumerate(values):
        for layer in range(2):
            keys, stored = cache.layer(layer)
            slot = cache.slot(table, table.length + offset)
            keys[slot], stored[slot] = value + 100 * layer, -value


def read(cache: PagedKVCache, table: CacheTable) -> list[float]:
    return [float(cache.layer(0)[0][cache.slot(table, position)]) for position in range(table.length)]


def test_commit_moves_an_accepted_branch_together_and_frees_the_rest():
    cache, table, other = make(), CacheTable(), CacheTable()
    for t, base in ((table, 0), (other, 50)):
        assert cache.reserve(t, 7)
        write(cache, t, [base + i for i in range(7)])
    cache.commit([(table, [0, 2, 5]), (other, [0, 1, 2, 3])])
    assert read(cache, table) == [0, 2, 5] and read(cache, other) == [50, 51, 52, 53]
    assert float(cache.layer(1)[0][cache.slot(table, 2)]) == 105
    assert len(table.blocks) == 1 and len(other.blocks) == 1
    cache.allocator.check([table, other])


def test_reserve_changes_nothing_when_blocks_are_short():
    cache, table = make(num_blocks=2), CacheTable()
    assert not cache.reserve(table, 9) and table.blocks == []
    assert cache.reserve(table, 8)
    cache.release(table)
    assert cache.allocator.num_available == 2


def test_a_known_prefix_is_adopted_but_never_the_whole_prompt():
    """The last token must be run for its logits; and a block that is not full is never shared."""
    cache, first, ids = make(), CacheTable(), list(range(10))
    assert cache.reserve(first, 10)
    write(cache, first, ids)
    cache.commit([(first, range(10))])
    cache.index_full_blocks(first, ids)
    for prompt, expected in ((ids, 8), (ids[:8], 4), (ids[:9], 8), ([*ids[:4], 99, 99, 99, 99, 1], 4), ([7, *ids], 0)):
        table = CacheTable()
        assert cache.match_prefix(table, prompt) == expected
        assert read(cache, table) == prompt[:expected]
        cache.allocator.check([first, table])
        cache.release(table)


def test_a_prefix_is_only_found_in_its_own_namespace_and_survives_its_owner():
    cache, ids = make(), list(range(9))
    owner = CacheTable("a")
    assert cache.reserve(owner, 9)
    cache.commit([(owner, range(9))])
    cache.index_full_blocks(owner, ids)
    cache.release(owner)
    assert cache.match_prefix(CacheTable("b"), ids) == 0
    table = CacheTable("a")
    assert cache.match_prefix(table, ids) == 8
    cache.release(table)
    cache.allocator.forget_idle()
    assert cache.match_prefix(CacheTable("a"), ids) == 0


def test_idle_contents_are_evicted_oldest_first_when_space_is_needed():
    cache = make(num_blocks=2, block_size=1)
    for token in (1, 2):
        table = CacheTable()
        assert cache.reserve(table, 1)
        cache.commit([(table, [0])])
        cache.index_full_blocks(table, [token])
        cache.release(table)
    taken = CacheTable()
    assert cache.reserve(taken, 1)
    assert cache.match_prefix(CacheTable(), [1, 9]) == 0
    assert cache.match_prefix(CacheTable(), [2, 9]) == 1


def test_giving_a_block_back_twice_is_an_error():
    allocator = BlockAllocator(2)
    block = allocator.take()
    allocator.give_back(block)
    with pytest.raises(AssertionError, match="twice"):
        allocator.give_back(block)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_traffic_never_loses_blocks_and_keeps_every_text(data):
    """Sequences with common beginnings join, grow, are cut back and leave; every committed token stays readable."""
    size = data.draw(st.integers(1, 4))
    cache, live = make(num_blocks=12, block_size=size), []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["join", "grow", "grow", "leave"]))
        if action == "join":
            ids = [1, 2, 3, 4, 5, 6][: data.draw(st.integers(1, 6))]
            table = CacheTable()
            cache.match_prefix(table, ids)
            live.append((table, ids))
        elif live:
            table, ids = data.draw(st.sampled_from(live))
            if action == "leave":
                cache.release(table)
                live.remove((table, ids))
                continue
            ids.extend(data.draw(st.lists(st.integers(1, 3), max_size=3)))
            pending = ids[table.length :]
            if not pending or not cache.reserve(table, len(pending) + 2):
                continue
            write(cache, table, [*pending, 77, 78])
            cache.commit([(table, range(len(pending)))])
            cache.index_full_blocks(table, ids)
        cache.allocator.check([table for table, _ in live])
        for table, ids in live:
            assert read(cache, table) == ids[: table.length]
