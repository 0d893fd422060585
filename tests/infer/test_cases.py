"""Faults that users report of systems like this one, each as a scenario that must come out right (engine level)."""

from __future__ import annotations

from itertools import pairwise, zip_longest

import pytest
import scipy.stats
import torch
from speclight.infer.draft_model import DraftModelDrafter
from speclight.infer.drafter import Drafter
from speclight.infer.engine import Engine
from speclight.infer.logitspec import LogitSpecDrafter
from speclight.infer.prompt_lookup import PromptLookupDrafter
from speclight.infer.request import GenerationParams
from speclight.modules.batch import BatchItem, RaggedBatch
from speclight.modules.token_tree import TokenTree
from support import TableLM, random_table, tiny_lm

METHODS = ["ar", "prompt-lookup", "logitspec", "draft-model", "script"]


class ScriptDrafter(Drafter):
    """Proposes `script(sequence)` as a chain without distributions."""

    name = "script"

    def __init__(self, script=None, length: int = 4) -> None:
        self.script, self.length = script or (lambda sequence: []), length

    def default_draft_tokens(self) -> int:
        return self.length

    def propose(self, sequences):
        return [TokenTree.chain([s.token_ids[-1], *self.script(s)[: s.max_depth]]) for s in sequences]


def engine_with(model=None, script=None, draft=None, **options) -> Engine:
    model = model or tiny_lm()
    drafters = [
        PromptLookupDrafter(num_tokens=4),
        LogitSpecDrafter(k=8, capacity=12, retrieved=5),
        DraftModelDrafter(draft or tiny_lm(seed=1), num_tokens=4),
        ScriptDrafter(script),
    ]
    return Engine(model, drafters=drafters, strict=True, **({"num_blocks": 200} | options))


def ids_of(engine: Engine, prompts, **params) -> list[list[int]]:
    return [result.token_ids for result in engine.generate(prompts, GenerationParams(**params))]


def known_text(prompt: list[int], count: int = 80) -> list[int]:
    return ids_of(engine_with(), [prompt], max_new_tokens=count)[0]


def follow(text: list[int]):
    """A script that proposes the known text."""
    return lambda sequence: text[sequence.num_emitted : sequence.num_emitted + 4]


PROMPT = [5, 9, 3, 5, 9, 3, 5, 9]


def test_at_temperature_zero_a_close_second_is_never_accepted():
    """A soft p/q ratio would accept the draft's 2 with probability 0.905."""
    target, draft = torch.zeros(8, 4, dtype=torch.float64), torch.zeros(8, 4, dtype=torch.float64)
    target[:, :] = torch.tensor([0.0, 2.0, 1.9, 0.0])
    draft[:, :] = torch.tensor([0.0, 1.9, 2.0, 0.0])
    pad = torch.full((8, 4), -50.0, dtype=torch.float64)
    engine = engine_with(TableLM(torch.cat((target, pad), 1)), draft=TableLM(torch.cat((draft, pad), 1)))
    params = [GenerationParams(method="draft-model", max_new_tokens=2, seed=seed) for seed in range(2000)]
    results = engine.generate([[7]] * 2000, params)
    assert all(result.token_ids == [1, 1] for result in results)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_follows_an_end_of_sequence_inside_an_accepted_block(method):
    text = known_text(PROMPT)
    first = next(i for i, token in enumerate(text) if i >= 2 and token not in text[:i])
    stop = text[first]
    engine = engine_with(script=follow(text))
    others = [[1], [2, 2, 7]]
    alone = ids_of(engine_with(), others, max_new_tokens=20)
    params = [GenerationParams(method=method, max_new_tokens=40, stop_token_ids=(stop,), logprobs=1)]
    params += [GenerationParams(method="ar", max_new_tokens=20)] * 2
    ended, *neighbours = engine.generate([PROMPT, *others], params)
    assert ended.token_ids == text[: first + 1] and ended.finish_reason == "stop"
    assert len(ended.logprobs) == len(ended.origins) == ended.stats.emitted_tokens == first + 1
    assert [n.token_ids for n in neighbours] == alone
    assert engine.cache.allocator.num_in_use == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cap", [0, 1, 2, 3, 7])
