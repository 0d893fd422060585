"""Rollouts: texts drawn by the engine under the learned rule, and per token what training needs to know of them.

Every token that was verified against the mixture v is recorded, bonus tokens included (the draft runs one token
further for them). A text's first token comes with its prompt and before any draft, and a last one that there is no room
to draft for is the target's too: the head has no part in those, so they are part of the text and not of the record.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..infer.drafter import Observation
from ..infer.engine import Engine
from ..infer.files import replace_file
from ..infer.request import Completion, GenerationParams, Prompt
from ..infer.stats import SequenceStats
from ..infer.target import LearnedEnsemble
from ..modules.ensemble import aligned
from ..modules.ensemble_head import EnsembleHead
from .reinforce import log_mixture


@dataclass
class Rollouts:
    """Tokens in order, text by text.

    draft, target: [tokens, ...] h_q and h_p. p, q: of the token that was drawn. tv: TV(p, q) there. weight: w then.
    text: which text a token belongs to. rewards, groups, lengths: [texts] what it earned, whose prompt's answer it is,
    and its emitted tokens. counts: what the engine counted over all texts.
    """

    draft: Float[Tensor, "tokens draft"]
    target: Float[Tensor, "tokens target"]
    p: Float[Tensor, "tokens"]
    q: Float[Tensor, "tokens"]
    tv: Float[Tensor, "tokens"]
    weight: Float[Tensor, "tokens"]
    text: Int[Tensor, "tokens"]
    rewards: Float[Tensor, "texts"]
    groups: Int[Tensor, "texts"]
    lengths: Int[Tensor, "texts"]
    counts: SequenceStats

    def __len__(self) -> int:
        return self.p.shape[0]

    @property
    def log_prob(self) -> Float[Tensor, "tokens"]:
        """log v(x) as it was drawn."""
        return log_mixture(self.weight, self.p, self.q)

    def to(self, device: torch.device) -> Rollouts:
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self._tensors().items()}
        return replace(self, **moved)

    def without_states(self) -> Rollouts:
        """A small record, for measuring only."""
        none = {name: getattr(self, name).new_zeros(0, getattr(self, name).shape[1]) for name in ("draft", "target")}
        return replace(self, **none)

    def _tensors(self) -> dict[str, Tensor]:
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "counts"}

    def save(self, path: str | Path, facts: dict[str, str]) -> None:
        """One safetensors file, complete or not at all. facts: what it may only be used with."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self._tensors().items()}
        replace_file(Path(path), save(tensors, facts | {"counts": json.dumps(self.counts.as_dict())}))

    @classmethod
    def load(cls, path: str | Path) -> tuple[Rollouts, dict[str, str]]:
        """The rollouts and their facts. Raises ValueError for a file that holds none."""
        try:
            with safe_open(str(path), "pt") as file:
                facts = dict(file.metadata() or {})
                counts = SequenceStats.from_dict(json.loads(facts.pop("counts")))
                return cls(**{name: file.get_tensor(name) for name in file.keys()}, counts=counts), facts  # noqa: SIM118
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} does not hold rollouts: {error}") from error


