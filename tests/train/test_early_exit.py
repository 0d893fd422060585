"""Exit heads learn on a frozen model: what is trained, what a step's gradient is, what is measured and saved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from checkpoint import save_tiny
from fitting import TEXTS, base_model, same_weights, saver, text_data, trainer
from lightning.pytorch.strategies import FSDPStrategy
from speclight.infer.loading import load_transformers, resolve_model
from speclight.modules.batch import RaggedBatch
from speclight.modules.bundle import fingerprint
from speclight.modules.exit_heads import ExitHeads
from speclight.modules.layered_model import LayeredModel
from speclight.train.base import TokenMeans, lr_factor
from speclight.train.checkpoint import read_checkpoint, read_heads
from speclight.train.data import TextBatch, TextDataModule
from speclight.train.early_exit import EarlyExitModule
from speclight.train.losses import ExitLoss


class Spy(EarlyExitModule):
    """Keeps each step's gradients as the optimiser gets them."""

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        self.gradients = getattr(self, "gradients", [])
        self.gradients.append({name: p.grad.clone() for name, p in self.named_parameters()})


def module(folder: Path, make: type[EarlyExitModule] = EarlyExitModule, **settings) -> EarlyExitModule:
    return make(base_model(folder), **({"rank": 4, "lr": 0.02, "calibrate": 0} | settings))


def ready(folder: Path, stage: str = "fit", **settings) -> tuple[EarlyExitModule, TextDataModule]:
    """A module and its data as a trainer sets them up, with batches to take."""
    exits, data = module(folder, **settings), text_data(folder)
    host = trainer()
    host.strategy.connect(exits)
    host._data_connector.attach_data(exits, datamodule=data)
    data.setup(stage)
    exits.setup(stage)
    return exits, data


