"""What a step asks of the device, and when: once, of what decides. The device is played by tensors that tell on those
who look into them."""

from __future__ import annotations

import random
from typing import ClassVar

import numpy as np
import pytest
import torch
from heads import random_exits
from speclight.infer import engine, readout
from speclight.infer.auto import AutoDrafter
from speclight.infer.cost_model import Calibration, CostModel
from speclight.infer.draft_model import DraftModelDrafter
from speclight.infer.drafter import Drafter, Observation, likely_on_paths
from speclight.infer.early_exit import EarlyExitDrafter
from speclight.infer.engine import Engine
from speclight.infer.hierarchical import HierarchicalDrafter
from speclight.infer.logitspec import LogitSpecDrafter
from speclight.infer.prompt_lookup import PromptLookupDrafter
from speclight.infer.readout import Proposal, drawn, read_out
from speclight.infer.request import GenerationParams
from speclight.modules import sampling
from speclight.modules.acceptance import Dense, Drawn, OneHot, Verdict, next_draws
from speclight.modules.layered_model import LayeredModel
from speclight.modules.sampling import LogitsPipeline, SamplingParams, make_generator
from speclight.modules.token_tree import TokenTree
from speclight.modules.transfer import Fetch, to_device
from support import FAMILIES, hf_tiny, tiny_lm

LOOKS = {
    "__bool__",
    "__contains__",
    "__float__",
    "__index__",
    "__int__",
    "cpu",
    "equal",
    "item",
    "masked_select",
    "nonzero",
    "numpy",
    "tolist",
    "unique",
}
"""Functions of a tensor that make a host wait for a device."""


class Far(torch.Tensor):
    """A tensor on a device that is far away, and all that is made of it: `looks` are the times the host waited."""

    looks: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        by_list = name == "__getitem__" and isinstance(args[1], list)  # which first becomes a tensor
        if name in LOOKS or by_list:
            cls.looks.append(name)
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
            return result.as_subclass(torch.Tensor) if name == "cpu" else result
        return super().__torch_function__(func, types, args, kwargs)


def far(model):
    """A model whose every hidden state is far away, and so all that comes of them."""
    embed = model.embed
    model.embed = lambda batch: embed(batch).as_subclass(Far)
    return model


@pytest.fixture
def apart(monkeypatch):
    """The host believes that all tensors are on a device of their own."""
    for module in (engine, readout, sampling):
        monkeypatch.setattr(module, "is_apart", lambda device: True)


PASSES = CostModel(Calibration((1, 64), (1e-3, 2e-3), (1e-4, 2e-4)))
DRAFTERS = {
    "ar": Drafter,
    "prompt-lookup": PromptLookupDrafter,
    "logitspec": lambda: LogitSpecDrafter(k=8),
    "paper": lambda: LogitSpecDrafter(k=8, tree="paper"),
    "auto": lambda: AutoDrafter(LogitSpecDrafter(k=8), cost=PASSES),
    "early-exit": lambda: EarlyExitDrafter(1, num_tokens=3),
    "head": lambda: EarlyExitDrafter(1, num_tokens=3, exits=random_exits("block", (1,))),
    "hispec": lambda: HierarchicalDrafter(EarlyExitDrafter(1, num_tokens=2), 2, window=3),
    "hispec+logitspec": lambda: HierarchicalDrafter(LogitSpecDrafter(k=8, tree="paper"), 2, window=3, inner_tokens=4),
    "draft-model": lambda: DraftModelDrafter(far(tiny_lm(seed=1, num_hidden_layers=1)), num_tokens=3, num_blocks=64),
}
CHAINS = ("early-exit", "head", "hispec", "hispec+logitspec", "draft-model")
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 9, 9], [3, 4, 3, 4, 3]]
SETTINGS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 3},
    "flat": {"temperature": 1.5, "top_k": 50, "seed": 8},
}


def engine_for(name, **settings):
    drafter = DRAFTERS[name]()
    return Engine(far(tiny_lm()), None, [drafter], drafter.name, num_blocks=64, strict=True, **settings)


