"""From a user's options to a running engine: what `generate`, `verify` and `bench` share.

The option classes are the commands' flags and YAML keys. This module imports torch only inside functions, so that
`--help` answers at once; that is why the drafters' defaults stand here a second time (a test compares the two).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

from .files import read_text
from .plans import DIVERSED, Plan

if TYPE_CHECKING:
    from ..modules.bundle import HeadBundle
    from ..modules.layered_model import LayeredModel
    from .cost_model import CostModel
    from .datastore import Datastore
    from .drafter import Drafter
    from .engine import Engine
    from .exits import EarlyExits
    from .intake import Intake
    from .request import GenerationParams
    from .sources import ModelSource


METHODS = (
    "auto, ar, prompt-lookup, logitspec, draft-model, early-exit, hispec, hispec+logitspec, hispec+prompt-lookup or"
    " diversed"
)
AUTO = "auto"
MAX_THREADS, MAX_BLOCK_SIZE = 1024, 4096
"""More would help nobody."""


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

    k: int | None = option(None, "candidates from a row of logits; if unset 24, for the paper's tree 60")
    capacity: int | None = option(None, "nodes of the tree, root included; if unset 64, on a CPU 8")
    max_ngram: int | None = option(None, "longest n-gram that is looked up; if unset 6, for the paper's tree 3")
    retrieved: int = option(20, "paper's tree: tokens taken after a match")
    prune: tuple[tuple[int, int], ...] = option(((8, 4), (32, 3)), "paper's: [[rank, length], ...] of continuations")
    tree: Literal["adaptive", "paper"] = option("adaptive", "adaptive: more sources, best first by learned estimates")
    shared: Literal["namespace", "none"] = option("namespace", "whether requests draft from each other's texts")
    remembered: int = option(20_000, "entries kept of each table that requests share")
    ttl: float = option(3600.0, "seconds after which they are forgotten")
    prompt_vocab: int = option(8192, "learn from the model's logits over the prompt, of so many first tokens; 0 is off")
    datastore: str | None = option(None, "adaptive: folder of `speclight index`, a corpus that all requests draft from")


@dataclass(kw_only=True)
class PromptLookupOptions:
    """Prompt lookup's drafter."""

    num_tokens: int = option(10, "drafted tokens")
    max_ngram: int = option(3, "longest n-gram that is looked up")
    match: Literal["first", "last"] = option("first", "which of several matches is taken")


@dataclass(kw_only=True)
class EarlyExitOptions:
    """The early exit's drafter."""

    layer: int | None = option(None, "layers below the exit; if unset the bundle's lowest, or an eighth of the model's")
    num_tokens: int = option(2, "drafted tokens")


@dataclass(kw_only=True)
class HiSpecOptions:
    """HiSpec's two stages."""

    draft_layer: int | None = option(None, "exit that drafts; if unset the bundle's lowest, or an eighth of the layers")
    verify_layer: int | None = option(None, "exit that verifies; if unset the bundle's highest, or a quarter")
    draft_tokens: int = option(2, "drafted at once by the exit; hispec+... take the size of the drafter they name")
    window: int = option(4, "tokens that the exit has verified when the whole model does")
    wait: float = option(0.25, "share of a batch's windows that must be full before all are verified; 1 waits for each")


@dataclass(kw_only=True)
class DiversedOptions:
    """Drafting of method diversed."""

    num_tokens: int = option(5, "drafted tokens")


@dataclass(kw_only=True)
class TargetOptions:
    """What drafts are verified against."""

    rule: Literal["exact", "static", "learned", "lossy", "cascade"] = option(
        "exact", "exact is lossless; the others accept more drafts and leave the model's distribution, by a known part"
    )
    weight: float = option(0.7, "of static: the model's share of the mixture with the draft; 1 is exact")
    head: str | None = option(None, "of learned, and of method diversed: folder of an ensemble head")
    max_tv: float = option(1.0, "of static and learned: bound on each token's total variation to the model's own")
    lenience: float = option(0.3, "of lossy: accept with min(1, p / ((1 - lenience) q)); 0 is exact")
    cascade: Literal["opt", "token"] = option("token", "of cascade: SpecCascade's OPT or Token-v3")
    alpha: float = option(0.3, "of cascade: how far it defers to the draft; 0 hardly")
    bonus: Literal["target", "ensemble"] = option(
        "target", "what a token behind the last draft is drawn from; ensemble runs the draft one token further"
    )


