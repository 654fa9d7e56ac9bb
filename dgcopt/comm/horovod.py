"""The wire of Horovod, under `horovodrun` with its Gloo or MPI controller. Public Horovod functions only."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..collectives import AllGather, AllReduce, AllToAll, Barrier, Broadcast, Collective, Group, ReduceScatter, SendRecv
from ..errors import CommError, ConfigError, DGCError
from .base import DEADLINE, Channel, Comm, RankSet
from .handles import Handle

__all__ = ["HorovodComm", "horovod_torch"]

_REDUCED = (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)
_GLOO_TIMEOUT = 30
"""Seconds after which Horovod has Gloo give up, unless told otherwise."""
_LATER = 5
"""Seconds between dgcopt's deadline, with an error that names the missing rank, and Gloo's, with one that does not.

Gloo counts from the moment at which a rank stalls, dgcopt from the moment at which another rank begins to wait for it.
"""
_MOVED = (*_REDUCED, torch.uint8, torch.int8)


def horovod_torch() -> Any:
    """Import and return `horovod.torch`, at first use. Raises CommError if it cannot be imported."""
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise CommError(f"Horovod cannot be imported ({error}); scripts/install_horovod.sh installs it") from error
    return hvd


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


class _Session:
    """One session of Horovod, from `hvd.init()` to `hvd.shutdown()`."""

    def __init__(self, hvd: Any) -> None:
        self.hvd = hvd
        self.place = (hvd.rank(), hvd.size())
        self.registered: dict[tuple[int, ...], Any] = {}
        """Process sets by their ranks in Horovod's world; Horovod refuses to register the same ranks twice."""
        self.open: set[str] = set()
        """Names of the comms in use. Horovod matches by name, and comms may share a process set."""
        self._mark: int | None = None

    def leave_mark(self) -> None:
        """Start an allreduce without a waiter, for `is_over`: `hvd.shutdown()` drops its handle."""
        if self._mark is None:
            self._mark = self.hvd.allreduce_async(
                torch.zeros(1, dtype=torch.float32, device="cpu"), name="dgcopt", op=self.hvd.Sum
            )

    def is_over(self) -> bool:
        """Return True if Horovod was restarted since, as Horovod Elastic does when workers leave or join."""
        if not self.hvd.is_initialized():
            return False
        if self.place != (self.hvd.rank(), self.hvd.size()):
            return True
        try:
            if self._mark is not None:
                self.hvd.poll(self._mark)
        except ValueError:
            return True
        return False


