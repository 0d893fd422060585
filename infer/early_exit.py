"""The target drafts for itself with its first layers (HiSpec's draft stage; alone, the LayerSkip baseline).

A draft token costs a pass through layers [0, L_d) and an exit head. Their keys and values go into the target's own
cache and the residual stream is handed on, so the verification runs the layers above only.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..modules.acceptance import Distribution
from ..modules.batch import BatchItem, RaggedBatch
from ..modules.kv_cache import PagedKVCache
from ..modules.layered_model import LayeredModel
from ..modules.sampling import LogitsPipeline
from ..modules.token_tree import TokenTree
from .drafter import Drafter
from .request import Sequence

ExitHead = Callable[[Tensor], Tensor]
"""[rows, hidden] after the exit layer -> [rows, vocab] logits, -inf where the head's draft vocabulary has no token."""


@dataclass
class _Chain:
    """A proposal under construction; hidden: per pass, the rows after the exit layer."""

    sequence: Sequence
    length: int
    token_ids: list[int] = field(default_factory=list)
    probs: list[Distribution] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    num_run: int = 0


class EarlyExitDrafter(Drafter):
    """Drafts a chain of `num_tokens` at `exit_layer` (N_d and L_d; the papers' choices are 2 and L/8).

    head: the exit head there; None takes the model's own final norm and unembedding, which suits models that were
        trained with early exits.

    Raises ValueError, when it is given to an engine, for an exit layer that the model does not have.
    """

    name = "early-exit"

    def __init__(self, exit_layer: int, num_tokens: int = 2, head: ExitHead | None = None) -> None:
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
        self.exit_layer, self.num_tokens, self.head = exit_layer, num_tokens, head
        self.layer_tokens = 0

    def attach(self, model: LayeredModel, cache: PagedKVCache) -> None:
        if not 1 <= self.exit_layer <= model.num_layers:
            raise ValueError(f"exit_layer must be in [1, {model.num_layers}], got {self.exit_layer}")
        self.model, self.cache = model, cache

    def default_draft_tokens(self) -> int:
        return self.num_tokens

    @torch.inference_mode()
    def propose(self, sequences: SequenceOf[Sequence]) -> list[TokenTree]:
        chains = [_Chain(sequence, min(sequence.draft_tokens, sequence.max_depth)) for sequence in sequences]
        parts = [sequence.token_ids[sequence.table.length :] for sequence in sequences]
        running = [(chain, part) for chain, part in zip(chains, parts, strict=True) if chain.length > 0]
        while running:
            for (chain, _), row in zip(running, self._run(running), strict=True):
                self._draw(chain, row)
            running = [(chain, chain.token_ids[-1:]) for chain, _ in running if len(chain.token_ids) < chain.length]
        return [self._tree(chain) for chain in chains]

    def reset(self) -> None:
        self.layer_tokens = 0

    def _run(self, running: list[tuple[_Chain, list[int]]]) -> Tensor:
        """Run each chain's next tokens through the first layers; exit logits [chains, vocab] after the last of each."""
        items = [
            BatchItem(part, chain.sequence.table.length + chain.num_run, chain.sequence.table.blocks)
            for chain, part in running
        ]
        batch = RaggedBatch.build(items, self.cache.block_size, self.model.device)
        hidden = self.model.run(self.model.embed(batch), batch, self.cache, 0, self.exit_layer)
        self.layer_tokens += batch.num_tokens * self.exit_layer
        for (chain, part), rows in zip(running, hidden.split([len(part) for _, part in running]), strict=True):
            chain.hidden.append(rows)
            chain.num_run += len(part)
        ends = torch.tensor(batch.cu_seqlens[1:], device=hidden.device) - 1
        return (self.head or self.model.logits)(hidden.index_select(0, ends))

    def _draw(self, chain: _Chain, row: Tensor) -> None:
        sequence = chain.sequence
        q = LogitsPipeline(sequence.params, sequence.num_prompt, for_drafts=True)(
            row, [*sequence.token_ids, *chain.token_ids]
        )
        chain.probs.append(q)
        chain.token_ids.append(q.sample(sequence.draft_generator))

    def _tree(self, chain: _Chain) -> TokenTree:
        root = chain.sequence.token_ids[-1]
        if not chain.token_ids:
            return TokenTree.root(root)
        count = len(chain.token_ids) + 1
        return TokenTree(
            [root, *chain.token_ids],
            range(-1, count - 1),
            chain.probs,
            (self.name,) * count,
            torch.cat(chain.hidden),
            self.exit_layer,
            num_before=chain.sequence.num_pending - 1,
        )
