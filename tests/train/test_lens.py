"""The affine map that heads begin with is the best one, and a new run begins with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fitting import base_model, same_weights, saver, text_data, trainer
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


def test_a_new_run_begins_with_the_map_and_a_resumed_one_goes_on_with_its_own(tmp_path: Path):
    data = text_data(tmp_path)
    data.setup("fit")
    batch = TextBatch.collate([data.datasets["train"][row] for row in range(len(data.datasets["train"]))])
    identity, mapped = run(tmp_path, calibrate=0), run(tmp_path)
    for layer in mapped.heads.layers:
        assert torch.equal(identity.heads.translation(layer).weight, torch.eye(32))
        assert distance(mapped, batch, layer) < 0.7 * distance(identity, batch, layer)
    assert same_weights(mapped.heads, run(tmp_path).heads)
    saving = trainer(max_epochs=1, enable_checkpointing=True, callbacks=[saver(tmp_path / "saved")])
    first = EarlyExitModule(base_model(tmp_path), rank=4, lr=0.01)
    saving.fit(first, text_data(tmp_path))
    last = max((tmp_path / "saved").iterdir(), key=lambda path: path.stat().st_mtime)
    resumed = EarlyExitModule(base_model(tmp_path), rank=4, lr=0.01)
    trainer(max_epochs=1).fit(resumed, text_data(tmp_path), ckpt_path=last, weights_only=True)
    assert same_weights(resumed.heads, first.heads)
