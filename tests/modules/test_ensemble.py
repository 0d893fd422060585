"""What comes out of the rule under a mixture is the mixture, to 1e-12; a constant weight is transformers'."""

from __future__ import annotations

import pytest
import torch
from speclight.modules import acceptance
from speclight.modules.acceptance import Dense, OneHot, accept_prob, verify
from speclight.modules.ensemble import Lenient, Mixture, aligned, cascade_opt, cascade_token, total_variation
from speclight.modules.token_tree import TokenTree
from transformers.generation.utils import _speculative_sampling


def rows(seed: int, size: int = 7, banned: tuple[int, ...] = (), trimmed: tuple[int, ...] = ()):
    """(p, q), float64: p without the banned tokens, q without those that its vocabulary lacks."""
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.randn(2, size, generator=generator, dtype=torch.float64).mul(2).unbind()
    p[list(banned)], q[list(trimmed)] = -torch.inf, -torch.inf
    return p.softmax(-1), q.softmax(-1)


def emitted(v, q):
    """The law of the token that the rule emits for one draft from q, and how often the draft is kept."""
    kept = [float(q[x]) * accept_prob(v.prob(x), float(q[x])) if q[x] > 0 else 0.0 for x in range(len(q))]
    left = 1.0 - sum(kept)
    return torch.tensor(kept, dtype=torch.float64) + left * v.residual(Dense(q)).dense(), sum(kept)


@pytest.mark.parametrize("weight", [0.0, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("banned", "trimmed"), [((), ()), ((1, 4), ()), ((), (0, 5)), ((1, 4), (0, 5))])
def test_the_output_is_the_mixture_and_never_what_is_forbidden(seed, weight, banned, trimmed):
    p, q = rows(seed, banned=banned, trimmed=trimmed)
    v = Mixture(p, q, weight)
    law, kept = emitted(v, q)
    allowed = q.clone()
    allowed[list(banned)] = 0.0
    expected = weight * p + (1 - weight) * (allowed + (1 - allowed.sum()) * p)
    torch.testing.assert_close(law, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(v.dense(), expected, rtol=0, atol=1e-12)
    assert not law[list(banned)].any() and all(v.prob(token) == 0.0 for token in banned)
    assert v.distance == pytest.approx(total_variation(p, expected), abs=1e-12)
    if not banned:
        assert kept == pytest.approx(1 - weight * total_variation(p, q), abs=1e-12)
        assert v.distance == pytest.approx((1 - weight) * total_variation(p, q), abs=1e-12)


def test_weight_one_is_the_target_bit_for_bit():
    p, q = (row.float() for row in rows(5))
    v, exact = Mixture(p, q, 1.0), Dense(p)
    assert all(v.prob(x) == exact.prob(x) for x in range(len(p)))
    assert torch.equal(v.residual(Dense(q)).dense(), exact.residual(Dense(q)).dense())
    assert v.distance == 0.0


@pytest.mark.parametrize("bound", [0.0, 0.01, 0.1, 1.0])
def test_the_distance_never_exceeds_its_bound(bound):
    for seed in range(20):
        p, q = rows(seed)
        v = Mixture(p, q, 0.1, max_tv=bound)
        law, _ = emitted(v, q)
        assert total_variation(p, law) <= bound + 1e-12
        assert v.distance == pytest.approx(min(bound, 0.9 * total_variation(p, q)), abs=1e-12)


def test_a_rejection_between_equal_rows_falls_back_to_the_target():
    p, _ = rows(0)
    assert torch.equal(Mixture(p, p, 0.5).residual(Dense(p)).dense(), p)


@pytest.mark.parametrize("size", [5, 7, 9])
def test_a_drafts_row_is_brought_to_the_targets_vocabulary(size):
    p, _ = rows(0)
    _, q = rows(1, size)
    v = Mixture(p, aligned(q, 7), 0.3)
    torch.testing.assert_close(v.dense().sum(), torch.tensor(1.0, dtype=torch.float64))
    assert len(v.dense()) == 7 and v.forbidden == pytest.approx(float(q[7:].sum()), abs=1e-12)


@pytest.mark.parametrize("weight", [-0.1, 1.1, float("nan")])
def test_a_weight_that_is_none_is_refused(weight):
    with pytest.raises(ValueError, match=r"weight must be in \[0, 1\]"):
        Mixture(*rows(0), weight)


@pytest.mark.parametrize("lenience", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("seed", range(4))
def test_lenience_knows_the_law_of_what_it_emits(seed, lenience):
    p, q = rows(seed, trimmed=(2,))
    v = Lenient(p, q, lenience)
    law, kept = emitted(v, q)
    torch.testing.assert_close(law, v.dense(), rtol=0, atol=1e-12)
    assert kept == pytest.approx(float(torch.minimum(q, p / (1 - lenience)).sum()), abs=1e-12)
    assert v.distance == pytest.approx(total_variation(p, law), abs=1e-12)
    if lenience == 0.0:
        torch.testing.assert_close(law, p, rtol=0, atol=1e-12)


def test_cascades_by_hand():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.45, 0.45])
    assert total_variation(p, q) == pytest.approx(0.4)
    assert torch.equal(cascade_opt(p, q, 0.1), p)  # 0.45 < 0.5 - 0.04
    assert torch.equal(cascade_opt(p, q, 0.2), q)  # 0.45 >= 0.5 - 0.08
    torch.testing.assert_close(cascade_token(p, q, 0.4), torch.tensor([0.1, 0.45, 0.0]) + 0.45 * p)  # p >= 0.3
    torch.testing.assert_close(cascade_token(p, q, 0.0), torch.tensor([0.1, 0.0, 0.0]) + 0.9 * p)


def test_the_case_of_transformers_pull_request():
    p, q = torch.tensor([0.40, 0.60]), torch.tensor([0.80, 0.20])
    assert Mixture(p, q, 0.7).prob(0) / 0.80 == pytest.approx(0.65)


@pytest.mark.parametrize("weight", [0.3, 0.7, None])
def test_a_constant_weight_accepts_what_transformers_accepts(weight, monkeypatch):
    """The same uniforms through both implementations: equally many matches, in every one of 300 proposals."""
    matches = []
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        p_logits = torch.randn(5, 6, generator=generator, dtype=torch.float64)
        q_logits = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        p, q = p_logits.softmax(-1), q_logits.softmax(-1)
        drafted = torch.multinomial(q, 1, generator=generator).squeeze(1)
        uniforms = torch.rand(4, generator=generator, dtype=torch.float64)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "rand_like", lambda like, u=uniforms: u.view_as(like))
            _, theirs = _speculative_sampling(drafted[None], q_logits[None], 4, p_logits[None], weight)
        with monkeypatch.context() as patch:
            draws = iter([*uniforms.tolist()])
            patch.setattr(acceptance, "_uniform", lambda _, d=draws: next(d, 0.5))
            tree = TokenTree.chain([0, *drafted.tolist()], [Dense(row) for row in q])

            def target(node, p=p, q=q):
                return Dense(p[node]) if weight is None or node == 4 else Mixture(p[node], q[node], weight)

            ours = verify(tree, target).num_accepted
        assert ours == int(theirs)
        matches.append(ours)
    assert len(set(matches)) == 5  # all lengths occurred


def test_one_hot_is_still_one_hot():
    assert acceptance.Peak(2, 3, torch.tensor([0.1, 0.2, 0.7])).prob(2) == 1.0
    assert isinstance(acceptance.Peak(2, 3, torch.tensor([0.1, 0.2, 0.7])), OneHot)
