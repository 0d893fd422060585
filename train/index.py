"""`speclight index`: make a datastore of texts, for LogitSpec's adaptive trees to draft from (REST, arXiv 2311.08252).

What to draft from is the user's choice: documents that answers quote, code that they continue, earlier answers of the
same model. Rows are those that training reads, tokenised alike. The model is named for its tokenizer only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..infer.build import option

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .documents import Document

ROUNDS = 4
"""Of sorting, as `Datastore.build` reports them."""


@dataclass(kw_only=True)
class IndexOptions:
    """What to make a datastore of, and where it goes."""

    model: str = option(..., "hub id, folder or .gguf file whose tokenizer is used; its weights are not read")
    data: tuple[str, ...] = option(..., "rows as for training: .jsonl, .parquet, folders, data set names", nargs="+")
    output: str = option(..., "folder; --logitspec.datastore takes it")
    max_tokens: int = option(50_000_000, "tokens stored; what comes behind them is left out, and that is said")
    chat_template: str | None = option(None, "file with a Jinja chat template, instead of the tokenizer's own")
    cache_dir: str | None = option(None, "where converted GGUF files are kept (~/.cache/speclight)")
    trust_remote_code: bool = option(False, "run code that comes with the tokenizer")
    overwrite: bool = option(False, "replace the datastore that is in the folder")


def index(options: IndexOptions) -> None:
    """Write the datastore and say what it holds. Raises ValueError for whatever is not valid."""
    from ..infer.datastore import MAX_TOKENS, check_output
    from ..infer.files import read_text
    from ..infer.loading import load_tokenizer
    from ..infer.sources import find_model
    from .data import end_tokens, read_documents

    if not 1 <= options.max_tokens <= MAX_TOKENS:
        raise ValueError(f"max_tokens must be from 1 to {MAX_TOKENS}, got {options.max_tokens}")
    check_output(Path(options.output).expanduser(), options.overwrite)
    source = find_model(options.model, False, options.trust_remote_code, options.cache_dir)
    tokenizer = load_tokenizer(source)
    if options.chat_template is not None:
        tokenizer.chat_template = read_text("chat_template", options.chat_template)
    documents = read_documents(list(options.data), tokenizer, end_tokens(source, tokenizer))
    texts, is_cut = _take(documents, options.max_tokens)
    if not texts:
        raise ValueError(f"data must hold a text of at least two tokens; {', '.join(options.data)} has none")
    _write(options, texts, tokenizer, is_cut)


def _take(documents: Iterable[Document], limit: int) -> tuple[list[NDArray[Any]], bool]:
    """(token ids by document, whether anything was left out behind `limit` tokens).

    A document of one token, such as an empty text with its end, has nothing to follow and does not count.
    """
    import numpy as np
    from tqdm import tqdm

    texts: list[NDArray[Any]] = []
    room = limit
    for document in tqdm(documents, unit="document", disable=None):
        if len(document.token_ids) > room:
            return [*texts, np.array(document.token_ids[:room], np.uint32)] if room else texts, True
        if len(document.token_ids) > 1:
            texts.append(np.array(document.token_ids, np.uint32))
            room -= len(document.token_ids)
    return texts, False


def _write(options: IndexOptions, texts: Sequence[NDArray[Any]], tokenizer: Any, is_cut: bool) -> None:
    from tqdm import tqdm

    from ..infer.datastore import Datastore
    from ..infer.loading import tokenizer_fingerprint

    vocab_size = max(tokenizer.get_vocab().values()) + 1
    name = Path(options.model).name
    with tqdm(total=ROUNDS, unit="round", desc="sorting", disable=None) as bar:
        store = Datastore.build(texts, vocab_size, tokenizer_fingerprint(tokenizer), name, bar.update)
    size = store.save(options.output, options.overwrite)
    held = f"{store.num_tokens} tokens of {store.num_documents} documents, {size} bytes"
    left_out = f"; max_tokens {options.max_tokens} was reached, the rest is left out" if is_cut else ""
    print(f"speclight: {options.output}: {held}{left_out}", file=sys.stderr)
