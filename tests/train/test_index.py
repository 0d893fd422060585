"""`speclight index`: what it stores, what it refuses, and that the engine and replay draft from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoint import TOKENS, save_tiny, tiny_tokenizer
from speclight.infer.cli import main
from speclight.infer.datastore import Datastore

ROWS = [{"text": "hello world"}, {"prompt": "one ", "completion": "two"}, {"text": "hello there"}]
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello world"}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("index") / "tiny"))


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, CHAT]))
    return str(path)


def index(model: str, rows: str, output: Path, *flags: str) -> int:
    return main(["index", "--model", model, "--data", rows, "--output", str(output), *flags])


def test_a_corpus_becomes_a_datastore_without_weights(model, rows, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("speclight.infer.loading.load_transformers", lambda *a, **k: pytest.fail("weights were read"))
    assert index(model, rows, tmp_path / "store") == 0
    store, tokenizer = Datastore.load(tmp_path / "store"), tiny_tokenizer()
    text = [*tokenizer("hello world").input_ids, tokenizer.eos_token_id]
    assert store.tokens[: len(text) + 1].tolist() == [*text, len(TOKENS)]
    assert store.num_documents == 4
    size = sum(path.stat().st_size for path in (tmp_path / "store").iterdir())
    said = f"{tmp_path}/store: {store.num_tokens} tokens of 4 documents, {size} bytes\n"
    assert capsys.readouterr().err.endswith(said)
    tail = tokenizer("hello").input_ids
    order, total, counts = store.continuations(store.matches(tail, 6))
    space = tokenizer(" ").input_ids[0]
    assert (order, total, counts) == (len(tail), 3, {space: 3})


@pytest.mark.parametrize("limit", [1, 5, 13, 20])
def test_it_holds_no_more_tokens_than_it_may_and_says_so(model, rows, tmp_path, capsys, limit) -> None:
    assert index(model, rows, tmp_path / "whole") == 0
    assert index(model, rows, tmp_path / "cut", "--max-tokens", str(limit)) == 0
    whole, cut = Datastore.load(tmp_path / "whole"), Datastore.load(tmp_path / "cut")
    assert cut.num_tokens == limit
    assert cut.tokens[:-1].tolist() == whole.tokens[: len(cut.tokens) - 1].tolist()
    assert f"max_tokens {limit} was reached, the rest is left out" in capsys.readouterr().err
    assert index(model, rows, tmp_path / "all", "--max-tokens", str(whole.num_tokens)) == 0
    assert "left out" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-tokens", "0"], "max_tokens must be from 1 to"),
        (["--model", "nowhere"], "model 'nowhere' does not exist"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["--data", "{here}/empty.jsonl"], "data must hold a text of at least two tokens"),
        (["--data", "{here}/bad.jsonl"], "bad.jsonl:1: a row needs exactly one of"),
        (["--output", "{here}"], "is not empty and holds no datastore"),
        (["--output", "{here}/bad.jsonl"], "is a file; it must be a folder"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_written(model, rows, tmp_path, capsys, flags, message) -> None:
    (tmp_path / "bad.jsonl").write_text('{"other": 1}\n')
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    before = {path.name for path in tmp_path.iterdir()}
    assert index(model, rows, tmp_path / "store", *(flag.format(here=tmp_path) for flag in flags)) == 2
    assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == before


def test_only_overwrite_replaces_a_datastore(model, rows, tmp_path, capsys) -> None:
    assert index(model, rows, tmp_path / "store") == 0
    assert index(model, rows, tmp_path / "store", "--max-tokens", "5") == 2
    assert "--overwrite to replace it" in capsys.readouterr().err
    assert index(model, rows, tmp_path / "store", "--max-tokens", "5", "--overwrite") == 0
    assert Datastore.load(tmp_path / "store").num_tokens == 5


# -- its use -----------------------------------------------------------------------------------------------------------


def generate(model: str, *flags: str) -> int:
    given = ["--model", model, "--prompt", "hello", "--kv-memory", "0.02", "--max-new-tokens", "24", "--json"]
    return main(["generate", *given, *flags])


def test_generate_drafts_from_it_and_says_what_that_brought(model, tmp_path, capsys) -> None:
    """End to end: the answer is indexed, so it is drafted. Fails when the option does not reach the drafter."""
    assert generate(model, "--method", "ar") == 0
    plain = json.loads(capsys.readouterr().out)
    prompt = tiny_tokenizer().apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    (tmp_path / "answers.jsonl").write_text(json.dumps({"text": prompt + plain["text"]}) + "\n")
    assert index(model, str(tmp_path / "answers.jsonl"), tmp_path / "store") == 0
    capsys.readouterr()
    found = {}
    for method, flags in (("logitspec", []), ("logitspec", ["--logitspec.datastore", f"{tmp_path}/store"])):
        assert generate(model, "--method", method, *flags) == 0
        out, err = capsys.readouterr()
        row = json.loads(out)
        assert row["text"] == plain["text"]
        found[bool(flags)] = row["stats"]
        assert ("from the datastore alone" in err) == bool(flags)
    assert found[True]["accepted_from"]["datastore"] > 0
    assert found[True]["target_passes"] < found[False]["target_passes"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--logitspec.tree", "paper"], "logitspec.tree must be adaptive for logitspec.datastore, got 'paper'"),
        (["--method", "prompt-lookup"], "logitspec.datastore is read by methods logitspec and auto; method is prompt"),
        (
            ["--method", "hispec+logitspec"],
            "logitspec.datastore is read by methods logitspec and auto; method is hispec",
        ),
        (["--logitspec.datastore", "{here}/nowhere"], "is not one: it has no datastore.json"),
        (["--logitspec.datastore", "{here}/other"], "belongs to another tokenizer: it was made with other"),
    ],
)
def test_a_datastore_that_cannot_serve_is_refused_before_weights_are_read(
    model, rows, tmp_path, capsys, monkeypatch, flags, message
) -> None:
    assert index(model, rows, tmp_path / "store") == 0
    Datastore.build([[1, 2]], len(TOKENS), "other").save(tmp_path / "other")
    monkeypatch.setattr("speclight.infer.generate.build_engine", lambda prepared: pytest.fail("weights were read"))
    flags = ["--logitspec.datastore", f"{tmp_path}/store", *(flag.format(here=tmp_path) for flag in flags)]
    assert generate(model, *flags) == 2
    assert message in capsys.readouterr().err


def test_hispec_beside_logitspec_keeps_the_papers_trees(model, rows, tmp_path) -> None:
    """A bench may compare both; the datastore is the adaptive trees' alone."""
    from speclight.infer.build import EngineOptions, LogitSpecOptions, build_engine, prepare

    assert index(model, rows, tmp_path / "store") == 0
    options = EngineOptions(model=model, kv_memory=0.02, logitspec=LogitSpecOptions(datastore=str(tmp_path / "store")))
    engine = build_engine(prepare(options, ["logitspec", "hispec+logitspec", "auto"]))
    assert engine.drafters["logitspec"]._trees.datastore.num_documents == 4
    assert type(engine.drafters["hispec+logitspec"].inner._trees).__name__ == "PaperTrees"


