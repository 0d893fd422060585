"""Trained heads in the engine: what they read while decoding, what they cost, what a request may choose, the commands.

That texts stay those of plain decoding is tests/infer/test_exactness.py, for these heads too.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest
import scipy.stats
import torch
from checkpoint import save_tiny
from heads import KEPT, random_exits, random_heads
from speclight.infer import Engine, GenerationParams, LogitSpecDrafter
from speclight.infer.auto import AutoDrafter
from speclight.infer.build import EarlyExitOptions, EngineOptions, HiSpecOptions, build_engine, prepare
from speclight.infer.bundles import base_fingerprint, tried_acceptance
from speclight.infer.cli import main
from speclight.infer.compare import next_logits
from speclight.infer.cost_model import Calibration, CostModel
from speclight.infer.early_exit import EarlyExitDrafter
from speclight.infer.exits import EarlyExits, HeadExits
from speclight.infer.hierarchical import HierarchicalDrafter
from speclight.infer.loading import resolve_model
from speclight.infer.stats import SequenceStats
from speclight.modules.batch import BatchItem, RaggedBatch
from speclight.modules.bundle import HeadBundle, fingerprint_checkpoint
from speclight.modules.exit_heads import ExitHeads
from speclight.modules.layered_model import LayeredModel
from support import tiny_lm
from torch._subclasses import FakeTensor

PROMPTS = [[5, 9, 3, 5, 9, 3, 5, 9, 1, 2, 3, 4], [5, 9, 3, 5, 9, 3, 5, 9, 7], [8], [*range(30, 60)]]


def hispec(exits: EarlyExits, draft_layer: int = 1, verify_layer: int = 3, num_tokens: int = 2, window: int = 4):
    return HierarchicalDrafter(
        EarlyExitDrafter(draft_layer, num_tokens, exits=exits), verify_layer, window, exits=exits
    )


def engine_with(*drafters, model: LayeredModel | None = None, **options) -> Engine:
    options = {"num_blocks": 200, "strict": True, "default_method": drafters[0].name} | options
    return Engine(model or tiny_lm(), drafters=drafters, **options)


def rejected(stats: SequenceStats) -> int:
    return stats.drafted - stats.accepted


# --- what a head reads while decoding -----------------------------------------------------------------------------


@cache
def in_training():
    model = tiny_lm(fast=False)
    return model, random_heads("block", (1, 3)).bind(model)


def whole_text_logits(layer: int, token_ids: list[int]) -> torch.Tensor:
    """[vocab] as in training: transformers' modules, one pass over the whole text, no cache."""
    model, exits = in_training()
    batch = RaggedBatch.build([BatchItem(token_ids)], None)
    with torch.inference_mode():
        hidden = model.run(model.embed(batch), batch, None, 0, layer)
        return exits.heads.scatter(exits.logits(layer, hidden, batch))[-1]


class WatchedDraft(EarlyExitDrafter):
    """Keeps what each draft was drawn from: (layer, the text before it) -> logits."""

    seen: list[tuple[int, list[int], torch.Tensor]]

    def _draw(self, chains, states, logits):
        for chain, row in zip(chains, logits, strict=True):
            self.seen.append((self.depth(chain.sequence.params), chain.sequence.token_ids + chain.token_ids, row))
        super()._draw(chains, states, logits)


class WatchedWindow(HierarchicalDrafter):
    """The same of each node of an inner proposal."""

    seen: list[tuple[int, list[int], torch.Tensor]]

    def _verify(self, one, states, rows):
        for node, row in enumerate(rows):
            path = [one.tree.token_ids[i] for i in one.tree.path_to(node)[1:]]
            self.seen.append((one.window.layer, one.window.shadow.token_ids + path, row))
        return super()._verify(one, states, rows)


@pytest.mark.parametrize("inner", ["early-exit", "logitspec"])
def test_a_head_that_reads_context_predicts_in_decoding_what_one_pass_over_the_text_would(inner):
    """Fails if a token is missing, doubled or stale in the head's cache: after rejections, chunked prefill, preemption
    and prefix hits, beside texts of other methods, of other exits, and trees that are rejected."""
    exits = random_exits("block", (1, 3))
    draft = WatchedDraft(1, 3, exits=exits) if inner == "early-exit" else LogitSpecDrafter(k=8, capacity=6, retrieved=3)
    one = WatchedWindow(draft, 3, 4, exits=exits)  # on transformers' modules, which round as in training
    alone = WatchedDraft(3, 2, exits=exits)
    one.seen = alone.seen = draft.seen = seen = []
    engine = engine_with(
        one,
        alone,
        LogitSpecDrafter(k=8, capacity=8),
        model=tiny_lm(fast=False).requires_grad_(False),
        num_blocks=17,
        block_size=4,
        max_batch_tokens=11,
        max_num_seqs=5,
    )
    requests = [*({"method": one.name} for _ in PROMPTS), {"method": "logitspec"}, {"method": "early-exit"}]
    requests += [{"method": "ar"}, {"method": "early-exit", "draft_layer": 1}, {"method": one.name, "verify_layer": 1}]
    for round_ in range(2):  # the second finds the prompts' blocks
        for index, request in enumerate(requests):
            params = GenerationParams(max_new_tokens=8, temperature=1.0, seed=index + 10 * round_, **request)
            engine.add(PROMPTS[index % len(PROMPTS)], params)
        done = []
        while engine.has_work:
            done += [chunk.completion for chunk in engine.step() if chunk.completion is not None]
            engine.check_invariants()
    stats = SequenceStats.total(completion.stats for completion in done)
    assert stats.preemptions > 0 and stats.cached_tokens > 0 and rejected(stats) > 0 and stats.accepted > 0
    assert {layer for layer, _, _ in seen} == {1, 3} and len(seen) > 100
    for layer, token_ids, row in seen:
        torch.testing.assert_close(row, whole_text_logits(layer, token_ids), atol=1e-9, rtol=1e-9)


