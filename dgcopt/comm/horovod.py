"""The wire of Horovod, under `horovodrun` with its Gloo or MPI controller. Public Horovod functions only."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Collective,
    ReduceScatter,
    SendRecv,
)
from ..errors import CommError
from .base import DEADLINE, Comm, Handle

__all__ = ["HorovodComm"]

_REDUCED = (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)
_MOVED = (*_REDUCED, torch.uint8, torch.int8)


class _Pending(Handle):
    """A Horovod handle, polled: Horovod's own synchronize() spins and starves ranks that share cores."""

    def __init__(self, collective: Collective, handle: int, shape: torch.Size | tuple[int, ...], dtype: torch.dtype):
        import horovod.torch as hvd

        self._hvd = hvd
        self.collective = collective
        self.handle = handle
        self.shape = shape
        self.dtype = dtype

    def done(self) -> bool:
        return bool(self._hvd.poll(self.handle))

    def result(self) -> Tensor:
        output = self._hvd.synchronize(self.handle)
        if isinstance(output, tuple):  # alltoall also returns the sizes that it received
            output = output[0]
        return output.view(self.dtype).view(self.shape)


class HorovodComm(Comm):
    """Horovod's world. Calls `hvd.init()` unless the script has. Raises CommError if Horovod cannot be used."""

    wire = "horovod"
    _registered: ClassVar[dict[tuple[int, ...], Any]] = {}
    """Process sets by their ranks; Horovod refuses to register the same ranks twice."""

    def __init__(self, deadline: float = DEADLINE) -> None:
        try:
            import horovod.torch as hvd
        except ImportError as error:
            raise CommError(
                f"the script was started by horovodrun, but Horovod cannot be imported ({error}); "
                f"scripts/install_horovod.sh installs it"
            ) from error
        self._hvd = hvd
        if not hvd.is_initialized():
            os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
            os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(max(1, int(deadline))))
            try:
                hvd.init()
            except Exception as error:  # Horovod raises whatever its controller did
                raise CommError(f"Horovod could not start: {error}") from error
            self._registered.clear()
        super().__init__(hvd.rank(), hvd.size(), deadline)
        self._unnamed: dict[tuple[int, ...], int] = {}
        self._registered[tuple(range(hvd.size()))] = hvd.global_process_set
        self._find_nodes()
        self._make_groups()

    def _make_groups(self) -> None:
        """Register a process set for every sub-group; all ranks register all, in the same order."""
        for members in self._subgroups:
            if members in self._registered:
                continue
            try:
                self._registered[members] = self._hvd.add_process_set(list(members))
            except Exception as error:
                raise CommError(
                    f"Horovod refused a process set of ranks {list(members)}, which share a machine or a local rank: "
                    f"set HOROVOD_DYNAMIC_PROCESS_SETS=1 before hvd.init() and do not register the same ranks in the "
                    f"script, or let dgcopt.init() start Horovod ({error})"
                ) from error

    def supports(self, collective: Collective) -> bool:
        if isinstance(collective, AllReduce):
            return collective.tensor.dtype in _REDUCED
        if isinstance(collective, ReduceScatter):
            return collective.tensor.dtype in _REDUCED and collective.op in ("average", "sum")
        return True

    def _start(self, collective: Collective, ranks: tuple[int, ...]) -> Handle:
        hvd, tensor = self._hvd, collective.tensor
        where = self._registered[ranks]
        name = f"dgcopt.{collective.label}"
        if not collective.label:  # Horovod matches by name: number those of each group, whose ranks start them alike
            self._unnamed[ranks] = self._unnamed.get(ranks, 0) + 1
            name += f"{type(collective).__name__} {self._unnamed[ranks]} of ranks {ranks[0]}..{ranks[-1]}"
        dtype, shape = tensor.dtype, tuple(tensor.shape)
        if isinstance(collective, AllReduce):
            op = {"average": hvd.Average, "sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}[collective.op]
            flat = tensor.view(-1)
            handle = hvd.allreduce_async_(flat, name=name, op=op, process_set=where)
        elif isinstance(collective, ReduceScatter):
            op = hvd.Average if collective.op == "average" else hvd.Sum
            handle = hvd.reducescatter_async(tensor, name=name, op=op, process_set=where)
            shape = (shape[0] // len(ranks), *shape[1:])
        else:
            # The rest only moves bytes, so dtypes that Horovod does not know travel as bytes.
            raw = tensor.view(-1) if dtype in _MOVED else tensor.view(-1).view(torch.uint8)
            if isinstance(collective, AllGather):
                handle = hvd.allgather_async(raw, name=name, process_set=where)
                shape = (len(ranks), *shape)
            elif isinstance(collective, AllToAll):
                each = torch.full((len(ranks),), raw.numel() // len(ranks), dtype=torch.int32)
                handle = hvd.alltoall_async(raw, splits=each, name=name, process_set=where)
            elif isinstance(collective, Broadcast):
                # a process set's root is named by its global rank
                handle = hvd.broadcast_async(raw, ranks[collective.root], name=name, process_set=where)
            elif isinstance(collective, SendRecv):
                splits = torch.zeros(len(ranks), dtype=torch.int32)
                if collective.to is not None:
                    splits[collective.to] = raw.numel()
                message = raw if collective.to is not None else raw[:0]
                handle = hvd.alltoall_async(message, splits=splits, name=name, process_set=where)
                if collective.source is None:
                    return _Unchanged(collective, handle, (0,), dtype)
            elif isinstance(collective, Barrier):
                handle = hvd.allreduce_async(torch.zeros(1), name=name, op=hvd.Sum, process_set=where)
                shape = (1,)
                dtype = torch.float32
            else:
                raise CommError(f"Horovod does not have {collective.describe()}")
        return _Pending(collective, handle, shape, dtype)


class _Unchanged(_Pending):
    """A SendRecv that receives nothing: the rank keeps its own tensor."""

    def result(self) -> Tensor:
        super().result()
        return self.collective.tensor
