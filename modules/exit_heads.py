"""Prediction heads on early layers: what turns one model into its own draft and intermediate verifier.

HiSpec (arXiv 2510.01336) for heads that are trained afterwards on a frozen model, LayerSkip (Elhoushi et al. 2024) for
exits without parameters. A head takes the residual stream after its layer; the model's own final norm and unembedding
finish the prediction. They are borrowed by `Exits` and never among a head's parameters, so a bundle does not hold them.

With a draft vocabulary logits are computed for K of the V tokens only, which is most of an early exit's cost: at hidden
size 576 and V = 49152 the unembedding costs twice the four layers below it. q is zero elsewhere, and the acceptance
rule stays exact. Left out: draft vocabularies that differ between exits.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from .batch import RaggedBatch
from .bundle import HeadBundle, wait_for_weights
from .fast import FastLinear, fast_layer, kind_of_layer
from .kv_cache import PagedKVCache
from .layered_model import LayeredModel

KIND = "exit-heads"
"""The kind of bundle that holds ExitHeads."""

KINDS = ("norm", "adapter", "block")
"""Kinds of head; see ExitHeads."""

EPS = 1e-6

OUTPUTS = ("o_proj", "down_proj", "out_proj", "fc2")
"""What a transformer layer's attention and MLP end with, in the families that there are."""


def default_layers(num_layers: int) -> tuple[int, int]:
    """The exits of HiSpec, L/8 to draft and L/4 to verify: rounded, above zero and apart."""
    draft = max(1, round(num_layers / 8))
    return draft, max(draft + 1, round(num_layers / 4))


