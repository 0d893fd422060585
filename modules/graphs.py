"""Recorded passes: the kernels of a range of layers, recorded once for a shape and then launched as one.

A small model's pass on a GPU takes as long as launching its kernels one by one; a CUDA graph launches all of them at
once. It repeats addresses, so it needs a pass of fixed shape in fixed places: here [sequences, tokens of each] with one
padded call of the reference attention. Padding repeats a sequence's last token, or the first sequence: the copies write
what their originals write into the same slots, so no slot is set aside and nothing is masked but keys.

Passes that would be mostly padding (a long prompt beside single tokens) run as they always did.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .batch import AttentionGroup, RaggedBatch
from .kv_cache import PagedKVCache

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
"""Passes of a shape that run as they are before it is recorded: recording takes as long as several."""
MOST_RECORDINGS = 96
"""Kept at once; the one that was used longest ago goes first."""
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3}
CLOSE_ELSEWHERE = 0.05
"""How far, relative to its norm, a recording's first output may be from the pass that was run beside it."""


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
    """A group whose masks are made from what lies in its tensors each time, without asking the device anything."""

    def mask(self, window: int | None, dtype: torch.dtype, repeat: int) -> Tensor:
        key = (window, dtype, repeat)
        found = self.masks.get(key)
        if found is None:
            seen = self.visible
            if window is not None:
                seen = seen & (self.query_positions[:, :, None] - self.key_positions[:, None, :] < window)
            found = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
            self.masks[key] = found = found.repeat_interleave(repeat, dim=1).unsqueeze(1)
        return found


@dataclass
class Recording:
    """A pass of one shape. hidden: [sequences * tokens, hidden], and the batch: what the recorded kernels read."""

    hidden: Tensor
    batch: RaggedBatch
    group: FixedGroup
    replay: Callable[[], Tensor] = field(init=False)

    def fill(self, padded: Padded, hidden: Tensor, batch: RaggedBatch) -> None:
        assert batch.slot_mapping is not None and self.batch.slot_mapping is not None
        device = hidden.device
        rows = torch.from_numpy(padded.rows).to(device)
        torch.index_select(hidden, 0, rows, out=self.hidden)
        torch.index_select(batch.positions, 0, rows, out=self.batch.positions)
        torch.index_select(batch.slot_mapping, 0, rows, out=self.batch.slot_mapping)
        for name in ("key_slots", "visible", "query_positions", "key_positions"):
            getattr(self.group, name).copy_(torch.from_numpy(getattr(padded, name)))


def record_on_cuda() -> Recorder:
    """A recorder of CUDA graphs that share their working memory: outputs are copied before another one runs."""
    pool = torch.cuda.graph_pool_handle()

    def record(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function()  # libraries choose kernels and take workspaces at their first call, which cannot be recorded
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = function()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    return record


class Graphs:
    """The recordings of one model over one cache, in which recorded kernels read and write.

    record: how a function is recorded; None: as CUDA graphs.
    """

    def __init__(self, model: LayeredModel, cache: PagedKVCache, record: Recorder | None = None) -> None:
        self.model, self.cache = model, cache
        self.record = record_on_cuda() if record is None else record
        self.recordings: OrderedDict[Shape, Recording] = OrderedDict()
        self.is_on = True
        self._seen: Counter[Shape] = Counter()

    def run(self, hidden: Tensor, batch: RaggedBatch, start: int, stop: int) -> Tensor:
        """The residual stream after layers [start, stop): from a recording where there is one for the batch's shape."""
        shape = shape_of(batch, start, stop) if self.is_on and not torch.is_grad_enabled() else None
        if shape is None:
            return self.model.run_kernels(hidden, batch, self.cache, start, stop)
        recording = self.recordings.get(shape)
        if recording is None:
            return self._run_unrecorded(shape, hidden, batch)
        self.recordings.move_to_end(shape)
        return self._replayed(recording, shape, hidden, batch)

    def _run_unrecorded(self, shape: Shape, hidden: Tensor, batch: RaggedBatch) -> Tensor:
        output = self.model.run_kernels(hidden, batch, self.cache, shape.start, shape.stop)
        self._seen[shape] += 1
        if self._seen[shape] > SEEN_BEFORE:
            self._add(shape, hidden, batch, output)
        return output

    def _add(self, shape: Shape, hidden: Tensor, batch: RaggedBatch, expected: Tensor) -> None:
        """Record a shape, and compare what the recording gives with the pass that has just been run without it."""
        recording = self._empty(shape)
        padded = pad(batch, shape)
        recording.fill(padded, hidden, batch)

        def function() -> Tensor:
            recording.group.masks.clear()  # what is made within belongs to the recording
            recording.batch.rotary.clear()
            return self.model.run_kernels(recording.hidden, recording.batch, self.cache, shape.start, shape.stop)

        try:
            recording.replay = self.record(function)
            found = self._replayed(recording, shape, hidden, batch)
            distance = float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
            if not distance <= CLOSE.get(hidden.dtype, CLOSE_ELSEWHERE):
                raise RuntimeError(f"a recorded pass differs from the pass itself by {distance:.3g} of its norm")
        except RuntimeError as error:
            self.is_on = False
            self.recordings.clear()
            logger.warning("cuda graphs are off from here on, passes run without: %s", error)
            return
        self.recordings[shape] = recording
        if len(self.recordings) > MOST_RECORDINGS:
            self.recordings.popitem(last=False)

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
        batch = RaggedBatch(zeros(count), zeros(count), ends, zeros(count), (), self.cache.block_size, [])
        batch.groups = [group]
        return Recording(zeros(count, self.model.hidden_size, dtype=self.model.dtype), batch, group)

    def _replayed(self, recording: Recording, shape: Shape, hidden: Tensor, batch: RaggedBatch) -> Tensor:
        padded = pad(batch, shape)
        recording.fill(padded, hidden, batch)
        return recording.replay().index_select(0, torch.from_numpy(padded.real).to(hidden.device))


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
