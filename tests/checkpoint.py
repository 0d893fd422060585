"""Tiny checkpoints on disk, with a tokenizer: what a user would point --model at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from support import hf_tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCAB = 96
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}a:"
LETTERS = [chr(code) for code in range(33, 125)]  # printable characters but the last two
TOKENS = ["<s>", "</s>", *LETTERS, "Ġ", "ab"]
MERGES = [("a", "b")]


def tiny_tokenizer(
    chat: bool = True, tokens: list[str] = TOKENS, merges: list[tuple[str, str]] = MERGES
) -> PreTrainedTokenizerFast:
    """Byte-level, one token per printable ASCII character, and "ab"."""
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    return tokenizer


def save_tiny(
    folder: Path,
    family: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    chat: bool = True,
    **overrides: Any,
) -> Path:
    """A whole checkpoint: configuration, safetensors, tokenizer."""
    hf_tiny(family, seed, dtype, **overrides).save_pretrained(folder)
    tiny_tokenizer(chat).save_pretrained(folder)
    return folder


def save_gguf(path: Path, seed: int = 0) -> Path:
    """The tiny Llama as an unquantised GGUF file."""
    model = hf_tiny("llama", seed, torch.float32)
    config, weights = model.config, model.state_dict()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (VOCAB - 2))
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # GGUF keeps rotary pairs side by side
            halves = tensor.view(-1, 2, config.head_dim // 2, config.hidden_size)
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), tensor.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
