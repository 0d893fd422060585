"""What each reward gives to what answer; programs that a model wrote, and what they must not do or get away with."""

from __future__ import annotations

import math
import os
import pickle
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path

import pytest
from speclight.train.processes import read_until
from speclight.train.rewards import (
    REWARDS,
    Answer,
    Bleu,
    ExactMatch,
    NumberMatch,
    RewardFunction,
    Rouge2,
    UnitTests,
    final_number,
    reward,
    sentence_bleu,
)
from speclight.train.unit_tests import extract_code

DOUBLE = "def f(x):\n    return 2 * x\n"


def judge(function: RewardFunction, text: str, **row) -> float:
    (value,) = function([Answer(text, row)])
    return value


# --- the interface ---------------------------------------------------------------------------------------------------


class Given(RewardFunction):
    """Rewards that the rows hold."""

    name = "given"

    def score(self, answers):
        return [value for answer in answers for value in answer.row["values"]]


def test_rewards_are_clipped_to_their_bounds_and_keep_the_order() -> None:
    answers = [Answer("", {"reference": "x", "values": [value]}) for value in (0.5, 1.0 + 1e-9, -0.1)]
    assert Given()(answers) == [0.5, 1.0, 0.0]
    assert Given()([]) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([math.nan], "reward given must be finite, got nan for the answer 'said'"),
        ([math.inf], "must be finite, got inf"),
        ([0.1, 0.2], "reward given must give 1 rewards, one per answer, got 2"),
    ],
)
def test_a_reward_that_would_poison_the_advantages_is_refused(values: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        judge(Given(), "said", reference="x", values=values)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: reward("rouge"), "reward must be one of numbers, rouge2, exact, bleu, unit-tests, got 'rouge'"),
        (lambda: reward("exact", case=True), "exact has no option 'case'; it has collapse_whitespace, ignore_case"),
        (lambda: reward("rouge2", stem=True), "rouge2 has no option 'stem'; it has none"),
        (lambda: NumberMatch("sympy"), "verifier must be one of numbers, math-verify, got 'sympy'"),
        (lambda: NumberMatch(seconds=0), "seconds must be above 0, got 0"),
        (lambda: UnitTests(True, seconds=math.inf), "seconds must be above 0, got inf"),
        (lambda: UnitTests(True, memory_mb=0), "memory_mb must be at least 1, got 0"),
        (lambda: UnitTests(), "RUNS PROGRAMS THAT A MODEL WROTE .* not a sandbox.* say allow_execution=True"),
        (lambda: reward("unit-tests", allow_execution="yes"), r"allow_execution=True \(got 'yes'\)"),
    ],
)
def test_a_wrong_setting_is_named(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", list(REWARDS))
def test_a_reward_goes_to_another_process_as_it_is(name: str) -> None:
    options = {"allow_execution": True, "seconds": 2.5} if name == "unit-tests" else {}
    made = reward(name, **options)
    assert vars(pickle.loads(pickle.dumps(made))) == vars(made)


@pytest.mark.parametrize("name", ["numbers", "rouge2", "exact", "bleu"])
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": 3}, "reference must be a text or a list of texts, got none; the row has the fields id"),
        ({"reference": " "}, "reference must not be empty, got ' '"),
        ({"reference": []}, r"reference must not be empty, got \[\]"),
        ({"reference": [["a"]]}, r"reference must be a text or a list of texts, got \[\['a'\]\]"),
        ({"reference": True}, "reference must be a text or a list of texts, got True"),
    ],
)
def test_a_row_that_no_answer_could_satisfy_is_refused(name: str, row: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reward(name)([Answer("x", row)])


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7\n#### 7", "7"),
        ("#### 7\n\nQuestion: what is 3?\n#### 3", "7"),  # what comes after the answer is not the answer
        ("### 7 apples, of 12", "7"),
        ("#### $1,234,567.50", "1234567.5"),
        ("### Step 1\nadd 2 and 3\n#### 5", "5"),
        ("## 3 of them, 4 in all", "4"),
        (r"so \boxed{42}, not 43", "42"),
        (r"first \boxed{1}, then \boxed{\text{about } 1{,}250}. See 3.", "1250"),
        (r"\boxed{12", "12"),
        ("it was 3, then 5.", "5"),
        ("she has $18.", "18"),
        ("a loss of -5", "-5"),
        ("a loss of -$5.00", "-5"),
        ("#### -1,005", "-1005"),
        ("a loss of \u22125", "-5"),
        ("20-12", "12"),  # an operator, not a sign
        ("(20)-12", "12"),
        ("x = .5", "0.5"),
        ("12,34", "34"),  # two numbers
        ("007", "7"),
        ("5" * 5000, "5" * 5000),
    ],
)
def test_the_final_number_is_found(text: str, number: str) -> None:
    assert final_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none", "####", "- . ,", r"\boxed{\frac{1}{2}} of 7", r"\boxed{x} and 7"])
