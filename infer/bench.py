"""`speclight bench`: methods against each other and against transformers, on the same prompts in the same run.

Units (a prompt, or a batch of them) are run one after the other, each by every method, in an order that rotates from
unit to unit, after a warm-up. Every run starts cold: caches and what drafters have learned are forgotten before it, so
no method profits from another's having read the prompt. `questions.py` chooses the prompts, `measure.py` runs and keeps
rows, `summary.py` and `report.py` make tables of them.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .build import EngineOptions, build_engine, check_method, did_you_mean, option, prepare
from .compare import NEAR_TIE
from .measure import Ledger, Runner, batches, engine_runner, find_differences, measure, peer_runner
from .questions import Item, check_room, make_items, read_questions, select
from .report import Header, build_report, overall_table, write_report
from .summary import REFERENCE

if TYPE_CHECKING:
    from .build import Prepared
    from .engine import Engine
    from .request import GenerationParams

PLAIN_PEER, LOOKUP_PEER = "transformers", "transformers+prompt-lookup"
CONTINUOUS_PEER = "transformers-continuous"
PEERS = {
    "transformers": (PLAIN_PEER, LOOKUP_PEER),
    "transformers-plain": (PLAIN_PEER,),
    LOOKUP_PEER: (LOOKUP_PEER,),
    CONTINUOUS_PEER: (CONTINUOUS_PEER,),
}
"""--peers values, and the rows that each stands for."""


@dataclass(kw_only=True)
class BenchOptions(EngineOptions):
    """What is measured, and on what."""

    data: str = option(..., "JSONL file in Spec-Bench's format: question_id, category, turns")
    output: str = option(..., "folder for report.md, report.json, report.png and the rows; a second run continues it")
    methods: tuple[str, ...] = option(
        ("prompt-lookup", "logitspec"), "a,b,c; logitspec:16 sets a proposal's size; ar is always there", nargs="+"
    )
    peers: tuple[str, ...] = option(
        (), "transformers: its generate, and its prompt lookup; transformers-continuous: its generate_batch", nargs="+"
    )
    limit: int | None = option(None, "at most this many questions, spread over the groups")
    per_group: int | None = option(None, "at most this many questions of each group")
    stride: int = option(1, "every how many-th question of a group, sorted by question_id")
    turns: Literal["first", "all"] = option("first", "all: later turns follow plain decoding's answers")
    batch_size: int = option(1, "prompts in one run; batches mix the groups")
    repeats: int = option(1, "a prompt's time is the median of this many")
    max_new_tokens: int = option(128, "per text")
    draft_tokens: int | None = option(None, "size of proposals where a method names none; see generate --help")
    temperature: float = option(0.0, "0 is greedy; only then are texts compared")
    seed: int = option(0, "of sampled texts")
    ignore_eos: bool = option(False, "all texts to full length; MAT and acceptance are not valid then")
    chat: bool | None = option(None, "prompts are a user's messages; if unset, when there is a chat template")
    overwrite: bool = option(False, "begin the output anew")


@dataclass(frozen=True)
class Variant:
    """A method at a size. `Variant("logitspec:16", "logitspec", 16)`; None is the drafter's own default."""

    name: str
    method: str
    draft_tokens: int | None = None


def listed(texts: Iterable[str]) -> list[str]:
    """What stands between commas: `["a,b", "c"]` is a, b and c."""
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def parse_methods(texts: Iterable[str], draft_tokens: int | None = None) -> list[Variant]:
    """Variants from `a,b:16`, plain decoding first and each once. ValueError for an unknown method or a bad size."""
    names = listed(texts)
    return [_parse_method(name, draft_tokens) for name in dict.fromkeys([REFERENCE, *names])]


def _parse_method(name: str, draft_tokens: int | None) -> Variant:
    method, colon, size = name.partition(":")
    check_method(method)
    if not colon:
        return Variant(name, method, None if method == REFERENCE else draft_tokens)
    if method == REFERENCE or not (size.isascii() and size.isdecimal()):
        raise ValueError(f"methods must be names or name:size with a drafter's name and an integer size, got {name!r}")
    return Variant(name, method, int(size))


