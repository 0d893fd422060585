"""HiSpec: an intermediate layer verifies drafts and proposes its own chain to the full model (arXiv 2510.01336).

A drafter that wraps a drafter. In rounds, the inner one proposes, layers up to L_i run what it did not, and the
acceptance rule verifies against the intermediate's distribution p_i. Every token that comes out, accepted or drawn from
the residual, is distributed as p_i given its prefix, so the chain is handed on with p_i, never with the inner draft's
q: that is what keeps the last stage exact. When a window is full depends on its own past alone, and so does not either.

In a batch all windows go to the full model together, as soon as a share of them is full: the others hand on what they
have. What ends a window then depends on its neighbours too, but on nothing that is still to be drawn, so the text keeps
its distribution. Only where a seed says what the text is does a window wait until it is full itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..modules.acceptance import Distribution, Verdict, verify
from ..modules.batch import BatchItem, RaggedBatch
from ..modules.kv_cache import CacheTable, PagedKVCache
from ..modules.layered_model import LayeredModel
from ..modules.sampling import LogitsPipeline
from ..modules.token_tree import TokenTree
from ..modules.transfer import to_device
from .drafter import Drafter, Observation
from .early_exit import exits_of, predicted
from .exits import EarlyExits, ExitHead, Tap, at_once
from .readout import Known, Proposal, read_out
from .request import GenerationParams, Sequence
from .segments import Share, proposal_item, run_segments


@dataclass
class Window:
    """One sequence's tentative tokens V.

    layer: L_i. inner_tokens: N_d. goal: tokens after which the window is handed on (N_i); cap: tokens it may never
        exceed. ends: ids that end the text.
    shadow: the sequence as the inner drafter sees it: V at the end of its text, its table counting what layers up to
        L_i have run. hidden: rows after L_i, in order. probs: p_i of each token of V; states: what it was
        made of. ended: nothing can follow V.
    """

    sequence: Sequence
    shadow: Sequence
    pipeline: LogitsPipeline
    layer: int
    inner_tokens: int
    goal: int
    cap: int
    ends: frozenset[int]
    probs: list[Distribution] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    ended: bool = False

    @property
    def token_ids(self) -> list[int]:
        return self.shadow.token_ids[len(self.sequence.token_ids) :]

    @property
    def is_open(self) -> bool:
        return not self.ended and len(self.token_ids) < min(self.goal, self.cap)

    @property
    def must_fill(self) -> bool:
        """Whether it may not be handed on for the sake of others."""
        return self.sequence.params.is_seeded


@dataclass
class _Round:
    """A window's inner proposal. hidden: [rows, hidden] after L_i of its new tokens; states, logits: [nodes, ...] that
    the exit there makes of them.
    """

    window: Window
    tree: TokenTree
    hidden: Tensor | None = None
    states: Tensor | None = None
    logits: Tensor | None = None
    known: Known = field(default_factory=Known)

    @property
    def item(self) -> BatchItem:
        table = self.window.shadow.table
        return proposal_item(self.window.shadow.token_ids[table.length :], self.tree, table.length, table.blocks)


class HierarchicalDrafter(Drafter):
    """Proposes windows of at least `window` tokens (N_i) that layer `exit_layer` (L_i) stands behind.

    inner: where its drafts come from, at or below that layer: an EarlyExitDrafter for HiSpec, a lookup, a draft model.
        With one that learns from other texts (LogitSpec's adaptive trees) which text a seed gives depends on those.
    inner_tokens: size of the inner proposals (N_d), None takes the inner drafter's own. head, exits: see
    EarlyExitDrafter. wait: share of a batch's windows that must be full before all are handed on; 1 waits for each.

    A request may set `verify_layer`, `window` and `inner_draft_tokens`, and what the inner drafter reads; its
    `draft_tokens` bound a window. Windows end with a token that ends the text.

    Raises ValueError, when it is given to an engine, for an exit layer that the model does not have.
    """

    about_seeds = "hispec waits for each window of a text with a seed, which costs time"

    def __init__(
        self,
        inner: Drafter,
        exit_layer: int,
        window: int = 4,
        inner_tokens: int | None = None,
        head: ExitHead | None = None,
        exits: EarlyExits | None = None,
        wait: float = 0.25,
    ) -> None:
        self.inner_tokens = inner.default_draft_tokens() if inner_tokens is None else inner_tokens
        for name, value in (("window", window), ("inner_tokens", self.inner_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0.0 < wait <= 1.0:
            raise ValueError(f"wait must be above 0 and at most 1, got {wait}")
        self.inner, self.exit_layer, self.window, self.wait = inner, exit_layer, window, wait
        self.exit = exits_of(exit_layer, head, exits)
        self.exits = (self.exit, *inner.exits)
        self.num_likely = inner.num_likely
        self.name = "hispec" if inner.name == "early-exit" else f"hispec+{inner.name}"

    def attach(self, model: LayeredModel, cache: PagedKVCache) -> None:
        self.exit.check("exit_layer", self.exit_layer)
        self.model, self.cache = model, cache
        self.inner.attach(model, cache)
        self.check(GenerationParams())

    def check(self, params: GenerationParams) -> None:
        self.inner.check(params)
        layer, below = self.depth(params), self.inner.depth(params)
        self.exit.check("verify_layer", layer)
        if below > layer:
            raise ValueError(f"draft_layer must be at most verify_layer, got {below} above {layer}")

    def taps(self, params: GenerationParams) -> frozenset[Tap]:
        return self.exit.taps(self.depth(params)) | self.inner.taps(params)

    def depth(self, params: GenerationParams) -> int:
        return self.exit_layer if params.verify_layer is None else params.verify_layer

    def default_draft_tokens(self) -> int:
        return self.draft_tokens_for(GenerationParams())

    def draft_tokens_for(self, params: GenerationParams) -> int:
        """The last round begins when a token is lacking, and adds a whole inner proposal and one token."""
        return self._window_of(params) + self._inner_tokens_of(params)

    def scratch_tokens(self, draft_tokens: int, params: GenerationParams) -> int:
        """A window, and an inner proposal begun when it lacked one token."""
        return draft_tokens + self.inner.scratch_tokens(self._inner_tokens_of(params), params) if draft_tokens else 0

    @torch.inference_mode()
    def propose(self, sequences: SequenceOf[Sequence]) -> list[TokenTree]:
        windows = [self._open(sequence) for sequence in sequences]
        running = begun = [window for window in windows if window.is_open]
        while running:
            self._advance(running)
            running = [window for window in running if window.is_open]
            if len(begun) - len(running) >= self.wait * len(begun) - 1e-9:  # 0.28 of 25 are 7, whatever floats say
                running = [window for window in running if window.must_fill]
        return [self._tree(window) for window in windows]

    def observe(self, observations: SequenceOf[Observation]) -> None:
        self.inner.observe(observations)

    def release(self, sequence_id: int) -> None:
        self.inner.release(sequence_id)

    def reset(self) -> None:
        self.inner.reset()

    def _window_of(self, params: GenerationParams) -> int:
        return self.window if params.window is None else params.window

    def _inner_tokens_of(self, params: GenerationParams) -> int:
        return self.inner_tokens if params.inner_draft_tokens is None else params.inner_draft_tokens

    def _open(self, sequence: Sequence) -> Window:
        params = sequence.params
        table = CacheTable(blocks=sequence.table.blocks, length=sequence.table.length)
        return Window(
            sequence,
            replace(sequence, token_ids=list(sequence.token_ids), table=table, num_tentative=0),
            LogitsPipeline(params, sequence.num_prompt, for_drafts=True, keep_probs=not self.target_rule.lossless),
            self.depth(params),
            self._inner_tokens_of(params),
            self._window_of(params),
            min(sequence.draft_tokens, sequence.max_depth),
            params.end_ids(self.model.eos_token_ids),
        )

    def _advance(self, windows: list[Window]) -> None:
        """One inner proposal per window, verified by the intermediate layer."""
        rounds = self._inner_rounds(windows)
        groups: dict[int, list[_Round]] = defaultdict(list)
        for one in rounds:
            groups[one.window.layer].append(one)
        for layer, group in groups.items():
            self._run(layer, group)
        self.inner.observe([self._settle(one) for one in rounds])

    def _inner_rounds(self, windows: list[Window]) -> list[_Round]:
        for window in windows:
            window.shadow.draft_tokens = window.inner_tokens
            window.shadow.max_depth = window.cap - len(window.token_ids) - 1
        trees = self.inner.propose([window.shadow for window in windows])
        return [
            _Round(window, tree.clipped(window.shadow.max_depth, window.inner_tokens + 1))
            for window, tree in zip(windows, trees, strict=True)
        ]

    def _run(self, layer: int, rounds: list[_Round]) -> None:
        """Bring every new token to `layer`, from where the inner drafter left it, and take the logits of all nodes."""
        shares = [
            Share(
                one.item,
                one.tree.hidden,
                one.tree.depth,
                at_once(one.window.sequence.taps) - self.exit.taps(layer),  # that head sees all of them below
                one.window.shadow.num_pending - 1,
            )
            for one in rounds
        ]
        batch = RaggedBatch.build([share.item for share in shares], self.cache.block_size, self.model.device)
        ran = run_segments(self.model, self.cache, shares, batch, layer)
        self.exit.work["passes"] += ran.layer_passes
        self.exit.work["intermediate"] += ran.layer_tokens
        self.exit.work["prefill"] += ran.prefill_layer_tokens
        nodes = [range(end - len(one.tree), end) for one, end in zip(rounds, batch.cu_seqlens[1:], strict=True)]
        predicted_rows = self.exit.predict(layer, ran.hidden, batch, [row for rows in nodes for row in rows])
        for one, start, end in zip(rounds, batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
            one.hidden = ran.hidden[start:end]
        sizes = [len(one.tree) for one in rounds]
        for one, *parts in zip(rounds, *(rows.split(sizes) for rows in predicted_rows), strict=True):
            one.states, one.logits = parts
        proposals = [
            Proposal(one.tree, one.window.pipeline, one.window.sequence.draft_generator, self.num_likely)
            for one in rounds
        ]
        for one, known in zip(rounds, read_out(predicted_rows[1], proposals), strict=True):
            one.known = known

    def _settle(self, one: _Round) -> Observation:
        """Verify one inner proposal and put what comes out into the window."""
        window, tree, rows, hidden = one.window, one.tree, one.logits, one.hidden
        assert rows is not None and hidden is not None and one.states is not None
        verdict = self._verify(one, one.states, rows)
        emitted = self._extend(window, tree, verdict, hidden)
        window.sequence.stats.record_inner(tree.num_drafted, max(tree.depths), verdict.num_accepted, emitted)
        return Observation(window.shadow, tree, verdict, rows, likely=one.known.likely)

    def _verify(self, one: _Round, states: Tensor, rows: Tensor) -> Verdict:
        """The rule under p_i. Where the text can end, or p_i says nothing, the path ends and nothing follows it."""
        window, tree, known = one.window, one.tree, one.known.distributions
        prefix = list(window.shadow.token_ids)

        def target(node: int) -> Distribution | None:
            if node > 0:
                prefix.append(tree.token_ids[node])
                if prefix[-1] in window.ends:
                    return None
            p = known.get(node) or predicted(window.pipeline, rows[node], prefix)
            if p is not None:  # of the token that comes next
                window.probs.append(p)
                window.states.append(states[node])
            return p

        verdict = verify(tree, target, window.sequence.draft_generator)
        window.ended = verdict.next_token is None or verdict.next_token in window.ends
        return verdict

    def _extend(self, window: Window, tree: TokenTree, verdict: Verdict, states: Tensor) -> int:
        """Put what the intermediate emitted into the window, keep its rows and cache entries only; how many tokens."""
        before = states.shape[0] - len(tree)
        offsets = [*range(before), *(before + node for node in verdict.path)]
        window.hidden.append(states.index_select(0, to_device(offsets, states.device)))
        self.cache.keep([(window.shadow.table, offsets)])
        emitted = verdict.emitted(tree)
        window.shadow.token_ids += emitted
        window.shadow.num_tentative = len(window.token_ids)
        return len(emitted)

    def _tree(self, window: Window) -> TokenTree:
        root, drafted = window.sequence.token_ids[-1], window.token_ids
        if not window.hidden:
            return TokenTree.root(root)
        return TokenTree(
            [root, *drafted],
            range(-1, len(drafted)),
            window.probs,
            (self.name,) * (len(drafted) + 1),
            torch.cat(window.hidden),
            window.layer,
            num_before=window.sequence.num_pending - 1,
            states=torch.stack(window.states) if window.states else None,
        )
