"""The benchmark: what is chosen, in which order it runs, what a killed run keeps, and that its report is true."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from checkpoint import save_tiny
from speclight.infer import Engine, GenerationParams, LogitSpecDrafter
from speclight.infer.bench import LOOKUP_PEER, PLAIN_PEER, Variant, check_folder, parse_methods, parse_peers
from speclight.infer.cli import main
from speclight.infer.measure import Ledger, Measured, batches, engine_runner, find_differences, measure, schedule
from speclight.infer.peers import ContinuousPeer, TransformersPeer
from speclight.infer.questions import Item, Question, make_items, read_questions, select
from speclight.infer.summary import Difference, Run
from support import hf_tiny, tiny_lm

CATEGORIES = ["writing", "coding", "qa", "rag"]
ROWS = [
    {"question_id": number, "category": category, "turns": [f"ab ab {number} ab ab {category}", "and again ab"]}
    for number, category in enumerate(CATEGORIES * 3)
]


def write_rows(path: Path, rows: list) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


# -- what is run -----------------------------------------------------------------------------------------------------


def test_plain_decoding_is_always_there_and_sizes_make_variants() -> None:
    variants = parse_methods(["logitspec:16,prompt-lookup", "logitspec", "ar"], draft_tokens=8)
    assert variants == [
        Variant("ar", "ar"),
        Variant("logitspec:16", "logitspec", 16),
        Variant("prompt-lookup", "prompt-lookup", 8),
        Variant("logitspec", "logitspec", 8),
    ]


@pytest.mark.parametrize("name", ["logitspek", "logitspec:", "logitspec:x", "ar:3", "logitspec:-1", "logitspec:١٦"])
def test_a_method_or_size_that_is_none_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name.partition(":")[0]):
        parse_methods([name])


def test_peers_stand_for_plain_and_lookup_and_batches_leave_lookup_out() -> None:
    assert parse_peers(["transformers"], 1) == [PLAIN_PEER, LOOKUP_PEER]
    assert parse_peers(["transformers-plain"], 1) == [PLAIN_PEER]
    assert parse_peers(["transformers"], 4) == [PLAIN_PEER]
    assert parse_peers([], 1) == []
    with pytest.raises(ValueError, match="one prompt at a time"):
        parse_peers([LOOKUP_PEER], 4)
    with pytest.raises(ValueError, match="did you mean 'transformers'"):
        parse_peers(["transformer"], 1)


def test_questions_are_sorted_by_id_and_checked_with_their_line(tmp_path) -> None:
    path = write_rows(tmp_path / "q.jsonl", ROWS[::-1])
    assert [question.question_id for question in read_questions(path)] == list(range(12))
    for fault, message in [
        ({"category": None}, "q.jsonl:1: category must be a string"),
        ({"turns": []}, "turns must be a list of texts"),
        ({"turns": [""]}, "turns must be a list of texts"),
        ({"question_id": [1]}, "question_id must be an integer or a string"),
        ({"question_id": True}, "question_id must be an integer or a string, got True"),
        ({"question_id": 1}, "question_id must be unique"),
    ]:
        write_rows(tmp_path / "q.jsonl", [ROWS[0] | fault, ROWS[1]])
        with pytest.raises(ValueError, match=message):
            read_questions(path)
    (tmp_path / "q.jsonl").write_text("{not json")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_questions(path)


def ids(questions: list[Question]) -> list[int | str]:
    return [question.question_id for question in questions]


def test_selection_strides_within_groups_and_lets_them_take_turns(tmp_path) -> None:
    """mt_bench holds ids 0 1 4 5 8 9, qa 2 6 10, rag 3 7 11."""
    questions = read_questions(write_rows(tmp_path / "q.jsonl", ROWS))
    assert ids(select(questions, per_group=2, stride=2)) == [0, 2, 3, 4, 10, 11]
    assert ids(select(questions, limit=4)) == [0, 2, 3, 1]
    assert sorted(map(str, ids(select(questions)))) == sorted(map(str, range(12)))


def test_every_method_leads_equally_often_and_finishes_a_unit_before_the_next() -> None:
    plan = list(schedule(units=6, repeats=2, methods=["a", "b", "c"]))
    assert len(plan) == len(set(plan)) == 36
    rounds = [plan[start : start + 3] for start in range(0, 36, 3)]
    assert all(len({(repeat, unit) for repeat, unit, _ in one}) == 1 for one in rounds)
    for place in range(3):
        assert set(Counter(one[place][2] for one in rounds).values()) == {4}


def test_later_turns_follow_plain_decodings_answers() -> None:
    from checkpoint import tiny_tokenizer

    engine = Engine(
        tiny_lm(), tiny_tokenizer(), drafters=[LogitSpecDrafter()], default_method="logitspec", num_blocks=64
    )
    questions = [Question(0, "qa", ("ab", "cd")), Question(1, "qa", ("ef",)), Question(2, "qa", ("gh", "ij"))]
    items, left_out = make_items(engine, questions, "all", True, 6)
    assert not left_out
    assert [(item.question.question_id, item.turn) for item in items] == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
    answer = engine.generate([items[0].token_ids], GenerationParams(method="ar", max_new_tokens=6))[0].text
    dialogue = [("user", "ab"), ("assistant", answer), ("user", "cd")]
    assert items[1].token_ids == engine.encode([{"role": role, "content": text} for role, text in dialogue])
    assert [item.turn for item in make_items(engine, questions, "first", True, 6)[0]] == [0, 0, 0]


# -- running it ------------------------------------------------------------------------------------------------------


def fake_runner(calls: list[str], name: str, token_ids: list[int], seconds: float = 1.0):
    def run(prompts, max_new_tokens):
        calls.append(name)
        return Measured(seconds, [list(token_ids) for _ in prompts], [None] * len(prompts))

    return run


ITEMS = [Item(Question(number, "qa", ("?",)), 0, [number + 2, 5, 6]) for number in range(3)]


def test_a_killed_run_goes_on_where_it_was_and_a_torn_row_is_done_again(tmp_path) -> None:
    """Each run of each method on each unit is made once, whatever the moment of the kill."""
    path = tmp_path / "rows.jsonl"
    units = batches(ITEMS, 1)
    calls: list[str] = []
    runners = {name: fake_runner(calls, name, [1, 2]) for name in ("ar", "x")}

    def killed(prompts, max_new_tokens):
        if len(calls) >= 5:  # two of warm-up, three runs
            raise KeyboardInterrupt
        return fake_runner(calls, "x", [1, 2])(prompts, max_new_tokens)

    ledger = Ledger(path, {"a": 1})
    with pytest.raises(KeyboardInterrupt):
        measure(runners | {"x": killed}, units, 1, 8, ledger)
    ledger.close()
    done = len(ledger.runs)
    assert 0 < done < 6
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])  # a kill in the middle of a write
    calls.clear()
    ledger = Ledger(path, {"a": 1})
    measure(runners, units, 1, 8, ledger)
    ledger.close()
    assert len(calls) == 2 + 6 - (done - 1)
    again = Ledger(path, {"a": 1})
    again.close()
    assert Counter((run.unit, run.method) for run in again.runs) == dict.fromkeys(
        [(unit, name) for unit in range(3) for name in ("ar", "x")], 1
    )
    assert again.runs == ledger.runs


def test_rows_of_other_settings_are_refused_and_overwrite_begins_anew(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    ledger = Ledger(path, {"a": 1, "t": (1, 2)})
    ledger.add(Run(0, 0, "ar", 1.0, []))
    ledger.close()
    with pytest.raises(ValueError, match=r"measured with a=1, now it is 2; use another --output"):
        Ledger(path, {"a": 2, "t": (1, 2)})
    kept = Ledger(path, {"a": 1, "t": (1, 2)})
    kept.close()
    anew = Ledger(path, {"a": 2}, overwrite=True)
    anew.add(Run(1, 0, "ar", 1.0, []))
    anew.close()
    assert ([run.unit for run in kept.runs], [run.unit for run in anew.runs]) == ([0], [1])
    again = Ledger(path, {"a": 2})
    again.close()
    assert again.runs == anew.runs


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("torn", [b"", b'{"run": {"method": "\xc3'])  # the second ends inside a character
def test_what_a_file_held_stays_until_the_first_new_row(tmp_path, overwrite: bool, torn: bytes) -> None:
    """A run may be refused after it took the file."""
    path = tmp_path / "rows.jsonl"
    ledger = Ledger(path, {"a": 1})
    ledger.add(Run(0, 0, "ä", 1.0, []))
    ledger.close()
    before = path.read_bytes() + torn
    path.write_bytes(before)
    ledger = Ledger(path, {"a": 1}, overwrite)
    ledger.close()
    assert (path.read_bytes(), len(ledger.runs)) == (before, 0 if overwrite else 1)
    ledger = Ledger(path, {"a": 1}, overwrite)
    ledger.add(Run(1, 0, "ä", 1.0, []))
    ledger.close()
    assert len(path.read_bytes().splitlines()) == (2 if overwrite else 3)
    again = Ledger(path, {"a": 1})
    again.close()
    assert again.runs == ledger.runs


@pytest.mark.parametrize(
    "damage", [b"junk", b"", b"[1]", b"\xff", b'{"other": 1}', b'{"run": {}}', b'{"run": 5}', b'{"settings": "x"}']
)
@pytest.mark.parametrize("number", [1, 2])
def test_a_damaged_row_is_refused_by_its_place(tmp_path, damage: bytes, number: int) -> None:
    """Also when it stands where the settings should: rows that do not say theirs are not continued."""
    path = tmp_path / "rows.jsonl"
    lines = [b'{"settings": {"a": 1}}', damage][2 - number :]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    with pytest.raises(ValueError, match=rf"rows\.jsonl:{number}: "):
        Ledger(path, {"a": 1})
    assert path.read_bytes().splitlines() == lines


def test_rows_without_settings_are_refused_with_what_to_do(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"run": {"unit": 0, "repeat": 0, "method": "ar", "seconds": 1.0, "outputs": []}}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: the first line must hold the settings.*or --overwrite"):
        Ledger(path, {})


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_run_into_the_same_rows_is_refused_while_the_first_goes_on(tmp_path, overwrite: bool) -> None:
    """Two runs would mix their rows, and disturb each other's times."""
    path = tmp_path / "rows.jsonl"
    first = Ledger(path, {"a": 1})
    with pytest.raises(ValueError, match=r"rows\.jsonl is being written by another run"):
        Ledger(path, {"a": 1}, overwrite=overwrite)
    first.add(Run(0, 0, "ar", 1.0, []))
    first.close()
    again = Ledger(path, {"a": 1})
    again.close()
    assert again.runs == first.runs


