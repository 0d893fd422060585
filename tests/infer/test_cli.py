"""The command line answers at once, and what a user gets wrong is one line on stderr with exit status 2."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoint import CHAT_TEMPLATE, save_tiny, tiny_tokenizer
from speclight.infer import build, cli, generate
from speclight.infer.build import EngineOptions, LogitSpecOptions, PromptLookupOptions, RequestOptions, option
from speclight.infer.cli import COMMANDS, load_command, main, options_class, parse_options
from speclight.infer.generate import GenerateOptions
from speclight.infer.request import Completion, GenerationParams, StreamChunk, TokenOrigin
from speclight.infer.stats import SequenceStats
from speclight.infer.terminal import COLOURS, RESET, coloured, print_stream, summary
from speclight.modules.flex_attention import flex_paged_attention

TRAINING = {"fit", "validate", "test"}
"""Commands whose flags are Lightning's."""

METHODS = ["ar", "prompt-lookup", "logitspec", "draft-model"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("checkpoints") / "tiny", dtype=torch.float64))


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model without a chat template."""
    return str(save_tiny(tmp_path_factory.mktemp("checkpoints") / "base", chat=False))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message, after checking that the refusal has the right form."""
    capsys.readouterr()
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("speclight: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


# -- the frame -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS if name not in TRAINING)]
)
def test_help_answers_without_importing_torch_and_in_under_two_seconds(arguments: list[str]) -> None:
    """The time is the best of three: the machine may be busy with other tests."""
    code = (
        "import sys; from speclight.infer.cli import main\n"
        f"try: main({arguments})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'lightning', 'scipy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        seconds.append(time.perf_counter() - started)
        assert done.returncode == 0, done.stderr
        assert done.stdout
        if seconds[-1] < 2.0:
            return
    pytest.fail(f"took {min(seconds):.1f} s")


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in COMMANDS)
    assert main([]) == 2


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in {*TRAINING, "inspect"}])
def test_every_command_can_be_loaded_and_every_flag_has_a_help_text(name: str) -> None:
    entries = list(cli._entries(options_class(load_command(name))))
    assert entries
    assert [entry.dest for entry in entries if not entry.field.metadata.get("help")] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["genrate"], "unknown command 'genrate'; did you mean 'generate'?"),
        (["generate", "--modle", "x"], "unknown option --modle; did you mean '--model'?"),
        (["generate", "--model", "x", "--temprature=1"], "unknown option --temprature; did you mean '--temperature'?"),
        (["generate", "--model", "x", "--max_new_tokens", "3"], "did you mean '--max-new-tokens'?"),
        (["generate", "--model", "x", "--temp", "1"], "unknown option --temp"),
        (["generate", "--model", "x", "--logitspec.capasity", "3"], "did you mean '--logitspec.capacity'?"),
        (["generate", "--model", "x", "stray"], "unrecognized arguments: stray"),
        (["generate"], "--model is required"),
        (["generate", "--model", "x", "--max-new-tokens", "many"], "--max-new-tokens: Expected a int. Got value: many"),
        (["generate", "--model", "x", "--seed", "1.5"], "--seed: Expected a int or null. Got value: 1.5"),
        (["generate", "--model", "x", "--dtype", "float23"], "'bfloat16'"),
        (["generate", "--model", "x", "--config", "/no/such.yaml"], "/no/such.yaml: No such file or directory"),
        (["generate", "--model", "x"], "--prompt TEXT, or --input F.jsonl"),
        (["generate", "--model", "x", "--prompt", "a", "--input", "b"], "--prompt TEXT, or --input F.jsonl"),
        (["generate", "--model", "x", "--input", "a"], "--input and --output go together"),
        (["generate", "--model", "x", "--prompt", "a", "--stream", "--n", "2"], "n must be 1"),
        (["generate", "--model", "x", "--input", "a", "--output", "./a"], "must be another file"),
        (["generate", "--model", "x", "--input", "/no/such.jsonl", "--output", "a"], "/no/such.jsonl: No such file"),
        (["generate", "--model", "/no/such", "--prompt", "a"], "'/no/such' does not exist; it must be a hub id"),
        (["generate", "--model", "x", "--prompt", "a", "--temperature", "-1"], "temperature must be a number from 0"),
        (["generate", "--model", "x", "--prompt", "a", "--threads", "0"], "threads must be from 1 to 1024, got 0"),
        (["generate", "--model", "x", "--prompt", "a", "--device", "gpu"], "device must be auto, cpu, cuda"),
        (["generate", "--model", "x", "--prompt", "a", "--method", "logitspek"], "did you mean 'logitspec'?"),
        (["generate", "--model", "x", "--prompt", "a", "--method", "draft-model"], "needs --draft-model"),
        (["generate", "--model", "x", "--prompt", "a", "--chat-template", "/no/t.jinja"], "/no/t.jinja: No such file"),
    ],
)
def test_a_mistake_is_one_line_with_what_would_be_valid(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temprature: 1", "F.yaml: unknown key 'temprature'; did you mean 'temperature'?"),
        ("logitspec: {capasity: 1}", "unknown key 'logitspec.capasity'; did you mean 'logitspec.capacity'?"),
        ("max-new-tokens: 1", "did you mean 'max_new_tokens'?"),
        ("[1, 2]", "must hold a mapping"),
        ("a: [", "is not valid YAML"),
        ("max_new_tokens: many", "--max-new-tokens: Expected a int"),
        ("logitspec: 3", "logitspec"),
    ],
)
def test_a_mistake_in_a_yaml_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "F.yaml").write_text(text)
    assert message in refused(capsys, "generate", "--model", "x", "--config", str(tmp_path / "F.yaml"))
    assert message in refused(capsys, "generate", "--model", "x", f"--config={tmp_path / 'F.yaml'}")


