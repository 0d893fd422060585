"""transformers' own generate, run beside our methods in the benchmark: plain, and with its prompt lookup.

It needs a model of its own: LayeredModel changes the one it is given.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

LOOKUP_TOKENS = 10
"""prompt_lookup_num_tokens, as transformers' documentation uses it."""


class TransformersPeer:
    """Left-padded generate on token ids.

    pad_id: any id; padding is masked. eos_ids: empty goes on to the length cap. lookup: prompt lookup, one prompt at a
    time only. Sampling draws from torch's global generator, seeded at every call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pad_id: int,
        eos_ids: Collection[int],
        lookup: bool = False,
        temperature: float | None = 0.0,
        seed: int | None = None,
    ) -> None:
        model.generation_config = GenerationConfig()  # else the checkpoint's own defaults fill what is not set here
        self.model, self.pad_id, self.eos_ids, self.seed = model, pad_id, sorted(eos_ids), seed
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature != 0.0:
            sampling = {"do_sample": True, "temperature": 1.0 if temperature is None else temperature, "top_k": 0}
        self.settings = sampling | ({"prompt_lookup_num_tokens": LOOKUP_TOKENS} if lookup else {})

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """New token ids per prompt, an end-of-sequence id included."""
        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        if self.seed is not None:
            torch.manual_seed(self.seed)
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            eos_token_id=self.eos_ids or None,
            pad_token_id=self.pad_id,
            **self.settings,
        )
        device = self.model.device
        output = self.model.generate(ids.to(device), attention_mask=mask.to(device), generation_config=config)
        return [self._until_end(row) for row in output[:, width:].tolist()]

    def _until_end(self, token_ids: list[int]) -> list[int]:
        """Without the padding behind the end."""
        end = next((at for at, token_id in enumerate(token_ids) if token_id in self.eos_ids), len(token_ids))
        return token_ids[: end + 1]
