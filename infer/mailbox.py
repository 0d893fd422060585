"""Who gets a chunk: the open stream of its request, or whoever calls `step` next."""

from __future__ import annotations

from collections.abc import Iterable

from .request import StreamChunk


class Mailboxes:
    """Streams side by side, and `step` beside them, each get their own chunks, in order, once."""

    def __init__(self) -> None:
        self._streamed: dict[str, list[StreamChunk]] = {}  # per request of an open stream
        self._rest: list[StreamChunk] = []

    def open(self, request_id: str) -> None:
        """From now on a stream takes this request's chunks."""
        self._streamed[request_id] = []

    def close(self, request_ids: Iterable[str]) -> None:
        """No stream takes these any more; what waited for it is gone."""
        for request_id in request_ids:
            self._streamed.pop(request_id, None)

    def deliver(self, chunks: Iterable[StreamChunk]) -> None:
        for chunk in chunks:
            self._streamed.get(chunk.request_id, self._rest).append(chunk)

    def take(self, request_ids: Iterable[str]) -> list[StreamChunk]:
        """What has come for a stream's requests, request by request."""
        taken = []
        for request_id in request_ids:
            taken += self._streamed[request_id]
            self._streamed[request_id].clear()
        return taken

    def take_rest(self) -> list[StreamChunk]:
        """What no stream waits for."""
        taken, self._rest = self._rest, []
        return taken

    @property
    def has_rest(self) -> bool:
        return bool(self._rest)
