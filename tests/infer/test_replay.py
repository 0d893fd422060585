"""Recordings and what is replayed on them: the engine's own steps, without the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from speclight.infer import Engine, GenerationParams, LogitSpecDrafter, PromptLookupDrafter
from speclight.infer.cli import main
from speclight.infer.compare import next_logits
from speclight.infer.drafter import Drafter
from speclight.infer.questions import Item, Question
from speclight.infer.record import recorded
from speclight.infer.recording import RecordedText, Recording, read_recording, text_path, write_meta, write_text
from speclight.infer.replay import ReplayOptions, Rows, parse_budgets, parse_variants, run
from support import tiny_lm

NEW_TOKENS = 24
PROMPTS = [[5, 6, 7, 5, 6, 9, 5], [11, 12, 13, 14, 11, 12], [40], [5, 6, 7, 8, 5, 6, 7]]


def record_tiny(stop: int | None = None) -> tuple[Engine, Recording]:
    engine = Engine(tiny_lm(), num_blocks=128, prefix_caching=False, strict=True)
    if stop is not None:
        engine.model.eos_token_ids = frozenset({stop})
    items = [Item(Question(n, "qa" if n % 2 else "writing", ("x",)), 0, ids) for n, ids in enumerate(PROMPTS)]
    texts = dict(recorded(engine, items, NEW_TOKENS, k=96))
    settings = {"max_new_tokens": NEW_TOKENS}
    stop_ids = sorted(engine.model.eos_token_ids)
    return engine, Recording(settings, 96, stop_ids, [texts[index] for index in range(len(PROMPTS))])


def a_stop_token() -> int:
    """One that ends a text after some tokens."""
    _, recording = record_tiny()
    return int(recording.texts[0].token_ids[recording.texts[0].num_prompt + 9])


class Watched:
    """Notes a drafter's proposals."""

    def __init__(self, drafter: Drafter) -> None:
        self.trees: list[tuple[list[int], list[int], list[str]]] = []
        propose = drafter.propose

        def watched(sequences):
            trees = propose(sequences)
            self.trees += [(list(t.token_ids), list(t.parents), list(t.sources)) for t in trees]
            return trees

        drafter.propose = watched


DRAFTERS = {
    "ar": lambda: Drafter(),
    "prompt-lookup": lambda: PromptLookupDrafter(num_tokens=7),
    "paper": lambda: LogitSpecDrafter(k=20, capacity=8, tree="paper"),
    "adaptive": lambda: LogitSpecDrafter(k=8, capacity=8),
    "adaptive, none shared": lambda: LogitSpecDrafter(k=8, capacity=8, shared="none"),
    "adaptive, prompts unread": lambda: LogitSpecDrafter(k=8, capacity=8, prompt_vocab=0),
    "adaptive, prompts half read": lambda: LogitSpecDrafter(k=8, capacity=8, prompt_vocab=48),
}


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("name", DRAFTERS)
def test_replay_takes_the_engines_steps(name: str, stops: bool) -> None:
    """Same proposals in the same order, same counts, text by text: what a drafter has learned included."""
    engine, recording = record_tiny(a_stop_token() if stops else None)
    ours, theirs = DRAFTERS[name](), DRAFTERS[name]()
    in_replay, in_engine = Watched(ours), Watched(theirs)
    outcomes = list(run(ours, recording, 8))
    engine = Engine(engine.model, drafters=[] if name == "ar" else [theirs], num_blocks=128, prefix_caching=False)
    for outcome, prompt in zip(outcomes, PROMPTS, strict=True):
        params = GenerationParams(method=theirs.name, max_new_tokens=NEW_TOKENS)
        (done,) = engine.generate([prompt], params)
        assert [*prompt, *done.token_ids] == outcome.text.token_ids.tolist()
        for field in ("target_passes", "emitted_tokens", "drafted", "accepted", "accepted_lengths", "retrieval_hits"):
            assert getattr(outcome.stats, field) == getattr(done.stats, field), field
        assert outcome.stats.mat == done.stats.mat
    if name != "ar":  # the engine's own never drafts
        assert in_replay.trees and in_replay.trees == in_engine.trees
    assert any(len(text.token_ids) - text.num_prompt < NEW_TOKENS for text in recording.texts) == stops


