"""The affine map from an early layer's states to the last layer's that is best in least squares.

Exit heads read the residual stream through such a map (the tuned lens, Belrose et al. 2023, arXiv 2303.08112). Found in
closed form before the first step, it spares training the long way from the identity: early states are several
times smaller than the last ones, and most of theirs is in a few dimensions.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

RIDGE = 1e-4
"""Of the mean square of the inputs, added to each: keeps directions that no token has used at rest."""


class LeastSquares:
    """Sums over rows from which the map follows: y ~ weight x + bias, of two states of `size` numbers, in float64."""

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.gram = torch.zeros(size + 1, size + 1, dtype=torch.float64, device=device)
        self.cross = torch.zeros(size + 1, size, dtype=torch.float64, device=device)
        self.num_rows = 0

    def add(self, inputs: Float[Tensor, "rows size"], outputs: Float[Tensor, "rows size"]) -> None:
        ones = inputs.new_ones(len(inputs), 1, dtype=torch.float64)
        extended = torch.cat((inputs.double(), ones), dim=1)
        self.gram += extended.T @ extended
        self.cross += extended.T @ outputs.double()
        self.num_rows += len(inputs)

    def solve(self) -> tuple[Float[Tensor, "size size"], Float[Tensor, "size"]]:
        """(weight, bias) as of torch.nn.Linear. Raises ValueError without rows."""
        if not self.num_rows:
            raise ValueError("calibrate needs supervised tokens, and the rows that it reads have none")
        size = len(self.gram) - 1
        ridge = RIDGE * self.gram.diagonal()[:size].mean()
        penalty = torch.cat((ridge.expand(size), ridge.new_zeros(1))).diag()
        solution = torch.linalg.solve(self.gram + penalty, self.cross)
        return solution[:size].T, solution[size]
