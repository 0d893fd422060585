"""Self-speculation reuses what it has run, accepts what it must, and hands on the distribution that keeps it exact."""

from __future__ import annotations

from collections import Counter

import pytest
import scipy.stats
import torch
from speclight.infer.draft_model import DraftModelDrafter
from speclight.infer.early_exit import EarlyExitDrafter
from speclight.infer.engine import Engine
from speclight.infer.hierarchical import HierarchicalDrafter
from speclight.infer.logitspec import LogitSpecDrafter
from speclight.infer.request import GenerationParams
from speclight.modules.batch import BatchItem, RaggedBatch
from speclight.modules.kv_cache import CacheTable
from speclight.modules.token_tree import TokenTree
from support import TableLM, random_table, tiny_lm

PROMPT = [5, 9, 3, 5, 9, 3, 5, 9]


def engine_with(drafter, model=None, **options) -> Engine:
    model = model or tiny_lm()
    return Engine(model, drafters=[drafter], default_method=drafter.name, strict=True, num_blocks=200, **options)


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("batch", [1, 3])
def test_no_token_passes_a_layer_twice_in_one_try(batch, block_size):
    """Counts every (text, position, token, layer) that the model runs within a step, verification included."""
    drafter = HierarchicalDrafter(EarlyExitDrafter(1, num_tokens=2), 2, window=4)
    model = tiny_lm()
    engine = engine_with(drafter, model, block_size=block_size)
    ran: Counter = Counter()
    run = model.run

    def counting(hidden, batch, cache, start, stop):
        for slot, position, token in zip(
            batch.slot_mapping.tolist(), batch.positions.tolist(), batch.token_ids.tolist(), strict=True
        ):
            ran.update((slot, position, token, layer) for layer in range(start, stop))
        return run(hidden, batch, cache, start, stop)

    model.run = counting
    for index in range(batch):
        engine.add([*PROMPT, index], GenerationParams(max_new_tokens=30, temperature=1.0, seed=index))
    counted = 0
    while engine.has_work:
        ran.clear()
        engine.step()
        counted += sum(ran.values())
        assert max(ran.values(), default=1) == 1
    assert counted == engine.stats.layer_tokens


def test_a_draft_from_the_last_layer_is_accepted_to_the_end():
    """Exit layer = last layer: acceptance must be 100 % in the last steps as in the first, and so for the hierarchy."""
    for drafter, length in (
        (EarlyExitDrafter(4, num_tokens=4), 5),
        (HierarchicalDrafter(EarlyExitDrafter(4, num_tokens=3), 4, window=4), 5),
    ):
        engine = engine_with(drafter)
        engine.add(PROMPT, GenerationParams(max_new_tokens=401))
        emitted = []
        while engine.has_work:
            emitted += [len(chunk.token_ids) for chunk in engine.step()]
        assert emitted[0] == 1 and set(emitted[1:-1]) == {length}, drafter.name


def test_handing_the_drafts_own_q_to_the_last_stage_is_found():
    """Stage two must use p_i (HiSpec). With q_d instead the chi-square over first tokens must fail, and clearly."""

    class Wrong(HierarchicalDrafter):
        def _verify(self, one, *rows):
            verdict = super()._verify(one, *rows)
            for i in range(verdict.num_accepted):
                one.window.probs[i - verdict.num_accepted - 1] = one.tree.probs[i]
            return verdict

    table, runs = random_table(4, seed=3), 1500
    heads = [TableLM.exit(random_table(4, seed=seed)) for seed in (8, 9)]
    values = {}
    for kind in (HierarchicalDrafter, Wrong):
        drafter = kind(EarlyExitDrafter(1, 2, head=heads[0]), 2, 2, head=heads[1])
        engine = engine_with(drafter, TableLM(table, num_layers=3))
        params = [GenerationParams(max_new_tokens=4, temperature=1.0, seed=run) for run in range(runs)]
        counts = Counter((r.token_ids[0], r.token_ids[1]) for r in engine.generate([[2]] * runs, params))
        first, then = torch.softmax(table[2], -1), torch.softmax(table, -1)
        law = {(a, b): float(first[a] * then[a, b]) for a in range(4) for b in range(4)}
        common = [pair for pair, chance in law.items() if chance * runs >= 5]
        seen = [counts[pair] for pair in common]
        wanted = [law[pair] * runs for pair in common]
        values[kind] = scipy.stats.chisquare([*seen, runs - sum(seen)], [*wanted, runs - sum(wanted)]).pvalue
    assert values[HierarchicalDrafter] > 1e-4 and values[Wrong] < 1e-6


