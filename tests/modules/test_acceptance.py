"""What `verify` emits is distributed as the target: by enumeration to 1e-12, and by chi-square with real generators.

The enumeration runs the real rule once for every way its random choices can fall and adds up the probabilities, so the
law of the output comes out without sampling error. Drawing from a distribution given a uniform is tested on its own.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import jaxtyping
import numpy as np
import pytest
import torch
from scipy import stats
from speclight.modules import acceptance
from speclight.modules.acceptance import Dense, Distribution, OneHot, Verdict, accept_prob, verify
from speclight.modules.sampling import LogitsPipeline, SamplingParams, make_generator
from speclight.modules.token_tree import TokenTree

VOCAB = 4
ROOT = 0
EXACT = 1e-12  # float64 with a few dozen additions
Tokens = tuple[int, ...]
Law = dict[Tokens, float]
Table = Callable[[Tokens], Distribution]  # tokens after the root -> distribution of the next one


# --- enumeration


class Enumeration:
    """Every way an experiment's random choices can fall, each run once."""

    def __init__(self) -> None:
        self._script: list[int] = []
        self._pending: list[list[int]] = []
        self._position = 0
        self._prob = 1.0

    def choose(self, weights: Sequence[float]) -> int:
        """An index with positive weight; the others are noted down and get a run of their own."""
        if self._position == len(self._script):
            first, *others = (index for index, weight in enumerate(weights) if weight > 0.0)
            self._pending += [[*self._script, other] for other in others]
            self._script.append(first)
        choice = self._script[self._position]
        self._position += 1
        self._prob *= weights[choice] / math.fsum(weights)
        return choice

    def law(self, experiment: Callable[[], Tokens]) -> Law:
        law: Law = defaultdict(float)
        self._pending = [[]]
        while self._pending:
            self._script, self._position, self._prob = self._pending.pop(), 0, 1.0
            result = experiment()
            law[result] += self._prob
        return law


class Coin:
    """A uniform draw of which only `draw < chance` is asked, so two branches are all there is to it."""

    def __init__(self, enumeration: Enumeration) -> None:
        self.enumeration = enumeration

    def __lt__(self, chance: float) -> bool:
        return self.enumeration.choose([chance, 1.0 - chance]) == 0


@pytest.fixture
def enumeration(monkeypatch: pytest.MonkeyPatch) -> Enumeration:
    """From here on the rule's randomness is decided by the enumeration."""
    choices = Enumeration()
    monkeypatch.setattr(Dense, "sample", lambda self, generator: choices.choose(self.probs.tolist()))
    monkeypatch.setattr(acceptance, "_uniform", lambda generator: Coin(choices))
    return choices


def emitted(tree: TokenTree, verdict: Verdict) -> Tokens:
    return tuple(verdict.emitted(tree))


def at_nodes(tree: TokenTree, p: Table) -> Callable[[int], Distribution]:
    """The target as `verify` asks for it: by node."""
    return lambda node: p(tuple(tree.token_ids[step] for step in tree.path_to(node)[1:]))


def propose_chain(length: int, q: Table) -> TokenTree:
    """A draft model: `length` tokens, each drawn from q at what was drafted before it, q carried along."""
    tokens: list[int] = []
    probs: list[Distribution] = []
    for _ in range(length):
        probs.append(q(tuple(tokens)))
        tokens.append(probs[-1].sample(None))
    return TokenTree.chain([ROOT, *tokens], probs)


def speculate(tree: TokenTree, p: Table) -> Tokens:
    return emitted(tree, verify(tree, at_nodes(tree, p)))


def plain_law(p: Table, length: int) -> Law:
    """The law of `length` tokens of plain decoding."""
    law: Law = {(): 1.0}
    for _ in range(length):
        law = {(*prefix, x): prob * p(prefix).prob(x) for prefix, prob in law.items() for x in range(VOCAB)}
    return law


def completed(law: Law, p: Table, length: int) -> Law:
    """`law` of sequences of any lengths, each continued by plain decoding to `length` tokens."""
    whole: Law = defaultdict(float)
    for prefix, prob in law.items():
        assert len(prefix) <= length
        continuation = plain_law(lambda rest, prefix=prefix: p(prefix + rest), length - len(prefix))
        for rest, chance in continuation.items():
            whole[prefix + rest] += prob * chance
    return whole


