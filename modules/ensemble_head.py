"""How much of the target does a token need? Told from what draft and target know (DIVERSED, arXiv 2604.07622)."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .bundle import HeadBundle

KIND = "ensemble-head"


class EnsembleHead(nn.Module):
    """w = sigmoid(f([norm(h_q); norm(h_p)])), the weight of the target's distribution in the mixture.

    draft_size, target_size: of the hidden states, after the final norms, that predict a token in draft and target.
    hidden: width of one hidden layer; 0: f is linear, as the paper's (2.3: one fully connected layer; two logits of a
        softmax are one of a sigmoid).
    norm: a LayerNorm for each input.
    initial_weight: w of a new head everywhere, in (0, 1).

    Always computed in float32: in bfloat16 an optimiser's small steps are lost. Raises ValueError naming the argument.
    """

    def __init__(
        self, draft_size: int, target_size: int, hidden: int = 0, norm: bool = True, initial_weight: float = 0.5
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("draft_size", draft_size, 1),
            ("target_size", target_size, 1),
            ("hidden", hidden, 0),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not 0.0 < initial_weight < 1.0:
            raise ValueError(f"initial_weight must be in (0, 1), got {initial_weight}")
        self.draft_size, self.target_size, self.hidden, self.norm = draft_size, target_size, hidden, norm
        self.initial_weight = initial_weight
        self.norm_draft = nn.LayerNorm(draft_size) if norm else nn.Identity()
        self.norm_target = nn.LayerNorm(target_size) if norm else nn.Identity()
        size = draft_size + target_size
        self.inner = nn.Sequential(nn.Linear(size, hidden), nn.SiLU()) if hidden else nn.Identity()
        self.output = nn.Linear(hidden or size, 1)
        nn.init.zeros_(self.output.weight)
        nn.init.constant_(self.output.bias, math.log(initial_weight / (1.0 - initial_weight)))

    def forward(
        self, draft: Float[Tensor, "rows draft"], target: Float[Tensor, "rows target"]
    ) -> Float[Tensor, "rows"]:
        """w in (0, 1), float32."""
        with torch.autocast(draft.device.type, enabled=False):
            states = torch.cat((self.norm_draft(draft.float()), self.norm_target(target.float())), dim=-1)
            return torch.sigmoid(self.output(self.inner(states)).squeeze(-1))

    def config(self) -> dict[str, Any]:
        """Constructor arguments."""
        names = ("draft_size", "target_size", "hidden", "norm", "initial_weight")
        return {name: getattr(self, name) for name in names}

    def to_bundle(
        self,
        base_fingerprint: str,
        draft: dict[str, Any],
        base_model: str = "",
        card: dict[str, Any] | None = None,
    ) -> HeadBundle:
        """A copy of the head as it is now. draft: what it was trained to trust, kept beside its own settings."""
        return HeadBundle(
            KIND, self.config() | {"draft": draft}, dict(self.state_dict()), base_fingerprint, base_model, card or {}
        )

    @classmethod
    def from_bundle(cls, bundle: HeadBundle) -> EnsembleHead:
        """The head that a bundle holds, bit for bit, in eval mode. ValueError for another kind of bundle."""
        if bundle.kind != KIND:
            raise ValueError(f"bundle holds {bundle.kind!r}; an ensemble head needs a bundle of kind {KIND!r}")
        arguments = {name: value for name, value in bundle.config.items() if name != "draft"}
        try:
            head = cls(**arguments)
        except TypeError as error:
            raise ValueError(f"bundle's config does not describe an ensemble head: {error}") from error
        bundle.load_into(head)
        return head.requires_grad_(False).eval()
