"""Every code block of README.md and docs/ runs here, is run by another test, or says that it is a fragment.

A line before the block says so, which the web host and the site do not show:

    <!-- fragment: why it cannot run by itself -->
    <!-- part of examples/survive.py -->                         word for word, and tests run that script
    <!-- run by tests/distributed/test_examples.py::test_name -->

Without it a block of Python runs: the blocks of a page one after another, in one process, with the names of
`given()`. Blocks of `text` are output and formulas.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import dgcopt

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"(?:^ *<!-- (?P<mark>[^\n]*) -->\n)?^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<code>.*?)^ *```$", re.M | re.S
)
MARK = re.compile(r"(fragment|part of|run by):? (\S.*)")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str
    mark: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    blocks = list(FENCE.finditer(text))
    assert len(re.findall(r"^ *```", text, re.M)) == 2 * len(blocks), f"{page}: a block does not end"
    return [
        Block(
            page,
            text.count("\n", 0, found.start("code")),
            found["language"],
            re.sub(f"^{found['indent']}", "", found["code"], flags=re.M),
            found["mark"] or "",
        )
        for found in blocks
    ]


def given() -> dict[str, Any]:
    """The names that a page may use without defining them: those of a script for one process."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return {
        "torch": torch,
        "nn": nn,
        "dgcopt": dgcopt,
        "model": model,
        "loader": [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(3)],
        "loss_fn": nn.functional.cross_entropy,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    }


def run(page: Path) -> None:
    """Run the blocks of a page as a module; an error tells its line on the page.

    Without a module, classes of a page would be builtins to torch's compiler, for the rest of the process.
    """
    module = ModuleType("page")
    vars(module).update(given())
    with patch.dict(sys.modules, page=module):
        for block in blocks_of(page):
            if block.language == "python" and not block.mark:
                exec(compile("\n" * block.line + block.code, str(page), "exec"), vars(module))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        run(page)
    finally:
        dgcopt.shutdown()


def test_a_broken_block_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nx = 1\n```\n\n1. Item\n\n    ```python\n    y = x + nowhere\n    ```\n")
    with pytest.raises(NameError, match="nowhere"):
        run(page)
    page.write_text("<!-- fragment: of a script -->\n```python\nnowhere\n```\n")
    run(page)


def functions(path: Path) -> Iterator[str]:
    return (node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_that_do_not_run_say_why(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language in ("python", "bash", "yaml", "text"), f"{block}: language {block.language!r}"
        if block.language == "text" or (block.language == "python" and not block.mark):
            continue
        found = MARK.fullmatch(block.mark)
        assert found, (
            f"{block}: <!-- fragment: why -->, <!-- part of FILE --> or <!-- run by TEST -->, not {block.mark!r}"
        )
        if found[1] == "part of":
            assert block.code in (ROOT / found[2]).read_text(), f"{block} is not in {found[2]} word for word"
        elif found[1] == "run by":
            path, _, name = found[2].partition("::")
            assert name in functions(ROOT / path), f"{block}: there is no {found[2]}"
            assert page.name in (ROOT / path).read_text(), f"{block}: {path} does not name {page.name}"