def test_no_number_is_made_up(text: str) -> None:
    """Half of 7 is not 2: a box that is not one number is not read in part."""
    assert final_number(text) is None


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("It is 1,000.00.", "so\n#### 1000", 1.0),
        ("#### 1001", "so\n#### 1000", 0.0),
        ("-5", "#### 5", 0.0),
        ("", "#### 0", 0.0),
        ("0", "#### 0", 1.0),
        ("0.1", 0.1, 1.0),
        ("18", 18, 1.0),
        ("7", ["#### 6", "#### 7"], 1.0),
    ],
)
def test_numbers_are_compared_by_value(answer: str, reference, expected: float) -> None:
    assert judge(NumberMatch(), answer, reference=reference) == expected


def test_a_reference_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="reference must hold a number, got 'seven'"):
        judge(NumberMatch(), "7", reference="seven")


@pytest.mark.skipif(find_spec("math_verify") is not None, reason="math-verify is installed")
def test_math_verify_that_is_missing_is_named_when_the_reward_is_made() -> None:
    with pytest.raises(ValueError, match="'math-verify' needs a package that is missing: pip install math-verify"):
        NumberMatch("math-verify")


@pytest.fixture
def verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NumberMatch:
    """With a math-verify that compares texts, hangs at "hang" and crashes at "crash"."""
    (tmp_path / "math_verify.py").write_text(
        "import os, time\n"
        "print('libraries write to stdout')\n"
        "def parse(text, parsing_timeout):\n"
        "    if text == 'hang': time.sleep(99)\n"
        "    if text == 'crash': os.abort()\n"
        "    if text == 'raise': raise RuntimeError\n"
        "    return text.strip('$')\n"
        "def verify(gold, answer, timeout_seconds):\n"
        "    return gold == answer\n"
    )
    start = tmp_path / "python"
    start.write_text(
        f"#!/bin/sh\nshift\nexec '{sys.executable}' -c \"import runpy, sys; sys.path.insert(0, '{tmp_path}');"
        'runpy.run_path(sys.argv[1], run_name=\'__main__\')" "$@"\n'
    )
    start.chmod(0o755)
    monkeypatch.setattr("speclight.train.math_verifier.sys.executable", str(start))
    monkeypatch.setattr("speclight.train.rewards.check_installed", lambda: None)
    return NumberMatch("math-verify", seconds=0.3)


def test_an_expression_that_hangs_or_crashes_costs_its_own_reward_only(verifier: NumberMatch) -> None:
    """From a thread, where time limits by signals do not work."""
    said = ["1/2", "hang", "so #### 1/2", "crash", "1/2", "raise", "3"]
    answers = [Answer(text, {"reference": ["so #### 1/2", "4"]}) for text in said]
    started = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(verifier, answers).result() == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    assert time.monotonic() - started < 10


