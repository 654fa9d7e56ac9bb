"""What Python does first in every process that tests start: leave out what none of them uses, for they start hundreds.

torch loads its compiler with the first optimizer, for more than a second of each process; what only the compiler and
tensors without data ask for with itself, for a third of the time that it takes; and tensors on a mesh for the first
comparison, for another second. DGCOPT_TEST_COMPILER=1 lets it, but for torchrun itself, where something compiles, or
asks for the compiler's settings as DistributedDataParallel does.
"""

import faulthandler
import gc
import importlib
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any


class LeftOut:
    """Finds empty modules while torch is imported."""

    names = ("torch.export", "torch._meta_registrations", "torch._native")

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in self.names else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Python makes it."""

    def exec_module(self, module: ModuleType) -> None:
        torch = sys.modules["torch"]
        if module.__name__ == "torch._meta_registrations" and hasattr(torch._C, "_set_generator_metaclass"):
            from torch._opaque_base import OpaqueBaseMeta

            torch._C._set_generator_metaclass(OpaqueBaseMeta)  # as one of the modules does that it would load
        if module.__name__ == self.names[-1]:  # the last line of torch
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            sys.modules.pop("torch.export", None)  # tensors on a mesh ask for it
            if comparison := sys.modules.get("torch.testing._comparison"):
                comparison._HAS_DTENSOR = False  # type: ignore[attr-defined]
            gc.freeze()  # what torch is made of is no garbage, in the end neither


class SymbolicShapes(ModuleType):
    """The two functions that `backward(gradient)` asks for; any other one loads the module itself, and sympy."""

    def expect_true(self, condition: bool) -> bool:
        return condition

    def sym_eq(self, x: Any, y: Any) -> bool:
        return bool(x == y)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of modules, which those ask for who look through all of them
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


if not os.environ.get("DGCOPT_TEST_COMPILER") or any("torchrun" in word for word in sys.orig_argv[:2]):
    sys.modules["torch.fx.experimental.symbolic_shapes"] = SymbolicShapes("torch.fx.experimental.symbolic_shapes")
    sys.modules["torch._dynamo"] = SimpleNamespace(  # type: ignore[assignment]
        disable=lambda function, *_, **__: function,
        graph_break=lambda: None,
        trace_rules=SimpleNamespace(clear_lru_cache=lambda: None),
    )
    sys.meta_path.insert(0, LeftOut())  # type: ignore[arg-type]
# horovodrun asks the first of Horovod's extensions that it can import what it was built with, in a process of its own;
# the second one is torch's, which takes a second to load
sys.modules["horovod.tensorflow"] = SimpleNamespace(gloo_built=lambda: True, mpi_built=lambda: True)  # type: ignore[assignment]
gc.set_threshold(100_000)  # looking for garbage among what is imported takes a quarter of the start

if os.environ.get("DGCOPT_TEST_LIMIT"):  # who hangs says where, before he is killed
    faulthandler.dump_traceback_later(0.9 * float(os.environ["DGCOPT_TEST_LIMIT"]))
