"""The contract between training and inference: trained heads in a folder, and the base model that they belong to.

    weights.safetensors    the tensors
    bundle.json            format version, kind, constructor arguments, the base model's fingerprint, tensors, card
    SHA256SUMS             of both, as `sha256sum -c` reads it

Nothing is pickled, and nothing of the base model is stored. A folder is used as a whole or refused: one changed byte,
a tensor too few or too many, another base model, or a format from the future is enough.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from .checksums import SUMS, check_sums, sums_file
from .fast import FastLinear
from .layered_model import LayeredModel

FORMAT = "speclight head bundle"
FORMAT_VERSION = 1
WEIGHTS, INDEX = "weights.safetensors", "bundle.json"

# --- the bundle ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class HeadBundle:
    """Heads as they are stored.

    kind: what they are, `"exit-heads"`. config: how to build them. tensors: their state dict, copied to the CPU.
    base_fingerprint, base_model: the model they were trained on, `fingerprint` of it and a name for people.
    card: metrics, data, anything else that JSON holds.

    Raises ValueError for config or card that JSON cannot hold, and for tensors with NaN or infinities.
    """

    kind: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    base_fingerprint: str
    base_model: str = ""
    card: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("config", "card"):  # through JSON, so that a bundle in memory is what it is after loading
            object.__setattr__(self, name, json.loads(_json(name, getattr(self, name))))
        tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in self.tensors.items()}
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"tensor {name!r} holds NaN or infinite values, so these heads cannot be used")
        object.__setattr__(self, "tensors", tensors)

    def save(self, folder: str | Path, overwrite: bool = False) -> None:
        """Write the folder; it appears under its name only when complete.

        overwrite: replace a bundle that is there. Anything else that is there is never replaced.

        Raises ValueError when the folder exists and may not be replaced.
        """
        target = Path(folder).expanduser().resolve()
        _check_target(target, overwrite)
        with replaced_folder(target) as new:
            for name, data in self._files().items():
                (new / name).write_bytes(data)

    @classmethod
    def load(cls, folder: str | Path, expected_fingerprint: str | None = None) -> HeadBundle:
        """Read and check a folder. expected_fingerprint: of the model that the heads shall be used on; None: any.

        Raises ValueError for whatever the folder must not be, naming what is wrong.
        """
        folder = Path(folder).expanduser()
        files = _read(folder)
        _check_version(folder, files[INDEX])
        check_sums(f"bundle {str(folder)!r}", _digests(files), files[SUMS], "get it again")
        index = _parse_index(folder, files[INDEX])
        found, base_model = index["base_fingerprint"], index["base_model"]
        if expected_fingerprint is not None:
            _check_base(f"bundle {str(folder)!r}", found, base_model, expected_fingerprint)
        try:
            tensors = safetensors.torch.load(files[WEIGHTS])
        except SafetensorError as error:
            raise ValueError(f"{WEIGHTS} of bundle {str(folder)!r} cannot be read: {error}") from error
        listed = {name: (entry["dtype"], entry["shape"]) for name, entry in index["tensors"].items()}
        check_same_tensors(listed, _signatures(tensors), f"bundle {str(folder)!r}")
        return cls(index["kind"], index["config"], tensors, found, base_model, index["card"])

    def check_base(self, fingerprint: str, where: str = "bundle") -> None:
        """Raise ValueError, naming both fingerprints, for another model than the heads were made for."""
        _check_base(where, self.base_fingerprint, self.base_model, fingerprint)

    def load_into(self, module: nn.Module) -> None:
        """Give a module these tensors, all of them and no others; cast to the module's dtypes.

        Raises ValueError for names or shapes that differ. Nothing of the module's own weights survives a failure.
        """
        state = module.state_dict()  # not copies
        wait_for_weights(module)
        own = {name: ("", list(tensor.shape)) for name, tensor in state.items()}
        check_same_tensors(own, {name: ("", list(t.shape)) for name, t in self.tensors.items()}, "bundle")
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(self.tensors[name])

    def describe(self) -> str:
        """Lines for people."""
        size = sum(tensor.nbytes for tensor in self.tensors.values())
        lines = [
            f"{self.kind}, format {FORMAT_VERSION}",
            f"base model: {self.base_model or 'unnamed'}, fingerprint {self.base_fingerprint}",
            *(f"{name}: {json.dumps(value)}" for name, value in self.config.items()),
            f"tensors: {len(self.tensors)}, {size / 1e6:.1f} MB",
            *(f"  {name}  {dtype} {shape}" for name, (dtype, shape) in sorted(_signatures(self.tensors).items())),
            *(f"card {name}: {json.dumps(value)}" for name, value in self.card.items()),
        ]
        return "\n".join(lines)

    def _files(self) -> dict[str, bytes]:
        index = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "kind": self.kind,
            "base_model": self.base_model,
            "base_fingerprint": self.base_fingerprint,
            "config": self.config,
            "tensors": {
                name: {"dtype": dtype, "shape": shape}
                for name, (dtype, shape) in sorted(_signatures(self.tensors).items())
            },
            "card": self.card,
        }
        files = {WEIGHTS: safetensors.torch.save(self.tensors), INDEX: (_json("index", index) + "\n").encode()}
        return files | {SUMS: sums_file(_digests(files))}


@contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """A new folder to fill, which takes the target's place once all went well; if not, what was there stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        new = partial / "new"
        new.mkdir()
        yield new
        if target.exists():
            target.rename(partial / "old")
        new.rename(target)
    finally:
        if (partial / "old").exists() and not target.exists():
            (partial / "old").rename(target)
        shutil.rmtree(partial, ignore_errors=True)


