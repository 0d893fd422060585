"""LogitSpec: the last logits guess the token after next, and retrieval extends every guess (arXiv 2507.01449).

Training-free. The proposal follows from the text, what was remembered of earlier ones and the last logits, and carries
no distributions, so verifying it is exact at any temperature. Two kinds of trees: the paper's, here, and the ones that
`adaptive_tree` grows best first. Unlike in the authors' code the paper's branches are merged into a trie: a token
proposed twice at the same place is run once, and the room that saves goes to further guesses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from ..modules.kv_cache import PagedKVCache
from ..modules.layered_model import LayeredModel
from ..modules.token_tree import TokenTree
from .adaptive_tree import AdaptiveTrees
from .datastore import Datastore
from .drafter import Observation, TreeDrafter, likely_on_paths
from .intake import MAX_DRAFT_TOKENS
from .ngram_index import NgramIndex
from .readout import PromptRows
from .request import Sequence
from .stats import RETRIEVED

GUESSED = "last-logit"
"""The label of the last logits' candidates. A proposal holds a node labelled RETRIEVED exactly when a lookup whose
result had room matched."""

PROMPT_VOCAB = 8192
"""Default of `prompt_vocab`: against all 49152 of SmolLM2 it is a sixth of the cost (docs/LOG.md)."""

Tree = Literal["adaptive", "paper"]
Shared = Literal["namespace", "none"]
TREES, SHARED = get_args(Tree), get_args(Shared)


class Trees(Protocol):
    """Where a LogitSpecDrafter's trees come from; the methods are those of Drafter."""

    def tree(self, sequence: Sequence, least: float = 0.0) -> TokenTree: ...

    def scores(self, sequence: Sequence) -> list[float]: ...

    def observe(self, observations: SequenceOf[Observation]) -> None: ...

    def unread(self, sequence: Sequence, start: int, stop: int) -> list[int]: ...

    def read(self, sequence: Sequence, positions: SequenceOf[int], rows: PromptRows) -> None: ...

    def release(self, sequence_id: int) -> None: ...

    def reset(self) -> None: ...


