"""`speclight export`: what a checkpoint has trained, in the form that the engine serves, and tried out as it will be.

Heads become a bundle: exit heads, or the head of a learned verifier. A new process loads it from disk and answers
prompts with the engine; where other drafts are accepted than with the same heads in memory, or clearly fewer or more
than before they were rounded, there is no bundle. A model that was trained to exit early becomes a folder as
transformers writes it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from ..infer.build import EngineOptions, option

if TYPE_CHECKING:
    from ..infer.request import Prompt
    from ..modules.bundle import HeadBundle

TOLERANCE = 0.05
"""How far storing in bfloat16 may move an exit's acceptance rate. Rounding moves logits by about a hundredth, which
changes drafts at near ties. From memory to disk nothing may change: all counts are equal."""

NUM_PROMPTS = 16
PROMPTS = tuple(
    f"{ask} {topic}."
    for topic in ("the sea", "a train", "bread", "the moon")
    for ask in ("Write a sentence about", "Explain in simple words", "List three facts about", "Ask a question about")
)
LICENCE = "the base model's licence applies to what is derived from it; the licences of the training data are not known"


@dataclass(kw_only=True)
class ExportOptions:
    """What to export, where to, and how to try it out."""

    ckpt: str = option(..., "checkpoint of `speclight fit`")
    output: str = option(..., "folder of the bundle, or of the model if that was trained")
    model: str | None = option(None, "the base model; if unset where it was in training")
    prompts: str | None = option(None, f"JSONL file of prompts to try, the first {NUM_PROMPTS}; if unset built-in ones")
    max_new_tokens: int = option(48, "tokens of each answer in the trial")
    dtype: Literal["bfloat16", "float32"] = option("bfloat16", "what heads are stored in")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    bundle: str | None = option(None, "exit heads that a verifier was trained with; if unset where they were then")
    draft_model: str | None = option(None, "draft model that a verifier was trained with; if unset where it was then")
    base_name: str | None = option(None, "what the bundle calls its base model; if unset the last part of its path")
    measured: str | None = option(None, "JSON file with an object of figures of yours, for the card")
    licence: str = option(LICENCE, "note on the licence, for the card")
    overwrite: bool = option(False, "replace a bundle that is there")


def export(options: ExportOptions) -> int:
    """Exit status 1, and no bundle, where it does not draft as the heads in memory do.

    Raises ValueError for whatever is not valid.
    """
    from ..modules.ensemble_head import KIND as ENSEMBLE
    from ..modules.exit_heads import KIND
    from .checkpoint import RECORD, read_checkpoint

    if options.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {options.max_new_tokens}")
    _check_output(options)
    _measured(options)
    checkpoint = read_checkpoint(options.ckpt)
    settings = checkpoint.get("settings", {})
    if checkpoint[RECORD]["kind"] == KIND:
        return _export_heads(options, settings)
    if checkpoint[RECORD]["kind"] == ENSEMBLE:
        return _export_ensemble(options, checkpoint, settings)
    return _export_model(options)


def _check_output(options: ExportOptions) -> None:
    from ..modules.bundle import INDEX

    output = Path(options.output).expanduser()
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not options.overwrite:
        raise ValueError(f"output {options.output!r} is not empty; choose another folder, or --overwrite a bundle")
    if not (output / INDEX).is_file():
        raise ValueError(f"output {options.output!r} is not empty and holds other files; choose another folder")


def _measured(options: ExportOptions) -> dict[str, Any]:
    if options.measured is None:
        return {}
    try:
        found = json.loads(Path(options.measured).expanduser().read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"measured {options.measured!r} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"measured {options.measured!r} must hold a JSON object, got {type(found).__name__}")
    return {"measured": found}


# --- heads ------------------------------------------------------------------------------------------------------------


def _export_heads(options: ExportOptions, settings: Mapping[str, Any]) -> int:
    from .checkpoint import read_heads

    trained = read_heads(options.ckpt)
    trial = Trial(options.model or trained.base_model, options.prompts, options.max_new_tokens, options.device)
    found = trial.run(bundle=trained)
    tried = {"exits": {str(layer): counts.as_dict() for layer, counts in found.items()}}
    tensors, card = _stored(trained, options.dtype), _card(options, trained, settings, tried)
    name = options.base_name or Path(trained.base_model).name
    bundle = replace(trained, tensors=tensors, base_model=name, card=card)
    stored = found if options.dtype == "float32" else trial.run(bundle=bundle)

    def wrong_from(folder: Path) -> str:
        again = trial.run_in_new_process(folder)
        _report(again)
        return mismatch(found, stored, again)

    return _save_tried(options, bundle, wrong_from)


def _save_tried(options: ExportOptions, bundle: HeadBundle, wrong_from: Callable[[Path], str]) -> int:
    """Save a bundle unless something is wrong with it as it lies on disk, which is said. Returns the exit status."""
    output = Path(options.output).expanduser().resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        bundle.save(folder / "bundle")
        wrong = wrong_from(folder / "bundle")
        if wrong:
            print(f"speclight: error: no bundle was made: {wrong}", file=sys.stderr)
            return 1
        bundle.save(output, options.overwrite)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"speclight: {options.output} is a bundle; `speclight inspect {options.output}` shows it", file=sys.stderr)
    return 0


def _stored(bundle: HeadBundle, dtype: str) -> dict[str, Any]:
    import torch

    kind = getattr(torch, dtype)
    return {name: tensor.to(kind) if tensor.is_floating_point() else tensor for name, tensor in bundle.tensors.items()}


def _card(
    options: ExportOptions, trained: HeadBundle, settings: Mapping[str, Any], tried: Mapping[str, Any]
) -> dict[str, Any]:
    """What people should know of these heads. Paths are left out but for files' names."""
    return {
        **trained.card,
        **_measured(options),
        "training": _training(settings),
        "trial": {
            "prompts": Path(options.prompts).name if options.prompts else "built-in",
            "max_new_tokens": options.max_new_tokens,
            **tried,
        },
        "versions": {name: version(name) for name in ("speclight", "torch", "transformers", "lightning")},
        "licence": options.licence,
    }


