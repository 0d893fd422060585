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
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from ..modules.acceptance import Distribution, Verdict, verify
from ..modules.batch import BatchItem, RaggedBatch
from ..modules.kv_cache import CacheTable
from ..modules.layered_model import LayeredModel
from ..modules.sampling import LogitsPipeline, logprobs, make_generator
from ..modules.token_tree import TokenTree
from .drafter import Drafter, Observation
from .memory import blocks_within
from .request import Completion, GenerationParams, Prompt, Sequence, StreamChunk, TokenLogprob, TokenOrigin
from .scheduler import Scheduled, Scheduler
from .stats import EngineStats
from .target import Exact, TargetRule
from .text import TextStream, cut_block

logger = logging.getLogger(__name__)

MAX_DRAFT_TOKENS = 1024
"""Largest proposal a request may ask for: room for all of it is reserved, at the cost of younger requests."""


class _Ended(Exception):
    """A verified path has reached a token that ends the text: nothing after it is asked for."""


@dataclass
class _Decoding:
    """What the engine keeps beside a sequence: who drafts, how logits become a distribution, how ids become text."""

    drafter: Drafter
    pipeline: LogitsPipeline
    text: TextStream
    stop_ids: frozenset[int]


@dataclass(frozen=True)
class _Step:
    """One sequence's part of a pass: its share, its proposal (None in mid-prefill) and where its rows begin."""

    scheduled: Scheduled
    tree: TokenTree | None

    @property
    def item(self) -> BatchItem:
        sequence, count = self.scheduled.sequence, self.scheduled.num_tokens
        start = sequence.table.length
        token_ids = sequence.token_ids[start : start + count]
        if self.tree is None or len(self.tree) == 1:
            return BatchItem(token_ids, start, sequence.table.blocks)
        if self.tree.is_chain:
            return BatchItem([*token_ids, *self.tree.token_ids[1:]], start, sequence.table.blocks)
        parents = [*range(-1, count - 1), *(parent + count - 1 for parent in self.tree.parents[1:])]
        return BatchItem([*token_ids, *self.tree.token_ids[1:]], start, sequence.table.blocks, parents)


