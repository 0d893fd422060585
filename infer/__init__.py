"""The inference engine, its drafters and its command line.

    from speclight.infer import Engine, GenerationParams, LogitSpecDrafter, load_model

Names are imported on first use, so that the command line can answer `--help` without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .auto import AutoDrafter
    from .cost_model import Calibration, CostModel
    from .draft_model import DraftModelDrafter
    from .drafter import Drafter, Observation, TreeDrafter
    from .early_exit import EarlyExitDrafter
    from .engine import Engine
    from .exits import EarlyExits, HeadExits
    from .hierarchical import HierarchicalDrafter
    from .loading import load_model
    from .logitspec import LogitSpecDrafter
    from .prompt_lookup import PromptLookupDrafter
    from .request import Completion, GenerationParams, Sequence, StreamChunk
    from .stats import SequenceStats

__all__ = [
    "AutoDrafter",
    "Calibration",
    "Completion",
    "CostModel",
    "DraftModelDrafter",
    "Drafter",
    "EarlyExitDrafter",
    "EarlyExits",
    "Engine",
    "GenerationParams",
    "HeadExits",
    "HierarchicalDrafter",
    "LogitSpecDrafter",
    "Observation",
    "PromptLookupDrafter",
    "Sequence",
    "SequenceStats",
    "StreamChunk",
    "TreeDrafter",
    "load_model",
]

_MODULES = {
    "AutoDrafter": ".auto",
    "Calibration": ".cost_model",
    "CostModel": ".cost_model",
    "DraftModelDrafter": ".draft_model",
    "Drafter": ".drafter",
    "Observation": ".drafter",
    "TreeDrafter": ".drafter",
    "EarlyExitDrafter": ".early_exit",
    "Engine": ".engine",
    "EarlyExits": ".exits",
    "HeadExits": ".exits",
    "HierarchicalDrafter": ".hierarchical",
    "load_model": ".loading",
    "LogitSpecDrafter": ".logitspec",
    "PromptLookupDrafter": ".prompt_lookup",
    "Completion": ".request",
    "GenerationParams": ".request",
    "Sequence": ".request",
    "StreamChunk": ".request",
    "SequenceStats": ".stats",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
