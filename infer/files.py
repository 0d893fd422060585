"""Files that a killed run must leave whole, and that two runs must not write at once."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


def read_text(option: str, path: str | Path) -> str:
    """The text of a file that the option names. Raises ValueError naming both when it cannot be read as UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {path} is not UTF-8 text ({error})") from error


ANEW = "use another --output, or --overwrite to begin anew"


def check_same(made: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError where what was noted beside results is not what shapes them now.

    made: `out.jsonl was written`.
    """
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            noted = f"{name}={before[name]!r}" if name in before else f"no note of {name}"
            raise ValueError(f"{made} with {noted}, now it is {now.get(name)!r}; {ANEW}")


def check_output_file(path: Path) -> None:
    """Raise ValueError for what is there and no file to replace: a folder, a pipe, a device."""
    if path.exists() and not path.is_file():
        raise ValueError(f"output {str(path)!r} is not a regular file; it must be one, or a new name")


def replace_file(path: Path, content: bytes) -> None:
    """Write a whole file, or leave the old one. Raises ValueError for what `check_output_file` refuses."""
    check_output_file(path)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    os.replace(partial, path)


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Others that ask for the folder wait until this ends: for checking a file, replacing it and locking it as one."""
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


@contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """The folder is this run's. Raises ValueError when another run has it."""
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ValueError(f"{folder} is being written by another run; wait for it, or use another --output") from None
    finally:
        os.close(held)


def check_unlocked(path: Path) -> None:
    """Raise ValueError while another run holds the file; one that is not there yet is nobody's."""
    if path.exists():
        open_locked(path).close()


def open_locked(path: Path) -> BinaryIO:
    """The file, to append to; it is held until it is closed. Raises ValueError when another run has it.

    `replace_file` puts another file under the name: see `check_unlocked` before and lock afterwards, `one_at_a_time`.
    """
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"{path} is being written by another run; wait for it, or use another --output") from None
    return file
