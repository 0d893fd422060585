"""Trees grown best first: where candidates come from, who may draft for whom, and what is learned."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from speclight.infer import Engine, GenerationParams
from speclight.infer.adaptive_tree import TAUGHT_BY
from speclight.infer.drafter import Observation
from speclight.infer.estimates import (
    LEAST_LEARNED,
    NGRAM,
    NUM_WEIGHTS,
    OFFSETS,
    PROBABILITIES,
    PROBABILITY_BOUNDS,
    Context,
    Estimates,
    read_prior,
    write_prior,
)
from speclight.infer.logitspec import LogitSpecDrafter
from speclight.infer.prior import PRIOR
from speclight.infer.recall import (
    MOST_COUNTED,
    Continuations,
    Namespaces,
    SharedContinuations,
    Successors,
    Table,
    continuation_classes,
)
from speclight.infer.request import Sequence
from speclight.modules.acceptance import Verdict
from speclight.modules.token_tree import TokenTree
from support import TableLM, random_table, tiny_lm

VOCAB = 100


def sequence_of(token_ids: list[int], number: int = 0, namespace: str = "", draft_tokens: int = 16) -> Sequence:
    generator = torch.Generator()
    params = GenerationParams(namespace=namespace)
    return Sequence(
        number,
        f"request-{number}",
        params,
        list(token_ids),
        len(token_ids),
        generator,
        generator,
        draft_tokens=draft_tokens,
        max_depth=50,
    )


def logits_of(ranked: list[int]) -> torch.Tensor:
    row = torch.full((VOCAB,), -10.0)
    row[ranked] = torch.arange(len(ranked), 0, -1).float()
    return row


def observe(drafter: LogitSpecDrafter, sequence: Sequence, ranked: list[int]) -> None:
    """A pass without a draft, whose logits rank tokens so; the first of them is emitted."""
    tree = TokenTree.root(sequence.token_ids[-1])
    verdict = Verdict([0], ranked[0], corrected=False)
    drafter.observe([Observation(sequence, tree, verdict, logits_of(ranked)[None])])
    sequence.token_ids.append(ranked[0])


def propose(drafter: LogitSpecDrafter, sequence: Sequence) -> TokenTree:
    (tree,) = drafter.propose([sequence])
    return tree


def first_tokens(tree: TokenTree) -> set[int]:
    return set(tree.children[0])


# -- sources -----------------------------------------------------------------------------------------------------------


def test_every_source_drafts_and_is_named() -> None:
    drafter = LogitSpecDrafter(k=3)
    sequence = sequence_of([1, 2, 3, 9, 1])
    observe(drafter, sequence, [5, 60, 61])
    observe(drafter, sequence, [1, 70, 71])  # 1 is emitted: 2 and 9's neighbourhood follow by n-gram, 5 by its record
    tree = propose(drafter, sequence)
    labels = {tree.token_ids[node]: tree.sources[node] for node in tree.children[0].values()}
    assert labels == {2: "ngram", 5: "ngram", 60: "successor", 61: "successor", 70: "last-logit", 71: "last-logit"}


def test_successors_are_expanded_below_successors() -> None:
    """7 was likely after 60 and 81 after 7: fails if only what follows the root itself is looked up."""
    drafter = LogitSpecDrafter(k=2)
    sequence = sequence_of([60])
    observe(drafter, sequence, [7, 80])
    observe(drafter, sequence, [8, 81])
    observe(drafter, sequence, [60, 82])
    tree = propose(drafter, sequence)
    after_seven = tree.children[tree.children[0][7]]
    assert tree.sources[after_seven[81]] == "successor"


def test_a_tree_keeps_to_its_bounds_and_its_likeliest_nodes_come_first() -> None:
    drafter = LogitSpecDrafter(k=16)
    sequence = sequence_of([1, 2, 3, 4, 1, 2, 5, 1, 2])
    for ranked in ([3, *range(20, 35)], [4, *range(40, 55)], [1, *range(60, 75)], [2, *range(20, 35)]):
        observe(drafter, sequence, ranked)
    trees = {}
    for size in (1, 2, 8, 40):
        sequence.draft_tokens = size
        trees[size] = propose(drafter, sequence)
        assert len(trees[size]) == size
    paths = {
        size: {tuple(tree.token_ids[n] for n in tree.path_to(m)) for m in range(len(tree))}
        for size, tree in trees.items()
    }
    for small, large in pairwise(sorted(paths)):
        assert paths[small] <= paths[large]
    sequence.max_depth = 1
    assert max(propose(drafter, sequence).depths) == 1
    sequence.max_depth = 0
    assert len(propose(drafter, sequence)) == 1


def test_bounding_drops_nothing_that_would_have_got_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree of a small budget is the beginning of a large one's, which bounds later: fails if a place is skipped
    whose children belonged in. Without the approximation that saves looking at every candidate of a place."""
    monkeypatch.setattr("speclight.infer.estimates.SLACK", 1000.0)
    drafter = LogitSpecDrafter(k=8)
    engine = Engine(TableLM(random_table(24, seed=3)), drafters=[drafter], default_method="logitspec", num_blocks=64)
    engine.generate([[1, 2, 3, 4, 5, 1, 2]], GenerationParams(max_new_tokens=60))
    sequence = sequence_of([3, 1, 2], number=99)
    trees = []
    for size in (6, 12, 24, 48):
        sequence.draft_tokens = size
        tree = propose(drafter, sequence)
        trees.append([tuple(tree.token_ids[n] for n in tree.path_to(m)) for m in range(len(tree))])
    for small, large in pairwise(trees):
        assert large[: len(small)] == small


