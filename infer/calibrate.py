"""`speclight calibrate`: measure what passes of a model cost here, once, for method auto.

The quick form runs by itself where nothing is stored: fewer shapes, within a second and a half.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .build import ModelOptions, option
from .cost_model import Calibration, CostModel, Identity, Record, Shape, fit, store, stored

if TYPE_CHECKING:
    from ..modules.batch import RaggedBatch
    from ..modules.layered_model import LayeredModel
    from .sources import ModelSource

logger = logging.getLogger(__name__)

QUICK_SECONDS = 1.4
QUICK = (1, 16, 4, 64)
QUICK_SHAPES = [
    *(Shape(tokens) for tokens in QUICK),
    Shape(8, 8),
    Shape(1, 1, 1024),
    Shape(8, 8, 640),
    *(Shape(tokens) for tokens in (2, 8, 32, 128)),
]
"""Most telling first: where time is short the last are left out."""

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
FULL_SHAPES = [
    *(Shape(tokens) for tokens in SIZES),
    *(Shape(tokens, 1, context) for tokens in (1, 16) for context in (512, 1024, 2048)),
    *(Shape(sequences * each, sequences) for sequences in (4, 8, 16, 32) for each in (1, 4)),
    *(Shape(sequences, sequences, 640) for sequences in (4, 8, 16)),
]
ROUNDS = 5

Timer = Callable[[Shape], Record]
"""Runs one pass."""


class PassTimer:
    """Runs passes of a model on tokens and a cache without meaning. shapes: those it will be asked for, at most."""

    def __init__(self, model: LayeredModel, shapes: Sequence[Shape], clock: Callable[[], float] = time.perf_counter):
        self.model, self.clock, self.block_size = model, clock, 16
        self.shapes = [shape for shape in shapes if self._length(shape) <= model.max_positions]
        blocks = max((shape.sequences * self._blocks(shape) for shape in self.shapes), default=1)
        self.cache = model.new_cache(blocks, self.block_size, prefix_caching=False)
        self.cache.data.fill_(0.01)  # memory that was never written is read faster than a text's keys would be

    def __call__(self, shape: Shape) -> Record:
        import torch

        with torch.inference_mode():
            batch = self._batch(shape)
            started = self._now()
            hidden = self.model.run(self.model.embed(batch), batch, self.cache, 0, self.model.num_layers)
            ran = self._now()
            self.model.logits(hidden)
            return Record(shape, max(ran - started, 1e-9), max(self._now() - ran, 0.0))

    def _now(self) -> float:
        import torch

        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return self.clock()

    def _batch(self, shape: Shape) -> RaggedBatch:
        from ..modules.batch import BatchItem, RaggedBatch

        each, blocks = shape.tokens // shape.sequences, self._blocks(shape)
        token_ids = [token % self.model.vocab_size for token in range(each)]
        tables = [list(range(index * blocks, (index + 1) * blocks)) for index in range(shape.sequences)]
        items = [BatchItem(token_ids, shape.context, table) for table in tables]
        return RaggedBatch.build(items, self.block_size, self.model.device)

    def _length(self, shape: Shape) -> int:
        return shape.context + shape.tokens // shape.sequences

    def _blocks(self, shape: Shape) -> int:
        return -(-self._length(shape) // self.block_size)


def quick_calibration(
    model: LayeredModel, seconds: float = QUICK_SECONDS, clock: Callable[[], float] = time.perf_counter
) -> Calibration:
    """A calibration from what can be measured in `seconds`."""
    started = clock()
    timer = PassTimer(model, QUICK_SHAPES, clock)
    shapes = timer.shapes or [Shape(1, 1, 0)]
    return fit(measured_within(timer, shapes, started + seconds, clock))


def measured_within(
    timer: Timer, shapes: Sequence[Shape], deadline: float, clock: Callable[[], float], rounds: int = 3
) -> Iterator[Record]:
    """Time the shapes in turn; the first pass always, the others while another of its size should end in time.

    A shape's first pass also sets up what later ones find ready, and counts only where there is no second.
    """
    first: dict[Shape, Record] = {}
    again: set[Shape] = set()
    expected: dict[Shape, float] = {}
    per_pass = 0.0
    for _ in range(rounds):
        for shape in shapes:
            if first and clock() + 1.5 * expected.get(shape, per_pass) > deadline:
                continue
            started = clock()
            record = timer(shape)
            per_pass = expected[shape] = clock() - started
            if shape in first:
                again.add(shape)
                yield record
            else:
                first[shape] = record
    yield from (record for shape, record in first.items() if shape not in again)


# --- the command --------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class CalibrateOptions(ModelOptions):
    """What is measured."""

    overwrite: bool = option(False, "measure anew what has been measured")


def calibrate(options: CalibrateOptions) -> None:
    """Measure what is missing, with a progress bar; print a table. Raises ValueError before weights are read."""
    from .build import EngineOptions, prepare

    shared = {name: getattr(options, name) for name in ModelOptions.__dataclass_fields__}
    prepared = prepare(EngineOptions(**shared), ["ar"])
    model, identity = _load(options, prepared.source)
    path = identity.path(_cache_dir(options.cache_dir))
    records, complete = ([], False) if options.overwrite else stored(path, identity)
    if not complete:
        try:
            records = _measure(PassTimer(model, FULL_SHAPES), path, identity, records)
        except KeyboardInterrupt:
            print("speclight: what was measured is kept; the same command continues", file=sys.stderr)
            raise
    print("\n".join(table(fit(records), model.num_layers)))
    state = "was stored before; --overwrite measures anew" if complete else "stored"
    print(f"speclight: {path}: {state}", file=sys.stderr)


def _load(options: CalibrateOptions, source: ModelSource) -> tuple[LayeredModel, Identity]:
    import torch

    from ..modules.bundle import fingerprint
    from .loading import layered, load_transformers

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    loaded = load_transformers(source, options.dtype, options.device)
    identity = identity_of(fingerprint(loaded), loaded.dtype, loaded.device)  # before the weights are repacked
    return layered(loaded), identity


def identity_of(fingerprint: str, dtype: object, device: object) -> Identity:
    """What a calibration made here is of. device: torch's."""
    import torch

    from .bench import processor_name

    kind = torch.device(str(device))
    name = torch.cuda.get_device_name(kind) if kind.type == "cuda" else processor_name()
    return Identity(
        fingerprint,
        str(dtype).removeprefix("torch."),
        f"{kind.type}, {name}",
        torch.get_num_threads(),
        torch.__version__,
    )


