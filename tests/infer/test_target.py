"""Target rules in the engine: the text has the law of the mixture, in chains, batches and with trimmed vocabularies."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest
import scipy.stats
import torch
from checkpoint import save_tiny, tiny_tokenizer
from speclight.infer.cli import main
from speclight.infer.draft_model import DraftModelDrafter
from speclight.infer.early_exit import EarlyExitDrafter
from speclight.infer.engine import Engine
from speclight.infer.hierarchical import HierarchicalDrafter
from speclight.infer.logitspec import LogitSpecDrafter
from speclight.infer.request import GenerationParams
from speclight.infer.target import Exact, LearnedEnsemble, Lossy, SpecCascade, StaticEnsemble
from speclight.modules.acceptance import Dense
from speclight.modules.bundle import fingerprint_checkpoint
from speclight.modules.ensemble import Lenient, Mixture
from speclight.modules.ensemble_head import EnsembleHead
from speclight.modules.token_tree import TokenTree
from support import TableLM, random_table, tiny_lm

VOCAB, LENGTH, RUNS = 4, 3, 1200
FALSE_ALARM = 1e-5
P_TABLE, Q_TABLE = random_table(VOCAB, 1), random_table(VOCAB, 2)
TRIMMED = Q_TABLE.clone()
TRIMMED[:, 3] = -torch.inf


def drafter_with(rule, table, num_tokens, kind="early-exit"):
    if kind == "draft-model":
        drafter = DraftModelDrafter(TableLM(table), num_tokens, num_blocks=3000)
    else:
        drafter = EarlyExitDrafter(1, num_tokens, head=TableLM.exit(table))
    drafter.target_rule = rule
    return drafter


def texts(rule, table, num_tokens=2, kind="early-exit", **params):
    drafter = drafter_with(rule, table, num_tokens, kind)
    engine = Engine(
        TableLM(P_TABLE),
        drafters=[drafter],
        default_method=drafter.name,
        strict=True,
        num_blocks=4000,
        block_size=4,
        max_num_seqs=512,
    )
    given = GenerationParams(max_new_tokens=LENGTH + 1, temperature=1.0, **params)  # the last one is never drafted
    return engine, engine.generate([[2]] * RUNS, given)


def check_law(done, next_row):
    """Chi-square of the first LENGTH tokens. next_row: (tokens so far, prompt included) -> [vocab] probabilities.

    A text's first token comes with the prompt, without a draft, and so from the target.
    """
    law = {(x,): float(P_TABLE[2].softmax(-1)[x]) for x in range(VOCAB)}
    for _ in range(LENGTH - 1):
        law = {(*k, x): c * float(next_row([2, *k])[x]) for k, c in law.items() for x in range(VOCAB)}
    counts = Counter(tuple(one.token_ids[:LENGTH]) for one in done)
    common = [key for key, chance in law.items() if chance * RUNS >= 5]
    seen, wanted = [counts[key] for key in common], [law[key] * RUNS for key in common]
    rest, left = RUNS - sum(seen), RUNS - sum(wanted)
    cells = ([*seen, rest], [*wanted, left]) if left > 1 else (seen, [w * sum(seen) / sum(wanted) for w in wanted])
    assert scipy.stats.chisquare(*cells).pvalue > FALSE_ALARM


def rows_after(tokens, table=Q_TABLE):
    return P_TABLE[tokens[-1]].softmax(-1), table[tokens[-1]].softmax(-1)


@pytest.mark.parametrize(
    ("kind", "weight", "table", "num_tokens"),
    [
        ("early-exit", 0.4, Q_TABLE, 3),
        ("early-exit", 0.0, TRIMMED, 2),
        ("draft-model", 0.4, Q_TABLE, 1),
        ("draft-model", 0.0, TRIMMED, 2),
    ],
)
def test_static_ensemble_has_the_law_of_the_mixture(kind, weight, table, num_tokens):
    engine, done = texts(StaticEnsemble(weight, bonus=True), table, num_tokens, kind)
    check_law(done, lambda tokens: Mixture(*rows_after(tokens, table), weight).dense())
    engine.check_invariants()
    assert sum(one.stats.distance for one in done) > 0


def test_with_the_bonus_from_the_target_the_law_is_another():
    """The check above can fail: one token in N + 1 comes from p then."""
    _, done = texts(StaticEnsemble(0.0), Q_TABLE, 1)
    with pytest.raises(AssertionError):
        check_law(done, lambda tokens: rows_after(tokens)[1])


def random_head():
    head = EnsembleHead(3, 3, norm=False)
    with torch.no_grad():
        head.output.weight.copy_(torch.tensor([[0.9, 0.0, -0.4, -0.8, 0.0, 0.7]]))
        head.output.bias.fill_(-0.3)
    return head.requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "max_tv", "table"),
    [("early-exit", 1.0, Q_TABLE), ("early-exit", 0.1, Q_TABLE), ("draft-model", 1.0, TRIMMED)],
)
def test_learned_ensemble_has_the_law_of_its_own_weights(kind, max_tv, table):
    head = random_head()

    def row(tokens):
        state = torch.tensor([[tokens[-1], len(tokens) - 1, tokens[-2] if len(tokens) > 1 else 0.0]])
        return Mixture(*rows_after(tokens, table), float(head(state, state)), max_tv).dense()

    _, done = texts(LearnedEnsemble(head, max_tv, bonus=True), table, 2, kind)
    check_law(done, row)
    assert sum(one.stats.distance for one in done) / sum(len(one.token_ids) for one in done) <= max_tv


def test_every_node_has_the_weight_of_its_own_states():
    head, gen = random_head(), torch.Generator().manual_seed(0)
    draft, target = torch.randn(3, 3, generator=gen), torch.randn(4, 3, generator=gen)
    p, q = P_TABLE[0].softmax(-1), Q_TABLE[0].softmax(-1)
    tree = TokenTree.chain([2, 0, 1], [Dense(q), Dense(q), Dense(q)], states=draft)
    bound = LearnedEnsemble(head, bonus=True).bind(tree, target)
    found = [bound(node, Dense(p), tree.drawn_from(node)).weight for node in range(3)]
    assert found == pytest.approx(head(draft, target[:3]).tolist()) and len(set(found)) == 3
    assert bound(3, Dense(p), tree.drawn_from(3)).prob(0) == Dense(p).prob(0), "behind the last draft there is p"


def test_acceptance_is_one_minus_weight_times_distance():
    rule = StaticEnsemble(0.6, bonus=True)
    engine = Engine(
        TableLM(P_TABLE), drafters=[drafter_with(rule, Q_TABLE, 3)], default_method="early-exit", num_blocks=2000
    )
    expected, kept, spread = 0.0, 0, 0.0

    def watch(observations):
        nonlocal expected, kept, spread
        for seen in observations:
            for node in seen.verdict.path[: seen.tree.num_drafted]:
                p, q = rows_after([seen.tree.token_ids[node]])
                chance = 1 - 0.6 * float((p - q).clamp(min=0).sum())
                expected, spread = expected + chance, spread + chance * (1 - chance)
            kept += seen.verdict.num_accepted

    engine.watchers.append(watch)
    engine.generate([[2]], GenerationParams(max_new_tokens=60, temperature=1.0, seed=3, n=64))
    assert abs(kept - expected) < 4.5 * math.sqrt(spread)


@pytest.mark.parametrize("rule", [Lossy(0.4, bonus=True), SpecCascade(0.5, "opt", True), SpecCascade(0.5, bonus=True)])
def test_baselines_have_the_law_that_they_say(rule):
    def row(tokens):
        p, q = rows_after(tokens)
        return (Lenient(p, q, rule.lenience) if isinstance(rule, Lossy) else rule.value(p, q, 1.0)).dense()

    _, done = texts(rule, Q_TABLE, 1)
    if isinstance(rule, Lossy):  # its law holds where a draft is verified: here each second token
        for first in range(VOCAB):
            then = Counter(one.token_ids[1] for one in done if one.token_ids[0] == first)
            expected = [float(x) * then.total() for x in row([2, first])]
            assert scipy.stats.chisquare([then[x] for x in range(VOCAB)], expected).pvalue > FALSE_ALARM
    else:
        check_law(done, row)


RULED = [lambda: EarlyExitDrafter(1, 3), lambda: DraftModelDrafter(tiny_lm(seed=7), 3)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("make", RULED)
def test_weight_one_gives_the_texts_of_the_exact_rule(make, temperature):
    found = []
    for rule in (Exact(), StaticEnsemble(1.0), StaticEnsemble(1.0, bonus=True)):
        drafter = make()
        drafter.target_rule = rule
        engine = Engine(tiny_lm(), drafters=[drafter], default_method=drafter.name, strict=True, num_blocks=100)
        params = GenerationParams(max_new_tokens=30, temperature=temperature, seed=5)
        done = engine.generate([[5, 9, 3], [1, 2]], params)
        found.append([one.token_ids for one in done])
        assert all(one.stats.distance == 0.0 for one in done)
    assert found[0] == found[1]
    assert temperature > 0 or found[0] == found[2]


def ruled_engine(make, model=None, **options) -> Engine:
    drafter = make()
    drafter.target_rule = StaticEnsemble(0.5, bonus=True)
    return Engine(model or tiny_lm(), drafters=[drafter], default_method=drafter.name, strict=True, **options)


@pytest.mark.parametrize("make", RULED)
def test_a_ruled_text_is_the_same_when_it_was_preempted(make):
    crowd = [[(7 * i + j) % 96 for j in range(17)] for i in range(3)]
    params = [GenerationParams(max_new_tokens=24, temperature=1.0, seed=seed) for seed in range(3)]
    roomy, tight = (ruled_engine(make, block_size=1, num_blocks=blocks) for blocks in (400, 64))
    wanted, found = roomy.generate(crowd, params), tight.generate(crowd, params)
    assert sum(one.stats.preemptions for one in found) > 0
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    assert sum(one.stats.distance for one in found) == pytest.approx(sum(one.stats.distance for one in wanted)) != 0
    assert tight.cache.allocator.num_in_use == 0


@pytest.mark.parametrize("make", RULED)
def test_a_ruled_text_ends_at_the_context(make):
    """The draft runs a token further than its proposal; there is no place for it behind the last one."""
    engine = ruled_engine(make, model=tiny_lm(max_position_embeddings=32), num_blocks=40, block_size=4)
    done = engine.generate([[1 + i for i in range(26)]] * 2, GenerationParams(temperature=1.0, seed=1))
    assert [(len(one.token_ids), one.finish_reason) for one in done] == [(6, "length")] * 2
    engine.check_invariants()


def test_a_ruled_draft_model_with_a_short_context_stops_drafting_and_the_text_goes_on():
    draft = tiny_lm(seed=7, max_position_embeddings=16)
    engine = ruled_engine(lambda: DraftModelDrafter(draft, 3), num_blocks=40)
    (done,) = engine.generate([[1, 2, 3]], GenerationParams(max_new_tokens=40, temperature=1.0, seed=1))
    assert len(done.token_ids) == 40 and done.stats.drafted > 0 and done.stats.steps_without_draft > 20
    assert 0 < done.stats.distance < 14  # what no draft was there for is the target's


@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_text_is_the_argmax_of_the_mixture(batch):
    """At temperature 1, as transformers does; the bonus token is the target's own."""
    model = tiny_lm()
    drafter = EarlyExitDrafter(1, 3)
    drafter.target_rule = StaticEnsemble(0.5)
    engine = Engine(model, drafters=[drafter], default_method="early-exit", strict=True, num_blocks=100)
    checked = Counter()
    rows = []

    def watch(observations):
        for seen in observations:
            for node in seen.verdict.path:
                p, q = seen.logits[node].softmax(-1), seen.tree.drawn_from(node)
                v = p if q is None else 0.5 * p + 0.5 * q.probs
                rows.append(
                    (seen.sequence.request_id, int(v.argmax()), q is None or int(p.argmax()) == int(v.argmax()))
                )

    engine.watchers.append(watch)
    prompts = [[5, 9, 3, index] for index in range(batch)]
    done = engine.generate(prompts, GenerationParams(max_new_tokens=30))
    for one in done:
        mine = [row for row in rows if row[0] == one.request_id][: len(one.token_ids)]
        assert one.token_ids == [token for _, token, _ in mine]
        checked["differ"] += sum(not same for *_, same in mine)
        assert one.stats.distance == pytest.approx(sum(not same for *_, same in mine))
    assert checked["differ"] > 0


