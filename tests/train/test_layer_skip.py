"""LayerSkip's recipe: its loss, dropout and curricula, adapters, and the model that comes out."""

from __future__ import annotations

import json
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from checkpoint import save_tiny
from fitting import TEXTS, base_model, same_weights, saver, text_data, trainer
from speclight.infer.early_exit import EarlyExitDrafter
from speclight.infer.engine import Engine
from speclight.infer.hierarchical import HierarchicalDrafter
from speclight.infer.loading import load_model
from speclight.infer.request import GenerationParams
from speclight.modules.batch import RaggedBatch
from speclight.modules.bundle import fingerprint
from speclight.train.data import TextBatch, TextDataModule
from speclight.train.layer_skip import LayerSkipModule, LoraOptions, new_model, save_model
from speclight.train.losses import exit_scales

SIZES = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
SMALL = {"warmup_steps": 2, "every": 2}


def scratch(folder: Path, **settings) -> LayerSkipModule:
    return LayerSkipModule(architecture=SIZES, tokenizer=base_model(folder), **(SMALL | {"lr": 0.02} | settings))


def continued(folder: Path, **settings) -> LayerSkipModule:
    return LayerSkipModule(base_model(folder), **(SMALL | {"lr": 0.01} | settings))


def adapted(folder: Path, **settings) -> LayerSkipModule:
    return continued(folder, **({"lora": LoraOptions(r=4)} | settings))


def ready(skip: LayerSkipModule, folder: Path) -> tuple[LayerSkipModule, TextDataModule, pl.Trainer]:
    """A module and its data as a trainer sets them up."""
    data, host = text_data(folder), trainer(max_steps=100, max_epochs=-1)
    host.strategy.connect(skip)
    host._data_connector.attach_data(skip, datamodule=data)
    data.setup("fit")
    skip.setup("fit")
    return skip, data, host


def at_step(host: pl.Trainer, step: int) -> None:
    host.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step


def logits_of(skip: LayerSkipModule, batch: TextBatch) -> torch.Tensor:
    skip.hf.eval()
    with torch.no_grad():
        return skip.stack(RaggedBatch.build(batch.items(), None))