def moved(exits: EarlyExitModule, scale: float = 0.1) -> EarlyExitModule:
    """Heads that no longer say what the model's own early exit says."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in exits.heads.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return exits


# --- what is trained -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adapter", "block", ["norm", "block"]], ids=str)
def test_heads_get_nearer_to_the_final_layer_and_the_backbone_stays(tmp_path: Path, kind) -> None:
    exits, data = module(tmp_path, kind=kind), text_data(tmp_path)
    before = trainer(limit_val_batches=1.0).validate(exits, data, verbose=False)[0]
    trainer(max_epochs=10).fit(exits, datamodule=data)
    after = trainer(limit_val_batches=1.0).validate(exits, data, verbose=False)[0]
    learning = "val/exit_2"
    assert after[f"{learning}/kl"] < 0.7 * before[f"{learning}/kl"]
    assert after[f"{learning}/acceptance"] > before[f"{learning}/acceptance"]
    assert fingerprint(exits.backbone) == fingerprint(load_transformers(exits.source))
    assert exits.base_fingerprint == fingerprint(exits.backbone)


def test_the_backbone_cannot_be_reached_by_optimiser_checkpoint_or_train_mode(tmp_path: Path) -> None:
    exits, _ = ready(tmp_path)
    exits.train()
    exits.requires_grad_(True)
    assert not any(part.training for part in exits.backbone.modules())
    assert not any(parameter.requires_grad for parameter in exits.backbone.parameters())
    own = {id(parameter) for parameter in exits.backbone.parameters()}
    assert own.isdisjoint(map(id, exits.parameters()))
    assert all(name.startswith("heads.") for name in exits.state_dict())


@pytest.mark.parametrize("stage", ["online", "fit"])
def test_dropout_of_the_backbone_does_not_noise_what_heads_learn_from(tmp_path: Path, stage: str) -> None:
    """OPT with dropout 0.5: two passes in train mode give the very same states, as does a pass in mid-training."""
    save_tiny(tmp_path / "model", "opt", dropout=0.5, attention_dropout=0.5)
    exits, data = ready(tmp_path)
    batch = next(iter(data.train_dataloader()))
    rows = batch.mask.nonzero().squeeze(1)
    expected = exits._inputs(batch, rows)
    if stage == "fit":
        trainer().fit(exits, datamodule=data)
    exits.train()
    for first, second in zip(expected, exits._inputs(batch, rows), strict=True):
        assert torch.equal(first, second)


def test_exits_of_kind_norm_have_nothing_to_train_but_can_be_measured(tmp_path: Path) -> None:
    exits, data = module(tmp_path, kind="norm", layers=[2, 4]), text_data(tmp_path)
    with pytest.raises(ValueError, match="nothing to train: exits of kind 'norm'"):
        trainer().fit(exits, datamodule=data)
    (found,) = trainer(limit_val_batches=1.0).validate(exits, data, verbose=False)
    assert found["val/exit_4/agreement"] == 1.0 and found["val/exit_4/acceptance"] == pytest.approx(1.0, abs=1e-5)
    assert found["val/exit_2/agreement"] < 1.0


def test_an_exit_without_weight_is_measured_but_does_not_learn(tmp_path: Path) -> None:
    exits, data = module(tmp_path, exit_weights=[0.0, 1.0]), text_data(tmp_path)
    trainer(max_epochs=1).fit(exits, datamodule=data)
    assert not exits.heads.heads["1"].down.weight.any() and exits.heads.heads["2"].down.weight.any()


# --- the step ------------------------------------------------------------------------------------------------------


def reference_loss(exits: EarlyExitModule, batch: TextBatch) -> torch.Tensor:
    """The mean over supervised positions, logits of everything at once, by autograd."""
    model, ragged = exits.backbone, RaggedBatch.build(batch.items(), None)
    final = torch.log_softmax(model(ragged), -1)
    total = 0.0
    for layer in exits.heads.layers:
        hidden = model.run(model.embed(ragged), ragged, None, 0, layer)
        q = torch.log_softmax(model.logits(exits.heads(layer, hidden, model, ragged)), -1)
        total = total + (final.exp() * (final - q)).sum(-1) - 0.1 * q[range(len(q)), final.argmax(-1)]
    return total[batch.mask].mean()


@pytest.mark.parametrize("kind", ["adapter", "block"])
@pytest.mark.parametrize("chunk_rows", [3, 512])
def test_a_steps_gradient_is_that_of_the_plain_mean(tmp_path: Path, kind: str, chunk_rows: int) -> None:
    base_model(tmp_path, dtype=torch.float64)
    exits, data = ready(tmp_path, kind=kind, loss=ExitLoss(1.0, argmax=0.1), chunk_rows=chunk_rows)
    moved(exits)
    batch = next(iter(data.train_dataloader()))
    expected = reference_loss(exits, batch)
    wanted = torch.autograd.grad(expected, list(exits.parameters()))
    found = exits.loss_sum(batch, 0)
    (found.total / found.num_rows).backward()
    torch.testing.assert_close(found.total / found.num_rows, expected, check_dtype=False)
    for parameter, gradient in zip(exits.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_micro_batches_of_one_and_nine_tokens_are_one_batch_of_ten(tmp_path: Path, clip: float | None) -> None:
    """Averaging micro-batches would give one token the weight of nine. Clipping comes after the division."""
    base_model(tmp_path, dtype=torch.float64)
    texts = ["a", "bcdefghij"]  # each with an end token: one and nine tokens to predict
    found = []
    for rows, accumulate in ((2, 1), (1, 2)):
        exits, data = module(tmp_path, Spy, lr=0.0), text_data(tmp_path, texts, batch_rows=rows)
        host = trainer(max_epochs=1, accumulate_grad_batches=accumulate, gradient_clip_val=clip)
        host.fit(exits, datamodule=data)
        assert host.callback_metrics["train/tokens"] == 10 and len(exits.gradients) == 1
        found.append((exits.gradients[0], float(host.callback_metrics["train/loss"])))
    (whole, loss), (parts, same_loss) = found
    assert same_loss == pytest.approx(loss, rel=1e-6)  # metrics are float32
    for name in whole:
        assert whole[name].any() or "down" not in name
        torch.testing.assert_close(parts[name], whole[name])


def test_the_last_step_of_an_epoch_may_have_fewer_micro_batches(tmp_path: Path) -> None:
    base_model(tmp_path, dtype=torch.float64)
    gradients = []
    for rows, accumulate in ((4, 1), (1, 4)):
        exits = module(tmp_path, Spy, lr=0.0)
        data = text_data(tmp_path, TEXTS[:6], batch_rows=rows)
        trainer(max_epochs=1, accumulate_grad_batches=accumulate).fit(exits, datamodule=data)
        gradients.append(exits.gradients)
    assert len(gradients[0]) == len(gradients[1]) == 2
    for whole, parts in zip(*gradients, strict=True):
        for name in whole:
            torch.testing.assert_close(parts[name], whole[name])


def test_sampled_positions_are_those_of_seed_epoch_and_batch(tmp_path: Path) -> None:
    exits, data = ready(tmp_path, position_share=0.5)
    batch = next(iter(data.train_dataloader()))
    torch.manual_seed(1)
    counts = [int(exits.loss_sum(batch, index).num_rows) for index in range(20)]
    torch.manual_seed(2)
    again = [int(exits.loss_sum(batch, index).num_rows) for index in range(20)]
    assert counts == again and len(set(counts)) > 1
    assert 0.35 < sum(counts) / (20 * int(batch.mask.sum())) < 0.65  # four standard deviations


def test_a_bfloat16_backbone_has_float32_heads_and_losses(tmp_path: Path) -> None:
    exits, data = ready(tmp_path, dtype="bfloat16")
    assert exits.backbone.dtype == torch.bfloat16
    assert all(parameter.dtype == torch.float32 for parameter in exits.parameters())
    found = exits.loss_sum(next(iter(data.train_dataloader())), 0)
    assert found.total.dtype == torch.float32 and bool(found.total > 0)


def test_a_loss_on_data_runs_no_layer_above_the_last_exit(tmp_path: Path) -> None:
    exits, data = ready(tmp_path, loss=ExitLoss(0.0, data=1.0))
    batch, ran = next(iter(data.train_dataloader())), []
    run = exits.backbone.run
    exits.backbone.run = lambda hidden, ragged, cache, start, stop: (
        ran.append((start, stop)) or run(hidden, ragged, cache, start, stop)
    )
    assert exits.loss_sum(batch, 0).total > 0 and ran == [(0, 1), (1, 2)]
    exits.measure(batch)
    assert ran[2:] == [(0, 1), (1, 2), (2, 4)]


class Breaks(EarlyExitModule):
    """Its weights overflow in the second step."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            next(self.heads.parameters()).data.fill_(torch.inf)


