"""`speclight verify`: the self-check a user runs on their own model. Is the text of a method that of plain decoding?

Greedy texts must be equal, alone and in a batch, but for near-ties; after every step the cache must be in order; and
the first tokens of sampled texts must have the model's own distribution, by a chi-square test against one forward pass.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .build import METHODS, EngineOptions, build_engine, option, prepare
from .compare import NEAR_TIE, first_difference, logit_gap, next_logits, token_at
from .stats import SequenceStats

if TYPE_CHECKING:
    from .engine import Engine
    from .request import Completion

PROMPTS = {
    "prose": "The lighthouse keeper climbed the stairs one last time. Outside, the storm had",
    "question": "Why is the sky blue during the day and red at sunset? Explain it in a few sentences.",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "list": "Seven things to pack for a week in the mountains:\n1. Warm socks\n2. A map\n3.",
    "repetition": "one two three four one two three four one two three four one two",
    "copying": "Repeat this sentence word for word: The quick brown fox jumps over the lazy dog near the river bank.",
    "JSON": '[{"name": "Ada", "born": 1815}, {"name": "Alan", "born": 1912}, {"name":',
    "arithmetic": "Anna has 12 apples. She gives 5 to Ben and buys 8 more. How many apples has she now? Step by step:",
    "German": "Die drei wichtigsten Flüsse in Deutschland sind der Rhein, die",
    "Chinese": "请用一句话介绍北京。",
    "emoji": "Write a cheerful greeting with emoji 😀🎉:",
    "one letter": "A",
    "one word": "Yes",
}
"""Built-in prompts, by what they try."""

SAMPLED = ("repetition", "list")
"""Prompts of the chi-square test: one that lookups answer, and one with several likely continuations."""

DEPTH = 3  # tokens of a sampled text that are tested; the first is always drawn without a draft
LARGEST_SAMPLED = 8  # proposals of the sampled texts: more nodes cost time, and three tokens need few
FALSE_ALARM = 1e-4
LEAST_EXPECTED = 5.0  # of a cell of the chi-square test
REST = -1  # stands for all tokens that have no cell of their own


@dataclass(kw_only=True)
class VerifyOptions(EngineOptions):
    """What is checked."""

    method: str = option("logitspec", METHODS)
    draft_tokens: int | None = option(None, "size of proposals; see generate --help")
    max_new_tokens: int = option(64, "of each greedy text")
    samples: int = option(600, "sampled texts per prompt of the chi-square test")
    temperature: float = option(0.7, "of the sampled texts; the lower, the fewer and fuller the cells of the test")
    seed: int = option(0, "of the sampled texts")
    chat: bool | None = option(None, "prompts are a user's messages; if unset, when there is a chat template")
    json: bool = option(False, "print the report as JSON")


@dataclass(frozen=True)
class Check:
    """One thing that was checked. `Check("cache", True, "in order after 81 steps", [])`"""

    name: str
    passed: bool
    summary: str
    details: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Settings:
    """What `run_checks` needs besides an engine and prompts; see VerifyOptions."""

    method: str
    draft_tokens: int | None = None
    max_new_tokens: int = 64
    samples: int = 600
    temperature: float = 0.7
    seed: int = 0


def verify(options: VerifyOptions) -> int:
    """Check and print the report; 0 when everything passed, 1 otherwise. Raises ValueError for what is not valid."""
    from tqdm import tqdm

    from .request import GenerationParams

    _check(options)
    prepared = prepare(options, [options.method])
    if not prepared.is_lossless:
        raise ValueError(
            f"method {options.method} with target.rule {options.target.rule} is lossy, so its text is not that of "
            "plain decoding; `speclight pareto` measures how far it is from it"
        )
    chat = prepared.is_chat(options.chat)
    prepared.intake().check(GenerationParams(draft_tokens=options.draft_tokens))
    engine = build_engine(prepared)
    settings = Settings(**{name: getattr(options, name) for name in Settings.__dataclass_fields__})
    prompts = encode_prompts(engine, chat)
    with tqdm(total=count_texts(prompts, settings), unit="text", disable=None) as bar:
        checks = run_checks(engine, prompts, settings, bar.update)
    dtype = str(engine.model.dtype).removeprefix("torch.")
    passed = all(check.passed for check in checks)
    if options.json:
        facts = {"passed": passed, "model": options.model, "dtype": dtype, "method": options.method}
        print(json.dumps(facts | {"checks": [asdict(check) for check in checks]}, ensure_ascii=False))
    else:
        print(render(f"{options.model}, {dtype}, {options.method}", checks))
    return 0 if passed else 1


def _check(options: VerifyOptions) -> None:
    if options.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {options.max_new_tokens}")
    least = least_samples(FALSE_ALARM / len(SAMPLED))
    if options.samples < least:
        raise ValueError(
            f"samples must be at least {least}, got {options.samples}: with fewer no texts whatever would be a fault, "
            f"at a probability of {FALSE_ALARM:g} for false alarms"
        )
    if options.temperature <= 0.0:
        raise ValueError(f"temperature must be above 0, it is that of the sampled texts; got {options.temperature}")


def encode_prompts(engine: Engine, chat: bool) -> dict[str, list[int]]:
    """The built-in prompts that this tokenizer has tokens for and that leave room in the context."""
    encoded = {}
    for name, text in PROMPTS.items():
        bare = engine.tokenizer(text, add_special_tokens=False).input_ids
        if bare and len(bare) < engine.max_length // 2:
            encoded[name] = engine.encode([{"role": "user", "content": text}] if chat else text)
    return encoded


Watch = Callable[[int], object]
"""Called with the number of texts that have just been made."""


def count_texts(prompts: Mapping[str, Sequence[int]], settings: Settings) -> int:
    """How many texts `run_checks` makes."""
    return 3 * len(prompts) + len(_sampled(prompts)) * settings.samples


def run_checks(
    engine: Engine, prompts: Mapping[str, Sequence[int]], settings: Settings, watch: Watch = lambda count: None
) -> list[Check]:
    """All checks, in the order of the report."""
    stats: list[SequenceStats] = []
    plain = {name: _run_alone(engine, ids, "ar", settings, watch).token_ids for name, ids in prompts.items()}
    alone = {name: _run_alone(engine, ids, settings.method, settings, watch) for name, ids in prompts.items()}
    together, cache = run_together(engine, prompts, settings, watch)
    stats += [completion.stats for completion in (*alone.values(), *together.values())]
    checks = [
        compare_greedy("greedy, alone", engine, prompts, plain, alone),
        compare_greedy("greedy, together", engine, prompts, plain, together),
        cache,
    ]
    distribution, sampled_stats = check_distribution(engine, _sampled(prompts), settings, watch)
    return [*checks, distribution, _check_drafter(settings.method, SequenceStats.total([*stats, *sampled_stats]))]


def _sampled(prompts: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    return {name: prompts[name] for name in SAMPLED if name in prompts} or dict(list(prompts.items())[: len(SAMPLED)])


def render(title: str, checks: Sequence[Check]) -> str:
    """The report as text."""
    width = max(len(check.name) for check in checks)
    lines = [f"speclight verify: {title}"]
    for check in checks:
        lines.append(f"  {'pass' if check.passed else 'FAIL'}  {check.name:<{width}}  {check.summary}")
        lines += [f"        {detail}" for detail in check.details]
    failed = sum(not check.passed for check in checks)
    return "\n".join([*lines, "all checks passed" if not failed else f"{failed} of {len(checks)} checks failed"])


# -- greedy texts ----------------------------------------------------------------------------------------------------


def _run_alone(engine: Engine, prompt: Sequence[int], method: str, settings: Settings, watch: Watch) -> Completion:
    from .request import GenerationParams

    draft_tokens = settings.draft_tokens if method == settings.method else None
    params = GenerationParams(method=method, draft_tokens=draft_tokens, max_new_tokens=settings.max_new_tokens)
    completion = engine.generate(list(prompt), params)[0]
    watch(1)
    return completion


def run_together(
    engine: Engine, prompts: Mapping[str, Sequence[int]], settings: Settings, watch: Watch
) -> tuple[dict[str, Completion], Check]:
    """All prompts in one batch, with the cache checked after every step; texts of a run that broke are missing."""
    from .request import GenerationParams

    params = GenerationParams(
        method=settings.method, draft_tokens=settings.draft_tokens, max_new_tokens=settings.max_new_tokens
    )
    for name, ids in prompts.items():
        engine.add(list(ids), params, request_id=f"verify {name}")
    done: dict[str, Completion] = {}
    steps = 0
    try:
        while engine.has_work:
            chunks = engine.step()
            steps += 1
            ended = {c.request_id.removeprefix("verify "): c.completion for c in chunks if c.completion is not None}
            done |= ended
            watch(len(ended))
            engine.check_invariants()
        held = engine.cache.allocator.num_in_use
        assert held == 0, f"{held} blocks are still in use after the last text has ended"
    except AssertionError as error:
        for name in prompts:
            engine.cancel(f"verify {name}")
        return done, Check("cache", False, f"not in order after {steps} steps", [str(error)])
    blocks = engine.cache.allocator.num_blocks
    return done, Check("cache", True, f"in order after each of {steps} steps, all {blocks} blocks free at the end")


def compare_greedy(
    name: str,
    engine: Engine,
    prompts: Mapping[str, Sequence[int]],
    plain: Mapping[str, Sequence[int]],
    completions: Mapping[str, Completion],
) -> Check:
    """Token ids against those of plain decoding; a difference at a near-tie is listed and does not fail."""
    dtype = str(engine.model.dtype).removeprefix("torch.")
    near_ties: list[str] = []
    failures = [f"{prompt!r}: no text" for prompt in prompts if prompt not in completions]
    for prompt, completion in completions.items():
        ours, theirs = completion.token_ids, plain[prompt]
        at = first_difference(ours, theirs)
        if at is None:
            continue
        tokens = token_at(ours, at), token_at(theirs, at)
        gap = logit_gap(engine.model, [*prompts[prompt], *theirs[:at]], *tokens)
        line = f"{prompt!r}, token {at}: {_shown(engine, tokens[0])}, plain decoding has {_shown(engine, tokens[1])}; "
        (near_ties if gap < NEAR_TIE[dtype] else failures).append(f"{line}logit gap {gap:.3g}")
    equal = len(prompts) - len(near_ties) - len(failures)
    summary = f"{equal} of {len(prompts)} texts equal plain decoding"
    if near_ties:
        summary += f", {len(near_ties)} part at near-ties (logit gap under {NEAR_TIE[dtype]:g} in {dtype})"
    return Check(name, not failures, summary, [*failures, *(f"near-tie: {line}" for line in near_ties)])


def _shown(engine: Engine, token_id: int | None) -> str:
    if token_id is None:
        return "the end"
    text = "" if engine.tokenizer is None else f" {engine.tokenizer.decode([token_id])!r}"
    return f"{token_id}{text}"


def _check_drafter(method: str, stats: SequenceStats) -> Check:
    """A drafter that raises costs drafts, not texts; here it is a fault all the same."""
    if stats.draft_failures:
        return Check("drafter", False, f"{method} raised: {stats.draft_failures} steps lost their draft")
    return Check(
        "drafter",
        True,
        f"raised nowhere; {stats.accepted} of {stats.drafted} drafted tokens accepted, {stats.mat:.2f} tokens per pass",
    )


# -- distribution ----------------------------------------------------------------------------------------------------

NextProbs = Callable[[Sequence[Sequence[int]]], np.ndarray]
"""prefixes -> [prefixes, vocab] exact next-token probabilities."""


@dataclass(frozen=True)
class Cells:
    """A partition of all continuations. probs: {prefix: probability}; REST as last token stands for all others."""

    probs: dict[tuple[int, ...], float]

    def cell_of(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The cell that a continuation falls into."""
        for length in range(1, len(token_ids) + 1):
            prefix = tuple(token_ids[:length])
            for cell in (prefix, (*prefix[:-1], REST)):
                if cell in self.probs and not self._is_split(prefix):
                    return cell
        raise AssertionError(f"{list(token_ids)} falls into no cell: shorter than the cells are deep")

    def _is_split(self, prefix: tuple[int, ...]) -> bool:
        return (*prefix, REST) in self.probs