def test_the_length_cap_is_met_exactly_and_nothing_is_cached_past_it(method, cap):
    text = known_text(PROMPT)
    engine = engine_with(script=follow(text), block_size=1)
    engine.add(PROMPT, GenerationParams(method=method, max_new_tokens=cap, draft_tokens=8))
    chunks = []
    while engine.has_work:
        chunks += engine.step()
        for sequence in engine.scheduler.running:
            assert sequence.table.length < len(PROMPT) + cap
    (result,) = [chunk.completion for chunk in chunks if chunk.completion]
    assert result.token_ids == text[:cap] and result.finish_reason == "length"


@pytest.mark.parametrize("method", METHODS)
def test_a_banned_token_is_never_emitted(method):
    engine = engine_with(script=lambda s: [5, 5, 5, 5])
    params = [
        GenerationParams(method=method, temperature=1.0, logit_bias={5: -float("inf")}, max_new_tokens=20, seed=seed)
        for seed in range(60)
    ]
    assert all(5 not in result.token_ids for result in engine.generate([PROMPT] * 60, params))


@pytest.mark.parametrize("method", METHODS)
def test_a_processor_sees_the_prefixes_of_plain_decoding_in_order_once_each(method):
    text = known_text(PROMPT)
    seen: list[list[int]] = []

    def record(input_ids, scores):
        seen.append(input_ids[0].tolist())
        return scores

    engine = engine_with(script=follow([*text[:3], 0, *text[4:]]))
    (result,) = engine.generate(
        [PROMPT], GenerationParams(method=method, max_new_tokens=20, logits_processors=(record,))
    )
    whole = PROMPT + result.token_ids
    assert result.token_ids == text[:20]
    assert seen == [whole[:end] for end in range(len(PROMPT), len(whole))]


@pytest.mark.parametrize("method", METHODS)
def test_penalties_count_committed_tokens_only(method):
    """Rejected drafts must not be penalised: the draft repeats 3, which the target turns down."""
    params = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "max_new_tokens": 64}
    batch = [PROMPT, [4, 4], [60, 1, 2]]
    plain = ids_of(engine_with(), batch, **params)
    engine = engine_with(script=lambda s: [3, 3, 3, 3])
    assert ids_of(engine, batch, method=method, **params) == plain
    assert ids_of(engine, batch[:1], method=method, **params) == plain[:1]


@pytest.mark.parametrize("method", METHODS)
def test_every_emitted_token_has_the_targets_logprob(method):
    """log_softmax of one full pass over the final text, whether the token was accepted, corrected or a bonus."""
    text = known_text(PROMPT)
    engine = engine_with(script=follow([*text[:3], 0, *text[4:]]))
    batch = [PROMPT, [8], [1, 2, 3, 1, 2]]
    for result in engine.generate(batch, GenerationParams(method=method, max_new_tokens=40, logprobs=3)):
        ids = [*result.prompt_ids, *result.token_ids]
        with torch.no_grad():
            logits = engine.model(RaggedBatch.build([BatchItem(ids)], None))
        values = torch.log_softmax(logits, -1)[len(result.prompt_ids) - 1 : -1]
        assert len(result.logprobs) == len(result.token_ids) == 40
        for row, token_id, got in zip(values, result.token_ids, result.logprobs, strict=True):
            assert got.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            best = row.topk(3)
            assert list(got.top) == best.indices.tolist()
            assert list(got.top.values()) == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_fixes_a_text_whatever_runs_beside_it(method):
    def run(engine, count, place):
        params = [GenerationParams(method=method, temperature=1.0, max_new_tokens=24, seed=i) for i in range(count)]
        params[place] = GenerationParams(method=method, temperature=1.0, max_new_tokens=24, seed=42)
        return engine.generate([PROMPT, *[[i, 3, 2] for i in range(count)]][:count][::-1], params[::-1])[-1 - place]

    alone = engine_with().generate(
        [PROMPT], GenerationParams(method=method, temperature=1.0, max_new_tokens=24, seed=42)
    )[0]
    engine = engine_with()
    others = [GenerationParams(method=method, temperature=1.0, max_new_tokens=24, seed=i) for i in range(7)]
    others[3] = GenerationParams(method=method, temperature=1.0, max_new_tokens=24, seed=42)
    mixed = engine.generate([[i, 3, 2] for i in range(3)] + [PROMPT] + [[7], [8], [9]], others)[3]
    engine.add([1, 2, 3], GenerationParams(method=method, max_new_tokens=50, temperature=1.0))
    for _ in range(5):
        engine.step()
    late = engine.generate([PROMPT], GenerationParams(method=method, temperature=1.0, max_new_tokens=24, seed=42))[0]
    assert alone.token_ids == mixed.token_ids == late.token_ids
    unseeded = engine.generate([PROMPT] * 2, GenerationParams(method=method, temperature=1.0, max_new_tokens=64))
    assert unseeded[0].token_ids != unseeded[1].token_ids