class InTurn(AutoDrafter):
    """Trees for some steps, then a chain drafter for one, then trees, then the other; all texts are shown to heads."""

    def _clear(self):
        super()._clear()
        self.shown.promises = lambda sequence, texts, step: True

    def _choose_arm(self, allowed, step, trees):
        arm = {3: self.arms[0], 8: self.arms[1]}.get(self._steps % 11)
        return (None, None) if arm not in allowed else (arm, arm.best(allowed[arm], step.load, 0.0))


def in_turn(early_exit: EarlyExitDrafter, hispec: HierarchicalDrafter) -> InTurn:
    cost = CostModel(Calibration((1, 64), (0.04, 0.05), (0.0, 0.0)))
    return InTurn(LogitSpecDrafter(k=8, capacity=6), [early_exit, hispec], bound=6, cost=cost, clock=lambda: 0.0)


@pytest.mark.parametrize("most", [3, 7, 64])
def test_heads_that_read_late_predict_what_one_pass_over_the_text_would(most, monkeypatch):
    """Under auto tokens wait for heads; fails if one is lost, doubled or out of order when they wake, behind rejected
    trees, chains of another exit, preemption, chunked prefill and prefix hits."""
    monkeypatch.setattr("speclight.infer.engine.MOST_OWED", most)
    exits = random_exits("block", (1, 3))
    alone, inner = WatchedDraft(3, 2, exits=exits), WatchedDraft(1, 2, exits=exits)
    one = WatchedWindow(inner, 3, 4, exits=exits)
    one.seen = alone.seen = inner.seen = seen = []
    engine = engine_with(
        in_turn(alone, one),
        model=tiny_lm(fast=False).requires_grad_(False),
        num_blocks=23,
        block_size=4,
        max_batch_tokens=11,
        max_num_seqs=5,
    )
    texts = [[90 + index, *prompt] for index, prompt in enumerate(PROMPTS)]
    done, owed = [], 0
    for _ in range(2):  # the second finds blocks of the first
        for text in texts:
            engine.add(text, GenerationParams(max_new_tokens=70))
        while engine.has_work:
            done += [chunk.completion for chunk in engine.step() if chunk.completion is not None]
            engine.check_invariants()
            tables = [sequence.table for sequence in engine.scheduler.running]
            owed = max([owed, *(table.length - table.num_complete for table in tables)])
    stats = SequenceStats.total(completion.stats for completion in done)
    assert stats.preemptions > 0 and stats.cached_tokens > 0 and rejected(stats) > 0 and stats.accepted > 0
    assert owed > min(most, 10) // 2, "heads read at once"
    assert {layer for layer, _, _ in seen} == {1, 3} and len(seen) > 50
    for layer, token_ids, row in seen:
        torch.testing.assert_close(row, whole_text_logits(layer, token_ids), atol=1e-9, rtol=1e-9)


class Passages:
    """Counts, for each token in its context, how often it passes each layer and each head: {((text up to it), place)}.

    A token's context are the tokens in the slots that the pass's plan lets it see.
    """

    def __init__(self, engine: Engine, exits: EarlyExits) -> None:
        self.counts: Counter = Counter()
        self.tokens: dict[int, int] = {}  # by slot
        model, cache = engine.model, engine.cache
        run, predict, tap, keep = model.run, exits.predict, exits.tap, cache.keep

        def counting_run(hidden, batch, cache, start, stop):
            self.tokens.update(zip(batch.slot_mapping.tolist(), batch.token_ids.tolist(), strict=True))
            self.count(batch, range(start, stop))
            return run(hidden, batch, cache, start, stop)

        def counting_predict(layer, hidden, batch, rows):
            self.count(batch, [f"head {layer}"])
            return predict(layer, hidden, batch, rows)

        def counting_tap(layer, hidden, batch):
            self.count(batch, [f"head {layer}"])
            tap(layer, hidden, batch)

        def moving_keep(kept):
            for table, offsets in kept:
                for place, offset in enumerate(offsets):
                    source, target = (cache.slot(table, table.length + i) for i in (offset, place))
                    self.tokens[target] = self.tokens[source]
            keep(kept)

        model.run, exits.predict, exits.tap, cache.keep = counting_run, counting_predict, counting_tap, moving_keep

    def count(self, batch: RaggedBatch, places) -> None:
        for group in batch.groups:
            seen = group.visible.reshape(-1, group.num_keys)
            slots = group.key_slots.view(group.num_seqs, -1).repeat_interleave(group.num_queries, 0)
            real = range(len(seen)) if group.output_index is None else group.output_index.tolist()
            for row in real:
                text = tuple(self.tokens[slot] for slot in slots[row][seen[row]].tolist())
                self.counts.update((text, place) for place in places)


