"""One reader for all JSONL: the place named is the right one, and the first bad line is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from speclight.infer.jobs import read_jobs
from speclight.infer.jsonl import read_jsonl
from speclight.infer.questions import read_questions
from speclight.infer.request import GenerationParams


def test_places_count_all_lines_and_nothing_but_line_feeds_ends_one(tmp_path: Path) -> None:
    path = tmp_path / "F.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"a": "x\xe2\x80\xa8y"}\n{"a": 3}')
    assert list(read_jsonl(path)) == [
        (f"{path}:1", {"a": 1}),
        (f"{path}:4", {"a": "x\u2028y"}),
        (f"{path}:5", {"a": 3}),
    ]
    path.write_bytes(b"\xef\xbb\xbf")
    assert list(read_jsonl(path)) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "a row must be a JSON object, got list"),
        (b'"text"', "a row must be a JSON object, got str"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_every_reader_refuses_a_bad_line_in_the_same_words(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "F.jsonl"
    good = b'{"question_id": 1, "category": "qa", "turns": ["?"]}\n\n'
    for read, before in ((read_questions, good), (lambda path: read_jobs(path, GenerationParams()), b"\n\n")):
        path.write_bytes(before + line)
        with pytest.raises(ValueError, match=message) as raised:
            read(path)
        assert str(raised.value).startswith(f"{path}:3: ")