@pytest.mark.parametrize("method", ["draft-model", "script"])
def test_a_seeded_text_survives_preemption(method):
    """A small pool changes who runs when, never what a seeded text says."""
    prompts = [[(7 * i + j) % 96 for j in range(9)] for i in range(6)]
    params = [GenerationParams(method=method, temperature=1.0, max_new_tokens=30, seed=i) for i in range(6)]
    roomy = engine_with(block_size=1).generate(prompts, params)
    tight = engine_with(block_size=1, num_blocks=64).generate(prompts, params)
    assert sum(result.stats.preemptions for result in tight) > 0
    assert [r.token_ids for r in tight] == [r.token_ids for r in roomy]


@pytest.mark.parametrize("num_blocks", [10, 11, 12, 14])
@pytest.mark.parametrize("max_batch_tokens", [1, 2, 5])
def test_a_young_text_gives_way_to_an_older_prompt_that_is_still_being_read(num_blocks, max_batch_tokens):
    """The younger decodes while the older is read in chunks: nobody is younger, and it is not alone."""
    sizes = {"block_size": 2, "num_blocks": num_blocks, "max_batch_tokens": max_batch_tokens}
    prompts = [[5] * 17, [7], [3, 4]]
    for method in ("ar", "logitspec", "draft-model"):
        params = GenerationParams(method=method, max_new_tokens=12, temperature=1.0, seed=5)
        engine = engine_with(**sizes)
        together = [one.token_ids for one in engine.generate(prompts, params)]
        engine.check_invariants()
        assert together == [engine_with(**sizes).generate([prompt], params)[0].token_ids for prompt in prompts]


def test_ragged_acceptance_in_a_batch_equals_single_runs():
    """Draft perfect for the first, useless for the second, half right for the third."""
    prompts = [[7], [1, 2, 3, 4, 5], [(3 * i) % 96 for i in range(17)]]
    texts = [known_text(prompt) for prompt in prompts]

    def script(sequence):
        which = next(i for i, p in enumerate(prompts) if p == sequence.token_ids[: sequence.num_prompt])
        ahead = texts[which][sequence.num_emitted : sequence.num_emitted + 4]
        return [ahead, [(t + 1) % 96 for t in ahead], [*ahead[:2], *((t + 1) % 96 for t in ahead[2:])]][which]

    engine = engine_with(script=script, block_size=4)
    for prompt in prompts:
        engine.add(prompt, GenerationParams(method="script", max_new_tokens=40))
    results = {}
    while engine.has_work:
        for chunk in engine.step():
            if chunk.completion:
                results[len(chunk.completion.prompt_ids)] = chunk.completion
        for sequence in engine.scheduler.running:
            assert sequence.table.length == len(sequence.token_ids) - 1
    ends = [results[len(prompt)] for prompt in prompts]
    assert [end.token_ids for end in ends] == [text[:40] for text in texts]
    assert ends[0].stats.mat == pytest.approx(5.0, abs=0.6) and ends[1].stats.mat == 1.0
    assert ends[2].stats.mat == pytest.approx(3.0, abs=0.4)