def _cache_dir(cache_dir: str | None) -> Path:
    from .sources import CACHE_DIR

    return Path(cache_dir or CACHE_DIR)


def stored_cost_model(identity: Identity, cache_dir: str | None) -> CostModel | None:
    """From a complete calibration, if there is one that fits."""
    path = identity.path(_cache_dir(cache_dir))
    try:
        records, complete = stored(path, identity)
    except ValueError as error:
        logger.warning("%s; measured anew for this run", error)
        return None
    return CostModel(fit(records)) if complete else None


def _measure(timer: PassTimer, path: Path, identity: Identity, records: Sequence[Record]) -> list[Record]:
    """Complete the records, and the file with them after every shape."""
    from tqdm import tqdm

    done = list(records)
    known = {record.shape for record in done}
    missing = [shape for shape in timer.shapes if shape not in known]
    with tqdm(total=len(timer.shapes), initial=len(timer.shapes) - len(missing), unit="shape", disable=None) as bar:
        for shape in missing:
            timer(shape)  # sets up what the size needs
            passes = [timer(shape) for _ in range(ROUNDS)]
            done.append(sorted(passes, key=lambda record: record.layers + record.head)[ROUNDS // 2])
            store(path, identity, done, complete=False)
            bar.update()
    store(path, identity, done, complete=True)
    return done


def table(calibration: Calibration, num_layers: int) -> list[str]:
    """Milliseconds by new tokens: an eighth of the layers (drafting), a quarter (intermediate), all of them."""
    model = CostModel(calibration)
    lines = [f"ms a pass, {num_layers} layers, one sequence of {calibration.context} tokens"]
    lines.append(f"{'tokens':>8}{'1/8':>9}{'1/4':>9}{'all':>9}")
    for tokens in calibration.tokens:
        parts = [1e3 * model.seconds(tokens, share=share) for share in (0.125, 0.25, 1.0)]
        lines.append(f"{tokens:>8}" + "".join(f"{part:>9.2f}" for part in parts))
    lines.append(f"each further sequence {1e3 * calibration.per_sequence:.3f} ms")
    lines.append(f"each 1000 tokens of context {1e6 * calibration.per_context:.3f} ms")
    if calibration.per_context_of_many is not None:
        lines.append(f"the same of several sequences {1e6 * calibration.per_context_of_many:.3f} ms")
    return lines