@dataclass(kw_only=True)
class EngineOptions(ModelOptions):
    """The engine around the model, and its drafters."""

    draft_model: str | None = option(None, "the smaller model of method draft-model; same kinds as --model")
    draft_temperature: float | None = option(None, "temperature of the draft model's own draws; the request's if unset")
    bundle: str | None = option(None, "folder of exit heads, for early-exit and hispec; the model's own norm if unset")
    attention: Literal["sdpa", "flex"] = option("sdpa", "flex: torch's FlexAttention, for GPUs; not with method auto")
    cuda_graphs: bool = option(False, "on GPUs: record passes of few tokens, then launch each as one; needs sdpa")
    max_num_seqs: int = option(64, "sequences in one pass")
    block_size: int = option(16, "slots of a cache block")
    kv_memory: float | None = option(None, "GiB for the key-value cache; a share of the free memory if unset")
    max_batch_tokens: int = option(512, "tokens in one pass; longer prompts are split")
    logitspec: LogitSpecOptions = field(default_factory=LogitSpecOptions)
    prompt_lookup: PromptLookupOptions = field(default_factory=PromptLookupOptions)
    early_exit: EarlyExitOptions = field(default_factory=EarlyExitOptions)
    hispec: HiSpecOptions = field(default_factory=HiSpecOptions)
    diversed: DiversedOptions = field(default_factory=DiversedOptions)
    target: TargetOptions = field(default_factory=TargetOptions)


@dataclass(kw_only=True)
class RequestOptions:
    """Every request, unless its JSONL row says otherwise. The names are those of GenerationParams."""

    method: str = option("logitspec", METHODS)
    draft_tokens: int | None = option(None, "nodes of a tree with its root, or length of a chain; 0 is off")
    draft_layer: int | None = option(None, "exit that drafts, where it is not early-exit's or hispec's own")
    verify_layer: int | None = option(None, "exit that verifies, where it is not hispec's own")
    window: int | None = option(None, "tokens before the whole model verifies, where they are not hispec's own")
    inner_draft_tokens: int | None = option(None, "tokens drafted at once, where they are not hispec's own")
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
    exits: EarlyExits | None = None
    """Which exits there will be, where a method uses any."""
    bundle: HeadBundle | None = None
    base_known: bool = True
    """Whether the bundle has been found to belong to the model; if not it is when the weights are there."""
    ensemble: HeadBundle | None = None
    """The head of a learned target rule."""
    datastore: Datastore | None = None
    """What LogitSpec's adaptive trees draft from besides texts and logits."""

    @property
    def uses_exits(self) -> bool:
        needed = drafters_of(self.methods, self.options)
        return any(self.plan(method).drafter in EXIT_DRAFTERS for method in needed)

    def plan(self, method: str) -> Plan:
        return Plan.of(method, self.options, self.ensemble)

    @property
    def is_lossless(self) -> bool:
        """Whether all that its methods emit has the model's own distribution."""
        return all(self.plan(method).rule == "exact" for method in self.methods)

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def is_chat(self, wanted: bool | None) -> bool:
        """Whether prompts are a user's messages: as wanted, or if that is None, where there is a chat template.

        Raises ValueError for a chat without one.
        """
        if wanted and not self.has_template:
            raise ValueError(
                f"the tokenizer of {self.options.model} has no chat template; "
                "give one with --chat-template FILE, or use --no-chat"
            )
        return self.has_template if wanted is None else wanted

    def intake(self) -> Intake:
        """Reads prompts and checks requests as the engine will, which may have room for less than the context."""
        from .intake import Intake
        from .loading import text_config

        config = text_config(self.source)
        return Intake(self.tokenizer, config.vocab_size, config.max_position_embeddings)


