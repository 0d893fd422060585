"""Retrieval trees grown best first: LogitSpec's idea with more sources, and with estimates of what each is worth.

Candidates for a place in the tree come from the continuations of the longest n-gram that matches there, in the text
and in the namespace's other texts; from the successors that the model itself found likely when it last ran the same
token, pair or triple (token recycling, Luo et al. 2025); from the last logits, whose other candidates often come one
token later (LogitSpec, 3.2); and, where a user gives one, from a datastore (REST, He et al. 2024). `Estimates` says how
likely each is, a path is as likely as the product along it, and the likeliest path is added until the tree is full. A
place whose children could no longer get in is never looked at.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from operator import itemgetter

from ..modules.token_tree import TokenTree
from .datastore import Datastore, Matches, corpus_classes
from .drafter import Observation, likely_on_paths
from .estimates import (
    CORPUS,
    GUESS,
    NGRAM,
    OFFSETS,
    ORDERS,
    PROBABILITIES,
    PROBABILITY_BOUNDS,
    SUCCESSOR,
    Context,
    Estimates,
    Source,
)
from .readout import Likely, PromptRows
from .recall import Continuations, Entry, Namespaces, SharedContinuations, Successors, continuation_classes
from .request import Sequence

MAX_ORDER = 3
"""Longest n-gram that has successors."""
TAUGHT_BY = 8
"""Of the places that verification decides, every eighth teaches: more brings nothing that could be measured."""
BEST = 0.98
"""No candidate is taken to be likelier than this: bounds what a place can still bring."""
DEEPER = 0.88
"""In the order in which nodes are added a place counts for so much less than the one above it: what is said of it rests
on all that was said before."""


@dataclass
class Grown:
    """A tree and how it came about. tails: the last tokens up to each node; ranks: what nodes were added by, falling;
    scores: estimated probabilities of being accepted; contexts: None where nothing was looked up.
    """

    token_ids: list[int]
    tails: list[tuple[int, ...]]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    ranks: list[float] = field(default_factory=lambda: [1.0])
    scores: list[float] = field(default_factory=lambda: [1.0])
    labels: list[str] = field(default_factory=lambda: [""])
    contexts: list[Context | None] = field(default_factory=lambda: [None])
    children: list[dict[int, int]] = field(default_factory=lambda: [{}])

    def add(self, parent: int, token_id: int, rank: float, score: float, max_tail: int) -> int:
        node = len(self.token_ids)
        context = self.contexts[parent]
        assert context is not None, "a node's children come from its context"
        self.token_ids.append(token_id)
        self.tails.append((*self.tails[parent], token_id)[-max_tail:])
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.ranks.append(rank)
        self.scores.append(score)
        self.labels.append(context.label(token_id))
        self.contexts.append(None)
        self.children.append({})
        self.children[parent][token_id] = node
        return node

    def tree(self) -> TokenTree:
        return TokenTree(self.token_ids, self.parents, sources=self.labels)


@dataclass
class _State:
    """What is kept of one text. num_known: tokens in `texts` and `seen`; num_read: positions whose logits were seen.
    successors: its own, where it shares nothing.

    guesses, earlier: {token: class} of the logits that the root was drawn from, and of those before.
    """

    owner: int
    namespace: str
    texts: Continuations
    successors: Successors | None
    seen: Counter[int] = field(default_factory=Counter)
    num_known: int = 0
    num_read: int = 0
    guesses: dict[int, int] = field(default_factory=dict)
    earlier: dict[int, int] = field(default_factory=dict)
    grown: Grown | None = None
    last_places: frozenset[int] | None = None


class AdaptiveTrees:
    """Grows trees for many texts, and learns from what becomes of them.

    max_ngram: longest n-gram looked up. num_likely: likeliest tokens kept of a row of logits. shares: whether texts of
    one namespace draft for each other. limit, ttl: of what is shared, see Memory. prompt_vocab: the logits of a
    prompt's tokens are asked for if they are among the first so many. clock: seconds. datastore: drafts for all texts,
    whatever they share.
    """

    def __init__(
        self,
        max_ngram: int,
        num_likely: int,
        shares: bool,
        limit: int,
        ttl: float | None,
        prompt_vocab: int,
        clock: Callable[[], float],
        datastore: Datastore | None = None,
    ) -> None:
        self.max_ngram, self.num_likely, self.shares, self.prompt_vocab = max_ngram, num_likely, shares, prompt_vocab
        self.clock, self.estimates, self.datastore = clock, Estimates(), datastore
        self.namespaces = Namespaces(max_ngram, MAX_ORDER, limit, ttl)
        self._states: dict[int, _State] = {}
        self._owners = itertools.count()
        self.taught_by, self._decided = TAUGHT_BY, 0

    # -- what a drafter does -------------------------------------------------------------------------------------

    def tree(self, sequence: Sequence, least: float = 0.0) -> TokenTree:
        state = self._state(sequence)
        state.grown = None
        if sequence.draft_tokens <= 1 or sequence.max_depth < 1:
            return TokenTree.root(sequence.token_ids[-1])
        now = self.clock()
        self._take_in(state, sequence, now)
        if not sequence.num_tentative and state.num_read != len(sequence.token_ids) - 1:  # rows that nobody showed it
            state.guesses, state.earlier = {}, {}
        state.guesses.pop(sequence.token_ids[-1], None)
        state.grown = self.grow(state, sequence.token_ids, sequence.draft_tokens, sequence.max_depth, now, least)
        return state.grown.tree()

    def scores(self, sequence: Sequence) -> list[float]:
        """Of the nodes of its last tree, without the root; nodes that stand in another order than their scores share
        what they promise together, so that scores fall."""
        grown = self._state(sequence).grown
        return [] if grown is None else _falling(grown.scores[1:])

    def observe(self, observations: SequenceOf[Observation]) -> None:
        for seen, path in zip(observations, likely_on_paths(observations, self.num_likely), strict=True):
            self._learn(seen, _classes(path))

    def unread(self, sequence: Sequence, start: int, stop: int) -> list[int]:
        """Of each token the last place in the prompt: there it says most, and one row does for many. Rare tokens, which
        seldom come again, are left out."""
        if not self.prompt_vocab:
            return []
        state = self._state(sequence)
        if state.last_places is None:
            last = {token_id: place for place, token_id in enumerate(sequence.token_ids)}
            state.last_places = frozenset(place for token_id, place in last.items() if token_id < self.prompt_vocab)
        return [place for place in range(max(start, state.num_read), stop) if place in state.last_places]

    def read(self, sequence: Sequence, positions: SequenceOf[int], rows: PromptRows) -> None:
        state, now = self._state(sequence), self.clock()
        _, successors = self._memory(state)
        for position, likely in zip(positions, _classes(rows.likely(self.num_likely)), strict=True):
            tail = tuple(sequence.token_ids[max(position + 1 - MAX_ORDER, 0) : position + 1])
            successors.remember(tail, likely, state.owner, now)
        state.num_read = max(state.num_read, positions[-1] + 1)

    def release(self, sequence_id: int) -> None:
        self._states.pop(sequence_id, None)

    def reset(self) -> None:
        self._states.clear()
        self.namespaces.clear()
        self.estimates.reset()
        self._decided = 0

    # -- what is known -------------------------------------------------------------------------------------------

    def _state(self, sequence: Sequence) -> _State:
        state = self._states.get(sequence.sequence_id)
        if state is None:
            its_own = None if self.shares else Successors(MAX_ORDER)
            state = _State(next(self._owners), sequence.params.namespace, Continuations(self.max_ngram), its_own)
            self._states[sequence.sequence_id] = state
        return state

    def _memory(self, state: _State) -> tuple[SharedContinuations | None, Successors]:
        """(what its namespace's texts say, what the model said of their tokens); where it shares nothing of itself."""
        if state.successors is not None:
            return None, state.successors
        memory = self.namespaces.of(state.namespace)
        return memory.texts, memory.successors

    def _take_in(self, state: _State, sequence: Sequence, now: float) -> None:
        """Index what was emitted since; what is tentative is only context."""
        token_ids = sequence.token_ids[: len(sequence.token_ids) - sequence.num_tentative]
        state.texts.extend(token_ids, state.num_known)
        shared, _ = self._memory(state)
        if shared is not None:
            shared.extend(token_ids, state.num_known, now)
        state.seen.update(token_ids[state.num_known :])
        state.num_known = max(len(token_ids), state.num_known)

    def _learn(self, seen: Observation, likely: list[dict[int, int]]) -> None:
        state, sequence = self._state(seen.sequence), seen.sequence
        grown, state.grown = state.grown, None  # the next step may be drafted by another
        if grown is not None and not sequence.num_tentative:  # by what was known when it was grown
            self._settle(state, grown, seen.verdict.emitted(seen.tree))
        before = state.guesses if len(sequence.token_ids) == state.num_read + 1 else {}  # auto may have left rows out
        state.earlier = likely[-2] if len(likely) > 1 else before
        state.guesses = dict(likely[-1])
        if sequence.num_tentative:  # what an intermediate layer says of its own drafts
            return
        now, (_, successors) = self.clock(), self._memory(state)
        path = [seen.tree.token_ids[node] for node in seen.verdict.path[1:]]
        text = [*sequence.token_ids[-MAX_ORDER:], *path]
        for end, row in enumerate(likely, start=len(text) - len(path)):
            successors.remember(tuple(text[max(end - MAX_ORDER, 0) : end]), row, state.owner, now)
        state.num_read = max(state.num_read, len(sequence.token_ids) + len(path))

    def _settle(self, state: _State, grown: Grown, emitted: list[int]) -> None:
        """Teach the estimates places of the tree that were decided."""
        node, now = 0, self.clock()
        for token_id in emitted:
            self._decided += 1
            if self._decided % self.taught_by == 0:
                self.estimates.learn(grown.contexts[node] or self.context(state, grown, node, now), token_id)
            child = grown.children[node].get(token_id)
            if child is None:
                return
            node = child

    # -- growing -------------------------------------------------------------------------------------------------

    def context(self, state: _State, grown: Grown, node: int, now: float) -> Context:
        """Everything known about what follows a node."""
        tail, depth = grown.tails[node], grown.depths[node]
        parent = grown.contexts[grown.parents[node]] if node else None
        shared, successors = self._memory(state)
        order, ngram, sources = self._from_text(state, parent, tail, now)
        shared_order, others = (0, []) if shared is None else self._from_others(shared, parent, tail, now)
        records = successors.after(tail, now)
        sources += others + _record_sources(records, state.owner)
        if records and ngram:
            sources.append((NGRAM, OFFSETS["agreement"], _agreement(order, ngram, records[0][1][2])))
        if depth < 10 and state.guesses:
            sources.append((GUESS, OFFSETS["guess"] + PROBABILITIES * min(depth, 3), state.guesses))
        if depth < 2 and state.earlier:
            sources.append((GUESS, OFFSETS["earlier-guess"] + PROBABILITIES * depth, state.earlier))
        place: tuple[int, ...] = (
            OFFSETS["order"] + 6 * min(order, ORDERS - 1) + min(depth, 5),
            OFFSETS["shared-order"] + min(shared_order, ORDERS - 1),
            OFFSETS["record"] + _record_class(records, state.owner),
            OFFSETS["confidence"] + (PROBABILITIES + 1) * (depth == 0) + _confidence(records),
        )
        matches: Matches = ()
        if self.datastore is not None:
            matches, longest, source = self._from_datastore(self.datastore, parent, tail)
            place, sources = (*place, OFFSETS["corpus-order"] + longest), sources + source
        followed = state.texts.after(tail[-1], now)
        followed_by_any = {} if shared is None else shared.after(tail[-1], now)
        return Context(place, sources, order, shared_order, matches, state.seen, followed, followed_by_any)

    def _from_text(
        self, state: _State, parent: Context | None, tail: tuple[int, ...], now: float
    ) -> tuple[int, dict[int, int], list[Source]]:
        """(longest n-gram that matches in the text, classes of what followed, sources: that and the next shorter)."""
        order, counts = state.texts.longest(tail, self.max_ngram if parent is None else parent.order + 1, now)
        if not order:
            return 0, {}, []
        ngram = continuation_classes(min(order, ORDERS - 1), counts)
        sources: list[Source] = [(NGRAM, OFFSETS["ngram"], ngram)]
        shorter = state.texts.get(tail[1 - order :], now) if order > 1 else None
        if shorter is not None:
            sources.append((NGRAM, OFFSETS["backoff"], continuation_classes(min(order, ORDERS) - 1, shorter)))
        return order, ngram, sources

    def _from_others(
        self, shared: SharedContinuations, parent: Context | None, tail: tuple[int, ...], now: float
    ) -> tuple[int, list[Source]]:
        """(longest n-gram that matches in the namespace's texts, what followed it if it is longer than one token)."""
        most = self.max_ngram if parent is None else parent.shared_order + 1
        order, counts = shared.longest(tail, most, now)
        if order < 2:
            return order, []
        return order, [(NGRAM, OFFSETS["shared-ngram"], continuation_classes(min(order, ORDERS - 1), counts))]

    def _from_datastore(
        self, datastore: Datastore, parent: Context | None, tail: tuple[int, ...]
    ) -> tuple[Matches, int, list[Source]]:
        """(matches, class of the longest, source). The source comes last, so its label is on what no other knows."""
        if parent is None:
            matches = datastore.matches(tail, self.max_ngram)
        else:
            matches = datastore.extended(parent.matches, tail[-1], self.max_ngram)
        order, total, counts = datastore.continuations(matches)
        order = min(order, ORDERS - 1)
        source = [(CORPUS, OFFSETS["corpus"], corpus_classes(order, total, counts))] if counts else []
        return matches, order, source

    def grow(
        self, state: _State, token_ids: list[int], capacity: int, max_depth: int, now: float, least: float = 0.0
    ) -> Grown:
        """A tree of at most `capacity` nodes, root included, and none that is less likely than `least`. The branch and
        bound keeps the best ranks seen so far: what ranks below all of them can never get in."""
        grown = Grown([token_ids[-1]], [tuple(token_ids[-self.max_ngram :])])
        room, node = capacity - 1, 0
        waiting: list[tuple[float, int, int, int, float]] = []  # (-rank, order of arrival, parent, token, probability)
        best: list[float] = []
        ticket = itertools.count()
        while True:
            whole = grown.ranks[node] * DEEPER  # what a certain child would rank
            bound = max(best[0] if len(best) == room else 0.0, whole * least / grown.scores[node])
            if grown.depths[node] < max_depth and whole > bound:
                context = grown.contexts[node] = self.context(state, grown, node, now)
                for token_id, rank, likely in self._ranked(context, whole, bound, room):
                    heapq.heappush(waiting, (-rank, next(ticket), node, token_id, likely))
                    if len(best) < room:
                        heapq.heappush(best, rank)
                    elif rank > best[0]:
                        heapq.heapreplace(best, rank)
            if not waiting or len(grown.token_ids) == capacity:
                return grown
            negative, _, parent, token_id, likely = heapq.heappop(waiting)
            score = grown.scores[parent] * min(likely, BEST)
            node = grown.add(parent, token_id, -negative, score, self.max_ngram)
            if len(grown.token_ids) == capacity:
                return grown

    def _ranked(self, context: Context, rank: float, bound: float, most: int) -> list[tuple[int, float, float]]:
        """(token, rank, probability at this place) of the candidates above the bound, the best so many of them.

        rank: of a certain one. Each was judged as if it were alone: together they share one.
        """
        least = math.log(bound / (rank - bound)) if bound > 0.0 else -math.inf
        found = [
            (token_id, 1.0 / (1.0 + math.exp(-odds)))
            for token_id, odds in self.estimates.log_odds(context, least).items()
        ]
        share = rank / max(sum([likely for _, likely in found]), 1.0)
        ranked = [(token_id, likely * share, likely) for token_id, likely in found if likely * share > bound]
        return heapq.nlargest(most, ranked, key=itemgetter(1)) if len(ranked) > most else ranked


def _classes(rows: list[Likely]) -> list[dict[int, int]]:
    """Per row its likeliest tokens with the classes of their probabilities among themselves, likeliest first."""
    return [
        dict(zip(ids, [bisect(PROBABILITY_BOUNDS, logprob) for logprob in logprobs], strict=True))
        for ids, logprobs in rows
    ]


def _falling(scores: list[float]) -> list[float]:
    """The falling sequence that is nearest, with the same sum: neighbours that rise are replaced by their mean, until
    none do."""
    pools: list[tuple[float, int]] = []
    for score in scores:
        total, count = score, 1
        while pools and pools[-1][0] * count <= total * pools[-1][1]:
            before, size = pools.pop()
            total, count = total + before, count + size
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]


def _record_sources(records: list[tuple[int, Entry]], owner: int) -> list[Source]:
    base = OFFSETS["successor"]
    return [
        (SUCCESSOR, base + PROBABILITIES * (2 * (order - 1) + (found[1] != owner)), found[2])
        for order, found in records
    ]


def _record_class(records: list[tuple[int, Entry]], owner: int) -> int:
    """0 for none, else by the length of the n-gram it is of, and whether it is this text's."""
    return 2 * records[0][0] + (records[0][1][1] != owner) if records else 0


def _confidence(records: list[tuple[int, Entry]]) -> int:
    """The class of the best record's likeliest token."""
    return next(iter(records[0][1][2].values()), PROBABILITIES) if records else PROBABILITIES


def _agreement(order: int, ngram: dict[int, int], likely: dict[int, int]) -> dict[int, int]:
    """Classes of tokens that a match and a record both have."""
    step = 0 if order == 1 else 1 if order == 2 else 2 if order <= 4 else 3
    return {token_id: PROBABILITIES * step + likely[token_id] for token_id in ngram if token_id in likely}
