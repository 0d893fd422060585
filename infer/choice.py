"""How much to draft: the arithmetic behind method auto. No tensors, no model, no clock.

A step over B sequences emits B tokens and what is accepted besides; what counts is tokens by seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


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
    seconds: Callable[[Array], Array],
    others: int = 0,
    trust: float = 1.0,
    spent: float = 0.0,
    growth: float = 0.0,
) -> Allocation:
    """One budget over all trees: the first n of all nodes in order of their scores, for the n of the greatest rate.

    scores: per tree its nodes' probabilities of being accepted, without the root, falling; so that what is kept of
        a tree is its beginning. seconds: of a step with so many drafted nodes; every n is tried, it need not be convex.
    others: sequences of the step without a tree. trust: what the probabilities have proved to be worth.
    spent: seconds that growing the trees took. growth: what a node usually takes.
    """
    flat = np.array([score for tree in scores for score in tree], dtype=np.float64)
    owners = np.repeat(np.arange(len(scores)), np.array([len(tree) for tree in scores], dtype=np.int64))
    order = np.argsort(-flat, kind="stable")  # of equals a tree's earlier node first
    emitted = len(scores) + others + trust * np.concatenate(([0.0], np.cumsum(flat[order])))
    nodes = np.arange(len(flat) + 1, dtype=np.float64)
    cost = seconds(nodes)

    def first(count: int) -> list[int]:
        return np.bincount(owners[order[:count]], minlength=len(scores)).tolist()

    best, worthy = int(np.argmax(emitted / (cost + spent))), int(np.argmax(emitted / (cost + growth * nodes)))
    return Allocation(first(best), float(emitted[best]), float(cost[best]) + spent, first(worthy), float(cost[0]))


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

    def accepted(self, most: int) -> Array:
        """[most + 1] expected accepted tokens of chains of 0 ... most."""
        found, reach, total, before = [0.0], 1.0, 0.0, self.prior
        for position in range(most):
            known = position < len(self._counts)
            accepted, decided, weight = self._counts[position] if known else (0.0, 0.0, self.weight)
            before = (accepted + weight * before) / (decided + weight)
            reach *= before
            total += reach
            found.append(total)
        return np.array(found)


class Trust:
    """Accepted tokens by expected ones, decayed: 1 where probabilities are right, 0 where they say nothing."""

    LEAST, MOST = 0.02, 1.2

    def __init__(self, weight: float = 6.0, decay: float = 0.97) -> None:
        self.weight, self.decay = weight, decay
        self.reset()

    def reset(self) -> None:
        self._expected = self._accepted = self.weight

    def record(self, expected: float, accepted: float) -> None:
        self._expected = self.decay * self._expected + expected
        self._accepted = self.decay * self._accepted + accepted

    @property
    def value(self) -> float:
        ratio = self._accepted / max(self._expected, 1e-9)
        return 0.0 if ratio < self.LEAST else min(ratio, self.MOST)


class Markup:
    """What drafted tokens cost in passes over several texts, by what they would cost behind a lone one; decayed.

    Trees of unlike sizes attend in calls of their own, which sizes alone do not say.
    """

    LEAST, MOST = 1.0, 4.0

    def __init__(self, weight: float = 4.0, decay: float = 0.9) -> None:
        self.weight, self.decay = weight, decay
        self._expected = self._paid = 0.0

    def record(self, expected: float, paid: float) -> None:
        """Seconds of one pass beyond those of the same texts without drafts. A page fault counts for little."""
        if not self._expected:
            self._expected = self._paid = self.weight * expected
        self._expected = self.decay * self._expected + expected
        self._paid = self.decay * self._paid + min(max(paid, 0.0), self.MOST * expected)

    @property
    def value(self) -> float:
        return min(max(self._paid / self._expected, self.LEAST), self.MOST) if self._expected else 1.0


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
