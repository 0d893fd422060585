from __future__ import annotations

import pytest
import torch
from speclight.modules.bundle import HeadBundle
from speclight.modules.ensemble_head import EnsembleHead

DRAFT = {"method": "early-exit", "layer": 1}


@pytest.mark.parametrize("weight", [0.5, 0.9])
@pytest.mark.parametrize(("hidden", "norm"), [(0, True), (0, False), (16, True)])
def test_a_new_head_has_one_weight_everywhere(hidden, norm, weight):
    head = EnsembleHead(5, 7, hidden, norm, weight)
    found = head(torch.randn(9, 5) * 10, torch.randn(9, 7))
    torch.testing.assert_close(found, torch.full((9,), weight))


def test_a_head_learns_in_float32_whatever_autocast_says():
    head = EnsembleHead(4, 4, hidden=8)
    with torch.autocast("cpu", torch.bfloat16):
        found = head(torch.randn(3, 4, dtype=torch.bfloat16), torch.randn(3, 4, dtype=torch.bfloat16))
    found.sum().backward()
    assert found.dtype == torch.float32
    assert head.output.weight.grad is not None and bool(head.output.weight.grad.abs().sum() > 0)


@pytest.mark.parametrize("hidden", [0, 6])
def test_a_bundle_gives_the_same_head_back(hidden, tmp_path):
    head = EnsembleHead(4, 6, hidden, initial_weight=0.7)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    head.to_bundle("abc", DRAFT, "a model", {"note": 1}).save(tmp_path / "head")
    bundle = HeadBundle.load(tmp_path / "head", "abc")
    again = EnsembleHead.from_bundle(bundle)
    draft, target = torch.randn(5, 4), torch.randn(5, 6)
    assert torch.equal(head(draft, target), again(draft, target))
    assert bundle.config["draft"] == DRAFT and not again.training


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draft_size": 0}, "draft_size must be at least 1"),
        ({"hidden": -1}, "hidden must be at least 0"),
        ({"initial_weight": 1.0}, r"initial_weight must be in \(0, 1\)"),
    ],
)
def test_arguments_that_make_no_head_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        EnsembleHead(**({"draft_size": 4, "target_size": 4} | arguments))
