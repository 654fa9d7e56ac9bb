"""Transfer of bytes in pieces, so that a false length from another rank costs no memory."""

from __future__ import annotations

from collections.abc import Callable, Generator

from torch import Tensor

from ..collectives import Collective, bytes_of

__all__ = ["PIECE", "in_pieces"]

PIECE = 2**24
"""Largest number of bytes that are allocated before they arrive."""


def in_pieces(
    nbytes: int, senders: int, send: Callable[[int, int], Collective]
) -> Generator[Collective, Tensor, list[bytearray]]:
    """Receive `nbytes` from each of `senders` ranks, and return them by sender.

    `send(start, stop)` returns the collective that brings bytes `start` to `stop`. All ranks must give one `nbytes`.
    """
    received = [bytearray() for _ in range(senders)]
    step = max(1, PIECE // senders)
    for start in range(0, nbytes, step):
        rows = yield send(start, min(start + step, nbytes))
        for data, row in zip(received, rows.reshape(senders, -1), strict=True):
            data += bytes_of(row)
    return received
