"""The launchers that `bench_survive.py goodput` compares; a killed rank returns after `BACK_AFTER` seconds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

RANKS = 4
BACK_AFTER = 5.0
HERE = Path(__file__).parent
RANK = str(HERE / "rank.py")


class Launcher:
    """Starts four ranks; told of each kill, it lets the rank come back as its kind does.

    Attributes: `place`, the name by which a rank's log tells which one it is.
    """

    kind = ""

    def __init__(self, folder: Path, compute: float, save_every: int, python: str = sys.executable) -> None:
        self.folder = folder
        self.python = python
        self.rank = [RANK, self.kind, str(folder), str(compute), str(save_every)]
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        raise NotImplementedError

    def killed(self, place: str) -> None:
        """Called right before the rank at this place is killed."""

    def look(self) -> None:
        """Called every few milliseconds. Raises RuntimeError if the launcher has ended."""
        if self.processes[0].poll() is not None:
            tail = (self.folder / "output").read_text()[-2000:]
            raise RuntimeError(f"{self.kind} has ended with {self.processes[0].returncode}: {tail}")

    def end(self, pids: Sequence[int]) -> None:
        """End the launcher, and then its ranks."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def run(self, command: Sequence[str], **env: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
        with open(self.folder / "output", "ab") as output:
            return subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )


class Survive(Launcher):
    kind = "survive"

    def start(self) -> None:
        options = ["--survive", "-np", str(RANKS), "--restart-after", str(BACK_AFTER)]
        self.processes = [self.run([self.python, "-m", "dgcopt", "run", *options, *self.rank])]


class Torchrun(Launcher):
    """All ranks start at once; the one that was killed waits for its machine, before it imports anything."""

    kind = "torchrun"

    def start(self) -> None:
        options = ["--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "100000"]
        command = [self.python, "-m", "torch.distributed.run", *options, *self.rank]
        self.processes = [self.run(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")]

    def killed(self, place: str) -> None:
        new = self.folder / "new"
        new.write_text(json.dumps([place, time.time() + BACK_AFTER]))
        new.rename(self.folder / "killed")


class Horovod(Launcher):
    """Each rank is the only one of its host. A killed one's host leaves, and another one is discovered.

    The hosts are addresses of a network namespace, so that Horovod needs no ssh; it never uses one again that has
    lost a rank.
    """

    kind = "horovod"

    def start(self) -> None:
        self._next = RANKS
        self._hosts = [self._host(number) for number in range(RANKS)]
        self._due: list[tuple[float, str]] = []
        self._write()
        discover = self.folder / "discover.sh"
        discover.write_text(f"#!/bin/sh\ncat {self.folder}/hosts\n")
        discover.chmod(0o755)
        addresses = "".join(f"ip addr add {self._host(number)}/32 dev lo; " for number in range(1000))
        options = ["-np", str(RANKS), "--min-np", "1", "--max-np", str(RANKS), "--elastic-timeout", "600"]
        options += ["--network-interface", "lo", "--host-discovery-script", str(discover)]
        command = [self.python, "-m", "horovod.runner.launch", *options, self.python, *self.rank]
        inside = ["sh", "-c", f'ip link set lo up; {addresses} exec "$@"', "sh", *command]
        self.processes = [self.run(["unshare", "-n", *inside], HOROVOD_GLOO_TIMEOUT_SECONDS="30")]

    def killed(self, place: str) -> None:
        self._due.append((time.time() + BACK_AFTER, place))

    def look(self) -> None:
        super().look()
        while self._due and time.time() > self._due[0][0]:
            _, place = self._due.pop(0)
            self._hosts[self._hosts.index(place)] = self._host(self._next)
            self._next += 1
            self._write()

    def _host(self, number: int) -> str:
        return f"127.1.{number // 200}.{number % 200 + 1}"

    def _write(self) -> None:
        new = self.folder / "new"
        new.write_text("".join(f"{host}:1\n" for host in self._hosts))
        new.rename(self.folder / "hosts")


class Torchft(Launcher):
    """torchft's lighthouse, and a replica group of one rank each, started anew by its own launcher."""

    kind = "torchft"

    def start(self) -> None:
        lighthouse = shutil.which("torchft_lighthouse", path=str(Path(self.python).parent))
        if lighthouse is None:
            raise RuntimeError(f"torchft is not installed beside {self.python}: pip install torchft, --torchft-python")
        with suppress(FileNotFoundError):
            (self.folder / "output").unlink()
        options = ["--min_replicas", "1", "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000"]
        self.processes = [self.run([lighthouse, "--bind", "127.0.0.1:29517", *options])]
        time.sleep(1)
        self._ranks = {rank: self._start(rank) for rank in range(RANKS)}
        self._due: dict[int, float] = {}

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        env = {"RANK": str(rank), "WORLD_SIZE": "1", "TORCHFT_LIGHTHOUSE": "http://127.0.0.1:29517"}
        process = self.run([self.python, *self.rank], **env)
        self.processes.append(process)
        return process

    def look(self) -> None:
        super().look()
        for rank, process in self._ranks.items():
            if process.poll() is not None and time.time() > self._due.setdefault(rank, time.time() + BACK_AFTER):
                del self._due[rank]
                self._ranks[rank] = self._start(rank)


LAUNCHERS = {one.kind: one for one in (Survive, Torchrun, Horovod, Torchft)}
