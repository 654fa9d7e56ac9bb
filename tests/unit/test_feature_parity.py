"""docs/feature-parity.md and the loops of docs/sharded.md: every name and test on them exists, or a reason is given."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest

from tests.distributed.scenarios import catalogue, in_shards

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "feature-parity.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| feature |"))
]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_source_has_its_table() -> None:
    titles = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert titles == ["DDP communication hooks", "Reducer", "Join", "Deep Gradient Compression", "SlowMo", "Bagua"]
    assert PAGE.count("| feature | in dgcopt | test | difference, and why |") == len(titles) and len(ROWS) > 60


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"[`\[\]]", "", row[0])[:50])
def test_row(row: list[str]) -> None:
    row = row if len(row) == 4 else [*row[:3], ""]
    feature, here, tests, differs = (cell.rstrip("|").strip() for cell in row)
    assert feature and named(tests), "a row without a test"
    assert named(here) or (here == "none" and differs), "a missing feature needs a reason"
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
        assert name in catalogue.SCENARIOS | in_shards.SCENARIOS, f"there is no scenario {name!r}"


@pytest.mark.parametrize("name", ["dgcopt.NoSuch", "dgcopt.DGC(no_such=)", "dgcopt", "torch.nn"])
def test_an_unknown_name_is_found(name: str) -> None:
    with pytest.raises((AssertionError, AttributeError, ModuleNotFoundError)):
        check_name(name)


@pytest.mark.parametrize("name", ["tests/unit/test_feature_parity.py::test_no_such", "loop: no_such"])
def test_an_unknown_test_is_found(name: str) -> None:
    with pytest.raises(AssertionError):
        check_test(name)


def loops_of_sharded() -> list[list[str]]:
    page = (ROOT / "docs" / "sharded.md").read_text()
    table = page[page.index("## Every loop, and its test") :].split("\n\n")[2]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


@pytest.mark.parametrize("row", loops_of_sharded(), ids=lambda row: row[0].strip("| ").replace("`", ""))
def test_a_loop_has_tests_or_reasons(row: list[str]) -> None:
    _, *cells = row
    assert len(cells) == 4
    for cell in cells:
        tests = [name for name in named(cell) if "::" in name or ": " in name]
        assert tests or len(cell.split()) > 2, f"{cell!r} is neither a test nor a reason"
        for name in tests:
            check_test(name)
