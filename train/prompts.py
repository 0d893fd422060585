"""Tasks: what a model is asked, where its answer ends, what rewards it.

Prompts and post-processing are those of DIVERSED's experiments (arXiv 2604.07622, experimental setup, and its code's
data loaders), zero-shot. Few-shot prompts are left out: a template of one's own can hold the examples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from string import Formatter
from typing import TYPE_CHECKING, Any

from ..infer.request import Prompt
from .documents import Source, check_text, read_rows
from .reward_function import Answer, RewardFunction
from .rewards import REWARDS
from .rewards import reward as reward_by_name

if TYPE_CHECKING:
    from ..infer.engine import Engine

# --- what a task is --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """Keeps an answer up to the first of `stops`, and of that the first `words` words: `Cut(("Question:",))`.

    words: None for all; otherwise the words come joined by single spaces.
    """

    stops: tuple[str, ...] = ()
    words: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stops, str) or not all(self.stops):
            raise ValueError(f"stops must be a list of non-empty texts, got {self.stops!r}")
        if self.words is not None and self.words < 1:
            raise ValueError(f"words must be at least 1, or null for all, got {self.words}")

    def __call__(self, answer: str) -> str:
        end = min((at for at in map(answer.find, self.stops) if at >= 0), default=len(answer))
        answer = answer[:end]
        return answer if self.words is None else " ".join(answer.split()[: self.words])


@dataclass(frozen=True)
class Task:
    """A task: `TASKS["gsm8k"]`, or one's own, `Task("Say {word} backwards:", reward="exact")`.

    template: the prompt, with {names} of the row's fields; a list of texts is written one a line. Braces that are to
        stay are doubled.
    postprocess: what of an answer is judged.
    reward: a RewardFunction, or its short name, for `make_reward`.
    fields: a name that template or reward want to the rows' own names for it, the first that is there counting; only
        where a row lacks the name itself. "translation.en" is the field en of the field translation.
    """

    template: str
    postprocess: Callable[[str], str] = Cut()
    reward: str | RewardFunction = "exact"
    fields: Mapping[str, str | Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = template_fields(self.template)
        if not names:
            raise ValueError(f"template must name a field of the rows, as in {{question}}, got {self.template!r}")
        if isinstance(self.reward, str) and self.reward not in REWARDS:
            raise ValueError(f"reward must be one of {', '.join(REWARDS)}, got {self.reward!r}")

    def make_reward(self, **options: Any) -> RewardFunction:
        """The reward. options: of its constructor, where the task names it; `allow_execution` for unit-tests.

        Raises ValueError for options of a reward that is made already.
        """
        if isinstance(self.reward, str):
            return reward_by_name(self.reward, **options)
        if options:
            raise ValueError(f"options {', '.join(options)} are given, but the task's reward is made already")
        return self.reward

    def answer(self, text: str, row: Mapping[str, Any]) -> Answer:
        """What the reward judges of a completion."""
        return Answer(self.postprocess(text), row)


# --- rows become prompts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskPrompt:
    """What the engine is asked, and what the reward reads: `TaskPrompt("Question: 3+4?\\n\\nAnswer:", {...})`.

    prompt: a text, or messages for the chat template. row: all fields, also under the names that the task gives them.
    """

    prompt: Prompt
    row: Mapping[str, Any]


def read_task_prompts(
    source: str | Source,
    task: str | Task,
    chat: bool = False,
    fields: Mapping[str, str] | None = None,
    limit: int | None = None,
    reward: RewardFunction | None = None,
) -> list[TaskPrompt]:
    """The rows of a source as prompts of a task, in their order.

    source: a file, a folder or a data set, as for training (`Source` gives a split, too). task: a name of TASKS too.
    chat: the prompt is a user's message. fields: our names to the rows' own, `{"question": "turns.0"}`; these have to
        be there, and go before the task's. limit: only the first rows. reward: checks that it can judge every row.

    Raises ValueError naming place and field of the first row that is not valid, and for a source without rows.
    """
    source = Source(source) if isinstance(source, str) else source
    task = make_task(task) if isinstance(task, str) else task
    fields = {**source.fields, **(fields or {})}
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 row, or null for all, got {limit}")
    rows = islice(read_rows(replace(source, fields={})), limit)
    prompts = list(_task_prompts(rows, task, chat, fields, reward))
    if not prompts:
        raise ValueError(f"{source.path} holds no rows")
    return prompts


def _task_prompts(
    rows: Iterator[tuple[str, Mapping[str, Any]]],
    task: Task,
    chat: bool,
    fields: Mapping[str, str],
    reward: RewardFunction | None,
) -> Iterator[TaskPrompt]:
    for where, row in rows:
        try:
            row = with_fields(row, fields, task.fields)
            text = render(task.template, row)
            if reward is not None:
                reward.check(row)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        yield TaskPrompt([{"role": "user", "content": text}] if chat else text, row)


def with_fields(
    row: Mapping[str, Any], fields: Mapping[str, str], defaults: Mapping[str, str | Sequence[str]]
) -> dict[str, Any]:
    """The row with more names for its values: those of `fields`, which have to be there, and of `defaults`, if so."""
    named = dict(row)
    for name, path in fields.items():
        value = _lookup(row, path)
        if value is None:
            raise ValueError(f"there is no field {path!r} to be {name!r}; the row has {_names(row)}")
        named[name] = value
    for name, paths in defaults.items():
        values = [_lookup(row, path) for path in ([paths] if isinstance(paths, str) else paths)]
        found = [value for value in values if value is not None]
        if name not in named and found:
            named[name] = found[0]
    return named


def _lookup(row: Any, path: str) -> Any:
    """The value at "turns.0" or "translation.en"; None where there is none. A field named with dots goes first."""
    if isinstance(row, Mapping) and path in row:
        return row[path]
    for step in path.split("."):
        if isinstance(row, Mapping):
            row = row.get(step)
        elif isinstance(row, list) and re.fullmatch("[0-9]+", step) and int(step) < len(row):
            row = row[int(step)]
        else:
            return None
    return row


def template_fields(template: str) -> list[str]:
    """The names in a template. Raises ValueError for one that is not made of text and plain {names}."""
    try:
        parts = [(name, form, change) for _, name, form, change in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(
            f"template cannot be read: {error}; names stand in {{braces}}, other braces are doubled: {template!r}"
        ) from error
    for name, form, change in parts:
        if form or change or not name.isidentifier():
            raise ValueError(
                f"template must hold plain names as in {{question}}, got {{{name}}}; `fields` can name what lies "
                "deeper, and other braces are doubled"
            )
    return [name for name, _, _ in parts]


def render(template: str, row: Mapping[str, Any]) -> str:
    """The template with the row's texts, numbers and lists of texts. Raises ValueError naming the field."""
    values = {name: _written(name, row) for name in template_fields(template)}
    text = template.format_map(values)
    check_text("prompt", text)
    return text


