"""Real ranks over torch's wire for the price of a fork, each in a network namespace of its own where one is given."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import dgcopt
from tests.distributed.faults.rules import Raised
from tests.support.launching import free_port

Tell = Callable[..., None]
Body = Callable[[int, Tell], None]

CLONE_NEWNET = 0x40000000


@dataclass
class Report:
    """What one rank has told, and how its process ended: its exit status, negative for a signal, None if it hung."""

    rank: int
    told: dict[str, Any] = field(default_factory=dict)
    code: int | None = None
    seconds: float = 0.0

    @property
    def raised(self) -> list[Raised]:
        return [Raised(**self.told["raised"])] if "raised" in self.told else []


def run(
    size: int,
    body: Body,
    limit: float,
    watch: Callable[[dict[int, int]], None] = lambda pids: None,
    namespaces: Sequence[str] = (),
    address: str = "127.0.0.1",
    interface: str = "lo",
) -> list[Report]:
    """Run `body(rank, tell)` in a process for each rank; kill those that are left after `limit` seconds.

    `tell(**facts)` keeps facts, also of a process that dies next. `watch` is called with the process ids meanwhile.
    """
    dgcopt.shutdown()  # an earlier test may have joined a wire, which ranks would inherit
    with tempfile.TemporaryDirectory(prefix="dgcopt-forked-") as folder:
        env = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
        env |= {"LOCAL_WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": interface, "DGCOPT_WIRE": "torch"}
        reports = [Report(rank) for rank in range(size)]
        start, pids = time.monotonic(), {}
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                where = namespaces[rank] if namespaces else ""
                _child(rank, body, Path(folder), env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, where)
            pids[rank] = pid
        try:
            while pids and time.monotonic() - start < limit:
                watch(pids)
                for rank, pid in [*pids.items()]:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        reports[rank].code = os.waitstatus_to_exitcode(status)
                        reports[rank].seconds = time.monotonic() - start
                        del pids[rank]
                time.sleep(0.005)
        finally:
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        for report in reports:
            with contextlib.suppress(OSError, ValueError):
                report.told = json.loads((Path(folder) / f"{report.rank}.json").read_text())
        return reports


def _child(rank: int, body: Body, folder: Path, env: dict[str, str], namespace: str) -> None:
    gc.freeze()  # process groups among the parent's garbage would wait for threads that a fork does not have
    told: dict[str, Any] = {}

    def tell(**facts: Any) -> None:
        told.update(facts)
        path = folder / f"{rank}.json"
        path.with_suffix(".new").write_text(json.dumps(told))
        path.with_suffix(".new").replace(path)

    code = 1
    try:
        quiet = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        os.environ.update(env)
        if namespace:
            handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
            if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
        torch.set_num_threads(1)
        body(rank, tell)
        code = 0
    except BaseException as error:
        tell(raised=vars(Raised.of(rank, error)))
    finally:
        os._exit(code)  # as nothing of the parent's is to be tidied here
