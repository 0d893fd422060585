"""Trains exit heads on a frozen model (HiSpec, arXiv 2510.01336): the target stays what it is.

The backbone is not among the module's parameters or submodules. So no optimiser, wrapper, checkpoint or switch to
train mode can reach it, and its hidden states are those of serving whatever Lightning does. The price: under FSDP each
rank holds it whole; for a model that does not fit, store its states first (`batch.states`).

What the heads are compared with comes from the same pass of the backbone, run in segments from exit to exit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ..infer.exits import HeadExits
from ..infer.loading import load_transformers, resolve_dtype, resolve_model
from ..modules.batch import RaggedBatch
from ..modules.bundle import HeadBundle, fingerprint
from ..modules.exit_heads import KIND, ExitHeads, Exits
from ..modules.layered_model import LayeredModel
from .base import Schedule, TokenMeanModule, TokenMeans, plain_settings
from .checkpoint import HEADS, check_base, check_kind, check_settings, check_tensors, read_heads
from .data import TextBatch, draft_vocabulary
from .lens import LeastSquares
from .losses import ExitLoss, LossSum, agrees, forward_kl, kept_rows, log_probs, sum_over_chunks, total_variation

DEFAULT_LOSS = ExitLoss()
MEASURED = ("loss", "kl", "agreement", "acceptance")
"""Measured at each exit in validation: its loss, KL(p || q), how often its most likely token is the final layer's, and
the probability 1 - TV(p, q) that a draft of its is accepted. What its draft vocabulary lacks counts as rejected."""


class EarlyExitModule(TokenMeanModule):
    """One head per exit layer, trained to say what the final layer would.

    model: hub id, folder or .gguf file of the backbone; dtype: what it is computed in ("auto": the checkpoint's own).
        Heads are float32 throughout.
    layers, kind, rank, block_layer, translated: see ExitHeads.
    calibrate: supervised tokens of the training data from which a new run first takes the heads' affine maps to the
        last layer's states (train/lens.py); 0: they start as the identity.
    start: checkpoint of another run, or bundle, whose heads a new run begins with, draft vocabulary included.
    draft_vocab: how many tokens the exits can predict, the most frequent of the training data; None: all. Which ones
        is saved with the heads, and a resumed run keeps them.
    loss: see ExitLoss. exit_weights: one weight for each exit; None: all 1.
    position_share: train on this share of the supervised positions, drawn anew for each batch.
    chunk_rows: positions whose logits exist at once.
    lr, weight_decay, warmup_steps, schedule, seed: see TokenMeanModule.

    Raises ValueError naming the argument; for what depends on the model before its weights are loaded.
    """

    kind = KIND

    def __init__(
        self,
        model: str,
        layers: list[int] | None = None,
        kind: str | list[str] = "adapter",
        rank: int = 1024,
        draft_vocab: int | None = None,
        loss: ExitLoss = DEFAULT_LOSS,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        schedule: Schedule = "constant",
        exit_weights: list[float] | None = None,
        position_share: float = 1.0,
        block_layer: int | None = None,
        translated: bool = True,
        calibrate: int = 32768,
        start: str | None = None,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        chunk_rows: int = 512,
        seed: int = 0,
        allow_pickle: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        settings = plain_settings(locals())
        super().__init__(lr, weight_decay, warmup_steps, schedule, seed)
        self.settings = settings
        if not 0.0 < position_share <= 1.0:
            raise ValueError(f"position_share must be above 0 and at most 1 (all positions), got {position_share!r}")
        if chunk_rows < 1:
            raise ValueError(f"chunk_rows must be at least 1, got {chunk_rows}")
        if calibrate < 0:
            raise ValueError(f"calibrate must be a number of tokens, 0 for none, got {calibrate}")
        resolve_dtype(dtype)
        self.source = resolve_model(model, allow_pickle, trust_remote_code)
        self.exit_settings: dict[str, Any] = {
            "layers": layers,
            "kind": kind,
            "rank": rank,
            "block_layer": block_layer,
            "translated": translated,
        }
        self.calibrate = calibrate
        self.draft_vocab, self.loss, self.position_share = draft_vocab, loss, position_share
        self.dtype_name, self.chunk_rows = dtype, chunk_rows
        self.exit_weights = exit_weights
        self.heads: ExitHeads | None = None
        self.base_fingerprint = ""
        self._frozen: tuple[LayeredModel, ...] = ()  # a tuple, so that torch does not register it
        self._exits: Exits | None = None
        self._ids_known = draft_vocab is None
        self._has_begun = False
        self._start = None if start is None else _heads_of(start)

    # -- parts ---------------------------------------------------------------------------------------------------

    @property
    def backbone(self) -> LayeredModel:
        """The frozen model, in eval mode."""
        return self._frozen[0]

    @property
    def exits(self) -> Exits:
        """The heads bound to the backbone, once their draft vocabulary is known."""
        if self._exits is None:
            if not self._ids_known:
                raise ValueError("draft_vocab needs the training data, to count tokens in, or a checkpoint")
            assert self.heads is not None
            with torch.inference_mode(False):  # validation may come first, and what is made there cannot be trained on
                self._exits = self.heads.bind(self.backbone)
        return self._exits

    def setup(self, stage: str) -> None:
        """Load the backbone and build the heads, once. Raises ValueError for exits that the model does not have."""
        device = self.trainer.strategy.root_device
        if self.heads is None:
            self._check_exits()
            self._load_backbone(device)
            self.heads = self._new_heads(self.backbone)
            self.measured = TokenMeans([f"exit_{n}/{what}" for n in self.heads.layers for what in MEASURED] + ["loss"])
            self.remember_matrices()
        self.backbone.to(device)
        self._exits = None
        begins = stage == "fit" and not self._has_begun  # a checkpoint that is resumed comes later, and overwrites it
        if begins and self._start is not None:
            self._begin_with(self._start)
        self._choose_draft_vocabulary()
        if begins and self._start is None:
            self._calibrate()
        self._has_begun = self._has_begun or begins

    def teardown(self, stage: str) -> None:
        self.backbone.to("cpu")
        self._exits = None

    def _check_exits(self) -> None:
        """Build the heads once without storage: what ExitHeads refuses is refused before weights are read."""
        gguf = {} if self.source.gguf_file is None else {"gguf_file": self.source.gguf_file}
        config = AutoConfig.from_pretrained(
            self.source.location, trust_remote_code=self.source.trust_remote_code, **gguf
        )
        with torch.device("meta"):
            heads = self._new_heads(LayeredModel(AutoModelForCausalLM.from_config(config), fast=False))
        weights = self.exit_weights
        if weights is not None and (len(weights) != len(heads.layers) or min(weights) < 0 or not any(weights)):
            raise ValueError(
                f"exit_weights must be {len(heads.layers)} numbers of at least 0, not all 0, got {weights}"
            )

    def _new_heads(self, model: LayeredModel) -> ExitHeads:
        size = self.draft_vocab
        if size is not None and not 1 <= size <= model.vocab_size:
            raise ValueError(f"draft_vocab must be from 1 to {model.vocab_size}, the model's vocabulary, got {size}")
        ids = None if size is None else torch.arange(size, device="cpu")  # placeholders
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return ExitHeads(model, draft_ids=ids, **self.exit_settings)

    def _load_backbone(self, device: torch.device) -> None:
        hf_model = load_transformers(self.source, self.dtype_name, str(device) if device.type == "cuda" else "cpu")
        self.base_fingerprint = fingerprint(hf_model)
        self._frozen = (LayeredModel(hf_model, fast=False).requires_grad_(False).eval(),)

    def _choose_draft_vocabulary(self) -> None:
        """From the training data, where it is there, and the same on every rank."""
        data = getattr(self.trainer.datamodule, "datasets", {}).get("train")
        if self._ids_known or data is None:
            return
        assert self.heads is not None and self.heads.draft_ids is not None and self.draft_vocab is not None
        ids = draft_vocabulary(data, self.draft_vocab, self.backbone.vocab_size, self.backbone.eos_token_ids)
        self.heads.draft_ids.copy_(self.trainer.strategy.broadcast(ids))
        self._ids_known = True

    def _begin_with(self, heads: HeadBundle) -> None:
        """Take over another run's heads. Raises ValueError where they are others than these, or of another model."""
        assert self.heads is not None
        heads.check_base(self.base_fingerprint, self.source.name)
        check_settings(heads.config, self.heads.config())
        heads.load_into(self.heads)
        self._ids_known = True

    @torch.no_grad()
    def _calibrate(self) -> None:
        """Begin with the affine maps that bring each exit's states closest to the last layer's."""
        heads, data = self.heads, getattr(self.trainer.datamodule, "datasets", {}).get("train")
        assert heads is not None
        maps = {layer: linear for layer in heads.layers if (linear := heads.translation(layer)) is not None}
        if not maps or not self.calibrate or data is None:
            return
        sums = {layer: LeastSquares(heads.hidden_size, self.backbone.device) for layer in maps}
        wanted = min(len(data), ceil(self.calibrate * len(data) / max(data.summary.supervised, 1)))
        for number in range(wanted):  # spread over the data, the same on every rank
            batch = TextBatch.collate([data[number * len(data) // wanted]]).to(self.backbone.device)
            states = self._states(batch, self._ragged(batch))
            rows = kept_rows(batch.mask)
            for layer, found in sums.items():
                found.add(states[layer][rows], states[self.backbone.num_layers][rows])
        for layer, linear in maps.items():
            weight, bias = sums[layer].solve()
            linear.weight.copy_(weight)
            linear.bias.copy_(bias)
        rank_zero_info(f"heads begin with affine maps from {next(iter(sums.values())).num_rows} tokens")

    # -- steps ---------------------------------------------------------------------------------------------------

    def loss_sum(self, batch: TextBatch, batch_idx: int) -> LossSum:
        rows = kept_rows(batch.mask, self.position_share, self.generator(batch_idx))
        total, _ = sum_over_chunks(self._row_losses, self._inputs(batch, rows), self.chunk_rows)
        return LossSum.of(total, len(rows))

    def measure(self, batch: TextBatch) -> tuple[Tensor, int]:
        rows = kept_rows(batch.mask)
        total, measured = sum_over_chunks(self._row_measures, self._inputs(batch, rows, final=True), self.chunk_rows)
        return torch.cat((measured, total.unsqueeze(0))), len(rows)

    def predict_step(self, batch: TextBatch, batch_idx: int) -> dict[int, dict[str, Tensor]]:
        """{exit: {what is measured: [rows] at each supervised position, in order}}."""
        inputs = self._inputs(batch, kept_rows(batch.mask), final=True)
        chunks = zip(*(tensor.split(self.chunk_rows) for tensor in inputs), strict=True)
        columns = iter(torch.cat([self._row_measures(*chunk) for chunk in chunks])[:, 1:].T)
        return {layer: {name: next(columns) for name in MEASURED} for layer in self.exits.heads.layers}

    def _inputs(self, batch: TextBatch, rows: Tensor, final: bool = False) -> list[Tensor]:
        """Of the chosen rows: next ids, final states, and each exit's states (after the head, where it reads context).

        Final states that are not wanted are the last exit's, and not read.
        """
        exits, layers = self.exits, self.exits.heads.layers
        ragged = self._ragged(batch)
        states = self._states(batch, ragged, final or self.loss.needs_final)
        chosen = []
        for layer in layers:
            hidden = states[layer]
            if exits.heads.reads_context(layer):
                hidden = exits.states(layer, hidden, ragged())
            chosen.append(hidden[rows])
        return [batch.next_ids[rows], states[max(states)][rows], *chosen]

    def _ragged(self, batch: TextBatch) -> Callable[[], RaggedBatch]:
        """Laid flat when it is first asked for, and once."""
        return cache(lambda: RaggedBatch.build(batch.items(), None, self.backbone.device))

    @torch.no_grad()
    def _states(self, batch: TextBatch, ragged: Callable[[], RaggedBatch], final: bool = True) -> dict[int, Tensor]:
        """{layer: [tokens, hidden] residual stream after it}, of the exits and, if wanted, of the last layer.

        From the batch where they are stored with it, else by one pass of the backbone.
        """
        assert self.heads is not None
        model, layers = self.backbone, self.heads.layers
        wanted = sorted({*layers, model.num_layers} if final else layers)
        stored = getattr(batch, "states", None)
        if stored is not None:
            missing = [layer for layer in wanted if layer not in stored]
            if missing:
                raise ValueError(f"the stored states lack those after layer {missing[0]}; they have {sorted(stored)}")
            return {layer: stored[layer].to(model.device, model.dtype) for layer in wanted}
        states, hidden, start = {}, model.embed(ragged()), 0
        for layer in wanted:
            states[layer] = hidden = model.run(hidden, ragged(), None, start, layer)
            start = layer
        return states

    def _row_losses(self, next_ids: Tensor, final: Tensor, *exits: Tensor) -> Tensor:
        """[rows, 1] loss over all exits."""
        final_logits = self._final_logits(final) if self.loss.needs_final else None
        return self._weighted([self._exit_loss(x, final_logits, next_ids) for x in self._exit_logits(exits)])

    def _row_measures(self, next_ids: Tensor, final: Tensor, *exits: Tensor) -> Tensor:
        """[rows, 1 + exits * measured]: the loss over all exits, then what is measured of each."""
        final_logits = self._final_logits(final)
        ids = self.exits.heads.draft_ids
        log_p = log_probs(final_logits) if ids is None else log_probs(final_logits)[:, ids]
        losses, columns = [], []
        for logits in self._exit_logits(exits):
            losses.append(self._exit_loss(logits, final_logits, next_ids))
            log_q = log_probs(logits)
            accepted = 1.0 - total_variation(log_p, log_q)
            columns += [losses[-1], forward_kl(log_p, log_q), agrees(logits, final_logits, ids), accepted]
        return torch.cat((self._weighted(losses), torch.stack(columns, dim=1)), dim=1)

    def _final_logits(self, final: Tensor) -> Tensor:
        with torch.no_grad():
            return self.backbone.logits(final)

    def _exit_logits(self, exits: tuple[Tensor, ...]) -> list[Tensor]:
        bound = self.exits
        return [
            bound.finish(states) if bound.heads.reads_context(layer) else bound.logits(layer, states)
            for layer, states in zip(bound.heads.layers, exits, strict=True)
        ]

    def _exit_loss(self, logits: Tensor, final_logits: Tensor | None, next_ids: Tensor) -> Tensor:
        return self.loss.rows(logits, final_logits, next_ids, self.exits.heads.draft_ids)

    def _weighted(self, losses: list[Tensor]) -> Tensor:
        weights = self.exit_weights or [1.0] * len(losses)
        return sum(weight * loss for weight, loss in zip(weights, losses, strict=True)).unsqueeze(1)  # type: ignore[union-attr]

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        assert self.heads is not None
        return {
            "config": self.heads.config(),
            "base_model": self.source.name,
            "base_fingerprint": self.base_fingerprint,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse what does not belong here; the tensors themselves Lightning loads."""
        assert self.heads is not None
        record = check_kind(checkpoint, KIND)
        check_base(record, self.base_fingerprint, self.source.name)
        check_settings(record["config"], self.heads.config())
        if "state_dict" in checkpoint:  # FSDP has taken it already, and checks it itself
            check_tensors(checkpoint["state_dict"], {HEADS + name: t for name, t in self.heads.state_dict().items()})
        self._exits, self._ids_known, self._has_begun = None, True, True

    # -- validation by the engine --------------------------------------------------------------------------------

    @property
    def drafting_layers(self) -> tuple[int, ...]:
        assert self.heads is not None
        return self.heads.layers

    def drafting_model(self) -> LayeredModel:
        return self.backbone

    def drafting_exits(self) -> HeadExits:
        return HeadExits(self.exits.heads)


def _heads_of(path: str) -> HeadBundle:
    """From a bundle's folder or a checkpoint. Raises ValueError for neither."""
    return HeadBundle.load(path) if Path(path).expanduser().is_dir() else read_heads(path)
