"""Faster equivalents of transformers' modules, swapped in by type for inference.

transformers' own modules are the reference, and every swap is held to them by tests/modules/test_fast.py. What is
gained: one product for query, key and value and one for gate and up, on CPUs weights packed once for oneDNN (about
twice as fast in float32, a third faster in bfloat16) and kernels for all that lies between products (`fused`), fused
norms and rotary embedding in half the passes elsewhere. Weights are moved, not copied, so memory does not grow; a model
with these modules cannot be trained.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import fused

PACK_ROWS = 16
"""Rows that packed weights are laid out for; within noise of the best layout from 1 to 128 rows."""
FEW_ROWS = 3
"""Rows that a packed product of fewer is padded to, since fewer take longer: a pass of SmolLM2 over 1 / 2 / 3 tokens
takes two cores 23.7 / 25.7 / 23.6 ms in bfloat16, 36 / 40 / 35 in float32. No bit of a row depends on the others, and
with this one float32 row is summed as many are."""
ROWS_FOR_AMX = 33
"""The same in bfloat16 where the processor has AMX, which oneDNN uses from so many rows on: all of SmolLM2's products
take 18.0 ms for 33 rows, 17.6 for 3 and 24 for 32 without it. So up to here a row's bits are always those of one and
the same product."""


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can hold this weight packed: a float32 or bfloat16 matrix on a CPU build that has the operator."""
    available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    supported = weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return available and supported and weight.device.type == "cpu"


def fewest_rows(dtype: torch.dtype) -> int:
    """Rows that packed products of this dtype have at least."""
    return ROWS_FOR_AMX if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else FEW_ROWS


class WithParts(nn.Module):
    """A module whose parts are found as quickly as other attributes: torch looks for them behind all else, which over a
    pass of a small model's layers takes 0.2 ms of 14."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            self.__dict__[name] = value
        elif name in self._modules:  # None
            self.__dict__.pop(name, None)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self.__dict__.pop(name, None)


class FastLinear(nn.Module):
    """One product for several linear layers with the same input; weight: [out_features, in_features]."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        weight = linears[0].weight.detach() if len(linears) == 1 else torch.cat([x.weight.detach() for x in linears])
        biases = [x.bias for x in linears]
        self.bias = None if biases[0] is None else torch.cat([b.detach() for b in biases if b is not None])
        self.packed = can_pack(weight)
        self.least_rows = fewest_rows(weight.dtype) if self.packed else 0
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS) if self.packed else weight

    def forward(self, hidden: Tensor) -> Tensor:
        if self.packed and not torch.is_grad_enabled():
            padded = pad_rows(hidden, self.least_rows)
            product: Tensor = torch.ops.mkldnn._linear_pointwise(padded, self.weight, self.bias, "none", [], "")
            return product if padded is hidden else product[..., : hidden.shape[-2], :]
        return F.linear(hidden, self.unpacked(), self.bias)

    def unpacked(self) -> Tensor:
        """[out_features, in_features]; a copy if the weights are packed."""
        return self.weight.to_dense() if self.packed else self.weight


def pad_rows(hidden: Tensor, rows: int) -> Tensor:
    """[..., tokens, hidden] with at least `rows` tokens: zeros behind its own."""
    missing = rows - hidden.shape[-2]
    return hidden if missing <= 0 else F.pad(hidden, (0, 0, 0, missing))


