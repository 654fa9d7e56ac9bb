"""The speed of a wire: every kind of collective in every group, by size, fitted to latency and bandwidth."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from ..collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Collective,
    Group,
    ReduceScatter,
    SendRecv,
)
from ..comm import Comm
from ..errors import CommError, ConfigError
from ..errors.checks import check_positive
from . import clock
from .wire import HALF, KINDS, Fit, Fitted, fit

__all__ = ["LEAST", "load_probe", "measurements", "probe", "ranks_per_machine", "save_probe"]

LEAST = 1024
SIZES = [LEAST * 4**power for power in range(9)]  # bytes of a rank's message
REPEATS = 8  # of a small message, of which the fastest counts; large ones are repeated once, as their noise is smaller
WORD = 4


def probe(comm: Comm, *, seconds: float = 8.0, deadline: float = 20.0, device: torch.device | None = None) -> Fitted:
    """Measure every kind of collective in every group of more than one rank; alike on all ranks.

    Sizes grow by factors of four until the next one would exceed the collective's share of `seconds`. Times are those
    of the slowest rank.

    Args:
        comm: the wire. All its ranks must call this at the same place, with no collective in flight.
        seconds: time for all measurements together; at least two sizes are measured on any link.
        deadline: seconds that this rank waits for the others at the start.
        device: where messages are; the CPU by default.

    Raises ConfigError for a single rank, TimeoutExceeded if some rank has not called it within `deadline`, CommError
    for measurements that cannot be right.
    """
    check_positive(seconds, "seconds")
    check_positive(deadline, "deadline")
    if comm.size < 2:
        raise ConfigError(
            "dgcopt probe measures the link between ranks, and this process is the only one: start several, as by "
            "`torchrun --nproc-per-node 2 -m dgcopt probe`"
        )
    device = torch.device("cpu") if device is None else device
    comm.run(Barrier(label="start of dgcopt probe"), deadline)
    return comm.drive(measurements(comm, dict.fromkeys(KINDS, SIZES), seconds, device))


def measurements(
    comm: Comm, sizes: Mapping[str, Sequence[int]], seconds: float, device: torch.device
) -> Generator[Collective, Tensor, Fitted]:
    """Measure some kinds of collectives as `probe` does, on all ranks at the same place, with none in flight.

    `sizes` has the kinds, and bytes of the messages of each: the first two are measured in any case.
    """
    measured = yield from _groups(comm)
    budget = seconds / (len(sizes) * len(measured))
    fits: dict[tuple[str, str], Fit] = {}
    for group in measured:
        for kind, wanted in sizes.items():
            found = yield from _measure(comm, kind, group, budget, device, wanted)
            fits[kind, group] = fit(list(found), list(found.values()), comm.size_of(group))
    return Fitted(fits)


def ranks_per_machine(comm: Comm) -> Generator[Collective, Tensor, int]:
    """Return the number of ranks of each machine on every rank; 1 if there is one machine, or they differ."""
    mine = torch.tensor([comm.local_size], dtype=torch.int64)
    sizes = (yield AllGather(comm.to_wire(mine), label="ranks of machines")).cpu()
    return comm.local_size if comm.nodes > 1 and bool((sizes == comm.local_size).all()) else 1


def _groups(comm: Comm) -> Generator[Collective, Tensor, list[Group]]:
    """Return the groups of more than one rank on every rank: those that differ from the world."""
    found: list[Group] = ["world"]
    mine = torch.tensor([comm.size_of("node"), comm.size_of("across")], dtype=torch.int64)
    sizes = (yield AllGather(comm.to_wire(mine), label="sizes of groups")).cpu()
    groups: tuple[Group, ...] = ("node", "across")
    for column, group in enumerate(groups):
        if int(sizes[:, column].min()) > 1 and int(sizes[:, column].max()) < comm.size:
            found.append(group)
    return found


def _measure(
    comm: Comm, kind: str, group: Group, budget: float, device: torch.device, sizes: Sequence[int]
) -> Generator[Collective, Tensor, dict[float, float]]:
    """Return seconds by bytes of a rank's message; all ranks decide alike how far to go."""
    found: dict[float, float] = {}
    spent = 0.0
    yield from _once(comm, kind, group, sizes[0], device)  # makes connections
    for nbytes in sizes:
        if len(found) > 1:
            following = fit([*found], [*found.values()], comm.size_of(group)).cost(nbytes).seconds
            if spent + 2 * following > budget:
                break
        times: list[float] = []
        # the same number on all ranks, as the times are those of the slowest
        while len(times) < REPEATS and (len(times) < 2 or sum(times) < budget / 10):
            times.append((yield from _once(comm, kind, group, nbytes, device)))
        found[nbytes] = min(times)
        spent += sum(times)
    return found