class RolloutSampler:
    """Draws texts with an engine whose drafter of method `method` is verified under `head`, at temperature 1.

    num_draft, draft_layer: of its proposals; None: the drafter's own. head is read as it is at each call: train it and
    sample again.
    """

    def __init__(
        self,
        engine: Engine,
        method: str,
        head: EnsembleHead,
        num_draft: int | None = None,
        draft_layer: int | None = None,
    ) -> None:
        self.engine, self.method, self.head = engine, method, head
        self.params = GenerationParams(method=method, temperature=1.0, draft_tokens=num_draft, draft_layer=draft_layer)
        self.rule = LearnedEnsemble(head, bonus=True)
        engine.verify_against(method, self.rule)
        self._parts: list[dict[str, Any]] = []

    def sample(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], samples: int, max_new_tokens: int
    ) -> tuple[list[Completion], Rollouts]:
        """`samples` texts for each prompt, and their record without rewards (zeros).

        seeds: per prompt, `samples` apart at least: a text depends on its seed, not on what runs beside it.
        """
        self._parts = []
        params = [replace(self.params, max_new_tokens=max_new_tokens, seed=seed, n=samples) for seed in seeds]
        self.engine.reset()  # what is cached from earlier steps would round otherwise, and a resumed run has none
        self.rule.to(self.engine.model.device)
        self.engine.watchers.append(self._watch)
        try:
            done = self.engine.generate(list(prompts), params)
        finally:
            self.engine.watchers.remove(self._watch)
        failed = next((one.error for one in done if one.error is not None), None)
        if failed is not None:
            raise RuntimeError(f"a rollout failed: {failed}")
        return done, self._assembled(done, samples)

    def _watch(self, observations: list[Observation]) -> None:
        """Record what the verified tokens of a pass were drawn under."""
        where, rows_p, rows_q, states_q, states_p = [], [], [], [], []
        for seen in observations:
            emitted = seen.verdict.emitted(seen.tree)
            for offset, (node, token_id) in enumerate(zip(seen.verdict.path, emitted, strict=False)):
                drawn = seen.tree.drawn_from(node)
                if drawn is None or seen.tree.states is None or seen.states is None:
                    continue
                sequence = seen.sequence
                where.append((sequence.request_id, sequence.index, sequence.num_emitted + offset, token_id))
                rows_p.append(seen.logits[node])
                rows_q.append(aligned(drawn.dense(), seen.logits.shape[1]))
                states_q.append(seen.tree.states[node])
                states_p.append(seen.states[node])
        if not where:
            return
        p, q = torch.stack(rows_p), torch.stack(rows_q)
        p = torch.softmax(p if p.dtype == torch.float64 else p.float(), dim=-1)
        index = torch.tensor([token_id for *_, token_id in where], device=p.device)[:, None]
        draft, target = torch.stack(states_q), torch.stack(states_p)
        self._parts.append(
            {
                "where": where,
                "p": p.gather(1, index)[:, 0],
                "q": q.gather(1, index)[:, 0],
                "tv": (p - q).clamp(min=0.0).sum(dim=-1).clamp(max=1.0),
                "weight": self.head(draft, target).detach(),
                "draft": draft,
                "target": target,
            }
        )

    def _assembled(self, done: list[Completion], samples: int) -> Rollouts:
        """The records in the order of the texts; those of tokens that a text's end cut off are left out."""
        place = {(one.request_id, one.index): number for number, one in enumerate(done)}
        rows = [
            (place[request, index], position, part, row)
            for part, one in enumerate(self._parts)
            for row, (request, index, position, _) in enumerate(one["where"])
            if position < len(done[place[request, index]].token_ids)
        ]
        rows.sort(key=lambda row: row[:2])
        starts = [0]
        for one in self._parts:
            starts.append(starts[-1] + len(one["where"]))
        order = torch.tensor([starts[part] + row for *_, part, row in rows], dtype=torch.long)
        device = self.engine.model.device

        def column(name: str) -> Tensor:
            if self._parts:
                return torch.cat([one[name] for one in self._parts])[order.to(device)]
            width = {"draft": (self.head.draft_size,), "target": (self.head.target_size,)}
            return torch.zeros(0, *width.get(name, ()), device=device)

        whole = {name: column(name) for name in ("p", "q", "tv", "weight", "draft", "target")}
        self._parts = []
        return Rollouts(
            **{name: whole[name].float() for name in ("p", "q", "tv", "weight")},
            draft=whole["draft"],
            target=whole["target"],
            text=torch.tensor([text for text, *_ in rows], dtype=torch.long, device=device),
            rewards=torch.zeros(len(done), device=device),
            groups=torch.arange(len(done) // samples, device=device).repeat_interleave(samples),
            lengths=torch.tensor([len(one.token_ids) for one in done], device=device),
            counts=SequenceStats.total(one.stats for one in done),
        )
