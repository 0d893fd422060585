"""How far an early exit is from the final layer, and LayerSkip's schedules: pure functions.

p is the final layer's next-token distribution, the target, and carries no gradient; q is the exit's. Everything is
reduced in float32 (float64 where the logits are): divergences taken in bfloat16 are off by a tenth near convergence.
A loss is returned as a sum and a count, so that a mean over micro-batches and ranks is divided once.

With a draft vocabulary the exit has logits for K of the V tokens only, and q is zero elsewhere. Each loss says what it
means then; m is the mass that p has inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# --- losses of single rows ---------------------------------------------------------------------------------------
# log_q: the exit's, [rows, K]. log_p: the final layer's, normalised over all V and then taken at the K tokens.


def forward_kl(log_p: Float[Tensor, "rows draft"], log_q: Float[Tensor, "rows draft"]) -> Float[Tensor, "rows"]:
    """KL(p || q). With a draft vocabulary m * KL(p inside, renormalised || q): its gradient is m q - p.

    Plain KL would be infinite; this is what of it q can change. A row counts by how much of it the exit can say at all,
    and the minimum is 0, at p renormalised.
    """
    p = log_p.exp()
    inside = p.sum(-1)
    return (p * (log_p - log_q)).sum(-1) - torch.special.xlogy(inside, inside)


def reverse_kl(log_p: Float[Tensor, "rows draft"], log_q: Float[Tensor, "rows draft"]) -> Float[Tensor, "rows"]:
    """KL(q || p). With a draft vocabulary the same, as q is zero outside: the minimum is -log m, not 0."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def total_variation(log_p: Float[Tensor, "rows draft"], log_q: Float[Tensor, "rows draft"]) -> Float[Tensor, "rows"]:
    """TV(p, q), one minus the probability that a draft from q is accepted. Exact with a draft vocabulary: as q sums to
    one inside, what q has too much is what p has too much, wherever that lies. The minimum is 1 - m.
    """
    return (log_q.exp() - log_p.exp()).clamp(min=0.0).sum(-1)


def cross_entropy(
    log_q: Float[Tensor, "rows draft"], token_ids: Int[Tensor, "rows"], draft_ids: Int[Tensor, "draft"] | None = None
) -> Float[Tensor, "rows"]:
    """-log q(token). A token outside the draft vocabulary gives 0, the limit of `forward_kl` for a one-hot p there."""
    if draft_ids is None:
        return -log_q.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    columns = torch.searchsorted(draft_ids, token_ids).clamp(max=len(draft_ids) - 1)
    picked = log_q.gather(1, columns.unsqueeze(1)).squeeze(1)
    return torch.where(draft_ids[columns] == token_ids, -picked, 0.0)


