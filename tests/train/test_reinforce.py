"""REINFORCE++ by hand, across ranks, and against the enumerated gradient of what it maximises."""

from __future__ import annotations

import math
import threading
from itertools import product

import pytest
import torch
from speclight.infer.early_exit import EarlyExitDrafter
from speclight.infer.engine import Engine
from speclight.modules.ensemble_head import EnsembleHead
from speclight.train.reinforce import (
    Budget,
    Reinforce,
    centred_by_group,
    clipped,
    log_mixture,
    normalised,
    reward_to_go,
)
from speclight.train.rollout import RolloutSampler
from support import TableLM, random_table


def test_three_tokens_by_hand():
    """Two texts, of two tokens and one: rewards 1 and 0, KL costs .1, .2 and .4.

    Reward to go: 1 - .3, 1 - .2, 0 - .4. Mean 11/30, variance ((.7^2 + .8^2 + .4^2) / 3) - (11/30)^2.
    """
    found = reward_to_go(torch.tensor([1.0, 0.0]), torch.tensor([0, 0, 1]), torch.tensor([0.1, 0.2, 0.4]))
    torch.testing.assert_close(found, torch.tensor([0.7, 0.8, -0.4]))
    mean, variance = 11 / 30, (0.49 + 0.64 + 0.16) / 3 - (11 / 30) ** 2
    expected = [(value - mean) / math.sqrt(variance) for value in (0.7, 0.8, -0.4)]
    torch.testing.assert_close(normalised(found), torch.tensor(expected))


def test_the_reference_costs_what_straying_from_it_does():
    """k1: beta (log v - log p) in the reward, of this and all later tokens."""
    log_v, log_p = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -2.0, -0.1])
    found = Reinforce(kl=0.2).advantages(
        torch.tensor([1.0, 0.0]), torch.tensor([0, 1]), torch.tensor([0, 0, 1]), log_v, log_p
    )
    by_hand = normalised(torch.tensor([1.0 - 0.2 * 0.5, 1.0, 0.0 + 0.2 * 0.4]))
    torch.testing.assert_close(found, by_hand)


def test_the_baseline_variant_compares_a_prompts_own_answers():
    rewards, groups = torch.tensor([1.0, 0.0, 0.8, 0.6]), torch.tensor([7, 7, 3, 3])
    torch.testing.assert_close(centred_by_group(rewards, groups), torch.tensor([0.5, -0.5, 0.1, -0.1]))
    one = Reinforce("reinforce++-baseline", kl=0.5)
    log_v, log_p = torch.zeros(4), torch.tensor([0.0, 0.2, -0.4, 0.0])
    found = one.advantages(rewards, groups, torch.arange(4), log_v, log_p)
    torch.testing.assert_close(found, torch.tensor([0.5, -0.5, 0.1, -0.1]) / math.sqrt(0.13))
    torch.testing.assert_close(one.penalty(log_v, log_p), 0.25 * log_p.square())  # k2, in the loss
    assert not Reinforce(kl=0.5).penalty(log_v, log_p).any()


def test_advantages_are_normalised_over_all_ranks():
    values = torch.randn(9, generator=torch.Generator().manual_seed(0))
    whole, ranks, results = normalised(values), (values[:2], values[2:]), {}
    assert abs(float(whole.mean())) < 1e-6 and float(whole.std(unbiased=False)) == pytest.approx(1.0)
    barrier, shared = threading.Barrier(2), [None, None]

    def run(rank):
        def reduce(mine):
            shared[rank] = mine
            barrier.wait()
            total = [sum(pair) for pair in zip(*shared, strict=True)]
            barrier.wait()
            return total

        results[rank] = normalised(ranks[rank], reduce)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(torch.cat([results[0], results[1]]), whole)


@pytest.mark.parametrize("reward", [0.0, 0.3, 1.0])
def test_equal_rewards_teach_nothing_and_break_nothing(reward):
    rewards, texts = torch.full((5,), reward), torch.tensor([0, 0, 1, 2, 3, 4, 4])
    found = Reinforce().advantages(rewards, torch.arange(5), texts, torch.zeros(7), torch.zeros(7))
    assert torch.equal(found, torch.zeros(7))
    none, no_text = torch.zeros(0), torch.zeros(0, dtype=torch.long)  # a rank that has nothing
    for one in (Reinforce(), Reinforce(kl=0.1), Reinforce("reinforce++-baseline", kl=0.1)):
        assert one.advantages(none, no_text, no_text, none, none).shape == (0,)