class ExitHeads(nn.Module):
    """One head per exit layer of a model.

    layers: an exit is named by the number of layers below it, 1 to L; ascending; None: `default_layers`.
    kind: of all heads, or one for each.
        "norm": nothing of its own, for models trained to exit early.
        "adapter": a residual gated MLP of `rank` on each token; starts as "norm".
        "block": one transformer layer, which reads the tokens before, so every token of a text must pass it. It begins
        as the model's layer `block_layer` (None: the last) that adds nothing yet, so as "norm" too.
    rank: inner width of an adapter; its parameters are 3 * rank * hidden.
    translated: adapters and blocks read the residual stream through an affine map (the tuned lens, Belrose et al. 2023)
        that starts as the identity, since early states are nothing like those that the final norm expects. Its
        parameters are hidden * hidden; training can begin with the best such map (train/lens.py).
    draft_ids: the tokens that can be predicted, kept in ascending order; None: all.

    Parameters are at least float32. The model is read, not kept; a block over a fast model, whose weights are packed,
    waits for `HeadBundle.load_into`.

    Raises ValueError naming the argument.
    """

    draft_ids: Int[Tensor, "draft"] | None

    def __init__(
        self,
        model: LayeredModel,
        layers: Sequence[int] | None = None,
        kind: str | Sequence[str] = "adapter",
        rank: int = 1024,
        draft_ids: Int[Tensor, "draft"] | None = None,
        block_layer: int | None = None,
        translated: bool = True,
    ) -> None:
        super().__init__()
        self.layers = _checked_layers(default_layers(model.num_layers) if layers is None else layers, model.num_layers)
        self.kinds = _checked_kinds(kind, len(self.layers))
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}")
        if block_layer is not None and not 0 <= block_layer < model.num_layers:
            raise ValueError(f"block_layer must be from 0 to {model.num_layers - 1}, got {block_layer}")
        self.rank, self.block_layer, self.translated = rank, block_layer, translated
        self.hidden_size, self.vocab_size = model.hidden_size, model.vocab_size
        self.heads = nn.ModuleDict()
        for layer, name in zip(self.layers, self.kinds, strict=True):
            self.heads[str(layer)] = self._new_head(name, model)
        self.to(model.device, torch.promote_types(model.dtype, torch.float32))
        ids = None if draft_ids is None else _checked_ids(draft_ids, model.vocab_size).to(model.device)
        self.register_buffer("draft_ids", ids)

    def _new_head(self, kind: str, model: LayeredModel) -> nn.Module:
        if kind == "norm":
            return Norm()
        if kind == "adapter":
            return Adapter(self.hidden_size, self.rank, self.translated)
        return Block(model, model.num_layers - 1 if self.block_layer is None else self.block_layer, self.translated)

    def translation(self, layer: int) -> nn.Linear | None:
        """The affine map that the head reads through; None where it has none."""
        found = getattr(self._head(layer), "translate", None)
        return found if isinstance(found, nn.Linear) else None

    def reads_context(self, layer: int) -> bool:
        """Whether the head reads other tokens, and so needs the batch, and a cache to decode with."""
        return isinstance(self._head(layer), Block)

    def forward(
        self,
        layer: int,
        hidden: Float[Tensor, "tokens hidden"],
        model: LayeredModel,
        batch: RaggedBatch | None = None,
        cache: PagedKVCache | None = None,
    ) -> Float[Tensor, "tokens hidden"]:
        """What the final norm gets, from the residual stream after `layer`; in the dtype of `hidden`."""
        return self._head(layer)(hidden, model, batch, cache)

    @property
    def context_layers(self) -> tuple[int, ...]:
        """Exits whose heads read context."""
        return tuple(layer for layer, kind in zip(self.layers, self.kinds, strict=True) if kind == "block")

    def bind(self, model: LayeredModel, fast: bool = False, cache_layer: int | None = None) -> Exits:
        """The heads with what they borrow from a model, to be called for logits.

        The unembedding's rows are gathered here, once, unless they are being trained: bind again when the model's
        weights or device have changed.
        fast: for inference only. The heads are copied in the model's dtype, packed, and no longer follow this module.
        cache_layer: to decode with the target's cache, of which the heads that read context take layers from this one
            on, in the order of `context_layers`, so that one block table, commit and prefix index serve all. The heads
            are copied in the model's dtype too.

        Raises ValueError for a model of another shape, and for weights that were never loaded (NaN).
        """
        self._check_model(model)
        for name, parameter in self.named_parameters():
            if bool(parameter.isnan().any()):
                raise ValueError(f"head weights {name!r} hold NaN: they were never loaded, or training broke them")
        heads = self if not fast and cache_layer is None else self._copied(model.dtype, fast, cache_layer)
        return Exits(heads, model, fast, decodes=cache_layer is not None)

    def scatter(self, values: Float[Tensor, "rows draft"], fill: float = float("-inf")) -> Float[Tensor, "rows vocab"]:
        """Draft logits over the model's vocabulary; `fill` where the exit predicts nothing (0.0 for probabilities)."""
        if self.draft_ids is None:
            return values
        return values.new_full((len(values), self.vocab_size), fill).index_copy(1, self.draft_ids, values)

    def config(self) -> dict[str, Any]:
        """What a bundle records beside the tensors: constructor arguments, and the shape of the model they are for."""
        return {
            "layers": list(self.layers),
            "kind": list(self.kinds),
            "rank": self.rank,
            "block_layer": self.block_layer,
            "translated": self.translated,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
        }

    def to_bundle(
        self,
        base_fingerprint: str,
        base_model: str = "",
        card: dict[str, Any] | None = None,
        dtype: torch.dtype | None = None,
    ) -> HeadBundle:
        """A copy of the heads as they are now.

        base_fingerprint, base_model: `bundle.fingerprint` of the model, and its name. dtype: to store weights in;
        bfloat16 takes half the space.
        """
        tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in self.state_dict().items()}
        return HeadBundle(KIND, self.config(), tensors, base_fingerprint, base_model, card or {})

    @classmethod
    def from_bundle(cls, bundle: HeadBundle, model: LayeredModel) -> ExitHeads:
        """The heads that a bundle holds, bit for bit, in eval mode. ValueError where they do not fit the model."""
        if bundle.kind != KIND:
            raise ValueError(f"bundle holds {bundle.kind!r}; exit heads need a bundle of kind {KIND!r}")
        config = dict(bundle.config)
        for name, own in (("hidden_size", model.hidden_size), ("vocab_size", model.vocab_size)):
            if config.pop(name, None) != own:
                raise ValueError(f"bundle is for {name} {bundle.config.get(name)}, this model has {own}")
        names = ("layers", "kind", "rank", "block_layer", "translated")
        if config.keys() != set(names):
            raise ValueError(f"bundle's config must name {', '.join(names)}; got {', '.join(config)}")
        try:
            heads = cls(model, draft_ids=bundle.tensors.get("draft_ids"), **config)
        except TypeError as error:
            raise ValueError(f"bundle's config does not describe exit heads: {error}") from error
        bundle.load_into(heads)
        return heads.eval()

    def _head(self, layer: int) -> nn.Module:
        if layer not in self.layers:
            raise ValueError(f"exit layer must be one with a head ({', '.join(map(str, self.layers))}), got {layer}")
        return self.heads[str(layer)]

    def _check_model(self, model: LayeredModel) -> None:
        own, found = (self.hidden_size, self.vocab_size), (model.hidden_size, model.vocab_size)
        if own != found or self.layers[-1] > model.num_layers:
            raise ValueError(
                f"heads for hidden_size {own[0]}, vocab_size {own[1]} and at least {self.layers[-1]} layers do not fit "
                f"a model with hidden_size {found[0]}, vocab_size {found[1]} and {model.num_layers} layers"
            )

    def _copied(self, dtype: torch.dtype, fast: bool, cache_layer: int | None) -> ExitHeads:
        copied = copy.deepcopy(self).requires_grad_(False).eval().to(dtype)
        for place, layer in enumerate(copied.context_layers, start=cache_layer or 0):
            cast(Block, copied.heads[str(layer)]).layer.self_attn.layer_idx = place
        for name, head in copied.heads.items() if fast else ():
            if isinstance(head, Adapter):
                copied.heads[name] = FastAdapter(head)
            elif isinstance(head, Block):
                head.translate = _packed(head.translate)
                head.layer = fast_layer(head.layer)
        return copied


