"""`speclight rollout`: draw and reward answers once, and keep their records to train verifiers on.

One file a batch of prompts. A run that was stopped goes on with the next one.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..infer.build import option

if TYPE_CHECKING:
    from .diversed import DiversedModule
    from .task_data import TaskDataModule

FACTS = "rollouts.json"


@dataclass(kw_only=True)
class RolloutOptions:
    """What is answered, by which models, and where the records go."""

    model: str = option(..., "hub id or folder of the target")
    data: str = option(..., "rows of the task: a file, a folder or a data set's name")
    output: str = option(..., "folder; a second run continues it")
    method: Literal["early-exit", "draft-model"] = option("early-exit", "what drafts")
    bundle: str | None = option(None, "exit heads; the model's own norm if unset")
    draft_layer: int | None = option(None, "exit that drafts; if unset the bundle's lowest, or an eighth")
    draft_model: str | None = option(None, "the smaller model of method draft-model")
    head: str | None = option(None, "ensemble head to draw under; a new one of --initial-weight if unset")
    initial_weight: float = option(0.5, "w of a new head")
    task: str = option("gsm8k", "gsm8k, cnndm, xsum, mbpp, humaneval, wmt16 or plain")
    reward: str | None = option(None, "numbers, rouge2, exact or bleu; the task's own if unset")
    chat: bool = option(False, "the prompt is a user's message")
    limit: int | None = option(None, "only the first rows")
    batch_prompts: int = option(8, "prompts of one file")
    samples: int = option(4, "answers for each prompt")
    max_new_tokens: int = option(128, "of an answer")
    num_draft: int = option(5, "tokens drafted at once")
    max_num_seqs: int = option(64, "answers drawn at once")
    dtype: Literal["auto", "float32", "bfloat16"] = option("auto", "auto: the checkpoint's own")
    kv_memory: float = option(2.0, "GiB for the key-value cache")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    seed: int = option(0, "of the answers")
    trust_remote_code: bool = option(False, "run code that comes with the checkpoint")


def rollout(options: RolloutOptions) -> None:
    """Raises ValueError for whatever is not valid; all of it is checked before weights are read."""
    from tqdm import tqdm

    module, data = _module(options), _data(options)
    folder = Path(options.output).expanduser()
    facts = _facts(options, module, data.datasets["train"].fingerprint())
    _check_folder(folder, facts)
    rows = data.datasets["train"]
    starts = range(0, len(rows), options.batch_prompts)
    for number, start in enumerate(tqdm(starts, unit="batch", disable=None)):
        path = folder / f"rollouts-{number:05d}.safetensors"
        if not path.exists():
            batch = data.collate([rows[index] for index in range(start, min(start + options.batch_prompts, len(rows)))])
            module.roll_out(batch, 0, options.samples, data.judge).save(path, facts)
    print(f"speclight: {folder} holds {len(starts)} files of rollouts", file=sys.stderr)


def _module(options: RolloutOptions) -> DiversedModule:
    from ..modules.bundle import HeadBundle
    from ..modules.ensemble_head import EnsembleHead
    from .diversed import DiversedModule

    shared: tuple[str, ...] = (
        "model",
        "method",
        "bundle",
        "draft_layer",
        "draft_model",
        "initial_weight",
        "samples",
        "max_new_tokens",
    )
    shared += ("num_draft", "max_num_seqs", "dtype", "kv_memory", "device", "seed", "trust_remote_code")
    module = DiversedModule(**{name: getattr(options, name) for name in shared})
    module.setup("fit")
    if options.head is not None:
        bundle = HeadBundle.load(options.head, module.base_fingerprint)
        head = EnsembleHead.from_bundle(bundle)
        if bundle.config["draft"] != module.draft:
            raise ValueError(f"head {options.head!r} is for the draft {bundle.config['draft']}, not {module.draft}")
        module.heads = head
    return module


def _data(options: RolloutOptions) -> TaskDataModule:
    from .rewards import reward
    from .task_data import TaskDataModule

    chosen = None if options.reward is None else reward(options.reward)
    data = TaskDataModule(
        options.model,
        options.data,
        task=options.task,
        reward=chosen,
        chat=options.chat,
        limit=options.limit,
        batch_prompts=options.batch_prompts,
    )
    data.setup("fit")
    return data


def _facts(options: RolloutOptions, module: DiversedModule, data: str) -> dict[str, str]:
    """What rollouts may only be used with, and how they were made. data: fingerprint of the prompts."""
    aside = ("output", "limit", "max_num_seqs", "kv_memory", "device", "data")
    settings = {name: value for name, value in vars(options).items() if name not in aside}
    weights = b"".join(tensor.detach().numpy().tobytes() for tensor in module.head.state_dict().values())
    made: dict[str, Any] = {
        "base_fingerprint": module.base_fingerprint,
        "draft": json.dumps(module.draft),
        "head": hashlib.sha256(weights).hexdigest()[:16],
        "data": data,
        "settings": json.dumps(settings),
    }
    return made


def _check_folder(folder: Path, facts: dict[str, str]) -> None:
    from ..infer.files import replace_file

    known = folder / FACTS
    if known.exists():
        before = json.loads(known.read_text("utf-8"))
        changed = [name for name, value in facts.items() if before.get(name) != value]
        if changed:
            raise ValueError(
                f"output {str(folder)!r} was made with other settings ({', '.join(changed)}); choose another"
            )
        return
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"output {str(folder)!r} is not empty and holds other files; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(known, (json.dumps(facts, indent=1) + "\n").encode())
