"""The wire of torch.distributed: Gloo on CPU, NCCL on CUDA. Needs no build and no daemon."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

# Its default arguments hold the default process group. Imported after that is made, as torch does lazily, they keep
# Gloo's threads alive until the interpreter is gone, which then aborts.
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

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
    reduce_rows,
)
from ..errors import CommError, ConfigError
from .base import DEADLINE, Channel, Comm, RankSet
from .handles import Handle
from .late import NOTICE, gone, waiting
from .sockets import end_connections

__all__ = ["MOVED", "REDUCE", "REDUCED", "ProcessGroupComm", "TorchComm", "Works", "tells_all"]

log = logging.getLogger("dgcopt")

NCCL_STREAMS = "NCCL_SOCKET_NTHREADS"
"""NCCL's setting for the number of threads, each with its own socket, per connection between machines."""

CUT = 2**18
"""Minimum bytes per piece of a message that is cut for several connections."""

COPIES, PACKET = 2**20, 1400
"""Largest total bytes that a rank sends directly to all others instead of around Gloo's ring, for gathers and sums.

In a ring each of N - 1 or 2 (N - 1) messages waits for the previous one: with eight ranks on two cores a gather takes
2.8 ms of CPU time, and 1.1 ms if each rank sends to all at once. The bytes of a ring's sum do not grow with N, though.
"""

LATER = 2.0
"""Seconds after the deadline of a rendezvous, within which torch raises its own error, that its waits are ended."""

_STORES: dict[tuple[str, int, int], tuple[dist.Store, int, int, Iterator[int]]] = {}
"""Per meeting place: the store, this process's rank, the number of ranks, and the count of its groups."""

_GIVEN_UP: list[dist.Work] = []
"""Collectives without a waiter: their deadline has passed, or the wire has failed."""

REDUCED = {
    getattr(torch, name) for name in ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
}
"""Dtypes that Gloo and NCCL sum; both take bool too, but Gloo returns no bool."""
MOVED = {*REDUCED, torch.bool}

