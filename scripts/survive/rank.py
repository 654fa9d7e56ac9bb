"""One rank of `bench_survive.py goodput`: trains until it is killed, under any of four launchers.

    python survive/rank.py KIND FOLDER COMPUTE SAVE_EVERY

Writes to FOLDER/<pid>.log a line about its start and one line per step. KIND is "survive", "torchrun", "horovod" or
"torchft". All make the same step; they differ in the communication, and in where the state comes from after a death.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

WIDTH = 64
STARTING = 5
"""Niceness of a rank while it imports torch: on a real cluster it takes no processor from those that train."""


def main() -> None:
    kind, folder, compute, save_every = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    wait_for_machine(kind, folder)
    with open(folder / f"{os.getpid()}.log", "w") as file:
        log = Log(file, compute)
        log.write(place=os.environ.get("HOROVOD_HOSTNAME", os.environ.get("RANK", "")), started=time.time())
        own = {"horovod": ["horovod.torch"], "torchft": ["torchft"]}.get(kind, [])
        priority = os.nice(0)
        os.nice(STARTING)
        for module in ("torch", "torch._dynamo", "dgcopt", *own):  # an optimizer imports the second
            import_module(module)
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, priority)
        log.write(ready=time.time())
        train = {"survive": survivor, "torchrun": restarted, "horovod": horovod_elastic, "torchft": torchft_replica}
        train[kind](log, folder, save_every)


def wait_for_machine(kind: str, folder: Path) -> None:
    """Under torchrun, which starts all ranks at once, wait until the lost rank's new machine is there."""
    if kind != "torchrun" or not (folder / "killed").exists():
        return
    place, back = json.loads((folder / "killed").read_text())
    if os.environ["RANK"] == place:
        time.sleep(max(0.0, back - time.time()))


class Log:
    """The lines of one rank, and its step."""

    def __init__(self, file: Any, compute: float) -> None:
        self._file = file
        self._compute = compute

    def write(self, **values: Any) -> None:
        print(json.dumps(values), file=self._file, flush=True)

    def step(self, model: Any, optimizer: Any, average: Callable[[], None] | None = None) -> None:
        """Make a step: the host sleeps, as one does while an accelerator works."""
        import torch

        optimizer.zero_grad()
        time.sleep(self._compute)
        model(torch.randn(8, WIDTH)).square().mean().backward()
        if average is not None:
            average()
        optimizer.step()

    def made(self, step: int, size: int) -> None:
        self.write(time=time.time(), step=step, size=size)


def made() -> tuple[Any, Any]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def compressed(model: Any, bare: Any) -> Any:
    import dgcopt

    return dgcopt.DistributedOptimizer(bare, model.named_parameters(), dgcopt.DGC(0.01))


def survivor(log: Log, folder: Path, save_every: int) -> None:
    import dgcopt
    import dgcopt.survive

    comm = dgcopt.init(survive=True, deadline=20)
    model, bare = made()
    state = dgcopt.survive.State(model=model, optimizer=compressed(model, bare), step=0)
    state.sync()
    while True:
        log.step(model, state.optimizer)
        log.made(state.step, comm.size)
        state.step += 1


def restarted(log: Log, folder: Path, save_every: int) -> None:
    """Every rank starts anew after a death, from the newest checkpoint."""
    import dgcopt

    comm = dgcopt.init(deadline=20)
    model, bare = made()
    optimizer, step = compressed(model, bare), 0
    if (found := dgcopt.checkpoint.load(folder / "checkpoints")) is not None:
        step, saved = found
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    while True:
        log.step(model, optimizer)
        log.made(step, comm.size)
        step += 1
        if save_every and step % save_every == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            dgcopt.checkpoint.save(folder / "checkpoints", saved, step)


def horovod_elastic(log: Log, folder: Path, save_every: int) -> None:
    """Those that are left go on from the last commit in memory, and stop while a new rank starts."""
    from horovod.torch import elastic

    import dgcopt.hvd as hvd

    hvd.init()
    model, bare = made()
    held = elastic.TorchState(model=model, optimizer=compressed(model, bare), step=0)

    @elastic.run
    def train(state: Any) -> None:
        while True:
            log.step(model, state.optimizer)
            log.made(state.step, hvd.size())
            state.step += 1
            if state.step % max(save_every, 1) == 0:
                state.commit()

    train(held)


def torchft_replica(log: Log, folder: Path, save_every: int) -> None:
    """Dense allreduce through torchft's manager; a failed step is not committed.

    In place of torchft's DistributedDataParallel, whose hook (0.2.0, torch 2.13) ends the survivors in an assertion.
    """
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torchft import Manager, Optimizer, ProcessGroupGloo

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model, bare = made()

    def load(saved: Any) -> None:
        model.load_state_dict(saved["model"])
        bare.load_state_dict(saved["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": bare.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"rank{os.environ['RANK']}",
        hostname="127.0.0.1",
        timeout=timedelta(seconds=20),
        quorum_timeout=timedelta(seconds=60),
    )
    optimizer = Optimizer(manager, bare)

    def average() -> None:
        grads = [param.grad for param in model.parameters()]
        flat = torch.cat([grad.flatten() for grad in grads])
        manager.allreduce(flat).wait()
        for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view_as(grad))

    while True:
        before = manager.current_step()
        log.step(model, optimizer, average)
        if manager.current_step() > before:
            log.made(before, manager.num_participants())


if __name__ == "__main__":
    main()
