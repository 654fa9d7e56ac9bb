"""The families of kernels: each operation has all implementations, and a test that compares them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from dgcopt import kernels
from dgcopt.kernels import Kernel
from tests.support.oracle import HAS_TRITON, Implementation

OPERATIONS = {name: kernel for name, kernel in vars(kernels).items() if isinstance(kernel, Kernel)}
FAMILIES = sorted({kernel.specification.__module__.split(".")[-2] for kernel in OPERATIONS.values()})


def family_of(kernel: Kernel) -> str:
    return kernel.specification.__module__.split(".")[-2]


def compared_in(family: str) -> Iterator[tuple[str, str]]:
    """Yield the operations in the family's tests of the specification, after "of" if one test runs C and Triton."""
    tree = ast.parse((Path(__file__).parent / f"test_{family}.py").read_text())
    for test in tree.body:
        if isinstance(test, ast.FunctionDef):
            names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
            called = {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)}
            way = "of" if "of" in {argument.arg for argument in test.args.args} else "native"
            if "specification" in names and (way == "of" or "native" in names):
                yield from ((way, name) for name in called)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_operation_is_compared_with_its_specification(family):
    compared = set(compared_in(family))
    for name, kernel in OPERATIONS.items():
        if family_of(kernel) == family:
            way = "of" if kernel.in_triton else "native"
            assert (way, name) in compared, f"no test in test_{family}.py compares {name} with its specification"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_a_folder_with_all_its_operations(family):
    folder = Path(kernels.__file__).parent / family
    assert {path.name for path in folder.glob("*.*")} >= {
        "__init__.py",
        "torch.py",
        "native.py",
        "native.h",
        "triton.py",
    }
    assert f'#include "../{family}/native.h"' in (folder.parent / "native" / "loops.h").read_text()
    registered = vars(getattr(kernels, family))
    for name, kernel in OPERATIONS.items():
        if family_of(kernel) == family:
            assert registered[name] is kernel and kernel.specification.__name__ == kernel.native.__name__ == name
            assert kernel.native.__module__ == kernel.specification.__module__.replace(".torch", ".native")


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_implementations_have_one_signature():
    for name, kernel in OPERATIONS.items():
        others = [kernel.native, *([getattr(Implementation("triton"), name)] if kernel.in_triton else [])]
        expected = [(x.name, x.default) for x in inspect.signature(kernel.specification).parameters.values()]
        for each in others:
            assert [(x.name, x.default) for x in inspect.signature(each).parameters.values()] == expected, name
