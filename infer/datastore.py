"""Which tokens followed this n-gram in a corpus? A persisted datastore of exact matches (REST, arXiv 2311.08252).

    tokens.npy         the documents' token ids one after the other, each document ended by an id that no token has
    suffixes.npy       where suffixes of documents begin, in the order of their first `DEPTH` tokens: a suffix array
    datastore.json     format version, the tokenizer's fingerprint, sizes
    SHA256SUMS         of all three, as `sha256sum -c` reads it

The places where an n-gram occurs are neighbours in the suffix array, found by bisection, and so are those among them
that go on alike. Both arrays are mapped into memory, not read into it. Nothing is ever added: a datastore belongs to
whoever built it, not to requests. REST's draft trees are left out: matches are one more source of `AdaptiveTrees`.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..modules.bundle import replaced_folder
from ..modules.checksums import SUMS, check_sums, sums_file
from .estimates import CORPUS_CLASSES

FORMAT, FORMAT_VERSION = "speclight datastore", 1
TOKENS, SUFFIXES, INDEX = "tokens.npy", "suffixes.npy", "datastore.json"
DATA = (TOKENS, SUFFIXES, INDEX)

DEPTH = 16
"""Tokens that suffixes are sorted by. A match can have one less: behind it, what follows must still be in order."""
SAMPLE = 32
"""Occurrences of a match that are looked at, evenly spaced in the suffix array, so in proportion to what follows."""
MOST_CONTINUATIONS = 8
"""Of what follows them, the most frequent so many tokens are candidates."""
MAX_TOKENS = 2**31

Matches = tuple[tuple[int, int], ...]
"""`((0, 900), (17, 60), (20, 22))`: by length, from none on, the [first, last) of the suffix array that begin with a
text's last tokens. It ends with the longest that occurs."""


