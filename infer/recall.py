"""What retrieval remembers: the continuations of n-grams, and the likely successors of tokens the model has run.

Host data only, plain dictionaries. A table that outlives its text is bounded in entries, forgets the least recently
written first, and treats what is older than its time to live as not there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

BUCKETS = 16
"""Classes of a probability: by its log-odds, in steps of 0.75 from -7.25 on."""


def bucket_of(logprob: float) -> int:
    """The class of a probability given as its logarithm."""
    rest = -math.expm1(min(logprob, -1e-6))
    return max(min(int((logprob - math.log(rest) + 7.25) / 0.75), BUCKETS - 1), 0)


class Table:
    """A dictionary with an owner and a time per entry. limit: entries kept; None keeps all. ttl: seconds, or None."""

    __slots__ = ("entries", "limit", "ttl")

    def __init__(self, limit: int | None = None, ttl: float | None = None) -> None:
        self.limit, self.ttl = limit, ttl
        self.entries: dict[tuple[int, ...], tuple[float, int, dict[int, int]]] = {}  # oldest first

    def __len__(self) -> int:
        return len(self.entries)

    def get(self, key: tuple[int, ...], now: float) -> tuple[float, int, dict[int, int]] | None:
        """(time, owner, values); None for what is not there or has expired."""
        found = self.entries.get(key)
        if found is not None and self.ttl is not None and now - found[0] > self.ttl:
            return None
        return found

    def put(self, key: tuple[int, ...], owner: int, values: dict[int, int], now: float) -> None:
        entries = self.entries
        entries.pop(key, None)
        entries[key] = (now, owner, values)
        if self.limit is not None and len(entries) > self.limit:
            del entries[next(iter(entries))]


class Continuations:
    """Which tokens followed each n-gram of up to `max_ngram` tokens, how often, and which last."""

    def __init__(self, max_ngram: int, limit: int | None = None, ttl: float | None = None) -> None:
        self.max_ngram, self.table = max_ngram, Table(limit, ttl)

    def extend(self, token_ids: Sequence[int], start: int, owner: int, now: float) -> None:
        """Take in token_ids[start:]; what stands before them is their context."""
        table = self.table
        for end in range(max(start, 1), len(token_ids)):
            token_id = token_ids[end]
            tail = tuple(token_ids[max(end - self.max_ngram, 0) : end])
            for first in range(len(tail)):
                found = table.get(tail[first:], now)
                counts = {} if found is None else found[2]
                counts[token_id] = counts.pop(token_id, 0) + 1  # the latest stands last
                table.put(tail[first:], owner, counts, now)


class Successors:
    """The likely next tokens after each n-gram of up to `max_order` tokens, as the model had them when it ran it last."""

    def __init__(self, max_order: int, limit: int | None = None, ttl: float | None = None) -> None:
        self.max_order = max_order
        self.tables = [Table(limit, ttl) for _ in range(max_order)]

    def remember(self, tail: tuple[int, ...], likely: Mapping[int, int], owner: int, now: float) -> None:
        """likely: {token: bucket}, most likely first; tail ends with the token that they may follow."""
        values = dict(likely)
        for order in range(1, min(self.max_order, len(tail)) + 1):
            self.tables[order - 1].put(tail[-order:], owner, values, now)