def test_the_greedy_case_of_transformers_pull_request():
    from speclight.modules.acceptance import Peak
    from speclight.modules.token_tree import TokenTree

    p, q = torch.tensor([0.50, 0.49, 0.01]), torch.tensor([0.10, 0.89, 0.01])
    tree = TokenTree.chain([0, 1], [Peak(1, 3, q)])
    found = StaticEnsemble(0.5).bind(tree, torch.zeros(2, 1))(0, Peak(0, 3, p), Peak(1, 3, q))
    assert found.sample(None) == 1 and found.distance == 1.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "rule",
    [StaticEnsemble(0.0), StaticEnsemble(0.3, bonus=True), Lossy(0.9), SpecCascade(1.0, "opt"), SpecCascade(1.0)],
)
def test_a_banned_token_is_never_emitted(rule, temperature):
    """The draft proposes it all the time: only the target's logits processor bans it, which drafts do not run."""

    def ban(_, scores):
        return scores.index_fill(1, torch.tensor([0]), -torch.inf)

    keen = torch.zeros_like(Q_TABLE)
    keen[:, 0] = 3.0
    engine = Engine(
        TableLM(P_TABLE), drafters=[drafter_with(rule, keen, 2)], default_method="early-exit", num_blocks=500
    )
    params = GenerationParams(max_new_tokens=20, temperature=temperature, logits_processors=(ban,))
    done = engine.generate([[2]] * 20, params)
    assert all(one.error is None for one in done)
    assert not any(0 in one.token_ids for one in done)


