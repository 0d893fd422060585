"""LogitSpec: the last logits guess the token after next, and retrieval extends every guess (arXiv 2507.01449).

Training-free. The proposal follows from the text and the last logits alone and carries no distributions, so verifying
it is exact at any temperature. Unlike the authors' code the branches are merged into a trie: a token proposed twice at
the same place is run once, and the room that saves goes to further guesses.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch

from ..modules.token_tree import TokenTree
from .drafter import Drafter, Observation
from .ngram_index import NgramIndex
from .request import Sequence

RETRIEVED, GUESSED = "ngram", "last-logit"
"""Labels of nodes. A proposal holds a retrieved one exactly when a lookup whose result had room matched."""


@dataclass
class _State:
    """What is kept of one sequence. ranked: the most likely ids of the logits its last token came from, best first."""

    index: NgramIndex
    ranked: list[int] = field(default_factory=list)


class LogitSpecDrafter(Drafter):
    """Drafts a tree: the text's continuation after the root, and after each of the likely tokens that the root was not.

    k: how many of the last logits' best tokens are candidates for the token after next; the root, normally the best
        of them, is passed over. 0 leaves retrieval alone.
    capacity: nodes of the tree, root included, where neither engine nor request says otherwise.
    max_ngram: longest n-gram looked up, backing off to a single token. retrieved: tokens taken after a match.
    prune: ((rank, length), ...) with rising ranks: a guess up to that rank keeps `length` tokens, itself included, and
        one beyond the last rank only itself. Ranks are indices among the k, so with the root at 0 the first guess has
        rank 1. What follows the root itself is not pruned.

    Raises ValueError naming the argument and what would be valid.
    """

    name = "logitspec"
    retrieves = True

    def __init__(
        self,
        k: int = 60,
        capacity: int = 64,
        max_ngram: int = 3,
        retrieved: int = 20,
        prune: SequenceOf[SequenceOf[int]] = ((8, 4), (32, 3)),
    ) -> None:
        for name, value, least in (("k", k, 0), ("capacity", capacity, 1), ("retrieved", retrieved, 1)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        self.k, self.capacity, self.max_ngram, self.retrieved = k, capacity, max_ngram, retrieved
        self.branch_lengths = _branch_lengths(prune, k)
        NgramIndex(max_ngram, retrieved)  # refuses a wrong max_ngram now, not at the first proposal
        self._states: dict[int, _State] = {}

    def default_draft_tokens(self) -> int:
        return self.capacity

    def propose(self, sequences: SequenceOf[Sequence]) -> list[TokenTree]:
        return [self._tree(sequence) for sequence in sequences]

    def observe(self, observations: SequenceOf[Observation]) -> None:
        """Keep the best ids of the logits that the next root was drawn from: one top-k, one transfer for all rows."""
        rows = torch.stack([seen.logits[seen.verdict.path[-1]] for seen in observations])
        ranked = rows.topk(min(self.k, rows.shape[-1])).indices.tolist()
        for seen, token_ids in zip(observations, ranked, strict=True):
            self._state(seen.sequence).ranked = token_ids

    def release(self, sequence_id: int) -> None:
        self._states.pop(sequence_id, None)

    def reset(self) -> None:
        self._states.clear()

    def _state(self, sequence: Sequence) -> _State:
        state = self._states.get(sequence.sequence_id)
        if state is None:
            state = self._states[sequence.sequence_id] = _State(NgramIndex(self.max_ngram, self.retrieved))
        return state

    def _tree(self, sequence: Sequence) -> TokenTree:
        trie = _Trie(sequence.token_ids[-1], sequence.draft_tokens)
        if trie.is_full or sequence.max_depth < 1:
            return trie.tree()
        state = self._state(sequence)
        state.index.extend(sequence.token_ids[: -1 - sequence.num_tentative])  # as the paper's, the pool lacks the root
        for token_ids, num_guessed in self._branches(state, sequence.token_ids[-self.max_ngram :]):
            trie.add(token_ids[: sequence.max_depth], num_guessed)
            if trie.is_full:
                break
        return trie.tree()

    def _branches(self, state: _State, context: list[int]) -> Iterator[tuple[list[int], int]]:
        """(tokens below the root, how many of them were guessed), most promising first; context ends with the root."""
        yield state.index.lookup(context), 0
        for token_id, length in zip(state.ranked, self.branch_lengths, strict=False):
            if token_id != context[-1]:
                found = state.index.lookup([*context, token_id], length - 1) if length > 1 else []
                yield [token_id, *found], 1


class _Trie:
    """A token tree under construction, of at most `capacity` nodes; equal beginnings share their nodes."""

    def __init__(self, root: int, capacity: int) -> None:
        self.capacity = capacity
        self.token_ids, self.parents, self.sources = [root], [-1], [""]
        self.nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node

    @property
    def is_full(self) -> bool:
        return len(self.token_ids) >= self.capacity

    def add(self, token_ids: list[int], num_guessed: int) -> None:
        """Merge in a branch below the root, as far as there is room. A node that is there keeps its label."""
        node = 0
        for depth, token_id in enumerate(token_ids):
            child = self.nodes.get((node, token_id))
            if child is None:
                if self.is_full:
                    return
                child = self.nodes[node, token_id] = len(self.token_ids)
                self.token_ids.append(token_id)
                self.parents.append(node)
                self.sources.append(GUESSED if depth < num_guessed else RETRIEVED)
            node = child

    def tree(self) -> TokenTree:
        return TokenTree(self.token_ids, self.parents, sources=self.sources)


def _branch_lengths(prune: SequenceOf[SequenceOf[int]], k: int) -> list[int]:
    """Per rank 0 ... k - 1 the tokens a branch keeps, the guessed one included."""
    valid = all(len(pair) == 2 and pair[0] >= 0 and pair[1] >= 1 for pair in prune)
    ranks = [pair[0] for pair in prune]
    if not valid or ranks != sorted(set(ranks)):
        raise ValueError(f"prune must be (rank, length) pairs, ranks rising and lengths at least 1, got {prune!r}")
    return [next((length for last, length in prune if rank <= last), 1) for rank in range(k)]
