"""What our LightningModules share: a loss that is a mean over tokens, its optimiser, its record in checkpoints.

A step's loss is the sum over all its supervised tokens divided once by their number, however the step was cut into
micro-batches and ranks. Lightning averages instead, over micro-batches and over ranks, so that a micro-batch of one
token would weigh as much as one of nine. Here `training_step` returns a sum, the gradients of sums add up through
Lightning's automatic optimisation, and just before they are clipped and used they are scaled by

    accumulate_grad_batches * world_size / tokens of the step

which undoes both of Lightning's divisions. That holds wherever gradients add up: one device, DDP, FSDP, any precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from ..modules.sampling import make_generator
from .callbacks import RngState
from .checkpoint import RECORD
from .data import TextBatch
from .losses import LossSum

Schedule = Literal["constant", "cosine", "linear"]


class TokenMeans:
    """Means over tokens of what was measured batch by batch: sums and counts of all ranks, divided once."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._clear()

    def _clear(self) -> None:
        self.sums, self.count = [0.0] * len(self.names), 0  # no tensors: validation may run in inference mode or not

    def add(self, totals: Tensor, num_rows: int) -> None:
        """totals: [names] sums over `num_rows` rows."""
        self.sums = [total + new for total, new in zip(self.sums, totals.tolist(), strict=True)]
        self.count += num_rows

    def take(self, module: LightningModule) -> dict[str, float]:
        """The means over all ranks, which all must ask for; empty where no rank had a row. Counting starts again."""
        *sums, count = over_ranks(module, [*self.sums, float(self.count)])
        self._clear()
        return {name: total / count for name, total in zip(self.names, sums, strict=True)} if count else {}


def over_ranks(module: LightningModule, values: list[float]) -> list[float]:
    """The sum of each value over all ranks."""
    strategy = module.trainer.strategy
    if module.trainer.world_size == 1:
        return values
    return strategy.reduce(
        torch.tensor(values, dtype=torch.float64, device=strategy.root_device), reduce_op="sum"
    ).tolist()