def test_a_draft_equal_to_the_target_is_accepted_to_the_end():
    """A draft cache rewound one short or one long keeps the text right and loses acceptance over time."""
    engine = engine_with(draft=tiny_lm(max_position_embeddings=1024), model=tiny_lm(max_position_embeddings=1024))
    engine.add(PROMPT, GenerationParams(method="draft-model", draft_tokens=4, max_new_tokens=501))
    emitted = []
    while engine.has_work:
        emitted += [len(chunk.token_ids) for chunk in engine.step()]
    assert emitted[0] == 1 and set(emitted[1:]) == {5}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_prompts_shorter_than_the_ngram_work(method, length):
    drafters = [
        PromptLookupDrafter(num_tokens=3, max_ngram=5),
        LogitSpecDrafter(k=40, capacity=8, max_ngram=5),
        DraftModelDrafter(tiny_lm(seed=1)),
        ScriptDrafter(),
    ]
    engine = Engine(tiny_lm(), drafters=drafters, num_blocks=50, strict=True)
    prompt = [[6], [6, 6], [6, 1, 6]][length - 1]
    assert ids_of(engine, [prompt], method=method, max_new_tokens=30) == [known_text(prompt)[:30]]


def test_an_empty_prompt_is_refused_clearly():
    with pytest.raises(ValueError, match="at least one token"):
        engine_with().add([])


@pytest.mark.parametrize("method", METHODS)
def test_the_context_limit_ends_a_text_exactly(method):
    engine = engine_with(tiny_lm(max_position_embeddings=32), draft=tiny_lm(seed=1, max_position_embeddings=32))
    prompt = list(range(30))
    (result,) = engine.generate([prompt], GenerationParams(method=method, draft_tokens=5, max_new_tokens=99))
    assert len(result.token_ids) == 2 and result.finish_reason == "length"


def test_a_draft_with_a_shorter_context_stops_drafting_and_the_text_goes_on():
    model, draft = tiny_lm(max_position_embeddings=64), tiny_lm(max_position_embeddings=16)
    prompt = list(range(10))
    plain = ids_of(engine_with(model), [prompt], max_new_tokens=99)
    (result,) = engine_with(model, draft=draft).generate(
        [prompt], GenerationParams(method="draft-model", max_new_tokens=99)
    )
    assert [result.token_ids] == plain and len(result.token_ids) == 54
    assert 0 < result.stats.drafted < 16 and result.stats.steps_without_draft > 30


def test_a_mixed_batch_of_extreme_settings_is_right_per_row():
    """T = 0, 1e-6, None and 0.8 with odd filters side by side. Chi-square fails a right engine once in 10 000."""
    table = random_table(6, seed=2)
    engine = engine_with(TableLM(table), draft=TableLM(random_table(6, seed=4)))
    settings = [
        {"temperature": 0.0, "top_k": -1, "top_p": 1.0},
        {"temperature": 1e-6, "top_k": 1, "top_p": 1.0},
        {"temperature": None, "top_k": 5, "top_p": 0.0},
        {"temperature": 0.8, "top_k": 16, "top_p": 0.5},
    ]
    runs, counts = 1500, torch.zeros(6)
    params = [
        GenerationParams(method="draft-model", max_new_tokens=2, seed=run, **one)
        for run in range(runs)
        for one in settings
    ]
    results = engine.generate([[3]] * len(params), params)
    best = int(table[3].argmax())
    for index, result in enumerate(results):
        if index % 4 < 3:
            assert result.token_ids == [best, int(table[best].argmax())]
        else:
            counts[result.token_ids[1]] += result.token_ids[0] == best
    law = torch.softmax(table[best] / 0.8, -1)
    order = law.argsort(descending=True)
    keep = order[: int((law[order].cumsum(0) < 0.5).sum()) + 1]
    law = law[keep] / law[keep].sum()
    assert counts.sum() == counts[keep].sum()
    if len(keep) > 1:
        assert scipy.stats.chisquare(counts[keep].tolist(), (law * counts.sum()).tolist()).pvalue > 1e-4


