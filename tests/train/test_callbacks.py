"""Resuming to the bit, validation by the engine that will serve, and what a run writes about itself."""

from __future__ import annotations

import json
import random
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from fitting import base_model, prompts_file, same_weights, saver, text_data, trainer
from lightning.pytorch.loggers import CSVLogger
from speclight.infer.early_exit import EarlyExitDrafter
from speclight.infer.engine import Engine
from speclight.infer.exits import HeadExits
from speclight.infer.hierarchical import HierarchicalDrafter
from speclight.infer.loading import load_model
from speclight.infer.request import GenerationParams
from speclight.infer.stats import SequenceStats
from speclight.modules.exit_heads import ExitHeads
from speclight.train.callbacks import (
    EngineValidation,
    Provenance,
    RngState,
    eval_mode,
    rng_state,
    set_rng_state,
    untouched_rng,
    write_json,
)
from speclight.train.checkpoint import read_heads
from speclight.train.early_exit import EarlyExitModule
from speclight.train.layer_skip import LayerSkipModule
from speclight.train.losses import LossSum

# --- random state --------------------------------------------------------------------------------------------------


def draws() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.randn()),
        float(torch.rand(())),
        float(torch.randn(())),
    ]


def test_random_state_is_of_python_numpy_and_torch_and_survives_a_checkpoint(tmp_path: Path) -> None:
    """Also in the middle of pairs of normal draws, of which the second is kept."""
    draws()
    torch.save(rng_state(), tmp_path / "state")
    expected = draws()
    draws()
    set_rng_state(torch.load(tmp_path / "state", weights_only=True))
    assert draws() == expected


def test_what_is_drawn_inside_does_not_count_outside() -> None:
    pl.seed_everything(3)
    expected = draws()
    pl.seed_everything(3)
    with untouched_rng():
        draws()
    assert draws() == expected


class Noisy(EarlyExitModule):
    """Draws from every global generator in each step, as dropout and augmentation would."""

    def loss_sum(self, batch, batch_idx) -> LossSum:
        loss = super().loss_sum(batch, batch_idx)
        return LossSum(loss.total * (1.0 + sum(value * value for value in draws())), loss.num_rows)


def noisy(folder: Path) -> Noisy:
    return Noisy(base_model(folder), rank=4, lr=0.02, schedule="cosine", warmup_steps=2, position_share=0.7)


@pytest.mark.parametrize(("accumulate", "validate"), [(1, False), (3, False), (2, True)])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, accumulate: int, validate: bool) -> None:
    """From every step, in mid-epoch and between epochs, with another global seed; the schedule asks for the number of
    steps, positions are sampled, and every global generator is drawn from.
    """
    settings = {
        "max_epochs": 3,
        "accumulate_grad_batches": accumulate,
        "limit_val_batches": 1.0 if validate else 0,
        "num_sanity_val_steps": 2,
    }
    pl.seed_everything(1)
    whole = noisy(tmp_path)
    host = trainer(callbacks=[saver(tmp_path)], enable_checkpointing=True, **settings)
    host.fit(whole, datamodule=text_data(tmp_path))
    for step in range(1, host.global_step):
        pl.seed_everything(100 + step)
        resumed = noisy(tmp_path)
        again = trainer(**settings)
        again.fit(resumed, datamodule=text_data(tmp_path), ckpt_path=tmp_path / f"step={step}.ckpt")
        assert again.global_step == host.global_step
        assert same_weights(resumed, whole), f"resumed after step {step}"
    pl.seed_everything(2)
    other = noisy(tmp_path)
    other.configure_callbacks = list
    trainer(**settings).fit(other, datamodule=text_data(tmp_path), ckpt_path=tmp_path / "step=1.ckpt")
    assert not same_weights(other, whole), "this test would not notice lost random state"


def test_another_number_of_ranks_is_said(tmp_path: Path) -> None:
    callback = RngState()
    callback.on_load_checkpoint(None, None, {"rng": [rng_state(), rng_state()]})
    with pytest.warns(UserWarning, match="random state of 2 ranks and this run has 1"):
        callback.on_train_start(trainer(), None)


# --- validation by the engine --------------------------------------------------------------------------------------


def exits_of(folder: Path, **settings) -> EarlyExitModule:
    return EarlyExitModule(base_model(folder), **({"rank": 8, "lr": 0.02, "draft_vocab": 40} | settings))


@pytest.mark.parametrize("kind", ["adapter", "block"])
@pytest.mark.parametrize("method", ["hispec", "early-exit"])
def test_what_training_reports_is_what_serving_gives(tmp_path: Path, method: str, kind: str) -> None:
    """The heads read from the checkpoint, on the fast model that serves, accept exactly what validation said."""
    exits = exits_of(tmp_path, kind=kind)
    data = text_data(tmp_path, prompts=prompts_file(tmp_path))
    validation = EngineValidation(method, max_new_tokens=12, batch=3)
    host = trainer(
        max_epochs=6, limit_val_batches=1.0, enable_checkpointing=True, callbacks=[validation, saver(tmp_path)]
    )
    host.fit(exits, datamodule=data)

    model, tokenizer = load_model(base_model(tmp_path))
    heads = HeadExits(ExitHeads.from_bundle(read_heads(tmp_path / "step=30.ckpt"), model))
    drafter = EarlyExitDrafter(1, 2, exits=heads)
    drafter = drafter if method == "early-exit" else HierarchicalDrafter(drafter, 2, 4, exits=heads, wait=1.0)
    engine = Engine(model, tokenizer, [drafter], method)
    served = SequenceStats.total(c.stats for c in engine.generate(data.prompts, GenerationParams(max_new_tokens=12)))
    logged = {name: float(value) for name, value in host.callback_metrics.items() if "engine" in name}
    assert logged["val/engine/mat"] == pytest.approx(served.mat) and served.mat > 1.0
    assert logged["val/engine/acceptance_rate"] == pytest.approx(served.acceptance_rate)
    for depth, rate in served.conditional_acceptance.items():
        assert logged[f"val/engine/acceptance_at_{depth}"] == pytest.approx(rate)