@pytest.mark.skipif(find_spec("math_verify") is None, reason="math-verify is not installed")
def test_the_real_math_verify_compares_expressions() -> None:
    said = [r"so $\frac{2}{4}$", "0.5", r"\boxed{\frac{1}{2}}", "2", ""]
    answers = [Answer(text, {"reference": "1/2"}) for text in said]
    assert NumberMatch("math-verify")(answers) == [1.0, 1.0, 1.0, 0.0, 0.0]


# --- texts -----------------------------------------------------------------------------------------------------------


def test_rouge_2_is_the_f_measure_of_neighbouring_words() -> None:
    """the-cat, on-the, the-mat are in common: 3 of the answer's 5 and of the reference's 6; F = 2*3/(5+6)."""
    value = judge(Rouge2(), "The cat was on the mat.", reference="the cat SAT down on the mat")
    assert value == pytest.approx(6 / 11, abs=1e-6)  # torchmetrics computes in single precision


def test_rouge_2_counts_a_repeated_pair_once_per_occurrence_in_the_reference() -> None:
    """a-b is there twice and b-a once, one a-b in the reference: precision 1/3, recall 1, F 1/2."""
    assert judge(Rouge2(), "a b a b", reference="a b") == pytest.approx(0.5, abs=1e-6)


def test_rouge_2_takes_the_best_reference_of_each_answer() -> None:
    rows = [Answer("a b c", {"reference": ["x y z", "a b c"]}), Answer("p q", {"reference": ["p r"]})]
    assert Rouge2()(rows) == pytest.approx([1.0, 0.0])
    assert Rouge2()([]) == []


@pytest.mark.parametrize("function", [Rouge2(), Bleu(), ExactMatch()])
@pytest.mark.parametrize("text", ["", " \n", "..."])
def test_an_empty_answer_earns_nothing(function: RewardFunction, text: str) -> None:
    assert judge(function, text, reference="a b c d") == 0.0


def test_bleu_by_hand() -> None:
    """Words 5 of 6, pairs 3 of 5, triples 1 of 4, no quadruple of 3: half a hit. Equal lengths, no penalty."""
    answer, reference = ["the", "cat", "sat", "on", "the", "mat"], ["the", "cat", "was", "on", "the", "mat"]
    expected = (5 / 6 * 3 / 5 * 1 / 4 * 0.5 / 3) ** (1 / 4)
    assert sentence_bleu(answer, [reference]) == pytest.approx(expected)


def test_bleu_of_a_short_answer_has_fewer_precisions_and_a_penalty() -> None:
    assert sentence_bleu(["a", "b"], [["a", "b", "c"]]) == pytest.approx(math.exp(1 - 3 / 2))
    assert sentence_bleu(["a", "b"], [["a", "b"]]) == 1.0
    assert sentence_bleu(["z", "y"], [["a", "b"]]) == 0.0
    assert sentence_bleu(["a", "b"], [list("abcdef"), list("abc")]) == pytest.approx(math.exp(1 - 3 / 2))


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),  # sacrebleu 2.6.0, sentence_bleu(use_effective_order=True) / 100
    [
        ("He said: \u201cno\u201d, for $3.50.", "He said: \u201cno\u201d, for $3.50!", 0.8633400213704508),
        ("a state-of-the-art, 10-year plan", "A state-of-the-art 10-year plan.", 0.43472087194499137),
    ],
)
def test_bleu_splits_words_as_sacrebleu_does(answer: str, reference: str, expected: float) -> None:
    assert judge(Bleu(), answer, reference=reference) == pytest.approx(expected)


def test_equality_has_its_options() -> None:
    assert judge(ExactMatch(), " Paris,\n France ", reference="Paris, France") == 1.0
    assert judge(ExactMatch(), "paris", reference=["London", "Paris"]) == 0.0
    assert judge(ExactMatch(ignore_case=True), "paris", reference=["London", "Paris"]) == 1.0
    assert judge(ExactMatch(collapse_whitespace=False), "Paris ", reference="Paris") == 0.0


# --- programs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unit_tests() -> UnitTests:
    return UnitTests(allow_execution=True, seconds=2.0)


