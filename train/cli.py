"""`speclight fit`, `validate` and `test`: Lightning's command line over YAML, with what users trip over put right.

A configuration names classes and their arguments: `model`, `data`, and every option of the Trainer. Packaged ones are
found by name; `${data.init_args.model}` refers to another value, the command line's included; and what is given now
beats what a checkpoint was trained with, which is said where they differ. What Lightning (2.6.6) does instead: the
checkpoint's hyper-parameters beat the command line in silence, an optimiser keeps the learning rate that it had,
`--ckpt_path last` starts anew when there is none, and a second run into one folder dies.
"""

from __future__ import annotations

import inspect
import re
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentError
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from omegaconf.errors import OmegaConfBaseException

from .. import configs
from ..infer.build import did_you_mean
from .callbacks import Provenance
from .checkpoint import first_line

ROOT = "runs"
"""Where runs go, each into a folder version_N of its own, unless trainer.default_root_dir says otherwise."""

SETTINGS = "settings"
"""The entry of a checkpoint that holds the configuration of its run."""

COMPARED = ("model", "data", "optimizer", "lr_scheduler", "seed_everything")
OURS = ("early_exit", "layer_skip", "diversed", "data", "stored", "task_data")
"""Modules of this package whose classes can be named without their module."""

PURPOSES = {
    "fit": "Train exit heads, a model that exits early, or a verifier",
    "validate": "Measure a checkpoint on data.val, and on data.prompts by the engine",
    "test": "Measure a checkpoint on data.test",
}

NOISE = (
    ".*does not have many workers.*",  # on purpose: the tokens lie in memory
    ".*'set_vital' is deprecated.*",
    ".*exists and is not empty.*",
    ".*but no pre-optimization state was saved.*",  # a checkpoint is meant to hold what was learned
    ".*You have overridden `transfer_batch_to_device`.*",
    ".*could not find the monitored key.*",  # before the first validation; afterwards it is an error
)
"""Warnings of libraries that say nothing about a run."""

MINUTES = 10.0
"""How often a run is saved, besides its best and its end."""


def fit(flags: list[str]) -> int:
    """`speclight fit --config NAME|PATH ...`"""
    return _run("fit", flags)


def validate(flags: list[str]) -> int:
    """`speclight validate --config NAME|PATH --ckpt_path F ...`"""
    return _run("validate", flags)


def test(flags: list[str]) -> int:
    """`speclight test --config NAME|PATH --ckpt_path F ...`"""
    return _run("test", flags)


def _run(command: str, flags: Sequence[str]) -> int:
    """Raises ValueError for whatever a user got wrong."""
    for message in NOISE:
        warnings.filterwarnings("ignore", message)
    for name in OURS:
        import_module(f".{name}", __package__)
    try:
        TrainingCLI(command, found_configs(flags)).run()
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning has shut down already
            raise KeyboardInterrupt from None
        return int(end.code or 0)
    except (MisconfigurationException, OmegaConfBaseException) as error:
        raise ValueError(str(error)) from error
    return 0


# --- configurations by name -----------------------------------------------------------------------------------------


def packaged_configs() -> dict[str, Path]:
    """Name -> file of the recipes that come with the package."""
    files = [Path(str(entry)) for entry in resources.files(configs).iterdir()]
    recipes = [path for path in sorted(files) if path.suffix == ".yaml" and "class_path" in path.read_text("utf-8")]
    return {path.stem: path for path in recipes}


def found_configs(flags: Sequence[str]) -> list[str]:
    """The flags with the names of packaged configurations replaced by their files."""
    found: list[str] = []
    for flag in flags:
        name, equals, value = flag.partition("=")
        if name in ("--config", "-c") and equals:
            found.append(f"{name}={_config_file(value)}")
        else:
            found.append(str(_config_file(flag)) if found[-1:] in (["--config"], ["-c"]) else flag)
    return found


def _config_file(name: str) -> Path:
    if Path(name).is_file():
        return Path(name)
    packaged = packaged_configs()
    if name in packaged:
        return packaged[name]
    raise ValueError(
        f"config {name!r} is neither a file nor a packaged configuration{did_you_mean(name, list(packaged))}; "
        f"packaged: {', '.join(packaged)}"
    )


