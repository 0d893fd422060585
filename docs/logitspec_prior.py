"""Fit the prior of LogitSpec's adaptive trees: `python docs/logitspec_prior.py --recording DIR... --output FILE`.

Replays recordings (`speclight record`) in pieces that begin cold, with requests sharing what they remember and
without, and fits the weights of `Estimates` by maximum likelihood to what was decided at every place that verification
reached. Trees are grown by the weights of the round before, so two rounds are needed from nothing.

With `--datastore DIR`, which must hold none of the recorded texts, only the weights of a datastore are fitted; the
others stay what they are, since most users have none.
"""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import replace
from pathlib import Path

import torch
from speclight.infer import LogitSpecDrafter
from speclight.infer.adaptive_tree import AdaptiveTrees
from speclight.infer.datastore import Datastore
from speclight.infer.estimates import NUM_WEIGHTS, OFFSETS, Context, Estimates, write_prior
from speclight.infer.files import replace_file
from speclight.infer.recording import Recording, read_recording
from speclight.infer.replay import run
from tqdm import tqdm

PIECE, BUDGET, SHRINKAGE = 24, 8, 2.0
HEAD = '''"""Where `Estimates` begins: its weights in hundredths, by kind and in the order of the classes.

Fitted by maximum likelihood to what verification decided on {texts} recorded texts of {model}, a datastore's weights
(`corpus`) by themselves, the others being given; docs/replay.md and docs/datastore.md say how. Online learning goes on
from here, so other models and texts only begin a little worse.
"""

PRIOR: dict[str, str] = {{
'''


class Collector(Estimates):
    """Learns nothing, and notes every candidate at every place that was decided: its weights, and whether it came."""

    def __init__(self, weights: list[float]) -> None:
        super().__init__()
        self.weights[:] = weights
        self.rows: list[tuple[list[int], bool]] = []

    def learn(self, context: Context, token_id: int) -> None:
        place = list(context.place)
        self.rows += [
            (place + indices, candidate == token_id) for candidate, indices in self.weights_of(context).items()
        ]


def collect(recording: Recording, weights: list[float], datastore: Datastore | None) -> list[tuple[list[int], bool]]:
    collector = Collector(weights)
    for shared in ("namespace", "none"):
        for start in tqdm(range(0, len(recording.texts), PIECE), unit="piece", desc=f"shared {shared}"):
            drafter = LogitSpecDrafter(capacity=BUDGET, shared=shared, datastore=datastore)
            assert isinstance(drafter._trees, AdaptiveTrees)
            drafter._trees.estimates, drafter._trees.taught_by = collector, 1
            piece = replace(recording, texts=recording.texts[start : start + PIECE])
            for _ in run(drafter, piece, BUDGET):
                pass
    return collector.rows


def fit(rows: list[tuple[list[int], bool]], start: list[float], free: slice) -> list[float]:
    """Logistic regression on sums of weights, with a normal prior around `start`. free: the weights that are fitted."""
    lengths = torch.tensor([len(indices) for indices, _ in rows])
    row = torch.repeat_interleave(torch.arange(len(rows)), lengths)
    column = torch.tensor([index for indices, _ in rows for index in indices])
    design = torch.sparse_coo_tensor(torch.stack((row, column)), torch.ones(len(row)), (len(rows), NUM_WEIGHTS))
    labels, center = torch.tensor([float(came) for _, came in rows]), torch.tensor(start)
    matrix, transposed = design.coalesce().to_sparse_csr(), design.t().coalesce().to_sparse_csr()
    weights = center.clone().requires_grad_(True)
    fitted = torch.zeros_like(center)
    fitted[free] = 1.0
    optimizer = torch.optim.LBFGS([weights], max_iter=60, history_size=20, line_search_fn="strong_wolfe")

    @torch.no_grad()
    def loss() -> torch.Tensor:
        odds, away = (matrix @ weights[:, None])[:, 0], weights - center
        entropy = torch.nn.functional.binary_cross_entropy_with_logits(odds, labels, reduction="sum")
        slope = (transposed @ (odds.sigmoid() - labels)[:, None])[:, 0]
        weights.grad = (slope + SHRINKAGE * away) / len(rows)
        weights.grad *= fitted
        return (entropy + 0.5 * SHRINKAGE * away.square().sum()) / len(rows)

    optimizer.step(loss)  # type: ignore[arg-type]
    return weights.detach().tolist()


def as_module(weights: list[float], recordings: list[Recording]) -> str:
    texts, models = sum(len(one.texts) for one in recordings), sorted({one.settings["model"] for one in recordings})
    parts = [HEAD.format(texts=texts, model=" and ".join(models))]
    for name, values in write_prior(weights).items():
        lines = textwrap.indent("\n".join(textwrap.wrap(values, 108)), " " * 8)
        parts.append(f'    "{name}": """\n{lines}\n    """,\n')
    return "".join([*parts, "}\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recording", required=True, nargs="+")
    parser.add_argument("--output", required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--datastore")
    options = parser.parse_args()
    recordings = [read_recording(folder) for folder in options.recording]
    weights = list(Estimates().prior)
    datastore = None if options.datastore is None else Datastore.load(options.datastore)
    free = slice(None) if datastore is None else slice(OFFSETS["corpus-order"], OFFSETS["seen"])
    for _ in range(options.rounds):
        rows = [row for recording in recordings for row in collect(recording, weights, datastore)]
        weights = fit(rows, weights, free)
    replace_file(Path(options.output), as_module(weights, recordings).encode())


if __name__ == "__main__":
    main()
