"""From raw logits to the distribution that is sampled, verified against or drafted from.

transformers' logits processors are the semantics, in the order in which its `generate` applies them: bias, penalties,
the user's own, then temperature, top-k, top-p, min-p. Plain decoding, verification and drafting share one pipeline, so
they cannot disagree. Forced tokens, grammars and the like have no field of their own: `logits_processors` takes them.
"""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .acceptance import Dense, Distribution, Drawn, OneHot, Peak
from .fused import fits, leading
from .sampling_params import Processor, SamplingParams
from .transfer import Fetch, is_apart, to_device

Ids = Int[Tensor, "1 tokens"]
Row = Float[Tensor, "vocab"]
Scores = Float[Tensor, "1 vocab"]
Rows = Float[Tensor, "rows vocab"]


class LogitBias(LogitsProcessor):
    """Adds to the logits of single tokens.

    may_exceed_vocab: drop ids that the logits lack instead of raising ValueError (a draft model with a smaller
        vocabulary cannot propose them anyway).
    """

    def __init__(self, bias: Mapping[int, float], may_exceed_vocab: bool = False) -> None:
        self.bias = bias
        self.may_exceed_vocab = may_exceed_vocab

    def __call__(self, input_ids: Ids, scores: Scores) -> Scores:
        known = [token_id for token_id in self.bias if token_id < scores.shape[-1]]
        if len(known) < len(self.bias) and not self.may_exceed_vocab:
            raise ValueError(
                f"logit_bias must name ids below {scores.shape[-1]}, the model's vocabulary, got {max(self.bias)}"
            )
        values = to_device(np.array([[self.bias[token_id] for token_id in known]]), scores.device).to(scores.dtype)
        return scores.index_add(1, to_device(known, scores.device), values)


class OccurrencePenalty(LogitsProcessor):
    """OpenAI's presence and frequency penalties: logit - presence - frequency * count, for every emitted token."""

    def __init__(self, presence: float, frequency: float, num_prompt: int) -> None:
        self.presence = presence
        self.frequency = frequency
        self.num_prompt = num_prompt

    def __call__(self, input_ids: Ids, scores: Scores) -> Scores:
        emitted = input_ids[0, self.num_prompt :]
        # ids that the logits lack: a draft model's vocabulary may be smaller than the target's
        token_ids, counts = emitted[emitted < scores.shape[-1]].unique(return_counts=True)
        return scores.index_add(1, token_ids, -(self.presence + self.frequency * counts.to(scores.dtype)).unsqueeze(0))


class Asked(NamedTuple):
    """The distribution that a pipeline makes of one row of logits.

    draw: the uniform that a token would be drawn by. token_id: whose probability is wanted; -1: of the token drawn.
    """

    pipeline: LogitsPipeline
    row: int
    draw: float = 0.0
    token_id: int = -1


Kind = tuple[float | None, ...]
Read = list[Distribution | None]