def test_differences_are_found_with_the_gap_at_the_first_one_and_only_once(tmp_path) -> None:
    engine = Engine(tiny_lm(), drafters=[], num_blocks=64)
    text = engine.generate([ITEMS[0].token_ids], GenerationParams(max_new_tokens=4))[0].token_ids
    wrong = [*text[:2], (text[2] + 1) % 96, text[3]]
    runners = {
        "ar": fake_runner([], "ar", text),
        "x": fake_runner([], "x", wrong),
        "y": fake_runner([], "y", text[:3]),
    }
    ledger = Ledger(tmp_path / "rows.jsonl", {})
    measure(runners, batches(ITEMS[:1], 1), 1, 4, ledger)
    find_differences(engine, ITEMS, ledger)
    find_differences(engine, ITEMS, ledger)
    ledger.close()
    by_method = {difference.method: difference for difference in ledger.differences}
    assert len(ledger.differences) == 2
    assert (by_method["x"].position, by_method["x"].token, by_method["x"].reference_token) == (2, wrong[2], text[2])
    assert by_method["x"].gap > 0.0
    assert (by_method["y"].position, by_method["y"].token, by_method["y"].gap) == (3, None, None)
    assert json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[-1])["difference"]["gap"] is None
    reread = Ledger(tmp_path / "rows.jsonl", {})
    reread.close()
    assert all(isinstance(difference, Difference) for difference in reread.differences)
    assert reread.differences == ledger.differences