REDUCE = {"average": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class Works(Handle):
    """The pending works of one collective, and the tensor that they fill; for some AllReduces `rows` to be reduced."""

    def __init__(
        self, collective: Collective, works: list[dist.Work], output: Tensor, divide_by: int, rows: bool
    ) -> None:
        self.collective = collective
        self.works = works
        self.output = output
        self.divide_by = divide_by
        self.rows = rows

    def done(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self, seconds: float) -> None:
        """Wait for the library, once: waiting for one of Gloo's receives again fails.

        A work stays until it has succeeded, so that a wait after a failed one does not take its memory for the result.
        """
        on_cpu, end = self.output.is_cpu, time.monotonic() + seconds
        while self.works:
            work = self.works[-1]
            left = timedelta(seconds=max(end - time.monotonic(), 0.001))  # Gloo takes 0 for no limit
            try:
                # on NCCL this only orders the streams: the host continues, and the process group's own deadline holds
                work.wait(*[left] if on_cpu else [])
            except RuntimeError:
                _GIVEN_UP[:] = [one for one in (*_GIVEN_UP, work) if not one.is_completed()]  # each holds its tensors
                raise
            self.works.pop()

    def result(self) -> Tensor:
        if self.rows and isinstance(self.collective, AllReduce):
            self.output, self.divide_by, self.rows = reduce_rows(self.output, self.collective.op), 1, False
        if self.divide_by > 1:
            exact = self.output.is_floating_point()
            self.output.div_(self.divide_by, rounding_mode=None if exact else "trunc")
            self.divide_by = 1
        tensor = self.collective.tensor
        if self.output.device != tensor.device:
            self.output = self.output.to(tensor.device)
        if self.output.dtype != tensor.dtype:  # it has travelled as bytes
            rows = self.output.shape[:1] if isinstance(self.collective, AllGather) else ()
            self.output = self.output.view(-1).view(tensor.dtype).view(*rows, *tensor.shape)
        return self.output


class ProcessGroupComm(Comm):
    """A wire whose collectives are works of torch's process groups: waits for them, and the bytes that they send."""

    wire = "torch"

    def sent(self, collective: Collective) -> int:
        size = self.size_of(collective.group)
        return (size - 1) * collective.nbytes if tells_all(collective, size) else super().sent(collective)

    def wait(self, handle: Handle, deadline: float | None = None) -> Tensor:
        """Wait as `Comm.wait` does, blocking inside the library."""
        if not isinstance(handle, Works):
            return super().wait(handle, deadline)
        limit = self.deadline if deadline is None else deadline
        try:
            handle.wait(limit)
            return handle.result()
        except RuntimeError as error:
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                raise self._late(handle.collective, limit) from error
            raise self._failed(handle.collective, error) from error


class TorchComm(ProcessGroupComm):
    """torch.distributed among the ranks of its default process group, or over another of all given as `process_group`.

    Beside the default one it makes its own, so that the script's own collectives in the middle of a step never mix
    with buckets, which some ranks have sent by then and others have not. A given one of fewer ranks needs two more, of
    Gloo, as `apart`, by name: `among` makes all three. If the script has not called `init_process_group`, `init_method`
    must name the rendezvous ("env://" under torchrun), and `close` ends a group started here. Raises CommError if
    the ranks do not all come before `deadline`.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        apart: Mapping[Channel, dist.ProcessGroup] | None = None,
        init_method: str = "env://",
        rank: int = -1,
        size: int = -1,
        deadline: float = DEADLINE,
    ) -> None:
        self._owner = not dist.is_initialized()
        if self._owner:
            place = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
            place = place if init_method == "env://" else init_method
            if torch.cuda.is_available():
                local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
                torch.cuda.set_device(int(local) % torch.cuda.device_count())
            try:
                _join(place, init_method, rank, size, timedelta(seconds=deadline))
            except (RuntimeError, ValueError) as error:
                me = os.environ.get("RANK", rank) if rank < 0 else rank
                all_ = os.environ.get("WORLD_SIZE", size) if size < 0 else size
                raise CommError(
                    f"rank {me} of {all_}: not all ranks came to {place} within {deadline:g} s "
                    f"({str(error).splitlines()[0]}). Check that every rank was started and can reach that address."
                ) from error
            atexit.register(self.close)  # Gloo's threads must be gone before the interpreter is
        else:
            atexit.unregister(_release_gil)  # once is enough for all groups
            atexit.register(_release_gil)
        self._world, self._default = process_group, dist.group.WORLD
        self._made: list[dist.ProcessGroup | None] = []  # made here or by `among`: `close` ends them
        super().__init__(dist.get_rank(process_group), dist.get_world_size(process_group), deadline)
        self._groups: dict[Channel, dist.ProcessGroup | None] = {self.ranks(): self._world}
        self._lanes: list[dist.ProcessGroup | None] = [self._world]
        self._turn = 0
        self._on_device: list[tuple[dist.Work, Collective]] = []
        self._connected: set[Channel] = set()
        self._backend: str | None = None
        self._gpu_only = "gloo" not in str(dist.get_backend(process_group)) and "gloo" not in _backends(process_group)
        if apart is not None:
            self._groups.update(apart)
            self._made += [process_group, *apart.values()]
            return
        if self.size < dist.get_world_size():
            raise ConfigError(
                f"TorchComm(process_group=...) has {self.size} of {dist.get_world_size()} ranks: make it with "
                f"dgcopt.init().among(ranks), called on all ranks, which torch needs to make a second group of them"
            )
        self._find_nodes()
        self._find_shared_devices()
        self._make_groups()

    def _find_shared_devices(self) -> None:
        """Choose Gloo for CUDA tensors if two ranks share a GPU, which NCCL refuses at its first collective."""
        if self._gpu_only or not torch.cuda.is_available():
            return
        name = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid).encode()[:64]
        mine = torch.frombuffer(bytearray(name.ljust(64)), dtype=torch.uint8)
        rows = [bytes(row.tolist()) for row in self.run(AllGather(mine, label="names of devices"))]
        if len({*rows}) < self.size:
            self._backend = "cpu:gloo,cuda:gloo"
            log.warning(
                "dgcopt: rank %d: %d ranks share %d GPU(s), which NCCL refuses: CUDA tensors travel by Gloo, through "
                "the host. Start one rank per GPU for NCCL",
                *(self.rank, self.size, len({*rows})),
            )

    def _make_groups(self) -> None:
        """Make a process group of all ranks and of every sub-group; every rank must take part in making each."""
        if self._world is None or self._backend is not None:
            self._groups[self.ranks()] = self._new_group(self.ranks())
            self._lanes = [self._groups[self.ranks()]]
        self._groups.update(self._new_groups_apart(self.ranks()))
        for members in self._subgroups:
            made = self._new_group(members)
            if self.rank in members:
                self._groups[members] = made
        self._made += [group for group in self._groups.values() if group is not self._world]

    def spread(self, streams: int) -> None:
        """Spread exchanges over process groups, each with its own connections; on NCCL by its own setting."""
        self.streams = streams
        if streams == 1:
            return
        if "nccl" in _backends(self._world):
            os.environ.setdefault(NCCL_STREAMS, str(streams))
            log.info("dgcopt: %s=%s", NCCL_STREAMS, os.environ[NCCL_STREAMS])
        if not self._gpu_only:
            lanes = [self._new_group(self.ranks(), "gloo") for _ in range(1, streams)]
            self._lanes += lanes
            self._made += lanes

    def _lanes_of(self, collective: Collective) -> list[dist.ProcessGroup | None]:
        """Return the groups that carry a collective: they take turns, and large messages are cut into pieces."""
        channel, tensor = self._channel(collective.group), collective.tensor
        if channel != self.ranks() or tensor.device.type != "cpu" or len(self._lanes) == 1:
            return [self._groups[channel]]
        first, self._turn = self._turn, (self._turn + 1) % len(self._lanes)
        pieces = collective.nbytes // CUT if isinstance(collective, AllReduce | AllGather) else 1
        return [*self._lanes[first:], *self._lanes[:first]][: max(1, pieces)]

    def _new_group(self, members: tuple[int, ...], backend: str | None = None) -> dist.ProcessGroup:
        everywhere = [self._global(rank) for rank in members]
        return dist.new_group(everywhere, timeout=timedelta(seconds=self.deadline), backend=backend or self._backend)

    def _new_groups_apart(self, members: tuple[int, ...]) -> dict[Channel, dist.ProcessGroup]:
        return {"control": self._new_group(members, "gloo"), "agreement": self._new_group(members, "gloo")}

    def _among(self, members: tuple[int, ...], given: Iterable[int] | RankSet) -> Comm | None:
        if self.size < dist.get_world_size():
            raise ConfigError(
                f"torch makes a group with all {dist.get_world_size()} ranks taking part, and this comm has "
                f"{self.size} of them: ask the comm of all ranks for ranks {[self._global(r) for r in members]}"
            )
        group, apart = self._new_group(members), self._new_groups_apart(members)
        if self.rank not in members:
            return None
        return TorchComm(group, apart=apart, deadline=self.deadline)

    def _share_replica(self, comm: Comm, replicas: Sequence[tuple[int, ...]]) -> None:
        assert isinstance(comm, TorchComm)
        for members in replicas:
            made = self._new_group(members, "gloo") if len(members) > 1 else None
            if self.rank in members:
                comm._join_replica(members, made)

    def _join_replica(self, members: tuple[int, ...], group: dist.ProcessGroup | None) -> None:
        self._groups["replica"], self._ranks["replica"] = group, members
        self._made.append(group)

    def _rank_in(self, group: Group) -> int:
        return dist.get_rank() if group == "replica" else self.rank

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Return torch's process group of these ranks."""
        group = self._world if self._world is not None else dist.group.WORLD
        assert group is not None
        return group

    def to_wire(self, tensor: Tensor) -> Tensor:
        return tensor.cuda() if self._gpu_only else tensor

    def supports(self, collective: Collective) -> bool:
        tensor = collective.tensor
        if isinstance(collective, ReduceScatter) and (tensor.is_cpu or self._is_gloo(self._groups.get(self.ranks()))):
            return False
        return not isinstance(collective, AllReduce | ReduceScatter) or tensor.dtype in REDUCED

    def _start(self, collective: Collective, ranks: tuple[int, ...]) -> Handle:
        lanes, tensor, size = self._lanes_of(collective), collective.tensor, len(ranks)
        if not tensor.is_cpu and self._is_gloo(lanes[0]):
            tensor = tensor.cpu()  # Gloo has few collectives of CUDA tensors, and copies them too
        if tensor.dtype not in MOVED and not isinstance(collective, AllReduce | ReduceScatter):
            tensor = tensor.view(-1).view(torch.uint8)
        group = lanes[0]
        divide_by = size if getattr(collective, "op", None) == "average" else 1
        output = tensor
        works: list[dist.Work | None]
        to_all = len(lanes) == 1 and tells_all(collective, size)
        if to_all:
            copies = tensor.view(-1).view(torch.uint8).repeat(size)
            output = tensor.new_empty(size, *tensor.shape)
            works = [dist.all_to_all_single(output.view(-1).view(torch.uint8), copies, group=group, async_op=True)]
        elif isinstance(collective, AllReduce):
            pieces = tensor.view(-1).tensor_split(len(lanes))
            works = [
                dist.all_reduce(piece, REDUCE[collective.op], group=lane, async_op=True)
                for piece, lane in zip(pieces, lanes, strict=True)
            ]
        elif isinstance(collective, AllGather):
            output = tensor.new_empty(size, *tensor.shape)
            if tensor.is_cpu:
                columns = output.view(size, -1).tensor_split(len(lanes), dim=1)
                pieces = tensor.view(-1).tensor_split(len(lanes))
                works = [
                    dist.all_gather(list(rows.unbind(0)), piece, group=lane, async_op=True)
                    for rows, piece, lane in zip(columns, pieces, lanes, strict=True)
                ]
            else:
                works = [dist.all_gather_into_tensor(output.view(-1), tensor.view(-1), group=group, async_op=True)]
        elif isinstance(collective, ReduceScatter):
            output = tensor.new_empty(tensor.shape[0] // size, *tensor.shape[1:])
            works = [dist.reduce_scatter_tensor(output, tensor, REDUCE[collective.op], group=group, async_op=True)]
        elif isinstance(collective, AllToAll):
            output = torch.empty_like(tensor)
            works = [dist.all_to_all_single(output, tensor, group=group, async_op=True)]
        elif isinstance(collective, Broadcast):
            works = [dist.broadcast(tensor, self._global(ranks[collective.root]), group=group, async_op=True)]
        elif isinstance(collective, SendRecv):
            peers = []
            if collective.source is not None:
                output = torch.empty_like(tensor)
                peers.append(dist.P2POp(dist.irecv, output, self._global(ranks[collective.source]), group))
            if collective.to is not None:
                peers.append(dist.P2POp(dist.isend, tensor, self._global(ranks[collective.to]), group))
            works = self._connect(collective, tensor, group)
            works += dist.batch_isend_irecv(peers) if peers else []
        elif isinstance(collective, Barrier):
            works = [dist.barrier(group=group, async_op=True)]
        else:
            raise CommError(f"torch.distributed does not have {collective.describe()}")
        return Works(collective, [work for work in works if work is not None], output, divide_by, to_all)

    def _connect(
        self, collective: Collective, tensor: Tensor, group: dist.ProcessGroup | None
    ) -> list[dist.Work | None]:
        """Launch one tiny allreduce in a new NCCL group, whose first sends and receives need all of its ranks."""
        channel = self._channel(collective.group)
        if tensor.is_cpu or channel in self._connected or "nccl" not in _backends(group):
            return []
        self._connected.add(channel)
        return [dist.all_reduce(tensor.new_zeros(1), group=group, async_op=True)]

    def _is_gloo(self, group: dist.ProcessGroup | None) -> bool:
        """True if CUDA tensors travel over a group by Gloo."""
        return "cuda:gloo" in _backends(group)

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._world, rank) if self._world is not None else rank

    def wait(self, handle: Handle, deadline: float | None = None) -> Tensor:
        """Wait as `Comm.wait` does, inside the library: no polling on CPU, no host synchronisation on NCCL."""
        if isinstance(handle, Works) and not handle.output.is_cpu:
            self._on_device = [
                *(one for one in self._on_device if not one[0].is_completed()),
                *((work, handle.collective) for work in handle.works),
            ]
        return super().wait(handle, deadline)

    def finish_on_device(self, deadline: float | None = None) -> None:
        """Wait as `Comm.finish_on_device` does: poll NCCL's works, so that a timeout is raised here, not in a read.

        A work that NCCL has failed counts as completed, as torch tells its error to no caller; torch ends the process.
        """
        if not self._on_device:
            return
        limit = self.deadline if deadline is None else deadline
        works, self._on_device = self._on_device, []
        start, pause = time.monotonic(), 20e-6
        for work, collective in works:
            while not work.is_completed():
                if time.monotonic() - start > limit:
                    raise self._late(collective, limit)
                time.sleep(pause)
                pause = min(2 * pause, 1e-3)

    def _waiting(self, words: str) -> dict[int, str] | None:
        group = self._groups.get("control")  # None if the deadline passed while the threads were made
        return None if group is None else waiting(group, self.rank, self._others, words)

    def _gone(self) -> list[int]:
        channels: list[Channel] = ["control", *([] if self._gpu_only else [self.ranks()])]
        groups = [self._groups[channel] for channel in channels if channel in self._groups]
        return gone(groups, {rank: self._global(rank) for rank in self._others} if groups else {})

    @property
    def _others(self) -> list[int]:
        return [rank for rank in self.ranks() if rank != self.rank]

    def has_ended(self) -> bool:
        return super().has_ended() or dist.group.WORLD is not self._default

    def close(self) -> None:
        must_end = self._owner and not self.has_ended()
        super().close()
        if self._owner:
            atexit.unregister(self.close)  # which keeps this comm, and so its groups
        if must_end:
            with contextlib.suppress(RuntimeError, AssertionError):
                dist.destroy_process_group()
        while self._made:
            group = self._made.pop()
            if group is not None and dist.is_initialized():  # each has threads and connections of its own
                with contextlib.suppress(RuntimeError, ValueError, AssertionError):
                    dist.destroy_process_group(group)
        self._groups.clear()  # or its connections last until the last reference to this comm is gone
        self._lanes.clear()
        self._world = self._default = None


def _join(place: str, init_method: str, rank: int, size: int, timeout: timedelta) -> None:
    """Make the default process group, whose keys in the store are its own.

    The store outlives the groups of a process. torch would give the second group the keys of the first, and its ranks
    would connect to the addresses that those hold.
    """
    rank = int(os.environ.get("RANK", rank)) if rank < 0 else rank  # others than before if ranks were lost
    size = int(os.environ.get("WORLD_SIZE", size)) if size < 0 else size
    if (place, rank, size) not in _STORES:
        with _end_silence(place, timeout.total_seconds() + LATER):
            met = next(rendezvous(init_method, rank, size, timeout=timeout))
        _STORES[place, rank, size] = (*met, itertools.count())
    store, rank, size, count = _STORES[place, rank, size]
    store.set_timeout(timeout)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    keys = dist.PrefixStore(f"dgcopt {size} {next(count)}", store)
    dist.init_process_group(backend, store=keys, rank=rank, world_size=size, timeout=timeout)


@contextlib.contextmanager
def _end_silence(place: str, seconds: float) -> Iterator[None]:
    """Context of a rendezvous: torch's waits without limit for a program at that port that is no store."""
    port, has_ended = place.rpartition(":")[2], threading.Event()

    def watch() -> None:
        pause = seconds
        while port.isdecimal() and not has_ended.wait(pause):
            end_connections(int(port))
            pause = 1.0

    threading.Thread(target=watch, name="dgcopt ends a rendezvous", daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()


def tells_all(collective: Collective, size: int) -> bool:
    """Return True if each rank sends its tensor to all others: for sums of integers, the same in any order."""
    tensor, nbytes = collective.tensor, (size - 1) * collective.nbytes
    if tensor.device.type != "cpu" or not nbytes:
        return False
    if isinstance(collective, AllReduce):
        return nbytes <= PACKET and not (tensor.is_floating_point() or tensor.is_complex())
    return isinstance(collective, AllGather) and nbytes <= COPIES


def _release_gil() -> None:
    """Release the GIL for a moment at exit: Gloo's threads need it to free their last tensors, or they abort.

    Abandoned collectives end when others close their connections, mostly at the same moment.
    """
    end = time.monotonic() + 2 * NOTICE
    while time.monotonic() < end and not all(work.is_completed() for work in _GIVEN_UP):
        time.sleep(0.01)
    time.sleep(0.05)


def _backends(group: dist.ProcessGroup | None) -> str:
    """Return the back ends of a group by device type, in torch's notation."""
    try:
        return str(dist.get_backend_config(group))
    except (AttributeError, ValueError):
        return ""
