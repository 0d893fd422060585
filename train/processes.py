"""Child processes that may hang: reading from them with a deadline, and ending them with all that they started."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from contextlib import suppress

CHUNK = 4096


def read_until(fd: int, end: bytes | None, deadline: float, limit: int = 1 << 16) -> bytes:
    """What comes out of a pipe up to `end`, its closing, `deadline` (time.monotonic) or `limit` bytes."""
    poll, data = select.poll(), b""
    poll.register(fd, select.POLLIN)
    while (end is None or end not in data) and len(data) < limit:
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not poll.poll(1000 * remaining):
            break
        chunk = os.read(fd, CHUNK)
        if not chunk:
            break
        data += chunk
    return data


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process begun with start_new_session, and its descendants that did not leave its group; wait for it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
