"""MAT of LogitSpec counted as its authors' code counts: `make logitspec-mat MODEL=... DATA=...`.

There a step commits the root and the accepted drafts, what it accepts beyond the length cap is counted, and the step in
which an end-of-sequence token is committed is the last. `speclight bench` cuts texts at the cap as a user wants them,
so its MAT is a little lower. dev24: the prompts 0, 10, 20, 30 of each of Spec-Bench's groups, sorted by question_id.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from speclight.infer import Engine, GenerationParams, LogitSpecDrafter, load_model
from speclight.infer.files import replace_file
from speclight.infer.questions import read_questions, select
from speclight.infer.report import markdown_table
from tqdm import tqdm

CAP, BEYOND = 128, 64
OFFICIAL = {
    "all": 2.31,
    "mt_bench": 1.66,
    "translation": 2.23,
    "summarization": 2.15,
    "qa": 2.71,
    "math_reasoning": 2.18,
    "rag": 4.51,
}
"""The authors' code on the same prompts and model, capacity 64, float32, as measured once outside this repository."""


def count(engine: Engine, prompt: Sequence[int]) -> tuple[int, int, int]:
    """(tokens committed, steps, steps in which a lookup matched) of one text, in the authors' way of counting."""
    engine.reset()
    params = GenerationParams(method="logitspec", max_new_tokens=CAP + BEYOND, ignore_eos=True)
    steps, emitted = -1, []  # the prefill commits nothing there: its token is the first step's root
    for chunk in engine.stream([list(prompt)], params):
        emitted += chunk.token_ids
        steps += 1
        (sequence,) = engine.scheduler.running or [None]
        hits = 0 if sequence is None else sequence.stats.retrieval_hits
        committed = emitted[:-1]
        ended = engine.model.eos_token_ids & set(committed)
        if len(committed) >= CAP or ended:
            return len(committed), steps, hits
    raise AssertionError("a text is longer than its cap")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", default="docs/bench/logitspec-mat.md")
    options = parser.parse_args()
    model, tokenizer = load_model(options.model, dtype="float32")
    engine = Engine(model, tokenizer, [LogitSpecDrafter(k=64, capacity=64, max_ngram=3, retrieved=20, tree="paper")])
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for question in tqdm(select(read_questions(options.data), per_group=4, stride=10)):
        figures = count(engine, engine.encode([{"role": "user", "content": question.turns[0]}]))
        for group in ("all", question.group):
            totals[group] = [a + b for a, b in zip(totals[group], figures, strict=True)]
    rows = [
        ["authors' code", *(f"{value:.2f}" for value in OFFICIAL.values())],
        ["speclight", *(f"{totals[group][0] / totals[group][1]:.2f}" for group in OFFICIAL)],
        ["lookups that matched", *(f"{100 * totals[group][2] / totals[group][1]:.1f} %" for group in OFFICIAL)],
    ]
    table = markdown_table(["MAT, capacity 64, float32", *OFFICIAL], rows)
    replace_file(Path(options.output), f"# LogitSpec's MAT\n\n{(__doc__ or '').strip()}\n\n{table}\n".encode())
    print(table)


if __name__ == "__main__":
    main()