def drafters_of(methods: Sequence[str], options: EngineOptions) -> list[str]:
    """The methods whose drafters are needed: auto stands for those that it chooses among, which the options name."""
    needed: dict[str, None] = {}
    for method in methods:
        needed |= dict.fromkeys(auto_parts(options) if method == AUTO else (method,))
    return list(needed)


def auto_parts(options: EngineOptions) -> list[str]:
    """What auto chooses among: LogitSpec always, the others where something is given for them."""
    hispec = (options.hispec.draft_layer, options.hispec.verify_layer)
    asked_for = {
        "draft-model": options.draft_model is not None,
        "early-exit": options.bundle is not None or options.early_exit.layer is not None,
        "hispec": options.bundle is not None or any(layer is not None for layer in hispec),
    }
    return ["logitspec", *(method for method, asked in asked_for.items() if asked)]


def prepare(options: EngineOptions, methods: Sequence[str]) -> Prepared:
    """Find the models and check everything that can be refused before weights are read.

    Raises ValueError for a method or model that cannot be used, for a draft model with another tokenizer, for a bundle
    that is damaged, made for another model or used by no method, and for exits that are not there; for a datastore as
    for a bundle.
    """
    from .sources import check_attention, check_device, check_dtype

    for method in methods:
        check_method(method)
    check_dtype(options.dtype)
    check_device(options.device)
    check_attention(options.attention)
    _check_numbers(options)
    options, ensemble = _with_ensemble(options, methods)
    drafting = [Plan.of(method, options, ensemble).drafter for method in drafters_of(methods, options)]
    _check_uses(options, methods, drafting)
    template = None if options.chat_template is None else read_text("chat_template", options.chat_template)
    source = _find(options, options.model)
    draft_source = _find(options, options.draft_model) if options.draft_model is not None else None

    from .loading import check_model  # torch only from here on

    _check_device(options)
    _check_drafters(options)
    source = check_model(source)
    draft_source = None if draft_source is None else check_model(draft_source)
    tokenizer = _tokenizer(source, draft_source, template)
    _check_memory(options, source)
    prepared = Prepared(options, tuple(dict.fromkeys(methods)), source, tokenizer, draft_source, ensemble=ensemble)
    if options.logitspec.datastore is not None:
        prepared = replace(prepared, datastore=_datastore(options.logitspec.datastore, source, tokenizer))
    if ensemble is not None:
        prepared = _with_known_base(prepared, ensemble, f"target.head {options.target.head!r}")
        _check_draft(prepared, ensemble)
    return _with_exits(prepared) if prepared.uses_exits else prepared


def _check_uses(options: EngineOptions, methods: Sequence[str], drafting: Sequence[str]) -> None:
    """Refuse what methods lack, cannot have, or would not read. drafting: the methods whose drafts they have."""
    if "draft-model" in drafting and options.draft_model is None:
        raise ValueError("method draft-model needs --draft-model, a smaller model with the same tokenizer")
    if AUTO in methods and options.logitspec.tree != "adaptive":
        raise ValueError(f"logitspec.tree must be adaptive for method auto, got {options.logitspec.tree!r}")
    _check_attention_use(options, methods)
    if options.draft_model is not None and "draft-model" not in drafting:
        raise ValueError(f"draft_model is read by draft-model; method is {' and '.join(dict.fromkeys(methods))}")
    if options.bundle is not None and not any(method in EXIT_DRAFTERS for method in drafting):
        raise ValueError(
            f"bundle is read by {', '.join(EXIT_DRAFTERS)}; method is {' and '.join(dict.fromkeys(methods))}"
        )
    _check_datastore_use(options.logitspec, drafting, methods)


def _check_attention_use(options: EngineOptions, methods: Sequence[str]) -> None:
    """Refuse passes that method auto has not measured, and graphs of an attention that cannot be recorded."""
    if AUTO in methods and options.attention != "sdpa":
        raise ValueError(
            f"attention must be sdpa for method auto, whose measurements are of it, got {options.attention!r}"
        )
    if AUTO in methods and options.cuda_graphs:
        raise ValueError("cuda_graphs must be left out for method auto, whose measurements are of passes without")
    if options.cuda_graphs and options.attention != "sdpa":
        raise ValueError(f"attention must be sdpa with cuda_graphs, got {options.attention!r}")


