"""Which sequences of a batch attend in one padded call."""

from __future__ import annotations

import torch
from speclight.modules.batch import PART_QUERIES, BatchItem, RaggedBatch
from support import tiny_lm


def decoding(lengths: list[int], new: int = 1) -> RaggedBatch:
    """Texts of so many tokens with `new` new ones each; their blocks lie apart."""
    blocks = [range(100 * number, 100 * number + 80) for number in range(len(lengths))]
    items = [BatchItem([7] * new, n, table) for n, table in zip(lengths, blocks, strict=True)]
    return RaggedBatch.build(items, 16)


def padded_keys(batch: RaggedBatch) -> int:
    return sum(group.num_seqs * group.num_keys for group in batch.groups)


def test_a_long_text_does_not_make_short_ones_read_as_many_keys() -> None:
    """One call padded to the longest of these would read 6,500 keys instead of 2,300: twice the time of a step."""
    lengths = [96, 131, 131, 137, 140, 146, 723, 817]
    assert padded_keys(decoding(lengths)) < 1.15 * sum(lengths)
    assert padded_keys(decoding(lengths, new=4)) < 1.15 * sum(n + 4 for n in lengths)


def test_texts_of_like_lengths_share_a_call() -> None:
    assert len(decoding([130 + n for n in range(16)]).groups) == 1
    assert len(decoding([3, 5, 9, 40]).groups) == 1, "short ones cost less than a call"


def test_a_prompt_and_single_tokens_do_not_share_a_call() -> None:
    items = [BatchItem([7] * 200, 0, range(13)), *(BatchItem([7], 50, range(20 * n, 20 * n + 4)) for n in range(1, 9))]
    groups = RaggedBatch.build(items, 16).groups
    assert sorted((group.num_seqs, group.num_queries) for group in groups) == [(1, 200), (8, 1)]


def scores(batch: RaggedBatch, window: int | None = None) -> int:
    """Pairs of query and key that attention computes."""
    parts = [(group, part) for group in batch.groups for part in group.parts(window, torch.float32, 1)]
    return sum(group.num_seqs * (p.rows.stop - p.rows.start) * (p.keys.stop - p.keys.start) for group, p in parts)


def test_a_long_prompt_reads_little_more_than_it_sees() -> None:
    """In one masked call a prompt of n tokens computes n * n scores, of which half are thrown away."""
    prompt = RaggedBatch.build([BatchItem([7] * 512, 0, range(32))], 16)
    assert scores(prompt) < 0.6 * 512 * 512
    assert scores(prompt, window=64) < 512 * (64 + PART_QUERIES)
    later = RaggedBatch.build([BatchItem([7] * 512, 512, range(64))], 16)
    assert scores(later) < 0.8 * 512 * 1024
    assert scores(later, window=64) < 512 * (64 + PART_QUERIES)


def test_what_is_not_long_attends_in_one_call() -> None:
    for batch in (decoding([130, 140]), decoding([900], new=PART_QUERIES)):
        assert [len(group.parts(None, torch.float32, 1)) for group in batch.groups] == [1]


def test_rows_in_order_are_read_in_place_and_others_find_their_way_back():
    """By falling size every group is one piece of the batch; in any order each item reads what it reads alone."""
    model = tiny_lm()
    chains = [BatchItem(list(range(3, 3 + length))) for length in (70, 70, 1, 1, 1, 1)]
    by_size = RaggedBatch.build(chains, None)
    assert by_size.in_order and [group.first_query for group in by_size.groups] == [0, 140]
    order = (5, 0, 2, 1, 4, 3)
    mixed = RaggedBatch.build([chains[place] for place in order], None)
    assert not mixed.in_order and [group.first_query for group in mixed.groups] == [None, None]
    padded = RaggedBatch.build([BatchItem([3] * length) for length in (70, 69, 68, 5, 4, 1)], None)
    assert padded.in_order and all(group.output_index is not None for group in padded.groups) and len(padded.groups) > 1
    with torch.no_grad():
        alone = [model(RaggedBatch.build([item], None)) for item in chains]
        torch.testing.assert_close(model(by_size), torch.cat(alone))
        each = [model(RaggedBatch.build([item], None)) for item in padded.items]
        torch.testing.assert_close(model(padded), torch.cat(each))
        torch.testing.assert_close(model(mixed), torch.cat([alone[place] for place in order]))