def passes(function: UnitTests, program: str, **row) -> bool:
    return judge(function, program, **({"tests": ["assert f(2) == 4", "assert f(3) == 6"]} | row)) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        DOUBLE,
        f"Sure:\n\n```python\n{DOUBLE}```\n\nIt doubles.\n\n```python\nf(undefined)\n```",
        f"```\n{DOUBLE}",  # broken off
        f"{DOUBLE}\nThis doubles the number, isn't it?",  # without a fence the program ends where the prose begins
        f"{DOUBLE}\ndef g(x",
        f"{DOUBLE}\nif True:",  # must not make the tests part of it
        f"{DOUBLE}\n'''",
        f"{DOUBLE}\nif __name__ == '__main__':\n    print(f(int(input())))",
        "import dataclasses, fractions, heapq, re\n@dataclasses.dataclass\nclass A:\n    x: 'int'\n" + DOUBLE,
    ],
)
def test_a_right_program_passes_however_it_is_presented(unit_tests: UnitTests, answer: str) -> None:
    assert passes(unit_tests, answer)


@pytest.mark.parametrize(
    "program",
    [
        "",
        "\0",
        "not python at all",
        "def f(x):\n    return 4",
        "def f(x):\n    raise SystemExit(0)",
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "import builtins\nbuiltins.exec = builtins.compile = lambda *args, **kwargs: None",
        "import os\nos.write = lambda *args: None",
        "import ctypes\nctypes.string_at(0)",
        "f = lambda x: f(x)\nf(1)",
    ],
)
def test_a_program_that_does_not_come_through_its_tests_does_not_pass(unit_tests: UnitTests, program: str) -> None:
    """The exits fail when the exit status decides: it is 0, and no test has run."""
    assert not passes(unit_tests, program)


def test_a_program_that_never_ends_is_ended(unit_tests: UnitTests) -> None:
    quick, started = UnitTests(True, seconds=0.5, workers=2), time.monotonic()
    programs = ["while True: pass", "import time\ntime.sleep(60)"]
    assert quick([Answer(program, {"tests": "pass"}) for program in programs]) == [0.0, 0.0]
    assert 0.5 < time.monotonic() - started < 8


def escapes(unit_tests: UnitTests, attempt: str) -> bool:
    """Whether the attempt does not raise."""
    return passes(unit_tests, f"{attempt}\n{DOUBLE}")


def test_limits_hold(unit_tests: UnitTests) -> None:
    assert escapes(unit_tests, "x = bytearray(2 ** 29)")
    assert not escapes(UnitTests(True, memory_mb=256), "x = bytearray(2 ** 29)")
    assert escapes(unit_tests, "open('small', 'w').write('x' * 2 ** 20)")
    assert not escapes(unit_tests, "open('large', 'w').write('x' * 2 ** 25)")
    assert not escapes(unit_tests, "import os\nwhile True: os.fork()")
    assert not escapes(unit_tests, "import threading\nthreading.Thread(target=print).start()")
    assert not escapes(unit_tests, "import subprocess\nsubprocess.run(['true'])")
    assert not escapes(unit_tests, "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (9, 9))")


def test_output_goes_nowhere_and_fills_nothing(unit_tests: UnitTests, capfd: pytest.CaptureFixture[str]) -> None:
    assert escapes(unit_tests, "import sys\nfor _ in range(100): print('x' * 10 ** 6); sys.stderr.write('y' * 10 ** 6)")
    assert capfd.readouterr() == ("", "")


