"""From a user's options to a running engine: what `generate`, `verify` and `bench` share.

The option classes are the commands' flags and YAML keys. This module imports torch only inside functions, so that
`--help` answers at once; that is why the drafters' defaults stand here a second time (a test compares the two).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ..modules.layered_model import LayeredModel
    from .drafter import Drafter
    from .engine import Engine
    from .loading import ModelSource
    from .request import GenerationParams


def option(default: Any, help: str, **more: Any) -> Any:
    """A dataclass field that is a flag; `...` makes it a required one."""
    given = {} if default is ... else {"default": default}
    return field(**given, metadata={"help": help, **more})


@dataclass(kw_only=True)
class ModelOptions:
    """Which model, and how it is loaded."""

    model: str = option(..., "hub id (owner/name), folder, or .gguf file")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", "auto: the checkpoint's own")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    threads: int | None = option(None, "CPU threads of torch")
    cache_dir: str | None = option(None, "where converted GGUF files are kept (~/.cache/speclight)")
    chat_template: str | None = option(None, "file with a Jinja chat template, instead of the tokenizer's own")
    allow_pickle: bool = option(False, "load pickled weights; they can run any code")
    trust_remote_code: bool = option(False, "run code that comes with the checkpoint")


@dataclass(kw_only=True)
class LogitSpecOptions:
    """LogitSpec's drafter."""

    k: int = option(60, "next-next tokens guessed from the last logits")
    capacity: int | None = option(None, "nodes of the tree, root included; if unset 64, on a CPU 8")
    max_ngram: int = option(3, "longest n-gram that is looked up")
    retrieved: int = option(20, "tokens taken after a match")
    prune: tuple[tuple[int, int], ...] = option(((8, 4), (32, 3)), "[[rank, length], ...]: continuations by rank")


@dataclass(kw_only=True)
class PromptLookupOptions:
    """Prompt lookup's drafter."""

    num_tokens: int = option(10, "drafted tokens")
    max_ngram: int = option(3, "longest n-gram that is looked up")
    match: Literal["first", "last"] = option("first", "which of several matches is taken")


@dataclass(kw_only=True)
class EngineOptions(ModelOptions):
    """The engine around the model, and its drafters."""

    draft_model: str | None = option(None, "the smaller model of method draft-model; same kinds as --model")
    draft_temperature: float | None = option(None, "temperature of the draft model's own draws; the request's if unset")
    max_num_seqs: int = option(64, "sequences in one pass")
    block_size: int = option(16, "slots of a cache block")
    kv_memory: float | None = option(None, "GiB for the key-value cache; a share of the free memory if unset")
    max_batch_tokens: int = option(512, "tokens in one pass; longer prompts are split")
    logitspec: LogitSpecOptions = field(default_factory=LogitSpecOptions)
    prompt_lookup: PromptLookupOptions = field(default_factory=PromptLookupOptions)


@dataclass(kw_only=True)
class RequestOptions:
    """Every request, unless its JSONL row says otherwise. The names are those of GenerationParams."""

    method: str = option("logitspec", "ar, prompt-lookup, logitspec or draft-model")
    draft_tokens: int | None = option(None, "nodes of a tree with its root, or length of a chain; 0 is off")
    max_new_tokens: int = option(128, "never exceeded")
    temperature: float | None = option(0.0, "0 is greedy")
    top_k: int = option(0, "0 is off")
    top_p: float = option(1.0, "1 is off")
    min_p: float = option(0.0, "0 is off")
    repetition_penalty: float = option(1.0, "on prompt and output; 1 is off")
    presence_penalty: float = option(0.0, "once for each emitted token; 0 is off")
    frequency_penalty: float = option(0.0, "per occurrence of an emitted token; 0 is off")
    stop: tuple[str, ...] = option((), "strings that end the text", nargs="+")
    ignore_eos: bool = option(False, "go on past the model's end-of-sequence token")
    seed: int | None = option(None, "same seed, same text")
    n: int = option(1, "texts per prompt")
    logprobs: int | None = option(None, "report this many top log-probabilities per token")

    def params(self) -> GenerationParams:
        """Raises ValueError naming the field and what would be valid."""
        from .request import GenerationParams

        return GenerationParams(**{item.name: getattr(self, item.name) for item in fields(RequestOptions)})


@dataclass(frozen=True)
class Prepared:
    """Options that were found valid, and the models they name; nothing heavy is loaded yet but the tokenizer."""

    options: EngineOptions
    methods: tuple[str, ...]
    source: ModelSource
    tokenizer: Any
    draft_source: ModelSource | None