class LogitsPipeline:
    """One sequence's way from a row of logits to a distribution; plain decoding, verifying and drafting all take it.

    num_prompt: how many leading tokens of every prefix are the prompt.
    for_drafts: make a proposal's distribution. The user's logits_processors are not run: a draft's distribution may be
        any, and processors with state must see only prefixes that were emitted.
    keep_probs: at temperature 0 give `Peak`, which holds the probabilities at temperature 1.

    kind: pipelines of one kind do the same whatever the prefix, to rows at once too, see `distributions`; None: what it
        does depends on the prefix.
    """

    def __init__(
        self, params: SamplingParams, num_prompt: int, for_drafts: bool = False, keep_probs: bool = False
    ) -> None:
        self.is_greedy, self._keep_probs = params.is_greedy, keep_probs
        self._processors = _make_processors(params, num_prompt, for_drafts)
        self._warpers = [] if self.is_greedy else _make_warpers(params)
        settings = () if self.is_greedy else (params.temperature, params.top_k, params.top_p, params.min_p)
        self.kind: Kind | None = None if self._processors or (self.is_greedy and keep_probs) else settings

    def __call__(self, logits_row: Row, prefix: Sequence[int]) -> Distribution:
        """The distribution of the token after `prefix` (prompt included), whose raw logits are `logits_row`.

        Computed in float32, or in float64 where the logits are. The row itself is left as it is. Raises ValueError for
        logits that define no distribution: NaN, or every token banned.
        """
        scores = logits_row.unsqueeze(0)
        if self._processors:
            scores = scores.to(_at_least_float32(scores), copy=True)  # a user's processor may write into its argument
            input_ids = to_device(prefix, scores.device).unsqueeze(0)
            for process in self._processors:
                scores = process(input_ids, scores)
        if self.is_greedy:
            token_id, size = greedy_ids(scores)[0], scores.shape[-1]
            if not self._keep_probs:
                return OneHot(token_id, size)
            return Peak(token_id, size, self._warped_probs(scores.to(_at_least_float32(scores))))
        return Dense(self._warped_probs(scores.to(_at_least_float32(scores))))

    def _warped_probs(self, scores: Scores) -> Row:
        probs = self._softmax(scores)[0]
        if math.isnan(probs[0].item()):  # one entry tells: without a finite sum all of them are NaN
            raise _no_distribution(scores)
        return probs

    def _softmax(self, scores: Rows) -> Rows:
        unread = torch.empty(1, 0, dtype=torch.long)  # warpers look at scores only
        for warp in self._warpers:
            scores = warp(unread, scores)
        return torch.softmax(scores, dim=-1)

    def start(self, rows: Rows, asked: Sequence[Asked], fetch: Fetch) -> Callable[[list[Any]], Read]:
        """Make the distributions of some rows, as calls do, where `kind` is not None.

        What the host must know of them is added to `fetch`; the function returned makes them of what `fetch.take` gave:
        None for a row that defines none.
        """
        if self.is_greedy:
            values, ids = (fetch.add(found) for found in _greatest(rows))
            size = rows.shape[-1]
            return lambda got: [
                OneHot(token_id, size) if value > -math.inf else None
                for value, token_id in zip(got[values], got[ids], strict=True)
            ]
        parts = [
            self._start_drawing(part, some, fetch)
            for part, some in zip(rows.split(_at_once(rows)), _split(asked, _at_once(rows)), strict=True)
        ]
        return lambda got: [one for part in parts for one in part(got)]

    def _start_drawing(self, rows: Rows, asked: Sequence[Asked], fetch: Fetch) -> Callable[[list[Any]], Read]:
        probs = self._softmax(rows.to(_at_least_float32(rows)))
        cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
        draws = to_device(np.array([[one.draw] for one in asked]), rows.device)
        found = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
        named = to_device([one.token_id if one.token_id < rows.shape[1] else -1 for one in asked], rows.device)
        wanted = torch.where(named < 0, found[:, 0].clamp(max=rows.shape[1] - 1), named)
        places = [
            fetch.add(one) for one in (found[:, 0], wanted, probs.gather(1, wanted[:, None])[:, 0], cumulative[:, -1])
        ]
        return lambda got: [
            Drawn(row, token_id, one.draw, known, mass) if total > 0.0 else None
            for row, one, token_id, known, mass, total in zip(
                probs, asked, *(got[place] for place in places), strict=True
            )
        ]


def _make_processors(params: SamplingParams, num_prompt: int, for_drafts: bool) -> list[Processor]:
    processors: list[Processor] = []
    if params.logit_bias:
        processors.append(LogitBias(params.logit_bias, may_exceed_vocab=for_drafts))
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        processors.append(OccurrencePenalty(params.presence_penalty, params.frequency_penalty, num_prompt))
    return processors if for_drafts else [*processors, *params.logits_processors]


def _make_warpers(params: SamplingParams) -> list[Processor]:
    warpers: list[Processor] = []
    if params.temperature not in (None, 1.0):
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers


def greedy_ids(logits: Float[Tensor, "rows vocab"]) -> list[int]:
    """The most likely token of each row, the first of equals as in transformers. ValueError for a row that has none."""
    values, ids = _greatest(logits)
    if not bool((values > -math.inf).all()):
        raise _no_distribution(logits)
    return ids.tolist()


def _greatest(logits: Float[Tensor, "rows vocab"]) -> tuple[Tensor, Tensor]:
    """([rows] values, their ids), of equals the first; where there is NaN it shows in the value."""
    if fits(logits):
        ids, values, _ = leading(logits, 1)
        return values[:, 0], ids[:, 0]
    values, ids = logits.max(dim=-1)  # unlike argmax fast in bfloat16 on CPUs
    return values, ids


def _no_distribution(scores: Float[Tensor, "rows vocab"]) -> ValueError:
    if scores.isnan().any():
        return ValueError("logits hold NaN: the model's weights or a logits processor are broken")
    if (scores == -math.inf).all(dim=-1).any():
        return ValueError(f"all {scores.shape[-1]} tokens are banned (-inf) by logit_bias or logits_processors")
    return ValueError("logits hold +inf: they overflowed their dtype, or a logits processor is broken")


def logprobs(logits_row: Row, token_id: int, top: int) -> tuple[float, dict[int, float]]:
    """(log-probability of `token_id`, the `top` most likely ids with theirs, best first), of the raw logits."""
    values = torch.log_softmax(logits_row, dim=-1, dtype=_at_least_float32(logits_row))
    best, ids = values.topk(min(top, values.shape[-1]))
    return float(values[token_id]), dict(zip(ids.tolist(), best.tolist(), strict=True))


