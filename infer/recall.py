"""What retrieval remembers: the continuations of n-grams, and the likely successors of tokens that the model has run.

Host data only. What outlives its text is bounded in entries, forgets first what was met longest ago, and treats what is
older than its time to live as not there. What belongs to one namespace is in no other.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

MAX_NAMESPACES = 64
"""Namespaces remembered at once; the one that was used longest ago goes first."""

MOST_COUNTED = 64
"""Continuations of an n-gram that are counted where memory is bounded; the one that was met longest ago goes first."""

Entry = tuple[float, int, dict[int, int]]
"""(time, owner, values): when it was met, in which text, and what is known."""


class Table:
    """n-gram -> entry. limit: entries kept, None keeps all. ttl: seconds after which an entry is as good as gone."""

    __slots__ = ("entries", "limit", "ttl")

    def __init__(self, limit: int | None = None, ttl: float | None = None) -> None:
        self.limit, self.ttl = limit, ttl
        self.entries: OrderedDict[tuple[int, ...], Entry] = OrderedDict()  # met longest ago first

    def __len__(self) -> int:
        return len(self.entries)

    def get(self, key: tuple[int, ...], now: float) -> Entry | None:
        found = self.entries.get(key)
        if found is None or (self.ttl is not None and now - found[0] > self.ttl):
            return None
        return found

    def put(self, key: tuple[int, ...], owner: int, values: dict[int, int], now: float) -> None:
        self.entries[key] = (now, owner, values)
        self.entries.move_to_end(key)
        if self.limit is not None and len(self.entries) > self.limit:
            self.entries.popitem(last=False)


class Lookups(ABC):
    """What an n-gram says of the token behind it."""

    @abstractmethod
    def get(self, key: tuple[int, ...], now: float) -> dict[int, int] | None:
        """{token: count} after an n-gram that is known, the latest last."""

    def longest(self, tail: tuple[int, ...], most: int, now: float) -> tuple[int, dict[int, int]]:
        """(length of the longest known suffix of `tail`, {token: count} after it); none is longer than `most`."""
        for length in range(min(most, len(tail)), 0, -1):
            found = self.get(tail[-length:], now)
            if found is not None:
                return length, found
        return 0, {}

    def after(self, token_id: int, now: float) -> dict[int, int]:
        """{token: count} of what followed one token."""
        return self.get((token_id,), now) or {}


Counts = int | dict[int, int]
"""{token: count} of what followed an n-gram, the latest last; or, as of most, the one token that did, once. That takes
little memory, and nothing that the garbage collector has to look at again and again."""


def _counted(counts: Counts, token_id: int) -> Counts:
    """With one token more."""
    if not isinstance(counts, dict):
        counts = {counts: 1}
    counts[token_id] = counts.pop(token_id, 0) + 1
    return counts


class Continuations(Lookups):
    """Which tokens followed each n-gram of up to `max_ngram` tokens, how often, and which of them last: of one text."""

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram
        self.entries: dict[tuple[int, ...], Counts] = {}

    def extend(self, token_ids: Sequence[int], start: int) -> None:
        """Take in token_ids[start:]; what stands before them is their context."""
        entries = self.entries
        for key, token_id in _ngrams(token_ids, start, self.max_ngram):
            counts = entries.get(key)
            entries[key] = token_id if counts is None else _counted(counts, token_id)

    def get(self, key: tuple[int, ...], now: float) -> dict[int, int] | None:
        found = self.entries.get(key)
        return {found: 1} if isinstance(found, int) else found


class SharedContinuations(Lookups):
    """The same of many texts. limit: n-grams kept. ttl: seconds after which one is as good as gone."""

    def __init__(self, max_ngram: int, limit: int, ttl: float | None) -> None:
        self.max_ngram, self.limit, self.ttl = max_ngram, limit, math.inf if ttl is None else ttl
        self.entries: OrderedDict[tuple[int, ...], tuple[float, Counts]] = OrderedDict()  # met longest ago first

    def extend(self, token_ids: Sequence[int], start: int, now: float) -> None:
        """Take in token_ids[start:], which were met now."""
        entries, limit, gone = self.entries, self.limit, now - self.ttl
        for key, token_id in _ngrams(token_ids, start, self.max_ngram):
            found = entries.get(key)
            if found is None:
                entries[key] = now, token_id
                if len(entries) > limit:
                    entries.popitem(last=False)
                continue
            counts = token_id if found[0] < gone else _counted(found[1], token_id)
            if isinstance(counts, dict) and len(counts) > MOST_COUNTED:
                del counts[next(iter(counts))]
            entries[key] = now, counts
            entries.move_to_end(key)

    def get(self, key: tuple[int, ...], now: float) -> dict[int, int] | None:
        found = self.entries.get(key)
        if found is None or found[0] < now - self.ttl:
            return None
        return {found[1]: 1} if isinstance(found[1], int) else found[1]


def _ngrams(token_ids: Sequence[int], start: int, most: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """(n-gram, the token behind it) of every token from `start` on, longest first."""
    for end in range(max(start, 1), len(token_ids)):
        tail, token_id = tuple(token_ids[max(end - most, 0) : end]), token_ids[end]
        for first in range(len(tail)):
            yield tail[first:], token_id


class Successors:
    """The likely next tokens after each n-gram of up to `max_order` tokens, as of when the model last ran it."""

    def __init__(self, max_order: int, limit: int | None = None, ttl: float | None = None) -> None:
        self.tables = [Table(limit, ttl) for _ in range(max_order)]

    def remember(self, tail: tuple[int, ...], likely: dict[int, int], owner: int, now: float) -> None:
        """likely: {token: class of its probability}, most likely first; tail ends with the token that they follow."""
        for order, table in enumerate(self.tables[: len(tail)], start=1):
            table.put(tail[-order:], owner, likely, now)

    def after(self, tail: tuple[int, ...], now: float) -> list[tuple[int, Entry]]:
        """(order, entry) of every suffix of `tail` that is known, longest first."""
        found: list[tuple[int, Entry]] = []
        for order in range(min(len(self.tables), len(tail)), 0, -1):
            entry = self.tables[order - 1].get(tail[-order:], now)
            if entry is not None:
                found.append((order, entry))
        return found


class Memory:
    """What the requests of one namespace share. limit: entries of each table; per length of n-gram for texts."""

    def __init__(self, max_ngram: int, max_order: int, limit: int, ttl: float | None) -> None:
        self.texts = SharedContinuations(max_ngram, limit * max_ngram, ttl)
        self.successors = Successors(max_order, limit, ttl)


class Namespaces:
    """A memory per namespace."""

    def __init__(self, max_ngram: int, max_order: int, limit: int, ttl: float | None) -> None:
        self.arguments = (max_ngram, max_order, limit, ttl)
        self.memories: OrderedDict[str, Memory] = OrderedDict()

    def of(self, namespace: str) -> Memory:
        memory = self.memories.get(namespace)
        if memory is None:
            memory = self.memories[namespace] = Memory(*self.arguments)
        self.memories.move_to_end(namespace)
        if len(self.memories) > MAX_NAMESPACES:
            self.memories.popitem(last=False)
        return memory

    def clear(self) -> None:
        self.memories.clear()


MOST_CONTINUATIONS = 4
"""Of an n-gram's continuations, the latest so many are candidates."""


def continuation_classes(order: int, counts: Mapping[int, int]) -> dict[int, int]:
    """{token: class} of an n-gram's latest continuations: a class for order, share, number and being the latest."""
    total = sum(counts.values())
    common = 24 * order + 2 * min(total - 1, 2)
    classes: dict[int, int] = {}
    for token_id in reversed(counts):
        share = counts[token_id] / total
        step = 0 if share < 0.25 else 1 if share < 0.5 else 2 if share < 0.8 else 3
        classes[token_id] = common + 6 * step + (not classes)
        if len(classes) == MOST_CONTINUATIONS:
            break
    return classes
