"""Around a training run: random state for exact resuming, validation by the engine that will serve, provenance."""

from __future__ import annotations

import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn

from ..infer.drafter import Drafter
from ..infer.early_exit import EarlyExitDrafter
from ..infer.engine import Engine
from ..infer.exits import EarlyExits
from ..infer.hierarchical import HierarchicalDrafter
from ..infer.request import GenerationParams, Prompt
from ..infer.stats import SequenceStats
from ..modules.layered_model import LayeredModel

# --- random state -------------------------------------------------------------------------------------------------


def rng_state() -> dict[str, Any]:
    """The global random state of python, numpy and torch (with every CUDA device in use), in plain types."""
    version, internal, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": [version, list(internal), gauss],
        "numpy": [str(kind), [int(key) for key in keys], int(place), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def set_rng_state(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, place, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), place, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


@contextmanager
def untouched_rng() -> Iterator[None]:
    """Whatever is drawn inside, outside nothing was."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


class RngState(Callback):
    """Random state of every rank in the checkpoint, put back when training goes on; Lightning keeps none.

    It is put back at the last moment, when loaders exist and before the first batch is drawn. Our recipes bring it
    along. A run that is resumed with another number of ranks starts with the states that it is given, which are not
    those of the saved run.
    """

    def __init__(self) -> None:
        self._resumed: list[dict[str, Any]] = []

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["rng"] = _gathered(trainer, rng_state())

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._resumed = checkpoint.get("rng", [])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        states, self._resumed = self._resumed, []
        if len(states) == trainer.world_size:
            set_rng_state(states[trainer.global_rank])
        elif states:
            rank_zero_warn(
                f"the checkpoint holds the random state of {len(states)} ranks and this run has {trainer.world_size}: "
                "it goes on with other random numbers"
            )


def _gathered(trainer: Trainer, value: Any) -> list[Any]:
    """Every rank's value, in order; all must ask."""
    if trainer.world_size == 1:
        return [value]
    values: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(values, value)
    return values


# --- validation by the engine -------------------------------------------------------------------------------------


class Drafting(Protocol):
    """What a module must offer for `EngineValidation`."""

    def drafting_model(self) -> LayeredModel:
        """The model whose early exits draft, as it is now."""

    def drafting_exits(self) -> EarlyExits:
        """Its exits, as they are now."""

    @property
    def drafting_layers(self) -> tuple[int, ...]:
        """The exits that were trained."""


class EngineValidation(Callback):
    """Answers prompts with the engine at the end of each validation, so that what is reported is what serving gives.

    method: "hispec", with exits `layers` = (L_d, L_i), or "early-exit", with the first of them; None: the first and the
        second exit that were trained.
    num_draft: N_d, tokens drafted at once. window: N_i, tokens that the intermediate layer lets through before the last
        one verifies. batch: texts at once. temperature: 0 is greedy.
    max_prompts: only the first of the datamodule's prompts. Ranks share them out. kv_memory: GiB for the cache.

    Logged for the last stage: `val/engine/mat`, `acceptance_rate` (accepted / drafted), `acceptance_at_I` (at position
    I of a proposal, given that all before it were accepted); and for hispec the rates of the first stage, drafts under
    the intermediate layer, as `val/engine/inner/...`.

    Training does not notice: modes, random state and gradients are as before.
    """

    def __init__(
        self,
        method: str = "hispec",
        layers: tuple[int, int] | None = None,
        num_draft: int = 2,
        window: int = 4,
        max_new_tokens: int = 64,
        batch: int = 8,
        temperature: float = 0.0,
        max_prompts: int | None = None,
        kv_memory: float = 1.0,
    ) -> None:
        if method not in ("hispec", "early-exit"):
            raise ValueError(f"method must be hispec or early-exit, got {method!r}")
        for name, value in (("num_draft", num_draft), ("window", window), ("batch", batch)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.method, self.layers, self.num_draft, self.window = method, layers, num_draft, window
        self.batch, self.max_prompts, self.kv_memory = batch, max_prompts, kv_memory
        self.params = GenerationParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=0)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        prompts = list(getattr(trainer.datamodule, "prompts", ()))[: self.max_prompts]
        if not prompts:
            rank_zero_warn("no validation by the engine: the datamodule has no prompts (data.prompts)")
            return
        if not holds_whole_model(trainer):
            rank_zero_warn("no validation by the engine: this strategy gives no rank the whole model")
            return
        mine = prompts[trainer.global_rank :: trainer.world_size]
        with untouched_rng(), eval_mode(pl_module):
            counted = self.answer(pl_module, trainer.datamodule.tokenizer, mine)
        everywhere = _gathered(trainer, counted.as_dict())
        for name, value in rates(SequenceStats.total(map(SequenceStats.from_dict, everywhere))).items():
            pl_module.log(f"val/engine/{name}", value, prog_bar=name == "mat", sync_dist=True)

    def answer(self, module: Drafting, tokenizer: Any, prompts: list[Prompt]) -> SequenceStats:
        """What the engine counts while it answers the prompts."""
        layers = module.drafting_layers if self.layers is None else self.layers
        if self.method == "hispec" and len(layers) < 2:
            raise ValueError(f"layers of the engine's validation must be 2 exits for hispec, got {list(layers)}")
        exits = module.drafting_exits()
        drafter: Drafter = EarlyExitDrafter(layers[0], self.num_draft, exits=exits)
        if self.method == "hispec":
            # what is measured of a text must not depend on what runs beside it, so windows wait for each
            drafter = HierarchicalDrafter(drafter, layers[1], self.window, exits=exits, wait=1.0)
        room: dict[str, Any] = {"kv_memory": self.kv_memory, "max_num_seqs": self.batch}
        engine = Engine(module.drafting_model(), tokenizer, [drafter], drafter.name, prefix_caching=False, **room)
        return SequenceStats.total(text.stats for text in engine.generate(prompts, self.params))


def rates(stats: SequenceStats) -> dict[str, float]:
    """`{"mat": 1.9, "acceptance_rate": 0.41, "acceptance_at_1": 0.62, ..., "inner/acceptance_rate": 0.7, ...}`"""
    found = {"mat": stats.mat, "acceptance_rate": stats.acceptance_rate} | _by_position(
        "", stats.conditional_acceptance
    )
    if not stats.inner_passes:
        return found
    inner = _by_position("inner/", stats.inner_conditional_acceptance)
    return found | {"inner/acceptance_rate": stats.inner_acceptance_rate} | inner


def _by_position(stage: str, conditional: dict[int, float]) -> dict[str, float]:
    return {f"{stage}acceptance_at_{depth}": rate for depth, rate in conditional.items()}


@contextmanager
def eval_mode(module: torch.nn.Module) -> Iterator[None]:
    """Everything in eval mode inside; afterwards each part is as it was."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def holds_whole_model(trainer: Trainer) -> bool:
    """Whether each rank holds all weights, so that it can run the model by itself."""
    return not isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy | DeepSpeedStrategy)


# --- provenance ---------------------------------------------------------------------------------------------------


class Provenance(Callback):
    """Writes beside the logs what a run was: versions, settings, data, base model, hardware, as `provenance.json`.

    Written when training begins, and again at its end with the duration and the last metrics.
    """

    def __init__(self, filename: str = "provenance.json") -> None:
        self.filename = filename
        self._started = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.time()
        self._write(trainer, pl_module, {})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._write(trainer, pl_module, {"seconds": time.time() - self._started, "metrics": metrics})

    def _write(self, trainer: Trainer, pl_module: LightningModule, ending: dict[str, Any]) -> None:
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # log_dir asks all ranks
        if trainer.is_global_zero:
            started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started))
            write_json(folder / self.filename, {"started": started, **run_facts(trainer, pl_module), **ending})


PACKAGES = ("speclight", "torch", "lightning", "transformers", "tokenizers", "datasets", "peft", "safetensors", "numpy")


def run_facts(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """What would be needed to run this again, in what JSON holds."""
    datamodule = trainer.datamodule
    return {
        "command": sys.argv,
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "module": {"class": _path_of(module), **getattr(module, "settings", {})},
        "base_fingerprint": getattr(module, "base_fingerprint", None),
        "data": {"class": _path_of(datamodule), **data_facts(datamodule)},
        "trainer": {
            "max_epochs": trainer.max_epochs,
            "max_steps": trainer.max_steps,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "precision": str(trainer.precision),
            "strategy": type(trainer.strategy).__name__,
            "world_size": trainer.world_size,
            "resumed_from": None if trainer.ckpt_path is None else str(trainer.ckpt_path),
        },
        "hardware": hardware(),
    }


def data_facts(datamodule: Any) -> dict[str, Any]:
    """Of each data set in use, what it holds and the hash of its tokens, where it says so."""
    found = getattr(datamodule, "datasets", {}).items()
    sets = {name: data for name, data in found if hasattr(data, "fingerprint")}
    return {name: {"summary": str(getattr(d, "summary", "")), "hash": d.fingerprint()} for name, d in sets.items()}


def hardware() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"machine": platform.machine(), "cpus": os.cpu_count(), "threads": torch.get_num_threads(), "gpus": gpus}


def write_json(path: Path, value: Any) -> None:
    """The file has all of it or is not there; what JSON cannot hold is written as text."""
    text = json.dumps(value, indent=2, default=str) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _path_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