def test_a_config_that_is_no_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "F.yaml").write_bytes(b"\xff")
    printed = refused(capsys, "generate", "--model", "x", "--config", str(tmp_path / "F.yaml"))
    assert f"config {tmp_path / 'F.yaml'} is not UTF-8 text" in printed


def test_flags_and_yaml_set_the_same_options_and_the_later_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "F.yaml"
    path.write_text("model: m\ntop_k: 5\nchat: false\nstop: [x, y]\nlogitspec: {capacity: 9, prune: [[1, 2]]}\n")
    from_yaml = parse_options(GenerateOptions, ["--config", str(path)], "p")
    flags = ["--model", "m", "--top-k", "5", "--no-chat", "--stop", "x", "y", "--logitspec.capacity", "9"]
    assert from_yaml == parse_options(GenerateOptions, [*flags, "--logitspec.prune", "[[1, 2]]"], "p")
    assert from_yaml.logitspec == LogitSpecOptions(capacity=9, prune=((1, 2),))
    assert from_yaml.stop == ("x", "y")
    assert parse_options(GenerateOptions, ["--config", str(path), "--top-k", "7"], "p").top_k == 7


def test_without_flags_every_option_has_its_default() -> None:
    assert parse_options(GenerateOptions, ["--model", "m"], "p") == GenerateOptions(model="m")


@pytest.mark.parametrize(("flag", "value"), [("--chat", True), ("--no-chat", False), (None, None)])
def test_a_switch_has_two_forms_and_can_be_left_open(flag: str | None, value: bool | None) -> None:
    assert parse_options(GenerateOptions, ["--model", "m", *([flag] if flag else [])], "p").chat is value


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("top_k must be\n  something"), 2, "speclight: error: top_k must be something\n"),
        (FileNotFoundError(2, "No such file or directory", "F"), 2, "speclight: error: F: No such file or directory\n"),
        (KeyboardInterrupt(), 130, "speclight: interrupted\n"),
    ],
)
def test_what_a_command_raises_becomes_a_line_and_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, status: int, line: str
) -> None:
    def failing(options: GenerateOptions) -> None:
        raise error

    monkeypatch.setattr(generate, "generate", failing)
    assert main(["generate", "--model", "m"]) == status
    assert capsys.readouterr().err == line
    with pytest.raises(type(error)):
        main(["--traceback", "generate", "--model", "m"])