@pytest.mark.parametrize("inner", ["early-exit", "logitspec"])
def test_no_token_passes_a_layer_or_a_head_twice_and_none_is_left_out(inner):
    """Fails if in one step a layer or a head sees a token that it has seen, or if one is committed that it has not."""
    exits = random_exits("block", (1, 3), None)
    draft = EarlyExitDrafter(1, exits=exits) if inner == "early-exit" else LogitSpecDrafter(k=8, capacity=6)
    engine = engine_with(HierarchicalDrafter(draft, 3, 4, exits=exits), prefix_caching=False, max_batch_tokens=20)
    passages = Passages(engine, exits)
    for index, prompt in enumerate(PROMPTS):  # no two texts are equal up to any token
        engine.add([90 + index, *prompt], GenerationParams(max_new_tokens=24, temperature=1.0, seed=index))
    places = [*range(4), "head 3", *(["head 1"] if inner == "early-exit" else [])]
    layer_tokens = head_tokens = 0
    lengths: dict[int, int] = {}
    while engine.has_work:
        passages.counts.clear()
        engine.step()
        assert max(passages.counts.values()) == 1
        layer_tokens += sum(isinstance(place, int) for _, place in passages.counts)
        head_tokens += sum(isinstance(place, str) for _, place in passages.counts)
        for sequence in engine.scheduler.running:
            for length in range(lengths.get(sequence.sequence_id, 0) + 1, sequence.table.length + 1):
                assert all(passages.counts[tuple(sequence.token_ids[:length]), place] == 1 for place in places)
            lengths[sequence.sequence_id] = sequence.table.length
    stats = engine.stats
    assert (layer_tokens, head_tokens) == (stats.layer_tokens, stats.head_tokens)
    assert min(stats.prefill_layer_tokens, stats.intermediate_layer_tokens, stats.full_layer_tokens) > 0
    assert (stats.draft_layer_tokens > 0) == (inner == "early-exit")


