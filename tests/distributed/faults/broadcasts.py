"""Messages of everything that ranks do beside a step, damaged in real processes.

Damaged on arrival, with checksums, the rank says so. Damaged by the sender, ranks end with an error of dgcopt or with a
value, in time and in bounded memory.
"""

from __future__ import annotations

import random
import resource
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import dgcopt
from dgcopt import Comm
from tests.distributed.faults import forked
from tests.distributed.faults.actors import Actor, one_step
from tests.distributed.faults.messages import DAMAGES, Tap
from tests.distributed.faults.rules import Seen
from tests.distributed.faults.training import digest

KIND = "damaged broadcast"
COUNT, QUICK = 100, 4
DEADLINE, LIMIT = 2.0, 150.0
MEMORY = 4 * 2**30
"""Bytes that a rank may map beyond those that it has at the start."""


def parameters(comm: Comm, folder: Path) -> Any:
    model = torch.nn.Linear(4, 3)
    torch.nn.init.constant_(model.weight, 2.0 + comm.rank)
    dgcopt.broadcast_parameters(model.state_dict(), comm=comm)
    return model.state_dict()


def an_object(comm: Comm, folder: Path) -> Any:
    value = {"a": torch.arange(5), "b": [1, 2.5, None, "words"], "c": {"d": (True, torch.ones(2, 3))}}
    return dgcopt.broadcast_object(value, comm=comm)


def optimizer_state(comm: Comm, folder: Path) -> Any:
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.AdamW([weight], lr=0.1 + comm.rank)
    weight.grad = torch.ones(3, 2) + comm.rank
    optimizer.step()
    dgcopt.broadcast_optimizer_state(optimizer, comm=comm)
    return optimizer.state_dict()


def replicas(comm: Comm, folder: Path) -> Any:
    dgcopt.check_replicas({"weight": torch.ones(3)}, comm=comm)
    return {}


def saving(comm: Comm, folder: Path) -> Any:
    dgcopt.checkpoint.save(folder, {"weights": torch.ones(20) * comm.rank}, 1, comm)
    return {}


def loading(comm: Comm, folder: Path) -> Any:
    loaded = dgcopt.checkpoint.load(folder, comm)
    return {"loaded": list(loaded or [])}


def first_step(comm: Comm, folder: Path) -> Any:
    """Wrapping compares settings, and the first step agrees on the layout."""
    actor = Actor(comm, 3)
    one_step([actor], 0)
    return actor.model.state_dict()


def groups(comm: Comm, folder: Path) -> Any:
    return {"size": comm.among([0, 1]).size}


CALLS: dict[str, Callable[[Comm, Path], Any]] = {
    call.__name__: call
    for call in (parameters, an_object, optimizer_state, replicas, saving, loading, first_step, groups)
}


def plan(seed: int, count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        rng = random.Random(f"{seed} {KIND} {number}")
        checksums = rng.random() < 0.5
        yield {
            "call": [*CALLS][number % len(CALLS)],
            "damage": rng.choice(DAMAGES),
            "checksums": checksums,
            "guard": "received" if checksums else "sent",
            "control": None,
            "rank": rng.randrange(2),
            "place": rng.random(),
            "byte": rng.random(),
            "bit": rng.randrange(8),
        }


def label(fault: dict[str, Any]) -> str:
    return "a damaged message of a broadcast, a check or a checkpoint"


def describe(fault: dict[str, Any]) -> str:
    return f"{fault['damage']} in {fault['call']} on rank {fault['rank']}, checksums {fault['checksums']}"


def inject(fault: dict[str, Any]) -> Seen:
    call, seen = CALLS[fault["call"]], Seen()
    with tempfile.TemporaryDirectory(prefix="dgcopt-broadcast-") as name:

        def body(rank: int, tell: forked.Tell) -> None:
            comm = dgcopt.init(deadline=DEADLINE, checksums=fault["checksums"])
            dgcopt.checkpoint.save(Path(name) / "loaded", {"weights": torch.ones(20) * rank}, 1, comm)
            where = (Path(name) / "one", Path(name) / "two")
            if fault["call"] == "loading":
                where = (Path(name) / "loaded",) * 2
            counting = {**fault, "rank": rank}
            with Tap([comm], counting).tapped() as tap:
                expected = call(comm, where[0])
            tell(expected=digest(expected))
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY,) * 2)
            if rank == fault["rank"]:
                with Tap([comm], fault, int(fault["place"] * tap.seen)).tapped() as tap:
                    try:
                        value = call(comm, where[1])
                    finally:
                        tell(struck=tap.struck)
            else:
                value = call(comm, where[1])
            tell(value=digest(value))

        reports = forked.run(2, body, LIMIT)
    victim = reports[fault["rank"]]
    seen.struck = bool(victim.told.get("struck"))
    what = f"{fault['damage']} in {victim.told.get('struck')}"
    for report in reports:
        seen.raised += report.raised
        if report.code is None:
            seen.late = f"{what}: rank {report.rank} had not ended {LIMIT:g} s after the start"
        elif report.code < 0:
            seen.unsaid.append(f"{what}: rank {report.rank} was ended by signal {-report.code}")
    if fault["checksums"] and "value" in victim.told and victim.told["value"] != victim.told["expected"]:
        seen.lost.append(f"{what}: another value arrived, although checksums were on")
    return seen
