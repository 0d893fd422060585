"""How much to draft: the arithmetic behind method auto. No tensors, no model, no clock.

A step over B sequences emits B tokens and what is accepted besides; what counts is tokens by seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple


class Allocation(NamedTuple):
    """kept: drafted nodes of each sequence. emitted: expected tokens of the step. seconds: expected, of the step.

    worthy: nodes of each sequence that would be kept if growing them had still to be paid. plain: seconds of a step
    without a draft, and without what was spent on one.
    """

    kept: list[int]
    emitted: float
    seconds: float
    worthy: list[int]
    plain: float

    @property
    def rate(self) -> float:
        return self.emitted / self.seconds


def best_allocation(
    scores: Sequence[Sequence[float]],
    seconds: Callable[[int], Sequence[float]],
    others: int = 0,
    trust: float = 1.0,
    spent: float = 0.0,
    growth: float = 0.0,
) -> Allocation:
    """One budget over all trees: the first n of all nodes in order of their scores, for the n of the greatest rate.

    scores: per tree its nodes' probabilities of being accepted, without the root, falling; so that what is kept of
        a tree is its beginning. seconds: of steps with 0 ... n drafted nodes; every number is tried, it need not be
        convex.
    others: sequences of the step without a tree. trust: what the probabilities have proved to be worth.
    spent: seconds that growing the trees took. growth: what a node usually takes.

    Plain Python: of so few numbers it is several times as fast as array operations.
    """
    ranked = [(score, tree) for tree, found in enumerate(scores) for score in found]
    ranked.sort(key=itemgetter(0), reverse=True)  # of equals a tree's earlier node first
    cost, plain = seconds(len(ranked)), float(len(scores) + others)
    emitted = [plain + trust * total for total in itertools.accumulate([score for score, _ in ranked], initial=0.0)]

    def best(prices: Sequence[float]) -> int:
        rates = [tokens / price for tokens, price in zip(emitted, prices, strict=True)]
        return rates.index(max(rates))

    def first(count: int) -> list[int]:
        kept = [0] * len(scores)
        for _, tree in ranked[:count]:
            kept[tree] += 1
        return kept

    run = best([price + spent for price in cost])
    worthy = best([price + growth * count for count, price in enumerate(cost)])
    return Allocation(first(run), emitted[run], cost[run] + spent, first(worthy), cost[0])


class Acceptance:
    """How likely a chain's token is accepted, given that all before it were, by position; learned, and decayed.

    prior: before anything is known; a later position's is what is known of the one before it. weight: of a prior, in
    observations. decay: of what was known, at each observation.
    """

    def __init__(self, prior: float = 0.6, weight: float = 3.0, decay: float = 0.97) -> None:
        self.prior, self.weight, self.decay = prior, weight, decay
        self._counts: list[tuple[float, float, float]] = []  # (accepted, decided, weight that the prior still has)

    def reset(self) -> None:
        self._counts.clear()

    def record(self, num_accepted: int, num_decided: int) -> None:
        """Of the first `num_decided` positions all were accepted, but the last where `num_accepted` is one less."""
        while len(self._counts) < num_decided:
            self._counts.append((0.0, 0.0, self.weight))
        for position in range(num_decided):
            accepted, decided, weight = (self.decay * count for count in self._counts[position])
            self._counts[position] = (accepted + (position < num_accepted), decided + 1.0, weight)

    def accepted(self, most: int) -> list[float]:
        """[most + 1] expected accepted tokens of chains of 0 ... most."""
        found, reach, total, before = [0.0], 1.0, 0.0, self.prior
        for position in range(most):
            known = position < len(self._counts)
            accepted, decided, weight = self._counts[position] if known else (0.0, 0.0, self.weight)
            before = (accepted + weight * before) / (decided + weight)
            reach *= before
            total += reach
            found.append(total)
        return found


class Ratio:
    """What came by what was expected, decayed and bounded: 1 at first, as if `weight` had been expected and had come.

    least, most: bounds. below: what less than the least counts as.
    """

    def __init__(self, weight: float, decay: float, least: float, most: float, below: float) -> None:
        self.weight, self.decay, self.least, self.most, self.below = weight, decay, least, most, below
        self.reset()

    def reset(self) -> None:
        self._expected = self._came = self.weight

    def record(self, expected: float, came: float) -> None:
        self._expected = self.decay * self._expected + expected
        self._came = self.decay * self._came + came

    @property
    def value(self) -> float:
        ratio = self._came / max(self._expected, 1e-9)
        return self.below if ratio < self.least else min(ratio, self.most)


@dataclass
class Patience:
    """When to try again what does not pay.

    worth: seconds that a try has saved, a running mean; None before the first. wait: steps left out after a fruitless
    one; doubled at each. tried: step of the last one, among so many sequences (`load`). limit: nodes that are worth
    growing.
    """

    worth: float | None = None
    wait: int = 0
    tried: int | None = None
    load: int = 1
    limit: int = 8

    def is_due(self, step: int, load: int = 1) -> bool:
        """Among fewer sequences a try costs a smaller part of the step, and each token is a larger part of its worth:
        the wait shrinks with both."""
        if self.tried is None or self.worth is None or self.worth > 0.0:
            return True
        wait = self.wait if load >= self.load else self.wait * load**2 // self.load**2
        return step > self.tried + wait

    def record(self, step: int, saved: float, longest_wait: int, load: int = 1) -> None:
        """A try at `step` has saved so many seconds; negative where it cost them. At half the load or less all that
        was known before is forgotten."""
        if self.worth is None or 2 * load <= self.load:
            self.worth, self.wait = saved, 0
        else:
            self.worth += 0.25 * (saved - self.worth)
        self.tried, self.load = step, load
        self.wait = self.wait // 2 if self.worth > 0.0 else min(max(2 * self.wait, 1), longest_wait)

    def size(self, worthy: int, bound: int) -> None:
        """So many of the nodes that were grown were worth it: the next tree may be larger by a quarter, and by two."""
        self.limit = min(max(worthy + max(worthy // 4, 2), self.limit - self.limit // 8, 4), bound)

    def copy(self) -> Patience:
        """For another text: what others have taught. It is tried at once, so as to know whether it is like them."""
        return replace(self, tried=None)


def longest_wait(cost: float, step: float, share: float = 0.005, bounds: tuple[int, int] = (4, 64)) -> int:
    """Steps to leave out, so that tries of `cost` seconds take no more than a share of the time of steps of `step`."""
    return int(min(max(cost / max(share * step, 1e-12), bounds[0]), bounds[1]))


def smoothed(mean: float, sample: float) -> float:
    """A running mean of seconds: the first is taken whole, a later one for at most three times the mean."""
    return mean + (0.1 if mean else 1.0) * (min(sample, 3.0 * (mean or sample)) - mean)
