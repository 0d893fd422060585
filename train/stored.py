"""Hidden states on disk, to train exit heads on without running the model again: the format, its reader and its data.

    index.json                   what they belong to: base model, data, layers, dtype; which shards there are
    states-00000.safetensors     some rows: token_ids, supervised, document_lengths, row_documents, layer.4, layer.30

A shard appears under its name only when it is whole, and the index says `complete` only when all of them are there.
Rows are those of the packed data set in its order, so a run on stored states sees the batches of a run on the data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from ..infer.bundles import base_fingerprint
from ..infer.loading import ModelSource, load_transformers, resolve_model
from ..modules.bundle import fingerprint
from .data import PackedDataset, PackingSummary, RowsDataModule
from .documents import Document

FORMAT, FORMAT_VERSION = "speclight stored states", 1
INDEX = "index.json"


def fingerprint_of(source: ModelSource) -> str:
    """`fingerprint` of a model, which is only loaded where its files do not tell."""
    return base_fingerprint(source) or fingerprint(load_transformers(source))


def shard_name(number: int) -> str:
    return f"states-{number:05d}.safetensors"


def read_index(folder: Path) -> dict[str, Any] | None:
    """What is stored in a folder, complete or not; None where nothing is. ValueError for other formats."""
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        index = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(index, dict) or (index.get("format"), index.get("version")) != (FORMAT, FORMAT_VERSION):
        raise ValueError(f"{path} is not the index of {FORMAT}, version {FORMAT_VERSION}")
    return index


class StoredDataset(PackedDataset):
    """The rows of a folder of stored states, each document with its `states`.

    expected_fingerprint: of the base model that heads are trained for.

    Raises ValueError for a folder that is not complete, was changed, or belongs to another base model.
    """

    def __init__(self, folder: str | Path, expected_fingerprint: str) -> None:
        self.folder = Path(folder).expanduser()
        self.index = _checked_index(self.folder, expected_fingerprint)
        self.row_tokens: int = self.index["row_tokens"]
        self.layers: list[int] = self.index["layers"]
        self.summary = PackingSummary(**self.index["summary"])
        shards = [_rows_of(self.folder / shard["file"]) for shard in self.index["shards"]]
        self.token_ids: np.ndarray = np.concatenate([shard["token_ids"].numpy() for shard in shards])
        self.supervised: np.ndarray = np.concatenate([shard["supervised"].numpy() for shard in shards])
        self._lay_out(shards)
        self._files: dict[int, Any] = {}

    def _lay_out(self, shards: list[dict[str, Tensor]]) -> None:
        """Where documents begin among all tokens, the documents of each row, and where each row lies."""
        lengths = torch.cat([shard["document_lengths"] for shard in shards])
        self._bounds = [0, *lengths.cumsum(0).tolist()]
        counts = torch.cat([shard["row_documents"] for shard in shards]).tolist()
        ends = np.cumsum(counts).tolist()
        self._rows = [list(range(end - count, end)) for count, end in zip(counts, ends, strict=True)]
        self._places: list[tuple[int, int]] = []  # (shard, its first token among all)
        first = 0
        for number, shard in enumerate(shards):
            self._places += [(number, first)] * len(shard["row_documents"])
            first += len(shard["token_ids"])

    def __getitem__(self, index: int) -> list[Document]:
        documents = super().__getitem__(index)
        row = index % len(self)
        number, first = self._places[row]
        start = self._bounds[self._rows[row][0]] - first
        stop = start + sum(len(document.token_ids) for document in documents)
        file = self._files.get(number) or self._open(number)
        lengths = [len(document.token_ids) for document in documents]
        parts = {layer: file.get_slice(f"layer.{layer}")[start:stop].split(lengths) for layer in self.layers}
        return [
            replace(document, states={layer: parts[layer][place] for layer in self.layers})
            for place, document in enumerate(documents)
        ]

    def _open(self, number: int) -> Any:
        """Stays open: a file is mapped into memory, not read."""
        self._files[number] = safe_open(self.folder / self.index["shards"][number]["file"], framework="pt")
        return self._files[number]

    def fingerprint(self) -> str:
        """That of the data the states were made of."""
        return self.index["data"]


def _checked_index(folder: Path, expected_fingerprint: str) -> dict[str, Any]:
    index = read_index(folder)
    if index is None:
        raise ValueError(f"{str(folder)!r} holds no stored states: it has no {INDEX}; `speclight states` makes them")
    if not index["complete"]:
        raise ValueError(f"the states in {str(folder)!r} are not complete; the same `speclight states` goes on")
    if index["base_fingerprint"] != expected_fingerprint:
        raise ValueError(
            f"the states in {str(folder)!r} belong to another base model: they are of {index['base_fingerprint']} "
            f"({index['base_model']}), this model is {expected_fingerprint}"
        )
    for shard in index["shards"]:
        path = folder / shard["file"]
        size = path.stat().st_size if path.is_file() else None
        if size != shard["bytes"]:
            raise ValueError(f"{path} must have {shard['bytes']} bytes, as {INDEX} says, got {size}; store them anew")
    return index


def _rows_of(path: Path) -> dict[str, Tensor]:
    """What a shard holds besides states."""
    with safe_open(path, framework="pt") as file:
        names = ("token_ids", "supervised", "document_lengths", "row_documents")
        return {name: file.get_tensor(name) for name in names}


class StatesDataModule(RowsDataModule):
    """Rows with stored hidden states, made by `speclight states`, in the order in which TextDataModule serves them.

    model: the base model that they are of; another is refused.
    train, val, test: folders. The rest is as for TextDataModule.
    """

    valid_sources = "a folder that `speclight states` has written"

    def __init__(
        self,
        model: str,
        train: str | None = None,
        val: str | None = None,
        test: str | None = None,
        prompts: str | None = None,
        max_prompts: int | None = None,
        batch_rows: int = 8,
        seed: int = 0,
        chat_template: str | None = None,
        allow_pickle: bool = False,
    ) -> None:
        sources: Mapping[str, str | None] = {"train": train, "val": val, "test": test}
        super().__init__(model, sources, prompts, max_prompts, batch_rows, seed, chat_template, allow_pickle)

    def read_split(self, name: str) -> StoredDataset:
        expected = fingerprint_of(resolve_model(self.model, self.allow_pickle))
        return StoredDataset(self.sources[name], expected)
