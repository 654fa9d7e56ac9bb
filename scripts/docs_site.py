"""Hook of mkdocs.yml: links to files outside docs/ go to the repository, and reference pages list every public name.

Pages link to `../examples/...` and the like, which works on the web host of the code and in a clone. The site has only
docs/, so the same link goes to the web host there. A link to a file that does not exist stays as it is, and the strict
build ends with it.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from public_api import ONLY

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")
NAMES = re.compile(r"<!-- public names of (\S+) -->")
CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page with its links, and its list of public names."""
    repository = config["repo_url"].rstrip("/")
    parts = CODE.split(with_names(markdown))
    parts[::2] = [with_links(part, Path(page.file.src_path).parent, repository) for part in parts[::2]]
    return "".join(parts)


def with_links(text: str, folder: Path, repository: str) -> str:
    """Return a page of `folder` within docs/ whose links to existing files outside docs/ lead to the repository."""
    docs = ROOT / "docs"

    def link(found: re.Match[str]) -> str:
        target = (docs / folder / found[2]).resolve()
        if target.is_relative_to(docs) or not target.is_relative_to(ROOT) or not target.exists():
            return found[0]
        kind = "tree" if target.is_dir() else "blob"
        return f"{found[1]}{repository}/{kind}/main/{target.relative_to(ROOT).as_posix()}{found[3] or ''})"

    return LINK.sub(link, text)


def with_names(text: str) -> str:
    """Return the page with a directive of mkdocstrings for each public name of the module that it asks for."""
    return NAMES.sub(lambda found: "\n\n".join(f"::: {name}" for name in public_names(found[1])), text)


def public_names(module: str) -> list[str]:
    """Return the public names of a module that are on its page: those of `dgcopt` are on that page alone.

    Modules have pages of their own. Numbers (`dgcopt.hvd.Average`) have no docstrings; their page names them.
    """
    sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]
    here, top = importlib.import_module(module), importlib.import_module("dgcopt")
    shown = []
    for name in ONLY.get(module, here.__all__):
        thing = getattr(here, name)
        if inspect.ismodule(thing) or isinstance(thing, int) or name.startswith("__"):
            continue
        if module != "dgcopt" and name in top.__all__ and getattr(top, name) is thing:
            continue
        shown.append(f"{module}.{name}")
    return sorted(shown, key=str.lower)
