"""A second, smaller model drafts a chain by decoding ahead (Leviathan et al. 2023).

It keeps a paged cache of its own. Every drafted token carries the very distribution it was drawn from, so the
acceptance rule is exact whatever the draft's temperature or vocabulary is.
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
from .drafter import Drafter
from .memory import DRAFT_SHARE, blocks_within
from .request import Sequence

MAX_TEXTS = 64
"""Full contexts that the draft's cache holds by default, where memory allows."""


@dataclass
class _State:
    """The draft's view of one sequence. ahead: tokens run behind `table.length`, not known to be committed yet."""

    table: CacheTable
    pipeline: LogitsPipeline
    ahead: list[int] = field(default_factory=list)


@dataclass
class _Chain:
    """A proposal under construction. run: tokens of root and drafts already in the draft's cache behind the text."""

    sequence: Sequence
    state: _State
    length: int
    token_ids: list[int] = field(default_factory=list)
    probs: list[Distribution] = field(default_factory=list)


class DraftModelDrafter(Drafter):
    """model: the draft, with the target's tokenizer; its vocabulary may be padded differently.

    num_tokens: chain length. draft_temperature: replaces the request's temperature when drafting, None keeps it.
    num_blocks: size of the draft's cache, None for a tenth of the free memory; sequences that find no room there are
        not drafted for. max_batch_tokens: the draft reads prompts in chunks of at most this many tokens.
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
        if num_tokens < 0:
            raise ValueError(f"num_tokens must be at least 0, got {num_tokens}")
        self.model, self.num_tokens, self.draft_temperature = model, num_tokens, draft_temperature
        self.max_batch_tokens = max_batch_tokens
        num_blocks = num_blocks or blocks_within(model, block_size, MAX_TEXTS, share=DRAFT_SHARE)
        self.cache = model.new_cache(num_blocks, block_size)
        self.vocab_size = model.vocab_size
        self._states: dict[int, _State] = {}

    def attach(self, model: LayeredModel, cache: PagedKVCache) -> None:
        """Draft only ids that both vocabularies have: they may be padded to different sizes."""
        self.vocab_size = min(model.vocab_size, self.model.vocab_size)

    def default_draft_tokens(self) -> int:
        return self.num_tokens

    @torch.inference_mode()
    def propose(self, sequences: SequenceOf[Sequence]) -> list[TokenTree]:
        chains = [chain for chain in map(self._begin, sequences) if chain is not None]
        rows = self._catch_up(chains)
        open_chains = chains
        while open_chains:
            for chain, row in zip(open_chains, rows, strict=True):
                self._draw(chain, row)
            open_chains = [chain for chain in open_chains if len(chain.token_ids) < chain.length]
            rows = self._run(open_chains, [chain.token_ids[-1:] for chain in open_chains])
        drafted = {chain.sequence.sequence_id: chain for chain in chains}
        return [self._tree(sequence, drafted.get(sequence.sequence_id)) for sequence in sequences]

    def release(self, sequence_id: int) -> None:
        state = self._states.pop(sequence_id, None)
        if state is not None:
            self.cache.release(state.table)

    def reset(self) -> None:
        self.cache.allocator.forget_idle()

    def _begin(self, sequence: Sequence) -> _Chain | None:
        """Settle what the last proposal left and reserve room; None when there is nothing it can draft with."""
        state = self._states.get(sequence.sequence_id) or self._new_state(sequence)
        self._settle(state, sequence.token_ids)
        room = self.model.max_positions - len(sequence.token_ids) + 1  # the last draft is not run
        length = min(sequence.draft_tokens, sequence.max_depth, room)
        unread = sequence.token_ids[state.table.length :]
        known = max(unread) < self.model.vocab_size  # a padded id of the target alone means nothing to the draft
        if length < 1 or not known or not self.cache.reserve(state.table, len(unread) + length - 1):
            return None
        return _Chain(sequence, state, length)

    def _new_state(self, sequence: Sequence) -> _State:
        params = sequence.params
        if self.draft_temperature is not None:
            params = replace(params, temperature=self.draft_temperature)
        pipeline = LogitsPipeline(params, sequence.num_prompt, for_drafts=True)
        state = _State(CacheTable(params.namespace), pipeline)
        self.cache.match_prefix(state.table, sequence.token_ids)
        self._states[sequence.sequence_id] = state
        return state

    def _settle(self, state: _State, token_ids: SequenceOf[int]) -> None:
        """Keep of the tokens run ahead those that became text."""
        kept = 0
        while kept < len(state.ahead) and state.table.length + kept < len(token_ids) - 1:
            if state.ahead[kept] != token_ids[state.table.length + kept]:
                break
            kept += 1
        self.cache.commit([(state.table, range(kept))])
        self.cache.index_full_blocks(state.table, token_ids)
        state.ahead.clear()

    def _catch_up(self, chains: list[_Chain]) -> list[Tensor]:
        """Run the text each chain's cache lacks, in chunks; returns the logits row after each chain's root."""
        rows: dict[int, Tensor] = {}
        waiting = list(range(len(chains)))
        while waiting:
            share = max(1, self.max_batch_tokens // len(waiting))
            parts = []
            for index in waiting:
                chain = chains[index]
                start = chain.state.table.length + len(chain.state.ahead)
                parts.append(chain.sequence.token_ids[start : start + share])
            new = self._run([chains[index] for index in waiting], parts)
            rows.update(zip(waiting, new, strict=True))
            waiting = [i for i in waiting if _unread(chains[i])]
        return [rows[index] for index in range(len(chains))]

    def _run(self, chains: list[_Chain], parts: list[list[int]]) -> list[Tensor]:
        """Run more tokens of each chain; returns the logits row after the last of each."""
        if not chains:
            return []
        items = []
        for chain, part in zip(chains, parts, strict=True):
            table = chain.state.table
            items.append(BatchItem(part, table.length + len(chain.state.ahead), table.blocks))
        batch = RaggedBatch.build(items, self.cache.block_size, self.model.device)
        hidden = self.model.run(self.model.embed(batch), batch, self.cache, 0, self.model.num_layers)
        for chain, part in zip(chains, parts, strict=True):  # only now: what failed to run must not count as cached
            chain.state.ahead.extend(part)
        ends = torch.tensor(batch.cu_seqlens[1:], device=hidden.device) - 1
        return list(self.model.logits(hidden.index_select(0, ends))[:, : self.vocab_size])

    def _draw(self, chain: _Chain, row: Tensor) -> None:
        prefix = [*chain.sequence.token_ids, *chain.token_ids]
        q = chain.state.pipeline(row, prefix)
        chain.probs.append(q)
        chain.token_ids.append(q.sample(chain.sequence.draft_generator))

    def _tree(self, sequence: Sequence, chain: _Chain | None) -> TokenTree:
        root = sequence.token_ids[-1]
        return (
            TokenTree.root(root) if chain is None else TokenTree.chain([root, *chain.token_ids], chain.probs, self.name)
        )


def _unread(chain: _Chain) -> int:
    """Tokens of the text that the draft has not run."""
    return len(chain.sequence.token_ids) - chain.state.table.length - len(chain.state.ahead)
