"""Prompt lookup: continue as the text did after the last n-gram's earlier occurrence. The retrieval baseline.

The semantics are those of transformers' PromptLookupCandidateGenerator, but for two things that change no text: drafts
may hold an end-of-sequence id (the engine stops at it), and forbidden tokens are left to the verification.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Literal, get_args

from ..modules.token_tree import TokenTree
from .drafter import Drafter
from .intake import MAX_DRAFT_TOKENS
from .ngram_index import NgramIndex
from .request import Sequence
from .stats import RETRIEVED

Match = Literal["first", "last"]


class PromptLookupDrafter(Drafter):
    """Drafts a chain of `num_tokens` tokens after the longest match of 1 to `max_ngram` tokens.

    match: of several occurrences of the same n-gram, "first" takes the earliest, as transformers does; "last" takes the
    latest that `num_tokens` tokens follow, or the earliest if none is that long.

    Raises ValueError naming the argument and what would be valid.
    """

    name = "prompt-lookup"
    retrieves = True

    def __init__(self, num_tokens: int = 10, max_ngram: int = 3, match: Match = "first") -> None:
        if not 1 <= num_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"num_tokens must be from 1 to {MAX_DRAFT_TOKENS}, got {num_tokens}")
        if match not in get_args(Match):
            raise ValueError(f"match must be one of {', '.join(get_args(Match))}, got {match!r}")
        self.num_tokens, self.max_ngram, self.match = num_tokens, max_ngram, match
        self._new_index()  # refuses a wrong max_ngram now, not at the first proposal
        self._indices: dict[int, NgramIndex] = {}

    def default_draft_tokens(self) -> int:
        return self.num_tokens

    def propose(self, sequences: SequenceOf[Sequence]) -> list[TokenTree]:
        return [self._chain(sequence) for sequence in sequences]

    def release(self, sequence_id: int) -> None:
        self._indices.pop(sequence_id, None)

    def reset(self) -> None:
        self._indices.clear()

    def _chain(self, sequence: Sequence) -> TokenTree:
        token_ids = sequence.token_ids
        index = self._indices.get(sequence.sequence_id)
        if index is None:
            index = self._indices[sequence.sequence_id] = self._new_index()
        index.extend(token_ids[: len(token_ids) - sequence.num_tentative])
        length = max(min(sequence.draft_tokens, sequence.max_depth), 0)
        return TokenTree.chain([token_ids[-1], *index.lookup(token_ids[-self.max_ngram :], length)], source=RETRIEVED)

    def _new_index(self) -> NgramIndex:
        return NgramIndex(self.max_ngram, self.num_tokens if self.match == "last" else None)