def log_probs(logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    """Log-softmax in float32, or in float64 where the logits are. The logits must be finite."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


@dataclass(frozen=True)
class ExitLoss:
    """A weighted sum of losses of an exit, `ExitLoss(forward_kl=1.0, argmax=0.1)`.

    argmax: cross-entropy on the final layer's most likely token. data: cross-entropy on the text's own next token. The
    others are the functions of this file.

    Raises ValueError for a weight that is negative or not finite, and when all are zero.
    """

    forward_kl: float = 1.0
    reverse_kl: float = 0.0
    total_variation: float = 0.0
    argmax: float = 0.0
    data: float = 0.0

    def __post_init__(self) -> None:
        weights = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        for name, weight in weights.items():
            if not 0.0 <= weight < math.inf:
                raise ValueError(f"{name} must be a weight of at least 0 (off), got {weight!r}")
        if not any(weights.values()):
            raise ValueError(f"one of {', '.join(weights)} must be above 0: with all weights 0 nothing is learned")

    @property
    def needs_final(self) -> bool:
        """Whether the final layer's logits are read at all."""
        return any((self.forward_kl, self.reverse_kl, self.total_variation, self.argmax))

    def rows(
        self,
        exit_logits: Float[Tensor, "rows draft"],
        final_logits: Float[Tensor, "rows vocab"] | None = None,
        next_ids: Int[Tensor, "rows"] | None = None,
        draft_ids: Int[Tensor, "draft"] | None = None,
    ) -> Float[Tensor, "rows"]:
        """Each row's loss.

        final_logits may be None when only `data` has a weight, next_ids when it has none. draft_ids: the token ids of
        the exit's logits, ascending; None when they are the whole vocabulary.
        """
        self._check(exit_logits, final_logits, next_ids, draft_ids)
        log_q = log_probs(exit_logits)
        losses = log_q.new_zeros(len(log_q))
        if final_logits is not None and self.needs_final:
            losses = losses + self._to_final(log_q, final_logits.detach(), draft_ids)
        if next_ids is not None and self.data:
            losses = losses + self.data * cross_entropy(log_q, next_ids, draft_ids)
        return losses

    def _to_final(self, log_q: Tensor, final_logits: Tensor, draft_ids: Tensor | None) -> Tensor:
        losses = log_q.new_zeros(len(log_q))
        distances = {forward_kl: self.forward_kl, reverse_kl: self.reverse_kl, total_variation: self.total_variation}
        if any(distances.values()):
            log_p = log_probs(final_logits).to(log_q.dtype)
            log_p = log_p if draft_ids is None else log_p[:, draft_ids]
            for distance, weight in distances.items():
                if weight:
                    losses = losses + weight * distance(log_p, log_q)
        if self.argmax:
            losses = losses + self.argmax * cross_entropy(log_q, most_likely(final_logits), draft_ids)
        return losses

    def _check(
        self, exit_logits: Tensor, final_logits: Tensor | None, next_ids: Tensor | None, draft_ids: Tensor | None
    ) -> None:
        if self.needs_final and final_logits is None:
            raise ValueError("final_logits must be given: a loss with weight compares with the final layer")
        if self.data and next_ids is None:
            raise ValueError("next_ids must be given: data has a weight")
        width = exit_logits.shape[1]
        if draft_ids is not None and len(draft_ids) != width:
            raise ValueError(f"draft_ids must name the exit's {width} logits, got {len(draft_ids)} ids")
        if draft_ids is None and final_logits is not None and final_logits.shape[1] != width:
            raise ValueError(
                f"exit_logits have {width} columns and final_logits {final_logits.shape[1]}; draft_ids must say which"
            )


def most_likely(logits: Float[Tensor, "rows vocab"]) -> Int[Tensor, "rows"]:
    """The argmax of each row, by `max`, which unlike `argmax` is fast in bfloat16 on CPUs."""
    return logits.max(dim=-1).indices


def agrees(
    exit_logits: Float[Tensor, "rows draft"],
    final_logits: Float[Tensor, "rows vocab"],
    draft_ids: Int[Tensor, "draft"] | None = None,
) -> Float[Tensor, "rows"]:
    """1 where exit and final layer have the same most likely token, else 0. Outside the draft vocabulary is 0."""
    token_ids = most_likely(exit_logits)
    token_ids = token_ids if draft_ids is None else draft_ids[token_ids]
    return (token_ids == most_likely(final_logits)).float()


# --- sums over many rows -----------------------------------------------------------------------------------------


class LossSum(NamedTuple):
    """total: [] the summed losses of `num_rows` rows, [] as float32. Zero rows are a total of 0 with zero gradients."""

    total: Tensor
    num_rows: Tensor

    @classmethod
    def of(cls, total: Tensor, num_rows: int) -> LossSum:
        return cls(total, torch.tensor(float(num_rows), device=total.device))


def mean_loss(sums: Iterable[LossSum]) -> Tensor:
    """The mean over all rows of all sums; 0 when there are no rows."""
    totals, counts = zip(*sums, strict=True)
    return torch.stack(totals).sum() / torch.stack(counts).sum().clamp(min=1.0)


def kept_rows(
    mask: Bool[Tensor, "tokens"], share: float = 1.0, generator: torch.Generator | None = None
) -> Int[Tensor, "rows"]:
    """The positions that count: those of the mask, each kept with probability `share`, independently of the others.

    So a mean over the kept ones estimates the mean over all, however a batch was cut into micro-batches.
    """
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share must be above 0 and at most 1 (all positions), got {share!r}")
    if share < 1.0:
        if generator is None:
            raise ValueError(f"share={share} samples positions and needs a generator")
        draws = torch.rand(mask.shape, generator=generator, device=generator.device)
        mask = mask & (draws < share).to(mask.device)
    return mask.nonzero().squeeze(1)


def exit_loss(
    loss: ExitLoss,
    exit_logits: Float[Tensor, "tokens draft"],
    final_logits: Float[Tensor, "tokens vocab"] | None = None,
    next_ids: Int[Tensor, "tokens"] | None = None,
    mask: Bool[Tensor, "tokens"] | None = None,
    draft_ids: Int[Tensor, "draft"] | None = None,
    chunk_rows: int = 512,
) -> LossSum:
    """The loss of the positions in the mask (None: all), from logits that are already there.

    Training computes the logits inside `sum_over_chunks` instead, so that they never exist for all tokens.
    """
    given = {"exit_logits": exit_logits, "final_logits": final_logits, "next_ids": next_ids}
    rows = {name: tensor for name, tensor in given.items() if tensor is not None}
    if mask is not None:
        kept = kept_rows(mask)
        rows = {name: tensor[kept] for name, tensor in rows.items()}

    def row_losses(*chunk: Tensor) -> Tensor:
        return loss.rows(**dict(zip(rows, chunk, strict=True)), draft_ids=draft_ids).unsqueeze(1)

    total, _ = sum_over_chunks(row_losses, list(rows.values()), chunk_rows)
    return LossSum.of(total, len(rows["exit_logits"]))


def sum_over_chunks(
    row_losses: Callable[..., Float[Tensor, "rows columns"]], rows: Sequence[Tensor], chunk_rows: int = 512
) -> tuple[Tensor, Tensor]:
    """Sum what `row_losses` gives for rows, without ever holding more than a chunk's logits and their temporaries.

        total, measured = sum_over_chunks(lambda h, f: loss.rows(head(h), unembed(f)).unsqueeze(1), [hidden, final])

    rows: tensors whose first axis is the rows; they are split together. The first column of the result is the loss,
    others are measured only. Returns ([] the loss, [columns - 1] the measured sums).

    Gradients are taken chunk by chunk in the forward pass, so nothing is run twice, and handed out by `backward`: to
    `rows` and to every parameter that `row_losses` reads. Zero rows still give each of them a gradient of zeros, which
    a rank without supervised tokens needs. `row_losses` must not read other tensors that carry a graph of their own.
    """
    parts = list(zip(*(tensor.split(chunk_rows) for tensor in rows), strict=True))
    if not torch.is_grad_enabled():
        sums = torch.stack([row_losses(*part).sum(0) for part in parts]).sum(0)
        return sums[0], sums[1:]
    gradients = _Gradients(rows)
    sums = torch.stack([gradients.add(row_losses, part) for part in parts]).sum(0)
    tensors, values = gradients.collect()
    return _HandOut.apply(sums[0], values, *tensors), sums[1:]


class _Gradients:
    """Gradients of the loss so far: of the rows in pieces, of the parameters summed in float32."""

    def __init__(self, rows: Sequence[Tensor]) -> None:
        self._rows = rows
        self._pieces: list[tuple[Tensor, ...]] = []
        self._parameters: list[Tensor] = []
        self._sums: list[Tensor] = []

    def add(self, row_losses: Callable[..., Tensor], part: Sequence[Tensor]) -> Tensor:
        """One chunk; returns its [columns] sums, without a graph."""
        part = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in part]
        inputs = [tensor for tensor in part if tensor.requires_grad]
        sums = row_losses(*part).sum(0)
        if not sums.requires_grad:
            return sums
        if not self._pieces:
            self._parameters = [leaf for leaf in _leaves(sums) if not any(leaf is known for known in inputs)]
            self._sums = [torch.zeros_like(leaf, dtype=_at_least_float32(leaf)) for leaf in self._parameters]
        found = torch.autograd.grad(sums[0], [*inputs, *self._parameters], materialize_grads=True)
        self._pieces.append(found[: len(inputs)])
        for total, gradient in zip(self._sums, found[len(inputs) :], strict=True):
            total += gradient
        return sums.detach()

    def collect(self) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors that get a gradient, and their gradients."""
        inputs = [tensor for tensor in self._rows if tensor.requires_grad] if self._pieces else []
        whole = [torch.cat(pieces) for pieces in zip(*self._pieces, strict=True)]
        sums = [total.to(leaf.dtype) for total, leaf in zip(self._sums, self._parameters, strict=True)]
        return [*inputs, *self._parameters], [*whole, *sums]


class _HandOut(torch.autograd.Function):
    """A value whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(gradient * scale.to(gradient.dtype) for gradient in ctx.gradients)


