"""Who gets a chunk: the open stream of its request, or whoever calls `step` next."""

from __future__ import annotations

from collections.abc import Iterable

from .request import StreamChunk

Mailbox = list[StreamChunk]


class Mailboxes:
    """Streams side by side, and `step` beside them, each get their own chunks, in the order they came, once."""

    def __init__(self) -> None:
        self._boxes: dict[str, Mailbox] = {}  # of each request of an open stream, the stream's
        self._rest: Mailbox = []

    def open(self, request_id: str, box: Mailbox) -> None:
        """From now on this request's chunks go into a stream's box."""
        self._boxes[request_id] = box

    def close(self, request_ids: Iterable[str]) -> None:
        """No stream takes these any more."""
        for request_id in request_ids:
            self._boxes.pop(request_id, None)

    def deliver(self, chunks: Iterable[StreamChunk]) -> None:
        for chunk in chunks:
            self._boxes.get(chunk.request_id, self._rest).append(chunk)

    def take_rest(self) -> list[StreamChunk]:
        """What no stream waits for."""
        taken, self._rest = self._rest, []
        return taken

    @property
    def has_rest(self) -> bool:
        return bool(self._rest)
