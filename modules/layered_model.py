"""A Hugging Face causal language model as a stack that can be run in ranges of layers over a ragged batch.

transformers provides the modelling code; nothing of it is copied. Its decoder layers hand unknown keyword arguments
down to the attention function named in the configuration, so one registered function reaches the batch and the paged
cache. Training and inference go through the same `run`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from .attention import Attention, paged_attention, reference_attention
from .batch import RaggedBatch
from .fast import FastLayer, FastLinear, fast_norm, layer_window, pad_rows, signed_halves, speed_up
from .fused import prepare
from .graphs import Graphs, Recorder
from .kv_cache import PagedKVCache

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gemma3", "opt")
"""Values of `model_type` that LayeredModel runs; of "gemma3", the multimodal checkpoint, the text part is used."""

ATTENTION = "speclight_paged"


def check_supported(config: Any) -> None:
    """Raise ValueError, naming what is supported, for a model that cannot be run layer by layer. Needs no weights."""
    if config.model_type not in SUPPORTED:
        architecture = (getattr(config, "architectures", None) or ["unknown architecture"])[0]
        raise ValueError(
            f"model_type {config.model_type!r} ({architecture}) is not supported; supported: {', '.join(SUPPORTED)}"
        )
    if config.model_type == "opt" and getattr(config, "layerdrop", 0.0):
        raise ValueError(f"layerdrop must be 0 for layer-wise execution, got {config.layerdrop}")
    if getattr(config, "use_bidirectional_attention", None):
        raise ValueError("use_bidirectional_attention must be off: only causal models can be decoded")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if any(isinstance(kind, dict) and kind.get("rope_type") == "longrope" for kind in (rope, *rope.values())):
        raise ValueError("rope_type 'longrope' is not supported: its factors depend on what else is in the pass")
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        raise ValueError(f"quantization_config ({method}) cannot be split into layers; use an unquantised checkpoint")


@dataclass
class Paged:
    """What one layer's attention needs of a pass: the batch, the cache it reads and writes (None: itself only), and the
    function that attends."""

    batch: RaggedBatch
    cache: PagedKVCache | None
    attention: Attention
    rotations: dict[tuple[str, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    rooms: dict[str, Tensor] = field(default_factory=dict)

    def halves(self, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """`signed_halves` of one of the pass's embeddings, made once."""
        key = "halves", id(position_embeddings)
        if key not in self.rotations:
            self.rotations[key] = signed_halves(*position_embeddings)
        return self.rotations[key]

    def cos_sin(self, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """transformers' [1, tokens, head_dim] cos and sin as kernels take them: [tokens, head_dim], in one piece."""
        key = "cos, sin", id(position_embeddings)
        if key not in self.rotations:
            cos, sin = position_embeddings
            self.rotations[key] = cos[0].contiguous(), sin[0].contiguous()
        return self.rotations[key]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """[tokens, heads, head_dim] what the new tokens read, their own keys and values included; see `write`."""
        keys, values = self.write(layer, key, value)
        return self.attention(query, keys, values, self.batch, scaling, window, softcap)

    def storage(self, layer: int, like: Tensor, heads: int, size: int) -> tuple[Tensor, Tensor]:
        """Where new keys and values go, by the batch's `slots`, and attention reads from: the cache, or room for these
        alone."""
        if self.cache is not None:
            return self.cache.layer(layer)
        shape = (self.batch.num_tokens, heads, size)
        return like.new_empty(shape), like.new_empty(shape)

    def room(self, name: str, rows: int, width: int, like: Tensor) -> Tensor:
        """[rows, width] to be written and then read, the same in all layers of the pass; zeros at first."""
        found = self.rooms.get(name)
        if found is None or found.shape != (rows, width):
            found = self.rooms[name] = like.new_zeros(rows, width)
        return found

    def read(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
        rows: int,
    ) -> Tensor:
        """[rows, heads, head_dim] what the new tokens read, from keys and values that hold their own; rows: at least as
        many as there are tokens, the last ones of no meaning."""
        if self.attention is not paged_attention:
            return pad_rows(self.attention(query, keys, values, self.batch, scaling, window, softcap).flatten(1), rows)
        out = self.room("read", rows, query.shape[1] * query.shape[2], query).view(rows, *query.shape[1:])
        return paged_attention(query, keys, values, self.batch, scaling, window, softcap, out)

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put new keys and values, [tokens, kv_heads, head_dim], in their slots; returns what attention reads from."""
        if self.cache is None:
            return key, value
        assert self.batch.slot_mapping is not None, "a batch built without a cache cannot be run with one"
        keys, values = self.cache.layer(layer)
        keys.index_copy_(0, self.batch.slot_mapping, key)
        values.index_copy_(0, self.batch.slot_mapping, value)
        return keys, values


def _attention_interface(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    paged: Paged | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature; query [1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim]."""
    if paged is None:
        raise RuntimeError("this model belongs to a LayeredModel: run it through LayeredModel.run")
    # under autocast rotary embedding has turned query and key back into float32
    query, key, value = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    read = paged.attend(module.layer_idx, query, key, value, scaling, layer_window(module), softcap)
    return read.unsqueeze(0), None


AttentionInterface.register(ATTENTION, _attention_interface)


def kv_shape(config: Any) -> tuple[int, int]:
    """(heads of keys and values, their size) of a layer, from transformers' configuration."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def kv_bytes_per_token(num_layers: int, heads: int, size: int, dtype: torch.dtype) -> int:
    """Keys and values of so many heads of one size in all layers."""
    return 2 * num_layers * heads * size * dtype.itemsize


class LayeredModel(nn.Module):
    """Takes over a transformers causal LM: embed, run any range of layers, logits.

    The model passed in is changed in place (its attention, and with `fast` its modules) and should not be used
    otherwise.
    fast: swap in the faster modules of `fast.py`, for inference only; off for training.
    attention: what all layers call; None: `paged_attention` for fast models, else the reference. `flex_paged_attention`
        is for inference on GPUs.

    Raises ValueError for an unsupported architecture.
    """

    is_fast: bool = False
    graphs: Graphs | None = None
    """Recordings of passes over one cache; see `record_passes`."""

    def __init__(self, hf_model: PreTrainedModel, fast: bool = True, attention: Attention | None = None) -> None:
        super().__init__()
        check_supported(hf_model.config)
        self.config = hf_model.config.get_text_config()
        decoder = hf_model.get_decoder()
        decoder = getattr(decoder, "language_model", getattr(decoder, "decoder", decoder))
        decoder.config._attn_implementation = ATTENTION
        self.decoder, self.head = decoder, hf_model.get_output_embeddings()
        self.norm = decoder.final_layer_norm if self.config.model_type == "opt" else decoder.norm
        self.softcap = getattr(self.config, "final_logit_softcapping", None)
        self.eos_token_ids = _eos_token_ids(hf_model)
        self.is_fast = fast
        self.attention = attention or (paged_attention if fast else reference_attention)
        self.rotary_kinds = _rotary_kinds(decoder)
        if fast:
            prepare(self.dtype, self.device)
            self.requires_grad_(False).eval()
            speed_up(decoder.layers)
            self.head = FastLinear([self.head])
            self.norm = fast_norm(self.norm)

    @property
    def num_layers(self) -> int:
        return len(self.decoder.layers)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def max_positions(self) -> int:
        return self.config.max_position_embeddings

    @property
    def num_kv_heads(self) -> int:
        return kv_shape(self.config)[0]

    @property
    def head_dim(self) -> int:
        return kv_shape(self.config)[1]

    @property
    def device(self) -> torch.device:
        return self.decoder.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.embed_tokens.weight.dtype

    def new_cache(
        self, num_blocks: int, block_size: int = 16, prefix_caching: bool = True, extra_layers: int = 0
    ) -> PagedKVCache:
        """An empty cache that fits this model. extra_layers: room behind its own, for heads that read context."""
        return PagedKVCache(
            self.num_layers + extra_layers,
            self.num_kv_heads,
            self.head_dim,
            num_blocks,
            block_size,
            self.dtype,
            self.device,
            prefix_caching,
        )

    def bytes_per_token(self, extra_layers: int = 0) -> int:
        """What one cached token costs over all layers."""
        return kv_bytes_per_token(self.num_layers + extra_layers, self.num_kv_heads, self.head_dim, self.dtype)

    def record_passes(self, cache: PagedKVCache, record: Recorder | None = None) -> None:
        """From now on passes of few tokens over this cache are recorded, and run from their recordings.

        record: None: as CUDA graphs. Raises ValueError for attention that cannot be recorded, and for graphs of a model
        that is not on a CUDA device.
        """
        if record is None and self.device.type != "cuda":
            raise ValueError(f"cuda_graphs needs a model on a CUDA device, this one is on {self.device}")
        if self.attention not in (paged_attention, reference_attention):
            raise ValueError("passes can be recorded with the reference attention only")
        self.graphs = Graphs(self, cache, record)

    def embed(self, batch: RaggedBatch) -> Float[Tensor, "tokens hidden"]:
        """The residual stream before the first layer."""
        hidden = self.decoder.embed_tokens(batch.token_ids)
        if self.config.model_type != "opt":
            return hidden
        if self.decoder.project_in is not None:
            hidden = self.decoder.project_in(hidden)
        return hidden + self.decoder.embed_positions(None, position_ids=batch.positions)

    def run(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        batch: RaggedBatch,
        cache: PagedKVCache | None,
        start: int,
        stop: int,
    ) -> Float[Tensor, "tokens hidden"]:
        """The residual stream after layers [start, stop), from the one before them.

        Writes the new tokens' keys and values of those layers into their slots. `run(run(h, a), b)` over adjacent
        ranges equals one run over both, bit for bit. cache None: tokens see only the batch's own (training, scoring).
        """
        if self.graphs is not None and cache is not None and self.graphs.is_over(cache):
            return self.graphs.run(hidden, batch, cache, start, stop)
        return self.run_kernels(hidden, batch, cache, start, stop)

    def run_kernels(
        self, hidden: Tensor, batch: RaggedBatch, cache: PagedKVCache | None, start: int, stop: int
    ) -> Tensor:
        """`run`, never from a recording."""
        assert len(hidden) == batch.num_tokens, f"{len(hidden)} hidden states of {batch.num_tokens} tokens"
        assert 0 <= start <= stop <= self.num_layers, f"layers [{start}, {stop}) of {self.num_layers}"
        paged, states = Paged(batch, cache, self.attention), hidden.unsqueeze(0)
        for index, layer in enumerate(list(self.decoder.layers)[start:stop], start):
            states = self._through(layer, index, states, paged)
        return states[0]

    def run_layer(
        self,
        layer: nn.Module,
        place: int,
        hidden: Float[Tensor, "tokens hidden"],
        batch: RaggedBatch,
        cache: PagedKVCache | None,
    ) -> Float[Tensor, "tokens hidden"]:
        """One layer that is not among the model's own (a head), with the rotary embedding of the model's layer `place`.

        It reads and writes the layer of the cache that its own `layer_idx` names.
        """
        assert len(hidden) == batch.num_tokens, f"{len(hidden)} hidden states of {batch.num_tokens} tokens"
        return self._through(layer, place, hidden.unsqueeze(0), Paged(batch, cache, self.attention)).squeeze(0)

    def _through(self, layer: nn.Module, place: int, states: Tensor, paged: Paged) -> Tensor:
        rotary = self._rotary(states, paged.batch, place)
        if isinstance(layer, FastLayer):
            assert rotary is not None, "fast layers have rotary attention"
            return layer.forward(states, rotary, paged)
        positions = paged.batch.positions.unsqueeze(0)
        return layer(states, attention_mask=None, position_ids=positions, position_embeddings=rotary, paged=paged)

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """Next-token logits from the residual stream after the last layer (or an earlier one: an early exit)."""
        return self.unembed(self.final(hidden))

    def unembed(self, final: Float[Tensor, "rows embed"]) -> Float[Tensor, "rows vocab"]:
        """Next-token logits from what `final` gives."""
        return self.soft_capped(self.head(final))

    def final(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows embed"]:
        """What the unembedding multiplies: the residual stream after the final norm, and OPT's projection."""
        if self.norm is not None:
            hidden = self.norm(hidden)
        project_out = getattr(self.decoder, "project_out", None)
        return hidden if project_out is None else project_out(hidden)

    def unembedding(self, token_ids: Int[Tensor, "draft"]) -> Float[Tensor, "draft embed"]:
        """A copy of the unembedding's rows of some tokens; no supported family has a bias here.

        A fast model, which may hold them packed, unpacks all of them for it: call it once.
        """
        weight = self.head.unpacked() if isinstance(self.head, FastLinear) else self.head.weight
        return weight[token_ids]

    def trimmed_unembedding(self, token_ids: Int[Tensor, "some"], fast: bool) -> Callable[[Tensor], Tensor]:
        """`unembed` of some tokens only: [rows, embed] -> [rows, some]. fast: packed, for inference only.

        Their rows are gathered here, once, unless they are being trained.
        """
        if any(parameter.requires_grad for parameter in self.head.parameters()):  # rows gathered once would fall behind
            return lambda final: self.soft_capped(F.linear(final, self.unembedding(token_ids)))
        rows = self.unembedding(token_ids)
        linear = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(rows, requires_grad=False)
        some = FastLinear([linear]) if fast else linear
        return lambda final: self.soft_capped(some(final))

    def soft_capped(self, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
        """What logits are after the model's cap, if it has one (Gemma)."""
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def forward(self, batch: RaggedBatch, cache: PagedKVCache | None = None) -> Float[Tensor, "tokens vocab"]:
        """Logits after every new token: embed, all layers, logits."""
        return self.logits(self.run(self.embed(batch), batch, cache, 0, self.num_layers))

    def _rotary(self, states: Tensor, batch: RaggedBatch, layer: int) -> tuple[Tensor, Tensor] | None:
        if not self.rotary_kinds:
            return None
        kind = self.rotary_kinds[layer]
        if kind not in batch.rotary:
            arguments = (kind,) if kind else ()
            batch.rotary[kind] = self.decoder.rotary_emb(states, batch.positions.unsqueeze(0), *arguments)
        return batch.rotary[kind]


def _rotary_kinds(decoder: Any) -> list[str]:
    """Of each layer the kind of its rotary embedding, "" where all have one; empty without (OPT)."""
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is None:
        return []
    return list(decoder.config.layer_types) if hasattr(rotary, "layer_types") else [""] * len(decoder.layers)


def _eos_token_ids(hf_model: PreTrainedModel) -> frozenset[int]:
    """The ids that end a text, as transformers' generate takes them."""
    generation = getattr(hf_model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    ids = hf_model.config.get_text_config().eos_token_id if ids is None else ids
    return frozenset([ids] if isinstance(ids, int) else ids or ())