def params_of(kind, **more):
    return GenerationParams(**{"max_new_tokens": 20, "ignore_eos": True} | SETTINGS[kind] | more)


def looks_by_step(engine, params, passes=lambda: 0):
    """Per step (looks into the device, passes over the model, texts that it decided about)."""
    for prompt in PROMPTS:
        engine.add(prompt, params)
    found = []
    while engine.has_work:
        Far.looks.clear()
        before, texts = passes(), sum(s.num_pending <= 1 for s in engine.scheduler.running)
        engine.step()
        found.append((len(Far.looks), passes() - before, texts))
    return found


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("name", [name for name in DRAFTERS if name not in CHAINS])
def test_a_step_asks_the_device_once(apart, name, kind):
    found = looks_by_step(engine_for(name), params_of(kind))
    assert len(found) > 5
    assert {looks for looks, _, _ in found} == {1}


def test_reading_a_prompt_in_parts_asks_nothing_before_its_end(apart):
    engine = engine_for("ar", max_batch_tokens=16)
    engine.add([7] * 40, params_of("greedy"))
    Far.looks.clear()
    engine.step()
    engine.step()
    assert not Far.looks
    engine.step()
    assert Far.looks == ["cpu"]


@pytest.mark.parametrize("name", CHAINS)
def test_chains_ask_once_a_pass(apart, name, monkeypatch):
    """What is drafted must be known to be run. A rejection asks for what is left of the target, twice, and HiSpec's
    later for the probability of what was drawn from that."""
    calls = []
    for kind in ("greedy", "flat"):
        engine = engine_for(name)
        for model in {engine.model, getattr(engine.drafters[engine.default_method], "model", engine.model)}:
            embed = model.embed
            monkeypatch.setattr(model, "embed", lambda batch, embed=embed: calls.append(1) or embed(batch))
        found = looks_by_step(engine, params_of(kind), lambda: len(calls))
        for looks, passes, _ in found:
            rejections = 0 if kind == "greedy" else len(PROMPTS) * (passes if "hispec" in name else 1)
            assert looks <= passes + (3 if "hispec" in name else 2) * rejections, found
        assert sum(passes for _, passes, _ in found) > 2 * len(found) > 10


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_are_the_same_whether_the_device_is_apart_or_not(name, kind, request):
    params = params_of(kind)
    near = [done.token_ids for done in engine_for(name).generate(PROMPTS, params)]
    request.getfixturevalue("apart")
    assert [done.token_ids for done in engine_for(name).generate(PROMPTS, params)] == near


# -- a device without data ------------------------------------------------------------------------------------------


@pytest.fixture
def answers(monkeypatch):
    """What a device would answer that has no data: plausible tokens and probabilities, in the shapes asked for."""
    ids = random.Random(0)

    def answer(asked):
        made = [0.5 if asked.dtype.is_floating_point else ids.choice([5, 6, 7]) for _ in range(asked.numel())]
        return np.array(made).reshape(tuple(asked.shape)).tolist()

    def take(fetch):
        return [answer(one) for one in fetch._tensors]

    monkeypatch.setattr(Fetch, "take", take)


