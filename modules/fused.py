"""What kernels on CPUs are given: tensors as addresses, and a pass's texts as attention reads them.

`paged_attention` and the modules of `fast` ask `fits` and call these where it says so; elsewhere they are what they
are. numba, which compiles the kernels, is imported when the first one is called.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .batch import RaggedBatch

if TYPE_CHECKING:
    from .kernels import Kernel

DTYPES = (torch.float32, torch.bfloat16)
MOST_TOKENS = 64
"""New tokens of a text that its kernel attends for: torch's attention multiplies more of them faster."""
MOST_ROWS, SCORES = 64, 1 << 17
"""Queries of a task of attention, and scores that it keeps at once (512 KiB), but for one block of rows: at most."""
GATES = {"SiLUActivation": (0.0, 1.0), "SiLU": (0.0, 1.0), "GELUTanh": (0.044715, 2.0 * math.sqrt(2.0 / math.pi))}
"""(cubic, slope) of the activations that `gated` computes, by their class in transformers."""


def fits(*tensors: Tensor) -> bool:
    """Whether kernels can take these: on a CPU, float32 or bfloat16, one dtype for all, and no gradient is wanted."""
    first = tensors[0]
    return (
        first.device.type == "cpu"
        and first.dtype in DTYPES
        and not torch.is_grad_enabled()
        and all(tensor.dtype == first.dtype for tensor in tensors)
    )


@functools.cache
def _kernel(name: str, dtype: torch.dtype) -> Kernel:
    """Compiled when first asked for, in seconds; later runs find it in numba's cache on disk."""
    from .kernels import ENTRIES, Kernel

    return Kernel(ENTRIES[name, dtype])


def prepare(dtype: torch.dtype, device: torch.device, tell: Callable[[], None] = lambda: None) -> None:
    """Compile what a model will need, or find it on disk. tell: called first where that takes long, some 15 seconds."""
    if device.type == "cpu" and dtype in DTYPES:
        if not _kernel("norm", dtype).was_on_disk:
            tell()
        for name in ("add_norm", "gated", "rotate", "attend", "leading"):
            _kernel(name, dtype)


@functools.cache
def _bits(value: float) -> int:
    """A float as kernels take it: the bits of the nearest float32."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def norm(hidden: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """RMS norm of the last dimension. weight: float32. out: at least as many rows; the rest stays as it is."""
    hidden = hidden.contiguous()
    found = torch.empty_like(hidden) if out is None else out
    width, count = hidden.shape[-1], hidden.numel()
    _kernel("norm", hidden.dtype)(
        count // width,
        count,
        width,
        hidden.data_ptr(),
        found.data_ptr(),
        weight.data_ptr(),
        _bits(eps),
    )
    return found


def add_norm(hidden: Tensor, addend: Tensor, weight: Tensor, eps: float, normed: Tensor) -> Tensor:
    """[rows, width] hidden + addend, and in `normed` its RMS norm; the addend may have more rows."""
    rows, width = hidden.shape
    found = torch.empty_like(hidden)
    _kernel("add_norm", hidden.dtype)(
        rows,
        rows * width,
        width,
        hidden.data_ptr(),
        addend.data_ptr(),
        found.data_ptr(),
        normed.data_ptr(),
        weight.data_ptr(),
        _bits(eps),
    )
    return found


def gate_of(activation: Any) -> tuple[float, float] | None:
    """(cubic, slope) of an activation that `gated` computes; None of others."""
    return GATES.get(type(activation).__name__)


def gated(gate_up: Tensor, gate: tuple[float, float], rows: int, out: Tensor) -> Tensor:
    """[rows, width] activation(gate) * up of the first rows of [rows or more, 2 width], into `out`."""
    width = gate_up.shape[-1] // 2
    cubic, slope = gate
    _kernel("gated", gate_up.dtype)(
        rows, 8 * rows * width, width, gate_up.data_ptr(), out.data_ptr(), _bits(cubic), _bits(slope)
    )
    return out


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of a model's query and key heads. query, key: float32 weights."""

    query: Tensor
    key: Tensor
    eps: float