def _check_device(options: EngineOptions) -> None:
    """Refuse a device that is not there, and CUDA graphs on one without."""
    from .loading import resolve_device

    device = resolve_device(options.device)
    if options.cuda_graphs and device.type != "cuda":
        raise ValueError(f"cuda_graphs needs device cuda, this is {device.type!r}; leave it out elsewhere")


def _tokenizer(source: ModelSource, draft_source: ModelSource | None, template: str | None) -> Any:
    """The model's, which the draft model must share. template: chat template in place of its own."""
    from .loading import check_same_tokenizer, load_tokenizer

    tokenizer = load_tokenizer(source)
    if draft_source is not None:
        check_same_tokenizer(tokenizer, load_tokenizer(draft_source), source.name, draft_source.name)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def _check_datastore_use(options: LogitSpecOptions, drafting: Sequence[str], methods: Sequence[str]) -> None:
    """Refuse a datastore that no drafter would read."""
    if options.datastore is None:
        return
    check_datastore_tree(options.datastore, options.tree)
    if "logitspec" not in drafting:
        named = " and ".join(dict.fromkeys(methods))
        raise ValueError(f"logitspec.datastore is read by methods logitspec and {AUTO}; method is {named}")


def check_datastore_tree(datastore: str | None, tree: str) -> None:
    """Raise ValueError for a datastore beside the paper's trees, which have no place for one."""
    if datastore is not None and tree != "adaptive":
        raise ValueError(f"logitspec.tree must be adaptive for logitspec.datastore, got {tree!r}")


def _datastore(folder: str, source: ModelSource, tokenizer: Any) -> Datastore:
    from .datastore import Datastore
    from .loading import text_config, tokenizer_fingerprint

    found = Datastore.load(folder)
    where = f"logitspec.datastore {folder!r}"
    found.check_tokenizer(where, tokenizer_fingerprint(tokenizer), text_config(source).vocab_size)
    return found


def _with_ensemble(options: EngineOptions, methods: Sequence[str]) -> tuple[EngineOptions, HeadBundle | None]:
    """The options with what an ensemble head names besides itself, and the head, where a method reads one."""
    if options.target == TargetOptions() and DIVERSED not in methods:
        return options, None
    from .rules import check_drafts, check_layer, check_rule, load_ensemble, with_heads_of

    check_rule(options, methods)
    if options.target.head is None:
        return options, None
    head = load_ensemble(options.target.head)
    plans = [Plan.of(method, options, head) for method in methods]
    for plan in plans:
        check_drafts(head, plan, None)
    if not any(plan.reads_exit_layer for plan in plans):
        check_layer(head, options.early_exit.layer)
    return with_heads_of(options, head), head


def _check_draft(prepared: Prepared, ensemble: HeadBundle) -> None:
    """Refuse another draft model than the ensemble head was trained with, where its files tell."""
    from .bundles import base_fingerprint

    trained = ensemble.config["draft"].get("fingerprint")
    if trained is None or prepared.draft_source is None:
        return
    found = base_fingerprint(prepared.draft_source)
    if found is not None and found != trained:
        raise ValueError(
            f"draft_model {prepared.draft_source.name!r} ({found}) is not the one that target.head "
            f"{prepared.options.target.head!r} was trained with: {ensemble.config['draft'].get('model')} ({trained})"
        )


def _with_known_base(prepared: Prepared, bundle: HeadBundle, name: str) -> Prepared:
    """Refuse a bundle for another model, now if the model's fingerprint can be had without its weights."""
    from .bundles import base_fingerprint

    found = base_fingerprint(prepared.source)
    if found is not None:
        bundle.check_base(found, name)
    return replace(prepared, base_known=found is not None)