def distributions(logits: Rows, asked: Sequence[Asked], fetch: Fetch) -> Callable[[list[Any]], Read]:
    """Many distributions, and the tokens drawn from them, of rows of one pass: together where pipelines are of a kind.

    Returns what makes them, in their order, of what `fetch.take` gave. None stands where the prefix must be known, and
    where a row defines none: its pipeline says why.
    """
    groups: dict[Kind, list[int]] = defaultdict(list)
    for place, one in enumerate(asked):
        if one.pipeline.kind is not None:
            groups[one.pipeline.kind].append(place)
    started = []
    for places in groups.values():
        some = [asked[place] for place in places]
        started.append((places, some[0].pipeline.start(rows_of(logits, [one.row for one in some]), some, fetch)))

    def finish(got: list[Any]) -> Read:
        made: Read = [None] * len(asked)
        for places, make in started:
            for place, one in zip(places, make(got), strict=True):
                made[place] = one
        return made

    return finish


def rows_of(logits: Float[Tensor, "rows vocab"], rows: Sequence[int]) -> Float[Tensor, "some vocab"]:
    """Some rows, not copied where they lie in one piece."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return logits[rows[0] : rows[0] + len(rows)]
    return logits.index_select(0, to_device(rows, logits.device))


def _at_once(logits: Tensor) -> int:
    """Rows of which what is made stays in a CPU's caches, or within a GPU's memory."""
    return max((FAR_AT_ONCE if is_apart(logits.device) else AT_ONCE) // logits.shape[1], 1)


def _split(asked: Sequence[Asked], size: int) -> list[Sequence[Asked]]:
    return [asked[first : first + size] for first in range(0, len(asked), size)]


DEEP = 64
"""Logits that `likeliest` folds onto each other: few enough to sort what is left, many enough to leave little."""
AT_ONCE = 200_000
"""Logits that are read at once on a CPU: what `likeliest` makes of more does not stay in the caches, nor in the
allocator, which takes three times as long at 16 rows of 49152 bfloat16; draws make more of them still."""
FAR_AT_ONCE = 2**24
"""The same elsewhere: 128 MiB of float64."""


def likeliest(
    logits: Float[Tensor, "rows vocab"], k: int, among_them: bool = False
) -> tuple[Int[Tensor, "rows k"], Float[Tensor, "rows k"]]:
    """The k most likely ids of each row, best first, and their log-probabilities in at least float32.

    among_them: as if there were no others. They come out too high by what the others have, and a pass over the row is
    saved.

    On CPUs a kernel of ours looks at each number once. Elsewhere, with the vocabulary folded into DEEP layers, the best
    k lie in the k columns with the greatest maxima: one pass at the speed of memory and a sort of few. Of equals at the
    end any may be taken.
    """
    at_once = _at_once(logits)
    if len(logits) <= at_once:
        return _likeliest(logits, k, among_them)
    ids, values = zip(*(_likeliest(part, k, among_them) for part in logits.split(at_once)), strict=True)
    return torch.cat(ids), torch.cat(values)


def _likeliest(logits: Tensor, k: int, among_them: bool) -> tuple[Tensor, Tensor]:
    rows, vocab = logits.shape
    k, width = min(k, vocab), vocab // DEEP
    if fits(logits):
        ids, _, among = leading(logits, k)
        return ids, among if among_them else _log_softmax(logits).gather(1, ids)
    if width <= 2 * k:
        values, ids = logits.topk(k)
    else:
        columns = logits[:, : DEEP * width].unflatten(1, (DEEP, width)).amax(dim=1).topk(k, sorted=False).indices
        layers, rest = _folds(vocab, logits.device)
        ids = (columns[:, None, :] + layers).flatten(1)
        ids = torch.cat((ids, rest.expand(rows, -1)), dim=1) if len(rest) else ids
        values, places = logits.gather(1, ids).topk(k)
        ids = ids.gather(1, places)
    if among_them:
        return ids, _log_softmax(values)
    return ids, _log_softmax(logits).gather(1, ids)


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=-1, dtype=_at_least_float32(logits))


@lru_cache(maxsize=16)
def _folds(vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """([DEEP, 1] where each layer of a folded row begins, the ids that do not fill one more)."""
    width = vocab // DEEP
    with torch.inference_mode(False):
        layers = torch.arange(0, DEEP * width, width, device=device).unsqueeze(1)
        return layers, torch.arange(DEEP * width, vocab, device=device)


def make_generator(seed: int | None, index: int = 0, stream: int = 0) -> torch.Generator:
    """The generator of a request's `index`-th text: a pure function of `seed + index` and `stream`.

    So the third text of seed 7 is the first of seed 9. Streams of one seed are independent of each other: 0 draws from
    the target, 1 drafts. Without a seed every call gives a different generator. Neighbouring seeds are hashed apart.
    Numbers are drawn on the host, the same for all devices.
    """
    key = secrets.randbits(64) if seed is None else seed + index
    return torch.Generator().manual_seed(_splitmix64(_splitmix64(key) + stream))


def _splitmix64(state: int) -> int:
    """One step of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection of 64-bit integers, every bit mixed."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def _at_least_float32(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)