def test_a_broken_loss_ends_training_with_a_reason(tmp_path: Path) -> None:
    exits, data = module(tmp_path, Breaks), text_data(tmp_path)
    with pytest.raises(ValueError, match=r"the loss of step \d+ is nan: training broke the weights; lower lr"):
        trainer(max_epochs=5).fit(exits, datamodule=data)


# --- stored states -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adapter", "block"])
def test_stored_states_train_as_the_model_does_and_no_layer_runs(tmp_path: Path, kind: str) -> None:
    exits, data = ready(tmp_path, kind=kind)
    moved(exits)
    batch = next(iter(data.train_dataloader()))
    online = exits.loss_sum(batch, 0)
    online.total.backward()
    wanted = [parameter.grad.clone() for parameter in exits.parameters()]
    exits.zero_grad()
    ragged = RaggedBatch.build(batch.items(), None)
    states, hidden = {}, exits.backbone.embed(ragged)
    for layer in range(1, 5):
        states[layer] = hidden = exits.backbone.run(hidden, ragged, None, layer - 1, layer)
    exits.backbone.run = None
    stored = TextBatch(batch.documents, batch.next_ids, batch.mask, {layer: states[layer] for layer in (1, 2, 4)})
    found = exits.loss_sum(stored, 0)
    found.total.backward()
    assert torch.equal(found.total, online.total)
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(exits.parameters(), wanted, strict=True))
    lacking = TextBatch(batch.documents, batch.next_ids, batch.mask, {layer: states[layer] for layer in (1, 4)})
    with pytest.raises(ValueError, match=re.escape("the stored states lack those after layer 2; they have [1, 4]")):
        exits.loss_sum(lacking, 0)


# --- what is measured ----------------------------------------------------------------------------------------------


def test_means_are_sums_divided_once() -> None:
    """One token of value 1 and then four of value 0: the mean of batch means would be 0.5."""
    means = TokenMeans(["a", "b"])
    means.add(torch.tensor([1.0, 2.0]), 1)
    means.add(torch.tensor([0.0, 8.0]), 4)
    alone = type("Host", (), {"trainer": type("Trainer", (), {"world_size": 1, "strategy": None})})
    assert means.take(alone) == {"a": 0.2, "b": 2.0}
    assert means.take(alone) == {}


