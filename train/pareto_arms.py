"""The arms of a comparison: each a target rule with a name and a place on a line of the picture.

Rules and their settings come as a user gives them; what is not valid is refused by name, before weights are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..infer.bench import listed
from ..infer.build import did_you_mean
from ..infer.target import Exact, LearnedEnsemble, Lossy, SpecCascade, StaticEnsemble, TargetRule
from ..modules.ensemble_head import EnsembleHead

if TYPE_CHECKING:
    from ..modules.bundle import HeadBundle

EXACT, STATIC, LEARNED = "exact", "static", "learned"


@dataclass(frozen=True)
class Arm:
    """One way to verify: `Arm("static:0.3", "static", 0.3, StaticEnsemble(0.3))`.

    line: arms of one line belong together. setting: where on it; None for a point of its own.
    """

    name: str
    line: str
    setting: float | None
    rule: TargetRule


@dataclass(frozen=True)
class Settings:
    """What arms are made of. heads: by the name that a report gives them."""

    weights: Sequence[str | float]
    leniences: Sequence[str | float]
    alphas: Sequence[str | float]
    heads: Mapping[str, HeadBundle]
    max_tv: float = 1.0
    bonus: bool = False


def make_arms(rules: Sequence[str], settings: Settings) -> list[Arm]:
    """The exact arm and those of the rules, in their order. Raises ValueError naming what is not valid."""
    return [Arm(EXACT, EXACT, None, Exact()), *(arm for rule in rules for arm in LINES[rule](settings))]


def check_rules(rules: Iterable[str]) -> list[str]:
    """Raises ValueError for a rule that there is not."""
    names = list(dict.fromkeys(listed(rules)))
    for name in names:
        if name not in LINES:
            raise ValueError(f"rules must be among {', '.join(LINES)}, got {name!r}{did_you_mean(name, list(LINES))}")
    return [name for name in names if name != EXACT]


def _static(settings: Settings) -> Iterator[Arm]:
    yield from _line(STATIC, "weights", settings.weights, lambda w: StaticEnsemble(w, settings.max_tv, settings.bonus))


def _lossy(settings: Settings) -> Iterator[Arm]:
    yield from _line("lossy", "leniences", settings.leniences, lambda value: Lossy(value, settings.bonus))


def _cascade(settings: Settings) -> Iterator[Arm]:
    for rule in SpecCascade.RULES:
        make = partial(SpecCascade, rule=rule, bonus=settings.bonus)
        yield from _line(f"cascade-{rule}", "alphas", settings.alphas, make)


def _learned(settings: Settings) -> Iterator[Arm]:
    for name, bundle in settings.heads.items():
        rule = LearnedEnsemble(EnsembleHead.from_bundle(bundle), settings.max_tv, settings.bonus)
        yield Arm(f"{LEARNED}:{name}", LEARNED, None, rule)


def _line(line: str, option: str, values: Sequence[str | float], make: Callable[[float], TargetRule]) -> Iterator[Arm]:
    for value in numbers(option, values):
        try:
            yield Arm(f"{line}:{value:g}", line, value, make(value))
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from error


LINES: dict[str, Callable[[Settings], Iterator[Arm]]] = {
    EXACT: lambda settings: iter(()),  # always there
    STATIC: _static,
    "lossy": _lossy,
    "cascade": _cascade,
    LEARNED: _learned,
}
"""--rules values, and the arms that each stands for."""


def numbers(option: str, values: Iterable[Any]) -> list[float]:
    """`["0.1,0.3", 0.5]` in ascending order, each once. Raises ValueError for what is no number, and for none."""
    texts = listed(map(str, values))
    try:
        found = sorted({float(text) for text in texts})
    except ValueError:
        raise ValueError(f"{option} must be numbers, as in 0.1,0.3, got {','.join(texts)!r}") from None
    if not found:
        raise ValueError(f"{option} must hold at least one number")
    return found


def head_names(folders: Sequence[str]) -> list[str]:
    """A short name for each folder of a head: its own, with its parent's where that is not enough.

    Raises ValueError for a folder that is given twice.
    """
    paths = [Path(folder).expanduser().resolve() for folder in folders]
    twice = [str(folder) for folder, count in Counter(paths).items() if count > 1]
    if twice:
        raise ValueError(f"heads must each be given once, {Path(twice[0]).name!r} is given twice")
    depth = next(depth for depth in range(1, 99) if len({path.parts[-depth:] for path in paths}) == len(paths))
    return ["/".join(path.parts[-depth:]) for path in paths]
