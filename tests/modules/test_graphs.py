"""Recorded passes: what a recording reads and writes is what the pass itself would, for every shape it stands for.

A CUDA graph is a list of kernels on fixed addresses. `Tape` is that on any device: it keeps every operator of one call
with the tensors that it was given, and runs them again without a line of python between. What asks the device for a
value cannot be recorded, here as there.
"""

from __future__ import annotations

import logging
import random

import pytest
import torch
from heads import random_exits
from speclight.infer import Engine, GenerationParams, LogitSpecDrafter
from speclight.infer.draft_model import DraftModelDrafter
from speclight.infer.early_exit import EarlyExitDrafter
from speclight.infer.hierarchical import HierarchicalDrafter
from speclight.modules.batch import BatchItem, RaggedBatch
from speclight.modules.flex_attention import flex_paged_attention
from speclight.modules.graphs import MOST_RECORDINGS, SEEN_BEFORE, SIZES, Graphs, shape_of
from speclight.modules.layered_model import LayeredModel
from support import hf_tiny, tiny_lm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NUM_BLOCKS, BLOCK = 160, 16


class Tape(TorchDispatchMode):
    """Keeps operators and their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if str(function).split(".")[1] in ("item", "is_nonzero", "_local_scalar_dense", "nonzero"):
            raise RuntimeError("a recorded function asked for a value")
        output = function(*arguments, **(named or {}))
        self.operations.append((function, arguments, named or {}, output))
        return output

    def run(self) -> None:
        for function, arguments, named, output in self.operations:
            given = {_address(one) for one in tree_leaves((arguments, named)) if isinstance(one, torch.Tensor)}
            again = function(*arguments, **named)
            for old, new in zip(tree_leaves(output), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and _address(old) not in given:
                    old.copy_(new)


def _address(tensor: torch.Tensor) -> int:
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


def record_on_tape(function):
    function()  # as on a GPU, where libraries set themselves up first: nothing that it leaves may be in the recording
    tape = Tape()
    with tape:
        output = function()

    def replay():
        tape.run()
        return output

    return replay


def items(draw: random.Random, sequences: int, tokens: int) -> list[BatchItem]:
    """Texts whose longest proposal is of so many tokens: chains and trees, behind contexts of their own."""
    blocks = draw.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    found = []
    for index in range(sequences):
        new = tokens if index == 0 else draw.randint(1, tokens)
        context = draw.choice([0, 1, 15, 16, 40])
        parents = None if draw.random() < 0.5 else [-1, *(draw.randrange(node) for node in range(1, new))]
        own = [blocks.pop() for _ in range(-(-(context + new) // BLOCK))]
        found.append(BatchItem([draw.randrange(96) for _ in range(new)], context, own, parents))
    return found


def filled(model: LayeredModel):
    cache = model.new_cache(NUM_BLOCKS, BLOCK)
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(3), dtype=cache.data.dtype))
    return cache


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "mistral", "opt"])
@pytest.mark.parametrize("fast", [True, False])
@torch.inference_mode()
def test_a_recording_gives_what_the_pass_gives_and_leaves_the_same_in_the_cache(family, fast):
    """Batches of one shape, over and over, with other texts, contexts and trees each time. Fails for a key that is not
    masked, a padded token that writes elsewhere, or anything that stays as it was when it was recorded."""
    model = tiny_lm(family, fast=fast)
    caches = filled(model), filled(model)
    model.record_passes(caches[0], record_on_tape)
    draw, used = random.Random(family), 0
    for sequences, tokens in [(1, 1), (1, 7), (3, 1), (5, 4), (8, 2)]:
        for _ in range(SEEN_BEFORE + 4):
            batch = items(draw, sequences, tokens)
            outputs = []
            for cache in caches:
                built = RaggedBatch.build(batch, BLOCK)
                hidden = model.embed(built)
                for start, stop in ((0, 3), (3, 4)):
                    used += cache is caches[0] and shape_of(built, start, stop) in model.graphs.recordings
                    hidden = model.run(hidden, built, cache, start, stop)
                outputs.append(hidden)
            torch.testing.assert_close(*outputs, atol=1e-11, rtol=1e-11)
    assert used > 12
    torch.testing.assert_close(caches[0].data, caches[1].data, atol=1e-11, rtol=1e-11)


PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 3, [2, 7, 1, 8, 2, 8], [1], [6, 6, 6, 6]]


def drafters(name: str):
    exits = random_exits("block", (1, 3))
    if name == "draft-model":
        return [DraftModelDrafter(tiny_lm(seed=1), num_blocks=100)]
    if name == "hispec":
        return [HierarchicalDrafter(EarlyExitDrafter(1, exits=exits), 3, exits=exits)]
    return [LogitSpecDrafter(k=8, capacity=9)] if name == "logitspec" else []


@pytest.mark.parametrize("name", ["ar", "logitspec", "hispec", "draft-model"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_those_without_recordings(name, temperature):
    params = GenerationParams(max_new_tokens=40, temperature=temperature, seed=4)
    texts = []
    for recorded in (False, True):
        model, own = tiny_lm(), drafters(name)
        engine = Engine(model, drafters=own, default_method=own[0].name if own else "ar", num_blocks=200, strict=True)
        if recorded:
            model.record_passes(engine.cache, record_on_tape)
            for drafter in own:
                drafter.attach(model, engine.cache)
        texts.append([done.token_ids for done in engine.generate([*PROMPTS, *PROMPTS[:1]], params)])
    assert texts[0] == texts[1]
    assert len(model.graphs.recordings) >= 1 + (name == "hispec") and model.graphs.is_on
    if name == "draft-model":
        assert own[0].model.graphs.recordings


def test_passes_that_would_be_mostly_padding_and_long_ones_are_left():
    one, long = BatchItem([1], 3, [0]), BatchItem([1] * 60, 0, range(4))
    for batch in ([long, one, one], [one] * (SIZES[-1] + 1), [BatchItem([1] * 65, 0, range(5))]):
        assert shape_of(RaggedBatch.build(batch, BLOCK), 0, 4) is None
    shape = shape_of(RaggedBatch.build([BatchItem([1] * 5, 140, range(10)), BatchItem([1] * 4, 3, [12])], BLOCK), 1, 3)
    assert shape == (2, 6, 256, 1, 3)


@pytest.mark.parametrize("fault", ["raises", "differs", "asks", "stale"])
def test_a_recording_that_fails_or_differs_turns_recording_off_and_changes_no_text(fault, caplog):
    def record(function):
        if fault == "raises":
            raise RuntimeError("out of memory")
        if fault == "differs":
            return lambda: function() + 1.0
        if fault == "stale":  # nothing was recorded: it ran at once
            output = function()
            return lambda: output
        return record_on_tape(lambda: function() * float(function().sum() > 0))

    params = GenerationParams(max_new_tokens=20)
    plain = Engine(tiny_lm(), num_blocks=100).generate(PROMPTS, params)
    model = tiny_lm()
    engine = Engine(model, num_blocks=100, strict=True)
    model.record_passes(engine.cache, record)
    with caplog.at_level(logging.WARNING):
        done = engine.generate(PROMPTS, params)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert not model.graphs.is_on and not model.graphs.recordings
    assert caplog.text.count("cuda graphs are off") == 1


@torch.inference_mode()
def test_recordings_are_bounded_and_the_least_used_goes(monkeypatch):
    monkeypatch.setattr("speclight.modules.graphs.MOST_RECORDINGS", 3)
    model = tiny_lm()
    cache = model.new_cache(NUM_BLOCKS, BLOCK)
    model.record_passes(cache, record_on_tape)
    for tokens in (1, 2, 3, 1, 4):
        for _ in range(SEEN_BEFORE + 1):
            batch = RaggedBatch.build([BatchItem([5] * tokens, 0, [0])], BLOCK)
            model.run(model.embed(batch), batch, cache, 0, 4)
    assert [shape.tokens for shape in model.graphs.recordings] == [3, 1, 4] and MOST_RECORDINGS > 3
    for _ in range(SEEN_BEFORE):  # what has gone is recorded again only when it is common again
        batch = RaggedBatch.build([BatchItem([5] * 2, 0, [0])], BLOCK)
        model.run(model.embed(batch), batch, cache, 0, 4)
    assert [shape.tokens for shape in model.graphs.recordings] == [3, 1, 4]


def test_other_caches_and_passes_with_gradients_are_not_recorded():
    model = tiny_lm(fast=False).requires_grad_(False)
    cache, other = model.new_cache(8, BLOCK), model.new_cache(8, BLOCK)
    model.record_passes(cache, record_on_tape)
    for one, mode in ((other, torch.inference_mode()), (cache, torch.no_grad()), (cache, torch.enable_grad())):
        for _ in range(SEEN_BEFORE + 2):
            batch = RaggedBatch.build([BatchItem([5], 0, [0])], BLOCK)
            with mode:
                model.run(model.embed(batch), batch, one, 0, 4)
    assert not model.graphs.recordings


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the engine would have its graphs")
def test_without_a_gpu_an_engine_refuses_graphs():
    with pytest.raises(ValueError, match="CUDA device, this one is on cpu"):
        Engine(tiny_lm(), num_blocks=10, cuda_graphs=True)


def test_attention_that_cannot_be_recorded_is_refused():
    model = LayeredModel(hf_tiny(), attention=flex_paged_attention)
    with pytest.raises(ValueError, match="reference attention"):
        model.record_passes(model.new_cache(4, BLOCK), record_on_tape)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are CUDA's")
@pytest.mark.parametrize("name", ["ar", "logitspec", "hispec", "draft-model"])
def test_on_a_gpu_texts_are_those_without_graphs(name):
    params, texts = GenerationParams(max_new_tokens=60), []
    for recorded in (False, True):
        model, own = LayeredModel(hf_tiny().cuda()), drafters(name) if name in ("ar", "logitspec") else []
        if name == "draft-model":
            own = [DraftModelDrafter(LayeredModel(hf_tiny(seed=1).cuda()), num_blocks=100)]
        if name == "hispec":
            own = [HierarchicalDrafter(EarlyExitDrafter(1), 3)]
        method = own[0].name if own else "ar"
        engine = Engine(model, drafters=own, default_method=method, num_blocks=200, cuda_graphs=recorded, strict=True)
        texts.append([done.token_ids for done in engine.generate(PROMPTS, params)])
    assert texts[0] == texts[1]
    assert isinstance(model.graphs, Graphs) and model.graphs.is_on and model.graphs.recordings
