"""Makes a model exit early by itself, from scratch or continued (LayerSkip, Elhoushi et al. 2024, section 4).

Unlike EarlyExitModule this changes the model: its own norm and unembedding become good at early layers too. The target
is then the trained model's own last layer, not the original's; decoding is as exact as ever, but relative to that. How
far the last layer has moved is measured in validation as `original/...` where adapters (LoRA) are trained.

Parameters are float32 throughout (the base under adapters may be bfloat16). With the trainer's `precision:
bf16-mixed` products and attention run in bfloat16, while the residual stream, norms, softmax, losses, the sums of
gradients and the optimiser stay float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..infer.exits import EarlyExits
from ..infer.loading import ModelSource, load_tokenizer, load_transformers, resolve_dtype, resolve_model
from ..modules.batch import RaggedBatch
from ..modules.bundle import fingerprint
from ..modules.exit_heads import default_layers
from ..modules.layered_model import LayeredModel, check_supported
from .base import Schedule, TokenMeanModule, TokenMeans, plain_settings
from .callbacks import eval_mode, holds_whole_model
from .checkpoint import RECORD, check_base, check_kind, check_settings, check_tensors, read_checkpoint
from .data import TextBatch
from .losses import (
    LossSum,
    agrees,
    cross_entropy,
    exit_scales,
    forward_kl,
    gradual,
    kept_rows,
    layer_dropout_rates,
    log_probs,
    rotational,
    sum_over_chunks,
    time_scale,
    total_variation,
)

KIND = "layer-skip"
MODEL = "hf."
"""What the names of the model's tensors begin with in a checkpoint."""

MEASURED = ("loss", "kl", "agreement", "acceptance")
"""Measured at each exit in validation: cross-entropy, and against the last layer KL(p || q), how often the most likely
tokens agree, and the probability 1 - TV(p, q) that a draft is accepted."""


