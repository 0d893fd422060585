"""The verifier's training: only the head learns, runs resume bit for bit, and what is exported serves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint import save_tiny
from fitting import TEXTS, same_weights, saver, trainer, write_rows
from speclight.infer.cli import main
from speclight.modules.bundle import HeadBundle
from speclight.train.checkpoint import read_checkpoint
from speclight.train.diversed import VALIDATION, DiversedModule
from speclight.train.export import EnsembleTrial
from speclight.train.reinforce import Budget, Reinforce, log_mixture
from speclight.train.reward_function import RewardFunction
from speclight.train.rollout import Rollouts
from speclight.train.task_data import RolloutBatch, RolloutDataModule, TaskDataModule


class Letters(RewardFunction):
    """The share of letters, in [0, 1]."""

    name = "letters"

    def score(self, answers):
        return [sum(c.isalpha() for c in one.text) / max(1, len(one.text)) for one in answers]


def module(folder: Path, **settings) -> DiversedModule:
    given = {"samples": 2, "max_new_tokens": 12, "num_draft": 3, "lr": 0.02, "dtype": "float32", "kv_memory": 0.05}
    return DiversedModule(str(folder / "model"), **(given | settings))


def data(folder: Path, **settings) -> TaskDataModule:
    path = write_rows(folder / "rows.jsonl", [{"prompt": text, "reference": "x"} for text in TEXTS[:6]])
    given = {"val": path, "task": "plain", "reward": Letters(), "batch_prompts": 2, "seed": 3}
    return TaskDataModule(str(folder / "model"), path, **(given | settings))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    save_tiny(folder / "model")
    save_tiny(folder / "draft", seed=5, num_hidden_layers=1)
    run = trainer(default_root_dir=folder, max_epochs=1, limit_val_batches=1.0)
    trained = module(folder, acceptance_weight=0.5)
    run.fit(trained, datamodule=data(folder))
    run.save_checkpoint(folder / "head.ckpt")
    (folder / "metrics.json").write_text(json.dumps({k: float(v) for k, v in run.callback_metrics.items()}))
    return folder


def test_only_the_head_is_trained_and_saved(home):
    checkpoint = read_checkpoint(home / "head.ckpt", "ensemble-head")
    assert all(name.startswith("heads.") for name in checkpoint["state_dict"])
    assert sum(tensor.numel() for tensor in checkpoint["state_dict"].values()) < 400
    assert bool(checkpoint["state_dict"]["heads.output.weight"].any())
    record = checkpoint["speclight"]
    assert record["draft"] == {"method": "early-exit", "layer": 1, "bundle": None, "digest": None}


def test_what_is_logged_says_what_a_user_has_to_watch(home):
    logged = json.loads((home / "metrics.json").read_text())
    for name in ("reward", "acceptance", "w", "w_10", "w_90", "tv", "clip_fraction", "grad_norm", "lambda"):
        assert f"train/{name}" in logged
    for name in ("reward", "acceptance", "mat", "tv", "loss"):
        assert f"val/{name}" in logged
    assert 0 < logged["train/w"] < 1 and logged["train/grad_norm"] > 0 and 1 <= logged["val/mat"] <= 4


def improved(rollouts: Rollouts, folder: Path, strength: float) -> float:
    """Mean 1 - w TV of the same tokens after some steps on them."""
    one = module(folder, acceptance_weight=strength, lr=0.05)
    run = trainer(default_root_dir=folder, max_epochs=3)
    run.fit(one, datamodule=StoredOnce(rollouts))
    with torch.no_grad():
        return float((1 - one.head(rollouts.draft, rollouts.target) * rollouts.tv).mean())


class StoredOnce(RolloutDataModule):
    """One step an epoch, always of the same rollouts."""

    def __init__(self, rollouts: Rollouts) -> None:
        super().__init__("unused", "unused")
        self.rollouts = rollouts

    def setup(self, stage=None) -> None: ...

    def train_dataloader(self):
        return torch.utils.data.DataLoader([self.rollouts], batch_size=1, collate_fn=RolloutBatch.collate)

    def state_dict(self):
        return {}


@pytest.fixture(scope="module")
def rollouts(home) -> Rollouts:
    one, rows = module(home, device="cpu"), data(home)
    one.setup("fit")
    rows.setup("fit")
    batch = rows.collate([rows.datasets["train"][index] for index in range(6)])
    return one.roll_out(batch, 0, 4, rows.judge)


def test_a_rollout_records_the_law_that_it_was_drawn_from(home, rollouts):
    assert len(rollouts.rewards) == 24 and rollouts.groups.tolist() == [i for i in range(6) for _ in range(4)]
    assert (rollouts.text.diff() >= 0).all() and 0 < len(rollouts) <= int(rollouts.lengths.sum()) - 24
    assert bool(((rollouts.p > 0) & (rollouts.q > 0) & (rollouts.tv >= 0) & (rollouts.tv <= 1)).all())
    torch.testing.assert_close(rollouts.weight, torch.full_like(rollouts.weight, 0.5))
    expected = 0.5 * rollouts.p + 0.5 * rollouts.q
    torch.testing.assert_close(rollouts.log_prob, expected.log())
    assert rollouts.counts.distance == pytest.approx(float((0.5 * rollouts.tv).sum()), rel=1e-4)
    assert rollouts.without_states().draft.untyped_storage().nbytes() == 0


def test_the_ratio_is_one_before_the_first_update(home, rollouts):
    """What the head says of the recorded states is what the engine drew from."""
    one = module(home, device="cpu", lr=0.0, inner_epochs=1, minibatches=1, acceptance_weight=0.0)
    with torch.no_grad():
        one.setup("fit")
        now = log_mixture(one.head(rollouts.draft, rollouts.target), rollouts.p, rollouts.q)
        torch.testing.assert_close(now, rollouts.log_prob, rtol=0, atol=2e-6)
        log_p, advantages = rollouts.p.log(), torch.randn(len(rollouts))
        loss, parts = one._loss(rollouts, torch.arange(len(rollouts)), rollouts.log_prob, log_p, advantages)
    assert parts["clip_fraction"] == 0.0
    assert float(loss) == pytest.approx(-float(advantages.sum()), abs=1e-3)


def test_raising_lambda_raises_acceptance(home, rollouts):
    none, some, much = (improved(rollouts, home, strength) for strength in (0.0, 0.3, 20.0))
    start = float((1 - 0.5 * rollouts.tv).mean())
    assert none < some < much and much > start + 0.1


@pytest.mark.parametrize("direction", [1.0, -1.0])
def test_the_head_moves_towards_what_is_rewarded(home, rollouts, direction):
    """Texts whose tokens the target likes better than the draft does have the larger, or the smaller, rewards."""
    slope = (rollouts.p - rollouts.q) / rollouts.log_prob.exp()  # of log v by w
    liked = torch.zeros(len(rollouts.rewards)).index_add_(0, rollouts.text, slope)
    judged = replace(rollouts, rewards=direction * (liked > liked.median()).float())
    one = module(home, acceptance_weight=0.0, lr=0.05)
    trainer(default_root_dir=home, max_epochs=3).fit(one, datamodule=StoredOnce(judged))
    with torch.no_grad():
        moved = float((one.head(rollouts.draft, rollouts.target) - 0.5) @ slope)
    assert direction * moved > 0


def test_rewards_belong_to_their_texts_and_rows(home):
    one, rows = module(home, device="cpu"), data(home)
    one.setup("fit")
    rows.setup("fit")
    batch = rows.collate([rows.datasets["train"][index] for index in (3, 1)])
    seen: list[tuple[str, str]] = []

    def judge(texts, judged_rows):
        seen.extend((text, row["prompt"]) for text, row in zip(texts, judged_rows, strict=True))
        return [float(place) for place in range(len(texts))]

    found = one.roll_out(batch, 0, 2, judge)
    assert found.rewards.tolist() == [0.0, 1.0, 2.0, 3.0] and found.groups.tolist() == [3, 3, 1, 1]
    assert [prompt for _, prompt in seen] == [TEXTS[3], TEXTS[3], TEXTS[1], TEXTS[1]]
    texts = [text for text, _ in seen]
    alone = one.roll_out(rows.collate([rows.datasets["train"][1]]), 0, 2, lambda texts, _: seen.append(texts) or [0, 0])
    assert seen[-1] == texts[2:] and len(alone.rewards) == 2


@pytest.mark.parametrize("budget", [Budget("tv", 0.1), Budget("reward", 0.9)])
def test_a_budget_turns_lambda_by_what_a_step_measured(home, rollouts, budget):
    one = module(home, acceptance_weight=2.0, budget=budget)
    trainer(default_root_dir=home, max_epochs=1).fit(one, datamodule=StoredOnce(rollouts))
    measured = float(rollouts.rewards.mean()), float((0.5 * rollouts.tv).mean())
    assert one.strength == pytest.approx(budget.turned(2.0, *measured), rel=1e-4) != 2.0


def test_validation_reports_the_distance_of_what_was_emitted(home):
    one, source = module(home), data(home)
    run = trainer(default_root_dir=home, limit_val_batches=1.0)
    (figures,) = run.validate(one, datamodule=source, verbose=False)
    batches = [source.collate([source.datasets["val"][i] for i in pair]) for pair in ((0, 1), (2, 3), (4, 5))]
    again = [one.roll_out(batch, VALIDATION, 1, source.judge) for batch in batches]
    emitted = sum(int(part.lengths.sum()) for part in again)
    distance = sum(float(((1.0 - part.weight) * part.tv).sum()) for part in again)
    assert figures["val/tv"] == pytest.approx(distance / emitted, rel=1e-4)
    assert figures["val/reward"] == pytest.approx(float(torch.cat([part.rewards for part in again]).mean()), rel=1e-5)


def test_every_inner_epoch_sees_every_minibatch(home, rollouts):
    one = module(home, inner_epochs=3, minibatches=2)
    run = trainer(default_root_dir=home, max_epochs=2)
    run.fit(one, datamodule=StoredOnce(rollouts))
    assert run.global_step == 2 * 3 * 2


def test_seeds_are_the_prompts_own(home, rollouts):
    """The same answers whatever else is in the batch; others in another epoch."""
    one, rows = module(home, device="cpu"), data(home)
    one.setup("fit")
    rows.setup("fit")
    batch = rows.collate([rows.datasets["train"][4]])
    alone, later = (one.roll_out(batch, epoch, 4, rows.judge) for epoch in (0, 1))
    torch.testing.assert_close(alone.p, rollouts.p[(rollouts.text >= 16) & (rollouts.text < 20)], rtol=1e-4, atol=1e-6)
    assert alone.p.tolist() != later.p.tolist()


def test_prompts_that_leave_no_room_are_left_out_and_named(home, tmp_path, caplog):
    """Half of a step's prompts, then all of them: training goes on, and says once which."""
    rows = [{"prompt": text, "reference": "x"} for text in [TEXTS[0], "a" * 900, "b" * 900, "c" * 900]]
    source = TaskDataModule(
        str(home / "model"), write_rows(tmp_path / "rows.jsonl", rows), task="plain", reward=Letters(), batch_prompts=2
    )
    run, one = trainer(default_root_dir=tmp_path, max_epochs=2), module(home)
    run.fit(one, datamodule=source)
    assert run.global_step > 0
    said = [record.getMessage() for record in caplog.records if "is left out" in record.getMessage()]
    assert sorted(text.split()[2] for text in said) == ["1", "2", "3"]
    assert all(text.startswith("training prompt") and "tokens" in text for text in said)