def distance(law: Law, p: Table, length: int) -> float:
    """The largest difference between `law`, completed, and plain decoding, over all sequences of `length` tokens."""
    whole, plain = completed(law, p, length), plain_law(p, length)
    return max(abs(whole.get(tokens, 0.0) - plain.get(tokens, 0.0)) for tokens in whole.keys() | plain.keys())


# --- tables of distributions, a pure function of a seed and the prefix


def random_probs(rng: np.random.Generator, vocab: int = VOCAB, support: Sequence[int] | None = None) -> torch.Tensor:
    probs = torch.zeros(vocab, dtype=torch.float64)
    chosen = range(vocab) if support is None else support
    probs[list(chosen)] = torch.from_numpy(rng.dirichlet(np.full(len(chosen), 0.7)))
    return probs


def dense(rng: np.random.Generator) -> Distribution:
    return Dense(random_probs(rng))


def one_hot(rng: np.random.Generator) -> Distribution:
    return OneHot(int(rng.integers(VOCAB)), VOCAB)


def on(*support: int, vocab: int = VOCAB) -> Callable[[np.random.Generator], Distribution]:
    return lambda rng: Dense(random_probs(rng, vocab, support))


def sparse(rng: np.random.Generator) -> Distribution:
    return Dense(random_probs(rng, VOCAB, sorted(rng.choice(VOCAB, size=2, replace=False))))


def dense_one_hot(rng: np.random.Generator) -> Distribution:
    return Dense(one_hot(rng).dense().double())


def of_any_kind(rng: np.random.Generator) -> Distribution:
    return (dense, one_hot, sparse, dense_one_hot)[int(rng.integers(4))](rng)


def table(make: Callable[[np.random.Generator], Distribution], seed: int) -> Table:
    return cache(lambda prefix: make(np.random.default_rng([seed, *(token + 1 for token in prefix)])))


KINDS: dict[str, tuple[Callable, Callable]] = {
    "p and q of full support": (dense, dense),
    "a draft at temperature 0": (dense, one_hot),
    "a one-hot draft in dense form": (dense, dense_one_hot),
    "a greedy target": (one_hot, dense),
    "a greedy target in dense form": (dense_one_hot, dense),
    "greedy target and greedy draft": (one_hot, one_hot),
    "a draft model of a smaller vocabulary": (dense, on(0, 1, 2, vocab=3)),
    "a draft model of a larger vocabulary": (dense, on(*range(6), vocab=6)),
    "a draft that knows only tokens the target lacks": (dense, on(4, 5, vocab=6)),
    "a greedy draft outside the target's vocabulary": (dense, lambda rng: OneHot(5, 6)),
    "a greedy target and a larger draft vocabulary": (one_hot, on(*range(6), vocab=6)),
    "disjoint supports": (on(0, 1), on(2, 3)),
    "targets with zeros": (sparse, dense),
    "drafts with zeros": (dense, sparse),
    "anything": (of_any_kind, of_any_kind),
}


# --- layer 1: algebra


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_drafted_chain_emits_exactly_the_target(enumeration: Enumeration, kind: str, length: int) -> None:
    for seed in range(2):
        p, q = table(KINDS[kind][0], 2 * seed), table(KINDS[kind][1], 2 * seed + 1)
        law = enumeration.law(lambda p=p, q=q: speculate(propose_chain(length, q), p))
        assert distance(law, p, length + 1) < EXACT


def test_a_draft_equal_to_the_target_is_always_accepted(enumeration: Enumeration) -> None:
    p = table(of_any_kind, 3)
    law = enumeration.law(lambda: speculate(propose_chain(3, p), p))
    assert {len(tokens) for tokens in law} == {4}
    assert distance(law, p, 4) < EXACT


def test_a_draft_equal_up_to_rounding_stays_exact(enumeration: Enumeration) -> None:
    """The residual is then rounding noise or nothing at all; neither may fail or matter."""

    def rounded(prefix: Tokens) -> Distribution:
        probs = p(prefix).dense()
        return Dense(probs * (1 + 1e-15 * torch.arange(VOCAB)))

    p = table(dense, 5)
    law = enumeration.law(lambda: speculate(propose_chain(2, rounded), p))
    assert distance(law, p, 3) < EXACT


@pytest.mark.parametrize("seed", range(4))
def test_acceptance_is_one_minus_the_total_variation(enumeration: Enumeration, seed: int) -> None:
    """Leviathan et al. 2023, theorem 3.5: nothing accepts more without changing the law."""
    p, q = table(dense, 2 * seed), table(dense, 2 * seed + 1)
    accepted = enumeration.law(lambda: (verify(tree := propose_chain(1, q), at_nodes(tree, p)).num_accepted,))
    total_variation = 0.5 * (p(()).dense() - q(()).dense()).abs().sum().item()
    assert accepted[(1,)] == pytest.approx(1.0 - total_variation, abs=EXACT)