def _leaves(result: Tensor) -> list[Tensor]:
    """The tensors that a result's graph ends in and that want a gradient."""
    seen, waiting, found = set(), [result.grad_fn], []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


# --- LayerSkip (Elhoushi et al. 2024, section 4) -----------------------------------------------------------------


def depth_scale(layer: int, num_layers: int) -> float:
    """D(l) = exp(l ln2 / (L - 1)) - 1, from 0 at the first layer to 1 at the last."""
    return _doubling(layer, num_layers, "num_layers")


def time_scale(step: int, num_steps: int) -> float:
    """S(t) = exp(t ln2 / (T - 1)) - 1 for training from scratch, 1 beyond T. Continued training uses 1 throughout."""
    return _doubling(min(step, num_steps - 1), num_steps, "num_steps")


def _doubling(index: int, length: int, name: str) -> float:
    if length < 2:
        raise ValueError(f"{name} must be at least 2, got {length}")
    return math.exp(index * math.log(2) / (length - 1)) - 1.0


def layer_dropout_rates(num_layers: int, p_max: float, time_scale: float = 1.0) -> list[float]:
    """p(l, t) = S(t) D(l) p_max: the probability that a sample skips each layer."""
    if not 0.0 <= p_max < 1.0:
        raise ValueError(f"p_max must be in [0, 1), got {p_max!r}")
    return [time_scale * depth_scale(layer, num_layers) * p_max for layer in range(num_layers)]


