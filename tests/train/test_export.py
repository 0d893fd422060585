"""What is exported drafts as what was trained, or there is no export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint import save_tiny
from fitting import TEXTS, prompts_file, text_data, trainer, write_rows
from speclight.infer.cli import main
from speclight.modules.bundle import HeadBundle
from speclight.train import export
from speclight.train.checkpoint import read_heads
from speclight.train.early_exit import EarlyExitModule
from speclight.train.export import Counts, Trial, mismatch
from speclight.train.layer_skip import LayerSkipModule


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tied embeddings, and heads for 40 of its 96 tokens, trained for some steps."""
    folder = tmp_path_factory.mktemp("home")
    save_tiny(folder / "model", tie_word_embeddings=True)
    module = EarlyExitModule(
        str(folder / "model"), [1, 3], ["adapter", "block"], rank=8, draft_vocab=40, lr=0.02, weight_decay=0.01
    )
    run = trainer(default_root_dir=folder, max_epochs=4)
    run.fit(module, datamodule=text_data(folder))
    run.save_checkpoint(folder / "heads.ckpt")
    prompts_file(folder)
    return folder


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process takes seconds; one test has it."""
    monkeypatch.setattr(Trial, "run_in_new_process", lambda self, folder: self.run(folder=folder and str(folder)))


def exported(home: Path, output: Path, *flags: str) -> int:
    given = ["--ckpt", str(home / "heads.ckpt"), "--output", str(output), "--prompts", str(home / "prompts.jsonl")]
    return main(["export", *given, "--max-new-tokens", "12", *flags])


def test_heads_come_back_in_a_new_process_with_equal_logits_and_equal_counts(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails for a draft vocabulary or a tied unembedding that is lost on the way: serving would accept less."""
    assert exported(home, tmp_path / "bundle", "--dtype", "float32") == 0
    stored, trained = HeadBundle.load(tmp_path / "bundle"), read_heads(home / "heads.ckpt")
    assert stored.tensors.keys() == trained.tensors.keys() and len(stored.tensors["draft_ids"]) == 40
    assert all(torch.equal(stored.tensors[name], tensor) for name, tensor in trained.tensors.items())
    printed = capsys.readouterr().err
    assert "exit after layer 1: " in printed and "exit after layer 3: " in printed
    card = stored.card
    assert card["trial"]["prompts"] == "prompts.jsonl" and card["trial"]["exits"].keys() == {"1", "3"}
    assert {"step", "metrics", "training", "versions", "licence"} <= card.keys()


@pytest.mark.usefixtures("in_this_process")
def test_a_bundle_says_what_it_is_and_no_folder_of_its_maker(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exported(home, tmp_path / "bundle") == 0
    assert str(home) not in (tmp_path / "bundle" / "bundle.json").read_text()
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "bundle"), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["base_model"] == "model" and described["config"]["kind"] == ["adapter", "block"]
    assert described["tensors"]["draft_ids"]["shape"] == [40]
    assert main(["inspect", str(tmp_path / "bundle")]) == 0
    assert 'layers: [1, 3]\nkind: ["adapter", "block"]' in capsys.readouterr().out


