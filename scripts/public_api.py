"""Print the public API: every public name of dgcopt with its signature, a line for each.

    python scripts/public_api.py            # what the package has now
    python scripts/public_api.py --write    # record it in tests/data/public_api.txt, after an intended change

Annotations are left out, as wider types break no caller. Names, order, kinds and defaults of arguments stay in.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tests" / "data" / "public_api.txt"

MODULES = (
    "dgcopt",
    "dgcopt.averaging",
    "dgcopt.checkpoint",
    "dgcopt.collectives",
    "dgcopt.compressors",
    "dgcopt.data",
    "dgcopt.elastic",
    "dgcopt.errors",
    "dgcopt.hvd",
    "dgcopt.integrations",
    "dgcopt.integrations.exchange",
    "dgcopt.sharded",
    "dgcopt.survive",
    "dgcopt.testing",
)
"""Modules whose `__all__` is public, but for those in ONLY."""

ONLY = {
    "dgcopt.checkpoint": ("load", "reshare", "save"),
    "dgcopt.collectives": (
        *("AllGather", "AllReduce", "AllToAll", "Barrier", "Broadcast", "Collective", "Exchange", "ReduceScatter"),
        *("SendRecv", "check_generator"),
    ),
    "dgcopt.integrations": (),  # modules, which are read from their source
    "dgcopt.integrations.exchange": ("Exchange",),
}
"""The public names of modules whose other names serve dgcopt itself."""


class Shown:
    """A default value as the signature shows it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def shown(value: Any) -> Any:
    """A default without addresses in memory."""
    if isinstance(value, enum.Enum):
        return Shown(str(value))
    if type(value).__name__ == "ProcessSet":  # which knows its ranks once a wire is joined
        return Shown("ProcessSet([])")
    if inspect.isclass(value) or inspect.isroutine(value):
        return Shown(value.__qualname__)
    return Shown("...") if " at 0x" in repr(value) else value


def signature(thing: Any) -> str:
    """Arguments and defaults, without annotations."""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return "(...)"
    parameters = [
        parameter.replace(annotation=parameter.empty, default=shown(parameter.default))
        if parameter.default is not parameter.empty
        else parameter.replace(annotation=parameter.empty)
        for parameter in found.parameters.values()
    ]
    return str(found.replace(parameters=parameters, return_annotation=found.empty))


def is_ours(thing: Any) -> bool:
    """True if a class or function is defined in dgcopt."""
    return str(getattr(thing, "__module__", "")).partition(".")[0] == "dgcopt"


def member_lines(kind: type, public: dict[type, str]) -> Iterator[str]:
    """Public attributes of a class, without those that a public base has in the same form."""
    for name in sorted({name for base in kind.__mro__ if is_ours(base) for name in vars(base)}):
        if name.startswith("_"):
            continue
        line = member_line(kind, name)
        bases = [base for base in kind.__mro__[1:] if base in public and hasattr(base, name)]
        if not any(member_line(base, name) == line for base in bases):
            yield line


def member_line(kind: type, name: str) -> str:
    """An attribute, with its signature if it is a method."""
    member = inspect.getattr_static(kind, name)
    if isinstance(member, staticmethod | classmethod):
        return name + signature(getattr(kind, name))
    return name + signature(member) if inspect.isfunction(member) else name


def lines_of(place: str, thing: Any, public: dict[type, str]) -> Iterator[str]:
    """The lines for one public name."""
    if inspect.ismodule(thing):
        yield f"{place}: module"
    elif inspect.isclass(thing) and is_ours(thing):
        if public[thing] != place:
            yield f"{place} = {public[thing]}"
            return
        yield place + signature(thing)
        yield from (f"{place}.{line}" for line in member_lines(thing, public))
    else:
        yield place + signature(thing) if inspect.isroutine(thing) else place


def names_of(module_name: str) -> dict[str, Any]:
    """Public names of a module; without `__all__` or ONLY, those that it defines itself."""
    module = importlib.import_module(module_name)
    listed = ONLY.get(module_name, getattr(module, "__all__", None))
    own = [
        name
        for name, thing in vars(module).items()
        if not name.startswith("_") and getattr(thing, "__module__", "") == module_name
    ]
    return {name: getattr(module, name) for name in (own if listed is None else listed)}


def written_signature(function: ast.FunctionDef, skip: int = 0) -> str:
    """Arguments and defaults as the source has them, without annotations and the first `skip` arguments."""
    arguments = function.args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    del arguments.args[:skip]
    return f"({ast.unparse(arguments)})"


def written_lines(module: str) -> Iterator[str]:
    """The lines of a module that is not imported: functions and classes of its `__all__`."""
    body = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text()).body
    public = next(ast.literal_eval(node.value) for node in body if isinstance(node, ast.Assign))
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name in public:
            yield f"{module}.{node.name}{written_signature(node)}"
        if isinstance(node, ast.ClassDef) and node.name in public:
            place = f"{module}.{node.name}"
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                    yield place + written_signature(member, skip=1)
                elif isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                    yield f"{place}.{member.name}{written_signature(member)}"


def lines() -> list[str]:
    """The public API, sorted. Modules of dgcopt.integrations import frameworks, which need not be installed."""
    named = {f"{module}.{name}": thing for module in MODULES for name, thing in names_of(module).items()}
    public: dict[type, str] = {}
    for place, thing in named.items():
        if inspect.isclass(thing):
            public.setdefault(thing, place)
    imported = {line for place, thing in named.items() for line in lines_of(place, thing, public)}
    frameworks = importlib.import_module("dgcopt.integrations").__all__
    return sorted(imported.union(*(written_lines(f"dgcopt.integrations.{name}") for name in frameworks)))


def main() -> None:
    text = "\n".join(lines()) + "\n"
    if sys.argv[1:] == ["--write"]:
        RECORDED.write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