def test_the_intermediate_stage_stays_exact_and_the_last_is_ruled():
    head = TableLM.exit(Q_TABLE)
    inner = EarlyExitDrafter(1, 2, head=TableLM.exit(random_table(VOCAB, 9)))
    drafter = HierarchicalDrafter(inner, 1, window=2, head=head, wait=1.0)
    drafter.target_rule = StaticEnsemble(0.0)
    engine = Engine(TableLM(P_TABLE), drafters=[drafter], default_method="hispec", strict=True, num_blocks=4000)
    done = engine.generate([[2]] * RUNS, GenerationParams(max_new_tokens=LENGTH + 1, temperature=1.0))
    check_law(done, lambda tokens: rows_after(tokens)[1])  # windows of at least two tokens, all of them kept


def test_what_was_looked_up_is_verified_exactly():
    found = []
    for rule in (None, StaticEnsemble(0.1)):
        engine = Engine(tiny_lm(), drafters=[LogitSpecDrafter()], target_rule=rule, num_blocks=100)
        params = GenerationParams(method="logitspec", max_new_tokens=30, temperature=1.0, seed=1)
        found.append(engine.generate([[5, 9, 3, 5, 9]], params)[0].token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StaticEnsemble(1.5), "weight"),
        (lambda: StaticEnsemble(0.5, max_tv=-1), "max_tv"),
        (lambda: Lossy(1.0), "lenience"),
        (lambda: SpecCascade(2.0), "alpha"),
        (lambda: SpecCascade(0.5, "chow"), "rule must be one of opt, token"),
    ],
)
def test_settings_outside_their_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_states_of_another_size_end_the_text_with_an_error_that_says_so():
    drafter = drafter_with(LearnedEnsemble(EnsembleHead(5, 5)), Q_TABLE, 2)
    engine = Engine(TableLM(P_TABLE), drafters=[drafter], default_method="early-exit", num_blocks=50)
    (done,) = engine.generate([[2]], GenerationParams(max_new_tokens=8, temperature=1.0))
    assert done.finish_reason == "error" and "hidden sizes (5, 5)" in (done.error or "")


