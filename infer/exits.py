"""The target's early exits, as drafters and engine share them: logits over the whole vocabulary after a layer.

A head may read context (a block): its keys and values are then layers of the target's own cache, behind the model's,
and every token of a text must pass it, once. A drafter's own tokens pass it where they are drafted or verified; all
others (prompts, what is pending, rows behind a proposal) on their way through the layers, see `segments.py`. Where a
head is not used at every step they may wait: a text then owes it their states, and it reads them many at a time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch
from torch import Tensor

from ..modules.batch import BatchItem, RaggedBatch
from ..modules.exit_heads import ExitHeads
from ..modules.kv_cache import CacheTable, PagedKVCache
from ..modules.layered_model import LayeredModel
from ..modules.transfer import to_device

MOST_OWED = 64
"""Tokens of a text that may wait for a head: reading so many at once costs little more a token than more would."""

ExitHead = Callable[[Tensor], Tensor]
"""[rows, hidden] after the exit layer -> [rows, vocab] logits, -inf where the head's draft vocabulary has no token."""


class Tap(NamedTuple):
    """A head that must be shown every token of a text, by the residual stream after `layer` layers.

    late: they may wait until the head is used, or until they are many.
    """

    exits: EarlyExits
    layer: int
    late: bool = False


def at_once(taps: Iterable[Tap]) -> frozenset[Tap]:
    """The same heads, reading at once."""
    return frozenset(tap._replace(late=False) for tap in taps)


def catch_up(owing: Iterable[tuple[CacheTable, Iterable[Tap]]], least: int = 1) -> None:
    """Let heads read what at least so many tokens of a text wait for. owing: texts' tables and the heads of each."""
    tables: dict[Tap, list[CacheTable]] = defaultdict(list)
    for table, taps in owing:
        for tap in taps:
            tables[tap].append(table)
    for tap, late in tables.items():
        tap.exits.read_owed(tap.layer, late, least)


class Prediction(NamedTuple):
    """states: [rows, embed] what an unembedding multiplied. logits: [rows, vocab], -inf where there is no token."""

    states: Tensor
    logits: Tensor