def test_a_run_in_which_no_prompt_fits_ends_with_an_error(home, tmp_path):
    rows = [{"prompt": letter * 900, "reference": "x"} for letter in "ab"]
    source = TaskDataModule(
        str(home / "model"), write_rows(tmp_path / "rows.jsonl", rows), task="plain", reward=Letters(), batch_prompts=2
    )
    with pytest.raises(ValueError, match="no training prompt leaves room"):
        trainer(default_root_dir=tmp_path, max_epochs=1).fit(module(home), datamodule=source)


def test_a_run_resumes_in_mid_epoch_bit_for_bit(home, tmp_path):
    settings = {"minibatches": 2, "inner_epochs": 1, "budget": Budget("tv", 0.1)}
    whole = module(home, **settings)
    trainer(default_root_dir=tmp_path, callbacks=[saver(tmp_path)], enable_checkpointing=True).fit(
        whole, datamodule=data(home)
    )
    saved = sorted(tmp_path.glob("step=*.ckpt"), key=lambda file: int(file.stem.partition("=")[2]))
    again = module(home, **settings)
    trainer(default_root_dir=tmp_path).fit(again, datamodule=data(home), ckpt_path=str(saved[1]))
    assert same_weights(whole.head, again.head)
    assert again.strength == whole.strength != 0.05


