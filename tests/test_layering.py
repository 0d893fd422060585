"""Imports go one way: modules <- infer <- train; heavy packages are imported where they are used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "configs": set(),
    "modules": set(),
    "infer": {"modules", "configs"},
    "train": {"modules", "infer", "configs"},
}
LATE = {"lightning", "pytorch_lightning", "fastapi", "peft", "datasets"}
FILES = [path for folder in MAY_IMPORT for path in sorted((ROOT / folder).rglob("*.py"))]


def imports(tree: ast.AST, depth: int) -> Iterator[tuple[str, bool]]:
    """(imported name, whether it runs on import of the module). A relative name starts at the repository root.

    depth: how many folders the module lies below the root.
    """
    late = {child for node in ast.walk(tree) if _runs_later(node) for child in ast.walk(node) if child is not node}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node not in late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level > depth:  # above its own top folder: the next name is a folder of ours
                names = [module] if module else [alias.name for alias in node.names]
                yield from ((f"..{name}", node not in late) for name in names)
            elif node.level == 0:
                yield module, node not in late


def _runs_later(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return True
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def violations(folder: str, source: str, depth: int = 1) -> list[str]:
    found = []
    for name, at_import in imports(ast.parse(source), depth):
        top = name.removeprefix("..").split(".")[0]
        if name.startswith("..") and top not in MAY_IMPORT[folder]:
            found.append(f"{folder} imports {top}")
        elif not name.startswith("..") and top == "speclight":
            found.append(f"absolute import of {name}: imports between our folders are relative")
        elif folder in ("modules", "infer") and at_import and top in LATE:
            found.append(f"{top} is imported with the module: import it where it is used")
        elif folder in ("modules", "infer") and top in ("lightning", "pytorch_lightning"):
            found.append(f"{folder} needs {top}, which belongs to train")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    folder, *rest = path.relative_to(ROOT).parts
    assert violations(folder, path.read_text(encoding="utf-8"), len(rest)) == []


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("modules", "from ..infer import engine"),
        ("modules", "from ..infer.engine import Engine"),
        ("modules", "from .. import infer"),
        ("modules", "def f():\n    from ..train import losses"),
        ("infer", "from ..train.losses import exit_loss"),
        ("infer", "if TYPE_CHECKING:\n    from ..train import losses"),
        ("infer", "from speclight.modules import batch"),
        ("train", "import speclight.infer"),
        ("infer", "import lightning.pytorch as pl"),
        ("infer", "def f():\n    import lightning"),
        ("infer", "class A:\n    import fastapi"),
        ("modules", "from datasets import load_dataset"),
        ("modules", "try:\n    import peft\nexcept ImportError:\n    pass"),
    ],
)
def test_a_wrong_arrow_would_be_found(folder: str, source: str) -> None:
    assert violations(folder, source)


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("infer", "from ..modules.batch import RaggedBatch\nfrom .request import Prompt\nfrom . import build"),
        ("train", "from ..infer import Engine\nimport lightning"),
        ("infer", "def f():\n    import fastapi\n    from datasets import load_dataset"),
    ],
)
def test_a_right_arrow_is_let_through(folder: str, source: str) -> None:
    assert violations(folder, source) == []


def test_there_is_no_package_in_the_root_or_in_tests() -> None:
    """pytest would import everything twice."""
    assert not (ROOT / "__init__.py").exists()
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_test_files_have_names_of_their_own() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("*.py")]
    assert len(names) == len(set(names))
