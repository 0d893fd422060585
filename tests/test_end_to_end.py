"""From texts to faster text by the command line alone: two processes train, are killed, go on; export; decode."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from checkpoint import save_tiny
from fitting import TEXTS, prompts_file, write_rows
from speclight.infer.cli import main
from speclight.train.cli import TrainingCLI

pytestmark = pytest.mark.xdist_group("end to end")  # the runs are shared

NUM_STEPS, KILLED_AFTER, RESUMED_FROM = 6, 6, 3


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tied embeddings, data, and a configuration for two processes that saves every step."""
    folder = tmp_path_factory.mktemp("home")
    save_tiny(folder / "model", tie_word_embeddings=True)
    rows = write_rows(folder / "rows.jsonl", [{"text": text} for text in TEXTS])
    module = {"model": "${data.init_args.model}", "layers": [1, 2], "rank": 8, "draft_vocab": 40, "lr": 0.01}
    data = {"model": str(folder / "model"), "train": rows, "val": rows, "prompts": prompts_file(folder)}
    saves = {"filename": "{step}", "every_n_train_steps": 1, "save_top_k": -1}
    engine = {"method": "early-exit", "max_new_tokens": 12}
    config = {
        "model": {"class_path": "speclight.train.early_exit.EarlyExitModule", "init_args": module},
        "data": {
            "class_path": "speclight.train.data.TextDataModule",
            "init_args": data | {"row_tokens": 16, "batch_rows": 1},
        },
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 100,
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "callbacks": [
                {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": saves},
                {"class_path": "speclight.train.callbacks.EngineValidation", "init_args": engine},
            ],
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def two_processes(home: Path, root: str, *flags: str) -> subprocess.Popen[str]:
    """`fit` on two ranks, in a process group of its own."""
    given = ["--config", str(home / "config.yaml"), f"--trainer.default_root_dir={home / root}"]
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "speclight.train",
            "fit",
            *given,
            "--trainer.devices=2",
            "--trainer.strategy=ddp",
            *flags,
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def checkpoint_of(home: Path, root: str, step: int) -> Path:
    return home / root / "version_0" / "checkpoints" / f"step={step}.ckpt"


@pytest.fixture(scope="module")
def killed(home: Path) -> Path:
    """The checkpoint after three steps of a run that was killed when it had saved the sixth."""
    run = two_processes(home, "killed")
    wanted, deadline = checkpoint_of(home, "killed", KILLED_AFTER + 1), time.monotonic() + 120
    while not wanted.exists():  # the seventh is begun when the sixth is whole
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()[0]
        time.sleep(0.1)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    return checkpoint_of(home, "killed", RESUMED_FROM)


@pytest.fixture(scope="module")
def resumed(home: Path, killed: Path) -> Path:
    """The last checkpoint of the run that went on from there."""
    run = two_processes(home, "resumed", f"--trainer.max_steps={NUM_STEPS}", "--ckpt_path", str(killed))
    printed, _ = run.communicate(timeout=120)
    assert run.returncode == 0, printed
    return checkpoint_of(home, "resumed", NUM_STEPS)


@pytest.fixture(scope="module")
def bundle(home: Path, resumed: Path) -> Path:
    prompts = ["--prompts", str(home / "prompts.jsonl"), "--max-new-tokens", "12"]
    given = ["--ckpt", str(resumed), "--output", str(home / "bundle"), "--dtype", "float32", *prompts]
    assert main(["export", *given]) == 0
    return home / "bundle"


def generated(home: Path, method: str, *flags: str) -> list[dict]:
    output = home / f"{method}.jsonl"
    files = ["--input", str(home / "prompts.jsonl"), "--output", str(output), "--no-chat", "--overwrite"]
    model = ["--model", str(home / "model"), "--method", method, "--max-new-tokens", "12", "--dtype", "float32"]
    assert main(["generate", *files, *model, *flags]) == 0
    return sorted((json.loads(line) for line in output.open()), key=lambda row: row["id"])


def test_two_processes_that_were_killed_and_went_on_end_with_the_weights_they_would_have_had(
    home: Path, resumed: Path
) -> None:
    """Bit for bit: data order, optimiser, random state."""
    straight = torch.load(checkpoint_of(home, "killed", NUM_STEPS), weights_only=True)
    again = torch.load(resumed, weights_only=True)
    assert straight["global_step"] == again["global_step"] == NUM_STEPS
    assert straight["state_dict"].keys() == again["state_dict"].keys()
    for name, tensor in straight["state_dict"].items():
        assert torch.equal(tensor, again["state_dict"][name]), name


def test_a_checkpoint_holds_heads_and_no_model(home: Path, resumed: Path) -> None:
    """And is read by the safe default, as plain types."""
    state = torch.load(resumed, weights_only=True)["state_dict"]
    assert all(name.startswith("heads.") for name in state)
    assert sum(tensor.numel() for name, tensor in state.items() if "draft_ids" not in name) == 2 * (
        3 * 32 * 8 + 32 + 32 * 32 + 32
    )


def test_the_exported_heads_speculate_and_the_text_is_that_of_plain_decoding(home: Path, bundle: Path) -> None:
    plain = generated(home, "ar")
    for method in ("early-exit", "hispec"):
        fast = generated(home, method, "--bundle", str(bundle))
        assert [row["token_ids"] for row in fast] == [row["token_ids"] for row in plain]
        assert sum(row["stats"]["drafted"] for row in fast) > 0


def test_serving_accepts_what_validation_has_reported(home: Path, resumed: Path, bundle: Path) -> None:
    """A pruned vocabulary or a tied unembedding that is lost in export would show as fewer accepted drafts."""
    given = ["--config", str(home / "config.yaml"), f"--trainer.default_root_dir={home / 'validated'}"]
    measured = TrainingCLI("validate", [*given, "--ckpt_path", str(resumed), "--trainer.devices=1"])
    measured.run()
    reported = float(measured.trainer.callback_metrics["val/engine/acceptance_rate"])
    stats = [row["stats"] for row in generated(home, "early-exit", "--bundle", str(bundle))]
    served = sum(one["accepted"] for one in stats) / sum(one["drafted"] for one in stats)
    assert served == pytest.approx(reported, abs=0.02)  # float32 both, but other kernels: a near tie may fall otherwise
    passes = sum(one["emitted_tokens"] for one in stats) / sum(one["target_passes"] for one in stats)
    assert passes == pytest.approx(float(measured.trainer.callback_metrics["val/engine/mat"]), abs=0.05)


def test_a_module_of_another_model_refuses_the_checkpoint_with_both_fingerprints(
    home: Path, resumed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(home / "other", seed=7, tie_word_embeddings=True)
    given = ["--config", str(home / "config.yaml"), f"--trainer.default_root_dir={home / 'refused'}"]
    flags = ["--data.model", str(home / "other"), "--ckpt_path", str(resumed)]
    capsys.readouterr()
    assert main(["validate", *given, *flags]) == 2
    (message,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("speclight: error: ")]
    assert "belongs to another base model: it was trained on" in message and "this model is" in message
