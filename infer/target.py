"""Target rules: which distribution a proposal is verified against."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ..modules.acceptance import Distribution


@runtime_checkable
class TargetRule(Protocol):
    """From the target's processed distribution p and the draft's q (None: nothing was drawn) to the one verified."""

    lossless: bool

    def __call__(self, p: Distribution, q: Distribution | None) -> Distribution: ...


class Exact:
    """The target itself: the emitted text has the target's distribution."""

    lossless = True

    def __call__(self, p: Distribution, q: Distribution | None) -> Distribution:
        return p