def exit_scales(active: Sequence[bool], e_scale: float) -> list[float]:
    """The weight of each layer's exit loss, (t, l) -> C(t, l) e(l) / sum_i C(t, i) e(i): they sum to one.

    active: C(t, .), of which the last must be set. e(l) grows with the depth: e_scale * (0 + 1 + ... + l), and for the
    last layer L - 1 + e_scale * (0 + ... + L - 2).
    """
    last = len(active) - 1
    if last < 1 or not active[last]:
        raise ValueError("active must name at least 2 layers and hold the last: it is the target that is served")
    if not 0.0 <= e_scale < math.inf:
        raise ValueError(f"e_scale must be a number of at least 0, got {e_scale!r}")
    scales = [e_scale * layer * (layer + 1) / 2 for layer in range(last)] + [last + e_scale * (last - 1) * last / 2]
    chosen = [scale if on else 0.0 for scale, on in zip(scales, active, strict=True)]
    return [scale / sum(chosen) for scale in chosen]


def rotational(step: int, num_layers: int, every: int) -> list[bool]:
    """The exits trained at a step: every `every`-th layer, shifted by one each step, and always the last.

    The paper leaves open whether the last takes turns too; it is what is served, so here it does not.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1 layer, got {every}")
    return [layer == num_layers - 1 or (layer - step) % every == 0 for layer in range(num_layers)]


def gradual(step: int, num_layers: int, num_steps: int) -> list[bool]:
    """The exits trained at a step: the last, then one more from above every T / 2L steps; all from T / 2 on."""
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    enabled = 1 + step * 2 * num_layers // num_steps
    return [layer >= num_layers - enabled for layer in range(num_layers)]
