"""What passes cost: the arithmetic by hand, learning from serving, and what a stored calibration may be used for."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint import save_tiny
from speclight.infer import calibrate
from speclight.infer.build import EngineOptions, build_engine, prepare
from speclight.infer.calibrate import (
    QUICK_SECONDS,
    CalibrateOptions,
    PassTimer,
    identity_of,
    measured_within,
    quick_calibration,
    stored_cost_model,
)
from speclight.infer.cli import main
from speclight.infer.cost_model import Calibration, CostModel, Identity, Record, Shape, fit, store, stored
from support import hf_tiny, tiny_lm

CURVE = Calibration((1, 8, 32), (10.0, 12.0, 30.0), (1.0, 2.0, 4.0), context=100, per_sequence=0.5, per_context=0.01)
IDENTITY = Identity("f" * 64, "bfloat16", "cpu, some processor", 2, "2.13.0")


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_seconds_are_piecewise_linear_with_slopes_for_sequences_and_context():
    model = CostModel(CURVE)
    assert [model.seconds(size) for size in (1, 8, 32)] == [11.0, 14.0, 34.0]
    assert model.seconds(20) == pytest.approx(24.0)  # half-way from 8 to 32
    assert model.seconds(56) == pytest.approx(54.0)  # the last slope goes on
    assert model.seconds(8, sequences=3) == pytest.approx(15.0)
    assert model.seconds(8, 3, context=600) == pytest.approx(20.0)
    assert model.seconds(8, share=0.25) == pytest.approx(0.25 * 12.0 + 2.0)


def test_a_single_size_is_extrapolated_with_care_and_a_short_context_never_makes_a_pass_free():
    lone = CostModel(Calibration((1,), (10.0,), (0.0,), context=10_000, per_context=0.01))
    assert lone.seconds(101) > 5 * lone.seconds(1)
    assert lone.seconds(1, context=0) == pytest.approx(5.0)


def test_what_is_learned_of_a_single_size_is_true_of_all():
    lone = CostModel(Calibration((1,), (10.0,), (0.0,)))
    for seconds in (20.0, 5.0):
        for size in (1, 1, 9, 1, 1):
            for _ in range(20):
                lone.learn(seconds * (1.0 + 0.05 * (size - 1)), size)
        assert lone.seconds(1) == pytest.approx(seconds, rel=0.02)
        assert lone.seconds(9) / lone.seconds(1) == pytest.approx(1.4)


@pytest.mark.parametrize("of_many", [None, 0.03])
def test_fit_finds_the_curve_and_the_slopes_that_the_passes_were_made_with(of_many):
    """Keys of several sequences may cost more than those of one, which lie in one piece."""
    made_with = CostModel(replace(CURVE, per_context_of_many=of_many))

    def record(tokens: int, sequences: int, context: int) -> Record:
        total = made_with.seconds(tokens, sequences, context * sequences)
        head = {1: 1.0, 8: 2.0, 32: 4.0}[tokens]
        return Record(Shape(tokens, sequences, context), total - head, head)

    shapes = [(1, 1, 100), (8, 1, 100), (32, 1, 100), (8, 8, 100), (32, 4, 100), (1, 1, 900)]
    shapes += [] if of_many is None else [(8, 8, 500)]
    slower = Record(Shape(8, 1, 100), 99.0, 1.0)
    found = fit([slower, *(record(*shape) for shape in shapes)])
    assert found.tokens == CURVE.tokens and found.context == 100
    assert found.layers == pytest.approx(CURVE.layers) and found.head == pytest.approx(CURVE.head)
    assert found.per_sequence == pytest.approx(0.5) and found.per_context == pytest.approx(0.01)
    assert found.per_context_of_many == (None if of_many is None else pytest.approx(of_many))


def test_noise_never_makes_a_larger_pass_cheaper_than_a_smaller_one():
    found = fit([Record(Shape(1), 10.0, 1.0), Record(Shape(2), 8.0, 0.5), Record(Shape(4), 12.0, 1.5)])
    assert found.layers == (10.0, 10.0, 12.0) and found.head == (1.0, 1.0, 1.5)


def test_nothing_to_fit_is_an_error():
    with pytest.raises(ValueError, match="one sequence"):
        fit([Record(Shape(8, 8), 1.0, 0.0)])
    with pytest.raises(ValueError, match="must rise"):
        Calibration((2, 1), (1.0, 1.0), (0.0, 0.0))


def test_serving_corrects_the_size_it_measures_and_moves_the_others_only_slowly():
    model = CostModel(CURVE)
    for _ in range(20):
        model.learn(28.0, 8)  # twice as long as calibrated
    assert 24.0 < model.seconds(8) <= 28.0
    assert 11.0 <= model.seconds(1) < 13.5
    for _ in range(2000):
        model.learn(28.0, 8)
    assert model.seconds(1) == pytest.approx(22.0, rel=0.05)  # it is the machine, not the size


def test_an_outlier_counts_little_and_is_forgotten():
    model = CostModel(CURVE)
    for _ in range(5):
        model.learn(14.0, 8)
    model.learn(14.0 * 1000, 8)
    assert model.seconds(8) < 14.0 * 1.06
    for _ in range(100):
        model.learn(14.0, 8)
    assert model.seconds(8) == pytest.approx(14.0, rel=0.01)


def test_a_pass_between_two_sizes_corrects_both_by_how_near_they_are():
    model = CostModel(CURVE)
    for _ in range(50):
        model.learn(1.2 * CostModel(CURVE).seconds(26), 26)  # three quarters of the way from 8 to 32
    before, after = ([one.seconds(size) for size in (8, 32)] for one in (CostModel(CURVE), model))
    assert 1.0 < after[0] / before[0] < after[1] / before[1] <= 1.2 + 1e-9


def test_a_markup_on_the_nodes_of_several_sequences_follows_what_they_cost_and_no_page_fault():
    """Each pass teaches the points of the curve too; what they cannot say is put on the nodes."""

    def markup(model: CostModel) -> float:
        plain, *_, drafted = model.drafted(8, 4, 4)
        assert plain == model.seconds(4, 4) and model.drafted(8, 4) == [model.seconds(4 + node) for node in range(9)]
        return (drafted - plain) / (model.seconds(12, 4) - plain)

    model = CostModel(CURVE)
    plain, expected = model.seconds(4, 4), model.seconds(12, 4) - model.seconds(4, 4)
    assert markup(model) == pytest.approx(1.0)
    model.learn(100.0 * plain, 12, 4, drafted=8)
    assert markup(model) < 2.5
    for _ in range(300):
        model.learn(plain, 4, 4)
        model.learn(plain + 2.0 * expected, 12, 4, drafted=8)
    assert model.drafted(8, 4, 4)[8] == pytest.approx(plain + 2.0 * expected, rel=0.03)
    assert 1.2 < markup(model) < 2.0
    for _ in range(300):
        model.learn(plain, 4, 4)
        model.learn(0.8 * plain, 12, 4, drafted=8)  # larger passes prove cheaper: no price to put anything on
    assert model._markup._came >= 0.0 and model._markup.value >= 1.0
    for _ in range(300):
        model.learn(plain, 4, 4)
        model.learn(plain + 2.0 * expected, 12, 4, drafted=8)
    assert model.drafted(8, 4, 4)[8] == pytest.approx(plain + 2.0 * expected, rel=0.03)


# -- measuring -------------------------------------------------------------------------------------------------------


class SlowMachine:
    """A timer on a fake clock: a pass takes a tenth of a second and some per token, the first of a size thrice that."""

    def __init__(self, clock: Clock, scale: float = 1.0) -> None:
        self.clock, self.scale, self.seen = clock, scale, []

    def __call__(self, shape: Shape) -> Record:
        seconds = self.scale * (0.1 + 0.001 * shape.tokens)
        self.clock.now += seconds if shape in self.seen else 3 * seconds
        self.seen.append(shape)
        return Record(shape, seconds if self.seen.count(shape) > 1 else 3 * seconds, 0.0)


@pytest.mark.parametrize("scale", [0.01, 0.3, 1.0, 100.0])
def test_the_quick_form_keeps_to_its_time(scale):
    """But for the first pass of all, without which nothing is known."""
    clock = Clock()
    machine = SlowMachine(clock, scale)
    shapes = [Shape(tokens) for tokens in (1, 16, 4, 64)]
    records = list(measured_within(machine, shapes, QUICK_SECONDS, clock))
    assert clock.now <= max(QUICK_SECONDS, 3 * scale * 0.101) * 1.35
    assert {record.shape for record in records} == set(machine.seen) and Shape(1) in machine.seen
    fit(records)


def test_a_first_pass_counts_only_where_there_is_no_second():
    clock = Clock()
    records = list(measured_within(SlowMachine(clock, 0.1), [Shape(1), Shape(4)], 1.0, clock))
    assert len(records) > 2 and max(record.layers for record in records) < 0.011


def test_the_quick_form_measures_a_model_and_leaves_room_for_a_short_context():
    assert quick_calibration(tiny_lm(), 0.3).tokens[0] == 1
    short = tiny_lm(max_position_embeddings=64)
    assert quick_calibration(short, 0.1).tokens == (1,)


def test_a_pass_of_many_sequences_is_one_of_many_tables():
    timer = PassTimer(tiny_lm(), [Shape(8, 4, 20)])
    record = timer(Shape(8, 4, 20))
    assert record.layers > 0.0 and record.head >= 0.0
    assert timer._batch(Shape(8, 4, 20)).num_tokens == 8


# -- storage ---------------------------------------------------------------------------------------------------------

RECORDS = [Record(Shape(1), 0.02, 0.001), Record(Shape(8, 8, 32), 0.03, 0.002)]


def test_what_was_stored_comes_back(tmp_path: Path):
    path = IDENTITY.path(tmp_path)
    assert stored(path, IDENTITY) == ([], False)
    store(path, IDENTITY, RECORDS, complete=False)
    assert stored(path, IDENTITY) == (RECORDS, False)
    store(path, IDENTITY, RECORDS, complete=True)
    assert stored(path, IDENTITY) == (RECORDS, True)
    assert [other.name for other in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "change", [{"model": "0" * 64}, {"dtype": "float32"}, {"threads": 4}, {"device": "cuda, H200"}, {"torch": "3.0"}]
)
def test_a_calibration_of_something_else_is_neither_found_nor_believed(tmp_path: Path, change: dict):
    other = replace(IDENTITY, **change)
    store(IDENTITY.path(tmp_path), IDENTITY, RECORDS, complete=True)
    assert stored(other.path(tmp_path), other) == ([], False)
    os.replace(IDENTITY.path(tmp_path), other.path(tmp_path))
    with pytest.raises(ValueError, match=next(iter(change))):
        stored(other.path(tmp_path), other)
    assert stored_cost_model(other, str(tmp_path)) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"format": 1, "identity": {}, "complete": 1}'])
def test_a_broken_calibration_is_an_error_that_says_what_to_do(tmp_path: Path, content: str):
    path = IDENTITY.path(tmp_path)
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(ValueError, match="--overwrite"):
        stored(path, IDENTITY)


def test_one_of_a_future_format_is_refused(tmp_path: Path):
    path = IDENTITY.path(tmp_path)
    store(path, IDENTITY, RECORDS, complete=True)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    with pytest.raises(ValueError, match="format 2"):
        stored(path, IDENTITY)


@pytest.fixture
def few_shapes(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    shapes = [Shape(1, 1, 16), Shape(4, 1, 16), Shape(4, 4, 16)]
    monkeypatch.setattr(calibrate, "FULL_SHAPES", shapes)
    monkeypatch.setattr(calibrate, "ROUNDS", 1)
    return shapes


def test_a_killed_calibration_is_continued_and_a_complete_one_kept(tmp_path, few_shapes, monkeypatch, capsys):
    model = str(save_tiny(tmp_path / "tiny", dtype=torch.float64))
    options = CalibrateOptions(model=model, cache_dir=str(tmp_path / "cache"))
    run, ran = PassTimer.__call__, []

    def interrupted(timer: PassTimer, shape: Shape) -> Record:
        ran.append(shape)
        if len(ran) == 4:
            raise KeyboardInterrupt
        return run(timer, shape)

    monkeypatch.setattr(PassTimer, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate.calibrate(options)
    (path,) = (tmp_path / "cache" / "calibrations").iterdir()
    assert not json.loads(path.read_text())["complete"]
    calibrate.calibrate(options)
    assert Shape(1, 1, 16) not in ran[4:] and set(ran[4:]) == set(few_shapes[1:])
    content = path.read_text()
    assert json.loads(content)["complete"]
    assert "tokens" in capsys.readouterr().out
    calibrate.calibrate(options)
    assert path.read_text() == content


def test_an_engine_with_method_auto_takes_a_stored_calibration_and_else_measures(tmp_path, few_shapes, monkeypatch):
    model, cache = str(save_tiny(tmp_path / "tiny", dtype=torch.float64)), str(tmp_path / "cache")
    options = EngineOptions(model=model, cache_dir=cache, kv_memory=0.01)
    asked = []
    monkeypatch.setattr("speclight.infer.auto.quick_calibration", lambda model: asked.append(model) or CURVE)
    assert build_engine(prepare(options, ["auto"])).drafters["auto"].cost.calibration == CURVE
    calibrate.calibrate(CalibrateOptions(model=model, cache_dir=cache))
    cost = build_engine(prepare(options, ["auto"])).drafters["auto"].cost
    assert len(asked) == 1 and cost.calibration.tokens == (1, 4)
    build_engine(prepare(options, ["logitspec"]))
    assert len(asked) == 1


def test_the_identity_names_threads_and_device():
    from speclight.modules.bundle import fingerprint

    model = hf_tiny()
    identity = identity_of(fingerprint(model), model.dtype, model.device)
    assert identity.threads == torch.get_num_threads() and identity.dtype == "float64"
    assert identity.device.startswith("cpu, ")


def test_the_table_has_a_line_for_every_size():
    lines = calibrate.table(CURVE, 8)
    assert [line.split()[0] for line in lines[2:5]] == ["1", "8", "32"]
    assert np.isclose(float(lines[2].split()[-1]), 11_000.0)


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another identity": lambda content: content.update(identity="x"),
    "another format": lambda content: content.update(format=2),
    "complete, no boolean": lambda content: content.update(complete="no"),
    "no passes": lambda content: content.update(records=[]),
    "no pass of one sequence": lambda content: content["records"].pop(0),
    "passes that are none": lambda content: content.update(records=[3]),
    "negative seconds": lambda content: content["records"][0].update(layers=-1.0),
    "no seconds": lambda content: content["records"][0].pop("head"),
    "NaN": lambda content: content["records"][0].update(layers=math.nan),
    "infinite": lambda content: content["records"][1].update(head=math.inf),
    "too large a number": lambda content: content["records"][0].update(layers=10**400),
    "seconds whose sum is infinite": lambda content: content["records"][1].update(layers=1.7e308, head=1.7e308),
    "tokens as text": lambda content: content["records"][0]["shape"].update(tokens="1"),
    "no tokens": lambda content: content["records"][0]["shape"].update(tokens=0),
    "no sequences": lambda content: content["records"][1]["shape"].update(sequences=0),
    "a shape of other fields": lambda content: content["records"][0]["shape"].update(depth=1),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_auto_measures_anew_what_is_damaged_and_one_line_names_the_file(tmp_path, caplog, damage):
    """It was an exception of Python's, an error that named no file, or accepted and met again in a step."""
    path = IDENTITY.path(tmp_path)
    store(path, IDENTITY, RECORDS, complete=True)
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}.*--overwrite"):
        stored(path, IDENTITY)
    assert stored_cost_model(IDENTITY, str(tmp_path)) is None
    (warning,) = caplog.messages
    assert str(path) in warning and "measured anew" in warning


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["layers", "head", "per_sequence", "per_context", "per_context_of_many"])
def test_a_calibration_is_of_finite_numbers(name, number):
    values = (10.0, 12.0, number) if name in ("layers", "head") else number
    with pytest.raises(ValueError, match="finite"):
        replace(CURVE, **{name: values})


