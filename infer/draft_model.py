"""A second, smaller model drafts a chain by decoding ahead (Leviathan et al. 2023).

It keeps a paged cache of its own. Every drafted token carries the very distribution it was drawn from, so the
acceptance rule is exact whatever the draft's temperature or vocabulary is.

The law of a text never depends on what is drafted, but which text a seed gives does. So a seeded text is drafted for
whatever runs beside it: where the cache is short others give up their room, and the draft reads their texts again when
their turn comes; and where drafting fails for one, the others are drafted for as if it were not there.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..modules.acceptance import Distribution
from ..modules.batch import BatchItem, RaggedBatch
from ..modules.kv_cache import CacheTable, PagedKVCache
from ..modules.layered_model import LayeredModel
from ..modules.sampling import LogitsPipeline
from ..modules.token_tree import TokenTree
from ..modules.transfer import to_device
from .drafter import Drafter, SomeFailed
from .intake import MAX_DRAFT_TOKENS
from .memory import DRAFT_SHARE, blocks_within
from .readout import drawn
from .request import Sequence

MAX_TEXTS = 64
"""Full contexts that the draft's cache holds by default, where memory allows."""


@dataclass
class _State:
    """The draft's view of one sequence.

    ahead: tokens run behind `table.length`, not known to be committed yet. seeded: whether drafts shape its text.
    has_failed: drafting for it has, so that it is tried apart from others.
    """

    table: CacheTable
    pipeline: LogitsPipeline
    seeded: bool
    ahead: list[int] = field(default_factory=list)
    has_failed: bool = False


@dataclass
class _Chain:
    """A proposal under construction. bonus: the last of `length` tokens is drawn for its distribution only."""

    sequence: Sequence
    state: _State
    length: int
    bonus: bool = False
    token_ids: list[int] = field(default_factory=list)
    probs: list[Distribution] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)


_Rows = tuple[Tensor, Tensor]
"""[chains, embed] states and [chains, vocab] logits after a token of each."""