@dataclass(frozen=True)
class LoraOptions:
    """Adapters of rank r, scaled by alpha / r, on the linear layers named `targets`, trained instead of the model."""

    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ValueError(f"lora.r must be at least 1, got {self.r}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"lora.dropout must be in [0, 1), got {self.dropout}")
        if not self.targets or {"lm_head", "embed_tokens"} & set(self.targets):
            raise ValueError(f"lora.targets must be linear layers within the decoder's layers, got {self.targets}")


class LayerSkipModule(TokenMeanModule):
    """Layer dropout, and a loss at early exits that share the model's norm and unembedding.

    model: hub id, folder or .gguf file to continue; or else
    architecture: sizes of a model to train from scratch, `{"model_type": "llama", "hidden_size": 256, ...}`, and
    tokenizer: folder or hub id whose vocabulary it gets.
    lora: train adapters only; None: all weights.
    layers: the exits that are trained and measured, counted in layers below; None: all are trained, those at L/8 and
        L/4 measured. Fewer exits cost less: each needs the unembedding.
    layer_weights: of these exits' losses, beside 1 for the last layer's; None: the paper's e(l), which grow with depth
        and leave early exits next to nothing.
    p_max: layer dropout per document at the last layer, growing with depth, and from scratch with time too.
    e_scale: how much earlier exits weigh against the last layer. curriculum: which exits a step trains: "rotational"
        every `every`-th (R), shifted by one each step; "gradual" from the last layer down; "none" all. The last layer
        is always trained.
    exit_share: compute the early exits' losses at this share of the positions, scaled up to stand for all.
    data_weight: of the cross-entropy on the text. final_weight: of the exits' KL to the last layer, which feels
        nothing of it. original_weight: of the last layer's KL to the model without adapters.
    dtype: of the base under adapters. chunk_rows: positions whose logits exist at once.
    lr, weight_decay, warmup_steps, schedule, seed: see TokenMeanModule.

    Raises ValueError naming the argument.
    """

    kind = KIND

    def __init__(
        self,
        model: str | None = None,
        architecture: dict[str, Any] | None = None,
        tokenizer: str | None = None,
        lora: LoraOptions | None = None,
        layers: list[int] | None = None,
        layer_weights: list[float] | None = None,
        p_max: float = 0.1,
        e_scale: float = 0.2,
        curriculum: Literal["rotational", "gradual", "none"] = "rotational",
        every: int = 8,
        data_weight: float = 1.0,
        final_weight: float = 0.0,
        original_weight: float = 0.0,
        lr: float = 3e-4,
        weight_decay: float = 0.1,
        warmup_steps: int = 100,
        schedule: Schedule = "cosine",
        exit_share: float = 1.0,
        dtype: Literal["auto", "float32", "bfloat16"] = "float32",
        chunk_rows: int = 512,
        seed: int = 0,
        allow_pickle: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        settings = plain_settings(locals())
        super().__init__(lr, weight_decay, warmup_steps, schedule, seed)
        self.settings = settings
        _check_origin(model, architecture, tokenizer, lora, dtype)
        _check_layer_weights(layers, layer_weights)
        _check_weights(lora, data_weight=data_weight, final_weight=final_weight, original_weight=original_weight)
        if curriculum not in ("rotational", "gradual", "none"):
            raise ValueError(f"curriculum must be rotational, gradual or none, got {curriculum!r}")
        if not 0.0 < exit_share <= 1.0:
            raise ValueError(f"exit_share must be above 0 and at most 1 (all positions), got {exit_share!r}")
        layer_dropout_rates(2, p_max)
        exit_scales([True, True], e_scale)
        rotational(0, 2, every)
        self.source = None if model is None else resolve_model(model, allow_pickle, trust_remote_code)
        self.tokenizer_source = self.source or _tokenizer_source(str(tokenizer))
        self.architecture, self.lora, self.layers, self.layer_weights = architecture, lora, layers, layer_weights
        self.p_max, self.e_scale, self.curriculum, self.every = p_max, e_scale, curriculum, every
        self.data_weight, self.final_weight, self.original_weight = data_weight, final_weight, original_weight
        self.exit_share, self.dtype_name, self.chunk_rows = exit_share, dtype, chunk_rows
        self.base_fingerprint = ""
        self.hf: nn.Module | None = None
        self._view: tuple[LayeredModel, ...] = ()  # the same modules in layers, registered once only

    # -- parts ---------------------------------------------------------------------------------------------------

    @property
    def stack(self) -> LayeredModel:
        """The model in training, as a stack of layers."""
        return self._view[0]

    def setup(self, stage: str) -> None:
        """Build or load the model, once. Raises ValueError for sizes, exits or data that do not fit each other."""
        if self.hf is None:
            self._build(self.trainer.strategy.root_device)
        own, data = self.stack.vocab_size, getattr(self.trainer.datamodule, "tokenizer", None)
        if data is not None and len(data) > own:
            raise ValueError(f"data.model has a tokenizer of {len(data)} tokens, this model a vocabulary of {own}")

    def _build(self, device: torch.device) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            if self.source is None:
                assert self.architecture is not None
                self.architecture = with_vocabulary(self.architecture, load_tokenizer(self.tokenizer_source))
                base = new_model(self.architecture)
            else:
                base = load_transformers(self.source, self.dtype_name, str(device) if device.type == "cuda" else "cpu")
                self.base_fingerprint = fingerprint(base)
            self.hf = (base if self.lora is None else with_lora(base, self.lora)).train()
        view = LayeredModel(base, fast=False)
        self._check_layers(view.num_layers)
        self._view = (view,)
        extra = ["original/kl", "original/agreement"] if self.lora else []
        names = [f"exit_{layer}/{what}" for layer in self.drafting_layers for what in MEASURED]
        self.measured = TokenMeans(["loss", *names, *extra])
        self.remember_matrices()
        trained = sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
        rank_zero_info(f"{view.num_layers} layers, {trained / 1e6:.2f} M parameters are trained")

    def _check_layers(self, num_layers: int) -> None:
        layers = self.layers
        if layers is not None and (
            not layers or sorted({*layers}) != layers or layers[0] < 1 or layers[-1] >= num_layers
        ):
            raise ValueError(f"layers must be ascending numbers from 1 to {num_layers - 1}, the exits, got {layers}")

    # -- the step ------------------------------------------------------------------------------------------------

    def loss_sum(self, batch: TextBatch, batch_idx: int) -> LossSum:
        """The last layer's loss at every supervised position, and the early exits' at a share of them."""
        scales, generator = self.scales(), self.generator(batch_idx)
        early = [layer for layer in range(1, len(scales)) if scales[layer - 1]]
        ragged = RaggedBatch.build(batch.items(), None, self.stack.device)
        states = self._states(ragged, early, self._dropped(ragged, generator))
        rows = kept_rows(batch.mask)
        last, next_ids = states[len(scales)], batch.next_ids
        original = [self._original(ragged)[rows]] if self.original_weight else []
        total, _ = sum_over_chunks(self._last_losses, [next_ids[rows], last[rows], *original], self.chunk_rows)
        total = total * scales[-1]
        if early:
            some = rows[kept_rows(torch.ones_like(rows, dtype=torch.bool), self.exit_share, generator)]
            inputs = [next_ids[some], last.detach()[some], *(states[layer][some] for layer in early)]
            weights = torch.tensor([scales[layer - 1] for layer in early], device=last.device)
            exits, _ = sum_over_chunks(lambda *parts: self._early_losses(weights, *parts), inputs, self.chunk_rows)
            total = total + exits / self.exit_share
        return LossSum.of(total, len(rows))

    def scales(self) -> list[float]:
        """Each layer's weight at this step, 0 where its exit rests; they sum to one."""
        count, step = self.stack.num_layers, self.global_step
        if self.curriculum == "rotational":
            active = rotational(step, count, self.every)
        elif self.curriculum == "gradual":
            active = gradual(step, count, self.num_steps())
        else:
            active = [True] * count
        if self.layers is not None:
            active = [on and (index + 1 in self.layers or index == count - 1) for index, on in enumerate(active)]
        if self.layer_weights is None:
            return exit_scales(active, self.e_scale)
        own = dict(zip(self.layers or (), self.layer_weights, strict=True)) | {count: 1.0}
        weights = [own[index + 1] if on else 0.0 for index, on in enumerate(active)]
        return [weight / sum(weights) for weight in weights]

    def dropout_rates(self) -> list[float]:
        """The probability, at this step, that a document skips each layer."""
        scale = 1.0 if self.source is not None or not self.p_max else time_scale(self.global_step, self.num_steps())
        return layer_dropout_rates(self.stack.num_layers, self.p_max, scale)

    def _dropped(self, ragged: RaggedBatch, generator: torch.Generator) -> Tensor:
        """[layers, tokens] whether the token's document skips the layer."""
        lengths = torch.tensor(ragged.cu_seqlens).diff()
        rates = torch.tensor(self.dropout_rates())
        dropped = torch.rand(len(rates), len(lengths), generator=generator) < rates.unsqueeze(1)
        return dropped.repeat_interleave(lengths, dim=1)

    def _states(self, ragged: RaggedBatch, layers: Sequence[int], dropped: Tensor | None = None) -> dict[int, Tensor]:
        """{layer: [tokens, hidden] residual stream after it}, of some layers and the last."""
        model, states = self.stack, {}
        hidden = model.embed(ragged)
        for layer in range(1, model.num_layers + 1):
            after = model.run(hidden, ragged, None, layer - 1, layer)
            if dropped is not None and bool(dropped[layer - 1].any()):  # run anyway: DDP waits for every weight
                after = torch.where(dropped[layer - 1].to(after.device).unsqueeze(1), hidden, after)
            hidden = after
            if layer in layers or layer == model.num_layers:
                states[layer] = hidden
        return states

    @torch.no_grad()
    def _original(self, ragged: RaggedBatch) -> Tensor:
        """[tokens, hidden] last states of the model as it was, without adapters and dropout."""
        with without_adapters(self.hf):
            return self._states(ragged, ())[self.stack.num_layers]

    def _last_losses(self, next_ids: Tensor, last: Tensor, original: Tensor | None = None) -> Tensor:
        """[rows, 1]"""
        log_p = log_probs(self.stack.logits(last))
        losses = self.data_weight * cross_entropy(log_p, next_ids)
        if original is not None:
            with torch.no_grad():
                log_original = log_probs(self.stack.logits(original))
            losses = losses + self.original_weight * forward_kl(log_original, log_p)
        return losses.unsqueeze(1)

    def _early_losses(self, weights: Tensor, next_ids: Tensor, last: Tensor, *exits: Tensor) -> Tensor:
        """[rows, 1] over the exits, each with its weight."""
        # not under no_grad: autocast would keep the unembedding's bfloat16 copy made there, which carries no gradient
        log_p = log_probs(self.stack.logits(last).detach()) if self.final_weight else None
        losses = torch.zeros(len(next_ids), dtype=torch.float32, device=last.device)
        for weight, states in zip(weights, exits, strict=True):
            log_q = log_probs(self.stack.logits(states))
            one = self.data_weight * cross_entropy(log_q, next_ids)
            losses = losses + weight * (one if log_p is None else one + self.final_weight * forward_kl(log_p, log_q))
        return losses.unsqueeze(1)

    # -- validation ----------------------------------------------------------------------------------------------

    def measure(self, batch: TextBatch) -> tuple[Tensor, int]:
        ragged = RaggedBatch.build(batch.items(), None, self.stack.device)
        states, rows = self._states(ragged, self.drafting_layers), kept_rows(batch.mask)
        chosen = [states[layer][rows] for layer in (self.stack.num_layers, *self.drafting_layers)]
        original = [self._original(ragged)[rows]] if self.lora else []
        total, measured = sum_over_chunks(
            self._row_measures, [batch.next_ids[rows], *chosen, *original], self.chunk_rows
        )
        return torch.cat((total.unsqueeze(0), measured)), len(rows)

    def _row_measures(self, next_ids: Tensor, last: Tensor, *others: Tensor) -> Tensor:
        """[rows, names of `measured`]"""
        final_logits = self.stack.logits(last)
        log_p = log_probs(final_logits)
        columns = [cross_entropy(log_p, next_ids)]
        for states in others[: len(self.drafting_layers)]:
            logits = self.stack.logits(states)
            log_q = log_probs(logits)
            columns += [cross_entropy(log_q, next_ids), forward_kl(log_p, log_q), agrees(logits, final_logits)]
            columns.append(1.0 - total_variation(log_p, log_q))
        for states in others[len(self.drafting_layers) :]:
            logits = self.stack.logits(states)
            columns += [forward_kl(log_probs(logits), log_p), agrees(logits, final_logits)]
        return torch.stack(columns, dim=1)

    @property
    def drafting_layers(self) -> tuple[int, ...]:
        return default_layers(self.stack.num_layers) if self.layers is None else tuple(self.layers)

    def drafting_model(self) -> LayeredModel:
        return self.stack

    def drafting_exits(self) -> EarlyExits:
        return EarlyExits()

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        return {
            "config": self._config(),
            "tokenizer": self.tokenizer_source.name,
            "base_model": "" if self.source is None else self.source.name,
            "base_fingerprint": self.base_fingerprint,
        }

    def _config(self) -> dict[str, Any]:
        return {"architecture": self.architecture, "lora": None if self.lora is None else asdict(self.lora)}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.lora is not None and holds_whole_model(self.trainer):
            own, state = self._trained(), checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: state[name] for name in own}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse what does not belong here, and fill in what is frozen, so that Lightning loads strictly."""
        record = check_kind(checkpoint, KIND)
        check_settings(record["config"], self._config())
        if self.lora is not None:
            check_base(record, self.base_fingerprint, str(self.settings["model"]))
        if "state_dict" in checkpoint and holds_whole_model(self.trainer):
            own = self._trained()
            check_tensors(checkpoint["state_dict"], own)
            frozen = {name: tensor for name, tensor in self.state_dict().items() if name not in own}
            checkpoint["state_dict"] = frozen | dict(checkpoint["state_dict"])

    def _trained(self) -> dict[str, Tensor]:
        """What checkpoints hold: adapters only, or everything."""
        state = self.state_dict()
        if self.lora is None:
            return state
        return {name: state[name] for name, parameter in self.named_parameters() if parameter.requires_grad}


def _check_origin(
    model: str | None, architecture: Any, tokenizer: str | None, lora: LoraOptions | None, dtype: str
) -> None:
    if (model is None) == (architecture is None):
        raise ValueError("either model (to continue) or architecture (from scratch) must be given, not both")
    if (architecture is None) != (tokenizer is None):
        raise ValueError("tokenizer must be given with architecture, and only then: whose vocabulary it gets")
    if architecture is not None and lora is not None:
        raise ValueError("lora adapts a model that is there; with architecture all weights are trained")
    if resolve_dtype(dtype) != torch.float32 and lora is None:
        raise ValueError(
            f"dtype must be float32 where all weights are trained, got {dtype!r}; see the trainer's precision"
        )


def _check_layer_weights(layers: list[int] | None, weights: list[float] | None) -> None:
    if weights is not None and (len(weights) != len(layers or ()) or not all(0.0 <= w < math.inf for w in weights)):
        raise ValueError(
            f"layer_weights must be numbers of at least 0, one for each of layers ({layers}), got {weights}"
        )


def _check_weights(lora: LoraOptions | None, **weights: float) -> None:
    for name, weight in weights.items():
        if not 0.0 <= weight < math.inf:
            raise ValueError(f"{name} must be a number of at least 0, got {weight!r}")
    if weights["original_weight"] and lora is None:
        raise ValueError("original_weight needs lora: without its adapters the model is the original")
    if not weights["data_weight"] and not weights["original_weight"]:
        raise ValueError("data_weight or original_weight must be above 0: else the last layer has nothing to learn")


# --- models -------------------------------------------------------------------------------------------------------


def _tokenizer_source(name: str) -> ModelSource:
    return resolve_model(name) if Path(name).expanduser().is_file() else ModelSource(name, name)


def with_vocabulary(architecture: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The sizes with the tokenizer's vocabulary and special tokens, where they do not say otherwise."""
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    full = {"vocab_size": len(tokenizer)} | ids | dict(architecture)
    if full["vocab_size"] < len(tokenizer):
        raise ValueError(f"architecture.vocab_size must be at least the tokenizer's {len(tokenizer)}")
    return full


def new_model(architecture: Mapping[str, Any]) -> PreTrainedModel:
    """A randomly initialised float32 model. Raises ValueError naming what the architecture may not be."""
    settings = dict(architecture)
    name = settings.pop("model_type", None)
    if not isinstance(name, str):
        raise ValueError("architecture must name its model_type, for example llama")
    try:
        known = AutoConfig.for_model(name).to_dict()
    except ValueError as error:
        raise ValueError(f"architecture.model_type {name!r} is not known to transformers") from error
    unknown = sorted(settings.keys() - known.keys())
    if unknown:
        raise ValueError(f"architecture has {unknown[0]!r}, which a {name} does not have; it has {', '.join(known)}")
    config = AutoConfig.for_model(name, **settings)
    check_supported(config)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def with_lora(base: PreTrainedModel, options: LoraOptions) -> nn.Module:
    """The base frozen, with float32 adapters in its layers that start as nothing. Raises ValueError for no match."""
    import peft

    config = peft.LoraConfig(
        r=options.r,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=list(options.targets),
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(base, config)
    except ValueError as error:
        raise ValueError(f"lora.targets {options.targets} fit no layer of this model: {error}") from error


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """A peft model as it was before, in eval mode."""
    with eval_mode(model), model.disable_adapter():
        yield


def save_model(ckpt_path: str | Path, folder: str | Path) -> None:
    """Write what a checkpoint of LayerSkipModule trained as a transformers folder with tokenizer, adapters merged in.

    It serves anywhere: `speclight generate --model FOLDER --method hispec`. Weights are float32.

    Raises ValueError for other checkpoints, a base model that is not the one trained on, and a folder that is in use.
    """
    target = Path(folder).expanduser()
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"folder {str(target)!r} is not empty; choose another")
    checkpoint = read_checkpoint(ckpt_path, KIND)
    record = checkpoint[RECORD]
    model = _rebuilt(record, {name.removeprefix(MODEL): t for name, t in checkpoint["state_dict"].items()})
    model.save_pretrained(target)
    load_tokenizer(_tokenizer_source(record["tokenizer"])).save_pretrained(target)


def _rebuilt(record: Mapping[str, Any], state: Mapping[str, Tensor]) -> PreTrainedModel:
    config = record["config"]
    if config["architecture"] is not None:
        base = new_model(config["architecture"])
    else:
        base = load_transformers(resolve_model(record["base_model"]), "float32", "cpu")
    if config["lora"] is None:
        base.load_state_dict(state)
        return base
    check_base(record, fingerprint(base), record["base_model"])
    model: Any = with_lora(base, LoraOptions(**config["lora"]))
    own = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name}
    check_tensors({name: tensor for name, tensor in state.items() if name in own}, own)
    model.load_state_dict({name: state[name] for name in own}, strict=False)
    return model.merge_and_unload()
