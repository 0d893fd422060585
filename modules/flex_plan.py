"""Which keys each row of queries reads, in FlexAttention's terms: a mask, and lists of the key blocks it is asked for.

A row is one query head of one new token, of those that share a key head. Rows are put into tiles, and a tile belongs to
one sequence, so that its list holds that sequence's blocks and no others and a block that several sequences share is
simply in the lists of all. A key block is a block of the cache; without a cache it is OWN_BLOCK tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import no_type_check

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .batch import BatchItem, RaggedBatch
from .transfer import to_device

TILES = (16, 64)
"""Rows of a tile, in passes with few rows per sequence and with many."""

OWN_BLOCK = 64

FAR = 1 << 30
"""More than any distance between keys: a window without an end, and where a block is that a sequence does not hold."""


@dataclass(frozen=True)
class Placed:
    """One sequence of a pass on the axis of keys.

    blocks: key blocks with its tokens, in order. lead: keys of others at the start of the first (without a cache).
    """

    item: BatchItem
    first_token: int
    blocks: np.ndarray
    lead: int

    @property
    def num_new(self) -> int:
        return len(self.item.token_ids)


def place(items: Sequence[BatchItem], block_size: int | None) -> list[Placed]:
    """Where the keys of each sequence are: in its blocks, or without a cache (None) in the batch itself."""
    placed, first = [], 0
    for item in items:
        stop = first + len(item.token_ids)
        if block_size is None:
            blocks, lead = np.arange(first // OWN_BLOCK, -(-stop // OWN_BLOCK)), first % OWN_BLOCK
        else:
            blocks = np.asarray(item.blocks[: -(-(item.context_len + stop - first) // block_size)], dtype=np.int64)
            lead = 0
        placed.append(Placed(item, first, blocks, lead))
        first = stop
    return placed


def walk(num_new: int, parents: Sequence[int] | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """([new] depth, enter, leave) of new tokens, whose parents come before them; None is a chain.

    enter and leave bound the tokens of a subtree in a walk of the tree: one token is another's ancestor, or itself,
    where the other's enter lies in its range. A root with two children: depths 0 1 1, enters 0 1 2, leaves 3 2 3.
    """
    if parents is None:
        return np.arange(num_new), np.arange(num_new), np.full(num_new, num_new)
    sizes, depths, enters = np.ones(num_new, np.int64), np.zeros(num_new, np.int64), np.zeros(num_new, np.int64)
    for node in range(num_new - 1, 0, -1):
        if parents[node] >= 0:
            sizes[parents[node]] += sizes[node]
    vacant = np.zeros(num_new + 1, np.int64)  # where the next child of each node enters; the last: the next root
    for node, parent in enumerate(parents):
        enters[node] = vacant[parent]
        vacant[parent] += sizes[node]
        vacant[node] = enters[node] + 1
        depths[node] = depths[parent] + 1 if parent >= 0 else 0
    return depths, enters, enters + sizes


SEQUENCE, CONTEXT, NUM_NEW, FIRST, ENTER, LEAVE, POSITION = range(7)


def _facts(number: int, placed: Placed) -> np.ndarray:
    """[7, new] of each new token: its sequence, that one's context, new tokens and first of these; then its own."""
    depths, enters, leaves = walk(placed.num_new, placed.item.parents)
    shared = (number, placed.item.context_len, placed.num_new, placed.first_token)
    own = (enters, leaves, placed.item.context_len + depths)
    return np.stack([*(np.full(placed.num_new, value) for value in shared), *own])


@dataclass(frozen=True)
class Tiles:
    """What the rows of each tile may see, in keys of their sequence; all are [tiles].

    known: leading keys that all of them see, windows aside. end: keys up to the last that any sees.
    nearest, furthest: least and greatest position among them.
    """

    sequence: np.ndarray
    known: np.ndarray
    end: np.ndarray
    nearest: np.ndarray
    furthest: np.ndarray


