"""scripts/check_rooms.py finds uses of other modules' private names and circles of imports, and only those."""

from __future__ import annotations

import ast
import itertools
import runpy
from pathlib import Path

import pytest

check = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "check_rooms.py"))


def found(code: str, may_simulate: bool = False) -> list[str]:
    return [what for _, what in check["faults"](ast.parse(code), may_simulate)]


@pytest.mark.parametrize(
    "code, what",
    [
        ("from .engine import _Flight", "imports _Flight"),
        ("from ._engine import Flight", "imports _engine"),
        ("optimizer._engine.hold()", "optimizer._engine"),
        ("self.outer._engine = None", "self.outer._engine"),
        ("getattr(optimizer, '_raw', False)", "getattr(optimizer, '_raw', False)"),
        ("comm.nudge()", "names nudge: only the wires and the runner know of simulated ranks"),
        (
            "from .comm import simulated_world",
            "names simulated_world: only the wires and the runner know of simulated ranks",
        ),
    ],
)
def test_it_finds(code: str, what: str) -> None:
    assert found(code) == [what]


@pytest.mark.parametrize(
    "code",
    [
        "self._engine.hold()",
        "super()._start()",
        "class A:\n    def __init__(self, other):\n        self._kept = other._kept",
        "def _own(): pass\nmodule._own()",
        "tensor._version",
        "from .version import __version__",
        "hasattr(self, '_hooked')",
    ],
)
def test_it_leaves(code: str) -> None:
    assert found(code) == []


@pytest.mark.parametrize(
    ("code", "of"),
    [
        ("class A:\n    def f(self):\n        self.outgoing.stale = True", "self.outgoing.stale"),
        ("def f(ctx):\n    ctx.step, ctx.certain = 1, True", "ctx.step"),
        ("def f(telemetry):\n    telemetry.skipped += 1", "telemetry.skipped"),
        ("def f(engine):\n    def g():\n        engine.due: bool = True\n    return g", "engine.due"),
        ("def f(x):\n    for x.place in range(3): pass", "x.place"),
        (
            "class A:\n    def f(self):\n        self.step_count = 1\n        self.other.step_count = 2",
            "self.other.step_count",
        ),
        ("def f():\n    made = Engine()\n    return made\ndef g(made):\n    made.due = True", "made.due"),
        ("def made(made):\n    made.due = True", "made.due"),
    ],
)
def test_it_finds_assignments_to_what_others_own(code: str, of: str) -> None:
    assert [what for _, what in check["assignments"](ast.parse(code))][:1] == [f"assigns {of}: give its owner a method"]


@pytest.mark.parametrize(
    "code",
    [
        "class A:\n    def f(self):\n        self.due = True",
        "def f(param):\n    param.grad = None",
        "def f():\n    made = Engine()\n    made.due = True",
        "def f(old):\n    made = copy.copy(old)\n    made.due = True",
        "def f():\n    made = Pending[int](3)\n    made.due = True",
        "class A:\n    due: bool\ndef f(a):\n    a.due = True",
        "def f():\n    def inner(): pass\n    inner.__name__ = 'outer'\n    return inner",
        "def f(options):\n    options._timeout = 3",
    ],
)
def test_it_leaves_what_is_own(code: str) -> None:
    assert not [*check["assignments"](ast.parse(code))]


def test_wires_may_name_simulated_ranks() -> None:
    assert found("comm.nudge()", may_simulate=True) == []


def test_a_circle_is_named_in_the_order_of_its_imports() -> None:
    graph = {"flat": {"kernels"}, "kernels": {"coding"}, "coding": {"flat"}, "comm": {"flat"}}
    found = check["circle"](graph)
    assert len(found) == 4 and found[0] == found[-1]
    assert all(imported in graph[module] for module, imported in itertools.pairwise(found))
    assert check["circle"](graph | {"coding": set()}) == []


def test_an_arrow_is_counted_once_for_two_rooms() -> None:
    imports = {
        "dgcopt": {"dgcopt.comm"},
        "dgcopt.comm": {"dgcopt.comm.base"},
        "dgcopt.comm.base": {"dgcopt.errors", "dgcopt.collectives"},
        "dgcopt.comm.torch": {"dgcopt.errors"},
        "dgcopt.errors": set(),
        "dgcopt.collectives": {"dgcopt.errors"},
    }
    assert check["drawing"](imports) == {
        "dgcopt": {"dgcopt.comm"},
        "dgcopt.comm": {"dgcopt.errors", "dgcopt.collectives"},
        "dgcopt.errors": set(),
        "dgcopt.collectives": {"dgcopt.errors"},
    }


def test_imports_within_functions_and_for_types_are_seen() -> None:
    imports = check["imports"]()
    assert "dgcopt.comm.torch" in imports["dgcopt.comm.launch"]  # inside a function
    assert "dgcopt.data" not in imports["dgcopt"]  # imported by name, when asked for


def test_every_room_has_its_tests_under_its_name() -> None:
    root = Path(__file__).parents[2]
    rooms = {path.stem.strip("_") for path in (root / "dgcopt").glob("[!.]*") if (path / "__init__.py").exists()}
    rooms |= {path.stem.strip("_") for path in (root / "dgcopt").glob("*.py") if path.name != "__init__.py"}
    unit = root / "tests" / "unit"
    folders = {path.name for path in unit.iterdir() if path.is_dir() and [*path.glob("test_*.py")]}
    assert len(rooms) > 20 and not folders - rooms, "folders of tests without a room"
    assert not rooms - folders - {path.stem.removeprefix("test_") for path in unit.glob("test_*.py")}


def test_rooms_and_arrows_have_limits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rooms, arrows = check["MOST"]
    for most in ((rooms - 3, arrows), (rooms, arrows - 9)):
        monkeypatch.setitem(check["main"].__globals__, "MOST", most)
        assert check["main"]() == 1
        assert f"more than the {most[0]} rooms and {most[1]} arrows" in capsys.readouterr().out