def _with_exits(prepared: Prepared) -> Prepared:
    from .bundles import load_bundle, planned_exits
    from .loading import text_config
    from .request import GenerationParams

    options, source = prepared.options, prepared.source
    bundle = None if options.bundle is None else load_bundle(options.bundle)
    exits = planned_exits(text_config(source).num_hidden_layers, bundle)
    chosen = {
        "early_exit.layer": options.early_exit.layer,
        "hispec.draft_layer": options.hispec.draft_layer,
        "hispec.verify_layer": options.hispec.verify_layer,
    }
    for name, layer in chosen.items():
        if layer is not None:
            exits.check(name, layer)
    if bundle is not None:
        prepared = _with_known_base(prepared, bundle, f"bundle {options.bundle!r}")
    prepared = replace(prepared, exits=exits, bundle=bundle)
    for method in drafters_of(prepared.methods, options):
        check_request(prepared, GenerationParams(method=method))
    return prepared


def check_request(prepared: Prepared, params: GenerationParams) -> None:
    """Raise ValueError for exits that a request asks for and that are not there. Needs no weights."""
    for method in drafters_of([params.method or prepared.methods[0]], prepared.options):
        plan = prepared.plan(method)
        if plan.drafter in EXIT_DRAFTERS:
            assert prepared.exits is not None, "prepare() plans them for these methods"
            drafter = EXIT_DRAFTERS[plan.drafter](prepared, prepared.exits, **plan.settings)
            drafter.check(params)
            if prepared.ensemble is not None:
                from .rules import check_drafts

                check_drafts(prepared.ensemble, plan, drafter.depth(params))


def _check_numbers(options: EngineOptions) -> None:
    """What the engine would refuse itself, but only once the weights are there."""
    from .intake import MAX_DRAFT_TOKENS

    for name in ("max_num_seqs", "max_batch_tokens"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(options, name)}")
    sizes = [("early_exit", "num_tokens"), ("hispec", "draft_tokens"), ("hispec", "window"), ("diversed", "num_tokens")]
    bounded = {f"{group}.{name}": (getattr(getattr(options, group), name), MAX_DRAFT_TOKENS) for group, name in sizes}
    bounded |= {"threads": (options.threads, MAX_THREADS), "block_size": (options.block_size, MAX_BLOCK_SIZE)}
    for name, (value, most) in bounded.items():
        if value is not None and not 1 <= value <= most:
            raise ValueError(f"{name} must be from 1 to {most}, got {value}")
    if not 0.0 < options.hispec.wait <= 1.0:
        raise ValueError(f"hispec.wait must be above 0 and at most 1, got {options.hispec.wait}")
    if options.kv_memory is not None and not 0 < options.kv_memory < math.inf:
        raise ValueError(f"kv_memory must be a number of GiB above 0, got {options.kv_memory}")
    if options.draft_temperature is not None and not 0 <= options.draft_temperature <= 1e6:
        raise ValueError(f"draft_temperature must be from 0 (greedy) to 1e6, got {options.draft_temperature}")


def _check_memory(options: EngineOptions, source: ModelSource) -> None:
    """Refuse a cache without a single block, where the checkpoint says in which dtype it will be."""
    import torch

    from ..modules.layered_model import kv_bytes_per_token, kv_shape
    from .loading import resolve_dtype, text_config
    from .memory import blocks_in

    config = text_config(source)
    dtype = config.dtype if options.dtype == "auto" else resolve_dtype(options.dtype)
    if options.kv_memory is not None and isinstance(dtype, torch.dtype):
        per_token = kv_bytes_per_token(config.num_hidden_layers, *kv_shape(config), dtype)
        blocks_in(options.kv_memory, per_token * options.block_size)


def _check_drafters(options: EngineOptions) -> None:
    """What drafters would refuse themselves."""
    from .logitspec import LogitSpecDrafter
    from .prompt_lookup import PromptLookupDrafter

    given = asdict(options.logitspec) | {"datastore": None}  # read once the tokenizer is there
    makers: dict[str, Callable[[], Drafter]] = {
        "logitspec": lambda: LogitSpecDrafter(**{name: value for name, value in given.items() if value is not None}),
        "prompt_lookup": lambda: PromptLookupDrafter(**asdict(options.prompt_lookup)),
    }
    for group, make in makers.items():
        try:
            make()
        except ValueError as error:
            raise ValueError(f"{group}.{error}") from error


