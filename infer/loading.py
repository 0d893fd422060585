"""Where weights and tokenizers come from: a hub id, a folder of safetensors, or a GGUF file.

Whatever can be refused is refused before weights are read. Pickles are refused unless allowed, code that comes with a
checkpoint does not run unless trusted. A GGUF file is dequantised once, into a cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.utils import enable_progress_bars
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from .sources import VALID_MODELS, check_attention, check_device, check_dtype, find_model
from .sources import ModelSource as ModelSource

if TYPE_CHECKING:
    from ..modules.attention import Attention
    from ..modules.layered_model import LayeredModel

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")


def load_model(
    model: str,
    dtype: str = "auto",
    device: str = "auto",
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    cache_dir: str | None = None,
    verbose: bool = False,
    attention: str = "sdpa",
) -> tuple[LayeredModel, Any]:
    """The model, ready to run, and its tokenizer. Raises ValueError for what cannot be used, before weights are read.

    dtype: "auto" is the checkpoint's own, but float32 where that is float16 and the device a CPU. device: "auto" is the
    GPU if there is one. attention: "sdpa", or on GPUs "flex".
    """
    resolve_dtype(dtype)
    resolve_device(device)
    check_attention(attention)
    source = resolve_model(model, allow_pickle, trust_remote_code, cache_dir)
    tokenizer = load_tokenizer(source)
    return load_weights(source, dtype, device, verbose, attention), tokenizer


def resolve_dtype(name: str) -> torch.dtype | str:
    """The torch dtype, or "auto" itself. ValueError for any other name."""
    check_dtype(name)
    return name if name == "auto" else getattr(torch, name)


def resolve_attention(name: str) -> Attention:
    """The function that a model's layers call. ValueError for a name that stands for none."""
    check_attention(name)
    if name == "flex":
        if torch.__version__ < "2.13":  # compared as versions
            raise ValueError(f"attention flex needs torch 2.13 or later, this is {torch.__version__}")
        from ..modules.flex_attention import flex_paged_attention

        return flex_paged_attention
    from ..modules.attention import paged_attention

    return paged_attention


def resolve_device(name: str) -> torch.device:
    """ValueError for a device that is not there."""
    check_device(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} is not there: this torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def resolve_model(
    model: str, allow_pickle: bool = False, trust_remote_code: bool = False, cache_dir: str | None = None
) -> ModelSource:
    """Find a model and check that it can be run.

    Raises ValueError for a path that does not exist, an architecture that is not supported, a quantised checkpoint, and
    weights that are neither safetensors nor (unless allowed) pickles.
    """
    return check_model(find_model(model, allow_pickle, trust_remote_code, cache_dir))


def check_model(source: ModelSource) -> ModelSource:
    """The second half of `resolve_model`, for a model that was found: what it is comes first, then what it lacks."""
    if source.gguf_file is not None:
        source = replace(source, config=_gguf_config(source))
    _check_architecture(source)
    folder = Path(source.location)
    if source.gguf_file is None and folder.is_dir():
        _check_weight_files(source.name, folder, source.allow_pickle)
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise ValueError(f"model folder {source.name!r} has no tokenizer: none of {', '.join(TOKENIZER_FILES)}")
    return source


def text_config(source: ModelSource) -> PreTrainedConfig:
    """transformers' configuration of the part that decodes text."""
    config = source.config
    if config is None:
        with _quiet(), _readable_config(source):
            config = AutoConfig.from_pretrained(source.location, trust_remote_code=source.trust_remote_code)
    return config.get_text_config()


def load_tokenizer(source: ModelSource) -> Any:
    """Raises ValueError when the model comes without one that can be used."""
    gguf = {} if source.gguf_file is None else {"gguf_file": source.gguf_file}
    try:
        with _quiet():
            return AutoTokenizer.from_pretrained(source.location, trust_remote_code=source.trust_remote_code, **gguf)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"model {source.name!r} has no tokenizer that can be loaded: {_first_line(error)}") from error


def load_weights(
    source: ModelSource, dtype: str = "auto", device: str = "auto", verbose: bool = False, attention: str = "sdpa"
) -> LayeredModel:
    """The model as a stack of layers; see `load_transformers`."""
    return layered(load_transformers(source, dtype, device, verbose), attention)


def layered(loaded: PreTrainedModel, attention: str = "sdpa") -> LayeredModel:
    """The model as a stack of layers, for inference. Says so where kernels must be compiled first."""
    from ..modules.fused import prepare
    from ..modules.layered_model import LayeredModel

    prepare(loaded.dtype, loaded.device, lambda: _note("compiling kernels for this processor, once ..."))
    return LayeredModel(loaded, attention=resolve_attention(attention))


def load_transformers(
    source: ModelSource, dtype: str = "auto", device: str = "auto", verbose: bool = False
) -> PreTrainedModel:
    """transformers' own model. A GGUF file is converted first, unless that was done before.

    Raises ValueError for weights that are damaged or incomplete: nothing is initialised at random.
    """
    target_dtype, target_device = resolve_dtype(dtype), resolve_device(device)
    location = source.location if source.gguf_file is None else _convert(source)
    try:
        with contextlib.nullcontext() if verbose else _quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                location,
                dtype=target_dtype,
                use_safetensors=None if source.allow_pickle else True,
                trust_remote_code=source.trust_remote_code,
                output_loading_info=True,
            )
    except SafetensorError as error:
        raise ValueError(f"weights of {source.name!r} cannot be read ({error}); is the download complete?") from error
    _check_complete(source, info)
    if dtype == "auto" and target_device.type == "cpu" and model.dtype == torch.float16:
        _note(f"{source.name} is float16, which CPUs compute slowly: using float32")
        model = model.float()
    return model.to(target_device)


