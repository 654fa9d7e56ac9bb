"""The command `dgcopt`, also `python -m dgcopt`: lists compressors and averaging, shows the environment, starts ranks.

dgcopt compressors          every compressor with its cost and one line
dgcopt compressors TopK     one of them in full
dgcopt averaging            every algorithm that averages weights periodically, with one line
dgcopt averaging SlowMo     one of them in full
dgcopt env                  versions, wires and kernels in use here, for a bug report
dgcopt run -np 4 train.py     start a script on several ranks, by torchrun, horovodrun, mpirun or srun
dgcopt probe                latency and bandwidth of every collective between the ranks that a launcher has started
dgcopt advise               whether compression pays for a model on a network, predicted without it
dgcopt doctor               the same on the ranks that a launcher has started, everything measured
dgcopt report runs/a runs/b one HTML page about runs of train.py
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import os
import pkgutil
import platform
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from . import (
    Averaging,
    CommError,
    Compressor,
    ConfigError,
    Context,
    __version__,
    averaging,
    compressors,
    kernels,
    launcher,
    simulate,
    simulated_world,
)
from .collectives import Collective, watched
from .compressors import Encoded, HorovodCompression, Memory, Place, ScheduledRatio, Sparse, Wrapper
from .flat.buckets import build_buckets
from .flat.gradient import GradientBucket
from .tuning import commands as tuning

SHAPE = (1000, 1000)
RANKS = 2
FOOTNOTE = """
* sent by one of two machines per step, for a float32 matrix of a million elements, with default settings and after any
  warm-up. Among more machines an allreduce sends up to twice as many, and an allgather as many to each."""
LATE = 10**6  # a step at which every warm-up is over


def library() -> list[type[Compressor]]:
    """Return every compressor that comes with dgcopt, by name."""
    public = [getattr(compressors, name) for name in compressors.__all__]
    classes = [thing for thing in public if inspect.isclass(thing) and issubclass(thing, Compressor)]
    to_inherit_from = (Compressor, Encoded, ScheduledRatio, Sparse, Wrapper, HorovodCompression)
    return sorted((kind for kind in classes if kind not in to_inherit_from), key=lambda kind: kind.__name__.lower())


def cost(kind: type[Compressor]) -> tuple[int, int]:
    """Return the bytes that one of two machines sends for a float32 matrix of a million elements, and its collectives.

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
        (bucket,) = build_buckets([("matrix", param)], compressor.kind, 2**40, 2**40, None, GradientBucket)
        bucket.fill([0], [torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank))])
        place = Place(rank, RANKS, "average", LATE, bucket.kind, bucket.segments, node=rank, nodes=RANKS)
        context = Context(place, Memory(bucket.segments))
        exchange = compressor.exchange(bucket.grad, context)
        exchanges.append(watched(exchange, count) if rank == 0 else exchange)
    simulate(exchanges, comms)  # type: ignore[arg-type]
    return sent[0], sent[1]


def algorithms() -> list[type[Averaging]]:
    """Return every averaging algorithm that comes with dgcopt, by name."""
    public = [getattr(averaging, name) for name in averaging.__all__]
    classes = [thing for thing in public if inspect.isclass(thing) and issubclass(thing, Averaging)]
    return sorted((kind for kind in classes if kind is not Averaging), key=lambda kind: kind.__name__.lower())


def list_compressors() -> None:
    """Print a line for each, with its cost."""
    print(f"{'compressor':16} {'bytes*':>9} {'vs fp32':>8} {'rounds':>6}  description")
    for kind in library():
        sent, rounds = cost(kind)
        smaller = f"{4 * SHAPE[0] * SHAPE[1] / sent:.1f}x" if sent else "-"
        print(f"{kind.__name__:16} {sent:9,} {smaller:>8} {rounds:6}  {first_line(kind)}")
    print(FOOTNOTE)


def list_algorithms() -> None:
    """Print a line for each."""
    for kind in algorithms():
        print(f"{kind.__name__:26} {first_line(kind)}")


def show_environment() -> int:
    """Print versions, wires and kernels in use here; return the exit status."""
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    wires = {"torch": "torch", "horovod": "horovod", "mpi": "mpi4py"}
    here = [wire for wire, module in wires.items() if importlib.util.find_spec(module) is not None]
    try:
        loops, status = kernels.in_use(), 0
    except ConfigError as error:
        loops, status = f"none: {error}", 2
    if torch.cuda.is_available():
        loops += f"; on CUDA {'triton' if kernels.has_triton() else 'torch'}"
    rows = {
        "dgcopt": __version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": f"{torch.__version__}, {torch.get_num_threads()} thread(s), CUDA device: {cuda}",
        "kernels": loops,
        "wires": ", ".join(here),
        "settings": ", ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("DGCOPT_")) or "none",
    }
    for name, value in rows.items():
        print(f"{name:9} {value}")
    return status


def first_line(kind: type) -> str:
    """Return the first line of a class's docstring."""
    return (inspect.getdoc(kind) or "").splitlines()[0]


def show(kinds: Sequence[type], name: str, base: type, command: str) -> int:
    """Print the documentation of one of them, or of the user's subclass `module.Class` of `base`; return the status."""
    named: Any = {kind.__name__.lower(): kind for kind in kinds}.get(name.lower())
    place = f"dgcopt.{named.__name__}" if named else name
    if named is None and "." in name:
        sys.path.insert(0, "")  # the user's modules here, as for `python -m`
        try:
            named = pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{name!r} cannot be imported: {error}") from error
    if not (inspect.isclass(named) and issubclass(named, base)):
        raise ConfigError(
            f"there is no {base.__name__} {name!r}: `dgcopt {command}` lists all. Name a class of your own with its "
            f"module: `dgcopt {command} my_module.MyClass`."
        )
    _, *settings = inspect.signature(named.__init__, eval_str=True).parameters.values()
    signature = inspect.Signature(settings if named.__init__ is not object.__init__ else [])
    print(f"{place}{signature}\n\n{inspect.getdoc(named)}")
    return 0


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="dgcopt", description="Compressed data-parallel training with torch.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("compressors", help="list compressors with their cost, or show one of them in full")
    listing.add_argument("name", nargs="?", help="a compressor, such as TopK or my_module.MyCompressor")
    listing = commands.add_parser("averaging", help="list algorithms that average weights, or show one of them in full")
    listing.add_argument("name", nargs="?", help="an algorithm, such as SlowMo or my_module.MyAveraging")
    commands.add_parser("env", help="show versions, wires and kernels in use here")
    launcher.add_arguments(
        commands.add_parser("run", help="start a script on several ranks, here or on other machines")
    )
    tuning.add_commands(commands)
    arguments = parser.parse_args()
    try:
        if arguments.command in tuning.COMMANDS:
            status = tuning.run(arguments)
        else:
            status = launcher.launch(arguments) if arguments.command == "run" else answer(arguments)
        sys.stdout.flush()
    except (ConfigError, CommError) as error:
        print(f"dgcopt {arguments.command}: {' '.join(str(error).split())}", file=sys.stderr)
        status = 2
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    return status


def answer(arguments: argparse.Namespace) -> int:
    """Print the answer to a command; return the exit status."""
    if arguments.command == "env":
        return show_environment()
    if arguments.name is not None:
        kinds, base = (library(), Compressor) if arguments.command == "compressors" else (algorithms(), Averaging)
        return show(kinds, arguments.name, base, arguments.command)
    list_compressors() if arguments.command == "compressors" else list_algorithms()
    return 0


if __name__ == "__main__":
    sys.exit(main())