def test_a_drafter_that_raises_costs_its_draft_not_the_request():
    def broken(sequence):
        if sequence.num_emitted % 3 == 0:
            raise RuntimeError("boom")
        return [1, 2, 3]

    engine = Engine(tiny_lm(), drafters=[ScriptDrafter(broken)], num_blocks=50)
    (result,) = engine.generate([PROMPT], GenerationParams(method="script", max_new_tokens=30))
    assert result.token_ids == known_text(PROMPT)[:30]
    assert result.stats.draft_failures > 0


@pytest.mark.parametrize("hook", ["scheduled", "timed", "release"])
def test_a_hook_that_raises_is_reported_once_and_costs_nothing(hook, caplog):
    one = ScriptDrafter(follow(known_text(PROMPT)))
    setattr(one, hook, lambda *news: 1 / 0)
    engine = Engine(tiny_lm(), drafters=[one], num_blocks=50)
    for _ in range(2):
        (result,) = engine.generate([PROMPT], GenerationParams(method="script", max_new_tokens=30))
        assert result.token_ids == known_text(PROMPT)[:30] and result.stats.accepted > 20
    assert caplog.text.count(f"drafter script failed in {hook}()") == 1
    engine.check_invariants()


@pytest.mark.parametrize("bad", [[5000, 1], [-1]], ids=["out of vocabulary", "negative"])
def test_an_invalid_proposal_counts_as_a_failed_draft(bad):
    engine = Engine(tiny_lm(), drafters=[ScriptDrafter(lambda s: bad)], num_blocks=50)
    (result,) = engine.generate([PROMPT], GenerationParams(method="script", max_new_tokens=10))
    assert result.token_ids == known_text(PROMPT)[:10] and result.stats.draft_failures == result.stats.draft_calls > 0


@pytest.mark.parametrize("params", [{"method": "ar"}, {"method": "script", "draft_tokens": 0}])
def test_off_means_no_draft_call_at_all(params):
    """By name, by a size of nothing, of the request or of the engine."""

    def must_not_run(sequence):
        raise AssertionError("drafted although off")

    engine = engine_with(script=must_not_run)
    (result,) = engine.generate([PROMPT], GenerationParams(max_new_tokens=10, **params))
    assert result.stats.draft_calls == 0 and result.stats.drafted == 0 and result.stats.mat == 1.0


@pytest.mark.parametrize("method", METHODS)
def test_a_used_engine_emits_what_a_fresh_one_emits(method):
    used = engine_with()
    used.generate([PROMPT, [1, 2]], GenerationParams(method=method, max_new_tokens=30))
    fresh = engine_with()
    params = GenerationParams(method=method, max_new_tokens=30)
    assert ids_of(used, [[4, 4, 4]], method=method, max_new_tokens=30) == ids_of(
        fresh, [[4, 4, 4]], method=method, max_new_tokens=30
    )
    used.reset()
    for engine in (used, fresh):
        engine.reset()
    a, b = used.generate([PROMPT], params)[0], fresh.generate([PROMPT], params)[0]
    assert a.token_ids == b.token_ids
    assert (a.stats.drafted, a.stats.accepted, a.stats.cached_tokens) == (
        b.stats.drafted,
        b.stats.accepted,
        b.stats.cached_tokens,
    )


