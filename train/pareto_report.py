"""A comparison's report: report.json with all figures, report.md with tables, report.png with the fronts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..infer.files import replace_file
from ..infer.report import bullets, markdown_table, new_figure, png
from .pareto_arms import EXACT, LEARNED, STATIC

DEFINITIONS = {
    "arm": "what drafts were verified against: the target itself (exact), the mixture with weight w of the target"
    " (static:w), a mixture whose weight a trained head chooses at every token (learned), Leviathan et al.'s lenience"
    " (lossy), SpecCascade's OPT and Token-v3 rules (cascade-opt, cascade-token)",
    "acceptance": "accepted by drafted tokens",
    "MAT": "mean accepted tokens: emitted tokens by passes of the target, the bonus or corrected token included",
    "tokens/s": "of a unit (a batch of prompts), prefill included, the theory's own time taken off; median over units",
    "over exact": "ratio of tokens/s to the exact arm's on the same unit; median over units, interval over units",
    "reward": "the task's, mean over prompts, samples of a prompt averaged",
    "to exact": "reward less the exact arm's on the same prompts with the same seeds",
    "distance": "total variation between the law of each emitted token and the target's own; mean over emitted tokens."
    " At temperature 0 the share of tokens that the target itself would not have chosen",
    "intervals": "in brackets, 95 % bootstrap intervals over prompts; all arms are resampled alike",
    "above the static front": "reward and distance less those of the straight lines between exact and the static"
    " weights at the same acceptance; acceptance less theirs at the same distance. - where the arm lies beyond the"
    " front's ends",
    "predicted acceptance": "mean of sum_x min(q(x), v(x)) over the drafts that were reached, that is 1 - w TV(p, q)"
    " for a mixture; measured is the share of these that was accepted, and so higher than `acceptance`, which counts"
    " drafts behind a rejected one too",
    "predicted accepted per step": "E[T_N] = sum_n prod_{t<=n} min(1, v_t(x_t)/q_t(x_t)), mean over drafted chains"
    " x ~ q; no independence of positions is assumed. Measured: drafts accepted per chain; +- is one standard error",
    "if independent": "accepted per step if every draft were kept with the mean predicted acceptance (the i.i.d."
    " formula)",
    "z": "measured less predicted by the standard deviation of that difference; theory holds when these look like draws"
    " from a standard normal distribution, so that of 40 the largest is rarely above 3.5. - where nothing is random",
}

READING = (
    "In the picture, up is a better answer and right is a faster one. The static front is what a constant weight buys;"
    " a learned head is worth its training where its point lies above that line by more than the interval, or, in the"
    " lower panel, below it. The last arm on a line that still holds exact's reward is the one to serve."
)


def build_report(title: str, facts: Mapping[str, str], flags: Sequence[str], summary: Mapping[str, Any]) -> dict:
    """All but the rows, ready for JSON."""
    return {
        "title": title,
        "facts": dict(facts),
        "flags": list(flags),
        "definitions": DEFINITIONS,
        "largest_z": largest_z(summary),
        "summary": summary,
    }


def write_report(folder: Path, report: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """report.json, report.md and report.png; each appears complete or not at all. settings: into the JSON."""
    replace_file(folder / "report.json", json.dumps({**report, "settings": settings}, indent=1).encode())
    replace_file(folder / "report.md", render_markdown(report).encode())
    replace_file(folder / "report.png", draw(report))


def largest_z(summary: Mapping[str, Any]) -> dict[str, Any]:
    scores = [figures["theory"][name] for figures in summary.values() for name in ("acceptance_z", "accepted_z")]
    known = [abs(score) for score in scores if score is not None]
    return {"largest": max(known, default=None), "of": len(known)}


# --- tables ----------------------------------------------------------------------------------------------------------

NOTHING = "-"
Column = tuple[str, Callable[[Mapping[str, Any]], str]]


def _number(value: float | None, digits: int = 2, sign: bool = False) -> str:
    return NOTHING if value is None else f"{value:{'+' if sign else ''}.{digits}f}"


def _cell(found: Mapping[str, Any] | None, scale: float = 1.0, digits: int = 3, sign: bool = False) -> str:
    """`0.312 [0.290, 0.331]`"""
    if found is None:
        return NOTHING
    value = found.get("mean", found.get("median"))
    bounds = [_number(scale * bound, digits, sign) for bound in found["interval"] or ()]
    return _number(scale * value, digits, sign) + (f" [{', '.join(bounds)}]" if bounds else "")


def _with_error(value: float, error: float | None) -> str:
    return _number(value, 3) + ("" if error is None else f" ± {error:.3f}")


MAIN: tuple[Column, ...] = (
    ("acceptance, %", lambda f: _cell(f["acceptance_rate"], 100, 1)),
    ("MAT", lambda f: _number(f["mat"])),
    ("tokens/s", lambda f: _number(f["tokens_per_second"], 1)),
    ("over exact", lambda f: _cell(f["speedup"], digits=2)),
    ("reward", lambda f: _cell(f["reward"])),
    ("to exact", lambda f: _cell(f["reward_over_exact"], sign=True)),
    ("distance", lambda f: _cell(f["mean_distance"])),
)
FRONT: tuple[Column, ...] = (
    ("reward at the same acceptance", lambda f: _cell(f["against_front"]["reward"], sign=True)),
    ("distance at the same acceptance", lambda f: _cell(f["against_front"]["mean_distance"], sign=True)),
    ("acceptance at the same distance, %", lambda f: _cell(f["against_front"]["acceptance_rate"], 100, 1, sign=True)),
)
THEORY: tuple[Column, ...] = (
    ("drafts", lambda f: str(f["theory"]["positions"])),
    ("predicted acceptance, %", lambda f: _number(100 * f["theory"]["acceptance_predicted"])),
    ("measured, %", lambda f: _number(100 * f["theory"]["acceptance_measured"])),
    ("z", lambda f: _number(f["theory"]["acceptance_z"], 1, sign=True)),
    ("chains", lambda f: str(f["theory"]["chains"])),
    ("predicted accepted per step", lambda f: _error_cell(f, "accepted_predicted")),
    ("measured", lambda f: _error_cell(f, "accepted_measured")),
    ("z ", lambda f: _number(f["theory"]["accepted_z"], 1, sign=True)),
    ("if independent", lambda f: _number(f["theory"]["accepted_if_independent"], 3)),
)


def _error_cell(figures: Mapping[str, Any], name: str) -> str:
    return _with_error(figures["theory"][name], figures["theory"][f"{name}_error"])


def table(summary: Mapping[str, Any], columns: Sequence[Column] = MAIN) -> str:
    rows = [[arm, *(show(figures) for _, show in columns)] for arm, figures in summary.items()]
    return markdown_table(["arm", *(name for name, _ in columns)], rows)


def render_markdown(report: Mapping[str, Any]) -> str:
    summary, z = report["summary"], report["largest_z"]
    rest = {arm: figures for arm, figures in summary.items() if figures["line"] not in (EXACT, STATIC)}
    parts = [f"# {report['title']}", "![fronts](report.png)", READING, "## What was run", bullets(report["facts"])]
    if report["flags"]:
        parts += ["## Read with care", "\n".join(f"- {flag}" for flag in report["flags"])]
    parts += ["## All arms", table(summary)]
    if rest and any(figures["line"] == STATIC for figures in summary.values()):
        parts += ["## Above the static front", table(rest, FRONT)]
    parts += ["## Theory beside it", table(summary, THEORY)]
    if z["largest"] is not None:
        parts.append(f"The largest |z| of {z['of']} is {z['largest']:.1f}.")
    parts += ["## What the columns say", bullets(report["definitions"])]
    parts += ["## Again", f"```sh\n{report['facts']['command']}\n```"]
    return "\n\n".join(parts) + "\n"


# --- the picture -----------------------------------------------------------------------------------------------------


def draw(report: Mapping[str, Any]) -> bytes:
    """A PNG: reward over acceptance with intervals, and distance over acceptance."""
    figure = new_figure(7.5, 8.5)
    top, bottom = figure.subplots(2, 1, sharex=True)
    lines: dict[str, dict[str, Mapping[str, Any]]] = {}
    for arm, figures in report["summary"].items():
        lines.setdefault(figures["line"], {})[arm] = figures
    if STATIC in lines:  # weight 1 is exact
        lines[STATIC] = {**lines[STATIC], EXACT: report["summary"][EXACT]}
    for index, (line, arms) in enumerate(lines.items()):
        _draw_line(top, line, arms, "reward", f"C{index}")
        _draw_line(bottom, line, arms, "mean_distance", f"C{index}")
    top.set_ylabel("reward")
    top.set_title(report["title"], fontsize=10)
    top.legend(fontsize=8)
    bottom.set_ylabel("distance to the target per token")
    bottom.set_xlabel("acceptance: accepted by drafted tokens, %")
    return png(figure)


STYLES: Mapping[str, Mapping[str, Any]] = {
    EXACT: {"marker": "s", "markersize": 9, "linestyle": "", "color": "black", "zorder": 5},
    STATIC: {"marker": "o", "linewidth": 2.0},
    LEARNED: {"marker": "*", "markersize": 16, "linestyle": "", "color": "crimson", "zorder": 6},
}
"""How lines look that do not look like the rest."""


def _draw_line(axes: Any, line: str, arms: Mapping[str, Mapping[str, Any]], name: str, color: str) -> None:
    points = sorted((100 * figures["acceptance_rate"]["mean"], arm, figures) for arm, figures in arms.items())
    x, y = [point[0] for point in points], [figures[name]["mean"] for *_, figures in points]
    bounds = [figures[name]["interval"] or [height] * 2 for (*_, figures), height in zip(points, y, strict=True)]
    errors = [[max(height - low, 0.0) for (low, _), height in zip(bounds, y, strict=True)]]
    errors.append([max(high - height, 0.0) for (_, high), height in zip(bounds, y, strict=True)])
    style = {"marker": ".", "linewidth": 1.0, "color": color, **STYLES.get(line, {})}
    axes.errorbar(x, y, yerr=errors, label=line, capsize=2, elinewidth=0.6, **style)
    for place, height, (_, arm, figures) in zip(x, y, points, strict=True):
        if line != STATIC or figures["line"] == STATIC:
            axes.annotate(arm.partition(":")[2], (place, height), xytext=(4, 4), textcoords="offset points", fontsize=7)
