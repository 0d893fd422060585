"""Rows of text and chats, and the documents they become: tokens, and which of them are to be learned.

A document is what sees itself and nothing else. Of a chat the assistant's turns are learned, which the chat template
decides; what cannot be read, or would teach nothing, is refused by file, line and field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..infer.jsonl import read_jsonl

if TYPE_CHECKING:
    from torch import Tensor

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
        return (row for file in files for row in read_jsonl(file))
    return _dataset_rows(source, path)


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
    as good in pieces. states: by layer, [tokens, hidden] residual streams after it, where they were stored.
    """

    token_ids: Sequence[int]
    supervised: Sequence[bool]
    may_split: bool = False
    states: Mapping[int, Tensor] | None = None


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
        check_text(name, row[name])
    if found[0] == "text":
        token_ids = _ended(tokenizer(row["text"]).input_ids, tokenizer)
        return Document(token_ids, [True] * len(token_ids), may_split=True)
    return _encode_completion(row["prompt"], row["completion"], tokenizer)


def check_text(name: str, text: str) -> None:
    """Raise ValueError for a text that cannot be written as UTF-8: JSON can escape half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be text, got half a surrogate pair at character {error.start}") from error


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
        check_text("messages", message["role"] + message["content"])
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