def test_where_reading_late_fails_tokens_go_on_waiting(caplog):
    """A head that could not read once has no hole afterwards, and no block is findable that it has not read."""
    exits = random_exits("block", (1, 3))
    alone, inner = WatchedDraft(3, 2, exits=exits), WatchedDraft(1, 2, exits=exits)
    one = WatchedWindow(inner, 3, 4, exits=exits)
    one.seen = alone.seen = inner.seen = seen = []
    model = tiny_lm(fast=False).requires_grad_(False)
    engine = engine_with(in_turn(alone, one), model=model, block_size=4, strict=False)
    engine.add(PROMPTS[0], GenerationParams(max_new_tokens=60))
    engine.step()
    tap, failed = exits.tap, []

    def failing_tap(layer, hidden, batch):
        if not failed:
            failed.append(layer)
            raise RuntimeError("out of memory")
        tap(layer, hidden, batch)

    exits.tap = failing_tap
    while engine.has_work:
        engine.step()
        engine.check_invariants()
    assert failed and len(seen) >= 4
    for layer, token_ids, row in seen:
        torch.testing.assert_close(row, whole_text_logits(layer, token_ids), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("length", [50, 120])
def test_texts_of_one_prompt_share_it_under_auto_with_heads(length):
    """The first text's prompt is read by the heads in the pass that ran it, so that the others find it."""
    exits = random_exits("block", (1, 3))
    engine = engine_with(in_turn(EarlyExitDrafter(1, exits=exits), hispec(exits)), model=tiny_lm())
    prompt = [(7 * place + 3) % 90 for place in range(length)]
    done = engine.generate([prompt], GenerationParams(max_new_tokens=3, temperature=1.0, n=4))
    shared = (length - 1) // 16 * 16
    assert [one.stats.cached_tokens for one in done] == [0, shared, shared, shared]
    (again,) = engine.generate([prompt], GenerationParams(max_new_tokens=1))
    assert again.stats.cached_tokens == shared


def test_a_head_that_reads_late_sees_each_token_once_and_only_when_it_is_used():
    """Until a chain is tried nothing passes a head but what many tokens wait for; then all of them, each once."""
    exits = random_exits("block", (1, 3), None)
    engine = engine_with(in_turn(EarlyExitDrafter(1, exits=exits), hispec(exits)), prefix_caching=False)
    passages = Passages(engine, exits)
    engine.add(PROMPTS[0], GenerationParams(max_new_tokens=40))
    (text,) = engine.scheduler.waiting
    engine.step()
    heads = ("head 1", "head 3")
    before = [sum(place == head for _, place in passages.counts) for head in heads]
    assert before == [len(PROMPTS[0])] * 2, "prompts are read at once"
    for step in range(2, 23):
        engine.step()
        drafts = engine.drafters["auto"]._steps % 11
        passed = [sum(place == head for _, place in passages.counts) for head in heads]
        if drafts not in (3, 8):
            assert passed == before, (step, "a head read though nobody drafts by it")
        before = passed
        for length in range(1, text.table.num_complete + 1):
            assert all(passages.counts[tuple(text.token_ids[:length]), head] == 1 for head in heads)
    assert min(before) > 20


def test_texts_of_methods_without_the_head_do_not_pay_for_it():
    exits = random_exits("block", (1, 3))
    engine = engine_with(hispec(exits), EarlyExitDrafter(1, exits=exits))
    engine.generate([PROMPTS[3]], GenerationParams(method="ar", max_new_tokens=5))
    assert engine.stats.head_tokens == 0 and engine.stats.decoding_layer_tokens == 4 * 5
    (early,) = engine.generate([PROMPTS[3]], GenerationParams(method="early-exit", max_new_tokens=5))
    assert early.stats.cached_tokens == 0, "its prompt was cached by a text that the head has not seen"
    (again,) = engine.generate([PROMPTS[3]], GenerationParams(method="early-exit", max_new_tokens=5))
    assert again.stats.cached_tokens == 16 and again.token_ids == early.token_ids


def test_heads_that_read_context_add_their_layers_to_the_cache_and_others_nothing():
    plain = engine_with(EarlyExitDrafter(1)).cache.data.nbytes
    for kind, layers in (("norm", 4), ("adapter", 4), ("block", 6)):
        exits = random_exits(kind, (1, 3))
        engine = engine_with(hispec(exits), EarlyExitDrafter(1, exits=exits))
        assert engine.cache.data.nbytes == plain * layers // 4, kind


def test_memory_beyond_plain_decoding_is_under_one_percent():
    """Tensors alive between steps, in mid-text: what drafting keeps, besides the heads. Within a step a pass is of the
    size that the scheduler has reserved room for."""
    engine = engine_with(hispec(EarlyExits()), model=tiny_lm(hidden_size=256, intermediate_size=512))
    used = {}
    for method in ("ar", "hispec"):
        for prompt in PROMPTS:
            engine.add(prompt, GenerationParams(method=method, max_new_tokens=40, temperature=1.0, seed=1))
        for _ in range(6):
            engine.step()
        gc.collect()
        tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
        tensors = [value for value in tensors if not isinstance(value, FakeTensor)]  # of functions compiled elsewhere
        used[method] = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
        for sequence in list(engine.scheduler.running):
            engine.cancel(sequence.request_id)
    assert used["hispec"] - used["ar"] < 0.01 * used["ar"]


# --- what a request may choose ------------------------------------------------------------------------------------

CHOICES = [
    {},
    {"draft_layer": 2},
    {"draft_layer": 2, "verify_layer": 4},
    {"verify_layer": 4, "window": 1},
    {"inner_draft_tokens": 5, "window": 9},
    {"draft_tokens": 0},
    {"draft_tokens": 2, "window": 3},
    {"draft_layer": 3, "inner_draft_tokens": 1, "window": 2},
]


@pytest.mark.parametrize("kind", ["norm", "block"])
def test_requests_of_one_batch_choose_their_own_layers_and_sizes(kind):
    """Each text, sampled with a seed, must be what it is alone; fails if one request's choice reaches another."""
    exits = random_exits(kind, (1, 2, 3, 4))
    params = [GenerationParams(max_new_tokens=12, temperature=1.0, seed=index, **c) for index, c in enumerate(CHOICES)]
    prompts = [PROMPTS[index % 2] for index in range(len(CHOICES))]
    engine = engine_with(hispec(exits))
    together = engine.generate(prompts, params)
    alone = [engine.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert [text.token_ids for text in together] == [text.token_ids for text in alone]
    assert together[5].stats.inner_passes == 0
    assert max(together[3].stats.inner_accepted_lengths, default=0) <= 2
    assert max(together[7].stats.inner_drafted_at) == 1 < max(together[0].stats.inner_drafted_at)
    greedy = engine.generate(prompts, [GenerationParams(max_new_tokens=12, **choice) for choice in CHOICES])
    plain = engine.generate(prompts, GenerationParams(method="ar", max_new_tokens=12))
    assert [text.token_ids for text in greedy] == [text.token_ids for text in plain]


def test_a_requests_window_and_proposals_have_the_size_it_asks_for():
    """Exits at the last layer accept everything, so sizes show: N_i tokens, a bonus by stage."""
    engine = engine_with(hispec(EarlyExits(), 4, 4))
    for choice, emitted in (({"window": 9}, 10), ({"inner_draft_tokens": 4, "window": 5}, 6), ({"draft_tokens": 3}, 4)):
        params = GenerationParams(max_new_tokens=200, **choice)
        (text,) = engine.generate([PROMPTS[0]], params)
        assert text.stats.accepted_lengths.most_common(1)[0][0] == emitted - 1, choice


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"draft_layer": 5}, r"draft_layer must be in \[1, 4\].*got 5"),
        ({"draft_layer": 2}, r"draft_layer must be a layer that the bundle has a head for \(1, 3\), got 2"),
        ({"verify_layer": 2}, r"verify_layer.*\(1, 3\), got 2"),
        ({"draft_layer": 3, "verify_layer": 1}, r"draft_layer must be at most verify_layer, got 3 above 1"),
        ({"window": 0}, r"window must be an integer of at least 1 or null, got 0"),
        ({"inner_draft_tokens": 0}, r"inner_draft_tokens.*at least 1.*got 0"),
        ({"draft_layer": True}, r"draft_layer.*got True"),
        ({"window": 10**9}, r"window must be at most 1024"),
    ],
    ids=str,
)
def test_a_choice_that_cannot_be_is_refused_when_the_request_comes(choice, message):
    engine = engine_with(hispec(random_exits("norm", (1, 3))))
    with pytest.raises(ValueError, match=message):
        engine.add(PROMPTS[0], GenerationParams(**choice))
    assert not engine.has_work


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hispec(EarlyExits(), 3, 2), "draft_layer must be at most verify_layer, got 3 above 2"),
        (lambda: hispec(random_exits("norm", (1, 2)), 1, 3), r"exit_layer.*head for \(1, 2\), got 3"),
        (lambda: EarlyExitDrafter(1, head=lambda rows: rows, exits=EarlyExits()), "head and exits"),
        (lambda: HierarchicalDrafter(EarlyExitDrafter(1), 2, inner_tokens=0), "inner_tokens must be at least 1"),
    ],
)
def test_drafters_that_cannot_work_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        engine_with(make())


