"""A benchmark's report: report.json with every row, report.md with tables, report.png with the speed-ups by group."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .files import replace_file
from .summary import ALL, BASELINES, REFERENCE, Difference, Run, summarize

DEFINITIONS = {
    "tokens/s": "emitted tokens by wall-clock seconds, prefill included; a prompt's time is its median over repeats",
    "over ...": "speed-up, the ratio of tokens/s on the same prompts with its 95 % bootstrap interval over prompts; of"
    " totals, and the mean over prompts of each one's ratio",
    "MAT": "mean accepted tokens: emitted tokens by passes of the target that gave logits, the bonus or corrected token"
    " included; plain decoding is exactly 1. LogitSpec's authors also count what the last step accepts past a text's"
    " end, which gives a little more",
    "MAT after prefill": "the same without each text's first token and pass",
    "acceptance": "accepted by drafted tokens; a tree's nodes count without its root",
    "inner acceptance": "the same of drafts under HiSpec's intermediate layer",
    "layer-tokens": "tokens times layers of the target that ran them, prefill apart, by emitted tokens; plain decoding"
    " has the number of its layers. Exit heads come on top and are no layer-tokens",
    "layer-passes": "layers run one after another by emitted tokens, prefill included, whatever the tokens in them:"
    " that is time where reading weights is",
    "head-tokens": "tokens through early exits' heads, by emitted tokens",
    "retrieval": "share of lookups that found a match",
    "equal": "share of texts whose token ids are those of plain decoding",
    "near-ties": "texts that part from plain decoding where the lower of the two tokens is less than the near-tie gap"
    " stated above under the highest logit",
    "different": "texts that part from it anywhere else: faults, or rounding beyond that gap",
    "overhead": "the time in drafters (lookup, trees, learning; a draft model's passes, and the target's first layers"
    " where an early exit runs them) as a share of that of all steps",
    "distance": "total variation between what drafts were verified against and the model's own distribution, by emitted"
    " tokens; at temperature 0 the share of tokens that the model itself would not have chosen there",
    "quality": "is that of the model for every method without a distance: those are lossless, so what drafts, from"
    " which layer and how much, changes the speed of a text and not the text. A method with a distance is lossy",
}


@dataclass(frozen=True)
class Header:
    """What a report says of its run.

    methods: in the order of the tables. near_tie_gap: logit gap under which a difference counts as a near-tie. greedy:
    whether texts can be compared at all. facts: {name: value} to be listed. flags: what a reader must know.
    """

    title: str
    methods: Sequence[str]
    near_tie_gap: float
    greedy: bool
    facts: Mapping[str, str]
    flags: Sequence[str] = ()


def build_report(header: Header, runs: Sequence[Run], differences: Sequence[Difference]) -> dict[str, Any]:
    """All of it, ready for JSON."""
    summary = summarize(runs, differences, header.methods, header.near_tie_gap, header.greedy)
    return {
        "header": asdict(header),
        "definitions": DEFINITIONS,
        "summary": summary,
        "differences": [asdict(difference) for difference in differences],
        "runs": [asdict(run) for run in runs],
    }


def write_report(folder: str | Path, report: Mapping[str, Any]) -> None:
    """report.json, report.md and report.png; each appears complete or not at all."""
    folder = Path(folder)
    replace_file(folder / "report.json", _to_json(report).encode())
    replace_file(folder / "report.md", render_markdown(report).encode())
    replace_file(folder / "report.png", draw(report))


def _to_json(report: Mapping[str, Any]) -> str:
    """Indented but for the rows, which take a line each: their token ids would fill pages."""
    tables = {key: value for key, value in report.items() if key != "runs"}
    rows = ",\n".join(json.dumps(row) for row in report["runs"])
    return json.dumps(tables, indent=1)[:-2] + f',\n "runs": [\n{rows}\n ]\n}}\n'


NOTHING = "-"


def _number(value: float | None, digits: int = 2) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.1f} %"


def _count(value: int | None) -> str:
    return NOTHING if value is None else str(value)


def _ratio_cell(figures: Mapping[str, Any], baseline: str, kind: str, interval: bool = True) -> str:
    found = figures["speedup"].get(baseline)
    if found is None:
        return NOTHING
    bounds = found[f"{kind}_interval"] if interval else None
    return f"{found[kind]:.2f}" + (f" [{bounds[0]:.2f}, {bounds[1]:.2f}]" if bounds else "")


Column = tuple[str, Callable[[Mapping[str, Any]], str]]

COLUMNS: tuple[Column, ...] = (
    ("tokens/s", lambda f: _number(f["tokens_per_second"], 1)),
    ("MAT", lambda f: _number(f["mat"])),
    ("MAT after prefill", lambda f: _number(f["mat_after_prefill"])),
    ("acceptance", lambda f: _percent(f["acceptance_rate"])),
    ("inner acceptance", lambda f: _percent(f["inner_acceptance_rate"])),
    ("layer-tokens", lambda f: _number(f["layer_tokens_per_token"])),
    ("layer-passes", lambda f: _number(f["layer_passes_per_token"])),
    ("head-tokens", lambda f: _number(f["head_tokens_per_token"])),
    ("distance", lambda f: _number(f["mean_distance"], 3)),
    ("retrieval", lambda f: _percent(f["retrieval_rate"])),
    ("equal", lambda f: _percent(f["equal_share"])),
    ("near-ties", lambda f: _count(f["near_ties"])),
    ("different", lambda f: _count(f["different"])),
    ("overhead", lambda f: _percent(f["overhead_share"])),
)


LONG = (
    "MAT after prefill",
    "inner acceptance",
    "layer-tokens",
    "layer-passes",
    "head-tokens",
    "distance",
    "retrieval",
    "overhead",
)


def _columns(summary: Mapping[str, Any]) -> list[Column]:
    speed = [
        (f"over {baseline}, {label}", lambda f, b=baseline, k=kind: _ratio_cell(f, b, k))
        for baseline in _baselines(summary)
        for kind, label in (("of_totals", "totals"), ("mean", "mean"))
    ]
    return [COLUMNS[0], *speed, *COLUMNS[1:]]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def overall_table(report: Mapping[str, Any], brief: bool = False) -> str:
    """One row per method over all prompts. brief: without what a terminal has no room for."""
    summary = report["summary"]
    columns = _columns(summary)
    if brief:
        columns = [column for column in columns if not column[0].endswith(", mean") and column[0] not in LONG]
    rows = [[method, *(show(figures[ALL]) for _, show in columns)] for method, figures in summary.items()]
    return markdown_table(["method", *(name for name, _ in columns)], rows)


def group_tables(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(title, table) per figure: methods down, groups across."""
    summary = report["summary"]
    groups = next(iter(summary.values())).keys()
    tables = []
    for title, show in _columns(summary):
        rows = [[method, *(show(figures[group]) for group in groups)] for method, figures in summary.items()]
        if any(cell not in (NOTHING, "0") for row in rows for cell in row[2:]):
            tables.append((title, markdown_table(["method", *groups], rows)))
    return tables


