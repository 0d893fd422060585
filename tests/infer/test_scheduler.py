"""What goes into a pass. Host logic: no model."""

from __future__ import annotations

import pytest
import torch
from speclight.infer.request import GenerationParams, Sequence
from speclight.infer.scheduler import Scheduler
from speclight.modules.kv_cache import CacheTable, PagedKVCache


def scheduler(num_blocks: int = 64, max_num_seqs: int = 4, max_batch_tokens: int = 40, **options) -> Scheduler:
    cache = PagedKVCache(1, 1, 4, num_blocks, block_size=4)
    return Scheduler(cache, max_num_seqs, max_batch_tokens, lambda sequence: (0, 0), **options)


def waiting(one: Scheduler, *lengths: int) -> list[Sequence]:
    """Texts of so many tokens each, all different."""
    texts = []
    for number, length in enumerate(lengths):
        ids = [1000 * number + place for place in range(length)]
        random = torch.Generator()
        text = Sequence(number, f"request-{number}", GenerationParams(), ids, length, random, random, CacheTable())
        one.add(text)
        texts.append(text)
    return texts


def planned(one: Scheduler) -> list[int]:
    """Tokens by text of the next pass, which is then taken as run."""
    plan = one.schedule()
    emitting = [item.sequence for item in plan if item.reaches_root]
    one.cache.commit([(item.sequence.table, range(item.num_tokens)) for item in plan])
    for sequence in emitting:
        sequence.token_ids.append(7)
    return [item.num_tokens for item in plan]


def test_prompts_share_what_the_budget_leaves():
    """The first come first; those that decode always run, and prompts have what is left, though it be one token."""
    one = scheduler()
    waiting(one, 30, 30, 30)
    assert [planned(one) for _ in range(4)] == [[30, 10], [1, 20, 19], [1, 1, 11], [1, 1, 1]]


def test_a_prompt_gets_on_beside_more_texts_than_the_budget_has_tokens():
    one = scheduler(max_batch_tokens=2)
    waiting(one, 2, 2, 9)
    assert [planned(one) for _ in range(3)] == [[2], [1, 1], [1, 1, 1]]


def test_texts_wait_while_the_prompts_under_way_need_the_blocks():
    one = scheduler(num_blocks=10)
    first, second, third = waiting(one, 20, 20, 4)
    planned(one)
    assert one.running == [first, second] and list(one.waiting) == [third] and not third.table.blocks
    one.remove(first)
    planned(one)
    assert third in one.running


def test_what_starts_is_told_beside_how_many():
    told: list[tuple[int, int]] = []
    one = scheduler(max_num_seqs=3, start=lambda sequence, texts: told.append((sequence.sequence_id, texts)))
    first, *_ = waiting(one, 4, 4, 4, 4)
    planned(one)
    assert told == [(0, 3), (1, 3), (2, 3)]
    one.remove(first)
    planned(one)
    assert told[3:] == [(3, 3)]


@pytest.mark.parametrize("name", ["max_num_seqs", "max_batch_tokens"])
def test_sizes_that_let_nothing_run_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        scheduler(**{name: 0})
