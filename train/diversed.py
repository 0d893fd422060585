"""Trains the ensemble head of DIVERSED (arXiv 2604.07622) by REINFORCE++ on a task's reward.

A step: the engine draws several answers to each prompt of a batch from the mixture v, speculatively and in batches;
they are rewarded; then some passes over the recorded tokens train the head alone, and no language model runs. Target
and draft are not among the module's parameters, so nothing but the head is trained, saved or wrapped.

    maximise  E[ R ] + lambda E[ 1 - w TV(p, q) ]

by the clipped surrogate of REINFORCE++ on R, and the gradient of the second term, which is exact at each token, apart
from the advantages. Advantages are normalised, so lambda counts in units of the rewards' spread, and a batch in which
every answer earns the same only pushes w down. Too large a lambda drives w to 0 and the text to the draft's, which
`budget` can keep from happening.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from ..infer.build import DiversedOptions, EngineOptions, Prepared, build_engine, prepare
from ..infer.bundles import base_fingerprint, bundle_digest
from ..infer.engine import Engine
from ..infer.loading import resolve_dtype, text_config
from ..infer.stats import SequenceStats
from ..modules.ensemble_head import KIND, EnsembleHead
from ..modules.sampling import make_generator
from .base import over_ranks, plain_settings
from .callbacks import RngState
from .checkpoint import HEADS, RECORD, check_base, check_kind, check_settings, check_tensors
from .prompts import fitting_ids
from .reinforce import Budget, Reinforce, clipped, log_mixture
from .rollout import Rollouts, RolloutSampler
from .task_data import PromptBatch, RolloutBatch, StoredRollouts

SEEDS_PER_PROMPT = 1024
"""Texts that one prompt can have in one epoch without drawing the same random numbers as its neighbour."""

VALIDATION = 1 << 19
"""Stands for the epoch in seeds of validation: the same at every one."""

logger = logging.getLogger(__name__)

DEFAULT_ESTIMATOR = Reinforce()
Judge = Callable[[Sequence[str], Sequence[Mapping[str, Any]]], list[float]]


class DiversedModule(LightningModule):
    """An EnsembleHead for a target and a draft.

    model: the target: hub id, folder or .gguf file; dtype: what it is computed in.
    method: what drafts: "early-exit", the target's own layers with the exit heads of `bundle` (None: the model's own
        norm) at `draft_layer` (None: the bundle's lowest, or L/8); or "draft-model", which `draft_model` names.
    num_draft: tokens drafted at once. hidden, norm, initial_weight: see EnsembleHead.
    samples: answers for each prompt and step. max_new_tokens: of an answer. max_num_seqs: answers drawn at once.
    estimator: see Reinforce. acceptance_weight: lambda. budget: turns it, None leaves it.
    inner_epochs, minibatches: passes over a step's tokens, and into how many updates each is cut.
    lr, weight_decay, grad_clip: AdamW's, and the largest norm of a gradient.
    device: of the models; None: the trainer's.

    Logged per step: reward, acceptance (accepted / drafted), tv (to the target, per token), w and its quantiles,
    surrogate, clip_fraction, grad_norm, lambda, tokens/s of the rollouts and the seconds of both parts.

    Raises ValueError naming the argument; for what depends on the models before their weights are loaded.
    """

    kind = KIND

    def __init__(
        self,
        model: str,
        method: Literal["early-exit", "draft-model"] = "early-exit",
        bundle: str | None = None,
        draft_layer: int | None = None,
        draft_model: str | None = None,
        num_draft: int = 5,
        hidden: int = 0,
        norm: bool = True,
        initial_weight: float = 0.5,
        samples: int = 4,
        max_new_tokens: int = 128,
        max_num_seqs: int = 64,
        estimator: Reinforce = DEFAULT_ESTIMATOR,
        acceptance_weight: float = 0.05,
        budget: Budget | None = None,
        inner_epochs: int = 4,
        minibatches: int = 2,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        grad_clip: float = 1.0,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        kv_memory: float = 2.0,
        seed: int = 0,
        device: str | None = None,
        allow_pickle: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        settings = plain_settings(locals())
        super().__init__()
        self.automatic_optimization = False
        self.settings = settings
        _check_settings(settings, estimator)
        EnsembleHead(1, 1, 0, norm, initial_weight)
        resolve_dtype(dtype)
        self.method, self.draft_layer, self.num_draft = method, draft_layer, num_draft
        self.head_settings = {"hidden": hidden, "norm": norm, "initial_weight": initial_weight}
        self.samples, self.max_new_tokens = samples, max_new_tokens
        self.estimator, self.budget = estimator, budget
        self.acceptance_weight = self.strength = acceptance_weight  # the second is what a budget turns
        self.inner_epochs, self.minibatches, self.grad_clip = inner_epochs, minibatches, grad_clip
        self.lr, self.weight_decay, self.seed, self.device_name = lr, weight_decay, seed, device
        self.engine_options = partial(
            EngineOptions,
            model=model,
            dtype=dtype,
            draft_model=draft_model,
            bundle=bundle,
            max_num_seqs=max_num_seqs,
            kv_memory=kv_memory,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
            diversed=DiversedOptions(num_tokens=num_draft),
        )
        self.heads: EnsembleHead | None = None
        self.base_fingerprint = ""
        self.draft: dict[str, Any] = {}
        self._engine: tuple[Engine, ...] = ()  # a tuple, so that torch does not register what is in it
        self._sampler: tuple[RolloutSampler, ...] = ()
        self._measured: list[Rollouts] = []
        self._left_out: set[tuple[str, int]] = set()  # prompts that did not fit: what they were for, and their places
        self._texts = math.inf  # of this epoch's training, on all ranks; one that was resumed midway is not judged

    # -- parts ---------------------------------------------------------------------------------------------------

    @property
    def head(self) -> EnsembleHead:
        assert self.heads is not None, "setup() makes it"
        return self.heads

    @property
    def sampler(self) -> RolloutSampler:
        """Loads target and draft when it is first asked for: training on stored rollouts needs neither."""
        if not self._sampler:
            prepared = self._prepared()
            engine = build_engine(prepared)
            self._engine = (engine,)
            self._sampler = (RolloutSampler(engine, self.method, self.head, self.num_draft, self.draft.get("layer")),)
        return self._sampler[0]

    def setup(self, stage: str) -> None:
        """Build the head, once, from what the models' configurations say of their sizes."""
        if self.heads is not None:
            return
        prepared = self._prepared()
        self.draft, sizes = described_draft(self.method, prepared, self.draft_layer)
        found = base_fingerprint(prepared.source)
        if found is None:
            raise ValueError(
                f"model {prepared.source.name!r} must be a folder or hub id with safetensors; convert a GGUF file once"
            )
        self.base_fingerprint = found
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.heads = EnsembleHead(*sizes, **self.head_settings)  # type: ignore[arg-type]

    def _prepared(self) -> Prepared:
        device = self.device_name or str(self.trainer.strategy.root_device)
        return prepare(
            self.engine_options(device=device if device.startswith(("cuda", "auto")) else "cpu"), [self.method]
        )

    # -- rollouts ------------------------------------------------------------------------------------------------

    def roll_out(self, batch: PromptBatch, epoch: int, samples: int, judge: Judge | None = None) -> Rollouts:
        """Answers to a batch of prompts, recorded and rewarded. Seeds depend on the prompts' places and the epoch.

        Prompts that leave no room for max_new_tokens are left out, with a warning. judge: of texts and their rows;
        None: the data's.
        """
        batch = self._fitting(batch, "validation" if epoch == VALIDATION else "training")
        seeds = [((self.seed * (1 << 20) + epoch) * (1 << 24) + index) * SEEDS_PER_PROMPT for index in batch.indices]
        prompts = [one.prompt for one in batch.prompts]
        done, rollouts = self.sampler.sample(prompts, seeds, samples, self.max_new_tokens)
        rows = [one.row for one in batch.prompts for _ in range(samples)]
        judge = judge or self.trainer.datamodule.judge
        rewards = judge([one.text for one in done], rows)
        rollouts.rewards = torch.tensor(rewards, dtype=torch.float32, device=rollouts.p.device)
        places = torch.tensor(batch.indices, dtype=torch.long, device=rollouts.groups.device)
        rollouts.groups = places[rollouts.groups]
        return rollouts

    def _fitting(self, batch: PromptBatch, use: str) -> PromptBatch:
        """The prompts that leave room, as token ids. use: of the others each is named once for it."""
        kept = []
        for index, one in zip(batch.indices, batch.prompts, strict=True):
            try:
                token_ids = fitting_ids(self.sampler.engine, one.prompt, self.max_new_tokens)
                kept.append((index, replace(one, prompt=token_ids)))
            except ValueError as error:
                if (use, index) not in self._left_out:
                    logger.warning("%s prompt %d is left out: %s", use, index, error)
                    self._left_out.add((use, index))
        return PromptBatch.collate(kept)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """A step puts what it needs where it needs it."""
        return batch

    # -- steps ---------------------------------------------------------------------------------------------------

    def training_step(self, batch: PromptBatch | RolloutBatch, batch_idx: int) -> None:
        started = time.perf_counter()
        if isinstance(batch, PromptBatch):
            rollouts: Rollouts | None = self.roll_out(batch, self.current_epoch, self.samples)
        else:
            rollouts = batch.rollouts
        rolled = time.perf_counter()
        self.head.to(self.device)  # drawing answers has it where the engine is
        rollouts = _nothing(self.head) if rollouts is None else rollouts.to(self.device)
        found = self.improve(rollouts, batch_idx)
        self._log_step(rollouts, found, rolled - started, time.perf_counter() - rolled)

    def improve(self, rollouts: Rollouts, batch_idx: int = 0) -> dict[str, float]:
        """The inner epochs on a step's record; returns what they measured, over all ranks."""
        reduce = partial(over_ranks, self)
        log_prob, log_p = rollouts.log_prob, rollouts.p.clamp(min=torch.finfo(torch.float32).tiny).log()
        advantages = self.estimator.advantages(
            rollouts.rewards, rollouts.groups, rollouts.text, log_prob, log_p, reduce
        )
        optimizer: Any = self.optimizers()
        sums = dict.fromkeys(("surrogate", "clip_fraction", "accepting", "tokens", "grad_norm", "updates"), 0.0)
        for rows in self._minibatches(len(rollouts), batch_idx):
            (count,) = reduce([float(len(rows))])
            if not count:
                continue
            loss, parts = self._loss(rollouts, rows, log_prob, log_p, advantages)
            optimizer.zero_grad()
            self.manual_backward(loss * (self.trainer.world_size / count))  # ranks' gradients are averaged
            norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.grad_clip)
            if not bool(torch.isfinite(norm)):
                raise ValueError(f"the gradient of step {self.global_step} is {float(norm)}; lower lr")
            optimizer.step()
            sums = {name: sums[name] + parts.get(name, 0.0) for name in sums}
            sums["grad_norm"] += float(norm)
            sums["updates"] += 1
        return self._means(sums)

    def _means(self, sums: dict[str, float]) -> dict[str, float]:
        surrogate, clips, accepting, tokens = over_ranks(
            self, [sums[name] for name in ("surrogate", "clip_fraction", "accepting", "tokens")]
        )
        tokens = max(tokens, 1.0)
        return {
            "surrogate": surrogate / tokens,
            "clip_fraction": clips / tokens,
            "one_minus_w_tv": accepting / tokens,
            "grad_norm": sums["grad_norm"] / max(sums["updates"], 1.0),
        }

    def _minibatches(self, count: int, batch_idx: int) -> Iterator[Tensor]:
        """Every token once per inner epoch, in an order of its own; equally many updates on every rank."""
        stream = batch_idx * self.trainer.world_size + self.global_rank
        generator = make_generator(self.seed, index=self.current_epoch, stream=stream)
        for _ in range(self.inner_epochs):
            yield from torch.randperm(count, generator=generator).tensor_split(self.minibatches)

    def _loss(
        self, rollouts: Rollouts, rows: Tensor, log_prob: Tensor, log_p: Tensor, advantages: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """The summed loss of some tokens, and sums of what is logged."""
        rows = rows.to(rollouts.p.device)
        weight = self.head(rollouts.draft[rows], rollouts.target[rows])
        now = log_mixture(weight, rollouts.p[rows], rollouts.q[rows])
        surrogate, clips = clipped(now, log_prob[rows], advantages[rows], self.estimator.clip)
        accepting = 1.0 - weight * rollouts.tv[rows]
        penalty = self.estimator.penalty(now, log_p[rows])
        loss = (surrogate + penalty - self.strength * accepting).sum()
        sums = {"surrogate": surrogate.sum(), "clip_fraction": clips.sum(), "accepting": accepting.sum()}
        return loss, {name: float(value.detach()) for name, value in sums.items()} | {"tokens": float(len(rows))}

    def _log_step(self, rollouts: Rollouts, found: dict[str, float], rolling: float, learning: float) -> None:
        counts, weight = rollouts.counts, rollouts.weight
        distance = float(((1.0 - weight) * rollouts.tv).sum())
        sums = over_ranks(
            self,
            [
                float(rollouts.rewards.sum()),
                float(len(rollouts.rewards)),
                float(counts.accepted),
                float(counts.drafted),
                distance,
                float(weight.sum()),
                float(len(rollouts)),
                float(counts.emitted_tokens),
            ],
        )
        self._texts += sums[1]
        if not sums[1]:  # no prompt of this step fitted, on any rank: nothing was measured
            return
        reward, accepted = sums[0] / sums[1], sums[2] / max(sums[3], 1.0)
        tv = sums[4] / max(sums[6], 1.0)
        logged = found | {"reward": reward, "acceptance": accepted, "tv": tv, "w": sums[5] / max(sums[6], 1.0)}
        logged |= {"lambda": self.strength, "rollout_seconds": rolling, "inner_seconds": learning}
        logged |= {"tokens_per_second": sums[7] / rolling if rolling > 1e-3 else 0.0}
        if len(rollouts):
            points = torch.tensor([0.1, 0.5, 0.9], device=weight.device)
            names = ("w_10", "w_50", "w_90")
            logged |= dict(zip(names, torch.quantile(weight, points).tolist(), strict=True))
        for name, value in logged.items():
            shown = name in ("reward", "acceptance", "w")
            self.log(f"train/{name}", value, prog_bar=shown, sync_dist=False, batch_size=1)
        self._log_histogram(weight)
        if self.budget is not None:
            self.strength = self.budget.turned(self.strength, reward, tv)

    def on_train_epoch_start(self) -> None:
        self._texts = 0.0

    def on_train_epoch_end(self) -> None:
        """Raises ValueError after an epoch in which no prompt could be answered."""
        if not self._texts:
            raise ValueError("no training prompt leaves room for max_new_tokens: lower it, or give shorter prompts")

    def _log_histogram(self, weight: Tensor) -> None:
        for one in self.trainer.loggers:
            writer: Any = getattr(one, "experiment", None)
            if len(weight) and hasattr(writer, "add_histogram"):
                writer.add_histogram("train/w", weight.cpu().numpy(), self.global_step)

    # -- validation ----------------------------------------------------------------------------------------------

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Answers with the rule as it is: what `rollouts` measure of it on prompts that are not trained on."""
        if not len(batch):
            return
        self._measured.append(self.roll_out(batch, VALIDATION, 1).without_states())

    def test_step(self, batch: PromptBatch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self._log_measured("val")

    def on_test_epoch_end(self) -> None:
        self._log_measured("test")

    def _log_measured(self, stage: str) -> None:
        measured, self._measured = self._measured, []
        total = SequenceStats.total(one.counts for one in measured)
        parts = [float(sum(one.rewards.sum() for one in measured)), float(sum(len(one.rewards) for one in measured))]
        parts += [total.accepted, total.drafted, total.emitted_tokens, total.target_passes, total.distance]
        parts += [float(sum((one.weight * one.tv).sum() for one in measured)), float(sum(len(one) for one in measured))]
        reward, texts, accepted, drafted, emitted, passes, distance, w_tv, tokens = over_ranks(self, parts)
        if not texts:
            return
        found = {
            "reward": reward / texts,
            "acceptance": accepted / max(drafted, 1.0),
            "mat": emitted / max(passes, 1.0),
            "tv": distance / max(emitted, 1.0),
        }
        found["loss"] = -found["reward"] - self.acceptance_weight * (1.0 - w_tv / max(tokens, 1.0))
        for name, value in found.items():
            shown = name in ("reward", "acceptance")
            self.log(f"{stage}/{name}", value, prog_bar=shown, sync_dist=True, batch_size=1)

    # -- optimiser and checkpoints -------------------------------------------------------------------------------

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.head.parameters(), self.lr, weight_decay=self.weight_decay)

    def configure_callbacks(self) -> list[Any]:
        return [RngState()]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        card = {"step": self.global_step, "metrics": {name: v for name, v in metrics.items() if math.isfinite(v)}}
        checkpoint[RECORD] = {
            "kind": KIND,
            "config": self.head.config(),
            "draft": self.draft,
            "base_model": self._base_name(),
            "base_fingerprint": self.base_fingerprint,
            "strength": self.strength,
            "card": card,
        }

    def _base_name(self) -> str:
        return self.engine_options().model

    def on_fit_start(self) -> None:
        """Refuse stored rollouts of other models than these."""
        data = getattr(self.trainer.datamodule, "datasets", {}).get("train")
        if not isinstance(data, StoredRollouts):
            return
        _, facts = data.read(0)
        check_base({**facts, "base_model": "stored rollouts"}, self.base_fingerprint, self._base_name())
        if json.loads(facts["draft"]) != self.draft:
            raise ValueError(f"the stored rollouts are of the draft {facts['draft']}; this run's is {self.draft}")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse what does not belong here; the tensors themselves Lightning loads."""
        record = check_kind(checkpoint, KIND)
        check_base(record, self.base_fingerprint, self._base_name())
        check_settings(record["config"], self.head.config())
        check_settings(record["draft"], self.draft)
        check_tensors(checkpoint["state_dict"], {HEADS + name: t for name, t in self.head.state_dict().items()})
        self.strength = record["strength"]


def _check_settings(settings: Mapping[str, Any], estimator: Reinforce) -> None:
    """Raise ValueError naming the first that is not valid. settings: DiversedModule's, by name."""
    for name in ("num_draft", "samples", "max_new_tokens", "max_num_seqs", "inner_epochs", "minibatches"):
        if settings[name] < 1:
            raise ValueError(f"{name} must be at least 1, got {settings[name]}")
    if not 0 <= settings["seed"] < 1024:
        raise ValueError(f"seed must be from 0 to 1023, got {settings['seed']}")
    if settings["samples"] > SEEDS_PER_PROMPT:
        raise ValueError(f"samples must be at most {SEEDS_PER_PROMPT}, got {settings['samples']}")
    if estimator.is_centred and settings["samples"] < 2:
        raise ValueError("samples must be at least 2 for reinforce++-baseline, which compares a prompt's answers")
    for name in ("lr", "weight_decay", "acceptance_weight"):
        if not 0.0 <= settings[name] < math.inf:
            raise ValueError(f"{name} must be a number of at least 0, got {settings[name]!r}")
    if not settings["grad_clip"] > 0.0:
        raise ValueError(f"grad_clip must be above 0, got {settings['grad_clip']}")


def described_draft(method: str, prepared: Prepared, layer: int | None) -> tuple[dict[str, Any], tuple[int, int]]:
    """What a head is trained to trust, as its bundle says it; and the sizes of (h_q, h_p).

    Raises ValueError for an exit that is not there.
    """
    target = _final_size(text_config(prepared.source))
    if method == "draft-model":
        assert prepared.draft_source is not None
        name = Path(prepared.draft_source.name).name
        found = base_fingerprint(prepared.draft_source)
        return {"method": method, "model": name, "fingerprint": found}, (
            _final_size(text_config(prepared.draft_source)),
            target,
        )
    from ..infer.bundles import default_exits

    assert prepared.exits is not None
    chosen = default_exits(prepared.exits)[0] if layer is None else layer
    prepared.exits.check("draft_layer", chosen)
    folder = prepared.options.bundle
    bundle: dict[str, str | None] = {"bundle": None, "digest": None}
    if folder is not None:
        bundle = {"bundle": Path(folder).expanduser().resolve().name, "digest": bundle_digest(folder)}
    return {"method": method, "layer": chosen} | bundle, (target, target)


def _final_size(config: Any) -> int:
    """Width of a model's states behind its final norm."""
    return getattr(config, "word_embed_proj_dim", None) or config.hidden_size


def _nothing(head: EnsembleHead) -> Rollouts:
    """What a rank without a prompt brings to a step."""
    device = head.output.weight.device
    none, no_index = torch.zeros(0, device=device), torch.zeros(0, dtype=torch.long, device=device)
    draft, target = torch.zeros(0, head.draft_size, device=device), torch.zeros(0, head.target_size, device=device)
    columns = dict.fromkeys(("p", "q", "tv", "weight", "rewards"), none)
    indices = dict.fromkeys(("text", "groups", "lengths"), no_index)
    return Rollouts(draft=draft, target=target, **columns, **indices, counts=SequenceStats())
