"""`speclight replay`: what drafters would have been worth on recorded texts. No model is run.

A recorded text says what greedy decoding emits after any prefix of it, so a proposal can be verified against it, and
the drafter can be shown the logits that the pass would have made. Drafters are those of the engine, asked and taught as
the engine does, one text after the other; steps are verified and counted by the engine's own rule and statistics.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .build import LogitSpecOptions, PromptLookupOptions, check_datastore_tree, did_you_mean, option

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..modules.acceptance import Verdict
    from ..modules.token_tree import TokenTree
    from .datastore import Datastore
    from .drafter import Drafter
    from .recording import RecordedText, Recording
    from .request import Sequence as RunningText
    from .stats import SequenceStats


@dataclass(kw_only=True)
class ReplayOptions:
    """Which drafters are tried, on what."""

    recording: str = option(..., "folder made by `speclight record`")
    output: str = option(..., "folder for report.json, report.md and report.png")
    methods: tuple[str, ...] = option(("prompt-lookup", "logitspec"), "a,b: of ar, prompt-lookup, logitspec", nargs="+")
    trees: tuple[str, ...] = option((), "a,b: logitspec's trees; if unset that of --logitspec.tree", nargs="+")
    shared: tuple[str, ...] = option((), "a,b: what they share; if unset that of --logitspec.shared", nargs="+")
    budgets: tuple[str, ...] = option(("8", "16", "32", "64"), "a,b: nodes of a proposal, root included", nargs="+")
    logitspec: LogitSpecOptions = field(default_factory=LogitSpecOptions)
    prompt_lookup: PromptLookupOptions = field(default_factory=PromptLookupOptions)


@dataclass(frozen=True)
class Variant:
    """A drafter to try. `Variant("logitspec, paper", "logitspec", {"tree": "paper", ...}, ...)`; arguments: its own.

    drafter: a fresh one, of at most so many nodes a proposal, root included, and with the datastore that its arguments
    name. draft_tokens: what the engine would ask it for, by that number of nodes.
    """

    name: str
    method: str
    arguments: Mapping[str, Any]
    drafter: Callable[[int, Datastore | None], Drafter]
    draft_tokens: Callable[[int], int]

    def facts(self) -> dict[str, Any]:
        """For a report, which names a datastore but not where it lies."""
        folder = self.arguments.get("datastore")
        named = {} if folder is None else {"datastore": Path(folder).name}
        return {"name": self.name, "method": self.method, "arguments": {**self.arguments, **named}}


@dataclass(frozen=True)
class Outcome:
    """One drafter on one text. proposing, observing: CPU seconds spent in `propose`, and in `observe` and `read`."""

    text: RecordedText
    stats: SequenceStats
    proposing: float
    observing: float


def replay(options: ReplayOptions) -> None:
    """Try every drafter at every budget, write the report, print its first table. Raises ValueError for what is not
    valid."""
    from tqdm import tqdm

    from .recording import read_recording
    from .replay_report import build_report, mat_table, write_report

    budgets = parse_budgets(options.budgets)
    variants = parse_variants(options)
    for variant in variants:
        variant.drafter(budgets[0], None)  # refuses wrong arguments now
    _check_folder(Path(options.output))
    recording = read_recording(options.recording)
    datastore = _datastore(options, variants, recording)
    _make_folder(Path(options.output))
    outcomes: dict[tuple[str, int], list[Outcome]] = {}
    with tqdm(total=len(variants) * len(budgets) * len(recording.texts), unit="text", disable=None) as bar:
        for variant in variants:
            for budget in budgets:
                drafter = variant.drafter(budget, datastore)
                ran = run(drafter, recording, variant.draft_tokens(budget))
                outcomes[variant.name, budget] = list(_watched(ran, bar))
    report = build_report(recording, {variant.name: variant.facts() for variant in variants}, outcomes)
    write_report(options.output, report)
    print(mat_table(report))
    print(f"speclight: {Path(options.output) / 'report.md'}", file=sys.stderr)


def _datastore(options: ReplayOptions, variants: Sequence[Variant], recording: Recording) -> Datastore | None:
    """Raises ValueError for one of another tokenizer than the recording's, and where no variant reads it."""
    folder = options.logitspec.datastore
    if folder is None:
        return None
    if not any(variant.method == "logitspec" for variant in variants):
        raise ValueError("logitspec.datastore is read by logitspec, which methods does not name")
    from .datastore import Datastore

    if not recording.tokenizer:
        raise ValueError(
            f"recording {options.recording!r} does not say which tokenizer made it, so it can be replayed without a "
            "datastore only; `speclight record --overwrite` makes one that does"
        )
    found = Datastore.load(folder)
    found.check_tokenizer(f"logitspec.datastore {folder!r}", recording.tokenizer, recording.vocab_size)
    return found


