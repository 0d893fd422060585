"""`speclight states`: run the data through the model once, and store what exit heads are trained on.

The size is known before a weight is read, and refused above --max-disk. A run that was stopped goes on with the next
shard.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..infer.build import ModelOptions, option
from ..infer.files import read_text

if TYPE_CHECKING:
    from torch import Tensor

    from ..infer.loading import ModelSource
    from ..modules.layered_model import LayeredModel
    from .data import PackedDataset
    from .documents import Document

UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
SHARD_BYTES = 256e6
BYTES_PER_TOKEN = 16
"""What a token takes besides states, at most: its id, its supervision, lengths of short documents and rows."""


@dataclass(kw_only=True)
class StatesOptions(ModelOptions):
    """What to store, and where."""

    data: tuple[str, ...] = option(..., "rows as for training: .jsonl, .parquet, folders, data set names", nargs="+")
    output: str = option(..., "folder; a second run continues it")
    layers: str | None = option(None, "exit layers, 4,8; the last layer comes along; if unset L/8 and L/4")
    max_disk: str = option("20GB", "refuse to store more than this; KB, MB, GB, TB or KiB, MiB, GiB")
    states_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", "auto: the model's")
    row_tokens: int = option(1024, "the longest row, so the longest document")
    batch_rows: int = option(8, "rows in one pass")
    overwrite: bool = option(False, "begin anew")


def states(options: StatesOptions) -> None:
    """Raises ValueError for whatever is not valid; all of it is checked before weights are read."""
    from ..infer.loading import load_tokenizer, resolve_device, resolve_dtype, resolve_model
    from .data import PackedDataset, end_tokens, read_documents

    limit = parse_size(options.max_disk, "max_disk")
    if options.batch_rows < 1:
        raise ValueError(f"batch_rows must be at least 1, got {options.batch_rows}")
    resolve_dtype(options.dtype)
    resolve_device(options.device)
    source = resolve_model(options.model, options.allow_pickle, options.trust_remote_code, options.cache_dir)
    shape = _shape(options, source)
    tokenizer = load_tokenizer(source)
    if options.chat_template is not None:
        tokenizer.chat_template = read_text("chat_template", options.chat_template)
    documents = read_documents(list(options.data), tokenizer, end_tokens(source, tokenizer))
    dataset = PackedDataset(documents, options.row_tokens, "data")
    _note(f"{dataset.summary}")
    folder = Path(options.output).expanduser()
    _check_size(shape, dataset.summary.tokens, limit, folder)
    _store(options, source, shape, dataset, folder)


@dataclass(frozen=True)
class Shape:
    """What is stored of each token: `Shape([4, 8, 30], 576, "bfloat16")`."""

    layers: list[int]
    hidden_size: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        import torch

        return BYTES_PER_TOKEN + len(self.layers) * self.hidden_size * getattr(torch, self.dtype).itemsize


def parse_size(text: str, name: str) -> float:
    """Bytes of "20GB". Raises ValueError naming the field."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"{name} must be a number of bytes with a unit, such as 20GB or 512MiB, got {text!r}")
    return float(match[1]) * UNITS[match[2].upper()]


def _shape(options: StatesOptions, source: ModelSource) -> Shape:
    """From the model's configuration, without its weights."""
    import torch

    from ..infer.loading import resolve_device, text_config
    from ..modules.exit_heads import default_layers

    config = text_config(source)
    total = config.num_hidden_layers
    layers = list(default_layers(total)) if options.layers is None else _parse_layers(options.layers, total)
    own = str(config.dtype or torch.float32).removeprefix("torch.")
    computed = options.dtype if options.dtype != "auto" else own
    if options.dtype == "auto" and computed == "float16" and resolve_device(options.device).type == "cpu":
        computed = "float32"  # as the loader does
    dtype = options.states_dtype if options.states_dtype != "auto" else computed
    return Shape(sorted({*layers, total}), config.hidden_size, dtype)


