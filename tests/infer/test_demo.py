"""The demo is what newcomers run first."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint import save_tiny
from speclight.infer.cli import main


def test_the_demo_streams_and_benches_and_can_be_seen_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", str(save_tiny(tmp_path / "tiny")), "--output", str(tmp_path / "out"), "--max-new-tokens", "2"]
    for _ in range(2):
        assert main(["demo", *flags]) == 0
        assert "| transformers+prompt-lookup |" in capsys.readouterr().out
    assert (tmp_path / "out" / "bench" / "report.md").is_file()