# --- the command line -----------------------------------------------------------------------------------------------


class TrainingCLI(LightningCLI):
    """One of Lightning's commands. The parser has no subcommands, so that `${...}` starts at a configuration's root.

    Raises ValueError for arguments that are not valid.
    """

    def __init__(self, command: str, flags: Sequence[str]) -> None:
        self.command = command
        self.changed: dict[str, tuple[Any, Any]] = {}
        super().__init__(
            LightningModule,
            LightningDataModule,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"default_root_dir": ROOT},
            seed_everything_default=0,
            parser_kwargs={
                "prog": f"speclight {command}",
                "description": f"{PURPOSES[command]}. Packaged configurations: {', '.join(packaged_configs())}.",
                "parser_mode": "omegaconf+",
                "exit_on_error": False,
            },
            subclass_mode_model=True,
            subclass_mode_data=True,
            args=list(flags),
            run=False,
        )

    def run(self) -> None:
        """What the command is for."""
        checkpoint = self.config.ckpt_path
        if checkpoint is None and self.command != "fit":
            rank_zero_info(f"no --ckpt_path: `{self.command}` measures weights that were not trained")
        getattr(self.trainer, self.command)(self.model, datamodule=self.datamodule, ckpt_path=checkpoint)
        if self.command == "fit":
            for line in _outcome(self.trainer):
                rank_zero_info(line)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        help = f"checkpoint to {'go on from' if self.command == 'fit' else 'measure'}: a file, or last for the newest"
        parser.add_argument("--ckpt_path", type=str | None, default=None, help=help)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            raise ValueError(readable(str(error), parser)) from error

    def before_instantiate_classes(self) -> None:
        self._dump_config()
        self.settings = {name: self.config_dump[name] for name in COMPARED if name in self.config_dump}
        if self.config.ckpt_path is not None:
            root = self.config.trainer.default_root_dir or ROOT
            self.config.ckpt_path = str(_checkpoint_file(self.config.ckpt_path, Path(root)))
            self.changed = differences(self.settings, _saved_settings(self.config.ckpt_path))
            for name, (now, before) in self.changed.items():
                rank_zero_info(f"{name} is {now!r} now; the checkpoint was trained with {before!r}")

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:
            said = re.findall(r"Errors:\s*- (.*)", str(error))  # what a class said, in a nest of lists of alternatives
            if not said:
                raise
            raise ValueError(said[-1]) from error

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        given = self.config_init.trainer
        if not given.barebones:
            kwargs["callbacks"] = self._callbacks(given)
            if given.logger in (None, True):
                kwargs["logger"] = default_loggers(given.default_root_dir or ROOT)
        return super().instantiate_trainer(**kwargs)

    def _callbacks(self, given: Any) -> list[Callback]:
        """The configured ones, and ours unless there are others for the same."""
        callbacks = given.callbacks or []
        callbacks = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
        if given.enable_checkpointing is not False and not any(isinstance(one, Checkpoint) for one in callbacks):
            validates = bool(getattr(self.datamodule, "sources", {"val": True}).get("val"))
            callbacks += default_checkpoints("val/loss" if validates else None)
        if not given.fast_dev_run and not any(isinstance(one, Provenance) for one in callbacks):
            callbacks.append(Provenance())
        return [*callbacks, RunSettings(self.settings, bool(self.changed))]


def default_loggers(root: str) -> list[Logger]:
    """CSV, and TensorBoard where it can be written, into one folder."""
    loggers: list[Logger] = [CSVLogger(root, name="")]
    try:
        loggers.append(TensorBoardLogger(root, name="", version=loggers[0].version))
    except ModuleNotFoundError:
        rank_zero_info("TensorBoard is not installed (pip install tensorboardX): metrics go to metrics.csv only")
    return loggers


def default_checkpoints(monitor: str | None) -> list[Callback]:
    """`best.ckpt` by what is monitored (None: the newest), and `last.ckpt`, every ten minutes and at the end."""
    best = ModelCheckpoint(filename="best" if monitor else "newest", monitor=monitor, enable_version_counter=False)
    return [best, LastCheckpoint()]