def exact_cells(next_probs: NextProbs, depth: int, samples: int, split_at: float = 4 * LEAST_EXPECTED) -> Cells:
    """Continuations of up to `depth` tokens, split as far as enough samples are expected in each cell."""
    probs: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(): 1.0}
    for level in range(1, depth + 1):
        deeper: dict[tuple[int, ...], float] = {}
        rows = next_probs(list(frontier)) if frontier else ()
        for (prefix, mass), row in zip(frontier.items(), rows, strict=True):
            common = np.flatnonzero(mass * row * samples >= LEAST_EXPECTED)
            probs[(*prefix, REST)] = float(mass * np.delete(row, common).sum())
            for token_id in common.tolist():
                child = float(mass * row[token_id])
                split = level < depth and child * samples >= split_at
                (deeper if split else probs)[(*prefix, token_id)] = child
        frontier = deeper
    return Cells(probs)


def chi_square(cells: Cells, continuations: Sequence[Sequence[int]]) -> tuple[float, int]:
    """(p-value, cells compared) of the continuations under the cells' probabilities. Rare cells are pooled."""
    from scipy.stats import chi2

    counts = Counter(map(cells.cell_of, continuations))
    total = len(continuations)
    rows = sorted((prob * total, counts[cell]) for cell, prob in cells.probs.items())
    expected, observed = _pooled(np.array(rows, dtype=np.float64))
    if len(expected) < 2:
        return 1.0, len(expected)
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(chi2.sf(statistic, len(expected) - 1)), len(expected)


