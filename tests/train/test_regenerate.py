"""Training rows of the target's own answers: each prompt once, whatever happened between the runs, none cut off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoint import save_tiny
from speclight.infer import generate
from speclight.infer.cli import main
from speclight.train.data import TextDataModule


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Ends most greedy texts within 60 tokens: several ids end a text."""
    folder = save_tiny(tmp_path_factory.mktemp("checkpoints") / "tiny", eos_token_id=[1, *range(2, 96, 8)])
    return str(folder)


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def regenerate(model: str, source: Path, output: Path, *flags: str) -> int:
    shared = ["--model", model, "--input", str(source), "--output", str(output), "--max-new-tokens", "12"]
    return main(["regenerate", *shared, *flags])


PROMPTS = [{"id": name, "prompt": f"say {name} {index * 'x'}"} for index, name in enumerate("abcdefgh")]


def test_answers_become_rows_in_the_order_of_the_prompts_and_cut_off_ones_do_not(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The data module reads them, and supervises the answers."""
    source, output = write(tmp_path / "in.jsonl", PROMPTS), tmp_path / "out.jsonl"
    assert regenerate(model, source, output) == 0
    answers = {row["id"]: row for row in rows_of(tmp_path / "out.jsonl.answers")}
    whole = [name for name in "abcdefgh" if answers[name]["finish_reason"] == "stop"]
    assert 0 < len(whole) < 8
    rows = rows_of(output)
    assert [row["id"] for row in rows] == whole
    assert rows[0]["messages"] == [
        {"role": "user", "content": f"say {whole[0]} {'abcdefgh'.index(whole[0]) * 'x'}"},
        {"role": "assistant", "content": answers[whole[0]]["text"]},
    ]
    line = f"{len(whole)} rows; left out: {8 - len(whole)} cut off at max_new_tokens (--keep-truncated keeps them)"
    assert line in capsys.readouterr().err
    data = TextDataModule(model, str(output), row_tokens=64)
    data.setup("fit")
    assert data.datasets["train"].summary.documents == len(whole)


def test_nothing_is_answered_twice_cut_off_or_not(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = write(tmp_path / "in.jsonl", PROMPTS), tmp_path / "out.jsonl"
    regenerate(model, source, output)
    before = output.read_bytes()

    def forbidden(*_: object) -> None:
        raise AssertionError("the engine must not be needed")

    monkeypatch.setattr(generate, "build_engine", forbidden)
    assert regenerate(model, source, output) == 0 and output.read_bytes() == before
    assert regenerate(model, source, output, "--keep-truncated") == 0
    assert [row["id"] for row in rows_of(output)] == list("abcdefgh")
    assert "8 rows\n" in capsys.readouterr().err


def test_prompts_removed_and_moved_after_a_kill_in_mid_row_are_each_there_once(model: str, tmp_path: Path) -> None:
    """Fails when a run resumes by row number, or takes half a line for an answer."""
    source, output = write(tmp_path / "in.jsonl", PROMPTS), tmp_path / "out.jsonl"
    regenerate(model, source, output, "--keep-truncated")
    expected = {row["id"]: row for row in rows_of(output)}
    answers = tmp_path / "out.jsonl.answers"
    whole = answers.read_bytes()
    output.unlink()
    for size in (0, len(whole) // 3, len(whole) - 5):
        answers.write_bytes(whole[:size])
        write(source, [PROMPTS[index] for index in (6, 0, 7, 3, 2)])
        assert regenerate(model, source, output, "--keep-truncated") == 0
        assert rows_of(output) == [expected[name] for name in "gahdc"], f"killed after {size} bytes"


def test_an_answer_that_is_there_is_replaced_and_raw_prompts_become_completions(model: str, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "somebody else's"}]
    source = write(tmp_path / "in.jsonl", [{"messages": chat}, {"prompt": "raw text"}])
    assert regenerate(model, source, tmp_path / "out.jsonl", "--no-chat", "--keep-truncated") == 0
    first, second = rows_of(tmp_path / "out.jsonl")
    assert first["messages"][0] == chat[0] and len(first["messages"]) == 2
    assert first["messages"][1]["content"] != "somebody else's"
    assert second.keys() == {"id", "prompt", "completion"} and second["prompt"] == "raw text"


@pytest.mark.parametrize(
    ("row", "flags", "message"),
    [
        ({"token_ids": [3, 4]}, [], "in.jsonl:1: token_ids cannot become a training row"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, [], "messages must hold a turn that is not the"),
        ({"prompt": "a"}, ["--output", "{in}"], "--output must be another file than --input"),
        ({"prompt": "a"}, ["--output", "{in}.other"], "exists without in.jsonl.other.answers"),
    ],
)
def test_what_cannot_be_regenerated_is_refused_and_nothing_is_written(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], row: dict, flags: list[str], message: str
) -> None:
    source = write(tmp_path / "in.jsonl", [row])
    write(tmp_path / "in.jsonl.other", [{"precious": 1}])
    before = sorted(path.name for path in tmp_path.iterdir())
    assert regenerate(model, source, tmp_path / "out.jsonl", *(flag.format(**{"in": source}) for flag in flags)) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_prompts_are_never_overwritten_by_their_answers(model: str, tmp_path: Path) -> None:
    source = write(tmp_path / "mine.answers", PROMPTS)
    before = source.read_bytes()
    assert regenerate(model, source, tmp_path / "mine", "--overwrite") == 2
    assert source.read_bytes() == before