def test_the_command_refuses_a_damaged_calibration_until_it_is_overwritten(tmp_path, few_shapes, capsys):
    model, cache = str(save_tiny(tmp_path / "tiny", dtype=torch.float64)), tmp_path / "cache"
    command = ["calibrate", "--model", model, "--cache-dir", str(cache)]
    assert main(command) == 0
    (path,) = (cache / "calibrations").iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"identity": "x"}))
    assert main(command) == 2
    error = capsys.readouterr().err
    assert str(path) in error and "identity must be a dict, got 'x'" in error and "--overwrite" in error
    assert main([*command, "--overwrite"]) == main(command) == 0


def test_beside_a_prompt_a_drafted_token_costs_what_it_does_in_a_large_pass():
    """Passes are flat up to 32 tokens here and dear behind: what is free alone is not free beside 500 tokens."""
    model = CostModel(Calibration((1, 32, 64), (0.020, 0.020, 0.040), (0.0, 0.0, 0.0)))
    alone, beside = model.drafted(8, 4, 1), model.drafted(8, 4, 1, beside=500)
    assert alone == [0.020] * 9
    assert beside[0] == alone[0], "the prompt is run whatever is drafted"
    steps = [later - earlier for earlier, later in itertools.pairwise(beside)]
    assert steps == pytest.approx([0.020 / 32] * 8)
    assert model.node(8, 8, 4, 1) == 0.0
    assert model.node(8, 8, 4, 1, beside=500) == pytest.approx(0.020 / 32 / 0.020)
    several = model.drafted(8, 4, 4, beside=500)
    assert several[8] - several[0] == pytest.approx(8 * 0.020 / 32), "without a markup so far"
