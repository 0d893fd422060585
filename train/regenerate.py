"""`speclight regenerate`: let the target answer prompts, and make training rows of its answers.

Exit heads learn best from the target's own words. Answers are kept beside the output as they come, one line each, so a
run that was stopped anywhere goes on; the training rows are written anew from them at the end of each run. So they
hold each prompt of the input once, in its order, whatever was removed, added or moved in between.

An answer that was cut off at max_new_tokens teaches to go on where an end belongs, so it becomes no row unless asked
for. It still counts as answered: the same prompt would be cut off again. In a chat with several turns only the last
answer is the target's.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..infer.build import option
from ..infer.generate import AnswerOptions, prepared_jobs, run_missing, shaping_settings

if TYPE_CHECKING:
    from ..infer.jobs import Job

KEPT = ("stop",)
"""Finish reasons of answers that are whole."""


@dataclass(kw_only=True)
class RegenerateOptions(AnswerOptions):
    """Prompts, and where the training rows go."""

    input: str = option(..., 'JSONL file of {"id"?, "prompt" | "messages", ...request fields}; last answers in it go')
    output: str = option(..., 'JSONL file of {"id", "messages"}, or {"id", "prompt", "completion"} without chats')
    keep_truncated: bool = option(False, "make rows of answers too that were cut off at max_new_tokens")


def regenerate(options: RegenerateOptions) -> None:
    """Raises ValueError for whatever is not valid; all of it is checked before weights are read."""
    from ..infer.jobs import Results, read_jobs

    answers = Path(options.output + ".answers")
    _check_paths(options, answers)
    jobs = [_question(job) for job in read_jobs(options.input, options.params())]
    results = Results(answers, jobs, shaping_settings(options), options.overwrite)
    try:
        if results.missing:
            _run(options, results, jobs)
        _write(options, answers, jobs)
    finally:
        results.close()


def _check_paths(options: RegenerateOptions, answers: Path) -> None:
    output = Path(options.output)
    if Path(options.input).resolve() in (output.resolve(), answers.resolve()):
        raise ValueError(f"--output must be another file than --input {options.input!r}, and so must OUTPUT.answers")
    if output.exists() and not answers.exists() and not options.overwrite:
        raise ValueError(
            f"{output} exists without {answers.name}, so it is not of this command; use another --output or --overwrite"
        )


def _question(job: Job) -> Job:
    """The job without the answer that it may already have."""
    if job.is_messages:
        messages: Any = list(job.prompt)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise ValueError(f"{job.where}: messages must hold a turn that is not the assistant's, to be answered")
        return replace(job, prompt=messages)
    if not isinstance(job.prompt, str):
        raise ValueError(f"{job.where}: token_ids cannot become a training row, only prompt or messages")
    return job


def _run(options: RegenerateOptions, results: Any, jobs: Sequence[Job]) -> None:
    """Answer what is missing; what was answered before an interruption becomes rows too."""
    try:
        run_missing(options, results, len(jobs))
    except KeyboardInterrupt:
        if results.has_begun:
            _write(options, results.path, jobs)
        raise


def _write(options: RegenerateOptions, answers: Path, jobs: Sequence[Job]) -> None:
    """The training rows of all answers there are, and a line that says what became of the rest."""
    from ..infer.files import replace_file

    _, sent = prepared_jobs(options, jobs)
    found: dict[Any, list[dict[str, Any]]] = {}
    for line in answers.read_bytes().split(b"\n")[:-1]:
        row = json.loads(line)
        found.setdefault(row["id"], []).append(row)
    reasons: Counter[str] = Counter()
    rows = list(_training_rows(sent, found, options.keep_truncated, reasons))
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    replace_file(Path(options.output), text.encode("utf-8", "backslashreplace"))
    print(f"speclight: {options.output}: {_summary(len(rows), reasons, options.keep_truncated)}", file=sys.stderr)


def _training_rows(
    jobs: Iterable[Job], answers: Mapping[Any, Sequence[Mapping[str, Any]]], keep_truncated: bool, reasons: Counter[str]
) -> Iterator[dict[str, Any]]:
    """Rows in the order of the jobs. reasons: counts the finish reasons of all answers."""
    kept = (*KEPT, "length") if keep_truncated else KEPT
    for job in jobs:
        texts = sorted(answers.get(job.key, ()), key=lambda row: row["index"])
        for answer in texts:
            reasons[answer["finish_reason"]] += 1
            if answer["finish_reason"] in kept:
                number = {"index": answer["index"]} if job.params.n > 1 else {}
                yield {"id": job.key} | number | _as_row(job.prompt, answer["text"])


def _as_row(prompt: Any, text: str) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt, "completion": text}
    return {"messages": [*prompt, {"role": "assistant", "content": text}]}


def _summary(num_rows: int, reasons: Counter[str], keep_truncated: bool) -> str:
    """`95 rows; left out: 5 cut off at max_new_tokens (--keep-truncated keeps them), 1 with an error`"""
    cut, failed = 0 if keep_truncated else reasons["length"], reasons["error"] + reasons["cancelled"]
    left_out = [f"{cut} cut off at max_new_tokens (--keep-truncated keeps them)"] if cut else []
    left_out += [f"{failed} with an error"] if failed else []
    return f"{num_rows} rows" + (f"; left out: {', '.join(left_out)}" if left_out else "")
