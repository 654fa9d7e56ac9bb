"""Benchmarks and tools in scripts/, which no other test runs: each can be imported."""

from __future__ import annotations

import ast
import importlib
import json
from pathlib import Path

import pytest

SCRIPTS = sorted(Path(__file__).parents[2].joinpath("scripts").glob("*.py"))


OURS = {"dgcopt", "tests", *(path.stem for path in SCRIPTS)}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_its_imports_are_there(path: Path) -> None:
    """Those of modules of this repository, inside functions too."""
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    for node in imports:
        if node.module and node.module.partition(".")[0] in OURS:
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")


def test_runs_of_another_length_are_named_beside_their_accuracies(tmp_path: Path) -> None:
    compare = importlib.import_module("scripts.compare")
    runs = [tmp_path / "dense", tmp_path / "short"]
    for run, steps in zip(runs, (880, 44), strict=True):
        run.mkdir()
        (run / "result.json").write_text(json.dumps({"steps": steps, "workers": 2}))
    said = "not the same budget: dense 880 steps of 2 workers, short 44 steps of 2 workers"
    assert compare.other_budgets(runs) == said
    assert compare.other_budgets(runs[:1]) == ""