def _watched(outcomes: Iterator[Outcome], bar: Any) -> Iterator[Outcome]:
    for outcome in outcomes:
        bar.update()
        yield outcome


def _names(texts: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name.strip() for text in texts for name in text.split(",") if name.strip()))


def parse_budgets(texts: Sequence[str]) -> list[int]:
    """Rising. Raises ValueError for what is no size of a proposal."""
    from .intake import MAX_DRAFT_TOKENS

    names = _names(texts)
    for name in names:
        if not (name.isascii() and name.isdecimal() and 1 <= int(name) <= MAX_DRAFT_TOKENS):
            raise ValueError(f"budgets must be integers from 1 to {MAX_DRAFT_TOKENS}, got {name!r}")
    if not names:
        raise ValueError("budgets must name at least one size, got none")
    return sorted({int(name) for name in names})


def parse_variants(options: ReplayOptions) -> list[Variant]:
    """Every method, logitspec with every tree. Raises ValueError, naming the option, for an unknown name."""
    from .logitspec import SHARED, TREES

    for name, values, valid in (
        ("methods", _names(options.methods), tuple(METHODS)),
        ("trees", _names(options.trees), TREES),
        ("shared", _names(options.shared), SHARED),
    ):
        for value in values:
            if value not in valid:
                raise ValueError(f"{name} must be among {', '.join(valid)}, got {value!r}{did_you_mean(value, valid)}")
    variants: list[Variant] = []
    for method in _names(options.methods):
        variants += METHODS[method](options)
    if not variants:
        raise ValueError(f"methods must name at least one of {', '.join(METHODS)}, got none")
    return variants


def _plain(options: ReplayOptions) -> Iterator[Variant]:
    from .drafter import Drafter

    yield Variant("ar", "ar", {}, lambda budget, datastore: Drafter(), lambda budget: 0)


def _prompt_lookup(options: ReplayOptions) -> Iterator[Variant]:
    from .prompt_lookup import PromptLookupDrafter

    own = asdict(options.prompt_lookup)

    def drafter(budget: int, datastore: Datastore | None) -> Drafter:
        return PromptLookupDrafter(**{**own, "num_tokens": max(budget - 1, 1)})

    yield Variant("prompt-lookup", "prompt-lookup", own, drafter, lambda budget: budget - 1)  # a chain lacks the root


def _logitspec(options: ReplayOptions) -> Iterator[Variant]:
    from .logitspec import LogitSpecDrafter

    own = asdict(options.logitspec)
    for tree in _names(options.trees) or [own["tree"]]:
        check_datastore_tree(options.logitspec.datastore, tree)
        shared = (_names(options.shared) or [own["shared"]]) if tree != "paper" else ["none"]
        for kind in shared:
            name = f"logitspec, {tree}" + (f", shared {kind}" if tree != "paper" else "")
            arguments = own | {"tree": tree, "shared": kind}

            def drafter(budget: int, datastore: Datastore | None, arguments: dict[str, Any] = arguments) -> Drafter:
                return LogitSpecDrafter(**{**arguments, "capacity": budget, "datastore": datastore})

            yield Variant(name, "logitspec", arguments, drafter, lambda budget: budget)


METHODS = {"ar": _plain, "prompt-lookup": _prompt_lookup, "logitspec": _logitspec}


def _check_folder(folder: Path) -> None:
    """Raise ValueError for a folder that holds something else than a replay's report."""
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if present - {"report.json", "report.md", "report.png"}:
        raise ValueError(f"output folder {str(folder)!r} holds something else than a replay; choose another")


