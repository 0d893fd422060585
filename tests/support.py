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


class TableLM(LayeredModel):
    """A model whose next-token logits are looked up by the last `order` (1 or 2) tokens: every probability is known.

    It goes through the paged cache like any other: a token's key holds its id and position, and the token before it is
    found by reading the keys that the batch's plan lets it see, so a wrong slot, mask or position gives a wrong answer.
    """

    def __init__(self, table: torch.Tensor, num_layers: int = 2, max_positions: int = 512, eos: tuple[int, ...] = ()):
        torch.nn.Module.__init__(self)
        self.table = table  # [vocab, vocab] or [vocab, vocab, vocab]: logits after (token) or (token before, token)
        self.layers_run, self._num_layers, self._max_positions = 0, num_layers, max_positions
        self.eos_token_ids = frozenset(eos)

    num_layers = property(lambda self: self._num_layers)
    vocab_size = property(lambda self: self.table.shape[-1])
    hidden_size = property(lambda self: 3)
    max_positions = property(lambda self: self._max_positions)
    num_kv_heads = property(lambda self: 1)
    head_dim = property(lambda self: 2)
    device = property(lambda self: self.table.device)
    dtype = property(lambda self: torch.float64)

    def embed(self, batch):
        return torch.stack((batch.token_ids.double(), batch.positions.double(), -batch.positions.double()), dim=1)

    def run(self, hidden, batch, cache, start, stop):
        for layer in range(start, stop):
            keys = hidden[:, None, :2]
            if cache is not None:
                keys, _ = cache.layer(layer)
                keys.index_copy_(0, batch.slot_mapping, hidden[:, None, :2])
            hidden = torch.cat((hidden[:, :2], _token_before(hidden, batch, keys)[:, None]), dim=1)
        return hidden

    def final(self, hidden):
        return hidden

    def unembed(self, final):
        return self.exit(self.table)(final)

    @staticmethod
    def exit(table):
        """An exit head that looks another table up; hidden is (token, position, token before)."""

        def logits(hidden):
            token, before = hidden[:, 0].long(), hidden[:, 2].long()
            return table[token] if table.ndim == 2 else table[before, token]

        return logits


def _token_before(hidden, batch, keys):
    """[tokens] id of the visible token one position earlier; 0 for a text's first token."""
    before = torch.zeros(hidden.shape[0], dtype=torch.float64)
    for group in batch.groups:
        order = group.query_index if group.query_index is not None else torch.arange(hidden.shape[0])
        real = group.output_index if group.output_index is not None else torch.arange(len(order))
        rows = order[real]
        seen = group.visible.reshape(-1, group.num_keys)[real]
        read = keys[group.key_slots, 0].view(group.num_seqs, 1, group.num_keys, -1)
        ids, positions = read.expand(-1, group.num_queries, -1, -1).flatten(0, 1)[real].unbind(-1)
        _assert_each_position_is_seen_once(positions, seen, hidden[rows, 1])
        hit = seen & (positions == hidden[rows, 1, None] - 1)
        before[rows] = torch.where(hit, ids, 0.0).sum(1)
    return before


def _assert_each_position_is_seen_once(positions, seen, own):
    """positions, seen: [rows, keys]; own: [rows] position of the reading token, the last that it sees."""
    assert torch.equal(seen.sum(1), own.long() + 1), "a token must see each position once"
    ordered = torch.where(seen, positions, torch.inf).sort(1).values
    wanted = torch.arange(ordered.shape[1], dtype=torch.float64).expand_as(ordered)
    wanted = torch.where(wanted <= own[:, None], wanted, torch.inf)
    assert torch.equal(ordered, wanted), "a token must see each position once"


def random_table(vocab: int, seed: int = 0, order: int = 1, scale: float = 1.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((vocab,) * (order + 1), generator=generator, dtype=torch.float64) * scale