def run_without_data(model, drafter, kind):
    engine = Engine(model, None, [drafter], drafter.name, num_blocks=64, strict=True)
    done = engine.generate(PROMPTS, params_of(kind))
    assert [(len(one.token_ids), one.error) for one in done] == [(20, None)] * len(PROMPTS)


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("name", ["ar", "prompt-lookup", "logitspec", "paper", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_runs_on_a_device_whose_values_cannot_be_looked_at(answers, family, name, kind):
    """On torch's device "meta" whatever asks for a value raises, and so does most of what mixes it with the host's."""
    run_without_data(LayeredModel(hf_tiny(family).to("meta")), DRAFTERS[name](), kind)


@pytest.mark.parametrize("name", ["early-exit", "hispec", "hispec+logitspec", "draft-model"])
def test_greedy_chains_run_on_a_device_whose_values_cannot_be_looked_at(answers, name):
    drafter = DRAFTERS[name]()
    if name == "draft-model":
        draft = LayeredModel(hf_tiny(seed=1, num_hidden_layers=1).to("meta"))
        drafter = DraftModelDrafter(draft, num_tokens=3, num_blocks=64)
    run_without_data(LayeredModel(hf_tiny().to("meta")), drafter, "greedy")


# -- what is read ---------------------------------------------------------------------------------------------------

VOCAB = 50


def pipeline(**settings):
    return LogitsPipeline(SamplingParams(**settings), num_prompt=1)


def logits(rows, seed=0):
    return 3.0 * torch.randn(rows, VOCAB, generator=make_generator(seed), dtype=torch.float64)


@pytest.mark.parametrize("settings", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 9, "min_p": 0.01}])
def test_what_is_read_of_a_tree_is_what_its_pipeline_says(apart, settings):
    tree, rows = TokenTree([1, 2, 3, 4], [-1, 0, 0, 1]), logits(4)
    one, generator = pipeline(**settings), make_generator(5)
    (known,) = read_out(rows, [Proposal(tree, one, generator)])
    draws = next_draws(generator, 3)
    for node, depth in enumerate(tree.depths):
        read, alone = known.distributions[node], one(rows[node], [0])
        assert torch.equal(read.dense(), alone.dense())
        assert read.draw == draws[depth]
        at = make_generator(5)
        for _ in range(depth):
            torch.rand((), generator=at, dtype=torch.float64)
        again = at.clone_state()
        assert read.sample(at) == alone.sample(again) == read.token_id
        assert read.prob(read.token_id) == alone.prob(read.token_id)


def test_a_generator_that_gives_another_number_is_followed():
    probs = torch.tensor([0.5, 0.5])
    read = Drawn(probs, token_id=0, draw=0.25, known_id=0, mass=0.5)
    found = {read.sample(make_generator(seed)) for seed in range(20)}
    assert found == {0, 1}
    assert [read.sample(make_generator(seed)) for seed in range(20)] == [
        Dense(probs).sample(make_generator(seed)) for seed in range(20)
    ]


def test_of_a_chain_that_was_drawn_the_drafted_tokens_probability_is_read(apart):
    tree = TokenTree.chain([1, 7, VOCAB + 3], [Dense(torch.ones(VOCAB) / VOCAB)] * 2, "draft", None)
    rows = logits(3).as_subclass(Far)
    (known,) = read_out(rows, [Proposal(tree, pipeline(temperature=1.0), make_generator(0))])
    Far.looks.clear()
    alone = torch.softmax(logits(3), dim=-1)
    assert known.distributions[0].prob(7) == alone[0, 7].item()
    assert known.distributions[1].prob(VOCAB + 3) == 0.0  # an id of a larger vocabulary
    assert known.distributions[2].token_id == known.distributions[2].known_id
    assert not Far.looks


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}])
@pytest.mark.parametrize("broken", [torch.nan, -torch.inf, torch.inf])
def test_a_row_without_a_distribution_is_left_to_its_pipeline(apart, settings, broken):
    rows = logits(3)
    rows[1] = broken
    one = pipeline(**settings)
    made = drawn([one] * 3, rows, [make_generator(seed) for seed in range(3)])
    raises = not (settings == {} and broken == torch.inf)
    assert [found is None for found in made] == [False, raises, False]
    if raises:
        with pytest.raises(ValueError, match=r"logits|tokens"):
            one(rows[1], [0])


def test_pipelines_that_need_the_prefix_or_the_probabilities_are_not_read(apart):
    generators = [make_generator(seed) for seed in range(3)]
    needy = [pipeline(repetition_penalty=1.5), LogitsPipeline(SamplingParams(), 1, keep_probs=True), pipeline()]
    assert drawn(needy, logits(3), generators) == [None, None, OneHot(int(logits(3)[2].argmax()), VOCAB)]


def test_pipelines_of_different_kinds_are_read_together_and_kept_apart(apart):
    kinds = [{}, {"temperature": 1.0}, {"temperature": 2.0}, {}, {"temperature": 1.0}]
    made = drawn([pipeline(**kind) for kind in kinds], logits(5), [make_generator(seed) for seed in range(5)])
    for row, (kind, found) in enumerate(zip(kinds, made, strict=True)):
        assert torch.equal(found.dense(), pipeline(**kind)(logits(5)[row], [0]).dense())