# --- the loss ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [None, [1, 3]])
@pytest.mark.parametrize("chunk_rows", [4, 512])
def test_the_loss_is_the_papers_sum_over_exits(tmp_path: Path, chunk_rows: int, layers) -> None:
    """Value and gradient, in float64, against logits of everything at once."""
    skip, data, _ = ready(
        continued(tmp_path, p_max=0.0, curriculum="none", e_scale=0.3, chunk_rows=chunk_rows, layers=layers), tmp_path
    )
    skip.hf.double()
    batch = next(iter(data.train_dataloader()))
    ragged = RaggedBatch.build(batch.items(), None)
    scales = exit_scales([layers is None or layer in layers or layer == 4 for layer in range(1, 5)], 0.3)
    hidden, expected = skip.stack.embed(ragged), 0.0
    for layer, scale in enumerate(scales, start=1):
        hidden = skip.stack.run(hidden, ragged, None, layer - 1, layer)
        logits = skip.stack.logits(hidden)[batch.mask]
        expected = expected + scale * torch.nn.functional.cross_entropy(logits, batch.next_ids[batch.mask])
    wanted = torch.autograd.grad(expected, list(skip.parameters()))
    found = skip.loss_sum(batch, 0)
    (found.total / found.num_rows).backward()
    torch.testing.assert_close(found.total / found.num_rows, expected)
    for parameter, gradient in zip(skip.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_exits_learn_from_the_last_layer_and_it_feels_nothing_of_it(tmp_path: Path) -> None:
    """What exits learn from it reaches the layers below them only."""
    gradients = []
    for weight in (0.0, 5.0):
        skip, data, _ = ready(
            continued(tmp_path, p_max=0.0, curriculum="none", e_scale=0.0, final_weight=weight), tmp_path
        )
        batch = next(iter(data.train_dataloader()))
        (skip.loss_sum(batch, 0).total).backward()
        gradients.append([parameter.grad.clone() for parameter in skip.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))  # e_scale 0: exits rest


def test_sampling_positions_for_the_exits_keeps_the_loss_in_the_mean(tmp_path: Path) -> None:
    skip, data, _ = ready(continued(tmp_path, p_max=0.0, curriculum="none", exit_share=0.5), tmp_path)
    batch = next(iter(data.train_dataloader()))
    with torch.no_grad():
        draws = torch.tensor([float(skip.loss_sum(batch, index).total) for index in range(200)])
        skip.exit_share = 1.0
        whole = float(skip.loss_sum(batch, 0).total)
    assert draws.std() > 0
    assert abs(float(draws.mean()) - whole) < 5 * float(draws.std()) / 200**0.5  # false failure below 1e-6


@pytest.mark.parametrize("make", [scratch, adapted])
def test_mixed_precision_keeps_weights_and_losses_in_float32(tmp_path: Path, make) -> None:
    found = []
    for precision in ("32-true", "bf16-mixed"):
        skip, host = make(tmp_path, final_weight=0.5), trainer(max_epochs=4, precision=precision)
        host.fit(skip, datamodule=text_data(tmp_path))
        assert {parameter.dtype for parameter in skip.parameters()} == {torch.float32}
        found.append(float(host.callback_metrics["train/loss"]))
    assert found[1] == pytest.approx(found[0], rel=0.02)


# --- dropout and curricula -------------------------------------------------------------------------------------------


def test_a_document_that_skips_a_layer_keeps_its_states_and_others_do_not(tmp_path: Path) -> None:
    skip, data, _ = ready(continued(tmp_path), tmp_path)
    batch = TextBatch.collate([data.datasets["train"][row] for row in range(3)])
    ragged = RaggedBatch.build(batch.items(), None)
    dropped = torch.zeros(4, ragged.num_tokens, dtype=torch.bool)
    second = slice(ragged.cu_seqlens[1], ragged.cu_seqlens[2])
    dropped[2, second] = True
    plain, skipping = skip._states(ragged, [2, 3]), skip._states(ragged, [2, 3], dropped)
    assert torch.equal(skipping[3][second], plain[2][second])
    others = [token for token in range(ragged.num_tokens) if not second.start <= token < second.stop]
    assert torch.equal(skipping[3][others], plain[3][others]) and torch.equal(skipping[4][others], plain[4][others])
    assert not torch.equal(skipping[4][second], plain[4][second])


def test_documents_are_dropped_whole_and_as_often_as_the_rates_say(tmp_path: Path) -> None:
    skip, data, _ = ready(continued(tmp_path, p_max=0.5), tmp_path)
    batch = TextBatch.collate([data.datasets["train"][row] for row in range(10)])
    ragged = RaggedBatch.build(batch.items(), None)
    draws = torch.stack([skip._dropped(ragged, skip.generator(index)) for index in range(300)])
    for start, end in zip(ragged.cu_seqlens, ragged.cu_seqlens[1:], strict=False):
        assert bool((draws[:, :, start:end] == draws[:, :, start : start + 1]).all())
    found = draws[:, :, ragged.cu_seqlens[:-1]].double().mean((0, 2))
    torch.testing.assert_close(found, torch.tensor(skip.dropout_rates(), dtype=torch.float64), atol=0.045, rtol=0)
    assert found[0] == 0.0 and skip.dropout_rates()[3] == 0.5  # 0.045: five standard deviations of 3000 draws


def test_from_scratch_dropout_grows_with_time_and_continued_it_does_not(tmp_path: Path) -> None:
    new, _, host = ready(scratch(tmp_path, p_max=0.4), tmp_path)
    rates = []
    for step in (0, 50, 99):
        at_step(host, step)
        rates.append(new.dropout_rates()[-1])
    assert rates[0] == 0.0 < rates[1] < rates[2] == pytest.approx(0.4)
    old, _, host = ready(continued(tmp_path, p_max=0.4), tmp_path)
    assert old.dropout_rates()[-1] == 0.4


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"curriculum": "none"}, [{2, 3, 4}] * 4),
        ({"curriculum": "rotational", "every": 3}, [{4}, {2, 4}, {3, 4}, {4}]),
        ({"curriculum": "gradual"}, [{4}, {3, 4}, {2, 3, 4}, {2, 3, 4}]),
        ({"curriculum": "none", "layers": [2]}, [{2, 4}] * 4),
        ({"curriculum": "rotational", "every": 3, "layers": [3]}, [{4}, {4}, {3, 4}, {4}]),
        (
            {"curriculum": "rotational", "every": 3, "layers": [1, 2], "layer_weights": [1.0, 2.0]},
            [{1, 4}, {2, 4}, {4}, {1, 4}],
        ),
    ],
)
def test_a_curriculum_decides_which_exits_a_step_trains(tmp_path: Path, settings, expected) -> None:
    """The paper's e(l) is 0 for the first layer."""
    skip, _, host = ready(continued(tmp_path, **settings), tmp_path)
    steps = (0, 13, 25, 38) if settings.get("curriculum") == "gradual" else range(4)  # of 100
    found = []
    for step in steps:
        at_step(host, step)
        scales = skip.scales()
        assert sum(scales) == pytest.approx(1.0)
        found.append({layer for layer, scale in enumerate(scales, start=1) if scale})
    assert found == expected


