"""A replay's report: MAT by drafter, node budget and group, as JSON, tables and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import replace_file
from .report import bullets, markdown_table, new_figure, png
from .stats import SequenceStats, mat_after_prefill, ratio
from .summary import ALL

if TYPE_CHECKING:
    from .recording import Recording
    from .replay import Outcome

DEFINITIONS = {
    "MAT": "emitted tokens by passes of the target that gave logits, the pass over the prompt included, and the bonus"
    " or corrected token; plain decoding is exactly 1",
    "MAT after prefill": "the same without each text's first token and pass",
    "budget": "nodes of a proposal, root included; a chain has one drafted token less",
    "accepted by source": "emitted tokens by the label of the drafted node that they were; the rest are corrected or"
    " bonus tokens. What several sources know has the label of the first of ngram, successor, last-logit, datastore",
    "ms": "mean milliseconds of CPU time a step in `propose`, and in `observe` and `read` together, of one thread",
}


def build_report(
    recording: Recording,
    variants: Mapping[str, Mapping[str, Any]],
    outcomes: Mapping[tuple[str, int], Sequence[Outcome]],
) -> dict[str, Any]:
    """All of it, ready for JSON."""
    results = []
    for (name, budget), texts in outcomes.items():
        groups = dict.fromkeys([ALL, *(outcome.text.group for outcome in texts)])
        counts = {
            group: SequenceStats.total(o.stats for o in texts if group in (ALL, o.text.group)).as_dict()
            for group in groups
        }
        steps = counts[ALL]["draft_calls"]
        times = {
            "propose_ms": 1000 * ratio(sum(o.proposing for o in texts), steps),
            "observe_ms": 1000 * ratio(sum(o.observing for o in texts), steps),
        }
        after = mat_after_prefill([outcome.stats for outcome in texts])
        results.append({"method": name, "budget": budget, "groups": counts, "mat_after_prefill": after} | times)
    facts = dict(recording.settings) | {"texts": len(recording.texts), "tokens": _num_tokens(recording)}
    return {"recording": facts, "definitions": DEFINITIONS, "methods": dict(variants), "results": results}


def _num_tokens(recording: Recording) -> int:
    return sum(len(text.token_ids) - text.num_prompt for text in recording.texts)


def write_report(folder: str | Path, report: Mapping[str, Any]) -> None:
    """report.json, report.md and report.png; each appears complete or not at all."""
    folder = Path(folder)
    replace_file(folder / "report.json", (json.dumps(report, indent=1) + "\n").encode())
    replace_file(folder / "report.md", render_markdown(report).encode())
    replace_file(folder / "report.png", draw(report))


def _budgets(report: Mapping[str, Any]) -> list[int]:
    return sorted({result["budget"] for result in report["results"]})


def _table(report: Mapping[str, Any], cell: Any) -> str:
    budgets = _budgets(report)
    rows: dict[str, dict[int, str]] = {}
    for result in report["results"]:
        rows.setdefault(result["method"], {})[result["budget"]] = cell(result)
    return markdown_table(
        ["method", *map(str, budgets)], [[name, *(r[b] for b in budgets)] for name, r in rows.items()]
    )


def mat_table(report: Mapping[str, Any]) -> str:
    """Methods down, node budgets across, over all texts."""
    return _table(report, lambda result: f"{result['groups'][ALL]['mat']:.3f}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _group_table(report: Mapping[str, Any], budget: int) -> str:
    results = [result for result in report["results"] if result["budget"] == budget]
    groups = list(results[0]["groups"])
    rows = [[r["method"], *(f"{r['groups'][group]['mat']:.2f}" for group in groups)] for r in results]
    return markdown_table(["method", *groups], rows)


def _source_table(report: Mapping[str, Any], budget: int) -> str:
    """Shares of the emitted tokens; empty where nothing has a label."""
    results = [result for result in report["results"] if result["budget"] == budget]
    counted = [(result["method"], result["groups"][ALL]) for result in results]
    labels = list(dict.fromkeys(label for _, counts in counted for label in counts["accepted_from"]))
    rows = [
        [method, *(f"{ratio(counts['accepted_from'].get(label, 0), counts['emitted_tokens']):.1%}" for label in labels)]
        for method, counts in counted
    ]
    return markdown_table(["method", *labels], rows) if labels else ""


def render_markdown(report: Mapping[str, Any]) -> str:
    parts = ["# speclight replay", bullets(report["recording"]), "## MAT by node budget", mat_table(report)]
    parts += ["## MAT after prefill", _table(report, lambda result: _number(result["mat_after_prefill"]))]
    for budget in _budgets(report):
        parts += [f"## MAT by group, {budget} nodes", _group_table(report, budget)]
    sources = _source_table(report, _budgets(report)[-1])
    parts += [f"## Accepted by source, {_budgets(report)[-1]} nodes", sources] if sources else []
    costs = _table(report, lambda result: f"{result['propose_ms']:.2f} + {result['observe_ms']:.2f}")
    parts += ["## Cost of drafting, ms a step: propose + observe", costs]
    parts += ["## What the words say", bullets(report["definitions"])]
    return "\n\n".join(parts) + "\n"


def draw(report: Mapping[str, Any]) -> bytes:
    """A PNG: MAT over the node budget, and by group at the largest budget."""
    figure = new_figure(11.0, 4.2)
    by_budget, by_group = figure.subplots(1, 2, width_ratios=(2, 3))
    names = list(dict.fromkeys(result["method"] for result in report["results"]))
    for index, name in enumerate(names):
        results = [result for result in report["results"] if result["method"] == name]
        by_budget.plot(
            [r["budget"] for r in results], [r["groups"][ALL]["mat"] for r in results], marker="o", label=name
        )
        groups = results[-1]["groups"]
        places = [place + (index - (len(names) - 1) / 2) * 0.8 / len(names) for place in range(len(groups))]
        by_group.bar(places, [counts["mat"] for counts in groups.values()], 0.8 / len(names))
    by_budget.set_xscale("log", base=2)
    by_budget.set_xticks(_budgets(report), [str(budget) for budget in _budgets(report)])
    by_budget.set_xlabel("nodes, root included")
    by_budget.set_ylabel("MAT")
    labels = list(report["results"][-1]["groups"])
    by_group.set_xticks(range(len(labels)), labels, fontsize=8)
    by_group.set_title(f"by group, {_budgets(report)[-1]} nodes", fontsize=10)
    figure.legend(loc="outside lower center", fontsize=8, ncols=4)
    return png(figure)
