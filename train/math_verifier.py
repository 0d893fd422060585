"""math-verify in a process of its own: no expression can hang, exhaust or crash the training.

The library limits time by signals, which only work in a main thread. Here the waiting side limits it: this file, run as
a script, is the process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec

START_SECONDS = 60.0  # sympy is large, and the disk may be cold
MEMORY = 4 << 30  # bytes of address space; 10**10**10 would take all there are


def check_installed() -> None:
    """Raise ValueError, naming the pip install, when math-verify is not there."""
    if find_spec("math_verify") is None:
        raise ValueError("verifier 'math-verify' needs a package that is missing: pip install math-verify")


def verify_all(pairs: Sequence[tuple[Sequence[str], str]], seconds: float) -> list[bool]:
    """Whether each (references, answer) agrees on any reference's value.

    Whatever takes longer than `seconds`, or ends the process, does not; the others go on in a new one.

    Raises RuntimeError when the process cannot start.
    """
    verdicts: list[bool] = []
    while len(verdicts) < len(pairs):
        verdicts += _verify_some(pairs[len(verdicts) :], seconds)
    return verdicts


def _verify_some(pairs: Sequence[tuple[Sequence[str], str]], seconds: float) -> list[bool]:
    """Verdicts up to and with the first pair that the process does not survive."""
    from .processes import kill_group, read_until

    command = [sys.executable, "-I", __file__]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, bufsize=0, start_new_session=True, **pipes)  # type: ignore[call-overload]
    verdicts: list[bool] = []
    try:
        started = read_until(process.stdout.fileno(), b"\n", time.monotonic() + START_SECONDS)
        if started != b"ready\n":
            raise RuntimeError(f"math-verify did not start; `{' '.join(command)}` shows why")
        for references, answer in pairs:
            verdict = _ask(process, references, answer, time.monotonic() + seconds)
            verdicts.append(bool(verdict))
            if verdict is None:
                break
    finally:
        kill_group(process)
        process.stdin.close()
        process.stdout.close()
    return verdicts


def _ask(process: subprocess.Popen[bytes], references: Sequence[str], answer: str, deadline: float) -> bool | None:
    """None when there is no verdict in time. bufsize is 0, so a write is a write."""
    from .processes import read_until

    assert process.stdin is not None and process.stdout is not None
    request = json.dumps([list(references), answer]).encode() + b"\n"
    try:
        while request:
            request = request[process.stdin.write(request) :]
    except BrokenPipeError:
        return None
    said = read_until(process.stdout.fileno(), b"\n", deadline)
    return {b"1\n": True, b"0\n": False}.get(said)


def _serve() -> None:
    """The process: a verdict for each line of stdin."""
    import resource

    out, sys.stdout = sys.stdout, sys.stderr  # the pipe is for verdicts, not for what libraries have to say
    from math_verify import parse, verify

    def value(text: str, is_reference: bool) -> list:
        text = text.rsplit("####", 1)[-1].strip()
        text = f"${text}$" if is_reference and "$" not in text and "\\boxed" not in text else text
        return parse(text, parsing_timeout=None)

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        references, answer = json.loads(line)
        try:
            found = value(answer, is_reference=False)
            agrees = any(verify(value(r, is_reference=True), found, timeout_seconds=None) for r in references)
        except Exception:  # sympy raises whatever it likes at what a model writes; that is no right answer
            agrees = False
        print(int(agrees), file=out, flush=True)


if __name__ == "__main__":
    _serve()
