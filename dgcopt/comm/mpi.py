"""The wire of MPI through mpi4py: non-blocking collectives on the tensors' own memory, without pickling or copies."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..collectives import AllGather, AllReduce, AllToAll, Barrier, Broadcast, Collective, ReduceScatter, SendRecv
from ..errors import CommError
from .base import DEADLINE, Channel, Comm, RankSet
from .handles import Handle

__all__ = ["MPIComm"]


class _Requests(Handle):
    """The pending requests of one collective, and the tensor they fill."""

    def __init__(self, comm: MPIComm, collective: Collective, requests: list[Any], output: Tensor, divide_by: int):
        self.comm = comm
        self.collective = collective
        self.requests = requests
        self.output = output
        self.divide_by = divide_by
        self.kept = (collective.tensor, output)  # MPI reads and writes this memory until the request is complete

    def done(self) -> bool:
        self.requests = [request for request in self.requests if not request.Test()]
        if self.requests:
            return False
        self.comm._in_flight.discard(self)
        return True

    def result(self) -> Tensor:
        if self.divide_by > 1:
            self.output.div_(self.divide_by, rounding_mode=None if self.output.is_floating_point() else "trunc")
            self.divide_by = 1
        return self.output.to(self.collective.tensor.device)


class MPIComm(Comm):
    """An MPI communicator (`COMM_WORLD` by default), duplicated so that the script's own messages never mix with ours.

    An exception that nothing catches aborts the whole job: leaving Python would otherwise wait in MPI_Finalize for
    ranks that wait for this one. Raises CommError if mpi4py cannot be used.
    """

    wire = "mpi"

    def __init__(self, communicator: Any = None, deadline: float = DEADLINE) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise CommError(
                f"the script was started by an MPI launcher, but mpi4py cannot be used ({error}); "
                f"pip install mpi4py, or choose another wire with dgcopt.init(wire=...) or DGCOPT_WIRE"
            ) from error
        self._mpi = MPI
        self._types = {
            torch.float32: MPI.FLOAT,
            torch.float64: MPI.DOUBLE,
            torch.int8: MPI.INT8_T,
            torch.int16: MPI.INT16_T,
            torch.int32: MPI.INT32_T,
            torch.int64: MPI.INT64_T,
            torch.uint8: MPI.UINT8_T,
        }
        # to move messages by, as MPI counts to 2^31 - 1: elements, not bytes
        self._moved = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T}
        self._ops = {"average": MPI.SUM, "sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX}
        world = (communicator if communicator is not None else MPI.COMM_WORLD).Dup()
        super().__init__(world.Get_rank(), world.Get_size(), deadline)
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            self.no_threads = (
                "MPI was not initialised for two threads at once: set mpi4py.rc.thread_level = 'multiple' before "
                "mpi4py.MPI is imported, or choose another wire; an MPI library without MPI_THREAD_MULTIPLE has "
                "none of that"
            )
        self._in_flight: set[_Requests] = set()
        self._communicators: dict[Channel, Any] = {
            self.ranks(): world,
            "control": world.Dup(),
            "agreement": world.Dup(),
        }
        self._find_nodes()
        for group in ("node", "across"):
            members = self.ranks(group)
            if members not in self._communicators:  # on all ranks alike, as each takes part in the split
                self._communicators[members] = world.Split(color=members[0], key=self.rank)
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = self._abort_on_exception

    def supports(self, collective: Collective) -> bool:
        return not isinstance(collective, AllReduce | ReduceScatter) or collective.tensor.dtype in self._types

    def _start(self, collective: Collective, ranks: tuple[int, ...]) -> Handle:
        for handle in list(self._in_flight):
            handle.done()  # MPI moves long messages only while it is called
        comm, mpi, size = self._communicators[self._channel(collective.group)], self._mpi, len(ranks)
        tensor = collective.tensor
        if tensor.device.type != "cpu":
            tensor = tensor.cpu()
        divide_by = size if getattr(collective, "op", None) == "average" else 1
        moved = self._moved.get(tensor.element_size(), mpi.BYTE)
        output = tensor
        if isinstance(collective, AllReduce):
            kind = self._types[tensor.dtype]
            requests = [comm.Iallreduce(mpi.IN_PLACE, _buffer(tensor, kind), self._ops[collective.op])]
        elif isinstance(collective, AllGather):
            output = tensor.new_empty(size, *tensor.shape)
            requests = [comm.Iallgather(_buffer(tensor, moved), _buffer(output, moved, size))]
        elif isinstance(collective, ReduceScatter):
            kind = self._types[tensor.dtype]
            output = tensor.new_empty(tensor.shape[0] // size, *tensor.shape[1:])
            op = self._ops[collective.op]
            counts = [output.numel()] * size
            requests = [comm.Ireduce_scatter(_buffer(tensor, kind), _buffer(output, kind), counts, op)]
        elif isinstance(collective, AllToAll):
            output = torch.empty_like(tensor)
            requests = [comm.Ialltoall(_buffer(tensor, moved, size), _buffer(output, moved, size))]
        elif isinstance(collective, Broadcast):
            requests = [comm.Ibcast(_buffer(tensor, moved), collective.root)]
        elif isinstance(collective, SendRecv):
            requests = []
            if collective.source is not None:
                output = torch.empty_like(tensor)
                requests.append(comm.Irecv(_buffer(output, moved), collective.source))
            if collective.to is not None:
                requests.append(comm.Isend(_buffer(tensor, moved), collective.to))
        elif isinstance(collective, Barrier):
            requests = [comm.Ibarrier()]
        else:
            raise CommError(f"MPI does not have {collective.describe()}")
        handle = _Requests(self, collective, requests, output, divide_by)
        self._in_flight.add(handle)
        return handle

    def _among(self, members: tuple[int, ...], given: Iterable[int] | RankSet) -> Comm | None:
        color = 0 if self.rank in members else self._mpi.UNDEFINED
        part = self._communicators[self.ranks()].Split(color, key=self.rank)
        if part == self._mpi.COMM_NULL:
            return None
        comm = MPIComm(part, self.deadline)
        part.Free()  # the comm has its own duplicates
        return comm

    def close(self) -> None:
        super().close()
        if not self._in_flight and not self._mpi.Is_finalized():  # requests of a collective may need its communicator
            for communicator in filter(None, self._communicators.values()):  # a freed one is false
                communicator.Free()

    def abort(self, code: int = 1) -> NoReturn:
        """End the whole job: leaving Python alone would wait in MPI_Finalize for ranks that wait for this one."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._mpi.COMM_WORLD.Abort(code)
        sys.exit(code)

    def _abort_on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        traceback.print_exception(kind, error, trace)
        if self.size > 1 and not self._mpi.Is_finalized():
            self.abort()


def _buffer(tensor: Tensor, kind: Any, parts: int = 1) -> list[Any]:
    """Return the tensor's own memory as an mpi4py buffer, in `parts` equal parts if the collective needs them."""
    from mpi4py import MPI

    nbytes = tensor.numel() * tensor.element_size()
    memory = MPI.memory.fromaddress(tensor.data_ptr(), nbytes)
    count = nbytes // kind.Get_size() // parts
    return [memory, count, kind]
