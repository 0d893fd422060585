"""A tokenizer made here has every text, ends texts and turns, and is what a model from scratch needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from speclight.infer.cli import main
from speclight.infer.loading import ModelSource, load_tokenizer
from speclight.train.documents import encode_row

ROWS = [
    {"text": "the cat sat on the mat, the cat sat on the mat"},
    {"messages": [{"role": "user", "content": "where sat the cat"}, {"role": "assistant", "content": "on the mat"}]},
    {"prompt": "the cat ", "completion": "sat"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("tokenizer")
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (home / "more.txt").write_text("on the mat\n" * 3)
    inputs = [str(home / "rows.jsonl"), str(home / "more.txt")]
    assert main(["tokenizer", "--input", *inputs, "--vocab-size", "270", "--output", str(home / "made")]) == 0
    return home / "made"


def test_it_has_the_size_asked_for_and_every_text_comes_back(folder: Path) -> None:
    tokenizer = load_tokenizer(ModelSource(str(folder), str(folder)))
    assert len(tokenizer) == 270
    for text in ("the cat", " a😀ñ\n\t", "x" * 50):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer("the cat").input_ids) < len("the cat")


def test_texts_and_turns_end_with_its_end_token(folder: Path) -> None:
    tokenizer = load_tokenizer(ModelSource(str(folder), str(folder)))
    end = tokenizer.eos_token_id
    assert encode_row(ROWS[0], tokenizer, {end}).token_ids[-1] == end
    chat = encode_row(ROWS[1], tokenizer, {end})
    learned = [token for token, on in zip(chat.token_ids, chat.supervised, strict=True) if on]
    assert tokenizer.decode(learned) == "on the mat</s>"
    prompt = tokenizer.apply_chat_template(ROWS[1]["messages"][:1], add_generation_prompt=True, return_dict=True)
    assert list(chat.token_ids[: len(prompt["input_ids"])]) == prompt["input_ids"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vocab-size", "100"], "vocab_size must be at least 262, got 100"),
        (["--min-frequency", "0"], "min_frequency must be at least 1"),
        (["--output", "{here}"], "is not empty; choose another folder, or --overwrite"),
        (["--input", "{here}/bad.jsonl"], "bad.jsonl:1: a row needs text, messages, or prompt"),
    ],
)
def test_a_mistake_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"other": 1}\n')
    given = ["--input", f"{tmp_path}/bad.jsonl", "--output", f"{tmp_path}/made"]
    assert main(["tokenizer", *given, *(flag.format(here=tmp_path) for flag in flags)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    (tmp_path / "file").write_text("mine")
    given = ["--input", str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "file"), "--overwrite"]
    assert main(["tokenizer", *given]) == 2
    assert "is a file; it must be a folder" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "content"), [("rows.jsonl", b'{"text": "\\ud800"}\n'), ("bad.txt", b"\xff\xfe\xff")])
def test_what_is_not_text_is_refused_with_its_place(
    name: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main(["tokenizer", "--input", str(tmp_path / name), "--output", str(tmp_path / "made")]) == 2
    assert name in capsys.readouterr().err