class HorovodComm(Comm):
    """Horovod's world; `among` makes those of a `process_set`. Calls `hvd.init()` unless the script has.

    Errors of Horovod are raised as a HorovodInternalError too, so that `hvd.elastic.run` restarts it. Under Horovod
    Elastic no collective runs while it is made, and the group of all ranks is the only one. Raises CommError if Horovod
    cannot be used.
    """

    wire = "horovod"
    _latest: ClassVar[_Session | None] = None

    def __init__(self, deadline: float = DEADLINE, process_set: Any = None, name: str = "") -> None:
        hvd = self._hvd = horovod_torch()
        if not hvd.is_initialized():
            os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
            patience = int(deadline) + _LATER
            if not _is_elastic() or patience < _GLOO_TIMEOUT:  # so that a lost worker is noticed soon
                os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(patience))
            try:
                hvd.init()
            except Exception as error:  # Horovod raises its controller's errors
                raise CommError(f"Horovod could not start: {error}") from error
            HorovodComm._latest = None
        if HorovodComm._latest is None or HorovodComm._latest.is_over():
            HorovodComm._latest = _Session(hvd)
        self._session = HorovodComm._latest
        self._patience = float(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", _GLOO_TIMEOUT))
        self._heard = time.monotonic()
        self.elastic = _is_elastic()
        joined = hvd.global_process_set if process_set is None else process_set
        super().__init__(joined.rank(), joined.size(), deadline)
        self._unnamed: dict[Channel, int] = {}
        self._sets: dict[tuple[int, ...], Any] = {self.ranks(): joined}
        self._in_world = tuple(range(hvd.size())) if process_set is None else tuple(process_set.ranks)
        self._name = name or next(str(number) for number in itertools.count() if str(number) not in self._session.open)
        self._session.open.add(self._name)
        self._subsets = 0
        if process_set is None:
            self._session.registered[self.ranks()] = joined
            if self.elastic:
                self.node, self.nodes = self.cross_rank, self.cross_size = hvd.cross_rank(), hvd.cross_size()
                self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
                return
            # with Gloo the name that horovodrun gives, by which Horovod counts local ranks; MPI uses the machine's own
            self._find_nodes(os.environ.get("HOROVOD_HOSTNAME", ""))
            for members in self._subgroups:
                self._sets[members] = self._register(members, list(members))

    def ranks(self, group: Group = "world") -> tuple[int, ...]:
        if self.elastic and group in ("node", "across"):
            raise ConfigError(
                f"rank {self.rank}: Horovod Elastic supports only the group of all ranks, not {group!r}: with process "
                f"sets, Horovod aborts the remaining workers when one dies"
            )
        return super().ranks(group)

    def is_void(self) -> bool:
        return self._session is not HorovodComm._latest or self._session.is_over()

    def _register(self, members: tuple[int, ...], given: Any) -> Any:
        """Return the process set of these ranks, registered if needed; all ranks must call it, in the same order."""
        if getattr(given, "process_set_id", None) is not None:
            self._session.registered[members] = given
        known = self._session.registered.get(members)
        if known is not None and _is_alive(known):
            return known
        try:
            self._session.registered[members] = self._hvd.add_process_set(given)
        except Exception as error:
            raise CommError(
                f"Horovod refused a process set of ranks {list(members)}: set HOROVOD_DYNAMIC_PROCESS_SETS=1 before "
                f"hvd.init(), or let dgcopt.init() start Horovod. If the script has registered the same ranks itself, "
                f"give that ProcessSet to among(); if dgcopt.init() wants them because they share a machine or a "
                f"local rank, do not register them ({error})"
            ) from error
        return self._session.registered[members]

    def _among(self, members: tuple[int, ...], given: Iterable[int] | RankSet) -> Comm | None:
        if self.size < self._hvd.size():
            raise ConfigError(
                f"Horovod registers a process set with all {self._hvd.size()} ranks taking part, and this comm has "
                f"{self.size} of them: ask the comm of all ranks for ranks {[self._in_world[r] for r in members]}"
            )
        if self.elastic and len(members) < self.size:
            raise ConfigError(
                "no group of some ranks under Horovod Elastic: with process sets, Horovod aborts the remaining workers "
                "when one dies. Leave process_set out"
            )
        chosen = self._register(members, given if isinstance(given, self._hvd.ProcessSet) else list(members))
        self._subsets += 1
        return HorovodComm(self.deadline, chosen, f"{self._name}.{self._subsets}") if self.rank in members else None

    def close(self) -> None:
        super().close()
        self._session.open.discard(self._name)

    def _refused(self, collective: Collective, error: Exception) -> DGCError:
        if isinstance(error, ValueError) and "same name" in str(error):  # which would be so again after a restart
            return ConfigError(
                f"rank {self.rank}: {collective.describe()} was started while another of the same name is under way: "
                f"wait for that one, or give this one another name"
            )
        refused = super()._refused(collective, error)
        return self._late_or(refused, collective) if isinstance(refused, CommError) else refused

    def wait(self, handle: Handle, deadline: float | None = None) -> Tensor:
        result = super().wait(handle, deadline)
        self._heard = time.monotonic()
        return result

    def _failed(self, collective: Collective, error: Exception) -> CommError:
        return self._late_or(super()._failed(collective, error), collective)

    def _late_or(self, failed: CommError, collective: Collective) -> CommError:
        """Return the error of dgcopt's deadline where it was Gloo's own timeout, whose error names no rank.

        Told by the time since a collective ended, for which all ranks were there: Horovod's error gives no reason.
        """
        silent = time.monotonic() - self._heard
        if silent < self._patience - 1:
            return failed
        late = self._late(collective, round(silent, 1))
        late.args = (f"{late} Horovod gave up first: {failed}",)
        return late

    def _error(self, kind: type[CommError], message: str) -> CommError:
        return _elastic(kind)(message)  # type: ignore[arg-type]  # mypy finds that types cannot be hashed

    def supports(self, collective: Collective) -> bool:
        if isinstance(collective, AllReduce):
            return collective.tensor.dtype in _REDUCED
        if isinstance(collective, ReduceScatter):
            return collective.tensor.dtype in _REDUCED and collective.op in ("average", "sum")
        return True

    def _start(self, collective: Collective, ranks: tuple[int, ...]) -> Handle:
        if torch.is_inference_mode_enabled():  # Horovod's thread resizes results outside it
            with torch.inference_mode(False), torch.no_grad():
                return self._start(collective, ranks)
        hvd, tensor = self._hvd, collective.tensor
        if self.is_void():
            raise ConfigError(
                f"rank {self.rank}: Horovod was restarted, and {collective.describe()} is for its former {self.size} "
                f"ranks. An optimizer that averages gradients over all ranks rejoins by itself; one that averages "
                f"weights needs dgcopt.elastic.State. Rebuild all other optimizers and comms."
            )
        self._session.leave_mark()
        joined, channel = self._sets[ranks], self._channel(collective.group)
        # the channels of a comm, too, may share a process set
        name = f"dgcopt.{self._name}.{f'{channel}.' if isinstance(channel, str) else ''}{collective.label}"
        if not collective.label:  # number those of each channel: its ranks start them alike
            self._unnamed[channel] = self._unnamed.get(channel, 0) + 1
            name += f"{type(collective).__name__} {self._unnamed[channel]} of ranks {ranks[0]}..{ranks[-1]}"
        dtype, shape = tensor.dtype, tuple(tensor.shape)
        if isinstance(collective, AllReduce):
            op = {"average": hvd.Average, "sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}[collective.op]
            handle = hvd.allreduce_async_(tensor, name=name, op=op, process_set=joined)
        elif isinstance(collective, ReduceScatter):
            op = hvd.Average if collective.op == "average" else hvd.Sum
            handle = hvd.reducescatter_async(tensor, name=name, op=op, process_set=joined)
            shape = (shape[0] // len(ranks), *shape[1:])
        else:
            # The rest only moves bytes, so dtypes that Horovod does not know travel as bytes.
            raw = tensor.view(-1) if dtype in _MOVED else tensor.view(-1).view(torch.uint8)
            if isinstance(collective, AllGather):
                handle = hvd.allgather_async(raw, name=name, process_set=joined)
                shape = (len(ranks), *shape)
            elif isinstance(collective, AllToAll):
                each = torch.full((len(ranks),), raw.numel() // len(ranks), dtype=torch.int32, device="cpu")
                handle = hvd.alltoall_async(raw, splits=each, name=name, process_set=joined)
            elif isinstance(collective, Broadcast):
                # a process set's root is named by its rank in the world
                root = self._in_world[ranks[collective.root]]
                message = tensor if dtype in _MOVED else raw  # in its shape, which Horovod compares
                handle = hvd.broadcast_async(message, root, name=name, process_set=joined)
            elif isinstance(collective, SendRecv):
                splits = torch.zeros(len(ranks), dtype=torch.int32, device="cpu")
                if collective.to is not None:
                    splits[collective.to] = raw.numel()
                message = raw if collective.to is not None else raw[:0]
                handle = hvd.alltoall_async(message, splits=splits, name=name, process_set=joined)
                if collective.source is None:
                    return _Unchanged(collective, handle, (0,), dtype)
            elif isinstance(collective, Barrier):
                shape, dtype = (1,), torch.float32
                one = torch.zeros(1, dtype=dtype, device="cpu")
                handle = hvd.allreduce_async(one, name=name, op=hvd.Sum, process_set=joined)
            else:
                raise CommError(f"Horovod does not have {collective.describe()}")
        return _Pending(collective, handle, shape, dtype)


class _Unchanged(_Pending):
    """A SendRecv that receives nothing: the rank keeps its own tensor."""

    def result(self) -> Tensor:
        super().result()
        return self.collective.tensor


def _is_elastic() -> bool:
    """Return True under Horovod Elastic, which allows no process sets."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def _is_alive(process_set: Any) -> bool:
    """Return True if Horovod still knows a registered process set."""
    try:
        return process_set.size() is not None
    except ValueError:
        return False


@functools.cache
def _elastic(kind: type[CommError]) -> type[CommError]:
    """Return the exception as a subclass of Horovod's own too, which `hvd.elastic.run` catches."""
    from horovod.common.exceptions import HorovodInternalError

    return type(kind.__name__, (kind, HorovodInternalError), {"__module__": kind.__module__})