def test_the_unforeseen_is_one_line_with_a_way_to_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(options: GenerateOptions) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(generate, "generate", failing)
    assert main(["generate", "--model", "m"]) == 1
    printed = capsys.readouterr().err
    assert "TypeError: a bug" in printed and "--traceback" in printed and printed.count("\n") == 1
    with pytest.raises(TypeError):
        main(["--traceback", "generate", "--model", "m"])


@pytest.mark.parametrize("name", ["jsonargparse", "torch"])
def test_a_package_that_is_missing_is_named_with_what_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """As in a wheel installed with --no-deps; the modules that import it are loaded anew."""
    for module in [module for module in sys.modules if module.startswith("speclight.infer.loading")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    assert main(["generate", "--model", "owner/name", "--prompt", "a"]) == 1
    printed = capsys.readouterr().err
    assert f"package '{name}' is missing: `pip install speclight`" in printed
    assert printed.count("\n") == 1


QUICK_MISTAKES = {
    "flag": ["--modle", "x"],
    "value": ["--model", "x", "--max-new-tokens", "many"],
    "range": ["--model", "x", "--prompt", "a", "--temperature", "-1"],
    "engine": ["--model", "x", "--prompt", "a", "--block-size", "0"],
    "device": ["--model", "x", "--prompt", "a", "--device", "gpu"],
    "method": ["--model", "x", "--prompt", "a", "--method", "logitspek"],
    "model": ["--model", "/no/such", "--prompt", "a"],
    "draft model": ["--model", ".", "--prompt", "a", "--method", "draft-model", "--draft-model", "/no/such"],
    "template": ["--model", "x", "--prompt", "a", "--chat-template", "/no/such"],
    "combination": ["--model", "x", "--stream"],
    "input": ["--model", "x", "--input", "/no/such.jsonl", "--output", "y"],
    "row": ["--model", "x", "--input", "rows.jsonl", "--output", "y"],
}


def test_mistakes_in_flags_paths_and_rows_are_answered_without_importing_torch(tmp_path: Path) -> None:
    """Importing torch and transformers takes seconds; a slip of the hand should be answered at once."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "top_p": 3}')
    code = (
        "import json, sys; from speclight.infer.cli import main\n"
        "heavy = lambda: sorted({'torch', 'transformers', 'scipy', 'numpy'} & set(sys.modules))\n"
        "results = {name: [main(['generate', *flags]), heavy()] for name, flags in json.load(sys.stdin).items()}\n"
        "print(json.dumps(results))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(QUICK_MISTAKES),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=tmp_path,
    )
    assert json.loads(done.stdout) == {name: [2, []] for name in QUICK_MISTAKES}, done.stderr


# -- options are what they stand for -----------------------------------------------------------------------------------


def test_request_flags_have_the_names_and_defaults_of_the_engines_parameters() -> None:
    reference = {item.name: item for item in fields(GenerationParams)}
    for item in fields(RequestOptions):
        assert item.name in reference
        if item.name != "method":  # the engine's own default drafts nothing; the command's is to be fast
            assert item.default == reference[item.name].default, item.name
    assert RequestOptions(method="ar").params() == GenerationParams(method="ar")


@pytest.mark.parametrize(
    ("options", "module", "name"),
    [
        (LogitSpecOptions, "logitspec", "LogitSpecDrafter"),
        (PromptLookupOptions, "prompt_lookup", "PromptLookupDrafter"),
    ],
)
def test_drafter_flags_have_the_names_and_defaults_of_the_constructors(options: type, module: str, name: str) -> None:
    loaded = __import__(f"speclight.infer.{module}", fromlist=[name])
    parameters = inspect.signature(getattr(loaded, name)).parameters
    ours = {item.name: item.default for item in fields(options)}
    theirs = {parameter.name: parameter.default for parameter in parameters.values() if parameter.name != "clock"}
    assert ours.keys() == theirs.keys()
    by_device = {"capacity"} if options is LogitSpecOptions else set()  # unset on the command line: see build.CAPACITY
    assert {name for name in ours if ours[name] != theirs[name]} == by_device


def test_a_required_option_has_no_default() -> None:
    assert "model" in inspect.signature(EngineOptions).parameters
    with pytest.raises(TypeError):
        EngineOptions()
    assert option(3, "help").default == 3


# -- building --------------------------------------------------------------------------------------------------------


def test_a_draft_model_with_another_tokenizer_is_refused_before_weights_are_read(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = save_tiny(tmp_path)
    tokens = [*tiny_tokenizer().convert_ids_to_tokens(range(96))]
    tiny_tokenizer(tokens=[*tokens[:9], tokens[10], tokens[9], *tokens[11:]]).save_pretrained(draft)
    (draft / "model.safetensors").write_bytes(b"not weights")
    message = refused(
        capsys, "generate", "--model", model, "--prompt", "a", "--method", "draft-model", "--draft-model", str(draft)
    )
    assert str(draft) in message
    assert model in message
    assert "token id 9 is" in message


@pytest.mark.parametrize("methods", [["ar"], ["logitspec", "prompt-lookup"]])
def test_a_draft_model_that_no_method_reads_is_refused(model: str, methods: list[str]) -> None:
    with pytest.raises(ValueError, match=f"draft_model is read by draft-model; method is {' and '.join(methods)}"):
        build.prepare(EngineOptions(model=model, draft_model=model), methods)


@pytest.mark.parametrize("method", METHODS)
def test_an_engine_is_built_for_every_method(model: str, method: str) -> None:
    draft = model if method in ("draft-model", "auto") else None
    options = EngineOptions(model=model, draft_model=draft, block_size=4, max_num_seqs=3, kv_memory=0.01)
    engine = build.build_engine(build.prepare(options, [method]))
    assert engine.default_method == method
    assert set(engine.drafters) == {"ar", method}
    assert engine.cache.block_size == 4
    (result,) = engine.generate("abcab", GenerationParams(max_new_tokens=3))
    assert len(result.token_ids) == 3


def test_the_model_and_a_draft_model_attend_as_asked(model: str) -> None:
    with pytest.raises(ValueError, match="attention must be sdpa with cuda_graphs, got 'flex'"):
        build.prepare(EngineOptions(model=model, attention="flex", cuda_graphs=True), ["ar"])
    with pytest.raises(ValueError, match="cuda_graphs needs device cuda, this is 'cpu'"):
        build.prepare(EngineOptions(model=model, device="cpu", cuda_graphs=True), ["ar"])
    options = EngineOptions(model=model, draft_model=model, attention="flex", block_size=4, kv_memory=0.001)
    engine = build.build_engine(build.prepare(options, ["draft-model"]))
    assert engine.model.attention is engine.drafters["draft-model"].model.attention is flex_paged_attention


# -- generate --------------------------------------------------------------------------------------------------------


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["generate", "--max-new-tokens", "6", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("method", METHODS)
def test_every_method_prints_the_text_of_plain_decoding(
    model: str, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    flags = ["--model", model, "--prompt", "abcabcabc"]
    plain = output_of(capsys, *flags, "--method", "ar")
    flags += ["--draft-model", model] if method == "draft-model" else []
    assert output_of(capsys, *flags, "--method", method) == plain
    assert output_of(capsys, *flags, "--method", method, "--stream") == plain
    row = json.loads(output_of(capsys, *flags, "--method", method, "--json"))
    assert row["text"] + "\n" == plain
    assert row["stats"]["emitted_tokens"] == len(row["token_ids"]) == 6


def test_a_stream_of_json_ends_with_the_whole_row(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = output_of(
        capsys, "--model", model, "--prompt", "abc", "--method", "ar", "--stream", "--json", "--logprobs", "2"
    )
    *chunks, row = map(json.loads, lines.splitlines())
    assert "".join(chunk["text"] for chunk in chunks) == row["text"]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == row["token_ids"]
    assert len(row["logprobs"]) == 6


def test_several_texts_of_one_prompt_are_numbered(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", model, "--prompt", "abc", "--method", "ar", "--n", "2", "--temperature", "1", "--seed", "3"]
    printed = output_of(capsys, *flags)
    assert printed.startswith("[0] ")
    assert "\n[1] " in printed
    assert output_of(capsys, *flags) == printed


def test_the_chat_template_is_used_by_default_where_there_is_one(
    model: str, base_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    rendered = {"chat": "u:abc;a:", "system": "s:xy;u:abc;a:", "raw": "abc"}

    def text(*flags: str) -> str:
        return output_of(capsys, "--method", "ar", *flags)

    expected = {name: text("--model", model, "--no-chat", "--prompt", prompt) for name, prompt in rendered.items()}
    assert len(set(expected.values())) == 3
    assert text("--model", model, "--prompt", "abc") == expected["chat"]
    assert text("--model", model, "--prompt", "abc", "--system", "xy") == expected["system"]
    assert text("--model", base_model, "--prompt", "abc", "--dtype", "float32") == expected["raw"]
    assert text("--model", base_model, "--prompt", "abc", "--chat-template", str(template)) == expected["chat"]


def test_a_chat_with_a_base_model_names_the_flag_that_helps(
    base_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "build_engine", None)  # refused before weights are read
    assert "--chat-template" in refused(capsys, "generate", "--model", base_model, "--prompt", "a", "--chat")
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    files = ["--input", str(source), "--output", str(tmp_path / "out.jsonl")]
    message = refused(capsys, "generate", "--model", base_model, *files)
    assert "in.jsonl:2" in message
    assert "--chat-template" in message
    assert "system needs a chat" in refused(
        capsys, "generate", "--model", base_model, "--prompt", "a", "--system", "be brief"
    )


def test_a_wrong_row_is_refused_before_the_model_is_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a", "top_kk": 1}\n')
    files = ["--input", str(source), "--output", str(tmp_path / "out.jsonl")]
    message = refused(capsys, "generate", "--model", "/no/such", *files)
    assert "in.jsonl:1: unknown field 'top_kk'; did you mean 'top_k'?" in message


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"token_ids": [1, 96]}, r"prompt: token ids must be in [0, 96), got 96"),
        ({"prompt": "ab", "stop_token_ids": [3, 500]}, "stop_token_ids: token ids must be in [0, 96), got 500"),
        ({"prompt": "ab", "logit_bias": {"96": 1}}, "logit_bias: token ids must be in [0, 96), got 96"),
        ({"token_ids": [1] * 513}, "prompt has 513 tokens; the longest text here is 512"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "prompt has 605 tokens; the longest text here is 512"),
        ({"prompt": "ab", "draft_tokens": 5000}, "draft_tokens must be at most 1024, got 5000"),
        ({"prompt": "a\ud800"}, "prompt cannot be tokenised"),
    ],
)
def test_a_row_that_the_model_can_never_run_is_refused_before_weights_are_read(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch, row: dict, message: str
) -> None:
    monkeypatch.setattr(generate, "build_engine", None)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps(row) + "\n")
    files = ["--input", str(source), "--output", str(output)]
    printed = refused(capsys, "generate", "--model", model, "--method", "ar", "--no-chat", *files)
    assert f"in.jsonl:2: {message}" in printed


def test_a_prompt_that_the_model_can_never_run_is_refused_before_weights_are_read(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "build_engine", None)
    printed = refused(capsys, "generate", "--model", model, "--prompt", "x" * 600)
    assert "--prompt: prompt has 605 tokens; the longest text here is 512" in printed


def test_an_unsupported_architecture_ends_with_status_two_and_never_waits(tmp_path: Path) -> None:
    """Neither weights nor tokenizer are there, and the checkpoint brings code: what it is must be said first, and
    nothing asked on the terminal."""
    config = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "speclight.infer", "generate", "--model", str(tmp_path), "--prompt", "a"]
    done = subprocess.run(command, stdin=subprocess.PIPE, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "model_type 'mamba' (MambaForCausalLM) is not supported; supported: llama, " in done.stderr
    assert done.stderr.count("\n") == 1


def test_overwriting_prepares_once(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, prepare = [], generate.prepare
    monkeypatch.setattr(generate, "prepare", lambda *given: calls.append(given) or prepare(*given))
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    files = ["--model", model, "--method", "ar", "--input", str(source), "--output", str(output), "--overwrite"]
    for _ in range(2):
        assert output_of(capsys, *files) == ""
        assert len(output.read_text().splitlines()) == 2
    assert len(calls) == 2


def test_a_file_is_answered_with_each_rows_own_method_and_then_complete(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"id": "plain", "prompt": "abcabc"},
        {"id": "own", "prompt": "abcabc", "method": "draft-model", "draft_tokens": 2, "max_new_tokens": 5},
        {"id": "ids", "token_ids": [5, 6, 7], "n": 2},
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--model", model, "--draft-model", model, "--method", "ar"]
    files = ["--input", str(source), "--output", str(output)]
    assert output_of(capsys, *flags, *files) == ""
    found = {(row["id"], row["index"]): row for row in map(json.loads, output.read_text().splitlines())}
    assert set(found) == {("plain", 0), ("own", 0), ("ids", 0), ("ids", 1)}
    assert found["own", 0]["token_ids"] == found["plain", 0]["token_ids"][:5]
    assert found["own", 0]["stats"]["drafted"] > 0
    assert found["plain", 0]["stats"]["drafted"] == 0

    monkeypatch.setattr(generate, "build_engine", None)  # nothing is left to do, so nothing is loaded
    assert output_of(capsys, *flags, *files) == ""
    assert "temperature=0.0" in refused(
        capsys, "generate", "--max-new-tokens", "6", *flags, *files, "--temperature", "1"
    )


def test_an_output_that_is_no_file_is_refused_before_weights_are_read(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "build_engine", None)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", "/dev/null"]
    for more in ([], ["--overwrite"]):
        printed = refused(capsys, "generate", "--model", model, "--method", "ar", *files, *more)
        assert "output '/dev/null' is not a regular file" in printed


def test_an_interrupt_exits_130_and_the_same_command_continues(model: str, tmp_path: Path) -> None:
    """A real process and a real signal, sent once the first results are on disk.

    A shell's background jobs ignore this signal, and what they start does too unless told otherwise.
    """
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": i, "prompt": f"a{i}"}) + "\n" for i in range(200)))
    flags = ["--model", model, "--method", "ar", "--max-num-seqs", "2", "--max-new-tokens", "40", "--threads", "1"]
    command = ["generate", *flags, "--input", str(source), "--output", str(output)]
    how = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True, "preexec_fn": heeds}
    process = subprocess.Popen([sys.executable, "-m", "speclight.infer", *command], **how)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (output.exists() and output.stat().st_size):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    assert "Traceback" not in printed
    kept = output.read_bytes()
    said = re.search(r"speclight: (\d+) of 200 prompts are done; the same command continues", printed)
    assert said and kept.count(b"\n") - int(said[1]) in (0, 1)  # one may be written and not counted yet
    assert 0 < kept.count(b"\n") < 200
    assert main(command) == 0
    assert output.read_bytes().startswith(kept)
    assert sorted(json.loads(line)["id"] for line in output.read_text().splitlines()) == list(range(200))


# -- the terminal ----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def chunk(text: str, ids: list[int], kinds: list[str], last: bool = False) -> StreamChunk:
    completion = Completion("r", 0, [], ids, text, "stop", SequenceStats()) if last else None
    return StreamChunk("r", 0, text, ids, [TokenOrigin(kind, "logitspec") for kind in kinds], completion)


def test_colours_mark_the_origin_of_each_token_and_leave_the_text_as_it_is() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("abcd").input_ids
    painted = coloured(chunk("abcd", ids, ["accepted", "accepted", "corrected"]), tokenizer)
    assert painted == (f"{COLOURS['accepted']}ab{RESET}{COLOURS['accepted']}c{RESET}{COLOURS['corrected']}d{RESET}")
    for kinds in (["accepted"], ["bonus"] * 5, []):
        text = coloured(chunk("é?", ids, kinds), tokenizer)
        assert _plain(text) == "é?"


def _plain(text: str) -> str:
    for code in {*COLOURS.values(), RESET}:
        text = text.replace(code, "")
    return text


def test_colours_appear_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from speclight.infer.terminal import use_colour

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert use_colour(Terminal())
    assert not use_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not use_colour(Terminal())
    out = io.StringIO()
    chunks = [chunk("ab", [95], ["accepted"]), chunk("c", [68], ["bonus"], last=True)]
    assert print_stream(chunks, tiny_tokenizer(), out, colour=False) is chunks[-1].completion
    assert out.getvalue() == "abc\n"


def test_the_summary_counts_all_texts() -> None:
    stats = SequenceStats(emitted_tokens=6, target_passes=2, drafted=8, accepted=4, seconds=2.0)
    done = Completion("r", 0, [], [], "", "stop", stats)
    figures = "12 tokens in 2.0 s (6.0/s), 3.00 per pass of the model, 8 of 16 drafted accepted"
    assert summary([done, done]) == figures
    assert summary([done, done], lossless=False) == f"{figures}; lossy: 0.000 from the model's own distribution a token"


def test_overwrite_keeps_the_old_results_when_the_run_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    output.write_text("precious\n")
    files = ["--input", str(source), "--output", str(output), "--overwrite"]
    refused(capsys, "generate", "--model", str(tmp_path / "missing"), *files)
    assert output.read_text() == "precious\n"


def test_rows_that_end_in_an_error_are_counted_and_the_status_says_so(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing_left = {str(token_id): float("-inf") for token_id in range(96)}
    rows = [{"prompt": "ab"}, {"prompt": "ab", "logit_bias": nothing_left}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert main(["generate", "--model", model, "--max-new-tokens", "3", *paths]) == 1
    assert "1 texts ended in an error, the first: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--logitspec.capacity", "1000000", "logitspec.capacity must be from 1 to 1024, got 1000000"),
        ("--logitspec.k", "1000000000", "logitspec.k must be from 0 to 1024, got 1000000000"),
        ("--prompt-lookup.num-tokens", "0", "prompt_lookup.num_tokens must be from 1 to 1024, got 0"),
        ("--kv-memory", "1e-7", "kv_memory must hold a block of "),
        ("--block-size", "100000000", "block_size must be from 1 to 4096, got 100000000"),
        ("--threads", "100000", "threads must be from 1 to 1024, got 100000"),
    ],
)
def test_sizes_beyond_use_are_refused_before_weights_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str, message: str
) -> None:
    model = save_tiny(tmp_path)
    (model / "model.safetensors").write_bytes(b"not weights")
    assert message in refused(capsys, "generate", "--model", str(model), "--prompt", "a", flag, value)


def test_answers_of_other_weights_in_the_same_place_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, source, output = save_tiny(tmp_path / "m"), tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "ab"}\n{"prompt": "cd"}\n')
    flags = [
        "generate",
        "--model",
        str(model),
        "--input",
        str(source),
        "--output",
        str(output),
        "--max-new-tokens",
        "3",
    ]
    assert main(flags) == 0
    first, _ = output.read_text().splitlines()
    output.write_text(first + "\n")
    save_tiny(model, seed=1)
    assert "was written with weights=" in refused(capsys, *flags)
    assert output.read_text() == first + "\n"
