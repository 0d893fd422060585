"""The engine: continuous batching of speculative decoding, one pass of the target model per step.

A step is: schedule, let drafters propose, run every new token of every sequence in one ragged batch, verify each
proposal, commit what was accepted to the cache, hand out what was emitted. Plain decoding is a step with empty
proposals, and prefill one with many pending tokens; there is no other path.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..modules.acceptance import Distribution, Verdict, verify
from ..modules.batch import BatchItem, RaggedBatch
from ..modules.kv_cache import CacheTable
from ..modules.layered_model import LayeredModel
from ..modules.sampling import LogitsPipeline, logprobs, make_generator
from ..modules.token_tree import TokenTree
from ..modules.transfer import is_apart, to_device
from .drafter import Drafter, Observation, SomeFailed
from .exits import MOST_OWED, Tap, at_once, catch_up
from .intake import MAX_DRAFT_TOKENS, Intake, paired
from .mailbox import Mailbox, Mailboxes
from .memory import blocks_within
from .readout import Known, PromptRows, Proposal, read_out
from .request import Completion, GenerationParams, Prompt, Sequence, StreamChunk, TokenLogprob, TokenOrigin
from .scheduler import Scheduled, Scheduler
from .segments import Share, proposal_item, run_segments
from .stats import EngineStats
from .target import BoundRule, TargetRule
from .text import TextStream, cut_block, special_ids

logger = logging.getLogger(__name__)

ROWS_READ = 64
"""PromptRows of logits that exist at once for drafters that read prompts: 64 of a vocabulary of 128,000 are 33 MB."""


@dataclass
class _Decoding:
    """What the engine keeps beside a sequence: who drafts, how logits become a distribution, how ids become text."""

    drafter: Drafter
    pipeline: LogitsPipeline
    text: TextStream
    stop_ids: frozenset[int]


class _Reading(NamedTuple):
    """PromptRows of a prompt that a drafter has asked for."""

    drafter: Drafter
    sequence: Sequence
    positions: SequenceOf[int]
    rows: PromptRows


@dataclass(frozen=True)
class _Predicted:
    """What a pass says of one proposal. states: [nodes, embed] final ones; logits: [nodes, vocab] of these; known: what
    the host has read of them."""

    states: Tensor
    logits: Tensor
    known: Known


@dataclass(eq=False)
class _Step:
    """One sequence's part of a pass: its share, its proposal (None in mid-prefill), what the pass says of that, and the
    verdict (None too where the sequence's distribution cannot be made).

    distances: how far what each emitted token was verified against is from the target's own distribution. kept: see
    Share.
    """

    scheduled: Scheduled
    tree: TokenTree | None
    predicted: _Predicted | None = None
    verdict: Verdict | None = None
    distances: list[float] = field(default_factory=list)
    kept: dict[Tap, Tensor] = field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        return 0 if self.tree is None else len(self.tree)

    def owe(self, offsets: list[int]) -> None:
        """Let those of its new tokens that were committed wait for the heads that read late. offsets: theirs."""
        num_tokens = self.scheduled.num_tokens + (0 if self.tree is None else self.tree.num_drafted)
        for tap, rows in self.kept.items():
            first = num_tokens - len(rows)
            chosen = [offset - first for offset in offsets if offset >= first]
            in_order = chosen == list(range(len(chosen)))
            found = rows[: len(chosen)].clone() if in_order else rows.index_select(0, to_device(chosen, rows.device))
            tap.exits.owe(tap.layer, self.scheduled.sequence.table, found)

    @cached_property
    def item(self) -> BatchItem:
        """Laid out once, before the pass: what is committed moves its beginning."""
        sequence, count = self.scheduled.sequence, self.scheduled.num_tokens
        start = sequence.table.length
        token_ids = sequence.token_ids[start : start + count]
        if self.tree is None:
            return BatchItem(token_ids, start, sequence.table.blocks)
        return proposal_item(token_ids, self.tree, start, sequence.table.blocks)


class Engine:
    """Runs requests on one model.

    drafters: those that requests can name as their method; "ar" is always there. default_method: for requests that name
        none. draft_tokens: default proposal size for all methods; None takes each drafter's own.
    kv_memory: GiB for the cache; None takes a share of the free memory, at most what max_num_seqs full contexts need.
    max_num_seqs: sequences in one pass. max_batch_tokens: prefill is chunked beyond this many tokens in a pass.
    max_length: longest text, prompt included; None takes the model's context (or the cache, when that is smaller).
    target_rule: what all proposals are verified against; None leaves each drafter its own.
    cuda_graphs: record passes of few tokens, the draft model's too, and launch them as one; the model is then this
        engine's. On GPUs, with the reference attention.
    strict: let drafters' exceptions through instead of going on without their draft (tests).

    `watchers` are shown every verified proposal, before anything comes of it. Not thread-safe: one thread owns an
    engine.
    """

    def __init__(
        self,
        model: LayeredModel,
        tokenizer: Any = None,
        drafters: SequenceOf[Drafter] = (),
        default_method: str = "ar",
        draft_tokens: int | None = None,
        target_rule: TargetRule | None = None,
        block_size: int = 16,
        kv_memory: float | None = None,
        max_num_seqs: int = 64,
        max_batch_tokens: int = 512,
        max_length: int | None = None,
        num_blocks: int | None = None,
        prefix_caching: bool = True,
        cuda_graphs: bool = False,
        strict: bool = False,
    ) -> None:
        self.model, self.tokenizer, self.strict = model, tokenizer, strict
        self.drafters = {Drafter.name: Drafter()} | _by_name(drafters)
        self.default_method = self._known_method(default_method)
        _check_sizes(draft_tokens, max_length)
        self.draft_tokens = draft_tokens
        self.watchers: list[Callable[[list[Observation]], None]] = []
        self.exits = list(dict.fromkeys(exits for drafter in self.drafters.values() for exits in drafter.exits))
        extra_layers = [len(exits.context_layers) for exits in self.exits]
        if num_blocks is None:
            num_blocks = blocks_within(model, block_size, max_num_seqs, kv_memory, extra_layers=sum(extra_layers))
        self.cache = model.new_cache(num_blocks, block_size, prefix_caching, sum(extra_layers))
        if cuda_graphs:
            model.record_passes(self.cache)
        for index, exits in enumerate(self.exits):
            exits.attach(model, self.cache, model.num_layers + sum(extra_layers[:index]))
        for drafter in self.drafters.values():
            drafter.attach(model, self.cache)
        for method, drafter in self.drafters.items():
            self.verify_against(method, target_rule or drafter.target_rule)
        self.max_length = min(max_length or model.max_positions, model.max_positions, self.cache.num_slots)
        self._intake = Intake(tokenizer, model.vocab_size, self.max_length)
        self.scheduler = Scheduler(self.cache, max_num_seqs, max_batch_tokens, self._bounds, self._scratch, self._start)
        self.stats = EngineStats()
        self._decoding: dict[int, _Decoding] = {}
        self._trimmed: dict[int, Callable[[Tensor], Tensor]] = {}  # unembeddings, by the number of tokens
        self._full: list[Sequence] = []  # waiting texts that may not grow
        self._live: Counter[str] = Counter()  # texts of each request that have not ended
        self._sequence_ids, self._request_ids = itertools.count(), itertools.count()
        self._silent_ids = special_ids(tokenizer)
        self._mail = Mailboxes()
        self._deaf: set[tuple[str, str]] = set()  # drafters and hooks that have failed and were reported
        for drafter in self.drafters.values():
            for one in _with_wrapped(drafter):
                one.taken = True

    def verify_against(self, method: str, rule: TargetRule) -> None:
        """From now on proposals of a method are verified against another rule; not while its texts are running."""
        rule.to(self.model.device)
        self.drafters[method].target_rule = rule

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, prompt: Prompt, params: GenerationParams | None = None, request_id: str | None = None) -> str:
        """Queue a request of `params.n` texts; returns its id. Raises ValueError for what could never run."""
        params = params or GenerationParams()
        method = self._known_method(params.method or self.default_method)
        prompt_ids = self.encode(prompt)
        self._intake.check(params)
        self.drafters[method].check(params)
        if request_id is None:
            names = (f"request-{number}" for number in self._request_ids)
            request_id = next(name for name in names if name not in self._live)
        if request_id in self._live:
            raise ValueError(f"request_id {request_id!r} is already running")
        for index in range(params.n):
            self._add_sequence(prompt_ids, params, method, request_id, index)
        return request_id

    def cancel(self, request_id: str) -> list[Completion]:
        """End a request now; its blocks are free at once. Returns what it had; empty for an unknown id."""
        return self._cancel({request_id})

    def _cancel(self, request_ids: Collection[str]) -> list[Completion]:
        if not self._live.keys() & request_ids:
            return []
        found = [sequence for sequence in self.scheduler.sequences if sequence.request_id in request_ids]
        for sequence in found:
            sequence.finish_reason = "cancelled"
        return [self._finish(sequence).completion for sequence in found]  # type: ignore[misc]

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running or self._mail.has_rest)

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: GenerationParams | SequenceOf[GenerationParams] | None = None,
    ) -> list[Completion]:
        """Run prompts to the end; completions in the order of the prompts, `n` for each. See `stream`."""
        order: list[str] = []
        done = [chunk.completion for chunk in self.stream(prompts, params, order) if chunk.completion is not None]
        place = {request_id: index for index, request_id in enumerate(order)}
        return sorted(done, key=lambda completion: (place[completion.request_id], completion.index))

    def stream(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: GenerationParams | SequenceOf[GenerationParams] | None = None,
        request_ids: list[str] | None = None,
    ) -> Iterator[StreamChunk]:
        """Yield text as it becomes certain. One prompt or many; closing the iterator cancels what has not ended.

        request_ids: filled with the ids given to the prompts, in their order. Requests added otherwise run along, and
        their chunks come out of the next `step`.
        """
        mine, box = request_ids if request_ids is not None else [], Mailbox()
        try:
            for prompt, one in paired(prompts, params):
                mine.append(self.add(prompt, one))
                self._mail.open(mine[-1], box)
            while box or any(request_id in self._live for request_id in reversed(mine)):  # the last ends last, mostly
                if not box:
                    self._mail.deliver(self._pass())
                ready = box.copy()
                box.clear()
                yield from ready
        finally:
            self._cancel(set(mine))
            self._mail.close(mine)

    def reset(self) -> None:
        """Forget what was learned and cached from finished requests; a used engine then behaves as a fresh one."""
        for drafter in self.drafters.values():
            drafter.reset()
        self.cache.allocator.forget_idle()
        self._deaf.clear()
        self.stats = EngineStats()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text, ids, or chat messages. Raises ValueError when it is empty or too long."""
        return self._intake.encode(prompt)

    # -- the step ------------------------------------------------------------------------------------------------

    def step(self) -> list[StreamChunk]:
        """One pass over all running sequences; returns the text that became certain and the texts that ended.

        What belongs to an open `stream` comes out there instead.
        """
        self._mail.deliver(self._pass())
        return self._mail.take_rest()

    @torch.inference_mode()
    def _pass(self) -> list[StreamChunk]:
        started = time.perf_counter()
        chunks = self._finish_without_running()
        plan = self.scheduler.schedule()
        if not plan:
            return chunks
        scheduled = time.perf_counter()
        self._tell_drafters("scheduled", self.scheduler.running, sum(item.num_tokens for item in plan))
        trees = self._propose([item.sequence for item in plan if item.reaches_root])
        drafted = time.perf_counter()
        steps = [_Step(item, trees.get(item.sequence.sequence_id)) for item in plan]
        steps.sort(key=lambda step: step.item.size, reverse=True)  # attention reads such rows in place
        items = [step.item for step in steps]
        batch = RaggedBatch.build(items, self.cache.block_size, self.model.device)
        hidden = self._run(batch, steps)
        shown = time.perf_counter()
        readings = self._read_prompts(hidden, batch, steps)
        reading = time.perf_counter() - shown
        states, logits = self._logits(hidden, batch, steps)
        ran = time.perf_counter()
        self._verify(steps, states, logits, readings)
        verified = time.perf_counter()
        self._observe(steps)
        observed = time.perf_counter()
        chunks += self._commit(steps)
        for exits in self.exits:
            self.stats.record_work(exits.take_work())
        ended = time.perf_counter()
        self.stats.record_step(
            seconds=ended - started,
            drafting=(drafted - scheduled) + reading + (observed - verified),
            model=ran - drafted - reading,
            verifying=(verified - ran) + (ended - observed) + (scheduled - started),
        )
        self._tell_drafters("timed", ended - started, batch.num_tokens, len(steps))
        return chunks

    def _tell_drafters(self, hook: str, *news: Any) -> None:
        """Call a hook of every drafter. One that raises is reported, once; no draft is lost by it."""
        for name, drafter in self.drafters.items():
            try:
                getattr(drafter, hook)(*news)
            except Exception as error:
                if self.strict:
                    raise
                if (name, hook) not in self._deaf:
                    self._deaf.add((name, hook))
                    logger.warning("drafter %s failed in %s(); it goes on drafting", name, hook, exc_info=error)

    def _propose(self, sequences: list[Sequence]) -> dict[int, TokenTree]:
        """A verified-to-be-valid proposal per sequence; the bare root where drafting is off, impossible or failed."""
        trees = {s.sequence_id: TokenTree.root(s.token_ids[-1]) for s in sequences}
        groups: dict[str, list[Sequence]] = defaultdict(list)
        for sequence in sequences:
            if sequence.draft_tokens > 0:
                groups[self._decoding[sequence.sequence_id].drafter.name].append(sequence)
        for name, group in groups.items():
            for sequence in group:
                sequence.stats.draft_calls += 1
            try:
                outcomes = list(zip(group, self._outcomes(name, group), strict=True))
            except Exception as error:
                self._drafter_failed(name, group, error)
                continue
            for sequence, outcome in outcomes:
                try:
                    trees[sequence.sequence_id] = self._checked(sequence, outcome)
                except Exception as error:
                    self._drafter_failed(name, [sequence], error)
        return trees

    def _outcomes(self, name: str, group: list[Sequence]) -> SequenceOf[TokenTree | Exception]:
        try:
            return self.drafters[name].propose(group)
        except SomeFailed as failed:
            return failed.outcomes

    def _checked(self, sequence: Sequence, tree: TokenTree | Exception) -> TokenTree:
        if isinstance(tree, Exception):
            raise tree
        if tree.token_ids[0] != sequence.token_ids[-1]:
            raise ValueError(
                f"a proposal's root must be the last token {sequence.token_ids[-1]}, got {tree.token_ids[0]}"
            )
        if not all(0 <= token_id < self.model.vocab_size for token_id in tree.token_ids):
            raise ValueError(f"a proposal's token ids must be in [0, {self.model.vocab_size})")
        return tree.clipped(sequence.max_depth, sequence.draft_tokens + 1)

    def _drafter_failed(self, name: str, group: list[Sequence], error: Exception) -> None:
        if self.strict:
            raise error
        if not any(sequence.stats.draft_failures for sequence in group):
            logger.warning("drafter %s failed; its sequences go on without a draft", name, exc_info=error)
        for sequence in group:
            sequence.stats.draft_failures += 1

    def _run(self, batch: RaggedBatch, steps: list[_Step]) -> Tensor:
        """[tokens, hidden] after the last layer.

        Tokens that a drafter has run through the first layers join where it stopped: each token passes each layer once.
        """
        shares = [self._share(step) for step in steps]
        ran = run_segments(self.model, self.cache, shares, batch, self.model.num_layers)
        work = {"full": ran.layer_tokens, "prefill": ran.prefill_layer_tokens, "passes": ran.layer_passes}
        self.stats.record_work(work)
        return ran.hidden

    def _read_prompts(self, hidden: Tensor, batch: RaggedBatch, steps: list[_Step]) -> list[_Reading]:
        """Give drafters what they ask for of tokens before the roots; what would be waited for is left to be read with
        all else, and returned."""
        readings = self._readings(hidden, batch, steps)
        if is_apart(hidden.device):
            return list(readings)
        for one in readings:
            self._let_read(one)
        return []

    def _let_read(self, reading: _Reading) -> None:
        try:
            reading.drafter.read(reading.sequence, reading.positions, reading.rows)
        except Exception as error:
            self._drafter_failed(reading.drafter.name, [reading.sequence], error)

    def _readings(self, hidden: Tensor, batch: RaggedBatch, steps: list[_Step]) -> Iterator[_Reading]:
        """So many rows at a time."""
        for step, row in zip(steps, batch.cu_seqlens, strict=False):
            sequence = step.scheduled.sequence
            start, count = sequence.table.length, step.scheduled.num_tokens - (step.tree is not None)
            drafter = self._decoding[sequence.sequence_id].drafter
            if count == 0 or sequence.params.draft_tokens == 0:
                continue
            try:
                wanted = drafter.unread(sequence, start, start + count)
                for first in range(0, len(wanted), ROWS_READ):
                    positions = wanted[first : first + ROWS_READ]
                    rows = to_device([row + position - start for position in positions], hidden.device)
                    logits = self._prompt_logits(drafter, hidden.index_select(0, rows))
                    yield _Reading(drafter, sequence, positions, PromptRows(logits))
            except Exception as error:
                self._drafter_failed(drafter.name, [sequence], error)

    def _prompt_logits(self, drafter: Drafter, hidden: Tensor) -> Tensor:
        """[rows, prompt_vocab] as the drafter wants them."""
        count = drafter.prompt_vocab
        if count is None or count >= self.model.vocab_size:
            return self.model.logits(hidden)
        if count not in self._trimmed:
            ids = torch.arange(count, device=self.model.device)
            self._trimmed[count] = self.model.trimmed_unembedding(ids, self.model.is_fast)
        return self._trimmed[count](self.model.final(hidden))

    def _share(self, step: _Step) -> Share:
        taps, tree = step.scheduled.sequence.taps, step.tree
        if tree is None:
            return Share(step.item, taps=taps, num_before=step.scheduled.num_tokens, kept=step.kept)
        return Share(step.item, tree.hidden, tree.depth, taps, step.scheduled.num_tokens - 1, step.kept)

    def _logits(self, hidden: Tensor, batch: RaggedBatch, steps: list[_Step]) -> tuple[Tensor, Tensor]:
        """([nodes of all proposals, embed] final states, [nodes, vocab] logits): root first, none in mid-prefill."""
        rows: list[int] = []
        for step, end in zip(steps, batch.cu_seqlens[1:], strict=True):
            rows.extend(range(end - step.num_nodes, end))
        if not rows:
            return hidden[:0], hidden[:0]
        if len(rows) < hidden.shape[0]:
            hidden = hidden.index_select(0, to_device(rows, hidden.device))
        states = self.model.final(hidden)
        return states, self.model.unembed(states)

    def _verify(self, steps: list[_Step], states: Tensor, logits: Tensor, readings: list[_Reading]) -> None:
        """Give each proposal its rows and its verdict. What is asked of the logits is read for all of them at once, and
        with it what drafters still wait for of prompts."""
        proposed = [(step, step.tree) for step in steps if step.tree is not None]
        if not proposed and not readings:
            return
        proposals = [self._proposal(step.scheduled.sequence, tree) for step, tree in proposed]
        known = read_out(logits, proposals, [(one.rows, one.drafter.num_likely) for one in readings])
        for one in readings:
            self._let_read(one)
        sizes = [len(tree) for _, tree in proposed]
        for (step, tree), *parts in zip(proposed, states.split(sizes), logits.split(sizes), known, strict=True):
            step.predicted = _Predicted(*parts)
            step.verdict = self._verdict(step, tree, step.predicted)

    def _proposal(self, sequence: Sequence, tree: TokenTree) -> Proposal:
        decoding = self._decoding[sequence.sequence_id]
        wanted = decoding.drafter.num_likely if sequence.params.draft_tokens != 0 else 0
        return Proposal(tree, decoding.pipeline, sequence.generator, wanted)

    def _verdict(self, step: _Step, tree: TokenTree, predicted: _Predicted) -> Verdict | None:
        """None for a sequence whose distribution cannot be made."""
        sequence, known = step.scheduled.sequence, predicted.known.distributions
        decoding = self._decoding[sequence.sequence_id]
        prefix, visited = list(sequence.token_ids), []
        rule: list[BoundRule] = []

        def target(node: int) -> Distribution | None:
            visited.append(node)
            if node > 0:
                prefix.append(tree.token_ids[node])
                if prefix[-1] in decoding.stop_ids:
                    return None
            p = known.get(node) or decoding.pipeline(predicted.logits[node], prefix)
            rule.extend([] if rule else [decoding.drafter.target_rule.bind(tree, predicted.states)])
            v = rule[0](node, p, tree.drawn_from(node))
            step.distances.append(v.distance)
            return v

        try:
            return verify(tree, target, sequence.generator)
        except Exception as error:  # a user's logits processor, or logits without a distribution: its neighbours go on
            if len(visited) == 1:
                sequence.fail(error)
                return None
            sequence.error = f"{type(error).__name__}: {error}"
            return Verdict(visited, None, corrected=False)

    def _observe(self, steps: list[_Step]) -> None:
        groups: dict[str, list[Observation]] = defaultdict(list)
        seen = []
        for step in steps:
            sequence, made = step.scheduled.sequence, step.predicted
            if step.verdict is not None and step.tree is not None and made is not None:
                seen.append(Observation(sequence, step.tree, step.verdict, made.logits, made.states, made.known.likely))
                if sequence.params.draft_tokens != 0:
                    groups[self._decoding[sequence.sequence_id].drafter.name].append(seen[-1])
        for watch in self.watchers if seen else ():
            watch(seen)
        for name, group in groups.items():
            try:
                self.drafters[name].observe(group)
            except Exception as error:
                self._drafter_failed(name, [observation.sequence for observation in group], error)

    def _commit(self, steps: list[_Step]) -> list[StreamChunk]:
        """Make the pass permanent: cache, token ids, statistics, text. Returns what can be shown."""
        kept: list[tuple[CacheTable, list[int]]] = []
        emitted: list[tuple[Sequence, str, list[int]]] = [
            (step.scheduled.sequence, "", []) for step in steps if step.scheduled.sequence.finish_reason == "error"
        ]
        for step in steps:
            sequence, count, verdict = step.scheduled.sequence, step.scheduled.num_tokens, step.verdict
            offsets = list(range(count))
            if verdict is None:
                sequence.stats.prefill_passes += 1
                sequence.stats.prefill_tokens += count
            else:
                text, token_ids = self._emit_or_end(step, verdict)
                emitted.append((sequence, text, token_ids))
                accepted = min(verdict.num_accepted, len(token_ids))
                offsets += [count - 1 + node for node in verdict.path[1 : accepted + 1]]
            kept.append((sequence.table, offsets))
        self.cache.commit(kept)
        for step, (_, offsets) in zip(steps, kept, strict=True):
            step.owe(offsets)
        self._let_heads_read([step.scheduled for step in steps if step.kept])
        for step in steps:
            sequence = step.scheduled.sequence
            self.cache.index_full_blocks(sequence.table, sequence.token_ids)
        return [self._chunk(sequence, text, token_ids) for sequence, text, token_ids in emitted]

    def _let_heads_read(self, late: list[Scheduled]) -> None:
        """What waits for heads: prompts at once, so that other texts can find them; what is emitted once it is much."""
        for is_prompt, least in ((True, 1), (False, MOST_OWED)):
            some = [one.sequence for one in late if (one.num_tokens > 1) == is_prompt]
            catch_up(((sequence.table, sequence.taps) for sequence in some), least)

    def _emit_or_end(self, step: _Step, verdict: Verdict) -> tuple[str, list[int]]:
        """`_emit`; what goes wrong in it, in making text for example, ends this sequence and no other."""
        try:
            return self._emit(step, verdict)
        except Exception as error:
            step.scheduled.sequence.fail(error)
            return "", []

    def _emit(self, step: _Step, verdict: Verdict) -> tuple[str, list[int]]:
        """Append what the verdict emits, up to a stop; returns the text that became certain and the ids."""
        sequence, tree, predicted = step.scheduled.sequence, step.tree, step.predicted
        assert tree is not None and predicted is not None
        decoding, params = self._decoding[sequence.sequence_id], sequence.params
        block = verdict.emitted(tree)
        room = min(params.max_new_tokens - sequence.num_emitted, self.max_length - len(sequence.token_ids))
        values = [] if params.logprobs is None else _logprobs(predicted.logits, verdict, block, params.logprobs)
        token_ids, text, sequence.finish_reason = cut_block(block, decoding.stop_ids, room, decoding.text)
        if sequence.error is not None and sequence.finish_reason is None:
            sequence.finish_reason = "error"
        elif sequence.finish_reason is not None:
            sequence.error = None  # the text had ended before what went wrong behind it
        if sequence.num_emitted == 0:
            sequence.stats.seconds_to_first_token = time.perf_counter() - sequence.arrived
        sequence.token_ids.extend(token_ids)
        sequence.stats.distance += sum(step.distances[: len(token_ids)])
        sequence.origins.extend(_origins(tree, verdict, decoding.drafter.name)[: len(token_ids)])
        sequence.logprobs.extend(values[: len(token_ids)])
        looked_up = decoding.drafter.retrieves and sequence.draft_tokens > 0
        sequence.stats.record_verdict(tree, verdict, len(token_ids), looked_up)
        return text, token_ids

    def _chunk(self, sequence: Sequence, text: str, token_ids: list[int]) -> StreamChunk:
        if sequence.finish_reason is not None:
            return self._finish(sequence, text, token_ids)
        origins = sequence.origins[len(sequence.origins) - len(token_ids) :]
        return StreamChunk(sequence.request_id, sequence.index, text, token_ids, origins)

    # -- life of a sequence --------------------------------------------------------------------------------------

    def _add_sequence(self, ids: list[int], params: GenerationParams, method: str, request_id: str, index: int) -> None:
        sequence = Sequence(
            next(self._sequence_ids),
            request_id,
            params if params.method == method else replace(params, method=method),
            list(ids),
            len(ids),
            make_generator(params.seed, index),
            make_generator(params.seed, index, stream=1),
            index=index,
        )
        self._decoding[sequence.sequence_id] = _Decoding(
            self.drafters[method],
            LogitsPipeline(params, len(ids), keep_probs=not self.drafters[method].target_rule.lossless),
            TextStream(self.tokenizer, params.stop, self._silent_ids),
            params.end_ids(self.model.eos_token_ids),
        )
        self._live[request_id] += 1
        self.scheduler.add(sequence)
        if min(params.max_new_tokens, self.max_length - len(ids)) <= 0:
            self._full.append(sequence)

    def _finish_without_running(self) -> list[StreamChunk]:
        """Texts that may not grow: max_new_tokens 0, or a prompt that fills the context."""
        full = [sequence for sequence in self._full if sequence.sequence_id in self._decoding]  # not cancelled since
        self._full.clear()
        for sequence in full:
            sequence.finish_reason = "length"
        return [self._finish(sequence) for sequence in full]

    def _finish(self, sequence: Sequence, text: str = "", token_ids: SequenceOf[int] = ()) -> StreamChunk:
        assert sequence.finish_reason is not None
        decoding = self._decoding.pop(sequence.sequence_id)
        try:
            text += decoding.text.finish()
        except Exception as error:
            sequence.fail(error)
        self.scheduler.remove(sequence)
        self._live[sequence.request_id] -= 1
        if not self._live[sequence.request_id]:
            del self._live[sequence.request_id]
        self._tell_drafters("release", sequence.sequence_id)
        sequence.stats.seconds = time.perf_counter() - sequence.arrived
        completion = Completion(
            sequence.request_id,
            sequence.index,
            sequence.token_ids[: sequence.num_prompt],
            sequence.output_ids,
            decoding.text.text,
            sequence.finish_reason,
            sequence.stats,
            sequence.logprobs,
            sequence.origins,
            sequence.error,
        )
        origins = sequence.origins[len(sequence.origins) - len(token_ids) :]
        return StreamChunk(sequence.request_id, sequence.index, text, list(token_ids), origins, completion)

    def _bounds(self, sequence: Sequence) -> tuple[int, int]:
        """(draft tokens, depth) of the next proposal: never past the length cap or the context."""
        room = min(sequence.params.max_new_tokens - sequence.num_emitted, self.max_length - len(sequence.token_ids))
        wanted = self._wanted(sequence)
        return (wanted, room - 1) if room > 1 and wanted > 0 else (0, 0)

    def _wanted(self, sequence: Sequence) -> int:
        """Size of its proposals: the request's, else the engine's, else the drafter's."""
        for wanted in (sequence.params.draft_tokens, self.draft_tokens):
            if wanted is not None:
                return wanted
        return self._decoding[sequence.sequence_id].drafter.draft_tokens_for(sequence.params)

    def _start(self, sequence: Sequence, texts: int) -> None:
        """Settle which heads see a text; prefixes are shared where the same heads have seen them."""
        drafter = self._decoding[sequence.sequence_id].drafter
        try:
            sequence.taps = drafter.taps_of(sequence, texts) if self._wanted(sequence) > 0 else frozenset()
        except Exception as error:
            sequence.taps = frozenset()
            self._drafter_failed(drafter.name, [sequence], error)
        sequence.table = CacheTable((sequence.params.namespace, at_once(sequence.taps)))

    def _scratch(self, sequence: Sequence) -> int:
        drafter = self._decoding[sequence.sequence_id].drafter
        return drafter.scratch_tokens(sequence.draft_tokens, sequence.params)

    # -- self-checks and helpers ---------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Assert between steps that no block is lost or shared wrongly and that every cache length fits its text."""
        self.cache.allocator.check([sequence.table for sequence in self.scheduler.sequences])
        for sequence in self.scheduler.sequences:
            table = sequence.table
            assert table.length <= len(sequence.token_ids) - 1, "a token was cached before it could be"
            assert len(table.blocks) == self.cache.blocks_for(table.length), "a table holds blocks it does not need"
            assert table.num_indexed * self.cache.block_size <= table.num_complete, "a block was indexed too early"
            assert sequence.num_emitted == 0 or sequence in self.scheduler.waiting or sequence.num_pending >= 1
        assert set(self._decoding) == {sequence.sequence_id for sequence in self.scheduler.sequences}

    def _known_method(self, method: str) -> str:
        if method not in self.drafters:
            close = get_close_matches(method, self.drafters, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"method {method!r} is not loaded; valid here: {', '.join(self.drafters)}{hint}")
        return method


def _check_sizes(draft_tokens: int | None, max_length: int | None) -> None:
    if draft_tokens is not None and not 0 <= draft_tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(f"draft_tokens must be from 0 to {MAX_DRAFT_TOKENS}, got {draft_tokens}")
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}")


