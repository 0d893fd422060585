"""Rewards of texts: numbers, ROUGE-2, BLEU, equality. Those of programs are in unit_tests.py.

As in the experiments of DIVERSED (arXiv 2604.07622, experimental setup). Models as judges are left out: a reward here
is a function of a text and a row.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, get_args

from .math_verifier import check_installed, verify_all
from .reward_function import Answer, RewardFunction, references
from .unit_tests import UnitTests

__all__ = [
    "REWARDS",
    "Answer",
    "Bleu",
    "ExactMatch",
    "NumberMatch",
    "RewardFunction",
    "Rouge2",
    "UnitTests",
    "final_number",
    "reward",
    "sentence_bleu",
]

# --- numbers ---------------------------------------------------------------------------------------------------------

# the sign counts unless it stands between two operands: "3-5" and "x-5" end in 5
SIGN = r"(?:(?<![\w)\]}.])[-\u2212])?"
NUMBER = SIGN + r"\$?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
MARKED = tuple(re.compile(rf"(?<!#){marks}[ \t]*(\$?{NUMBER})") for marks in ("#{4}", "#{3}"))  # GSM8K's, and as often
BOX = r"\boxed{"

Verifier = Literal["numbers", "math-verify"]


def final_number(text: str) -> Decimal | None:
    """The number that a solution ends in, None when there is none.

    It is the one behind the first `####`, else the first `###`; else that in the last \\boxed{}, which has to hold
    exactly one; else the last number of the text. "$1,234.50." is 1234.5.
    """
    text = text.replace("{,}", ",").replace("\\$", "$").replace("\\!", "")
    for pattern in MARKED:
        if marked := pattern.search(text):
            return _value(marked[1])
    boxed = _last_box(text)
    numbers = re.findall(NUMBER, text if boxed is None else boxed)
    return _value(numbers[-1]) if numbers and (boxed is None or len(numbers) == 1) else None


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("$", "").replace("\u2212", "-"))


def _last_box(text: str) -> str | None:
    """What stands in the last \\boxed{...}, whose braces may be nested; all that follows when it is not closed."""
    start = text.rfind(BOX)
    if start < 0:
        return None
    depth, inside = 1, text[start + len(BOX) :]
    for at, character in enumerate(inside):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return inside[:at]
    return inside


class NumberMatch(RewardFunction):
    """1 when the answer ends in the reference's number (GSM8K), else 0; {0, 1}. `final_number` says which that is.

    verifier: "numbers" compares values, so 5 is 5.00; "math-verify" lets that library compare expressions (1/2 and
        \\frac{1}{2}), in a process of its own. It needs `pip install math-verify`.
    seconds: math-verify's time for one answer; one that takes longer is worth 0.
    """

    name = "numbers"

    def __init__(self, verifier: Verifier = "numbers", seconds: float = 5.0) -> None:
        if verifier not in get_args(Verifier):
            raise ValueError(f"verifier must be one of {', '.join(get_args(Verifier))}, got {verifier!r}")
        if not 0 < seconds < math.inf:
            raise ValueError(f"seconds must be above 0, got {seconds}")
        if verifier == "math-verify":
            check_installed()
        self.verifier, self.seconds = verifier, seconds

    def check(self, row: Mapping[str, Any]) -> None:
        texts = references(row)
        if self.verifier == "numbers" and all(final_number(text) is None for text in texts):
            raise ValueError(f"reference must hold a number, got {row['reference']!r}")

    def score(self, answers: Sequence[Answer]) -> list[float]:
        if self.verifier == "math-verify":
            return [float(right) for right in verify_all([(references(a.row), a.text) for a in answers], self.seconds)]
        return [float(self._is_right(answer)) for answer in answers]

    def _is_right(self, answer: Answer) -> bool:
        number = final_number(answer.text)
        return number is not None and number in map(final_number, references(answer.row))


# --- texts -----------------------------------------------------------------------------------------------------------


class ExactMatch(RewardFunction):
    """1 when the answer is the reference, else 0; {0, 1}.

    collapse_whitespace: any run of whitespace is as good as a space, and none counts at the ends. ignore_case: so.
    """

    name = "exact"

    def __init__(self, collapse_whitespace: bool = True, ignore_case: bool = False) -> None:
        self.collapse_whitespace, self.ignore_case = collapse_whitespace, ignore_case

    def score(self, answers: Sequence[Answer]) -> list[float]:
        return [float(self._normal(answer.text) in map(self._normal, references(answer.row))) for answer in answers]

    def _normal(self, text: str) -> str:
        text = " ".join(text.split()) if self.collapse_whitespace else text
        return text.casefold() if self.ignore_case else text


class Rouge2(RewardFunction):
    """ROUGE-2's F-measure, [0, 1], by torchmetrics: pairs of neighbouring words in common; the best reference counts.

    Words are runs of a-z and 0-9 in the lower-cased text, not stemmed, as rouge-score has them: other scripts than
    the Latin one earn nothing.
    """

    name = "rouge2"

    def score(self, answers: Sequence[Answer]) -> list[float]:
        from torchmetrics.text import ROUGEScore

        if not answers:
            return []
        metric = ROUGEScore(rouge_keys="rouge2", accumulate="best")
        metric.update([answer.text for answer in answers], [references(answer.row) for answer in answers])
        return [float(value) for value in metric.rouge2_fmeasure]  # type: ignore[union-attr]


# what NIST's mteval-v13a, and so WMT, writes as words of their own: symbols, stops and commas outside of numbers
APART = re.compile(r"""([!"#$%&()*+/:;<=>?@\[\\\]^_`{|}~]|(?<![0-9])[.,]|[.,](?![0-9])|(?<=[0-9])-)""")


class Bleu(RewardFunction):
    """Sentence BLEU, [0, 1]: `sentence_bleu` of words as WMT's scripts have them. ignore_case: so."""

    name = "bleu"

    def __init__(self, ignore_case: bool = False) -> None:
        self.ignore_case = ignore_case

    def score(self, answers: Sequence[Answer]) -> list[float]:
        return [
            sentence_bleu(self._words(answer.text), [self._words(text) for text in references(answer.row)])
            for answer in answers
        ]

    def _words(self, text: str) -> list[str]:
        text = text.lower() if self.ignore_case else text
        return APART.sub(r" \1 ", text).split()


def sentence_bleu(answer: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """BLEU of one sentence of words, [0, 1].

    The geometric mean of the precisions of its 1- to 4-grams, as far as the answer is long enough to have any, times
    exp(1 - r/c) when it is shorter (c) than the reference nearest in length (r). The k-th precision that is 0 counts as
    half of one hit over 2^(k-1) (Chen and Cherry 2014, method 3), unless not one word is right.
    """
    logs, missed = [], 0
    for size in range(1, min(4, len(answer)) + 1):
        grams = Counter(_grams(answer, size))
        allowed: Counter[tuple[str, ...]] = Counter()
        for reference in references:
            allowed |= Counter(_grams(reference, size))
        hits = float((grams & allowed).total())
        if not hits and size == 1:
            return 0.0
        missed += not hits
        logs.append(math.log((hits or 0.5**missed) / grams.total()))
    if not logs:
        return 0.0
    nearest = min((len(reference) for reference in references), key=lambda r: (abs(r - len(answer)), r))
    return math.exp(min(0.0, 1 - nearest / len(answer)) + sum(logs) / len(logs))


def _grams(words: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(size)), strict=False)


# --- by name ---------------------------------------------------------------------------------------------------------

REWARDS: dict[str, type[RewardFunction]] = {
    kind.name: kind for kind in (NumberMatch, Rouge2, ExactMatch, Bleu, UnitTests)
}


def reward(name: str, **options: Any) -> RewardFunction:
    """A reward by its short name, `reward("exact", ignore_case=True)`. Options are those of its constructor.

    Raises ValueError for a name or an option that there is not, with those that there are.
    """
    if name not in REWARDS:
        raise ValueError(f"reward must be one of {', '.join(REWARDS)}, got {name!r}")
    valid = () if REWARDS[name].__init__ is object.__init__ else tuple(inspect.signature(REWARDS[name]).parameters)
    for option in options:
        if option not in valid:
            raise ValueError(f"reward {name} has no option {option!r}; it has {', '.join(valid) or 'none'}")
    return REWARDS[name](**options)
