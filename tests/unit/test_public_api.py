"""The public API is the recorded one, and the files for contributors agree with the package."""

from __future__ import annotations

import ast
import configparser
import difflib
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import dgcopt

ROOT = Path(__file__).resolve().parents[2]
API = runpy.run_path(str(ROOT / "scripts" / "public_api.py"))
RECORDED = API["RECORDED"].read_text().splitlines()
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")


def test_it_is_the_recorded_one() -> None:
    difference = [*difflib.unified_diff(RECORDED, API["lines"](), "recorded", "now", n=0, lineterm="")]
    assert not difference, "python scripts/public_api.py --write, if this is meant:\n" + "\n".join(difference)


def test_every_name_of_all_is_recorded() -> None:
    recorded = {re.split(r"[(:= ]", line)[0] for line in RECORDED}
    assert {f"dgcopt.{name}" for name in dgcopt.__all__} <= recorded
    assert not any(" at 0x" in line for line in RECORDED), "an address differs in every process"


def test_modules_imported_on_demand_are_recorded() -> None:
    """Those that dgcopt's `__getattr__` names."""
    tree = ast.parse((ROOT / "dgcopt" / "__init__.py").read_text())
    (lazy,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "__getattr__"]
    (names,) = [node for node in ast.walk(lazy) if isinstance(node, ast.Tuple)]
    assert {f"dgcopt.{name}" for name in ast.literal_eval(names)} <= set(API["MODULES"])


def test_frameworks_are_recorded_where_they_are_not_installed() -> None:
    """Their modules are read, not imported; annotations and what a class inherits are left out."""
    recorded = {re.split(r"[(:= ]", line)[0] for line in RECORDED}
    for name in ("accelerate.attach", "fabric.DGCStrategy", "lightning.DGCStrategy", "trainer.attach"):
        assert f"dgcopt.integrations.{name}" in recorded
    line = "dgcopt.integrations.trainer.attach(trainer, method, resume=None)"
    assert line in [*API["written_lines"]("dgcopt.integrations.trainer")]


class Before:
    def public(self, first: int, second: str = "a") -> None: ...

    def renamed(self) -> None: ...


class Typed:
    def public(self, first: float, second: str | None = "a") -> int: ...

    def renamed(self) -> None: ...


class Default:
    def public(self, first: int, second: str = "b") -> None: ...

    def renamed(self) -> None: ...


class Order:
    def public(self, second: str = "a", first: int = 0) -> None: ...

    def renamed(self) -> None: ...


class Gone:
    def public(self, first: int, second: str = "a") -> None: ...


@pytest.mark.parametrize(("kind", "equal"), [(Typed, True), (Default, False), (Order, False), (Gone, False)])
def test_changes_that_break_callers_show(kind: type, equal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in (Before, kind):
        monkeypatch.setattr(one, "__module__", "dgcopt.thing")

    def shown(one: type) -> list[str]:
        return [*API["lines_of"]("dgcopt.Thing", one, {one: "dgcopt.Thing"})]

    assert (shown(Before) == shown(kind)) is equal


def test_versions_and_addresses_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == dgcopt.__version__
    assert citation["license"] == SETUP["metadata"]["license"]
    changes = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert changes[0] == "Unreleased" and dgcopt.__version__ in changes
    repository = citation["repository-code"]
    for path in [*ROOT.glob("*.md"), *(ROOT / ".github").rglob("*.yml"), ROOT / "setup.cfg"]:
        for address in re.findall(r"https://github\.com/[\w-]+/dgcopt\b", path.read_text()):
            assert address == repository, path.name


def test_changelog_has_the_sections_of_its_format() -> None:
    sections = re.findall(r"^### (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert set(sections) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda path: path.stem
)
def test_issue_forms_have_what_github_asks_for(path: Path) -> None:
    form: Any = SimpleNamespace(**yaml.safe_load(path.read_text()))
    assert form.name and form.description
    fields = [field for field in form.body if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields), "ids are unique"
    for field in fields:
        assert field["type"] in ("textarea", "input", "dropdown", "checkboxes")
        assert field["attributes"]["label"]
        assert ("options" in field["attributes"]) == (field["type"] in ("dropdown", "checkboxes"))


def test_hooks_before_a_commit_are_the_checks_of_the_suite() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {hook["entry"].removeprefix(".venv/bin/") for hook in repository["hooks"]}
    script = (ROOT / "scripts" / "test.sh").read_text().splitlines()
    checks = script[script.index("ruff check .") : script.index("python scripts/check_rooms.py") + 1]
    assert hooks == set(checks)
