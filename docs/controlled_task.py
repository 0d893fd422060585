"""A task on which it is known where drafts may be trusted: `python docs/controlled_task.py data --output DIR`.

A text tells who did what, and then gives a sum:

    Deeds grand, things grim. Add 37+48. Story: Leo forged rosy graves, Mia baked royal crows. Sum: 85

The story is free. Who acts, and how things look, is a matter of chance; deeds and things are mostly of the style that
the prompt names for them, each of several words at random, else of any. Nothing of it bears on the reward, which reads
the number only. An early exit that does not see as far as the prompt writes such stories as well as anybody, but with
other odds than the whole model: verified exactly, many of its drafts are turned down for nothing.

The sum is critical. Its digits have one right value each, hang together by a carry, and follow from numbers that stand
before the story.

Rows that are nothing but a sum teach adding at less cost than whole texts. A tenth of all pairs of numbers is in no
row that is trained on, and tests ask only for those. Everything follows from the seed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from random import Random
from typing import NamedTuple

NAMES = ("Mia", "Leo", "Ada", "Max", "Eva", "Sam")
DEEDS = {
    "plain": ("baked", "washed", "peeled"),
    "grand": ("forged", "crowned", "praised"),
    "grim": ("buried", "cursed", "haunted"),
    "merry": ("juggled", "tickled", "painted"),
}
THINGS = {
    "plain": ("bread", "plates", "beans"),
    "grand": ("thrones", "towers", "knights"),
    "grim": ("graves", "crows", "bones"),
    "merry": ("kites", "clowns", "puppets"),
}
LOOKS = ("fresh", "brown", "marble", "golden", "royal", "rotten", "hollow", "bitter", "silly", "rosy")
STYLES = tuple(DEEDS)
NAMED = 0.65
"""How often a word is of the style that the prompt names; else it is of any, that one among them."""

CLAUSES, GO_ON, MOST_CLAUSES = 3, 5 / 6, 20
"""A story has so many clauses, and so often one more, but never above the last number."""

NUMBERS = range(10, 50)


class Pairs:
    """Pairs of numbers to add, a tenth of which are kept for tests."""

    def __init__(self, seed: int) -> None:
        pairs = [(first, second) for first in NUMBERS for second in NUMBERS]
        Random(seed).shuffle(pairs)
        self.unseen, self.seen = pairs[: len(pairs) // 10], pairs[len(pairs) // 10 :]


class Styles(NamedTuple):
    """`Styles("grand", "grim")`: of deeds and of things."""

    deeds: str
    things: str

    @classmethod
    def draw(cls, random: Random) -> Styles:
        return cls(random.choice(STYLES), random.choice(STYLES))


def prompt(styles: Styles, pair: tuple[int, int]) -> str:
    return f"Deeds {styles.deeds}, things {styles.things}. Add {pair[0]}+{pair[1]}. Story:"


def story(styles: Styles, random: Random) -> str:
    number = CLAUSES
    while number < MOST_CLAUSES and random.random() < GO_ON:
        number += 1
    return ", ".join(clause(styles, random) for _ in range(number))


def clause(styles: Styles, random: Random) -> str:
    """`Leo forged rosy graves`"""
    deed, thing = word(DEEDS, styles.deeds, random), word(THINGS, styles.things, random)
    return f"{random.choice(NAMES)} {deed} {random.choice(LOOKS)} {thing}"


def word(words: Mapping[str, tuple[str, ...]], style: str, random: Random) -> str:
    return random.choice(words[style if random.random() < NAMED else random.choice(STYLES)])


def text_row(pair: tuple[int, int], random: Random) -> dict[str, str]:
    styles = Styles.draw(random)
    return {"prompt": prompt(styles, pair), "completion": f" {story(styles, random)}. Sum: {sum(pair)}"}


def sum_row(pair: tuple[int, int]) -> dict[str, str]:
    return {"prompt": f"Add {pair[0]}+{pair[1]}. Sum:", "completion": f" {sum(pair)}"}


def prompt_row(number: int, pair: tuple[int, int], random: Random) -> dict[str, str]:
    return {"id": str(number), "prompt": prompt(Styles.draw(random), pair), "reference": str(sum(pair))}


def vocabulary() -> Iterator[str]:
    """Lines from which `speclight tokenizer` learns every word as one token, and no number but the digits."""
    words = {*NAMES, *STYLES, *LOOKS, *chain(*DEEDS.values(), *THINGS.values())}
    for text in sorted(words | {"Deeds", "things", "Add", "Story", "Sum"}):
        yield from (text, f" {text}")


def write_rows(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_data(folder: Path, texts: int, sums: int, prompts: int, seed: int) -> None:
    """Rows to train and validate on, prompts to train and test a verifier on, lines for the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs, random = Pairs(seed), Random(seed)
    rows = [text_row(random.choice(pairs.seen), random) for _ in range(texts)]
    rows += [sum_row(random.choice(pairs.seen)) for _ in range(sums)]
    random.shuffle(rows)
    write_rows(folder / "train.jsonl", rows)
    write_rows(folder / "val.jsonl", (text_row(random.choice(pairs.unseen), random) for _ in range(200)))
    for name, known in (("train", pairs.seen), ("test", pairs.unseen)):
        asked = (prompt_row(number, random.choice(known), random) for number in range(prompts))
        write_rows(folder / f"{name}_prompts.jsonl", asked)
    (folder / "words.txt").write_text("".join(f"{line}\n" for line in vocabulary()), encoding="utf-8")