def random_tree(rng: np.random.Generator, max_nodes: int = 8, max_depth: int = 3, vocab: int = VOCAB + 1) -> TokenTree:
    """Any shape, without distributions; some tokens are outside the target's vocabulary."""
    token_ids, parents, depths, taken = [ROOT], [-1], [0], set()
    for _ in range(int(rng.integers(1, max_nodes))):
        edge = (int(rng.integers(len(parents))), int(rng.integers(vocab)))
        if edge not in taken and depths[edge[0]] < max_depth:
            taken.add(edge)
            token_ids.append(edge[1])
            parents.append(edge[0])
            depths.append(depths[edge[0]] + 1)
    return TokenTree(token_ids, parents)


@pytest.mark.parametrize("seed", range(12))
def test_a_tree_without_distributions_emits_exactly_the_target(enumeration: Enumeration, seed: int) -> None:
    tree = random_tree(np.random.default_rng(seed))
    p = table((dense, sparse, one_hot, of_any_kind)[seed % 4], seed)
    law = enumeration.law(lambda: speculate(tree, p))
    assert distance(law, p, max(tree.depths) + 1) < EXACT


def test_no_draft_is_plain_decoding(enumeration: Enumeration) -> None:
    p = table(dense, 0)
    assert distance(enumeration.law(lambda: speculate(TokenTree.root(ROOT), p)), p, 1) < EXACT


@pytest.mark.parametrize("depth", [1, 2])
def test_a_verified_proposal_is_a_proposal_with_the_verifiers_distribution(
    enumeration: Enumeration, depth: int
) -> None:
    """Two stages (HiSpec): what an intermediate emits was drawn from the intermediate, and is verified against it."""
    q, middle, p = table(dense, 1), table(dense, 2), table(sparse, 3)

    def two_stages(carried: Table) -> Tokens:
        tokens = speculate(propose_chain(depth, q), middle)
        probs = [carried(tokens[:step]) for step in range(len(tokens))]
        return speculate(TokenTree.chain([ROOT, *tokens], probs), p)

    assert distance(enumeration.law(lambda: two_stages(middle)), p, depth + 2) < EXACT
    assert distance(enumeration.law(lambda: two_stages(q)), p, depth + 2) > 0.01  # the drafter's q: not lossless


@pytest.mark.parametrize("seed", range(3))
def test_greedy_is_the_limit_of_temperature_to_zero(enumeration: Enumeration, seed: int) -> None:
    """At temperature 1e-3 and gaps over 0.04, the law differs from the one-hot one by less than e^-40."""

    def logits(kind: int, prefix: Tokens) -> torch.Tensor:
        rng = np.random.default_rng([seed, kind, *(token + 1 for token in prefix)])
        return torch.from_numpy(rng.permutation(VOCAB) * 0.3 + rng.uniform(0, 0.25, VOCAB))

    def cold(kind: int) -> Table:
        return lambda prefix: Dense(torch.softmax(logits(kind, prefix) / 1e-3, dim=0))

    def greedy(kind: int) -> Table:
        return lambda prefix: OneHot(int(logits(kind, prefix).argmax()), VOCAB)

    laws = [enumeration.law(lambda at=at: speculate(propose_chain(3, at(1)), at(0))) for at in (cold, greedy)]
    assert len(laws[1]) == 1
    outcomes = laws[0].keys() | laws[1].keys()
    assert max(abs(laws[0].get(tokens, 0.0) - laws[1].get(tokens, 0.0)) for tokens in outcomes) < EXACT


# --- deliberately wrong rules, which the same checks must catch

P_LOGITS, Q_LOGITS = [1.2, 0.3, -0.5, -1.0], [-0.4, 1.0, 0.2, -0.8]


def at_temperature(logits: Sequence[float] | torch.Tensor, temperature: float, for_drafts: bool = True) -> Distribution:
    params = SamplingParams(temperature=temperature)
    return LogitsPipeline(params, 0, for_drafts)(torch.as_tensor(logits), [])


