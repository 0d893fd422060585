"""The process in which unit_tests.py runs a program: limits itself, runs it and its tests, says if it came through.

Run as a file with nothing but the standard library, so that it starts in milliseconds and shares nothing with the
training. Reads an order (JSON) from stdin; writes to the order's `result` descriptor what stands between the program
and the network, and behind the last test the order's `token`. A program that ends the process early leaves it out.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
import types
from collections.abc import Mapping
from typing import Any

NOBODY = 65534
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # unshare(2)
PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 8, 38  # prctl(2)
CAPABILITIES_V3, CAP_DAC_READ_SEARCH = 0x20080522, 1 << 2  # capset(2)

LIBC = ctypes.CDLL(None, use_errno=True)


class _CapabilityHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


def main() -> None:
    order = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    try:
        network = confine(order)
    except Exception as error:
        os.write(order["result"], f"error: {error!r}\n".encode())
        raise
    os.write(order["result"], f"{network}\n".encode())
    run(order["prefix"], order["code"], order["tests"])
    os.write(order["result"], order["token"].encode())


def confine(order: Mapping[str, Any]) -> str:
    """What stands between this process and the network: a "namespace" of its own, or blocked "sockets"."""
    network = "namespace" if leave_network() else "sockets"
    if os.geteuid() == 0:
        become_nobody()
    else:
        keep_capabilities(0)  # a user namespace of one's own comes with all of them
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    set_limits(order["cpu_seconds"], order["memory_bytes"], order["file_bytes"])
    if network == "sockets":
        block_sockets()
    return network


def leave_network() -> bool:
    """Move to a network namespace that has no interface. False where that is not permitted."""
    return LIBC.unshare(CLONE_NEWNET if os.geteuid() == 0 else CLONE_NEWUSER | CLONE_NEWNET) == 0


def become_nobody() -> None:
    """Root may start any number of processes, so be someone else.

    Where the standard library lies in root's own home, the right to read any file is kept: imports would fail.
    """
    os.chown(".", NOBODY, NOBODY)
    LIBC.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    keep_capabilities(0 if os.access(os.__file__, os.R_OK) else CAP_DAC_READ_SEARCH)


def keep_capabilities(mask: int) -> None:
    header = _CapabilityHeader(CAPABILITIES_V3, 0)
    sets = (ctypes.c_uint32 * 6)(mask, mask, 0, 0, 0, 0)  # effective, permitted, inheritable; then the upper halves
    if LIBC.capset(ctypes.byref(header), sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def set_limits(cpu_seconds: int, memory_bytes: int, file_bytes: int) -> None:
    """For good: hard limits. No process and no thread can be started."""
    limits = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def block_sockets() -> None:
    """The weaker way: imports of `socket`, and of all that needs it, fail."""
    sys.modules["socket"] = sys.modules["_socket"] = None  # type: ignore[assignment]


def run(prefix: str, code: str, tests: str) -> None:
    """Raises whatever the program or its tests raise. They are compiled apart: no open quote reaches the tests."""
    execute = exec  # the program may put something else in its place
    checks = compile(tests, "tests", "exec", dont_inherit=True)
    program = longest_program(prefix, code)
    module = types.ModuleType("answer")  # so no `if __name__ == "__main__":` runs; dataclasses look their module up
    sys.modules["answer"] = module
    execute(program, module.__dict__)
    execute(checks, module.__dict__)


def longest_program(prefix: str, code: str) -> Any:
    """Of the code as many lines as can be compiled behind the prefix: an answer may break off, or go on in prose."""
    lines = code.splitlines(keepends=True)
    for end in range(len(lines), 0, -1):
        try:
            return compile(prefix + "".join(lines[:end]), "answer", "exec", dont_inherit=True)
        except (SyntaxError, ValueError):  # ValueError: a null character
            continue
    return compile(prefix, "answer", "exec", dont_inherit=True)


if __name__ == "__main__":
    main()