def oracle(model: str, data: Path, limit: int) -> str:
    """What is accepted, and how many sums are right, where every draft counts but at digits, which are the target's."""
    from speclight.infer.build import EngineOptions, build_engine, prepare
    from speclight.infer.request import GenerationParams
    from speclight.infer.stats import SequenceStats
    from speclight.infer.target import Ensemble
    from speclight.train.reward_function import Answer
    from speclight.train.rewards import NumberMatch

    engine = build_engine(prepare(EngineOptions(model=model, dtype="float32", max_num_seqs=125), ["early-exit"]))
    digits = [i for i in range(len(engine.tokenizer)) if engine.tokenizer.decode([i]).strip().isdigit()]

    class Oracle(Ensemble):
        def bind(self, tree, states):
            def between(node, p, q):
                if q is None:
                    return p
                critical = float(p.dense()[digits].sum() + q.dense()[digits].sum()) > 0.5
                return self._between(p, q, float(critical))

            return between

    engine.verify_against("early-exit", Oracle(max_tv=1.0, bonus=False))
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()[:limit]]
    asked = GenerationParams(method="early-exit", temperature=1.0, draft_tokens=5, draft_layer=1, max_new_tokens=192)
    done = engine.generate([row["prompt"] for row in rows], [replace(asked, seed=n) for n in range(len(rows))])
    total = SequenceStats.total(one.stats for one in done)
    right = NumberMatch()([Answer(one.text, row) for one, row in zip(done, rows, strict=True)])
    return (
        f"accepted {total.acceptance_rate:.1%} at {sum(right) / len(right):.3f} of the sums right, {len(rows)} prompts"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    data = commands.add_parser("data", help="write the rows, the prompts and the tokenizer's lines")
    data.add_argument("--output", required=True, help="folder")
    data.add_argument("--texts", type=int, default=11000, help="training rows with a story")
    data.add_argument("--sums", type=int, default=100000, help="training rows with a sum only")
    data.add_argument("--prompts", type=int, default=1000, help="prompts of either file")
    data.add_argument("--seed", type=int, default=0)
    data.set_defaults(run=lambda o: write_data(Path(o.output), o.texts, o.sums, o.prompts, o.seed))
    limit = commands.add_parser("oracle", help="what is accepted by trusting every draft but at digits")
    limit.add_argument("--model", required=True, help="the target, as exported")
    limit.add_argument("--data", required=True, help="test_prompts.jsonl")
    limit.add_argument("--limit", type=int, default=250, help="prompts")
    limit.set_defaults(run=lambda o: print(oracle(o.model, Path(o.data), o.limit)))
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
