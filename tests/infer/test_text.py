"""Text from committed ids: streams agree with the whole, stops cut where they should."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from speclight.infer import text
from speclight.infer.text import TextStream, cut_block
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

UNKNOWN_ID = 10_000


def fast_tokenizer(vocab: list[str], decoder: decoders.Decoder, specials: tuple[str, ...] = ("</s>",)):
    tokens = {token: index for index, token in enumerate([*vocab, *specials])}
    backend = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def byte_alphabet() -> list[str]:
    """The printable stand-ins of the 256 bytes in byte-level vocabularies, in the order of the bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


BYTES = byte_alphabet()
BETWEEN = BYTES[0x98] + BYTES[0x80] + BYTES[0xF0] + BYTES[0x9F]  # the end of one emoji and the beginning of the next
EXTRA = ["ab", "abc", "bca", BYTES[32] + "ab", BYTES[0xF0] + BYTES[0x9F], BYTES[0x80] + "a", BETWEEN]
BYTE_LEVEL = fast_tokenizer([*BYTES, *EXTRA], decoders.ByteLevel())
FALLBACK_VOCAB = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁ab", "a", "b", "c", "▁▁", "ñ", "\ufffd"]
BYTE_FALLBACK = fast_tokenizer(
    FALLBACK_VOCAB,
    decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
)
METASPACE = fast_tokenizer(["▁", "▁ab", "a", "b", "c", "▁c", "▁▁"], decoders.Metaspace())
TOKENIZERS = {"byte-level": BYTE_LEVEL, "byte-fallback": BYTE_FALLBACK, "metaspace": METASPACE}


def ids_of(text: str) -> list[int]:
    return list(text.encode())  # id = byte in both vocabularies with bytes


def blocks(ids: list[int], size: int) -> list[list[int]]:
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def streamed(stream: TextStream, parts: list[list[int]]) -> str:
    shown = [stream.push(part) for part in parts]
    shown.append(stream.finish())
    assert "".join(shown) == stream.text
    assert stream.finish() == ""
    return stream.text


