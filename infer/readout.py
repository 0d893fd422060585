"""What the host learns of a pass's logits before it decides, in one transfer.

Verification asks one distribution after the other, and asking a GPU means to wait for it. So all that may be asked is
read at once: the tokens that follow each node, and what drafters want to learn from. On a CPU, where asking costs only
what it takes, the nodes that are sure to be asked are the roots.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..modules.acceptance import Distribution, next_draws
from ..modules.sampling import Asked, LogitsPipeline, distributions, likeliest, rows_of
from ..modules.token_tree import TokenTree
from ..modules.transfer import Fetch, is_apart

Likely = tuple[list[int], list[float]]
"""The likeliest tokens after one node, best first, and their log-probabilities among themselves."""


def just_so_many(likely: list[Likely] | None, count: int, vocab: int) -> list[Likely] | None:
    """What was read, where that is the `count` likeliest tokens: of others they are not weighed among themselves."""
    return likely if likely and len(likely[0][0]) == min(count, vocab) else None


class PromptRows:
    """What a model says after some tokens of a prompt, for a drafter that reads them. logits: [rows, vocab]."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.known: list[Likely] | None = None

    def likely(self, count: int) -> list[Likely]:
        """The likeliest tokens of each row: as read with the pass, or read now."""
        return just_so_many(self.known, count, self.logits.shape[1]) or likely_rows(self.logits, count)


class Proposal(NamedTuple):
    """num_likely: likeliest tokens that a drafter will ask of each node."""

    tree: TokenTree
    pipeline: LogitsPipeline
    generator: torch.Generator
    num_likely: int = 0


@dataclass
class Known:
    """What has been read of one proposal. distributions: by node; those that are missing were not read, or are none.
    likely: of all nodes; None: not read.
    """

    distributions: dict[int, Distribution] = field(default_factory=dict)
    likely: list[Likely] | None = None


def read_out(
    logits: Tensor, proposals: SequenceOf[Proposal], prompts: SequenceOf[tuple[PromptRows, int]] = ()
) -> list[Known]:
    """logits: [nodes of all proposals, vocab]. prompts: rows that will be read too, and how many likeliest tokens."""
    fetch, known = Fetch(is_apart(logits.device)), [Known() for _ in proposals]
    if len(proposals) == 1 and not fetch.apart:  # nothing is saved by reading one row ahead
        return known
    asked: list[Asked] = []
    nodes: list[tuple[Known, int]] = []
    starts = list(itertools.accumulate((len(proposal.tree) for proposal in proposals), initial=0))
    for one, proposal, first in zip(known, proposals, starts, strict=False):
        for ask in _asked(proposal, first, fetch.apart):
            asked.append(ask)
            nodes.append((one, ask.row - first))
    finish = distributions(logits, asked, fetch)
    likely = _start_likely(logits, proposals, starts, fetch) if fetch.apart else []
    also = [(rows, _start(rows.logits, count, fetch)) for rows, count in prompts if count]
    got = fetch.take()
    for (one, node), distribution in zip(nodes, finish(got), strict=True):
        if distribution is not None:
            one.distributions[node] = distribution
    for numbers, places in likely:
        rows = list(zip(*(got[place] for place in places), strict=True))
        for number in numbers:
            size = starts[number + 1] - starts[number]
            known[number].likely, rows = rows[:size], rows[size:]
    for prompt, places in also:
        prompt.known = list(zip(*(got[place] for place in places), strict=True))
    return known


def _asked(proposal: Proposal, first: int, all_nodes: bool) -> list[Asked]:
    """The nodes of one proposal that are read, whose logits begin at row `first`. A node is asked when all above it
    have taken a draw each."""
    tree, pipeline, generator, _ = proposal
    if pipeline.kind is None:
        return []
    nodes = range(len(tree)) if all_nodes else range(1)
    if pipeline.is_greedy:
        return [Asked(pipeline, first + node) for node in nodes]
    depths = [tree.depths[node] for node in nodes]
    draws = next_draws(generator, max(depths) + 1)
    return [
        Asked(pipeline, first + node, draws[depth], _drafted(tree, node))
        for node, depth in zip(nodes, depths, strict=True)
    ]


def _drafted(tree: TokenTree, node: int) -> int:
    """The token whose probability decides at a node; -1: none does."""
    return next(iter(tree.children[node]), -1) if tree.probs is not None else -1


def _start(rows: Tensor, count: int, fetch: Fetch) -> tuple[int, int]:
    """The places of the likeliest ids and of their log-probabilities."""
    ids, logprobs = likeliest(rows, count, among_them=True)
    return fetch.add(ids), fetch.add(logprobs)


def _start_likely(
    logits: Tensor, proposals: SequenceOf[Proposal], starts: list[int], fetch: Fetch
) -> list[tuple[list[int], tuple[int, int]]]:
    """(proposals, `_start` of all their rows), together where drafters ask for as many. starts: their rows'."""
    groups: dict[int, list[int]] = defaultdict(list)
    for number, proposal in enumerate(proposals):
        if proposal.num_likely:
            groups[proposal.num_likely].append(number)
    found = []
    for count, numbers in groups.items():
        rows = [row for number in numbers for row in range(starts[number], starts[number + 1])]
        found.append((numbers, _start(rows_of(logits, rows), count, fetch)))
    return found


def drawn(
    pipelines: SequenceOf[LogitsPipeline], logits: Tensor, generators: SequenceOf[torch.Generator]
) -> list[Distribution | None]:
    """Of each row of logits its distribution, with what `sample` will give, in one transfer; None: see
    `distributions`."""
    fetch = Fetch(is_apart(logits.device))
    asked = [
        Asked(pipeline, row, 0.0 if pipeline.is_greedy or pipeline.kind is None else next_draws(generator, 1)[0])
        for row, (pipeline, generator) in enumerate(zip(pipelines, generators, strict=True))
    ]
    finish = distributions(logits, asked, fetch)
    return finish(fetch.take())


def likely_rows(rows: Tensor, count: int) -> list[Likely]:
    """The likeliest tokens of some rows of logits, read now."""
    fetch = Fetch(is_apart(rows.device))
    places = _start(rows, count, fetch)
    got = fetch.take()
    return list(zip(*(got[place] for place in places), strict=True))