def test_prefix_caching_reuses_a_finished_chat_and_changes_nothing():
    engine = engine_with(block_size=4)
    (first,) = engine.generate([PROMPT], GenerationParams(max_new_tokens=20))
    follow_up = [*PROMPT, *first.token_ids, 8, 8]
    (second,) = engine.generate([follow_up], GenerationParams(max_new_tokens=20))
    assert second.stats.cached_tokens == 24
    assert second.token_ids == ids_of(engine_with(prefix_caching=False), [follow_up], max_new_tokens=20)[0]
    (other,) = engine.generate([follow_up], GenerationParams(max_new_tokens=20, namespace="another tenant"))
    assert other.stats.cached_tokens == 0 and other.token_ids == second.token_ids


def test_cancelling_returns_the_blocks_at_once():
    engine = engine_with()
    keep = engine.add(PROMPT, GenerationParams(max_new_tokens=30))
    gone = engine.add([1, 2, 3], GenerationParams(max_new_tokens=300, n=3))
    for _ in range(4):
        engine.step()
    ended = engine.cancel(gone)
    assert [end.finish_reason for end in ended] == ["cancelled"] * 3 and all(end.token_ids for end in ended)
    engine.check_invariants()
    rest = [
        chunk.completion for _ in iter(lambda: engine.has_work, False) for chunk in engine.step() if chunk.completion
    ]
    assert [end.request_id for end in rest] == [keep] and rest[0].token_ids == known_text(PROMPT)[:30]
    assert engine.cache.allocator.num_in_use == 0 and engine.cancel("unknown") == []


def test_closing_a_stream_cancels_it_and_spares_the_others():
    engine = engine_with()
    other = engine.add([4, 2], GenerationParams(max_new_tokens=10))
    stream = engine.stream([PROMPT], GenerationParams(max_new_tokens=100))
    next(stream)
    stream.close()
    chunks = []
    while engine.has_work:
        chunks += engine.step()
    assert {chunk.request_id for chunk in chunks} == {other}
    assert [t for chunk in chunks for t in chunk.token_ids] == known_text([4, 2])[:10]


def test_several_texts_per_prompt_are_seeded_apart():
    engine = engine_with()
    results = engine.generate([PROMPT, [2]], GenerationParams(n=3, seed=5, temperature=1.0, max_new_tokens=12))
    assert [result.index for result in results] == [0, 1, 2, 0, 1, 2]
    assert len({tuple(result.token_ids) for result in results}) == 6
    single = engine.generate([PROMPT], GenerationParams(seed=6, temperature=1.0, max_new_tokens=12))[0]
    assert single.token_ids == results[1].token_ids


def test_one_namespaces_text_never_drafts_for_another():
    secret = [70, 71, 72, 73, 74, 75, 76, 77]
    for method in ("prompt-lookup", "logitspec"):
        engine = engine_with(TableLM(random_table(96, seed=1)))
        engine.generate([secret * 3], GenerationParams(method=method, max_new_tokens=8, namespace="a"))
        (result,) = engine.generate([secret[:3]], GenerationParams(method=method, max_new_tokens=8, namespace="b"))
        alone = engine_with(TableLM(random_table(96, seed=1)))
        (expected,) = alone.generate([secret[:3]], GenerationParams(method=method, max_new_tokens=8, namespace="b"))
        assert result.stats.retrieval_steps > 0
        assert (result.stats.retrieval_hits, result.stats.drafted) == (
            expected.stats.retrieval_hits,
            expected.stats.drafted,
        )


@pytest.mark.parametrize("method", METHODS)
def test_a_grammar_advances_with_committed_tokens_only(method):
    """A processor that allows `1 2* 3` over and over reads the prefix: rejected drafts must not move it."""

    def grammar(input_ids, scores):
        last = int(input_ids[0, -1])
        allowed = [2, 3] if last in (1, 2) else [1]
        return torch.full_like(scores, -float("inf")).index_copy(1, torch.tensor(allowed), scores[:, allowed])

    engine = engine_with(script=lambda s: [2, 2, 9, 1])
    params = {"logits_processors": (grammar,), "max_new_tokens": 40}
    texts = ids_of(engine, [[3], [3, 3]], method=method, **params)
    assert texts == ids_of(engine_with(), [[3], [3, 3]], **params)
    assert all(a in (1, 2, 3) and (b in (2, 3) if a in (1, 2) else b == 1) for t in texts for a, b in pairwise(t))


