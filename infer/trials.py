"""What method auto spends on chains that may not pay: trying them again, and showing texts to their heads.

Heads must be shown a text from its beginning to draft for it, and reading prompts takes time. So a text is shown to
heads where a chain promises to pay, or as a trial, whose price comes out of a small share of the time so far.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from .arms import PROBE_STEPS, ChainArm
from .exits import Tap
from .request import Sequence

PROBING_SHARE = 0.01
"""Of the time, what trying chain drafters again may cost."""
MARGIN = 1.05
"""What a chain must promise over trees: both are estimates, and what looks best of several is so by luck too."""
GAIN_MEMORY = 0.05
"""Weight of the newest step in the running mean of (rate without chains / rate without any draft)."""
WEIGHED_EVERY = 8
"""Steps after which a chain drafter that is not in use is weighed anew, and other prices that change slowly."""


@dataclass
class Budget:
    """Seconds: served, and spent on what is tried."""

    served: float = 0.0
    spent: float = 0.0

    def allows(self, seconds: float) -> bool:
        return self.spent + seconds <= PROBING_SHARE * self.served


@dataclass
class ShownTexts:
    """Which texts are shown to heads: all of a request, or none, so that they share their prompt in the cache.

    gain: the rate without chains, by that without any draft, which is what a chain must beat.
    """

    arms: SequenceOf[ChainArm]
    budget: Budget
    gain: float = 1.0
    _found: dict[int, tuple[int, bool]] = field(default_factory=dict)  # by number of texts: at which step, `promises`
    _taps: dict[str, frozenset[Tap]] = field(default_factory=dict)  # by request
    _request_of: dict[int, str] = field(default_factory=dict)  # by text

    def learn(self, gain: float) -> None:
        """gain: as it was at one step."""
        self.gain += GAIN_MEMORY * (gain - self.gain)

    def taps_of(self, sequence: Sequence, taps: frozenset[Tap], texts: int, step: int) -> frozenset[Tap]:
        """taps: of the chains that may draft for the text; all of them, or none. texts: how many will run with it."""
        request = self._request_of[sequence.sequence_id] = sequence.request_id
        if request not in self._taps:
            shown = taps and (self.promises(sequence, texts, step) or self.begins_trial(sequence, taps, texts, step))
            self._taps[request] = taps if shown else frozenset()
        return self._taps[request]

    def promises(self, sequence: Sequence, texts: int, step: int) -> bool:
        """Whether among so many texts a chain would be faster than what is done without; asked every few steps."""
        asked, found = self._found.get(texts, (-WEIGHED_EVERY, False))
        if step < asked + WEIGHED_EVERY:
            return found
        found = any(
            arm.foreseen(sequence, texts) > MARGIN * self.gain * texts / _plain_seconds(arm, sequence, texts)
            for arm in self._with_heads(sequence)
        )
        self._found[texts] = step, found
        return found

    def begins_trial(self, sequence: Sequence, taps: frozenset[Tap], texts: int, step: int) -> bool:
        """Whether heads see a text only to be tried: once what that takes, the steps and perhaps a prompt that others
        have in the cache, is a small part of the time so far."""
        arm = min(self._with_heads(sequence), key=lambda arm: arm.next_probe)
        if sequence.params.n > 1 or step < arm.next_probe:
            return False
        prompt = arm.model_cost.seconds(len(sequence.token_ids))
        price = prompt * (1.0 + sum(1.0 / tap.exits.num_layers for tap in taps))
        if not self.budget.allows(price + PROBE_STEPS * _plain_seconds(arm, sequence, texts)):
            return False
        self.budget.spent += price
        return True

    def release(self, sequence_id: int) -> None:
        request = self._request_of.pop(sequence_id, None)
        if request is not None and request not in self._request_of.values():
            del self._taps[request]

    def _with_heads(self, sequence: Sequence) -> list[ChainArm]:
        return [arm for arm in self.arms if arm.taps(sequence.params)]


def _plain_seconds(arm: ChainArm, sequence: Sequence, texts: int) -> float:
    """Of a step without a draft of so many texts like this one."""
    return arm.model_cost.seconds(texts, texts, texts * len(sequence.token_ids))