def whole(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
def test_characters_of_several_tokens_survive_any_block_size(tokenizer, size: int) -> None:
    assert streamed(TextStream(tokenizer), blocks(ids_of("a😀ñ"), size)) == "a😀ñ"


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("stop", ["ñxñ", "xñ", "😀😀"])
def test_a_stop_string_that_never_completes_is_given_out_at_the_end(stop: str, size: int) -> None:
    """The first character of the stop string equals its last, or the text ends inside it: held back, never lost."""
    text = "a😀ñxñ😀"[: 4 if stop != "😀😀" else None]
    assert streamed(TextStream(BYTE_LEVEL, [stop]), blocks(ids_of(text), size)) == text


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
def test_a_stop_string_cuts_text_and_ids_at_the_token_that_completed_it(tokenizer, size: int) -> None:
    stream = TextStream(tokenizer, ["ñ😀ñ"])
    assert streamed(stream, blocks(ids_of("a😀ñ😀ññññ"), size)) == "a😀"
    assert stream.stopped
    assert stream.consumed == len("a😀ñ😀ñ".encode())


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
@pytest.mark.parametrize("cap", [1, 2, 3, 4])
def test_a_text_cut_inside_a_character_streams_what_decode_says_of_it(tokenizer, cap: int) -> None:
    ids = ids_of("a😀ñ")[:cap]
    assert streamed(TextStream(tokenizer), blocks(ids, 1)) == whole(tokenizer, ids)


def test_no_part_of_a_character_and_no_beginning_of_a_stop_string_is_shown() -> None:
    stream = TextStream(BYTE_LEVEL, ["b!"])
    assert [stream.push([byte]) for byte in "a😀b".encode()] == ["a", "", "", "", "😀", ""]
    assert stream.push(ids_of("c")) == "bc"


def test_a_valid_character_waits_for_the_end_of_its_run_of_bytes() -> None:
    """Byte fallback turns é into two replacement characters when an invalid byte follows: é was not certain."""
    stream = TextStream(BYTE_FALLBACK)
    first = stream.push(ids_of("é"))
    assert first + streamed(stream, [[0xF0], [FALLBACK_VOCAB.index("a")]]) == "\ufffd\ufffd\ufffda"


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_stream_equals_decode_for_any_ids_and_any_blocks(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.one_of(st.integers(0, len(tokenizer) - 1), st.sampled_from([0xC3, 0xA9, 0xFF, 0xF0]))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    bounds = [0, *cuts, len(ids)]
    parts = [ids[start:end] for start, end in itertools.pairwise(bounds)]
    stream = TextStream(tokenizer)
    assert streamed(stream, parts) == whole(tokenizer, ids)
    assert stream.consumed == len(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_stops_cut_before_their_first_occurrence_for_any_blocks(name: str, data: st.DataObject) -> None:
    """The reference decodes every prefix anew and looks for the stop strings in it."""
    tokenizer, stops = TOKENIZERS[name], ["abc", "bb", "ca", " c"]
    letters = [
        tokenizer.convert_tokens_to_ids(token) for token in ("a", "b", "c", "▁", "▁ab", "ab", "abc", "ñ", "</s>")
    ]
    ids = data.draw(st.lists(st.sampled_from([letter for letter in letters if letter is not None])))
    size = data.draw(st.integers(1, 9))
    stream = TextStream(tokenizer, stops)
    text = streamed(stream, blocks(ids, size))
    prefixes = [whole(tokenizer, ids[:end]) for end in range(1, len(ids) + 1)]
    end = next((n for n, prefix in enumerate(prefixes) if any(stop in prefix for stop in stops)), None)
    assert stream.stopped == (end is not None)
    if end is None:
        assert text == whole(tokenizer, ids)
    else:
        assert stream.consumed == end + 1
        assert text == prefixes[end][: min(prefixes[end].find(stop) for stop in stops if stop in prefixes[end])]


LONG = 3000
NASTY = {
    "special tokens": ("byte-level", lambda end: [ord("a"), *[end] * LONG, ord("b")]),
    "special tokens first": ("byte-fallback", lambda end: [*[end] * LONG, FALLBACK_VOCAB.index("▁ab")]),
    "ids beyond the vocabulary": ("byte-level", lambda end: [ord("a"), *[UNKNOWN_ID] * LONG, ord("b")]),
    "bytes that are no character": ("byte-level", lambda end: [0x80] * LONG),
    "characters that never complete": ("byte-level", lambda end: [0xF0, 0x9F] * (LONG // 2)),
    "tokens across characters": (
        "byte-level",
        lambda end: [*b"\xf0\x9f", *[256 + EXTRA.index(BETWEEN)] * LONG, *b"\x98\x80"],
    ),
    "a valid run of bytes": ("byte-fallback", lambda end: [*ids_of("😀ñ" * (LONG // 6)), FALLBACK_VOCAB.index("a")]),
    "a run that breaks late": ("byte-fallback", lambda end: [*ids_of("😀ñ" * (LONG // 6)), 0xFF, *ids_of("é!")]),
    "a run that ends open": ("byte-fallback", lambda end: [*ids_of("😀ñ" * (LONG // 6)), 0xF0, 0x9F]),
    "a broken run": ("byte-fallback", lambda end: [0xFF, *ids_of("ñ" * (LONG // 2)), FALLBACK_VOCAB.index("▁ab")]),
    "a run with special tokens in it": ("byte-fallback", lambda end: [*[0xC3, end, 0xB1, end] * (LONG // 4), 0xC3]),
    "replacement characters of the text": ("byte-fallback", lambda end: [FALLBACK_VOCAB.index("\ufffd")] * LONG),
    "spaces": ("byte-fallback", lambda end: [32] * LONG),
}


@pytest.mark.parametrize("stop", [(), ("never",)], ids=["no stop", "stop"])
@pytest.mark.parametrize("kind", NASTY)
def test_time_is_linear_in_the_length_of_a_text(kind: str, stop: tuple[str, ...], monkeypatch) -> None:
    """Decoding everything undecided again for each token makes thousands of them take seconds; a thousand would be
    half a million ids decoded."""
    name, make = NASTY[kind]
    tokenizer = TOKENIZERS[name]
    ids = make(tokenizer.eos_token_id)
    expected, decode, decoded = whole(tokenizer, ids), tokenizer.decode, []
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **more: decoded.append(len(ids)) or decode(ids, **more))
    assert streamed(TextStream(tokenizer, stop), blocks(ids, 1)) == expected
    assert sum(decoded) <= 150 * len(ids)
    assert max(decoded) <= 200


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_window_that_is_cut_short_changes_nothing(name: str, data: st.DataObject) -> None:
    """Long runs of what keeps a window open, and windows so short that every cut is tried."""
    tokenizer = TOKENIZERS[name]
    some = [0xC3, 0xA9, 0xFF, 0xF0, 0x9F, 0x98, 0x80, 32, tokenizer.eos_token_id, UNKNOWN_ID, len(tokenizer) - 2]
    piece = st.tuples(st.lists(st.sampled_from([*some, *range(len(tokenizer))]), max_size=4), st.integers(1, 9))
    ids = [token_id for part, times in data.draw(st.lists(piece, max_size=8)) for token_id in part * times]
    stops = data.draw(st.sampled_from([(), ("ñ😀", "éé", "b c")]))
    prefixes = [whole(tokenizer, ids[:end]) for end in range(1, len(ids) + 1)] if stops else []
    end = next((n for n, prefix in enumerate(prefixes) if any(stop in prefix for stop in stops)), None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "WINDOW", data.draw(st.integers(1, 8)))
        stream = TextStream(tokenizer, stops)
        shown = streamed(stream, blocks(ids, data.draw(st.integers(1, 5))))
    if end is None:
        assert shown == whole(tokenizer, ids)
    else:
        assert stream.consumed == end + 1
        assert shown == prefixes[end][: min(prefixes[end].find(stop) for stop in stops if stop in prefixes[end])]


def test_special_tokens_and_ids_beyond_the_vocabulary_leave_no_text() -> None:
    end = BYTE_FALLBACK.eos_token_id
    space = FALLBACK_VOCAB.index("▁ab")
    ids = [space, end, end, space, UNKNOWN_ID, space]
    assert streamed(TextStream(BYTE_FALLBACK), blocks(ids, 1)) == "ab ab ab"


def test_without_a_tokenizer_there_is_no_text_and_stop_strings_are_refused() -> None:
    stream = TextStream(None)
    assert (stream.push([1, 2, 3]), stream.finish(), stream.consumed) == ("", "", 3)
    with pytest.raises(ValueError, match="stop needs a tokenizer"):
        TextStream(None, ["end"])


STOP = 2


@pytest.mark.parametrize(
    ("cap", "kept", "reason"),
    [
        (5, [10, 11, STOP], "stop"),
        (3, [10, 11, STOP], "stop"),
        (2, [10, 11], "length"),
        (1, [10], "length"),
        (0, [], "length"),
    ],
)
def test_a_stop_inside_a_block_comes_before_the_cap_and_the_cap_is_never_passed(
    cap: int, kept: list[int], reason: str
) -> None:
    assert cut_block([10, 11, STOP, 20, 21, 22], {STOP}, cap, TextStream(None)) == (kept, "", reason)


def test_a_block_that_ends_nothing_is_kept_whole() -> None:
    assert cut_block([10, 11], {STOP}, 3, TextStream(None)) == ([10, 11], "", None)


def test_a_stop_string_ends_the_block_at_its_token_and_keeps_that_token() -> None:
    stream = TextStream(BYTE_LEVEL, ["xy"])
    assert cut_block(ids_of("ax"), (), 9, stream) == (ids_of("ax"), "a", None)
    assert cut_block(ids_of("yz"), (), 7, stream) == (ids_of("y"), "", "stop")
    assert stream.text == "a"


@pytest.mark.parametrize(("text", "reason"), [("ab.", "stop"), ("abc", "length")])
def test_at_the_cap_a_stop_string_is_seen_first(text: str, reason: str) -> None:
    assert cut_block(ids_of(text), (), 3, TextStream(BYTE_LEVEL, ["."]))[2] == reason


def test_the_stop_token_stays_in_the_ids_and_out_of_the_text() -> None:
    stream = TextStream(BYTE_LEVEL)
    ids = [*ids_of("ab"), BYTE_LEVEL.eos_token_id, *ids_of("c")]
    kept, text, reason = cut_block(ids, {BYTE_LEVEL.eos_token_id}, 9, stream)
    assert (kept, text + stream.finish(), reason) == (ids[:3], "ab", "stop")
