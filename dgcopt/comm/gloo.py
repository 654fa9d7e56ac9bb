"""Collectives over Gloo groups that are made by hand, for ranks that may change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

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
from ..errors import CommError, ConfigError
from .base import Channel, Comm, RankSet
from .handles import Handle
from .torch import MOVED, REDUCE, REDUCED, ProcessGroupComm, Works, tells_all

__all__ = ["GlooComm"]


class GlooComm(ProcessGroupComm):
    """Collectives over hand-made Gloo groups; CUDA tensors travel through the host."""

    def __init__(self, rank: int, size: int, deadline: float, groups: dict[Channel, Any]) -> None:
        super().__init__(rank, size, deadline)
        self._groups = groups

    def supports(self, collective: Collective) -> bool:
        if isinstance(collective, ReduceScatter):
            return False
        return not isinstance(collective, AllReduce) or collective.tensor.dtype in REDUCED

    def _start(self, collective: Collective, ranks: tuple[int, ...]) -> Handle:
        group, tensor, size = self._groups.get(self._channel(collective.group)), collective.tensor, len(ranks)
        if group is None:
            raise CommError(f"rank {self.rank}: the group of {collective.describe()} is closed")
        tensor = tensor.cpu()
        if tensor.dtype not in MOVED and not isinstance(collective, AllReduce):
            tensor = tensor.view(-1).view(torch.uint8)
        divide_by = size if getattr(collective, "op", None) == "average" else 1
        output, to_all = tensor, tells_all(collective, size)
        works: list[dist.Work] = []
        if to_all:
            copies = tensor.view(-1).view(torch.uint8).repeat(size)
            output = tensor.new_empty(size, *tensor.shape)
            works.append(group.alltoall_base(output.view(-1).view(torch.uint8), copies, [], []))
        elif isinstance(collective, AllReduce):
            reducing = dist.AllreduceOptions()
            reducing.reduceOp = dist.ReduceOp(REDUCE[collective.op])
            works.append(group.allreduce([tensor], reducing))
        elif isinstance(collective, AllGather):
            output = tensor.new_empty(size, *tensor.shape)
            works.append(group.allgather([list(output.unbind(0))], [tensor]))
        elif isinstance(collective, AllToAll):
            output = torch.empty_like(tensor)
            works.append(group.alltoall_base(output, tensor, [], []))
        elif isinstance(collective, Broadcast):
            sending = dist.BroadcastOptions()
            sending.rootRank = collective.root
            works.append(group.broadcast([tensor], sending))
        elif isinstance(collective, SendRecv):
            if collective.source is not None:
                output = torch.empty_like(tensor)
                works.append(group.recv([output], collective.source, 0))
            if collective.to is not None:
                works.append(group.send([tensor], collective.to, 0))
        elif isinstance(collective, Barrier):
            works.append(group.barrier())
        else:
            raise CommError(f"torch.distributed does not have {collective.describe()}")
        return Works(collective, works, output, divide_by, to_all)

    def _among(self, members: tuple[int, ...], given: Iterable[int] | RankSet) -> Comm | None:
        raise ConfigError(
            "dgcopt.init(survive=True) has no groups of some ranks, as process_set= and AsyncAverage need: leave "
            "survive=True or the group out"
        )
