"""What is public says what it is: a line, then every argument; and some page shows it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import dgcopt
from dgcopt import data, elastic, testing

ROOT = Path(__file__).resolve().parents[2]
PAGES = " ".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
NAMES = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (dgcopt, data, elastic, testing)
    for name in module.__all__
    if callable(getattr(module, name))
}


@pytest.mark.parametrize("name", NAMES)
def test_it_is_said_what_it_is(name: str) -> None:
    thing: Any = NAMES[name]
    assert thing.__doc__, "has no docstring of its own"
    words = inspect.getdoc(thing) or ""
    assert words.splitlines()[0].endswith((".", ":")), "begins with no line that stands for itself"
    assert re.search(rf"\b{thing.__name__}\b", PAGES), "is on no page"
    takes_settings = inspect.isfunction(thing) or "Args:" in words
    if takes_settings:
        settings = [setting for setting in inspect.signature(thing).parameters if not setting.startswith("_")]
        assert [setting for setting in settings if not re.search(rf"\b{setting}\b", words)] == []