def test_a_program_finds_an_empty_folder_and_no_environment(
    unit_tests: UnitTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert escapes(unit_tests, "import os\nassert os.listdir() == [] and 'HF_TOKEN' not in os.environ")
    assert escapes(unit_tests, "import os\nassert os.getuid() != 0")


@pytest.mark.filterwarnings("ignore:unit-tests")
def test_a_program_reaches_no_server_on_this_machine(unit_tests: UnitTests) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()  # there is one
        attempt = f"import socket\nsocket.create_connection({server.getsockname()!r}, 1)"
        assert not escapes(unit_tests, attempt)


def test_where_no_namespace_is_permitted_sockets_are_blocked_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = tmp_path / "run_untrusted.py"
    source = Path(__file__).parents[2].joinpath("train/run_untrusted.py").read_text(encoding="utf-8")
    refused = source.replace("def main()", "def leave_network() -> bool:\n    return False\n\n\ndef main()")
    runner.write_text(refused.replace('def leave_network() -> bool:\n    """', 'def unused() -> bool:\n    """'))
    monkeypatch.setattr("speclight.train.unit_tests.RUNNER", runner)
    with pytest.warns(UserWarning, match="no network namespace is permitted here"):
        assert not escapes(UnitTests(True), "import socket")
    with pytest.warns(UserWarning, match="only kept from importing `socket`"):
        assert escapes(UnitTests(True), "import math")


def test_limits_that_cannot_be_set_stop_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program must not run without them, and a zero would be a lie about the model."""
    runner = tmp_path / "run_untrusted.py"
    source = Path(__file__).parents[2].joinpath("train/run_untrusted.py").read_text(encoding="utf-8")
    runner.write_text(
        source.replace('    network = "namespace"', "    raise OSError('not permitted')\n    network = \"namespace\"")
    )
    monkeypatch.setattr("speclight.train.unit_tests.RUNNER", runner)
    with pytest.raises(RuntimeError, match=r"no program was run \(error: OSError\('not permitted'\)\)"):
        passes(UnitTests(True), DOUBLE)


def test_humaneval_goes_on_from_its_prompt_or_begins_anew(unit_tests: UnitTests) -> None:
    prefix = 'from typing import List\n\n\ndef f(x: List[int]) -> int:\n    """ Sum them.\n    """\n'
    row = {"prefix": prefix, "entry_point": "f", "tests": "def check(candidate):\n    assert candidate([1, 2]) == 3\n"}
    assert passes(unit_tests, "    return sum(x)\n\nAnd that's it", **row)
    assert passes(unit_tests, "```python\ndef f(x: List[int]) -> int:\n    return sum(x)\n```", **row)
    assert not passes(unit_tests, "    return len(x)", **row)
    assert not passes(unit_tests, "", **row)


def test_setup_runs_between_the_program_and_its_tests(unit_tests: UnitTests) -> None:
    assert passes(unit_tests, "class Node: pass", setup="root = Node()", tests=["assert root is not None"])


def test_the_program_is_the_block_that_defines_what_is_asked_for() -> None:
    answer = "```sh\npip install x\n```\n```python\nimport x\n```\n```py\ndef g():\n    pass\n```"
    assert extract_code(answer) == "import x\n"
    assert extract_code(answer, "g") == "def g():\n    pass\n"
    assert extract_code(answer, "h") == "import x\n"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "tests must be a program or a list of statements, got None"),
        ({"tests": []}, r"tests must be .* got \[\]"),  # nothing to come through
        ({"tests": [1]}, r"tests must be .* got \[1\]"),
        ({"tests": "pass", "setup": 3}, "setup must be a program or a list of statements, got 3"),
        ({"tests": "pass", "entry_point": "f(1)"}, r"entry_point must be the name of a function, got 'f\(1\)'"),
        ({"tests": "pass", "prefix": ["a"]}, r"prefix must be code, got \['a'\]"),
    ],
)
def test_a_row_without_valid_tests_is_refused(unit_tests: UnitTests, row: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unit_tests([Answer(DOUBLE, row)])


def test_reading_ends_at_its_limit_and_its_deadline() -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"a\nb" * 3000)
    assert read_until(read_end, b"\n", time.monotonic() + 5).startswith(b"a\n")
    assert len(read_until(read_end, None, time.monotonic() + 5, limit=100)) >= 100
    started = time.monotonic()
    read_until(read_end, None, started + 0.2)
    assert 0.1 < time.monotonic() - started < 3
    os.close(read_end), os.close(write_end)