# --- what comes out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "num_tokens", "window"), [("adapter", 1, 3), ("block", 3, 2)])
def test_sampled_texts_with_heads_have_the_models_law(kind, num_tokens, window):
    """Chi-square over all texts of three tokens, by passes without cache; a draft vocabulary of four of six tokens.

    p must exceed 1e-5: a false alarm with probability 2e-5 for both cases; the seeds are fixed.
    """
    shape = {"vocab_size": 6, "hidden_size": 16}
    heads = random_heads(kind, (1, 2), (0, 2, 3, 5), tiny_lm(fast=False, **shape))
    one = hispec(HeadExits(heads), 1, 2, num_tokens, window)
    engine = engine_with(one, model=tiny_lm(**shape), prefix_caching=False, max_num_seqs=64)
    prompt, runs, heat = [1, 4, 2], 1000, 0.3
    params = [GenerationParams(max_new_tokens=4, temperature=heat, seed=run) for run in range(runs)]
    results = engine.generate([prompt] * runs, params)
    law = {(): 1.0}
    for _ in range(3):
        rows = torch.softmax(next_logits(engine.model, [[*prompt, *text] for text in law]).double() / heat, -1)
        law = {
            (*text, token): chance * p
            for (text, chance), row in zip(law.items(), rows.tolist(), strict=True)
            for token, p in enumerate(row)
        }
    counts = Counter(tuple(result.token_ids[:3]) for result in results)
    common = [text for text, chance in law.items() if chance * runs >= 5]
    seen, wanted = [counts[text] for text in common], [law[text] * runs for text in common]
    seen, wanted = [*seen, runs - sum(seen)], [*wanted, runs - sum(wanted)]
    assert len(common) > 20 and scipy.stats.chisquare(seen, wanted).pvalue > 1e-5
    stats = SequenceStats.total(result.stats for result in results)
    assert rejected(stats) > 0 and 0 < stats.inner_accepted < stats.inner_drafted


def test_a_request_that_bans_the_draft_vocabulary_is_decoded_without_drafts_and_alone_in_that():
    bans = {token_id: -float("inf") for token_id in KEPT}
    for kind in ("norm", "block"):
        exits = random_exits(kind, (1, 3))
        for one in (hispec(exits), EarlyExitDrafter(1, exits=random_exits(kind, (1,)))):
            engine = engine_with(one)
            params = [GenerationParams(max_new_tokens=12, logit_bias=bans), GenerationParams(max_new_tokens=12)]
            banned, free = engine.generate([PROMPTS[0]] * 2, params)
            plain = engine.generate([PROMPTS[0]], GenerationParams(method="ar", max_new_tokens=12, logit_bias=bans))[0]
            assert banned.token_ids == plain.token_ids and banned.stats.drafted == 0 < free.stats.drafted


def test_nothing_is_drafted_behind_a_token_that_ends_the_text():
    """An exit at the last layer drafts what will be emitted: the windows must end with the text, in both stages."""
    for one in (hispec(EarlyExits(), 4, 4, 5, 7), hispec(EarlyExits(), 4, 4, 1, 9), EarlyExitDrafter(4, 9)):
        engine = engine_with(one)
        (plain,) = engine.generate([PROMPTS[0]], GenerationParams(method="ar", max_new_tokens=60))
        ends = [i for i, token in enumerate(plain.token_ids) if i > 3 and token not in plain.token_ids[:i]][:4]
        for end in ends:
            params = GenerationParams(max_new_tokens=60, stop_token_ids=(plain.token_ids[end],))
            (text,) = engine.generate([PROMPTS[0]], params)
            assert text.token_ids == plain.token_ids[: end + 1] and text.finish_reason == "stop"
            assert text.stats.drafted == text.stats.accepted, "a token behind the end was drafted"
            assert text.stats.emitted_tokens == len(text.token_ids)


@pytest.mark.parametrize("kind", ["norm", "block"])
def test_windows_that_end_early_leave_a_cache_that_the_text_can_go_on_from(kind):
    """The end token is only proposed, and sampling may reject it: the text goes on from a window that was cut."""
    exits = random_exits(kind, (1, 3), None)
    engine, stops = engine_with(hispec(exits, 1, 3, 3, 6)), tuple(range(0, 96, 5))
    params = [GenerationParams(max_new_tokens=30, temperature=1.5, seed=s, stop_token_ids=stops) for s in range(12)]
    together = engine.generate([PROMPTS[1]] * 12, params)
    assert all(t.finish_reason == "length" or t.token_ids[-1] in stops for t in together)
    assert all(token not in stops for text in together for token in text.token_ids[:-1])
    again = [engine.generate([PROMPTS[1]], one)[0].token_ids for one in params]
    assert [text.token_ids for text in together] == again