def build_engine(prepared: Prepared) -> Engine:
    """Load the weights and put the engine together; requests without a method use the first of `prepared.methods`."""
    import torch

    from .engine import Engine

    options = prepared.options
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, cost = _load_model(prepared)
    exits = _exits(prepared, model) if prepared.uses_exits else None
    drafters = [_ruled(method, prepared, model, exits) for method in prepared.methods if method not in ("ar", AUTO)]
    if AUTO in prepared.methods:
        drafters.append(_auto(prepared, model, exits, cost))
    return Engine(
        model,
        prepared.tokenizer,
        drafters=drafters,
        default_method=prepared.methods[0] if prepared.methods else "ar",
        block_size=options.block_size,
        kv_memory=options.kv_memory,
        max_num_seqs=options.max_num_seqs,
        max_batch_tokens=options.max_batch_tokens,
        cuda_graphs=options.cuda_graphs,
    )


def _load_model(prepared: Prepared) -> tuple[LayeredModel, CostModel | None]:
    """The target, and for method auto what its passes cost, where that has been measured."""
    from ..modules.bundle import fingerprint
    from .loading import layered, load_transformers

    loaded = load_transformers(prepared.source, prepared.options.dtype, prepared.options.device)
    named = {"bundle": prepared.bundle, "target.head": prepared.ensemble} if not prepared.base_known else {}
    for name, bundle in named.items():
        if bundle is not None:
            bundle.check_base(fingerprint(loaded), name)
    cost = None
    if AUTO in prepared.methods:
        from .calibrate import identity_of, stored_cost_model

        identity = identity_of(fingerprint(loaded), loaded.dtype, loaded.device)
        cost = stored_cost_model(identity, prepared.options.cache_dir)
    return layered(loaded, prepared.options.attention), cost


def _auto(prepared: Prepared, model: LayeredModel, exits: EarlyExits | None, cost: CostModel | None) -> Drafter:
    """Over drafters of its own: an engine's drafters share no state."""
    from .auto import MAX_NODES, AutoDrafter
    from .drafter import TreeDrafter

    tree, *chains = (_drafter(method, prepared, model, exits) for method in auto_parts(prepared.options))
    assert isinstance(tree, TreeDrafter), "LogitSpec comes first"
    return AutoDrafter(tree, chains, prepared.options.logitspec.capacity or MAX_NODES, cost)


def _exits(prepared: Prepared, model: LayeredModel) -> EarlyExits:
    """One for all drafters, so that they share what heads have seen."""
    from ..modules.exit_heads import ExitHeads
    from .exits import EarlyExits, HeadExits

    if prepared.bundle is None:
        return EarlyExits()
    assert prepared.exits is not None, "prepare() plans them for a bundle"
    return HeadExits(ExitHeads.from_bundle(prepared.bundle, model), prepared.exits.acceptance)


def _ruled(method: str, prepared: Prepared, model: LayeredModel, exits: EarlyExits | None) -> Drafter:
    """The drafter of a method, with what its proposals are verified against."""
    from .rules import make_rule

    plan, drafter = prepared.plan(method), _drafter(method, prepared, model, exits)
    drafter.name = plan.method
    drafter.target_rule = make_rule(replace(prepared.options.target, rule=plan.rule), prepared.ensemble)
    return drafter


def _drafter(method: str, prepared: Prepared, model: LayeredModel, exits: EarlyExits | None) -> Drafter:
    plan = prepared.plan(method)
    if plan.drafter not in EXIT_DRAFTERS:
        return DRAFTERS[plan.drafter](prepared, model, **plan.settings)
    assert exits is not None
    return EXIT_DRAFTERS[plan.drafter](prepared, exits, **plan.settings)


def check_method(method: str) -> None:
    """Raise ValueError, with the nearest valid name, unless `method` names a drafter or "ar"."""
    valid = ["ar", AUTO, *DRAFTERS, *EXIT_DRAFTERS, DIVERSED]
    if method not in valid:
        raise ValueError(f"method must be one of {', '.join(valid)}, got {method!r}{did_you_mean(method, valid)}")


