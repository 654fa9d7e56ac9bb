"""Many examples in one launch, each as it would run by itself: run_all.py [--LIBRARY] [EXAMPLE ...] ...

Libraries are named as in library.py, `--dgcopt` the default; without names, all examples run. What an example raises
is printed, and the next one goes on.
"""

import runpy
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXAMPLES = ("mnist_style", "gradient_clipping", "accumulation", "gan", "adasum", "mixed_precision")


def main() -> None:
    library, plan = "--dgcopt", []
    for word in sys.argv[1:] or EXAMPLES:
        if word.startswith("--"):
            library = word
        else:
            plan.append((library, word))
    sys.path.insert(0, str(HERE))
    for library, name in plan:
        sys.modules.pop("library", None)
        sys.argv = [str(HERE / f"{name}.py"), library]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except Exception:
            traceback.print_exc()


if __name__ == "__main__":
    main()