def test_what_is_recorded_is_the_model(tmp_path: Path) -> None:
    engine, recording = record_tiny()
    text = recording.texts[1]
    for place in (0, text.num_prompt - 1, len(text.token_ids) - 1):
        row = next_logits(engine.model, [text.token_ids[: place + 1].tolist()])[0].log_softmax(-1)
        expected = row.sort(descending=True)
        assert text.top_ids[place].tolist()[:20] == expected.indices.tolist()[:20]
        np.testing.assert_allclose(text.top_logprobs[place], expected.values.numpy(), atol=1e-5)
    write_text(text_path(tmp_path, 0), text)
    facts = {"vocab_size": 96, "stop_ids": [3]}
    entry = {"question_id": text.question_id, "category": text.category}
    write_meta(tmp_path, {"settings": recording.settings, "model": facts, "texts": [entry]})
    again = read_recording(tmp_path)
    assert (again.vocab_size, again.stop_ids, again.max_new_tokens) == (96, [3], NEW_TOKENS)
    for name in ("token_ids", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(again.texts[0], name), getattr(text, name))


def test_rows_hold_what_was_recorded_and_sum_to_one() -> None:
    rows = Rows(3, 50)
    logprobs = np.log(np.array([[0.5, 0.25, 0.05]], dtype=np.float32))
    rows.fill([1], np.array([[7, 3, 20]], dtype=np.int32), logprobs)
    probs = rows.logits[1].exp()
    assert rows.logits[1].topk(3).indices.tolist() == [7, 3, 20]
    assert float(probs.sum()) == pytest.approx(1.0, abs=1e-5) and float(probs[7]) == pytest.approx(0.5)
    assert bool(rows.logits[0].isnan().all()), "a row that was not recorded must show when it is read"
    rows.forget([1])
    assert bool(torch.isnan(rows.logits).all())


def stored(folder: Path) -> Path:
    _, recording = record_tiny()
    folder.mkdir()
    entries = [{"question_id": text.question_id, "category": text.category} for text in recording.texts]
    facts = {"vocab_size": 96, "stop_ids": []}
    for index, text in enumerate(recording.texts):
        write_text(text_path(folder, index), text)
    write_meta(folder, {"settings": recording.settings, "model": facts, "texts": entries})
    return folder


