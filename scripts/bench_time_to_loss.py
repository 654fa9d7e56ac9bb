"""Seconds until the final loss of dense training is first reached, by exchange, link and number of ranks.

    python scripts/bench_time_to_loss.py losses   # loss over steps, of simulated ranks: hours, on a busy machine too
    python scripts/bench_time_to_loss.py steps    # seconds of a step over shaped links: as root, minutes, quiet cores
    python scripts/bench_time_to_loss.py check    # some runs of real ranks over real links, from start to end
    python scripts/bench_time_to_loss.py table --plot docs/time_to_loss.png

A time is a product of two measurements. Loss over steps does not depend on the link: it is that of simulated ranks,
which compute the bits of real ones. Seconds of a step do not depend on the loss: real ranks, each in a network
namespace of its own with links that tc shapes, exchange gradients of the model's shapes. Their forward and backward
are sleeps of the time that one core takes for them alone, divided by --speeds, since 8 ranks on 2 cores would slow
each other; all else runs. `check` trains for real, and prints its loss beside the simulated one, and its seconds.

Seconds of `auto` include those until its choice; its loss is that of the exchange that it has chosen in the cell.
Learning rates and the loss to reach: time_to_loss/losses.py.

Records are appended to docs/time_to_loss.jsonl, and those there are not repeated: any command may be ended at any time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import bench_advice
import shaped_ranks
import torch
import torch.distributed as dist
from bench_step import start_horovod
from links import Loopback, Namespaces, lacking
from naive_dgc import NaiveDGC
from time_to_loss.losses import (
    AUTO,
    DENSE,
    EVERY,
    ORIGINAL,
    POWERSGD,
    SEEDS,
    SYSTEMS,
    TASKS,
    Losses,
    append,
    batches,
    cross_entropy,
    exchange_of,
    loss_of,
    note,
    rate_at,
    records,
    smooth,
    wrapped,
)
from time_to_loss.report import LINKS, table
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

import dgcopt
from dgcopt.tuning.doctor import profile_model
from dgcopt.tuning.models import Model

SIZES = (4, 8)


def losses(arguments: argparse.Namespace) -> None:
    """Compute the losses over steps that are missing."""
    torch.set_num_threads(1)
    for size, name in itertools.product(arguments.ranks, arguments.tasks):
        known = Losses(name, size)
        for method in dict.fromkeys([DENSE, *(arguments.methods or known.task.methods)]):
            known.complete(method, arguments.seeds)


def core_model(name: str) -> Model:
    """Return a task's model with the seconds that one core takes for its forward and backward, measured now."""
    task = TASKS[name]
    torch.manual_seed(0)
    inputs, _ = next(batches(task.data()[0], task.batch, 0))
    return profile_model(task.model(), [inputs], steps=20).model(name)


class Rank(bench_advice.Rank):
    """One rank that steps by any system, and trains for real for `check`."""

    def __init__(self, name: str, model: Model, seconds: float) -> None:
        super().__init__(model, seconds)
        self.name = name

    def system(self, name: str, module: nn.Module, lr: float = 1e-6) -> tuple[nn.Module, Optimizer]:
        """Return the module whose backward is run, and the optimizer that steps."""
        params = list(module.parameters())
        if name == ORIGINAL:
            return module, NaiveDGC(params, lr=lr, momentum=0.9)
        optimizer = TASKS[self.name].optimizer(params, lr)
        if name in bench_advice.BASELINES:
            return bench_advice.in_ddp(name, module), optimizer
        if name == POWERSGD:
            from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

            # with several buckets the hook's exchanges meet those of the next bucket on Gloo, and it aborts
            ddp = DDP(module, bucket_cap_mb=1000)
            ddp.register_comm_hook(PowerSGDState(None, 2, start_powerSGD_iter=2), powerSGD_hook)
            return ddp, optimizer
        if name == "Horovod":
            return module, start_horovod().DistributedOptimizer(optimizer, module.named_parameters())
        if name != AUTO:
            return module, wrapped(TASKS[self.name], name, module, lr)
        auto = dgcopt.Auto(allow=("exact", "rounded", "sparse", "delayed"))
        return module, dgcopt.DistributedOptimizer(optimizer, module.named_parameters(), auto)

    def build(self, system: str) -> Any:
        """Build a system and warm it up. A step of an averaging rule is the mean over a round."""
        taken, one = super().build(system), self.step
        every = getattr(exchange_of(system), "every", 1) if system not in (*SYSTEMS, AUTO) else 1
        self.step = lambda: [sum(each) / every for each in zip(*(one() for _ in range(every)), strict=True)]
        return taken

    def train(self, name: str, lr: float, length: float, seed: int) -> Any:
        """Train for real; return the validation loss and the seconds so far, after every `EVERY` steps."""
        torch.manual_seed(seed)
        task, size, rank = TASKS[self.name], self.comm.size, self.comm.rank
        model = task.model()
        module, optimizer = self.system(name, model, lr)
        training, validation = task.data()
        found, seconds, steps = [], 0.0, round(task.steps * length)
        for step, (inputs, targets) in zip(range(steps), batches(training, task.batch * size, seed), strict=False):
            start = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = lr * rate_at(step, steps)
            optimizer.zero_grad()
            cross_entropy(module(inputs[rank::size]), targets[rank::size]).backward()
            optimizer.step()
            seconds += time.perf_counter() - start
            if (step + 1) % EVERY == 0:
                found.append([loss_of(model, validation) if rank == 0 else 0.0, seconds])
                dist.barrier()
        return found


