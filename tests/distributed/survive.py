"""Ranks that survive each other, forked from one process that has imported torch, and killed by plan.

    python survive.py RESULTS SCENARIO ...

Every rank writes one JSON line per step; RESULTS gets one line per scenario.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import resource
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dgcopt
import dgcopt.comm.surviving
import dgcopt.survive
from dgcopt.comm.membership import MEMBER, STORE, gone_key
from dgcopt.flat.optimizer_state import STATE_KEY

APART = 4
"""Steps between two kills, at least."""
LOCAL = 3
"""Local steps in a step of a scenario that averages weights: one round."""

COMPRESSORS = {
    "dgc": lambda: dgcopt.DGC(0.05),
    "topk": lambda: dgcopt.TopK(0.05),
    "none": lambda: dgcopt.NoCompression(),
    "powersgd": lambda: dgcopt.PowerSGD(2),
}


AVERAGING = {
    "local sgd": lambda: dgcopt.LocalSGD(every=LOCAL),
    "slowmo": lambda: dgcopt.SlowMo(every=LOCAL, base=dgcopt.LocalSGD(every=LOCAL), sharded=False),
    "diloco": lambda: dgcopt.DiLoCo(every=LOCAL, compression=dgcopt.TopK(0.05)),
    "diloco, plain": lambda: dgcopt.DiLoCo(
        every=LOCAL, outer=partial(torch.optim.SGD, lr=1.0), compression=dgcopt.TopK(0.05)
    ),
    "quorum": lambda: dgcopt.DiLoCo(every=LOCAL, outer=partial(torch.optim.SGD, lr=1.0), quorum=2, grace=0.5),
}


@dataclass
class Kill:
    """SIGKILL of a rank by itself: at its place in a step, once all ranks are there.

    `place` is "before" or "after" the start of a collective, by a part of its label; "backward", before the first
    gradient of a step; "committed", before the optimizer's own step; or "build", while groups are built after the kill
    before.
    """

    rank: int
    place: str
    stop: float = 0.0  # seconds of SIGSTOP in place of SIGKILL


@dataclass
class Scenario:
    """A launch of `size` ranks, one kill after another, and `more` steps."""

    size: int
    kills: list[Kill] = field(default_factory=list)
    more: int = 20
    restart: bool = True
    compressor: str = "dgc"
    averaging: str = ""  # in place of a compressor
    optimizer: str = "sgd"
    deadline: float = 20.0
    min_ranks: int = 1
    residuals: str = "local"
    pause: float = 0.01
    spoilt: bool = False  # in step 2 the last rank's gradient holds NaN, in step 3 its disk is full
    slow: float = 1.0  # of the last rank, in times of the others' local steps
    limit: float = 240.0


def every(size: int, places: list[str]) -> list[Kill]:
    return [Kill(rank, place) for place in places for rank in range(size)]


PLACES = ["backward", "before vote", "after vote", "after bucket", "before commit", "after commit", "committed"]

SCENARIOS = {
    "three": Scenario(3, every(3, PLACES[2:4])),
    "four": Scenario(4, every(4, PLACES)),
    "adam": Scenario(3, every(3, PLACES)[::4], compressor="topk", optimizer="adam"),
    "powersgd": Scenario(3, every(3, PLACES)[1::4], compressor="powersgd"),
    "dense": Scenario(3, every(3, PLACES)[2::4], compressor="none"),
    "down to one": Scenario(
        4, [Kill(1, "after vote"), Kill(0, "after bucket"), Kill(1, "after commit")], restart=False
    ),
    "built": Scenario(
        3, [Kill(1, "after vote"), Kill(0, "build"), Kill(2, "after bucket"), Kill(1, "build")], more=300
    ),
    "frozen": Scenario(3, [Kill(1, "after vote", stop=5.0)], deadline=2.0, more=300),
    "local sgd": Scenario(4, every(4, PLACES)[::3], averaging="local sgd"),
    "slowmo": Scenario(3, every(3, PLACES)[::5], averaging="slowmo"),
    "diloco": Scenario(3, every(3, PLACES)[1::4], averaging="diloco"),
    "diloco, plain": Scenario(3, every(3, PLACES[::3])[::2], averaging="diloco, plain", residuals="buddy"),
    "spoilt": Scenario(3, [Kill(1, "after vote")], spoilt=True),
    "quorum": Scenario(
        3, [Kill(1, "backward", stop=4.0)], averaging="quorum", pause=0.05, slow=3.0, more=60, restart=False
    ),
    "buddy": Scenario(4, every(4, ["backward"]), residuals="buddy"),
    "too few": Scenario(3, [Kill(1, "after vote")], restart=False, min_ranks=3, deadline=2.0),
}


class Plan:
    """The kills of one rank, and how far the plan is, in a file that all ranks share."""

    def __init__(self, scenario: Scenario, comm: Any, path: Path) -> None:
        self.scenario, self.comm, self.path = scenario, comm, path
        self.armed: Kill | None = None
        self.size = comm.size  # in the vote of the last step
        start = comm._start

        def starting(collective: Any, ranks: tuple[int, ...]) -> Any:
            if "vote" in collective.label:  # a rank may be lost after the step has all it needs
                self.size = comm.size
            self.at(f"before {collective.label}")
            handle = start(collective, ranks)
            self.at(f"after {collective.label}")
            return handle

        comm._start = starting
        groups = comm._epoch_groups
        group = groups._group

        def building(*args: Any) -> Any:
            done = self.done()
            kill = scenario.kills[len(done)] if len(done) < len(scenario.kills) else None
            if kill is not None and kill.place == "build" and kill.rank == comm.rank:
                self.next(kill, done[-1])
                self.at("build")
            return group(*args)

        groups._group = building

    def done(self) -> list[int]:
        """The steps of the kills so far."""
        return [int(line) for line in self.path.read_text().split()]

    def begin(self, step: int) -> bool:
        """Arm the next kill if it is this rank's; returns False once the plan is over."""
        kills, done, size = self.scenario.kills, self.done(), self.scenario.size
        last = done[-1] if done else 0
        if len(done) == len(kills):
            return step < last + self.scenario.more
        kill = kills[len(done)]
        there = self.comm.size == (size if self.scenario.restart else size - len(done))
        if kill.rank == self.comm.rank and there and step >= last + APART and kill.place != "build":
            self.next(kill, step)
            self.at("backward")
        return True

    def next(self, kill: Kill, step: int) -> None:
        self.armed = kill
        with open(self.path, "a") as file:
            file.write(f"{step}\n")

    def at(self, place: str) -> None:
        kill = self.armed
        if kill is None:
            return
        when, _, label = kill.place.partition(" ")
        if place == when or (place.startswith(f"{when} ") and label in place):
            self.armed = None
            os.kill(os.getpid(), signal.SIGSTOP if kill.stop else signal.SIGKILL)


