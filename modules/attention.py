"""Attention over a ragged batch and a paged cache, behind one signature.

On CPUs texts of few new tokens are attended for by a kernel of ours that reads keys where they lie (`fused`). All else
is torch's SDPA over gathered keys, one padded call per group of sequences, or several for long prompts.
Query heads that share a key head are folded into the query axis, which on CPUs is several times faster than expanding
or `enable_gqa`, and gathering costs little beside it. Soft-capped logits (Gemma 2) have no SDPA form and are computed
by hand.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from .batch import AttentionGroup, RaggedBatch
from .fused import attention_plan, fits


@runtime_checkable
class Attention(Protocol):
    """What a model's layers call: `paged_attention`, or another function that computes the same."""

    def __call__(
        self,
        query: Float[Tensor, "tokens heads head_dim"],
        keys: Float[Tensor, "slots kv_heads head_dim"],
        values: Float[Tensor, "slots kv_heads head_dim"],
        batch: RaggedBatch,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Float[Tensor, "tokens heads head_dim"]: ...


def paged_attention(
    query: Float[Tensor, "tokens heads head_dim"],
    keys: Float[Tensor, "slots kv_heads head_dim"],
    values: Float[Tensor, "slots kv_heads head_dim"],
    batch: RaggedBatch,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    out: Float[Tensor, "rows heads head_dim"] | None = None,
) -> Float[Tensor, "rows heads head_dim"]:
    """What every new token reads from the tokens it may see.

    keys and values are the cache of one layer, the new tokens already written; or, without a cache, those of the batch
    itself. window: how many positions back a token sees, itself included (a sliding-window layer), None for all.
    out: as many rows as there are tokens, or more; what it is written to and returned.
    """
    if not fits(query, keys, values) or not batch.items:  # a recorded pass has groups alone
        read = reference_attention(query, keys, values, batch, scaling, window, softcap)
        if out is None:
            return read
        out[: len(read)] = read
        return out
    out = torch.empty_like(query) if out is None else out
    query, keys, values = query.contiguous(), keys.contiguous(), values.contiguous()
    plan = attention_plan(batch, query.shape[1], keys.shape[1])
    plan.attend(query, keys, values, out, scaling, window or 0, softcap or 0.0)
    for group in batch.plan(("rest", plan), lambda: batch.groups_of(plan.rest)) if plan.rest else ():
        read = _attend(query, keys, values, group, scaling, window, softcap)
        if group.flat_index is None:
            out[: len(read)] = read
        else:
            out.index_copy_(0, group.flat_index, read)
    return out


def reference_attention(
    query: Float[Tensor, "tokens heads head_dim"],
    keys: Float[Tensor, "slots kv_heads head_dim"],
    values: Float[Tensor, "slots kv_heads head_dim"],
    batch: RaggedBatch,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "tokens heads head_dim"]:
    """`paged_attention` by torch's operators alone, for any device, dtype and gradient."""
    reads = [_attend(query, keys, values, group, scaling, window, softcap) for group in batch.groups]
    if batch.in_order:
        return torch.cat(reads) if len(reads) > 1 else reads[0]
    output = torch.empty_like(query)
    for group, read in zip(batch.groups, reads, strict=True):
        assert group.flat_index is not None, "a group that is the whole batch is in order"
        output.index_copy_(0, group.flat_index, read)
    return output


def _rows(query: Tensor, group: AttentionGroup) -> Tensor:
    """[seqs * queries, heads, head_dim] the queries of a group, in place where they lie in one piece."""
    if group.query_index is None:
        return query
    if group.first_query is not None:
        return query[group.first_query : group.first_query + group.num_seqs * group.num_queries]
    return query.index_select(0, group.query_index)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    group: AttentionGroup,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """[real queries, heads, head_dim] what the queries of one group read."""
    seqs, queries = group.num_seqs, group.num_queries
    kv_heads, head_dim = keys.shape[1:]
    fold = query.shape[1] // kv_heads
    folded = _rows(query, group).view(seqs, queries, kv_heads, fold, head_dim).transpose(1, 2)
    folded = folded.reshape(seqs, kv_heads, queries * fold, head_dim)
    k, v = _read(keys, group), _read(values, group)
    parts = group.parts(window, query.dtype, fold)
    if group.reach is None:
        read = _attend_part(folded, k, v, parts[0].mask, scaling, softcap)
    else:
        reads = [
            _attend_part(folded[:, :, part.rows], k[:, :, part.keys], v[:, :, part.keys], part.mask, scaling, softcap)
            for part in parts
        ]
        read = torch.cat(reads, dim=2)
    read = read.view(seqs, kv_heads, queries, fold, head_dim).transpose(1, 2)
    read = read.reshape(seqs * queries, kv_heads * fold, head_dim)
    return read if group.output_index is None else read.index_select(0, group.output_index)


def _attend_part(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    """[seqs, heads, rows, head_dim] what the rows read from all of these keys, but for the mask."""
    if softcap is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    scores = torch.tanh(query @ keys.transpose(2, 3) * (scaling / softcap)) * softcap
    scores = scores if mask is None else scores + mask
    return torch.softmax(scores, dim=-1, dtype=_softmax_dtype(scores)).to(values.dtype) @ values


def _read(stored: Tensor, group: AttentionGroup) -> Tensor:
    """[seqs, kv_heads, keys, head_dim] of [slots, kv_heads, head_dim]: in place where the slots are one piece."""
    if group.first_slot is not None:
        read = stored[group.first_slot : group.first_slot + group.num_keys].unsqueeze(0)
    else:
        read = stored.index_select(0, group.key_slots).view(group.num_seqs, group.num_keys, *stored.shape[1:])
    return read.transpose(1, 2)


def _softmax_dtype(scores: Tensor) -> torch.dtype:
    return torch.promote_types(scores.dtype, torch.float32)