def test_the_clip_bounds_only_what_goes_too_far():
    log_prob = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5]))
    surrogate, clips = clipped(log_prob, torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.2)
    torch.testing.assert_close(surrogate, torch.tensor([-1.2, 1.5, -0.5, 0.8]))
    assert clips.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_the_gradient_of_the_mixture():
    weight = torch.tensor([0.3], requires_grad=True)
    log_mixture(weight, torch.tensor([0.5]), torch.tensor([0.2])).backward()
    assert float(weight.grad) == pytest.approx((0.5 - 0.2) / (0.3 * 0.5 + 0.7 * 0.2))


def test_a_budget_turns_lambda_the_right_way():
    near, far = Budget("tv", 0.1), Budget("reward", 0.5)
    assert near.turned(0.05, 0.0, tv=0.05) > 0.05 > near.turned(0.05, 0.0, tv=0.2) > 0.0
    assert far.turned(0.05, 0.6, 0.0) > 0.05 > far.turned(0.05, 0.4, 0.0)
    assert near.turned(0.05, 0.0, tv=50.0) == pytest.approx(0.05 * math.exp(-0.1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Reinforce("ppo"), "estimator must be"),
        (lambda: Reinforce(clip=0.0), r"clip must be in \(0, 1\)"),
        (lambda: Reinforce(kl=-1.0), "kl must be at least 0"),
        (lambda: Budget("kl", 0.1), "measure must be tv or reward"),
        (lambda: Budget("tv", 0.0), "value must be above 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- against enumeration -------------------------------------------------------------------------------------------

VOCAB, TEXTS = 4, 4000
P, Q = random_table(VOCAB, 1).softmax(-1), random_table(VOCAB, 2).softmax(-1)


def reward(tokens):
    return float(tokens[1] == 0) + 0.5 * float(tokens[2] == tokens[1])


def small_head():
    head = EnsembleHead(3, 3, norm=False)
    with torch.no_grad():
        head.output.weight.copy_(torch.tensor([[0.5, -0.3, 0.2, -0.4, 0.1, 0.3]]))
        head.output.bias.fill_(0.1)
    return head


def exact_gradient(head):
    """Of E[R] over all texts of three tokens, the first of them the target's, by enumeration."""
    total = torch.zeros(())
    for tokens in product(range(VOCAB), repeat=3):
        law = P[2, tokens[0]].float()
        for position in (1, 2):
            before = tokens[position - 2] if position > 1 else 2
            state = torch.tensor([[tokens[position - 1], float(position), before]])
            w = head(state, state)[0]
            law = law * (
                w * P[tokens[position - 1], tokens[position]] + (1 - w) * Q[tokens[position - 1], tokens[position]]
            )
        total = total + law.float() * reward(tokens)
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(head.output.parameters()))])


def test_the_gradient_is_that_of_the_exact_objective():
    """Rollouts by the engine, advantages by REINFORCE++; per-text gradients give mean and standard error."""
    head = small_head()
    drafter = EarlyExitDrafter(1, 2, head=TableLM.exit(random_table(VOCAB, 2)))
    engine = Engine(
        TableLM(random_table(VOCAB, 1)),
        drafters=[drafter],
        num_blocks=4000,
        block_size=4,
        max_num_seqs=512,
        strict=True,
    )
    sampler = RolloutSampler(engine, "early-exit", head)
    done, rollouts = sampler.sample([[2]] * (TEXTS // 4), [1024 * i for i in range(TEXTS // 4)], 4, 4)
    rollouts.rewards = torch.tensor([reward(one.token_ids) for one in done])
    advantages = Reinforce().advantages(
        rollouts.rewards, rollouts.groups, rollouts.text, rollouts.log_prob, rollouts.p.log()
    )
    scale = rollouts.rewards[rollouts.text].std(unbiased=False)
    counts = torch.bincount(rollouts.text, minlength=TEXTS)
    assert set(counts.tolist()) == {2, 3}  # of four tokens the first is the target's own, and the last unless a bonus
    weight = head(rollouts.draft, rollouts.target)
    now = log_mixture(weight, rollouts.p, rollouts.q)
    torch.testing.assert_close(now.detach(), rollouts.log_prob, rtol=1e-5, atol=1e-6)
    surrogate, _ = clipped(now, rollouts.log_prob, advantages, 0.2)
    inputs = torch.cat((rollouts.draft.float(), rollouts.target.float(), torch.ones(len(rollouts), 1)), dim=1)
    (slopes,) = torch.autograd.grad(surrogate.sum(), weight)
    per_token = (-slopes * weight * (1 - weight)).detach()[:, None] * inputs * scale
    per_text = torch.zeros(TEXTS, 7).index_add_(0, rollouts.text, per_token)
    error = per_text.std(dim=0) / math.sqrt(TEXTS)
    z = (per_text.mean(dim=0) - exact_gradient(head).detach()) / error
    assert z.abs().max() < 4.5, z
    assert (exact_gradient(head).abs() / error).max() > 8  # there is something to find