class TokenMeanModule(LightningModule):
    """Base of the recipes. A recipe gives `kind`, `loss_sum`, `record`, `measure` and the names that it measures.

    lr, weight_decay: AdamW's; only matrices decay. schedule: of the learning rate, after `warmup_steps` of linear
        warm-up: "constant", or down to 0 at the run's last step by "cosine" or "linear".
    seed: of initial weights and of what a step draws itself. Draws are a function of seed, epoch, batch and rank, so
        that a resumed run draws what it would have.
    """

    kind = ""

    def __init__(self, lr: float, weight_decay: float, warmup_steps: int, schedule: Schedule, seed: int) -> None:
        super().__init__()
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("warmup_steps", warmup_steps)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
        if schedule not in ("constant", "cosine", "linear"):
            raise ValueError(f"schedule must be constant, cosine or linear, got {schedule!r}")
        self.lr, self.weight_decay, self.warmup_steps, self.schedule = lr, weight_decay, warmup_steps, schedule
        self.seed = seed
        self.settings: dict[str, Any] = {}
        self._step = torch.zeros(2)  # summed loss and number of tokens of the running step
        self.measured = TokenMeans([])
        self._matrices: set[str] = set()

    # -- for recipes ---------------------------------------------------------------------------------------------

    def loss_sum(self, batch: TextBatch, batch_idx: int) -> LossSum:
        """The summed loss of a batch's tokens, and how many they are."""
        raise NotImplementedError

    def measure(self, batch: TextBatch) -> tuple[Tensor, int]:
        """([names of `measured`] sums over the supervised tokens, how many they are), without gradients."""
        raise NotImplementedError

    def record(self) -> dict[str, Any]:
        """What `checkpoint["speclight"]` says of this recipe, in plain types."""
        raise NotImplementedError

    def generator(self, batch_idx: int) -> torch.Generator:
        """For a batch's own draws."""
        stream = batch_idx * self.trainer.world_size + self.global_rank
        return make_generator(self.seed, index=self.current_epoch, stream=stream)

    # -- steps ---------------------------------------------------------------------------------------------------

    def training_step(self, batch: TextBatch, batch_idx: int) -> Tensor:
        loss = self.loss_sum(batch, batch_idx)
        self._step = self._step.to(loss.total.device)
        self._step += torch.stack((loss.total.detach().float(), loss.num_rows.float()))
        return loss.total

    def on_train_start(self) -> None:
        self._step = torch.zeros_like(self._step)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the step's summed gradients, once, by its number of tokens on all ranks."""
        total, count = over_ranks(self, self._step.tolist())
        self._step = torch.zeros_like(self._step)
        if not math.isfinite(total):
            raise ValueError(f"the loss of step {self.global_step} is {total}: training broke the weights; lower lr")
        factor = self.trainer.accumulate_grad_batches * self.trainer.world_size / max(count, 1.0)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        self.log("train/loss", total / max(count, 1.0), prog_bar=True)
        self.log("train/tokens", count)

    def validation_step(self, batch: TextBatch, batch_idx: int) -> None:
        self.measured.add(*self.measure(batch))

    def test_step(self, batch: TextBatch, batch_idx: int) -> None:
        self.measured.add(*self.measure(batch))

    def on_validation_epoch_end(self) -> None:
        self._log_measured("val")

    def on_test_epoch_end(self) -> None:
        self._log_measured("test")

    def _log_measured(self, stage: str) -> None:
        for name, value in self.measured.take(self).items():
            # sync_dist only keeps Lightning from warning: every rank has the same value here
            self.log(f"{stage}/{name}", value, prog_bar=name == "loss", sync_dist=True)

    # -- optimiser -----------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> dict[str, Any]:
        if self.trainer.strategy.handles_gradient_accumulation:
            raise ValueError(
                f"strategy {type(self.trainer.strategy).__name__} divides gradients itself; use ddp or fsdp"
            )
        trained = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        if not trained:
            raise ValueError("there is nothing to train: exits of kind 'norm' have no parameters of their own")
        matrices = [parameter for name, parameter in trained.items() if _plain_name(name) in self._matrices]
        others = [parameter for name, parameter in trained.items() if _plain_name(name) not in self._matrices]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], self.lr, weight_decay=self.weight_decay
        )
        factor = partial(lr_factor, schedule=self.schedule, warmup_steps=self.warmup_steps, num_steps=self.num_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def remember_matrices(self) -> None:
        """Note which parameters are matrices, before FSDP makes them flat. Recipes call it when their weights exist."""
        self._matrices = {name for name, parameter in self.named_parameters() if parameter.ndim > 1}

    def num_steps(self) -> int:
        """Optimiser steps of the whole run. Not before training has begun: Lightning (2.6) would then build its loader
        early and forget the place of a run that is resumed.
        """
        steps = self.trainer.estimated_stepping_batches
        if not 0 < steps < math.inf:
            raise ValueError("max_steps or max_epochs of the trainer must be set: a schedule needs the run's length")
        return int(steps)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[Any]:
        return [RngState()]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        card = {"step": self.global_step, "metrics": {name: v for name, v in metrics.items() if math.isfinite(v)}}
        checkpoint[RECORD] = self.record() | {"kind": self.kind, "card": card}


def _plain_name(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def lr_factor(step: int, schedule: str, warmup_steps: int, num_steps: Callable[[], int]) -> float:
    """What the learning rate is multiplied with at a step, counted from 0. num_steps is only asked where it matters."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "constant" or step == 0:
        return 1.0
    done = min(1.0, (step - warmup_steps) / max(1, num_steps() - warmup_steps))
    return 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def plain_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Constructor arguments, from `locals()`, as plain types for records."""
    own = {name: value for name, value in arguments.items() if name not in ("self", "__class__")}
    return {name: asdict(v) if is_dataclass(v) and not isinstance(v, type) else v for name, v in own.items()}
