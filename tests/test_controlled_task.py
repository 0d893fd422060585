"""The controlled task: what it promises of its rows, its tokens and its reward."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from random import Random

import pytest
from speclight.train.prompts import make_task, read_task_prompts
from speclight.train.tokenizer import train_tokenizer

TASK = runpy.run_path(str(Path(__file__).parent.parent / "docs" / "controlled_task.py"))
FILES = ("train.jsonl", "val.jsonl", "train_prompts.jsonl", "test_prompts.jsonl", "words.txt")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    TASK["write_data"](folder, texts=50, sums=500, prompts=40, seed=0)
    return folder


def rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def added(row: dict[str, str]) -> str:
    (pair,) = re.findall(r"\d+\+\d+", row["prompt"])
    return pair


def test_everything_follows_from_the_seed(data: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        TASK["write_data"](tmp_path / str(seed), texts=50, sums=500, prompts=40, seed=seed)
    for name in FILES:
        assert (tmp_path / "0" / name).read_bytes() == (data / name).read_bytes()
    assert (tmp_path / "1" / "train.jsonl").read_bytes() != (data / "train.jsonl").read_bytes()


def test_what_is_asked_in_tests_was_never_trained_on(data: Path) -> None:
    """Else a model that remembers sums would pass for one that adds."""
    trained = {added(row) for name in ("train", "train_prompts") for row in rows(data / f"{name}.jsonl")}
    assert trained.isdisjoint(added(row) for name in ("val", "test_prompts") for row in rows(data / f"{name}.jsonl"))


def test_every_word_is_one_token_and_every_digit_too(data: Path) -> None:
    """Else drafts and verdicts would be about parts of words, and a digit's reward about several."""
    tokenizer = train_tokenizer(iter((data / "words.txt").read_text().splitlines(keepends=True)), 4096, 1)
    for row in rows(data / "train.jsonl"):
        text = row["prompt"] + row["completion"]
        parts = [tokenizer.decode([token]) for token in tokenizer(text).input_ids]
        assert parts == re.findall(r" ?[A-Za-z]+|\d|[^A-Za-z\d]", text)


def test_the_reward_reads_the_sum_and_nothing_of_the_story(data: Path) -> None:
    task = make_task("plain", reward="numbers")
    reward, random = task.make_reward(), Random(5)
    for prompt in read_task_prompts(str(data / "test_prompts.jsonl"), task, reward=reward):
        story = TASK["story"](TASK["Styles"].draw(random), random)
        number = int(prompt.row["reference"])
        answers = [task.answer(f" {story}. Sum: {said}", prompt.row) for said in (number, number + 1)]
        assert reward.score(answers) == [1.0, 0.0]
