"""Method auto: at each step the draft of the greatest expected tokens per second, or none.

It draws on drafters of its own. Trees that come with estimates share one budget over all sequences; the lengths of
chains follow from how often their positions are accepted; what either costs says the cost model. What does not pay is
tried again ever more rarely. All drafters observe every step, whichever drafted, so that they know the text.

What is drafted never changes a greedy text, nor the law of a sampled one. Which text a seed gives depends on the draft
only where that carries distributions, and which draft is chosen depends on time. So texts that are sampled with a seed
are drafted for by trees alone, and the same seed gives the same text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from ..modules.kv_cache import PagedKVCache
from ..modules.layered_model import LayeredModel
from ..modules.token_tree import TokenTree
from .arms import PROBE_STEPS, ChainArm, ChainPlan, Load, arm_of
from .calibrate import quick_calibration
from .choice import Allocation, Patience, Ratio, best_allocation, longest_wait, smoothed
from .cost_model import CostModel
from .drafter import Drafter, Observation, SomeFailed, TreeDrafter
from .exits import Tap
from .intake import MAX_DRAFT_TOKENS
from .readout import PromptRows
from .request import GenerationParams, Sequence
from .trials import MARGIN, WEIGHED_EVERY, Budget, ShownTexts

MAX_NODES = 64
"""Nodes of a tree, root included, where neither engine nor request says otherwise."""
LONGEST_PROBE_WAIT = 1024
READING_GAIN, TYPICAL_LENGTH = 0.01, 256
"""What reading a prompt's rows is taken to save of its text's time without drafts: 1.1 to 1.4 % of the steps with
drafts (docs/LOG.md), of which there are fewer. And how long a text becomes that may become longer."""
ROW_SECONDS = 25e-6
"""What learning from a prompt's row takes, before it was measured; and, little by little, while none is read."""
HOPELESS, LEAST_NODES = 0.5, 8
"""Nodes below this part of the probability at which one just pays are not grown. It pays at the lowest mean price of
drafts of so many nodes or more."""


def new_trust() -> Ratio:
    """In trees' promises: accepted tokens by expected ones. Those that say nothing are worth nothing."""
    return Ratio(weight=6.0, decay=0.97, least=0.02, most=1.2, below=0.0)


@dataclass
class _Grown:
    """One sequence's tree as it was grown, and how many of its drafted nodes are run."""

    tree: TokenTree
    scores: SequenceOf[float]
    kept: int = 0


@dataclass
class _Step:
    """What was decided for the pass under way.

    plain: seconds that it would take without a draft, what is learned from it included. overhead: spent on growing
    trees. expected, accepted: tokens of trees, for what their probabilities are worth. top: the rate of the best
    choice, tokens a second. caught_up: how often heads had read late before the pass.
    """

    load: Load
    nodes: int = 0
    plain: float = 0.0
    overhead: float = 0.0
    grown: dict[int, _Grown] = field(default_factory=dict)
    expected: float = 0.0
    accepted: float = 0.0
    arm: ChainArm | None = None
    plan: ChainPlan | None = None
    drafted_for: frozenset[int] = frozenset()
    is_probe: bool = False
    emitted: int = 0
    top: float = 0.0
    caught_up: int = 0


