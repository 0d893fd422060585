"""REINFORCE++ (arXiv 2501.03262) for a policy that is a mixture with a learned weight; pure functions of tensors.

The policy at a token is v = w p + (1 - w) q with p and q frozen, so all that a step needs of a rollout are five things
per token: what the head reads (h_q, h_p), p(x), q(x) and TV(p, q). No language model runs in here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
KL_LIMIT = 10.0
LEAST_STD = 1e-6
"""Advantages that differ by less are equal: a batch in which every answer earned the same teaches nothing."""

Reduce = Callable[[list[float]], list[float]]
"""Sums over all ranks, of values that every rank brings."""


def alone(values: list[float]) -> list[float]:
    """The `Reduce` of a single process."""
    return values


def log_mixture(
    weight: Float[Tensor, "tokens"], p: Float[Tensor, "tokens"], q: Float[Tensor, "tokens"]
) -> Float[Tensor, "tokens"]:
    """log v(x) = log(w p(x) + (1 - w) q(x)) of the tokens that were drawn. d log v / dw = (p - q) / v."""
    return torch.log((weight * p + (1.0 - weight) * q).clamp(min=torch.finfo(torch.float32).tiny))


def centred_by_group(rewards: Float[Tensor, "texts"], groups: Int[Tensor, "texts"]) -> Float[Tensor, "texts"]:
    """R minus the mean of its prompt's answers (the -baseline variant; not divided by their spread)."""
    _, index = groups.unique(return_inverse=True)
    counts = torch.bincount(index).to(rewards.dtype)
    sums = torch.zeros_like(counts).index_add_(0, index, rewards)
    return rewards - (sums / counts)[index]


def reward_to_go(
    rewards: Float[Tensor, "texts"], texts: Int[Tensor, "tokens"], costs: Float[Tensor, "tokens"] | None = None
) -> Float[Tensor, "tokens"]:
    """A_t = sum over i >= t of r_i, undiscounted: the text's reward, which comes with its last token, less the costs
    from t on.

    texts: of each token, ascending, tokens of a text in order. costs: beta KL of each token.
    """
    found = rewards[texts]
    if costs is None:
        return found
    total = torch.zeros_like(rewards).index_add_(0, texts, costs)
    sums = costs.cumsum(0)
    first = torch.ones_like(texts, dtype=torch.bool)
    first[1:] = texts[1:] != texts[:-1]
    before = (sums - costs)[first]  # of the text's first token
    position = first.cumsum(0) - 1
    return found - (total[texts] - (sums - costs - before[position]))


def normalised(values: Float[Tensor, "tokens"], reduce: Reduce = alone) -> Float[Tensor, "tokens"]:
    """(A - mean) / std over the valid tokens of all ranks; zeros where they are all equal. Population variance."""
    double = values.double()
    total, count = reduce([float(double.sum()), float(values.numel())])
    mean = total / count if count else 0.0
    squares, _ = reduce([float((double - mean).square().sum()), 0.0])
    std = math.sqrt(squares / count) if count else 0.0
    return ((double - mean) / std if std > LEAST_STD else torch.zeros_like(double)).to(values.dtype)


def clipped(
    log_prob: Float[Tensor, "tokens"],
    old_log_prob: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    clip: float,
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """(-min(rho A, clip(rho, 1 - clip, 1 + clip) A), whether the clip decides) per token; rho is 1 where nothing has
    been learned since the rollout.
    """
    ratio = torch.exp((log_prob - old_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    plain, bounded = ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages
    return -torch.minimum(plain, bounded), (bounded < plain).float()


@dataclass(frozen=True)
class Reinforce:
    """How rewards become a loss.

    estimator: "reinforce++" normalises rewards over the whole batch; "reinforce++-baseline" takes from each the mean of
        its prompt's answers first, which needs several.
    clip: of PPO's ratio. kl: beta, what straying from the target itself (the reference, w = 1) costs: in the reward
        (k1), or for the -baseline variant in the loss (k2). 0: nothing.
    """

    estimator: Literal["reinforce++", "reinforce++-baseline"] = "reinforce++"
    clip: float = 0.2
    kl: float = 0.0

    def __post_init__(self) -> None:
        if self.estimator not in ("reinforce++", "reinforce++-baseline"):
            raise ValueError(f"estimator must be reinforce++ or reinforce++-baseline, got {self.estimator!r}")
        if not 0.0 < self.clip < 1.0:
            raise ValueError(f"clip must be in (0, 1), got {self.clip}")
        if not 0.0 <= self.kl < math.inf:
            raise ValueError(f"kl must be at least 0, got {self.kl}")

    @property
    def is_centred(self) -> bool:
        return self.estimator == "reinforce++-baseline"

    def advantages(
        self,
        rewards: Float[Tensor, "texts"],
        groups: Int[Tensor, "texts"],
        texts: Int[Tensor, "tokens"],
        log_prob: Float[Tensor, "tokens"],
        log_p: Float[Tensor, "tokens"],
        reduce: Reduce = alone,
    ) -> Float[Tensor, "tokens"]:
        """[tokens] with mean 0 and standard deviation 1 over all ranks. log_prob: log v(x) as it was drawn."""
        if self.is_centred:
            return normalised(reward_to_go(centred_by_group(rewards, groups), texts), reduce)
        costs = self.kl * (log_prob - log_p).clamp(-KL_LIMIT, KL_LIMIT) if self.kl else None
        return normalised(reward_to_go(rewards, texts, costs), reduce)

    def penalty(self, log_prob: Float[Tensor, "tokens"], log_p: Float[Tensor, "tokens"]) -> Float[Tensor, "tokens"]:
        """beta (log v - log p)^2 / 2 per token where the loss carries it."""
        if not self.is_centred or not self.kl:
            return torch.zeros_like(log_prob)
        return 0.5 * self.kl * (log_prob - log_p).clamp(-KL_LIMIT, KL_LIMIT).square()


@dataclass
class Budget:
    """Keeps a measure at a value by turning lambda: it grows while there is room and shrinks while there is none.

    measure: "tv", distance to the target per token, at most `value`; "reward", mean reward, at least `value`.
    rate: how fast; log lambda moves by rate times how far off, in parts of the value, and by no more than the rate.
    """

    measure: Literal["tv", "reward"]
    value: float
    rate: float = 0.1

    def __post_init__(self) -> None:
        if self.measure not in ("tv", "reward"):
            raise ValueError(f"measure must be tv or reward, got {self.measure!r}")
        if not 0.0 < self.value < math.inf or not 0.0 < self.rate <= 1.0:
            raise ValueError(f"value must be above 0 and rate in (0, 1], got {self.value} and {self.rate}")

    def turned(self, strength: float, reward: float, tv: float) -> float:
        """The next lambda, within [1e-6, 1e3]."""
        room = (self.value - tv if self.measure == "tv" else reward - self.value) / self.value
        return min(1e3, max(1e-6, strength * math.exp(self.rate * min(1.0, max(-1.0, room)))))
