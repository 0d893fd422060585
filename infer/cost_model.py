"""What a pass of the target costs on this device: seconds by new tokens, sequences and context.

Piecewise linear in the new tokens, over points that were measured, with a slope for every further sequence and for
every token of context; a part of the layers costs its share of them. What serving measures corrects it point by point,
and the price of drafted nodes among several sequences by a markup. It decides how much is drafted, never what is
emitted. Host arithmetic: `calibrate.py` measures.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import statistics
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .choice import Ratio
from .files import replace_file

FORMAT = 1

UNKNOWN_SLOPE = 0.05
"""Where a single size was measured: what each further token is taken to cost, as a part of that pass."""
LIKE_OTHERS, VISITED, OVERALL = 0.003, 0.1, 0.05
"""Parts of the way that a point's correction goes at each sample: to the mean correction, and to the sample's where it
is near; and that the mean goes. A point's first samples count for more: a hasty calibration is off by a constant."""
LARGEST_JUMP = 1.5
"""A sample counts as at most so many times what was expected, or as little: a page fault is no trend."""

MANY_ROWS = 64
"""Rows of logits whose mean is the price of one."""


@dataclass(frozen=True, order=True)
class Shape:
    """A pass: so many new tokens in all, over so many sequences, each with so many tokens in the cache."""

    tokens: int
    sequences: int = 1
    context: int = 128

    def __post_init__(self) -> None:
        for (name, value), least in zip(asdict(self).items(), (1, 1, 0), strict=True):
            if type(value) is not int or not least <= value < 2**31:
                raise ValueError(f"a pass's {name} must be an integer from {least} to 2**31 - 1, got {value!r}")


@dataclass(frozen=True)
class Record:
    """`Record(Shape(16, 1, 128), 0.031, 0.004)`: seconds in all layers, and in the unembedding of every token."""

    shape: Shape
    layers: float
    head: float

    def __post_init__(self) -> None:
        if not (0 < self.layers < math.inf and 0 <= self.head < math.inf):
            raise ValueError(f"a pass's seconds must be finite, layers above 0 and head not below, got {self}")


@dataclass(frozen=True)
class Calibration:
    """tokens: sizes, rising. layers, head: seconds of one sequence's pass of that size behind `context` tokens.

    per_sequence: seconds that each further sequence adds to a pass over as many tokens. per_context: each token of
    context; per_context_of_many: the same, over all sequences of several, whose keys do not lie in one piece; None: as
    of one.
    """

    tokens: tuple[int, ...]
    layers: tuple[float, ...]
    head: tuple[float, ...]
    context: int = 0
    per_sequence: float = 0.0
    per_context: float = 0.0
    per_context_of_many: float | None = None

    def __post_init__(self) -> None:
        if not self.tokens or not len(self.tokens) == len(self.layers) == len(self.head):
            raise ValueError(f"a calibration needs a size and its seconds, got {self.tokens!r}")
        if list(self.tokens) != sorted(set(self.tokens)) or min(self.layers) <= 0 or min(self.head) < 0:
            raise ValueError("a calibration's sizes must rise and its seconds be above 0")
        slopes = (self.context, self.per_sequence, self.per_context, self.per_context_of_many or 0.0)
        if not all(map(math.isfinite, (*self.tokens, *self.layers, *self.head, *slopes))):
            raise ValueError(f"a calibration's numbers must be finite, got {self}")


def fit(records: Iterable[Record]) -> Calibration:
    """The calibration that follows from measurements; several of one shape count as the fastest of them.

    A larger pass is not taken to be cheaper than a smaller one: what measures so is noise.
    """
    best: dict[Shape, Record] = {}
    for record in sorted(records, key=lambda record: record.layers + record.head, reverse=True):
        best[record.shape] = record
    lone = sorted(shape for shape in best if shape.sequences == 1)
    if not lone:
        raise ValueError("a calibration needs passes of one sequence, got none")
    context = min(shape.context for shape in lone)
    points = [best[shape] for shape in lone if shape.context == context]
    curve = Calibration(
        tuple(point.shape.tokens for point in points),
        tuple(itertools.accumulate((point.layers for point in points), max)),
        tuple(itertools.accumulate((point.head for point in points), max)),
        context,
    )
    per_context = _median(_excess(curve, r) / (r.shape.context - context) for r in best.values() if _is_deep(curve, r))
    of_many = [(r, near) for r in best.values() if (near := _less_deep(best, r, context)) is not None]
    gathered = _median(_seconds(r, near) / (r.shape.sequences * (r.shape.context - context)) for r, near in of_many)
    rates = {"per_context": per_context, "per_context_of_many": gathered if of_many else None}
    curve = Calibration(**(asdict(curve) | rates))
    per_sequence = _median(_excess(curve, r) / (r.shape.sequences - 1) for r in best.values() if r.shape.sequences > 1)
    return Calibration(**(asdict(curve) | {"per_sequence": per_sequence}))