@pytest.mark.parametrize(("drawn_at", "tested_at"), [(0.0, 1.0), (0.6, 1.0), (1.0, 0.6)])
def test_a_q_that_the_draft_was_not_drawn_from_is_caught_by_the_enumeration(
    enumeration: Enumeration, drawn_at: float, tested_at: float
) -> None:
    p = at_temperature(torch.tensor(P_LOGITS, dtype=torch.float64), 1.0)
    drawn, tested = (at_temperature(torch.tensor(Q_LOGITS, dtype=torch.float64), t) for t in (drawn_at, tested_at))

    def wrong() -> Tokens:
        return speculate(TokenTree.chain([ROOT, drawn.sample(None)], [tested]), lambda prefix: p)[:1]

    assert distance(enumeration.law(wrong), lambda prefix: p, 1) > 0.01


def test_skipping_the_residual_is_caught_by_the_enumeration(
    enumeration: Enumeration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dense, "residual", lambda self, q: self)
    p, q = table(dense, 0), table(dense, 1)
    assert distance(enumeration.law(lambda: speculate(propose_chain(1, q), p)), p, 2) > 0.01


def test_a_bfloat16_draft_is_tested_with_the_very_numbers_it_was_drawn_from(enumeration: Enumeration) -> None:
    """Real heads have large offsets, +30 here, where bfloat16 resolves 0.125; the second law tests with float32's q."""
    wide = torch.tensor(Q_LOGITS) + 30.0
    p, q = at_temperature(P_LOGITS, 1.0), at_temperature(wide.bfloat16(), 1.0)
    tested_with = {"the same": q, "float32": at_temperature(wide, 1.0)}
    distances = {}
    for name, tested in tested_with.items():
        law = enumeration.law(
            lambda tested=tested: speculate(TokenTree.chain([ROOT, q.sample(None)], [tested]), lambda prefix: p)[:1]
        )
        distances[name] = distance(law, lambda prefix: p, 1)
    assert distances["the same"] < 1e-6  # float32 rounding
    assert distances["float32"] > 1e-3


# --- real generators


NUM_SEEDS = 100_000
NUM_DRAWS = 1_000_000


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite's runtime checks of annotations would take most of the time of a hundred thousand calls."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def first_tokens(drawn: Distribution, tested: Distribution, p: Distribution) -> list[int]:
    """How often each token comes first over all seeds, drafting one token with a request's own two generators."""
    counts = [0] * VOCAB
    trees = [TokenTree.chain([ROOT, drafted], [tested]) for drafted in range(VOCAB)]
    for seed in range(NUM_SEEDS):
        tree = trees[drawn.sample(make_generator(seed, stream=1))]
        counts[emitted(tree, verify(tree, lambda node: p, make_generator(seed)))[0]] += 1
    return counts


def p_value(counts: list[int], p: Distribution) -> float:
    expected = p.dense().double()
    return float(stats.chisquare(counts, (expected / expected.sum() * sum(counts)).numpy()).pvalue)


@pytest.mark.parametrize("draft_temperature", [0.0, 0.6, 1.0])
@pytest.mark.usefixtures("unchecked")
def test_first_tokens_over_seeds_follow_the_target_at_every_draft_temperature(draft_temperature: float) -> None:
    """A right rule would fail with probability 1e-4; the seeds are fixed, so it does not flicker."""
    p, q = at_temperature(P_LOGITS, 1.0, for_drafts=False), at_temperature(Q_LOGITS, draft_temperature)
    assert p_value(first_tokens(q, q, p), p) > 1e-4


@pytest.mark.usefixtures("unchecked")
def test_a_greedy_draft_with_a_soft_q_fails_the_same_chi_square() -> None:
    p = at_temperature(P_LOGITS, 1.0, for_drafts=False)
    wrong = first_tokens(at_temperature(Q_LOGITS, 0.0), at_temperature(Q_LOGITS, 1.0), p)
    assert p_value(wrong, p) < 1e-4


@pytest.mark.usefixtures("unchecked")
def test_a_million_draws_from_a_bfloat16_draft_with_a_large_offset_follow_the_target() -> None:
    """The fault that the enumeration above catches, as it would be met: two generators, one draft a step."""
    p = at_temperature(P_LOGITS, 1.0, for_drafts=False)
    q = at_temperature((torch.tensor(Q_LOGITS) + 30.0).bfloat16(), 1.0)
    trees = [TokenTree.chain([ROOT, drafted], [q]) for drafted in range(VOCAB)]
    counts, drafts, draws = [0] * VOCAB, make_generator(0, stream=1), make_generator(0)
    for _ in range(NUM_DRAWS):
        tree = trees[q.sample(drafts)]
        counts[emitted(tree, verify(tree, lambda node: p, draws))[0]] += 1
    assert p_value(counts, p) > 1e-4