def test_statistics_of_the_engine_add_up():
    engine = engine_with(script=follow(known_text(PROMPT)))
    (result,) = engine.generate([PROMPT], GenerationParams(method="script", max_new_tokens=21))
    stats = result.stats
    assert stats.emitted_tokens == 21 and stats.accepted == stats.emitted_tokens - stats.target_passes
    kinds = [origin.kind for origin in result.origins]
    assert kinds.count("accepted") == stats.accepted and len(kinds) == 21
    assert {origin.drafter for origin in result.origins} == {"script"}
    assert 0.0 <= engine.stats.overhead_share <= 1.0 and engine.stats.steps == stats.target_passes
    assert stats.seconds >= stats.seconds_to_first_token > 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens.*-1"),
        ({"temperature": -0.1}, "temperature.*-0.1"),
        ({"n": 0}, "n must.*0"),
        ({"method": "logitspek"}, "logitspek.*logitspec"),
        ({"draft_tokens": 1.5}, "draft_tokens.*1.5"),
        ({"stop": ("",)}, "stop"),
        ({"logit_bias": {200: 1.0}}, "logit_bias.*200"),
    ],
)
def test_a_wrong_parameter_is_refused_before_anything_runs(params, message):
    engine = engine_with()
    with pytest.raises(ValueError, match=message):
        engine.add(PROMPT, GenerationParams(**params))
    assert not engine.has_work


def test_a_processor_that_raises_ends_its_own_request_only():
    def broken(input_ids, scores):
        if input_ids.shape[1] > len(PROMPT) + 3:
            raise KeyError("no such rule")
        return scores

    engine = engine_with()
    params = [GenerationParams(max_new_tokens=10, logits_processors=(broken,)), GenerationParams(max_new_tokens=10)]
    failed, fine = engine.generate([PROMPT, PROMPT], params)
    assert failed.finish_reason == "error" and "no such rule" in failed.error and len(failed.token_ids) == 4
    assert fine.finish_reason == "length" and fine.token_ids == known_text(PROMPT)[:10]
    assert engine.cache.allocator.num_in_use == 0


@pytest.mark.parametrize("stops", [{"stop_token_ids": True}, {}], ids=["stop token", "cap"])
def test_nothing_after_the_end_of_a_text_is_asked_for(stops):
    """A grammar that raises beyond its end must not turn a finished text into an error because drafts went further."""
    text = known_text(PROMPT)
    first = next(i for i, token in enumerate(text) if i >= 2 and token not in text[:i])

    def grammar(input_ids, scores):
        if input_ids.shape[1] > len(PROMPT) + first:
            raise RuntimeError("the grammar has ended")
        return scores

    limits = {"stop_token_ids": (text[first],)} if stops else {"max_new_tokens": first + 1}
    params = GenerationParams(method="script", logits_processors=(grammar,), **limits)
    (result,) = engine_with(script=follow(text)).generate([PROMPT], params)
    assert result.token_ids == text[: first + 1] and result.error is None
    assert result.finish_reason == ("stop" if stops else "length")


def test_what_was_accepted_before_a_processor_raised_is_kept():
    text = known_text(PROMPT)

    def broken(input_ids, scores):
        if input_ids.shape[1] == len(PROMPT) + 4:
            raise KeyError("no such rule")
        return scores

    params = {"logits_processors": (broken,), "max_new_tokens": 10}
    for method in ("ar", "script"):
        (result,) = engine_with(script=follow(text)).generate([PROMPT], GenerationParams(method=method, **params))
        assert result.token_ids == text[:4] and result.finish_reason == "error", method


