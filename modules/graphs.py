"""Recorded passes: the kernels of a range of layers, recorded once for a shape and then launched as one.

A small model's pass on a GPU takes as long as launching its kernels one by one; a CUDA graph launches all of them at
once. It repeats addresses, so it needs a pass of fixed shape in fixed places: here [sequences, tokens of each] with one
padded call of the reference attention. Padding repeats a sequence's last token, or the first sequence: the copies write
what their originals write into the same slots, so no slot is set aside and nothing is masked but keys.

Passes that would be mostly padding (a long prompt beside single tokens) run as they always did.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .batch import AttentionGroup, RaggedBatch
from .kv_cache import PagedKVCache
from .transfer import to_device

if TYPE_CHECKING:
    from .layered_model import LayeredModel

logger = logging.getLogger(__name__)

Recorder = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Records a function over tensors that stay in place; what it returns runs it again, into the same output."""

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Sequences of a recorded pass, and new tokens of each: one of these, the next larger."""
LEAST_KEYS = 128
MOST_PADDING = 2.0
"""Padded tokens by real ones, beyond which a pass is not recorded."""
SEEN_BEFORE = 2
"""Passes of a shape that run as they are before it is recorded, which waits for the device and runs it three times."""
MOST_RECORDINGS = 96
"""Kept at once; the one that was used longest ago goes first."""
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3}
CLOSE_ELSEWHERE = 0.1
"""How far a token's state, relative to its norm, may be in a recording's first output from the pass that was run beside
it: bfloat16 rounds at 2^-9 in each of some hundred sums."""


class Shape(NamedTuple):
    sequences: int
    tokens: int
    keys: int
    start: int
    stop: int


class Padded(NamedTuple):
    """A batch in a recording's shape. rows: [sequences * tokens] of the batch; real: the places of the batch's own rows
    among them; the others as in AttentionGroup."""

    rows: np.ndarray
    real: np.ndarray
    key_slots: np.ndarray
    visible: np.ndarray
    query_positions: np.ndarray
    key_positions: np.ndarray


@dataclass
class FixedGroup(AttentionGroup):
    """A group that always has a mask: what a recording sees is not what it saw when it was recorded."""

    def sees_all(self, queries: slice, keys: slice, window: int | None) -> bool:
        return False


@dataclass
class Recording:
    """A pass of one shape. hidden: [sequences * tokens, hidden], and the batch: what the recorded kernels read."""

    hidden: Tensor
    batch: RaggedBatch
    group: FixedGroup
    replay: Callable[[], Tensor] = field(init=False)

    def fill(self, padded: Padded, hidden: Tensor, batch: RaggedBatch) -> None:
        assert batch.slot_mapping is not None and self.batch.slot_mapping is not None
        rows = to_device(padded.rows, hidden.device)
        torch.index_select(hidden, 0, rows, out=self.hidden)
        torch.index_select(batch.positions, 0, rows, out=self.batch.positions)
        torch.index_select(batch.slot_mapping, 0, rows, out=self.batch.slot_mapping)
        for name in ("key_slots", "visible", "query_positions", "key_positions"):
            getattr(self.group, name).copy_(to_device(getattr(padded, name), hidden.device))

    def forget(self) -> None:
        """What a pass makes of the tensors above, so that the next makes it anew."""
        self.group.plans.clear()
        self.batch.rotary.clear()


def record_on_cuda(device: torch.device) -> Recorder:
    """A recorder of CUDA graphs that share their working memory: outputs are copied before another one runs."""
    with torch.cuda.device(device):
        pool, side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def record(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        with torch.cuda.device(device):
            before = torch.cuda.current_stream()
            side.wait_stream(before)
            try:
                with torch.cuda.stream(side):
                    function()  # libraries choose kernels and take workspaces at a first call, which is not recorded
                before.wait_stream(side)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=side):
                    output = function()
            finally:
                torch.cuda.set_stream(before)  # a recording that breaks leaves the thread on its own

        def replay() -> Tensor:
            with torch.cuda.device(device):
                graph.replay()
            return output

        return replay

    return record


class Graphs:
    """The recordings of one model over one cache, in which recorded kernels read and write.

    record: how a function is recorded; None: as CUDA graphs.
    """

    def __init__(self, model: LayeredModel, cache: PagedKVCache, record: Recorder | None = None) -> None:
        self.model, self._cache = model, weakref.ref(cache)  # the model outlives engines and their caches
        self.record = record_on_cuda(model.device) if record is None else record
        self.recordings: OrderedDict[Shape, Recording] = OrderedDict()
        self.is_on = True
        self._seen: Counter[Shape] = Counter()

    def is_over(self, cache: PagedKVCache | None) -> bool:
        return cache is not None and self._cache() is cache

    def run(self, hidden: Tensor, batch: RaggedBatch, cache: PagedKVCache, start: int, stop: int) -> Tensor:
        """The residual stream after layers [start, stop): from a recording where there is one for the batch's shape."""
        shape = shape_of(batch, start, stop) if self.is_on and torch.is_inference_mode_enabled() else None
        recording = None if shape is None else self.recordings.get(shape)
        if shape is not None and recording is not None:
            self.recordings.move_to_end(shape)
            padded = _padded(batch, shape)
            recording.fill(padded, hidden, batch)
            return _taken(recording.replay(), padded)
        output = self.model.run_kernels(hidden, batch, cache, start, stop)
        if shape is not None:
            self._seen[shape] += 1
            if self._seen[shape] > SEEN_BEFORE:
                self._add(shape, hidden, batch, cache, output)
        return output

    def _add(self, shape: Shape, hidden: Tensor, batch: RaggedBatch, cache: PagedKVCache, expected: Tensor) -> None:
        """Record a shape, and compare what the recording gives with the pass that has just been run without it."""
        recording, padded = self._empty(shape), _padded(batch, shape)
        recording.fill(padded, hidden, batch)

        def function() -> Tensor:
            recording.forget()  # what is made within belongs to the recording
            return self.model.run_kernels(recording.hidden, recording.batch, cache, shape.start, shape.stop)

        try:
            recording.replay = self.record(function)
            recording.forget()
            recording.replay().fill_(torch.nan)  # what does not run again stays so
            distance = _distance(_taken(recording.replay(), padded), expected)
            if not distance <= CLOSE.get(hidden.dtype, CLOSE_ELSEWHERE):
                raise RuntimeError(f"a recorded pass differs from the pass itself by {distance:.3g} of a token's norm")
        except RuntimeError as error:
            self.is_on = False
            self.recordings.clear()
            logger.warning("cuda graphs are off from here on, passes run without: %s", error)
            return
        self.recordings[shape] = recording
        if len(self.recordings) > MOST_RECORDINGS:
            del self._seen[self.recordings.popitem(last=False)[0]]

    def _empty(self, shape: Shape) -> Recording:
        """Zeros in a recording's places."""
        device, (seqs, tokens, keys) = self.model.device, shape[:3]

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        group = FixedGroup(
            seqs,
            tokens,
            keys,
            None,
            None,
            None,
            zeros(seqs * keys),
            None,
            zeros(seqs, tokens, keys, dtype=torch.bool),
            zeros(seqs, tokens),
            zeros(seqs, keys),
        )
        count = seqs * tokens
        ends = list(range(0, count + 1, tokens))
        batch = RaggedBatch(zeros(count), zeros(count), ends, zeros(count), (), 1)
        batch.groups = [group]
        return Recording(zeros(count, self.model.hidden_size, dtype=self.model.dtype), batch, group)