def test_training_does_not_notice_the_engine(tmp_path: Path) -> None:
    """Sampling in validation moves no random state, mode, gradient or weight of the run."""
    found, model = [], base_model(tmp_path)
    for callbacks in ([], [EngineValidation(max_new_tokens=8, temperature=1.0)]):
        pl.seed_everything(5)
        exits = Noisy(model, rank=4, lr=0.02)
        data = text_data(tmp_path, prompts=prompts_file(tmp_path))
        trainer(limit_val_batches=1.0, val_check_interval=2, callbacks=callbacks).fit(exits, datamodule=data)
        found.append((exits, draws()))
    assert same_weights(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    assert all(parameter.requires_grad for parameter in found[1][0].parameters())


@pytest.mark.parametrize("lora", [False, True])
def test_a_layer_skip_model_is_validated_through_its_own_exits(tmp_path: Path, lora: bool) -> None:
    from speclight.train.layer_skip import LoraOptions

    options = {"lora": LoraOptions(r=2, dropout=0.3)} if lora else {}
    skip = LayerSkipModule(base_model(tmp_path), warmup_steps=0, **options)
    modes = []
    data = text_data(tmp_path, prompts=prompts_file(tmp_path))
    host = trainer(limit_val_batches=1.0, max_epochs=1, callbacks=[EngineValidation(max_new_tokens=6)])
    skip.on_train_epoch_end = lambda: modes.append({part.training for part in skip.hf.modules()})
    host.fit(skip, datamodule=data)
    assert host.callback_metrics["val/engine/mat"] >= 1.0
    assert modes == [{True}]


def test_modes_are_put_back_part_by_part() -> None:
    net = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout().eval())
    with eval_mode(net):
        assert not net.training and not net[0].training
    assert net.training and net[0].training and not net[1].training


def test_no_prompts_are_said_and_stop_nothing(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no validation by the engine: the datamodule has no prompts"):
        trainer(limit_val_batches=1.0, max_epochs=1, callbacks=[EngineValidation()]).fit(
            exits_of(tmp_path), datamodule=text_data(tmp_path)
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "ar"}, "method must be hispec or early-exit, got 'ar'"),
        ({"num_draft": 0}, "num_draft must be at least 1"),
        ({"window": 0}, "window must be at least 1"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"max_new_tokens": -1}, "max_new_tokens must be an integer"),
    ],
)
def test_a_wrong_setting_of_the_validation_is_named(settings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineValidation(**settings)


def test_hispec_needs_two_exits(tmp_path: Path) -> None:
    data = text_data(tmp_path, prompts=prompts_file(tmp_path))
    with pytest.raises(ValueError, match=r"must be 2 exits for hispec, got \[2\]"):
        trainer(limit_val_batches=1.0, callbacks=[EngineValidation()]).fit(
            exits_of(tmp_path, layers=[2]), datamodule=data
        )


# --- provenance ----------------------------------------------------------------------------------------------------


def test_a_run_says_what_it_was(tmp_path: Path) -> None:
    """Twice into one folder; the second replaces the first, and no temporary file stays."""
    for epochs in (1, 2):
        exits, data = exits_of(tmp_path), text_data(tmp_path)
        logger = CSVLogger(tmp_path, "", "")
        trainer(max_epochs=epochs, logger=logger, callbacks=[Provenance()], log_every_n_steps=1).fit(
            exits, datamodule=data
        )
        facts = json.loads((tmp_path / "provenance.json").read_text())
        assert facts["trainer"]["max_epochs"] == epochs
    assert facts["versions"]["torch"] == torch.__version__ and facts["versions"]["lightning"] == pl.__version__
    assert facts["base_fingerprint"] == exits.base_fingerprint
    assert facts["data"]["train"]["hash"] == data.datasets["train"].fingerprint()
    assert facts["module"]["rank"] == 8 and facts["module"]["loss"]["forward_kl"] == 1.0
    assert facts["metrics"]["train/loss"] > 0 and facts["seconds"] > 0 and facts["hardware"]["cpus"] >= 1
    assert [path.name for path in tmp_path.glob("*provenance*")] == ["provenance.json"]


def test_a_file_is_whole_or_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    write_json(path, {"a": Path("x")})
    loop: dict = {}
    loop["self"] = loop
    with pytest.raises(ValueError, match="Circular"):
        write_json(path, loop)
    assert json.loads(path.read_text()) == {"a": "x"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["facts.json"]