@dataclass(frozen=True, eq=False)
class Datastore:
    """A corpus that can be looked up.

    tokens: [tokens + documents] ids, uint16 or uint32; `end` behind each document, and above every token's id.
    suffixes: [tokens] uint32 places in `tokens`. tokenizer: fingerprint of the one that made them. model: its name.
    """

    tokens: NDArray[Any]
    suffixes: NDArray[np.uint32]
    end: int
    tokenizer: str = ""
    model: str = ""
    _views: tuple[memoryview, memoryview] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # memoryviews give Python's integers, several times as fast as arrays give theirs
        object.__setattr__(self, "_views", (self.tokens.data, self.suffixes.data))

    @property
    def num_tokens(self) -> int:
        return len(self.suffixes)

    @property
    def num_documents(self) -> int:
        return len(self.tokens) - len(self.suffixes)

    @classmethod
    def build(
        cls,
        documents: Sequence[Sequence[int] | NDArray[Any]],
        vocab_size: int,
        tokenizer: str = "",
        model: str = "",
        progress: Callable[[], object] = lambda: None,
    ) -> Datastore:
        """Of token ids below `vocab_size`. progress is called after each of four rounds of sorting, which need about
        55 bytes a token. Raises ValueError for documents without a token, and for more than 2**31 tokens."""
        dtype = np.uint16 if vocab_size <= np.iinfo(np.uint16).max else np.uint32
        end = np.array([vocab_size], dtype)
        parts = [part for ids in documents if len(ids) for part in (np.asarray(ids), end)]
        if not parts:
            raise ValueError("a datastore needs at least one token, and the documents have none")
        largest = max(int(part.max()) for part in parts[::2])
        if largest >= vocab_size:
            raise ValueError(f"token ids of a datastore must be below {vocab_size}, got {largest}")
        tokens = np.concatenate(parts).astype(dtype)
        if len(tokens) > MAX_TOKENS:
            raise ValueError(f"a datastore holds up to {MAX_TOKENS} tokens and document ends, got {len(tokens)}")
        order = sort_suffixes(tokens, progress)
        return cls(tokens, order[: len(order) - len(parts) // 2].astype(np.uint32), vocab_size, tokenizer, model)

    # -- lookups ---------------------------------------------------------------------------------------------------

    def matches(self, tail: Sequence[int], max_ngram: int) -> Matches:
        """Of the last tokens of a text, up to `max_ngram` of them and up to DEPTH - 1."""
        found: Matches = ((0, len(self.suffixes)),)
        for token_id in tail[-max_ngram:]:
            found = self.extended(found, token_id, max_ngram)
        return found

    def extended(self, matches: Matches, token_id: int, max_ngram: int) -> Matches:
        """Those of the text with one more token. Two bisections for each length that matched."""
        found = [(0, len(self.suffixes))]
        if token_id < self.end:  # a padded vocabulary has ids that no tokenizer makes
            for order, (first, last) in enumerate(matches[: min(max_ngram, DEPTH - 1)]):
                first, last = self._narrowed(first, last, order, token_id)
                if first == last:
                    break
                found.append((first, last))
        return tuple(found)

    def continuations(self, matches: Matches) -> tuple[int, int, dict[int, int]]:
        """(tokens of the longest match that something follows, how often it does, {token: count in a sample of that}).

        The most frequent tokens come first. (0, 0, {}) where nothing matches.
        """
        tokens, suffixes = self._views
        for order in range(len(matches) - 1, 0, -1):
            first, last = matches[order]
            if tokens[suffixes[last - 1] + order] == self.end:  # the highest id, so the last in order
                last = self._narrowed(first, last, order, self.end)[0]
            total = last - first
            if total:
                size = min(total, SAMPLE)
                places = (suffixes[first + step * total // size] for step in range(size))
                counts = Counter(tokens[place + order] for place in places)
                return order, total, dict(counts.most_common(MOST_CONTINUATIONS))
        return 0, 0, {}

    def _narrowed(self, first: int, last: int, order: int, token_id: int) -> tuple[int, int]:
        """The part of [first, last) that has the token at index `order` of its suffixes, which agree before that."""
        tokens, suffixes = self._views

        def at(place: int) -> int:
            return tokens[place + order]

        first = bisect_left(suffixes, token_id, first, last, key=at)
        if first == last or at(suffixes[first]) != token_id:
            return first, first
        return first, bisect_right(suffixes, token_id, first, last, key=at)

    # -- on disk ---------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path, overwrite: bool = False) -> int:
        """Write the folder, which appears under its name only when complete; returns its bytes.

        overwrite: replace a datastore that is there. Anything else that is there is never replaced.

        Raises ValueError when the folder exists and may not be replaced.
        """
        target = Path(folder).expanduser().resolve()
        check_output(target, overwrite)
        with replaced_folder(target) as new:
            np.save(new / TOKENS, self.tokens, allow_pickle=False)
            np.save(new / SUFFIXES, self.suffixes, allow_pickle=False)
            (new / INDEX).write_text(json.dumps(self._index(), indent=2) + "\n", encoding="utf-8")
            (new / SUMS).write_bytes(sums_file(_digests(new)))
            return sum(path.stat().st_size for path in new.iterdir())

    def _index(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "model": self.model,
            "tokenizer": self.tokenizer,
            "end": self.end,
            "depth": DEPTH,
            "tokens": self.num_tokens,
            "documents": self.num_documents,
        }

    @classmethod
    def load(cls, folder: str | Path) -> Datastore:
        """Check a folder, which reads it once, and map it into memory.

        Raises ValueError for a folder that is no datastore, a format of the future, a missing file, a changed byte.
        """
        folder = Path(folder).expanduser()
        index = _checked_index(folder)
        try:
            tokens, suffixes = (np.load(folder / name, "r", allow_pickle=False) for name in (TOKENS, SUFFIXES))
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(f"datastore {str(folder)!r} cannot be read: {error}") from error
        _check_arrays(folder, index, tokens, suffixes)
        return cls(np.asarray(tokens), np.asarray(suffixes), index["end"], index["tokenizer"], index["model"])

    def check_tokenizer(self, where: str, tokenizer: str, vocab_size: int) -> None:
        """Raise ValueError, naming both fingerprints, for another tokenizer, and for ids that the model has not.

        where: begins the message. vocab_size: of the model's embedding.
        """
        if tokenizer != self.tokenizer:
            raise ValueError(
                f"{where} belongs to another tokenizer: it was made with {self.tokenizer} ({self.model}), this one is "
                f"{tokenizer}; build it again with this model's"
            )
        self.check_vocabulary(where, vocab_size)

    def check_vocabulary(self, where: str, vocab_size: int) -> None:
        """Raise ValueError for ids that a model has not."""
        largest = int(self.tokens[self.suffixes[-1]])  # in order, so the last begins with it
        if largest >= vocab_size:
            raise ValueError(f"{where} holds token id {largest}; this model has ids from 0 to {vocab_size - 1}")


def sort_suffixes(tokens: NDArray[Any], progress: Callable[[], object] = lambda: None) -> NDArray[np.int64]:
    """[tokens] places in the order of the DEPTH ids that begin there; equal ones in order of place.

    Prefix doubling (Manber and Myers 1993) up to DEPTH: ranks by w ids, here and w places on, are ranks by 2 w.
    """
    ranks, width = tokens.astype(np.int64), 1
    while True:
        following = np.zeros_like(ranks)  # past the end comes what is less than any id
        following[:-width] = ranks[width:] + 1
        keys = ranks * (int(ranks.max()) + 2) + following
        order = np.argsort(keys, kind="stable")
        progress()
        width *= 2
        if width >= DEPTH:
            return order
        keys = keys[order]
        ranks[order] = np.concatenate(([0], np.cumsum(keys[1:] != keys[:-1])))


def corpus_classes(order: int, total: int, counts: Mapping[int, int]) -> dict[int, int]:
    """{token: class} of a match's continuations: a class for its length, its occurrences and the token's share of the
    sample; likeliest first."""
    often = 0 if total == 1 else 1 if total < 4 else 2 if total < 16 else 3
    common, size = CORPUS_CLASSES * order + 5 * often, min(total, SAMPLE)
    return {token_id: common + sum(count >= size * share for share in SHARES) for token_id, count in counts.items()}


SHARES = (0.1, 0.25, 0.5, 0.8)
"""Where classes of shares part."""


# --- what a folder must be ----------------------------------------------------------------------------------------


def check_output(folder: Path, overwrite: bool) -> None:
    """Raise ValueError for a folder that may not be written: any that holds something, but a datastore to overwrite.

    Also for one that cannot be made.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output {str(folder)!r} is a file; it must be a folder")
    whole = folder.resolve()
    parent = next((path for path in whole.parents if path.exists()), whole)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"output folder {str(folder)!r} cannot be made: {str(parent)!r} is no folder to write into")
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    others = sorted(present - {*DATA, SUMS}) or sorted(present if INDEX not in present else ())
    if others:
        found, held = ", ".join(others[:3]), "more than a datastore" if INDEX in present else "no datastore"
        raise ValueError(f"output folder {str(folder)!r} is not empty and holds {held} ({found}); choose another")
    if present and not overwrite:
        raise ValueError(
            f"output folder {str(folder)!r} holds a datastore; choose another, or --overwrite to replace it"
        )


def _checked_index(folder: Path) -> dict[str, Any]:
    """datastore.json, of a folder whose every byte is as it was written."""
    where = f"datastore {str(folder)!r}"
    if not (folder / INDEX).is_file():
        raise ValueError(f"{where} is not one: it has no {INDEX}; `speclight index` makes one")
    for name in (*DATA, SUMS):
        if not (folder / name).is_file():
            raise ValueError(f"{where} is incomplete: it has no {name}; build it again")
    index: Any = None
    with suppress(ValueError, RecursionError):  # what is no JSON differs from its sum
        index = json.loads((folder / INDEX).read_bytes())
    version = index.get("version") if isinstance(index, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise ValueError(f"{where} has format version {version}; this speclight reads up to {FORMAT_VERSION}")
    check_sums(where, _digests(folder), (folder / SUMS).read_bytes(), "build it again")
    kinds = {"model": str, "tokenizer": str, "end": int, "depth": int, "tokens": int, "documents": int}
    known = isinstance(index, dict) and index.get("format") == FORMAT and index.get("depth") == DEPTH
    if not known or not all(isinstance(index.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(f"{INDEX} of {where} is not that of a {FORMAT}, version {FORMAT_VERSION}")
    return index


def _digests(folder: Path) -> dict[str, str]:
    digests = {}
    for name in DATA:
        with (folder / name).open("rb") as file:
            digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _check_arrays(folder: Path, index: Mapping[str, Any], tokens: NDArray[Any], suffixes: NDArray[Any]) -> None:
    """What lookups rely on, beside the order: no id or place that leads outside."""
    num_tokens, end = index["tokens"], index["end"]
    fits = (
        num_tokens > 0
        and tokens.shape == (num_tokens + index["documents"],)
        and suffixes.shape == (num_tokens,)
        and tokens.dtype in (np.uint16, np.uint32)
        and suffixes.dtype == np.uint32
        and tokens[-1] == end == tokens.max()
        and suffixes.max() < len(tokens)
    )
    if not fits:
        raise ValueError(f"{TOKENS} and {SUFFIXES} of datastore {str(folder)!r} do not fit each other")
