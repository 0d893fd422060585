"""Text and chats as training data: sources, documents with loss masks, packed rows, the order of an epoch, loaders.

A document is what sees itself and nothing else. Documents are packed into rows of about equal cost, but a row stays a
list of documents: the ragged batch lays them as separate items, so none sees another and each begins at position 0.
There are no worker processes: the tokens lie in memory, and a batch is a few slices of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
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

from ..infer.jobs import read_jobs
from ..infer.loading import ModelSource, load_tokenizer, resolve_model
from ..infer.request import GenerationParams, Prompt
from ..modules.batch import BatchItem
from ..modules.sampling import make_generator

FORMS = {"text": ("text",), "messages": ("messages",), "prompt + completion": ("prompt", "completion")}
FIELDS = tuple(name for names in FORMS.values() for name in names)
VALID_PATHS = "a .jsonl or .parquet file, a folder, or the name of a dataset for `datasets`"
PROBE = "\U0010fffd"  # the last private-use character: no text has it
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
NO_TEMPLATE = "messages need a chat template and this tokenizer has none; set chat_template (--data.chat_template FILE)"

# --- sources: where rows come from ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Where rows come from: `Source("HuggingFaceH4/ultrachat_200k", split="train_sft")`, `Source("chats.jsonl")`.

    path: a .jsonl file or a folder of them, a .parquet file, or what `datasets` loads: a name, or a folder of files or
        one that it saved.
    split, name: of what `datasets` loads, its split and its configuration.
    fields: our name of a field to the rows' own, `{"text": "content"}`.
    limit: only the first rows.
    """

    path: str
    split: str = "train"
    name: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    limit: int | None = None

    def __post_init__(self) -> None:
        for name in self.fields:
            if name not in FIELDS:
                raise ValueError(f"fields of {self.path} must be of {', '.join(FIELDS)}, got {name!r}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit of {self.path} must be at least 1 row, or null for all, got {self.limit}")


Sources = str | Source | list[str | Source]