@pytest.mark.parametrize("change", [{"norm": False}, {"hidden": 4}, {"draft_layer": 2}])
def test_a_checkpoint_of_another_head_or_draft_is_refused(home, change):
    with pytest.raises(ValueError, match=next(iter(change)).removeprefix("draft_")):
        trainer(default_root_dir=home).fit(
            module(home, **change), datamodule=data(home), ckpt_path=str(home / "head.ckpt")
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 0}, "samples must be at least 1"),
        ({"samples": 1, "estimator": Reinforce("reinforce++-baseline")}, "samples must be at least 2"),
        ({"initial_weight": 0.0}, "initial_weight"),
        ({"lr": -1.0}, "lr must be"),
        ({"grad_clip": 0.0}, "grad_clip must be above 0"),
    ],
)
def test_settings_are_checked_before_anything_is_read(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        module(tmp_path, **settings)


def test_an_exit_that_is_not_there_is_refused_before_weights(home):
    with pytest.raises(ValueError, match=r"draft_layer.*got 9"):
        module(home, draft_layer=9, device="cpu").setup("fit")


def test_what_is_exported_serves(home, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(EnsembleTrial, "run_in_new_process", lambda self, folder: self.run(str(folder)))
    head, model = str(tmp_path / "head"), str(home / "model")
    assert main(["export", "--ckpt", str(home / "head.ckpt"), "--output", head, "--max-new-tokens", "8"]) == 0
    bundle = HeadBundle.load(head)
    assert bundle.card["trial"]["distance"] > 0 and bundle.base_model == "model"
    assert main(["inspect", head]) == 0
    use = ["generate", "--model", model, "--method", "diversed", "--target.head", head, "--prompt", "abc", "--dtype"]
    assert main([*use, "float32", "--max-new-tokens", "30", "--temperature", "1", "--seed", "1"]) == 0
    assert "lossy: 0." in capsys.readouterr().err
    assert main(["verify", "--model", model, "--method", "diversed", "--target.head", head]) == 2
    assert "is lossy" in capsys.readouterr().err
    assert main([*use, "float32", "--target.head", model]) == 2
    save_tiny(tmp_path / "other", seed=9)
    assert main(["generate", "--model", str(tmp_path / "other"), *use[3:], "float32"]) == 2
    assert "belongs to another base model" in capsys.readouterr().err


def test_a_draft_model_can_be_what_is_trusted(home, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(EnsembleTrial, "run_in_new_process", lambda self, folder: self.run(str(folder)))
    run = trainer(default_root_dir=tmp_path, max_epochs=1)
    run.fit(module(home, method="draft-model", draft_model=str(home / "draft")), datamodule=data(home))
    run.save_checkpoint(tmp_path / "head.ckpt")
    flags = ["--draft-model", str(home / "draft"), "--max-new-tokens", "8"]
    head = str(tmp_path / "head")
    assert main(["export", "--ckpt", str(tmp_path / "head.ckpt"), "--output", head, *flags]) == 0
    use = ["generate", "--model", str(home / "model"), "--method", "diversed", "--target.head", head, "--prompt", "abc"]
    assert main([*use, *flags, "--dtype", "float32"]) == 0
    assert main([*use, "--dtype", "float32"]) == 2  # without the draft model
    save_tiny(tmp_path / "other", seed=8, num_hidden_layers=1)
    capsys.readouterr()
    assert main([*use, "--draft-model", str(tmp_path / "other")]) == 2
    assert "is not the one that target.head" in capsys.readouterr().err


def test_rollouts_are_stored_once_and_trained_on_without_a_model(home, tmp_path, monkeypatch, capsys):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": text, "reference": "1"} for text in TEXTS[:5]])
    flags = ["--model", str(home / "model"), "--data", path, "--task", "plain", "--reward", "numbers", "--dtype"]
    flags += ["float32", "--max-new-tokens", "8", "--samples", "2", "--batch-prompts", "2"]
    out = tmp_path / "rollouts"
    assert main(["rollout", *flags, "--output", str(out)]) == 0
    files = sorted(out.glob("*.safetensors"))
    assert len(files) == 3
    before = files[0].read_bytes()
    files[1].unlink()
    assert main(["rollout", *flags, "--output", str(out)]) == 0  # makes what is missing, and only that
    assert files[0].read_bytes() == before and files[1].exists()
    assert main(["rollout", *flags, "--output", str(out), "--seed", "5"]) == 2
    assert "other settings (settings)" in capsys.readouterr().err
    assert main(["rollout", *flags, "--output", str(out), "--limit", "3"]) == 2
    assert "other settings (data)" in capsys.readouterr().err
    one = module(home, acceptance_weight=1.0)
    monkeypatch.setattr("speclight.train.diversed.build_engine", None)  # nothing may load a model
    trainer(default_root_dir=tmp_path, max_epochs=1).fit(
        one, datamodule=RolloutDataModule(str(home / "model"), str(out))
    )
    assert bool(one.head.output.weight.any())
    with pytest.raises(ValueError, match="of the draft"):
        trainer(default_root_dir=tmp_path, max_epochs=1).fit(
            module(home, draft_layer=2), datamodule=RolloutDataModule(str(home / "model"), str(out))
        )
