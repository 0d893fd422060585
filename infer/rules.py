"""From `--target` options to a target rule, and the ensemble head that it may read; checked before weights are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..modules.bundle import HeadBundle
from ..modules.ensemble_head import KIND, EnsembleHead
from .bundles import bundle_digest
from .target import Exact, LearnedEnsemble, Lossy, SpecCascade, StaticEnsemble, TargetRule

if TYPE_CHECKING:
    from .build import EngineOptions, TargetOptions

DRAWN = ("draft-model", "early-exit", "hispec", "hispec+logitspec", "hispec+prompt-lookup", "diversed")
"""Methods whose drafts are drawn from a distribution, which rules other than the exact one need."""


def load_ensemble(folder: str) -> HeadBundle:
    """Raises ValueError for a folder that is damaged, or that holds no ensemble head and the draft it is for."""
    bundle = HeadBundle.load(folder)
    draft = bundle.config.get("draft")
    if bundle.kind != KIND:
        raise ValueError(f"target.head {folder!r} holds {bundle.kind!r}; it must hold {KIND!r}")
    if not isinstance(draft, dict) or draft.get("method") not in ("early-exit", "draft-model"):
        raise ValueError(f"target.head {folder!r} does not say what it was trained with: its draft is {draft!r}")
    EnsembleHead.from_bundle(bundle)
    return bundle


def check_rule(target: TargetOptions, methods: Sequence[str]) -> None:
    """Raise ValueError for settings that are not valid or say nothing here. Of the head only that it is named."""
    needs_head = target.rule == "learned" or "diversed" in methods
    if needs_head and target.head is None:
        raise ValueError("method diversed and target.rule learned need --target.head, a folder of an ensemble head")
    if target.head is not None and not needs_head:
        raise ValueError(
            f"target.head is read by target.rule learned and method diversed; target.rule is {target.rule}"
        )
    if target.rule != "exact" and not any(method in DRAWN for method in methods):
        raise ValueError(
            f"target.rule {target.rule} needs a method whose drafts are drawn ({', '.join(DRAWN)}); "
            f"method is {' and '.join(dict.fromkeys(methods))}, whose proposals are verified exactly"
        )
    simple = target if target.rule != "learned" else replace(target, rule="exact")
    make_rule(simple, None)
    StaticEnsemble(0.5, target.max_tv)


def make_rule(target: TargetOptions, head: HeadBundle | None) -> TargetRule:
    """Raises ValueError naming the setting."""
    bonus = target.bonus == "ensemble"
    if target.rule == "static":
        return _named("weight", lambda: StaticEnsemble(target.weight, target.max_tv, bonus))
    if target.rule == "lossy":
        return _named("lenience", lambda: Lossy(target.lenience, bonus))
    if target.rule == "cascade":
        return _named("alpha", lambda: SpecCascade(target.alpha, target.cascade, bonus))
    if target.rule == "learned":
        assert head is not None, "prepare() loads it"
        return learned_rule(target, head)
    return Exact()


def learned_rule(target: TargetOptions, head: HeadBundle) -> LearnedEnsemble:
    return LearnedEnsemble(EnsembleHead.from_bundle(head), target.max_tv, target.bonus == "ensemble")


def _named(name: str, make: Any) -> TargetRule:
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"target.{error}") from error


def with_heads_of(options: EngineOptions, head: HeadBundle) -> EngineOptions:
    """The options with the bundle of exit heads that an ensemble head was trained with, if it lies beside it.

    Raises ValueError for another bundle, for none, and for a missing draft model.
    """
    draft = head.config["draft"]
    if draft["method"] == "draft-model":
        if options.draft_model is None:
            raise ValueError(
                f"target.head {options.target.head!r} was trained with the draft model {draft.get('model')!r}: "
                "give it with --draft-model"
            )
        return options
    if draft.get("bundle") is None:
        return options
    beside = Path(options.target.head or "").expanduser().resolve().parent / draft["bundle"]
    folder = options.bundle or (str(beside) if beside.is_dir() else None)
    if folder is None:
        raise ValueError(
            f"target.head {options.target.head!r} was trained with the exit heads {draft['bundle']!r}, which do not "
            "lie beside it: give their folder with --bundle"
        )
    found = bundle_digest(folder)
    if found and found != draft.get("digest"):
        raise ValueError(
            f"bundle {folder!r} ({found}) is not the one that target.head {options.target.head!r} was trained with: "
            f"{draft['bundle']!r} ({draft.get('digest')})"
        )
    return replace(options, bundle=folder)