def test_a_rule_is_an_engine_wide_choice_where_it_is_given_to_the_engine():
    rule = StaticEnsemble(0.2)
    engine = Engine(TableLM(P_TABLE), drafters=[EarlyExitDrafter(1)], target_rule=rule, num_blocks=50)
    assert all(drafter.target_rule is rule for drafter in engine.drafters.values())


# --- on the command line ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model, and a head for drafts from its own exit after layer 1."""
    folder = tmp_path_factory.mktemp("home")
    save_tiny(folder / "model")
    fingerprint = fingerprint_checkpoint(folder / "model")
    draft = {"method": "early-exit", "layer": 1, "bundle": None, "digest": None}
    EnsembleHead(32, 32).to_bundle(fingerprint, draft, "model").save(folder / "head")
    return folder


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--method", "early-exit", "--target.weight", "0.1"], "target.weight is read by target.rule static"),
        (["--method", "early-exit", "--target.rule", "lossy", "--target.max-tv", "0.1"], "target.max_tv is read by"),
        (["--method", "early-exit", "--target.rule", "static", "--target.weight", "2"], "target.weight must be in"),
        (["--method", "logitspec", "--target.rule", "static"], "needs a method whose drafts are drawn"),
        (["--method", "diversed"], "need --target.head"),
        (["--method", "diversed", "--target.head", "HEAD", "--target.rule", "lossy"], "needs a method whose drafts"),
        (
            ["--method", "hispec", "--target.rule", "static", "--target.bonus", "ensemble"],
            "target.bonus ensemble needs",
        ),
        (["--method", "early-exit", "--target.head", "HEAD"], "target.head is read by"),
        (
            ["--method", "diversed", "--target.head", "HEAD", "--draft-layer", "2"],
            "trained with the exit after layer 1",
        ),
        (
            ["--method", "diversed", "--target.head", "HEAD", "--early-exit.layer", "2"],
            "early_exit.layer must be that of target.head, 1 or left out; got 2",
        ),
        (
            ["--method", "early-exit", "--target.head", "HEAD", "--target.rule", "learned", "--early-exit.layer", "2"],
            "trained with the exit after layer 1",
        ),
        (["--method", "hispec", "--target.head", "HEAD", "--target.rule", "learned"], "trained with method early-exit"),
        (["--method", "diversed", "--target.head", "MODEL"], "is not a bundle|bundle.json|lacks"),
    ],
)
def test_a_mistake_is_one_line_before_weights_are_read(home, capsys, monkeypatch, flags, message):
    monkeypatch.setattr("speclight.infer.loading.load_transformers", None)  # nothing may be loaded
    named = {"HEAD": str(home / "head"), "MODEL": str(home / "model")}
    given = [named.get(flag, flag) for flag in flags]
    assert main(["generate", "--model", str(home / "model"), "--prompt", "abc", *given]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1


def test_a_distance_counts_only_what_was_emitted():
    """A stop string cuts a block of accepted drafts: what lay behind it was verified, and is no part of the text."""
    model, tokenizer = tiny_lm(), tiny_tokenizer()
    drafter = EarlyExitDrafter(1, 4)
    drafter.target_rule = StaticEnsemble(0.0)
    engine = Engine(model, tokenizer, drafters=[drafter], default_method="early-exit", num_blocks=200, strict=True)
    seen_at = {}

    def watch(observations):
        for seen in observations:
            for offset, node in enumerate(seen.verdict.path):
                p, q = seen.logits[node].softmax(-1), seen.tree.drawn_from(node)
                far = 0.0 if q is None else float((p - q.dense()).clamp(min=0).sum())
                seen_at[seen.sequence.index, seen.sequence.num_emitted + offset] = far

    engine.watchers.append(watch)
    params = GenerationParams(max_new_tokens=40, temperature=1.0, seed=3, stop=tuple("abcdefghij"), n=40)
    done = engine.generate([[5, 9, 3]], params)
    cut = 0
    for one in done:
        expected = sum(seen_at[one.index, place] for place in range(len(one.token_ids)))
        assert one.stats.distance == pytest.approx(expected)
        cut += (one.index, len(one.token_ids)) in seen_at
    assert cut > 5  # texts in which more was verified than emitted