class LastCheckpoint(ModelCheckpoint):
    """Saves `last.ckpt` by the clock, and when interrupted, between optimiser steps, where a resumed run loses nothing.

    The first Ctrl-C of a run on one process ends the step under way and saves; a second one stops at once, as does the
    first while validating.
    """

    def __init__(self, minutes: float = MINUTES) -> None:
        interval = timedelta(minutes=minutes)
        super().__init__(save_last=True, save_top_k=0, train_time_interval=interval, enable_version_counter=False)
        self.seconds = interval.total_seconds()
        self._saved_at = time.monotonic()
        self._interrupted = self._listens = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_at, self._interrupted = time.monotonic(), False
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if trainer.world_size == 1 and usual and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, lambda *_: self._interrupt(trainer))
            self._listens = True

    def _interrupt(self, trainer: Trainer) -> None:
        if self._interrupted or not trainer.training:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        self._interrupted = True
        rank_zero_info("\ninterrupted: this step is finished and saved first; Ctrl-C again stops at once")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """By a clock of its own: Lightning's (2.6.6) does not run where a module steps its optimiser itself."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches and not trainer.is_last_batch:
            return
        is_due = time.monotonic() - self._saved_at >= self.seconds or self._interrupted
        if trainer.strategy.broadcast(is_due):
            self._save(trainer)
        if self._interrupted and not trainer.is_last_batch:  # a run that goes on behind an epoch's last batch ends it
            self._stop()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._interrupted:
            self._save_anew(trainer)
            self._stop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning's own saves nothing here once the clock has."""
        self._save_anew(trainer)

    def _save_anew(self, trainer: Trainer) -> None:
        """What was saved behind an epoch's last batch lacks its validation, and what is best by that."""
        self._last_global_step_saved = 0  # where no step was taken there is still nothing to save
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
            self._saved_at = time.monotonic()

    def _stop(self) -> None:
        if self.last_model_path:
            rank_zero_info(f"saved {self.last_model_path}; --ckpt_path last goes on from there")
        raise KeyboardInterrupt

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._listens:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._listens = False