class Engine:
    """Runs requests on one model.

    drafters: those that requests can name as their method; "ar" is always there. default_method: for requests that name
        none. draft_tokens: default proposal size for all methods; None takes each drafter's own.
    kv_memory: GiB for the cache; None takes a share of the free memory, at most what max_num_seqs full contexts need.
    max_num_seqs: sequences in one pass. max_batch_tokens: prefill is chunked beyond this many tokens in a pass.
    max_length: longest text, prompt included; None takes the model's context (or the cache, when that is smaller).
    strict: let drafters' exceptions through instead of going on without their draft (tests).

    Not thread-safe: one thread owns an engine.
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
        strict: bool = False,
    ) -> None:
        self.model, self.tokenizer, self.strict = model, tokenizer, strict
        self.drafters = {drafter.name: drafter for drafter in (Drafter(), *drafters)}
        self.default_method = self._known_method(default_method)
        self.draft_tokens = draft_tokens
        self.target_rule = target_rule or Exact()
        if num_blocks is None:
            num_blocks = blocks_within(model, block_size, max_num_seqs, kv_memory)
        self.cache = model.new_cache(num_blocks, block_size, prefix_caching)
        for drafter in self.drafters.values():
            drafter.attach(model, self.cache)
        self.max_length = min(max_length or model.max_positions, model.max_positions, self.cache.num_slots)
        self.scheduler = Scheduler(self.cache, max_num_seqs, max_batch_tokens, self._bounds, self._scratch)
        self.stats = EngineStats()
        self._decoding: dict[int, _Decoding] = {}
        self._full: list[Sequence] = []  # waiting texts that may not grow
        self._live: Counter[str] = Counter()  # texts of each request that have not ended
        self._sequence_ids, self._request_ids = itertools.count(), itertools.count()
        self._undelivered: list[StreamChunk] = []  # of requests that no stream waits for
        self._streamed: dict[str, list[StreamChunk]] = {}  # per request of an open stream

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, prompt: Prompt, params: GenerationParams | None = None, request_id: str | None = None) -> str:
        """Queue a request of `params.n` texts; returns its id. Raises ValueError for what could never run."""
        params = params or GenerationParams()
        method = self._known_method(params.method or self.default_method)
        prompt_ids = self.encode(prompt)
        if params.stop:
            self._need_tokenizer("stop")
        if (params.draft_tokens or 0) > MAX_DRAFT_TOKENS:
            raise ValueError(f"draft_tokens must be at most {MAX_DRAFT_TOKENS}, got {params.draft_tokens}")
        for name, token_ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            self._check_ids(name, token_ids)
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
        return bool(self.scheduler.waiting or self.scheduler.running or self._undelivered)

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
        each: list[Prompt] = [prompts] if _is_single(prompts) else list(prompts)  # type: ignore[list-item, arg-type]
        if not (params is None or isinstance(params, GenerationParams | list | tuple)):
            raise ValueError(f"params must be GenerationParams, or a list with one for each prompt, got {params!r}")
        one = params if params is None or isinstance(params, GenerationParams) else None
        many = list(params) if isinstance(params, list | tuple) else [one] * len(each)
        if len(many) != len(each):
            raise ValueError(f"params must be one or as many as prompts ({len(each)}), got {len(many)}")
        mine = request_ids if request_ids is not None else []
        try:
            for prompt, one in zip(each, many, strict=True):
                mine.append(self.add(prompt, one))
                self._streamed[mine[-1]] = []
            while True:
                ready = [chunk for request_id in mine for chunk in self._streamed[request_id]]
                for request_id in mine:
                    self._streamed[request_id].clear()
                yield from ready
                if not ready and not self._live.keys() & set(mine):
                    return
                if not ready:
                    self._undelivered += self._advance()
        finally:
            self._cancel(set(mine))
            for request_id in mine:
                self._streamed.pop(request_id, None)

    def reset(self) -> None:
        """Forget what was learned and cached from finished requests; a used engine then behaves as a fresh one."""
        for drafter in self.drafters.values():
            drafter.reset()
        self.cache.allocator.forget_idle()
        self.stats = EngineStats()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text, ids, or chat messages. Raises ValueError when it is empty or too long."""
        if isinstance(prompt, str):
            token_ids = list(self._need_tokenizer("a text prompt")(prompt).input_ids)
        elif isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], dict):
            token_ids = self._encode_messages(prompt)
        else:
            token_ids = _as_ids(prompt)
        if not token_ids:
            raise ValueError("prompt must hold at least one token, got none")
        self._check_ids("prompt", token_ids)
        if len(token_ids) > self.max_length:
            raise ValueError(f"prompt has {len(token_ids)} tokens; the longest text here is {self.max_length}")
        return token_ids

    # -- the step ------------------------------------------------------------------------------------------------

    def step(self) -> list[StreamChunk]:
        """One pass over all running sequences; returns the text that became certain and the texts that ended.

        What belongs to an open `stream` comes out there instead.
        """
        new = self._advance()
        chunks, self._undelivered = [*self._undelivered, *new], []
        return chunks

    def _advance(self) -> list[StreamChunk]:
        """One pass; puts what open streams wait for into their boxes and returns the rest."""
        rest: list[StreamChunk] = []
        for chunk in self._pass():
            self._streamed.get(chunk.request_id, rest).append(chunk)
        return rest

    @torch.inference_mode()
    def _pass(self) -> list[StreamChunk]:
        started = time.perf_counter()
        chunks = self._finish_without_running()
        plan = self.scheduler.schedule()
        if not plan:
            return chunks
        scheduled = time.perf_counter()
        trees = self._propose([item.sequence for item in plan if item.reaches_root])
        steps = [_Step(item, trees.get(item.sequence.sequence_id)) for item in plan]
        items = [step.item for step in steps]
        batch = RaggedBatch.build(items, self.cache.block_size, self.model.device)
        drafted = time.perf_counter()
        logits, layer_tokens = self._run(batch, steps)
        ran = time.perf_counter()
        verdicts = [self._verify(step, rows) for step, rows in zip(steps, logits, strict=True)]
        verified = time.perf_counter()
        self._observe(steps, verdicts, logits)
        observed = time.perf_counter()
        chunks += self._commit(steps, verdicts, logits)
        ended = time.perf_counter()
        self.stats.record_step(
            seconds=ended - started,
            drafting=(drafted - scheduled) + (observed - verified),
            model=ran - drafted,
            verifying=(verified - ran) + (ended - observed) + (scheduled - started),
            layer_tokens=layer_tokens,
        )
        return chunks

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
                proposed = self.drafters[name].propose(group)
                checked = [self._checked(s, tree) for s, tree in zip(group, proposed, strict=True)]
            except Exception as error:
                self._drafter_failed(name, group, error)
                continue
            trees.update({s.sequence_id: tree for s, tree in zip(group, checked, strict=True)})
        return trees

    def _checked(self, sequence: Sequence, tree: TokenTree) -> TokenTree:
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

    def _run(self, batch: RaggedBatch, steps: list[_Step]) -> tuple[list[Tensor], int]:
        """Per step the logits [nodes, vocab] of its proposal, root first (mid-prefill: none); and the layer-tokens run.

        Tokens that a drafter has run through the first layers join where it stopped: each token passes each layer once.
        """
        hidden, layer_tokens = self.model.embed(batch), 0
        for step, start in zip(steps, batch.cu_seqlens, strict=False):
            if step.tree is not None and step.tree.hidden is not None:
                hidden[start : start + step.tree.num_run] = step.tree.hidden
        joins = {step.tree.depth for step in steps if step.tree is not None and step.tree.num_run}
        for first, last in pairwise(sorted({0, *joins, self.model.num_layers})):
            rows, part = self._rows_at(first, batch, steps)
            if part is None:
                continue
            ran = self.model.run(hidden if rows is None else hidden[rows], part, self.cache, first, last)
            hidden = ran if rows is None else hidden.index_copy(0, rows, ran)
            layer_tokens += part.num_tokens * (last - first)
        return self._logits(hidden, batch, steps), layer_tokens

    def _rows_at(self, layer: int, batch: RaggedBatch, steps: list[_Step]) -> tuple[Tensor | None, RaggedBatch | None]:
        """The tokens that run at this layer: their rows and their batch; (None, the whole batch) when all do."""
        skips = [0 if step.tree is None or step.tree.depth <= layer else step.tree.num_run for step in steps]
        if not any(skips):
            return None, batch
        parts = [step.item.after(skip) for step, skip in zip(steps, skips, strict=True)]
        rows = [
            row
            for start, end, skip in zip(batch.cu_seqlens, batch.cu_seqlens[1:], skips, strict=False)
            for row in range(start + skip, end)
        ]
        if not rows:
            return None, None
        device = self.model.device
        items = [part for part in parts if part.token_ids]
        return torch.tensor(rows, device=device), RaggedBatch.build(items, self.cache.block_size, device)

    def _logits(self, hidden: Tensor, batch: RaggedBatch, steps: list[_Step]) -> list[Tensor]:
        rows: list[int] = []
        for step, end in zip(steps, batch.cu_seqlens[1:], strict=True):
            rows.extend(range(end - len(step.tree), end) if step.tree is not None else ())
        if not rows:
            return [hidden[:0] for _ in steps]
        if len(rows) < hidden.shape[0]:
            hidden = hidden.index_select(0, torch.tensor(rows, device=hidden.device))
        logits = self.model.logits(hidden)
        return list(logits.split([0 if step.tree is None else len(step.tree) for step in steps]))

    def _verify(self, step: _Step, rows: Tensor) -> Verdict | None:
        """The verdict on one proposal; None in mid-prefill, and for a sequence whose distribution cannot be made."""
        sequence, tree = step.scheduled.sequence, step.tree
        if tree is None:
            return None
        decoding = self._decoding[sequence.sequence_id]
        prefix, visited = list(sequence.token_ids), []

        def target(node: int) -> Distribution:
            visited.append(node)
            if node > 0:
                prefix.append(tree.token_ids[node])
                if prefix[-1] in decoding.stop_ids:
                    raise _Ended
            child = next(iter(tree.children[node].values()), None) if tree.probs is not None else None
            q = None if child is None or tree.probs is None else tree.probs[child - 1]
            return self.target_rule(decoding.pipeline(rows[node], prefix), q)

        try:
            return verify(tree, target, sequence.generator)
        except _Ended:
            pass
        except Exception as error:  # a user's logits processor, or logits without a distribution: its neighbours go on
            sequence.error = f"{type(error).__name__}: {error}"
            if len(visited) == 1:
                sequence.finish_reason = "error"
                return None
        return Verdict(visited, tree.token_ids[visited[-1]], corrected=False)  # what follows the path is not emitted

    def _observe(self, steps: list[_Step], verdicts: list[Verdict | None], logits: list[Tensor]) -> None:
        groups: dict[str, list[Observation]] = defaultdict(list)
        for step, verdict, rows in zip(steps, verdicts, logits, strict=True):
            sequence = step.scheduled.sequence
            if verdict is not None and step.tree is not None and sequence.params.draft_tokens != 0:
                name = self._decoding[sequence.sequence_id].drafter.name
                groups[name].append(Observation(sequence, step.tree, verdict, rows))
        for name, group in groups.items():
            try:
                self.drafters[name].observe(group)
            except Exception as error:
                self._drafter_failed(name, [observation.sequence for observation in group], error)

    def _commit(self, steps: list[_Step], verdicts: list[Verdict | None], logits: list[Tensor]) -> list[StreamChunk]:
        """Make the pass permanent: cache, token ids, statistics, text. Returns what can be shown."""
        kept: list[tuple[CacheTable, list[int]]] = []
        emitted: list[tuple[Sequence, str, list[int]]] = [
            (step.scheduled.sequence, "", []) for step in steps if step.scheduled.sequence.finish_reason == "error"
        ]
        for step, verdict, rows in zip(steps, verdicts, logits, strict=True):
            sequence, count = step.scheduled.sequence, step.scheduled.num_tokens
            offsets = list(range(count))
            if verdict is None:
                sequence.stats.prefill_passes += 1
                sequence.stats.prefill_tokens += count
            else:
                text, token_ids = self._emit(step, verdict, rows)
                emitted.append((sequence, text, token_ids))
                accepted = min(verdict.num_accepted, len(token_ids))
                offsets += [count - 1 + node for node in verdict.path[1 : accepted + 1]]
            kept.append((sequence.table, offsets))
        self.cache.commit(kept)
        for step in steps:
            sequence = step.scheduled.sequence
            self.cache.index_full_blocks(sequence.table, sequence.token_ids)
        return [self._chunk(sequence, text, token_ids) for sequence, text, token_ids in emitted]

    def _emit(self, step: _Step, verdict: Verdict, rows: Tensor) -> tuple[str, list[int]]:
        """Append what the verdict emits, up to a stop; returns the text that became certain and the ids."""
        sequence, tree = step.scheduled.sequence, step.tree
        assert tree is not None
        decoding, params = self._decoding[sequence.sequence_id], sequence.params
        block = [tree.token_ids[node] for node in verdict.path[1:]]
        block += [verdict.next_token] if sequence.error is None else []
        room = min(params.max_new_tokens - sequence.num_emitted, self.max_length - len(sequence.token_ids))
        token_ids, text, sequence.finish_reason = cut_block(block, decoding.stop_ids, room, decoding.text)
        if sequence.error is not None and sequence.finish_reason is None:
            sequence.finish_reason = "error"
        elif sequence.finish_reason is not None:
            sequence.error = None  # the text had ended before what went wrong behind it
        if sequence.num_emitted == 0:
            sequence.stats.seconds_to_first_token = time.perf_counter() - sequence.arrived
        sequence.token_ids.extend(token_ids)
        sequence.origins.extend(_origins(tree, verdict, decoding.drafter.name)[: len(token_ids)])
        if params.logprobs is not None:
            for node, token_id in zip(verdict.path, token_ids, strict=False):
                sequence.logprobs.append(TokenLogprob(*logprobs(rows[node], token_id, params.logprobs)))
        sequence.stats.record_pass(
            num_drafted=tree.num_drafted,
            max_depth=max(tree.depths),
            num_accepted=min(verdict.num_accepted, len(token_ids)),
            emitted=len(token_ids),
            retrieval_hit="ngram" in tree.sources if decoding.drafter.retrieves and sequence.draft_tokens > 0 else None,
        )
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
            make_generator(params.seed, index, self.model.device),
            make_generator(params.seed, index, self.model.device, stream=1),
            CacheTable(params.namespace),
            index,
        )
        self._decoding[sequence.sequence_id] = _Decoding(
            self.drafters[method],
            LogitsPipeline(params, len(ids)),
            TextStream(self.tokenizer, params.stop),
            frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.model.eos_token_ids),
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
        text += decoding.text.finish()
        self.scheduler.remove(sequence)
        self._live[sequence.request_id] -= 1
        if not self._live[sequence.request_id]:
            del self._live[sequence.request_id]
        for drafter in self.drafters.values():
            drafter.release(sequence.sequence_id)
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
        wanted = sequence.params.draft_tokens
        if wanted is None:
            wanted = self.draft_tokens
        if wanted is None:
            wanted = self._decoding[sequence.sequence_id].drafter.default_draft_tokens()
        return (wanted, room - 1) if room > 1 and wanted > 0 else (0, 0)

    def _scratch(self, sequence: Sequence) -> int:
        return self._decoding[sequence.sequence_id].drafter.scratch_tokens(sequence.draft_tokens)

    # -- self-checks and helpers ---------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Assert between steps that no block is lost or shared wrongly and that every cache length fits its text."""
        self.cache.allocator.check([sequence.table for sequence in self.scheduler.sequences])
        for sequence in self.scheduler.sequences:
            table = sequence.table
            assert table.length <= len(sequence.token_ids) - 1, "a token was cached before it could be"
            assert len(table.blocks) == self.cache.blocks_for(table.length), "a table holds blocks it does not need"
            assert sequence.num_emitted == 0 or sequence in self.scheduler.waiting or sequence.num_pending >= 1
        assert set(self._decoding) == {sequence.sequence_id for sequence in self.scheduler.sequences}

    def _known_method(self, method: str) -> str:
        if method not in self.drafters:
            close = get_close_matches(method, self.drafters, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"method {method!r} is not loaded; valid here: {', '.join(self.drafters)}{hint}")
        return method

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        wrong = next((token_id for token_id in token_ids if not 0 <= token_id < self.model.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"{name}: token ids must be in [0, {self.model.vocab_size}), got {wrong}")

    def _need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and this engine has none; pass token ids")
        return self.tokenizer

    def _encode_messages(self, messages: SequenceOf[dict[str, str]]) -> list[int]:
        tokenizer = self._need_tokenizer("a list of messages")
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "messages need a chat template and this tokenizer has none; set --chat-template or use prompt"
            )
        try:
            encoded = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return list(encoded["input_ids"])


def _as_ids(prompt: Any) -> list[int]:
    """Token ids from a list, tuple or array of integers. Raises ValueError for anything else."""
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(values, list | tuple) or any(isinstance(v, bool) or not isinstance(v, Integral) for v in values):
        raise ValueError(f"prompt must be a text, token ids or messages, got {prompt!r:.80}")
    return [int(value) for value in values]


def _is_single(prompts: Any) -> bool:
    """Whether this is one prompt (a text, ids, messages) rather than a list of them."""
    if isinstance(prompts, str) or getattr(prompts, "ndim", None) == 1:
        return True
    if not isinstance(prompts, list | tuple) and not hasattr(prompts, "ndim"):
        raise ValueError(f"prompts must be a prompt or a list of them, got {prompts!r:.80}")
    return bool(len(prompts)) and isinstance(prompts[0], Integral | dict)


def _origins(tree: TokenTree, verdict: Verdict, drafter: str) -> list[TokenOrigin]:
    labels = tree.sources or [""] * len(tree)
    accepted = [TokenOrigin("accepted", drafter, labels[node]) for node in verdict.path[1:]]
    return [*accepted, TokenOrigin("corrected" if verdict.corrected else "bonus", drafter)]
