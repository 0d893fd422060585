"""Paged KV cache: where every committed token's keys and values live, and who owns which block.

`BlockAllocator` and `CacheTable` are host logic without tensors. `PagedKVCache` adds the storage: one pool of slots,
laid out [layers, 2, slots, kv_heads, head_dim], and one block table per sequence shared by all layers. Slots behind a
table's `length` are scratch space of the running pass; `commit` keeps the accepted ones and gives the rest back.

Full committed blocks stay findable by content after their owner has gone (prefix caching) until their space is needed.
Left out: sliding-window layers keep blocks that have left the window (they are masked, not freed).
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .transfer import to_device

ContentKey = tuple[object, tuple[int, ...]]
"""(parent content, token ids of the block): equal keys mean equal KV. The parent is an id that is never used twice, or
the namespace of a sequence's first block, so keys compare exactly and never by hash alone."""


@dataclass
class CacheTable:
    """One sequence's blocks.

    namespace: anything hashable; tables share contents within one. length: committed tokens, whose keys and values are
        valid in every layer of the model.
    num_indexed: leading blocks that are known to the prefix index; content: the id of the last of them.
    owed: where a layer that is not the model's own (a head's) has yet to see the last committed tokens, the states
        that it will be shown, [rows, hidden] in parts. No block of these tokens becomes findable.
    """

    namespace: object = ""
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    num_indexed: int = 0
    content: object = None
    owed: dict[tuple[Hashable, int], list[Tensor]] = field(default_factory=dict)

    def num_owed(self, reader: tuple[Hashable, int]) -> int:
        return sum(map(len, self.owed.get(reader, ())))

    @property
    def num_complete(self) -> int:
        """Leading tokens whose keys and values are there in every layer, of heads too."""
        return self.length - max(map(self.num_owed, self.owed), default=0)

    def __post_init__(self) -> None:
        self.content = self.content or ("namespace", self.namespace)


class BlockAllocator:
    """Reference-counted blocks with an index of reusable contents. Pure host logic.

    A block is free, in use (count > 0), or idle: unused but findable by content, and taken back oldest first.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._count = [0] * num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[ContentKey, int] = {}
        self._key_of: dict[int, tuple[ContentKey, int]] = {}
        self._content_ids = itertools.count(1)

    @property
    def num_available(self) -> int:
        """Blocks that `take` can still hand out, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - self.num_available

    def take(self) -> int:
        """A block nobody holds; the caller checks `num_available` first."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            key, _ = self._key_of.pop(block)
            del self._block_of[key]
        self._count[block] = 1
        return block

    def give_back(self, block: int) -> None:
        assert self._count[block] > 0, f"block {block} is given back twice"
        self._count[block] -= 1
        if self._count[block] == 0:
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._free.append(block)

    def find(self, key: ContentKey) -> tuple[int, int] | None:
        """The block holding this content and the content's id, now held by the caller too; None when unknown."""
        block = self._block_of.get(key)
        if block is None:
            return None
        self._count[block] += 1
        self._idle.pop(block, None)
        return block, self._key_of[block][1]

    def index(self, key: ContentKey, block: int) -> int:
        """Make a full block findable; returns the content's id (an equal content that came first keeps its own)."""
        known = self._block_of.setdefault(key, block)
        if known == block and block not in self._key_of:
            self._key_of[block] = (key, next(self._content_ids))
        return self._key_of[known][1]

    def forget_idle(self) -> None:
        """Drop every content that no sequence holds."""
        for block in self._idle:
            key, _ = self._key_of.pop(block)
            del self._block_of[key]
            self._free.append(block)
        self._idle.clear()

    def check(self, tables: Sequence[CacheTable]) -> None:
        """Assert that counts, lists and tables agree: no block lost, none handed out twice."""
        held = [0] * self.num_blocks
        for table in tables:
            for block in table.blocks:
                held[block] += 1
        assert held == self._count, "block counts differ from the tables that hold them"
        unused = [*self._free, *self._idle]
        assert len(set(unused)) == len(unused) and all(held[block] == 0 for block in unused), "a free block is in use"
        assert len(unused) + sum(count > 0 for count in held) == self.num_blocks, "blocks were lost"


