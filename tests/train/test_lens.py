"""The affine map that heads begin with is the best one, and a new run begins with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fitting import TEXTS, base_model, same_weights, text_data, trainer
from speclight.modules.batch import BatchItem, RaggedBatch
from speclight.train.checkpoint import read_heads
from speclight.train.data import TextBatch
from speclight.train.early_exit import EarlyExitModule
from speclight.train.lens import LeastSquares


def states(rows: int, size: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_an_affine_relation_is_found_whatever_the_batches_are():
    inputs, weight, bias = states(200), states(6, seed=1), states(1, seed=2)[0]
    outputs = inputs @ weight.T + bias
    found = []
    for parts in (1, 7):
        sums = LeastSquares(6)
        for x, y in zip(inputs.chunk(parts), outputs.chunk(parts), strict=True):
            sums.add(x, y)
        assert sums.num_rows == 200
        found.append(sums.solve())
    for got in found:
        torch.testing.assert_close(got, (weight, bias), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(found[0], found[1])


def test_a_direction_that_no_row_has_is_left_at_rest():
    inputs = torch.cat((states(50, 3), torch.zeros(50, 1, dtype=torch.float64)), dim=1)
    sums = LeastSquares(4)
    sums.add(inputs, 2.0 * inputs)
    weight, bias = sums.solve()
    torch.testing.assert_close(
        weight.diag(), torch.tensor([2.0, 2.0, 2.0, 0.0], dtype=torch.float64), atol=1e-3, rtol=0
    )
    assert bias.abs().max() < 1e-3


def test_without_rows_there_is_no_map():
    with pytest.raises(ValueError, match="calibrate needs supervised tokens"):
        LeastSquares(4).solve()


def distance(module: EarlyExitModule, batch: TextBatch, layer: int) -> float:
    """Mean square between what the head begins with and the last layer's states."""
    states = module._inputs(batch, batch.mask.nonzero().squeeze(1), final=True)
    hidden = states[2 + module.heads.layers.index(layer)]
    return float((module.heads.translation(layer)(hidden.float()) - states[1]).detach().pow(2).mean())


def run(folder: Path, **settings) -> EarlyExitModule:
    """A run of no step: heads as they begin."""
    module = EarlyExitModule(base_model(folder), rank=4, lr=0.0, **settings)
    trainer(max_epochs=1).fit(module, text_data(folder))
    return module


def test_a_new_run_begins_with_the_map_and_one_that_was_validated_first_too(tmp_path: Path):
    data = text_data(tmp_path)
    data.setup("fit")
    batch = TextBatch.collate([data.datasets["train"][row] for row in range(len(data.datasets["train"]))])
    identity, mapped = run(tmp_path, calibrate=0), run(tmp_path)
    for layer in mapped.heads.layers:
        assert torch.equal(identity.heads.translation(layer).weight, torch.eye(32))
        assert distance(mapped, batch, layer) < 0.7 * distance(identity, batch, layer)
    assert same_weights(mapped.heads, run(tmp_path).heads)
    validated = EarlyExitModule(base_model(tmp_path), rank=4, lr=0.0)
    trainer(limit_val_batches=1).validate(validated, text_data(tmp_path), verbose=False)
    trainer(max_epochs=1).fit(validated, text_data(tmp_path))
    assert same_weights(mapped.heads, validated.heads)


def test_a_run_without_a_data_module_begins_with_the_identity(tmp_path: Path):
    data, module = text_data(tmp_path), EarlyExitModule(base_model(tmp_path), rank=4, lr=0.0)
    data.setup("fit")
    trainer(max_epochs=1).fit(module, data.train_dataloader())
    assert torch.equal(module.heads.translation(1).weight, torch.eye(32))


@pytest.mark.parametrize("kind", ["adapter", "block"])
def test_mixed_precision_keeps_the_heads_stream_in_float32(tmp_path: Path, kind: str):
    module = EarlyExitModule(base_model(tmp_path), kind=kind, rank=4, lr=0.01)
    trainer(max_epochs=1, precision="bf16-mixed").fit(module, text_data(tmp_path))
    head, hidden = module.heads.heads["1"], torch.randn(5, 32)
    batch = RaggedBatch.build([BatchItem([1, 2, 3, 4, 5])], None)
    with torch.autocast("cpu", torch.bfloat16):
        out = head(hidden, module.backbone, batch, None)
    assert out.dtype == torch.float32 and bool(out.isfinite().all())
    assert not torch.equal(out, out.bfloat16().float())


def test_calibrate_must_be_a_number_of_tokens(tmp_path: Path):
    with pytest.raises(ValueError, match="calibrate must be a number of tokens, 0 for none, got -1"):
        EarlyExitModule(base_model(tmp_path), calibrate=-1)


def test_a_new_run_can_begin_with_the_heads_of_another(tmp_path: Path):
    settings = {"rank": 4, "draft_vocab": 40}
    first = EarlyExitModule(base_model(tmp_path), lr=0.01, **settings)
    host = trainer(max_epochs=1)
    host.fit(first, text_data(tmp_path))
    host.save_checkpoint(tmp_path / "first.ckpt")
    read_heads(tmp_path / "first.ckpt").save(tmp_path / "bundle")
    other = text_data(tmp_path, [text.lower() for text in TEXTS])
    for start in ("first.ckpt", "bundle"):
        again = EarlyExitModule(base_model(tmp_path), lr=0.0, start=str(tmp_path / start), **settings)
        trainer(max_epochs=1).fit(again, other)
        assert same_weights(again.heads, first.heads) and torch.equal(again.heads.draft_ids, first.heads.draft_ids)


def test_heads_to_begin_with_must_be_such_heads(tmp_path: Path):
    with pytest.raises(ValueError, match="is not a file"):
        EarlyExitModule(base_model(tmp_path), start=str(tmp_path / "nothing.ckpt"))
    host = trainer(max_epochs=1)
    host.fit(EarlyExitModule(base_model(tmp_path), rank=4), text_data(tmp_path))
    host.save_checkpoint(tmp_path / "first.ckpt")
    with pytest.raises(ValueError, match="rank must be 4, as in the checkpoint, got 5"):
        trainer().fit(
            EarlyExitModule(base_model(tmp_path), rank=5, start=str(tmp_path / "first.ckpt")), text_data(tmp_path)
        )