class FastNorm(nn.Module):
    """RMS norm; Gemma's stores its weight as a distance from one."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        offset = 1.0 if type(norm).__name__.startswith("Gemma") else 0.0
        self.eps = getattr(norm, "variance_epsilon", None) or norm.eps
        self.weight = norm.weight.detach() + offset
        self.wide_weight = self.weight.float()

    def forward(self, hidden: Tensor) -> Tensor:
        if fused.fits(hidden):
            return fused.norm(hidden, self.wide_weight, self.eps)
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


def fast_norm(module: Any) -> Any:
    """The module's fast form if it is an RMS norm that has one; Gemma's 1 + weight needs more than 16 bits."""
    name = type(module).__name__
    if not name.endswith("RMSNorm") or (name.startswith("Gemma") and module.weight.dtype.itemsize < 4):
        return module
    return FastNorm(module)


class FastMLP(WithParts):
    """down(act(gate(x)) * up(x)) with one product for gate and up."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up = FastLinear([mlp.gate_proj, mlp.up_proj])
        self.down = FastLinear([mlp.down_proj])
        self.act, self.gate = mlp.act_fn, fused.gate_of(mlp.act_fn)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.gate is not None and fused.fits(hidden):
            flat = hidden.reshape(-1, hidden.shape[-1])
            return self.by_kernels(flat, len(flat)).view(hidden.shape)
        gate, up = self.gate_up.forward(hidden).chunk(2, dim=-1)
        return self.down.forward(self.act.forward(gate).mul_(up))

    def by_kernels(self, hidden: Tensor, rows: int, paged: Any = None) -> Tensor:
        """Of [rows or more, hidden] the first rows. paged: lends room."""
        gate_up = self.gate_up.forward(hidden)
        shape = max(rows, self.down.least_rows), gate_up.shape[1] // 2
        inner = gate_up.new_zeros(shape) if paged is None else paged.room("inner", *shape, gate_up)
        assert self.gate is not None, "only some activations have a kernel"
        return self.down.forward(fused.gated(gate_up, self.gate, rows, inner))[:rows]


class FastAttention(WithParts):
    """Rotary attention over the paged cache: optional norms on query and key, grouped heads, window, soft cap."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        config, self.layer_index = attention.config, attention.layer_idx
        self.head_dim, self.scaling = attention.head_dim, attention.scaling
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.window = layer_window(attention)
        self.softcap = getattr(attention, "attn_logit_softcapping", None)
        self.qkv = FastLinear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.output = FastLinear([attention.o_proj])
        self.q_norm = fast_norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.k_norm = fast_norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.head_norms: fused.HeadNorms | None = None
        if isinstance(self.q_norm, FastNorm) and isinstance(self.k_norm, FastNorm):
            self.head_norms = fused.HeadNorms(self.q_norm.wide_weight, self.k_norm.wide_weight, self.q_norm.eps)
        self.can_fuse = self.q_norm is None or self.head_norms is not None

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], paged: Any, **_: Any
    ) -> tuple[Tensor, None]:
        if self.can_fuse and fused.fits(hidden_states):
            read = self.by_kernels(hidden_states[0], position_embeddings, paged)
            return read[: hidden_states.shape[1]].unsqueeze(0), None
        heads = self.qkv.forward(hidden_states[0]).view(hidden_states.shape[1], -1, self.head_dim)
        rotated, value = heads.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = rotated.split([self.num_heads, self.num_kv_heads], dim=1)
            rotated = torch.cat((self.q_norm(query), self.k_norm(key)), dim=1)
        query, key = rotate(rotated, *paged.halves(position_embeddings)).split(
            [self.num_heads, self.num_kv_heads], dim=1
        )
        read = paged.attend(self.layer_index, query, key, value, self.scaling, self.window, self.softcap)
        return self.output.forward(read.view(len(read), -1)).unsqueeze(0), None

    def by_kernels(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor], paged: Any) -> Tensor:
        """[tokens or more, hidden], the last ones of no meaning, from the same, by kernels."""
        tokens = paged.batch.num_tokens
        query = paged.room("query", tokens, self.num_heads * self.head_dim, hidden)
        query = query.view(tokens, self.num_heads, self.head_dim)
        keys, values = paged.storage(self.layer_index, hidden, self.num_kv_heads, self.head_dim)
        turn, slots = paged.cos_sin(position_embeddings), paged.batch.slots
        fused.rotate(self.qkv.forward(hidden), turn, slots, query, keys, values, self.head_norms)
        rows = max(tokens, self.output.least_rows)
        read = paged.read(query, keys, values, self.scaling, self.window, self.softcap, rows)
        return self.output.forward(read.view(len(read), -1))


class FastLayer(WithParts):
    """A decoder layer of fast parts, each behind its norm: of Llama's kind (Mistral, Qwen).

    Its parts' `forward` is called as it is: asking ten modules a layer for hooks that nobody set takes 3 % of a small
    model's pass. kind: the class of transformers that it stands for.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.kind = type(layer)
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm

    @staticmethod
    def fits(layer: Any) -> bool:
        parts = {name: type(child) for name, child in layer.named_children()}
        norms = [parts.pop(name, None) for name in ("input_layernorm", "post_attention_layernorm")]
        return norms == [FastNorm, FastNorm] and parts == {"self_attn": FastAttention, "mlp": FastMLP}

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], paged: Any, **_: Any
    ) -> Tensor:
        if self.self_attn.can_fuse and self.mlp.gate is not None and fused.fits(hidden_states):
            return self._by_kernels(hidden_states[0], position_embeddings, paged).unsqueeze(0)
        read, _ = self.self_attn.forward(self.input_layernorm.forward(hidden_states), position_embeddings, paged)
        hidden_states = hidden_states + read
        return hidden_states + self.mlp.forward(self.post_attention_layernorm.forward(hidden_states))

    def _by_kernels(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor], paged: Any) -> Tensor:
        """By kernels, with what is normed in one place that has room for packed products."""
        rows, before, after = len(hidden), self.input_layernorm, self.post_attention_layernorm
        normed = paged.room("normed", max(rows, self.self_attn.qkv.least_rows), hidden.shape[1], hidden)
        fused.norm(hidden, before.wide_weight, before.eps, normed)
        read = self.self_attn.by_kernels(normed, position_embeddings, paged)
        hidden = fused.add_norm(hidden.contiguous(), read, after.wide_weight, after.eps, normed)
        return hidden + self.mlp.by_kernels(normed, rows, paged)


