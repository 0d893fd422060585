"""What a request says about its next-token distribution, checked; `sampling.py` makes distributions of it.

Numbers only, without torch: what a user got wrong is known at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

GREEDY_BELOW = 1e-5  # dividing logits by less overflows float32 long before it changes the outcome
HOTTEST = 1e6  # uniform for any real logits; in float32 a far higher temperature turns a ban's -inf into NaN

Processor = Callable[[Any, Any], Any]  # any transformers LogitsProcessor: (Ids, Scores) -> Scores


def _positive(value: float) -> bool:
    return 0.0 < value < math.inf


def _unit(value: float) -> bool:
    return 0.0 <= value <= 1.0


_REAL_FIELDS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda value: 0.0 <= value <= HOTTEST, "from 0 (greedy) to 1e6, or null for 1"),
    ("top_p", _unit, "from 0 (only the most likely token) to 1 (off)"),
    ("min_p", _unit, "from 0 (off) to 1"),
    ("repetition_penalty", _positive, "above 0 (1 is off)"),
    ("presence_penalty", math.isfinite, "that is finite (0 is off)"),
    ("frequency_penalty", math.isfinite, "that is finite (0 is off)"),
)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What shapes a text's next-token distribution.

    temperature: None is 1; anything below 1e-5 is greedy.
    top_k: 0 and -1 are off, and so is a value above the vocabulary. top_p: 0 keeps only the most likely token.
    min_p: drops tokens less likely than this share of the most likely one.
    repetition_penalty: on tokens of the prompt and the output, as in transformers.
    presence_penalty, frequency_penalty: subtracted from the logits of emitted tokens, once and per occurrence. The
        prompt does not count, as with OpenAI and vLLM.
    logit_bias: added to logits by token id; -inf bans. Ids may be strings, as JSON has them.
    logits_processors: any transformers LogitsProcessor, called as `processor(input_ids, scores)` with the prompt and
        what has been emitted, once per emitted token and in order. All texts of a request share them: one that keeps
        state between calls needs a request of its own with n=1.
    seed: the same seed gives the same text, whatever runs beside it; None gives a different text every time.

    Raises ValueError naming the field, its value and what would be valid.
    """

    temperature: float | None = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logits_processors: tuple[Processor, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, is_valid, wanted in _REAL_FIELDS:
            value = getattr(self, name)
            if name != "temperature" or value is not None:
                object.__setattr__(self, name, _real(name, value, is_valid, wanted))
        object.__setattr__(self, "top_k", _integer("top_k", self.top_k, -1, "of at least 1, or 0 or -1 for off"))
        if self.seed is not None:
            object.__setattr__(self, "seed", _integer("seed", self.seed, None, "or null"))
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        object.__setattr__(self, "logits_processors", _checked_processors(self.logits_processors))

    @property
    def is_seeded(self) -> bool:
        """Whether a seed says what the text is, whatever runs beside it."""
        return self.seed is not None and not self.is_greedy

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the most likely one, penalties and bans included."""
        return self.top_p == 0.0 or (self.temperature is not None and self.temperature < GREEDY_BELOW)


def _real(name: str, value: object, is_valid: Callable[[float], bool], wanted: str) -> float:
    with suppress(OverflowError):  # an integer beyond float's range
        if isinstance(value, Real) and not isinstance(value, bool) and is_valid(float(value)):
            return float(value)
    raise ValueError(f"{name} must be a number {wanted}, got {value!r}")


def _integer(name: str, value: object, least: int | None, wanted: str) -> int:
    if isinstance(value, Integral) and not isinstance(value, bool) and (least is None or int(value) >= least):
        return int(value)
    raise ValueError(f"{name} must be an integer {wanted}, got {value!r}")


def _checked_bias(bias: object) -> dict[int, float]:
    """A copy with integer keys, so that what a caller does to theirs afterwards has no effect."""
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {bias!r}")
    checked: dict[int, float] = {}
    for key, value in bias.items():
        token_id = _integer("logit_bias key", int(key) if _is_decimal(key) else key, 0, "token id of at least 0")
        if token_id in checked:
            raise ValueError(f"logit_bias must name each token once, got {token_id} twice")
        wanted = "below inf (-inf bans the token)"
        checked[token_id] = _real(f"logit_bias[{token_id}]", value, lambda number: number < math.inf, wanted)
    return checked


def _is_decimal(key: object) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdecimal()


def _checked_processors(processors: object) -> tuple[Processor, ...]:
    if not isinstance(processors, list | tuple) or not all(callable(processor) for processor in processors):
        raise ValueError(f"logits_processors must be a list of callables (input_ids, scores), got {processors!r}")
    return tuple(processors)