def train(slot: int, name: str, address: str, scenario: Scenario, folder: Path) -> None:
    """One rank's life; an error that ends it is left in a file."""
    try:
        live(slot, name, address, scenario, folder)
    except Exception as error:
        (folder / f"{name}.error").write_text(f"{type(error).__name__}: {error}")
        raise


def live(slot: int, name: str, address: str, scenario: Scenario, folder: Path) -> None:
    os.environ.update({STORE: address, MEMBER: name, "RANK": str(slot), "WORLD_SIZE": str(scenario.size)})
    logging.basicConfig(level=logging.INFO, format=f"{name} %(relativeCreated)d %(message)s")
    torch.manual_seed(slot)  # the weights of the first rank count
    limits: Any = {"deadline": scenario.deadline, "min_ranks": scenario.min_ranks}
    comm = dgcopt.init(survive=True, residuals=scenario.residuals, copy_every=1, **limits)
    model = nn.ParameterDict({"a": nn.Parameter(torch.randn(40, 8)), "b": nn.Parameter(torch.randn(65))})
    params = dict(model.named_parameters())
    if scenario.optimizer == "sgd":
        bare: Any = torch.optim.SGD(params.values(), lr=1.0)
    else:
        bare = torch.optim.Adam(params.values(), lr=0.01)
    if scenario.averaging:
        optimizer = AVERAGING[scenario.averaging]().attach(bare, params.items())
        exchange = optimizer.averaging
    else:
        optimizer = dgcopt.DistributedOptimizer(bare, params.items(), COMPRESSORS[scenario.compressor]())
        exchange = optimizer
    state = dgcopt.survive.State(model=model, optimizer=optimizer, step=0)
    state.sync()
    plan, draw = Plan(scenario, comm, folder / "kills"), torch.Generator().manual_seed(hash(name) % 2**31)
    bare.register_step_pre_hook(lambda *_: plan.at("committed"))

    def residual() -> torch.Tensor:
        coded = exchange.outers[0] if scenario.averaging.startswith("diloco") else bare
        memory = coded.state_dict().get(STATE_KEY, {"memory": {}})["memory"].get("residual", {})
        return torch.cat([memory.get(key, torch.zeros_like(param)).flatten() for key, param in params.items()])

    def weights() -> torch.Tensor:
        return torch.cat([param.detach().flatten().clone() for param in params.values()])

    is_slow = scenario.slow > 1 and slot == scenario.size - 1
    local_steps, gradient = 0, torch.zeros_like(weights())
    with open(folder / f"{name}.jsonl", "w") as file:
        while plan.begin(state.step):
            before, start = weights(), residual()
            while True:
                local_steps += 1
                optimizer.zero_grad()
                if scenario.slow > 1:
                    time.sleep(scenario.pause * (scenario.slow if is_slow else 1))
                grads = {key: torch.randint(-8, 9, param.shape, generator=draw) for key, param in params.items()}
                gradient += torch.cat([grad.flatten() for grad in grads.values()])
                sum((param * grads[key]).sum() for key, param in params.items()).backward()
                if scenario.spoilt and state.step == 2:
                    gradient.zero_()  # no rank takes this step
                    if slot == scenario.size - 1:
                        params["b"].grad[3] = torch.nan
                optimizer.step()
                if not scenario.averaging or exchange.step // LOCAL > state.step:
                    break
            after = weights()
            is_full = slot == scenario.size - 1
            saved = save(folder / "checkpoints", after, is_full) if scenario.spoilt and state.step == 3 else ""
            is_late = bool(scenario.averaging and exchange.replica.steps_since_sync)
            state.step = exchange.step // LOCAL - 1 if scenario.averaging else state.step
            line = {
                "time": time.monotonic(),
                "step": state.step,
                "size": plan.size,
                "rank": comm.rank,
                "saved": saved,
                "is_late": is_late,
                "local_steps": local_steps,
                "weights": hashlib.sha256(after.numpy().tobytes()).hexdigest(),
                "lost": [exchange.telemetry.lost_steps, exchange.telemetry.lost_seconds],
                "applied": (before - after).tolist(),
                "gradient": gradient.tolist(),
                "before": start.tolist(),
                "after": residual().tolist(),
            }
            print(json.dumps(line), file=file, flush=True)
            state.step += 1
            if not is_late:
                local_steps, gradient = 0, torch.zeros_like(after)
            if scenario.slow == 1:
                time.sleep(scenario.pause)