def wait_for_weights(module: nn.Module) -> None:
    """Fill everything that a state dict holds with NaN, integers with -1: weights that are then not loaded show."""
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


Signature = tuple[str, list[int]]
"""dtype and shape of a tensor, `("float32", [1024, 576])`."""


def check_same_tensors(expected: Mapping[str, Signature], found: Mapping[str, Signature], where: str) -> None:
    """Raise ValueError unless both have the same names, dtypes and shapes; `where` begins the message."""
    missing, unexpected = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        raise ValueError(f"{where} lacks the tensors {', '.join(missing)}")
    if unexpected:
        raise ValueError(f"{where} has unexpected tensors: {', '.join(unexpected)}")
    for name, (dtype, shape) in expected.items():
        if found[name] != (dtype, shape):
            wanted, got = f"{dtype} {shape}".strip(), f"{found[name][0]} {found[name][1]}".strip()
            raise ValueError(f"{where}: tensor {name} must be {wanted}, got {got}")


def _signatures(tensors: Mapping[str, Tensor]) -> dict[str, Signature]:
    return {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()}


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must hold what JSON can (no NaN, no objects): {error}") from error


def _check_base(where: str, made_for: str, base_model: str, found: str) -> None:
    if made_for != found:
        raise ValueError(
            f"{where} belongs to another base model: it was made for {made_for}{_in_brackets(base_model)}, "
            f"this model is {found}"
        )


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _check_target(target: Path, overwrite: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"bundle folder {str(target)!r} is a file")
    present = {path.name for path in target.iterdir()}
    if not present:
        return
    others = ", ".join(sorted(present - {WEIGHTS, INDEX, SUMS})[:3])
    if others or not overwrite or INDEX not in present:
        raise ValueError(
            f"bundle folder {str(target)!r} is not empty"
            + (f" and holds other files ({others}); choose another" if others else "; choose another, or overwrite it")
        )


def _read(folder: Path) -> dict[str, bytes]:
    if not (folder / INDEX).is_file():
        raise ValueError(f"bundle {str(folder)!r} is not one: it has no {INDEX}")
    for name in (WEIGHTS, SUMS):
        if not (folder / name).is_file():
            raise ValueError(f"bundle {str(folder)!r} is incomplete: it has no {name}")
    return {name: (folder / name).read_bytes() for name in (WEIGHTS, INDEX, SUMS)}


def _check_version(folder: Path, index: bytes) -> None:
    """Before anything that a later format may do differently. What is no JSON is left to the check of the sums."""
    version = None
    with suppress(ValueError, AttributeError):
        version = json.loads(index).get("version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise ValueError(
            f"bundle {str(folder)!r} has format version {version}; this speclight reads up to {FORMAT_VERSION} "
            "and must be updated"
        )


def _digests(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(files[name]).hexdigest() for name in (WEIGHTS, INDEX)}


def _parse_index(folder: Path, data: bytes) -> dict[str, Any]:
    try:
        index = json.loads(data)
    except ValueError as error:
        raise ValueError(f"{INDEX} of bundle {str(folder)!r} is not JSON: {error}") from error
    keys = {"format", "version", "kind", "base_model", "base_fingerprint", "config", "tensors", "card"}
    if not isinstance(index, dict) or index.get("format") != FORMAT or index.keys() != keys:
        raise ValueError(f"{INDEX} of bundle {str(folder)!r} is not that of a {FORMAT}, version {FORMAT_VERSION}")
    wanted = {"version": int, "kind": str, "base_model": str, "base_fingerprint": str}
    for name, kind in (wanted | dict.fromkeys(("config", "tensors", "card"), dict)).items():
        if not isinstance(index[name], kind):
            raise ValueError(
                f"{INDEX} of bundle {str(folder)!r}: {name} must be a {kind.__name__}, got {index[name]!r:.80}"
            )
    return index


# --- the base model's fingerprint ---------------------------------------------------------------------------------

SAMPLED_ROWS = 16
"""Rows of each matrix that are hashed, evenly spaced; vectors are hashed whole."""

