"""Four ranks on two machines of two: every compressor between them, and every averaging rule, equals its simulation.

The ranks run on one machine here, and are told that it is two; groups, process sets and communicators are real.
"""

from __future__ import annotations

import functools

import dgcopt
from dgcopt import Comm
from dgcopt.compressors import Compressor

from . import algorithms, averaging
from .collectives import regrouped

HIERARCHICAL: dict[str, Compressor] = {
    **{
        name: compressor if isinstance(compressor, dgcopt.Hierarchical) else dgcopt.Hierarchical(compressor)
        for name, (compressor, _) in algorithms.LIBRARY.items()
    },
    "DGC, owner": dgcopt.Hierarchical(dgcopt.DGC(0.1, values="int2", reduce="owner")),
}


@functools.cache
def two_by_two(comm: Comm) -> Comm:
    """The same ranks, the first two of which are on one machine and the others on another, if that is not so already.

    It is where horovodrun was given two host names.
    """
    machines = comm if comm.nodes == 2 else regrouped(comm, [0, 0, 1, 1])
    assert (machines.nodes, machines.local_size) == (2, 2)
    return machines


def between_machines(name: str, comm: Comm) -> None:
    """Dense inside a machine, compressed between them."""
    _, make = algorithms.LIBRARY.get(name, (None, algorithms.OPTIMIZERS["Nesterov"]))
    algorithms.as_on_simulated_ranks(name, HIERARCHICAL[name], make, two_by_two(comm))


def averaged(name: str, comm: Comm) -> None:
    averaging.as_simulated_ranks(name, two_by_two(comm))


SCENARIOS = {
    **{f"2 x 2 machines: {name}": functools.partial(between_machines, name) for name in HIERARCHICAL},
    **{f"2 x 2 machines: {name}": functools.partial(averaged, name) for name in averaging.AVERAGED},
}
"""Of four ranks."""
