"""Stored hidden states are those of the model, in the order of the data, and nothing fills the disk unasked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint import save_tiny
from safetensors.torch import load_file, save_file
from speclight.infer.cli import main
from speclight.infer.loading import load_transformers, resolve_model
from speclight.modules.batch import RaggedBatch
from speclight.modules.layered_model import LayeredModel
from speclight.train import states
from speclight.train.data import PackedDataset, TextDataModule, draft_vocabulary
from speclight.train.states import parse_size
from speclight.train.stored import StatesDataModule

LAYERS = [1, 3, 4]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("checkpoints") / "tiny"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """14 texts, of which short ones share a row."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    texts = [chr(ord("A") + index) * (2 + 3 * index % 11) for index in range(14)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def store(model: str, rows: str, output: Path, *flags: str) -> int:
    given = ["--model", model, "--data", rows, "--output", str(output), "--layers", "1,3", "--row-tokens", "12"]
    return main(["states", *given, *flags])


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "SHARD_BYTES", 12_000)


def batches(data: TextDataModule | StatesDataModule, epoch: int = 0) -> list:
    data.setup("fit")
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    return list(loader)


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("epoch", [0, 3])
def test_a_run_on_stored_states_sees_the_batches_of_a_run_on_the_data_with_the_models_states(
    model: str, rows: str, tmp_path: Path, epoch: int
) -> None:
    """Fails when a row of states is one document or one shard off."""
    assert store(model, rows, tmp_path / "states") == 0
    assert len(list((tmp_path / "states").glob("*.safetensors"))) > 2
    online = batches(TextDataModule(model, rows, row_tokens=12, batch_rows=2, seed=5), epoch)
    stored = batches(StatesDataModule(model, str(tmp_path / "states"), batch_rows=2, seed=5), epoch)
    target = LayeredModel(load_transformers(resolve_model(model)), fast=False)
    for expected, found in zip(online, stored, strict=True):
        assert found.documents == expected.documents
        assert torch.equal(found.next_ids, expected.next_ids) and torch.equal(found.mask, expected.mask)
        assert expected.states is None and sorted(found.states) == LAYERS
        batch = RaggedBatch.build(expected.items(), None)
        with torch.no_grad():
            hidden = target.embed(batch)
            for before, layer in zip([0, *LAYERS], LAYERS, strict=False):
                hidden = target.run(hidden, batch, None, before, layer)
                torch.testing.assert_close(found.states[layer], hidden)


def test_the_data_set_is_the_packed_one_for_everything_else(model: str, rows: str, tmp_path: Path) -> None:
    """Resuming, draft vocabularies and filled-up ranks go by these."""
    store(model, rows, tmp_path / "states")
    data, stored = TextDataModule(model, rows, row_tokens=12), StatesDataModule(model, str(tmp_path / "states"))
    for module in (data, stored):
        module.setup("fit")
    ours, theirs = stored.datasets["train"], data.datasets["train"]
    assert isinstance(ours, PackedDataset) and len(ours) == len(theirs) and ours.summary == theirs.summary
    assert ours.fingerprint() == theirs.fingerprint()
    assert draft_vocabulary(ours, 20, 96).tolist() == draft_vocabulary(theirs, 20, 96).tolist()
    uncounted = ours[len(ours) + 2]
    assert not any(on for document in uncounted for on in document.supervised)
    assert torch.equal(uncounted[0].states[4], ours[2][0].states[4])


@pytest.mark.usefixtures("small_shards")
def test_a_run_that_was_killed_goes_on_with_the_next_shard(
    model: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store(model, rows, tmp_path / "whole")
    written: list[str] = []
    write = states._write_shard

    def dies(path: Path, tensors: dict) -> None:
        if len(written) == 2:
            save_file(tensors, path.with_name(path.name + ".partial"))
            raise KeyboardInterrupt
        written.append(path.name)
        write(path, tensors)

    monkeypatch.setattr(states, "_write_shard", dies)
    assert store(model, rows, tmp_path / "killed") == 130
    with pytest.raises(ValueError, match="are not complete; the same `speclight states` goes on"):
        StatesDataModule(model, str(tmp_path / "killed")).setup("fit")
    written.clear()
    monkeypatch.setattr(states, "_write_shard", lambda path, tensors: (written.append(path.name), write(path, tensors)))
    assert store(model, rows, tmp_path / "killed") == 0
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "killed").iterdir()} == whole
    assert sorted(written) == sorted(whole)[3:]
    assert store(model, rows, tmp_path / "killed") == 0
    assert "complete: nothing left to do" in capsys.readouterr().err


