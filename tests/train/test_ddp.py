"""Two gloo processes do what one does with twice the batch: losses, gradients, metrics, resuming, validation.

The processes run this file's `scenarios` and leave what they found as JSON; the tests run the same in one process.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from checkpoint import save_tiny
from fitting import TEXTS, base_model, prompts_file, same_weights, saver, text_data, trainer, write_rows
from lightning.pytorch.strategies import FSDPStrategy
from speclight.modules.batch import RaggedBatch
from speclight.train.callbacks import EngineValidation
from speclight.train.diversed import DiversedModule
from speclight.train.early_exit import EarlyExitModule
from speclight.train.layer_skip import LayerSkipModule, LoraOptions
from speclight.train.losses import LossSum
from speclight.train.reinforce import Budget
from speclight.train.reward_function import RewardFunction
from speclight.train.task_data import TaskDataModule
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

RANKS = 2
pytestmark = pytest.mark.xdist_group("two processes")  # the runs are shared


class Curve(pl.Callback):
    """The loss of every step, as it was logged."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer, *_: Any) -> None:
        if len(self.losses) < trainer.global_step:
            self.losses.append(float(trainer.callback_metrics["train/loss"]))


class ShardedOnCPU(FSDPStrategy):
    """Lightning refuses FSDPStrategy itself on CPUs, though torch shards over gloo when it is told the device."""

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return FullyShardedDataParallel(
            model, sharding_strategy=self.sharding_strategy, device_id=torch.device("cpu"), **self.kwargs
        )


def host(ranks: int, strategy: Any = "ddp", **settings: Any) -> pl.Trainer:
    return trainer(**({"devices": ranks, "strategy": strategy if ranks > 1 else "auto"} | settings))


