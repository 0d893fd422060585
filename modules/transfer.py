"""Between host and device: there without waiting, and back with one wait for all that is wanted.

A host that waits for the device leaves it idle until the next kernels have been launched. So a step sends what it needs
without waiting, and asks once for all that decisions rest on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def is_apart(device: torch.device) -> bool:
    """Whether reading a tensor makes the host wait for what was launched before."""
    return device.type != "cpu"


def to_device(values: np.ndarray | Sequence[int], device: torch.device | str) -> Tensor:
    """A copy on a device (on the CPU the array itself), int64 where no dtype is said; it comes in the order of what is
    launched, and the host goes on."""
    array = values if isinstance(values, np.ndarray) else np.array(values, dtype=np.int64)
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cuda" and array.size:  # memory that is not pinned is waited for
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Fetch:
    """Small tensors that the host wants: `add` them, then `take` all of them, as nested lists, in one transfer.

    apart: whether they must be transferred. They travel as float64, which holds token ids and float32 exactly.
    """

    def __init__(self, apart: bool) -> None:
        self.apart = apart
        self._tensors: list[Tensor] = []

    def add(self, tensor: Tensor) -> int:
        """The place of its values in what `take` gives."""
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def take(self) -> list[Any]:
        if not self.apart or not self._tensors:
            return [tensor.tolist() for tensor in self._tensors]
        flat = torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in self._tensors]).cpu().numpy()
        ends = np.cumsum([tensor.numel() for tensor in self._tensors])
        return [_restored(part, tensor) for part, tensor in zip(np.split(flat, ends[:-1]), self._tensors, strict=True)]


def _restored(values: np.ndarray, like: Tensor) -> Any:
    whole = not like.dtype.is_floating_point
    return (values.astype(np.int64) if whole else values).reshape(tuple(like.shape)).tolist()