def _training(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Class and arguments of the recipe and its data, as far as they say something elsewhere."""
    found: dict[str, Any] = {}
    for name in ("model", "data"):
        part = settings.get(name) or {}
        arguments = {key: value for key, value in (part.get("init_args") or {}).items() if key != "model"}
        found[name] = {"class": part.get("class_path", "").rpartition(".")[2]} | _without_folders(arguments)
    return found | {"seed": settings.get("seed_everything")}


def _without_folders(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_folders(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_folders(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and "/" in value else value


# --- the trial --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """What drafting at one exit came to."""

    drafted: int
    accepted: int
    emitted: int
    passes: int

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    def as_dict(self) -> dict[str, float]:
        return {"acceptance_rate": self.acceptance_rate, "mat": self.emitted / self.passes if self.passes else 0.0}


@dataclass(frozen=True)
class Trial:
    """Greedy answers in float32 with method early-exit, at each exit. prompts: a JSONL file; None: built-in ones."""

    model: str
    prompts: str | None
    max_new_tokens: int
    device: str

    def run(self, bundle: HeadBundle | None = None, folder: str | None = None) -> dict[int, Counts]:
        """{exit: counts}, with heads in memory, heads in a folder, or (neither) the model's own exits.

        Raises ValueError for a model that the heads do not belong to, and for prompts that cannot be read.
        """
        from ..infer.build import build_engine, prepare
        from ..infer.bundles import base_fingerprint, planned_exits
        from ..infer.request import GenerationParams
        from ..infer.stats import SequenceStats
        from ..modules.exit_heads import default_layers

        options = EngineOptions(model=self.model, dtype="float32", device=self.device, bundle=folder, kv_memory=1.0)
        prepared = prepare(options, ["early-exit"])
        exits = prepared.exits
        assert exits is not None, "prepare() plans them for this method"
        if bundle is not None:
            own = base_fingerprint(prepared.source)
            if own is not None:
                bundle.check_base(own, "the checkpoint")
            exits = planned_exits(exits.num_layers, bundle)
            prepared = replace(prepared, bundle=bundle, exits=exits, base_known=own is not None)
        layers = exits.layers or default_layers(exits.num_layers)
        prompts = self._read(prepared.tokenizer)
        engine = build_engine(prepared)
        found = {}
        for layer in layers:
            params = GenerationParams(draft_layer=layer, max_new_tokens=self.max_new_tokens, temperature=0.0, seed=0)
            total = SequenceStats.total(done.stats for done in engine.generate(prompts, params))
            found[layer] = Counts(total.drafted, total.accepted, total.emitted_tokens, total.target_passes)
        return found

    def run_in_new_process(self, folder: Path | None) -> dict[int, Counts]:
        """The same from disk, by a python that has seen nothing of the training."""
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(self.run, folder=None if folder is None else str(folder)).result()

    def _read(self, tokenizer: Any) -> list[Prompt]:
        return trial_prompts(self.prompts, tokenizer)


def trial_prompts(path: str | None, tokenizer: Any) -> list[Prompt]:
    """Of a JSONL file, or the built-in ones; as a user's messages where there is a chat template."""
    from .data import read_prompts

    chat = bool(getattr(tokenizer, "chat_template", None))
    if path is not None:
        return read_prompts(path, chat, NUM_PROMPTS)
    return [[{"role": "user", "content": text}] if chat else text for text in PROMPTS]


def mismatch(trained: Mapping[int, Counts], stored: Mapping[int, Counts], again: Mapping[int, Counts]) -> str:
    """What is wrong with exits that were loaded from disk (`again`); empty where nothing is.

    trained, stored: of the heads in memory, before and after rounding to what is stored.
    """
    for layer, counts in stored.items():
        if again.get(layer) != counts:
            return f"the exit after layer {layer} comes to {again.get(layer)} from disk, to {counts} in memory"
        before, now = trained[layer].acceptance_rate, counts.acceptance_rate
        if abs(before - now) > TOLERANCE:
            return (
                f"of the drafts after layer {layer} {now:.3f} are accepted as stored, {before:.3f} as trained; they "
                f"may differ by {TOLERANCE}; try --dtype float32"
            )
    return ""


def _report(found: Mapping[int, Counts]) -> None:
    for layer, counts in found.items():
        figures = counts.as_dict()
        print(
            f"speclight: exit after layer {layer}: {figures['acceptance_rate']:.3f} of {counts.drafted} drafts "
            f"accepted, {figures['mat']:.2f} tokens per pass of the model",
            file=sys.stderr,
        )


# --- the head of a learned verifier -----------------------------------------------------------------------------------


def _export_ensemble(options: ExportOptions, checkpoint: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    from .checkpoint import ensemble_of

    trained = ensemble_of(checkpoint)
    given = (settings.get("model") or {}).get("init_args") or {}
    trial = EnsembleTrial(
        options.model or trained.base_model,
        options.bundle or given.get("bundle"),
        options.draft_model or given.get("draft_model"),
        options.prompts,
        options.max_new_tokens,
        options.device,
    )
    with tempfile.TemporaryDirectory() as folder:  # the engine's options name folders
        trained.save(Path(folder) / "head")
        found = trial.run(str(Path(folder) / "head"), trained)
    name = options.base_name or Path(trained.base_model).name
    card = _card(options, trained, settings, found.as_dict())

    def wrong_from(folder: Path) -> str:
        again = trial.run_in_new_process(folder)
        figures = again.as_dict()
        print(
            f"speclight: {figures['acceptance_rate']:.3f} of {again.drafted} drafts accepted, {figures['mat']:.2f} "
            f"tokens per pass of the model, {figures['distance']:.3f} from the model's own distribution a token",
            file=sys.stderr,
        )
        return "" if again == found else f"drafting comes to {again} from disk, to {found} in memory"

    return _save_tried(options, replace(trained, base_model=name, card=card), wrong_from)


@dataclass(frozen=True)
class LossyCounts(Counts):
    """distance: see SequenceStats."""

    distance: float

    def as_dict(self) -> dict[str, float]:
        return super().as_dict() | {"distance": self.distance / self.emitted if self.emitted else 0.0}


@dataclass(frozen=True)
class EnsembleTrial:
    """Seeded answers at temperature 1 in float32 with method diversed. bundle, draft_model: what drafts for it."""

    model: str
    bundle: str | None
    draft_model: str | None
    prompts: str | None
    max_new_tokens: int
    device: str

    def run(self, folder: str, head: HeadBundle | None = None) -> LossyCounts:
        """With the head in a folder, or with this one instead. Raises ValueError for models it does not belong to."""
        from ..infer.build import TargetOptions, build_engine, prepare
        from ..infer.request import GenerationParams
        from ..infer.stats import SequenceStats

        options = EngineOptions(
            model=self.model,
            bundle=self.bundle,
            draft_model=self.draft_model,
            dtype="float32",
            device=self.device,
            kv_memory=1.0,
            target=TargetOptions(head=folder),
        )
        prepared = prepare(options, ["diversed"])
        engine = build_engine(prepared if head is None else replace(prepared, ensemble=head))
        params = GenerationParams(max_new_tokens=self.max_new_tokens, temperature=1.0, seed=0)
        done = engine.generate(trial_prompts(self.prompts, prepared.tokenizer), params)
        total = SequenceStats.total(one.stats for one in done)
        return LossyCounts(total.drafted, total.accepted, total.emitted_tokens, total.target_passes, total.distance)

    def run_in_new_process(self, folder: Path) -> LossyCounts:
        """The same from disk, by a python that has seen nothing of the training."""
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(self.run, str(folder)).result()


# --- models -----------------------------------------------------------------------------------------------------------


def _export_model(options: ExportOptions) -> int:
    from .layer_skip import save_model

    if options.model is not None:
        raise ValueError("model is for exit heads; this checkpoint trained the model itself")
    save_model(options.ckpt, options.output)
    trial = Trial(options.output, options.prompts, options.max_new_tokens, options.device)
    _report(trial.run_in_new_process(None))
    use = f"speclight generate --model {options.output} --method hispec"
    print(f"speclight: {options.output} is a model; `{use}` uses its early exits", file=sys.stderr)
    return 0


# --- inspect ----------------------------------------------------------------------------------------------------------


def inspect_bundle(flags: list[str]) -> None:
    """`speclight inspect DIR [--json]`. Raises ValueError for a folder that is not a whole bundle."""
    parser = _Parser(prog="speclight inspect", description="say what a bundle holds, after checking that it is whole")
    parser.add_argument("bundle", help="folder of a bundle")
    parser.add_argument("--json", action="store_true", help="print its bundle.json")
    given = parser.parse_args(flags)

    from ..modules.bundle import INDEX, HeadBundle

    bundle = HeadBundle.load(given.bundle)
    if given.json:
        print(json.dumps(json.loads((Path(given.bundle).expanduser() / INDEX).read_bytes()), indent=2))
    else:
        print(bundle.describe())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)