@pytest.mark.parametrize("make", [EarlyExitDrafter, lambda layer: HierarchicalDrafter(EarlyExitDrafter(1), layer)])
@pytest.mark.parametrize("layer", [0, 5])
def test_an_exit_layer_the_model_lacks_is_refused(make, layer):
    with pytest.raises(ValueError, match=rf"exit_layer.*\[1, 4\].*{layer}"):
        engine_with(make(layer))


@pytest.mark.parametrize("drafter", ["early-exit", "hispec", "hispec+logitspec"])
def test_an_end_of_sequence_inside_the_window_ends_the_text(drafter):
    plain = engine_with(EarlyExitDrafter(1)).generate([PROMPT], GenerationParams(method="ar", max_new_tokens=40))[0]
    text = plain.token_ids
    first = next(i for i, token in enumerate(text) if i >= 2 and token not in text[:i])
    one = {
        "early-exit": EarlyExitDrafter(4, 6),
        "hispec": HierarchicalDrafter(EarlyExitDrafter(4, 3), 4, window=6),
        "hispec+logitspec": HierarchicalDrafter(LogitSpecDrafter(k=8, capacity=8), 4, window=6),
    }[drafter]
    engine = engine_with(one)
    params = GenerationParams(max_new_tokens=40, stop_token_ids=(text[first],))
    (result,) = engine.generate([PROMPT], params)
    assert result.token_ids == text[: first + 1] and result.finish_reason == "stop"
    assert engine.cache.allocator.num_in_use == 0


def first_windows(wait: float, num_texts: int, num_drafted: int, seeded: bool = False) -> list[int]:
    """Tokens that each text's window hands on the first time.

    The drafts of the first `num_drafted` texts are all accepted, so that their windows of four fill in one round; for
    the others nothing is drafted, and theirs fill token by token.
    """
    handed: list[list[int]] = []

    class Watched(HierarchicalDrafter):
        def propose(self, sequences):
            trees = super().propose(sequences)
            handed.append([tree.num_drafted for tree in trees])
            return trees

    class Inner(EarlyExitDrafter):
        """The exit that verifies drafts for the first texts; for the others nothing is drafted."""

        def propose(self, sequences):
            return [
                tree if sequence.sequence_id < num_drafted else TokenTree.root(sequence.token_ids[-1])
                for tree, sequence in zip(super().propose(sequences), sequences, strict=True)
            ]

    engine = engine_with(Watched(Inner(2, num_tokens=3), 2, window=4, wait=wait))
    for index in range(num_texts):
        params = GenerationParams(max_new_tokens=24, temperature=1.0, seed=index if seeded else None)
        engine.add([*PROMPT, index], params)
    while len(handed) < 2:
        engine.step()
    return handed[0]


@pytest.mark.parametrize("seeded", [False, True])
def test_full_windows_wait_for_a_share_of_the_others_only(seeded):
    """One text's windows are full at once; a seed, or a share of all of them, waits for the others."""
    assert first_windows(0.25, 4, 1, seeded) == ([4, 4, 4, 4] if seeded else [4, 1, 1, 1])
    assert first_windows(1.0, 4, 1, seeded) == [4, 4, 4, 4]


@pytest.mark.parametrize(("wait", "num_texts", "enough"), [(0.8, 5, 4), (0.25, 5, 2), (0.28, 25, 7)])
def test_a_share_of_windows_is_the_number_that_it_says(wait, num_texts, enough):
    """1.25 windows are two. As floats 0.28 * 25 is above 7, and must not mean one window more."""
    assert first_windows(wait, num_texts, enough) == [4] * enough + [1] * (num_texts - enough)
    assert first_windows(wait, num_texts, enough - 1) == [4] * num_texts


