"""Where proposals come from.

A drafter proposes; it never decides. The engine calls `propose` with the sequences that wait for a verification pass,
verifies what it gets, and tells the drafter what came out through `observe`. A drafter that raises costs that step its
draft, not the request.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..modules.acceptance import Verdict
from ..modules.kv_cache import PagedKVCache
from ..modules.layered_model import LayeredModel
from ..modules.sampling import rows_of
from ..modules.token_tree import TokenTree
from .readout import Likely, PromptRows, just_so_many, likely_rows
from .request import GenerationParams, Sequence
from .target import Exact, TargetRule

if TYPE_CHECKING:
    from .exits import EarlyExits, Tap


@dataclass(frozen=True)
class Observation:
    """What one verification pass taught about one sequence.

    tree: the proposal as it was verified (the engine may have clipped the drafter's).
    verdict: what was accepted.
    logits: [nodes, vocab] raw target logits, row i predicts what follows node i. Valid during the call: copy what
        stays.
    states: [nodes, embed] what the target's unembedding made them of; None in an inner stage.
    likely: the likeliest tokens of all nodes, where they were read with the pass; `likely_on_paths` gives them always.
    """

    sequence: Sequence
    tree: TokenTree
    verdict: Verdict
    logits: Tensor
    states: Tensor | None = None
    likely: list[Likely] | None = None


def likely_on_paths(observations: SequenceOf[Observation], count: int) -> list[list[Likely]]:
    """Per observation, of each node of its accepted path the `count` likeliest tokens: as read with the pass, or in one
    more transfer. A drafter that asks says so in `num_likely`."""
    paths = [seen.verdict.path for seen in observations]
    if count == 0:
        return [[([], [])] * len(path) for path in paths]
    read = [just_so_many(seen.likely, count, seen.logits.shape[1]) for seen in observations]
    known = [rows for rows in read if rows is not None]
    if len(known) == len(observations):
        return [[rows[node] for node in path] for rows, path in zip(known, paths, strict=True)]
    rows = [rows_of(seen.logits, path) for seen, path in zip(observations, paths, strict=True)]
    found = likely_rows(rows[0] if len(rows) == 1 else torch.cat(rows), count)
    ends = list(itertools.accumulate(map(len, paths)))
    return [found[end - len(path) : end] for end, path in zip(ends, paths, strict=True)]


class SomeFailed(Exception):
    """Raised by `propose` when it cannot draft for some of its sequences, and the others should not lose theirs.

    outcomes: per sequence its proposal, or what was raised in making it.
    """

    def __init__(self, outcomes: SequenceOf[TokenTree | Exception]) -> None:
        super().__init__("some sequences could not be drafted for")
        self.outcomes = outcomes


class Drafter:
    """Base class of drafters, and the one that never drafts (autoregressive decoding).

    A drafter may keep state per sequence under `sequence.sequence_id`; `release` is called when that sequence has
    ended, however it ended. State must follow from `sequence.token_ids` and the observations: a sequence that was
    preempted comes back with the same ids.
    """

    name = "ar"
    taken = False
    """Whether an engine has it; set by that engine."""
    retrieves = False
    """Whether proposals come from lookups, labelled "ngram" where one matched; statistics then count retrieval hits."""
    target_rule: TargetRule = Exact()
    """What its proposals are verified against. A lossy rule wants `keep_probs` of a pipeline, and perhaps a bonus."""
    about_seeds: str | None = None
    """What it does otherwise for texts that are sampled with a seed, for those who read results of such."""
    exits: tuple[EarlyExits, ...] = ()
    """The target's early exits that it uses; the engine attaches them first, and collects the work they count."""

    num_likely: int = 0
    """How many of the likeliest tokens after each accepted node, and after what it reads, it asks for, see
    `likely_on_paths`: so many are read with the pass where asking later would be waiting."""
    prompt_vocab: int | None = None
    """Of the logits that it is given to `read`, it needs only the first so many tokens' ones; None: all."""

    def attach(self, model: LayeredModel, cache: PagedKVCache) -> None:
        """Called once by the engine that takes the drafter: the target it drafts for and the target's cache."""

    def check(self, params: GenerationParams) -> None:
        """Raise ValueError for settings of a request that this drafter cannot follow. Called when a request comes."""

    def taps(self, params: GenerationParams) -> frozenset[Tap]:
        """The heads that must be shown every token of a request's texts to draft for them."""
        return frozenset()

    def taps_of(self, sequence: Sequence, texts: int) -> frozenset[Tap]:
        """The heads that this text is shown to. Asked whenever the scheduler tries to start it: perhaps often while it
        waits for blocks, and after preemption again.

        texts: how many will then run. Texts that other heads are shown do not find its prefix in the cache.
        """
        return self.taps(sequence.params)

    def depth(self, params: GenerationParams) -> int:
        """How many of the target's layers its proposals have been through."""
        return 0

    def default_draft_tokens(self) -> int:
        """The proposal size used when neither engine nor request sets one: nodes of a tree, or length of a chain."""
        return 0

    def draft_tokens_for(self, params: GenerationParams) -> int:
        """`default_draft_tokens`, as far as it depends on the request's other settings."""
        return self.default_draft_tokens()

    def scratch_tokens(self, draft_tokens: int, params: GenerationParams) -> int:
        """Slots behind the pending tokens to reserve for a proposal of that size and the work on it."""
        return draft_tokens

    def propose(self, sequences: SequenceOf[Sequence]) -> list[TokenTree]:
        """One tree per sequence, rooted at `sequence.token_ids[-1]`.

        `sequence.draft_tokens` bounds the proposal (nodes of a tree with its root, or drafted tokens of a chain) and
        `sequence.max_depth` how deep a node can be and still be emitted.
        """
        return [TokenTree.root(sequence.token_ids[-1]) for sequence in sequences]

    def unread(self, sequence: Sequence, start: int, stop: int) -> SequenceOf[int]:
        """Which of the positions [start, stop), all before a root, it wants to `read` in this pass; rising.

        A pass over a prompt makes no logits but the root's unless a drafter asks: each row costs an unembedding of
        `prompt_vocab` tokens.
        """
        return ()

    def read(self, sequence: Sequence, positions: SequenceOf[int], rows: PromptRows) -> None:
        """rows: what the target says after these tokens, of the first `prompt_vocab`. Valid during the call."""

    def observe(self, observations: SequenceOf[Observation]) -> None:
        """Learn from verified steps. Called once per pass, before what was emitted is handed to the user."""

    def scheduled(self, running: SequenceOf[Sequence], tokens: int) -> None:
        """Called by the engine before every pass: its list of all texts under way, those whose prompt is being read
        included, and the tokens that the pass will run without drafts."""

    def timed(self, seconds: float, new_tokens: int, sequences: int) -> None:
        """How long the engine's last pass took, drafting and all, with so many new tokens of so many sequences.

        Called after every pass, also after those that it did not draft for.
        """

    def release(self, sequence_id: int) -> None:
        """Forget a sequence that has ended."""

    def reset(self) -> None:
        """Forget everything learned across sequences: a used drafter behaves as a fresh one."""


class TreeDrafter(Drafter):
    """A drafter whose trees come best node first, with estimates: any beginning of one is the best tree of its size.

    has_estimates: False for a drafter that as it was made cannot say what its nodes are worth; it has no `scored` then.
    """

    has_estimates = True

    def scored(self, sequences: SequenceOf[Sequence], least: float = 0.0) -> list[tuple[TokenTree, SequenceOf[float]]]:
        """`propose`, and for each node but the root the estimated probability of its being accepted, falling.

        least: the probability below which a node is of no use: it may be left out.
        """
        raise NotImplementedError