def test_replay_takes_one_of_the_recordings_tokenizer(model, rows, tmp_path, capsys) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question_id": 1, "category": "qa", "turns": ["hello"]}) + "\n")
    given = ["--model", model, "--data", str(questions), "--max-new-tokens", "12", "--kv-memory", "0.02"]
    assert main(["record", *given, "--output", str(tmp_path / "recording"), "--top-k", "8"]) == 0
    assert index(model, rows, tmp_path / "store") == 0

    def replay(*flags: str) -> int:
        given = ["--recording", str(tmp_path / "recording"), "--output", str(tmp_path / "report"), "--budgets", "8"]
        return main(["replay", *given, "--logitspec.datastore", str(tmp_path / "store"), *flags])

    assert replay() == 0
    assert "## Accepted by source" in (tmp_path / "report" / "report.md").read_text()
    for flags, message in (
        (["--trees", "paper,adaptive"], "logitspec.tree must be adaptive for logitspec.datastore, got 'paper'"),
        (["--methods", "prompt-lookup"], "logitspec.datastore is read by logitspec, which methods does not name"),
    ):
        assert replay(*flags) == 2
        assert message in capsys.readouterr().err
    meta = tmp_path / "recording" / "meta.json"
    for fingerprint, message in (("other", "this one is other"), ("", "does not say which tokenizer made it")):
        recorded = json.loads(meta.read_text())
        recorded["model"]["tokenizer"] = fingerprint
        meta.write_text(json.dumps(recorded))
        assert replay() == 2
        assert message in capsys.readouterr().err