@pytest.mark.parametrize("k", [0, 1])
def test_without_likely_tokens_retrieval_is_left(k: int) -> None:
    drafter = LogitSpecDrafter(k=k)
    sequence = sequence_of([1, 2, 3, 4])
    observe(drafter, sequence, [1])
    assert 2 in first_tokens(propose(drafter, sequence))


# -- namespaces --------------------------------------------------------------------------------------------------------


def taught(drafter: LogitSpecDrafter, namespace: str = "") -> None:
    sequence = sequence_of([30, 31, 32, 33], 1, namespace)
    observe(drafter, sequence, [30, 40, 41])
    propose(drafter, sequence)
    observe(drafter, sequence, [31, 50, 51])
    drafter.release(1)


def after_teaching(drafter: LogitSpecDrafter, namespace: str = "") -> set[int]:
    sequence = sequence_of([33], 2, namespace)
    observe(drafter, sequence, [30])
    drafted = set(propose(drafter, sequence).token_ids[1:])
    drafter.release(2)
    return drafted


def test_requests_of_one_namespace_draft_for_each_other_and_others_never() -> None:
    drafter = LogitSpecDrafter(k=3)
    taught(drafter, "alice")
    assert after_teaching(drafter, "alice") & {31, 50, 51}
    assert not after_teaching(drafter, "bob") & {31, 32, 40, 41, 50, 51}


def test_shared_none_keeps_even_one_namespaces_texts_apart() -> None:
    drafter = LogitSpecDrafter(k=3, shared="none")
    taught(drafter)
    assert not after_teaching(drafter) & {31, 32, 40, 41, 50, 51}


def test_a_reset_drafter_is_a_fresh_one() -> None:
    drafter = LogitSpecDrafter(k=3)
    for _ in range(TAUGHT_BY + 1):
        taught(drafter)
    weights = list(drafter._trees.estimates.weights)
    assert weights != LogitSpecDrafter()._trees.estimates.weights
    drafter.reset()
    assert drafter._trees.estimates.weights == LogitSpecDrafter()._trees.estimates.weights
    assert drafter._trees._decided == 0, "which places teach would depend on what was said before"
    assert after_teaching(drafter) == after_teaching(LogitSpecDrafter(k=3))


def test_what_is_remembered_expires() -> None:
    now = [0.0]
    drafter = LogitSpecDrafter(k=3, ttl=10.0, clock=lambda: now[0])
    taught(drafter)
    now[0] = 9.0
    assert after_teaching(drafter) & {31, 50, 51}
    now[0] = 30.0
    assert not after_teaching(drafter) & {31, 50, 51}


def test_tables_keep_the_latest_entries() -> None:
    table = Table(limit=3)
    for key in (1, 2, 3, 1, 4):
        table.put((key,), 0, {key: 1}, now=0.0)
    assert list(table.entries) == [(3,), (1,), (4,)]


