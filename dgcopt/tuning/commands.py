"""The command `dgcopt probe`: its arguments and its table."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..comm import init, shutdown
from .probe import probe, save_probe
from .wire import Fitted

__all__ = ["COMMANDS", "add_commands", "run"]

PROBE = """\
Measures every kind of collective in every group of ranks, by size of a rank's message, and fits seconds = alpha + beta
bytes. Start it on all ranks, as a training script:

  torchrun --nproc-per-node 4 -m dgcopt probe --json link.json
"""


def add_commands(commands: Any) -> None:
    """Add the commands to those of `dgcopt`."""
    form = argparse.RawDescriptionHelpFormatter
    probing = commands.add_parser(
        "probe", help="measure latency and bandwidth of every collective", description=PROBE, formatter_class=form
    )
    probing.add_argument("--seconds", type=float, default=8.0, help="time for all measurements (default: 8)")
    probing.add_argument("--deadline", type=float, default=60.0, help="seconds to wait for the other ranks")
    probing.add_argument("--json", type=Path, help="file for the measurements (dgcopt.tuning.probe.load_probe)")


def run(arguments: argparse.Namespace) -> int:
    """Run the command that was given; return the exit status."""
    return COMMANDS[arguments.command](arguments)


def _probe(arguments: argparse.Namespace) -> int:
    """Measure, and print on rank 0."""
    comm = init(deadline=arguments.deadline)
    try:
        found = probe(comm, seconds=arguments.seconds, deadline=arguments.deadline)
        if comm.rank == 0:
            if arguments.json is not None:
                save_probe(found, arguments.json)
            print(probe_table(found))
    finally:
        shutdown()
    return 0


def probe_table(found: Fitted) -> str:
    """Return a line for each collective: its fit, and the bandwidth that this amounts to."""
    lines = [f"{'collective':14} {'group':7} {'ranks':>5} {'alpha, ms':>10} {'ms per MB':>10} {'measured up to':>15}"]
    for (kind, group), one in found.fits.items():
        most = f"{one.sizes[-1] / 1e6:.3g} MB"
        lines.append(f"{kind:14} {group:7} {one.size:5} {1e3 * one.alpha:10.3f} {1e9 * one.beta:10.2f} {most:>15}")
    return "\n".join(lines)


COMMANDS = {"probe": _probe}
"""Commands by name: each takes its arguments and returns the exit status."""