def parse_peers(texts: Iterable[str], batch_size: int) -> list[str]:
    """Rows of peers from `--peers` values. Prompt lookup runs one prompt at a time, so it is left out of batches."""
    names = listed(texts)
    for name in names:
        if name not in PEERS:
            raise ValueError(f"peers must be among {', '.join(PEERS)}, got {name!r}{did_you_mean(name, list(PEERS))}")
    if batch_size > 1 and LOOKUP_PEER in names:
        raise ValueError(f"{LOOKUP_PEER} runs one prompt at a time: batch_size must be 1, got {batch_size}")
    rows = dict.fromkeys(row for name in names for row in PEERS[name])
    return [row for row in rows if batch_size == 1 or row != LOOKUP_PEER]


def _make_runners(
    engine: Engine, prepared: Prepared, variants: Sequence[Variant], peers: Sequence[str], options: BenchOptions
) -> dict[str, Runner]:
    runners = {variant.name: engine_runner(engine, _params(variant, options)) for variant in variants}
    if peers:
        from .loading import load_transformers
        from .peers import ContinuousPeer, TransformersPeer

        model = load_transformers(prepared.source, options.dtype, options.device)
        eos_ids = () if options.ignore_eos else engine.model.eos_token_ids
        pad_id = getattr(prepared.tokenizer, "pad_token_id", None) or 0
        for name in peers:
            kind = ContinuousPeer if name == CONTINUOUS_PEER else TransformersPeer
            peer = kind(model, pad_id, eos_ids, name == LOOKUP_PEER, options.temperature, options.seed)
            runners[name] = peer_runner(peer.generate)
    return runners


def check_folder(folder: Path, command: str = "bench") -> None:
    """Raise ValueError for a folder that holds something else than what a command has measured."""
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if present and not present & {"rows.jsonl", "report.json"}:
        raise ValueError(f"output folder {str(folder)!r} is not empty and holds no {command}; choose another")


def bench(options: BenchOptions) -> None:
    """Measure, write the report, print its first table. Raises ValueError for what is not valid."""
    _check(options)
    variants = parse_methods(options.methods, options.draft_tokens)
    peers = parse_peers(options.peers, options.batch_size)
    questions = select(read_questions(options.data), options.per_group, options.stride, options.limit)
    options = replace(options, max_num_seqs=max(options.max_num_seqs, options.batch_size))
    prepared = prepare(options, [variant.method for variant in variants])
    chat = prepared.is_chat(options.chat)
    if options.turns == "all" and not chat:
        raise ValueError("turns=all needs a chat, and these prompts are raw text; use --turns first")
    intake = prepared.intake()
    check_room(intake.max_length, options.max_new_tokens)
    for variant in variants:
        intake.check(_params(variant, options))
    folder = Path(options.output)
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(folder / "rows.jsonl", _settings(options), options.overwrite)
    try:
        engine = build_engine(prepared)
        items, left_out = make_items(engine, questions, options.turns, chat, options.max_new_tokens)
        if not items:
            raise ValueError(f"{options.data}: no prompt can be run: {next(iter(left_out.values()))}")
        runners = _make_runners(engine, prepared, variants, peers, options)
        units = batches(items, options.batch_size)
        measure(runners, units, options.repeats, options.max_new_tokens, ledger)
        if options.temperature == 0.0:
            find_differences(engine, items, ledger)
    except KeyboardInterrupt:
        print(f"speclight: {len(ledger.runs)} runs are kept; the same command continues", file=sys.stderr)
        raise
    finally:
        ledger.close()
    header = _header(options, engine, list(runners), items, left_out, chat)
    report = build_report(header, ledger.runs, ledger.differences)
    write_report(folder, report)
    print(overall_table(report, brief=True))
    print(f"speclight: {folder / 'report.md'}", file=sys.stderr)


