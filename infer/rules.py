"""From `--target` options to a target rule, and the ensemble head that it may read; checked before weights are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..modules.bundle import HeadBundle
from ..modules.ensemble_head import KIND, EnsembleHead
from .bundles import bundle_digest
from .plans import DRAWN, RUN_FURTHER, Plan
from .target import Exact, LearnedEnsemble, Lossy, SpecCascade, StaticEnsemble, TargetRule

if TYPE_CHECKING:
    from .build import EngineOptions, TargetOptions


def load_ensemble(folder: str) -> HeadBundle:
    """Raises ValueError for a folder that is damaged, or that holds no ensemble head and the draft it is for."""
    try:
        bundle = HeadBundle.load(folder)
    except ValueError as error:
        raise ValueError(f"target.head: {error}") from error
    draft = bundle.config.get("draft")
    if bundle.kind != KIND:
        raise ValueError(f"target.head {folder!r} holds {bundle.kind!r}; it must hold {KIND!r}")
    method = draft.get("method") if isinstance(draft, dict) else None
    layered = isinstance(draft, dict) and isinstance(draft.get("layer"), int)
    if method != "draft-model" and not (method == "early-exit" and layered):
        raise ValueError(f"target.head {folder!r} does not say what it was trained with: its draft is {draft!r}")
    EnsembleHead.from_bundle(bundle)
    return bundle


READ_BY: dict[str, tuple[str, ...]] = {
    "weight": ("static",),
    "max_tv": ("static", "learned"),
    "head": ("learned",),
    "lenience": ("lossy",),
    "cascade": ("cascade",),
    "alpha": ("cascade",),
    "bonus": ("static", "learned", "lossy", "cascade"),
}
"""Which rules read a setting; method diversed is a learned one."""


def check_rule(options: EngineOptions, methods: Sequence[str]) -> None:
    """Raise ValueError for settings that are not valid or say nothing here. Of the head only that it is named."""
    target = options.target
    followed = {Plan.of(method, options, None).rule for method in methods}
    rules = {target.rule, *followed}
    named = " and ".join(dict.fromkeys(methods))
    for name, readers in READ_BY.items():
        changed = getattr(target, name) != type(target).__dataclass_fields__[name].default
        if changed and not rules & set(readers):
            raise ValueError(
                f"target.{name} is read by target.rule {' and '.join(readers)}; target.rule is {target.rule}"
                f"{' (method diversed is learned)' if 'learned' in readers else ''}"
            )
    if "learned" in rules and target.head is None:
        raise ValueError("method diversed and target.rule learned need --target.head, a folder of an ensemble head")
    if target.rule not in {"exact", *followed}:
        raise ValueError(
            f"target.rule {target.rule} needs a method whose drafts are drawn ({', '.join(DRAWN[:-1])}); method is "
            f"{named}, whose proposals are verified exactly or by a head"
        )
    if target.bonus == "ensemble" and not any(method in RUN_FURTHER for method in methods):
        raise ValueError(f"target.bonus ensemble needs one of {', '.join(RUN_FURTHER)}; method is {named}")
    make_rule(target if target.rule != "learned" else replace(target, rule="exact"), None)
    _named("max_tv", lambda: StaticEnsemble(0.5, target.max_tv))


def check_drafts(head: HeadBundle, plan: Plan, layer: int | None) -> None:
    """Refuse drafts that a learned rule's head was not trained with. layer: the exit's, if known."""
    if plan.rule != "learned":
        return
    draft = head.config["draft"]
    if plan.drafter != draft["method"]:
        raise ValueError(f"target.head was trained with method {draft['method']}; method is {plan.method}")
    if draft["method"] == "early-exit" and layer not in (None, draft["layer"]):
        raise ValueError(f"target.head was trained with the exit after layer {draft['layer']}; draft_layer is {layer}")


def check_layer(head: HeadBundle, layer: int | None) -> None:
    """Refuse an exit for drafts whose exit the head names. layer: as a user asks for it."""
    draft = head.config["draft"]
    named = draft.get("layer")
    if layer not in (None, named):
        valid = f"{named} or left out" if named is not None else f"left out, it drafts with method {draft['method']}"
        raise ValueError(f"early_exit.layer must be that of target.head, {valid}; got {layer}")


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
        return LearnedEnsemble(EnsembleHead.from_bundle(head), target.max_tv, bonus)
    return Exact()


def _named(name: str, make: Callable[[], TargetRule]) -> TargetRule:
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
    if not isinstance(draft.get("bundle"), str):
        if options.bundle is not None:
            raise ValueError(
                f"target.head {options.target.head!r} was trained with the model's own norm as exit; it cannot be used "
                f"with bundle {options.bundle!r}"
            )
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
