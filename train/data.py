"""Documents as training data: packed rows, the order of an epoch, loaders.

Documents are packed into rows of about equal cost, but a row stays a list of documents: the ragged batch lays them as
separate items, so none sees another and each begins at position 0. There are no worker processes: the tokens lie in
memory, and a batch is a few slices of them.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoConfig, GenerationConfig

from ..infer.files import read_text
from ..infer.jobs import read_jobs
from ..infer.loading import TOKENIZER_FILES, ModelSource, load_tokenizer, resolve_model
from ..infer.request import GenerationParams, Prompt
from ..modules.batch import BatchItem
from ..modules.sampling import make_generator
from .documents import NO_TEMPLATE, VALID_PATHS, Document, Source, Sources, encode_row, read_documents, read_rows

__all__ = [
    "Document",
    "PackedDataset",
    "PackingSummary",
    "RowSampler",
    "RowsDataModule",
    "Source",
    "Sources",
    "TextBatch",
    "TextDataModule",
    "draft_vocabulary",
    "encode_row",
    "end_tokens",
    "pack",
    "read_documents",
    "read_prompts",
    "read_rows",
]

# --- rows: documents packed into about equal cost --------------------------------------------------------------------


@dataclass(frozen=True)
class PackingSummary:
    """What became of the documents. cut: tokens beyond `row_tokens`. unsupervised: documents, or pieces of them,
    left out for having no supervised token in what was kept.
    """

    documents: int
    rows: int
    tokens: int
    supervised: int
    cut: int
    unsupervised: int

    def __str__(self) -> str:
        text = f"{self.documents} documents in {self.rows} rows, {self.tokens} tokens, {self.supervised} supervised"
        text += f"; {self.cut} tokens cut off" if self.cut else ""
        return text + (f"; {self.unsupervised} without a supervised token" if self.unsupervised else "")


class PackedDataset(Dataset[list[Document]]):
    """Rows of at most `row_tokens` tokens, each a list of documents.

    A document longer than a row is cut off at the end; a text is split into equal pieces instead, each a document of
    its own whose first token is not predicted. What has no supervised token then is left out. `summary` counts it all.

    Index i + len(self) is row i without supervision: what fills up a rank's share and must not count twice.

    Raises ValueError when nothing would be supervised.
    """

    def __init__(self, documents: Iterable[Document], row_tokens: int, name: str = "the data") -> None:
        if row_tokens < 2:
            raise ValueError(f"row_tokens must be at least 2, a token and the one it predicts, got {row_tokens}")
        tokens, supervised, bounds = array("i"), bytearray(), [0]
        counts = {"documents": 0, "cut": 0, "unsupervised": 0}
        for document in documents:
            pieces = list(_pieces(document, row_tokens))
            learned = [piece for piece in pieces if any(piece.supervised[1:])]
            counts["documents"] += 1
            counts["cut"] += 0 if document.may_split else max(0, len(document.token_ids) - row_tokens)
            counts["unsupervised"] += len(pieces) - len(learned)
            for piece in learned:
                tokens.extend(piece.token_ids)
                supervised.extend([False, *piece.supervised[1:]])  # nothing comes before the first token
                bounds.append(len(tokens))
        if not tokens:
            raise ValueError(
                f"nothing of {name} would be supervised: {counts['documents']} documents, and no supervised token "
                f"within the first {row_tokens} (row_tokens) of any"
            )
        self.row_tokens, self._bounds = row_tokens, bounds
        self.token_ids: np.ndarray = np.frombuffer(tokens, dtype=np.int32)
        self.supervised: np.ndarray = np.frombuffer(supervised, dtype=bool)
        self._rows = pack(np.diff(bounds).tolist(), row_tokens)
        self.summary = PackingSummary(
            rows=len(self._rows), tokens=len(tokens), supervised=int(self.supervised.sum()), **counts
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[list[Document]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> list[Document]:
        if not 0 <= index < 2 * len(self):
            raise IndexError(index)
        counted = index < len(self)
        pieces = [slice(self._bounds[piece], self._bounds[piece + 1]) for piece in self._rows[index % len(self)]]
        return [
            Document(self.token_ids[piece].tolist(), (self.supervised[piece] & counted).tolist()) for piece in pieces
        ]

    def fingerprint(self) -> str:
        """A hash of the tokens, the supervision and the packing."""
        digest = hashlib.sha256(self.token_ids.tobytes() + self.supervised.tobytes())
        digest.update(json.dumps([self.row_tokens, self._bounds]).encode())
        return digest.hexdigest()[:16]


def _pieces(document: Document, row_tokens: int) -> Iterator[Document]:
    length = len(document.token_ids)
    length = length if document.may_split else min(length, row_tokens)
    number = max(1, math.ceil(length / row_tokens))
    for index in range(number):
        piece = slice(length * index // number, length * (index + 1) // number)
        yield Document(document.token_ids[piece], document.supervised[piece])


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of what goes into each row, by best fit of the longest first: few rows, none above the capacity."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row) of the rows that are not full, ascending
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        at = bisect_left(room, (lengths[index], 0))
        if at == len(room):
            rows.append([])
            free, row = capacity, len(rows) - 1
        else:
            free, row = room.pop(at)
        rows[row].append(index)
        if free > lengths[index]:
            insort(room, (free - lengths[index], row))
    return [sorted(row) for row in rows]


def draft_vocabulary(
    dataset: PackedDataset, k: int, vocab_size: int, eos_token_ids: Collection[int] = ()
) -> Int[Tensor, "draft"]:
    """The k token ids, ascending, that a draft head of k logits should have: the end tokens and the most frequent ones
    of the supervised data. Ties, and tokens that never are supervised, go by how often the data has them at all.
    """
    ends = set(eos_token_ids)
    if not max(1, len(ends)) <= k <= vocab_size:
        raise ValueError(f"k must be between the number of end tokens and the vocabulary's {vocab_size}, got {k}")
    learned = np.bincount(dataset.token_ids[dataset.supervised], minlength=vocab_size)
    seen = np.bincount(dataset.token_ids, minlength=vocab_size)
    if len(seen) > vocab_size:
        raise ValueError(f"vocab_size must be above the data's largest token id, {len(seen) - 1}, got {vocab_size}")
    by_rank = np.lexsort((np.arange(vocab_size), -seen, -learned)).tolist()
    others = [token_id for token_id in by_rank if token_id not in ends]
    return torch.tensor(sorted([*ends, *others[: k - len(ends)]]))


# --- batches and their order -----------------------------------------------------------------------------------------


@dataclass  # not frozen: Lightning's precision plugins (FSDP, bf16-true) put converted tensors into a copy
class TextBatch:
    """The documents of some rows, and for each of their tokens, laid flat as RaggedBatch lays them, the next one.

    mask: whether the next token is supervised; never at a document's last token, where next_ids holds a 0.
    states: by layer, [tokens, hidden] residual streams after it, with the last layer's among them; None where they are
        to be computed.
    """

    documents: list[list[int]]
    next_ids: Int[Tensor, "tokens"]
    mask: Bool[Tensor, "tokens"]
    states: dict[int, Tensor] | None = None

    @classmethod
    def collate(cls, rows: Sequence[Sequence[Document]]) -> TextBatch:
        documents = [document for row in rows for document in row]
        next_ids = [token_id for document in documents for token_id in (*document.token_ids[1:], 0)]
        mask = [supervised for document in documents for supervised in (*document.supervised[1:], False)]
        token_ids = [list(document.token_ids) for document in documents]
        return cls(token_ids, torch.tensor(next_ids), torch.tensor(mask), _joined_states(documents))

    def items(self) -> list[BatchItem]:
        """For RaggedBatch.build, without a cache."""
        return [BatchItem(token_ids) for token_ids in self.documents]

    def to(self, device: torch.device | str) -> TextBatch:
        states = None if self.states is None else {layer: rows.to(device) for layer, rows in self.states.items()}
        return TextBatch(self.documents, self.next_ids.to(device), self.mask.to(device), states)


def _joined_states(documents: Sequence[Document]) -> dict[int, Tensor] | None:
    parts = [document.states for document in documents if document.states is not None]
    if not parts:
        return None
    return {layer: torch.cat([states[layer] for states in parts]) for layer in parts[0]}


class RowSampler(DistributedSampler[int]):
    """A rank's rows of an epoch, in an order that only the seed and the epoch decide.

    Together the ranks' n-th batches are what one process with a batch as large as theirs would take. A rank whose share
    is short gets rows that are not supervised (index + len). It is a DistributedSampler so that Lightning keeps it.
    """

    def __init__(
        self, dataset: Dataset[Any], world_size: int = 1, rank: int = 0, seed: int = 0, shuffle: bool = True
    ) -> None:
        super().__init__(dataset, world_size, rank, shuffle=shuffle, seed=seed)
        self.num_rows = len(dataset)  # type: ignore[arg-type]

    def order(self, epoch: int) -> list[int]:
        """The rank's rows of an epoch."""
        rows = list(range(self.num_rows))
        if self.shuffle:
            rows = torch.randperm(self.num_rows, generator=make_generator(self.seed, stream=epoch)).tolist()
        filling = [self.num_rows + rows[index % self.num_rows] for index in range(self.total_size - self.num_rows)]
        return [*rows, *filling][self.rank :: self.num_replicas]

    def __iter__(self) -> _RowIterator:
        return _RowIterator(self)