def _pooled(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(expected, observed), the smallest cells added up until each expects enough; rows are sorted by expectation."""
    small = int(np.searchsorted(rows[:, 0], LEAST_EXPECTED))
    if small and rows[:small, 0].sum() < LEAST_EXPECTED and small < len(rows):
        small += 1
    parts = [rows[:small].sum(axis=0, keepdims=True)] if small else []
    pooled = np.concatenate([*parts, rows[small:]])
    return pooled[:, 0], pooled[:, 1]


def least_samples(limit: float) -> int:
    """The fewest texts of which some could be a fault at that p-value, whatever the model.

    At best there are two cells, one that expects as little as a cell may, and all texts fall into that one.
    """

    def best(count: int) -> float:
        return math.erfc(math.sqrt(_most_extreme(LEAST_EXPECTED, count) / 2))  # chi-square with one degree of freedom

    return next(count for count in itertools.count(int(2 * LEAST_EXPECTED)) if best(count) < limit)


def best_p_value(cells: Cells, count: int) -> float:
    """The least p-value that any texts could have under these cells: 1 where only one cell is left."""
    from scipy.stats import chi2

    expected, _ = _pooled(np.array(sorted((prob * count, 0.0) for prob in cells.probs.values())))
    return 1.0 if len(expected) < 2 else float(chi2.sf(_most_extreme(expected.min(), count), len(expected) - 1))


def _most_extreme(expected: float, count: int) -> float:
    """The chi-square statistic when all texts fall into the cell that expects the fewest."""
    return count * (count - expected) / expected


def check_distribution(
    engine: Engine, prompts: Mapping[str, Sequence[int]], settings: Settings, watch: Watch = lambda count: None
) -> tuple[Check, list[SequenceStats]]:
    """Chi-square of the first tokens per prompt; together they raise a false alarm with probability FALSE_ALARM.

    A check that no texts whatever could have failed is not passed.
    """
    limit = FALSE_ALARM / len(prompts)
    details, worst, telling, stats = [], 1.0, 0, []
    for name, ids in prompts.items():
        cells = exact_cells(model_probs(engine, ids, settings.temperature), DEPTH, settings.samples)
        texts, counted = _sample(engine, ids, settings, watch)
        p_value, compared = chi_square(cells, texts)
        is_telling = best_p_value(cells, settings.samples) < limit
        empty = "" if is_telling else ", too few to notice anything: more samples or a higher temperature make more"
        details.append(f"{name!r}: p-value {p_value:.3g} over {compared} cells{empty}")
        worst, telling = min(worst, p_value), telling + is_telling
        stats += counted
    total = SequenceStats.total(stats)
    if settings.method != "ar" and not total.drafted:
        details.append("nothing was drafted here, so this tested plain decoding only")
    about_seeds = engine.drafters[settings.method].about_seeds
    if about_seeds is not None:
        details.append(f"these texts have seeds: {about_seeds}")
    summary = (
        f"chi-square of the first {DEPTH} tokens of {settings.samples} texts ({total.accepted} of {total.drafted} "
        f"drafted accepted): least p-value {worst:.3g}, a fault below {limit:g} (false alarms: {FALSE_ALARM:g})"
    )
    return Check("distribution", worst >= limit and telling > 0, summary, details), stats


def _sample(
    engine: Engine, prompt: Sequence[int], settings: Settings, watch: Watch
) -> tuple[list[Sequence[int]], list[SequenceStats]]:
    """One token more than is tested, so that proposals are allowed to reach the last one tested."""
    from .request import GenerationParams

    draft_tokens = LARGEST_SAMPLED if settings.draft_tokens is None else min(settings.draft_tokens, LARGEST_SAMPLED)
    params = GenerationParams(
        method=settings.method,
        draft_tokens=draft_tokens,
        max_new_tokens=DEPTH + 1,
        temperature=settings.temperature,
        seed=settings.seed,
        n=settings.samples,
        ignore_eos=True,
    )
    texts: list[Sequence[int]] = []
    stats: list[SequenceStats] = []
    for chunk in engine.stream(list(prompt), params):
        if chunk.completion is not None:
            texts.append(chunk.completion.token_ids[:DEPTH])
            stats.append(chunk.completion.stats)
            watch(1)
    return texts, stats


def model_probs(engine: Engine, prompt: Sequence[int], temperature: float, at_once: int = 64) -> NextProbs:
    """The model's own distribution after the prompt and a prefix, from passes without cache or engine, in float64."""
    import torch

    def next_probs(prefixes: Sequence[Sequence[int]]) -> np.ndarray:
        texts: list[list[int]] = [[*prompt, *prefix] for prefix in prefixes]
        parts = [next_logits(engine.model, texts[start : start + at_once]) for start in range(0, len(texts), at_once)]
        return torch.softmax(torch.cat(parts).double() / temperature, dim=-1).cpu().numpy()

    return next_probs