@pytest.mark.parametrize("draft_vocab", [None, 40])
def test_validation_measures_what_serving_would_see(tmp_path: Path, draft_vocab: int | None) -> None:
    """Token by token over the whole vocabulary, in uneven batches; outside the draft vocabulary q is zero."""
    base_model(tmp_path, dtype=torch.float64)
    exits, data = module(tmp_path, draft_vocab=draft_vocab), text_data(tmp_path, batch_rows=3)
    host = trainer(max_epochs=1, limit_val_batches=1.0)
    host.fit(exits, datamodule=data)
    exits.backbone.to("cpu")
    sums, count = dict.fromkeys(("loss", "agreement", "acceptance"), 0.0), 0
    for row in range(len(data.datasets["val"])):
        batch = TextBatch.collate([data.datasets["val"][row]])
        ragged = RaggedBatch.build(batch.items(), None)
        p = exits.backbone(ragged).softmax(-1)[batch.mask]
        hidden = exits.backbone.run(exits.backbone.embed(ragged), ragged, None, 0, 2)
        logits = exits.heads.bind(exits.backbone).logits(2, hidden)[batch.mask]
        q = exits.heads.scatter(logits).softmax(-1)
        inside = q > 0
        sums["loss"] += torch.where(inside, p * (p.log() - q.clamp(min=1e-300).log()), 0.0).sum()
        sums["loss"] -= torch.special.xlogy((p * inside).sum(-1), (p * inside).sum(-1)).sum()
        sums["agreement"] += (q.argmax(-1) == p.argmax(-1)).sum()
        sums["acceptance"] += torch.minimum(p, q).sum()
        count += int(batch.mask.sum())
    for name, total in sums.items():
        assert float(host.callback_metrics[f"val/exit_2/{name}"]) == pytest.approx(float(total) / count, abs=1e-6)


def test_predictions_are_what_is_measured_position_by_position(tmp_path: Path) -> None:
    exits, data = ready(tmp_path, chunk_rows=4)
    moved(exits)
    batch = next(iter(data.train_dataloader()))
    with torch.no_grad():
        totals, count = exits.measure(batch)
        rows = exits.predict_step(batch, 0)
    assert list(rows) == [1, 2] and len(rows[1]["loss"]) == count
    summed = [float(rows[layer][name].sum()) for layer in rows for name in rows[layer]]
    torch.testing.assert_close(totals[:-1], torch.tensor(summed))


# --- the draft vocabulary --------------------------------------------------------------------------------------------


def test_the_draft_vocabulary_is_counted_in_the_training_data_and_kept_by_checkpoints(tmp_path: Path) -> None:
    exits = module(tmp_path, draft_vocab=12)
    host = trainer(max_epochs=1, enable_checkpointing=True, callbacks=[saver(tmp_path)])
    host.fit(exits, datamodule=text_data(tmp_path))
    chosen = exits.heads.draft_ids.tolist()
    letters = {ord(letter) - 33 + 2 for letter in "text"}  # as tests/checkpoint.py numbers them
    assert letters < set(chosen) and len(chosen) == 12 and chosen != list(range(12))
    assert read_heads(tmp_path / "step=1.ckpt").tensors["draft_ids"].tolist() == chosen

    other = text_data(tmp_path, ["zzzz", "yyyy"], val=TEXTS)
    again = module(tmp_path, draft_vocab=12)
    trainer(limit_val_batches=1.0).validate(again, other, ckpt_path=tmp_path / "step=1.ckpt", verbose=False)
    assert again.heads.draft_ids.tolist() == chosen


def test_a_draft_vocabulary_from_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="draft_vocab needs the training data, to count tokens in, or a checkpoint"):
        trainer(limit_val_batches=1.0).validate(module(tmp_path, draft_vocab=12), text_data(tmp_path), verbose=False)


# --- checkpoints ---------------------------------------------------------------------------------------------------


def trained(folder: Path, **settings) -> tuple[EarlyExitModule, Path]:
    exits = module(folder, **settings)
    host = trainer(max_epochs=1, enable_checkpointing=True, callbacks=[saver(folder)])
    host.fit(exits, datamodule=text_data(folder))
    return exits, folder / "step=5.ckpt"