def test_greedy_never_takes_a_close_second_that_the_draft_prefers() -> None:
    """A soft ratio p/q would take token 2 with probability e^-0.1 = 0.905."""
    p_logits, q_logits = [0.0, 2.0, 1.9, 0.0], [0.0, 1.9, 2.0, 0.0]
    p, q = at_temperature(p_logits, 0.0, for_drafts=False), at_temperature(q_logits, 0.0)
    tree = TokenTree.chain([ROOT, q.sample(None)], [q])
    verdicts = [verify(tree, lambda node: p, make_generator(seed)) for seed in range(2000)]
    assert {emitted(tree, verdict) for verdict in verdicts} == {(1,)}
    soft = [at_temperature(logits, 1.0) for logits in (p_logits, q_logits)]
    assert accept_prob(soft[0].prob(2), soft[1].prob(2)) == pytest.approx(math.exp(-0.1), abs=1e-6)


def decode(p: Table, num_tokens: int, seed: int, propose: Callable[[int], TokenTree]) -> tuple[list[int], int]:
    """(tokens after ROOT, passes it took); the target looks at the last token only."""
    generator, tokens, passes = make_generator(seed), [ROOT], 0
    while len(tokens) <= num_tokens:
        tree = propose(tokens[-1])
        tokens += emitted(tree, verify(tree, lambda node, tree=tree: p((tree.token_ids[node],)), generator))
        passes += 1
    return tokens[1 : num_tokens + 1], passes


def rooted_trees(seed: int) -> Callable[[int], TokenTree]:
    rng = np.random.default_rng(seed)

    def propose(root: int) -> TokenTree:
        shape = random_tree(rng, max_nodes=20, vocab=VOCAB)
        return replace(shape, token_ids=[root, *shape.token_ids[1:]])

    return propose


@pytest.mark.parametrize("make", [dense, of_any_kind])
@pytest.mark.parametrize("seed", range(3))
def test_trees_without_distributions_give_the_text_of_plain_decoding_for_the_same_seed(make, seed: int) -> None:
    """Not only the same law: each emitted token costs the draws that plain decoding would make for it."""
    p = table(make, seed)
    plain, num_passes = decode(p, 300, seed, TokenTree.root)
    speculated, fewer_passes = decode(p, 300, seed, rooted_trees(seed))
    assert speculated == plain
    assert fewer_passes < 0.7 * num_passes == 210.0  # or nothing was speculated


# --- the rule's manners


def test_the_target_is_asked_once_for_each_node_of_the_path_and_for_no_other() -> None:
    """Processors with state rely on it: they see the prefixes of plain decoding, in order."""
    rng = np.random.default_rng(0)
    for seed in range(50):
        tree, asked = random_tree(rng, max_nodes=12), []
        p = table(of_any_kind, seed)
        at_node = at_nodes(tree, p)
        verdict = verify(
            tree, lambda node, asked=asked, at=at_node: asked.append(node) or at(node), make_generator(seed)
        )
        assert asked == verdict.path == tree.path_to(verdict.path[-1])


def test_a_verdict_tells_corrections_from_bonus_tokens() -> None:
    def follow(*tokens: int) -> Table:
        return lambda prefix: OneHot(tokens[len(prefix)], VOCAB)

    chain = TokenTree.chain([ROOT, 1, 2])
    assert verify(chain, at_nodes(chain, follow(1, 2, 3))) == Verdict([0, 1, 2], 3, corrected=False)
    assert verify(chain, at_nodes(chain, follow(1, 3))) == Verdict([0, 1], 3, corrected=True)
    assert verify(chain, at_nodes(chain, follow(2))) == Verdict([0], 2, corrected=True)
    assert verify(TokenTree.root(ROOT), at_nodes(chain, follow(2))) == Verdict([0], 2, corrected=False)
    branching = TokenTree([ROOT, 1, 2, 3], [-1, 0, 0, 2])
    assert verify(branching, at_nodes(branching, follow(2, 3, 1))) == Verdict([0, 2, 3], 1, corrected=False)
    assert verify(branching, at_nodes(branching, follow(1, 3))) == Verdict([0, 1], 3, corrected=False)


@pytest.mark.parametrize(("p", "q"), [(0.5, 0.0), (0.5, -0.1), (0.5, math.nan), (math.nan, 0.5), (-0.1, 0.5)])
def test_impossible_probabilities_are_refused_instead_of_accepting_the_draft(p: float, q: float) -> None:
    with pytest.raises(ValueError, match="drafted token must"):
        accept_prob(p, q)