def test_many_rows_are_read_in_parts(apart, monkeypatch):
    monkeypatch.setattr(sampling, "FAR_AT_ONCE", 2 * VOCAB)
    generators = [make_generator(seed) for seed in range(7)]
    made = drawn([pipeline(temperature=1.0)] * 7, logits(7), generators)
    alone = [pipeline(temperature=1.0)(row, [0]).sample(g) for row, g in zip(logits(7), generators, strict=True)]
    assert [found.token_id for found in made] == alone


def test_drafters_are_shown_the_likeliest_tokens_of_their_own_texts(apart):
    trees = [TokenTree([1, 2], [-1, 0]), TokenTree.root(3), TokenTree.root(4), TokenTree([5, 6, 7], [-1, 0, 0])]
    counts = [3, 0, 5, 3]
    proposals = [
        Proposal(tree, pipeline(), make_generator(0), count) for tree, count in zip(trees, counts, strict=True)
    ]
    known, best = read_out(logits(7), proposals), logits(7).argsort(dim=-1, descending=True)
    assert [None if one.likely is None else len(one.likely) for one in known] == [2, None, 1, 3]
    for one, first, count in ((known[0], 0, 3), (known[2], 3, 5), (known[3], 4, 3)):
        for row, (ids, logprobs) in enumerate(one.likely, start=first):
            assert ids == best[row, :count].tolist()
            assert logprobs == pytest.approx(torch.log_softmax(logits(7)[row, ids], dim=0).tolist())


@pytest.mark.parametrize("count", [0, 4, 2 * VOCAB])
def test_what_was_not_read_with_the_pass_is_read_when_it_is_asked_for(apart, count):
    tree, rows = TokenTree([1, 2, 3], [-1, 0, 0]), logits(3)
    (known,) = read_out(rows, [Proposal(tree, pipeline(), make_generator(0), count)])
    verdict = Verdict([0, 2], 9, corrected=False)
    seen = [Observation(None, tree, verdict, rows, None, likely) for likely in (known.likely, None)]
    read, asked = likely_on_paths(seen[:1], count), likely_on_paths(seen[1:], count)
    assert read == asked == likely_on_paths(seen, count)[:1]
    assert [len(ids) for ids, _ in read[0]] == [min(count, VOCAB)] * 2
    assert likely_on_paths(seen[:1], 2)[0][1][0] == rows[2].topk(2).indices.tolist()  # fewer than were read


def test_a_transfer_gives_back_what_was_put_in():
    parts = [
        torch.tensor([[2**40 + 1, -3], [0, 7]]),
        torch.tensor([0.1, -torch.inf, 3e38], dtype=torch.float32),
        torch.zeros(2, 0),
        torch.tensor([1.5], dtype=torch.bfloat16),
    ]
    for is_far in (False, True):
        fetch = Fetch(is_far)
        assert [fetch.add(part) for part in parts] == [0, 1, 2, 3]
        assert fetch.take() == [part.tolist() for part in parts]
        assert Fetch(is_far).take() == []


def test_what_is_sent_has_its_dtype():
    assert to_device([1, 2], "cpu").dtype == torch.int64
    assert to_device((torch.arange(3) > 1).numpy(), "cpu").tolist() == [False, False, True]
    assert to_device([], "cpu").dtype == torch.int64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has nothing to wait for")
@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("name", ["ar", "prompt-lookup", "logitspec", "paper", "auto"])
def test_on_a_gpu_nothing_but_the_transfer_waits(name, kind, monkeypatch):
    model, drafter = tiny_lm().cuda(), DRAFTERS[name]()
    engine = Engine(model, None, [drafter], drafter.name, num_blocks=64, strict=True)
    engine.generate(PROMPTS, params_of(kind))
    take, calls = Fetch.take, []

    def allowed(fetch):
        torch.cuda.set_sync_debug_mode("default")
        calls.append(1)
        try:
            return take(fetch)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(Fetch, "take", allowed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.generate(PROMPTS, params_of(kind))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(calls) > 5
