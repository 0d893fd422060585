"""`speclight pareto`: what a target rule costs and brings, as a picture to choose from.

The exact rule, constant weights, lenience, cascades and learned heads answer the same prompts in the same run: how many
drafts each accepts, how good its answers are, how far from the target's own law it is, and whether theory says so.
Units (batches of prompts) are run one after the other, each by every arm, in an order that rotates from unit to unit;
every run starts cold. `pareto_arms.py` makes the arms, `pareto_run.py` runs them and keeps rows, `pareto_theory.py`
predicts, `pareto_summary.py` and `pareto_report.py` make tables of it. Trees and lookups are left out: only drafts that
are drawn from a distribution are verified by another rule than the exact one.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..infer.build import EngineOptions, TargetOptions, build_engine, option, prepare

if TYPE_CHECKING:
    from ..infer.build import Prepared
    from ..infer.engine import Engine
    from ..infer.request import GenerationParams
    from ..modules.bundle import HeadBundle
    from .pareto_arms import Arm
    from .pareto_run import Item
    from .prompts import Task, TaskPrompt
    from .reward_function import RewardFunction

METHODS = ("early-exit", "draft-model")
DEFAULT_RULES = ("static", "lossy", "cascade")


@dataclass(kw_only=True)
class ParetoOptions(EngineOptions):
    """What is compared, and on what."""

    data: str = option(..., "prompts with references: a .jsonl or .parquet file, a folder, or a data set's name")
    task: str = option(..., "gsm8k, cnndm, xsum, mbpp, humaneval, wmt16 or plain: prompt, what is judged, reward")
    output: str = option(..., "folder for report.md, report.json, report.png and the rows; a second run continues it")
    rules: tuple[str, ...] = option(
        (),
        "static,lossy,cascade,learned; if unset all, learned where a head is given; exact is always there",
        nargs="+",
    )
    heads: tuple[str, ...] = option((), "of learned: folders of ensemble heads, each a point", nargs="+")
    weights: tuple[str, ...] = option(("0.1,0.3,0.5,0.7,0.9",), "of static: the model's share", nargs="+")
    leniences: tuple[str, ...] = option(("0.1,0.3,0.5,0.7,0.9",), "of lossy", nargs="+")
    alphas: tuple[str, ...] = option(("0.1,0.3,0.5,0.7,0.9",), "of cascade, for OPT and Token-v3", nargs="+")
    method: str | None = option(None, "early-exit or draft-model; if unset what heads were trained with, or is given")
    draft_layer: int | None = option(None, "of early-exit: exit that drafts; if unset the heads', or see early_exit")
    draft_tokens: int = option(5, "drafted tokens")
    bonus: bool = option(False, "draw tokens behind the last draft from the rule's distribution, not from the model's")
    reward: str | None = option(None, "numbers, rouge2, bleu, exact or unit-tests, instead of the task's own")
    allow_execution: bool = option(False, "let unit-tests run programs that a model wrote; NOT a sandbox")
    fields: tuple[str, ...] = option((), "ours=theirs: names of fields, as in article=turns.0", nargs="+")
    chat: bool = option(False, "prompts are a user's messages")
    limit: int | None = option(None, "only the first prompts")
    samples: int = option(1, "texts per prompt")
    batch_size: int = option(8, "prompts in one run")
    max_new_tokens: int = option(128, "per text")
    temperature: float = option(1.0, "0 is greedy")
    seed: int = option(0, "of sampled texts, the same in all arms")
    overwrite: bool = option(False, "begin the output anew")


def pareto(options: ParetoOptions) -> None:
    """Measure, write the report, print its first table. Raises ValueError for what is not valid, and for a text that
    ends with an error."""
    from ..infer.bench import check_folder
    from .pareto_report import build_report, table, write_report
    from .pareto_run import Runs
    from .pareto_summary import summarize

    plan = _plan(options)
    folder = Path(options.output)
    check_folder(folder, "comparison")
    folder.mkdir(parents=True, exist_ok=True)
    settings = _settings(plan)
    rows = Runs(folder / "rows.jsonl", settings, options.overwrite)
    try:
        engine, items, left_out = _measure(plan, rows)
    except KeyboardInterrupt:
        print(f"speclight: {rows.num_rows} runs are kept; the same command continues", file=sys.stderr)
        raise
    finally:
        rows.close()
    facts, flags = _facts(plan, engine, items), list(_flags(plan, left_out))
    title = f"speclight pareto: {Path(options.model).name}, {options.task}, {plan.params.method}"
    report = build_report(title, facts, flags, summarize(rows.runs, plan.arms))
    write_report(folder, report, {name: _without_path(value) for name, value in settings.items()})
    print(table(report["summary"]))
    print(f"speclight: {folder / 'report.md'}", file=sys.stderr)


# --- what is asked for, checked before weights are read ---------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A command that was found valid."""

    options: ParetoOptions
    prepared: Prepared
    arms: Sequence[Arm]
    params: GenerationParams
    task: Task
    reward: RewardFunction
    prompts: Sequence[TaskPrompt]


