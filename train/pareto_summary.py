"""Rows of a comparison to figures. Nothing is run or loaded here.

Intervals are 95 % bootstrap intervals over prompts (percentiles, fixed seed), whose samples stay together; all arms are
resampled alike, so that differences between them are paired.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..infer.stats import SequenceStats
from ..infer.summary import RESAMPLES, interval
from .pareto_theory import Theory, independent

if TYPE_CHECKING:
    from .pareto_arms import Arm
    from .pareto_run import Run, Text

Axis = tuple[int, int | None]
"""What a figure is the mean of: a part, by a whole or by the number of prompts."""

REWARD: Axis = (0, None)
ACCEPTANCE: Axis = (1, 2)
DISTANCE: Axis = (3, 4)
EXACT, FRONT = "exact", ("exact", "static")
"""The arm that others are compared with, and the lines that make the static front: exact is weight 1."""


@dataclass(frozen=True)
class Sums:
    """values: [arms, prompts, 5] of texts' rewards, accepted and drafted tokens, distances and emitted tokens.

    drawn: [resamples, prompts], how often each prompt is in each resample.
    """

    names: Sequence[str]
    values: np.ndarray
    drawn: np.ndarray

    @classmethod
    def of(cls, texts: Mapping[str, Sequence[Text]]) -> Sums:
        prompts = sorted({text.prompt for mine in texts.values() for text in mine})
        place = {prompt: index for index, prompt in enumerate(prompts)}
        values = np.zeros((len(texts), len(prompts), 5))
        for row, mine in enumerate(texts.values()):
            for text in mine:
                values[row, place[text.prompt]] += _counts(text, len(mine) / len(prompts))
        chosen = np.random.default_rng(0).integers(0, len(prompts), (RESAMPLES, len(prompts)))
        return cls(list(texts), values, np.array([np.bincount(row, minlength=len(prompts)) for row in chosen]))

    def mean(self, axis: Axis, resampled: bool = False) -> np.ndarray:
        """[arms], or [arms, resamples]: the sum of a part by that of a whole, or by the number of prompts."""
        part, whole = axis
        weights = self.drawn.T if resampled else np.ones((self.values.shape[1], 1))
        above = self.values[..., part] @ weights
        below = self.values[..., whole] @ weights if whole is not None else np.full_like(above, self.values.shape[1])
        found = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
        return found if resampled else found[:, 0]

    def with_interval(self, axis: Axis) -> list[dict[str, Any]]:
        return [self.shown(*row) for row in zip(self.mean(axis), self.mean(axis, resampled=True), strict=True)]

    def shown(self, value: float, resampled: np.ndarray) -> dict[str, Any]:
        return {"mean": float(value), "interval": interval(resampled, self.values.shape[1])}


def _counts(text: Text, samples: float) -> tuple[float, ...]:
    """A reward counts by sample, so that a prompt's sum is their mean."""
    stats = text.stats
    return (text.reward / samples, stats["accepted"], stats["drafted"], stats["distance"], stats["emitted_tokens"])


def summarize(runs: Sequence[Run], arms: Sequence[Arm]) -> dict[str, dict[str, Any]]:
    """{arm: figures}, for arms that have all been run on the same units."""
    texts = {arm.name: [text for run in runs if run.arm == arm.name for text in run.texts] for arm in arms}
    sums = Sums.of(texts)
    rewards, acceptance = sums.with_interval(REWARD), sums.with_interval(ACCEPTANCE)
    distances = sums.with_interval(DISTANCE)
    differences, against = _to_exact(sums), _to_front(sums, arms)
    return {
        arm.name: {
            "line": arm.line,
            "setting": arm.setting,
            "texts": len(texts[arm.name]),
            "acceptance_rate": acceptance[index],
            "reward": rewards[index],
            "reward_over_exact": differences[index],
            "mean_distance": distances[index],
            "against_front": against[index],
            "theory": _theory(texts[arm.name]),
        }
        | _total(texts[arm.name])
        | _speed(runs, arm.name)
        for index, arm in enumerate(arms)
    }


def _total(texts: Sequence[Text]) -> dict[str, Any]:
    total = SequenceStats.total(SequenceStats.from_dict(text.stats) for text in texts)
    return {"mat": total.mat, "counts": total.as_dict()}


def _theory(texts: Sequence[Text]) -> dict[str, Any]:
    total = SequenceStats.total(SequenceStats.from_dict(text.stats) for text in texts)
    figures = Theory.total(text.theory for text in texts).figures()
    drafted_at = [total.drafted_at[depth] for depth in sorted(total.drafted_at)]
    return figures | {"accepted_if_independent": independent(figures["acceptance_predicted"], drafted_at)}


def _speed(runs: Sequence[Run], arm: str) -> dict[str, Any]:
    """Tokens/s, and its ratio to the exact arm's on the same unit: medians over units."""
    speeds = {(run.arm, run.unit): run.tokens / run.seconds for run in runs}
    units = sorted(unit for name, unit in speeds if name == arm)
    ratios = np.array([speeds[arm, unit] / speeds[EXACT, unit] for unit in units])
    chosen = np.random.default_rng(0).integers(0, len(units), (RESAMPLES, len(units)))
    drawn = np.median(ratios[chosen], axis=1)
    return {
        "tokens_per_second": statistics.median(speeds[arm, unit] for unit in units),
        "speedup": {"median": float(np.median(ratios)), "interval": interval(drawn, len(units)), "units": len(units)},
    }


def _to_exact(sums: Sums) -> list[dict[str, Any]]:
    """Reward above the exact arm's."""
    exact = sums.names.index(EXACT)
    values, drawn = sums.mean(REWARD), sums.mean(REWARD, resampled=True)
    return [sums.shown(values[arm] - values[exact], drawn[arm] - drawn[exact]) for arm in range(len(values))]


def _to_front(sums: Sums, arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Per arm what it has above the static front: reward and distance at the same acceptance, acceptance at the same
    distance. None for the front's own arms, and beyond the front's ends."""
    axes = {
        "reward": (ACCEPTANCE, REWARD),
        "mean_distance": (ACCEPTANCE, DISTANCE),
        "acceptance_rate": (DISTANCE, ACCEPTANCE),
    }
    front = [index for index, arm in enumerate(arms) if arm.line in FRONT]
    columns = {name: _above_front(sums, front, *pair) for name, pair in axes.items()}
    return [{name: column[index] for name, column in columns.items()} for index in range(len(arms))]


def _above_front(sums: Sums, front: Sequence[int], across: Axis, up: Axis) -> list[dict[str, Any] | None]:
    """A resample in which an arm leaves the front takes the front's end."""
    x, y = sums.mean(across), sums.mean(up)
    drawn = list(zip(sums.mean(across, resampled=True).T, sums.mean(up, resampled=True).T, strict=True))
    ends = min(x[front]), max(x[front])
    return [
        None
        if index in front or len(front) < 2 or not ends[0] <= x[index] <= ends[1]
        else sums.shown(
            _above_line(x, y, front, index),
            np.array([_above_line(*both, front, index) for both in drawn]),
        )
        for index in range(len(x))
    ]


def _above_line(x: np.ndarray, y: np.ndarray, front: Sequence[int], index: int) -> float:
    """y of an arm less that of the straight lines between the front's arms, at its x."""
    order = sorted(front, key=lambda arm: x[arm])
    return float(y[index] - np.interp(x[index], x[order], y[order]))