@pytest.mark.parametrize("command", ["validate", "test", "predict", "fit"])
def test_every_command_works_from_a_checkpoint(tmp_path: Path, command: str) -> None:
    exits, path = trained(tmp_path)
    again, data = module(tmp_path), text_data(tmp_path)
    host = trainer(limit_val_batches=1.0)
    if command == "predict":
        data.setup("validate")
        outputs = host.predict(again, data.val_dataloader(), ckpt_path=path)
        assert len(outputs) == 5
    else:
        getattr(host, command)(again, datamodule=data, ckpt_path=path)
    if command == "fit":
        assert host.global_step == 10
    else:
        assert same_weights(again, exits)


def test_a_checkpoint_is_small_and_holds_only_tensors_and_plain_types(tmp_path: Path) -> None:
    """A backbone of 5 M and heads of 10 k parameters, the optimiser's state included."""
    wide = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 7, "head_dim": 64}
    base_model(tmp_path, **wide)
    exits, path = trained(tmp_path, rank=6, translated=False)
    assert sum(parameter.numel() for parameter in exits.backbone.parameters()) > 4_900_000
    assert 9_000 < sum(parameter.numel() for parameter in exits.parameters()) < 11_000
    assert path.stat().st_size < 1_000_000
    assert {"optimizer_states", "loops", "TextDataModule", "rng"} <= torch.load(path, weights_only=True).keys()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch gathers shards on GPUs only")
def test_shards_are_saved_whole_and_resumed(tmp_path: Path) -> None:
    settings = {"accelerator": "gpu", "strategy": FSDPStrategy(state_dict_type="full")}
    host = trainer(max_epochs=1, enable_checkpointing=True, callbacks=[saver(tmp_path)], **settings)
    host.fit(module(tmp_path, draft_vocab=30), datamodule=text_data(tmp_path))
    assert "draft_ids" in read_heads(tmp_path / "step=5.ckpt").tensors
    again = trainer(accelerator="gpu", strategy=FSDPStrategy(state_dict_type="full"))
    again.fit(module(tmp_path, draft_vocab=30), datamodule=text_data(tmp_path), ckpt_path=tmp_path / "step=5.ckpt")
    assert again.global_step == 10


def test_heads_are_read_from_a_checkpoint_as_a_bundle(tmp_path: Path) -> None:
    exits, path = trained(tmp_path, draft_vocab=30)
    bundle = read_heads(path)
    assert bundle.base_fingerprint == exits.base_fingerprint and bundle.base_model == base_model(tmp_path)
    assert bundle.card["step"] == 5 and bundle.card["metrics"]["train/loss"] > 0
    model = LayeredModel(load_transformers(resolve_model(base_model(tmp_path))), fast=False)
    assert same_weights(ExitHeads.from_bundle(bundle, model), exits.heads)


def changed(path: Path, change) -> Path:
    checkpoint = torch.load(path, weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, path)
    return path


@pytest.mark.parametrize("strict", [True, False])
def test_a_checkpoint_without_one_tensor_of_the_heads_is_refused(tmp_path: Path, strict: bool) -> None:
    """Also where loading is not strict, as it often is set for checkpoints without the backbone."""
    _, path = trained(tmp_path)
    changed(path, lambda checkpoint: checkpoint["state_dict"].pop("heads.heads.2.up.weight"))
    again = module(tmp_path)
    again.strict_loading = strict
    with pytest.raises(ValueError, match=r"the checkpoint lacks the tensors heads\.heads\.2\.up\.weight"):
        trainer().fit(again, datamodule=text_data(tmp_path), ckpt_path=path)


def test_another_backbone_is_refused_with_both_hashes(tmp_path: Path) -> None:
    exits, path = trained(tmp_path)
    save_tiny(tmp_path / "other", seed=1)
    other = EarlyExitModule(str(tmp_path / "other"), rank=4)
    with pytest.raises(ValueError, match="belongs to another base model") as caught:
        trainer().fit(other, datamodule=text_data(tmp_path), ckpt_path=path)
    assert exits.base_fingerprint in str(caught.value) and other.base_fingerprint in str(caught.value)