def test_acceptance_is_the_capped_ratio() -> None:
    assert [accept_prob(p, 0.5) for p in (0.0, 0.25, 0.5, 0.75)] == [0.0, 0.5, 1.0, 1.0]


# --- distributions


def sweep(monkeypatch: pytest.MonkeyPatch, found: Distribution, draws: Iterator[float] | list[float]) -> list[int]:
    """The token for each value of the uniform draw."""
    tokens = []
    for draw in draws:
        monkeypatch.setattr(acceptance, "_uniform", lambda generator, draw=draw: draw)
        tokens.append(found.sample(None))
    return tokens


def test_a_sweep_over_the_uniform_draw_gives_each_token_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.125, 0.125, 0.0])
    for scale in (1.0, 3.0):  # rows may be off one by rounding; the sum is what counts
        tokens = sweep(monkeypatch, Dense(probs * scale), [step / 64 for step in range(64)])
        assert Counter(tokens) == {1: 16, 3: 32, 4: 8, 5: 8}
        assert tokens == sorted(tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_without_probability_is_not_drawn_even_at_the_ends(monkeypatch, dtype: torch.dtype) -> None:
    for seed in range(50):
        inner = random_probs(np.random.default_rng(seed), 1000).to(dtype)
        found = Dense(torch.cat([torch.zeros(3, dtype=dtype), inner, torch.zeros(3, dtype=dtype)]))
        low, high = sweep(monkeypatch, found, [0.0, 1.0 - 2.0**-53])
        assert found.prob(low) > 0.0
        assert found.prob(high) > 0.0


def test_rare_tokens_of_a_large_vocabulary_keep_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """2^-26 beside one half is lost in a float32 sum; in float64 each of the 1024 rare tokens has its interval."""
    found = Dense(torch.cat([torch.tensor([0.5]), torch.full((1024,), 2.0**-26), torch.tensor([0.5])]))
    total = 1.0 + 2.0**-16
    draws = [(0.5 + (rare + 0.5) * 2.0**-26) / total for rare in range(1024)]
    assert sweep(monkeypatch, found, draws) == list(range(1, 1025))


@pytest.mark.parametrize("probs", [[0.0, 0.0], [math.nan, 1.0], [0.5, math.nan]])
def test_probabilities_without_mass_or_with_nan_are_refused(probs: list[float]) -> None:
    with pytest.raises(ValueError, match="probs must be non-negative with a positive sum"):
        Dense(torch.tensor(probs)).sample(make_generator(0))


def test_a_draw_takes_one_number_whatever_the_vocabulary() -> None:
    """So that a text does not depend on how far a model's vocabulary is padded."""
    small = torch.tensor([0.25, 0.5, 0.25])
    padded = torch.cat([small, torch.zeros(1000)])
    generators = make_generator(1), make_generator(1)
    assert all(Dense(small).sample(generators[0]) == Dense(padded).sample(generators[1]) for _ in range(100))


@pytest.mark.parametrize("p", [Dense(torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)), OneHot(2, 4)])
@pytest.mark.parametrize("q_vocab", [3, 4, 6])
def test_a_residual_is_what_the_target_has_beyond_the_draft(p: Distribution, q_vocab: int) -> None:
    for seed in range(5):
        q = Dense(random_probs(np.random.default_rng(seed), q_vocab))
        beyond = [max(0.0, p.prob(token) - q.prob(token)) for token in range(VOCAB)]
        expected = [mass / sum(beyond) for mass in beyond]
        assert p.residual(q).dense().tolist() == pytest.approx(expected, abs=1e-12)


def test_taking_a_residual_leaves_both_distributions_as_they_were() -> None:
    p, q = Dense(torch.tensor([0.5, 0.5])), Dense(torch.tensor([0.9, 0.1]))
    assert p.residual(q).dense().tolist() == [0.0, 1.0]
    assert p.residual(OneHot(0, 2)).dense().tolist() == [0.0, 1.0]
    assert (p.dense().tolist(), q.dense().tolist()) == ([0.5, 0.5], pytest.approx([0.9, 0.1]))


def test_all_ways_of_asking_for_a_probability_agree() -> None:
    for found in (OneHot(2, VOCAB), Dense(random_probs(np.random.default_rng(0)))):
        assert [found.prob(token) for token in range(VOCAB)] == found.dense().tolist()
        assert found.prob(VOCAB + 3) == 0.0
