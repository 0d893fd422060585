"""A datastore finds what followed in a corpus, only there, and only for the tokenizer that made it."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from hypothesis import example, given, settings
from hypothesis import strategies as st
from speclight.infer import Engine, GenerationParams, LogitSpecDrafter
from speclight.infer.auto import AutoDrafter
from speclight.infer.datastore import DATA, DEPTH, SAMPLE, Datastore, check_output, corpus_classes, sort_suffixes
from speclight.infer.estimates import CORPUS_CLASSES, OFFSETS
from support import TableLM, random_table, tiny_lm

VOCAB = 96
documents_of = st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=6).filter(any)


def followers(documents: list[list[int]], tail: list[int]) -> tuple[int, Counter[int]]:
    """By reading the whole corpus: (longest suffix of `tail` that something follows, what and how often)."""
    for order in range(len(tail), 0, -1):
        ngram = tail[-order:]
        found = Counter(
            ids[at + order]
            for ids in documents
            for at in range(len(ids) - order)  # something follows, in the same document
            if ids[at : at + order] == ngram
        )
        if found:
            return order, found
    return 0, Counter()


# -- lookups -----------------------------------------------------------------------------------------------------------


@given(documents_of, st.lists(st.integers(0, 4), max_size=8))
@example([[1, 2], [2, 3]], [1, 2])  # 1 2 ends a document: what comes next belongs to another
@example([[0] * 12, [0, 1]], [0] * 8)
def test_a_lookup_finds_what_reading_the_whole_corpus_finds(documents: list[list[int]], tail: list[int]) -> None:
    """Fails when an end is crossed, an occurrence missed, or a match taken that nothing follows."""
    store = Datastore.build(documents, vocab_size=5)
    order, total, counts = store.continuations(store.matches(tail, 5))
    expected_order, expected = followers(documents, tail[-5:])
    assert (order, total) == (expected_order, expected.total())
    if total <= SAMPLE:
        assert counts == expected
        assert list(counts.values()) == sorted(counts.values(), reverse=True)


@given(documents_of, st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_matches_grow_with_the_text(documents: list[list[int]], tail: list[int]) -> None:
    store = Datastore.build(documents, vocab_size=5)
    grown = store.matches([], 3)
    for token_id in tail:
        grown = store.extended(grown, token_id, 3)
    assert grown == store.matches(tail, 3)
    assert len(grown) <= 4


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60))
@settings(max_examples=50)
def test_suffixes_are_in_the_order_of_their_first_tokens(ids: list[int]) -> None:
    order = sort_suffixes(np.array(ids)).tolist()
    assert order == sorted(range(len(ids)), key=lambda at: (ids[at : at + DEPTH], at))


def test_many_occurrences_are_sampled_in_proportion() -> None:
    """Fails when only the first of thousands of occurrences are looked at, or all of them."""
    documents = [[7, 1]] * 3000 + [[7, 2]] * 900 + [[7, 3]] * 100
    store = Datastore.build(documents, VOCAB)
    order, total, counts = store.continuations(store.matches([7], 6))
    assert (order, total, sum(counts.values())) == (1, 4000, SAMPLE)
    assert list(counts) == [1, 2, 3][: len(counts)]
    assert abs(counts[1] / SAMPLE - 0.75) <= 1 / SAMPLE


def test_matches_longer_than_suffixes_are_sorted_are_not_looked_for() -> None:
    ids = list(range(40)) * 2
    store = Datastore.build([ids], VOCAB)
    order, total, counts = store.continuations(store.matches(ids, 40))
    assert (order, total, counts) == (DEPTH - 1, 1, {0: 1})


@pytest.mark.parametrize("token_id", [5, 6, 10**9])
def test_an_id_that_no_tokenizer_makes_matches_nothing(token_id: int) -> None:
    """A padded vocabulary has such ids, one of which is the mark of an end here: fails if it matches that."""
    store = Datastore.build([[1, 2], [3, 4]], vocab_size=5)
    assert store.continuations(store.matches([2, token_id], 6)) == (0, 0, {})
    assert store.continuations(store.matches([2, token_id, 3], 6)) == (1, 1, {4: 1})


def test_large_vocabularies_take_wider_ids() -> None:
    small, large = Datastore.build([[1, 65534]], 65535), Datastore.build([[1, 65535]], 65536)
    assert (small.tokens.dtype, large.tokens.dtype) == (np.uint16, np.uint32)
    assert large.continuations(large.matches([1], 6)) == (1, 1, {65535: 1})


@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_an_empty_corpus_is_refused(documents: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="needs at least one token"):
        Datastore.build(documents, VOCAB)


def test_classes_tell_lengths_occurrences_and_shares_apart() -> None:
    classes = corpus_classes(2, 32, {5: 30, 6: 2})
    assert list(classes) == [5, 6] and classes[5] > classes[6]
    seen = {
        next(iter(corpus_classes(order, total, {1: count}).values()))
        for order in range(7)
        for total in (1, 2, 4, 16)
        for count in range(1, total + 1)
    }
    assert max(seen) < 7 * CORPUS_CLASSES and len(seen) == 7 * 11


# -- the folder --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Datastore.build([[1, 2, 3], [2, 3, 4]], VOCAB, "abc", "tiny").save(tmp_path / "store")
    return tmp_path / "store"


def test_what_was_saved_is_what_is_loaded_and_lies_in_memory_maps(folder: Path) -> None:
    store = Datastore.load(folder)
    assert (store.num_tokens, store.num_documents, store.tokenizer, store.model) == (6, 2, "abc", "tiny")
    assert store.continuations(store.matches([2, 3], 6)) == (2, 1, {4: 1})
    assert isinstance(store.tokens.base, np.memmap) and isinstance(store.suffixes.base, np.memmap)
    assert [path.name for path in folder.parent.iterdir()] == ["store"]


@pytest.mark.parametrize("name", ["tokens.npy", "suffixes.npy", "datastore.json", "SHA256SUMS"])
def test_a_changed_byte_or_a_missing_file_is_refused(name: str, folder: Path) -> None:
    whole = (folder / name).read_bytes()
    for at in (0, len(whole) // 2, len(whole) - 1):
        (folder / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=f"is damaged: {name} changed|damaged: .* changed since"):
            Datastore.load(folder)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"it has no {name}"):
        Datastore.load(folder)


def rewrite(folder: Path, **changes: object) -> None:
    """Change the index, and the sums to go with it."""
    index = json.loads((folder / "datastore.json").read_text())
    (folder / "datastore.json").write_text(json.dumps(index | changes))
    sums = [(hashlib.sha256((folder / name).read_bytes()).hexdigest(), name) for name in DATA]
    (folder / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for digest, name in sums))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "has format version 2; this speclight reads up to 1"),
        ({"format": "something else"}, "is not that of a speclight datastore"),
        ({"depth": 8}, "is not that of a speclight datastore"),
        ({"end": "96"}, "is not that of a speclight datastore"),
        ({"tokens": 5}, "do not fit each other"),
        ({"end": 95}, "do not fit each other"),
    ],
)
def test_another_format_is_refused(changes: dict[str, object], message: str, folder: Path) -> None:
    rewrite(folder, **changes)
    with pytest.raises(ValueError, match=message):
        Datastore.load(folder)


def test_only_a_datastore_is_overwritten(folder: Path) -> None:
    other = Datastore.build([[9, 9]], VOCAB)
    with pytest.raises(ValueError, match="--overwrite to replace it"):
        other.save(folder)
    other.save(folder, overwrite=True)
    assert Datastore.load(folder).num_tokens == 2
    (folder / "mine.txt").write_text("x")
    with pytest.raises(ValueError, match=r"holds more than a datastore \(mine.txt\)"):
        other.save(folder, overwrite=True)


def test_an_index_nested_too_deeply_to_be_read_is_refused(folder: Path) -> None:
    (folder / "datastore.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is damaged: "):
        Datastore.load(folder)


def test_an_output_that_cannot_be_made_is_refused_before_anything_is_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"store' cannot be made: '.*/file' is no folder to write into"):
        check_output(tmp_path / "file" / "new" / "store", overwrite=False)
    check_output(tmp_path / "new" / "store", overwrite=False)
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # root may write anywhere
    with pytest.raises(ValueError, match="is no folder to write into"):
        check_output(tmp_path / "new" / "store", overwrite=False)


def test_another_tokenizers_datastore_is_refused_with_both_fingerprints(folder: Path) -> None:
    store = Datastore.load(folder)
    store.check_tokenizer("it", "abc", 5)
    with pytest.raises(ValueError, match=r"made with abc \(tiny\), this one is xyz"):
        store.check_tokenizer("it", "xyz", VOCAB)
    with pytest.raises(ValueError, match="holds token id 4; this model has ids from 0 to 3"):
        store.check_tokenizer("it", "abc", 4)


# -- drafting ----------------------------------------------------------------------------------------------------------

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7]]
PARAMS = GenerationParams(max_new_tokens=40)


def run(drafters: list, method: str):
    engine = Engine(tiny_lm(), drafters=drafters, default_method=method, num_blocks=64, strict=True)
    return engine.generate(PROMPTS, PARAMS)


@pytest.mark.parametrize("shared", ["namespace", "none"])
def test_a_corpus_that_holds_the_answers_is_accepted_from_and_leaves_texts_alone(shared: str) -> None:
    """Also where requests share nothing: the corpus is the user's own. Fails when the source is not read."""
    plain = run([], "ar")
    store = Datastore.build([[*done.prompt_ids, *done.token_ids] for done in plain], VOCAB)
    without = run([LogitSpecDrafter(capacity=16, shared=shared)], "logitspec")
    with_it = run([LogitSpecDrafter(capacity=16, shared=shared, datastore=store)], "logitspec")
    assert [done.token_ids for done in with_it] == [done.token_ids for done in plain]
    passes = [sum(done.stats.target_passes for done in part) for part in (plain, without, with_it)]
    assert passes[0] > passes[1] > 1.5 * passes[2]
    assert any(done.stats.accepted_from["datastore"] for done in with_it)  # most of it other sources knew too
    assert not any(done.stats.drafted_from["datastore"] for done in without)
    origins = Counter(origin.source for done in with_it for origin in done.origins if origin.kind == "accepted")
    assert origins == sum((done.stats.accepted_from for done in with_it), Counter())