def test_the_command_reports_mat_by_method_budget_and_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stored(tmp_path / "recording")
    flags = [
        "--methods",
        "ar,logitspec",
        "--trees",
        "paper,adaptive",
        "--budgets",
        "4,8",
        "--output",
        str(tmp_path / "o"),
    ]
    assert main(["replay", "--recording", str(folder), *flags]) == 0
    report = json.loads((tmp_path / "o" / "report.json").read_text())
    names = ["ar", "logitspec, paper", "logitspec, adaptive, shared namespace"]
    assert [(r["method"], r["budget"]) for r in report["results"]] == [(name, b) for name in names for b in (4, 8)]
    assert list(report["results"][0]["groups"]) == ["all", "mt_bench", "qa"]
    assert report["results"][0]["groups"]["all"]["mat"] == report["results"][0]["mat_after_prefill"] == 1.0
    for result in report["results"]:
        counts, texts = result["groups"]["all"], report["recording"]["texts"]
        after = (counts["emitted_tokens"] - texts) / (counts["target_passes"] - texts)
        assert result["mat_after_prefill"] == pytest.approx(after)
    table = (tmp_path / "o" / "report.md").read_text()
    assert "| ar | 1.000 | 1.000 |" in table and "## MAT by group, 8 nodes" in table
    assert (tmp_path / "o" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "| ar | 1.000 | 1.000 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--methods", "logitspek"],
            "methods must be among ar, prompt-lookup, logitspec, got 'logitspek'; did you mean",
        ),
        (["--methods", ","], "methods must name at least one"),
        (["--trees", "papers"], "trees must be among adaptive, paper, got 'papers'; did you mean 'paper'?"),
        (["--shared", "some"], "shared must be among namespace, none, got 'some'"),
        (["--budgets", "8,x"], "budgets must be integers from 1 to 1024, got 'x'"),
        (["--budgets", "0"], "budgets must be integers from 1 to 1024, got '0'"),
        (["--logitspec.ttl", "-1"], "ttl must be above 0 seconds, got -1"),
        (["--recording", "nowhere"], "recording 'nowhere' has no meta.json"),
    ],
)
def test_a_mistake_is_named(flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"--recording": "nowhere", "--output": str(tmp_path / "o")}
    merged = [part for name, value in (given | dict([flags])).items() for part in (name, value)]
    assert main(["replay", *merged]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_an_unfinished_or_damaged_recording_is_refused(tmp_path: Path) -> None:
    folder = stored(tmp_path / "recording")
    whole = text_path(folder, 2).read_bytes()
    text_path(folder, 2).write_bytes(whole[:200])
    with pytest.raises(ValueError, match=r"00002\.npz is damaged"):
        read_recording(folder)
    text_path(folder, 2).unlink()
    with pytest.raises(ValueError, match="unfinished: 1 of 4 texts are missing"):
        read_recording(folder)
    (folder / "meta.json").write_text("{}")
    with pytest.raises(ValueError, match="no recording of format 1"):
        read_recording(folder)


def test_budgets_rise_and_variants_are_named_once() -> None:
    assert parse_budgets(["64,8", "8"]) == [8, 64]
    options = ReplayOptions(
        recording="r", output="o", methods=("logitspec",), trees=("paper,adaptive",), shared=("none",)
    )
    assert [variant.name for variant in parse_variants(options)] == [
        "logitspec, paper",
        "logitspec, adaptive, shared none",
    ]


def test_a_recorded_text_knows_its_group() -> None:
    empty = np.zeros((1, 0), dtype=np.int32)
    assert RecordedText(1, "writing", np.array([1]), 1, empty, empty.astype(np.float32)).group == "mt_bench"


# -- damaged recordings, and outputs that can be none ----------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(tmp_path_factory.mktemp("whole") / "recording")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """One to damage."""
    return Path(shutil.copytree(whole, tmp_path / "recording"))


def refused(folder: Path, capsys: pytest.CaptureFixture[str], output: str = "o") -> str:
    """The error of replaying it, with nothing left behind."""
    output = str(folder.parent / output)
    assert main(["replay", "--recording", str(folder), "--budgets", "4", "--output", output]) == 2
    assert not Path(output).is_dir()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"texts": 3}, "texts must be a list of at least one text, got 3"),
        ({"texts": []}, "texts must be a list of at least one text, got []"),
        ({"texts": ["x"] * 4}, "texts[0] must be an object, got 'x'"),
        ({"texts": [{"question_id": 1}] * 4}, "texts[0]: category must be a string, got None"),
        ({"texts": [{"question_id": [], "category": "qa"}] * 4}, "question_id must be an integer or a string, got []"),
        ({"settings": "x"}, "settings must be an object, got 'x'"),
        ({"settings": {}}, "settings: max_new_tokens must be an integer from 1"),
        ({"settings": {"max_new_tokens": float("nan")}}, "settings: max_new_tokens must be an integer from 1"),
        ({"settings": {"max_new_tokens": 6}}, "00000.npz is damaged (num_prompt must be at least 1 and leave 1 to 6"),
        (
            {"settings": {"max_new_tokens": 30}},
            "24 tokens follow the prompt, of 30, and the last is no stop id of",
        ),
        ({"model": None}, "model must be an object, got None"),
        ({"model": {"vocab_size": "a", "stop_ids": []}}, "vocab_size must be an integer from 1 to 2**31 - 1, got 'a'"),
        ({"model": {"vocab_size": 20, "stop_ids": []}}, "00000.npz is damaged (token_ids must be from 0 to 19"),
        ({"model": {"vocab_size": 96, "stop_ids": 3}}, "stop_ids must be a list of ids, got 3"),
        ({"model": {"vocab_size": 96, "stop_ids": [], "tokenizer": 3}}, "tokenizer must be a string, got 3"),
    ],
)
def test_a_damaged_meta_json_is_refused_by_its_field(
    change: dict[str, Any], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some were exceptions of Python's, and replay did not end where max_new_tokens was below a text's."""
    path = folder / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    error = refused(folder, capsys)
    assert message in error and str(folder) in error


def test_a_recording_that_does_not_say_what_its_model_was_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    del meta["model"]
    path.write_text(json.dumps(meta))
    assert f"{path} lacks model" in refused(folder, capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {"token_ids": a["token_ids"][None]}, "token_ids must be 1-d int32, got 2-d int32"),
        (lambda a: {"token_ids": a["token_ids"].astype(np.float32)}, "token_ids must be 1-d int32, got 1-d float32"),
        (lambda a: {"token_ids": a["token_ids"] + 96}, "token_ids must be from 0 to 95"),
        (lambda a: {"token_ids": a["token_ids"] - 96}, "token_ids must be from 0 to 95"),
        (lambda a: {"num_prompt": a["token_ids"]}, "num_prompt must be 0-d int32, got 1-d int32"),
        (lambda a: {"num_prompt": np.int32(0)}, "num_prompt must be at least 1"),
        (lambda a: {"num_prompt": np.int32(len(a["token_ids"]))}, "num_prompt must be at least 1"),
        (lambda a: {"top_ids": a["top_ids"] + 1}, "top_ids must be from 0 to 95, got 1 to 96"),
        (lambda a: {"top_ids": a["top_ids"][:-1]}, "its arrays do not fit each other"),
        (lambda a: {name: a[name][:, :0] for name in ("top_ids", "top_logprobs")}, "its arrays do not fit each other"),
        (lambda a: {"top_logprobs": a["top_logprobs"] * np.float32("nan")}, "top_logprobs must be finite"),
        (lambda a: {name: np.concatenate([a[name]] * 2) for name in list(a) if a[name].ndim}, "leave 1 to 24 of 60"),
        (
            lambda a: {name: a[name][:-2] for name in list(a) if a[name].ndim},
            "22 tokens follow the prompt",
        ),
        (lambda a: {"token_ids": np.array([[1], "x"], dtype=object)}, "allow_pickle"),
    ],
)
def test_a_damaged_text_is_refused_by_its_array(
    change: Any, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some were exceptions of Python's, some were replayed, and some without end."""
    path = text_path(folder, 1)
    with np.load(path) as arrays:
        whole = dict(arrays)
    np.savez(path, **whole | change(whole))
    error = refused(folder, capsys)
    assert f"{path} is damaged" in error and message in error


@pytest.mark.parametrize("place", [30, 100])
def test_a_text_whose_bytes_are_damaged_is_refused(place: int, folder: Path) -> None:
    """Readers of zip and npy files raise a dozen kinds of exceptions: tokenize's for one in an array's header."""
    path = text_path(folder, 1)
    for bit in range(8):
        content = bytearray(whole := path.read_bytes())
        content[place] ^= 1 << bit
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"00001\.npz is damaged"):
            read_recording(folder)
        path.write_bytes(whole)


@pytest.mark.parametrize("output", ["a file", "a file/x"])
def test_an_output_that_can_be_no_folder_is_refused_before_the_work(
    output: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speclight.infer.replay.run", lambda *_: pytest.fail("the work was begun"))
    (folder.parent / "a file").write_text("mine")
    assert "output must be a folder or a new one" in refused(folder, capsys, output)
    assert (folder.parent / "a file").read_text() == "mine"