def signed_halves(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """transformers' [1, tokens, head_dim] cos and sin as `rotate` takes them: [tokens, 1, head_dim], sin with signs."""
    half = sin.shape[-1] // 2
    return cos[0].unsqueeze(1), torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1).unsqueeze(1)


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotary position embedding, halves convention, of [tokens, heads, head_dim].

    x cos + rotate_half(x) sin, where rotate_half swaps the halves and negates the first: with that sign put into sin,
    the swap is a roll.
    """
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, dims=-1), signed_sin)


def layer_window(attention: Any) -> int | None:
    """How far back this layer sees, in tokens, itself included; None for everything.

    Families that mix layer types say it per layer; Mistral says it once, in its configuration.
    """
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    return attention.config.sliding_window if attention.config.model_type == "mistral" else None


def fast_layer(layer: Any) -> Any:
    """A decoder layer with the parts that have a fast equivalent replaced in place; the whole one where all have.
    OPT's stays as it is, and so does one that is fast already.
    """
    if isinstance(layer, FastLayer):
        return layer
    attention = layer.self_attn
    if hasattr(attention, "o_proj") and hasattr(attention.config, "num_key_value_heads"):
        layer.self_attn = FastAttention(attention)
    if all(hasattr(getattr(layer, "mlp", None), name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        layer.mlp = FastMLP(layer.mlp)
    for name, child in layer.named_children():
        setattr(layer, name, fast_norm(child))
    return FastLayer(layer) if FastLayer.fits(layer) else layer


def kind_of_layer(layer: nn.Module) -> Any:
    """transformers' class of a decoder layer, fast or not."""
    return layer.kind if isinstance(layer, FastLayer) else type(layer)


def speed_up(layers: nn.ModuleList) -> None:
    """`fast_layer` of all of them, in place."""
    for index, layer in enumerate(layers):
        layers[index] = fast_layer(layer)