def ranks_of(name: str, model: Model, speed: float, network: Loopback) -> shaped_ranks.Ranks:
    """Start the ranks of a task."""
    given = json.dumps([name, model.shapes, list(model.shares), model.seconds, model.forward])
    return shaped_ranks.Ranks([__file__, "--serve", given, str(model.seconds / speed)], network)


def serve(given: str, seconds: str) -> None:
    """Carry out the commands of standard input, one line each."""
    name, shapes, *rest = json.loads(given)
    model = Model(name, {one: tuple(shape) for one, shape in shapes.items()}, *rest)
    shaped_ranks.serve(lambda: Rank(name, model, float(seconds)))


def cells(
    arguments: argparse.Namespace, wanted: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, int, float, str, str]]:
    """Yield every task, number of ranks, speed, system and link."""
    for name, size, speed in itertools.product(arguments.tasks, arguments.ranks, arguments.speeds):
        for system, link in itertools.product(wanted[name], arguments.links):
            yield name, size, speed, system, link


def systems_of(task: str) -> list[str]:
    """Return the systems whose steps are measured."""
    own = [method for method in TASKS[task].methods if method not in SYSTEMS.values()]
    return [*SYSTEMS, DENSE, *own, AUTO]


def steps(arguments: argparse.Namespace) -> None:
    """Measure the seconds of a step in the cells that are missing, as long as --limit allows."""
    end = time.monotonic() + arguments.limit
    known = {(one["task"], one["ranks"], one["speed"], one["system"], one["link"]) for one in records("steps")}
    wanted = {name: arguments.systems or systems_of(name) for name in arguments.tasks}
    missing = [cell for cell in cells(arguments, wanted) if cell not in known]
    for (name, size, speed), group in itertools.groupby(missing, key=lambda cell: cell[:3]):
        model = core_model(name)
        with Namespaces(size) as network, ranks_of(name, model, speed, network) as ranks:
            for *_, system, link in group:
                if time.monotonic() > end:
                    return note("the time is up: start this again for the rest")
                note(f"{name}, {size} ranks, speed {speed:g}, {link}: {system}")
                network.shape("none" if system != AUTO else link)
                built = ranks.call("build", system)[0]
                network.shape(link)
                taken = ranks.call("steps", arguments.seconds, arguments.steps)
                about = {"task": name, "ranks": size, "speed": speed, "system": system, "link": link}
                seconds = [max(one for one, _ in each) for each in zip(*taken, strict=True)]
                more = {"compute": model.seconds / speed, "load": round(os.getloadavg()[0], 1)}
                if system == AUTO:
                    more |= {
                        "choice": ranks.call("choice")[0][0],
                        "until": sum(one for one, _ in built),
                        "in": len(built),
                    }
                append({"kind": "steps", **about, "seconds": [round(one, 5) for one in seconds], **more})


def check(arguments: argparse.Namespace) -> None:
    """Train for real in some cells, with the learning rate and the length that the simulated losses have chosen."""
    for name, size, _, system, link in cells(arguments, dict.fromkeys(arguments.tasks, arguments.systems)):
        known, method = Losses(name, size), SYSTEMS.get(system, system)
        lr, reached = known.best_rate(method), known.steps_to_target(method, 0)
        if reached is None:
            note(f"{system}: {name} among {size} ranks does not reach the loss of dense training")
            continue
        with Namespaces(size) as network, ranks_of(name, core_model(name), 1.0, network) as ranks:
            network.shape(link)
            found = ranks.call("train", system, lr, reached[1], 0)[0]
        values = smooth([loss for loss, _ in found])
        at = reached[0] // EVERY - 1
        about = {"task": name, "ranks": size, "system": system, "link": link, "load": round(os.getloadavg()[0], 1)}
        about |= {"steps": reached[0], "seconds": found[at][1], "loss": values[at], "curve": found}
        append({"kind": "check", **about})
        simulated = smooth(known.known[method, lr, reached[1], 0])[at]
        print(f"{name}, {size} ranks, {link}, {system}: loss {values[at]:.4f} (simulated {simulated:.4f}) after "
              f"{reached[0]} steps and {found[at][1]:.1f} s")  # fmt: skip


COMMANDS = {
    "losses": losses,
    "steps": steps,
    "check": check,
    "table": lambda arguments: table(arguments.seeds, arguments.plot),
}


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        return serve(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=TASKS)
    parser.add_argument("--ranks", nargs="+", type=int, default=SIZES)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--links", nargs="+", default=LINKS, help="rates as tc writes them")
    parser.add_argument("--methods", nargs="+", help="of losses: expressions such as 'OneBit()'")
    parser.add_argument("--systems", nargs="+", help="of steps; of check: those to train for real")
    parser.add_argument("--speeds", nargs="+", type=float, default=[1.0], help="of a device over one core here")
    parser.add_argument("--steps", type=int, default=10, help="most steps of a system in a cell")
    parser.add_argument("--seconds", type=float, default=2, help="fewer steps where they would take longer than this")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which no cell is begun")
    parser.add_argument("--plot", type=Path, help="file for the figure of `table`")
    arguments = parser.parse_args()
    # an exit by signal, too, must leave the blocks that remove processes and namespaces
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if arguments.command in ("steps", "check") and (reason := lacking()):
        parser.error(f"no shaped links: {reason}")
    if arguments.command == "check" and not arguments.systems:
        arguments.systems, arguments.links, arguments.ranks = ["DDP bf16", "DGC.compact(warmup=None)"], ["100mbit"], [4]
        arguments.tasks = ["digits"]
    COMMANDS[arguments.command](arguments)


if __name__ == "__main__":
    main()
