"""What is known of a bundle of exit heads, and of the model it shall be used on, before weights are read."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import snapshot_download
from safetensors import SafetensorError

from ..modules.bundle import HeadBundle, fingerprint_checkpoint
from ..modules.checksums import SUMS
from ..modules.exit_heads import KIND, default_layers
from .exits import EarlyExits
from .sources import ModelSource, find_model

if TYPE_CHECKING:
    from .build import EngineOptions

WEIGHT_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")


def load_bundle(folder: str) -> HeadBundle:
    """Raises ValueError for a folder that is damaged, or that holds no exit heads."""
    bundle = HeadBundle.load(folder)
    layers = bundle.config.get("layers")
    if bundle.kind != KIND or not isinstance(layers, list) or not layers:
        raise ValueError(f"bundle {folder!r} holds {bundle.kind!r} for layers {layers}; it must hold {KIND!r}")
    return bundle


def bundle_digest(folder: str) -> str:
    """Tells bundles apart, and datastores; empty for a folder that is neither, which whoever loads it refuses."""
    sums = Path(folder).expanduser() / SUMS
    return hashlib.sha256(sums.read_bytes()).hexdigest()[:16] if sums.is_file() else ""


def digest(path: str | Path) -> str:
    """Tells contents of files apart."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def content_digests(options: EngineOptions) -> dict[str, str]:
    """What shapes results and may change under its name, by option: of what lies in these places, not where."""
    folders = {
        "bundle": options.bundle,
        "target.head": options.target.head,
        "logitspec.datastore": options.logitspec.datastore,
    }
    models = {"weights": options.model, "draft_weights": options.draft_model}
    found = {name: bundle_digest(folder) for name, folder in folders.items() if folder is not None}
    found |= {name: weights_digest(options, model) for name, model in models.items() if model is not None}
    return found if options.chat_template is None else found | {"chat_template": digest(options.chat_template)}


def planned_exits(num_layers: int, bundle: HeadBundle | None) -> EarlyExits:
    """Exits that know which layers they have, and what they are worth, and no more: to check settings against."""
    exits = EarlyExits()
    exits.num_layers = num_layers
    if bundle is not None:
        exits.layers, exits.acceptance = tuple(bundle.config["layers"]), tried_acceptance(bundle)
    return exits


def tried_acceptance(bundle: HeadBundle) -> dict[int, float]:
    """By layer, how often a draft was accepted given that all before it were, in the trial that `speclight export` made
    and wrote into the bundle's card; empty without one.

    Its chains are of two tokens, so a pass emits 1 + a + a^2 in the mean, and says nothing where there was none. Raises
    ValueError for a card that tells of a trial in another way.
    """
    trial = bundle.card.get("trial") or {}
    try:
        mats = {int(layer): float(found["mat"]) for layer, found in trial.get("exits", {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"bundle's card must tell of its trial as `speclight export` does, got {error!r}") from error
    for layer, mat in mats.items():
        if not (1.0 <= mat <= 3.0 or mat == 0.0):
            raise ValueError(f"bundle's card must tell of trials of two drafts, mat 1 to 3; exit {layer} has {mat}")
    return {layer: (math.sqrt(4.0 * mat - 3.0) - 1.0) / 2.0 for layer, mat in mats.items() if mat}


def default_exits(exits: EarlyExits) -> tuple[int, int]:
    """(L_d, L_i): a bundle's lowest and highest exit; without one an eighth and a quarter of the layers."""
    if exits.layers is not None:
        return exits.layers[0], exits.layers[-1]
    draft, verify = default_layers(exits.num_layers)
    return draft, min(verify, exits.num_layers)


def weights_digest(options: EngineOptions, model: str) -> str:
    """Tells the weights of one model from those of another in the same place; empty for pickles, and for hub ids."""
    source = find_model(model, options.allow_pickle, options.trust_remote_code, options.cache_dir)
    place = source.converted or Path(source.location)
    if not place.is_dir() and source.converted is None:
        return ""
    if source.converted is not None or place != Path(source.name).expanduser():
        return place.name  # a GGUF file's conversion is named after the file as it is
    return (base_fingerprint(source) or "")[:16]


def base_fingerprint(source: ModelSource) -> str | None:
    """The checkpoint's fingerprint; None where it is known only once the weights are loaded (GGUF, pickles).

    Of a hub id the safetensors are fetched for it, which loading it would do next.
    """
    if source.gguf_file is not None:
        return None
    folder = Path(source.location).expanduser()
    if not folder.is_dir():
        folder = Path(snapshot_download(source.location, allow_patterns=list(WEIGHT_FILES)))
    if not any((folder / name).is_file() for name in WEIGHT_FILES[1:3]):
        return None
    try:
        return fingerprint_checkpoint(folder)
    except SafetensorError as error:
        raise ValueError(f"weights of {source.name!r} cannot be read ({error}); is the download complete?") from error
