"""Rows become prompts, answers end where they should, a task names template, reward and fields at once."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from speclight.train.documents import Source
from speclight.train.prompts import TASKS, Cut, Task, TaskPrompt, make_task, read_task_prompts, render
from speclight.train.rewards import ExactMatch, NumberMatch, Rouge2, UnitTests

# a row of each public data set, as it is there
ROWS = {
    "gsm8k": {"question": "What is 3 + 4?", "answer": "It is <<3+4=7>>7.\n#### 7"},
    "cnndm": {"article": "A cat sat. It ate.", "highlights": "A cat sat .\nIt ate .", "id": "ab12"},
    "xsum": {"document": "A cat sat. It ate.", "summary": "A cat sat and ate.", "id": "12"},
    "mbpp": {
        "text": "Write a function to double a number.",
        "code": "def f(x):\r\n  return 2 * x",
        "task_id": 2,
        "test_setup_code": "",
        "test_list": ["assert f(2) == 4", "assert f(0) == 0"],
        "challenge_test_list": [],
    },
    "humaneval": {
        "task_id": "HumanEval/999",
        "prompt": 'def f(x: int) -> int:\n    """ Double it.\n    """\n',
        "entry_point": "f",
        "canonical_solution": "    return 2 * x\n",
        "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(2) == 4\n",
    },
    "wmt16": {"translation": {"de": "Die Katze sitzt auf der Matte.", "en": "The cat sits on the mat."}},
    "plain": {"prompt": "Say a.", "reference": "a"},
}
GOLD = {
    "gsm8k": ROWS["gsm8k"]["answer"],
    "cnndm": ROWS["cnndm"]["highlights"],
    "xsum": ROWS["xsum"]["summary"],
    "mbpp": ROWS["mbpp"]["code"],
    "humaneval": ROWS["humaneval"]["canonical_solution"],
    "wmt16": ROWS["wmt16"]["translation"]["en"],
    "plain": "a",
}
PROMPTS = {
    "gsm8k": "Question: What is 3 + 4?\n\nAnswer:",
    "cnndm": "Summarize the following article:\n\nArticle: A cat sat. It ate.\n\nSummary:",
    "xsum": "Write a concise summary of the following document:\n\nDocument: A cat sat. It ate.\n\nSummary:",
    "mbpp": "Write a Python function to solve the following problem:\n\nWrite a function to double a number.\n\n"
    "Your solution should pass these tests:\nassert f(2) == 4\nassert f(0) == 0",
    "humaneval": "Write a Python function to solve the following problem:\n\n" + ROWS["humaneval"]["prompt"],
    "wmt16": "Translate the following text from German to English:\n\n"
    "German: Die Katze sitzt auf der Matte.\n\nEnglish:",
    "plain": "Say a.",
}


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


# --- the tasks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(TASKS))
def test_a_public_row_becomes_the_papers_prompt_and_its_gold_answer_earns_the_full_reward(
    name: str, tmp_path: Path
) -> None:
    """Fails when a field goes under another name: the reward would find no reference."""
    task = TASKS[name]
    options = {"allow_execution": True} if task.reward == "unit-tests" else {}
    function = task.make_reward(**options)
    (prompt,) = read_task_prompts(write(tmp_path / "rows.jsonl", ROWS[name]), name, reward=function)
    assert prompt.prompt == PROMPTS[name]
    right, wrong = (task.answer(text, prompt.row) for text in (GOLD[name], "nothing of it"))
    assert function([right, wrong]) == pytest.approx([1.0, 0.0])


def test_the_other_mbpp_has_its_text_and_imports_under_other_names(tmp_path: Path) -> None:
    row = {"prompt": "Round up.", "test_imports": ["import math"], "test_list": ["assert f(1.5) == math.ceil(1.5)"]}
    (prompt,) = read_task_prompts(write(tmp_path / "rows.jsonl", row), "mbpp")
    assert "problem:\n\nRound up.\n\nYour" in prompt.prompt
    answer = TASKS["mbpp"].answer("def f(x): return int(x) + 1", prompt.row)
    assert UnitTests(allow_execution=True)([answer]) == [1.0]


@pytest.mark.parametrize(
    ("name", "answer", "expected"),
    [
        ("gsm8k", " 7\n\nQuestion: and 4 + 5?\n\nAnswer: 9", " 7\n\n"),
        ("gsm8k", " 7", " 7"),
        ("cnndm", " A cat.\n\nArticle: B\n\nArticle: C", " A cat."),
        ("cnndm", " Article: B", " Article: B"),  # only where a new paragraph begins
        ("xsum", " A cat.\n\nDocument: B", "A cat."),
        ("xsum", "  ".join(f"w{i}" for i in range(40)), " ".join(f"w{i}" for i in range(32))),
        ("wmt16", " A cat.\n\nGerman: B", " A cat."),
        ("mbpp", "def f():\n\n    pass", "def f():\n\n    pass"),
        ("gsm8k", "", ""),
        ("xsum", "", ""),
    ],
)
def test_an_answer_ends_where_the_next_example_would_begin(name: str, answer: str, expected: str) -> None:
    assert TASKS[name].answer(answer, {}).text == expected


def test_a_cut_is_at_the_first_of_its_stops() -> None:
    assert Cut(("c", "b"))("a b c") == "a "
    assert Cut(("x",), words=2)("a b c") == "a b"


def test_each_part_of_a_task_can_be_another() -> None:
    task = make_task("xsum", template="TL;DR {document}", reward=ExactMatch(), postprocess=Cut())
    assert task.fields == TASKS["xsum"].fields and isinstance(task.make_reward(), ExactMatch)
    assert render(task.template, {"document": "d"}) == "TL;DR d"
    assert isinstance(TASKS["xsum"].make_reward(), Rouge2)
    assert pickle.loads(pickle.dumps(task)).template == task.template


def test_code_is_not_run_unless_that_is_said() -> None:
    with pytest.raises(ValueError, match="allow_execution=True"):
        TASKS["mbpp"].make_reward()
    with pytest.raises(ValueError, match="options seconds are given, but the task's reward is made already"):
        Task("{prompt}", reward=NumberMatch()).make_reward(seconds=3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_task("gsm"), "task must be one of plain, gsm8k, .* got 'gsm'"),
        (
            lambda: make_task("gsm8k", prompt="x"),
            "a task has no 'prompt'; it has template, postprocess, reward, fields",
        ),
        (lambda: Task("no names"), "template must name a field of the rows.* got 'no names'"),
        (lambda: Task("{question"), "template cannot be read: .*other braces are doubled: '{question'"),
        (lambda: Task("{turns[0]}"), r"template must hold plain names as in {question}, got {turns\[0\]}; `fields`"),
        (lambda: Task("{a.__class__}"), "template must hold plain names"),
        (lambda: Task("{a!r}"), "template must hold plain names"),
        (lambda: Task("{}"), "template must hold plain names"),
        (lambda: Task("{a}", reward="rouge"), "reward must be one of numbers, .* got 'rouge'"),
        (lambda: Cut("Question:"), "stops must be a list of non-empty texts, got 'Question:'"),
        (lambda: Cut(("",)), "stops must be a list of non-empty texts"),
        (lambda: Cut(words=0), "words must be at least 1, or null for all, got 0"),
    ],
)
def test_a_wrong_setting_is_named(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# --- rows ------------------------------------------------------------------------------------------------------------


def test_a_chat_is_one_message_of_the_user(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS["plain"])
    assert read_task_prompts(path, "plain", chat=True) == [
        TaskPrompt([{"role": "user", "content": "Say a."}], ROWS["plain"])
    ]


def test_fields_are_found_in_lists_and_under_other_names_and_go_before_the_tasks(tmp_path: Path) -> None:
    row = {"turns": ["What is 3 + 4?", "And 5?"], "answer": "#### 8", "gold": {"final": ["#### 7"]}, "a.b": "dotted"}
    path = write(tmp_path / "rows.jsonl", row, row)
    fields = {"question": "turns.0", "reference": "gold.final", "c": "a.b"}
    (prompt,) = read_task_prompts(path, "gsm8k", fields=fields, limit=1)
    assert prompt.prompt == PROMPTS["gsm8k"]
    assert prompt.row == row | {"question": "What is 3 + 4?", "reference": ["#### 7"], "c": "dotted"}
    source = Source(path, limit=1)
    assert [p.prompt for p in read_task_prompts(source, "plain", fields={"prompt": "turns.1"})] == ["And 5?"]


def test_a_templates_own_braces_numbers_and_lists_are_written_as_they_are() -> None:
    row = {"n": 3, "lines": ["a", "b"], "text": "{n} stays, {0} too"}
    assert render("{{{n}}}\n{lines}\n{text}", row) == "{3}\na\nb\n{n} stays, {0} too"


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"id": 1}, {}, "the template needs the field 'question'; the row has id; `fields` can"),
        ({"question": ""}, {}, "question must be a text, a number or a list of texts, none empty, got ''"),
        ({"question": {"a": 1}}, {}, r"question must be .* got {'a': 1}"),
        ({"question": []}, {}, r"question must be .* got \[\]"),
        ({"question": None}, {}, "the template needs the field 'question'"),
        ({"question": "\ud800"}, {}, "prompt must be text, got half a surrogate pair at character 10"),
        (
            {"id": 1},
            {"fields": {"question": "turns.0"}},
            "there is no field 'turns.0' to be 'question'; the row has id",
        ),
        ({"turns": ["a"]}, {"fields": {"question": "turns.1"}}, "there is no field 'turns.1'"),
        ({"turns": "ab"}, {"fields": {"question": "turns.0"}}, "there is no field 'turns.0'"),
        ({"question": "q"}, {"reward": NumberMatch()}, "reference must be a text or a list of texts, got none"),
        ({"question": "q", "answer": "x"}, {"reward": NumberMatch()}, "reference must hold a number, got 'x'"),
    ],
)
def test_a_wrong_row_is_named_by_file_line_and_field(tmp_path: Path, row: dict, settings: dict, message: str) -> None:
    fine = ROWS["gsm8k"] | {"turns": ["a", "b"]}
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: {message}"):
        read_task_prompts(write(tmp_path / "rows.jsonl", fine, row), "gsm8k", **settings)


def test_no_rows_and_no_file_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match=r"rows\.jsonl holds no rows"):
        read_task_prompts(path, "gsm8k")
    with pytest.raises(ValueError, match="limit must be at least 1 row, or null for all, got 0"):
        read_task_prompts(path, "gsm8k", limit=0)
    with pytest.raises(ValueError, match=r"nowhere\.jsonl does not exist"):
        read_task_prompts("nowhere.jsonl", "gsm8k")
    with pytest.raises(ValueError, match="task must be one of plain"):
        read_task_prompts(path, "nothing")


def test_a_saved_data_set_is_a_source_too(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"test": datasets.Dataset.from_list([ROWS["gsm8k"]])}).save_to_disk(str(tmp_path / "saved"))
    (prompt,) = read_task_prompts(Source(str(tmp_path / "saved"), split="test"), "gsm8k")
    assert prompt.prompt == PROMPTS["gsm8k"]
