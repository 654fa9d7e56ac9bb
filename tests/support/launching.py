"""Start real processes on every wire, with a hard time limit after which nothing of them is left."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.wires import WIRES

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "distributed"
STARTUP = ROOT / "tests" / "support" / "startup"
BIN = str(Path(sys.executable).parent)
MARK = "DGCOPT_TEST_LAUNCH"
HOSTS = ["-H", "localhost:2,127.0.0.1:2"]
"""Two names of this machine, by which horovodrun and dgcopt take it for two; no ssh is needed."""


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


def free_port() -> int:
    """A port that nobody has, of those that the kernel does not give to whoever asks for any, as many do meanwhile."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(lowest // 2, lowest)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def launcher(wire: str, size: int) -> list[str]:
    """The command that starts `size` ranks of the script that follows it."""
    if wire == "torch":
        # a free port each time, so that launches do not meet each other
        return ["torchrun", "--nproc-per-node", str(size), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    if wire == "mpi":
        options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        return ["mpirun", "-n", str(size), *options, sys.executable]
    controller = ["--mpi"] if wire == "horovod-mpi" else ["--gloo", *(HOSTS if size == 4 else [])]
    return ["horovodrun", *controller, "-np", str(size), sys.executable]


def python_path(theirs: str) -> str:
    """The PYTHONPATH of ranks: dgcopt and the tests first, then the user's own folders."""
    return os.pathsep.join([str(ROOT), str(STARTUP), *([theirs] if theirs else [])])


@dataclass
class Outcome:
    """What came of a launch: exit code (None if it had to be killed), and what the ranks printed and recorded."""

    code: int | None
    seconds: float
    output: str
    orphans: list[int]
    records: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether a rank has recorded an error."""
        return any("error" in record for by_rank in self.records.values() for record in by_rank.values())

    def told(self, key: str) -> list[dict[str, Any]]:
        """The JSON objects that begin with a key, wherever ranks have printed them, on one line or more."""
        starts = [match.start() for match in re.finditer(rf'\{{"{key}"', self.output)]
        return [json.JSONDecoder().raw_decode(self.output, start)[0] for start in starts]

    @property
    def tail(self) -> str:
        return self.output[-6000:]


def launch(
    wire: str,
    size: int,
    program: list[str],
    *,
    limit: float,
    env: dict[str, str] | None = None,
    bare: bool = False,
    compiler: bool = False,
) -> Outcome:
    """Run `python program` as `size` ranks and wait at most `limit` seconds. `bare` starts one process, no launcher.
    Ranks load torch's compiler if `compiler` or DGCOPT_TEST_COMPILER is set: DistributedDataParallel needs it.

    Records are the JSON lines that ranks append to `rank-*.jsonl` in the folder named by DGCOPT_TEST_RECORDS.
    """
    SESSION.launches += 1
    token = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="dgcopt-test-") as folder:
        ours = {
            "PATH": os.pathsep.join([BIN, os.environ.get("PATH", "")]),
            "PYTHONPATH": python_path(os.environ.get("PYTHONPATH", "")),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            # more ranks than cores: Open MPI would spin in every wait, and take four times as long
            "OMPI_MCA_mpi_yield_when_idle": "1",
            # and Horovod would look for new collectives every millisecond
            "HOROVOD_CYCLE_TIME": "3",
            "DGCOPT_TEST_RECORDS": folder,
            "DGCOPT_TEST_SIZE": str(size),
            "DGCOPT_TEST_COMPILER": "1" if compiler else os.environ.get("DGCOPT_TEST_COMPILER", ""),
            "DGCOPT_TEST_LIMIT": str(limit),
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


@dataclass
class Session:
    """The launches of a whole run of pytest, and which of them had to be made once more."""

    launches: int = 0
    again: list[str] = field(default_factory=list)

    @property
    def too_often(self) -> bool:
        """More than once, and more than one in fifty: no longer the rare fault of a library."""
        return len(self.again) > max(1, self.launches / 50)

    def __str__(self) -> str:
        verdict = ": TOO OFTEN" if self.too_often else ""
        return f"{len(self.again)} of {self.launches} launches were made once more{verdict}" + "".join(
            f"\n  {what}" for what in self.again
        )


SESSION = Session()
ABORTED = "Horovod background loop uncaught exception"

WORLDS = [(wire, size) for size in (2, 4) for wire in WIRES]


def launch_world(wire: str, size: int, program: list[str], limit: float) -> Outcome:
    """`launch` of a worker with all its scenarios, once more if Horovod has aborted it; skipped where it cannot be."""
    if missing(wire):
        pytest.skip(missing(wire))
    # among two, the script has joined the library before dgcopt does, and leaves it by itself; among four, dgcopt does
    env = {"DGCOPT_TEST_JOIN_FIRST": wire} if size == 2 else {}
    outcome = launch(wire, size, program, limit=limit, env=env)
    if not outcome.failed and ABORTED in outcome.output:
        # Horovod 0.28.1 now and then stands still by itself, between two of its own threads, until Gloo gives up
        why = f"{wire}, {size} ranks, {Path(program[0]).name}: Horovod aborted"
        SESSION.again.append(why)
        warnings.warn(f"{why}, trying once more:\n{outcome.tail}", stacklevel=2)
        outcome = launch(wire, size, program, limit=limit, env=env)
    return outcome


def assert_passed(wire: str, size: int, outcome: Outcome, name: str) -> None:
    """All ranks got through the scenario, over that wire."""
    records = outcome.records.get(name, {})
    errors = [f"rank {rank}: {record['error']}" for rank, record in sorted(records.items()) if "error" in record]
    assert not errors, f"{len(errors)} of {size} ranks failed over {wire}:\n" + "\n".join(errors[:2])
    lost = set(range(size)) - set(records)
    assert not lost, f"rank(s) {sorted(lost)} never got through it over {wire}:\n{outcome.tail}"
    assert {record["wire"] for record in records.values()} == {wire.split("-")[0]}


def assert_ended(outcome: Outcome) -> None:
    """Leaving Python leaves the wire: no hang, no process left behind, no complaint of a library."""
    assert outcome.code is not None, f"had to be killed after {outcome.seconds:.0f} s:\n{outcome.tail}"
    assert not outcome.orphans, f"left {len(outcome.orphans)} process(es) behind"
    assert outcome.failed or outcome.code == 0, outcome.tail
    assert "terminate called" not in outcome.output, outcome.tail


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

    deadline = time.monotonic() + 10  # launchers end a moment before their last child does
    while (left := alive()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


APART = (
    *("test_async_average.py", "test_compatibility.py", "test_elastic.py", "test_failures.py", "test_faults.py"),
    *("test_configs.py", "compressors/test_library.py"),
)
"""Files whose tests take seconds each and share nothing: they start processes of their own, or train."""


def launch_of(nodeid: str) -> str:
    """A name for the tests that run in one process, as they share a launch, or what a fixture or cache of a file holds;
    the test's own name, if it shares nothing."""
    file = nodeid.partition("::")[0]
    if file.endswith("test_wires.py"):
        return re.sub(r"::.*\[(\D+-\d).*", r" \1", nodeid, flags=re.DOTALL)
    return nodeid if file.endswith(APART) and "real ranks" not in nodeid else file