def test_a_draft_model_drafts_for_an_intermediate_layer() -> None:
    """Of tokens that are tentative its cache keeps what it ran, and no more than came true; none is run twice."""
    draft = DraftModelDrafter(tiny_lm(), num_tokens=2, num_blocks=60, block_size=4)
    drafter, ran, run = HierarchicalDrafter(draft, 4, window=6), Counter(), draft.model.run

    def counting(hidden, batch, *rest):
        ran.update(zip(batch.positions.tolist(), batch.token_ids.tolist(), strict=True))
        return run(hidden, batch, *rest)

    draft.model.run = counting
    engine = engine_with(drafter, block_size=4)
    (plain,) = engine.generate([PROMPT], GenerationParams(method="ar", max_new_tokens=60))
    (done,) = engine.generate([PROMPT], GenerationParams(max_new_tokens=60))
    assert done.token_ids == plain.token_ids and done.stats.draft_failures == 0
    assert done.stats.inner_acceptance_rate > 0.95 and done.stats.acceptance_rate == 1.0
    assert max(ran.values()) == 1 and sum(ran.values()) >= 60
    (again,) = engine.generate([[*PROMPT, *plain.token_ids[:40]]], GenerationParams(max_new_tokens=20))
    assert again.token_ids == plain.token_ids[40:] and again.stats.inner_acceptance_rate > 0.95


def test_a_draft_model_whose_tentative_tokens_do_not_come_true_goes_on_from_the_text() -> None:
    """The intermediate layer is half the model, so windows are turned down; the draft is the model, so it never errs
    on the text itself."""
    draft = DraftModelDrafter(tiny_lm(), num_tokens=2, num_blocks=400, block_size=4)
    engine = engine_with(HierarchicalDrafter(draft, 2, window=5), block_size=4)
    prompts = [[*PROMPT, last] for last in range(4)]
    for temperature in (0.0, 1.0):
        params = GenerationParams(max_new_tokens=40, temperature=temperature)
        done = engine.generate(prompts, params)
        assert sum(one.stats.draft_failures for one in done) == 0
        assert sum(one.stats.drafted - one.stats.accepted for one in done) > 10
    greedy = GenerationParams(max_new_tokens=40)
    plain = engine.generate(prompts, GenerationParams(method="ar", max_new_tokens=40))
    assert [one.token_ids for one in engine.generate(prompts, greedy)] == [one.token_ids for one in plain]
    assert draft.cache.allocator.num_in_use == 0
    for prompt, one in zip(prompts, plain, strict=True):  # what it left findable is of the text it stands for
        table = CacheTable("")
        length = draft.cache.match_prefix(table, [*prompt, *one.token_ids])
        text = [*prompt, *one.token_ids][:length]
        fresh = draft.model.new_cache(60, 4)
        whole = CacheTable("")
        fresh.reserve(whole, length)
        batch = RaggedBatch.build([BatchItem(text, 0, whole.blocks)], 4, draft.model.device)
        draft.model.run(draft.model.embed(batch), batch, fresh, 0, draft.model.num_layers)
        for place in range(length):
            kept, right = draft.cache.slot(table, place), fresh.slot(whole, place)
            torch.testing.assert_close(draft.cache.data[:, :, kept], fresh.data[:, :, right], atol=1e-9, rtol=1e-9)
        assert length >= 40


def test_trees_under_an_intermediate_layer_teach_nothing_that_was_not_decided() -> None:
    """Their roots are tentative tokens, and what the model emits follows another."""
    inner = LogitSpecDrafter(capacity=8)
    engine = engine_with(HierarchicalDrafter(inner, 2))
    engine.generate([PROMPT], GenerationParams(max_new_tokens=60))
    trees = inner._trees
    assert trees.estimates.weights == trees.estimates.prior and trees._decided == 0
