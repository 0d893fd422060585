"""What speculation did, counted one way everywhere: in the engine, in serving, in benchmarks, in training.

MAT is tokens emitted per target pass, the bonus or corrected token included: plain decoding has exactly 1.0. The
acceptance rate is accepted / drafted and lies in [0, 1]. A drafted tree counts its nodes without the root; rates per
position go by depth, 1 being the first drafted token. Only what was emitted counts as accepted: a stop inside a block
ends the counting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from ..modules.acceptance import Verdict
    from ..modules.token_tree import TokenTree

RETRIEVED = "ngram"
"""The label of what a lookup in texts found."""

Counters = TypeVar("Counters", bound="_Counters")


def ratio(part: int | float, whole: int | float) -> float:
    """part / whole, and 0 where there was nothing to take a part of."""
    return part / whole if whole else 0.0


class _Counters:
    """Adding and exporting, for dataclasses whose fields are numbers and Counters."""

    def merge(self: Counters, other: Counters) -> None:
        """Add another's counts to these."""
        for item in fields(self):  # type: ignore[arg-type]
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, Counter):
                mine.update(theirs)
            else:
                setattr(self, item.name, mine + theirs)

    @classmethod
    def total(cls: type[Counters], parts: Iterable[Counters]) -> Counters:
        """The sum; the parts stay as they are."""
        whole = cls()
        for part in parts:
            whole.merge(part)
        return whole

    @classmethod
    def from_dict(cls: type[Counters], values: Mapping[str, Any]) -> Counters:
        """What `as_dict` was made of; its derived rates are computed anew."""
        counts = cls()
        for item in fields(cls):  # type: ignore[arg-type]
            value = values.get(item.name, getattr(counts, item.name))  # what an older row did not count
            key_type = item.metadata.get("keys", int)
            histogram = isinstance(value, dict)
            setattr(counts, item.name, Counter({key_type(key): value[key] for key in value}) if histogram else value)
        return counts

    def as_dict(self) -> dict[str, Any]:
        """Every counter, ready for JSON: the keys of histograms are strings, as JSON has them."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}  # type: ignore[arg-type]
        return {name: _json_ready(value) for name, value in values.items()}


def _json_ready(value: Any) -> Any:
    return {str(key): value[key] for key in sorted(value)} if isinstance(value, Counter) else value


@dataclass
class SequenceStats(_Counters):
    """Counts of one sequence, or of many after `total`.

    target_passes: passes that gave this sequence logits; prefill_passes: those that only filled the cache.
    prefill_tokens: tokens run in the latter; cached_tokens: prompt tokens found in the prefix cache instead.
    draft_calls: proposals asked for; draft_failures: steps whose drafter raised; steps_without_draft: target passes
        without a drafted token, for whatever reason.
    retrieval_steps: target passes in which a retrieving drafter could look up; retrieval_hits: those with a match.
    accepted_lengths: {num_accepted: passes}, over passes that verified a draft.
    drafted_at, reached_at, accepted_at: per depth, passes whose draft reaches it, that decided it (all before it was
        accepted), and that accepted it.
    drafted_from, accepted_from: drafted and accepted tokens by their nodes' labels: "ngram", "datastore" and other
        sources, or "chain" where a drafter names none.
    inner_...: the same of drafts under an intermediate layer (HiSpec), whose own proposals are what is counted above:
        inner_passes verifications, inner_emitted tokens that they put into windows.
    distance: total variation between what was verified against and the target's own distribution, summed over tokens;
        0 for whatever is lossless. At temperature 0 the tokens at which the two differ.
    seconds: from arrival to finish; seconds_to_first_token: from arrival. Of many sequences both are sums, not wall
        time.
    """

    emitted_tokens: int = 0
    target_passes: int = 0
    prefill_passes: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_calls: int = 0
    draft_failures: int = 0
    steps_without_draft: int = 0
    retrieval_steps: int = 0
    retrieval_hits: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    seconds_to_first_token: float = 0.0
    distance: float = 0.0
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    drafted_at: Counter[int] = field(default_factory=Counter)
    reached_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    drafted_from: Counter[str] = field(default_factory=Counter, metadata={"keys": str})
    accepted_from: Counter[str] = field(default_factory=Counter, metadata={"keys": str})
    inner_passes: int = 0
    inner_emitted: int = 0
    inner_drafted: int = 0
    inner_accepted: int = 0
    inner_accepted_lengths: Counter[int] = field(default_factory=Counter)
    inner_drafted_at: Counter[int] = field(default_factory=Counter)
    inner_reached_at: Counter[int] = field(default_factory=Counter)
    inner_accepted_at: Counter[int] = field(default_factory=Counter)

    def record_pass(
        self, num_drafted: int, max_depth: int, num_accepted: int, emitted: int, retrieval_hit: bool | None = None
    ) -> None:
        """Count one verification pass.

        max_depth: depth of the proposal's deepest node (a chain's length). num_accepted: how many it accepted; no more
        than `emitted` are counted, since a stop or the length cap can end the text before. retrieval_hit: None where
        nothing could be looked up.
        """
        self.target_passes += 1
        self.emitted_tokens += emitted
        if retrieval_hit is not None:
            self.retrieval_steps += 1
            self.retrieval_hits += retrieval_hit
        if num_drafted == 0:
            self.steps_without_draft += 1
            return
        self._record_draft("", num_drafted, max_depth, num_accepted, emitted)

    def record_verdict(self, tree: TokenTree, verdict: Verdict, emitted: int, looked_up: bool) -> None:
        """Count one verified proposal. emitted: tokens of it that were. looked_up: whether its drafter retrieves."""
        self.record_pass(
            num_drafted=tree.num_drafted,
            max_depth=max(tree.depths),
            num_accepted=min(verdict.num_accepted, emitted),
            emitted=emitted,
            retrieval_hit=RETRIEVED in tree.sources[1:] if looked_up else None,
        )
        self.record_sources(tree.sources, verdict.path[1 : emitted + 1])

    def record_sources(self, labels: Sequence[str], accepted: Iterable[int]) -> None:
        """Count a proposal's nodes by label. labels: of all nodes, the root first, or empty; accepted: nodes that were
        accepted and emitted."""
        if labels:
            self.drafted_from.update(labels[1:])
            self.accepted_from.update(labels[node] for node in accepted)

    def record_inner(self, num_drafted: int, max_depth: int, num_accepted: int, emitted: int) -> None:
        """Count one verification by an intermediate layer, in the terms of `record_pass`."""
        self.inner_passes += 1
        self.inner_emitted += emitted
        if num_drafted:
            self._record_draft("inner_", num_drafted, max_depth, num_accepted, emitted)

    def _record_draft(self, stage: str, num_drafted: int, max_depth: int, num_accepted: int, emitted: int) -> None:
        kept = min(num_accepted, emitted)
        setattr(self, f"{stage}drafted", getattr(self, f"{stage}drafted") + num_drafted)
        setattr(self, f"{stage}accepted", getattr(self, f"{stage}accepted") + kept)
        getattr(self, f"{stage}accepted_lengths")[kept] += 1
        getattr(self, f"{stage}drafted_at").update(range(1, max_depth + 1))
        getattr(self, f"{stage}accepted_at").update(range(1, kept + 1))
        # The depth after the last accepted one was turned down, unless the text ended before it was decided.
        decided = kept if emitted <= num_accepted else kept + 1
        getattr(self, f"{stage}reached_at").update(range(1, min(decided, max_depth) + 1))

    @property
    def mat(self) -> float:
        """Mean accepted tokens: emitted tokens per target pass."""
        return ratio(self.emitted_tokens, self.target_passes)

    @property
    def mean_distance(self) -> float:
        """Total variation to the target per emitted token, in [0, 1]: what a lossy rule gave up."""
        return ratio(self.distance, self.emitted_tokens)

    @property
    def acceptance_rate(self) -> float:
        return ratio(self.accepted, self.drafted)

    @property
    def inner_acceptance_rate(self) -> float:
        return ratio(self.inner_accepted, self.inner_drafted)

    @property
    def retrieval_rate(self) -> float:
        """Share of lookups that found something."""
        return ratio(self.retrieval_hits, self.retrieval_steps)

    @property
    def conditional_acceptance(self) -> dict[int, float]:
        """{depth: P(accepted at this depth | all before it accepted)}."""
        return {depth: ratio(self.accepted_at[depth], self.reached_at[depth]) for depth in sorted(self.reached_at)}

    @property
    def inner_conditional_acceptance(self) -> dict[int, float]:
        """`conditional_acceptance` under the intermediate layer."""
        reached, accepted = self.inner_reached_at, self.inner_accepted_at
        return {depth: ratio(accepted[depth], reached[depth]) for depth in sorted(reached)}

    @property
    def unconditional_acceptance(self) -> dict[int, float]:
        """{depth: accepted at this depth / drafted at this depth}."""
        return {depth: ratio(self.accepted_at[depth], self.drafted_at[depth]) for depth in sorted(self.drafted_at)}

    def as_dict(self) -> dict[str, Any]:
        rates = ("mat", "acceptance_rate", "inner_acceptance_rate", "retrieval_rate", "mean_distance")
        return super().as_dict() | {name: getattr(self, name) for name in rates}


@dataclass
class EngineStats(_Counters):
    """Where an engine's time and the target's work went, over its steps. Times are in seconds.

    drafting_seconds: in drafters: proposing (a draft model's passes and the target's first layers, where an early exit
        runs them, included), reading prompts, observing. verifying_seconds: sampling, committing, text, scheduling.
    Layer-tokens are tokens times layers of the target that ran them, counted apart for prefill (what comes before the
        first token that is predicted from, and what is run again after a preemption), for drafting at an early exit,
        for an intermediate layer's verification, and for the last stage. In plain decoding the three other than prefill
        add up to the model's layers per emitted token. head_tokens: tokens through heads of early exits, each a norm
        and an unembedding and what the head itself holds; they are no layer-tokens.
    layer_passes: layers of the target run one after another, whatever the tokens in them, prefill included: the work as
        a device feels it whose passes are bound by reading weights.
    """

    steps: int = 0
    seconds: float = 0.0
    drafting_seconds: float = 0.0
    model_seconds: float = 0.0
    verifying_seconds: float = 0.0
    prefill_layer_tokens: int = 0
    draft_layer_tokens: int = 0
    intermediate_layer_tokens: int = 0
    full_layer_tokens: int = 0
    head_tokens: int = 0
    layer_passes: int = 0

    def record_step(self, seconds: float, drafting: float, model: float, verifying: float) -> None:
        self.steps += 1
        self.seconds += seconds
        self.drafting_seconds += drafting
        self.model_seconds += model
        self.verifying_seconds += verifying

    def record_work(self, work: Mapping[str, int]) -> None:
        """Add the target's work: layer-tokens by stage (prefill, draft, intermediate, full), heads, passes."""
        self.prefill_layer_tokens += work.get("prefill", 0)
        self.draft_layer_tokens += work.get("draft", 0)
        self.intermediate_layer_tokens += work.get("intermediate", 0)
        self.full_layer_tokens += work.get("full", 0)
        self.head_tokens += work.get("head", 0)
        self.layer_passes += work.get("passes", 0)

    @property
    def decoding_layer_tokens(self) -> int:
        """All but prefill; by emitted tokens, plain decoding has exactly the number of the model's layers."""
        return self.draft_layer_tokens + self.intermediate_layer_tokens + self.full_layer_tokens

    @property
    def layer_tokens(self) -> int:
        return self.prefill_layer_tokens + self.decoding_layer_tokens

    @property
    def overhead_share(self) -> float:
        """The time in drafters as a share of that of all steps."""
        return ratio(self.drafting_seconds, self.seconds)

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | {"overhead_share": self.overhead_share, "layer_tokens": self.layer_tokens}


def mat_after_prefill(parts: Sequence[SequenceStats]) -> float | None:
    """MAT without each text's first token and pass; None where no text has another."""
    first = sum(part.target_passes > 0 for part in parts)
    later = sum(part.target_passes for part in parts) - first
    return ratio(sum(part.emitted_tokens for part in parts) - first, later) if later else None