def prepare(options: EngineOptions, methods: Sequence[str]) -> Prepared:
    """Find the models and check everything that can be refused before weights are read.

    Raises ValueError for a method or model that cannot be used, and for a draft model with another tokenizer.
    """
    from .loading import check_same_tokenizer, load_tokenizer, resolve_device, resolve_dtype

    for method in methods:
        check_method(method)
    resolve_dtype(options.dtype)
    resolve_device(options.device)
    _check_numbers(options)
    if "draft-model" in methods and options.draft_model is None:
        raise ValueError("method draft-model needs --draft-model, a smaller model with the same tokenizer")
    template = None if options.chat_template is None else Path(options.chat_template).read_text(encoding="utf-8")
    source = _resolve(options, options.model)
    draft_source = _resolve(options, options.draft_model) if options.draft_model and "draft-model" in methods else None
    tokenizer = load_tokenizer(source)
    if draft_source is not None:
        check_same_tokenizer(tokenizer, load_tokenizer(draft_source), source.name, draft_source.name)
    if template is not None:
        tokenizer.chat_template = template
    return Prepared(options, tuple(dict.fromkeys(methods)), source, tokenizer, draft_source)


def _check_numbers(options: EngineOptions) -> None:
    """What the engine and the drafters would refuse themselves, but only once the weights are there."""
    from .logitspec import LogitSpecDrafter
    from .prompt_lookup import PromptLookupDrafter

    for name in ("threads", "block_size", "max_num_seqs", "max_batch_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if options.kv_memory is not None and not options.kv_memory > 0:
        raise ValueError(f"kv_memory must be above 0 GiB, got {options.kv_memory}")
    if options.draft_temperature is not None and not 0 <= options.draft_temperature <= 1e6:
        raise ValueError(f"draft_temperature must be from 0 (greedy) to 1e6, got {options.draft_temperature}")
    LogitSpecDrafter(**{name: value for name, value in asdict(options.logitspec).items() if value is not None})
    PromptLookupDrafter(**asdict(options.prompt_lookup))


def build_engine(prepared: Prepared) -> Engine:
    """Load the weights and put the engine together; requests without a method use the first of `prepared.methods`."""
    import torch

    from .engine import Engine
    from .loading import load_weights

    options = prepared.options
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = load_weights(prepared.source, options.dtype, options.device)
    drafters = [DRAFTERS[method](prepared, model) for method in prepared.methods if method != "ar"]
    return Engine(
        model,
        prepared.tokenizer,
        drafters=drafters,
        default_method=prepared.methods[0] if prepared.methods else "ar",
        block_size=options.block_size,
        kv_memory=options.kv_memory,
        max_num_seqs=options.max_num_seqs,
        max_batch_tokens=options.max_batch_tokens,
    )


def check_method(method: str) -> None:
    """Raise ValueError, with the nearest valid name, unless `method` names a drafter or "ar"."""
    valid = ["ar", *DRAFTERS]
    if method not in valid:
        raise ValueError(f"method must be one of {', '.join(valid)}, got {method!r}{did_you_mean(method, valid)}")


def did_you_mean(name: str, valid: Sequence[str]) -> str:
    """`; did you mean 'temperature'?`, or nothing when no valid name is near."""
    close = get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _resolve(options: ModelOptions, model: str) -> ModelSource:
    from .loading import resolve_model

    return resolve_model(model, options.allow_pickle, options.trust_remote_code, options.cache_dir)


CAPACITY, CAPACITY_ELSEWHERE = {"cpu": 8}, 64
"""Default size of LogitSpec's trees by kind of device: the paper's, except where a pass over so many tokens costs
several passes over one, as measured on CPUs (docs/LOG.md)."""


def _logitspec(prepared: Prepared, model: LayeredModel) -> Drafter:
    from .logitspec import LogitSpecDrafter

    options = asdict(prepared.options.logitspec)
    if options["capacity"] is None:
        options["capacity"] = CAPACITY.get(model.device.type, CAPACITY_ELSEWHERE)
    return LogitSpecDrafter(**options)


def _prompt_lookup(prepared: Prepared, model: LayeredModel) -> Drafter:
    from .prompt_lookup import PromptLookupDrafter

    return PromptLookupDrafter(**asdict(prepared.options.prompt_lookup))


def _draft_model(prepared: Prepared, model: LayeredModel) -> Drafter:
    from .draft_model import DraftModelDrafter
    from .loading import load_weights

    assert prepared.draft_source is not None, "prepare() resolves it for this method"
    draft = load_weights(prepared.draft_source, str(model.dtype).removeprefix("torch."), str(model.device))
    return DraftModelDrafter(draft, draft_temperature=prepared.options.draft_temperature)


DRAFTERS: dict[str, Callable[[Prepared, LayeredModel], Drafter]] = {
    "prompt-lookup": _prompt_lookup,
    "logitspec": _logitspec,
    "draft-model": _draft_model,
}
"""How each method's drafter is made from the options; "ar" needs none."""
