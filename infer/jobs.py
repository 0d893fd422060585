"""Many prompts from a JSONL file, results into another, resumable at any point.

A result is known by its prompt's `id`, or by the content of the row where there is none, so rows can be reordered,
added and removed between runs. Each request's results are one write at the end of the file; what a kill cut off is
done again.
A sidecar file records the settings, so that results of different settings cannot end up in one file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from .build import check_method, did_you_mean
from .files import ANEW, check_output_file, check_same, check_unlocked, one_at_a_time, open_locked, replace_file
from .jsonl import is_key, parse_row, read_jsonl
from .request import Completion, GenerationParams, Prompt, StreamChunk

PROMPT_KINDS = ("prompt", "messages", "token_ids")
ROW_FIELDS = tuple(name for name in GenerationParams.field_names() if name != "logits_processors")  # no JSON form


@dataclass(frozen=True)
class Job:
    """One row of the input.

    key: its id, or one made of its content. fingerprint: hash of everything in the row but the id. where: `F.jsonl:3`.
    """

    key: str | int
    fingerprint: str
    where: str
    prompt: Prompt
    params: GenerationParams

    @property
    def is_messages(self) -> bool:
        return not isinstance(self.prompt, str) and isinstance(self.prompt[0], dict)


def read_jobs(path: str | Path, defaults: GenerationParams) -> list[Job]:
    """Every row, checked. Blank lines are skipped.

    Raises ValueError naming file, line and field for the first row that is not valid.
    """
    jobs: dict[str | int, Job] = {}
    seen: Counter[str] = Counter()
    for where, row in read_jsonl(path):
        job = _located(where, _read_job, where, row, defaults, seen)
        if job.key in jobs:
            raise ValueError(f"{where}: id {job.key!r} is already that of {jobs[job.key].where}; ids must be unique")
        jobs[job.key] = job
    return list(jobs.values())


def _located(where: str, read: Any, *arguments: Any) -> Any:
    """Call, and put the place into the message of what is raised."""
    try:
        return read(*arguments)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _read_job(where: str, row: Mapping[str, Any], defaults: GenerationParams, seen: Counter[str]) -> Job:
    valid = ("id", *PROMPT_KINDS, *ROW_FIELDS)
    for name in row:
        if name not in valid:
            raise ValueError(f"unknown field {name!r}{did_you_mean(name, valid)}; valid: {', '.join(valid)}")
    prompt = _prompt(row)
    params = replace(defaults, **{name: row[name] for name in ROW_FIELDS if name in row})
    if params.method is not None:
        check_method(params.method)
    content = {name: value for name, value in row.items() if name != "id"}
    fingerprint = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    return Job(_key(row, fingerprint, seen), fingerprint, where, prompt, params)


def _key(row: Mapping[str, Any], fingerprint: str, seen: Counter[str]) -> str | int:
    key = row.get("id")
    if key is not None:
        if not is_key(key):
            raise ValueError(f"id must be a string or an integer, got {key!r}")
        return key
    seen[fingerprint] += 1  # the same row twice is two prompts
    return f"{fingerprint}-{seen[fingerprint]}"


def _prompt(row: Mapping[str, Any]) -> Prompt:
    kinds = [name for name in PROMPT_KINDS if name in row]
    if len(kinds) != 1:
        raise ValueError(f"a row needs exactly one of {', '.join(PROMPT_KINDS)}, got {' and '.join(kinds) or 'none'}")
    value = row[kinds[0]]
    if not _PROMPT_CHECKS[kinds[0]](value):
        raise ValueError(f"{kinds[0]} must be {_PROMPT_WANTED[kinds[0]]}, got {value!r}")
    return value


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_PROMPT_CHECKS = {
    "prompt": lambda value: isinstance(value, str) and value != "",
    "messages": lambda value: isinstance(value, list) and value != [] and all(map(_is_message, value)),
    "token_ids": lambda value: isinstance(value, list) and value != [] and all(map(_is_id, value)),
}
_PROMPT_WANTED = {
    "prompt": "a non-empty string",
    "messages": 'a non-empty list of {"role": ..., "content": ...}',
    "token_ids": "a non-empty list of integers of at least 0",
}


def as_sent(jobs: Iterable[Job], chat: bool, system: str | None) -> list[Job]:
    """The jobs with their final prompts: with `chat` a text becomes the user's message, and `system` goes before it.

    Raises ValueError naming the row where a system message has no place.
    """
    return [replace(job, prompt=_located(job.where, _sent_prompt, job.prompt, chat, system)) for job in jobs]


def check_each(jobs: Iterable[Job], check: Callable[[Job], None]) -> None:
    """Check every job; a ValueError names the row."""
    for job in jobs:
        _located(job.where, check, job)


def _sent_prompt(prompt: Prompt, chat: bool, system: str | None) -> Prompt:
    messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) and chat else prompt
    if system is None:
        return messages
    if isinstance(messages, str) or not _is_message(messages[0]):
        raise ValueError("system needs a chat: a raw prompt has no system message")
    if messages[0]["role"] == "system":
        raise ValueError("system is given, and the messages begin with a system message too")
    messages = [{"role": "system", "content": system}, *messages]
    return messages


def result_row(key: str | int, completion: Completion) -> dict[str, Any]:
    """What is written for one text."""
    row: dict[str, Any] = {
        "id": key,
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stats": completion.stats.as_dict(),
    }
    if completion.error is not None:
        row["error"] = completion.error
    if completion.logprobs:
        row["logprobs"] = [asdict(entry) for entry in completion.logprobs]
    return row


class Results:
    """The output file of a run. `missing` are the jobs that have no complete result in it yet; `has_begun` says whether
    it holds any of this run or of one that this run continues.

    settings: what shaped the results, as plain JSON values. overwrite: begin anew; what was there stays until the first
    new result, so that a run which is refused loses nothing.

    Raises ValueError for a file that holds results of other settings or other rows, or no results of ours, and for
    what is no file.
    """

    def __init__(
        self, path: str | Path, jobs: Sequence[Job], settings: Mapping[str, Any], overwrite: bool = False
    ) -> None:
        check_output_file(Path(path))
        self.path, self.jobs = Path(path).resolve(), jobs
        self.sidecar = self.path.with_name(self.path.name + ".meta.json")
        self._settings, self.has_begun, self.missing = settings, False, list(jobs)
        with one_at_a_time(self.path.parent):
            check_unlocked(self.path)
            if not overwrite:
                self._continue()
            self._file = open_locked(self.path)

    def _continue(self) -> None:
        """Read what is there, and write it back without what a kill cut off; where nothing is left the run begins."""
        rows = self._read_back(json.loads(json.dumps(self._settings)))
        counts = Counter(row["id"] for row in rows)
        self.missing = [job for job in self.jobs if counts[job.key] < job.params.n]
        torn = {job.key for job in self.missing}
        kept = [row for row in rows if row["id"] not in torn]
        self.has_begun = bool(kept)
        if kept:
            replace_file(self.path, b"".join(map(_encode, kept)))

    def write(self, job: Job, completions: Iterable[Completion]) -> None:
        """Append all texts of one job."""
        rows = [result_row(job.key, completion) | {"input": job.fingerprint} for completion in completions]
        if not self.has_begun:
            self._file.truncate(0)  # an empty file is nobody's, should this be as far as it gets
            replace_file(self.sidecar, (json.dumps(self._settings, indent=2) + "\n").encode())
            self.has_begun = True
        self._file.write(b"".join(map(_encode, rows)))
        self._file.flush()

    def close(self) -> None:
        """A file goes to which nothing was ever added."""
        with one_at_a_time(self.path.parent):
            if not os.fstat(self._file.fileno()).st_size:
                self.path.unlink(missing_ok=True)
            self._file.close()

    def _read_back(self, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The complete rows of an earlier run. The last line may be torn; nothing else may be wrong."""
        if not self.path.exists() or not self.path.stat().st_size:
            return []
        if not self.sidecar.exists():
            raise ValueError(
                f"{self.path} exists and was not written by this command; use another --output or --overwrite"
            )
        check_same(f"{self.path} was written", self._settings_before(), settings)
        *lines, _torn = self.path.read_bytes().split(b"\n")  # empty where the last line is complete
        rows = [parse_row(line, f"{self.path}:{number}") for number, line in enumerate(lines, start=1)]
        self._check_inputs(rows)
        return rows

    def _settings_before(self) -> dict[str, Any]:
        try:
            return parse_row(self.sidecar.read_bytes(), str(self.sidecar), "settings")
        except ValueError as error:
            raise ValueError(f"{error}; {ANEW}") from error

    def _check_inputs(self, rows: Iterable[Mapping[str, Any]]) -> None:
        jobs = {job.key: job for job in self.jobs}
        for number, row in enumerate(rows, start=1):
            if "input" not in row or not is_key(row.get("id")):
                raise ValueError(f"{self.path}:{number}: not a result of this command; use another --output")
            job = jobs.get(row["id"])
            if job is not None and job.fingerprint != row["input"]:
                raise ValueError(
                    f"{job.where}: row {job.key!r} has changed since {self.path} was written; "
                    "give it another id, or use --overwrite to begin anew"
                )