def test_method_auto_drafts_from_it_too() -> None:
    plain = run([], "ar")
    store = Datastore.build([[*done.prompt_ids, *done.token_ids] for done in plain], VOCAB)
    drafted = run([AutoDrafter(LogitSpecDrafter(datastore=store), [])], "auto")
    assert [done.token_ids for done in drafted] == [done.token_ids for done in plain]


def test_a_corpus_of_something_else_changes_no_text() -> None:
    rng = np.random.default_rng(0)
    store = Datastore.build([rng.integers(0, VOCAB, 300) for _ in range(5)], VOCAB)
    drafted = run([LogitSpecDrafter(capacity=16, datastore=store)], "logitspec")
    assert [done.token_ids for done in drafted] == [done.token_ids for done in run([], "ar")]


def test_sampled_texts_keep_the_models_law() -> None:
    """Chi-square over pairs of tokens behind a prompt; another seed would fail by chance once in 10,000 runs."""
    table, count = random_table(6, seed=1), 1000
    store = Datastore.build([[0, 1, 2, 3, 4, 5] * 4, [0, 3, 3, 1] * 5], vocab_size=6)
    drafter = LogitSpecDrafter(k=0, capacity=8, shared="none", datastore=store)
    engine = Engine(TableLM(table), drafters=[drafter], default_method="logitspec", num_blocks=400)
    done = engine.generate([[0]], GenerationParams(max_new_tokens=3, temperature=1.0, seed=5, n=count))
    assert sum(one.stats.accepted_from["datastore"] for one in done) > count // 10
    seen = Counter(tuple(one.token_ids[1:]) for one in done)
    probs = table.softmax(-1)
    expected = {(b, c): count * float((probs[0] * probs[:, b]).sum() * probs[b, c]) for b in range(6) for c in range(6)}
    statistic = sum((seen[pair] - value) ** 2 / value for pair, value in expected.items())
    assert scipy.stats.chi2.sf(statistic, len(expected) - 1) > 1e-4