def test_a_text_with_nan_does_not_spread():
    """Padding must not read another text's slots: a masked NaN is still NaN."""
    model = tiny_lm()
    model.decoder.embed_tokens.weight.data[50] = float("nan")
    engine = engine_with(model)
    prompts = [[50, *[6] * 40], [9, 10] * 15, [5, 6, 7], [8] * 40]
    for batch in (prompts, prompts[:1], prompts[1:], prompts[2:]):
        for prompt, result in zip(batch, engine.generate(batch, GenerationParams(max_new_tokens=8)), strict=True):
            assert result.finish_reason == ("error" if 50 in prompt else "length")


def test_streams_side_by_side_lose_nothing():
    engine = engine_with()
    params = GenerationParams(max_new_tokens=8)
    streams = [engine.stream([PROMPT], params), engine.stream([[9, 10]], params)]
    seen: list[list[int]] = [[], []]
    for pair in zip_longest(*streams):
        for ids, chunk in zip(seen, pair, strict=True):
            ids.extend([] if chunk is None else chunk.token_ids)
    assert seen == [known_text(PROMPT)[:8], known_text([9, 10])[:8]] and not engine.has_work
    nested = []
    for chunk in engine.stream([PROMPT], params):
        nested += chunk.token_ids
        assert engine.generate([[9, 10]], params)[0].token_ids == seen[1]
    assert nested == seen[0] and not engine.has_work


def test_a_failed_draft_pass_is_not_taken_for_cached():
    """A draft that raises once goes on accepting as if it had not."""
    draft = tiny_lm()
    engine = Engine(tiny_lm(), drafters=[DraftModelDrafter(draft, num_tokens=4)], num_blocks=200)
    run, calls = draft.run, []

    def once(*arguments):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("transient")
        return run(*arguments)

    draft.run = once
    (result,) = engine.generate([PROMPT], GenerationParams(method="draft-model", max_new_tokens=40))
    assert result.stats.draft_failures == 1 and result.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("wrong", [[[5.7, 6.2]], [[True, False]], 7, None, {"a"}])
def test_what_is_no_prompt_is_refused_clearly(wrong):
    with pytest.raises(ValueError, match="prompt"):
        engine_with().generate(wrong)


def test_arrays_are_prompts_and_a_dict_is_no_params():
    engine = engine_with()
    params = GenerationParams(max_new_tokens=3)
    expected = known_text(PROMPT)[:3]
    assert engine.generate(torch.tensor(PROMPT), params)[0].token_ids == expected
    assert [r.token_ids for r in engine.generate(torch.tensor([PROMPT, PROMPT]), params)] == [expected] * 2
    with pytest.raises(ValueError, match="GenerationParams"):
        engine.generate([PROMPT], {"max_new_tokens": 3})
    with pytest.raises(ValueError, match=r"draft_tokens.*1024"):
        engine.generate([PROMPT], GenerationParams(draft_tokens=10**9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_tokens": -1}, "draft_tokens must be from 0 to 1024, got -1"),
        ({"draft_tokens": 10**9}, "draft_tokens must be from 0 to 1024, got 1000000000"),
        ({"max_length": 0}, "max_length must be at least 1, got 0"),
    ],
)
def test_an_engine_of_impossible_sizes_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Engine(tiny_lm(), num_blocks=10, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda size: LogitSpecDrafter(capacity=size),
        lambda size: LogitSpecDrafter(k=size),
        lambda size: PromptLookupDrafter(num_tokens=size),
        lambda size: DraftModelDrafter(tiny_lm(), num_tokens=size),
    ],
)
@pytest.mark.parametrize("size", [-1, 1025, 10**9])
def test_drafters_of_impossible_sizes_are_refused_at_once(make, size):
    with pytest.raises(ValueError, match=f"must be from . to 1024, got {size}"):
        make(size)
