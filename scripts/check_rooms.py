"""Checks the boundaries between modules of dgcopt, and counts its rooms and the arrows between them.

1. No module uses an underscore name of another: by import, as an attribute of anything but `self` or `cls` unless the
   file defines that name itself, or by `getattr`.
2. Only the wires and the runner know that ranks may be simulated.
3. Neither modules nor rooms import each other in a circle, imports inside functions and for type checking included. A
   room is a module or package directly in dgcopt; an arrow is one room that imports from another.

4. No function assigns an attribute of another object (`self.x.y = ...`, `other.y = ...`), but of one that it has made
   itself, of a class in the same file, or of those of other libraries in `ASSIGNED` and `FOREIGN`.
5. There are no more rooms and arrows than `MOST`, so that new ones are decided on, not drifted into.

    python scripts/check_rooms.py          # prints `file:line: fault` for each, and exits with code 1 if there is one
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]

FOREIGN = {
    "_C": "where torch keeps _current_graph_task_id and _disabled_torch_function_impl",
    "_disabled_torch_function_impl": "torch: results of a subclass are plain tensors, as Parameter has it",
    "_current_graph_task_id": "torch: which backward pass is running",
    "_is_view": "torch: whether a gradient is a part of DistributedDataParallel's buckets",
    "_version": "torch: how often a tensor was written to",
    "_values": "torch: of a sparse tensor that may hold a row twice, which values() refuses",
    "_indices": "torch: the same",
    "_foreach_add_": "torch: one call for many tensors",
    "_foreach_copy_": "torch: the same",
    "_foreach_zero_": "torch: the same",
    "_optimizer_step_pre_hooks": "torch: whether an optimizer has hooks of others",
    "_global_optimizer_pre_hooks": "torch: the same, of all optimizers",
    "_wrapped_by_lr_sched": "torch: an optimizer's step that an LR scheduler has put a counter around",
    "_opt_called": "torch: what that counter sets",
    "_join_config": "torch: set by Join on what takes part in it",
    "_divide_by_initial_world_size": "torch: what DDP's join() was told",
    "_comm_hooks": "torch: hooks that DDP has",
    "_fsdp_flattened": "torch: a parameter that FullyShardedDataParallel has made of others",
    "_Options": "torch: the settings of a Gloo group",
    "_devices": "torch: of these, where it listens",
    "_timeout": "torch: of these, the longest wait for other ranks",
    "_set_default_timeout": "torch: the same, of a group that was made",
    "_typehint": "jsonargparse: the type that a setting must have",
    "_getframe": "sys: documented, in spite of its name",
    "_current_frames": "sys: the same",
}
"""Underscore names of other libraries, and what they are."""

ASSIGNED = {
    "grad": "torch: a parameter's gradient, which the exchange replaces",
    "data": "torch: the memory of a tensor",
    "atexit": "weakref.finalize: whether it runs at the end of the process",
    "args": "an exception's words, to which its catcher adds a remedy",
    "__class__": "the optimizer that is wrapped stays the same object, of another class",
    "hooked": "torch: a step that has hooks around it",
    "optimizer.step": "torch: the step that an LR scheduler has bound to an optimizer",
    "param_groups": "torch: an optimizer's groups, which rules by name divide while it steps",
    "part.state": "torch: the state of an optimizer that is made of parts",
    "requires_grad": "torch: of a parameter, or the DTensor that it aliases",
    "process_group": "torch: of a DDP hook's state",
    "backward_of": "torch: the context of an autograd function",
    "argtypes": "ctypes: of a function",
    "restype": "ctypes: the same",
    "excepthook": "sys: ends all ranks if one fails",
    "description": "argparse: of a parser that `dgcopt run` has got",
    "formatter_class": "argparse: the same",
    "usage": "argparse: the same",
    "Turns.here.now": "threading: the turns of this thread",
    "averaging": "the public attribute that averaging adds to the user's optimizer",
    "source": "a compressor's public setting, which wrappers set on their parts too",
}
"""Attributes of other objects that may be assigned, of any object or of one variable, and why."""

MOST = (25, 110)
"""Rooms and arrows between them: lower it with every one that goes."""

MAKERS = {"copy", "deepcopy", "replace", "__new__"}
"""Functions that make an object, beside calls of classes."""

SIMULATED = {"SimulatedComm", "constructs_in_turn", "takes_turns", "nudge", "simulated_world"}
MAY_SIMULATE = (
    "dgcopt/comm/",
    "dgcopt/exchange/runner.py",
    "dgcopt/testing/",
    "dgcopt/__init__.py",
    "dgcopt/__main__.py",
)
GETTERS = {"getattr", "setattr", "hasattr", "delattr"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def defined_in(tree: ast.AST) -> set[str]:
    """Names that a file gives to functions, classes and variables, and to attributes of `self` and `cls`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            names.add(node.attr)
    return names