def _is_deep(curve: Calibration, record: Record) -> bool:
    return record.shape.sequences == 1 and record.shape.context > curve.context


def _less_deep(best: Mapping[Shape, Record], record: Record, context: int) -> Record | None:
    """The same pass of several sequences behind the least context."""
    shape = record.shape
    is_deep = shape.sequences > 1 and shape.context > context
    return best.get(replace(shape, context=context)) if is_deep else None


def _seconds(longer: Record, shorter: Record) -> float:
    return longer.layers + longer.head - shorter.layers - shorter.head


def _excess(curve: Calibration, record: Record) -> float:
    """Seconds beyond what the curve has for as many tokens and this context. Of sequences it knows no price yet."""
    shape = record.shape
    known = CostModel(curve).seconds(shape.tokens, shape.sequences, shape.context * shape.sequences)
    return record.layers + record.head - known


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return max(0.0, statistics.median(found)) if found else 0.0


def new_markup() -> Ratio:
    """On the price of nodes among several sequences: what they have cost by what they should have, both in passes
    without them."""
    return Ratio(weight=1.0, decay=0.9, least=1.0, most=4.0, below=1.0)


class CostModel:
    """A calibration, and what serving has taught since: a factor for each of its points, and a markup.

    Plain Python: a step asks for few sizes, of which it is several times as fast as array operations.
    """

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self._tokens, self._layers, self._head = _at_least_two(calibration)
        self._factors, self._overall = [1.0] * len(calibration.tokens), 1.0
        self._visits = [0.0] * len(calibration.tokens)
        self._markup = new_markup()

    def seconds(
        self,
        tokens: float,
        sequences: int = 1,
        context: float | None = None,
        share: float = 1.0,
        unembedded: bool = True,
    ) -> float:
        """Of a pass over so many new tokens. context: tokens in the cache, of all sequences.

        share: of the layers that is run. unembedded: logits of all tokens are taken behind them.
        """
        point, way = self._place(tokens)
        raw = self._raw(point, way, sequences, context, share, unembedded)
        return raw * sum([weight * self._factors[one] for one, weight in self._measured_near(point, way)])

    def drafted(
        self, nodes: int, tokens: int, sequences: int = 1, context: float | None = None, beside: int = 0
    ) -> list[float]:
        """[nodes + 1] of passes over so many new tokens and 0 ... `nodes` drafted ones besides.

        beside: tokens of prompts in the same pass. What they take is left out, for it is taken whatever is drafted; but
        behind them a drafted token costs what it does in a large pass.

        In passes over several sequences trees of unlike sizes attend in calls of their own: what their nodes have cost
        more than as many tokens of one is put on their price.
        """
        found = [self.seconds(tokens + beside + count, sequences, context) for count in range(nodes + 1)]
        if sequences == 1 and not beside:
            return found
        plain = self.seconds(tokens, sequences, context) if beside else found[0]
        markup = self._markup.value if sequences > 1 else 1.0
        return [plain + markup * (one - found[0]) for one in found]

    def node(
        self, fewest: int, most: int, tokens: int, sequences: int = 1, context: float | None = None, beside: int = 0
    ) -> float:
        """Price of a drafted node as a fraction of the undrafted pass, without what is `beside`: the lowest mean price
        among drafts of `fewest`, 2 `fewest`, ... up to `most` nodes. Where passes are dear at first and flat from some
        size on, that is a large draft's."""
        plain, begun = (self.seconds(tokens + count, sequences, context) for count in (0, beside))
        sizes = [fewest]
        while 2 * sizes[-1] <= most:
            sizes.append(2 * sizes[-1])
        least = min([(self.seconds(tokens + beside + size, sequences, context) - begun) / size for size in sizes])
        return least / plain * (self._markup.value if sequences > 1 else 1.0)

    def row(self) -> float:
        """Of a row of logits, as one of many."""
        return (self.seconds(MANY_ROWS) - self.seconds(MANY_ROWS, unembedded=False)) / MANY_ROWS

    def _raw(
        self,
        point: int,
        way: float,
        sequences: int,
        context: float | None,
        share: float = 1.0,
        unembedded: bool = True,
    ) -> float:
        """As it was calibrated, at a `_place`."""
        one, rate = self.calibration, self.calibration.per_context
        if sequences > 1 and one.per_context_of_many is not None:
            rate = one.per_context_of_many
        behind = 0.0 if context is None else rate * (context - one.context)
        layers = self._layers[point] + way * (self._layers[point + 1] - self._layers[point])
        layers += one.per_sequence * (sequences - 1) + behind
        least = self._layers[0] * 0.5  # a context shorter than the calibration's takes off no more than that
        head = self._head[point] + way * (self._head[point + 1] - self._head[point]) if unembedded else 0.0
        return share * max(layers, least) + head

    def _place(self, tokens: float) -> tuple[int, float]:
        """(a point, how far towards the next the size lies): beyond the last two points the line through them."""
        point = min(max(bisect(self._tokens, tokens) - 1, 0), len(self._tokens) - 2)
        first, second = self._tokens[point : point + 2]
        return point, max((tokens - first) / (second - first), 0.0)

    def _measured_near(self, point: int, way: float) -> list[tuple[int, float]]:
        """Points that were measured, each with its weight on a place."""
        if len(self._factors) == 1:
            return [(0, 1.0)]
        return [(point, 1.0 - min(way, 1.0)), (point + 1, min(way, 1.0))]

    def learn(
        self, seconds: float, tokens: int, sequences: int = 1, context: float | None = None, drafted: int = 0
    ) -> None:
        """A pass was timed; `drafted` of its tokens were nodes of trees. Points near its size follow it; the others
        drift to the mean of what is measured."""
        if drafted and sequences > 1:
            plain = self.seconds(tokens - drafted, sequences, context)
            expected, paid = self.seconds(tokens, sequences, context) / plain - 1.0, seconds / plain - 1.0
            expected = max(expected, 0.0)  # where larger passes have proved cheaper, nothing can be said
            self._markup.record(expected, min(max(paid, 0.0), self._markup.most * expected))  # a page fault is no price
        point, way = self._place(tokens)
        near = self._measured_near(point, way)
        now = sum(weight * self._factors[one] for one, weight in near)
        sample = seconds / self._raw(point, way, sequences, context)
        sample = min(max(sample, now / LARGEST_JUMP), now * LARGEST_JUMP)
        self._overall += OVERALL * (sample - self._overall)
        self._factors = [one + LIKE_OTHERS * (self._overall - one) for one in self._factors]
        for one, weight in near:
            rate = max(VISITED, 0.5 / (1.0 + self._visits[one]))
            self._factors[one] += rate * weight * (sample - self._factors[one])
            self._visits[one] += weight


