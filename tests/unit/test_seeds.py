"""docs/seeds.md: every public name, setting and test that it names exists, and what is not here has a reason."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest
from scenarios import SCENARIOS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "seeds.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| described"))
]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_description_has_its_table() -> None:
    titles = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert titles == ["DDP communication hooks", "Reducer", "Join", "Deep Gradient Compression", "SlowMo", "Bagua"]
    assert PAGE.count("| described | here | test | what differs, and why |") == len(titles) and len(ROWS) > 60


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"[`\[\]]", "", row[0])[:50])
def test_row(row: list[str]) -> None:
    row = row if len(row) == 4 else [*row[:3], ""]
    described, here, tests, differs = (cell.rstrip("|").strip() for cell in row)
    assert described and named(tests), "a row without a test"
    assert named(here) or (here == "none" and differs), "what is not here needs a reason"
    for name in named(here):
        check_name(name)
    for name in re.findall(r"`(dgcopt\.[^`]+)`", differs):
        check_name(name)
    for name in named(tests):
        check_test(name)


def check_name(name: str) -> None:
    """A public name of dgcopt, with settings that it takes."""
    match = re.fullmatch(r"dgcopt\.([\w.]+)(?:\(((?:\w+=(?:, )?)+)\))?", name)
    assert match, f"{name} is no name with settings"
    thing, *parts = importlib.import_module("dgcopt"), *match[1].split(".")
    for part in parts:
        assert not part.startswith("_")
        if inspect.ismodule(thing) and not hasattr(thing, part):
            importlib.import_module(f"{thing.__name__}.{part}")
        thing = getattr(thing, part)
    if match[2]:
        takes = inspect.signature(thing.__init__ if inspect.isclass(thing) else thing).parameters
        assert set(re.findall(r"\w+", match[2])) <= set(takes), f"{name}: it takes {list(takes)}"


@functools.cache
def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def check_test(name: str) -> None:
    """A test function, or a scenario of real processes."""
    if "::" in name:
        path, _, function = name.partition("::")
        assert function in functions(ROOT / path), f"{path} has no {function}"
    else:
        assert name in SCENARIOS, f"there is no scenario {name!r}"


@pytest.mark.parametrize("name", ["dgcopt.NoSuch", "dgcopt.DGC(no_such=)", "dgcopt", "torch.nn"])
def test_what_does_not_exist_is_found(name: str) -> None:
    with pytest.raises((AssertionError, AttributeError, ModuleNotFoundError)):
        check_name(name)


@pytest.mark.parametrize("name", ["tests/unit/test_seeds.py::test_no_such", "loop: no_such"])
def test_a_test_that_does_not_exist_is_found(name: str) -> None:
    with pytest.raises(AssertionError):
        check_test(name)
