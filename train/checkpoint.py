"""What a checkpoint of ours says beside Lightning's entries, and how it is read without a trainer.

`checkpoint["speclight"]` names the kind of thing trained, how it is built, and the base model: its name, and the
fingerprint of its weights, which are not stored. Only tensors and plain types are saved, so `weights_only` loads.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..modules.bundle import HeadBundle, check_same_tensors
from ..modules.ensemble_head import KIND as ENSEMBLE
from ..modules.exit_heads import KIND

RECORD = "speclight"
HEADS = "heads."
"""What the names of the heads' tensors begin with in a checkpoint."""


def read_checkpoint(path: str | Path, kind: str | None = None) -> dict[str, Any]:
    """The whole checkpoint, on the CPU. Raises ValueError for a file that is not a checkpoint of this kind (None: any
    of ours)."""
    path = Path(path).expanduser()
    if not path.is_file():
        hint = " (a folder: it was sharded; save with state_dict_type 'full')" if path.is_dir() else ""
        raise ValueError(f"checkpoint {str(path)!r} is not a file{hint}")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        raise ValueError(f"checkpoint {str(path)!r} cannot be read: {first_line(error)}") from error
    if not isinstance(checkpoint, Mapping):
        raise ValueError(f"checkpoint {str(path)!r} is not one of ours: it holds a {type(checkpoint).__name__}")
    check_kind(checkpoint, kind, f"checkpoint {str(path)!r}")
    return dict(checkpoint)


def first_line(error: Exception) -> str:
    """Of its message, or its type where it has none. What follows in torch's is advice that does not fit."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def check_kind(checkpoint: Mapping[str, Any], kind: str | None, where: str = "the checkpoint") -> dict[str, Any]:
    """The record of a checkpoint. Raises ValueError for one without, and for one of another kind."""
    record = checkpoint.get(RECORD)
    if not isinstance(record, Mapping) or "kind" not in record:
        raise ValueError(f"{where} is not one of ours: it has no entry {RECORD!r} that says what it holds")
    if kind is not None and record["kind"] != kind:
        raise ValueError(f"{where} holds {record['kind']!r}, not {kind!r}")
    return dict(record)


def check_base(record: Mapping[str, Any], base_fingerprint: str, base_model: str) -> None:
    """Raise ValueError, with both fingerprints, unless what was trained belongs on this base model."""
    if record["base_fingerprint"] != base_fingerprint:
        raise ValueError(
            f"the checkpoint belongs to another base model: it was trained on {record['base_fingerprint']} "
            f"({record['base_model']}), this model is {base_fingerprint} ({base_model})"
        )


def check_settings(found: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the first setting that differs, unless what was trained is built like this module."""
    for name, value in own.items():
        if found.get(name) != value:
            raise ValueError(f"{name} must be {found.get(name)!r}, as in the checkpoint, got {value!r}")


def check_tensors(found: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless a checkpoint holds what is trained here: no tensor less, none more, of the same shapes.

    Lightning's `strict_loading=False`, which partial checkpoints are often loaded with, would hide a missing one.
    """
    expected, present = (
        {name: ("", list(tensor.shape)) for name, tensor in tensors.items()} for tensors in (own, found)
    )
    check_same_tensors(expected, present, "the checkpoint")


def ensemble_of(checkpoint: Mapping[str, Any]) -> HeadBundle:
    """The head of a learned verifier in a checkpoint of DiversedModule, as a bundle in memory."""
    record, state = checkpoint[RECORD], checkpoint["state_dict"]
    tensors = {name.removeprefix(HEADS): tensor for name, tensor in state.items() if name.startswith(HEADS)}
    config = {**record["config"], "draft": record["draft"]}
    return HeadBundle(
        ENSEMBLE, config, tensors, record["base_fingerprint"], record["base_model"], record.get("card", {})
    )


def read_heads(path: str | Path) -> HeadBundle:
    """The exit heads in a checkpoint of EarlyExitModule, as a bundle in memory. Raises ValueError for other files."""
    checkpoint = read_checkpoint(path, KIND)
    record, state = checkpoint[RECORD], checkpoint["state_dict"]
    tensors = {name.removeprefix(HEADS): tensor for name, tensor in state.items() if name.startswith(HEADS)}
    return HeadBundle(
        KIND, record["config"], tensors, record["base_fingerprint"], record["base_model"], record.get("card", {})
    )