def check_same_tokenizer(target: Any, draft: Any, target_name: str = "", draft_name: str = "") -> None:
    """Raise ValueError, naming both and the first difference, unless both turn text into the same ids.

    Ids are compared in the range that both have: vocabularies padded to different sizes are fine.
    """
    ids = zip(_tokens_by_id(target), _tokens_by_id(draft), strict=False)
    merges = zip_longest(_merges(target), _merges(draft))
    for what, pairs in (("token id", ids), ("merge", merges)):
        for index, (ours, theirs) in enumerate(pairs):
            if ours != theirs:
                raise ValueError(
                    f"draft model {draft_name or draft.name_or_path!r} must have the tokenizer of the target "
                    f"{target_name or target.name_or_path!r}: {what} {index} is {theirs!r} there, {ours!r} here"
                )


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Which tokenizer this is, 64 hexadecimal digits.

    It covers the token of every id, added ones included, and the merges, so it says what ids mean, not how texts or
    chats are prepared.
    """
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in _merges(tokenizer)]
    return hashlib.sha256(json.dumps([_tokens_by_id(tokenizer), merges]).encode()).hexdigest()


def _tokens_by_id(tokenizer: Any) -> list[str | None]:
    by_id = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    return [by_id.get(token_id) for token_id in range(max(by_id, default=-1) + 1)]


def _merges(tokenizer: Any) -> list[Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return [] if backend is None else json.loads(backend.to_str())["model"].get("merges", [])


def _check_weight_files(model: str, folder: Path, allow_pickle: bool) -> None:
    pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if pickles and allow_pickle:
        return
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"model folder {model!r} lacks the weight files {_some(missing)}")
    elif not (folder / "model.safetensors").is_file():
        if pickles:
            raise ValueError(
                f"model folder {model!r} has only pickled weights ({_some(pickles)}), which can run any code when "
                "loaded; convert them to safetensors, or pass --allow-pickle if you trust them"
            )
        raise ValueError(f"model folder {model!r} has no model.safetensors")


def _check_architecture(source: ModelSource) -> None:
    """config.json is read as it stands: an unknown architecture has no configuration class."""
    from ..modules.layered_model import check_supported

    if source.config is not None:
        config = source.config.to_dict()
    else:
        with _quiet(), _readable_config(source):
            config = PreTrainedConfig.get_config_dict(source.location)[0]
    if "model_type" not in config:
        raise ValueError(f"model {source.name!r} has no config.json with a model_type; it must be {VALID_MODELS}")
    try:
        check_supported(SimpleNamespace(**config))
    except ValueError as error:
        raise ValueError(f"model {source.name!r}: {error}") from None


def _gguf_config(source: ModelSource) -> PreTrainedConfig:
    with _quiet(), _readable_config(source):
        return AutoConfig.from_pretrained(source.location, gguf_file=source.gguf_file)


@contextlib.contextmanager
def _readable_config(source: ModelSource) -> Iterator[None]:
    """What transformers raises in reading a configuration, as a user's mistake."""
    try:
        yield
    except Exception as error:  # damaged or unknown, it raises what it likes
        raise ValueError(
            f"model {source.name!r} has no configuration that can be read ({_first_line(error)}); "
            f"it must be {VALID_MODELS}"
        ) from error


def _convert(source: ModelSource) -> Path:
    """Dequantise a GGUF file into a folder of float32 safetensors; it appears under its name only when complete."""
    assert source.converted is not None
    target = source.converted
    if target.is_dir():
        return target
    _note(f"converting {source.name} once, into {target} ...")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        with _quiet(), contextlib.redirect_stderr(io.StringIO()):  # one bar is not transformers' own: tqdm's, to stderr
            _dequantise(source, partial)
        partial.chmod(0o755)
        partial.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was faster, and its conversion is as good
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _dequantise(source: ModelSource, target: Path) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(
        source.location, gguf_file=source.gguf_file, dtype=torch.float32, output_loading_info=True
    )
    _check_complete(source, info)
    for owner in (model, model.config):  # save_pretrained would refuse, or write the quantisation of the GGUF file down
        for record in ("quantization_config", "hf_quantizer", "is_quantized", "quantization_method"):
            owner.__dict__.pop(record, None)
    model.hf_quantizer = None
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.location, gguf_file=source.gguf_file).save_pretrained(target)


def _check_complete(source: ModelSource, info: Mapping[str, Any]) -> None:
    """transformers would initialise at random what it does not find."""
    if info["missing_keys"]:
        raise ValueError(f"weights of {source.name!r} are incomplete: {_some(info['missing_keys'])} missing")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no advice from transformers: what matters is raised or noted here."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    enable_progress_bars()  # the line above also turned off those of downloads, which can take minutes
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _note(message: str) -> None:
    print(f"speclight: {message}", file=sys.stderr, flush=True)


def _some(names: Any, limit: int = 3) -> str:
    names = sorted(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