class _RowIterator:
    """Knows its epoch and its place, for StatefulDataLoader.

    Lightning makes the iterator of a resumed run before it tells the sampler the epoch. So a restored iterator keeps
    the epoch it was saved in; one that was at its end, or is new, asks for the epoch when its first row is wanted.
    """

    def __init__(self, sampler: RowSampler) -> None:
        self._sampler = sampler
        self._epoch: int | None = None
        self._order: list[int] = []
        self._taken = 0

    def __iter__(self) -> _RowIterator:
        return self

    def __next__(self) -> int:
        if not self._order:
            self._epoch = self._sampler.epoch if self._epoch is None else self._epoch
            self._order = self._sampler.order(self._epoch)
        if self._taken == len(self._order):
            raise StopIteration
        self._taken += 1
        return self._order[self._taken - 1]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._sampler.epoch if self._epoch is None else self._epoch, "taken": self._taken}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        if state["taken"] < len(self._sampler):
            self._epoch, self._taken = state["epoch"], state["taken"]


class RowsDataModule(LightningDataModule):
    """What serves rows for `fit`, `validate` and `test` has in common: their order, resuming, prompts for validation.

    Subclasses say where the rows of a split come from. The state is the training loader's place. Lightning keeps that
    too, but forgets it when a scheduler asks for the number of steps (2.6.6).
    """

    valid_sources = VALID_PATHS

    def __init__(
        self,
        model: str,
        sources: Mapping[str, Any],
        prompts: str | None,
        max_prompts: int | None,
        batch_rows: int,
        seed: int,
        chat_template: str | None,
        allow_pickle: bool,
    ) -> None:
        super().__init__()
        if batch_rows < 1:
            raise ValueError(f"batch_rows must be at least 1, got {batch_rows}")
        self.model, self.allow_pickle, self.chat_template = model, allow_pickle, chat_template
        self.sources = sources
        self.prompts_path, self.max_prompts = prompts, max_prompts
        self.batch_rows, self.seed = batch_rows, seed
        self.tokenizer: Any = None
        self.eos_token_ids: frozenset[int] = frozenset()
        self.datasets: dict[str, PackedDataset] = {}
        self.prompts: list[Prompt] = []
        self.collate: Callable[..., Any] = TextBatch.collate
        self._loader: StatefulDataLoader | None = None
        self._resumed: dict[str, Any] = {}

    def read_split(self, name: str) -> PackedDataset:
        """The rows of "train", "val" or "test", whose source is given; the tokenizer is there."""
        raise NotImplementedError

    def setup(self, stage: str | None = None) -> None:
        """Read what the stage needs, once. Raises ValueError for a stage without a source."""
        if self.tokenizer is None:
            self._read_model()
        stage = getattr(stage, "value", stage)  # Lightning's is an enumeration
        needed = {"fit": "train", "validate": "val", "test": "test"}.get(stage or "")
        if needed is not None and self.sources[needed] is None:
            raise ValueError(f"data.{needed} must be given for `{stage}`; a source is {self.valid_sources}")
        for name in {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}.get(stage or "", self.sources):
            if self.sources[name] is not None and name not in self.datasets:
                self.datasets[name] = self.read_split(name)
                rank_zero_info(f"{name}: {self.datasets[name].summary}")

    def _read_model(self) -> None:
        source = _tokenizer_source(self.model, self.allow_pickle)
        self.tokenizer = load_tokenizer(source)
        if self.chat_template is not None:
            self.tokenizer.chat_template = read_text("chat_template", self.chat_template)
        self.eos_token_ids = end_tokens(source, self.tokenizer)
        if self.prompts_path is not None:
            self.prompts = read_prompts(self.prompts_path, bool(self.tokenizer.chat_template), self.max_prompts)

    def train_dataloader(self) -> StatefulDataLoader:
        self._loader = self._make_loader("train", shuffle=True)
        if self._resumed:
            self._check_data()
            self._loader.load_state_dict(self._resumed["loader"])
            self._resumed = {}
        return self._loader

    def val_dataloader(self) -> StatefulDataLoader | list[Any]:
        return self._make_loader("val", shuffle=False) if "val" in self.datasets else []

    def test_dataloader(self) -> StatefulDataLoader:
        return self._make_loader("test", shuffle=False)

    def _make_loader(self, name: str, shuffle: bool) -> StatefulDataLoader:
        world, rank = (1, 0) if self.trainer is None else (self.trainer.world_size, self.trainer.global_rank)
        dataset = self.datasets[name]
        sampler = RowSampler(dataset, world, rank, self.seed, shuffle)
        # a loader draws a seed for its workers; from a generator of its own, so that resuming needs no replay of draws
        settings = {"collate_fn": self.collate, "generator": torch.Generator()}
        return StatefulDataLoader(dataset, self.batch_rows, sampler=sampler, **settings)

    def state_dict(self) -> dict[str, Any]:
        if self._loader is None:
            return {}
        return {"loader": self._loader.state_dict(), "data": self.datasets["train"].fingerprint()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict

    def _check_data(self) -> None:
        now = self.datasets["train"].fingerprint()
        if self._resumed["data"] != now:
            raise ValueError(
                f"data.train or row_tokens differs from what the checkpoint was trained on (hash {now}, then "
                f"{self._resumed['data']}); a run resumes on the same data, a new one can begin with its heads "
                "(model.start)"
            )


class TextDataModule(RowsDataModule):
    """Packed text and chats for `fit`, `validate` and `test`, and prompts for the engine to answer in validation.

    model: whose tokenizer, chat template and end tokens count: a hub id, a folder (of a tokenizer only, too) or a .gguf
        file.
    train, val, test: sources, each a path or name or a `Source`.
    prompts: a .jsonl file of `prompt`, `messages` or `token_ids`; max_prompts: only the first.
    row_tokens: the longest row, so the longest document. batch_rows: rows of a batch and rank.
    seed: with the epoch it decides the order of rows, whatever other seed is set.
    chat_template: file with a Jinja chat template, instead of the tokenizer's own.
    """

    def __init__(
        self,
        model: str,
        train: Sources | None = None,
        val: Sources | None = None,
        test: Sources | None = None,
        prompts: str | None = None,
        max_prompts: int | None = None,
        row_tokens: int = 1024,
        batch_rows: int = 8,
        seed: int = 0,
        chat_template: str | None = None,
        allow_pickle: bool = False,
    ) -> None:
        sources = {"train": train, "val": val, "test": test}
        super().__init__(model, sources, prompts, max_prompts, batch_rows, seed, chat_template, allow_pickle)
        self.row_tokens = row_tokens

    def read_split(self, name: str) -> PackedDataset:
        documents = read_documents(self.sources[name], self.tokenizer, self.eos_token_ids)
        return PackedDataset(documents, self.row_tokens, f"data.{name}")


def _tokenizer_source(model: str, allow_pickle: bool) -> ModelSource:
    """A model, or a folder that holds a tokenizer only, for a model that is trained from scratch."""
    source = ModelSource(model, str(Path(model).expanduser()))
    return source if _is_tokenizer_only(source) else resolve_model(model, allow_pickle)


def _is_tokenizer_only(source: ModelSource) -> bool:
    folder = Path(source.location)
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZER_FILES)
    return has_tokenizer and not (folder / "config.json").is_file() and not any(folder.glob("*.gguf"))


