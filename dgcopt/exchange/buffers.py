"""Synchronisation of a model's buffers, such as BatchNorm statistics."""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..collectives import AllGather, AllReduce, Broadcast, Collective, in_memory
from ..comm import Comm
from ..errors import ConfigError
from ..errors.checks import check_whole
from .agreement import compare
from .held import held

__all__ = ["Buffers", "sync_buffers"]

How: TypeAlias = Literal["broadcast", "mean"]


def sync_buffers(model: nn.Module, optimizer: Optimizer, every: int = 1, how: How = "broadcast") -> None:
    """Keep the buffers of `model` equal on all ranks from now on, like DDP's `broadcast_buffers`.

        optimizer = dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), dgcopt.DGC())
        dgcopt.sync_buffers(model, optimizer)

    Buffers are exchanged in the optimizer's step, after the gradients, for any number of forward passes before it;
    a skipped step exchanges none. If ranks run out of data (`dgcopt.join`, torch's Join), ranks with data send theirs,
    so all end with the buffers of the last rank with data. With `dgcopt.averaging`, buffers are exchanged before the
    weights in rounds at multiples of `every` steps, and in `optimizer.averaging.average()`. All ranks take part, even
    in gossip, for which a larger `every` saves time.

    Args:
        model: the model; all its buffers are exchanged, non-persistent ones too, in the same order on all ranks.
        optimizer: the optimizer of its parameters, from DistributedOptimizer or an averaging algorithm.
        every: steps between exchanges. In between each rank updates its own statistics.
        how: "broadcast" sends the buffers of rank 0, or of the first rank with data. "mean" averages floating-point
            buffers over ranks with data and broadcasts others, such as `num_batches_tracked`. The mean of variances
            ignores the spread of the ranks' means; `torch.nn.SyncBatchNorm` includes it, at an exchange per layer.

    Costs a gather of a byte per rank and the bytes of the buffers: a broadcast of all, or for "mean" an allreduce of
    floating-point buffers and a broadcast of others. Ranks that hold shards of one replica exchange them once more.
    Counted by `optimizer.telemetry`. Before the first step call `dgcopt.broadcast_parameters(model.state_dict())`.

    Raises ConfigError for an optimizer that is not distributed; for AsyncAverage, whose ranks never meet in a step; for
    a model without buffers; and for settings out of range. In the first step: MismatchError on all ranks if buffers or
    settings differ.
    """
    buffers, parts = Buffers(model, every, how), held(optimizer)
    if parts.averaging is None and parts.gradients is None:
        raise ConfigError(
            "sync_buffers takes an optimizer from DistributedOptimizer or an averaging algorithm; "
            "DistributedDataParallel synchronises buffers itself (broadcast_buffers)"
        )
    for part in (parts.averaging, parts.gradients):
        if part is not None:
            part.sync_buffers(buffers)


class Buffers:
    """The buffers of a model, which are exchanged every so many steps; see `dgcopt.sync_buffers`.

    Raises ConfigError for a model without buffers, and for settings out of range.
    """

    def __init__(self, model: nn.Module, every: int, how: How) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"sync_buffers needs the model, an nn.Module, not a {type(model).__name__}")
        if how not in ("broadcast", "mean"):
            raise ConfigError(f'how must be "broadcast" or "mean", not {how!r}')
        self.model = model
        self.every = check_whole(every, "every", 1)
        self.how = how
        self._compared: WeakKeyDictionary[Comm, int] = WeakKeyDictionary()  # membership, by wire
        if not self._found():
            raise ConfigError(
                "the model has no buffers to synchronise. Remove sync_buffers (layer norm and "
                "group norm keep no statistics)"
            )

    def _found(self) -> dict[str, Tensor]:
        """Return all buffers by name, looked up each time, since a module may replace them."""
        return {name: buffer for name, buffer in self.model.named_buffers() if buffer.numel()}

    def exchange(self, comm: Comm, step: int, active: bool) -> Generator[Collective, Tensor, None]:
        """Synchronise the buffers on all ranks of `comm`, if due after `step` steps, from those that are `active`.

        Raises MismatchError, on all ranks, at the first step if their buffers or settings differ.
        """
        found = self._found()
        if self._compared.get(comm) != comm.generation:  # a restarted rank has not compared yet
            lines = [f"buffers: {self.how}, every {self.every} steps"]
            lines += [f"buffer {name}: {buffer.dtype} {tuple(buffer.shape)}" for name, buffer in found.items()]
            yield from compare(lines, comm.rank, "buffers")
            self._compared[comm] = comm.generation
        if step % self.every:
            return
        told = yield AllGather(torch.tensor([active]), group="control", label="ranks with data")
        there = told.flatten().nonzero().flatten().tolist()
        if not there:
            return
        in_shards = comm.size_of("replica") > 1  # ranks of one replica have different data
        averaged = [b for b in found.values() if self.how == "mean" and b.is_floating_point()]
        for dtype in sorted({buffer.dtype for buffer in averaged}, key=str):
            alike = [buffer for buffer in averaged if buffer.dtype == dtype]
            total = torch.cat([b.reshape(-1).to(torch.promote_types(dtype, torch.float32)) for b in alike])
            if not active:
                total.zero_()
            total = (yield AllReduce(comm.to_wire(total), op="sum", label="means of buffers")) / len(there)
            if in_shards:
                total = yield AllReduce(total, op="average", group="replica", label="means over shards")
            _write(alike, total)
        whole = [buffer for buffer in found.values() if all(buffer is not other for other in averaged)]
        if whole:
            sent = torch.cat([in_memory(buffer).view(torch.uint8).to(whole[0].device) for buffer in whole])
            received = yield Broadcast(comm.to_wire(sent), root=there[0], label="buffers")
            if in_shards:
                received = (yield AllGather(received, group="replica", label="buffers of shards"))[0]
            if in_shards or comm.rank != there[0]:
                spans = received.split([buffer.nbytes for buffer in whole])
                for buffer, span in zip(whole, spans, strict=True):
                    buffer.copy_(span.clone().view(buffer.dtype).view(buffer.shape))


def _write(buffers: list[Tensor], values: Tensor) -> None:
    """Cut a flat tensor into buffers."""
    for buffer, value in zip(buffers, values.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(value.view(buffer.shape))