def curve(ranks: int, module: pl.LightningModule, folder: Path, **settings: Any) -> dict[str, Any]:
    """Two epochs of batches that are the same whatever the number of ranks; the losses and the last metrics."""
    seen = Curve()
    texts = settings.pop("texts", TEXTS)
    data = text_data(folder, texts, batch_rows=2 * RANKS // ranks, prompts=prompts_file(folder))
    one = host(ranks, callbacks=[seen, *settings.pop("callbacks", [])], limit_val_batches=1.0, **settings)
    one.fit(module, datamodule=data)
    weights = [parameter.detach().double().abs().sum().item() for parameter in module.parameters()]
    return {
        "losses": seen.losses,
        "weights": weights,
        "metrics": {n: float(v) for n, v in one.callback_metrics.items()},
    }


def heads(ranks: int, folder: Path) -> dict[str, Any]:
    """A backbone with dropout 0.5, an uneven last batch, a draft vocabulary, and the engine in validation."""
    module = EarlyExitModule(base_model(folder), rank=4, lr=0.02, draft_vocab=40, exit_weights=[0.0, 1.0])
    return curve(ranks, module, folder, texts=TEXTS[:9], callbacks=[EngineValidation(max_new_tokens=6)])


def curriculum(ranks: int, folder: Path) -> dict[str, Any]:
    """Exits that rest in a step, in accumulated micro-batches."""
    module = LayerSkipModule(base_model(folder), lr=0.002, warmup_steps=0, every=2, p_max=0.0, final_weight=0.5)
    return curve(ranks, module, folder, accumulate_grad_batches=2)


def adapters(ranks: int, folder: Path) -> dict[str, Any]:
    """A frozen base with trained parts in it, which also runs without them."""
    module = LayerSkipModule(
        base_model(folder), lora=LoraOptions(r=2), lr=0.01, warmup_steps=0, p_max=0.0, original_weight=1.0
    )
    return curve(ranks, module, folder)


def sharded(ranks: int, folder: Path) -> dict[str, Any]:
    """Heads in shards beside a backbone that is not. Nothing is saved: torch crashes when it gathers shards on CPUs."""
    module = EarlyExitModule(base_model(folder), rank=4, lr=0.02, draft_vocab=40, weight_decay=0.1)
    return curve(ranks, module, folder, strategy=ShardedOnCPU(), accumulate_grad_batches=2) | {"weights": []}


def sharded_adapters(ranks: int, folder: Path) -> dict[str, Any]:
    """Layers in which a frozen base and trained adapters are mixed, each layer a unit of its own."""
    module = LayerSkipModule(
        base_model(folder), lora=LoraOptions(r=2), lr=0.01, warmup_steps=0, p_max=0.0, original_weight=1.0
    )
    found = curve(ranks, module, folder, strategy=ShardedOnCPU(auto_wrap_policy={LlamaDecoderLayer}))
    return found | {"weights": []}


def five_rows(ranks: int, folder: Path) -> dict[str, Any]:
    """One token to predict in each of five rows; the exit can only say what the final layer says in the first."""
    texts = ["A", "B", "C", "D", "E"]
    data = text_data(folder, texts, batch_rows=1)
    data.setup("fit")
    module = EarlyExitModule(base_model(folder), layers=[4], kind="norm", draft_vocab=1)
    one = host(ranks, limit_val_batches=1.0)
    one.validate(module, data, ckpt_path=str(folder / "first.ckpt"), verbose=False)
    return {name: float(value) for name, value in one.callback_metrics.items()}


def heavy_dropout(ranks: int, folder: Path) -> dict[str, Any]:
    """Layers that whole batches skip."""
    module = LayerSkipModule(base_model(folder), warmup_steps=0, p_max=0.95, exit_share=0.5)
    return curve(ranks, module, folder)


class Noisy(EarlyExitModule):
    """Draws from the global generator, differently on each rank."""

    def loss_sum(self, batch, batch_idx) -> LossSum:
        loss = super().loss_sum(batch, batch_idx)
        return LossSum(loss.total * (1.0 + torch.rand(())), loss.num_rows)


def resumed(ranks: int, folder: Path) -> dict[str, Any]:
    """Whether a run continued from each step ends with the same bits."""

    def fit(seed: int, ckpt_path: Path | None, **settings: Any) -> Noisy:
        pl.seed_everything(seed + int(os.environ.get("LOCAL_RANK", 0)))
        module = Noisy(base_model(folder), rank=4, lr=0.02, schedule="cosine", position_share=0.7)
        one = host(ranks, accumulate_grad_batches=2, **settings)
        one.fit(module, datamodule=text_data(folder, TEXTS, batch_rows=1), ckpt_path=ckpt_path)
        return module

    whole = fit(1, None, callbacks=[saver(folder / "steps")], enable_checkpointing=True)
    return {str(step): same_weights(fit(50, folder / "steps" / f"step={step}.ckpt"), whole) for step in (1, 2, 3, 5)}


class Letters(RewardFunction):
    """The share of letters in an answer."""

    name = "letters"

    def score(self, answers):
        return [sum(c.isalpha() for c in one.text) / max(1, len(one.text)) for one in answers]


def verifier(ranks: int, folder: Path) -> dict[str, Any]:
    """REINFORCE++ over five prompts, one of which comes alone: advantages are those of all ranks' tokens."""
    path = write_rows(folder / "rows.jsonl", [{"prompt": text, "reference": "x"} for text in TEXTS[:5]])
    data = TaskDataModule(
        base_model(folder), path, path, task="plain", reward=Letters(), batch_prompts=2 * RANKS // ranks, seed=3
    )
    module = DiversedModule(
        base_model(folder),
        samples=2,
        max_new_tokens=8,
        num_draft=3,
        lr=0.02,
        dtype="float32",
        kv_memory=0.05,
        inner_epochs=2,
        minibatches=1,
        acceptance_weight=0.2,
        budget=Budget("tv", 0.2),
    )
    one = host(ranks, limit_val_batches=1.0)
    one.fit(module, datamodule=data)
    names = ("reward", "acceptance", "tv", "w", "surrogate", "clip_fraction", "one_minus_w_tv", "lambda")
    metrics = {name: float(value) for name, value in one.callback_metrics.items()}
    kept = {name: metrics[name] for name in metrics if name.startswith("val/")}
    return {
        "weights": [parameter.detach().double().sum().item() for parameter in module.parameters()],
        "metrics": kept | {f"train/{name}": metrics[f"train/{name}"] for name in names},
    }


COMPARED = (heads, curriculum, adapters, sharded, sharded_adapters)
SCENARIOS: dict[str, Callable[[int, Path], dict[str, Any]]] = {
    scenario.__name__: scenario for scenario in (*COMPARED, five_rows, heavy_dropout, resumed, verifier)
}


def prepare(folder: Path) -> Path:
    """Models and files that all processes share."""
    for name in SCENARIOS:
        (folder / name).mkdir(parents=True)
        family, settings = ("opt", {"dropout": 0.5}) if name == "heads" else ("llama", {})
        save_tiny(folder / name / "model", family, **settings)
    module = EarlyExitModule(base_model(folder / "five_rows"), layers=[4], kind="norm", draft_vocab=1)
    one = trainer(limit_val_batches=1.0)
    data = text_data(folder / "five_rows", ["A"], batch_rows=1)
    data.setup("validate")
    one.strategy.connect(module)
    one._data_connector.attach_data(module, datamodule=data)
    module.setup("validate")
    (batch,) = data.val_dataloader()
    with torch.no_grad():
        logits = module.backbone(RaggedBatch.build(batch.items(), None))
    module.heads.draft_ids.copy_(logits[batch.mask].argmax(-1))
    record = module.record() | {"kind": module.kind}
    torch.save(
        {"state_dict": module.state_dict(), "speclight": record, "pytorch-lightning_version": pl.__version__},
        folder / "five_rows" / "first.ckpt",
    )
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what two processes found, what one finds)."""
    together, alone = (prepare(tmp_path_factory.mktemp(name) / "runs") for name in ("two", "one"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join(str(path) for path in (Path(__file__).parent, Path(__file__).parents[1]))
    shared = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": paths,
    }
    command = [sys.executable, __file__, str(together)]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [
        subprocess.Popen(command, env=os.environ | shared | {"LOCAL_RANK": str(rank)}, **options)
        for rank in range(RANKS)
    ]
    try:
        single = {
            scenario.__name__: scenario(1, alone / scenario.__name__) for scenario in (*COMPARED, five_rows, verifier)
        }
        for process in processes:
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, output[-5000:]
    finally:
        for process in processes:
            process.kill()
    return json.loads((together / "found.json").read_text()), single


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in COMPARED])
def test_two_processes_have_the_loss_curve_of_one_with_twice_the_batch(found, name: str) -> None:
    """Without find_unused_parameters. Weights are float32, so sums differ in their last digits."""
    two, one = (results[name] for results in found)
    assert len(two["losses"]) == len(one["losses"]) >= 4
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert two["weights"] == pytest.approx(one["weights"], rel=1e-3)
    for metric, value in one["metrics"].items():
        assert two["metrics"][metric] == pytest.approx(value, rel=1e-3, abs=1e-4), metric


def test_a_verifier_learns_the_same_whatever_the_number_of_ranks(found) -> None:
    two, one = (results["verifier"] for results in found)
    assert any(one["weights"]) and one["metrics"]["train/lambda"] != 0.2
    assert two["weights"] == pytest.approx(one["weights"], rel=1e-3, abs=1e-5)
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-3, abs=1e-5)


def test_filled_up_rows_do_not_count_in_validation(found) -> None:
    """Values 1, 0, 0, 0, 0 on two ranks: 0.2, where the mean of the ranks' means would be 0.333."""
    for results in found:
        assert results["five_rows"]["val/exit_4/agreement"] == pytest.approx(0.2)


def test_layers_that_whole_batches_skip_do_not_stop_training(found) -> None:
    assert len(found[0]["heavy_dropout"]["losses"]) == 6


def test_two_ranks_resume_to_the_bit_each_with_its_own_random_state(found) -> None:
    """In mid-epoch and between epochs, with another seed on every rank."""
    assert found[0]["resumed"] == dict.fromkeys("1235", True)


def test_what_ranks_answer_is_counted_together(found) -> None:
    two, one = (results["heads"]["metrics"] for results in found)
    assert two["val/engine/mat"] == pytest.approx(one["val/engine/mat"]) and one["val/engine/mat"] >= 1.0


if __name__ == "__main__":
    results = {name: scenario(RANKS, Path(sys.argv[1]) / name) for name, scenario in SCENARIOS.items()}
    if os.environ["LOCAL_RANK"] == "0":
        (Path(sys.argv[1]) / "found.json").write_text(json.dumps(results))