def test_heads_of_another_make_are_refused_by_name(tmp_path: Path) -> None:
    _, path = trained(tmp_path)
    for settings, message in (
        ({"rank": 5}, "rank must be 4, as in the checkpoint, got 5"),
        ({"layers": [1, 3]}, r"layers must be \[1, 2\], as in the checkpoint, got \[1, 3\]"),
        ({"draft_vocab": 40}, r"lacks the tensors heads\.draft_ids"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer().validate(module(tmp_path, **settings), text_data(tmp_path), ckpt_path=path, verbose=False)


def test_files_that_are_no_checkpoints_of_heads_are_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    torch.save({"speclight": {"kind": "layer-skip"}}, tmp_path / "other.ckpt")
    (tmp_path / "broken.ckpt").write_bytes(b"no")
    for name, message in (
        ("missing.ckpt", "is not a file"),
        ("", r"is not a file \(a folder: it was sharded"),
        ("foreign.ckpt", "is not one of ours"),
        ("other.ckpt", "holds 'layer-skip', not 'exit-heads'"),
        ("broken.ckpt", "cannot be read"),
    ):
        with pytest.raises(ValueError, match=message):
            read_checkpoint(tmp_path / name, "exit-heads")


# --- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"position_share": 0.0}, "position_share must be above 0"),
        ({"chunk_rows": 0}, "chunk_rows must be at least 1"),
        ({"lr": -1.0}, "lr must be a number of at least 0"),
        ({"schedule": "step"}, "schedule must be constant, cosine or linear"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"layers": [2, 9]}, "layers must be ascending numbers from 1 to 4"),
        ({"kind": "mlp"}, "kind must be one of norm, adapter, block"),
        ({"rank": 0}, "rank must be at least 1"),
        ({"draft_vocab": 97}, "draft_vocab must be from 1 to 96"),
        ({"exit_weights": [1.0]}, "exit_weights must be 2 numbers"),
        ({"exit_weights": [0.0, 0.0]}, "exit_weights must be 2 numbers"),
    ],
)
def test_a_wrong_setting_is_named_before_weights_are_read(tmp_path: Path, settings, message: str, monkeypatch) -> None:
    base_model(tmp_path)
    monkeypatch.setattr("speclight.train.early_exit.load_transformers", None)
    with pytest.raises(ValueError, match=message):
        trainer().fit(module(tmp_path, **settings), datamodule=text_data(tmp_path))


def test_a_model_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        EarlyExitModule(str(tmp_path / "nothing"))


def test_the_learning_rate_warms_up_and_falls_to_nothing_at_the_last_step() -> None:
    def never() -> int:
        raise AssertionError("asked for the run's length without need")

    assert [lr_factor(step, "constant", 3, never) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert lr_factor(0, "cosine", 0, never) == lr_factor(2, "linear", 3, never) * 4 / 3 == 1.0
    assert [lr_factor(step, "linear", 2, lambda: 6) for step in range(2, 7)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert lr_factor(4, "cosine", 2, lambda: 6) == pytest.approx(0.5)
    assert lr_factor(6, "cosine", 2, lambda: 6) == lr_factor(9, "cosine", 2, lambda: 6) == pytest.approx(0.0)


def test_a_schedule_needs_a_run_that_ends(tmp_path: Path) -> None:
    exits, data = module(tmp_path, schedule="cosine"), text_data(tmp_path)
    with pytest.raises(ValueError, match="max_steps or max_epochs of the trainer must be set"):
        trainer(max_epochs=-1).fit(exits, datamodule=data)


def test_only_matrices_decay(tmp_path: Path) -> None:
    exits, data = module(tmp_path, kind=["adapter", "block"], weight_decay=0.5), text_data(tmp_path)
    host = trainer(max_epochs=1)
    host.fit(exits, datamodule=data)
    decaying, others = host.optimizers[0].param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.5, 0.0)
    assert all(parameter.ndim == 2 for parameter in decaying["params"])
    assert all(parameter.ndim == 1 for parameter in others["params"]) and len(others["params"]) == 5


def test_initial_heads_are_those_of_the_seed(tmp_path: Path) -> None:
    found = []
    for seed, state in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(state)
        found.append(ready(tmp_path, seed=seed)[0])
    assert same_weights(found[0], found[1]) and not same_weights(found[0], found[2])


def test_foreign_data_is_refused_where_it_cannot_be_counted_in(tmp_path: Path) -> None:
    exits = module(tmp_path, draft_vocab=12)
    data = text_data(tmp_path)
    data.setup("fit")
    with pytest.raises(ValueError, match="draft_vocab needs the training data"):
        trainer().fit(exits, data.train_dataloader())