def _padded(batch: RaggedBatch, shape: Shape) -> Padded:
    """`pad`, once for all ranges of layers that a batch runs through."""
    padded: Padded = batch.plan(("padded", shape[:3]), lambda: pad(batch, shape))
    return padded


def _taken(output: Tensor, padded: Padded) -> Tensor:
    """The batch's own rows of a recording's output, copied before it is overwritten."""
    return output.index_select(0, to_device(padded.real, output.device))


def _distance(found: Tensor, expected: Tensor) -> float:
    """Of the token that is farthest off, relative to its norm."""
    found, expected = found.double(), expected.double()
    norms = torch.linalg.vector_norm(expected, dim=1).clamp_min(1e-30)
    return float((torch.linalg.vector_norm(found - expected, dim=1) / norms).max())


def shape_of(batch: RaggedBatch, start: int, stop: int) -> Shape | None:
    """The shape that a batch is padded to; None where it is not to be recorded."""
    lengths = [len(item.token_ids) for item in batch.items]
    if not lengths or max(len(lengths), *lengths) > SIZES[-1]:
        return None
    sequences, tokens = _next(len(lengths)), _next(max(lengths))
    if sequences * tokens > MOST_PADDING * sum(lengths):
        return None
    keys = max(len(slots) for slots in batch.key_slots)
    return Shape(sequences, tokens, max(1 << (keys - 1).bit_length(), LEAST_KEYS), start, stop)


def _next(count: int) -> int:
    return next(size for size in SIZES if size >= count)


def pad(batch: RaggedBatch, shape: Shape) -> Padded:
    """Lay a batch out in a shape that is at least as large in everything."""
    seqs, tokens, keys = shape[:3]
    rows = np.zeros((seqs, tokens), dtype=np.int64)
    slots = np.zeros((seqs, keys), dtype=np.int64)
    visible = np.zeros((seqs, tokens, keys), dtype=bool)
    query_at, key_at = np.zeros((seqs, tokens), dtype=np.int64), np.zeros((seqs, keys), dtype=np.int64)
    real: list[np.ndarray] = []
    for row in range(seqs):
        index = row if row < len(batch.items) else 0
        item, known = batch.items[index], batch.key_slots[index]
        (depths, sees), context, new = item.ancestry(), item.context_len, len(item.token_ids)
        taken = np.minimum(np.arange(tokens), new - 1)
        rows[row] = batch.cu_seqlens[index] + taken
        slots[row], slots[row, : len(known)] = known[-1], known
        visible[row, :, :context], visible[row, :, context : context + new] = True, sees[taken]
        query_at[row] = context + depths[taken]
        key_at[row, :context], key_at[row, context : context + new] = np.arange(context), context + depths
        if row == index:
            real.append(row * tokens + np.arange(new))
    return Padded(rows.reshape(-1), np.concatenate(real), slots.reshape(-1), visible, query_at, key_at)