def end_tokens(source: ModelSource, tokenizer: Any) -> frozenset[int]:
    """The ids that end a text or a turn: the tokenizer's, and those that generation stops at."""
    configured: Any = None
    try:
        configured = GenerationConfig.from_pretrained(source.location).eos_token_id
    except OSError:  # none beside the model, or no model beside the tokenizer
        gguf = {} if source.gguf_file is None else {"gguf_file": source.gguf_file}
        if not _is_tokenizer_only(source):
            configured = AutoConfig.from_pretrained(source.location, **gguf).get_text_config().eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(token_id for token_id in (*ids, tokenizer.eos_token_id) if token_id is not None)


def read_prompts(path: str | Path, chat: bool, limit: int | None = None) -> list[Prompt]:
    """The prompts of a .jsonl file. chat: whether messages can be written, as there is a chat template.

    Raises ValueError naming file, line and field, also for a row with settings of its own: validation has one.
    """
    defaults = GenerationParams()
    jobs = read_jobs(path, defaults)[:limit]
    for job in jobs:
        if job.params != defaults:
            raise ValueError(f"{job.where}: a validation prompt cannot have settings of its own, only the prompt")
        if job.is_messages and not chat:
            raise ValueError(f"{job.where}: {NO_TEMPLATE}")
    if not jobs:
        raise ValueError(f"{path} holds no prompts")
    return [job.prompt for job in jobs]
