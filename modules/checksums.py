"""SHA256SUMS of a folder, as `sha256sum -c` reads it: written with its files, and compared byte for byte."""

from __future__ import annotations

from collections.abc import Mapping

SUMS = "SHA256SUMS"


def sums_file(digests: Mapping[str, str]) -> bytes:
    """What SHA256SUMS holds. digests: file name -> sha256 in hexadecimal, in the order of its lines."""
    return "".join(f"{digest}  {name}\n" for name, digest in digests.items()).encode()


def check_sums(where: str, digests: Mapping[str, str], stored: bytes, remedy: str) -> None:
    """Raise ValueError, naming what changed, unless `stored` is the SHA256SUMS of these digests: every byte counts.

    where: begins the message, `bundle 'heads'`. remedy: ends it, `get it again`.
    """
    if sums_file(digests) == stored:
        return
    lines = stored.splitlines()
    changed = [name for name, digest in digests.items() if f"{digest}  {name}".encode() not in lines]
    raise ValueError(
        f"{where} is damaged: {' and '.join(changed) or SUMS} changed since it was written (sha256 differs); {remedy}"
    )
