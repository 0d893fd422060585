"""Tiny training runs: texts, data modules and trainers on CPU, without loggers and bars."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from checkpoint import save_tiny
from lightning.pytorch.callbacks import ModelCheckpoint
from speclight.train.data import TextDataModule

TEXTS = [f"{chr(65 + index) * (2 + index % 4)}, text {index}" for index in range(10)]
"""Ten texts of different lengths."""


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """Each rank of a run writes the same file, and none may read half of another's."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    partial.replace(path)
    return str(path)


def base_model(folder: Path, **settings: Any) -> str:
    """The folder's tiny model, made when it is first asked for."""
    if not (folder / "model").exists():
        save_tiny(folder / "model", **settings)
    return str(folder / "model")


def text_data(folder: Path, texts: list[str] = TEXTS, val: list[str] | None = None, **settings: Any) -> TextDataModule:
    """The same texts to train and validate on, unless `val` are given; two rows a batch, one text a row."""
    path = write_rows(folder / "train.jsonl", [{"text": text} for text in texts])
    held = path if val is None else write_rows(folder / "val.jsonl", [{"text": text} for text in val])
    longest = 1 + max(len(text) for text in [*texts, *(val or [])])
    settings = {"row_tokens": longest, "batch_rows": 2, "seed": 3} | settings
    return TextDataModule(base_model(folder), path, held, held, **settings)


def prompts_file(folder: Path, count: int = 5) -> str:
    return write_rows(folder / "prompts.jsonl", [{"prompt": text} for text in TEXTS[:count]])


def trainer(**settings: Any) -> pl.Trainer:
    """Two epochs and no validation in between, unless settings say otherwise."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    length = {"max_epochs": 2, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    return pl.Trainer(**(quiet | length | {"accelerator": "cpu", "devices": 1} | settings))


def saver(folder: Path) -> ModelCheckpoint:
    """Saves `step=N.ckpt` after every step."""
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)


def same_weights(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    """Bit for bit."""
    one, two = first.state_dict(), second.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
