"""How committed token ids become text: streaming whole characters, and where a text ends.

Tokens are not characters: one character can span tokens, some decoders revise what they said of a run of bytes, and a
stop string can begin in one token and end in another. `TextStream` gives out only what no later token can change, so
its parts add up to the text of the whole, wherever the blocks of a speculative step happen to end. `cut_block` is the
one place that decides what ends a text. `tokenizers.DecodeStream` is not used: it has no flush, and raises where a run
of bytes is revised.
"""

from __future__ import annotations

import codecs
import itertools
import math
import re
from collections.abc import Collection, Sequence
from typing import Any, Literal

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are no character, be it for good or because the rest has not come yet."""

UNSETTLED = 3  # replacement characters that bytes still to come can turn into a character: it has at most four bytes
WINDOW = 32  # ids that are always enough to go on from
BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class _Decoder:
    """Ids to text, a window of ids at a time: those since the text was last complete, and those before that as context.

    The context keeps the decoder's treatment of the beginning of a text (a stripped space) away from its middle. Only
    the window is decoded, and it stays short whatever comes, so a text takes time linear in its length.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0  # of self._ids
        self._context_chars = self._done = 0  # characters of the window's text: of the context, and returned
        self._open = ""  # what the window's text has beyond that

    def push(self, token_ids: Sequence[int]) -> str:
        """Take ids, none that never leaves text; returns the text that no later id can change."""
        self._ids += token_ids
        text = self._decode(self._ids)
        new = self._take(text, max(len(text) - _num_unsettled(text), self._done))
        if not self._open and self._done > self._context_chars:
            self._forget(self._context)
        elif len(self._ids) > 2 * WINDOW:
            self._shorten(text)
        return new

    def tail(self, length: int | None = None) -> str:
        """What the ids so far decode to beyond what `push` has returned, or its end, at least that long if it is.

        Later ids may change it.
        """
        return self._open

    def _take(self, text: str, certain: int) -> str:
        new, self._open = text[self._done : certain], text[certain:]
        self._done = certain
        return new

    def _forget(self, count: int) -> None:
        """Drop ids from the window; all that is left is context, and its text complete."""
        self._ids = self._ids[count:]
        self._context = len(self._ids)
        self._context_chars = self._done = len(self._decode(self._ids))

    def _shorten(self, text: str) -> None:
        """Drop all but the last ids where the text is not complete at any: if the rest, read alone, says the same.

        Its first characters may differ, cut in the middle, if they have been returned. What follows changes only its
        last ones, so the two go on agreeing.
        """
        rest = self._ids[-WINDOW:]
        alone = self._decode(rest)
        shift = len(text) - len(alone)
        if self._done - shift > UNSETTLED and alone[UNSETTLED:] == text[shift + UNSETTLED :]:
            self._ids, self._context, self._context_chars = rest, 0, 0
            self._done -= shift

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class _FallbackDecoder(_Decoder):
    """For vocabularies with byte fallback, whose decoders judge a run of byte tokens as a whole.

    A run that is not valid UTF-8 becomes a replacement character for each byte, so that nothing of it is certain before
    it has ended or is broken beyond repair. Of a long run only its verdict so far stays in the window: one byte token
    that is a character, or one that never is, stands for what was dropped.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._whole, self._broken = (tokenizer.convert_tokens_to_ids(token) for token in ("<0x61>", "<0xFF>"))
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._dropped: list[str] = []  # text of the run that has left the window, should the run be valid
        self._dropped_bytes = 0  # how many replacement characters it is otherwise
        self._run_is_broken = False
        self._run_start = 0  # in self._ids

    def tail(self, length: int | None = None) -> str:
        wanted = math.inf if length is None else length
        if self._is_incomplete:
            return REPLACEMENT * int(min(self._dropped_bytes, wanted)) + self._open
        parts = [self._open]
        for text in reversed(self._dropped):
            if sum(map(len, parts)) >= wanted:
                break
            parts.append(text)
        return "".join(reversed(parts))

    @property
    def _is_incomplete(self) -> bool:
        """Whether the run ends inside a character."""
        return bool(self._utf8.getstate()[0])

    def push(self, token_ids: Sequence[int]) -> str:
        values = map(_byte, self._tokenizer.convert_ids_to_tokens(token_ids))
        parts = []
        for is_run, group in itertools.groupby(zip(token_ids, values, strict=True), lambda pair: pair[1] is not None):
            pairs = list(group)
            ids, run = [token_id for token_id, _ in pairs], bytes(value for _, value in pairs if value is not None)
            parts.append(self._push_run(ids, run) if is_run else self._push_others(ids))
        return "".join(parts)

    def _push_others(self, token_ids: list[int]) -> str:
        """What ends a run makes it certain."""
        valid = not (self._run_is_broken or self._is_incomplete)
        before = "".join(self._dropped) if valid else REPLACEMENT * self._dropped_bytes
        self._begin_run(broken=False)
        self._ids += token_ids
        text = self._decode(self._ids)
        new = self._take(text, max(len(text), self._done))
        if self._done > self._context_chars:
            self._forget(self._context)
        self._run_start = len(self._ids)
        return before + new

    def _push_run(self, token_ids: list[int], run: bytes) -> str:
        self._ids += token_ids
        self._run_is_broken = self._run_is_broken or not self._continues(run)
        text = self._decode(self._ids)
        if self._run_is_broken:
            new = REPLACEMENT * self._dropped_bytes + self._take(text, max(len(text), self._done))
            self._begin_run(broken=True)
            self._stand_in(self._broken, [])
            return new
        self._open = text[self._done :]
        if len(self._ids) > 2 * WINDOW:
            self._drop_characters()
        return ""

    def _continues(self, run: bytes) -> bool:
        try:
            self._utf8.decode(run)
        except UnicodeDecodeError:
            return False
        return True

    def _begin_run(self, broken: bool) -> None:
        self._utf8.reset()
        self._dropped.clear()
        self._dropped_bytes, self._run_is_broken = 0, broken

    def _drop_characters(self) -> None:
        """Keep of a valid run the character it has begun."""
        num_begun = len(self._utf8.getstate()[0])
        complete = self._ids[: len(self._ids) - num_begun]
        begun = self._ids[len(complete) :]
        self._dropped.append(self._decode(complete)[self._done :])
        self._dropped_bytes += len(complete) - self._run_start
        self._stand_in(self._whole, begun)

    def _stand_in(self, token_id: int, begun: list[int]) -> None:
        """The window becomes one byte token that has been returned, and the bytes of a character that has begun."""
        self._ids = [token_id, *begun]
        self._context = self._context_chars = self._done = self._run_start = 1
        self._open = self._decode(self._ids)[1:]


def _new_decoder(tokenizer: Any) -> _Decoder:
    """The one that fits what the tokenizer makes of a run of bytes that is not valid."""
    run = [tokenizer.convert_tokens_to_ids(token) for token in ("<0x61>", "<0xFF>")]
    if None in run or tokenizer.convert_ids_to_tokens(run) != ["<0x61>", "<0xFF>"]:
        return _Decoder(tokenizer)
    judged_whole = tokenizer.decode(run, clean_up_tokenization_spaces=False) == 2 * REPLACEMENT
    return _FallbackDecoder(tokenizer) if judged_whole else _Decoder(tokenizer)


def _num_unsettled(text: str) -> int:
    """How many characters at the end may be the beginning of one that later bytes complete."""
    return len(text[-UNSETTLED:]) - len(text[-UNSETTLED:].rstrip(REPLACEMENT))


def _byte(name: str) -> int | None:
    return int(name[3:5], 16) if BYTE_TOKEN.fullmatch(name) else None


def special_ids(tokenizer: Any | None) -> frozenset[int]:
    """Ids of tokens that leave no text, wherever they stand."""
    if tokenizer is None:
        return frozenset()
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*tokenizer.all_special_ids, *(token_id for token_id, token in added.items() if token.special)}
    return frozenset(token_id for token_id in special if tokenizer.decode([token_id], skip_special_tokens=True) == "")


class TextStream:
    """The text of one sequence as its ids are committed.

    What the pushes and `finish` return adds up to `text`, and that is `tokenizer.decode` of all ids without special
    tokens and without its optional clean-up of spaces, up to the first stop string. tokenizer None: no text at all.

    silent_ids: what `special_ids` makes of the tokenizer, for those who begin many streams with it.
    consumed: ids taken, the one that completed a stop string included; later ones are ignored. stopped: whether one
        did.

    Raises ValueError for stop strings without a tokenizer.
    """

    def __init__(
        self, tokenizer: Any | None, stop: Sequence[str] = (), silent_ids: Collection[int] | None = None
    ) -> None:
        if stop and tokenizer is None:
            raise ValueError(f"stop needs a tokenizer and there is none, got {tuple(stop)!r}; use stop_token_ids")
        self._tokenizer = tokenizer
        self._silent_ids = special_ids(tokenizer) if silent_ids is None else silent_ids
        self._decoder = _new_decoder(tokenizer) if tokenizer is not None else None
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
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
        rest = self._held + self._decoder.tail()
        self._held, self._decoder = "", None
        return self._release(rest[: self._stop_at(rest)])

    def _push(self, token_ids: Sequence[int]) -> str:
        if self.stopped:
            return ""
        self.consumed += len(token_ids)
        if self._decoder is None:
            return ""
        audible = self._audible(token_ids)
        self._held += self._decoder.push(audible) if audible else ""
        known = self._known_to_stop() if self._stop else None
        if known is not None:
            self.stopped = True
            return self._release(known)
        cut = len(self._held) - self._num_undecided()
        ready, self._held = self._held[:cut], self._held[cut:]
        return self._release(ready)

    def _audible(self, token_ids: Sequence[int]) -> list[int]:
        """The ids that leave text: no special ones, and none beyond the vocabulary."""
        rest = [token_id for token_id in token_ids if token_id not in self._silent_ids]
        names = self._tokenizer.convert_ids_to_tokens(rest) if rest else []  # type: ignore[union-attr]
        return [token_id for token_id, name in zip(rest, names, strict=True) if name is not None]

    def _known_to_stop(self) -> str | None:
        """The text before a stop string, None without one. Only what the last id can have completed is searched."""
        assert self._decoder is not None
        if self._stop_at(self._held + self._decoder.tail(self._longest).rstrip(REPLACEMENT)) is None:
            return None
        known = self._held + self._decoder.tail().rstrip(REPLACEMENT)
        end = self._stop_at(known)
        return None if end is None else known[:end]

    def _stop_at(self, text: str) -> int | None:
        """Where the first stop string begins, None without one."""
        return min((at for at in map(text.find, self._stop) if at >= 0), default=None)

    def _num_undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), self._longest - 1)
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
