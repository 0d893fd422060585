"""Every (L_d, L_i, N_d, N_i) on the same prompts: `make hispec-sweep MODEL=... DATA=... OUTPUT=... ARGS=...`.

Layer-tokens and layer-passes per emitted token are counts, which no noise touches; seconds are those of one run each,
in an order that is shuffled, so that they show the shape and not the last digit (`speclight bench` compares two
settings well). Rows are kept in rows.jsonl as they come; the same command continues.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import time
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from speclight.infer.bench import processor_name, versions
from speclight.infer.build import EngineOptions, build_engine, prepare
from speclight.infer.engine import Engine
from speclight.infer.files import replace_file
from speclight.infer.questions import read_questions, select
from speclight.infer.report import markdown_table
from speclight.infer.request import GenerationParams
from speclight.infer.stats import SequenceStats
from tqdm import tqdm

PLAIN, EARLY, HISPEC = METHODS = ("ar", "early-exit", "hispec")
COSTS = {
    "layer_tokens": "layer-tokens per emitted token",
    "layer_passes": "layer-passes per emitted token",
    "milliseconds": "ms per emitted token",
}


class Setting(NamedTuple):
    """`Setting("hispec", 2, 4, 2, 4)`; None where a method has no such thing."""

    method: str
    draft_layer: int | None = None
    verify_layer: int | None = None
    draft_tokens: int | None = None
    window: int | None = None

    def params(self, max_new_tokens: int) -> GenerationParams:
        if self.method == HISPEC:
            own: dict[str, Any] = {"verify_layer": self.verify_layer, "window": self.window}
            own["inner_draft_tokens"] = self.draft_tokens
        else:
            own = {"draft_tokens": self.draft_tokens}
        return GenerationParams(method=self.method, draft_layer=self.draft_layer, max_new_tokens=max_new_tokens, **own)


def grid(options: argparse.Namespace) -> list[Setting]:
    """Plain decoding, every early exit, and every pair of them whose window holds at least one draft."""
    settings = [Setting(PLAIN)]
    for layer, tokens in product(options.draft_layers, options.draft_tokens):
        settings.append(Setting(EARLY, layer, None, tokens))
        for above, window in product(options.verify_layers, options.windows):
            if above > layer and window >= tokens:
                settings.append(Setting(HISPEC, layer, above, tokens, window))
    return settings


def measure(engine: Engine, setting: Setting, prompts: Sequence[Any], max_new_tokens: int) -> dict[str, Any]:
    engine.reset()
    started = time.perf_counter()
    texts = engine.generate(prompts, setting.params(max_new_tokens))
    seconds = time.perf_counter() - started
    total, work = SequenceStats.total(text.stats for text in texts), engine.stats
    tokens = total.emitted_tokens
    return {
        "setting": list(setting),
        "tokens": tokens,
        "milliseconds": 1000 * seconds / tokens,
        "layer_tokens": work.decoding_layer_tokens / tokens,
        "layer_passes": work.layer_passes / tokens,
        "mat": total.mat,
        "acceptance": total.acceptance_rate,
        "inner_acceptance": total.inner_acceptance_rate,
    }


def known_rows(path: Path, what: dict[str, Any]) -> dict[Setting, dict[str, Any]]:
    """Rows of an earlier run of the same command; the first line of a new file says what that is."""
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0] if path.exists() else ""
    first, *lines = whole.splitlines() or [""]
    if first and json.loads(first) != what:
        raise SystemExit(f"{path} belongs to another sweep, {first}; choose another --output")
    path.write_text("".join(line + "\n" for line in (json.dumps(what), *lines)), encoding="utf-8")
    return {Setting(*row["setting"]): row for row in map(json.loads, lines)}


def best(rows: Iterable[dict[str, Any]], method: str, cost: str) -> dict[str, Any]:
    return min((row for row in rows if row["setting"][0] == method), key=lambda row: row[cost])


# --- the report ---------------------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]]) -> str:
    head = ["least", "method", "L_d", "L_i", "N_d", "N_i", *COSTS.values(), "MAT", "acceptance", "inner acceptance"]
    lines = []
    for cost, method in product(COSTS, METHODS):
        row = best(rows, method, cost)
        shown = ["-" if value is None else str(value) for value in row["setting"][1:]]
        figures = [f"{row[name]:.2f}" for name in (*COSTS, "mat")]
        rates = [f"{100 * row[name]:.1f} %" for name in ("acceptance", "inner_acceptance")]
        lines.append([COSTS[cost].split()[0], method, *shown, *figures, *rates])
    return markdown_table(head, lines)


def ratios(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for cost, name in COSTS.items():
        plain, early, hispec = (best(rows, method, cost)[cost] for method in METHODS)
        lines.append([name, f"{early / hispec:.2f}", f"{plain / early:.2f}", f"{plain / hispec:.2f}"])
    return markdown_table(
        ["at each method's least", "hispec over early-exit", "early-exit over ar", "hispec over ar"], lines
    )


def draw(rows: Sequence[dict[str, Any]], title: str) -> bytes:
    figure = Figure(figsize=(13, 8), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 3)
    for axes, (cost, against) in zip(
        top,
        (("layer_tokens", "layer_passes"), ("layer_tokens", "milliseconds"), ("layer_passes", "milliseconds")),
        strict=True,
    ):
        _scatter(axes, rows, cost, against)
    least = best(rows, HISPEC, "milliseconds")["setting"]
    hispec = {Setting(*row["setting"]): row for row in rows if row["setting"][0] == HISPEC}
    _map(bottom[0], hispec, "layer_tokens", least, (1, 2))
    _map(bottom[1], hispec, "layer_tokens", least, (3, 4))
    _map(bottom[2], hispec, "layer_passes", least, (3, 4))
    figure.suptitle(title, fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def _scatter(axes: Any, rows: Sequence[dict[str, Any]], across: str, up: str) -> None:
    for method, marker in zip(METHODS, "*o.", strict=True):
        mine = [row for row in rows if row["setting"][0] == method]
        size = {"ar": 140, "early-exit": 30, "hispec": 14}[method]
        axes.scatter([r[across] for r in mine], [r[up] for r in mine], s=size, marker=marker, label=method, alpha=0.7)
    axes.set_xlabel(COSTS[across])
    axes.set_ylabel(COSTS[up])
    axes.legend(fontsize=8)


NAMES = Setting._fields
LABELS = {"draft_layer": "L_d", "verify_layer": "L_i", "draft_tokens": "N_d", "window": "N_i"}


def _map(
    axes: Any, rows: dict[Setting, dict[str, Any]], cost: str, least: Sequence[Any], varied: tuple[int, int]
) -> None:
    """A cost over two of the four, the others as in the setting that was fastest."""
    down, across = varied
    fixed = [index for index in (1, 2, 3, 4) if index not in varied]
    chosen = {s: row for s, row in rows.items() if all(s[index] == least[index] for index in fixed)}
    ys, xs = (sorted({s[index] for s in chosen}) for index in varied)
    cells = [[chosen.get(Setting(*_with(least, {down: y, across: x})), {}).get(cost) for x in xs] for y in ys]
    axes.imshow(
        [[float("nan") if cell is None else cell for cell in line] for line in cells], cmap="viridis_r", aspect="auto"
    )
    for row, line in enumerate(cells):
        for column, cell in enumerate(line):
            axes.text(
                column, row, "" if cell is None else f"{cell:.1f}", ha="center", va="center", fontsize=8, color="white"
            )
    axes.set_xticks(range(len(xs)), xs)
    axes.set_yticks(range(len(ys)), ys)
    axes.set_xlabel(LABELS[NAMES[across]])
    axes.set_ylabel(LABELS[NAMES[down]])
    at = ", ".join(f"{LABELS[NAMES[index]]} = {least[index]}" for index in fixed)
    axes.set_title(f"{COSTS[cost]}\n{at}", fontsize=9)


def _with(setting: Sequence[Any], changes: dict[int, Any]) -> list[Any]:
    return [changes.get(index, value) for index, value in enumerate(setting)]


def write(folder: Path, rows: Sequence[dict[str, Any]], title: str, facts: dict[str, str]) -> None:
    bullets = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    text = f"# {title}\n\n{bullets}\n\n{ratios(rows)}\n\n{table(rows)}\n\n![sweep](sweep.png)\n"
    replace_file(folder / "sweep.md", text.encode())
    replace_file(folder / "sweep.png", draw(rows, title))
    kept = "".join(json.dumps(row) + "\n" for row in rows)
    replace_file(folder / "sweep.jsonl", kept.encode())


SHAPES = ("draft_layers", "verify_layers", "draft_tokens", "windows")
"""What may grow when a sweep is continued."""


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "data", "output"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--bundle")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    for name, default in (
        ("draft-layers", "2"),
        ("verify-layers", "4"),
        ("draft-tokens", "1,2,3,4"),
        ("windows", "2,4,6,8"),
    ):
        parser.add_argument(f"--{name}", type=_numbers, default=_numbers(default))
    return parser.parse_args()


def main() -> None:
    options = parse()
    settings = grid(options)
    if {setting.method for setting in settings} < set(METHODS):
        raise SystemExit("no pair is left: --verify-layers must go above --draft-layers, --windows hold --draft-tokens")
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    engine_options = EngineOptions(
        model=options.model, dtype=options.dtype, bundle=options.bundle, max_num_seqs=options.batch_size
    )
    prepared = prepare(engine_options, METHODS)
    engine = build_engine(prepared)
    questions = select(read_questions(options.data), limit=options.limit)
    texts = [question.turns[0] for question in questions]
    prompts = [[{"role": "user", "content": text}] for text in texts] if prepared.has_template else texts
    path = folder / "rows.jsonl"
    rows = known_rows(
        path, {name: value for name, value in vars(options).items() if name not in SHAPES and name != "output"}
    )
    waiting = [setting for setting in settings if setting not in rows]
    random.Random(0).shuffle(waiting)
    measure(engine, settings[0], prompts[:2], 8)  # warms up
    with path.open("a", encoding="utf-8") as file:
        for setting in tqdm(waiting, desc="settings"):
            rows[setting] = measure(engine, setting, prompts, options.max_new_tokens)
            file.write(json.dumps(rows[setting]) + "\n")
            file.flush()
    title = f"HiSpec's four numbers: {Path(options.model).name}, batch {options.batch_size}"
    facts = {
        "prompts": f"{len(prompts)} of {Path(options.data).name}, up to {options.max_new_tokens} new tokens, greedy",
        "model": f"{engine.model.num_layers} layers, {str(engine.model.dtype).removeprefix('torch.')}",
        "exits": Path(options.bundle).name if options.bundle else "the model's own norm and unembedding",
        "processor": processor_name(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "date": time.strftime("%Y-%m-%d"),
    }
    write(folder, [rows[setting] for setting in settings], title, facts)


if __name__ == "__main__":
    main()
