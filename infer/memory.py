"""How many cache blocks fit: the memory budget behind admission."""

from __future__ import annotations

import psutil
import torch

from ..modules.layered_model import LayeredModel

SHARE = {"cuda": 0.8, "cpu": 0.25}
"""Part of the free memory that the target's cache may take by default; on a CPU only pages that are used are taken."""
DRAFT_SHARE = 0.1


def blocks_within(
    model: LayeredModel,
    block_size: int,
    max_num_seqs: int,
    kv_memory: float | None = None,
    share: float | None = None,
    extra_layers: int = 0,
) -> int:
    """Blocks in `kv_memory` GiB; without it in a share of the free memory, at most what `max_num_seqs` full contexts
    need.

    extra_layers: of the cache, beyond the model's own.

    Raises ValueError for a budget that does not hold a single block.
    """
    per_block = model.bytes_per_token(extra_layers) * block_size
    if kv_memory is not None:
        return blocks_in(kv_memory, per_block)
    share = SHARE.get(model.device.type, SHARE["cuda"]) if share is None else share
    enough = max_num_seqs * -(-model.max_positions // block_size)
    return max(1, min(enough, int(_free_memory(model.device) * share // per_block)))


def blocks_in(kv_memory: float, per_block: int) -> int:
    """Blocks of so many bytes in so many GiB. Raises ValueError where not even one fits."""
    blocks = int(kv_memory * 2**30 // per_block)
    if blocks < 1:
        raise ValueError(f"kv_memory must hold a block of {per_block / 2**20:.3g} MiB, got {kv_memory} GiB")
    return blocks


def _free_memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