def did_you_mean(name: str, valid: Sequence[str]) -> str:
    """`; did you mean 'temperature'?`, or nothing when no valid name is near."""
    close = get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _find(options: ModelOptions, model: str) -> ModelSource:
    from .sources import find_model

    return find_model(model, options.allow_pickle, options.trust_remote_code, options.cache_dir)


CAPACITY, CAPACITY_ELSEWHERE = {"cpu": 8}, 64
"""Default size of LogitSpec's trees by kind of device: the paper's, except where a pass over so many tokens costs
several passes over one, as measured on CPUs (docs/LOG.md)."""


def _logitspec(prepared: Prepared, _: Any = None) -> Drafter:
    from .loading import resolve_device
    from .logitspec import LogitSpecDrafter

    options = asdict(prepared.options.logitspec) | {"datastore": prepared.datastore}
    if options["capacity"] is None:
        options["capacity"] = CAPACITY.get(resolve_device(prepared.options.device).type, CAPACITY_ELSEWHERE)
    return LogitSpecDrafter(**options)


def _prompt_lookup(prepared: Prepared, _: Any = None) -> Drafter:
    from .prompt_lookup import PromptLookupDrafter

    return PromptLookupDrafter(**asdict(prepared.options.prompt_lookup))


def _draft_model(prepared: Prepared, model: LayeredModel, **settings: int) -> Drafter:
    from .draft_model import DraftModelDrafter
    from .loading import load_weights

    assert prepared.draft_source is not None, "prepare() resolves it for this method"
    dtype, device = str(model.dtype).removeprefix("torch."), str(model.device)
    draft = load_weights(prepared.draft_source, dtype, device, attention=prepared.options.attention)
    return DraftModelDrafter(draft, draft_temperature=prepared.options.draft_temperature, **settings)


DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "prompt-lookup": _prompt_lookup,
    "logitspec": _logitspec,
    "draft-model": _draft_model,
}
"""How each method's drafter is made from the options; "ar" needs none."""


def _default_exits(prepared: Prepared) -> tuple[int, int]:
    from .bundles import default_exits

    assert prepared.exits is not None, "prepare() plans them for these methods"
    return default_exits(prepared.exits)


def _early_exit(prepared: Prepared, exits: EarlyExits, **settings: int) -> Drafter:
    from .early_exit import EarlyExitDrafter

    given = asdict(prepared.options.early_exit) | settings
    layer = _default_exits(prepared)[0] if given["layer"] is None else given["layer"]
    return EarlyExitDrafter(layer, given["num_tokens"], exits=exits)


def _hispec(prepared: Prepared, exits: EarlyExits) -> Drafter:
    from .early_exit import EarlyExitDrafter

    options = prepared.options.hispec
    layer = _default_exits(prepared)[0] if options.draft_layer is None else options.draft_layer
    return _over(EarlyExitDrafter(layer, options.draft_tokens, exits=exits), prepared, exits)


def _hispec_logitspec(prepared: Prepared, exits: EarlyExits) -> Drafter:
    paper = replace(prepared.options.logitspec, tree="paper")  # what layers below say is not what the model says
    options = replace(prepared.options, logitspec=paper)
    return _over(_logitspec(replace(prepared, options=options, datastore=None)), prepared, exits)


def _hispec_prompt_lookup(prepared: Prepared, exits: EarlyExits) -> Drafter:
    return _over(_prompt_lookup(prepared), prepared, exits)


def _over(inner: Drafter, prepared: Prepared, exits: EarlyExits) -> Drafter:
    """HiSpec's intermediate stage over a drafter."""
    from .hierarchical import HierarchicalDrafter

    options = prepared.options.hispec
    layer = _default_exits(prepared)[1] if options.verify_layer is None else options.verify_layer
    return HierarchicalDrafter(inner, layer, options.window, exits=exits, wait=options.wait)


EXIT_DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "early-exit": _early_exit,
    "hispec": _hispec,
    "hispec+logitspec": _hispec_logitspec,
    "hispec+prompt-lookup": _hispec_prompt_lookup,
}
"""The same for methods that use the target's early exits, which they share."""
