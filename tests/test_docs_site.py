"""The documentation site: one strict build, in which every public name has an entry and no link is dead."""

from __future__ import annotations

import html
import importlib
import inspect
import re
from pathlib import Path
from urllib.parse import unquote

import docs_site
import public_api
import pytest

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/dgcopt/dgcopt"
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. The strict build fails by itself for a page that is not in the navigation, and for dead links."""
    config = pytest.importorskip("mkdocs.config")
    from mkdocs.commands.build import build
    from mkdocs.exceptions import Abort

    folder = tmp_path_factory.mktemp("site")
    try:
        build(config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    except Abort as error:
        pytest.fail(f"mkdocs build --strict: {error}")
    return folder


def test_every_page_is_there(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).with_suffix("")
        built = site / (name.parent if name.name == "index" else name) / "index.html"
        assert built.exists(), f"{page} is not on the site"


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    anchors = set()
    for page in (site / "reference").rglob("*.html"):
        anchors |= set(re.findall(r'id="(dgcopt\.[\w.]+)"', page.read_text()))
    recorded = [line.partition("(")[0] for line in public_api.RECORDED.read_text().splitlines()]
    frameworks = {name for name in recorded if re.fullmatch(r"dgcopt\.integrations\.\w+\.\w+", name)}
    missing, count = sorted(frameworks - anchors), 0
    for module in public_api.MODULES:
        here = importlib.import_module(module)
        for name in public_api.ONLY.get(module, here.__all__):
            thing = getattr(here, name)
            if not inspect.ismodule(thing) and not isinstance(thing, int) and not name.startswith("__"):
                count += 1
                if not {f"{module}.{name}", f"dgcopt.{name}"} & anchors:
                    missing.append(f"{module}.{name}")
    assert count > 150 and not missing


def test_links_to_files_of_the_repository(site: Path) -> None:
    """They lead to the web host of the code, and to files that exist; relative ones stay on the site."""
    found, outside = set(), f"{REPOSITORY}/(?:blob|tree|edit)/main/"
    for page in site.rglob("*.html"):
        for target in re.findall(r'(?:href|src)="([^"]+)"', page.read_text()):
            target = unquote(html.unescape(target)).partition("#")[0]
            if repository := re.match(outside, target):
                name = target[repository.end() :]
                assert (ROOT / name).exists(), f"{page.relative_to(site)}: {target}"
                found.add(name)
            elif target and page.name != "404.html" and not re.match(r"[a-z]+:|//", target):
                there = (page.parent / target.partition("?")[0]).resolve()
                assert there.is_relative_to(site) and there.exists(), f"{page.relative_to(site)}: {target}"
    assert {"deploy/mpijob", "examples/survive.py", "GOVERNANCE.md"} <= found


def test_links_are_rewritten_only_where_they_leave_the_pages() -> None:
    def rewritten(text: str, folder: str = ".") -> str:
        return docs_site.with_links(text, Path(folder), REPOSITORY)

    assert rewritten("[a](../examples)") == f"[a]({REPOSITORY}/tree/main/examples)"
    assert rewritten("[a](../../README.md#more)", "tutorials") == f"[a]({REPOSITORY}/blob/main/README.md#more)"
    for kept in ("[a](../nowhere.py)", "[a](design.md)", "[a](https://x.org/../y)"):
        assert rewritten(kept) == kept
    assert rewritten("[a](../ddp.md)", "tutorials") == "[a](../ddp.md)"


def test_building_needs_one_command() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert all("mkdocs build --strict" in words for words in (text, (ROOT / ".github/workflows/docs.yml").read_text()))
    assert "docs" in re.findall(r"\.\[(.*?)\]", (ROOT / "scripts/test.sh").read_text())[0].split(",")
