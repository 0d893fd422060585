"""Attention over a ragged batch by torch's FlexAttention: a second implementation of `paged_attention`, for GPUs.

The keys are the layer's whole cache, in place: none is gathered or padded, and `FlexPlan` says which of them a row of
queries reads. Query heads that share a key head are rows of one tile, as in the reference.

The costs: a sequence's rows are padded to whole tiles (a GPU multiplies 16 rows at least, so a tile shared by sequences
would not be cheaper, and would read the blocks of all of them); one program per tile and key head reads the whole
context, so a lone sequence leaves most of a GPU idle; and each pass makes a table with an integer for every sequence
and block of the cache. A key block is a block of the cache: on a GPU block_size must be a multiple of 16, and with 64
or 128 products are fewer and larger.

On CUDA it is compiled when first called. On a CPU it is torch's unfused form, which computes every row against every
slot, and so is for tests. That form reads the plan's mask and not its lists of blocks, and a masked NaN of one text
reaches the others. There is no backward pass; training uses the reference. Written for torch 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast, no_type_check

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .batch import RaggedBatch
from .flex_plan import FlexPlan


def flex_paged_attention(
    query: Float[Tensor, "tokens heads head_dim"],
    keys: Float[Tensor, "slots kv_heads head_dim"],
    values: Float[Tensor, "slots kv_heads head_dim"],
    batch: RaggedBatch,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "tokens heads head_dim"]:
    """What `paged_attention` computes, for inference.

    Raises ValueError where a gradient is asked for, and on a GPU for a block_size that is not a multiple of 16.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, keys, values)):
        raise ValueError("attention 'flex' has no backward pass; train with 'sdpa'")
    (tokens, heads, head_dim), (slots, kv_heads, _) = query.shape, keys.shape
    fold = heads // kv_heads
    plan = batch.plan(("flex", fold, slots), lambda: FlexPlan.build(batch, fold, slots))
    rows = query.view(tokens, kv_heads, fold, head_dim)[plan.token_of_row, :, plan.head_of_row]
    read = _traced("inductor" if query.is_cuda else "eager")(
        *(flat.transpose(0, 1).unsqueeze(0) for flat in (rows, keys, values)),
        plan.mask(window),
        _score(scaling, softcap, torch.promote_types(query.dtype, torch.float32), query.device),
        _kernel_options(plan) if query.is_cuda else {},
    )
    read = read[0].transpose(0, 1).index_select(0, plan.row_of_query).view(tokens, fold, kv_heads, head_dim)
    return read.transpose(1, 2).reshape(tokens, heads, head_dim)


@no_type_check  # a check of shapes cannot be traced
def _attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: BlockMask, score: Callable[..., Tensor], options: dict
) -> Tensor:
    """query: [1, kv_heads, rows, head_dim], keys and values: [1, kv_heads, slots, head_dim].

    Scaling is left to the score, as a number given from outside would be traced as a variable.
    """
    return flex_attention(query, keys, values, score, mask, scale=1.0, kernel_options=options)


@functools.cache
def _traced(backend: str) -> Callable[..., Tensor]:
    """`_attend`, compiled by "inductor" to a fused kernel, or left by "eager" in torch's unfused form.

    With fullgraph, what cannot be compiled is an error and never the other form. It is traced anew for another tile or
    block size, for a cap, and where lengths are 1 or happen to be equal: a dozen times at most, above the usual limit.
    """
    compiled = torch.compile(  # type: ignore[call-overload]
        _attend, dynamic=True, fullgraph=True, backend=backend, recompile_limit=64
    )
    return cast(Callable[..., Tensor], compiled)


def _kernel_options(plan: FlexPlan) -> dict[str, int | bool]:
    """Blocks of the kernel, which must divide those of the mask.

    The kernel for decoding, which torch would take for few rows, is not for us: it puts rows of several tiles together
    and reads the list of one.
    """
    keys = plan.block_size & -plan.block_size  # the greatest power of two that divides it
    if keys < 16:
        raise ValueError(f"block_size must be a multiple of 16 for attention 'flex' on a GPU, got {plan.block_size}")
    return {"BLOCK_M": plan.tile, "BLOCK_N": min(keys, 64), "FORCE_USE_FLEX_ATTENTION": True}


@functools.cache
def _score(scaling: float, softcap: float | None, dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
    """Scales a product, and caps it where the model does (Gemma 2). Tensors are captured, for the mask's reason."""
    scale = torch.tensor(scaling, dtype=dtype, device=device)
    cap = torch.tensor(softcap or 1.0, dtype=dtype, device=device)

    @no_type_check
    def scaled(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        return score * scale

    @no_type_check
    def capped(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        return torch.tanh(score * scale / cap) * cap

    return scaled if softcap is None else capped