class LogitSpecDrafter(TreeDrafter):
    """Drafts a tree from the last logits' candidates and from retrieval.

    tree: "paper", the text's continuation after the root and after each of the likely tokens that the root was not; or
        "adaptive", which adds sources, learns what each is worth, and takes the likeliest paths: see AdaptiveTrees.
    capacity: nodes of the tree, root included, where neither engine nor request says otherwise.
    k: how many of the likeliest tokens of a row of logits are candidates; the root, normally the best of the last ones,
        is passed over. 0 leaves retrieval alone. None is 60 for the paper's tree, 24 for the adaptive one.
    max_ngram: longest n-gram looked up, backing off to a single token. None is 3 and 6.
    shared: adaptive: "namespace", requests of one namespace draft from each other's texts; "none", they do not.
    remembered: adaptive: entries kept of each table that a namespace shares. ttl: seconds until one is forgotten.
    prompt_vocab: adaptive: learn from the model's logits over the prompt too, behind and as far as they are of the
        vocabulary's first so many tokens, which in most vocabularies are the frequent ones; 0 does not. Each of these
        tokens' last place in the prompt costs an unembedding of so many rows.
    datastore: adaptive: a corpus to draft from as well, the same for all requests, whatever they share.
    retrieved: paper: tokens taken after a match.
    prune: paper: ((rank, length), ...) with rising ranks: a guess up to that rank keeps `length` tokens, itself
        included, and one beyond the last rank only itself. Ranks are indices among the k, so with the root at 0 the
        first guess has rank 1. What follows the root itself is not pruned.
    clock: what `ttl` goes by.

    Raises ValueError naming the argument and what would be valid.
    """

    name = "logitspec"
    retrieves = True

    def __init__(
        self,
        k: int | None = None,
        capacity: int = 64,
        max_ngram: int | None = None,
        retrieved: int = 20,
        prune: SequenceOf[SequenceOf[int]] = ((8, 4), (32, 3)),
        tree: Tree = "adaptive",
        shared: Shared = "namespace",
        remembered: int = 20_000,
        ttl: float = 3600.0,
        prompt_vocab: int = PROMPT_VOCAB,
        datastore: Datastore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, choice, valid in (("tree", tree, TREES), ("shared", shared, SHARED)):
            if choice not in valid:
                raise ValueError(f"{name} must be one of {', '.join(valid)}, got {choice!r}")
        k_default, ngram_default = (60, 3) if tree == "paper" else (24, 6)
        self.k = self.num_likely = k_default if k is None else k
        self.max_ngram = ngram_default if max_ngram is None else max_ngram
        for name, value, least in (
            ("max_ngram", self.max_ngram, 1),
            ("retrieved", retrieved, 1),
            ("remembered", remembered, 1),
            ("prompt_vocab", prompt_vocab, 0),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        for name, value, least in (("capacity", capacity, 1), ("k", self.k, 0)):
            if not least <= value <= MAX_DRAFT_TOKENS:
                raise ValueError(f"{name} must be from {least} to {MAX_DRAFT_TOKENS}, got {value}")
        if not ttl > 0:
            raise ValueError(f"ttl must be above 0 seconds, got {ttl}")
        if datastore is not None and tree != "adaptive":
            raise ValueError(f"tree must be 'adaptive' for a datastore, got {tree!r}")
        self.has_estimates = tree == "adaptive"
        self.capacity, self.retrieved, self.datastore, self.prompt_vocab = capacity, retrieved, datastore, prompt_vocab
        lengths = _branch_lengths(prune, self.k)
        self._trees: Trees = (
            PaperTrees(self.k, self.max_ngram, retrieved, lengths)
            if tree == "paper"
            else AdaptiveTrees(
                self.max_ngram, self.k, shared == "namespace", remembered, ttl, prompt_vocab, clock, datastore
            )
        )

    def attach(self, model: LayeredModel, cache: PagedKVCache) -> None:
        if self.datastore is not None:
            self.datastore.check_vocabulary("datastore", model.vocab_size)

    def default_draft_tokens(self) -> int:
        return self.capacity

    def propose(self, sequences: SequenceOf[Sequence]) -> list[TokenTree]:
        return [self._trees.tree(sequence) for sequence in sequences]

    def scored(self, sequences: SequenceOf[Sequence], least: float = 0.0) -> list[tuple[TokenTree, SequenceOf[float]]]:
        return [(self._trees.tree(sequence, least), self._trees.scores(sequence)) for sequence in sequences]

    def observe(self, observations: SequenceOf[Observation]) -> None:
        self._trees.observe(observations)

    def unread(self, sequence: Sequence, start: int, stop: int) -> SequenceOf[int]:
        return self._trees.unread(sequence, start, stop)

    def read(self, sequence: Sequence, positions: SequenceOf[int], rows: PromptRows) -> None:
        self._trees.read(sequence, positions, rows)

    def release(self, sequence_id: int) -> None:
        self._trees.release(sequence_id)

    def reset(self) -> None:
        self._trees.reset()


@dataclass
class _State:
    """What is kept of one sequence. ranked: the most likely ids of the logits its last token came from, best first."""

    index: NgramIndex
    ranked: list[int] = field(default_factory=list)


class PaperTrees:
    """The paper's: nothing is shared between texts, and nothing is learned. branch_lengths: tokens kept, by rank."""

    def __init__(self, k: int, max_ngram: int, retrieved: int, branch_lengths: SequenceOf[int]) -> None:
        self.k, self.max_ngram, self.retrieved, self.branch_lengths = k, max_ngram, retrieved, branch_lengths
        self._states: dict[int, _State] = {}

    def scores(self, sequence: Sequence) -> list[float]:
        raise ValueError("tree must be 'adaptive' where estimates are needed, got 'paper'")

    def observe(self, observations: SequenceOf[Observation]) -> None:
        """Keep the best ids of the logits that the next root was drawn from."""
        for seen, path in zip(observations, likely_on_paths(observations, self.k), strict=True):
            self._state(seen.sequence).ranked, _ = path[-1]

    def unread(self, sequence: Sequence, start: int, stop: int) -> list[int]:
        return []

    def read(self, sequence: Sequence, positions: SequenceOf[int], rows: PromptRows) -> None:
        raise AssertionError("nothing was asked for")

    def release(self, sequence_id: int) -> None:
        self._states.pop(sequence_id, None)

    def reset(self) -> None:
        self._states.clear()

    def _state(self, sequence: Sequence) -> _State:
        state = self._states.get(sequence.sequence_id)
        if state is None:
            state = self._states[sequence.sequence_id] = _State(NgramIndex(self.max_ngram, self.retrieved))
        return state

    def tree(self, sequence: Sequence, least: float = 0.0) -> TokenTree:
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
