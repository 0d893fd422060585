"""Exit losses against slow float64 references, their sums over chunks and micro-batches, LayerSkip's schedules."""

from __future__ import annotations

import math

import pytest
import torch
from speclight.train.losses import (
    ExitLoss,
    LossSum,
    agrees,
    depth_scale,
    exit_loss,
    exit_scales,
    gradual,
    kept_rows,
    layer_dropout_rates,
    mean_loss,
    rotational,
    sum_over_chunks,
    time_scale,
)
from torch import Tensor

VOCAB, ROWS = 13, 7
DRAFT_IDS = [1, 2, 5, 8, 12]
NAMES = ("forward_kl", "reverse_kl", "total_variation", "argmax", "data")


def only(name: str, weight: float = 1.0) -> ExitLoss:
    return ExitLoss(**{"forward_kl": 0.0, name: weight})


def case(draft: bool, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(exit logits, final logits, next ids, ids of the exit's logits)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor(DRAFT_IDS if draft else list(range(VOCAB)))
    exits = 2 * torch.randn(ROWS, len(ids), generator=generator, dtype=torch.float64)
    final = 2 * torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64)
    return exits.to(dtype), final.to(dtype), torch.arange(ROWS), ids


def reference(name: str, exits: Tensor, final: Tensor, next_ids: Tensor, ids: Tensor) -> Tensor:
    """The summed loss, row by row and token by token, over the whole vocabulary in float64."""
    total = none = exits.new_zeros(())
    for row in range(len(exits)):
        inside = exits[row].exp() / exits[row].exp().sum()
        q = {token: inside[place] for place, token in enumerate(ids.tolist())}
        p = (final[row].exp() / final[row].exp().sum()).tolist()
        mass = sum(p[token] for token in q)
        label = int(next_ids[row]) if name == "data" else max(range(len(p)), key=p.__getitem__)
        total = (
            total
            + {
                "forward_kl": lambda q=q, p=p, m=mass: m * sum(p[t] / m * (math.log(p[t] / m) - q[t].log()) for t in q),
                "reverse_kl": lambda q=q, p=p: sum(q[t] * (q[t].log() - math.log(p[t])) for t in q),
                "total_variation": lambda q=q, p=p: sum(abs(q.get(t, none) - p[t]) for t in range(len(p))) / 2,
                "argmax": lambda q=q, label=label: -q[label].log() if label in q else 0.0,
                "data": lambda q=q, label=label: -q[label].log() if label in q else 0.0,
            }[name]()
        )
    return total


def gradient(total: Tensor, *wanted: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(total, wanted)


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_each_loss_equals_its_definition_token_by_token(name: str, draft: bool) -> None:
    exits, final, next_ids, ids = case(draft)
    exits.requires_grad_()
    expected = reference(name, exits, final, next_ids, ids)
    found = exit_loss(only(name), exits, final, next_ids, draft_ids=ids if draft else None)
    assert found.num_rows == ROWS
    torch.testing.assert_close(found.total, expected)
    torch.testing.assert_close(gradient(found.total, exits), gradient(expected, exits))


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_vocabulary_of_everything_changes_nothing(name: str) -> None:
    exits, final, next_ids, ids = case(draft=False)
    exits.requires_grad_()
    plain = exit_loss(only(name), exits, final, next_ids).total
    named = exit_loss(only(name), exits, final, next_ids, draft_ids=ids).total
    torch.testing.assert_close(plain, named)
    torch.testing.assert_close(gradient(plain, exits), gradient(named, exits))


def test_weights_add_up() -> None:
    exits, final, next_ids, ids = case(draft=True)
    weights = dict(zip(NAMES, (1.0, 0.5, 2.0, 0.1, 3.0), strict=True))
    parts = [exit_loss(only(name), exits, final, next_ids, draft_ids=ids).total * weights[name] for name in NAMES]
    found = exit_loss(ExitLoss(**weights), exits, final, next_ids, draft_ids=ids).total
    torch.testing.assert_close(found, torch.stack(parts).sum())


def test_total_variation_is_one_minus_the_probability_that_a_draft_is_accepted() -> None:
    """Fails when the target's mass outside of the draft vocabulary is left out."""
    exits, final, _, ids = case(draft=True)
    q = torch.zeros(ROWS, VOCAB, dtype=torch.float64).index_copy_(1, ids, exits.softmax(1))
    accepted = torch.minimum(q, final.softmax(1)).sum()
    torch.testing.assert_close(exit_loss(only("total_variation"), exits, final, draft_ids=ids).total, ROWS - accepted)


def test_forward_kl_is_zero_exactly_at_the_renormalised_target() -> None:
    _, final, _, ids = case(draft=True)
    best = final[:, ids].clone().requires_grad_()
    total = exit_loss(only("forward_kl"), best, final, draft_ids=ids).total
    assert abs(total.item()) < 1e-12
    assert gradient(total, best)[0].abs().max() < 1e-12


def test_rows_that_the_draft_vocabulary_cannot_say_do_not_pull() -> None:
    """A row weighs by the target's mass inside; a target outside is a loss of zero that still counts in the mean."""
    exits, final, _, ids = case(draft=True)
    final[0] = -40.0
    final[0, 0] = 40.0  # certain, and not in DRAFT_IDS
    exits.requires_grad_()
    for name in ("forward_kl", "argmax"):
        found = exit_loss(only(name), exits, final, draft_ids=ids)
        (pull,) = gradient(found.total, exits)
        assert pull[0].abs().max() < 1e-12 < pull[1:].abs().max()
        assert found.num_rows == ROWS


def test_agreement_outside_the_draft_vocabulary_is_none() -> None:
    final = torch.tensor([[0.0, 9.0, 0.0], [0.0, 0.0, 9.0], [9.0, 0.0, 0.0]])
    exits = torch.tensor([[9.0, 0.0], [0.0, 9.0], [9.0, 0.0]])
    assert agrees(exits, final, torch.tensor([1, 2])).tolist() == [1.0, 1.0, 0.0]


def test_the_final_layer_gets_no_gradient() -> None:
    exits, final, next_ids, _ = case(draft=False)
    exits.requires_grad_()
    final.requires_grad_()
    total = exit_loss(ExitLoss(1.0, 1.0, 1.0, 1.0, 1.0), exits, final, next_ids).total
    assert not gradient(total, final)[0].any()


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_logits_near_convergence_give_the_float64_gradient(name: str) -> None:
    """Divergences computed in bfloat16 are off by 13 %. Rounding the gradient itself costs at most 0.4 %."""
    generator = torch.Generator().manual_seed(0)
    final = (3 * torch.randn(4, 32_000, generator=generator)).bfloat16()
    exits = (final.float() + 0.05 * torch.randn(4, 32_000, generator=generator)).bfloat16().requires_grad_()
    next_ids = torch.randint(32_000, (4,), generator=generator)
    exact = exits.detach().double().requires_grad_()
    expected = gradient(exit_loss(only(name), exact, final.double(), next_ids).total, exact)[0]
    total = exit_loss(only(name), exits, final, next_ids).total
    assert total.dtype == torch.float32
    found = gradient(total, exits)[0].double()
    assert (found - expected).norm() < 0.01 * expected.norm()


def test_micro_batches_of_one_and_nine_tokens_equal_one_batch_of_ten() -> None:
    """Fails for a mean of means."""
    weight = torch.randn(4, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    hidden = torch.randn(10, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    final = torch.randn(10, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    whole = exit_loss(ExitLoss(), hidden @ weight, final)
    parts = [exit_loss(ExitLoss(), hidden[rows] @ weight, final[rows]) for rows in (slice(1), slice(1, 10))]
    torch.testing.assert_close(mean_loss(parts), mean_loss([whole]))
    torch.testing.assert_close(gradient(mean_loss(parts), weight), gradient(mean_loss([whole]), weight))


def test_a_batch_with_nothing_supervised_gives_zero_and_zero_gradients() -> None:
    """A rank that has none still takes part in the exchange of gradients. Fails as NaN where a mean is taken first."""
    exits, final, next_ids, _ = case(draft=False)
    exits.requires_grad_()
    found = exit_loss(ExitLoss(data=1.0), exits, final, next_ids, mask=torch.zeros(ROWS, dtype=torch.bool))
    assert mean_loss([found]) == 0.0 and found.num_rows == 0
    assert gradient(mean_loss([found]), exits)[0].tolist() == torch.zeros_like(exits).tolist()


def test_masked_positions_do_not_matter_even_when_they_are_not_finite() -> None:
    exits, final, next_ids, _ = case(draft=False)
    mask = torch.tensor([True, False, True, True, False, True, False])
    kept = exit_loss(ExitLoss(data=1.0), exits[mask], final[mask], next_ids[mask])
    exits[~mask], final[~mask] = math.nan, math.inf
    exits.requires_grad_()
    found = exit_loss(ExitLoss(data=1.0), exits, final, next_ids, mask)
    torch.testing.assert_close(found, kept)
    assert not gradient(found.total, exits)[0][~mask].any()


# --- chunks ------------------------------------------------------------------------------------------------------


def chunked(chunk_rows: int, head: torch.nn.Linear, hidden: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
    loss = ExitLoss(argmax=0.1)

    def row_losses(states: Tensor, target: Tensor) -> Tensor:
        logits = head(states)
        return torch.stack([loss.rows(logits, target), agrees(logits, target)], 1)

    return sum_over_chunks(row_losses, [hidden, final], chunk_rows)


def head_case(dtype: torch.dtype = torch.float64) -> tuple[torch.nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    head = torch.nn.Linear(4, VOCAB, dtype=dtype)
    return head, torch.randn(10, 4, dtype=dtype, requires_grad=True), torch.randn(10, VOCAB, dtype=dtype)


@pytest.mark.parametrize("chunk_rows", [1, 3, 10, 512])
def test_chunks_change_neither_the_loss_nor_any_gradient(chunk_rows: int) -> None:
    """Also of the parameters that the function reads without being told, and when the loss is scaled afterwards."""
    head, hidden, final = head_case()
    logits = head(hidden)
    expected = ExitLoss(argmax=0.1).rows(logits, final).sum()
    total, measured = chunked(chunk_rows, head, hidden, final)
    torch.testing.assert_close(total, expected)
    assert measured.tolist() == [agrees(logits, final).sum().item()] and not measured.requires_grad
    wanted = (hidden, head.weight, head.bias)
    torch.testing.assert_close(gradient(0.25 * total, *wanted), gradient(0.25 * expected, *wanted))


def test_without_gradients_chunks_give_the_same_sums() -> None:
    head, hidden, final = head_case()
    total, measured = chunked(3, head, hidden, final)
    with torch.no_grad():
        alone, counted = chunked(3, head, hidden, final)
    torch.testing.assert_close(alone, total.detach())
    torch.testing.assert_close(counted, measured)


def test_nothing_of_all_tokens_times_vocabulary_is_kept_for_the_backward_pass() -> None:
    """Fails when each chunk leaves its logits in the graph."""
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(4, 1000), torch.randn(64, 4, requires_grad=True)
    target = torch.nn.Linear(4, 1000).requires_grad_(False)
    kept: list[Tensor] = []
    seen: list[int] = []

    def row_losses(states: Tensor) -> Tensor:
        seen.append(len(states))
        return ExitLoss().rows(head(states), target(states.detach())).unsqueeze(1)

    total, _ = sum_over_chunks(row_losses, [hidden], chunk_rows=16)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        outside, _ = sum_over_chunks(row_losses, [hidden], chunk_rows=16)
    assert seen == [16] * 8
    assert max(tensor.numel() for tensor in kept) <= 16 * 1000
    assert not getattr(outside.grad_fn, "saved_tensors", ())
    assert {tuple(each.shape) for each in total.grad_fn.gradients} == {(64, 4), (1000, 4), (1000,)}


def test_parameters_get_a_gradient_of_zeros_from_no_rows() -> None:
    head, hidden, final = head_case()
    total, _ = chunked(3, head, hidden[:0], final[:0])
    total.backward()
    assert total == 0.0 and head.weight.grad is not None and not head.weight.grad.any()


def test_a_bfloat16_parameter_sums_its_chunks_in_float32() -> None:
    """Fails when 256 chunks are added up in bfloat16: the sum stops growing where a step is below its rounding."""
    scale = torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    rows = torch.full((1024, 1), 1.0 + 1 / 128, dtype=torch.bfloat16)
    total, _ = sum_over_chunks(lambda x: (x * scale).float(), [rows], chunk_rows=1)
    total.backward()
    assert scale.grad == torch.tensor(1032.0, dtype=torch.bfloat16)


# --- sampled positions -------------------------------------------------------------------------------------------


def test_sampled_positions_are_a_fair_share_of_the_mask_and_follow_the_generator() -> None:
    """The count is binomial: 100000 x 0.3 is left by 5 deviations with probability 6e-7."""
    mask = torch.arange(200_000) % 2 == 0
    rows = kept_rows(mask, 0.3, torch.Generator().manual_seed(0))
    assert mask[rows].all() and len(rows.unique()) == len(rows)
    assert abs(len(rows) - 30_000) < 5 * math.sqrt(100_000 * 0.3 * 0.7)
    assert torch.equal(rows, kept_rows(mask, 0.3, torch.Generator().manual_seed(0)))
    assert not torch.equal(rows, kept_rows(mask, 0.3, torch.Generator().manual_seed(1)))
    assert torch.equal(kept_rows(mask), mask.nonzero().squeeze(1))


# --- mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ExitLoss(forward_kl=-1.0), "forward_kl must be a weight of at least 0"),
        (lambda: ExitLoss(argmax=math.nan), "argmax must be a weight"),
        (lambda: ExitLoss(forward_kl=0.0), "with all weights 0 nothing is learned"),
        (lambda: exit_loss(ExitLoss(), torch.zeros(2, 3)), "final_logits must be given"),
        (lambda: exit_loss(ExitLoss(data=1.0), torch.zeros(2, 3), torch.zeros(2, 3)), "next_ids must be given"),
        (lambda: exit_loss(ExitLoss(), torch.zeros(2, 3), torch.zeros(2, 5)), "draft_ids must say which"),
        (
            lambda: exit_loss(ExitLoss(), torch.zeros(2, 3), torch.zeros(2, 5), draft_ids=torch.tensor([1, 2])),
            "draft_ids must name the exit's 3 logits, got 2",
        ),
        (lambda: kept_rows(torch.ones(3, dtype=torch.bool), 0.0), "share must be above 0"),
        (lambda: kept_rows(torch.ones(3, dtype=torch.bool), 0.5), "needs a generator"),
        (lambda: layer_dropout_rates(4, 1.0), r"p_max must be in \[0, 1\)"),
        (lambda: depth_scale(0, 1), "num_layers must be at least 2"),
        (lambda: exit_scales([True, False], 1.0), "hold the last"),
        (lambda: exit_scales([True, True], -1.0), "e_scale must be"),
        (lambda: rotational(0, 4, 0), "every must be at least 1"),
        (lambda: gradual(0, 4, 0), "num_steps must be at least 1"),
    ],
)
def test_a_mistake_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_loss_on_data_needs_no_final_layer() -> None:
    exits, _, next_ids, _ = case(draft=False)
    found = exit_loss(only("data"), exits, next_ids=next_ids)
    torch.testing.assert_close(found.total, torch.nn.functional.cross_entropy(exits, next_ids, reduction="sum"))
    assert isinstance(found, LossSum)


# --- LayerSkip ---------------------------------------------------------------------------------------------------


def test_layer_dropout_grows_from_none_at_the_first_layer_to_p_max_at_the_last() -> None:
    rates = layer_dropout_rates(5, 0.2)
    assert rates[0] == 0.0 and rates[-1] == pytest.approx(0.2)
    assert rates[2] == pytest.approx(0.2 * (math.sqrt(2) - 1))  # D(2) = exp(ln2 / 2) - 1
    assert rates == sorted(rates)
    assert layer_dropout_rates(5, 0.2, time_scale(0, 10)) == [0.0] * 5
    assert time_scale(9, 10) == pytest.approx(1.0) and time_scale(500, 10) == pytest.approx(1.0)


def test_exit_scales_follow_the_formula() -> None:
    """L = 4, e_scale = 0.5: e = 0, 0.5, 1.5, and 3 + 0.5 * (0 + 1 + 2) = 4.5 for the last layer."""
    assert exit_scales([True] * 4, 0.5) == pytest.approx([0.0, 0.5 / 6.5, 1.5 / 6.5, 4.5 / 6.5])
    assert exit_scales([False, True, False, True], 0.5) == pytest.approx([0.0, 0.1, 0.0, 0.9])
    assert exit_scales([True] * 4, 0.0) == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("every", [1, 3, 4, 20])
def test_the_rotational_curriculum_reaches_each_layer_once_in_a_round(every: int) -> None:
    steps = [rotational(step, 8, every) for step in range(5, 5 + every)]
    assert all(step[-1] for step in steps)
    assert [sum(step[layer] for step in steps) for layer in range(7)] == [1] * 7


def test_the_gradual_curriculum_goes_down_one_layer_at_a_time_and_is_complete_at_half_time() -> None:
    num_layers, num_steps = 4, 80
    enabled = [sum(gradual(step, num_layers, num_steps)) for step in range(num_steps)]
    assert enabled[0] == 1 and gradual(0, num_layers, num_steps) == [False, False, False, True]
    assert [enabled.index(count) for count in (2, 3, 4)] == [10, 20, 30]  # every T / 2L = 10 steps
    assert enabled[num_steps // 2 :] == [num_layers] * (num_steps // 2)
