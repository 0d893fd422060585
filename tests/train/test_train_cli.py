"""The training commands: recipes by name, what is given now counts, and a mistake is one line."""

from __future__ import annotations

import contextlib
import io
import json
import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import yaml
from checkpoint import save_tiny, tiny_tokenizer
from fitting import TEXTS, prompts_file, same_weights, write_rows
from speclight.infer.cli import main
from speclight.train import cli
from speclight.train.cli import LastCheckpoint, TrainingCLI, differences, packaged_configs

FAMILIES = {
    "hispec_smollm2": "llama",
    "hispec_llama31_8b": "llama",
    "hispec_qwen3_8b": "qwen3",
    "hispec_gemma3_4b": "gemma3",
    "early_exit_smollm2_lora": "llama",
    "early_exit_scratch": None,
    "controlled_target": None,
}
VERIFIERS = {
    "diversed_smollm2": "llama",
    "diversed_controlled": "qwen3",
    "diversed_llama31_8b": "llama",
    "diversed_qwen3_8b": "qwen3",
    "diversed_gemma3_12b": "gemma3",
}
TASK_OVERLAYS = ("task_cnndm", "task_xsum", "task_mbpp")
TINY_HEADS = ["--model.layers=[1,2]", "--model.rank=8", "--model.draft_vocab=40"]
TINY_SHAPE = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48}
TINY_MODEL = ["--model.architecture", json.dumps(TINY_SHAPE | {"num_attention_heads": 4})]
SPECIFIC = {
    "early_exit_smollm2_lora": ["--model.layers=[1,2]"],
    "early_exit_scratch": ["--model.layers=[1,2]", *TINY_MODEL],
    "controlled_target": TINY_MODEL,
}
FULL_PRECISION = ("controlled_target",)
"""So small that bfloat16 costs more than it saves."""
CONFIG = """
model:
  class_path: speclight.train.early_exit.EarlyExitModule
  init_args: {model: "${data.init_args.model}", layers: [1, 2], rank: 8, lr: 0.1}
data:
  class_path: speclight.train.data.TextDataModule
  init_args: {model: MODEL, train: ROWS, val: ROWS, row_tokens: 16, batch_rows: 2}
trainer:
  accelerator: cpu
  max_epochs: 1
  log_every_n_steps: 1
  enable_progress_bar: false
  enable_model_summary: false
  default_root_dir: ROOT
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, ten texts, prompts."""
    folder = tmp_path_factory.mktemp("home")
    save_tiny(folder / "model")
    write_rows(folder / "rows.jsonl", [{"text": text} for text in TEXTS])
    prompts_file(folder, 2)
    return folder


@pytest.fixture
def config(home: Path, tmp_path: Path) -> str:
    values = {"MODEL": home / "model", "ROWS": home / "rows.jsonl", "ROOT": tmp_path / "runs"}
    text = CONFIG
    for name, path in values.items():
        text = text.replace(name, str(path))
    (tmp_path / "config.yaml").write_text(text)
    return str(tmp_path / "config.yaml")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("speclight: error: ") and captured.err.count("\n") == 1
    return captured.err


def printed_config(*flags: str) -> dict:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["fit", *flags, "--print_config"]) == 0
    return yaml.safe_load(out.getvalue())


# --- recipes by name ------------------------------------------------------------------------------------------------