def test_exits_at_the_last_layer_accept_everything_to_the_end_of_long_texts():
    """MAT is exactly k + 1 over every verification: acceptance that sinks along a text shows a cache going wrong."""
    for one, k in ((EarlyExitDrafter(4, 4), 4), (hispec(EarlyExits(), 4, 4, 3, 4), 4)):
        (text,) = engine_with(one).generate([PROMPTS[0]], GenerationParams(max_new_tokens=1 + 80 * (k + 1)))
        assert text.stats.acceptance_rate == 1.0 and text.stats.accepted_lengths == {k: 80}
        assert text.stats.emitted_tokens - 1 == (k + 1) * (text.stats.target_passes - 1)
        if one.name == "hispec":
            assert text.stats.inner_acceptance_rate == 1.0
            assert text.stats.inner_emitted == text.stats.drafted


def test_work_is_counted_by_stage_so_that_it_adds_up():
    """With everything accepted the accounting is known: a window of 4 is one round of 3 drafts and a bonus."""
    engine = engine_with(hispec(EarlyExits(), 4, 4, 3, 4))
    engine.generate([PROMPTS[0]], GenerationParams(max_new_tokens=1 + 5 * 10))
    stats = engine.stats
    assert stats.prefill_layer_tokens == 4 * (len(PROMPTS[0]) - 1)
    assert stats.draft_layer_tokens == 4 * 3 * 10  # root and two drafts
    assert stats.intermediate_layer_tokens == 4 * 1 * 10  # the third draft
    assert stats.full_layer_tokens == 4 * (1 + 10)  # the prompt's last token; the window's last token
    assert stats.head_tokens == (3 + 4) * 10
    assert stats.layer_passes == 4 + 10 * (3 * 4 + 4 + 4)  # the prompt; per step 3 drafts, the third, the last token


# --- the commands -------------------------------------------------------------------------------------------------