def _make_folder(folder: Path) -> None:
    """Raises ValueError where there can be none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output must be a folder or a new one, {str(folder)!r} cannot be: {error.strerror}") from None


def run(drafter: Drafter, recording: Recording, draft_tokens: int) -> Iterator[Outcome]:
    """One drafter over all texts, in order; what it learns from one it has for the next."""
    rows = Rows(draft_tokens + 1, recording.vocab_size)
    for number, text in enumerate(recording.texts):
        yield _Replayed(drafter, text, recording, rows, number, draft_tokens).run()


class Rows:
    """[nodes, vocab] logits as a pass would have made them: the recorded ones, and the rest of each row's probability
    spread evenly. Rows of nodes that are not on the accepted path were never recorded; they are NaN."""

    def __init__(self, num_nodes: int, vocab_size: int) -> None:
        import torch

        self.logits = torch.full((num_nodes, vocab_size), torch.nan)

    def fill(self, nodes: Sequence[int], ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        """ids, logprobs: [nodes, k] of these nodes."""
        import numpy as np
        import torch

        vocab, k = self.logits.shape[1], ids.shape[1]
        rest = np.log(np.maximum(1.0 - np.exp(logprobs.astype(np.float64)).sum(axis=1), 1e-30) / max(vocab - k, 1))
        for node, one_ids, values, tail in zip(nodes, ids, logprobs, rest, strict=True):
            row = self.logits[node].fill_(min(float(tail), float(values[-1]) - 1e-6))
            row[torch.from_numpy(one_ids.astype(np.int64))] = torch.from_numpy(values)

    def forget(self, nodes: Sequence[int]) -> None:
        import torch

        for node in nodes:
            self.logits[node].fill_(torch.nan)


class _Replayed:
    """One text under one drafter, step by step as `Engine` takes them."""

    def __init__(
        self, drafter: Drafter, text: RecordedText, recording: Recording, rows: Rows, number: int, draft_tokens: int
    ) -> None:
        self.drafter, self.text, self.rows, self.wanted = drafter, text, rows, draft_tokens
        self.token_ids: list[int] = text.token_ids.tolist()
        self.stop_ids, self.max_new_tokens = frozenset(recording.stop_ids), recording.max_new_tokens
        self.vocab_size = recording.vocab_size
        self.sequence = _sequence(number, self.token_ids[: text.num_prompt], self.max_new_tokens)
        self.proposing = self.observing = 0.0

    def run(self) -> Outcome:
        started = time.thread_time()
        self._read_prompt()
        self.observing += time.thread_time() - started
        while len(self.sequence.token_ids) < len(self.token_ids):
            self._step()
        self.drafter.release(self.sequence.sequence_id)
        return Outcome(self.text, self.sequence.stats, self.proposing, self.observing)

    def _read_prompt(self) -> None:
        """Nothing of it comes from a prefix cache, and it is one pass."""
        from .readout import PromptRows

        positions = list(self.drafter.unread(self.sequence, 0, self.sequence.num_prompt - 1))
        size = self.rows.logits.shape[0]
        for first in range(0, len(positions), size):
            part = positions[first : first + size]
            nodes = list(range(len(part)))
            self.rows.fill(nodes, self.text.top_ids[part], self.text.top_logprobs[part])
            rows = PromptRows(self.rows.logits[: len(part), : self.drafter.prompt_vocab])
            self.drafter.read(self.sequence, part, rows)
            self.rows.forget(nodes)

    def _step(self) -> None:
        from ..modules.acceptance import verify
        from .drafter import Observation

        sequence, last = self.sequence, len(self.sequence.token_ids) - 1
        tree = self._propose()
        verdict = verify(tree, lambda node: self._target(tree, last, node))
        places = [last + depth for depth in range(len(verdict.path))]
        self.rows.fill(verdict.path, self.text.top_ids[places], self.text.top_logprobs[places])
        started = time.thread_time()
        self.drafter.observe([Observation(sequence, tree, verdict, self.rows.logits[: len(tree)])])
        self.observing += time.thread_time() - started
        self.rows.forget(verdict.path)
        self._emit(tree, verdict)

    def _propose(self) -> TokenTree:
        from ..modules.token_tree import TokenTree

        sequence = self.sequence
        room = self.max_new_tokens - sequence.num_emitted
        drafts = sequence.num_emitted > 0 and room > 1 and self.wanted > 0
        sequence.draft_tokens, sequence.max_depth = (self.wanted, room - 1) if drafts else (0, 0)
        if not drafts:
            return TokenTree.root(sequence.token_ids[-1])
        sequence.stats.draft_calls += 1
        started = time.thread_time()
        (tree,) = self.drafter.propose([sequence])
        self.proposing += time.thread_time() - started
        return tree.clipped(sequence.max_depth, sequence.draft_tokens + 1)

    def _target(self, tree: TokenTree, last: int, node: int) -> Any:
        """What the recorded text goes on with: after the node at depth d stands token last + 1 + d."""
        from ..modules.acceptance import OneHot

        if node > 0 and tree.token_ids[node] in self.stop_ids:
            return None
        return OneHot(self.token_ids[last + 1 + tree.depths[node]], self.vocab_size)

    def _emit(self, tree: TokenTree, verdict: Verdict) -> None:
        sequence = self.sequence
        block = verdict.emitted(tree)[: self.max_new_tokens - sequence.num_emitted]
        start = len(sequence.token_ids)
        assert block == self.token_ids[start : start + len(block)], "what is emitted is what was recorded"
        sequence.token_ids.extend(block)
        looked_up = self.drafter.retrieves and sequence.draft_tokens > 0
        sequence.stats.record_verdict(tree, verdict, len(block), looked_up)


def _sequence(number: int, prompt_ids: list[int], max_new_tokens: int) -> RunningText:
    import torch

    from .request import GenerationParams
    from .request import Sequence as RunningText

    generator = torch.Generator()
    params = GenerationParams(max_new_tokens=max_new_tokens)
    return RunningText(number, f"request-{number}", params, prompt_ids, len(prompt_ids), generator, generator)
