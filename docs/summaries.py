"""Prompts and rows for the SmolLM2 experiment of diversed.md: articles to sum up, cut so that they are read quickly.

    python docs/summaries.py --data QUESTIONS --output prompts.jsonl --leave-out TEST_QUESTIONS --limit 192
    speclight regenerate --model MODEL --input prompts.jsonl --output answers.jsonl --max-new-tokens 48 --keep-truncated
    python docs/summaries.py --answers answers.jsonl --output rows.jsonl            # to train on
    python docs/summaries.py --data TEST_QUESTIONS --output test.jsonl              # to measure on

QUESTIONS are JSONL files in Spec-Bench's format. Of each row of category "summarization" the first turn is taken, with
its `reference` where it has one, cut to --characters at a space. Articles that begin like one of --leave-out are not.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

SAME = 200
"""Characters by which an article is recognised."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data")
    source.add_argument("--answers")
    parser.add_argument("--leave-out")
    parser.add_argument("--output", required=True)
    parser.add_argument("--characters", type=int, default=1000)
    parser.add_argument("--limit", type=int, default=None, help="so many, drawn with seed 0; all in order if unset")
    return parser.parse_args()


def rows_of(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]


def cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[:characters].rsplit(" ", 1)[0]


def prompts(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = [row for row in rows_of(options.data) if row["category"] == "summarization"]
    if options.leave_out is not None:
        known = {row["turns"][0][:SAME] for row in rows_of(options.leave_out)}
        rows = [row for row in rows if row["turns"][0][:SAME] not in known]
    if options.limit is not None:
        random.Random(0).shuffle(rows)
        rows = rows[: options.limit]
    found = [{"id": str(row["question_id"]), "prompt": cut(row["turns"][0], options.characters)} for row in rows]
    return [
        new | ({"reference": row["reference"]} if "reference" in row else {})
        for new, row in zip(found, rows, strict=True)
    ]


def answered(options: argparse.Namespace) -> list[dict[str, Any]]:
    dialogues = [row["messages"][-2:] for row in rows_of(options.answers)]
    return [{"prompt": asked["content"], "reference": said["content"]} for asked, said in dialogues]


def main() -> None:
    options = parse()
    rows = answered(options) if options.data is None else prompts(options)
    Path(options.output).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} rows in {options.output}")


if __name__ == "__main__":
    main()
