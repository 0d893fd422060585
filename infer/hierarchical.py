"""HiSpec: an intermediate layer verifies drafts and proposes its own chain to the full model (arXiv 2510.01336).

A drafter that wraps a drafter. In rounds, the inner one proposes, layers up to L_i run what it did not, and the
acceptance rule verifies against the intermediate's distribution p_i. Every token that comes out, accepted or drawn from
the residual, is distributed as p_i given its prefix, so the chain is handed on with p_i, never with the inner draft's
q: that is what keeps the last stage exact.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..modules.acceptance import Distribution, Verdict, verify
from ..modules.batch import BatchItem, RaggedBatch
from ..modules.kv_cache import CacheTable, PagedKVCache
from ..modules.layered_model import LayeredModel
from ..modules.sampling import LogitsPipeline
from ..modules.token_tree import TokenTree
from .drafter import Drafter, Observation
from .early_exit import ExitHead
from .request import Sequence


@dataclass
class _Window:
    """One sequence's tentative tokens V.

    goal: tokens after which the window is handed on; cap: tokens it may never exceed.
    shadow: the sequence as the inner drafter sees it: V at the end of its text, its table counting what layers up to
        L_i
        have run. hidden: rows after L_i, in order. probs: p_i of each token of V.
    """

    sequence: Sequence
    shadow: Sequence
    pipeline: LogitsPipeline
    goal: int
    cap: int
    probs: list[Distribution] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return self.shadow.token_ids[len(self.sequence.token_ids) :]

    @property
    def is_open(self) -> bool:
        return len(self.token_ids) < min(self.goal, self.cap)


class HierarchicalDrafter(Drafter):
    """Proposes windows of at least `window` tokens (N_i) that layer `exit_layer` (L_i) stands behind.

    inner: where its drafts come from, at or below that layer: an EarlyExitDrafter for HiSpec, or a lookup.
    inner_tokens: size of the inner proposals, None takes the inner drafter's own. head: the exit head at L_i; None
    takes the model's final norm and unembedding.

    Raises ValueError, when it is given to an engine, for an exit layer that the model does not have.
    """

    def __init__(
        self,
        inner: Drafter,
        exit_layer: int,
        window: int = 4,
        inner_tokens: int | None = None,
        head: ExitHead | None = None,
    ) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self.inner, self.exit_layer, self.window, self.head = inner, exit_layer, window, head
        self.inner_tokens = inner.default_draft_tokens() if inner_tokens is None else inner_tokens
        self.name = "hispec" if inner.name == "early-exit" else f"hispec+{inner.name}"
        self.layer_tokens = 0

    def attach(self, model: LayeredModel, cache: PagedKVCache) -> None:
        if not 1 <= self.exit_layer <= model.num_layers:
            raise ValueError(f"exit_layer must be in [1, {model.num_layers}], got {self.exit_layer}")
        self.model, self.cache = model, cache
        self.inner.attach(model, cache)

    def default_draft_tokens(self) -> int:
        return self.window + self.inner_tokens  # the last round begins when a token is lacking

    def scratch_tokens(self, draft_tokens: int) -> int:
        """A window, and an inner proposal begun when it lacked one token."""
        return draft_tokens + self.inner.scratch_tokens(self.inner_tokens) if draft_tokens else 0

    @torch.inference_mode()
    def propose(self, sequences: SequenceOf[Sequence]) -> list[TokenTree]:
        windows = [self._open(sequence) for sequence in sequences]
        while running := [window for window in windows if window.is_open]:
            self._round(running)
        return [self._tree(window) for window in windows]

    def observe(self, observations: SequenceOf[Observation]) -> None:
        self.inner.observe(observations)

    def release(self, sequence_id: int) -> None:
        self.inner.release(sequence_id)

    def reset(self) -> None:
        self.layer_tokens = 0
        self.inner.reset()

    def _open(self, sequence: Sequence) -> _Window:
        table = CacheTable(blocks=sequence.table.blocks, length=sequence.table.length)
        shadow = replace(sequence, token_ids=list(sequence.token_ids), table=table, num_tentative=0)
        pipeline = LogitsPipeline(sequence.params, sequence.num_prompt, for_drafts=True)
        return _Window(sequence, shadow, pipeline, self.window, min(sequence.draft_tokens, sequence.max_depth))

    def _round(self, windows: list[_Window]) -> None:
        """One inner proposal per window, verified by the intermediate layer."""
        for window in windows:
            window.shadow.draft_tokens = self.inner_tokens
            window.shadow.max_depth = window.cap - len(window.token_ids) - 1
        trees = self.inner.propose([window.shadow for window in windows])
        trees = [
            tree.clipped(window.shadow.max_depth, self.inner_tokens + 1)
            for window, tree in zip(windows, trees, strict=True)
        ]
        hidden = self._run(windows, trees)
        ends = [rows[-len(tree) :] for rows, tree in zip(hidden, trees, strict=True)]
        logits = (self.head or self.model.logits)(torch.cat(ends)).split([len(tree) for tree in trees])
        observations = []
        for window, tree, rows, states in zip(windows, trees, logits, hidden, strict=True):
            verdict = self._verify(window, tree, rows)
            observations.append(Observation(window.shadow, tree, verdict, rows))
            self._extend(window, tree, verdict, states)
        self.inner.observe(observations)

    def _run(self, windows: list[_Window], trees: list[TokenTree]) -> list[Tensor]:
        """Per window the rows after L_i of its new tokens: those pending before the root, the root, all nodes."""
        items = [_item(window.shadow, tree) for window, tree in zip(windows, trees, strict=True)]
        rows = self._first_layers(items, trees)
        depth = max(tree.depth for tree in trees)
        if depth == self.exit_layer:
            return rows
        batch = RaggedBatch.build(items, self.cache.block_size, self.model.device)
        hidden = self.model.run(torch.cat(rows), batch, self.cache, depth, self.exit_layer)
        self.layer_tokens += batch.num_tokens * (self.exit_layer - depth)
        return list(hidden.split([len(item.token_ids) for item in items]))

    def _first_layers(self, items: list[BatchItem], trees: list[TokenTree]) -> list[Tensor]:
        """Bring every new token to the depth that the inner drafter has run most of them to."""
        depth = max(tree.depth for tree in trees)
        rest = [item.after(tree.num_run) for item, tree in zip(items, trees, strict=True)]
        unrun = [item for item in rest if item.token_ids]
        assert unrun, "a window's last token has not been run by any layer"
        batch = RaggedBatch.build(unrun, self.cache.block_size, self.model.device)
        hidden = self.model.run(self.model.embed(batch), batch, self.cache, 0, depth)
        self.layer_tokens += batch.num_tokens * depth
        parts = hidden.split([len(item.token_ids) for item in rest])
        return [
            part if tree.hidden is None else torch.cat((tree.hidden, part))
            for tree, part in zip(trees, parts, strict=True)
        ]

    def _verify(self, window: _Window, tree: TokenTree, rows: Tensor) -> Verdict:
        prefix = list(window.shadow.token_ids)
        seen: list[Distribution] = []

        def target(node: int) -> Distribution:
            if node > 0:
                prefix.append(tree.token_ids[node])
            seen.append(window.pipeline(rows[node], prefix))
            return seen[-1]

        verdict = verify(tree, target, window.sequence.draft_generator)
        window.probs += seen  # one per node of the path: p_i of the token that followed it
        return verdict

    def _extend(self, window: _Window, tree: TokenTree, verdict: Verdict, states: Tensor) -> None:
        """Append what the intermediate emitted to the window, and keep its rows and cache entries only."""
        before = states.shape[0] - len(tree)
        offsets = [*range(before), *(before + node for node in verdict.path)]
        window.hidden.append(states[offsets])
        self.cache.keep([(window.shadow.table, offsets)])
        window.shadow.token_ids += [*(tree.token_ids[node] for node in verdict.path[1:]), verdict.next_token]
        window.shadow.num_tentative = len(window.token_ids)

    def _tree(self, window: _Window) -> TokenTree:
        root, drafted = window.sequence.token_ids[-1], window.token_ids
        if not drafted:
            return TokenTree.root(root)
        return TokenTree(
            [root, *drafted],
            range(-1, len(drafted)),
            window.probs,
            (self.name,) * (len(drafted) + 1),
            torch.cat(window.hidden),
            self.exit_layer,
            num_before=window.sequence.num_pending - 1,
        )


def _item(shadow: Sequence, tree: TokenTree) -> BatchItem:
    """The shadow's pending tokens with the proposal behind them."""
    start = shadow.table.length
    pending = shadow.token_ids[start:]
    parents = None
    if not tree.is_chain:
        parents = [*range(-1, len(pending) - 1), *(parent + len(pending) - 1 for parent in tree.parents[1:])]
    return BatchItem([*pending, *tree.token_ids[1:]], start, shadow.table.blocks, parents)
