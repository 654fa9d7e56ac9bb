"""The command `dgcopt`, also `python -m dgcopt`: what there is to choose from.

dgcopt compressors          every compressor with its cost and one line
dgcopt compressors TopK     one of them in full
"""

from __future__ import annotations

import argparse
import inspect
import sys

import torch
from torch import nn

from . import compressors
from .buckets import build_buckets
from .collectives import Collective, watched
from .comm import simulate, simulated_world
from .compressors import Compressor, Context, Encoded, HorovodCompression, Sparse, Wrapper
from .errors import ConfigError

SHAPE = (1000, 1000)
RANKS = 2
FOOTNOTE = """
* sent by one of two machines per step, for a float32 matrix of a million elements, with default settings and after any
  warm-up. Among more machines an allreduce sends up to twice as many, and an allgather as many to each."""
LATE = 10**6  # a step at which every warm-up is over


def library() -> list[type[Compressor]]:
    """Every compressor that comes with dgcopt, by name."""
    public = [getattr(compressors, name) for name in compressors.__all__]
    classes = [thing for thing in public if inspect.isclass(thing) and issubclass(thing, Compressor)]
    to_inherit_from = (Compressor, Encoded, Sparse, Wrapper, HorovodCompression)
    return sorted((kind for kind in classes if kind not in to_inherit_from), key=lambda kind: kind.__name__.lower())


def cost(kind: type[Compressor]) -> tuple[int, int]:
    """Bytes that one of two machines sends for a float32 matrix of a million elements, and in how many collectives.

    With the default settings, once every warm-up is over.
    """
    comms, exchanges = simulated_world(RANKS, nodes=RANKS), []
    sent = [0, 0]

    def count(collective: Collective) -> None:
        sent[0] += collective.sent(comms[0].size_of(collective.group))
        sent[1] += 1

    for rank in range(RANKS):
        param = nn.Parameter(torch.zeros(SHAPE))
        compressor = kind()
        try:
            compressor.attach(torch.optim.SGD([param], lr=0.1))
        except ConfigError:
            compressor.attach(torch.optim.Adam([param]))
        (bucket,) = build_buckets([("matrix", param)], compressor.kind, 2**40, 2**40)
        bucket.fill(0, torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank)))
        context = Context(rank, RANKS, "average", LATE, bucket.kind, bucket.segments, node=rank, nodes=RANKS)
        exchange = compressor.exchange(bucket.grad, context)
        exchanges.append(watched(exchange, count) if rank == 0 else exchange)
    simulate(exchanges, comms)  # type: ignore[arg-type]
    return sent[0], sent[1]


def show(name: str | None) -> int:
    """Print the table, or one compressor's documentation; the exit status."""
    if name is None:
        print(f"{'compressor':16} {'bytes*':>9} {'vs fp32':>8} {'rounds':>6}  what it is")
        for kind in library():
            sent, rounds = cost(kind)
            smaller = f"{4 * SHAPE[0] * SHAPE[1] / sent:.1f}x" if sent else "-"
            line = (inspect.getdoc(kind) or "").splitlines()[0]
            print(f"{kind.__name__:16} {sent:9,} {smaller:>8} {rounds:6}  {line}")
        print(FOOTNOTE)
        return 0
    found = [kind for kind in library() if kind.__name__.lower() == name.lower()]
    if not found:
        print(f"there is no compressor {name!r}: `dgcopt compressors` lists them", file=sys.stderr)
        return 2
    print(f"dgcopt.{found[0].__name__}{inspect.signature(found[0])}\n\n{inspect.getdoc(found[0])}")
    return 0


def main() -> int:
    """Read the command line and do what it says; the exit status."""
    parser = argparse.ArgumentParser(prog="dgcopt", description="Compressed data-parallel training with torch.")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("compressors", help="list compressors with their cost, or show one of them in full")
    listing.add_argument("name", nargs="?", help="a compressor, such as TopK")
    return show(parser.parse_args().name)


if __name__ == "__main__":
    sys.exit(main())
