"""The prompts of a benchmark: Spec-Bench's format, a selection spread over the groups of tasks, turns to token ids."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .summary import REFERENCE, group_of

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(frozen=True)
class Question:
    """A row of the data."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]

    @property
    def group(self) -> str:
        return group_of(self.category)


def read_questions(path: str | Path) -> list[Question]:
    """All rows, sorted by question_id. Raises ValueError naming the line and field of the first that is not valid."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    questions = [_read_question(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    repeated = [question_id for question_id, count in Counter(q.question_id for q in questions).items() if count > 1]
    if repeated:
        raise ValueError(f"{path}: question_id must be unique, {repeated[0]!r} is not")
    if not questions:
        raise ValueError(f"{path} holds no questions")
    return sorted(questions, key=lambda q: (isinstance(q.question_id, str), q.question_id))


def _read_question(where: str, line: str) -> Question:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON ({error})") from error
    checks: dict[str, tuple[Callable[[Any], bool], str]] = {
        "question_id": (lambda value: isinstance(value, int | str), "a number or a string"),
        "category": (lambda value: isinstance(value, str), "a string"),
        "turns": (lambda value: isinstance(value, list) and value and all(map(_is_text, value)), "a list of texts"),
    }
    for name, (is_valid, wanted) in checks.items():
        value = row.get(name) if isinstance(row, dict) else None
        if not is_valid(value):
            raise ValueError(f"{where}: {name} must be {wanted}, got {value!r}")
    return Question(row["question_id"], row["category"], tuple(row["turns"]))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def select(
    questions: Sequence[Question], per_group: int | None = None, stride: int = 1, limit: int | None = None
) -> list[Question]:
    """The 0th, stride-th, ... of each group, at most `per_group`; groups take turns, and `limit` ends it all."""
    groups: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        groups[question.group].append(question)
    chosen = [members[::stride][:per_group] for members in groups.values()]
    turns = [[m[place] for m in chosen if place < len(m)] for place in range(max(map(len, chosen)))]
    return [question for turn in turns for question in turn][:limit]


@dataclass(frozen=True)
class Item:
    """A prompt, ready to run."""

    question: Question
    turn: int
    token_ids: Sequence[int]


def make_items(
    engine: Engine, questions: Sequence[Question], turns: str, chat: bool, max_new_tokens: int
) -> list[Item]:
    """Prompts of the first turns or of all, in the order of the questions; they are the same for all methods."""
    items: dict[tuple[int, int], Item] = {}
    dialogues: dict[int, list[dict[str, str]]] = {place: [] for place in range(len(questions))}
    for turn in range(max(len(q.turns) for q in questions) if turns == "all" else 1):
        asking = [place for place, question in enumerate(questions) if turn < len(question.turns)]
        if turn:
            _answer(engine, asking, items, dialogues, turn - 1, max_new_tokens)
        for place in asking:
            text = questions[place].turns[turn]
            dialogues[place].append({"role": "user", "content": text})
            token_ids = engine.encode(dialogues[place] if chat else text)
            items[place, turn] = Item(questions[place], turn, token_ids)
    return [items[key] for key in sorted(items)]


def _answer(
    engine: Engine,
    places: Sequence[int],
    items: Mapping[tuple[int, int], Item],
    dialogues: Mapping[int, list[dict[str, str]]],
    turn: int,
    max_new_tokens: int,
) -> None:
    """Put plain decoding's answers to the last turn into the dialogues."""
    from .request import GenerationParams

    prompts = [items[place, turn].token_ids for place in places]
    completions = engine.generate(prompts, GenerationParams(method=REFERENCE, max_new_tokens=max_new_tokens))
    for place, completion in zip(places, completions, strict=True):
        dialogues[place].append({"role": "assistant", "content": completion.text})
