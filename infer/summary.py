"""Measured rows to the figures of a report. Nothing is run, loaded or timed here.

A unit is what was timed at once: one prompt, or a batch of them. Its time is the median over repeats. Speed-ups compare
a method and a baseline on the same units; intervals are 95 % bootstrap intervals over units (percentiles, fixed seed).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .stats import EngineStats, SequenceStats, mat_after_prefill, ratio

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
ALL, MIXED = "all", "mixed"
REFERENCE = "ar"
BASELINES = (REFERENCE, "transformers")
RESAMPLES = 2000


@dataclass(frozen=True)
class Output:
    """One text. `Output(82, 0, "writing", [504, 11, 2], {"emitted_tokens": 3, ...})`; a peer has no stats."""

    question_id: int | str
    turn: int
    category: str
    token_ids: Sequence[int]
    stats: Mapping[str, Any] | None = None

    @property
    def group(self) -> str:
        return group_of(self.category)


@dataclass(frozen=True)
class Run:
    """One method on one unit, once. engine: the EngineStats of these steps, None for a peer."""

    unit: int
    repeat: int
    method: str
    seconds: float
    outputs: Sequence[Output]
    engine: Mapping[str, Any] | None = None

    @property
    def tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def group(self) -> str:
        groups = {output.group for output in self.outputs}
        return groups.pop() if len(groups) == 1 else MIXED

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Run:
        """Raises KeyError or TypeError for what is no run."""
        numbers = (values["unit"], values["repeat"], values["seconds"])
        if not all(type(value) in (int, float) for value in numbers) or not isinstance(values["method"], str):
            raise TypeError("unit, repeat and seconds must be numbers, and method a name")
        return cls(**{**values, "outputs": [Output(**output) for output in values["outputs"]]})


@dataclass(frozen=True)
class Difference:
    """Where a text parts from plain decoding's: both tokens there (None: ended) and their logit gap (None: no gap)."""

    unit: int
    repeat: int
    method: str
    question_id: int | str
    turn: int
    position: int
    token: int | None
    reference_token: int | None
    gap: float | None


@dataclass(frozen=True)
class Timing:
    """A unit's tokens and seconds, median over repeats."""

    group: str
    tokens: float
    seconds: float


def group_of(category: str) -> str:
    """Spec-Bench reports the eight categories of MT-bench as one group."""
    return "mt_bench" if category in MT_BENCH else category


def compared_outputs(runs: Iterable[Run]) -> list[tuple[Run, Output, Output]]:
    """(run, its output, plain decoding's output) for every text that has both."""
    runs = list(runs)
    reference = {
        (run.unit, run.repeat, output.question_id, output.turn): output
        for run in runs
        if run.method == REFERENCE
        for output in run.outputs
    }
    found = []
    for run in runs:
        for output in run.outputs if run.method != REFERENCE else ():
            theirs = reference.get((run.unit, run.repeat, output.question_id, output.turn))
            if theirs is not None:
                found.append((run, output, theirs))
    return found


def speedup(mine: Sequence[Timing], base: Sequence[Timing]) -> dict[str, Any]:
    """Ratio of totals and mean of ratios over the same units in the same order, with intervals (None for one unit)."""
    times = np.array([[(t.tokens, t.seconds) for t in side] for side in (mine, base)])  # [side, unit, tokens|seconds]
    chosen = np.random.default_rng(0).integers(0, len(mine), (RESAMPLES, len(mine)))
    resampled = times[:, chosen].sum(axis=2)  # [side, resample, tokens|seconds]
    of_totals = _ratio_of_rates(times.sum(axis=1))
    ratios = _ratio_of_rates(times)
    return {
        "of_totals": float(of_totals),
        "of_totals_interval": interval(_ratio_of_rates(resampled), len(mine)),
        "mean": float(ratios.mean()),
        "mean_interval": interval(ratios[chosen].mean(axis=1), len(mine)),
        "units": len(mine),
    }


def _ratio_of_rates(times: np.ndarray) -> Any:
    rates = times[..., 0] / times[..., 1]
    return rates[0] / rates[1]


def interval(resampled: np.ndarray, units: int) -> list[float] | None:
    """The middle 95 %; None for one unit, whose resamples are all the same."""
    return [float(value) for value in np.percentile(resampled, [2.5, 97.5])] if units > 1 else None


def median_times(runs: Iterable[Run]) -> dict[str, dict[int, Timing]]:
    """{method: {unit: timing}}"""
    grouped: dict[tuple[str, int], list[Run]] = defaultdict(list)
    for run in runs:
        grouped[run.method, run.unit].append(run)
    times: dict[str, dict[int, Timing]] = defaultdict(dict)
    for (method, unit), repeats in grouped.items():
        tokens, seconds = ([getattr(run, name) for run in repeats] for name in ("tokens", "seconds"))
        times[method][unit] = Timing(repeats[0].group, statistics.median(tokens), statistics.median(seconds))
    return times


