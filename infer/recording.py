"""Recordings of plain greedy decoding: what drafters can be evaluated on without a model.

A folder of one .npz file per text, so that an interrupted run keeps what it has, and meta.json, which says how they
were made and which texts belong to it. Only numbers are stored: reading never unpickles.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .files import replace_file
from .summary import group_of

META, FORMAT = "meta.json", 1


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
    """Raises ValueError for a folder that holds no recording."""
    path = folder / META
    if not path.is_file():
        raise ValueError(f"recording {str(folder)!r} has no {META}; `speclight record` makes one")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT or "texts" not in meta or "settings" not in meta:
        raise ValueError(f"{path} is no recording of format {FORMAT}")
    return meta


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
    texts = [_read_text(text_path(folder, index), entry) for index, entry in enumerate(meta["texts"])]
    facts = meta["model"]
    return Recording(meta["settings"], facts["vocab_size"], facts["stop_ids"], texts, facts.get("tokenizer", ""))


def _read_text(path: Path, entry: Mapping[str, Any]) -> RecordedText:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            text = RecordedText(
                entry["question_id"],
                entry["category"],
                arrays["token_ids"],
                int(arrays["num_prompt"]),
                arrays["top_ids"],
                arrays["top_logprobs"],
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it and run the same `speclight record` again") from None
    rows = len(text.token_ids)
    if not 0 < text.num_prompt <= rows or text.top_ids.shape != text.top_logprobs.shape or len(text.top_ids) != rows:
        raise ValueError(f"{path} is damaged: its arrays do not fit each other")
    return text
