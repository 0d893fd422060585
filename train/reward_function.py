"""What a reward is: a number for each answer to a prompt. The rewards themselves are in rewards.py."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Answer:
    """A text to be judged and the row of its prompt: `Answer("3 + 4 is 7.\\n#### 7", {"reference": "#### 7"})`.

    text: after the task's post-processing. row: the prompt data's fields under the names that rewards know:
        reference: a text, or a list of texts of which any will do. UnitTests says which it reads.
    """

    text: str
    row: Mapping[str, Any]


class RewardFunction(ABC):
    """Judges answers, each by itself. Subclasses say how in `score`.

    The constructor is the configuration: plain values, so that a reward can be pickled and written in YAML
    (class_path, init_args). bounds: lowest and highest reward; [0, 1] for all of ours.
    """

    name: ClassVar[str]
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        """A reward within `bounds` per answer, in their order; what rounding puts outside is clipped.

        Raises ValueError for a row that lacks what the reward reads, and for a reward that is not finite.
        """
        for answer in answers:
            self.check(answer.row)
        rewards = [float(value) for value in self.score(answers)]
        if len(rewards) != len(answers):
            raise ValueError(f"reward {self.name} must give {len(answers)} rewards, one per answer, got {len(rewards)}")
        for answer, value in zip(answers, rewards, strict=True):
            if not math.isfinite(value):
                raise ValueError(f"reward {self.name} must be finite, got {value} for the answer {answer.text[:200]!r}")
        low, high = self.bounds
        return [min(max(value, low), high) for value in rewards]

    @abstractmethod
    def score(self, answers: Sequence[Answer]) -> Sequence[float]:
        """The rewards, not yet checked. Every row has passed `check`."""

    def check(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError, naming the field, for a row whose answers cannot be judged."""
        references(row)


def references(row: Mapping[str, Any]) -> list[str]:
    """The row's reference texts, at least one and none of them blank. Raises ValueError when there is none."""
    value = row.get("reference")
    texts: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
    if any(isinstance(text, bool) or not isinstance(text, str | int | float) for text in texts):
        raise ValueError(f"reference must be a text or a list of texts, got {_shown(value, row)}")
    texts = [str(text) for text in texts if str(text).strip()]
    if not texts:
        raise ValueError(f"reference must not be empty, got {value!r}: no answer could earn a reward")
    return texts


def _shown(value: Any, row: Mapping[str, Any]) -> str:
    return repr(value) if value is not None else f"none; the row has the fields {', '.join(row) or '(none)'}"
