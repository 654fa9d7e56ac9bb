"""Four ranks on two machines of two: every compressor between them, and every averaging rule, equals its simulation.

So does every way of adding up between all four.

The ranks run on one machine here, and are told that it is two; groups, process sets and communicators are real.
"""

from __future__ import annotations

import functools

import dgcopt
from dgcopt import Comm
from dgcopt.collectives import Link
from dgcopt.compressors import Compressor

from . import algorithms
from .averaging.algorithms import as_simulated_ranks
from .averaging.member import AVERAGED
from .collectives import regrouped

REDUCED: dict[str, Compressor] = {
    f"DGC, {way}": dgcopt.DGC(0.1, values="int2", vectors="int8", reduce=way) for way in ("owner", "partition", "auto")
}
HIERARCHICAL: dict[str, Compressor] = {
    **{
        name: compressor if isinstance(compressor, dgcopt.Hierarchical) else dgcopt.Hierarchical(compressor)
        for name, (compressor, _) in algorithms.LIBRARY.items()
    },
    **{name: dgcopt.Hierarchical(compressor) for name, compressor in REDUCED.items()},
}


@functools.cache
def two_by_two(comm: Comm) -> Comm:
    """The same ranks, the first two of which are on one machine and the others on another, if that is not so already.

    It is where horovodrun was given two host names. The link is said to be so slow that "auto" takes to owners where
    there are more than two, and is not measured, so that bytes can be compared.
    """
    machines = comm if comm.nodes == 2 else regrouped(comm, [0, 0, 1, 1])
    assert (machines.nodes, machines.local_size) == (2, 2)
    machines.link = Link(1e-4, 1e3)
    return machines


def between_machines(name: str, comm: Comm) -> None:
    """Dense inside a machine, compressed between them."""
    _, make = algorithms.LIBRARY.get(name, (None, algorithms.OPTIMIZERS["Nesterov"]))
    algorithms.as_on_simulated_ranks(name, HIERARCHICAL[name], make, two_by_two(comm))


def among_all(name: str, comm: Comm) -> None:
    """Compressed between all ranks, wherever they are."""
    algorithms.as_on_simulated_ranks(name, REDUCED[name], algorithms.OPTIMIZERS["Nesterov"], two_by_two(comm))


def averaged(name: str, comm: Comm) -> None:
    as_simulated_ranks(name, two_by_two(comm))


SCENARIOS = {
    **{f"2 x 2 machines: {name}": functools.partial(between_machines, name) for name in HIERARCHICAL},
    **{f"2 x 2 machines: among all, {name}": functools.partial(among_all, name) for name in REDUCED},
    **{f"2 x 2 machines: {name}": functools.partial(averaged, name) for name in AVERAGED},
}
"""Of four ranks."""