def test_every_run_of_a_method_starts_cold() -> None:
    """A prompt that was run before must not come from the prefix cache, and the counters are of this run alone."""
    engine = Engine(tiny_lm(), drafters=[LogitSpecDrafter()], num_blocks=64, block_size=4)
    run = engine_runner(engine, GenerationParams(method="logitspec"))
    first, second = run([list(range(2, 20))], 8), run([list(range(2, 20))], 8)
    assert first.token_ids == second.token_ids
    assert second.stats[0]["cached_tokens"] == 0
    assert second.engine["steps"] == first.engine["steps"] > 0
    assert second.stats[0]["emitted_tokens"] == 8


# -- transformers beside it ------------------------------------------------------------------------------------------


def plain(prompts: list[list[int]], **params) -> list[list[int]]:
    """Our plain decoding, in float32: padded rows of transformers' eager attention are NaN in float64."""
    engine = Engine(tiny_lm(dtype=torch.float32), num_blocks=64)
    return [text.token_ids for text in engine.generate(prompts, GenerationParams(max_new_tokens=12, **params))]


@pytest.mark.parametrize(
    ("kind", "lookup"), [(TransformersPeer, False), (TransformersPeer, True), (ContinuousPeer, False)]
)
def test_peer_gives_the_ids_of_our_plain_decoding_up_to_and_with_the_end(kind, lookup: bool) -> None:
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9]]
    end = next(token_id for at, token_id in enumerate(plain(prompts)[1]) if at > 2)
    ours = plain(prompts, stop_token_ids=(end,))
    peer = kind(hf_tiny(dtype=torch.float32), pad_id=0, eos_ids={end}, lookup=lookup)
    theirs = [peer.generate([prompt], 12)[0] for prompt in prompts] if lookup else peer.generate(prompts, 12)
    assert theirs == ours
    assert ours[1][-1] == end
    assert len(ours[1]) < 12