class DraftModelDrafter(Drafter):
    """model: the draft, with the target's tokenizer; its vocabulary may be padded differently.

    num_tokens: chain length. draft_temperature: replaces the request's temperature when drafting, None keeps it.
    num_blocks: size of the draft's cache, None for a tenth of the free memory. Sequences that find no room there are
        not drafted for, unless they are sampled with a seed: those take turns, which costs time. A text longer than the
        whole cache is not drafted for beyond that length.
    max_batch_tokens: the draft reads prompts in chunks of at most this many tokens.

    A seed gives another text where drafting fails at one time and not at another (memory of a device that others use),
    and where rounding decides between tokens, as it may when other texts share a pass.
    """

    name = "draft-model"

    def __init__(
        self,
        model: LayeredModel,
        num_tokens: int = 5,
        draft_temperature: float | None = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_batch_tokens: int = 512,
    ) -> None:
        if not 0 <= num_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"num_tokens must be from 0 to {MAX_DRAFT_TOKENS}, got {num_tokens}")
        self.model, self.num_tokens, self.draft_temperature = model, num_tokens, draft_temperature
        self.max_batch_tokens = max_batch_tokens
        if num_blocks is None:
            num_blocks = blocks_within(model, block_size, MAX_TEXTS, share=DRAFT_SHARE)
        self.cache = model.new_cache(num_blocks, block_size)
        self.vocab_size = model.vocab_size
        self._states: dict[int, _State] = {}

    def attach(self, model: LayeredModel, cache: PagedKVCache) -> None:
        """Draft only ids that both vocabularies have: they may be padded to different sizes."""
        if model.graphs is not None and model is not self.model:
            self.model.record_passes(self.cache, model.graphs.record)
        self.vocab_size = min(model.vocab_size, self.model.vocab_size)

    def default_draft_tokens(self) -> int:
        return self.num_tokens

    @torch.inference_mode()
    def propose(self, sequences: SequenceOf[Sequence]) -> list[TokenTree]:
        """Raises SomeFailed, with the proposals of the others, where drafting fails for a sequence even alone."""
        outcomes: dict[int, TokenTree | Exception] = {}
        waiting = sorted(sequences, key=lambda sequence: not self._state(sequence).seeded)
        while waiting:
            chains, without = self._next_group(waiting)
            outcomes |= self._tried(chains) if chains else {}
            outcomes |= {s.sequence_id: TokenTree.root(s.token_ids[-1]) for s in without}
            waiting = [sequence for sequence in waiting if sequence.sequence_id not in outcomes]
        ordered = [outcomes[sequence.sequence_id] for sequence in sequences]
        trees = [outcome for outcome in ordered if isinstance(outcome, TokenTree)]
        if len(trees) < len(ordered):
            raise SomeFailed(ordered)
        return trees

    def release(self, sequence_id: int) -> None:
        state = self._states.pop(sequence_id, None)
        if state is not None:
            self.cache.release(state.table)

    def reset(self) -> None:
        self.cache.allocator.forget_idle()

    def _next_group(self, sequences: SequenceOf[Sequence]) -> tuple[list[_Chain], list[Sequence]]:
        """From the front: proposals to make in one go, for which there is room; and sequences that get none."""
        chains: list[_Chain] = []
        without: list[Sequence] = []
        for sequence in sequences:
            state = self._state(sequence)
            if chains and (state.has_failed or chains[-1].state.has_failed):
                break
            chain = self._begin(sequence, state)
            if chain is not None and not self._reserve(chain, chains):
                if state.seeded and chains:
                    break  # its turn comes when these are done
                chain = None
            if chain is None:
                without.append(sequence)
            else:
                chains.append(chain)
        return chains, without

    def _state(self, sequence: Sequence) -> _State:
        state = self._states.get(sequence.sequence_id)
        if state is None:
            params = sequence.params
            seeded = params.is_seeded
            if self.draft_temperature is not None:
                params = replace(params, temperature=self.draft_temperature)
            keep_probs = not self.target_rule.lossless
            pipeline = LogitsPipeline(params, sequence.num_prompt, for_drafts=True, keep_probs=keep_probs)
            state = self._states[sequence.sequence_id] = _State(CacheTable(params.namespace), pipeline, seeded)
        return state

    def _begin(self, sequence: Sequence, state: _State) -> _Chain | None:
        """Settle what the last proposal left; None when there is nothing it can draft with."""
        self._settle(state, sequence)
        if not state.table.blocks:
            certain = len(sequence.token_ids) - sequence.num_tentative
            self.cache.match_prefix(state.table, sequence.token_ids[: certain + 1])  # never the last of these
        room = self.model.max_positions - len(sequence.token_ids) + 1  # the last draft is not run
        length = min(sequence.draft_tokens, sequence.max_depth, room)
        bonus = self.target_rule.bonus and 1 <= length < room
        known = max(sequence.token_ids[state.table.length :]) < self.model.vocab_size  # not a padded id of the target's
        return _Chain(sequence, state, length + bonus, bonus) if length >= 1 and known else None

    def _reserve(self, chain: _Chain, others: SequenceOf[_Chain]) -> bool:
        """Hold room for the text and the drafts but the last; a seeded text may take it from all but `others`."""
        table = chain.state.table
        needed = len(chain.sequence.token_ids) - table.length + chain.length - 1
        if chain.state.seeded:
            kept = {id(chain.state), *(id(other.state) for other in others)}
            givers = sorted((s for s in self._states.values() if id(s) not in kept), key=lambda state: state.seeded)
            while givers and self.cache.missing_blocks(table, needed) > self.cache.allocator.num_available:
                giver = givers.pop(0)
                self.cache.release(giver.table)
                giver.ahead.clear()
        return self.cache.reserve(table, needed)

    def _tried(self, chains: list[_Chain]) -> dict[int, TokenTree | Exception]:
        """The proposals; where that fails, each is made alone, as if nothing had been tried."""
        before = [chain.sequence.draft_generator.get_state() for chain in chains]
        try:
            self._draft(chains)
        except Exception as error:
            for chain, generator in zip(chains, before, strict=True):
                chain.sequence.draft_generator.set_state(generator)
            if len(chains) == 1:
                chains[0].state.has_failed = True
                return {chains[0].sequence.sequence_id: error}
            return {key: outcome for chain in chains for key, outcome in self._tried([self._anew(chain)]).items()}
        return {chain.sequence.sequence_id: self._tree(chain) for chain in chains}

    def _anew(self, chain: _Chain) -> _Chain:
        self._settle(chain.state, chain.sequence)
        again = _Chain(chain.sequence, chain.state, chain.length, chain.bonus)
        reserved = self._reserve(again, ())
        assert reserved, "it had this room before"
        return again

    def _draft(self, chains: list[_Chain]) -> None:
        open_chains, rows = chains, self._catch_up(chains)
        while True:
            self._draw(open_chains, *rows)
            open_chains = [chain for chain in open_chains if len(chain.token_ids) < chain.length]
            if not open_chains:
                return
            rows = self._run(open_chains, [chain.token_ids[-1:] for chain in open_chains])

    def _settle(self, state: _State, sequence: Sequence) -> None:
        """Commit of the tokens run ahead those that became text, and keep those that are still tentative."""
        start, text = state.table.length, sequence.token_ids[:-1]
        kept = 0
        while kept < len(state.ahead) and start + kept < len(text) and state.ahead[kept] == text[start + kept]:
            kept += 1
        certain = max(min(kept, len(sequence.token_ids) - sequence.num_tentative - start), 0)
        tentative = state.ahead[certain:kept]
        keep = self.cache.keep if tentative else self.cache.commit  # which gives blocks back
        keep([(state.table, range(certain))])
        self.cache.index_full_blocks(state.table, sequence.token_ids)
        state.ahead[:] = tentative

    def _catch_up(self, chains: list[_Chain]) -> _Rows:
        """Run the text each chain's cache lacks, in chunks; returns the rows after each chain's root."""
        rows: dict[int, tuple[Tensor, Tensor]] = {}
        waiting = list(range(len(chains)))
        while waiting:
            share = max(1, self.max_batch_tokens // len(waiting))
            parts = []
            for index in waiting:
                chain = chains[index]
                start = chain.state.table.length + len(chain.state.ahead)
                parts.append(chain.sequence.token_ids[start : start + share])
            new = self._run([chains[index] for index in waiting], parts)
            rows.update(zip(waiting, zip(*new, strict=True), strict=True))
            still = [i for i in waiting if _unread(chains[i])]
            if not still and len(waiting) == len(chains):
                return new
            waiting = still
        states, logits = zip(*(rows[index] for index in range(len(chains))), strict=True)
        return torch.stack(states), torch.stack(logits)

    def _run(self, chains: list[_Chain], parts: list[list[int]]) -> _Rows:
        """Run more tokens of each chain; returns the rows after the last of each."""
        items = []
        for chain, part in zip(chains, parts, strict=True):
            table = chain.state.table
            items.append(BatchItem(part, table.length + len(chain.state.ahead), table.blocks))
        batch = RaggedBatch.build(items, self.cache.block_size, self.model.device)
        hidden = self.model.run(self.model.embed(batch), batch, self.cache, 0, self.model.num_layers)
        for chain, part in zip(chains, parts, strict=True):  # only now: what failed to run must not count as cached
            chain.state.ahead.extend(part)
        ends = to_device([end - 1 for end in batch.cu_seqlens[1:]], hidden.device)
        states = self.model.final(hidden.index_select(0, ends))
        return states, self.model.unembed(states)[:, : self.vocab_size]

    def _draw(self, chains: list[_Chain], states: Tensor, logits: Tensor) -> None:
        """One token more of each chain."""
        generators = [chain.sequence.draft_generator for chain in chains]
        found = drawn([chain.state.pipeline for chain in chains], logits, generators)
        for chain, state, row, known in zip(chains, states, logits, found, strict=True):
            q = known or chain.state.pipeline(row, [*chain.sequence.token_ids, *chain.token_ids])
            chain.probs.append(q)
            chain.states.append(state)
            chain.token_ids.append(q.sample(chain.sequence.draft_generator))

    def _tree(self, chain: _Chain) -> TokenTree:
        drafted = chain.token_ids[:-1] if chain.bonus else chain.token_ids
        token_ids = [chain.sequence.token_ids[-1], *drafted]
        return TokenTree.chain(token_ids, chain.probs, self.name, torch.stack(chain.states) if chain.states else None)


def _unread(chain: _Chain) -> int:
    """Tokens of the text that the draft has not run."""
    return len(chain.sequence.token_ids) - chain.state.table.length - len(chain.state.ahead)
