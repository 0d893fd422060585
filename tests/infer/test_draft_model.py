"""A seeded text is drafted for whatever runs beside it: neighbours may take its time, never its draft."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from speclight.infer.draft_model import DraftModelDrafter
from speclight.infer.engine import Engine
from speclight.infer.request import Completion, GenerationParams, Sequence
from speclight.infer.verify import FALSE_ALARM, chi_square, exact_cells
from support import TableLM, random_table, tiny_lm

PROMPTS = [[(7 * i + j) % 96 for j in range(9)] for i in range(5)]
ROOMY = 400


def run(num_blocks: int, params: list[GenerationParams], draft=None, prompts=PROMPTS, **options) -> list[Completion]:
    drafter = DraftModelDrafter(draft or tiny_lm(seed=1), num_tokens=4, num_blocks=num_blocks, block_size=4)
    engine = Engine(tiny_lm(), drafters=[drafter], default_method="draft-model", num_blocks=ROOMY, **options)
    results = engine.generate(prompts, params)
    assert drafter.cache.allocator.num_in_use == 0
    return results


def seeded(count: int, **fields) -> list[GenerationParams]:
    return [GenerationParams(temperature=1.0, max_new_tokens=24, seed=seed, **fields) for seed in range(count)]


@pytest.mark.parametrize("num_blocks", [10, 17, 25])
def test_a_draft_cache_too_small_for_all_changes_no_seeded_text(num_blocks: int) -> None:
    """10 blocks hold one text of 9 + 24 tokens with its drafts; without turns the others would go undrafted."""
    alone = [run(ROOMY, [one], prompts=[prompt])[0] for prompt, one in zip(PROMPTS, seeded(5), strict=True)]
    together = run(num_blocks, seeded(5), strict=True)
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert [r.stats.drafted for r in together] == [r.stats.drafted for r in alone]


def test_greedy_texts_give_their_room_to_seeded_ones_and_stay_right() -> None:
    params = [GenerationParams(max_new_tokens=24) if index % 2 else one for index, one in enumerate(seeded(5))]
    roomy, tight = run(ROOMY, params), run(10, params, strict=True)
    assert [r.token_ids for r in tight] == [r.token_ids for r in roomy]
    assert all(tight[index].stats.drafted == roomy[index].stats.drafted for index in (0, 2, 4))
    assert all(tight[index].stats.drafted < roomy[index].stats.drafted for index in (1, 3))


def test_a_text_longer_than_the_whole_draft_cache_is_drafted_for_as_far_as_it_fits() -> None:
    (alone,) = run(5, seeded(1), prompts=PROMPTS[:1], strict=True)
    assert alone.stats.drafted > 0 and alone.stats.steps_without_draft > 5
    together = run(5, seeded(5), strict=True)
    assert together[0].token_ids == alone.token_ids
    assert together[0].stats.drafted == alone.stats.drafted


def test_a_text_that_cannot_be_drafted_for_takes_no_draft_from_the_others() -> None:
    """The draft is broken for a token of its prompt; nothing of that may show in the others, seeds included."""
    params = seeded(5, logit_bias={80: -float("inf")})  # so that the others neither say nor draft it
    usual = run(ROOMY, params)
    draft = tiny_lm(seed=1)
    draft.decoder.embed_tokens.weight.data[80] = float("nan")
    results = run(ROOMY, params, draft=draft, prompts=[*PROMPTS[:2], [80, 5], *PROMPTS[3:]])
    failed = results.pop(2)
    assert failed.stats.draft_failures == failed.stats.draft_calls > 0
    assert failed.finish_reason == "length"
    for result, expected in zip(results, [*usual[:2], *usual[3:]], strict=True):
        assert result.token_ids == expected.token_ids
        assert result.stats.draft_failures == 0
        assert result.stats.drafted == expected.stats.drafted


@pytest.mark.parametrize("failing", [1, 2, 4])
def test_a_pass_that_fails_once_costs_no_text_its_draft_and_draws_nothing_twice(failing: int) -> None:
    """Draws made before the failure are taken back; without that seeded texts would shift."""
    usual = run(ROOMY, seeded(5))
    draft = tiny_lm(seed=1)
    whole, calls = draft.run, []

    def once(*arguments):
        calls.append(1)
        if len(calls) == failing:
            raise RuntimeError("transient")
        return whole(*arguments)

    draft.run = once
    results = run(ROOMY, seeded(5), draft=draft)
    assert [r.token_ids for r in results] == [r.token_ids for r in usual]
    assert [r.stats.draft_failures for r in results] == [0] * 5


def test_texts_that_take_turns_keep_the_targets_law() -> None:
    """Chi-square of three tokens; it fails a right drafter once in 10 000."""
    table, draft = random_table(6, seed=2), TableLM(random_table(6, seed=4))
    drafter = DraftModelDrafter(draft, num_tokens=2, num_blocks=7, block_size=1)
    engine = Engine(TableLM(table), drafters=[drafter], default_method="draft-model", num_blocks=ROOMY, strict=True)
    params = [GenerationParams(temperature=0.8, max_new_tokens=4, seed=seed) for seed in range(1500)]
    results = engine.generate([[3]] * len(params), params)
    assert sum(result.stats.drafted for result in results) > 1000

    def next_probs(prefixes):
        return torch.softmax(table[[prefix[-1] if prefix else 3 for prefix in prefixes]] / 0.8, -1).numpy()

    cells = exact_cells(next_probs, 3, len(results))
    assert chi_square(cells, [result.token_ids[:3] for result in results])[0] > FALSE_ALARM


def test_tentative_tokens_are_not_taken_for_text_because_another_text_has_them() -> None:
    """A draft under an intermediate layer that lost its room finds the blocks of a text that went on as it only may."""
    draft = DraftModelDrafter(tiny_lm(), num_tokens=2, num_blocks=40, block_size=4)
    draft.attach(tiny_lm(), None)
    known, text = list(range(1, 17)), list(range(1, 6))
    sequences = [sequence_of(known, 0), sequence_of([*text, *known[5:13]], 1, num_tentative=8)]
    draft.propose(sequences[:1])
    draft.propose([replace(sequences[0], token_ids=[*known, 17])])  # its text is now in the cache
    (tree,) = draft.propose(sequences[1:])
    assert len(tree) == 3 and draft._states[1].table.length <= 5
    turned_down = replace(sequences[1], token_ids=[*text, 90], num_tentative=0)
    (tree,) = draft.propose([turned_down])
    fresh = DraftModelDrafter(tiny_lm(), num_tokens=2, num_blocks=40, block_size=4)
    fresh.attach(tiny_lm(), None)
    assert tree.token_ids == fresh.propose([turned_down])[0].token_ids


def sequence_of(token_ids: list[int], number: int, **fields) -> Sequence:
    generators = torch.Generator(), torch.Generator()
    params = GenerationParams(max_new_tokens=40)
    one = Sequence(number, f"request-{number}", params, token_ids, 5, *generators, draft_tokens=2, max_depth=9)
    return replace(one, **fields)
