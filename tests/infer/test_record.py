"""`speclight record`: what it stores, what it continues, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoint import save_tiny
from speclight.infer.cli import main
from speclight.infer.recording import read_recording, text_path

GROUPS = ["writing", "qa", "rag"]
QUESTIONS = [{"question_id": n, "category": GROUPS[n % 3], "turns": ["ab" * (n + 2)]} for n in range(7)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("record") / "tiny"))


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return str(path)


def record(model: str, data: str, output: Path, *flags: str) -> int:
    fixed = ["--max-new-tokens", "6", "--kv-memory", "0.02", "--top-k", "8"]
    return main(["record", "--model", model, "--data", data, "--output", str(output), *fixed, *flags])


def test_a_recording_holds_prompts_answers_and_likely_tokens_and_can_be_replayed(model, data, tmp_path) -> None:
    folder = tmp_path / "recording"
    assert record(model, data, folder, "--per-group", "1") == 0
    recording = read_recording(folder)
    assert [text.question_id for text in recording.texts] == [0, 1, 2]
    for text in recording.texts:
        assert text.top_ids.shape == text.top_logprobs.shape == (len(text.token_ids), 8)
        assert 1 <= len(text.token_ids) - text.num_prompt <= 6
        greedy = text.top_ids[text.num_prompt - 1 : -1, 0]
        assert greedy.tolist() == text.token_ids[text.num_prompt :].tolist()
    flags = ["--budgets", "4", "--output", str(tmp_path / "report")]
    assert main(["replay", "--recording", str(folder), *flags]) == 0


def test_the_rest_is_what_the_choice_leaves_out(model, data, tmp_path) -> None:
    assert record(model, data, tmp_path / "rest", "--per-group", "1", "--rest") == 0
    assert sorted(text.question_id for text in read_recording(tmp_path / "rest").texts) == [3, 4, 5, 6]


def test_a_second_run_does_only_what_is_missing(model, data, tmp_path, capsys) -> None:
    folder = tmp_path / "recording"
    record(model, data, folder, "--limit", "3")
    whole = {path.name: path.read_bytes() for path in folder.glob("*.npz")}
    text_path(folder, 1).unlink()
    kept = text_path(folder, 0).stat().st_mtime_ns
    assert record(model, data, folder, "--limit", "3") == 0
    assert text_path(folder, 0).stat().st_mtime_ns == kept
    assert {path.name: path.read_bytes() for path in folder.glob("*.npz")} == whole
    capsys.readouterr()
    assert record(model, data, folder, "--limit", "3") == 0
    assert "nothing left to do" in capsys.readouterr().err


def test_other_settings_are_refused_until_overwritten(model, data, tmp_path, capsys) -> None:
    folder = tmp_path / "recording"
    record(model, data, folder, "--limit", "2")
    assert record(model, data, folder, "--limit", "2", "--max-new-tokens", "5") == 2
    assert "was recorded with max_new_tokens=6, now it is 5" in capsys.readouterr().err
    assert record(model, data, folder, "--limit", "1") == 2
    assert "holds other questions" in capsys.readouterr().err
    assert record(model, data, folder, "--limit", "1", "--overwrite") == 0
    assert len(read_recording(folder).texts) == len(list(folder.glob("*.npz"))) == 1


def test_other_weights_or_another_template_are_another_recording(model, data, tmp_path, capsys) -> None:
    """Though they lie in folders of one name."""
    folder, template = tmp_path / "recording", tmp_path / "chat.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    assert record(model, data, folder, "--limit", "2", "--chat-template", str(template)) == 0
    text_path(folder, 1).unlink()
    other = str(save_tiny(tmp_path / Path(model).name, seed=1))
    assert record(other, data, folder, "--limit", "2", "--chat-template", str(template)) == 2
    assert "was recorded with weights=" in capsys.readouterr().err
    template.write_text("{{ messages[0]['content'] }}b")
    assert record(model, data, folder, "--limit", "2", "--chat-template", str(template)) == 2
    assert "was recorded with chat_template=" in capsys.readouterr().err
    assert record(model, data, folder, "--limit", "2") == 2, "without the template it had"
    assert "was recorded with chat_template=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--top-k", "0"], "top_k must be at least 1, got 0"),
        (["--stride", "0"], "stride must be at least 1, got 0"),
        (["--rest"], "rest must leave questions"),
        (["--max-new-tokens", "510"], "question_id 0: the prompt has"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_a_mistake_is_named_before_weights_are_read(model, data, tmp_path, capsys, monkeypatch, flags, message) -> None:
    monkeypatch.setattr("speclight.infer.record.build_engine", lambda prepared: pytest.fail("weights were read"))
    assert record(model, data, tmp_path / "o", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_folder_of_something_else_is_left_alone(model, data, tmp_path, capsys) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("x")
    assert record(model, data, tmp_path / "notes", "--overwrite") == 2
    assert "is not empty and holds no recording" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("x" * 600, [], "question_id 7: prompt has 605 tokens; the longest text here is 512"),
        ("a\ud800", ["--no-chat"], "question_id 7: prompt cannot be tokenised"),
        ("ab", ["--chat-template", "{here}/raises"], "question_id 7: the chat template refuses these messages: no"),
        ("ab", ["--max-new-tokens", "9999"], "max_new_tokens must leave room for a prompt: at most 511 of 512 tokens"),
    ],
)
def test_a_prompt_that_cannot_run_is_named_by_its_question(model, tmp_path, capsys, text, flags, message) -> None:
    (tmp_path / "raises").write_text("{{ raise_exception('no') }}")
    (tmp_path / "q.jsonl").write_text(json.dumps({"question_id": 7, "category": "qa", "turns": [text]}))
    flags = [flag.format(here=tmp_path) for flag in flags]
    assert record(model, str(tmp_path / "q.jsonl"), tmp_path / "o", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_refused_run_neither_loses_a_recording_nor_binds_the_next(model, data, tmp_path, capsys, monkeypatch) -> None:
    """That a cache has no room for a prompt is found out only once the weights are there."""
    folder, items = tmp_path / "recording", "speclight.infer.record.make_items"
    with monkeypatch.context() as small:
        small.setattr(items, lambda *_: ([], {3: "no room"}))
        assert record(model, data, folder, "--limit", "2") == 2
        assert "question_id 3 cannot be recorded: no room" in capsys.readouterr().err
    assert record(model, data, folder, "--limit", "2", "--top-k", "4") == 0
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(items, lambda *_: ([], {3: "no room"}))
    assert record(model, data, folder, "--limit", "1", "--overwrite") == 2
    assert "a larger kv_memory helps" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def test_a_recording_killed_before_it_named_its_model_is_continued_and_a_damaged_one_refused(
    model, data, tmp_path, capsys
) -> None:
    folder = tmp_path / "recording"
    record(model, data, folder, "--limit", "2")
    whole = json.loads((folder / "meta.json").read_text())
    text_path(folder, 1).unlink()
    (folder / "meta.json").write_text(json.dumps({name: whole[name] for name in whole if name != "model"}))
    assert record(model, data, folder, "--limit", "2") == 0
    assert json.loads((folder / "meta.json").read_text()) == whole
    (folder / "meta.json").write_text(json.dumps(whole | {"settings": "x"}))
    assert record(model, data, folder, "--limit", "2") == 2
    assert f"{folder / 'meta.json'}: settings must be an object, got 'x'" in capsys.readouterr().err
    assert record(model, data, folder, "--limit", "2", "--overwrite") == 0
    assert len(read_recording(folder).texts) == 2
