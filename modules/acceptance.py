"""The acceptance rule: the only place where a drafted token becomes an emitted one.

One function, `verify`, walks a proposal against a target distribution. Its cases fall out of the arguments: no draft is
plain decoding, a chain with distributions is speculative sampling (Leviathan et al. 2023, Algorithm 1), a tree without
distributions follows a fresh draw from the target as long as the drafts contain it, and a one-hot target is greedy.
Which distribution is verified against is the target rule's business (infer/target.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from .token_tree import TokenTree


@runtime_checkable
class Distribution(Protocol):
    """A next-token distribution over a vocabulary."""

    @property
    def distance(self) -> float:
        """TV to the target's own distribution, in whose place it stands."""
        ...

    def prob(self, token_id: int) -> float: ...

    def sample(self, generator: torch.Generator | None) -> int: ...

    def residual(self, q: Distribution) -> Distribution:
        """norm(max(0, self - q)): what is left of the target once a draft from q was rejected."""
        ...

    def dense(self) -> Tensor:
        """[vocab] probabilities that sum to one."""
        ...


@dataclass(frozen=True)
class OneHot:
    """All mass on one token: temperature 0, or a token that was looked up rather than drawn."""

    token_id: int
    vocab_size: int

    @property
    def distance(self) -> float:
        return 0.0

    def prob(self, token_id: int) -> float:
        return float(token_id == self.token_id)

    def sample(self, generator: torch.Generator | None) -> int:
        return self.token_id

    def residual(self, q: Distribution) -> OneHot:
        return self  # max(0, self - q) has mass at most on this token, and some: q(token) < 1 or nothing was rejected

    def dense(self) -> Tensor:
        return torch.zeros(self.vocab_size).index_fill_(0, torch.tensor(self.token_id), 1.0)


@dataclass(frozen=True)
class Peak(OneHot):
    """A greedy choice that remembers what it is the most likely token of, for rules that weigh it. probs: [vocab]."""

    probs: Tensor


@dataclass(frozen=True)
class Dense:
    """probs: [vocab], non-negative, summing to one up to rounding."""

    probs: Tensor

    @property
    def distance(self) -> float:
        return 0.0

    def prob(self, token_id: int) -> float:
        return float(self.probs[token_id]) if token_id < self.probs.shape[0] else 0.0

    def sample(self, generator: torch.Generator | None) -> int:
        """Inversion: one uniform a token. multinomial draws one per vocabulary entry, 17 times slower at 49152."""
        return self._drawn_by(_uniform(generator))

    def _drawn_by(self, draw: float) -> int:
        cumulative = self.probs.cumsum(0, dtype=torch.float64)
        token_id = int(torch.searchsorted(cumulative, cumulative[-1] * draw, right=True))
        if token_id == self.probs.shape[0]:
            raise ValueError("probs must be non-negative with a positive sum, got NaN or no mass at all")
        return token_id

    def residual(self, q: Distribution) -> Distribution:
        left = self.probs.clone()
        if isinstance(q, OneHot):
            left[q.token_id : q.token_id + 1] = 0.0  # an empty slice where the target's vocabulary is smaller
        else:
            shared = q.dense()[: left.shape[0]].to(left)
            left[: shared.shape[0]].sub_(shared).clamp_(min=0.0)
        mass = left.sum()
        return Dense(left / mass) if mass > 0 else self  # equal up to rounding: nothing could have been rejected

    def dense(self) -> Tensor:
        return self.probs


@dataclass(frozen=True)
class Drawn(Dense):
    """One whose next token has been read already, with many others': the one that the uniform `draw` gives.

    known_id, mass: a token whose probability has been read too, perhaps the same.
    """

    token_id: int
    draw: float
    known_id: int
    mass: float

    def prob(self, token_id: int) -> float:
        return self.mass if token_id == self.known_id else super().prob(token_id)

    def sample(self, generator: torch.Generator | None) -> int:
        draw = _uniform(generator)
        return self.token_id if draw == self.draw else self._drawn_by(draw)


@dataclass(frozen=True)
class Verdict:
    """What one pass decided.

    path: accepted nodes from the root on, `[0, 2, 5]`; the root itself was emitted earlier.
    next_token: the token that follows the path, drawn from the target: a bonus if the path ended where the proposal
        did, a correction otherwise. It is the next step's root. None where the target let nothing follow.
    corrected: whether drafts below the end of the path were turned down.
    """

    path: list[int]
    next_token: int | None
    corrected: bool

    @property
    def num_accepted(self) -> int:
        return len(self.path) - 1

    def emitted(self, tree: TokenTree) -> list[int]:
        """The token ids that the pass adds to the text."""
        accepted = [tree.token_ids[node] for node in self.path[1:]]
        return accepted if self.next_token is None else [*accepted, self.next_token]


def accept_prob(p: float, q: float) -> float:
    """min(1, p/q), the probability of keeping a token drawn from q when the target gives it p."""
    if not q > 0.0:
        raise ValueError(f"a drafted token must have positive probability under its own distribution, got {q}")
    if not p >= 0.0:  # NaN included, which min() would turn into certain acceptance
        raise ValueError(f"the target's probability of a drafted token must be in [0, 1], got {p}")
    return min(1.0, p / q)


def _uniform(generator: torch.Generator | None) -> float:
    """A draw from [0, 1) with 53 bits, on whatever device the generator lives."""
    device = None if generator is None else generator.device
    return torch.rand((), generator=generator, dtype=torch.float64, device=device).item()


def next_draws(generator: torch.Generator, count: int) -> list[float]:
    """The uniforms that `generator` will give next; it is left as it is."""
    return torch.rand(count, generator=generator.clone_state(), dtype=torch.float64, device=generator.device).tolist()


Target = Callable[[int], Distribution | None]
"""node -> what its successor is drawn from; None: the text ends with this node."""


def verify(tree: TokenTree, target: Target, generator: torch.Generator | None = None) -> Verdict:
    """Walk the proposal from the root; every emitted token is distributed as the target at its prefix.

    `target(node)` gives the distribution after `node` and is asked once per visited node, in order, so processors with
    state see exactly the prefixes of plain decoding. Without distributions each emitted token costs one draw, as in
    plain decoding: with the same generator the text is the same, not only its law.
    """
    path = [0]
    while True:
        node = path[-1]
        p, children = target(node), tree.children[node]
        if p is None:
            return Verdict(path, None, corrected=False)
        if tree.probs is None or not children:
            token_id = p.sample(generator)
            child = children.get(token_id)
        else:
            ((drafted, candidate),) = children.items()
            q = tree.probs[candidate - 1]
            chance = accept_prob(p.prob(drafted), q.prob(drafted))
            kept = _uniform(generator) < chance  # drawn always: whether chance is 1 can be a matter of rounding
            token_id, child = (drafted, candidate) if kept else (p.residual(q).sample(generator), None)
        if child is None:
            return Verdict(path, token_id, corrected=bool(children))
        path.append(child)
