"""Every swapped module equals the transformers module it replaces."""

from __future__ import annotations

import copy

import pytest
import torch
from speclight.modules.batch import BatchItem, RaggedBatch
from speclight.modules.fast import FastAttention, FastLayer, FastLinear, FastMLP, FastNorm, fast_layer
from support import FAMILIES, hf_tiny, tiny_lm

# float32 rounding of the two orders of summation; in bfloat16 two roundings of values of this size
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.06}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 16, 65])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_one_packed_product_equals_the_separate_ones(dtype, rows, bias):
    """Packed weights are laid out for 16 rows and must be right for any number."""
    torch.manual_seed(0)
    parts = [torch.nn.Linear(24, width, bias=bias, dtype=dtype) for width in (8, 16)]
    hidden = torch.randn(rows, 24, dtype=dtype)
    expected = torch.cat([part(hidden) for part in parts], dim=-1)
    torch.testing.assert_close(FastLinear(parts)(hidden), expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_s_product_does_not_depend_on_how_many_there_are(dtype):
    """What verifies a draft multiplies more rows than what decodes plainly."""
    torch.manual_seed(0)
    fast, hidden = FastLinear([torch.nn.Linear(1536, 576, dtype=dtype)]), torch.randn(33, 1536, dtype=dtype)
    together = fast(hidden)
    for rows in (1, 2, 3, 9, 32):
        for first in (0, 33 - rows):
            assert torch.equal(fast(hidden[first : first + rows]), together[first : first + rows])
            assert torch.equal(fast(hidden[None, first : first + rows])[0], together[first : first + rows])


@pytest.mark.parametrize("amx", [False, True])
def test_products_are_padded_to_rows_that_take_no_longer(monkeypatch, amx):
    """To three, or in bfloat16 to as many as AMX is used from; what is added never comes back."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    for dtype, rows in ((torch.float32, 3), (torch.bfloat16, 33 if amx else 3)):
        fast = FastLinear([torch.nn.Linear(24, 8, dtype=dtype)])
        assert fast.least_rows == (rows if fast.packed else 0)
        assert [len(fast(torch.randn(count, 24, dtype=dtype))) for count in (1, 3, 33, 40)] == [1, 3, 33, 40]
    assert FastLinear([torch.nn.Linear(24, 8, dtype=torch.float64)]).least_rows == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_passes_of_few_tokens_equal_the_slow_reference(family, dtype):
    """Padded or not, whichever parts are fused."""
    model, slow = tiny_lm(family, dtype=dtype), tiny_lm(family, dtype=dtype, fast=False)
    for tokens in (1, 2, 3):
        batches = [RaggedBatch.build([BatchItem([5, 7, 9][:tokens])], None) for _ in range(2)]
        found, expected = model(batches[0]), slow(batches[1])
        assert found.shape == expected.shape
        scale = float(expected.abs().max())
        tolerance = 2e-4 if dtype == torch.float32 else 0.06
        torch.testing.assert_close(found, expected, atol=tolerance * scale, rtol=0)


def test_parts_that_are_found_quickly_are_those_that_torch_knows():
    """Also after a copy, and after a part was replaced, or taken out."""
    layer = fast_layer(tiny_lm().decoder.layers[0])
    layer.mlp = FastMLP(hf_tiny("llama").model.layers[1].mlp)
    for one in (layer, copy.deepcopy(layer)):
        for module in one.modules():
            assert all(getattr(module, name) is part for name, part in module.named_children())
        assert one.self_attn is one.__dict__["self_attn"] and one.mlp.gate_up in list(one.modules())
    layer.mlp = None
    del layer.self_attn
    assert layer.mlp is None and not hasattr(layer, "self_attn")


def test_a_packed_layer_still_computes_outside_no_grad():
    """A user who forgets inference_mode gets the same numbers, not an error from a private operator."""
    layer = torch.nn.Linear(24, 8)
    fast, hidden = FastLinear([layer]), torch.randn(3, 24)
    with torch.enable_grad():
        torch.testing.assert_close(fast(hidden), layer(hidden), atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "opt"])
def test_mlp_and_norms_equal_transformers(family, dtype):
    """Gemma's norm stores its weight as a distance from one, and its MLP has another activation."""
    layer = hf_tiny(family, dtype=dtype).model.layers[0]
    layer.input_layernorm.weight.add_(0.3)
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    scale = float(layer.mlp(hidden).abs().max())
    tolerance = max(TOLERANCE[dtype], 1e-6)  # their norms compute in float32
    torch.testing.assert_close(FastMLP(layer.mlp)(hidden), layer.mlp(hidden), atol=tolerance * max(scale, 1), rtol=0)
    norm = layer.input_layernorm
    torch.testing.assert_close(FastNorm(norm)(hidden), norm(hidden), atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fast_model_equals_its_slow_reference(family):
    """Whole model, paged cache and tree included, in float64; and the swap has really taken place where it can."""
    slow, fast = tiny_lm(family, fast=False), tiny_lm(family, fast=True)
    swapped = isinstance(fast.decoder.layers[0].self_attn, FastAttention)
    assert swapped == (family != "opt") and not isinstance(slow.decoder.layers[0].self_attn, FastAttention)
    whole = all(isinstance(layer, FastLayer) for layer in fast.decoder.layers)
    assert whole == (family in ("llama", "mistral", "qwen2", "qwen3")), "Gemma's layers have four norms"
    assert not whole or all(fast_layer(layer) is layer for layer in fast.decoder.layers)
    item = BatchItem([5, 7, 9, 11, 3], parents=[-1, 0, 0, 1, 2])
    batches = [RaggedBatch.build([BatchItem([1, 2, 3]), item], None) for _ in range(2)]
    torch.testing.assert_close(fast(batches[0]), slow(batches[1]), atol=1e-6, rtol=1e-6)