@pytest.mark.usefixtures("in_this_process")
def test_figures_of_ones_own_go_into_the_card(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    for text, wrong in (("[1]", "must hold a JSON object, got list"), ("{", "cannot be read as JSON")):
        figures.write_text(text)
        assert exported(home, tmp_path / "bundle", "--measured", str(figures)) == 2
        assert wrong in capsys.readouterr().err
    figures.write_text('{"agreement": {"8": 0.4}}')
    assert exported(home, tmp_path / "bundle", "--measured", str(figures)) == 0
    assert HeadBundle.load(tmp_path / "bundle").card["measured"] == {"agreement": {"8": 0.4}}


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("damage", ["draft_ids", "heads.1.down.weight"])
def test_heads_that_draft_otherwise_from_disk_are_not_exported(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    save = HeadBundle.save

    def saves_wrong(self: HeadBundle, folder: Path, overwrite: bool = False) -> None:
        tensor = self.tensors[damage]
        self.tensors[damage] = 95 - tensor.flip(0) if damage == "draft_ids" else -20 * tensor
        save(self, folder, overwrite)

    monkeypatch.setattr(HeadBundle, "save", saves_wrong)
    assert exported(home, tmp_path / "out" / "bundle") == 1
    assert "no bundle was made: the exit after layer 1 comes to" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_rounding_may_move_acceptance_a_little_and_nothing_else_may() -> None:
    trained, near, far = (Counts(1000, accepted, 2000, 1500) for accepted in (500, 455, 440))
    assert mismatch({4: trained}, {4: trained}, {4: trained}) == ""
    assert mismatch({4: trained}, {4: near}, {4: near}) == ""
    assert "0.440 are accepted as stored, 0.500 as trained" in mismatch({4: trained}, {4: far}, {4: far})
    assert "comes to" in mismatch({4: trained}, {4: trained}, {4: near})
    assert "comes to None" in mismatch({4: trained}, {4: trained}, {})


@pytest.mark.usefixtures("in_this_process")
def test_one_changed_byte_or_a_missing_file_of_an_export_is_refused_when_it_is_used(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "bundle"
    exported(home, bundle)
    use = ["generate", "--model", str(home / "model"), "--method", "hispec", "--bundle", str(bundle), "--prompt", "ab"]
    assert main([*use, "--max-new-tokens", "4"]) == 0
    weights = bytearray((bundle / "weights.safetensors").read_bytes())
    weights[-1] ^= 1
    (bundle / "weights.safetensors").write_bytes(weights)
    capsys.readouterr()
    assert main(use) == 2
    assert "is damaged: weights.safetensors changed since it was written (sha256 differs)" in capsys.readouterr().err
    (bundle / "weights.safetensors").unlink()
    assert main(use) == 2
    assert "is incomplete: it has no weights.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "{tmp}/other"], r"belongs to another base model"),
        (["--model", "/no/such"], "model '/no/such' does not exist"),
        (["--ckpt", "/no/such.ckpt"], "checkpoint '/no/such.ckpt' is not a file"),
        (["--ckpt", "{home}/prompts.jsonl"], "cannot be read"),
        (["--output", "{home}"], "is not empty; choose another folder, or --overwrite"),
        (["--output", "{home}", "--overwrite"], "is not empty and holds other files"),
        (["--prompts", "/no/such.jsonl"], "/no/such.jsonl: No such file"),
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
    ],
)
@pytest.mark.usefixtures("in_this_process")
def test_a_mistake_is_refused_and_nothing_is_left(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    save_tiny(tmp_path / "other", seed=5, tie_word_embeddings=True)
    given = [flag.format(tmp=tmp_path, home=home) for flag in flags]
    capsys.readouterr()
    assert exported(home, tmp_path / "bundle", *given) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.usefixtures("in_this_process")
def test_a_model_that_was_trained_to_exit_early_becomes_a_folder_that_generates(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = LayerSkipModule(str(home / "model"), layers=[1, 2], warmup_steps=0, lr=1e-3)
    run = trainer(default_root_dir=tmp_path, max_steps=2)
    run.fit(module, datamodule=text_data(home))
    run.save_checkpoint(tmp_path / "model.ckpt")
    given = ["--ckpt", str(tmp_path / "model.ckpt"), "--output", str(tmp_path / "made"), "--max-new-tokens", "6"]
    assert main(["export", *given]) == 0
    assert "is a model; `speclight generate" in capsys.readouterr().err
    prompts = write_rows(tmp_path / "in.jsonl", [{"prompt": text} for text in TEXTS[:2]])
    for method in ("ar", "hispec"):
        files = ["--input", prompts, "--output", str(tmp_path / f"{method}.jsonl"), "--max-new-tokens", "6"]
        assert main(["generate", "--model", str(tmp_path / "made"), "--method", method, *files]) == 0
    texts = [
        {row["id"]: row["token_ids"] for row in map(json.loads, (tmp_path / f"{method}.jsonl").open())}
        for method in ("ar", "hispec")
    ]
    assert texts[0] == texts[1]


def test_inspect_wants_a_folder_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in (([], "required: bundle"), ([str(tmp_path)], "has no bundle.json"), (["a", "--x"], "--x")):
        assert main(["inspect", *flags]) == 2
        assert message in capsys.readouterr().err


def test_built_in_prompts_are_as_many_as_are_tried() -> None:
    assert len({*export.PROMPTS}) == export.NUM_PROMPTS
