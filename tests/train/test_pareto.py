"""`speclight pareto`: theory agrees with what is measured, the figures are what they say, and a killed run goes on."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from checkpoint import save_tiny
from speclight.infer.cli import main
from speclight.infer.draft_model import DraftModelDrafter
from speclight.infer.early_exit import EarlyExitDrafter
from speclight.infer.engine import Engine
from speclight.infer.request import GenerationParams
from speclight.infer.stats import SequenceStats
from speclight.infer.target import Exact, LearnedEnsemble, Lossy, SpecCascade, StaticEnsemble
from speclight.modules.acceptance import Dense
from speclight.modules.bundle import fingerprint_checkpoint
from speclight.modules.ensemble import Lenient, Mixture, acceptance
from speclight.modules.ensemble_head import EnsembleHead
from speclight.train.pareto_arms import Arm, head_names, numbers
from speclight.train.pareto_run import Run, Text
from speclight.train.pareto_summary import summarize
from speclight.train.pareto_theory import Theory, Watcher, independent
from support import TableLM, random_table

VOCAB, LARGEST_Z = 4, 4.5
"""|z| above 4.5: chance of a false alarm 7e-6 for each score."""
P_TABLE, Q_TABLE = random_table(VOCAB, 1), random_table(VOCAB, 11)  # of which OPT defers to the draft in some rows

# --- theory -----------------------------------------------------------------------------------------------------------


def rows(token: int):
    return P_TABLE[token].softmax(-1), Q_TABLE[token].softmax(-1)


@pytest.mark.parametrize("make", [lambda p, q: Mixture(p, q, 0.3), lambda p, q: Lenient(p, q, 0.4)])
def test_chains_weighted_by_the_draft_give_the_enumerated_expectation(make):
    """Sum over n and all chains of the product of min(q, v), though no position is independent of the one before."""
    direct, averaged = 0.0, 0.0
    for chain in itertools.product(range(VOCAB), repeat=3):
        keeps, drawn, product = [], 1.0, 1.0
        for before, token in itertools.pairwise((2, *chain)):
            p, q = rows(before)
            v = make(p, q).prob(token)
            keeps.append(min(1.0, v / float(q[token])))
            drawn *= float(q[token])
            product *= min(float(q[token]), v)
            direct += product / VOCAB ** (3 - len(keeps))  # each prefix once among its continuations
        averaged += drawn * Theory.of_chain(keeps, [], 0).expected
    assert averaged == pytest.approx(direct, rel=1e-9)


def test_acceptance_of_a_mixture_is_one_minus_weight_times_distance():
    p, q = rows(1)
    tv = float((p - q).clamp(min=0).sum())
    assert acceptance(Mixture(p, q, 0.3), Dense(q)) == pytest.approx(1 - 0.3 * tv)
    assert acceptance(Dense(p), Dense(q)) == pytest.approx(1 - tv)
    assert acceptance(Dense(p), Dense(torch.cat((q, q.new_zeros(2))))) == pytest.approx(1 - tv)
    lenient = float(torch.minimum(q, p / 0.6).sum())
    assert acceptance(Lenient(p, q, 0.4), Dense(q)) == pytest.approx(lenient)


def test_the_variance_of_a_chain_is_that_of_its_enumerated_outcomes():
    keeps = [0.7, 0.4, 0.9]
    shares = [0.3, 0.7 * 0.6, 0.7 * 0.4 * 0.1, 0.7 * 0.4 * 0.9]
    mean = sum(n * share for n, share in enumerate(shares))
    theory = Theory.of_chain(keeps, [0.5], 0)
    assert theory.expected == pytest.approx(mean)
    assert theory.expected_variance == pytest.approx(sum((n - mean) ** 2 * s for n, s in enumerate(shares)))
    assert theory.chance_variance == pytest.approx(0.25)


def watched(rule, watched_rule=None, kind="early-exit", eos=(), **params) -> Theory:
    if kind == "draft-model":
        drafter = DraftModelDrafter(TableLM(Q_TABLE), 4, num_blocks=2000)
    else:
        drafter = EarlyExitDrafter(1, 4, head=TableLM.exit(Q_TABLE))
    drafter.target_rule = rule
    engine = Engine(
        TableLM(P_TABLE, eos=eos), drafters=[drafter], default_method=kind, strict=True, num_blocks=2000, block_size=4
    )
    watcher = Watcher(watched_rule or rule, frozenset(eos))
    engine.watchers.append(watcher)
    given = GenerationParams(**({"max_new_tokens": 50, "temperature": 1.0, "seed": 3, "n": 24} | params))
    done = engine.generate([[2]], given)
    assert not any(one.error for one in done)
    found = Theory.total(watcher.of_text(one.request_id, one.index) for one in done)
    assert found.chains > 0 and found.accepted >= sum(one.stats.accepted for one in done)
    return found


def small_head() -> EnsembleHead:
    head = EnsembleHead(3, 3, norm=False)
    with torch.no_grad():
        head.output.weight.copy_(torch.tensor([[0.9, 0.0, -0.4, -0.8, 0.0, 0.7]]))
    return head.requires_grad_(False)


@pytest.mark.parametrize(
    ("rule", "more"),
    [
        (Exact(), {}),
        (StaticEnsemble(0.4), {}),
        (StaticEnsemble(0.4, bonus=True), {"kind": "draft-model"}),
        (StaticEnsemble(0.4), {"kind": "draft-model", "eos": (0,)}),  # which drafts behind the end of a text
        (Lossy(0.4), {}),
        (SpecCascade(0.3, "opt"), {}),
        (SpecCascade(0.5), {"kind": "draft-model"}),
        (LearnedEnsemble(small_head(), max_tv=0.2), {}),
        (StaticEnsemble(0.4), {"temperature": 0.7, "top_k": 3, "repetition_penalty": 1.3}),
    ],
)
def test_what_is_measured_agrees_with_theory(rule, more):
    figures = watched(rule, **more).figures()
    assert figures["positions"] > 100
    assert abs(figures["acceptance_z"]) < LARGEST_Z
    assert abs(figures["accepted_z"]) < LARGEST_Z


def test_the_check_can_fail():
    """Theory of another weight than the one that verifies."""
    figures = watched(Exact(), StaticEnsemble(0.4)).figures()
    assert figures["acceptance_z"] < -LARGEST_Z and figures["accepted_z"] < -LARGEST_Z


@pytest.mark.parametrize("rule", [Exact(), StaticEnsemble(0.4)])
def test_greedy_decoding_is_predicted_to_the_token(rule):
    figures = watched(rule, temperature=0.0).figures()
    assert figures["accepted_measured"] == figures["accepted_predicted"]
    assert figures["acceptance_measured"] == figures["acceptance_predicted"]
    assert figures["acceptance_z"] is None and figures["accepted_z"] is None


def test_the_independent_formula_is_a_geometric_sum():
    assert independent(0.5, [2, 2, 1]) == pytest.approx(0.5 + 0.25 + 0.125 / 2)
    assert independent(0.5, []) == 0.0


# --- figures ----------------------------------------------------------------------------------------------------------


def row(unit: int, arm: str, rewards: list[float], accepted: int, distance: float, seconds: float = 1.0) -> Run:
    stats = SequenceStats(emitted_tokens=10, target_passes=5, drafted=10, accepted=accepted, distance=distance)
    texts = [Text(unit, sample, "", [0] * 10, value, stats.as_dict(), Theory()) for sample, value in enumerate(rewards)]
    return Run(unit, arm, seconds, texts)


ARMS = [
    Arm("exact", "exact", None, Exact()),
    Arm("static:0.5", "static", 0.5, StaticEnsemble(0.5)),
    Arm("learned:h", "learned", None, Exact()),
    Arm("lossy:0.9", "lossy", 0.9, Lossy(0.9)),
]


def test_a_learned_point_is_measured_against_the_front_at_its_own_acceptance():
    runs = []
    for unit in range(6):
        runs += [
            row(unit, "exact", [0.8, 0.4], 2, 0.0, 2.0),
            row(unit, "static:0.5", [0.4, 0.4], 6, 2.0),
            row(unit, "learned:h", [0.6, 0.6], 4, 0.5),
            row(unit, "lossy:0.9", [0.0, 0.0], 9, 5.0),
        ]
    found = summarize(runs, ARMS)
    learned = found["learned:h"]
    assert found["exact"]["reward"] == {"mean": pytest.approx(0.6), "interval": pytest.approx([0.6, 0.6])}
    assert learned["acceptance_rate"]["mean"] == pytest.approx(0.4)
    assert learned["reward_over_exact"]["mean"] == pytest.approx(0.0)
    assert learned["against_front"]["reward"]["mean"] == pytest.approx(0.6 - 0.5)  # half way between 0.6 and 0.4
    assert learned["against_front"]["mean_distance"]["mean"] == pytest.approx(0.05 - 0.1)
    assert learned["against_front"]["acceptance_rate"]["mean"] == pytest.approx(0.4 - 0.3)
    assert found["lossy:0.9"]["against_front"]["reward"] is None  # beyond the front's end
    assert found["static:0.5"]["against_front"]["reward"] is None
    assert found["static:0.5"]["speedup"]["median"] == pytest.approx(2.0)


def test_intervals_are_over_prompts_and_differences_are_paired():
    """The reward differs between prompts by far more than between arms."""
    runs = []
    for unit in range(20):
        runs += [row(unit, "exact", [unit / 20], 2, 0.0), row(unit, "static:0.5", [unit / 20 - 0.01], 4, 1.0)]
    found = summarize(runs, ARMS[:2])["static:0.5"]
    low, high = found["reward"]["interval"]
    assert high - low > 0.1
    assert found["reward_over_exact"]["interval"] == pytest.approx([-0.01, -0.01])


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("pareto") / "tiny")


def save_head(model: Path, folder: Path, weight: float = 0.3, **draft) -> str:
    head = EnsembleHead(32, 32, initial_weight=weight)
    draft = {"method": "early-exit", "layer": 2, "bundle": None, "digest": None} | draft
    head.to_bundle(fingerprint_checkpoint(model), draft, "tiny").save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def head(model, tmp_path_factory) -> str:
    return save_head(model, tmp_path_factory.mktemp("heads") / "head")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    lines = [{"ask": f"a{n}b", "reference": "ab"} for n in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def command(model: Path, data: str, output: Path, *flags: str) -> int:
    fixed = ["--max-new-tokens", "8", "--kv-memory", "0.02", "--task", "plain", "--fields", "prompt=ask"]
    where = ["--model", str(model), "--data", data, "--output", str(output)]
    return main(["pareto", *where, *fixed, *flags])


def test_command_measures_every_rule_reports_and_continues(model, head, data, tmp_path, capsys):
    flags = ["--weights", "0,0.5", "--leniences", "0.5", "--alphas", "0.5", "--heads", head, "--batch-size", "2"]
    flags += ["--samples", "2"]
    out = tmp_path / "out"
    assert command(model, data, out, *flags) == 0
    printed = capsys.readouterr().out
    report = json.loads((out / "report.json").read_text())
    names = ["exact", "static:0", "static:0.5", "lossy:0.5", "cascade-opt:0.5", "cascade-token:0.5", "learned:head"]
    assert list(report["summary"]) == names and all(f"| {name} |" in printed for name in names)
    assert {figures["texts"] for figures in report["summary"].values()} == {6}
    assert report["summary"]["static:0"]["acceptance_rate"]["mean"] == 1.0
    assert report["summary"]["exact"]["mean_distance"]["mean"] == 0.0
    assert report["summary"]["learned:head"]["theory"]["positions"] > 0
    assert report["largest_z"]["largest"] < LARGEST_Z
    assert report["facts"]["drafts"] == "5 by exit after layer 2"
    assert report["facts"].keys() >= {"device", "processor", "versions", "command"}
    assert str(tmp_path) not in (out / "report.json").read_text() + (out / "report.md").read_text()
    assert (out / "report.png").stat().st_size > 10_000

    rows = (out / "rows.jsonl").read_bytes()
    lines = rows.splitlines(keepends=True)
    assert len(lines) == 1 + 2 * len(names)
    (out / "rows.jsonl").write_bytes(b"".join(lines[:-2]) + lines[-2][:40])  # killed in the middle of a row
    assert command(model, data, out, *flags) == 0
    again = (out / "rows.jsonl").read_bytes().splitlines(keepends=True)
    assert again[:-2] == lines[:-2]
    assert [_untimed(line) for line in again[-2:]] == [_untimed(line) for line in lines[-2:]]
    assert command(model, data, out, *flags, "--seed", "1") == 2
    assert "seed=0, now it is 1" in capsys.readouterr().err


def test_prompts_that_are_alike_get_texts_of_their_own(model, tmp_path):
    (tmp_path / "same.jsonl").write_text(3 * '{"ask": "abc", "reference": "x"}\n')
    assert (
        command(
            model,
            str(tmp_path / "same.jsonl"),
            tmp_path / "out",
            "--rules",
            "static",
            "--weights",
            "0.5",
            "--samples",
            "2",
        )
        == 0
    )
    runs = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_bytes().splitlines()[1:]]
    texts = [tuple(text["token_ids"]) for run in runs if run["arm"] == "exact" for text in run["texts"]]
    assert len(texts) == len(set(texts)) == 6


def _untimed(line: bytes) -> list:
    run = json.loads(line)
    return [run["unit"], run["arm"], [(text["token_ids"], text["theory"]) for text in run["texts"]]]


def test_a_draft_model_drafts_and_greedy_has_no_z(model, data, tmp_path):
    draft = save_tiny(tmp_path / "draft", seed=3)
    flags = ["--draft-model", str(draft), "--rules", "static", "--weights", "0.5", "--temperature", "0", "--bonus"]
    assert command(model, data, tmp_path / "out", *flags) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["facts"]["drafts"] == "5 by draft model draft"
    assert list(report["summary"]) == ["exact", "static:0.5"]
    assert report["largest_z"] == {"largest": None, "of": 0}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rules", "statik"], "did you mean 'static'"),
        (["--rules", "learned"], "rules learned needs --heads"),
        (["--rules", "static", "--weights", "0.5,1.5"], "weights: weight must be in [0, 1]"),
        (["--leniences", "1"], "leniences: lenience must be in [0, 1)"),
        (["--alphas", "-1"], "alphas: alpha must be in [0, 1]"),
        (["--weights", "much"], "weights must be numbers"),
        (["--method", "logitspec"], "method must be one of early-exit, draft-model"),
        (["--method", "draft-model"], "needs --draft-model"),
        (["--method", "early-exit", "--draft-model", "x"], "draft_model is read by method draft-model"),
        (["--draft-layer", "9"], "early_exit.layer"),
        (["--draft-tokens", "0"], "draft_tokens must be from 1"),
        (["--samples", "2", "--temperature", "0"], "samples must be 1 at temperature 0"),
        (["--batch-size", "0"], "batch_size must be at least 1"),
        (["--temperature", "-1"], "temperature must be"),
        (["--max-new-tokens", "512"], "max_new_tokens must leave room for a prompt: at most 511"),
        (["--target.rule", "static"], "target.rule is not read here"),
        (["--task", "gsm9k"], "task must be one of"),
        (["--task", "gsm8k"], "the template needs the field 'question'"),
        (["--reward", "rouge9"], "reward must be one of"),
        (["--reward", "numbers"], "prompts.jsonl:1: reference must hold a number"),
        (["--reward", "unit-tests"], "allow_execution"),
        (["--allow-execution"], "has no option 'allow_execution'"),
        (["--fields", "prompt"], "fields must be ours=theirs"),
        (["--fields", "prompt=question"], "there is no field 'question'"),
        (["--heads", "/no/such/head"], "/no/such/head"),
    ],
)
def test_a_mistake_is_refused_before_weights_are_read(model, data, tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.setattr("speclight.train.pareto.build_engine", lambda prepared: pytest.fail("weights were read"))
    assert command(model, data, tmp_path / "out", *flags) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_heads_of_other_drafts_or_models_are_refused(model, head, data, tmp_path, capsys):
    other = save_tiny(tmp_path / "other", seed=5)
    cases = [
        ([head], ["--rules", "static"], "heads are read by rule learned"),
        ([head], ["--draft-layer", "1"], "trained with the exit after layer 2; draft_layer is 1"),
        (
            [head, save_head(model, tmp_path / "b", layer=3)],
            [],
            "trained with the exit after layer 3; draft_layer is 2",
        ),
        ([save_head(model, tmp_path / "c", method="draft-model")], ["--method", "early-exit"], "method draft-model"),
        ([save_head(other, tmp_path / "d")], [], "belongs to another base"),
        ([save_head(model, tmp_path / "e", bundle="exits", digest="0")], [], "do not lie beside it"),
        ([head, head], [], "'head' is given twice"),
    ]
    for heads, flags, message in cases:
        assert command(model, data, tmp_path / "out", "--heads", *heads, *flags) == 2
        assert message in capsys.readouterr().err


def test_heads_get_the_shortest_names_that_tell_them_apart(tmp_path):
    assert head_names(["/x/one", "/x/two"]) == ["one", "two"]
    assert head_names(["/a/head", "/b/head"]) == ["a/head", "b/head"]
    assert head_names([]) == []


def test_numbers_are_sorted_and_each_once():
    assert numbers("weights", ["0.5,0.1", 0.5]) == [0.1, 0.5]
    with pytest.raises(ValueError, match="at least one"):
        numbers("weights", [","])
