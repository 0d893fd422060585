"""Recordings of plain greedy decoding: what drafters can be evaluated on without a model.

A folder of one .npz file per text, so that an interrupted run keeps what it has, and meta.json, which says how they
were made and which texts belong to it. Only numbers are stored: reading never unpickles.
"""

from __future__ import annotations

import io
import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .files import replace_file
from .jsonl import is_key
from .summary import group_of

META, FORMAT = "meta.json", 1

Rules = Mapping[str, tuple[Callable[[Any], bool], str]]
"""By field: whether a value is valid, and what would be."""


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31  # token ids are int32


SETTINGS: Rules = {"max_new_tokens": (_is_count, "an integer from 1 to 2**31 - 1")}
TEXTS: Rules = {"texts": (lambda value: isinstance(value, list) and bool(value), "a list of at least one text")}
TEXT: Rules = {
    "question_id": (is_key, "an integer or a string"),
    "category": (lambda value: isinstance(value, str), "a string"),
}
MODEL: Rules = {
    "vocab_size": (_is_count, "an integer from 1 to 2**31 - 1"),
    "stop_ids": (lambda value: isinstance(value, list) and all(type(one) is int for one in value), "a list of ids"),
    "tokenizer": (lambda value: value is None or isinstance(value, str), "a string"),
}
ARRAYS = {
    "token_ids": (np.int32, 1),
    "num_prompt": (np.int32, 0),
    "top_ids": (np.int32, 2),
    "top_logprobs": (np.float32, 2),
}
"""What a text's file holds: dtypes and numbers of axes."""


@dataclass(frozen=True)
class RecordedText:
    """A prompt with the text that followed, and what the model thought of every position.

    token_ids: [tokens] prompt and output. num_prompt: tokens of the prompt.
    top_ids, top_logprobs: [tokens, k] the most likely successors of each token, most likely first, and log_softmax of
        their raw logits. Row i follows token i; the last row is what would have come next.
    """

    question_id: int | str
    category: str
    token_ids: NDArray[np.int32]
    num_prompt: int
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    @property
    def group(self) -> str:
        return group_of(self.category)


@dataclass(frozen=True)
class Recording:
    """texts: in the order in which they were asked for. settings: what they were made with, see `record`.

    stop_ids: the model's own ends of texts. tokenizer: its fingerprint; "" where an older recording does not say.
    """

    settings: Mapping[str, Any]
    vocab_size: int
    stop_ids: Sequence[int]
    texts: Sequence[RecordedText]
    tokenizer: str = ""

    @property
    def max_new_tokens(self) -> int:
        return self.settings["max_new_tokens"]


def text_path(folder: Path, index: int) -> Path:
    return folder / f"{index:05d}.npz"


def write_meta(folder: Path, meta: Mapping[str, Any]) -> None:
    replace_file(folder / META, (json.dumps({"format": FORMAT} | dict(meta), indent=1) + "\n").encode())


def write_text(path: Path, text: RecordedText) -> None:
    """The file appears complete or not at all."""
    buffer = io.BytesIO()
    np.savez(
        buffer,
        token_ids=text.token_ids,
        num_prompt=np.int32(text.num_prompt),
        top_ids=text.top_ids,
        top_logprobs=text.top_logprobs,
    )
    replace_file(path, buffer.getvalue())


def read_meta(folder: Path) -> dict[str, Any]:
    """Raises ValueError for a folder that holds no recording, and for a damaged file. "model" can be missing."""
    path = folder / META
    if not path.is_file():
        raise ValueError(f"recording {str(folder)!r} has no {META}; `speclight record` makes one")
    try:
        meta = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ValueError(f"{path} is no recording of format {FORMAT}")
    _check(str(path), meta, TEXTS)
    _check(f"{path}: settings", meta.get("settings"), SETTINGS)
    for index, entry in enumerate(meta["texts"]):
        _check(f"{path}: texts[{index}]", entry, TEXT)
    if "model" in meta:
        _check(f"{path}: model", meta["model"], MODEL)
    return meta


def _check(where: str, value: Any, rules: Rules) -> None:
    """Raise ValueError for what is no JSON object with these fields."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, got {reprlib.repr(value)}")
    for name, (is_valid, valid) in rules.items():
        if not is_valid(value.get(name)):
            raise ValueError(f"{where}: {name} must be {valid}, got {reprlib.repr(value.get(name))}")


def read_recording(folder: str | Path) -> Recording:
    """Raises ValueError for a folder without a recording, an unfinished one, and a damaged file."""
    folder = Path(folder)
    meta = read_meta(folder)
    missing = [index for index in range(len(meta["texts"])) if not text_path(folder, index).is_file()]
    if missing:
        raise ValueError(
            f"recording {str(folder)!r} is unfinished: {len(missing)} of {len(meta['texts'])} texts are missing; "
            "the same `speclight record` command continues it"
        )
    if "model" not in meta:
        raise ValueError(f"{folder / META} lacks model, which is needed; `speclight record --overwrite` begins anew")
    facts = meta["model"]
    empty = Recording(meta["settings"], facts["vocab_size"], facts["stop_ids"], [], facts.get("tokenizer") or "")
    texts = [_read_text(text_path(folder, index), entry, empty) for index, entry in enumerate(meta["texts"])]
    return replace(empty, texts=texts)


def _read_text(path: Path, entry: Mapping[str, Any], recording: Recording) -> RecordedText:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in ARRAYS}
        _check_arrays(found, recording)
    except Exception as error:  # of damaged bytes numpy, zipfile and zlib raise a dozen kinds
        raise ValueError(f"{path} is damaged ({error}); delete it and run the same `speclight record` again") from None
    num_prompt = int(found.pop("num_prompt"))
    return RecordedText(entry["question_id"], entry["category"], num_prompt=num_prompt, **found)


def _check_arrays(arrays: Mapping[str, NDArray[Any]], recording: Recording) -> None:
    """Raise ValueError for what is no text of this recording, naming the array."""
    for name, (dtype, axes) in ARRAYS.items():
        found = arrays[name]
        if found.dtype != dtype or found.ndim != axes:
            raise ValueError(f"{name} must be {axes}-d {np.dtype(dtype)}, got {found.ndim}-d {found.dtype}")
    token_ids, num_prompt, top_ids, top_logprobs = (arrays[name] for name in ARRAYS)
    emitted, most = len(token_ids) - int(num_prompt), recording.max_new_tokens
    if top_ids.shape != top_logprobs.shape or len(top_ids) != len(token_ids) or not top_ids.size:
        raise ValueError("its arrays do not fit each other")
    if num_prompt < 1 or not 1 <= emitted <= most:
        raise ValueError(
            f"num_prompt must be at least 1 and leave 1 to {most} of {len(token_ids)} tokens (max_new_tokens in "
            f"{META}), got {num_prompt}"
        )
    if emitted < most and token_ids[-1] not in recording.stop_ids:
        raise ValueError(f"{emitted} tokens follow the prompt, of {most}, and the last is no stop id of {META}")
    for name in ("token_ids", "top_ids"):
        least, largest = arrays[name].min(), arrays[name].max()
        if least < 0 or largest >= recording.vocab_size:
            raise ValueError(f"{name} must be from 0 to {recording.vocab_size - 1}, got {least} to {largest}")
    if not np.isfinite(top_logprobs).all():
        raise ValueError("top_logprobs must be finite")
