"""Start real processes on every wire, with a hard time limit after which nothing of them is left."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WIRES = ("torch", "horovod-gloo", "horovod-mpi", "mpi")
BIN = str(Path(sys.executable).parent)
MARK = "DGCOPT_TEST_LAUNCH"


def missing(wire: str) -> str:
    """Why the wire cannot be used on this machine; empty if it can."""
    path = os.pathsep.join([BIN, os.environ.get("PATH", "")])
    programs = {"torch": ["torchrun"], "horovod-gloo": ["horovodrun"], "horovod-mpi": ["horovodrun", "mpirun"]}
    modules = {"horovod-gloo": ["horovod"], "horovod-mpi": ["horovod"], "mpi": ["mpi4py"]}
    absent = [name for name in programs.get(wire, ["mpirun"]) if shutil.which(name, path=path) is None]
    absent += [name for name in modules.get(wire, []) if importlib.util.find_spec(name) is None]
    if wire == "torch" and not torch.distributed.is_available():
        absent.append("torch.distributed")
    return f"{', '.join(absent)} not installed: bash scripts/install_horovod.sh" if absent else ""


def launcher(wire: str, size: int) -> list[str]:
    """The command that starts `size` ranks of the script that follows it."""
    if wire == "torch":
        # a free port each time, so that launches do not meet each other
        return ["torchrun", "--nproc-per-node", str(size), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    if wire == "mpi":
        options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        return ["mpirun", "-n", str(size), *options, sys.executable]
    return ["horovodrun", "--gloo" if wire == "horovod-gloo" else "--mpi", "-np", str(size), sys.executable]


@dataclass
class Outcome:
    """What came of a launch: exit code (None if it had to be killed), and what the ranks printed and recorded."""

    code: int | None
    seconds: float
    output: str
    orphans: list[int]
    records: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)

    @property
    def tail(self) -> str:
        return self.output[-6000:]


def launch(
    wire: str, size: int, program: list[str], *, limit: float, env: dict[str, str] | None = None, bare: bool = False
) -> Outcome:
    """Run `python program` as `size` ranks and wait at most `limit` seconds. `bare` starts one process, no launcher.

    Records are the JSON lines that ranks append to `rank-*.jsonl` in the folder named by DGCOPT_TEST_RECORDS.
    """
    token = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="dgcopt-test-") as folder:
        ours = {
            "PATH": os.pathsep.join([BIN, os.environ.get("PATH", "")]),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            # more ranks than cores: Open MPI would spin in every wait, and take four times as long
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "DGCOPT_TEST_RECORDS": folder,
            MARK: token,
        }
        with open(Path(folder) / "output", "w+b") as output:
            start = time.monotonic()
            process = subprocess.Popen(
                [*([sys.executable] if bare else launcher(wire, size)), *program],
                env={**os.environ, **ours, **(env or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=folder,
            )
            code: int | None = None
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
            seconds = time.monotonic() - start
            orphans = _end_survivors(token)
            process.kill()
            process.wait()
            output.seek(0)
            text = output.read().decode(errors="replace")
        outcome = Outcome(code, seconds, text, orphans)
        for path in sorted(Path(folder).glob("rank-*.jsonl")):
            for line in path.read_text().splitlines():
                record = json.loads(line)
                outcome.records.setdefault(record["scenario"], {})[record["rank"]] = record
        return outcome


def _end_survivors(token: str) -> list[int]:
    """Kill what the launch has left behind, in whatever session, and return its process ids."""
    wanted = f"{MARK}={token}".encode()

    def alive() -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                    found.append(int(folder.name))
        return found

    deadline = time.monotonic() + 3  # launchers end a moment before their last child does
    while (left := alive()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left
