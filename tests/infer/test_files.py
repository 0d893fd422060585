"""Two runs that begin at once."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from speclight.infer import files, jobs
from speclight.infer.files import held_folder
from speclight.infer.jobs import Results


def test_a_run_that_begins_while_another_begins_is_refused_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one comes between the first one's check and its lock, the worst moment."""
    path, errors = tmp_path / "out.jsonl", list[str]()

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


def test_a_held_folder_is_refused_to_others_until_it_is_free(tmp_path: Path) -> None:
    with held_folder(tmp_path), pytest.raises(ValueError, match="being written by another run"), held_folder(tmp_path):
        pass
    with held_folder(tmp_path):
        pass