def _params(variant: Variant, options: BenchOptions) -> GenerationParams:
    from .request import GenerationParams

    return GenerationParams(
        method=variant.method,
        draft_tokens=variant.draft_tokens,
        temperature=options.temperature,
        seed=options.seed,
        ignore_eos=options.ignore_eos,
    )


def _check(options: BenchOptions) -> None:
    for name in ("limit", "per_group", "stride", "batch_size", "repeats", "max_new_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def _settings(options: BenchOptions) -> dict[str, Any]:
    """What shapes the rows: the options, the data, and where it runs."""
    from .bundles import content_digests, digest

    settings = asdict(options)
    for name in ("output", "overwrite", "cache_dir"):
        del settings[name]
    for name, found in content_digests(options).items():
        group, _, leaf = name.rpartition(".")
        (settings[group] if group else settings)[leaf] = found
    settings["data"] = digest(options.data)
    return settings | {"versions": versions(), "processor": processor_name()}


def versions() -> dict[str, str]:
    from importlib.metadata import version

    names = ("speclight", "torch", "transformers", "tokenizers")
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def processor_name() -> str:
    """The CPU's model as the system has it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _header(
    options: BenchOptions,
    engine: Engine,
    methods: Sequence[str],
    items: Sequence[Item],
    left_out: Mapping[int | str, str],
    chat: bool,
) -> Header:
    dtype = str(engine.model.dtype).removeprefix("torch.")
    groups = Counter(item.question.group for item in items)
    facts = {
        "model": shown(options.model),
        "dtype": dtype,
        "prompts": f"{len(items)} from {Path(options.data).name}: "
        + ", ".join(f"{n} {name}" for name, n in groups.items()),
        "form": "chat template with generation prompt" if chat else "raw text",
        "new tokens": f"up to {options.max_new_tokens} per text",
        "decoding": "greedy"
        if options.temperature == 0.0
        else f"temperature {options.temperature}, seed {options.seed}",
        "runs": f"batch size {options.batch_size}, {options.repeats} per prompt, methods in rotating order, all cold",
        "near-tie gap": f"{NEAR_TIE[dtype]:g} ({dtype})",
        **circumstances(engine),
    }
    title = f"speclight bench: {Path(options.model).name}, {dtype}, batch {options.batch_size}"
    flags = list(_flags(options, engine, dtype, left_out, len(groups)))
    return Header(title, methods, NEAR_TIE[dtype], options.temperature == 0.0, facts, flags)


def circumstances(engine: Engine) -> dict[str, str]:
    """Where, when and how a run was made, for its report."""
    import psutil
    import torch

    device = engine.model.device
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "processor": f"{processor_name()}, {psutil.cpu_count(logical=False)} cores",
        "torch threads": str(torch.get_num_threads()),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["speclight", *map(shown, sys.argv[1:])]),
    }


def shown(argument: str) -> str:
    """An argument as a report shows it: a report is passed on, so of an absolute path only the last part."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def _flags(
    options: BenchOptions, engine: Engine, dtype: str, left_out: Mapping[int | str, str], num_groups: int
) -> Iterator[str]:
    if options.ignore_eos:
        yield "ignore_eos was set: texts go on past their end, so MAT and acceptance are not valid"
    if options.temperature != 0.0:
        yield "texts were sampled, so they are not compared with plain decoding"
        yield from (drafter.about_seeds for drafter in engine.drafters.values() if drafter.about_seeds is not None)
    elif dtype in ("bfloat16", "float16"):
        yield f"in {dtype} rounding decides near-ties: texts may part from plain decoding there; each place is listed"
    if options.batch_size > 1 and num_groups > 1:
        yield "batches mix the groups: speed is given over all prompts only"
    if options.batch_size > 1 and "transformers" in listed(options.peers):
        yield "transformers' prompt lookup runs one prompt at a time and is left out of batches"
    for question_id, reason in left_out.items():
        yield f"left out: question {question_id}, {reason}"
    yield from busy_flags()


def busy_flags() -> Iterator[str]:
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if busy > (os.cpu_count() or 1) * 1.5:
        yield f"the machine was busy with something else (load average {busy:.1f}): do not trust the times"
