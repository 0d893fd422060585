"""A ragged batch: the new tokens of all sequences of one pass, laid flat, and the plan by which attention reads them.

No linear layer sees padding; only attention knows where a sequence begins. For attention the sequences are put into a
few groups of similar shape, each of which is one padded call. Prefill is a sequence with many new tokens; a token tree
is a sequence whose new tokens have parents.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from .transfer import to_device


@dataclass(frozen=True)
class BatchItem:
    """One sequence's share of a pass.

    token_ids: new tokens. parents: index of each new token's parent among the new ones, -1 for the first; None: a
        chain.
    context_len: tokens before them in the cache. blocks: the sequence's block table, with room for the new tokens.
    """

    token_ids: Sequence[int]
    context_len: int = 0
    blocks: Sequence[int] = ()
    parents: Sequence[int] | None = None

    @property
    def size(self) -> tuple[int, int]:
        """(queries, keys): what items of one padded call should have in common."""
        return len(self.token_ids), self.context_len + len(self.token_ids)

    def after(self, count: int) -> BatchItem:
        """Without the first `count` new tokens, which are in the cache already (of a chain, when not all remain)."""
        if count == 0:
            return self
        assert self.parents is None or count == len(self.token_ids), "only a chain can be run in parts"
        return BatchItem(self.token_ids[count:], self.context_len + count, self.blocks)

    def depths(self) -> np.ndarray:
        """[new] ancestors of each new token among the new ones."""
        if self.parents is None:
            return np.arange(len(self.token_ids))
        depths = np.zeros(len(self.token_ids), dtype=np.int64)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                depths[node] = depths[parent] + 1
        return depths

    def ancestry(self) -> tuple[np.ndarray, np.ndarray]:
        """([new] depths, [new, new] whether row's token sees column's: itself and its ancestors)."""
        new = len(self.token_ids)
        if self.parents is None:
            return self.depths(), np.tri(new, dtype=bool)
        sees = np.eye(new, dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                sees[node] |= sees[parent]
        return self.depths(), sees


@dataclass(frozen=True)
class AttentionPart:
    """Queries of a group that attend together, the keys that any of them may see, and which of these they see.

    rows: of the group's queries, each repeated. mask: [seqs, 1, rows, keys], additive; None: they see all.
    """

    rows: slice
    keys: slice
    mask: Tensor | None


@dataclass
class AttentionGroup:
    """Sequences that attend in padded calls.

    query_index: [seqs * queries] rows of the flat batch, padded by repeating row 0; None when it is the whole batch in
        order. first_query: the first of them, where they lie in one piece and nothing is padded.
    output_index: [tokens of the group] places of the real queries in the padded ones; None when nothing is padded.
    key_slots: [seqs * keys] where each key lies in the cache (or in the flat batch, without a cache).
    first_slot: of a single sequence whose keys lie in one piece, which then are read in place; None otherwise.
    visible: [seqs, queries, keys]. Positions are only read by sliding windows. on_host: these three once more, for
        what would otherwise have to be asked of the device.
    reach: [queries, 2] of long prompts, the first position of a query and the end of the keys it sees, over all
        sequences: by these its queries attend in parts. None: in one.
    """

    num_seqs: int
    num_queries: int
    num_keys: int
    query_index: Int[Tensor, "padded_queries"] | None
    output_index: Int[Tensor, "real_queries"] | None
    flat_index: Int[Tensor, "real_queries"] | None
    key_slots: Int[Tensor, "padded_keys"]
    first_slot: int | None
    visible: Bool[Tensor, "seqs queries keys"]
    query_positions: Int[Tensor, "seqs queries"]
    key_positions: Int[Tensor, "seqs keys"]
    on_host: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    first_query: int | None = None
    reach: np.ndarray | None = None
    plans: dict[tuple[int | None, torch.dtype, int], list[AttentionPart]] = field(default_factory=dict)

    def sees_all(self, queries: slice, keys: slice, window: int | None) -> bool:
        """Whether no mask is needed."""
        assert self.on_host is not None, "a group that is built for a batch knows what it holds"
        visible, query_at, key_at = self.on_host
        near = True if window is None else query_at[:, queries, None] - key_at[:, None, keys] < window
        return bool((visible[:, queries, keys] & near).all())

    def parts(self, window: int | None, dtype: torch.dtype, repeat: int) -> list[AttentionPart]:
        """What attends in one call each, every query `repeat` times; made once per pass."""
        key = (window, dtype, repeat)
        if key not in self.plans:
            size = self.num_queries if self.reach is None else PART_QUERIES
            starts = range(0, self.num_queries, size)
            self.plans[key] = [self._part(start, start + size, window, dtype, repeat) for start in starts]
        return self.plans[key]

    def _part(self, start: int, stop: int, window: int | None, dtype: torch.dtype, repeat: int) -> AttentionPart:
        first, end = 0, self.num_keys
        if self.reach is not None:  # a key's position is at most its place
            nearest, ends = self.reach[start:stop].T
            first, end = max(0, int(nearest.min()) - (window or end) + 1), int(ends.max())
        queries, keys = slice(start, min(stop, self.num_queries)), slice(first, end)
        mask = None if self.sees_all(queries, keys, window) else self._mask(queries, keys, window, dtype, repeat)
        return AttentionPart(slice(queries.start * repeat, queries.stop * repeat), keys, mask)

    def _mask(self, queries: slice, keys: slice, window: int | None, dtype: torch.dtype, repeat: int) -> Tensor:
        seen = self.visible[:, queries, keys]
        if window is not None:
            seen = seen & (self.query_positions[:, queries, None] - self.key_positions[:, None, keys] < window)
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
        return mask.repeat_interleave(repeat, dim=1).unsqueeze(1)


@dataclass
class RaggedBatch:
    """token_ids, positions: [tokens]. cu_seqlens: where each sequence's new tokens begin, and the total at the end.

    slot_mapping: [tokens] cache slot of each new token; None for a pass without a cache. items, block_size: what it was
    built from. rotary: the pass's position embeddings, kept here by LayeredModel
    so that a pass run in several layer ranges computes them once; plans: the same for what attention needs besides.
    """

    token_ids: Int[Tensor, "tokens"]
    positions: Int[Tensor, "tokens"]
    cu_seqlens: list[int]
    slot_mapping: Int[Tensor, "tokens"] | None
    items: Sequence[BatchItem]
    block_size: int | None
    rotary: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    plans: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens[-1]

    @classmethod
    def build(
        cls, items: Sequence[BatchItem], block_size: int | None, device: torch.device | str = "cpu"
    ) -> RaggedBatch:
        """Lay the items flat. block_size None: no cache, every item stands alone (training, scoring)."""
        if block_size is None and any(item.context_len for item in items):
            raise ValueError("a pass without a cache has no context: context_len must be 0")
        starts = np.cumsum([0, *(len(item.token_ids) for item in items)])

        def put(parts: list[np.ndarray]) -> Tensor:
            return to_device(np.concatenate(parts).astype(np.int64), device)

        return cls(
            put([np.asarray(item.token_ids) for item in items]),
            put([item.depths() + item.context_len for item in items]),
            starts.tolist(),
            None if block_size is None else put([_new_slots(item, block_size) for item in items]),
            items,
            block_size,
        )

    @cached_property
    def slots(self) -> Int[Tensor, "tokens"]:
        """Where each new token's key and value lie: in the cache, or without one in the batch."""
        if self.slot_mapping is not None:
            return self.slot_mapping
        return torch.arange(self.num_tokens, device=self.token_ids.device)

    @cached_property
    def key_slots(self) -> list[np.ndarray]:
        """By item [context + new], where all that it can attend to lies, in order of position."""
        found = zip(self.items, self.cu_seqlens, strict=False)
        return [_key_slots(item, start, self.block_size) for item, start in found]

    @cached_property
    def groups(self) -> list[AttentionGroup]:
        """The padded calls of the reference, planned when first read: other attention has no use for them."""
        return self._made(self._members)

    def groups_of(self, some: Sequence[int]) -> list[AttentionGroup]:
        """Padded calls for some of its items; their `flat_index` says where in the batch they lie."""
        found = _grouped([self.items[index] for index in some], self.token_ids.device)
        return self._made([[some[index] for index in group] for group in found])

    def _made(self, members: list[list[int]]) -> list[AttentionGroup]:
        starts, device = np.asarray(self.cu_seqlens), self.token_ids.device
        ancestry = {index: self.items[index].ancestry() for index in itertools.chain(*members)}
        return [_make_group(group, self.items, ancestry, self.key_slots, starts, device) for group in members]

    @cached_property
    def _members(self) -> list[list[int]]:
        return _grouped(self.items, self.token_ids.device)

    @cached_property
    def in_order(self) -> bool:
        """Whether the groups' queries, one group behind the other, are the batch: so where its items come by falling
        `size`."""
        return list(itertools.chain(*self._members)) == list(range(len(self.items)))

    def plan(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` returned when this key was first asked for."""
        if key not in self.plans:
            self.plans[key] = make()
        return self.plans[key]


def _new_slots(item: BatchItem, block_size: int) -> np.ndarray:
    """[new] slot of each new token."""
    _, end = item.size
    assert len(item.blocks) * block_size >= end, "a sequence's blocks have no room for its new tokens"
    places = np.arange(item.context_len, end)
    return np.asarray(item.blocks, dtype=np.int64)[places // block_size] * block_size + places % block_size


def _key_slots(item: BatchItem, start: int, block_size: int | None) -> np.ndarray:
    """[context + new] slot of each token the item can attend to, in order of position."""
    new = len(item.token_ids)
    if block_size is None:
        return np.arange(start, start + new)
    slots = (np.asarray(item.blocks, dtype=np.int64)[:, None] * block_size + np.arange(block_size)).reshape(-1)
    return slots[: item.context_len + new]


CALL_KEYS = {"cpu": 128}
"""What a padded call costs beside its keys, in keys, by kind of device: 17 us against 0.13 us a key of three heads of
64 on a CPU (docs/LOG.md). Elsewhere launching a call's kernels takes as long as reading very many keys."""
CALL_KEYS_ELSEWHERE = 32768
QUERY_KEYS = 0.2
"""What a query costs of what reading the keys does."""
PART_QUERIES = 64
"""Queries of a long prompt that attend in one call on a CPU, to the keys up to theirs: a prompt of 512 tokens takes two
thirds of the time of one masked call. Elsewhere launching calls costs more."""


def _grouped(items: Sequence[BatchItem], device: torch.device | str = "cpu") -> list[list[int]]:
    """Indices of items that share a padded call: those of similar shape, where padding costs less than a call."""
    call = CALL_KEYS.get(torch.device(device).type, CALL_KEYS_ELSEWHERE)

    def cost(seqs: int, queries: int, keys: int) -> float:
        return call + seqs * keys * (1.0 + QUERY_KEYS * queries)

    shapes = [item.size for item in items]
    groups: list[list[int]] = []
    padded = (0, 0, 0)  # of the last group: sequences, queries, keys
    for index in sorted(range(len(items)), key=lambda i: shapes[i], reverse=True):
        queries, keys = shapes[index]
        joined = (padded[0] + 1, max(padded[1], queries), max(padded[2], keys))
        if groups and cost(*joined) <= cost(*padded) + cost(1, queries, keys):
            groups[-1].append(index)
            padded = joined
        else:
            groups.append([index])
            padded = (1, queries, keys)
    return [sorted(group) for group in groups]


def _make_group(
    members: list[int],
    items: Sequence[BatchItem],
    ancestry: Mapping[int, tuple[np.ndarray, np.ndarray]],
    keys: list[np.ndarray],
    starts: np.ndarray,
    device: torch.device | str,
) -> AttentionGroup:
    seqs = len(members)
    lengths = np.array([len(items[i].token_ids) for i in members])
    queries, width = int(lengths.max()), max(len(keys[i]) for i in members)
    slots = np.zeros((seqs, width), dtype=np.int64)
    rows = np.zeros((seqs, queries), dtype=np.int64)
    visible = np.zeros((seqs, queries, width), dtype=bool)
    query_at, key_at = np.zeros((seqs, queries), dtype=np.int64), np.zeros((seqs, width), dtype=np.int64)
    for row, i in enumerate(members):
        new, context, (depths, sees) = lengths[row], items[i].context_len, ancestry[i]
        slots[row] = keys[i][-1]  # padding reads a slot of its own: even masked, another text's NaN would spread
        slots[row, : context + new] = keys[i]
        rows[row, :new] = np.arange(starts[i], starts[i] + new)
        visible[row, :new, :context] = True
        visible[row, :new, context : context + new] = sees
        visible[row, new:, 0] = True  # a padded query must see something, or its softmax is NaN
        query_at[row, :new] = context + depths
        key_at[row, :context], key_at[row, context : context + new] = np.arange(context), context + depths

    real = (np.arange(queries) < lengths[:, None]).reshape(-1)
    padded = not real.all()
    whole, in_one = seqs == len(items) and not padded, members[-1] - members[0] == seqs - 1 and not padded
    return AttentionGroup(
        seqs,
        queries,
        width,
        None if whole else to_device(rows.reshape(-1), device),
        to_device(np.flatnonzero(real), device) if padded else None,
        None if whole else to_device(rows.reshape(-1)[real], device),
        to_device(slots.reshape(-1), device),
        int(slots[0, 0]) if seqs == 1 and bool((np.diff(slots[0]) == 1).all()) else None,
        to_device(visible, device),
        to_device(query_at, device),
        to_device(key_at, device),
        (visible, query_at, key_at),
        int(starts[members[0]]) if in_one else None,
        _reach(visible, query_at) if torch.device(device).type == "cpu" and queries > PART_QUERIES else None,
    )


def _reach(visible: np.ndarray, query_positions: np.ndarray) -> np.ndarray:
    """See AttentionGroup.reach; visible: [seqs, queries, keys], query_positions: [seqs, queries]."""
    ends = visible.shape[-1] - np.flip(visible.any(axis=0), axis=-1).argmax(axis=-1)
    return np.stack((query_positions.min(axis=0), ends), axis=-1)
