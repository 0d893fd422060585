"""The wheel holds the package, the whole package and nothing else."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("train", "infer", "modules", "configs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy: setuptools leaves its work in the folder it builds from."""
    pytest.importorskip("setuptools")
    copy = tmp_path_factory.mktemp("wheel") / "copy"
    copy.mkdir()
    for name in (*FOLDERS, "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    build = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(copy)], cwd=copy, check=True, capture_output=True, timeout=120)
    return zipfile.ZipFile(next(copy.glob("*.whl")))


def test_the_wheel_installs_only_the_package(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"speclight"}
    assert len(tops) == 2


def test_no_source_file_is_left_out_of_the_wheel(wheel: zipfile.ZipFile) -> None:
    """Fails for a subfolder that setup.cfg does not list."""
    ours = {
        f"speclight/{path.relative_to(ROOT)}"
        for folder in FOLDERS
        for pattern in ("*.py", "*.yaml")
        for path in (ROOT / folder).rglob(pattern)
    }
    assert ours
    assert ours <= set(wheel.namelist())


def test_the_console_script_is_installed(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "speclight = speclight.infer.__main__:main" in wheel.read(name).decode()
    from speclight.infer.__main__ import main

    assert callable(main)


def test_every_installed_requirement_is_declared() -> None:
    """Fails when a module imports a package that `pip install` would not bring along."""
    declared = {re.split(r"[<>=\[]", line)[0].lower().replace("-", "_") for line in _requirements("install_requires")}
    names = {"pyyaml": "yaml"}
    known = {names.get(name, name) for name in declared} | set(sys.stdlib_module_names)
    optional = {"fastapi", "math_verify", "uvicorn"}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                for name in _absolute_imports(node):
                    assert name in known | optional, f"{path.relative_to(ROOT)} imports {name}"


def _absolute_imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [(node.module or "").split(".")[0]]
    return []


def _requirements(section: str, option: str = "options") -> list[str]:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    return [line.strip() for line in config[option][section].splitlines() if line.strip()]


def test_every_requirement_is_pinned_for_the_makefile() -> None:
    pins = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    required = [*_requirements("install_requires"), *_requirements("dev", "options.extras_require")]
    assert {re.split(r"[<>=\[]", line)[0].lower() for line in required} <= pins


def test_the_tools_settings_are_where_the_tools_look() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["tool"]["ruff"]["line-length"] == 120
    assert "--strict-markers" in settings["tool"]["pytest"]["ini_options"]["addopts"]