def test_the_namespace_used_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speclight.infer.recall.MAX_NAMESPACES", 2)
    spaces = Namespaces(3, 2, 10, None)
    first = spaces.of("a")
    spaces.of("b")
    assert spaces.of("a") is first
    spaces.of("c")
    assert list(spaces.memories) == ["a", "c"]


# -- memory and estimates ----------------------------------------------------------------------------------------------


def test_continuations_count_and_the_latest_stands_first() -> None:
    texts = Continuations(2)
    texts.extend([1, 2, 1, 3, 1, 2, 1], 0)
    assert texts.longest((9, 1), 2, 0.0) == (1, {3: 1, 2: 2})
    assert list(continuation_classes(1, {3: 1, 2: 2})) == [2, 3]
    assert texts.longest((3, 1), 2, 0.0) == (2, {2: 1}) and texts.longest((3, 1), 1, 0.0)[0] == 1
    assert texts.longest((7,), 2, 0.0) == (0, {})


def test_text_taken_in_by_parts_is_text_taken_in_at_once() -> None:
    token_ids = [1, 2, 1, 3, 1, 2, 1, 2, 2]
    whole, parts = Continuations(3), Continuations(3)
    whole.extend(token_ids, 0)
    for end in range(len(token_ids) + 1):
        parts.extend(token_ids[:end], max(end - 1, 0))
    assert parts.entries == whole.entries


def test_shared_continuations_count_as_a_text_does_forget_and_keep_the_latest() -> None:
    token_ids = [1, 2, 1, 3, 1, 2, 1, 2, 2]
    whole, shared = Continuations(3), SharedContinuations(3, limit=100, ttl=10.0)
    whole.extend(token_ids, 0)
    for end in range(len(token_ids) + 1):
        shared.extend(token_ids[:end], max(end - 1, 0), now=float(end))
    assert {key: counts for key, (_, counts) in shared.entries.items()} == whole.entries
    assert shared.after(3, 9.0) == whole.after(3, 9.0) == {1: 1} and shared.after(2, 9.0) == {1: 2, 2: 1}
    assert shared.after(3, 14.0) == {1: 1} and shared.after(3, 15.1) == {}, "5 was when the token behind 3 came"
    shared.extend([3, 2], 0, now=20.0)
    assert shared.after(3, 20.0) == {2: 1}, "what had been forgotten is not counted again"
    few = SharedContinuations(1, limit=2, ttl=None)
    few.extend([1, 2, 1, 3, 4], 0, now=0.0)
    assert list(few.entries) == [(1,), (3,)]


def test_successors_of_longer_contexts_come_first() -> None:
    records = Successors(2)
    records.remember((1, 2), {5: 9}, owner=0, now=0.0)
    records.remember((3, 2), {6: 9}, owner=1, now=0.0)
    assert [(order, entry[2]) for order, entry in records.after((1, 2), 0.0)] == [(2, {5: 9}), (1, {6: 9})]


def test_estimates_follow_what_is_accepted_and_drift_back() -> None:
    estimates = Estimates(rate=0.5, drift=0.1)
    context = Context((0,), [("ngram", 100, {7: 0, 8: 1})], seen={8: 1}, followed={8: 1})  # the two share no class
    before = estimates.log_odds(context)
    for _ in range(20):
        estimates.learn(context, 8)
    after = estimates.log_odds(context)
    assert after[8] > before[8] and after[7] < before[7]
    assert all(abs(weight) < 50 for weight in estimates.weights)
    for _ in range(100):
        estimates.learn(Context((0,), [("ngram", 100, {})]), 8)
    assert abs(estimates.weights[0] - estimates.prior[0]) < abs(after[8] - before[8])


def test_a_prior_is_read_as_it_was_written() -> None:
    weights = [round(index / 100 - 3, 2) for index in range(NUM_WEIGHTS)]
    assert read_prior(write_prior(weights)) == pytest.approx(weights)
    assert any(read_prior(PRIOR)), "the shipped prior is empty"


# -- in the engine -----------------------------------------------------------------------------------------------------