def _plan(options: ParetoOptions) -> Plan:
    from ..infer.questions import check_room
    from .pareto_arms import Settings, check_rules, head_names, make_arms

    _check_numbers(options)
    _check_target(options)
    options, rules = _with_heads(options, check_rules(options.rules))
    method, names = _method(options), head_names(options.heads)
    shapes = Settings(options.weights, options.leniences, options.alphas, {}, options.target.max_tv, options.bonus)
    make_arms(rules, shapes)  # refuses what it can
    task, reward, prompts = _prompts(options)
    prepared, heads = _prepare(options, method)
    prepared.is_chat(options.chat)
    arms = make_arms(rules, replace(shapes, heads=dict(zip(names, heads, strict=True))))
    params = _params(options, method)
    intake = prepared.intake()
    intake.check(params)
    check_room(intake.max_length, options.max_new_tokens)
    return Plan(options, prepared, arms, params, task, reward, prompts)


def _check_numbers(options: ParetoOptions) -> None:
    from ..infer.intake import MAX_DRAFT_TOKENS

    for name in ("limit", "samples", "batch_size", "max_new_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not 1 <= options.draft_tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(f"draft_tokens must be from 1 to {MAX_DRAFT_TOKENS}, got {options.draft_tokens}")
    if options.temperature == 0.0 and options.samples > 1:
        raise ValueError(f"samples must be 1 at temperature 0, where all are the same, got {options.samples}")


def _check_target(options: ParetoOptions) -> None:
    """Of --target, only what is not varied here."""
    for name, default in asdict(TargetOptions()).items():
        if name not in ("head", "max_tv") and getattr(options.target, name) != default:
            raise ValueError(
                f"target.{name} is not read here, where arms differ in it: use --rules, --weights, --leniences, "
                "--alphas and --bonus"
            )


def _with_heads(options: ParetoOptions, rules: Sequence[str]) -> tuple[ParetoOptions, list[str]]:
    """The options with all heads in one place, and the rules, where they are the default ones too."""
    head = options.target.head
    heads = options.heads if head is None else (*options.heads, head)
    rules = list(rules) if options.rules else [*DEFAULT_RULES, *(["learned"] if heads else [])]
    if "learned" in rules and not heads:
        raise ValueError("rules learned needs --heads, folders of ensemble heads")
    if heads and "learned" not in rules:
        raise ValueError(f"heads are read by rule learned; rules are {','.join(rules) or 'exact'}")
    return replace(options, heads=heads, target=replace(options.target, head=None)), rules


def _method(options: ParetoOptions) -> str:
    """The method, and that its drafts are what each head was trained with."""
    from ..infer.rules import load_ensemble

    drafts = {folder: load_ensemble(folder).config["draft"] for folder in options.heads}
    given = "draft-model" if options.draft_model is not None else METHODS[0]
    method = options.method or next((draft["method"] for draft in drafts.values()), given)
    if method not in METHODS:
        raise ValueError(
            f"method must be one of {', '.join(METHODS)}, whose drafts are a chain drawn from a distribution, "
            f"got {method!r}"
        )
    for folder, draft in drafts.items():
        if draft["method"] != method:
            raise ValueError(f"head {folder!r} was trained with method {draft['method']}; method is {method}")
    exits = method == "early-exit"
    if exits and options.draft_model is not None:
        raise ValueError("draft_model is read by method draft-model; method is early-exit")
    if not exits and options.draft_layer is not None:
        raise ValueError("draft_layer is read by method early-exit; method is draft-model")
    return method


def _prompts(options: ParetoOptions) -> tuple[Task, RewardFunction, list[TaskPrompt]]:
    from .prompts import make_task, read_task_prompts

    task = make_task(options.task, **({} if options.reward is None else {"reward": options.reward}))
    reward = task.make_reward(**({"allow_execution": True} if options.allow_execution else {}))
    pairs = [text.partition("=") for text in options.fields]
    for ours, equals, theirs in pairs:
        if not (ours and equals and theirs):
            raise ValueError(f"fields must be ours=theirs, as in article=turns.0, got {ours + equals + theirs!r}")
    fields = {ours: theirs for ours, _, theirs in pairs}
    return task, reward, read_task_prompts(options.data, task, options.chat, fields, options.limit, reward)


def _prepare(options: ParetoOptions, method: str) -> tuple[Prepared, list[HeadBundle]]:
    """The models, and the heads, each checked against model and drafts as if it were the only one."""
    from ..infer.rules import load_ensemble

    engine = replace(
        options, target=TargetOptions(), max_num_seqs=max(options.max_num_seqs, options.batch_size * options.samples)
    )
    prepared = prepare(_drafting_at(engine, options.draft_layer), [method])
    heads: list[HeadBundle] = []
    for folder in options.heads:
        head = load_ensemble(folder)
        ruled = replace(prepared.options, target=TargetOptions(rule="learned", head=folder))
        if ruled.early_exit.layer is None:
            ruled = _drafting_at(ruled, head.config["draft"].get("layer"))
        prepared = prepare(ruled, [method])  # with the exit heads that the head names
        heads.append(head)
    return prepared, heads


def _drafting_at(options: EngineOptions, layer: int | None) -> EngineOptions:
    return options if layer is None else replace(options, early_exit=replace(options.early_exit, layer=layer))


def _params(options: ParetoOptions, method: str) -> GenerationParams:
    from ..infer.request import GenerationParams

    return GenerationParams(
        method=method,
        draft_tokens=options.draft_tokens,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        seed=options.seed,
        n=options.samples,
    )


# --- the run and its report -------------------------------------------------------------------------------------------


def _measure(plan: Plan, rows: Any) -> tuple[Engine, list[Item], dict[int, str]]:
    from .pareto_run import Bench, make_items, measure

    engine = build_engine(plan.prepared)
    items, left_out = make_items(engine, plan.prompts, plan.options.max_new_tokens)
    if not items:
        raise ValueError(f"{plan.options.data}: no prompt can be run: {next(iter(left_out.values()))}")
    measure(Bench(engine, plan.params, plan.task, plan.reward), plan.arms, items, plan.options.batch_size, rows)
    return engine, items, left_out


def _settings(plan: Plan) -> dict[str, Any]:
    """What shapes the rows: the options, the data, the heads, and where it runs."""
    from ..infer.bench import processor_name, versions
    from ..infer.bundles import bundle_digest, content_digests

    settings = asdict(plan.options)
    for name in ("output", "overwrite", "cache_dir", "rules", "weights", "leniences", "alphas", "target"):
        del settings[name]
    settings["arms"] = [arm.name for arm in plan.arms]
    settings["heads"] = [bundle_digest(folder) for folder in plan.options.heads]
    settings["max_tv"] = plan.options.target.max_tv
    settings |= {"bundle": None} | content_digests(plan.prepared.options)
    settings["early_exit"] = asdict(plan.prepared.options.early_exit)
    settings["data"] = hashlib.sha256(repr([prompt.row for prompt in plan.prompts]).encode()).hexdigest()[:16]
    return settings | {"versions": versions(), "processor": processor_name()}


def _without_path(value: Any) -> Any:
    """As a report, which is passed on, shows a setting."""
    from ..infer.bench import shown

    return shown(value) if isinstance(value, str) else value


def _facts(plan: Plan, engine: Engine, items: Sequence[Item]) -> dict[str, str]:
    from ..infer.bench import circumstances, shown

    options, drafter = plan.options, engine.drafters[plan.params.method or ""]
    layer = drafter.depth(plan.params)
    source = f"exit after layer {layer}" if layer else f"draft model {shown(options.draft_model or '')}"
    heads = plan.prepared.options.bundle
    sampled = f"temperature {options.temperature:g}, seed {options.seed}, the same in all arms"
    return {
        "model": shown(options.model),
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "drafts": f"{options.draft_tokens} by {source}" + (f", heads {shown(heads)}" if heads else ""),
        "a token behind the last draft": "from the rule's distribution" if options.bonus else "from the target's own",
        "task": f"{options.task}, reward {plan.reward.name}",
        "prompts": f"{len(items)} of {shown(options.data)}, {options.samples} texts each",
        "form": "chat template with generation prompt" if options.chat else "raw text",
        "new tokens": f"up to {options.max_new_tokens} per text",
        "decoding": "greedy" if options.temperature == 0.0 else sampled,
        "runs": f"batches of {options.batch_size} prompts, arms in rotating order, all cold",
        **circumstances(engine),
    }


def _flags(plan: Plan, left_out: Mapping[int, str]) -> Iterator[str]:
    from ..infer.bench import busy_flags

    if plan.options.target.max_tv < 1.0:
        yield f"max_tv {plan.options.target.max_tv:g} bounds the distance of the static and learned arms at every token"
    yield from (f"left out: prompt {index + 1}, {reason}" for index, reason in left_out.items())
    yield from busy_flags()