def save_bundle(checkpoint: Path, folder: Path, kind: str = "block", layers: tuple[int, ...] = (1, 3)) -> Path:
    slow = tiny_lm(fast=False, dtype=torch.float32)
    heads = random_heads(kind, layers, KEPT, slow)
    heads.to_bundle(fingerprint_checkpoint(checkpoint), "tiny").save(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def bundle(checkpoint, tmp_path_factory) -> Path:
    return save_bundle(checkpoint, tmp_path_factory.mktemp("bundles") / "heads")


def options(checkpoint: Path, bundle: Path | None = None, **more) -> EngineOptions:
    return EngineOptions(model=str(checkpoint), bundle=None if bundle is None else str(bundle), kv_memory=0.01, **more)


def test_what_a_bundle_was_worth_in_its_trial_is_known_to_who_chooses_drafters(checkpoint, bundle, tmp_path):
    """Chains of two that are accepted with 0.3 each emit 1.39 tokens a pass; a trial told in another way is refused."""
    written = HeadBundle.load(bundle)
    for name, trial in {"told": {"exits": {"1": {"mat": 1.39}, "3": {"mat": 1.0}}}, "wrong": {"exits": [3]}}.items():
        replace(written, card={"trial": trial}).save(tmp_path / name)
    engine = build_engine(prepare(options(checkpoint, tmp_path / "told"), ["auto"]))
    (exits,) = engine.exits
    assert exits.acceptance == pytest.approx({1: 0.3, 3: 0.0})
    assert [arm.acceptance.accepted(1)[1] for arm in engine.drafters["auto"].arms] == pytest.approx([0.3, 0.0])
    assert build_engine(prepare(options(checkpoint, bundle), ["auto"])).exits[0].acceptance == {}
    with pytest.raises(ValueError, match="card must tell of its trial"):
        prepare(options(checkpoint, tmp_path / "wrong"), ["auto"])
    for mat, found in ((9.0, None), (0.5, None), (0.0, {}), (1.39, {1: 0.3})):  # 0: nothing was drafted
        told = replace(written, card={"trial": {"exits": {"1": {"mat": mat}}}})
        if found is not None:
            assert tried_acceptance(told) == pytest.approx(found)
            continue
        with pytest.raises(ValueError, match="trials of two drafts, mat 1 to 3; exit 1 has"):
            tried_acceptance(told)
    assert tried_acceptance(replace(written, card={"trial": None})) == {}


def run_command(capsys, *arguments) -> tuple[int, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.err if code else captured.out


def test_a_jsonl_batch_runs_with_a_bundle_and_its_rows_choose_methods_and_layers(checkpoint, bundle, tmp_path, capsys):
    rows = [
        {"id": "default", "prompt": "abab"},
        {"id": "plain", "prompt": "abab", "method": "ar"},
        {"id": "early", "prompt": "abab", "method": "early-exit", "draft_layer": 3, "draft_tokens": 3},
        {"id": "lookup", "prompt": "abab", "method": "hispec+prompt-lookup", "window": 2},
        {"id": "last-logit", "prompt": "abab", "method": "hispec+logitspec", "verify_layer": 1},
        {"id": "own", "prompt": "abab", "window": 6, "inner_draft_tokens": 3, "verify_layer": 3, "draft_layer": 3},
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["generate", "--model", checkpoint, "--bundle", bundle, "--method", "hispec", "--input", source]
    command += ["--output", output, "--max-new-tokens", 12, "--no-chat", "--kv-memory", "0.01"]
    assert run_command(capsys, *command)[0] == 0
    results = {row["id"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert results.keys() == {row["id"] for row in rows}
    assert len({tuple(row["token_ids"]) for row in results.values()}) == 1
    assert results["default"]["stats"]["inner_drafted"] > 0 == results["early"]["stats"]["inner_drafted"]
    assert results["early"]["stats"]["drafted"] > 0
    code, message = run_command(capsys, *command, "--hispec.window", 5)
    assert code == 2 and "hispec.window" in message


@pytest.mark.parametrize("method", ["early-exit", "hispec", "hispec+logitspec", "hispec+prompt-lookup"])
def test_verify_passes_with_a_bundle_and_without(method, checkpoint, bundle, capsys):
    command = ["verify", "--model", checkpoint, "--method", method, "--samples", 40, "--max-new-tokens", 6]
    command += ["--temperature", 0.3, "--no-chat", "--kv-memory", 0.02]
    for more in ([], ["--bundle", bundle]) if method == "hispec" else (["--bundle", bundle],):
        code, printed = run_command(capsys, *command, *more)
        assert code == 0, printed
        assert "all checks passed" in printed


def test_bench_reports_layer_tokens_and_both_stages(checkpoint, bundle, tmp_path, capsys):
    data = tmp_path / "questions.jsonl"
    row = {"question_id": 1, "category": "qa", "turns": ["abab"]}
    data.write_text(json.dumps(row) + "\n")
    command = ["bench", "--model", checkpoint, "--bundle", bundle, "--data", data, "--output", tmp_path / "report"]
    command += ["--methods", "early-exit,hispec", "--max-new-tokens", 10, "--no-chat", "--kv-memory", 0.01]
    assert run_command(capsys, *command)[0] == 0
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    figures = {method: groups["all"] for method, groups in report["summary"].items()}
    assert figures["ar"]["layer_tokens_per_token"] == 4.0 and figures["ar"]["head_tokens_per_token"] == 0.0
    assert figures["hispec"]["layer_tokens_per_token"] > 0 < figures["hispec"]["head_tokens_per_token"]
    assert figures["hispec"]["inner_acceptance_rate"] is not None
    assert figures["early-exit"]["inner_acceptance_rate"] is None
    table = (tmp_path / "report" / "report.md").read_text()
    assert "layer-tokens" in table and "inner acceptance" in table


def test_unset_layers_are_the_bundles_lowest_and_highest_or_an_eighth_and_a_quarter(checkpoint, bundle, tmp_path):
    wide = save_bundle(checkpoint, tmp_path / "wide", "norm", (2, 3, 4))
    for folder, expected in ((None, (1, 1, 2)), (bundle, (1, 1, 3)), (wide, (2, 2, 4))):
        engine = build_engine(prepare(options(checkpoint, folder), ["early-exit", "hispec"]))
        early, window = engine.drafters["early-exit"], engine.drafters["hispec"]
        assert (early.exit_layer, window.inner.exit_layer, window.exit_layer) == expected
        assert (early.num_tokens, window.inner_tokens, window.window) == (2, 2, 4)
        assert early.exit is window.exit is window.inner.exit, "one set of heads for all drafters"
        assert len(engine.exits) == 1
    chosen = {"draft_layer": 3, "verify_layer": 4, "draft_tokens": 5, "window": 6}
    deep = options(checkpoint, wide, hispec=HiSpecOptions(**chosen), early_exit=EarlyExitOptions(layer=3, num_tokens=7))
    engine = build_engine(prepare(deep, ["early-exit", "hispec"]))
    early, window = engine.drafters["early-exit"], engine.drafters["hispec"]
    assert (window.inner.exit_layer, window.exit_layer, window.inner_tokens, window.window) == (3, 4, 5, 6)
    assert (early.exit_layer, early.num_tokens) == (3, 7)


def test_option_defaults_are_those_of_the_drafters():
    early, window = EarlyExitDrafter(1), HierarchicalDrafter(EarlyExitDrafter(1), 2)
    assert [item.name for item in fields(EarlyExitOptions)] == ["layer", "num_tokens"]
    assert EarlyExitOptions().num_tokens == early.num_tokens
    assert (HiSpecOptions().draft_tokens, HiSpecOptions().window) == (window.inner_tokens, window.window)


@pytest.fixture
def no_weights(monkeypatch):
    """Loading weights is a failure."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("speclight.infer.loading.load_transformers", refuse)


REFUSALS = [
    (
        ["--hispec.draft-layer", "2"],
        r"hispec.draft_layer must be a layer that the bundle has a head for \(1, 3\), got 2",
    ),
    (["--hispec.verify-layer", "9"], r"hispec.verify_layer must be in \[1, 4\].*got 9"),
    (["--early-exit.layer", "0"], r"early_exit.layer must be in \[1, 4\].*got 0"),
    (["--hispec.draft-layer", "3", "--hispec.verify-layer", "1"], r"draft_layer must be at most verify_layer"),
    (["--hispec.window", "0"], r"hispec.window must be from 1 to 1024, got 0"),
    (["--hispec.draft-tokens", "0"], r"hispec.draft_tokens must be from 1"),
    (["--early-exit.num-tokens", "0"], r"early_exit.num_tokens must be from 1"),
    (["--draft-layer", "2"], r"--prompt: draft_layer.*\(1, 3\), got 2"),
    (["--method", "logitspec"], r"bundle is read by early-exit, hispec.*method is logitspec"),
]


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(("flags", "message"), REFUSALS, ids=lambda value: str(value)[:40])
def test_options_that_cannot_be_are_refused_in_one_line_before_weights(flags, message, checkpoint, bundle, capsys):
    import re

    command = ["generate", "--model", checkpoint, "--bundle", bundle, "--method", "hispec", "--prompt", "ab", *flags]
    code, printed = run_command(capsys, *command)
    assert code == 2 and printed.count("\n") == 1
    assert re.search(message, printed), printed


@pytest.mark.usefixtures("no_weights")
def test_a_rows_layer_without_a_head_is_refused_with_the_row(checkpoint, bundle, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "ab"}\n{"prompt": "ab", "method": "hispec", "verify_layer": 2}\n')
    command = ["generate", "--model", checkpoint, "--bundle", bundle, "--input", source]
    code, printed = run_command(capsys, *command, "--output", tmp_path / "out.jsonl")
    assert code == 2 and "in.jsonl:2: verify_layer must be a layer that the bundle has a head for (1, 3)" in printed


@pytest.mark.usefixtures("no_weights")
def test_a_bundle_of_another_model_or_a_damaged_one_is_refused_before_weights(checkpoint, bundle, tmp_path, capsys):
    other = save_tiny(tmp_path / "other", seed=5)
    capsys.readouterr()
    command = ["generate", "--prompt", "ab", "--method", "hispec"]
    code, printed = run_command(capsys, *command, "--model", other, "--bundle", bundle)
    assert code == 2 and printed.count("\n") == 1
    assert fingerprint_checkpoint(checkpoint) in printed and fingerprint_checkpoint(other) in printed
    damaged = save_bundle(checkpoint, tmp_path / "damaged")
    content = bytearray((damaged / "weights.safetensors").read_bytes())
    content[-1] ^= 1
    (damaged / "weights.safetensors").write_bytes(content)
    code, printed = run_command(capsys, *command, "--model", checkpoint, "--bundle", damaged)
    assert code == 2 and "damaged" in printed and "weights.safetensors" in printed
    code, printed = run_command(capsys, *command, "--model", checkpoint, "--bundle", tmp_path / "nowhere")
    assert code == 2 and "nowhere" in printed and "bundle.json" in printed
    HeadBundle("ensemble-head", {}, {}, "0" * 64).save(tmp_path / "ensemble")
    code, printed = run_command(capsys, *command, "--model", checkpoint, "--bundle", tmp_path / "ensemble")
    assert code == 2 and "'ensemble-head'" in printed and "'exit-heads'" in printed


def test_pickled_weights_are_compared_with_the_bundle_once_they_are_there(checkpoint, bundle, tmp_path):
    folders = {}
    for name, seed in (("same", 0), ("other", 5)):
        folder = folders[name] = save_tiny(tmp_path / name, seed=seed)
        from safetensors.torch import load_file

        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    prepared = prepare(options(folders["same"], bundle, allow_pickle=True), ["hispec"])
    assert not prepared.base_known
    engine = build_engine(prepared)
    assert isinstance(engine.drafters["hispec"].exit, HeadExits)
    with pytest.raises(ValueError, match=r"belongs to another base model: it was made for \w{64} \(tiny\).*is \w{64}"):
        build_engine(prepare(options(folders["other"], bundle, allow_pickle=True), ["hispec"]))


def test_a_hub_ids_fingerprint_is_that_of_its_snapshot(checkpoint, monkeypatch):
    asked = []

    def snapshot(repository: str, allow_patterns: list[str]) -> str:
        asked.append((repository, allow_patterns))
        return str(checkpoint)

    monkeypatch.setattr("speclight.infer.bundles.snapshot_download", snapshot)
    source = resolve_model(str(checkpoint))
    hub = type(source)("owner/name", "owner/name")
    assert base_fingerprint(hub) == base_fingerprint(source) == fingerprint_checkpoint(checkpoint)
    assert asked[0][0] == "owner/name" and "model.safetensors" in asked[0][1]


def test_a_bundle_in_use_gives_the_logits_of_the_heads_it_was_made_from(checkpoint, bundle):
    """Through the folder, the loader, packing and the engine: the same drafts as from the heads in memory."""
    loaded = build_engine(prepare(options(checkpoint, bundle), ["hispec"]))
    slow = tiny_lm(fast=False, dtype=torch.float32)
    own = engine_with(hispec(HeadExits(random_heads("block", (1, 3), KEPT, slow))), model=tiny_lm(dtype=torch.float32))
    params = GenerationParams(max_new_tokens=12)
    for prompt in PROMPTS[:2]:
        texts = [engine.generate([prompt], params)[0] for engine in (loaded, own)]
        assert texts[0].token_ids == texts[1].token_ids
        assert texts[0].stats.inner_accepted == texts[1].stats.inner_accepted
    assert isinstance(loaded.drafters["hispec"].exit.heads, ExitHeads)


@pytest.mark.parametrize("of_engine", [False, True])
def test_texts_that_are_not_drafted_for_are_not_shown_to_heads(of_engine):
    engine = engine_with(
        EarlyExitDrafter(1, exits=random_exits("block", (1, 3))), draft_tokens=0 if of_engine else None
    )
    params = GenerationParams(method="early-exit", max_new_tokens=20, draft_tokens=None if of_engine else 0)
    (done,) = engine.generate([PROMPTS[0]], params)
    assert len(done.token_ids) == 20 and engine.stats.head_tokens == 0 and done.stats.drafted == 0