def test_peer_ignores_the_checkpoints_own_generation_settings() -> None:
    """A repetition penalty or a sampling default in generation_config.json would make it another task than ours."""
    model = hf_tiny()
    expected = TransformersPeer(model, 0, ()).generate([[5, 6, 7]], 10)
    model.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=4.0, eos_token_id=expected[0][0])
    assert TransformersPeer(model, 0, ()).generate([[5, 6, 7]], 10) == expected


def test_sampling_peer_repeats_with_its_seed() -> None:
    peer = TransformersPeer(hf_tiny(), 0, (), temperature=1.0, seed=3)
    torch.manual_seed(0)
    first = peer.generate([[5, 6, 7]], 10)
    assert peer.generate([[5, 6, 7]], 10) == first
    assert replace_seed(peer, 4).generate([[5, 6, 7]], 10) != first


def replace_seed(peer: TransformersPeer, seed: int) -> TransformersPeer:
    peer.seed = seed
    return peer


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("bench") / "tiny"))


def bench(model: str, data: str, output: Path, *flags: str) -> int:
    fixed = ["--max-new-tokens", "6", "--kv-memory", "0.02"]
    return main(["bench", "--model", model, "--data", data, "--output", str(output), *fixed, *flags])


def test_command_measures_reports_and_continues(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_rows(tmp_path / "q.jsonl", ROWS[:4])
    flags = ["--methods", "logitspec:8,prompt-lookup", "--peers", "transformers", "--limit", "3"]
    assert bench(model, data, tmp_path / "out", *flags) == 0
    table = capsys.readouterr().out
    methods = ["ar", "logitspec:8", "prompt-lookup", PLAIN_PEER, LOOKUP_PEER]
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == methods
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert len(report["runs"]) == 3 * len(methods)
    for method in methods[1:]:
        assert report["summary"][method]["all"]["different"] == 0
    assert report["summary"]["logitspec:8"]["all"]["counts"]["drafted"] > 0
    facts = report["header"]["facts"]
    assert facts.keys() >= {"device", "processor", "dtype", "versions", "near-tie gap", "command", "decoding"}
    rows = (tmp_path / "out" / "rows.jsonl").read_bytes()
    assert bench(model, data, tmp_path / "out", *flags) == 0
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == rows
    assert bench(model, data, tmp_path / "out", *flags, "--repeats", "2") == 2
    assert "repeats=1, now it is 2" in capsys.readouterr().err
    small = ("--kv-memory", "0.00001", "--block-size", "1")  # known to be too small once the weights are there
    assert bench(model, data, tmp_path / "out", *flags, "--overwrite", *small) == 2
    assert "no prompt can be run" in capsys.readouterr().err
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == rows


def test_rows_of_other_weights_or_another_template_are_not_continued(model: str, tmp_path: Path, capsys) -> None:
    """What is given by its place may have changed there."""
    data, template = write_rows(tmp_path / "q.jsonl", ROWS[:2]), tmp_path / "chat.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    mine = save_tiny(tmp_path / "mine")
    flags = ["--methods", "ar", "--limit", "1", "--chat-template", str(template)]
    assert bench(str(mine), data, tmp_path / "out", *flags) == 0
    template.write_text("{{ messages[0]['content'] }}b")
    assert bench(str(mine), data, tmp_path / "out", *flags) == 2
    assert "was measured with chat_template=" in capsys.readouterr().err
    template.write_text("{{ messages[0]['content'] }}")
    save_tiny(mine, seed=1)
    assert bench(str(mine), data, tmp_path / "out", *flags) == 2
    assert "was measured with weights=" in capsys.readouterr().err


def test_what_sampled_texts_do_not_show_is_said(model: str, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "q.jsonl", ROWS[:1])
    said = {}
    for name, chains in (("trees", []), ("chains", ["--early-exit.layer", "1"])):
        flags = ["--methods", "auto:4", "--temperature", "0.7", "--limit", "1", *chains]
        assert bench(model, data, tmp_path / name, *flags) == 0
        said[name] = " ".join(json.loads((tmp_path / name / "report.json").read_text())["header"]["flags"])
    assert "auto drafts for texts with seeds by trees alone" in said["chains"]
    assert "by trees alone" not in said["trees"] and "hispec" not in said["chains"]


def test_batches_mix_the_groups_and_flags_say_what_is_not_valid(model: str, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "q.jsonl", ROWS[:4])
    flags = [
        "--methods",
        "logitspec:8",
        "--peers",
        "transformers",
        "--batch-size",
        "3",
        "--ignore-eos",
        "--turns",
        "all",
    ]
    assert bench(model, data, tmp_path / "out", *flags) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert list(report["summary"]) == ["ar", "logitspec:8", PLAIN_PEER]
    assert [len(run["outputs"]) for run in report["runs"] if run["method"] == "ar"] == [3, 3, 2]
    assert report["summary"]["ar"]["qa"]["tokens_per_second"] is None
    assert report["summary"]["ar"]["qa"]["mat"] == 1.0
    assert report["summary"][PLAIN_PEER]["all"]["different"] == 0
    text = " ".join(report["header"]["flags"])
    assert "acceptance are not valid" in text
    assert "batches mix the groups" in text and "left out of batches" in text
    assert all(len(output["token_ids"]) == 6 for run in report["runs"] for output in run["outputs"])


def test_prompts_too_long_for_the_context_are_named_and_left_out(model: str, tmp_path: Path) -> None:
    rows = [ROWS[0], ROWS[1] | {"turns": ["ab" * 508]}]
    data = write_rows(tmp_path / "q.jsonl", rows)
    assert bench(model, data, tmp_path / "out", "--methods", "ar") == 0
    header = json.loads((tmp_path / "out" / "report.json").read_text())["header"]
    assert any("left out: question 1, prompt has" in flag for flag in header["flags"])
    assert header["facts"]["prompts"].startswith("1 from")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--methods", "logitspeck"], "did you mean 'logitspec'"),
        (["--batch-size", "0"], "batch_size must be at least 1"),
        (["--turns", "all", "--no-chat"], "turns=all needs a chat"),
        (["--peers", "vllm"], "peers must be among"),
        (["--methods", "logitspec:5000"], "draft_tokens must be at most 1024, got 5000"),
        (["--max-new-tokens", "512"], "max_new_tokens must leave room for a prompt: at most 511 of 512"),
    ],
)
def test_command_refuses_wrong_values_before_anything_runs(
    model: str, tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_rows(tmp_path / "q.jsonl", ROWS[:2])
    assert bench(model, data, tmp_path / "out", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "mine.txt").write_text("dear")
    with pytest.raises(ValueError, match="not empty and holds no bench"):
        check_folder(tmp_path / "letters")
    check_folder(tmp_path / "new")


def test_a_run_without_results_leaves_no_settings_behind(tmp_path: Path) -> None:
    Ledger(tmp_path / "rows.jsonl", {"data": "a"}).close()
    Ledger(tmp_path / "rows.jsonl", {"data": "b"}).close()