def _parse_layers(text: str, num_layers: int) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    layers = [int(part) for part in parts if part.isdecimal()]
    if len(layers) < len(parts) or len(set(layers)) < len(layers) or not all(1 <= at <= num_layers for at in layers):
        raise ValueError(f"layers must be different numbers from 1 to {num_layers}, such as 4,8, got {text!r}")
    return layers


def _check_size(shape: Shape, tokens: int, limit: float, folder: Path) -> None:
    size = tokens * shape.bytes_per_token
    at = ", ".join(map(str, shape.layers))
    _note(f"{tokens} tokens at layers {at} in {shape.dtype} take about {_readable(size)} in {folder}")
    if size > limit:
        raise ValueError(
            f"max_disk must be at least {_readable(size)} for {tokens} tokens at {len(shape.layers)} layers, got "
            f"{_readable(limit)}; store fewer layers or less data, or train without stored states"
        )
    present = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    stored = sum(path.stat().st_size for path in folder.glob("states-*.safetensors")) if folder.is_dir() else 0
    if size - stored > shutil.disk_usage(present).free:
        raise ValueError(
            f"{_readable(size - stored)} do not fit into {folder}: only "
            f"{_readable(shutil.disk_usage(present).free)} are free there"
        )


def _readable(size: float) -> str:
    """`1.3 GB`"""
    for unit in ("TB", "GB", "MB"):
        if size >= UNITS[unit]:
            return f"{size / UNITS[unit]:.1f} {unit}"
    return f"{size / 1e3:.1f} KB"


def _note(message: str) -> None:
    print(f"speclight: {message}", file=sys.stderr, flush=True)


def _store(options: StatesOptions, source: ModelSource, shape: Shape, dataset: PackedDataset, folder: Path) -> None:
    from ..infer.files import held_folder
    from .stored import FORMAT, FORMAT_VERSION, INDEX, fingerprint_of, read_index

    layout = list(_layout(dataset, shape))
    index: dict[str, Any] = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "complete": False,
        "base_model": source.name,
        "base_fingerprint": fingerprint_of(source),
        "data": dataset.fingerprint(),
        "layers": shape.layers,
        "dtype": shape.dtype,
        "hidden_size": shape.hidden_size,
        "row_tokens": dataset.row_tokens,
        "summary": asdict(dataset.summary),
        "num_shards": len(layout),
    }
    if options.overwrite:
        _clear(folder)
    elif _is_complete(index, read_index(folder), folder):
        _note(f"{folder} is complete: nothing left to do")
        return
    folder.mkdir(parents=True, exist_ok=True)
    with held_folder(folder):
        _write_json(folder / INDEX, index)
        _write_shards(options, source, shape, dataset, layout, folder)
        _write_json(folder / INDEX, index | {"complete": True, "shards": _listed(folder, len(layout))})


def _is_complete(index: dict[str, Any], before: dict[str, Any] | None, folder: Path) -> bool:
    """Whether an earlier run has done it all. Raises ValueError where it did something else."""
    if before is None:
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"output folder {str(folder)!r} is not empty and holds no stored states; choose another")
        return False
    for name in index:
        if name not in ("complete", "base_model") and before.get(name) != index[name]:
            raise ValueError(
                f"output folder {str(folder)!r} was written with {name}={before.get(name)!r}, now it is "
                f"{index[name]!r}; use another --output, or --overwrite to begin anew"
            )
    return bool(before["complete"]) and not _drop_damaged(before["shards"], folder)


def _drop_damaged(shards: Sequence[dict[str, Any]], folder: Path) -> bool:
    """Remove shards that are not as long as they were; whether any is missing now, to be made again."""
    sizes = {folder / shard["file"]: shard["bytes"] for shard in shards}
    whole = [path for path, size in sizes.items() if path.is_file() and path.stat().st_size == size]
    for path in sizes.keys() - whole:
        path.unlink(missing_ok=True)
    return len(whole) < len(sizes)


