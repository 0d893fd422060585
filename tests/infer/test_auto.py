"""Method auto: its choices against brute force, what useless drafters cost, and that no text depends on it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from checkpoint import save_tiny
from heads import random_exits
from hypothesis import given, settings
from hypothesis import strategies as st
from speclight.infer.adaptive_tree import DEEPER
from speclight.infer.arms import ChainArm, ChainPlan, DraftModelArm, HiSpecArm, Load, arm_of
from speclight.infer.auto import AutoDrafter, _Step, new_trust
from speclight.infer.bench import parse_methods
from speclight.infer.build import (
    EarlyExitOptions,
    EngineOptions,
    HiSpecOptions,
    LogitSpecOptions,
    build_engine,
    drafters_of,
    prepare,
)
from speclight.infer.choice import Acceptance, Patience, best_allocation, longest_wait
from speclight.infer.cli import main
from speclight.infer.cost_model import Calibration, CostModel
from speclight.infer.draft_model import DraftModelDrafter
from speclight.infer.drafter import Drafter, Observation, SomeFailed, TreeDrafter
from speclight.infer.early_exit import EarlyExitDrafter
from speclight.infer.engine import Engine
from speclight.infer.exits import EarlyExits
from speclight.infer.hierarchical import HierarchicalDrafter
from speclight.infer.logitspec import LogitSpecDrafter
from speclight.infer.prompt_lookup import PromptLookupDrafter
from speclight.infer.request import GenerationParams
from speclight.modules.acceptance import OneHot, Verdict
from speclight.modules.token_tree import TokenTree
from support import tiny_lm

NEW_TOKENS, LONG = 24, 300
CHEAP = Calibration((1, 64), (0.040, 0.046), (0.0, 0.0))
"""A GPU's: 64 tokens cost little more than one."""
SMALL = Calibration((1, 64), (0.004, 0.0046), (0.0, 0.0))
"""A tenth of that, for a draft model."""
DEAR = Calibration((1, 2, 64), (0.040, 0.075, 2.0), (0.0, 0.0, 0.0))
"""A CPU's in float32: nearly every token costs what the first does."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# -- the arithmetic ---------------------------------------------------------------------------------------------------


falling = st.lists(st.sampled_from([0.05, 0.3, 0.31, 0.5, 0.9, 0.97]), max_size=4).map(lambda s: sorted(s)[::-1])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(falling, min_size=0, max_size=4),
    st.lists(st.floats(0.01, 3.0), min_size=17, max_size=17),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_the_choice_is_the_best_of_all_allocations(scores, table, others, trust):
    """Of every number of first nodes of every tree, on cost tables of any shape."""
    costs = table
    found = best_allocation(scores, lambda nodes: costs[: nodes + 1], others, trust)

    def rate(kept) -> float:
        gained = sum(sum(tree[:count]) for tree, count in zip(scores, kept, strict=True))
        return (len(scores) + others + trust * gained) / costs[sum(kept)]

    best = max(rate(kept) for kept in product(*(range(len(tree) + 1) for tree in scores)))
    assert found.rate == pytest.approx(best) == pytest.approx(rate(found.kept))


def test_a_dip_behind_a_hill_is_found():
    """Costs need not be convex: four nodes where one or two do not pay."""
    costs = [1.0, 2.0, 2.0, 2.0, 1.1]
    assert best_allocation([[0.5, 0.5, 0.4, 0.4]], lambda nodes: costs[: nodes + 1]).kept == [4]


def test_one_budget_goes_to_whom_it_serves():
    costs = [1.0 + 0.2 * nodes for nodes in range(9)]
    scores = [[0.9, 0.8, 0.7, 0.6], [0.1, 0.05, 0.01, 0.01]]
    assert best_allocation(scores, lambda nodes: costs[: nodes + 1]).kept == [4, 0]


def test_acceptance_learns_each_position_from_where_it_was_decided():
    acceptance = Acceptance(prior=0.5, decay=1.0, weight=1.0)
    for _ in range(200):
        acceptance.record(1, 2)  # the first accepted, the second not
    assert acceptance.accepted(4)[1] == pytest.approx(1.0, abs=0.01)
    assert acceptance.accepted(4)[-1] == pytest.approx(1.0, abs=0.02)
    acceptance.reset()
    assert acceptance.accepted(2) == [0.0, 0.5, 0.75]


def test_nodes_that_cannot_pay_are_not_grown():
    """Where every token costs what the first does, a node must be likely; where tokens are cheap, hardly at all. Among
    three texts it must be three times as likely, for as many tokens are lost while it is run."""
    least = {}
    for real, count in product((CHEAP, DEAR), (1, 3)):
        clock = Clock()
        trees = ScriptedTrees(clock, long_texts(), right=True, seconds=0.0001)
        run(Timed(trees, clock=clock, real=real, cost=CostModel(real)), count, max_new_tokens=8)
        least[real is DEAR, count] = trees.least[0]
    assert 0.0 < least[False, 1] < 0.01 and 0.3 < least[True, 1] < 0.6
    assert least[False, 3] == pytest.approx(3 * least[False, 1], rel=0.1)


def test_trust_follows_what_is_accepted_down_and_up_again():
    trust = new_trust()
    assert trust.value == 1.0
    for _ in range(200):
        trust.record(0.9, 0.0)
    assert trust.value == 0.0
    for _ in range(200):
        trust.record(0.9, 0.9)
    assert trust.value == pytest.approx(1.0, abs=0.02)


def test_patience_doubles_its_waits_to_the_longest_and_ends_when_a_try_pays():
    patience, tries, step = Patience(), [], 0
    while step < 100:
        if patience.is_due(step):
            tries.append(step)
            patience.record(step, -1.0, longest_wait=16)
        step += 1
    assert tries == [0, 2, 5, 10, 19, 36, 53, 70, 87]
    patience.record(step, 50.0, longest_wait=16)
    assert patience.is_due(step + 1) and patience.wait == 8


def test_patience_shrinks_with_the_load_that_made_it_long():
    patience = Patience()
    for step in range(6):
        patience.record(step, -1.0, longest_wait=64, load=16)
    assert patience.wait == 32
    assert not patience.is_due(37, load=16) and patience.is_due(38, load=16)
    assert not patience.is_due(13, load=8) and patience.is_due(14, load=8)  # a quarter of 32
    assert patience.is_due(7, load=2), "two texts need not wait for what sixteen could not pay"
    assert not patience.is_due(37, load=32), "more texts make nothing cheaper"
    patience.record(7, 0.1, longest_wait=64, load=2)
    assert patience.worth == 0.1 and patience.is_due(8, load=2), "what was known of sixteen texts is forgotten"
    assert patience.copy().is_due(0) and patience.copy().wait == patience.wait


def test_waits_are_as_long_as_a_try_is_dear():
    assert longest_wait(0.001, 0.040) == 5
    assert longest_wait(1.0, 0.040) == 64 and longest_wait(0.0, 0.040) == 4


# -- on a model with a clock of its own -------------------------------------------------------------------------------


class ScriptedTrees(TreeDrafter):
    """A chain as a tree, of tokens that the script knows, at a cost on the clock. right: of known texts, or never."""

    name = "scripted-trees"

    def __init__(self, clock: Clock, texts, right: bool, seconds: float = 0.001, score: float = 0.95) -> None:
        self.clock, self.texts, self.right, self.seconds, self.score = clock, texts, right, seconds, score
        self.calls, self.sizes, self.observed, self.resets, self.least = 0, [], 0, 0, []

    def scored(self, sequences, least=0.0):
        self.calls += 1
        self.least.append(least)
        self.clock.now += self.seconds * len(sequences)
        return [self._one(sequence) for sequence in sequences]

    def _one(self, sequence):
        ahead = self.texts[tuple(sequence.token_ids[: sequence.num_prompt])][sequence.num_emitted :]
        ahead = ahead[: min(sequence.draft_tokens - 1, sequence.max_depth)]
        if not self.right:
            ahead = [(token_id + 1) % 96 for token_id in ahead]
        ahead = [one for n, one in enumerate(ahead) if self.score ** (n + 1) >= self.least[-1]]
        self.sizes.append(len(ahead))
        chain = [sequence.token_ids[-1], *ahead]
        return TokenTree(chain, range(-1, len(ahead))), [self.score ** (n + 1) for n in range(len(ahead))]

    def observe(self, observations):
        assert observations, "nothing to learn from"
        self.observed += len(observations)
        self.clock.now += self.seconds * len(observations)

    def reset(self):
        self.resets += 1


class ScriptedChain(Drafter):
    """The same with distributions, certain of themselves."""

    name = "scripted-chain"

    def __init__(self, clock: Clock, texts, right: bool, seconds: float = 0.002) -> None:
        self.clock, self.texts, self.right, self.seconds = clock, texts, right, seconds
        self.calls, self.drafted, self.error = 0, 0, None

    def default_draft_tokens(self):
        return 4

    def propose(self, sequences):
        self.calls += 1
        if self.error is not None:
            raise self.error
        trees = []
        for sequence in sequences:
            ahead = self.texts[tuple(sequence.token_ids[: sequence.num_prompt])][sequence.num_emitted :]
            ahead = ahead[: min(sequence.draft_tokens, sequence.max_depth)]
            ahead = ahead if self.right else [(token_id + 1) % 96 for token_id in ahead]
            self.drafted += len(ahead)
            self.clock.now += self.seconds * len(ahead)
            trees.append(TokenTree.chain([sequence.token_ids[-1], *ahead], [OneHot(one, 96) for one in ahead]))
        return trees


class ScriptedArm(ChainArm):
    def drafting(self, sequences, load):
        return self.drafter.seconds * len(sequences), 0.0


class Timed(AutoDrafter):
    """The engine's time is the real one: here a pass takes what the calibration says, on the fake clock."""

    def __init__(self, *arguments, clock: Clock, real: Calibration, **more) -> None:
        super().__init__(*arguments, clock=clock, **more)
        self.fake, self.real, self.before, self.nodes = clock, CostModel(real), clock.now, []

    def timed(self, seconds, new_tokens, sequences):
        self.fake.now += self.real.seconds(new_tokens, sequences)
        super().timed(self.fake.now - self.before, new_tokens, sequences)
        self.before = self.fake.now
        self.nodes.append(new_tokens - sequences)


PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8]]


@cache
def long_texts() -> dict[tuple[int, ...], list[int]]:
    return plain(tuple(map(tuple, PROMPTS)), GenerationParams(max_new_tokens=LONG))


@cache
def plain(prompts, params) -> dict[tuple[int, ...], list[int]]:
    engine = Engine(tiny_lm(), num_blocks=400)
    return {tuple(done.prompt_ids): done.token_ids for done in engine.generate([list(one) for one in prompts], params)}


def run(drafter: AutoDrafter, count: int = 1, **params):
    engine = Engine(tiny_lm(), drafters=[drafter], default_method="auto", strict=True, num_blocks=400)
    done = engine.generate(PROMPTS[:count], GenerationParams(**({"max_new_tokens": LONG} | params)))
    return engine, done


@pytest.mark.parametrize("real", [CHEAP, DEAR], ids=["cheap", "dear"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_drafter_that_is_always_wrong_falls_to_nothing_and_costs_next_to_nothing(real, count):
    """Three percent of plain decoding, growing, learning and running what is wrong included; and few calls."""
    clock = Clock()
    trees = ScriptedTrees(clock, long_texts(), right=False)
    drafter = Timed(trees, clock=clock, real=real, cost=CostModel(real))
    _, done = run(drafter, count)
    assert all(completion.token_ids == long_texts()[tuple(completion.prompt_ids)] for completion in done)
    steps = done[0].stats.target_passes
    assert steps == LONG
    alone = LONG * CostModel(real).seconds(count, count)
    assert clock.now < 1.03 * alone
    assert trees.calls < 0.3 * steps and trees.observed < 0.3 * steps * count
    assert sum(drafter.nodes[-100:]) == 0


def test_a_drafter_that_is_always_right_grows_to_the_bound():
    clock = Clock()
    trees = ScriptedTrees(clock, long_texts(), right=True)
    drafter = Timed(trees, clock=clock, real=CHEAP, cost=CostModel(CHEAP), bound=32)
    _, done = run(drafter)
    assert done[0].token_ids == long_texts()[tuple(PROMPTS[0])]
    assert max(drafter.nodes) == 31 and done[0].stats.mat > 12
    assert max(trees.sizes) == 31 and trees.sizes[0] <= 8  # it begins small


@pytest.mark.parametrize("bound", [1, 2, 5])
def test_a_request_bounds_what_is_drafted(bound):
    """1 is the root alone; 0 turns drafting off."""
    clock = Clock()
    for size in (0, bound):
        drafter = Timed(ScriptedTrees(clock, long_texts(), True), clock=clock, real=CHEAP, cost=CostModel(CHEAP))
        _, done = run(drafter, draft_tokens=size, max_new_tokens=60)
        assert max(drafter.nodes[1:]) == max(size - 1, 0)
        assert done[0].token_ids == long_texts()[tuple(PROMPTS[0])][:60]


def test_where_tokens_are_dear_only_near_certainties_are_run():
    """In float32 here a second token costs nine tenths of a pass: drafts at 0.95 pay, at 0.8 they do not."""
    nodes = {}
    for score in (0.8, 0.97):
        clock = Clock()
        trees = ScriptedTrees(clock, long_texts(), right=score > 0.9, score=score, seconds=0.0001)
        drafter = Timed(trees, clock=clock, real=DEAR, cost=CostModel(DEAR))
        run(drafter, max_new_tokens=100)
        nodes[score] = sum(drafter.nodes[1:])
    assert nodes[0.8] == 0 < nodes[0.97]


def test_a_cost_model_that_was_wrong_is_corrected():
    """It believes that tokens are nearly free; they are not, so what it runs shrinks to what pays: nothing."""
    clock = Clock()
    trees = ScriptedTrees(clock, long_texts(), right=True, score=0.3, seconds=0.0001)
    sizes = (1, 2, 4, 8, 16, 64)
    steep = Calibration(sizes, tuple(0.03 * n + 0.01 for n in sizes), (0.0,) * 6)
    flat = Calibration(sizes, tuple(0.04 + 0.001 * n for n in sizes), (0.0,) * 6)
    drafter = Timed(trees, clock=clock, real=steep, cost=CostModel(flat))
    run(drafter)
    half = len(drafter.nodes) // 2
    assert sum(drafter.nodes[:half]) > 2 * sum(drafter.nodes[half:])
    assert sum(size > 0 for size in drafter.nodes[half:]) < 0.1 * half


def test_drafts_of_several_texts_cost_what_they_have_cost():
    """Their trees attend in calls of their own: twice the price of as many tokens of one text, or of texts without."""
    clock = Clock()

    class Apart(Timed):
        def timed(self, seconds, new_tokens, sequences):
            if sequences > 1:
                self.fake.now += self.real.seconds(new_tokens, sequences) - self.real.seconds(sequences, sequences)
            super().timed(seconds, new_tokens, sequences)

    trees = ScriptedTrees(clock, long_texts(), right=True, score=0.9, seconds=0.0001)
    drafter = Apart(trees, clock=clock, real=CHEAP, cost=CostModel(CHEAP))
    run(drafter, 3, max_new_tokens=100)
    several, alone = drafter.cost.drafted(4, 3, 3, 60), drafter.cost.drafted(4, 1, 1, 20)
    markup = (several[4] - several[0]) / (drafter.cost.seconds(7, 3, 60) - several[0])
    assert 1.2 < markup < 2.5, "the price of as many tokens learns a part of it"
    assert several[0] == drafter.cost.seconds(3, 3, 60)
    assert alone == [drafter.cost.seconds(1 + nodes, 1, 20) for nodes in range(5)]
    drafter.reset()
    assert drafter.cost.drafted(4, 3, 3, 60) == several, "it is of the device"


def test_chains_are_as_long_as_they_are_accepted_and_useless_ones_are_left():
    lengths = {}
    for right in (True, False):
        clock = Clock()
        chain = ScriptedChain(clock, long_texts(), right)
        drafter = Timed(None, [ScriptedArm(chain)], clock=clock, real=CHEAP, cost=CostModel(CHEAP), bound=6)
        _, done = run(drafter)
        assert done[0].token_ids == long_texts()[tuple(PROMPTS[0])]
        lengths[right] = (max(drafter.nodes), chain.calls, clock.now)
    assert lengths[True][0] == 6 and lengths[True][1] < LONG / 5
    assert lengths[False][1] < 40
    assert lengths[False][2] < 1.03 * LONG * 0.040


def test_between_drafters_the_faster_one_is_chosen():
    """A dear one that is right, a cheap one that is right, and one that is wrong."""
    clock, texts = Clock(), long_texts()
    dear, cheap, wrong = (
        ScriptedChain(clock, texts, right, seconds) for right, seconds in [(True, 0.03), (True, 0.001), (False, 0.001)]
    )
    arms = [ScriptedArm(one) for one in (dear, wrong, cheap)]
    trees = ScriptedTrees(clock, texts, right=False)
    drafter = Timed(trees, arms, clock=clock, real=CHEAP, cost=CostModel(CHEAP))
    _, done = run(drafter)
    assert done[0].token_ids == texts[tuple(PROMPTS[0])]
    assert cheap.drafted > 0.7 * LONG > 5 * (dear.drafted + wrong.drafted)
    assert 0 < trees.observed <= done[0].stats.target_passes


def test_a_drafter_that_fails_costs_the_step_and_is_left():
    for error in (RuntimeError("no memory"), None):
        clock = Clock()
        chain = ScriptedChain(clock, long_texts(), True)
        chain.error = error or SomeFailed([RuntimeError("no memory")])
        drafter = Timed(None, [ScriptedArm(chain)], clock=clock, real=CHEAP, cost=CostModel(CHEAP))
        engine = Engine(tiny_lm(), drafters=[drafter], default_method="auto", num_blocks=400)
        (done,) = engine.generate(PROMPTS[0], GenerationParams(max_new_tokens=200))
        assert done.token_ids == long_texts()[tuple(PROMPTS[0])][:200]
        assert 0 < done.stats.draft_failures == chain.calls < 30


class ReadingTrees(ScriptedTrees):
    """Wants every row of a prompt."""

    prompt_vocab = 48

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.read_positions = 0

    def unread(self, sequence, start, stop):
        return range(start, stop)

    def read(self, sequence, positions, rows):
        assert rows.logits.shape == (len(positions), 48)
        self.read_positions += len(positions)
        self.clock.now += 20e-6 * len(positions)


@pytest.mark.parametrize(
    ("count", "new_tokens", "is_read"),
    [(1, 100, True), (1, 4, False), (1, 16, True), (3, 12, False), (3, 100, True)],
)
def test_a_prompt_is_read_where_its_trees_gain_more_by_it_than_that_takes(count, new_tokens, is_read):
    """A row costs half of an unembedding of 2 ms: of the four, and what is learned from them, 4 ms. What they gain is
    1 % of the text's time, of which three texts share a step: 0.4 ms a token, or 0.15."""
    clock = Clock()
    real = Calibration((1, 64), (0.040, 0.046), (0.002, 0.128))
    trees = ReadingTrees(clock, long_texts(), True)
    run(Timed(trees, clock=clock, real=real, cost=CostModel(real)), count, max_new_tokens=new_tokens)
    before_roots = sum(len(one) - 1 for one in PROMPTS[:count])
    assert trees.read_positions == (before_roots if is_read else 0)


@pytest.mark.parametrize("chunk", [2, 7, 512])
def test_whether_a_prompt_is_read_does_not_depend_on_its_chunks(chunk):
    """Nearly all rows that trees want lie at its end: judged chunk by chunk those would be refused."""

    class AtTheEnd(ReadingTrees):
        def unread(self, sequence, start, stop):
            return [place for place in range(start, stop) if place >= 12]

    clock = Clock()
    prompt = [1 + n % 7 for n in range(20)]
    texts = plain((tuple(prompt),), GenerationParams(max_new_tokens=40))
    real = Calibration((1, 64), (0.040, 0.046), (0.002, 0.128))
    trees = AtTheEnd(clock, texts, True)
    drafter = Timed(trees, clock=clock, real=real, cost=CostModel(real))
    engine = Engine(tiny_lm(), drafters=[drafter], default_method="auto", num_blocks=400, max_batch_tokens=chunk)
    engine.generate([prompt], GenerationParams(max_new_tokens=40))
    assert trees.read_positions == 7 and not drafter._reads
    trees.read_positions, drafter._row = 0, 1.0
    engine.generate([prompt], GenerationParams(max_new_tokens=40))
    assert trees.read_positions == 0
    assert drafter._row < 1.0, "what was measured in a bad hour is forgotten while nothing is read"


def test_a_price_is_that_of_a_size_at_which_it_is_worth_drafting():
    """A second token costs half a pass, and from two on they are free: a draft of 64 is what a node is priced by."""
    cost = CostModel(Calibration((1, 2, 64), (0.010, 0.015, 0.0155), (0.0, 0.0, 0.0)))
    assert cost.node(8, 8, 1) == pytest.approx(0.5 / 8, rel=0.02)
    assert cost.node(8, 64, 1) == cost.node(64, 64, 1) < cost.node(8, 32, 1)
    before = cost.node(8, 8, 4, 4, 60)
    for _ in range(20):  # among several texts nodes prove twice as dear
        plain = cost.seconds(4, 4, 60)
        cost.learn(plain + 2 * (cost.seconds(12, 4, 60) - plain), 12, 4, 60, drafted=8)
    several = cost.drafted(8, 4, 4, 60)
    assert cost.node(8, 8, 4, 4, 60) == pytest.approx((several[8] / several[0] - 1) / 8) != pytest.approx(before)


def test_it_knows_whose_prompts_are_being_read_besides_those_that_it_drafts_for():
    clock, running = Clock(), []

    class Noting(Timed):
        def scheduled(self, texts, tokens):
            super().scheduled(texts, tokens)
            running.append([text.num_emitted for text in texts])

    drafter = Noting(ScriptedTrees(clock, long_texts(), True), clock=clock, real=CHEAP, cost=CostModel(CHEAP))
    engine = Engine(
        tiny_lm(), drafters=[drafter], default_method="auto", strict=True, num_blocks=400, max_batch_tokens=3
    )
    engine.add(PROMPTS[0], GenerationParams(max_new_tokens=20))
    for _ in range(3):
        engine.step()
    engine.add(PROMPTS[2], GenerationParams(max_new_tokens=20))
    engine.step()
    assert [len(one) for one in running] == [1, 1, 1, 2]
    assert running[-1][0] > 0 == running[-1][1]


def test_drafts_are_priced_by_the_pass_that_they_are_run_in():
    """Beside a prompt's chunk a drafted token is one of a large pass; and what a try brings there is not remembered."""
    clock, beside = Clock(), []
    drafter = Timed(ScriptedTrees(clock, long_texts(), True), clock=clock, real=CHEAP, cost=CostModel(CHEAP), bound=4)
    priced = drafter.cost.drafted

    def noted(*load):
        beside.append(load[-1])
        return priced(*load)

    drafter.cost.drafted = noted
    engine = Engine(
        tiny_lm(), drafters=[drafter], default_method="auto", strict=True, num_blocks=400, max_batch_tokens=4
    )
    engine.add(PROMPTS[0], GenerationParams(max_new_tokens=20))
    while not beside:
        engine.step()
    alone = drafter._typical.tried
    engine.add(PROMPTS[2], GenerationParams(max_new_tokens=20))
    engine.step()
    assert beside[0] == 0 and beside[-1] == 3, "four tokens in the pass, of which one is the text's own"
    assert drafter._typical.tried == alone


def test_a_pass_with_prompts_in_it_teaches_nothing_about_costs():
    clock = Clock()
    drafter = Timed(ScriptedTrees(clock, long_texts(), False), clock=clock, real=CHEAP, cost=CostModel(CHEAP), bound=1)
    learned = []
    drafter.cost.learn = lambda *sample: learned.append(sample)
    engine = Engine(tiny_lm(), drafters=[drafter], default_method="auto", num_blocks=400, max_batch_tokens=2)
    engine.add(PROMPTS[0], GenerationParams(max_new_tokens=20))
    for _ in range(6):
        engine.step()
    before = len(learned)
    engine.add(PROMPTS[2], GenerationParams(max_new_tokens=20))
    for _ in range(3):
        engine.step()
    assert 0 < before == len(learned)
    engine.step()
    engine.step()
    assert len(learned) > before and learned[-1][1:3] == (2, 2)


# -- no text depends on it --------------------------------------------------------------------------------------------


@cache
def crowd() -> tuple[tuple[int, ...], ...]:
    rng = random.Random(2)
    return tuple(tuple(rng.randrange(96) for _ in range(rng.choice([1, 5, 17]))) * 2 for _ in range(16))


def loaded(name: str) -> AutoDrafter:
    """Every drafter that auto can draw on; costs under which all of them are worth a try."""
    cost = CostModel(CHEAP)
    trees = LogitSpecDrafter(k=8)
    if name == "trees":
        return AutoDrafter(trees, cost=cost)
    exits = random_exits("block", (1, 2))
    hispec = HierarchicalDrafter(EarlyExitDrafter(1, exits=exits), 2, exits=exits)
    draft = DraftModelDrafter(tiny_lm(), num_blocks=400)
    draft.name = "draft-model"
    chains = [EarlyExitDrafter(1, 2, exits=exits), hispec, DraftModelArm(draft, CostModel(SMALL))]
    return AutoDrafter(None if name == "chains" else trees, chains, cost=cost, bound=8)


@pytest.mark.parametrize("name", ["trees", "chains", "all"])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_greedy_text_is_that_of_plain_decoding(name, batch):
    prompts, params = crowd()[:batch], GenerationParams(max_new_tokens=NEW_TOKENS)
    engine = Engine(tiny_lm(), drafters=[loaded(name)], default_method="auto", strict=True, num_blocks=400)
    for _ in range(2):
        done = engine.generate([list(one) for one in prompts], params)
        assert {tuple(one.prompt_ids): one.token_ids for one in done} == plain(prompts, params)
        assert sum(one.stats.drafted for one in done) > 0
    engine.check_invariants()


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_a_seeded_text_is_that_of_plain_decoding(batch):
    """Only trees draft for it: a chain with distributions would make it depend on time."""
    prompts = crowd()[:batch]
    params = GenerationParams(max_new_tokens=NEW_TOKENS, temperature=0.7, seed=5)
    drafter = loaded("all")
    engine = Engine(tiny_lm(), drafters=[drafter], default_method="auto", strict=True, num_blocks=400)
    done = engine.generate([list(one) for one in prompts], params)
    assert {tuple(one.prompt_ids): one.token_ids for one in done} == plain(prompts, params)
    chains = ("draft-model", "early-exit", "hispec")
    assert all(origin.source not in chains for one in done for origin in one.origins)


def test_seeded_neighbours_do_not_keep_others_from_chains():
    drafter = loaded("all")
    for arm in drafter.arms:
        arm.best = lambda *_: ChainPlan(2, 9.0, 0.001, inner=1)
    engine = Engine(tiny_lm(), drafters=[drafter], default_method="auto", strict=True, num_blocks=400)
    seeded = GenerationParams(max_new_tokens=60, temperature=0.9, seed=1)
    texts = [list(one) for one in crowd()[:2]]
    done = engine.generate(texts, [seeded, GenerationParams(max_new_tokens=60)])
    assert done[0].token_ids == plain(crowd()[:1], seeded)[tuple(crowd()[0])]
    assert any(origin.source in ("draft-model", "early-exit", "hispec") for origin in done[1].origins)


def test_with_little_memory_texts_stay_the_same():
    params = GenerationParams(max_new_tokens=NEW_TOKENS)
    engine = Engine(tiny_lm(), drafters=[loaded("all")], default_method="auto", strict=True, num_blocks=7)
    done = engine.generate([list(one) for one in crowd()], params)
    assert {tuple(one.prompt_ids): one.token_ids for one in done} == plain(crowd(), params)
    engine.check_invariants()


# -- its place in the engine ------------------------------------------------------------------------------------------


def test_reset_makes_it_as_fresh_and_keeps_the_cost_model():
    clock = Clock()
    trees = ScriptedTrees(clock, long_texts(), right=False)
    chain = ScriptedChain(clock, long_texts(), right=False)
    cost = CostModel(CHEAP)
    drafter = Timed(trees, [ScriptedArm(chain)], clock=clock, real=CHEAP, cost=cost)
    engine, _ = run(drafter, max_new_tokens=120)
    used = drafter.nodes[:]
    drafter.nodes.clear()
    engine.reset()
    assert trees.resets == 1 and drafter.cost is cost and drafter._trust.value == 1.0
    assert drafter.arms[0].acceptance.accepted(1)[1] == pytest.approx(0.6) and not drafter._patience
    engine.generate(PROMPTS[:1], GenerationParams(max_new_tokens=120))
    assert drafter.nodes[:10] == used[:10]


def test_released_sequences_leave_nothing():
    drafter = loaded("trees")
    engine = Engine(tiny_lm(), drafters=[drafter], default_method="auto", strict=True, num_blocks=400)
    engine.generate([list(one) for one in crowd()[:3]], GenerationParams(max_new_tokens=8))
    assert not drafter._patience


def test_it_refuses_what_it_cannot_weigh_and_to_choose_among_nothing():
    with pytest.raises(ValueError, match="got none"):
        AutoDrafter(None)
    with pytest.raises(ValueError, match="bound must be from 1 to 1024, got 0"):
        AutoDrafter(LogitSpecDrafter(), bound=0)
    for tree in (LogitSpecDrafter(tree="paper"), PromptLookupDrafter()):
        with pytest.raises(ValueError, match="tree must be a drafter of trees with estimates"):
            AutoDrafter(tree)
    with pytest.raises(ValueError, match="got 'logitspec'"):
        AutoDrafter(None, [LogitSpecDrafter()])


def test_a_drafter_under_it_cannot_be_a_method_of_its_own_too():
    tree = LogitSpecDrafter()
    for drafters in ([AutoDrafter(tree), tree], [tree, AutoDrafter(tree)]):
        with pytest.raises(ValueError, match="'logitspec' is part of another drafter too"):
            Engine(tiny_lm(), drafters=drafters, num_blocks=40)


def test_a_drafter_under_it_cannot_be_given_to_another_engine():
    trees = LogitSpecDrafter()
    Engine(tiny_lm(), drafters=[AutoDrafter(trees, cost=CostModel(CHEAP))], num_blocks=10)
    with pytest.raises(ValueError, match="belongs to another engine"):
        Engine(tiny_lm(), drafters=[trees], num_blocks=10)


def test_a_request_with_an_exit_that_is_not_there_is_refused():
    drafter = AutoDrafter(LogitSpecDrafter(), [EarlyExitDrafter(1)], cost=CostModel(CHEAP))
    engine = Engine(tiny_lm(), drafters=[drafter], default_method="auto", num_blocks=10)
    with pytest.raises(ValueError, match="draft_layer"):
        engine.add([1, 2], GenerationParams(draft_layer=99))


def test_without_a_cost_model_it_measures_one_when_an_engine_takes_it():
    drafter = AutoDrafter(LogitSpecDrafter())
    Engine(tiny_lm(), drafters=[drafter], num_blocks=10)
    assert drafter.cost is not None and drafter.cost.seconds(1) > 0.0


def growing(steps: int, draft_tokens: int, max_depth: int):
    """A drafter of trees, and a text after some steps that the next tree is for."""
    engine = Engine(tiny_lm(), drafters=[trees := LogitSpecDrafter(k=8)], default_method="logitspec", num_blocks=100)
    engine.add([1, 2, 3, 1, 2], GenerationParams(max_new_tokens=40))
    for _ in range(steps):
        engine.step()
    (sequence,) = engine.scheduler.running
    sequence.draft_tokens, sequence.max_depth = draft_tokens, max_depth
    return trees, sequence


def test_the_estimates_of_trees_fall_and_belong_to_their_nodes():
    trees, sequence = growing(4, 20, 10)
    ((tree, scores),) = trees.scored([sequence])
    assert len(scores) == tree.num_drafted > 3
    assert list(scores) == sorted(scores, reverse=True) and 0.0 < min(scores) <= max(scores) < 1.0
    grown = trees._trees._state(sequence).grown
    assert sum(scores) == pytest.approx(sum(grown.scores[1:])) and list(grown.ranks) == sorted(grown.ranks)[::-1]
    with pytest.raises(ValueError, match="tree must be 'adaptive'"):
        LogitSpecDrafter(tree="paper").scored([sequence])


def test_a_bounded_tree_has_the_likely_nodes_of_the_whole_one_and_asks_for_no_others():
    """Its nodes are some of those of a tree of 1000, and none is less likely than the bound. Of those that are clearly
    likelier, with what siblings promise shared among them if it is more than one, none is missing."""
    trees, sequence = growing(6, 1000, 6)

    def grown(least: float) -> tuple[dict[tuple[int, ...], float], dict[tuple[int, ...], float], int]:
        """Of every path: the score of its last node, and the least of its nodes' scores as they are ranked."""
        trees.scored([sequence], least)
        found = trees._trees._state(sequence).grown
        tree, scores, ranked = found.tree(), {(): 1.0}, {(): 1.0}
        for node in range(1, len(tree)):
            parent, path = tree.parents[node], tuple(tree.token_ids[one] for one in tree.path_to(node)[1:])
            scores[path] = found.scores[node]
            part = found.ranks[node] / (found.ranks[parent] * DEEPER)
            ranked[path] = min(part * found.scores[parent], ranked[path[:-1]])
        return scores, ranked, sum(one is not None for one in found.contexts)

    whole, ranked, looked_up = grown(0.0)
    assert len(whole) > 20
    for least in (0.005, 0.01, 0.02):
        some, _, places = grown(least)
        assert some.keys() <= whole.keys() and min(some.values()) >= least
        assert {path for path, score in ranked.items() if score >= 2 * least} <= some.keys()
        assert 1 < len(some) < len(whole) and places < looked_up


# -- on the command line ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("checkpoints") / "tiny"))


def test_generate_needs_nothing_else(model, tmp_path, capsys):
    given = ["--model", model, "--cache-dir", str(tmp_path), "--prompt", "a b a b", "--max-new-tokens", "12"]
    texts = []
    for method in ("auto", "ar"):
        assert main(["generate", *given, "--method", method]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_it_draws_on_what_something_is_given_for(model):
    def parts(**given) -> list[str]:
        return drafters_of(["auto"], EngineOptions(model=model, **given))

    assert parts() == ["logitspec"]
    assert parts(draft_model=model) == ["logitspec", "draft-model"]
    assert parts(early_exit=EarlyExitOptions(layer=1)) == ["logitspec", "early-exit"]
    assert parts(hispec=HiSpecOptions(verify_layer=2)) == ["logitspec", "hispec"]
    assert parts(bundle="folder") == ["logitspec", "early-exit", "hispec"]
    options = EngineOptions(model=model, draft_model=model, early_exit=EarlyExitOptions(layer=1))
    engine = build_engine(prepare(options, ["auto", "logitspec"]))
    assert [part.name for part in engine.drafters["auto"].parts] == ["logitspec", "draft-model", "early-exit"]
    assert engine.drafters["auto"].default_draft_tokens() == 64


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logitspec": LogitSpecOptions(tree="paper")}, "logitspec.tree must be adaptive for method auto, got 'paper'"),
        ({"early_exit": EarlyExitOptions(layer=99)}, "early_exit.layer must be"),
        ({"draft_model": "nowhere"}, "nowhere"),
        ({"attention": "flex"}, "attention must be sdpa for method auto, whose measurements are of it, got 'flex'"),
        ({"cuda_graphs": True}, "cuda_graphs must be left out for method auto"),
    ],
)
def test_what_it_cannot_use_is_refused_before_weights_are_read(model, given, message):
    with pytest.raises(ValueError, match=message):
        prepare(EngineOptions(model=model, **given), ["auto"])


def test_bench_knows_it_with_a_bound_and_without():
    assert [(v.method, v.draft_tokens) for v in parse_methods(["auto,auto:8"])][1:] == [("auto", None), ("auto", 8)]


def test_an_inner_stage_learns_from_every_round() -> None:
    arm = HiSpecArm(HierarchicalDrafter(EarlyExitDrafter(1, 2), 2, 4))
    recorded: list[tuple[int, int]] = []
    arm.inner.record = lambda accepted, decided: recorded.append((accepted, decided))  # type: ignore[method-assign]
    # three rounds of two tokens: all accepted, all accepted, the second turned down; and one whose first was
    arm._learn_inner(Counter({1: 4, 2: 3}), Counter({1: 3, 2: 2}))
    assert sorted(recorded) == [(0, 1), (1, 2), (2, 2), (2, 2)]


def test_what_was_drafted_behind_the_end_of_a_text_is_undecided() -> None:
    arm = arm_of(EarlyExitDrafter(1, 3))
    tree = TokenTree.chain([5, 6, 7, 8])
    recorded: list[tuple[int, int]] = []
    arm.acceptance.record = lambda accepted, decided: recorded.append((accepted, decided))  # type: ignore[method-assign]
    for verdict in (Verdict([0, 1], None, False), Verdict([0, 1], 9, True), Verdict([0, 1, 2, 3], 9, False)):
        arm.observe(Observation(None, tree, verdict, None, None))  # type: ignore[arg-type]
    assert recorded == [(1, 1), (1, 2), (3, 3)]


# -- chains: what is known of them before and between their turns ----------------------------------------------------


def with_acceptance(found: dict[int, float], layer: int = 1) -> EarlyExitDrafter:
    exits = EarlyExits()
    exits.acceptance = found
    return EarlyExitDrafter(layer, exits=exits)


def test_what_exits_were_worth_where_they_were_tried_is_where_learning_begins():
    """And a run of luck changes it little; where nothing is known, the first samples decide."""
    tried, unknown = arm_of(with_acceptance({1: 0.3, 2: 0.9})), arm_of(with_acceptance({2: 0.9}))
    window = arm_of(HierarchicalDrafter(with_acceptance({1: 0.3, 2: 0.5}), 2, exits=with_acceptance({2: 0.5}).exit))
    found = [arm.acceptance.accepted(1)[1] for arm in (tried, unknown, window)]
    assert found == pytest.approx([0.3, 0.6, 0.5])
    for arm in (tried, unknown):
        for _ in range(3):
            arm.acceptance.record(1, 1)
    assert tried.acceptance.accepted(1)[1] < 0.4 and unknown.acceptance.accepted(1)[1] > 0.75


def test_reset_forgets_what_was_said_and_not_how_slow_a_chain_is():
    arm = arm_of(with_acceptance({}))
    arm.timed(ChainPlan(2, 1.5, 0.05), 0.07)
    arm.acceptance.record(0, 1)
    slowness = arm.slowness
    arm.reset()
    assert arm.slowness == slowness > 1.0 and arm.acceptance.accepted(1)[1] == pytest.approx(0.6)


@pytest.mark.parametrize(("seconds", "chosen"), [(0.0385, False), (0.0375, True)])
def test_a_chain_must_promise_clearly_more_than_trees(seconds, chosen):
    """Trees: a token in 40 ms. One that promises 4 percent more is left, one with 7 percent is taken."""
    clock = Clock()
    arm = ScriptedArm(ScriptedChain(clock, long_texts(), True))
    drafter = Timed(None, [arm], clock=clock, real=CHEAP, cost=CostModel(CHEAP))
    arm.best = lambda *_: ChainPlan(1, 1.0, seconds)
    arm.next_probe = 10**6
    run(drafter, max_new_tokens=5)
    assert (arm.last_used > 0) == chosen


def test_plans_are_made_anew_when_other_texts_are_drafted_for_and_reading_is_always_priced():
    """One text of two may be drafted for by chains, then the other too: fails if the plan of one is taken for both."""
    drafter = AutoDrafter(LogitSpecDrafter(), [EarlyExitDrafter(1)], cost=CostModel(CHEAP))
    engine = Engine(tiny_lm(), drafters=[drafter], default_method="auto", strict=True, num_blocks=400)
    (arm,) = drafter.arms
    arm.next_probe, asked = 10**6, []
    arm.best = lambda sequences, *_: asked.append(len(sequences)) or ChainPlan(1, 1.0, 1.0)
    arm.reading = lambda sequences: 7.0
    engine.add(PROMPTS[0], GenerationParams(max_new_tokens=40))
    engine.add(PROMPTS[1], GenerationParams(max_new_tokens=4, temperature=1.0, seed=1))
    for _ in range(5):
        engine.step()
    engine.add(PROMPTS[2], GenerationParams(max_new_tokens=40))
    for _ in range(8):
        engine.step()
    assert asked[0] == 1 and set(asked) == {1, 2} and len(asked) <= 5
    assert drafter._plan(arm, list(engine.scheduler.running), drafter._step or _Step(Load(2, 2, 9))).reading == 7.0


def test_a_probe_is_charged_with_what_it_lost_against_the_best():
    """Trees bring two tokens a step: a chain that brings one in the same time has lost half a step."""
    clock = Clock()
    trees = ScriptedTrees(clock, long_texts(), right=True)
    drafter = Timed(trees, [ScriptedArm(ScriptedChain(clock, long_texts(), False))], clock=clock, real=CHEAP)
    step = _Step(Load(1, 1, 9), plain=0.04, top=50.0, is_probe=True, emitted=1)
    drafter._step = step
    AutoDrafter.timed(drafter, 0.04, 1, 2)
    assert drafter.budget.spent == pytest.approx(0.02)


def test_a_chain_is_tried_only_when_that_is_a_small_part_of_the_time_so_far():
    """Three steps that lose 12 ms each are one percent of 3.6 s, 90 steps of 40 ms; the wait alone is 32."""
    clock = Clock()
    chain = ScriptedChain(clock, long_texts(), False)
    arm = ScriptedArm(chain)
    drafter = Timed(None, [arm], clock=clock, real=CHEAP, cost=CostModel(CHEAP))
    arm.best = lambda *_: ChainPlan(1, 1.0, 0.052)
    tried = []
    arm.propose = lambda sequences, plan: tried.append(drafter._steps) or chain.propose(sequences)
    run(drafter, max_new_tokens=LONG)
    assert 85 < tried[0] < 100 and len(tried) >= 3


def test_what_waits_for_heads_is_part_of_a_plan_and_of_what_its_step_may_take():
    exits = random_exits("block", (1, 3))
    one = EarlyExitDrafter(1, exits=exits)
    drafter = AutoDrafter(LogitSpecDrafter(), [one], cost=CostModel(CHEAP))
    engine = Engine(tiny_lm(), drafters=[drafter], default_method="auto", strict=True, num_blocks=400)
    (arm,) = drafter.arms
    engine.add(PROMPTS[0], GenerationParams(max_new_tokens=40))
    arm.next_probe, arm.best = 10**6, lambda *_: ChainPlan(1, 1.0, 1.0)
    for _ in range(5):
        engine.step()
    (sequence,) = engine.scheduler.running
    waiting = sequence.table.length - len(PROMPTS[0])  # its prompt was read in the pass that ran it
    layer = drafter.cost.seconds(waiting, share=0.25, unembedded=False)
    assert waiting >= 4 and arm.reading([sequence]) == pytest.approx(layer)
    arm.timed(ChainPlan(1, 1.0, 0.04, reading=0.01), 0.05)
    assert arm.slowness == pytest.approx(1.0)
    exits.read_owed(1, [sequence.table], 1)
    assert arm.reading([sequence]) == 0.0


# -- whose texts heads see --------------------------------------------------------------------------------------------


def with_heads(real: Calibration, **options) -> Engine:
    drafter = AutoDrafter(LogitSpecDrafter(k=8), [EarlyExitDrafter(1, exits=random_exits("block", (1, 3)))])
    drafter.cost = CostModel(real)
    return Engine(tiny_lm(), drafters=[drafter], default_method="auto", strict=True, num_blocks=400, **options)


@pytest.mark.parametrize(("real", "is_shown"), [(CHEAP, True), (DEAR, False)])
def test_heads_see_texts_only_where_a_chain_promises_to_pay(real, is_shown):
    engine = with_heads(real)
    params = GenerationParams(max_new_tokens=NEW_TOKENS)
    done = engine.generate([list(one) for one in crowd()[:4]], params)
    assert (engine.stats.head_tokens > 0) == is_shown
    assert {tuple(one.prompt_ids): one.token_ids for one in done} == plain(crowd()[:4], params)
    assert not engine.drafters["auto"].shown._taps


def test_what_trees_bring_is_what_a_chain_must_beat():
    """Half as fast again as plain decoding: enough where trees bring nothing, not where they double it."""
    engine = with_heads(CHEAP)
    drafter = engine.drafters["auto"]
    engine.add(PROMPTS[0])
    (sequence,) = engine.scheduler.waiting
    drafter.arms[0].foreseen = lambda sequence, texts: 1.5 * texts / drafter.cost.seconds(texts, texts, 5 * texts)
    assert drafter.shown.promises(sequence, 1, 0) and drafter.shown.promises(sequence, 3, 0)
    drafter.shown.gain = 2.0
    assert not drafter.shown.promises(sequence, 1, 8) and not drafter.shown.promises(sequence, 3, 8)


def test_the_gain_of_trees_is_learned_from_steps():
    for right, low, high in ((True, 3.0, 12.0), (False, 0.9, 1.05)):
        clock = Clock()
        trees = ScriptedTrees(clock, long_texts(), right=right)
        drafter = Timed(trees, clock=clock, real=CHEAP, cost=CostModel(CHEAP))
        run(drafter)
        assert low < drafter.shown.gain < high


def test_heads_that_do_not_pay_are_tried_with_one_text_at_a_time_and_that_is_charged():
    engine = with_heads(DEAR)
    drafter = engine.drafters["auto"]
    params = GenerationParams(max_new_tokens=2)

    def shown(count: int, params: GenerationParams = params) -> list[bool]:
        before, found = engine.stats.head_tokens, []
        for prompt in crowd()[:count]:
            engine.generate([list(prompt)], params)
            found.append(engine.stats.head_tokens > before)
            before = engine.stats.head_tokens
        return found

    assert not any(shown(3)), "at first all time counts"
    drafter._steps, drafter.budget.served = 100, 1000.0
    (prompt,) = {len(one) for one in crowd()[:1]}
    price = drafter.cost.seconds(prompt) * (1 + 1 / 4)
    drafter.budget.spent = 10.0 - price - 3 * drafter.cost.seconds(1, 1, prompt) - 1e-6
    assert not any(shown(3, replace(params, n=2))), "texts of one prompt would not share it"
    spent = drafter.budget.spent
    assert shown(1) == [True] and drafter.budget.spent == pytest.approx(spent + price)
    assert shown(1) == [False], "there is no room for a second"
    drafter.budget.spent = 0.0
    drafter.arms[0].next_probe = 10**6
    assert shown(1) == [False], "it is not yet its turn"


def test_a_chain_drafts_only_for_the_texts_that_its_heads_see():
    """In one pass, texts that are shown and texts that are not; neither finds the other's prompt in the cache."""
    engine = with_heads(CHEAP, block_size=4)
    drafter = engine.drafters["auto"]
    (arm,) = drafter.arms
    arm.best, propose, drafted = lambda *_: ChainPlan(2, 9.0, 0.001), arm.propose, set()
    arm.propose = lambda some, plan: drafted.update(s.sequence_id for s in some) or propose(some, plan)
    shown = [True, False, True, False]
    drafter.shown.promises = lambda sequence, texts, step: shown[sequence.sequence_id % 4]
    drafter.shown.begins_trial = lambda *_: False
    prompt, params = [7, 3, 5, 7, 3, 5, 7, 3, 5, 1], GenerationParams(max_new_tokens=40)
    done = [engine.generate([prompt], params)[0] for _ in range(2)]
    done += engine.generate([prompt, prompt], params)
    assert drafted == {0, 2}
    assert [one.stats.cached_tokens for one in done] == [0, 0, 8, 8]
    assert len({tuple(one.token_ids) for one in done}) == 1


def test_who_sees_a_requests_texts_stays_when_they_come_back_and_is_the_same_for_all_of_them():
    """Otherwise they would not find what they have run. A trial is one text's, and is paid for once."""
    engine = with_heads(CHEAP)
    drafter, asked = engine.drafters["auto"], []
    drafter.shown.promises = lambda sequence, texts, step: asked.append(texts) or False
    drafter.budget.served, drafter._steps, drafter.arms[0].next_probe = 1e9, 100, 0
    engine.add(PROMPTS[0], GenerationParams(max_new_tokens=NEW_TOKENS))
    for prompt in PROMPTS[1:]:
        engine.add(prompt, GenerationParams(max_new_tokens=NEW_TOKENS, n=2))
    for _ in range(4):
        engine.step()
    trial, second, *_ = engine.scheduler.running
    assert asked == [5, 5, 5] and trial.taps and not second.taps
    assert drafter._arms_for(trial) == drafter.arms and drafter._arms_for(second) == []
    for sequence in (second, trial):
        engine.scheduler.preempt(sequence)
    drafter.shown.promises, drafter.shown.begins_trial = lambda *_: True, lambda *_: 1 / 0
    engine.step()
    assert trial.taps and not second.taps and trial in engine.scheduler.running
    assert all(not sequence.taps for sequence in engine.scheduler.running if sequence is not trial)
    engine.check_invariants()
    while engine.has_work:
        engine.step()
    assert not drafter.shown._taps and not drafter.shown._request_of


def test_a_trial_waits_for_the_turn_of_a_chain_that_needs_it():
    """Not for that of a draft model, which needs no heads and may be due for long."""
    exits = random_exits("block", (1, 3))
    arms = [
        EarlyExitDrafter(1, exits=exits),
        DraftModelArm(DraftModelDrafter(tiny_lm(), num_blocks=40), CostModel(DEAR)),
    ]
    drafter = AutoDrafter(LogitSpecDrafter(k=8), arms, cost=CostModel(DEAR))
    engine = Engine(tiny_lm(), drafters=[drafter], default_method="auto", strict=True, num_blocks=400)
    drafter._steps, drafter.budget.served = 100, 1e9
    first, second = drafter.arms
    first.next_probe, second.next_probe = 10**6, 0
    engine.generate([PROMPTS[0]], GenerationParams(max_new_tokens=4))
    assert engine.stats.head_tokens == 0 and drafter.budget.spent < 1.0
    first.next_probe = 0
    engine.generate([PROMPTS[1]], GenerationParams(max_new_tokens=4))
    assert engine.stats.head_tokens > 0


def test_how_likely_a_node_must_be_is_asked_anew_for_larger_trees():
    """A second token costs half a pass, a hundred hardly more: fails if what was found for few is taken for many."""
    drafter = AutoDrafter(LogitSpecDrafter(), cost=CostModel(Calibration((1, 2, 128), (0.04, 0.06, 0.061), (0.0,) * 3)))
    few = drafter._hopeless(Load(1, 1, 9), 8)
    assert drafter._hopeless(Load(1, 1, 9), 64) < few / 4
    assert drafter._hopeless(Load(1, 1, 9), 8) < few / 4, "larger trees' is kept for some steps"


def test_whether_chains_promise_is_not_asked_for_every_text_nor_for_ever():
    engine = with_heads(CHEAP)
    drafter, asked = engine.drafters["auto"], []
    (arm,) = drafter.arms
    arm.foreseen = lambda sequence, texts: asked.append(texts) or 0.0
    engine.generate([list(one) for one in crowd()[:4]], GenerationParams(max_new_tokens=12))
    assert asked == [4]
    engine.generate([PROMPTS[0]], GenerationParams(max_new_tokens=12))
    engine.generate([list(one) for one in crowd()[:4]], GenerationParams(max_new_tokens=2))
    assert asked == [4, 1, 4]


def test_where_it_cannot_be_said_who_sees_a_text_nobody_does(caplog):
    engine = with_heads(CHEAP)
    engine.strict = False
    engine.drafters["auto"].shown.promises = lambda *_: 1 / 0
    (done,) = engine.generate([PROMPTS[0]], GenerationParams(max_new_tokens=4))
    assert len(done.token_ids) == 4 and done.stats.draft_failures == 1 and engine.stats.head_tokens == 0
    assert "drafter auto failed" in caplog.text
