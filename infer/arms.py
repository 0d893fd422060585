"""The chain drafters that method auto can choose: what each would bring and cost, and how long its chain should be.

What a chain brings follows from the acceptance of its positions, learned online; what it costs, from the cost model and
from a factor by which its steps have been slower or faster than that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from ..modules.kv_cache import PagedKVCache
from ..modules.layered_model import LayeredModel
from ..modules.token_tree import TokenTree
from .calibrate import quick_calibration
from .choice import Acceptance
from .cost_model import CostModel
from .draft_model import DraftModelDrafter
from .drafter import Drafter, Observation
from .early_exit import EarlyExitDrafter
from .exits import Tap, catch_up
from .hierarchical import HierarchicalDrafter
from .request import GenerationParams, Sequence

LONGEST_CHAIN = 16
"""Most tokens that are drafted one after another."""
LONGEST_INNER = 4
"""Most tokens that are drafted at once for an intermediate layer."""
FORESEEN_CHAIN = 4
"""Longest chain that is considered when it is decided whether heads are shown a text."""
PROBE_STEPS = 3
"""Steps of a probe; the first also reads what its drafter missed while it was not used."""
PRIOR = 0.6
"""How often a draft is taken to be accepted while nothing is known of its drafter."""
TRIED = (24.0, 0.99)
"""What was seen where a drafter was tried counts for so many observations, and what is seen here is forgotten slowly: a
run of luck is no reason to change."""
DRAFT_SECONDS = 0.4
"""For the calibration of a draft model."""


@dataclass(frozen=True)
class Load:
    """A step before drafting: its sequences, their tokens to be run, and those in the cache. beside: tokens of the same
    pass that belong to prompts, or to texts that others draft for."""

    sequences: int
    tokens: int
    context: int
    beside: int = 0


@dataclass(frozen=True)
class ChainPlan:
    """length: tokens handed to the model, N_d or for two stages N_i; inner: N_d of those. emitted: expected, by a
    sequence. seconds: of the whole step, but for reading what waits for its heads, which is done once."""

    length: int
    emitted: float
    seconds: float
    inner: int | None = None
    reading: float = 0.0


class ChainArm:
    """A chain drafter under auto; a subclass says what its drafting costs. `model_cost` is the target's.

    reads_on: what it missed while it was not used, it reads in its next step, and nobody knows what that costs.
    """

    reads_on = True

    def __init__(self, drafter: Drafter, tried: float | None = None) -> None:
        """tried: how often its drafts were accepted elsewhere."""
        self.drafter, self.name = drafter, drafter.name
        self.acceptance = Acceptance(PRIOR) if tried is None else Acceptance(tried, *TRIED)
        self.slowness = 1.0
        self.reset()

    def reset(self) -> None:
        """How slow it is stays known: that is of the device."""
        self.acceptance.reset()
        self.wait, self.next_probe, self.last_used = 32, 32, -PROBE_STEPS

    def attach(self, model: LayeredModel, cache: PagedKVCache, cost: CostModel) -> None:
        self.drafter.attach(model, cache)
        self.model, self.model_cost = model, cost

    def taps(self, params: GenerationParams) -> frozenset[Tap]:
        """Its heads read late: most steps do not use them."""
        return frozenset(tap._replace(late=True) for tap in self.drafter.taps(params))

    def sees(self, sequence: Sequence) -> bool:
        """Whether the heads that it needs are shown the text."""
        return self.taps(sequence.params) <= sequence.taps

    def foreseen(self, sequence: Sequence, texts: int) -> float:
        """Tokens a second of a step of so many texts like this one, which has not begun."""
        load = Load(texts, texts, texts * len(sequence.token_ids))
        plans = self.plans([sequence] * texts, load, FORESEEN_CHAIN, 0.0)
        return max(texts * plan.emitted / plan.seconds for plan in plans)

    def best(self, sequences: SequenceOf[Sequence], load: Load, overhead: float) -> ChainPlan:
        """The plan of the greatest rate, for sequences that it may draft for; load: of the whole step."""
        most = min(LONGEST_CHAIN, max(min(s.draft_tokens, s.max_depth) for s in sequences))
        plans = self.plans(sequences, load, max(most, 1), overhead)
        others = load.sequences - len(sequences)
        best = max(plans, key=lambda plan: (others + len(sequences) * plan.emitted) / plan.seconds)
        return replace(best, reading=self.reading(sequences))

    def reading(self, sequences: SequenceOf[Sequence]) -> float:
        """Seconds to show heads what waits for them, each one layer."""
        below = [(s.table, [reader for reader in s.table.owed if reader[1] <= self.depth(s)]) for s in sequences]
        waiting = sum(table.num_owed(reader) for table, readers in below for reader in readers)
        share = 1.0 / self.model.num_layers
        return self.model_cost.seconds(waiting, share=share, unembedded=False) if waiting else 0.0

    def depth(self, sequence: Sequence) -> int:
        return self.drafter.depth(sequence.params)

    def plans(self, sequences: SequenceOf[Sequence], load: Load, most: int, overhead: float) -> list[ChainPlan]:
        drafting, saved = self.drafting(sequences, load)

        def seconds(length: int) -> float:
            tokens = load.tokens + len(sequences) * length
            verifying = self.model_cost.seconds(tokens, load.sequences, load.context, share=1.0 - saved)
            return self.slowness * (drafting * length + verifying) + overhead

        accepted = self.acceptance.accepted(most)
        return [ChainPlan(length, 1.0 + accepted[length], seconds(length)) for length in range(1, most + 1)]

    def drafting(self, sequences: SequenceOf[Sequence], load: Load) -> tuple[float, float]:
        """(seconds of drafting one more token, part of the target's layers that verification then leaves out)."""
        raise NotImplementedError

    def propose(self, sequences: SequenceOf[Sequence], plan: ChainPlan) -> list[TokenTree]:
        catch_up((s.table, (tap for tap in s.taps if tap.layer <= self.depth(s))) for s in sequences)
        return self.drafter.propose([self._bounded(sequence, plan) for sequence in sequences])

    def _bounded(self, sequence: Sequence, plan: ChainPlan) -> Sequence:
        return replace(sequence, draft_tokens=min(sequence.draft_tokens, plan.length))

    def observe(self, seen: Observation) -> None:
        """Learn from a proposal of its own."""
        accepted = seen.verdict.num_accepted
        ended = seen.verdict.next_token is None  # and what was drafted behind the end is undecided
        self.acceptance.record(accepted, accepted if ended else min(accepted + 1, seen.tree.num_drafted))

    def failed(self) -> None:
        """It raised: as if its first token had been wrong."""
        self.acceptance.record(0, 1)

    def timed(self, plan: ChainPlan, seconds: float) -> None:
        """A step of it took so long."""
        ratio = min(max(seconds / (plan.seconds + plan.reading), 2 / 3), 1.5)
        self.slowness = min(max(self.slowness * ratio**0.1, 0.25), 4.0)

    def share(self, sequences: SequenceOf[Sequence]) -> float:
        """The part of the target's layers that its drafts have been through."""
        return sum(self.depth(sequence) for sequence in sequences) / len(sequences) / self.model.num_layers

    def scratch_tokens(self, draft_tokens: int, params: GenerationParams) -> int:
        return self.drafter.scratch_tokens(min(draft_tokens, LONGEST_CHAIN), params)


class EarlyExitArm(ChainArm):
    """The first layers draft, and the last ones verify: all but the last drafted token have been through the first."""

    reads_on = False

    def __init__(self, drafter: EarlyExitDrafter) -> None:
        super().__init__(drafter, drafter.exit.acceptance.get(drafter.exit_layer))

    def drafting(self, sequences: SequenceOf[Sequence], load: Load) -> tuple[float, float]:
        share, count = self.share(sequences), len(sequences)
        return self.model_cost.seconds(count, count, load.context, share=share), share / 2


class DraftModelArm(ChainArm):
    """A model of its own, with a cost model of its own."""

    def __init__(self, drafter: DraftModelDrafter, cost: CostModel | None = None) -> None:
        super().__init__(drafter)
        self.draft, self.own_cost = drafter.model, cost

    def attach(self, model: LayeredModel, cache: PagedKVCache, cost: CostModel) -> None:
        super().attach(model, cache, cost)
        self.own_cost = self.own_cost or CostModel(quick_calibration(self.draft, DRAFT_SECONDS))

    def drafting(self, sequences: SequenceOf[Sequence], load: Load) -> tuple[float, float]:
        assert self.own_cost is not None, "attach() makes one"
        count = len(sequences)
        return self.own_cost.seconds(count, count, load.context), 0.0


class HiSpecArm(ChainArm):
    """Two stages: N_d tokens at a time for an intermediate layer, until it has verified N_i.

    Rounds are what costs: each an inner draft and a pass up to L_i, and it brings one token and what it accepts.
    """

    reads_on = False

    def __init__(self, drafter: HierarchicalDrafter) -> None:
        self.inner = Acceptance()
        self.hierarchical = drafter
        super().__init__(drafter, drafter.exit.acceptance.get(drafter.exit_layer))

    def reset(self) -> None:
        super().reset()
        self.inner.reset()

    def plans(self, sequences: SequenceOf[Sequence], load: Load, most: int, overhead: float) -> list[ChainPlan]:
        """Every (N_i, N_d) of which the second is not the larger."""
        inner_accepted = self.inner.accepted(LONGEST_INNER)
        accepted = [*self.acceptance.accepted(most), 0.0]  # what lies behind the last has no weight
        share, found = self.share(sequences), []
        for inner in range(1, min(LONGEST_INNER, most) + 1):
            per_round, of_round = 1.0 + inner_accepted[inner], self._round_seconds(sequences, load, inner, share)
            for goal in range(inner, most + 1):
                rounds = math.ceil(goal / per_round)
                window = min(rounds * per_round, float(most))
                last = self.model_cost.seconds(
                    load.tokens + len(sequences) * window, load.sequences, load.context, share=1.0 - share
                )
                whole, part = int(window), window % 1.0
                emitted = 1.0 + accepted[whole] + part * (accepted[whole + 1] - accepted[whole])
                found.append(ChainPlan(goal, emitted, self.slowness * (rounds * of_round + last) + overhead, inner))
        return found

    def _round_seconds(self, sequences: SequenceOf[Sequence], load: Load, inner: int, share: float) -> float:
        """Of an inner draft and the pass up to L_i, after `share` of the layers, that verifies it."""
        count, below = len(sequences), self._inner_share(sequences)
        drafting = self.model_cost.seconds(count, count, load.context, share=below)
        checked = count * (1 + inner)
        return inner * drafting + self.model_cost.seconds(checked, count, load.context, share=max(share - below, 0.0))

    def _inner_share(self, sequences: SequenceOf[Sequence]) -> float:
        inner = self.hierarchical.inner
        return sum(inner.depth(s.params) for s in sequences) / len(sequences) / self.model.num_layers

    def propose(self, sequences: SequenceOf[Sequence], plan: ChainPlan) -> list[TokenTree]:
        before = [_inner_counts(sequence) for sequence in sequences]
        trees = super().propose(sequences, plan)
        for sequence, (reached, accepted) in zip(sequences, before, strict=True):
            now_reached, now_accepted = _inner_counts(sequence)
            self._learn_inner(now_reached - reached, now_accepted - accepted)
        return trees

    def _learn_inner(self, reached: Counter[int], accepted: Counter[int]) -> None:
        """Of a window's rounds: how many decided each depth, and accepted it."""
        for depth, count in reached.items():
            for _ in range(count - accepted[depth]):
                self.inner.record(depth - 1, depth)
        for depth, count in accepted.items():  # rounds that ended there with everything accepted
            for _ in range(count - reached[depth + 1]):
                self.inner.record(depth, depth)

    def _bounded(self, sequence: Sequence, plan: ChainPlan) -> Sequence:
        """What a request has fixed stays."""
        assert plan.inner is not None
        window = plan.length if sequence.params.window is None else sequence.params.window
        inner = sequence.params.inner_draft_tokens or plan.inner
        params = replace(sequence.params, window=window, inner_draft_tokens=inner)
        return replace(sequence, params=params, draft_tokens=min(sequence.draft_tokens, window + inner))

    def scratch_tokens(self, draft_tokens: int, params: GenerationParams) -> int:
        inner = max(LONGEST_INNER, params.inner_draft_tokens or 0)
        return self.drafter.scratch_tokens(draft_tokens, replace(params, inner_draft_tokens=inner))


def _inner_counts(sequence: Sequence) -> tuple[Counter[int], Counter[int]]:
    return Counter(sequence.stats.inner_reached_at), Counter(sequence.stats.inner_accepted_at)


def arm_of(drafter: Drafter) -> ChainArm:
    """How auto sees a drafter of chains. Raises ValueError for one that it cannot weigh."""
    if isinstance(drafter, HierarchicalDrafter):
        return HiSpecArm(drafter)
    if isinstance(drafter, DraftModelDrafter):
        return DraftModelArm(drafter)
    if isinstance(drafter, EarlyExitDrafter):
        return EarlyExitArm(drafter)
    raise ValueError(f"auto can choose early-exit, hispec and draft-model besides a tree, got {drafter.name!r}")
