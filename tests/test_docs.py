"""What the documentation shows runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from speclight.infer import Engine, GenerationParams
from support import tiny_lm

ROOT = Path(__file__).parent.parent


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_drafter_of_the_docs_page_drafts_and_leaves_the_text_alone():
    source, use = blocks("docs/write-a-drafter.md")[:2]
    assert len([line for line in source.splitlines() if line.strip()]) < 40
    names: dict = {"__name__": "bigram"}
    exec(compile(source, "docs/write-a-drafter.md", "exec"), names)
    names |= {
        "Engine": lambda *a, **k: Engine(*a, num_blocks=100, strict=True, **k),
        "model": tiny_lm(),
        "tokenizer": None,
    }
    exec(compile(use, "docs/write-a-drafter.md", "exec"), names)
    params = GenerationParams(max_new_tokens=60)
    plain = names["engine"].generate([[3, 1, 4]], GenerationParams(max_new_tokens=60, method="ar"))[0]
    for _ in range(2):
        drafted = names["engine"].generate([[3, 1, 4]], params)[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.mat > 2.0 and drafted.stats.draft_failures == 0


@pytest.mark.parametrize("page", ["README.md"])
def test_every_command_that_the_page_shows_is_one(page):
    """Fails when the page names a command or a flag that does not exist."""
    from speclight.infer.cli import COMMANDS

    shell = re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    shown = re.findall(r"^speclight (\w+)", "\n".join(shell), re.MULTILINE)
    assert shown and set(shown) <= set(COMMANDS)
