"""How likely is a candidate to be the next token? Online logistic regression over where the candidate comes from.

Every source of candidates puts each of its tokens into a class (a record of the model's own probabilities: by that
probability; an n-gram: by its length, counts and recency), and every class has a weight. A token's log-odds are the sum
of its classes' weights and of weights for the place, so sources that agree add up. The weights begin at a prior that
ships with the code, follow what verification says, and drift back to the prior where nothing is learned. They hold no
text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .prior import PRIOR

if TYPE_CHECKING:
    from .datastore import Matches

PROBABILITIES = 16
"""Classes of a probability: by its log-odds, in steps of 0.75 from -7.25 on."""
ORDERS = 7
"""Classes of an n-gram's length; 0 is none."""
CONTINUATIONS = 24 * ORDERS
CORPUS_CLASSES = 20
"""Classes of a token that follows a match in a datastore, for each length of the match."""

SIZES = {
    "order": 6 * ORDERS,
    "shared-order": ORDERS,
    "record": 8,
    "confidence": 2 * (PROBABILITIES + 1),
    "ngram": CONTINUATIONS,
    "backoff": CONTINUATIONS,
    "shared-ngram": CONTINUATIONS,
    "agreement": 4 * PROBABILITIES,
    "successor": 6 * PROBABILITIES,
    "guess": 4 * PROBABILITIES,
    "earlier-guess": 2 * PROBABILITIES,
    "corpus-order": ORDERS,
    "corpus": CORPUS_CLASSES * ORDERS,
}
"""Classes of each kind. The first four are of the place: the depth and the longest n-gram that matched there (`order`,
also in the namespace's other texts), which records there are, and how sure the best record was (`confidence`). So is
`corpus-order`, the longest match in a datastore, where there is one. The others are of tokens: see AdaptiveTrees."""

OFFSETS: dict[str, int] = {}
for _name, _size in SIZES.items():
    OFFSETS[_name] = sum(SIZES[name] for name in OFFSETS)
NUM_WEIGHTS = sum(SIZES.values())


@dataclass(frozen=True)
class Context:
    """All that is known about the token that comes next at one place.

    place: weights that every candidate has. sources: (label, where the source's weights begin, {token: class}), each
    with its likeliest tokens first. order, shared_order: the longest n-grams that matched.
    """

    place: tuple[int, ...]
    sources: list[tuple[str, int, dict[int, int]]]
    order: int = 0
    shared_order: int = 0
    matches: Matches = ()

    def label(self, token_id: int) -> str:
        """The first source that knows the token."""
        return next(label for label, _, classes in self.sources if token_id in classes)


class Estimates:
    """The weights. rate: step of the regression. drift: share of the way back to the prior at each use of a weight."""

    def __init__(self, rate: float = 0.01, drift: float = 0.001, prior: Mapping[str, str] = PRIOR) -> None:
        self.rate, self.drift = rate, drift
        self.prior = read_prior(prior)
        self.weights = list(self.prior)

    def reset(self) -> None:
        self.weights[:] = self.prior

    def log_odds(self, context: Context, least: float = -math.inf) -> dict[int, float]:
        """Of every candidate; those that no source alone brings near `least` may be left out."""
        weights = self.weights
        base = sum(weights[index] for index in context.place)
        least -= base + SLACK
        found: dict[int, float] = {}
        for label, offset, classes in context.sources:
            for token_id, one in classes.items():
                weight = weights[offset + one]
                if token_id in found:
                    found[token_id] += weight
                elif weight > least:
                    found[token_id] = base + weight
                elif label != NGRAM:  # rising ranks: none of the rest comes nearer
                    break
        return found

    def learn(self, context: Context, token_id: int) -> None:
        """One step of gradient ascent: here came this token, and none of the other candidates."""
        steps = {
            candidate: self.rate * ((candidate == token_id) - 1.0 / (1.0 + math.exp(-value)))
            for candidate, value in self.log_odds(context).items()
        }
        total = sum(steps.values())
        for index in context.place:
            self._move(index, total)
        for _, offset, classes in context.sources:
            for candidate, one in classes.items():
                self._move(offset + one, steps[candidate])

    def _move(self, index: int, step: float) -> None:
        weight = self.weights[index]
        self.weights[index] = weight + step + self.drift * self.rate * (self.prior[index] - weight)


NGRAM = "ngram"
SLACK = 4.0
"""Log-odds that further sources are taken to add at most to a candidate: the one approximation in growing a tree."""


def read_prior(prior: Mapping[str, str]) -> list[float]:
    """The weights in the order of SIZES, from hundredths by name; a name that is missing has zeros."""
    weights: list[float] = []
    for name, size in SIZES.items():
        values = [int(value) / 100 for value in prior.get(name, "").split()] or [0.0] * size
        assert len(values) == size, f"prior {name!r} must have {size} values, got {len(values)}"
        weights += values
    return weights


def write_prior(weights: Iterable[float]) -> dict[str, str]:
    """What `read_prior` reads."""
    hundredths = [str(round(100 * weight)) for weight in weights]
    return {name: " ".join(hundredths[start : start + SIZES[name]]) for name, start in OFFSETS.items()}
