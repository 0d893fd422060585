"""Every prompt of a file is answered once, whatever happens between the first run and the last."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from speclight.infer.jobs import Job, Results, as_sent, read_jobs, run_jobs
from speclight.infer.request import Completion, GenerationParams, StreamChunk
from speclight.infer.stats import SequenceStats

DEFAULTS = GenerationParams(max_new_tokens=4)
SETTINGS = {"model": "tiny", "temperature": 0.0, "stop": ()}


class FakeEngine:
    """Answers each prompt with its ids reversed, one per step; can be interrupted, and counts what it ran."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.queue: list[tuple[str, list[int], GenerationParams]] = []
        self.ran: Counter[tuple[int, ...]] = Counter()
        self.stop_after, self.most_waiting = stop_after, 0

    def encode(self, prompt) -> list[int]:
        ids = [ord(c) for c in prompt] if isinstance(prompt, str) else [ord(c) for m in prompt for c in m["content"]]
        if len(ids) > 20:
            raise ValueError(f"prompt has {len(ids)} tokens; the longest text here is 20")
        return ids

    def add(self, prompt: list[int], params: GenerationParams) -> str:
        request_id = f"request-{sum(self.ran.values()) + len(self.queue)}"
        self.queue.append((request_id, prompt, params))
        self.most_waiting = max(self.most_waiting, len(self.queue))
        return request_id

    def step(self) -> list[StreamChunk]:
        if self.stop_after is not None and sum(self.ran.values()) >= self.stop_after:
            raise KeyboardInterrupt
        request_id, prompt, params = self.queue.pop()  # the last first: results come in another order than rows
        self.ran[tuple(prompt)] += 1
        chunks = []
        for index in reversed(range(params.n)):
            ids = [*reversed(prompt), index]
            done = Completion(
                request_id, index, prompt, ids, f"{ids}", "length", SequenceStats(emitted_tokens=len(ids))
            )
            chunks += [StreamChunk(request_id, index, "…", ids), StreamChunk(request_id, index, "", [], [], done)]
        return chunks


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(source: Path, output: Path, engine: FakeEngine | None = None, **more) -> FakeEngine:
    engine = engine or FakeEngine()
    results = Results(output, read_jobs(source, DEFAULTS), SETTINGS, **more)
    try:
        for job, completions in run_jobs(engine, results.missing, ahead=2):
            results.write(job, completions)
    finally:
        results.close()
    return engine


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def prompts(*texts: str) -> list[dict]:
    return [{"prompt": text} for text in texts]


def test_what_a_run_would_overwrite_stays_until_its_first_result(tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", prompts("a", "bb")), tmp_path / "out.jsonl"
    run(source, output)
    before, settings = output.read_bytes(), output.with_name("out.jsonl.meta.json").read_bytes()
    other = write(tmp_path / "other.jsonl", prompts("ccc", "dd"))
    with pytest.raises(KeyboardInterrupt):
        run(other, output, FakeEngine(stop_after=0), overwrite=True)
    assert (output.read_bytes(), output.with_name("out.jsonl.meta.json").read_bytes()) == (before, settings)
    with pytest.raises(KeyboardInterrupt):
        run(other, output, FakeEngine(stop_after=1), overwrite=True)
    assert len(rows_of(output)) == 1
    assert run(other, output).ran
    assert len(rows_of(output)) == 2


def test_a_run_without_a_result_leaves_no_file(tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", prompts("a")), tmp_path / "out.jsonl"
    for more in ({}, {"overwrite": True}):
        with pytest.raises(KeyboardInterrupt):
            run(source, output, FakeEngine(stop_after=0), **more)
        assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


# -- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "temprature": 1}, r"unknown field 'temprature'; did you mean 'temperature'\?"),
        ({"prompt": "a", "logits_processors": []}, "unknown field 'logits_processors'"),
        ({"prompt": "a", "temperature": -1}, "temperature must be"),
        ({"prompt": "a", "top_k": 1.5}, "top_k must be"),
        ({"prompt": "a", "n": 0}, "n must be"),
        ({"prompt": "a", "stop": 5}, "stop must be a list"),
        ({"prompt": "a", "stop_token_ids": 5}, "stop_token_ids must be a list"),
        ({"prompt": "a", "stop_token_ids": ["x"]}, "stop_token_ids must hold integers"),
        ({"prompt": "a", "ignore_eos": "no"}, "ignore_eos must be bool"),
        ({"prompt": "a", "method": 3}, "method must be"),
        ({"prompt": "a", "method": "logitspek"}, r"method must be .*did you mean 'logitspec'\?"),
        ({"prompt": "a", "messages": []}, "exactly one of prompt, messages, token_ids, got prompt and messages"),
        ({"id": 1}, "exactly one of .*got none"),
        ({"prompt": ""}, "prompt must be a non-empty string"),
        ({"prompt": ["a"]}, "prompt must be a non-empty string"),
        ({"messages": []}, "messages must be"),
        ({"messages": [{"role": "user"}]}, "messages must be"),
        ({"token_ids": [1, -2]}, "token_ids must be"),
        ({"token_ids": [1, True]}, "token_ids must be"),
        ({"token_ids": []}, "token_ids must be"),
        ({"id": 1.5, "prompt": "a"}, "id must be a string or an integer"),
        ({"id": "same", "prompt": "a"}, r"id 'same' is already that of .*:1"),
    ],
)
def test_a_wrong_row_is_refused_naming_file_line_and_field(tmp_path: Path, row: dict, message: str) -> None:
    source = write(tmp_path / "in.jsonl", [{"id": "same", "prompt": "fine"}, row])
    with pytest.raises(ValueError, match=message) as raised:
        read_jobs(source, DEFAULTS)
    assert str(raised.value).startswith(f"{source}:2: ")