def _written(name: str, row: Mapping[str, Any]) -> str:
    if name not in row:
        raise ValueError(
            f"the template needs the field {name!r}; the row has {_names(row)}; `fields` can give it another's value"
        )
    value = row[name]
    lines = value if isinstance(value, list) and value else [value]
    if any(isinstance(line, bool) or not isinstance(line, str | int | float) for line in lines) or value == "":
        raise ValueError(f"{name} must be a text, a number or a list of texts, none empty, got {value!r}")
    return "\n".join(map(str, lines))


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(row) or "no fields"


# --- by name ---------------------------------------------------------------------------------------------------------

CODE = "Write a Python function to solve the following problem:\n\n"

TASKS: dict[str, Task] = {
    "plain": Task("{prompt}"),
    "gsm8k": Task(
        "Question: {question}\n\nAnswer:",
        Cut(("Question:",)),
        "numbers",
        {"reference": "answer"},
    ),
    "cnndm": Task(
        "Summarize the following article:\n\nArticle: {article}\n\nSummary:",
        Cut(("\n\nArticle:",)),
        "rouge2",
        {"reference": "highlights"},
    ),
    "xsum": Task(
        "Write a concise summary of the following document:\n\nDocument: {document}\n\nSummary:",
        Cut(("\n\nDocument:",), words=32),
        "rouge2",
        {"reference": "summary"},
    ),
    "mbpp": Task(
        CODE + "{text}\n\nYour solution should pass these tests:\n{tests}",
        Cut(),
        "unit-tests",
        {"text": "prompt", "tests": "test_list", "setup": ("test_setup_code", "test_imports")},
    ),
    "humaneval": Task(
        CODE + "{prompt}",
        Cut(),
        "unit-tests",
        {"tests": "test", "prefix": "prompt"},
    ),
    "wmt16": Task(
        "Translate the following text from German to English:\n\nGerman: {de}\n\nEnglish:",
        Cut(("\n\nGerman:",)),
        "bleu",
        {"de": "translation.de", "reference": ("translation.en", "en")},
    ),
}


def make_task(name: str, **overrides: Any) -> Task:
    """A task of TASKS, with some of its fields replaced: `make_task("xsum", postprocess=Cut())`.

    Raises ValueError for a name or a field that there is not, with those that there are.
    """
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {name!r}")
    for override in overrides:
        if override not in Task.__dataclass_fields__:
            raise ValueError(f"a task has no {override!r}; it has {', '.join(Task.__dataclass_fields__)}")
    return replace(TASKS[name], **overrides)


def fitting_ids(engine: Engine, prompt: Prompt, max_new_tokens: int) -> list[int]:
    """A prompt's token ids. Raises ValueError, "has 9 tokens; ...", where so many new ones do not fit behind them."""
    token_ids, room = engine.encode(prompt), engine.max_length - max_new_tokens
    if len(token_ids) > room:
        raise ValueError(f"has {len(token_ids)} tokens; with {max_new_tokens} new ones at most {max(room, 0)} fit")
    return token_ids