def _by_name(drafters: SequenceOf[Drafter]) -> dict[str, Drafter]:
    """Raises ValueError for two drafters of one name, and for one that serves elsewhere: its state is of one place."""
    by_name: dict[str, Drafter] = {}
    others: set[int] = set()
    for drafter in drafters:
        if drafter.name in by_name:
            raise ValueError(f"drafters must have names of their own, got {drafter.name!r} twice")
        parts = {id(one): one for one in _with_wrapped(drafter)}
        for key, one in parts.items():
            if one.taken:
                raise ValueError(f"drafter {drafter.name!r} belongs to another engine; make a new one for this engine")
            if key in others:
                raise ValueError(f"drafter {one.name!r} is part of another drafter too; make one for each")
        others |= parts.keys()
        by_name[drafter.name] = drafter
    return by_name


def _with_wrapped(drafter: Drafter) -> Iterator[Drafter]:
    """A drafter and those it draws on."""
    yield drafter
    for value in vars(drafter).values():
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Drafter):
                yield from _with_wrapped(one)


def _logprobs(rows: Tensor, verdict: Verdict, block: SequenceOf[int], top: int) -> list[TokenLogprob]:
    """Of each token of a block, from the row of the node that it follows."""
    pairs = zip(verdict.path, block, strict=False)
    return [TokenLogprob(*logprobs(rows[node], token_id, top)) for node, token_id in pairs]


def _origins(tree: TokenTree, verdict: Verdict, drafter: str) -> list[TokenOrigin]:
    labels = tree.sources or [""] * len(tree)
    accepted = [TokenOrigin("accepted", drafter, labels[node]) for node in verdict.path[1:]]
    return [*accepted, TokenOrigin("corrected" if verdict.corrected else "bonus", drafter)]
