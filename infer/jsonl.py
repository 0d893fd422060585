"""JSON Lines files as users have them: where each row stands, and its fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_jsonl(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(a row's place, `F.jsonl:3`, and the row), line by line. Blank lines and a byte-order mark are passed over.

    Raises ValueError naming the place of the first line that is no JSON object, when it is reached.
    """
    with Path(path).open("rb") as file:  # not as text: a U+2028 in a row would end a line
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                where = f"{path}:{number}"
                yield where, parse_row(line, where)


def is_key(value: Any) -> bool:
    """Whether it can be the id of a row: a string or an integer."""
    return isinstance(value, str | int) and not isinstance(value, bool)


def parse_row(line: bytes, where: str, what: str = "a row") -> dict[str, Any]:
    """One line's JSON object, or a file's. Raises ValueError that begins with `where`."""
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {what} must be a JSON object, got {type(row).__name__}")
    return row
