"""Seconds to a loss where one rank is slower than the others, for dense training and for what waits less.

    python scripts/bench_straggler.py                                   # as root: 4 ranks, 1 Gbit/s, 5 ms
    python scripts/bench_straggler.py --delays 0 --methods none async --steps 100

Every rank is a process in a network namespace of its own, joined by links of a rate and a latency; from one rank to
another takes `--delays` milliseconds. Models are small, so a rank sleeps until its forward and backward pass has taken
`--compute` milliseconds, as if it were computed elsewhere, and three times as long where it straggles: "nobody" does,
"one" always the same rank, or "anyone" one rank per step, another each time. Ranks take as many steps each. Measured is
how long rank 0, never the slow one, takes to weights whose test loss is `--target`; looking at them is not counted.
Methods are files of configs/averaging or configs/compressors, with settings after a colon.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_library import batches, evaluate, settings_of
from links import Namespaces, lacking
from torch import nn

import dgcopt
from train import cross_entropy

METHODS = ["none", "local_sgd:every=8", "sgp", "decentralized", "decentralized:peers=shift_one", "async:interval=0.1"]
STRAGGLERS = ("nobody", "one", "anyone")
SLOWER = 3
EVERY = 5  # steps between one look at the weights and the next
PATIENCE = timedelta(seconds=300)


def straggles(who: str, rank: int, size: int, step: int) -> bool:
    """Whether this is the slow rank of this step."""
    if who == "anyone":
        return int(torch.randint(size, (), generator=torch.Generator().manual_seed(step))) == rank
    return who == "one" and rank == size - 1


def serve(arguments: argparse.Namespace, method: str, who: str) -> None:
    """One rank: train, and on rank 0 print what the weights were worth at which time."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=PATIENCE)
    comm = dgcopt.init()
    torch.manual_seed(arguments.seed)
    settings = settings_of(arguments.task, method)
    model, steps = settings["model"], arguments.steps
    optimizer = settings["optimizer"](model.parameters())
    if settings["averaging"] is not None:
        settings["averaging"].attach(optimizer, model.named_parameters())
    else:
        dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), settings["compressor"])
    lr, looks = optimizer.param_groups[0]["lr"] * (comm.size if settings["scale_lr"] else 1), []
    dist.barrier()
    start = time.monotonic()
    for step, (inputs, targets) in enumerate(
        batches(settings["train_data"], arguments.batch_size, steps, arguments.seed + 1000 * (comm.rank + 1))
    ):
        began = time.monotonic()
        optimizer.param_groups[0]["lr"] = lr * min(1.0, 10 * (step + 1) / steps)
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        slower = SLOWER if straggles(who, comm.rank, comm.size, step) else 1
        time.sleep(max(0.0, began + slower * arguments.compute / 1e3 - time.monotonic()))
        optimizer.step()
        if comm.rank == 0 and step % EVERY == EVERY - 1:
            looks.append((time.monotonic() - start, nn.utils.parameters_to_vector(model.parameters()).detach()))
    took = time.monotonic() - start
    dgcopt.shutdown()
    if comm.rank == 0:
        curve = []
        for seconds, weights in looks:
            nn.utils.vector_to_parameters(weights, model.parameters())
            curve.append((seconds, evaluate(model, settings["test_data"])["test_loss"]))
        print(json.dumps({"seconds": took, "curve": curve}))


def train(network: Namespaces, arguments: argparse.Namespace, method: str, who: str) -> dict[str, Any]:
    """What rank 0 says of a run among the ranks of a network; RuntimeError with what they said if one failed."""
    port, processes = network.port(), []
    with contextlib.ExitStack() as stack:
        for rank in range(network.size):
            place = network.environment(rank, port) | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            place["PYTHONPATH"] = os.pathsep.join(sys.path)
            command = [*network.enter(rank), sys.executable, __file__, *sys.argv[1:], "--serve", method, who]
            process = subprocess.Popen(
                command, env={**os.environ, **place}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        said = [process.communicate() for process in processes]
    for rank, (process, (_, errors)) in enumerate(zip(processes, said, strict=True)):
        if process.returncode:
            raise RuntimeError(f"{method}: rank {rank} ended with {process.returncode}:\n{errors[-3000:]}")
    return json.loads(said[0][0].splitlines()[-1])


def seconds_to(target: float, run: dict[str, Any]) -> str:
    """When the loss was first so low; and that it never was, with the lowest."""
    for seconds, loss in run["curve"]:
        if loss <= target:
            return f"{seconds:.1f}"
    return f"not in {run['seconds']:.0f} ({min(loss for _, loss in run['curve']):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--link", default="1gbit", help="rate as tc writes it")
    parser.add_argument("--delays", nargs="+", type=float, default=[5.0], help="milliseconds from a rank to another")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--compute", type=float, default=30.0, help="milliseconds of a forward and backward pass")
    parser.add_argument("--target", type=float, default=0.2, help="test loss")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(arguments, *arguments.serve)
    if reason := lacking():
        sys.exit(f"links with latency need network namespaces, and {reason}")

    records = []
    for delay in arguments.delays:
        print(f"\n**{arguments.ranks} ranks, {arguments.link}, {delay:g} ms from one to another**\n")
        print(f"| seconds to a loss of {arguments.target:g}; of {arguments.steps} steps | ", end="")
        print(" | ".join(f"{who} straggles" for who in STRAGGLERS) + " |\n" + "|---" * (1 + len(STRAGGLERS)) + "|")
        with Namespaces(arguments.ranks, delay / 2) as network:
            network.shape(arguments.link)
            for method in arguments.methods:
                cells = []
                for who in STRAGGLERS:
                    run = train(network, arguments, method, who)
                    records.append({"delay": delay, "method": method, "who": who, **run})
                    cells.append(f"{seconds_to(arguments.target, run)}; {run['seconds']:.1f}")
                print(" | ".join([f"| {method}", *cells]) + " |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(records))


if __name__ == "__main__":
    main()
