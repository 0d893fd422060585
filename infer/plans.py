"""What a method's name comes to under some options: whose drafts, and what they are verified against. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ..modules.bundle import HeadBundle
    from .build import EngineOptions

Rule = Literal["exact", "static", "learned", "lossy", "cascade"]
"""What proposals are verified against, see `target.py`."""

DIVERSED = "diversed"
"""The method whose draft and rule are those of an ensemble head."""

RUN_FURTHER = ("draft-model", "early-exit", DIVERSED)
"""Methods whose draft can be run one token further, for a bonus from the rule's distribution."""

DRAWN = ("draft-model", "early-exit", "hispec", "hispec+logitspec", "hispec+prompt-lookup", DIVERSED)
"""Methods whose drafts are drawn from a distribution, which rules other than the exact one need."""


@dataclass(frozen=True)
class Plan:
    """method: the name that requests know it by. drafter: the method whose drafts it has.

    rule: what they are verified against, as in `--target.rule`. settings: of the drafter, where they are not those of
    its own options.
    """

    method: str
    drafter: str
    rule: Rule
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, method: str, options: EngineOptions, ensemble: HeadBundle | None) -> Plan:
        """ensemble: the head of a learned rule; without one, before it is read, diversed has no drafter yet."""
        if method != DIVERSED:
            return cls(method, method, options.target.rule if method in DRAWN else "exact")
        if ensemble is None:
            return cls(method, method, "learned")
        draft = ensemble.config["draft"]
        settings = {"num_tokens": options.diversed.num_tokens}
        if draft["method"] == "early-exit":
            settings["layer"] = draft["layer"]
        return cls(method, draft["method"], "learned", settings)

    @property
    def reads_exit_layer(self) -> bool:
        """Whether the exit that drafts is that of `--early-exit.layer`; a head for diversed names its own."""
        return self.drafter == "early-exit" and "layer" not in self.settings
