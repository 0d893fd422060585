"""`speclight tokenizer`: train a small byte-level BPE tokenizer on texts, for a model that is trained from scratch.

Every text has tokens, since the alphabet is all bytes. Texts begin with nothing and end with `</s>`; a chat is written
with `<|user|>`, `<|assistant|>` and `<|system|>`, and an assistant's turn ends with `</s>`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..infer.build import option
from ..infer.files import read_text

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
ROLES = ("system", "user", "assistant")
SPECIAL = (PAD, BOS, EOS, *(f"<|{role}|>" for role in ROLES))
BYTES = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(kw_only=True)
class TokenizerOptions:
    """What to learn from, and what to make."""

    input: tuple[str, ...] = option(..., "rows as for training (.jsonl, .parquet, folders, data sets), .txt", nargs="+")
    output: str = option(..., "folder; LayerSkipModule takes it as its tokenizer")
    vocab_size: int = option(4096, f"tokens, the {BYTES} bytes and {len(SPECIAL)} special ones among them")
    min_frequency: int = option(2, "how often a pair of tokens must be seen to become one")
    overwrite: bool = option(False, "replace what is in the folder")


def tokenizer(options: TokenizerOptions) -> None:
    """Raises ValueError for what is not valid."""
    folder = Path(options.output).expanduser()
    if options.vocab_size < BYTES + len(SPECIAL):
        raise ValueError(f"vocab_size must be at least {BYTES + len(SPECIAL)}, got {options.vocab_size}")
    if options.min_frequency < 1:
        raise ValueError(f"min_frequency must be at least 1, got {options.min_frequency}")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output {options.output!r} is a file; it must be a folder")
    if folder.exists() and any(folder.iterdir()) and not options.overwrite:
        raise ValueError(f"output {options.output!r} is not empty; choose another folder, or --overwrite")
    trained = train_tokenizer(texts_of(options.input), options.vocab_size, options.min_frequency)
    trained.save_pretrained(folder)
    short = "" if len(trained) == options.vocab_size else "; there was no more to learn from these texts"
    print(f"speclight: {folder}: {len(trained)} tokens{short}", file=sys.stderr)


def train_tokenizer(texts: Iterator[str], vocab_size: int, min_frequency: int = 2) -> Any:
    """A transformers tokenizer with an end token, a chat template and the roles' tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=min_frequency,
            special_tokens=list(SPECIAL),
            initial_alphabet=alphabet,
            show_progress=sys.stderr.isatty(),
        ),
    )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, pad_token=PAD)
    made.chat_template = CHAT_TEMPLATE
    return made


def texts_of(sources: Sequence[str]) -> Iterator[str]:
    """The texts of all rows. Raises ValueError naming file, line and field for one that has none."""
    from .documents import Source, read_rows

    for source in sources:
        if source.endswith(".txt"):
            yield from read_text("input", Path(source).expanduser()).splitlines(keepends=True)
            continue
        for where, row in read_rows(Source(source)):
            yield from _row_texts(where, row)


def _row_texts(where: str, row: dict[str, Any]) -> list[str]:
    from .documents import check_text

    messages, contents = row.get("messages"), list[Any]()
    if isinstance(messages, list):
        contents = [message.get("content") if isinstance(message, dict) else None for message in messages]
    else:
        contents = [row[name] for name in ("text", "prompt", "completion") if name in row]
    if not contents or not all(isinstance(text, str) for text in contents):
        raise ValueError(f"{where}: a row needs text, messages, or prompt and completion, as strings")
    for text in contents:
        check_text(f"{where}: a text", text)
    return contents
