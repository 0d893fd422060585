"""transformers' own generate, run beside our methods in the benchmark: plain, with its prompt lookup, and its batches
that texts join and leave as they come (`generate_batch`).

It needs a model of its own: LayeredModel changes the one it is given.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

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
        device, config = self.model.device, self._config(max_new_tokens)
        output = self.model.generate(ids.to(device), attention_mask=mask.to(device), generation_config=config)
        return [self._until_end(row) for row in output[:, width:].tolist()]

    def _config(self, max_new_tokens: int) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            eos_token_id=self.eos_ids or None,
            pad_token_id=self.pad_id,
            **self.settings,
        )

    def _until_end(self, token_ids: list[int]) -> list[int]:
        """Without the padding behind the end."""
        end = next((at for at, token_id in enumerate(token_ids) if token_id in self.eos_ids), len(token_ids))
        return token_ids[: end + 1]


class ContinuousPeer(TransformersPeer):
    """Continuous batching over a paged cache that is as large as a call's texts need, which on CPUs is fastest: its
    attention there reads all of the cache."""

    PAGE = 32
    MOST_TOKENS = 512

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """New token ids per prompt, an end-of-sequence id included. RuntimeError with the reason of one that failed."""
        settings = ContinuousBatchingConfig(
            page_size=self.PAGE,
            num_blocks=sum(math.ceil((len(prompt) + max_new_tokens + 1) / self.PAGE) for prompt in prompts),
            max_batch_tokens=self.MOST_TOKENS,
            seed=self.seed,
            auto_switch_to_flash=self.model.device.type == "cuda",
        )
        found = self.model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=self._config(max_new_tokens),
            continuous_batching_config=settings,
        )
        failed = next((one.error for one in found.values() if one.error is not None), None)
        if failed is not None or len(found) < len(prompts):
            raise RuntimeError(f"generate_batch answered {len(found)} of {len(prompts)} prompts; error: {failed}")
        return [self._until_end(one.generated_tokens) for one in found.values()]