class AutoDrafter(Drafter):
    """tree: a drafter of trees with estimates, LogitSpec's adaptive ones. chains: drafters of chains.

    bound: nodes of a tree, root included, and length of a chain, where neither engine nor request says otherwise.
    cost: of the target's passes; None measures them, within two seconds, when an engine takes the drafter.
    clock: seconds.

    Raises ValueError for no drafter at all, and for one that it cannot weigh.
    """

    name = "auto"

    def __init__(
        self,
        tree: TreeDrafter | None,
        chains: SequenceOf[Drafter | ChainArm] = (),
        bound: int = MAX_NODES,
        cost: CostModel | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not 1 <= bound <= MAX_DRAFT_TOKENS:
            raise ValueError(f"bound must be from 1 to {MAX_DRAFT_TOKENS}, got {bound}")
        if tree is not None and not (isinstance(tree, TreeDrafter) and tree.has_estimates):
            raise ValueError(
                f"tree must be a drafter of trees with estimates, as LogitSpec's adaptive ones, got {tree!r}"
            )
        self.arms = [one if isinstance(one, ChainArm) else arm_of(one) for one in chains]
        self.parts = (*([] if tree is None else [tree]), *(arm.drafter for arm in self.arms))
        if not self.parts:
            raise ValueError("auto needs a drafter to choose, got none")
        self.tree, self.bound, self.cost, self.clock = tree, bound, cost, clock
        if self.arms:
            self.about_seeds = "auto drafts for texts with seeds by trees alone: its chains were not used"
        self.num_likely = max(part.num_likely for part in self.parts)
        self.exits = tuple(dict.fromkeys(exits for part in self.parts for exits in part.exits))
        self._clear()

    def _clear(self) -> None:
        self._trust, self._typical = new_trust(), Patience()
        self._patience: dict[int, Patience] = {}
        self._new: set[int] = set()  # texts that the trees have not seen
        self._growth = self._reading = 0.0  # seconds by a node, and by a text whose rows trees learn from
        self._steps = 0
        self._probe: tuple[ChainArm, int] | None = None
        self._plans: dict[ChainArm, tuple[int, object, ChainPlan]] = {}  # when they were made, for which texts
        self.budget = Budget()
        self.shown = ShownTexts(self.arms, self.budget)
        self._observing = self._own = 0.0
        self._row = ROW_SECONDS
        self._bounds: dict[tuple[int, bool], tuple[int, int, float]] = {}  # by texts, and whether prompts are beside
        self._reads: dict[int, bool] = {}  # whether a text's prompt is read
        self._running: SequenceOf[Sequence] = ()
        self._scheduled = 0  # tokens of the pass without drafts
        self._step: _Step | None = None

    def attach(self, model: LayeredModel, cache: PagedKVCache) -> None:
        self.vocab_size = model.vocab_size
        if self.cost is None:
            self.cost = CostModel(quick_calibration(model))
        if self.tree is not None:
            self.tree.attach(model, cache)
        for arm in self.arms:
            arm.attach(model, cache, self.cost)

    # -- what the parts want -------------------------------------------------------------------------------------

    def check(self, params: GenerationParams) -> None:
        for part in self.parts:
            part.check(params)

    def _chains_for(self, params: GenerationParams) -> list[ChainArm]:
        """Those that may draft for a request: none where a seed says what the text is."""
        return [] if params.is_seeded else self.arms

    def taps(self, params: GenerationParams) -> frozenset[Tap]:
        return frozenset[Tap]().union(*(arm.taps(params) for arm in self._chains_for(params)))

    def taps_of(self, sequence: Sequence, texts: int) -> frozenset[Tap]:
        """All of them where a chain promises to pay, or as a trial; else none, for reading prompts takes time."""
        return self.shown.taps_of(sequence, self.taps(sequence.params), texts, self._steps)

    def _arms_for(self, sequence: Sequence) -> list[ChainArm]:
        """Those that can draft for a text."""
        return [arm for arm in self._chains_for(sequence.params) if arm.sees(sequence)]

    def default_draft_tokens(self) -> int:
        return self.bound

    def scratch_tokens(self, draft_tokens: int, params: GenerationParams) -> int:
        wanted = [arm.scratch_tokens(draft_tokens, params) for arm in self._chains_for(params)]
        return max([draft_tokens, *wanted]) if draft_tokens else 0

    @property
    def prompt_vocab(self) -> int | None:  # type: ignore[override]
        return None if self.tree is None else self.tree.prompt_vocab

    def unread(self, sequence: Sequence, start: int, stop: int) -> SequenceOf[int]:
        """Nothing while trees do not pay, nor where a prompt's rows cost more than what trees gain by them."""
        useless = self._typical.worth is not None and self._typical.worth <= 0.0
        if self.tree is None or useless:
            return ()
        key = sequence.sequence_id
        if key not in self._reads:  # once, for all of it: most tokens' last places lie at its end
            rows = self.tree.unread(sequence, start, len(sequence.token_ids) - 1)
            self._reads[key] = len(rows) * self._row_seconds() < self._gain_of_reading(sequence)
            if not self._reads[key]:
                self._row = smoothed(self._row, ROW_SECONDS)
        return self.tree.unread(sequence, start, stop) if self._reads[key] else ()

    def _row_seconds(self) -> float:
        """Of a prompt's row: its logits, and learning from them."""
        assert self.cost is not None, "attach() makes one"
        share = 1.0 if self.prompt_vocab is None else min(self.prompt_vocab / self.vocab_size, 1.0)
        return share * self.cost.row() + self._row

    def _gain_of_reading(self, sequence: Sequence) -> float:
        """Seconds that a text's trees save by its prompt's rows."""
        tokens = min(sequence.params.max_new_tokens - sequence.num_emitted, TYPICAL_LENGTH)
        return READING_GAIN * tokens * self._plain(self._running or [sequence]) / max(len(self._running), 1)

    def _plain(self, texts: SequenceOf[Sequence]) -> float:
        """Seconds of a step of these texts without a draft."""
        assert self.cost is not None, "attach() makes one"
        return self.cost.seconds(len(texts), len(texts), sum(text.table.length for text in texts))

    def read(self, sequence: Sequence, positions: SequenceOf[int], rows: PromptRows) -> None:
        assert self.tree is not None, "nothing was asked for"
        started = self.clock()
        self.tree.read(sequence, positions, rows)
        self._row = smoothed(self._row, (self.clock() - started) / len(positions))

    def scheduled(self, running: SequenceOf[Sequence], tokens: int) -> None:
        self._running, self._scheduled = running, tokens

    def release(self, sequence_id: int) -> None:
        self._patience.pop(sequence_id, None)
        self._reads.pop(sequence_id, None)
        self.shown.release(sequence_id)
        self._new.discard(sequence_id)
        for part in self.parts:
            part.release(sequence_id)

    def reset(self) -> None:
        """The cost model stays: it is of the device, not of what was said."""
        for part in self.parts:
            part.reset()
        for arm in self.arms:
            arm.reset()
        self._clear()

    # -- the choice ----------------------------------------------------------------------------------------------

    def propose(self, sequences: SequenceOf[Sequence]) -> list[TokenTree]:
        started = self.clock()
        step = self._step = _Step(_load(sequences, self._scheduled))
        self._steps += 1
        step.grown = self._grow(sequences, step)
        step.overhead = self.clock() - started
        try:
            return self._decide(sequences, step)
        finally:
            step.caught_up = self._caught_up()
            self._own += self.clock() - started

    def _caught_up(self) -> int:
        return sum(exits.num_caught_up for exits in self.exits)

    def _hopeless(self, load: Load, most: int) -> float:
        """The probability at which a node does not pay in any draft of up to `most` nodes; weighed every few steps."""
        kind = load.sequences, load.beside > 0
        asked, of, found = self._bounds.get(kind, (-WEIGHED_EVERY, 0, 0.0))
        if self._steps < asked + WEIGHED_EVERY and most <= of:
            return found
        assert self.cost is not None, "attach() makes one"
        fewest = max(load.sequences, LEAST_NODES)
        price = self.cost.node(fewest, most, load.tokens, load.sequences, load.context, load.beside)
        found = HOPELESS * price * load.sequences / max(self._trust.value, 0.5)
        self._bounds[kind] = self._steps, most, found
        return found

    def _grow(self, sequences: SequenceOf[Sequence], step: _Step) -> dict[int, _Grown]:
        """Trees of the sequences that it has paid for, or that it is time to try again for."""
        if self.tree is None:
            return {}
        load = len(sequences)
        due = [sequence for sequence in sequences if self._patience_of(sequence).is_due(self._steps, load)]
        sized = [
            replace(sequence, draft_tokens=min(sequence.draft_tokens, self._patience_of(sequence).limit + 1))
            for sequence in due
        ]
        if not sized:
            return {}
        started = self.clock()
        most = sum(sequence.draft_tokens for sequence in due)
        found = self.tree.scored(sized, self._hopeless(step.load, most))
        seconds, nodes = self.clock() - started, sum(_grown_nodes(scores) for _, scores in found)
        if not any(sequence.sequence_id in self._new for sequence in due):  # a new text is read first
            self._growth = smoothed(self._growth, seconds / nodes)
        self._new.difference_update(sequence.sequence_id for sequence in due)
        return {sequence.sequence_id: _Grown(*one) for sequence, one in zip(due, found, strict=True)}

    def _patience_of(self, sequence: Sequence) -> Patience:
        patience = self._patience.get(sequence.sequence_id)
        if patience is None:
            patience = self._patience[sequence.sequence_id] = self._typical.copy()
            self._new.add(sequence.sequence_id)
        return patience

    def _decide(self, sequences: SequenceOf[Sequence], step: _Step) -> list[TokenTree]:
        trees = best_allocation(
            [one.scores for one in step.grown.values()],
            lambda nodes: self._seconds(step.load, nodes),
            len(sequences) - len(step.grown),
            self._trust.value,
            step.overhead,
            self._growth,
        )
        step.plain = trees.plain
        self.shown.learn(trees.rate * trees.plain / step.load.sequences)
        allowed = {arm: [s for s in sequences if arm in self._arms_for(s)] for arm in self.arms}
        step.arm, step.plan = self._choose_arm({arm: some for arm, some in allowed.items() if some}, step, trees)
        if step.arm is None:
            self._keep(step, trees)
        if not step.load.beside:  # what a try brings beside prompts says nothing of steps without them
            self._settle_patience(sequences, step, trees)
        if step.arm is not None:
            return self._chain_trees(sequences, allowed[step.arm], step)
        return [self._kept_tree(sequence, step) for sequence in sequences]

    def _seconds(self, load: Load, nodes: int) -> list[float]:
        """Of steps with 0 ... so many nodes of trees, and what is learned from them."""
        assert self.cost is not None, "attach() makes one"
        found = self.cost.drafted(nodes, load.tokens, load.sequences, load.context, load.beside)
        return [one + self._observing for one in found]

    def _choose_arm(
        self, allowed: dict[ChainArm, list[Sequence]], step: _Step, trees: Allocation
    ) -> tuple[ChainArm | None, ChainPlan | None]:
        """The chain drafter that promises more than the trees, or whose turn it is to be tried again."""
        if not allowed:
            return None, None
        plans = {arm: self._plan(arm, some, step) for arm, some in allowed.items()}

        def emitted(arm: ChainArm) -> float:
            return step.load.sequences + len(allowed[arm]) * (plans[arm].emitted - 1.0)

        def rate(arm: ChainArm) -> float:
            return emitted(arm) / (plans[arm].seconds + plans[arm].reading)

        first = max(plans, key=rate)
        best = None if rate(first) <= MARGIN * trees.rate else first
        step.top = max(rate(first), trees.rate)
        lost = {arm: plan.seconds - emitted(arm) / step.top for arm, plan in plans.items()}
        losses = {arm: PROBE_STEPS * lost[arm] + plan.reading for arm, plan in plans.items()}
        probed = self._probed(best, losses)
        step.is_probe = probed is not None
        chosen = probed or best
        if chosen is None:
            return None, None
        del self._plans[chosen]  # what comes of it changes the next
        return chosen, plans[chosen]

    def _plan(self, arm: ChainArm, allowed: list[Sequence], step: _Step) -> ChainPlan:
        """What the arm would do: weighed at every step while it is in use, else every few, and as texts come or go."""
        texts = step.load.sequences, tuple(sequence.sequence_id for sequence in allowed)
        if arm in self._plans:
            made, of, plan = self._plans[arm]
            if self._steps < made + WEIGHED_EVERY and of == texts:
                return replace(plan, reading=arm.reading(allowed))
        plan = arm.best(allowed, step.load, step.overhead + self._observing)
        self._plans[arm] = self._steps, texts, plan
        return plan

    def _probed(self, best: ChainArm | None, losses: dict[ChainArm, float]) -> ChainArm | None:
        """An arm that is not the best one now and was not for long, once what its few steps are expected to lose is a
        small part of the time so far. losses: seconds, by arm."""
        if self._probe is not None and self._probe[1] > 0 and self._probe[0] is not best and self._probe[0] in losses:
            self._probe = (self._probe[0], self._probe[1] - 1)
            return self._probe[0]
        self._probe = None
        for arm in losses:
            if arm is best:
                arm.wait, arm.next_probe = 32, self._steps + 32
            elif self._steps >= arm.next_probe and self.budget.allows(losses[arm]):
                arm.wait = min(2 * arm.wait, LONGEST_PROBE_WAIT)
                arm.next_probe = self._steps + arm.wait
                self._probe = (arm, PROBE_STEPS - 1)
                return arm
        return None

    def _keep(self, step: _Step, trees: Allocation) -> None:
        for one, kept in zip(step.grown.values(), trees.kept, strict=True):
            one.kept = kept
        step.nodes = sum(trees.kept)

    def _kept_tree(self, sequence: Sequence, step: _Step) -> TokenTree:
        grown = step.grown.get(sequence.sequence_id)
        if grown is None or grown.kept == 0:
            return TokenTree.root(sequence.token_ids[-1])
        return grown.tree.clipped(sequence.max_depth, grown.kept + 1)

    def _settle_patience(self, sequences: SequenceOf[Sequence], step: _Step, trees: Allocation) -> None:
        """Who was grown for: has it saved time? A tree counts for the plain steps that it is expected to save."""
        tried = [sequence for sequence in sequences if sequence.sequence_id in step.grown]
        if not tried:
            return
        running = (trees.seconds - step.overhead - step.plain) / step.nodes if step.nodes else 0.0  # of a node
        gained = self._trust.value * step.plain / step.load.sequences  # by an expected token
        growing = self._growth * sum(_grown_nodes(one.scores) for one in step.grown.values()) / len(tried)
        longest = longest_wait((growing + 2 * self._reading) * step.load.sequences, step.plain)  # read before and after
        total = 0.0
        for sequence, worthy in zip(tried, trees.worthy, strict=True):
            grown, patience = step.grown[sequence.sequence_id], self._patience_of(sequence)
            saved = gained * sum(grown.scores[: grown.kept]) - running * grown.kept
            saved -= self._growth * _grown_nodes(grown.scores) + self._reading
            patience.record(self._steps, saved, longest, len(sequences))
            patience.size(worthy, sequence.draft_tokens)
            total += saved
        self._typical.record(self._steps, total / len(tried), longest, len(sequences))
        self._typical.size(max(trees.worthy), max(sequence.draft_tokens for sequence in tried))

    def _chain_trees(self, sequences: SequenceOf[Sequence], allowed: list[Sequence], step: _Step) -> list[TokenTree]:
        arm, plan = step.arm, step.plan
        assert arm is not None and plan is not None
        step.drafted_for = frozenset(sequence.sequence_id for sequence in allowed)
        failed = False
        try:
            drafted: SequenceOf[TokenTree | Exception] = arm.propose(allowed, plan)
        except SomeFailed as some:
            drafted, failed = some.outcomes, True
        except Exception:
            arm.failed()
            step.plan = None
            raise
        by_id = {sequence.sequence_id: tree for sequence, tree in zip(allowed, drafted, strict=True)}
        trees = [by_id.get(s.sequence_id, TokenTree.root(s.token_ids[-1])) for s in sequences]
        if failed:
            arm.failed()
            step.plan = None
            raise SomeFailed(trees)
        done = [tree for tree in trees if isinstance(tree, TokenTree)]
        step.nodes = sum(tree.num_drafted for tree in done)
        return done

    # -- what comes of it ----------------------------------------------------------------------------------------

    def observe(self, observations: SequenceOf[Observation]) -> None:
        started = self.clock()
        for seen in observations:
            self._learn(seen)
        if self._step is not None and self._step.expected:
            self._trust.record(self._step.expected, self._step.accepted)
        if self.tree is not None and (read := [seen for seen in observations if self._is_read(seen.sequence)]):
            self._let_read(self.tree, read)
        for arm in self.arms:
            arm.drafter.observe(observations)
        seconds = self.clock() - started
        self._own += seconds
        if self._step is not None:
            self._observing += 0.1 * (seconds - self._observing)

    def _let_read(self, tree: TreeDrafter, read: list[Observation]) -> None:
        """Let trees learn from some texts' rows, and learn what that takes."""
        started = self.clock()
        tree.observe(read)
        self._reading = smoothed(self._reading, (self.clock() - started) / len(read))

    def _is_read(self, sequence: Sequence) -> bool:
        """Whether trees learn from a text's rows, which costs as much as growing small ones: where one was grown, or
        will be in the next step, which starts from these rows. Other texts wait because trees do not pay for them."""
        if self._step is None:
            return self._patience_of(sequence).is_due(self._steps + 1)
        grown, load = sequence.sequence_id in self._step.grown, self._step.load.sequences
        return grown or self._patience_of(sequence).is_due(self._steps + 1, load)

    def _learn(self, seen: Observation) -> None:
        if self._step is None:
            return
        emitted = seen.verdict.emitted(seen.tree)
        self._step.emitted += len(emitted)
        key, arm = seen.sequence.sequence_id, self._step.arm
        if arm is not None and key in self._step.drafted_for and seen.tree.num_drafted:
            arm.observe(seen)
        grown = self._step.grown.get(key)
        if grown is None or not emitted:
            return
        if grown.kept:
            self._step.expected += sum(grown.scores[: seen.tree.num_drafted])
            self._step.accepted += seen.verdict.num_accepted
        else:  # what was grown and not run is still right or wrong about the next token
            first = {token_id: grown.scores[node - 1] for token_id, node in grown.tree.children[0].items()}
            self._step.expected += sum(first.values())
            self._step.accepted += emitted[0] in first

    def timed(self, seconds: float, new_tokens: int, sequences: int) -> None:
        step, own = self._step, self._own
        self._step, self._own = None, 0.0
        self.budget.served += seconds
        if step is None:
            return
        if step.is_probe:
            self.budget.spent += max(seconds - step.emitted / step.top, 0.0)
        if step.caught_up != self._caught_up():
            return  # heads have read what was much by now: no step's own price
        if step.load.sequences != sequences or step.load.tokens + step.nodes != new_tokens:
            return  # a pass with prompts in it, or with texts that others draft for
        if step.arm is None:
            assert self.cost is not None
            seconds = max(seconds - own, 1e-9)
            self.cost.learn(seconds, new_tokens, sequences, step.load.context, step.nodes)
        elif step.plan is not None:
            if not step.arm.reads_on or self._steps - step.arm.last_used <= PROBE_STEPS - 1:
                step.arm.timed(step.plan, seconds)
            step.arm.last_used = self._steps


def _grown_nodes(scores: SequenceOf[float]) -> int:
    """What growing a tree is counted as: to find that no node is worth it takes as long as finding one."""
    return max(len(scores), 1)


def _load(sequences: SequenceOf[Sequence], scheduled: int) -> Load:
    """scheduled: tokens of the whole pass, texts of others and prompts included."""
    tokens = sum(sequence.num_pending for sequence in sequences)
    context = sum(sequence.table.length for sequence in sequences)
    return Load(len(sequences), tokens, context, max(scheduled - tokens, 0))
