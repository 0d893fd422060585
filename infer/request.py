"""What a user asks for and what comes back: parameters, the running sequence, results.

Host data only, without torch, so that what a user got wrong is known at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal

from ..modules.sampling_params import SamplingParams
from .stats import SequenceStats

if TYPE_CHECKING:
    import torch

    from ..modules.kv_cache import CacheTable
    from .exits import Tap

FinishReason = Literal["stop", "length", "cancelled", "error"]
Origin = Literal["accepted", "corrected", "bonus"]


_INTEGERS = {
    "draft_tokens": 0,
    "draft_layer": 1,
    "verify_layer": 1,
    "window": 1,
    "inner_draft_tokens": 1,
    "max_new_tokens": 0,
    "n": 1,
    "logprobs": 0,
}
"""Integer fields and their least values."""


@dataclass(frozen=True, kw_only=True)
class GenerationParams(SamplingParams):
    """Everything one request can set. What shapes the distribution is inherited from SamplingParams.

    method: name of the drafter ("ar" never drafts); None takes the engine's default.
    draft_tokens: nodes of a tree, root included (the paper's capacity), or length of a chain, of HiSpec's window too; 0
        turns drafting off, None takes the drafter's own default.
    draft_layer, verify_layer: exits, by the number of layers below, at which early exits draft and at which HiSpec's
        intermediate stage verifies. window: tokens after which that stage hands on what it has. inner_draft_tokens:
        size of what is drafted for it at once, in the terms of `draft_tokens`. None takes the engine's own; methods
        without such a stage do not read them.
    max_new_tokens: never exceeded; 0 returns an empty text.
    stop_token_ids: end the text, besides the model's own end-of-sequence ids; the id itself stays in `token_ids`.
    stop: strings that end the text; they and what follows are not in it.
    ignore_eos: go on past the model's own end-of-sequence ids.
    n: number of texts per prompt; seeded ones use seed, seed + 1, ...
    logprobs: number of most likely tokens to report at every position, or None. Values are log_softmax of the target's
        raw logits, before temperature, penalties and filters.
    namespace: requests share cached prefixes, and drafters what they remember, only within one namespace.

    Raises ValueError naming the field and what would be valid.
    """

    method: str | None = None
    draft_tokens: int | None = None
    draft_layer: int | None = None
    verify_layer: int | None = None
    window: int | None = None
    inner_draft_tokens: int | None = None
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    namespace: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop_token_ids", "stop"):
            value = getattr(self, name)
            if not isinstance(value, list | tuple | set | frozenset | None):
                raise ValueError(f"{name} must be a list, got {value!r}")
            object.__setattr__(self, name, tuple(value or ()))
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise ValueError(f"stop must hold non-empty strings, got {self.stop!r}")
        if any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must hold integers of at least 0, got {self.stop_token_ids!r}")
        for name, kind in (("method", str | None), ("namespace", str), ("ignore_eos", bool)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} must be {getattr(kind, '__name__', kind)}, got {getattr(self, name)!r}")
        for name, least in _INTEGERS.items():
            value = getattr(self, name)
            optional = name not in ("max_new_tokens", "n")
            if value is None and optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"{name} must be an integer of at least {least}{' or null' if optional else ''}, got {value!r}"
                )

    def end_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """The ids behind which nothing is asked for, the model's own among them unless they are ignored."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else eos_token_ids)

    @classmethod
    def field_names(cls) -> list[str]:
        return [item.name for item in fields(cls)]


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of an emitted token under the target, and of the most likely tokens there (id -> value)."""

    logprob: float
    top: dict[int, float]


@dataclass(frozen=True)
class TokenOrigin:
    """Where an emitted token came from: how it passed, the drafter that ran, and the proposal node's own label.

    `TokenOrigin("accepted", "logitspec", "ngram")`; a corrected or bonus token was drawn from the target, label "".
    """

    kind: Origin
    drafter: str
    source: str = ""


def _empty_table() -> CacheTable:
    from ..modules.kv_cache import CacheTable

    return CacheTable()


@dataclass(eq=False)
class Sequence:
    """One running text. Owned by the engine; drafters read it.

    token_ids: prompt and everything emitted. While decoding all but the last have been run by the model.
    table: its blocks in the target's cache; `table.length` tokens are committed there.
    num_tentative: how many ids at the end are themselves only proposed (a drafter inside another sees such sequences):
        context to draft from, not to be remembered.
    draft_tokens, max_depth: bounds for the next proposal, set by the engine before `propose`. Room in the cache for a
        proposal of that size is already reserved then.
    taps: the heads that must be shown every one of its tokens, whoever drafts.
    generator: draws from the target, exactly one draw per emitted token where the proposal has no distributions;
        draft_generator: draws of drafters. Both belong to this sequence alone.
    """

    sequence_id: int
    request_id: str
    params: GenerationParams
    token_ids: list[int]
    num_prompt: int
    generator: torch.Generator
    draft_generator: torch.Generator
    table: CacheTable = field(default_factory=_empty_table)
    index: int = 0
    taps: frozenset[Tap] = frozenset()
    num_tentative: int = 0
    draft_tokens: int = 0
    max_depth: int = 0
    stats: SequenceStats = field(default_factory=SequenceStats)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    origins: list[TokenOrigin] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    arrived: float = field(default_factory=time.perf_counter)

    def fail(self, error: Exception) -> None:
        """The text ends here."""
        self.finish_reason, self.error = "error", f"{type(error).__name__}: {error}"

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def num_emitted(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Committed tokens that the model has not run: 1 while decoding, more during prefill and after preemption."""
        return len(self.token_ids) - self.table.length


@dataclass(frozen=True)
class Completion:
    """A finished text.

    token_ids: emitted ids, a stop token included. text: decoded, without special tokens and without a stop string.
    logprobs, origins: one per id (logprobs empty unless asked for). stats: see SequenceStats.
    error: what a logits processor or the logits themselves did wrong, where finish_reason is "error".
    """

    request_id: str
    index: int
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stats: SequenceStats
    logprobs: list[TokenLogprob] = field(default_factory=list)
    origins: list[TokenOrigin] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class StreamChunk:
    """What became certain of one text since its last chunk: whole characters only; `completion` comes with the last."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    origins: list[TokenOrigin] = field(default_factory=list)
    completion: Completion | None = None


Prompt = str | SequenceOf[int] | SequenceOf[dict[str, str]]
