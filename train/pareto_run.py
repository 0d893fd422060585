"""Runs of a comparison: every arm on every unit of prompts, and the rows that a killed run goes on from."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..infer.measure import WARM_UP_TOKENS, RowFile, batches, schedule
from .pareto_theory import Theory, Watcher
from .prompts import fitting_ids

if TYPE_CHECKING:
    from ..infer.engine import Engine
    from ..infer.request import Completion, GenerationParams
    from .pareto_arms import Arm
    from .prompts import Task, TaskPrompt
    from .reward_function import RewardFunction


@dataclass(frozen=True)
class Text:
    """One answer. prompt: its prompt's place in the data. reward: of what the task's post-processing leaves of `text`.

    stats: the SequenceStats. theory: what its drafts should have come to.
    """

    prompt: int
    sample: int
    text: str
    token_ids: Sequence[int]
    reward: float
    stats: Mapping[str, Any]
    theory: Theory

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Text:
        return cls(**{**values, "theory": Theory(**values["theory"])})


@dataclass(frozen=True)
class Run:
    """One arm on one unit. seconds: of decoding, without what the theory took."""

    unit: int
    arm: str
    seconds: float
    texts: Sequence[Text]

    @property
    def tokens(self) -> int:
        return sum(len(text.token_ids) for text in self.texts)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Run:
        return cls(**{**values, "texts": [Text.from_dict(text) for text in values["texts"]]})


class Runs(RowFile):
    """The rows of a comparison."""

    def __init__(self, path: Path, settings: Mapping[str, Any], overwrite: bool = False) -> None:
        self.runs: list[Run] = []
        super().__init__(path, settings, overwrite)

    def take(self, row: Mapping[str, Any]) -> None:
        self.runs.append(Run.from_dict(row))

    def add(self, run: Run) -> None:
        self.runs.append(run)
        self.append(asdict(run))


@dataclass(frozen=True)
class Item:
    """A prompt that fits. index: its place in the data."""

    index: int
    prompt: TaskPrompt
    token_ids: Sequence[int]


def make_items(engine: Engine, prompts: Sequence[TaskPrompt], max_new_tokens: int) -> tuple[list[Item], dict[int, str]]:
    """The prompts that leave room for all their new tokens; also {place: reason} of the others."""
    items, left_out = [], {}
    for index, prompt in enumerate(prompts):
        try:
            items.append(Item(index, prompt, fitting_ids(engine, prompt.prompt, max_new_tokens)))
        except ValueError as error:
            left_out[index] = str(error)
    return items, left_out


@dataclass(frozen=True)
class Bench:
    """What all arms share. params: of a request but its seed; a text's seed is the same in every arm.

    The drafter's target rule is the arm's while it runs.
    """

    engine: Engine
    params: GenerationParams
    task: Task
    reward: RewardFunction

    def run(self, arm: Arm, unit: int, items: Sequence[Item]) -> Run:
        """Raises ValueError when a text ends with an error: half an answer has no fair reward."""
        done, seconds, watcher = self._generate(arm, items, self.params)
        rewards = self.reward([self.task.answer(one.text, item.prompt.row) for item, one in self._paired(items, done)])
        texts = [
            Text(
                item.index,
                one.index,
                one.text,
                list(one.token_ids),
                value,
                one.stats.as_dict(),
                watcher.of_text(one.request_id, one.index),
            )
            for (item, one), value in zip(self._paired(items, done), rewards, strict=True)
        ]
        return Run(unit, arm.name, seconds, texts)

    def warm_up(self, arm: Arm, items: Sequence[Item]) -> None:
        length = min(WARM_UP_TOKENS, self.params.max_new_tokens)
        self._generate(arm, items, replace(self.params, max_new_tokens=length))

    def _paired(self, items: Sequence[Item], done: Sequence[Completion]) -> list[tuple[Item, Completion]]:
        texts = self.params.n
        return [(items[place // texts], one) for place, one in enumerate(done)]

    def _generate(
        self, arm: Arm, items: Sequence[Item], params: GenerationParams
    ) -> tuple[list[Completion], float, Watcher]:
        engine = self.engine
        engine.reset()
        engine.verify_against(params.method or "", arm.rule)
        watcher = Watcher(arm.rule, params.end_ids(engine.model.eos_token_ids))
        engine.watchers.append(watcher)
        base = params.seed or 0
        given = [replace(params, seed=base + item.index * params.n) for item in items]
        try:
            started = time.perf_counter()
            done = engine.generate([item.token_ids for item in items], given)
            seconds = time.perf_counter() - started - watcher.seconds
        finally:
            engine.watchers.remove(watcher)
        for item, one in self._paired(items, done):
            if one.error is not None:
                raise ValueError(f"arm {arm.name}, prompt {item.index + 1} of the data: {one.error}")
        return done, seconds, watcher


def measure(bench: Bench, arms: Sequence[Arm], items: Sequence[Item], batch_size: int, rows: Runs) -> None:
    """Run whatever the rows lack, all arms on a unit before the next, after a warm-up."""
    from tqdm import tqdm

    units, by_name = batches(items, batch_size), {arm.name: arm for arm in arms}
    plan = list(schedule(len(units), 1, list(by_name)))
    done = {(run.unit, run.arm) for run in rows.runs}
    todo = [(unit, name) for _, unit, name in plan if (unit, name) not in done]
    if todo:
        bench.warm_up(arms[0], units[0])
    with tqdm(total=len(plan), initial=len(plan) - len(todo), unit="run", disable=None) as bar:
        for unit, name in todo:
            bar.set_postfix_str(name)
            rows.add(bench.run(by_name[name], unit, units[unit]))
            bar.update()