def test_without_a_datastore_estimates_are_those_of_before() -> None:
    """A place that no corpus was asked about has none of its weights."""
    drafter = LogitSpecDrafter()
    engine = Engine(tiny_lm(), drafters=[drafter], default_method="logitspec", num_blocks=64)
    engine.generate(PROMPTS, PARAMS)
    estimates = drafter._trees.estimates
    corpus = slice(OFFSETS["corpus-order"], OFFSETS["seen"])
    assert estimates.weights[corpus] == estimates.prior[corpus]
    assert all(math.isfinite(weight) for weight in estimates.weights)


def test_the_papers_trees_take_none() -> None:
    store = Datastore.build([[1, 2]], VOCAB)
    with pytest.raises(ValueError, match="tree must be 'adaptive' for a datastore, got 'paper'"):
        LogitSpecDrafter(tree="paper", datastore=store)


def test_texts_of_all_namespaces_draft_from_it() -> None:
    from test_adaptive_tree import propose, sequence_of

    drafter = LogitSpecDrafter(k=2, datastore=Datastore.build([[30, 31, 32, 33]], VOCAB))
    for number, namespace in enumerate(["", "a", "b"]):
        tree = propose(drafter, sequence_of([50, 30], number, namespace))
        assert tree.token_ids[1:4] == [31, 32, 33]
        assert tree.sources[1:4] == ["datastore"] * 3
