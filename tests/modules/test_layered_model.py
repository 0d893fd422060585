"""LayeredModel keeps transformers' numbers, whatever the family, the layer ranges, the paging or the tree."""

import pytest
import torch
from speclight.modules.batch import BatchItem, RaggedBatch
from speclight.modules.layered_model import LayeredModel
from support import FAMILIES, hf_tiny, tiny_lm

PROMPT = [3, 17, 42, 8, 91, 5, 5, 60, 2, 33, 71, 12]
OTHER = [9, 9, 1]


def run(model: LayeredModel, items: list[BatchItem], cache=None, ranges=None) -> torch.Tensor:
    batch = RaggedBatch.build(items, None if cache is None else cache.block_size)
    hidden = model.embed(batch)
    for start, stop in ranges or [(0, model.num_layers)]:
        hidden = model.run(hidden, batch, cache, start, stop)
    return model.logits(hidden)


def reference(family: str, ids: list[int]) -> torch.Tensor:
    return hf_tiny(family)(torch.tensor([ids])).logits[0]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("fast", [False, True], ids=["transformers", "fast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_equal_transformers_forward(family, fast):
    """Fails if a mask, a window (shorter than the text), a scale or a position is off. 1e-6: float32 norms."""
    model = tiny_lm(family, fast=fast)
    got = run(model, [BatchItem(OTHER), BatchItem(PROMPT)])
    torch.testing.assert_close(got[len(OTHER) :], reference(family, PROMPT), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(got[: len(OTHER)], reference(family, OTHER), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("fast", [False, True], ids=["transformers", "fast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adjacent_layer_ranges_equal_one_run_exactly(family, fast):
    model = tiny_lm(family, fast=fast)
    whole = run(model, [BatchItem(PROMPT)])
    for split in range(1, model.num_layers):
        assert torch.equal(run(model, [BatchItem(PROMPT)], ranges=[(0, split), (split, model.num_layers)]), whole)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_through_the_paged_cache_equal_one_pass(family, block_size):
    """Fails if a slot, a block table or a position is wrong, or if one sequence can see another."""
    model = tiny_lm(family)
    cache = model.new_cache(64, block_size)
    tables = [_table(), _table()]
    sequences, done, rows = [PROMPT, PROMPT[::-1]], [0, 0], [[], []]
    for chunk in ([5, 1], [1, 7], [6, 4]):
        items = []
        for table, ids, start, count in zip(tables, sequences, done, chunk, strict=True):
            assert cache.reserve(table, count)
            items.append(BatchItem(ids[start : start + count], table.length, table.blocks))
        logits = run(model, items, cache)
        cache.commit([(table, range(count)) for table, count in zip(tables, chunk, strict=True)])
        for i, part in enumerate(logits.split(chunk)):
            rows[i].append(part)
            done[i] += chunk[i]
    for ids, parts in zip(sequences, rows, strict=True):
        torch.testing.assert_close(torch.cat(parts), reference(family, ids), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_pass_equals_one_pass_per_path_and_the_kept_path_equals_a_prefill(family):
    """Fails if a branch sees its sibling, a position counts nodes instead of depth, or compaction moves wrongly."""
    model = tiny_lm(family)
    cache, table = model.new_cache(32, 4), _table()
    prefix, tree, parents = PROMPT[:6], [7, 11, 12, 13, 11, 14, 15], [-1, 0, 0, 1, 2, 4, 3]
    assert cache.reserve(table, len(prefix))
    run(model, [BatchItem(prefix, 0, table.blocks)], cache)
    cache.commit([(table, range(len(prefix)))])
    assert cache.reserve(table, len(tree))
    logits = run(model, [BatchItem(tree, table.length, table.blocks, parents)], cache)
    for node in range(len(tree)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        ids = prefix + [tree[i] for i in path]
        torch.testing.assert_close(logits[node], reference(family, ids)[-1], atol=1e-6, rtol=1e-6)
    cache.commit([(table, [0, 2, 4, 5])])
    kept = prefix + [tree[i] for i in (0, 2, 4, 5)]
    assert table.length == len(kept) and len(table.blocks) == cache.blocks_for(len(kept))
    assert cache.reserve(table, 1)
    after = run(model, [BatchItem([20], table.length, table.blocks)], cache)
    torch.testing.assert_close(after[0], reference(family, [*kept, 20])[-1], atol=1e-6, rtol=1e-6)


def test_padded_groups_do_not_change_a_sequence():
    """Many sequences of different lengths in one pass equal each alone; fails if grouping mixes rows."""
    model = tiny_lm()
    sequences = [[(i * 7 + j * 3) % 96 for j in range(1 + (i * 5) % 23)] for i in range(40)]
    got = run(model, [BatchItem(ids) for ids in sequences]).split([len(ids) for ids in sequences])
    for ids, rows in zip(sequences, got, strict=True):
        torch.testing.assert_close(rows, run(model, [BatchItem(ids)]), atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_long_prompts_attend_in_parts_as_in_one_call(family, monkeypatch):
    """Prompts, one behind a context, and a tree that is larger than a part, in one call padded to the longest."""
    monkeypatch.setattr("speclight.modules.batch.CALL_KEYS", {"cpu": 10**6})
    generator = torch.Generator().manual_seed(3)
    parents = [-1] + [int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, 75)]

    def run(size):
        monkeypatch.setattr("speclight.modules.batch.PART_QUERIES", size)
        model = tiny_lm(family)
        cache = model.new_cache(64)
        model(RaggedBatch.build([BatchItem(range(1, 41), 0, range(20, 40))], 16), cache)
        items = [
            BatchItem([n % 90 for n in range(90)], 0, range(10)),
            BatchItem([n % 83 for n in range(80)], 40, range(20, 30)),
            BatchItem([n % 71 for n in range(75)], 0, range(40, 50), parents),
        ]
        batch = RaggedBatch.build(items, 16)
        (group,) = batch.groups
        assert group.num_seqs == 3 and group.output_index is not None
        return model(batch, cache), len(group.parts(None, torch.float64, 1))

    (parts, several), (one, single) = run(32), run(10**6)
    assert (several, single) == (3, 1)
    torch.testing.assert_close(parts, one, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("rows", [1, 4])
def test_states_of_another_batch_are_refused(rows):
    """Passes of few tokens are padded, which would hide that there are too few, or too many."""
    model = tiny_lm(dtype=torch.float32)
    with pytest.raises(AssertionError, match=f"{rows} hidden states of 3 tokens"):
        model.run(torch.randn(rows, 32), RaggedBatch.build([BatchItem([5, 6, 7])], None), None, 0, 4)


def test_gradients_reach_the_model_without_fast_modules():
    """Training runs through the same code; fails if a swap or a write in place cuts the graph."""
    model = tiny_lm(fast=False)
    with torch.enable_grad():
        batch = RaggedBatch.build([BatchItem(PROMPT), BatchItem(OTHER)], None)
        model(batch).logsumexp(-1).sum().backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.decoder.layers.parameters())


def test_unsupported_architecture_is_refused_by_name():
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16)
    with pytest.raises(ValueError, match=r"gpt2.*supported.*llama"):
        LayeredModel(transformers.GPT2LMHeadModel(config))


def _table():
    from speclight.modules.kv_cache import CacheTable

    return CacheTable()
