"""Many examples in one launch, each as it would run by itself: run_examples.py [--LIBRARY] EXAMPLE ...

LIBRARY is what the examples that follow get for `dgcopt.hvd`: `--dgcopt`, the default, itself; `--stock`, Horovod;
`--beside`, Horovod with the `DistributedOptimizer` of dgcopt. What an example raises is printed, and the next one goes
on.
"""

import importlib
import runpy
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dgcopt

FOLDER = Path(__file__).resolve().parents[2] / "examples"


def library_of(name: str) -> Any:
    if name == "dgcopt":
        return importlib.import_module("dgcopt.hvd")
    import horovod.torch

    if name == "stock":
        return horovod.torch
    return SimpleNamespace(**{**vars(horovod.torch), "DistributedOptimizer": dgcopt.DistributedOptimizer})


def main() -> None:
    own = library = library_of("dgcopt")
    words: list[str] = []
    sys.path.insert(0, str(FOLDER))
    for word in sys.argv[1:]:
        if word.startswith("--"):
            library = library_of(word.removeprefix("--"))
            words = [word]
            continue
        sys.modules.pop("digits_hvd", None)
        sys.modules["dgcopt.hvd"] = dgcopt.hvd = library
        sys.argv = [str(FOLDER / f"{word}.py"), *words]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except Exception:
            traceback.print_exc()
    sys.modules["dgcopt.hvd"] = dgcopt.hvd = own


if __name__ == "__main__":
    main()