def is_own(value: ast.expr) -> bool:
    """Whether it is `self`, `cls` or `super()`."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def faults(tree: ast.AST, may_simulate: bool) -> Iterator[tuple[int, str]]:
    known = defined_in(tree) | FOREIGN.keys()
    for node in ast.walk(tree):
        used: list[str] = []
        if isinstance(node, ast.ImportFrom):
            used = [alias.name for alias in node.names]
            for name in filter(is_private, [*used, *(node.module or "").split(".")]):
                yield node.lineno, f"imports {name}"
        elif isinstance(node, ast.Attribute):
            used = [node.attr]
            if is_private(node.attr) and not is_own(node.value) and node.attr not in known:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in GETTERS:
            used = [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            for name in used:
                if is_private(name) and name not in FOREIGN and not is_own(node.args[0]):
                    yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Name):
            used = [node.id]
        for name in SIMULATED.intersection(used) if not may_simulate else ():
            yield node.lineno, f"names {name}: only the wires and the runner know of simulated ranks"


def assignments(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the assignments to attributes of objects that a function does not own."""
    fields = {field for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for field in fields_of(node)}
    known = ASSIGNED.keys() | FOREIGN.keys()

    def search(node: ast.AST, made: set[str]) -> Iterator[tuple[int, str]]:
        for child in ast.iter_child_nodes(node):
            inner = made | made_in(child) if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else made
            if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
                owns = is_own(child.value) or (isinstance(child.value, ast.Name) and child.value.id in inner)
                is_of_this_file = child.attr in fields and isinstance(child.value, ast.Name)
                if not owns and not is_of_this_file and known.isdisjoint((child.attr, ast.unparse(child))):
                    yield child.lineno, f"assigns {ast.unparse(child)}: give its owner a method"
            yield from search(child, inner)

    yield from search(tree, set())


def fields_of(kind: ast.ClassDef) -> set[str]:
    """Names of the attributes that the methods of a class assign, or its body declares."""
    fields = {
        node.target.id for node in kind.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for node in ast.walk(kind):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            fields.add(node.attr)
    return fields


def made_in(function: ast.AST) -> set[str]:
    """Names of the variables to which a function assigns an object that it has made, and of functions inside it."""
    made: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.FunctionDef) and node is not function:
            made.add(node.name)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            called = node.value.func.value if isinstance(node.value.func, ast.Subscript) else node.value.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name[:1].isupper() or name in MAKERS:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                made.update(target.id for target in targets if isinstance(target, ast.Name))
    return made


def imports() -> dict[str, set[str]]:
    """Return the modules of dgcopt that each of its modules imports."""
    graph = grimp.build_graph("dgcopt", cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def drawing(imports: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the rooms that each room imports from; the package itself is a room too."""
    rooms: dict[str, set[str]] = {}
    for module, imported in imports.items():
        room = room_of(module)
        rooms.setdefault(room, set()).update({room_of(other) for other in imported} - {room})
    return rooms


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the members of a circle, the first one repeated at the end; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found[::-1]  # graphlib names each before the one that imports it
    return []


def main() -> int:
    found = 0
    for path in sorted((ROOT / "dgcopt").rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        tree = ast.parse(path.read_text())
        for line, fault in sorted([*faults(tree, place.startswith(MAY_SIMULATE)), *assignments(tree)]):
            print(f"{place}:{line}: {fault}")
            found += 1
    modules = imports()
    rooms = drawing(modules)
    for graph in (rooms, modules):
        if members := circle(graph):
            print(f"imports in a circle: {' -> '.join(members)}")
            found += 1
    drawn = len(rooms), sum(map(len, rooms.values()))
    print(f"{drawn[0]} rooms, {drawn[1]} arrows")
    if drawn[0] > MOST[0] or drawn[1] > MOST[1]:
        print(f"more than the {MOST[0]} rooms and {MOST[1]} arrows of MOST: move code to the room that has its imports")
        found += 1
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
