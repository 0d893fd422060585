"""Tiny models built on the spot: no network, no files."""

from __future__ import annotations

import torch
import transformers
from speclight.modules.layered_model import LayeredModel

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
ROTARY = {"num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", ROTARY),
    "mistral": ("Mistral", ROTARY | {"sliding_window": 5}),
    "qwen2": ("Qwen2", ROTARY | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen3": ("Qwen3", ROTARY),
    "gemma2": ("Gemma2", ROTARY | {"sliding_window": 5, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3Text", ROTARY | {"sliding_window": 5, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2}),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
}


def hf_tiny(family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: object):
    """A randomly initialised transformers model of the family, eager attention, in eval mode."""
    name, specific = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(
        **(SHAPE | specific | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0} | overrides)
    )
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model_class = {"Gemma3Text": "Gemma3"}.get(name, name) + "ForCausalLM"
    model = getattr(transformers, model_class)(config).to(dtype).eval()
    with torch.no_grad():  # larger than the usual init, so that logits differ and attention matters
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return model


def tiny_lm(family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float64, fast: bool = True, **overrides):
    """TinyLM: 4 layers, vocabulary 96, hidden 32, fixed seed."""
    return LayeredModel(hf_tiny(family, seed, dtype, **overrides), fast=fast)
