"""Replica divergence: compares the bits of replicated tensors, and raises, warns or resynchronises."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ..collectives import AllGather, Broadcast, Collective, bytes_of, everyone, in_memory
from ..comm import Comm, current_comm
from ..errors import ConfigError, DivergenceError
from ..flat.gradient import is_finite
from ..kernels import hash_of
from .agreement import compare
from .parameters import LOAD_SHARDS, check_real, named_tensors

__all__ = ["OnDivergence", "check_finite", "check_on_divergence", "check_replicas", "digests", "replicas"]

log = logging.getLogger("dgcopt")

SMALL = 4096
"""Largest tensor, in bytes, that is sent as it is: a hash on its device would take longer."""

LOCAL_STEPS = (
    "local steps of an averaged optimizer that trained these weights before (call averaging.average() of that "
    "optimizer on all ranks, then wrap again), "
)
"""A cause of divergence before the first step."""

OnDivergence: TypeAlias = Literal["raise", "resync", "warn"]


def check_replicas(
    params: Mapping[str, Any] | Iterable[tuple[str, Tensor]],
    on_divergence: OnDivergence = "raise",
    comm: Comm | None = None,
) -> None:
    """Compare tensors over ranks, bit for bit, at 16 bytes on the wire each; collective.

    Args:
        params: maps names to tensors, typically `model.state_dict()`, or lists pairs.
        on_divergence: "raise" DivergenceError on every rank, naming the first tensor that differs and the ranks that do
            not agree with rank 0; "warn": the error is a warning in the log, and tensors stay as they are; or "resync":
            the same warning, and all ranks take rank 0's in place of the tensors that differ.
        comm: the wire; None is that of `dgcopt.init()`.

    Raises MismatchError if ranks give other names, ConfigError for another argument.
    """
    comm = current_comm(comm)
    tensors = named_tensors(params)
    comm.drive(compare([name for name, _ in tensors], comm.rank, "names of tensors"))
    comm.drive(replicas({name: [tensor] for name, tensor in tensors}, comm, None, on_divergence))


def check_on_divergence(on_divergence: Any) -> None:
    """Raise ConfigError for anything but "raise", "resync" and "warn"."""
    if on_divergence not in ("raise", "resync", "warn"):
        raise ConfigError(f'on_divergence must be "raise", "resync" or "warn", not {on_divergence!r}')


def replicas(
    tensors: Mapping[str, Sequence[Tensor]], comm: Comm, step: int | None, on_divergence: OnDivergence
) -> Generator[Collective, Tensor, None]:
    """Compare as `check_replicas`, in an exchange: one digest per name in one message, then the tensors that differ.

    A name stands for a parameter and the state that the optimizer keeps of it, which must be mended together.
    """
    check_on_divergence(on_divergence)
    if not tensors:
        return
    names = list(tensors)
    check_real((name, tensor) for name, group in tensors.items() for tensor in group)
    mine = digests(tensors)
    rows = (yield AllGather(mine.view(-1), group="agreement", label="digests of parameters")).view(
        comm.size, len(names), -1
    )
    differs = (rows != rows[:1]).any(-1)
    if not differs.any():
        return
    first = int(differs.any(0).nonzero()[0])
    ranks = everyone(comm.rank, comm.size)
    others = [ranks[place] for place in differs[:, first].nonzero().flatten().tolist()]
    count = int(differs.any(0).sum())
    when = "" if step is None else f" after step {step}" if step else " before the first step"
    words = (
        f"rank {comm.rank}: replicas have come apart{when}: parameter {names[first]!r} is not the same on rank(s) "
        f"{others} as on rank {ranks[0]} ({count} of {len(names)} parameters differ). Look for weights that were not "
        f"broadcast (dgcopt.broadcast_parameters(model.state_dict(), root_rank=0) before the first step), "
        f"{'' if step else LOCAL_STEPS}random numbers or code that differ over ranks, or a broken machine"
    )
    if on_divergence == "raise":
        call = 'call dgcopt.check_replicas(model.state_dict(), on_divergence="resync") on each'
        remedy = LOAD_SHARDS if comm.joins_replicas else call
        raise DivergenceError(f"{words}. To give all ranks the values of rank {ranks[0]}, {remedy}.")
    if on_divergence == "warn":
        log.warning('dgcopt: %s. Training continues with the difference (on_divergence="warn")', words)
        return
    log.warning("dgcopt: %s; they take over the values of rank %s", words, ranks[0])
    for place in differs.any(0).nonzero().flatten().tolist():
        for tensor in tensors[names[place]]:
            mine = _whole(tensor.detach()).clone()
            received = yield Broadcast(comm.to_wire(mine), label=f"parameter {names[place]}")
            with torch.no_grad():
                tensor.copy_(received if tensor.layout == torch.strided else received.to_sparse(tensor.sparse_dim()))


def check_finite(weights: Mapping[Tensor, str], rank: int, step: int, on_divergence: OnDivergence) -> None:
    """Raise DivergenceError if weights hold NaN or Inf: no step can repair them, and each would be skipped.

    For ranks whose gradients were not finite. A warning instead, if `on_divergence` is "warn".
    """
    bad = [name for param, name in weights.items() if param.numel() and not is_finite(param.detach())]
    if not bad:
        return
    words = (
        f"rank {rank}, step {step}: parameter {bad[0]!r} holds NaN or Inf ({len(bad)} of {len(weights)} parameters "
        f"do), so no further step can be taken. An earlier step brought them: lower the learning rate or clip "
        f"gradients; dgcopt.init(checksums=True) finds damaged sums. Restore all ranks from a checkpoint"
    )
    if on_divergence == "warn":
        log.warning('dgcopt: %s. Training continues (on_divergence="warn")', words)
        return
    raise DivergenceError(f"{words}.")


def digests(tensors: Mapping[str, Sequence[Tensor]]) -> Tensor:
    """Return 16 bytes per name; two ranks share them only if its tensors are equal in every bit, dtype and shape.

    Large tensors are hashed on their device. Each device is read once. Shape `[names, 16]`, uint8, on the CPU.
    """
    parts: dict[torch.device, list[Tensor]] = {}
    for tensor in (each for group in tensors.values() for each in group):
        parts.setdefault(tensor.device, []).append(_summary(tensor))
    read = {device: iter(torch.cat(of).cpu().split([*map(len, of)])) for device, of in parts.items()}
    found = bytearray()
    for group in tensors.values():
        hashed = hashlib.blake2b(digest_size=16)
        for tensor in group:
            hashed.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            hashed.update(bytes_of(next(read[tensor.device])))
        found += hashed.digest()
    return torch.tensor([*found], dtype=torch.uint8).view(-1, 16)


def _summary(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, or 16 bytes of hash if there are many: uint8, flat, on its device."""
    data = in_memory(_whole(tensor.detach())).view(torch.uint8)
    return data if len(data) <= SMALL else hash_of(data).view(torch.uint8)


def _whole(tensor: Tensor) -> Tensor:
    """Return every element: SGD's momentum of a sparse gradient is sparse too, and may hold a row in several parts."""
    return tensor if tensor.layout == torch.strided else tensor.to_dense()
