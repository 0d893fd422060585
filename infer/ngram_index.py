"""Where did these tokens last occur, and what followed? An index over one sequence that grows with it (LogitSpec, 3).

Host logic without tensors. Matching is exact; nothing is shared between sequences.
"""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """Maps every n-gram of up to `max_ngram` tokens to one of its occurrences that something follows.

    Which one is a function of the tokens alone, however they arrived: what a pool would hold that stores the next
    `span` tokens of every occurrence, from left to right, and replaces an entry by one at least as long. That is the
    latest occurrence that `span` tokens follow, or the first, which most tokens follow, while there is none. With span
    None it is always the first.

    Costs 2 * max_ngram dictionary writes a token: only the end of an occurrence is stored, and an occurrence takes over
    at the moment when it has become long enough.
    """

    def __init__(self, max_ngram: int = 3, span: int | None = 20) -> None:
        if max_ngram < 1:
            raise ValueError(f"max_ngram must be at least 1, got {max_ngram}")
        if span is not None and span < 1:
            raise ValueError(f"span must be at least 1 or None, got {span}")
        self.max_ngram, self.span = max_ngram, span
        self._token_ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> position after the chosen occurrence

    def __len__(self) -> int:
        """Number of tokens indexed."""
        return len(self._token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the whole sequence; what was indexed before must be its beginning and is not looked at again."""
        start = len(self._token_ids)
        assert len(token_ids) >= start, "a committed sequence only grows"
        self._token_ids.extend(token_ids[start:])
        for end in range(start, len(token_ids)):  # the token at `end` is the first to follow the n-grams that end there
            for ngram in self._ngrams_before(end):
                self._ends.setdefault(ngram, end)
            settled = end + 1 - self.span if self.span is not None else 0
            for ngram in self._ngrams_before(settled):
                self._ends[ngram] = settled

    def lookup(self, context_tail: Sequence[int], limit: int | None = None) -> list[int]:
        """What followed the longest suffix of `context_tail` that is known: up to `span` tokens, or up to `limit`.

        Backs off from max_ngram tokens to one, and is empty if not even the last token has occurred with something
        behind it: the end of the sequence never matches itself.
        """
        tail = tuple(context_tail[-self.max_ngram :])
        for start in range(len(tail)):
            end = self._ends.get(tail[start:])
            if end is not None:
                length = self.span if limit is None else limit
                return self._token_ids[end : None if length is None else end + length]
        return []

    def _ngrams_before(self, end: int) -> list[tuple[int, ...]]:
        """The n-grams whose last token is the one before position `end`; none where the sequence is too short."""
        return [tuple(self._token_ids[start:end]) for start in range(max(end - self.max_ngram, 0), end)]