def test_what_does_not_fit_is_refused_with_its_size_before_weights_are_read(
    model: str, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = shutil.copytree(model, tmp_path / "model")
    (broken / "model.safetensors").write_bytes(b"")
    assert store(str(broken), rows, tmp_path / "states", "--max-disk", "20KB") == 2
    printed = capsys.readouterr().err
    assert "106 tokens at layers 1, 3, 4 in float32 take about 42.4 KB" in printed
    assert "max_disk must be at least 42.4 KB for 106 tokens at 3 layers, got 20.0 KB" in printed
    assert not (tmp_path / "states").exists()


def test_what_is_stored_is_as_large_as_was_said(model: str, rows: str, tmp_path: Path) -> None:
    store(model, rows, tmp_path / "states", "--states-dtype", "bfloat16")
    stored = sum(path.stat().st_size for path in (tmp_path / "states").glob("*.safetensors"))
    assert 106 * 3 * 32 * 2 < stored < 106 * (3 * 32 * 2 + states.BYTES_PER_TOKEN)
    (shard,) = (tmp_path / "states").glob("*.safetensors")
    assert load_file(shard)["layer.4"].dtype == torch.bfloat16


def test_states_of_another_model_are_refused_with_both_fingerprints(model: str, rows: str, tmp_path: Path) -> None:
    store(model, rows, tmp_path / "states")
    other = save_tiny(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match=r"belong to another base model: they are of [0-9a-f]{64} .* is [0-9a-f]{64}"):
        StatesDataModule(str(other), str(tmp_path / "states")).setup("fit")


def test_a_shard_that_lacks_or_changed_is_named(model: str, rows: str, tmp_path: Path) -> None:
    store(model, rows, tmp_path / "states")
    (shard,) = (tmp_path / "states").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"states-00000\.safetensors must have \d+ bytes"):
        StatesDataModule(model, str(tmp_path / "states")).setup("fit")
    with pytest.raises(ValueError, match="holds no stored states"):
        StatesDataModule(model, str(tmp_path)).setup("fit")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layers", "1,9"], "layers must be different numbers from 1 to 4, such as 4,8, got '1,9'"),
        (["--layers", "one"], "layers must be"),
        (["--max-disk", "20 parsecs"], "max_disk must be a number of bytes with a unit"),
        (["--batch-rows", "0"], "batch_rows must be at least 1"),
        (["--data", "/no/such.jsonl"], "/no/such.jsonl does not exist"),
        (["--layers", "1,2"], "was written with layers=[1, 3, 4], now it is [1, 2, 4]"),
        (["--output", "{tmp}/mine"], "is not empty and holds no stored states"),
        (["--output", "{tmp}/mine", "--overwrite"], "is not empty and holds no stored states"),
    ],
)
def test_a_mistake_is_refused_and_what_is_there_stays(
    model: str, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").touch()
    store(model, rows, tmp_path / "states")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    capsys.readouterr()
    assert store(model, rows, tmp_path / "states", *(flag.format(tmp=tmp_path) for flag in flags)) == 2
    assert message in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_sizes_are_read_as_people_write_them() -> None:
    assert [parse_size(text, "x") for text in ("20GB", "1.5 tb", "3GiB", "7")] == [20e9, 1.5e12, 3 * 2**30, 7]


@pytest.mark.usefixtures("small_shards")
def test_shards_that_are_gone_or_cut_off_are_made_again(model: str, rows: str, tmp_path: Path) -> None:
    assert store(model, rows, tmp_path / "st") == 0
    shards = sorted((tmp_path / "st").glob("states-*.safetensors"))
    before = [path.read_bytes() for path in shards]
    shards[0].unlink()
    shards[1].write_bytes(before[1][:500])
    assert store(model, rows, tmp_path / "st") == 0
    assert [path.read_bytes() for path in shards] == before
