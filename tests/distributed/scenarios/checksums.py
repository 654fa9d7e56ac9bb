"""With checksums every collective is what it was without, and a flipped bit is found and names who sent it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import dgcopt
from dgcopt import Comm, PayloadError
from dgcopt.collectives import AllGather, AllReduce, AllToAll, Barrier, Broadcast, Collective, SendRecv

from .collectives import all_collectives


@contextmanager
def checksums(comm: Comm) -> Iterator[None]:
    comm.checksums = True
    try:
        yield
    finally:
        comm.checksums = False


def clean(comm: Comm) -> None:
    """Every collective for every dtype; a subset has the checksums of its parent."""
    with checksums(comm):
        all_collectives(comm)
        subset = comm.among(range(comm.size))
        assert subset.checksums and subset.run(AllGather(torch.tensor([comm.rank]))).flatten()[-1] == comm.size - 1


def flip(tensor: Tensor) -> None:
    tensor.view(-1).view(torch.uint8)[5] ^= 1


def a_damaged_message_names_its_sender(comm: Comm) -> None:
    """The last rank's messages lose a bit on their way; those who get them say so, and all others go on."""
    size, me, bad = comm.size, comm.rank, comm.size - 1
    everyone, first = range(size), [0]
    cases: list[tuple[Collective, Any]] = [
        (AllGather(torch.ones(3), label="gathered"), everyone),
        (Broadcast(torch.ones(3), root=bad, label="spread"), everyone),
        (AllToAll(torch.ones(size, 3), label="swapped"), first),  # the bit is in the row of rank 0
        (SendRecv(torch.ones(3), to=(me + 1) % size, source=(me - 1) % size, label="passed"), first),
    ]
    start = comm.start

    def damage(collective: Collective) -> Any:
        if me == bad and collective.tensor.numel():
            flip(collective.tensor)
        return start(collective)

    for collective, affected in cases:
        comm.start = damage  # type: ignore[method-assign]
        said = ""
        try:
            with checksums(comm):
                comm.run(collective)
        except PayloadError as error:
            said = str(error)
        finally:
            del comm.start  # type: ignore[method-assign]
        assert bool(said) == (me in affected), f"rank {me} said {said!r} of {collective.describe()}"
        for words in (f"rank {me}: {collective.describe()}", f"from rank {bad}") if said else ():
            assert words in said, said
        comm.run(Barrier())


def a_flipped_bit_in_a_parameter_that_is_broadcast_is_found(comm: Comm) -> None:
    start, bad = comm.start, comm.size - 1

    def damage(collective: Collective) -> Any:
        if comm.rank == bad and isinstance(collective, Broadcast):
            flip(collective.tensor)
        return start(collective)

    comm.start = damage  # type: ignore[method-assign]
    try:
        with checksums(comm):
            dgcopt.broadcast_parameters({"weight": torch.ones(3)}, root_rank=bad, comm=comm)
    except PayloadError as error:
        assert f"parameter weight arrived damaged from rank {bad}" in str(error), error
    else:
        raise AssertionError(f"rank {comm.rank} did not notice")
    finally:
        del comm.start  # type: ignore[method-assign]
        comm.run(Barrier())


def a_sum_that_differs_is_found_by_all(comm: Comm) -> None:
    wait = comm.wait

    def damage(handle: Any, deadline: float | None = None) -> Tensor:
        result = wait(handle, deadline)
        if comm.rank == comm.size - 1 and isinstance(handle.collective, AllReduce):
            flip(result)
        return result

    comm.wait = damage  # type: ignore[method-assign]
    try:
        with checksums(comm):
            comm.run(AllReduce(torch.ones(4), label="sums"))
    except PayloadError as error:
        assert f"rank {comm.rank}: the result of AllReduce" in str(error), error
        assert f"rank(s) {comm.size - 1} have other bits" in str(error), error
    else:
        raise AssertionError(f"rank {comm.rank} did not notice")
    finally:
        del comm.wait  # type: ignore[method-assign]


SCENARIOS: dict[str, Callable[[Comm], Any]] = {
    f"checksums: {function.__name__}": function
    for function in (
        clean,
        a_damaged_message_names_its_sender,
        a_flipped_bit_in_a_parameter_that_is_broadcast_is_found,
        a_sum_that_differs_is_found_by_all,
    )
}