def _outcome(trainer: Trainer) -> Iterator[str]:
    """Where the checkpoints are, and what to do with them."""
    best = [one.best_model_path for one in trainer.checkpoint_callbacks if getattr(one, "monitor", None)]
    last = [one.last_model_path for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    named = {"best": next(filter(None, best), ""), "last": next(filter(None, last), "")}
    paths = {name: path for name, path in named.items() if path and Path(path).exists()}
    if paths:
        yield ", ".join(f"{name} checkpoint: {path}" for name, path in paths.items())
        yield f"`speclight export --ckpt {next(iter(paths.values()))} --output DIR` makes a bundle of it"


# --- resuming -------------------------------------------------------------------------------------------------------


def _checkpoint_file(path: str, root: Path) -> Path:
    """Raises ValueError for one that is not there; Lightning would start anew, or say so late."""
    if path != "last":
        if not Path(path).exists():
            raise ValueError(f"ckpt_path {path!r} does not exist")
        return Path(path)
    found = sorted(root.rglob("last*.ckpt"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise ValueError(f"ckpt_path is 'last', and there is no last.ckpt below {str(root)!r}")
    return found[-1]


def _saved_settings(path: str) -> Mapping[str, Any]:
    """The configuration that a checkpoint's run had; empty where it does not say."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        if Path(path).is_file():
            raise ValueError(f"checkpoint {path!r} cannot be read: {first_line(error)}") from error
        rank_zero_info(f"settings of {path}, a folder of shards, cannot be compared with those of now")
        return {}
    return checkpoint.get(SETTINGS, {}) if isinstance(checkpoint, Mapping) else {}


def differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{dotted name: (value now, value before)} of what both have and is not equal."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in now.keys() & before.keys():
        if isinstance(now[name], Mapping) and isinstance(before[name], Mapping):
            inner = differences(now[name], before[name])
            found |= {f"{name}.{key}".replace(".init_args.", "."): pair for key, pair in inner.items()}
        elif now[name] != before[name]:
            found[name] = (now[name], before[name])
    return dict(sorted(found.items()))


class RunSettings(Callback):
    """Saves the run's configuration with it; and where a resumed run's differs, has optimisers follow the new one.

    An optimiser is restored with the learning rate, decay and so on that it was saved with, and a scheduler with its
    base rates, whatever is configured now. A rate's progress through its schedule is kept.
    """

    def __init__(self, settings: Mapping[str, Any], changed: bool) -> None:
        self.settings, self.changed = dict(settings), changed
        self._configured: list[list[dict[str, Any]]] = []

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[SETTINGS] = self.settings

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Optimisers are as configured; right after this they are restored."""
        if self.changed:
            self._configured = [[_options(group) for group in one.param_groups] for one in trainer.optimizers]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer, configured in zip(trainer.optimizers, self._configured, strict=bool(self._configured)):
            for group, options in zip(optimizer.param_groups, configured, strict=True):
                _reconfigure(group, options)
        if self._configured:
            for config in trainer.lr_scheduler_configs:
                groups = config.scheduler.optimizer.param_groups
                if hasattr(config.scheduler, "base_lrs"):
                    config.scheduler.base_lrs = [group["initial_lr"] for group in groups]
                    config.scheduler._last_lr = [group["lr"] for group in groups]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _reconfigure(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Give a restored group the options that are configured, its rate in proportion to the base rate."""
    base, now = group.get("initial_lr"), options.get("initial_lr")
    scaled = options["lr"] if not base or now is None else group["lr"] * now / base
    group.update(options)
    group["lr"] = scaled


# --- what was wrong -------------------------------------------------------------------------------------------------


def readable(message: str, parser: LightningArgumentParser) -> str:
    """jsonargparse's message in one line, with the nearest valid name."""
    options = [name for name in parser._option_string_actions if name.startswith("--")]
    keys = [name.removeprefix("--") for name in options]
    if found := re.match(r"unrecognized arguments: (\S+)", message):
        name = found[1].partition("=")[0]
        return f"unknown option {name}{did_you_mean(name, options)}"
    if found := re.search(r"Problem with given class_path '([\w.]+)':\s+Option '([\w.]+)' is not accepted", message):
        owner, name = found.groups()
        return f"{owner} has no option {name!r}{did_you_mean(name, _parameters(owner))}"
    if found := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message):
        message = f"Option '{found[1]}.{found[2]}' is not accepted"
    if found := re.search(r"Option '([\w.]+)' is not accepted", message):
        return f"unknown key {found[1]!r}{did_you_mean(found[1], keys)}"
    if found := re.match(r"the following arguments are required: (.*)", message):
        names = ", ".join(f"--{name}" for name in found[1].split(", "))
        return f"{names} must be given, by a --config or one by one"
    if message.startswith("Problems parsing config"):
        return message
    return _innermost(message)


def _parameters(class_path: str) -> list[str]:
    """Names of the arguments of a class and those it hands on to."""
    module, _, name = class_path.rpartition(".")
    owner = getattr(import_module(module), name)
    return [name for one in owner.__mro__ for name in inspect.signature(one.__init__).parameters if name != "self"]


def _innermost(message: str) -> str:
    """`model.layers: expected list[int] or None, got 'x'`, from a nest of alternatives that did not fit."""
    names: list[str] = []
    expected = wrong = given = ""
    for line in (line.strip().removeprefix("- ") for line in message.splitlines()):
        if found := re.match(r'Parser key "([\w.]+)":\s*(.*)', line):
            names, wrong = [*names, found[1]], found[2]
        elif line.startswith("Subtypes: "):
            expected = line.removeprefix("Subtypes: ").strip("[]")
        elif found := re.match(r"Given value: (.*)", line):
            given = found[1]
            break
        elif not re.match(r"Does not validate|Errors:|Given value type|Problem with given class_path", line):
            wrong = wrong or line
    if wrong.startswith("Expected a") and "Got value" not in wrong:
        wrong = f"expected {expected}, got {given!r}"
    wrong = re.sub(r"<class '([\w.]+)'>", r"\1", wrong).replace("NoneType", "null")
    return f"{'.'.join(names)}: {wrong}" if names else wrong