class Exits:
    """Heads bound to a model; made by `ExitHeads.bind`.

        exits = heads.bind(model)
        logits = exits.logits(4, hidden)

    Gradients reach whatever asks for them: the heads, and of the model nothing once it is frozen.
    """

    def __init__(self, heads: ExitHeads, model: LayeredModel, fast: bool, decodes: bool = False) -> None:
        self.heads, self.model, self.decodes = heads, model, decodes
        self._trimmed = None if heads.draft_ids is None else model.trimmed_unembedding(heads.draft_ids, fast)

    def logits(
        self,
        layer: int,
        hidden: Float[Tensor, "tokens hidden"],
        batch: RaggedBatch | None = None,
        cache: PagedKVCache | None = None,
    ) -> Float[Tensor, "tokens draft"]:
        """Next-token logits from the residual stream after `layer`, over the draft vocabulary if there is one.

        A head that `reads_context` needs the batch that `hidden` belongs to, and the cache in which its earlier tokens
        lie; without a cache it sees the batch alone (training). The others ignore both.
        """
        return self.finish(self.states(layer, hidden, batch, cache))

    def states(
        self,
        layer: int,
        hidden: Float[Tensor, "tokens hidden"],
        batch: RaggedBatch | None = None,
        cache: PagedKVCache | None = None,
    ) -> Float[Tensor, "tokens hidden"]:
        """What the head gives, for `finish`; a head that reads context has then put the tokens into the cache."""
        if cache is not None and not self.decodes and self.heads.reads_context(layer):
            raise ValueError("cache_layer must be given to bind: a 'block' would write where the model does")
        return self.heads(layer, hidden, self.model, batch, cache)

    def finish(self, states: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows draft"]:
        """Logits from what a head gave: the model's final norm and the rows of its unembedding."""
        return self.unembed(self.model.final(states))

    def unembed(self, final: Float[Tensor, "rows embed"]) -> Float[Tensor, "rows draft"]:
        """Logits over the draft vocabulary from states after the model's final norm."""
        return self.model.unembed(final) if self._trimmed is None else self._trimmed(final)


class Norm(nn.Module):
    """The residual stream as it is."""

    def forward(self, hidden: Tensor, *_: Any) -> Tensor:
        return hidden


def _translation(hidden_size: int, translated: bool) -> nn.Module:
    if not translated:
        return nn.Identity()
    linear = nn.Linear(hidden_size, hidden_size)
    nn.init.eye_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def _packed(translate: nn.Module) -> nn.Module:
    return FastLinear([translate]) if isinstance(translate, nn.Linear) else translate


class Adapter(nn.Module):
    """t + down(silu(gate(n)) * up(n)), t the translated state and n its RMS norm; starts as the state itself."""

    def __init__(self, hidden_size: int, rank: int, translated: bool) -> None:
        super().__init__()
        self.translate = _translation(hidden_size, translated)
        self.norm = nn.Parameter(torch.ones(hidden_size))
        self.gate = nn.Linear(hidden_size, rank, bias=False)
        self.up = nn.Linear(hidden_size, rank, bias=False)
        self.down = nn.Linear(rank, hidden_size, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, hidden: Tensor, *_: Any) -> Tensor:
        translated = self.translate(hidden.to(self.norm.dtype)).to(self.norm.dtype)  # autocast gives bfloat16
        states = F.rms_norm(translated, self.norm.shape, self.norm, EPS)
        return (translated + self.down(F.silu(self.gate(states)) * self.up(states))).to(hidden.dtype)


class FastAdapter(nn.Module):
    """An adapter with one product for gate and up, packed; for inference."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__()
        self.norm, self.translate = adapter.norm.detach(), _packed(adapter.translate)
        self.gate_up, self.down = FastLinear([adapter.gate, adapter.up]), FastLinear([adapter.down])

    def forward(self, hidden: Tensor, *_: Any) -> Tensor:
        translated = self.translate(hidden)
        states = F.rms_norm(translated, self.norm.shape, self.norm, EPS)
        gate, up = self.gate_up(states).chunk(2, dim=-1)
        return translated + self.down(F.silu(gate).mul_(up))


class Block(nn.Module):
    """A transformer layer of the model's own class, on the translated states.

    place: the model's layer whose rotary embedding and window it has, and whose weights it starts with. Where its keys
    and values lie in a cache is said by `bind`.
    """

    like: Tensor

    def __init__(self, model: LayeredModel, place: int, translated: bool) -> None:
        super().__init__()
        self.place = place
        self.translate = _translation(model.hidden_size, translated)
        own = model.decoder.layers[place]
        self.layer = kind_of_layer(own)(model.decoder.config, place).to(model.dtype)
        self.layer.self_attn.layer_idx = 0
        self.register_buffer("like", torch.empty(0), persistent=False)  # follows `to`, which packed weights cannot
        if any(isinstance(module, FastLinear) for module in own.modules()):
            wait_for_weights(self.layer)
        else:
            self.layer.load_state_dict(own.state_dict())
            self._silence()

    @torch.no_grad()
    def _silence(self) -> None:
        """Training then starts where the translation is, not where a layer made for other states would push it.

        Where a norm comes behind attention and MLP (Gemma), its scale is what becomes zero: it would blow up outputs
        that are nearly so.
        """
        if hasattr(self.layer, "post_feedforward_layernorm"):
            for norm in (self.layer.post_attention_layernorm, self.layer.post_feedforward_layernorm):
                norm.weight.fill_(-1.0)  # stored as a distance from one
            return
        for name, module in self.layer.named_modules():
            if name.rpartition(".")[2] in OUTPUTS:
                for parameter in module.parameters():
                    parameter.zero_()

    def forward(
        self, hidden: Tensor, model: LayeredModel, batch: RaggedBatch | None, cache: PagedKVCache | None
    ) -> Tensor:
        if batch is None:
            raise ValueError("batch must be given: a head of kind 'block' reads the tokens before")
        states = self.translate(hidden.to(self.like.dtype)).to(self.like.dtype)
        return model.run_layer(self.layer, self.place, states, batch, cache).to(hidden.dtype)


def _checked_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    ascending = sorted(set(layers))
    if not ascending or list(layers) != ascending or not 1 <= ascending[0] <= ascending[-1] <= num_layers:
        raise ValueError(f"layers must be ascending numbers from 1 to {num_layers}, the model's layers, got {layers!r}")
    return tuple(ascending)


def _checked_kinds(kind: str | Sequence[str], count: int) -> tuple[str, ...]:
    kinds = (kind,) * count if isinstance(kind, str) else tuple(kind)
    if len(kinds) != count or any(name not in KINDS for name in kinds):
        raise ValueError(
            f"kind must be one of {', '.join(KINDS)}, or a list of one for each of {count} exits, got {kind!r}"
        )
    return kinds


def _checked_ids(draft_ids: Tensor, vocab_size: int) -> Tensor:
    ids = draft_ids.detach().long().unique()
    if len(ids) == 0 or len(ids) < draft_ids.numel() or not 0 <= int(ids[0]) <= int(ids[-1]) < vocab_size:
        raise ValueError(
            f"draft_ids must be different token ids below {vocab_size}, the model's vocabulary; got "
            f"{draft_ids.numel()} ids, {len(ids)} of them different"
            + (f", from {int(ids[0])} to {int(ids[-1])}" if len(ids) else "")
        )
    return ids
