"""What theory says of acceptance, beside what is measured: of single drafts, and of whole chains.

A draft drawn from q is kept with probability sum_x min(q(x), v(x)), which is 1 - w TV(p, q) for a mixture. For N drafts

    E[T_N] = sum_n E_{x ~ q}[ prod_{t <= n} min(1, v_t(x_t) / q_t(x_t)) ]

is exact whatever the positions have to do with each other (DIVERSED, arXiv 2604.07622). Both are conditional means of
what verification then draws, given all that came before. So their differences to it add up without bias, and the
variance of the sum is known: a z-score needs no assumption but that of large numbers.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Any

from ..infer.stats import ratio

if TYPE_CHECKING:
    from ..infer.drafter import Observation
    from ..infer.target import TargetRule
    from ..modules.acceptance import Distribution
    from ..modules.token_tree import TokenTree


@dataclass(frozen=True)
class Theory:
    """Sums over positions and chains; `Theory.total` adds them.

    positions: drafts that were decided, all before them in their chain kept. accepted: those kept.
    chance, chance_variance: sums of the probability a to be kept, and of a (1 - a), over positions.
    chains: proposals of at least one draft. expected, expected_squared: sums of E[T | chain] and its square over
        chains. expected_variance: of the variance of T given the chain. accepted_squared: of T squared, T being the
        number of its drafts that were kept; that of T is `accepted`.
    """

    positions: int = 0
    accepted: int = 0
    chance: float = 0.0
    chance_variance: float = 0.0
    chains: int = 0
    expected: float = 0.0
    expected_squared: float = 0.0
    expected_variance: float = 0.0
    accepted_squared: float = 0.0

    @classmethod
    def total(cls, parts: Iterable[Theory]) -> Theory:
        return cls(*map(sum, zip(*map(astuple, parts), strict=True)))

    @classmethod
    def of_chain(cls, keeps: Sequence[float], chances: Sequence[float], accepted: int) -> Theory:
        """One chain. keeps: min(1, v/q) of each of its drafts. chances: sum_x min(q, v) where one was decided."""
        survival = list(accumulate(keeps, mul))  # P(T >= n)
        mean = sum(survival)
        square = sum((2 * n - 1) * share for n, share in enumerate(survival, start=1))
        return cls(
            len(chances),
            accepted,
            sum(chances),
            sum(a * (1 - a) for a in chances),
            1,
            mean,
            mean**2,
            max(0.0, square - mean**2),
            accepted**2,
        )

    def figures(self) -> dict[str, Any]:
        """Predicted and measured side by side; a standard error is None for one chain, z where nothing is random."""
        return {
            "positions": self.positions,
            "acceptance_predicted": ratio(self.chance, self.positions),
            "acceptance_measured": ratio(self.accepted, self.positions),
            "acceptance_z": z_score(self.accepted - self.chance, self.chance_variance),
            "chains": self.chains,
            "accepted_predicted": ratio(self.expected, self.chains),
            "accepted_predicted_error": standard_error(self.expected, self.expected_squared, self.chains),
            "accepted_measured": ratio(self.accepted, self.chains),
            "accepted_measured_error": standard_error(self.accepted, self.accepted_squared, self.chains),
            "accepted_z": z_score(self.accepted - self.expected, self.expected_variance),
        }


def z_score(difference: float, variance: float) -> float | None:
    """None where nothing is left to chance but rounding, as in greedy decoding."""
    return difference / math.sqrt(variance) if variance > 1e-9 else None


def standard_error(total: float, squares: float, count: int) -> float | None:
    """Of a mean, from the sum of values and of their squares."""
    if count < 2:
        return None
    return math.sqrt(max(0.0, squares - total**2 / count) / (count - 1) / count)


def independent(rate: float, drafted_at: Iterable[int]) -> float:
    """Mean T if every draft were kept with the same probability, whatever is around it: the i.i.d. formula.

    drafted_at: per depth from 1 on, the chains that reach it.
    """
    counts = list(drafted_at)
    return ratio(sum(count * rate**n for n, count in enumerate(counts, start=1)), counts[0] if counts else 0)


class Watcher:
    """Collects `Theory` by text while an engine runs: append it to `engine.watchers`.

    rule: what the drafts are verified against. ends: ids that end a text; drafts behind one are never decided.
    seconds: that it took itself, to be taken off the run's.
    """

    def __init__(self, rule: TargetRule, ends: Collection[int]) -> None:
        self.rule, self.ends = rule, ends
        self.seconds = 0.0
        self._texts: dict[tuple[str, int], list[Theory]] = defaultdict(list)

    def __call__(self, observations: Sequence[Observation]) -> None:
        started = time.perf_counter()
        for seen in observations:
            if seen.tree.num_drafted and seen.tree.probs is not None and seen.sequence.error is None:
                self._texts[seen.sequence.request_id, seen.sequence.index].append(self._of(seen))
        self.seconds += time.perf_counter() - started

    def of_text(self, request_id: str, index: int) -> Theory:
        return Theory.total(self._texts.get((request_id, index), [Theory()]))

    def _of(self, seen: Observation) -> Theory:
        tree, verdict = seen.tree, seen.verdict
        length = _decidable(tree, self.ends)
        verified = list(map(verified_against(seen, self.rule), range(length)))
        return Theory.of_chain(
            [_keep(v, tree, node) for node, v in enumerate(verified)],
            [_chance(v, tree, node) for node, v in enumerate(verified[: verdict.num_accepted + 1])],
            verdict.num_accepted,
        )


def verified_against(seen: Observation, rule: TargetRule) -> Callable[[int], Distribution]:
    """node -> v after it, as the engine made it: also for nodes that were never reached."""
    from ..modules.sampling import LogitsPipeline

    assert seen.states is not None, "the last stage's observations hold them"
    sequence, tree = seen.sequence, seen.tree
    pipeline = LogitsPipeline(sequence.params, sequence.num_prompt, keep_probs=not rule.lossless)
    bound = rule.bind(tree, seen.states)

    def at(node: int) -> Distribution:
        prefix = [*sequence.token_ids, *tree.token_ids[1 : node + 1]]
        return bound(node, pipeline(seen.logits[node], prefix), tree.drawn_from(node))

    return at


def _decidable(tree: TokenTree, ends: Collection[int]) -> int:
    """Drafts of a chain up to one that ends the text."""
    drafted = tree.token_ids[1:]
    return next((n for n, token_id in enumerate(drafted, start=1) if token_id in ends), len(drafted))


def _keep(v: Distribution, tree: TokenTree, node: int) -> float:
    from ..modules.acceptance import accept_prob

    assert tree.probs is not None
    token_id = tree.token_ids[node + 1]
    return accept_prob(v.prob(token_id), tree.probs[node].prob(token_id))


def _chance(v: Distribution, tree: TokenTree, node: int) -> float:
    from ..modules.ensemble import acceptance

    assert tree.probs is not None
    return acceptance(v, tree.probs[node])