class Watching(LogitSpecDrafter):
    """Notes which rows of logits it is shown."""

    def __init__(self, **arguments) -> None:
        super().__init__(**arguments)
        self.seen: dict[int, torch.Tensor] = {}

    def read(self, sequence, positions, rows):
        assert not self.seen.keys() & set(positions), "a row is read once"
        self.seen |= dict(zip(positions, rows.logits, strict=True))
        super().read(sequence, positions, rows)


@pytest.mark.parametrize(("max_batch_tokens", "vocab"), [(512, 8192), (4, 8192), (4, 20), (512, 7)])
def test_prompts_are_read_once_with_the_logits_that_belong_there(max_batch_tokens: int, vocab: int) -> None:
    """Fails if rows are shifted by a chunk's start. 5 and 6 stand twice: only their last places are read; and rare
    tokens, those beyond the vocabulary that is read, are not."""
    model, drafter, prompt = tiny_lm(), Watching(prompt_vocab=vocab), [5, 6, 7, 5, 6, 9, 11, 2]
    engine = Engine(model, drafters=[drafter], num_blocks=64, max_batch_tokens=max_batch_tokens, strict=True)
    engine.generate([prompt], GenerationParams(method="logitspec", max_new_tokens=3))
    from speclight.infer.compare import next_logits

    assert sorted(drafter.seen) == ([3, 4] if vocab == 7 else [2, 3, 4, 5, 6])
    for position, row in drafter.seen.items():
        torch.testing.assert_close(row, next_logits(model, [prompt[: position + 1]])[0, :vocab])


def test_without_prompt_logits_no_row_is_asked_for() -> None:
    drafter = Watching(prompt_vocab=0)
    engine = Engine(tiny_lm(), drafters=[drafter], num_blocks=64, strict=True)
    engine.generate([[5, 6, 7, 5]], GenerationParams(method="logitspec", max_new_tokens=3))
    assert drafter.seen == {}


def test_a_candidates_log_odds_are_the_sum_of_its_weights() -> None:
    """Of places, sources and repeats, each once: what learning moves is what decided."""
    sources = [
        (NGRAM, OFFSETS["ngram"], {7: 3}),
        ("successor", OFFSETS["successor"], {7: 12, 8: 9}),
        ("last-logit", OFFSETS["guess"], {8: 4, 9: 2}),
    ]
    context = Context((0, 50), sources, seen={7: 1, 8: 20}, followed={8: 1}, followed_by_any={8: 5, 9: 1})
    estimates = Estimates()
    found, base = estimates.log_odds(context), estimates.weights[0] + estimates.weights[50]
    for candidate, row in estimates.weights_of(context).items():
        assert found[candidate] == pytest.approx(base + sum(estimates.weights[index] for index in row))
        assert len(row) == len(set(row)) == 3 + sum(candidate in classes for *_, classes in sources)
    assert found.keys() == {7, 8, 9}


def test_what_a_text_has_said_already_is_told_apart_by_number_and_source() -> None:
    def repeats(label: str = "successor", one: int = 12, **known: dict[int, int]) -> tuple[int, int]:
        """Weights of what the text has of token 7 already: anywhere, and behind this place's token."""
        _, seen, followed, _ = Estimates.weights_of(Context((), [(label, 0, {7: one})], **known))[7]
        return seen, followed

    times = [repeats(seen={7: count})[0] for count in (0, 1, 2, 3, 8, 9, 500)]
    assert len(set(times)) == 5 and times[3] == times[4] and times[5] == times[6]
    assert len({repeats(*source, seen={7: 1})[0] for source in ((NGRAM, 12), ("successor", 12), ("successor", 2))}) == 3
    behind = [repeats(followed={7: own}, followed_by_any={7: any_})[1] for own in (0, 1, 2, 9) for any_ in (0, 1, 2, 9)]
    assert len(set(behind)) == 9


def test_frequent_and_rare_tokens_are_told_apart_by_source() -> None:
    def rarity(token_id: int, label: str) -> int:
        return Estimates.weights_of(Context((), [(label, 0, {token_id: 12})]))[token_id][-1]

    assert len({rarity(token_id, "successor") for token_id in (0, 1, 3, 300, 49151, 262143)}) == 6
    assert rarity(2**30, NGRAM) == rarity(2**40, NGRAM), "an id beyond all vocabularies has a class"
    found = [
        rarity(token_id, label) for label in ("successor", NGRAM, "last-logit", "datastore") for token_id in (0, 2**30)
    ]
    assert len(set(found)) == 8 and OFFSETS["rarity"] <= min(found) and max(found) < NUM_WEIGHTS


