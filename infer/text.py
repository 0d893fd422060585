"""How committed token ids become text: streaming whole characters, and where a text ends.

Tokens are not characters: one character can span tokens, some decoders revise what they said of a run of bytes, and a
stop string can begin in one token and end in another. `TextStream` gives out only what no later token can change, so
its parts add up to the text of the whole, wherever the blocks of a speculative step happen to end. `cut_block` is the
one place that decides what ends a text. `tokenizers.DecodeStream` is not used: it has no flush, and raises where a run
of bytes is revised.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are no character, be it for good or because the rest has not come yet."""


class _Decoder:
    """Ids to text, a window of ids at a time: those since the text was last complete, and those before that as context.

    The context keeps the decoder's treatment of the beginning of a text (a stripped space) away from its middle.
    tail: what the ids so far decode to beyond what `push` has returned; later ids may change it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._probe = _byte_token(tokenizer)
        self._ids: list[int] = []
        self._context = 0  # of self._ids
        self._context_chars = self._done = 0  # characters of the window's text: of the context, and returned
        self.tail = ""

    def push(self, token_ids: Sequence[int]) -> str:
        self._ids += token_ids
        text = self._decode(self._ids)
        certain = max(self._num_certain(text), self._done)
        new, self.tail = text[self._done : certain], text[certain:]
        self._done = certain
        if not self.tail and certain > self._context_chars:
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._context_chars = self._done = len(self._decode(self._ids))
        return new

    def _num_certain(self, text: str) -> int:
        """How many characters stay whatever follows: not the last ones if they may be part of a character.

        Decoders with byte fallback replace every byte of a run that is not valid as a whole, so there a run is certain
        only when it has ended: a byte that is never valid is tried as the next token.
        """
        stable = text.rstrip(REPLACEMENT)
        if self._probe is None:
            return len(stable)
        tried = self._decode([*self._ids, self._probe])
        differing = (at for at, (ours, theirs) in enumerate(zip(stable, tried, strict=False)) if ours != theirs)
        return next(differing, min(len(stable), len(tried)))

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _byte_token(tokenizer: Any) -> int | None:
    """The id of the byte 0xFF in a vocabulary with byte fallback, None in others."""
    token_id = tokenizer.convert_tokens_to_ids("<0xFF>")
    return token_id if token_id is not None and tokenizer.convert_ids_to_tokens(token_id) == "<0xFF>" else None


class TextStream:
    """The text of one sequence as its ids are committed.

    What the pushes and `finish` return adds up to `text`, and that is `tokenizer.decode` of all ids without special
    tokens and without its optional clean-up of spaces, up to the first stop string. tokenizer None: no text at all.

    consumed: ids taken, the one that completed a stop string included; later ones are ignored. stopped: whether one
        did.

    Raises ValueError for stop strings without a tokenizer.
    """

    def __init__(self, tokenizer: Any | None, stop: Sequence[str] = ()) -> None:
        if stop and tokenizer is None:
            raise ValueError(f"stop needs a tokenizer and there is none, got {tuple(stop)!r}; use stop_token_ids")
        self._decoder = _Decoder(tokenizer) if tokenizer is not None else None
        self._stop = tuple(stop)
        self._held = ""  # certain text that could be the beginning of a stop string
        self._released: list[str] = []
        self.consumed = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything given out; the whole text after `finish`."""
        return "".join(self._released)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take committed ids; returns the text that has become certain."""
        parts = [[token_id] for token_id in token_ids] if self._stop else [token_ids]
        return "".join(self._push(part) for part in parts if part)

    def finish(self) -> str:
        """No ids will follow: returns the rest of the text, broken characters as replacement characters."""
        if self._decoder is None or self.stopped:
            return ""
        rest = self._held + self._decoder.tail
        end = self._stop_at(rest)
        self._held = self._decoder.tail = ""
        return self._release(rest[:end])

    def _push(self, token_ids: Sequence[int]) -> str:
        if self.stopped:
            return ""
        self.consumed += len(token_ids)
        if self._decoder is None:
            return ""
        self._held += self._decoder.push(token_ids)
        known = self._held + self._decoder.tail.rstrip(REPLACEMENT)
        end = self._stop_at(known)
        if end is not None:
            self.stopped = True
            return self._release(known[:end])
        cut = len(self._held) - self._num_undecided()
        ready, self._held = self._held[:cut], self._held[cut:]
        return self._release(ready)

    def _stop_at(self, text: str) -> int | None:
        """Where the first stop string begins, None without one."""
        return min((at for at in map(text.find, self._stop) if at >= 0), default=None)

    def _num_undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max(map(len, self._stop), default=1) - 1)
        return next((n for n in range(longest, 0, -1) if self._begins_stop(self._held[-n:])), 0)

    def _begins_stop(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stop)

    def _release(self, text: str) -> str:
        if text:
            self._released.append(text)
        return text


def cut_block(
    token_ids: Sequence[int], stop_ids: Collection[int], max_tokens: int, stream: TextStream
) -> tuple[list[int], str, Literal["stop", "length"] | None]:
    """What of a committed block is emitted, the text that became certain with it, and why the text ends there.

    Token by token, in this order: a stop token, a stop string, the length cap. The token that ends the text is kept.
    `cut_block([10, 11, 2, 20], {2}, 4, stream)` keeps [10, 11, 2] for "stop", whatever the cap beyond 3 is.

    max_tokens: how many more the text may have. The block's kept ids are pushed into `stream`.
    """
    kept = list(token_ids[: max(max_tokens, 0)])
    stop = next((index for index, token_id in enumerate(kept) if token_id in stop_ids), None)
    if stop is not None:
        kept = kept[: stop + 1]
    before = stream.consumed
    text = stream.push(kept)
    kept = kept[: stream.consumed - before]
    if stop is not None or stream.stopped:
        return kept, text, "stop"
    return kept, text, "length" if len(kept) >= max_tokens else None