@dataclass
class FlexPlan:
    """How the layers of one pass read that have `fold` query heads per key head and keys in `num_slots` places.

    token_of_row, head_of_row: [rows] the query of each row; padding repeats one, and what it reads is dropped.
    row_of_query: [tokens * fold] the row of each query.
    by_row: the facts of each row's token. by_token: those of each new token, and one entry more: what has length 1 is
    compiled by itself, so no table is that short.
    origin: [sequences + 1, key blocks + 1] where a sequence's first new token would be, counted from that block.
    """

    block_size: int
    tile: int
    num_slots: int
    token_of_row: Int[Tensor, "rows"]
    head_of_row: Int[Tensor, "rows"]
    row_of_query: Int[Tensor, "queries"]
    by_row: list[Int[Tensor, "rows"]]
    by_token: list[Int[Tensor, "more_than_tokens"]]
    origin: Int[Tensor, "sequences blocks"]
    placed: list[Placed]
    tiles: Tiles
    masks: dict[int | None, BlockMask] = field(default_factory=dict)

    @classmethod
    def build(cls, batch: RaggedBatch, fold: int, num_slots: int) -> FlexPlan:
        block_size, device = batch.block_size or OWN_BLOCK, batch.token_ids.device
        placed = place(batch.items, batch.block_size)
        facts = np.concatenate([_facts(number, each) for number, each in enumerate(placed)], axis=1)
        tile = TILES[1] if batch.num_tokens * fold >= TILES[1] * len(placed) else TILES[0]
        token, head, real = _rows(placed, fold, tile)
        by_row = facts[:, token]
        tiles = _tiles(token.reshape(-1, tile), by_row.reshape(7, -1, tile), placed)

        def put(array: np.ndarray, dtype: torch.dtype) -> Tensor:
            return to_device(array, device).to(dtype)

        return cls(
            block_size,
            tile,
            num_slots,
            put(token, torch.int64),
            put(head, torch.int64),
            put(np.flatnonzero(real), torch.int64),
            [put(fact, torch.int32) for fact in by_row],
            [put(np.append(fact, 0), torch.int32) for fact in facts],
            _origin(placed, block_size, -(-num_slots // block_size), device),
            placed,
            tiles,
        )

    def mask(self, window: int | None) -> BlockMask:
        """The mask of layers with this window, made once per pass."""
        if window not in self.masks:
            reach = FAR if window is None else window
            part, whole = self.key_blocks(reach)
            device = self.origin.device
            self.masks[window] = BlockMask.from_kv_blocks(
                *_listed(part, device),
                *_listed(whole, device),
                BLOCK_SIZE=(self.tile, self.block_size),
                mask_mod=self._visible(reach),
                seq_lengths=(len(self.token_of_row), self.num_slots),
                compute_q_blocks=False,  # they are for the backward pass
            )
        return self.masks[window]

    def key_blocks(self, reach: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Per tile: the key blocks of which its rows see a part, and those that all of them see whole."""
        tiles, size = self.tiles, self.block_size
        lead = np.array([each.lead for each in self.placed])[tiles.sequence]
        begin = np.clip(np.minimum(tiles.nearest - reach + 1, tiles.known), 0, None)  # keys before it are seen by none
        within = np.clip(tiles.furthest - reach + 1, 0, None)  # known keys from here on are in all windows
        part, whole = [], []
        for sequence, first, full, unknown, end in zip(
            tiles.sequence,
            (begin + lead) // size,
            -(-(within + lead) // size),
            (tiles.known + lead) // size,
            -(-(tiles.end + lead) // size),
            strict=True,
        ):
            blocks, full = self.placed[sequence].blocks, min(max(first, full), max(first, unknown))
            unknown = max(full, unknown)
            whole.append(blocks[full:unknown])
            part.append(np.concatenate((blocks[first:full], blocks[unknown:end])))
        return part, whole

    def _visible(self, reach: int) -> Callable[..., Tensor]:
        """Whether a row sees a slot: context, and of the new tokens its ancestors and itself, as far as it reaches.

        Tensors only: Python numbers in the closure would be traced as variables, which a kernel does not take
        everywhere.
        """
        sequence, context, num_new, first, own, _, position = self.by_row
        *_, enter, leave, new_position = self.by_token
        origin = self.origin
        size, reach_ = (to_device(np.array(x, dtype=np.int32), origin.device) for x in (self.block_size, reach))

        @no_type_check  # a check of shapes cannot be traced
        def visible(batch: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
            new = slot - origin[sequence[row], slot // size]  # index among the new tokens; context is below 0
            is_new = (new >= 0) & (new < num_new[row])
            token = torch.where(is_new, first[row] + new, first[row])
            in_line = is_new & (enter[token] <= own[row]) & (own[row] < leave[token])
            in_context = (new < 0) & (new >= -context[row])
            key_position = torch.where(is_new, new_position[token], context[row] + new)
            return (in_line | in_context) & (position[row] - key_position < reach_)

        return visible


def _rows(placed: Sequence[Placed], fold: int, tile: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """([rows] token, [rows] head among those that share a key head, [rows] whether it is no padding)."""
    tokens, heads, real = [], [], []
    for each in placed:
        rows = np.arange(-(-each.num_new * fold // tile) * tile)
        tokens.append(each.first_token + np.minimum(rows // fold, each.num_new - 1))
        heads.append(rows % fold)
        real.append(rows < each.num_new * fold)
    return np.concatenate(tokens), np.concatenate(heads), np.concatenate(real)


def _tiles(token: np.ndarray, facts: np.ndarray, placed: Sequence[Placed]) -> Tiles:
    """token: [tiles, rows of a tile], facts: [7, tiles, rows of a tile]. Padding repeats a sequence's last token."""
    sequence, context = facts[SEQUENCE, :, 0], facts[CONTEXT, :, 0]
    is_chain = np.array([each.item.parents is None for each in placed])[sequence]
    index = token - facts[FIRST]
    return Tiles(
        sequence,
        known=context + np.where(is_chain, index[:, 0], 0),  # in a chain, what came before a tile is seen by all of it
        end=context + index.max(axis=1) + 1,  # no token sees a later one
        nearest=facts[POSITION].min(axis=1),
        furthest=facts[POSITION].max(axis=1),
    )


def _listed(blocks: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    """([1, 1, tiles] how many, [1, 1, tiles, most of them] which) of one list per tile."""
    counts = np.array([len(row) for row in blocks])
    indices = np.zeros((len(blocks), max(2, counts.max())), dtype=np.int32)  # see FlexPlan.by_token
    for row, listed in zip(indices, blocks, strict=True):
        row[: len(listed)] = listed
    return to_device(counts.astype(np.int32), device)[None, None], to_device(indices, device)[None, None]


def _origin(placed: Sequence[Placed], block_size: int, num_blocks: int, device: torch.device) -> Tensor:
    """The table of FlexPlan.origin; it is filled on the device, as a cache may have 100,000 blocks."""
    sequence = np.repeat(np.arange(len(placed)), [len(each.blocks) for each in placed])
    block = np.concatenate([each.blocks for each in placed])
    before = [np.arange(len(each.blocks)) * block_size - each.lead - each.item.context_len for each in placed]
    places = to_device(np.stack((sequence, block, block * block_size - np.concatenate(before))), device)
    origin = torch.full((len(placed) + 1, num_blocks + 1), -FAR, dtype=torch.int32, device=device)
    return origin.index_put_((places[0], places[1]), places[2].to(torch.int32))
