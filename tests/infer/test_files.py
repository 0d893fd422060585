"""Two runs that begin at once."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from speclight.infer import files, jobs
from speclight.infer.files import held_folder, read_text, replace_file
from speclight.infer.jobs import Results


def test_a_run_that_begins_while_another_begins_is_refused_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one comes between the first one's check and its lock, the worst moment."""
    path, errors = tmp_path / "out.jsonl", list[str]()
    path.write_text('{"id": "a", "input": "of an earlier run"}\n')
    path.with_name("out.jsonl.meta.json").write_text("{}")

    def second() -> None:
        try:
            Results(path, [], {})
        except ValueError as error:
            errors.append(str(error))

    other = threading.Thread(target=second)

    def replace_slowly(target: Path, content: bytes) -> None:
        if not other.ident:
            other.start()
            other.join(timeout=0.3)
        files.replace_file(target, content)

    monkeypatch.setattr(jobs, "replace_file", replace_slowly)
    first = Results(path, [], {})
    other.join(timeout=10)
    assert [("being written by another run" in error) for error in errors] == [True]
    assert path.stat().st_ino == os.fstat(first._file.fileno()).st_ino
    first.close()
    assert path.read_text() == '{"id": "a", "input": "of an earlier run"}\n'


def test_a_held_folder_is_refused_to_others_until_it_is_free(tmp_path: Path) -> None:
    with held_folder(tmp_path), pytest.raises(ValueError, match="being written by another run"), held_folder(tmp_path):
        pass
    with held_folder(tmp_path):
        pass


def test_only_a_file_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe' is not a regular file"):
        replace_file(tmp_path / "pipe", b"x")
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").symlink_to(tmp_path / "new")
    replace_file(tmp_path / "link", b"x")


def test_a_text_that_cannot_be_read_is_named_with_its_option(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_bytes(b"\xff")
    for read, message in ((path, "is not UTF-8 text"), (tmp_path / "no", ": No such file"), (tmp_path, ": Is a dir")):
        with pytest.raises(ValueError, match=f"^chat_template {read}:? ?{message}"):
            read_text("chat_template", read)
    path.write_text("ä", encoding="utf-8")
    assert read_text("chat_template", path) == "ä"
