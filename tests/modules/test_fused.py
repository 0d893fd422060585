"""Kernels for CPUs against torch in float64, and what they promise besides: no row depends on the others in any bit."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from speclight.modules import fused, kernels
from speclight.modules.attention import paged_attention, reference_attention
from speclight.modules.batch import BatchItem, RaggedBatch
from speclight.modules.kernels import WORTH_A_THREAD
from speclight.modules.kv_cache import CacheTable
from support import FAMILIES, tiny_lm

DTYPES = {torch.float32: 3e-6, torch.bfloat16: 2**-8}
"""A few roundings of each, relative to the largest value."""


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=DTYPES[dtype] * float(expected.abs().max()), rtol=0)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 15), (7, 48), (40, 576), (2, 4099)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype, rows, width, threads):
    """Enough rows for several threads, and widths that are no multiple of a vector."""
    hidden, addend, weight = normal(rows, width, dtype=dtype), normal(rows + 2, width, dtype=dtype, seed=1), None
    weight = normal(width, dtype=torch.float32, seed=2)

    def expected(values):
        return F.rms_norm(values.double(), (width,), weight.double(), 1e-5)

    close(fused.norm(hidden, weight, 1e-5), expected(hidden), dtype)
    normed = torch.full((rows + 1, width), 7.0, dtype=dtype)
    total = fused.add_norm(hidden, addend, weight, 1e-5, normed)
    assert torch.equal(total, hidden + addend[:rows])
    close(normed[:rows], expected(total), dtype)
    assert (normed[rows:] == 7.0).all(), "rows behind the last one are nobody's"
    for row in range(rows):
        assert torch.equal(
            fused.norm(hidden[row : row + 1], weight, 1e-5), fused.norm(hidden, weight, 1e-5)[row : row + 1]
        )


@pytest.mark.parametrize(("rows", "width"), [(1, 5), (6, 48), (33, 1536)])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(dtype, activation, rows, width, threads):
    from transformers.activations import ACT2FN

    gate_up = 6.0 * normal(rows + 1, 2 * width, dtype=dtype)
    gate_up[0, 0], gate_up[0, 1], gate_up[0, 2] = -200.0, 200.0, 0.0  # exp of them would overflow
    found = fused.gated(gate_up, fused.gate_of(ACT2FN[activation]), rows, torch.empty(rows, width, dtype=dtype))
    gate, up = gate_up[:rows].double().chunk(2, dim=-1)
    expected = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
    close(found, expected, dtype)
    assert found.isfinite().all()


def test_other_activations_have_no_kernel():
    from transformers.activations import ACT2FN

    assert fused.gate_of(ACT2FN["gelu"]) is None and fused.gate_of(ACT2FN["relu"]) is None


SPECIAL = [0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, 1e-40, -3e38, 3.4e38, 1.00390625, 1.01171875, 1.0039063, 65504.0]


def test_values_round_to_bfloat16_as_in_torch():
    """Ties to even, overflow to infinity, denormals kept; NaN stays NaN."""
    bits = torch.randint(-(2**31), 2**31 - 1, (40_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    values = torch.cat((torch.tensor(SPECIAL), bits.view(torch.float32)))
    wide = values.unsqueeze(1)
    zero = torch.zeros_like(wide, dtype=torch.bfloat16)
    halves = (
        wide.bfloat16()
    )  # what a float32 kernel's rounding is seen by: adding zero to a rounded value changes nothing
    found = fused.add_norm(halves, zero, torch.ones(1), 1.0, torch.empty_like(halves))
    assert torch.equal(found.isnan(), wide.isnan())
    assert torch.equal(found[~wide.isnan()], halves[~wide.isnan()])
    pairs = torch.stack((values[:-1], values[1:]), dim=1).bfloat16()
    sums = fused.add_norm(pairs[:-1], pairs[1:], torch.ones(2), 1.0, torch.empty_like(pairs[:-1]))
    expected = (pairs[:-1].float() + pairs[1:].float()).bfloat16()
    assert torch.equal(sums.isnan(), expected.isnan())
    assert torch.equal(sums[~expected.isnan()], expected[~expected.isnan()])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(4, 2, 8), (9, 3, 64), (3, 3, 10)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation(dtype, heads, key_heads, size, normed, threads):
    """Queries in order, keys and values in their slots, and nothing anywhere else."""
    tokens, slots = 5, torch.tensor([9, 0, 4, 11, 3])
    qkv = normal(tokens + 2, (heads + 2 * key_heads) * size, dtype=dtype)
    angles = normal(tokens, size // 2, dtype=torch.float64, seed=1).repeat(1, 2)
    turn = angles.cos().to(dtype), angles.sin().to(dtype)
    weights = [normal(size, dtype=torch.float32, seed=seed) for seed in (2, 3)]
    query = torch.empty(tokens, heads, size, dtype=dtype)
    keys, values = (torch.full((12, key_heads, size), 7.0, dtype=dtype) for _ in range(2))
    fused.rotate(qkv, turn, slots, query, keys, values, fused.HeadNorms(*weights, 1e-6) if normed else None)

    parts = qkv[:tokens].view(tokens, -1, size).split([heads, key_heads, key_heads], dim=1)

    def turned(part, weight):
        one = F.rms_norm(part.double(), (size,), weight.double(), 1e-6).to(dtype).double() if normed else part.double()
        half = torch.cat((-one[..., size // 2 :], one[..., : size // 2]), dim=-1)
        return one * turn[0].double().unsqueeze(1) + half * turn[1].double().unsqueeze(1)

    close(query, turned(parts[0], weights[0]), dtype)
    close(keys[slots], turned(parts[1], weights[1]), dtype)
    assert torch.equal(values[slots], parts[2])
    others = [slot for slot in range(12) if slot not in slots]
    assert (keys[others] == 7.0).all() and (values[others] == 7.0).all()


class Texts:
    """A cache of random keys and values, and texts in it whose blocks lie anywhere."""

    def __init__(self, heads, key_heads, size, dtype, block_size=4, slots=1200, seed=0):
        self.random = random.Random(seed)
        self.heads, self.size, self.dtype, self.block_size = heads, size, dtype, block_size
        self.keys, self.values = (normal(slots, key_heads, size, dtype=dtype, seed=seed + n) for n in range(2))
        self.free = list(range(slots // block_size))
        self.random.shuffle(self.free)

    def item(self, context: int, new: int, tree: bool = False) -> BatchItem:
        blocks = [self.free.pop() for _ in range(-(-(context + new) // self.block_size))]
        parents = [-1, *(self.random.randrange(node) for node in range(1, new))] if tree else None
        return BatchItem([1] * new, context, blocks, parents)

    def read(self, items, query, attention=paged_attention, dtype=None, **options):
        dtype = dtype or self.dtype
        batch = RaggedBatch.build(items, self.block_size)
        tensors = (one.to(dtype) for one in (query, self.keys, self.values))
        return attention(*tensors, batch, self.size**-0.5, **options)


SHAPES = [(4, 2, 8), (9, 3, 64), (5, 5, 24), (8, 1, 80)]


@pytest.mark.parametrize(
    "options", [{}, {"window": 5}, {"window": 40}, {"softcap": 3.0}, {"window": 33, "softcap": 9.0}]
)
@pytest.mark.parametrize(("heads", "key_heads", "size"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_equals_the_reference(dtype, heads, key_heads, size, options, threads):
    """Single tokens, chains, trees, prompts and one that is too long for the kernel, at all sorts of lengths."""
    texts = Texts(heads, key_heads, size, dtype)
    items = [
        texts.item(*shape) for shape in ((0, 1), (31, 1), (32, 2), (33, 9, True), (7, 64), (0, 40, True), (100, 30))
    ]
    items += [texts.item(3, 90), texts.item(250, 12, True)]
    random.Random(1).shuffle(items)
    query = 2.0 * normal(sum(len(item.token_ids) for item in items), heads, size, dtype=dtype, seed=9)
    expected = texts.read(items, query, reference_attention, torch.float64, **options)
    found = texts.read(items, query, **options)
    short = torch.cat([torch.full((n,), n <= fused.MOST_TOKENS) for n in (len(item.token_ids) for item in items)])
    close(found[short], expected[short], dtype)
    torch.testing.assert_close(found.double(), expected, atol=4 * DTYPES[dtype] * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_without_a_cache_reads_the_batch(dtype):
    items = [BatchItem([1] * 9), BatchItem([1] * 3, parents=[-1, 0, 0]), BatchItem([1])]
    query, keys, values = (normal(13, heads, 8, dtype=dtype, seed=heads) for heads in (4, 2, 2))
    batch = RaggedBatch.build(items, None)
    found = paged_attention(query, keys, values, batch, 0.3)
    close(found, reference_attention(query.double(), keys.double(), values.double(), batch, 0.3), dtype)


@pytest.mark.parametrize("options", [{}, {"window": 7}, {"softcap": 3.0}])
@pytest.mark.parametrize(("heads", "key_heads", "size"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_text_s_attention_is_the_same_bit_for_bit_whatever_is_in_the_pass(dtype, heads, key_heads, size, options):
    texts = Texts(heads, key_heads, size, dtype)
    items = [texts.item(*shape) for shape in ((0, 1), (31, 1), (5, 3), (33, 9, True), (7, 64), (250, 1))]
    counts = [len(item.token_ids) for item in items]
    query = normal(sum(counts), heads, size, dtype=dtype, seed=9)
    together = texts.read(items, query, **options).split(counts)
    for item, rows, read in zip(items, query.split(counts), together, strict=True):
        assert torch.equal(texts.read([item], rows, **options), read)


@pytest.mark.parametrize("options", [{}, {"window": 7}])
@pytest.mark.parametrize("context", [0, 3, 31, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tree_s_nodes_attend_bit_for_bit_as_decoded_one_by_one(dtype, context, options):
    """Each path of a tree, its keys put behind the context as commit does, run a token at a time and as a chain."""
    texts = Texts(9, 3, 64, dtype)
    item = texts.item(context, 20, tree=True)
    query = normal(20, 9, 64, dtype=dtype, seed=9)
    tree = texts.read([item], query, **options)
    at = RaggedBatch.build([item], texts.block_size).slots
    for leaf in range(20):
        path = [leaf]
        while path[0] > 0:
            path.insert(0, item.parents[path[0]])
        other = Texts(9, 3, 64, dtype)
        other.keys, other.values = texts.keys.clone(), texts.values.clone()
        other.keys[at[: len(path)]], other.values[at[: len(path)]] = texts.keys[at[path]], texts.values[at[path]]
        chain = other.read([BatchItem([1] * len(path), context, item.blocks)], query[path], **options)
        assert torch.equal(chain, tree[path])
        single = [
            other.read([BatchItem([1], context + place, item.blocks)], query[node : node + 1], **options)
            for place, node in enumerate(path)
        ]
        assert torch.equal(torch.cat(single), tree[path])


def test_what_a_token_does_not_see_may_hold_nan():
    """Branches of a tree, what a window has left, slots of other texts and of none."""
    texts = Texts(4, 2, 8, torch.float32)
    item = texts.item(40, 6)
    item = BatchItem(item.token_ids, 40, item.blocks, [-1, 0, 0, 1, 2, 4])
    query = normal(6, 4, 8, dtype=torch.float32, seed=9)
    before = texts.read([item], query, window=20)
    batch = RaggedBatch.build([item], texts.block_size)
    (slots,) = batch.key_slots
    hidden = [int(slots[41 + 1])] + [int(slot) for slot in slots[:20]]  # node 2's, and what is behind all windows
    unused = sorted(set(range(len(texts.keys))) - set(slots.tolist()))
    for kept in (texts.keys, texts.values):
        kept[[*hidden, *unused]] = math.nan
    after = texts.read([item], query, window=20)
    sees_node_2 = [2, 4, 5]
    others = [0, 1, 3]
    assert torch.equal(after[others], before[others])
    assert after[sees_node_2].isnan().all()


def test_threads_change_no_bit():
    texts = Texts(9, 3, 64, torch.bfloat16)
    items = [texts.item(250, 6, True), texts.item(300, 20)]
    query = normal(26, 9, 64, dtype=torch.bfloat16, seed=9)
    assert WORTH_A_THREAD < 26 * 9 * 64 * 250
    found = []
    before = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found += [texts.read(items, query) for _ in range(5)]
    torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "opt"])  # whose layers are transformers'
def test_a_tree_s_logits_are_plain_decoding_s_bit_for_bit(family, dtype):
    """The whole model: a tree of three paths verified beside another text, against each path a token at a time."""
    model = tiny_lm(family, dtype=dtype)
    prompt, paths = [5, 9, 2, 40, 7], [[11, 3, 60], [11, 3, 8], [11, 71]]
    token_ids, parents = [11, 3, 71, 60, 8], [-1, 0, 0, 1, 1]
    nodes = [[0, 1, 3], [0, 1, 4], [0, 2]]

    def begun(cache):
        table = CacheTable()
        assert cache.reserve(table, 40)
        model(RaggedBatch.build([BatchItem(prompt, 0, table.blocks)], 16), cache)
        return table

    cache = model.new_cache(64)
    table = begun(cache)
    other = BatchItem([1, 2, 3], 0, range(40, 44))
    tree = BatchItem(token_ids, len(prompt), table.blocks, parents)
    together = model(RaggedBatch.build([tree, other], 16), cache)
    for path, found in zip(paths, nodes, strict=True):
        alone = model.new_cache(64)
        table = begun(alone)
        for place, (token_id, node) in enumerate(zip(path, found, strict=True)):
            item = BatchItem([token_id], len(prompt) + place, table.blocks)
            assert torch.equal(model(RaggedBatch.build([item], 16), alone)[0], together[node])


@pytest.mark.parametrize("count", [1, 3, 24, 64])
@pytest.mark.parametrize("width", [64, 65, 1000, 4099])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_greatest_values_of_rows(dtype, width, count, threads):
    """Falling, of equals the first ones (in bfloat16 most values occur twice), with their log-probabilities."""
    logits = 3.0 * normal(9, width, dtype=dtype)
    logits[1, ::2], logits[2], logits[3, 5:], logits[4, 7] = -math.inf, 1.0, -math.inf, math.inf
    logits[5] = logits[5].sort().values
    ids, values, logprobs = fused.leading(logits, count)
    expected = logits.float().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids, expected.indices[:, :count]) and torch.equal(values, expected.values[:, :count])
    finite = values.isfinite().all(dim=-1)
    torch.testing.assert_close(logprobs[finite], values[finite].log_softmax(dim=-1), atol=1e-5, rtol=1e-6)
    assert (logprobs[3, : min(count, 5)] <= 0.0).all() and (logprobs[3, 5:] == -math.inf).all()


def test_nan_is_greater_than_all():
    logits = normal(3, 200, dtype=torch.float32)
    logits[0, 150], logits[1, 3], logits[1, 190] = math.nan, math.nan, math.nan
    ids, values, _ = fused.leading(logits, 2)
    assert values[0, 0].isnan() and ids[0, 0] == 150 and ids[0, 1] == logits[0].nan_to_num(-9.0).argmax()
    assert values[1].isnan().all() and ids[1].tolist() == [3, 190]
    assert values[2].isfinite().all()


@pytest.mark.parametrize("on_disk", [True, False])
def test_who_must_wait_for_compiling_is_told_before(monkeypatch, on_disk):
    """Once, and not for models that need no kernels."""
    events = []

    def found(name, dtype):
        events.append(name)
        return SimpleNamespace(was_on_disk=on_disk)

    monkeypatch.setattr(fused, "_kernel", found)
    for dtype, device in ((torch.float64, "cpu"), (torch.float16, "cpu"), (torch.bfloat16, "meta")):
        fused.prepare(dtype, torch.device(device), lambda: events.append("told"))
    assert events == []
    fused.prepare(torch.bfloat16, torch.device("cpu"), lambda: events.append("told"))
    assert events == ["norm", *([] if on_disk else ["told"]), "add_norm", "gated", "rotate", "attend", "leading"]


def test_kernels_need_no_folder_to_be_kept_in(monkeypatch):
    """Where neither the package's folder nor the user's can be written to, they are compiled at each start."""

    def nowhere(**_):
        raise RuntimeError("cannot cache function: no locator available")

    assert kernels._can_cache()
    monkeypatch.setattr(kernels, "njit", nowhere)
    assert not kernels._can_cache()


def test_gradients_devices_and_other_dtypes_are_left_to_torch():
    halves, whole = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)
    assert fused.fits(halves) and fused.fits(whole, whole) and not fused.fits(halves, whole)
    assert not fused.fits(whole.double()) and not fused.fits(torch.zeros(2, dtype=torch.float16))
    assert not fused.fits(torch.zeros(2, device="meta"))
    with torch.enable_grad():
        assert not fused.fits(whole)
