"""What a pass of the target costs on this device: seconds by new tokens, sequences and context.

Piecewise linear in the new tokens, over points that were measured, with a slope for every further sequence and for
every token of context; a part of the layers costs its share of them. What serving measures corrects it point by point.
It decides how much is drafted, never what is emitted. Host arithmetic: `calibrate.py` measures.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .files import replace_file

FORMAT = 1
Array = NDArray[np.float64]

UNKNOWN_SLOPE = 0.05
"""Where a single size was measured: what each further token is taken to cost, as a part of that pass."""
LIKE_OTHERS, VISITED, OVERALL = 0.003, 0.1, 0.05
"""Parts of the way that a point's correction goes at each sample: to the mean correction, and to the sample's where it
is near; and that the mean goes. A point's first samples count for more: a hasty calibration is off by a constant."""
LARGEST_JUMP = 1.5
"""A sample counts as at most so many times what was expected, or as little: a page fault is no trend."""


@dataclass(frozen=True, order=True)
class Shape:
    """A pass: so many new tokens in all, over so many sequences, each with so many tokens in the cache."""

    tokens: int
    sequences: int = 1
    context: int = 128


@dataclass(frozen=True)
class Record:
    """`Record(Shape(16, 1, 128), 0.031, 0.004)`: seconds in all layers, and in the unembedding of every token."""

    shape: Shape
    layers: float
    head: float


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
        tuple(np.maximum.accumulate([point.layers for point in points]).tolist()),
        tuple(np.maximum.accumulate([point.head for point in points]).tolist()),
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
    return record.layers + record.head - float(known)


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return max(0.0, statistics.median(found)) if found else 0.0


class CostModel:
    """A calibration, and what serving has taught since: a factor for each of its points."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self._tokens = np.array(calibration.tokens, dtype=np.float64)
        self._layers, self._head = np.array(calibration.layers), np.array(calibration.head)
        self._factors, self._overall = np.ones(len(self._tokens)), 1.0
        self._visits = np.zeros(len(self._tokens))

    def seconds(
        self,
        tokens: ArrayLike,
        sequences: int = 1,
        context: float | None = None,
        share: float = 1.0,
        unembedded: bool = True,
    ) -> Array:
        """Of passes over so many new tokens each. context: tokens in the cache, of all sequences.

        share: of the layers that is run. unembedded: logits of all tokens are taken behind them.
        """
        sizes = np.asarray(tokens, dtype=np.float64)
        raw = self._raw(sizes, sequences, context, share, unembedded)
        return raw * np.interp(sizes, self._tokens, self._factors)

    def _raw(
        self, sizes: Array, sequences: int, context: float | None, share: float = 1.0, unembedded: bool = True
    ) -> Array:
        one, rate = self.calibration, self.calibration.per_context
        if sequences > 1 and one.per_context_of_many is not None:
            rate = one.per_context_of_many
        behind = 0.0 if context is None else rate * (context - one.context)
        layers = self._curve(sizes, self._layers) + one.per_sequence * (sequences - 1) + behind
        least = self._layers[0] * 0.5  # a context shorter than the calibration's takes off no more than that
        return share * np.maximum(layers, least) + (self._curve(sizes, self._head) if unembedded else 0.0)

    def _curve(self, sizes: Array, seconds: Array) -> Array:
        """Between points a line, beyond the last the line through the last two."""
        first, last = self._tokens[0], self._tokens[-1]
        if len(self._tokens) == 1:
            return seconds[0] * (1.0 + UNKNOWN_SLOPE * np.maximum(sizes - first, 0.0))
        slope = (seconds[-1] - seconds[-2]) / (last - self._tokens[-2])
        return np.interp(sizes, self._tokens, seconds) + slope * np.maximum(sizes - last, 0.0)

    def learn(self, seconds: float, tokens: int, sequences: int = 1, context: float | None = None) -> None:
        """A pass was timed. Points near its size follow it; the others drift to the mean of what is measured."""
        size = np.asarray(float(tokens))
        now = float(np.interp(size, self._tokens, self._factors))
        raw = float(self._raw(size, sequences, context))
        sample = min(max(seconds / raw, now / LARGEST_JUMP), now * LARGEST_JUMP)
        self._overall += OVERALL * (sample - self._overall)
        self._factors += LIKE_OTHERS * (self._overall - self._factors)
        for point, weight in self._neighbours(float(tokens)):
            rate = max(VISITED, 0.5 / (1.0 + self._visits[point]))
            self._factors[point] += rate * weight * (sample - self._factors[point])
            self._visits[point] += weight

    def _neighbours(self, tokens: float) -> list[tuple[int, float]]:
        """The points that a size lies between, with its weights on them."""
        above = int(np.searchsorted(self._tokens, tokens))
        if above == 0 or above == len(self._tokens):
            return [(min(above, len(self._tokens) - 1), 1.0)]
        width = self._tokens[above] - self._tokens[above - 1]
        weight = float((tokens - self._tokens[above - 1]) / width)
        return [(above - 1, 1.0 - weight), (above, weight)]


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

    Raises ValueError for a file that is broken, or of another model, dtype, device, thread count or version.
    """
    if not path.exists():
        return [], False
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version, found, complete = content["format"], content["identity"], bool(content["complete"])
        records = [_record(row) for row in content["records"]] if version == FORMAT else []
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"calibration {path.name} cannot be read ({error}); make it anew with --overwrite") from error
    if version != FORMAT:
        raise ValueError(f"calibration {path.name} has format {version!r}, valid here is {FORMAT}")
    for name, value in asdict(identity).items():
        if found.get(name) != value:
            raise ValueError(f"calibration {path.name} is of {name}={found.get(name)!r}, here it is {value!r}")
    return records, complete


def _record(row: dict[str, Any]) -> Record:
    return Record(Shape(**row["shape"]), float(row["layers"]), float(row["head"]))
