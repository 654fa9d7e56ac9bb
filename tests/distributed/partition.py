"""Two machines of two ranks that survive each other, in network namespaces; the link between them is cut, then heals.

    python -m tests.distributed.partition RESULTS

RESULTS gets one JSON object: the lines of all ranks, one per step; the errors that have ended ranks; and the times of
the cut and of its end. The store is on the first machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.distributed.faults.networks import ADDRESSES, INTERFACE, NOWHERE, linked

DEADLINE = 5.0
RANKS = 2
"""Ranks on each of two machines."""
FEW = 20
"""Steps that make a phase."""
LIMIT = 120.0
"""Seconds of a phase, in which ranks may have to start."""
MARGIN = 50
"""Steps after the order to end, of 20 ms and more: before the last one all ranks have read it."""
PORT = 29411


def main(results: Path) -> None:
    with linked() as namespaces, tempfile.TemporaryDirectory(prefix="dgcopt-partition-") as text:
        folder = Path(text)
        agents = [start(number, name, folder) for number, name in enumerate(namespaces)]
        try:
            found = cut_and_heal(namespaces, folder)
            codes = [agent.wait(LIMIT) for agent in agents]
        finally:
            for agent in agents:
                agent.terminate()
                agent.wait()
        results.write_text(json.dumps({**found, "codes": codes, "lines": told(folder)}))


def start(number: int, namespace: str, folder: Path) -> subprocess.Popen[bytes]:
    command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "dgcopt", "run", "--survive"]
    command += ["-np", str(RANKS), "--nnodes", "2", "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}"]
    command += [str(Path(__file__)), "train", str(folder)]
    return subprocess.Popen(command, env={**os.environ, "DGCOPT_NODE": str(number), "GLOO_SOCKET_IFNAME": INTERFACE})


def cut_and_heal(namespaces: list[str], folder: Path) -> dict[str, Any]:
    """Cut the link until both halves have gone on or ended; return the times, and the errors of each phase."""
    late: list[str] = []

    def until(phase: str, done: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not done():
            if time.monotonic() > end:
                late.append(phase)
                return
            time.sleep(0.1)

    def steps(size: int, since: float) -> int:
        return len({line["step"] for line in told(folder) if line["size"] == size and line["time"] > since})

    until("all begin", lambda: steps(2 * RANKS, 0.0) >= FEW)
    cut = time.time()
    link(namespaces, "replace", "lladdr", NOWHERE, "nud", "permanent")
    until("one half goes on", lambda: steps(RANKS, cut) >= FEW)
    until("the other half ends", lambda: len([*folder.glob("*.error")]) >= RANKS)
    errors = {path.stem: path.read_text() for path in folder.glob("*.error")}
    healed = time.time()
    link(namespaces, "del")
    until("all are back", lambda: steps(2 * RANKS, healed) >= FEW)
    last = max((line["step"] for line in told(folder)), default=0) + MARGIN
    (folder / "new").write_text(str(last))
    (folder / "new").rename(folder / "end")
    return {"cut": cut, "healed": healed, "late": late, "errors": errors}


def link(namespaces: list[str], act: str, *options: str) -> None:
    """Send the packets of both machines to nowhere, or no longer; neither is told."""
    for name, other in zip(namespaces, reversed(ADDRESSES), strict=True):
        subprocess.run(["ip", "-n", name, "neigh", act, other, "dev", INTERFACE, *options], check=True)


def told(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of all ranks so far."""
    return [
        {"member": path.stem, **json.loads(line)}
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().split("\n")[:-1]
    ]


def train(folder: Path) -> None:
    """Train as one rank, and leave an error that ends it in a file."""
    import torch

    import dgcopt
    import dgcopt.survive
    from dgcopt.comm.membership import MEMBER
    from dgcopt.errors import DGCError

    name = os.environ[MEMBER]
    torch.manual_seed(int(os.environ["RANK"]))
    (folder / f"{name}.here").touch()
    while len([*folder.glob("*.here")]) < 2 * RANKS:  # the deadline is shorter than the start of Python may take
        time.sleep(0.05)
    try:
        comm = dgcopt.init(survive=True, deadline=DEADLINE)
        model = torch.nn.Linear(30, 10)
        bare = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        optimizer = dgcopt.DistributedOptimizer(bare, model.named_parameters(), dgcopt.DGC(0.05))
        state = dgcopt.survive.State(model=model, optimizer=optimizer, step=0)
        state.sync()
        with open(folder / f"{name}.jsonl", "w") as file:
            while not (folder / "end").exists() or state.step < int((folder / "end").read_text()):
                optimizer.zero_grad()
                model(torch.randn(8, 30)).square().mean().backward()
                optimizer.step()
                weights = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
                digest = hashlib.sha256(weights).hexdigest()
                line = {"time": time.time(), "step": state.step, "size": comm.size, "weights": digest}
                print(json.dumps(line), file=file, flush=True)
                state.step += 1
                time.sleep(0.02)
    except DGCError as error:
        (folder / f"{name}.error").write_text(f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    train(Path(sys.argv[2])) if sys.argv[1] == "train" else main(Path(sys.argv[1]))