def _encode(row: Mapping[str, Any]) -> bytes:
    # a lone surrogate can only come from an escape in the input's id; as an escape it is valid JSON again
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


@runtime_checkable
class JobEngine(Protocol):
    """What running jobs needs of an engine."""

    def encode(self, prompt: Prompt) -> list[int]: ...

    def add(self, prompt: Prompt, params: GenerationParams) -> str: ...

    def step(self) -> list[StreamChunk]: ...


def run_jobs(engine: JobEngine, jobs: Sequence[Job], ahead: int = 128) -> Iterator[tuple[Job, list[Completion]]]:
    """Yield each job with its completions, in the order in which they end. At most `ahead` requests wait in the engine.

    Raises ValueError naming the row, before anything is generated, for a prompt the engine cannot run.
    """
    waiting = deque((job, _located(job.where, engine.encode, job.prompt)) for job in jobs)
    running: dict[str, tuple[Job, list[Completion]]] = {}
    while waiting or running:
        while waiting and len(running) < ahead:
            job, token_ids = waiting.popleft()
            running[_located(job.where, engine.add, token_ids, job.params)] = (job, [])
        for chunk in engine.step():
            if chunk.completion is None:
                continue
            job, done = running[chunk.request_id]
            done.append(chunk.completion)
            if len(done) == job.params.n:
                del running[chunk.request_id]
                yield job, sorted(done, key=lambda completion: completion.index)
