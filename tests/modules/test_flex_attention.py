"""FlexAttention over the paged cache reads what the reference reads, and its lists of blocks agree with its mask."""

from __future__ import annotations

import random

import pytest
import torch
from speclight.modules.attention import paged_attention
from speclight.modules.batch import BatchItem, RaggedBatch
from speclight.modules.flex_attention import flex_paged_attention
from speclight.modules.flex_plan import TILES, FlexPlan, walk
from speclight.modules.layered_model import LayeredModel
from support import hf_tiny, tiny_lm
from torch.nn.attention.flex_attention import create_mask

NUM_BLOCKS = 96


def random_items(seed: int, block_size: int | None) -> list[BatchItem]:
    """Prefills, single tokens, chains and trees; blocks in no order, some held by several sequences from the start."""
    draw = random.Random(seed)
    free = draw.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    shared = [free.pop() for _ in range(3)]
    items = []
    for _ in range(draw.randint(1, 6)):
        new, context = draw.choice([1, 1, 2, 7, 30]), 0 if block_size is None else draw.choice([0, 3, 9, 17, 48])
        tree = [-1, *(draw.randrange(node) for node in range(1, new))]
        blocks: list[int] = []
        if block_size is not None:
            blocks += shared[: draw.choice([0, context // block_size])]
            blocks += [free.pop() for _ in range(-(-(context + new) // block_size) - len(blocks))]
        items.append(BatchItem(list(range(new)), context, blocks, draw.choice([None, tree])))
    return items


def tensors(batch: RaggedBatch, num_slots: int, fold: int, dtype: torch.dtype, head_dim: int = 8) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    shapes = [(batch.num_tokens, 2 * fold, head_dim), *[(num_slots, 2, head_dim)] * 2]
    return [torch.randn(shape, generator=made, dtype=dtype) for shape in shapes]


CASES = [  # block size (None: no cache), query heads per key head, window, soft cap
    (4, 1, None, None),
    (16, 4, 6, None),
    (5, 3, 1, None),
    (16, 2, 20, 5.0),
    (None, 1, None, None),
    (None, 3, 6, 5.0),
]


@pytest.mark.parametrize(("block_size", "fold", "window", "softcap"), CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 3e-6)])
def test_it_equals_the_reference(block_size, fold, window, softcap, dtype, tolerance):
    """Values are of order one; the tolerances are a few dozen of their roundings. Fails for a wrong slot, mask or
    scale."""
    for seed in range(6):
        batch = RaggedBatch.build(random_items(seed, block_size), block_size)
        num_slots = batch.num_tokens if block_size is None else NUM_BLOCKS * block_size
        arguments = (*tensors(batch, num_slots, fold, dtype), batch, 0.3, window, softcap)
        torch.testing.assert_close(
            flex_paged_attention(*arguments), paged_attention(*arguments), atol=tolerance, rtol=tolerance
        )


@pytest.mark.parametrize("block_size", [4, 16, 5, None])
@pytest.mark.parametrize("window", [None, 1, 20])
def test_lists_hold_all_that_is_seen_and_only_blocks_of_the_own_sequence(block_size, window):
    """A GPU computes what is listed and masks only the first list, which the unfused form never reads: this test reads
    both as a kernel does. Fails for a block left out, one of another text, or one called whole that is not."""
    for seed in range(6):
        batch = RaggedBatch.build(random_items(seed, block_size), block_size)
        plan = FlexPlan.build(batch, 2, batch.num_tokens if block_size is None else NUM_BLOCKS * block_size)
        found = plan.mask(window)
        part, whole = (
            listed(*lists, plan)
            for lists in (
                (found.kv_num_blocks, found.kv_indices),
                (found.full_kv_num_blocks, found.full_kv_indices),
            )
        )
        seen = create_mask(found.mask_mod, 1, 1, len(plan.token_of_row), plan.num_slots, "cpu")[0, 0]
        assert not (part & whole).any()
        real = plan.row_of_query
        assert not (seen & ~(part | whole))[real].any(), "a key that is seen is in no list"
        assert not (whole & ~seen)[real].any(), "a block is called whole that is not"
        assert not ((part | whole) & ~owned(plan)).any(), "a block of another sequence is listed"


def listed(counts: torch.Tensor, indices: torch.Tensor, plan: FlexPlan) -> torch.Tensor:
    """[rows, slots] whether the slot is in a listed block of the row's tile."""
    found = torch.zeros(len(plan.token_of_row) // plan.tile, plan.origin.shape[1], dtype=torch.int64)
    for row, count, blocks in zip(found, counts[0, 0], indices[0, 0], strict=True):
        row += torch.bincount(blocks[:count], minlength=len(row))
    assert found.max() <= 1, "a block is listed twice"
    return on_slots(found.bool(), plan)


def owned(plan: FlexPlan) -> torch.Tensor:
    held = torch.zeros(len(plan.placed), plan.origin.shape[1], dtype=torch.bool)
    for row, each in zip(held, plan.placed, strict=True):
        row[torch.from_numpy(each.blocks)] = True
    return on_slots(held[torch.from_numpy(plan.tiles.sequence)], plan)


def on_slots(by_tile: torch.Tensor, plan: FlexPlan) -> torch.Tensor:
    """[rows, slots] of [tiles, blocks]."""
    return by_tile.repeat_interleave(plan.tile, 0).repeat_interleave(plan.block_size, 1)[:, : plan.num_slots]


def test_a_window_and_a_long_context_cost_only_the_blocks_they_reach():
    """Fails if lists grow with the cache, if windows only mask, or if known context is masked key by key."""
    item = BatchItem([1], 160, range(11))
    plan = FlexPlan.build(RaggedBatch.build([item], 16), 4, NUM_BLOCKS * 16)
    everything, near = plan.mask(None), plan.mask(20)
    assert everything.kv_num_blocks.item() == 1 and everything.full_kv_num_blocks.item() == 10
    assert near.kv_num_blocks.item() == 2 and near.full_kv_num_blocks.item() == 1


@pytest.mark.parametrize(("new", "tile"), [(1, TILES[0]), (100, TILES[1])])
def test_rows_are_padded_to_tiles_of_one_sequence(new, tile):
    items = [BatchItem([1] * new, 0, range(7 * i, 7 * i + 7)) for i in range(3)]
    plan = FlexPlan.build(RaggedBatch.build(items, 16), 4, NUM_BLOCKS * 16)
    assert plan.tile == tile and len(plan.token_of_row) == 3 * -(-new * 4 // tile) * tile
    sequences = plan.token_of_row.view(-1, tile) // new
    assert (sequences == sequences[:, :1]).all()


def test_the_walk_of_a_tree_says_what_its_ancestry_says():
    for seed in range(50):
        draw = random.Random(seed)
        new = draw.randint(1, 12)
        parents = [-1, *(draw.randrange(-1, node) for node in range(1, new))]  # several roots too
        depths, enters, leaves = walk(new, parents)
        expected_depths, sees = BatchItem([0] * new, parents=parents).ancestry()
        assert (depths == expected_depths).all()
        assert (((enters <= enters[:, None]) & (enters[:, None] < leaves)) == sees).all()
    assert [list(x) for x in walk(3, None)] == [list(x) for x in walk(3, [-1, 0, 1])]


def test_a_gradient_is_refused():
    batch = RaggedBatch.build([BatchItem([1, 2])], None)
    query, keys, values = tensors(batch, 2, 1, torch.float32)
    with pytest.raises(ValueError, match="no backward pass; train with 'sdpa'"):
        flex_paged_attention(query.requires_grad_(), keys, values, batch, 1.0)


@pytest.mark.parametrize(("family", "fast"), [("mistral", True), ("gemma2", True), ("gemma2", False), ("opt", True)])
def test_a_models_layers_call_what_it_was_given(family, fast):
    """Fails if a path to attention, with or without fast modules, misses it, or its window or soft cap."""
    other = LayeredModel(hf_tiny(family), fast=fast, attention=flex_paged_attention)
    items = [BatchItem([3, 17, 42, 8, 91, 5, 5, 60]), BatchItem([1, 2, 3, 4], parents=[-1, 0, 0, 1])]
    with torch.no_grad():
        expected = tiny_lm(family, fast=fast)(RaggedBatch.build(items, None))
        batch = RaggedBatch.build(items, None)
        torch.testing.assert_close(other(batch), expected, atol=1e-10, rtol=1e-10)
    assert "groups" not in vars(batch), "the reference was called, or its groups were made for nothing"


# --- on GPUs ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the fused kernel is checked on a GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("fold", "window", "softcap"), [(1, None, None), (3, 6, None), (4, None, 5.0)])
@pytest.mark.parametrize("block_size", [16, 64, None])
def test_the_fused_kernel_equals_the_reference_on_the_cpu(block_size, fold, window, softcap, dtype, tolerance):
    """torch's default multiplies float32 without TensorFloat; bfloat16 rounds at 2^-9, and values are of order one."""
    for seed in range(6):
        items = random_items(seed, block_size)
        batch, on_gpu = RaggedBatch.build(items, block_size), RaggedBatch.build(items, block_size, "cuda")
        num_slots = batch.num_tokens if block_size is None else NUM_BLOCKS * block_size
        made = [x.to(dtype) for x in tensors(batch, num_slots, fold, torch.float64, head_dim=64)]
        expected = paged_attention(*(x.double() for x in made), batch, 0.125, window, softcap)
        read = flex_paged_attention(*(x.cuda() for x in made), on_gpu, 0.125, window, softcap)
        torch.testing.assert_close(read.double().cpu(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel's limits are a GPU's")
def test_blocks_that_the_kernel_cannot_multiply_are_refused():
    batch = RaggedBatch.build([BatchItem([1, 2], 0, [0])], 24, "cuda")
    query, keys, values = (x.cuda() for x in tensors(batch, 48, 1, torch.float32, head_dim=64))
    with pytest.raises(ValueError, match="block_size must be a multiple of 16"):
        flex_paged_attention(query, keys, values, batch, 1.0)
