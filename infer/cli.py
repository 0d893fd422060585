"""The command line's frame: `speclight COMMAND --flags`, or `--config F.yaml` with the same names.

A command is a function of one dataclass, whose fields are its flags, or of the list of flags itself; its module is
imported only when the command is called, so that `speclight --help` needs no torch, and so that commands that this
package may not import can be in the table. What a user got wrong is one line on stderr and exit status 2.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

from .build import did_you_mean
from .files import read_text

COMMANDS: dict[str, tuple[str, str]] = {
    "generate": ("answer a prompt, or a file of prompts", ".generate:generate"),
    "verify": ("check on your own model that the text is that of plain decoding", ".verify:verify"),
    "bench": ("measure methods against each other and against transformers", ".bench:bench"),
    "calibrate": ("measure what the model's passes cost here, for method auto", ".calibrate:calibrate"),
    "record": ("store what a model says, to evaluate drafters without it", ".record:record"),
    "replay": ("evaluate drafters on a recording", ".replay:replay"),
    "demo": ("see it work on a small model", ".demo:demo"),
    "fit": ("train exit heads, models that exit early, or verifiers", "speclight.train.cli:fit"),
    "validate": ("measure a checkpoint on the validation data", "speclight.train.cli:validate"),
    "test": ("measure a checkpoint on the test data", "speclight.train.cli:test"),
    "export": ("make a bundle of a checkpoint, and try it out", "speclight.train.export:export"),
    "inspect": ("say what a bundle holds", "speclight.train.export:inspect_bundle"),
    "regenerate": ("make training rows of the model's own answers", "speclight.train.regenerate:regenerate"),
    "pareto": ("compare target rules: acceptance against quality", "speclight.train.pareto:pareto"),
    "index": ("make a datastore of a corpus, for logitspec to draft from", "speclight.train.index:index"),
    "states": ("store hidden states to train on", "speclight.train.states:states"),
    "rollout": ("store rewarded answers to train a verifier on", "speclight.train.rollout_command:rollout"),
    "tokenizer": ("train a small tokenizer on texts", "speclight.train.tokenizer:tokenizer"),
}
"""name -> (help, "module:function"); a module that begins with a dot is relative to this package."""

USAGE = "usage: speclight [--help | --version] [--traceback] COMMAND [--help] [--config F.yaml] [--flag VALUE ...]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: its own, 2 for a user's mistake, 130 when interrupted,
    1 for anything unforeseen."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["--traceback"]:
        return _run(arguments[1:])
    try:
        return _run(arguments)
    except BrokenPipeError:  # the reader of our output has gone, `| head` for example
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except ValueError as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        _fail(f"package {error.name!r} is missing: `pip install speclight`, without --no-deps, brings what it needs")
        return 1
    except MemoryError as error:
        return _fail(f"out of memory: {error}")
    except Exception as error:  # a fault of ours, or of a library on input that nobody foresaw
        _fail(f"{type(error).__name__}: {error} (`speclight --traceback COMMAND ...` shows where)")
        return 1
    except KeyboardInterrupt:
        sys.stdout.flush()
        print("speclight: interrupted", file=sys.stderr)
        return 130


def _fail(message: str) -> int:
    sys.stdout.flush()
    print(f"speclight: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print("\n".join(_overview()))
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"speclight {version('speclight')}")
        return 0
    name, *flags = arguments
    if name not in COMMANDS:
        raise ValueError(f"unknown command {name!r}{did_you_mean(name, list(COMMANDS))}; valid: {', '.join(COMMANDS)}")
    function = load_command(name)
    if not is_dataclass(options_class(function)):
        return function(flags) or 0
    return function(parse_options(options_class(function), flags, f"speclight {name}", COMMANDS[name][0])) or 0


def _overview() -> Iterator[str]:
    yield USAGE
    yield ""
    yield "Speculative decoding for Hugging Face causal language models: the same text, faster."
    yield ""
    for name, (purpose, _) in COMMANDS.items():
        yield f"  {name:<12}{purpose}"
    yield ""
    yield "`speclight COMMAND --help` lists a command's flags; --traceback shows where an error came from."


def load_command(name: str) -> Any:
    """The function behind a command."""
    module, function = COMMANDS[name][1].split(":")
    return getattr(importlib.import_module(module, __package__), function)


def options_class(function: Any) -> Any:
    """What a command takes: a dataclass, or `list[str]`, the flags as they are."""
    return next(hint for name, hint in get_type_hints(function).items() if name != "return")


def parse_options(options: type, flags: Sequence[str], prog: str, description: str = "") -> Any:
    """An instance of the dataclass from flags and YAML files.

    `max_new_tokens` is the flag --max-new-tokens and the YAML key max_new_tokens; a nested dataclass is a dotted flag
    and a mapping. A bool is a pair --chat/--no-chat. Raises ValueError for what is not valid, with the nearest name.
    """
    import jsonargparse

    parser = jsonargparse.ArgumentParser(
        prog=prog, description=description, exit_on_error=False, allow_abbrev=False, print_config="--print-config"
    )
    parser.add_argument("--config", action="config", help="YAML file of these options, with _ for -")
    entries = list(_entries(options))
    for entry in entries:
        entry.add_to(parser)
    _check_flags(flags, [*parser._option_string_actions])
    for path in _config_files(flags):
        _check_keys(path, {entry.dest for entry in entries})
    try:
        return _instance(options, parser.parse_args(list(flags)))
    except jsonargparse.ArgumentError as error:
        raise ValueError(_readable(str(error))) from error


@dataclass(frozen=True)
class _Entry:
    """One flag. dest: its dotted name in YAML. group: the docstring of the dataclass that it belongs to."""

    dest: str
    type: Any
    field: Field[Any]
    group: str

    def add_to(self, parser: Any) -> None:
        from jsonargparse import ActionYesNo

        group = parser.groups.get(self.group) if parser.groups else None
        group = group or parser.add_argument_group(self.group, name=self.group)
        settings = dict(self.field.metadata)
        default = self.field.default
        if "nargs" in settings and isinstance(default, tuple):
            default = list(default)  # jsonargparse writes into it
        settings |= {"required": True} if default is MISSING else {"default": default}
        if self.type in (bool, bool | None):
            settings["action"] = ActionYesNo(yes_prefix="", no_prefix="no-")
        else:
            settings["type"] = str if "nargs" in settings else self.type
        group.add_argument("--" + self.dest.replace("_", "-"), **settings)


def _entries(options: type, prefix: str = "") -> Iterator[_Entry]:
    hints = get_type_hints(options)
    for base in reversed(options.__mro__):
        for item in fields(options):
            if item.name not in inspect.get_annotations(base):
                continue
            if is_dataclass(hints[item.name]):
                yield from _entries(hints[item.name], f"{prefix}{item.name}.")
            else:
                yield _Entry(prefix + item.name, hints[item.name], item, _first_sentence(base.__doc__))


def _first_sentence(text: str | None) -> str:
    return (text or "options").strip().partition(".")[0]


def _check_flags(flags: Sequence[str], valid: Sequence[str]) -> None:
    """argparse knows only that an argument is not its own; this knows what was meant."""
    for flag in flags:
        name = flag.partition("=")[0]
        if name == "--":
            return
        if name.startswith("--") and name not in valid:
            raise ValueError(f"unknown option {name}{did_you_mean(name, valid)}")


def _config_files(flags: Sequence[str]) -> list[Path]:
    inline = [flag.partition("=")[2] for flag in flags if flag.startswith("--config=")]
    following = [value for flag, value in pairwise(flags) if flag == "--config"]
    return [Path(name) for name in inline + following]


def _check_keys(path: Path, valid: set[str]) -> None:
    import yaml

    try:
        values = yaml.safe_load(read_text("config", path))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping of options, got {type(values).__name__}")
    groups = {name.partition(".")[0] for name in valid if "." in name}
    for key, value in values.items():
        inner = [f"{key}.{name}" for name in value] if key in groups and isinstance(value, dict) else [str(key)]
        for name in inner:
            if name not in valid:
                raise ValueError(f"{path}: unknown key {name!r}{did_you_mean(name, sorted(valid))}")


def _readable(message: str) -> str:
    """jsonargparse's message in one line, with flags as they are typed."""
    message = re.sub(r"<class '(\w+)'>", r"\1", " ".join(message.split())).replace("typing.", "")
    message = re.sub(r'Parser key "([\w.]+)": ?', lambda match: f"--{match[1].replace('_', '-')}: ", message)
    message = re.sub(
        r"Does not validate against any of the Union subtypes Subtypes: \[(\w+), NoneType\] .* Given value: ",
        r"Expected a \1 or null. Got value: ",
        message,
    )
    required = re.fullmatch(r"the following arguments are required: (.*)", message)
    if required is None:
        return message
    return ", ".join("--" + name.replace("_", "-") for name in required[1].split(", ")) + " is required"


def _instance(options: type, values: Any) -> Any:
    """The dataclass, with dataclasses in it, from jsonargparse's namespace."""
    hints = get_type_hints(options)
    arguments = {}
    for item in fields(options):
        value = getattr(values, item.name)
        if is_dataclass(hints[item.name]):
            value = _instance(hints[item.name], value)
        arguments[item.name] = tuple(value) if isinstance(value, list) else value
    return options(**arguments)
