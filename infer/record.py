"""`speclight record`: what a model says to a set of prompts, and its likeliest tokens at every position.

Plain greedy decoding by our engine. The likeliest tokens come from one more pass over each finished text, which gives
them for the prompt's positions as well.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .build import EngineOptions, build_engine, option, prepare
from .files import ANEW, check_same, held_folder
from .questions import Item, Question, check_room, make_items, read_questions, select

if TYPE_CHECKING:
    from torch import Tensor

    from ..modules.layered_model import LayeredModel
    from .build import Prepared
    from .engine import Engine
    from .recording import RecordedText

ROWS = 64
"""Positions whose logits exist at once."""


@dataclass(kw_only=True)
class RecordOptions(EngineOptions):
    """What is recorded, and where it goes."""

    data: str = option(..., "JSONL file in Spec-Bench's format: question_id, category, turns; the first turn is asked")
    output: str = option(..., "folder of the recording; a second run continues it")
    limit: int | None = option(None, "at most this many questions, spread over the groups")
    per_group: int | None = option(None, "at most this many questions of each group")
    stride: int = option(1, "every how many-th question of a group, sorted by question_id")
    rest: bool = option(False, "the questions that this choice leaves out, instead")
    max_new_tokens: int = option(128, "per text")
    top_k: int = option(64, "most likely tokens stored per position")
    chat: bool | None = option(None, "prompts are a user's messages; if unset, when there is a chat template")
    overwrite: bool = option(False, "begin the output anew")


def record(options: RecordOptions) -> None:
    """Record what is missing, with a progress bar. Raises ValueError for what is not valid, before weights are read."""
    _check(options)
    questions = _chosen(options)
    prepared = prepare(options, ["ar"])
    chat = prepared.is_chat(options.chat)
    _check_prompts(prepared, questions, chat, options.max_new_tokens)
    folder = Path(options.output)
    meta = _meta(options, questions)
    _check_folder(folder, meta, options.overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    with held_folder(folder):
        missing = list(range(len(questions))) if options.overwrite else _missing(folder, len(questions))
        if not missing:
            print(f"speclight: {options.output} is complete: nothing left to do", file=sys.stderr)
            return
        engine, items = _loaded(prepared, [questions[index] for index in missing], chat, options.max_new_tokens)
        _begin(folder, meta | {"model": _facts(engine, prepared)}, options.overwrite)
        _record_missing(folder, options, engine, items, missing, len(questions))
    print(f"speclight: {options.output}: {len(questions)} texts", file=sys.stderr)


def _check(options: RecordOptions) -> None:
    for name in ("limit", "per_group", "stride", "max_new_tokens", "top_k"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def _chosen(options: RecordOptions) -> list[Question]:
    everything = read_questions(options.data)
    chosen = select(everything, options.per_group, options.stride, options.limit)
    if not options.rest:
        return chosen
    taken = {question.question_id for question in chosen}
    if len(taken) == len(everything):
        raise ValueError("rest must leave questions: per_group, stride and limit choose all of them")
    return select([question for question in everything if question.question_id not in taken])


def _check_prompts(prepared: Prepared, questions: Sequence[Question], chat: bool, max_new_tokens: int) -> None:
    """Raise ValueError, naming the question, for a prompt that the model cannot take or has no room for."""
    intake = prepared.intake()
    check_room(intake.max_length, max_new_tokens)
    room = intake.max_length - max_new_tokens
    for question in questions:
        text = question.turns[0]
        try:
            length = len(intake.encode([{"role": "user", "content": text}] if chat else text))
        except ValueError as error:
            raise ValueError(f"question_id {question.question_id!r}: {error}") from error
        if length > room:
            raise ValueError(
                f"question_id {question.question_id!r}: the prompt has {length} tokens; with max_new_tokens "
                f"{max_new_tokens} at most {room} fit"
            )


def _meta(options: RecordOptions, questions: Sequence[Question]) -> dict[str, Any]:
    """What shapes a recording; it may not change while one is being filled."""
    from .bundles import content_digests, digest

    settings = {name: getattr(options, name) for name in ("dtype", "max_new_tokens", "top_k", "chat")}
    settings["model"] = Path(options.model).name
    settings |= {"data": Path(options.data).name, "data_digest": digest(options.data)} | content_digests(options)
    texts = [{"question_id": q.question_id, "category": q.category} for q in questions]
    return {"settings": settings, "texts": texts}


def _check_folder(folder: Path, now: Mapping[str, Any], overwrite: bool) -> None:
    """Raise ValueError for a folder that holds something else, or a recording of other settings."""
    from .recording import META, read_meta

    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / META).exists():
        raise ValueError(f"output folder {str(folder)!r} is not empty and holds no recording; choose another")
    if overwrite:
        return
    before = read_meta(folder)
    check_same(f"{folder} was recorded", before["settings"], now["settings"])
    if before["texts"] != now["texts"]:
        raise ValueError(f"{folder} holds other questions; {ANEW}")


def _missing(folder: Path, count: int) -> list[int]:
    from .recording import text_path

    return [index for index in range(count) if not text_path(folder, index).exists()]


def _loaded(
    prepared: Prepared, questions: Sequence[Question], chat: bool, max_new_tokens: int
) -> tuple[Engine, list[Item]]:
    """The engine and its prompts. Raises ValueError where the cache, smaller than the context, has no room for one."""
    engine = build_engine(prepared)
    items, left_out = make_items(engine, questions, "first", chat, max_new_tokens)
    if left_out:
        question_id, reason = next(iter(left_out.items()))
        raise ValueError(f"question_id {question_id!r} cannot be recorded: {reason}; a larger kv_memory helps")
    return engine, items


def _begin(folder: Path, meta: Mapping[str, Any], overwrite: bool) -> None:
    """Nothing can be refused any more: only now does what is to be overwritten go."""
    from .recording import write_meta

    for path in folder.glob("*.npz") if overwrite else ():
        path.unlink()
    write_meta(folder, meta)


def _facts(engine: Engine, prepared: Prepared) -> dict[str, Any]:
    """What evaluating drafters needs to know of the model."""
    from .loading import tokenizer_fingerprint

    return {
        "vocab_size": engine.model.vocab_size,
        "stop_ids": sorted(engine.model.eos_token_ids),
        "tokenizer": tokenizer_fingerprint(prepared.tokenizer),
    }


def _record_missing(
    folder: Path, options: RecordOptions, engine: Engine, items: Sequence[Item], missing: Sequence[int], total: int
) -> None:
    from tqdm import tqdm

    from .recording import text_path, write_text

    with tqdm(total=total, initial=total - len(missing), unit="text", disable=None) as bar:
        for place, text in recorded(engine, items, options.max_new_tokens, options.top_k):
            write_text(text_path(folder, missing[place]), text)
            bar.update()


def recorded(engine: Engine, items: Sequence[Item], max_new_tokens: int, k: int) -> Iterator[tuple[int, RecordedText]]:
    """Yield each text with its place among the items, as the texts end."""
    import numpy as np

    from .recording import RecordedText
    from .request import GenerationParams

    order: list[str] = []
    prompts = [list(item.token_ids) for item in items]
    params = GenerationParams(method="ar", max_new_tokens=max_new_tokens)
    for chunk in engine.stream(prompts, params, order):
        done = chunk.completion
        if done is None:
            continue
        if done.error is not None:
            raise RuntimeError(f"a text ended in an error: {done.error}")
        place = order.index(done.request_id)
        token_ids, question = [*done.prompt_ids, *done.token_ids], items[place].question
        top_ids, top_logprobs = score(engine.model, token_ids, k)
        yield (
            place,
            RecordedText(
                question.question_id,
                question.category,
                np.array(token_ids, dtype=np.int32),
                len(done.prompt_ids),
                top_ids.numpy().astype(np.int32),
                top_logprobs.numpy(),
            ),
        )


def score(model: LayeredModel, token_ids: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """([tokens, k] ids, [tokens, k] float32 log-probabilities) of the likeliest successors of every token."""
    import torch

    from ..modules.batch import BatchItem, RaggedBatch
    from ..modules.sampling import likeliest

    with torch.inference_mode():
        batch = RaggedBatch.build([BatchItem(token_ids)], None, model.device)
        hidden = model.run(model.embed(batch), batch, None, 0, model.num_layers)
        parts = [likeliest(model.logits(rows), k) for rows in hidden.split(ROWS)]
    return torch.cat([ids for ids, _ in parts]).cpu(), torch.cat([values for _, values in parts]).float().cpu()
