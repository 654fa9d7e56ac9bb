"""Benchmarks and tools in scripts/, which no other test runs: each can be imported."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

SCRIPTS = sorted(Path(__file__).parents[2].joinpath("scripts").glob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_its_imports_are_there(path: Path) -> None:
    """Those of modules of this repository, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            if node.module.partition(".")[0] in ("dgcopt", "tests", *(other.stem for other in SCRIPTS)):
                module = importlib.import_module(node.module)
                for name in node.names:
                    assert hasattr(module, name.name) or importlib.import_module(f"{node.module}.{name.name}")
