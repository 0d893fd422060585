"""How likely is a candidate to be the next token? Online logistic regression over where the candidate comes from.

Every source of candidates puts each of its tokens into a class (a record of the model's own probabilities: by that
probability; an n-gram: by its length, counts and recency), and every class has a weight. A token's log-odds are the sum
of its classes' weights, of weights for the place, of two for what the texts repeat and of one for how rare the token
is, so sources that agree add up. The weights begin at a prior that ships with the code, follow what verification says,
and drift back to the prior where nothing is learned. They hold no text."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from .prior import PRIOR
from .stats import RETRIEVED

if TYPE_CHECKING:
    from .datastore import Matches

PROBABILITIES = 16
"""Classes of a probability: by its log-odds, in steps of 0.75 from -7.25 on."""
PROBABILITY_BOUNDS = tuple(-math.log1p(math.exp(7.25 - 0.75 * one)) for one in range(1, PROBABILITIES))
"""The least log-probability of each class but the first."""
ORDERS = 7
"""Classes of an n-gram's length; 0 is none."""
CONTINUATIONS = 24 * ORDERS
CORPUS_CLASSES = 20
"""Classes of a token that follows a match in a datastore, for each length of the match."""
RARITIES = 20
"""Classes of a token's id: by its number of bits. Vocabularies made by merging pairs have frequent tokens first."""

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
    "seen": 6 * 5,
    "followed": 9,
    "rarity": 4 * RARITIES,
}
"""Classes of each kind. The first four are of the place: the depth and the longest n-gram that matched there (`order`,
also in the namespace's other texts), which records there are, and how sure the best record was (`confidence`). So is
`corpus-order`, the longest match in a datastore, where there is one. The others are of tokens: see AdaptiveTrees; and
`seen`, how often the text has the token already, by how its first source knows it, `followed`, how often behind this
place's token, in the text and in all of the namespace's texts, this one included, and `rarity`, by its first source."""

OFFSETS: dict[str, int] = {}
for _name, _size in SIZES.items():
    OFFSETS[_name] = sum(SIZES[name] for name in OFFSETS)
NUM_WEIGHTS = sum(SIZES.values())
SEEN, FOLLOWED = OFFSETS["seen"], OFFSETS["followed"]


NGRAM, CORPUS = RETRIEVED, "datastore"
"""Labels of what was looked up."""
GUESS, SUCCESSOR = "last-logit", "successor"
"""Labels of sources whose classes are probabilities."""
RARITY = {label: OFFSETS["rarity"] + RARITIES * place for place, label in enumerate((SUCCESSOR, NGRAM, GUESS, CORPUS))}
"""By the label of a token's first source, the weight of an id of no bits."""
TIMES = (0, 6, 12, 18, 18, 18, 18, 18, 18, 24)
"""By a token's number of occurrences, the class that it begins."""
MOST_TIMES = len(TIMES) - 1
LIKELY = tuple(SEEN + 1 + sum(one > bound for bound in (4, 6, 8, 11)) for one in range(PROBABILITIES))
"""By a class of probabilities, the first weight of what a token of that class has occurred."""
LOOKED_UP = (SEEN,) * max(CONTINUATIONS, CORPUS_CLASSES * ORDERS)
"""The same of what was looked up, whatever its class."""

Source = tuple[str, int, dict[int, int]]
"""(label, where its weights begin, {token: class}), with its likeliest tokens first."""


class Context(NamedTuple):
    """All that is known about the token that comes next at one place.

    place: weights that every candidate has. order, shared_order: the longest n-grams that matched. matches: those in a
    datastore. seen: {token: how often the text has it}; followed, followed_by_any: the same behind this place's token,
    in the text and in all texts of its namespace, where they share.
    """

    place: tuple[int, ...]
    sources: list[Source]
    order: int = 0
    shared_order: int = 0
    matches: Matches = ()
    seen: Mapping[int, int] = MappingProxyType({})
    followed: Mapping[int, int] = MappingProxyType({})
    followed_by_any: Mapping[int, int] = MappingProxyType({})

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
        """Of every candidate; those that no source alone brings near `least` may be left out, and so may what sources
        say of a candidate that they do not bring near it themselves."""
        weights = self.weights
        base = sum([weights[index] for index in context.place])
        least -= base + SLACK + (CORPUS_SLACK if context.matches else 0.0)
        seen, own, others = context.seen, context.followed, context.followed_by_any
        base_alone = base + weights[FOLLOWED]
        found: dict[int, float] = {}
        for label, offset, classes in context.sources:
            likely, rarity = LOOKED_UP if label in (NGRAM, CORPUS) else LIKELY, RARITY[label]
            for token_id, one in classes.items():
                weight = weights[offset + one]
                if token_id in found:
                    found[token_id] += weight
                elif weight > least:
                    if token_id in others or token_id in own:
                        after, by_any = own.get(token_id, 0), others.get(token_id, 0)
                        place = FOLLOWED + 3 * (after if after < 2 else 2) + (by_any if by_any < 2 else 2)
                        total = base + weights[place] + weight
                    else:
                        total = base_alone + weight
                    times, bits = seen.get(token_id, 0), token_id.bit_length()
                    total += weights[likely[one] + TIMES[times if times < MOST_TIMES else MOST_TIMES]]
                    found[token_id] = total + weights[rarity + (bits if bits < RARITIES else RARITIES - 1)]
                elif label != NGRAM:  # rising ranks: none of the rest comes nearer by this source alone
                    break
        return found

    @staticmethod
    def weights_of(context: Context, candidates: Container[int] | None = None) -> dict[int, list[int]]:
        """{candidate: its weights}, without those of the place; of all candidates, or of some.

        `log_odds` works repeats out itself, without calls: with a function for each candidate, or `min`, it takes up to
        twice as long.
        """
        times, own, others = context.seen.get, context.followed.get, context.followed_by_any.get
        found: dict[int, list[int]] = {}
        for label, offset, classes in context.sources:
            likely, rarity = LOOKED_UP if label in (NGRAM, CORPUS) else LIKELY, RARITY[label]
            for token_id, one in classes.items():
                if token_id in found:
                    found[token_id].append(offset + one)
                elif candidates is None or token_id in candidates:
                    seen = likely[one] + TIMES[min(times(token_id, 0), MOST_TIMES)]
                    followed = FOLLOWED + 3 * min(own(token_id, 0), 2) + min(others(token_id, 0), 2)
                    found[token_id] = [offset + one, seen, followed, rarity + min(token_id.bit_length(), RARITIES - 1)]
        return found

    def learn(self, context: Context, token_id: int) -> None:
        """One step of gradient ascent: here came this token, and none of the other candidates. Those that are next to
        impossible, which are most, teach nothing and are left out, whatever came."""
        weights, prior, back = self.weights, self.prior, self.drift * self.rate
        odds = {one: value for one, value in self.log_odds(context, LEAST_LEARNED).items() if value > LEAST_LEARNED}
        total = 0.0
        for candidate, row in self.weights_of(context, odds).items():
            step = self.rate * ((candidate == token_id) - 1.0 / (1.0 + math.exp(-odds[candidate])))
            total += step
            for index in row:
                weights[index] += step + back * (prior[index] - weights[index])
        for index in context.place:
            weights[index] += total + back * (prior[index] - weights[index])


LEAST_LEARNED = -7.0
"""Log-odds below which a candidate teaches nothing."""
SLACK, CORPUS_SLACK = 3.0, 1.0
"""Log-odds that further sources, repeats and rarity are taken to add at most to a candidate, and what a datastore makes
that more: the one approximation in growing a tree."""


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