def test_every_packaged_recipe_is_tried_here() -> None:
    assert packaged_configs().keys() == {*FAMILIES, *VERIFIERS, *TASK_OVERLAYS}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_packaged_recipe_is_found_by_name_and_its_variables_follow_the_command_line(name: str) -> None:
    """The base model is named once: what the command line says of it reaches the module."""
    found = printed_config("--config", name, "--data.model", "mine", "--trainer.max_steps", "7")
    arguments = found["model"]["init_args"]
    assert "mine" in (arguments.get("model"), arguments.get("tokenizer"))
    assert found["trainer"]["max_steps"] == 7
    assert found["trainer"]["precision"] == ("32-true" if name in FULL_PRECISION else "bf16-mixed")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_packaged_recipe_runs_on_a_tiny_model_of_its_family(
    name: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    family = FAMILIES[name]
    if family is None:
        tiny_tokenizer().save_pretrained(tmp_path / "model")
    else:
        save_tiny(tmp_path / "model", family)
    rows = str(home / "rows.jsonl")
    data = ["--data.model", "model", "--data.train", rows, "--data.val", rows, "--data.row_tokens", "16"]
    given = [*data, "--data.prompts", str(home / "prompts.jsonl"), *SPECIFIC.get(name, TINY_HEADS)]
    trainer = ["--trainer.accelerator=cpu", "--trainer.fast_dev_run=2", "--trainer.enable_progress_bar=false"]
    trainer += ["--trainer.callbacks.max_new_tokens=8"]
    assert main(["fit", "--config", name, *given, *trainer, "--model.warmup_steps=0"]) == 0


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_packaged_verifier_runs_on_tiny_models_of_its_family(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "model", VERIFIERS[name])
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": text, "reference": "1"} for text in TEXTS[:4]])
    given = ["--data.model", "model", "--data.train", rows, "--data.val", rows, "--data.task", "plain"]
    given += ["--model.max_new_tokens=6", "--model.samples=2", "--model.kv_memory=0.05", "--data.batch_prompts=2"]
    if printed_config("--config", name)["model"]["init_args"]["method"] == "draft-model":
        save_tiny(tmp_path / "draft", VERIFIERS[name], seed=1)
        given += ["--model.draft_model=draft"]
    trainer = ["--trainer.accelerator=cpu", "--trainer.fast_dev_run=2", "--trainer.enable_progress_bar=false"]
    assert main(["fit", "--config", name, *given, *trainer]) == 0


@pytest.mark.parametrize("task", TASK_OVERLAYS)
def test_a_task_is_laid_over_a_verifiers_recipe(task: str) -> None:
    found = printed_config("--config", "diversed_qwen3_8b", "--config", task)
    arguments = found["data"]["init_args"]
    assert arguments["task"] == task.removeprefix("task_") and arguments["model"] == "Qwen/Qwen3-8B"
    assert arguments["train"]["path"] != "openai/gsm8k" and arguments["train"]["name"] != "main"
    assert found["model"]["init_args"]["draft_model"] == "Qwen/Qwen3-0.6B"


def test_programs_run_only_when_the_command_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["fit", "--config", "diversed_qwen3_8b", "--config", "task_mbpp"]) == 2
    assert "allow_execution" in capsys.readouterr().err


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trainer.max_stps", "3"], "unknown option --trainer.max_stps; did you mean '--trainer.max_steps'?"),
        (["--model.lrr", "3"], "early_exit.EarlyExitModule has no option 'lrr'; did you mean 'lr'?"),
        (["--data.row_token=3"], "data.TextDataModule has no option 'row_token'; did you mean 'row_tokens'?"),
        (["--model.lr", "fast"], "model.lr: Expected a float. Got value: fast"),
        (["--model.layers", "x"], "model.layers: expected list[int], null, got 'x'"),
        (["--trainer.accelerator", "gpus"], "invalid accelerator name: `accelerator='gpus'`"),
        (["--config", "hispec_smolm2"], "did you mean 'hispec_smollm2'?; packaged: controlled_target"),
        (["--model", "NoModule"], "NoModule"),
        (["--ckpt_path", "nowhere.ckpt"], "ckpt_path 'nowhere.ckpt' does not exist"),
        (["--ckpt_path", "last"], "ckpt_path is 'last', and there is no last.ckpt below"),
        (["--model.model", "/no/such"], "model '/no/such' does not exist; it must be a hub id"),
        (["--model.position_share", "0"], "position_share must be above 0"),
        (["--data.train", "/no/such.jsonl"], "/no/such.jsonl does not exist"),
        (["--data.train", "null"], "data.train must be given for `fit`"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(
    config: str, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert message in refused(capsys, "fit", "--config", config, *flags).replace("\\", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("traner: {max_steps: 3}", "unknown key 'traner.max_steps'; did you mean 'trainer.max_steps'?"),
        ("trainer: {max_stepz: 3}", "unknown key 'trainer.max_stepz'; did you mean 'trainer.max_steps'?"),
        ("trainer: {callbacks: [{class_path: ModelCheckpoint, init_args: {monitr: x}}]}", "did you mean 'monitor'?"),
        ('model: {init_args: {lr: "${data.init_args.modle}"}}', "Interpolation key 'data.init_args.modle' not found"),
        ("a: [", "parsing config"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "more.yaml").write_text(text)
    assert message in refused(capsys, "fit", "--config", config, "--config", str(tmp_path / "more.yaml"))


def test_nothing_at_all_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--data, --model must be given" in refused(capsys, "fit")


def test_help_lists_the_trainers_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "usage: speclight fit" in printed and "--trainer.accumulate_grad_batches" in printed


# --- runs -----------------------------------------------------------------------------------------------------------


def test_a_run_leaves_metrics_for_both_loggers_its_configuration_and_its_best_and_last_checkpoint(
    config: str, tmp_path: Path
) -> None:
    assert main(["fit", "--config", config]) == 0
    run = tmp_path / "runs" / "version_0"
    names = {path.name.split(".")[0] for path in run.iterdir()}
    assert names == {"checkpoints", "config", "events", "hparams", "metrics", "provenance"}
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["init_args"]["lr"] == 0.1
    header = (run / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"train/loss", "val/loss", "val/exit_1/acceptance"} <= {*header}


def test_without_tensorboard_there_is_still_a_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("tensorboard")

    monkeypatch.setattr(cli, "TensorBoardLogger", missing)
    (logger,) = cli.default_loggers(str(tmp_path))
    assert isinstance(logger, pl.loggers.CSVLogger)


def test_a_second_run_into_the_same_folder_works_and_is_a_run_of_its_own(config: str, tmp_path: Path) -> None:
    for _ in range(2):
        assert main(["fit", "--config", config]) == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["version_0", "version_1"]
    logger = ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", str(tmp_path / "fixed")]
    for _ in range(2):
        assert main(["fit", "--config", config, *logger, "--trainer.logger.name=", "--trainer.logger.version=one"]) == 0
    assert (tmp_path / "fixed" / "one" / "config.yaml").is_file()


def test_own_loggers_and_checkpoints_take_the_place_of_the_default_ones(config: str, tmp_path: Path) -> None:
    flags = ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={tmp_path}/mine"]
    flags += ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.filename=own"]
    made = TrainingCLI("fit", ["--config", config, *flags]).trainer
    assert [type(logger).__name__ for logger in made.loggers] == ["CSVLogger"]
    assert [one.filename for one in made.checkpoint_callbacks] == ["own"]


class Weight(pl.LightningModule):
    """One number. batches: those in which it was saved."""

    def __init__(self, automatic: bool = True) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.automatic_optimization = automatic
        self.batches: list[int] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.batch_idx = batch_idx
        loss = (self.weight * batch).sum()
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        self.batches.append(self.batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit_weight(model: Weight, root: Path, *callbacks: pl.Callback, accumulated: int = 1) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=accumulated,
        callbacks=list(callbacks),
        default_root_dir=root,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(torch.ones(8)))


@pytest.mark.parametrize(
    ("automatic", "accumulated", "expected"), [(True, 3, [2, 5, 7, 7]), (False, 1, [*range(8), 7])]
)
def test_the_clock_saves_only_between_optimiser_steps_and_the_end_is_saved(
    automatic: bool, accumulated: int, expected: list[int], tmp_path: Path
) -> None:
    """A checkpoint in the middle of an accumulation would lose the gradients before it; DIVERSED steps by itself."""
    model = Weight(automatic)
    fit_weight(model, tmp_path, LastCheckpoint(minutes=0.0), accumulated=accumulated)
    assert model.batches == expected


def test_the_last_checkpoint_is_of_the_last_step_though_the_clock_has_saved_before(tmp_path: Path) -> None:
    last = LastCheckpoint(minutes=0.0)

    class Once(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            last.seconds = 0.0 if batch_idx == 0 else math.inf

    model = Weight()
    fit_weight(model, tmp_path, Once(), last)
    assert model.batches == [0, 7]
    assert torch.load(last.last_model_path, weights_only=True)["global_step"] == 8


# --- resuming -------------------------------------------------------------------------------------------------------


def learning_rates(flags: list[str]) -> tuple[list[float], TrainingCLI]:
    """Of every step of a run."""
    made = TrainingCLI("fit", flags)
    rates: list[float] = []

    class Recorder(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    made.trainer.callbacks.append(Recorder())
    made.run()
    return rates, made


def test_hyper_parameters_given_now_beat_those_of_the_checkpoint_also_in_the_optimiser(
    config: str, tmp_path: Path
) -> None:
    """Lightning (2.6.6) takes the module's from the checkpoint, and restores the optimiser's rate; both in silence."""
    schedule = ["--model.schedule=linear", "--trainer.max_steps=8", "--trainer.max_epochs=2"]
    whole, _ = learning_rates(["--config", config, *schedule])
    stop = [*schedule, "--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=4"]
    stop += ["--trainer.callbacks.filename={step}", "--trainer.callbacks.save_top_k=-1"]
    learning_rates(["--config", config, *stop, f"--trainer.default_root_dir={tmp_path}/stopped"])
    (saved,) = (tmp_path / "stopped").rglob("step=4.ckpt")
    assert torch.load(saved, weights_only=True)["settings"]["model"]["init_args"]["lr"] == 0.1
    same, made = learning_rates(["--config", config, *schedule, "--ckpt_path", str(saved)])
    assert made.changed == {} and len(same) == 4 and same == whole[4:]
    other, made = learning_rates(
        ["--config", config, *schedule, "--model.lr=0.5", "--model.weight_decay=0.3", "--ckpt_path", str(saved)]
    )
    assert other == pytest.approx([5 * rate for rate in same])
    assert made.model.lr == 0.5 and made.trainer.optimizers[0].param_groups[0]["weight_decay"] == 0.3
    assert made.changed == {"model.lr": (0.5, 0.1), "model.weight_decay": (0.3, 0.0)}


def test_last_is_the_newest_run_and_validation_measures_its_weights(config: str, tmp_path: Path) -> None:
    assert main(["fit", "--config", config]) == 0
    measured = TrainingCLI("validate", ["--config", config, "--ckpt_path", "last"])
    measured.run()
    now = float(measured.trainer.callback_metrics["val/loss"])
    saved = torch.load(tmp_path / "runs" / "version_0" / "checkpoints" / "last.ckpt", weights_only=True)
    assert now == pytest.approx(saved["speclight"]["card"]["metrics"]["val/loss"])
    assert main(["test", "--config", config, "--data.test", str(tmp_path / "none.jsonl"), "--ckpt_path", "last"]) == 2


class Interrupts(pl.Callback):
    """Ctrl-C in the middle of a step."""

    def __init__(self, step: int, times: int = 1) -> None:
        self.step, self.times = step, times

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == self.step:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)


def fitted(flags: list[str], *callbacks: pl.Callback) -> TrainingCLI:
    made = TrainingCLI("fit", flags)
    made.trainer.callbacks.extend(callbacks)
    with contextlib.suppress(SystemExit):  # Lightning's answer to Ctrl-C
        made.run()
    return made


@pytest.fixture
def usual_ctrl_c() -> Iterator[Callable[[], None]]:
    """Python's own answer to Ctrl-C, now and whenever it is called: Lightning leaves the signal ignored."""

    def set_usual() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.getsignal(signal.SIGINT)
    set_usual()
    yield set_usual
    signal.signal(signal.SIGINT, before)


def test_the_first_ctrl_c_saves_and_the_run_goes_on_bit_for_bit(
    config: str, tmp_path: Path, usual_ctrl_c: Callable[[], None]
) -> None:
    flags = ["--config", config, "--model.schedule=linear"]
    whole = fitted([*flags, f"--trainer.default_root_dir={tmp_path}/whole"])
    stopped = fitted(flags, Interrupts(2))
    assert stopped.trainer.global_step == 3 < whole.trainer.global_step, "the step under way is finished"
    (saved,) = (tmp_path / "runs").rglob("last.ckpt")
    assert torch.load(saved, weights_only=True)["global_step"] == 3
    usual_ctrl_c()
    resumed = fitted([*flags, "--ckpt_path", "last"])
    assert resumed.trainer.global_step == whole.trainer.global_step
    assert same_weights(resumed.model, whole.model)


def test_ctrl_c_in_the_last_step_of_an_epoch_ends_the_epoch(
    config: str, tmp_path: Path, usual_ctrl_c: Callable[[], None]
) -> None:
    flags = ["--config", config, "--trainer.max_epochs=2"]
    whole = fitted([*flags, f"--trainer.default_root_dir={tmp_path}/whole"])
    steps = whole.trainer.global_step // 2
    stopped = fitted(flags, Interrupts(steps - 1))
    assert stopped.trainer.global_step == steps and list((tmp_path / "runs").rglob("best.ckpt"))
    (saved,) = (tmp_path / "runs").rglob("last.ckpt")
    assert "val/loss" in torch.load(saved, weights_only=True)["speclight"]["card"]["metrics"], "saved when validated"
    usual_ctrl_c()
    resumed = fitted([*flags, "--ckpt_path", "last"])
    assert resumed.trainer.global_step == 2 * steps
    assert same_weights(resumed.model, whole.model)


@pytest.mark.usefixtures("usual_ctrl_c")
def test_a_second_ctrl_c_stops_at_once(config: str, tmp_path: Path) -> None:
    assert fitted(["--config", config], Interrupts(2, times=2)).trainer.global_step == 2
    assert not list((tmp_path / "runs").rglob("last.ckpt"))


def test_differences_are_those_of_what_both_have() -> None:
    now = {"model": {"class_path": "A", "init_args": {"lr": 1, "loss": {"kl": 2}, "new": 1}}, "seed_everything": 0}
    before = {"model": {"class_path": "A", "init_args": {"lr": 3, "loss": {"kl": 4}}}, "seed_everything": 0}
    assert differences(now, before) == {"model.loss.kl": (2, 4), "model.lr": (1, 3)}


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--model.lr=-1", "lr must be a number of at least 0, got -1.0"),
        ("--data.batch_rows=0", "batch_rows must be at least 1, got 0"),
        ("--data.model=/not/there", "model '/not/there' does not exist"),
    ],
)
def test_what_a_class_refuses_is_said_without_what_surrounds_it(
    config: str, flag: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, "fit", "--config", config, flag).startswith(f"speclight: error: {message}")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a checkpoint"])
def test_a_checkpoint_that_cannot_be_read_is_refused_by_name(
    config: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.ckpt").write_bytes(content)
    for command in (
        ["fit", "--config", config, "--ckpt_path", str(tmp_path / "p.ckpt")],
        ["export", "--ckpt", str(tmp_path / "p.ckpt"), "--output", str(tmp_path / "heads")],
    ):
        assert "p.ckpt' cannot be read" in refused(capsys, *command)


def test_text_that_is_none_is_refused_with_its_place(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "\\ud800"}\n')
    assert "rows.jsonl:1: text must be text" in refused(
        capsys, "fit", "--config", config, f"--data.train={tmp_path / 'rows.jsonl'}"
    )