def test_what_is_next_to_impossible_teaches_nothing_and_all_else_does() -> None:
    sources = [("successor", OFFSETS["successor"], {7: 12, 8: 0})]
    estimates = Estimates(drift=0.0)
    estimates.weights[OFFSETS["successor"]] = -9.0
    context = Context((0,), sources)
    assert estimates.log_odds(context)[8] < LEAST_LEARNED < estimates.log_odds(context)[7]
    before = list(estimates.weights)
    estimates.learn(context, 7)
    changed = {index for index, pair in enumerate(zip(before, estimates.weights, strict=True)) if pair[0] != pair[1]}
    assert changed == {0, *estimates.weights_of(context)[7]}
    assert estimates.weights[0] > before[0], "what came has become likelier"


def test_every_eighth_decided_place_teaches() -> None:
    counting = CountingEstimates()
    drafter = LogitSpecDrafter(capacity=8)
    drafter._trees.estimates = counting  # type: ignore[attr-defined]
    engine = Engine(tiny_lm("llama"), drafters=[drafter], default_method="logitspec")
    (done,) = engine.generate([[1, 2, 3, 1, 2]], GenerationParams(max_new_tokens=40, ignore_eos=True))
    decided = done.stats.emitted_tokens - 1  # the first came with the prompt, before any tree
    assert decided // TAUGHT_BY - 2 <= counting.lessons <= decided // TAUGHT_BY


class CountingEstimates(Estimates):
    lessons = 0

    def learn(self, context: Context, token_id: int) -> None:
        self.lessons += 1


def test_classes_of_probabilities_are_steps_of_their_log_odds() -> None:
    assert len(PROBABILITY_BOUNDS) == PROBABILITIES - 1 and list(PROBABILITY_BOUNDS) == sorted(PROBABILITY_BOUNDS)
    odds = [math.log(math.exp(bound) / -math.expm1(bound)) for bound in PROBABILITY_BOUNDS]
    assert odds == pytest.approx([-7.25 + 0.75 * step for step in range(1, PROBABILITIES)])


def test_places_are_learned_from_by_what_was_known_when_they_were_drafted() -> None:
    """What a leaf's own row says would give away the token that is to be predicted."""
    drafter = LogitSpecDrafter(k=3, capacity=2)
    trees, lessons = drafter._trees, []
    trees.taught_by = 1
    trees.estimates.learn = lambda context, token_id: lessons.append((context, token_id))
    sequence = sequence_of([30, 31, 32], draft_tokens=2)
    observe(drafter, sequence, [33, 34, 35])
    tree = propose(drafter, sequence)
    assert len(tree) == 2, "a root and a leaf that nothing was looked up for"
    rows = torch.stack([logits_of([tree.token_ids[1], 60, 61]), logits_of([70, 71, 72])])
    drafter.observe([Observation(sequence, tree, Verdict([0, 1], 70, corrected=False), rows)])
    leaf = next(context for context, token_id in lessons if token_id == 70)
    guessed = {token_id for label, _, classes in leaf.sources if label == "last-logit" for token_id in classes}
    assert guessed and not guessed & {70, 71, 72}


def test_rows_that_were_left_out_leave_no_guesses() -> None:
    drafter = LogitSpecDrafter(k=3)
    sequence = sequence_of([30, 31])
    observe(drafter, sequence, [32, 40, 41])
    assert first_tokens(propose(drafter, sequence)) & {40, 41}
    sequence.token_ids.append(33)  # a pass whose rows the trees were not shown
    assert not first_tokens(propose(drafter, sequence)) & {40, 41}


def test_shared_continuations_are_bounded_for_each_n_gram() -> None:
    texts = SharedContinuations(1, limit=100, ttl=None)
    for token_id in range(200):
        texts.extend([7, token_id + 10], 0, now=0.0)
    assert list(texts.after(7, 0.0)) == list(range(210 - MOST_COUNTED, 210))
