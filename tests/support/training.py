"""One rank that runs train.py again and again, as it is told in a folder: torch is loaded once for many runs.

training.py FOLDER    order-N.json says {"arguments": [...], "path": a folder of modules, or null}; each rank answers
                      with answer-N-RANK.json, {"code": ..., "stdout": ..., "stderr": ...}; "end" ends it
"""

import contextlib
import importlib
import io
import itertools
import json
import logging
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import dgcopt


def carry_out(order: dict[str, Any]) -> dict[str, Any]:
    """What train.py does in a process of its own, but for leaving the wire."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    before = set(sys.modules)
    sys.argv = ["train.py", *order["arguments"]]
    sys.path[:0] = [order["path"]] if order["path"] else []
    logging.getLogger().handlers.clear()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            importlib.import_module("train").main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        except Exception:
            traceback.print_exc()
            code = 1
    if order["path"]:
        sys.path.remove(order["path"])
        for name in set(sys.modules) - before:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == Path(order["path"]):
                del sys.modules[name]
    return {"code": code, "stdout": out.getvalue(), "stderr": err.getvalue()}


def main() -> None:
    folder, rank = Path(sys.argv[1]), dgcopt.init().rank
    for number in itertools.count():
        path = folder / f"order-{number}.json"
        while not path.exists():
            time.sleep(0.02)
        order = json.loads(path.read_text())
        if order == "end":
            return
        answer = folder / f"answer-{number}-{rank}.json"
        answer.with_suffix(".part").write_text(json.dumps(carry_out(order)))
        answer.with_suffix(".part").rename(answer)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
