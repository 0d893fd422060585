"""A pass over tokens that stand at different depths of the model.

A drafter may have run a sequence's first new tokens through some layers. They join the others where they stopped, so
each token passes each layer once. On their way tokens are shown to the heads that read context, each once too.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor

from ..modules.batch import BatchItem, RaggedBatch
from ..modules.kv_cache import PagedKVCache
from ..modules.layered_model import LayeredModel
from ..modules.token_tree import TokenTree
from ..modules.transfer import to_device
from .exits import Tap


def proposal_item(pending: list[int], tree: TokenTree, start: int, blocks: list[int]) -> BatchItem:
    """A text's pending tokens, whose last is the tree's root, with the proposal behind them. start: of the pending."""
    token_ids = [*pending, *tree.token_ids[1:]]
    if tree.is_chain:
        return BatchItem(token_ids, start, blocks)
    before = len(pending) - 1
    return BatchItem(token_ids, start, blocks, [*range(-1, before), *(parent + before for parent in tree.parents[1:])])


@dataclass(frozen=True)
class Share:
    """One sequence's new tokens.

    hidden: [rows, hidden] the residual stream after `depth` layers of those that have been run so far, which are the
        first ones; they have been shown to the heads up to there.
    taps: the heads that want to see this sequence. num_before: tokens before the root, whose logits nobody asks for.
    kept: for heads that read late, filled by `run_segments`: [rows, hidden] of the last new tokens.
    """

    item: BatchItem
    hidden: Tensor | None = None
    depth: int = 0
    taps: frozenset[Tap] = frozenset()
    num_before: int = 0
    kept: dict[Tap, Tensor] = field(default_factory=dict)

    def num_past(self, layer: int) -> int:
        """Leading tokens that `layer` layers have run already."""
        return 0 if self.hidden is None or self.depth < layer else self.hidden.shape[0]


@dataclass(frozen=True)
class Ran:
    """hidden: [tokens, hidden] of the whole batch after the last layer asked for.

    layer_tokens: tokens times layers run for it; prefill_layer_tokens: those of tokens before a root, besides.
    layer_passes: layers run one after another, whatever the tokens.
    """

    hidden: Tensor
    layer_tokens: int
    prefill_layer_tokens: int
    layer_passes: int


def run_segments(
    model: LayeredModel, cache: PagedKVCache, shares: SequenceOf[Share], batch: RaggedBatch, stop: int
) -> Ran:
    """Bring all tokens of a batch to `stop` layers. batch: of the shares' items, in order."""
    hidden = model.embed(batch)
    for share, start in zip(shares, batch.cu_seqlens, strict=False):
        if share.hidden is not None:
            hidden[start : start + share.hidden.shape[0]] = share.hidden
    depths = {share.depth for share in shares if share.hidden is not None}
    taps = sorted({tap for share in shares for tap in share.taps if tap.layer <= stop}, key=lambda tap: tap.layer)
    parts = _Parts(shares, batch, cache.block_size)
    layer_tokens = prefill = passes = 0
    for first, last in pairwise(sorted({0, stop, *depths, *(tap.layer for tap in taps)})):
        skips = [share.num_past(last) for share in shares]
        rows, part = parts.without(skips)
        if part is None:
            continue
        ran = model.run(hidden if rows is None else hidden[rows], part, cache, first, last)
        hidden = ran if rows is None else hidden.index_copy(0, rows, ran)
        before = sum(max(0, share.num_before - skip) for share, skip in zip(shares, skips, strict=True))
        layer_tokens += (part.num_tokens - before) * (last - first)
        prefill += before * (last - first)
        passes += last - first
        for tap in (tap for tap in taps if tap.layer == last):
            (_keep if tap.late else _show)(tap, hidden, parts, skips)
    return Ran(hidden, layer_tokens, prefill, passes)


def _show(tap: Tap, hidden: Tensor, parts: _Parts, skips: list[int]) -> None:
    """Show a head the tokens that have just come to its layer, of the sequences that it follows."""
    wanted = [
        skip if tap in share.taps else len(share.item.token_ids)
        for share, skip in zip(parts.shares, skips, strict=True)
    ]
    rows, part = parts.without(wanted)
    if part is not None:
        tap.exits.tap(tap.layer, hidden if rows is None else hidden[rows], part)


def _keep(tap: Tap, hidden: Tensor, parts: _Parts, skips: list[int]) -> None:
    """Keep what a head would have been shown now, by sequence."""
    bounds = zip(parts.batch.cu_seqlens, parts.batch.cu_seqlens[1:], strict=False)
    for share, (start, end), skip in zip(parts.shares, bounds, skips, strict=True):
        if tap in share.taps and start + skip < end:
            share.kept[tap] = hidden[start + skip : end]


class _Parts:
    """Batches of some of a pass's tokens; the same one for the same tokens."""

    def __init__(self, shares: SequenceOf[Share], batch: RaggedBatch, block_size: int) -> None:
        self.shares, self.batch, self.block_size = shares, batch, block_size
        self._made: dict[tuple[int, ...], tuple[Tensor | None, RaggedBatch | None]] = {}

    def without(self, skips: list[int]) -> tuple[Tensor | None, RaggedBatch | None]:
        """All tokens but the first `skips[i]` of share i: their rows and their batch.

        (None, the batch) stands for all of them, (None, None) for none.
        """
        if not any(skips):
            return None, self.batch
        if tuple(skips) not in self._made:
            self._made[tuple(skips)] = self._make(skips)
        return self._made[tuple(skips)]

    def _make(self, skips: list[int]) -> tuple[Tensor | None, RaggedBatch | None]:
        bounds = zip(self.batch.cu_seqlens, self.batch.cu_seqlens[1:], skips, strict=False)
        rows = [row for start, end, skip in bounds for row in range(start + skip, end)]
        if not rows:
            return None, None
        rest = [share.item.after(skip) for share, skip in zip(self.shares, skips, strict=True)]
        items, device = [item for item in rest if item.token_ids], self.batch.token_ids.device
        return to_device(rows, device), RaggedBatch.build(items, self.block_size, device)
