"""Prompts of a task, batch by batch, and the reward of what is answered; or rollouts that were stored before."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from .data import RowsDataModule
from .documents import Source
from .prompts import Task, TaskPrompt, make_task, read_task_prompts
from .reward_function import RewardFunction
from .rollout import Rollouts


@dataclass
class PromptBatch:
    """Prompts with their places in the data, which seeds are made of."""

    indices: list[int]
    prompts: list[TaskPrompt]

    def __len__(self) -> int:
        return len(self.prompts)

    @classmethod
    def collate(cls, rows: Sequence[tuple[int, TaskPrompt] | None]) -> PromptBatch:
        """Without those that only fill up a rank's share."""
        kept = [row for row in rows if row is not None]
        return cls([index for index, _ in kept], [prompt for _, prompt in kept])


class PromptDataset(Dataset[tuple[int, TaskPrompt] | None]):
    """A task's prompts; index i + len(self) is None, what fills up a rank's share."""

    def __init__(self, prompts: Sequence[TaskPrompt]) -> None:
        self.prompts = prompts

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> tuple[int, TaskPrompt] | None:
        if not 0 <= index < 2 * len(self):
            raise IndexError(index)
        return (index, self.prompts[index]) if index < len(self) else None

    @property
    def summary(self) -> str:
        return f"{len(self)} prompts"

    def fingerprint(self) -> str:
        rows = json.dumps([[one.prompt, dict(one.row)] for one in self.prompts], sort_keys=True, default=str)
        return hashlib.sha256(rows.encode()).hexdigest()[:16]


class TaskDataModule(RowsDataModule):
    """Prompts of a task for DiversedModule.

    model: whose tokenizer counts: a hub id, a folder or a .gguf file.
    train, val, test: sources of rows, each a path, a data set's name or a `Source`.
    task: gsm8k, cnndm, xsum, mbpp, humaneval, wmt16 or plain (a field `prompt`): template, answers' end, reward.
    reward: another reward. template: another prompt, with {names} of the rows' fields. fields: our names to theirs.
    chat: the prompt is a user's message. limit, val_limit: only the first rows.
    batch_prompts: of a step and rank; several answers are drawn for each.
    """

    def __init__(
        self,
        model: str,
        train: str | Source | None = None,
        val: str | Source | None = None,
        test: str | Source | None = None,
        task: str = "gsm8k",
        reward: RewardFunction | None = None,
        template: str | None = None,
        fields: dict[str, str] | None = None,
        chat: bool = False,
        limit: int | None = None,
        val_limit: int | None = None,
        batch_prompts: int = 8,
        seed: int = 0,
        chat_template: str | None = None,
        allow_pickle: bool = False,
    ) -> None:
        if batch_prompts < 1:
            raise ValueError(f"batch_prompts must be at least 1, got {batch_prompts}")
        sources = {"train": train, "val": val, "test": test}
        super().__init__(model, sources, None, None, batch_prompts, seed, chat_template, allow_pickle)
        changes: dict[str, Any] = {"template": template, "reward": reward}
        self.task: Task = make_task(task, **{name: value for name, value in changes.items() if value is not None})
        self.reward = self.task.make_reward()
        self.chat, self.fields = chat, fields
        self.limits = {"train": limit, "val": val_limit, "test": val_limit}
        self.collate = PromptBatch.collate

    def read_split(self, name: str) -> PromptDataset:  # type: ignore[override]
        source = self.sources[name]
        return PromptDataset(
            read_task_prompts(source, self.task, self.chat, self.fields, self.limits[name], self.reward)
        )

    def judge(self, texts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """The reward of each text, an answer to the prompt of its row."""
        return self.reward([self.task.answer(text, row) for text, row in zip(texts, rows, strict=True)])


class StoredRollouts(Dataset[Rollouts | None]):
    """The files of `speclight rollout`, one a step; index i + len(self) is None."""

    def __init__(self, folder: str | Path) -> None:
        self.files = sorted(Path(folder).expanduser().glob("rollouts-*.safetensors"))
        if not self.files:
            raise ValueError(f"{folder} holds no rollouts; `speclight rollout --output {folder}` makes them")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Rollouts | None:
        if not 0 <= index < 2 * len(self):
            raise IndexError(index)
        return self.read(index)[0] if index < len(self) else None

    def read(self, index: int) -> tuple[Rollouts, dict[str, str]]:
        return Rollouts.load(self.files[index])

    @property
    def summary(self) -> str:
        return f"{len(self)} files of rollouts"

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
        return digest.hexdigest()[:16]


class RolloutDataModule(RowsDataModule):
    """Stored rollouts for DiversedModule: training then runs no language model at all.

    train: a folder of `speclight rollout`; one of its files makes a step.
    """

    valid_sources = "a folder of `speclight rollout`"

    def __init__(self, model: str, train: str, seed: int = 0, allow_pickle: bool = False) -> None:
        super().__init__(model, {"train": train, "val": None, "test": None}, None, None, 1, seed, None, allow_pickle)
        self.collate = RolloutBatch.collate

    def read_split(self, name: str) -> StoredRollouts:  # type: ignore[override]
        return StoredRollouts(self.sources[name])


@dataclass
class RolloutBatch:
    """One file's rollouts; None for what only fills up a rank's share. (Lightning would skip a batch that is None, and
    the other ranks would wait for this one.)"""

    rollouts: Rollouts | None

    @classmethod
    def collate(cls, rows: Sequence[Rollouts | None]) -> RolloutBatch:
        (row,) = rows
        return cls(row)
