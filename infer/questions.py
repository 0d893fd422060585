"""The prompts of a benchmark: Spec-Bench's format, a selection spread over the groups of tasks, turns to token ids."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .jsonl import is_key, read_jsonl
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
    questions = [_read_question(where, row) for where, row in read_jsonl(path)]
    repeated = [question_id for question_id, count in Counter(q.question_id for q in questions).items() if count > 1]
    if repeated:
        raise ValueError(f"{path}: question_id must be unique, {repeated[0]!r} is not")
    if not questions:
        raise ValueError(f"{path} holds no questions")
    return sorted(questions, key=lambda q: (isinstance(q.question_id, str), q.question_id))


def _read_question(where: str, row: Mapping[str, Any]) -> Question:
    checks: dict[str, tuple[Callable[[Any], bool], str]] = {
        "question_id": (is_key, "an integer or a string"),
        "category": (lambda value: isinstance(value, str), "a string"),
        "turns": (
            lambda value: isinstance(value, list) and value != [] and all(map(_is_text, value)),
            "a list of texts",
        ),
    }
    for name, (is_valid, wanted) in checks.items():
        value = row.get(name)
        if not is_valid(value):
            raise ValueError(
                f"{where}: {name} must be {wanted}, got {value!r}; rows of Spec-Bench's format have {', '.join(checks)}"
            )
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


def check_room(max_length: int, max_new_tokens: int) -> None:
    """Raise ValueError when new tokens leave a text of at most `max_length` no room for a prompt."""
    if max_new_tokens >= max_length:
        raise ValueError(
            f"max_new_tokens must leave room for a prompt: at most {max_length - 1} of {max_length} tokens, "
            f"got {max_new_tokens}"
        )


@dataclass(frozen=True)
class Item:
    """A prompt, ready to run."""

    question: Question
    turn: int
    token_ids: Sequence[int]


def make_items(
    engine: Engine, questions: Sequence[Question], turns: str, chat: bool, max_new_tokens: int
) -> tuple[list[Item], dict[int | str, str]]:
    """Prompts of the first turns or of all, in the order of the questions, the same for all methods.

    Also {question_id: reason} of questions left out, at the first turn that cannot run with all its new tokens.
    """
    dialogues = {question.question_id: Dialogue(question) for question in questions}
    left_out: dict[int | str, str] = {}
    for turn in range(max(len(q.turns) for q in questions) if turns == "all" else 1):
        asking = [d for key, d in dialogues.items() if key not in left_out and turn < len(d.question.turns)]
        if turn:
            _answer(engine, asking, max_new_tokens)
        for dialogue in asking:
            try:
                dialogue.ask(engine, turn, chat, max_new_tokens)
            except ValueError as error:
                left_out[dialogue.question.question_id] = str(error)
    return [item for dialogue in dialogues.values() for item in dialogue.items], left_out


@dataclass
class Dialogue:
    """A question as it unfolds."""

    question: Question
    messages: list[dict[str, str]] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)

    def ask(self, engine: Engine, turn: int, chat: bool, max_new_tokens: int) -> None:
        """Make the turn's prompt. Raises ValueError when the context has no room for it and its answer."""
        text = self.question.turns[turn]
        self.messages.append({"role": "user", "content": text})
        token_ids = engine.encode(self.messages if chat else text)
        room = max(engine.max_length - max_new_tokens, 0)
        if len(token_ids) > room:
            raise ValueError(f"prompt has {len(token_ids)} tokens; with {max_new_tokens} new ones at most {room} fit")
        self.items.append(Item(self.question, turn, token_ids))


def _answer(engine: Engine, dialogues: Sequence[Dialogue], max_new_tokens: int) -> None:
    """Put plain decoding's answers to the last turn into the dialogues."""
    from .request import GenerationParams

    prompts = [dialogue.items[-1].token_ids for dialogue in dialogues]
    completions = engine.generate(prompts, GenerationParams(method=REFERENCE, max_new_tokens=max_new_tokens))
    for dialogue, completion in zip(dialogues, completions, strict=True):
        dialogue.messages.append({"role": "assistant", "content": completion.text})