CONFIG_KEYS = (
    "model_type",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "layer_types",
    "sliding_window",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "hidden_act",
    "hidden_activation",
    "activation_function",
    "do_layer_norm_before",
    "tie_word_embeddings",
)
"""What a configuration says about the computation that shapes do not. By name, since whole configurations grow with
every transformers version."""

_NAME = re.compile(
    r"(?:^|\.)((?:layers\.\d+\..+|(?:embed_tokens|embed_positions|project_in|project_out|norm|final_layer_norm|lm_head)"
    r"\.(?:weight|bias)))$"
)


def fingerprint(model: LayeredModel | PreTrainedModel) -> str:
    """Which base model this is: 64 hexadecimal digits, equal to `fingerprint_checkpoint` of where it came from.

    It covers names and shapes of all tensors, the values of every vector and of 16 rows of every matrix, and those
    settings that shapes do not show. Values are compared as bfloat16, so a checkpoint keeps its fingerprint when loaded
    in float64, float32 or bfloat16; float16 only when that is its own dtype. Any training of a matrix as a whole shows;
    editing the embeddings of single tokens need not.

    Raises ValueError for LayeredModel(fast=True), whose weights are repacked: take it before, or from the folder.
    """
    if not isinstance(model, LayeredModel):
        return fingerprint_tensors(model.config, model.state_dict())
    if any(isinstance(module, FastLinear) for module in model.modules()):
        raise ValueError(
            "a fast model's weights are repacked and have no fingerprint; take it from the transformers model before, "
            "or with fingerprint_checkpoint from the folder"
        )
    return fingerprint_tensors(model.config, model.decoder.state_dict() | {"lm_head.weight": model.head.weight})


def fingerprint_tensors(config: Any, tensors: Mapping[str, Tensor]) -> str:
    """`fingerprint` of a transformers configuration and a state dict."""

    def read(name: str, rows: list[int] | None) -> Tensor:
        return tensors[name].detach() if rows is None else tensors[name].detach()[rows]

    return _digest(config, {name: list(tensor.shape) for name, tensor in tensors.items()}, read)


def fingerprint_checkpoint(folder: str | Path) -> str:
    """`fingerprint` of a folder of safetensors, of which only the sampled rows are read.

    Raises ValueError for a folder without safetensors: load it, and take the model's `fingerprint`.
    """
    folder = Path(folder).expanduser()
    config = AutoConfig.from_pretrained(folder)
    with ExitStack() as stack:
        slices: dict[str, Any] = {}
        for path in _weight_files(folder):
            file = stack.enter_context(safe_open(path, framework="pt"))
            names = file.keys()
            slices |= {name: file.get_slice(name) for name in names}

        def read(name: str, rows: list[int] | None) -> Tensor:
            stored = slices[name]
            return stored[:] if rows is None else torch.cat([stored[row : row + 1] for row in rows])

        return _digest(config, {name: list(stored.get_shape()) for name, stored in slices.items()}, read)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    if not (folder / "model.safetensors").is_file():
        raise ValueError(
            f"checkpoint {str(folder)!r} has no model.safetensors; load the model and take the fingerprint of that"
        )
    return [folder / "model.safetensors"]


def _digest(config: Any, shapes: Mapping[str, list[int]], read: Callable[[str, list[int] | None], Tensor]) -> str:
    config = config.get_text_config()
    names = _decoder_names(shapes, tied=bool(config.tie_word_embeddings))
    if not names:
        raise ValueError("no tensor of a decoder was found, so there is nothing to take a fingerprint of")
    settings = {key: _plain(getattr(config, key, None)) for key in CONFIG_KEYS}
    header = {"version": 1, "config": settings, "shapes": {name: shapes[names[name]] for name in sorted(names)}}
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(names):
        shape = shapes[names[name]]
        values = read(names[name], None if len(shape) < 2 else _sampled_rows(shape[0]))
        digest.update(values.float().bfloat16().cpu().contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _decoder_names(names: Iterable[str], tied: bool) -> dict[str, str]:
    """Name within the decoder -> name as it is stored, which depends on the class around it and on the version.

    Left out are other towers, buffers that old checkpoints hold, and an unembedding that is the embedding.
    """
    found = {}
    for name in names:
        match = _NAME.search(name)
        if match is None or "vision" in name or name.endswith("inv_freq") or (tied and match[1] == "lm_head.weight"):
            continue
        found[match[1]] = name
    return found


def _sampled_rows(num_rows: int) -> list[int]:
    """`[0, 3276, ..., 49151]`: first, last, and what lies evenly between."""
    if num_rows <= SAMPLED_ROWS:
        return list(range(num_rows))
    return [step * (num_rows - 1) // (SAMPLED_ROWS - 1) for step in range(SAMPLED_ROWS)]


def _plain(value: Any) -> Any:
    """A setting as JSON, with 1 and 1.0 alike: files and defaults do not agree on that."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value