def rotate(
    qkv: Tensor,
    turn: tuple[Tensor, Tensor],
    slots: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: HeadNorms | None = None,
) -> None:
    """Queries, with rotary embedding, into [tokens, heads, head_dim]; keys, the same, and values into their slots of
    [slots, key heads, head_dim].

    qkv: [tokens or more, (heads + 2 key heads) head_dim]. turn: cos and sin, [tokens, head_dim].
    """
    tokens, heads, size = queries.shape
    _kernel("rotate", qkv.dtype)(
        tokens,
        4 * tokens * qkv.shape[-1],
        heads,
        keys.shape[1],
        size,
        qkv.data_ptr(),
        turn[0].data_ptr(),
        turn[1].data_ptr(),
        slots.data_ptr(),
        queries.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        int(norms is not None),
        0 if norms is None else norms.query.data_ptr(),
        0 if norms is None else norms.key.data_ptr(),
        _bits(0.0 if norms is None else norms.eps),
    )


def leading(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """([rows, count] ids of the greatest values, of equals the first; the values, falling, NaN before all; their
    log-probabilities among themselves). The last two are float32. count: at most as many as there are."""
    logits = logits.contiguous()
    rows, width = logits.shape
    ids = torch.empty(rows, count, dtype=torch.int64)
    values = torch.empty(rows, count, dtype=torch.float32)
    logprobs = torch.empty_like(values)
    _kernel("leading", logits.dtype)(
        rows,
        rows * width,
        width,
        logits.data_ptr(),
        count,
        ids.data_ptr(),
        values.data_ptr(),
        logprobs.data_ptr(),
    )
    return ids, values, logprobs


class AttentionPlan:
    """Which texts of a pass the kernel attends for, and in which tasks; made once a pass for one number of heads.

    Texts of more than MOST_TOKENS new tokens are left: `rest` are their indices.
    """

    def __init__(self, batch: RaggedBatch, heads: int, key_heads: int) -> None:
        from .kernels import KEYS_AT_ONCE, ROWS_AT_ONCE

        items, fold, block_size = batch.items, heads // key_heads, batch.block_size or 1
        own = [index for index, item in enumerate(items) if len(item.token_ids) <= MOST_TOKENS]
        self.rest = [index for index, item in enumerate(items) if len(item.token_ids) > MOST_TOKENS]
        if not own:
            self.tasks = np.empty((0, 3), dtype=np.int64)
            return
        widest = max(items[index].size[1] for index in own)
        self.width = -(-widest // KEYS_AT_ONCE) * KEYS_AT_ONCE
        self.rows = min(max(SCORES // self.width // ROWS_AT_ONCE, 1) * ROWS_AT_ONCE, MOST_ROWS)
        starts, begin = batch.cu_seqlens, 0
        texts, tasks = [], []
        blocks: list[int] = []
        self.parents = np.full(batch.num_tokens, -1, dtype=np.int64)
        self.work = 0
        for place, index in enumerate(own):
            item = items[index]
            new, keys = item.size
            texts.append((starts[index], new, item.context_len, begin, item.parents is None))
            used = -(-item.context_len // block_size)
            blocks.extend(item.blocks[:used])
            begin += used
            if item.parents is not None:
                self.parents[starts[index] : starts[index] + new] = item.parents
            tasks += [(place, head, row) for head in range(key_heads) for row in range(0, new * fold, self.rows)]
            self.work += heads * new * keys
        self.texts, self.tasks = np.array(texts, dtype=np.int64), np.array(tasks, dtype=np.int64)
        self.blocks = np.array(blocks, dtype=np.int64)
        lists = (self.tasks.ctypes.data, self.texts.ctypes.data, self.blocks.ctypes.data, block_size)
        tokens = (batch.slots.data_ptr(), self.parents.ctypes.data, batch.positions.data_ptr(), self.width)
        self._addresses = (*lists, *tokens)  # asked for once; the batch, which keeps this plan, keeps its tensors

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, scaling: float, window: int, softcap: float
    ) -> None:
        """Write what the texts' new tokens read to their rows of `out`."""
        if not len(self.tasks):
            return
        _, heads, size = query.shape
        _kernel("attend", query.dtype)(
            len(self.tasks),
            self.work * size,
            heads,
            keys.shape[1],
            size,
            query.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            *self._addresses,
            window,
            _bits(scaling),
            _bits(softcap),
            self.rows,
        )


def attention_plan(batch: RaggedBatch, heads: int, key_heads: int) -> AttentionPlan:
    plan: AttentionPlan = batch.plan(("kernels", heads, key_heads), lambda: AttentionPlan(batch, heads, key_heads))
    return plan
