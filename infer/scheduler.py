"""Which sequences run in the next pass, and with how many tokens. Host logic: no tensors, no model.

Sequences run in order of arrival, but texts of one request wait until the first has put their prompt into the cache,
and let others pass. When blocks are short the youngest gives its own back and returns to the head of the queue; its
text so far is run again later, so nothing is lost and no request fails. Decoding sequences always run; what is left of
the token budget goes to prefill, in chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..modules.kv_cache import PagedKVCache
from .request import Sequence


@dataclass(frozen=True)
class Scheduled:
    """One sequence's share of a pass: its next `num_tokens` pending tokens, a proposal besides."""

    sequence: Sequence
    num_tokens: int

    @property
    def reaches_root(self) -> bool:
        """Whether the pass gives the logits that the sequence's next token is drawn from."""
        return self.num_tokens == self.sequence.num_pending


class Scheduler:
    """Owns the queues and every sequence's block table.

    max_num_seqs: sequences in one pass. max_batch_tokens: tokens of a pass beyond which prefill is chunked; drafts and
    decoding are never cut by it, so a sequence's text does not depend on its neighbours.
    bounds(sequence) -> (draft_tokens, max_depth) for its next proposal; scratch(sequence) -> slots to reserve
    behind its pending tokens. start(sequence, texts): called before its prefix is looked up; may replace its empty
    table. texts: sequences that will run, this one included.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        max_num_seqs: int,
        max_batch_tokens: int,
        bounds: Callable[[Sequence], tuple[int, int]],
        scratch: Callable[[Sequence], int] = lambda sequence: sequence.draft_tokens,
        start: Callable[[Sequence, int], None] = lambda sequence, texts: None,
    ) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("max_batch_tokens", max_batch_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.cache, self.max_num_seqs, self.max_batch_tokens = cache, max_num_seqs, max_batch_tokens
        self.bounds, self.scratch, self.start = bounds, scratch, start
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or cancelled sequence out and give its blocks back."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.cache.release(sequence.table)

    def schedule(self) -> list[Scheduled]:
        """The next pass; room for every token in it, proposals included, is reserved. Empty only without sequences."""
        self._admit()
        plan: list[Scheduled] = []
        decoding = [sequence for sequence in self.running if sequence.num_pending == 1]
        for sequence in decoding:
            if sequence in self.running and self._reserve(sequence, 1, plan):
                plan.append(Scheduled(sequence, 1))
        budget = max(self.max_batch_tokens - len(plan), 1)
        for sequence in [s for s in self.running if s.num_pending > 1]:
            count = min(sequence.num_pending, budget)
            if count and sequence in self.running and self._reserve(sequence, count, plan):
                plan.append(Scheduled(sequence, count))
                budget -= count
        return plan

    def _admit(self) -> None:
        """Start waiting sequences while blocks for all prompts under way would still be free."""
        filling = {sequence.request_id for sequence in self.running if self._fills_cache(sequence)}
        for sequence in list(self.waiting) if len(self.running) < self.max_num_seqs else ():
            if sequence.request_id in filling:
                continue
            self.start(sequence, min(len(self.running) + len(self.waiting), self.max_num_seqs))
            cached = self.cache.match_prefix(sequence.table, sequence.token_ids)
            promised = sum(self.cache.missing_blocks(s.table, s.num_pending) for s in (*self.running, sequence))
            if self.running and promised > self.cache.allocator.num_available:
                self.cache.release(sequence.table)  # a sequence that waits holds nothing
                return
            sequence.stats.cached_tokens += cached
            self.waiting.remove(sequence)
            self.running.append(sequence)
            if self._fills_cache(sequence):
                filling.add(sequence.request_id)
            if len(self.running) == self.max_num_seqs:
                return

    def _fills_cache(self, sequence: Sequence) -> bool:
        """Whether it is about to run blocks of its prompt, for other texts of its request to find in the cache."""
        size = self.cache.block_size
        shared = (sequence.num_prompt - 1) // size * size
        return self.cache.prefix_caching and sequence.params.n > 1 and sequence.table.length < shared

    def _reserve(self, sequence: Sequence, count: int, plan: list[Scheduled]) -> bool:
        """Hold room for `count` tokens and a proposal, preempting the younger; False if it had to give way itself."""
        drafts = count == sequence.num_pending and sequence.num_emitted > 0  # after preemption too, for seeds
        sequence.draft_tokens, sequence.max_depth = self.bounds(sequence) if drafts else (0, 0)
        while not self.cache.reserve(sequence.table, count + self.scratch(sequence)):
            victim = self._youngest_but(plan)
            if victim is not sequence:
                self.preempt(victim)
            elif len(self.running) > 1:
                self.preempt(sequence)
                return False
            else:  # alone in the pool: a smaller proposal, and with none it fits, or it would not have been accepted
                assert sequence.draft_tokens > 0, "a sequence does not fit into the whole cache"
                sequence.draft_tokens -= 1
        return True

    def _youngest_but(self, plan: list[Scheduled]) -> Sequence:
        planned = {item.sequence.sequence_id for item in plan}
        return next(s for s in reversed(self.running) if s.sequence_id not in planned)

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; it will run its text again from the front of the queue."""
        self.running.remove(sequence)
        self.cache.release(sequence.table)
        sequence.stats.preemptions += 1
        self.waiting.appendleft(sequence)
