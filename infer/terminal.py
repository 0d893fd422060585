"""What a person sees in the terminal: text as it is decoded, coloured by where it came from, and a line of figures."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from .estimates import CORPUS
from .request import Completion, Origin, StreamChunk
from .stats import SequenceStats

COLOURS: dict[Origin, str] = {"accepted": "\x1b[32m", "corrected": "\x1b[33m", "bonus": "\x1b[0m"}
RESET = "\x1b[0m"
LEGEND = f"{COLOURS['accepted']}drafted and accepted{RESET}, {COLOURS['corrected']}corrected{RESET}, the model's own"


def use_colour(out: TextIO) -> bool:
    """Only on a terminal, and not where the user has set NO_COLOR."""
    return out.isatty() and not os.environ.get("NO_COLOR")


def print_stream(chunks: Iterable[StreamChunk], tokenizer: Any, out: TextIO, colour: bool) -> Completion | None:
    """Write one text as it comes; returns its completion."""
    last_id: list[int] = []
    completion = None
    for chunk in chunks:
        out.write(coloured(chunk, tokenizer, last_id) if colour else chunk.text)
        out.flush()
        last_id, completion = chunk.token_ids[-1:] or last_id, chunk.completion
    out.write("\n")
    return completion


def coloured(chunk: StreamChunk, tokenizer: Any, last_id: Sequence[int] = ()) -> str:
    """The chunk's text with the colour of each token's origin. last_id: the token before, if there was one."""
    return "".join(f"{COLOURS[kind]}{text}{RESET}" for text, kind in _pieces(chunk, tokenizer, last_id) if text)


def _pieces(chunk: StreamChunk, tokenizer: Any, last_id: Sequence[int]) -> Iterator[tuple[str, Origin]]:
    """Split the text by tokens: a character that spans several falls to one of them, and nothing is lost or doubled."""

    def decoded(token_ids: Sequence[int]) -> int:
        return len(tokenizer.decode([*last_id, *token_ids], skip_special_tokens=True))

    start, before = 0, decoded(())
    kinds = [origin.kind for origin in chunk.origins] or ["bonus"]
    for count, kind in enumerate(kinds, start=1):
        end = len(chunk.text) if count == len(kinds) else max(start, decoded(chunk.token_ids[:count]) - before)
        yield chunk.text[start:end], kind
        start = min(end, len(chunk.text))


def summary(completions: Iterable[Completion], lossless: bool = True) -> str:
    """`96 tokens in 1.8 s (53.3/s), 2.34 per pass of the model, 41 of 210 drafted accepted`

    lossless: whether they are meant to have the model's own distribution; if not that is said, however near they are.
    """
    parts = [completion.stats for completion in completions]
    total = SequenceStats.total(parts)
    seconds = max((part.seconds for part in parts), default=0.0)
    rate = f" ({total.emitted_tokens / seconds:.1f}/s)" if seconds else ""
    distance = f"; lossy: {total.mean_distance:.3f} from the model's own distribution a token"
    said = distance if total.distance or not lossless else ""
    corpus = total.accepted_from[CORPUS]
    brought = f", {corpus} of them from the datastore alone" if total.drafted_from[CORPUS] else ""
    return (
        f"{total.emitted_tokens} tokens in {seconds:.1f} s{rate}, {total.mat:.2f} per pass of the model, "
        f"{total.accepted} of {total.drafted} drafted accepted{brought}{said}"
    )