def _once(
    comm: Comm, kind: str, group: Group, nbytes: int, device: torch.device
) -> Generator[Collective, Tensor, float]:
    """Return the seconds of one collective on the slowest rank.

    All ranks end together, as the last collective needs all of them: the next measurement starts together.
    """
    collective = _collective(comm, kind, group, nbytes, device)
    start = clock.now()
    if group != "across" or comm.local_rank == 0:  # as `Hierarchical`, whose other ranks leave the link to the first
        yield collective
    comm.finish_on_device()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    mine = torch.tensor([clock.now() - start], dtype=torch.float64)
    slowest = float((yield AllReduce(comm.to_wire(mine), op="max", label="seconds of a measurement")))
    if not 0 < slowest < math.inf:
        raise CommError(f"rank {comm.rank}: {kind} of {nbytes} bytes took {slowest} s by the slowest rank's clock")
    return slowest


def _collective(comm: Comm, kind: str, group: Group, nbytes: int, device: torch.device) -> Collective:
    """Return a collective of `nbytes` per rank."""
    size, rank = comm.size_of(group), comm.ranks(group).index(comm.rank)
    rows = max(1, nbytes // WORD // size) * size
    flat = torch.zeros(rows if kind in ("ReduceScatter", "AllToAll") else nbytes // WORD, device=device)
    if kind == "AllReduce":
        return AllReduce(flat, op="sum", group=group, label="measurement")
    if kind == HALF:
        half = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device)
        return AllReduce(half, op="sum", group=group, label="measurement")
    if kind == "AllGather":
        return AllGather(flat, group=group, label="measurement")
    if kind == "ReduceScatter":
        return ReduceScatter(flat, op="sum", group=group, label="measurement")
    if kind == "AllToAll":
        return AllToAll(flat.view(size, -1), group=group, label="measurement")
    if kind == "Broadcast":
        return Broadcast(flat, group=group, label="measurement")
    to, source = (rank + 1) % size, (rank - 1) % size
    return SendRecv(flat, to=to, source=source, group=group, label="measurement")


def save_probe(fitted: Fitted, path: Path) -> None:
    """Write a probe as JSON. Raises ConfigError if that is not possible."""
    rows = [{"kind": kind, "group": group, **asdict(one)} for (kind, group), one in fitted.fits.items()]
    try:
        path.write_text(json.dumps({"fits": rows}, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def load_probe(path: Path) -> Fitted:
    """Read a probe that `save_probe` wrote. Raises ConfigError for another file."""
    try:
        content = json.loads(path.read_text())
        rows = content["fits"]
        fits = {
            (str(row["kind"]), str(row["group"])): Fit(
                *(float(row["alpha"]), float(row["beta"]), int(row["size"])),
                *(tuple(map(float, row["sizes"])), tuple(map(float, row["seconds"]))),
            )
            for row in rows
        }
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}. `dgcopt probe --json {path}` writes it") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is no output of `dgcopt probe --json`: {error}") from error
    return Fitted(fits)
