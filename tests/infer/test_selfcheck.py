"""The self-check must pass for a right engine and name what is wrong with a broken one."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoint import save_tiny, tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from speclight.infer import DraftModelDrafter, Engine, LogitSpecDrafter, PromptLookupDrafter, verify
from speclight.infer.cli import main
from speclight.infer.compare import first_difference, logit_gap, next_logits, token_at
from speclight.infer.target import TargetRule
from speclight.infer.verify import (
    FALSE_ALARM,
    LEAST_EXPECTED,
    REST,
    Cells,
    Check,
    Settings,
    best_p_value,
    chi_square,
    count_texts,
    encode_prompts,
    exact_cells,
    render,
    run_checks,
)
from speclight.modules.acceptance import Dense, Verdict
from support import tiny_lm

PROMPTS = {"repetition": [5, 6, 7, 5, 6, 7, 5, 6], "list": [9, 10, 11, 12], "one": [3]}
SETTINGS = Settings("logitspec", max_new_tokens=8, samples=100, temperature=0.2)  # cold: few and full cells
BRIEF = replace(SETTINGS, samples=40)  # where the chi-square test is beside the point


def engine_with(*drafters, **options) -> Engine:
    return Engine(tiny_lm(), tiny_tokenizer(), drafters=drafters, num_blocks=512, **options)


def checks_of(engine: Engine, settings: Settings = SETTINGS) -> dict[str, Check]:
    return {check.name: check for check in run_checks(engine, PROMPTS, settings)}


@pytest.mark.parametrize("method", ["ar", "logitspec", "prompt-lookup", "draft-model"])
def test_every_method_passes_on_a_right_engine(method: str) -> None:
    """A false alarm of the chi-square test has probability 1e-4; the seed is fixed."""
    drafter = {
        "ar": [],
        "logitspec": [LogitSpecDrafter()],
        "prompt-lookup": [PromptLookupDrafter()],
        "draft-model": [DraftModelDrafter(tiny_lm(seed=1))],
    }[method]
    checks = checks_of(engine_with(*drafter), replace(SETTINGS, method=method))
    assert all(check.passed for check in checks.values()), render("", list(checks.values()))
    assert len(checks) == 5


def accept_any_draft(tree, target, generator=None) -> Verdict:
    """A broken rule: the first drafted token always passes."""
    child = next(iter(tree.children[0].values()), None)
    path = [0] if child is None else [0, child]
    tokens = [target(node).sample(generator) for node in path]
    return Verdict(path, tokens[-1], corrected=False)


@pytest.fixture
def broken_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speclight.infer.engine.verify", accept_any_draft)


@pytest.mark.usefixtures("broken_rule")
def test_a_rule_that_accepts_too_much_fails_and_its_first_difference_is_named() -> None:
    checks = checks_of(engine_with(LogitSpecDrafter()))
    assert not checks["greedy, alone"].passed
    assert not checks["greedy, together"].passed
    assert not checks["distribution"].passed
    detail = checks["greedy, alone"].details[0]
    assert ", token " in detail
    assert "plain decoding has" in detail
    assert "logit gap" in detail


@pytest.mark.usefixtures("broken_rule")
def test_a_difference_under_the_gap_is_listed_as_a_near_tie_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(verify.NEAR_TIE, "float64", math.inf)
    check = checks_of(engine_with(LogitSpecDrafter()), BRIEF)["greedy, alone"]
    assert check.passed
    assert "part at near-ties" in check.summary
    assert check.details[0].startswith("near-tie: ")


class Sharpened(TargetRule):
    """A target rule that is not the target: the square of its probabilities."""

    def bind(self, tree, states):
        return lambda node, p, q: p if not isinstance(p, Dense) else Dense(p.probs**2 / (p.probs**2).sum())


def test_a_lossy_target_fails_the_chi_square_although_greedy_texts_are_equal() -> None:
    checks = checks_of(engine_with(LogitSpecDrafter(), target_rule=Sharpened()))
    assert checks["greedy, alone"].passed
    assert not checks["distribution"].passed


def test_a_drafter_that_raises_is_reported_although_texts_are_right() -> None:
    class Raising(LogitSpecDrafter):
        def propose(self, sequences):
            raise RuntimeError("no proposals today")

    checks = checks_of(engine_with(Raising()), BRIEF)
    assert not checks["drafter"].passed
    assert "lost their draft" in checks["drafter"].summary
    assert all(check.passed for name, check in checks.items() if name != "drafter")


@pytest.mark.parametrize("fault", ["invariant", "leak"])
def test_a_cache_out_of_order_is_reported_and_nothing_stays_in_the_engine(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with(LogitSpecDrafter())
    if fault == "invariant":

        def check_invariants() -> None:
            raise AssertionError("a block is lost")

        monkeypatch.setattr(engine, "check_invariants", check_invariants)
    else:
        allocator = type(engine.cache.allocator)
        monkeypatch.setattr(allocator, "num_in_use", property(lambda self: 3))
    check = checks_of(engine, BRIEF)["cache"]
    assert not check.passed
    assert check.details == [
        "a block is lost" if fault == "invariant" else "3 blocks are still in use after the last text has ended"
    ]
    assert not engine.has_work


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("verify") / "tiny"))


ARGUMENTS = ["--method", "prompt-lookup", "--max-new-tokens", "6", "--samples", "60", "--kv-memory", "0.02"]
ARGUMENTS += ["--temperature", "0.2"]


def test_command_exits_with_zero_and_prints_what_was_checked(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", model, *ARGUMENTS]) == 0
    printed = capsys.readouterr().out
    assert printed.count("  pass  ") == 5
    assert printed.strip().endswith("all checks passed")


@pytest.mark.usefixtures("broken_rule")
def test_command_exits_with_one_and_json_says_why(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", model, *ARGUMENTS, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False
    failed = [check["name"] for check in report["checks"] if not check["passed"]]
    assert failed[:2] == ["greedy, alone", "greedy, together"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--samples", "1"],
        ["--temperature", "0"],
        ["--method", "logitspeck"],
        ["--max-new-tokens", "0"],
        ["--draft-tokens", "5000"],
    ],
)
def test_command_refuses_wrong_values_with_status_two(model: str, flags: list[str], capsys) -> None:
    assert main(["verify", "--model", model, *flags]) == 2
    assert flags[0].lstrip("-").replace("-", "_") in capsys.readouterr().err


def test_prompts_without_tokens_are_left_out_and_chats_use_the_template() -> None:
    engine = engine_with()
    raw, chats = encode_prompts(engine, chat=False), encode_prompts(engine, chat=True)
    assert "Chinese" not in raw  # the tiny vocabulary has none of its characters
    assert {"prose", "repetition", "one letter"} <= raw.keys()
    assert len(chats["one letter"]) > len(raw["one letter"]) == 1


def test_too_few_samples_are_refused_with_the_number_that_can_find_something(model: str, capsys) -> None:
    """Of 11 texts none could be a fault: a test that cannot fail would be passed by anything."""
    assert main(["verify", "--model", model, "--samples", "11"]) == 2
    assert "samples must be at least 12, got 11" in capsys.readouterr().err
    limit = FALSE_ALARM / 2
    best_case = Cells({(1,): LEAST_EXPECTED / 12, (REST,): 1 - LEAST_EXPECTED / 12})
    p_value, _ = chi_square(best_case, [[1]] * 12)
    assert p_value == pytest.approx(best_p_value(best_case, 12))
    assert p_value < limit
    tighter = Cells({(1,): LEAST_EXPECTED / 11, (REST,): 1 - LEAST_EXPECTED / 11})
    assert chi_square(tighter, [[1]] * 11)[0] > limit


def test_texts_that_could_show_no_fault_are_no_evidence() -> None:
    """At a temperature near 0 the first tokens are certain, whatever the drafter does."""
    check = checks_of(engine_with(LogitSpecDrafter()), replace(BRIEF, temperature=0.001))["distribution"]
    assert not check.passed
    assert all("too few to notice anything" in detail for detail in check.details[:2])


def test_progress_is_told_text_by_text_up_to_the_number_announced() -> None:
    told: list[int] = []
    run_checks(engine_with(LogitSpecDrafter()), PROMPTS, BRIEF, told.append)
    assert sum(told) == count_texts(PROMPTS, BRIEF) == 3 * 3 + 2 * 40


def test_progress_is_shown_on_a_terminal_only(model: str, capsys, monkeypatch) -> None:
    assert main(["verify", "--model", model, *ARGUMENTS, "--json"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main(["verify", "--model", model, *ARGUMENTS, "--json"]) == 0
    assert "text" in capsys.readouterr().err


# -- the test itself -------------------------------------------------------------------------------------------------


def table_probs(vocab: int, seed: int, scale: float = 1.5):
    """A chain of order one: next-token probabilities looked up by the last token."""
    logits = np.random.default_rng(seed).standard_normal((vocab + 1, vocab)) * scale
    table = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return lambda prefixes: table[[prefix[-1] + 1 if len(prefix) else 0 for prefix in prefixes]]


def draw(next_probs, depth: int, count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    texts: list[list[int]] = [[] for _ in range(count)]
    for _ in range(depth):
        cumulative = next_probs(texts).cumsum(axis=1)
        drawn = (cumulative < rng.random((count, 1)) * cumulative[:, -1:]).sum(axis=1)
        for text, token_id in zip(texts, drawn.tolist(), strict=True):
            text.append(token_id)
    return texts


@given(st.integers(2, 12), st.integers(0, 10_000), st.sampled_from([20, 300, 5000]), st.sampled_from([0.1, 1.5, 8.0]))
@settings(max_examples=60, deadline=None)
def test_cells_partition_all_continuations_with_their_exact_probabilities(
    vocab: int, seed: int, samples: int, scale: float
) -> None:
    next_probs = table_probs(vocab, seed, scale)
    cells = exact_cells(next_probs, 2, samples)
    found = dict.fromkeys(cells.probs, 0.0)
    first = next_probs([()])[0]
    for x in range(vocab):
        for y, p in enumerate(next_probs([(x,)])[0]):
            found[cells.cell_of([x, y])] += first[x] * p
    assert sum(cells.probs.values()) == pytest.approx(1.0)
    assert found == pytest.approx(cells.probs, abs=1e-12)


def test_right_texts_pass_and_wrong_ones_do_not() -> None:
    """Of 40 right samples each fails with probability 1e-4; a total variation of 0.1 must not pass with 2000 texts."""
    right = table_probs(6, seed=3)
    cells = exact_cells(right, 3, 2000)
    assert min(chi_square(cells, draw(right, 3, 2000, seed))[0] for seed in range(40)) > FALSE_ALARM

    def wrong(prefixes):
        rows = 0.8 * right(prefixes)
        rows[:, 0] += 0.2
        return rows

    assert chi_square(cells, draw(wrong, 3, 2000, seed=0))[0] < FALSE_ALARM


def test_a_fault_in_the_third_token_alone_is_found() -> None:
    """Bonus tokens come third at the earliest when one draft was accepted."""
    right = table_probs(5, seed=4, scale=1.0)
    cells = exact_cells(right, 3, 2000)
    texts = [[*text[:2], 0] for text in draw(right, 3, 2000, seed=1)]
    assert chi_square(cells, texts)[0] < FALSE_ALARM


def test_a_certain_text_has_one_cell_and_passes() -> None:
    cells = exact_cells(lambda prefixes: np.eye(4)[[2] * len(prefixes)], 2, 100)
    assert chi_square(cells, [[2, 2]] * 100) == (1.0, 1)
    assert cells.cell_of([1, 0])[-1] == REST


# -- comparing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "at"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([1, 2], [1], 1), ([], [], None), ([], [4], 0)],
)
def test_first_difference_includes_an_output_that_ended_early(
    ours: list[int], theirs: list[int], at: int | None
) -> None:
    assert first_difference(ours, theirs) == at


def test_logit_gap_is_the_top_two_gap_for_the_top_two_and_larger_for_any_other_token() -> None:
    """A token that is wrong must not be excused because the best two others happen to be close."""
    model = tiny_lm()
    logits = next_logits(model, [[5, 6, 7]])[0]
    best, second, third = logits.topk(3).indices.tolist()
    values = logits.topk(3).values
    assert logit_gap(model, [5, 6, 7], second, best) == pytest.approx(float(values[0] - values[1]))
    assert logit_gap(model, [5, 6, 7], best, third) == pytest.approx(float(values[0] - values[2]))
    assert logit_gap(model, [5, 6, 7], None, best) == math.inf
    assert token_at([4, 5], 2) is None


def test_next_logits_of_many_prefixes_equal_those_of_each_alone() -> None:
    model = tiny_lm()
    prefixes = [[1], [2, 3, 4], [5, 6]]
    together = next_logits(model, prefixes)
    for row, prefix in zip(together, prefixes, strict=True):
        torch.testing.assert_close(row, next_logits(model, [prefix])[0])