def read_rows(source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    """(a row's place, `chats.jsonl:3`, its fields, renamed, without nulls). ValueError for what cannot be read."""
    for where, row in islice(_raw_rows(source), source.limit):
        missing = [own for own in source.fields.values() if own not in row]
        if missing:
            raise ValueError(f"{where}: there is no field {missing[0]!r}; the row has {', '.join(row) or 'none'}")
        kept = {name: value for name, value in row.items() if name not in source.fields.values()}
        kept |= {name: row[own] for name, own in source.fields.items()}
        yield where, {name: value for name, value in kept.items() if value is not None}


def _raw_rows(source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    path = Path(source.path).expanduser()
    if path.suffix in (".jsonl", ".parquet") and not path.exists():
        raise ValueError(f"{source.path} does not exist; a source is {VALID_PATHS}")
    if path.is_file() and path.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"{source.path} cannot be read; a source is {VALID_PATHS}")
    files = [path] if path.suffix == ".jsonl" else sorted(path.glob("*.jsonl"))
    if files:
        return (row for file in files for row in _jsonl_rows(file))
    return _dataset_rows(source, path)


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not valid JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: a row must be a JSON object, got {type(row).__name__}")
            yield f"{path}:{number}", row


def _dataset_rows(source: Source, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets

    try:
        if path.suffix == ".parquet":
            data = datasets.load_dataset("parquet", data_files=str(path), split="train")
        elif (path / "dataset_dict.json").is_file():
            data = datasets.load_from_disk(str(path))[source.split]
        elif (path / "state.json").is_file():
            data = datasets.load_from_disk(str(path))
        else:
            data = datasets.load_dataset(source.path, source.name, split=source.split)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"{source.path} (split {source.split!r}) cannot be loaded: {error}; a source is {VALID_PATHS}"
        ) from error
    place = source.path if path.suffix == ".parquet" else f"{source.path}[{source.split}]"
    return ((f"{place}:{number}", row) for number, row in enumerate(data, start=1))


# --- documents: a row's tokens, and which of them are learned --------------------------------------------------------


@dataclass(frozen=True)
class Document:
    """Tokens that see each other: `Document([17, 4, 9, 2], [False, False, True, True])`.

    supervised: whether each token is one to be predicted, from those before it. may_split: whether a long document is
    as good in pieces.
    """

    token_ids: Sequence[int]
    supervised: Sequence[bool]
    may_split: bool = False


def read_documents(sources: Sources, tokenizer: Any, eos_token_ids: Collection[int]) -> Iterator[Document]:
    """All rows of all sources. Raises ValueError naming file, line and field for the first that is not valid."""
    for source in sources if isinstance(sources, list) else [sources]:
        for where, row in read_rows(Source(source) if isinstance(source, str) else source):
            try:
                yield encode_row(row, tokenizer, eos_token_ids)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error


def encode_row(row: Mapping[str, Any], tokenizer: Any, eos_token_ids: Collection[int] = ()) -> Document:
    """A row of one of the `FORMS`, tokenised as the engine tokenises prompts.

    text: all of it is supervised. prompt + completion: the completion. Both end with the tokenizer's end token.
    messages: what the assistant says, up to its end of turn.

    Raises ValueError naming the field.
    """
    found = [form for form, names in FORMS.items() if all(name in row for name in names)]
    if len(found) != 1:
        got = " and ".join(found) or f"the fields {', '.join(row) or '(none)'}"
        raise ValueError(f"a row needs exactly one of {', '.join(FORMS)}, got {got}; `fields` renames others")
    if found[0] == "messages":
        return _encode_chat(_checked_messages(row["messages"]), tokenizer, eos_token_ids)
    for name in FORMS[found[0]]:
        if not isinstance(row[name], str):
            raise ValueError(f"{name} must be a string, got {row[name]!r}")
    if found[0] == "text":
        token_ids = _ended(tokenizer(row["text"]).input_ids, tokenizer)
        return Document(token_ids, [True] * len(token_ids), may_split=True)
    return _encode_completion(row["prompt"], row["completion"], tokenizer)


def _ended(token_ids: list[int], tokenizer: Any) -> list[int]:
    end = tokenizer.eos_token_id
    return token_ids if end is None or token_ids[-1:] == [end] else [*token_ids, end]


def _encode_completion(prompt: str, completion: str, tokenizer: Any) -> Document:
    """Tokenised as one text unless that would change the prompt's tokens, which in serving are there first."""
    before, whole = tokenizer(prompt).input_ids, tokenizer(prompt + completion).input_ids
    if whole[: len(before)] != before:
        whole = before + tokenizer(completion, add_special_tokens=False).input_ids
    whole = _ended(whole, tokenizer)
    return Document(whole, [index >= len(before) for index in range(len(whole))])


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    wanted = 'messages must be a non-empty list of {"role": ..., "content": ...} with texts'
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{wanted}, got {messages!r}")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise ValueError(f"{wanted}, got {message!r}")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("messages has no turn of the assistant, so nothing in it would be supervised")
    return messages


def _encode_chat(messages: list[dict[str, Any]], tokenizer: Any, eos_token_ids: Collection[int]) -> Document:
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise ValueError(NO_TEMPLATE)
    if not tokenizer.is_fast:
        raise ValueError("messages need a fast tokenizer, which knows where in the text its tokens are")
    try:
        if isinstance(template, str) and GENERATION_MARK.search(template):
            marked = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            return Document(marked["input_ids"], [bool(mark) for mark in marked["assistant_masks"]])
        text, spans = _assistant_spans(messages, lambda chat: tokenizer.apply_chat_template(chat, tokenize=False))
    except Exception as error:  # a template raises what it likes
        raise ValueError(f"messages cannot be written by the chat template: {error}") from error
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return Document(
        encoded.input_ids, _supervised(encoded.input_ids, encoded.offset_mapping, text, spans, eos_token_ids)
    )


def _assistant_spans(
    messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]
) -> tuple[str, list[tuple[int, int]]]:
    """(the chat as text, [start, end) of what each assistant turn's content contributes to it).

    A span is where the text changes when the content is replaced. Unlike the difference between a chat and its
    beginning this holds for templates that write early turns otherwise than late ones, trim contents, or end with the
    next turn's opening whether asked to or not.
    """
    text, spans = render(messages), []
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            probed = render([*messages[:turn], message | {"content": PROBE}, *messages[turn + 1 :]])
            start = _num_common(text, probed)
            spans.append((start, len(text) - _num_common(text[start:][::-1], probed[start:][::-1])))
    return text, spans