class EarlyExits:
    """Exits after any layer through the model's own final norm and unembedding: for models trained to exit early.

    acceptance: by layer, how often a draft that follows accepted ones was accepted where these exits were tried.
    layers: those that have a head, None for all. context_layers: those whose head reads context. num_layers: the
    model's, known from `attach` on.
    num_caught_up: times that `read_owed` had something to read.
    work: what was done since `take_work`: layer-tokens, that is tokens times layers, that drafters have run ("draft",
    "intermediate", and "prefill" for what was pending before a root), layers that they have run one after another
    ("passes"), and tokens through heads ("head").
    """

    acceptance: Mapping[int, float] = {}
    layers: tuple[int, ...] | None = None
    context_layers: tuple[int, ...] = ()
    num_layers: int = 0

    def __init__(self) -> None:
        self.work: Counter[str] = Counter()
        self.num_caught_up = 0

    def attach(self, model: LayeredModel, cache: PagedKVCache, cache_layer: int) -> None:
        """Called once by the engine, before drafters are attached. The layers of the cache from `cache_layer` on, as
        many as there are context layers, belong to these heads."""
        self.model, self.cache, self.num_layers = model, cache, model.num_layers

    def check(self, name: str, layer: int) -> None:
        """Raise ValueError, naming the setting, for a layer without an exit."""
        if not 1 <= layer <= self.num_layers:
            raise ValueError(f"{name} must be in [1, {self.num_layers}], the model's layers, got {layer}")
        if self.layers is not None and layer not in self.layers:
            with_head = ", ".join(map(str, self.layers))
            raise ValueError(f"{name} must be a layer that the bundle has a head for ({with_head}), got {layer}")

    def taps(self, layer: int) -> frozenset[Tap]:
        """What must be shown every token of a text that uses the exit after `layer`."""
        return frozenset((Tap(self, layer),) if layer in self.context_layers else ())

    def predict(self, layer: int, hidden: Tensor, batch: RaggedBatch, rows: SequenceOf[int]) -> Prediction:
        """What the exit makes of some rows of a batch.

        hidden: [tokens, hidden] after `layer` layers of the whole batch, which a head that reads context then knows.
        """
        index = to_device(rows, hidden.device)
        self.work["head"] += batch.num_tokens if layer in self.context_layers else len(rows)
        return self._predict(layer, hidden, batch, index)

    def tap(self, layer: int, hidden: Tensor, batch: RaggedBatch) -> None:
        """Show a batch to a head that reads context. hidden: [tokens, hidden] after `layer` layers."""
        self.work["head"] += batch.num_tokens
        self._show(layer, hidden, batch)

    def owe(self, layer: int, table: CacheTable, rows: Tensor) -> None:
        """Tokens that have just been committed to a table wait for a head. rows: [tokens, hidden] after its layer."""
        if len(rows):
            table.owed.setdefault((self, layer), []).append(rows)

    def read_owed(self, layer: int, tables: SequenceOf[CacheTable], least: int) -> None:
        """Let one head read what tables owe it, in one pass over those that owe at least so many tokens."""
        late = [(table, count) for table in tables if (count := table.num_owed((self, layer))) >= least]
        if not late:
            return
        self.num_caught_up += 1
        rows = [part for table, _ in late for part in table.owed[self, layer]]
        items = [  # a head reads states: which tokens they are of is not asked
            BatchItem([0] * count, table.length - count, table.blocks) for table, count in late
        ]
        self.tap(layer, torch.cat(rows), RaggedBatch.build(items, self.cache.block_size, self.model.device))
        for table, _ in late:  # not before: where reading fails they still wait
            del table.owed[self, layer]

    def take_work(self) -> Counter[str]:
        work, self.work = self.work, Counter()
        return work

    def _predict(self, layer: int, hidden: Tensor, batch: RaggedBatch, index: Tensor) -> Prediction:
        states = self.model.final(hidden.index_select(0, index))
        return Prediction(states, self.model.unembed(states))

    def _show(self, layer: int, hidden: Tensor, batch: RaggedBatch) -> None:
        raise AssertionError("only heads that read context are shown tokens")


class CallableExit(EarlyExits):
    """The exit after one layer through any function; the others through the model's own."""

    def __init__(self, layer: int, head: ExitHead) -> None:
        super().__init__()
        self.layer, self.head = layer, head

    def _predict(self, layer: int, hidden: Tensor, batch: RaggedBatch, index: Tensor) -> Prediction:
        if layer != self.layer:
            return super()._predict(layer, hidden, batch, index)
        rows = hidden.index_select(0, index)
        return Prediction(self.model.final(rows), self.head(rows))


class HeadExits(EarlyExits):
    """The exits of trained heads, bound to the engine's model when it is known: packed if the model is."""

    def __init__(self, heads: ExitHeads, acceptance: Mapping[int, float] | None = None) -> None:
        super().__init__()
        self.acceptance = acceptance or {}
        self.heads, self.layers, self.context_layers = heads, heads.layers, heads.context_layers

    def attach(self, model: LayeredModel, cache: PagedKVCache, cache_layer: int) -> None:
        super().attach(model, cache, cache_layer)
        self._exits = self.heads.bind(model, model.is_fast, cache_layer)

    def _predict(self, layer: int, hidden: Tensor, batch: RaggedBatch, index: Tensor) -> Prediction:
        if layer in self.context_layers:
            states = self._exits.states(layer, hidden, batch, self.cache).index_select(0, index)
        else:
            states = self._exits.states(layer, hidden.index_select(0, index))
        final = self.model.final(states)
        return Prediction(final, self.heads.scatter(self._exits.unembed(final)))

    def _show(self, layer: int, hidden: Tensor, batch: RaggedBatch) -> None:
        self._exits.states(layer, hidden, batch, self.cache)