@pytest.mark.parametrize("line", [b"{", b"[1]", b'"text"', b'{"prompt": "\xff"}'])
def test_a_line_that_is_no_json_object_is_refused_naming_its_place(tmp_path: Path, line: bytes) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "a"}\n\n' + line)
    with pytest.raises(ValueError, match=r"in\.jsonl:3: "):
        read_jobs(source, DEFAULTS)


def test_a_rows_fields_override_the_defaults(tmp_path: Path) -> None:
    row = {"prompt": "a", "temperature": 0.7, "stop": ["x"], "logit_bias": {"5": -100}, "method": "ar", "n": 2}
    (plain, own) = read_jobs(write(tmp_path / "in.jsonl", [{"prompt": "a"}, row]), DEFAULTS)
    assert plain.params == DEFAULTS
    assert own.params == GenerationParams(
        max_new_tokens=4, temperature=0.7, stop=("x",), logit_bias={5: -100.0}, method="ar", n=2
    )


def test_line_ends_marks_and_separators_of_other_systems_are_read(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b\xe2\x80\xa8c"}\r\n')
    assert [job.prompt for job in read_jobs(source, DEFAULTS)] == ["a", "b\u2028c"]


def test_a_chat_wraps_texts_only_and_the_system_message_goes_first() -> None:
    user = {"role": "user", "content": "hi"}
    system = {"role": "system", "content": "be brief"}

    def sent(prompt, chat: bool, text: str | None):
        return as_sent([Job("k", "", "F:1", prompt, DEFAULTS)], chat, text)[0].prompt

    assert sent("hi", False, None) == "hi"
    assert sent("hi", True, None) == [user]
    assert sent("hi", True, "be brief") == [system, user]
    assert sent([user], False, "be brief") == [system, user]
    assert sent([1, 2], True, None) == [1, 2]
    for prompt, chat in (("hi", False), ([1, 2], True), ([system, user], True)):
        with pytest.raises(ValueError, match="F:1: system"):
            sent(prompt, chat, "be brief")


# -- running ---------------------------------------------------------------------------------------------------------


def test_every_row_is_answered_once_with_all_its_texts(tmp_path: Path) -> None:
    rows = [{"id": 7, "prompt": "abc"}, {"prompt": "x", "n": 3}, {"prompt": "y"}, {"prompt": "x", "n": 3}]
    engine = run(write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    found = rows_of(tmp_path / "out.jsonl")
    assert engine.most_waiting <= 2
    assert sorted(Counter(row["id"] for row in found).values()) == [1, 1, 3, 3]
    assert {row["text"] for row in found if row["id"] == 7} == {"[99, 98, 97, 0]"}
    assert set(found[0]) >= {"id", "index", "text", "token_ids", "finish_reason", "stats"}
    assert set(found[0]["stats"]) >= {"emitted_tokens", "target_passes", "drafted", "accepted", "mat", "seconds"}


def test_a_prompt_that_cannot_run_is_named_before_anything_is_generated(tmp_path: Path) -> None:
    source, engine = write(tmp_path / "in.jsonl", prompts("a", "b" * 21)), FakeEngine()
    with pytest.raises(ValueError, match=r"in\.jsonl:2: prompt has 21 tokens"):
        run(source, tmp_path / "out.jsonl", engine)
    assert not engine.ran


def test_a_second_run_continues_and_a_third_does_nothing(tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", prompts("a", "b", "c", "d")), tmp_path / "out.jsonl"
    first = FakeEngine(stop_after=2)
    with pytest.raises(KeyboardInterrupt):
        run(source, output, first)
    assert len(rows_of(output)) == 2
    second = run(source, output)
    assert first.ran + second.ran == Counter({(ord(c),): 1 for c in "abcd"})
    before = output.read_bytes()
    assert not run(source, output).ran
    assert output.read_bytes() == before


def test_a_kill_at_any_byte_leaves_each_prompt_once_and_none_truncated(tmp_path: Path) -> None:
    rows = [{"id": "ü", "prompt": "abc", "n": 2}, {"prompt": "x"}, {"prompt": "x"}, {"prompt": "y", "n": 3}]
    source, output = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    run(source, output)
    whole, expected = output.read_bytes(), _contents(output)
    for size in range(0, len(whole), 7):
        output.write_bytes(whole[:size])
        run(source, output)
        assert _contents(output) == expected, f"killed after {size} bytes"


def _contents(output: Path) -> list[tuple]:
    return sorted((str(row["id"]), row["index"], row["text"]) for row in rows_of(output))


def test_rows_can_be_reordered_removed_and_added_between_runs(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(write(source, prompts("a", "b", "a", "c")), output, FakeEngine(stop_after=3))
    first = Counter(row["text"] for row in rows_of(output))
    run(write(source, prompts("d", "c", "a", "a")), output)
    assert first + Counter(["[100, 0]"]) <= Counter(row["text"] for row in rows_of(output)) + Counter()
    assert Counter(row["text"] for row in rows_of(output)) - Counter(["[98, 0]"]) == Counter(
        {"[97, 0]": 2, "[99, 0]": 1, "[100, 0]": 1}
    )


@pytest.mark.parametrize("change", [{"temperature": 0.5}, {"model": "other"}, {"extra": 1}])
def test_results_of_other_settings_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict) -> None:
    source, output = write(tmp_path / "in.jsonl", prompts("a")), tmp_path / "out.jsonl"
    run(source, output)
    before = output.read_bytes()
    monkeypatch.setitem(SETTINGS, *next(iter(change.items())))
    with pytest.raises(ValueError, match=rf"was written with .*{next(iter(change))}.*--overwrite"):
        run(source, output)
    assert output.read_bytes() == before
    assert run(source, output, overwrite=True).ran


def test_a_row_that_changed_under_its_id_is_not_taken_for_done(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    run(write(source, [{"id": 1, "prompt": "a"}]), output)
    with pytest.raises(ValueError, match=r"in\.jsonl:1: row 1 has changed"):
        run(write(source, [{"id": 1, "prompt": "b"}]), output)


def test_a_file_of_something_else_is_never_touched(tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", prompts("a")), tmp_path / "precious.jsonl"
    output.write_text('{"id": 1}\n')
    with pytest.raises(ValueError, match="was not written by this command"):
        run(source, output)
    assert output.read_text() == '{"id": 1}\n'


@pytest.mark.parametrize(
    "damage", [b"nonsense\n", b'{"id": 1}\n', b'{"id": [1], "input": ""}\n', b'{"id": true, "input": ""}\n']
)
def test_damage_other_than_a_torn_end_is_reported_not_dropped(tmp_path: Path, damage: bytes) -> None:
    source, output = write(tmp_path / "in.jsonl", prompts("a", "b")), tmp_path / "out.jsonl"
    run(source, output)
    damaged = damage + output.read_bytes()
    output.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"out\.jsonl:1: "):
        run(source, output)
    assert output.read_bytes() == damaged


@pytest.mark.parametrize("damage", [b"", b"\xff\x00", b"[]", b'"x"'])
def test_damaged_settings_are_refused_by_their_files_name(tmp_path: Path, damage: bytes) -> None:
    source, output = write(tmp_path / "in.jsonl", prompts("a")), tmp_path / "out.jsonl"
    run(source, output)
    output.with_name("out.jsonl.meta.json").write_bytes(damage)
    with pytest.raises(ValueError, match=r"out\.jsonl\.meta\.json: .*use another --output, or --overwrite"):
        run(source, output)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_not_replaced(tmp_path: Path, make, overwrite: bool) -> None:
    """Opening a pipe that nobody reads would wait for ever."""
    make(tmp_path / "out")
    with pytest.raises(ValueError, match=r"output .*/out' is not a regular file"):
        run(write(tmp_path / "in.jsonl", prompts("a")), tmp_path / "out", overwrite=overwrite)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out"]


def test_a_lone_surrogate_in_an_id_comes_back_as_it_was(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"id": "\\ud800", "prompt": "a"}\n')
    run(source, output)
    assert rows_of(output)[0]["id"] == "\ud800"
    assert not run(source, output).ran
