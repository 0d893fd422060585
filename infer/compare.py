"""Do two greedy outputs agree, and if not, was it a near-tie: two tokens that rounding may order either way?

A pass over several tokens rounds differently from passes over one. Where two logits are closer than that, the texts of
plain and of speculative decoding may part; everywhere else a difference is a fault.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ..modules.layered_model import LayeredModel

NEAR_TIE = {"float64": 1e-9, "float32": 1e-4, "float16": 0.1, "bfloat16": 0.75}
"""dtype -> logit gap under which a difference is a near-tie: a little more than what rounding can do. On a Llama of
135M parameters, with logits about 25, a pass over all tokens and passes over one moved the gap of the best two, over
621 positions, by up to 5e-5 in float32; in bfloat16 by 0.06 in the median, by 0.36 in one of 100, by 0.63 at most.
float16 has three bits more."""


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first position at which two outputs differ, the end of the shorter one included; None if they are equal."""
    shared = min(len(ours), len(theirs))
    differing = (at for at in range(shared) if ours[at] != theirs[at])
    return next(differing, None if len(ours) == len(theirs) else shared)


def next_logits(model: LayeredModel, prefixes: Sequence[Sequence[int]]) -> Tensor:
    """[prefixes, vocab] raw logits after each prefix, in at least float32, from one pass without a cache."""
    import torch

    from ..modules.batch import BatchItem, RaggedBatch

    batch = RaggedBatch.build([BatchItem(prefix) for prefix in prefixes], None, model.device)
    with torch.inference_mode():
        hidden = model.run(model.embed(batch), batch, None, 0, model.num_layers)
        last = torch.tensor(batch.cu_seqlens[1:], device=hidden.device) - 1
        logits = model.logits(hidden[last])
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def logit_gap(model: LayeredModel, prefix: Sequence[int], ours: int | None, theirs: int | None) -> float:
    """How far the lower of two next tokens lies under the highest logit: the top-2 gap where they are the top two.

    None, an output that had ended, is infinitely far away.
    """
    if ours is None or theirs is None:
        return math.inf
    logits = next_logits(model, [prefix])[0]
    return float(logits.max() - min(logits[ours], logits[theirs]))


def token_at(token_ids: Sequence[int], position: int) -> int | None:
    """The token at a position, None behind the end."""
    return token_ids[position] if position < len(token_ids) else None