def _baselines(summary: Mapping[str, Any]) -> list[str]:
    return [baseline for baseline in BASELINES if baseline in summary]


def render_markdown(report: Mapping[str, Any]) -> str:
    header = report["header"]
    parts = [f"# {header['title']}", "## What was run", bullets(header["facts"])]
    if header["flags"]:
        parts += ["## Read with care", "\n".join(f"- {flag}" for flag in header["flags"])]
    parts += ["## All prompts", overall_table(report), "## What the columns say", bullets(report["definitions"])]
    parts += ["## By group", *(f"### {title}\n\n{table}" for title, table in group_tables(report))]
    if report["differences"]:
        parts += ["## Where texts part from plain decoding", _difference_table(report)]
    return "\n\n".join(parts) + "\n"


def bullets(facts: Mapping[str, Any]) -> str:
    """`- name: value`, a line each."""
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def _difference_table(report: Mapping[str, Any]) -> str:
    limit = report["header"]["near_tie_gap"]
    rows = [
        [
            d["method"],
            f"{d['question_id']}" + (f", turn {d['turn'] + 1}" if d["turn"] else ""),
            str(d["repeat"] + 1),
            str(d["position"]),
            "ended" if d["gap"] is None else f"{d['gap']:.2g}",
            "near-tie" if d["gap"] is not None and d["gap"] < limit else "different",
        ]
        for d in report["differences"]
    ]
    return markdown_table(["method", "question", "repeat", "token", "logit gap", ""], rows)


def new_figure(width: float, height: float) -> Any:
    """An empty picture of so many inches, drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def draw(report: Mapping[str, Any]) -> bytes:
    """A PNG: speed-up by group and method, ratio of totals with its interval, over the strongest baseline there is."""
    summary = report["summary"]
    baseline = _baselines(summary)[-1]
    methods = [method for method in summary if baseline in summary[method][ALL]["speedup"]]
    groups = list(next(iter(summary.values())))
    figure = new_figure(max(7.0, 1.5 * len(groups) + 1.5), 4.2)
    axes = figure.add_subplot()
    for index, method in enumerate(methods):
        _draw_bars(
            axes, index, len(methods), method, [summary[method][group]["speedup"].get(baseline) for group in groups]
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(f"speed-up over {'plain decoding' if baseline == REFERENCE else baseline}")
    axes.set_title(report["header"]["title"], fontsize=10)
    if methods:
        figure.legend(loc="outside lower center", fontsize=8, ncols=4)
    return png(figure)


def _draw_bars(axes: Any, index: int, count: int, label: str, cells: Sequence[Mapping[str, Any] | None]) -> None:
    width = 0.8 / count
    places = [(group + (index - (count - 1) / 2) * width, cell) for group, cell in enumerate(cells) if cell is not None]
    heights = [cell["of_totals"] for _, cell in places]
    bounds = [cell["of_totals_interval"] or [height] * 2 for (_, cell), height in zip(places, heights, strict=True)]
    errors = [[max(h - b[0], 0.0) for h, b in zip(heights, bounds, strict=True)]]
    errors.append([max(b[1] - h, 0.0) for h, b in zip(heights, bounds, strict=True)])
    axes.bar([x for x, _ in places], heights, width, yerr=errors, capsize=2, label=label, error_kw={"linewidth": 0.8})