def _clear(folder: Path) -> None:
    """Remove what this command writes, index first, and nothing else."""
    from .stored import INDEX, read_index

    if read_index(folder) is None and folder.exists() and any(folder.iterdir()):
        raise ValueError(f"output folder {str(folder)!r} is not empty and holds no stored states; choose another")
    (folder / INDEX).unlink(missing_ok=True)
    for path in folder.glob("states-*.safetensors*"):
        path.unlink()


def _layout(dataset: PackedDataset, shape: Shape) -> Iterator[range]:
    """The rows of each shard."""
    start = tokens = 0
    for row in range(len(dataset)):
        tokens += sum(len(document.token_ids) for document in dataset[row])
        if tokens * shape.bytes_per_token >= SHARD_BYTES:
            yield range(start, row + 1)
            start, tokens = row + 1, 0
    if start < len(dataset):
        yield range(start, len(dataset))


def _write_shards(
    options: StatesOptions,
    source: ModelSource,
    shape: Shape,
    dataset: PackedDataset,
    layout: Sequence[range],
    folder: Path,
) -> None:
    """Those that are missing; a shard that is there is whole."""
    import torch
    from tqdm import tqdm

    from ..infer.loading import load_transformers
    from ..modules.layered_model import LayeredModel
    from .stored import shard_name

    missing = [number for number in range(len(layout)) if not (folder / shard_name(number)).is_file()]
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = LayeredModel(load_transformers(source, options.dtype, options.device), fast=False).eval()
    done = sum(len(layout[number]) for number in range(len(layout)) if number not in missing)
    with tqdm(total=len(dataset), initial=done, unit="row", disable=None) as bar:
        for number in missing:
            tensors = _shard(model, shape, [dataset[row] for row in layout[number]], options.batch_rows, bar.update)
            _write_shard(folder / shard_name(number), tensors)


def _shard(
    model: LayeredModel, shape: Shape, rows: Sequence[list[Document]], batch_rows: int, progress: Any
) -> dict[str, Tensor]:
    import torch

    parts: dict[int, list[Tensor]] = {layer: [] for layer in shape.layers}
    for start in range(0, len(rows), batch_rows):
        batch = rows[start : start + batch_rows]
        for layer, hidden in _run(model, batch, shape).items():
            parts[layer].append(hidden)
        progress(len(batch))
    documents = [document for row in rows for document in row]
    return {
        "token_ids": torch.tensor([token for document in documents for token in document.token_ids], dtype=torch.int32),
        "supervised": torch.tensor([on for document in documents for on in document.supervised]),
        "document_lengths": torch.tensor([len(document.token_ids) for document in documents], dtype=torch.int32),
        "row_documents": torch.tensor([len(row) for row in rows], dtype=torch.int32),
    } | {f"layer.{layer}": torch.cat(hidden) for layer, hidden in parts.items()}


def _run(model: LayeredModel, rows: Sequence[list[Document]], shape: Shape) -> dict[int, Tensor]:
    """By layer, [tokens, hidden] on the CPU, in the dtype that is stored."""
    import torch

    from ..modules.batch import RaggedBatch
    from .data import TextBatch

    found: dict[int, Tensor] = {}
    with torch.inference_mode():
        batch = RaggedBatch.build(TextBatch.collate(rows).items(), None, model.device)
        hidden, before = model.embed(batch), 0
        for layer in shape.layers:
            hidden, before = model.run(hidden, batch, None, before, layer), layer
            found[layer] = hidden.to(getattr(torch, shape.dtype)).cpu()
            if not bool(torch.isfinite(found[layer]).all()):
                raise ValueError(f"states after layer {layer} do not fit {shape.dtype}; use another --states-dtype")
    return found


def _write_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial)
    partial.chmod(0o644)  # safetensors makes files that only their owner can read
    partial.rename(path)


def _write_json(path: Path, value: Any) -> None:
    from ..infer.files import replace_file

    replace_file(path, (json.dumps(value, indent=2) + "\n").encode())


def _listed(folder: Path, count: int) -> list[dict[str, Any]]:
    from .stored import shard_name

    names = [shard_name(number) for number in range(count)]
    return [{"file": name, "bytes": (folder / name).stat().st_size} for name in names]
