"""Messages that arrive with other bytes than were sent, and a bound on the memory that they may cost."""

from __future__ import annotations

import random
import resource
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dgcopt import Comm
from dgcopt.collectives import AllGather, Collective, ReduceScatter, bytes_of
from dgcopt.comm import Finished, Handle

EXTREMES = [
    *(struct.pack("<q", number) for number in (-1, -(2**63), 2**63 - 1, 2**62, 2**40, 2**31, -(2**31), 10**6)),
    *(struct.pack("<i", number) for number in (-1, -(2**31), 2**31 - 1, 65536)),
    *(struct.pack("<f", number) for number in (float("nan"), float("inf"), -3e38, -1.0, 0.0)),
    *(struct.pack("<d", number) for number in (float("nan"), float("inf"), 1e300, 0.0)),
    *(b"[" * 4096, b'{"', b"}", b"null", b"-1", b"9" * 40, b"\xff\xfe", b"\0" * 4096),
]
"""What a length, an index, a scale, a checksum or JSON text is not."""


def damage(tensor: Tensor, rng: random.Random) -> None:
    """Change some bytes of a contiguous message in place: a bit, a byte, a number or up to a thousand."""
    data = memoryview(bytes_of(tensor)).cast("B")
    if not data.nbytes:
        return
    place = rng.randrange(data.nbytes)
    how = rng.randrange(5)
    if how == 0:
        data[place] ^= 1 << rng.randrange(8)
        return
    new = (rng.randbytes(1), rng.choice(EXTREMES), rng.choice(EXTREMES), rng.randbytes(1000))[how - 1]
    if how != 3:
        place -= place % len(new)
    end = min(place + len(new), data.nbytes)
    data[place:end] = new[: end - place]


class Damaged:
    """One message in `every` that ranks receive is damaged while it is `on`; `seen` has the labels of those that were.

    `only` is part of the labels of those that may be.
    """

    def __init__(self, comms: Sequence[Comm], seed: int, every: int, only: str = "") -> None:
        self.rng = random.Random(seed)
        self.every = every
        self.only = only
        self.on = True
        self.seen: list[str] = []
        for comm in comms:
            comm._start = self._receiving(comm._start)  # type: ignore[method-assign]

    def _receiving(self, start: Any) -> Any:
        def starting(collective: Any, ranks: tuple[int, ...]) -> Any:
            handle = start(collective, ranks)
            result = handle.result

            def damaged() -> Tensor:
                tensor = result()
                if self.on and self.only in collective.label and self.rng.randrange(self.every) == 0:
                    self.seen.append(f"{type(collective).__name__} of {collective.label}")
                    damage(tensor, self.rng)
                return tensor

            handle.result = damaged
            return handle

        return starting


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """Within it, to allocate so many bytes more than there are fails, whether they are touched or not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Echo(Comm):
    """Rank 0 of two, of which the other sends what this one does."""

    wire = "echo"

    def __init__(self) -> None:
        super().__init__(0, 2)

    def _start(self, collective: Collective, ranks: tuple[int, ...]) -> Handle:
        tensor = collective.tensor.clone()
        if isinstance(collective, AllGather):
            tensor = torch.stack([tensor, tensor])
        elif isinstance(collective, ReduceScatter):
            tensor = tensor[: len(tensor) // 2]
        return Finished(collective, tensor)

    def _among(self, members: tuple[int, ...], given: Any) -> Comm | None:
        raise NotImplementedError
