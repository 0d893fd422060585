"""From what a user asks for to token ids, and what of it can be refused without weights: all but a drafter's wishes."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from .request import GenerationParams, Prompt

MAX_DRAFT_TOKENS = 1024
"""Largest proposal a request may ask for: room for all of it is reserved, at the cost of younger requests."""


@dataclass(frozen=True)
class Intake:
    """Reads prompts and checks requests for one model.

    tokenizer: None takes token ids only. vocab_size: of the model. max_length: of a text, prompt included.
    """

    tokenizer: Any
    vocab_size: int
    max_length: int

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text, ids, or chat messages. Raises ValueError when it is empty or too long."""
        if isinstance(prompt, str):
            token_ids = self._encode_text(prompt)
        elif isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], dict):
            token_ids = self._encode_messages(prompt)
        else:
            token_ids = _as_ids(prompt)
        if not token_ids:
            raise ValueError("prompt must hold at least one token, got none")
        self._check_ids("prompt", token_ids)
        if len(token_ids) > self.max_length:
            raise ValueError(f"prompt has {len(token_ids)} tokens; the longest text here is {self.max_length}")
        return token_ids

    def check(self, params: GenerationParams) -> None:
        """Raise ValueError, naming the field, for what this model can never run."""
        if params.stop:
            self._need_tokenizer("stop")
        for name in ("draft_tokens", "window", "inner_draft_tokens"):
            if (getattr(params, name) or 0) > MAX_DRAFT_TOKENS:
                raise ValueError(f"{name} must be at most {MAX_DRAFT_TOKENS}, got {getattr(params, name)}")
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", params.logit_bias)

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        wrong = next((token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"{name}: token ids must be in [0, {self.vocab_size}), got {wrong}")

    def _need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and this engine has none; pass token ids")
        return self.tokenizer

    def _encode_text(self, text: str) -> list[int]:
        tokenizer = self._need_tokenizer("a text prompt")
        try:
            return list(tokenizer(text).input_ids)
        except (TypeError, UnicodeError) as error:  # half a surrogate pair, which JSON can hold
            raise ValueError(f"prompt cannot be tokenised ({error}): {text!r:.80}") from error

    def _encode_messages(self, messages: SequenceOf[dict[str, str]]) -> list[int]:
        tokenizer = self._need_tokenizer("a list of messages")
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "messages need a chat template and this tokenizer has none; set --chat-template or use prompt"
            )
        try:
            encoded = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
        except Exception as error:  # a template raises what it likes
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return list(encoded["input_ids"])


def _as_ids(prompt: Any) -> list[int]:
    """Token ids from a list, tuple or array of integers. Raises ValueError for anything else."""
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(values, list | tuple) or any(isinstance(v, bool) or not isinstance(v, Integral) for v in values):
        raise ValueError(f"prompt must be a text, token ids or messages, got {prompt!r:.80}")
    return [int(value) for value in values]


def paired(prompts: Any, params: Any) -> list[tuple[Prompt, GenerationParams | None]]:
    """Each prompt with its parameters, of one prompt or many, and of parameters for all or one for each."""
    each = [prompts] if _is_single(prompts) else list(prompts)
    if params is None or isinstance(params, GenerationParams):
        return [(prompt, params) for prompt in each]
    if not isinstance(params, list | tuple):
        raise ValueError(f"params must be GenerationParams, or a list with one for each prompt, got {params!r}")
    if len(params) != len(each):
        raise ValueError(f"params must be one or as many as prompts ({len(each)}), got {len(params)}")
    return list(zip(each, params, strict=True))


def _is_single(prompts: Any) -> bool:
    """Whether this is one prompt (a text, ids, messages) rather than a list of them."""
    if isinstance(prompts, str) or getattr(prompts, "ndim", None) == 1:
        return True
    if not isinstance(prompts, list | tuple) and not hasattr(prompts, "ndim"):
        raise ValueError(f"prompts must be a prompt or a list of them, got {prompts!r:.80}")
    return bool(len(prompts)) and isinstance(prompts[0], Integral | dict)
