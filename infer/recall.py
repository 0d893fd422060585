"""What retrieval remembers: the continuations of n-grams, and the likely successors of tokens that the model has run.

Host data only. What outlives its text is bounded in entries, forgets first what was met longest ago, and treats what is
older than its time to live as not there. What belongs to one namespace is in no other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

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

    @property
    def is_bounded(self) -> bool:
        return self.limit is not None or self.ttl is not None

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


class Continuations:
    """Which tokens followed each n-gram of up to `max_ngram` tokens, how often, and which of them last."""

    def __init__(self, max_ngram: int, limit: int | None = None, ttl: float | None = None) -> None:
        self.max_ngram, self.table = max_ngram, Table(limit, ttl)

    def extend(self, token_ids: Sequence[int], start: int, owner: int, now: float) -> None:
        """Take in token_ids[start:]; what stands before them is their context."""
        is_bounded = self.table.is_bounded
        for end in range(max(start, 1), len(token_ids)):
            token_id = token_ids[end]
            tail = tuple(token_ids[max(end - self.max_ngram, 0) : end])
            for first in range(len(tail)):
                key = tail[first:]
                found = self.table.get(key, now)
                if found is None:
                    self.table.put(key, owner, {token_id: 1}, now)
                    continue
                counts = found[2]
                counts[token_id] = counts.pop(token_id, 0) + 1  # the latest stands last
                if is_bounded:  # when it was met counts
                    if len(counts) > MOST_COUNTED:
                        del counts[next(iter(counts))]
                    self.table.put(key, owner, counts, now)

    def longest(self, tail: tuple[int, ...], most: int, now: float) -> tuple[int, dict[int, int]]:
        """(length of the longest known suffix of `tail`, {token: count} after it); none is longer than `most`."""
        for length in range(min(most, len(tail)), 0, -1):
            found = self.table.get(tail[-length:], now)
            if found is not None:
                return length, found[2]
        return 0, {}

    def after(self, token_id: int, now: float) -> Mapping[int, int]:
        """{token: count} of what followed one token."""
        found = self.table.get((token_id,), now)
        return {} if found is None else found[2]


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
        found = ((order, self.tables[order - 1].get(tail[-order:], now)) for order in range(len(self.tables), 0, -1))
        return [(order, entry) for order, entry in found if entry is not None and order <= len(tail)]


class Memory:
    """What the requests of one namespace share. limit: entries of each table; per length of n-gram for texts."""

    def __init__(self, max_ngram: int, max_order: int, limit: int | None = None, ttl: float | None = None) -> None:
        self.texts = Continuations(max_ngram, None if limit is None else limit * max_ngram, ttl)
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