def _at_least_two(one: Calibration) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    """Sizes, and seconds in the layers and the head; where one was measured, with a careful guess at the next that has
    no factor of its own."""
    if len(one.tokens) > 1:
        return one.tokens, one.layers, one.head
    grown = 1.0 + UNKNOWN_SLOPE
    layers, head = one.layers[0], one.head[0]
    return (one.tokens[0], one.tokens[0] + 1), (layers, grown * layers), (head, grown * head)


# --- storage ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Identity:
    """What a calibration is of. `Identity("9f3c...", "bfloat16", "cpu, Intel(R) Xeon(R)", 2, "2.13.0")`

    model: the checkpoint's fingerprint. device: kind and name. threads: of torch on the CPU. torch: its version.
    """

    model: str
    dtype: str
    device: str
    threads: int
    torch: str

    def path(self, cache_dir: str | Path) -> Path:
        """The file that it is stored in."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]
        return Path(cache_dir).expanduser() / "calibrations" / f"{digest}.json"


def store(path: Path, identity: Identity, records: Sequence[Record], complete: bool) -> None:
    """Write the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "format": FORMAT,
        "identity": asdict(identity),
        "complete": complete,
        "records": [asdict(record) for record in records],
    }
    replace_file(path, (json.dumps(content, indent=1) + "\n").encode())


def stored(path: Path, identity: Identity) -> tuple[list[Record], bool]:
    """What the file holds, and whether it is complete; nothing where there is no file.

    Raises ValueError, naming the file, for one that is broken, or of another model, dtype, device, thread count or
    version; and for a complete one that no calibration follows from.
    """
    if not path.exists():
        return [], False
    try:
        return _parsed(path.read_bytes(), identity)
    except (KeyError, OSError, OverflowError, RecursionError, TypeError, ValueError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        remedy = "`speclight calibrate --overwrite` makes it anew"
        raise ValueError(f"calibration {path} cannot be used ({reason}); {remedy}") from error


def _parsed(data: bytes, identity: Identity) -> tuple[list[Record], bool]:
    """What `store` wrote. Raises ValueError for anything else, or what Python raises for a record of another form."""
    content = json.loads(data)
    if content["format"] != FORMAT:
        raise ValueError(f"it has format {content['format']!r}, valid here is {FORMAT}")
    for name, kind in {"identity": dict, "complete": bool, "records": list}.items():
        if not isinstance(content[name], kind):
            raise ValueError(f"{name} must be a {kind.__name__}, got {content[name]!r:.80}")
    found, records = content["identity"], [_record(row) for row in content["records"]]
    for name, value in asdict(identity).items():
        if found.get(name) != value:
            raise ValueError(f"it is of {name}={found.get(name)!r}, here it is {value!r}")
    if content["complete"]:
        fit(records)
    return records, content["complete"]


def _record(row: dict[str, Any]) -> Record:
    return Record(Shape(**row["shape"]), float(row["layers"]), float(row["head"]))
