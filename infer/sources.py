"""What a user can name: models, dtypes, devices. What of it can be refused at once is refused here, without torch."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

CACHE_DIR = "~/.cache/speclight"
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
ATTENTIONS = ("sdpa", "flex")
VALID_MODELS = "a hub id (owner/name), a folder with config.json and safetensors, or a .gguf file"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ModelSource:
    """A model that was found, and once `loading.resolve_model` has seen it one that can be run.

    `ModelSource("models/smol.gguf", "models", gguf_file="smol.gguf", ...)`

    name: as the user wrote it. location: what transformers reads, a folder or a hub id. gguf_file: name of the file in
    that folder, when it has not been converted yet. converted: where its conversion belongs. config: transformers'
    own, where reading it takes so long (GGUF) that it is kept.
    """

    name: str
    location: str
    gguf_file: str | None = None
    converted: Path | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False
    config: Any = field(default=None, compare=False, repr=False)


def find_model(
    model: str, allow_pickle: bool = False, trust_remote_code: bool = False, cache_dir: str | None = None
) -> ModelSource:
    """Where a model is. Raises ValueError for a path that does not exist or holds no model; a hub id is taken as is."""
    path = Path(model).expanduser()
    if path.is_file():
        source = _gguf_source(model, path, cache_dir)
    elif path.is_dir():
        source = _folder_source(model, path, cache_dir)
    elif HUB_ID.fullmatch(model) and path.suffix != ".gguf" and not path.parent.is_dir():
        source = ModelSource(model, model)
    else:
        raise ValueError(f"model {model!r} does not exist; it must be {VALID_MODELS}")
    return replace(source, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)


def _folder_source(model: str, folder: Path, cache_dir: str | None) -> ModelSource:
    if (folder / "config.json").is_file():
        return ModelSource(model, str(folder))
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return _gguf_source(model, ggufs[0], cache_dir)
    found = f"{len(ggufs)} .gguf files, name one of them" if ggufs else "neither config.json nor a .gguf file"
    raise ValueError(f"model folder {model!r} holds {found}")


def _gguf_source(model: str, path: Path, cache_dir: str | None) -> ModelSource:
    if path.suffix != ".gguf":
        raise ValueError(f"model {model!r} is a file but not a .gguf; it must be {VALID_MODELS}")
    path, stat = path.resolve(), path.stat()
    digest = hashlib.sha256(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    converted = Path(cache_dir or CACHE_DIR).expanduser() / f"{path.stem}-{digest}"
    if converted.is_dir():
        return ModelSource(model, str(converted))
    return ModelSource(model, str(path.parent), path.name, converted)


def check_dtype(name: str) -> None:
    """Raise ValueError, with those that are, for a name that is no dtype."""
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")


def check_attention(name: str) -> None:
    """Raise ValueError, with those that are, for a name that is no implementation of attention."""
    if name not in ATTENTIONS:
        raise ValueError(f"attention must be one of {', '.join(ATTENTIONS)}, got {name!r}")


def check_device(name: str) -> None:
    """Raise ValueError for what cannot be a device; whether it is there, torch knows."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
