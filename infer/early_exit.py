"""The target drafts for itself with its first layers (HiSpec's draft stage; alone, the LayerSkip baseline).

A draft token costs a pass through layers [0, L_d) and an exit head. Their keys and values go into the target's own
cache and the residual stream is handed on, so the verification runs the layers above only.
"""

from __future__ import annotations

from collections import defaultdict
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
from .exits import CallableExit, EarlyExits, ExitHead, Prediction, Tap, at_once
from .readout import drawn
from .request import GenerationParams, Sequence
from .segments import Share, run_segments

__all__ = ["EarlyExitDrafter", "ExitHead"]


@dataclass
class _Chain:
    """A proposal under construction; hidden: per pass, the rows after the exit layer. ends: ids that end the text.

    bonus: the last of `length` tokens is drawn for its distribution only.
    """

    sequence: Sequence
    pipeline: LogitsPipeline
    length: int
    ends: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    probs: list[Distribution] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    num_run: int = 0
    bonus: bool = False

    @property
    def is_open(self) -> bool:
        return len(self.token_ids) < self.length and not (self.token_ids and self.token_ids[-1] in self.ends)


class EarlyExitDrafter(Drafter):
    """Drafts a chain of `num_tokens` at `exit_layer` (N_d and L_d; the papers' choices are 2 and L/8).

    A request may set `draft_layer`, and `draft_tokens` for the length. Nothing is drafted behind a token that ends the
    text.

    head: what gives logits at `exit_layer`. exits: what gives logits at every layer, where drafters share it. Without
        either the model's own final norm and unembedding do, which suits models that were trained with early exits.

    Raises ValueError, when it is given to an engine, for an exit layer that the model does not have.
    """

    name = "early-exit"

    def __init__(
        self, exit_layer: int, num_tokens: int = 2, head: ExitHead | None = None, exits: EarlyExits | None = None
    ) -> None:
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
        self.exit_layer, self.num_tokens = exit_layer, num_tokens
        self.exit = exits_of(exit_layer, head, exits)
        self.exits = (self.exit,)

    def attach(self, model: LayeredModel, cache: PagedKVCache) -> None:
        self.exit.check("exit_layer", self.exit_layer)
        self.model, self.cache = model, cache

    def check(self, params: GenerationParams) -> None:
        self.exit.check("draft_layer", self.depth(params))

    def taps(self, params: GenerationParams) -> frozenset[Tap]:
        return self.exit.taps(self.depth(params))

    def depth(self, params: GenerationParams) -> int:
        return self.exit_layer if params.draft_layer is None else params.draft_layer

    def default_draft_tokens(self) -> int:
        return self.num_tokens

    @torch.inference_mode()
    def propose(self, sequences: SequenceOf[Sequence]) -> list[TokenTree]:
        chains = [self._open(sequence) for sequence in sequences]
        groups: dict[int, list[_Chain]] = defaultdict(list)
        for chain in chains:
            groups[self.depth(chain.sequence.params)].append(chain)
        for layer, group in groups.items():
            self._draft(layer, group)
        return [self._tree(chain) for chain in chains]

    def _open(self, sequence: Sequence) -> _Chain:
        length, bonus = min(sequence.draft_tokens, sequence.max_depth), self.target_rule.bonus
        keep_probs, ends = not self.target_rule.lossless, sequence.params.end_ids(self.model.eos_token_ids)
        pipeline = LogitsPipeline(sequence.params, sequence.num_prompt, for_drafts=True, keep_probs=keep_probs)
        return _Chain(sequence, pipeline, length + bonus if length else 0, ends, bonus=bonus)

    def _draft(self, layer: int, chains: SequenceOf[_Chain]) -> None:
        """Make the chains, token by token. The first pass runs what each text has pending."""
        running = [(chain, chain.sequence.token_ids[chain.sequence.table.length :]) for chain in chains]
        while running := [(chain, part) for chain, part in running if chain.is_open]:
            self._draw([chain for chain, _ in running], *self._run(layer, running))
            running = [(chain, chain.token_ids[-1:]) for chain, _ in running]

    def _run(self, layer: int, running: list[tuple[_Chain, list[int]]]) -> Prediction:
        """Run each chain's next tokens through the first layers; what the exit predicts after the last of each."""
        shares = [self._share(layer, chain, part) for chain, part in running]
        batch = RaggedBatch.build([share.item for share in shares], self.cache.block_size, self.model.device)
        ran = run_segments(self.model, self.cache, shares, batch, layer)
        self.exit.work["passes"] += ran.layer_passes
        self.exit.work["draft"] += ran.layer_tokens
        self.exit.work["prefill"] += ran.prefill_layer_tokens
        for (chain, part), rows in zip(running, ran.hidden.split([len(part) for _, part in running]), strict=True):
            chain.hidden.append(rows)
            chain.num_run += len(part)
        return self.exit.predict(layer, ran.hidden, batch, [end - 1 for end in batch.cu_seqlens[1:]])

    def _share(self, layer: int, chain: _Chain, part: list[int]) -> Share:
        """What a chain runs next; other heads of its text see it on its way, this exit's in `predict`."""
        sequence = chain.sequence
        item = BatchItem(part, sequence.table.length + chain.num_run, sequence.table.blocks)
        return Share(item, taps=at_once(sequence.taps) - self.exit.taps(layer), num_before=len(part) - 1)

    def _draw(self, chains: list[_Chain], states: Tensor, logits: Tensor) -> None:
        """One token more of each chain. states: [chains, embed]; logits: [chains, vocab]."""
        generators = [chain.sequence.draft_generator for chain in chains]
        found = drawn([chain.pipeline for chain in chains], logits, generators)
        for chain, state, row, known in zip(chains, states, logits, found, strict=True):
            q = known or predicted(chain.pipeline, row, [*chain.sequence.token_ids, *chain.token_ids])
            if q is None:
                chain.length = 0
                continue
            chain.probs.append(q)
            chain.states.append(state)
            chain.token_ids.append(q.sample(chain.sequence.draft_generator))

    def _tree(self, chain: _Chain) -> TokenTree:
        root = chain.sequence.token_ids[-1]
        if not chain.hidden:
            return TokenTree.root(root)
        drafted = chain.token_ids[: chain.length - 1] if chain.bonus else chain.token_ids
        return TokenTree(
            [root, *drafted],
            range(-1, len(drafted)),
            chain.probs,
            (self.name,) * (len(drafted) + 1),
            torch.cat(chain.hidden),
            self.depth(chain.sequence.params),
            num_before=chain.sequence.num_pending - 1,
            states=torch.stack(chain.states) if chain.states else None,
        )


def exits_of(layer: int, head: ExitHead | None, exits: EarlyExits | None) -> EarlyExits:
    """What a drafter's constructor was given, as one thing."""
    if head is not None and exits is not None:
        raise ValueError("head and exits both say what gives logits: give one of them")
    if exits is not None:
        return exits
    return EarlyExits() if head is None else CallableExit(layer, head)


def predicted(pipeline: LogitsPipeline, row: Tensor, prefix: SequenceOf[int]) -> Distribution | None:
    """An exit's distribution after `prefix`; None where the request bans all that the head's vocabulary holds.

    row: [vocab] logits. Raises ValueError for those that are broken.
    """
    try:
        return pipeline(row, prefix)
    except ValueError:
        if bool(row.isnan().any()) or not bool((row == -torch.inf).any()):
            raise
        return None