def _num_common(first: str, second: str) -> int:
    """How many characters two texts begin with in common."""
    differing = (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return next(differing, min(len(first), len(second)))


def _supervised(
    token_ids: Sequence[int],
    offsets: Sequence[tuple[int, int]],
    text: str,
    spans: Iterable[tuple[int, int]],
    eos_token_ids: Collection[int],
) -> list[bool]:
    """Whether each token lies in a span, or is the end-of-turn token behind one, which the assistant has to say too.

    What the template puts behind that (a line break) is not the assistant's.
    """
    supervised = [False] * len(token_ids)
    for start, end in spans:
        index = next((i for i, (_, stop) in enumerate(offsets) if stop > start), len(offsets))
        first = index
        while index < len(offsets) and offsets[index][0] < end:
            index += 1
        behind = index
        while index < len(offsets) and not text[end : offsets[index][0]].strip():
            index += 1
            if token_ids[index - 1] in eos_token_ids:
                behind = index
                break
        supervised[first:behind] = [True] * (behind - first)
    return supervised


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


@dataclass(frozen=True)
class TextBatch:
    """The documents of some rows, and for each of their tokens, laid flat as RaggedBatch lays them, the next one.

    mask: whether the next token is supervised; never at a document's last token, where next_ids holds a 0.
    """

    documents: list[list[int]]
    next_ids: Int[Tensor, "tokens"]
    mask: Bool[Tensor, "tokens"]

    @classmethod
    def collate(cls, rows: Sequence[Sequence[Document]]) -> TextBatch:
        documents = [document for row in rows for document in row]
        next_ids = [token_id for document in documents for token_id in (*document.token_ids[1:], 0)]
        mask = [supervised for document in documents for supervised in (*document.supervised[1:], False)]
        return cls([list(document.token_ids) for document in documents], torch.tensor(next_ids), torch.tensor(mask))

    def items(self) -> list[BatchItem]:
        """For RaggedBatch.build, without a cache."""
        return [BatchItem(token_ids) for token_ids in self.documents]

    def to(self, device: torch.device | str) -> TextBatch:
        return TextBatch(self.documents, self.next_ids.to(device), self.mask.to(device))


class RowSampler(DistributedSampler[int]):
    """A rank's rows of an epoch, in an order that only the seed and the epoch decide.

    Together the ranks' n-th batches are what one process with a batch as large as theirs would take. A rank whose share
    is short gets rows that are not supervised (index + len). It is a DistributedSampler so that Lightning keeps it.
    """

    def __init__(
        self, dataset: PackedDataset, world_size: int = 1, rank: int = 0, seed: int = 0, shuffle: bool = True
    ) -> None:
        super().__init__(dataset, world_size, rank, shuffle=shuffle, seed=seed)
        self.num_rows = len(dataset)

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


class TextDataModule(LightningDataModule):
    """Packed text and chats for `fit`, `validate` and `test`, and prompts for the engine to answer in validation.

    model: whose tokenizer, chat template and end tokens count: a hub id, a folder or a .gguf file.
    train, val, test: sources, each a path or name or a `Source`.
    prompts: a .jsonl file of `prompt`, `messages` or `token_ids`; max_prompts: only the first.
    row_tokens: the longest row, so the longest document. batch_rows: rows of a batch and rank.
    seed: with the epoch it decides the order of rows, whatever other seed is set.
    chat_template: file with a Jinja chat template, instead of the tokenizer's own.

    Its state is the training loader's place. Lightning keeps that too, but forgets it when a scheduler asks for the
    number of steps (2.6.6).
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
        super().__init__()
        if batch_rows < 1:
            raise ValueError(f"batch_rows must be at least 1, got {batch_rows}")
        self.model, self.allow_pickle, self.chat_template = model, allow_pickle, chat_template
        self.sources = {"train": train, "val": val, "test": test}
        self.prompts_path, self.max_prompts = prompts, max_prompts
        self.row_tokens, self.batch_rows, self.seed = row_tokens, batch_rows, seed
        self.tokenizer: Any = None
        self.eos_token_ids: frozenset[int] = frozenset()
        self.datasets: dict[str, PackedDataset] = {}
        self.prompts: list[Prompt] = []
        self._loader: StatefulDataLoader | None = None
        self._resumed: dict[str, Any] = {}

    def setup(self, stage: str | None = None) -> None:
        """Read and tokenise what the stage needs, once. Raises ValueError for a stage without a source."""
        if self.tokenizer is None:
            source = resolve_model(self.model, self.allow_pickle)
            self.tokenizer = load_tokenizer(source)
            if self.chat_template is not None:
                self.tokenizer.chat_template = Path(self.chat_template).read_text(encoding="utf-8")
            self.eos_token_ids = end_tokens(source, self.tokenizer)
            if self.prompts_path is not None:
                self.prompts = read_prompts(self.prompts_path, bool(self.tokenizer.chat_template), self.max_prompts)
        needed = {"fit": "train", "validate": "val", "test": "test"}.get(stage or "")
        if needed is not None and self.sources[needed] is None:
            raise ValueError(f"data.{needed} must be given for `{stage}`; a source is {VALID_PATHS}")
        for name in {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}.get(stage or "", self.sources):
            sources = self.sources[name]
            if sources is not None and name not in self.datasets:
                documents = read_documents(sources, self.tokenizer, self.eos_token_ids)
                self.datasets[name] = PackedDataset(documents, self.row_tokens, f"data.{name}")
                rank_zero_info(f"{name}: {self.datasets[name].summary}")

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
        return StatefulDataLoader(dataset, self.batch_rows, sampler=sampler, collate_fn=TextBatch.collate)

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
                f"{self._resumed['data']}); a run resumes on the same data, a new run can start from the weights"
            )


def end_tokens(source: ModelSource, tokenizer: Any) -> frozenset[int]:
    """The ids that end a text or a turn: the tokenizer's, and those that generation stops at."""
    try:
        configured = GenerationConfig.from_pretrained(source.location).eos_token_id
    except OSError:  # none beside the model
        gguf = {} if source.gguf_file is None else {"gguf_file": source.gguf_file}
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
