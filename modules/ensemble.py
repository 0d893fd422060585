"""Distributions between a target's p and a draft's q, verified against in p's place (DIVERSED, arXiv 2604.07622).

All of them give up some of p for acceptance. How much is known at every token: `distance` is the total variation
between the law of the token that is emitted and p. Probabilities are mixed, not logits: only then acceptance is
1 - w TV(p, q), the distance (1 - w) TV(p, q), and what is drawn after a rejection norm([p - q]+) whatever w is.

Whatever p forbids (a ban, a grammar, top-p) stays forbidden: the mass that q has there goes to p.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from .acceptance import Dense, Distribution, OneHot, Peak

Row = Float[Tensor, "vocab"]


def soft(distribution: Distribution) -> Row:
    """[vocab] probabilities; of a greedy one that knows them, those that it is the argmax of."""
    return distribution.probs if isinstance(distribution, Dense | Peak) else distribution.dense()


def aligned(q: Float[Tensor, "draft"], size: int) -> Float[Tensor, "target"]:
    """q over the target's vocabulary: what it lacks has no mass; what only q knows is left out, and sums fall short."""
    if q.shape[0] == size:
        return q
    return torch.cat((q[:size], q.new_zeros(max(0, size - q.shape[0]))))


def total_variation(p: Row, q: Row) -> float:
    """Half the sum of |p - q|, that is the mass that p has above q, for rows that sum to one. In [0, 1]."""
    return min(1.0, max(0.0, float((p - q.to(p)).clamp(min=0.0).sum(dtype=torch.float64))))


@dataclass(frozen=True)
class Mixture:
    """v = w p + (1 - w) q, where p allows it.

    p, q: [vocab] rows over one vocabulary. weight: w in [0, 1]; 1 is p itself, bit for bit.
    max_tv: bound on the distance; the weight is raised to 1 - max_tv / TV(p, q) where it is below (`weight` then is
        what was asked for, `used` what holds).
    """

    p: Row
    q: Row
    weight: float
    max_tv: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.weight <= 1.0:  # NaN included
            raise ValueError(f"weight must be in [0, 1], got {self.weight}")

    @cached_property
    def forbidden(self) -> float:
        """Mass of q that p does not allow; 0 where it could be rounding."""
        mass = 1.0 - float(self.q.masked_fill(self.p <= 0, 0.0).sum(dtype=torch.float64))
        return mass if mass > (1e-12 if self.q.dtype == torch.float64 else 1e-5) else 0.0

    @cached_property
    def tv(self) -> float:
        """TV(p, q')."""
        return total_variation(self.p, self._allowed)

    @cached_property
    def used(self) -> float:
        """The weight after `max_tv`."""
        if self.max_tv >= 1.0 or self.tv <= self.max_tv:
            return self.weight
        return max(self.weight, 1.0 - self.max_tv / self.tv)

    @cached_property
    def distance(self) -> float:
        return (1.0 - self.used) * self.tv

    @cached_property
    def _allowed(self) -> Row:
        """q' = q where p > 0, and the rest of its mass spread as p."""
        inside = self.q.to(self.p).masked_fill(self.p <= 0, 0.0)
        return inside + self.forbidden * self.p if self.forbidden else inside

    def prob(self, token_id: int) -> float:
        p = float(self.p[token_id]) if token_id < self.p.shape[0] else 0.0
        if p <= 0.0:
            return 0.0
        w = self.used
        return (w + (1.0 - w) * self.forbidden) * p + (1.0 - w) * float(self.q[token_id])

    def sample(self, generator: torch.Generator | None) -> int:
        return Dense(self.dense()).sample(generator)

    def residual(self, q: Distribution) -> Distribution:
        """norm([p - q]+) for the q that was mixed in, whatever the weight; else by definition."""
        left = (Dense(self.dense()) if self.forbidden else Dense(self.p)).residual(q)
        return Dense(self.p) if isinstance(left, Dense) and left.probs is self.p else left

    def dense(self) -> Row:
        return self.used * self.p + (1.0 - self.used) * self._allowed


@dataclass(frozen=True)
class Lenient:
    """Leviathan et al. (2023), A.5: accept with min(1, p / ((1 - lenience) q)), reject to norm([p - q]+).

    p, q: [vocab] rows over one vocabulary. lenience: in [0, 1), 0 is p.
    """

    p: Row
    q: Row
    lenience: float

    def prob(self, token_id: int) -> float:
        """What stands above q in the acceptance ratio; these do not sum to one."""
        return (float(self.p[token_id]) if token_id < self.p.shape[0] else 0.0) / (1.0 - self.lenience)

    def ceiling(self) -> Row:
        """`prob` of all tokens."""
        return self.p / (1.0 - self.lenience)

    def sample(self, generator: torch.Generator | None) -> int:
        return Dense(self.dense()).sample(generator)

    def residual(self, q: Distribution) -> Distribution:
        return Dense(self.p).residual(q)

    def dense(self) -> Row:
        """The law of the token that is emitted where the draft comes from q."""
        kept = torch.minimum(self.q.to(self.p), self.ceiling())
        left = (self.p - self.q.to(self.p)).clamp(min=0.0)
        mass = left.sum()
        return kept + (1.0 - kept.sum()).clamp(min=0.0) * (left / mass if mass > 0 else self.p)

    @cached_property
    def distance(self) -> float:
        return total_variation(self.p, self.dense())


@dataclass(frozen=True)
class Replaced(Dense):
    """A distribution that stands in p's place. distance: TV to p."""

    distance: float = 0.0


def acceptance(v: Distribution, q: Distribution) -> float:
    """sum_x min(q(x), v(x)): the probability that a token drawn from q is kept against v; of a mixture 1 - w TV(p, q).

    q may have another vocabulary: what it lacks is never drawn, and what only it knows never kept.
    """
    row = v.ceiling() if isinstance(v, Lenient) else v.dense()
    kept = torch.minimum(aligned(q.dense(), row.shape[0]).to(row), row)
    return min(1.0, float(kept.sum(dtype=torch.float64)))


def cascade_opt(p: Row, q: Row, alpha: float) -> Row:
    """SpecCascade's OPT rule: q where its most likely token is as likely as p's, up to alpha TV(p, q); else p.

    p, q: [vocab] rows over one vocabulary. Narasimhan et al. (ICLR 2025).
    """
    return q if float(q.max()) >= float(p.max()) - alpha * total_variation(p, q) else p


def cascade_token(p: Row, q: Row, alpha: float) -> Row:
    """SpecCascade's Token-v3 rule: q on the tokens with p(v) >= (1 - alpha) max p, p in the proportion of the rest."""
    trusted = q.to(p).masked_fill(p < (1.0 - alpha) * p.max(), 0.0)
    return trusted + (1.0 - trusted.sum()).clamp(min=0.0) * p


def peak(row: Row) -> OneHot:
    """The greedy choice from a row, the first of equals."""
    return OneHot(int(row.max(dim=-1).indices), row.shape[0])
