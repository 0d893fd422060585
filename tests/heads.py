"""Exit heads with random weights, for models of tests/support.py."""

from __future__ import annotations

import torch
from speclight.infer.exits import HeadExits
from speclight.modules.exit_heads import ExitHeads
from speclight.modules.layered_model import LayeredModel
from support import tiny_lm

KEPT = tuple(range(0, 96, 2))
"""A draft vocabulary of half the tokens."""


def random_heads(
    kind: str, layers: tuple[int, ...], draft_ids: tuple[int, ...] | None = KEPT, model: LayeredModel | None = None
) -> ExitHeads:
    """Not as they are initialised, so that a head that is left out or run on wrong tokens shows."""
    model = model or tiny_lm(fast=False)
    ids = None if draft_ids is None else torch.tensor(draft_ids)
    heads = ExitHeads(model, list(layers), kind, rank=8, draft_ids=ids).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in heads.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return heads


def random_exits(kind: str, layers: tuple[int, ...], draft_ids: tuple[int, ...] | None = KEPT) -> HeadExits:
    return HeadExits(random_heads(kind, layers, draft_ids))
