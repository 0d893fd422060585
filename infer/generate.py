"""`speclight generate`: one prompt to the terminal, or a file of prompts to a file of results."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .build import EngineOptions, RequestOptions, build_engine, check_request, option, prepare

if TYPE_CHECKING:
    from .build import Prepared
    from .engine import Engine
    from .jobs import Job, Results
    from .request import Completion


@dataclass(kw_only=True)
class AnswerOptions(RequestOptions, EngineOptions):
    """What prompts become."""

    overwrite: bool = option(False, "begin the output anew")
    chat: bool | None = option(None, "prompts are a user's messages; if unset, when there is a chat template")
    system: str | None = option(None, "system message of every chat")


@dataclass(kw_only=True)
class GenerateOptions(AnswerOptions):
    """What to generate, and where it goes."""

    prompt: str | None = option(None, "one prompt, answered on standard output")
    input: str | None = option(None, 'JSONL file of {"id"?, "prompt" | "messages" | "token_ids", ...request fields}')
    output: str | None = option(None, "JSONL file of results; a second run continues it")
    stream: bool = option(False, "print text as it is decoded; in colour by origin on a terminal")
    json: bool = option(False, "print JSON rows instead of text")


def generate(options: GenerateOptions) -> int:
    """Exit status 1 when a text ended in an error.

    Raises ValueError for whatever is not valid; all of it is checked before weights are read.
    """
    _check_combination(options)
    return int(_generate_one(options) if options.input is None else _generate_file(options))


def _check_combination(options: GenerateOptions) -> None:
    if (options.prompt is None) == (options.input is None):
        raise ValueError("generate needs either --prompt TEXT, or --input F.jsonl with --output F.jsonl")
    if (options.input is None) != (options.output is None):
        raise ValueError("--input and --output go together")
    if options.prompt == "":
        raise ValueError("--prompt must not be empty")
    if options.input is not None and (options.stream or options.json):
        raise ValueError("--stream and --json are for --prompt; with --input the results are JSON rows in --output")
    if options.stream and options.n != 1:
        raise ValueError(f"--stream shows one text: n must be 1, got {options.n}")
    if options.output is not None and Path(options.output).resolve() == Path(options.input or "").resolve():
        raise ValueError(f"--output must be another file than --input {options.input!r}")


def prepared_jobs(options: AnswerOptions, jobs: Sequence[Job]) -> tuple[Prepared, list[Job]]:
    """All that can be checked without weights."""
    from .jobs import as_sent, check_each

    methods = [options.method, *(job.params.method for job in jobs if job.params.method is not None)]
    prepared = prepare(options, list(dict.fromkeys(methods)))
    sent = as_sent(jobs, prepared.is_chat(options.chat), options.system)
    needy = next((job for job in sent if job.is_messages), None)
    if needy is not None and not prepared.has_template:
        raise ValueError(
            f"{needy.where} is a chat, but the tokenizer of {options.model} has no chat template; "
            "give one with --chat-template FILE, or use a raw prompt without --chat"
        )
    intake = prepared.intake()

    def check(job: Job) -> None:
        check_request(prepared, job.params)
        intake.check(job.params)
        intake.encode(job.prompt)

    check_each(sent, check)
    return prepared, sent


def _generate_one(options: GenerateOptions) -> bool:
    """Whether a text ended in an error."""
    from .jobs import Job, run_jobs
    from .terminal import summary

    assert options.prompt is not None
    ready, jobs = prepared_jobs(options, [Job("prompt", "", "--prompt", options.prompt, options.params())])
    engine = build_engine(ready)
    if options.stream:
        completions = _stream(options, engine, jobs[0])
    else:
        completions = [completion for _, done in run_jobs(engine, jobs) for completion in done]
        for completion in completions:
            _print(options, completion)
    print(f"speclight: {summary(completions, ready.is_lossless)}", file=sys.stderr)
    return any(completion.error is not None for completion in completions)


def _print(options: GenerateOptions, completion: Completion) -> None:
    from .jobs import result_row

    if completion.error is not None:
        print(f"speclight: the text ended in an error: {completion.error}", file=sys.stderr)
    if options.json:
        print(json.dumps(result_row("prompt", completion), ensure_ascii=False))
    else:
        print(completion.text if options.n == 1 else f"[{completion.index}] {completion.text}")


def _stream(options: GenerateOptions, engine: Engine, job: Job) -> list[Completion]:
    from .terminal import LEGEND, print_stream, use_colour

    chunks = engine.stream(job.prompt, job.params)
    if not options.json:
        colour = use_colour(sys.stdout)
        completion = print_stream(chunks, engine.tokenizer, sys.stdout, colour)
        if colour:
            print(f"speclight: {LEGEND}", file=sys.stderr)
        return [] if completion is None else [completion]
    completions = []
    for chunk in chunks:
        print(json.dumps({"text": chunk.text, "token_ids": chunk.token_ids}, ensure_ascii=False), flush=True)
        if chunk.completion is not None:
            _print(options, chunk.completion)
            completions.append(chunk.completion)
    return completions


def _generate_file(options: GenerateOptions) -> bool:
    """Whether a text of this run ended in an error."""
    from .jobs import Results, read_jobs

    assert options.input is not None
    assert options.output is not None
    jobs = read_jobs(options.input, options.params())
    results = Results(options.output, jobs, shaping_settings(options), options.overwrite)
    try:
        if results.missing:
            return run_missing(options, results, len(jobs)) > 0
        print(f"speclight: {options.output} is complete: nothing left to do", file=sys.stderr)
        return False
    finally:
        results.close()


def run_missing(options: AnswerOptions, results: Results, total: int) -> int:
    """Answer what has no result yet, with a progress bar; what an interruption leaves is done by the next run.
    Returns how many texts ended in an error.
    """
    from tqdm import tqdm

    from .jobs import run_jobs
    from .terminal import summary

    done = total - len(results.missing)
    ready, jobs = prepared_jobs(options, results.missing)
    engine = build_engine(ready)
    completions: list[Completion] = []
    with tqdm(total=total, initial=done, unit="prompt", disable=None) as bar:
        try:
            for job, texts in run_jobs(engine, jobs):
                results.write(job, texts)
                completions += texts
                done += 1  # a bar without a terminal does not count
                bar.update()
        except KeyboardInterrupt:
            bar.close()
            print(f"speclight: {done} of {total} prompts are done; the same command continues", file=sys.stderr)
            raise
    print(f"speclight: {results.path}: {summary(completions, ready.is_lossless)}", file=sys.stderr)
    failed = [completion.error for completion in completions if completion.error is not None]
    if failed:
        print(f"speclight: {len(failed)} texts ended in an error, the first: {failed[0]}", file=sys.stderr)
    return len(failed)


def shaping_settings(options: AnswerOptions) -> dict[str, Any]:
    """What shapes the results: they may not change while a file is being filled."""
    from .bundles import content_digests

    shaping = {item.name: getattr(options, item.name) for item in fields(RequestOptions)}
    for name in ("model", "draft_model"):
        value = getattr(options, name)
        shaping[name] = str(Path(value).resolve()) if value is not None and Path(value).exists() else value
    for name in ("dtype", "draft_temperature", "chat", "system"):
        shaping[name] = getattr(options, name)
    for group in ("logitspec", "prompt_lookup", "early_exit", "hispec", "diversed", "target"):
        shaping |= {f"{group}.{name}": value for name, value in asdict(getattr(options, group)).items()}
    return shaping | content_digests(options)
