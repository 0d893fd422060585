"""Timed runs of a benchmark: who runs what when, what is kept of it, and what a killed run goes on from."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .compare import first_difference, logit_gap, token_at
from .files import ANEW, check_same, check_unlocked, one_at_a_time, open_locked
from .jsonl import parse_row
from .questions import Item
from .summary import Difference, Output, Run, compared_outputs

if TYPE_CHECKING:
    from .engine import Engine
    from .request import GenerationParams

WARM_UP_TOKENS = 16

T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """One run: what it took, and per prompt the ids and the SequenceStats (None for a peer)."""

    seconds: float
    token_ids: list[list[int]]
    stats: list[dict[str, Any] | None]
    engine: dict[str, Any] | None = None


Runner = Callable[[Sequence[Sequence[int]], int], Measured]
"""(prompts, max_new_tokens) -> what came of it."""


def engine_runner(engine: Engine, params: GenerationParams) -> Runner:
    """Runs one of our methods, from a cold engine: what was cached and learned is forgotten first."""

    def run(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Measured:
        engine.reset()
        started = time.perf_counter()
        completions = engine.generate(list(prompts), replace(params, max_new_tokens=max_new_tokens))
        seconds = time.perf_counter() - started
        stats = [completion.stats.as_dict() for completion in completions]
        return Measured(seconds, [list(c.token_ids) for c in completions], list(stats), engine.stats.as_dict())

    return run


def peer_runner(generate: Callable[[Sequence[Sequence[int]], int], list[list[int]]]) -> Runner:
    """Runs a peer, that is any function of prompts and a length."""

    def run(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Measured:
        started = time.perf_counter()
        token_ids = generate(prompts, max_new_tokens)
        return Measured(time.perf_counter() - started, token_ids, [None] * len(prompts))

    return run


class RowFile:
    """The rows of a run, appended as they come. settings: what shaped them; they may not change while rows are added.

    What the file held stays until the first new row, so that a run which is refused loses nothing.

    Raises ValueError for a file that holds rows of other settings or something else, or that another run is writing.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], overwrite: bool = False) -> None:
        self.num_rows, self._path, self._settings = 0, path, json.loads(json.dumps(settings))
        with one_at_a_time(path.parent):
            check_unlocked(path)
            self._kept: int | None = 0 if overwrite or not path.exists() else self._read_back()
            self._file = open_locked(path)

    def _read_back(self) -> int:
        """Take the complete lines; returns their bytes. What a kill cut off has no newline, and is done again."""
        content = self._path.read_bytes()
        *lines, torn = content.split(b"\n")
        for number, line in enumerate(lines, start=1):
            where = f"{self._path}:{number}"
            row = parse_row(line, where)
            if number == 1:
                self._check_settings(row.get("settings"), where)
            else:
                self._take(row, where)
        return len(content) - len(torn)

    def _take(self, row: Mapping[str, Any], where: str) -> None:
        try:
            self.take(row)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: not a row that this command wrote; {ANEW}") from error
        self.num_rows += 1

    def take(self, row: Mapping[str, Any]) -> None:
        """Keep a row that an earlier run wrote. Raises KeyError or TypeError for another."""
        raise NotImplementedError

    def _check_settings(self, before: Any, where: str) -> None:
        if not isinstance(before, dict):
            raise ValueError(f"{where}: the first line must hold the settings of the rows, and does not; {ANEW}")
        check_same(f"{self._path} was measured", before, self._settings)

    def append(self, row: Mapping[str, Any]) -> None:
        lines = [row]
        if self._kept is not None:
            self._file.truncate(self._kept)
            lines = [row] if self._kept else [{"settings": self._settings}, row]
            self._kept = None
        self._file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        self._file.flush()
        self.num_rows += 1

    def close(self) -> None:
        """A file goes to which nothing was ever added: what a refused run was asked for must not bind the next."""
        with one_at_a_time(self._path.parent):
            if not os.fstat(self._file.fileno()).st_size:
                self._path.unlink(missing_ok=True)
            self._file.close()


class Ledger(RowFile):
    """The rows of a benchmark."""

    def __init__(self, path: Path, settings: Mapping[str, Any], overwrite: bool = False) -> None:
        self.runs: list[Run] = []
        self.differences: list[Difference] = []
        super().__init__(path, settings, overwrite)

    def take(self, row: Mapping[str, Any]) -> None:
        if "run" in row:
            self.runs.append(Run.from_dict(row["run"]))
        else:
            self.differences.append(Difference(**row["difference"]))

    def add(self, row: Run | Difference) -> None:
        if isinstance(row, Run):
            self.runs.append(row)
        else:
            self.differences.append(row)
        self.append({type(row).__name__.lower(): asdict(row)})


def batches(items: Sequence[T], size: int) -> list[list[T]]:
    """Units: consecutive items, `size` at a time."""
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def schedule(units: int, repeats: int, methods: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """(repeat, unit, method): all methods on a unit before the next, beginning with another one each time."""
    for repeat in range(repeats):
        for unit in range(units):
            first = (unit + repeat) % len(methods)
            for method in (*methods[first:], *methods[:first]):
                yield repeat, unit, method


def measure(
    runners: Mapping[str, Runner], units: Sequence[Sequence[Item]], repeats: int, max_new_tokens: int, ledger: Ledger
) -> None:
    """Run whatever the ledger lacks, after a warm-up of every method."""
    from tqdm import tqdm

    plan = list(schedule(len(units), repeats, list(runners)))
    done = {(run.repeat, run.unit, run.method) for run in ledger.runs}
    todo = [step for step in plan if step not in done]
    if todo:
        for runner in runners.values():
            runner([item.token_ids for item in units[0]], min(WARM_UP_TOKENS, max_new_tokens))
    with tqdm(total=len(plan), initial=len(plan) - len(todo), unit="run", disable=None) as bar:
        for repeat, unit, method in todo:
            bar.set_postfix_str(method)
            items = units[unit]
            measured = runners[method]([item.token_ids for item in items], max_new_tokens)
            outputs = [
                Output(item.question.question_id, item.turn, item.question.category, token_ids, stats)
                for item, token_ids, stats in zip(items, measured.token_ids, measured.stats, strict=True)
            ]
            ledger.add(Run(unit, repeat, method, measured.seconds, outputs, measured.engine))
            bar.update()


def find_differences(engine: Engine, items: Sequence[Item], ledger: Ledger) -> None:
    """Where texts part from plain decoding, with the logit gap there; one pass over the shared text each."""
    prompts = {(item.question.question_id, item.turn): list(item.token_ids) for item in items}
    known = {(d.unit, d.repeat, d.method, d.question_id, d.turn) for d in ledger.differences}
    for run, output, theirs in compared_outputs(ledger.runs):
        text = (output.question_id, output.turn)
        at = first_difference(output.token_ids, theirs.token_ids)
        if at is None or (run.unit, run.repeat, run.method, *text) in known:
            continue
        tokens = token_at(output.token_ids, at), token_at(theirs.token_ids, at)
        gap = logit_gap(engine.model, [*prompts[text], *theirs.token_ids[:at]], *tokens)
        finite = gap if math.isfinite(gap) else None
        ledger.add(Difference(run.unit, run.repeat, run.method, *text, at, *tokens, finite))
