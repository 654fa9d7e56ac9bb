"""A checksum behind every message, for links, network cards and memory that may flip bits."""

from __future__ import annotations

import zlib
from collections.abc import Generator
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from ..collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Exchange,
    SendRecv,
    bytes_of,
    carried,
    everyone,
    in_memory,
)
from ..errors import PayloadError

__all__ = ["checked"]

_Messages = AllGather | AllToAll | Broadcast | SendRecv
_CRC = 4
WHOLE = ("world", "control", "agreement")
"""Groups of all ranks."""
Result = TypeVar("Result")


def checked(exchange: Generator[Collective, Tensor, Result], rank: int) -> Generator[Collective, Tensor, Result]:
    """Return the exchange with a CRC-32 behind each message of this `rank`, verified on arrival.

    A sum has no sender: after an AllReduce the ranks compare checksums of its result instead, in one more round. A
    ReduceScatter has come as an AllToAll of its summands. Raises PayloadError, naming the sender if there is one.
    """

    def carry(collective: Collective) -> Exchange:
        if isinstance(collective, _Messages):
            return (yield from _sealed(collective, rank))
        result = yield collective
        if isinstance(collective, AllReduce):
            yield from _compare(collective, result, rank)
        return result

    return carried(exchange, carry)


def _sealed(collective: _Messages, rank: int) -> Exchange:
    """Send the collective's tensor as bytes with a checksum behind each message; return the plain result."""
    tensor = collective.tensor
    to_each = isinstance(collective, AllToAll) and tensor.dim() > 0
    messages = in_memory(tensor).view(len(tensor) if to_each else 1, -1).view(torch.uint8)
    sums = torch.stack([_crc(message) for message in messages])
    packed = torch.cat([messages, sums], dim=1)
    sent = replace(collective, tensor=packed if to_each else packed[0])
    arrived = yield sent
    collective.call(sent.label, sent.user)  # its sender may have labelled it
    if isinstance(collective, SendRecv) and collective.source is None:
        return collective.tensor
    rows = arrived.view(-1, packed.shape[1])
    for place, row in enumerate(rows):
        if not torch.equal(_crc(row[:-_CRC]), row[-_CRC:]):
            raise PayloadError(
                f"rank {rank}: {collective.describe()} arrived damaged from {_sender(collective, place, rank)}: its "
                f"bits are not those that were sent, by their CRC-32. Suspect network card, cable or memory of the two "
                f"machines; resume from the last checkpoint"
            )
    leading = (len(rows),) if isinstance(collective, AllGather) else ()
    return rows[:, :-_CRC].reshape(-1).view(tensor.dtype).view(*leading, *tensor.shape)


def _compare(collective: AllReduce, result: Tensor, rank: int) -> Generator[AllGather, Tensor, None]:
    """Raise PayloadError on every rank unless all got the same result."""
    flat = in_memory(result)
    if flat.is_floating_point():
        # which of two NaNs, or of two zeros, survives a sum or a maximum depends on their order
        flat = (flat + 0.0).masked_fill_(flat.isnan(), torch.nan)
    label = f"checksum of {collective.label}" if collective.label else ""
    sums = yield AllGather(_crc(flat.view(torch.uint8)), group=collective.group, label=label)
    ranks = everyone(rank, len(sums)) if collective.group in WHOLE else range(len(sums))
    others = [place for place, row in zip(ranks, sums, strict=True) if not torch.equal(row, sums[0])]
    if others:
        raise PayloadError(
            f"rank {rank}: the result of {collective.describe()} in group {collective.group} is not the same on all "
            f"ranks: its rank(s) {', '.join(map(str, others))} have other bits than its rank {ranks[0]}, by their "
            f"CRC-32. Suspect network card, cable or memory of these machines; resume from the last checkpoint"
        )


def _crc(message: Tensor) -> Tensor:
    """Return the CRC-32 of a row of bytes, as 4 bytes on the row's device."""
    value = zlib.crc32(bytes_of(message))
    return torch.tensor(list(value.to_bytes(_CRC, "little")), dtype=torch.uint8, device=message.device)


def _sender(collective: _Messages, place: int, rank: int) -> str:
    if isinstance(collective, Broadcast):
        place = collective.root
    elif isinstance(collective, SendRecv) and collective.source is not None:
        place = collective.source
    if collective.group in WHOLE:
        return f"rank {everyone(rank, place + 1)[place]}"
    return f"rank {place} of group {collective.group}"
