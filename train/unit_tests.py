"""Programs that models write, run with their tests (MBPP, HumanEval).

NOT A SANDBOX. This holds against mistakes: endless loops, memory and disk filled, processes multiplied, sockets opened,
an exit before the tests. It does not hold against a program that means harm: it runs as you, or as `nobody` where you
are root, sees every file that it may read (all there are, where root's Python lies in root's home), can write wherever
anyone may, can signal your other processes, and shares its own with its tests. Train where you can lose the machine: a
container or virtual machine without secrets, without mounts that matter.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from .processes import kill_group, read_until
from .reward_function import Answer, RewardFunction

RUNNER = Path(__file__).with_name("run_untrusted.py")
FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
MEBI = 1 << 20
START_SECONDS = 30.0  # of the interpreter, on a machine that is busy
OFF = (
    "unit-tests RUNS PROGRAMS THAT A MODEL WROTE ON THIS MACHINE. Limits on time, memory, files, processes and the "
    "network hold against mistakes, not against malice: it is not a sandbox. Use a container or virtual machine that "
    "you can lose, and say allow_execution=True"
)
OPEN_NETWORK = (
    "unit-tests: no network namespace is permitted here, so programs are only kept from importing `socket`; "
    "run where user namespaces are permitted, or without a network"
)


class UnitTests(RewardFunction):
    """1 when the answer's program passes all its tests, else 0; {0, 1}. OFF unless `allow_execution=True`.

    NOT A SANDBOX against an adversary: read the head of this file first. Needs Linux. A program gets the standard
    library, an empty folder, no environment, no network, no further processes or threads.

    Of a row it reads
        tests: a program, or a list of statements, that raises when the answer is wrong (MBPP's test_list);
        setup: optional, a program or list of statements that runs between the answer and the tests;
        entry_point: optional, the function that the tests' `check` is called with (HumanEval);
        prefix: optional, code that the answer goes on with (HumanEval's prompt); defining everything anew is fine too.

    seconds: wall-clock time of one program, tests included. memory_mb: its address space. file_mb: its largest file.
    workers: programs at a time; by default as many as there are cores, at most 8.

    Raises ValueError without `allow_execution`, RuntimeError where the limits cannot be set.
    """

    name = "unit-tests"

    def __init__(
        self,
        allow_execution: bool = False,
        seconds: float = 5.0,
        memory_mb: int = 1024,
        file_mb: int = 16,
        workers: int | None = None,
    ) -> None:
        if allow_execution is not True:
            raise ValueError(f"{OFF} (got {allow_execution!r})")
        sizes = {"memory_mb": memory_mb, "file_mb": file_mb, "workers": 1 if workers is None else workers}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 < seconds < math.inf:
            raise ValueError(f"seconds must be above 0, got {seconds}")
        if sys.platform != "linux":
            raise RuntimeError(f"unit-tests needs Linux, whose limits it uses, got {sys.platform}")
        self.allow_execution, self.seconds = allow_execution, seconds
        self.memory_mb, self.file_mb, self.workers = memory_mb, file_mb, workers

    def check(self, row: Mapping[str, Any]) -> None:
        if not _statements(row, "tests").strip():
            raise ValueError(f"tests must be a program or a list of statements, got {row.get('tests')!r}")
        _statements(row, "setup")
        entry_point, prefix = row.get("entry_point"), row.get("prefix", "")
        if entry_point is not None and not (isinstance(entry_point, str) and entry_point.isidentifier()):
            raise ValueError(f"entry_point must be the name of a function, got {entry_point!r}")
        if not isinstance(prefix, str):
            raise ValueError(f"prefix must be code, got {prefix!r}")

    def score(self, answers: Sequence[Answer]) -> list[float]:
        workers = self.workers or min(8, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(workers) as pool:
            outcomes = list(pool.map(self._outcome, answers))
        if any(network != "namespace" for network, _ in outcomes):
            warnings.warn(OPEN_NETWORK, stacklevel=3)
        return [float(passed) for _, passed in outcomes]

    def _outcome(self, answer: Answer) -> tuple[str, bool]:
        """(what keeps the program from the network, whether it passed)."""
        token = secrets.token_hex()
        order = {
            "code": extract_code(answer.text, answer.row.get("entry_point")),
            "prefix": answer.row.get("prefix", ""),
            "tests": _tests(answer.row),
            "token": token,
            "cpu_seconds": math.ceil(self.seconds),
            "memory_bytes": self.memory_mb * MEBI,
            "file_bytes": self.file_mb * MEBI,
        }
        network, _, rest = _run(order, self.seconds).partition("\n")
        if network not in ("namespace", "sockets"):
            reason = network or f"the process did not start within {START_SECONDS:.0f} s"
            raise RuntimeError(f"unit-tests: the limits could not be set, so no program was run ({reason})")
        return network, rest == token


def extract_code(answer: str, entry_point: str | None = None) -> str:
    """The answer's program: its first fenced block of Python, or the first that defines `entry_point`; else all of it.

    A fence that is never closed ends with the answer.
    """
    blocks = [code for language, code in FENCE.findall(answer) if language.lower() in ("", "py", "python", "python3")]
    if entry_point is not None:
        blocks = [code for code in blocks if re.search(rf"\bdef {entry_point}\b", code)] or blocks
    return blocks[0] if blocks else answer


def _tests(row: Mapping[str, Any]) -> str:
    call = f"check({row['entry_point']})" if row.get("entry_point") else ""
    return "\n".join((_statements(row, "setup"), _statements(row, "tests"), call))


def _statements(row: Mapping[str, Any], field: str) -> str:
    value = row.get(field) or ""
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, list | tuple) or not all(isinstance(line, str) for line in lines):
        raise ValueError(f"{field} must be a program or a list of statements, got {value!r}")
    return "\n".join(lines)


def _run(order: Mapping[str, Any], seconds: float) -> str:
    """What the runner wrote; the program has `seconds` once it may start. No process of its group is left."""
    read_end, write_end = os.pipe()
    try:
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder, TemporaryFile() as stdin:
            stdin.write(json.dumps({**order, "result": write_end}).encode())
            stdin.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(RUNNER)],
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(write_end,),
                start_new_session=True,
            )
            os.close(write_end)
            write_end = -1
            try:
                written = read_until(read_end, b"\n", time.monotonic() + START_SECONDS)
                written += read_until(read_end, None, time.monotonic() + seconds) if written else b""
                return written.decode(errors="replace")
            finally:
                kill_group(process)
    finally:
        os.close(read_end)
        if write_end >= 0:
            os.close(write_end)