def save(directory: Path, weights: torch.Tensor, is_full: bool) -> str:
    """Save a checkpoint, on a disk that may be full; return the error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        dgcopt.survive.complete(lambda: dgcopt.checkpoint.save(directory, {"weights": weights}, 3))
        return "saved"
    except dgcopt.CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run(name: str, scenario: Scenario) -> dict[str, Any]:
    """Start the ranks of a scenario, testify to their ends and start them anew, as an agent does."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["survive", "torch._dynamo"])  # the latter is what an optimizer imports
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # as the agent does
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="dgcopt-survive-") as text:
        folder = Path(text)
        (folder / "kills").touch()

        def start(slot: int, number: int) -> Any:
            member = f"{slot}.{number}"
            process = context.Process(target=train, args=(slot, member, f"127.0.0.1:{store.port}", scenario, folder))
            process.start()
            return process

        living = {slot: (0, start(slot, 0)) for slot in range(scenario.size)}
        begun, ends, stopped, hung = time.monotonic(), {}, {}, []
        while living:
            for slot, (number, process) in [*living.items()]:
                if process.exitcode is not None:
                    ends[f"{slot}.{number}"] = process.exitcode
                    store.set(gone_key(f"{slot}.{number}"), str(process.exitcode))
                    del living[slot]
                    over = hung or len((folder / "kills").read_text().split()) == len(scenario.kills)
                    if process.exitcode and scenario.restart and (not over or stopped):
                        living[slot] = (number + 1, start(slot, number + 1))
                elif (until := stopped.get(process.pid)) is not None and time.monotonic() > until:
                    os.kill(process.pid, signal.SIGCONT)
                    stopped[process.pid] = float("inf")
                elif until is None and _is_stopped(process.pid):
                    stopped[process.pid] = time.monotonic() + scenario.kills[0].stop
            if time.monotonic() - begun > scenario.limit:
                hung += [f"{slot}.{number}" for slot, (number, _) in living.items()]
                for _, process in living.values():
                    process.kill()
            time.sleep(0.01)
        lines = [
            {"member": path.stem, **json.loads(line)}
            for path in sorted(folder.glob("*.jsonl"))
            for line in path.read_text().splitlines()
            if line.endswith("}")
        ]
        kills = [int(line) for line in (folder / "kills").read_text().split()]
        errors = {path.stem: path.read_text() for path in folder.glob("*.error")}
    seconds = time.monotonic() - begun
    return {
        "scenario": name,
        "ends": ends,
        "errors": errors,
        "hung": hung,
        "lines": lines,
        "kills": kills,
        "seconds": seconds,
    }


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


if __name__ == "__main__":
    with open(sys.argv[1], "w") as results:
        for one in sys.argv[2:] or SCENARIOS:
            print(json.dumps(run(one, SCENARIOS[one])), file=results, flush=True)
            print(one, asdict(SCENARIOS[one])["size"], "ranks", flush=True)