def summarize(
    runs: Sequence[Run], differences: Sequence[Difference], methods: Sequence[str], near_tie: float, greedy: bool = True
) -> dict[str, dict[str, dict[str, Any]]]:
    """{method: {group: figures}}, with the group "all" first. What cannot be said is None.

    near_tie: logit gap under which a difference counts as one. greedy: whether outputs can be compared at all.
    """
    groups = [ALL, *dict.fromkeys(output.group for run in runs for output in run.outputs)]
    times = median_times(runs)
    verdicts = _verdicts(runs, differences, near_tie) if greedy else {}
    return {
        method: {
            group: _speed(times, method, group) | _counts(runs, method, group) | _agreement(verdicts, method, group)
            for group in groups
        }
        for method in methods
    }


def _in(group: str, wanted: str) -> bool:
    return wanted in (ALL, group)


def _speed(times: Mapping[str, Mapping[int, Timing]], method: str, group: str) -> dict[str, Any]:
    mine = {unit: timing for unit, timing in times.get(method, {}).items() if _in(timing.group, group)}
    figures: dict[str, Any] = {"tokens_per_second": None, "speedup": {}}
    if not mine:
        return figures
    figures["tokens_per_second"] = sum(t.tokens for t in mine.values()) / sum(t.seconds for t in mine.values())
    for baseline in BASELINES:
        shared = [unit for unit in mine if unit in times.get(baseline, {})]
        if shared and baseline != method:
            figures["speedup"][baseline] = speedup([mine[u] for u in shared], [times[baseline][u] for u in shared])
    return figures


def _counts(runs: Sequence[Run], method: str, group: str) -> dict[str, Any]:
    """MAT and what belongs to it; all None for a peer."""
    outputs = [o for run in runs if run.method == method for o in run.outputs if _in(o.group, group)]
    parts = [SequenceStats.from_dict(output.stats) for output in outputs if output.stats is not None]
    counted = [run for run in runs if run.method == method and run.engine and _in(run.group, group)]
    figures: dict[str, Any] = {"texts": len({(output.question_id, output.turn) for output in outputs})}
    figures |= dict.fromkeys(
        (
            "mat",
            "mat_after_prefill",
            "acceptance_rate",
            "inner_acceptance_rate",
            "retrieval_rate",
            "mean_distance",
            "layer_tokens_per_token",
            "head_tokens_per_token",
            "layer_passes_per_token",
            "overhead_share",
            "counts",
        )
    )
    if parts:
        total = SequenceStats.total(parts)
        figures |= {
            "mat": total.mat,
            "mat_after_prefill": mat_after_prefill(parts),
            "acceptance_rate": total.acceptance_rate if total.drafted else None,
            "inner_acceptance_rate": total.inner_acceptance_rate if total.inner_drafted else None,
            "retrieval_rate": total.retrieval_rate if total.retrieval_steps else None,
            "mean_distance": total.mean_distance if total.distance else None,
            "counts": total.as_dict(),
        }
    if counted:
        engine = EngineStats.total(EngineStats.from_dict(run.engine or {}) for run in counted)
        tokens = sum(run.tokens for run in counted)
        figures |= {
            "layer_tokens_per_token": ratio(engine.decoding_layer_tokens, tokens),
            "head_tokens_per_token": ratio(engine.head_tokens, tokens),
            "layer_passes_per_token": ratio(engine.layer_passes, tokens),
            "overhead_share": engine.overhead_share,
        }
    return figures


Verdicts = dict[str, dict[tuple[int | str, int], tuple[str, int]]]
"""{method: {text: (group, 0 equal | 1 near-tie | 2 different)}}"""


def _verdicts(runs: Sequence[Run], differences: Iterable[Difference], near_tie: float) -> Verdicts:
    """A text's worst over its repeats."""
    gaps = {(d.unit, d.repeat, d.method, d.question_id, d.turn): d.gap for d in differences}
    verdicts: Verdicts = defaultdict(dict)
    for run, output, theirs in compared_outputs(runs):
        text = (output.question_id, output.turn)
        gap = gaps.get((run.unit, run.repeat, run.method, *text))
        tie = 1 if gap is not None and gap < near_tie else 2
        verdict = 0 if list(output.token_ids) == list(theirs.token_ids) else tie
        worst = max(verdict, verdicts[run.method].get(text, ("", 0))[1])
        verdicts[run.method][text] = (output.group, worst)
    return verdicts


def _agreement(verdicts: Verdicts, method: str, group: str) -> dict[str, Any]:
    found = [verdict for where, verdict in verdicts.get(method, {}).values() if _in(where, group)]
    if not found:
        return dict.fromkeys(("equal_share", "near_ties", "different"))
    return {
        "equal_share": found.count(0) / len(found),
        "near_ties": found.count(1),
        "different": found.count(2),
    }
