"""Write the README's results table from the committed reports: `make results-table`.

The reports themselves come from `speclight bench`; each one's report.md names the command that made it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from speclight.infer.report import markdown_table
from speclight.infer.summary import ALL

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- results: made by `make results-table` -->", "<!-- end of results -->"
REPORTS = ("bf16-batch1", "fp32-batch1", "bf16-batch4", "bf16-batch16", "bf16-batch32", "bf16-batch32-peers")
HEAD = ("run", "method", "tokens/s", "over plain decoding", "over transformers", "MAT", "equal to plain decoding")


def results() -> str:
    """A table row per report and method, and on what each report was measured."""
    reports = [(name, json.loads((ROOT / "docs/bench" / name / "report.json").read_text())) for name in REPORTS]
    rows = [row for name, report in reports for row in _rows(name, report)]
    runs: dict[str, list[str]] = defaultdict(list)
    for name, report in reports:
        facts = report["header"]["facts"]
        runs[", ".join(facts[fact] for fact in ("processor", "versions", "date"))].append(name)
    where = "; ".join(f"{', '.join(names)}: {shared}" for shared, names in runs.items())
    return f"{markdown_table(HEAD, rows)}\n\n{where}. Up to 128 new tokens, greedy, chat template."


def _rows(name: str, report: dict[str, Any]) -> list[list[str]]:
    link = f"[{name}](docs/bench/{name}/report.md)"
    return [[link, method, *_cells(figures[ALL])] for method, figures in report["summary"].items()]


def _cells(figures: dict[str, Any]) -> list[str]:
    over = [figures["speedup"].get(baseline) for baseline in ("ar", "transformers")]
    return [
        f"{figures['tokens_per_second']:.1f}",
        *("-" if ratio is None else f"{ratio['of_totals']:.2f}" for ratio in over),
        "-" if figures["mat"] is None else f"{figures['mat']:.2f}",
        "-" if figures["equal_share"] is None else f"{100 * figures['equal_share']:.0f} %",
    ]


def with_results(readme: str) -> str:
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{results()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(with_results(path.read_text(encoding="utf-8")), encoding="utf-8")