class PagedKVCache:
    """The pool of one model.

    layer(i) gives (keys, values), each [slots, kv_heads, head_dim]. Unwritten slots are zero, so masked keys stay
    finite.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        prefix_caching: bool = True,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.allocator = BlockAllocator(num_blocks)
        shape = (num_layers, 2, num_blocks * block_size, num_kv_heads, head_dim)
        self.data = _zeros(shape, dtype, torch.device(device))
        self._layers = [(self.data[layer, 0], self.data[layer, 1]) for layer in range(num_layers)]

    @property
    def num_slots(self) -> int:
        return self.allocator.num_blocks * self.block_size

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self._layers[index]

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def missing_blocks(self, table: CacheTable, num_tokens: int) -> int:
        """Blocks that `reserve` would have to take for `num_tokens` more tokens."""
        return max(0, self.blocks_for(table.length + num_tokens) - len(table.blocks))

    def reserve(self, table: CacheTable, num_tokens: int) -> bool:
        """Hold room for `num_tokens` behind the committed ones; False, with nothing changed, when blocks are short."""
        missing = self.missing_blocks(table, num_tokens)
        if missing > self.allocator.num_available:
            return False
        table.blocks.extend(self.allocator.take() for _ in range(missing))
        return True

    def match_prefix(self, table: CacheTable, token_ids: Sequence[int]) -> int:
        """Adopt known blocks for an empty table; returns the tokens covered, always fewer than all of them."""
        assert not table.blocks and table.length == 0, "only an empty table can adopt a prefix"
        size = self.block_size
        for start in range(0, (len(token_ids) - 1) // size * size, size) if self.prefix_caching else ():
            found = self.allocator.find((table.content, tuple(token_ids[start : start + size])))
            if found is None:
                break
            block, table.content = found
            table.blocks.append(block)
            table.num_indexed += 1
            table.length += size
        return table.length

    def commit(self, kept: Sequence[tuple[CacheTable, Sequence[int]]]) -> None:
        """Make tokens of the last pass permanent.

        `kept` holds per table the offsets behind its length, strictly increasing, of the tokens to keep (`[0, 2, 5]`:
        an accepted branch). They are moved together where they are not contiguous, in one copy over all layers and
        tables; blocks behind them are given back.
        """
        self.keep(kept)
        for table, _ in kept:
            self._trim(table)

    def keep(self, kept: Sequence[tuple[CacheTable, Sequence[int]]]) -> None:
        """`commit` without giving blocks back: for a drafter that works in a sequence's reserved room."""
        source: list[int] = []
        target: list[int] = []
        for table, offsets in kept:
            for place, offset in enumerate(offsets):
                if place != offset:
                    source.append(self.slot(table, table.length + offset))
                    target.append(self.slot(table, table.length + place))
        if source:
            moved = self.data.index_select(2, to_device(source, self.data.device))
            self.data.index_copy_(2, to_device(target, self.data.device), moved)
        for table, offsets in kept:
            table.length += len(offsets)

    def index_full_blocks(self, table: CacheTable, token_ids: Sequence[int]) -> None:
        """Make a table's full committed blocks findable for sequences with the same beginning and namespace."""
        size = self.block_size
        while self.prefix_caching and (table.num_indexed + 1) * size <= table.num_complete:
            start = table.num_indexed * size
            key = (table.content, tuple(token_ids[start : start + size]))
            table.content = self.allocator.index(key, table.blocks[table.num_indexed])
            table.num_indexed += 1

    def release(self, table: CacheTable) -> None:
        """Give every block back. The table is empty afterwards and can be filled again."""
        for block in reversed(table.blocks):  # the end of a sequence is the first to be taken by others
            self.allocator.give_back(block)
        table.blocks.clear()
        table.owed.clear()
        table.length = table.num_indexed = 0
        table.content = ("namespace", table.namespace)

    def slot(self, table: CacheTable, position: int) -> int:
        return table.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def _trim(self, table: CacheTable) -> None:
        while len(table.blocks) > self.blocks_for(table.length):
            self.allocator.give_back(table.blocks.pop())


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU their pages are taken from the system when first written, so an unused pool costs nothing."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
