"""A draft proposal: a tree of tokens hanging below the last token that was sampled but not yet run.

Host data only, so drafters and the scheduler are testable without a model. Which tokens survive is decided by
`acceptance.verify`, never here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from .acceptance import Distribution


@dataclass(frozen=True)
class TokenTree:
    """Nodes in topological order; node 0 is the root and a parent always precedes its children.

    `TokenTree([7, 3, 4, 3], [-1, 0, 0, 1])` proposes 3 and 4 after the root 7, and 3 again after the first 3.

    token_ids: one id per node, the root included.
    parents: index of each node's parent, -1 for the root.
    probs: for a chain that was sampled, the processed distribution each drafted token was drawn from (node i at i - 1),
        and perhaps one more, of what would follow the last; None for a proposal without distributions (retrieval).
    states: [probs, size] hidden states that those distributions were made of, for rules that look at them.
    sources: a short label per node saying where it came from, e.g. "ngram"; the root's is ignored. Empty: unlabelled.
    hidden: [rows, hidden] residual stream after the first `depth` layers of the target, where the drafter has run
        them already: of the `num_before` committed tokens that were pending before the root, the root, and as many
        nodes as it has run, in order: all of a tree, some of a chain. Their keys and values are cached.

    Raises ValueError for a malformed tree, for siblings with the same token (which would be the same continuation
    twice) and for a branching tree with distributions, which none of the papers defines.
    """

    token_ids: Sequence[int]
    parents: Sequence[int]
    probs: Sequence[Distribution] | None = None
    sources: Sequence[str] = ()
    hidden: Tensor | None = None
    depth: int = 0
    num_before: int = 0
    states: Tensor | None = None
    children: tuple[dict[int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.parents) or not self.token_ids or self.parents[0] != -1:
            raise ValueError(f"parents must be [-1, ...] with one entry per token, got {self.parents!r}")
        if self.sources and len(self.sources) != len(self.token_ids):
            raise ValueError(f"sources must have one label per node ({len(self.token_ids)}), got {len(self.sources)}")
        children: tuple[dict[int, int], ...] = tuple({} for _ in self.token_ids)
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(f"parents[{node}] must be in [0, {node}), got {parent}")
            if children[parent].setdefault(self.token_ids[node], node) != node:
                raise ValueError(f"token {self.token_ids[node]} is proposed twice below node {parent}")
        object.__setattr__(self, "children", children)
        if self.probs is not None and not (self.is_chain and 0 <= len(self.probs) - self.num_drafted <= 1):
            raise ValueError("probs need a chain and one distribution per drafted token")
        if self.states is not None and (self.probs is None or self.states.shape[0] != len(self.probs)):
            raise ValueError("states need a row for each distribution of probs")
        least = self.num_before + (1 if self.is_chain else len(self))
        if self.hidden is not None and not least <= self.num_run <= self.num_before + len(self):
            raise ValueError("hidden needs a row for each token pending before, and per node; a chain's may end early")

    @classmethod
    def root(cls, token_id: int) -> TokenTree:
        """The empty proposal: verifying it is autoregressive decoding."""
        return cls((token_id,), (-1,))

    @classmethod
    def chain(
        cls,
        token_ids: Sequence[int],
        probs: Sequence[Distribution] | None = None,
        source: str = "chain",
        states: Tensor | None = None,
    ) -> TokenTree:
        """A chain; token_ids[0] is the root."""
        return cls(token_ids, range(-1, len(token_ids) - 1), probs, (source,) * len(token_ids), states=states)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_run(self) -> int:
        """New tokens of the sequence, pending ones included, that have been through `depth` layers."""
        return 0 if self.hidden is None else self.hidden.shape[0]

    @property
    def num_drafted(self) -> int:
        return len(self.token_ids) - 1

    def drawn_from(self, node: int) -> Distribution | None:
        """The draft's distribution of what follows a node; None where nothing was drawn."""
        return None if self.probs is None or node >= len(self.probs) else self.probs[node]

    @cached_property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @cached_property
    def depths(self) -> list[int]:
        """Distance of each node from the root; a node's position is the root's plus this."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    def path_to(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def _rows_of(self, nodes: Sequence[int]) -> list[int]:
        """Rows of `hidden` that belong to these nodes and to what was pending before them."""
        rows = (self.num_before + node for node in nodes)
        return [*range(self.num_before), *(row for row in rows if row < self.num_run)]

    def clipped(self, max_depth: int, max_nodes: int) -> TokenTree:
        """The same proposal without nodes deeper than `max_depth` and with at most `max_nodes` nodes, root included.

        The root always stays.
        """
        max_depth, max_nodes = max(max_depth, 0), max(max_nodes, 1)
        if len(self) <= max_nodes and (max_depth >= len(self) - 1 or max(self.depths) <= max_depth):
            return self
        keep = [node for node, depth in enumerate(self.depths) if depth <= max_depth][:max_nodes]
        index = {old: new for new, old in enumerate(keep)}  # a parent precedes its children, so it is kept too
        drawn = len(keep) - 1 + (0 if self.probs is None else len(self.probs) - self.num_drafted)
        return TokenTree(
            [self.token_ids[node] for node in keep],
            [-1, *(index[self.parents[node]] for node in keep[1:])],
            None if self.probs is None else self.probs[:drawn],
            [self.sources[node] for node in keep] if self.sources else (),
            None if self.hidden is None else self.hidden[self._rows_of(keep)],
            self.depth,
            self.num_before,
            None if self.states is None else self.states[:drawn],
        )
