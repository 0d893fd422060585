"""Exit heads borrow the model's own norm and unembedding, learn alone, and are the same after export."""

from __future__ import annotations

import pytest
import torch
from speclight.modules.batch import BatchItem, RaggedBatch
from speclight.modules.bundle import HeadBundle, fingerprint
from speclight.modules.exit_heads import KINDS, ExitHeads, default_layers
from speclight.modules.kv_cache import CacheTable
from speclight.modules.layered_model import LayeredModel
from support import FAMILIES, TableLM, random_table, tiny_lm

TEXTS = [[3, 17, 42, 8, 91, 5, 5, 60, 2, 33], [9, 9, 1]]
SOME = torch.tensor([90, 3, 17, 42, 5, 0, 60])
# float32 rounding of two orders of summation; in bfloat16 a few roundings of logits of up to 10
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.25}


def residual(model: LayeredModel, layer: int) -> tuple[RaggedBatch, torch.Tensor]:
    """The texts' residual stream after `layer` layers."""
    batch = RaggedBatch.build([BatchItem(ids) for ids in TEXTS], None)
    with torch.no_grad():
        return batch, model.run(model.embed(batch), batch, None, 0, layer)


def trained(heads: ExitHeads, seed: int = 1) -> ExitHeads:
    """Heads whose weights are no longer the initial ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return heads.eval()  # OPT has dropout


def frozen(family: str = "llama", **settings) -> LayeredModel:
    return tiny_lm(family, fast=False, **settings).requires_grad_(False).eval()


def table_of(cache, length: int) -> CacheTable:
    table = CacheTable()
    assert cache.reserve(table, length)
    return table


# --- what a head is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "expected"), [(32, (4, 8)), (30, (4, 8)), (80, (10, 20)), (48, (6, 12)), (4, (1, 2)), (2, (1, 2))]
)
def test_default_exits_lie_at_an_eighth_and_a_quarter_apart_from_each_other(num_layers, expected):
    assert default_layers(num_layers) == expected


@pytest.mark.parametrize("fast", [False, True], ids=["transformers", "fast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_untrained_adapter_equals_the_models_own_early_exit_exactly(family, fast):
    """Fails if the adapter is not zero at the start, or if norm, projection or soft cap are not the model's."""
    model = tiny_lm(family, fast=fast)
    adapters, norms = (ExitHeads(model, kind=kind, rank=8).bind(model, fast) for kind in ("adapter", "norm"))
    for layer in (1, 2):
        _, hidden = residual(model, layer)
        with torch.no_grad():
            expected = model.logits(hidden)
            assert torch.equal(norms.logits(layer, hidden), expected)
            assert torch.equal(adapters.logits(layer, hidden), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exit_at_the_last_layer_is_the_model_itself(family):
    model = tiny_lm(family)
    batch, hidden = residual(model, model.num_layers)
    with torch.no_grad():
        logits = ExitHeads(model, [2, model.num_layers], "norm").bind(model).logits(model.num_layers, hidden)
        assert torch.equal(logits, model(batch))


@pytest.mark.parametrize("layer", [1, 2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_is_a_layer_of_the_model_that_adds_nothing_yet(family, layer):
    """Fails if the window, rotary embedding or weights are not those of its place, the last unless it is named."""
    model = frozen(family)
    batch, hidden = residual(model, layer)
    for named, place in ((None, model.num_layers - 1), (layer - 1, layer - 1)):
        heads = ExitHeads(model, [layer], "block", block_layer=named).eval()
        with torch.no_grad():
            assert torch.equal(heads.bind(model).logits(layer, hidden, batch), model.logits(hidden))
            heads.heads[str(layer)].layer.load_state_dict(model.decoder.layers[place].state_dict())
            expected = model.logits(model.run(hidden, batch, None, place, place + 1))
            assert torch.equal(heads.bind(model).logits(layer, hidden, batch), expected)


@pytest.mark.parametrize("fast", [False, True], ids=["transformers", "fast"])
@pytest.mark.parametrize("kind", ["adapter", "block"])
def test_a_head_reads_the_stream_through_its_affine_map(kind, fast):
    """The map alone decides the logits: twice the state and one more is what the rest of the head then gets."""
    model = tiny_lm(fast=fast) if kind == "adapter" else frozen()
    batch, hidden = residual(model, 2)
    plain, mapped = (trained(ExitHeads(model, [2], kind, rank=4, translated=on)) for on in (False, True))
    translation = mapped.translation(2)
    assert translation is not None and plain.translation(2) is None
    with torch.no_grad():
        mapped.load_state_dict(plain.state_dict(), strict=False)
        torch.nn.init.eye_(translation.weight).mul_(2.0)
        torch.nn.init.ones_(translation.bias)
        expected = plain.bind(model).logits(2, 2.0 * hidden + 1.0, batch)
        got = mapped.bind(model, fast and kind == "adapter").logits(2, hidden, batch)
    torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("fast", [False, True], ids=["transformers", "fast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_decode_through_layers_of_the_targets_cache_behind_its_own(family, fast):
    """Chunks through the cache equal one pass; fails if keys land in another layer or in other slots."""
    model = frozen(family)
    heads = trained(ExitHeads(model, [1, 2, 3], ["block", "block", "norm"]))
    exits = heads.bind(model, fast, cache_layer=model.num_layers)
    batch, hidden = residual(model, 2)
    cache = model.new_cache(num_blocks=8, block_size=4, extra_layers=len(heads.context_layers))
    assert len(cache.data) == model.num_layers + 2
    tables, rows = [table_of(cache, len(ids)) for ids in TEXTS], [[], []]
    parts = hidden.split([len(ids) for ids in TEXTS])
    with torch.no_grad():
        expected = heads.bind(model).logits(2, hidden, batch).split([len(ids) for ids in TEXTS])
        for start, stop in ((0, 2), (2, 3), (3, 10)):
            present = [i for i, ids in enumerate(TEXTS) if start < len(ids)]
            items = [BatchItem(TEXTS[i][start:stop], start, tables[i].blocks) for i in present]
            chunk = torch.cat([parts[i][start:stop] for i in present])
            logits = exits.logits(2, chunk, RaggedBatch.build(items, 4), cache)
            for i, got in zip(present, logits.split([len(item.token_ids) for item in items]), strict=True):
                rows[i].append(got)
    for got, wanted in zip(rows, expected, strict=True):
        torch.testing.assert_close(torch.cat(got), wanted, atol=1e-6, rtol=1e-6)
    used = [bool(layer.any()) for layer in cache.data]
    assert used == [False] * (model.num_layers + 1) + [True], "the second head's layer is the last"


def test_only_blocks_read_context():
    model = frozen()
    heads = ExitHeads(model, [1, 2, 3], ["norm", "adapter", "block"], rank=4)
    assert [heads.reads_context(layer) for layer in (1, 2, 3)] == [False, False, True]
    assert heads.context_layers == (3,)


def test_a_block_that_was_not_given_layers_of_a_cache_refuses_one():
    """It would write where the model's first layer does."""
    model = frozen()
    cache = model.new_cache(2, extra_layers=1)
    batch, hidden = residual(model, 2)
    with pytest.raises(ValueError, match="cache_layer must be given to bind"):
        ExitHeads(model, [2], "block").bind(model).logits(2, hidden, batch, cache)


def test_heads_without_parameters_work_on_any_layered_model():
    """A test double has no weights at all; fails if exits reach around LayeredModel's interface."""
    model = TableLM(random_table(12))
    batch = RaggedBatch.build([BatchItem([3, 4, 5])], None)
    hidden = model.run(model.embed(batch), batch, None, 0, 1)
    assert torch.equal(ExitHeads(model, [1], "norm").bind(model).logits(1, hidden), model.table[[3, 4, 5]])


# --- training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trim", [None, SOME], ids=["full", "trimmed"])
@pytest.mark.parametrize("kind", ["adapter", "block"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_reach_every_weight_of_the_heads_and_nothing_else(family, kind, trim):
    model = frozen(family)
    heads = trained(ExitHeads(model, kind=kind, rank=8, draft_ids=trim))
    exits = heads.bind(model)
    for layer in heads.layers:
        batch, hidden = residual(model, layer)
        exits.logits(layer, hidden, batch).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in heads.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_adapters_can_be_trained_over_a_fast_frozen_model():
    """The backbone is most of the work, so its fast form serves training too."""
    fast, slow = tiny_lm(fast=True, dtype=torch.float32), frozen(dtype=torch.float32)
    gradients = []
    for model in (fast, slow):
        torch.manual_seed(0)
        heads = trained(ExitHeads(model, [2], rank=8, draft_ids=SOME))
        heads.bind(model).logits(2, residual(slow, 2)[1]).logsumexp(-1).sum().backward()
        gradients.append([parameter.grad for parameter in heads.parameters()])
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)  # float32, two orders of summation


def test_rows_of_an_unembedding_that_is_trained_do_not_fall_behind():
    """When the model itself is trained to exit early, gradients and new weights go through the trimmed vocabulary."""
    model = tiny_lm(fast=False, tie_word_embeddings=False)
    exits = ExitHeads(model, [2], "norm", draft_ids=SOME).bind(model)
    _, hidden = residual(model, 2)
    exits.logits(2, hidden).sum().backward()
    touched = model.head.weight.grad.abs().sum(1).nonzero().flatten()
    assert touched.tolist() == SOME.sort().values.tolist()
    with torch.no_grad():
        model.head.weight.mul_(2.0)
        torch.testing.assert_close(exits.logits(2, hidden), model.logits(hidden)[:, exits.heads.draft_ids])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_backbone_is_registered_or_saved(kind):
    model = frozen()
    heads = ExitHeads(model, kind=kind, rank=8, draft_ids=SOME)
    heads.bind(model)
    own = {parameter.data_ptr() for parameter in heads.parameters()}
    assert own.isdisjoint(parameter.data_ptr() for parameter in model.parameters())
    assert all(name.startswith("heads.") or name == "draft_ids" for name in heads.state_dict())
    assert len(heads.state_dict()) == 1 + {"norm": 0, "adapter": 2 * 6, "block": 2 * 11}[kind]


def test_heads_of_a_bfloat16_model_are_trained_in_float32():
    model = frozen(dtype=torch.bfloat16)
    heads = trained(ExitHeads(model, [2], rank=8))
    assert {parameter.dtype for parameter in heads.parameters()} == {torch.float32}
    logits = heads.bind(model).logits(2, residual(model, 2)[1])
    assert logits.dtype == torch.bfloat16
    logits.float().logsumexp(-1).sum().backward()
    assert {parameter.grad.dtype for parameter in heads.parameters()} == {torch.float32}


# --- draft vocabulary ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("fast", [False, True], ids=["transformers", "fast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_trimmed_logits_are_those_columns_of_the_full_ones(family, fast, dtype):
    """Fails if rows are gathered wrongly from packed weights, or if OPT's projection or Gemma's cap is left out."""
    settings = {"word_embed_proj_dim": 24} if family == "opt" else {}
    model = tiny_lm(family, dtype=dtype, fast=fast, **settings)
    _, hidden = residual(model, 2)
    exits = ExitHeads(model, [2], "norm", draft_ids=SOME).bind(model, fast)
    with torch.no_grad():
        trimmed, full = exits.logits(2, hidden), model.logits(hidden)
    assert exits.heads.draft_ids.tolist() == sorted(SOME.tolist()) and trimmed.shape[1] == len(SOME)
    torch.testing.assert_close(trimmed, full[:, sorted(SOME.tolist())], atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tied", [False, True])
def test_a_fast_model_gives_its_unembedding_back_exactly(dtype, tied):
    slow, fast = (tiny_lm(dtype=dtype, fast=fast, tie_word_embeddings=tied) for fast in (False, True))
    assert torch.equal(fast.unembedding(SOME), slow.head.weight[SOME])
    assert fast.unembedding(SOME).dtype == dtype


def test_scattered_logits_give_other_tokens_no_probability():
    model = tiny_lm()
    exits = ExitHeads(model, [2], "norm", draft_ids=SOME).bind(model)
    with torch.no_grad():
        logits = exits.logits(2, residual(model, 2)[1])
    q, inside = torch.softmax(exits.heads.scatter(logits), -1), exits.heads.draft_ids
    assert q.shape[1] == model.vocab_size and bool((q.sum(-1) - 1 < 1e-12).all())
    torch.testing.assert_close(q[:, inside], torch.softmax(logits, -1), atol=1e-12, rtol=0)
    assert bool((q.index_fill(1, inside, 0.0) == 0.0).all())
    assert torch.equal(exits.heads.scatter(q[:, inside], fill=0.0), q)


# --- inference ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["adapter", "block"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_heads_equal_the_trained_ones(family, kind, dtype):
    """The fast path over a fast model against the slow one over a slow model, with the same trained weights."""
    slow, fast = frozen(family, dtype=dtype), tiny_lm(family, dtype=dtype)
    heads = trained(ExitHeads(slow, [2], kind, rank=8, draft_ids=SOME))
    batch, hidden = residual(slow, 2)
    with torch.no_grad():
        expected = heads.bind(slow).logits(2, hidden, batch)
        batch.rotary.clear()
        got = heads.bind(fast, fast=True).logits(2, hidden, batch)
    assert got.dtype == dtype
    scale = max(1.0, float(expected.abs().max()) / 10)
    torch.testing.assert_close(got, expected, atol=max(TOLERANCE[dtype], 1e-6) * scale, rtol=0)


@pytest.mark.parametrize("kind", ["adapter", "block"])
def test_packing_leaves_the_heads_as_they_were(kind):
    """Validation decodes with packed copies in the middle of training."""
    model = frozen()
    heads = trained(ExitHeads(model, [2], kind, rank=8))
    before = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    exits = heads.bind(model, fast=True)
    assert exits.heads is not heads and not list(filter(lambda p: p.requires_grad, exits.heads.parameters()))
    assert all(parameter.requires_grad for parameter in heads.parameters())
    assert before.keys() == heads.state_dict().keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in heads.state_dict().items())


# --- export -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [False, True], ids=["transformers", "fast"])
@pytest.mark.parametrize("kind", [*KINDS, ("adapter", "block")], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3", "opt"])
def test_reloaded_heads_give_the_very_logits_of_those_in_memory(family, kind, fast, tmp_path):
    """Pruned vocabulary of 40 of 96, tied embeddings, rotary settings that are not the default: what other exports
    lose. The folder is all that is handed over, beside the base model."""
    settings: dict = {"tie_word_embeddings": True}
    if family == "llama":
        settings["rope_parameters"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    model = frozen(family, dtype=torch.float32, **settings)
    ids = torch.randperm(96, generator=torch.Generator().manual_seed(3))[:40]
    heads = trained(ExitHeads(model, kind=kind, rank=8, draft_ids=ids))
    heads.to_bundle(fingerprint(model), "tiny").save(tmp_path / "bundle")

    again = frozen(family, dtype=torch.float32, **settings)
    bundle = HeadBundle.load(tmp_path / "bundle", fingerprint(again))
    serving = tiny_lm(family, dtype=torch.float32, **settings) if fast else again
    reloaded = ExitHeads.from_bundle(bundle, serving)
    assert (reloaded.layers, reloaded.kinds, reloaded.config()) == (heads.layers, heads.kinds, heads.config())
    for layer in heads.layers:
        batch, hidden = residual(model, layer)
        with torch.no_grad():
            expected = heads.bind(serving, fast).logits(layer, hidden, batch)
            assert expected.shape[1] == 40
            assert torch.equal(reloaded.bind(serving, fast).logits(layer, hidden, batch), expected)


def test_a_bundle_in_bfloat16_takes_half_the_space_and_holds_the_rounded_weights():
    model = frozen(dtype=torch.float32)
    heads = trained(ExitHeads(model, rank=8, draft_ids=SOME))
    bundle = heads.to_bundle("0" * 64, dtype=torch.bfloat16)
    reloaded = ExitHeads.from_bundle(bundle, model)
    for name, tensor in heads.named_parameters():
        assert bundle.tensors[name].dtype == torch.bfloat16
        assert torch.equal(reloaded.state_dict()[name], tensor.bfloat16().float())
    assert torch.equal(reloaded.draft_ids, heads.draft_ids)


def test_training_goes_on_from_a_bundle():
    model = frozen()
    heads = ExitHeads.from_bundle(ExitHeads(model, rank=8).to_bundle("0" * 64), model)
    heads.bind(model).logits(2, residual(model, 2)[1]).sum().backward()
    assert heads.heads["2"].down.weight.grad is not None


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": []}, r"layers must be ascending numbers from 1 to 4"),
        ({"layers": [0, 2]}, r"layers.*got \[0, 2\]"),
        ({"layers": [2, 5]}, r"layers.*got \[2, 5\]"),
        ({"layers": [2, 1]}, r"layers.*got \[2, 1\]"),
        ({"layers": [2, 2]}, r"layers.*got \[2, 2\]"),
        ({"kind": "mlp"}, r"kind must be one of norm, adapter, block.*'mlp'"),
        ({"kind": ["norm"]}, r"kind.*each of 2 exits"),
        ({"rank": 0}, r"rank must be at least 1, got 0"),
        ({"block_layer": 4}, r"block_layer must be from 0 to 3, got 4"),
        ({"draft_ids": torch.tensor([3, 3])}, r"draft_ids.*below 96.*2 ids, 1 of them different"),
        ({"draft_ids": torch.tensor([3, 96])}, r"draft_ids.*from 3 to 96"),
        ({"draft_ids": torch.tensor([-1, 3])}, r"draft_ids.*from -1 to 3"),
        ({"draft_ids": torch.tensor([], dtype=torch.long)}, r"draft_ids.*0 ids"),
    ],
    ids=str,
)
def test_arguments_that_make_no_heads_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        ExitHeads(tiny_lm(), **settings)


def test_an_exit_without_a_head_is_refused():
    model = tiny_lm()
    with pytest.raises(ValueError, match=r"one with a head \(1, 2\), got 3"):
        ExitHeads(model, kind="norm").bind(model).logits(3, residual(model, 3)[1])


def test_a_block_without_its_batch_is_refused():
    model = frozen()
    with pytest.raises(ValueError, match="batch must be given"):
        ExitHeads(model, [1], "block").bind(model).logits(1, residual(model, 1)[1])


def test_a_model_of_another_shape_is_refused():
    model = tiny_lm()
    heads = ExitHeads(model, [1, 4], "norm")
    for settings in ({"hidden_size": 48}, {"vocab_size": 64}, {"num_hidden_layers": 2}):
        with pytest.raises(ValueError, match="do not fit a model"):
            heads.bind(tiny_lm(**settings))
    with pytest.raises(ValueError, match=r"hidden_size 32, this model has 48"):
        ExitHeads.from_bundle(heads.to_bundle("0" * 64), tiny_lm(hidden_size=48))


def test_weights_that_were_never_loaded_are_refused():
    """A block cannot start from a fast model's packed weights; it must not run with what its class initialises."""
    model = tiny_lm()
    with pytest.raises(ValueError, match=r"NaN.*never loaded"):
        ExitHeads(model, [1], "block").bind(model)


def test_a_bundle_of_something_else_is_refused():
    bundle = HeadBundle("ensemble-head", {}, {}, "0" * 64)
    with pytest.raises(ValueError, match=r"'ensemble-head'.*'exit-heads'"):
        ExitHeads.from_bundle(bundle, tiny_lm())
