"""Target rules: which distribution a proposal is verified against.

The exact rule takes the target's own. The others take one between target and draft, and so more drafts are accepted and
the text is no longer the target's: they are lossy, say so, and know at each token how far they went. They act where the
draft's distribution is known; a proposal that was looked up is always verified exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..modules.acceptance import Distribution, OneHot
from ..modules.ensemble import (
    Lenient,
    Mixture,
    Replaced,
    aligned,
    cascade_opt,
    cascade_token,
    peak,
    soft,
    total_variation,
)
from ..modules.ensemble_head import EnsembleHead
from ..modules.token_tree import TokenTree

BoundRule = Callable[[int, Distribution, Distribution | None], Distribution]
"""(node, the target's distribution after it, the draft's there or None) -> what is verified against."""


class TargetRule:
    """From p and the draft's q to what is verified. Base class of the lossy ones.

    bonus: a token after the last draft is drawn from the rule's distribution too, for which the draft runs one token
        further; else from p.
    """

    lossless = False

    def __init__(self, bonus: bool = False) -> None:
        self.bonus = bonus

    def to(self, device: torch.device) -> None:
        """Called by the engine: where the target's states are."""

    def bind(self, tree: TokenTree, states: Tensor) -> BoundRule:
        """The rule for one proposal. states: [nodes, embed] of the target after its final norm."""
        return lambda node, p, q: p if q is None else self._between(p, q, 1.0)

    def _between(self, p: Distribution, q: Distribution, weight: float) -> Distribution:
        """Greedy: the argmax of the rule's row, from probabilities at temperature 1, as transformers does."""
        if isinstance(p, OneHot):
            row = soft(p)
            return Greedy.of(self.value(row, aligned(soft(q), row.shape[0]), weight).dense(), p)
        row = p.dense()
        return self.value(row, aligned(q.dense().to(row), row.shape[0]), weight)

    def value(self, p: Tensor, q: Tensor, weight: float) -> Mixture | Lenient | Replaced:
        """[vocab] rows over the target's vocabulary -> the distribution, with its `distance` to p."""
        raise NotImplementedError


@dataclass(frozen=True)
class Greedy(OneHot):
    """The argmax of a rule's row. distance: 1 where the target's own is another."""

    distance: float = 0.0

    @classmethod
    def of(cls, row: Tensor, p: OneHot) -> Greedy:
        chosen = peak(row)
        return cls(chosen.token_id, chosen.vocab_size, float(chosen.token_id != p.token_id))


class Exact(TargetRule):
    """The target itself: the emitted text has the target's distribution."""

    lossless = True

    def bind(self, tree: TokenTree, states: Tensor) -> BoundRule:
        return lambda node, p, q: p


class Ensemble(TargetRule):
    """w p + (1 - w) q; subclasses say what w is. Raises ValueError for max_tv outside [0, 1]."""

    def __init__(self, max_tv: float, bonus: bool) -> None:
        super().__init__(bonus)
        if not 0.0 <= max_tv <= 1.0:
            raise ValueError(f"max_tv must be in [0, 1], 1 being no bound, got {max_tv}")
        self.max_tv = max_tv

    def value(self, p: Tensor, q: Tensor, weight: float) -> Mixture:
        return Mixture(p, q, weight, self.max_tv)


class StaticEnsemble(Ensemble):
    """w p + (1 - w) q with one w for all tokens. Raises ValueError for a weight or max_tv outside [0, 1]."""

    def __init__(self, weight: float, max_tv: float = 1.0, bonus: bool = False) -> None:
        super().__init__(max_tv, bonus)
        if not 0.0 <= weight <= 1.0:
            raise ValueError(f"weight must be in [0, 1], 1 being the target itself, got {weight}")
        self.weight = weight

    def bind(self, tree: TokenTree, states: Tensor) -> BoundRule:
        return lambda node, p, q: p if q is None else self._between(p, q, self.weight)


class LearnedEnsemble(Ensemble):
    """w p + (1 - w) q with w from a head, token by token (DIVERSED)."""

    def __init__(self, head: EnsembleHead, max_tv: float = 1.0, bonus: bool = False) -> None:
        super().__init__(max_tv, bonus)
        self.head = head

    def to(self, device: torch.device) -> None:
        self.head.to(device)

    def bind(self, tree: TokenTree, states: Tensor) -> BoundRule:
        if tree.states is None:
            return lambda node, p, q: p
        weights = self.weights(tree.states, states[: tree.states.shape[0]])
        return lambda node, p, q: p if q is None else self._between(p, q, weights[node])

    @torch.no_grad()
    def weights(self, draft: Tensor, target: Tensor) -> list[float]:
        """w at each row. Raises ValueError for states of other sizes than the head was made for."""
        found, wanted = (draft.shape[1], target.shape[1]), (self.head.draft_size, self.head.target_size)
        if found != wanted:
            raise ValueError(f"the ensemble head is for hidden sizes {wanted} of draft and target, these have {found}")
        return self.head(draft, target).tolist()


class Lossy(TargetRule):
    """Accept with min(1, p / ((1 - lenience) q)). Raises ValueError for a lenience outside [0, 1)."""

    def __init__(self, lenience: float, bonus: bool = False) -> None:
        super().__init__(bonus)
        if not 0.0 <= lenience < 1.0:
            raise ValueError(f"lenience must be in [0, 1), 0 being exact, got {lenience}")
        self.lenience = lenience

    def value(self, p: Tensor, q: Tensor, weight: float) -> Lenient:
        return Lenient(p, q, self.lenience)


class SpecCascade(TargetRule):
    """A target that defers to the draft where it may (Narasimhan et al., ICLR 2025): rule "opt" or "token".

    Its tests are made on the distributions that are mixed; where those are tempered, the paper's are not. Raises
    ValueError for an alpha outside [0, 1].
    """

    RULES: ClassVar = {"opt": cascade_opt, "token": cascade_token}

    def __init__(self, alpha: float, rule: str = "token", bonus: bool = False) -> None:
        super().__init__(bonus)
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"alpha must be in [0, 1], got {alpha}")
        if rule not in self.RULES:
            raise ValueError(f"rule must be one of {', '.join(self.RULES)}, got {rule!r}")
        self.alpha, self.rule = alpha, rule

    def value(self, p: Tensor, q: Tensor, weight: float) -> Replaced:
        allowed = Mixture(p, q, 0.0).dense()  # q, without what p forbids
        row = self.RULES[self.rule](p, allowed, self.alpha)
        return Replaced(row, total_variation(p, row))
