"""Processes in the places of a network, one for each rank, that carry out commands of the process that started them.

    with Namespaces(2) as network, Ranks(["rank.py"], network) as ranks:  # rank.py calls serve(Rank)
        seconds = ranks.call("steps", 10)  # the results of Rank.steps(10), which all ranks run at the same time

Each is in a network namespace of its own, or, without root, shares the loopback interface.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from links import Loopback

__all__ = ["PATIENCE", "Ranks", "note", "serve"]

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = timedelta(seconds=300)


def serve(make: Callable[[], object]) -> None:
    """Carry out the commands of standard input, one line each."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print, too
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=PATIENCE)
    rank = make()
    print(json.dumps("ready"), file=replies)
    for line in sys.stdin:
        name, *values = json.loads(line)
        print(json.dumps(getattr(rank, name)(*values)), file=replies)


class Ranks:
    """The processes of all ranks, in their places: each runs a script with these arguments."""

    def __init__(self, words: Sequence[str], network: Loopback) -> None:
        self.words, self.network = words, network
        self.processes: list[subprocess.Popen[str]] = []
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed when the block ends

    def __enter__(self) -> Ranks:
        try:
            port = self.network.port()
            for rank in range(self.network.size):
                place = self.network.environment(rank, port) | {"PYTHONPATH": str(ROOT)}
                place |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
                process = subprocess.Popen(
                    [*self.network.enter(rank), sys.executable, *self.words],
                    env={**os.environ, **place},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self.errors,
                    text=True,
                    start_new_session=True,  # as torchrun does
                )
                self.processes.append(process)
            self.replies()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # a line that the rank did not live to read
                    pipe.close()
        self.errors.close()

    def replies(self) -> list[Any]:
        """Return the next reply of each rank. Raises RuntimeError with the last errors if one has ended instead."""
        lines = [process.stdout.readline() for process in self.processes if process.stdout is not None]
        if not all(lines):
            self.errors.seek(0)
            raise RuntimeError(f"rank {lines.index('')} ended:\n{self.errors.read()[-3000:].strip()}")
        return [json.loads(line) for line in lines]

    def call(self, *words: Any) -> list[Any]:
        """Have all ranks carry out one command; return their results."""
        for process in self.processes:
            print(json.dumps(words), file=process.stdin, flush=True)
        return self.replies()


def note(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