def test_exits_can_have_weights_of_their_own(tmp_path: Path) -> None:
    skip, _, _ = ready(continued(tmp_path, layers=[1, 2], layer_weights=[0.5, 2.5], curriculum="none"), tmp_path)
    assert skip.scales() == [0.125, 0.625, 0.0, 0.25]


def test_a_run_that_skips_nearly_everything_still_trains_every_weight(tmp_path: Path) -> None:
    """Layers run for documents that skip them too: a weight without a gradient would stop DDP."""
    skip, data, _ = ready(continued(tmp_path, p_max=0.99), tmp_path)
    skip.loss_sum(next(iter(data.train_dataloader())), 0).total.backward()
    assert all(parameter.grad is not None for parameter in skip.parameters())


# --- training ------------------------------------------------------------------------------------------------------


def test_exits_learn_a_toy_language_from_scratch(tmp_path: Path) -> None:
    """Texts that repeat themselves: an early exit can know them, and comes to agree with the last layer."""
    texts = [chr(65 + index) + "abcdefgh" * 2 for index in range(12)]
    skip, data = scratch(tmp_path, curriculum="rotational", e_scale=1.0, p_max=0.1), text_data(tmp_path, texts)
    (before,) = trainer(limit_val_batches=1.0).validate(skip, data, verbose=False)
    host = trainer(max_epochs=15, limit_val_batches=1.0, check_val_every_n_epoch=15)
    host.fit(skip, datamodule=data)
    after = {name: float(value) for name, value in host.callback_metrics.items()}
    assert after["val/loss"] < 0.3 * before["val/loss"]
    assert after["val/exit_1/loss"] < 0.5 * before["val/exit_1/loss"]
    assert after["val/exit_2/agreement"] > 0.85 and after["val/exit_2/acceptance"] > 0.7


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Adapters with dropout of their own, layer dropout, sampled positions, the gradual curriculum."""
    settings = {
        "lora": LoraOptions(r=2, dropout=0.3),
        "p_max": 0.3,
        "exit_share": 0.5,
        "curriculum": "gradual",
        "original_weight": 0.5,
    }
    pl.seed_everything(1)
    whole = adapted(tmp_path, **settings)
    trainer(callbacks=[saver(tmp_path)], enable_checkpointing=True).fit(whole, datamodule=text_data(tmp_path))
    for step in (1, 3, 5, 8):
        pl.seed_everything(50 + step)
        resumed = adapted(tmp_path, **settings)
        trainer().fit(resumed, datamodule=text_data(tmp_path), ckpt_path=tmp_path / f"step={step}.ckpt")
        assert same_weights(resumed, whole), f"resumed after step {step}"


def test_initial_weights_are_those_of_the_seed(tmp_path: Path) -> None:
    found = []
    for seed, state in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(state)
        found.append(ready(scratch(tmp_path, seed=seed), tmp_path)[0])
    assert same_weights(found[0], found[1]) and not same_weights(found[0], found[2])


# --- adapters ------------------------------------------------------------------------------------------------------


def test_adapters_start_as_nothing_and_leave_the_base_as_it_is(tmp_path: Path) -> None:
    skip, data, _ = ready(adapted(tmp_path, original_weight=1.0), tmp_path)
    batch = TextBatch.collate([data.datasets["train"][0]])
    plain, _ = load_model(base_model(tmp_path))
    expected = plain(RaggedBatch.build(batch.items(), None))
    torch.testing.assert_close(logits_of(skip, batch), expected, atol=1e-4, rtol=0)
    frozen = {name: p.clone() for name, p in skip.named_parameters() if not p.requires_grad}
    (before,) = trainer(limit_val_batches=1.0).validate(skip, data, verbose=False)
    assert before["val/original/kl"] == pytest.approx(0.0, abs=1e-5) and before["val/original/agreement"] == 1.0
    trainer().fit(skip, datamodule=text_data(tmp_path))
    now = dict(skip.named_parameters())
    assert all(torch.equal(now[name], tensor) for name, tensor in frozen.items()) and len(frozen) > 30
    (after,) = trainer(limit_val_batches=1.0).validate(skip, data, verbose=False)
    assert after["val/original/kl"] > 1e-4
    with torch.no_grad():
        original = skip.stack.logits(skip._original(RaggedBatch.build(batch.items(), None)))
    torch.testing.assert_close(original, expected, atol=1e-4, rtol=0)


def test_holding_on_to_the_original_keeps_the_last_layer_near_it(tmp_path: Path) -> None:
    found = []
    for weight in (0.0, 20.0):
        skip, host = adapted(tmp_path, original_weight=weight), trainer(max_epochs=4, limit_val_batches=1.0)
        host.fit(skip, datamodule=text_data(tmp_path))
        found.append(float(host.callback_metrics["val/original/kl"]))
    assert found[1] < 0.3 * found[0]


def test_a_checkpoint_of_adapters_holds_them_only_and_belongs_to_its_base(tmp_path: Path) -> None:
    skip = adapted(tmp_path)
    trainer(callbacks=[saver(tmp_path)], enable_checkpointing=True).fit(skip, datamodule=text_data(tmp_path))
    path = tmp_path / "step=10.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    assert len(checkpoint["state_dict"]) == 56 and all(".lora_" in name for name in checkpoint["state_dict"])
    assert checkpoint["speclight"]["base_fingerprint"] == skip.base_fingerprint
    again = adapted(tmp_path)
    trainer(limit_val_batches=1.0).validate(again, text_data(tmp_path), ckpt_path=path, verbose=False)
    assert same_weights(again, skip)

    with pytest.raises(ValueError, match=r"lora must be .*'r': 4.* as in the checkpoint, got .*'r': 8"):
        trainer().fit(adapted(tmp_path, lora=LoraOptions(r=8)), datamodule=text_data(tmp_path), ckpt_path=path)
    save_tiny(tmp_path / "other", seed=1)
    other = LayerSkipModule(str(tmp_path / "other"), lora=LoraOptions(r=4))
    with pytest.raises(ValueError, match="belongs to another base model") as caught:
        trainer().fit(other, datamodule=text_data(tmp_path), ckpt_path=path)
    assert skip.base_fingerprint in str(caught.value) and other.base_fingerprint in str(caught.value)
    checkpoint["state_dict"].popitem()
    torch.save(checkpoint, path)
    with pytest.raises(ValueError, match=r"the checkpoint lacks the tensors .*lora_B"):
        trainer().fit(adapted(tmp_path), datamodule=text_data(tmp_path), ckpt_path=path)


# --- the model that comes out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [scratch, continued, adapted])
def test_the_saved_folder_is_the_trained_model_and_serves_hispec(tmp_path: Path, make) -> None:
    skip, data = make(tmp_path), text_data(tmp_path)
    trainer(callbacks=[saver(tmp_path)], enable_checkpointing=True).fit(skip, datamodule=data)
    save_model(tmp_path / "step=10.ckpt", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "llama" and config["vocab_size"] == 96 and "_attn_implementation" not in config
    model, tokenizer = load_model(str(tmp_path / "out"))
    batch = TextBatch.collate([data.datasets["train"][0]])
    torch.testing.assert_close(model(RaggedBatch.build(batch.items(), None)), logits_of(skip, batch), atol=2e-4, rtol=0)
    drafter = HierarchicalDrafter(EarlyExitDrafter(1, 2), 2, 4)
    engine = Engine(model, tokenizer, [drafter])
    plain, fast = (
        engine.generate(TEXTS[:3], GenerationParams(max_new_tokens=12, method=method)) for method in ("ar", "hispec")
    )
    assert [text.token_ids for text in fast] == [text.token_ids for text in plain]
    with pytest.raises(ValueError, match="is not empty; choose another"):
        save_model(tmp_path / "step=10.ckpt", tmp_path / "out")


def test_adapters_are_not_merged_into_another_base(tmp_path: Path) -> None:
    skip = adapted(tmp_path)
    trainer(callbacks=[saver(tmp_path)], enable_checkpointing=True).fit(skip, datamodule=text_data(tmp_path))
    save_tiny(tmp_path / "model", seed=1)
    with pytest.raises(ValueError, match="belongs to another base model"):
        save_model(tmp_path / "step=10.ckpt", tmp_path / "out")


def test_a_model_from_scratch_has_the_tokenizers_vocabulary_and_end(tmp_path: Path) -> None:
    skip, _, _ = ready(scratch(tmp_path), tmp_path)
    assert skip.stack.vocab_size == 96 and skip.stack.eos_token_ids == {1}
    assert skip.stack.head.weight is skip.stack.decoder.embed_tokens.weight
    assert fingerprint(new_model(skip.architecture)) != fingerprint(skip.hf)


# --- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architecture": SIZES}, "either model .* or architecture .* must be given, not both"),
        ({"model": None}, "either model .* or architecture"),
        ({"tokenizer": "x"}, "tokenizer must be given with architecture, and only then"),
        ({"model": None, "architecture": SIZES}, "tokenizer must be given with architecture"),
        ({"model": None, "architecture": SIZES, "tokenizer": "x", "lora": LoraOptions()}, "lora adapts a model"),
        ({"original_weight": 1.0}, "original_weight needs lora"),
        ({"dtype": "bfloat16"}, "dtype must be float32 where all weights are trained"),
        ({"curriculum": "random"}, "curriculum must be rotational, gradual or none"),
        ({"data_weight": -1.0}, "data_weight must be a number of at least 0"),
        ({"data_weight": 0.0}, "data_weight or original_weight must be above 0"),
        ({"exit_share": 0.0}, "exit_share must be above 0"),
        ({"p_max": 1.0}, r"p_max must be in \[0, 1\)"),
        ({"e_scale": -1.0}, "e_scale must be"),
        ({"every": 0}, "every must be at least 1"),
        ({"layers": [2, 1]}, "layers must be ascending numbers from 1 to 3"),
        ({"layers": [1, 2], "layer_weights": [1.0]}, "layer_weights must be numbers of at least 0, one for each of"),
        ({"layer_weights": [1.0]}, "layer_weights must be numbers of at least 0, one for each of"),
        ({"layers": [4]}, "layers must be ascending numbers from 1 to 3"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, settings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ready(LayerSkipModule(**({"model": base_model(tmp_path)} | settings)), tmp_path)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_sise": 3}, "architecture has 'hidden_sise', which a llama does not have"),
        ({"model_type": "lama"}, "architecture.model_type 'lama' is not known"),
        ({"model_type": None}, "architecture must name its model_type"),
        ({"model_type": "gpt2"}, "model_type 'gpt2' .* is not supported"),
        ({"vocab_size": 50}, "architecture.vocab_size must be at least the tokenizer's 96"),
    ],
)
def test_a_wrong_size_is_named(tmp_path: Path, sizes, message: str) -> None:
    base = {"model_type": "llama"} if "model_type" in sizes else SIZES
    with pytest.raises(ValueError, match=message):
        ready(LayerSkipModule(architecture=base | sizes, tokenizer=base_model(tmp_path)), tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": 0}, "lora.r must be at least 1"),
        ({"dropout": 1.0}, r"lora.dropout must be in \[0, 1\)"),
        ({"targets": []}, "lora.targets must be linear layers"),
        ({"targets": ["lm_head"]}, "lora.targets must be linear layers"),
        ({"targets": ["nothing"]}, r"lora.targets \['nothing'\] fit no layer"),
    ],
)
def test_wrong_adapters_are_named(tmp_path: Path, settings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ready(adapted(tmp_path, lora=LoraOptions(**settings)), tmp_path)


def test_data_of_a_larger_vocabulary_is_refused(tmp_path: Path) -> None:
    skip = LayerSkipModule(base_model(tmp_path, vocab_size=90))
    with pytest.raises(ValueError, match=r"data\.model has a tokenizer of 96 tokens, this model a vocabulary of 90"):
        ready(skip, tmp_path)
